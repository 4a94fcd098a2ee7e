"""Touching memory says what the kernel shows before and after, and refuses what is no number of bytes."""

import subprocess
import sys
from pathlib import Path

TOUCH = Path(__file__).parents[2] / "roles" / "preflight" / "files" / "touch_memory.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOUCH, *arguments], capture_output=True, text=True, check=False)


def test_it_touches_and_gives_back() -> None:
    done = run(str(64 * 2**20))
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.splitlines()
    assert before.startswith("before {'MemTotal': ")
    assert after.startswith("after {'MemTotal': ")


def test_what_is_no_size_is_refused_in_a_sentence() -> None:
    for bad in ("64G", "", "-1"):
        done = run(bad)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
