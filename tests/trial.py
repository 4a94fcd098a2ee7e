"""A trial on one host without Ansible: a folder with a plan, the host program, and what its records mean.

By default on the stand-in engine, with small sizes.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from kvtrial.analysis.verdict import conclude
from kvtrial.host.processes import all_processes, command_line
from kvtrial.host.state import Folder, Progress
from kvtrial.record.plan import Plan, RunPlan, canonical_json
from kvtrial.record.record import RunRecord
from kvtrial.record.verdict import GateResult, Verdict

ROOT = Path(__file__).parents[1]
STANDIN = ROOT / "tests" / "standin" / "vllm"
SMALL = {
    "prompt_tokens": 144,
    "tier_bytes": 33554432,
    "targets": 8,
    "pressure": 8,
    "fits": 3,
    "warmups": 7,
    "misses": 4,
}
LIMITS = {"idle_timeout_seconds": 3.0, "start_timeout_seconds": 20.0, "stop_timeout_seconds": 5.0}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def standin_venv(folder: Path) -> Path:
    """A folder that looks like an engine's venv and holds the stand-in."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "vllm").symlink_to(STANDIN)
    (folder / "bin" / "python3").symlink_to(sys.executable)
    info = folder / "lib" / "python3.11" / "site-packages" / "standin-0.dist-info"
    info.mkdir(parents=True)
    (info / "RECORD").write_text("tests' stand-in\n")
    return folder


def standin_model(folder: Path) -> Path:
    """A model folder of which only the manifest is there."""
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({"revision": "standin", "kv_bytes_per_token": 4096}))
    return folder


def request_for(
    tmp_path: Path, faults: str = "", fault_arm: str = "", slowdown: float = 0.3, **changes: Any
) -> dict[str, Any]:
    """A request for one host with the stand-in; `changes` replace fields of the host.

    At a `slowdown` below 2 the stand-in answers faster than the client's own lag allows for.
    """
    venv, model = tmp_path / "venv", tmp_path / "model"
    if not venv.exists():
        standin_venv(venv)
        standin_model(model)
    env = {"VLLM_SERVER_DEV_MODE": "1", "STANDIN_SLOWDOWN": str(slowdown)}
    if faults:
        env["STANDIN_FAULT"] = faults
    if fault_arm:
        env["STANDIN_FAULT_ARM"] = fault_arm
    top = {name: changes.pop(name) for name in ("pairs", "protocol", "seed", "arms", "ladder") if name in changes}
    host: dict[str, Any] = {
        "may_be_disturbed": True,
        "backend": "cpu",
        "vllm_version": "0.32.0",
        "vllm_venv": str(venv),
        "connection": "local",
        "port": free_port(),
        "engine_args": {
            "enforce-eager": True,
            "max-model-len": 512,
            "max-num-seqs": 16,
            "block-size": 32,
            "num-gpu-blocks-override": 33,
        },
        "engine_env": env,
        "connector_extra_config": {"spec_name": "HostOffloadingSpec", "spec_module_path": "kvtrial_host_offload"},
        "model": {
            "name": "tiny",
            "path": str(model),
            "revision": "standin",
            "weights": "random",
            "kv_bytes_per_token": 4096,
            "low_token_id": 32,
            "high_token_id": 126,
        },
        "sizes": {} if Path(top.get("protocol", "")).name.startswith(("preemption", "tier")) else SMALL,
        "limits": LIMITS,
        "ram_reserve_bytes": 2**28,
    }
    host = {name: {**host[name], **value} if name in changes and isinstance(value, dict) and name in host else value
            for name, value in {**host, **changes}.items()}  # fmt: skip
    return {
        "protocol": "offload_return",
        "protocols_dir": str(ROOT / "playbooks" / "protocols"),
        "results_dir": str(tmp_path / "results"),
        "hosts": {"h1": host},
        **top,
    }


class Trial:
    """A host folder with its plan, and what can be done with it."""

    def __init__(self, directory: Path, plan: Plan, runs: int | list[RunPlan] | None) -> None:
        """`runs`: only so many of the plan's runs, or these instead."""
        self.plan = plan
        host_plan = plan.hosts[0]
        if runs is not None:
            chosen = host_plan.runs[:runs] if isinstance(runs, int) else runs
            host_plan = msgspec.structs.replace(host_plan, runs=chosen)
        self.host_plan = host_plan
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "plan.json").write_bytes(canonical_json(host_plan))
        (directory / "campaign").write_text("test-campaign\n")
        (directory / "consent").touch()
        self.folder = Folder(directory)

    def command(self, name: str, *more: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        arguments = ["-m", "kvtrial.host.program", name, "--directory", str(self.folder.directory), *more]
        return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=280, check=check)

    def run(self, check: bool = True) -> subprocess.CompletedProcess[str]:
        """The program in the foreground, to its end."""
        return self.command("run", check=check)

    def wait(self, wanted: Callable[[Progress], bool], seconds: float = 120.0) -> Progress:
        """Until the progress file says what is wanted."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            progress = self.folder.read_progress()
            if progress is not None and wanted(progress):
                return progress
            time.sleep(0.01)
        raise AssertionError(f"waited {seconds} s in vain; last: {self.folder.read_progress()}")

    def records(self) -> list[RunRecord]:
        return list(self.folder.finished_runs().values())

    def verdict(self) -> Verdict:
        planned = msgspec.structs.replace(self.plan, hosts=[self.host_plan])
        return conclude(self.plan.protocol, {"h1": self.records()}, "test-campaign", planned)

    def gate(self, name: str) -> GateResult:
        return next(gate for gate in self.verdict().hosts[0].gates if gate.gate == name)


def ours(folder: Path) -> list[int]:
    """pids of host programs, keepers and engines that belong to a test's own folder, by command line or environment."""
    found = []
    for process in all_processes():
        if process.pid == os.getpid():
            continue
        with contextlib.suppress(OSError):
            environment = (Path("/proc") / str(process.pid) / "environ").read_bytes()
            if str(folder).encode() in command_line(process.pid) + environment:
                found.append(process.pid)
    return found
