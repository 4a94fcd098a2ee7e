"""Gates on a ladder: every level began empty, the server's times add up, and the pool is the one that was planned."""

from collections.abc import Sequence

from msgspec import Struct

from kvtrial.analysis.gates.context import Decision, GateContext, NoParameters, gate, some, where
from kvtrial.analysis.laddering import ALL_LEVELS
from kvtrial.analysis.ledger import ServerLedger, server_ledger
from kvtrial.analysis.levels import phases_of, risen
from kvtrial.record.plan import Capacity
from kvtrial.record.record import PhaseRecord, RunRecord

RESERVED_BLOCKS = 1


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
    """How far queue + prefill + decode may lie from end-to-end, percent of end-to-end.

    `way_max_seconds`: so much a request may take into the engine core and out of it, for each one in flight: the API
    server takes those that arrive together one after another. More is time that queue or prefill lost.
    `outside_core_max_seconds`: the same bound as campaigns up to 2026-11-29 declared it, of a request whatever is in
    flight beside it. Given, it is the one that holds: a recorded campaign is judged by what it declared.
    """

    tolerance_percent: float = 2.0
    way_max_seconds: float = 0.01
    outside_core_max_seconds: float | None = None

    def most_seconds(self, in_flight: int) -> float:
        """The most that a request may take on its way with so many in flight."""
        if self.outside_core_max_seconds is not None:
            return self.outside_core_max_seconds
        return self.way_max_seconds * in_flight


@gate("server_time_adds_up", Tolerance)
def server_time_adds_up(context: GateContext, parameters: Tolerance) -> Decision:
    """In each level the engine's own queue, prefill and decode times add up to its end-to-end times.

    A larger difference than allowed is no fault where the times to first token, another counter, show it as time
    outside the engine core: short requests spend that share there. It is bounded, since time that queue or prefill lost
    would look the same.
    """
    problems, looked, beyond = [], 0, 0
    allowed = parameters.tolerance_percent / 100
    largest: ServerLedger | None = None
    for run in context.runs:
        for phase in phases_of(run, ALL_LEVELS):
            ledger = server_ledger(phase)
            if ledger is None or ledger.difference_share is None:
                return None, f"{where(run, phase)}: queue, prefill, decode or end-to-end times are not exported"
            looked += 1
            if largest is None or abs(ledger.difference_share) > abs(largest.difference_share or 0.0):
                largest = ledger
            if abs(ledger.difference_share) <= allowed:
                continue
            beyond += 1
            if not _explained(ledger, phase, parameters):
                problems.append(
                    f"{where(run, phase)}: queue {ledger.queue_seconds:.3f} + prefill {ledger.prefill_seconds:.3f} + "
                    f"decode {ledger.decode_seconds:.3f} s differ from end-to-end {ledger.e2e_seconds:.3f} s by "
                    f"{100 * ledger.difference_share:.2f} %{_outside(ledger)}"
                )
    if problems:
        return False, some(problems)
    if largest is None or largest.difference_share is None:
        return None, "no level of the ladder"
    over = (
        f"; {beyond} of them beyond {parameters.tolerance_percent:g} %, where what is left without the time outside "
        f"the core is within it"
    )
    return True, (
        f"queue + prefill + decode against end-to-end differ by at most {100 * largest.difference_share:.2f} % in "
        f"{looked} levels (allowed {parameters.tolerance_percent:g} %){over if beyond else ''}{_outside(largest)}"
        f"{_earlier(parameters)}"
    )


def _earlier(parameters: Tolerance) -> str:
    """That a campaign is judged by the bound of an earlier release, where it declares that one."""
    bound = parameters.outside_core_max_seconds
    return (
        "" if bound is None else f"; a request may take {bound:g} s there (outside_core_max_seconds, an earlier bound)"
    )


def _explained(ledger: ServerLedger, phase: PhaseRecord, parameters: Tolerance) -> bool:
    """Whether a difference is time outside the engine core, and no more of that than a request may take there."""
    outside, difference = ledger.outside_core_share, ledger.difference_share
    if outside is None or difference is None or not phase.finished or phase.concurrency is None:
        return False
    each = outside * ledger.e2e_seconds / phase.finished
    allowed = parameters.tolerance_percent / 100
    return 0 <= each <= parameters.most_seconds(phase.concurrency) and abs(difference - outside) <= allowed


def _outside(ledger: ServerLedger) -> str:
    """What of the difference the times to first token show as well."""
    share = ledger.outside_core_share
    if share is None:
        return ""
    return f"; by the times to first token {100 * share:.2f} % lie on the way into the engine core and out of it"


@gate("capacity_as_planned", NoParameters)
def capacity_as_planned(context: GateContext, parameters: NoParameters) -> Decision:
    """The control's KV cache has the blocks that the onset was predicted from."""
    seen = set()
    for run in context.of_arm(context.protocol.control):
        blocks = run.resolved.cache_config.get("num_gpu_blocks") if run.resolved else None
        size = run.resolved.cache_config.get("block_size") if run.resolved else None
        if blocks is None or size is None or not blocks.isdigit() or not size.isdigit():
            return None, f"{where(run)}: the engine does not export its number of blocks"
        seen.add((int(blocks) - RESERVED_BLOCKS, int(size)))
        if seen != {_planned(run.capacity)}:
            usable, tokens = _planned(run.capacity)
            return False, (
                f"{where(run)} has {int(blocks) - RESERVED_BLOCKS} usable blocks of {size} tokens, planned were "
                f"{usable} of {tokens}; the predicted onset is another one's"
            )
    if not seen:
        return None, "no completed run of the control"
    usable, tokens = seen.pop()
    return True, f"{usable} usable blocks of {tokens} tokens in every run of the control, as planned"


def _planned(capacity: Capacity) -> tuple[int, int]:
    return capacity.usable_gpu_blocks, capacity.block_tokens


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
