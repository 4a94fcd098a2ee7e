"""Summaries: the verdict from them is the one from the records, and what doesn't fit is refused."""

import shutil

import msgspec
import pytest
from history_build import campaign_on, night
from kvtrial.analysis.campaign import analyze, host_plan_digests
from kvtrial.analysis.cli import main
from kvtrial.analysis.summaries import Outline, read_summary, summarise, verdict_of
from kvtrial.record.errors import UnusableInput


@pytest.fixture
def campaign(tmp_path):
    return campaign_on(tmp_path / "results", night(0), ("g01", "g03", "g07"))


def test_the_verdict_is_the_same_without_the_records(campaign):
    told = analyze(campaign)
    list(summarise(campaign))
    assert verdict_of(campaign) == told
    shutil.rmtree(campaign / "runs")
    assert verdict_of(campaign) == told


def test_a_host_without_records_counts_as_planned(campaign):
    shutil.rmtree(campaign / "runs" / "g07")
    told = analyze(campaign)
    list(summarise(campaign))
    assert verdict_of(campaign) == told
    assert "2 of 3 planned hosts are valid" in told.reason and "g07: no run left a record" in told.reason


def test_a_summary_is_kilobytes_a_run(campaign):
    for path in summarise(campaign):
        assert path.stat().st_size < 12 * 4096
        assert not any(phase.requests for record in read_summary(path).records for phase in record.phases)


def test_the_outline_is_the_campaign(campaign):
    outline = Outline(campaign)
    assert outline.hosts == ["g01", "g03", "g07"]
    assert {host: outline.of(host)[1] for host in outline.hosts} == host_plan_digests(campaign)


def test_a_summary_older_than_the_records_is_refused(campaign):
    list(summarise(campaign))
    digest = campaign / "runs" / "g03" / "p01-1-control" / "record.sha256"
    digest.write_text("0" * 64 + "  record.json\n")
    with pytest.raises(UnusableInput, match="was made before run p01-1-control came"):
        verdict_of(campaign)


def test_an_edited_record_is_named_when_its_host_is_summarised(campaign):
    record = campaign / "runs" / "g03" / "p01-1-control" / "record.json"
    record.write_bytes(record.read_bytes().replace(b'"finished":', b'"finished": '))
    with pytest.raises(UnusableInput, match="does not match its digest"):
        list(summarise(campaign))


def test_damaged_missing_and_foreign_summaries_are_refused(campaign):
    first, second, _ = summarise(campaign)
    whole = first.read_bytes()
    for content, said in ((whole[:100], "can't be read"), (second.read_bytes(), "is of host g03")):
        first.write_bytes(content)
        with pytest.raises(UnusableInput, match=said):
            verdict_of(campaign)
    first.unlink()
    with pytest.raises(UnusableInput, match="is missing"):
        verdict_of(campaign)


def test_the_commands(campaign, capsys):
    assert main(["summarise", str(campaign), "--host", "g01"]) == 0
    assert capsys.readouterr().out.endswith("summaries/g01.json.zst\n")
    assert main(["summarise", str(campaign)]) == 0
    capsys.readouterr()
    status = main(["analyze", str(campaign), "--summaries", "--json"])
    told = msgspec.json.decode(capsys.readouterr().out)
    assert (told["verdict"], status) == ("BETTER", 0)
    assert (campaign / "metrics.prom").is_file()
