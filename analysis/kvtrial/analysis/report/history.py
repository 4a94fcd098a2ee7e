"""What a report shows of earlier campaigns: a small input that whoever keeps the history fills.

`kvtrial report --history FILE.json` reads it, so that the report needs nothing of how the history is kept.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from kvtrial.record.errors import UnusableInput
from kvtrial.record.version import SCHEMA_VERSION


class PinChange(Struct, frozen=True):
    """A pin that differs between two campaigns: its name, and its value before and after."""

    pin: str
    before: str
    after: str


class HistoryPoint(Struct, frozen=True):
    """One campaign in a series: the primary effect (arm / against) with its interval. `at`: its date, as a label."""

    at: str
    campaign: str
    verdict: str
    effect: float | None
    ci_low: float | None = None
    ci_high: float | None = None


class ChangePoint(Struct, frozen=True):
    """Where a series changed its level: the first campaign after it, both levels, and which pins changed there."""

    at: str
    campaign: str
    before: float
    after: float
    p_value: float | None = None
    pins: list[PinChange] = []


class Series(Struct, frozen=True):
    """What happened to one comparison on one host (`host` "all": the fleet) over campaigns, oldest first."""

    name: str
    host: str
    points: list[HistoryPoint]
    changes: list[ChangePoint] = []


class History(Struct, frozen=True):
    """All that the report shows of the past."""

    series: list[Series] = []


class _NightlyChange(Struct, frozen=True):
    """A change point as `kvtrial history --json` prints it; what the report does not show is not read."""

    host: str
    night: str
    arm: str
    against: str
    phase: str
    metric: str
    from_value: float
    to_value: float
    p_value: float
    pins_changed: dict[str, list[str]] = {}


class _Nightly(Struct, frozen=True):
    """The answer of `kvtrial history --json`, of which only the changes are read."""

    changes: list[_NightlyChange]


def read_history(path: Path) -> History:
    """A history from a JSON file: a History, or the answer of `kvtrial history --json` with its changes.

    Raises UnusableInput where it can't be read or has another shape.
    """
    try:
        raw = path.read_bytes()
        keys = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        _refuse_newer(path, keys)
        if "changes" not in keys and "series" not in keys:
            raise UnusableInput(
                f"{path} is no history of campaigns (it has neither changes nor series); give what kvtrial history "
                "--json wrote."
            )
        if "changes" in keys:
            return _of_nights(msgspec.json.decode(raw, type=_Nightly).changes)
        return msgspec.json.decode(raw, type=History)
    except OSError as error:
        raise UnusableInput(f"{path} can't be read ({error.strerror}); give an existing file.") from None
    except msgspec.DecodeError as error:
        raise UnusableInput(f"{path} is no history of campaigns ({error}); give what kvtrial history wrote.") from None


def _refuse_newer(path: Path, keys: Mapping[str, msgspec.Raw]) -> None:
    """Raise UnusableInput for a history whose major version is newer than this release reads."""
    version = msgspec.json.decode(keys["schema_version"], type=str) if "schema_version" in keys else SCHEMA_VERSION
    major, newest = version.partition(".")[0], SCHEMA_VERSION.partition(".")[0]
    if not major.isdecimal():
        raise UnusableInput(f"{path} is no history of campaigns (its schema_version is {version[:40]!r}).")
    if int(major) > int(newest):
        raise UnusableInput(
            f"{path} has schema_version {version[:40]}, newer than {SCHEMA_VERSION}, the newest this release reads; "
            "use a newer kvtrial."
        )


def _of_nights(changes: Sequence[_NightlyChange]) -> History:
    by_series: dict[tuple[str, str], list[ChangePoint]] = {}
    for change in changes:
        name = f"{change.phase}: {change.metric}, {change.arm} / {change.against}"
        pins = [PinChange(pin, *[*values, "", ""][:2]) for pin, values in sorted(change.pins_changed.items())]
        point = ChangePoint(change.night, change.night, change.from_value, change.to_value, change.p_value, pins)
        by_series.setdefault((name, change.host), []).append(point)
    return History([Series(name, host, [], points) for (name, host), points in by_series.items()])
