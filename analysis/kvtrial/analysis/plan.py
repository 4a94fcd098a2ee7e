"""Make a plan: a pure function of protocol, hosts' settings and facts, and a seed. Same inputs, same bytes."""

import math
import random
from pathlib import Path
from typing import Any

import msgspec

from kvtrial.analysis.check import Finding, check_launches
from kvtrial.analysis.effect import mde
from kvtrial.analysis.inputs import HostInput, Request, model_of
from kvtrial.analysis.launch import TRANSFER, merged_args, render
from kvtrial.analysis.protocols import check_pairs, load_protocol, only_arms, resolve, with_sizes
from kvtrial.analysis.workingset import TierScope, WorkingSet, tier_scope, working_set
from kvtrial.record.errors import UnusableInput
from kvtrial.record.hazards import hazards_for
from kvtrial.record.launch import human_int
from kvtrial.record.plan import (
    Capacity,
    Estimate,
    HostPlan,
    Launch,
    Limits,
    PhasePlan,
    Plan,
    PromptPlan,
    RunPlan,
)
from kvtrial.record.protocol import Phase, Protocol
from kvtrial.record.version import SCHEMA_VERSION
from kvtrial.record.versions import NEWEST_READ, OLDEST_READ, outside_read_range

GIB = 2**30
RESERVED_BLOCKS = 1
DEFAULT_BLOCK_TOKENS = {"cpu": 128, "cuda": 16}
ENGINE_RAM_BYTES = {"cpu": 5 * GIB // 2, "cuda": 8 * GIB}
ASSUMED_LOG_RATIO_SD = {"cpu": 0.15, "cuda": 0.04}
"""Of a pair's log ratio, before any A/A run on the host: what was seen on two CPU cores and on one H200."""
ASSUMED_START_SECONDS = {"cpu": 18.0, "cuda": 75.0}
ASSUMED_TOKENS_PER_SECOND = {"cpu": 2000.0, "cuda": 30000.0}
DEFAULT_LIMITS = {
    "start_timeout_seconds": 600.0,
    "stop_timeout_seconds": 60.0,
    "idle_timeout_seconds": 60.0,
    "request_timeout_seconds": 600.0,
    "deadlock_seconds": 30.0,
    "max_pair_gap_seconds": 1800.0,
    "controller_gone_seconds": 180.0,
    "foreign_cpu_share_max": 0.5,
    "disk_reserve_bytes": float(GIB),
}


def make_plan(request: Request, protocol: Protocol) -> Plan:
    """The whole plan. Raises UnusableInput with the sentence for anything that must be refused before a start."""
    protocols = {name: _for_host(protocol, host) for name, host in request.hosts.items()}
    hosts = [_host_plan(name, request, protocols[name]) for name in sorted(request.hosts)]
    any_host = sorted(request.hosts)[0]
    return Plan(
        schema_version=SCHEMA_VERSION,
        protocol=protocols[any_host],
        seed=request.seed,
        hosts=hosts,
        estimates={plan.host: estimate(plan) for plan in hosts},
    )


def requested_protocol(request: Request) -> Protocol:
    """The protocol that a request names, with its choice of arms and pairs applied and checked."""
    protocol = load_protocol(request.protocol, Path(request.protocols_dir))
    if request.arms is not None:
        protocol = only_arms(protocol, request.arms)
    if request.pairs is not None:
        check_pairs(request.pairs)
        protocol = msgspec.structs.replace(protocol, pairs=dict.fromkeys(("cpu", "gpu"), request.pairs))
    return protocol


def _for_host(protocol: Protocol, host: HostInput) -> Protocol:
    return resolve(with_sizes(protocol, host.sizes), host.vllm_version)


def findings(host: HostInput, protocol: Protocol) -> list[Finding]:
    """What the launch checks say of the arms on a host."""
    launches = {name: render(host, name, arm) for name, arm in protocol.arms.items()}
    return check_launches(
        host.facts,
        {"version": host.vllm_version, "backend": host.backend},
        {name: {"args": launch.argv[2:], "env": launch.env} for name, launch in launches.items()},
        {"kv_bytes_per_token": host.model.kv_bytes_per_token},
    )


def refuse(host_name: str, host: HostInput, protocol: Protocol) -> None:
    """Raise UnusableInput for the first thing that forbids this protocol on this host."""
    if not host.may_be_disturbed:
        raise UnusableInput(
            f"host {host_name} has not agreed to be disturbed: experiments load and evict; set "
            f"kvtrial_host_may_be_disturbed: true in its inventory, only on a host that serves nobody."
        )
    if note := outside_read_range(host.vllm_version):
        raise UnusableInput(
            f"host {host_name}: {note.rstrip('.')}, so its metrics and defects are not known here; pin a vLLM from "
            f"{OLDEST_READ} to {NEWEST_READ}."
        )
    refusals = [finding for finding in findings(host, protocol) if finding.severity == "refuse"]
    # Two interfaces at once make an arm look wrong in other ways too; the cause is named, not what follows from it.
    for finding in sorted(refusals, key=lambda finding: finding.class_ != "mixed_interfaces"):
        where = f"host {host_name}, arm {finding.arm}" if finding.arm else f"host {host_name}"
        raise UnusableInput(f"{where}: {finding.reason.rstrip('.')}. {finding.do}")
    if "ram_available_bytes" in host.facts:
        _refuse_memory(host_name, host, protocol)


def _refuse_memory(host_name: str, host: HostInput, protocol: Protocol) -> None:
    tier = max(_tier_bytes(host, protocol).values(), default=0)
    reserve = _ram_reserve(host)
    engine = ENGINE_RAM_BYTES[host.backend]
    available = int(host.facts["ram_available_bytes"])
    if available < tier + reserve + engine:
        raise UnusableInput(
            f"host {host_name}: {available} bytes of RAM are available, {tier + reserve + engine} are needed (tier "
            f"{tier}, engine {engine}, reserve {reserve}); free some, or lower the size tier_bytes."
        )


def _host_plan(name: str, request: Request, protocol: Protocol) -> HostPlan:
    host = request.hosts[name]
    refuse(name, host, protocol)
    launches = _guarded({arm: render(host, arm, spec) for arm, spec in protocol.arms.items()}, host)
    capacity = _capacity(name, host, protocol)
    runs = _runs(name, request.seed, host, protocol)
    extras = _extras(host, protocol)
    for run in runs[: len(protocol.arms)]:
        declared = str(protocol.gates.get("working_set", {}).get("tier_scope", "run"))
        refuse_working_set(name, protocol, run, capacity, tier_scope(declared, extras.get(run.arm, {})))
    _refuse_length(name, host, protocol, runs)
    seconds = _seconds(runs, host.backend)
    limits = {**DEFAULT_LIMITS, "deadline_seconds": max(1800.0, 3 * seconds), **host.limits}
    if unknown := set(limits) - set(Limits.__struct_fields__):
        raise UnusableInput(
            f"limit {sorted(unknown)[0]} is not known; kvtrial_limits takes {', '.join(Limits.__struct_fields__)}."
        )
    for limit, value in limits.items():
        if not float(value) > 0:
            raise UnusableInput(
                f"limit {limit}={value} of kvtrial_limits must be above 0; give seconds, bytes or a share."
            )
    limits |= {"ram_reserve_bytes": _ram_reserve(host), "engine_ram_bytes": ENGINE_RAM_BYTES[host.backend]}
    limits["disk_reserve_bytes"] = int(limits["disk_reserve_bytes"])
    return HostPlan(
        schema_version=SCHEMA_VERSION,
        protocol=protocol.name,
        host=name,
        seed=request.seed,
        backend=host.backend,
        vllm_version=host.vllm_version,
        model=model_of(host.model),
        capacity=capacity,
        launches=launches,
        runs=runs,
        replacement_pairs=protocol.faults.replacement_pairs,
        limits=msgspec.convert(limits, type=Limits, strict=False),
        if_controller_gone=host.if_controller_gone,
        supervisor=host.supervisor,
    )


def _guarded(launches: dict[str, Launch], host: HostInput) -> dict[str, Launch]:
    """The launches with the guards of this version's hazards set in every arm. Raises UnusableInput for a block."""
    for hit in hazards_for(host.vllm_version, launches, host.backend):
        if hit.action == "block":
            raise UnusableInput(
                f"vLLM {host.vllm_version} has a defect that this experiment would meet: {hit.hazard.title} "
                f"({hit.hazard.source}); use another version."
            )
        if hit.action == "guard" and not hit.guarded and hit.hazard.guard is not None:
            guard = hit.hazard.guard
            launches = {
                name: msgspec.structs.replace(
                    launch,
                    argv=launch.argv if _holds(launch.argv, guard.args) else launch.argv + guard.args,
                    env={**launch.env, **guard.env},
                )
                for name, launch in launches.items()
            }
    return launches


def _holds(argv: list[str], words: list[str]) -> bool:
    """Whether `words` stand in `argv` side by side, in their order: an option is nothing without its own value."""
    return any(argv[at : at + len(words)] == words for at in range(len(argv) - len(words) + 1))


def _ram_reserve(host: HostInput) -> int:
    """RAM that must stay free: as declared for the host, else the larger of 8 GiB and a tenth."""
    if host.ram_reserve_bytes is not None:
        return host.ram_reserve_bytes
    return max(8 * GIB, int(host.facts.get("ram_total_bytes", 0)) // 10)


def _tier_bytes(host: HostInput, protocol: Protocol) -> dict[str, int]:
    return {name: int(extra["cpu_bytes_to_use"]) for name, extra in _extras(host, protocol).items()
            if "cpu_bytes_to_use" in extra}  # fmt: skip


def _extras(host: HostInput, protocol: Protocol) -> dict[str, dict[str, Any]]:
    configs = {name: merged_args(host, arm).get(TRANSFER) for name, arm in protocol.arms.items()}
    return {name: config.get("kv_connector_extra_config", {}) for name, config in configs.items() if config}


def _capacity(name: str, host: HostInput, protocol: Protocol) -> Capacity:
    args = merged_args(host, protocol.arms[protocol.control])
    block = int(args.get("block-size", DEFAULT_BLOCK_TOKENS[host.backend]))
    blocks = _gpu_blocks(name, host, args, block)
    extras = _extras(host, protocol)
    return Capacity(
        block_tokens=block,
        usable_gpu_blocks=blocks - RESERVED_BLOCKS,
        kv_bytes_per_token=host.model.kv_bytes_per_token,
        tier_bytes=_tier_bytes(host, protocol),
        chunk_tokens={arm: int(extra.get("block_size", block * int(extra.get("blocks_per_chunk", 1))))
                      for arm, extra in extras.items()},
    )  # fmt: skip


def _gpu_blocks(name: str, host: HostInput, args: dict[str, Any], block: int) -> int:
    if "num-gpu-blocks-override" in args:
        return int(args["num-gpu-blocks-override"])
    if "kv-cache-memory-bytes" in args:
        size = human_int(str(args["kv-cache-memory-bytes"]), "kv-cache-memory-bytes")
        return size // (block * host.model.kv_bytes_per_token)
    raise UnusableInput(
        f"host {name}: the size of the GPU KV cache is left to the engine, so nobody can say how much pressure "
        f"evicts a prefix; set num-gpu-blocks-override or kv-cache-memory-bytes in kvtrial_engine_args."
    )


def refuse_working_set(
    host: str, protocol: Protocol, run: RunPlan, capacity: Capacity, scope: TierScope = "run"
) -> None:
    """Raise UnusableInput, with the numbers and the smallest change, where the workload can't show anything."""
    rule = protocol.gates.get("working_set")
    if rule is None:
        return
    need = working_set(run.phases, capacity, run.arm, scope)
    _refuse_pressure(host, need, capacity, float(rule.get("pressure_share_min", 1.2)))
    _refuse_tier(host, run.arm, need, capacity, float(rule.get("tier_share_max", 0.8)), scope)
    for phase, blocks in need.resident_blocks.items():
        if blocks > capacity.usable_gpu_blocks:
            raise UnusableInput(
                f"host {host}: {phase} asks for {blocks} blocks that should still be in the GPU KV cache, which holds "
                f"{capacity.usable_gpu_blocks}; use fewer prompts there, or set num-gpu-blocks-override to "
                f"{blocks + RESERVED_BLOCKS} or more."
            )
    for tokens in need.prompt_tokens:
        if tokens % capacity.block_tokens == 0:
            raise UnusableInput(
                f"host {host}: prompts of {tokens} tokens end at the edge of a block of {capacity.block_tokens}; the "
                f"GPU cache then recomputes one block and the tier does not. Set prompt_tokens to "
                f"{tokens + capacity.block_tokens // 2}."
            )


def _refuse_length(name: str, host: HostInput, protocol: Protocol, runs: list[RunPlan]) -> None:
    """Raise UnusableInput where a prompt and its answer are longer than the engine was told to serve."""
    needs = {
        phase.name: phase.prompts.tokens + phase.max_tokens
        for run in runs[: len(protocol.arms)]
        for phase in run.phases
    }
    phase, need = max(needs.items(), key=lambda item: item[1])
    for arm, spec in protocol.arms.items():
        given = str(merged_args(host, spec).get("max-model-len", "auto"))
        # The engine takes its own from the model then, which isn't known here.
        if given in ("auto", "-1"):
            continue
        length = human_int(given, "max-model-len")
        if need > length:
            raise UnusableInput(
                f"host {name}, arm {arm}: a request of {phase} has {need} tokens with its answer, --max-model-len is "
                f"{length}; set max-model-len to {need} or more in kvtrial_engine_args, or use shorter prompts."
            )


def _refuse_pressure(host: str, need: WorkingSet, capacity: Capacity, least: float) -> None:
    for phase, (prompts, blocks) in need.pressure.items():
        if prompts * blocks < least * capacity.usable_gpu_blocks:
            size = phase if phase.startswith("pressure") else "pressure"
            enough = math.ceil(least * capacity.usable_gpu_blocks / blocks)
            raise UnusableInput(
                f"host {host}: {phase} takes {prompts * blocks} blocks, the GPU KV cache holds "
                f"{capacity.usable_gpu_blocks} ({capacity.usable_gpu_blocks * capacity.block_tokens} tokens); below "
                f"{least:g} times that the prefix stays there and the GPU answers, so no tier is ever asked. Set "
                f"num-gpu-blocks-override to {int(prompts * blocks / least) + RESERVED_BLOCKS} or less, or the size "
                f"{size} to {enough} prompts or more."
            )


def _refuse_tier(host: str, arm: str, need: WorkingSet, capacity: Capacity, most: float, scope: TierScope) -> None:
    if need.tier_chunks is not None and need.stored_chunks > most * need.tier_chunks:
        chunk_bytes = capacity.chunk_tokens[arm] * capacity.kv_bytes_per_token
        raise UnusableInput(
            f"host {host}: arm {arm} stores {need.stored_chunks} chunks of {capacity.chunk_tokens[arm]} tokens"
            f"{' in one block of phases' if scope == 'block' else ''}, its "
            f"tier of {capacity.tier_bytes[arm]} bytes holds {need.tier_chunks}; above {most:g} of the tier a cyclic "
            f"set loses everything (LRU). Set tier_bytes to {math.ceil(need.stored_chunks / most) * chunk_bytes} or "
            f"more, or use fewer or shorter prompts."
        )


def _runs(host_name: str, seed: int, host: HostInput, protocol: Protocol) -> list[RunPlan]:
    """Planned pairs in ABBA order, then spare pairs. Arms beside the control make one pair each with it, in turn."""
    kind = "gpu" if host.backend == "cuda" else "cpu"
    pairs = protocol.pairs.get(kind, 6)
    variants = [name for name in protocol.arms if name != protocol.control]
    control_first = random.Random(f"{seed}/{host_name}/first").random() < 0.5
    runs: list[RunPlan] = []
    for number in range(1, pairs + protocol.faults.replacement_pairs + 1):
        forward = control_first == (number % 2 == 1)
        order = [protocol.control, *variants]
        for position, arm in enumerate(order if forward else order[::-1]):
            runs.append(
                RunPlan(
                    run=f"p{number:02d}-{position + 1}-{arm}",
                    pair=number,
                    position=position,
                    arm=arm,
                    spare=number > pairs,
                    phases=_phases(host_name, seed, number, host, protocol),
                )
            )
    return runs


def _phases(host_name: str, seed: int, pair: int, host: HostInput, protocol: Protocol) -> list[PhasePlan]:
    """The phases of a run of pair `pair`: the same for every arm; new prompts and salts each pair."""
    plans = [_phase(phase, f"{seed}/{host_name}/{pair}", pair, host, protocol) for phase in protocol.phases]
    blocks = list(dict.fromkeys(plan.block for plan in plans))
    alternating = [block for block in blocks if block in protocol.alternate_blocks]
    if pair % 2 == 0:
        swapped = iter(alternating[::-1])
        blocks = [next(swapped) if block in alternating else block for block in blocks]
    return [plan for block in blocks for plan in plans if plan.block == block]


def _phase(phase: Phase, seed: str, pair: int, host: HostInput, protocol: Protocol) -> PhasePlan:
    prompts = protocol.prompt_sets[phase.prompts]
    count, take = int(prompts.count), int(phase.take)
    chosen = list(range(count))
    chosen = chosen[:take] if take > 0 else chosen[take:] if take < 0 else chosen
    return PhasePlan(
        name=phase.name,
        block=phase.block,
        prompts=PromptPlan(
            name=phase.prompts,
            seed=f"{seed}/{phase.prompts}",
            count=count,
            tokens=int(prompts.tokens),
            suffix_tokens=int(prompts.suffix_tokens),
            low_id=host.model.low_token_id,
            high_id=host.model.high_token_id,
        ),
        indices=chosen * phase.repeat,
        salt=f"kvtrial.p{pair}.{phase.salt}",
        max_tokens=int(phase.max_tokens),
        concurrency=int(phase.concurrency),
        kv_transfer_params=phase.kv_transfer_params,
    )


def _seconds(runs: list[RunPlan], backend: str) -> float:
    tokens = sum(len(p.indices) * p.prompts.tokens for run in runs if not run.spare for p in run.phases)
    planned = sum(not run.spare for run in runs)
    return planned * (ASSUMED_START_SECONDS[backend] + 3.0) + tokens / ASSUMED_TOKENS_PER_SECOND[backend]


def estimate(plan: HostPlan) -> Estimate:
    """What the campaign will take on a host, from what such hosts took before."""
    pairs = len({run.pair for run in plan.runs if not run.spare})
    deviation = ASSUMED_LOG_RATIO_SD[plan.backend]
    return Estimate(
        runs=sum(not run.spare for run in plan.runs),
        seconds=_seconds(plan.runs, plan.backend),
        ram_bytes=plan.limits.engine_ram_bytes + max(plan.capacity.tier_bytes.values(), default=0),
        pairs=pairs,
        log_ratio_sd_assumed=deviation,
        mde_ratio=mde(deviation, pairs),
    )
