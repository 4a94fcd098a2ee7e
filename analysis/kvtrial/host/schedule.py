"""Which run is next: pure. Finished runs are kept; a pair cut by the environment is repeated by a spare at the end."""

from kvtrial.record.plan import HostPlan, RunPlan
from kvtrial.record.record import RunRecord


def pair_gap_seconds(records: list[RunRecord]) -> float | None:
    """Seconds between the first run's end and the second's start; None across a reboot or for less than two runs."""
    if len(records) < 2 or len({r.conditions.boot_id for r in records}) > 1:
        return None
    ordered = sorted(records, key=lambda r: r.times.started_monotonic_seconds)
    return ordered[-1].times.started_monotonic_seconds - ordered[0].times.ended_monotonic_seconds


def dropped_pairs(plan: HostPlan, finished: dict[str, RunRecord], boot_id: str) -> dict[int, str]:
    """Pairs that a fault of the environment has spoilt, with the reason."""
    dropped: dict[int, str] = {}
    for pair in {run.pair for run in plan.runs}:
        runs = [run for run in plan.runs if run.pair == pair]
        records = [finished[run.run] for run in runs if run.run in finished]
        faults = [r.fault for r in records if r.fault is not None and r.outcome == "environment_fault"]
        if faults:
            dropped[pair] = f"{faults[0].fault}: {faults[0].detail}"
        elif len(records) == len(runs) > 1:
            gap = pair_gap_seconds(records)
            if gap is None:
                dropped[pair] = "pair_cut: the host was rebooted between the runs of the pair"
            elif gap > plan.limits.max_pair_gap_seconds:
                dropped[pair] = f"pair_cut: {gap:.0f} s lie between the runs of the pair"
        elif records and records[0].conditions.boot_id != boot_id:
            dropped[pair] = "pair_cut: the host was rebooted between the runs of the pair"
    return dropped


def next_run(plan: HostPlan, finished: dict[str, RunRecord], boot_id: str) -> RunPlan | None:
    """The next run to do, or None when all is done.

    Planned runs come first, in plan order, without the rest of a dropped pair; then, for each dropped pair, a spare
    pair, at most `replacement_pairs`.
    """
    dropped = dropped_pairs(plan, finished, boot_id)
    for run in plan.runs:
        if not run.spare and run.run not in finished and run.pair not in dropped:
            return run
    spare_pairs = list(dict.fromkeys(run.pair for run in plan.runs if run.spare))
    wanted = min(len(dropped), plan.replacement_pairs, len(spare_pairs))
    for run in plan.runs:
        if run.spare and run.pair in spare_pairs[:wanted] and run.pair not in dropped and run.run not in finished:
            return run
    return None


def runs_left(plan: HostPlan, finished: dict[str, RunRecord], boot_id: str) -> int:
    """How many runs remain, as far as is known now."""
    dropped = dropped_pairs(plan, finished, boot_id)
    left = sum(not run.spare and run.run not in finished and run.pair not in dropped for run in plan.runs)
    spare_pairs = list(dict.fromkeys(run.pair for run in plan.runs if run.spare))
    wanted = spare_pairs[: min(len(dropped), plan.replacement_pairs)]
    return left + sum(
        run.spare and run.pair in wanted and run.pair not in dropped and run.run not in finished for run in plan.runs
    )
