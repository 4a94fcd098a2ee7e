"""How a controller understands a host program's progress file."""

import json

import pytest
from ansible_collections.kvtrial.vllm.plugins.module_utils import program_state

RUNNING = {"state": "running", "pid": 10, "pid_start_ticks": 500}


def test_a_running_program_whose_process_lives_goes_on(proc):
    proc(10, ticks=500)
    assert program_state.describe(RUNNING, proc.root) == {
        "state": "running", "alive": True, "over": False, "died": False, "progress": RUNNING,
    }  # fmt: skip


@pytest.mark.parametrize("fault", [{"ticks": 501}, {"ticks": 500, "state": "Z"}, None])
def test_a_running_program_without_its_process_died(proc, fault):
    if fault:
        proc(10, **fault)
    assert program_state.describe(RUNNING, proc.root)["died"]


def test_a_program_from_before_a_reboot_died(proc, tmp_path):
    proc(10, ticks=500)
    folder = tmp_path / "proc" / "sys" / "kernel" / "random"
    folder.mkdir(parents=True)
    (folder / "boot_id").write_text("now\n")
    assert program_state.describe({**RUNNING, "boot_id": "now"}, proc.root)["alive"]
    assert program_state.describe({**RUNNING, "boot_id": "before"}, proc.root)["died"]


@pytest.mark.parametrize("state", ["finished", "stopped", "failed"])
def test_a_program_that_ended_by_itself_did_not_die(proc, state):
    described = program_state.describe({**RUNNING, "state": state}, proc.root)
    assert described["over"]
    assert not described["died"]


def test_no_progress_file_means_absent(tmp_path, proc):
    assert program_state.read_progress(str(tmp_path)) == {}
    assert program_state.describe({}, proc.root)["state"] == "absent"


@pytest.mark.parametrize("content", ["", "{", "[1]", '"text"'])
def test_a_damaged_progress_file_is_as_good_as_none(tmp_path, content):
    (tmp_path / "progress.json").write_text(content)
    assert program_state.read_progress(str(tmp_path)) == {}


def test_a_reply_stays_small_whatever_the_file_holds(tmp_path):
    value = {"state": "running", "message": "x" * 50000, "unknown": "y"}
    (tmp_path / "progress.json").write_text(json.dumps(value))
    progress = program_state.read_progress(str(tmp_path))
    assert set(progress) == {"state", "message"}
    assert len(progress["message"]) == program_state.TEXT_CHARACTERS


def test_running_programs_are_found_by_their_live_process(tmp_path, proc):
    proc(10, ticks=500)
    for name, pid in (("a", 10), ("b", 11)):
        folder = tmp_path / "campaigns" / name
        folder.mkdir(parents=True)
        (folder / "progress.json").write_text(json.dumps({**RUNNING, "pid": pid}))
    found = program_state.running_programs(str(tmp_path), proc.root)
    assert [item["campaign"] for item in found] == ["a"]


def test_the_heartbeat_is_the_hosts_monotonic_time(tmp_path):
    program_state.touch_heartbeat(str(tmp_path))
    first = float((tmp_path / "heartbeat").read_text())
    program_state.touch_heartbeat(str(tmp_path))
    assert float((tmp_path / "heartbeat").read_text()) >= first
