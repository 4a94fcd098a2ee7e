"""What a phase sends, without the prompts themselves: lengths, identities, salts, order and times of its requests.

The controller plans with these shapes and the host makes its requests from them, so both know the same. Everything is
drawn from the plan's seeds by `random.Random(text).random()` alone, which Python keeps the same between releases, and
handed out one at a time: nothing here grows with the number of requests.
"""

import bisect
import hashlib
import itertools
import math
import random
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import NormalDist

from msgspec import Struct
from msgspec.structs import replace

from kvtrial.record.plan import (
    ClosedPlan,
    ConstantPlan,
    ConversationsPlan,
    LengthsPlan,
    MixPlan,
    PhasePlan,
    PoissonPlan,
    PromptPlan,
    RecordedPlan,
    TracePlan,
)
from kvtrial.record.protocol import Choice, Distribution, Fixed, LogNormal, Uniform
from kvtrial.record.trace import TraceLine, read_trace

STANDARD_NORMAL = NormalDist()


class RequestShape(Struct, frozen=True, kw_only=True):
    """One request without its prompt.

    Prompts of one `identity` begin with the same tokens: the shorter is the beginning of the longer. Prompts of one
    `shared` begin with the same `shared_tokens`. `estimated`: the prompt is text, so its tokens are only estimated.
    `salt` is the whole cache salt. `scheduled_seconds` (since the phase began) is None in a closed loop and for a later
    turn of a conversation, which is sent `pause_seconds` after the end of the request `after`.
    """

    key: str
    identity: str
    prompt_tokens: int
    max_tokens: int
    salt: str
    shared: str = ""
    shared_tokens: int = 0
    estimated: bool = False
    scheduled_seconds: float | None = None
    after: str | None = None
    pause_seconds: float = 0.0


class SetPrompt(Struct, frozen=True):
    """Prompt `index` of a prompt set."""

    prompts: PromptPlan
    index: int


Source = SetPrompt | TraceLine | None
"""What a request's prompt comes from; None: token ids made from its shape."""


def request_shapes(phase: PhasePlan, folder: Path | None = None) -> Iterator[RequestShape]:
    """The requests of a phase in the order in which they are sent. `folder`: where the file of a trace lies."""
    return (shape for shape, _ in planned_requests(phase, folder))


def planned_requests(phase: PhasePlan, folder: Path | None = None) -> Iterator[tuple[RequestShape, Source]]:
    """The same, each with what its prompt comes from.

    Raises UnusableInput, at the end at the latest, where a trace's file is not the one that was planned with.
    """
    requests = _requests(phase, folder)
    return _scheduled(requests, phase) if isinstance(phase.arrivals, ConstantPlan | PoissonPlan) else requests


def open_loop(phase: PhasePlan) -> bool:
    """Whether requests are sent at scheduled times, whatever the engine does."""
    return phase.arrivals is not None and not isinstance(phase.arrivals, ClosedPlan)


def concurrency_of(phase: PhasePlan) -> int | None:
    """Requests in flight in a closed loop, None in an open one."""
    if phase.arrivals is None:
        return phase.concurrency
    return phase.arrivals.concurrency if isinstance(phase.arrivals, ClosedPlan) else None


def _requests(phase: PhasePlan, folder: Path | None) -> Iterator[tuple[RequestShape, Source]]:
    match phase.workload:
        case None:
            return _prompt_set(phase)
        case MixPlan() as mix:
            return (_of_set(phase, SetPrompt(*prompt)) for prompt in mix_order(mix))
        case LengthsPlan() as lengths:
            return ((shape, None) for shape in _lengths(phase, lengths))
        case ConversationsPlan() as talks:
            return ((shape, None) for shape in _conversations(phase, talks))
        case TracePlan() as trace:
            assert folder is not None, "a trace lies beside the plan"
            return _trace(phase, trace, folder)


def _prompt_set(phase: PhasePlan) -> Iterator[tuple[RequestShape, Source]]:
    """A request's key is SET/INDEX, from the second time on SET/INDEX#N."""
    assert phase.prompts is not None
    seen: Counter[int] = Counter()
    for index in phase.indices:
        seen[index] += 1
        yield _of_set(phase, SetPrompt(phase.prompts, index), f"#{seen[index]}" if seen[index] > 1 else "")


def _of_set(phase: PhasePlan, prompt: SetPrompt, again: str = "") -> tuple[RequestShape, Source]:
    shape = RequestShape(
        key=f"{prompt.prompts.name}/{prompt.index}{again}",
        identity=f"{prompt.prompts.seed}/{prompt.index}",
        prompt_tokens=prompt.prompts.tokens,
        max_tokens=phase.max_tokens,
        salt=phase.salt,
    )
    return shape, prompt


def mix_hits(mix: MixPlan) -> int:
    """How many requests of a mix return: round(share × requests)."""
    return round(mix.hit_share_percent * mix.requests / 100)


def mix_order(mix: MixPlan) -> Iterator[tuple[PromptPlan, int]]:
    """(set, index) of each request: the returning ones as evenly spread as whole numbers allow, their place seeded."""
    hits, requests = mix_hits(mix), mix.requests
    offset = int(random.Random(mix.seed).random() * requests)
    returned = 0
    for number in range(offset, offset + requests):
        # Over any `requests` numbers in a row exactly `hits` of these differences are 1 and the others 0.
        if (number + 1) * hits // requests > number * hits // requests:
            yield mix.returning, returned
            returned += 1
        else:
            yield mix.fresh, number - offset - returned


def _lengths(phase: PhasePlan, lengths: LengthsPlan) -> Iterator[RequestShape]:
    draw = random.Random(lengths.shape_seed).random
    for number in range(lengths.requests):
        tokens = draw_integer(lengths.prompt_tokens, draw())
        tokens += lengths.block_tokens > 1 and tokens % lengths.block_tokens == 0
        yield RequestShape(
            key=f"{lengths.name}/{number}",
            identity=f"{lengths.token_seed}/{number}",
            prompt_tokens=tokens,
            max_tokens=draw_integer(lengths.output_tokens, draw()),
            salt=phase.salt,
            shared=lengths.token_seed if lengths.shared_prefix_tokens else "",
            shared_tokens=lengths.shared_prefix_tokens,
        )


def _conversations(phase: PhasePlan, talks: ConversationsPlan) -> Iterator[RequestShape]:
    """Conversation by conversation, each turn after the one before it. A request's key is NAME/CONVERSATION.TURN."""
    draw = random.Random(talks.shape_seed).random
    for number in range(talks.conversations):
        tokens, before = talks.shared_prefix_tokens, None
        for turn in range(draw_integer(talks.turns, draw())):
            tokens += draw_integer(talks.question_tokens, draw())
            answer = draw_integer(talks.answer_tokens, draw())
            pause = draw_number(talks.pause_seconds, draw())
            key = f"{talks.name}/{number}.{turn}"
            yield RequestShape(
                key=key,
                identity=f"{talks.token_seed}/{number}",
                prompt_tokens=tokens,
                max_tokens=answer,
                salt=phase.salt,
                shared=talks.token_seed if talks.shared_prefix_tokens else "",
                shared_tokens=talks.shared_prefix_tokens,
                after=before,
                pause_seconds=0.0 if before is None else pause,
            )
            tokens, before = tokens + answer, key


def _trace(phase: PhasePlan, trace: TracePlan, folder: Path) -> Iterator[tuple[RequestShape, Source]]:
    """A request's key is NAME/LINE."""
    speed = phase.arrivals.speed if isinstance(phase.arrivals, RecordedPlan) else None
    first: float | None = None
    for number, line in enumerate(read_trace(folder / trace.file, trace.sha256), start=1):
        first = line.time if first is None else first
        identity, tokens = _prompt_of(line, number, trace)
        yield (
            RequestShape(
                key=f"{trace.name}/{number}",
                identity=identity,
                prompt_tokens=tokens,
                max_tokens=line.max_tokens or 0,
                salt=trace_salt(phase.salt, line.salt),
                estimated=line.prompt is not None,
                scheduled_seconds=_since(first, line, speed) if line.after is None else None,
                after=f"{trace.name}/{line.after}" if line.after is not None else None,
                pause_seconds=line.pause_seconds,
            ),
            line,
        )


def trace_salt(own: str, recorded: str | None) -> str:
    """The cache salt of a recorded request: another one for every recorded salt and every phase's own salt.

    A recorded salt may be any text and may name a customer, so its sha256 stands for it.
    """
    return own if recorded is None else f"{own}.{hashlib.sha256(recorded.encode()).hexdigest()}"


def _prompt_of(line: TraceLine, number: int, trace: TracePlan) -> tuple[str, int]:
    """(identity, tokens) of a recorded prompt."""
    if line.prompt_tokens is not None:
        tokens = line.prompt_tokens
        content = f"{trace.token_seed}/line/{number}"
    elif line.prompt_token_ids is not None:
        tokens = len(line.prompt_token_ids)
        content = hashlib.sha256(array("Q", line.prompt_token_ids).tobytes()).hexdigest()
    else:
        text = line.prompt or ""
        tokens = math.ceil(len(text) / trace.characters_per_token)
        content = hashlib.sha256(text.encode()).hexdigest()
    return (content if line.prompt_id is None else f"{trace.token_seed}/id/{line.prompt_id}"), tokens


def _since(first: float | None, line: TraceLine, speed: float | None) -> float | None:
    return None if speed is None or first is None or line.time is None else (line.time - first) / speed


def _scheduled(
    requests: Iterator[tuple[RequestShape, Source]], phase: PhasePlan
) -> Iterator[tuple[RequestShape, Source]]:
    """The requests at drawn times; a later turn has none."""
    times = arrival_seconds(phase)
    for shape, source in requests:
        yield (shape if shape.after is not None else replace(shape, scheduled_seconds=next(times))), source


def arrival_seconds(phase: PhasePlan) -> Iterator[float]:
    """Times of constant and Poisson arrivals in seconds since the phase began, without end; the first is 0."""
    match phase.arrivals:
        case ConstantPlan(rate_per_second=rate):
            yield from (number / rate for number in itertools.count())
        case PoissonPlan(rate_per_second=rate, seed=seed):
            source = random.Random(seed)
            now = 0.0
            while True:
                yield now
                now += -math.log(1.0 - source.random()) / rate


def draw_number(distribution: Distribution[float], share: float) -> float:
    """The value below which `share` (0 ≤ share < 1) of the distribution lies."""
    match distribution:
        case Fixed(value=value):
            return value
        case Uniform(least=least, most=most):
            return least + share * (most - least)
        case Choice(values=values):
            return values[_chosen(distribution, share)]
        case LogNormal(least=least, most=most):
            return min(max(_truncated(distribution, least, most, share), least), most)


def draw_integer(distribution: Distribution[int], share: float) -> int:
    """The same for whole numbers: every number within the bounds gets the share that its unit interval has."""
    match distribution:
        case Fixed(value=value):
            return value
        case Uniform(least=least, most=most):
            return least + int(share * (most - least + 1))
        case Choice(values=values):
            return values[_chosen(distribution, share)]
        case LogNormal(least=least, most=most):
            drawn = _truncated(distribution, least - 0.5, most + 0.5, share)
            return min(max(round(drawn), least), most)


def lognormal_share(distribution: LogNormal[float] | LogNormal[int], least: float, most: float) -> tuple[float, float]:
    """Shares of the whole distribution that lie below `least` and below `most`."""
    low, high = (
        STANDARD_NORMAL.cdf(math.log(bound / distribution.median) / distribution.sigma) if bound > 0 else 0.0
        for bound in (least, most)
    )
    return low, high


def _truncated(distribution: LogNormal[float] | LogNormal[int], least: float, most: float, share: float) -> float:
    low, high = lognormal_share(distribution, least, most)
    at = min(max(low + share * (high - low), 1e-300), 1 - 1e-16)
    return distribution.median * math.exp(distribution.sigma * STANDARD_NORMAL.inv_cdf(at))


def _chosen(choice: Choice[float] | Choice[int], share: float) -> int:
    sums = list(itertools.accumulate(choice.weights or [1.0] * len(choice.values)))
    return min(bisect.bisect_right(sums, share * sums[-1]), len(choice.values) - 1)
