"""When nights may be pooled: how much of alpha each look at growing data may spend. Pure.

Lan and DeMets (Biometrika 70, 1983, 659): a declared function says how much of alpha is spent by which share of the
information; the bounds follow by integrating the density of the paths that have not crossed before (Armitage,
McPherson, Rowe, J. R. Stat. Soc. A 132, 1969, 235). An interval at each look's own level covers at all looks together
with 1 − alpha (repeated confidence intervals, Jennison, Turnbull, J. R. Stat. Soc. B 51, 1989, 305), so any verdict may
be drawn from it at any look.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from statistics import NormalDist

import numpy
from scipy import special

from kvtrial.analysis.fleet import Floats
from kvtrial.record.protocol import Spending

_NORMAL = NormalDist()
_POINTS = 801
_LEAST_SPENT = 1e-14
_FARTHEST = 9.0
_HALVINGS = 60


def spent(share: float, alpha: float, spending: Spending) -> float:
    """Two-sided alpha spent when `share` (0..1) of the information is in.

    obrien_fleming: on each side 2 − 2Φ(z_{α/4} / √t), hardly anything early. pocock: α ln(1 + (e − 1) t), about evenly.
    """
    if share <= 0:
        return 0.0
    if spending == "pocock":
        return alpha * math.log1p((math.e - 1) * share)
    return 4 - 4 * _NORMAL.cdf(_NORMAL.inv_cdf(1 - alpha / 4) / math.sqrt(share))


@lru_cache(maxsize=256)
def bounds(looks: int, alpha: float = 0.05, spending: Spending = "obrien_fleming") -> tuple[float, ...]:
    """|Z| that each of `looks` equally spaced looks must exceed; infinite where nothing may be spent yet."""
    found: list[float] = []
    values = weights = density = numpy.zeros(1)
    for look in range(1, looks + 1):
        share = look / looks
        step = math.sqrt(1 / looks)
        increment = spent(share, alpha, spending) - spent((look - 1) / looks, alpha, spending)

        crossing = partial(_crossing, values, weights * density, share, step) if look > 1 else _beyond
        limit = math.inf if increment < _LEAST_SPENT else _solved(crossing, increment)
        found.append(limit)
        edge = min(limit, _FARTHEST) * math.sqrt(share)
        grid = numpy.linspace(-edge, edge, _POINTS)
        if look == 1:
            following = numpy.exp(-((grid / step) ** 2) / 2) / step / math.sqrt(2 * math.pi)
        else:
            kernel = numpy.exp(-(((grid[:, None] - values[None, :]) / step) ** 2) / 2) / step / math.sqrt(2 * math.pi)
            following = kernel @ (weights * density)
        values, density, weights = grid, following, _simpson(grid)
    return tuple(found)


def levels(looks: int, alpha: float = 0.05, spending: Spending = "obrien_fleming") -> tuple[float, ...]:
    """The two-sided level of each look by itself: its interval has the confidence 1 − level."""
    return tuple(0.0 if math.isinf(bound) else 2 * (1 - _NORMAL.cdf(bound)) for bound in bounds(looks, alpha, spending))


def blocks(nights: Sequence[str], looks: int) -> list[list[str]]:
    """Nights in their order as trials of at most `looks` looks each; a new one begins when the one before is full."""
    ordered = sorted(set(nights))
    return [ordered[start : start + looks] for start in range(0, len(ordered), looks)]


def _beyond(limit: float) -> float:
    """Chance that |Z| of the first look exceeds the limit."""
    return 2 * float(special.ndtr(-limit))


def _crossing(values: Floats, mass: Floats, share: float, step: float, limit: float) -> float:
    """Chance that a path which has not crossed before is beyond the limit at the look of this share."""
    edge = limit * math.sqrt(share)
    beyond = special.ndtr((values - edge) / step) + special.ndtr((-values - edge) / step)
    return float((mass * beyond).sum())


def _solved(crossing: Callable[[float], float], increment: float) -> float:
    low, high = 0.0, _FARTHEST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if crossing(middle) > increment else (low, middle)
    return (low + high) / 2


def _simpson(grid: Floats) -> Floats:
    weights = numpy.full(len(grid), 2.0)
    weights[1::2] = 4.0
    weights[0] = weights[-1] = 1.0
    return numpy.asarray(weights * (grid[1] - grid[0]) / 3)
