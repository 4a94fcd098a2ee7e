"""The program may be killed at any point: finished runs are kept, the rest is done, nothing is left over."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from kvtrial.host.processes import is_alive

MOMENTS = [
    lambda p: p.runs_done == 0 and (p.phase or "").startswith("engine starting"),
    lambda p: p.runs_done == 3 and p.phase == "return",
    lambda p: p.runs_done == 6 and p.phase == "stopping the engine",
]


@pytest.mark.usefixtures("nothing_left")
def test_killed_three_times_the_same_command_ends_with_the_same_kind_of_verdict(trial):
    trial = trial(faults="slow_start:0.6", slowdown=2)
    kept: dict[str, float] = {}
    for moment in MOMENTS:
        trial.command("start")
        progress = trial.wait(moment)
        os.kill(progress.pid, signal.SIGKILL)
        for run, record in trial.folder.finished_runs().items():
            assert kept.setdefault(run, record.times.ended_monotonic_seconds) == record.times.ended_monotonic_seconds
    trial.command("start")
    trial.wait(lambda p: p.state == "finished", 200)
    records = trial.records()
    assert len(records) == 12
    assert max(record.attempt for record in records) == 4
    verdict = trial.verdict()
    failed = [gate.gate for gate in verdict.hosts[0].gates if gate.passed is not True]
    # What else ran here meanwhile may fail the gate that watches for it; nothing else may.
    assert verdict.verdict == "BETTER" or failed == ["undisturbed"], verdict.reason
    assert verdict.evidence == "standin"


@pytest.mark.usefixtures("nothing_left")
def test_a_killed_program_takes_its_engine_with_it_at_once(trial):
    trial = trial(runs=2)
    trial.command("start")
    progress = trial.wait(lambda p: p.phase == "populate")
    engine = json.loads((trial.folder.partial / "engine.json").read_text())
    os.kill(progress.pid, signal.SIGKILL)
    until = time.monotonic() + 5
    while is_alive(engine["pid"], engine["start_ticks"]) and time.monotonic() < until:
        time.sleep(0.02)
    assert not is_alive(engine["pid"], engine["start_ticks"])


@pytest.mark.usefixtures("nothing_left")
def test_what_a_power_cut_left_half_written_is_not_kept(trial):
    """Program, keeper and engine are gone at once, within a phase; the results of the run were being written."""
    trial = trial(runs=2, slowdown=2)
    trial.command("start")
    progress = trial.wait(lambda p: p.phase == "populate")
    for pid in (progress.pid, *(int(word) for word in keepers(trial.folder.partial))):
        os.kill(pid, signal.SIGKILL)
    assert list(trial.folder.partial.glob(".*.tmp")) != []
    (trial.folder.directory / ".progress.json.1.tmp").touch()
    trial.command("start")
    trial.wait(lambda p: p.state == "finished", 200)
    assert len(list(trial.folder.interrupted.iterdir())) == 1
    assert list(trial.folder.directory.rglob(".*.tmp")) == []


def keepers(partial):
    """Process ids of the keepers of a run."""
    return subprocess.run(["pgrep", "-f", f"kvtrial.host.keeper {partial}"], capture_output=True, text=True,
                          check=False).stdout.split()  # fmt: skip


@pytest.mark.usefixtures("nothing_left")
def test_a_killed_keeper_is_a_fault_of_the_environment_and_its_pair_is_repeated(trial):
    trial = trial(pairs=2)
    trial.command("start")
    trial.wait(lambda p: p.runs_done == 1 and p.phase == "populate")
    subprocess.run(["pkill", "-9", "-f", f"kvtrial.host.keeper {trial.folder.partial}"], check=True)
    trial.wait(lambda p: p.state == "finished")
    runs = trial.folder.finished_runs()
    cut = next(record for record in runs.values() if record.outcome != "completed")
    assert cut.fault.fault == "keeper_killed"
    assert cut.outcome == "environment_fault"
    assert {record.pair for record in runs.values() if record.spare} == {3}
    assert trial.verdict().hosts[0].runs.dropped == 2


@pytest.mark.usefixtures("nothing_left")
def test_program_and_keeper_killed_together_the_next_start_ends_what_is_left(trial):
    trial = trial(runs=2)
    trial.command("start")
    progress = trial.wait(lambda p: p.phase == "populate")
    subprocess.run(["pkill", "-9", "-f", f"kvtrial.host.keeper {trial.folder.partial}"], check=True)
    os.kill(progress.pid, signal.SIGKILL)
    trial.command("start")
    trial.wait(lambda p: p.state == "finished")
    assert len(trial.records()) == 2


@pytest.mark.usefixtures("nothing_left")
def test_stop_ends_the_engine_and_keeps_finished_runs(trial):
    trial = trial(pairs=2)
    trial.command("start")
    trial.wait(lambda p: p.runs_done == 1 and p.phase == "populate")
    trial.command("stop")
    progress = trial.folder.read_progress()
    assert progress.state == "stopped"
    assert "SIGTERM" in progress.reason
    assert len(trial.records()) == 1


def test_two_terminals_that_start_at_once_share_one_program(trial):
    trial = trial(runs=2)
    arguments = [sys.executable, "-m", "kvtrial.host.program", "start", "--directory", str(trial.folder.directory)]
    both = [subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], answers
    assert len({json.loads(out)["pid"] for out, _ in answers}) == 1
    trial.command("stop")


def test_start_twice_is_one_program(trial):
    trial = trial(runs=2)
    first = json.loads(trial.command("start").stdout)
    second = json.loads(trial.command("start").stdout)
    assert first["pid"] == second["pid"]
    refused = trial.command("run", check=False)
    assert refused.returncode == 2
    assert "works in" in refused.stderr
    assert "Traceback" not in refused.stderr
    trial.command("stop")


@pytest.mark.usefixtures("nothing_left")
def test_a_truncated_record_is_not_taken_for_a_finished_run_and_the_run_is_done_again(trial):
    trial = trial(runs=1)
    trial.run()
    path = trial.folder.runs / trial.host_plan.runs[0].run / "record.json"
    path.write_bytes(path.read_bytes()[:-100])
    assert trial.folder.finished_runs() == {}
    (path.parent / "record.sha256").write_text("")
    assert trial.folder.finished_runs() == {}
    trial.run()
    assert len(trial.folder.finished_runs()) == 1
    assert len(list(trial.folder.interrupted.glob("*-damaged-*"))) == 1


@pytest.mark.usefixtures("nothing_left")
def test_what_an_abandoned_campaign_left_is_ended_by_the_next_campaign_on_the_host(trial, tmp_path):
    first = trial(runs=2)
    first.command("start")
    progress = first.wait(lambda p: p.phase == "populate")
    keeper = ["pkill", "-9", "-f", f"kvtrial.host.keeper {first.folder.partial}"]
    engine = json.loads((first.folder.partial / "engine.json").read_text())
    os.kill(engine["pid"], signal.SIGSTOP)  # it can't follow its keeper into death by itself
    os.kill(progress.pid, signal.SIGKILL)
    subprocess.run(keeper, check=True)
    second = trial(runs=1, folder="another")
    second.run()
    assert len(second.records()) == 1
    assert not is_alive(engine["pid"], engine["start_ticks"])
