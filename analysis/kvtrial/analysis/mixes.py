"""What a protocol declares of its mixes and prompts, and how an open loop went: did the engine keep up with it?"""

from collections.abc import Iterable, Sequence
from statistics import median

from msgspec import Struct

from kvtrial.record.protocol import Mix, Phase, Protocol, Trace, Workload
from kvtrial.record.record import RunRecord

BEHIND_MAX = 0.10
"""Seconds that the TTFT grows by in a second of arrivals: an engine that serves a tenth less than arrives shows it."""
DOUBLED_BEHIND_MAX = 0.01
"""The same where the mean TTFT also doubles from one half of the phase to the other."""


def declared_shares(protocol: Protocol) -> dict[str, float]:
    """Phase → share (0..1) of its requests that return to an evicted prefix, of every phase that sends a mix."""
    return {
        phase.name: int(workload.hit_share_percent) / 100
        for phase, workload in _with_workload(protocol)
        if isinstance(workload, Mix)
    }


def prompt_tokens(protocol: Protocol, phase: str) -> int | None:
    """Tokens of a phase's prompts; None for a phase that sends a mix or a trace, or that the protocol lacks."""
    sets = [found.prompts for found in protocol.phases if found.name == phase]
    if not sets or not isinstance(sets[0], str):
        return None
    tokens = protocol.prompt_sets[sets[0]].tokens
    return protocol.sizes[tokens.removeprefix("$")] if isinstance(tokens, str) else tokens


def trace_phases(protocol: Protocol) -> list[str]:
    """Phases that replay a trace."""
    return [phase.name for phase, workload in _with_workload(protocol) if isinstance(workload, Trace)]


def _with_workload(protocol: Protocol) -> list[tuple[Phase, Workload]]:
    declared = protocol.workloads or {}
    return [(phase, declared[phase.workload]) for phase in protocol.phases if phase.workload]


class Saturated(Struct, frozen=True):
    """An arm that did not keep up with a phase's arrivals: medians over its runs, seconds."""

    arm: str
    phase: str
    runs: int
    first_half_seconds: float
    second_half_seconds: float
    behind: float

    def __str__(self) -> str:
        return (
            f"arm {self.arm}, phase {self.phase}: the mean TTFT grew from {self.first_half_seconds:.3g} s in the first "
            f"half to {self.second_half_seconds:.3g} s in the second, {100 * self.behind:.3g} s in 100 s of arrivals "
            f"(median of {self.runs} runs)"
        )


def saturated_phases(runs: Iterable[RunRecord], phases: Sequence[str] | None = None) -> list[Saturated]:
    """Arms and open-loop phases in which the queue grew as long as requests arrived; `phases`: only these.

    Where more arrives than is served, a request waits the longer the later it comes, so the mean TTFT of the phase
    measures its length. Judged on the median over an arm's runs, since one run may have a crowd at its end by chance.
    """
    seen: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for run in runs:
        for phase in run.phases:
            loop = phase.open_loop
            if loop is None or (phases is not None and phase.name not in phases) or loop.span_seconds <= 0:
                continue
            first, second = loop.ttft_mean_first_half_seconds, loop.ttft_mean_second_half_seconds
            if first is not None and second is not None:
                behind = (second - first) / (loop.span_seconds / 2)
                seen.setdefault((run.arm, phase.name), []).append((first, second, behind))
    found = []
    for (arm, name), values in seen.items():
        first, second, behind = (median(column) for column in zip(*values, strict=True))
        if behind >= BEHIND_MAX or (behind >= DOUBLED_BEHIND_MAX and second >= 2 * first):
            found.append(Saturated(arm, name, len(values), first, second, behind))
    return found
