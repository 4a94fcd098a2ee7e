"""What an arm changes against the control on a host: refused where that is nothing. Pure."""

from msgspec.structs import replace

from kvtrial.analysis.laddering import is_level
from kvtrial.analysis.launch import dashed
from kvtrial.record.errors import UnusableInput
from kvtrial.record.plan import HostPlan
from kvtrial.record.protocol import Arm, Protocol


def refuse_idle_arms(plan: HostPlan, declared: Protocol, resolved: Protocol) -> None:
    """Raise UnusableInput for an arm that declares a change and runs exactly as the control does on a host.

    `declared`: the protocol as written, `resolved`: with the host's sizes. An arm that declares what the control
    declares is meant to be the same, as in a protocol that looks for noise.
    """
    control = declared.control
    for name, arm in declared.arms.items():
        if name == control or _as_written(arm) == _as_written(declared.arms[control]):
            continue
        if _runs_alike(plan, name, resolved):
            changes = ", ".join(_changes(resolved.arms[name], resolved.arms[control])) or "no change"
            rest = [other for other in declared.arms if other not in (name, control)]
            choose = f"leave it out (-e arms={','.join(rest)})" if rest else "choose another arm"
            raise UnusableInput(
                f"host {plan.host}: arm {name} ({changes}) runs exactly as {control} does here, the same launch and "
                f"the same requests, so it can show nothing; give what it changes another value, of something that is "
                f"used here, or {choose}."
            )


def _as_written(arm: Arm) -> tuple[object, ...]:
    return dashed(arm.args), arm.env, arm.sizes or {}, arm.model


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
    return [f"{name}={value}" for name, value in (found | (arm.sizes or {})).items()] + sorted(arm.env)
