"""The wheel is built only when the sources changed, and the same sources give the same bytes."""

import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
BUILDER = REPOSITORY / "roles" / "workload" / "files" / "build_wheel.py"
needs_setuptools = pytest.mark.skipif(
    importlib.util.find_spec("setuptools") is None, reason="this Python has no setuptools to build with"
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A small copy of the project: its pyproject.toml and a package of one module."""
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    (tmp_path / "analysis" / "kvtrial").mkdir(parents=True)
    (tmp_path / "analysis" / "kvtrial" / "__init__.py").write_text('__version__ = "0.1.0"\n', encoding="utf-8")
    return tmp_path


def build(project: Path, cache: str = "cache") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, BUILDER, project, project / cache], capture_output=True, text=True, check=False
    )


@needs_setuptools
def test_the_wheel_follows_its_sources(project: Path) -> None:
    first = json.loads(build(project).stdout)
    (project / "analysis" / "kvtrial" / "__pycache__").mkdir()
    (project / "analysis" / "kvtrial" / "__pycache__" / "x.pyc").write_bytes(b"")
    again = json.loads(build(project).stdout)
    elsewhere = json.loads(build(project, "other").stdout)
    (project / "analysis" / "kvtrial" / "new.py").write_text("", encoding="utf-8")
    changed = json.loads(build(project).stdout)
    assert [answer["changed"] for answer in (first, again, elsewhere, changed)] == [True, False, True, True]
    assert first["sha256"] == again["sha256"] == elsewhere["sha256"] != changed["sha256"]
    assert sorted(path.name for path in project.iterdir()) == ["analysis", "cache", "other", "pyproject.toml"]


@needs_setuptools
def test_a_wheel_that_was_edited_in_the_cache_is_built_again(project: Path) -> None:
    first = json.loads(build(project).stdout)
    with zipfile.ZipFile(first["wheel"], "a") as wheel:
        wheel.writestr("kvtrial/extra.py", "A = 1\n")
    assert json.loads(build(project).stdout) == first
    assert json.loads(build(project).stdout)["changed"] is False


@needs_setuptools
def test_a_package_that_cannot_be_built_is_named_in_one_sentence(project: Path) -> None:
    (project / "analysis" / "kvtrial" / "__init__.py").write_text("", encoding="utf-8")
    result = build(project)
    assert result.returncode == 2
    assert "The wheel of kvtrial could not be built" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not list((project / "cache").iterdir()), "nothing half built is left"


def test_a_folder_that_is_not_the_project_is_refused(tmp_path: Path) -> None:
    result = build(tmp_path)
    assert result.returncode == 2
    assert "has no pyproject.toml" in result.stderr
