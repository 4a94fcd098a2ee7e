"""The roles refuse, before they change anything, in one sentence that names the value and what to do.

A stand-in for the host's Python answers the role's question about the host, so that every kind of host can be met here.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
PLAYBOOK = shutil.which("ansible-playbook", path=str(Path(sys.executable).parent)) or shutil.which("ansible-playbook")
GOOD_HOST: dict[str, Any] = {
    "python": "3.11",
    "implementation": "CPython",
    "architecture": "x86_64",
    "can_make_venv": True,
    "has_libnuma": True,
    "free_bytes": 10**11,
    "has_rocm": False,
    "has_xpu": False,
    "exists": False,
    "is_ours": True,
    "marker": None,
}

pytestmark = pytest.mark.skipif(PLAYBOOK is None, reason="ansible-playbook is not installed")


def play(folder: Path, role: str, tags: str, **variables: object) -> subprocess.CompletedProcess[str]:
    """Run one role on this machine with its own root below `folder`."""
    roots = {f"{name}_root": str(folder / "root") for name in ("vllm_venv", "workload_venv", "model")}
    book = [
        {
            "hosts": "localhost",
            "gather_facts": False,
            "vars": {"ansible_python_interpreter": sys.executable} | roots | variables,
            "roles": ["vllm", role],
        }
    ]
    path = folder / "play.yml"
    path.write_text(json.dumps(book), encoding="utf-8")
    environment = os.environ | {
        "ANSIBLE_ROLES_PATH": str(REPOSITORY / "roles"),
        "ANSIBLE_COLLECTIONS_PATH": str(REPOSITORY / "collections"),
        "ANSIBLE_LOCAL_TEMP": str(folder / "tmp"),
    }
    command = [str(PLAYBOOK), "-i", "localhost,", "-c", "local", "--tags", tags, str(path)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)


@pytest.fixture
def standin_python(tmp_path: Path) -> Any:
    """Make a program that answers like the probe on a host that differs from a good one as told."""

    def make(**differences: object) -> str:
        path = tmp_path / "standin-python"
        path.write_text(f"#!/bin/sh\necho '{json.dumps(GOOD_HOST | differences)}'\n", encoding="utf-8")
        path.chmod(0o755)
        return str(path)

    return make


CPU_REFUSALS = {
    "python": ({"python": "3.12"}, "is CPython 3.12, the lock is for CPython 3.11 only"),
    "implementation": ({"implementation": "PyPy"}, "is PyPy 3.11, the lock is for CPython"),
    "no venv": ({"can_make_venv": False}, "install the package python3.11-venv"),
    "architecture": ({"architecture": "aarch64"}, "architecture is aarch64, the lock has packages for x86_64 only"),
    "libnuma": ({"has_libnuma": False}, "install the package libnuma1"),
    "disk": ({"free_bytes": 123}, "has 123 bytes free, the engine needs 3000000000"),
    "foreign directory": ({"is_ours": False}, "is no virtual environment and is not replaced"),
}


@pytest.mark.parametrize(("differences", "sentence"), CPU_REFUSALS.values(), ids=CPU_REFUSALS.keys())
def test_the_cpu_engine_is_refused(
    standin_python: Any, tmp_path: Path, differences: dict[str, object], sentence: str
) -> None:
    result = play(tmp_path, "vllm", "vllm_preflight", vllm_python=standin_python(**differences))
    assert result.returncode == 2, result.stdout
    assert sentence in result.stdout
    assert not (tmp_path / "root").exists()


def test_a_good_host_passes_the_preflight_even_with_an_amd_or_intel_gpu(standin_python: Any, tmp_path: Path) -> None:
    result = play(tmp_path, "vllm", "vllm_preflight", vllm_python=standin_python(has_rocm=True, has_xpu=True))
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("differences", "sentence"),
    [({"has_rocm": True}, "AMD GPU (ROCm: /dev/kfd is there)"), ({"has_xpu": True}, "Intel GPU (XPU)")],
    ids=["rocm", "xpu"],
)
def test_another_makers_gpu_is_refused_for_cuda(
    standin_python: Any, tmp_path: Path, differences: dict[str, object], sentence: str
) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text("torch==1 \\\n    --hash=sha256:" + "0" * 64 + "\n", encoding="utf-8")
    settings = {"vllm_backend": "cuda", "vllm_lock": str(lock), "vllm_python": standin_python(**differences)}
    result = play(tmp_path, "vllm", "vllm_preflight", **settings)
    assert result.returncode == 2, result.stdout
    assert sentence in result.stdout


def test_a_python_that_is_not_there_is_refused(tmp_path: Path) -> None:
    result = play(tmp_path, "vllm", "vllm_preflight", vllm_python="python3.99")
    assert result.returncode == 2
    assert "vllm_python=python3.99 does not run on this host" in result.stdout


def test_a_version_without_a_lock_is_refused(tmp_path: Path) -> None:
    result = play(tmp_path, "vllm", "vllm_preflight", vllm_version="0.1.0")
    assert result.returncode == 2
    assert "vllm_backend=cpu with vllm_version=0.1.0 has no lock" in result.stdout


def test_a_model_directory_must_be_named(tmp_path: Path) -> None:
    result = play(tmp_path, "model", "model_preflight", model_source="directory")
    assert result.returncode == 2
    assert "model_directory=(empty) is no absolute path" in result.stdout


def test_the_model_makers_sentence_reaches_the_user(tmp_path: Path) -> None:
    settings = {"model_source": "directory", "model_directory": str(tmp_path), "model_python": sys.executable}
    result = play(tmp_path, "model", "model_install", **settings)
    assert result.returncode == 2
    assert f"{tmp_path} has no config.json" in result.stdout


def test_a_model_without_an_engine_is_refused(tmp_path: Path) -> None:
    result = play(tmp_path, "model", "model_install", model_python="/nonexistent/python")
    assert result.returncode == 2
    assert "install the engine with the role vllm first" in result.stdout


def test_a_python_too_old_for_the_host_program_is_refused(tmp_path: Path) -> None:
    old = tmp_path / "standin-python"
    old.write_text("#!/bin/sh\necho 3.9\n", encoding="utf-8")
    old.chmod(0o755)
    settings = {"workload_python": str(old), "workload_wheel_cache": str(tmp_path / "wheels")}
    result = play(tmp_path, "workload", "workload_preflight", **settings)
    assert result.returncode == 2, result.stdout
    assert "is Python 3.9, the host program runs on 3.11, 3.12, 3.13" in result.stdout


def test_defaults_and_argument_specifications_have_the_same_keys() -> None:
    yaml = pytest.importorskip("yaml")
    for role in ("vllm", "model", "workload"):
        folder = REPOSITORY / "roles" / role
        defaults = yaml.safe_load((folder / "defaults" / "main.yml").read_text(encoding="utf-8"))
        specification = yaml.safe_load((folder / "meta" / "argument_specs.yml").read_text(encoding="utf-8"))
        assert defaults.keys() == specification["argument_specs"]["main"]["options"].keys()
