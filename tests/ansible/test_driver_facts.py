"""What a host's files and commands say of its driver, and what has to change against a pin."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ansible_collections.kvtrial.vllm.plugins.filter.driver_due import driver_due
from ansible_collections.kvtrial.vllm.plugins.filter.driver_specs import driver_specs
from ansible_collections.kvtrial.vllm.plugins.module_utils import driver_facts

ROOT = Path(__file__).resolve().parents[2]
DPKG = """\
nvidia-driver-cuda\t580.95.05-1\tinstalled
libnvidia-ml1\t580.95.05-1\thalf-configured
nvidia-container-toolkit\t1.18.0-1\tinstalled
libcuda1\t1:570.86.10-0ubuntu1\tinstalled
nvidia-settings\t580.95.05-1\tconfig-files
linux-image-6.1.0-18-amd64\t6.1.76-1\tinstalled
bash\t5.2-1\tinstalled
"""

# As a host with one NVIDIA H200 (Ubuntu 24.04, driver 580.159.04) gave them on 2026-11-29.
H200_VERSION = """\
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (nixbld@)\x20\x20
GCC version:  gcc version 15.3.0 (GCC)\x20
"""
H200_SMI = "NVIDIA H200, 580.159.04, Disabled, Enabled\n"
H200_DEVICES = """\
195 nvidia
195 nvidiactl
238 nvidia-uvm
239 nvidia-nvswitch
240 nvidia-nvlink
241 nvidia-caps
242 nvidia-caps-imex-channels
"""


def test_packages_of_the_driver_are_told_from_others_of_the_vendor():
    found = driver_facts.parse_packages(DPKG)
    assert found["driver"] == {
        "nvidia-driver-cuda": "580.95.05-1",
        "libnvidia-ml1": "580.95.05-1",
        "libcuda1": "1:570.86.10-0ubuntu1",
    }
    assert found["unfinished"] == ["libnvidia-ml1"]
    assert found["kernels"] == ["linux-image-6.1.0-18-amd64=6.1.76-1"]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023\n", "535.54.03"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs)\n", "580.95.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.95.05  Release Build  (dvs)\n", "580.95.05"),
        ("", None),
    ],
)
def test_the_loaded_module_says_its_version(text, version):
    assert driver_facts.module_version(text) == version


@pytest.mark.parametrize(("system", "version"), [("ubuntu", "22.04"), ("ubuntu", "24.04"), ("debian", "13")])
def test_the_system_is_what_os_release_says(system, version):
    text = f'PRETTY_NAME="Some System"\nID={system}\nID_LIKE=debian\nVERSION_ID="{version}"\nVERSION_CODENAME=x\n'
    assert driver_facts.os_release(text) == {"id": system, "version_id": version}


FAMILIES = {
    "debian": ("1", ["nvidia-driver-cuda", "nvidia-kernel-open-dkms", "libcuda1", "libnvidia-ml1", "libnvidia-nscq",
                     "nvidia-fabricmanager", "libnvcuvid1", "xserver-xorg-video-nvidia"]),
    "ubuntu": ("0ubuntu1", ["nvidia-driver-580-open", "nvidia-dkms-580-open", "libnvidia-compute-580",
                            "nvidia-utils-580", "nvidia-firmware-580", "libnvidia-nscq-580", "nvidia-fabricmanager-580",
                            "xserver-xorg-video-nvidia-580"]),
}  # fmt: skip
"""By distribution: the revision and names of the vendor's packages. No Ubuntu host was to be had; its names are."""
ENTRY = (
    "Package: {}\nVersion: {}\nArchitecture: all\nMaintainer: x <x@example.invalid>\nFilename: ./{}.deb\nSize: 1\n\n"
)


@pytest.mark.skipif(not shutil.which("apt-cache"), reason="asks the real apt, which is not here")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_preference_holds_every_package_of_the_driver_and_no_other(family, tmp_path):
    """Read by the real apt: of two versions the pinned one is the candidate, also under a newer installed one."""
    revision, names = FAMILIES[family]
    texts = yaml.safe_load((ROOT / "roles/nvidia_driver/vars/main.yml").read_text())
    preference = texts["__nvidia_driver_preferences"].replace("{{ nvidia_driver_version }}", "580.95.05")
    (tmp_path / "preferences").write_text(preference)
    others = ["nvidia-container-toolkit", "libnvidia-container1"]
    (tmp_path / "status").write_text("".join(
        ENTRY.format(name, f"580.105.08-{revision}", name).replace("Version", "Status: install ok installed\nVersion")
        for name in names
    ))  # fmt: skip
    versions = [(name, f"{version}-{revision}") for name in names for version in ("580.95.05", "580.105.08")]
    versions += [(name, version) for name in others for version in ("1.17.0-1", "1.18.0-1")]
    (tmp_path / "Packages").write_text("".join(ENTRY.format(name, version, name) for name, version in versions))
    (tmp_path / "sources").write_text(f"deb [trusted=yes] file:{tmp_path} ./\n")
    for folder in ("lists/partial", "cache/archives/partial", "etc"):
        (tmp_path / folder).mkdir(parents=True)
    own = {"Dir::State::status": "status", "Dir::State::lists": "lists", "Dir::Etc::sourcelist": "sources",
           "Dir::Cache": "cache", "Dir::Etc::preferences": "preferences"}  # fmt: skip
    options = [word for name, path in own.items() for word in ("-o", f"{name}={tmp_path / path}")]
    options += ["-o", "Dir::Etc::sourceparts=-", "-o", "Dir::Etc::preferencesparts=-", "-o", "APT::Sandbox::User="]
    subprocess.run(["apt-get", "update", "-q", *options], check=True, capture_output=True)
    asked = [shutil.which("apt-cache"), "policy", *options, *names, *others]
    policy = subprocess.run(asked, check=True, capture_output=True, text=True, env={"LC_ALL": "C"}).stdout
    found = dict(re.findall(r"^(\S+):\n(?:  Installed:.*\n)  Candidate: (\S+)", policy, re.MULTILINE))
    assert found == {**dict.fromkeys(names, f"580.95.05-{revision}"), **dict.fromkeys(others, "1.18.0-1")}


def test_dkms_is_read_with_and_without_a_slash():
    text = "nvidia/580.95.05, 6.1.0-18-amd64, x86_64: installed\nnvidia, 570.1.2, 6.1.0-17-amd64, x86_64: added\n"
    assert driver_facts.parse_dkms(text) == [
        {"module": "nvidia", "version": "580.95.05", "kernel": "6.1.0-18-amd64", "status": "installed"},
        {"module": "nvidia", "version": "570.1.2", "kernel": "6.1.0-17-amd64", "status": "added"},
    ]


def test_a_real_host_is_read_as_what_it_is():
    assert driver_facts.module_version(H200_VERSION) == "580.159.04"
    assert driver_facts.parse_gpus(H200_SMI) == [
        {"name": "NVIDIA H200", "driver_version": "580.159.04", "mig": False, "persistence_mode": "Enabled"}
    ]


def test_an_engines_unit_names_the_devices_as_a_real_host_does():
    """A wrong name hides the GPU, and systemd says nothing. NVLink and IMEX between hosts are no engine's business."""
    unit = (ROOT / "roles/engine/templates/kvtrial-engine@.service.j2").read_text()
    allowed = set(re.findall(r"^DeviceAllow=char-(\S+) rw$", unit, re.MULTILINE))
    there = set(H200_DEVICES.split()[1::2])
    assert there - allowed == {"nvidia-nvlink", "nvidia-caps-imex-channels"}
    # The first device under its former name.
    assert allowed - there == {"nvidia-frontend"}


@pytest.mark.parametrize(("value", "answer"), [(1, True), (0, False)])
def test_secure_boot_is_the_fifth_byte(tmp_path, value, answer):
    (tmp_path / "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c").write_bytes(b"\6\0\0\0" + bytes([value]))
    assert driver_facts.secure_boot(str(tmp_path)) is answer
    assert driver_facts.secure_boot(str(tmp_path / "none")) is None


def test_mig_is_on_only_where_it_says_enabled():
    text = "NVIDIA H200, 580.95.05, Enabled, Enabled\nNVIDIA L4, 580.95.05, [N/A], Disabled\n"
    assert [gpu["mig"] for gpu in driver_facts.parse_gpus(text)] == [True, False]


def test_nvswitches_are_bridges_of_the_vendor(tmp_path):
    device = tmp_path / "pci" / "0000:05:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x068000\n")
    assert driver_facts.has_nvswitch(str(tmp_path / "dev"), str(tmp_path / "pci"))
    (device / "class").write_text("0x030200\n")
    assert not driver_facts.has_nvswitch(str(tmp_path / "dev"), str(tmp_path / "pci"))


def test_the_holder_of_apts_lock_is_named(tmp_path):
    path = tmp_path / "lock-frontend"
    path.write_text("")
    assert driver_facts.lock_holder(str(path)) is None
    hold = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, 2); print('held', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        found = driver_facts.lock_holder(str(path))
        assert found["pid"] == holder.pid and found["command"].startswith("python")
        assert driver_facts.lock_holder("/nonexistent", __file__, str(path)) == found
        holder.communicate("\n")
    assert driver_facts.lock_holder(str(path)) is None


def test_also_the_lock_of_an_update_of_apts_lists_is_looked_at():
    assert {"/var/lib/dpkg/lock-frontend", "/var/lib/apt/lists/lock"} <= set(driver_facts.LOCKS)


PIN = "580.95.05"


def test_a_package_is_due_where_it_is_missing_or_at_another_version():
    wanted = driver_specs(["nvidia-driver-cuda", "libnvidia-nscq=580.95.05-1"], PIN)
    assert wanted == ["nvidia-driver-cuda=580.95.05-*", "libnvidia-nscq=580.95.05-1"]
    installed = {"nvidia-driver-cuda": "580.95.05-0ubuntu1", "libnvidia-nscq": "580.95.05-2"}
    assert driver_due(installed, wanted, PIN) == ["libnvidia-nscq 580.95.05-2"]
    assert driver_due({}, wanted, PIN) == ["libnvidia-nscq missing", "nvidia-driver-cuda missing"]


def test_a_library_that_came_along_at_another_version_is_due_too():
    """Complaints 1 and 7: an upgraded library or fabric manager beside an older driver."""
    installed = {
        "nvidia-driver-cuda": "580.95.05-1",
        "nvidia-fabricmanager": "580.105.08-1",
        "libcuda1": "1:580.95.05-1",
    }
    assert driver_due(installed, [], PIN) == ["nvidia-fabricmanager 580.105.08-1"]
