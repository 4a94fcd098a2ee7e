"""A campaign on disk: prepared, resumed, taken in whole, concluded; and the exit status of `kvtrial analyze`."""

import json
import tarfile
from pathlib import Path

import msgspec
import pytest
from build import honest_records
from kvtrial.analysis import campaign
from kvtrial.analysis.cli import main
from kvtrial.record.errors import UnusableInput
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


def concluded(tmp_path, records, state="finished", **changes) -> Path:
    """A campaign with these records, fetched from a host whose program stands at `state`."""
    directory = Path(prepared(tmp_path, **changes)["directory"])
    for record in records:
        write_run(directory / "runs" / "h1" / record.run, record)
    campaign.collect(str(directory), "h1", None, {"state": state, "reason": "the disk is full"})
    return directory


def status(directory, capsys, *more) -> tuple[int, str, str]:
    code = main(["analyze", str(directory), *more])
    out = capsys.readouterr()
    assert "Traceback" not in out.out + out.err
    return code, out.out, out.err


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
    assert main(["reproduce", str(tmp_path)]) == 2
    assert "no record" in capsys.readouterr().err


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
    assert main(["check", str(tmp_path / "none.yml")]) == 2


def test_hazards_and_schemas_print(capsys):
    assert main(["hazards", "--vllm", "0.26.0"]) == 0
    assert "#49674" in capsys.readouterr().out
    assert main(["hazards", "--vllm", "old"]) == 2
    assert "0.32.0" in capsys.readouterr().err
    assert main(["schema", "record"]) == 0
    assert json.loads(capsys.readouterr().out)["title"].startswith("kvtrial record")
