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
import struct

GPU_FIELDS = ("name", "driver_version", "mig.mode.current", "persistence_mode")
# Names of the driver's own packages in the vendor's repositories for Debian and Ubuntu; those with a version of their
# own (the container toolkit, say) are told apart by the version's form.
FAMILY = re.compile(
    r"^(lib)?nvidia-|^libnv(cuvid|idia|sdm)|^libcuda(1|debugger1)$|^cuda-drivers|^xserver-xorg-video-nvidia"
)
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
    """`dpkg-query -W -f '${Package}\\t${Version}\\t${db:Status-Status}\\n'` as {driver, unfinished, kernels}.

    driver: {name: version} of the driver's installed packages. unfinished: names that dpkg has begun and not ended.
    kernels: installed kernel images, sorted.
    """
    driver, unfinished, kernels = {}, [], []
    for line in text.splitlines():
        fields = line.split("\t")
        if len(fields) != 3:
            continue
        name, version, status = fields
        if status in ("half-installed", "half-configured", "unpacked", "triggers-awaited", "triggers-pending"):
            unfinished.append(name)
        if status in ("not-installed", "config-files"):
            continue
        if FAMILY.search(name) and upstream_version(version):
            driver[name] = version
        if name.startswith("linux-image-"):
            kernels.append("%s=%s" % (name, version))
    return {"driver": driver, "unfinished": sorted(unfinished), "kernels": sorted(kernels)}


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
