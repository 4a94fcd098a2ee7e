"""Fleets and large input: what is left out is counted, and a ladder's host is named."""

import re

import msgspec
import pytest
import report_builder as build
from kvtrial.analysis.lengths import Crossing, LengthFit
from kvtrial.analysis.protocols import load_protocol
from kvtrial.analysis.report import build_brief, build_report, offload
from kvtrial.analysis.report.words import Words
from kvtrial.record.record import RunRecord
from kvtrial.record.verdict import HostVerdict, Verdict
from ladder_builder import ladder_protocol, ladder_records, ladder_verdict
from test_report_page import Page, render


def said(page: str) -> str:
    return Page(page).text.replace("\u00a0", " ")


def ladder_fleet() -> Verdict:
    verdict = ladder_verdict()
    hosts = [msgspec.structs.replace(verdict.hosts[0], host=name) for name in ("h1", "h2", "h3")]
    return msgspec.structs.replace(verdict, hosts=hosts)


def test_a_fleet_of_ladders_has_its_hosts_effects_drawn_about_zero() -> None:
    page = build_report(ladder_fleet(), ladder_protocol(), ladder_records(), {}, None)
    forest = page[page.index('aria-labelledby="fleet-forest-title') :]
    forest = forest[: forest.index("</svg>")]
    assert "arm − against, preemptions per 1,000 requests" in forest
    assert "h2: −500 preemptions per 1,000" in forest.replace("\u00a0", " ")
    assert ">×" not in forest


@pytest.mark.parametrize(
    ("language", "text"), [("en", "of host h1, one of 3 hosts"), ("ru", "с хоста h1, одного из 3 хостов")]
)
def test_a_ladder_of_a_fleet_names_its_host(language: str, text: str) -> None:
    page = build_report(ladder_fleet(), ladder_protocol(), ladder_records(), {}, None, language=language)
    assert said(page).count(text) == 2
    assert text in build_brief(ladder_fleet(), ladder_protocol(), ladder_records(), language=language).replace(
        "\u00a0", " "
    )
    alone = build_brief(ladder_verdict(), ladder_protocol(), ladder_records(), language=language)
    assert text.split(",")[0] not in alone


def many(hosts: int, invalid: int) -> tuple[Verdict, list[RunRecord]]:
    names = [f"h{number:05d}" for number in range(hosts)]
    found: list[HostVerdict] = []
    for number, name in enumerate(names):
        host = build.host_verdict(name, comparisons=[], gates=[])
        found.append(msgspec.structs.replace(host, verdict="INVALID") if number < invalid else host)
    return build.verdict(hosts=found), [build.record(host=name) for name in names]


def fit(host: str, model: str = "m", campaign: str = "c") -> LengthFit:
    at = Crossing(tokens=2000.0, low=1500.0, high=2700.0, confidence=0.97)
    rows, ones = [[1.2, 0.8], [1.1, 0.7]], [[1.0, 1.0]] * 2
    return LengthFit("1.0", campaign, "p", host, model, "BETTER", "offload", "control", [1000, 4000], rows, ones, [],
                     at, at)  # fmt: skip


@pytest.mark.parametrize("language", ["en", "ru"])
def test_lengths_of_ten_thousand_hosts_have_two_hundred_rows_and_a_line_of_every_model(language: str) -> None:
    """10,000 rows of long names made a page of 6 MB, and six hosts of one model left no room for the other model."""
    long = "meta-llama/Llama-3.3-70B-Instruct"
    fits = [fit(f"gpu-host-{number:05d}.rack12.dc3.example.org", long) for number in range(10_000)]
    fits.append(fit("another-host", "small-model", "other"))
    page = build_report(build.verdict(), build.protocol(), build.records(), {}, None, fits=fits, language=language)
    assert len(page.encode()) < 1_500_000
    assert page.count(long) < 400
    words = Words(language)
    text = page.replace("\u202f", " ").replace("\u00a0", " ")
    assert words("gates.more_hosts", count=words.whole(9801)).replace("\u202f", " ") in text
    figure = page[page.index('aria-labelledby="lengths-title') :]
    assert "small-model, another-host" in figure[: figure.index("</svg>")]
    assert words("caption.lengths_drawn", count=6, all=words.whole(10_001)).replace("\u202f", " ") in text
    few = build_report(build.verdict(), build.protocol(), build.records(), {}, None, fits=fits[-3:], language=language)
    assert words("caption.lengths_drawn", count=3, all=3) not in few


def test_phases_that_a_figure_has_no_room_for_are_named_and_what_a_sweep_found_is_drawn() -> None:
    """The shipped sweep of shares moves bytes in 20 phases; its right half was cut in silence."""
    names = [phase.name for phase in load_protocol("offload_mix", build.PROTOCOLS).phases]
    moving = [offload.Source(name, "offload", [100.0, 0.0, 50.0], 1e9, 1e9) for name in names]
    plot = offload._moved_plot(moving, Words("en"))
    assert plot is not None
    drawn = set(re.findall(r"<title>([^<:]*): (?:loaded|stored)", plot.svg))
    assert {name for name in names if name.startswith("mix")} <= drawn
    assert all(name in drawn or name in plot.caption for name in names)
    arms = [offload.Source(name, arm, [100.0, 10.0, 50.0], 0.0, 0.0) for name in names for arm in ("a", "b", "c")]
    sources = offload._sources_plot(arms, Words("en"))
    assert sources is not None
    bars = re.findall(r"<title>([^<:]*), (?:a|b|c): computed", sources.svg)
    assert all(bars.count(name) in (0, 3) for name in names), "a phase is drawn with all its arms"
    told = [name for name in names if not name.startswith("warmup")]
    assert all(name in bars or name in sources.caption for name in told)


def test_hosts_without_room_are_counted_and_the_invalid_among_them() -> None:
    verdict, records = many(300, 250)
    page = said(render(verdict, records))
    assert "100 more hosts, 50 of them INVALID, are in verdict.json" in page
    assert page.count("280 more hosts are not listed here") == 2
    assert "3,600 of 3,600 runs valid on 300 hosts" in page


def test_missing_hosts_and_faults_without_room_are_counted() -> None:
    verdict, records = many(1300, 0)
    lost = [msgspec.structs.replace(host, runs=msgspec.structs.replace(host.runs, valid=0)) for host in verdict.hosts]
    page = said(render(build.verdict(hosts=lost), records[:5]))
    assert "and 1,095 more hosts." in page
    died = [msgspec.structs.replace(build.died(), host=f"h{number}") for number in range(230)]
    assert "Not shown: 30 runs that did not complete" in said(render(build.verdict(), [*build.records(), *died]))


def test_a_provenance_without_room_is_counted() -> None:
    page = said(render(build.verdict(), extra={f"name{number}": "x" for number in range(230)}))
    assert re.search(r"…and \d\d more", page)


def test_counts_have_their_forms() -> None:
    caveat = "localhost: dropped for faults of the environment: pair 2 (pair_cut: booted)"
    page = said(render(build.verdict(caveats=[caveat])))
    assert "1 dropped pair:" in page
    assert "0 engine faults" in page
    assert "1 выброшенная пара" in said(render(build.verdict(caveats=[caveat]), language="ru"))
