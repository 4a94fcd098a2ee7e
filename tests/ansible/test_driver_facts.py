"""What a host's files and commands say of its driver, and what has to change against a pin."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest
import yaml
from ansible_collections.kvtrial.vllm.plugins.filter.driver_changes import driver_changes
from ansible_collections.kvtrial.vllm.plugins.filter.driver_due import driver_due
from ansible_collections.kvtrial.vllm.plugins.filter.driver_held import driver_held
from ansible_collections.kvtrial.vllm.plugins.filter.driver_specs import driver_specs
from ansible_collections.kvtrial.vllm.plugins.filter.driver_stays import driver_stays
from ansible_collections.kvtrial.vllm.plugins.module_utils import driver_facts

ROOT = Path(__file__).resolve().parents[2]
DPKG = """\
nvidia-driver-cuda\t580.95.05-1\tinstalled
libnvidia-ml1\t580.95.05-1\thalf-configured
nvidia-container-toolkit\t1.18.0-1\tinstalled
libcuda1\t1:570.86.10-0ubuntu1\tinstalled
nvidia-settings\t580.95.05-1\tconfig-files
nvidia-smi\t\thalf-installed
nvidia-cuda-toolkit\t12.4.131~12.4.1-2\thalf-configured
man-db\t2.11.2-2\ttriggers-pending
libc-bin\t2.36-9+deb12u9\ttriggers-pending
openssh-server\t1:9.2p1-2\thalf-configured
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
        "nvidia-smi": "",
    }
    assert found["configured"] == ["nvidia-settings"]
    assert found["kernels"] == ["linux-image-6.1.0-18-amd64=6.1.76-1"]


def test_only_the_drivers_own_packages_make_it_unfinished():
    """Not man-db's pending trigger, nor a package of the vendor's that is not the driver's."""
    assert driver_facts.parse_packages(DPKG)["unfinished"] == ["libnvidia-ml1", "nvidia-smi"]


def test_every_package_that_dpkg_has_not_ended_is_told():
    """A host whose initrd or kernel is among them may not come back from a reboot."""
    lines = "initramfs-tools\t0.142\ttriggers-pending\nlinux-image-6.1.0-18-amd64\t6.1.76-1\thalf-configured\n"
    assert driver_facts.parse_packages(DPKG + lines)["begun"] == [
        "initramfs-tools",
        "libc-bin",
        "libnvidia-ml1",
        "linux-image-6.1.0-18-amd64",
        "man-db",
        "nvidia-cuda-toolkit",
        "nvidia-smi",
        "openssh-server",
    ]


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
    "debian": (
        "1",
        """cuda-drivers firmware-nvidia-gsp libcuda1 libcudadebugger1 libegl-nvidia0 libgl1-nvidia-glvnd-glx
        libgles-nvidia1 libgles-nvidia2 libglx-nvidia0 libnvcuvid1 libnvidia-allocator1 libnvidia-api1 libnvidia-cfg1
        libnvidia-eglcore libnvidia-encode1 libnvidia-fbc1 libnvidia-glcore libnvidia-glvkspirv libnvidia-gpucomp
        libnvidia-ml1 libnvidia-ngx1 libnvidia-nscq libnvidia-nvvm4 libnvidia-opticalflow1 libnvidia-pkcs11-openssl3
        libnvidia-present libnvidia-ptxjitcompiler1 libnvidia-rtcore libnvidia-sandboxutils libnvidia-vksc-core
        libnvoptix1 libnvsdm libxnvctrl0 nvidia-driver nvidia-driver-cuda nvidia-driver-libs nvidia-egl-icd
        nvidia-fabricmanager nvidia-imex nvidia-kernel-dkms nvidia-kernel-open-dkms nvidia-kernel-support
        nvidia-modprobe nvidia-open nvidia-opencl-icd nvidia-persistenced nvidia-settings nvidia-smi
        nvidia-vdpau-driver nvidia-vulkan-icd nvidia-xconfig xserver-xorg-video-nvidia""",
    ),
    "ubuntu": (
        "0ubuntu1",
        """cuda-drivers cuda-drivers-580 libnvidia-cfg1-580 libnvidia-common-580 libnvidia-compute-580
        libnvidia-decode-580 libnvidia-encode-580 libnvidia-extra-580 libnvidia-fbc1-580 libnvidia-gl-580
        libnvidia-gpucomp libnvidia-gpucomp-580 libnvidia-nscq libnvidia-nscq-580 libnvsdm libxnvctrl0
        nvidia-compute-utils-580 nvidia-dkms-580-open nvidia-dkms-open nvidia-driver-580-open nvidia-driver-open
        nvidia-fabricmanager-580 nvidia-firmware-580-580.95.05 nvidia-kernel-common-580 nvidia-kernel-source-580-open
        nvidia-modprobe nvidia-open nvidia-settings nvidia-utils-580 xserver-xorg-video-nvidia-580""",
    ),
}
"""By distribution: the revision and names of the vendor's packages, as hosts list them (Debian, 580.105.08) and as the
vendor's guide does (Ubuntu, also after the renaming in branch 590). No Ubuntu host was to be had."""
NOT_THE_DRIVERS = """nvidia-container-toolkit libnvidia-container1 libnvidia-container-tools libnvidia-egl-wayland1
    firmware-nvidia-graphics libnvjpeg12 libcudart12 cuda-toolkit-13-0 linux-image-amd64 libgles2 libglx0"""
ENTRY = (
    "Package: {}\nVersion: {}\nArchitecture: all\nMaintainer: x <x@example.invalid>\nFilename: ./{}.deb\nSize: 1\n\n"
)


@pytest.mark.skipif(not shutil.which("apt-cache"), reason="asks the real apt, which is not here")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_preference_holds_every_package_of_the_driver_and_no_other(family, tmp_path):
    """Read by the real apt: of two versions the pinned one is the candidate, also under a newer installed one."""
    revision, names = FAMILIES[family][0], FAMILIES[family][1].split()
    texts = yaml.safe_load((ROOT / "roles/nvidia_driver/vars/main.yml").read_text())
    preference = texts["__nvidia_driver_preferences"].replace("{{ nvidia_driver_version }}", "580.95.05")
    (tmp_path / "preferences").write_text(preference)
    others = NOT_THE_DRIVERS.split()
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


@pytest.mark.parametrize("family", FAMILIES)
def test_unattended_upgrades_leave_alone_what_is_installed_of_the_driver_and_nothing_else(family):
    """As unattended-upgrades reads it: from the name's start. What else it holds back gets no security upgrade."""
    revision, names = FAMILIES[family][0], FAMILIES[family][1].split()
    listing = "".join(f"{name}\t580.95.05-{revision}\tinstalled\n" for name in names)
    others = [
        *NOT_THE_DRIVERS.split(),
        "libnvme1",
        "libnvpair3linux",
        "libnvinfer10",
        "nvidia-cuda-toolkit",
    ]
    listing += "".join(f"{name}\t1.18.0-1\tinstalled\n" for name in others)
    packages = driver_facts.parse_packages(listing)["driver"]
    held = driver_held(packages, "580.95.05")
    assert [name for name in names if not any(re.match(pattern, name) for pattern in held)] == []
    more = [*others, *(f"{name}-more" for name in names)]
    assert [name for name in more if any(re.match(pattern, name) for pattern in held)] == []


def test_a_companion_of_another_version_gets_its_upgrades():
    packages = {
        "nvidia-settings": "535.1.1-1",
        "libcuda1": "580.95.05-1",
        "nvidia-firmware-580-580.82.07": "580.82.07-1",
    }
    assert driver_held(packages, "580.95.05") == ["^libcuda1$"]
    assert driver_held({"nvidia-firmware-580-580.82.07": "580.82.07-1"}, "580.82.07") == [
        r"^nvidia-firmware-580-580\.82\.07$"
    ]


@pytest.mark.skipif(not shutil.which("apt-config"), reason="asks the real apt, which is not here")
def test_the_exclusion_is_read_by_apt_as_it_is_meant(tmp_path):
    text = yaml.safe_load((ROOT / "roles/nvidia_driver/vars/main.yml").read_text())["__nvidia_driver_upgrades"]
    held = ["^libcuda1$", r"^nvidia-firmware-580-580\.82\.07$"]
    (tmp_path / "51").write_text(jinja2.Template(text).render(__nvidia_driver_held=held))
    asked = ["apt-config", "dump", "--format", "%v%n", "Unattended-Upgrade::Package-Blacklist"]
    done = subprocess.run(asked, env={"APT_CONFIG": str(tmp_path / "51"), "PATH": "/usr/bin:/bin"}, check=True,
                          capture_output=True, text=True)  # fmt: skip
    assert done.stdout.split() == held


def test_whose_the_driver_is_is_what_its_record_says():
    mine, now = {"found": {}, "versions": ["570.1.1", "580.95.05"]}, {"libcuda1": "580.95.05-1"}
    assert driver_stays(now, mine) == driver_stays({}, None) == ""
    # Killed in the middle of an upgrade, and with a companion of the distribution's beside it.
    assert driver_stays({"libcuda1": "570.1.1-1", "nvidia-smi": ""}, mine) == ""
    assert driver_stays(now, {**mine, "found": {"nvidia-settings": "535.1.1-1"}}) == ""
    assert driver_stays(now, None) == "this project did not bring it"
    found = {"libcuda1": "560.1.1-1", "nvidia-smi": "560.1.1-1"}
    assert driver_stays(now, {**mine, "found": found}) == (
        "one was there before this project (libcuda1 560.1.1-1 and so on)"
    )
    assert driver_stays({"libcuda1": "590.1.1-1"}, mine) == (
        "this project brought 570.1.1, 580.95.05, and somebody another one since"
    )


def test_an_interrupted_dpkg_is_seen_by_its_journal(tmp_path):
    (tmp_path / "updates").mkdir()
    (tmp_path / "updates" / "tmp.i").touch()
    assert not driver_facts.has_journal(str(tmp_path)) and not driver_facts.has_journal(str(tmp_path / "none"))
    (tmp_path / "updates" / "0003").touch()
    assert driver_facts.has_journal(str(tmp_path))


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


def test_a_companion_may_have_a_version_of_its_own():
    """Debian 13 ships nvidia-modprobe 570.133.07 beside a driver 550.163.01: nothing is installed again for it."""
    installed = {"nvidia-driver-cuda": "580.95.05-1", "nvidia-modprobe": "570.133.07-1", "nvidia-settings": "535.1.1-1",
                 "nvidia-persistenced": "535.171.04-1~deb12u1", "nvidia-xconfig": "535.171.04-1"}  # fmt: skip
    wanted = driver_specs(["nvidia-driver-cuda"], PIN)
    assert driver_due(installed, wanted, PIN) == []
    # But where it is asked for, it is brought.
    wanted = driver_specs(["nvidia-driver-cuda", "nvidia-persistenced"], PIN)
    assert driver_due(installed, wanted, PIN) == ["nvidia-persistenced 535.171.04-1~deb12u1"]


def test_a_package_with_its_version_in_its_name_is_not_the_driver_at_another_one():
    """Ubuntu's firmware of the driver before stays installed beside that of the new one."""
    wanted = ["nvidia-driver-580-open=580.95.05*"]
    installed = {
        "nvidia-driver-580-open": "580.95.05-0ubuntu1",
        "nvidia-firmware-580-580.82.07": "580.82.07-0ubuntu1",
        "nvidia-firmware-580-580.95.05": "580.95.05-0ubuntu1",
    }
    assert driver_due(installed, wanted, PIN) == []
    assert driver_due(installed | {"nvidia-utils-580": "580.82.07-0ubuntu1"}, wanted, PIN) == [
        "nvidia-utils-580 580.82.07-0ubuntu1"
    ]


def held(proc, pid, command, *paths):
    """A process of a made-up /proc with files open."""
    proc(pid, command)
    folder = Path(proc.root) / str(pid)
    (folder / "comm").write_text(command.split("/")[-1][:15] + "\n")
    (folder / "fd").mkdir()
    for number, path in enumerate(paths):
        (folder / "fd" / str(number)).symlink_to(path)


def test_whoever_has_a_device_open_or_mapped_uses_the_gpu(proc):
    """Also where nvidia-smi fails, as it does where library and module differ.

    On a host with an H200 (driver 580.159.04) a process with one CUDA context had more than 20 such files open and 31
    mappings (2026-11-30); with persistence mode on and no process there was none.
    """
    held(proc, 7, "python3", "/dev/null", "/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm")
    held(proc, 8, "bash", "/dev/null")
    held(proc, 9, "nvidia-persistenced", "/dev/nvidia0")
    held(proc, 11, "nv-fabricmanager", "/dev/nvidia-nvswitch0")
    held(proc, 10, "trainer")
    (Path(proc.root) / "10" / "maps").write_text("7f00-7f01 rw-s 0 00:05 9                          /dev/nvidia0\n")
    found = driver_facts.device_users(proc.root)
    assert found == {
        "users": {7: "python3", 9: "nvidia-persiste", 10: "trainer", 11: "nv-fabricmanage"},
        "handles": 6,
        "unreadable": 0,
    }
    # The driver's own daemons compute nothing; what nvidia-smi names already is not named twice.
    assert driver_facts.busy([], found) == ["7 python3", "10 trainer"]
    assert driver_facts.busy(["7 /usr/bin/python3"], found) == ["7 /usr/bin/python3", "10 trainer"]


def test_a_process_that_hides_its_files_is_counted(proc, monkeypatch):
    held(proc, 7, "python3", "/dev/nvidia0")
    listdir = driver_facts.os.listdir

    def refused(path):
        if path.endswith("/7/fd"):
            raise PermissionError(path)
        return listdir(path)

    monkeypatch.setattr(driver_facts.os, "listdir", refused)
    assert driver_facts.device_users(proc.root) == {"users": {}, "handles": 0, "unreadable": 1}


def test_the_kernel_counts_who_has_the_driver_open(tmp_path):
    """References of its own modules to each other are none of a process."""
    for name, count, holders in (("nvidia", 5, ["nvidia_uvm", "nvidia_modeset"]), ("nvidia_uvm", 2, [])):
        (tmp_path / name / "holders").mkdir(parents=True)
        (tmp_path / name / "refcnt").write_text(f"{count}\n")
        for holder in holders:
            (tmp_path / name / "holders" / holder).mkdir()
    assert driver_facts.module_opens(str(tmp_path)) == 5
    assert driver_facts.module_opens(str(tmp_path / "none")) == 0


MISMATCH = "Failed to initialize NVML: Driver/library version mismatch"


@pytest.mark.parametrize(
    ("error", "loaded", "handles", "unreadable", "opens", "why"),
    [
        ("", True, 0, 9, 9, ""),
        (MISMATCH, False, 0, 9, 0, ""),
        (MISMATCH, True, 0, 0, 0, ""),
        (MISMATCH, True, 3, 0, 3, ""),
        (MISMATCH, True, 0, 2, 0, f"nvidia-smi fails ({MISMATCH}), and 2 processes do not show their open files"),
        (MISMATCH, True, 0, 1, 0, f"nvidia-smi fails ({MISMATCH}), and 1 process does not show its open files"),
        (MISMATCH, True, 1, 0, 3, f"nvidia-smi fails ({MISMATCH}), and the loaded module has 2 users more than"),
        (MISMATCH, True, 0, 0, 1, f"nvidia-smi fails ({MISMATCH}), and the loaded module has 1 user more than"),
    ],
)
def test_what_nobody_can_say_is_not_taken_for_idle(error, loaded, handles, unreadable, opens, why):
    found = {"users": {}, "handles": handles, "unreadable": unreadable}
    said = driver_facts.why_unknown(error, loaded, found, opens)
    assert said.startswith(why) and bool(said) == bool(why)


def test_units_are_read_as_systemd_shows_them():
    text = "Id=kvtrial-nvidia-nodes.service\nActiveState=active\nUnitFileState=enabled\n\n"
    text += "Id=nvidia-fabricmanager.service\nActiveState=failed\nUnitFileState=disabled\n\n"
    assert driver_facts.parse_units(text + "Id=x.service\nActiveState=inactive\nUnitFileState=\n") == {
        "kvtrial-nvidia-nodes.service": {"active": "active", "enabled": True},
        "nvidia-fabricmanager.service": {"active": "failed", "enabled": False},
        "x.service": {"active": "inactive", "enabled": False},
    }


def test_the_node_that_cuda_needs_is_made_once_with_the_number_that_the_kernel_gives(tmp_path):
    """What the unit runs at boot, in a made-up /dev and /proc; on real hosts: tests/fleet/test_provision.py."""
    texts = yaml.safe_load((ROOT / "roles/nvidia_driver/vars/main.yml").read_text())
    unit = texts["__nvidia_driver_nodes"].replace("\\\n", " ")
    (script,) = re.findall(r"^ExecStart=sh -ec '(.*)'$", unit, re.MULTILINE)
    node, devices, calls = tmp_path / "nvidia-uvm", tmp_path / "devices", tmp_path / "calls"
    devices.write_text("Character devices:\n" + H200_DEVICES)
    (tmp_path / "mknod").write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    (tmp_path / "mknod").chmod(0o755)
    script = script.replace("$$", "$").replace("/dev/nvidia-uvm", str(node)).replace("/proc/devices", str(devices))
    run = {"env": {"PATH": f"{tmp_path}:/usr/bin:/bin"}, "check": True}
    subprocess.run(["sh", "-ec", script], **run)
    assert calls.read_text() == f"-m 0666 {node} c 238 0\n"
    assert not driver_facts.is_node(str(node)) and driver_facts.is_node("/dev/null")
    subprocess.run(["sh", "-ec", script.replace(str(node), "/dev/null")], **run)
    assert calls.read_text().count("\n") == 1


def test_what_changed_is_said_thing_by_thing():
    before = {"packages": {"libcuda1": "570.1.1-1", "gone": "1"}, "module_version": None, "kernel": "6.1", "files": {},
              "kernels": ["linux-image-a=1"], "units": {}}  # fmt: skip
    after = {"packages": {"libcuda1": "580.1.1-1", "new": "2"}, "module_version": "580.1.1", "kernel": "6.1",
             "files": {"/p": "0"}, "kernels": ["linux-image-a=1"],
             "units": {"u.service": {"active": "active", "enabled": True}}}  # fmt: skip
    assert driver_changes(before, after) == [
        "loaded module none to 580.1.1",
        "package gone 1 to none",
        "package libcuda1 570.1.1-1 to 580.1.1-1",
        "package new none to 2",
        "unit u.service none to active, enabled",
        "/p written",
    ]
    assert driver_changes(after, after) == []
    other = {**after, "kernels": ["linux-image-b=1"], "files": {"/p": "1"}}
    assert driver_changes(after, other) == [
        "/p rewritten",
        "kernel linux-image-b=1 brought",
        "kernel linux-image-a=1 removed",
    ]
    assert driver_changes(other, {**other, "files": {}}) == ["/p removed"]
