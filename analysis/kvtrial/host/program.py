"""The host program: works through this host's runs by itself, resumable, with a deadline.

    kvtrial-host start  --directory DIR     start it detached, unless it runs already
    kvtrial-host run    --directory DIR     the program itself, in the foreground
    kvtrial-host status --directory DIR     print its progress as JSON
    kvtrial-host stop   --directory DIR     end it cleanly: its engine first; finished runs are kept
    kvtrial-host pack   --directory DIR --output FILE [--parts summary]    a tar of the finished runs

    kvtrial-host calibrate   --directory STATE_DIR [--again]    calibrate the load client here, unless that is done
    kvtrial-host calibration --directory STATE_DIR              print the calibration that holds, or null
                             both: --client-cpus CPUS           where it runs, as kvtrial_client_cpus says (auto)

It may be killed at any point: its engine is ended by the keeper, and `start` goes on with the runs that are missing.
"""

import argparse
import contextlib
import errno
import fcntl
import io
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import msgspec

from kvtrial.host.calibration import calibrate, read_calibration, refuse_busy_host, table
from kvtrial.host.conditions import boot_id, meminfo
from kvtrial.host.engine import Engine
from kvtrial.host.keeper import reap_leftover
from kvtrial.host.processes import end_processes, foreign_engines, read_process
from kvtrial.host.run import Interrupted, RunContext, execute, publish
from kvtrial.host.schedule import dropped_pairs, next_run, runs_left
from kvtrial.host.state import Folder, Progress, first_progress
from kvtrial.host.units import PROGRAM_UNIT, refuse_other_launch, start_program
from kvtrial.host.workload import check_traces
from kvtrial.record.cpulist import cpu_list
from kvtrial.record.errors import UnusableInput
from kvtrial.record.plan import RunPlan
from kvtrial.record.store import PACKED_RECORD, RECORD, SUMMARY_ONLY, packed_record, stated_digest

START_WAIT_SECONDS = 20.0
DEFAULT_RUN_SECONDS = 40.0
LEAST_FREE_BYTES = 2**20
_ON_STATE_DIR = ("calibrate", "calibration")
LOCK_HELD = 2
"""Exit status of `run` for unusable input, such as a folder in which another program works."""


class Stop(Exception):
    """The program ends here; `state` and the sentence go to the progress file."""

    def __init__(self, state: str, reason: str) -> None:
        super().__init__(reason)
        self.state = state


class Program:
    """The loop over this host's runs."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.plan, self.digest = folder.read_plan()
        self.campaign = folder.campaign()
        self.boot = boot_id()
        self.started = time.monotonic()
        self.stopping = ""
        self.engine: Engine | None = None
        # A campaign's folder is STATE_DIR/campaigns/CAMPAIGN.
        self.calibration = read_calibration(folder.directory.parent.parent, self.plan.client_cpus)
        self.finished = folder.finished_runs()
        self.progress = first_progress(self.campaign, self.digest, self.plan, self.boot, 0.0)

    def work(self) -> None:
        """Do every run that is missing. Raises Stop when something forbids going on."""
        self.folder.runs.mkdir(exist_ok=True)
        for folder in [self.folder, *self.folder.abandoned()]:
            if (leftover := reap_leftover(folder.partial)) is not None:
                print(leftover, flush=True)
            folder.remove_temporary()
            folder.set_aside_partial()
        self.tell(state="running", interruptions=self.folder.interruptions())
        while (run := next_run(self.plan, self.finished, self.boot)) is not None:
            self.ask_before(run)
            self.do(run)

    def do(self, run: RunPlan) -> None:
        """One run; where it can't be written (disk full) the program stops, and the same command goes on later."""
        context = RunContext(
            campaign=self.campaign,
            plan=self.plan,
            plan_sha256=self.digest,
            attempt=1 + self.folder.interruptions(),
            deadline_seconds=self.seconds_left(),
            on_phase=self.on_phase,
            on_engine=self.on_engine,
            is_stopping=self.is_stopping,
            folder=self.folder.directory,
            calibration=self.calibration,
        )
        try:
            self.tell(run=run.run, pair=run.pair, arm=run.arm, phase="starting the engine")
            record = execute(run, self.folder.partial, context)
            self.folder.set_aside_damaged(run.run)
            publish(self.folder.partial, self.folder.runs / run.run)
        except Interrupted:
            self.folder.set_aside_partial()
            late = f"the deadline of {self.plan.limits.deadline_seconds:.0f} s passed in {run.run}"
            raise Stop("stopped", self.stopping or late) from None
        except OSError as error:
            shutil.rmtree(self.folder.partial, ignore_errors=True)
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            advice = "free the disk and start again" if full else "mend that and start again"
            raise Stop("failed", f"run {run.run} could not be written: {error}; {advice}") from error
        self.finished[run.run] = record
        print(f"{run.run}: {record.outcome}{f' ({record.fault.fault}: {record.fault.detail})' if record.fault else ''}",
              flush=True)  # fmt: skip
        self.tell(phase=None)
        if record.left_behind:
            raise Stop(
                "failed",
                f"after {run.run} {record.left_behind}; find what holds it (nvidia-smi, /dev/shm), start again",
            )

    def ask_before(self, run: RunPlan) -> None:
        """Everything that must hold before a run. Raises Stop with the sentence."""
        if self.is_stopping():
            raise Stop("stopped", self.stopping)
        if not self.folder.consent.exists():
            raise Stop("stopped", f"consent was withdrawn: {self.folder.consent} is gone")
        if self.seconds_left() <= 0:
            raise Stop("stopped", f"the deadline of {self.plan.limits.deadline_seconds:.0f} s passed before {run.run}")
        if self.plan.supervisor == "systemd":
            try:
                refuse_other_launch(self.plan, run.arm)
            except UnusableInput as error:
                raise Stop("failed", str(error)) from None
        if engines := foreign_engines(set()):
            listed = "; ".join(f"pid {pid} ({command})" for pid, command in engines[:3])
            raise Stop("failed", f"another engine runs on this host: {listed}; end it, kvtrial ends only its own")
        self._ask_for_memory(run)
        free = shutil.disk_usage(self.folder.directory).free
        if free < self.plan.limits.disk_reserve_bytes:
            need = self.plan.limits.disk_reserve_bytes
            raise Stop(
                "failed", f"{free} bytes are free on disk, {need} are needed; free some in {self.folder.directory}"
            )

    def _ask_for_memory(self, run: RunPlan) -> None:
        limits = self.plan.limits
        tier = self.plan.capacity.tier_bytes.get(run.arm, 0)
        needed = limits.engine_ram_bytes + tier + limits.ram_reserve_bytes
        available = meminfo()["MemAvailable"]
        if available < needed:
            parts = f"engine {limits.engine_ram_bytes}, tier {tier}, reserve {limits.ram_reserve_bytes}"
            raise Stop("failed", f"{available} bytes of RAM are available, {needed} are needed ({parts}); free some")

    def seconds_left(self) -> float:
        """Seconds until the program's own deadline."""
        return self.plan.limits.deadline_seconds - (time.monotonic() - self.started)

    def is_stopping(self) -> bool:
        """Whether the program has to end now; with if_controller_gone: stop also when the controller fell silent."""
        if not self.stopping and self.plan.if_controller_gone == "stop":
            silent = self.folder.controller_silent_seconds()
            if silent is not None and silent > self.plan.limits.controller_gone_seconds:
                self.stopping = f"the controller has been silent for {silent:.0f} s and if_controller_gone is stop"
        return bool(self.stopping)

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """SIGTERM and SIGINT: end the engine; the run in hand then ends by itself."""
        self.stopping = f"stopped by {signal.Signals(number).name}"
        if self.engine is not None:
            self.engine.request_stop()

    def on_engine(self, engine: Engine | None) -> None:
        """Remember the engine that a signal would have to end."""
        self.engine = engine
        if engine is not None and self.stopping:
            engine.request_stop()

    def on_phase(self, phase: str) -> None:
        """Tell which phase runs; between phases a silent controller may stop the program."""
        self.tell(phase=phase)
        if self.engine is not None and self.is_stopping():
            self.engine.request_stop()

    def tell(self, **changes: object) -> None:
        """Replace the progress file with `changes` applied."""
        done = [r.times.ended_monotonic_seconds - r.times.started_monotonic_seconds for r in self.finished.values()]
        left = runs_left(self.plan, self.finished, self.boot)
        self.progress = msgspec.structs.replace(
            self.progress,
            runs_done=len(self.finished),
            engine_faults=sum(r.outcome == "engine_fault" for r in self.finished.values()),
            dropped_pairs=sorted(dropped_pairs(self.plan, self.finished, self.boot)),
            seconds_to_go=left * (statistics.mean(done) if done else DEFAULT_RUN_SECONDS),
            updated_monotonic_seconds=time.monotonic(),
            **changes,
        )
        self.folder.write_progress(self.progress)


def run_program(folder: Folder) -> int:
    """The program in the foreground. Returns 0 when all runs are done, 1 otherwise."""
    with _locked(folder):
        program = Program(folder)
        signal.signal(signal.SIGTERM, program.on_signal)
        signal.signal(signal.SIGINT, program.on_signal)
        try:
            program.work()
        except Stop as stop:
            print(str(stop), flush=True)
            with contextlib.suppress(OSError):  # a full disk can't take the progress file either
                program.tell(state=stop.state, reason=str(stop))
            return 1
        except BaseException as error:
            # The controller must learn of a defect here too; the traceback goes to program.log.
            program.tell(
                state="failed", reason=f"the host program failed: {error!r}; see {folder.directory}/program.log"
            )
            raise
        program.tell(state="finished", run=None, arm=None, phase=None, reason="all runs are done")
        return 0


@contextlib.contextmanager
def _locked(folder: Folder) -> Iterator[None]:
    """One program a campaign folder. The lock falls with the process, however it ends."""
    with folder.lock.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UnusableInput(
                f"a host program works in {folder.directory} already; wait for it or stop it."
            ) from None
        yield


def start(folder: Folder) -> Progress:
    """Start the program detached, unless it runs already with the same plan; return its progress."""
    plan, digest = folder.read_plan()
    running = folder.program_alive()
    if running is not None:
        if running.plan_sha256 != digest:
            raise UnusableInput(
                f"a host program works in {folder.directory} on another plan ({running.plan_sha256[:12]}, not "
                f"{digest[:12]}); stop it first, or use a new campaign."
            )
        return running
    check_traces(plan, folder.directory)
    # A program that can't write its progress file could not tell why it ended.
    if (free := shutil.disk_usage(folder.directory).free) < LEAST_FREE_BYTES:
        raise UnusableInput(
            f"the disk is full: {free} bytes are free in {folder.directory}; free some and start again."
        )
    before = folder.read_progress()
    if plan.supervisor == "systemd":
        start_program(folder.directory, Path(sys.executable).parent / "kvtrial-host", plan)
        return _started_unit(folder, before)
    with (folder.directory / "program.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvtrial.host.program", "run", "--directory", str(folder.directory)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd=folder.directory,
        )
    until = time.monotonic() + START_WAIT_SECONDS
    while time.monotonic() < until:
        progress = folder.read_progress()
        if progress is not None and progress != before and progress.pid == process.pid and progress.state != "starting":
            return progress
        if process.poll() is not None:
            progress = folder.read_progress()
            if progress is not None and progress.pid == process.pid:
                return progress
            # Somebody else's start was quicker and holds the lock: theirs is the program then.
            if (other := folder.program_alive()) is not None and other.plan_sha256 == digest:
                return other
            if process.returncode != LOCK_HELD:
                break
        time.sleep(0.05)
    raise UnusableInput(f"the host program did not start; see the end of {folder.directory}/program.log.")


def _started_unit(folder: Folder, before: Progress | None) -> Progress:
    """The progress of the program that was started as a unit. Raises UnusableInput if it gave none in time."""
    until = time.monotonic() + START_WAIT_SECONDS
    while time.monotonic() < until:
        progress = folder.read_progress()
        if progress is not None and progress != before and progress.state != "starting":
            return progress
        time.sleep(0.05)
    raise UnusableInput(
        f"{PROGRAM_UNIT} was started and told nothing; see journalctl -u {PROGRAM_UNIT} and the end of "
        f"{folder.directory}/program.log."
    )


def stop(folder: Folder) -> str:
    """End the program cleanly and whatever engine it left; return a sentence."""
    progress = folder.program_alive()
    sentences = []
    if progress is not None:
        process = read_process(progress.pid)
        if process is not None and process.start_ticks == progress.pid_start_ticks:
            plan, _ = folder.read_plan()
            killed = end_processes([process], plan.limits.stop_timeout_seconds + 40.0)
            sentences.append(f"host program pid {progress.pid} {'was killed' if killed else 'ended'}")
    if (leftover := reap_leftover(folder.partial)) is not None:
        sentences.append(leftover)
    return "; ".join(sentences) or "no host program runs here"


def pack(folder: Folder, output: Path, parts: str = "full") -> dict[str, str]:
    """Write a tar of the finished runs to `output`; digests by run.

    `parts` full: every file of a run; most are compressed, so the tar is not. summary: what gates, effects and verdict
    are drawn from, the record, compressed, and its digest; what it names besides stays here. Raises UnusableInput where
    the disk is full.
    """
    finished = folder.finished_runs()
    temporary = output.with_name(f".{output.name}.tmp")
    try:
        with tarfile.open(temporary, "w:gz" if parts == "summary" else "w") as archive:
            for run in sorted(finished):
                if parts == "summary":
                    packed = packed_record((folder.runs / run / RECORD).read_bytes())
                    entry = tarfile.TarInfo(f"{run}/{PACKED_RECORD}")
                    entry.size = len(packed)
                    archive.addfile(entry, io.BytesIO(packed))
                    archive.add(folder.runs / run / "record.sha256", arcname=f"{run}/record.sha256")
                    archive.addfile(tarfile.TarInfo(f"{run}/{SUMMARY_ONLY}"))
                else:
                    archive.add(folder.runs / run, arcname=run)
            for name in ("progress.json", "program.log"):
                if (folder.directory / name).exists():
                    archive.add(folder.directory / name, arcname=name)
        temporary.replace(output)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if error.errno != errno.ENOSPC:
            raise
        raise UnusableInput(
            f"no space is left for the archive of the finished runs beside them in {output.parent}; free some on that "
            f"disk and run the same command again, which fetches them."
        ) from None
    return {run: stated_digest(folder.runs / run / "record.sha256") for run in sorted(finished)}


def calibrate_here(state_dir: Path, client_cpus: str, again: bool) -> dict[str, object]:
    """Calibrate the client, unless a card holds already and `again` is not asked for; what is printed of it."""
    card = None if again else read_calibration(state_dir, client_cpus)
    changed = card is None
    if card is None:
        refuse_busy_host()
        for path in sorted(state_dir.glob("campaigns/*")):
            if Folder(path).program_alive() is not None:
                raise UnusableInput(f"campaign {path.name} runs on this host; calibrate when it has ended.")
        card = calibrate(state_dir, client_cpus=client_cpus)
    return {"changed": changed, "calibration": msgspec.to_builtins(card), "table": table(card)}


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kvtrial-host", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("command", choices=["start", "run", "status", "stop", "pack", *_ON_STATE_DIR])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--parts", choices=["summary", "full"], default="full")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--client-cpus", default="auto", help="where the load client runs: auto, none or CPUs")
    parser.add_argument("--log", type=Path, help="with run: where it prints to, opened by the program's own account")
    return parser.parse_args(arguments)


def _check_cpus(asked: str) -> None:
    """Raise UnusableInput for what kvtrial_client_cpus can't be."""
    try:
        if asked not in ("auto", "none"):
            cpu_list(asked)
    except ValueError as error:
        raise UnusableInput(f"kvtrial_client_cpus={asked!r}: {error}; give auto, none or CPUs, as 14-15.") from None


def _calibration_command(command: str, state_dir: Path, client_cpus: str, again: bool) -> int:
    try:
        _check_cpus(client_cpus)
        if command == "calibrate":
            print(json.dumps(calibrate_here(state_dir, client_cpus, again)))
        else:
            card = read_calibration(state_dir, client_cpus)
            print(json.dumps({"calibration": msgspec.to_builtins(card) if card else None}))
    except (UnusableInput, OSError) as error:
        print(str(error), file=sys.stderr)
        return LOCK_HELD
    return 0


def _print_to(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)


def main(arguments: list[str] | None = None) -> int:
    """Entry point of `kvtrial-host`. Exit status 0, or 2 for unusable input with one sentence on stderr."""
    options = _arguments(arguments)
    if options.command in _ON_STATE_DIR:
        return _calibration_command(options.command, options.directory.resolve(), options.client_cpus, options.again)
    folder = Folder(options.directory.resolve())
    try:
        if options.command == "run":
            if options.log is not None:
                _print_to(options.log)
            return run_program(folder)
        if options.command == "start":
            print(json.dumps(msgspec.to_builtins(start(folder))))
        elif options.command == "stop":
            print(json.dumps({"message": stop(folder)}))
        elif options.command == "pack":
            if options.output is None:
                raise UnusableInput("pack needs --output FILE, the tar to write.")
            print(json.dumps({"runs": pack(folder, options.output, options.parts)}))
        else:
            progress = folder.read_progress()
            print(json.dumps({**msgspec.to_builtins(progress), "alive": folder.program_alive() is not None}
                             if progress else {"state": "absent"}))  # fmt: skip
    except UnusableInput as error:
        print(str(error), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
