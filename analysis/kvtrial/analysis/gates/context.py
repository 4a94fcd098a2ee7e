"""What a gate gets, what it gives, and the register of gates."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from kvtrial.analysis.faults import Pairs
from kvtrial.analysis.laddering import GROUPS
from kvtrial.analysis.metrics import find_phase
from kvtrial.record.errors import UnusableInput
from kvtrial.record.launchfacts import Backend
from kvtrial.record.plan import LadderPlan
from kvtrial.record.protocol import Comparison, Protocol
from kvtrial.record.record import PhaseRecord, RunRecord
from kvtrial.record.verdict import GateResult
from kvtrial.record.versions import within

Parameters = TypeVar("Parameters", bound=Struct)
Decision = tuple[bool | None, str]
Judge = Callable[["GateContext", Parameters], Decision]

_NAMED_AT_MOST = 3


class NotRequired(Exception):
    """A gate has nothing to judge, since none of it is planned for this engine version; the sentence says why."""


class Disturbed(Exception):
    """What a gate found may be a disturbance of the machine as well as a fault; the sentence says what it is."""


class NoParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """The gate takes none."""


class GateContext(Struct, frozen=True):
    """One host's runs as a gate sees them: never an effect, only facts.

    `pairs`: the valid pairs and what was dropped. `runs`: every completed run outside dropped pairs, so also the whole
    half of a pair whose other half was an engine fault. `faulted`: the runs that an engine fault ended. `ladder`:
    what the plan holds of a ladder on this host, None where no plan is known.
    """

    protocol: Protocol
    host: str
    pairs: Pairs
    runs: list[RunRecord]
    faulted: list[RunRecord] = []
    ladder: LadderPlan | None = None

    def of_arm(self, arm: str) -> list[RunRecord]:
        """Runs of one arm, by pair."""
        return [run for run in self.runs if run.arm == arm]

    def arms(self) -> list[str]:
        """Arms that have a run, the control first."""
        seen = {run.arm for run in self.runs}
        others = [arm for arm in self.protocol.arms if arm != self.protocol.control]
        return [arm for arm in (self.protocol.control, *others) if arm in seen]

    def not_planned(self, phase: str) -> str | None:
        """Why a phase is in no run of this plan, as a sentence; None where it is planned."""
        if self.protocol.ladder and phase in GROUPS:
            return None
        declared = next((entry for entry in self.protocol.phases if entry.name == phase), None)
        pinned = self.runs[0].vllm_version_pinned if self.runs else None
        if declared is None:
            return f"{phase} is not planned in this protocol" + (f" for vLLM {pinned}" if pinned else "")
        since = declared.since_vllm
        if since is not None and pinned is not None and not within(pinned, since, None):
            return f"{phase} is not planned: needs vLLM ≥ {since}, the pin is {pinned}"
        return None

    def primary(self) -> Comparison | None:
        """The comparison that decides."""
        return next((entry for entry in self.protocol.comparisons if entry.role == "primary"), None)


class Gate(Struct, frozen=True):
    """A registered gate. `judge` takes the context and the validated parameters.

    `judges_faulted`: it also judges runs that did not complete, and so needs no completed one.
    """

    name: str
    parameters: type[Struct]
    judge: Callable[[GateContext, Any], Decision]
    judges_faulted: bool = False


GATES: dict[str, Gate] = {}


def gate(
    name: str, parameters: type[Parameters], judges_faulted: bool = False
) -> Callable[[Judge[Parameters]], Judge[Parameters]]:
    """Register a gate function under the name protocols use."""

    def register(judge: Judge[Parameters]) -> Judge[Parameters]:
        GATES[name] = Gate(name, parameters, judge, judges_faulted)
        return judge

    return register


def read_parameters(protocol: Protocol, name: str) -> Struct:
    """The validated parameters of one gate of a protocol.

    Raises UnusableInput for an unknown gate or parameter, or a missing one. Arms and phases are not looked up: a
    protocol resolved for an old version lacks phases that its gates still name, which is for the gate to say.
    """
    found = GATES.get(name)
    if found is None:
        raise UnusableInput(f'gate "{name}" is unknown; use one of {", ".join(sorted(GATES))}.')
    try:
        given = {key: _resolved(value, protocol.sizes) for key, value in protocol.gates[name].items()}
        parameters = msgspec.convert(given, found.parameters)
    except msgspec.ValidationError as error:
        allowed = ", ".join(found.parameters.__struct_encode_fields__) or "none"
        raise UnusableInput(
            f'gate "{name}" of protocol "{protocol.name}": {error}; its parameters are: {allowed}.'
        ) from None
    return parameters


def validate_gates(protocol: Protocol) -> None:
    """Raise UnusableInput, one sentence, unless every gate is known, its parameters fit, and what they name exists."""
    phases = {phase.name for phase in protocol.phases}
    for name in protocol.gates:
        parameters = read_parameters(protocol, name)
        for arm in _named(parameters, ("arm", "arms")):
            if arm not in protocol.arms:
                raise UnusableInput(f'gate "{name}" names arm "{arm}"; the protocol has {", ".join(protocol.arms)}.')
        for phase in _named(parameters, ("phase", "phases", "returns", "hit", "return_")):
            if phase not in phases:
                raise UnusableInput(
                    f'gate "{name}" names phase "{phase}"; the protocol has {", ".join(sorted(phases))}.'
                )


def run_gates(context: GateContext) -> list[GateResult]:
    """Every gate of the protocol, in its order. A record too damaged to judge gives `passed` None, no exception."""
    results = []
    for name in context.protocol.gates:
        parameters = read_parameters(context.protocol, name)
        if not context.runs and not (GATES[name].judges_faulted and context.faulted):
            results.append(GateResult(name, None, "no completed run to judge"))
            continue
        try:
            passed, detail = GATES[name].judge(context, parameters)
        except NotRequired as absent:
            results.append(GateResult(name, None, str(absent), required=False))
            continue
        except Disturbed as found:
            results.append(GateResult(name, None, str(found), disturbed=True))
            continue
        except (LookupError, TypeError, ValueError, ArithmeticError, UnusableInput) as error:
            passed, detail = None, f"the records can't be judged: {type(error).__name__}: {error}"
        results.append(GateResult(name, passed, detail))
    return results


def where(run: RunRecord, phase: PhaseRecord | None = None) -> str:
    """How a detail names a run: "pair 3, arm offload, phase return"."""
    text = f"pair {run.pair}, arm {run.arm}"
    return text if phase is None else f"{text}, phase {phase.name}"


def some(sentences: Iterable[str]) -> str:
    """The first few findings and how many more there are."""
    found = list(sentences)
    rest = len(found) - _NAMED_AT_MOST
    return "; ".join(found[:_NAMED_AT_MOST]) + (f"; and {rest} more" if rest > 0 else "")


def backend_of(run: RunRecord) -> Backend:
    """The engine's backend; a stand-in plays the one its host has hardware for."""
    if run.evidence == "standin":
        return "cuda" if run.conditions.gpus else "cpu"
    return "cuda" if run.evidence == "gpu" else "cpu"


def phase_of(run: RunRecord, name: str) -> PhaseRecord | None:
    """The phase of that name in a run, or None."""
    return find_phase(run, name)


def _resolved(value: Any, sizes: dict[str, int]) -> Any:
    """A parameter "$name" stands for an entry of the protocol's sizes, as elsewhere in a protocol."""
    return sizes.get(value[1:], value) if isinstance(value, str) and value.startswith("$") else value


def _named(parameters: Struct, fields: tuple[str, ...]) -> list[str]:
    names: list[str] = []
    for field in fields:
        value = getattr(parameters, field, None)
        if value:
            names.extend([value] if isinstance(value, str) else value)
    return names
