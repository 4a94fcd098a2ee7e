"""Find, read and resolve protocols. A protocol may extend another: mappings are merged, null removes an entry."""

import difflib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml
from msgspec import UNSET

from kvtrial.analysis.compare import margin_of
from kvtrial.analysis.gates import validate_gates
from kvtrial.analysis.laddering import GROUPS, with_ladder_comparisons, with_primary
from kvtrial.analysis.metrics import find_metric
from kvtrial.analysis.workloads import MOST_REQUESTS, refuse_impossible_workloads
from kvtrial.record.errors import UnusableInput
from kvtrial.record.protocol import Arm, Closed, Comparison, Mix, Nights, PercentOf, Phase, Protocol, Recorded, Trace
from kvtrial.record.trace import MOST_TOKENS
from kvtrial.record.version import refuse_newer
from kvtrial.record.versions import within

T = TypeVar("T")
LOOPED_EXTENDS = 10
NAME = re.compile(r"[A-Za-z0-9_]+")
"""Names that become names of files and folders."""
MOST_PROMPTS = 100_000
"""Of a phase that sends a prompt set: its plan names each of them."""
MOST_STEPS = 100
"""Of a ladder of concurrencies."""
REPLACEMENT_PAIRS_MAX = 2
MOST_LOOKS = 60
"""Nights that are pooled."""


def one_of(value: str, allowed: list[str], what: str, do: str) -> UnusableInput:
    """The error for a name that isn't known, with the nearest known name."""
    near = difflib.get_close_matches(value, allowed, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return UnusableInput(f'{what} "{value}" is not known; known: {", ".join(sorted(allowed))}.{hint} {do}')


def is_path(name: str) -> bool:
    """Whether a protocol is given by the path of its file, not by its name."""
    return name.endswith((".yml", ".yaml")) or "/" in name


def load_protocol(name: str, folder: Path) -> Protocol:
    """The protocol `name` of `folder`, or the file that `name` is the path of, with `extends` resolved and checked.

    Raises UnusableInput for a protocol that does not exist, can't be read or contradicts itself.
    """
    raw = _read_resolved(name, folder)
    version = str(raw.get("schema_version", ""))
    refuse_newer(version, f"protocol {name}")
    try:
        protocol = msgspec.convert(raw, type=Protocol)
    except msgspec.ValidationError as error:
        raise UnusableInput(f"protocol {name}: {error}; see playbooks/protocols/README.md for the fields.") from None
    protocol = with_ladder_comparisons(with_ladders(protocol))
    check_protocol(protocol)
    return protocol


def with_ladders(protocol: Protocol) -> Protocol:
    """The protocol with a phase for each concurrency of a declared list: NAME_1, NAME_4, … with salts SALT_1, …

    Each step has a salt of its own, so that none finds what an earlier one stored. Raises UnusableInput.
    """
    phases: list[Phase] = []
    for phase in protocol.phases:
        if not isinstance(phase.concurrency, list):
            phases.append(phase)
            continue
        steps = phase.concurrency
        if not 1 <= len(set(steps)) == len(steps) <= MOST_STEPS or min(steps) < 1:
            raise UnusableInput(
                f"phase {phase.name}: the concurrencies {steps} are no ladder; give 1 to {MOST_STEPS} different whole "
                f"numbers from 1 on."
            )
        if phase.arrivals and not isinstance(phase.arrivals, Closed):
            raise UnusableInput(
                f"phase {phase.name} has a ladder of concurrencies and arrivals at set times; give one of the two."
            )
        phases += [
            msgspec.structs.replace(phase, name=f"{phase.name}_{n}", salt=f"{phase.salt}_{n}", concurrency=n)
            for n in steps
        ]
    return msgspec.structs.replace(protocol, phases=phases)


def _read_resolved(name: str, folder: Path, depth: int = 0) -> dict[str, Any]:
    if depth > LOOPED_EXTENDS:
        raise UnusableInput(f"protocol {name} extends itself, directly or through others; break the loop.")
    path = Path(name) if is_path(name) else folder / f"{name}.yml"
    if "\0" in name or (is_path(name) and not path.is_file()):
        raise UnusableInput(f"protocol {name!r}: no such file; give the path of a protocol file, or a protocol's name.")
    if not path.is_file():
        known = sorted(p.stem for p in folder.glob("*.yml"))
        raise one_of(name, known, "protocol", "Give one of these, or the path of a protocol file.")
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnusableInput(f"protocol file {path} can't be read ({error.strerror}); give a readable file.") from None
    except UnicodeDecodeError as error:
        raise UnusableInput(
            f"protocol file {path} is not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8."
        ) from None
    except yaml.YAMLError as error:
        raise UnusableInput(f"protocol file {path} is not YAML ({' '.join(str(error).split())}); mend it.") from None
    if not isinstance(raw, dict):
        raise UnusableInput(f"protocol file {path} must hold a mapping; see playbooks/protocols/README.md.")
    if parent := raw.get("extends"):
        near = path.parent if (path.parent / f"{parent}.yml").is_file() else folder
        return _merged(_read_resolved(str(parent), near, depth + 1), raw)
    return raw


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` on `base`: mappings deep, everything else replaced, null removes what `base` has."""
    result = dict(base)
    for key, value in over.items():
        if value is None and key in base:
            del result[key]
        elif isinstance(value, dict) and isinstance(base.get(key), dict) and key != "break_even":
            result[key] = _merged(base[key], value)
        else:
            result[key] = value
    return result


def check_protocol(protocol: Protocol) -> None:
    """Raise UnusableInput where a protocol contradicts itself."""
    names = [("protocol", protocol.name), *(("arm", arm) for arm in protocol.arms)]
    for what, name in [*names, *(("phase", phase.name) for phase in protocol.phases)]:
        if not NAME.fullmatch(name):
            raise UnusableInput(
                f"{what} name {name!r} can't be used: names of protocols, arms and phases become names of files, so "
                f"use letters A to Z, digits and _ alone."
            )
    where = f"protocol {protocol.name}"
    if protocol.control not in protocol.arms:
        raise one_of(protocol.control, list(protocol.arms), f"{where}: control arm", "Name an arm of the protocol.")
    phases = [phase.name for phase in protocol.phases]
    if duplicate := {name for name in phases if phases.count(name) > 1}:
        raise UnusableInput(f"{where}: phase name {sorted(duplicate)[0]} stands twice; phase names must differ.")
    _check_workloads(protocol, where)
    for comparison in protocol.comparisons:
        for arm in (comparison.arm, comparison.against):
            if arm not in protocol.arms:
                raise one_of(arm, list(protocol.arms), f"{where}: arm", "Compare arms of the protocol.")
        for phase_name in (comparison.phase, comparison.against_phase):
            if phase_name is not None and phase_name not in [*phases, *_groups(protocol)]:
                known = [*phases, *_groups(protocol)]
                raise one_of(phase_name, known, f"{where}: phase", "Compare phases of the protocol.")
        find_metric(comparison.metric)
        _check_margin(comparison, protocol, where)
    primaries = sum(comparison.role == "primary" for comparison in protocol.comparisons)
    if primaries != 1:
        raise UnusableInput(
            f"{where} has {primaries} primary comparisons; exactly one decides, make the others secondary."
        )
    for name, count in protocol.pairs.items():
        check_pairs(count, f"{where}: pairs.{name}")
    for block in protocol.alternate_blocks:
        if block not in {phase.block for phase in protocol.phases}:
            raise one_of(block, sorted({p.block for p in protocol.phases}), f"{where}: block", "Alternate its blocks.")
    if not 0 <= protocol.faults.replacement_pairs <= REPLACEMENT_PAIRS_MAX:
        raise UnusableInput(
            f"{where}: faults.replacement_pairs={protocol.faults.replacement_pairs} can't be used; give 0 to "
            f"{REPLACEMENT_PAIRS_MAX}, since a campaign that goes on until pairs suit it proves nothing."
        )
    _check_nights(protocol, f"protocol {protocol.name}")
    validate_gates(protocol)


def _check_nights(protocol: Protocol, where: str) -> None:
    if not isinstance(protocol.nights, Nights):
        return
    if not 2 <= protocol.nights.looks <= MOST_LOOKS:
        raise UnusableInput(
            f"{where}: nights.looks is {protocol.nights.looks}; give how many nights are pooled, 2 to {MOST_LOOKS}."
        )
    if not 0 < protocol.nights.alpha <= 0.2:
        raise UnusableInput(
            f"{where}: nights.alpha is {protocol.nights.alpha:g}; give a number above 0 and up to 0.2, such as 0.05."
        )


def refuse_margins(protocol: Protocol, where: str) -> None:
    """Raise UnusableInput for a margin by which nothing could be judged; again where a host gave sizes of its own."""
    for comparison in protocol.comparisons:
        _check_margin(comparison, protocol, where)


def _check_margin(comparison: Comparison, protocol: Protocol, where: str) -> None:
    margin = margin_of(comparison, protocol)
    relative = comparison.effect_scale == "ratio"
    if not 0 < margin <= (1 if relative else math.inf) or math.isinf(margin):
        allowed = "above 0, up to 1 (0.05 is 5 %)" if relative else "above 0, in the metric's unit"
        declared = comparison.margin
        said = f"{declared!r} = {margin:g}" if isinstance(declared, str) else repr(declared)
        mend = f" as {declared.removeprefix('$')} of kvtrial_sizes" if isinstance(declared, str) else ""
        raise UnusableInput(
            f"{where}: margin {said} of {comparison.metric} in {comparison.phase} can't be used; give a number "
            f"{allowed}{mend}."
        )


def _groups(protocol: Protocol) -> tuple[str, ...]:
    """Names that stand for several phases in a comparison."""
    return ("run", *GROUPS) if protocol.ladder else ("run",)


def _check_workloads(protocol: Protocol, where: str) -> None:
    """Raise UnusableInput where a phase doesn't say what is sent in it, or a workload uses what isn't there."""
    workloads = protocol.workloads or {}
    for name, workload in workloads.items():
        if not NAME.fullmatch(name):
            raise UnusableInput(f"workload name {name!r} can't be used: use letters A to Z, digits and _ alone.")
        for prompts in (workload.returning, workload.fresh) if isinstance(workload, Mix) else ():
            if prompts not in protocol.prompt_sets:
                raise one_of(prompts, list(protocol.prompt_sets), f"{where}: prompt set", "Declare it.")
    sent: set[tuple[str, str]] = set()
    for phase in protocol.phases:
        if bool(phase.prompts) == bool(phase.workload):
            raise UnusableInput(
                f"{where}: phase {phase.name} has {'both prompts and' if phase.prompts else 'neither prompts nor'} a "
                f"workload; give one of the two."
            )
        if phase.prompts:
            if phase.prompts not in protocol.prompt_sets:
                raise one_of(phase.prompts, list(protocol.prompt_sets), f"{where}: prompt set", "Declare it.")
            sent.add((phase.prompts, phase.salt))
        elif phase.workload not in workloads:
            raise one_of(str(phase.workload), list(workloads), f"{where}: workload", "Declare it under workloads.")
        _check_sent(phase, workloads[phase.workload] if phase.workload else None, sent, where)


def _check_sent(phase: Phase, workload: Any, sent: set[tuple[str, str]], where: str) -> None:
    """Raise UnusableInput where a phase asks of its prompts or workload what they can't give."""
    at = f"{where}: phase {phase.name}"
    own_lengths = workload is not None and not isinstance(workload, Mix)
    if own_lengths and phase.max_tokens:
        raise UnusableInput(f"{at} has max_tokens, but its workload gives each request its own; leave it out.")
    if not own_lengths and not phase.max_tokens:
        raise UnusableInput(f"{at} lacks max_tokens; say how many tokens each answer gets.")
    if workload is not None and (phase.take != 0 or phase.repeat != 1):
        raise UnusableInput(f"{at} has take or repeat, which are for prompts; its workload says what is sent.")
    if isinstance(phase.arrivals, Recorded) and not isinstance(workload, Trace):
        raise UnusableInput(f"{at} replays recorded times, which only a workload of kind trace has; use another kind.")
    if isinstance(workload, Mix) and (workload.returning, phase.salt) not in sent:
        raise UnusableInput(
            f"{at} returns to prompts of {workload.returning} in salt {phase.salt}, and no phase before it sends them "
            f"there; add one, or give both the same salt."
        )


def check_pairs(pairs: int, what: str = "pairs") -> None:
    """Raise UnusableInput unless `pairs` is even and between 2 and 100."""
    if pairs < 2 or pairs > 100 or pairs % 2:
        raise UnusableInput(
            f"{what}={pairs} can't be run: the order ABBA needs an even number of pairs, from 2 to 100, and at least 6 "
            f"can prove anything; use {max(6, pairs + 1 if pairs % 2 else 6) if pairs < 100 else 100}."
        )


def with_sizes(protocol: Protocol, sizes: Mapping[str, Any]) -> Protocol:
    """The protocol with some of its sizes set. Raises UnusableInput for an unknown size or one that is no integer."""
    read: dict[str, int] = {}
    for name, value in sizes.items():
        if name not in protocol.sizes:
            raise one_of(name, list(protocol.sizes), "size", f"Sizes are those of protocol {protocol.name}.")
        try:
            # As all else that is given: a whole number, or its text.
            read[name] = msgspec.convert(value, int, strict=False)
        except msgspec.ValidationError:
            raise UnusableInput(
                f"size {name}={value!r} of kvtrial_sizes can't be used: it must be a whole number."
            ) from None
    return msgspec.structs.replace(protocol, sizes={**protocol.sizes, **read})


def only_arms(protocol: Protocol, arms: list[str]) -> Protocol:
    """The protocol cut down to some of its arms and the comparisons among them. The control always stays."""
    for arm in arms:
        if arm not in protocol.arms:
            raise one_of(arm, list(protocol.arms), "arm", f"Arms are those of protocol {protocol.name}.")
        if arms.count(arm) > 1:
            raise UnusableInput(f"arm {arm} is asked for {arms.count(arm)} times; name each arm once.")
    kept = {protocol.control, *arms}
    comparisons = [c for c in protocol.comparisons if {c.arm, c.against} <= kept]
    comparisons = with_primary(msgspec.structs.replace(protocol, comparisons=comparisons)).comparisons
    if not any(c.role == "primary" for c in comparisons):
        enough = [arm for arm in protocol.arms if arm not in kept and _decides(protocol, kept | {arm})]
        add = f"one of {', '.join(sorted(enough))}" if len(enough) > 1 else "".join(enough) or "more arms"
        raise UnusableInput(
            f"with arms {', '.join(sorted(kept))} protocol {protocol.name} has no primary comparison left; add {add}."
        )
    chosen = {name: arm for name, arm in protocol.arms.items() if name in kept}
    return msgspec.structs.replace(protocol, arms=chosen, comparisons=comparisons)


def _decides(protocol: Protocol, arms: set[str]) -> bool:
    """Whether a protocol cut down to some arms has a comparison that decides."""
    comparisons = [c for c in protocol.comparisons if {c.arm, c.against} <= arms]
    return any(
        c.role == "primary"
        for c in with_primary(msgspec.structs.replace(protocol, comparisons=comparisons)).comparisons
    )


def resolve(protocol: Protocol, vllm_version: str) -> Protocol:
    """The protocol with every `$name` replaced by its size, and without the phases that this vLLM can't do."""
    sizes = protocol.sizes
    phases = [_filled(phase, sizes) for phase in protocol.phases if within(vllm_version, phase.since_vllm, None)]
    kept = {phase.name for phase in phases} | set(_groups(protocol))
    resolved = msgspec.structs.replace(
        protocol,
        arms={name: _filled_arm(arm, sizes) for name, arm in protocol.arms.items()},
        prompt_sets={name: _filled(prompts, sizes) for name, prompts in protocol.prompt_sets.items()},
        phases=phases,
        workloads={name: _filled(workload, sizes) for name, workload in protocol.workloads.items()}
        if protocol.workloads
        else protocol.workloads,
        comparisons=[
            _filled(c, sizes) for c in protocol.comparisons if c.phase in kept and (c.against_phase or "run") in kept
        ],
    )
    _refuse_impossible_sizes(resolved)
    return resolved


def _filled_arm(arm: Arm, sizes: dict[str, int]) -> Arm:
    """An arm with its `$name`s replaced, its own sizes before the protocol's."""
    own = own_sizes(arm, sizes)
    known = {**sizes, **own}
    changed = msgspec.structs.replace(arm, args=_fill(arm.args, known), sizes=own if arm.sizes else arm.sizes)
    return msgspec.structs.replace(changed, costs=_filled(arm.costs, known)) if arm.costs else changed


def own_sizes(arm: Arm, sizes: Mapping[str, int]) -> dict[str, int]:
    """An arm's own sizes in numbers. Raises UnusableInput for a percentage of what is no size, or below 1."""
    found = {}
    for name, value in (arm.sizes or {}).items():
        if not isinstance(value, PercentOf):
            found[name] = value
            continue
        if value.of not in sizes:
            raise one_of(value.of, list(sizes), "size", "Declare it under sizes.")
        if value.percent < 1:
            raise UnusableInput(f"size {name} of an arm is {value.percent} percent of {value.of}; give 1 or more.")
        found[name] = math.ceil(sizes[value.of] * value.percent / 100)
    return found


def refuse_sizes(protocol: Protocol, where: str) -> None:
    """Raise UnusableInput for a size below 1 that an arm hands to the engine, or that ends the answers."""
    taken: list[tuple[str, str, object]] = [
        (f"arm {name}", option, value) for name, arm in protocol.arms.items() for option, value in arm.args.items()
    ]
    if protocol.tiers:
        taken.append(("a tier", "its chunk", "$chunk_tokens"))
    taken += [(f"phase {phase.name}", "stop_after", phase.stop_after) for phase in protocol.phases]
    for who, what, value in taken:
        size = value[1:] if isinstance(value, str) and value.startswith("$") else None
        # What the planner fills in is no size of the user's yet.
        if size in protocol.sizes and size not in (protocol.tiers or {}) and protocol.sizes[size] < 1:
            raise UnusableInput(
                f"{where}: {size}={protocol.sizes[size]} of kvtrial_sizes can't be used, {who} takes it as {what}; "
                f"give 1 or more."
            )


def _refuse_impossible_sizes(protocol: Protocol) -> None:
    """Raise UnusableInput for counts and lengths that no run can have."""
    for name, prompts in protocol.prompt_sets.items():
        count, tokens, suffix = (_whole(prompts, name, field) for field in ("count", "tokens", "suffix_tokens"))
        # A phase that sends a set names each prompt in the plan, a mix does not.
        most = MOST_PROMPTS if any(phase.prompts == name for phase in protocol.phases) else MOST_REQUESTS
        if not 1 <= count <= most:
            raise UnusableInput(f"prompt set {name} has {count} prompts; give 1 to {most} (kvtrial_sizes).")
        if not 0 <= suffix < tokens <= MOST_TOKENS:
            raise UnusableInput(
                f"prompt set {name} has prompts of {tokens} tokens, of which {suffix} are their common end; give 1 to "
                f"{MOST_TOKENS} tokens, and fewer of them in common (kvtrial_sizes)."
            )
    for phase in protocol.phases:
        for field, least in (("max_tokens", 1), ("stop_after", 1), ("concurrency", 1), ("repeat", 1)):
            value = getattr(phase, field)
            if value not in (UNSET, None) and not least <= _whole(phase, phase.name, field) <= MOST_TOKENS:
                raise UnusableInput(f"phase {phase.name}: {field}={value} can't be run; give {least} to {MOST_TOKENS}.")
        _whole(phase, phase.name, "take")
    refuse_impossible_workloads(protocol)


def _whole(declared: Any, name: str, field: str) -> int:
    value = getattr(declared, field)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UnusableInput(f"{name}: {field}={value!r} must be a whole number, or $NAME of an entry of sizes.")
    return value


def _filled(value: T, sizes: dict[str, int]) -> T:
    """A struct with its `$name` fields replaced."""
    return msgspec.convert(_fill(msgspec.to_builtins(value), sizes), type=type(value))


def _fill(value: Any, sizes: dict[str, int]) -> Any:
    if isinstance(value, dict):
        return {key: _fill(item, sizes) for key, item in value.items()}
    if isinstance(value, list):
        return [_fill(item, sizes) for item in value]
    if isinstance(value, str) and value.startswith("$"):
        if value[1:] not in sizes:
            raise one_of(value[1:], list(sizes), "size", "Declare it under sizes.")
        return sizes[value[1:]]
    return value
