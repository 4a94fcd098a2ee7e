"""A campaign on disk: prepared, resumed, taken in whole, concluded; and the exit status of `kvtrial analyze`."""

import json
import re
import shlex
import shutil
import tarfile
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import zstandard
from build import honest_records
from kvtrial.analysis import campaign
from kvtrial.analysis.cli import main
from kvtrial.record.errors import UnusableInput
from kvtrial.record.plan import plan_sha256
from kvtrial.record.record import RunRecord
from kvtrial.record.store import write_atomically
from test_plan import request


def prepared(tmp_path, **changes):
    asked = {**request(**changes), "results_dir": str(tmp_path / "results")}
    return campaign.prepare(asked)


def write_run(folder: Path, record) -> None:
    """A run's folder as the host program writes it, without requests and log."""
    folder.mkdir(parents=True)
    digest = write_atomically(folder / "record.json", msgspec.json.encode(msgspec.structs.replace(record, files={})))
    (folder / "record.sha256").write_text(f"{digest}  record.json\n")


def as_planned(directory: Path, records, host="h1"):
    """The records under the names that the campaign's plan gives them."""
    decided = campaign.read_campaign(directory)
    plan = next(part for part in decided.plan.hosts if part.host == host)
    runs = {(run.pair, run.arm): run.run for run in plan.runs}
    return [
        msgspec.structs.replace(
            r, campaign=decided.campaign, plan_sha256=plan_sha256(plan), host=host, run=runs[r.pair, r.arm]
        )
        for r in records
    ]


def concluded(tmp_path, records, state="finished", **changes) -> Path:
    """A campaign with these records, fetched from a host whose program stands at `state`."""
    directory = Path(prepared(tmp_path, **changes)["directory"])
    for record in as_planned(directory, records):
        write_run(directory / "runs" / "h1" / record.run, record)
    campaign.collect(str(directory), "h1", None, {"state": state, "reason": "the disk is full"})
    return directory


def rewritten(directory: Path, **fields) -> Path:
    """The first record of a campaign with other fields and a digest that fits; its path."""
    path = sorted(directory.glob("runs/h1/*/record.json"))[0]
    record = msgspec.json.decode(path.read_bytes(), type=RunRecord)
    digest = write_atomically(path, msgspec.json.encode(msgspec.structs.replace(record, **fields)))
    (path.parent / "record.sha256").write_text(f"{digest}  record.json\n")
    return path


def status(directory, capsys, *more) -> tuple[int, str, str]:
    code = main(["analyze", str(directory), *more])
    out = capsys.readouterr()
    assert "Traceback" not in out.out + out.err
    return code, out.out, out.err


def test_two_controllers_that_plan_in_one_second_have_a_campaign_each(tmp_path, monkeypatch):
    """Slices of AWX share the folder: the other's is made between the look and the making."""
    asked = {**request(), "results_dir": str(tmp_path / "results"), "new_campaign": True}
    first = campaign.prepare(asked)
    monkeypatch.setattr(campaign, "datetime", Frozen)
    monkeypatch.setattr(Path, "exists", lambda path: False)
    names = [campaign.prepare(asked)["campaign"] for _ in range(3)]
    assert names == ["offload_return-20261114T010000Z" + suffix for suffix in ("", "-2", "-3")]
    assert first["campaign"] not in names


class Frozen:
    """A wall clock that stands."""

    @staticmethod
    def now(zone):
        return datetime(2026, 11, 14, 1, tzinfo=zone)


def test_a_campaign_of_a_night_says_its_date_and_no_other_says_one(tmp_path):
    asked = {**request(), "results_dir": str(tmp_path / "results"), "new_campaign": True}
    told = [
        campaign.read_campaign(Path(campaign.prepare({**asked, "night": night})["directory"])).provenance.get("night")
        for night in ("2026-11-14", "")
    ]
    assert told == ["2026-11-14", None]
    for wrong in ("14 Nov", "2026-11-31", "20261114"):
        with pytest.raises(UnusableInput, match=f"kvtrial_night={wrong} is no date"):
            campaign.prepare({**asked, "night": wrong})


def test_analyze_ends_with_0_3_4_and_2(tmp_path, capsys):
    records = honest_records()
    code, out, _ = status(concluded(tmp_path / "a", records), capsys)
    assert (code, out.split(":")[0]) == (0, "BETTER")
    code, out, _ = status(concluded(tmp_path / "b", honest_records(pairs=2), pairs=2), capsys)
    assert (code, out.split(":")[0]) == (3, "INCONCLUSIVE")
    resolved = msgspec.structs.replace(records[0].resolved, vllm_version="0.1.0")
    wrong = [msgspec.structs.replace(records[0], resolved=resolved), *records[1:]]
    code, out, _ = status(concluded(tmp_path / "c", wrong), capsys)
    assert (code, out.split(",")[0]) == (4, "INVALID")
    code, _, err = status(tmp_path / "nowhere", capsys)
    assert code == 2
    assert "campaign.json" in err


def test_json_is_the_verdict_of_the_contract(tmp_path, capsys):
    code, out, _ = status(concluded(tmp_path, honest_records()), capsys, "--json")
    verdict = json.loads(out)
    assert code == 0
    assert {"schema_version", "campaign", "protocol", "evidence", "verdict", "reason", "comparisons", "hosts", "gates",
            "recommendation"} <= set(verdict)  # fmt: skip
    assert {"arm", "against", "phase", "metric", "unit", "role", "effect_scale", "effect", "ci_low", "ci_high",
            "confidence", "p_value", "pairs", "mde", "margin", "verdict", "delta_ttft_seconds", "moved", "quality",
            "heterogeneity"} <= set(verdict["comparisons"][0])  # fmt: skip
    assert set(verdict["hosts"][0]["runs"]) == {"planned", "valid", "dropped", "engine_faults"}
    assert set(verdict["recommendation"]) == {"action", "reason", "pins"}


def test_a_host_that_is_not_finished_is_named_and_the_same_command_goes_on(tmp_path, capsys):
    directory = concluded(tmp_path, honest_records(pairs=4), state="failed")
    code, _, err = status(directory, capsys)
    assert code == 2
    assert "h1 (failed: the disk is full; 8 of 12 runs done)" in err
    assert "the same command goes on" in err
    again = prepared(tmp_path)
    assert again["resumed"]
    assert again["directory"] == str(directory)
    assert "8 of them done" in " ".join(again["announcement"])


def test_a_finished_campaign_is_not_resumed(tmp_path):
    directory = concluded(tmp_path, honest_records())
    assert prepared(tmp_path)["directory"] != str(directory)


def test_an_unfinished_campaign_of_another_plan_is_refused_unless_a_new_one_is_asked_for(tmp_path):
    first = prepared(tmp_path)
    with pytest.raises(UnusableInput, match=r"is unfinished and its plan differs \(seed: was 1, now 2\)"):
        prepared(tmp_path, seed=2)
    asked = {**request(seed=2), "results_dir": str(tmp_path / "results"), "new_campaign": True}
    assert campaign.prepare(asked)["campaign"] != first["campaign"]


def test_an_edited_or_truncated_file_is_named(tmp_path, capsys):
    directory = concluded(tmp_path, honest_records())
    path = next(directory.glob("runs/h1/*/record.json"))
    original = path.read_bytes()
    for damaged in (original[:-10], original.replace(b'"completed"', b'"completeb"')):
        path.write_bytes(damaged)
        code, _, err = status(directory, capsys)
        assert code == 2
        assert str(path) in err
        assert "truncated or edited" in err
    path.write_bytes(original)
    assert status(directory, capsys)[0] == 0


def test_a_newer_record_is_refused_in_a_sentence(tmp_path, capsys):
    directory = concluded(tmp_path, honest_records())
    run = next(directory.glob("runs/h1/*"))
    newer = run.joinpath("record.json").read_bytes().replace(b'"schema_version":"1.0"', b'"schema_version":"2.0"')
    digest = write_atomically(run / "record.json", newer)
    (run / "record.sha256").write_text(digest)
    code, _, err = status(directory, capsys)
    assert code == 2
    assert "2.0" in err
    assert "newer" in err


def test_a_protocol_that_was_edited_in_a_campaign_is_named(tmp_path, capsys):
    directory = concluded(tmp_path, honest_records())
    path = directory / "campaign.json"
    original = path.read_text()
    told = json.loads(original)
    primary = next(each for each in told["plan"]["protocol"]["comparisons"] if each["role"] == "primary")
    primary["margin"] = 20.0
    path.write_text(json.dumps(told))
    for command in ("analyze", "report", "summarise"):
        assert main([command, str(directory)]) == 2
        assert f"{path} was edited: its protocol (margins, gates, comparisons)" in capsys.readouterr().err
    # Written otherwise, it is the same; of a release that kept no digest nothing is known.
    path.write_text(json.dumps(json.loads(original)))
    assert status(directory, capsys)[0] == 0
    del told["protocol_sha256"]
    path.write_text(json.dumps(told))
    assert status(directory, capsys)[1].startswith("EQUIVALENT")


STRANGERS = [
    ({"campaign": "another"}, "its campaign is another"),
    ({"plan_sha256": "f" * 64}, "its plan_sha256 is ffffffffffff"),
    ({"host": "h2"}, "its host is h2, the folder's h1"),
    ({"run": "p09-1-offload"}, "its run is p09-1-offload"),
    ({"pair": 9}, "its pair, arm and spare are 9"),
]


@pytest.mark.parametrize(("fields", "said"), STRANGERS, ids=[said for _, said in STRANGERS])
def test_a_record_of_another_campaign_plan_host_or_run_is_named(tmp_path, capsys, fields, said):
    directory = concluded(tmp_path, honest_records())
    path = rewritten(directory, **fields)
    code, _, err = status(directory, capsys)
    assert code == 2
    assert str(path) in err
    assert said in err


def test_a_run_or_a_host_that_is_not_in_the_plan_is_named(tmp_path, capsys):
    directory = concluded(tmp_path, honest_records())
    run = sorted(directory.glob("runs/h1/*"))[0]
    for target, said in ((run.parent / "p77-1-offload", "run p77-1-offload is not in the plan"),
                         (directory / "runs" / "h9" / run.name, "host h9 is not in the plan")):  # fmt: skip
        record = msgspec.json.decode((run / "record.json").read_bytes(), type=RunRecord)
        write_run(target, msgspec.structs.replace(record, run=target.name, host=target.parent.name))
        code, _, err = status(directory, capsys)
        assert code == 2
        assert said in err
        shutil.rmtree(target)
    assert status(directory, capsys)[0] == 0


@pytest.mark.parametrize("field", ["ttft_median_seconds", "finished", "failed"])
def test_a_phase_that_is_not_what_its_requests_say_was_edited(tmp_path, capsys, field):
    directory = concluded(tmp_path, honest_records())
    record = msgspec.json.decode(sorted(directory.glob("runs/h1/*/record.json"))[0].read_bytes(), type=RunRecord)
    phase = record.phases[-1]
    edited = msgspec.structs.replace(phase, **{field: getattr(phase, field) + 1})
    path = rewritten(directory, phases=[*record.phases[:-1], edited])
    code, _, err = status(directory, capsys)
    assert code == 2
    assert f"{path} was edited: phase {phase.name}: {field} is" in err


def test_a_phase_of_which_not_all_requests_are_listed_is_not_called_edited(tmp_path, capsys):
    directory = concluded(tmp_path, honest_records())
    record = msgspec.json.decode(sorted(directory.glob("runs/h1/*/record.json"))[0].read_bytes(), type=RunRecord)
    cut = msgspec.structs.replace(record.phases[-1], requests=record.phases[-1].requests[:-1], ttft_median_seconds=9.0)
    rewritten(directory, phases=[*record.phases[:-1], cut])
    assert "was edited" not in status(directory, capsys)[2]


@pytest.mark.parametrize("damaged", [b"{", b"[]", b'{"host": 3}', b"\xff\xfe"])
def test_a_damaged_host_state_or_list_of_lost_hosts_is_named(tmp_path, capsys, damaged):
    directory = concluded(tmp_path, honest_records())
    for name in ("hosts/h1.json", "lost.json"):
        path = directory / name
        before = path.read_bytes() if path.exists() else b"[]"
        path.write_bytes(damaged if name != "lost.json" or damaged != b"[]" else b"{}")
        for command in (["analyze", str(directory)], ["report", str(directory)]):
            code = main(command)
            err = capsys.readouterr().err
            if name == "lost.json" or command[0] == "analyze":
                assert code == 2
                assert str(path) in err
            assert "Traceback" not in err
        path.write_bytes(before)


def test_a_disk_that_refuses_is_a_sentence(tmp_path, capsys):
    directory = concluded(tmp_path, honest_records())
    (directory / "verdict.json").mkdir()
    for command in ("analyze", "report"):
        assert main([command, str(directory)]) == 2
        err = capsys.readouterr().err
        assert "verdict.json" in err
        assert "can't be read or written (is a directory)" in err
        assert "Traceback" not in err


def test_no_error_of_the_disk_reaches_a_user_as_a_traceback(monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device", "/somewhere")

    monkeypatch.setattr("kvtrial.analysis.answerschemas.json_schema", full)
    assert main(["schema", "record"]) == 2
    assert "/somewhere can't be read or written (no space left on device)" in capsys.readouterr().err


def test_an_old_campaign_that_cannot_be_read_blocks_nothing_unless_it_is_the_newest(tmp_path):
    results = tmp_path / "results"
    old = results / "offload_return-20200101T000000Z"
    old.mkdir(parents=True)
    (old / "campaign.json").write_text('{"schema_version": "9.0"}')
    with pytest.raises(UnusableInput, match=r"schema_version 9\.0.*kvtrial_new_campaign=true"):
        prepared(tmp_path)
    first = campaign.prepare({**request(), "results_dir": str(results), "new_campaign": True})
    assert prepared(tmp_path)["directory"] == first["directory"]


def fleet(tmp_path, count, finished, lost=None):
    """A campaign over `count` hosts with records of the first `finished`; its folder and its conclusion."""
    hosts = {f"h{i}": request()["hosts"]["h1"] for i in range(1, count + 1)}
    directory = Path(prepared(tmp_path, hosts=hosts)["directory"])
    for i in range(1, finished + 1):
        for record in as_planned(directory, honest_records(host=f"h{i}"), f"h{i}"):
            write_run(directory / "runs" / f"h{i}" / record.run, record)
        campaign.collect(str(directory), f"h{i}", None, {"state": "finished"})
    return directory, campaign.conclude(str(directory), lost_hosts=lost)


def test_a_fleet_ends_as_its_verdict_says_when_four_fifths_are_finished(tmp_path, capsys):
    directory, done = fleet(tmp_path, 5, 4)
    assert (done["exit_status"], done["verdict"]) == (0, "BETTER")
    assert "not finished on h5 (nothing was fetched; 0 of 12 runs done)" in done["cause"]
    code, _, err = status(directory, capsys)
    assert code == 0
    assert "h5" in err


def test_a_fleet_of_which_less_is_finished_is_not_finished(tmp_path):
    _, done = fleet(tmp_path, 5, 3)
    assert done["exit_status"] == 2
    assert "h4" in done["cause"]
    assert "h5" in done["cause"]


def test_hosts_that_could_not_be_planned_count_and_are_named_also_later(tmp_path, capsys):
    directory, done = fleet(tmp_path, 3, 3, lost=["h8", "h9", "h1"])
    assert (done["exit_status"], done["verdict"]) == (3, "INCONCLUSIVE")
    code, out, _ = status(directory, capsys, "--json")
    verdict = json.loads(out)
    assert code == 3
    assert verdict["reason"].startswith("3 of 5 planned hosts are valid")
    assert [(h["host"], h["verdict"], h["reason"]) for h in verdict["hosts"]][3:] == [
        ("h8", "INVALID", "unreachable, not planned"),
        ("h9", "INVALID", "unreachable, not planned"),
    ]
    assert sum("unreachable, not planned" in caveat for caveat in verdict["caveats"]) == 2
    assert campaign.conclude(str(directory), lost_hosts=[])["verdict"] == "BETTER"


def test_only_a_campaign_that_something_was_fetched_of_becomes_the_latest(tmp_path):
    directory = concluded(tmp_path, honest_records())
    latest = tmp_path / "results" / "latest"
    assert latest.resolve() == directory.resolve()
    another = Path(prepared(tmp_path)["directory"])
    assert another != directory
    assert latest.resolve() == directory.resolve()
    campaign.collect(str(another), "h1", None, {"state": "running"})
    assert latest.resolve() == another.resolve()


def test_a_record_that_was_removed_is_named(tmp_path, capsys):
    directory = concluded(tmp_path, honest_records())
    run = sorted(directory.glob("runs/h1/*"))[3]
    (run / "record.json").unlink()
    code, _, err = status(directory, capsys)
    assert code == 2
    assert f"{run / 'record.json'} is missing" in err
    shutil.rmtree(run)
    code, out, _ = status(directory, capsys, "--json")
    caveat = json.loads(out)["caveats"][0]
    assert code == 3
    assert f"h1 has no record of {run.name}, though it finished" in caveat
    assert caveat[1:] in status(directory, capsys)[1]
    assert "the time it took is among the rest" in caveat


def test_a_host_that_has_not_finished_is_not_said_to_lack_records(tmp_path, capsys):
    directory = concluded(tmp_path, honest_records(pairs=4), state="failed")
    status(directory, capsys)
    assert "has no record of" not in (directory / "verdict.json").read_text()


def test_an_arm_that_sets_offload_prompt_only_is_planned_with_a_word(tmp_path):
    mine = tmp_path / "mine.yml"
    mine.write_text(
        'schema_version: "1.0"\nname: mine\nextends: offload_return\narms:\n  offload:\n    args:\n'
        "      kv-transfer-config: {kv_connector_extra_config: {offload_prompt_only: true}}\n"
    )
    said = " ".join(prepared(tmp_path, protocol=str(mine))["announcement"])
    assert "h1, arm offload: warning: offload_prompt_only is set by the protocol" in said
    assert "arm control: warning: offload_prompt_only" not in said


def test_the_least_effect_is_said_to_be_against_no_difference(tmp_path):
    said = " ".join(prepared(tmp_path)["announcement"])
    assert "that is against no difference" in said
    assert "BETTER also needs the whole interval beyond the margin of 5 %" in said


def test_collect_takes_whole_runs_once_and_refuses_a_broken_archive(tmp_path):
    directory = prepared(tmp_path)["directory"]
    source = tmp_path / "source"
    records = [msgspec.structs.replace(r, run=f"p01-{i}-{r.arm}") for i, r in enumerate(honest_records()[:2], 1)]
    for record in records:
        write_run(source / record.run, record)
    archive = tmp_path / "a.tar"
    with tarfile.open(archive, "w") as tar:
        for record in records:
            tar.add(source / record.run, arcname=record.run)
    taken = campaign.collect(directory, "h1", str(archive), {"state": "running"})
    assert sorted(taken["added"]) == sorted(record.run for record in records)
    assert campaign.collect(directory, "h1", str(archive), {"state": "running"})["added"] == []
    archive.write_bytes(b"no tar at all")
    with pytest.raises(UnusableInput, match="h1"):
        campaign.collect(directory, "h1", str(archive), None)


def test_reproduce_says_how_and_refuses_what_is_no_record(tmp_path, capsys):
    directory = concluded(tmp_path, honest_records())
    run = next(directory.glob("runs/h1/*"))
    assert main(["reproduce", str(run)]) == 0
    said = capsys.readouterr().out
    assert "kvtrial_seed=1" in said
    assert "kvtrial_pairs=6" in said
    assert "serve" in said
    assert said.count(".venv/bin/ansible-playbook") == 1
    assert '"tier_bytes": 268435456' in said
    assert '"kvtrial_arms": ["offload"]' in said
    assert "# not in this command: the inventory: add the -i" in said
    for wrong in (tmp_path, directory / "campaign.json"):
        assert main(["reproduce", str(wrong)]) == 2
        assert "no record" in capsys.readouterr().err


def printed_command(directory, capsys) -> tuple[list[str], str]:
    """The values of -e in the command that reproduce prints, and all it said."""
    assert main(["reproduce", str(next(directory.glob("runs/h1/*")))]) == 0
    said = capsys.readouterr().out
    words = shlex.split(next(line for line in said.splitlines() if line.startswith(".venv")))
    return [word for flag, word in pairwise(words) if flag == "-e"], said


def test_the_command_of_reproduce_makes_the_same_plan_from_a_bare_inventory(tmp_path, capsys):
    mine = tmp_path / "mine.yml"
    mine.write_text('schema_version: "1.0"\nname: my_own\nextends: offload_return\ntitle: t\nquestion: q?\n')
    asked = {"engine_args": {"max-num-seqs": 3}, "engine_env": {"A": "b"}, "vllm_version": "0.31.0",
             "connector_extra_config": {"eviction_policy": "arc"}, "limits": {"deadline_seconds": 9000},
             "client_cpus": "none"}  # fmt: skip
    made = prepared(tmp_path, protocol=str(mine), seed=7, pairs=6, **asked)
    directory = Path(made["directory"])
    for record in as_planned(directory, honest_records()):
        write_run(directory / "runs" / "h1" / record.run, record)
    extra, said = printed_command(directory, capsys)
    given: dict[str, object] = {}
    for word in extra:
        given |= json.loads(word) if word.startswith("{") else dict([word.split("=", 1)])
    top = {"protocol": given.pop("protocol"), "seed": int(given.pop("kvtrial_seed")),
           "pairs": int(given.pop("kvtrial_pairs")), "arms": given.pop("kvtrial_arms")}  # fmt: skip
    assert given.pop("kvtrial_new_campaign") == "true"
    assert given.pop("kvtrial_hosts") == "h1"
    bare = {**request()["hosts"]["h1"], **{name.removeprefix("kvtrial_"): value for name, value in given.items()}}
    again = {**request(hosts={"h1": bare}, **top), "results_dir": str(tmp_path / "again")}
    assert campaign.prepare(again)["plan_sha256"] == made["plan_sha256"]
    assert "the project's commit is not kept" in said
    mine.unlink()
    assert f"# not in this command: the protocol's file {mine}" in printed_command(directory, capsys)[1]


def test_reproduce_says_the_commit_and_what_its_command_cannot_carry(tmp_path, capsys):
    hosts = {"h1": request()["hosts"]["h1"], "h2": request(engine_env={"A": "b"})["hosts"]["h1"]}
    asked = {**request(hosts=hosts), "results_dir": str(tmp_path), "project": {"commit": "c" * 40, "dirty": True}}
    directory = Path(campaign.prepare(asked)["directory"])
    for record in as_planned(directory, honest_records()):
        write_run(directory / "runs" / "h1" / record.run, record)
    extra, said = printed_command(directory, capsys)
    assert f"commit {'c' * 40}, with changes that were not committed" in said
    assert "# not in this command: what hosts differ in (kvtrial_engine_env)" in said
    settings = json.loads(next(word for word in extra if word.startswith("{")))
    assert "kvtrial_engine_args" in settings
    assert "kvtrial_engine_env" not in settings
    assert settings["kvtrial_hosts"] == "h1,h2"
    path = directory / "campaign.json"
    old = {name: value for name, value in json.loads(path.read_text()).items() if name != "asked"}
    path.write_text(json.dumps(old))
    assert "this campaign was made before they were kept" in printed_command(directory, capsys)[1]
    path.unlink()
    assert "campaign.json is not beside" in printed_command(directory, capsys)[1]


def test_paths_of_a_host_are_no_part_of_a_command_for_another(tmp_path, capsys):
    env = {"CUDA_CACHE_PATH": "/opt/there/cache", "NCCL_NVLS_ENABLE": "0"}
    extra, said = printed_command(concluded(tmp_path, honest_records(), engine_env=env), capsys)
    settings = json.loads(next(word for word in extra if word.startswith("{")))
    assert settings["kvtrial_engine_env"] == {"NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "2"}
    assert "# not in this command: paths on the host in kvtrial_engine_env (CUDA_CACHE_PATH)" in said


def test_a_page_links_the_records_and_names_them_as_they_lie_there(tmp_path):
    directory = concluded(tmp_path, honest_records())
    packed, *_ = sorted(directory.glob("runs/h1/*"))
    content = (packed / "record.json").read_bytes()
    (packed / "record.json.zst").write_bytes(zstandard.compress(content))
    (packed / "record.json").unlink()
    campaign.write_outputs(directory)
    links = re.findall(r'href="\./(runs/[^"]*)"', (directory / "report.html").read_text())
    assert len(links) == 12
    assert all((directory / link).is_file() for link in links)
    assert f"runs/h1/{packed.name}/record.json.zst" in links


def test_check_refuses_and_passes_by_exit_status(tmp_path, capsys):
    good = {"host": {}, "vllm": {"version": "0.32.0", "backend": "cpu"},
            "arms": {"control": {"args": ["m", "--port", "1"], "env": {}},
                     "offload": {"args": ["m", "--port", "1"], "env": {}}}}  # fmt: skip
    path = tmp_path / "launch.yml"
    path.write_text(json.dumps(good))
    assert main(["check", str(path)]) == 0
    bad = json.loads(json.dumps(good))
    bad["arms"]["offload"]["args"] += ["--no-such-thing", "--kv-transfer-config", '{"kv_connector": "Offload"}']
    path.write_text(json.dumps(bad))
    capsys.readouterr()
    assert main(["check", str(path), "--json"]) == 4
    printed = json.loads(capsys.readouterr().out)
    assert printed["verdict"] == "INVALID"
    assert {"class", "severity", "reason", "numbers", "do"} <= set(printed["findings"][0])
    path.write_text("[]")
    assert main(["check", str(path)]) == 2
    path.write_bytes(b"host: \xff\xfe")
    assert main(["check", str(path)]) == 2
    assert "not UTF-8" in capsys.readouterr().err
    assert main(["check", str(tmp_path / "none.yml")]) == 2


def test_a_launch_file_with_wrong_types_is_a_sentence(tmp_path, capsys):
    path = tmp_path / "launch.yml"
    wrong = {"{a: {args: [m]}, b: 3}": "Arm b: 3 is not", "[]": "has arms: [], which is no mapping"}
    for arms, said in wrong.items():
        path.write_text(f"host: {{}}\nvllm: {{version: 0.32.0}}\narms: {arms}\n")
        assert main(["check", str(path)]) == 2
        assert said in capsys.readouterr().err


def test_a_fault_of_kvtrial_is_a_sentence_and_its_traceback_is_shown_when_asked_for(tmp_path, capsys, monkeypatch):
    def faulty(*_):
        raise ZeroDivisionError("by\nnothing")

    monkeypatch.setattr("kvtrial.analysis.answerschemas.json_schema", faulty)
    assert main(["schema", "record"]) == 2
    said = capsys.readouterr().err
    assert "kvtrial schema failed by a fault in kvtrial" in said
    assert "(ZeroDivisionError: by nothing)" in said
    assert "KVTRIAL_TRACEBACK=1" in said
    assert said.count("\n") == 1
    monkeypatch.setenv("KVTRIAL_TRACEBACK", "1")
    assert main(["schema", "record"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_hazards_and_schemas_print(capsys):
    assert main(["hazards", "--vllm", "0.26.0"]) == 0
    assert "#49674" in capsys.readouterr().out
    assert main(["hazards", "--vllm", "old"]) == 2
    assert "0.32.0" in capsys.readouterr().err
    assert main(["hazards", "--vllm", "99.0"]) == 0
    assert "vLLM 99.0 is newer than 0.33" in capsys.readouterr().out
    assert main(["hazards", "--vllm", "99.0", "--json"]) == 0
    printed = capsys.readouterr()
    json.loads(printed.out)
    assert "vLLM 99.0 is newer than 0.33" in printed.err
    assert main(["schema", "record"]) == 0
    assert json.loads(capsys.readouterr().out)["title"].startswith("kvtrial record")
