"""Whether a set's values can be measurements at all: units mixed up, an arm computed from the other, copies. Pure."""

import re
from collections.abc import Iterator, Sequence
from statistics import fmean, median, pstdev

from kvtrial.analysis.judge.evidence import named
from kvtrial.analysis.judge.results import ARMS, Pair, Results, Run
from kvtrial.analysis.observe.finding import Finding

UNIT_RATIO = 100.0
"""Medians of the arms that lie farther apart than this are more likely of two units than of two settings."""
SAME_RATIO = 1e-4
LEAST_PAIRS_TO_TELL = 3
LEAST_VALUES_OF_A_COPY = 6
"""Distinct values of a run under which its shape may well come again by chance or by rounding."""
SAME_SHAPE = 0.01
"""Of a run's own standard deviation."""
LEAST_DIGITS = 3
LEVELS_FOR_A_PAIR = 10
"""How many times as many differences as pairs must be possible, so that equal ones are no accident of rounding."""
_COUNTS = re.compile(r"(?:preemptions|tokens|bytes|hits|count|requests)$")
"""What is counted may well be equal in every run, and may well go from many to few."""


def suspicious(results: Results, pairs: Sequence[Pair]) -> Iterator[Finding]:
    """Findings on values that show no difference of the arms, however clear it looks."""
    if _COUNTS.search(results.metric) or not pairs:
        return
    yield from _units(results, pairs)
    signs = [sign for sign in (_one_ratio(pairs), _one_value(pairs), _copies(pairs) or _shifts(pairs)) if sign]
    if signs:
        yield Finding(
            "difference_not_shown",
            "warn",
            f"These runs look computed, not measured: {'; '.join(signs)}. No server repeats itself like this, so "
            "nothing is shown by them.",
            {"computed": signs},
            "Give every run's own values as the load client wrote them, each run once.",
            "unknown",
        )


def _units(results: Results, pairs: Sequence[Pair]) -> Iterator[Finding]:
    control, variant = (median(getattr(pair, arm).value for pair in pairs) for arm in ARMS)
    ratio = variant / control
    if 1 / UNIT_RATIO <= ratio <= UNIT_RATIO:
        return
    yield Finding(
        "difference_not_shown",
        "warn",
        f"{results.metric}: the arms' medians are {control:.4g} (control) and {variant:.4g} (variant), "
        f"{max(ratio, 1 / ratio):,.0f} times apart: is one arm in seconds and the other in ms? No difference is shown "
        "while that is open.",
        {"median_control": control, "median_variant": variant},
        "Give both arms in the one unit that `metric` names. Where they are: look at single requests, for a setting "
        "seldom does that.",
        "unknown",
    )


def _one_ratio(pairs: Sequence[Pair]) -> str:
    """All pairs have one ratio although the control itself varies."""
    controls = [pair.control.value for pair in pairs]
    ratios = [pair.variant.value / pair.control.value for pair in pairs]
    apart = max(ratios) - min(ratios)
    if len(pairs) < LEAST_PAIRS_TO_TELL or apart > SAME_RATIO * min(ratios):
        return ""
    if max(controls) - min(controls) <= 10 * SAME_RATIO * min(controls):
        return ""
    return f"variant / control is {fmean(ratios):.4f} in all {len(pairs)} pairs, while the control itself varies"


def _one_value(pairs: Sequence[Pair]) -> str:
    """All values of an arm are one, in more digits than rounding would leave alike."""
    found = []
    for arm in ARMS:
        values = {value for pair in pairs for value in getattr(pair, arm).values}
        if len(pairs) >= LEAST_PAIRS_TO_TELL and len(values) == 1 and _digits(value := values.pop()) >= LEAST_DIGITS:
            found.append(f"every value of the {arm} is {value:g} in all {len(pairs)} pairs")
    return "; ".join(found)


def _digits(value: float) -> int:
    return len(format(value, ".12g").replace(".", "").lstrip("0"))


def _copies(pairs: Sequence[Pair]) -> str:
    """Runs whose requests follow another run's up to an offset and a scale."""
    shapes: list[tuple[str, list[float]]] = []
    copied: list[str] = []
    example = ""
    for pair in pairs:
        for arm in ARMS:
            shape = _shape(getattr(pair, arm))
            if shape is None:
                continue
            name = f"{arm} of pair {pair.name}"
            first = next((other for other, known in shapes if _alike(shape, known)), None)
            if first is None:
                shapes.append((name, shape))
                continue
            example = example or f"{name} is {first} shifted or scaled, request by request"
            if pair.name not in copied:
                copied.append(pair.name)
    return f"{example} (such copies are in pairs {named(copied)})" if copied else ""


def _shifts(pairs: Sequence[Pair]) -> str:
    """Pairs of single values that are other pairs with one offset in both arms, so that their differences repeat.

    Where the values are written too coarsely for as many differences as there are pairs, nothing is told by it.
    """
    runs = [getattr(pair, arm) for pair in pairs for arm in ARMS]
    if len(pairs) < LEAST_VALUES_OF_A_COPY or any(len(run.values) != 1 for run in runs):
        return ""
    decimals = max(len(format(run.value, ".12g").partition(".")[2]) for run in runs)
    differences = [round(pair.variant.value - pair.control.value, decimals) for pair in pairs]
    levels = (max(differences) - min(differences)) * 10**decimals
    distinct = len(set(differences))
    if distinct > len(pairs) / 2 or levels < LEVELS_FOR_A_PAIR * len(pairs):
        return ""
    return f"variant - control takes only {distinct} values in {len(pairs)} pairs, to the last digit"


def _shape(run: Run) -> list[float] | None:
    if len(set(run.values)) < LEAST_VALUES_OF_A_COPY:
        return None
    mean, spread = fmean(run.values), pstdev(run.values)
    return [(value - mean) / spread for value in run.values]


def _alike(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and all(abs(a - b) <= SAME_SHAPE for a, b in zip(one, other, strict=True))
