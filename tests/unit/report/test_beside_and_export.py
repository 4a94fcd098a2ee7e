import hashlib
import json
from argparse import Namespace
from pathlib import Path
from typing import Literal

import msgspec
import pandas as pd
import pytest
import report_builder as build
from kvtrial.analysis import beside
from kvtrial.analysis import campaign as campaigns
from kvtrial.analysis.beside import NOT_INTERLEAVED, lines, put_beside
from kvtrial.analysis.campaign import Campaign
from kvtrial.analysis.export import command, export_campaign, write_summary
from kvtrial.analysis.report.conditions import gpus_text
from kvtrial.analysis.summaries import Judged
from kvtrial.analysis.summary import to_frame
from kvtrial.analysis.textfile import to_openmetrics
from kvtrial.record.errors import UnusableInput
from kvtrial.record.plan import Plan
from kvtrial.record.store import write_atomically
from kvtrial.record.verdict import FoundBreakEven, Recommendation, Verdict
from ladder_builder import ladder_verdict
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
    assert found.gates == found.pins == []
    assert found.comparable == ["A and B are one campaign"]


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
    assert "intervals" not in row  # other treatments: how far their effects lie apart tells of neither
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


def other_arms() -> Verdict:
    """A campaign with another name for its arm, and more comparisons than fit beside."""
    items = [msgspec.structs.replace(item, arm="tier") for item in build.comparisons()]
    items += [build.side(f"phase{n}", "ttft_median_seconds", 1.0, 0.9, 1.1, role="secondary") for n in range(9)]
    return build.verdict(campaign="second", comparisons=items)


def test_guards_of_one_metric_stand_beside_each_other_and_what_has_no_match_is_counted() -> None:
    text = "\n".join(lines(put_beside(build.verdict(), other_arms())))
    assert "guard first token: miss, offload/control beside miss, tier/control" in text
    assert not any(line.endswith(" –") for line in text.splitlines())
    assert "15 comparisons stand in one of the two alone and are left out here" in text


def test_a_pin_that_differs_is_shown_from_its_difference_on() -> None:
    pins = [{"arm offload": json.dumps({"args": "x" * 60, "tier": size})} for size in (1, 2)]
    sides = [build.verdict(recommendation=Recommendation("", "", pin)) for pin in pins]
    row = next(line for line in lines(put_beside(*sides)) if line.startswith("arm offload"))
    assert '"tier": 1}' in row
    assert '"tier": 2}' in row


def test_sizes_machines_and_answers_are_compared() -> None:
    gpus = [{"name": "H200", "memory.total": "1024"}]
    mine = {"seed": "1", "size targets": "8", "GPUs": gpus_text(gpus)}
    theirs = {"seed": "2", "size targets": "9", "GPUs": gpus_text(gpus * 2)}
    even = build.verdict().break_even
    assert even is not None
    second = build.verdict(campaign="second", break_even=msgspec.structs.replace(even, hit_share=0.12))
    found = put_beside(build.verdict(), second, mine, theirs)
    text = "\n".join(lines(found))
    for part in ("Note: GPUs differ.", "Note: what was asked for differs (size targets).", "8.3 %", "12 %",
                 "delta_ttft_seconds", "-0.200", "2 × H200"):  # fmt: skip
        assert part in text
    assert {entry.what for entry in found.conditions} == {"seed", "size targets", "GPUs"}


def test_the_ladders_onset_is_compared() -> None:
    row = next(line for line in lines(put_beside(ladder_verdict(), build.verdict())) if line.startswith("onset"))
    assert row.split() == ["onset", "of", "preemption", "5", "–"]


def test_tables_of_two_campaigns_are_read_together_though_one_measured_less(tmp_path: Path) -> None:
    import duckdb
    import pyarrow.dataset

    for name, fields in (("a", {}), ("b", {"throttle_events": 3})):
        records = [
            msgspec.structs.replace(record, samples=msgspec.structs.replace(record.samples, **fields))
            for record in build.records()
            if record.samples is not None
        ]
        (tmp_path / name).mkdir()
        write_summary(to_frame(records), tmp_path / name)
    files = [str(tmp_path / name / "summary.parquet") for name in ("a", "b")]
    counted = duckdb.sql(f"SELECT count(*), sum(throttle_events) FROM read_parquet({files!r})").fetchall()
    assert counted == [(168, 3 * 84)]
    for order in (files, files[::-1]):
        assert pyarrow.dataset.dataset(order).to_table().num_rows == 168


def test_the_textfile_has_break_even_delta_pairs_and_p() -> None:
    text = to_openmetrics(build.verdict())
    labels = 'against="",arm="",host="all",how="computed",prefix_tokens="",protocol="offload_return"'
    assert f"kvtrial_break_even_hit_share{{{labels}}} 0.083" in text
    primary = [line for line in text.splitlines() if 'host="all"' in line and 'role="primary"' in line]
    found = {line.split("{")[0]: float(line.split()[-1]) for line in primary}
    assert found["kvtrial_delta_ttft_seconds"] == -0.2004
    assert found["kvtrial_pairs"] == 6
    assert found["kvtrial_p_value"] == 0.03125
    assert "kvtrial_break_even_hit_share{" not in to_openmetrics(build.inconclusive())


def test_a_folder_that_is_not_there_is_named_with_the_file_that_was_asked_for(tmp_path: Path) -> None:
    target = tmp_path / "nowhere" / "x.csv"
    with pytest.raises(FileNotFoundError) as refused:
        write_atomically(target, b"x")
    said = campaigns.disk_sentence(refused.value)
    assert said == f"{target} can't be written: there is no folder {target.parent}; make it, or name another."


# --------------------------------------------------------------------------------------------------------- of whom


def with_even(campaign: str, **changes: object) -> Verdict:
    even = build.verdict().break_even
    assert even is not None
    known = {"arm": "offload", "against": "control"}
    return build.verdict(campaign=campaign, break_even=msgspec.structs.replace(even, **(known | changes)))


def row_of(a: Verdict, b: Verdict, begins: str) -> str:
    return next(line for line in lines(put_beside(a, b)) if line.startswith(begins))


def test_break_evens_whose_intervals_meet_are_not_called_different() -> None:
    mine = with_even("a", hit_share=0.066, ci_low=0.039, ci_high=0.11)
    theirs = with_even("b", hit_share=0.054, ci_low=0.019, ci_high=0.085)
    row = row_of(mine, theirs, "break-even hit share, offload/control")
    assert row.endswith("intervals meet")
    assert "computed 6.6 % (3.9 % to 11 %)" in row
    far = with_even("b", hit_share=0.4, ci_low=0.3, ci_high=0.5)
    assert row_of(mine, far, "break-even").endswith("intervals apart")
    other = with_even("b", hit_share=0.4, ci_low=0.3, ci_high=0.5, arm="tier_2x", prefix_tokens=528)
    row = row_of(mine, other, "break-even hit share  ")
    assert "tier_2x/control, 528 tokens: computed 40 %" in row
    assert "intervals" not in row


def test_what_a_sweep_did_not_find_is_not_made_up_from_what_was_computed() -> None:
    found = FoundBreakEven("above", 0.45, 0.0, 1.0, 0.97, 6, 0.02, 0.03, [], None, None, None, "not located")
    swept = with_even("a", found=found)
    row = row_of(swept, with_even("b"), "break-even")
    assert "not told by the sweep" in row
    assert row.count("8.3 %") == 1
    told = with_even("a", found=msgspec.structs.replace(found, ci_low=0.3, ci_high=0.6))
    row = row_of(told, with_even("b"), "break-even")
    assert "found 45 % (30 % to 60 %)" in row
    assert not row.endswith(("apart", "meet", "differs"))  # found and computed are not one measure


@pytest.mark.parametrize("pays", ["none", "every", "unknown"])
def test_what_a_sweep_found_is_not_told_where_the_verdict_is_inconclusive(
    pays: Literal["none", "every", "unknown"],
) -> None:
    found = FoundBreakEven(pays, None, None, None, 0.97, 6, 0.02, 0.03, [], None, None, None, "")
    swept = with_even("a", found=found)
    undecided = msgspec.structs.replace(swept, verdict="INCONCLUSIVE")
    row = row_of(undecided, undecided, "break-even")
    assert row.count("not told by the sweep") == 2
    assert "found at" not in row
    assert (beside.BY_SWEEP[pays] in row_of(swept, swept, "break-even")) is True


def test_a_delta_names_its_arms_and_phase_and_is_judged_by_no_word() -> None:
    other = build.verdict(campaign="b", comparisons=build.comparisons(arm="default_layout", delta_ttft_seconds=0.003))
    row = row_of(build.verdict(), other, "delta_ttft_seconds")
    assert "return, offload/control: -0.200" in row
    assert row.endswith("return, default_layout/control: +0.003")
    assert row_of(build.verdict(), with_even("b"), "delta_ttft_seconds, return, offload/control").endswith("-0.200")


def test_what_decides_is_shown_however_little_two_campaigns_have_in_common() -> None:
    more = [build.side(f"phase{n}", "ttft_median_seconds", 1.0, 0.9, 1.1, role="secondary") for n in range(9)]
    ladder = build.comparison(arm="more_kv", against="base", phase="above_onset", unit="preemptions per 1,000 requests",
                              metric="preemptions_per_1000_requests", effect_scale="difference", effect=-250.0,
                              ci_low=-300.0, ci_high=-200.0)  # fmt: skip
    text = "\n".join(lines(put_beside(build.verdict(), build.verdict(campaign="b", comparisons=[ladder, *more]))))
    assert "above_onset preemptions, more_kv/base" in text
    assert "return first token, offload/control" in text
    assert "left out here" in text


def test_the_onsets_of_runs_say_whether_they_meet() -> None:
    verdict = ladder_verdict()
    assert verdict.ladder is not None
    later = msgspec.structs.replace(verdict.ladder, onset_measured=9, onset_by_run=[9, 9, 10])
    same = msgspec.structs.replace(verdict.ladder, onset_measured=6, onset_by_run=[5, 6, 7])
    for ladder, said in ((later, "runs' onsets apart"), (same, "runs' onsets meet")):
        assert row_of(verdict, msgspec.structs.replace(verdict, ladder=ladder), "onset").endswith(said)


def test_a_size_that_one_of_two_has_is_left_out_of_other_protocols_alone() -> None:
    mine, theirs = {"size targets": "8", "prices": "none", "pairs": "6"}, {"prices": "{}", "pairs": "8"}
    same = "\n".join(lines(put_beside(build.verdict(), build.verdict(campaign="b"), mine, theirs)))
    assert "size targets" in same
    assert "Note: what was asked for differs (size targets, prices, pairs)." in same
    other = "\n".join(lines(put_beside(build.verdict(), build.verdict(protocol="aa_noise"), mine, theirs)))
    assert "size targets" not in other
    assert "what was asked for differs (prices, pairs)" in other


def test_a_size_within_what_was_declared_is_not_called_equivalent() -> None:
    row = row_of(build.verdict(), build.verdict(campaign="b"), "run peak RAM")
    assert row.count("within the declared size") == 2
    assert "EQUIVALENT" not in row


def test_the_records_of_a_campaign_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def judged(directory: Path) -> Judged:
        seen.append(directory)
        plan = Plan("1.0", build.protocol(), 1, [], {})
        campaign = Campaign("1.0", "c", plan, "", {}, {}, None)
        return Judged(campaign, build.verdict(campaign=str(directory)), {"localhost": build.records()})

    monkeypatch.setattr(beside, "judge", judged)
    found = beside.compare_campaigns(Path("a"), Path("b"))
    assert seen == [Path("a"), Path("b")]
    assert (found.a.campaign, found.b.campaign) == ("a", "b")
    assert found.conditions == []


def test_a_folder_whose_runs_lie_in_an_archive_beside_them_names_it(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "h" / "p01-1-control"
    run.mkdir(parents=True)
    content = msgspec.json.encode({"files": {"engine.log.zst": "0" * 64}})
    (run / "record.json").write_bytes(content)
    (run / "record.sha256").write_text(f"{hashlib.sha256(content).hexdigest()}  record.json\n")
    with pytest.raises(UnusableInput, match=r"engine\.log\.zst.*fetch it again\.$"):
        campaigns.check_digests(run)
    (tmp_path / "campaign.tar.xz").write_bytes(b"")
    with pytest.raises(UnusableInput) as refused:
        campaigns.check_digests(run)
    assert str(refused.value).endswith(
        f"the whole campaign is in {tmp_path / 'campaign.tar.xz'}: unpack it elsewhere, and name its folder."
    )
    assert "fetch" not in str(refused.value)
