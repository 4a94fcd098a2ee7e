"""From which share of returning requests on the variant pays: cost / (gain + cost), as one number with an interval.

A request to a prefix never seen before costs `cost` more time to its first token in the variant (it also stores), one
that returns to an evicted prefix saves `gain`. With a share s of returns it pays when s · gain > (1 − s) · cost.

The share is computed from a return and a miss measured by themselves, and found where a sweep of shares was run: there
a pair's mean TTFT differences lie on a line over the share, cost at 0 and −gain at 1, whose zero is the same quotient.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from kvtrial.analysis.effect import Interval, hodges_lehmann
from kvtrial.analysis.faults import Pair
from kvtrial.analysis.metrics import find_metric
from kvtrial.record.verdict import BreakEven, FoundBreakEven, SharePoint

_METRIC = "ttft_median_seconds"
_MIX_METRIC = "ttft_mean_seconds"
GAIN_NOT_SHOWN = "the gain is not shown: its interval holds 0"
LEAST_SHARES = 2
"""A line needs two different shares."""


class CostAndGain(Struct, frozen=True):
    """Of one pair, in seconds of TTFT: what a miss costs more in the variant, what a return costs less."""

    cost_seconds: float
    gain_seconds: float

    @property
    def share(self) -> float:
        """Break-even share of returns, not clipped. Where the two sum to nothing positive: 0 with a gain, else 1."""
        both = self.gain_seconds + self.cost_seconds
        if both > 0:
            return self.cost_seconds / both
        return 0.0 if self.gain_seconds > 0 else 1.0


def break_even(
    pairs: Sequence[Pair],
    arm: str,
    against: str,
    hit: str,
    miss: str,
    own_hit_share: float | None = None,
    shares: Mapping[str, float] | None = None,
    prefix_tokens: int | None = None,
) -> BreakEven:
    """Break-even share of returns (0..1) over valid pairs: Hodges-Lehmann of the pairs' shares with its exact interval.

    Cost and gain are the Hodges-Lehmann estimates of their own pair differences, in seconds. A pair that lacks one of
    its four values is left out and said. `shares`: phase → share of its requests that return; with two shares or more
    the break-even is also found from their line. `prefix_tokens`: of the prompts of `hit`, where they have one length.
    """
    about: dict[str, Any] = {"hit": hit, "arm": arm, "against": against, "prefix_tokens": prefix_tokens}
    found = find_break_even(pairs, arm, against, shares or {}, (hit, miss), own_hit_share)
    known = [seen for pair in pairs if (seen := _of_pair(pair, arm, against, hit, miss)) is not None]
    if not known:
        note = f"no pair has TTFT of both {hit} and {miss}"
        return BreakEven(None, None, None, None, None, None, own_hit_share, note, found, **about)
    cost, gain = hodges_lehmann([p.cost_seconds for p in known]), hodges_lehmann([p.gain_seconds for p in known])
    note = _note(cost, gain, own_hit_share, len(pairs) - len(known))
    if gain.estimate <= 0:
        return BreakEven(None, None, None, None, cost.estimate, gain.estimate, own_hit_share, note, found, **about)
    share = hodges_lehmann([pair.share for pair in known])
    return BreakEven(
        hit_share=_clipped(share.estimate),
        ci_low=_clipped(share.low),
        ci_high=_clipped(share.high),
        confidence=share.confidence,
        cost_seconds=cost.estimate,
        gain_seconds=gain.estimate,
        own_hit_share=own_hit_share,
        note=_beside(note, share, own_hit_share),
        found=found,
        **about,
    )


def _of_pair(pair: Pair, arm: str, against: str, hit: str, miss: str) -> CostAndGain | None:
    ttft = find_metric(_METRIC).extract
    if arm not in pair.runs or against not in pair.runs:
        return None
    variant, control = pair.runs[arm], pair.runs[against]
    values = ttft(variant, miss), ttft(control, miss), ttft(control, hit), ttft(variant, hit)
    if None in values:
        return None
    miss_variant, miss_control, hit_control, hit_variant = (value for value in values if value is not None)
    return CostAndGain(miss_variant - miss_control, hit_control - hit_variant)


def _note(cost: Interval, gain: Interval, own_hit_share: float | None, left_out: int) -> str:
    said = [f"{left_out} pairs lack a value and are left out"] if left_out else []
    if gain.estimate <= 0:
        return "; ".join(["does not pay at any share: a return is no faster", *said])
    if gain.low <= 0:
        said.insert(0, GAIN_NOT_SHOWN)
    if cost.estimate <= 0:
        return "; ".join(["no cost shown: any return pays", *said])
    if cost.low <= 0:
        said.insert(0, "no cost shown: its interval holds 0")
    return "; ".join(said)


def _beside(note: str, share: Interval, own: float | None) -> str:
    if own is None:
        return note
    if own > share.high:
        said = f"your share of {own:.0%} is above it"
    elif own < share.low:
        said = f"your share of {own:.0%} is below it"
    else:
        said = f"your share of {own:.0%} lies inside the interval: not decided"
    return "; ".join(part for part in (note, said) if part)


def _clipped(share: float) -> float:
    return min(1.0, max(0.0, share))


# ---------------------------------------------------------------------------------------------------- found by a sweep


def find_break_even(
    pairs: Sequence[Pair],
    arm: str,
    against: str,
    shares: Mapping[str, float],
    computed_from: tuple[str, str],
    own_hit_share: float | None = None,
) -> FoundBreakEven | None:
    """The break-even share that a sweep found; None where the protocol has no two shares.

    Per pair: the least-squares line of the difference of mean TTFT (arm − against) over the share, and its zero. Over
    the pairs: Hodges-Lehmann of the zeros with the exact interval. `computed_from`: the phases (hit, miss) of the
    computed share, with which the zeros are compared pair by pair. A pair that lacks a value is left out and said.
    """
    if len(set(shares.values())) < LEAST_SHARES:
        return None
    measured = {pair.number: found for pair in pairs if (found := _at_shares(pair, arm, against, shares)) is not None}
    left_out = (
        [f"{len(pairs) - len(measured)} pairs lack a share and are left out"] if len(measured) < len(pairs) else []
    )
    if not measured:
        return FoundBreakEven(
            "unknown",
            None,
            None,
            None,
            None,
            0,
            None,
            None,
            [],
            None,
            None,
            None,
            "no pair has a mean TTFT of all shares",
        )
    lines = {number: _line(list(shares.values()), found) for number, found in measured.items()}
    cost = hodges_lehmann([line.cost_seconds for line in lines.values()])
    gain = hodges_lehmann([line.gain_seconds for line in lines.values()])
    zero = hodges_lehmann([line.share for line in lines.values()])
    pays, said = _where(cost, gain, zero, list(shares.values()))
    beside = _minus_computed(pairs, lines, arm, against, computed_from)
    inside = pays == "above"
    return FoundBreakEven(
        pays=pays,
        hit_share=_clipped(zero.estimate) if inside else None,
        ci_low=_clipped(zero.low) if inside else None,
        ci_high=_clipped(zero.high) if inside else None,
        confidence=zero.confidence if inside else None,
        pairs=len(measured),
        cost_seconds=cost.estimate,
        gain_seconds=gain.estimate,
        points=[_point(phase, share, index, measured) for index, (phase, share) in enumerate(shares.items())],
        minus_computed=beside.estimate if beside and inside else None,
        minus_computed_low=beside.low if beside and inside else None,
        minus_computed_high=beside.high if beside and inside else None,
        note=_beside("; ".join([*said, *left_out]), zero, own_hit_share if inside else None),
    )


def _at_shares(pair: Pair, arm: str, against: str, shares: Mapping[str, float]) -> list[float] | None:
    """Differences of mean TTFT at each share, seconds; None where one is lacking."""
    mean = find_metric(_MIX_METRIC).extract
    if arm not in pair.runs or against not in pair.runs:
        return None
    found = []
    for phase in shares:
        variant, control = mean(pair.runs[arm], phase), mean(pair.runs[against], phase)
        if variant is None or control is None:
            return None
        found.append(variant - control)
    return found


def _line(shares: Sequence[float], differences: Sequence[float]) -> CostAndGain:
    """The least-squares line by its ends: the cost at share 0 and the gain at share 1."""
    slope, intercept = statistics.linear_regression(shares, differences)
    return CostAndGain(cost_seconds=intercept, gain_seconds=-(intercept + slope))


def _where(
    cost: Interval, gain: Interval, zero: Interval, shares: Sequence[float]
) -> tuple[Literal["above", "every", "none", "unknown"], list[str]]:
    """Where on 0..1 the variant pays, and what has to be said of it."""
    spanned = f"{min(shares):.0%} to {max(shares):.0%}"
    none_inside = "the line has no zero between 0 % and 100 %"
    if cost.estimate > 0 and gain.estimate <= 0:
        said = [f"pays at none of the shares measured ({spanned}): {none_inside}"]
        return "none", said + (["at 100 % the interval of the difference holds 0"] if gain.high > 0 else [])
    if cost.estimate <= 0 and gain.estimate >= 0:
        said = [f"pays at every share measured ({spanned}): {none_inside}"]
        return "every", said + (["at 0 % the interval of the difference holds 0"] if cost.high > 0 else [])
    if cost.estimate <= 0:
        return "unknown", ["the gain falls as more requests return, so there is no share from which on it pays"]
    if not 0 <= zero.estimate <= 1:
        return "unknown", ["the pairs' lines have their zeros so far apart that no share can be given"]
    if zero.low <= 0 and zero.high >= 1:
        return "above", ["not located: its interval covers every share"]
    return "above", []


def _minus_computed(
    pairs: Sequence[Pair], lines: Mapping[int, CostAndGain], arm: str, against: str, phases: tuple[str, str]
) -> Interval | None:
    """Found minus computed share over the pairs that have both, each within 0..1; None without such a pair."""
    both = [
        _clipped(lines[pair.number].share) - _clipped(computed.share)
        for pair in pairs
        if pair.number in lines and (computed := _of_pair(pair, arm, against, *phases)) is not None
    ]
    return hodges_lehmann(both) if both else None


def _point(phase: str, share: float, index: int, measured: Mapping[int, list[float]]) -> SharePoint:
    difference = hodges_lehmann([found[index] for found in measured.values()])
    return SharePoint(phase, share, difference.estimate, difference.low, difference.high, difference.confidence)
