"""The engine's keeper: a small process that starts one engine, samples it, and ends it whatever happens.

It stands between the host program and the engine so that sampling never shares an interpreter with the load client,
and so that the engine cannot outlive the program: the keeper ends it when its standard input closes (the program asked
for it, or died), at the deadline, or when RAM falls below the reserve. The engine runs in a session of its own; what
the keeper ends is that process group and every descendant (as a subreaper it inherits those whose parent was killed).

    python -m kvtrial.host.keeper DIRECTORY       with DIRECTORY/keeper.json; writes engine.json, then exit.json

Stop command: closing standard input.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import statistics
import sys
import time
from itertools import zip_longest
from pathlib import Path

import msgspec
from msgspec import Struct

from kvtrial.host import units
from kvtrial.host.conditions import cpu_mhz, meminfo, nvidia_smi, slowed_down
from kvtrial.host.givenback import vram_used_bytes, wait_until_given_back
from kvtrial.host.processes import (
    Process,
    all_processes,
    end_processes,
    foreign_engines,
    is_alive,
    mapped_shared_memory,
    members,
    read_process,
)
from kvtrial.host.replicas import ReplicaStart, launcher
from kvtrial.host.supervisors import UNIT_SLACK_SECONDS, Held, NotStarted, OwnProcess, UnitProcess
from kvtrial.record.launch import engine_gpus
from kvtrial.record.plan import Launch
from kvtrial.record.record import Samples
from kvtrial.record.store import write_atomically

PR_SET_CHILD_SUBREAPER = 36
SAMPLE_SECONDS = 1.0
FOREIGN_EVERY = 5
GPU_EVERY = 10
LARGEST_PROCESSES = 8
SHARED_MEMORY = Path("/dev/shm")
GIVE_BACK_SECONDS = 30.0


class KeeperSpec(Struct, frozen=True):
    """What the keeper is told. `scratch` is the engine's own temporary folder, removed at the end.

    `engine_cpus`: the CPUs that the engine may run on, empty for all that the keeper may.
    With `unit`, systemd starts the engine: argv and environment stand in the unit, and scratch is its private /tmp.
    `also_envs`: whole environments of the launch's further engines.
    """

    launch: Launch
    env: dict[str, str]
    scratch: str
    log: str
    deadline_seconds: float
    stop_timeout_seconds: float
    ram_reserve_bytes: int
    own_pids: list[int]
    engine_cpus: list[int] = []
    unit: str = ""
    also_envs: list[dict[str, str]] = []


class EngineProcess(Struct, frozen=True):
    """Ownership of a running engine: who it is, and its scratch folder or its unit. Written when it starts.

    `pids`: of its process tree, all that were ever seen. `returncode`: once its own process has ended, -N for signal N.
    """

    pid: int
    start_ticks: int
    scratch: str
    shared_memory: list[str] = []
    unit: str = ""
    pids: list[int] = []
    returncode: int | None = None


class EngineExit(Struct, frozen=True):
    """How the engine ended.

    `reason`: asked, exited (by itself), deadline, ram_below_reserve, foreign_engine, keeper_killed, not_started.
    """

    reason: str
    returncode: int | None
    killed: bool
    stop_seconds: float
    samples: Samples | None
    detail: str = ""
    left_behind: str = ""


class Sampler:
    """Keeps peaks, minima and CPU shares of a machine and of one process tree.

    `gpus`: of how many GPUs, the host's first ones, clock and power are the engine's; None for all.
    """

    def __init__(self, root: Process, own_pids: list[int], gpus: int | None = None) -> None:
        self.root = root
        self.own_pids = own_pids
        memory = meminfo()
        self.used_peak = memory["MemTotal"] - memory["MemAvailable"]
        self.available_start = self.available_min = memory["MemAvailable"]
        self.rss_peak = self.shmem_peak = 0
        self.gpus = gpus
        self.vram_peak: int | None = None
        self.vram_peaks: list[int] = []
        self.rss_peaks: dict[int, int] = {}
        self.vram_foreign: int | None = None
        self.throttle_events: int | None = None
        self.gpu_mhz: list[float] = []
        self.gpu_watts: list[float] = []
        self.mhz: list[float] = []
        self.count = 0
        self.cpu_start = _cpu_times()
        self.ticks: dict[tuple[int, int], tuple[int, int]] = {}
        # What lay in /dev/shm before is somebody's, be it mapped by the engine (a model kept there, say).
        self.not_ours = {str(path) for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()
        self.shared_memory: set[str] = set()
        self.pids: set[int] = set()

    def sample(self) -> int:
        """Take one sample; return the RAM available, bytes."""
        processes = all_processes()
        tree = members(processes, self.root.pid, self.root.pid)
        own = [p for p in processes if p.pid in self.own_pids]
        for process in tree + own:
            key = (process.pid, process.start_ticks)
            first = self.ticks.get(key, (0 if process in tree else process.cpu_ticks, 0))[0]
            self.ticks[key] = (first, process.cpu_ticks)
        pids = {p.pid for p in tree}
        if pids != self.pids or self.count % 20 == 0:
            self.pids = pids
            self.shared_memory |= mapped_shared_memory(pids) - self.not_ours
        memory = meminfo()
        self.available_min = min(self.available_min, memory["MemAvailable"])
        # Of the same moment: a virtual machine may be given memory while it runs.
        self.used_peak = max(self.used_peak, memory["MemTotal"] - memory["MemAvailable"])
        self.rss_peak = max(self.rss_peak, sum(p.rss_bytes for p in tree))
        for process in tree:
            if process.rss_bytes > self.rss_peaks.get(process.pid, 0):
                self.rss_peaks[process.pid] = process.rss_bytes
        self.shmem_peak = max(self.shmem_peak, memory.get("Shmem", 0))
        if self.count % GPU_EVERY == 0:
            if (mhz := cpu_mhz()) is not None:
                self.mhz.append(mhz)
            self._sample_gpus({p.pid for p in processes}, pids)
        self.count += 1
        return memory["MemAvailable"]

    def foreign_engines(self) -> list[tuple[int, str]]:
        """(pid, command) of engines that are not this one.

        Until it executes its own program, a child that the engine has forked since the last sample looks like an
        engine: who belongs to ours is asked after who looks like one, and who is gone by then was none.
        """
        found = foreign_engines({*self.pids, *self.own_pids})
        if not found:
            return []
        processes = all_processes()
        strangers = {p.pid for p in processes} - {p.pid for p in members(processes, self.root.pid, self.root.pid)}
        return [(pid, command) for pid, command in found if pid in strangers]

    def _sample_gpus(self, all_pids: set[int], engines: set[int]) -> None:
        gpus = nvidia_smi("memory.used", "clocks.sm", "power.draw", "clocks_event_reasons.active")
        if not gpus:
            return
        each = [int(gpu["memory.used"]) * 2**20 if gpu["memory.used"].isdigit() else 0 for gpu in gpus]
        self.vram_peak = max(self.vram_peak or 0, sum(each))
        self.vram_peaks = [max(pair) for pair in zip_longest(self.vram_peaks, each, fillvalue=0)]
        for gpu in gpus[: self.gpus]:
            for field, values in (("clocks.sm", self.gpu_mhz), ("power.draw", self.gpu_watts)):
                with contextlib.suppress(ValueError):
                    values.append(float(gpu[field]))
            if (slowed := slowed_down(gpu["clocks_event_reasons.active"])) is not None:
                self.throttle_events = (self.throttle_events or 0) + slowed
        if (foreign := foreign_on_gpus(all_pids, engines)) is not None:
            self.vram_foreign = max(self.vram_foreign or 0, foreign)

    def summary(self) -> Samples:
        """The samples so far."""
        now = _cpu_times()
        spent = {name: now[name] - self.cpu_start[name] for name in now}
        whole = max(1, sum(spent.values()))
        ours = sum(last - first for first, last in self.ticks.values())
        busy = whole - spent["idle"] - spent["iowait"] - spent["steal"]
        return Samples(
            count=self.count,
            interval_seconds=SAMPLE_SECONDS,
            ram_available_start_bytes=self.available_start,
            ram_available_min_bytes=self.available_min,
            ram_used_peak_bytes=self.used_peak,
            engine_rss_peak_bytes=self.rss_peak,
            shared_memory_peak_bytes=self.shmem_peak,
            vram_used_peak_bytes=self.vram_peak,
            vram_used_peak_by_gpu_bytes=self.vram_peaks,
            rss_peak_by_process_bytes=sorted(self.rss_peaks.values(), reverse=True)[:LARGEST_PROCESSES],
            vram_foreign_processes=self.vram_foreign,
            foreign_cpu_share=max(0.0, (busy - ours) / whole),
            steal_share=spent["steal"] / whole,
            cpu_mhz_median=statistics.median(self.mhz) if self.mhz else None,
            throttle_events=self.throttle_events,
            gpu_mhz_median=statistics.median(self.gpu_mhz) if self.gpu_mhz else None,
            gpu_power_watts_median=statistics.median(self.gpu_watts) if self.gpu_watts else None,
        )


def foreign_on_gpus(all_pids: set[int], engines: set[int]) -> int | None:
    """Processes on the GPUs that are not the engine's.

    In a container nvidia-smi may name processes by the host's pids, or hide them: None where it names no process that
    is seen here.
    """
    pids = {int(found["pid"]) for found in nvidia_smi("pid", of="compute-apps") if found["pid"].isdigit()}
    if not pids & all_pids:
        return None
    return len(pids - engines)


def _cpu_times() -> dict[str, int]:
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    values = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    return dict(zip(names, map(int, values), strict=True))


def end_engine(engine: EngineProcess, grace_seconds: float, heir: int | None = None) -> bool:
    """End an engine this project started, by its ownership record: its group, its descendants, its leftovers.

    SIGTERM goes to the engine's own process first, so that it can end its children itself. `heir`: the subreaper that
    inherited orphans, whose descendants are the engine's too. Returns whether SIGKILL was needed. A process that only
    has the engine's old pid is left alone.
    """
    if engine.unit:
        _stop_unit(engine.unit, grace_seconds)
    root = read_process(engine.pid) if engine.pid else None
    if engine.pid == 0 or (root is not None and root.start_ticks != engine.start_ticks):
        _sweep_files(engine)
        return False
    killed = False
    if root is not None and root.state not in "ZX":
        killed = end_processes([root], grace_seconds)
    left = members(all_processes(), engine.pid, engine.pid)
    if heir is not None:
        left += members(all_processes(), engine.pid, heir)
    killed |= end_processes([p for p in left if p.pid not in (heir, os.getpid())], 2.0)
    _sweep_files(engine)
    return killed


def _stop_unit(unit: str, grace_seconds: float) -> None:
    """Stop a unit that is not over yet; what systemd complains of goes to the keeper's log."""
    if units.show(unit, "ActiveState")["ActiveState"] in ("inactive", "failed"):
        return
    if said := units.systemctl("stop", unit, grace_seconds + UNIT_SLACK_SECONDS):
        print(f"systemctl stop {unit}: {said}", flush=True)


def remove_scratch(scratch: str) -> None:
    """Remove an engine's own temporary folder; a unit has none but its private /tmp, which goes with it."""
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)


def _sweep_files(engine: EngineProcess) -> None:
    """Remove the engine's scratch folder, and the files it made in /dev/shm that no process maps any more."""
    remove_scratch(engine.scratch)
    left = [name for name in engine.shared_memory if Path(name).exists()]
    if left:
        mapped = mapped_shared_memory(p.pid for p in all_processes())
        for name in left:
            if name not in mapped:
                Path(name).unlink(missing_ok=True)


def _start(spec: KeeperSpec, directory: Path) -> tuple[Held, EngineProcess]:
    """Start the engine and write its ownership record. Raises NotStarted."""
    held: Held
    if spec.unit:
        # The record first: whatever happens next, the unit's name is known to whoever has to end it.
        write_atomically(directory / "engine.json", msgspec.json.encode(EngineProcess(0, -1, "", unit=spec.unit)))
        held = UnitProcess(spec.unit, spec.stop_timeout_seconds)
    else:
        held = OwnProcess(*_command(spec, directory), spec.scratch, Path(spec.log), spec.engine_cpus)
    pid, ticks = held.process.pid, held.process.start_ticks
    engine = EngineProcess(pid=pid, start_ticks=ticks, scratch=spec.scratch, unit=spec.unit)
    write_atomically(directory / "engine.json", msgspec.json.encode(engine))
    return held, engine


def _command(spec: KeeperSpec, directory: Path) -> tuple[list[str], dict[str, str]]:
    """argv and environment of what is started: the engine, or what starts several of them."""
    if not spec.launch.also:
        return spec.launch.argv, spec.env
    envs = [spec.env, *spec.also_envs]
    starts = [ReplicaStart(engine.argv, env) for engine, env in zip(spec.launch.engines(), envs, strict=True)]
    file = directory / "replicas.json"
    write_atomically(file, msgspec.json.encode(starts))
    return launcher(file), dict(os.environ)


def keep(directory: Path) -> int:
    """Run the keeper on DIRECTORY/keeper.json until its engine has ended; exit status 0."""
    spec = msgspec.json.decode((directory / "keeper.json").read_bytes(), type=KeeperSpec)
    started = time.monotonic()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    before = vram_used_bytes()
    try:
        held, engine = _start(spec, directory)
    except NotStarted as error:
        remove_scratch(spec.scratch)
        _write_exit(directory, EngineExit("not_started", None, False, 0.0, None, str(error)))
        return 0
    taken = sum(engine_gpus(engine.argv) for engine in spec.launch.engines())
    sampler = Sampler(held.process, [*spec.own_pids, os.getpid()], taken)
    reason, engine = _watch(spec, held, sampler, started, engine, directory)
    stopping = time.monotonic()
    samples = sampler.summary()
    killed = held.end(spec.stop_timeout_seconds)
    killed |= end_engine(engine, 0.0, heir=os.getpid())
    returncode, seconds = held.returncode(), time.monotonic() - stopping
    left = wait_until_given_back(before, engine.shared_memory, GIVE_BACK_SECONDS)
    _write_exit(directory, EngineExit(reason, returncode, killed, seconds, samples, left_behind=left))
    return 0


def _write_exit(directory: Path, engine_exit: EngineExit) -> None:
    write_atomically(directory / "exit.json", msgspec.json.encode(engine_exit))


def _watch(
    spec: KeeperSpec,
    held: Held,
    sampler: Sampler,
    started: float,
    engine: EngineProcess,
    directory: Path,
) -> tuple[str, EngineProcess]:
    """Sample until the engine has to end; return why, and the engine with the shared memory it was seen to map.

    The ownership record is kept up to date, so that a killed keeper leaves nothing unknown.
    """
    while True:
        available = sampler.sample()
        ended = held.ended()
        seen = msgspec.structs.replace(
            engine,
            shared_memory=sorted(sampler.shared_memory),
            pids=sorted({*engine.pids, *sampler.pids}),
            returncode=held.returncode() if ended else None,
        )
        if seen != engine:
            engine = seen
            write_atomically(directory / "engine.json", msgspec.json.encode(engine))
        if ended:
            return "exited", engine
        if time.monotonic() - started > spec.deadline_seconds:
            return "deadline", engine
        if available < spec.ram_reserve_bytes:
            return "ram_below_reserve", engine
        if sampler.count % FOREIGN_EVERY == 0 and sampler.foreign_engines():
            return "foreign_engine", engine
        readable, _, _ = select.select([sys.stdin], [], [], SAMPLE_SECONDS)
        if readable and not os.read(sys.stdin.fileno(), 1):
            return "asked", engine


def reap_leftover(directory: Path) -> str | None:
    """End what a killed keeper and host program left of the engine in DIRECTORY; return a sentence if one still ran."""
    path = directory / "engine.json"
    if (directory / "exit.json").exists():
        return None
    if not path.exists():
        with contextlib.suppress(OSError, msgspec.DecodeError):
            spec = msgspec.json.decode((directory / "keeper.json").read_bytes(), type=KeeperSpec)
            remove_scratch(spec.scratch)
        return None
    engine = msgspec.json.decode(path.read_bytes(), type=EngineProcess)
    alive = is_alive(engine.pid, engine.start_ticks)
    end_engine(engine, 10.0)
    name = f"engine pid {engine.pid}" + (f" ({engine.unit})" if engine.unit else "")
    return f"ended {name}, left by an interrupted run" if alive else None


if __name__ == "__main__":
    sys.exit(keep(Path(sys.argv[1])))
