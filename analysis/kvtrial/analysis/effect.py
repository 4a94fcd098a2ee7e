"""The effect of one arm against another from paired runs: how large, how sure, and what it may be called.

Estimator: Hodges and Lehmann's median of the Walsh averages of the pair differences, with the confidence interval and
the test that invert the exact null distribution of Wilcoxon's signed-rank statistic (Hollander, Wolfe, Chicken,
Nonparametric Statistical Methods, 3rd ed., sections 3.1-3.3). Assumption: pair differences are independent and
symmetric about the effect. A pair is one control run and one variant run; requests inside a run are never pooled.

On the scale `ratio` a pair difference is log(arm / against), on `difference` it is arm - against in the metric's unit.
Everything here is on that inner scale; `outward` turns it into what a person reads.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist, median, stdev
from typing import Literal

import numpy
from msgspec import Struct
from numpy.typing import NDArray

from kvtrial.record.protocol import EffectScale
from kvtrial.record.verdict import Word

Better = Literal["lower", "higher"]

LEAST_PAIRS = 6
"""With n pairs the least two-sided p is 2 / 2**n: 2/32 = .0625 for five, 2/64 = .031 for six."""

MOST_PAIRS_SEARCHED = 1000
EXACT_UP_TO = 100
"""Pairs; counting the distribution of n takes n³ steps."""
_SIMULATED_UP_TO = 30
_SIMULATED_CAMPAIGNS = 20_000
_SIMULATION_SEED = 20_261_129
_SIGNED_RANK_EFFICIENCY = 3 / math.pi
_NORMAL = NormalDist()


class Interval(Struct, frozen=True):
    """Hodges-Lehmann estimate with its exact interval, on the inner scale.

    `confidence` is the attained one, at least that asked for, except with fewer pairs than can reach it: then the
    interval is the whole range of the pairs and `confidence` what that range attains. `sd` is that of the pair
    differences (None for one pair).
    """

    estimate: float
    low: float
    high: float
    confidence: float
    p_value: float
    pairs: int
    sd: float | None


def log_ratios(arm: Sequence[float], against: Sequence[float]) -> list[float]:
    """log(arm / against) pair by pair. Raises ValueError unless all values are positive and both are equally long."""
    if any(value <= 0 for value in (*arm, *against)):
        raise ValueError("a ratio needs positive values on both sides")
    return [math.log(a) - math.log(b) for a, b in zip(arm, against, strict=True)]


def differences(arm: Sequence[float], against: Sequence[float]) -> list[float]:
    """arm - against pair by pair, in the metric's unit. Raises ValueError unless both are equally long."""
    return [a - b for a, b in zip(arm, against, strict=True)]


def outward(value: float, scale: EffectScale) -> float:
    """The inner scale's value as reported: a ratio arm / against, or a difference in the metric's unit."""
    return math.exp(value) if scale == "ratio" else value


def inner_margin(margin: float, scale: EffectScale) -> float:
    """δ: log(1 + margin) for a ratio, the margin itself for a difference."""
    return math.log1p(margin) if scale == "ratio" else margin


def walsh_averages(values: Sequence[float]) -> list[float]:
    """All n(n+1)/2 averages (x_i + x_j) / 2 with i <= j, sorted."""
    return sorted((values[i] + values[j]) / 2 for i in range(len(values)) for j in range(i, len(values)))


@lru_cache(maxsize=256)
def null_distribution(doubled_ranks: tuple[int, ...]) -> tuple[float, ...]:
    """P(2 T+ = t) for t = 0..sum under the null: every rank carries either sign with probability 1/2.

    Ranks come doubled, so that midranks of ties stay whole numbers. Counted exactly; no approximation for any n.
    """
    counts = [1]
    for rank in doubled_ranks:
        grown = counts + [0] * rank
        for total, ways in enumerate(counts):
            grown[total + rank] += ways
        counts = grown
    everything = 2 ** len(doubled_ranks)
    return tuple(ways / everything for ways in counts)


def _lower_tail(pairs: int, statistic: int) -> float:
    """P(T+ <= statistic) without ties."""
    distribution = null_distribution(tuple(2 * rank for rank in range(1, pairs + 1)))
    return math.fsum(distribution[: 2 * statistic + 1])


@lru_cache(maxsize=1024)
def critical_value(pairs: int, alpha: float = 0.05) -> int | None:
    """The largest c with 2 P(T+ <= c) <= alpha, or None where no outcome is that rare (under six pairs for .05)."""
    if 2 / 2**pairs > alpha:
        return None
    distribution = null_distribution(tuple(2 * rank for rank in range(1, pairs + 1)))
    tail, statistic = 0.0, -1
    while 2 * (tail + distribution[2 * (statistic + 1)]) <= alpha + 1e-12:
        statistic += 1
        tail += distribution[2 * statistic]
    return statistic


def signed_rank_p(values: Sequence[float]) -> float:
    """Exact two-sided p of Wilcoxon's signed-rank test that the pair differences are symmetric about 0.

    Zeros carry no sign and are left out (Wilcoxon's rule), ties get midranks, and the distribution is counted for the
    ranks as they are, so the p stays exact given the ties. All zero, or nothing at all: 1.
    """
    signed = [value for value in values if value != 0]
    if not signed:
        return 1.0
    magnitudes = sorted(abs(value) for value in signed)
    doubled = {m: magnitudes.index(m) + 1 + len(magnitudes) - magnitudes[::-1].index(m) for m in set(magnitudes)}
    ranks = tuple(sorted(doubled[abs(value)] for value in signed))
    positive = sum(doubled[value] for value in signed if value > 0)
    smaller = min(positive, sum(ranks) - positive)
    return min(1.0, 2 * math.fsum(null_distribution(ranks)[: smaller + 1]))


def hodges_lehmann(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Estimate, exact interval and exact p of pair differences on the inner scale. Raises ValueError without a pair.

    The interval is closed, between the (c+1)-th smallest and the (c+1)-th largest Walsh average with c the critical
    value. With ties or zeros it covers at least as often as `confidence` says. Above 100 pairs, as many hosts together
    have, the distribution is taken as normal, which there is off by less than a thousandth.
    """
    if not values:
        raise ValueError("no pair, no effect")
    if len(values) > EXACT_UP_TO:
        return _of_many(numpy.sort(numpy.asarray(values, float)), confidence)
    averages = walsh_averages(values)
    critical = critical_value(len(values), 1 - confidence)
    cut = 0 if critical is None else critical
    return Interval(
        estimate=median(averages),
        low=averages[cut],
        high=averages[-1 - cut],
        confidence=1 - 2 * _lower_tail(len(values), cut),
        p_value=signed_rank_p(values),
        pairs=len(values),
        sd=stdev(values) if len(values) > 1 else None,
    )


def _of_many(ordered: NDArray[numpy.float64], confidence: float) -> Interval:
    """The same with the normal approximation of the signed-rank statistic (continuity and ties corrected)."""
    pairs = len(ordered)
    total = pairs * (pairs + 1) // 2
    deviation = math.sqrt(pairs * (pairs + 1) * (2 * pairs + 1) / 24)
    cut = max(0, math.floor(total / 2 - _NORMAL.inv_cdf((1 + confidence) / 2) * deviation - 0.5))
    signed = ordered[ordered != 0]
    _, group, sizes = numpy.unique(numpy.abs(signed), return_inverse=True, return_counts=True)
    ranks = (numpy.cumsum(sizes) - (sizes - 1) / 2)[group]
    away = abs(float(ranks[signed > 0].sum()) - float(ranks.sum()) / 2) - 0.5
    spread = math.sqrt(float((ranks**2).sum()) / 4)
    low, middle, next_to_it, high = (
        _walsh_average(ordered, rank) for rank in (cut, (total - 1) // 2, total // 2, total - 1 - cut)
    )
    return Interval(
        estimate=(middle + next_to_it) / 2,
        low=low,
        high=high,
        confidence=1 - 2 * _NORMAL.cdf((cut + 0.5 - total / 2) / deviation),
        p_value=min(1.0, 2 * _NORMAL.cdf(-max(0.0, away) / spread)) if spread else 1.0,
        pairs=pairs,
        sd=float(ordered.std(ddof=1)),
    )


def _walsh_average(ordered: NDArray[numpy.float64], rank: int) -> float:
    """The Walsh average with `rank` smaller ones, by halving: of 8,000 pairs there are 32 million, never listed."""
    low, high = float(ordered[0]), float(ordered[-1])
    places = numpy.arange(len(ordered))
    while True:
        middle = (low + high) / 2
        if not low < middle < high:
            return high
        # Pairs i <= j with x_i + x_j <= 2 · middle, counted at their larger index.
        up_to = numpy.minimum(numpy.searchsorted(ordered, 2 * middle - ordered, side="right"), places + 1)
        low, high = (low, middle) if int(up_to.sum()) > rank else (middle, high)


@lru_cache(maxsize=1024)
def standardised_mde(pairs: int, power: float = 0.8, alpha: float = 0.05) -> float | None:
    """Least shift, in standard deviations of a pair difference, that the exact test detects with `power`.

    None where the test cannot reach alpha at all. Normal pair differences are assumed. Where all signs must agree
    (critical value 0) the power Φ(d)^n + Φ(−d)^n is solved exactly. Up to 30 pairs it is the power quantile over 20,000
    simulated campaigns of a fixed seed (Monte-Carlo error under 1 % of the shift; rejections to the wrong side, below
    one in a thousand, are left out). Beyond, the asymptotic efficiency 3/π of the test against t is used.
    """
    if pairs > _SIMULATED_UP_TO:
        quantiles = _NORMAL.inv_cdf(1 - alpha / 2) + _NORMAL.inv_cdf(power)
        return quantiles / math.sqrt(pairs * _SIGNED_RANK_EFFICIENCY)
    critical = critical_value(pairs, alpha)
    if critical is None:
        return None
    if critical == 0:
        return _shift_where_all_signs_agree(pairs, power)
    return _simulated_shift(pairs, critical, power)


def _shift_where_all_signs_agree(pairs: int, power: float) -> float:
    low, high = 0.0, 10.0
    for _ in range(80):
        middle = (low + high) / 2
        reached = _NORMAL.cdf(middle) ** pairs + _NORMAL.cdf(-middle) ** pairs
        low, high = (low, middle) if reached >= power else (middle, high)
    return high


def _simulated_shift(pairs: int, critical: int, power: float) -> float:
    """The test rejects upward once the (c+1)-th smallest Walsh average is above 0: one quantile, no search."""
    generator = numpy.random.default_rng(_SIMULATION_SEED + pairs)
    first, second = numpy.triu_indices(pairs)
    needed = []
    for _ in range(10):
        sample = generator.standard_normal((_SIMULATED_CAMPAIGNS // 10, pairs))
        averages = (sample[:, first] + sample[:, second]) / 2
        needed.append(-numpy.partition(averages, critical, axis=1)[:, critical])
    return float(numpy.quantile(numpy.concatenate(needed), power))


def mde(log_sd: float, pairs: int, power: float = 0.8, alpha: float = 0.05) -> float | None:
    """Least ratio (> 1) that `pairs` pairs with this SD of the pair log ratios detect as different from 1.

    Its inverse is the least detectable fall. None with too few pairs. See `standardised_mde`.
    """
    shift = standardised_mde(pairs, power, alpha)
    return None if shift is None else math.exp(shift * log_sd)


def pairs_for_shift(sd: float, shift: float, power: float = 0.8, alpha: float = 0.05) -> int | None:
    """Least number of pairs that detects `shift` (inner scale); None where more than 1,000 would be needed."""
    if shift <= 0:
        return None
    least = next(pairs for pairs in range(1, 64) if critical_value(pairs, alpha) is not None)
    if sd == 0:
        return least
    low, high = least, MOST_PAIRS_SEARCHED
    if (standardised_mde(high, power, alpha) or math.inf) * sd > shift:
        return None
    while low < high:
        middle = (low + high) // 2
        if (standardised_mde(middle, power, alpha) or math.inf) * sd <= shift:
            high = middle
        else:
            low = middle + 1
    return low


def pairs_needed(
    log_sd: float, margin: float, effect: float | None = None, power: float = 0.8, alpha: float = 0.05
) -> int | None:
    """Pairs needed for a verdict at this margin (relative), or None where more than 1,000 would be.

    Without `effect`: to detect a change as large as the margin. With `effect` (a ratio): to have the whole interval
    on the side of the margin's border where the effect lies, beyond it or inside.
    """
    delta = inner_margin(margin, "ratio")
    distance = delta if effect is None else abs(abs(math.log(effect)) - delta)
    return pairs_for_shift(log_sd, distance, power, alpha)


def decide(interval: Interval, margin: float, scale: EffectScale, better: Better) -> tuple[Word, str]:
    """The verdict on one comparison and a note (may be empty).

    BETTER and WORSE: the whole interval lies beyond δ on that side. EQUIVALENT: inside ±δ. Else INCONCLUSIVE, with
    what is known and the pairs needed. Fewer than six pairs are always INCONCLUSIVE.
    """
    if interval.pairs < LEAST_PAIRS:
        least_p = 2 / 2**interval.pairs
        return "INCONCLUSIVE", (
            f"with {interval.pairs} pair{'s' if interval.pairs != 1 else ''} the exact two-sided test cannot reach "
            f"p < .05 (its least p is {least_p:.3g}); at least {LEAST_PAIRS} pairs are needed"
        )
    delta = inner_margin(margin, scale)
    low_side, high_side = ("BETTER", "WORSE") if better == "lower" else ("WORSE", "BETTER")
    if interval.low > delta:
        return _word(high_side), ""
    if interval.high < -delta:
        return _word(low_side), ""
    excludes_zero = interval.low > 0 or interval.high < 0
    side = (high_side if interval.estimate > 0 else low_side).lower()
    if interval.low >= -delta and interval.high <= delta:
        return "EQUIVALENT", f"{side} by less than the margin" if excludes_zero else ""
    needed = _needed(interval, delta)
    if excludes_zero:
        return "INCONCLUSIVE", f"{side}, size not yet shown, {needed}"
    return "INCONCLUSIVE", f"neither a difference nor its absence is shown, {needed}"


def _word(side: str) -> Word:
    return "BETTER" if side == "BETTER" else "WORSE"


def _needed(interval: Interval, delta: float) -> str:
    distance = abs(abs(interval.estimate) - delta)
    needed = pairs_for_shift(interval.sd or 0.0, distance)
    if needed is None:
        return (
            f"more than {MOST_PAIRS_SEARCHED:,} pairs needed: it lies at the margin's border, or the noise is too large"
        )
    return f"{max(needed, interval.pairs + 1)} pairs needed"
