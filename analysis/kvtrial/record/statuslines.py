"""The engine's periodic log line: what was running, waiting and served, every few seconds."""

import re
from datetime import datetime, timedelta
from functools import cache
from itertools import pairwise
from statistics import median

import msgspec

from kvtrial.record.enginelog import Pattern
from kvtrial.record.versions import data, within

USUAL_INTERVAL_SECONDS = 10.0


class StatusTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`data/log_status.yml`."""

    line: str
    fields: dict[str, list[Pattern]]


class StatusLine(msgspec.Struct, frozen=True):
    """One periodic line. None: not printed. `preemptions` of the interval before the line; percents as printed."""

    line_number: int
    engine: str = ""
    time: str | None = None
    prompt_tokens_per_second: float | None = None
    generation_tokens_per_second: float | None = None
    running: float | None = None
    waiting: float | None = None
    deferred: float | None = None
    preemptions: float | None = None
    kv_usage_percent: float | None = None
    prefix_hit_percent: float | None = None
    external_hit_percent: float | None = None


def status_lines(log_text: str, version: str | None = None) -> dict[str, list[StatusLine]]:
    """Periodic lines by engine number, in order; `version` None tries the texts of all versions."""
    table = data("log_status", StatusTable)
    found: dict[str, list[StatusLine]] = {}
    for number, line in enumerate(log_text.splitlines(), start=1):
        if table.line not in line:
            continue
        values: dict[str, str] = {}
        for name, patterns in table.fields.items():
            for pattern in patterns:
                if version is not None and not within(version, pattern.since, pattern.until):
                    continue
                match = _compiled(pattern.pattern).search(line)
                if match:
                    values[name] = match["value"]
                    break
        engine, time = values.pop("engine", ""), values.pop("time", None)
        numbers = {name: float(value) for name, value in values.items()}
        found.setdefault(engine, []).append(StatusLine(number, engine, time, **numbers))
    return found


def interval_seconds(lines: list[StatusLine]) -> float:
    """Usual time between lines, from their own times; 10 s, the engine's default, where they carry none."""
    times = [moment for line in lines if line.time and (moment := _moment(line.time)) is not None]
    gaps = [(later - earlier) for earlier, later in pairwise(times)]
    seconds = [gap.total_seconds() for gap in gaps if timedelta(0) < gap < timedelta(minutes=10)]
    return median(seconds) if seconds else USUAL_INTERVAL_SECONDS


def _moment(text: str) -> datetime | None:
    # The engine prints no year; a leap year reads every date.
    try:
        return datetime.strptime(f"2024-{text}", "%Y-%m-%d %H:%M:%S")
    except ValueError:
        return None


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
