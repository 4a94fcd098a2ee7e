"""A server that runs: its /metrics over a window, /version and /v1/models. No load, nothing changed.

Each read of /metrics costs the server some milliseconds of CPU, so there are few: two, and two more in a window of 45 s
or longer, without which a burst and a shortage look the same. Compression would be the server's work, so none is asked.
"""

import time
from collections.abc import Callable
from urllib.parse import urlsplit

import httpx
import msgspec

from kvtrial.record.errors import UnusableInput

MOST_BYTES = 64 * 2**20
LEAST_SECONDS_FOR_FOUR_READS = 45.0
_TIMEOUT_SECONDS = 10.0
MOST_SECONDS_A_PAGE = 30.0
"""For a whole page: a server that sends a byte now and then keeps within every single time-out."""


class NoAnswer(UnusableInput):
    """A server did not answer at all."""


class Seen(msgspec.Struct, frozen=True):
    """What a live server answered. `interval_seconds`: between pages, as measured."""

    pages: list[tuple[str, str]]
    interval_seconds: float
    version: str | None
    models: list[str] | None
    notes: list[str]


def reads_for(window_seconds: float) -> int:
    """How many pages a window gets."""
    return 4 if window_seconds >= LEAST_SECONDS_FOR_FOUR_READS else 2


def watch(
    url: str,
    window_seconds: float,
    reads: int | None = None,
    sleep: Callable[[float], None] = time.sleep,
    transport: httpx.BaseTransport | None = None,
    api_key: str | None = None,
) -> Seen:
    """Read a server over a window. Raises UnusableInput where it does not answer or `url` is no address."""
    base = base_of(url)
    count = reads or reads_for(window_seconds)
    step = window_seconds / (count - 1)
    notes: list[str] = []
    headers = {"accept-encoding": "identity", "user-agent": "kvtrial-observe"}
    with httpx.Client(timeout=_TIMEOUT_SECONDS, headers=headers, transport=transport, trust_env=False) as client:
        pages = [("page 1", _page(client, base))]
        version = _version(client, base, notes)
        models = _models(client, base, api_key, notes)
        began = time.monotonic()
        for number in range(1, count):
            # To the second of the plan, not after the last answer: a slow page must not stretch the window.
            sleep(max(0.0, began + number * step - time.monotonic()))
            try:
                pages.append((f"page {number + 1}", _page(client, base)))
            except NoAnswer as error:
                later = time.monotonic() - began
                raise NoAnswer(
                    f"{base} answered at the start ({number} of {count} pages) and not {later:.0f} s later, so it "
                    f"died, was stopped or hangs within the window: {error}"
                ) from None
        took = time.monotonic() - began
    interval = step if transport is not None else took / (count - 1)
    return Seen(pages, round(interval, 3), version, models, notes)


def base_of(url: str) -> str:
    """`http://host:port` of an address with or without scheme and /metrics. Raises UnusableInput."""
    given = url if "://" in url else f"http://{url}"
    parts = urlsplit(given)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise UnusableInput(f"--url {url!r} is no address of a server; give one such as http://127.0.0.1:8000.")
    path = parts.path.rstrip("/").removesuffix("/metrics").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{path}"


def _page(client: httpx.Client, base: str) -> str:
    address = f"{base}/metrics"
    began = time.monotonic()
    try:
        with client.stream("GET", address) as response:
            body = bytearray()
            for part in response.iter_bytes():
                body += part
                if time.monotonic() - began > MOST_SECONDS_A_PAGE:
                    raise NoAnswer(
                        f"{address} has sent {len(body)} bytes in {MOST_SECONDS_A_PAGE:g} s and not the whole page; is "
                        "the server overloaded or stuck? Its log says more (--log FILE)."
                    )
                if len(body) > MOST_BYTES:
                    raise UnusableInput(
                        f"{address} sends more than {MOST_BYTES // 2**20} MiB; a vLLM server's page has some hundred "
                        "kilobytes. Give the server's own address."
                    )
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise NoAnswer(
            f"{address} does not answer ({reason}); is the server up and is this its address? Its log says more "
            "(--log FILE)."
        ) from None
    if response.status_code != 200:
        raise UnusableInput(
            f"{address} answers {response.status_code}, not 200 ({len(body)} bytes, begins "
            f"{bytes(body[:40]).decode('utf-8', 'replace')!r}); give the server's own address."
        )
    return body.decode("utf-8", "replace")


def _version(client: httpx.Client, base: str, notes: list[str]) -> str | None:
    try:
        answer = client.get(f"{base}/version")
        said = answer.json().get("version") if answer.status_code == 200 else None
    except (httpx.HTTPError, ValueError, AttributeError):
        said = None
    if not isinstance(said, str):
        notes.append("/version did not answer; the version is taken from what the page exports.")
        return None
    return said


def _models(client: httpx.Client, base: str, api_key: str | None, notes: list[str]) -> list[str] | None:
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = client.get(f"{base}/v1/models", headers=headers)
        if answer.status_code == 401:
            notes.append("/v1/models asks for a key; /metrics does not.")
            return None
        return [str(model["id"]) for model in answer.json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        notes.append("/v1/models did not answer as expected.")
        return None
