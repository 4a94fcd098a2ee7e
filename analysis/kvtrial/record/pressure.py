"""What a level of a ladder leaves beside a phase's other facts: its time line, its ledger, and the reset before it.

These types are parts of the record. All of a ledger's times are whole nanoseconds of one clock, so its parts add up to
the whole exactly.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from itertools import accumulate, islice, pairwise
from statistics import median_low

from msgspec import Struct

LISTED_REQUESTS_MAX = 1000
LISTED_STALLS_MAX = 1000
WAIT_MEDIANS = 10
"""Above so many of the run's median gaps a request waits, where others go on; a step of its own never takes as long."""
EDGE_PARTS = 4
"""A token lies inside another request's gap from a quarter of the run's median gap on: those of one step lie closer."""


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

    `waits`: gaps above ten median gaps in which others went on as usual. Each holds a preemption, whatever is declared
    a stall. `passed_by`: gaps in which others got a token, at least half of those that did not wait themselves. Each
    preemption takes one, since the step that preempts gives the request no token. Both None in older records.
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
    waits: int | None = None
    passed_by: int | None = None


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
    waits, passed_by = passed_by_others(requests, run_median_gap_ns)
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
        waits=waits,
        passed_by=passed_by,
    )


def stalls_of(requests: Sequence[RequestTimes], stall_above_ns: int) -> Iterable[Stall]:
    """Each gap above the threshold, with what others got meanwhile; request by request, by time in each."""
    if not any(1000 * gap > stall_above_ns for times in requests for gap in times.gaps_us):
        return
    tokens = _token_times(requests)
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


def went_on(others_amid: int, gap_ns: int, median_ns: int) -> bool:
    """Whether others went on in the middle half of a gap: they got half of what one gets in such a time, or more.

    An engine that stands still gives nobody a token; what little others then get are those of a step's edge.
    """
    return others_amid > 0 and 2 * others_amid >= gap_ns / 2 / max(1, median_ns)


def passed_by_others(requests: Sequence[RequestTimes], median_ns: int) -> tuple[int | None, int | None]:
    """`waits` and `passed_by` of a ledger; None both where the median gap is 0.

    Of a gap's length nothing is asked for the second: a request that is computed again in the very next step misses one
    step alone. Requests that wait themselves in the middle of the gap can't have got a token, so they are not asked.
    """
    if median_ns <= 0:
        return None, None
    tokens = sorted((one for one in _token_times(requests) if len(one) > 1), key=lambda one: one[0])
    everything = sorted(token for one in tokens for token in one)
    edge, waits, passed = median_ns // EDGE_PARTS, 0, []
    for own in tokens:
        for low, high in pairwise(own):
            if high - low <= 2 * edge or everything[bisect_right(everything, low + edge)] >= high - edge:
                continue
            passed.append((low, high, own))
            if high - low > WAIT_MEDIANS * median_ns:
                quarter = (high - low) // 4
                amid = bisect_right(everything, high - quarter) - bisect_left(everything, low + quarter)
                waits += went_on(amid, high - low, median_ns)
    passed.sort(key=lambda gap: gap[0])
    return waits, _most_got_one(passed, tokens, edge, WAIT_MEDIANS * median_ns)


def _most_got_one(
    gaps: Sequence[tuple[int, int, list[int]]], tokens: Sequence[list[int]], edge: int, waits_above: int
) -> int:
    """In how many of these gaps (from, to, whose) at least half of the others got a token inside its edges.

    Asked are those that had their first token by then, had not had their last, and do not wait. `gaps` by their from,
    `tokens` by their first. From gap to gap the next token of each request that is under way stays sorted, so that one
    bisection says how many of them got theirs.
    """
    waiting = sorted(
        (a, b, number) for number, one in enumerate(tokens) for a, b in pairwise(one) if b - a > waits_above
    )
    begins, longest = [a for a, _, _ in waiting], max((b - a for a, b, _ in waiting), default=0)
    under_way: list[tuple[int, int]] = []
    begun = found = 0
    for low, high, own in gaps:
        after, before, amid = low + edge, high - edge, (low + high) // 2
        while begun < len(tokens) and tokens[begun][0] <= after:
            insort(under_way, (tokens[begun][0], begun))
            begun += 1
        while under_way[0][0] <= after:
            number = under_way.pop(0)[1]
            place = bisect_right(tokens[number], after)
            if place < len(tokens[number]):
                insort(under_way, (tokens[number][place], number))
        asked, got = len(under_way) - 1, bisect_left(under_way, (before,))
        for _, b, number in waiting[bisect_left(begins, amid - longest) : bisect_right(begins, amid)]:
            one = tokens[number]
            if b > amid and one is not own and one[0] <= after < one[-1]:
                asked -= 1
                got -= one[bisect_right(one, after)] < before
        found += 2 * got >= asked
    return found


def _token_times(requests: Sequence[RequestTimes]) -> list[list[int]]:
    return [
        [times.first_token_ns + 1000 * after for after in accumulate(times.gaps_us, initial=0)] for times in requests
    ]


def median_gap_ns(phases: Sequence[Sequence[RequestTimes]]) -> int:
    """The median gap between tokens over all requests, nanoseconds; 0 without any.

    Where most tokens come several at a time, the median of the gaps that are none of these: by a median of 0 every gap
    would be a stall.
    """
    gaps = [gap for requests in phases for times in requests for gap in times.gaps_us]
    if gaps and not median_low(gaps):
        gaps = [gap for gap in gaps if gap]
    return 1000 * median_low(gaps) if gaps else 0
