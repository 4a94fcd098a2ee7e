"""What whoever decides reads in figures and in the brief is what the verdict rests on."""

import msgspec
import pytest
import report_builder as build
from kvtrial.analysis.report.comparisons import pairs_plot
from kvtrial.analysis.report.selection import choose
from kvtrial.analysis.report.words import Words
from kvtrial.record.record import RunRecord
from kvtrial.record.verdict import Verdict
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
