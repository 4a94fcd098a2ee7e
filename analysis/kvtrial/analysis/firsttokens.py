"""When the requests of a phase had their first token, in so little memory that a fleet's runs can be kept together."""

import math
from array import array
from collections.abc import Sequence

from msgspec import Struct

from kvtrial.record.protocol import Protocol
from kvtrial.record.record import PhaseRecord, RunRecord

POINTS_MAX = 512
"""Of a run. A phase of more requests is kept as so many of its order statistics, each standing for as many requests."""


class FirstTokens(Struct, frozen=True):
    """Times to first token of a run's phase, seconds, ascending, how many requests each stands for, and all sent."""

    seconds: Sequence[float]
    requests: Sequence[int]
    sent: int


def first_tokens_of(phase: PhaseRecord) -> FirstTokens:
    """Of the requests that the record lists. One without a time (failed) counts among the sent alone."""
    listed = [request.ttft_seconds for request in phase.requests]
    known = sorted(value for value in listed if value is not None and math.isfinite(value))
    each = max(1, math.ceil(len(known) / POINTS_MAX))
    seconds = array("d", known[each - 1 :: each])
    requests = array("q", [each] * len(seconds))
    if rest := len(known) % each:
        seconds.append(known[-1])
        requests.append(rest)
    return FirstTokens(seconds, requests, len(listed))


def deciding_phase(protocol: Protocol) -> str:
    """The phase of the comparison that decides."""
    return next((found.phase for found in protocol.comparisons if found.role == "primary"), "return")


def first_tokens_of_runs(records: Sequence[RunRecord], phase: str) -> dict[tuple[str, str], FirstTokens]:
    """(host, run) → the times of that phase, of the runs that have it."""
    return {
        (record.host, record.run): first_tokens_of(found)
        for record in records
        for found in record.phases
        if found.name == phase
    }
