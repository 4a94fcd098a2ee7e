"""Which alarms a store's watchers were told of: an alarm is for a change when it is first found, and is told once.

STORE/told.json: each change for the worse beyond its margin, with the store's newest night when it was found, and what
was looked at. The first look at a host or protocol takes what happened long ago as known. A look that only reads leaves
the file as it is.
"""

import math
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from kvtrial.analysis.history.model import SAME, ChangePoint, ToldAlarm
from kvtrial.analysis.history.store import NoNight, check_night
from kvtrial.record.errors import UnusableInput
from kvtrial.record.store import write_atomically
from kvtrial.record.version import SCHEMA_VERSION, refuse_newer

FILE = "told.json"
SAME_CHANGE_DAYS = 7
"""The night of a change moves a little as nights come: what was told lies at most so many days off."""
BACK_NIGHTS = 3
"""So many nights in a row must lie where the series was before, for what was told to be over."""
Newest = Mapping[tuple[str, ...], Sequence[float]]
"""Series (the values of SAME) → its values on up to BACK_NIGHTS newest nights, as ChangePoint has them."""


class Look(Struct, frozen=True):
    """What somebody looked at; None: all."""

    host: str | None = None
    protocol: str | None = None

    def covers(self, change: ChangePoint) -> bool:
        """Whether the change would have been seen."""
        return self.host in (None, change.host) and self.protocol in (None, change.protocol)


class Told(Struct, frozen=True):
    """told.json. An earlier release did not keep the `looks`: there it was everything."""

    schema_version: str
    alarms: list[ToldAlarm]
    looks: list[Look] = msgspec.field(default_factory=lambda: [Look()])


def read_told(store: Path) -> Told | None:
    """None where nobody looked yet. Raises UnusableInput where the file is damaged or newer."""
    path = store / FILE
    try:
        raw = path.read_bytes()
        refuse_newer(str(msgspec.json.decode(raw)["schema_version"]), str(path))
        told = msgspec.json.decode(raw, type=Told)
        for alarm in told.alarms:
            check_night(alarm.night)
            check_night(alarm.found)
        return told
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, KeyError, TypeError, NoNight) as error:
        raise UnusableInput(
            f"{path} can't be read ({str(error).partition(';')[0]}); take it out, and what changed lately is told once "
            f"more."
        ) from None


def with_alarms(
    changes: Sequence[ChangePoint],
    nights: Sequence[str],
    told: Told | None,
    newest_nights: int,
    newest: Newest,
) -> list[ChangePoint]:
    """The changes with `alarm` (first found among the newest nights) and `is_new` (nobody was told of it yet).

    Told again is a change whose level is by now worse than what was told by more than the margin, and one that came
    again after the series had come back.
    """
    fresh = set(nights[-newest_nights:]) if newest_nights else set()
    told_by, near = _matched(changes, told)
    marked = []
    for at, change in enumerate(changes):
        if not _is_bad(change):
            marked.append(change)
            continue
        alarm = told_by.get(at)
        again = alarm is not None and (
            all(_is_beyond(change, one) for one in near[at])
            or (alarm.over and not _is_back(alarm, newest[tuple(alarm.series)][-1:]))
        )
        is_new = again or (alarm is None and (_was_looked_at(change, told) or change.night in fresh))
        found = nights[-1] if is_new else alarm.found if alarm else change.night
        marked.append(replace(change, alarm=found in fresh, is_new=is_new and bool(fresh)))
    return marked


def came_back(changes: Sequence[ChangePoint], told: Told | None, newest: Newest) -> list[ToldAlarm]:
    """Alarms that were told and whose change is found no more, the newest nights lying where the series was before."""
    told_by, _ = _matched(changes, told)
    found = {id(alarm) for alarm in told_by.values()}
    return [
        alarm
        for alarm in (told.alarms if told else [])
        if id(alarm) not in found
        and not alarm.over
        and len(values := newest.get(tuple(alarm.series), [])) == BACK_NIGHTS
        and _is_back(alarm, values)
    ]


def remember(
    store: Path,
    changes: Sequence[ChangePoint],
    nights: Sequence[str],
    back: Sequence[ToldAlarm] = (),
    host: str | None = None,
    protocol: str | None = None,
) -> None:
    """Keep, whole or not at all, that everybody knows of these changes: all that there are of `host` and `protocol`.

    `back`: those that `came_back` gave.
    """
    told = read_told(store)
    told_by, _ = _matched(changes, told)
    over = {(*alarm.series, alarm.night) for alarm in back}
    alarms = {
        key: replace(alarm, over=alarm.over or key in over)
        for alarm in (told.alarms if told else [])
        for key in [(*alarm.series, alarm.night)]
    }
    for at, change in enumerate(changes):
        if _is_bad(change) and (change.is_new or at not in told_by):
            # On the first look a change of long ago was found when it happened.
            found = nights[-1] if change.is_new or _was_looked_at(change, told) else change.night
            series = _series(change)
            alarms[(*series, change.night)] = ToldAlarm(series, change.night, found, change.from_value, change.to_value)
    looks = list(dict.fromkeys([*(told.looks if told else []), Look(host, protocol)]))
    kept = Told(SCHEMA_VERSION, list(alarms.values()), looks)
    write_atomically(store / FILE, msgspec.json.format(msgspec.json.encode(kept), indent=1))


def _is_bad(change: ChangePoint) -> bool:
    return change.worse and change.beyond_margin


def _series(change: ChangePoint) -> list[str]:
    return [getattr(change, name) for name in SAME]


def _was_looked_at(change: ChangePoint, told: Told | None) -> bool:
    return told is not None and any(look.covers(change) for look in told.looks)


def _matched(
    changes: Sequence[ChangePoint], told: Told | None
) -> tuple[dict[int, ToldAlarm], dict[int, list[ToldAlarm]]]:
    """Index of each bad change → the alarm that told it (the nearest, and none tells two); and all that lie near it."""
    by_series: dict[tuple[str, ...], list[ToldAlarm]] = {}
    for alarm in told.alarms if told else []:
        by_series.setdefault(tuple(alarm.series), []).append(alarm)
    near: dict[int, list[ToldAlarm]] = {}
    pairs = []
    for at, change in enumerate(changes):
        if not _is_bad(change):
            continue
        for alarm in by_series.get(tuple(_series(change)), []):
            if (days := _days_between(alarm, change)) <= SAME_CHANGE_DAYS:
                near.setdefault(at, []).append(alarm)
                pairs.append((days, at, alarm))
    told_by: dict[int, ToldAlarm] = {}
    used: set[int] = set()
    for _, at, alarm in sorted(pairs, key=lambda pair: pair[:2]):
        if at not in told_by and id(alarm) not in used:
            told_by[at] = alarm
            used.add(id(alarm))
    return told_by, near


def _days_between(alarm: ToldAlarm, change: ChangePoint) -> int:
    return abs((date.fromisoformat(alarm.night) - date.fromisoformat(change.night)).days)


def _is_beyond(change: ChangePoint, alarm: ToldAlarm) -> bool:
    """Whether the level since the change is worse than what the alarm told, by more than the margin."""
    if alarm.to_value is None:
        return False
    if change.scale == "ratio":
        further, margin = math.log(change.to_value / alarm.to_value), math.log1p(change.margin)
    else:
        further, margin = change.to_value - alarm.to_value, change.margin
    return (further if change.to_value > change.from_value else -further) > margin


def _is_back(alarm: ToldAlarm, values: Sequence[float]) -> bool:
    """Whether all these values lie nearer to the level before the alarm's change than to that since."""
    if alarm.from_value is None or alarm.to_value is None:
        return False
    before, since = alarm.from_value, alarm.to_value
    return all(abs(value - before) < abs(value - since) for value in values)
