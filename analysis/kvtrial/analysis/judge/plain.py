"""What a plain paired test gives: mean of the pair differences in percent, t interval, exact sign-flip p.

It stands beside the verdict, because this is what most people computed already. It decides nothing: the verdict comes
from `kvtrial.analysis.effect`.
"""

import itertools
import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

import numpy
from scipy import stats

MOST_FLIPPED_EXACTLY = 16
_SIMULATED_FLIPS = 100_000
_SEED = 20_261_129


def percent_differences(control: Sequence[float], variant: Sequence[float]) -> list[float]:
    """(variant / control - 1) in percent, pair by pair."""
    return [100 * (v / c - 1) for c, v in zip(control, variant, strict=True)]


def t_interval(differences: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Student's interval of the mean; None under two pairs. Assumption: pair differences are normal."""
    if len(differences) < 2:
        return None
    quantile = float(stats.t.ppf(0.5 + confidence / 2, len(differences) - 1))
    half = quantile * stdev(differences) / math.sqrt(len(differences))
    return fmean(differences) - half, fmean(differences) + half


def signflip_p(differences: Sequence[float]) -> float:
    """Two-sided p of the mean under random signs: all 2**n up to 16 pairs, beyond 100,000 draws of a fixed seed."""
    values = list(differences)
    observed = abs(math.fsum(values)) - 1e-9
    if len(values) <= MOST_FLIPPED_EXACTLY:
        flips = itertools.product((1, -1), repeat=len(values))
        hits = sum(abs(math.fsum(s * v for s, v in zip(signs, values, strict=True))) >= observed for signs in flips)
        return hits / 2.0 ** len(values)
    draws = numpy.random.default_rng(_SEED).choice([-1.0, 1.0], size=(_SIMULATED_FLIPS, len(values)))
    return float(numpy.mean(numpy.abs(draws @ numpy.array(values)) >= observed))


def plain_numbers(control: Sequence[float], variant: Sequence[float]) -> dict[str, Any]:
    """The plain test's figures under the names they are reported with."""
    differences = percent_differences(control, variant)
    interval = t_interval(differences)
    return {
        "n_pairs": len(differences),
        "diff_pct": [round(value, 2) for value in differences],
        "mean_pct": round(fmean(differences), 2),
        "t95": None if interval is None else [round(interval[0], 2), round(interval[1], 2)],
        "signflip_p": round(signflip_p(differences), 4),
    }
