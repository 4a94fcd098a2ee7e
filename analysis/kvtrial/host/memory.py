"""What the kernel says of memory that ran out: its counters, those of the engine's cgroup, and the kernel's log."""

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvtrial.record.oom import MemoryCounters

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
KERNEL_LOG_SECONDS = 5.0
KERNEL_LINES_MAX = 2000


INIT_PIDS = "pid:[4026531836]"
"""The pid namespace that the kernel's log speaks of (PROC_PID_INIT_INO of include/linux/proc_ns.h)."""


def memory_counters(pid: int | str = "self") -> MemoryCounters:
    """Counters of the kernel, and of the cgroup of a process (v2, or v1's memory controller)."""
    return _counted(list(_memory_cgroups(pid)))


def _counted(folders: Sequence[Path]) -> MemoryCounters:
    """The kernel's counters, and those of a cgroup; `folders`: its own and those above it, from the inside.

    Kills are those of the innermost that counts any: those above count their other children's as well (v2), or not
    even their own's (v1). A limit may be that of any of them.
    """
    kills: list[int] = []
    hits: list[int] = []
    for folder in folders:
        for counter, file, field in (
            (kills, "memory.events", "oom_kill"),
            (kills, "memory.oom_control", "oom_kill"),
            (hits, "memory.events", "max"),
        ):
            if (value := _value(folder / file, field)) is not None:
                counter.append(value)
        with contextlib.suppress(OSError, ValueError):
            hits.append(int((folder / "memory.failcnt").read_text()))
    return MemoryCounters(_value(PROC / "vmstat", "oom_kill"), kills[0] if kills else None, sum(hits) if hits else None)


def sees_the_kernels_pids() -> bool:
    """Whether the pids that are seen here are those of the kernel's log: not in a container of its own pids."""
    try:
        return str((PROC / "self" / "ns" / "pid").readlink()) == INIT_PIDS
    except OSError:
        return False


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


def kernel_lines() -> list[str] | None:
    """The end of the kernel's log, by dmesg or the journal; None where neither may be read."""
    for command in (
        ["dmesg"],
        ["journalctl", "-k", "-n", str(KERNEL_LINES_MAX), "--no-pager", "-o", "short-monotonic"],
    ):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=KERNEL_LOG_SECONDS, check=True
            )
            lines = [line for line in done.stdout.splitlines() if not line.startswith("-- ")]
            # Who may not read it gets no entries from the journal, and no error.
            if lines or command[0] == "dmesg":
                return lines[-KERNEL_LINES_MAX:]
    return None


class MemoryWatch:
    """Remembers what the kernel had counted and said, to tell what is new."""

    def __init__(self, pid: int | str = "self") -> None:
        self._folders = list(_memory_cgroups(pid))
        self._alone = False
        self.before = _counted(self._folders)
        self._lines = kernel_lines()

    def follow(self, pid: int) -> None:
        """Watch the cgroup that was made for the engine alone, that of its process, whose count began at 0."""
        folders = list(_memory_cgroups(pid))
        if self._alone or not folders or not folders[0].is_dir():
            return
        above = _counted(folders[1:]).cgroup_limit_hits or 0
        self._folders, self._alone = folders, True
        self.before = MemoryCounters(self.before.kills, 0, above, alone=True)

    def now(self) -> MemoryCounters:
        """The counters by now. A cgroup that is gone with its unit has none: what those above count is not its own."""
        found = _counted(self._folders)
        if not self._alone:
            return found
        own = _counted(self._folders[:1]).cgroup_kills
        return MemoryCounters(found.kills, own, found.cgroup_limit_hits, alone=True)

    def new_lines(self) -> list[str] | None:
        """Lines of the kernel's log since then; None where it can't be read."""
        found = kernel_lines()
        if found is None or self._lines is None:
            return None
        known = set(self._lines)
        return [line for line in found if line not in known]
