"""Summaries: the verdict from them is the one from the records, and what doesn't fit is refused."""

import hashlib
import os
import shutil
import weakref

import msgspec
import pandas
import pytest
import zstandard
from history_build import campaign_on, night
from kvtrial.analysis import summaries
from kvtrial.analysis.campaign import analyze, conclude, host_plan_digests, read_campaign, read_host_records
from kvtrial.analysis.cli import main
from kvtrial.analysis.history.store import add
from kvtrial.analysis.report.conditions import _configuration_differences, _prompt_rows
from kvtrial.analysis.report.words import Words
from kvtrial.analysis.stages import remember
from kvtrial.analysis.summaries import Outline, digest_path, read_summary, summarise, verdict_of
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


def test_a_record_that_is_here_and_was_truncated_is_named_beside_its_summary(campaign):
    list(summarise(campaign))
    record = campaign / "runs" / "g03" / "p01-1-control" / "record.json"
    record.write_bytes(record.read_bytes()[:-50])
    with pytest.raises(UnusableInput, match=r"g03/p01-1-control/record\.json does not match its digest"):
        verdict_of(campaign)


def test_a_record_that_was_edited_to_the_same_length_and_time_is_named(campaign):
    list(summarise(campaign))
    record = campaign / "runs" / "g03" / "p01-1-control" / "record.json"
    seen = record.stat()
    record.write_bytes(record.read_bytes().replace(b'"finished":', b'"finishes":', 1))
    os.utime(record, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert record.stat().st_size == seen.st_size
    with pytest.raises(UnusableInput, match=r"g03/p01-1-control/record\.json does not match its digest"):
        verdict_of(campaign)


def test_a_record_that_looks_as_it_did_is_not_read_again_and_one_that_was_copied_is(campaign, monkeypatch):
    list(summarise(campaign))
    read = []
    monkeypatch.setattr(summaries, "check_digests", lambda run: read.append(run.name))
    verdict_of(campaign)
    assert read == []
    run = campaign / "runs" / "g03" / "p01-1-control"
    shutil.copytree(run, run.with_name("copy"))
    shutil.rmtree(run)
    run.with_name("copy").rename(run)
    verdict_of(campaign)
    assert read == ["p01-1-control"]


def test_a_night_is_judged_once_for_its_verdict_and_the_history_and_once_for_its_page(campaign, tmp_path, monkeypatch):
    judged = []
    whole = summaries.judge_planned
    monkeypatch.setattr(summaries, "judge_planned", lambda *of, **more: judged.append(of[1]) or whole(*of, **more))
    conclude(str(campaign), summaries=True)
    assert judged == ["g01", "g03", "g07"]
    add(tmp_path / "of-summaries", campaign)
    assert len(judged) == 3
    main(["report", str(campaign), "--history", str(tmp_path / "of-summaries")])
    assert len(judged) == 6
    shutil.rmtree(campaign / "summaries")
    add(tmp_path / "of-records", campaign)
    assert len(judged) == 9
    for path in (tmp_path / "of-records").rglob("*.parquet"):
        other = tmp_path / "of-summaries" / path.relative_to(tmp_path / "of-records")
        pandas.testing.assert_frame_equal(pandas.read_parquet(path), pandas.read_parquet(other))


def test_summaries_of_another_release_or_of_other_records_are_not_what_lands_in_the_history(campaign, tmp_path):
    conclude(str(campaign), summaries=True)
    told = read_summary(campaign / "summaries" / "g03.json.zst")
    old = msgspec.structs.replace(told, release="0.0.1", verdict=msgspec.structs.replace(told.verdict, comparisons=[]))
    packed = zstandard.ZstdCompressor().compress(msgspec.json.encode(old))
    path = campaign / "summaries" / "g03.json.zst"
    path.write_bytes(packed)
    digest_path(path).write_text(f"{hashlib.sha256(packed).hexdigest()}  {path.name}\n")
    assert add(tmp_path / "store", campaign).hosts == 3
    record = campaign / "runs" / "g03" / "p01-1-control" / "record.json"
    record.write_bytes(record.read_bytes()[:-50])
    with pytest.raises(UnusableInput, match=r"g03/p01-1-control/record\.json does not match its digest"):
        add(tmp_path / "store", campaign)


def test_a_summary_that_was_edited_is_named(campaign):
    _, path, _ = summarise(campaign)
    told = msgspec.json.decode(zstandard.ZstdDecompressor().decompress(path.read_bytes()))
    told["intervals"] = [one and {**one, "estimate": 0.9, "low": 0.8, "high": 1.0} for one in told["intervals"]]
    path.write_bytes(zstandard.ZstdCompressor().compress(msgspec.json.encode(told)))
    with pytest.raises(UnusableInput, match=r"g03\.json\.zst does not match its digest: it was truncated or edited"):
        verdict_of(campaign)


def test_a_campaign_that_stopped_is_invalid_from_its_summaries_too(campaign):
    remember(campaign, "stopped after 1 of 3 hosts, 1 of them INVALID (g01: x); the others were not started", ["g01"])
    list(summarise(campaign))
    assert verdict_of(campaign) == analyze(campaign)
    assert main(["analyze", str(campaign), "--summaries"]) == 4


def test_the_end_of_a_large_campaign_keeps_no_list_of_requests_and_says_the_same(campaign, monkeypatch):
    alive = []

    def counted(*arguments):
        alive.append(sum(bool(ref()) for ref in seen))
        found = Held(read_host_records(*arguments))
        seen.append(weakref.ref(found))
        return found

    class Held(list):
        """A list that can be referred to weakly."""

    seen: list = []
    whole = conclude(str(campaign))
    names = ("verdict.json", "summary.csv", "metrics.prom", "report.html", "brief.md")
    written = {n: (campaign / n).read_bytes() for n in names}
    page = (campaign / "report.html").read_text()
    pairs = len({run.pair for run in read_campaign(campaign).plan.hosts[0].runs if not run.spare})
    assert pairs > 1 and f"kvtrial_pairs={pairs}" in page and "Every request" in page and "Prompt tokens by" in page
    monkeypatch.setattr(summaries, "WHOLE_BYTES", 0)
    monkeypatch.setattr(summaries, "read_host_records", counted)
    cut = conclude(str(campaign))
    assert {n: (campaign / n).read_bytes() for n in written} == written and cut["answer"] == whole["answer"]
    # Of the hosts before only what is left of one may still be there.
    assert alive and max(alive) <= 1
    judged = summaries.judge(campaign)
    assert not any(phase.requests for runs in judged.records.values() for run in runs for phase in run.phases)


def test_a_host_on_which_an_arm_never_ran_lends_a_large_fleet_no_configuration(campaign, monkeypatch):
    for run in (campaign / "runs" / "g01").glob("*offload*"):
        shutil.rmtree(run)
    conclude(str(campaign))
    whole = (campaign / "report.html").read_bytes()
    monkeypatch.setattr(summaries, "WHOLE_BYTES", 0)
    conclude(str(campaign))
    assert (campaign / "report.html").read_bytes() == whole
    judged = summaries.judge(campaign, whole_bytes=0)
    kept = {host for host, runs in judged.records.items() if any(run.resolved and run.resolved.config for run in runs)}
    assert kept == {"g01", "g03"}


def test_a_configuration_that_is_not_known_differs_from_none(campaign):
    records = summaries.judge(campaign, whole_bytes=2**40).records["g01"]
    cut = [summaries.cut_down(run) if run.arm != "control" else run for run in records]
    assert any(run.resolved and run.resolved.config for run in cut)
    assert _configuration_differences(cut, ["control", "offload"]) == []


def test_lengths_of_prompts_are_those_of_a_run_that_has_its_requests(campaign):
    records = summaries.judge(campaign, whole_bytes=2**40).records
    mixed = [*map(summaries.cut_down, records["g01"]), *records["g03"]]
    assert _prompt_rows(mixed, Words("en")) == _prompt_rows(records["g03"], Words("en"))


def test_a_host_that_is_not_there_is_a_sentence(campaign, capsys):
    assert main(["summarise", str(campaign), "--host", "nosuch"]) == 2
    assert "has no host nosuch; its hosts are g01, g03, g07" in capsys.readouterr().err


def test_damaged_missing_and_foreign_summaries_are_refused(campaign):
    first, second, _ = summarise(campaign)
    whole = first.read_bytes()
    for content, said in (
        (whole[:100], "does not match its digest"),
        (second.read_bytes(), "is of host g03"),
        (b"no summary", "can't be read"),
    ):
        digest = hashlib.sha256(whole if said == "does not match its digest" else content).hexdigest()
        digest_path(first).write_text(f"{digest}  {first.name}\n")
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
