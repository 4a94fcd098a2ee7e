"""An engine of an exact commit: its wheel from a mirror by address and sha256, what it needs by a lock.

The real pip installs both. Wheel and mirror are stand-ins, named as the vLLM project names the wheels of commits.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fleet"))
from supplies import ENGINE, wheel

REPOSITORY = Path(__file__).parents[2]
PLAYBOOK = shutil.which("ansible-playbook", path=str(Path(sys.executable).parent)) or shutil.which("ansible-playbook")
COMMIT = "f98d1fc49361cb50457f6109c3c01a5c77e415b4"
VERSION = f"0.26.1.dev5+g{COMMIT[:9]}"

pytestmark = pytest.mark.skipif(PLAYBOOK is None, reason="ansible-playbook is not installed")


class Quiet(SimpleHTTPRequestHandler):
    """A mirror that says nothing."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[tuple[str, str, dict[str, object]]]:
    """(address of the commit's wheel, its sha256, what else is to be set)."""
    (tmp_path / "mirror" / COMMIT).mkdir(parents=True)
    (tmp_path / "index").mkdir()
    modules = {"vllm/__init__.py": "", "vllm/cli.py": ENGINE.format(version=VERSION)}
    path, digest = wheel(tmp_path / "mirror" / COMMIT, "vllm", VERSION, modules, "vllm.cli:main")
    _, needed = wheel(tmp_path / "index", "standin_dependency", "1.0", {"standin_dependency.py": "A = 1\n"})
    lock = tmp_path / "lock.txt"
    numbers = f"{sys.version_info[0]}.{sys.version_info[1]}"
    lock.write_text(
        f"# Stand-in of the kvtrial tests.\n# wheels {os.uname().machine}: {numbers}\nstandin-dependency==1.0 \\\n"
        f"    --hash=sha256:{needed}\nvllm==0.26.0 \\\n    --hash=sha256:{'0' * 64}\n"
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "mirror")))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    settings = {
        "vllm_backend": "cuda",
        "vllm_version": "0.26.0",
        "vllm_lock": str(lock),
        "vllm_commit": COMMIT,
        "vllm_python": sys.executable,
        "vllm_venv_root": str(tmp_path / "venvs"),
        "vllm_venv_bytes_needed": 2**24,
        "vllm_state_dir": str(tmp_path / "state"),
        "ansible_python_interpreter": sys.executable,
    }
    yield f"http://127.0.0.1:{server.server_address[1]}/{COMMIT}/{path.name.replace('+', '%2B')}", digest, settings
    server.shutdown()
    server.server_close()


def install(folder: Path, *more: str, **variables: object) -> subprocess.CompletedProcess[str]:
    """Play the role on this machine; pip finds what the wheel needs in a folder, and the wheel at its address."""
    book: list[dict[str, Any]] = [{"hosts": "localhost", "gather_facts": False, "vars": variables, "roles": ["vllm"]}]
    (folder / "play.yml").write_text(json.dumps(book))
    environment = os.environ | {
        "ANSIBLE_ROLES_PATH": str(REPOSITORY / "roles"),
        "ANSIBLE_COLLECTIONS_PATH": str(REPOSITORY / "collections"),
        "ANSIBLE_LOCAL_TEMP": str(folder / "tmp"),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(folder / "index"),
    }
    command = [str(PLAYBOOK), "-i", "localhost,", "-c", "local", str(folder / "play.yml"), *more]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)


def test_a_commits_wheel_is_installed_by_its_address_and_sha256_and_says_its_commit(
    mirror: tuple[str, str, dict[str, object]], tmp_path: Path
) -> None:
    address, digest, settings = mirror
    whole = settings | {"vllm_wheel_url": address, "vllm_wheel_sha256": digest}
    done = install(tmp_path, **whole)
    assert done.returncode == 0, done.stdout + done.stderr
    identity = hashlib.sha256(((tmp_path / "lock.txt").read_text() + digest).encode()).hexdigest()
    venv = tmp_path / "venvs" / f"vllm-0.26.0-{identity[:12]}"
    said = subprocess.run([venv / "bin" / "vllm", "--version"], capture_output=True, text=True, check=True).stdout
    assert f"+g{COMMIT[:9]}" in said
    marker = json.loads((venv / "kvtrial-installed.json").read_text())
    assert marker["lock_sha256"] == identity
    (info,) = venv.glob("lib/python3*/site-packages/vllm-*.dist-info")
    origin = json.loads((info / "direct_url.json").read_text())
    assert origin["url"] == address and origin["archive_info"]["hashes"] == {"sha256": digest}
    again = install(tmp_path, **whole)
    assert again.returncode == 0 and "changed=0" in again.stdout, again.stdout
    # Gone from it, and named: a wheel by address is of the lock, too. Verified alone, it is neither passed nor marked.
    shutil.rmtree(info)
    alone = install(tmp_path, "--tags", "vllm_verify", **whole)
    assert alone.returncode == 2, alone.stdout
    said = " ".join(alone.stdout.split())
    assert "is missing in" in said and "run without --tags, or with --tags vllm, which installs it" in said, said
    assert "is installed anew" not in said and not info.is_dir()
    checked = install(tmp_path, **whole)
    assert f"localhost: vllm of the lock is missing in {venv}" in " ".join(checked.stdout.split()), checked.stdout
    assert checked.returncode == 0 and "changed=0" not in checked.stdout and info.is_dir()


@pytest.mark.full
def test_another_wheel_at_the_commits_address_and_another_commits_are_refused(
    mirror: tuple[str, str, dict[str, object]], tmp_path: Path
) -> None:
    address, digest, settings = mirror
    other = install(tmp_path, **settings | {"vllm_wheel_url": address, "vllm_wheel_sha256": "1" * 64})
    assert other.returncode == 2 and f"Got {digest}" in " ".join(other.stdout.split()), other.stdout
    settings["vllm_commit"] = "0" * 40
    wrong = install(tmp_path, **settings | {"vllm_wheel_url": address, "vllm_wheel_sha256": digest})
    assert wrong.returncode == 2 and "Mark the installation as finished" not in wrong.stdout, wrong.stdout
    assert not list((tmp_path / "venvs").glob("*/kvtrial-installed.json"))
