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
from kvtrial.record.ladder import TookBy
from kvtrial.record.record import PhaseRecord
from kvtrial.record.verdict import Moved

BY_ENGINE_ALONE = (
    "; the two disagree: by the engine's queue time it was taken, by the client's clock requests wait less than that "
    "longer for their first token"
)
OR_THE_PROMPTS = (
    "; by that clock the wait took what preemption gave, but the arm computes prompts in another way, so nobody can "
    "say whether requests queue or their prompts take longer"
)
WHAT_TOOK_IT: dict[TookBy, str] = {
    "queue": "it takes the preemptions away and lets requests queue for as long: the delay only moved",
    "first_token": (
        "it takes the preemptions away and lets requests wait as much longer for their first token, by the client's "
        "clock: the delay only moved"
    ),
    "queue_or_prompts": (
        "it takes the preemptions away, and requests wait as much longer for their first token, be it in the queue or "
        "for how it computes prompts"
    ),
}
"""Why an arm whose delay went elsewhere is not recommended."""
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
    prompts_alike: bool = True,
) -> Moved:
    """Whether waiting took what preemption gave, from seconds per request by pair: (of the arm, of the control).

    Given: how much less time requests stall. Taken: how much longer they queue, by the engine; and how much longer they
    wait for a first token than alone, by the client's clock (`wait`, None where that isn't known), wherever the engine
    books it. MOVED is said when by either the intervals of given and taken lie above 0 and what was given is not shown
    to be more than what was taken: the interval of taken − given reaches 0. `by` and the numbers are those of the way
    that decides, the engine's where both or neither do. `prompts_alike`: the arm computes prompts as the control does;
    else a longer wait by the client alone may be how it computes them, and nothing is said either way (None). Nor is
    it without six pairs.
    """
    given = [-value for value in differences(*stall)]
    if not given or not differences(*queue):
        return Moved(arm, against, None, None, None, None, None, None, None, 0, "no pair has both times")
    gave = hodges_lehmann(given)
    took, left, by_engine = _taken(given, differences(*queue))
    waited, beyond, by_client = _taken(given, differences(*wait)) if wait is not None else (took, left, False)
    by: TookBy | None = None
    if left.pairs >= LEAST_PAIRS and (by_engine or by_client):
        by = "queue" if by_engine else "first_token" if prompts_alike else "queue_or_prompts"
    if by in ("first_token", "queue_or_prompts"):
        by_the_queue, (took, left) = _queues(took, left), (waited, beyond)
    else:
        by_the_queue = _queues(took, left)
    return Moved(
        arm=arm,
        against=against,
        moved=None if left.pairs < LEAST_PAIRS or by == "queue_or_prompts" else by is not None,
        given_seconds_per_request=gave.estimate,
        taken_seconds_per_request=took.estimate,
        taken_low=took.low,
        taken_high=took.high,
        net_low=left.low,
        net_high=left.high,
        pairs=left.pairs,
        note=_note(by, gave, by_the_queue, _waits(waited, beyond) if wait is not None else "", by_client, left.pairs),
        by=by,
    )


def _taken(given: Sequence[float], taken: Sequence[float]) -> tuple[Interval, Interval, bool]:
    """What was taken, taken − given, and whether the one took the other."""
    net = [taken_one - given_one for taken_one, given_one in zip(taken, given, strict=True)]
    gave, took, left = (hodges_lehmann(values) for values in (given, taken, net))
    return took, left, gave.low > 0 and took.low > 0 and left.high >= 0


def _queues(took: Interval, left: Interval) -> str:
    way = "longer" if took.estimate >= 0 else "shorter"
    return f"queues {_plain(abs(took.estimate))} s {way} {_sum(left)}"


def _waits(took: Interval, left: Interval) -> str:
    way = "longer" if took.estimate >= 0 else "shorter"
    return f"waits {_plain(abs(took.estimate))} s {way} for its first token, beyond what one alone does {_sum(left)}"


def _sum(left: Interval) -> str:
    """Taken − given."""
    return f"(sum {_plain(left.estimate, '+')} s, interval {_plain(left.low, '+')} to {_plain(left.high, '+')})"


def _note(by: TookBy | None, gave: Interval, queues: str, waits: str, by_client: bool, pairs: int) -> str:
    stalls = f"a request stalls {_plain(abs(gave.estimate))} s {'less' if gave.estimate >= 0 else 'more'} and"
    if by == "first_token":
        return (
            f"MOVED: the wait for the first token took what preemption gave: {stalls} {waits}, by the client's clock; "
            f"the engine does not book that as queue time, by which it {queues}"
        )
    numbers = f"{stalls} {queues}" + (f"; by the client's clock it {waits}" if waits else "")
    if by == "queue_or_prompts":
        return numbers + OR_THE_PROMPTS
    if pairs < LEAST_PAIRS:
        return f"{numbers}; with fewer than {LEAST_PAIRS} pairs nobody can say whether the delay moved into the queue"
    if by == "queue":
        apart = BY_ENGINE_ALONE if waits and not by_client else ""
        return f"MOVED: queueing took what preemption gave: {numbers}{apart}"
    return f"not moved: {numbers}"


def _plain(value: float, sign: str = "") -> str:
    """Three digits, to the microsecond, and never in exponent form."""
    return f"{value:{sign}.3g}" if abs(value) >= 1e-4 or not value else f"{value:{sign}.6f}"
