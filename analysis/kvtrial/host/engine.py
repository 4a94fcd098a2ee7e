"""One engine's life as the host program sees it: start, wait until healthy, ask what it is, stop.

The process itself is held by the keeper (kvtrial.host.keeper). Arms differ only in their launch specification.
"""

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec

from kvtrial.host.keeper import EngineExit, EngineProcess, KeeperSpec, reap_leftover
from kvtrial.host.loopback import loopback_client
from kvtrial.host.memory import MemoryWatch, sees_the_kernels_pids
from kvtrial.host.processes import (
    all_processes,
    is_alive,
    listening_sockets,
    loopback_alone,
    members,
    port_is_taken,
)
from kvtrial.host.units import SCRATCH, engine_log, engine_unit, environment, show, supervision
from kvtrial.record.cpulist import as_list, cpu_list
from kvtrial.record.enginelog import diagnose, engine_facts
from kvtrial.record.exposition import Reading, parse_page, read_page
from kvtrial.record.launchfacts import flatten
from kvtrial.record.oom import OutOfMemory, tell_apart
from kvtrial.record.plan import HostPlan, Launch, Model
from kvtrial.record.record import Fault, Resolved, Supervision

LOG_TAIL_LINES = 15
HEALTH_POLL_SECONDS = 0.25
CONFIG_TIMEOUT_SECONDS = 60.0
EXIT_STATUS_SECONDS = 3.0
"""By then the keeper has seen that the engine's own process has ended."""
LOOPBACK_PREFIXES = ("127.", "::1")


class RunFault(Exception):
    """A fault that ends a run; carried to its record."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.detail)
        self.fault = fault


class Engine:
    """A started engine. `directory` is the run's folder; the log is written there."""

    def __init__(self, directory: Path, launch: Launch, plan: HostPlan, deadline_seconds: float) -> None:
        self.directory = directory
        self.launch = launch
        self.plan = plan
        self.unit = engine_unit(launch.arm) if plan.supervisor == "systemd" else ""
        self.log = engine_log(launch.arm) if self.unit else directory / "engine.log"
        self.base_urls = [f"http://127.0.0.1:{engine.port}" for engine in launch.engines()]
        self.clients = [loopback_client(url, 10.0) for url in self.base_urls]
        self.pool = ThreadPoolExecutor(max_workers=1)
        cpus = sorted(engine_cpus(plan.client_cpus))
        scratch = "" if self.unit else tempfile.mkdtemp(prefix="kvtrial-")
        spec = KeeperSpec(
            launch=launch,
            env=environment(launch.argv, launch.env, scratch or SCRATCH),
            scratch=scratch,
            log=str(self.log),
            deadline_seconds=deadline_seconds,
            stop_timeout_seconds=plan.limits.stop_timeout_seconds,
            ram_reserve_bytes=plan.limits.ram_reserve_bytes,
            own_pids=[os.getpid()],
            engine_cpus=cpus,
            unit=self.unit,
            also_envs=[environment(engine.argv, engine.env, scratch or SCRATCH) for engine in launch.also],
        )
        (directory / "keeper.json").write_bytes(msgspec.json.encode(spec))
        self.memory = MemoryWatch()
        self.keeper = subprocess.Popen(
            [sys.executable, "-m", "kvtrial.host.keeper", str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=(directory / "keeper.log").open("ab"),
            start_new_session=True,
        )
        self.stop_requested = False

    def process(self) -> EngineProcess | None:
        """The engine's identity, once the keeper has started it."""
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
            process = msgspec.json.decode((self.directory / "engine.json").read_bytes(), type=EngineProcess)
            if not process.pid:
                return None  # a unit that is being started has none yet
            if self.unit:
                self.memory.follow(process.pid)
            return process
        return None

    def is_up(self) -> bool:
        """Whether the engine's own process is alive."""
        process = self.process()
        return process is not None and is_alive(process.pid, process.start_ticks)

    def supervision(self) -> Supervision:
        """What started this engine and watches it."""
        return supervision(self.launch.arm) if self.unit else Supervision("process")

    def wait_healthy(self, on_wait: Callable[[float], None], is_stopping: Callable[[], bool]) -> float:
        """Wait until /health answers 200, of every engine of the arm; return the seconds it took.

        Raises RunFault if an engine dies or is late.
        """
        started = time.monotonic()
        limit = self.plan.limits.start_timeout_seconds
        while (passed := time.monotonic() - started) < limit:
            if self.keeper.poll() is not None or (self.process() is not None and not self.is_up()):
                raise RunFault(self.fault("engine_died_at_start", None, "the engine ended before it was healthy"))
            if is_stopping():
                raise RunFault(Fault(origin="environment", fault="stopped", phase=None, detail="stopped on request"))
            with contextlib.suppress(httpx.HTTPError):
                if all(client.get("/health", timeout=2.0).status_code == 200 for client in self.clients):
                    return time.monotonic() - started
            on_wait(passed)
            time.sleep(HEALTH_POLL_SECONDS)
        detail = f"the engine was not healthy after {limit:.0f} s"
        raise RunFault(self.fault("start_timeout", None, detail))

    def health_status(self) -> int | None:
        """HTTP status of /health, of several engines the first that is not 200; None if one gives no answer."""
        status = None
        with contextlib.suppress(httpx.HTTPError):
            for client in self.clients:
                status = client.get("/health", timeout=5.0).status_code
                if status != 200:
                    return status
            return status
        return None

    def ask_config(self) -> Future[dict[str, Any]]:
        """The flattened resolved configuration, asked for in the background.

        vLLM calls some twenty programs to answer, which takes over a second; warm-up goes on meanwhile. Empty where
        the engine has no /server_info (development mode is off).
        """

        def ask() -> dict[str, Any]:
            with loopback_client(self.base_urls[0], CONFIG_TIMEOUT_SECONDS) as client:
                answer = client.get("/server_info", params={"config_format": "json"})
            config = flatten(answer.json()) if answer.status_code == 200 else {}
            return {path: value for path, value in config.items() if not path.startswith("system_env.")}

        return self.pool.submit(ask)

    def config_of(self, asked: Future[dict[str, Any]]) -> dict[str, Any]:
        """The answer to `ask_config`. Raises RunFault if the engine gave none."""
        try:
            return asked.result(CONFIG_TIMEOUT_SECONDS)
        except (httpx.HTTPError, ValueError, TimeoutError) as error:
            raise RunFault(self.fault("engine_not_answering", None, f"/server_info gave no answer: {error}")) from error

    def resolve(self) -> Resolved:
        """Ask the engine what it is, but for its configuration.

        Raises RunFault if it can't be asked, or if the engines of an arm are not alike.
        """
        try:
            (version, models, page), *others = [self._asked(client) for client in self.clients]
        except (httpx.HTTPError, KeyError, ValueError) as error:
            raise RunFault(self.fault("engine_not_answering", None, f"asking the engine failed: {error}")) from error
        alike = version, models, _pool_of(page)
        if any((its, served, _pool_of(reading)) != alike for its, served, reading in others):
            detail = "the engines of this arm differ in version, served models or KV cache, so they are no replicas"
            raise RunFault(self.fault("replicas_differ", None, detail))
        listening = listening_sockets(self.pids())
        return Resolved(
            vllm_version=version,
            served_models=models,
            config={},
            cache_config=page.info.get("cache_config", {}),
            log_facts=self._log_facts(),
            listening=listening,
            packages_sha256=packages_sha256(Path(self.launch.argv[0]).parent.parent),
            model_revision=model_revision(self.plan.model_of(self.launch.arm)),
            api_process_started=page.values.get("process_start_time_seconds"),
            loopback_alone=loopback_alone(),
        )

    def _asked(self, client: httpx.Client) -> tuple[str, list[str], Reading]:
        """One engine's version, served models and page of /metrics."""
        return (
            client.get("/version").json()["version"],
            [model["id"] for model in client.get("/v1/models").json()["data"]],
            read_page(parse_page(client.get("/metrics").text), self.plan.vllm_version),
        )

    def _keep_log(self) -> None:
        """Take the unit's log, which lies in a folder of root's, into the run's folder."""
        with contextlib.suppress(FileNotFoundError, PermissionError):
            (self.directory / "engine.log").write_bytes(self.log.read_bytes())

    def pids(self) -> list[int]:
        """pids of the engine's whole process tree."""
        process = self.process()
        return [p.pid for p in members(all_processes(), process.pid, process.pid)] if process else []

    def log_text(self) -> str:
        """The engine's log so far."""
        with contextlib.suppress(FileNotFoundError):
            return self.log.read_text(errors="replace")
        return ""

    def _log_facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = msgspec.to_builtins(engine_facts(self.log_text(), self.plan.vllm_version))
        return facts

    def is_standin(self) -> bool:
        """Whether this is the tests' stand-in, which says so in its log."""
        return "STAND-IN ENGINE" in self.log_text()

    def fault(self, name: str, phase: str | None, detail: str) -> Fault:
        """An engine fault with the log's last lines and, where known, cause and fix."""
        text = self.log_text()
        known = diagnose(text, self.plan.vllm_version)
        cause, fix = (known.cause, known.fix) if known else (None, None)
        told = self._out_of_memory(known.class_ if known else None)
        if told.kind in ("kernel_oom_killer", "cgroup_limit", "killed_for_memory"):
            cause, fix = f"{told.sentence} ({told.evidence})", told.do
        elif told.kind == "kernel_killed_somebody":
            cause = " ".join(part for part in (cause, f"{told.sentence} ({told.evidence})") if part)
            fix = " ".join(part for part in (fix, told.do) if part)
        elif told.kind in ("cuda_at_start", "cuda_in_flight"):
            cause = f"{told.sentence} {cause}"
        lines = [line for line in text.splitlines() if line.strip()]
        return Fault(
            origin="engine",
            fault=name,
            phase=phase,
            detail=detail,
            cause=cause,
            fix=fix,
            log_tail=lines[-LOG_TAIL_LINES:],
        )

    def _out_of_memory(self, log_class: str | None) -> OutOfMemory:
        """What memory ran out since the start. A kill by the kernel stands in no engine's log, and its parent errs."""
        process = self._ended_process()
        return tell_apart(
            log_class,
            self.memory.before,
            self.memory.now(),
            self.memory.new_lines(),
            returncode=process.returncode if process else None,
            pids={*process.pids, process.pid} if process and sees_the_kernels_pids() else None,
            unit_killed=bool(self.unit) and show(self.unit, "Result")["Result"] == "oom-kill",
        )

    def _ended_process(self) -> EngineProcess | None:
        """The engine's identity; of one that has ended with its exit status, which the keeper sees a moment later."""
        until = time.monotonic() + EXIT_STATUS_SECONDS
        while (process := self.process()) is not None and process.returncode is None:
            if is_alive(process.pid, process.start_ticks) or time.monotonic() > until or self.keeper.poll() is not None:
                break
            time.sleep(HEALTH_POLL_SECONDS / 5)
        return process

    def request_stop(self) -> None:
        """Tell the keeper to end the engine; returns at once. Safe in a signal handler."""
        self.stop_requested = True
        if self.keeper.stdin is not None:
            with contextlib.suppress(OSError):
                os.close(self.keeper.stdin.fileno())
            self.keeper.stdin = None

    def stop(self) -> EngineExit:
        """End the engine, wait for the keeper's account; if the keeper itself was killed, end what it left."""
        for client in self.clients:
            client.close()
        self.pool.shutdown(wait=False)
        self.request_stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.keeper.wait(self.plan.limits.stop_timeout_seconds + 30.0)
        path = self.directory / "exit.json"
        if self.unit:
            self._keep_log()
        if path.exists():
            return msgspec.json.decode(path.read_bytes(), type=EngineExit)
        self.keeper.kill()
        self.keeper.wait()
        reap_leftover(self.directory)
        return EngineExit("keeper_killed", None, True, 0.0, None, "the keeper was killed; its engine was ended")


def _pool_of(page: Reading) -> list[str | None]:
    """How many blocks of how many tokens an engine's KV cache has."""
    labels = page.info.get("cache_config", {})
    return [labels.get("num_gpu_blocks"), labels.get("block_size")]


def engine_cpus(client_cpus: str) -> set[int]:
    """The CPUs to start the engine on: all but the client's where those are named, empty for no limit.

    Raises RunFault where the named CPUs leave none for the engine, or are none of this host's.
    """
    if client_cpus in ("auto", "none"):
        return set()
    ours = os.sched_getaffinity(0)
    clients = cpu_list(client_cpus)
    if not clients & ours or not ours - clients:
        detail = (
            f"kvtrial_client_cpus={client_cpus} leaves no CPU to the {'engine' if clients & ours else 'client'}: this "
            f"program may run on {as_list(ours)}; name some of these, or auto"
        )
        raise RunFault(Fault(origin="environment", fault="client_cpus", phase=None, detail=detail))
    return ours - clients


def refuse_port(port: int) -> None:
    """Raise RunFault if something listens on the engine's port already."""
    if port_is_taken(port):
        detail = f"port {port} is taken by another process; free it or set kvtrial_port to a free one"
        raise RunFault(Fault(origin="environment", fault="port_taken", phase=None, detail=detail))


def routable(resolved: Resolved) -> list[str]:
    """Listening addresses that can be reached from outside this machine; none where there is only loopback."""
    if resolved.loopback_alone:
        return []
    return [f"{s.address}:{s.port}" for s in resolved.listening if not s.address.startswith(LOOPBACK_PREFIXES)]


def packages_sha256(venv: Path) -> str:
    """One hash over every installed distribution of a venv: its name and version, and its RECORD file."""
    digest = hashlib.sha256()
    for info in sorted(venv.glob("lib/python3*/site-packages/*.dist-info")):
        digest.update(info.name.encode())
        with contextlib.suppress(OSError):
            digest.update((info / "RECORD").read_bytes())
    return digest.hexdigest()


def model_revision(model: Model) -> str:
    """The revision that the model's manifest states; empty where there is no manifest."""
    path = Path(model.manifest) if model.manifest else Path(model.path) / "manifest.json"
    with contextlib.suppress(OSError, msgspec.DecodeError, KeyError):
        return str(msgspec.json.decode(path.read_bytes())["revision"])
    return ""
