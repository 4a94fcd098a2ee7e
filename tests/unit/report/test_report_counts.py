"""What the page counts and draws in the middle is what the verdict counts and what a median is."""

import report_builder as build
from kvtrial.analysis.lengths import Crossing, LengthFit
from kvtrial.analysis.report.figures_offload import middle_ratios
from kvtrial.analysis.report.gates import dropped_pairs


def test_pairs_without_a_record_are_dropped_as_the_verdict_says() -> None:
    caveat = (
        "h1: dropped for faults of the environment: pair 1 (record_missing: no record of arm a, b); "
        "pair 12 (time_budget: 3 s left)"
    )
    records = [build.record(host="h1", pair=3, outcome="environment_fault")]
    assert dropped_pairs(build.verdict(caveats=[caveat, "h2: engine faults: pair 4"]), records) == [
        ("h1", 1),
        ("h1", 12),
    ]
    assert dropped_pairs(build.verdict(caveats=[]), records) == [("h1", 3)]


def test_an_even_number_of_pairs_has_its_true_median() -> None:
    at = Crossing(tokens=1.0, low=1.0, high=1.0, confidence=0.97)
    fit = LengthFit(
        "1.0", "c", "p", "h", "m", "BETTER", "offload", "control", [100],
        [[1.0], [2.0], [3.0], [6.0]], [[1.0], [1.0], [1.0], [1.0]], [], at, at,
    )  # fmt: skip
    assert middle_ratios(fit) == [2.5]
