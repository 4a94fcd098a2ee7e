"""vLLM versions, and the knowledge about them that is kept as data.

Every entry in `data/*.yml` carries `since` (first version it holds for, inclusive) and `until` (first version it no
longer holds for, exclusive); either may be absent. What was not read is not claimed: the files were filled from the
wheels 0.11.2 to 0.33.0, one a minor version, and `outside_read_range` says when a version lies beyond them.
"""

import re
from collections.abc import Hashable
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar, cast

import msgspec
import yaml

from kvtrial.record.errors import UnusableInput

Release = tuple[int, int, int]
T = TypeVar("T")

OLDEST_READ = "0.11"
NEWEST_READ = "0.33"

_RELEASE = re.compile(r"^\s*v?(\d+)\.(\d+)(?:\.(\d+))?")
_LOCAL_CUDA = re.compile(r"\+.*?cu(\d{2})(\d)")
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def release(version: str) -> Release:
    """Numbers of a version as /version or pip prints it: `0.26.0`, `v0.32.0`, `0.31.1rc2.dev7+gf98d1fc49`.

    A pre-release counts as the release it leads to: a nightly of main carries the code, not yet the name.
    Raises UnusableInput when there is no `major.minor` at the start.
    """
    found = _RELEASE.match(version)
    if found is None:
        raise UnusableInput(
            f"vLLM version {version!r} is not of the form 0.32.0; give the version that /version prints."
        )
    major, minor, patch = found.groups()
    return int(major), int(minor), int(patch or 0)


def within(version: str, since: str | None, until: str | None) -> bool:
    """Whether `since` <= version < `until`; an absent bound does not bind. `0.30` as a bound means 0.30.0."""
    numbers = release(version)
    if since is not None and numbers < release(since):
        return False
    return until is None or numbers < release(until)


def minor(version: str) -> str:
    """`0.26.3` -> `0.26`."""
    numbers = release(version)
    return f"{numbers[0]}.{numbers[1]}"


def outside_read_range(version: str) -> str | None:
    """One sentence when the version lies outside the wheels that the data was read from, else None."""
    numbers = release(version)[:2]
    if numbers < release(OLDEST_READ)[:2]:
        return f"vLLM {version} is older than {OLDEST_READ}, the oldest version this data was read from."
    if numbers > release(NEWEST_READ)[:2]:
        return (
            f"vLLM {version} is newer than {NEWEST_READ}, the newest version this data was read from; names may differ."
        )
    return None


def is_newer_than_read(version: str) -> bool:
    """Whether a version is newer than any that the data was read from."""
    return release(version)[:2] > release(NEWEST_READ)[:2]


def hazards_not_read(version: str) -> str | None:
    """One sentence on what is known of the defects of a version beyond those read; None within them."""
    if outside_read_range(version) is None:
        return None
    if not is_newer_than_read(version):
        return f"Which defects {version} has is not known; what is found was looked for by feature, not by version."
    return (
        f"Which defects {version} has is not known: those of {NEWEST_READ} count as possible. What is found was looked "
        "for by feature (options, series of the page, lines of the log), not by version."
    )


def cuda_of_local_version(version: str) -> str | None:
    """CUDA in a local version label: `0.26.0+cu129` -> `12.9`; None where the label names none."""
    found = _LOCAL_CUDA.search(version)
    return f"{found.group(1)}.{found.group(2)}" if found else None


def data(name: str, shape: type[T]) -> T:
    """`data/<name>.yml` of this package, validated against a msgspec type; read once in a process.

    A file that doesn't fit its type is a defect of this package, so msgspec.ValidationError is let through.
    """
    return cast(T, _loaded(name, cast(Hashable, shape)))


@cache
def _loaded(name: str, shape: Any) -> Any:
    text = files("kvtrial.record").joinpath("data", f"{name}.yml").read_text(encoding="utf-8")
    return msgspec.convert(yaml.load(text, _Loader), shape)
