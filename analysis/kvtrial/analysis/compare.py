"""One comparison over the valid pairs of one host."""

from collections.abc import Sequence
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from kvtrial.analysis.effect import (
    Interval,
    decide,
    differences,
    hodges_lehmann,
    log_ratios,
    mde,
    outward,
    standardised_mde,
)
from kvtrial.analysis.faults import Pair
from kvtrial.analysis.metrics import Metric, find_metric
from kvtrial.record.errors import UnusableInput
from kvtrial.record.protocol import Comparison, EffectScale, Protocol
from kvtrial.record.verdict import ComparisonResult, Quality


class Compared(Struct, frozen=True):
    """A result and the interval it rests on (inner scale), None where nothing could be estimated."""

    result: ComparisonResult
    interval: Interval | None


def margin_of(comparison: Comparison, protocol: Protocol) -> float:
    """The margin as a number; "$name" is an entry of the protocol's sizes. Raises UnusableInput for any other text."""
    margin = comparison.margin
    if isinstance(margin, str):
        size = protocol.sizes.get(margin.removeprefix("$"))
        if size is None:
            known = ", ".join(protocol.sizes)
            raise UnusableInput(
                f'margin "{margin}" of {comparison.metric} is no number and no size of the protocol ({known}).'
            )
        return float(size)
    return float(margin)


def compare(
    comparison: Comparison, protocol: Protocol, pairs: Sequence[Pair], quality: Quality = "not_compared"
) -> Compared:
    """The effect of one declared comparison over valid pairs, with its verdict. Never raises for missing values.

    A pair that lacks a value makes the comparison INCONCLUSIVE, whatever the others say: leaving it out would choose.
    """
    metric, margin = find_metric(comparison.metric), margin_of(comparison, protocol)
    arm_values, against_values, missing = _values(comparison, metric, pairs)
    empty = blank_result(comparison, protocol, quality)
    if not arm_values:
        return Compared(_noted(empty, missing or "no valid pair"), None)
    try:
        inner = (
            log_ratios(arm_values, against_values)
            if comparison.effect_scale == "ratio"
            else differences(arm_values, against_values)
        )
    except ValueError:
        text = f"a value of {comparison.metric} is not above 0, so it has no ratio; use effect_scale difference"
        return Compared(_noted(empty, text), None)
    interval = hodges_lehmann(inner)
    word, note = decide(interval, margin, comparison.effect_scale, metric.better)
    if missing:
        word, note = "INCONCLUSIVE", "; ".join(part for part in (missing, note) if part)
    result = ComparisonResult(
        arm=comparison.arm,
        against=comparison.against,
        phase=comparison.phase,
        metric=comparison.metric,
        unit=metric.unit,
        role=comparison.role,
        effect_scale=comparison.effect_scale,
        effect=outward(interval.estimate, comparison.effect_scale),
        ci_low=outward(interval.low, comparison.effect_scale),
        ci_high=outward(interval.high, comparison.effect_scale),
        confidence=interval.confidence,
        p_value=interval.p_value,
        pairs=interval.pairs,
        mde=least_detectable(interval.sd, interval.pairs, comparison.effect_scale),
        margin=margin,
        verdict=word,
        note=note,
        delta_ttft_seconds=median(differences(arm_values, against_values)) if metric.is_ttft else None,
        moved=None,
        quality=quality,
        heterogeneity=None,
        against_phase=comparison.against_phase,
        pair_effects=[outward(value, comparison.effect_scale) for value in inner],
        arm_values=arm_values,
        against_values=against_values,
    )
    return Compared(result, interval)


def least_detectable(sd: float | None, pairs: int, scale: EffectScale) -> float | None:
    """MDE at 80 % power with this SD of pair differences: a ratio above 1, or a difference; None with too few pairs."""
    if sd is None:
        return None
    if scale == "ratio":
        return mde(sd, pairs)
    shift = standardised_mde(pairs)
    return None if shift is None else shift * sd


def blank_result(comparison: Comparison, protocol: Protocol, quality: Quality) -> ComparisonResult:
    """A comparison without an effect, INCONCLUSIVE."""
    return ComparisonResult(
        arm=comparison.arm,
        against=comparison.against,
        phase=comparison.phase,
        metric=comparison.metric,
        unit=find_metric(comparison.metric).unit,
        role=comparison.role,
        effect_scale=comparison.effect_scale,
        effect=None,
        ci_low=None,
        ci_high=None,
        confidence=None,
        p_value=None,
        pairs=0,
        mde=None,
        margin=margin_of(comparison, protocol),
        verdict="INCONCLUSIVE",
        note="",
        delta_ttft_seconds=None,
        moved=None,
        quality=quality,
        heterogeneity=None,
        against_phase=comparison.against_phase,
    )


def _values(comparison: Comparison, metric: Metric, pairs: Sequence[Pair]) -> tuple[list[float], list[float], str]:
    """Values of both sides by pair, and a sentence on pairs that lack one."""
    arm_values, against_values, lacking = [], [], []
    other_phase = comparison.against_phase or comparison.phase
    for pair in pairs:
        arm, against = pair.runs.get(comparison.arm), pair.runs.get(comparison.against)
        value = None if arm is None else metric.extract(arm, comparison.phase)
        other = None if against is None else metric.extract(against, other_phase)
        if value is None or other is None:
            lacking.append((pair.number, comparison.arm if value is None else comparison.against))
        else:
            arm_values.append(float(value))
            against_values.append(float(other))
    if not lacking:
        return arm_values, against_values, ""
    named = ", ".join(f"pair {number} (arm {arm})" for number, arm in lacking[:3])
    more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
    phases = comparison.phase if other_phase == comparison.phase else f"{comparison.phase} or {other_phase}"
    return arm_values, against_values, f"{comparison.metric} of phase {phases} is missing in {named}{more}"


def _noted(result: ComparisonResult, note: str) -> ComparisonResult:
    return replace(result, note=note)
