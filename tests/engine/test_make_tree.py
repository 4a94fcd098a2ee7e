"""The commands made in an unpacked tree find its packages and what the image set, whatever their own environment is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

MAKER = Path(__file__).parents[2] / "roles" / "vllm" / "files" / "make_tree.py"
MAIN = "import os, sys\nprint(sys.argv[1:], os.environ.get('LD_LIBRARY_PATH'), os.environ.get('CUDA_HOME'), sep='|')\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree whose vLLM says how it was called."""
    site = tmp_path / "a tree" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    package = site / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for folder in (site / "vllm", site / "vllm" / "entrypoints", package):
        (folder / "__init__.py").touch()
    (package / "main.py").write_text(MAIN)
    return tmp_path / "a tree"


def make(tree: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, MAKER, tree], capture_output=True, text=True, check=False,
                          env={"PATH": os.defpath, **environment})  # fmt: skip


def call(tree: Path, name: str, *arguments: str, **environment: str) -> str:
    done = subprocess.run([tree / "bin" / name, *arguments], capture_output=True, text=True, check=True,
                          env=environment, cwd="/")  # fmt: skip
    return done.stdout.strip()


def test_the_commands_run_the_trees_packages_with_what_the_image_set(tree: Path) -> None:
    assert make(tree, LD_LIBRARY_PATH="/drivers/lib", CUDA_HOME="it's $here", HOME="/nobody").returncode == 0
    assert call(tree, "vllm", "serve", "a b") == "['serve', 'a b']|/drivers/lib|it's $here"
    assert call(tree, "python", "-c", "import vllm; print(vllm.__file__)").startswith(str(tree))
    assert "HOME=/nobody" not in (tree / "environment").read_text()


def test_what_is_set_already_is_left_as_it_is(tree: Path) -> None:
    make(tree, LD_LIBRARY_PATH="/drivers/lib", CUDA_HOME="/cuda")
    assert call(tree, "vllm", LD_LIBRARY_PATH="/mine") == "[]|/mine|/cuda"


def test_the_path_is_kept_and_the_images_own_comes_after_it(tree: Path) -> None:
    make(tree, PATH="/image/bin:/usr/bin:/bin")
    shown = call(tree, "python", "-c", "import os; print(os.environ['PATH'])", PATH="/first:/usr/bin")
    assert shown == "/first:/usr/bin:/image/bin:/usr/bin:/bin"


def test_which_gpus_are_visible_is_not_written_into_the_commands(tree: Path) -> None:
    make(tree, CUDA_VISIBLE_DEVICES="3")
    assert "CUDA_VISIBLE_DEVICES" not in (tree / "bin" / "vllm").read_text()


def test_a_folder_without_vllm_is_refused_in_a_sentence(tmp_path: Path) -> None:
    done = make(tmp_path)
    assert done.returncode == 2
    assert "holds no package vllm" in done.stderr
    assert done.stderr.count("\n") == 1
