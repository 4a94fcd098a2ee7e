"""The field cases: public reports made into files, with the answer they must get."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kvtrial.analysis.answerschemas import schema_named
from kvtrial.analysis.cli import main

CASES = Path(__file__).parents[2] / "fixtures" / "cases"
WORDS = {
    "refuse": {"INVALID"},
    "invalid": {"INVALID"},
    "invalid_window": {"INVALID"},
    "report": {"report"},
    "error": {"error"},
    "improvement": {"BETTER"},
    "worse": {"WORSE"},
    "inconclusive": {"INCONCLUSIVE"},
    "no_difference": {"EQUIVALENT", "INCONCLUSIVE"},
}


def case(name: str) -> dict[str, Any]:
    return yaml.safe_load((CASES / name / "case.yml").read_text())


def calls_of(folder: Path) -> list[list[str]]:
    """The command lines of a case; several where its files are alternatives."""
    read = case(folder.name)
    files = [folder / name for name in read["inputs"] if name not in read.get("quiet", [])]
    interval = ["--interval", str(read["interval"])] if "interval" in read else []
    pages = [str(path) for path in files if path.suffix == ".prom"]
    logs = [["observe", "--log", str(path)] for path in files if path.suffix == ".log"]
    if read["kind"] == "config":
        return [["check", str(path)] for path in files]
    if read["kind"] == "results":
        return [["judge", str(path)] for path in files]
    if read["kind"] == "format":
        before = folder / "before.prom"
        if before.exists():
            return [["observe", "--metrics", str(before), page] for page in pages if page != str(before)]
        return [["observe", "--metrics", page] for page in pages]
    return logs + ([["observe", "--metrics", *pages, *interval]] if pages else [])


CALLS = [(folder.name, call) for folder in sorted(CASES.iterdir()) for call in calls_of(folder)]


def answer(call: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any], str]:
    status = main([*call, "--json"])
    read = json.loads(capsys.readouterr().out)
    main(call)
    said = capsys.readouterr()
    return status, read, said.out + said.err


@pytest.mark.parametrize(("name", "call"), CALLS, ids=[f"{name}-{number}" for number, (name, _) in enumerate(CALLS)])
def test_a_field_case_gets_its_class_and_verdict(name: str, call: list[str], capsys):
    expected = case(name)["expected"]
    status, read, _ = answer(call, capsys)
    assert read["class"] == expected["class"]
    assert read["class"] == read["findings"][0]["class"]
    assert read["verdict"] in WORDS[expected["verdict"]]
    refused = {"check": 4, "observe": 0, "judge": 0}[call[0]]
    assert status == (2 if expected["verdict"] == "error" else refused)
    assert {"class", "severity", "reason", "numbers", "do"} <= set(read["findings"][0])
    if call[0] in ("observe", "judge"):
        jsonschema.validate(read, schema_named(f"{call[0]}_answer"))


@pytest.mark.parametrize(("name", "call"), CALLS, ids=[f"{name}-{number}" for number, (name, _) in enumerate(CALLS)])
def test_a_field_case_gets_its_exact_numbers(name: str, call: list[str], capsys):
    numbers = case(name)["expected"].get("numbers", {})
    _, read, _ = answer(call, capsys)
    found = read["findings"][0]["numbers"]
    assert {key: found.get(key) for key in numbers} == {
        key: pytest.approx(value) if not isinstance(value, dict) else value for key, value in numbers.items()
    }


MUST_SAY = {
    "01-both-interfaces": ["4294967296", "17179869184", "wins", "neither rejects"],
    "03-block-size-not-multiple": ["100 is not a multiple", "16", "without any text", "96 or 112"],
    "05-tier-smaller-than-gpu-kv": ["7021 blocks = 112336 tokens", "11702 blocks = 187232", "mirror the GPU"],
    "08-driver-too-old-for-wheel": ["570.86.10", "580", "torch 2.11", "13.0"],
    "11-preemption-single-burst": [
        "49 preemptions",
        "12 -> 61",
        "43 + 6",
        "t1-t2, t2-t3",
        "99.8 %",
        "no out-of-memory",
    ],
    "12-preemption-continuous": [
        "50 preemptions in 150 s",
        "9-11",
        "99-100 %",
        "about 72 running",
        "about 184",
        "54.7 s of",
    ],
    "14-store-without-load-gpu-answered": [
        "+36,700,160,000 B",
        "load 0 B",
        "319,680 of 640,000",
        "1,188,352",
        "no fault",
    ],
    "17-usage-gauge-zero-but-tier-serves": [
        "+44,920,995,840 B",
        "+391,680 tokens",
        "pinned by running transfers",
        "normal",
    ],
    "22-server-restart-in-window": ["1795950858.38 to 1795951500.63", "1,100,000 -> 94,000", "31 -> 35", "_created"],
    "24-memory-short-at-start": ["52.11 of 139.80 GiB", "128.62", "87.7", "served nothing", "not a preemption"],
    "26-assert-after-abort-engine-dead": [
        "_build_store_jobs",
        "#49118",
        "0.20-0.26",
        "EngineDeadError",
        "503",
        "44",
        "not the cause",
    ],
    "29-deadlock-health-200": ["aiting 6", "eferred", "200", "61 %"],
    "30-warm-cache-contamination": [
        "191,808 of 192,000",
        "loads 0 B",
        "external hits 0",
        "fresh server",
        "one server for all",
        "seed 0",
    ],
    "31-three-runs-too-few": ["3 of 3 pairs", "0.25", "2 degrees of freedom", "contains 0", "At least 6"],
    "33-aa-noise-floor": ["no difference is shown", "7.4 %", "noise floor", "±4.0 %"],
    "37-valid-improvement": ["10 of 10 pairs", "22,020,096,000 B", "192,000 external", "null, not 0"],
    "38-odd-labels-several-engines": [
        "engine 0: 2, engine 1: 7",
        "+367,001,600 B (engine 0)",
        "+734,003,200 B (engine 1)",
        "41 %",
        "97 %",
        "waiting 12, all on engine 1",
        "no change",
    ],
}
MUST_NOT_SAY = {
    "11-preemption-single-burst": ["continuous", "12 preemptions", "OOM"],
    "12-preemption-continuous": ["OOM", "single burst", "raise"],
    "14-store-without-load-gpu-answered": ["broken", "speed-up", "too small"],
    "17-usage-gauge-zero-but-tier-serves": ["tier empty", "unused", "0 % full"],
    "22-server-restart-in-window": ["4 preemptions", "clamp", "-1,0"],
    "24-memory-short-at-start": ["during inference", "too big"],
    "26-assert-after-abort-engine-dead": ["OOM", "caused by"],
    "29-deadlock-health-200": ["preempt", "overload", "healthy"],
    "30-warm-cache-contamination": ["improves", "significant"],
    "31-three-runs-too-few": ["improvement", "no effect"],
    "33-aa-noise-floor": ["slower", "faster", "proven"],
    "37-valid-improvement": ["nconclusive", "INCONCLUSIVE"],
    "38-odd-labels-several-engines": ["1,009", "1009", "parse error", "138 %"],
    "40-not-a-metrics-page": ["0 preemptions", "healthy", "Traceback"],
}


@pytest.mark.parametrize(("name", "call"), CALLS, ids=[f"{name}-{number}" for number, (name, _) in enumerate(CALLS)])
def test_a_field_case_says_what_it_must_and_not_what_it_must_not(name: str, call: list[str], capsys):
    _, read, text = answer(call, capsys)
    for said in (text, json.dumps(read, ensure_ascii=False)):
        assert [phrase for phrase in MUST_SAY.get(name, []) if phrase not in said] == []
        assert [phrase for phrase in MUST_NOT_SAY.get(name, []) if phrase in said] == []


def test_every_case_has_its_words_here():
    assert {name for name, _ in CALLS} == {folder.name for folder in CASES.iterdir()}
    assert {name for name, _ in CALLS} - set(MUST_SAY) == {"40-not-a-metrics-page"}


@pytest.mark.parametrize(
    ("page", "says"),
    [
        ("html.prom", ["HTML", "206 bytes", "login page of a proxy"]),
        ("empty.prom", ["empty (0 bytes)"]),
        ("json.prom", ["error object", "81 bytes"]),
        ("truncated.prom", ["inside a line", "label set is not closed", "not even the families before the cut"]),
        ("other_server.prom", ["no vllm: family", "323 bytes"]),
    ],
)
def test_what_is_no_page_of_a_server_is_described(page: str, says: list[str], capsys):
    _, read, _ = answer(["observe", "--metrics", str(CASES / "40-not-a-metrics-page" / page)], capsys)
    assert [phrase for phrase in says if phrase not in read["findings"][0]["reason"]] == []
    assert "/metrics" in read["findings"][0]["do"]


def test_the_first_and_last_page_alone_leave_the_shape_unknown(capsys):
    ends = [str(CASES / "11-preemption-single-burst" / name) for name in ("t0.prom", "t5.prom")]
    _, read, _ = answer(["observe", "--metrics", *ends], capsys)
    assert read["class"] == "preemption_shape_unknown"
    assert read["findings"][0]["confidence"] == "unknown"
    assert "burst or continuous: unknown" in read["findings"][0]["reason"]
    assert read["findings"][0]["numbers"]["delta"] == 49


def test_a_log_that_is_only_idle_is_no_deadlock(capsys):
    _, read, text = answer(["observe", "--log", str(CASES / "29-deadlock-health-200" / "idle.log")], capsys)
    assert read["class"] == "idle"
    assert "Waiting 0" in text and "stands still" not in text


def test_stores_without_loads_are_no_tier_too_small_where_its_size_is_not_known(capsys):
    folder = CASES / "14-store-without-load-gpu-answered"
    pages = [str(path) for path in sorted(folder.glob("*.prom"))]
    pages.sort(key=lambda path: "after" in path)
    _, read, _ = answer(["observe", "--metrics", *pages, "--vllm", "0.26.0"], capsys)
    assert read["class"] == "gpu_cache_answered"
    assert "tier-mirrors-gpu" not in [hazard["id"] for hazard in read["hazards"]]
    assert "tier-mirrors-gpu" in read["hazards_possible"]
