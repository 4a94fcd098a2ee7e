"""What must hold before load is sent. Each refusal is one sentence: the value, what is allowed, what to do."""

import ipaddress
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import SplitResult, urlsplit

from kvtrial.record.errors import UnusableInput
from kvtrial.record.load import LoadSpec, RequestSpec

_SPARE_DESCRIPTORS = 64


def check_spec(spec: LoadSpec) -> list[tuple[str, int]]:
    """The addresses to connect to. Raises UnusableInput for a specification that cannot be run."""
    addresses = [_loopback_address(url) for url in spec.urls()]
    if spec.concurrency is not None and spec.concurrency < 1:
        raise UnusableInput(
            f"concurrency={spec.concurrency} sends nothing; give at least 1, or none for an open loop by "
            "scheduled_seconds."
        )
    for name in ("idle_timeout_seconds", "request_timeout_seconds", "deadlock_seconds"):
        if not getattr(spec, name) > 0:
            raise UnusableInput(f"{name}={getattr(spec, name)} ends every request at once; give a number above 0.")
    return addresses


def check_request(request: RequestSpec, *, open_loop: bool) -> None:
    """Raise UnusableInput for a request that cannot be sent."""
    name = f"request {request.key!r}"
    if (request.prompt_token_ids is None) == (request.prompt_text is None):
        raise UnusableInput(f"{name} needs exactly one of prompt_token_ids and prompt_text.")
    if not (request.prompt_token_ids or request.prompt_text):
        raise UnusableInput(f"{name} has an empty prompt; vLLM takes one token or more.")
    if request.max_tokens < 1:
        raise UnusableInput(f"{name} has max_tokens={request.max_tokens}; give at least 1.")
    if request.cache_salt == "":
        raise UnusableInput(f"{name} has an empty cache_salt, which vLLM refuses; give a text or leave it out.")
    _check_times(request, name, open_loop=open_loop)


def _check_times(request: RequestSpec, name: str, *, open_loop: bool) -> None:
    seconds = request.scheduled_seconds
    if request.after is not None and seconds is not None:
        raise UnusableInput(
            f"{name} has scheduled_seconds={seconds} and after={request.after!r}; a later turn is due when the earlier "
            "one has ended: leave scheduled_seconds out."
        )
    if not 0 <= request.pause_seconds < float("inf") or (request.pause_seconds and request.after is None):
        raise UnusableInput(
            f"{name} has pause_seconds={request.pause_seconds}; give 0 or more, and only where after is given."
        )
    if open_loop and request.after is None and (seconds is None or not 0 <= seconds < float("inf")):
        raise UnusableInput(f"{name} has scheduled_seconds={seconds}; an open loop needs an offset of 0 or more.")
    if not open_loop and seconds is not None:
        raise UnusableInput(
            f"{name} has scheduled_seconds={seconds} in a closed loop; leave it out, or leave concurrency out."
        )


def _loopback_address(base_url: str) -> tuple[str, int]:
    try:
        parts: SplitResult = urlsplit(base_url)
        host, port = parts.hostname, parts.port
        loopback = host is not None and ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback or parts.scheme != "http" or parts.path not in ("", "/") or parts.query or parts.username:
        raise UnusableInput(
            f"base_url={base_url!r} is not http://127.0.0.1:PORT; load is sent to engines on this host only."
        )
    if not host or not port:
        raise UnusableInput(f"base_url={base_url!r} names no port; give http://127.0.0.1:PORT.")
    return host, port


@contextmanager
def room_for_connections(concurrency: int | None, requests: int) -> Iterator[None]:
    """Raise this process's soft limit of open files where the load may need it, and put it back.

    Raises UnusableInput where a closed loop cannot fit. How many an open loop needs is the server's to decide.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = min(concurrency or requests, requests) + _SPARE_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or needed <= soft:
        yield
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        if concurrency is not None:
            raise UnusableInput(
                f"concurrency={concurrency} needs {needed} open files, and the hard limit here is {hard}; raise it "
                "(LimitNOFILE= of the unit, or ulimit -Hn) or lower the concurrency."
            )
        needed = hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
