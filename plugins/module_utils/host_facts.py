# Licensed under the Apache License, Version 2.0
"""Facts about a host that decide whether a campaign can run there. Standard library only, Python 3.8 and newer.

Every function takes the roots it reads, so that tests can pass a made-up machine.
"""

from __future__ import annotations

import csv
import glob
import json
import os

from ansible_collections.kvtrial.vllm.plugins.module_utils import processes

GPU_FIELDS = (
    "index",
    "uuid",
    "name",
    "memory.total",
    "memory.used",
    "driver_version",
    "pci.bus_id",
    "compute_cap",
    "ecc.mode.current",
    "persistence_mode",
)
CPU_FLAGS = ("f16c", "avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_tile")
INTEL_VENDOR = "0x8086"
NVIDIA_VENDOR = "0x10de"
DISPLAY_CLASS = "0x03"
MEBIBYTE = 1 << 20


def parse_meminfo(text):
    """/proc/meminfo as {name: bytes}."""
    values = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        fields = rest.split()
        if fields and fields[0].isdigit():
            values[name] = int(fields[0]) * (1024 if fields[1:] == ["kB"] else 1)
    return values


def parse_cpuinfo(text):
    """(model name, the flags that matter to the engine's wheels) of the first CPU of /proc/cpuinfo.

    The flags are None where the text names none at all: a sandbox that hides them says nothing about the CPU.
    """
    model, flags = "", None
    for line in text.splitlines():
        name, _, value = line.partition(":")
        name = name.strip()
        if name in ("model name", "Processor", "CPU part") and not model:
            model = value.strip()
        elif name in ("flags", "Features") and flags is None:
            flags = set(value.split())
    return model, None if flags is None else [flag for flag in CPU_FLAGS if flag in flags]


def governor(cpus="/sys/devices/system/cpu"):
    """The governor of the CPUs' clocks; where they differ each with how many have it; None where nothing is told."""
    found = {}
    for path in glob.glob(os.path.join(cpus, "cpu[0-9]*", "cpufreq", "scaling_governor")):
        name = processes.read_text(path, 64).strip()
        if name:
            found[name] = found.get(name, 0) + 1
    if len(found) < 2:
        return next(iter(found), None)
    return ", ".join("%s (%d CPU%s)" % (name, found[name], "s" if found[name] > 1 else "") for name in sorted(found))


def parse_os_release(text):
    """PRETTY_NAME of /etc/os-release; empty if it has none."""
    for line in text.splitlines():
        if line.startswith("PRETTY_NAME="):
            return line.split("=", 1)[1].strip().strip('"')
    return ""


def parse_gpus(text):
    """`nvidia-smi --query-gpu=<GPU_FIELDS> --format=csv,noheader,nounits` as a list of dicts."""
    gpus = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) != len(GPU_FIELDS):
            continue
        values = dict(zip(GPU_FIELDS, (field.strip() for field in row)))
        gpus.append(
            {
                "index": int(values["index"]),
                "uuid": values["uuid"],
                "name": values["name"],
                "memory_total_bytes": _mebibytes(values["memory.total"]),
                "memory_used_bytes": _mebibytes(values["memory.used"]),
                "driver_version": values["driver_version"],
                "pci_bus_id": values["pci.bus_id"],
                "compute_capability": values["compute_cap"],
                "ecc": values["ecc.mode.current"],
                "persistence_mode": values["persistence_mode"],
            }
        )
    return gpus


def parse_gpu_processes(text):
    """`nvidia-smi --query-compute-apps=pid,used_memory,gpu_uuid ...` as [{pid, memory_bytes, gpu_uuid}]."""
    found = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) == 3 and row[0].strip().isdigit():
            found.append({"pid": int(row[0]), "memory_bytes": _mebibytes(row[1].strip()), "gpu_uuid": row[2].strip()})
    return found


def smallest_gpu_mebibytes(gpus):
    """Memory of the smallest GPU, MiB; None without GPUs, or where its memory isn't known."""
    sizes = [gpu["memory_total_bytes"] for gpu in gpus]
    return min(sizes) // MEBIBYTE if sizes and None not in sizes else None


def _mebibytes(text):
    """Bytes of a number of MiB as nvidia-smi prints it; None for "[N/A]"."""
    return int(text) * MEBIBYTE if text.isdigit() else None


def cgroup_memory(cgroups="/sys/fs/cgroup"):
    """(limit, bytes in use that can't be given back) of the cgroup that a container shows as its own; None without one.

    Cached files count as free, as in the kernel's MemAvailable: they go when memory is needed.
    """
    for folder, limit_name, usage_name, prefix in (
        (cgroups, "memory.max", "memory.current", ""),
        (os.path.join(cgroups, "memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        limit = processes.read_text(os.path.join(folder, limit_name), 64).strip()
        usage = processes.read_text(os.path.join(folder, usage_name), 64).strip()
        if limit.isdigit() and usage.isdigit():
            lines = [line.split() for line in processes.read_text(os.path.join(folder, "memory.stat")).splitlines()]
            stat = {fields[0]: int(fields[1]) for fields in lines if len(fields) == 2}
            cached = stat.get(prefix + "inactive_file", 0) + stat.get(prefix + "active_file", 0)
            return int(limit), max(0, int(usage) - cached)
    return None


def memory(meminfo, cgroup=None):
    """{ram_total_bytes, ram_available_bytes, swap_total_bytes}: a container's own limit counts where it is lower.

    `cgroup` as cgroup_memory gives it. The package's kvtrial.host.conditions says this again; a test holds the two
    together.
    """
    total, available = meminfo.get("MemTotal", 0), meminfo.get("MemAvailable", 0)
    if cgroup is not None and cgroup[0] < total:
        total = cgroup[0]
        available = min(available, max(0, total - cgroup[1]))
    return {
        "ram_total_bytes": total,
        "ram_available_bytes": available,
        "swap_total_bytes": meminfo.get("SwapTotal", 0),
    }


def free_bytes(path):
    """Bytes an ordinary user may still write at `path` or its nearest existing parent; None if there is none."""
    path = os.path.abspath(path)
    while not os.path.exists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    try:
        stat = os.statvfs(path)
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize


def accelerators(dev="/dev", sys="/sys"):
    """{nvidia, rocm, xpu}: whether an NVIDIA GPU, an AMD compute device, or a discrete Intel GPU is there.

    An NVIDIA GPU counts with or without its driver: a host to be provisioned has none yet. /dev/kfd is AMD's compute
    node. Intel's GPUs use a driver named xe or i915; only a card with local memory (`lmem`) is a compute card: an
    integrated one is not refused.
    """
    nvidia = os.path.exists(os.path.join(dev, "nvidiactl")) or any(
        processes.read_text(os.path.join(device, "vendor"), 64).strip() == NVIDIA_VENDOR
        and processes.read_text(os.path.join(device, "class"), 64).startswith(DISPLAY_CLASS)
        for device in glob.glob(os.path.join(sys, "bus", "pci", "devices", "*"))
    )
    xpu = False
    for vendor in glob.glob(os.path.join(sys, "class", "drm", "card*", "device", "vendor")):
        device = os.path.dirname(vendor)
        local_memory = glob.glob(os.path.join(device, "drm", "card*", "lmem_total_bytes"))
        local_memory += glob.glob(os.path.join(device, "tile0", "physical_vram_size_bytes"))
        if processes.read_text(vendor, 64).strip() == INTEL_VENDOR and local_memory:
            xpu = True
    return {"nvidia": nvidia, "rocm": os.path.exists(os.path.join(dev, "kfd")), "xpu": xpu}


def own_processes(state_dir):
    """(pid, start ticks) that the campaigns under `state_dir` say they started: host programs and engines."""
    patterns = ("progress.json", os.path.join("runs", ".partial", "engine.json"))
    own = set()
    for pattern in patterns:
        for path in glob.glob(os.path.join(state_dir, "campaigns", "*", pattern)):
            try:
                value = json.loads(processes.read_text(path, 1 << 16))
                own.add((int(value["pid"]), int(value.get("pid_start_ticks", value.get("start_ticks")))))
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
    return own


def shared_memory_leftovers(directory="/dev/shm", proc="/proc"):
    """vLLM's offload regions in `directory`: [{path, bytes, mapped}]. Only one that no process maps may be removed."""
    paths = sorted(glob.glob(os.path.join(directory, "vllm_offload_*")))
    mapped = processes.mapped_files(directory, proc) if paths else set()
    found = []
    for path in paths:
        try:
            size = os.stat(path).st_size
        except OSError:
            continue
        found.append({"path": path, "bytes": size, "mapped": path in mapped})
    return found
