"""What proves that a variant had what is tried, and its control had not. Pure."""

from collections.abc import Sequence
from typing import Any

from kvtrial.analysis.judge.results import Pair, Results
from kvtrial.analysis.observe.words import listed, whole


def preempted(pairs: Sequence[Pair]) -> str:
    """Preemptions by arm, in words; empty where there were none. They go along with an effect and drop no pair."""
    counts = {arm: sum(getattr(pair, arm).preemptions or 0 for pair in pairs) for arm in ("control", "variant")}
    if not any(counts.values()):
        return ""
    return f" Preemptions: control {whole(counts['control'])}, variant {whole(counts['variant'])}; they drop no pair."


def evidence(results: Results, pairs: Sequence[Pair]) -> tuple[str, dict[str, Any]]:
    """What proves that the variant had what is tried and the control had not, in words and numbers."""
    loads = [pair.variant.load_bytes for pair in pairs]
    hits = [pair.variant.external_hit_tokens for pair in pairs]
    control = [pair.control.load_bytes for pair in pairs]
    if not results.proves_loads:
        return (
            "What was tried is not proved: these files hold no counters of the server. The difference is real or not; "
            "what "
            "made it is not to be known from them.",
            {},
        )
    if not any(loads):
        return "No load is stated in either arm, so what is tried here is no tier, or it was not proved.", {}
    known = [load for load in loads if load is not None]
    each = [hit for hit in hits if hit is not None]
    none = all(load is None for load in control)
    absent = "has no connector metrics (null, not 0)" if none else "loaded 0 B"
    digests = [pair for pair in pairs if pair.control.output_digest and pair.variant.output_digest]
    equal = f" Answers are equal in {len(digests)} of {len(pairs)} pairs."
    answers = equal if digests else " Answers were not compared."
    external = f" and {ranged(each, ',.0f')} external hit tokens" if each else ""
    return (
        f"Load proof: {ranged(known, ',.0f')} B{external} per variant run; the control {absent}.{answers}",
        {"load_bytes": known, "external_hits": each, "control_load_bytes": control},
    )


def named(names: Sequence[str]) -> str:
    """`2-8` for numbers in a row, else a list."""
    if len(names) > 2 and all(name.isdigit() for name in names):
        numbers = [int(name) for name in names]
        if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
            return f"{numbers[0]}-{numbers[-1]}"
    return listed(names, 8)


def ranged(values: Sequence[float], form: str = "+.1f") -> str:
    """`-60.8 to -59.6`, or one number where all are equal."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"
