"""Pick from a folder of wheels what a lock needs for one Python and architecture, and pack it. Runs on the controller.

    wheelhouse.py --lock FILE --wheelhouse FOLDER --python 3.12 --architecture x86_64 --cache FOLDER [--check]
                  [--wheel NAME SHA256]

Every wheel is found by its name and compared by its sha256 with the lock. Prints one JSON line: `{"archive": path,
"wheels": count}`; with --check nothing is written. What is missing or another file than the lock knows ends it with
status 2 and one sentence that names all of it. Needs `packaging`, which ansible-core brings.
"""

import argparse
import hashlib
import json
import os
import re
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from packaging import tags, utils
from packaging.markers import Marker
from packaging.version import Version

FOLDER_ON_HOST = "kvtrial-wheels"
NEWEST_GLIBC_MINOR = 36  # Debian 12; what a wheel asks beyond is refused by pip on the host, not here


class UnusableInput(Exception):
    """One clear sentence for the user."""


def requirements_of(lock: str, python: str, architecture: str) -> Iterator[tuple[str, str, frozenset[str]]]:
    """(name, version, sha256s) of the lock's entries whose condition holds there."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": architecture,
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    lines = "\n".join(line for line in lock.splitlines() if not line.strip().startswith("#"))
    for entry in re.sub(r"\s*\\\n\s*", " ", lines).splitlines():
        head, *digests = entry.strip().split(" --hash=sha256:")
        if not head:
            continue
        pin, _, condition = head.partition(" ; ")
        name, _, version = pin.partition("==")
        if not version:
            raise UnusableInput(f"the lock has an entry that is no pin: {head}; lock it again (make lock).")
        if not condition or Marker(condition).evaluate(environment):
            yield utils.canonicalize_name(name), version.strip(), frozenset(digests)


def supported(python: str, architecture: str) -> frozenset[tags.Tag]:
    """Tags of wheels that such a CPython takes on Linux."""
    numbers = [int(part) for part in python.split(".")]
    glibc = [f"manylinux_2_{minor}_{architecture}" for minor in range(NEWEST_GLIBC_MINOR, 4, -1)]
    platforms = [
        *glibc,
        *(f"{old}_{architecture}" for old in ("manylinux2014", "manylinux2010", "manylinux1", "linux")),
    ]
    own = tags.cpython_tags(numbers, platforms=platforms)
    return frozenset([*own, *tags.compatible_tags(numbers, f"cp{''.join(map(str, numbers))}", platforms)])


def wheels_in(folder: Path) -> dict[tuple[str, Version], list[tuple[Path, frozenset[tags.Tag]]]]:
    """The folder's wheels by name and version. Raises UnusableInput where it is no folder."""
    if not folder.is_dir():
        raise UnusableInput(
            f"vllm_wheelhouse={folder} is no folder on the controller; name the folder wheels of a bundle."
        )
    found: dict[tuple[str, Version], list[tuple[Path, frozenset[tags.Tag]]]] = {}
    for path in sorted(folder.glob("*.whl")):
        try:
            name, version, _, fitting = utils.parse_wheel_filename(path.name)
        except utils.InvalidWheelFilename:
            continue
        found.setdefault((name, version), []).append((path, fitting))
    return found


def sha256_of(path: Path) -> str:
    """sha256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pick(lock: str, folder: Path, python: str, architecture: str) -> list[tuple[Path, str]]:
    """(wheel, sha256) for every entry of the lock. Raises UnusableInput naming all that is missing or another file."""
    at_hand, fitting_here = wheels_in(folder), supported(python, architecture)
    picked: list[tuple[Path, str]] = []
    missing: list[str] = []
    other: list[str] = []
    for name, version, digests in requirements_of(lock, python, architecture):
        candidates = [path for path, fits in at_hand.get((name, Version(version)), []) if fits & fitting_here]
        right = [(path, digest) for path in candidates if (digest := sha256_of(path)) in digests]
        if right:
            picked.append(right[0])
        elif candidates:
            other.append(candidates[0].name)
        else:
            missing.append(f"{name} {version}")
    if other:
        raise UnusableInput(
            f"{', '.join(other)} in {folder} has another sha256 than the lock; it is not the file that was locked, so "
            "fetch it again (playbooks/bundle.yml)."
        )
    if missing:
        raise UnusableInput(
            f"{folder} has no wheel of {', '.join(missing)} for CPython {python} on {architecture}; add it, or make "
            "the bundle again for this Python (playbooks/bundle.yml)."
        )
    return picked


def pack(wheels: list[tuple[Path, str]], cache: Path) -> Path:
    """A tar of the wheels, kept by their hashes; whole or absent."""
    identity = hashlib.sha256("".join(sorted(digest for _, digest in wheels)).encode()).hexdigest()
    target = cache / f"wheels-{identity[:12]}.tar"
    if target.is_file():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=".packing-", dir=cache)
    try:
        with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w") as archive:
            for path, _ in wheels:
                entry = archive.gettarinfo(path, f"{FOLDER_ON_HOST}/{path.name}")
                entry.uid, entry.gid, entry.uname, entry.gname, entry.mode = 0, 0, "", "", 0o644
                with path.open("rb") as content:
                    archive.addfile(entry, content)
        Path(name).rename(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return target


def main() -> int:
    """Entry point. 0 done, 2 unusable input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    for name in ("--lock", "--wheelhouse", "--cache"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--python", required=True)
    parser.add_argument("--architecture", required=True)
    parser.add_argument("--wheel", nargs=2, metavar=("NAME", "SHA256"))
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    try:
        lock = given.lock.read_text(encoding="utf-8")
        if given.wheel:
            lock = re.sub(r"(?m)^vllm==.*(\n +--hash=.*)*\n", "", lock)
        wheels = pick(lock, given.wheelhouse, given.python, given.architecture)
        if given.wheel:
            path = given.wheelhouse / given.wheel[0]
            if not path.is_file() or sha256_of(path) != given.wheel[1]:
                raise UnusableInput(
                    f"{path} {'has another sha256 than vllm_wheel_sha256' if path.is_file() else 'is missing'}; put "
                    "the commit's wheel there."
                )
            wheels.append((path, given.wheel[1]))
        archive = "" if given.check else str(pack(wheels, given.cache))
    except (UnusableInput, OSError) as error:
        print(str(error), file=sys.stderr)
        return 2
    print(json.dumps({"archive": archive, "wheels": len(wheels)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
