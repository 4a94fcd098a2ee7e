"""What a bundle holds, and what its maker refuses; pip looks into a folder of stand-in wheels."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "fleet"))

from supplies import wheel  # noqa: E402

MAKER = ROOT / "requirements" / "make_bundle.py"
ABOVE = "3.14"
"""A Python that is newer than the one that runs pip here."""


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock in a folder, of which one entry is for newer Pythons alone; pip finds its wheels and nothing else."""
    _, always = wheel(tmp_path, "alpha", "1.0", {"alpha.py": "A = 1\n"})
    _, newer = wheel(tmp_path, "six", "1.17.0", {"six.py": "A = 1\n"})
    (tmp_path / "lock.txt").write_text(
        f"# wheels x86_64: 3.11 {ABOVE}\nalpha==1.0 \\\n    --hash=sha256:{always}\n"
        f"six==1.17.0 ; python_full_version >= '{ABOVE}' \\\n    --hash=sha256:{newer}\n"
    )
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return tmp_path


def make(house: Path, **changes: object) -> subprocess.CompletedProcess[str]:
    """Make a bundle in BUNDLE of the folder, of the lock's wheels alone unless told otherwise."""
    model = {"endpoint": "", "repository": "", "revision": "", "token_file": "", "excluded": [], "directory": ""}
    request = {
        "folder": str(house / "BUNDLE"), "pythons": ["3.11"], "architectures": ["x86_64"], "driver": {"manage": False},
        "engine_lock": str(house / "lock.txt"), "engine_wheel_url": "", "engine_wheel_sha256": "0" * 64,
        "host_lock": str(house / "lock.txt"), "model": {**model, "directory": changes.pop("model", "")}, **changes,
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, MAKER, "-"], input=json.dumps(request), capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(("python", "wheels"), [("3.11", {"alpha"}), (ABOVE, {"alpha", "six"})])
def test_a_bundle_has_what_the_lock_asks_of_the_hosts_python(house: Path, python: str, wheels: set[str]) -> None:
    done = make(house, pythons=sorted({"3.11", python}))
    assert done.returncode == 0, done.stderr
    assert {path.name.split("-")[0] for path in (house / "BUNDLE" / "wheels").iterdir()} == wheels
    assert {path.name.split("-")[0] for path in (house / "BUNDLE" / "host-wheels").iterdir()} == {"alpha"}


def test_the_pythons_of_the_host_program_are_those_of_its_role() -> None:
    role = yaml.safe_load((ROOT / "roles" / "workload" / "vars" / "main.yml").read_text())
    sys.path.insert(0, str(MAKER.parent))
    assert list(importlib.import_module("make_bundle").HOST_PYTHONS) == role["__workload_pythons"]


def test_a_bundle_holds_the_model_that_was_asked_for_last_and_says_its_pin(house: Path) -> None:
    for name, weights in (("first", "old-00001-of-00002.safetensors"), ("second", "model.safetensors")):
        (house / name).mkdir()
        (house / name / "config.json").write_text("{}")
        (house / name / weights).write_text(name)
        done = make(house, model=str(house / name))
        assert done.returncode == 0, done.stderr
    assert {path.name for path in (house / "BUNDLE" / "model").iterdir()} == {"config.json", "model.safetensors"}
    digest = [sys.executable, ROOT / "roles/model/files/make_model.py", "digest", house / "second"]
    revision = subprocess.run(digest, capture_output=True, text=True, check=True).stdout.strip()
    assert f"kvtrial_model_manifest_revision: {revision}" in done.stdout


REFUSED = {
    "pythons-as-text": ({"pythons": "3.11"}, "kvtrial_bundle_pythons=3.11 is no list of versions; give one such as"),
    "no-python": ({"pythons": ["3.x"]}, "kvtrial_bundle_pythons=['3.x'] is no list of versions; give one such as"),
    "too-old-for-the-program": ({"pythons": ["3.10"]}, "=['3.10'] has none that runs the host program (3.11, 3.12, "),
    "too-new-for-the-program": ({"pythons": [ABOVE]}, f"=['{ABOVE}'] has none that runs the host program ("),
    "no-pythons": ({"pythons": []}, "kvtrial_bundle_pythons=[] has none that runs the host program (3.11, 3.12, "),
    "architectures-as-text": ({"architectures": "x86_64"}, "kvtrial_bundle_architectures=x86_64 is no list of x"),
    "unknown-architecture": ({"architectures": ["amd64"]}, "kvtrial_bundle_architectures=['amd64'] is no list of x86"),
    "no-architectures": ({"architectures": []}, "kvtrial_bundle_architectures=[] is no list of x86_64 and aarch64"),
    "no-mirror": ({"engine_wheel_url": "http://127.0.0.1:9/vllm-1.whl"}, "vllm-1.whl could not be fetched ([Errno"),
    "no-address": ({"engine_wheel_url": "vllm-1.whl"}, "_wheel_url=vllm-1.whl could not be fetched (unk"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_gets_one_sentence(house: Path, name: str) -> None:
    changes, told = REFUSED[name]
    done = make(house, **changes)
    assert done.returncode == 2 and told in done.stderr and done.stderr.count("\n") == 1, done.stderr
    if not name.startswith("no-m") and name != "no-address":
        assert not (house / "BUNDLE").exists(), "it is refused before anything is written"


def test_a_torn_list_of_sums_is_refused(tmp_path: Path) -> None:
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  wheels/a.whl\n{'0' * 40}")
    done = subprocess.run([sys.executable, MAKER, "check", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and f"line 2 of {tmp_path}/SHA256SUMS is no sum and name" in done.stderr, done.stderr


def test_a_folder_of_somebodys_is_left_as_it_is(house: Path) -> None:
    (house / "source").mkdir()
    (house / "source" / "config.json").write_text("{}")
    for name in ("model/my-weights.bin", "debs/my-own.deb", "SHA256SUMS"):
        (house / "BUNDLE" / name).parent.mkdir(parents=True, exist_ok=True)
        (house / "BUNDLE" / name).write_text(f"{'0' * 64}  model/my-weights.bin\n")
    done = make(house, model=str(house / "source"))
    told = f"kvtrial_bundle={house}/BUNDLE holds SHA256SUMS, debs, model and is no bundle of this project; name a"
    assert done.returncode == 2 and told in done.stderr and done.stderr.count("\n") == 1, done.stderr
    there = {path.relative_to(house / "BUNDLE").as_posix() for path in (house / "BUNDLE").rglob("*") if path.is_file()}
    assert there == {"model/my-weights.bin", "debs/my-own.deb", "SHA256SUMS"}


@pytest.mark.parametrize("of_before", [False, True], ids=["interrupted", "of-the-release-before"])
def test_a_bundle_is_renewed(house: Path, of_before: bool) -> None:
    """Also one that was never ended, and one that has no mark."""
    (house / "BUNDLE").mkdir()
    made = make(house, engine_lock=str(house / ("lock.txt" if of_before else "none")))
    assert made.returncode == (0 if of_before else 2), made.stderr
    if of_before:
        (house / "BUNDLE" / ".kvtrial-bundle").unlink()
    else:
        (house / "BUNDLE" / ".SHA256SUMS").write_text("half")
    done = make(house)
    assert done.returncode == 0 and ": 1 files in host-wheels, 1 files in wheels; " in done.stdout, done
    check = [sys.executable, MAKER, "check", house / "BUNDLE"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and ": 2 files are as SHA256SUMS says." in done.stdout, done
