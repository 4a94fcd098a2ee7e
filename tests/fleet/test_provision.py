"""Hosts from bare to ready and back, over SSH: check mode, converge, idempotence, upgrade, rollback, drift, removal.

The tests of this module go on from each other, on one fleet; those marked full may be left out. Driver, engine and
model are stand-ins (vendor.py, supplies.py); systemd, sshd, apt, pip, reboots and Ansible are real.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playing import ROOT, SMALL, Playbooks, asked, last_line, recap
from rig import Host
from supplies import MID, NEW, NEWER, Supplies
from vendor import FABRIC, GPU, HEADERS, PACKAGES, debs

# Far beyond what they take: a busy machine is no failure.
pytestmark = pytest.mark.timeout(1500)

PROVISION = "playbooks/provision.yml"
STATE = "/var/lib/kvtrial"
UNIT = "/etc/systemd/system/kvtrial-engine@.service"
OURS = f"""
find {STATE} /etc/apt /etc/systemd/system /etc/sudoers.d /var/lib/apt/lists /var/log/kvtrial /var/cache/kvtrial \
  \\( -path '*kvtrial*' -o -name '*10.77.0.1*' \\) 2>/dev/null || true
dpkg-query -W -f '${{Package}}\\n' 2>/dev/null | grep -E 'nvidia|libcuda' || true
getent passwd kvtrial || true
ls -d /dev/shm/vllm_offload_* 2>/dev/null || true
"""
"""Whatever provisioning brings to a host, a line each."""
DISK = r"""
find / -xdev \( -path /var/log -o -path /var/cache -o -path /var/lib/apt -o -path /var/lib/dpkg \
  -o -path /var/lib/systemd -o -path /home/deploy/.ansible \
  -o -path /root/.ansible -o -path '/var/tmp/systemd-private-*' \
  -o -name __pycache__ -o -path '/etc/*-' \) -prune -o -print
"""
"""All that lies on a host's disk, but for what systemd, apt, dpkg, Ansible and Python keep for themselves."""

ONE = ("--limit", "h1")
TWO = ("--limit", "h1,h2")
"""Where two hosts show it: the canary, and one after it."""


class Site:
    """A fleet, what it is provisioned from, and what earlier tests of this module kept."""

    def __init__(self, plays: Playbooks, supplies: Supplies) -> None:
        self.plays = plays
        self.supplies = supplies
        self.hosts = plays.fleet.hosts
        self.bare = {host.name: set(host.sh(OURS).splitlines()) for host in self.hosts}
        self.disk = {host.name: set(host.sh(DISK).splitlines()) for host in self.hosts}

    def changed(self, *arguments: str) -> dict[str, int]:
        """Provision; how many tasks changed something, by host."""
        done = self.plays.play(PROVISION, *arguments, fails=False)
        return {host: counts["changed"] for host, counts in recap(done).items() if host != "localhost"}

    def left(self) -> dict[str, set[str]]:
        """What is on the hosts that was not there when they were bare, by host."""
        return {
            host.name: (set(host.sh(OURS).splitlines()) - self.bare[host.name])
            | (set(host.sh(DISK).splitlines()) - self.disk[host.name])
            for host in self.hosts
        }

    def driver(self) -> list[str]:
        """By host: what nvidia-smi and the loaded module say."""
        ask = (
            "nvidia-smi --query-gpu=driver_version --format=csv,noheader;"
            "sed -n 's/.*x86_64 *\\([0-9.]*\\).*/\\1/p' /proc/driver/nvidia/version"
        )
        return [" ".join(host.sh(ask).split()) for host in self.hosts]

    def venvs(self) -> list[str]:
        """The engine's virtual environments on the first host, by name."""
        return sorted(self.hosts[0].sh(f"ls {STATE}/venvs | grep ^vllm").split())


@pytest.fixture(scope="module")
def site(
    playbooks: Callable[..., Playbooks], host_wheels: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    plays = playbooks(3)
    supplies = Supplies(tmp_path_factory.mktemp("supplies"))
    supplies.drivers(MID, NEW)
    url = plays.fleet.serve(supplies.repository.folder, 8081)
    plays.set(**supplies.variables(url, host_wheels, tmp_path_factory.mktemp("cache")))
    for host in plays.fleet.hosts:
        host.sh(HEADERS)
    yield Site(plays, supplies)
    supplies.repository.close()


def test_check_mode_on_bare_hosts_says_what_would_change_and_leaves_nothing(site: Site) -> None:
    done = site.plays.play(PROVISION, "--check", "--diff", fails=False)
    assert all(counts["changed"] > 0 for host, counts in recap(done).items() if host != "localhost")
    said = " ".join(done.stdout.split())
    for host in site.hosts:
        assert f"{host.name}: the driver would be brought to {MID}; not at it: libcuda1 missing" in said
        assert set(host.sh(OURS).splitlines()) == site.bare[host.name]
    assert "vLLM 0.30.0 (cuda) would be installed into" in said and "would be brought" in said


def test_a_bare_fleet_is_brought_to_the_pins_the_canary_first(site: Site) -> None:
    done = site.plays.play(PROVISION, fails=False)
    assert site.driver() == [f"{MID} {MID}"] * 3
    canary, others = (
        done.stdout.index("PLAY [Change the driver of the canary]"),
        done.stdout.index("PLAY [Change the driver of the other hosts]"),
    )
    before = done.stdout[canary:others]
    assert "changed: [h1]" in before and "for h1" in before
    assert not re.search(r"(changed|ok): \[h[23]\]|for .*h[23]", before), before
    said = " ".join(done.stdout.split())
    for name in ("h1", "h2", "h3"):
        assert f"{name}: changed: loaded module none to {MID}; package firmware-nvidia-gsp none to {MID}-1; " in said
        assert "/etc/apt/preferences.d/kvtrial-nvidia-driver written" in said


def test_a_second_run_and_a_check_after_it_change_nothing(site: Site) -> None:
    """Complaint 4."""
    boots = [host.sh("cat /proc/sys/kernel/random/boot_id; uptime -s") for host in site.hosts]
    assert site.changed() == {"h1": 0, "h2": 0, "h3": 0}
    assert site.changed("--check", "--diff") == {"h1": 0, "h2": 0, "h3": 0}
    assert boots == [host.sh("cat /proc/sys/kernel/random/boot_id; uptime -s") for host in site.hosts]


def test_what_is_there_is_what_was_pinned(site: Site) -> None:
    """Asked by testinfra over SSH: packages (complaint 7), pins, modes, hashes, unit, account, sockets."""
    for host in site.hosts:
        machine = asked(host)
        for name in [*PACKAGES, *FABRIC]:
            assert machine.package(name).is_installed and machine.package(name).version == f"{MID}-1", name
        policy = machine.check_output("apt-cache policy nvidia-driver-cuda")
        assert f"Candidate: {MID}-1" in policy and " 1001" in policy and f"{NEW}-1" in policy
        # Made by the unit at the boot, with the number that the (stand-in) kernel gave; no engine could.
        node = machine.check_output("stat -c '%F %Hr %Lr %a' /dev/nvidia-uvm")
        assert node == "character special file 510 0 666"
        assert machine.service("kvtrial-nvidia-nodes").is_enabled
        held = machine.check_output("apt-config dump --format '%v%n' Unattended-Upgrade::Package-Blacklist").split()
        firmware = "nvidia-firmware-580-" + MID.replace(".", r"\.")
        assert held == sorted(f"^{name}$" for name in [*PACKAGES, *FABRIC, "firmware-nvidia-gsp", firmware])

        (model,) = machine.file(f"{STATE}/models").listdir()
        folder = f"{STATE}/models/{model}"
        manifest = json.loads(machine.file(f"{folder}/manifest.json").content_string)
        assert manifest["revision"] == site.supplies.model_revision()
        for name, facts in manifest["files"].items():
            file = machine.file(f"{folder}/{name}")
            assert (file.sha256sum, file.mode, file.user) == (facts["sha256"], 0o644, "root"), name
        (engine,) = [name for name in machine.file(f"{STATE}/venvs").listdir() if name.startswith("vllm-")]
        assert (machine.file(folder).mode, machine.file(f"{STATE}/venvs/{engine}/bin/vllm").mode) == (0o755, 0o755)

        unit = machine.file(UNIT)
        assert (unit.mode, unit.user, unit.group) == (0o644, "root", "root")
        found = machine.service("kvtrial-engine@control").systemd_properties
        wanted = {
            "LoadState": "loaded",
            "ActiveState": "inactive",
            "Restart": "no",
            "KillMode": "mixed",
            "User": "kvtrial",
            "NoNewPrivileges": "yes",
            "ProtectSystem": "strict",
            "DevicePolicy": "closed",
        }
        assert {name: found[name] for name in wanted} == wanted
        assert machine.user("kvtrial").shell == "/usr/sbin/nologin"
        listening = [name for name in machine.socket.get_listening_sockets() if not name.startswith("unix://")]
        assert listening and all(name.endswith(":22") for name in listening), listening


@pytest.mark.full
def test_an_upgrade_of_the_system_leaves_the_driver_alone(site: Site) -> None:
    """Complaint 1: a newer driver is in the repository, and whatever upgrades packages does not take it."""
    site.supplies.repository.add(*debs(NEWER))
    host = site.hosts[0]
    host.sh("apt-get update -q 2>/dev/null; apt-get -qy dist-upgrade", check=False)
    assert host.sh("dpkg-query -W -f '${Version}' libnvidia-ml1") == f"{MID}-1"
    assert site.driver()[0] == f"{MID} {MID}"


@pytest.mark.full
@pytest.mark.parametrize("part", ["nvidia_driver", "vllm", "model", "workload", "engine"])
def test_a_part_is_taken_alone_by_its_tag(site: Site, part: str) -> None:
    """Checks and lock are taken all the same, and nothing of another part."""
    done = site.plays.play(PROVISION, *ONE, "--tags", part, fails=False)
    assert recap(done)["h1"]["changed"] == 0
    assert "Take the host, so that no other provision" in done.stdout and "Give the host back" in done.stdout
    roles = set(re.findall(r"TASK \[kvtrial\.vllm\.(\w+) : (?!Validating)", done.stdout))
    assert part in roles and roles <= {"preflight", "nvidia_driver", "engine", part}


NOT_TOUCHED = "h2: the driver was not touched, since the canary h1 did not take it; see what the canary says"


def one_that_needs_no_driver(site: Site) -> Host:
    """The third host stays at its driver, and lacks its unit: that is to be brought whatever befalls the canary."""
    site.plays.set(kvtrial_driver_version=NEW)
    site.plays.set("h3", kvtrial_driver_version=MID)
    site.hosts[2].sh(f"rm {UNIT}")
    return site.hosts[2]


def the_others_were_served(site: Site, output: str) -> None:
    """The driver of the second host is as it was, the third was finished and given back."""
    site.plays.set("h3")
    assert NOT_TOUCHED in output
    smi = "nvidia-smi --query-gpu=driver_version --format=csv,noheader"
    assert [host.sh(smi) for host in site.hosts[1:]] == [MID, MID]
    assert site.hosts[2].sh(f"ls {UNIT}") == UNIT
    assert site.hosts[2].sh("ls -d /run/kvtrial", check=False) == ""


@pytest.mark.full
def test_a_canary_that_fails_keeps_the_driver_from_the_others_and_nothing_else(site: Site) -> None:
    broken = "/usr/lib/kvtrial-standin/dkms-fails"
    site.hosts[0].sh(f"touch {broken}")
    one_that_needs_no_driver(site)
    done = site.plays.play(PROVISION, fails=True)
    site.hosts[0].sh(f"rm {broken}")
    assert last_line(done).startswith(f"h1: DKMS has no module {NEW}")
    assert recap(done)["h3"]["failed"] == 0
    the_others_were_served(site, done.stdout)


@pytest.mark.full
def test_a_canary_that_is_cut_off_keeps_the_driver_from_the_others_and_nothing_else(site: Site) -> None:
    """Whether its driver works is not known then; hosts that need no other driver are finished."""
    canary = site.hosts[0]
    one_that_needs_no_driver(site)
    running = site.plays.start(PROVISION)
    while not running.is_over() and "PLAY [Change the driver of the canary]" not in running.log.read_text():
        time.sleep(0.05)
    canary.cut()
    status, output = running.finish(600)
    canary.heal()
    assert status != 0
    last = output.strip().splitlines()[-1]
    assert last.startswith("h1 could not be reached: ") and "run the same command again when it is back" in last, last
    assert "not held up" not in last
    the_others_were_served(site, output)


@pytest.mark.full
def test_driver_and_engine_are_upgraded_by_their_pins_even_where_packages_are_held(site: Site) -> None:
    """Complaint 2."""
    site.hosts[1].sh("apt-mark hold nvidia-driver-cuda libnvidia-ml1 libcuda1")
    site.plays.set(kvtrial_driver_version=NEW, kvtrial_vllm_version="0.33.0")
    done = site.plays.play(PROVISION, *TWO, fails=False)
    said = " ".join(done.stdout.split())
    assert all(recap(done)[name]["changed"] > 0 for name in ("h1", "h2"))
    # The first one had its packages already, from the runs in which it failed as the canary.
    assert f"h2: changed: loaded module {MID} to {NEW}; package firmware-nvidia-gsp {MID}-1 to {NEW}-1; " in said
    assert site.driver() == [f"{NEW} {NEW}"] * 2 + [f"{MID} {MID}"]
    assert [name[:11] for name in site.venvs()] == ["vllm-0.30.0", "vllm-0.33.0"]


@pytest.mark.full
def test_rollback_is_a_variable_and_fetches_nothing(site: Site) -> None:
    former = site.hosts[0].sh(f"stat -c %Y {STATE}/venvs/vllm-0.30.0-*/kvtrial-installed.json")
    site.plays.set(kvtrial_driver_version=MID, kvtrial_vllm_version="0.30.0")
    done = site.plays.play(PROVISION, *TWO, fails=False)
    assert site.driver() == [f"{MID} {MID}"] * 3
    assert "Pack the wheels that this host needs" not in done.stdout
    # What the upgrade left of Ubuntu's firmware, with its version in its name, is no driver at another version.
    assert site.hosts[0].sh(f"dpkg-query -W -f '${{Version}}' nvidia-firmware-580-{NEW}") == f"{NEW}-1"
    assert site.changed(*ONE) == {"h1": 0}
    assert site.hosts[0].sh(f"stat -c %Y {STATE}/venvs/vllm-0.30.0-*/kvtrial-installed.json") == former


@pytest.mark.full
def test_drift_is_told_host_by_host(site: Site) -> None:
    odd = site.hosts[1]
    odd.sh("sed -i s/1001/400/ /etc/apt/preferences.d/kvtrial-nvidia-driver")
    done = site.plays.play(PROVISION, "--check", "--diff", fails=False)
    changed = {host: counts["changed"] for host, counts in recap(done).items() if host != "localhost"}
    assert changed == {"h1": 0, "h2": 1, "h3": 0}
    assert "-Pin-Priority: 400\n+Pin-Priority: 1001" in done.stdout
    assert "400" in odd.sh("cat /etc/apt/preferences.d/kvtrial-nvidia-driver")
    assert site.changed("--limit", "h2") == {"h2": 1}


@pytest.mark.full
def test_a_damaged_model_is_found(site: Site) -> None:
    (model,) = site.hosts[2].sh(f"ls {STATE}/models/*/model.safetensors").splitlines()
    kept = site.hosts[2].sh(f"head -c 4 {model}")
    site.hosts[2].sh(f"printf X | dd of={model} conv=notrunc status=none")
    done = site.plays.play(PROVISION, "--limit", "h3", fails=True)
    assert f"{model} has another sha256 than the manifest says" in last_line(done)
    site.hosts[2].sh(f"printf '{kept[0]}' | dd of={model} conv=notrunc status=none")


@pytest.mark.full
def test_an_experiment_refuses_hosts_that_differ_and_names_the_odd_one(site: Site) -> None:
    site.plays.set(
        protocol=str(ROOT / "tests" / "e2e" / "standin_protocol.yml"),
        kvtrial_engine_args={"max-model-len": 512, "block-size": 32, "num-gpu-blocks-override": 33},
        kvtrial_sizes=SMALL,
    )
    site.hosts[2].write(GPU, "persistence=Disabled\n")
    done = site.plays.play("experiment.yml", fails=True)
    assert "persistence_mode: h3 has Disabled, the other hosts Enabled" in last_line(done)
    assert "Plan the campaign" not in done.stdout
    site.hosts[2].sh(f"rm -r {Path(GPU).parent}")


def test_removal_leaves_nothing(site: Site) -> None:
    assert all(len(left) > 100 for left in site.left().values())
    site.plays.play(PROVISION, "-e", "kvtrial_state=absent", fails=False)
    assert site.left() == {host.name: set() for host in site.hosts}
    for host in site.hosts:
        assert host.sh("cat /proc/driver/nvidia/version 2>/dev/null", check=False) == ""
