#!/usr/bin/env python3
"""Lock one vLLM for CUDA with every package it needs, by sha256: `make lock VLLM=0.33.0`.

    lock_engine.py VERSION [--as-of YYYY-MM-DD] [--output FILE]
    lock_engine.py VERSION --wheel URL_OR_FILE --as-of YYYY-MM-DD --output FILE     dependencies of a wheel of your own

Resolved as of the day after the release: newer packages are none that its authors could have tried, and some break it
(0.26.0 does not import with today's xgrammar). One lock serves every Python and architecture that uv found a wheel
for, of every package; its first lines name them. Needs `uv` on PATH and the package index that uv is configured for.
With --wheel the lock leaves vLLM itself out: the role takes it from vllm_wheel_url and vllm_wheel_sha256.
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent
ARCHITECTURES = ("x86_64", "aarch64")
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
EVERYWHERE = "(platform_machine == 'aarch64' or platform_machine == 'x86_64') and sys_platform == 'linux'"
GLIBC = "manylinux_2_35"  # the oldest C library among Debian 12 and 13, Ubuntu 22.04 and 24.04
SIMPLE_JSON = "application/vnd.pypi.simple.v1+json"


class UnusableInput(Exception):
    """One clear sentence for the user."""


def index_url() -> str:
    """The package index that uv and pip are configured for."""
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"):
        if os.environ.get(name):
            return os.environ[name].rstrip("/")
    from pip._internal.models.index import PyPI  # the default, named by pip itself

    return str(PyPI.simple_url).rstrip("/")


def release_day(version: str) -> datetime.date:
    """The day on which the first wheel of this release was uploaded. Raises UnusableInput where the index has none."""
    request = urllib.request.Request(f"{index_url()}/vllm/", headers={"Accept": SIMPLE_JSON})
    with urllib.request.urlopen(request, timeout=60) as answer:
        files = json.load(answer)["files"]
    uploads = [f["upload-time"] for f in files if f["filename"].startswith(f"vllm-{version}-") and "upload-time" in f]
    if not uploads:
        raise UnusableInput(
            f"vLLM {version} is not on the index, or without its date; name a release, or give --as-of."
        )
    return datetime.date.fromisoformat(min(uploads)[:10])


def run(command: list[str], folder: Path) -> str:
    """Standard output of a command; UnusableInput with the end of its errors where it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnusableInput(f"uv could not resolve it: {' '.join(done.stderr.split())[-900:]}")
    return done.stdout


def resolve(requirement: str, least_python: str, as_of: datetime.date, folder: Path) -> str:
    """The lock's entries for Linux on both architectures and every Python from `least_python` on."""
    environments = [f"sys_platform == 'linux' and platform_machine == '{name}'" for name in ARCHITECTURES]
    project = f"[project]\nname = 'engine'\nversion = '0'\nrequires-python = '>={least_python}'\n"
    project += f"dependencies = {json.dumps([requirement])}\n[tool.uv]\nenvironments = {json.dumps(environments)}\n"
    (folder / "pyproject.toml").write_text(project, encoding="utf-8")
    command = ["uv", "pip", "compile", "pyproject.toml", "--universal", "--python-version", least_python]
    command += ["--generate-hashes", "--no-header", "--no-annotate", "--quiet", "--no-emit-index-url"]
    command += ["--no-emit-find-links", "--exclude-newer", (as_of + datetime.timedelta(days=1)).isoformat()]
    return simplified(run(command, folder))


def simplified(entries: str) -> str:
    """The entries without the marker that says what holds for all of them."""
    entries = entries.replace(f" ; {EVERYWHERE}", "")
    return re.sub(r"(python_full_version [<>=!]+ '[\d.]+') and \(\(platform_machine [^\\\n]*", r"\1 ", entries)


def least_python_of(requirement: str, as_of: datetime.date, folder: Path) -> str:
    """The lowest Python that the requirement resolves for."""
    error: UnusableInput | None = None
    for python in PYTHONS:
        try:
            resolve(requirement, python, as_of, folder)
        except UnusableInput as caught:
            error = caught
        else:
            return python
    raise error or UnusableInput("no Python to try")


def installable(lock: Path, python: str, architecture: str, folder: Path) -> str | None:
    """None where every package of the lock has a wheel for it, else uv's words."""
    command = ["uv", "pip", "install", "--dry-run", "--target", "target", "--no-deps", "--require-hashes"]
    command += ["--only-binary", ":all:", "--python-version", python, "--python-platform", f"{architecture}-{GLIBC}"]
    done = subprocess.run([*command, "-r", str(lock)], cwd=folder, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else " ".join(done.stderr.split())[-300:]


def lock(version: str, wheel: str | None, as_of: datetime.date, output: Path) -> None:
    """Write `output` and, for a release, the .in file beside it."""
    requirement = f"vllm @ {wheel}" if wheel else f"vllm=={version}"
    with tempfile.TemporaryDirectory(prefix="kvtrial-lock-") as name:
        folder = Path(name)
        python = least_python_of(requirement, as_of, folder)
        entries = resolve(requirement, python, as_of, folder)
        if wheel:
            entries = re.sub(r"(?m)^vllm @ .*(\n    --hash=.*)*\n", "", entries)
        draft = folder / "lock.txt"
        draft.write_text(entries, encoding="utf-8")
        pythons = [p for p in PYTHONS if tuple(map(int, p.split("."))) >= tuple(map(int, python.split(".")))]
        fitting = {a: [p for p in pythons if report(installable(draft, p, a, folder), p, a)] for a in ARCHITECTURES}
    if not fitting["x86_64"]:
        raise UnusableInput(f"vLLM {version} has no complete set of wheels for x86_64; see the lines above.")
    header = [f"# vLLM {version} for CUDA, resolved as of {as_of}. Made by requirements/lock_engine.py (make lock)."]
    header += [f"# wheels {name}: {' '.join(pythons)}" for name, pythons in fitting.items() if pythons]
    if wheel:
        header.append("# without vllm itself: its wheel is named by vllm_wheel_url and vllm_wheel_sha256")
    output.write_text("\n".join(header) + "\n" + entries, encoding="utf-8")
    if not wheel:
        reason = f"# The release alone; the rest follows from it, as of the day after its release ({as_of}).\n"
        output.with_suffix(".in").write_text(f"{reason}vllm=={version}\n", encoding="utf-8")
    print(f"{output}: {entries.count('==')} packages; " + "; ".join(line[2:] for line in header[1:]))


def report(problem: str | None, python: str, architecture: str) -> bool:
    """Whether there was no problem; one is told."""
    if problem:
        print(f"not for Python {python} on {architecture}: {problem}", file=sys.stderr)
    return problem is None


def main() -> int:
    """Entry point. 0 done, 2 unusable input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("version")
    parser.add_argument("--wheel")
    parser.add_argument("--as-of", type=datetime.date.fromisoformat)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    try:
        if arguments.wheel and not (arguments.as_of and arguments.output):
            raise UnusableInput("--wheel needs --as-of (the commit's day) and --output (a file in your inventory).")
        as_of = arguments.as_of or release_day(arguments.version) + datetime.timedelta(days=1)
        output = arguments.output or REQUIREMENTS / f"engine-vllm-cuda-{arguments.version}.txt"
        lock(arguments.version, arguments.wheel, as_of, output)
    except (UnusableInput, OSError) as error:
        print(f"{error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
