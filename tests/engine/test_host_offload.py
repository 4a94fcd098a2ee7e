"""The host-copy worker moves the right bytes, and the check that says so can fail."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SOURCES = REPOSITORY / "roles" / "vllm" / "files" / "host_offload"
CHECK = Path(__file__).with_name("byte_equality.py")


@pytest.fixture
def engine_python() -> Path:
    venv = os.environ.get("KVTRIAL_ENGINE_VENV")
    if not venv:
        pytest.skip("KVTRIAL_ENGINE_VENV does not name an engine's virtual environment; torch and vLLM are only there")
    return Path(venv, "bin", "python")


def check(engine_python: Path, sources: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the byte-equality check against the given sources of the package."""
    clean = {name: value for name, value in os.environ.items() if name != "KVTRIAL_HOST_OFFLOAD_CORRUPT"}
    return subprocess.run(
        [engine_python, CHECK, "--cases", "40"],
        env=clean | {"PYTHONPATH": str(sources), "PYTHONDONTWRITEBYTECODE": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_random_stores_and_loads_are_equal_byte_for_byte(engine_python: Path) -> None:
    result = check(engine_python, SOURCES)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "40 cases equal" in result.stdout


def test_planted_corruption_is_caught_and_announced(engine_python: Path) -> None:
    result = check(engine_python, SOURCES, KVTRIAL_HOST_OFFLOAD_CORRUPT="1")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "differs after job" in result.stdout
    assert "plants zeros" in result.stdout + result.stderr


def test_an_unknown_corruption_value_is_refused_in_a_sentence(engine_python: Path) -> None:
    result = check(engine_python, SOURCES, KVTRIAL_HOST_OFFLOAD_CORRUPT="yes")
    assert "KVTRIAL_HOST_OFFLOAD_CORRUPT=yes is not understood" in result.stderr


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        pytest.param("skipped = first % blocks_per_chunk", "skipped = 0", id="first block inside a chunk forgotten"),
        pytest.param("taken_chunks += touched", "taken_chunks += 0", id="second group reads the first group's chunks"),
        pytest.param("size = reference.page_size_bytes", "size = 8", id="part of a page left out"),
    ],
)
def test_the_check_notices_a_broken_worker(engine_python: Path, tmp_path: Path, right: str, wrong: str) -> None:
    shutil.copytree(SOURCES / "kvtrial_host_offload", tmp_path / "kvtrial_host_offload")
    worker = tmp_path / "kvtrial_host_offload" / "worker.py"
    text = worker.read_text(encoding="utf-8")
    assert text.count(right) == 1
    worker.write_text(text.replace(right, wrong), encoding="utf-8")
    assert check(engine_python, tmp_path).returncode == 1
