import functools
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import report_builder as build
from kvtrial.analysis.history.file import read_history
from kvtrial.analysis.history.model import ChangePoint, History, Point, Series
from kvtrial.analysis.report import build_report, figures_history
from kvtrial.analysis.report.fleet import DRIFTS
from kvtrial.analysis.report.words import Words, catalogue
from kvtrial.record.errors import UnusableInput
from kvtrial.record.record import RunRecord
from kvtrial.record.verdict import HostVerdict, Verdict
from msgspec.structs import replace
from test_report_page import HOSTILE, Page, assert_offline

HOSTS = [f"gpu{number:02d}" for number in range(8)]
ODD, GONE, DRIFTED = "gpu03", "gpu06", "gpu05"
NIGHTS = [f"2026-11-{day:02d}" for day in range(1, 15)]


def series(**changes: Any) -> Series:
    """Fourteen nights of the effect that decides, twice as large from the eighth on."""
    base = Series(
        host="all", protocol="offload_return", kind="effect", arm="offload", against="control", phase="return",
        against_phase="return", metric="ttft_median_seconds", unit="seconds", scale="ratio", role="primary",
        margin=0.05,
        points=[Point(night, *((0.2, 0.18, 0.23) if night < NIGHTS[7] else (0.4, 0.37, 0.45)), 6) for night in NIGHTS],
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


def change(**changes: Any) -> ChangePoint:
    base = ChangePoint(
        host="all", protocol="offload_return", night=NIGHTS[7], before_night=NIGHTS[6], kind="effect", arm="offload",
        against="control", phase="return", against_phase="return", metric="ttft_median_seconds", unit="seconds",
        scale="ratio", from_value=0.2, to_value=0.4, ratio=2.0, margin=0.05, p_value=0.001, evidence="night",
        nights_before=7, nights_after=7, worse=True, beyond_margin=True, alarm=True,
        pins_changed={"driver": ["580.1", "590.2"]}, noise_sd=None, sentence="",
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


def history(**changes: Any) -> History:
    base = History(
        schema_version="1.0", nights=NIGHTS, hosts=HOSTS, protocols=["offload_return"], series=9,
        false_discovery_rate=0.05, changes=[change()], noise=[], pooled=[], engine="pandas",
        shown=[series()],
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


def host(name: str) -> HostVerdict:
    if name == GONE:
        empty = build.host_verdict(name, verdict="INVALID", reason="no run left a record", comparisons=[], gates=[])
        return msgspec.structs.replace(empty, runs=msgspec.structs.replace(empty.runs, valid=0))
    worse = 1.35 if name == ODD else 1.0 + HOSTS.index(name) / 500
    arm = [value * worse for value in build.OFFLOAD]
    effect = 0.151 * worse
    item = build.comparison(
        arm_values=arm, against_values=build.CONTROL, effect=effect, ci_low=effect * 0.9, ci_high=effect * 1.2
    )
    return build.host_verdict(name, comparisons=[item])


@functools.cache
def records() -> list[RunRecord]:
    found = []
    for name in HOSTS:
        if name == GONE:
            continue
        for record in build.records(name):
            if name == DRIFTED:
                conditions = msgspec.structs.replace(record.conditions, kernel="6.99-other")
                record = msgspec.structs.replace(record, conditions=conditions)
            found.append(record)
    return found


def verdict() -> Verdict:
    return build.verdict(hosts=[host(name) for name in HOSTS])


@functools.cache
def fleet_page(language: str = "en") -> str:
    return build_report(verdict(), build.protocol(), records(), {}, None, language=language, history=history())


@pytest.fixture(scope="module")
def page() -> str:
    return fleet_page()


def test_the_odd_host_is_named_and_comes_first(page: str) -> None:
    text = Page(page).text
    assert f"{ODD} is odd: its effect lies" in text
    rows = re.findall(r'<th scope="row">(gpu\d\d)', page[page.index("<h3>Hosts</h3>") :])
    assert rows[:3] == [GONE, ODD, HOSTS[0]]
    assert f"{HOSTS[0]} is odd" not in text


def test_hosts_that_agree_leave_nobody_odd() -> None:
    alike = build.verdict(hosts=[host(name) for name in HOSTS if name not in (ODD, GONE)])
    assert "No host stands out" in build_report(alike, build.protocol(), records(), {}, None)


def test_missing_hosts_and_drift_are_named(page: str) -> None:
    text = Page(page).text
    assert f"Planned, and left no record: {GONE}" in text
    drift = text[text.index("Drift: what is not the same") :]
    assert f"{DRIFTED}: 6.99-other" in drift
    assert "6 of 7" in drift


def test_the_forest_has_every_host_and_the_pool(page: str) -> None:
    forest = page[page.index("fleet-forest-title") :]
    drawn = forest[: forest.index("</svg>")]
    assert all(name in drawn for name in HOSTS if name != GONE)
    assert "all hosts" in drawn


def test_change_points_stand_with_their_pins(page: str) -> None:
    text = Page(page).text
    assert "Changes of first token for an evicted prefix, offload against control, all hosts" in text
    assert "driver: 580.1 → 590.2" in text
    assert "history0-title" in page
    assert "14 nights from 2026-11-01 to 2026-11-14: changes of level found: 1." in text.replace("\u00a0", " ")


def test_a_history_without_a_change_says_so_and_is_drawn() -> None:
    quiet = history(changes=[])
    page = build_report(build.verdict(), build.protocol(), build.records(), {}, None, history=quiet)
    assert "no level changed by more than chance explains" in page
    assert "history0-title" in page


def test_series_of_other_protocols_are_not_drawn() -> None:
    other = history(shown=[series(protocol="aa_noise")], protocols=["aa_noise"], changes=[])
    page = build_report(build.verdict(), build.protocol(), build.records(), {}, None, history=other)
    assert "The history holds nothing of protocol offload_return" in page
    assert "history0-title" not in page


def test_a_difference_and_a_control_of_its_own_are_drawn_in_their_unit() -> None:
    level = series(kind="control", arm="control", against="", host="all")
    fewer = series(scale="difference", unit="preemptions per 1,000 requests", points=[
        Point(night, -250.0, -260.0, -240.0, 6) for night in NIGHTS])  # fmt: skip
    page = build_report(
        verdict(), build.protocol(), records(), {}, None, history=history(shown=[level, fewer], changes=[])
    )
    assert "history1-title" in page
    assert "−250 preemptions per 1,000 requests" in page
    assert "200 ms" in page[page.index("history1-title") :]


def test_one_host_without_a_history_has_no_fleet_section() -> None:
    assert 'id="fleet"' not in build_report(build.verdict(), build.protocol(), build.records(), {}, None)


def test_a_hostile_history_is_escaped() -> None:
    nan = float("nan")
    bad = series(
        arm=HOSTILE, against=HOSTILE, phase=HOSTILE, metric=HOSTILE, unit=HOSTILE,
        points=[Point(HOSTILE, 0.2, nan, None, 1), Point("b", nan, nan, nan, 1), Point("c", 0.3, None, None, 1)],
    )  # fmt: skip
    there = change(
        arm=HOSTILE, against=HOSTILE, phase=HOSTILE, metric=HOSTILE, night=HOSTILE, to_value=nan,
        pins_changed={HOSTILE: [HOSTILE, HOSTILE]},
    )  # fmt: skip
    page = build_report(
        verdict(),
        build.protocol(),
        records(),
        {},
        None,
        history=history(shown=[bad], changes=[there], nights=[HOSTILE]),
    )
    assert_offline(page)
    assert Page(page).open == []


def test_a_history_is_read_from_a_file_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    path.write_bytes(msgspec.json.encode(history()))
    assert read_history(path) == history()
    path.write_text(json.dumps({"series": 3}))
    with pytest.raises(UnusableInput, match="is no history"):
        read_history(path)
    with pytest.raises(UnusableInput, match="can't be read"):
        read_history(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ({}, "is no history"),
        ({"schema_version": "1.0", "verdict": "BETTER", "hosts": []}, "is no history"),
        ({"schema_version": "99.0", "changes": []}, "reads up to major"),
        ({"schema_version": "x", "changes": []}, "must look like"),
        ({"schema_version": 1, "changes": []}, "is no history"),
        ([], "is no history"),
    ],
)
def test_what_is_no_history_is_refused_in_a_sentence(tmp_path: Path, given: object, refusal: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps(given))
    with pytest.raises(UnusableInput, match=refusal) as refused:
        read_history(path)
    assert str(refused.value).endswith(".")


@pytest.mark.parametrize(("language", "label"), [("en", "arm / against"), ("ru", "отношение плеч")])
def test_the_linear_axis_of_the_history_is_not_called_logarithmic(language: str, label: str) -> None:
    assert catalogue(language)["axis.effect_linear"] == label
    source = Path(figures_history.__file__).read_text()
    assert 'words("axis.effect")' not in source
    assert "set_yscale" not in source


@pytest.mark.parametrize("language", ["en", "ru"])
def test_hosts_that_differ_in_what_is_not_compared_are_not_called_the_same(language: str) -> None:
    """Another KV cache and another option on h2: the page says what it compared, and that these are not."""
    other = [
        replace(
            run,
            host="h2",
            capacity=replace(run.capacity, usable_gpu_blocks=run.capacity.usable_gpu_blocks * 2),
            launch=replace(run.launch, argv=[*run.launch.argv, "--max-num-seqs", "7"]),
        )
        for run in build.records()
    ]
    both = build.verdict(hosts=[build.host_verdict("h1"), build.host_verdict("h2")])
    runs = [replace(run, host="h1") for run in build.records()] + other
    page = build_report(both, build.protocol(), runs, {}, None, language=language)
    words = Words(language)
    assert "Nothing that was recorded" not in page and "Из записанного" not in page
    assert {"en": "the size of the KV cache are not", "ru": "размер KV-кеша не сравниваются"}[language] in page
    for name in DRIFTS:
        assert words(f"drift.{name}") in page


def test_a_passed_gate_does_not_say_more_than_its_numbers() -> None:
    """The numbers beside it hold 1,740 against 1,972 MHz, and whose the processes on the GPUs were is not known."""
    for language, same, nobody in (("en", "the same in both", "Nobody"), ("ru", "одинаковы", "Никто")):
        words = Words(language)
        assert same not in words("gate.conditions_equal")
        assert nobody not in words("gate.undisturbed")
