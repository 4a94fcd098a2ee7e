"""What a level of a ladder leaves beside a phase's other facts: its time line, its ledger, and the reset before it.

These types are parts of the record. All of a ledger's times are whole nanoseconds of one clock, so its parts add up to
the whole exactly.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, islice
from statistics import median_low

from msgspec import Struct

LISTED_REQUESTS_MAX = 1000
LISTED_STALLS_MAX = 1000


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


class Stall(Struct, frozen=True):
    """A gap between two tokens of a request above the phase's threshold, nanoseconds since the phase began.

    `tokens`: of its answer that came before. `others_amid`: tokens that other requests of the phase got in the middle
    half of the gap: none where the whole engine stood still, some where this request alone waited. The outer quarters
    are left out, since tokens of one step come one after the other.
    """

    key: str
    from_ns: int
    to_ns: int
    tokens: int
    others_amid: int


class PhaseLedger(Struct, frozen=True):
    """The ledger of a phase over its finished requests with a first token. `*_ns` are sums.

    `stall_above_ns` = `stall_multiple` × `run_median_gap_ns`, the median gap between tokens over all phases of the run
    that have a ledger. `requests` and `stalls_at` list the first thousand, the latter None in older records.
    `next_first_token_ns`: from each request's send to the next first token that any request of the phase got. A step
    that computes prompts and is under way when a request is sent has ended by then, so that it can't have waited longer
    for it. None in older records.
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
    stalls_at: list[Stall] | None = None


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
        stalls_at=list(islice(stalls_of(requests, above), LISTED_STALLS_MAX)),
    )


def stalls_of(requests: Sequence[RequestTimes], stall_above_ns: int) -> Iterable[Stall]:
    """Each gap above the threshold, with what others got meanwhile; request by request, by time in each."""
    if not any(1000 * gap > stall_above_ns for times in requests for gap in times.gaps_us):
        return
    tokens = [
        [times.first_token_ns + 1000 * after for after in accumulate(times.gaps_us, initial=0)] for times in requests
    ]
    for number, (times, own) in enumerate(zip(requests, tokens, strict=True)):
        for at, gap_us in enumerate(times.gaps_us):
            if 1000 * gap_us <= stall_above_ns:
                continue
            edge = 250 * gap_us
            low, high = own[at] + edge, own[at + 1] - edge
            amid = sum(
                bisect_right(other, high) - bisect_left(other, low)
                for position, other in enumerate(tokens)
                if position != number
            )
            yield Stall(times.key, own[at], own[at + 1], at + 1, amid)


def median_gap_ns(phases: Sequence[Sequence[RequestTimes]]) -> int:
    """The median gap between tokens over all requests, nanoseconds; 0 without any.

    Where most tokens come several at a time, the median of the gaps that are none of these: by a median of 0 every gap
    would be a stall.
    """
    gaps = [gap for requests in phases for times in requests for gap in times.gaps_us]
    if gaps and not median_low(gaps):
        gaps = [gap for gap in gaps if gap]
    return 1000 * median_low(gaps) if gaps else 0
