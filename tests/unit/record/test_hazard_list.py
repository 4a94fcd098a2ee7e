"""`kvtrial hazards`: of a version, and of launches in it."""

import json

import pytest
import yaml
from kvtrial.analysis.cli import main

OFFLOAD = ["Qwen/Qwen3-0.6B", "--host", "127.0.0.1", "--kv-offloading-size", "8"]
LAUNCH = {
    "host": {},
    "vllm": {"version": "0.26.0"},
    "arms": {"control": {"args": ["Qwen/Qwen3-0.6B", "--host", "127.0.0.1"]}, "offload": {"args": OFFLOAD}},
}


def said(capsys, tmp_path, config, *arguments):
    (tmp_path / "launch.yml").write_text(yaml.safe_dump(config))
    status = main(["hazards", "--config", str(tmp_path / "launch.yml"), *arguments])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_only_what_the_launches_meet_is_listed_with_what_avoids_it(capsys, tmp_path):
    status, out, _ = said(capsys, tmp_path, LAUNCH)
    lines = {line.split()[1].rstrip(":"): line for line in out.splitlines()}
    assert status == 0
    assert lines["preemption-cascade"].startswith("guard")
    assert "Set --no-async-scheduling in all arms" in lines["preemption-cascade"]
    assert "(offload)" in lines["abort-assert"] and "#49118" in lines["abort-assert"]
    assert "nested-stale-kv" not in lines
    assert out.splitlines()[-1].endswith("1 of them forbids a trial.")


def test_a_guard_in_every_launch_is_told_and_an_upgrade_can_be_looked_at(capsys, tmp_path):
    arms = {name: {"args": [*arm["args"], "--no-async-scheduling"]} for name, arm in LAUNCH["arms"].items()}
    _, out, _ = said(capsys, tmp_path, {**LAUNCH, "arms": arms})
    assert [line for line in out.splitlines() if line.startswith("ok     preemption-cascade")]
    assert "none of them forbid a trial" in out
    _, out, _ = said(capsys, tmp_path, LAUNCH, "--vllm", "0.32.0")
    assert "preemption-cascade" not in out and "vLLM 0.32.0: " in out


def test_a_single_launch_is_a_file_too_and_json_is_the_hits(capsys, tmp_path):
    status, out, _ = said(capsys, tmp_path, {"args": OFFLOAD, "env": {}}, "--vllm", "0.21.0", "--json")
    hits = {hit["hazard"]["id"]: hit for hit in json.loads(out)}
    assert status == 0
    assert hits["reset-external-no-op"]["action"] == "block"
    assert hits["reset-external-no-op"]["applies_to_arms"] == ["server"]


def test_a_models_groups_are_asked_of_the_file(capsys, tmp_path):
    _, out, _ = said(capsys, tmp_path, {**LAUNCH, "model": {"kv_cache_groups": 9}})
    assert "tier-divided-by-groups" in out
    _, out, _ = said(capsys, tmp_path, LAUNCH)
    assert "tier-divided-by-groups" not in out


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"vllm": {}}, "holds no launches"),
        ({"args": OFFLOAD}, "names no vllm.version"),
        ({**LAUNCH, "arms": {"a": 1}}, "Arm a: 1 is not a mapping"),
        ({**LAUNCH, "vllm": {"version": "new"}}, "'new' is not of the form 0.32.0"),
        ([1], "must hold a mapping"),
    ],
)
def test_what_is_no_launch_is_refused_in_a_sentence(config, sentence, capsys, tmp_path):
    status, _, err = said(capsys, tmp_path, config)
    assert (status, sentence in err) == (2, True), err


def test_without_version_and_file_it_says_what_to_give(capsys):
    assert main(["hazards"]) == 2
    assert "give --vllm 0.32.0" in capsys.readouterr().err
