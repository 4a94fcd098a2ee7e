"""Several readings of one model's server in time order, and what rose between them. Pure."""

import math
from collections.abc import Collection
from itertools import pairwise
from typing import Literal

import msgspec

from kvtrial.analysis.observe.words import seconds
from kvtrial.record.exposition import Delta, Reading, created_anew, delta, metric_table
from kvtrial.record.fingerprint import VersionRange

ANY_VERSION = VersionRange(None, None, [])


class Window(msgspec.Struct, frozen=True):
    """A server's readings in time order.

    `steps`: what rose from each reading to the next; `whole`: from the first to the last. `since_start`: one page alone
    was given, so everything counts from the server's start. `interval_seconds`: between readings, None: not known.
    `scrapes`: `same` where the pages are one scrape given again, `alike` where they may be.
    """

    readings: list[Reading]
    steps: list[Delta]
    whole: Delta
    since_start: bool = False
    interval_seconds: float | None = None
    versions: VersionRange = ANY_VERSION
    version: str | None = None
    about: str | None = None
    backend: str | None = None
    scrapes: Literal["apart", "alike", "same"] = "apart"

    @property
    def first(self) -> Reading:
        """The first reading."""
        return self.readings[0]

    @property
    def last(self) -> Reading:
        """The last reading."""
        return self.readings[-1]

    @property
    def seconds(self) -> float | None:
        """Length of the window."""
        return None if self.interval_seconds is None else self.interval_seconds * len(self.steps)

    def rise(self, role: str) -> float | None:
        """What a counter, sum or count rose by; None where it is not exported or unknown."""
        return self.whole.values.get(role)

    def rises(self, role: str) -> list[float] | None:
        """The same, reading by reading; None where one is unknown."""
        found = [step.values.get(role) for step in self.steps]
        return None if None in found else [value for value in found if value is not None]

    def gauge(self, role: str) -> list[float]:
        """A gauge's known values, reading by reading."""
        return [value for reading in self.readings if (value := reading.values.get(role)) is not None]

    def mean(self, name: str) -> float | None:
        """Mean of a histogram over the window, from `<name>_sum` and `<name>_count`; None without an observation."""
        total, count = self.rise(f"{name}_sum"), self.rise(f"{name}_count")
        return total / count if total is not None and count else None

    def mean_since_start(self, name: str) -> float | None:
        """The same since the server's start."""
        total, count = self.last.values.get(f"{name}_sum"), self.last.values.get(f"{name}_count")
        return total / count if total is not None and count else None

    @property
    def finished(self) -> float | None:
        """Requests that ended in the window, by any counted reason."""
        return sum_known(self.whole.values, "requests_finished_")

    @property
    def during(self) -> str:
        """`in 150 s`, `since the server's start`, or `in the window`."""
        if self.since_start:
            return "since the server's start"
        length = self.seconds
        return f"in {seconds(length)}" if length else "in the window"


def sum_known(values: dict[str, float | None], prefix: str) -> float | None:
    """Sum of the known roles with a prefix; None where none is known."""
    known = [value for role, value in values.items() if role.startswith(prefix) and value is not None]
    return sum(known) if known else None


def window_of(
    readings: list[Reading],
    interval_seconds: float | None = None,
    versions: VersionRange = ANY_VERSION,
    version: str | None = None,
    about: str | None = None,
    backend: str | None = None,
) -> Window:
    """The window of readings in time order; of one alone, everything since the server's start."""
    since_start = len(readings) == 1
    series = [zeroed(readings[0]), *readings] if since_start else readings
    return Window(
        readings,
        [delta(earlier, later) for earlier, later in pairwise(series)],
        delta(series[0], series[-1]),
        since_start,
        interval_seconds,
        versions,
        version,
        about,
        backend,
    )


def zeroed(reading: Reading) -> Reading:
    """The same server at its start: every known value 0, but for when it started."""
    starts = {"process_start_time_seconds", "counters_created_seconds"}
    return msgspec.structs.replace(
        reading,
        values={role: value if value is None or role in starts else 0.0 for role, value in reading.values.items()},
        per_engine={
            role: engines if role in starts else dict.fromkeys(engines, 0.0)
            for role, engines in reading.per_engine.items()
        },
        buckets={role: dict.fromkeys(bounds, 0.0) for role, bounds in reading.buckets.items()},
    )


def engines_of(window: Window) -> list[str]:
    """Engine labels of the last reading, in order; one or none where its engines are not told apart."""
    running = window.last.per_engine.get("requests_running", {})
    return sorted((engine for engine in running if engine), key=lambda name: (len(name), name))


def labels_of_engines(reading: Reading) -> set[str]:
    """Engine labels of any of a reading's values; none where its engines are not told apart."""
    return {engine for by_engine in reading.per_engine.values() for engine in by_engine if engine}


def of_engines(window: Window, engines: Collection[str], about: str | None) -> Window:
    """The same window as if the page had these engines alone. What has no engine label (the process) stays."""
    readings = [_of_engines(reading, engines) for reading in window.readings]
    own = window_of(readings, window.interval_seconds, window.versions, window.version, about, window.backend)
    return msgspec.structs.replace(own, scrapes=window.scrapes)


def _of_engines(reading: Reading, engines: Collection[str]) -> Reading:
    values, per_engine = dict(reading.values), dict(reading.per_engine)
    for role, by_engine in reading.per_engine.items():
        if not any(by_engine):
            continue
        own = {engine: value for engine, value in by_engine.items() if engine in engines}
        per_engine[role] = own
        largest = metric_table().values[role].across_engines == "max"
        values[role] = max(own.values(), default=0.0) if largest else math.fsum(own.values())
    return msgspec.structs.replace(reading, values=values, per_engine=per_engine)


def restarted_at(window: Window) -> int | None:
    """Index of the first step within which the server was restarted or a counter fell; None where there is none."""
    for index, step in enumerate(window.steps):
        if step.restarted or step.fell:
            return index
    return None


def start_times(window: Window, step: int) -> tuple[float | None, float | None]:
    """Process start times at both ends of a step, seconds since epoch."""
    role = "process_start_time_seconds"
    return window.readings[step].values.get(role), window.readings[step + 1].values.get(role)


def created_times(window: Window, step: int) -> dict[str, tuple[float, float]]:
    """Engines whose counters were created anew within a step."""
    return created_anew(window.readings[step], window.readings[step + 1])


def fits_tokens(reading: Reading) -> int | None:
    """Tokens that the engine's KV cache holds, by its own word; None where it does not say."""
    labels = reading.info.get("cache_config", {})
    said = labels.get("kv_cache_size_tokens", "")
    if said.isdigit():
        return int(said)
    blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    return int(blocks) * int(size) if blocks.isdigit() and size.isdigit() else None


def exports_connector(window: Window) -> bool:
    """Whether the last page shows the series of the OffloadingConnector."""
    return any(window.last.values.get(role) is not None for role in ("load_bytes", "store_bytes"))
