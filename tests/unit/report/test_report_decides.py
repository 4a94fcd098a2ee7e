"""What whoever decides reads in figures and in the brief is what the verdict rests on."""

import math
import re
from collections.abc import Sequence

import msgspec
import pytest
import report_builder as build
from kvtrial.analysis import answer
from kvtrial.analysis.firsttokens import POINTS_MAX, FirstTokens, first_tokens_of
from kvtrial.analysis.lengths import Crossing, LengthFit
from kvtrial.analysis.report import build_brief, figures, preemption, top
from kvtrial.analysis.report.comparisons import pairs_plot
from kvtrial.analysis.report.selection import choose
from kvtrial.analysis.report.words import Words
from kvtrial.record.record import RunRecord
from kvtrial.record.verdict import BreakEven, FoundBreakEven, Recommendation, Verdict
from ladder_builder import ladder_protocol, ladder_records, ladder_verdict
from test_report_page import Page, render

EN, RU = Words("en"), Words("ru")


# ------------------------------------------------------------------------------------------------- which records count


def fleet_with_an_invalid_host() -> tuple[Verdict, list[RunRecord]]:
    bad = [msgspec.structs.replace(item, effect=None) for item in build.comparisons()]
    hosts = [build.host_verdict(host) for host in ("h1", "h2")]
    hosts.append(build.host_verdict("h3", verdict="INVALID", comparisons=bad))
    records = [record for host in ("h1", "h2", "h3") for record in build.records(host)]
    return build.verdict(hosts=hosts), records


def test_records_of_a_host_that_is_invalid_are_in_no_figure_and_that_is_said() -> None:
    verdict, records = fleet_with_an_invalid_host()
    chosen = choose(build.protocol(), records, verdict)
    assert {record.host for record in chosen.used} == {"h1", "h2"}
    page = Page(render(verdict, records)).text.replace("\u00a0", " ")
    assert "Left out of figures and sums: 1 host INVALID (h3)." in page
    plot = pairs_plot(verdict, EN)
    assert plot is not None
    assert "in 12 of 12" in plot.caption.replace("\u00a0", " ")
    assert "h3, pair" not in plot.svg


def test_where_all_is_invalid_the_records_help_to_find_the_cause() -> None:
    verdict, records = fleet_with_an_invalid_host()
    void = msgspec.structs.replace(verdict, verdict="INVALID")
    assert {record.host for record in choose(build.protocol(), records, void).used} == {"h1", "h2", "h3"}


@pytest.mark.parametrize("gone", ["missing", "died"])
def test_the_other_half_of_a_pair_that_does_not_count_is_in_no_figure(gone: str) -> None:
    records = [record for record in build.records() if (record.arm, record.pair) != ("offload", 3)]
    records += [build.died()] if gone == "died" else []
    chosen = choose(build.protocol(), records, build.verdict())
    assert [sum(record.arm == arm for record in chosen.used) for arm in chosen.arms] == [5, 5]
    page = Page(render(build.verdict(), records)).text.replace("\u00a0", " ")
    assert "Left out of figures and sums: 1 run of pairs that do not count." in page
    assert "Left out of figures" not in render(build.verdict())


def test_a_spare_counts_where_it_takes_a_dropped_pairs_place() -> None:
    spares = [build.record(arm, 7, spare=True) for arm in ("control", "offload")]
    whole = choose(build.protocol(), [*build.records(), *spares], build.verdict())
    assert {record.pair for record in whole.used} == {1, 2, 3, 4, 5, 6}
    caveat = "localhost: dropped for faults of the environment: pair 2 (pair_cut: the host was booted)"
    cut = choose(build.protocol(), [*build.records(), *spares], build.verdict(caveats=[caveat]))
    assert {record.pair for record in cut.used} == {1, 3, 4, 5, 6, 7}


def test_an_arm_that_always_dies_leaves_the_others_in_the_figures() -> None:
    records = [build.record("control", pair) for pair in range(1, 7)]
    records += [msgspec.structs.replace(build.died(), pair=pair, run=f"p{pair:02d}-2-offload") for pair in range(1, 7)]
    assert len(choose(build.protocol(), records, build.engine_fault()).used) == 6


# ------------------------------------------------------------------------------------------------------- when it pays


def with_found(**changes: object) -> Verdict:
    even = build.verdict().break_even
    assert even is not None
    found = FoundBreakEven("above", 0.45, 0.3, 0.6, 0.97, 6, 0.02, 0.03, [], 0.37, 0.2, 0.5, "")
    return build.verdict(break_even=msgspec.structs.replace(even, found=msgspec.structs.replace(found, **changes)))


def brief(verdict: Verdict, language: str = "en", fits: Sequence[LengthFit] = ()) -> str:
    return build_brief(verdict, build.protocol(), build.records(), language=language, fits=fits).replace("\u00a0", " ")


def pays(said: str) -> str:
    return next(line for line in said.splitlines() if "When offloading pays" in line or "выгрузка окупается" in line)


@pytest.mark.parametrize("language", ["en", "ru"])
def test_what_a_sweep_found_is_said_before_what_was_computed(language: str) -> None:
    said = pays(brief(with_found(), language))
    assert said.index("45 %") < said.index("8.3 %" if language == "en" else "8,3 %")
    assert ("does not agree" if language == "en" else "не согласен") in said
    assert said.count("30 %") == 2  # an end of the interval, and the user's own share beside what was found


@pytest.mark.parametrize(
    ("where", "en", "ru"),
    [("none", "at none of the shares", "ни при какой доле"), ("every", "at every share", "при любой доле"),
     ("unknown", "did not find it", "не нашёл")],
)  # fmt: skip
def test_a_sweep_that_found_no_share_is_not_silent(where: str, en: str, ru: str) -> None:
    verdict = with_found(pays=where, hit_share=None, ci_low=None, ci_high=None, minus_computed_low=None,
                         minus_computed_high=None)  # fmt: skip
    for language, text in (("en", en), ("ru", ru)):
        said = pays(brief(verdict, language))
        assert said.partition("**: ")[2].index(text) < said.partition("**: ")[2].index("8")
    undecided = msgspec.structs.replace(verdict, verdict="INCONCLUSIVE")
    assert "the sweep of shares does not tell" in pays(brief(undecided))


def test_a_break_even_names_the_length_that_it_holds_for() -> None:
    even = build.verdict().break_even
    assert even is not None
    verdict = build.verdict(break_even=msgspec.structs.replace(even, hit="return_16k"))
    assert "return to an evicted prefix of 16k tokens on" in pays(brief(verdict))
    assert "к вытесненному префиксу в 16k токенов" in pays(brief(verdict, "ru"))
    assert "interval 2 % to 19 %; prefixes of 16k tokens" in Page(render(verdict)).text.replace("\u00a0", " ")
    assert "more than 8.3 % of requests return to an evicted prefix of 16k tokens" in str(
        answer.break_even_text(verdict.break_even)
    )


def test_the_brief_says_from_which_length_on_it_pays() -> None:
    at = Crossing(tokens=2000.0, low=1500.0, high=4000.0, confidence=0.97)
    rows = [[1.2, 0.8], [1.1, 0.7]]
    own = LengthFit("1.0", build.verdict().campaign, "p", "h1", "m", "BETTER", "offload", "control", [1000, 4000], rows,
                    [[1.0, 1.0]] * 2, [], at, at)  # fmt: skip
    said = brief(build.verdict(), fits=[own, msgspec.structs.replace(own, campaign="another", model="other")])
    line = next(line for line in said.splitlines() if "From which prefix length on" in line)
    assert line.partition("**: ")[2].replace("\u00a0", " ") == (
        "shown to be sooner from 4,000 tokens on (estimate: from 2,000 tokens on; 97 % interval 1,500 to 4,000)."
    )
    unsure = msgspec.structs.replace(own, by_interpolation=msgspec.structs.replace(at, low=0.0, high=math.inf))
    assert "**From which prefix length on**: not shown for any length (97 % interval under 1,000 to none)." in brief(
        build.verdict(), fits=[unsure]
    )
    assert "other" not in said.partition("From which prefix length on")[2].splitlines()[0]


@pytest.mark.parametrize("gain", [-0.004, 0.0])
def test_a_return_that_is_no_faster_is_measured_and_pays_never(gain: float) -> None:
    never = BreakEven(None, None, None, None, 0.01, gain, 0.3, "does not pay at any share: a return is no faster")
    verdict = build.verdict(verdict="WORSE", break_even=never)
    assert "at no share: a return to an evicted prefix is no faster" in pays(brief(verdict))
    assert "ни при какой доле" in pays(brief(verdict, "ru"))
    assert "From which share of returning requests on a tier pays" not in brief(verdict)
    assert "pays at none" in Page(render(verdict)).text
    unknown = BreakEven(None, None, None, None, None, None, 0.3, "no pair has TTFT of both")
    assert "From which share of returning requests on a tier pays" in brief(build.verdict(break_even=unknown))


# ------------------------------------------------------------------------------------------------------------- ladders


def changed_ladder(arm: str, **changes: object) -> Verdict:
    verdict = ladder_verdict()
    assert verdict.ladder is not None
    arms = [msgspec.structs.replace(one, **changes) if one.arm == arm else one for one in verdict.ladder.arms]
    return msgspec.structs.replace(verdict, ladder=msgspec.structs.replace(verdict.ladder, arms=arms))


def ladder_said(verdict: Verdict, language: str = "en") -> str:
    return build_brief(verdict, ladder_protocol(), ladder_records(), language=language).replace("\u00a0", " ")


def ladder_section(verdict: Verdict, words: Words = EN) -> preemption.Section:
    chosen = choose(ladder_protocol(), ladder_records(), verdict)
    found = preemption.section(verdict.ladder, "base", chosen, words, verdict.comparisons)
    assert found is not None
    return found


def test_a_ladders_brief_names_what_is_worse_with_each_change() -> None:
    said = ladder_said(ladder_verdict())
    service = next(line for line in said.splitlines() if "Quality of service" in line)
    assert "Worse than base above the onset: fewer\\_seqs last token ×1.07, throughput ×0.937, and 3 more." in service
    assert "Хуже, чем с base, выше порога вытеснений: fewer" in ladder_said(ladder_verdict(), "ru")


def test_the_arm_to_adopt_and_what_a_request_costs_with_it_come_first() -> None:
    costs = build.comparison(arm="more_kv", against="base", phase="above_onset", metric="gpu_seconds_per_request",
                             role="secondary", verdict="WORSE", effect=1.68, ci_low=1.6, ci_high=1.7)  # fmt: skip
    advice = Recommendation("adopt more_kv", "more_kv is BETTER", {})
    verdict = msgspec.structs.replace(
        ladder_verdict(), comparisons=[*ladder_verdict().comparisons, costs], recommendation=advice
    )
    said = ladder_said(verdict)
    assert (
        "than base above the onset (those levels together): more\\_kv GPU-seconds of a request ×1.68; fewer\\_seqs "
        in said
    )


def test_gpu_seconds_of_each_way_stand_in_its_table() -> None:
    assert "GPU-seconds/request at" not in ladder_said(ladder_verdict())
    arm = next(arm for arm in ladder_verdict().ladder.arms if arm.arm == "more_kv")  # type: ignore[union-attr]
    levels = [msgspec.structs.replace(level, gpu_seconds_per_request=0.31) for level in arm.levels]
    said = ladder_said(changed_ladder("more_kv", levels=levels))
    assert "GPU-seconds/request at 7" in said
    assert "| 0.31 |" in said


def test_the_highest_level_tried_is_no_highest_load_borne() -> None:
    said = ladder_said(ladder_verdict())
    assert said.count("| ≥ 7 ") == 4
    assert "≥: highest tried." in said
    assert "| base | control | – | 4 | 4 |" in said
    section = ladder_section(ladder_verdict())
    assert section.changes is not None
    assert "batch: at least 7 (highest tried)" in section.changes.rows[0].cells[3]
    reached = next(plot for plot in section.plots if plot.title == "What each arm reaches")
    assert "≥7" in reached.svg
    assert "≥4" not in reached.svg
    bears = [msgspec.structs.replace(entry, broken_by="") for entry in ladder_verdict().ladder.arms[0].reached]  # type: ignore[union-attr]
    assert "| base | control | – | ≥ 4 | ≥ 4 |" in ladder_said(changed_ladder("base", reached=bears))


def test_stalls_are_said_to_bound_waits_only_where_each_wait_became_one() -> None:
    whole = ladder_section(ladder_verdict())
    assert "bound the waits after a preemption from above" in whole.how
    ledger = next(plot for plot in whole.plots if plot.title == "Where a request's time went")
    assert "72 preemptions and 72 stalls" in ledger.caption.replace("\u00a0", " ")
    assert "understate" not in ledger.caption
    verdict = ladder_verdict()
    assert verdict.ladder is not None
    levels = [msgspec.structs.replace(level, preemptions=2 * level.preemptions) for level in verdict.ladder.levels]
    short = ladder_section(
        msgspec.structs.replace(verdict, ladder=msgspec.structs.replace(verdict.ladder, levels=levels))
    )
    assert "do not bound those waits" in short.how
    ledger = next(plot for plot in short.plots if plot.title == "Where a request's time went")
    assert "At 5, 6, 7 in flight fewer stalls were seen" in ledger.caption
    assert "understate" in ledger.caption


@pytest.mark.parametrize("language", ["en", "ru"])
def test_an_arm_that_helps_nothing_is_not_praised(language: str) -> None:
    words = Words(language)
    items = [
        msgspec.structs.replace(item, effect=0.0, verdict="EQUIVALENT")
        if (item.arm, item.metric) == ("more_kv", "preemptions_per_1000_requests")
        else item
        for item in ladder_verdict().comparisons
    ]
    idle = msgspec.structs.replace(changed_ladder("more_kv", fewer_preemptions_per_1000=0.0), comparisons=items)
    section = ladder_section(idle, words)
    assert section.changes is not None
    row = section.changes.rows[0]
    assert row.cells[4] == words("change.nothing_given")
    assert row.kind == ""
    assert words.or_else("word.EQUIVALENT", "EQUIVALENT") in row.cells[0]
    said = ladder_said(idle, language)
    assert f" {words('ways.no_gain')} |" in said
    assert f"| 0, {words.or_else('word.EQUIVALENT', 'EQUIVALENT')} |" in said


def test_moved_does_not_say_that_nothing_is_gained() -> None:
    assert "MOVED: requests queue instead" in ladder_said(ladder_verdict())


def test_the_way_outside_the_core_is_a_measure_of_its_own() -> None:
    assert EN("level.outside").startswith("First token outside")
    assert "из него" not in RU("level.outside")


# ------------------------------------------------------------------------------------------------------ beside a number


def test_the_russian_advice_says_what_its_reason_adds() -> None:
    better = "is BETTER by the primary comparison and no guard is WORSE"
    reason = f"more_kv {better}; tensor_parallel is BETTER, too, and not compared with it"
    verdict = build.verdict(recommendation=Recommendation("adopt more_kv", reason, {}))
    assert top.next_step(verdict, RU) == "Принять more_kv. tensor_parallel тоже BETTER, с ним не сравнивали."
    smaller = f"tier_2x {better}; tier_1x is not shown to give less and takes less RAM"
    verdict = build.verdict(recommendation=Recommendation("adopt tier_2x", smaller, {}))
    assert "не показано, что даёт меньше" in brief(verdict, "ru")


def test_a_share_that_so_many_failed_that_it_was_never_reached_has_no_dot() -> None:
    all_came = figures.ecdf_plot({"offload": [FirstTokens([0.01 * n for n in range(1, 21)], [1] * 20, 20)]}, EN, "")
    some_failed = figures.ecdf_plot({"offload": [FirstTokens([0.01 * n for n in range(1, 16)], [1] * 15, 20)]}, EN, "")
    assert all_came is not None
    assert some_failed is not None
    assert "offload, p95:" in all_came
    assert "offload, p95:" not in some_failed
    assert "offload, p50: 100 ms" in some_failed


def test_a_phase_of_many_requests_is_kept_as_a_few_of_them_each_for_many() -> None:
    phase = build.phase("return", 0.2)
    many = [msgspec.structs.replace(phase.requests[0], ttft_seconds=n / 10_000) for n in range(10_001, 0, -1)]
    many += [msgspec.structs.replace(phase.requests[0], ttft_seconds=None)]
    kept = first_tokens_of(msgspec.structs.replace(phase, requests=many))
    assert len(kept.seconds) <= POINTS_MAX
    assert list(kept.seconds) == sorted(kept.seconds)
    assert (sum(kept.requests), kept.sent, kept.seconds[-1]) == (10_001, 10_002, 1.0001)
    few = first_tokens_of(phase)
    assert list(few.requests) == [1] * 8
    drawn = figures.ecdf_plot({"offload": [kept, few]}, EN, "")
    assert drawn is not None
    assert "offload (10,010)" in drawn
    assert re.search(r"offload, p50: 50\d ms", drawn.replace("\u00a0", " "))


def test_delta_ttft_is_named_a_median_beside_an_effect_that_is_none() -> None:
    page = Page(render(build.verdict())).text
    assert "median of the pairs; negative means sooner" in page
    assert "delta_ttft_seconds, median of the pairs" in page
    assert "delta_ttft_seconds = -0.200 (median of the pairs; negative: sooner)" in answer.delta_text(
        build.comparison()
    )
