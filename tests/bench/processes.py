"""CPU of a process and all below it, from outside: at a moment, and over a run."""

import os
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

SAMPLE_SECONDS = 0.05
_TICK_NS = 10**9 // os.sysconf("SC_CLK_TCK")


def tree_cpu_ns(root: int) -> int:
    """CPU time of `root`, of everything below it, and of what those have waited for, ns."""
    total = 0
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        try:
            # The kernel's clock of another process, all its threads: exact, where /proc counts ticks.
            total += time.clock_gettime_ns((~pid << 3) | 2)
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[13]) + int(fields[14])) * _TICK_NS
            for task in Path(f"/proc/{pid}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return total


@dataclass
class Ran:
    """A finished process. `samples`: (monotonic ns, CPU ns of the tree) from the first send on; `end`: at its exit."""

    returncode: int
    samples: list[tuple[int, int]] = field(default_factory=list)
    end: tuple[int, int] = (0, 0)
    timed_out: bool = False

    def cpu_ns_until(self, at_ns: int) -> int:
        """CPU from the first send to `at_ns`, between samples by straight lines."""
        began = self.samples[0][1]
        before = self.samples[0]
        for after in [*self.samples[1:], self.end]:
            if after[0] >= at_ns:
                share = (at_ns - before[0]) / max(1, after[0] - before[0])
                return max(0, before[1] + round((after[1] - before[1]) * max(0.0, share)) - began)
            before = after
        return self.end[1] - began


def run(
    command: list[str], cpu: int, log: Path, first_send: Callable[[], bool], timeout_seconds: float, env: dict[str, str]
) -> Ran:
    """Run `command` on one CPU; sample its CPU once `first_send()` (which blocks) has returned true."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["taskset", "-c", str(cpu), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
    ran = Ran(returncode=-1)
    over = threading.Event()

    def sample() -> None:
        if not first_send():
            return
        while not over.is_set():
            ran.samples.append((time.monotonic_ns(), tree_cpu_ns(process.pid)))
            over.wait(SAMPLE_SECONDS)

    def time_out() -> None:
        ran.timed_out = True
        os.killpg(process.pid, 9)

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    timer = threading.Timer(timeout_seconds, time_out)
    timer.start()
    _, status, usage = os.wait4(process.pid, 0)
    timer.cancel()
    ran.end = (time.monotonic_ns(), round((usage.ru_utime + usage.ru_stime) * 1e9))
    ran.returncode = process.returncode = os.waitstatus_to_exitcode(status)
    over.set()
    sampler.join(2.0)
    return ran


def last_write_ns(folder: Path) -> int:
    """When a file of `folder` was last written, on the monotonic clock, ns."""
    offset = time.time_ns() - time.monotonic_ns()
    return max(path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()) - offset
