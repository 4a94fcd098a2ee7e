"""What the pairs that count say, by the project's own statistics. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from kvtrial.analysis import effect
from kvtrial.analysis.judge.evidence import evidence, preempted
from kvtrial.analysis.judge.known import notes as notes_on_defects
from kvtrial.analysis.judge.known import warned
from kvtrial.analysis.judge.plain import percent_differences, plain_numbers
from kvtrial.analysis.judge.results import Pair, Results
from kvtrial.analysis.judge.suspect import suspicious
from kvtrial.analysis.judge.validity import Dropped, caveats, dropped, fatal, unsettled
from kvtrial.analysis.observe.finding import Finding
from kvtrial.analysis.observe.words import listed
from kvtrial.record.verdict import Word

MOST_DROPPED_OF_ONE_ARM = 2
"""Pairs may be dropped for faults of one arm's runs this often before the drop itself favours the other."""


class Comparison(msgspec.Struct, frozen=True):
    """Variant against control: ratio with interval, as in a verdict.json."""

    metric: str
    effect: float
    ci_low: float
    ci_high: float
    confidence: float
    p_value: float
    pairs: int
    mde: float | None
    margin: float
    verdict: Word


class Judgement(msgspec.Struct, frozen=True, rename={"class_": "class"}):
    """What a result set is worth. `comparison` None: times were not compared."""

    schema_version: int
    verdict: str
    class_: str
    findings: list[Finding]
    comparison: Comparison | None = None
    source: str = "results"
    notes: list[str] = []


def judge(results: Results) -> Judgement:
    """The verdict on a result set: validity first, blind to the outcome, then the effect of the pairs that count."""
    results = msgspec.structs.replace(results, notes=[*results.notes, *caveats(results), *notes_on_defects(results)])
    out = dropped(results)
    kept = [pair for pair in results.pairs if pair not in [drop.pair for drop in out]]
    invalid = list(fatal(results))
    if invalid:
        usable = [pair for pair in results.pairs if pair.control.values and pair.variant.values]
        numbers = plain_numbers(*_values(usable)) if usable else {}
        findings = [msgspec.structs.replace(invalid[0], numbers=numbers | invalid[0].numbers), *invalid[1:]]
        return Judgement(1, "INVALID", findings[0].class_, findings, None, results.source, results.notes)
    if not kept:
        found = _removed(results, out, None, None)
        return Judgement(1, "INVALID", found.class_, [found], None, results.source, results.notes)
    interval = effect.hodges_lehmann(_log_ratios(kept))
    margin = results.min_effect_pct / 100
    word, note = effect.decide(interval, margin, "ratio", "lower" if results.lower_is_better else "higher")
    comparison = _comparison(results, kept, interval, margin, word)
    found_by_effect = _by_effect(results, kept, interval, comparison, note)
    verdict = _capped(comparison.verdict, results, out, found_by_effect.class_)
    beside = [*warned(results), *unsettled(results)]
    suspect = list(suspicious(results, kept))
    if suspect and verdict in ("BETTER", "WORSE", "EQUIVALENT"):
        verdict = "INCONCLUSIVE"
        direction = _direction(percent_differences(*_values(kept)), -1 if results.lower_is_better else 1)
        shown = f" What they would show: {direction}, {_interval(comparison)}."
        found_by_effect = msgspec.structs.replace(
            suspect[0],
            reason=suspect[0].reason + shown,
            numbers=found_by_effect.numbers | suspect[0].numbers,
        )
        suspect = suspect[1:]
    beside = [*suspect, *beside]
    if beside:
        found_by_effect = msgspec.structs.replace(
            found_by_effect, do=f"Settle first what is said beside it. {found_by_effect.do}"
        )
    findings = [found_by_effect, *beside]
    if out:
        findings.insert(0, _removed(results, out, found_by_effect, comparison))
    comparison = msgspec.structs.replace(comparison, verdict=verdict)
    return Judgement(1, verdict, findings[0].class_, findings, comparison, results.source, results.notes)


def _values(pairs: Sequence[Pair]) -> tuple[list[float], list[float]]:
    return [pair.control.value for pair in pairs], [pair.variant.value for pair in pairs]


def _log_ratios(pairs: Sequence[Pair]) -> list[float]:
    control, variant = _values(pairs)
    return effect.log_ratios(variant, control)


def _comparison(
    results: Results, kept: Sequence[Pair], interval: effect.Interval, margin: float, word: Word
) -> Comparison:
    return Comparison(
        results.metric,
        effect.outward(interval.estimate, "ratio"),
        effect.outward(interval.low, "ratio"),
        effect.outward(interval.high, "ratio"),
        interval.confidence,
        interval.p_value,
        len(kept),
        None if interval.sd is None else effect.mde(interval.sd, len(kept)),
        margin,
        word,
    )


def _capped(word: Word, results: Results, out: Sequence[Dropped], class_: str) -> Word | str:
    """INCONCLUSIVE where pairs left for faults of the variant alone or noise is as large; INVALID where A/A fails."""
    if class_ == "aa_differs":
        return "INVALID"
    if results.arms_identical and word in ("BETTER", "WORSE"):
        return "INCONCLUSIVE"
    of_variant = [drop for drop in out if drop.arm == "variant"]
    of_control = [drop for drop in out if drop.arm == "control"]
    if word in ("BETTER", "WORSE") and class_ == "difference_not_shown":
        return "INCONCLUSIVE"
    if word == "BETTER" and len(of_variant) > MOST_DROPPED_OF_ONE_ARM and not of_control:
        return "INCONCLUSIVE"
    return word


def _pct(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def _interval(comparison: Comparison) -> str:
    return (
        f"{_pct(comparison.effect)} ({100 * comparison.confidence:.0f} % interval {_pct(comparison.ci_low)} to "
        f"{_pct(comparison.ci_high)}, {comparison.pairs} pairs, exact signed-rank p {comparison.p_value:.2g})"
    )


def _by_effect(
    results: Results, kept: Sequence[Pair], interval: effect.Interval, comparison: Comparison, note: str
) -> Finding:
    numbers = plain_numbers(*_values(kept)) | _own(comparison)
    differences = percent_differences(*_values(kept))
    sign = -1 if results.lower_is_better else 1
    if results.arms_identical:
        return _aa(results, interval, comparison, numbers, differences)
    if comparison.pairs < effect.LEAST_PAIRS:
        return _too_few(results, comparison, numbers, differences, sign)
    proof, proved = evidence(results, kept)
    floor = _floor(results, comparison) + preempted(kept)
    counts = _direction(differences, sign)
    down, up = _borders(comparison.margin)
    beyond = up if comparison.effect > 1 else f"{down}, which is {100 * comparison.margin:g} % the other way round"
    said = f"{results.metric}: {counts}, {_interval(comparison)}"
    plain = f" A plain mean of the pairs gives {numbers['mean_pct']:+.2f} % ({_t(numbers)})."
    if comparison.verdict in ("BETTER", "WORSE") and _within_noise(results, comparison):
        return Finding(
            "difference_not_shown",
            "warn",
            f"{said}. Yet with nothing changed this set-up differs by {results.aa_noise_pct:g} % (the stated A/A "
            f"noise), which is not less than this effect.{plain} {proof}{preempted(kept)}",
            numbers | proved | {"aa_noise_pct": results.aa_noise_pct},
            "Find what makes the noise (order, lifetime of the server, cache, neighbours), then run A/A and these "
            "pairs again.",
            "unknown",
        )
    if comparison.verdict == "BETTER":
        return Finding(
            "improvement_valid",
            "info",
            f"{said}: the whole interval lies beyond {beyond}.{plain} {proof}{floor}",
            numbers | proved,
            "Publish it with versions, sizes, order and the checks it passed; it holds for this load, model and host."
            if results.proves_loads
            else "Scrape /metrics before and after each run and keep the pages: then what made it can be shown.",
            "seen" if results.proves_loads else "inferred",
        )
    if comparison.verdict == "WORSE":
        return Finding(
            "regression_valid",
            "info",
            f"{said}: the variant is worse, and the whole interval lies beyond {beyond}.{plain} {proof}{floor} That "
            f"the "
            "tier served is no reason why it should pay.",
            numbers | proved,
            "Leave it out for this load, or make it smaller or larger and compare again: a loss is as much a result "
            "as a "
            "gain.",
            "seen" if results.proves_loads else "inferred",
        )
    class_ = "equivalent_within_margin" if comparison.verdict == "EQUIVALENT" else "difference_not_shown"
    return Finding(
        class_,
        "info",
        f"{said}; {note or f'inside {down} to {up}'}.{plain} {proof}{floor}",
        numbers | proved,
        "Nothing to gain or lose beyond the margin here."
        if comparison.verdict == "EQUIVALENT"
        else "Run the pairs still needed, as one fixed number decided beforehand.",
    )


def _borders(margin: float) -> tuple[str, str]:
    """The margin downward and upward: a ratio is as far below 1 as its inverse is above it."""
    return _pct(1 / (1 + margin)), f"{100 * margin:+g} %"


def _own(comparison: Comparison) -> dict[str, Any]:
    return {
        "effect": comparison.effect,
        "ci_low": comparison.ci_low,
        "ci_high": comparison.ci_high,
        "confidence": comparison.confidence,
        "p_value": comparison.p_value,
    }


def _t(numbers: dict[str, Any]) -> str:
    if numbers["t95"] is None:
        return "one pair has no interval"
    low, high = numbers["t95"]
    return f"95 % t interval {low:+.2f} to {high:+.2f} %, exact sign-flip p {numbers['signflip_p']:.4f}"


def _floor(results: Results, comparison: Comparison) -> str:
    if results.aa_noise_pct is None:
        return ""
    within = _within_noise(results, comparison)
    return f" The stated A/A noise of {results.aa_noise_pct:g} % is {'not smaller' if within else 'smaller'}."


def _within_noise(results: Results, comparison: Comparison) -> bool:
    """Whether identical arms were stated to differ by as much as these do."""
    return results.aa_noise_pct is not None and abs(100 * (comparison.effect - 1)) <= results.aa_noise_pct


def _direction(differences: Sequence[float], sign: int) -> str:
    """How many pairs are better or worse, whichever are more; those that are equal are neither."""
    better, worse = (sum(1 for value in differences if side * value > 0) for side in (sign, -sign))
    equal = len(differences) - better - worse
    if not better and not worse:
        return f"all {len(differences)} pairs equal"
    most = (
        f"{better} of {len(differences)} pairs better"
        if better >= worse
        else (f"{worse} of {len(differences)} pairs worse")
    )
    return most + (f", {equal} equal" if equal else "")


def _too_few(
    results: Results, comparison: Comparison, numbers: dict[str, Any], differences: Sequence[float], sign: int
) -> Finding:
    n = comparison.pairs
    least = 2 / 2**n
    interval = numbers["t95"]
    spread = ""
    if interval is not None:
        holds_zero = interval[0] <= 0 <= interval[1]
        beyond = max(abs(interval[0]), abs(interval[1])) > results.min_effect_pct
        far = " and reaches beyond" if holds_zero else ", and its far end lies beyond"
        spread = (
            f" The 95 % interval of the mean (t, {n - 1} degree{'s' if n != 2 else ''} of freedom) is "
            f"{interval[0]:+.2f} "
            f"to {interval[1]:+.2f} %: it {'contains' if holds_zero else 'excludes'} 0"
            + (f"{far} the {results.min_effect_pct:g} % of interest" if beyond else "")
            + "."
        )
    return Finding(
        "too_few_pairs",
        "warn",
        f"{results.metric}: {_direction(differences, sign)}, by "
        f"{listed([f'{value:+.2f} %' for value in numbers['diff_pct']])}. Yet with "
        f"{n} "
        f"pair{'s' if n != 1 else ''} no exact two-sided test can go below p = {least:.4g}.{spread} The requests "
        f"inside a "
        "run are no samples of their own. At least "
        f"{effect.LEAST_PAIRS} pairs are needed for p <= .05 to be possible, more to bound the effect.",
        numbers | {"least_p": least, "least_pairs": effect.LEAST_PAIRS},
        f"Run more pairs: {effect.LEAST_PAIRS} is the minimum, 8 to 12 is sensible; fix the number beforehand.",
        "unknown",
    )


def _aa(
    results: Results,
    interval: effect.Interval,
    comparison: Comparison,
    numbers: dict[str, Any],
    differences: Sequence[float],
) -> Finding:
    largest = max(abs(value) for value in differences)
    border = f"{100 * comparison.margin:g} %"
    if comparison.pairs >= effect.LEAST_PAIRS and (interval.low > 0 or interval.high < 0):
        return Finding(
            "aa_differs",
            "refuse",
            f"A/A fails: both arms are the same configuration and differ all the same, {_interval(comparison)}. "
            f"Something "
            "besides the setting favours one arm (order, lifetime of the server, cache, another host).",
            numbers | {"largest_pair_pct": largest},
            "Find it before any A/B on this set-up is believed.",
        )
    half = None if numbers["t95"] is None else (numbers["t95"][1] - numbers["t95"][0]) / 2
    sees = f"the interval of the mean is about ±{half:.1f} %" if half is not None else "one pair has no interval"
    needed = effect.pairs_needed(interval.sd or 0.0, comparison.margin)
    pairs = f"; to detect {border} by this spread takes {needed} pairs" if needed else ""
    least = _pct(comparison.mde) if comparison.mde else ""
    detectable = f" The least effect that {comparison.pairs} pairs detect is {least}" if least else ""
    return Finding(
        "aa_pass_with_noise_floor",
        "info",
        f"A/A passes: both arms are the same configuration and no difference is shown, {_interval(comparison)}. Single "
        f"pairs differ by up to {largest:.1f} % with nothing changed: that is the noise floor of this set-up. With "
        f"{comparison.pairs} pairs {sees}; effects below that can't be seen, and equality closer than that is not "
        f"shown."
        f"{detectable}{pairs}.",
        numbers | {"largest_pair_pct": round(largest, 2), "half_width_pct": half, "pairs_for_margin": needed},
        f"Choose the number of pairs for {border} by this spread. A single pair taken as a result would be plus or "
        f"minus "
        f"{largest:.0f} %.",
    )


def _removed(results: Results, out: Sequence[Dropped], found: Finding | None, comparison: Comparison | None) -> Finding:
    each = [f"pair {drop.pair.name} ({drop.reason})" for drop in out]
    left = len(results.pairs) - len(out)
    everything = [pair for pair in results.pairs if pair.control.values and pair.variant.values]
    with_all = plain_numbers(*_values(everything)) if everything else {}
    numbers: dict[str, Any] = dict(found.numbers) if found is not None else {}
    numbers |= {"removed": [drop.pair.name for drop in out], "valid_pairs": left, "all_pairs": with_all}
    said = f" With them the mean would be {with_all['mean_pct']:+.2f} %." if with_all else ""
    rest = (
        f" What remains: {found.class_}: {_interval(comparison)}."
        if found is not None and comparison is not None
        else " Nothing remains."
    )
    of_variant = [drop for drop in out if drop.arm == "variant"]
    one_sided = ""
    if of_variant and not any(drop.arm == "control" for drop in out):
        one_sided = (
            " All of these faults are the variant's: if its engine failed there, that is a result of the variant and "
            "speaks against it"
            + (
                "; with so many the gain is not taken as shown."
                if len(of_variant) > MOST_DROPPED_OF_ONE_ARM
                else ", whatever the other pairs say."
            )
        )
    return Finding(
        "invalid_pairs_removed",
        "warn",
        f"{len(out)} of {len(results.pairs)} pairs don't count: {listed(each, 8)}. A pair goes as a whole, for what is "
        f"wrong with it and not for its times; {left} remain.{said}{rest}{one_sided}",
        numbers,
        "Report the pairs that were dropped and why; repeat them at the end of the same campaign, not as long as it "
        "takes "
        "to like the result.",
    )
