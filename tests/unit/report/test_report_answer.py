import re

import msgspec
import pytest
import report_builder as build
from kvtrial.analysis import answer
from kvtrial.analysis.breakeven import GAIN_NOT_SHOWN
from kvtrial.analysis.report import top
from kvtrial.analysis.report.words import Words
from kvtrial.record.verdict import RunCounts, Verdict
from test_report_page import Page, render

ALL = [build.verdict(), build.inconclusive(), build.invalid(), build.engine_fault()]


def text_of(verdict: Verdict) -> str:
    return "\n".join(answer.ten_lines(verdict, "results/latest"))


@pytest.mark.parametrize("verdict", ALL, ids=lambda verdict: verdict.verdict)
def test_at_most_ten_lines_each_on_one_line_the_word_first(verdict: Verdict) -> None:
    lines = answer.ten_lines(verdict, "results/latest/")
    assert 0 < len(lines) <= 10
    assert all("\n" not in line and line.strip() for line in lines)
    assert lines[0].startswith(verdict.verdict)
    assert lines[-1] == "Report: results/latest/report.html"


def test_better_says_the_effect_in_words_with_its_statistics() -> None:
    lines = answer.ten_lines(build.verdict(), "results/latest")
    assert lines[0] == (
        "BETTER: The first token of an evicted prefix comes 6.6 times sooner with offload than with control."
    )
    assert "(x0.151, 97 % interval 0.138 to 0.194, 6 pairs, p .031)" in lines[1]
    assert "delta_ttft_seconds = -0.200 (median of the pairs; negative: sooner)" in lines[1]


def test_better_says_cost_proof_break_even_noise_time_and_next() -> None:
    text = text_of(build.verdict())
    for part in [
        "2 of 4 undecided: first token in miss x0.91 (0.78 to 1.06) undecided",
        "peak RAM +285 MiB",
        "11 of 11 gates passed, 12 of 12 runs valid",
        "Offload loaded 33,554,432 bytes in return",
        "more than 8.3 % of requests return to an evicted prefix (97 % interval 2 % to 19 %)",
        "EQUIVALENT within 5 % was out of reach",
        "the mechanism was shown; the times say nothing about GPUs",
        "7 min 16 s: engine starts 3 min 16 s",
        "Next: Run the same protocol on a GPU host.",
    ]:
        assert part in text


def test_worse_is_said_as_later() -> None:
    items = build.comparisons(effect=1.31, ci_low=1.2, ci_high=1.5, verdict="WORSE", delta_ttft_seconds=0.07)
    lines = answer.ten_lines(build.verdict(verdict="WORSE", comparisons=items), ".")
    assert lines[0] == "WORSE: The first token of an evicted prefix comes 31 % later with offload than with control."
    assert "+0.070 (median of the pairs; positive: later)" in lines[1]


def test_equivalent_names_the_margin() -> None:
    items = build.comparisons(effect=1.004, ci_low=0.98, ci_high=1.03, verdict="EQUIVALENT")
    lines = answer.ten_lines(build.verdict(verdict="EQUIVALENT", comparisons=items), ".")
    assert lines[0].startswith("EQUIVALENT: offload and control are the same within 5 %")


def test_inconclusive_begins_with_its_cause_and_claims_no_direction() -> None:
    lines = answer.ten_lines(build.inconclusive(), ".")
    assert "about 40 pairs would be needed" in lines[0]
    assert "which prove no difference yet, the first token" in lines[1]
    assert "anywhere from 14 % sooner to 21 % later" in lines[1]
    assert lines[2].startswith("Limit: ")


def test_the_deciding_comparisons_note_is_said_once() -> None:
    items = build.comparisons(note="better, size not yet shown: 9 pairs would do", verdict="INCONCLUSIVE")
    silent = build.verdict(verdict="INCONCLUSIVE", reason="too few pairs", comparisons=items)
    assert "Better, size not yet shown: 9 pairs would do." in answer.ten_lines(silent, ".")[1]
    said = msgspec.structs.replace(silent, reason=items[0].note)
    assert text_of(said).lower().count("9 pairs would do") == 1


def test_invalid_begins_with_its_cause_and_gives_no_effect() -> None:
    lines = answer.ten_lines(build.invalid(), ".")
    text = "\n".join(lines)
    assert "offload loaded 0 bytes in return in 6 of 6 runs" in lines[0]
    assert "Gate hazards could not be decided: The log was not kept." in lines
    assert "9 of 11 gates passed; failed: treatment_delivered; not decidable here: hazards" in text
    assert "x0.151" not in text
    assert "mechanism was shown" not in text


def test_an_engine_fault_is_in_the_first_line_and_no_praise_with_it() -> None:
    lines = answer.ten_lines(build.engine_fault(), ".")
    assert lines[0].startswith("WORSE, with 1 engine fault")
    assert "died in 1 of 6 runs" in lines[0]
    assert "sooner" not in lines[0]


def test_a_guard_that_is_worse_forbids_adoption_and_comes_first() -> None:
    items = build.comparisons()
    items[2] = msgspec.structs.replace(items[2], verdict="WORSE", effect=1.4, ci_low=1.3, ci_high=1.5)
    text = answer.elsewhere_text(build.verdict(comparisons=items))
    assert text is not None
    assert text.startswith("1 guard of 4 WORSE, so it must not be adopted: gap between tokens (p95) in return x1.4")


def test_the_mechanism_is_called_shown_only_where_the_treatments_gate_passed() -> None:
    untreated = build.host_verdict(gates=build.gates(treatment_delivered=(None, "no counter")))
    assert answer.evidence_text(build.verdict()) == answer.MECHANISM_SHOWN
    assert "shown" not in answer.evidence_text(build.verdict(hosts=[untreated]))
    assert "nothing here says anything about vLLM" in answer.evidence_text(build.verdict(evidence="standin"))


def test_the_last_line_names_the_cause() -> None:
    assert answer.cause(build.invalid()) == (
        "INVALID: Gate treatment_delivered failed: offload loaded 0 bytes in return in 6 of 6 runs; "
        "33,554,432 were due."
    )
    assert "Gate treatment_delivered failed" in answer.cause(msgspec.structs.replace(build.invalid(), reason=""))


def test_escape_sequences_of_a_log_never_reach_the_terminal() -> None:
    verdict = build.verdict(verdict="INVALID", reason="died:\x1b[2J\x1b]0;owned\x07 line\nnext\u2028end")
    text = text_of(verdict)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "line next end" in text


def test_a_campaign_without_hosts_or_numbers_still_answers() -> None:
    nothing = build.verdict(
        verdict="INVALID", reason="", evidence=None, comparisons=[], hosts=[], break_even=None, time_budget=None
    )
    assert "there is no evidence" in text_of(nothing).lower()
    nan = float("nan")
    lost = build.comparisons(effect=nan, ci_low=nan, ci_high=None, p_value=nan, mde=nan, delta_ttft_seconds=nan)
    text = text_of(build.verdict(verdict="INCONCLUSIVE", reason="too few pairs", comparisons=lost))
    assert "nan" not in text.lower()


def test_a_gate_that_fails_on_one_of_two_hosts_fails_and_names_the_host() -> None:
    bad = build.host_verdict("gpu2", gates=build.gates(memory_left=(False, "1 GiB was left, 8 GiB must be")))
    verdict = build.verdict(verdict="INVALID", reason="1 of 2 hosts", hosts=[build.host_verdict("gpu1"), bad])
    text = text_of(verdict)
    assert "Gate memory_left failed on gpu2: 1 GiB was left, 8 GiB must be." in text
    assert "10 of 11 gates passed; failed: memory_left" in text


def test_a_cost_that_was_not_shown_is_not_said_as_a_negative_cost() -> None:
    even = build.verdict().break_even
    assert even is not None
    text = answer.break_even_text(msgspec.structs.replace(even, cost_seconds=-0.0045, hit_share=0.0))
    assert text is not None
    assert "a miss is not slower (-4.5 ms)" in text
    assert "costs -" not in text


def test_an_identifier_keeps_its_spelling_at_the_head_of_a_sentence() -> None:
    assert answer.sentence("ttft_median_seconds of return") == "ttft_median_seconds of return."
    assert answer.sentence("too few pairs") == "Too few pairs."


def test_dropped_runs_are_counted() -> None:
    host = build.host_verdict(runs=RunCounts(planned=12, valid=10, dropped=2, engine_faults=0))
    assert "10 of 12 runs valid, 2 dropped with their pairs" in answer.runs_text(build.verdict(hosts=[host]))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0343, "34.3 ms"), (-0.2, "-200 ms"), (1.234, "1.23 s"), (436.2, "7 min 16 s"), (7500, "2 h 5 min")],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert answer.seconds_text(seconds) == text


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_what_is_not_a_number_was_not_measured(value: float | None) -> None:
    for said in (answer.seconds_text, answer.bytes_text, answer.share_text, answer.number_text, answer.p_text):
        assert said(value) == "not measured"


@pytest.mark.parametrize("language", ["en", "ru"])
def test_under_an_inconclusive_verdict_no_break_even_share_is_named(language: str) -> None:
    words = Words(language)
    verdict = build.inconclusive()
    assert verdict.break_even is not None
    point = words.share(verdict.break_even.hit_share)
    assert point in Page(render(build.verdict(), language=language)).text
    low, high = (words.share(bound) for bound in (verdict.break_even.ci_low, verdict.break_even.ci_high))
    said = [
        *(" ".join(merit) for merit in top.merits(verdict, words)),
        *(text for _, text, _ in top.answers(verdict, words)),
        top.break_even(verdict, words),
        *answer.ten_lines(verdict, "x"),
    ]
    assert [text for text in said if re.search(rf"(?<![\d.,]){re.escape(point)}", text)] == []
    assert any(low in text and high in text for text in said)


@pytest.mark.parametrize("language", ["en", "ru"])
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (None, None), (float("nan"), float("nan"))])
def test_an_interval_that_rules_nothing_out_gives_no_share(
    low: float | None, high: float | None, language: str
) -> None:
    words = Words(language)
    for verdict in (build.inconclusive(), build.verdict()):
        even = msgspec.structs.replace(verdict.break_even, ci_low=low, ci_high=high)
        told = msgspec.structs.replace(verdict, break_even=even)
        assert (words("merit.even"), words("pays.not_told")) in [merit[:2] for merit in top.merits(told, words)]
        assert words.share(even.hit_share) not in top.break_even(told, words)


def test_a_gain_that_is_not_shown_gives_an_interval_alone() -> None:
    even = msgspec.structs.replace(build.verdict().break_even, note=GAIN_NOT_SHOWN)
    told = build.verdict(break_even=even)
    assert not answer.share_is_told(even, "BETTER")
    assert "is not shown yet" in answer.break_even_text(even)
    assert answer.share_text(even.hit_share) not in top.break_even(told, Words("en"))
