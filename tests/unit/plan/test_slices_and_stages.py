"""Parts of an inventory under several controllers, stages of a campaign, and runs of which the record came alone."""

import errno
import json
import shutil
import tarfile
from pathlib import Path

import msgspec
import pytest
from build import faulted, honest_records, protocol
from kvtrial.analysis import campaign, slices, stages
from kvtrial.analysis.cli import main
from kvtrial.analysis.verdict import conclude as conclude_verdict
from kvtrial.host.program import pack
from kvtrial.host.state import Folder
from kvtrial.record.errors import UnusableInput
from kvtrial.record.record import RunRecord
from kvtrial.record.store import (
    PACKED_RECORD,
    RECORD,
    SUMMARY_ONLY,
    packed_record,
    record_text,
    sha256_of_file,
    write_atomically,
)
from test_campaign_and_cli import as_planned, write_run
from test_plan import request

SCALES = {"h1": 1.0, "h2": 1.03, "h3": 0.98, "h4": 1.01}


def run_by(tmp_path, results, hosts, lost=None, broken=(), drivers=None, planned=()) -> Path:
    """A campaign that one controller has run over `hosts`, of those `planned` where there are more.

    On those in `broken` the engine was another version.
    """
    names = planned or hosts
    asked = {**request(hosts={h: request()["hosts"]["h1"] for h in names}), "results_dir": str(tmp_path / results)}
    directory = Path(campaign.prepare(asked)["directory"])
    for host in hosts:
        for record in as_planned(directory, honest_records(host=host, scale_offload=SCALES[host]), host):
            if host in broken:
                wrong = msgspec.structs.replace(record.resolved, vllm_version="0.1.0")
                record = msgspec.structs.replace(record, resolved=wrong)
            conditions = msgspec.structs.replace(record.conditions, driver_version=(drivers or {}).get(host, "580.126"))
            record = msgspec.structs.replace(record, conditions=conditions)
            write_run(directory / "runs" / host / record.run, record)
        campaign.collect(str(directory), host, None, {"state": "finished"})
    campaign.conclude(str(directory), lost_hosts=lost)
    return directory


def decided(directory: Path) -> dict:
    verdict = json.loads((directory / "verdict.json").read_text())
    del verdict["campaign"]
    verdict["time_budget"] = None  # how long each controller waited is not the same
    return verdict


def test_two_controllers_on_halves_give_the_verdict_of_one(tmp_path, capsys):
    whole = run_by(tmp_path, "one", ["h1", "h2", "h3", "h4"])
    halves = [run_by(tmp_path, "a", ["h1", "h3"]), run_by(tmp_path, "b", ["h2", "h4"])]
    merged = tmp_path / "both"
    assert main(["merge", *map(str, halves), "--into", str(merged)]) == 0
    assert capsys.readouterr().out.startswith("BETTER")
    assert decided(merged) == decided(whole)
    assert campaign.read_campaign(merged).plan_sha256 == campaign.read_campaign(whole).plan_sha256
    # What was merged is a campaign as any: it is analysed again, and a third part comes to it.
    assert main(["analyze", str(merged)]) == 0


def planned_on(tmp_path, results, protocol, hosts) -> Path:
    """A campaign over hosts (name → what is given of it) that nothing was run of yet."""
    asked = {name: request(**dict(given))["hosts"]["h1"] for name, given in hosts.items()}
    raw = {**request(protocol=protocol, hosts=asked), "results_dir": str(tmp_path / results)}
    return Path(campaign.prepare(raw)["directory"])


SIZED = ({"sizes": {"tier_bytes": 2**28}}, {"sizes": {"tier_bytes": 2**29}})
CACHED = ({}, {"engine_args": {"num-gpu-blocks-override": 98}})


@pytest.mark.parametrize(("protocol_name", "given"), [("offload_return", SIZED), ("tier_size", CACHED)])
@pytest.mark.parametrize("first", [0, 1])
def test_parts_whose_hosts_have_sizes_of_their_own_are_of_one_campaign(tmp_path, protocol_name, given, first):
    hosts = {"h1": given[first], "h2": given[1 - first], "h3": given[first]}
    whole = planned_on(tmp_path, "one", protocol_name, hosts)
    parts = [
        planned_on(tmp_path, name, protocol_name, {host: hosts[host] for host in of_part})
        for name, of_part in (("b", ["h2"]), ("a", ["h1", "h3"]))
    ]
    merged = campaign.read_campaign(slices.merge(parts, tmp_path / "both"))
    assert merged.plan_sha256 == campaign.read_campaign(whole).plan_sha256
    assert merged.protocol_sha256 == campaign.read_campaign(whole).protocol_sha256


def test_of_ladders_the_part_tells_the_protocol_whose_host_does_not_only_queue(tmp_path):
    args = {"num-gpu-blocks-override": 97, "max-num-seqs": 16, "max-model-len": 1024}
    queues = {"prompt_tokens": 448, "output_tokens": 64}
    hosts = {
        name: request(engine_args=args, model={"kv_bytes_per_token": 512}, **sizes)["hosts"]["h1"]
        for name, sizes in (("h1", {"sizes": queues}), ("h2", {}))
    }

    def planned(results, of_part):
        raw = request(protocol="preemption_ladder", hosts={host: hosts[host] for host in of_part})
        asked = {**raw, "ladder": [1, 3, 4, 5, 6, 7], "results_dir": str(tmp_path / results)}
        return Path(campaign.prepare(asked)["directory"])

    whole, parts = planned("one", ["h1", "h2"]), [planned("a", ["h1"]), planned("b", ["h2"])]
    merged = campaign.read_campaign(slices.merge(parts, tmp_path / "both"))
    assert merged.plan_sha256 == campaign.read_campaign(whole).plan_sha256


def test_parts_of_another_protocol_are_refused_though_their_sizes_may_differ(tmp_path):
    one = planned_on(tmp_path, "a", "offload_return", {"h1": {}})
    for name, protocol_name in (("b", "tier_size"), ("c", "aa_noise")):
        with pytest.raises(UnusableInput, match="another protocol"):
            slices.merge([one, planned_on(tmp_path, name, protocol_name, {"h2": {}})], tmp_path / "both")


def test_a_host_that_a_part_lost_is_lost_to_the_whole(tmp_path):
    halves = [run_by(tmp_path, "a", ["h1", "h3"], lost=["h9"]), run_by(tmp_path, "b", ["h2"])]
    slices.merge(halves, tmp_path / "both")
    assert campaign.lost_hosts_of(tmp_path / "both") == ["h9"]
    assert "h9" in campaign.conclude(str(tmp_path / "both"))["answer"][0] + decided(tmp_path / "both")["reason"]


def test_parts_that_are_not_of_one_campaign_are_refused(tmp_path):
    one = run_by(tmp_path, "a", ["h1"])
    with pytest.raises(UnusableInput, match=r"host h1 is in .* share no host"):
        slices.merge([one, run_by(tmp_path, "b", ["h1"])], tmp_path / "both")
    other = campaign.prepare({**request(seed=2, hosts={"h2": request()["hosts"]["h1"]}),
                              "results_dir": str(tmp_path / "c")})  # fmt: skip
    with pytest.raises(UnusableInput, match="another seed"):
        slices.merge([one, Path(other["directory"])], tmp_path / "both")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "x").touch()
    with pytest.raises(UnusableInput, match="name a folder that is not there"):
        slices.merge([one], tmp_path / "there")
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


def test_parts_whose_hosts_the_preflight_would_have_refused_are_refused(tmp_path, capsys):
    one = run_by(tmp_path, "a", ["h1", "h2"])
    other = run_by(tmp_path, "b", ["h3"], drivers={"h3": "470.1"})
    into = ["--into", str(tmp_path / "both")]
    assert main(["merge", str(one), str(other), *into]) == 2
    assert f"the parts differ in driver: 580.126 in {one}, 470.1 in {other}" in capsys.readouterr().err
    assert not (tmp_path / "both").exists()
    assert main(["merge", str(one), str(other), *into, "--may-differ", "drivers"]) == 2
    assert main(["merge", str(one), str(other), *into, "--may-differ", "driver"]) == 0
    # What the hosts of one part differ in, its preflight was told that they may.
    mixed = run_by(tmp_path, "c", ["h3", "h4"], drivers={"h3": "470.1"})
    assert main(["merge", str(one), str(mixed), "--into", str(tmp_path / "all")]) == 0


def test_a_part_that_stopped_at_its_canary_is_refused(tmp_path, capsys):
    good, bad = run_by(tmp_path, "a", ["h1", "h2"]), run_by(tmp_path, "b", ["h3", "h4"], broken=["h3"])
    assert not campaign.next_stage(str(bad), ["h4"])["go"]
    for parts in ([good, bad], [bad]):
        assert main(["merge", *map(str, parts), "--into", str(tmp_path / "both")]) == 2
        said = capsys.readouterr().err
        assert (
            f"{bad} stopped after 1 of 2 hosts, 1 of them INVALID" in said
            and "run that part anew: of the fleet the other parts" in said
        )
    assert not (tmp_path / "both").exists()


def test_a_merge_goes_nowhere_else_than_into_a_new_folder_beside(tmp_path, capsys, monkeypatch):
    part = run_by(tmp_path, "a", ["h1"])
    monkeypatch.chdir(tmp_path)
    for into, said in ((".", "is there already"), ("/", "is there already"), (str(part / "sub"), "outside the parts")):
        assert main(["merge", str(part), "--into", into]) == 2
        assert said in (error := capsys.readouterr().err) and error.count("\n") == 1
    assert not (part / "sub").exists()


def test_a_record_that_was_edited_in_a_part_is_named_and_nothing_is_merged(tmp_path):
    one, two = run_by(tmp_path, "a", ["h1"]), run_by(tmp_path, "b", ["h2"])
    path = next(two.glob("runs/h2/*/record.json"))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UnusableInput, match=f"{path} does not match its digest"):
        slices.merge([one, two], tmp_path / "both")
    assert not (tmp_path / "both").exists()


def test_a_part_whose_plan_was_written_otherwise_is_merged_with_its_records(tmp_path):
    """Records name the digest of their plan's text: of an earlier release, 3600 may stand there for 3600.0."""
    one, two = run_by(tmp_path, "a", ["h1"]), run_by(tmp_path, "b", ["h2"])
    told = json.loads((two / "campaign.json").read_text())
    limits = told["plan"]["hosts"][0]["limits"]
    name = next(key for key, value in limits.items() if isinstance(value, float) and value.is_integer())
    limits[name] = int(limits[name])
    (two / "campaign.json").write_text(json.dumps(told))
    digest = campaign.host_plan_digests(two)["h2"]
    for path in two.glob("runs/h2/*/record.json"):
        sha = write_atomically(path, json.dumps({**json.loads(path.read_bytes()), "plan_sha256": digest}).encode())
        path.with_name("record.sha256").write_text(f"{sha}  record.json\n")
    slices.merge([one, two], tmp_path / "both")
    assert campaign.host_plan_digests(tmp_path / "both")["h2"] == digest
    assert main(["analyze", str(tmp_path / "both")]) == 0


def test_a_plan_of_a_host_that_can_not_be_read_is_said_in_a_sentence(tmp_path, capsys):
    one, two = run_by(tmp_path, "a", ["h1"]), run_by(tmp_path, "b", ["h2"])
    told = json.loads((two / "campaign.json").read_text())
    told["plan"]["hosts"][0]["seed"] = "one"
    (two / "campaign.json").write_text(json.dumps(told))
    for command in (["analyze", str(two)], ["merge", str(one), str(two), "--into", str(tmp_path / "both")]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert f"{two / 'campaign.json'} can't be read" in said and said.count("\n") == 1
    assert not (tmp_path / "both").exists()


def test_a_merge_that_can_not_be_judged_leaves_nothing(tmp_path, monkeypatch, capsys):
    one, two = run_by(tmp_path, "a", ["h1"]), run_by(tmp_path, "b", ["h2"])

    def refuse(*_, **__):
        raise UnusableInput("it can't be.")

    monkeypatch.setattr(campaign, "conclude", refuse)
    assert main(["merge", str(one), str(two), "--into", str(tmp_path / "both")]) == 2
    assert "it can't be." in capsys.readouterr().err and not (tmp_path / "both").exists()


def test_the_next_stage_goes_on_after_a_valid_canary_and_stops_after_an_invalid_one(tmp_path):
    good = run_by(tmp_path, "good", ["h1", "h2", "h3"])
    assert campaign.next_stage(str(good), ["h2", "h3"]) == {"go": True, "reason": ""}
    bad = run_by(tmp_path, "bad", ["h1", "h2", "h3"], broken=["h1"])
    answer = campaign.next_stage(str(bad), ["h2", "h3"])
    assert not answer["go"]
    assert answer["reason"].startswith("stopped after 1 of 3 hosts, 1 of them INVALID (h1: ")
    assert "kvtrial_new_campaign=true" in answer["reason"]
    done = campaign.conclude(str(bad))
    assert (done["exit_status"], done["verdict"]) == (4, "INVALID")
    assert "Stopped after 1 of 3 hosts" in done["cause"]
    assert all(c["effect"] is None for c in decided(bad)["comparisons"])
    # The same after a stage of three: one in three is too much, and then it is remembered no more.
    assert not campaign.next_stage(str(bad), [])["go"]
    campaign.collect(str(bad), "h1", None, {"state": "running"})
    assert campaign.next_stage(str(bad), ["h1"])["go"]
    assert campaign.conclude(str(bad))["verdict"] != "BETTER"
    assert not (bad / "stopped.json").exists()


def test_a_campaign_that_stopped_at_its_canary_is_not_gone_on_with_by_a_command_without_stages(tmp_path):
    directory = run_by(tmp_path, "a", ["h1"], broken=["h1"], planned=["h1", "h2", "h3"])
    stopped = campaign.next_stage(str(directory), ["h2"])
    assert not stopped["go"]
    again = asks(tmp_path / "a", ["h1", "h2", "h3"])
    assert again["resumed"] and any(line.endswith(f" had been {stopped['reason']}.") for line in again["announcement"])
    assert campaign.next_stage(str(directory), ["h1", "h2", "h3"]) == stopped
    assert stages.read_stopped(directory) is not None


def test_a_campaign_that_never_stopped_goes_on_without_stages_whatever_its_first_host_gave(tmp_path):
    directory = run_by(tmp_path, "a", ["h1"], broken=["h1"], planned=["h1", "h2", "h3"])
    assert campaign.next_stage(str(directory), ["h1", "h2", "h3"])["go"]


def test_a_campaign_that_stopped_since_its_canary_was_lost_goes_on_when_it_is_back(tmp_path):
    directory = Path(asks(tmp_path / "a", ["h1", "h2", "h3"])["directory"])
    assert not campaign.next_stage(str(directory), ["h2"], ["h1"])["go"]
    said = asks(tmp_path / "a", ["h1", "h2", "h3"])["announcement"]
    assert "had been stopped after 1 of 3 hosts, 1 of them lost (h1)" in said[-1]
    assert campaign.next_stage(str(directory), ["h1", "h2", "h3"])["go"] and stages.read_stopped(directory) is None


def test_a_canary_whose_engine_crashed_in_every_run_stops(tmp_path):
    directory = run_by(tmp_path, "crashed", ["h1", "h2", "h3"])
    for path in directory.glob("runs/*/*/record.json"):
        record = msgspec.json.decode(path.read_bytes(), type=RunRecord)
        shutil.rmtree(path.parent)
        write_run(path.parent, faulted(record, "engine", "engine_died"))
    answer = campaign.next_stage(str(directory), ["h2", "h3"])
    assert not answer["go"]
    assert answer["reason"].startswith("stopped after 1 of 3 hosts, 1 of them without a valid pair (h1: ")
    assert campaign.conclude(str(directory))["verdict"] == "INVALID"


def test_a_canary_that_ended_without_a_record_stops_and_one_out_of_reach_does_not(tmp_path):
    directory = run_by(tmp_path, "empty", ["h1", "h2", "h3"])
    for host in ("h1", "h2"):
        shutil.rmtree(directory / "runs" / host)
    campaign.collect(str(directory), "h1", None, {"state": "unreachable"})
    campaign.collect(str(directory), "h2", None, {"state": "running"})
    assert campaign.next_stage(str(directory), ["h3"])["go"]
    campaign.collect(str(directory), "h1", None, {"state": "failed"})
    assert "(h1: no run left a record)" in campaign.next_stage(str(directory), ["h3"])["reason"]


def test_a_single_invalid_host_stops_the_canaries_and_a_fifth_the_later_stages():
    verdict = conclude_verdict(protocol(), {"h1": honest_records(host="h1")}, "c")
    good = verdict.hosts[0]
    bad = msgspec.structs.replace(good, verdict="INVALID", reason="x")

    empty = msgspec.structs.replace(good, runs=msgspec.structs.replace(good.runs, valid=0))

    def stopped(good_hosts, bad_hosts, planned, crashed=0, lost=0):
        hosts = [good] * good_hosts + [bad] * bad_hosts + [empty] * crashed
        return bool(stages.stop_sentence(hosts, planned, ["x"] * lost))

    assert stopped(9, 1, 100) and stopped(100, 1, 1000) and not stopped(100, 0, 1000)
    assert stopped(9, 2, 100) and not stopped(40, 10, 100) and stopped(40, 11, 100)
    # Nine of ten that were lost, or whose engine crashed in every run, are no canary that lives; one of ten is a host.
    assert stopped(1, 0, 100, lost=9) and stopped(1, 0, 100, crashed=9) and stopped(7, 0, 100, crashed=2, lost=1)
    assert not stopped(9, 0, 100, lost=1) and not stopped(9, 0, 100, crashed=1) and stopped(0, 0, 100, lost=1)


def test_a_canary_that_is_lost_on_most_hosts_stops(tmp_path):
    directory = run_by(tmp_path, "lost", ["h1", "h2", "h3", "h4"])
    for host in ("h2", "h3"):
        shutil.rmtree(directory / "runs" / host)
        (directory / "hosts" / f"{host}.json").unlink()
    assert campaign.next_stage(str(directory), ["h4"])["go"], "they may still be at work"
    # Ended and let go, as h1, or given up, as the two that nothing came of.
    answer = campaign.next_stage(str(directory), ["h4"], ["h1", "h2", "h3", "elsewhere"])
    assert answer["reason"].startswith("stopped after 3 of 4 hosts, 2 of them lost (h2); the others were not started")
    assert campaign.conclude(str(directory))["verdict"] == "INVALID"


def test_what_a_stopped_campaign_says_can_not_be_damaged_away(tmp_path, capsys):
    bad = run_by(tmp_path, "b", ["h3", "h4"], broken=["h3"])
    assert not campaign.next_stage(str(bad), ["h4"])["go"]
    (bad / "stopped.json").write_text('{"reason": ')
    for command in (["analyze", str(bad)], ["merge", str(bad), "--into", str(tmp_path / "x")]):
        assert main(command) == 2
        assert "stopped.json can't be read" in (said := capsys.readouterr().err) and said.count("\n") == 1
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("was", "now", "goes_on"), [(60, 80, True), (300, 60, True), (60, 300, False)])
def test_a_campaign_goes_on_where_another_host_or_pause_changed_how_long_a_controller_may_be_silent(
    tmp_path, was, now, goes_on
):
    def asked(seconds):
        return {**request(if_controller_gone="stop", visited_every_seconds=seconds), "results_dir": str(tmp_path)}

    first = campaign.prepare(asked(was))
    if goes_on:
        again = campaign.prepare(asked(now))
        assert (again["campaign"], again["plan_sha256"]) == (first["campaign"], first["plan_sha256"])
    else:
        with pytest.raises(UnusableInput, match=r"controller_gone_seconds: was 180.0, now 900.0"):
            campaign.prepare(asked(now))


def test_the_first_stage_has_nothing_to_look_at(tmp_path):
    asked = {**request(), "results_dir": str(tmp_path)}
    assert campaign.next_stage(campaign.prepare(asked)["directory"], ["h1"]) == {"go": True, "reason": ""}


def host_with_a_run(tmp_path, directory: Path) -> tuple[Folder, RunRecord]:
    """A host's folder with one finished run: record, requests and a page of metrics."""
    [record] = as_planned(directory, honest_records()[:1])
    folder = Folder(tmp_path / "host")
    run = folder.runs / record.run
    (run / "metrics").mkdir(parents=True)
    (run / "requests.jsonl.zst").write_bytes(b"requests" * 100)
    (run / "metrics" / "return.after.prom").write_text("a 1\n")
    files = {name: sha256_of_file(run / name) for name in ("requests.jsonl.zst", "metrics/return.after.prom")}
    record = msgspec.structs.replace(record, files=files)
    digest = write_atomically(run / "record.json", msgspec.json.encode(record))
    (run / "record.sha256").write_text(f"{digest}  record.json\n")
    return folder, record


def fetched(folder: Folder, directory: Path, parts: str) -> dict:
    archive = folder.directory / "archive.tar"
    pack(folder, archive, parts)
    return campaign.collect(str(directory), "h1", str(archive), {"state": "finished"})


def test_a_full_disk_takes_no_archive_and_that_is_said_in_a_sentence(tmp_path, monkeypatch):
    directory = Path(campaign.prepare({**request(), "results_dir": str(tmp_path / "r")})["directory"])
    folder, _ = host_with_a_run(tmp_path, directory)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kvtrial.host.program.tarfile.open", full)
    with pytest.raises(UnusableInput, match=f"no space is left for the archive .* in {folder.directory}; free some"):
        fetched(folder, directory, "full")


def test_of_a_summary_the_rest_is_fetched_later_and_the_verdict_needs_it_not(tmp_path):
    directory = Path(campaign.prepare({**request(), "results_dir": str(tmp_path / "r")})["directory"])
    folder, record = host_with_a_run(tmp_path, directory)
    assert fetched(folder, directory, "summary")["added"] == [record.run]
    run = directory / "runs" / "h1" / record.run
    assert sorted(p.name for p in run.rglob("*")) == ["record.json.zst", "record.sha256", SUMMARY_ONLY]
    alone = campaign.analyze(directory)
    assert fetched(folder, directory, "summary")["added"] == []
    assert fetched(folder, directory, "full")["added"] == [record.run]
    assert (run / "requests.jsonl.zst").read_bytes() == b"requests" * 100
    assert (run / "metrics" / "return.after.prom").read_text() == "a 1\n"
    assert not (run / SUMMARY_ONLY).exists()
    assert (run / RECORD).is_file() and not (run / PACKED_RECORD).exists()
    assert campaign.analyze(directory) == alone
    assert fetched(folder, directory, "full")["added"] == []
    assert fetched(folder, directory, "summary")["added"] == []
    assert not list(directory.rglob(".incoming*"))


def test_a_compressed_record_that_was_truncated_or_edited_is_named(tmp_path):
    directory = Path(campaign.prepare({**request(), "results_dir": str(tmp_path / "r")})["directory"])
    folder, record = host_with_a_run(tmp_path, directory)
    fetched(folder, directory, "summary")
    path = directory / "runs" / "h1" / record.run / PACKED_RECORD
    whole = record_text(path.parent)
    for damaged in (path.read_bytes()[:-20], packed_record(whole.replace(b"completed", b"Completed")), b""):
        path.write_bytes(damaged)
        with pytest.raises(UnusableInput, match=r"record\.json\.zst does not match its digest: it was truncated or ed"):
            campaign.analyze(directory)
    path.unlink()
    with pytest.raises(UnusableInput, match=r"record\.json is missing: the run was fetched whole"):
        campaign.analyze(directory)


def test_what_was_fetched_whole_stays_under_its_digests(tmp_path):
    directory = Path(campaign.prepare({**request(), "results_dir": str(tmp_path / "r")})["directory"])
    folder, record = host_with_a_run(tmp_path, directory)
    fetched(folder, directory, "full")
    (directory / "runs" / "h1" / record.run / "requests.jsonl.zst").unlink()
    with pytest.raises(UnusableInput, match="is not whole"):
        campaign.analyze(directory)


def test_a_file_that_was_edited_on_the_host_is_refused_when_it_is_fetched_later(tmp_path):
    directory = Path(campaign.prepare({**request(), "results_dir": str(tmp_path / "r")})["directory"])
    folder, record = host_with_a_run(tmp_path, directory)
    fetched(folder, directory, "summary")
    (folder.runs / record.run / "requests.jsonl.zst").write_bytes(b"others")
    with pytest.raises(UnusableInput, match=r"requests\.jsonl\.zst does not match its digest"):
        fetched(folder, directory, "full")
    assert not list(directory.rglob(".incoming*"))


def test_a_summary_is_a_fraction_of_the_whole(tmp_path):
    directory = Path(campaign.prepare({**request(), "results_dir": str(tmp_path / "r")})["directory"])
    folder, _ = host_with_a_run(tmp_path, directory)
    pack(folder, tmp_path / "s.tar", "summary")
    with tarfile.open(tmp_path / "s.tar") as tar:
        assert sorted(Path(name).name for name in tar.getnames()) == ["record.json.zst", "record.sha256", SUMMARY_ONLY]
    assert (tmp_path / "s.tar").stat().st_size < 50_000


def test_a_host_that_was_lost_when_it_was_planned_joins_when_it_is_back(tmp_path):
    two = run_by(tmp_path, "r", ["h1", "h2"], lost=["h3"])
    before = {path: path.read_bytes() for path in two.glob("runs/*/*/record.json")}
    every = {h: request()["hosts"]["h1"] for h in ("h1", "h2", "h3")}
    again = campaign.prepare({**request(hosts=every), "results_dir": str(two.parent)})
    assert (again["campaign"], again["resumed"]) == (two.name, True)
    for record in as_planned(two, honest_records(host="h3"), "h3"):
        write_run(two / "runs" / "h3" / record.run, record)
    campaign.collect(str(two), "h3", None, {"state": "finished"})
    assert campaign.conclude(str(two), lost_hosts=[])["verdict"] == "BETTER"
    assert {path: path.read_bytes() for path in before} == before
    # Complete now: the same command begins anew.
    assert campaign.prepare({**request(hosts=every), "results_dir": str(two.parent)})["campaign"] != two.name


def test_a_host_joins_no_campaign_of_another_plan_nor_one_that_stands_without_it(tmp_path):
    two = run_by(tmp_path, "r", ["h1", "h2"], lost=["h3"])
    every = {h: request()["hosts"]["h1"] for h in ("h1", "h2", "h3")}
    with pytest.raises(UnusableInput, match=r"is unfinished and its plan differs \(seed"):
        campaign.prepare({**request(hosts=every, seed=7), "results_dir": str(two.parent)})
    four = run_by(tmp_path, "s", ["h1", "h2", "h3", "h4"], lost=["h5"])
    five = {h: request()["hosts"]["h1"] for h in ("h1", "h2", "h3", "h4", "h5")}
    assert campaign.prepare({**request(hosts=five), "results_dir": str(four.parent)})["campaign"] != four.name


def asks(results: Path, hosts, **changes) -> dict:
    """What the experiment's command does when these hosts are at hand."""
    return campaign.prepare(
        {**request(hosts={h: request()["hosts"]["h1"] for h in hosts}, **changes), "results_dir": str(results)}
    )


def done_on(directory: Path, host: str, runs: int | None = None, state: str = "finished") -> None:
    """The host does so many of its runs that are not here yet, and is fetched from."""
    records = as_planned(directory, honest_records(host=host, scale_offload=SCALES[host]), host)
    for record in [r for r in records if not (directory / "runs" / host / r.run).exists()][:runs]:
        write_run(directory / "runs" / host / record.run, record)
    campaign.collect(str(directory), host, None, {"state": state})


def test_the_same_command_goes_on_while_a_lost_host_is_still_away(tmp_path):
    every = ["h1", "h2", "h3"]
    first = asks(tmp_path, every)
    directory = Path(first["directory"])
    for host in every:
        done_on(directory, host, *((4, "unreachable") if host == "h3" else ()))
    told = campaign.conclude(str(directory), lost_hosts=[], absent=[], inventory=every)
    assert (told["exit_status"], first["absent"]) == (2, [])
    before = {path: path.read_bytes() for path in directory.glob("runs/*/*/record.json")}
    again = asks(tmp_path, ["h1", "h2"])
    assert (again["campaign"], again["resumed"], again["absent"]) == (directory.name, True, ["h3"])
    assert again["plan_sha256"] == first["plan_sha256"]
    assert sorted(again["plans"]) == ["h1", "h2"]
    assert "h1: 12 runs (6 pairs of control, offload), 12 of them done" in " ".join(again["announcement"])
    assert f"Goes on with campaign {directory.name}, whose hosts h3 are not at hand" in again["announcement"][-1]
    assert "Nothing is left to do on those at hand" in again["announcement"][-1]
    assert campaign.next_stage(str(directory), ["h1", "h2"], [], again["absent"])["go"]
    told = campaign.conclude(str(directory), lost_hosts=["h3"], absent=again["absent"], inventory=every)
    assert told["exit_status"] == 2
    assert told["cause"] == (
        "not finished on h3 (not at hand this time, when last fetched unreachable; 4 of 12 runs done); the same "
        "command goes on with what is missing."
    )
    assert campaign.lost_hosts_of(directory) == []
    back = asks(tmp_path, every)
    assert (back["campaign"], back["absent"]) == (directory.name, [])
    assert "h3: 12 runs (6 pairs of control, offload), 4 of them done" in " ".join(back["announcement"])
    done_on(directory, "h3")
    assert campaign.conclude(str(directory), lost_hosts=[], absent=[], inventory=every)["verdict"] == "BETTER"
    assert {path: path.read_bytes() for path in before} == before
    assert asks(tmp_path, every)["campaign"] != directory.name


def test_a_campaign_whose_controller_was_killed_goes_on_without_a_host_that_is_away_meanwhile(tmp_path):
    every = ["h1", "h2", "h3", "h4"]
    directory = Path(asks(tmp_path, every)["directory"])
    for host in every[1:]:
        done_on(directory, host, 6, "running")
    again = asks(tmp_path, every[:3])
    assert (again["campaign"], again["absent"]) == (directory.name, ["h4"])
    for host in every[:3]:
        done_on(directory, host)
    # Of the host that is away half is here, which is no host without a valid pair for a stage to stop at.
    assert campaign.next_stage(str(directory), ["h3"], ["h1", "h2"], ["h4"])["go"]
    told = campaign.conclude(str(directory), lost_hosts=[], absent=["h4"], inventory=every)
    assert "h4 (not asked this time, when last fetched running; 6 of 12 runs done)" in told["cause"]


def test_a_host_that_is_away_holds_no_stage_back(tmp_path):
    directory = Path(asks(tmp_path, ["h1", "h2", "h3"])["directory"])
    done_on(directory, "h3", 1, "unreachable")
    assert not campaign.next_stage(str(directory), ["h1", "h2"])["go"]
    assert campaign.next_stage(str(directory), ["h1", "h2"], [], ["h3"])["go"]
    # Its disk is still full, so that it could not be made ready.
    shutil.rmtree(directory / "runs" / "h3")
    campaign.collect(str(directory), "h3", None, {"state": "failed", "reason": "the disk is full"})
    assert campaign.next_stage(str(directory), ["h1", "h2"], [], ["h3"])["go"]


def test_a_host_that_was_never_planned_and_is_still_away_begins_no_other_campaign(tmp_path):
    two = run_by(tmp_path, "r", ["h1", "h2"], lost=["h3"])
    again = asks(two.parent, ["h1", "h2"])
    assert again["campaign"] == two.name
    assert "h3 (never planned)" in again["announcement"][-1]
    # --limit h2, or h1 away as well: the one that was lost is not forgotten.
    one = asks(two.parent, ["h2"])
    assert (one["campaign"], one["absent"]) == (two.name, ["h1"])
    assert "h1 (finished), h3 (never planned)" in one["announcement"][-1]
    campaign.conclude(str(two), lost_hosts=[], absent=["h1"], inventory=["h1", "h2", "h3"])
    assert campaign.lost_hosts_of(two) == ["h3"]
    # Back, while another one is away: it joins, and the other's part stays as it was.
    before = campaign.host_plan_digests(two)
    third = asks(two.parent, ["h1", "h3"])
    assert (third["campaign"], third["absent"]) == (two.name, ["h2"])
    digests = campaign.host_plan_digests(two)
    assert {host: digests[host] for host in before} == before and sorted(digests) == ["h1", "h2", "h3"]
    assert sorted(campaign.read_campaign(two).asked.hosts) == ["h1", "h2", "h3"]
    assert campaign.lost_hosts_of(two) == []
    # One that left the inventory for good is waited for no more.
    four = run_by(tmp_path, "s", ["h1", "h2"], lost=["h3"])
    campaign.conclude(str(four), lost_hosts=[], absent=[], inventory=["h1", "h2"])
    assert campaign.lost_hosts_of(four) == [] and asks(four.parent, ["h1", "h2"])["campaign"] != four.name


def test_a_smaller_command_of_another_plan_begins_its_own_campaign_and_says_beside_which(tmp_path):
    fleet = asks(tmp_path, ["h1", "h2", "h3"])
    other = asks(tmp_path, ["h1"], seed=2)
    assert other["campaign"] != fleet["campaign"] and not other["resumed"]
    assert other["announcement"][-1] == (
        f"Begins beside campaign {fleet['campaign']}, which is unfinished and stays so: its plan of these hosts "
        f"differs (seed: was 1, now 2)."
    )
    with pytest.raises(UnusableInput, match=r"is unfinished and its plan differs \(seed"):
        asks(tmp_path, ["h1", "h2", "h3"], seed=2)


def test_a_larger_campaign_that_a_later_one_finished_is_not_gone_on_with(tmp_path, monkeypatch):
    every = ["h1", "h2", "h3"]
    old = asks(tmp_path, every)
    Path(old["directory"]).rename(tmp_path / "offload_return-20200101T000000Z")
    new = run_by(tmp_path.parent, tmp_path.name, ["h1", "h2", "h4"])
    assert new.parent == tmp_path
    assert not asks(tmp_path, ["h1", "h2"])["resumed"]


def test_a_merged_campaign_is_gone_on_with_by_its_part_and_never_itself(tmp_path, capsys):
    results = tmp_path / "r"
    one, two = (Path(asks(results, hosts)["directory"]) for hosts in (["h1"], ["h2", "h3"]))
    for directory, host, runs in ((one, "h1", None), (two, "h2", None), (two, "h3", 4)):
        done_on(directory, host, runs, "finished" if runs is None else "stopped")
    merged = results / "offload_return-all"
    assert main(["merge", str(one), str(two), "--into", str(merged)]) == 2
    said = (
        f"not finished on h3 (stopped; 4 of 12 runs done); go on with {two.name} by its own command, then merge the "
        f"parts into a new folder."
    )
    assert said in capsys.readouterr().err and campaign.conclude(str(merged))["unfinished"] == said
    # Its name sorts before every date; over its very hosts a campaign begins, and its part is gone on with.
    assert asks(results, ["h1", "h2", "h3"])["campaign"] != merged.name
    path = next(merged.glob("runs/h3/*/record.json"))
    digest = write_atomically(path, path.read_bytes().replace(two.name.encode(), merged.name.encode()))
    path.with_name("record.sha256").write_text(f"{digest}  record.json\n")
    with pytest.raises(UnusableInput, match=f"its campaign is {merged.name}, that of host h3 here is {two.name};"):
        campaign.analyze(merged)
