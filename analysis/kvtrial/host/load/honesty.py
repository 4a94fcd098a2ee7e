"""What the load client says about itself: lag, CPU, collector pauses, connections, stolen time."""

import gc
import os
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvtrial.host.affinity import Pinning, current_pinning
from kvtrial.record.load import HonestyCard

_PROC_STAT = Path("/proc/stat")
_STEAL_FIELD = 7
_COUNTED_FIELDS = 8
"""user nice system idle iowait irq softirq steal; the guest fields that follow are counted in user and nice already."""


def quantile(values: Sequence[int], share: float) -> float | None:
    """Quantile by linear interpolation between order statistics (Hyndman and Fan's type 7); None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def cpu_ticks(proc_stat: str) -> tuple[int, int] | None:
    """(stolen ticks, all ticks) of the machine since boot from /proc/stat's text; None where it does not say."""
    fields = proc_stat.partition("\n")[0].split()
    if not fields or fields[0] != "cpu" or len(fields) <= _COUNTED_FIELDS:
        return None
    try:
        ticks = [int(field) for field in fields[1 : _COUNTED_FIELDS + 1]]
    except ValueError:
        return None
    return ticks[_STEAL_FIELD], sum(ticks)


def steal_share(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    """Share of the machine's CPU time between two `cpu_ticks` that was stolen; None where it cannot be known."""
    if before is None or after is None or after[1] <= before[1]:
        return None
    return (after[0] - before[0]) / (after[1] - before[1])


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Keep the cyclic garbage collector off: everything alive is frozen. Afterwards it is as it was.

    Where something was frozen before, all stays so: what is whose cannot be told apart.
    """
    was_enabled, was_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


class HonestyMeter:
    """Collects a phase's facts about the client; `start` and `finish` bracket the phase.

    The owner reports dispatches, loop beats and connections as they happen; each report is an append or an addition.
    A dispatch and a beat take 8 bytes each.
    """

    def __init__(self, *, calibration_id: str | None = None, pinning: Pinning | None = None) -> None:
        self._calibration_id = calibration_id
        self._pinning = pinning or current_pinning()
        self._dispatch_lags_ns = array("q")
        self._loop_lags_ns = array("q")
        self._streams_max = 0
        self._chunks = 0
        self._connections_opened = 0
        self._connections_open = 0
        self._connections_max_open = 0
        self._gc_collections = 0
        self._gc_pause_max_ns = 0
        self._gc_pause_total_ns = 0
        self._gc_began_ns: int | None = None
        self._wall_began_ns = 0
        self._cpu_began_ns = 0
        self._ticks_began: tuple[int, int] | None = None

    def start(self) -> None:
        """The phase begins."""
        gc.callbacks.append(self._on_gc)
        self._ticks_began = _machine_ticks()
        self._cpu_began_ns = time.process_time_ns()
        self._wall_began_ns = time.perf_counter_ns()

    def finish(self) -> HonestyCard:
        """The phase is over; its card. Call once."""
        wall_ns = time.perf_counter_ns() - self._wall_began_ns
        cpu_ns = time.process_time_ns() - self._cpu_began_ns
        ticks = _machine_ticks()
        self.stop()
        return HonestyCard(
            dispatch_lag_p50_seconds=_seconds(quantile(self._dispatch_lags_ns, 0.5)),
            dispatch_lag_p95_seconds=_seconds(quantile(self._dispatch_lags_ns, 0.95)),
            dispatch_lag_max_seconds=_seconds(quantile(self._dispatch_lags_ns, 1.0)),
            loop_lag_p50_seconds=_seconds(quantile(self._loop_lags_ns, 0.5)),
            loop_lag_max_seconds=_seconds(quantile(self._loop_lags_ns, 1.0)),
            client_cpu_seconds=cpu_ns / 1e9,
            wall_seconds=wall_ns / 1e9,
            client_cpu_share=cpu_ns / wall_ns if wall_ns else 0.0,
            connections_opened=self._connections_opened,
            connections_max_open=self._connections_max_open,
            gc_collections=self._gc_collections,
            gc_pause_max_seconds=self._gc_pause_max_ns / 1e9,
            clock=time.get_clock_info("perf_counter").implementation,
            cpu_affinity=sorted(os.sched_getaffinity(0)),
            steal_share=steal_share(self._ticks_began, ticks),
            calibration_id=self._calibration_id,
            pinning=self._pinning.pinning,
            numa_node=self._pinning.numa_node,
            loop_lag_p95_seconds=_seconds(quantile(self._loop_lags_ns, 0.95)),
            streams_max=self._streams_max,
            chunks=self._chunks,
            gc_pause_total_seconds=self._gc_pause_total_ns / 1e9,
        )

    def stop(self) -> None:
        """Stop listening to the collector. Idempotent; `finish` does it too."""
        if self._on_gc in gc.callbacks:
            gc.callbacks.remove(self._on_gc)

    def dispatched(self, lag_ns: int) -> None:
        """A request was sent `lag_ns` after it was due."""
        self._dispatch_lags_ns.append(lag_ns)

    def beat(self, lag_ns: int) -> None:
        """The event loop ran a regular timer `lag_ns` late."""
        self._loop_lags_ns.append(lag_ns)

    def streaming(self, in_flight: int) -> None:
        """So many requests are in flight now."""
        self._streams_max = max(self._streams_max, in_flight)

    def received(self, chunks: int) -> None:
        """A response came in so many reads."""
        self._chunks += chunks

    def connected(self) -> None:
        """A connection was opened."""
        self._connections_opened += 1
        self._connections_open += 1
        self._connections_max_open = max(self._connections_max_open, self._connections_open)

    def disconnected(self) -> None:
        """A connection was closed."""
        self._connections_open -= 1

    @property
    def connections_open(self) -> int:
        """Connections open now."""
        return self._connections_open

    def _on_gc(self, stage: str, _: dict[str, int]) -> None:
        now_ns = time.perf_counter_ns()
        if stage == "start":
            self._gc_began_ns = now_ns
        elif self._gc_began_ns is not None:
            self._gc_collections += 1
            self._gc_pause_max_ns = max(self._gc_pause_max_ns, now_ns - self._gc_began_ns)
            self._gc_pause_total_ns += now_ns - self._gc_began_ns
            self._gc_began_ns = None


def _machine_ticks() -> tuple[int, int] | None:
    try:
        return cpu_ticks(_PROC_STAT.read_text())
    except OSError:
        return None


def _seconds(nanoseconds: float | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1e9
