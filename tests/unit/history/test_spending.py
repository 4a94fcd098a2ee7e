"""Pooled nights: bounds as published, and all looks together err as seldom as declared."""

import math

import numpy
import pytest
from kvtrial.analysis.effect import hodges_lehmann
from kvtrial.analysis.spending import blocks, bounds, levels, spent


def test_the_bounds_are_the_published_ones():
    # Five equally spaced looks, two-sided 5 %, as R's ldbounds and gsDesign print them.
    assert bounds(5) == pytest.approx([4.877, 3.357, 2.680, 2.290, 2.031], abs=1e-3)
    assert bounds(5, 0.05, "pocock") == pytest.approx([2.438, 2.427, 2.410, 2.397, 2.386], abs=1e-3)
    assert bounds(1) == pytest.approx([1.960], abs=1e-3)


def test_all_of_alpha_is_spent_at_the_end_and_little_at_the_beginning():
    for spending in ("obrien_fleming", "pocock"):
        shares = [spent(look / 10, 0.05, spending) for look in range(11)]
        assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == pytest.approx(0.05)
    assert levels(7)[0] < 1e-5 < 0.03 < levels(7)[-1] < 0.05


def test_looks_after_another_err_as_seldom_as_declared():
    """4,000 trials of seven nights without an effect, six pairs a night, looked at every night."""
    generator = numpy.random.default_rng(5)
    sums = generator.standard_normal((4000, 7, 6)).sum(axis=2).cumsum(axis=1)
    z = numpy.abs(sums / numpy.sqrt(6 * numpy.arange(1, 8)))
    for spending in ("obrien_fleming", "pocock"):
        crossed = (z > numpy.array(bounds(7, 0.05, spending))).any(axis=1).mean()
        assert crossed == pytest.approx(0.05, abs=3 * math.sqrt(0.05 * 0.95 / 4000))
    # What the rule prevents: looking each night at 5 %.
    assert (z > 1.96).any(axis=1).mean() > 0.15


def test_the_exact_interval_at_each_looks_level_errs_as_seldom():
    """600 trials with the interval that the history uses; heavy-tailed pairs."""
    generator = numpy.random.default_rng(6)
    wrong = 0
    for _ in range(600):
        pairs = generator.standard_t(3, 7 * 4)
        for look, level in enumerate(levels(7), start=1):
            interval = hodges_lehmann(list(pairs[: 4 * look]), 1 - level)
            if interval.confidence >= 1 - level and not interval.low <= 0 <= interval.high:
                wrong += 1
                break
    assert wrong / 600 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 600)


def test_nights_are_cut_into_trials():
    assert blocks(["b", "a", "c", "a", "e", "d"], 2) == [["a", "b"], ["c", "d"], ["e"]]
