"""Ask Ansible for the inventory's settings and plan with them, without touching a host."""

import os
import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import ansible_runner
import yaml

from kvtrial.record.errors import UnusableInput

_TERMINAL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_ERROR = re.compile(r"(?:\[ERROR\]|ERROR!?):?\s*(.*?)(?=\s\[(?:ERROR|WARNING)\]|$)")
_MOST_CHARACTERS = 400


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
    for extra in extra_vars:
        refuse_extra_vars(extra)
    arguments = ["-i", str(chosen.resolve()), "-e", f"kvtrial_protocol={protocol}"]
    for extra in extra_vars:
        arguments += ["-e", extra]
    failures: list[str] = []
    announced: list[list[str]] = []

    def keep(event: dict[str, Any]) -> bool:
        result = (event.get("event_data") or {}).get("res") or {}
        if event["event"] in ("runner_on_failed", "runner_on_unreachable"):
            failures.append(" ".join(str(result.get("msg", "the plan failed")).split()))
        elif event["event"] == "runner_on_ok" and "announcement" in result:
            announced.append([str(line) for line in result["announcement"]])
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
                "ANSIBLE_NOCOLOR": "1",
                "ANSIBLE_CONFIG": str(root / "ansible.cfg"),
                # kvtrial may be called by its path, without its environment being active.
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            },
        )
        said = runner.stdout.read()
    if failures:
        raise UnusableInput(failures[0])
    if announced:
        return announced[0]
    raise UnusableInput(_ended_before_a_task(chosen, said))


def refuse_extra_vars(given: str) -> None:
    """Raise UnusableInput for what `-e` can't take: neither @FILE of a mapping, nor a mapping, nor name=value."""
    how = "give name=value, a mapping as '{\"name\": value}', or @FILE that holds one"
    if given.startswith("@"):
        try:
            _refuse_no_mapping(Path(given[1:]).read_text(encoding="utf-8"), given, how)
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise UnusableInput(f"-e {given}: {given[1:]} can't be read ({why}); {how}.") from None
    elif given.startswith(("{", "[", "---")):
        _refuse_no_mapping(given, given, how)
    else:
        try:
            words = shlex.split(given)
        except ValueError:
            words = []
        if not words or not all(re.match(r"[A-Za-z_]\w*=", word) for word in words):
            raise UnusableInput(f"-e {given} sets nothing; {how}.")


def _refuse_no_mapping(text: str, given: str, how: str) -> None:
    try:
        # Vaulted values are Ansible's to read: only the shape is looked at.
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise UnusableInput(f"-e {given} is neither JSON nor YAML ({' '.join(str(error).split())}); {how}.") from None
    if node is not None and not isinstance(node, yaml.MappingNode) and not text.startswith("$ANSIBLE_VAULT"):
        raise UnusableInput(f"-e {given} is no mapping; {how}.")


def _ended_before_a_task(inventory: Path, said: str) -> str:
    """The sentence for an Ansible that ended before the plan, from all that it wrote."""
    plain = " ".join(_TERMINAL.sub("", said).split())
    first = _ERROR.search(plain)
    why = (first[1] if first else plain)[:_MOST_CHARACTERS].strip(" .") or "it says nothing"
    if "inventory" in why.lower() or str(inventory) in why:
        return f"the inventory {inventory} can't be read: {why}; give a folder or file as in inventories/."
    return f"Ansible ended before the plan: {why}; mend that and run the same command again."
