"""What a level of a ladder leaves beside a phase's other facts: its time line, its ledger, and the reset before it.

These types are parts of the record. All of a ledger's times are whole nanoseconds of one clock, so its parts add up to
the whole exactly.
"""

from bisect import bisect_left
from collections.abc import Sequence
from statistics import median_low

from msgspec import Struct

LISTED_REQUESTS_MAX = 1000


class PressurePoint(Struct, frozen=True):
    """The engine's gauges at a moment, and preemptions counted since the phase began.

    `seconds` since the phase began; `kv_used_share` of the GPU's blocks, 0..1. None: not exported.
    """

    seconds: float
    running: float | None
    waiting: float | None
    kv_used_share: float | None
    preemptions: float | None


class RequestLedger(Struct, frozen=True):
    """Where the time of one finished request went, nanoseconds: the four parts add up to `e2e_ns` by construction.

    `lag_ns`: due to sent. `first_token_ns`: sent to first token. `normal_gaps_ns` and `stall_gaps_ns`: gaps between
    tokens, a stall being one above the phase's threshold. `longest_gap_ns` is the longest of all.
    """

    key: str
    lag_ns: int
    first_token_ns: int
    normal_gaps_ns: int
    stall_gaps_ns: int
    stalls: int
    longest_gap_ns: int
    e2e_ns: int


class PhaseLedger(Struct, frozen=True):
    """The ledger of a phase over its finished requests with a first token. `*_ns` are sums.

    `stall_above_ns` = `stall_multiple` × `run_median_gap_ns`, the median gap between tokens over all phases of the run
    that have a ledger. `requests` lists the first thousand. `next_first_token_ns`: from each request's send to the next
    first token that any request of the phase got. A step that computes prompts and is under way when a request is sent
    has ended by then, so that it can't have waited longer for it. None in older records.
    """

    stall_multiple: float
    run_median_gap_ns: int
    stall_above_ns: int
    counted: int
    stalled_requests: int
    stalls: int
    lag_ns: int
    first_token_ns: int
    normal_gaps_ns: int
    stall_gaps_ns: int
    e2e_ns: int
    requests: list[RequestLedger]
    next_first_token_ns: int | None = None


class ResetFact(Struct, frozen=True):
    """The emptying of the engine's caches before a phase: whether it said so, tries, seconds.

    `external`: the tier's too. `marker_hit_tokens`: of the phase's first prompt, sent twice just before, what the
    engine's own cache gave back; so much the phase would find if nothing had been emptied. None in older records.
    """

    succeeded: bool
    external: bool
    tries: int
    seconds: float
    detail: str = ""
    marker_hit_tokens: float | None = None


class RequestTimes(Struct):
    """A finished request's times, nanoseconds since the phase began; `gaps_us` between tokens, whole microseconds."""

    key: str
    due_ns: int
    sent_ns: int
    first_token_ns: int
    last_token_ns: int
    gaps_us: Sequence[int]


def request_ledger(times: RequestTimes, stall_above_ns: int) -> RequestLedger:
    """The ledger of one request.

    Gaps are whole microseconds; what rounding leaves between them and the time from first to last token is less than
    two microseconds and goes to the normal gaps, so that the parts add up.
    """
    stalls = [gap for gap in times.gaps_us if gap * 1000 > stall_above_ns]
    stall_gaps = sum(stalls) * 1000
    answer = times.last_token_ns - times.first_token_ns
    return RequestLedger(
        key=times.key,
        lag_ns=times.sent_ns - times.due_ns,
        first_token_ns=times.first_token_ns - times.sent_ns,
        normal_gaps_ns=answer - stall_gaps,
        stall_gaps_ns=stall_gaps,
        stalls=len(stalls),
        longest_gap_ns=1000 * max(times.gaps_us, default=0),
        e2e_ns=times.last_token_ns - times.due_ns,
    )


def phase_ledger(requests: Sequence[RequestTimes], stall_multiple: float, run_median_gap_ns: int) -> PhaseLedger:
    """The ledger of a phase. `run_median_gap_ns`: of the whole run."""
    above = round(stall_multiple * run_median_gap_ns)
    rows = [request_ledger(times, above) for times in requests]
    firsts = sorted(times.first_token_ns for times in requests)
    return PhaseLedger(
        stall_multiple=stall_multiple,
        run_median_gap_ns=run_median_gap_ns,
        stall_above_ns=above,
        counted=len(rows),
        stalled_requests=sum(row.stalls > 0 for row in rows),
        stalls=sum(row.stalls for row in rows),
        lag_ns=sum(row.lag_ns for row in rows),
        first_token_ns=sum(row.first_token_ns for row in rows),
        normal_gaps_ns=sum(row.normal_gaps_ns for row in rows),
        stall_gaps_ns=sum(row.stall_gaps_ns for row in rows),
        e2e_ns=sum(row.e2e_ns for row in rows),
        requests=rows[:LISTED_REQUESTS_MAX],
        next_first_token_ns=sum(firsts[bisect_left(firsts, times.sent_ns)] - times.sent_ns for times in requests),
    )


def median_gap_ns(phases: Sequence[Sequence[RequestTimes]]) -> int:
    """The median gap between tokens over all requests, nanoseconds; 0 without any."""
    gaps = [gap for requests in phases for times in requests for gap in times.gaps_us]
    return 1000 * median_low(gaps) if gaps else 0
