"""The host program's folder: what lies where, and the progress file that others read.

DIRECTORY/plan.json         this host's part of the plan
DIRECTORY/campaign          the campaign's id
DIRECTORY/consent           must exist, asked before every run; removing it stops the program before the next one
DIRECTORY/heartbeat         touched by the controller; matters only with if_controller_gone: stop
DIRECTORY/progress.json     where the program is
DIRECTORY/program.log       what the program printed
DIRECTORY/runs/RUN/         whole runs
DIRECTORY/runs/.partial/    the run being made
DIRECTORY/interrupted/      what interrupted runs left, kept for whoever wants to know
"""

import contextlib
import os
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from kvtrial.host.processes import is_alive, read_process
from kvtrial.record.errors import UnusableInput
from kvtrial.record.plan import HostPlan, plan_sha256
from kvtrial.record.record import RunRecord
from kvtrial.record.store import sha256_of_file, stated_digest, write_atomically
from kvtrial.record.version import SCHEMA_VERSION, refuse_newer

TEMPORARY = ".*.tmp"
"""What a file is called until it is whole: see kvtrial.record.store."""


class Progress(Struct, frozen=True):
    """Where the program is. `state`: starting, running, finished, stopped or failed; `reason` is a sentence."""

    schema_version: str
    campaign: str
    plan_sha256: str
    state: str
    reason: str
    pid: int
    pid_start_ticks: int
    boot_id: str
    run: str | None
    pair: int | None
    pairs: int
    arm: str | None
    phase: str | None
    runs_done: int
    runs_planned: int
    seconds_to_go: float
    updated_monotonic_seconds: float
    message: str
    engine_faults: int
    dropped_pairs: list[int]
    interruptions: int


class Folder:
    """Paths and files of one campaign on this host."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.plan_path = directory / "plan.json"
        self.progress_path = directory / "progress.json"
        self.runs = directory / "runs"
        self.partial = self.runs / ".partial"
        self.interrupted = directory / "interrupted"
        self.lock = directory / "lock"
        self.heartbeat = directory / "heartbeat"
        self.consent = directory / "consent"

    def read_plan(self) -> tuple[HostPlan, str]:
        """The host's plan and its hash. Raises UnusableInput if it is missing, damaged or of a newer version."""
        try:
            content = self.plan_path.read_bytes()
        except FileNotFoundError:
            raise UnusableInput(f"{self.plan_path} is missing; let the experiment playbook ship it.") from None
        try:
            version = msgspec.json.decode(content, type=dict)["schema_version"]
            refuse_newer(version, str(self.plan_path))
            plan = msgspec.json.decode(content, type=HostPlan)
        except (msgspec.DecodeError, KeyError) as error:
            raise UnusableInput(f"{self.plan_path} is not a host plan ({error}); ship it again.") from None
        return plan, plan_sha256(plan)

    def campaign(self) -> str:
        """The campaign's id."""
        return (self.directory / "campaign").read_text().strip()

    def finished_runs(self) -> dict[str, RunRecord]:
        """The whole runs, by name. A run whose record does not match its digest is not whole."""
        runs = {}
        for path in sorted(self.runs.glob("*/record.json")):
            with contextlib.suppress(OSError, ValueError, msgspec.DecodeError):
                if stated_digest(path.parent / "record.sha256") == sha256_of_file(path):
                    runs[path.parent.name] = msgspec.json.decode(path.read_bytes(), type=RunRecord)
        return runs

    def remove_temporary(self) -> None:
        """Delete what writes left that a power cut or a kill ended. Only for who holds the lock: others write here."""
        for path in [*self.directory.glob(TEMPORARY), *self.partial.rglob(TEMPORARY)]:
            with contextlib.suppress(OSError):
                path.unlink()

    def set_aside_partial(self) -> None:
        """Move what an interrupted run left out of the way."""
        if self.partial.exists():
            self.interrupted.mkdir(exist_ok=True)
            count = len(list(self.interrupted.iterdir()))
            self.partial.rename(self.interrupted / f"{count + 1:03d}")

    def set_aside_damaged(self, run: str) -> None:
        """Move a run's folder that is there but not whole out of the way of the run that replaces it."""
        if (self.runs / run).exists():
            self.interrupted.mkdir(exist_ok=True)
            (self.runs / run).rename(self.interrupted / f"{run}-damaged-{len(list(self.interrupted.iterdir())) + 1}")

    def abandoned(self) -> "list[Folder]":
        """Other campaigns beside this one that were cut within a run and whose program no longer runs."""
        others = (Folder(path.parent.parent) for path in self.directory.parent.glob("*/runs/.partial"))
        return [other for other in others if other.directory != self.directory and other.program_alive() is None]

    def interruptions(self) -> int:
        """How many runs were interrupted so far."""
        return len(list(self.interrupted.iterdir())) if self.interrupted.exists() else 0

    def read_progress(self) -> Progress | None:
        """The progress file, or None if there is none yet."""
        try:
            return msgspec.json.decode(self.progress_path.read_bytes(), type=Progress)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def write_progress(self, progress: Progress) -> None:
        """Replace the progress file."""
        write_atomically(self.progress_path, msgspec.json.encode(progress))

    def program_alive(self) -> Progress | None:
        """The progress of the program that runs now, or None if none runs."""
        progress = self.read_progress()
        if progress is None or progress.state not in ("starting", "running"):
            return None
        return progress if is_alive(progress.pid, progress.pid_start_ticks) else None

    def controller_silent_seconds(self) -> float | None:
        """Seconds since the controller last looked, on this host's monotonic clock; None if it never did."""
        try:
            return time.monotonic() - float(self.heartbeat.read_text())
        except (OSError, ValueError):
            return None


def first_progress(campaign: str, digest: str, plan: HostPlan, boot: str, estimate: float) -> Progress:
    """Progress of a program that starts now."""
    me = read_process(os.getpid())
    return Progress(
        schema_version=SCHEMA_VERSION,
        campaign=campaign,
        plan_sha256=digest,
        state="starting",
        reason="",
        pid=os.getpid(),
        pid_start_ticks=me.start_ticks if me else -1,
        boot_id=boot,
        run=None,
        pair=None,
        pairs=len({run.pair for run in plan.runs if not run.spare}),
        arm=None,
        phase=None,
        runs_done=0,
        runs_planned=sum(not run.spare for run in plan.runs),
        seconds_to_go=estimate,
        updated_monotonic_seconds=time.monotonic(),
        message="",
        engine_faults=0,
        dropped_pairs=[],
        interruptions=0,
    )
