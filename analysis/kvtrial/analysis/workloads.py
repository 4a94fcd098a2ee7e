"""Workloads of a protocol, checked, as the plan states them: every size an integer, every seed named. Pure."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, Struct

from kvtrial.record.errors import UnusableInput
from kvtrial.record.plan import (
    ArrivalsPlan,
    ClosedPlan,
    ConstantPlan,
    ConversationsPlan,
    LengthsPlan,
    MixPlan,
    PoissonPlan,
    PromptPlan,
    RecordedPlan,
    TracePlan,
    WorkloadPlan,
)
from kvtrial.record.protocol import (
    Choice,
    Closed,
    Constant,
    Conversations,
    Distribution,
    Fixed,
    FromAnswer,
    Lengths,
    LogNormal,
    Mix,
    Phase,
    Poisson,
    Protocol,
    Recorded,
    Trace,
    Uniform,
    Workload,
)
from kvtrial.record.trace import MOST_PAUSE_SECONDS, MOST_TOKENS
from kvtrial.record.workload import lognormal_share

IntegersDrawn: Any = Fixed[int] | Uniform[int] | LogNormal[int] | Choice[int]
NumbersDrawn: Any = Fixed[float] | Uniform[float] | LogNormal[float] | Choice[float]
MOST_REQUESTS = 1_000_000
MOST_TURNS = 1000
MOST_RATE_PER_SECOND = 100_000.0
LEAST_SHARE_WITHIN = 1e-6
"""Of a lognormal distribution within its bounds; below it the bounds say what is drawn, not the distribution."""


class TraceFile(Struct, frozen=True):
    """A trace that was read and written in its normal form: `file` below the folder of `Traces`.

    `source` is what the user calls it. `untimed_line` is the first request without a time that needs one, None where
    there is none; `seconds` lie between the first time and the last. `text`: whether a prompt is text, so that its
    length is only estimated. `left_out`: conversations in which nothing is asked.
    """

    source: str
    file: str
    sha256: str
    requests: int
    seconds: float | None
    untimed_line: int | None
    text: bool
    left_out: int


class Traces(Struct, frozen=True):
    """Traces that were read, by what the resolved protocol says of them, and the folder where they lie."""

    folder: Path
    files: Mapping[Trace, TraceFile]


NO_TRACES = Traces(Path(), {})


class Seeds(Struct, frozen=True):
    """Where a host's pair draws from: `shapes` is the same for all of a campaign, `tokens` of a host and pair alone."""

    shapes: str
    tokens: str


def whole(value: Any, what: str, least: int, most: int) -> int:
    """A size as an integer within bounds. Raises UnusableInput."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UnusableInput(f"{what}={value} can't be used; give a whole number from {least} to {most}.")
    return value


def number(value: Any, what: str, least: float, most: float) -> float:
    """A number above `least` (from it on where that is 0) and up to `most`. Raises UnusableInput."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise UnusableInput(f"{what}={value} can't be used; give a number from {least:g} to {most:g}.")
    return float(value)


def integers(declared: Any, what: str, least: int, most: int) -> Distribution[int]:
    """A declared size or distribution with every value a whole number within bounds. Raises UnusableInput."""
    if not isinstance(declared, Fixed | Uniform | LogNormal | Choice):
        return Fixed(whole(declared, what, least, most))
    drawn: Distribution[int] = _of_type(declared, IntegersDrawn, what)
    for name, value in _values(drawn):
        whole(value, f"{what}.{name}", least, most)
    _refuse_contradiction(drawn, what, 0.5)
    return drawn


def numbers(declared: Any, what: str, least: float, most: float) -> Distribution[float]:
    """The same for numbers that need not be whole."""
    if not isinstance(declared, Fixed | Uniform | LogNormal | Choice):
        return Fixed(number(declared, what, least, most))
    drawn: Distribution[float] = _of_type(declared, NumbersDrawn, what)
    for name, value in _values(drawn):
        number(value, f"{what}.{name}", least, most)
    _refuse_contradiction(drawn, what, 0.0)
    return drawn


def _of_type(declared: Any, kind: Any, what: str) -> Any:
    try:
        return msgspec.convert(msgspec.to_builtins(declared), type=kind)
    except msgspec.ValidationError as error:
        raise UnusableInput(f"{what} can't be used: {error}; see playbooks/protocols/README.md.") from None


def _values(drawn: Any) -> list[tuple[str, Any]]:
    match drawn:
        case Choice(values=values):
            return [("values", value) for value in values]
        case LogNormal() | Uniform():
            return [("least", drawn.least), ("most", drawn.most)]
        case _:
            return [("value", drawn.value)]


def _refuse_contradiction(drawn: Any, what: str, rounding: float) -> None:
    """Raise UnusableInput for a distribution that draws nothing. `rounding`: by how much draws are rounded."""
    match drawn:
        case Uniform(least=least, most=most) | LogNormal(least=least, most=most) if least > most:
            raise UnusableInput(f"{what} goes from {least} to {most}; give the lower bound as least.")
        case LogNormal(median=median, sigma=sigma, least=least, most=most):
            if not (0 < median < math.inf and 0 < sigma <= 10):
                raise UnusableInput(
                    f"{what} has median {median} and sigma {sigma}; give a median above 0 and a sigma above 0 up to 10."
                )
            low, high = lognormal_share(drawn, least - rounding, most + rounding)
            if high - low < LEAST_SHARE_WITHIN:
                raise UnusableInput(
                    f"{what}: nearly nothing of a lognormal distribution with median {median} and sigma {sigma} lies "
                    f"from {least} to {most}; move the bounds to the median, or it to them."
                )
        case Choice(values=values, weights=weights):
            if not values or (weights and len(weights) != len(values)):
                raise UnusableInput(
                    f"{what} chooses among {len(values)} values by {len(weights)} weights; give at least one value, "
                    f"and a weight for each or none."
                )
            if not all(0 < weight < math.inf for weight in weights):
                raise UnusableInput(f"{what} has the weights {weights}; each must be above 0.")


def refuse_impossible_workloads(protocol: Protocol) -> None:
    """Raise UnusableInput for workloads and arrivals of a resolved protocol that no run can have."""
    for name, workload in (protocol.workloads or {}).items():
        where = f"workload {name}"
        match workload:
            case Mix():
                _refuse_mix(where, workload, protocol)
            case Trace():
                refuse_trace_rule(where, workload)
            case _:
                made = _made(name, workload, Seeds("", ""), (0, 0), block_tokens=1)
                _refuse_shared_prefix(where, made)
    for phase in protocol.phases:
        arrivals_plan(phase, "")


def _refuse_mix(where: str, mix: Mix, protocol: Protocol) -> None:
    requests = whole(mix.requests, f"{where}: requests", 1, MOST_REQUESTS)
    share = whole(mix.hit_share_percent, f"{where}: hit_share_percent", 0, 100)
    hits = round(share * requests / 100)
    for name, needed in ((mix.returning, hits), (mix.fresh, requests - hits)):
        count = int(protocol.prompt_sets[name].count)
        if count < needed:
            raise UnusableInput(
                f"{where}: {share} % of {requests} requests return, so it takes {needed} prompts of {name}, which has "
                f"{count}; give {name} at least {needed}, or ask for fewer requests."
            )


def refuse_trace_rule(where: str, trace: Trace) -> None:
    """Raise UnusableInput where what is declared beside a trace's file can't be used."""
    whole(trace.requests, f"{where}: requests", 0, MOST_REQUESTS)
    number(trace.characters_per_token, f"{where}: characters_per_token", 0.1, 100)
    if isinstance(trace.max_tokens, FromAnswer):
        rule = trace.max_tokens
        least = whole(rule.least, f"{where}: max_tokens.least", 1, MOST_TOKENS)
        whole(rule.most, f"{where}: max_tokens.most", least, MOST_TOKENS)
        number(rule.characters_per_token, f"{where}: max_tokens.characters_per_token", 0.1, 100)
    elif trace.max_tokens is not None:
        whole(trace.max_tokens, f"{where}: max_tokens", 1, MOST_TOKENS)


def _refuse_shared_prefix(where: str, made: LengthsPlan | ConversationsPlan) -> None:
    """Raise UnusableInput where a prompt may be no longer than the beginning that all share."""
    if isinstance(made, LengthsPlan):
        least = min(value for _, value in _values(made.prompt_tokens))
        if made.shared_prefix_tokens >= least:
            raise UnusableInput(
                f"{where}: prompts of {least} tokens can't begin with {made.shared_prefix_tokens} shared ones; give "
                f"fewer shared_prefix_tokens, or longer prompts."
            )


def workload_plan(
    name: str,
    workload: Workload,
    seeds: Seeds,
    sets: Mapping[str, PromptPlan],
    ids: tuple[int, int],
    block_tokens: int,
    traces: Traces,
) -> WorkloadPlan:
    """The plan of a workload. `sets`: plans of the prompt sets; `ids`: lowest and highest token id."""
    match workload:
        case Mix():
            return MixPlan(
                returning=sets[workload.returning],
                fresh=sets[workload.fresh],
                hit_share_percent=int(workload.hit_share_percent),
                requests=int(workload.requests),
                seed=f"{seeds.shapes}/{name}",
            )
        case Trace():
            read = traces.files[workload]
            return TracePlan(
                name=name,
                file=read.file,
                sha256=read.sha256,
                requests=read.requests,
                seconds=read.seconds,
                characters_per_token=workload.characters_per_token,
                token_seed=f"{seeds.tokens}/{name}",
                low_id=ids[0],
                high_id=ids[1],
            )
    return _made(name, workload, seeds, ids, block_tokens)


def _made(
    name: str, declared: Lengths | Conversations, seeds: Seeds, ids: tuple[int, int], block_tokens: int
) -> LengthsPlan | ConversationsPlan:
    where = f"workload {name}"
    shared = whole(declared.shared_prefix_tokens, f"{where}: shared_prefix_tokens", 0, MOST_TOKENS)
    if isinstance(declared, Lengths):
        return LengthsPlan(
            name=name,
            requests=whole(declared.requests, f"{where}: requests", 1, MOST_REQUESTS),
            prompt_tokens=integers(declared.prompt_tokens, f"{where}: prompt_tokens", 1, MOST_TOKENS),
            output_tokens=integers(declared.output_tokens, f"{where}: output_tokens", 1, MOST_TOKENS),
            shared_prefix_tokens=shared,
            block_tokens=block_tokens,
            shape_seed=f"{seeds.shapes}/{name}",
            token_seed=f"{seeds.tokens}/{name}",
            low_id=ids[0],
            high_id=ids[1],
        )
    return ConversationsPlan(
        name=name,
        conversations=whole(declared.conversations, f"{where}: conversations", 1, MOST_REQUESTS),
        turns=integers(declared.turns, f"{where}: turns", 1, MOST_TURNS),
        question_tokens=integers(declared.question_tokens, f"{where}: question_tokens", 1, MOST_TOKENS),
        answer_tokens=integers(declared.answer_tokens, f"{where}: answer_tokens", 1, MOST_TOKENS),
        pause_seconds=numbers(declared.pause_seconds, f"{where}: pause_seconds", 0, MOST_PAUSE_SECONDS),
        shared_prefix_tokens=shared,
        shape_seed=f"{seeds.shapes}/{name}",
        token_seed=f"{seeds.tokens}/{name}",
        low_id=ids[0],
        high_id=ids[1],
    )


def arrivals_plan(phase: Phase, seed: str) -> ArrivalsPlan | None:
    """The plan of a phase's arrivals; None where the phase declares none. Raises UnusableInput."""
    where = f"phase {phase.name}: arrivals"
    match phase.arrivals:
        case Closed():
            assert isinstance(phase.concurrency, int)
            return ClosedPlan(phase.concurrency)
        case Constant():
            return ConstantPlan(_rate(phase.arrivals, where))
        case Poisson():
            return PoissonPlan(_rate(phase.arrivals, where), f"{seed}/{phase.name}")
        case Recorded(speed=speed):
            return RecordedPlan(number(speed, f"{where}.speed", 0.001, 1000))
    assert phase.arrivals is UNSET
    return None


def _rate(arrivals: Constant | Poisson, where: str) -> float:
    """Requests per second. Raises UnusableInput."""
    given = [
        (name, rate) for name in ("rate_per_second", "rate_per_minute") if (rate := getattr(arrivals, name)) is not None
    ]
    if len(given) != 1:
        raise UnusableInput(f"{where} has {len(given)} rates; give rate_per_second or rate_per_minute.")
    name, rate = given[0]
    scale = 1.0 if name == "rate_per_second" else 60.0
    return number(rate, f"{where}.{name}", 0.001, MOST_RATE_PER_SECOND * scale) / scale
