"""What a report shows of earlier campaigns: a small input that whoever keeps the history fills.

`kvtrial report --history FILE.json` reads it, so that the report needs nothing of how the history is kept.
"""

from pathlib import Path

import msgspec
from msgspec import Struct

from kvtrial.record.errors import UnusableInput


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


def read_history(path: Path) -> History:
    """A history from a JSON file. Raises UnusableInput where it can't be read or has another shape."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=History)
    except OSError as error:
        raise UnusableInput(f"{path} can't be read ({error.strerror}); give an existing file.") from None
    except msgspec.DecodeError as error:
        raise UnusableInput(f"{path} is no history of campaigns ({error}); give what kvtrial history wrote.") from None
