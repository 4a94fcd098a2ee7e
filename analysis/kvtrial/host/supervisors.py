"""The two ways the keeper holds an engine: as a process of its own, or as the arm's systemd unit. Same argv and
environment in both.
"""

import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Protocol

from kvtrial.host import units
from kvtrial.host.processes import Process, end_processes, is_alive, read_process

PR_SET_PDEATHSIG = 1
UNIT_SLACK_SECONDS = 60.0


class NotStarted(Exception):
    """The engine could not be started at all; the message says why."""


class Held(Protocol):
    """A started engine. `process` is its own, first process, also when it is gone already."""

    process: Process

    def ended(self) -> bool:
        """Whether the engine's own process has ended."""
        ...

    def end(self, grace_seconds: float) -> bool:
        """Ask it to end, and end it after `grace_seconds`; whether that was needed."""
        ...

    def returncode(self) -> int | None:
        """Exit status once it has ended, -N for signal N; None where nobody knows."""
        ...


class OwnProcess:
    """A child of the keeper, in a session of its own; SIGTERM reaches it when the keeper is killed."""

    def __init__(self, argv: list[str], env: dict[str, str], scratch: str, log: Path, cpus: list[int]) -> None:
        """`cpus`: those that it may run on, none for all that the keeper may."""
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self.popen = subprocess.Popen(
                argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=scratch,
                preexec_fn=lambda: _become_engine(cpus),
            )
        except OSError as error:
            raise NotStarted(str(error)) from error
        finally:
            os.close(descriptor)
        self.process = read_process(self.popen.pid) or gone(self.popen.pid)

    def ended(self) -> bool:
        """Whether the child has ended."""
        return self.popen.poll() is not None

    def end(self, grace_seconds: float) -> bool:
        """SIGTERM to the engine's own process, so that it can end its children itself."""
        if self.ended():
            return False
        self.popen.send_signal(signal.SIGTERM)
        until = time.monotonic() + grace_seconds
        while not self.ended() and time.monotonic() < until:
            time.sleep(0.01)
        return end_processes([self.process], 0.0)

    def returncode(self) -> int | None:
        """The child's exit status."""
        return self.popen.wait()


def _die_with_parent() -> None:
    """In the engine before exec: SIGTERM when the keeper is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _become_engine(cpus: list[int]) -> None:
    _die_with_parent()
    if cpus:
        os.sched_setaffinity(0, cpus)


def gone(pid: int) -> Process:
    """A process that ended before it could be looked at."""
    return Process(pid, -1, "Z", 0, pid, 0, 0)


class UnitProcess:
    """The main process of a unit that systemd started."""

    def __init__(self, unit: str, stop_seconds: float) -> None:
        self.unit = unit
        self.stop_seconds = stop_seconds
        if said := units.systemctl("start", unit, UNIT_SLACK_SECONDS):
            raise NotStarted(f"systemctl start {unit}: {said}")
        pid = int(units.show(unit, "ExecMainPID")["ExecMainPID"] or 0)
        self.process = read_process(pid) or gone(pid)

    def ended(self) -> bool:
        """Whether the main process is gone; the unit may still be ending its others."""
        return not is_alive(self.process.pid, self.process.start_ticks)

    def end(self, grace_seconds: float) -> bool:
        """Stop the unit: SIGTERM to the main process, then SIGKILL to whatever is left in its cgroup."""
        del grace_seconds  # the unit has it, as TimeoutStopSec
        said = units.systemctl("stop", self.unit, self.stop_seconds + UNIT_SLACK_SECONDS)
        if said:
            print(f"systemctl stop {self.unit}: {said}", flush=True)
        return units.show(self.unit, "Result")["Result"] == "timeout"

    def returncode(self) -> int | None:
        """The main process's exit status, as systemd keeps it."""
        found = units.show(self.unit, "ExecMainCode", "ExecMainStatus")
        if not found["ExecMainStatus"].isdigit() or found["ExecMainCode"] == "0":
            return None
        # ExecMainCode is the kernel's: 1 exited, 2 killed, 3 dumped.
        return int(found["ExecMainStatus"]) * (1 if found["ExecMainCode"] == "1" else -1)
