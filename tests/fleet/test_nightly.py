"""Nights of the real timer and the real ansible-runner on a test host as controller, compressed in time.

h1 is the controller: a checkout, an environment and an inventory of its own, reaching h2 and h3 over SSH. The engine is
the stand-in. Between two real nights and the last lie stored ones, made of the first two's values; before the last the
engine is made a quarter slower, as an update would make it.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from campaigns import CAMPAIGNS, QUICK, left_on, wait_for
from playing import ROOT, Playbooks, bring_installed, furnish_standin, last_line, recap, standin_variables
from rig import STATE, USER, Host

pytestmark = [pytest.mark.full, pytest.mark.timeout(2400)]
SERVICE, TIMER = "kvtrial-nightly.service", "kvtrial-nightly.timer"
NIGHTS = "/var/lib/kvtrial-nightly"
VENV = "/srv/venv"
SCRIPTS = ("ansible-runner", "ansible-playbook", "ansible-inventory", "ansible")
STORE = "/srv/history"


def furnish_controller(host: Host, fleet_hosts: list[Host], variables: dict[str, object], known_hosts: Path) -> None:
    """Make a host a controller: the checkout in /srv/kvtrial, its commands, the fleet's inventory in /srv/fleet."""
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name) / "kvtrial"
        skipped = shutil.ignore_patterns(".git", ".venv", ".kvtrial", "results", "__pycache__", "tests", "*.pyc")
        shutil.copytree(ROOT, tree, symlinks=True, ignore=skipped)
        (tree / "tests" / "e2e").mkdir(parents=True)
        for protocol in ("standin_protocol.yml", "standin_noise.yml"):
            shutil.copy(ROOT / "tests" / "e2e" / protocol, tree / "tests" / "e2e")
        subprocess.run(["tar", "-C", name, "-cf", f"{name}/tree.tar", "kvtrial"], check=True)
        host.put(Path(name) / "tree.tar", "/srv/tree.tar")
    host.sh("tar -C /srv --no-same-owner -xf /srv/tree.tar; mkdir -p /srv/kvtrial/.venv/bin /srv/kvtrial/.kvtrial")
    host.put(ROOT / ".kvtrial" / "host-wheels", "/srv/wheels")
    # An environment that was moved: its commands name the Python where it lies now.
    for script in SCRIPTS:
        text = (Path(sys.prefix) / "bin" / script).read_text().split("\n", 1)[1]
        host.write(f"/srv/kvtrial/.venv/bin/{script}", f"#!{VENV}/bin/python\n{text}", "0755")
    host.write("/root/.ssh/known_hosts", known_hosts.read_text())
    host.write("/root/.ssh/id", (STATE / "id").read_text(), "0600")
    reached = {
        h.name: {"ansible_host": h.address, "ansible_user": USER, "ansible_ssh_private_key_file": "/root/.ssh/id",
                 "ansible_python_interpreter": "/usr/bin/python3"}
        for h in fleet_hosts
    }  # fmt: skip
    host.write("/srv/fleet/hosts.yml", yaml.safe_dump({"all": {"hosts": reached}}))
    host.sh("mkdir -p /srv/fleet/group_vars/all; ln -sfn /srv/kvtrial/group_vars/all/pins.yml "
            "/srv/fleet/group_vars/all/00-pins.yml")  # fmt: skip
    tell(host, variables)


def tell(host: Host, variables: dict[str, object]) -> None:
    """Write the fleet's variables on the controller."""
    there = {
        **variables,
        "protocol": "/srv/kvtrial/tests/e2e/standin_protocol.yml",
        "kvtrial_noise_protocol": "/srv/kvtrial/tests/e2e/standin_noise.yml",
        "workload_wheelhouse": "/srv/wheels",
        "workload_wheel_cache": "/srv/kvtrial/.kvtrial/wheels",
        "kvtrial_results_dir": "/srv/results",
    }
    host.write("/srv/fleet/group_vars/all/10-test.yml", yaml.safe_dump(there))


@pytest.fixture(scope="module")
def variables(host_wheels):
    """The stand-in five times slower than elsewhere: its own times are then what is measured, not the machine's."""
    found = {**standin_variables(host_wheels), **QUICK}
    return {**found, "kvtrial_engine_env": {**found["kvtrial_engine_env"], "STANDIN_SLOWDOWN": "10"}}


@pytest.fixture(scope="module")
def project(playbooks, variables):
    binds = [f"{sys.prefix}:{VENV}", f"{sys.base_prefix}:{sys.base_prefix}"]
    project: Playbooks = playbooks(3, variables, binds=binds)
    furnish_standin(project.fleet)
    bring_installed(project.fleet)
    controller, *hosts = project.fleet.hosts
    furnish_controller(controller, hosts, variables, project.fleet.folder / "known_hosts")
    return project


def set_up(project: Playbooks, calendar: str, **more: object):
    """Play playbooks/nightly.yml for the controller."""
    given = {
        "kvtrial_controllers": "h1",
        "nightly_project": "/srv/kvtrial",
        "nightly_inventory": "/srv/fleet",
        "nightly_on_calendar": calendar,
        "nightly_jitter_seconds": 1,
        "nightly_keep": 3,
        "nightly_keep_campaigns": 2,
        "nightly_store": STORE,
        "nightly_variables": {"kvtrial_fetch": "summary"},
        "nightly_environment": {"PYTHONPATH": "/srv/kvtrial/analysis"},
        **more,
    }
    return project.play("playbooks/nightly.yml", "-e", json.dumps(given))


def dated(date: str, **variables: object) -> dict[str, object]:
    """What tells which night it is: all of a test's nights are on one day."""
    return {"nightly_variables": {"kvtrial_fetch": "summary", "kvtrial_night": date, **variables}}


def a_night(project: Playbooks, date: str, calendar: str = "*:*:0/2", seconds: float = 600.0, **variables) -> dict:
    """Have the timer begin one night, and wait for its end; result, artifacts and what the journal has of it."""
    host = project.fleet.hosts[0]
    before = nights(host)
    done = set_up(project, calendar, **dated(date, **variables))
    assert done.returncode == 0, done.stdout[-3000:]
    wait_for(lambda: host.sh(f"systemctl show -P ActiveState {SERVICE}") == "activating")
    host.sh(f"systemctl stop {TIMER}")
    return ended_night(host, before, seconds)


def ended_night(host: Host, before: list[str], seconds: float = 600.0) -> dict:
    """Wait for the end of the night at work."""
    wait_for(lambda: host.sh(f"systemctl show -P ActiveState {SERVICE}") != "activating", seconds)
    [night] = [name for name in nights(host) if name not in before]
    last = host.sh(f"cat $(grep -l playbook_on_stats {NIGHTS}/artifacts/{night}/job_events/*.json) /dev/null")
    told = json.loads(last)["event_data"].get("artifact_data") or {}
    return {
        "name": night,
        "result": host.sh(f"systemctl show -P Result {SERVICE}"),
        "rc": host.sh(f"cat {NIGHTS}/artifacts/{night}/rc"),
        "verdict": told,
        "journal": host.sh(f"journalctl -u {SERVICE} -o cat --no-pager | tail -n 200"),
    }


def nights(host: Host) -> list[str]:
    return host.sh(f"ls {NIGHTS}/artifacts 2>/dev/null || true").split()


def test_the_timer_is_set_and_setting_it_again_changes_nothing(project):
    host = project.fleet.hosts[0]
    assert set_up(project, "*-*-* 01:00:00").returncode == 0
    again = set_up(project, "*-*-* 01:00:00")
    assert recap(again)["h1"]["changed"] == 0, again.stdout[-3000:]
    assert host.sh(f"systemctl is-enabled {TIMER}") == "enabled"
    assert "NEXT" in host.sh(f"systemctl list-timers {TIMER}")
    refused = set_up(project, "at one o'clock")
    assert "nightly_on_calendar=at one o'clock can't be used here" in last_line(refused)


STORED = r"""
import pathlib, sys
import numpy, pandas
store, (like, *dates) = pathlib.Path("/srv/history"), sys.argv[1:]
noise = numpy.random.default_rng(1)
for path in sorted(store.glob(f"protocol=*/night={like}/*.parquet")):
    rows = pandas.read_parquet(path)
    for date in dates:
        night = rows.assign(night=date, campaign=f"stored-{date}", started_at_utc=date.replace("-", "") + "T010000Z")
        night["value"] = rows["value"] + noise.normal(0, 0.02, len(rows)) * (rows["scale"] == "ratio")
        place = path.parents[1] / f"night={date}" / f"stored-{date}.parquet"
        place.parent.mkdir(exist_ok=True)
        night.to_parquet(place, index=False)
"""
"""Nights like one that was measured, each value 2 % beside it at random."""


def test_eight_nights_of_which_the_last_is_a_quarter_slower(project, variables):
    """Night 1 by the calendar, night 2 caught up after it was missed, five stored ones, night 8 after an update."""
    host, *hosts = project.fleet.hosts
    first = a_night(project, "2027-01-01")
    assert (first["result"], first["rc"]) == ("success", "0"), first["journal"]
    assert first["verdict"]["kvtrial_verdict"] == "INCONCLUSIVE", first["verdict"]
    assert "INCONCLUSIVE" in first["journal"]
    # Each host's noise, by A/A pairs of this very night.
    assert first["verdict"]["kvtrial_noise_campaign"].startswith("aa_noise-")
    assert first["verdict"]["kvtrial_campaign"].startswith("offload_return-")
    floors = [line for line in first["verdict"]["kvtrial_history"] if line.startswith("noise of ")]
    assert {line.split()[2].strip(",") for line in floors} == {"h2", "h3"}, first["verdict"]["kvtrial_history"]

    # A time that has passed today begins nothing. The controller is off for two days then: the stamp is too old.
    assert set_up(project, "*-*-* 00:00:01", **dated("2027-01-02")).returncode == 0
    assert host.sh(f"systemctl show -P ActiveState {SERVICE}") == "inactive"
    before = nights(host)
    host.sh(
        f"systemctl stop {TIMER}; touch -d '3 days ago' /var/lib/systemd/timers/stamp-{TIMER}; systemctl start {TIMER}"
    )
    # What ansible-runner makes, which the lock is held for: the unit is activating before that.
    wait_for(lambda: len(nights(host)) > len(before))
    # Whoever starts one beside it meets the lock.
    argv = host.sh(f"sed -n 's/^ExecStart=//p' /etc/systemd/system/{SERVICE} | sed 's/%%/%/g; s/[$][$]/$/g'")
    beside = host.run("sh", "-c", f"{argv}", check=False)
    assert beside.returncode == 75, beside.stdout + beside.stderr
    assert "The night is skipped: another one is at work here and holds" in beside.stdout
    second = ended_night(host, before)
    assert second["result"] == "success", second["journal"]

    stored = [f"2027-01-0{day}" for day in (3, 4, 5, 6, 7)]
    run = ("env", "PYTHONPATH=/srv/kvtrial/analysis", f"{VENV}/bin/python", "-c", STORED)
    host.run(*run, "2027-01-01", *stored[:3])
    host.run(*run, "2027-01-02", *stored[3:])
    slower = {**variables["kvtrial_engine_env"], "STANDIN_SLOWDOWN": "12.5"}
    tell(host, {**variables, "kvtrial_engine_env": slower})
    for one in hosts:
        one.sh("mkdir -p /opt/standin-venv/lib/python3.11/site-packages/update-2.0.dist-info")
    # Nobody listens there: the address must be seen nowhere, and the alarm is told again.
    hook = "http://127.0.0.1:9/secret-of-the-hook"
    last = a_night(project, "2027-01-08", kvtrial_history_webhook=hook)
    assert last["result"] == "success", last["journal"]
    names = [night["verdict"]["kvtrial_campaign"] for night in (first, second, last)]
    assert len(set(names)) == 3
    said = last["verdict"]["kvtrial_history"]
    # By the test over nights, on the right night, with its cause; nobody else's fault, and no earlier night's.
    alarms = [line for line in said if "ALARM: TTFT of the control" in line and "p = " in line]
    assert alarms and all("on 8 Jan; vllm_lock" in line for line in alarms), said
    rises = [int(line.partition(" rose ")[2].split()[0]) for line in alarms]
    assert all(15 <= rise <= 40 for rise in rises), alarms
    assert last["verdict"]["kvtrial_history_alarm"] and not last["verdict"]["kvtrial_history_delivered"]
    assert "They are posted again the next time." in last["journal"]
    assert host.sh(f"grep -rl secret-of-the-hook {NIGHTS}/artifacts || true") == ""
    assert host.sh(f"journalctl -u {SERVICE} --no-pager | grep -c secret-of-the-hook || true") == "0"
    history = ("env", "PYTHONPATH=/srv/kvtrial/analysis", f"{VENV}/bin/python", "-m", "kvtrial.analysis.cli", "history")
    assert host.run(*history, STORE, check=False).returncode == 5
    # Peak RAM is the whole host's, and this machine is not the hosts' alone: of night 2 only times are asked.
    assert not [line for line in second["verdict"]["kvtrial_history"] if "TTFT" in line and "ALARM" in line]

    # Two nights are kept: the first is gone here and on the hosts, and stays in the history.
    noise = first["verdict"]["kvtrial_noise_campaign"]
    for one, folder in ((host, "/srv/results"), *((one, CAMPAIGNS) for one in hosts)):
        there = host_campaigns(one, folder)
        assert names[0] not in there and noise not in there, (one.name, there)
        assert {names[1], names[2]} <= set(there), (one.name, there)
    assert host.sh(f"ls {STORE}/protocol=*/night=2027-01-01/{names[0]}.parquet | wc -l") == "1"
    for one in (host, *hosts):
        assert left_on(one) == []
    assert host.sh("pgrep -f '[a]nsible' || true") == ""


def host_campaigns(host: Host, folder: str) -> list[str]:
    return host.sh(f"ls {folder}").split()


def test_a_night_in_which_others_use_every_host_is_skipped_with_the_reason(project, variables):
    controller, h2, h3 = project.fleet.hosts
    # One by another engine, one by a process on its GPU.
    h2.sh("systemd-run -q --unit=foreign bash -c 'exec -a \"vllm serve other\" sleep 600'")
    h3.write("/usr/local/bin/nvidia-smi", SMI, "0755")
    h3.sh("systemd-run -q --unit=trainer sleep 600")
    controller.write("/srv/fleet/host_vars/h3.yml", "kvtrial_backend: cuda\n")
    try:
        night = a_night(project, "2027-01-09")
    finally:
        h2.sh("systemctl stop foreign")
        h3.sh("systemctl stop trainer; rm /usr/local/bin/nvidia-smi")
        controller.sh("rm /srv/fleet/host_vars/h3.yml")
    assert (night["result"], night["rc"]) == ("success", "0"), night["journal"]
    assert "skipped: h2: another engine runs here, pid " in night["journal"]
    assert "uses a GPU and is not of this project" in night["journal"]
    assert "The night is skipped: others use every host (h2, h3)." in night["journal"]
    assert set(night["verdict"]["kvtrial_skipped_hosts"]) == {"h2", "h3"}
    assert "kvtrial_verdict" not in night["verdict"]


def test_a_night_with_a_host_that_others_use_and_one_out_of_reach_is_skipped_in_one_sentence(project):
    _, h2, h3 = project.fleet.hosts
    h2.sh("systemd-run -q --unit=foreign bash -c 'exec -a \"vllm serve other\" sleep 600'")
    h3.cut()
    try:
        night = a_night(project, "2027-01-10")
    finally:
        h2.sh("systemctl stop foreign")
        h3.heal()
    assert (night["result"], night["rc"]) == ("success", "0"), night["journal"]
    assert "The night is skipped: no host is left; others use h2, and h3 could not be reached." in night["journal"]
    assert "kvtrial_verdict" not in night["verdict"]


SMI = """#!/bin/sh
case "$*" in
*compute-apps*) systemctl show -P MainPID trainer | sed 's/$/, 1000, GPU-stand-in/' ;;
*) echo "0, GPU-stand-in, NVIDIA Stand-in, 580.126.09, 81920, 0" ;;
esac
"""


def test_a_night_that_fails_is_a_failed_unit_with_the_cause_in_the_journal(project, variables):
    controller = project.fleet.hosts[0]
    tell(controller, {**variables, "kvtrial_host_may_be_disturbed": False})
    night = a_night(project, "2027-01-11")
    assert (night["result"], night["rc"]) == ("exit-code", "2"), night["journal"]
    assert controller.sh(f"systemctl is-failed {SERVICE}") == "failed"
    cause = [line for line in night["journal"].splitlines() if line.startswith(("h2: ", "h3: "))][-1]
    # What systemd says of the unit comes after it.
    assert "kvtrial_host_may_be_disturbed is False; an experiment loads the host" in cause
    assert len(nights(controller)) == 3, "older nights' artifacts are rotated away"
    tell(controller, variables)


def test_removal_takes_the_timer_off_and_keeps_what_past_nights_left(project):
    host = project.fleet.hosts[0]
    gone = set_up(project, "*-*-* 01:00:00", nightly_state="absent")
    assert gone.returncode == 0, gone.stdout[-3000:]
    assert host.sh("ls /etc/systemd/system/kvtrial-nightly* 2>/dev/null || true") == ""
    assert host.sh(f"systemctl list-timers --all --no-legend {TIMER}") == ""
    assert len(nights(host)) == 3
    assert host.sh(f"ls /var/lib/systemd/timers/stamp-{TIMER} 2>/dev/null || true") == ""
    assert recap(set_up(project, "", nightly_state="absent"))["h1"]["changed"] == 0
    set_up(project, "", nightly_state="absent", nightly_purge=True)
    assert host.sh(f"ls -d {NIGHTS} 2>/dev/null || true") == ""
