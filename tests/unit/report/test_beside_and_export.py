import json
from argparse import Namespace
from pathlib import Path

import msgspec
import pandas as pd
import pytest
import report_builder as build
from kvtrial.analysis import campaign as campaigns
from kvtrial.analysis.beside import NOT_INTERLEAVED, lines, put_beside
from kvtrial.analysis.export import command, export_campaign
from kvtrial.analysis.textfile import to_openmetrics
from kvtrial.record.errors import UnusableInput
from prometheus_client.openmetrics.parser import text_string_to_metric_families


def test_two_campaigns_stand_side_by_side() -> None:
    other = build.verdict(campaign="second", comparisons=build.comparisons(effect=0.4, ci_low=0.35, ci_high=0.5))
    found = put_beside(build.verdict(), other)
    primary = found.comparisons[0]
    assert primary.apart is True
    assert all(pair.apart is not True for pair in found.comparisons[1:])
    text = "\n".join(lines(found))
    assert "x0.151" in text
    assert "x0.4" in text
    assert "intervals apart" in text
    assert text.endswith(NOT_INTERLEAVED)


def test_the_same_campaign_twice_differs_in_nothing() -> None:
    found = put_beside(build.verdict(), build.verdict())
    assert not any(pair.apart for pair in found.comparisons)
    assert found.gates == found.pins == found.comparable == []


def test_what_forbids_to_lay_it_to_one_change_is_said() -> None:
    other = build.invalid()
    other = msgspec.structs.replace(other, protocol="aa_noise", evidence="gpu", hosts=[])
    said = " ".join(put_beside(build.verdict(), other).comparable)
    for part in ("protocols differ", "evidence differs", "hosts differ", "is INVALID"):
        assert part in said


def test_missing_comparisons_and_intervals_are_laid_out() -> None:
    bare = build.verdict(comparisons=[build.comparison(effect=None, ci_low=None, ci_high=float("nan"))])
    found = put_beside(build.verdict(), bare)
    assert {pair.apart for pair in found.comparisons} == {None}
    assert any(line.endswith(" –") for line in lines(found))


def test_what_decides_stands_beside_each_other_under_other_names_too() -> None:
    noise = build.verdict(comparisons=[build.comparison(arm="again", effect=0.99, ci_low=0.95, ci_high=1.1)])
    text = "\n".join(lines(put_beside(build.verdict(), noise)))
    row = next(line for line in text.splitlines() if line.startswith("deciding first token"))
    assert "x0.151" in row
    assert "x0.99" in row
    assert "intervals apart" in row
    assert "deciding" not in "\n".join(lines(put_beside(build.verdict(), build.verdict())))


def test_a_difference_says_its_unit_once() -> None:
    item = build.comparison(
        metric="preemptions_per_1000_requests", unit="preemptions per 1,000 requests", effect_scale="difference",
        effect=-250.0, ci_low=-250.0, ci_high=-250.0,
    )  # fmt: skip
    verdict = build.verdict(comparisons=[item])
    assert all(len(line) < 150 for line in lines(put_beside(verdict, verdict)) if "preemptions" in line)


@pytest.mark.parametrize("form", ["json", "openmetrics"])
def test_a_history_is_refused_other_forms_in_a_sentence(form: str, tmp_path: Path) -> None:
    with pytest.raises(UnusableInput) as refused:
        command(Namespace(source=[tmp_path], format=form, output=None, requests=False))
    assert str(refused.value) == (
        f"--format {form}: the rows of {tmp_path}, which is a history, are written as csv or parquet; give one of the "
        "two."
    )


def test_openmetrics_parses_and_ends_as_it_must() -> None:
    text = to_openmetrics(build.verdict())
    assert text.endswith("# EOF\n")
    names = {family.name for family in text_string_to_metric_families(text)}
    assert {"kvtrial_effect", "kvtrial_gate_passed", "kvtrial_runs", "kvtrial_verdict_info"} <= names


@pytest.fixture
def campaign(monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(campaigns, "analyze", lambda _: build.verdict())
    monkeypatch.setattr(campaigns, "read_records", lambda _: {"localhost": build.records()})
    return Path("results/c1")


def test_every_form_is_read_back_by_its_own_reader(campaign: Path, tmp_path: Path) -> None:
    assert json.loads(export_campaign(campaign, "json"))["verdict"] == "BETTER"
    assert b"kvtrial_effect" in export_campaign(campaign, "openmetrics")
    (tmp_path / "t.csv").write_bytes(export_campaign(campaign, "csv"))
    (tmp_path / "t.parquet").write_bytes(export_campaign(campaign, "parquet"))
    csv, parquet = pd.read_csv(tmp_path / "t.csv"), pd.read_parquet(tmp_path / "t.parquet")
    assert list(csv.columns) == list(parquet.columns)
    assert len(csv) == len(parquet) == sum(len(record.phases) for record in build.records())


def test_parquet_is_not_thrown_at_a_terminal(campaign: Path) -> None:
    with pytest.raises(UnusableInput, match="-o FILE"):
        export_campaign(campaign, "parquet", to_terminal=True)
