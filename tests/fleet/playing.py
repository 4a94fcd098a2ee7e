"""The project's playbooks as a user runs them, on a fleet of the rig."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import testinfra
import yaml
from rig import STATE, USER, Fleet, Host

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


class Playbooks:
    """Playbooks of this checkout over SSH. `variables` hold for all hosts; `set` changes them for one or all."""

    def __init__(self, fleet: Fleet, variables: dict[str, object]) -> None:
        self.fleet = fleet
        self.results = fleet.folder / "results"
        self.started: list[Running] = []
        folder = fleet.folder / "group_vars" / "all"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "00-pins.yml").symlink_to(ROOT / "group_vars" / "all" / "pins.yml")
        self.variables: dict[str, object] = {"kvtrial_results_dir": str(self.results), **variables}
        self.set()

    def set(self, host: str = "", **variables: object) -> None:
        """Add variables, of one host or of all."""
        if host:
            folder = self.fleet.folder / "host_vars"
            folder.mkdir(exist_ok=True)
            (folder / f"{host}.yml").write_text(yaml.safe_dump(variables))
            return
        self.variables |= variables
        path = self.fleet.folder / "group_vars" / "all" / "10-test.yml"
        path.write_text(yaml.safe_dump(self.variables))

    def command(self, playbook: str | Path, *arguments: str) -> list[str]:
        """The command line that plays it where the controller runs."""
        return self.fleet.entered(BIN / "ansible-playbook", playbook, "-i", self.fleet.inventory, *arguments)

    def environment(self) -> dict[str, str]:
        """The caller's, without its Ansible settings; ssh masters are the fleet's own."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
        return {
            **kept,
            "PATH": f"{BIN}:{kept['PATH']}",
            "NO_COLOR": "1",
            "ANSIBLE_SSH_CONTROL_PATH_DIR": str(self.fleet.folder / "ssh"),
        }

    def play(
        self, playbook: str | Path, *arguments: str, fails: bool | None = None, seconds: float = 800.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a playbook to its end. No traceback reaches a user; `fails` says how it must end, None: any way."""
        done = subprocess.run(self.command(playbook, *arguments), cwd=ROOT, env=self.environment(),
                              capture_output=True, text=True, timeout=seconds, check=False)  # fmt: skip
        assert "Traceback" not in done.stdout + done.stderr, done.stdout[-4000:] + done.stderr[-2000:]
        if fails is not None:
            assert (done.returncode != 0) == fails, done.stdout[-6000:] + done.stderr[-2000:]
        return done

    def start(self, playbook: str | Path, *arguments: str) -> "Running":
        """Start a playbook in a session of its own."""
        self.started.append(Running(self, self.command(playbook, *arguments)))
        return self.started[-1]

    def end(self) -> None:
        """Kill what `start` started and is not over: a test that failed leaves nothing at work beside the next one."""
        for running in self.started:
            if not running.is_over():
                running.signal(signal.SIGKILL)
                running.process.wait()
        self.started.clear()

    def ad_hoc(self, module: str, arguments: str = "", pattern: str = "all") -> subprocess.CompletedProcess[str]:
        """One module on the hosts."""
        command = self.fleet.entered(
            BIN / "ansible", "-i", self.fleet.inventory, "-m", module, "-a", arguments, pattern
        )
        return subprocess.run(command, cwd=ROOT, env=self.environment(), capture_output=True, text=True, check=False)


class Running:
    """A playbook at work. It prints to a file: a pipe that nobody reads would fill up and stop it."""

    def __init__(self, playbooks: Playbooks, command: list[str]) -> None:
        self.log = playbooks.fleet.folder / f"playbook-{time.monotonic_ns()}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=playbooks.environment(), stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.pid = self.process.pid

    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None

    def signal(self, number: int) -> None:
        """Send a signal to it and all its processes."""
        os.killpg(self.pid, number)

    def finish(self, seconds: float = 240.0) -> tuple[int, str]:
        """Wait for its end: status and what it printed. It is killed where it takes longer."""
        try:
            status = self.process.wait(seconds)
        except BaseException:
            self.signal(signal.SIGKILL)
            self.process.wait()
            raise
        return status, self.log.read_text()


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """What a user sees last."""
    return [line for line in done.stdout.splitlines() if line.strip()][-1]


def recap(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, int]]:
    """Counts by host of the play recap."""
    found = {}
    for line in done.stdout.partition("PLAY RECAP")[2].splitlines():
        if match := re.match(r"(\S+)\s*:\s*(ok=.*)", line):
            found[match[1]] = {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", match[2])}
    return found


def asked(host: Host) -> testinfra.host.Host:
    """The host as testinfra sees it: over SSH as the deploying user, with sudo, from where the controller runs."""
    folder = host.fleet.folder
    relay = " ".join(host.fleet.entered("bash", "-c", "'exec 3<>/dev/tcp/%h/%p; cat <&3 & cat >&3'"))
    config = folder / "ssh_config"
    config.write_text(
        f"Host *\n  User {USER}\n  IdentityFile {STATE / 'id'}\n  UserKnownHostsFile {folder / 'known_hosts'}\n"
        f"  ProxyCommand {relay}\n  ControlMaster auto\n  ControlPersist 60\n  ControlPath {folder}/asked-%h\n"
    )
    return testinfra.get_host(f"ssh://{host.address}", ssh_config=str(config), controlpersist=0, sudo=True)


def wheels_for(python: str) -> Path:
    """The wheels of requirements/host.txt for a CPython such as 3.11, from where pip is configured to look."""
    folder = ROOT / ".kvtrial" / "host-wheels"
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--require-hashes", "--no-deps", "--only-binary=:all:",
         "--python-version", python, "-r", ROOT / "requirements" / "host.txt", "-d", folder],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"pip can't fetch requirements/host.txt: {done.stderr.strip().splitlines()[-1]}")
    return folder


STATE_DIR = "/var/lib/kvtrial"
INSTALLED = ROOT / ".kvtrial" / "fleet-venvs"
"""The host program's environment as the project installed it on a host of the rig."""


def bring_installed(fleet: Fleet) -> None:
    """Put on every host what an earlier fleet had installed, if there was one."""
    for host in fleet.hosts if INSTALLED.exists() else []:
        host.sh(f"mkdir -p {STATE_DIR}")
        host.put(INSTALLED, f"{STATE_DIR}/venvs")


def provision_quickly(plays: Playbooks) -> None:
    """Provision with what an earlier fleet was given by it: what is the same is checked, not installed once more."""
    bring_installed(plays.fleet)
    plays.play("playbooks/provision.yml", fails=False, seconds=1200)
    there = plays.fleet.hosts[0].folder / f"disk/up{STATE_DIR}/venvs"
    found, kept = ({path.name for path in folder.glob("workload-*")} for folder in (there, INSTALLED))
    if found != kept:
        shutil.rmtree(INSTALLED, ignore_errors=True)
        incoming = INSTALLED.with_suffix(".tmp")
        shutil.rmtree(incoming, ignore_errors=True)
        shutil.copytree(there, incoming, symlinks=True)
        for old in sorted(incoming.glob("workload-*"), key=lambda path: path.stat().st_mtime)[:-1]:
            shutil.rmtree(old)
        incoming.rename(INSTALLED)


SMALL = {"prompt_tokens": 144, "tier_bytes": 33554432, "misses": 4}


def standin_variables(wheels: Path, port: int = 18765) -> dict[str, object]:
    """Variables of hosts with the stand-in engine in /opt/standin-venv, as `furnish_standin` puts it there."""
    return {
        "ansible_become": True,
        "protocol": str(ROOT / "tests" / "e2e" / "standin_protocol.yml"),
        "kvtrial_host_may_be_disturbed": True,
        "kvtrial_backend": "cpu",
        "kvtrial_port": port,
        "kvtrial_ram_reserve_bytes": 2**28,
        "kvtrial_disk_reserve_bytes": 2**24,
        "kvtrial_model_directory": "/opt/model",
        "kvtrial_engine_args": {"enforce-eager": True, "max-model-len": 512, "block-size": 32, "max-num-seqs": 16,
                                "num-gpu-blocks-override": 33},
        "kvtrial_engine_env": {"VLLM_SERVER_DEV_MODE": "1", "STANDIN_SLOWDOWN": "2", "ODD_ONE": 'a "b" $HOME %i \\ é'},
        "kvtrial_connector_extra_config": {"spec_name": "HostOffloadingSpec",
                                           "spec_module_path": "kvtrial_host_offload"},
        "kvtrial_sizes": SMALL,
        "kvtrial_sweep_first_seconds": 2,
        "kvtrial_limits": {"idle_timeout_seconds": 3, "stop_timeout_seconds": 5},
        "vllm_existing_venv": "/opt/standin-venv",
        "workload_wheelhouse": str(wheels),
        "workload_wheel_cache": str(ROOT / ".kvtrial" / "wheels"),
    }  # fmt: skip


def furnish_standin(fleet: Fleet) -> None:
    """Put the tests' stand-in engine and a model folder without weights on every host."""
    for host in fleet.hosts:
        host.put(ROOT / "tests" / "standin", "/opt/standin")
        host.sh(
            "mkdir -p /opt/standin-venv/bin /opt/model; ln -sf /opt/standin/vllm /opt/standin-venv/bin/vllm;"
            "mkdir -p /opt/standin-venv/lib/python3.11/site-packages/vllm-0.32.0.dist-info;"
            "for name in python python3; do ln -sf /usr/bin/python3 /opt/standin-venv/bin/$name; done;"
            "chmod -R a+rX /opt"
        )
        host.write("/opt/model/config.json", json.dumps(
            {"num_hidden_layers": 8, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 512,
             "num_attention_heads": 8, "torch_dtype": "bfloat16", "model_type": "llama"}))  # fmt: skip
