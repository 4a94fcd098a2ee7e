"""Where a series of nights changed, how sure that is, and which of many series did. Pure.

Where: the split of a series with the least sum of squares on both sides, found by ruptures (exact segmentation with a
linear kernel; Truong, Oudre, Vayatis, Signal Processing 167, 2020), which needs numpy and scipy alone and is kept up.
apache-otava, made for nightly numbers, pins numpy 2.2 and scipy below 1.17 and brings clients of BigQuery, PostgreSQL
and Slack, so it can't be installed beside the rest. How sure: the t of that split, times the number of splits there
were to choose from (Bonferroni), so a series without a change gives p < α in at most α of cases. Which: Benjamini and
Hochberg over the series; in a series that changed, both sides are searched again at the level that was reached.

What counts as independent is the night, whatever the length of the series: how far runs of a night lie apart says
nothing about nights. So few nights are too few for the test. Of a series of three to seven a step is told by its size
as well: larger than a quarter, than the margin, than three times every noise that is known of it (A/A pairs, runs of a
night, nights of one side), and than ten, eight or six times (three, four, more nights) how far the nights of one side
lie apart over all series together: what a few nights of one series can't tell, those of many can. That is a declared
rule, no test, and said with it. Two nights tell nothing about nights.
Gradual drift is found as a step somewhere inside it. A night that is off alone is no change unless it is the last.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy
import ruptures
from msgspec import Struct, structs
from scipy import special

from kvtrial.analysis.fleet import FALSE_DISCOVERY_RATE, discoveries
from kvtrial.analysis.history.model import Unit

LEAST_NIGHTS = 8
"""Below, a step is told by its size as well; what is shorter is not split again."""
LEAST_NIGHTS_BY_SIZE = 3
LEAST_STEP_BY_SIZE = math.log(1.25)
NOISES_BY_SIZE = 3
_NOISES_OF_ALL = {3: 10, 4: 8}
_NOISES_OF_ALL_LATER = 6
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

    `p_value`: two-sided, by nights, adjusted for the choice of the night; 1 where two nights can't tell.
    """

    start: int
    at: int
    end: int
    before: float
    after: float
    p_value: float
    evidence: Unit


def changed(
    series: Mapping[Key, Nightly],
    rate: float = FALSE_DISCOVERY_RATE,
    least_steps: Mapping[Key, float] | None = None,
) -> dict[Key, list[Split]]:
    """The series that changed, at a false discovery rate over all of them, each with its splits in time order.

    `least_steps`: of series on a log scale, from which step on one of few nights is told by its size; others are not.
    """
    first = {key: split for key, nightly in series.items() if (split := best_split(nightly)) is not None}
    if not first:
        return {}
    p_values = numpy.array([split.p_value for split in first.values()])
    # A series too short to be split was tested in vain, and counts.
    padded = numpy.concatenate([p_values, numpy.ones(len(series) - len(first))])
    kept = discoveries(padded, rate)
    level = float(padded[kept].max(initial=0.0))
    level = max(level, rate * int(kept.sum()) / len(padded))
    least = least_steps or {}
    apart = _nights_apart([(series[key], first[key]) for key in first if key in least])
    found = {}
    for (key, split), tested in zip(first.items(), kept[: len(first)], strict=True):
        if tested:
            found[key] = _all_splits(series[key], split, level)
        elif key in least and _is_large(series[key], split, least[key], apart):
            found[key] = [structs.replace(split, evidence="size")]
    return found


def told_from(series: Mapping[Key, Nightly], least_steps: Mapping[Key, float]) -> dict[Key, float]:
    """Of series of few nights: the step (log) from which on a change on the newest night alone is told by its size.

    Not in it are series of which nothing is told: of two nights or fewer, of eight or more, or without a least step.
    """
    split = {key: (series[key], best) for key in least_steps if (best := best_split(series[key])) is not None}
    told = {key: _between_nights(*of) for key, of in split.items()}
    squares, freedom = sum(v * free for v, free in told.values()), sum(free for _, free in told.values())
    found = {}
    for key, (nightly, _) in split.items():
        count = len(nightly.values)
        if not LEAST_NIGHTS_BY_SIZE <= count < LEAST_NIGHTS:
            continue
        newest = Split(0, count - 1, count, 0.0, 0.0, 1.0, "size")
        own, free = _between_nights(nightly, newest)
        apart = math.sqrt((squares - told[key][0] * told[key][1] + own * free) / freedom)
        found[key] = _least_step(nightly, newest, least_steps[key], apart)
    return found


def _nights_apart(split: Sequence[tuple[Nightly, Split]]) -> float:
    """SD of nights of one side of a split, over all series together."""
    told = [_between_nights(nightly, at) for nightly, at in split]
    freedom = sum(free for _, free in told)
    return math.sqrt(sum(variance * free for variance, free in told) / freedom) if freedom else math.inf


def _is_large(nightly: Nightly, split: Split, least: float, apart: float) -> bool:
    """Whether a series of few nights made a step that needs no test; `apart` as of _nights_apart."""
    if not LEAST_NIGHTS_BY_SIZE <= len(nightly.values) < LEAST_NIGHTS:
        return False
    return abs(split.after - split.before) > _least_step(nightly, split, least, apart)


def _least_step(nightly: Nightly, split: Split, least: float, apart: float) -> float:
    noise = math.sqrt(max(_between_nights(nightly, split)[0], _between_runs(nightly)))
    of_all = _NOISES_OF_ALL.get(len(nightly.values), _NOISES_OF_ALL_LATER) * apart
    return max(least, LEAST_STEP_BY_SIZE, NOISES_BY_SIZE * noise, of_all)


def _between_nights(nightly: Nightly, split: Split) -> tuple[float, int]:
    """Variance of nights on one side of a split, and its degrees of freedom; 0 where there are two nights."""
    sides = [numpy.array(nightly.values[split.start : split.at]), numpy.array(nightly.values[split.at : split.end])]
    freedom = split.end - split.start - 2
    squares = sum(float(((side - side.mean()) ** 2).sum()) for side in sides)
    return (squares / freedom if freedom else 0.0), freedom


def _between_runs(nightly: Nightly) -> float:
    """Variance of runs of one night."""
    told = [(n - 1, sd) for n, sd in zip(nightly.runs, nightly.sds, strict=True) if n > 1]
    return sum(n * sd**2 for n, sd in told) / sum(n for n, _ in told) if told else 0.0


def _all_splits(nightly: Nightly, split: Split, level: float) -> list[Split]:
    found = [split]
    for start, end in ((split.start, split.at), (split.at, split.end)):
        inner = best_split(nightly, start, end) if end - start >= LEAST_NIGHTS else None
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
    """The likeliest split of nights start..end − 1; None for fewer than two nights."""
    end = len(nightly.values) if end is None else end
    count = end - start
    if count < 2:
        return None
    at = start + _location(nightly.values[start:end])
    split = Split(start, at, end, _mean(nightly, start, at), _mean(nightly, at, end), 1.0, "night")
    variance, freedom = _between_nights(nightly, split)
    if not freedom:
        return split
    # Means of runs can't lie closer together than their runs let them, but for chance: nor may few nights seem to.
    variance = max(variance, _between_runs(nightly) * count / sum(nightly.runs[start:end]), _SMALLEST_VARIANCE)
    distance = abs(numpy.mean(nightly.values[at:end]) - numpy.mean(nightly.values[start:at]))
    t = float(distance) / math.sqrt(variance * (1 / (at - start) + 1 / (end - at)))
    return structs.replace(split, p_value=min(1.0, (count - 1) * 2 * float(special.stdtr(freedom, -t))))


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
