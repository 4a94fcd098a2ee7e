"""Where requests' time went, by client and by engine, and whether queueing took what preemption gave. Pure.

Client: lag + first token + normal gaps + stall gaps = end-to-end, exactly, request by request. Engine: queue + prefill
+ decode against end-to-end, by the sums of its histograms. A wait after a preemption is in no queue time of vLLM; it
lies inside decode (or prefill), so it is bounded by the stalls that the client saw, not measured; and only where each
wait was long enough for a stall.

What the engine's parts leave of end-to-end has a known place (read in v1/metrics/stats.py of 0.32): the parts are taken
by the engine core's clock, from the request's entry into its queue to its last token; end-to-end and the time to first
token by the API server, from the request's arrival to the token's. So time to first token − queue − prefill is the way
into the core and of a token out of it, by other counters, and should be nearly all of the difference. The core takes
requests in between its steps, so that one which comes while a step runs waits for its end on that way, in no queue
time.
"""

from collections.abc import Sequence

from msgspec import Struct

from kvtrial.analysis.effect import LEAST_PAIRS, Interval, differences, hodges_lehmann
from kvtrial.analysis.levels import risen
from kvtrial.record.record import PhaseRecord
from kvtrial.record.verdict import Moved

BY_CLIENT_ALONE = (
    "; the two disagree: the engine does not book as queue time what requests wait longer before their first token, "
    "and by the client's clock that took it"
)
BY_ENGINE_ALONE = (
    "; the two disagree: by the engine's queue time it was taken, by the client's clock requests wait less than that "
    "longer for their first token"
)
SERVER_PARTS = ("queue_seconds_sum", "prefill_seconds_sum", "decode_seconds_sum")


class ServerLedger(Struct, frozen=True):
    """Rises of the engine's sums over a phase, seconds. The shares are of end-to-end, None without it."""

    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    e2e_seconds: float
    ttft_seconds: float | None = None

    @property
    def difference_share(self) -> float | None:
        """(e2e − queue − prefill − decode) / e2e: what the parts leave."""
        parts = self.queue_seconds + self.prefill_seconds + self.decode_seconds
        return (self.e2e_seconds - parts) / self.e2e_seconds if self.e2e_seconds > 0 else None

    @property
    def outside_core_share(self) -> float | None:
        """(ttft − queue − prefill) / e2e: of the difference what lies outside the engine core, by other counters."""
        if self.ttft_seconds is None or self.e2e_seconds <= 0:
            return None
        return (self.ttft_seconds - self.queue_seconds - self.prefill_seconds) / self.e2e_seconds


def server_ledger(phase: PhaseRecord) -> ServerLedger | None:
    """The engine's ledger of a phase, None where a sum is not exported."""
    values = [risen([phase], role) for role in (*SERVER_PARTS, "e2e_seconds_sum")]
    queue, prefill, decode, e2e = values
    if queue is None or prefill is None or decode is None or e2e is None:
        return None
    return ServerLedger(queue, prefill, decode, e2e, risen([phase], "ttft_seconds_sum"))


def judge_moved(
    arm: str,
    against: str,
    stall: tuple[Sequence[float], Sequence[float]],
    queue: tuple[Sequence[float], Sequence[float]],
    wait: tuple[Sequence[float], Sequence[float]] | None = None,
) -> Moved:
    """Whether queueing took what preemption gave, from seconds per request by pair: (of the arm, of the control).

    Given: how much less time requests stall. Taken: how much longer they queue, by the engine; and how much longer they
    wait for a first token than alone, by the client's clock (`wait`, None where that isn't known), wherever the engine
    books it. MOVED is said when by either the intervals of given and taken lie above 0 and what was given is not shown
    to be more than what was taken: the interval of taken − given reaches 0. Without six pairs nothing is said either
    way (None).
    """
    given = [-value for value in differences(*stall)]
    if not given or not differences(*queue):
        return Moved(arm, against, None, None, None, None, None, None, None, 0, "no pair has both times")
    gave = hodges_lehmann(given)
    took, left, by_engine = _taken(given, differences(*queue))
    moved: bool | None = by_engine
    note = _numbers(gave, took, left)
    if wait is not None:
        waited, beyond, by_client = _taken(given, differences(*wait))
        note += (
            f"; by the client's clock it waits {_plain(abs(waited.estimate))} s "
            f"{'longer' if waited.estimate >= 0 else 'shorter'} for its first token, beyond what one alone does "
            f"(sum {_plain(beyond.estimate, '+')} s, interval {_plain(beyond.low, '+')} to {_plain(beyond.high, '+')})"
        )
        moved = by_engine or by_client
        if by_engine != by_client:
            note += BY_CLIENT_ALONE if by_client else BY_ENGINE_ALONE
    if left.pairs < LEAST_PAIRS:
        moved = None
    return Moved(
        arm=arm,
        against=against,
        moved=moved,
        given_seconds_per_request=gave.estimate,
        taken_seconds_per_request=took.estimate,
        taken_low=took.low,
        taken_high=took.high,
        net_low=left.low,
        net_high=left.high,
        pairs=left.pairs,
        note=_note(moved, note),
    )


def _taken(given: Sequence[float], taken: Sequence[float]) -> tuple[Interval, Interval, bool]:
    """What was taken, taken − given, and whether the one took the other."""
    net = [taken_one - given_one for taken_one, given_one in zip(taken, given, strict=True)]
    gave, took, left = (hodges_lehmann(values) for values in (given, taken, net))
    return took, left, gave.low > 0 and took.low > 0 and left.high >= 0


def _numbers(gave: Interval, took: Interval, left: Interval) -> str:
    return (
        f"a request stalls {_plain(abs(gave.estimate))} s {'less' if gave.estimate >= 0 else 'more'} and queues "
        f"{_plain(abs(took.estimate))} s {'longer' if took.estimate >= 0 else 'shorter'} "
        f"(sum {_plain(left.estimate, '+')} s, interval {_plain(left.low, '+')} to {_plain(left.high, '+')})"
    )


def _note(moved: bool | None, numbers: str) -> str:
    if moved is None:
        return f"{numbers}; with fewer than {LEAST_PAIRS} pairs nobody can say whether the delay moved into the queue"
    if moved:
        return f"MOVED: queueing took what preemption gave: {numbers}"
    return f"not moved: {numbers}"


def _plain(value: float, sign: str = "") -> str:
    """Three digits, to the microsecond, and never in exponent form."""
    return f"{value:{sign}.3g}" if abs(value) >= 1e-4 or not value else f"{value:{sign}.6f}"
