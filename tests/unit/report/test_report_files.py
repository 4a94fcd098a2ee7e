import math
from pathlib import Path

import pandas as pd
import pytest
import report_builder as build
from kvtrial.analysis.export import write_summary
from kvtrial.analysis.textfile import to_textfile
from kvtrial.record.verdict import Verdict
from prometheus_client.parser import text_string_to_metric_families


def samples_of(verdict: Verdict) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(to_textfile(verdict)):
        for sample in family.samples:
            assert sample.timestamp is None
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_the_textfile_holds_verdict_effect_gates_and_runs() -> None:
    found = samples_of(build.verdict())
    assert [(labels["host"], labels["verdict"]) for labels, _ in found["kvtrial_verdict_info"]] == [
        ("all", "BETTER"),
        ("localhost", "BETTER"),
    ]
    primary = [
        value
        for labels, value in found["kvtrial_effect"]
        if (labels["role"], labels["host"]) == ("primary", "localhost")
    ]
    assert primary == [0.151]
    assert len(found["kvtrial_effect_ci_low"]) == len(found["kvtrial_effect_ci_high"]) == 16
    runs = {labels["state"]: value for labels, value in found["kvtrial_runs"]}
    assert runs == {"planned": 12, "valid": 12, "dropped": 0, "engine_fault": 0}


def test_a_failed_gate_is_zero_and_an_undecided_one_is_nan() -> None:
    gates = {labels["gate"]: value for labels, value in samples_of(build.invalid())["kvtrial_gate_passed"]}
    assert gates["treatment_delivered"] == 0
    assert math.isnan(gates["hazards"])
    assert gates["loopback_only"] == 1


def test_the_campaigns_name_makes_no_series_but_one() -> None:
    for name, samples in samples_of(build.verdict()).items():
        assert (name == "kvtrial_verdict_info") == any("campaign" in labels for labels, _ in samples)


def test_an_odd_name_and_a_missing_effect_leave_a_page_that_parses() -> None:
    items = build.comparisons(effect=None, ci_low=float("nan"), ci_high=None)
    found = samples_of(build.verdict(hosts=[build.host_verdict('a"b\\c\nd', comparisons=items)], comparisons=[]))
    assert {labels["host"] for labels, _ in found["kvtrial_effect"]} == {'a"b\\c\nd'}
    assert all(labels["role"] != "primary" for labels, _ in found["kvtrial_effect"])
    assert samples_of(build.verdict(hosts=[], comparisons=[], evidence=None))


def test_the_summary_reads_back_from_both_files(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {"host": ["a", "b,c"], "pair": [1, 2], "ttft_median_seconds": [0.2, float("nan")], "valid": [True, False]}
    )
    hashes = write_summary(frame, tmp_path)
    assert sorted(hashes) == sorted(path.name for path in tmp_path.iterdir()) == ["summary.csv", "summary.parquet"]
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "summary.parquet"), frame)
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "summary.csv"), frame)


def test_a_summary_that_can_not_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_summary(pd.DataFrame({"run": ["old"]}), tmp_path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_summary(pd.DataFrame({"run": ["new"]}), tmp_path)
    assert pd.read_csv(tmp_path / "summary.csv")["run"].tolist() == ["old"]
    assert len(list(tmp_path.iterdir())) == 2


def test_an_empty_summary_keeps_its_columns(tmp_path: Path) -> None:
    write_summary(pd.DataFrame({"run": [], "phase": []}), tmp_path)
    assert list(pd.read_parquet(tmp_path / "summary.parquet").columns) == ["run", "phase"]
