"""The estimator, its interval and test, what is detectable, and the words."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtrial.analysis.effect import (
    critical_value,
    decide,
    differences,
    hodges_lehmann,
    log_ratios,
    mde,
    pairs_for_shift,
    pairs_needed,
    signed_rank_p,
    standardised_mde,
)
from scipy.stats import wilcoxon

seconds = st.floats(min_value=1e-3, max_value=1e3, allow_nan=False)
pairs = st.lists(st.tuples(seconds, seconds), min_size=1, max_size=12)
many_pairs = st.lists(st.tuples(seconds, seconds), min_size=6, max_size=12)
untimed = settings(deadline=None)
OTHER_WORD = {"BETTER": "WORSE", "WORSE": "BETTER", "EQUIVALENT": "EQUIVALENT", "INCONCLUSIVE": "INCONCLUSIVE"}


def split(values):
    return [a for a, _ in values], [b for _, b in values]


@untimed
@given(many_pairs, st.sampled_from([0.0, 0.05, 0.5]), st.sampled_from(["lower", "higher"]))
def test_swapping_the_arms_inverts_the_effect_and_swaps_the_words(values, margin, better):
    arm, against = split(values)
    there, back = hodges_lehmann(log_ratios(arm, against)), hodges_lehmann(log_ratios(against, arm))
    assert back.estimate == pytest.approx(-there.estimate, abs=1e-12)
    assert (back.low, back.high) == pytest.approx((-there.high, -there.low), abs=1e-12)
    assert back.p_value == there.p_value
    assert decide(back, margin, "ratio", better)[0] == OTHER_WORD[decide(there, margin, "ratio", better)[0]]


@untimed
@given(pairs, st.sampled_from([0.25, 2.0, 1024.0]))
def test_scaling_both_arms_changes_nothing(values, factor):
    arm, against = split(values)
    before = hodges_lehmann(log_ratios(arm, against))
    after = hodges_lehmann(log_ratios([factor * v for v in arm], [factor * v for v in against]))
    assert after.estimate == pytest.approx(before.estimate, abs=1e-9)
    assert (after.low, after.high) == pytest.approx((before.low, before.high), abs=1e-9)


@untimed
@given(pairs)
def test_the_interval_contains_the_estimate_and_lies_within_the_pairs(values):
    effects = log_ratios(*split(values))
    found = hodges_lehmann(effects)
    assert min(effects) <= found.low <= found.estimate <= found.high <= max(effects)
    assert 0 <= found.p_value <= 1


@untimed
@given(pairs, st.randoms())
def test_the_order_of_pairs_does_not_matter(values, shuffler):
    effects = log_ratios(*split(values))
    shuffled = list(effects)
    shuffler.shuffle(shuffled)
    assert hodges_lehmann(shuffled).low == hodges_lehmann(effects).low
    assert signed_rank_p(shuffled) == signed_rank_p(effects)


@untimed
@given(st.lists(st.integers(-(10**6), 10**6).filter(bool), min_size=1, max_size=14, unique_by=abs))
def test_p_equals_scipys_exact_one_where_there_are_no_ties(values):
    assert signed_rank_p(values) == pytest.approx(wilcoxon(values, method="exact").pvalue)


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=9))
@settings(deadline=None, max_examples=60)
def test_p_with_ties_and_zeros_equals_all_sign_flips_counted(values):
    signed = [v for v in values if v]
    if not signed:
        assert signed_rank_p(values) == 1.0
        return
    ranks = {m: sum(abs(v) < m for v in signed) + (sum(abs(v) == m for v in signed) + 1) / 2 for m in map(abs, signed)}
    centre = sum(ranks[abs(v)] for v in signed) / 2
    observed = abs(sum(ranks[abs(v)] for v in signed if v > 0) - centre)
    as_far = 0
    for flips in range(2 ** len(signed)):
        positive = sum(ranks[abs(v)] for i, v in enumerate(signed) if flips >> i & 1)
        as_far += abs(positive - centre) >= observed - 1e-9
    assert signed_rank_p(values) == pytest.approx(as_far / 2 ** len(signed))


@untimed
@given(many_pairs)
def test_the_interval_excludes_zero_exactly_where_p_is_below_alpha(values):
    effects = log_ratios(*split(values))
    if len({abs(v) for v in effects}) < len(effects) or 0 in effects:
        return  # ties: the interval is then the more careful of the two
    found = hodges_lehmann(effects)
    assert (found.low > 0 or found.high < 0) == (found.p_value <= 0.05)


def test_six_pairs_give_the_range_of_the_six_at_96_9_percent():
    measured = hodges_lehmann(
        log_ratios([32.2, 33.2, 32.7, 37.8, 38.1, 37.6], [232.9, 232.5, 223.1, 244.3, 241.3, 193.6])
    )
    assert math.exp(measured.estimate) == pytest.approx(0.151, abs=5e-4)
    assert (math.exp(measured.low), math.exp(measured.high)) == pytest.approx((0.138, 0.194), abs=5e-4)
    assert measured.confidence == pytest.approx(1 - 2 / 64)
    assert measured.p_value == pytest.approx(2 / 64)


@pytest.mark.parametrize(("count", "cut"), [(5, None), (6, 0), (7, 2), (8, 3), (9, 5), (10, 8), (12, 13), (20, 52)])
def test_critical_values_are_those_of_the_tables(count, cut):
    assert critical_value(count) == cut


@pytest.mark.parametrize("count", [6, 8])
def test_the_interval_covers_as_often_as_it_says(count):
    generator = random.Random(2026 + count)
    campaigns, truth = 2000, math.log(0.9)
    covered, attained = 0, 0.0
    for _ in range(campaigns):
        found = hodges_lehmann([generator.gauss(truth, 0.15) for _ in range(count)])
        covered += found.low <= truth <= found.high
        attained = found.confidence
    error = math.sqrt(attained * (1 - attained) / campaigns)
    assert attained >= 0.95
    assert abs(covered / campaigns - attained) < 4 * error


def test_a_bootstrap_like_interval_would_fail_the_coverage_test():
    """The detector detects: the range of the middle pairs, taken for a 96.9 % interval, is caught."""
    generator = random.Random(7)
    covered = 0
    for _ in range(500):
        values = sorted(generator.gauss(0, 1) for _ in range(6))
        covered += values[1] <= 0 <= values[4]
    assert covered / 500 < 0.96875 - 4 * math.sqrt(0.96875 * 0.03125 / 500)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_fewer_than_six_pairs_are_always_inconclusive(count):
    word, note = decide(hodges_lehmann([-3.0 - i / 100 for i in range(count)]), 0.05, "ratio", "lower")
    assert word == "INCONCLUSIVE"
    assert f"with {count} pair" in note
    assert "cannot reach p < .05" in note


def test_three_pairs_say_their_least_p():
    assert "its least p is 0.25" in decide(hodges_lehmann([-0.06, -0.11, -0.02]), 0.05, "ratio", "lower")[1]


SIX = [0.0, 0.001, 0.002, -0.001, 0.003, -0.002]


@pytest.mark.parametrize(
    ("shift", "better", "word", "note"),
    [
        (-0.2, "lower", "BETTER", ""),
        (0.2, "lower", "WORSE", ""),
        (-0.2, "higher", "WORSE", ""),
        (0.2, "higher", "BETTER", ""),
        (0.0, "lower", "EQUIVALENT", ""),
        (-0.02, "lower", "EQUIVALENT", "better by less than the margin"),
        (math.log(1.05), "lower", "INCONCLUSIVE", "worse, size not yet shown"),
        (-math.log(1.05), "lower", "INCONCLUSIVE", "better, size not yet shown"),
    ],
)
def test_words_follow_the_margin(shift, better, word, note):
    found = decide(hodges_lehmann([shift + v for v in SIX]), 0.05, "ratio", better)
    assert found[0] == word
    assert note in found[1]
    assert bool(note) == bool(found[1])


def test_the_pairs_needed_are_said_where_the_size_is_open():
    spread = [-0.30, -0.05, -0.12, -0.22, -0.03, -0.18]
    word, note = decide(hodges_lehmann(spread), 0.05, "ratio", "lower")
    assert word == "INCONCLUSIVE"
    assert note.startswith("better, size not yet shown, ")
    assert note.endswith(" pairs needed")
    assert 6 < int(note.split()[-3]) < 100


def test_a_difference_has_its_margin_in_the_metrics_unit():
    found = hodges_lehmann(differences([10, 11, 12, 10, 11, 12], [1, 1, 2, 1, 2, 1]))
    assert decide(found, 5, "difference", "lower")[0] == "WORSE"
    assert decide(found, 12, "difference", "lower")[0] == "EQUIVALENT"


def test_two_arms_without_any_preemption_are_equivalent():
    assert decide(hodges_lehmann([0.0] * 6), 0.0, "difference", "lower")[0] == "EQUIVALENT"


def test_a_ratio_of_nothing_is_refused():
    with pytest.raises(ValueError, match="positive"):
        log_ratios([1.0, 0.0], [1.0, 1.0])


def test_least_detectable_effect_with_six_pairs_is_about_1_8_sd():
    assert standardised_mde(6) == pytest.approx(1.79, abs=0.01)
    assert mde(0.20, 6) == pytest.approx(1.43, abs=0.005)
    assert mde(0.147, 6) == pytest.approx(1.30, abs=0.005)
    assert mde(0.025, 6) == pytest.approx(1.046, abs=0.001)
    assert mde(0.1, 5) is None


@pytest.mark.parametrize("count", [7, 8, 12, 30, 40])
def test_the_stated_shift_really_is_detected_with_the_stated_power(count):
    shift = standardised_mde(count)
    assert shift is not None
    generator = random.Random(count)
    campaigns = 800
    detected = sum(signed_rank_p([generator.gauss(shift, 1) for _ in range(count)]) <= 0.05 for _ in range(campaigns))
    assert abs(detected / campaigns - 0.8) < 4 * math.sqrt(0.8 * 0.2 / campaigns)


def test_more_pairs_detect_less_and_the_answer_is_always_the_same():
    shifts = [standardised_mde(n) for n in range(6, 45)]
    assert all(a is not None and b is not None and b <= a * 1.02 for a, b in pairwise(shifts))
    assert standardised_mde.__wrapped__(11) == standardised_mde(11)


def test_pairs_needed_is_the_least_number_whose_detectable_effect_fits():
    needed = pairs_needed(0.08, 0.05)
    assert needed is not None
    assert mde(0.08, needed) <= 1.05 < mde(0.08, needed - 1)
    assert pairs_needed(0.0, 0.05) == 6
    assert pairs_needed(0.2, 0.001) is None
    assert pairs_for_shift(0.1, 0.0) is None
    assert pairs_needed(0.1, 0.05, effect=0.5) == 6


def test_many_pairs_give_what_counting_gives(monkeypatch):
    import numpy
    from kvtrial.analysis import effect

    generator = numpy.random.default_rng(8)
    for shift, digits in ((0.1, 6), (0.0, 1)):
        values = [round(float(v), digits) for v in generator.normal(shift, 1, 90)]
        exact = effect.hodges_lehmann(values)
        monkeypatch.setattr(effect, "EXACT_UP_TO", 10)
        many = effect.hodges_lehmann(values)
        monkeypatch.undo()
        for field in ("estimate", "low", "high"):
            assert getattr(many, field) == pytest.approx(getattr(exact, field), abs=0.01)
        assert many.estimate == pytest.approx(exact.estimate, abs=1e-12)
        assert many.p_value == pytest.approx(exact.p_value, abs=2e-3)
        assert many.confidence == pytest.approx(exact.confidence, abs=2e-3)


def test_eight_thousand_pairs_take_no_memory_for_their_averages():
    import numpy
    from kvtrial.analysis.effect import hodges_lehmann

    found = hodges_lehmann(list(numpy.random.default_rng(9).normal(0.1, 1, 8000)))
    assert found.low < 0.1 < found.high and found.high - found.low < 0.06
    assert hodges_lehmann([0.0] * 200).p_value == 1.0
