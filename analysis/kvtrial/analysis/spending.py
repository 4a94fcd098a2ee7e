"""When nights may be pooled: how much of alpha each look at growing data may spend. Pure.

Lan and DeMets (Biometrika 70, 1983, 659): a declared function says how much of alpha is spent by which share of the
information. What is looked at is the t of the nights so far, each night being one value; the level of each look follows
from simulated trials that have not crossed before. An interval at each look's own level covers at all looks together
with 1 − alpha (repeated confidence intervals, Jennison, Turnbull, J. R. Stat. Soc. B 51, 1989, 305), so any verdict may
be drawn from it at any look.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

import numpy
from scipy import special

from kvtrial.record.protocol import Spending

_NORMAL = NormalDist()
_TRIALS = 200_000
_SEED = 20_261_130
_LEAST_CROSSING = 100
"""Of simulated trials. Where fewer are to cross, the level is what may be spent itself, which is never too much."""


def spent(share: float, alpha: float, spending: Spending) -> float:
    """Two-sided alpha spent when `share` (0..1) of the information is in.

    obrien_fleming: on each side 2 − 2Φ(z_{α/4} / √t), hardly anything early. pocock: α ln(1 + (e − 1) t), about evenly.
    """
    if share <= 0:
        return 0.0
    if spending == "pocock":
        return alpha * math.log1p((math.e - 1) * share)
    return 4 - 4 * _NORMAL.cdf(_NORMAL.inv_cdf(1 - alpha / 4) / math.sqrt(share))


@lru_cache(maxsize=64)
def levels(looks: int, alpha: float = 0.05, spending: Spending = "obrien_fleming") -> tuple[float, ...]:
    """The two-sided level of each look by itself: its interval has the confidence 1 − level.

    0 where nothing can be said: of one night. What that look might have spent goes to the next.
    """
    generator = numpy.random.default_rng([_SEED, looks])
    total = squares = numpy.zeros(_TRIALS)
    crossed = numpy.zeros(_TRIALS, dtype=bool)
    bounded = 0.0
    found = []
    for look in range(1, looks + 1):
        night = generator.standard_normal(_TRIALS)
        total, squares = total + night, squares + night**2
        if look == 1:
            found.append(0.0)
            continue
        error = numpy.sqrt((squares - total**2 / look) / (look - 1) / look)
        p_values = 2 * special.stdtr(look - 1, -numpy.abs(total / look) / error)
        left = max(0.0, spent(look / looks, alpha, spending) - bounded - float(crossed.mean()))
        due = int(left * _TRIALS)
        if due < _LEAST_CROSSING:
            level, bounded = left, bounded + left
        else:
            level = float(numpy.partition(p_values[~crossed], due)[due])
            crossed |= p_values < level
        found.append(level)
    return tuple(found)


def blocks(nights: Sequence[str], looks: int) -> list[list[str]]:
    """Nights in their order as trials of at most `looks` looks each; a new one begins when the one before is full."""
    ordered = sorted(set(nights))
    return [ordered[start : start + looks] for start in range(0, len(ordered), looks)]
