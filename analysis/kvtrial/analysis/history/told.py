"""Which alarms a store's watchers were told of: an alarm is for a change when it is first found, and is told once.

STORE/told.json: each change for the worse beyond its margin, with the store's newest night when it was found. The first
look at a store takes what happened long ago as known. A look that only reads leaves the file as it is.
"""

from collections.abc import Sequence
from datetime import date
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from kvtrial.analysis.history.model import SAME, ChangePoint
from kvtrial.record.errors import UnusableInput
from kvtrial.record.store import write_atomically
from kvtrial.record.version import SCHEMA_VERSION, refuse_newer

FILE = "told.json"
SAME_CHANGE_DAYS = 7
"""The night of a change moves a little as nights come: two of one series within so many days are one change."""


class ToldAlarm(Struct, frozen=True):
    """A change that was found: its series (the names in SAME), its night, and the store's newest night then."""

    series: list[str]
    night: str
    found: str


class Told(Struct, frozen=True):
    """told.json."""

    schema_version: str
    alarms: list[ToldAlarm]


def read_told(store: Path) -> Told | None:
    """None where nobody looked yet. Raises UnusableInput where the file is damaged or newer."""
    path = store / FILE
    try:
        raw = path.read_bytes()
        refuse_newer(str(msgspec.json.decode(raw)["schema_version"]), str(path))
        return msgspec.json.decode(raw, type=Told)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise UnusableInput(
            f"{path} can't be read ({error}); take it out, and what changed lately is told once more."
        ) from None


def with_alarms(
    changes: Sequence[ChangePoint], nights: Sequence[str], told: Told | None, newest_nights: int
) -> list[ChangePoint]:
    """The changes with `alarm` (first found among the newest nights) and `is_new` (nobody was told of it yet)."""
    fresh = set(nights[-newest_nights:]) if newest_nights else set()
    marked = []
    for change in changes:
        if not _is_bad(change):
            marked.append(change)
            continue
        known = _of(told, change)
        is_new = known is None and (told is not None or change.night in fresh)
        found = nights[-1] if is_new else (known.found if known else change.night)
        marked.append(replace(change, alarm=found in fresh, is_new=is_new and bool(fresh)))
    return marked


def remember(store: Path, changes: Sequence[ChangePoint], nights: Sequence[str]) -> None:
    """Keep, whole or not at all, that everybody knows of these changes."""
    told = read_told(store)
    alarms = list(told.alarms if told else [])
    for change in changes:
        if _is_bad(change) and _of(Told(SCHEMA_VERSION, alarms), change) is None:
            # On the first look a change of long ago was found when it happened.
            found = nights[-1] if told is not None or change.is_new else change.night
            alarms.append(ToldAlarm(_series(change), change.night, found))
    write_atomically(store / FILE, msgspec.json.format(msgspec.json.encode(Told(SCHEMA_VERSION, alarms)), indent=1))


def _is_bad(change: ChangePoint) -> bool:
    return change.worse and change.beyond_margin


def _series(change: ChangePoint) -> list[str]:
    return [getattr(change, name) for name in SAME]


def _of(told: Told | None, change: ChangePoint) -> ToldAlarm | None:
    """The alarm that was told of this change."""
    when = date.fromisoformat(change.night)
    return next(
        (
            alarm
            for alarm in (told.alarms if told else [])
            if alarm.series == _series(change)
            and abs((date.fromisoformat(alarm.night) - when).days) <= SAME_CHANGE_DAYS
        ),
        None,
    )
