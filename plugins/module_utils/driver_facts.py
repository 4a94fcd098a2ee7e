# Licensed under the Apache License, Version 2.0
"""Facts about a host's NVIDIA driver, as files and commands tell them. Standard library only, Python 3.8 and newer.

Every function takes text, or the root that it reads, so that tests can pass a made-up machine.
"""

from __future__ import annotations

import csv
import fcntl
import glob
import os
import re
import stat
import struct

from ansible_collections.kvtrial.vllm.plugins.module_utils import processes

GPU_FIELDS = ("name", "driver_version", "mig.mode.current", "persistence_mode")
# Names of the driver's own packages in the vendor's repositories for Debian and Ubuntu; those with a version of their
# own (the container toolkit, say) are told apart by the version's form. The role's preference and its exclusion from
# unattended upgrades name the same; a test holds the three together.
FAMILY = re.compile(
    r"^(lib)?nvidia-|^firmware-nvidia-gsp|^lib(egl|gl1|gles|glx)-nvidia|^libnv(cuvid|optix|sdm)|^libxnvctrl"
    r"|^libcuda(1|debugger1)$|^cuda-drivers|^xserver-xorg-video-nvidia"
)
# Built from sources of their own: distributions ship them at another version than the driver, with which they work.
COMPANIONS = (
    "nvidia-modprobe",
    "nvidia-persistenced",
    "nvidia-settings",
    "nvidia-xconfig",
    "libxnvctrl0",
    "libxnvctrl-dev",
)
# The driver's own daemons and NVIDIA's monitor: they hold a device open and compute nothing.
WATCHERS = (
    "dcgm-exporter",
    "nv-fabricmanager",
    "nv-hostengine",
    "nvidia-imex",
    "nvidia-persistenced",
    "nvidia-smi",
)
COMM_LENGTH = 15
MODULES = ("nvidia", "nvidia_uvm", "nvidia_modeset")
DRIVER_VERSION = re.compile(r"^(?:\d+:)?(\d{3}\.\d+(?:\.\d+)?)-")
MODULE_VERSION = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)")
NVIDIA_VENDOR = "0x10de"
BRIDGE_CLASS = "0x0680"


def module_version(text):
    """The version in /proc/driver/nvidia/version; None without a loaded module."""
    found = MODULE_VERSION.search(text)
    return found.group(1) if found else None


def upstream_version(package_version):
    """580.95.05 of 580.95.05-1 or 1:580.95.05-0ubuntu1; None for a version that is no driver's."""
    found = DRIVER_VERSION.match(package_version)
    return found.group(1) if found else None


def parse_packages(text):
    """{driver, unfinished, begun, configured, kernels} of dpkg-query's lines: package, version, status, tabs between.

    driver: {name: version} of the driver's installed packages. unfinished: names of those that dpkg has begun and not
    ended. begun: the same of all packages, whosever they are. configured: names of those that were removed and left
    their configuration. kernels: installed images, sorted.
    """
    driver, unfinished, begun, configured, kernels = {}, [], [], [], []
    for line in text.splitlines():
        fields = line.split("\t")
        if len(fields) != 3:
            continue
        name, version, status = fields
        # A package that dpkg was killed over may have no version yet.
        ours = FAMILY.search(name) and (not version or upstream_version(version))
        if status in ("half-installed", "half-configured", "unpacked", "triggers-awaited", "triggers-pending"):
            begun.append(name)
            if ours:
                unfinished.append(name)
        if ours and status == "config-files":
            configured.append(name)
        if status in ("not-installed", "config-files"):
            continue
        if ours:
            driver[name] = version
        if name.startswith("linux-image-"):
            kernels.append("%s=%s" % (name, version))
    return {
        "driver": driver,
        "unfinished": sorted(unfinished),
        "begun": sorted(set(begun)),
        "configured": sorted(configured),
        "kernels": sorted(kernels),
    }


def parse_dkms(text):
    """`dkms status` as [{module, version, kernel, status}].

    A line: "nvidia/580.95.05, 6.1.0-18-amd64, x86_64: installed".
    """
    found = []
    for line in text.splitlines():
        match = re.match(r"^([^/,]+)[/,]\s*([^,]+),\s*([^,]+),\s*[^:]+:\s*(\S+)", line.strip())
        if match:
            module, version, kernel, status = (part.strip() for part in match.groups())
            found.append({"module": module, "version": version, "kernel": kernel, "status": status.rstrip("!")})
    return found


def parse_gpus(text):
    """`nvidia-smi --query-gpu=<GPU_FIELDS>` in CSV as [{name, driver_version, mig, persistence_mode}]."""
    gpus = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) == len(GPU_FIELDS):
            name, version, mig, persistence = (field.strip() for field in row)
            gpus.append(
                {"name": name, "driver_version": version, "mig": mig == "Enabled", "persistence_mode": persistence}
            )
    return gpus


def parse_processes(text):
    """`nvidia-smi --query-compute-apps=pid,process_name --format=csv,noheader` as ["PID NAME"]."""
    rows = [row for row in csv.reader(text.splitlines(), skipinitialspace=True) if row and row[0].strip().isdigit()]
    return ["%s %s" % (row[0].strip(), row[1].strip() if len(row) > 1 else "") for row in rows]


def device_users(proc="/proc", prefix="/dev/nvidia"):
    """{users, handles, unreadable}: who has a node of the driver open or mapped.

    users: {pid: name}. handles: how many open files and mappings of nodes were seen. unreadable: how many processes did
    not show theirs, as those of others do to anybody but root.
    """
    users, handles, unreadable = {}, 0, 0
    for pid in processes.all_pids(proc):
        folder = os.path.join(proc, str(pid))
        try:
            held = [_link(os.path.join(folder, "fd", name)) for name in os.listdir(os.path.join(folder, "fd"))]
            with open(os.path.join(folder, "maps"), "rb") as file:
                held += [line.split(None, 5)[-1].decode("utf-8", "replace") for line in file if b"/" in line]
        except PermissionError:
            unreadable += 1
            continue
        except OSError:
            continue
        seen = sum(path.startswith(prefix) for path in held)
        if seen:
            handles += seen
            users[pid] = processes.read_text(os.path.join(folder, "comm"), 64).strip()
    return {"users": users, "handles": handles, "unreadable": unreadable}


def _link(path):
    """What a link says; empty where it is gone."""
    try:
        return os.readlink(path)
    except PermissionError:
        raise
    except OSError:
        return ""


def module_opens(sys="/sys/module"):
    """How many open files the kernel counts on the driver's modules: their references but for those of each other.

    0 where the kernel can't unload modules, as that of the host with an H200 that was looked at: it keeps no count.
    """
    opens = 0
    for name in MODULES:
        count = processes.read_text(os.path.join(sys, name, "refcnt"), 64).strip()
        if count.lstrip("-").isdigit():
            opens += max(0, int(count) - len(glob.glob(os.path.join(sys, name, "holders", "*"))))
    return opens


def busy(smi_processes, found):
    """["PID NAME"] of the processes on the GPUs: what nvidia-smi names, and whoever else has a node in hand.

    found: as device_users gives it.
    """
    named = {line.split(" ")[0] for line in smi_processes}
    watchers = {name[:COMM_LENGTH] for name in WATCHERS}
    others = [(pid, name) for pid, name in sorted(found["users"].items()) if name not in watchers]
    return smi_processes + ["%d %s" % (pid, name) for pid, name in others if str(pid) not in named]


def why_unknown(smi_error, loaded, found, opens):
    """Why nobody can say whether a GPU is in use; empty where it can be said.

    smi_error: what nvidia-smi said where it failed. loaded: whether the module is. found, opens: as device_users and
    module_opens give them. Where nvidia-smi answers, its word stands; without a module there is nothing to use.
    """
    if not smi_error or not loaded:
        return ""
    if found["unreadable"]:
        hidden = found["unreadable"]
        others = "1 process does not show its" if hidden == 1 else "%d processes do not show their" % hidden
        return "nvidia-smi fails (%s), and %s open files" % (smi_error, others)
    if opens > found["handles"]:
        more = opens - found["handles"]
        users = "1 user" if more == 1 else "%d users" % more
        return "nvidia-smi fails (%s), and the loaded module has %s more than processes show" % (smi_error, users)
    return ""


def parse_units(text):
    """`systemctl show --property=Id,ActiveState,UnitFileState UNIT ..` as {unit: {active, enabled}}."""
    units = {}
    for block in text.split("\n\n"):
        values = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if values.get("Id"):
            units[values["Id"]] = {
                "active": values.get("ActiveState", ""),
                "enabled": values.get("UnitFileState", "") == "enabled",
            }
    return units


def is_node(path):
    """Whether it is a character device."""
    try:
        return stat.S_ISCHR(os.stat(path).st_mode)
    except OSError:
        return False


def secure_boot(efivars="/sys/firmware/efi/efivars"):
    """True or False as the firmware says; None where there is no UEFI. The variable's fifth byte is its value."""
    for path in glob.glob(os.path.join(efivars, "SecureBoot-*")):
        try:
            with open(path, "rb") as file:
                value = file.read(5)
        except OSError:
            continue
        if len(value) == 5:
            return value[4] == 1
    return None


def has_headers(kernel, modules="/lib/modules"):
    """Whether what DKMS compiles against is there for this kernel."""
    return os.path.isdir(os.path.join(modules, kernel, "build"))


def has_nvswitch(dev="/dev", pci="/sys/bus/pci/devices"):
    """Whether the machine has NVSwitches: the driver's nodes, or bridges of the vendor other than PCI-PCI."""
    if glob.glob(os.path.join(dev, "nvidia-nvswitch[0-9]*")):
        return True
    for device in glob.glob(os.path.join(pci, "*")):
        try:
            with open(os.path.join(device, "vendor")) as vendor, open(os.path.join(device, "class")) as kind:
                if vendor.read().strip() == NVIDIA_VENDOR and kind.read().strip().startswith(BRIDGE_CLASS):
                    return True
        except OSError:
            continue
    return False


def has_journal(dpkg="/var/lib/dpkg"):
    """Whether dpkg was interrupted: apt does nothing until what it noted then is taken into its list of packages."""
    try:
        return any(name.isdigit() for name in os.listdir(os.path.join(dpkg, "updates")))
    except OSError:
        return False


def os_release(text):
    """{id, version_id} of /etc/os-release."""
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {"id": values.get("ID", "").strip('"'), "version_id": values.get("VERSION_ID", "").strip('"')}


LOCKS = ("/var/lib/dpkg/lock-frontend", "/var/lib/apt/lists/lock", "/var/cache/apt/archives/lock")
"""What apt locks: while packages are changed, while lists are fetched (apt update), and while packages are."""


def lock_holder(*paths, proc="/proc"):
    """{pid, command} of the process that holds one of apt's locks; None where nobody does (or it cannot be asked)."""
    return next((holder for path in paths or LOCKS if (holder := _holder_of(path, proc)) is not None), None)


def _holder_of(path, proc):
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
    except OSError:
        return None
    finally:
        os.close(descriptor)
    kind, _, _, _, pid = struct.unpack("hhqqi4x", answer)
    if kind == fcntl.F_UNLCK:
        return None
    try:
        with open(os.path.join(proc, str(pid), "comm")) as file:
            command = file.read().strip()
    except OSError:
        command = ""
    return {"pid": pid, "command": command}
