"""The deadlock watchdog: an engine that is healthy, runs nothing and lets requests wait answers nobody any more.

It asks the engine only after a long silence, in a thread of its own, so that nothing of it stands in a measurement.
"""

import re
import threading
import time
from collections.abc import Callable

import httpx

from kvtrial.host.loopback import loopback_client

_POLL_SECONDS = 1.0
_TIMEOUT_SECONDS = 5.0
_GAUGE = re.compile(r"^vllm:num_requests_(running|waiting)(?:\{[^\n]*\})? ([^\s]+)", re.MULTILINE)


def queue_of(page: str) -> tuple[float, float] | None:
    """(requests running, waiting) from the text of /metrics, summed over engines; None where it does not say."""
    sums: dict[str, float] = {}
    for name, value in _GAUGE.findall(page):
        try:
            sums[name] = sums.get(name, 0.0) + float(value)
        except ValueError:
            return None
    return (sums["running"], sums["waiting"]) if len(sums) == 2 else None


class DeadlockWatch:
    """Watches from a thread while used as a context manager.

    `silent_since` tells since when (time.monotonic) no request in flight got a byte, None while none is in flight.
    After half of `limit_seconds` of silence the engine is asked once a second; once it has been stuck for
    `limit_seconds` on end, without a byte for anyone, `on_deadlock` is called with a sentence, from the thread, once.
    """

    def __init__(
        self,
        base_url: str,
        limit_seconds: float,
        silent_since: Callable[[], float | None],
        on_deadlock: Callable[[str], None],
    ) -> None:
        self._base_url = base_url
        self._limit_seconds = limit_seconds
        self._silent_since = silent_since
        self._on_deadlock = on_deadlock
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="kvtrial-deadlock-watch", daemon=True)

    def __enter__(self) -> "DeadlockWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        # A question on its way is waited for: no thread of ours outlives the phase.
        self._thread.join(2 * _TIMEOUT_SECONDS)

    def _watch(self) -> None:
        stuck_since: float | None = None
        while True:
            silent_since = self._silent_since()
            now = time.monotonic()
            left = self._limit_seconds / 2 - (0.0 if silent_since is None else now - silent_since)
            if left > 0:
                # A byte came for somebody, or nobody waits: whatever was seen before is over.
                stuck_since = None
                if self._over.wait(left):
                    return
                continue
            queue = self._ask()
            if queue is None or queue[0] or not queue[1]:
                stuck_since = None
            elif stuck_since is None:
                stuck_since = now
            elif now - stuck_since >= self._limit_seconds:
                self._on_deadlock(
                    f"/health answers 200, yet 0 requests run and {queue[1]:.0f} wait, for {now - stuck_since:.0f} s"
                )
                return
            if self._over.wait(min(_POLL_SECONDS, self._limit_seconds / 4)):
                return

    def _ask(self) -> tuple[float, float] | None:
        """The engine's queue if it says it is healthy."""
        try:
            with loopback_client(self._base_url, _TIMEOUT_SECONDS) as client:
                if client.get("/health").status_code != 200:
                    return None
                return queue_of(client.get("/metrics").raise_for_status().text)
        except httpx.HTTPError:
            return None
