"""From which share of returning requests on the variant pays: cost / (gain + cost), as one number with an interval.

A request to a prefix never seen before costs `cost` more time to its first token in the variant (it also stores), one
that returns to an evicted prefix saves `gain`. With a share s of returns it pays when s · gain > (1 − s) · cost.
"""

from collections.abc import Sequence

from msgspec import Struct

from kvtrial.analysis.effect import Interval, hodges_lehmann
from kvtrial.analysis.faults import Pair
from kvtrial.analysis.metrics import find_metric
from kvtrial.record.verdict import BreakEven

_METRIC = "ttft_median_seconds"


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
    pairs: Sequence[Pair], arm: str, against: str, hit: str, miss: str, own_hit_share: float | None = None
) -> BreakEven:
    """Break-even share of returns (0..1) over valid pairs: Hodges-Lehmann of the pairs' shares with its exact interval.

    Cost and gain are the Hodges-Lehmann estimates of their own pair differences, in seconds. A pair that lacks one of
    its four values is left out and said.
    """
    known = [found for pair in pairs if (found := _of_pair(pair, arm, against, hit, miss)) is not None]
    if not known:
        return BreakEven(
            None, None, None, None, None, None, own_hit_share, f"no pair has TTFT of both {hit} and {miss}"
        )
    cost, gain = hodges_lehmann([p.cost_seconds for p in known]), hodges_lehmann([p.gain_seconds for p in known])
    note = _note(cost, gain, own_hit_share, len(pairs) - len(known))
    if gain.estimate <= 0:
        return BreakEven(None, None, None, None, cost.estimate, gain.estimate, own_hit_share, note)
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
        said.insert(0, "the gain is not shown: its interval holds 0")
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
