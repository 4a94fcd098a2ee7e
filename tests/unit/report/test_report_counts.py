"""What the page counts and draws in the middle is what the verdict counts and what a median is."""

import math
from collections.abc import Sequence

import msgspec
import report_builder as build
from kvtrial.analysis.effect import hodges_lehmann, log_ratios
from kvtrial.analysis.lengths import Crossing, LengthFit
from kvtrial.analysis.report import build_report, preemption
from kvtrial.analysis.report.comparisons import effects_plot
from kvtrial.analysis.report.conditions import gpus_text
from kvtrial.analysis.report.drawing import apart
from kvtrial.analysis.report.figures_offload import length_effects
from kvtrial.analysis.report.selection import choose, dropped_pairs
from kvtrial.analysis.report.words import Words
from ladder_builder import ladder_protocol, ladder_records, ladder_verdict
from test_report_page import render


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


def length_fit(arm: Sequence[Sequence[float]], tokens: Sequence[int], low: float, high: float) -> LengthFit:
    against = [[1.0] * len(tokens) for _ in arm]
    at = Crossing(tokens=2000.0, low=low, high=high, confidence=0.97)
    return LengthFit(
        "1.0", "c", "p", "h", "m", "BETTER", "offload", "control", list(tokens), [list(row) for row in arm], against,
        [], at, at,
    )  # fmt: skip


def test_a_length_is_drawn_as_the_comparison_of_its_phase_has_it() -> None:
    fit = length_fit([[1.0], [2.0], [3.0], [6.0], [1.5], [2.5]], [1000], 1000.0, 1000.0)
    (found,) = length_effects(fit)
    expected = hodges_lehmann(log_ratios([1.0, 2.0, 3.0, 6.0, 1.5, 2.5], [1.0] * 6))
    assert (found.estimate, found.low, found.high) == (expected.estimate, expected.low, expected.high)


def test_the_length_from_which_it_pays_stands_with_its_interval() -> None:
    fit = length_fit([[1.2, 0.8], [1.1, 0.7]], [1000, 4000], 0.0, math.inf)
    page = build_report(build.verdict(), build.protocol(), build.records(), {}, None, fits=[fit]).replace("\u00a0", " ")
    assert "from 2,000 tokens on\n97 % interval under 1,000 to none" in page
    assert "1,000; 4,000" in page


def test_comparisons_of_one_phase_are_told_apart_by_their_arms_and_marked_by_their_verdicts() -> None:
    pairs = [("tier_2x", "off", "BETTER"), ("tier_2x", "tier_4x", "INCONCLUSIVE"), ("tier_1x", "tier_4x", "WORSE")]
    items = [build.comparison(arm=arm, against=against, verdict=word) for arm, against, word in pairs]
    plot = effects_plot(items, Words("en"))
    assert plot is not None
    for arm, against, _ in pairs:
        assert f"{arm} / {against}:" in plot.svg
    assert "var(--good)" in plot.svg
    assert "var(--bad)" in plot.svg
    throughput = effects_plot([build.comparison(metric="output_throughput_tokens_per_second")], Words("en"))
    assert throughput is not None
    assert "(more is better)" in throughput.svg


def test_long_names_stay_apart() -> None:
    hosts = [f"gpu-node-with-a-long-name-{number:02d}.dc1.example.internal" for number in range(40)]
    shortened = apart(hosts, 42)
    assert shortened[7] == "gpu-node-with-a-long-name-07…"
    assert len(set(shortened)) == 40
    assert all(len(label) <= 42 for label in shortened)
    middles = apart([f"{'x' * 40}-{number}" for number in range(3)], 20)
    assert len(set(middles)) == 3
    assert apart(["short", "also.short"], 42) == ["short", "also.short"]


def test_gpus_are_said_by_kind_and_not_by_their_clocks() -> None:
    gpu = {"name": "NVIDIA H200", "uuid": "GPU-1", "memory.total": "143771", "clocks.sm": "345",
           "persistence_mode": "Enabled", "mig.mode.current": "Disabled"}  # fmt: skip
    later = gpu | {"uuid": "GPU-2", "clocks.sm": "1980"}
    assert gpus_text([gpu, later]) == "2 × NVIDIA H200, 140.4 GiB, persistence mode enabled"
    assert gpus_text([gpu]) == gpus_text([later])
    assert gpus_text([{}]) == "unnamed GPU"


def test_a_ladder_says_one_number_a_cell_and_a_column_a_level() -> None:
    chosen = choose(ladder_protocol(), ladder_records(), ladder_verdict())
    section = preemption.section(ladder_verdict().ladder, ladder_protocol().control, chosen, Words("en"))
    assert section is not None
    for table in section.levels:
        for row in table.rows:
            assert len(row.cells) == len(table.heads) - 1
            assert all(", " not in cell for cell in row.cells), row


def test_phases_without_loading_are_explained_only_where_they_were_run() -> None:
    bare = [msgspec.structs.replace(record, phases=[p for p in record.phases if p.name != "noload_return"])
            for record in build.records()]  # fmt: skip
    said = "is the same server with and without loading"
    assert said in render(build.verdict())
    assert said not in render(build.verdict(), bare)
