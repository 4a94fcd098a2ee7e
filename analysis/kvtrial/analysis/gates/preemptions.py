"""The gate on counts of preemptions: they must agree with what the client and the engine's other books show."""

from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct

from kvtrial.analysis.gates.context import Decision, Disturbed, GateContext, gate, some, where
from kvtrial.analysis.laddering import ALL_LEVELS, lengths_of_facts
from kvtrial.analysis.levels import engines_of, level_of, phases_of, risen, waited_alone
from kvtrial.analysis.onset import surely_safe
from kvtrial.record.errors import UnusableInput
from kvtrial.record.launch import async_scheduling, parse_vllm_args
from kvtrial.record.plan import RESERVED_BLOCKS
from kvtrial.record.pressure import WAIT_MEDIANS
from kvtrial.record.record import PhaseRecord, RunRecord

NO_WAIT = 2.0
"""A preempted request gets no token in the step that preempts it, so a gap of its is twice a usual one at least."""


class Added(Struct, frozen=True, forbid_unknown_fields=True):
    """`later_release`: the recorded protocol does not list this gate; it is older."""

    later_release: bool = False


class _Level(Struct, frozen=True):
    """A level's count of preemptions beside what else is known of them; None where that isn't.

    `line`: the most that the time line read. `by_request`: the sum over finished requests. `waits`: how often requests
    waited while others went on. `most`: gaps between tokens in which others got one, where each holds one preemption at
    most. `overfull`: whether those that may run at once can need more than the KV cache has.
    """

    run: RunRecord
    phase: PhaseRecord
    counted: int
    line: int | None
    by_request: int | None
    waits: int | None
    most: int | None
    overfull: bool | None


@gate("preemptions_add_up", Added)
def preemptions_add_up(context: GateContext, parameters: Added) -> Decision:
    """In each level the count of preemptions agrees with the engine's other books and with the client's clock.

    The time line never shows more of them, nor falls; where the engine exports how often each request was preempted,
    those add up to it. A preempted request gets no token until it is computed again while the others go on: where more
    run than surely fit, each such wait above ten median gaps takes a preemption of its own. As many more as there are
    in a level where all fit may come from elsewhere: then nothing is decided. And where something was preempted,
    somebody waited: a count without any wait, or in a level whose requests all fit and none of which waited while
    others went on, is none. Nor can there be more than gaps in which others got a token, where a request is computed
    again in one step.
    """
    levels: list[_Level] = []
    for run in context.runs:
        for phase in phases_of(run, ALL_LEVELS):
            counted = risen([phase], "preemptions")
            if counted is None:
                return None, f"{where(run, phase)}: preemptions are not exported"
            levels.append(_level(run, phase, round(counted)))
    if not levels:
        return None, "no level of the ladder"
    problems = [f"{where(level.run, level.phase)}: {problem}" for level in levels if (problem := _contradiction(level))]
    if problems:
        return False, some(problems)
    elsewhere = max(
        (level.waits - level.counted for level in levels if level.waits is not None and level.overfull is False),
        default=0,
    )
    low = [level for level in levels if _waits_beyond(level)]
    if low:
        sentences = some(f"{where(level.run, level.phase)}: {_too_low(level)}" for level in low)
        if max(map(_waits_beyond, low)) > elsewhere:
            return False, sentences
        raise Disturbed(
            f"{sentences}; that need be no preemptions: where all that runs fits, such waits come up to {elsewhere} "
            f"times in a level here. Something else holds up single requests; run it again on a quieter machine"
        )
    return True, _agreement(levels) + ("; the plan is older than this gate" if parameters.later_release else "")


def _level(run: RunRecord, phase: PhaseRecord, counted: int) -> _Level:
    seen = [point.preemptions for point in phase.pressure if point.preemptions is not None]
    by_request = risen([phase], "request_preemptions_sum")
    # A request that the engine did not finish is in the count and not in that sum.
    finished = risen([phase], "request_preemptions_count")
    return _Level(
        run=run,
        phase=phase,
        counted=counted,
        line=round(max(seen)) if seen else None,
        by_request=None if by_request is None or finished != phase.sent else round(by_request),
        waits=_waits(run, phase),
        most=_most(run, phase),
        overfull=_overfull(run, phase),
    )


def _waits(run: RunRecord, phase: PhaseRecord) -> int | None:
    """How often requests waited alone; None where the record does not say, or of several engines.

    Of several engines the others that went on may have been another one's. Records that list their stalls but not
    their waits have those that were stalls.
    """
    if phase.ledger is None or engines_of(run) > 1:
        return None
    if phase.ledger.waits is not None or phase.ledger.stalls_at is None:
        return phase.ledger.waits
    return sum(waited_alone(stall, phase.ledger) for stall in phase.ledger.stalls_at)


def _most(run: RunRecord, phase: PhaseRecord) -> int | None:
    """How many preemptions a level can have had by the client; None where a gap may hold several, or isn't known.

    A request that the engine computes again in several steps may be preempted between two of them.
    """
    ledger = phase.ledger
    if ledger is None or ledger.passed_by is None or engines_of(run) > 1 or ledger.counted < phase.sent:
        return None
    config = run.resolved.config if run.resolved else {}
    step = config.get("vllm_config.scheduler_config.max_num_batched_tokens")
    chunk = config.get("vllm_config.scheduler_config.long_prefill_token_threshold", 0)
    lengths, running = lengths_of_facts([phase]), _running(run, phase)
    if not isinstance(step, int) or chunk != 0 or running is None or len(lengths) < phase.sent:
        return None
    longest = max(length.prompt_tokens + length.answer_tokens for length in lengths)
    return ledger.passed_by if running * longest <= step else None


def _overfull(run: RunRecord, phase: PhaseRecord) -> bool | None:
    """Whether those of a level that may run at once can need more blocks than an engine has; None: not known."""
    blocks, size = (
        (run.resolved.cache_config.get(name, "") if run.resolved else "") for name in ("num_gpu_blocks", "block_size")
    )
    running = _running(run, phase)
    if running is None or not (blocks.isdigit() and size.isdigit()):
        return None
    # A scheduler a step ahead of the tokens takes a slot more for answers that end by their stop.
    ahead = run.evidence == "gpu" and async_scheduling(parse_vllm_args(run.launch.argv), run.vllm_version_pinned)
    lengths = lengths_of_facts([phase], ahead)
    if len(lengths) < phase.sent:
        return None
    return running > surely_safe(lengths, int(blocks) - RESERVED_BLOCKS, int(size))


def _running(run: RunRecord, phase: PhaseRecord) -> int | None:
    """How many requests of a level an engine may run at once; None where its launch can't be read."""
    try:
        most = parse_vllm_args(run.launch.argv).size("max-num-seqs")
    except UnusableInput:
        return None
    running = -(-level_of(phase) // engines_of(run))
    return running if most is None else min(running, most)


def _waits_beyond(level: _Level) -> int:
    """By how much a level's requests waited more often than was counted, where more may run than surely fit."""
    return 0 if level.waits is None or level.overfull is False else max(0, level.waits - level.counted)


def _counted(level: _Level) -> str:
    return f"{level.counted} preemption{'' if level.counted == 1 else 's'} counted"


def _too_low(level: _Level) -> str:
    ledger = level.phase.ledger
    above = (
        0
        if ledger is None
        else ledger.stall_above_ns
        if ledger.waits is None
        else WAIT_MEDIANS * ledger.run_median_gap_ns
    )
    return (
        f"{_counted(level)}, and {level.waits} times a request got no token for over {above / 1e6:.0f} ms while others "
        f"went on"
    )


def _contradiction(level: _Level) -> str:
    """What contradicts a level's count, as a sentence's end; empty where nothing does."""
    ledger = level.phase.ledger
    counted = _counted(level)
    points = [point.preemptions for point in level.phase.pressure if point.preemptions is not None]
    if any(after < before for before, after in pairwise(points)):
        return f"{counted}, and the time line's count falls while the level runs"
    if level.line is not None and level.line > level.counted:
        return f"{counted}, and the time line read {level.line} while the level ran"
    if level.by_request is not None and level.by_request != level.counted:
        return f"{counted}, and the engine's requests were preempted {level.by_request} times in all"
    certain = level.overfull and _of_one_length(level.phase) and level.waits is None
    if not level.counted and certain and ledger and ledger.stalled_requests:
        return (
            f"{counted}, and {ledger.stalled_requests} requests stalled where {level_of(level.phase)} in flight can't "
            f"all fit to their end"
        )
    if level.counted and level.overfull is False and ledger is not None:
        nobody = "no request stalled" if not ledger.stalls else "no request waited while others went on"
        if level.waits == 0 or (level.waits is None and not ledger.stalls):
            return f"{counted}, and {nobody}, nor do those that run ever need more than the KV cache has"
    if level.most is not None and level.counted > level.most:
        return f"{counted}, and only {level.most} times others got a token in a gap of a request's; each takes one"
    if level.counted and ledger is not None and not ledger.stalls:
        longest = max((fact.longest_gap_seconds or 0.0 for fact in level.phase.requests), default=0.0)
        if len(level.phase.requests) == level.phase.sent and longest * 1e9 < NO_WAIT * ledger.run_median_gap_ns:
            return f"{counted}, and no request waited for a token longer than {1e3 * longest:.1f} ms"
    return ""


def _of_one_length(phase: PhaseRecord) -> bool:
    return len({(fact.prompt_tokens, fact.output_tokens) for fact in phase.requests}) == 1


def _agreement(levels: Sequence[_Level]) -> str:
    counted = sum(level.counted for level in levels)
    text = f"{counted} preemptions counted in {len(levels)} levels"
    if all(level.line is not None for level in levels):
        text += ", nowhere more in the time line"
    told = [level for level in levels if level.by_request is not None]
    text += (
        f"; as many by the requests that were preempted ({len(told)} levels)"
        if told
        else "; how often each request was preempted is not exported"
    )
    dated = [level for level in levels if level.waits is not None]
    if not dated:
        return (
            f"{text}; the client's stalls are not dated, or of several engines, so that a count which is too low "
            f"shows only where it is 0"
        )
    waits = sum(level.waits or 0 for level in dated if level.overfull is not False)
    mine = sum(level.counted for level in dated)
    text += (
        f"; by the client {waits} times a request waited while others went on, in no level more often than counted "
        f"({len(dated)} levels, {mine} counted)"
    )
    blind = sum(max(0, level.counted - (level.waits or 0)) for level in dated)
    if blind:
        text += (
            f"; {blind} counted ones were shorter than ten median gaps, or several of one wait: of these a loss would "
            f"not show"
        )
    return text + _bounded_above(levels)


def _bounded_above(levels: Sequence[_Level]) -> str:
    """Up to where a count that is too high would not show, by the client."""
    preempting = [level for level in levels if level.counted]
    bounded = [level for level in preempting if level.most is not None]
    if not preempting:
        return ""
    if not bounded:
        return "; by the client no level's count is bounded above"
    loosest = max(bounded, key=lambda level: (level.most or 0) - level.counted)
    text = (
        f"; a count that is too high would not show up to {loosest.most} where {loosest.counted} were counted "
        f"({where(loosest.run, loosest.phase)})"
    )
    return text + (
        "" if len(bounded) == len(preempting) else f", nor in {len(preempting) - len(bounded)} levels at all"
    )
