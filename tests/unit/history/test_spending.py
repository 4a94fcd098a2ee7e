"""Pooled nights: all looks together err as seldom as declared, whatever a night is."""

import math

import numpy
import pytest
from kvtrial.analysis.history.reading import over_nights
from kvtrial.analysis.spending import blocks, levels, spent
from scipy import special

NIGHTS = [f"2026-11-{number + 1:02}" for number in range(7)]


def test_all_of_alpha_is_spent_at_the_end_and_little_at_the_beginning():
    for spending in ("obrien_fleming", "pocock"):
        shares = [spent(look / 10, 0.05, spending) for look in range(11)]
        assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == pytest.approx(0.05)
    assert levels(7)[0] == 0 and levels(7)[1] < 1e-3 < 0.02 < levels(7)[-1] < 0.05


@pytest.mark.parametrize("looks", [2, 3, 7, 14])
@pytest.mark.parametrize("spending", ["obrien_fleming", "pocock"])
def test_looks_after_another_err_as_seldom_as_declared(looks, spending):
    """40,000 trials without an effect, the t of the nights so far looked at every night."""
    values = numpy.random.default_rng(5).standard_normal((40_000, looks))
    crossed, plain = numpy.zeros(40_000, bool), numpy.zeros(40_000, bool)
    for look in range(2, looks + 1):
        so_far = values[:, :look]
        t = so_far.mean(axis=1) / so_far.std(axis=1, ddof=1) * math.sqrt(look)
        p_values = 2 * special.stdtr(look - 1, -abs(t))
        crossed |= p_values < levels(looks, 0.05, spending)[look - 1]
        plain |= p_values < 0.05
    assert crossed.mean() == pytest.approx(0.05, abs=4 * math.sqrt(0.05 * 0.95 / 40_000))
    # What the rule prevents: looking each night at 5 %.
    assert looks == 2 or plain.mean() > 0.08


def wrong_trials(hosts, of_night, of_host, shared=True, trials=400):
    """Share of trials of seven looks that decide on an effect that is none: six pairs a night, their SD 3 %."""
    generator = numpy.random.default_rng(7)
    wrong = 0
    for _ in range(trials):
        nights = of_night * generator.standard_normal((1 if shared else hosts, 7, 1))
        own = of_host * generator.standard_normal((hosts, 1, 1))
        pairs = nights + own + 0.03 * generator.standard_normal((hosts, 7, 6))
        by_host = {str(h): {night: list(pairs[h, n]) for n, night in enumerate(NIGHTS)} for h in range(hosts)}
        for look in range(2, 8):
            interval = over_nights(by_host, NIGHTS[:look], 1 - levels(7)[look - 1])
            if not interval.low <= 0 <= interval.high:
                wrong += 1
                break
    return wrong / trials


@pytest.mark.parametrize("of_night", [0, 0.01, 0.03, 0.1])
def test_nights_that_differ_are_no_effect(of_night):
    assert wrong_trials(1, of_night, 0) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)


@pytest.mark.parametrize(
    ("of_night", "of_host", "shared"), [(0.03, 0, True), (0.03, 0.04, True), (0, 0.04, True), (0.03, 0.04, False)]
)
def test_nor_are_they_over_a_fleet_of_hosts_that_differ(of_night, of_host, shared):
    assert wrong_trials(4, of_night, of_host, shared) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)


def test_the_check_of_nights_can_fail():
    """Pairs of all nights taken as independent err many times as often."""
    generator = numpy.random.default_rng(7)
    pairs = 0.03 * generator.standard_normal((2000, 7, 1)) + 0.03 * generator.standard_normal((2000, 7, 6))
    flat = pairs.reshape(2000, 42)
    t = flat.mean(axis=1) / flat.std(axis=1, ddof=1) * math.sqrt(42)
    assert (2 * special.stdtr(41, -abs(t)) < levels(7)[-1]).mean() > 0.15


def test_one_night_says_nothing_and_missing_nights_of_a_host_are_no_effect():
    one = {"a": {NIGHTS[0]: [0.1, 0.2]}}
    assert over_nights(one, NIGHTS[:1], 0.95) is None
    # Two hosts at levels 0 and 1; which of them ran on a night makes no difference to the nights.
    uneven = {"a": {night: [0.0] for night in NIGHTS[:4]}, "b": {night: [1.0] for night in NIGHTS[2:6]}}
    found = over_nights(uneven, NIGHTS[:6], 0.95)
    assert found.estimate == pytest.approx(0.5) and found.pairs == 8


def test_nights_are_cut_into_trials():
    assert blocks(["b", "a", "c", "a", "e", "d"], 2) == [["a", "b"], ["c", "d"], ["e"]]
