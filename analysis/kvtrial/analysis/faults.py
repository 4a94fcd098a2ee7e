"""Which pairs count, and what went wrong in the others.

Faults of the environment drop the whole pair, and a spare pair takes its place; nothing dropped is deleted. Faults of
the engine are a result of their arm: counted, named, never replaced.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from msgspec import Struct

from kvtrial.record.record import RunRecord

MAX_PAIR_GAP_SECONDS = 1800.0


class Pair(Struct, frozen=True):
    """A valid pair: one completed run of each arm, by arm name."""

    number: int
    runs: dict[str, RunRecord]


class DroppedPair(Struct, frozen=True):
    """A pair that does not count, with the class of what happened to it and a sentence."""

    number: int
    fault: str
    detail: str
    records: int


class EngineFault(Struct, frozen=True):
    """A fault of the engine under test: a result of `arm`."""

    arm: str
    pair: int
    phase: str | None
    fault: str
    detail: str


class Pairs(Struct, frozen=True):
    """Pairs of one host, sorted out. `engine_faulted`: numbers of pairs that an engine fault left incomplete."""

    valid: list[Pair]
    dropped: list[DroppedPair]
    engine_faults: list[EngineFault]
    engine_faulted: list[int]
    spares_unused: list[int]

    def describe_faults(self) -> str:
        """Engine faults in words; empty where there are none."""
        return "; ".join(
            f"{f.fault} of arm {f.arm} in pair {f.pair}, phase {f.phase or 'start'}: {f.detail}"
            for f in self.engine_faults
        )


def sort_pairs(
    records: Iterable[RunRecord],
    arms: Sequence[str],
    planned_pairs: Iterable[int] = (),
    max_pair_gap_seconds: float = MAX_PAIR_GAP_SECONDS,
) -> Pairs:
    """Sort one host's records into valid pairs, dropped pairs and engine faults.

    `arms` must each have a completed run in a valid pair. `planned_pairs` are the pair numbers of the plan without its
    spares: those without any record are dropped as `record_missing`. Spare pairs count only as far as pairs were
    dropped for the environment, in order, so that a pair too many can't be chosen afterwards.
    """
    by_pair: dict[int, list[RunRecord]] = defaultdict(list)
    for record in records:
        by_pair[record.pair].append(record)
    for number in planned_pairs:
        by_pair.setdefault(number, [])

    valid: list[Pair] = []
    dropped: list[DroppedPair] = []
    faults: list[EngineFault] = []
    faulted: list[int] = []
    unused: list[int] = []
    is_spare = {number: any(run.spare for run in runs) for number, runs in by_pair.items()}
    spares_due = 0
    for number in sorted(by_pair, key=lambda n: (is_spare[n], n)):
        runs = by_pair[number]
        if is_spare[number]:
            if spares_due == 0:
                unused.append(number)
                continue
            spares_due -= 1
        engine = [_engine_fault(run) for run in runs if run.outcome == "engine_fault"]
        faults.extend(engine)
        problem = _environment_problem(number, runs, arms, max_pair_gap_seconds, incomplete_is_known=bool(engine))
        if problem is not None:
            dropped.append(problem)
            spares_due += 1
        elif engine:
            faulted.append(number)
        else:
            valid.append(Pair(number, {run.arm: run for run in runs}))
    return Pairs(sorted(valid, key=lambda pair: pair.number), dropped, faults, faulted, unused)


def completed_runs(records: Iterable[RunRecord], pairs: Pairs) -> list[RunRecord]:
    """Completed runs outside dropped and unused pairs, by pair and position: what gates look at."""
    left_out = {pair.number for pair in pairs.dropped} | set(pairs.spares_unused)
    kept = [run for run in records if run.outcome == "completed" and run.pair not in left_out]
    return sorted(kept, key=lambda run: (run.pair, run.position))


def _engine_fault(run: RunRecord) -> EngineFault:
    if run.fault is None:
        return EngineFault(run.arm, run.pair, None, "engine_fault", "the record names no cause")
    known = f"; cause: {run.fault.cause}; do: {run.fault.fix}" if run.fault.cause else ""
    return EngineFault(run.arm, run.pair, run.fault.phase, run.fault.fault, run.fault.detail + known)


def _environment_problem(
    number: int, runs: list[RunRecord], arms: Sequence[str], max_pair_gap_seconds: float, incomplete_is_known: bool
) -> DroppedPair | None:
    def drop(fault: str, detail: str) -> DroppedPair:
        return DroppedPair(number, fault, detail, len(runs))

    for run in runs:
        if run.outcome == "environment_fault":
            cause = run.fault.fault if run.fault else "environment_fault"
            return drop(cause, f"arm {run.arm}: {run.fault.detail if run.fault else 'the record names no cause'}")
    present = [run.arm for run in runs]
    missing = [arm for arm in arms if arm not in present]
    if missing and not incomplete_is_known:
        return drop("record_missing", f"no record of arm {', '.join(missing)}")
    twice = sorted({arm for arm in present if present.count(arm) > 1})
    if twice:
        return drop("record_twice", f"more than one record of arm {', '.join(twice)}")
    return _cut(drop_number=number, runs=runs, max_pair_gap_seconds=max_pair_gap_seconds) or _throttled(number, runs)


def _cut(drop_number: int, runs: list[RunRecord], max_pair_gap_seconds: float) -> DroppedPair | None:
    if len({run.conditions.boot_id for run in runs}) > 1:
        return DroppedPair(drop_number, "pair_cut", "the host was booted between the runs of the pair", len(runs))
    in_time = sorted(runs, key=lambda run: run.times.started_monotonic_seconds)
    for first, second in pairwise(in_time):
        gap = second.times.started_monotonic_seconds - first.times.ended_monotonic_seconds
        if gap > max_pair_gap_seconds:
            detail = f"{gap:,.0f} s between its runs, allowed are {max_pair_gap_seconds:,.0f} s"
            return DroppedPair(drop_number, "pair_cut", detail, len(runs))
    return None


def _throttled(number: int, runs: list[RunRecord]) -> DroppedPair | None:
    """Throttling in one arm only. In both it is a condition of the host, which a gate looks at."""
    events = {
        run.arm: run.samples.throttle_events for run in runs if run.samples and run.samples.throttle_events is not None
    }
    if len({count > 0 for count in events.values()}) < 2:
        return None
    counts = ", ".join(f"{arm} {count}" for arm, count in events.items())
    return DroppedPair(number, "throttle_in_one_arm", f"throttle events: {counts}", len(runs))
