"""What the role nvidia_driver refuses, on planted facts: what no test host can have, or must never do."""

import json

import pytest

PLAY = """
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.include_vars: {file: "{{ root }}/roles/nvidia_driver/defaults/main.yml"}
    - ansible.builtin.include_vars: {file: "{{ root }}/roles/nvidia_driver/vars/main.yml"}
    - ansible.builtin.include_tasks: "{{ root }}/roles/nvidia_driver/tasks/{{ part }}.yml"
"""
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
}
READY = {"nvidia_driver_host_drained": True, "nvidia_driver_reboot_allowed": True, "nvidia_driver_version": PIN}


@pytest.fixture
def play(tmp_path, tools):
    """Run one file of the role's tasks on planted facts; (status, what was said)."""

    def run(part, connection="local", facts=None, **settings):
        from conftest import ROOT

        (tmp_path / "play.yml").write_text(PLAY)
        (tmp_path / "hosts.yml").write_text("all: {hosts: {box: {ansible_connection: local}}}\n")
        extra = {
            "root": str(ROOT),
            "part": part,
            "nvidia_driver_facts": {**FACTS, **(facts or {})},
            "ansible_connection": connection,
            **READY,
            **settings,
        }
        done = tools.run(
            "ansible-playbook", "-i", str(tmp_path / "hosts.yml"), str(tmp_path / "play.yml"), "-e", json.dumps(extra)
        )
        return done.returncode, " ".join(done.stdout.split())

    return run


def test_a_local_connection_is_never_rebooted(play):
    """Complaint 5: also where a reboot is allowed."""
    status, said = play("refusals")
    assert status != 0
    assert "this playbook runs on the host itself (connection local), which it never reboots" in said


def test_secure_boot_is_refused_unless_the_module_is_signed(play):
    status, said = play("refusals", facts={"secure_boot": True})
    assert status != 0 and "box: secure boot is on, and a module that DKMS builds is not signed" in said
    _, said = play("refusals", facts={"secure_boot": True}, nvidia_driver_secure_boot_signed=True)
    assert "secure boot is on" not in said


def test_nvswitches_without_a_fabric_manager_are_refused(play):
    settings = {"nvidia_driver_packages": ["nvidia-driver-cuda"], "nvidia_driver_debs": "/nowhere"}
    status, said = play("settings", facts={"nvswitch": True}, **settings)
    assert status != 0 and "this host has NVSwitches, whose fabric manager must have the version of the driver" in said


def test_another_system_is_refused(play):
    status, said = play(
        "settings",
        facts={"os": {"id": "debian", "version_id": "11"}},
        nvidia_driver_packages=["nvidia-driver-cuda"],
    )
    assert status != 0 and "box is debian 11 on x86_64; drivers are brought to Debian 12 and 13" in said


DISAGREE = {
    "module": ({"module_version": "570.86.10"}, "nvidia-smi says driver 580.95.05, the loaded module is 570.86.10"),
    "pin": ({"module_version": "570.1.1", "smi_version": "570.1.1"}, f"the loaded module is 570.1.1, the pin is {PIN}"),
    "nothing": ({"smi_version": None, "smi_error": "nvidia-smi is not installed"}, "nvidia-smi is not installed"),
    "mig": ({"gpus": [{**FACTS["gpus"][0], "mig": True}]}, "MIG is on for 1 of 1 GPUs"),
    "library": ({"packages": {"libcuda1": "580.105.08-1"}}, "libcuda1 580.105.08-1 is of another version"),
}


@pytest.mark.parametrize(("facts", "sentence"), DISAGREE.values(), ids=DISAGREE.keys())
def test_the_end_compares_smi_module_packages_and_pin(play, facts, sentence):
    status, said = play("verify", facts=facts)
    assert status != 0 and sentence in said


def test_a_driver_that_agrees_passes(play):
    assert play("verify")[0] == 0
