"""The project as Ansible sees it, and the tools of the environment that runs the tests."""

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
