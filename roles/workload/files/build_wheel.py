"""Build the wheel of kvtrial from its sources, offline, and only when the sources changed.

    build_wheel.py REPOSITORY CACHE

The wheel lies in CACHE below the sha256 of the sources, its own sha256 beside it: one that is edited is built
again. The same sources give the same bytes. Prints one JSON line:
`{"changed": bool, "wheel": path, "sha256": hex}`. Needs setuptools in the Python that runs it, and no index.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# Time stamps inside a wheel: the earliest that a zip file can hold, so that they say nothing.
SOURCE_DATE_EPOCH = "315532800"


class UnusableInput(Exception):
    """One clear sentence for the user."""


def sources_of(repository: Path) -> list[Path]:
    """The files that the wheel is made of, relative to the repository, sorted."""
    if not (repository / "pyproject.toml").is_file():
        raise UnusableInput(f"{repository} has no pyproject.toml; name the root of the kvtrial project.")
    package = (path for path in (repository / "analysis").rglob("*") if path.is_file())
    listed = [path.relative_to(repository) for path in package if not is_derived(path)]
    return sorted([Path("pyproject.toml"), *listed])


def is_derived(path: Path) -> bool:
    """Whether a file was made by Python or setuptools and is no source."""
    return "__pycache__" in path.parts or any(part.endswith(".egg-info") for part in path.parts)


def digest_of(repository: Path, sources: list[Path]) -> str:
    """sha256 over names and contents."""
    digest = hashlib.sha256()
    for source in sources:
        content = (repository / source).read_bytes()
        digest.update(f"{source.as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def refuse_without_tools() -> None:
    """Raise UnusableInput where this Python cannot build a wheel."""
    missing = [module for module in ("pip", "setuptools") if importlib.util.find_spec(module) is None]
    if missing:
        raise UnusableInput(
            f"{sys.executable} has no {' and no '.join(missing)}, so the wheel of kvtrial cannot be built; install the "
            "controller's lock from requirements/ into that Python (make setup does), which brings both."
        )


def cause_in(errors: str) -> str:
    """The line of pip's error output that says most: the last one that names an error, else the last one."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    named = [line for line in lines if "error" in line.lower() and "subprocess" not in line]
    return (named or lines or ["no message"])[-1]


def build(repository: Path, sources: list[Path], target: Path) -> None:
    """Build into `target`, whole or not at all, from a copy: the repository stays as it is."""
    refuse_without_tools()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvtrial-wheel-") as name:
        copy, output = Path(name, "sources"), Path(tempfile.mkdtemp(prefix=".building-", dir=target.parent))
        for source in sources:
            (copy / source).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(repository / source, copy / source)
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
        environment = os.environ | {"SOURCE_DATE_EPOCH": SOURCE_DATE_EPOCH, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        result = subprocess.run(
            [*command, "--wheel-dir", str(output), str(copy)],
            env=environment,
            text=True,
            capture_output=True,
            check=False,
        )
        if result.returncode:
            shutil.rmtree(output)
            raise UnusableInput(
                f"The wheel of kvtrial could not be built with {sys.executable} ({cause_in(result.stderr)}); "
                "put right what it names and run again."
            )
        (wheel,) = output.glob("kvtrial-*.whl")
        wheel.with_name(f"{wheel.name}.sha256").write_text(sha256_of(wheel), encoding="utf-8")
        try:
            output.rename(target)
        except OSError:  # another host's turn of the same play was faster
            shutil.rmtree(output)


def sha256_of(path: Path) -> str:
    """sha256 of a file in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_as_built(target: Path) -> bool:
    """Whether the folder holds one wheel, and that the one which was built."""
    wheels = list(target.glob("kvtrial-*.whl"))
    noted = wheels[0].with_name(f"{wheels[0].name}.sha256") if len(wheels) == 1 else None
    return noted is not None and noted.is_file() and noted.read_text(encoding="utf-8") == sha256_of(wheels[0])


def main() -> int:
    """Entry point. 0 done, 2 unusable input."""
    repository, cache = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    try:
        sources = sources_of(repository)
        target = cache / digest_of(repository, sources)[:12]
        changed = not is_as_built(target)
        if changed:
            shutil.rmtree(target, ignore_errors=True)
            build(repository, sources, target)
        (wheel,) = target.glob("kvtrial-*.whl")
    except UnusableInput as error:
        print(str(error), file=sys.stderr)
        return 2
    print(json.dumps({"changed": changed, "wheel": str(wheel), "sha256": sha256_of(wheel)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
