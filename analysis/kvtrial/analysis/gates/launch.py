"""Gates on what was started: the launch, what the engine resolved it to, where it listens, which defects it has."""

import ipaddress
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from kvtrial.analysis.gates.context import Decision, GateContext, NoParameters, backend_of, gate, some, where
from kvtrial.analysis.launch import VISIBLE_GPUS
from kvtrial.record.hazardfacts import launch_facts, page_facts
from kvtrial.record.hazards import Concern, HazardHit, Watch, facts_seen, hazards_for
from kvtrial.record.launch import parse_vllm_args, tier_of
from kvtrial.record.launchfacts import Difference, changed_by, differences_of_flat, flatten, layouts, undeclared
from kvtrial.record.plan import Launch
from kvtrial.record.predicates import Facts
from kvtrial.record.protocol import Arm
from kvtrial.record.record import Resolved, RunRecord

_SIZE_THE_POOL = (
    "num-gpu-blocks-override",
    "kv-cache-memory-bytes",
    "gpu-memory-utilization",
    "kv-cache-dtype",
    "tensor-parallel-size",
    "data-parallel-size",
    "max-num-batched-tokens",
    "max-model-len",
    "model",
)
"""Options that size the KV cache: arms that declare another one have another number of blocks, others must not."""
_WHERE_IT_LISTENS = {"port"}
_CHOOSES_THE_LAYOUT = "VLLM_KV_CACHE_LAYOUT"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@gate("launch_differs_as_declared", NoParameters)
def launch_differs_as_declared(context: GateContext, parameters: NoParameters) -> Decision:
    """Arms differ in what they declare and its known consequences by version; runs of one arm in nothing."""
    silent = [where(run) for run in context.runs if run.resolved is None]
    if silent:
        return None, f"the engine was not asked for its configuration in {some(silent)}"
    control_runs = context.of_arm(context.protocol.control)
    if not control_runs:
        return None, "no completed run of the control"
    problems = [problem for arm in context.arms() for problem in _within_arm(context.of_arm(arm))]
    found: list[Difference] = []
    for arm in context.arms():
        if arm != context.protocol.control:
            pair = control_runs[0], context.of_arm(arm)[0]
            declared = [context.protocol.arms[context.protocol.control], context.protocol.arms[arm]]
            problems += _asked(*pair, declared)
            resolved, differing = _resolved(*pair, declared)
            problems += resolved
            found += differing
    problems += _same_everywhere(context.runs)
    if problems:
        return False, some(problems)
    declared_fields = sorted({d.path for d in found if d.kind == "other"})
    consequences = sorted({d.path for d in found if d.kind == "consequence"})
    return True, (
        f"{len(declared_fields)} resolved fields differ, all declared"
        + (f" ({some(declared_fields)})" if declared_fields else "")
        + f"; {len(consequences)} by known consequence"
        + (f" ({some(consequences)})" if consequences else "")
        + f"; packages equal in {len(context.runs)} runs"
    )


def _within_arm(runs: list[RunRecord]) -> list[str]:
    """A launch or a resolved configuration that changed from run to run of one arm."""
    first, problems = runs[0], _other_replicas(runs[0].launch)
    resolved = _flat(first)
    for run in runs[1:]:
        problems += _other_replicas(run.launch)
        if replace(run.launch, arm="") != replace(first.launch, arm=""):
            problems.append(f"arm {run.arm} was launched otherwise in pair {run.pair} than in pair {first.pair}")
        found = differences_of_flat(resolved, _flat(run), first.vllm_version_pinned, backend_of(first))
        changed = [d for d in found if d.kind != "volatile"]
        if changed:
            what = some(f"{d.path} {d.control!r} → {d.variant!r}" for d in changed)
            problems.append(f"arm {run.arm} resolved otherwise in pair {run.pair} than in pair {first.pair}: {what}")
    return problems


def _other_replicas(launch: Launch) -> list[str]:
    """Replicas of an arm that were launched otherwise than its first engine, but for the port and the GPUs they see."""
    own, env = _options(launch), launch.env
    return [
        f"arm {launch.arm}: the engine on port {engine.port} was launched otherwise than its first one"
        for engine in launch.also
        if {**_options(engine), "port": ""} != {**own, "port": ""}
        or {**engine.env, VISIBLE_GPUS: ""} != {**env, VISIBLE_GPUS: ""}
    ]


def _asked(control: RunRecord, variant: RunRecord, declared: list[Arm]) -> list[str]:
    """Options and environment in which the launches differ without any arm declaring it."""
    names = _options_declared(declared)
    variables = _declared_differently([dict(arm.env) for arm in declared])
    left, right = _options(control.launch), _options(variant.launch)
    options = {name for name in left.keys() | right.keys() if left.get(name) != right.get(name)}
    env = {
        name
        for name in control.launch.env.keys() | variant.launch.env.keys()
        if control.launch.env.get(name) != variant.launch.env.get(name)
    }
    problems = [
        f"--{name} differs between {control.arm} and {variant.arm} and no arm declares it"
        for name in sorted(options - names - _WHERE_IT_LISTENS)
    ]
    problems += [
        f"environment {name} differs between {control.arm} and {variant.arm} and no arm declares it"
        for name in sorted(env - variables)
    ]
    # An option taken out need not have been there; a variable taken out is what the arm is for.
    given = {name for name in names if any(_gives(arm, name) for arm in declared)}
    problems += [f"--{name} is declared, yet both launches have it alike" for name in sorted(given - options)]
    problems += [f"environment {name} is declared, yet both launches have it alike" for name in sorted(variables - env)]
    return problems


def _options_declared(declared: list[Arm]) -> set[str]:
    """Options that the arms declare differently."""
    return _declared_differently(
        [
            {key.replace("_", "-"): value for key, value in arm.args.items()}
            | ({"model": arm.model} if arm.model else {})
            for arm in declared
        ]
    )


def _gives(arm: Arm, option: str) -> bool:
    """Whether an arm gives an option a value, so more than takes it out."""
    given = {key.replace("_", "-") for key, value in arm.args.items() if value is not None}
    return option in given or (option == "model" and bool(arm.model))


def _declared_differently(declared: list[dict[str, Any]]) -> set[str]:
    """Names that an arm declares and another declares otherwise, or not at all."""
    return {
        name
        for given in declared
        for name in given
        if any(name not in other or other[name] != given[name] for other in declared)
    }


def _options(launch: Launch) -> dict[str, str | bool | None]:
    parsed = parse_vllm_args(launch.argv)
    options: dict[str, str | bool | None] = {**parsed.options, "model": parsed.model}
    if parsed.kv_transfer is not None:
        options["kv-transfer-config"] = json.dumps(parsed.kv_transfer, sort_keys=True)
    return options


def _resolved(control: RunRecord, variant: RunRecord, declared: list[Arm]) -> tuple[list[str], list[Difference]]:
    found = [d for d in _differences(control, variant) if d.kind != "volatile"]
    allowed = [path for d in found for path in _declared_part(d.path, declared)]
    allowed += changed_by(_options_declared(declared))
    problems = [
        f"{d.path} is {d.control!r} in {control.arm} and {d.variant!r} in {variant.arm}, which no arm declares"
        for d in undeclared(found, allowed)
    ]
    return problems + _layout(control, variant, declared), found


def _declared_part(path: str, declared: Iterable[Arm]) -> list[str]:
    """The beginning of a path that names something declared: kv-transfer-config → vllm_config.kv_transfer_config."""
    names = {name.replace("-", "_") for arm in declared for name in (*arm.args, *arm.env)}
    parts = path.split(".")
    return [".".join(parts[: index + 1]) for index, part in enumerate(parts) if part in names]


def _layout(control: RunRecord, variant: RunRecord, declared: list[Arm]) -> list[str]:
    """The KV layout, which only the log shows: equal, declared, or as known for this version and the connector."""
    was, now = _logged_layout(control), _logged_layout(variant)
    if was == now or _CHOOSES_THE_LAYOUT in _declared_differently([dict(arm.env) for arm in declared]):
        return []
    known = layouts(control.vllm_version_pinned, backend_of(control))
    if known is not None and (was or known.without, now or known.with_connector) == (
        known.without,
        known.with_connector,
    ):
        return []
    return [f"KV layout {was} in {control.arm} and {now} in {variant.arm} is no known consequence of the connector"]


def _logged_layout(run: RunRecord) -> str | None:
    value = run.resolved.log_facts.get("kv_cache_layout") if run.resolved else None
    return None if value is None else str(value)


def _same_everywhere(runs: list[RunRecord]) -> list[str]:
    problems = []
    pools: dict[tuple[str | bool | None, ...], set[str | None]] = {}
    for run in runs:
        asked = _options(run.launch)
        key = tuple(asked.get(option) for option in _SIZE_THE_POOL)
        pools.setdefault(key, set()).add(_facts(run).cache_config.get("num_gpu_blocks"))
    packages: set[str | None] = {_facts(run).packages_sha256 for run in runs}
    found = [("num_gpu_blocks", blocks) for blocks in pools.values()]
    for what, values in [*found, ("packages_sha256", packages)]:
        if len(values) > 1:
            problems.append(f"{what} is not the same in all runs: {', '.join(sorted(map(str, values)))}")
    return problems


def _facts(run: RunRecord) -> Resolved:
    if run.resolved is None:
        raise ValueError(f"no resolved configuration in {where(run)}")
    return run.resolved


def _differences(left: RunRecord, right: RunRecord) -> list[Difference]:
    return differences_of_flat(_flat(left), _flat(right), left.vllm_version_pinned, backend_of(left))


def _flat(run: RunRecord) -> dict[str, Any]:
    return flatten(_without_scratch(_facts(run).config))


def _without_scratch(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with what is new in every process replaced by a name: its temporary directory, addresses."""
    scratch = config.get("vllm_env.VLLM_RPC_BASE_PATH")
    known = isinstance(scratch, str) and scratch.startswith("/")

    def plain(value: str) -> str:
        return _ADDRESS.sub(" at <address>", value.replace(str(scratch), "<scratch>") if known else value)

    # Most values are of a few letters, and a launch has hundreds of them.
    return {
        path: plain(value) if isinstance(value, str) and ("/" in value or " at 0x" in value) else value
        for path, value in config.items()
    }


@gate("model_and_version", NoParameters)
def model_and_version(context: GateContext, parameters: NoParameters) -> Decision:
    """The model under its planned name and revision, served by the pinned vLLM."""
    problems = []
    for run in context.runs:
        if run.resolved is None:
            return None, f"the engine was not asked what it is in {where(run)}"
        served, version = run.resolved.served_models, run.resolved.vllm_version.split("+")[0]
        if run.launch.served_model_name not in served:
            problems.append(f"{where(run)}: {run.launch.served_model_name} is not among the served models {served}")
        if version != run.vllm_version_pinned.split("+")[0]:
            problems.append(f"{where(run)}: vLLM {run.resolved.vllm_version}, pinned is {run.vllm_version_pinned}")
        if run.resolved.model_revision != run.model.revision:
            problems.append(
                f"{where(run)}: model revision {run.resolved.model_revision}, pinned is {run.model.revision}"
            )
    if problems:
        return False, some(problems)
    first = context.runs[0]
    return True, (
        f"{first.launch.served_model_name} at revision {first.model.revision}, vLLM {_facts(first).vllm_version}, "
        f"in {len(context.runs)} runs"
    )


@gate("loopback_only", NoParameters, judges_faulted=True)
def loopback_only(context: GateContext, parameters: NoParameters) -> Decision:
    """Every listening socket of the engine is on a loopback address, and there is one.

    Some versions open sockets on every address. Where the engine's network namespace has loopback alone, that is the
    same, and the detail says so.
    """
    outside, sockets, alone = [], 0, 0
    asked = [*context.runs, *(run for run in context.faulted if run.resolved is not None)]
    if not asked:
        return None, "no engine came up far enough to be asked"
    for run in asked:
        if run.resolved is None or not run.resolved.listening:
            return None, f"no listening socket is recorded in {where(run)}"
        sockets += len(run.resolved.listening)
        if run.resolved.loopback_alone:
            alone += 1
            continue
        outside += [
            f"{where(run)}: {socket.address}:{socket.port}"
            for socket in run.resolved.listening
            if not ipaddress.ip_address(socket.address.strip("[]").split("%")[0]).is_loopback
        ]
    if outside:
        return False, f"listening beyond loopback: {some(outside)}"
    detail = f"{sockets} listening sockets in {len(asked)} runs, all on loopback"
    return True, detail + (f" ({alone} runs in a network namespace that has nothing else)" if alone else "")


class HazardParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """`concerns`: what the trial claims; by default what its arms and metrics say."""

    concerns: list[Concern] | None = None


@gate("hazards", HazardParameters)
def hazards(context: GateContext, parameters: HazardParameters) -> Decision:
    """No known defect of this version blocks, guards are set in all arms, watches stayed quiet."""
    first = context.runs[0]
    launches = {arm: context.of_arm(arm)[0].launch for arm in context.arms()}
    concerns = parameters.concerns if parameters.concerns is not None else _concerns(context, launches)
    met = hazards_for(first.vllm_version_pinned, launches, backend_of(first), concerns)
    problems = [f"blocked: {hit.detail}" for hit in met if hit.action == "block"]
    problems += [f"guard missing: {hit.detail}" for hit in met if hit.action == "guard" and not hit.guarded]
    problems += [
        f"{where(run)}: watch {hit.hazard} went off: {hit.evidence}" for run in context.runs for hit in run.watch_hits
    ]
    problems += _numbers_watched(context.runs, met)
    if problems:
        return False, some(problems)
    to_watch = [hit.hazard for hit in met if hit.action == "watch" and hit.hazard.about == "defect"]
    readings = sum(hit.action == "watch" and hit.hazard.about == "reading" for hit in met)
    unwatched = [hazard.id for hazard in to_watch if hazard.watch == Watch()]
    watched = [hazard.id for hazard in to_watch if hazard.id not in unwatched]
    guarded = [hit.hazard.id for hit in met if hit.action == "guard"]
    return True, (
        f"vLLM {first.vllm_version_pinned}: none blocks; {len(guarded)} guarded in all arms; "
        f"{len(watched)} watched, quiet in {len(context.runs)} runs"
        + (f"; known, and watched by nothing: {', '.join(unwatched)}" if unwatched else "")
        + (f"; {readings} more to know when reading the numbers" if readings else "")
    )


def _numbers_watched(runs: Iterable[RunRecord], met: list[HazardHit]) -> Iterator[str]:
    """Phases whose metrics show a defect that their arm meets; a guarded one is not looked for."""
    watched = [hit for hit in met if hit.hazard.about == "defect" and hit.hazard.watch.facts and not hit.guarded]
    # Runs of one arm on one host are started alike, and an argv takes long to read.
    read: list[tuple[tuple[Launch, str], Facts]] = []
    for run in runs:
        here = [hit.hazard for hit in watched if run.arm in hit.applies_to_arms]
        if not here:
            continue
        started = (run.launch, run.vllm_version_pinned)
        launch = next((facts for known, facts in read if known == started), None)
        if launch is None:
            launch = launch_facts(run.launch, run.vllm_version_pinned, backend_of(run))
            read.append((started, launch))
        for phase in run.phases:
            facts = launch.also(page_facts(phase.after, phase.before, phase.seconds))
            for hazard in here:
                if said := facts_seen(hazard, facts):
                    yield f"{where(run)}: watch {hazard.id} went off in {phase.name}: {said}"


def _concerns(context: GateContext, launches: dict[str, Launch]) -> list[Concern]:
    concerns: list[Concern] = []
    if any("preemptions" in comparison.metric for comparison in context.protocol.comparisons):
        concerns.append("preemptions")
    version = context.runs[0].vllm_version_pinned
    if any(tier_of(parse_vllm_args(launch.argv), launch.env, version) for launch in launches.values()):
        concerns += ["offload", "answers"]
    return concerns
