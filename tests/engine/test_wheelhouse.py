"""Wheels are picked from a folder by the lock, for one Python and architecture; what is missing is named, all of it."""

import hashlib
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "roles" / "vllm" / "files" / "wheelhouse.py"
NAMES = [
    "alpha-1.0-py3-none-any.whl",
    "beta-2.0-cp311-cp311-manylinux_2_28_x86_64.whl",
    "beta-2.0-cp312-cp312-manylinux_2_28_x86_64.whl",
    "beta-2.0-cp311-cp311-manylinux_2_28_aarch64.whl",
    "gamma_ray-3.0-cp38-abi3-manylinux2014_x86_64.whl",
]


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A wheelhouse with a lock beside it."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    digests: dict[str, list[str]] = {}
    for name in NAMES:
        (folder / name).write_text(name)
        digests.setdefault(name.split("-")[0], []).append(hashlib.sha256(name.encode()).hexdigest())
    conditions = {"alpha": " ; python_full_version < '3.12'"}
    lock = "".join(
        f"{name.replace('_', '-')}=={version}{conditions.get(name, '')} \\\n"
        + " \\\n".join(f"    --hash=sha256:{digest}" for digest in digests[name])
        + "\n"
        for name, version in (("alpha", "1.0"), ("beta", "2.0"), ("gamma_ray", "3.0"))
    )
    (tmp_path / "lock.txt").write_text(f"# a lock\n{lock}")
    return folder


def pick(
    house: Path, python: str = "3.11", architecture: str = "x86_64", *more: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, "--lock", house.parent / "lock.txt", "--wheelhouse", house]
    command += ["--python", python, "--architecture", architecture, "--cache", house.parent / "cache", *more]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def packed(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    with tarfile.open(json.loads(done.stdout)["archive"]) as archive:
        return sorted(archive.getnames())


def test_each_host_gets_its_own_wheels(house: Path) -> None:
    assert packed(pick(house)) == [f"kvtrial-wheels/{NAMES[i]}" for i in (0, 1, 4)]
    assert packed(pick(house, "3.12")) == [f"kvtrial-wheels/{NAMES[i]}" for i in (2, 4)]


def test_check_mode_writes_nothing(house: Path) -> None:
    assert json.loads(pick(house, "3.11", "x86_64", "--check").stdout) == {"archive": "", "wheels": 3}
    assert not (house.parent / "cache").exists()


def test_all_that_is_missing_is_named(house: Path) -> None:
    done = pick(house, "3.11", "aarch64")
    assert done.returncode == 2
    assert "has no wheel of gamma-ray 3.0 for CPython 3.11 on aarch64" in done.stderr
    (house / NAMES[0]).unlink()
    assert (
        "has no wheel of alpha 1.0, gamma-ray 3.0 for CPython 3.11 on aarch64" in pick(house, "3.11", "aarch64").stderr
    )


def test_another_file_of_the_same_name_is_named(house: Path) -> None:
    (house / NAMES[4]).write_text("something else")
    done = pick(house)
    assert done.returncode == 2 and f"{NAMES[4]} in {house} has another sha256 than the lock" in done.stderr


def test_the_wheel_of_a_commit_comes_beside_the_lock(house: Path) -> None:
    name = "vllm-0.1.dev1+gf98d1fc-cp38-abi3-manylinux_2_28_x86_64.whl"
    (house / name).write_text("engine")
    digest = hashlib.sha256(b"engine").hexdigest()
    assert f"kvtrial-wheels/{name}" in packed(pick(house, "3.11", "x86_64", "--wheel", name, digest))
    assert "another sha256 than vllm_wheel_sha256" in pick(house, "3.11", "x86_64", "--wheel", name, "0" * 64).stderr
