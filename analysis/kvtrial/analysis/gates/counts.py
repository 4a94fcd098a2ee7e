"""Gates on the books: counters only rise in one process, and every request that was sent is accounted for."""

from collections.abc import Iterator
from itertools import pairwise

from msgspec import Struct

from kvtrial.analysis.gates.context import Decision, GateContext, NoParameters, gate, phase_of, some, where
from kvtrial.analysis.metrics import delta
from kvtrial.analysis.mixes import saturated_phases
from kvtrial.record.exposition import NOT_SETTLED, accumulating_roles
from kvtrial.record.record import PhaseRecord, RunRecord

START_TIME = "process_start_time_seconds"
FINISHED = ("requests_finished_stop", "requests_finished_length", "requests_finished_repetition")
LISTED_REQUESTS_MAX = 1000
"""A record lists so many requests of a phase; all of them stand in requests.jsonl.zst."""
LOST = ("requests_finished_abort", "requests_finished_error")


@gate("counters_monotone", NoParameters)
def counters_monotone(context: GateContext, parameters: NoParameters) -> Decision:
    """Counters settle after each phase and never fall; a run's server has one start time, and no other run's."""
    problems: list[str] = []
    started: dict[float, RunRecord] = {}
    steps = 0
    for run in context.runs:
        if not run.phases:
            return None, f"{where(run)} has no phase"
        problems += [
            f"{where(run, phase)}: {caveat}, so what was counted of it is not known"
            for phase in run.phases
            for caveat in phase.metrics_caveats
            if caveat.startswith(NOT_SETTLED)
        ]
        for name, before, after in _steps(run):
            steps += 1
            problems += [f"{where(run)}, {name}: {text}" for text in _fell(before, after)]
        starts = {
            value for phase in run.phases for value in (phase.before.get(START_TIME), phase.after.get(START_TIME))
        }
        if None in starts:
            return None, f"{where(run)}: the server's start time is not recorded"
        if len(starts) > 1:
            problems.append(f"{where(run)}: the server was restarted, its start time changed within the run")
        for start in starts:
            other = started.setdefault(start, run) if start is not None else run
            if other is not run:
                problems.append(f"{where(run)} used the same server as {where(other)}; every run needs a fresh one")
    if problems:
        return False, some(problems)
    return True, f"no counter fell in {steps} steps of {len(context.runs)} runs; one process start in each, none shared"


def _steps(run: RunRecord) -> Iterator[tuple[str, dict[str, float | None], dict[str, float | None]]]:
    in_time = sorted(run.phases, key=lambda phase: phase.started_monotonic_seconds)
    for phase in in_time:
        yield f"phase {phase.name}", phase.before, phase.after
    for first, second in pairwise(in_time):
        yield f"between {first.name} and {second.name}", first.after, second.before


def _fell(before: dict[str, float | None], after: dict[str, float | None]) -> list[str]:
    return [
        f"{role} was exported and then no longer" if now is None else f"{role} fell from {was:,.0f} to {now:,.0f}"
        for role in accumulating_roles()
        if (was := before.get(role)) is not None and ((now := after.get(role)) is None or now < was)
    ]


@gate("requests_complete", NoParameters)
def requests_complete(context: GateContext, parameters: NoParameters) -> Decision:
    """Sent, finished at the client and finished at the server are one number in every phase; none failed or aborted."""
    problems, requests = [], 0
    for run in context.runs:
        for phase in run.phases:
            at_server, lost = _sum(phase, FINISHED), _sum(phase, LOST)
            if at_server is None:
                return None, f"{where(run, phase)}: the server's finished requests are not exported"
            requests += phase.sent
            listed = min(phase.sent, LISTED_REQUESTS_MAX)
            if not phase.sent == phase.finished == at_server or len(phase.requests) < listed or phase.failed or lost:
                classes = ", ".join(f"{name} {count}" for name, count in sorted(phase.errors.items()))
                problems.append(
                    f"{where(run, phase)}: sent {phase.sent}, finished {phase.finished} at the client and "
                    f"{at_server:.0f} at the server, recorded {len(phase.requests)} of {listed}, "
                    f"failed {phase.failed}, aborted or in error {lost or 0:.0f}" + (f" ({classes})" if classes else "")
                )
    if problems:
        return False, some(problems)
    return (
        True,
        f"sent = finished = counted by the server: {requests:,} requests in {len(context.runs)} runs, "
        "0 failed or aborted",
    )


def _sum(phase: PhaseRecord, roles: tuple[str, ...]) -> float | None:
    known = [value for role in roles if (value := delta(phase, role)) is not None]
    return sum(known) if known else None


class OpenLoops(Struct, frozen=True, forbid_unknown_fields=True):
    """Phases of an open loop that must not be saturated."""

    phases: list[str]


@gate("keeps_up", OpenLoops)
def keeps_up(context: GateContext, parameters: OpenLoops) -> Decision:
    """Every arm served what arrived: had a queue grown through the phase, its TTFT would measure the phase's length."""
    for run in context.runs:
        for name in parameters.phases:
            phase = phase_of(run, name)
            if phase is None or phase.open_loop is None:
                return None, f"{where(run)}: how the open loop of {name} went is not recorded"
    saturated = saturated_phases(context.runs, parameters.phases)
    if saturated:
        return False, (
            f"the engine did not keep up with the arrivals, so TTFT is a matter of how long the phase was: "
            f"{some(map(str, saturated))}; lower the arrival rate"
        )
    drains = [
        phase.open_loop.drain_seconds
        for run in context.runs
        for phase in run.phases
        if phase.name in parameters.phases and phase.open_loop is not None
    ]
    return True, (
        f"no queue grew through {', '.join(parameters.phases)} in any arm; the last answer ended at most "
        f"{max(drains):.2g} s after the last arrival"
    )
