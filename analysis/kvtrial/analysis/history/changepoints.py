"""Where a series of nights changed, how sure that is, and which of many series did. Pure.

Where: the split of a series with the least sum of squares on both sides, found by ruptures (exact segmentation with a
linear kernel; Truong, Oudre, Vayatis, Signal Processing 167, 2020), which needs numpy and scipy alone and is kept up.
apache-otava, made for nightly numbers, pins numpy 2.2 and scipy below 1.17 and brings clients of BigQuery, PostgreSQL
and Slack, so it can't be installed beside the rest. How sure: the t of that split, times the number of splits there
were to choose from (Bonferroni), so a series without a change gives p < α in at most α of cases. Which: Benjamini and
Hochberg over the series; in a series that changed, both sides are searched again at the level that was reached.

What counts as independent is the night, from eight nights on. Before, it is the run, each an engine lifetime of its
own, as if nights differed no more than runs of a night do: the only way to see a change in the first week, and
said with it.
Gradual drift is found as a step somewhere inside it. A night that is off alone is no change unless it is the last.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy
import ruptures
from msgspec import Struct
from scipy import special

from kvtrial.analysis.fleet import FALSE_DISCOVERY_RATE, discoveries
from kvtrial.analysis.history.model import Unit

LEAST_NIGHTS = 8
"""From so many on the night is the unit."""
_SMALLEST_VARIANCE = 1e-18

Key = TypeVar("Key")


class Nightly(Struct, frozen=True):
    """A series: per night the mean of its values, how many there are, and their SD (nan for one value)."""

    nights: list[str]
    values: list[float]
    runs: list[int]
    sds: list[float]


class Split(Struct, frozen=True):
    """A series lies at `before` on nights start..at − 1 and at `after` on nights at..end − 1 (indices).

    `p_value`: two-sided, adjusted for the choice of the night.
    """

    start: int
    at: int
    end: int
    before: float
    after: float
    p_value: float
    evidence: Unit


def changed(series: Mapping[Key, Nightly], rate: float = FALSE_DISCOVERY_RATE) -> dict[Key, list[Split]]:
    """The series that changed, at a false discovery rate over all of them, each with its splits in time order."""
    first = {key: split for key, nightly in series.items() if (split := best_split(nightly)) is not None}
    if not first:
        return {}
    p_values = numpy.array([split.p_value for split in first.values()])
    # A series too short to be split was tested in vain, and counts.
    padded = numpy.concatenate([p_values, numpy.ones(len(series) - len(first))])
    kept = discoveries(padded, rate)
    level = float(padded[kept].max(initial=0.0))
    level = max(level, rate * int(kept.sum()) / len(padded))
    return {
        key: _all_splits(series[key], split, level)
        for (key, split), found in zip(first.items(), kept[: len(first)], strict=True)
        if found
    }


def _all_splits(nightly: Nightly, split: Split, level: float) -> list[Split]:
    found = [split]
    for start, end in ((split.start, split.at), (split.at, split.end)):
        inner = best_split(nightly, start, end)
        if inner is not None and inner.p_value <= level:
            found += _all_splits(nightly, inner, level)
    found.sort(key=lambda one: one.at)
    return [_between(nightly, one, found, index) for index, one in enumerate(found)] if split.start == 0 else found


def _between(nightly: Nightly, split: Split, found: Sequence[Split], index: int) -> Split:
    """The levels on both sides up to the neighbouring changes, not to the ends of what was searched."""
    start = found[index - 1].at if index else 0
    end = found[index + 1].at if index + 1 < len(found) else len(nightly.values)
    return Split(
        start, split.at, end, _mean(nightly, start, split.at), _mean(nightly, split.at, end), split.p_value,
        split.evidence,
    )  # fmt: skip


def best_split(nightly: Nightly, start: int = 0, end: int | None = None) -> Split | None:
    """The likeliest split of nights start..end − 1; None for fewer than two nights, or where nothing tells noise."""
    end = len(nightly.values) if end is None else end
    count = end - start
    if count < 2:
        return None
    at = start + _location(nightly.values[start:end])
    before, after = _mean(nightly, start, at), _mean(nightly, at, end)
    if count >= LEAST_NIGHTS:
        evidence: Unit = "night"
        sides = [numpy.array(nightly.values[start:at]), numpy.array(nightly.values[at:end])]
        freedom = count - 2
        variance = sum(float(((side - side.mean()) ** 2).sum()) for side in sides) / freedom
        spread = variance * (1 / len(sides[0]) + 1 / len(sides[1]))
        distance = abs(float(sides[1].mean() - sides[0].mean()))
    else:
        evidence = "run"
        listed = range(start, end)
        freedom = sum(nightly.runs[i] - 1 for i in listed)
        if freedom < 1:
            return None
        squares = sum((nightly.runs[i] - 1) * nightly.sds[i] ** 2 for i in listed if nightly.runs[i] > 1)
        spread = squares / freedom * (1 / sum(nightly.runs[start:at]) + 1 / sum(nightly.runs[at:end]))
        distance = abs(after - before)
    t = distance / math.sqrt(max(spread, _SMALLEST_VARIANCE))
    p_value = min(1.0, (count - 1) * 2 * float(special.stdtr(freedom, -t)))
    return Split(start, at, end, before, after, p_value, evidence)


def _location(values: Sequence[float]) -> int:
    """How many nights lie before the split with the least sum of squares."""
    if len(values) == 2:
        return 1
    search = ruptures.KernelCPD(kernel="linear", min_size=1).fit(numpy.asarray(values, float))
    return int(search.predict(n_bkps=1)[0])


def _mean(nightly: Nightly, start: int, end: int) -> float:
    """Mean over the runs of the nights."""
    runs = nightly.runs[start:end]
    return sum(v * n for v, n in zip(nightly.values[start:end], runs, strict=True)) / sum(runs)
