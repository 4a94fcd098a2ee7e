"""A declared ladder as the plan states it: comparisons, levels around the predicted onset, what arms need. Pure."""

import itertools
from collections.abc import Sequence

from msgspec import UNSET
from msgspec.structs import replace

from kvtrial.analysis.inputs import HostInput
from kvtrial.analysis.objectives import refuse_objectives
from kvtrial.analysis.onset import (
    TOO_FEW,
    Length,
    ladder_levels,
    onset_of_own_pool,
    onset_words,
    predict_onset,
    refuse_ladder,
)
from kvtrial.record.admission import admission
from kvtrial.record.errors import UnusableInput
from kvtrial.record.launch import async_scheduling, engine_gpus, parse_vllm_args
from kvtrial.record.plan import HostPlan, Launch, OnsetPlan, PhasePlan
from kvtrial.record.protocol import Arm, Comparison, Ladder, Phase, Protocol, Trace
from kvtrial.record.record import PhaseRecord
from kvtrial.record.versions import within
from kvtrial.record.workload import request_shapes

ALL_LEVELS = "ladder"
ABOVE_ONSET = "above_onset"
QUEUEING = "queueing"
GROUPS = (ALL_LEVELS, ABOVE_ONSET, QUEUEING)
"""Phases of a comparison that stand for several levels. The blocks of the levels' phases carry these names."""
QUEUE_METRIC = "queue_seconds_per_request"
"""What decides on a ladder that can only queue."""
MEMORY_SHARE = "gpu-memory-utilization"
PREEMPTIONS_GATE = "preemptions_add_up"
"""Without it nothing holds the counts that a ladder is about."""
LENGTHS_READ_MAX = 100_000


def with_ladder_comparisons(protocol: Protocol) -> Protocol:
    """The protocol with the comparisons that its ladder declares for each arm. Raises UnusableInput."""
    ladder = protocol.ladder
    if not ladder:
        return protocol
    _check_ladder(protocol, ladder)
    variants = [arm for arm in protocol.arms if arm != protocol.control]
    made = [
        Comparison(
            arm=arm,
            against=protocol.control,
            phase=each.phase,
            metric=each.metric,
            role="secondary" if each.role == "primary" and number else each.role,
            effect_scale=each.effect_scale,
            margin=each.margin,
        )
        for number, arm in enumerate(variants)
        for each in ladder.each_arm
    ]
    return replace(protocol, comparisons=[*protocol.comparisons, *made])


def _check_ladder(protocol: Protocol, ladder: Ladder) -> None:
    where = f"protocol {protocol.name}: ladder"
    phase = next((phase for phase in protocol.phases if phase.name == ladder.phase), None)
    if phase is None or phase.concurrency != 1 or phase.arrivals:
        raise UnusableInput(
            f"{where} names the phase {ladder.phase}, which must stand among the phases, without a concurrency and "
            f"without arrivals of its own; the ladder gives it its levels."
        )
    if phase.workload and isinstance((protocol.workloads or {}).get(phase.workload), Trace):
        raise UnusableInput(f"{where} can't replay a trace at several levels; give its phase prompts, or lengths.")
    for arm in ladder.default_arms:
        if arm not in protocol.arms:
            raise UnusableInput(f"{where} runs by default the arm {arm}, which the protocol does not have.")
    refuse_objectives(ladder.objectives, f"{where}: objectives")
    if not ladder.stall_multiple > 1 or not 0.05 <= ladder.watch_seconds <= 60:
        raise UnusableInput(
            f"{where}: stall_multiple={ladder.stall_multiple} must be above 1, and watch_seconds="
            f"{ladder.watch_seconds} from 0.05 to 60."
        )


def with_primary(protocol: Protocol) -> Protocol:
    """A ladder's protocol whose first arm was not chosen: the first chosen one's comparison decides."""
    if not protocol.ladder or any(comparison.role == "primary" for comparison in protocol.comparisons):
        return protocol
    metrics = {(each.phase, each.metric) for each in protocol.ladder.each_arm if each.role == "primary"}
    comparisons = list(protocol.comparisons)
    for at, comparison in enumerate(comparisons):
        if (comparison.phase, comparison.metric) in metrics:
            comparisons[at] = replace(comparison, role="primary")
            break
    return replace(protocol, comparisons=comparisons)


def with_ladder_gates(protocol: Protocol) -> Protocol:
    """A ladder's protocol with the gates that every ladder is held to, whatever release made its plan."""
    if not protocol.ladder or PREEMPTIONS_GATE in protocol.gates:
        return protocol
    return replace(protocol, gates={**protocol.gates, PREEMPTIONS_GATE: {"later_release": True}})


def refuse_arms(name: str, host: HostInput, protocol: Protocol) -> None:
    """Raise UnusableInput, with its reason, for the first arm that a host can't run."""
    for arm, declared in protocol.arms.items():
        lacking = _lacking(host, declared)
        if lacking is not None:
            why = f"{declared.requires.why.rstrip('.')}; " if declared.requires else ""
            rest = [other for other in protocol.arms if other not in (arm, protocol.control)]
            choose = f"choose arms that can run here (-e arms={','.join(rest)})" if rest else "choose another arm"
            raise UnusableInput(f"host {name}, arm {arm} can't run: {lacking}; {why}{choose}.")


def _lacking(host: HostInput, declared: Arm) -> str | None:
    """What a host lacks for an arm, as a sentence without its full stop."""
    if declared.model and host.smaller_model is None:
        return "the inventory names no smaller model (kvtrial_smaller_model)"
    needs = declared.requires
    if not needs:
        return None
    gpus = len(host.facts.get("gpus", [])) if "gpus" in host.facts else None
    if needs.backend is not None and host.backend != needs.backend:
        return f"it needs the {needs.backend} engine, this host runs the {host.backend} one"
    if needs.gpus and gpus is not None and gpus < needs.gpus:
        return f"it needs {needs.gpus} GPUs, this host has {gpus}"
    if needs.since_vllm is not None and not within(host.vllm_version, needs.since_vllm, None):
        return f"it needs vLLM {needs.since_vllm} or newer, this host has {host.vllm_version}"
    return None


def lengths_of(phase: PhasePlan, ahead: bool = False) -> list[Length]:
    """What the requests of a phase really take, in their order.

    `ahead`: the scheduler is a step ahead of the tokens (async scheduling), so that an answer which ends by its own
    stop, before its limit, gets a slot for one token more. On a GPU this was not measured; vLLM's scheduler does so.
    """
    lengths: list[Length] = []
    for shape in request_shapes(phase):
        if len(lengths) == LENGTHS_READ_MAX:
            break
        answer = shape.max_tokens
        if phase.stop_after and phase.stop_after < answer:
            answer = phase.stop_after + ahead
        lengths.append(Length(shape.prompt_tokens, answer))
    return lengths


def lengths_of_facts(phases: Sequence[PhaseRecord], ahead: bool = False) -> list[Length]:
    """The same from a record: what the requests of a level took; `ahead`: with a slot more where a stop ended one."""
    return [
        Length(request.prompt_tokens, request.output_tokens + (ahead and request.output_tokens < request.max_tokens))
        for request in (phases[0].requests if phases else [])
        if request.prompt_tokens is not None and request.output_tokens
    ]


def refuse_unpredictable(name: str, arm: str, launch: Launch, version: str) -> None:
    """Raise UnusableInput for a launch of a ladder of which no onset could be predicted."""
    given = parse_vllm_args(launch.argv).options
    options = {name.partition(".")[0]: value for name, value in given.items()}
    known = admission()
    for option, does in known.unpredicted.items():
        switched_off = option.startswith("no-") and options.get(option.removeprefix("no-")) is False
        if switched_off or options.get(option) not in (None, False, "0", "0.0"):
            raise UnusableInput(
                f"host {name}, arm {arm}: --{option} {does}, so where preemption begins can't be predicted; take it "
                f"out for a ladder."
            )
    if not within(version, known.whole_prompts.since, known.whole_prompts.until):
        raise UnusableInput(
            f"host {name}: vLLM {version} lets a prompt in before all of it has room, so where preemption begins can't "
            f"be predicted; a ladder needs vLLM {known.whole_prompts.since} or newer."
        )


def refuse_reuse(name: str, phase: PhasePlan, block_tokens: int) -> None:
    """Raise UnusableInput for a ladder whose requests find each other's prefixes in the GPU's cache.

    They would take fewer blocks than is predicted, and the hits that show whether a level began empty would be theirs.
    """
    seen: set[str] = set()
    for shape in itertools.islice(request_shapes(phase), LENGTHS_READ_MAX):
        shared = f"begin with the same {shape.shared_tokens} tokens" if shape.shared_tokens >= block_tokens else ""
        if what := shared or ("repeat a prompt, or go on from one" if shape.identity in seen else ""):
            raise UnusableInput(
                f"host {name}: the requests of phase {phase.name} {what}, and a ladder needs prompts of their own: "
                f"those that share a prefix take fewer blocks than is predicted; give it lengths without "
                f"shared_prefix_tokens, or prompts that are sent once."
            )
        seen.add(shape.identity)


def arm_onset(
    host: HostInput, arm: str, launch: Launch, phase: PhasePlan, usable_blocks: int, block_tokens: int
) -> OnsetPlan:
    """The onset predicted for an arm. Raises UnusableInput where a request does not fit into its KV cache."""
    parsed = parse_vllm_args(launch.argv)
    ahead = host.backend == "cuda" and async_scheduling(parsed, host.vllm_version)
    try:
        return predict_onset(
            lengths_of(phase, ahead),
            usable_blocks,
            block_tokens,
            parsed.size("max-num-seqs"),
            parsed.size("max-num-batched-tokens"),
        )
    except UnusableInput as error:
        raise UnusableInput(f"arm {arm}: {error}") from None


def own_pool_onset(
    host: HostInput, launch: Launch, phase: PhasePlan, control: OnsetPlan, block_tokens: int
) -> OnsetPlan | None:
    """The onset of an arm whose engine sizes its KV cache by a share of a GPU's memory; None for another arm.

    Two options change there and one thing does: vLLM looks at no share where a number of blocks is set, so that this
    has to go as well.
    """
    parsed = parse_vllm_args(launch.argv)
    share = parsed.text(MEMORY_SHARE)
    several = (parsed.size("data-parallel-size") or 1) > 1 or launch.also
    if share is None or several or {"num-gpu-blocks-override", "kv-cache-memory-bytes"} & parsed.options.keys():
        return None
    why = (
        f"{MEMORY_SHARE} {share} in place of a set KV cache, two options for one change, since the share counts only "
        f"without it; the engine sizes its KV cache itself, which is to be no less than the control's"
    )
    gpus = host.facts.get("gpus") or [{}]
    memory = gpus[0].get("memory_total_bytes") if gpus else None
    of_most = None
    if isinstance(memory, int):
        most = int(memory * float(share)) * engine_gpus(launch.argv) // (block_tokens * host.model.kv_bytes_per_token)
        why += f" and at most {most} blocks, were there nothing else in it"
        of_most = arm_onset(host, launch.arm, launch, phase, most, block_tokens)
    return onset_of_own_pool(control, of_most, why)


def onset_of_replicas(of_one: OnsetPlan, replicas: int) -> OnsetPlan | None:
    """The onset of several engines among which requests are split evenly; None where that of one is no exact one.

    A request goes to the engine with the fewest in flight, so all of them reach what one bears before any has more.
    """
    if replicas == 1:
        return of_one
    if of_one.kind == "range":
        return None
    last = replicas * of_one.last_safe
    low = None if of_one.kind == "never" else last + 1
    return replace(
        of_one,
        low=low,
        high=low,
        last_safe=last,
        why=f"{replicas} engines that share the requests; of each: {of_one.why}",
    )


def answer_seconds(phases: Sequence[PhasePlan], step_seconds: float) -> float:
    """What the answers of a ladder's levels take, at this time for a step of the engine."""
    steps = 0.0
    for phase in phases:
        if phase.stall_multiple:
            steps += sum(length.answer_tokens for length in lengths_of(phase)) / phase.concurrency
    return steps * step_seconds


def refuse_unknown_limit(name: str, launch: Launch, levels: Sequence[int]) -> None:
    """Raise UnusableInput for a ladder that goes beyond the sequences that an engine may run which sets none itself."""
    least = admission().sequences_at_least
    if parse_vllm_args(launch.argv).size("max-num-seqs") is None and max(levels) > least:
        raise UnusableInput(
            f"host {name}: the ladder goes to {max(levels)} in flight and max-num-seqs is not set, of which the engine "
            f"may take {least}; set max-num-seqs in kvtrial_engine_args."
        )


def levels_for(name: str, ladder: Ladder, onset: OnsetPlan, requests: int) -> list[int]:
    """The levels on a host. Raises UnusableInput for a ladder that shows nothing, or a mix that can only queue.

    Who gives the levels of such a mix wants it run: it is then labelled in the plan's announcement.
    """
    if ladder.levels:
        _refuse_twice(name, ladder.levels)
        if onset.kind == "never" and max(ladder.levels) <= onset.last_safe and TOO_FEW not in onset.why:
            raise UnusableInput(
                f"host {name}: {onset_words(onset)}; up to {onset.last_safe} in flight all run at once, so the ladder "
                f"{sorted(ladder.levels)} shows not even a queue; give levels above {onset.last_safe} as well."
            )
        if max(ladder.levels) > requests:
            raise UnusableInput(
                f"host {name}: the ladder goes to {max(ladder.levels)} requests in flight and sends {requests} at each "
                f"level; set the size requests to {max(ladder.levels)} or more (kvtrial_sizes)."
            )
        try:
            refuse_ladder(ladder.levels, onset)
        except UnusableInput as error:
            raise UnusableInput(f"host {name}: {error}") from None
        return sorted(ladder.levels)
    if TOO_FEW in onset.why:
        raise UnusableInput(f"host {name}: {onset_words(onset)} (kvtrial_sizes).")
    if onset.kind == "never":
        raise UnusableInput(
            f"host {name}: {onset_words(onset)}. Let the answers grow against the KV cache (longer answers, shorter "
            f"prompts, more sequences or fewer blocks), or give the levels of a ladder that only queues "
            f"(kvtrial_ladder)."
        )
    try:
        return ladder_levels(onset, requests)
    except UnusableInput as error:
        raise UnusableInput(f"host {name}: {error}") from None


def _refuse_twice(name: str, levels: Sequence[int]) -> None:
    """Raise UnusableInput for a level that stands twice, or with nothing in flight."""
    if twice := sorted({level for level in levels if levels.count(level) > 1}):
        raise UnusableInput(f"host {name}: kvtrial_ladder has {twice[0]} twice; give each level once.")
    if min(levels) < 1:
        raise UnusableInput(
            f"host {name}: kvtrial_ladder has {min(levels)}, and a level has 1 request in flight or more; leave it out."
        )


def with_levels(protocol: Protocol, levels: Sequence[int], onset: OnsetPlan) -> Protocol:
    """The protocol with a phase for each level in place of the ladder's phase: in one salt, after a reset.

    With one salt only the reset keeps a level from finding what the level before it left, so hits show whether it did.
    A ladder that can only queue is compared by the queue, over the levels with more in flight than run at once.
    """
    ladder = protocol.ladder
    assert ladder
    if onset.kind == "never":
        protocol = _by_the_queue(protocol)
    phases: list[Phase] = []
    for phase in protocol.phases:
        if phase.name != ladder.phase:
            phases.append(phase)
            continue
        phases += [
            replace(
                phase,
                name=f"{phase.name}_{level}",
                block=_group(level, onset),
                concurrency=level,
                reset=True,
            )
            for level in levels
        ]
    return replace(protocol, phases=phases)


def _group(level: int, onset: OnsetPlan) -> str:
    if onset.kind == "never":
        return QUEUEING if level > onset.last_safe else ALL_LEVELS
    return ABOVE_ONSET if onset.high is not None and level >= onset.high else ALL_LEVELS


def _by_the_queue(protocol: Protocol) -> Protocol:
    """The protocol with its comparisons above the onset made over the levels that queue; there queue time decides."""
    asked = [replace(each, phase=QUEUEING) if each.phase == ABOVE_ONSET else each for each in protocol.comparisons]
    primary = next((each for each in asked if each.role == "primary"), None)
    arm = primary.arm if primary else None
    decides = next((each for each in asked if (each.metric, each.arm) == (QUEUE_METRIC, arm)), None)
    if decides is None or primary is None:
        return replace(protocol, comparisons=asked)
    roles = {id(primary): "secondary", id(decides): "primary"}
    return replace(protocol, comparisons=[replace(each, role=roles.get(id(each), each.role)) for each in asked])


def ladder_lines(plan: HostPlan) -> list[str]:
    """What the plan predicts, for its announcement."""
    if not plan.ladder:
        return []
    levels = ", ".join(map(str, plan.ladder.levels.values()))
    lines = [f"{plan.host}: levels of {levels} requests in flight."]
    for arm in plan.launches:
        onset = plan.ladder.onset.get(arm)
        told = onset_words(onset) if onset else "no onset is predicted: it has several engines"
        lines.append(f"{plan.host}, arm {arm}: {told}.")
    if any(phase.block == QUEUEING for run in plan.runs for phase in run.phases):
        lines.append(f"{plan.host}: this ladder can only queue; arms are judged by the time that requests queue.")
    return lines


def is_level(protocol: Protocol, phase: str) -> bool:
    """Whether a phase of the plan is a level of the protocol's ladder."""
    if protocol.ladder is UNSET or not protocol.ladder:
        return False
    head, _, level = phase.rpartition("_")
    return head == protocol.ladder.phase and level.isdigit()
