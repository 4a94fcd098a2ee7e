"""What of the records the sections look at, and the small sums that they share. Pure."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from kvtrial.analysis import answer
from kvtrial.record.protocol import Protocol
from kvtrial.record.record import PhaseRecord, RunRecord

HOSTS_SHOWN_MAX = 200
RUNS_SHOWN_MAX = 2000
TEXT_CHARACTERS_MAX = 2000


class Row(Struct, frozen=True):
    """A table row: a heading cell, plain cells, and a class for the style sheet."""

    head: str
    cells: list[str]
    kind: str = ""
    link: str = ""
    note: str = ""


class Table(Struct, frozen=True):
    """A table of numbers with its headings; the first heading is of the rows."""

    heads: list[str]
    rows: list[Row]
    title: str = ""
    caption: str = ""


class Plot(Struct, frozen=True):
    """An inline figure with the sentence below it."""

    svg: str
    title: str
    caption: str


class Chosen(Struct, frozen=True):
    """The records of a campaign in order, those that are summed up, and the arms, control first."""

    records: list[RunRecord]
    used: list[RunRecord]
    arms: list[str]


def choose(protocol: Protocol, records: Iterable[RunRecord]) -> Chosen:
    """Order the records by host, pair and position, whatever order they came in."""
    ordered = sorted(records, key=lambda record: (record.host, record.pair, record.position, record.run))
    return Chosen(ordered, _used(ordered), _arms(protocol, ordered))


def _arms(protocol: Protocol, records: Sequence[RunRecord]) -> list[str]:
    """Arms in the protocol's order, control first, then any that only the records know."""
    seen = list(dict.fromkeys(record.arm for record in records))
    names = [protocol.control, *(arm for arm in protocol.arms if arm != protocol.control)]
    return [arm for arm in names if arm in seen or not seen] + [arm for arm in seen if arm not in names]


def _used(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Completed runs of pairs that no fault of the environment touched: those whose times are summed up."""
    dropped = {(record.host, record.pair) for record in records if record.outcome == "environment_fault"}
    return [item for item in records if item.outcome == "completed" and (item.host, item.pair) not in dropped]


def phases_of(records: Iterable[RunRecord], arm: str, phase: str) -> list[PhaseRecord]:
    """The phases of that name over the runs of an arm."""
    return [item for record in records if record.arm == arm for item in record.phases if item.name == phase]


def finite(values: Iterable[float | None]) -> list[float]:
    """The values that were measured."""
    return [value for value in values if value is not None and math.isfinite(value)]


def middle(values: Iterable[float | None]) -> float | None:
    """The median, None without a value."""
    found = finite(values)
    return statistics.median(found) if found else None


def mean(values: Iterable[float | None]) -> float | None:
    """The mean, None without a value."""
    found = finite(values)
    return statistics.fmean(found) if found else None


def largest(values: Iterable[float | None]) -> float | None:
    """The largest, None without a value."""
    return max(finite(values), default=None)


def rise(phase: PhaseRecord, role: str) -> float | None:
    """What a counter grew by in a phase; None where the engine does not export it."""
    before, after = phase.before.get(role), phase.after.get(role)
    if before is None or after is None or not math.isfinite(before) or not math.isfinite(after):
        return None
    return after - before


def phase_names(records: Iterable[RunRecord]) -> list[str]:
    """Every phase, in the order in which they were first run."""
    return list(dict.fromkeys(phase.name for record in records for phase in record.phases))


def distinct(values: Iterable[str], changed: str, nothing: str) -> str:
    """One value, or several with the remark that they `changed`; `nothing` where there is none."""
    seen = [value for value in dict.fromkeys(values) if value]
    if len(seen) > 1:
        return f"{' · '.join(seen[:4])}{' · …' if len(seen) > 4 else ''} ({changed})"
    return seen[0] if seen else nothing


def clipped(text: str, limit: int = TEXT_CHARACTERS_MAX) -> str:
    """`text` on one line, without control characters, not longer than `limit`."""
    return answer.one_line(text, limit)


def drawn(svg: str | None, title: str, caption: str) -> Plot | None:
    """A figure where there was something to draw."""
    return Plot(svg, title, caption) if svg else None


Read = Callable[[RunRecord], str]
