"""During and before a level of a ladder: read the engine's gauges as time goes by, and empty its caches.

The reading is a thread of its own with one connection and a plain search for four families: a whole parse of the page
would cost the client more than the page costs the engine.
"""

import contextlib
import http.client
import json
import threading
import time
from array import array
from collections.abc import Sequence
from urllib.parse import urlsplit

import httpx
from msgspec.structs import replace

from kvtrial.host.load.spool import request_body
from kvtrial.host.loopback import loopback_client
from kvtrial.record.exposition import metric_table
from kvtrial.record.load import RequestResult, RequestSpec
from kvtrial.record.pressure import (
    PhaseLedger,
    PressurePoint,
    RequestTimes,
    ResetFact,
    median_gap_ns,
    phase_ledger,
)
from kvtrial.record.record import PhaseRecord
from kvtrial.record.versions import within

GAUGES = ("requests_running", "requests_waiting", "kv_cache_usage_share", "preemptions")
POINTS_MAX = 600
RESET_TRIES = 40
RESET_PAUSE_SECONDS = 0.1
RESET_EXTERNAL_SINCE = "0.22"
TIMEOUT_SECONDS = 5.0
MARKER_SENDS = 2


def series_of(vllm_version: str) -> dict[str, str]:
    """Role → name of the family that this version exports it as, of the gauges that are watched."""
    table = metric_table().values
    return {
        role: next(source.name for source in table[role].sources if within(vllm_version, source.since, source.until))
        for role in GAUGES
    }


def read_gauges(page: bytes, series: dict[str, str]) -> dict[str, float | None]:
    """The gauges of a page: numbers of requests and preemptions added up over engines, of shares the largest."""
    found: dict[str, list[float]] = {role: [] for role in series}
    for role, name in series.items():
        start = name.encode()
        at = page.find(b"\n" + start)
        while at >= 0:
            end = page.find(b"\n", at + 1)
            line = page[at + 1 : end if end >= 0 else len(page)]
            if line[len(start) : len(start) + 1] in (b"{", b" "):
                with contextlib.suppress(ValueError):
                    found[role].append(float(line.rsplit(b" ", 1)[1]))
            at = page.find(b"\n" + start, at + 1)
    return {
        role: None if not values else max(values) if role == "kv_cache_usage_share" else sum(values)
        for role, values in found.items()
    }


class PressureWatch:
    """Reads the gauges every `interval_seconds` between enter and leave, of all engines as one; a context manager.

    Past POINTS_MAX points every second one is dropped and the interval doubled, so a long phase keeps a line over all
    of its time. A page that can't be had leaves a hole, no fault: the phase's own scrapes decide about the engine.
    """

    def __init__(self, base_urls: Sequence[str], vllm_version: str, interval_seconds: float) -> None:
        parts = [urlsplit(url) for url in base_urls]
        self._addresses = [(part.hostname or "127.0.0.1", part.port or 80) for part in parts]
        self._series = series_of(vllm_version)
        self._interval = interval_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pressure", daemon=True)
        self._raw: list[tuple[int, dict[str, float | None]]] = []

    def __enter__(self) -> "PressureWatch":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(TIMEOUT_SECONDS + 1)

    def points(self, started_monotonic_ns: int, preemptions_before: float | None) -> list[PressurePoint]:
        """What was seen since the phase began; `preemptions_before`: the counter's value then."""
        return [
            PressurePoint(
                seconds=(at - started_monotonic_ns) / 1e9,
                running=values["requests_running"],
                waiting=values["requests_waiting"],
                kv_used_share=values["kv_cache_usage_share"],
                preemptions=None
                if values["preemptions"] is None or preemptions_before is None
                else values["preemptions"] - preemptions_before,
            )
            for at, values in list(self._raw)
            if at >= started_monotonic_ns
        ]

    def _watch(self) -> None:
        connections = [http.client.HTTPConnection(*address, timeout=TIMEOUT_SECONDS) for address in self._addresses]
        due = time.monotonic()
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            due = max(due + self._interval, time.monotonic())
            page = b""
            try:
                for connection in connections:
                    connection.request("GET", "/metrics")
                    page += b"\n" + connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                connection.close()
                continue
            self._raw.append((time.monotonic_ns(), read_gauges(page, self._series)))
            if len(self._raw) > POINTS_MAX:
                self._raw = self._raw[::2]
                self._interval *= 2
        for connection in connections:
            connection.close()


def send_marker(base_url: str, model: str, request: RequestSpec, timeout_seconds: float) -> None:
    """Send a request's prompt for one token, twice, so that the caches surely hold it and its finding is counted.

    A working set that is larger than the KV cache and sent in its order finds nothing of itself, emptied or not. What
    was used last is there, so this prompt shows whether a reset empties. Raises httpx.HTTPError.
    """
    body = request_body(model, replace(request, max_tokens=1, stop_after=None, stop_token_id=None))
    headers = {"Content-Type": "application/json"}
    with loopback_client(base_url, timeout_seconds) as client:
        for _ in range(MARKER_SENDS):
            client.post("/v1/completions", content=body, headers=headers).raise_for_status()


def reset_caches(base_url: str, vllm_version: str, connector: str | None) -> ResetFact:
    """Empty the engine's prefix cache and, where there is a connector, its tier; tried until the engine says success.

    Since 0.26 the answer's body says whether it succeeded, before that the status has to do. Before 0.22 the tier of
    OffloadingConnector is not emptied whatever the answer is, so nothing is claimed there.
    """
    started = time.monotonic()
    external = connector is not None and within(vllm_version, RESET_EXTERNAL_SINCE, None)
    detail, tries = "", 0
    with loopback_client(base_url, TIMEOUT_SECONDS) as client:
        while tries < RESET_TRIES:
            tries += 1
            try:
                answer = client.post("/reset_prefix_cache", params={"reset_external": "true"} if external else None)
            except httpx.HTTPError as error:
                detail = f"no answer: {error!r}"
            else:
                if answer.status_code == 404:
                    detail = "the engine has no /reset_prefix_cache; it needs VLLM_SERVER_DEV_MODE=1"
                    break
                if answer.status_code == 200 and _said_success(answer.content):
                    return ResetFact(True, external, tries, time.monotonic() - started)
                detail = f"status {answer.status_code}, {answer.text[:80]}"
            time.sleep(RESET_PAUSE_SECONDS)
    return ResetFact(False, external, tries, time.monotonic() - started, detail)


def all_reset(resets: Sequence[ResetFact]) -> ResetFact:
    """The resets of an arm's engines as one: it succeeded where all did."""
    first, *others = resets
    if not others:
        return first
    return ResetFact(
        succeeded=all(reset.succeeded for reset in resets),
        external=all(reset.external for reset in resets),
        tries=max(reset.tries for reset in resets),
        seconds=sum(reset.seconds for reset in resets),
        detail="; ".join(reset.detail for reset in resets if reset.detail),
    )


def _said_success(body: bytes) -> bool:
    if not body.strip():
        return True
    try:
        told = json.loads(body)
    except ValueError:
        return False
    return bool(told.get("success", True)) if isinstance(told, dict) else told is None


class RunLedger:
    """Collects the times of requests over a run's phases that have a ledger; a request takes 4 bytes a token."""

    def __init__(self) -> None:
        self._phases: dict[str, tuple[float, list[RequestTimes]]] = {}

    def begin(self, phase: str, stall_multiple: float) -> None:
        """A phase with a ledger begins."""
        self._phases[phase] = stall_multiple, []

    def take(self, phase: str, result: RequestResult) -> None:
        """One result; it counts where it is whole and its tokens have times."""
        if phase not in self._phases or result.error is not None:
            return
        if result.sent_ns is None or result.first_token_ns is None or result.last_token_ns is None:
            return
        self._phases[phase][1].append(
            RequestTimes(
                key=result.key,
                due_ns=result.scheduled_ns,
                sent_ns=result.sent_ns,
                first_token_ns=result.first_token_ns,
                last_token_ns=result.last_token_ns,
                gaps_us=array("L", result.token_gaps_us),
            )
        )

    def ledgers(self) -> dict[str, PhaseLedger]:
        """Phase → its ledger. The threshold is the whole run's, so they are made when the run is over."""
        median = median_gap_ns([requests for _, requests in self._phases.values()])
        return {phase: phase_ledger(requests, multiple, median) for phase, (multiple, requests) in self._phases.items()}

    def attached(self, phases: list[PhaseRecord]) -> list[PhaseRecord]:
        """The phases' records with their ledgers."""
        ledgers = self.ledgers()
        return [replace(phase, ledger=ledgers[phase.name]) if phase.name in ledgers else phase for phase in phases]
