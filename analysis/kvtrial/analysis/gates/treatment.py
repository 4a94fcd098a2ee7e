"""Gates on the treatment: delivered to the variant, withheld from the control, on a prefix that really was evicted."""

from msgspec import Struct

from kvtrial.analysis.gates.context import Decision, GateContext, NotRequired, gate, phase_of, some, where
from kvtrial.analysis.metrics import delta
from kvtrial.analysis.mixes import declared_shares, trace_phases
from kvtrial.record.record import PhaseRecord, RunRecord

SOURCES = ("prompt_tokens_computed", "prompt_tokens_local_hit", "prompt_tokens_external")


class ArmAndPhase(Struct, frozen=True, forbid_unknown_fields=True):
    """An arm, and the phase in which it is judged."""

    arm: str
    phase: str


class ArmAndPhases(Struct, frozen=True, forbid_unknown_fields=True):
    """An arm, and the phases in which it is judged: one, several, or both."""

    arm: str
    phase: str | None = None
    phases: list[str] = []

    def __post_init__(self) -> None:
        if not self.all():
            raise ValueError("missing required field `phase` (or `phases`)")

    def all(self) -> list[str]:
        """Every phase that is named, in order."""
        return [*([self.phase] if self.phase else []), *self.phases]


class ArmOrArms(Struct, frozen=True, forbid_unknown_fields=True):
    """One arm, several, or both; by default the protocol's control."""

    arm: str | None = None
    arms: list[str] = []


class Phases(Struct, frozen=True, forbid_unknown_fields=True):
    """Phases that must hold."""

    phases: list[str]


@gate("treatment_delivered", ArmAndPhases)
def treatment_delivered(context: GateContext, parameters: ArmAndPhases) -> Decision:
    """Bytes loaded in each phase are exactly the external prompt tokens times bytes per token, and more than none.

    External hits equal the external tokens, and in every phase of every run prompt tokens by source add up. Loads of
    preempted requests count as bytes only (vLLM counts their lookups nowhere), so after a preemption bytes may exceed.
    In a mix the tokens must be those of the prompts that return, as many as the protocol declares: none at 0 %.
    """
    runs = context.of_arm(parameters.arm)
    if not runs:
        return None, f"no completed run of arm {parameters.arm}"
    shares, traces = declared_shares(context.protocol), trace_phases(context.protocol)
    problems: list[str] = []
    sums: list[str] = []
    mixed: list[str] = []
    for name in parameters.all():
        shown: set[tuple[float, float, float]] = set()
        for run in runs:
            phase = phase_of(run, name)
            if phase is None:
                return None, f"{where(run)} has no phase {name}"
            loaded, tokens = delta(phase, "load_bytes"), delta(phase, "prompt_tokens_external")
            hits, prompt = delta(phase, "external_prefix_cache_hits_tokens"), delta(phase, "prompt_tokens")
            if loaded is None or tokens is None or prompt is None:
                return None, f"{where(run, phase)}: load bytes or prompt tokens by source are not exported"
            if name in traces and not tokens:
                return False, _never_asked(context, parameters.arm, name)
            if name in shares:
                problems += _not_as_declared(run, phase, shares[name], tokens)
            problems += _not_delivered(run, phase, loaded, tokens, hits, none_is_right=shares.get(name) == 0)
            shown.add((loaded, tokens, prompt))
        if name in traces:
            # What the user asks of a trace comes first: a terminal shows the beginning of a long detail.
            sums.insert(0, f"{name}: {_shares_of(context, parameters.arm, name)}")
        if name in shares:
            mixed.append(f"{name} {' or '.join(f'{tokens:,.0f}' for _, tokens, _ in sorted(shown))}")
        else:
            sums.append(f"{name}: {_sums(shown, runs[0].capacity.kv_bytes_per_token)}")
    if mixed:
        per_token = runs[0].capacity.kv_bytes_per_token
        sums.append(f"as declared, tokens loaded × {per_token:,} = bytes: {', '.join(mixed)}")
    for run in context.runs:
        problems += _sources_do_not_add_up(run)
    if problems:
        return False, some(problems)
    counted = f"in {len(runs)} of {len(runs)} {parameters.arm} runs"
    return True, f"{', '.join(sums)}, {counted}; prompt tokens by source add up"


def _not_as_declared(run: RunRecord, phase: PhaseRecord, share: float, tokens: float) -> list[str]:
    """Whether as many requests return as declared, and exactly their whole chunks came from the tier."""
    declared = round(share * phase.sent)
    before = {
        request.prompt_sha256
        for earlier in run.phases
        if earlier.block == phase.block and earlier.started_monotonic_seconds < phase.started_monotonic_seconds
        for request in earlier.requests
    }
    returning = [request for request in phase.requests if request.prompt_sha256 in before]
    if len(phase.requests) < phase.sent:
        return [
            f"{where(run, phase)}: only {len(phase.requests):,} of {phase.sent:,} requests are listed in the record, "
            f"so which of them return can't be held against the declared share; use fewer requests a mix"
        ]
    problems = []
    if len(returning) != declared:
        problems.append(
            f"{where(run, phase)}: {len(returning)} of {phase.sent} requests return to a prompt sent before, declared "
            f"are {declared} ({share:.0%})"
        )
    chunk = run.capacity.chunk_tokens[run.arm]
    # The last token is always computed, so a prompt of whole chunks gives back one chunk less.
    due = sum((request.prompt_tokens - 1) // chunk * chunk for request in returning if request.prompt_tokens)
    if tokens != due:
        problems.append(
            f"{where(run, phase)}: {tokens:,.0f} tokens came from the tier, due are {due:,} (whole chunks of the "
            f"{len(returning)} prompts that return)"
        )
    return problems


def _never_asked(context: GateContext, arm: str, name: str) -> str:
    return (
        f"the tier gave nothing in {name}, so this is neither a gain nor a loss: the treatment was not delivered. No "
        f"prefix of the trace came back after the engine's own cache had lost it ({_shares_of(context, arm, name)})"
    )


def _shares_of(context: GateContext, arm: str, name: str) -> str:
    """Where the prompt tokens of a phase came from, over all runs of the arm and of the control."""
    said = []
    for each in dict.fromkeys((arm, context.protocol.control)):
        phases = [phase for run in context.of_arm(each) if (phase := phase_of(run, name)) is not None]
        computed, local, external = (sum(delta(phase, role) or 0.0 for phase in phases) for role in SOURCES)
        total = computed + local + external
        if total:
            said.append(
                f"{each}: {local / total:.1%} of {total:,.0f} prompt tokens from the engine's own cache, "
                f"{external / total:.1%} from the tier, {computed / total:.1%} recomputed"
            )
    return "; ".join(said)


def _sums(shown: set[tuple[float, float, float]], per_token: int) -> str:
    """What was seen in the runs of a phase, (loaded bytes, external tokens, prompt tokens), each sum once."""
    return " or ".join(
        f"{loaded:,.0f} bytes loaded = {tokens:,.0f} tokens × {per_token:,} "
        f"({tokens:,.0f} of {prompt:,.0f} prompt tokens)"
        for loaded, tokens, prompt in sorted(shown)
    )


def _not_delivered(
    run: RunRecord, phase: PhaseRecord, loaded: float, tokens: float, hits: float | None, *, none_is_right: bool
) -> list[str]:
    per_token = run.capacity.kv_bytes_per_token
    preempted = delta(phase, "preemptions") or 0
    problems = []
    if loaded <= 0 and not none_is_right:
        problems.append(f"{where(run, phase)}: 0 bytes were loaded, the treatment was not delivered")
    elif loaded != tokens * per_token and not (preempted and loaded > tokens * per_token):
        problems.append(
            f"{where(run, phase)}: {loaded:,.0f} bytes loaded, but {tokens:,.0f} external tokens × {per_token:,} = "
            f"{tokens * per_token:,.0f}"
        )
    if hits is not None and hits != tokens:
        problems.append(
            f"{where(run, phase)}: {hits:,.0f} external hit tokens, but {tokens:,.0f} external prompt tokens"
        )
    return problems


def _sources_do_not_add_up(run: RunRecord) -> list[str]:
    problems = []
    for phase in run.phases:
        parts = [delta(phase, role) for role in SOURCES]
        total = delta(phase, "prompt_tokens")
        known = [part for part in parts if part is not None]
        if total is None or len(known) < len(parts):
            problems.append(f"{where(run, phase)}: prompt tokens by source are not exported")
        elif sum(known) != total:
            shown = " + ".join(f"{part:,.0f}" for part in known)
            problems.append(
                f"{where(run, phase)}: computed + local + external = {shown} is not {total:,.0f} prompt tokens"
            )
    return problems


@gate("control_untreated", ArmOrArms)
def control_untreated(context: GateContext, parameters: ArmOrArms) -> Decision:
    """No connector: its families are absent (not 0), and nothing was asked of an external cache."""
    arms = [*([parameters.arm] if parameters.arm else []), *parameters.arms] or [context.protocol.control]
    runs = [run for arm in arms for run in context.of_arm(arm)]
    missing = [arm for arm in arms if not context.of_arm(arm)]
    if missing:
        return None, f"no completed run of arm {', '.join(missing)}"
    problems = []
    for run in runs:
        if run.launch.connector is not None:
            problems.append(f"{where(run)} was launched with connector {run.launch.connector}")
        for phase in run.phases:
            for role in ("load_bytes", "store_bytes"):
                exported = [value for value in (phase.before.get(role), phase.after.get(role)) if value is not None]
                if exported:
                    problems.append(
                        f"{where(run, phase)}: {role} is exported ({exported[-1]:,.0f}), so a connector is there"
                    )
            asked = delta(phase, "external_prefix_cache_queries_tokens")
            if asked:
                problems.append(f"{where(run, phase)}: {asked:,.0f} tokens were asked of an external cache")
    if problems:
        return False, some(problems)
    return (
        True,
        f"no connector in {len(runs)} runs of {', '.join(arms)}: load and store series absent, 0 external queries",
    )


@gate("noload_respected", ArmAndPhase)
def noload_respected(context: GateContext, parameters: ArmAndPhase) -> Decision:
    """Nothing was loaded where loading was forbidden, in a run that did store: the within-server control is one."""
    absent = context.not_planned(parameters.phase)
    if absent is not None:
        raise NotRequired(absent)
    runs = context.of_arm(parameters.arm)
    if not runs:
        return None, f"no completed run of arm {parameters.arm}"
    problems, stored_least = [], float("inf")
    for run in runs:
        phase = phase_of(run, parameters.phase)
        loaded = None if phase is None else delta(phase, "load_bytes")
        first, last = _ends(run, "store_bytes")
        if phase is None or loaded is None or first is None or last is None:
            return None, f"{where(run)}: load or store bytes of {parameters.phase} are not recorded"
        stored_least = min(stored_least, last - first)
        if loaded != 0:
            problems.append(f"{where(run, phase)}: {loaded:,.0f} bytes were loaded in spite of max_load_tokens 0")
        if last - first <= 0:
            problems.append(f"{where(run)}: nothing was stored, so there was nothing that could have been loaded")
    if problems:
        return False, some(problems)
    return True, (
        f"{parameters.phase}: 0 bytes loaded in {len(runs)} of {len(runs)} {parameters.arm} runs, "
        f"at least {stored_least:,.0f} bytes stored in each"
    )


def _ends(run: RunRecord, role: str) -> tuple[float | None, float | None]:
    in_time = sorted(run.phases, key=lambda phase: phase.started_monotonic_seconds)
    return (in_time[0].before.get(role), in_time[-1].after.get(role)) if in_time else (None, None)


@gate("prefix_evicted", Phases)
def prefix_evicted(context: GateContext, parameters: Phases) -> Decision:
    """The engine's own prefix cache answered nothing in these phases: local hits are exactly 0 in every arm.

    Of a cache that never answers in a run (it may be switched off) that would show nothing.
    """
    problems, looked, notes = [], 0, []
    for run in context.runs:
        first, last = _ends(run, "prefix_cache_hits_tokens")
        if first is not None and last is not None and last <= first:
            return None, f"{where(run)}: the engine's own prefix cache answered nothing in the whole run; is it on?"
    for name in parameters.phases:
        absent = context.not_planned(name)
        if absent is not None:
            notes.append(absent)
            continue
        for run in context.runs:
            phase = phase_of(run, name)
            hits = None if phase is None else delta(phase, "prefix_cache_hits_tokens")
            if phase is None or hits is None:
                return None, f"{where(run)}: local prefix hits of {name} are not recorded"
            looked += 1
            if hits != 0:
                problems.append(
                    f"{where(run, phase)}: {hits:,.0f} prompt tokens came from the engine's own prefix cache"
                )
    if problems:
        return False, some(problems)
    return True, "; ".join(
        [f"0 local hit tokens in {looked} of {looked} phases ({', '.join(parameters.phases)})", *notes]
    )
