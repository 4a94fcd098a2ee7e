"""What whoever decides reads in figures and in the brief is what the verdict rests on."""

from collections.abc import Sequence

import msgspec
import pytest
import report_builder as build
from kvtrial.analysis import answer
from kvtrial.analysis.lengths import Crossing, LengthFit
from kvtrial.analysis.report import build_brief
from kvtrial.analysis.report.comparisons import pairs_plot
from kvtrial.analysis.report.selection import choose
from kvtrial.analysis.report.words import Words
from kvtrial.record.record import RunRecord
from kvtrial.record.verdict import BreakEven, FoundBreakEven, Verdict
from test_report_page import Page, render

EN = Words("en")


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
    assert "break-even hit share, prefixes of 16k tokens" in Page(render(verdict)).text
    assert "more than 8.3 % of requests return to an evicted prefix of 16k tokens" in str(
        answer.break_even_text(verdict.break_even)
    )


def test_the_brief_says_from_which_length_on_it_pays() -> None:
    at = Crossing(tokens=2000.0, low=1500.0, high=4000.0, confidence=0.97)
    rows = [[1.2, 0.8], [1.1, 0.7]]
    own = LengthFit("1.0", build.verdict().campaign, "p", "h1", "m", "BETTER", "offload", "control", [1000, 4000], rows,
                    [[1.0, 1.0]] * 2, [], at, at)  # fmt: skip
    said = brief(build.verdict(), fits=[own, msgspec.structs.replace(own, campaign="another", model="other")])
    assert "**From which prefix length on**: a return is sooner from 2,000 tokens on (97 % interval 1,500 to" in said
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
