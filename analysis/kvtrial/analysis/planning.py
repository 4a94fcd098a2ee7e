"""Ask Ansible for the inventory's settings and plan with them, without touching a host."""

import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import ansible_runner

from kvtrial.record.errors import UnusableInput


def project_root() -> Path:
    """The project: where the command was typed, or a folder above it, with playbooks/plan.yml."""
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / "playbooks" / "plan.yml").is_file():
            return folder
    raise UnusableInput(f"{Path.cwd()} is not inside a kvtrial project; go to the folder that holds playbooks/.")


def announce(protocol: str, inventory: str | None, extra_vars: list[str]) -> list[str]:
    """The announcement of a campaign that would be run: runs, time, RAM, least detectable effect, warnings.

    Runs playbooks/plan.yml by ansible-runner. Raises UnusableInput with the planner's sentence.
    """
    root = project_root()
    chosen = Path(inventory) if inventory else root / "inventories" / "local"
    if not chosen.exists():
        raise UnusableInput(f"inventory {chosen} does not exist; give a folder or file of inventories/.")
    arguments = ["-i", str(chosen.resolve()), "-e", f"kvtrial_protocol={protocol}"]
    for extra in extra_vars:
        arguments += ["-e", extra]
    results: list[dict[str, Any]] = []

    def keep(event: dict[str, Any]) -> bool:
        if event["event"] in ("runner_on_ok", "runner_on_failed"):
            results.append(event["event_data"].get("res", {}))
        return False

    with tempfile.TemporaryDirectory() as private:
        runner = ansible_runner.run(
            private_data_dir=private,
            project_dir=str(root),
            playbook="playbooks/plan.yml",
            cmdline=shlex.join(arguments),
            event_handler=keep,
            quiet=True,
            envvars={
                "ANSIBLE_CONFIG": str(root / "ansible.cfg"),
                # kvtrial may be called by its path, without its environment being active.
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            },
        )
        said = "" if results else runner.stdout.read()
    for result in results:
        if "announcement" in result:
            return [str(line) for line in result["announcement"]]
    if results:
        raise UnusableInput(str(results[-1].get("msg", "the plan failed")))
    raise UnusableInput(f"the inventory {chosen} can't be read: {' '.join(said.split())[-300:]}")
