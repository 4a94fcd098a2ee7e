"""The project as Ansible sees it, and the tools of the environment that runs the tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent

# Importing ansible_collections.kvtrial.vllm… works once Ansible's finder knows the folder with the link.
if "ansible_collections.kvtrial" not in sys.modules:
    from ansible.utils.collection_loader._collection_finder import _AnsibleCollectionFinder

    if not any(type(finder).__name__ == "_AnsibleCollectionFinder" for finder in sys.meta_path):
        _AnsibleCollectionFinder(paths=[str(ROOT / "collections")])._install()


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without Ansible's own settings, with the project's configuration."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    path = f"{BIN}{os.pathsep}{kept.get('PATH', '')}"
    return {**kept, "PATH": path, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "NO_COLOR": "1", **changes}


class Tools:
    """Runs a command of the environment and gives back what it printed."""

    root = ROOT
    environment = staticmethod(environment)

    def path(self, command: str) -> str:
        return str(BIN / command)

    def run(self, *command: str, cwd: Path = ROOT, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(BIN / command[0]), *command[1:]],
            cwd=cwd,
            env=environment(**changes),
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )


@pytest.fixture(scope="session")
def tools() -> Tools:
    return Tools()


@pytest.fixture
def proc(tmp_path):
    """A made-up /proc: `proc(pid, cmdline, ...)` adds a process, `proc.root` is its folder."""

    class Proc:
        root = str(tmp_path / "proc")

        def __call__(self, pid, command="sleep 1", state="S", parent=1, ticks=100, maps=""):
            folder = tmp_path / "proc" / str(pid)
            folder.mkdir(parents=True)
            fields = [state, str(parent), "1", "1", "0", "-1", "0", "0", "0", "0", "0", "7", "8", "0", "0", "20", "0"]
            fields += ["1", "0", str(ticks), "0", "0"]
            (folder / "stat").write_text(f"{pid} (a name) with ) in it) {' '.join(fields)}\n")
            (folder / "cmdline").write_bytes(command.replace(" ", "\0").encode())
            (folder / "maps").write_text(maps)

    (tmp_path / "proc").mkdir()
    return Proc()


class Machine:
    """This machine as the host h1 of an inventory, with a state directory and a /run of its own; as root."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        self.lock = folder / "run" / "kvtrial" / "provision.lock"
        (folder / "run").mkdir()
        self.inventory = folder / "inventory"
        pins = self.inventory / "group_vars" / "all"
        pins.mkdir(parents=True)
        (pins / "00-pins.yml").symlink_to(ROOT / "group_vars" / "all" / "pins.yml")
        self.variables: dict[str, object] = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "protocol": "offload_return",
            "kvtrial_host_may_be_disturbed": True,
            "kvtrial_backend": "cpu",
            "kvtrial_state_dir": str(self.state),
            "kvtrial_results_dir": str(folder / "results"),
            "kvtrial_port": 18767,
            "kvtrial_ram_reserve_bytes": 1,
            "kvtrial_engine_args": {"num-gpu-blocks-override": 33, "max-model-len": 512, "block-size": 32},
            "kvtrial_sizes": {"tier_bytes": 33554432, "prompt_tokens": 144, "misses": 4},
            "kvtrial_connector_extra_config": {
                "spec_name": "HostOffloadingSpec",
                "spec_module_path": "kvtrial_host_offload",
            },
            "workload_wheel_cache": str(folder / "wheels"),
            "workload_python": sys.executable,
        }

    def play(
        self, playbook: str, *arguments: str, apart: bool = True, **variables: object
    ) -> subprocess.CompletedProcess[str]:
        """Run a playbook on it; `variables` are the host's own. `apart`: it sees no other process of this machine."""
        hosts = {"all": {"hosts": {"h1": self.variables | variables}}}
        (self.inventory / "hosts.yml").write_text(json.dumps(hosts))
        world = ["--fork", "--kill-child", "--pid", "--mount", "--mount-proc"] if apart else ["--mount"]
        mounted = ["sh", "-c", f'mount --bind {self.lock.parents[1]} /run && exec "$@"', "sh"]
        command = [
            "unshare",
            *world,
            *mounted,
            str(BIN / "ansible-playbook"),
            "-i",
            str(self.inventory),
            playbook,
            *arguments,
        ]
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
        assert "Traceback" not in done.stdout + done.stderr
        return done

    @staticmethod
    def last(done: subprocess.CompletedProcess[str]) -> str:
        """The last line."""
        return [line for line in done.stdout.splitlines() if line.strip()][-1]


@pytest.fixture
def machine(tmp_path):
    """This machine as a host; skipped where it can't be given a /run of its own."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode or os.geteuid():
        pytest.skip("a mount namespace, which gives the host's lock a place of its own, takes root")
    return Machine(tmp_path)
