"""What an arm changes against the control on a host: refused where it is nothing, or against its title. Pure."""

from collections.abc import Mapping
from typing import Literal

from msgspec.structs import replace

from kvtrial.analysis.inputs import HostInput
from kvtrial.analysis.laddering import is_level, lengths_of
from kvtrial.analysis.launch import dashed, merged_args
from kvtrial.analysis.onset import blocks_at_admission, blocks_at_end
from kvtrial.analysis.protocols import own_sizes
from kvtrial.record.errors import UnusableInput
from kvtrial.record.launch import human_int, parse_vllm_args
from kvtrial.record.plan import HostPlan
from kvtrial.record.protocol import Arm, Protocol

SMALL_POOL_BYTES = 2**30
"""Up to so much a KV cache that is too large is nobody's loss."""
Side = Literal["above", "below"]
OPTIONS: dict[str, tuple[str, Side]] = {
    "more_kv": ("num-gpu-blocks-override", "above"),
    "fewer_seqs": ("max-num-seqs", "below"),
    "shorter_model_len": ("max-model-len", "below"),
    "longer_model_len": ("max-model-len", "above"),
    "smaller_batch": ("max-num-batched-tokens", "below"),
}
"""Of a ladder's arms: the option of the launch, and on which side of the control's value the arm's title has it."""
SIZES: dict[str, tuple[str, Side]] = {
    "less_reserve": ("reserve_tokens", "below"),
    "truncated_answers": ("reserve_tokens", "below"),
    "shorter_inputs": ("prompt_tokens", "below"),
}
"""The same for sizes that the arm has of its own."""


def refuse_contrary_arms(name: str, host: HostInput, declared: Protocol, resolved: Protocol) -> None:
    """Raise UnusableInput for an arm of a ladder whose value does not lie on its title's side of the control's."""
    if not declared.ladder:
        return
    for arm, spec in declared.arms.items():
        values = _option_values(host, resolved, arm) or _size_values(resolved, arm)
        if arm == declared.control or values is None:
            continue
        what, mine, theirs, side = values
        if (mine > theirs) == (side == "above") and mine != theirs:
            continue
        # The arm's own size is the protocol's, a size that it takes is the inventory's.
        own = what in (spec.sizes or {})
        written = str(dashed(spec.args).get(what, ""))
        size = written.removeprefix("$") if written.startswith("$") else what
        cure = f"set {what} above {mine}" if own else f"set {size} {side} {theirs}"
        raise UnusableInput(
            f"host {name}: arm {arm} ({spec.title}) has {what}={mine}, {declared.control} has {theirs}; {cure} in "
            f"kvtrial_sizes, or {_or_without(declared, arm)}."
        )


def _option_values(host: HostInput, resolved: Protocol, arm: str) -> tuple[str, int, int, Side] | None:
    """Option, the arm's value, the control's and the side; None where nothing is said of it, or one isn't set."""
    if arm not in OPTIONS:
        return None
    option, side = OPTIONS[arm]
    given = [str(merged_args(host, resolved.arms[name]).get(option, "auto")) for name in (arm, resolved.control)]
    if {"auto", "-1"} & set(given):
        return None
    mine, theirs = (human_int(value, option) for value in given)
    return option, mine, theirs, side


def _size_values(resolved: Protocol, arm: str) -> tuple[str, int, int, Side] | None:
    own = own_sizes(resolved.arms[arm], resolved.sizes)
    if arm not in SIZES or SIZES[arm][0] not in own:
        return None
    size, side = SIZES[arm]
    return size, own[size], resolved.sizes[size], side


def refuse_reserves(name: str, resolved: Protocol, works: Mapping[str, Protocol]) -> None:
    """Raise UnusableInput where a ladder's answers would be cut by their limit undeclared, or not be cut as declared.

    `works`: the protocol as arms have it that send something else.
    """
    answer, limit = _answer_and_limit(resolved)
    if answer is None or limit is None:
        return
    if answer > limit:
        raise UnusableInput(
            f"host {name}: answers are to have {answer} tokens (output_tokens) and may have {limit} (reserve_tokens), "
            f"so their limit would cut them; set reserve_tokens to {answer} or more in kvtrial_sizes, or output_tokens "
            f"to {limit} or less."
        )
    for arm, work in works.items():
        mine = _answer_and_limit(work)[1]
        if mine is None or mine == limit:
            continue
        cuts = "output_length" in resolved.arms[arm].may_differ
        if cuts != (mine < answer):
            does = "cuts no answer" if cuts else "cuts the answers, which it does not declare"
            cure = f"above {mine}" if cuts else f"to {mine} or less"
            raise UnusableInput(
                f"host {name}: arm {arm} ({resolved.arms[arm].title}) has a limit of {mine} tokens, answers are to "
                f"have {answer}, so it {does}; set output_tokens {cure} in kvtrial_sizes, or "
                f"{_or_without(resolved, arm)}."
            )


def _answer_and_limit(protocol: Protocol) -> tuple[int | None, int | None]:
    """Tokens after which answers of a ladder's levels end, and the most that are asked for; None for what isn't set."""
    sent = protocol.ladder.phase if protocol.ladder else None
    phase = next((phase for phase in protocol.phases if phase.name == sent or is_level(protocol, phase.name)), None)
    if phase is None or not isinstance(phase.stop_after, int) or not isinstance(phase.max_tokens, int):
        return None, None
    return phase.stop_after, phase.max_tokens


def _or_without(protocol: Protocol, *arms: str) -> str:
    """What to do about arms that show nothing here, beside giving them another value."""
    rest = [other for other in protocol.arms if other not in (*arms, protocol.control)]
    those = "it" if len(arms) == 1 else "them"
    return f"leave {those} out (-e arms={','.join(rest)})" if rest else "choose another arm"


def refuse_loose_limits(plan: HostPlan, declared: Protocol) -> None:
    """Raise UnusableInput for an arm of a ladder whose --max-num-seqs is no less than are ever in flight."""
    for arm, mine in _lower_limits(plan, declared.control).items():
        assert plan.ladder
        top = max(plan.ladder.levels.values())
        if mine >= top:
            raise UnusableInput(
                f"host {plan.host}: arm {arm} ({declared.arms[arm].title}) lets {mine} sequences run at once and the "
                f"ladder ends at {top} in flight, so it limits nothing and can show nothing; give it a max-num-seqs "
                f"below {top}, or {_or_without(declared, arm)}."
            )


def loose_limit_lines(plan: HostPlan, control: str) -> list[str]:
    """For the announcement: arms whose --max-num-seqs is no less than the KV cache lets in without it.

    No more run at once than have room for their prompts, were each as short as the shortest.
    """
    said = []
    for arm, mine in _lower_limits(plan, control).items():
        room = _let_in(plan, arm)
        if room is not None and mine >= room:
            said.append(
                f"{plan.host}, arm {arm}: warning: it lets {mine} sequences run at once, and the KV cache has room for "
                f"the prompts of {room} at most, so it limits nothing here and no difference is to be expected; give "
                f"it a max-num-seqs below {room}."
            )
    return said


def spare_pool_lines(plan: HostPlan) -> list[str]:
    """For the announcement: arms with a large KV cache of which all that a level sends at once would leave a part."""
    if not plan.ladder:
        return []
    said = []
    for arm, usable in plan.ladder.usable_gpu_blocks.items():
        run = next(run for run in plan.runs if run.arm == arm)
        level = next(phase for phase in run.phases if phase.name in plan.ladder.levels)
        lengths = lengths_of(level)
        most = sum(blocks_at_end(length, plan.capacity.block_tokens) for length in lengths)
        size = usable * plan.capacity.block_tokens * plan.capacity.kv_bytes_per_token
        if usable > most and size > SMALL_POOL_BYTES:
            said.append(
                f"{plan.host}, arm {arm}: warning: its KV cache of {usable:,} blocks takes {size / 2**30:,.1f} GiB, "
                f"and the {len(lengths):,} requests that a level sends take {most:,} blocks, were all in flight at "
                f"once; a smaller one shows the same."
            )
    return said


def _lower_limits(plan: HostPlan, control: str) -> dict[str, int]:
    """Arms of a ladder with a lower --max-num-seqs than the control's, and that."""
    if not plan.ladder:
        return {}
    limits = {arm: parse_vllm_args(launch.argv).size("max-num-seqs") for arm, launch in plan.launches.items()}
    theirs = limits[control]
    return {
        arm: mine
        for arm, mine in limits.items()
        if mine is not None and (theirs is None or mine < theirs) and not plan.launches[arm].also
    }


def _let_in(plan: HostPlan, arm: str) -> int | None:
    """The most requests whose prompts have room at once in an arm's KV cache; None where its size isn't known."""
    assert plan.ladder
    usable = plan.ladder.usable_gpu_blocks.get(arm)
    run = next(run for run in plan.runs if run.arm == arm)
    lengths = [length for phase in run.phases if phase.name in plan.ladder.levels for length in lengths_of(phase)]
    if usable is None or not lengths:
        return None
    return usable // min(blocks_at_admission(length, plan.capacity.block_tokens) for length in lengths)


def refuse_idle_arms(plan: HostPlan, declared: Protocol, resolved: Protocol) -> None:
    """Raise UnusableInput for an arm that declares a change and runs exactly as the control does on a host.

    `declared`: the protocol as written, `resolved`: with the host's sizes. An arm that declares what the control
    declares is meant to be the same, as in a protocol that looks for noise.
    """
    control = declared.control
    idle = [
        name
        for name, arm in declared.arms.items()
        if name != control and not declared_alike(arm, declared.arms[control]) and _runs_alike(plan, name, resolved)
    ]
    if not idle:
        return
    told = [
        f"{name} ({', '.join(_changes(resolved.arms[name], resolved.arms[control])) or 'no change'})" for name in idle
    ]
    one = len(idle) == 1
    raise UnusableInput(
        f"host {plan.host}: arm{'' if one else 's'} {' and '.join(told)} {'runs' if one else 'run'} exactly as "
        f"{control} does here, the same launch and the same requests, so {'it' if one else 'they'} can show nothing; "
        f"give what {'it changes' if one else 'they change'} another value, of something that is used here, or "
        f"{_or_without(declared, *idle)}."
    )


def declared_alike(arm: Arm, other: Arm) -> bool:
    """Whether two arms declare the same, as in a protocol that looks for noise."""
    return _as_written(arm) == _as_written(other)


def _as_written(arm: Arm) -> tuple[object, ...]:
    return dashed(arm.args), arm.env, arm.sizes or {}, arm.model, arm.replicas or 1


def _runs_alike(plan: HostPlan, name: str, resolved: Protocol) -> bool:
    """Whether an arm's launch, model and phases are the control's; of a ladder its levels, whatever warms up."""
    control = resolved.control
    if replace(plan.launches[name], arm=control) != plan.launches[control]:
        return False
    sent = {
        run.arm: [phase for phase in run.phases if not resolved.ladder or is_level(resolved, phase.name)]
        for run in plan.runs
        if run.pair == 1
    }
    return plan.model_of(name) == plan.model_of(control) and sent[name] == sent[control]


def _changes(arm: Arm, control: Arm) -> list[str]:
    """What an arm declares beside the control, as name=value; of the environment the names alone."""
    mine, theirs = dashed(arm.args), dashed(control.args)
    found = {name: value for name, value in mine.items() if name not in theirs or theirs[name] != value}
    own: Mapping[str, object] = arm.sizes or {}
    return [f"{name}={value}" for name, value in {**found, **own}.items()] + sorted(arm.env)
