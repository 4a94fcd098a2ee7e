"""A ladder's answer for a terminal: onset, what the profiles reach, what each change does. Pure."""

import math
from collections.abc import Sequence

from kvtrial.analysis.regime import CHANGE_MARKS, change_in_short
from kvtrial.record.verdict import Verdict

LADDER_LINES_MAX = 5
"""Of the regime: onset and what runs out, profiles, changes. The other five: verdict, effect, proof, next, report."""


def ladder_lines(verdict: Verdict) -> list[str]:
    """At most LADDER_LINES_MAX lines; every arm's change is in them, in short where there are more than lines."""
    if verdict.ladder is None:
        return []
    regime = verdict.ladder.regime
    profiles = " ".join(line.removeprefix("Profile ") for line in regime if line.startswith("Profile "))
    unpriced = "".join(f" {line}" for line in regime if line.startswith("No cost: "))
    several = len(verdict.hosts) > 1
    on = f" on {verdict.ladder.host}" if several else ""
    ladder = f"Ladder of {verdict.ladder.host}, one of {len(verdict.hosts)} hosts" if several else "Ladder"
    said = [f"{ladder}: {regime[0]} {regime[1]}", *([f"Profiles{on}: {profiles}{unpriced}"] if profiles else [])]
    return [*said, *_changes(verdict, LADDER_LINES_MAX - len(said), on)]


def _changes(verdict: Verdict, room: int, on: str) -> list[str]:
    """A line for each change as long as there is room for it, else several changes in short on a line."""
    assert verdict.ladder
    regime = verdict.ladder.regime
    whole = [
        " ".join([line, *(own for own in regime if own.startswith(_of_arm(line.split(" (")[0])))])
        for line in regime
        if any(mark in line for mark in CHANGE_MARKS)
    ]
    if len(whole) <= room:
        return [f"Change{on}: {line}" for line in whole]
    short = [text for arm in verdict.ladder.arms if (text := change_in_short(arm))]
    return [f"Changes{on}: {'; '.join(some)}." for some in _shared_out(short, room)]


def _shared_out(texts: Sequence[str], lines: int) -> list[Sequence[str]]:
    """The texts over so many lines, in their order, as evenly as it goes."""
    each = math.ceil(len(texts) / lines)
    return [texts[begun : begun + each] for begun in range(0, len(texts), each)]


def _of_arm(arm: str) -> tuple[str, ...]:
    """How the further sentences on what an arm's change does begin."""
    return f"With {arm} ", f"{arm} changes the work"
