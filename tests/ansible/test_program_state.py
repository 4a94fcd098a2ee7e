"""How a controller understands a host program's progress file."""

import json
import signal
import subprocess
import sys
import time

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
    # A reboot in good order stops it first. Who stopped it on a host that goes on meant it, and so did the program.
    stopped = {**RUNNING, "state": "stopped", "reason": "stopped by SIGTERM"}
    assert program_state.describe({**stopped, "boot_id": "before"}, proc.root)["died"]
    assert program_state.describe({**stopped, "boot_id": "now"}, proc.root)["over"]
    late = {**stopped, "boot_id": "before", "reason": "the deadline of 25 s passed before p02-1-control"}
    assert program_state.describe(late, proc.root)["over"]


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


def named(directory, name, **values):
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))


def test_what_a_campaign_runs_is_known_by_pid_and_start_time_and_nothing_else(proc, tmp_path):
    campaign = tmp_path / "campaigns" / "a"
    named(campaign, "progress.json", state="running", pid=10, pid_start_ticks=500)
    named(campaign, "runs/.partial/engine.json", pid=20, start_ticks=600)
    proc(10, ticks=500)
    proc(11, f"python -m kvtrial.host.keeper {campaign}/runs/.partial", parent=1)
    proc(12, f"python -m kvtrial.host.keeper {tmp_path}/campaigns/ab/runs/.partial", parent=1)
    proc(20, "vllm serve m", ticks=601)
    proc(21, "child", parent=20)
    proc(22, "child", parent=11)
    proc(30, f"less {campaign}/program.log")
    found = program_state.own_processes(str(campaign), proc.root)
    assert [(one["pid"], one["role"]) for one in found] == [(10, "program"), (11, "keeper"), (22, "child")]


def sleeper(ignoring):
    """A process that sleeps, and says so once its signals are set."""
    code = "import signal, time\n"
    code += "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if ignoring else ""
    process = subprocess.Popen(
        [sys.executable, "-c", code + "print(1, flush=True); time.sleep(600)"], stdout=subprocess.PIPE
    )
    process.stdout.readline()
    return process


@pytest.mark.parametrize("ignoring", [False, True])
def test_a_program_is_ended_and_a_neighbour_is_not(tmp_path, monkeypatch, ignoring):
    monkeypatch.setattr(program_state, "ENDING_SECONDS", 0.2)
    neighbour, program = sleeper(False), sleeper(ignoring)
    try:
        stat = program_state.processes.read_stat(program.pid)
        named(tmp_path, "progress.json", state="running", pid=program.pid, pid_start_ticks=stat["start_ticks"])
        named(tmp_path, "plan.json", limits={"stop_timeout_seconds": 0.1})
        assert program_state.end(str(tmp_path)) == []
        assert program.wait() == (-signal.SIGKILL if ignoring else -signal.SIGTERM)
        assert neighbour.poll() is None
    finally:
        for process in (neighbour, program):
            process.kill()
            process.wait()


def test_what_cannot_be_ended_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(program_state, "ENDING_SECONDS", 0.1)
    monkeypatch.setattr(program_state, "_send", lambda *_: None)
    clock = iter(range(0, 10000, 5))
    program = sleeper(False)
    try:
        monkeypatch.setattr(time, "sleep", lambda _: None)
        monkeypatch.setattr(time, "monotonic", lambda: next(clock))
        ticks = program_state.processes.read_stat(program.pid)["start_ticks"]
        named(tmp_path, "progress.json", state="running", pid=program.pid, pid_start_ticks=ticks)
        assert [one["pid"] for one in program_state.end(str(tmp_path))] == [program.pid]
    finally:
        program.kill()
        monkeypatch.undo()
        program.wait()
