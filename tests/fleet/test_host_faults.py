"""What goes wrong with hosts, and what the command then says. Real hosts, real ssh; the engine is the stand-in."""

import signal
import time

import pytest
from playing import Playbooks, furnish_standin, last_line, recap, standin_variables

# Far beyond what they take: a busy machine is no failure.
pytestmark = pytest.mark.timeout(1500)

PROVISION = "playbooks/provision.yml"


def wait(wanted, seconds: float = 60.0):
    until = time.monotonic() + seconds
    while not (found := wanted()):
        assert time.monotonic() < until, f"waited {seconds} s in vain"
        time.sleep(0.1)
    return found


def after_recap(output: str) -> str:
    return output.partition("PLAY RECAP")[2]


INSTALLING = "ls -d /var/lib/kvtrial/venvs/workload-*/lib/python3*/site-packages/httpx 2>/dev/null"
MARKER = "ls /var/lib/kvtrial/venvs/workload-*/kvtrial-installed.json 2>/dev/null"


@pytest.fixture(scope="module")
def project(playbooks, host_wheels):
    project: Playbooks = playbooks(3, standin_variables(host_wheels))
    furnish_standin(project.fleet)
    return project


@pytest.fixture
def fresh(project):
    """The hosts with nothing of the project on them."""
    for host in project.fleet.hosts:
        host.sh("rm -rf /var/lib/kvtrial /run/kvtrial")
    return project


@pytest.mark.full
def test_a_host_cut_off_mid_task_is_named_and_the_others_finish(fresh):
    """Cut while it installs: the others are provisioned, the last line says which host and how to go on."""
    one, *others = fresh.fleet.hosts
    running = fresh.start(PROVISION)
    wait(lambda: one.sh(INSTALLING, check=False), 600)
    one.cut()
    status, output = running.finish(600)
    try:
        assert status != 0
        assert "h1 could not be reached" in after_recap(output), output[-3000:]
        last = output.strip().splitlines()[-1]
        assert last.startswith("h1 could not be reached: ")
        assert "run the same command again when it is back: the other hosts were not held up" in last
        assert all(host.sh(MARKER) for host in others)
    finally:
        one.heal()
    again = fresh.play(PROVISION, fails=False)
    counts = recap(again)
    assert counts["h1"]["changed"] > 0
    assert counts["h2"]["changed"] == counts["h3"]["changed"] == 0, again.stdout[-4000:]
    assert one.sh(MARKER)


@pytest.mark.full
def test_a_provision_killed_mid_install_is_repaired_by_the_next(fresh):
    host = fresh.fleet.hosts[0]
    running = fresh.start(PROVISION, "--limit", "h1")
    wait(lambda: host.sh(INSTALLING, check=False), 600)
    running.signal(signal.SIGKILL)
    running.finish(600)
    assert host.sh(MARKER, check=False) == ""
    assert host.sh("cat /run/kvtrial/provision.lock") != ""
    fresh.play(PROVISION, "--limit", "h1", fails=False)
    assert host.sh(MARKER)
    assert host.sh("ls -d /run/kvtrial", check=False) == ""
    assert recap(fresh.play(PROVISION, "--limit", "h1", fails=False))["h1"]["changed"] == 0


@pytest.mark.full
def test_a_host_that_loses_power_mid_install_is_repaired_by_the_next(fresh):
    host = fresh.fleet.hosts[0]
    running = fresh.start(PROVISION, "--limit", "h1")
    wait(lambda: host.sh(INSTALLING, check=False), 600)
    host.cut()
    host.kill()
    status, output = running.finish(600)
    assert status != 0
    assert "h1 could not be reached" in after_recap(output)
    host.heal()
    host.boot()
    fresh.play(PROVISION, "--limit", "h1", fails=False)
    assert host.sh(MARKER)


@pytest.mark.full
def test_a_second_provision_at_once_is_refused_and_the_first_finishes(fresh):
    host = fresh.fleet.hosts[0]
    first = fresh.start(PROVISION, "--limit", "h1")
    wait(lambda: host.sh("ls /run/kvtrial/provision.lock 2>/dev/null", check=False), 300)
    first.signal(signal.SIGSTOP)  # the first takes as long as the second needs to be refused
    try:
        second = fresh.play(PROVISION, "--limit", "h1", fails=True)
    finally:
        first.signal(signal.SIGCONT)
    assert last_line(second).startswith("h1: Another provision, by root on ")
    assert f"(pid {first.pid}), has held this host for " in last_line(second)
    assert "-e kvtrial_break_lock=true" in last_line(second)
    status, output = first.finish(600)
    assert status == 0, output[-3000:]
    assert host.sh("ls -d /run/kvtrial", check=False) == ""


@pytest.mark.full
def test_a_lock_of_another_controller_is_taken_when_told_so(fresh):
    host = fresh.fleet.hosts[0]
    lock = '{"owner": "elsewhere/x/y:1:1", "by": "ann on elsewhere (pid 1)", "since": 0}'
    host.write("/run/kvtrial/provision.lock", lock)
    refused = fresh.play(PROVISION, "--limit", "h1", fails=True)
    assert "by ann on elsewhere (pid 1)" in last_line(refused)
    fresh.play(PROVISION, "--limit", "h1", "-e", "kvtrial_break_lock=true", fails=False)


def test_a_taken_port_is_refused_before_anything_starts(project):
    host = project.fleet.hosts[1]
    host.sh("systemd-run -q --unit=squatter python3 -m http.server --bind 127.0.0.1 18765")
    try:
        wait(lambda: host.sh("ss -Hltn 'sport = 18765'"))
        refused = project.play("experiment.yml", "--limit", "h2", fails=True)
        assert last_line(refused) == (
            "h2: port 18765 is taken; end what listens there, or set kvtrial_port to a free one."
        )
        assert host.sh("ls /var/lib/kvtrial/campaigns 2>/dev/null", check=False) == ""
    finally:
        host.sh("systemctl stop squatter")


def test_a_host_without_consent_is_refused_by_name(project):
    project.set("h3", kvtrial_host_may_be_disturbed=False)
    try:
        refused = project.play("experiment.yml", fails=True)
        assert last_line(refused).startswith("h3: kvtrial_host_may_be_disturbed is False; an experiment loads the host")
        for host in project.fleet.hosts:
            assert host.sh("ls /var/lib/kvtrial/campaigns 2>/dev/null", check=False) == ""
    finally:
        project.set("h3")


@pytest.mark.full
def test_a_full_disk_is_named_before_and_while_installing(playbooks, host_wheels):
    """A host with a disk of 64 MiB: refused beforehand; with the reserve set too low, by the failing step."""
    project: Playbooks = playbooks(1, standin_variables(host_wheels), disk_size="64M")
    furnish_standin(project.fleet)
    host = project.fleet.hosts[0]
    early = project.play("experiment.yml", "-e", "kvtrial_disk_reserve_bytes=200000000", fails=True)
    assert "bytes are free below /var/lib/kvtrial, 200000000 must stay free; free some, or set" in last_line(early)
    assert host.sh("ls /var/lib/kvtrial 2>/dev/null", check=False) == ""
    late = project.play(PROVISION, "-e", "kvtrial_disk_reserve_bytes=1000000", fails=True)
    assert "No space left on device" in last_line(late), last_line(late)
    assert host.sh(MARKER, check=False) == ""
    host.sh("rm -rf /var/lib/kvtrial/venvs")
    assert host.sh("systemctl is-active ssh") == "active"
