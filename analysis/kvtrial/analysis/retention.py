"""Campaigns of older nights, removed from the controller's folder once newer ones have landed.

Only what a night made (its campaign.json says which) and what has landed is ever removed; a campaign by hand stays.
"""

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvtrial.analysis.campaign import disk_errors_said, read_campaign
from kvtrial.record.errors import UnusableInput
from kvtrial.record.store import write_atomically

LANDED = "landed"
"""A file in a campaign's folder: its night came to its end."""
RETIRED = "retired.json"
"""In the folder of campaigns: names of those removed, for hosts that were away."""
NAMES_MAX = 1000


@disk_errors_said()
def retire(landed: Sequence[str], keep_nights: int) -> list[str]:
    """Mark the campaigns `landed`, and remove those of nights before the newest `keep_nights`.

    Returns the names of all that were ever removed, newest first, up to NAMES_MAX. `keep_nights`: 1 or more.
    """
    if keep_nights < 1:
        raise UnusableInput(f"kvtrial_keep_campaigns={keep_nights} keeps no night; give 1 or more.")
    folders = [Path(name).resolve() for name in landed]
    for folder in folders:
        read_campaign(folder)
        (folder / LANDED).touch()
    known: list[str] = []
    for results in dict.fromkeys(folder.parent for folder in folders):
        known += _retire_in(results, set(folders), keep_nights)
    return known


def _retire_in(results: Path, tonight: set[Path], keep_nights: int) -> list[str]:
    nights = _nights(results)
    kept = sorted(set(nights.values()), reverse=True)[:keep_nights]
    latest = (results / "latest").resolve()
    old = [path for path, night in sorted(nights.items()) if night not in kept and path not in {*tonight, latest}]
    known = _removed_before(results)
    if old:
        # Named first: what is cut off here is still removed from the hosts.
        known = list(dict.fromkeys([*(path.name for path in reversed(old)), *known]))[:NAMES_MAX]
        write_atomically(results / RETIRED, msgspec.json.encode(known))
    # Controllers may share the folder: what another one takes away meanwhile is away.
    for path in old:
        with contextlib.suppress(FileNotFoundError):
            path.rename(results / f".retired-{path.name}")
    for path in results.glob(".retired-*"):
        _remove(path)
    return known


def _remove(folder: Path) -> None:
    """Remove a folder, whoever else removes it as well. Raises OSError."""
    while folder.exists():
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)


def _nights(results: Path) -> dict[Path, str]:
    """Folder → night of each campaign that a night made and that landed. What can't be read is not ours to remove."""
    found = {}
    for mark in results.glob(f"*/{LANDED}"):
        path = mark.parent
        if path.is_symlink():
            continue
        with contextlib.suppress(UnusableInput):
            if night := read_campaign(path).provenance.get("night"):
                found[path.resolve()] = str(night)
    return found


def _removed_before(results: Path) -> list[str]:
    try:
        return msgspec.json.decode((results / RETIRED).read_bytes(), type=list[str])
    except (FileNotFoundError, msgspec.DecodeError):
        return []
