"""The roles refuse, before they change anything, in one sentence that names the value and what to do.

A stand-in for the host's Python answers the role's question about the host, so that every kind of host can be met here.
"""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
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
    "exists": False,
    "is_ours": True,
    "marker": None,
    "drift": {"paths": [], "count": 0},
    "packages": [],
    "packages_sha256": "0" * 64,
}

pytestmark = pytest.mark.skipif(PLAYBOOK is None, reason="ansible-playbook is not installed")


def play(
    folder: Path,
    role: str,
    tags: str,
    hosts: str = "localhost",
    inventory: str = "localhost,",
    check: bool = False,
    extra: dict[str, object] | None = None,
    **variables: object,
) -> subprocess.CompletedProcess[str]:
    """Run one role on this machine with its own root below `folder`."""
    roots = {f"{name}_root": str(folder / "root") for name in ("vllm_venv", "workload_venv", "model")}
    book = [
        {
            "hosts": hosts,
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
    command = [str(PLAYBOOK), "-i", inventory, "-c", "local", "--tags", tags, str(path)]
    command += [*(["--check"] if check else []), *(["-e", json.dumps(extra)] if extra else [])]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)


@pytest.fixture
def standin_python(tmp_path: Path) -> Any:
    """Make a program that answers like the probe on a host that differs from a good one as told."""

    def make(**differences: object) -> str:
        path = tmp_path / "standin-python"
        path.write_text(f"#!/bin/sh\ncat >/dev/null\necho '{json.dumps(GOOD_HOST | differences)}'\n", encoding="utf-8")
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


def test_a_good_host_passes_the_preflight(standin_python: Any, tmp_path: Path) -> None:
    result = play(tmp_path, "vllm", "vllm_preflight", vllm_python=standin_python())
    assert result.returncode == 0, result.stdout


def test_a_python_that_is_not_there_is_refused(tmp_path: Path) -> None:
    result = play(tmp_path, "vllm", "vllm_preflight", vllm_python="python3.99")
    assert result.returncode == 2
    assert "vllm_python=python3.99 does not run on this host" in result.stdout


def test_a_version_without_a_lock_is_refused(tmp_path: Path) -> None:
    result = play(tmp_path, "vllm", "vllm_preflight", vllm_version="0.1.0")
    assert result.returncode == 2
    assert "vllm_backend=cpu with vllm_version=0.1.0 has no lock" in result.stdout
    # As YAML has it without quotes, a number.
    result = play(tmp_path, "vllm", "vllm_preflight", vllm_version=0.32)
    assert "vllm_backend=cpu with vllm_version=0.32 has no lock" in result.stdout, result.stdout
    settings = {"vllm_backend": "cuda", "vllm_version": "0.31.0"}
    said = " ".join(play(tmp_path, "vllm", "vllm_preflight", **settings).stdout.split())
    assert "this project locks 0.26.0, 0.30.0, 0.32.0, 0.33.0 for cuda; use one of those" in said, said


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
    assert "install the engine with the role vllm first" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("differences", "sentence"),
    [
        ({"python": "3.10"}, "is Python 3.10, the host program runs on 3.11, 3.12, 3.13"),
        ({"python": "3.12", "can_make_venv": False}, "has no venv with pip; install the package python3.12-venv"),
        (None, "does not run on this host; install CPython 3.11 to 3.13"),
    ],
)
def test_a_python_that_is_not_for_the_host_program_is_refused(
    standin_python: Any, tmp_path: Path, differences: dict[str, object] | None, sentence: str
) -> None:
    python = "python3.99" if differences is None else standin_python(**differences)
    settings = {"workload_python": python, "workload_wheel_cache": str(tmp_path / "wheels")}
    result = play(tmp_path, "workload", "workload_preflight", **settings)
    assert result.returncode == 2, result.stdout
    assert sentence in " ".join(result.stdout.split())


@pytest.mark.parametrize(("role", "phase"), [("vllm", "verify"), ("vllm", "configure"), ("workload", "verify")])
def test_verifying_alone_what_nobody_has_installed_is_refused(
    standin_python: Any, tmp_path: Path, role: str, phase: str
) -> None:
    settings = {f"{role}_python": standin_python(), "workload_wheel_cache": str(tmp_path / "wheels")}
    result = play(tmp_path, role, f"{role}_{phase}", **settings)
    assert result.returncode == 2, result.stdout
    said = " ".join(result.stdout.split())
    assert f"is not there, or not finished; run without --tags, or with --tags {role}, which installs it." in said, said
    assert not (tmp_path / "root").exists()


def test_a_missing_venv_is_told_of_the_python_that_the_host_has(standin_python: Any, tmp_path: Path) -> None:
    settings = {"vllm_backend": "cuda", "vllm_version": "0.33.0"}
    python = standin_python(python="3.13", can_make_venv=False)
    result = play(tmp_path, "vllm", "vllm_preflight", vllm_python=python, **settings)
    assert "install the package python3.13-venv" in " ".join(result.stdout.split()), result.stdout


@pytest.mark.parametrize("playbook", ["provision", "prepare"])
def test_the_host_programs_python_is_looked_at_before_the_engine_is_fetched(playbook: str) -> None:
    """A host with Python 3.10 has had its gigabytes before it was refused."""
    text = (REPOSITORY / "playbooks" / f"{playbook}.yml").read_text(encoding="utf-8")
    look = text.index("name: kvtrial.vllm.workload\n            tasks_from: preflight")
    assert look < text.index("            name: kvtrial.vllm.vllm\n", text.index("- name: Bring the engine"))


def test_defaults_and_argument_specifications_have_the_same_keys() -> None:
    yaml = pytest.importorskip("yaml")
    for role in ("vllm", "model", "workload"):
        folder = REPOSITORY / "roles" / role
        defaults = yaml.safe_load((folder / "defaults" / "main.yml").read_text(encoding="utf-8"))
        specification = yaml.safe_load((folder / "meta" / "argument_specs.yml").read_text(encoding="utf-8"))
        assert defaults.keys() == specification["argument_specs"]["main"]["options"].keys()


COMMIT = "f98d1fc49361cb50457f6109c3c01a5c77e415b4"


def cuda(folder: Path, version: str, wheels: str = "x86_64: 3.11 3.12 3.13") -> dict[str, object]:
    """Settings of a CUDA engine with a lock for these wheels."""
    lock = folder / f"lock-{version}.txt"
    lock.write_text(f"# wheels {wheels}\nvllm=={version} \\\n    --hash=sha256:" + "0" * 64 + "\n", encoding="utf-8")
    return {"vllm_backend": "cuda", "vllm_version": version, "vllm_lock": str(lock)}


def test_python_310_is_refused_for_032_and_newer_in_a_sentence(standin_python: Any, tmp_path: Path) -> None:
    """A host with Ubuntu 22.04's own Python."""
    settings = cuda(tmp_path, "0.32.0") | {"vllm_python": standin_python(python="3.10")}
    result = play(tmp_path, "vllm", "vllm_preflight", **settings)
    assert result.returncode == 2
    assert (
        "is CPython 3.10, the lock is for CPython 3.11, 3.12, 3.13 only (vLLM 0.32.0 needs 3.11 or newer)"
        in result.stdout
    )


@pytest.mark.parametrize("version", ["0.26.0", "0.30.0"])
def test_python_310_is_taken_by_older_releases_and_a_named_interpreter_by_newer(
    standin_python: Any, tmp_path: Path, version: str
) -> None:
    settings: dict[str, object] = {"vllm_backend": "cuda", "vllm_version": version}
    assert (
        play(tmp_path, "vllm", "vllm_preflight", vllm_python=standin_python(python="3.10"), **settings).returncode == 0
    )
    newer: dict[str, object] = {"vllm_backend": "cuda", "vllm_version": "0.33.0"}
    assert play(tmp_path, "vllm", "vllm_preflight", vllm_python=standin_python(python="3.13"), **newer).returncode == 0


@pytest.mark.parametrize("version", ["0.26.0", "0.30.0", "0.32.0", "0.33.0"])
def test_our_locks_are_taken_by_a_host_with_aarch64(standin_python: Any, tmp_path: Path, version: str) -> None:
    """Ubuntu 24.04's own Python; no such host was to be had, so the answers are those of one."""
    settings = {"vllm_backend": "cuda", "vllm_version": version}
    grace = standin_python(architecture="aarch64", python="3.12")
    assert play(tmp_path, "vllm", "vllm_preflight", vllm_python=grace, **settings).returncode == 0


@pytest.mark.parametrize(
    ("driver", "version", "status"),
    [("570.86.10", "0.22.1", 2), ("580.65.06", "0.22.1", 0), ("570.86.10", "0.19.1", 0), ("", "0.22.1", 0)],
)
def test_a_driver_too_old_for_the_wheels_is_refused_before_the_host_is_asked(
    standin_python: Any, tmp_path: Path, driver: str, version: str, status: int
) -> None:
    settings = cuda(tmp_path, version) | {"vllm_python": standin_python(), "vllm_driver_version": driver}
    result = play(tmp_path, "vllm", "vllm_preflight", **settings)
    assert result.returncode == status, result.stdout
    if status:
        assert f"driver {driver} < 580 needed by the CUDA 13 wheels of vLLM {version}" in result.stdout
        assert "Look at the host" not in result.stdout


def test_a_commit_needs_its_wheels_address_and_sha256(standin_python: Any, tmp_path: Path) -> None:
    settings = cuda(tmp_path, "0.26.0") | {"vllm_python": standin_python(), "vllm_commit": COMMIT}
    result = play(tmp_path, "vllm", "vllm_preflight", **settings)
    assert result.returncode == 2
    assert f"vllm_commit={COMMIT} needs its full hash, vllm_wheel_url=(empty) the full address" in result.stdout
    wheel = f"https://mirror.example.invalid/{COMMIT}/vllm-0.26.1.dev5+gf98d1fc49-cp38-abi3-manylinux_2_28_x86_64.whl"
    whole = settings | {"vllm_wheel_url": wheel, "vllm_wheel_sha256": "1" * 64}
    assert play(tmp_path, "vllm", "vllm_preflight", **whole).returncode == 0


def test_a_hub_is_named_by_the_user(tmp_path: Path) -> None:
    result = play(tmp_path, "model", "model_preflight", model_source="huggingface", model_repository="Qwen/Qwen3-0.6B")
    assert result.returncode == 2
    assert "model_endpoint=(empty) (the hub's or a mirror's address)" in result.stdout


def test_an_upload_is_told_what_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    result = play(tmp_path, "model", "model_preflight", model_source="upload", model_upload=str(folder))
    assert result.returncode == 2
    assert f"model_upload={folder} is " in result.stdout and "model_upload_sha256 says nothing" in result.stdout


def test_a_model_comes_from_an_archive_of_the_controller_by_its_sha256(tmp_path: Path) -> None:
    """Its files may lie in one folder of it; another archive of the name is refused with its own sha256."""
    folder = tmp_path / "packed" / "a-model"
    folder.mkdir(parents=True)
    dimensions = {"num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 8, "hidden_size": 8}
    config = {
        "model_type": "llama",
        "num_attention_heads": 1,
        "torch_dtype": "bfloat16",
        "vocab_size": 300,
        **dimensions,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"weights")
    archive = tmp_path / "model.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(folder, "a-model")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    settings: dict[str, object] = {"model_source": "upload", "model_upload": str(archive)}
    refused = play(tmp_path, "model", "model_install", model_upload_sha256="0" * 64, **settings)
    assert refused.returncode == 2
    assert f"model_upload={archive} is {digest}, model_upload_sha256 says 0000" in " ".join(refused.stdout.split())
    settings |= {"model_upload_sha256": digest, "model_python": sys.executable}
    done = play(tmp_path, "model", "model_install", **settings)
    assert done.returncode == 0, done.stdout
    mark, brought = sorted((tmp_path / "root").iterdir())
    assert brought.name == f"upload-{digest[:12]}"
    assert mark.name == f".{brought.name}.kvtrial"
    manifest = json.loads((brought / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["files"]["model.safetensors"]["sha256"] == hashlib.sha256(b"weights").hexdigest()
    assert (brought / "model.safetensors").read_bytes() == b"weights"
    again = play(tmp_path, "model", "model_install", **settings)
    assert again.returncode == 0 and "changed=0" in again.stdout, again.stdout


MODEL = {"num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 8, "hidden_size": 8, "model_type": "llama",
         "num_attention_heads": 1, "torch_dtype": "bfloat16", "vocab_size": 300}  # fmt: skip


def a_model(folder: Path) -> Path:
    """A model folder with made-up weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def checked(folder: Path, role: str, **variables: object) -> str:
    """What check mode says; it writes nothing."""
    before = sorted(path.relative_to(folder) for path in (folder / "root").rglob("*"))
    result = play(folder, role, role, check=True, **variables)
    assert result.returncode == 0, result.stdout
    assert sorted(path.relative_to(folder) for path in (folder / "root").rglob("*")) == before
    return " ".join(result.stdout.split())


def test_check_mode_tells_a_model_that_is_not_as_it_was_brought(tmp_path: Path) -> None:
    folder = a_model(tmp_path / "given")
    maker = [sys.executable, str(REPOSITORY / "roles/model/files/make_model.py"), "digest", str(folder)]
    revision = subprocess.run(maker, capture_output=True, text=True, check=True).stdout.strip()
    upload: dict[str, object] = {
        "model_source": "upload",
        "model_upload": str(folder),
        "model_upload_sha256": revision,
        "model_python": sys.executable,
    }
    assert "the model would be brought to" in checked(tmp_path, "model", **upload)
    assert play(tmp_path, "model", "model", **upload).returncode == 0
    said = checked(tmp_path, "model", **upload)
    assert "is as it should be" in said and "changed=0" in said
    weights = tmp_path / "root" / f"upload-{revision[:12]}" / "model.safetensors"
    weights.write_bytes(b"weightz")
    said = checked(tmp_path, "model", **upload)
    assert f"{weights} has another sha256 than the manifest says" in said and "changed=1" in said
    weights.write_bytes(b"weights")
    said = checked(tmp_path, "model", model_manifest_revision="0" * 64, **upload)
    assert f"has revision {revision}, model_manifest_revision is 0000" in said and "changed=1" in said


def test_check_mode_tells_a_given_model_that_changed(tmp_path: Path) -> None:
    folder = a_model(tmp_path / "given")
    given: dict[str, object] = {
        "model_source": "directory",
        "model_directory": str(folder),
        "model_python": sys.executable,
    }
    (tmp_path / "root").mkdir()
    assert "has other files than its manifest says" in checked(tmp_path, "model", **given)
    assert play(tmp_path, "model", "model", **given).returncode == 0
    assert "is as it should be" in checked(tmp_path, "model", **given)
    (folder / "model.safetensors").write_bytes(b"weightz")
    said = checked(tmp_path, "model", **given)
    assert "has other files than its manifest says" in said and "changed=1" in said


def test_two_uploads_in_one_play_are_each_compared_with_their_own_pin(tmp_path: Path) -> None:
    """And a first host whose model comes from elsewhere keeps nobody's upload from being read."""
    hosts: dict[str, dict[str, object]] = {"h0": {"model_source": "directory", "model_directory": str(tmp_path)}}
    for number in (1, 2):
        folder = a_model(tmp_path / f"m{number}")
        (folder / "model.safetensors").write_bytes(b"x" * number)
        hosts[f"h{number}"] = {"model_source": "upload", "model_upload": str(folder), "model_upload_sha256": "0"}
    (tmp_path / "hosts.json").write_text(json.dumps({"all": {"hosts": hosts}}), encoding="utf-8")
    result = play(tmp_path, "model", "model_preflight", hosts="all", inventory=str(tmp_path / "hosts.json"))
    said = " ".join(result.stdout.split())
    assert f"model_upload={tmp_path / 'm1'} is " in said and f"model_upload={tmp_path / 'm2'} is " in said, said
    assert "h0 : ok=" in said and "failed=0" in said.split("h0 : ok=")[1].split("h1")[0]


DIST = "standin-1.0.dist-info"


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A finished environment with a package of two files, one of which another package lists too."""
    folder = tmp_path / "root" / "vllm-1"
    site = folder / "lib" / "python3.11" / "site-packages"
    (site / DIST).mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "bin" / "tool").write_text("#!/bin/sh\n", encoding="utf-8")
    for name in ("a.py", "b.py"):
        (site / name).write_text(f"{name} = 1\n", encoding="utf-8")
    record = [f"{name},sha256={record_digest(site / name)},1" for name in ("a.py", "b.py", "../../../bin/tool")]
    (site / DIST / "RECORD").write_text("\n".join([*record, f"{DIST}/RECORD,,"]) + "\n", encoding="utf-8")
    (site / "other-1.0.dist-info").mkdir()
    (site / "other-1.0.dist-info" / "RECORD").write_text("a.py,sha256=AAAA,1\n", encoding="utf-8")
    (folder / "kvtrial-installed.json").write_text("{}", encoding="utf-8")
    return folder


def record_digest(path: Path) -> str:
    """As a RECORD has it."""
    return base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()


def drift(venv: Path) -> list[str]:
    """What the probe finds changed."""
    probe = REPOSITORY / "roles" / "vllm" / "files" / "probe_host.py"
    marker = venv / "kvtrial-installed.json"
    done = subprocess.run([sys.executable, probe, venv, marker], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)["drift"]
    assert found["count"] == len(found["paths"])
    return list(found["paths"])


SITE = "lib/python3.11/site-packages"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("true", []),
        ("echo x = 2 >>SITE/a.py", ["SITE/a.py"]),
        ("printf 'a.py = 9\\n' >SITE/a.py", ["SITE/a.py"]),
        ("touch SITE/a.py", []),
        ("cp -p SITE/a.py x && rm SITE/a.py && mv x SITE/a.py", []),
        ("rm SITE/b.py", ["SITE/b.py"]),
        ("echo >SITE/sitecustomize.py", ["SITE/sitecustomize.py"]),
        ("echo >SITE/x.pyc; mkdir SITE/__pycache__; echo >SITE/__pycache__/a.pyc", []),
        ("echo exit >>bin/tool", ["bin/tool"]),
        ("mkdir SITE/new-1.dist-info; echo >SITE/new-1.dist-info/RECORD", ["SITE/new-1.dist-info/RECORD"]),
        (f"echo >>SITE/{DIST}/RECORD", [f"SITE/{DIST}/RECORD"]),
    ],
)
def test_a_file_that_changed_in_a_finished_environment_is_found_and_nothing_else(
    venv: Path, change: str, found: list[str]
) -> None:
    assert drift(venv) == []
    subprocess.run(["sh", "-c", f"sleep 0.02; {change.replace('SITE', SITE)}"], cwd=venv, check=True)
    assert drift(venv) == [path.replace("SITE", SITE) for path in found]


def test_a_copied_environment_is_as_it_was(venv: Path, tmp_path: Path) -> None:
    """All ctimes are new then."""
    subprocess.run(["cp", "-a", venv, tmp_path / "copy"], check=True)
    assert drift(tmp_path / "copy") == []
    (tmp_path / "copy" / SITE / "b.py").write_text("other\n", encoding="utf-8")
    assert drift(tmp_path / "copy") == [f"{SITE}/b.py"]


@pytest.mark.parametrize("role", ["vllm", "workload"])
def test_check_mode_tells_what_changed_inside_an_environment(standin_python: Any, tmp_path: Path, role: str) -> None:
    python = standin_python(drift={"paths": ["lib/a.py", "lib/b.py", "lib/c.py"], "count": 5})
    settings = {f"{role}_python": python, "workload_wheel_cache": str(tmp_path / "wheels")}
    (tmp_path / "root").mkdir()
    said = checked(tmp_path, role, **settings)
    assert f"localhost: 5 files in {tmp_path}/root/" in said
    assert "are not as they were installed: lib/a.py, lib/b.py, lib/c.py, and more;" in said
    assert "would be installed anew" in said and "changed=0" not in said


def test_the_packages_of_an_environment_are_named_and_hashed_wherever_it_lies(venv: Path, tmp_path: Path) -> None:
    """Hosts that have the same packages in different folders are alike; a package of another build is not."""

    def asked(folder: Path) -> tuple[list[str], str]:
        probe = [sys.executable, REPOSITORY / "roles/vllm/files/probe_host.py", folder, folder / "no-marker"]
        said = json.loads(subprocess.run(probe, capture_output=True, text=True, check=True).stdout)
        return said["packages"], said["packages_sha256"]

    assert asked(venv)[0] == ["other==1.0", "standin==1.0"]
    shutil.copytree(venv, tmp_path / "elsewhere", symlinks=True)
    record = tmp_path / "elsewhere" / SITE / DIST / "RECORD"
    moved = record.read_text(encoding="utf-8").replace("../../../bin/tool,sha256=", "../../../bin/tool,sha256=x")
    record.write_text(moved, encoding="utf-8")
    assert asked(tmp_path / "elsewhere") == asked(venv)
    record.write_text(moved.replace("b.py,sha256=", "b.py,sha256=x"), encoding="utf-8")
    assert asked(tmp_path / "elsewhere")[0] == asked(venv)[0]
    assert asked(tmp_path / "elsewhere")[1] != asked(venv)[1]


@pytest.mark.parametrize("role", ["vllm", "workload"])
def test_a_package_that_was_taken_out_or_put_in_is_drift_and_is_named(
    standin_python: Any, tmp_path: Path, role: str
) -> None:
    """`pip uninstall` leaves no file to look at."""
    (tmp_path / "root").mkdir()
    (tmp_path / "lock.txt").write_text(LOCK, encoding="utf-8")
    settings: dict[str, object] = {"workload_wheel_cache": str(tmp_path / "wheels"), "vllm_backend": "cuda"}
    settings |= {"vllm_lock": str(tmp_path / "lock.txt")}
    lock = LOCK if role == "vllm" else (REPOSITORY / "requirements" / "host.txt").read_text(encoding="utf-8")
    whole = [line.split()[0] for line in lock.splitlines() if "==" in line and "only" not in line]
    whole[0] = whole[0].replace("-", "_").capitalize()
    whole += ["kvtrial==0.1.0"] if role == "workload" else []

    def said(*packages: str, count: int = 0) -> str:
        drift = {"paths": ["lib/new"][:count], "count": count}
        python = standin_python(marker={}, packages=[*packages, "pip==23.0.1"], drift=drift)
        return checked(tmp_path, role, **{f"{role}_python": python}, **settings)

    as_locked = said(*whole)
    assert "of the lock" not in as_locked and "not in the lock" not in as_locked
    without = said(*whole[1:])
    name = whole[0].split("==")[0].lower().replace("_", "-")
    assert f"localhost: {name} of the lock is missing in {tmp_path}/root/" in without
    assert "would be installed anew" in without and "changed=0" not in without
    more = said(*whole, "Xgrammar==9", "old==1", count=1)
    assert f"localhost: old, xgrammar are in {tmp_path}/root/" in more and "and not in the lock; 1 files in" in more


LOCK = """# wheels x86_64: 3.11
flash-infer==1.0 \\
    --hash=sha256:00
only-on-310==1.0 ; python_full_version < '3.11' \\
    --hash=sha256:00
vllm==0.32.0 \\
    --hash=sha256:00
"""


@pytest.mark.parametrize("role", ["vllm", "workload"])
def test_nothing_is_made_anew_under_a_campaign_or_a_program_that_runs_from_it(
    standin_python: Any, tmp_path: Path, role: str
) -> None:
    """The experiment's own command given again, or a calibration: what drifted is told, and stays as it is."""
    (tmp_path / "root").mkdir()
    (tmp_path / "lock.txt").write_text(LOCK, encoding="utf-8")
    python = standin_python(exists=True, marker={}, packages=["vllm==0.32.0"])
    settings: dict[str, object] = {
        "workload_wheel_cache": str(tmp_path / "wheels"),
        "vllm_backend": "cuda",
        "vllm_lock": str(tmp_path / "lock.txt"),
        f"{role}_python": python,
        f"{role}_state_dir": str(tmp_path / "state"),
    }
    ours = Path(f"/proc/{os.getpid()}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    progress = tmp_path / "state" / "campaigns" / "20260101-a" / "progress.json"
    progress.parent.mkdir(parents=True)
    progress.write_text(json.dumps({"state": "running", "pid": os.getpid(), "pid_start_ticks": int(ours)}))
    done = play(tmp_path, role, role, **settings)
    said = " ".join(done.stdout.split())
    assert done.returncode == 2 and "Make the virtual environment" not in said, said
    assert "of the lock" in said and "missing in" in said
    assert f"it is not installed anew while campaign 20260101-a runs here (host program, pid {os.getpid()})." in said
    progress.unlink()
    place = Path(said.split(" missing in ")[1].split(";")[0])
    (place / "bin").mkdir(parents=True)
    shutil.copy2(shutil.which("sleep") or "/bin/sleep", place / "bin" / "engine")
    with subprocess.Popen([place / "bin" / "engine", "600"]) as program:
        try:
            done = play(tmp_path, role, role, extra={f"__{role}_idle_retries": 1}, **settings)
        finally:
            program.kill()
    said = " ".join(done.stdout.split())
    assert done.returncode == 2 and "Make the virtual environment" not in said, said
    assert f"it is not installed anew while process {program.pid} uses it. Wait for its end" in said
