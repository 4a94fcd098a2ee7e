"""The two processes, their log, and their ends."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from engine_standin.engine import Engine, read_pace
from engine_standin.faults import FAULTS, Faults, UnknownFault, planted_faults
from engine_standin.launch import VERSION, Launch, RefusedLaunch, cache_config, read_launch, server_info
from engine_standin.metrics import Metrics
from engine_standin.server import ENGINE_DEAD, Server, shown_model_name

STANDIN_LINE = "STAND-IN ENGINE: not vLLM; results are evidence standin"
ORPHAN_LIFE_SECONDS = 300
CORE_TITLE = b"VLLM::EngineCore"
NO_SHM = (
    "RuntimeError: Insufficient space in /dev/shm for CPU KV offload shared region in /dev/shm: 256 MiB required, "
    "64 MiB free. Increase /dev/shm (e.g. --shm-size or --ipc=host)."
)
CUDA_OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB "
    "of which 1.21 GiB is free."
)


class Log:
    """Lines as vLLM prints them, on stdout."""

    def __init__(self, core_pid: int) -> None:
        self.api, self.core = ("APIServer", os.getpid()), ("EngineCore", core_pid)

    def plain(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            print(text, flush=True)

    def line(self, who: tuple[str, int], place: str, text: str, level: str = "INFO") -> None:
        stamp = time.strftime("%m-%d %H:%M:%S")
        for part in text.split("\n"):
            self.plain(f"({who[0]} pid={who[1]}) {level} {stamp} [{place}] {part}")


def start_core(outlives_parent: bool) -> tuple[int, int]:
    """Fork EngineCore: it sleeps until the pipe from its parent closes. Returns (pid, our end of the pipe)."""
    theirs, ours = os.pipe()
    # Blocked meanwhile: a SIGTERM that meets the child before it has its own handler would be lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.close(theirs)
        return pid, ours
    os.close(ours)
    _take_title(CORE_TITLE)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if outlives_parent else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if outlives_parent:
        time.sleep(ORPHAN_LIFE_SECONDS)
    else:
        os.read(theirs, 1)
    os._exit(0)


def _take_title(title: bytes) -> None:
    """Overwrite this process's name and command line, as setproctitle does for the real EngineCore."""
    ctypes.CDLL(None).prctl(15, title[:15], 0, 0, 0)
    numbers = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    start, end = int(numbers[45]), int(numbers[46])
    ctypes.memmove(start, title.ljust(end - start, b"\0")[: end - start], end - start)


def log_start(log: Log, launch: Launch, version: str) -> None:
    """The lines that the project reads facts from."""
    banner = (
        "",
        "       █     █     █▄   ▄█",
        f" ▄▄ ▄█ █     █     █ ▀▄▀ █  version {version}",
        f"  █▄█▀ █     █     █     █  model   {launch.model_dir}",
        "   ▀▀  ▀▀▀▀▀ ▀▀▀▀▀ ▀     ▀",
        "",
    )
    log.plain(STANDIN_LINE)
    log.line(log.api, "api_utils.py:347", "\n".join(banner))
    shown = {k: v for k, v in launch.arguments.items() if k != "kv_transfer_config"}
    shown |= {"model": launch.model_dir, "served_model_name": [launch.model_name]}
    pairs = [f"{name!r}: {value!r}" for name, value in shown.items()]
    if launch.transfer:
        inside = ", ".join(f"{name}={value!r}" for name, value in launch.transfer.items())
        pairs.append(f"'kv_transfer_config': KVTransferConfig({inside})")
    log.line(log.api, "api_utils.py:286", f"non-default args: {{{', '.join(pairs)}}}")
    log.line(log.api, "model.py:2152", f"Using max model len {launch.max_model_len}")
    batched = f"Chunked prefill is enabled with max_num_batched_tokens={launch.max_num_batched_tokens}."
    log.line(log.api, "scheduler.py:307", batched)
    config = f"model='{launch.model_dir}', max_seq_len={launch.max_model_len}, device_config=cpu"
    log.line(log.core, "core.py:133", f"Initializing a V1 LLM engine (v{version}) with config: {config}")


def log_caches(log: Log, launch: Launch, faults: Faults) -> None:
    log.line(log.core, "utils.py:347", "Using LBHNC KV cache layout.")
    if launch.override:
        made = launch.kv_cache_bytes // (launch.block_tokens * launch.kv_bytes_per_token)
        override = f"Overriding num_gpu_blocks={made} with num_gpu_blocks_override={launch.override}"
        log.line(log.core, "kv_cache_utils.py:2619", override)
    size = f"CPU KV cache size: {launch.cache_tokens:,} tokens, Maximum concurrency for "
    size += f"{launch.max_model_len:,} tokens per request: {launch.concurrency:.2f}x"
    log.line(log.core, "kv_cache_utils.py:2327", size)
    if not launch.transfer:
        return
    name, engine_id = launch.transfer["kv_connector"], launch.transfer["engine_id"]
    extra = launch.transfer["kv_connector_extra_config"]
    spec = extra.get("spec_name", "CPUOffloadingSpec")
    log.line(log.core, "factory.py:62", f"Creating v1 connector with name: {name} and engine_id: {engine_id}")
    if "spec_module_path" in extra:
        loading = f"Loading out-of-tree offloading spec '{spec}' from '{extra['spec_module_path']}'."
        log.line(log.core, "factory.py:43", loading)
    log.line(log.core, "factory.py:57", f"Creating offloading spec with name: {spec}")
    if "host_register_failed" in faults:
        gib = extra["cpu_bytes_to_use"] / 1e9
        log.line(log.core, "gpu_worker.py:244", "cudaHostRegister failed (code=2)", "WARNING")
        failed = f"host_register failed for rank=0 at 0.00 of {gib:.2f} GB; the offload region stays pageable"
        log.line(log.core, "gpu_worker.py:250", failed, "WARNING")


def log_failure(log: Log, text: str) -> None:
    """The traceback that a failed start leaves."""
    trace = f"EngineCore failed to start.\nTraceback (most recent call last):\n{text}"
    log.line(log.core, "core.py:1311", trace, "ERROR")
    log.plain("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}")


def main(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """`vllm ...`: the exit status."""
    if list(argv) == ["--version"]:
        print(VERSION)
        return 0
    if list(argv) == ["--faults"]:
        print("\n".join(f"{name:22}{meaning}" for name, meaning in FAULTS.items()))
        return 0
    if not argv or argv[0] != "serve":
        print("the stand-in knows `vllm serve`, `vllm --version` and `vllm --faults`", file=sys.stderr)
        return 2
    # From here on SIGTERM ends the process with status 0 wherever it stands, as the real one does.
    signal.signal(signal.SIGTERM, _leave)
    core_pid = 0
    try:
        faults = planted_faults(environment, any(word.startswith("--kv-transfer-config") for word in argv))
        core_pid, _pipe = start_core("orphan_core" in faults)
        if "ignore_sigterm" in faults:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return _serve(argv[1:], environment, faults, core_pid)
    except UnknownFault as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        if core_pid:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(core_pid, signal.SIGTERM)
                os.waitpid(core_pid, 0 if "orphan_core" not in faults else os.WNOHANG)


def _leave(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def _serve(argv: Sequence[str], environment: Mapping[str, str], faults: Faults, core_pid: int) -> int:
    log = Log(core_pid)
    try:
        launch = read_launch(argv)
    except RefusedLaunch as refused:
        log_failure(log, str(refused))
        return 1
    log_start(log, launch, faults.text("wrong_version") if "wrong_version" in faults else VERSION)
    if "fail_start" in faults:
        log_failure(log, NO_SHM)
        return 1
    if "cuda_oom_at_start" in faults:
        log_failure(log, CUDA_OOM)
        return 1
    if "slow_start" in faults:
        time.sleep(faults.number("slow_start", 1))
    while "never_healthy" in faults:
        time.sleep(1)
    log_caches(log, launch, faults)
    asyncio.run(_serve_http(launch, environment, faults, log))
    return 0


async def _serve_http(launch: Launch, environment: Mapping[str, str], faults: Faults, log: Log) -> None:
    labels = {name: str(value) for name, value in cache_config(launch).items()}
    shows_connector = launch.transfer is not None or "connector_in_control" in faults
    metrics = Metrics(shown_model_name(launch, faults), launch.max_model_len, shows_connector, labels)
    engine = Engine(launch, faults, read_pace(environment), metrics)
    core_pid = log.core[1]
    engine.log_warning = lambda text: log.line(log.core, "scheduler.py:1995", text, "WARNING")
    engine.on_kill = lambda: _kill_both(core_pid)
    engine.on_dead = lambda: _bury_core(
        log, CUDA_OOM if "cuda_oom_after" in faults else "RuntimeError: planted by a test"
    )
    developing = environment.get("VLLM_SERVER_DEV_MODE") == "1"
    shown = server_info(launch, environment, faults, time.time_ns()) if developing else None
    server = Server(engine, launch, faults, shown, log.plain)

    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    if "ignore_sigterm" not in faults:
        loop.add_signal_handler(signal.SIGTERM, stopped.set)
    loop.add_signal_handler(signal.SIGINT, stopped.set)
    log.line(log.api, "entry.py:140", f"Starting vLLM server on http://{launch.host}:{launch.port}")
    listener = await asyncio.start_server(server.serve, launch.host, launch.port, limit=2**24, backlog=2048)
    extra = _listen_everywhere() if "routable_bind" in faults else None
    log.plain(f"INFO:     Started server process [{os.getpid()}]")
    log.plain("INFO:     Application startup complete.")
    scheduling = asyncio.create_task(engine.run())
    scheduling.add_done_callback(_report_crash)
    await stopped.wait()
    log.line(log.api, "launcher.py:254", "[shutdown] API server: shutdown triggered")
    scheduling.cancel()
    listener.close()
    if extra:
        extra.close()
    log.plain("INFO:     Application shutdown complete.")


def _report_crash(task: asyncio.Task[None]) -> None:
    """A defect of the stand-in itself must not look like a deadlock of the engine."""
    if not task.cancelled() and (error := task.exception()):
        print(f"STAND-IN DEFECT: {error!r}", file=sys.stderr, flush=True)
        os._exit(70)


def _listen_everywhere() -> socket.socket:
    return socket.create_server(("0.0.0.0", 0))


def _kill_both(core_pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(core_pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _bury_core(log: Log, error: str) -> None:
    fatal = f"EngineCore encountered a fatal error.\n{error}"
    log.line(log.core, "core.py:1320", fatal, "ERROR")
    died = f"AsyncLLM output_handler failed.\nvllm.v1.engine.exceptions.EngineDeadError: {ENGINE_DEAD}"
    log.line(log.api, "async_llm.py:708", died, "ERROR")
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(log.core[1], signal.SIGKILL)
        os.waitpid(log.core[1], 0)
