"""Packages that tests take from npm (axe-core, Grafana's schema, TypeScript), by the lock in tests/npm and its hashes.

They land in .kvtrial/npm and are kept. Where there is no npm (tests/install_browser.sh brings it where it can), or it
brings nothing within a minute, who asks is told why and skips: these checks look at what is made, none of it is in the
product.
"""

import functools
import hashlib
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "tests" / "npm"
INSTALLED = ROOT / ".kvtrial" / "npm"
TIMEOUT_SECONDS = 60


def why_missing() -> str:
    """Why tests/install_browser.sh did not bring what is missing."""
    told = ROOT / ".kvtrial" / "no-browser"
    return told.read_text().strip() if told.is_file() else "tests/install_browser.sh brings it where it can"


class NotThereError(Exception):
    """What is missing, in a sentence."""


@functools.cache
def node_modules() -> Path:
    """The folder node_modules. Raises NotThereError where it can't be had."""
    wanted = hashlib.sha256((LOCK / "package-lock.json").read_bytes()).hexdigest()
    stamp = INSTALLED / "installed"
    if stamp.is_file() and stamp.read_text() == wanted:
        return INSTALLED / "node_modules"
    npm = shutil.which("npm")
    if npm is None:
        raise NotThereError(f"there is no npm here: {why_missing()}")
    INSTALLED.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(LOCK / name, INSTALLED / name)
    command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    try:
        done = subprocess.run(command, cwd=INSTALLED, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        raise NotThereError(f"npm brought nothing within {TIMEOUT_SECONDS} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise NotThereError(f"npm ci failed: {lines[0] if lines else done.returncode}")
    stamp.write_text(wanted)
    return INSTALLED / "node_modules"


def node() -> str:
    """The program node. Raises NotThereError without it."""
    found = shutil.which("node")
    if found is None:
        raise NotThereError(f"there is no node here: {why_missing()}")
    return found
