"""What of the records the sections look at, and the small sums that they share. Pure."""

import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from kvtrial.analysis import answer
from kvtrial.analysis.faults import completed_runs, sort_pairs
from kvtrial.record.protocol import Protocol
from kvtrial.record.record import PhaseRecord, RunRecord
from kvtrial.record.verdict import Verdict

DROPPED = ": dropped for faults of the environment: "
"""How a verdict's caveat begins, after the host, that names the pairs it dropped."""
DROPPED_PAIR = re.compile(r"(?:^|; )pair (\d+) \([a-z_]+: ")
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
    """The records of a campaign in order, those that are summed up, and the arms, control first.

    `invalid`: the hosts whose records are not summed up, since they are INVALID and the campaign is not. `runs_left`:
    completed runs of the other hosts that are not, since their pairs don't count.
    """

    records: list[RunRecord]
    used: list[RunRecord]
    arms: list[str]
    invalid: list[str]
    runs_left: int


def choose(protocol: Protocol, records: Iterable[RunRecord], verdict: Verdict) -> Chosen:
    """Order the records by host, pair and position, whatever order they came in; those that count are the verdict's."""
    ordered = sorted(records, key=lambda record: (record.host, record.pair, record.position, record.run))
    arms = _arms(protocol, ordered)
    answers_nothing = verdict.verdict == "INVALID"
    invalid = [host.host for host in verdict.hosts if host.verdict == "INVALID" and not answers_nothing]
    judged = [record for record in ordered if record.host not in invalid]
    used = _used(judged, [arm for arm in arms if any(record.arm == arm for record in judged)], verdict)
    completed = sum(record.outcome == "completed" for record in judged)
    return Chosen(ordered, used, arms, invalid, completed - len(used))


def _arms(protocol: Protocol, records: Sequence[RunRecord]) -> list[str]:
    """Arms in the protocol's order, control first, then any that only the records know."""
    seen = list(dict.fromkeys(record.arm for record in records))
    names = [protocol.control, *(arm for arm in protocol.arms if arm != protocol.control)]
    return [arm for arm in names if arm in seen or not seen] + [arm for arm in seen if arm not in names]


def _used(records: Sequence[RunRecord], arms: Sequence[str], verdict: Verdict) -> list[RunRecord]:
    """The runs of valid pairs, so that every arm has the same ones; where no pair is valid, those that completed."""
    by_host: dict[str, list[RunRecord]] = {}
    for record in records:
        by_host.setdefault(record.host, []).append(record)
    gone: dict[str, set[int]] = {}
    for host, pair in dropped_pairs(verdict, records):
        gone.setdefault(host, set()).add(pair)
    valid, completed = [], []
    for host, own in by_host.items():
        named = gone.get(host, set())
        left = [record for record in own if record.pair not in named]
        # A pair that was dropped is as one without records: a spare takes its place. Which pairs lay too far apart in
        # time the verdict has said.
        pairs = sort_pairs(left, arms, {record.pair for record in own if not record.spare} | named, math.inf)
        counted = {pair.number for pair in pairs.valid}
        valid += [record for record in left if record.pair in counted]
        completed += completed_runs(left, pairs)
    return valid or completed


def dropped_pairs(verdict: Verdict, records: Sequence[RunRecord]) -> list[tuple[str, int]]:
    """(host, pair) of the pairs dropped, as the verdict names them: one without a record is dropped too.

    On a host that the verdict names none of, those that a fault of the environment ended.
    """
    found = {(record.host, record.pair) for record in records if record.outcome == "environment_fault"}
    for caveat in verdict.caveats:
        host, mark, said = caveat.partition(DROPPED)
        if mark and ":" not in host:
            found = {(name, pair) for name, pair in found if name != host}
            found |= {(host, int(number)) for number in DROPPED_PAIR.findall(said)}
    return sorted(found)


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
