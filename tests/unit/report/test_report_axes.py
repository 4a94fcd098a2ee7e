"""Axes of ratios can be read: x1 is a tick where it lies on the axis, and ticks have few digits."""

import itertools
import math

import pytest
from kvtrial.analysis.report.drawing import LEAST_TICK_STEP, ratio_axis
from kvtrial.analysis.report.words import Words
from matplotlib.figure import Figure

WIDE = [(low / 100, high / 100) for low in range(20, 100, 6) for high in range(102, 500, 12)]
OF_COMMITTED_PAGES = [(0.542032, 1.91577), (0.685251, 1.53062)]
NARROW = [(0.9951, 1.0049), (0.98, 1.9), (1.0312, 1.0377), (3.21, 3.29), (0.01234, 0.0157)]


def ticks(low: float, high: float) -> list[float]:
    axes = Figure().subplots()
    ratio_axis(axes, low, high, Words("en"))
    return list(axes.xaxis.get_ticklocs())


@pytest.mark.parametrize("ends", [OF_COMMITTED_PAGES, NARROW, WIDE], ids=["committed", "narrow", "wide"])
def test_an_axis_of_ratios_has_ticks_that_can_be_read(ends: list[tuple[float, float]]) -> None:
    for low, high in ends:
        found = ticks(low, high)
        assert len(found) >= 2, (low, high)
        assert all(low <= tick <= high for tick in found), (low, high, found)
        digits = 4 if high / low < 1.01 else 3
        assert all(float(f"{tick:.{digits}g}") == tick for tick in found), (low, high, found)
        if low < 1 < high:
            assert 1.0 in found, (low, high, found)
        steps = [math.log(after / before) for before, after in itertools.pairwise(found)]
        if low < 1 < high:
            assert min(steps) >= 0.99 * LEAST_TICK_STEP * math.log(high / low), (low, high, found)
