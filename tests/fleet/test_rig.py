"""The rig itself: hosts are what the other tests take them for, and they vanish."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import rig


@pytest.fixture(scope="module")
def fleet(boot):
    return boot(2)


def test_hosts_have_systemd_a_real_sshd_and_addresses_of_their_own(fleet):
    for host in fleet.hosts:
        assert host.run("systemctl", "is-system-running", "--wait").stdout.strip() == "running"
        assert host.sh("cat /proc/1/comm") == "systemd"
        addresses = host.sh("ip -o -4 addr show scope global")
        assert host.address in addresses
        assert len(addresses.splitlines()) == 1
    assert rig.CONTROLLER not in subprocess.run(["ip", "addr"], capture_output=True, text=True, check=True).stdout


def test_limits_of_units_are_enforced_and_the_clock_is_out_of_reach(fleet):
    host = fleet.hosts[0]
    eat = "python3 -c 'bytearray(200 << 20)'"
    assert host.run("sh", "-c", f"systemd-run --wait -q -p MemoryMax=50M {eat}", check=False).returncode != 0
    assert host.run("sh", "-c", f"systemd-run --wait -q {eat}").returncode == 0
    assert host.run("date", "-s", "2001-01-01", check=False).returncode != 0
    assert time.localtime().tm_year > 2001


def test_a_host_cut_off_is_gone_and_comes_back(fleet):
    one, other = fleet.hosts
    knock = f"exec 3<>/dev/tcp/{one.address}/22"
    one.cut()
    assert fleet.ctl("timeout", "2", "bash", "-c", knock).returncode != 0
    assert fleet.ctl("timeout", "2", "bash", "-c", knock.replace(one.address, other.address)).returncode == 0
    one.heal()
    one.wait()
    one.kill()
    assert one.init() is None
    one.boot()


def test_a_fleet_vanishes_when_its_owner_is_killed(fleet):
    """Where pytest itself is killed, hosts end by themselves and the next fleet sweeps the rest."""
    script = (
        f"import sys, time; sys.path.insert(0, {str(Path(rig.__file__).parent)!r}); import rig\n"
        "with rig.a_fleet(1) as fleet: print(fleet.name, fleet.hosts[0].init(), flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    name, init = owner.stdout.readline().split()
    ticks = rig.start_ticks(int(init))
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    until = time.monotonic() + 20
    while rig.start_ticks(int(init)) == ticks and time.monotonic() < until:
        time.sleep(0.1)
    assert rig.start_ticks(int(init)) != ticks
    rig.sweep()
    assert not (rig.STATE / "fleets" / name).exists()
    assert not Path(f"/run/netns/{name}-ctl").exists()
    assert not (rig.CGROUP / "pids" / name).exists()
    assert all(host.init() for host in fleet.hosts)


def test_no_root_is_a_reason_to_skip(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(rig.CannotRig, match="need root"):
        rig.prepare()
