"""Gate on the working set: large enough to evict, small enough for the tier, asked for in an order that can hit."""

from msgspec import Struct

from kvtrial.analysis.gates.context import Decision, GateContext, gate, phase_of, some, where
from kvtrial.analysis.metrics import delta
from kvtrial.analysis.mixes import declared_shares, trace_phases
from kvtrial.analysis.workingset import TierScope, held_at_once, request_blocks, tier_chunks, tier_scope
from kvtrial.record.launch import parse_vllm_args, tier_of
from kvtrial.record.record import PhaseRecord, RequestFact, RunRecord
from kvtrial.record.versions import within


class WorkingSet(Struct, frozen=True, forbid_unknown_fields=True):
    """Least pressure in shares of the usable GPU blocks, most stored chunks in shares of the tier.

    `tier_scope`: whether the chunks of the whole run must fit the tier, or those of each block of phases (LRU only).
    `returns`: the phases whose prompts must have been pushed out; by default those of the gate `prefix_evicted`.
    """

    pressure_share_min: float
    tier_share_max: float
    returns: list[str] = []
    tier_scope: TierScope = "run"


@gate("working_set", WorkingSet)
def working_set(context: GateContext, parameters: WorkingSet) -> Decision:
    """Pressure alone outgrows the GPU cache, all that a run stores fits the tier, returns come in populate order."""
    returns = parameters.returns or context.protocol.gates.get("prefix_evicted", {}).get("phases", [])
    returns = [name for name in returns if context.not_planned(name) is None]
    shares = declared_shares(context.protocol)
    problems: list[str] = []
    details: list[str] = []
    for run in context.runs:
        measured = run.resolved.cache_config.get("num_gpu_blocks") if run.resolved else None
        if measured is None:
            return None, f"{where(run)}: the engine's num_gpu_blocks is not recorded"
        if int(measured) - 1 != run.capacity.usable_gpu_blocks:
            problems.append(
                f"{where(run)}: the engine has {int(measured) - 1:,} usable blocks, planned were "
                f"{run.capacity.usable_gpu_blocks:,}"
            )
        for name in returns:
            phase = phase_of(run, name)
            if phase is None:
                return None, f"{where(run)} has no phase {name}"
            wrong, detail = _pressure(run, phase, parameters.pressure_share_min, shares.get(name))
            problems += wrong
            details.append(detail)
        wrong, detail = _tier(context, run, parameters)
        problems += wrong
        details.append(detail)
    if problems:
        return False, some(problems)
    return True, "; ".join(dict.fromkeys(detail for detail in details if detail)) + f"; in {len(context.runs)} runs"


def _pressure(run: RunRecord, target: PhaseRecord, share_min: float, share: float | None) -> tuple[list[str], str]:
    """What came between the populate of the target's prompts and their return, in blocks.

    `share`: the declared share of a mix, of which only what was sent before returns; None: all of the phase returns.
    """
    block_tokens, usable = run.capacity.block_tokens, run.capacity.usable_gpu_blocks
    in_time = sorted(run.phases, key=lambda phase: phase.started_monotonic_seconds)
    earlier = [
        p for p in in_time if p.block == target.block and p.started_monotonic_seconds < target.started_monotonic_seconds
    ]
    wanted = [request.prompt_sha256 for request in target.requests]
    if share is not None:
        before = {request.prompt_sha256 for p in earlier for request in p.requests}
        wanted = [sha for sha in wanted if sha in before]
        if not wanted:
            # How many had to return is for the gate treatment_delivered to say.
            return [], f"{target.name}: no prompt returns"
    populate = next((p for p in earlier if set(wanted) <= {r.prompt_sha256 for r in p.requests}), None)
    if populate is None:
        return [f"{where(run, target)}: its prompts were not populated before"], ""
    problems = []
    populated = [request.prompt_sha256 for request in populate.requests]
    if wanted != [sha for sha in populated if sha in set(wanted)]:
        problems.append(f"{where(run, target)}: the prompts return in another order than they were populated")
    inside = [_prompt_tokens(target, request) for request in target.requests]
    if any(tokens % block_tokens == 0 for tokens in inside):
        problems.append(
            f"{where(run, target)}: a prompt ends at a block's border ({block_tokens} tokens), not inside a block"
        )
    others = [p for p in earlier if p.started_monotonic_seconds > populate.started_monotonic_seconds]
    blocks = sum(
        request_blocks(_prompt_tokens(p, request), request.max_tokens, block_tokens)
        for p in others
        for request in p.requests
        if request.prompt_sha256 not in populated
    )
    if blocks < share_min * usable:
        problems.append(
            f"{where(run, target)}: pressure of {blocks:,} blocks is under {share_min:g} × {usable:,} usable GPU blocks"
        )
    return problems, f"{target.name}: pressure {blocks:,} blocks = {blocks / usable:.2f} × {usable:,} usable GPU blocks"


def _tier(context: GateContext, run: RunRecord, parameters: WorkingSet) -> tuple[list[str], str]:
    """All chunks stored, whatever their salt, against the tier's; a full tier returns nothing at all.

    A trace is left out: it is as large as it is, and how much of it the tier gave back is measured.
    """
    tier_bytes, chunk_tokens = run.capacity.tier_bytes.get(run.arm), run.capacity.chunk_tokens.get(run.arm)
    if not tier_bytes or not chunk_tokens:
        return [], ""
    tier = tier_of(parse_vllm_args(run.launch.argv), run.launch.env, run.vllm_version_pinned)
    extra = tier.extra if tier is not None else {}
    # Unset it is true, since there is such a key (vLLM 0.23).
    unset = within(run.vllm_version_pinned, "0.23", None)
    prompt_only = extra.get("offload_prompt_only", unset) is True
    scope = tier_scope(parameters.tier_scope, extra)
    salts = {phase.name: phase.salt for phase in context.protocol.phases}
    traces = trace_phases(context.protocol)
    stored = [
        (
            phase.block,
            (salts.get(phase.name, phase.block), request.prompt_sha256),
            (_prompt_tokens(phase, request) + (0 if prompt_only else request.max_tokens - 1)) // chunk_tokens,
        )
        for phase in run.phases
        if phase.name not in traces
        for request in phase.requests
    ]
    chunks = held_at_once(stored, scope)
    capacity = tier_chunks(tier_bytes, chunk_tokens, run.capacity.kv_bytes_per_token)
    where_stored = " in the largest block of phases" if scope == "block" else ""
    detail = f"{chunks:,} chunks stored{where_stored}, {capacity:,} in the tier of {run.arm}"
    if chunks > parameters.tier_share_max * capacity:
        return [f"{where(run)}: {detail}, more than {parameters.tier_share_max:g} of it"], ""
    return [], detail


def _prompt_tokens(phase: PhaseRecord, request: RequestFact) -> int:
    """Tokens of a request's prompt: as the server reported it, else the phase's mean."""
    if request.prompt_tokens is not None:
        return request.prompt_tokens
    total = delta(phase, "prompt_tokens")
    if total is None or phase.sent == 0:
        raise ValueError(f"prompt tokens of phase {phase.name} are not recorded")
    return round(total / phase.sent)
