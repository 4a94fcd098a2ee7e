"""Following host programs: the pauses, and whole sweeps over two made-up hosts with a stand-in for the host program."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ansible_collections.kvtrial.vllm.plugins.action.sweep_pause import LONGEST_SECONDS, pause_seconds
from ansible_collections.kvtrial.vllm.plugins.filter.sweep_pauses import sweep_pauses
from ansible_collections.kvtrial.vllm.plugins.module_utils import host_lock
from hypothesis import given
from hypothesis import strategies as st

PLAYBOOK = """
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.import_role: {name: kvtrial.vllm.trial}
    - ansible.builtin.import_role: {name: kvtrial.vllm.trial, tasks_from: follow}
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.debug: {msg: ["{{ inventory_hostname }} is let go"]}
"""

# A stand-in for kvtrial-host: each start works in the background until it was swept over twice. On a host whose state
# directory holds "dies", the first start is ended from outside, as it were: its process is gone and the progress file
# says running.
HOST_PROGRAM = """#!{python}
import json, os, pathlib, subprocess, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--directory") + 1])
def tell(state, pid, done):
    ticks = open(f"/proc/{{pid}}/stat").read().rsplit(")", 1)[1].split()[19]
    value = dict(state=state, pid=pid, pid_start_ticks=int(ticks), pair=1, pairs=2, arm="control", phase="return",
                 runs_done=done, runs_planned=4, seconds_to_go=8, reason="stand-in")
    (folder / "progress.tmp").write_text(json.dumps(value))
    os.replace(folder / "progress.tmp", folder / "progress.json")
def beat():
    path = folder / "heartbeat"
    return path.read_text() if path.exists() else None
if sys.argv[1] == "work":
    before = beat()
    tell("running", os.getpid(), 1)
    (folder / "up").touch()
    if (folder.parents[1] / "dies").exists() and len((folder / "starts").read_text()) == 1:
        sys.exit(1)
    # Two more sweeps: the first is sure to see it run.
    beats = set()
    while len(beats - {{None}}) < 3 - (before is None):
        beats.add(beat())
        time.sleep(0.02)
    tell("finished", os.getpid(), 4)
elif sys.argv[1] == "stop":
    (folder / "stopped").touch()
    print(json.dumps({{"message": "stand-in"}}))
else:
    with open(folder / "starts", "a") as file:
        file.write("x")
    (folder / "up").unlink(missing_ok=True)
    subprocess.Popen([sys.executable, __file__, "work", *sys.argv[2:]], start_new_session=True,
                     stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (folder / "up").exists():
        time.sleep(0.02)
    print(json.dumps({{"state": "running"}}))
"""


@given(st.floats(0, 2e5), st.integers(1, 30), st.integers(30, 300))
def test_pauses_cover_the_time_and_never_shrink(seconds, first, longest):
    pauses = sweep_pauses(seconds, first, longest)
    assert sum(pauses) >= seconds
    assert sum(pauses[:-1]) < seconds or not pauses
    assert pauses == sorted(pauses)
    assert all(first <= pause <= longest for pause in pauses)


def test_a_long_campaign_takes_few_sweeps():
    assert len(sweep_pauses(600)) == 60
    assert len(sweep_pauses(12 * 3600)) < 850


def test_connections_outlive_the_longest_pause_and_a_sweep_over_a_thousand_hosts():
    config = (Path(__file__).parents[2] / "ansible.cfg").read_text()
    assert int(re.search(r"^ssh_args = .*ControlPersist=(\d+)s", config, re.MULTILINE)[1]) > LONGEST_SECONDS + 10 * 20


@pytest.mark.parametrize(("first", "longest"), [(0, 5), (10, 5)])
def test_impossible_pauses_are_refused(first, longest):
    with pytest.raises(ValueError, match="first must be at least 1"):
        sweep_pauses(100, first, longest)


@pytest.mark.parametrize("value", [-1, 301, "soon", None])
def test_a_pause_is_bounded(value):
    with pytest.raises(ValueError, match="from 0 to 300"):
        pause_seconds(value)


@pytest.mark.parametrize(("hosts", "pause", "visited"), [(1, 60, 60), (99, 300, 300), (1000, 300, 500)])
def test_the_planner_is_told_how_often_a_controller_comes_by(tmp_path, tools, hosts, pause, visited):
    (tmp_path / "group_vars" / "all").mkdir(parents=True)
    (tmp_path / "group_vars" / "all" / "00-pins.yml").symlink_to(tools.root / "group_vars" / "all" / "pins.yml")
    (tmp_path / "hosts.ini").write_text("".join(f"h{n}\n" for n in range(hosts)))
    done = tools.run("ansible", "h0", "-i", str(tmp_path), "-c", "local", "-m", "ansible.builtin.debug",
                     "-a", "var=kvtrial_host_inputs.visited_every_seconds",
                     "-e", f"kvtrial_sweep_longest_seconds={pause} kvtrial_root=/ playbook_dir=/",
                     ANSIBLE_STDOUT_CALLBACK="ansible.builtin.minimal")  # fmt: skip
    assert re.search(rf"visited_every_seconds\W+{visited}\b", done.stdout), done.stdout + done.stderr


@pytest.fixture
def fleet(tmp_path: Path):
    """Two hosts on this machine, each with a state directory and a plan of its own."""
    program = tmp_path / "kvtrial-host"
    program.write_text(HOST_PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    (tmp_path / "play.yml").write_text(PLAYBOOK)
    hosts = {}
    for name in ("h1", "h2"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"limits": {"deadline_seconds": 60}}))
        (tmp_path / name).mkdir()
        hosts[name] = {
            "trial_plan": str(tmp_path / f"{name}.json"),
            "trial_state_dir": str(tmp_path / name),
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
        }
    shared = {
        "trial_campaign": "c1",
        "trial_executable": str(program),
        "trial_host_programs": [],
        "trial_account": "",
        "trial_may_be_disturbed": True,
        "trial_sweep_first_seconds": 1,
        "trial_fetch": False,
    }
    (tmp_path / "hosts.json").write_text(json.dumps({"all": {"hosts": hosts, "vars": shared}}))
    return tmp_path


def test_hosts_are_followed_to_their_end_and_a_killed_program_is_started_again(fleet: Path, tools):
    (fleet / "h2" / "dies").touch()
    done = tools.run("ansible-playbook", "-i", str(fleet / "hosts.json"), str(fleet / "play.yml"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "h1  pair 1/2  control  return  1/4 runs  about 10 s to go" in done.stdout
    assert "h2  the host program was ended from outside  1/4 runs" in done.stdout
    for host, starts in (("h1", "x"), ("h2", "xx")):
        assert f"{host}  finished  4/4 runs" in done.stdout
        assert f"{host} is let go" in done.stdout
        folder = fleet / host / "campaigns" / "c1"
        assert (folder / "starts").read_text() == starts
        assert (folder / "consent").read_text().endswith(" before the next run.\n")
        assert (folder / "campaign").read_text() == "c1\n"
        assert float((folder / "heartbeat").read_text()) > 0
    # Each state is shown once, and sweeps leave no other trace.
    assert len(re.findall(r"^h1  \S", done.stdout, re.MULTILINE)) == 2
    assert "Ask the host program" not in done.stdout
    assert "included:" not in done.stdout


def test_a_host_that_changed_meanwhile_has_no_program_started_again(fleet: Path, tools):
    """It was rebooted into another kernel, say; what it was when it was made ready is planted."""
    (fleet / "h2" / "dies").touch()
    (fleet / "manifest.json").write_text('{"revision": "m"}')
    (fleet / "venv" / "bin").mkdir(parents=True)
    (fleet / "venv" / "bin" / "python").symlink_to(sys.executable)
    told = {
        "vllm_existing_venv": str(fleet / "venv"),
        "engine_inputs": {"model": {"revision": "m", "manifest": str(fleet / "manifest.json")}},
        "preflight_likeness": {"kernel": "5.9"},
    }
    done = tools.run(
        "ansible-playbook", "-i", str(fleet / "hosts.json"), str(fleet / "play.yml"), "-e", json.dumps(told)
    )
    assert done.returncode != 0
    assert "h2 is no longer as it was made ready: kernel is " in done.stdout, done.stdout
    assert (fleet / "h2" / "campaigns" / "c1" / "starts").read_text() == "x"
    assert "h1  finished  4/4 runs" in done.stdout


def test_a_program_is_not_started_again_while_a_provision_has_the_host(fleet: Path, tools):
    if os.geteuid() or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("a mount namespace, which gives the host's lock a place of its own, takes root")
    (fleet / "h2" / "dies").touch()
    lock = fleet / "run" / "kvtrial" / "provision.lock"
    host_lock.take(str(lock), {"owner": "elsewhere/x/y:1:1", "by": "ann on elsewhere (pid 1)", "since": 0})
    command = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /run && exec "$@"', str(fleet / "run")]
    command += [tools.path("ansible-playbook"), "-i", str(fleet / "hosts.json"), str(fleet / "play.yml")]
    starts = fleet / "h2" / "campaigns" / "c1" / "starts"
    with (fleet / "said").open("w") as said:
        running = subprocess.Popen(command, stdout=said, stderr=said, cwd=tools.root, env=tools.environment())
        try:
            until = time.monotonic() + 200
            while "h2: the host program ended, and is not started again yet. " not in (fleet / "said").read_text():
                assert time.monotonic() < until and running.poll() is None, (fleet / "said").read_text()
                time.sleep(0.1)
            assert starts.read_text() == "x"
            lock.unlink()
            assert running.wait(200) == 0, (fleet / "said").read_text()
        finally:
            running.kill()
            running.wait()
    assert "Another provision, by ann on elsewhere (pid 1), has held this host for" in (fleet / "said").read_text()
    assert starts.read_text() == "xx" and "h2  finished  4/4 runs" in (fleet / "said").read_text()


def test_a_program_that_is_started_again_does_not_find_the_word_of_a_visit_of_hours_ago(fleet: Path, tools):
    for host in ("h1", "h2"):
        folder = fleet / host / "campaigns" / "c1"
        folder.mkdir(parents=True)
        (folder / "heartbeat").write_text("-40000.0\n")
    program = (fleet / "kvtrial-host").read_text()
    noted = program.replace('"starts", "a") as file:', '"starts", "a") as file, open(folder / "found", "w") as found:'
                            "\n        found.write(beat())")  # fmt: skip
    assert noted != program
    (fleet / "kvtrial-host").write_text(noted)
    done = tools.run("ansible-playbook", "-i", str(fleet / "hosts.json"), str(fleet / "play.yml"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert float((fleet / "h1" / "campaigns" / "c1" / "found").read_text()) > 0


def test_a_host_where_another_campaign_runs_is_refused(fleet: Path, tools):
    running = json.dumps({"trial_host_programs": [{"campaign": "c0", "directory": "x", "pid": 1}]})
    done = tools.run("ansible-playbook", "-i", str(fleet / "hosts.json"), str(fleet / "play.yml"), "-e", running)
    assert done.returncode != 0
    last = done.stdout.strip().splitlines()[-1]
    assert re.match("h[12]: campaign c0 still runs here;", last)
    assert not (fleet / "h1" / "campaigns").exists()


STOP = """
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.import_role: {name: kvtrial.vllm.trial, tasks_from: stop}
"""


@pytest.fixture
def stopped(fleet: Path):
    """One host with a campaign's folder and an installed stand-in, and a playbook that stops it."""
    (fleet / "stop.yml").write_text(STOP)
    folder = fleet / "h1" / "campaigns" / "c1"
    folder.mkdir(parents=True)
    (folder / "consent").touch()
    (folder / "plan.json").write_text(json.dumps({"schema_version": "1.0", "limits": {"stop_timeout_seconds": 5}}))
    venv = fleet / "h1" / "venvs" / "workload-0123456789ab"
    bin_folder = venv / "bin"
    bin_folder.mkdir(parents=True)
    (venv / "kvtrial-installed.json").write_text(json.dumps({"lock_sha256": "0"}))
    (fleet / "kvtrial-host").rename(bin_folder / "kvtrial-host")
    return fleet


def test_stopping_withdraws_consent_and_ends_what_runs(stopped: Path, tools):
    done = tools.run("ansible-playbook", "-i", str(stopped / "hosts.json"), str(stopped / "stop.yml"))
    assert done.returncode == 0, done.stdout
    folder = stopped / "h1" / "campaigns" / "c1"
    assert (folder / "stopped").exists()
    assert not (folder / "consent").exists()
    assert (stopped / "h1" / "venvs").exists()


def test_purging_removes_what_is_ours_and_nothing_else(stopped: Path, tools):
    (stopped / "h1" / "somebody_elses").touch()
    command = [
        "ansible-playbook",
        "-i",
        str(stopped / "hosts.json"),
        str(stopped / "stop.yml"),
        "-e",
        "trial_purge=true",
    ]
    done = tools.run(*command)
    assert done.returncode == 0, done.stdout
    assert [path.name for path in (stopped / "h1").iterdir()] == ["somebody_elses"]
    assert not (stopped / "h2").exists()
    again = tools.run(*command)
    assert again.returncode == 0, again.stdout
    assert "changed=0" in again.stdout


FOLLOW = """
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.import_role: {name: kvtrial.vllm.trial, tasks_from: follow}
"""
DEAF = """#!/bin/sh
echo x >> "$(dirname "$0")/attempts"
sleep 3
exit 255
"""


def test_a_host_is_given_up_by_the_clock_and_an_attempt_takes_its_time_too(fleet: Path, tools):
    """Four seconds a sweep, one of them the pause: by the pauses alone it would be given up at the sixth or later."""
    (fleet / "follow.yml").write_text(FOLLOW)
    (fleet / "deaf").write_text(DEAF)
    (fleet / "deaf").chmod(0o755)
    given = {"ansible_connection": "ssh", "ansible_ssh_executable": str(fleet / "deaf"), "trial_lost_after_seconds": 6,
             "trial_silent_since": 1.0}  # fmt: skip
    inventory = json.loads((fleet / "hosts.json").read_text())
    inventory["all"]["hosts"]["h2"] |= given
    (fleet / "hosts.json").write_text(json.dumps(inventory))
    done = tools.run("ansible-playbook", "-i", str(fleet / "hosts.json"), str(fleet / "follow.yml"), "--limit", "h2")
    assert done.returncode != 0
    silent = re.search(r"h2: out of reach for (\d+) s \(kvtrial_lost_after_seconds=6\)", done.stdout)
    assert silent and int(silent[1]) >= 6, done.stdout
    assert (fleet / "attempts").read_text().count("x") < 6
