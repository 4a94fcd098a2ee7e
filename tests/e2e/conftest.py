"""The playbooks as a user runs them, on an inventory of the test's own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
STANDIN = ROOT / "tests" / "standin" / "vllm"
SMALL = {"prompt_tokens": 144, "tier_bytes": 33554432, "misses": 4}


class Project:
    """A project (the checkout, or an installed collection) and an inventory of one local host."""

    def __init__(self, folder: Path, variables: dict[str, Any], root: Path = ROOT, playbooks: str = "") -> None:
        self.folder = folder
        self.root = root
        self.playbooks = playbooks
        self.results = folder / "results"
        self.inventory = folder / "inventory"
        (self.inventory / "group_vars" / "all").mkdir(parents=True)
        (self.inventory / "group_vars" / "all" / "00-pins.yml").symlink_to(root / "group_vars" / "all" / "pins.yml")
        host = {
            "ansible_connection": "local",
            "ansible_python_interpreter": "{{ ansible_playbook_python }}",
            "kvtrial_results_dir": str(self.results),
            "workload_python": "{{ ansible_playbook_python }}",
            **variables,
        }
        (self.inventory / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"h1": host}}}))

    def command(self, playbook: str, *arguments: str) -> list[str]:
        target = f"{self.playbooks}{playbook.removesuffix('.yml')}" if self.playbooks else playbook
        return [str(BIN / "ansible-playbook"), target, "-i", str(self.inventory), *arguments]

    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
        return {**kept, "PATH": f"{BIN}:{kept['PATH']}", "NO_COLOR": "1"}

    def play(self, playbook: str = "experiment.yml", *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a playbook to its end; what it printed must hold no traceback."""
        done = subprocess.run(self.command(playbook, *arguments), cwd=self.root, env=self.environment(),
                              capture_output=True, text=True, timeout=900, check=False)  # fmt: skip
        assert "Traceback" not in done.stdout + done.stderr
        return done

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start the experiment in a session of its own."""
        return subprocess.Popen(
            self.command("experiment.yml", *arguments),
            cwd=self.root,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def campaigns(self) -> list[Path]:
        return sorted(path.parent for path in self.results.glob("*-*/campaign.json"))

    def verdict(self) -> dict[str, Any]:
        read: dict[str, Any] = json.loads((self.results / "latest" / "verdict.json").read_text())
        return read


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return [line for line in done.stdout.splitlines() if line.strip()][-1]


def progress_of(state_dir: Path) -> dict[str, Any]:
    """The progress of the newest campaign of a host; empty while there is none."""
    for path in sorted(state_dir.glob("campaigns/*/progress.json"), reverse=True):
        read: dict[str, Any] = json.loads(path.read_text())
        return read
    return {}


def wait_for(wanted: Callable[[], bool], seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not wanted():
        assert time.monotonic() < until, f"waited {seconds} s in vain"
        time.sleep(0.05)


def leftovers(folder: Path) -> list[str]:
    """Command lines of processes of ours that concern `folder`."""
    listed = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if str(folder) in line and re.search(r"kvtrial|vllm", line)]


@pytest.fixture(name="standin_project")
def _standin_project(tmp_path: Path) -> Iterator[Callable[..., Project]]:
    """standin_project(faults="no_load", **variables): the checkout with the stand-in engine as an existing one."""
    venv, model = tmp_path / "venv", tmp_path / "model"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "vllm").symlink_to(STANDIN)
    (venv / "lib" / "python3.11" / "site-packages" / "vllm-0.32.0.dist-info").mkdir(parents=True)
    for name in ("python", "python3"):
        (venv / "bin" / name).symlink_to(sys.executable)
    model.mkdir()
    (model / "config.json").write_text(
        json.dumps({"num_hidden_layers": 8, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 512,
                    "num_attention_heads": 8, "torch_dtype": "bfloat16", "model_type": "llama"})
    )  # fmt: skip

    def make(
        faults: str = "", fault_arm: str = "", root: Path = ROOT, playbooks: str = "", **variables: Any
    ) -> Project:
        env = {"VLLM_SERVER_DEV_MODE": "1", "STANDIN_SLOWDOWN": "2"}
        env |= {"STANDIN_FAULT": faults} if faults else {}
        env |= {"STANDIN_FAULT_ARM": fault_arm} if fault_arm else {}
        return Project(
            tmp_path,
            {
                "protocol": str(ROOT / "tests" / "e2e" / "standin_protocol.yml"),
                "kvtrial_host_may_be_disturbed": True,
                "kvtrial_backend": "cpu",
                "kvtrial_state_dir": str(tmp_path / "state"),
                "kvtrial_port": 18765,
                "kvtrial_ram_reserve_bytes": 2**28,
                "kvtrial_model_directory": str(model),
                "kvtrial_engine_args": {"enforce-eager": True, "max-model-len": 512, "block-size": 32,
                                        "max-num-seqs": 16, "num-gpu-blocks-override": 33},
                "kvtrial_engine_env": env,
                "kvtrial_connector_extra_config": {"spec_name": "HostOffloadingSpec",
                                                   "spec_module_path": "kvtrial_host_offload"},
                "kvtrial_sizes": SMALL,
                "kvtrial_sweep_first_seconds": 2,
                "kvtrial_limits": {"idle_timeout_seconds": 3, "stop_timeout_seconds": 5},
                "vllm_existing_venv": str(venv),
                # The host program's own environment is the same for all tests: it is installed once.
                "workload_venv_root": str(ROOT / ".kvtrial" / "venvs"),
                "workload_wheel_cache": str(ROOT / ".kvtrial" / "wheels"),
                **variables,
            },
            root,
            playbooks,
        )  # fmt: skip

    yield make
    for line in subprocess.run(
        ["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True
    ).stdout.splitlines():
        pid, _, args = line.strip().partition(" ")
        if str(tmp_path) in args and pid.isdigit() and int(pid) != os.getpid():
            os.kill(int(pid), signal.SIGKILL)
