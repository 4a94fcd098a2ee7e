"""The conditions of a measurement, read from the host: CPU, memory, kernel, governor, GPUs."""

import contextlib
import os
import platform
import shutil
import subprocess
from collections import Counter
from pathlib import Path

from kvtrial.record.record import Conditions

GPU_FIELDS = ("name", "uuid", "driver_version", "memory.total", "clocks.sm", "clocks.max.sm", "persistence_mode",
              "mig.mode.current", "clocks_event_reasons.active")  # fmt: skip
GPU_CHOICES = ("clocks.applications.graphics", "power.limit", "ecc.mode.current")
"""What somebody may have set on a GPU. Asked apart: a driver that lacks one of them refuses the whole question."""
PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


_SLOWDOWNS = 0x08 | 0x20 | 0x40 | 0x80
"""Hardware slowdown, software thermal slowdown, hardware thermal slowdown, hardware power brake."""


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def governor(cpus: Path = Path("/sys/devices/system/cpu")) -> str | None:
    """The governor of the CPUs' clocks; where they differ each with how many have it; None where nothing is told."""
    read = (_read(str(path)) for path in cpus.glob("cpu[0-9]*/cpufreq/scaling_governor"))
    found = Counter(name for name in read if name)
    if len(found) < 2:
        return next(iter(found), None)
    return ", ".join(f"{name} ({count} CPU{'s' if count > 1 else ''})" for name, count in sorted(found.items()))


def cgroup_memory(cgroups: Path = CGROUPS) -> tuple[int, int] | None:
    """(limit, bytes in use that can't be given back) of the cgroup that a container shows as its own; None without one.

    Cached files count as free, as in the kernel's MemAvailable: they go when memory is needed.
    """
    for folder, limit_name, usage_name, prefix in (
        (cgroups, "memory.max", "memory.current", ""),
        (cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        with contextlib.suppress(OSError, ValueError):
            limit, usage = (int((folder / name).read_text()) for name in (limit_name, usage_name))
            stat = _numbers(folder / "memory.stat", " ")
            cached = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
            return limit, max(0, usage - cached)
    return None


def meminfo(proc: Path = PROC, cgroups: Path = CGROUPS) -> dict[str, int]:
    """/proc/meminfo in bytes, with MemTotal and MemAvailable as a container's own limit leaves them, where it is lower.

    plugins/module_utils/host_facts.py says this again for modules, which are sent to hosts without this package; a test
    holds the two together.
    """
    values = _numbers(proc / "meminfo", ":")
    cgroup = cgroup_memory(cgroups)
    if cgroup is not None and cgroup[0] < values["MemTotal"]:
        limit, used = cgroup
        values["MemTotal"] = limit
        values["MemAvailable"] = min(values["MemAvailable"], max(0, limit - used))
    return values


def _numbers(file: Path, separator: str) -> dict[str, int]:
    """Lines of a name and a number, in bytes where they are in kB."""
    values = {}
    for line in file.read_text().splitlines():
        name, _, rest = line.partition(separator)
        if parts := rest.split():
            values[name] = int(parts[0]) * (1024 if len(parts) > 1 else 1)
    return values


def nvidia_smi(*fields: str, of: str = "gpu") -> list[dict[str, str]]:
    """One mapping a GPU (`of` "compute-apps": a process on one); empty where there is no nvidia-smi or it fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        output = subprocess.run(
            [tool, f"--query-{of}={','.join(fields)}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=30, check=True,
        ).stdout  # fmt: skip
        return [dict(zip(fields, (v.strip() for v in line.split(",")), strict=True)) for line in output.splitlines()]
    return []


def slowed_down(reasons: str) -> bool | None:
    """Whether a GPU runs slower than asked because of heat or its supply, by `clocks_event_reasons.active`.

    The software's power cap is not among them: it is what heavy work itself does, and differs between arms rightly.
    None where the driver does not say. Source: NVML, nvmlClocksEventReasons.
    """
    try:
        return bool(int(reasons, 16) & _SLOWDOWNS)
    except ValueError:
        return None


def _cpu_model() -> str:
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return platform.machine()


def _os_name() -> str:
    for line in (_read("/etc/os-release") or "").splitlines():
        if line.startswith("PRETTY_NAME="):
            return line.partition("=")[2].strip('"')
    return platform.system()


def _chosen(text: str | None) -> str | None:
    """The bracketed choice of a sysfs switch: "always [madvise] never" is madvise."""
    return text[text.index("[") + 1 : text.index("]")] if text and "[" in text else text


def cpu_mhz() -> float | None:
    """Mean clock of the CPUs now, MHz; None where the kernel does not say."""
    values = []
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        if line.startswith("cpu MHz"):
            values.append(float(line.partition(":")[2]))
    return sum(values) / len(values) if values else None


def boot_id() -> str:
    """The kernel's id of this boot; empty where it can't be read."""
    return _read("/proc/sys/kernel/random/boot_id") or ""


def read_conditions() -> Conditions:
    """The conditions now."""
    gpus = nvidia_smi(*GPU_FIELDS)
    chosen = nvidia_smi(*GPU_CHOICES)
    if len(chosen) == len(gpus):
        # "[N/A]", "[Not Supported]" and the like are no value.
        gpus = [
            gpu | {name: value for name, value in more.items() if not value.startswith("[")}
            for gpu, more in zip(gpus, chosen, strict=True)
        ]
    return Conditions(
        cpu_model=_cpu_model(),
        cpus=os.cpu_count() or 1,
        ram_total_bytes=meminfo()["MemTotal"],
        kernel=platform.release(),
        os=_os_name(),
        python=platform.python_version(),
        boot_id=boot_id(),
        governor=governor(),
        transparent_hugepages=_chosen(_read("/sys/kernel/mm/transparent_hugepage/enabled")),
        clock_source=_read("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        load_average_1m=os.getloadavg()[0],
        gpus=gpus,
        driver_version=gpus[0]["driver_version"] if gpus else None,
    )
