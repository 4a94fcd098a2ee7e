"""What the role nvidia_driver refuses, on planted facts: one made-up host a case, none of which is asked."""

import hashlib
import re
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PIN = "580.95.05"
FACTS = {
    "packages": {"nvidia-driver-cuda": f"{PIN}-1"},
    "unfinished": [],
    "begun": [],
    "configured": [],
    "kernels": [],
    "kernel": "6.1.0-18-amd64",
    "headers": True,
    "dkms": [],
    "secure_boot": None,
    "module_version": PIN,
    "smi_version": PIN,
    "smi_error": "",
    "gpus": [{"name": "GPU", "driver_version": PIN, "mig": False, "persistence_mode": "Enabled"}],
    "gpu_processes": [],
    "gpu_unknown": "",
    "uvm_node": True,
    "nvswitch": False,
    "systemd": True,
    "units": {},
    "os": {"id": "debian", "version_id": "12"},
    "architecture": "x86_64",
    "apt_lock": None,
    "files": {},
    "journal": False,
    "record": None,
    "sources": [],
}
READY = {"nvidia_driver_host_drained": True, "nvidia_driver_reboot_allowed": True, "nvidia_driver_version": PIN}
KEY = "0" * 64
NAMED = {
    "nvidia_driver_packages": ["nvidia-driver-cuda"],
    "nvidia_driver_repository_uri": "https://mirror.example.invalid/",
    "nvidia_driver_repository_key": __file__,
    "nvidia_driver_repository_key_sha256": KEY,
}
NAMED_WELL = {**NAMED, "nvidia_driver_repository_key_sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}
OTHER_KEY = "1" * 64
RECORD = {"found": {}, "versions": [PIN]}
"""What an installation of this project's leaves, on a host that had no driver before."""
OURS = {"nvidia_driver_manage": True, "nvidia_driver_state": "absent"}
UBUNTU = {**NAMED_WELL, "nvidia_driver_packages": ["nvidia-driver-580-open", "libnvidia-compute-580"]}


def on(system: str, version: str, architecture: str = "x86_64") -> dict:
    """Facts of a host with another system."""
    return {"os": {"id": system, "version_id": version}, "architecture": architecture}


def fabric(state: str) -> dict:
    """What systemd says of the fabric manager."""
    return {"nvidia-fabricmanager.service": {"active": state, "enabled": True}}


def simulation(said: str, rc: int = 0) -> dict:
    """What apt-get --simulate printed."""
    return {"__nvidia_driver_simulation": {"rc": rc, "stdout": said, "stderr": "E: broken" if rc else ""}}


def listed(said: str, rc: int = 0) -> dict:
    """What apt-get update printed."""
    return {"__nvidia_driver_update": {"rc": rc, "stdout": "", "stderr": said}}


def entry(**fields: object) -> dict:
    """What driver_info found in apt's sources: an entry for the same repository, as cuda-keyring brings one."""
    key = {"signed_by": "/usr/share/keyrings/cuda-archive-keyring.gpg", "key_sha256": OTHER_KEY}
    return {
        "file": "/etc/apt/sources.list.d/cuda.list",
        "kinds": ["deb"],
        "components": [],
        "trusted": "",
        **key,
        **fields,
    }


def brought(rc: int, **facts: object) -> dict:
    """What apt-get ended with, and what was there then."""
    said = "dpkg: error processing package x (--configure):\nE: Sub-process /usr/bin/dpkg returned an error code (1)\n"
    return {"__nvidia_driver_apt_get": {"rc": rc, "stdout": "", "stderr": said}, **after(**facts), **NAMED_WELL}


def after(**facts: object) -> dict:
    """Facts of the second look, after apt."""
    return {"__nvidia_driver_after": {"facts": {**FACTS, **facts}}}


def settled(**facts: object) -> dict:
    """Facts of the look before a reboot."""
    return {"__nvidia_driver_settled": {"facts": {**FACTS, **facts}}}


# name: (part of the role, facts that differ, settings that differ, what is said)
CASES: dict[str, tuple[str, dict, dict, str]] = {
    # Complaint 5: also where a reboot is allowed.
    "local-connection": ("refusals", {}, {}, "the host itself (connection local), which it never reboots"),
    "no-reboot": (
        "refusals",
        {},
        {"nvidia_driver_reboot_allowed": False, "ansible_connection": "ssh"},
        "another driver is loaded by a reboot, and nvidia_driver_reboot_allowed is false; set it to true for a host",
    ),
    "not-drained": ("refusals", {}, {"nvidia_driver_host_drained": False}, "and the host is not marked drained"),
    "gpu-in-use": ("refusals", {"gpu_processes": ["41 python"]}, {}, "the GPU is in use by process 41 python"),
    "gpu-unknown": (
        "refusals",
        {"gpu_unknown": "nvidia-smi fails (mismatch), and 2 processes do not show their open files"},
        {},
        "be told: nvidia-smi fails (mismatch), and 2 processes",
    ),
    # The other name of the same plugin.
    "local-too": (
        "refusals",
        {},
        {"ansible_connection": "ansible.builtin.local"},
        "the host itself (connection local), which it never reboots",
    ),
    "secure-boot": ("refusals", {"secure_boot": True}, {}, "secure boot is on, and a module that DKMS builds is not"),
    "signed": ("refusals", {"secure_boot": True}, {"nvidia_driver_secure_boot_signed": True}, "which it never reboots"),
    "no-headers": ("refusals", {"headers": False}, {}, "install linux-headers-6.1.0-18-amd64"),
    "no-pin": ("settings", {}, {**NAMED, "nvidia_driver_version": ""}, "nvidia_driver_version=(empty)"),
    "no-packages": ("settings", {}, {**NAMED, "nvidia_driver_packages": []}, "do not name a driver; set the exact"),
    "no-list": (
        "settings",
        {},
        {**NAMED, "nvidia_driver_packages": "cuda-drivers"},
        "nvidia_driver_packages=cuda-drivers is no list of packages; write it as",
    ),
    "no-repository": ("settings", {}, {**NAMED, "nvidia_driver_repository_uri": ""}, "_key_sha256 must be set"),
    "wrong-key": ("settings", {}, NAMED, f"nvidia_driver_repository_key_sha256 says {KEY}"),
    "no-key": ("settings", {}, {**NAMED, "nvidia_driver_repository_key": "/none"}, "is no file on the controller"),
    "nvswitch": ("settings", {"nvswitch": True}, NAMED, "this host has NVSwitches, whose fabric manager must have"),
    "no-fabric": ("settings", {}, {**NAMED, "nvidia_driver_fabric_manager": True}, "_fabric_packages is empty"),
    "old-system": ("settings", {"os": {"id": "debian", "version_id": "11"}}, NAMED, "is debian 11 on x86_64; drivers"),
    # No host with Ubuntu or aarch64 could be had: what the role takes and refuses of them is shown on planted facts.
    "debian-12": ("settings", on("debian", "12"), NAMED_WELL, ""),
    "debian-13-arm": ("settings", on("debian", "13", "aarch64"), NAMED_WELL, ""),
    "ubuntu-2204": ("settings", on("ubuntu", "22.04"), UBUNTU, ""),
    "ubuntu-2404-arm": ("settings", on("ubuntu", "24.04", "aarch64"), UBUNTU, ""),
    "ubuntu-2004": ("settings", on("ubuntu", "20.04"), UBUNTU, "is ubuntu 20.04 on x86_64; drivers are brought to"),
    "power": ("settings", on("ubuntu", "24.04", "ppc64le"), UBUNTU, "is ubuntu 24.04 on ppc64le; drivers are brought"),
    "no-bundle": ("settings", {}, {**NAMED, "nvidia_driver_debs": "/none"}, "nvidia_driver_debs=/none has no Packages"),
    "other-source": (
        "settings",
        {"sources": [entry()]},
        NAMED_WELL,
        f"cuda.list (its key /usr/share/keyrings/cuda-archive-keyring.gpg has sha256 {OTHER_KEY}); a second entry with",
    ),
    "trusted-source": (
        "settings",
        {"sources": [entry(trusted="yes")]},
        NAMED_WELL,
        "cuda.list (trusted=yes, by which no key is asked); a second entry",
    ),
    "other-source-same-key": (
        "settings",
        {"sources": [entry(key_sha256=NAMED_WELL["nvidia_driver_repository_key_sha256"])]},
        NAMED_WELL,
        "",
    ),
    "module": ("verify", {"module_version": "570.1.1"}, {}, f"says driver {PIN}, the loaded module is 570.1.1"),
    "pin": ("verify", {"module_version": "570.1.1", "smi_version": "570.1.1"}, {}, f"570.1.1, the pin is {PIN}"),
    "no-driver": (
        "verify",
        {"smi_version": None, "smi_error": "not installed"},
        {},
        "no driver version (not installed)",
    ),
    "mig": ("verify", {"gpus": [{**FACTS["gpus"][0], "mig": True}]}, {}, "MIG is on for 1 of 1 GPUs"),
    "library": ("verify", {"packages": {"libcuda1": "580.105.08-1"}}, {}, "libcuda1 580.105.08-1 is of another"),
    "companion": ("verify", {"packages": {"nvidia-settings": "535.1.1-1", "libcuda1": f"{PIN}-1"}}, {}, ""),
    "agrees": ("verify", {}, {}, ""),
    "no-node": (
        "verify",
        {"uvm_node": False},
        {"nvidia_driver_device_nodes": True},
        "t make it; see journalctl -u kvtrial-nvidia-nodes.service on the host for",
    ),
    "no-node-of-somebodys": (
        "verify",
        {"uvm_node": False},
        {},
        "t make it; load nvidia_uvm there and make the node at every boot, or set nvidia_driver_device_nodes=true",
    ),
    "no-node-no-systemd": ("verify", {"uvm_node": False, "systemd": False}, {}, ""),
    "no-fabric-unit": ("verify", {"nvswitch": True}, {}, "(nvidia-fabricmanager is not there), so no CUDA program"),
    "fabric-failed": ("verify", {"nvswitch": True, "units": fabric("failed")}, {}, "(nvidia-fabricmanager is failed)"),
    "fabric-runs": ("verify", {"nvswitch": True, "units": fabric("active")}, {}, ""),
    "fabric-is-not-needed": ("verify", {"units": fabric("failed")}, {}, ""),
    "apt-can": ("simulated", {}, simulation("Inst libcuda1 (580.95.05-1)\nRemv nvidia-driver-cuda [570.1.1-1]\n"), ""),
    "apt-can-not": (
        "simulated",
        {},
        simulation(" libcuda1 : Depends: libnvidia-ml1 but it is not installable\n", rc=100),
        # As on an image that has never read its lists.
        "libcuda1 : Depends: libnvidia-ml1 but it is not installable; E: broken; run apt-get update on the host, if it "
        "has never read the lists of its distribution, and compare",
    ),
    "apt-has-other-versions": (
        "simulated",
        {},
        simulation(" libcuda1 : Depends: libnvidia-ml1 (= 2) but 1 is to be installed\n", rc=100),
        "but 1 is to be installed; E: broken; compare nvidia_driver_version and nvidia_driver_packages with what the",
    ),
    "other-kernel": (
        "simulated",
        {},
        simulation("Inst linux-image-6.1.0-20-amd64 (6.1.80-1)\n"),
        "apt would also bring linux-image-6.1.0-20-amd64",
    ),
    # The vendor's too, but not of the driver.
    "apt-takes-others": (
        "simulated",
        {},
        simulation("Remv nvidia-container-toolkit [1.18.0-1]\nRemv libfoo:i386 [2] []\nPurg bar [1]\n"),
        "apt would also remove nvidia-container-toolkit, libfoo, bar, which are no packages of the driver; remove them",
    ),
    "refused-is-untouched": (
        "simulated",
        {},
        simulation("Remv foo [1]\n"),
        "Nothing was installed, and the driver and its preference are left as they were",
    ),
    # apt ends what dpkg has begun of others, too, and where that fails the driver is there all the same.
    "brought": ("brought", {}, brought(0), ""),
    "brought-but-others": ("brought", {}, brought(100), ""),
    "half-configured": (
        "brought",
        {},
        brought(100, unfinished=["nvidia-driver-cuda"]),
        "dpkg: error processing package x (--configure):; E: Sub-process /usr/bin/dpkg returned an error code (1)",
    ),
    "not-brought": ("brought", {}, brought(100, packages={}), "apt-get ended with 100 while it brought nvidia-driver-"),
    "removed": ("removed", {}, {**brought(100, packages={}), **OURS}, ""),
    "not-removed": (
        "removed",
        {"record": RECORD},
        {**brought(100), **OURS},
        "ended with 100 and left nvidia-driver-cuda: dpkg",
    ),
    "removal": ("removable", {"configured": ["old"]}, simulation("Purg nvidia-driver-cuda [1]\nPurg old [1]\n"), ""),
    "removal-takes-others": (
        "removable",
        {},
        simulation("Purg nvidia-driver-cuda [580.95.05-1]\nPurg cuda [13.0]\n"),
        "with the driver apt would remove cuda too, which needs it and is not of it; remove it yourself",
    ),
    "removal-fails": (
        "removable",
        {"record": RECORD},
        {**simulation("", rc=100), **OURS},
        "nvidia-driver-cuda: E: broken.",
    ),
    "list": ("listed", {}, listed("Get:1 https://mirror InRelease\n"), ""),
    "list-not-signed": (
        "listed",
        {},
        listed("W: GPG error: https://mirror InRelease: NO_PUBKEY 0\nE: The repository is not signed.\n", rc=100),
        "s repository: W: GPG error: https://mirror InRelease: NO_PUBKEY 0; E: The repository is",
    ),
    # apt ends well where a mirror only did not answer.
    "list-not-fetched": (
        "listed",
        {},
        listed("W: Failed to fetch https://mirror/InRelease  Could not connect\n"),
        "Could not connect. Nothing was installed, and the driver and its preference are left as they were",
    ),
    "list-locked": (
        "listed",
        {},
        listed("E: Could not get lock /var/lib/apt/lists/lock. It is held by process 9 (apt-get)\n", rc=100),
        "It is held by process 9 (apt-get). Nothing was installed",
    ),
    # An initrd that was not made: the host might not come back.
    "half-done-kernel": (
        "bootable",
        {},
        settled(begun=["initramfs-tools", "linux-image-6.1.0-20-amd64"]),
        "it is not rebooted, since dpkg has begun and not ended initramfs-tools, linux-image-6.1.0-20-amd64; look at",
    ),
    "all-done": ("bootable", {}, settled(), ""),
    "kernel-came": (
        "installed",
        {"kernels": ["linux-image-a=1"]},
        after(kernels=["linux-image-a=1", "linux-image-b=2"]),
        "the installed kernels changed with the driver (linux-image-a=1 to linux-image-a=1, linux-image-b=2); put the",
    ),
    "kernel-went": (
        "installed",
        {"kernels": ["linux-image-a=1"]},
        after(kernels=[]),
        "changed with the driver (linux-image-a=1 to none)",
    ),
    "kernel-renewed": (
        "installed",
        {"kernels": ["linux-image-a=1"]},
        after(kernels=["linux-image-a=1.1"]),
        "changed with the driver (linux-image-a=1 to linux-image-a=1.1)",
    ),
    "kernel-stayed": ("installed", {"kernels": ["linux-image-a=1"]}, after(kernels=["linux-image-a=1"]), ""),
    "no-module": (
        "installed",
        {},
        after(packages={"nvidia-kernel-open-dkms": f"{PIN}-1"}),
        f"DKMS has no module {PIN} for the running kernel 6.1.0-18-amd64 (none); see /var/lib/dkms",
    ),
}


PARTS = (
    "refusals",
    "settings",
    "verify",
    "listed",
    "simulated",
    "removable",
    "installed",
    "brought",
    "removed",
    "bootable",
)


def role(part):
    """A task that does one part of the role."""
    return {"ansible.builtin.include_role": {"name": "kvtrial.vllm.nvidia_driver", "tasks_from": part}}


@pytest.fixture(scope="module")
def said(tmp_path_factory, tools):
    """What each case's host was told; empty where nothing failed."""
    folder = tmp_path_factory.mktemp("driver")
    plays = [
        {
            "hosts": ",".join(name for name in CASES if CASES[name][0] == part),
            "gather_facts": False,
            "tasks": [{"block": [role(part)], "rescue": [{"ansible.builtin.debug": {"msg": "as it should be"}}]}],
        }
        for part in PARTS
    ]
    (folder / "play.yml").write_text(yaml.safe_dump(plays))
    hosts = {
        name: {
            "ansible_connection": "local",
            "__nvidia_driver_look": {"facts": {**FACTS, **facts}},
            **READY,
            **settings,
        }
        for name, (_, facts, settings, _) in CASES.items()
    }
    (folder / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts}}))
    done = tools.run("ansible-playbook", "-i", str(folder / "hosts.yml"), str(folder / "play.yml"))
    found = dict.fromkeys(CASES, "")
    for name, text in re.findall(r"fatal: \[([\w-]+)\]: FAILED! =>(.*?)(?=\n\S|\Z)", done.stdout, re.DOTALL):
        found[name] = " ".join(text.split())
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_told_in_a_sentence(said, name):
    sentence = CASES[name][3]
    assert sentence in said[name] and bool(said[name]) == bool(sentence), said[name]


def test_no_host_is_rebooted_before_its_packages_were_looked_at():
    change = yaml.safe_load((ROOT / "roles" / "nvidia_driver" / "tasks" / "change.yml").read_text())
    names = [task["name"] for task in next(task for task in change if "block" in task)["block"]]
    assert names[-3:] == [
        "Look at every package of the host",
        "Check that the host can be rebooted",
        "Reboot into the other driver",
    ]


def test_a_local_connection_is_never_rebooted(said):
    """Complaint 5."""
    assert "connection local" in said["local-connection"]


DECISIONS = """
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.include_vars: {file: "{{ root }}/roles/nvidia_driver/defaults/main.yml", name: defaults}
    - ansible.builtin.include_vars: {file: "{{ root }}/roles/nvidia_driver/vars/main.yml"}
    - ansible.builtin.debug:
        msg: >-
          {{ inventory_hostname }} changes={{ nvidia_driver_change }} disturbs={{ __nvidia_driver_disturbs }}
          removes={{ __nvidia_driver_removable | join(',') }} loaded={{ nvidia_driver_loaded_version }}
          left={{ __nvidia_driver_left | join(',') }} kept={{ __nvidia_driver_is_kept }}
          lists={{ __nvidia_driver_lists }}
          units={{ __nvidia_driver_units_due }} idle={{ __nvidia_driver_idle_units | join(',') }}.
"""
NOTED = "/etc/apt/kvtrial-nvidia-driver.json"
SOURCES = "/etc/apt/sources.list.d/kvtrial-nvidia-driver.sources"
PREFERENCE = "/etc/apt/preferences.d/kvtrial-nvidia-driver"
NODES = "/etc/systemd/system/kvtrial-nvidia-nodes.service"
ABSENT = {"nvidia_driver_state": "absent"}
OLDER = {"module_version": "570.1.1", "smi_version": "570.1.1"}
GONE = {"packages": {}, "module_version": None, "smi_version": None}
IDLE = {"kvtrial-nvidia-nodes.service": {"active": "inactive", "enabled": False}, **fabric("inactive")}
# name: (facts that differ, settings that differ, what is decided)
DECIDED: dict[str, tuple[dict, dict, str]] = {
    "as-pinned": ({}, {}, f"changes=False disturbs=False removes= loaded={PIN}"),
    "older": (OLDER, {}, "changes=True disturbs=True removes= loaded=570.1.1"),
    # As the command line has it, a string.
    "fabric-told-not": (
        {},
        {"nvidia_driver_fabric_manager": "false", "nvidia_driver_fabric_packages": ["nvidia-fabricmanager"]},
        "changes=False disturbs=False",
    ),
    "not-finished": ({"unfinished": ["libcuda1"]}, {}, "changes=True disturbs=True"),
    # Companions of a distribution, as Debian 13 has them: a reboot at every run, before.
    "companions": (
        {"packages": {"nvidia-driver-cuda": f"{PIN}-1", "nvidia-modprobe": "570.133.07-1"}},
        {},
        "changes=False disturbs=False",
    ),
    "not-ours": (
        OLDER,
        {"nvidia_driver_manage": False},
        "changes=False disturbs=False removes= ",
    ),
    "removal": (
        {"files": {SOURCES: "0", PREFERENCE: "0"}, "record": RECORD},
        ABSENT,
        "changes=True disturbs=True removes=nvidia-driver-c",
    ),
    # Ours, and the removal is told to leave drivers alone: it stays pinned, and known as ours.
    "removal-of-ours-unmanaged": (
        {"files": {SOURCES: "0", PREFERENCE: "0", NODES: "0", NOTED: "0"}, "record": RECORD},
        {**ABSENT, "nvidia_driver_manage": False},
        f"changes=True disturbs=False removes= loaded={PIN} left={NODES} kept=True",
    ),
    "gone-unmanaged": (
        {**GONE, "files": {NOTED: "0"}, "record": RECORD},
        {**ABSENT, "nvidia_driver_manage": False},
        f"left={NOTED} kept=False",
    ),
    # As apt 2.6.1 names its lists.
    "lists-of-nvidia": (
        {},
        {"nvidia_driver_repository_uri": "https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64/"},
        "lists=developer.download.nvidia.com_compute_cuda_repos_debian12_x86%5f64 units",
    ),
    "lists-of-a-bundle": (
        {},
        {"nvidia_driver_debs": "/srv/debs", "nvidia_driver_debs_root": "/var/lib/kvtrial/debs"},
        "lists=_var_lib_kvtrial_debs units",
    ),
    # A driver that was there before is pinned by this project, and upgraded; it does not go with it.
    "removal-of-a-strangers": ({}, ABSENT, "changes=False disturbs=False removes= "),
    "removal-of-a-pinned-strangers": ({"files": {PREFERENCE: "0"}}, ABSENT, "changes=True disturbs=False removes= "),
    "removal-of-an-upgraded-strangers": (
        {"files": {NOTED: "0"}, "record": {"found": {"libcuda1": "570.1.1-1"}, "versions": [PIN]}},
        ABSENT,
        "changes=True disturbs=False removes= ",
    ),
    "removal-of-another-since": (
        {"files": {NOTED: "0"}, "record": {"found": {}, "versions": ["570.1.1"]}},
        ABSENT,
        "changes=True disturbs=False removes= ",
    ),
    # A companion of the distribution's was there before: it stays, the driver does not.
    "removal-but-a-companion": (
        {
            "packages": {"nvidia-driver-cuda": f"{PIN}-1", "nvidia-settings": "535.1.1-1"},
            "record": {"found": {"nvidia-settings": "535.1.1-1"}, "versions": [PIN]},
        },
        ABSENT,
        "changes=True disturbs=True removes=nvidia-driver-cuda loaded",
    ),
    # The packages went and the playbook was cut off: before the reboot, and after it.
    "cut-off-before-the-reboot": (
        {"packages": {}, "files": {SOURCES: "0", PREFERENCE: "0"}, "record": RECORD},
        ABSENT,
        "changes=True disturbs=True removes= ",
    ),
    "cut-off-after-the-reboot": (
        {**GONE, "files": {SOURCES: "0", PREFERENCE: "0"}, "record": RECORD},
        ABSENT,
        "changes=True disturbs=False removes= ",
    ),
    "cut-off-in-the-purge": (
        {**GONE, "configured": ["libcuda1"], "files": {NOTED: "0"}, "record": RECORD},
        ABSENT,
        "changes=True disturbs=True removes=libcuda1 ",
    ),
    "cut-off-at-the-end": (
        {**GONE, "files": {NOTED: "0"}, "record": RECORD},
        ABSENT,
        "changes=True disturbs=False removes= ",
    ),
    "all-gone": (GONE, ABSENT, "changes=False disturbs=False removes= "),
    # Somebody's driver, which came without packages: it is not rebooted away at every run.
    "somebodys-without-packages": ({"packages": {}}, ABSENT, "changes=False disturbs=False removes= "),
    "somebodys-and-our-unit": (
        {"files": {NODES: "0"}},
        {**ABSENT, "nvidia_driver_manage": False},
        "changes=True disturbs=False removes= ",
    ),
    "idle-units": (
        {"units": IDLE, "nvswitch": True},
        {},
        "idle=kvtrial-nvidia-nodes.service,nvidia-fabricmanager.service.",
    ),
    "no-switches": ({"units": IDLE}, {}, "units=True idle=kvtrial-nvidia-nodes.service."),
    "fabric-of-somebodys": (
        {"units": IDLE, "nvswitch": True},
        {"nvidia_driver_manage": False},
        "units=False idle=.",
    ),
    # The node is made on a host whose driver is only looked at where that is asked for.
    "nodes-of-somebodys": (
        {"units": IDLE},
        {"nvidia_driver_manage": False, "nvidia_driver_device_nodes": True},
        "units=True idle=kvtrial-nvidia-nodes.service.",
    ),
    "no-systemd": ({"units": IDLE, "systemd": False}, {}, "units=False"),
}


def decided(tools, folder, *arguments):
    """What the role would do on each made-up host, by name."""
    (folder / "play.yml").write_text(DECISIONS)
    defaults = yaml.safe_load((Path(__file__).parents[2] / "roles/nvidia_driver/defaults/main.yml").read_text())
    hosts = {
        name: {
            "ansible_connection": "local",
            "root": str(Path(__file__).parents[2]),
            **defaults,
            "nvidia_driver_manage": True,
            **READY,
            **NAMED_WELL,
            **settings,
            "__nvidia_driver_look": {"facts": {**FACTS, **facts}},
        }
        for name, (facts, settings, _) in DECIDED.items()
    }
    (folder / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts}}))
    done = tools.run("ansible-playbook", "-i", str(folder / "hosts.yml"), str(folder / "play.yml"), *arguments)
    assert done.returncode == 0, done.stdout
    said = " ".join(done.stdout.split())
    return {
        name: match[1] for name in DECIDED if (match := re.search(rf"\b{name} (changes=.*?idle=\S*\.)(?: |$)", said))
    }


@pytest.fixture(scope="module")
def decisions(tmp_path_factory, tools):
    return decided(tools, tmp_path_factory.mktemp("decided"))


@pytest.mark.parametrize("name", DECIDED)
def test_the_role_changes_what_is_its_own_and_no_more(decisions, name):
    assert DECIDED[name][2] in decisions[name], decisions[name]


def test_in_check_mode_the_driver_that_would_come_is_judged(tmp_path, tools):
    """What comes after the driver, as the engine's wheels, must not be refused for the one that goes."""
    found = decided(tools, tmp_path, "--check")
    assert f"loaded={PIN}" in found["older"] and "loaded=570.1.1" in found["not-ours"]


def test_in_check_mode_a_host_that_is_due_a_driver_is_told_and_does_not_fail(tmp_path, tools):
    play = {"hosts": "all", "gather_facts": False, "tasks": [
        role("refusals"), {"ansible.builtin.debug": {"msg": "told: {{ __nvidia_driver_refusal.msg }}"}}]}  # fmt: skip
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    told = {"__nvidia_driver_look": {"facts": FACTS}, **READY, "nvidia_driver_host_drained": False}
    hosts = {"all": {"hosts": {"h": {"ansible_connection": "local", **told}}}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(hosts))
    command = ("ansible-playbook", "-i", str(tmp_path / "hosts.yml"), str(tmp_path / "play.yml"))
    done = tools.run(*command, "--check")
    said = " ".join(done.stdout.split())
    assert done.returncode == 0 and "told: h: the driver has to be changed" in said, said
    assert tools.run(*command).returncode != 0


MARK = "/etc/apt/kvtrial-nvidia-driver.debs"
ENTRY = """# Made by kvtrial; the driver is pinned in /etc/apt/preferences.d/kvtrial-nvidia-driver.
Types: deb
URIs: file:{}
Suites: ./
Trusted: yes
"""
# name: (files by what they hold, where {} is the folder; the record; whether the folder is this project's)
FOLDERS: dict[str, tuple[dict[str, str], dict | None, bool]] = {
    "somebodys": ({}, None, False),
    "somebodys-with-a-list": ({"{}/Packages": ""}, None, False),
    "somebodys-beside-a-driver-of-ours": ({SOURCES: "of the vendor"}, RECORD, False),
    "marked": ({MARK: "{}\n"}, None, True),
    "mark-of-another": ({MARK: "/srv/other\n"}, None, False),
    # Of the release before: no mark.
    "named-in-the-entry": ({SOURCES: ENTRY}, None, True),
    "of-a-driver-that-was-brought": ({SOURCES: "of the vendor", "{}/Packages": ""}, RECORD, True),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tools):
    """folders(part, **settings): what a part of the role says in check mode, on hosts with a folder of .debs each."""
    base = tmp_path_factory.mktemp("folders")
    hosts = {}
    for name, (files, record, _) in FOLDERS.items():
        (base / name / "debs").mkdir(parents=True)
        (base / name / "debs" / "my-own.deb").write_text("mine")
        debs = str(base / name / "debs")
        found = {
            path.format(debs): hashlib.sha256(text.format(debs).encode()).hexdigest() for path, text in files.items()
        }
        hosts[name] = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "nvidia_driver_debs_root": debs,
            "__nvidia_driver_look": {"facts": {**FACTS, "files": found, "record": record}},
        }
    (base / "brought").mkdir()
    (base / "brought" / "Packages").write_text("")

    def play(part, **settings):
        told = {name: variables | READY | settings for name, variables in hosts.items()}
        (base / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": told}}))
        (base / "play.yml").write_text(yaml.safe_dump([{"hosts": "all", "gather_facts": False, "tasks": [role(part)]}]))
        return tools.run(
            "ansible-playbook", "-i", str(base / "hosts.yml"), str(base / "play.yml"), "--check",
            ANSIBLE_STDOUT_CALLBACK="ansible.builtin.default", ANSIBLE_CALLBACK_RESULT_FORMAT="json",
        ).stdout  # fmt: skip

    play.base = base
    return play


def test_a_removal_takes_the_folder_of_debs_that_this_project_made(folders):
    said = folders("unpin", **ABSENT, nvidia_driver_manage=True)
    gone = set(re.findall(r"changed: \[(\S+)\] => \(item=\S+/debs\)", said))
    assert gone == {name for name, (_, _, ours) in FOLDERS.items() if ours}, said


def test_nothing_is_brought_into_a_folder_of_somebodys(folders):
    said = folders("source", nvidia_driver_manage=True, nvidia_driver_debs=str(folders.base / "brought"))
    refused = dict(re.findall(r'fatal: \[(\S+)\].*"msg": "(.*?)"', said))
    assert set(refused) == {name for name, (_, _, ours) in FOLDERS.items() if not ours}, said
    told = (
        f"nvidia_driver_debs_root={folders.base}/somebodys/debs holds my-own.deb, which this project did not put there"
    )
    assert told in refused["somebodys"]


def test_the_folder_of_debs_is_marked_before_it_is_filled(folders):
    tasks = yaml.safe_load((ROOT / "roles" / "nvidia_driver" / "tasks" / "source.yml").read_text())
    names = [task["name"] for task in tasks]
    assert names.index("Note whose the folder of packages is") + 1 == names.index("Bring the folder of packages")
    facts = yaml.safe_load((ROOT / "roles" / "nvidia_driver" / "vars" / "main.yml").read_text())
    assert facts["__nvidia_driver_traces"][-1] == "{{ __nvidia_driver_record_path }}"
    assert "{{ __nvidia_driver_debs_mark_path }}" in facts["__nvidia_driver_traces"]
