"""Gates on a ladder: every level began empty, the server's times add up, and the pool is the one that was planned."""

from collections.abc import Mapping, Sequence
from statistics import median

from msgspec import Struct

from kvtrial.analysis.gates.context import Decision, Disturbed, GateContext, NoParameters, gate, some, where
from kvtrial.analysis.laddering import ALL_LEVELS
from kvtrial.analysis.ledger import server_ledger
from kvtrial.analysis.levels import phases_of, risen
from kvtrial.record.launch import engine_gpus
from kvtrial.record.plan import RESERVED_BLOCKS
from kvtrial.record.record import PhaseRecord, RunRecord

OUT_OF_LINE_STEPS = 0.5
"""By so much of a step that computes prompts a run's way may be longer than the others' of its level.

Chosen 2026-11-30 after the ladders in docs/results were recorded: their longest lie at 0.37 (an H200), 0.30 (two GPUs),
0.33 and 0.31 (two CPU cores); three further CPU ladders that had no part in the choice at 0.30, 0.37 and 0.35.
"""
LEAST_BESIDE = 6
"""Runs of a level from which on it can be said what is usual."""


@gate("levels_reset", NoParameters)
def levels_reset(context: GateContext, parameters: NoParameters) -> Decision:
    """Each level began with empty caches: the engine said so, nothing ran or waited, and no prompt was found again.

    All levels send the same prompts in one salt. Where these are more than the KV cache holds, they would find nothing
    of themselves in any case; so the first of them is sent just before the reset, and would be found for certain.
    """
    problems, looked, queried = [], 0, 0.0
    markers: list[float | None] = []
    for run in context.runs:
        levels = phases_of(run, ALL_LEVELS)
        if not levels:
            return None, f"{where(run)} has no level of the ladder"
        for phase in levels:
            queries = risen([phase], "prefix_cache_queries_tokens")
            hits = risen([phase], "prefix_cache_hits_tokens")
            if hits is None or queries is None:
                return None, f"{where(run, phase)}: prefix cache hits are not exported"
            looked += 1
            queried += queries
            markers.append(phase.reset.marker_hit_tokens if phase.reset else None)
            problems += [f"{where(run, phase)}: {text}" for text in _not_empty(run, phase, hits)]
    if problems:
        return False, some(problems)
    return True, (
        f"caches emptied before {looked} levels: the engine said success, nothing ran or waited, and of "
        f"{queried:,.0f} prompt tokens looked up 0 were found, though every level sends the same prompts in one salt; "
        f"{_marked(markers)}"
    )


def _marked(markers: Sequence[float | None]) -> str:
    """What the prompts show that were sent just before the resets."""
    seen = [found for found in markers if found is not None]
    if len(seen) < len(markers):
        return f"before {len(markers) - len(seen)} of them no prompt was sent that would have been found"
    if not any(seen):
        return "nor is one found that was just sent, so this engine keeps nothing that could be found"
    return f"of each level's first prompt at least {min(seen):,.0f} tokens were found just before the reset"


def _not_empty(run: RunRecord, phase: PhaseRecord, hits: float) -> list[str]:
    assert phase.reset is not None
    problems = []
    if not phase.reset.succeeded:
        problems.append(f"the reset did not succeed in {phase.reset.tries} tries ({phase.reset.detail})")
    if run.launch.connector is not None and not phase.reset.external:
        problems.append("the tier was not emptied; that needs vLLM 0.22 or newer")
    if hits:
        problems.append(f"{hits:,.0f} prompt tokens came from the engine's own prefix cache")
    external = risen([phase], "external_prefix_cache_hits_tokens")
    if external:
        problems.append(f"{external:,.0f} prompt tokens came from the tier")
    for role in ("requests_running", "requests_waiting"):
        left = phase.before.get(role)
        if left:
            problems.append(f"{role.replace('_', ' ')} {left:.0f} when the level began")
    return problems


class Tolerance(Struct, frozen=True, forbid_unknown_fields=True):
    """How far queue + prefill + decode may lie from end-to-end, percent of end-to-end, beside what is explained.

    `way_max_seconds` and `outside_core_max_seconds`: bounds that earlier releases declared. They are read, so that what
    was recorded can be judged, and loosen nothing any more.
    """

    tolerance_percent: float = 2.0
    way_max_seconds: float | None = None
    outside_core_max_seconds: float | None = None


class _Books(Struct, frozen=True):
    """The engine's times of a level, seconds a request. `way`: into the engine core and of a first token out of it.

    `next_first_token`: the client's, from a request's send to the next first token that anybody got; None where the
    record does not have it.
    """

    run: RunRecord
    phase: PhaseRecord
    e2e: float
    difference: float
    way: float
    prefill: float
    next_first_token: float | None


@gate("server_time_adds_up", Tolerance)
def server_time_adds_up(context: GateContext, parameters: Tolerance) -> Decision:
    """In each level the engine's own queue, prefill and decode times add up to its end-to-end times.

    With the way into the engine core and out of it, which another counter measures, within the tolerance everywhere;
    without it where one request is in flight. Where others are, a request that comes while a step runs is not
    in the engine's queue before that step ends: no part counts this wait, end-to-end and the time to first token do. It
    may take one step that computes prompts. That is no longer than until the next first token that any request got, by
    the client's clock, and no longer than the prefill of those in it beside the way of a request alone, by the
    engine's: the lesser of both is explained. What is left must be within the tolerance, the times to first token must
    show the same, and in no arm may the way be longer than in the control by more than the tolerance and what its
    prefill is longer. That bounds what all runs of a level may lose. What one run loses is held against the others of
    its level: beside its prefill its way may be longer than theirs by half a step. A run beyond that may have been
    disturbed as well; only where half of an arm's runs are is it a fault.
    """
    books: list[_Books] = []
    for run in context.runs:
        for phase in phases_of(run, ALL_LEVELS):
            own = _books(run, phase)
            if own is None:
                return None, f"{where(run, phase)}: queue, prefill, decode, first token or end-to-end are not exported"
            books.append(own)
    if not books:
        return None, "no level of the ladder"
    allowed = parameters.tolerance_percent / 100
    alone = {id(own.run): own.way for own in books if own.phase.concurrency == 1}
    problems = [
        f"{where(own.run, own.phase)}: {problem}"
        for own in books
        if (problem := _unexplained(own, allowed, alone.get(id(own.run), 0.0)))
    ]
    problems += _arms_apart(books, context.protocol.control, allowed)
    beside = _beside_others(context, books)
    out_of_line = [own for own in books if id(own) in beside and beside[id(own)][0] > beside[id(own)][1]]
    said = [f"{where(own.run, own.phase)}: {_out_of_line(own, *beside[id(own)])}" for own in out_of_line]
    often = [
        sentence
        for own, sentence in zip(out_of_line, said, strict=True)
        if _in_half_of_its_runs(own, out_of_line, books)
    ]
    if problems or often:
        return False, some(problems + often)
    if said:
        raise Disturbed(
            f"{some(said)}. Either these runs' books lost time or something else kept the API server of theirs from "
            f"its work; nobody can tell the two apart, so run it again"
        )
    text = _adds_up(books, allowed, alone)
    rooms = [_room(own, allowed, alone.get(id(own.run), 0.0)) for own in books]
    in_one = [
        min(room, beside[id(own)][1] - beside[id(own)][0]) if id(own) in beside else room
        for own, room in zip(books, rooms, strict=True)
    ]
    text += (
        f"; time that queue or prefill lost would look the same up to {_most(in_one, books)} where one run loses it, "
        f"and {_most(rooms, books)} where all runs of the level do"
    )
    return True, text + _earlier(parameters)


def _adds_up(books: Sequence[_Books], allowed: float, alone: Mapping[int, float]) -> str:
    """What adds up to what: first with all that is measured, then what is allowed of the part that is in no queue."""

    def beyond(own: _Books) -> float:
        return abs(own.difference - own.way) / own.e2e

    worst = max(books, key=beyond)
    text = (
        f"queue + prefill + decode + way against end-to-end differ by at most {100 * beyond(worst):.2f} % in "
        f"{len(books)} levels (allowed {100 * allowed:g} %), the way being what of the times to first token is in "
        f"neither queue nor prefill"
    )
    single = [own for own in books if own.phase.concurrency == 1]
    others = [own for own in books if own.phase.concurrency != 1]
    if single:
        own = max(single, key=lambda own: abs(own.difference) / own.e2e)
        text += (
            f"; without the way by at most {_percent(own.difference, own)} with one in flight (allowed "
            f"{100 * allowed:g} %)"
        )
    if others:
        own = max(others, key=lambda own: abs(own.difference) / own.e2e)
        step = _step_under_way(own, alone.get(id(own.run), 0.0))
        text += (
            f"; without it by at most {_percent(own.difference, own)} with more, {1e3 * own.difference:.1f} ms of a "
            f"request, where the step under way when one came takes up to {1e3 * step:.1f} ms (allowed "
            f"{100 * allowed:g} % beside that)"
        )
    return text


def _books(run: RunRecord, phase: PhaseRecord) -> _Books | None:
    ledger = server_ledger(phase)
    if ledger is None or not phase.finished or ledger.difference_share is None or ledger.outside_core_share is None:
        return None
    e2e = ledger.e2e_seconds / phase.finished
    return _Books(
        run=run,
        phase=phase,
        e2e=e2e,
        difference=ledger.difference_share * e2e,
        way=ledger.outside_core_share * e2e,
        prefill=ledger.prefill_seconds / phase.finished,
        next_first_token=None
        if phase.ledger is None or phase.ledger.next_first_token_ns is None or not phase.ledger.counted
        else phase.ledger.next_first_token_ns / 1e9 / phase.ledger.counted,
    )


def _step_under_way(own: _Books, alone: float) -> float:
    """What a request may spend before the engine's queue and after its last token, others being in flight."""
    if own.phase.concurrency == 1:
        return 0.0
    by_the_engine = max(0.0, alone) + own.prefill
    return by_the_engine if own.next_first_token is None else min(by_the_engine, own.next_first_token)


def _room(own: _Books, allowed: float, alone: float) -> float:
    """How much more a request could have lost before the books would be called wrong."""
    return _step_under_way(own, alone) + allowed * own.e2e - own.difference


def _unexplained(own: _Books, allowed: float, alone: float) -> str:
    """What is wrong with a level's books, as a sentence's end; empty where nothing is."""
    apart = f"queue + prefill + decode differ from end-to-end by {_percent(own.difference, own)}"
    if abs(own.difference - own.way) > allowed * own.e2e:
        return f"{apart}, and the times to first token show {_percent(own.way, own)} of it"
    if own.difference < -allowed * own.e2e:
        return f"{apart}: they are longer than the whole"
    if _room(own, allowed, alone) >= 0:
        return ""
    if own.phase.concurrency == 1:
        return (
            f"{apart}, {1e3 * own.difference:.1f} ms of a request with none beside it, which nothing explains; longer "
            f"answers make it a smaller share"
        )
    return (
        f"{apart}, {1e3 * own.difference:.1f} ms a request; the step under way when it came explains "
        f"{1e3 * _step_under_way(own, alone):.1f} ms"
    )


def _arms_apart(books: Sequence[_Books], control: str, allowed: float) -> list[str]:
    """Arms whose way is longer than the control's, in the median over pairs, by more than their prefill explains."""
    at = {(own.run.arm, own.run.pair, own.phase.concurrency): own for own in books}
    problems = []
    for arm, level in sorted({(own.run.arm, own.phase.concurrency or 0) for own in books if own.run.arm != control}):
        both = [
            (own, at[control, pair, level])
            for (name, pair, concurrency), own in at.items()
            if (name, concurrency) == (arm, level) and (control, pair, level) in at
        ]
        if not both:
            continue
        way = median((own.way - theirs.way) / theirs.e2e for own, theirs in both)
        prefill = median((own.prefill - theirs.prefill) / theirs.e2e for own, theirs in both)
        if way > allowed + max(0.0, prefill):
            problems.append(
                f"arm {arm} at {level} in flight: on the way into the engine core and out of it requests spend "
                f"{100 * way:.2f} % of {control}'s end-to-end more than in {control} (median of {len(both)} pairs), "
                f"and their prefill is {100 * prefill:+.2f} %"
            )
    return problems


def _beside_others(context: GateContext, books: Sequence[_Books]) -> dict[int, tuple[float, float]]:
    """By how much a run's way is longer than usual at its level, for its prefill, and how much is allowed; seconds.

    The others are the runs of all arms that do the same work on as many GPUs; an arm of other work stands by itself.
    """
    groups: dict[tuple[object, ...], list[_Books]] = {}
    for own in books:
        arm = context.protocol.arms[own.run.arm]
        alike = "prompt" not in arm.may_differ and not arm.model
        work = (engine_gpus(own.run.launch.argv), None if alike else own.run.arm)
        if own.phase.concurrency != 1 and own.prefill > 0:
            groups.setdefault((own.phase.concurrency, *work), []).append(own)
    found: dict[int, tuple[float, float]] = {}
    for group in groups.values():
        if len(group) < LEAST_BESIDE:
            continue
        share = median(own.way / own.prefill for own in group)
        left = [own.way - share * own.prefill for own in group]
        usual, step = median(left), median(own.prefill for own in group)
        found |= {id(own): (beyond - usual, OUT_OF_LINE_STEPS * step) for own, beyond in zip(group, left, strict=True)}
    return found


def _out_of_line(own: _Books, left: float, most: float) -> str:
    return (
        f"requests spend {1e3 * left:.1f} ms more on the way into the engine core and out of it than those of the "
        f"other runs at {own.phase.concurrency} in flight beside their prefill; allowed is half of a step that "
        f"computes prompts, {1e3 * most:.1f} ms"
    )


def _in_half_of_its_runs(own: _Books, found: Sequence[_Books], books: Sequence[_Books]) -> bool:
    """Whether half of an arm's runs or more are out of line at a level: so many of one arm no disturbance picks."""
    level = own.run.arm, own.phase.name
    alike, all_runs = (sum((each.run.arm, each.phase.name) == level for each in group) for group in (found, books))
    return 2 * alike >= all_runs


def _most(seconds: Sequence[float], books: Sequence[_Books]) -> str:
    """The largest of some times of the books, in words."""
    most, own = max(zip(seconds, books, strict=True), key=lambda pair: pair[0] / pair[1].e2e)
    return f"{1e3 * most:.0f} ms a request ({_percent(most, own)}, at {own.phase.concurrency} in flight)"


def _percent(seconds: float, own: _Books) -> str:
    return f"{100 * seconds / own.e2e:.2f} %"


def _earlier(parameters: Tolerance) -> str:
    """That bounds of an earlier release stand in a recorded protocol and are not used."""
    names = [name for name in ("way_max_seconds", "outside_core_max_seconds") if getattr(parameters, name) is not None]
    return f"; {' and '.join(names)} of an earlier release: read, not used" if names else ""


@gate("capacity_as_planned", NoParameters)
def capacity_as_planned(context: GateContext, parameters: NoParameters) -> Decision:
    """Every arm's KV cache has the blocks that its onset was predicted from.

    An arm that sizes its own has none planned. Without a plan the control's alone are known.
    """
    held, unplanned = [], []
    for arm in context.arms():
        runs = context.of_arm(arm)
        planned = _planned(context, runs[0])
        if planned is None:
            unplanned.append(arm)
            continue
        for run in runs:
            found = _pool_of(run)
            if found is None:
                return None, f"{where(run)}: the engine does not export its number of blocks"
            if found != planned:
                return False, (
                    f"{where(run)} has {found[0]} usable blocks of {found[1]} tokens, planned were {planned[0]} of "
                    f"{planned[1]}; the predicted onset is another one's"
                )
        held.append((arm, *planned))
    if not held or held[0][0] != context.protocol.control:
        return None, "no completed run of the control"
    (control, usable, tokens), others = held[0], held[1:]
    text = f"{usable} usable blocks of {tokens} tokens in every run of {control}, as planned"
    if others:
        text += f"; and as planned {', '.join(f'{arm} {blocks}' for arm, blocks, _ in others)}"
    if unplanned:
        text += f"; for {', '.join(unplanned)} no number of blocks was planned"
    return True, text


def _planned(context: GateContext, run: RunRecord) -> tuple[int, int] | None:
    """Usable blocks and tokens of a block that were planned for a run's arm, None where they weren't."""
    own = context.ladder.usable_gpu_blocks.get(run.arm) if context.ladder else None
    if own is None and run.arm == context.protocol.control:
        own = run.capacity.usable_gpu_blocks
    return None if own is None else (own, run.capacity.block_tokens)


def _pool_of(run: RunRecord) -> tuple[int, int] | None:
    """The same as the engine exports them."""
    config = run.resolved.cache_config if run.resolved else {}
    blocks, size = config.get("num_gpu_blocks"), config.get("block_size")
    if blocks is None or size is None or not blocks.isdigit() or not size.isdigit():
        return None
    return int(blocks) - RESERVED_BLOCKS, int(size)


class Headroom(Struct, frozen=True, forbid_unknown_fields=True):
    """VRAM that must stay free at the peak, for buffers beside the KV cache."""

    bytes: int

    def __post_init__(self) -> None:
        """Raise ValueError below 0, where any use of VRAM would pass."""
        if self.bytes < 0:
            raise ValueError(
                f"bytes={self.bytes} is below 0 and would pass whatever is used; give the bytes of VRAM that must stay "
                f"free, 0 or more (size vram_headroom_bytes)"
            )


@gate("vram_headroom", Headroom)
def vram_headroom(context: GateContext, parameters: Headroom) -> Decision:
    """At its peak every arm left the declared VRAM free: more KV cache must not come out of the other buffers."""
    least: tuple[int, int, RunRecord] | None = None
    for run in context.runs:
        if not run.conditions.gpus:
            continue
        free = free_vram_bytes(run)
        if free is None:
            return None, f"{where(run)}: VRAM was not sampled, or of several GPUs only all together"
        at = min(range(len(free)), key=free.__getitem__)
        if least is None or free[at] < least[0]:
            least = free[at], at, run
    if least is None:
        return True, "no GPU here, so no VRAM to keep free"
    left, at, run = least
    gpu = f", GPU {at} of {len(run.conditions.gpus)}" if len(run.conditions.gpus) > 1 else ""
    detail = f"least free VRAM at the peak {left:,} bytes ({where(run)}{gpu}), declared headroom {parameters.bytes:,}"
    return left >= parameters.bytes, detail


def free_vram_bytes(run: RunRecord) -> list[int] | None:
    """What each GPU had free at its own peak; None where that isn't known of each.

    Records without the peak of each GPU have that of all together, which says as much where there is one. What is free
    on a GPU that an arm leaves idle says nothing of those that it uses.
    """
    totals = [gpu.get("memory.total", "") for gpu in run.conditions.gpus]
    if run.samples is None or not all(total.isdigit() for total in totals):
        return None
    peaks = run.samples.vram_used_peak_by_gpu_bytes
    if not peaks and len(totals) == 1 and run.samples.vram_used_peak_bytes is not None:
        peaks = [run.samples.vram_used_peak_bytes]
    if len(peaks) != len(totals):
        return None
    return [int(total) * 2**20 - peak for total, peak in zip(totals, peaks, strict=True)]
