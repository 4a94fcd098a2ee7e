"""At how many requests in flight does preemption begin? Predicted from the blocks that requests really take. Pure.

Rules (vLLM's V1 scheduler): a request is let in when its whole prompt fits, ceil(prompt / block) blocks; from then on
it grows by one token a step and ends with ceil((prompt + answer − 1) / block) blocks, since the last token is never
computed. A running request for which no block is left makes the last of the running ones lose all of its blocks; it
waits at the head of the queue, and nobody is let in within that step.

A step computes at most --max-num-batched-tokens: a token for each that runs first, then of the prompts as much as is
left, the last of them in part.

For requests of one length this is arithmetic: floor(usable / blocks at the end) are safe, one more is not, because in
a closed loop the first requests grow in step. They do where their prompts are computed within few steps, and where it
does not matter that some of them began EARLY_STEPS_MAX steps before the others: who is early may have taken a block
more before the last is let in, or be done before the last takes its last one. Otherwise the replays say up to where the
onset may lie, and it is a range. Requests of several lengths always get one: below it no choice of them
can fill the pool, and at its upper end at the latest every replay of their own order has preempted.
"""

import itertools
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct, structs

from kvtrial.record.errors import UnusableInput
from kvtrial.record.plan import OnsetPlan

LEAST_LEVELS = 6
MOST_RATIO = 1.3
"""Between adjacent levels near the onset."""
REPLAYED_REQUESTS_MAX = 400
REPLAYED_LEVELS_MAX = 512
MOST_REQUESTS = 10**9
TOO_FEW = "too few requests"
"""In the reason of an onset that more requests would show."""
SENT_TIMES = 2
"""A replay beyond REPLAYED_REQUESTS_MAX in flight sends so many times the requests that are in flight, if there are."""
TURNAROUNDS_STEPS = (0, 2, 6)
"""Engine steps between the end of an answer and the next request's arrival."""
STAGGERS_STEPS = (0, 1, 4)
"""Engine steps between the arrivals of the first requests."""
UNSURE_TIMES = 2
"""A range whose end is not sure goes to so many times its beginning: real servers preempted from 1 to 1.6 times on."""
EARLY_STEPS_MAX = 4
"""Of requests sent at once some may begin up to so many steps before the others, whom a busy client sends later."""
LEAST_BATCHED_TOKENS = 2048
"""What vLLM takes for --max-num-batched-tokens at least, where a launch leaves it out."""
REPLAYED_TOKENS_MAX = 200_000
"""Answer tokens of a replay of one length, beyond which each request is sent once."""


class Length(Struct, frozen=True):
    """Tokens of a request's prompt and of the answer that it really gets."""

    prompt_tokens: int
    answer_tokens: int


def blocks_at_admission(length: Length, block_tokens: int) -> int:
    """Blocks that must be free for a request to be let in."""
    return math.ceil(length.prompt_tokens / block_tokens)


def blocks_at_end(length: Length, block_tokens: int) -> int:
    """Blocks that a request holds when its last token is sampled."""
    return math.ceil((length.prompt_tokens + length.answer_tokens - 1) / block_tokens)


def predict_onset(
    lengths: Sequence[Length],
    usable_blocks: int,
    block_tokens: int,
    max_running: int | None = None,
    batched_tokens: int | None = None,
) -> OnsetPlan:
    """The predicted onset of `lengths`, in the order in which they are sent, over a pool of `usable_blocks`.

    `max_running`: --max-num-seqs. `batched_tokens`: --max-num-batched-tokens; None where the engine chooses it, which
    is replayed with the least that it takes, too. Raises UnusableInput where a request alone does not fit: it would be
    preempted by itself, for good.
    """
    if not lengths:
        raise UnusableInput("no request, no onset; give the ladder at least one request.")
    ends = sorted((blocks_at_end(length, block_tokens) for length in lengths), reverse=True)
    if ends[0] > usable_blocks:
        raise UnusableInput(
            f"a request takes {ends[0]} blocks of {block_tokens} tokens at its end, the KV cache has {usable_blocks}: "
            f"it can't be served at all; use shorter requests, or {ends[0] + 1} blocks or more."
        )
    safe = _surely_safe(ends, usable_blocks)
    if len(set(lengths)) == 1:
        return _of_one_length(lengths[0], len(lengths), usable_blocks, block_tokens, max_running, batched_tokens)
    return _range(lengths, safe, usable_blocks, block_tokens, max_running, batched_tokens)


def surely_safe(lengths: Sequence[Length], usable_blocks: int, block_tokens: int) -> int:
    """The most requests in flight of which any choice fits at its end; `lengths` of all that are sent, at least one."""
    ends = sorted((blocks_at_end(length, block_tokens) for length in lengths), reverse=True)
    return _surely_safe(ends, usable_blocks)


def _surely_safe(ends: Sequence[int], usable_blocks: int) -> int:
    """The most requests of which any choice fits at its end; `ends` from the largest on, the largest repeated beyond.

    In a closed loop a request is in flight once, so the n largest are the worst that n in flight can be.
    """
    held = 0
    for count, blocks in enumerate(ends):
        held += blocks
        if held > usable_blocks:
            return count
    # All fit at once: as many more as fit, if there were more of the largest.
    return len(ends) + (usable_blocks - held) // ends[0]


def _of_one_length(
    length: Length,
    requests: int,
    usable_blocks: int,
    block_tokens: int,
    max_running: int | None,
    batched_tokens: int | None,
) -> OnsetPlan:
    end, admission = blocks_at_end(length, block_tokens), blocks_at_admission(length, block_tokens)
    safe, admitted = usable_blocks // end, usable_blocks // admission
    sum_ = (
        f"{length.prompt_tokens} tokens in and {length.answer_tokens} out take {end} blocks of {block_tokens}, the KV "
        f"cache has {usable_blocks}"
    )
    if max_running is not None and max_running <= safe:
        return _never(max_running, f"{sum_}; max-num-seqs lets in {max_running}, and {safe} fit to their end")
    if admitted <= safe:
        return _never(
            safe, f"{sum_}; as many as are let in ({admitted}, {admission} blocks each) fit to their end ({safe})"
        )
    fits = f"{sum_}: {safe} fit, {safe + 1} do not"
    at_once = (safe + 1) * (length.prompt_tokens + 1) <= (batched_tokens or LEAST_BATCHED_TOKENS)
    if at_once and _whoever_is_early(length, safe + 1, usable_blocks, block_tokens):
        # One step computes all their prompts, so they grow in step.
        return OnsetPlan(kind="exact", low=safe + 1, high=safe + 1, last_safe=safe, why=fits)
    if safe >= REPLAYED_REQUESTS_MAX:
        high = min(UNSURE_TIMES * (safe + 1), max_running or UNSURE_TIMES * (safe + 1))
        why = f"{fits} if they grow in step; so many are not replayed, and it may be up to {high} and beyond"
        return OnsetPlan(kind="range", low=safe + 1, high=high, last_safe=safe, why=why, sure_end=False)
    # With more in flight than are let in somebody waits at all times, and who that is changes from run to run.
    most = min(admitted + 1, max_running or admitted + 1, safe + REPLAYED_LEVELS_MAX)
    ways = [(turnaround, 0, 0) for turnaround in TURNAROUNDS_STEPS]
    ways += [(0, count, steps) for count, steps in _splits(safe + 1)]
    first = [
        _first_preempted(
            lambda level: [length] * _replayed(requests, level, length),
            range(safe + 1, most + 1), usable_blocks, block_tokens, max_running, budget, turnaround,
            early=count, early_steps=steps,
        )
        for budget in _budgets(batched_tokens, [length.prompt_tokens] * most)
        for turnaround, count, steps in ways
    ]  # fmt: skip
    found = [level for level in first if level is not None]
    slow = _come_in(length, safe + 1, batched_tokens)
    if at_once:
        slow = f"where some begin up to {EARLY_STEPS_MAX} steps before the others, the last need not be let in, or grow"
    if not found:
        return _never(safe, f"{sum_}, which {safe + 1} would overrun; but {slow}, and no replay preempts")
    if not at_once and set(first) == {safe + 1}:
        return OnsetPlan(kind="exact", low=safe + 1, high=safe + 1, last_safe=safe, why=fits)
    # The arithmetic knows of more ways to come than are replayed.
    sure = len(found) == len(first)
    if sure:
        high = max(safe + 2, *found)
        latest = f"at {high} at the latest all replays preempted"
    else:
        # A range needs an end for its levels, and this one has none that is sure.
        high = max(most, UNSURE_TIMES * (safe + 1))
        high = min(high, max_running) if max_running else high
        latest = f"it depends on who comes first whether any is preempted, up to {high} and beyond"
    return OnsetPlan(
        kind="range",
        low=safe + 1,
        high=high,
        last_safe=safe,
        why=f"{sum_}: {safe} fit, {safe + 1} do not if they grow in step; but {slow}, so {latest}",
        sure_end=sure,
    )


EARLY_COUNTS_MAX = 8


def _splits(in_flight: int) -> list[tuple[int, int]]:
    """(how many of those in flight begin early in a replay, by how many steps): from one to all but one."""
    apart = max(1, math.ceil((in_flight - 1) / EARLY_COUNTS_MAX))
    counts = sorted({*range(1, in_flight, apart), in_flight - 1})
    return [(count, steps) for steps in range(1, EARLY_STEPS_MAX + 1) for count in counts]


def _whoever_is_early(length: Length, in_flight: int, usable_blocks: int, block_tokens: int) -> bool:
    """Whether requests sent at once preempt however many of them begin up to EARLY_STEPS_MAX steps early.

    The last is let in even if it alone is late, and the blocks do not do even if one alone is early.
    """
    steps = EARLY_STEPS_MAX
    if length.answer_tokens <= steps:
        return False
    grown = math.ceil((length.prompt_tokens + steps) / block_tokens)
    let_in = (in_flight - 1) * grown + blocks_at_admission(length, block_tokens) <= usable_blocks
    late = math.ceil((length.prompt_tokens + length.answer_tokens - 1 - steps) / block_tokens)
    return let_in and blocks_at_end(length, block_tokens) + (in_flight - 1) * late > usable_blocks


def _replayed(requests: int, level: int, length: Length) -> int:
    """How many requests of one length a replay sends: as many as the level will, if they are not too many to replay."""
    sent = min(max(requests, level), REPLAYED_REQUESTS_MAX)
    return max(level, sent if sent * length.answer_tokens <= REPLAYED_TOKENS_MAX else level)


def _come_in(length: Length, in_flight: int, batched_tokens: int | None) -> str:
    """Over how many steps the prompts of all in flight are computed, the first of them alone."""
    budget = batched_tokens or LEAST_BATCHED_TOKENS
    steps = 1 + math.ceil((in_flight - 1) * length.prompt_tokens / budget)
    unknown = "" if batched_tokens else ", the least that the engine chooses"
    return (
        f"{in_flight} prompts come in over up to {steps} steps (max-num-batched-tokens {budget}{unknown}) and an "
        f"answer has {length.answer_tokens}"
    )


def _budgets(batched_tokens: int | None, prompt_tokens: Iterable[int]) -> tuple[int | None, ...]:
    """What a step may compute in the replays: None where it holds all prompts, with a token for each that runs."""
    least = batched_tokens or LEAST_BATCHED_TOKENS
    if sum(tokens + 1 for tokens in prompt_tokens) <= least:
        return (None,)
    return (None, least) if batched_tokens is None else (least,)


def _first_preempted(
    sent: Callable[[int], Sequence[Length]],
    levels: range,
    usable_blocks: int,
    block_tokens: int,
    max_running: int | None,
    batched_tokens: int | None,
    turnaround: int,
    stagger: int = 0,
    early: int = 0,
    early_steps: int = 0,
) -> int | None:
    """The first of `levels` at which a replay of what is sent there preempts."""
    return next(
        (
            level
            for level in levels
            if replay_preemptions(
                sent(level), level, usable_blocks, block_tokens, max_running, turnaround, stagger, batched_tokens,
                early_steps, early,
            )
        ),
        None,
    )  # fmt: skip


def _range(
    lengths: Sequence[Length],
    safe: int,
    usable_blocks: int,
    block_tokens: int,
    max_running: int | None,
    batched_tokens: int | None,
) -> OnsetPlan:
    replayed = list(lengths[:REPLAYED_REQUESTS_MAX])
    most = min(len(replayed), max_running or len(replayed), safe + REPLAYED_LEVELS_MAX)
    what = f"requests of {len(set(lengths))} different lengths, {usable_blocks} blocks of {block_tokens} tokens"
    if most == REPLAYED_REQUESTS_MAX < len(lengths) and not replay_preemptions(
        replayed, most, usable_blocks, block_tokens, max_running, batched_tokens=batched_tokens
    ):
        return _beyond_replays(lengths, safe, usable_blocks, block_tokens, max_running, batched_tokens, what)
    first = [
        _first_preempted(
            lambda _: replayed, range(safe + 1, most + 1), usable_blocks, block_tokens, max_running, budget,
            turnaround, stagger,
        )
        for budget in _budgets(batched_tokens, (length.prompt_tokens for length in replayed))
        for turnaround in TURNAROUNDS_STEPS
        for stagger in STAGGERS_STEPS
    ]  # fmt: skip
    found = [level for level in first if level is not None]
    if not found and _all_at_once(lengths, usable_blocks, block_tokens, max_running):
        top = ladder_levels(OnsetPlan(kind="never", low=None, high=None, last_safe=safe, why=""), MOST_REQUESTS)[-1]
        why = (
            f"{what}; all {most} are let in at once and fit, {TOO_FEW}: set the size requests to {max(top, 2 * most)} "
            f"or more"
        )
        return OnsetPlan(kind="never", low=None, high=None, last_safe=safe, why=why)
    if not found:
        limit = f"max-num-seqs {max_running}" if max_running is not None and most == max_running else f"{most}"
        return _never(safe, f"{what}; up to {limit} in flight no replay of their order preempts")
    if len(found) < len(first):
        high = most
        why = f"some replays of their order preempt from {min(found)} in flight on, others not at {most}, the most here"
    else:
        high = max(found)
        why = f"up to {safe} in flight any of them fit, and at {high} at the latest all replays preempted"
    sure = len(found) == len(first)
    return OnsetPlan(kind="range", low=safe + 1, high=high, last_safe=safe, why=f"{what}: {why}", sure_end=sure)


def _beyond_replays(
    lengths: Sequence[Length],
    safe: int,
    usable_blocks: int,
    block_tokens: int,
    max_running: int | None,
    batched_tokens: int | None,
    what: str,
) -> OnsetPlan:
    """The onset of more requests in flight than are replayed level by level: bisected, over all that are sent."""
    most = min(len(lengths), max_running or len(lengths))

    def preempts(level: int, turnaround: int) -> bool:
        sent = lengths[: SENT_TIMES * level]
        return bool(
            replay_preemptions(sent, level, usable_blocks, block_tokens, max_running, turnaround, 0, batched_tokens)
        )

    first = [
        None
        if not preempts(most, turnaround)
        else bisect_left(range(most), True, lo=REPLAYED_REQUESTS_MAX, key=lambda level: preempts(level, turnaround))
        for turnaround in TURNAROUNDS_STEPS
    ]
    found = [level for level in first if level is not None]
    if not found:
        limit = f"max-num-seqs {max_running}" if max_running == most else f"{most}"
        return _never(safe, f"{what}; up to {limit} in flight no replay of their order preempts")
    high = max(found) if len(found) == len(first) else most
    why = (
        f"{what}: up to {safe} in flight any of them fit, with {REPLAYED_REQUESTS_MAX} a replay of the "
        f"first {REPLAYED_REQUESTS_MAX} does not preempt, and from {min(found)} on replays do"
    )
    # Between the levels that were replayed others may preempt or not.
    return OnsetPlan(kind="range", low=safe + 1, high=high, last_safe=safe, why=why, sure_end=False)


def _all_at_once(lengths: Sequence[Length], usable_blocks: int, block_tokens: int, max_running: int | None) -> bool:
    """Whether nobody queues even with all requests in flight: then more of them show what these can't."""
    admitted = sum(blocks_at_admission(length, block_tokens) for length in lengths)
    return (
        len(lengths) <= REPLAYED_REQUESTS_MAX
        and admitted <= usable_blocks
        and (max_running is None or len(lengths) < max_running)
    )


def _never(safe: int, why: str) -> OnsetPlan:
    return OnsetPlan(
        kind="never", low=None, high=None, last_safe=safe, why=f"{why}, so requests queue and none is preempted"
    )


class _Running:
    """A request in the replay: tokens known and computed of it, tokens still to be sampled."""

    __slots__ = ("blocks", "computed", "left", "tokens")

    def __init__(self, length: Length) -> None:
        self.tokens = length.prompt_tokens
        self.computed = 0
        self.left = length.answer_tokens
        self.blocks = 0


def replay_preemptions(
    lengths: Sequence[Length],
    in_flight: int,
    usable_blocks: int,
    block_tokens: int,
    max_running: int | None = None,
    turnaround_steps: int = 0,
    stagger_steps: int = 0,
    batched_tokens: int | None = None,
    early_steps: int = 0,
    early: int = 1,
) -> int:
    """Preemptions when `lengths` are sent in their order with `in_flight` at a time, by the rules above, step by step.

    `turnaround_steps` pass between an answer's end and the next arrival, `stagger_steps` between the arrivals of the
    first requests, and `early_steps` more between the first `early` of them and the others. `batched_tokens`: computed
    in a step at most; None: every prompt is computed in one step.
    """
    unsent = deque(_Running(length) for length in lengths)
    arrivals: deque[int] = deque(
        number * stagger_steps + (early_steps if number >= early else 0)
        for number in range(min(in_flight, len(unsent)))
    )
    waiting: deque[_Running] = deque()
    running: list[_Running] = []
    free, step, preemptions = usable_blocks, 0, 0
    while unsent or waiting or running:
        while arrivals and arrivals[0] <= step and unsent:
            arrivals.popleft()
            waiting.append(unsent.popleft())
        preempted, position = 0, 0
        budget = math.inf if batched_tokens is None else batched_tokens
        while position < len(running) and budget:
            request = running[position]
            computed = min(request.tokens - request.computed, budget)
            needed = math.ceil((request.computed + computed) / block_tokens) - request.blocks
            if needed <= free:
                free -= needed
                request.blocks += needed
                request.computed += int(computed)
                budget -= computed
                position += 1
                continue
            victim = running.pop()
            free += victim.blocks
            victim.blocks = victim.computed = 0
            waiting.appendleft(victim)
            preempted += 1
        preemptions += preempted
        while not preempted and waiting and budget and (max_running is None or len(running) < max_running):
            # The whole prompt must fit, though a part of it is computed and takes its blocks at first.
            if math.ceil(waiting[0].tokens / block_tokens) > free:
                break
            admitted = waiting.popleft()
            admitted.computed = int(min(admitted.tokens, budget))
            budget -= admitted.computed
            admitted.blocks = math.ceil(admitted.computed / block_tokens)
            free -= admitted.blocks
            running.append(admitted)
        step += 1
        going = []
        for request in running:
            if request.computed == request.tokens:
                request.tokens += 1
                request.left -= 1
            if request.left > 0:
                going.append(request)
            else:
                free += request.blocks
                arrivals.append(step + turnaround_steps)
        running = going
    return preemptions


def _next(level: int) -> int:
    return max(level + 1, math.floor(level * MOST_RATIO))


def ladder_levels(onset: OnsetPlan, requests: int) -> list[int]:
    """Concurrencies around a predicted onset: 1, the last safe one, the onset, one below and two above, at least six.

    From the level below to the last one none is further apart than 1.3, as far as whole numbers allow (3 and 4 are
    neighbours). For a mix that never preempts the levels surround what fits to its end. Raises UnusableInput where
    there are fewer requests than the highest level has in flight.
    """
    safe = max(1, onset.last_safe)
    below = max(1, min(safe - 1, math.ceil(safe / MOST_RATIO)))
    levels = {1, below, safe, math.isqrt(below)}
    above = onset.low if onset.low is not None else safe + 1
    levels.add(above)
    while above < (onset.high or above):
        above = min(_next(above), onset.high or above)
        levels.add(above)
    for _ in range(2):
        above = _next(above)
        levels.add(above)
    while len(levels) < LEAST_LEVELS:
        within = [level for level in range(2, safe) if level not in levels]
        above = above if within else _next(above)
        levels.add(within[-1] if within else above)
    if max(levels) > requests:
        raise UnusableInput(
            f"the ladder goes to {max(levels)} requests in flight and sends {requests} at each level; set the size "
            f"requests to {max(levels)} or more."
        )
    return sorted(levels)


def refuse_ladder(levels: Sequence[int], onset: OnsetPlan) -> None:
    """Raise UnusableInput, with a ladder that would do, for levels that can't show where preemption begins."""
    problem = _ladder_problem(sorted(levels), onset)
    if problem:
        wanted = ladder_levels(onset, MOST_REQUESTS)
        raise UnusableInput(
            f"the ladder {sorted(levels)} {problem}; leave kvtrial_ladder out, or give for example {wanted}."
        )


def _ladder_problem(levels: Sequence[int], onset: OnsetPlan) -> str | None:
    if len(set(levels)) < LEAST_LEVELS or len(set(levels)) != len(levels) or levels[0] < 1:
        return f"has no {LEAST_LEVELS} different levels from 1 on"
    if levels[0] != 1:
        return "lacks 1, the single request that passes where a stream does not"
    if onset.low is None or onset.high is None:
        return None
    wanted = {onset.last_safe, onset.low} if onset.kind == "exact" else {onset.last_safe}
    if lacking := sorted(wanted - set(levels) - {0}):
        return f"lacks {lacking[0]}: the last safe level is {onset.last_safe}, the onset {_words(onset)}"
    if levels[-1] < onset.high:
        return f"ends below the onset {_words(onset)}"
    for lower, upper in itertools.pairwise(levels):
        near = lower <= onset.high and upper >= onset.last_safe and lower >= onset.last_safe / MOST_RATIO
        if near and upper > _next(lower):
            return f"steps from {lower} to {upper} near the onset ({_words(onset)}), by more than {MOST_RATIO}"
    return None


def _words(onset: OnsetPlan) -> str:
    return str(onset.low) if onset.low == onset.high else f"{onset.low} to {onset.high}"


def onset_of_own_pool(control: OnsetPlan, of_most: OnsetPlan | None, why: str) -> OnsetPlan:
    """The onset of an engine that sizes its KV cache itself, at least as large as the control's.

    `of_most`: the onset over the largest one that it could have, None where that isn't known. What is let in grows with
    the KV cache as what fits to its end does, so requests that only queue in the control do so here.
    """
    if control.low is None or control.high is None:
        return structs.replace(control, why=f"{why}; of the control: {control.why}")
    known = None if of_most is None else of_most.high
    sure = known is not None and of_most is not None and of_most.sure_end
    high = max(control.high, known or UNSURE_TIMES * control.low)
    return OnsetPlan("range", control.low, high, control.last_safe, why + ("" if sure else ", or none"), sure)


def onset_words(onset: OnsetPlan) -> str:
    """The prediction in a sentence without its full stop."""
    if onset.kind == "never":
        return f"no preemption is predicted at any level: {onset.why}"
    return f"preemption is predicted from {_words(onset)} requests in flight on: {onset.why}"
