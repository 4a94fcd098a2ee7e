"""What the role nvidia_driver refuses, on planted facts: one made-up host a case, none of which is asked."""

import hashlib
import re
from pathlib import Path

import pytest
import yaml

PIN = "580.95.05"
FACTS = {
    "packages": {"nvidia-driver-cuda": f"{PIN}-1"},
    "unfinished": [],
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
    "nvswitch": False,
    "os": {"id": "debian", "version_id": "12"},
    "architecture": "x86_64",
    "apt_lock": None,
    "files": {},
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
UBUNTU = {**NAMED_WELL, "nvidia_driver_packages": ["nvidia-driver-580-open", "libnvidia-compute-580"]}


def on(system: str, version: str, architecture: str = "x86_64") -> dict:
    """Facts of a host with another system."""
    return {"os": {"id": system, "version_id": version}, "architecture": architecture}


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
    "secure-boot": ("refusals", {"secure_boot": True}, {}, "secure boot is on, and a module that DKMS builds is not"),
    "signed": ("refusals", {"secure_boot": True}, {"nvidia_driver_secure_boot_signed": True}, "which it never reboots"),
    "no-headers": ("refusals", {"headers": False}, {}, "install linux-headers-6.1.0-18-amd64"),
    "no-pin": ("settings", {}, {**NAMED, "nvidia_driver_version": ""}, "nvidia_driver_version=(empty)"),
    "no-packages": ("settings", {}, {**NAMED, "nvidia_driver_packages": []}, "do not name a driver; set the exact"),
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
    "agrees": ("verify", {}, {}, ""),
}


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
        for part in ("refusals", "settings", "verify")
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


def test_a_local_connection_is_never_rebooted(said):
    """Complaint 5."""
    assert "connection local" in said["local-connection"]
