"""Make a plan: a pure function of protocol, hosts' settings and facts, and a seed. Same inputs, same bytes."""

import json
import math
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from kvtrial.analysis.armchange import (
    refuse_contrary_arms,
    refuse_idle_arms,
    refuse_loose_limits,
    refuse_reserves,
)
from kvtrial.analysis.check import Finding, check_launches
from kvtrial.analysis.effect import mde
from kvtrial.analysis.gates.context import read_parameters
from kvtrial.analysis.inputs import CHOSEN_SIZES, HostInput, Request, model_of
from kvtrial.analysis.laddering import (
    QUEUEING,
    answer_seconds,
    arm_onset,
    is_level,
    lengths_of,
    levels_for,
    onset_of_replicas,
    own_pool_onset,
    refuse_arms,
    refuse_reuse,
    refuse_unknown_limit,
    refuse_unpredictable,
    with_levels,
)
from kvtrial.analysis.launch import TRANSFER, dashed, host_of_arm, merged_args, render
from kvtrial.analysis.launch_arm import ended
from kvtrial.analysis.objectives import with_own
from kvtrial.analysis.protocols import (
    check_pairs,
    load_protocol,
    only_arms,
    own_sizes,
    refuse_margins,
    refuse_sizes,
    resolve,
    with_sizes,
)
from kvtrial.analysis.reserve import ram_reserve
from kvtrial.analysis.tiers import with_tier_sizes
from kvtrial.analysis.workingset import (
    PhaseNeed,
    RunNeeds,
    TierScope,
    is_pressure,
    is_resident,
    run_needs,
    tier_chunks,
    tier_scope,
)
from kvtrial.analysis.workloads import NO_TRACES, Seeds, Traces, arrivals_plan, workload_plan
from kvtrial.record.errors import UnusableInput
from kvtrial.record.hazards import Guard, hazards_for
from kvtrial.record.launch import engine_gpus, human_int, ranks
from kvtrial.record.plan import (
    RESERVED_BLOCKS,
    Capacity,
    Estimate,
    HostPlan,
    LadderPlan,
    Launch,
    Limits,
    PhasePlan,
    Plan,
    PromptPlan,
    RunPlan,
    WorkloadPlan,
)
from kvtrial.record.protocol import Phase, Poisson, PromptSet, Protocol, Recorded, Trace
from kvtrial.record.version import SCHEMA_VERSION
from kvtrial.record.versions import NEWEST_READ, OLDEST_READ, outside_read_range

GIB = 2**30
PROMPT_ONLY = "offload_prompt_only"
CACHING = "enable-prefix-caching"
POOL_BLOCKS = "num-gpu-blocks-override"
POOL_BYTES = "kv-cache-memory-bytes"
COUNTS = ("block-size", "max-num-seqs", "max-num-batched-tokens", POOL_BLOCKS, POOL_BYTES)
"""Options of the engine that count something, from 1 on."""
DEFAULT_BLOCK_TOKENS = {"cpu": 128, "cuda": 16}
SPEC_MODULE = "spec_module_path"
ENGINE_RAM_BYTES = {"cpu": 5 * GIB // 2, "cuda": 8 * GIB}
ASSUMED_LOG_RATIO_SD = {"cpu": 0.15, "cuda": 0.04}
"""Of a pair's log ratio, before any A/A run on the host: what was seen on two CPU cores and on one H200."""
ASSUMED_START_SECONDS = {"cpu": 18.0, "cuda": 75.0}
ASSUMED_STEP_SECONDS = {"cpu": 0.0025, "cuda": 0.01}
ASSUMED_TOKENS_PER_SECOND = {"cpu": 2000.0, "cuda": 30000.0}
LEAST_CONTROLLER_GONE_SECONDS = 180.0
VISITS_MISSED = 3
"""A controller is taken to be gone when it has not come by for the time of so many visits."""
DEFAULT_LIMITS = {
    "start_timeout_seconds": 600.0,
    "stop_timeout_seconds": 60.0,
    "idle_timeout_seconds": 60.0,
    "request_timeout_seconds": 600.0,
    "deadlock_seconds": 30.0,
    "max_pair_gap_seconds": 1800.0,
    "disk_reserve_bytes": float(GIB),
}


def make_plan(request: Request, protocol: Protocol, traces: Traces = NO_TRACES) -> Plan:
    """The whole plan. Raises UnusableInput with the sentence for anything that must be refused before a start.

    `traces`: those that the protocol replays, as read_traces gives them.
    """
    protocols, works = {}, {}
    for name, host in request.hosts.items():
        refuse_arms(name, host, protocol)
        protocols[name] = for_host(protocol, host, request.seed, name=name)
        works[name] = {
            arm: for_host(protocol, host, request.seed, arm, name) for arm, spec in protocol.arms.items() if spec.sizes
        }
        refuse_contrary_arms(name, host, protocol, protocols[name])
        refuse_reserves(name, protocols[name], works[name])
    known: dict[bytes, RunNeeds] = {}
    planned = [_host_plan(name, request, protocols[name], traces, known, works[name]) for name in sorted(request.hosts)]
    for part, _ in planned:
        refuse_idle_arms(part, protocol, protocols[part.host])
        refuse_loose_limits(part, protocol)
    return Plan(
        schema_version=SCHEMA_VERSION,
        protocol=_with_files(protocols[_telling_host(protocols)], traces),
        seed=request.seed,
        hosts=[host for host, _ in planned],
        estimates={host.host: estimate(host, seconds) for host, seconds in planned},
    )


def _telling_host(protocols: Mapping[str, Protocol]) -> str:
    """The host whose protocol is the campaign's: the first, of a ladder the first that does not only queue."""
    queues = {
        name: any(each.phase == QUEUEING for each in protocol.comparisons) for name, protocol in protocols.items()
    }
    return min(sorted(protocols), key=lambda name: queues[name])


def _with_files(protocol: Protocol, traces: Traces) -> Protocol:
    """The protocol with the campaign's own file of each trace: where the user keeps it is no part of a plan."""
    if not protocol.workloads:
        return protocol
    workloads = {
        name: msgspec.structs.replace(workload, file=traces.files[workload].file, requests=0)
        if isinstance(workload, Trace) and workload in traces.files
        else workload
        for name, workload in protocol.workloads.items()
    }
    return msgspec.structs.replace(protocol, workloads=workloads)


def requested_protocol(request: Request) -> Protocol:
    """The protocol that a request names, with its choice of arms and pairs applied and checked."""
    protocol = load_protocol(_chosen_protocol(request), Path(request.protocols_dir))
    for name in CHOSEN_SIZES:
        if getattr(request, name) is not None and name not in protocol.sizes:
            raise UnusableInput(
                f"protocol {protocol.name} has no size {name}, so kvtrial_{name}={getattr(request, name)} sets "
                f"nothing; leave it out, or use -e protocol=offload_mix."
            )
    if request.ladder is not None and not protocol.ladder:
        raise UnusableInput(
            f"protocol {protocol.name} has no ladder, so kvtrial_ladder={request.ladder} sets nothing; leave it out, "
            f"or use -e protocol=preemption_ladder."
        )
    if request.arrivals_per_minute is not None:
        protocol = _at_own_rate(protocol)
    if protocol.ladder and request.ladder is not None:
        protocol = msgspec.structs.replace(
            protocol, ladder=msgspec.structs.replace(protocol.ladder, levels=request.ladder)
        )
    if protocol.ladder and request.objectives:
        objectives = with_own(protocol.ladder.objectives, request.objectives)
        protocol = msgspec.structs.replace(
            protocol, ladder=msgspec.structs.replace(protocol.ladder, objectives=objectives)
        )
    if request.arms is not None:
        protocol = only_arms(protocol, request.arms)
    elif protocol.ladder:
        protocol = only_arms(protocol, protocol.ladder.default_arms)
    if request.pairs is not None:
        check_pairs(request.pairs)
        protocol = msgspec.structs.replace(protocol, pairs=dict.fromkeys(("cpu", "gpu"), request.pairs))
    return protocol


def _at_own_rate(protocol: Protocol) -> Protocol:
    """The protocol with Poisson arrivals at the size arrivals_per_minute where it would replay recorded times."""
    rate = Poisson(rate_per_minute="$arrivals_per_minute")
    phases = [
        msgspec.structs.replace(phase, arrivals=rate) if isinstance(phase.arrivals, Recorded) else phase
        for phase in protocol.phases
    ]
    return msgspec.structs.replace(protocol, phases=phases)


def _chosen_protocol(request: Request) -> str:
    """The protocol's name. A trace or a hit share chooses its form NAME_trace or NAME_share, where there is one."""
    if request.trace is not None and request.hit_share_percent is not None:
        raise UnusableInput(
            f"kvtrial_trace and kvtrial_hit_share_percent={request.hit_share_percent} are both given; a trace has the "
            f"share that it has, so leave one of them out."
        )
    form = "trace" if request.trace is not None else "share" if request.hit_share_percent is not None else None
    name = f"{request.protocol}_{form}"
    return name if form and (Path(request.protocols_dir) / f"{name}.yml").is_file() else request.protocol


def for_host(protocol: Protocol, host: HostInput, seed: int = 0, arm: str | None = None, name: str = "") -> Protocol:
    """The protocol with a host's sizes and without the phases that its vLLM can't do; a ladder with its levels.

    `arm`: with the sizes of that arm for what is sent; the levels are the control's all the same.
    """
    sized = with_sizes(protocol, host.sizes)
    given = sized.sizes
    where = f"host {name}" if name else f"protocol {protocol.name}"
    refuse_margins(sized, where)
    refuse_sizes(sized, where)
    _refuse_engine_sizes(where, host, resolve(sized, host.vllm_version), [sized.control])
    if sized.tiers:
        sized = with_tier_sizes(
            sized, _capacity(name, host, resolve(sized, host.vllm_version)), sized.sizes["chunk_tokens"]
        )
        for size in sized.tiers or {}:
            if size in host.sizes and given[size] not in (protocol.sizes[size], sized.sizes[size]):
                raise UnusableInput(
                    f"{where}: {size}={given[size]} of kvtrial_sizes can't be used: it follows from the GPU's KV cache "
                    f"and is {sized.sizes[size]} here; leave it out."
                )
    _refuse_engine_sizes(where, host, resolve(sized, host.vllm_version), sized.arms)
    if sized.ladder:
        sized = _with_levels(sized, host, seed, name)
    if arm is not None:
        sized = with_sizes(sized, own_sizes(protocol.arms[arm], sized.sizes))
    return resolve(sized, host.vllm_version)


def _refuse_engine_sizes(where: str, host: HostInput, protocol: Protocol, arms: Iterable[str]) -> None:
    """Raise UnusableInput for an arm's engine option that counts something and is no number, or below 1."""
    for arm in arms:
        args = merged_args(host, protocol.arms[arm])
        for option in COUNTS:
            if option not in args:
                continue
            try:
                least = human_int(str(args[option]), option)
            except UnusableInput as error:
                raise UnusableInput(f"{where}, arm {arm}: {error}") from None
            if least < 1:
                raise UnusableInput(
                    f"{where}, arm {arm}: {option}={args[option]} can't be run; give 1 or more (kvtrial_engine_args)."
                )


def _with_levels(protocol: Protocol, host: HostInput, seed: int, name: str) -> Protocol:
    """The protocol with the levels of its ladder, around the onset predicted for the control on this host."""
    assert protocol.ladder
    resolved = resolve(protocol, host.vllm_version)
    refuse_reserves(name, resolved, {})
    capacity = _capacity(name, host, resolved)
    phase = _ladder_phase(name, seed, host, resolved, capacity.block_tokens, protocol.ladder.phase)
    launches = _launches(host, resolved)
    for arm, launch in launches.items():
        refuse_unpredictable(name, arm, launch, host.vllm_version)
    refuse_reuse(name, phase, capacity.block_tokens)
    launch = launches[protocol.control]
    onset = arm_onset(host, protocol.control, launch, phase, capacity.usable_gpu_blocks, capacity.block_tokens)
    levels = levels_for(name, protocol.ladder, onset, len(lengths_of(phase)))
    refuse_unknown_limit(name, launch, levels)
    return with_levels(protocol, levels, onset)


def _ladder_phase(
    name: str, seed: int, host: HostInput, protocol: Protocol, block_tokens: int, phase: str
) -> PhasePlan:
    """A phase of the ladder as the first pair sends it."""
    phases = _phases(name, seed, 1, host, protocol, block_tokens, NO_TRACES)
    return next(plan for plan in phases if plan.name == phase)


def findings(host: HostInput, protocol: Protocol) -> list[Finding]:
    """What the launch checks say of the arms on a host, where keys of a foreign spec are declared or refused."""
    launches = {name: render(host, name, arm) for name, arm in protocol.arms.items()}
    found = check_launches(
        {**host.facts, "ram_reserve_bytes": host.ram_reserve_bytes},
        {"version": host.vllm_version, "backend": host.backend},
        {name: {"args": launch.argv[2:], "env": launch.env} for name, launch in launches.items()},
        {"kv_bytes_per_token": host.model.kv_bytes_per_token},
    )
    foreign = [finding for finding in found if finding.class_ == "unknown_key" and SPEC_MODULE in finding.numbers]
    undeclared = [
        msgspec.structs.replace(finding, severity="refuse")
        for finding in foreign
        if finding.numbers["key"] not in host.connector_extra_keys
    ]
    return undeclared + [finding for finding in found if finding not in foreign]


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
    if PROMPT_ONLY in host.connector_extra_config:
        raise UnusableInput(
            f"host {host_name}: {PROMPT_ONLY}={host.connector_extra_config[PROMPT_ONLY]!r} of "
            f"kvtrial_connector_extra_config changes what the tier keeps, which protocols measure as the engine has "
            f"it; take it out, or try it as an arm of a protocol of your own."
        )
    for name, arm in protocol.arms.items():
        args = merged_args(host, arm)
        if args.get(CACHING) is False or args.get(f"no-{CACHING}"):
            raise UnusableInput(
                f"host {host_name}, arm {name}: prefix caching is off, so nothing is cached that could be evicted and "
                f"return; take {CACHING} out of kvtrial_engine_args and the protocol."
            )
    for gate in protocol.gates:
        # Their parameters may be sizes, which a host sets.
        read_parameters(protocol, gate)
    # Room in RAM is counted below, with the engine's own beside the tier's.
    refusals = [f for f in findings(host, protocol) if f.severity == "refuse" and f.class_ != "host_memory_too_small"]
    # Two interfaces at once make an arm look wrong in other ways too; the cause is named, not what follows from it.
    for finding in sorted(refusals, key=lambda finding: finding.class_ != "mixed_interfaces"):
        where = f"host {host_name}, arm {finding.arm}" if finding.arm else f"host {host_name}"
        raise UnusableInput(f"{where}: {ended(finding.reason)} {finding.do}")
    if "ram_available_bytes" in host.facts:
        _refuse_memory(host_name, host, protocol)


def _refuse_memory(host_name: str, host: HostInput, protocol: Protocol) -> None:
    tier = max(_tier_bytes(host, protocol).values(), default=0)
    reserve = _ram_reserve(host)
    engine = _engine_ram(host, protocol)
    cache = _kv_cache_ram(host, protocol)
    available, needed = int(host.facts["ram_available_bytes"]), tier + reserve + engine + cache
    if available < needed:
        kv = f"KV cache {cache}, " if cache else ""
        raise UnusableInput(
            f"host {host_name}: {available} bytes of RAM are available, {needed} are needed (tier {tier}, {kv}engine "
            f"{engine}, reserve {reserve}); free some, or lower the size {'of the KV cache or ' if cache else ''}"
            f"tier_bytes."
        )


def _kv_cache_ram(host: HostInput, protocol: Protocol) -> int:
    """RAM of the KV cache on a CPU host, where it is no GPU's: the largest of all arms."""
    if host.backend != "cpu":
        return 0
    found = [0]
    for arm in protocol.arms.values():
        args, own = merged_args(host, arm), host_of_arm(host, arm)
        block = int(args.get("block-size", DEFAULT_BLOCK_TOKENS[host.backend]))
        blocks = _known_blocks(own, args, block) or 0
        found.append(blocks * block * own.model.kv_bytes_per_token * (arm.replicas or 1))
    return max(found)


def _engine_ram(host: HostInput, protocol: Protocol) -> int:
    """RAM of an engine's processes without its tier: so much for each worker that an arm has, the most of all arms."""
    workers = max(
        (arm.replicas or 1) * ranks(args) * int(args.get("data-parallel-size", 1))
        for arm in protocol.arms.values()
        for args in [merged_args(host, arm)]
    )
    return ENGINE_RAM_BYTES[host.backend] * workers


def _host_plan(
    name: str,
    request: Request,
    protocol: Protocol,
    traces: Traces,
    known: dict[bytes, RunNeeds],
    works: Mapping[str, Protocol],
) -> tuple[HostPlan, float]:
    """The host's part of the plan, and the seconds that it will take.

    `known`: needs that were counted already. `works`: the protocol as arms have it that send something else.
    """
    host = request.hosts[name]
    refuse(name, host, protocol)
    launches = _launches(host, protocol)
    _refuse_gpus(name, host, launches)
    capacity = _capacity(name, host, protocol)
    runs = _runs(name, request.seed, host, protocol, capacity.block_tokens, traces, works)
    needs = _needs(request.seed, host, protocol, capacity.block_tokens, traces, known)
    extras = _extras(host, protocol)
    for run in runs[: len(protocol.arms)]:
        declared = str(protocol.gates.get("working_set", {}).get("tier_scope", "run"))
        refuse_working_set(
            name, host, protocol, run.arm, needs, capacity, tier_scope(declared, extras.get(run.arm, {}))
        )
    _refuse_length(name, host, protocol, needs)
    seconds = _seconds(runs, needs, host.backend) + sum(
        answer_seconds(run.phases, ASSUMED_STEP_SECONDS[host.backend]) for run in runs if not run.spare
    )
    silence = max(LEAST_CONTROLLER_GONE_SECONDS, VISITS_MISSED * host.visited_every_seconds)
    computed = {"deadline_seconds": max(1800.0, 3 * seconds), "controller_gone_seconds": silence}
    limits = {**DEFAULT_LIMITS, **computed, **host.limits}
    allowed = [name for name in Limits.__struct_fields__ if name != "foreign_cpu_share_max"]
    if unknown := set(limits) - set(allowed):
        raise UnusableInput(f"limit {sorted(unknown)[0]} is not known; kvtrial_limits takes {', '.join(allowed)}.")
    for limit, value in limits.items():
        if not float(value) > 0:
            raise UnusableInput(
                f"limit {limit}={value} of kvtrial_limits must be above 0; give seconds, bytes or a share."
            )
    _refuse_short_silence(name, host, float(limits["controller_gone_seconds"]))
    limits |= {"ram_reserve_bytes": _ram_reserve(host), "engine_ram_bytes": _engine_ram(host, protocol)}
    limits["disk_reserve_bytes"] = int(limits["disk_reserve_bytes"])
    plan = HostPlan(
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
        client_cpus=host.client_cpus,
        ladder=_ladder_plan(host, protocol, capacity, runs, launches) if protocol.ladder else UNSET,
        supervisor=host.supervisor,
        arm_models={arm: model_of(host_of_arm(host, spec).model) for arm, spec in protocol.arms.items() if spec.model},
    )
    return plan, seconds


def _refuse_short_silence(name: str, host: HostInput, silence: float) -> None:
    """Raise UnusableInput where a host program would take a controller that is at work for gone."""
    least = VISITS_MISSED * host.visited_every_seconds
    if host.if_controller_gone == "stop" and silence < least:
        raise UnusableInput(
            f"host {name}: controller_gone_seconds={silence:g} of kvtrial_limits would end a host program beside a "
            f"controller that comes by every {host.visited_every_seconds:g} s (kvtrial_sweep_longest_seconds, and the "
            f"time of a sweep); give {least:g} or more, or shorter pauses."
        )


def _refuse_gpus(name: str, host: HostInput, launches: dict[str, Launch]) -> None:
    """Raise UnusableInput for an arm that takes more GPUs than the host has, or whose replicas nothing can start."""
    for arm, launch in launches.items():
        if launch.also and host.supervisor == "systemd":
            raise UnusableInput(
                f"host {name}, arm {arm}: {len(launch.engines())} replicas can't be supervised by systemd, an arm has "
                f"one unit; set kvtrial_supervisor=process for this protocol."
            )
        needs = sum(engine_gpus(engine.argv) for engine in launch.engines())
        if host.backend == "cuda" and "gpus" in host.facts and needs > len(host.facts["gpus"]):
            raise UnusableInput(
                f"host {name}, arm {arm}: its engines take {needs} GPUs (replicas × tensor, pipeline and data "
                f"parallel), this host has {len(host.facts['gpus'])}; use a host with more, or less parallelism."
            )


def _needs(
    seed: int, host: HostInput, protocol: Protocol, block_tokens: int, traces: Traces, known: dict[bytes, RunNeeds]
) -> RunNeeds:
    """What a run of the host needs. All arms, pairs and hosts of the same sizes send prompts of the same lengths.

    So the phases of a nameless host are counted, once: a trace may have a million requests and a fleet many hosts.
    """
    phases = _phases("", seed, 1, host, protocol, block_tokens, traces)
    key = msgspec.json.encode((phases, block_tokens))
    if key not in known:
        known[key] = run_needs(phases, block_tokens, traces.folder)
    return known[key]


def _ladder_plan(
    host: HostInput, protocol: Protocol, capacity: Capacity, runs: list[RunPlan], launches: Mapping[str, Launch]
) -> LadderPlan:
    """The levels, and the onset predicted for each arm whose KV cache has a known size."""
    onset, usable, phase_of = {}, {}, {}
    levels: dict[str, int] = {}
    for run in runs[: len(protocol.arms)]:
        steps = [phase for phase in run.phases if is_level(protocol, phase.name)]
        levels, phase_of[run.arm] = {phase.name: phase.concurrency for phase in steps}, steps[0]
        args = merged_args(host, protocol.arms[run.arm])
        blocks = _known_blocks(host_of_arm(host, protocol.arms[run.arm]), args, capacity.block_tokens)
        # Which of several engines gets a request is for vLLM to decide, so nothing is predicted of them together.
        if blocks is not None and int(args.get("data-parallel-size", 1)) == 1:
            usable[run.arm] = blocks - RESERVED_BLOCKS
            of_one = arm_onset(host, run.arm, launches[run.arm], steps[0], usable[run.arm], capacity.block_tokens)
            if together := onset_of_replicas(of_one, protocol.arms[run.arm].replicas or 1):
                onset[run.arm] = together
    onset |= {
        arm: found
        for arm, launch in launches.items()
        if arm not in usable and protocol.control in onset
        if (found := own_pool_onset(host, launch, phase_of[arm], onset[protocol.control], capacity.block_tokens))
    }
    return LadderPlan(levels=levels, onset=onset, usable_gpu_blocks=usable)


def _launches(host: HostInput, protocol: Protocol) -> dict[str, Launch]:
    """The launch of each arm, with the guards of this version. Raises UnusableInput."""
    return _guarded({arm: render(host, arm, spec) for arm, spec in protocol.arms.items()}, host)


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
            launches = {name: _with_guard(launch, guard) for name, launch in launches.items()}
    return launches


def _with_guard(launch: Launch, guard: Guard) -> Launch:
    return msgspec.structs.replace(
        launch,
        argv=launch.argv if _holds(launch.argv, guard.args) else launch.argv + guard.args,
        env={**launch.env, **guard.env},
        also=[_with_guard(engine, guard) for engine in launch.also],
    )


def _holds(argv: list[str], words: list[str]) -> bool:
    """Whether `words` stand in `argv` side by side, in their order: an option is nothing without its own value."""
    return any(argv[at : at + len(words)] == words for at in range(len(argv) - len(words) + 1))


def _ram_reserve(host: HostInput) -> int:
    """RAM that must stay free: as declared for the host, else the larger of 8 GiB and a tenth."""
    return ram_reserve(int(host.facts.get("ram_total_bytes", 0)), host.ram_reserve_bytes)


def _tier_bytes(host: HostInput, protocol: Protocol) -> dict[str, int]:
    return {name: int(extra["cpu_bytes_to_use"]) for name, extra in _extras(host, protocol).items()
            if "cpu_bytes_to_use" in extra}  # fmt: skip


def _extras(host: HostInput, protocol: Protocol) -> dict[str, dict[str, Any]]:
    configs = {name: merged_args(host, arm).get(TRANSFER) for name, arm in protocol.arms.items()}
    return {name: config.get("kv_connector_extra_config", {}) for name, config in configs.items() if config}


def _capacity(name: str, host: HostInput, protocol: Protocol) -> Capacity:
    args = merged_args(host, protocol.arms[protocol.control])
    block = int(args.get("block-size", DEFAULT_BLOCK_TOKENS[host.backend]))
    blocks = _gpu_blocks(name, host, args, block, dashed(protocol.arms[protocol.control].args))
    extras = _extras(host, protocol)
    return Capacity(
        block_tokens=block,
        usable_gpu_blocks=blocks - RESERVED_BLOCKS,
        kv_bytes_per_token=host.model.kv_bytes_per_token,
        tier_bytes=_tier_bytes(host, protocol),
        chunk_tokens={arm: int(extra.get("block_size", block * int(extra.get("blocks_per_chunk", 1))))
                      for arm, extra in extras.items()},
    )  # fmt: skip


def _known_blocks(host: HostInput, args: dict[str, Any], block: int) -> int | None:
    if POOL_BLOCKS in args:
        return int(args[POOL_BLOCKS])
    if POOL_BYTES in args:
        # The option is of each rank, which holds its share of every token's bytes.
        size = human_int(str(args[POOL_BYTES]), POOL_BYTES) * ranks(args)
        return size // (block * host.model.kv_bytes_per_token)
    return None


def _gpu_blocks(name: str, host: HostInput, args: dict[str, Any], block: int, own: dict[str, Any]) -> int:
    """Blocks of the GPU KV cache; `own`: what the control sets itself, so that the inventory can't."""
    if known := _known_blocks(host, args, block):
        return known
    can = [option for option in (POOL_BLOCKS, POOL_BYTES) if option not in own]
    do = f"set {' or '.join(can)} in kvtrial_engine_args" if can else "set one of them in every arm of the protocol"
    raise UnusableInput(
        f"host {name}: the size of the GPU KV cache is left to the engine, so nobody can say how much pressure "
        f"evicts a prefix; {do}."
    )


def refuse_working_set(
    name: str,
    host: HostInput,
    protocol: Protocol,
    arm: str,
    needs: RunNeeds,
    capacity: Capacity,
    scope: TierScope = "run",
) -> None:
    """Raise UnusableInput, with the numbers and the smallest change, where the workload can't show anything."""
    rule = protocol.gates.get("working_set")
    if rule is None:
        return
    for phase, need in needs.phases.items():
        if is_pressure(phase):
            least = float(rule.get("pressure_share_min", 1.2))
            _refuse_pressure(name, host, protocol, phase, need, capacity, least)
    if arm in capacity.chunk_tokens:
        stored = needs.held.chunks(capacity.chunk_tokens[arm], scope)
        _refuse_tier(name, arm, stored, capacity, float(rule.get("tier_share_max", 0.8)), scope)
    for phase, need in needs.phases.items():
        if is_resident(phase) and need.distinct_blocks > capacity.usable_gpu_blocks:
            raise UnusableInput(
                f"host {name}: {phase} asks for {need.distinct_blocks} blocks that should still be in the GPU KV "
                f"cache, which holds {capacity.usable_gpu_blocks}; use fewer prompts there, or "
                f"{_pool_of(need.distinct_blocks + RESERVED_BLOCKS, 'more', host, protocol, capacity)}."
            )
    edges = [need.edge_tokens for need in needs.phases.values() if need.edge_tokens is not None]
    if edges:
        raise UnusableInput(
            f"host {name}: prompts of {min(edges)} tokens end at the edge of a block of {capacity.block_tokens}; the "
            f"GPU cache then recomputes one block and the tier does not. Set prompt_tokens to "
            f"{min(edges) + capacity.block_tokens // 2}."
        )


def _refuse_length(name: str, host: HostInput, protocol: Protocol, needs: RunNeeds) -> None:
    """Raise UnusableInput where a prompt and its answer are longer than the engine was told to serve."""
    phase, need = max(((phase, need.longest_tokens) for phase, need in needs.phases.items()), key=lambda item: item[1])
    for arm, spec in protocol.arms.items():
        given = str(merged_args(host, spec).get("max-model-len", "auto"))
        # The engine takes its own from the model then, which isn't known here.
        if given in ("auto", "-1"):
            continue
        length = human_int(given, "max-model-len")
        if need > length:
            sizes = [
                size for size in protocol.sizes if size.endswith("model_tokens") and protocol.sizes[size] == length
            ]
            if "max-model-len" in dashed(spec.args) and sizes:
                cure = f"{sizes[0]} to {need} or more in kvtrial_sizes"
            else:
                cure = f"max-model-len to {need} or more in kvtrial_engine_args"
            raise UnusableInput(
                f"host {name}, arm {arm}: a request of {phase} has {need} tokens with its answer, --max-model-len is "
                f"{length}; set {cure}, or use shorter prompts."
            )


def _refuse_pressure(
    name: str, host: HostInput, protocol: Protocol, phase: str, need: PhaseNeed, capacity: Capacity, least: float
) -> None:
    if need.blocks < least * capacity.usable_gpu_blocks:
        size = next((size for size in (phase, "pressure") if size in protocol.sizes), None)
        enough = math.ceil(least * capacity.usable_gpu_blocks / (need.blocks / need.requests))
        more = f", or send {enough} prompts or more there"
        if size:
            more += f": -e '{json.dumps({'kvtrial_sizes': {**host.sizes, size: enough}})}'"
        raise UnusableInput(
            f"host {name}: {phase} takes {need.blocks} blocks, the GPU KV cache holds "
            f"{capacity.usable_gpu_blocks} ({capacity.usable_gpu_blocks * capacity.block_tokens} tokens); below "
            f"{least:g} times that the prefix stays there and the GPU answers, so no tier is ever asked. To change "
            f"that, {_pool_of(int(need.blocks / least) + RESERVED_BLOCKS, 'less', host, protocol, capacity)}{more}."
        )


def _pool_of(blocks: int, or_what: str, host: HostInput, protocol: Protocol, capacity: Capacity) -> str:
    """How to bring the GPU KV cache to `blocks` blocks, by what the protocol's arms leave to the inventory."""
    own = dashed(protocol.arms[protocol.control].args)
    if POOL_BLOCKS not in own:
        return f"set {POOL_BLOCKS} to {blocks} or {or_what} in kvtrial_engine_args of the inventory"
    if own[POOL_BLOCKS] is None and POOL_BYTES not in own:
        pool_bytes = blocks * capacity.block_tokens * host.model.kv_bytes_per_token // ranks(dashed(host.engine_args))
        return (
            f"set {POOL_BYTES} to {pool_bytes} or {or_what} in kvtrial_engine_args of the inventory (protocol "
            f"{protocol.name} takes {POOL_BLOCKS} out)"
        )
    return f"set {POOL_BLOCKS} to {blocks} or {or_what} in every arm of protocol {protocol.name}"


def _refuse_tier(host: str, arm: str, stored: int, capacity: Capacity, most: float, scope: TierScope) -> None:
    chunk_tokens = capacity.chunk_tokens[arm]
    held = tier_chunks(capacity.tier_bytes[arm], chunk_tokens, capacity.kv_bytes_per_token)
    if stored > most * held:
        chunk_bytes = chunk_tokens * capacity.kv_bytes_per_token
        raise UnusableInput(
            f"host {host}: arm {arm} stores {stored} chunks of {chunk_tokens} tokens"
            f"{' in one block of phases' if scope == 'block' else ''}, its "
            f"tier of {capacity.tier_bytes[arm]} bytes holds {held}; above {most:g} of the tier a cyclic "
            f"set loses everything (LRU). Set tier_bytes to {math.ceil(stored / most) * chunk_bytes} or "
            f"more, or use fewer or shorter prompts."
        )


def _runs(
    host_name: str,
    seed: int,
    host: HostInput,
    protocol: Protocol,
    block_tokens: int,
    traces: Traces,
    works: Mapping[str, Protocol] | None = None,
) -> list[RunPlan]:
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
                    phases=_phases(
                        host_name, seed, number, host, (works or {}).get(arm, protocol), block_tokens, traces
                    ),
                )
            )
    return runs


def _phases(
    host_name: str, seed: int, pair: int, host: HostInput, protocol: Protocol, block_tokens: int, traces: Traces
) -> list[PhasePlan]:
    """The phases of a run of pair `pair`: the same for every arm; new prompts and salts each pair."""
    seeds = Seeds(shapes=str(seed), tokens=f"{seed}/{host_name}/{pair}")
    ids = (host.model.low_token_id, host.model.high_token_id)
    sets = {name: _prompt_plan(name, prompts, seeds.tokens, ids) for name, prompts in protocol.prompt_sets.items()}
    used = {phase.workload for phase in protocol.phases}
    workloads = {
        name: workload_plan(name, workload, seeds, sets, ids, block_tokens, traces)
        for name, workload in (protocol.workloads or {}).items()
        if name in used
    }
    plans = [_phase(phase, pair, sets, workloads, seeds) for phase in protocol.phases]
    if protocol.ladder:
        plans = [_watched(plan, protocol) for plan in plans]
    blocks = list(dict.fromkeys(plan.block for plan in plans))
    alternating = [block for block in blocks if block in protocol.alternate_blocks]
    if pair % 2 == 0:
        swapped = iter(alternating[::-1])
        blocks = [next(swapped) if block in alternating else block for block in blocks]
    return [plan for block in blocks for plan in plans if plan.block == block]


def _prompt_plan(name: str, prompts: PromptSet, seed: str, ids: tuple[int, int]) -> PromptPlan:
    return PromptPlan(
        name=name,
        seed=f"{seed}/{name}",
        count=int(prompts.count),
        tokens=int(prompts.tokens),
        suffix_tokens=int(prompts.suffix_tokens),
        low_id=ids[0],
        high_id=ids[1],
    )


def _phase(
    phase: Phase, pair: int, sets: dict[str, PromptPlan], workloads: dict[str, WorkloadPlan], seeds: Seeds
) -> PhasePlan:
    prompts = sets[phase.prompts] if phase.prompts else None
    take = int(phase.take)
    chosen = list(range(prompts.count)) if prompts else []
    chosen = chosen[:take] if take > 0 else chosen[take:] if take < 0 else chosen
    assert isinstance(phase.concurrency, int), "ladders are phases by now"
    return PhasePlan(
        name=phase.name,
        block=phase.block,
        prompts=prompts,
        indices=chosen * phase.repeat,
        salt=f"kvtrial.p{pair}.{phase.salt}",
        max_tokens=int(phase.max_tokens or 0),
        concurrency=phase.concurrency,
        kv_transfer_params=phase.kv_transfer_params,
        workload=workloads[phase.workload] if phase.workload else None,
        arrivals=arrivals_plan(phase, f"{seeds.tokens}/arrivals"),
        stop_after=int(phase.stop_after or 0),
        reset=bool(phase.reset),
    )


def _watched(plan: PhasePlan, protocol: Protocol) -> PhasePlan:
    """A level of the ladder with what is watched and kept of it."""
    if not protocol.ladder or not is_level(protocol, plan.name):
        return plan
    return msgspec.structs.replace(
        plan, watch_seconds=protocol.ladder.watch_seconds, stall_multiple=protocol.ladder.stall_multiple
    )


def _seconds(runs: list[RunPlan], needs: RunNeeds, backend: str) -> float:
    """What the planned runs will take; an open loop at least until its last request is due."""
    planned = sum(not run.spare for run in runs)
    rate = ASSUMED_TOKENS_PER_SECOND[backend]
    waits = sum(max(0.0, (need.last_seconds or 0.0) - need.prompt_tokens / rate) for need in needs.phases.values())
    tokens = planned * sum(need.prompt_tokens for need in needs.phases.values())
    return planned * (ASSUMED_START_SECONDS[backend] + 3.0) + tokens / rate + planned * waits


def estimate(plan: HostPlan, seconds: float) -> Estimate:
    """What the campaign will take on a host, from what such hosts took before."""
    pairs = len({run.pair for run in plan.runs if not run.spare})
    deviation = ASSUMED_LOG_RATIO_SD[plan.backend]
    pools = [plan.capacity.usable_gpu_blocks, *(plan.ladder.usable_gpu_blocks.values() if plan.ladder else ())]
    cache = max(pools) * plan.capacity.block_tokens * plan.capacity.kv_bytes_per_token if plan.backend == "cpu" else 0
    return Estimate(
        runs=sum(not run.spare for run in plan.runs),
        seconds=seconds,
        ram_bytes=plan.limits.engine_ram_bytes + max(plan.capacity.tier_bytes.values(), default=0) + cache,
        pairs=pairs,
        log_ratio_sd_assumed=deviation,
        mde_ratio=mde(deviation, pairs),
    )
