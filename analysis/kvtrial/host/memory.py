"""What the kernel says of memory that ran out: its counters, those of the engine's cgroup, and the kernel's log."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from kvtrial.record.oom import MemoryCounters

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
KERNEL_LOG_SECONDS = 5.0
KERNEL_LINES_MAX = 2000


def memory_counters(pid: int | str = "self") -> MemoryCounters:
    """Counters of the kernel, and of the cgroup of a process with those above it (v2, or v1's memory controller)."""
    kills = _value(PROC / "vmstat", "oom_kill")
    cgroup_kills: list[int] = []
    hits: list[int] = []
    for folder in _memory_cgroups(pid):
        for counter, file, field in (
            (cgroup_kills, "memory.events", "oom_kill"),
            (cgroup_kills, "memory.oom_control", "oom_kill"),
            (hits, "memory.events", "max"),
        ):
            if (value := _value(folder / file, field)) is not None:
                counter.append(value)
        with contextlib.suppress(OSError, ValueError):
            hits.append(int((folder / "memory.failcnt").read_text()))
    # v2 counts a kill in every cgroup above it as well, so the largest is the whole; v1 counts it once.
    return MemoryCounters(kills, max(cgroup_kills, default=None), sum(hits) if hits else None)


def _memory_cgroups(pid: int | str) -> Iterator[Path]:
    """The folders of a process's memory cgroup and of those above it."""
    with contextlib.suppress(OSError):
        for line in (PROC / str(pid) / "cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" and not controllers:
                root = CGROUPS
            elif "memory" in controllers.split(","):
                root = CGROUPS / "memory"
            else:
                continue
            folder = root / path.strip("/")
            while folder != root:
                # In a container the path may be that of the host, and what is mounted here is the container's own.
                yield folder
                folder = folder.parent
            yield root


def _value(file: Path, field: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == field:
                return int(value)
    return None


def kernel_lines() -> list[str]:
    """The end of the kernel's log, by dmesg or the journal; nothing where neither may be read."""
    for command in (
        ["dmesg"],
        ["journalctl", "-k", "-n", str(KERNEL_LINES_MAX), "--no-pager", "-o", "short-monotonic"],
    ):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=KERNEL_LOG_SECONDS, check=True
            )
            return done.stdout.splitlines()[-KERNEL_LINES_MAX:]
    return []


class MemoryWatch:
    """Remembers what the kernel had counted and said, to tell what is new."""

    def __init__(self, pid: int | str = "self") -> None:
        self._pid = pid
        self.before = memory_counters(pid)
        self._lines = kernel_lines()

    def now(self) -> MemoryCounters:
        """The counters by now. Of the same cgroup: one that is gone with its process leaves the kernel's own count."""
        return memory_counters(self._pid)

    def new_lines(self) -> list[str]:
        """Lines of the kernel's log since then."""
        known = set(self._lines)
        return [line for line in kernel_lines() if line not in known]
