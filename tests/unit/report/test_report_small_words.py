"""Small things that one stumbles over: a name of a metric in prose, a mark without a glyph, a count that is off."""

import pytest
import report_builder as build
from kvtrial.analysis.cli import main
from kvtrial.analysis.report import build_brief, fleet, top
from kvtrial.analysis.report.said import said_text
from kvtrial.analysis.report.words import Words
from kvtrial.record.verdict import RunCounts
from msgspec.structs import replace

EN, RU = Words("en"), Words("ru")


def test_the_mark_of_the_same_is_a_sign_that_every_font_has() -> None:
    assert top.MARKS["EQUIVALENT"] == "="


def test_a_reason_that_begins_a_sentence_names_its_metrics_in_words() -> None:
    reason = "The primary comparison is BETTER, but guards of offload are WORSE, which forbids adopt: " \
             "ttft_median_seconds of miss."  # fmt: skip
    said = said_text(reason, EN)
    assert "ttft_median_seconds" not in said
    assert said.startswith("The primary comparison is BETTER")
    for text in ("Adopt offload.", "No form fits this sentence.", "offload_x is BETTER"):
        assert said_text(text, EN) == text


def test_what_is_the_same_is_not_compared_with_than() -> None:
    same = build.comparison(effect=1.002, ci_low=1.001, ci_high=1.004)
    assert "within half a percent, with offload as with control." in top.effect_words(same, EN)
    assert "в пределах полупроцента, с offload, как с control." in top.effect_words(same, RU)
    assert " than with control." in top.effect_words(build.comparison(), EN)


def test_a_forest_without_a_pool_counts_all_hosts_that_it_draws() -> None:
    hosts = [build.host_verdict(f"h{number}") for number in range(3)]
    open_ = build.comparisons(effect=None, ci_low=None, ci_high=None, verdict="INCONCLUSIVE")
    plot = fleet._forest(build.verdict(verdict="INCONCLUSIVE", hosts=hosts, comparisons=open_), set(), EN)
    assert plot is not None
    assert "of them are drawn" not in plot.caption


def test_hosts_are_missing_where_none_left_a_record() -> None:
    lost = replace(build.host_verdict("h1").runs, valid=0)
    assert isinstance(lost, RunCounts)
    hosts = [replace(build.host_verdict(name, verdict="INVALID"), runs=lost) for name in ("h1", "h2")]
    assert fleet._missing(build.verdict(verdict="INVALID", hosts=hosts), []) == ["h1", "h2"]


def test_what_markdown_would_read_as_struck_out_or_as_a_character_is_escaped() -> None:
    named = build.verdict(campaign="~~x~~ &lt;img&gt;")
    said = build_brief(named, build.protocol(), build.records())
    assert "\\~\\~x" in said and "\\&lt;" in said


def test_a_campaign_that_beside_took_is_missed_in_a_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["report", "--beside", "results/a", "results/b"]) == 2
    assert "give the campaign first: kvtrial report CAMPAIGN --beside OTHER" in capsys.readouterr().err
