"""Sizes of a CPU tier: shares of the GPU's KV cache in a plan, and which one is worth its RAM in a verdict. Pure."""

from collections.abc import Sequence
from statistics import fmean

import msgspec
from msgspec.structs import replace

from kvtrial.analysis.faults import Pair
from kvtrial.analysis.gates.answers import AnswersEqual, wrong_answers
from kvtrial.analysis.levels import risen
from kvtrial.analysis.recommend import pins_of
from kvtrial.record.plan import Capacity
from kvtrial.record.protocol import Protocol
from kvtrial.record.record import RunRecord
from kvtrial.record.verdict import ComparisonResult, Recommendation, TierBudget, TierRow


def with_tier_sizes(protocol: Protocol, capacity: Capacity, chunk_tokens: int) -> Protocol:
    """The protocol with the sizes that its `tiers` give in percent of the usable GPU KV cache, in whole chunks."""
    chunk_bytes = chunk_tokens * capacity.kv_bytes_per_token
    gpu_bytes = capacity.usable_gpu_blocks * capacity.block_tokens * capacity.kv_bytes_per_token
    sizes = {
        name: -(-gpu_bytes * percent // (100 * chunk_bytes)) * chunk_bytes
        for name, percent in (protocol.tiers or {}).items()
    }
    return replace(protocol, sizes={**protocol.sizes, **sizes})


def tier_budget(
    protocol: Protocol, pairs: Sequence[Pair], comparisons: Sequence[ComparisonResult]
) -> TierBudget | None:
    """Each tier with what it gave back and at which effect, and the RAM budget that follows; None without tiers."""
    if not protocol.tiers or protocol.ladder or not pairs:
        return None
    rows = [
        row
        for arm in protocol.arms
        if arm != protocol.control and (row := _row(protocol, arm, pairs, comparisons)) is not None
    ]
    rows.sort(key=lambda row: row.tier_bytes)
    paying = [row for row in rows if row.verdict == "BETTER"]
    if not paying:
        undecided = [row.arm for row in rows if row.verdict == "INCONCLUSIVE" and row.loaded_bytes_per_run]
        advice = f"{', '.join(undecided)} undecided, so none is dropped yet" if undecided else "drop it"
        return TierBudget(rows, None, f"no tier is shown to pay: {advice} ({_said(rows)})")
    # The gates hold the primary comparison's tier to this already.
    decided = next((item.arm for item in comparisons if item.role == "primary"), "")
    faults = {row.arm: "" if row.arm == decided else _fault(row, protocol, pairs, comparisons) for row in paying}
    sound = [row for row in paying if not faults[row.arm]]
    left_out = "; ".join(f"{arm} would pay, but {fault}: it is left out" for arm, fault in faults.items() if fault)
    if not sound:
        return TierBudget(rows, None, f"{left_out}; no tier is taken ({_said(rows)})")
    chosen = next((row for row in sound if _as_good(row, sound[-1], comparisons)), sound[-1])
    larger = [row.arm for row in rows if row.tier_bytes > chosen.tier_bytes and not faults.get(row.arm)]
    smaller = [row for row in rows if row.tier_bytes < chosen.tier_bytes and not faults.get(row.arm)]
    idle = [row.arm for row in smaller if not row.loaded_bytes_per_run]
    undecided = [row.arm for row in smaller if row in sound and not _given_less(row, sound[-1], comparisons)]
    unproven = [row.arm for row in smaller if row.loaded_bytes_per_run and row.arm not in undecided]
    advice = f"{chosen.arm}: {chosen.tier_bytes:,} bytes of RAM ({chosen.times_gpu_kv:.3g} times the GPU's KV cache)"
    if larger:
        advice += f"; {', '.join(_buys(chosen, arm, comparisons) for arm in larger)}"
        shown = [_comparison(comparisons, chosen.arm, arm) for arm in larger]
        advice += (
            ": shrink it to that" if all(item and item.verdict in ("EQUIVALENT", "BETTER") for item in shown) else ""
        )
    for arm in undecided:
        advice += f"; {_apart(arm, sound[-1].arm, comparisons)}"
    if idle:
        advice += f"; {', '.join(idle)} gives nothing back: drop it"
    if unproven:
        advice += f"; {', '.join(unproven)} is not shown to pay as much"
    if left_out:
        advice += f"; {left_out}"
    return TierBudget(rows, chosen.tier_bytes, f"{advice}{_of_a_set(protocol, pairs)} ({_said(rows)})")


def with_budget(
    recommendation: Recommendation,
    budget: TierBudget | None,
    protocol: Protocol,
    records: Sequence[RunRecord],
    comparisons: Sequence[ComparisonResult],
) -> Recommendation:
    """What to do with the tier that is the RAM budget, and its pins, where it is not the primary comparison's."""
    if budget is None or budget.budget_bytes is None:
        return recommendation
    chosen = next(row.arm for row in budget.tiers if row.tier_bytes == budget.budget_bytes)
    if recommendation.reason.startswith(f"{chosen} "):
        return recommendation
    action = f"adopt {chosen}" if recommendation.action.startswith("adopt ") else recommendation.action
    return replace(
        recommendation,
        action=action,
        pins=pins_of(protocol, records, _comparison(comparisons, chosen, protocol.control)),
        reason=f"{recommendation.reason}; {chosen} is not shown to give less and takes less RAM",
    )


def _row(
    protocol: Protocol, arm: str, pairs: Sequence[Pair], comparisons: Sequence[ComparisonResult]
) -> TierRow | None:
    found = _comparison(comparisons, arm, protocol.control)
    runs = [pair.runs[arm] for pair in pairs if arm in pair.runs]
    if found is None or not runs or arm not in runs[0].capacity.tier_bytes:
        return None
    capacity = runs[0].capacity
    gpu = capacity.usable_gpu_blocks * capacity.block_tokens * capacity.kv_bytes_per_token
    loads = [risen([phase for phase in run.phases if phase.name == found.phase], "load_bytes") or 0.0 for run in runs]
    return TierRow(
        arm=arm,
        tier_bytes=capacity.tier_bytes[arm],
        times_gpu_kv=capacity.tier_bytes[arm] / gpu,
        loaded_bytes_per_run=fmean(loads),
        effect=found.effect,
        ci_low=found.ci_low,
        ci_high=found.ci_high,
        verdict=found.verdict,
    )


def _comparison(comparisons: Sequence[ComparisonResult], arm: str, against: str) -> ComparisonResult | None:
    """The arm's comparison on the metric and phase of the primary one."""
    primary = next((item for item in comparisons if item.role == "primary"), None)
    return next(
        (
            item
            for item in comparisons
            if primary is not None
            and (item.arm, item.against, item.metric, item.phase) == (arm, against, primary.metric, primary.phase)
        ),
        None,
    )


def _as_good(row: TierRow, largest: TierRow, comparisons: Sequence[ComparisonResult]) -> bool:
    """Whether a tier is shown to give no less than the largest one that pays, within the margin."""
    if row.arm == largest.arm:
        return True
    direct = _comparison(comparisons, row.arm, largest.arm)
    return direct is not None and direct.verdict in ("EQUIVALENT", "BETTER")


def _given_less(row: TierRow, largest: TierRow, comparisons: Sequence[ComparisonResult]) -> bool:
    """Whether a tier is shown to give less than the largest one, or was not compared with it."""
    direct = _comparison(comparisons, row.arm, largest.arm)
    return direct is None or direct.ci_low is None or direct.verdict == "WORSE" or direct.ci_low > 1.0


def _apart(arm: str, largest: str, comparisons: Sequence[ComparisonResult]) -> str:
    """That a smaller tier that pays is neither shown to give as much nor to give less."""
    direct = _comparison(comparisons, arm, largest)
    assert direct is not None
    return (
        f"{arm} pays as well and is not told apart from it (×{direct.effect:.3g}, {direct.ci_low:.3g} to "
        f"{direct.ci_high:.3g}; as good would be within {direct.margin:.0%}): more pairs decide whether to shrink it"
    )


def _fault(row: TierRow, protocol: Protocol, pairs: Sequence[Pair], comparisons: Sequence[ComparisonResult]) -> str:
    """What keeps a tier that pays from being taken, "" for nothing.

    Asked is what gates and guards ask of the primary comparison's tier: it loaded in every run, its answers are those
    of its own hits, misses are not slower by it and throughput is not lower.
    """
    runs = [pair.runs[row.arm] for pair in pairs if row.arm in pair.runs]
    primary = next((item for item in comparisons if item.role == "primary"), None)
    if primary is None or not all(
        risen([phase for phase in run.phases if phase.name == primary.phase], "load_bytes") for run in runs
    ):
        return "it loaded nothing in a run"
    answers = protocol.gates.get("answers_equal")
    if answers and wrong_answers(runs, msgspec.convert({**answers, "arm": row.arm}, AnswersEqual)):
        return "its answers differ"
    worse = [
        item
        for item in comparisons
        if item.verdict == "WORSE" and (item.arm, item.against) == (row.arm, protocol.control)
    ]
    if any(item.phase == "miss" for item in worse):
        return "its misses are slower"
    return "its throughput is lower" if any("throughput" in item.metric for item in worse) else ""


def _of_a_set(protocol: Protocol, pairs: Sequence[Pair]) -> str:
    """How large the set of prefixes is for which this was shown."""
    run = pairs[0].runs[protocol.control]
    tokens = sum(
        request.prompt_tokens or 0
        for phase in run.phases
        if phase.name in ("populate", "pressure")
        for request in phase.requests
    )
    usable = run.capacity.usable_gpu_blocks * run.capacity.block_tokens
    return f"; shown for a set of {tokens / usable:.3g} times the GPU's KV cache" if tokens and usable else ""


def _buys(chosen: TierRow, larger: str, comparisons: Sequence[ComparisonResult]) -> str:
    """What a larger tier buys beyond the chosen one, no more than their comparison says."""
    direct = _comparison(comparisons, chosen.arm, larger)
    if direct is None or direct.ci_low is None or direct.ci_high is None:
        return f"{larger} is not shown to buy more"
    if direct.verdict == "EQUIVALENT":
        return f"{larger} buys nothing more"
    return f"{larger} is not shown to buy more (×{direct.effect:.3g}, {direct.ci_low:.3g} to {direct.ci_high:.3g})"


def _said(rows: Sequence[TierRow]) -> str:
    return "; ".join(
        f"{row.arm} {row.verdict}"
        + (f" ×{row.effect:.3g}" if row.effect is not None else "")
        + f", {row.loaded_bytes_per_run:,.0f} bytes loaded a run"
        for row in rows
    )
