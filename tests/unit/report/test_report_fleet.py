import functools
import json
import re
from pathlib import Path

import msgspec
import pytest
import report_builder as build
from kvtrial.analysis.report import build_report, figures_history
from kvtrial.analysis.report.history import ChangePoint, History, HistoryPoint, PinChange, Series, read_history
from kvtrial.analysis.report.words import catalogue
from kvtrial.record.errors import UnusableInput
from kvtrial.record.record import RunRecord
from kvtrial.record.verdict import HostVerdict, Verdict
from test_report_page import HOSTILE, Page, assert_offline

HOSTS = [f"gpu{number:02d}" for number in range(8)]
ODD, GONE, DRIFTED = "gpu03", "gpu06", "gpu05"
HISTORY = History(
    [
        Series(
            "return: first token, offload against control",
            "all",
            [
                HistoryPoint(f"2026-11-{day:02d}", f"c{day}", "BETTER", 0.2 if day < 8 else 0.4, 0.18, 0.45)
                for day in range(1, 15)
            ],
            [ChangePoint("2026-11-08", "c8", 0.2, 0.4, 0.001, [PinChange("driver", "580.1", "590.2")])],
        )
    ]
)


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
    return build_report(verdict(), build.protocol(), records(), {}, None, language=language, history=HISTORY)


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
    assert "Change points of return: first token, offload against control on all" in text
    assert "driver: 580.1 → 590.2" in text
    assert "history0-title" in page


def test_one_host_without_a_history_has_no_fleet_section() -> None:
    assert 'id="fleet"' not in build_report(build.verdict(), build.protocol(), build.records(), {}, None)


def test_a_hostile_history_is_escaped() -> None:
    point = HistoryPoint(HOSTILE, HOSTILE, HOSTILE, 0.2)
    change = ChangePoint(HOSTILE, HOSTILE, 0.2, float("nan"), None, [PinChange(HOSTILE, HOSTILE, HOSTILE)])
    bad = History(
        [Series(HOSTILE, HOSTILE, [point, msgspec.structs.replace(point, effect=float("nan")), point], [change])]
    )
    page = build_report(verdict(), build.protocol(), records(), {}, None, history=bad)
    assert_offline(page)
    assert Page(page).open == []


def test_a_history_is_read_from_a_file_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    path.write_bytes(msgspec.json.encode(HISTORY))
    assert read_history(path) == HISTORY
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
        ({"schema_version": "99.0", "changes": []}, "newer than"),
        ({"schema_version": "x", "changes": []}, "is no history"),
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


def test_the_changes_that_kvtrial_history_prints_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "nightly.json"
    change = {
        "host": "gpu00", "night": "2026-11-20", "arm": "offload", "against": "control", "phase": "return",
        "metric": "ttft_median_seconds", "from_value": 0.2, "to_value": 0.4, "p_value": 0.01,
        "pins_changed": {"vllm": ["0.30.0", "0.32.0"]},
    }  # fmt: skip
    path.write_text(json.dumps({"schema_version": "1.0", "changes": [change]}))
    (series,) = read_history(path).series
    assert series.host == "gpu00"
    assert series.changes[0].pins == [PinChange("vllm", "0.30.0", "0.32.0")]


@pytest.mark.parametrize(("language", "label"), [("en", "arm / against"), ("ru", "плечо / против")])
def test_the_linear_axis_of_the_history_is_not_called_logarithmic(language: str, label: str) -> None:
    assert catalogue(language)["axis.effect_linear"] == label
    source = Path(figures_history.__file__).read_text()
    assert 'words("axis.effect")' not in source
    assert "scale(" not in source
