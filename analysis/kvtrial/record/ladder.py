"""Schema of a ladder's answer: a part of the verdict."""

from typing import Literal

from msgspec import Struct

Pattern = Literal["none", "one burst", "continuous", "not seen"]
OutOf = Literal["KV cache", "sequences", "compute", "nothing yet"]
TookBy = Literal["queue", "first_token", "queue_or_prompts"]
"""What took the delay that preemption gave: the engine's queue, the wait for a first token by the client's clock, or
that in an arm which computes prompts in another way.
"""


class Level(Struct, frozen=True):
    """One level of the ladder, of one arm. Counts are sums over its runs, times medians over runs of the run's value.

    `preemptions_by_run`: in the order of pairs. `pattern`: how the returns of the preempted lie in time: the engine
    counts a preemption with its request's next output, so no counter dates the preemption itself. `starts_pattern`: how
    the preemptions lie in time by the client's clock, a step after the last token before a wait; not seen where a
    record does not date its stalls, of several engines, or where fewer waits were seen than preemptions.
    Queue time is the engine's and holds no wait after a preemption; `stall_seconds_per_request` is the client's and
    bounds those waits from above where each was long enough for a stall.
    `recomputed_tokens_at_most`: preemptions × the longest request's tokens, since no version counts them;
    the longest of all that were sent, failed ones with the answer that they were to get. None where it isn't known.
    `*_tokens_range`: least and most. `limit_reached_share`: of answers as long as the max_tokens that was asked for.
    `server_difference_share`: what queue + prefill + decode leave of end-to-end, in the run where it is largest;
    `server_outside_core_share`: what of that run's end-to-end the times to first token show outside the engine core.
    `gpu_seconds_per_request`: the arm's GPUs × the level's seconds, for a finished request; None without GPUs.
    """

    concurrency: int
    runs: int
    requests: int
    preemptions: int
    failed: int
    aborted: int
    preemptions_by_run: list[int]
    preemptions_per_request: float | None
    preemptions_per_second: float | None
    pattern: Pattern
    ttft_median_seconds: float | None
    ttft_p95_seconds: float | None
    inter_token_median_seconds: float | None
    longest_gap_p95_seconds: float | None
    longest_gap_max_seconds: float | None
    queue_seconds_per_request: float | None
    stall_seconds_per_request: float | None
    stalled_requests: int
    e2e_median_seconds: float | None
    e2e_p95_seconds: float | None
    output_tokens_per_second: float | None
    running_peak: float | None
    waiting_peak: float | None
    kv_used_share_peak: float | None
    prompt_tokens_mean: float | None
    max_tokens_mean: float | None
    answer_tokens_mean: float | None
    limit_reached_share: float | None
    recomputed_tokens_at_most: int | None
    server_difference_share: float | None
    server_outside_core_share: float | None = None
    prompt_tokens_range: list[int] | None = None
    answer_tokens_range: list[int] | None = None
    gpu_seconds_per_request: float | None = None
    starts_pattern: Pattern = "not seen"


class Reached(Struct, frozen=True):
    """The highest level up to which every level kept an objective, None where not even the first did.

    `broken_by` says what the next level broke.
    """

    profile: str
    concurrency: int | None
    requests_within_share: float | None
    output_tokens_per_second: float | None
    broken_by: str


class LevelResources(Struct, frozen=True):
    """What the highest level within a profile takes: `gpus`, GiB of RAM and replicas, and for how long.

    `hours_per_million_output_tokens`, `seconds_per_request_within_objective`: of all of them together. The latter is
    None where no request kept the objective.
    """

    profile: str
    concurrency: int
    gpus: int
    ram_gib: float
    replicas: int
    hours_per_million_output_tokens: float
    seconds_per_request_within_objective: float | None


class LevelCost(Struct, frozen=True):
    """What the highest level within a profile costs, in the user's currency."""

    profile: str
    concurrency: int
    currency: str
    per_hour: float
    per_million_output_tokens: float | None
    per_request_within_objective: float | None


class ArmLadder(Struct, frozen=True):
    """One arm's ladder: its levels, what it reaches, and for a variant what it buys against the control.

    `gpus`: those that its engines take. `only_queues`: no preemption is predicted at any level. `error_requests`: how
    far its onset lies outside the predicted one; `error_at_least`: instead of it where the levels do not say where the
    onset lies, above the last one or between two of them; 0 where it may be as predicted. `fewer_preemptions_low`,
    `_high`: the interval of the fewer ones, of `less_queue` likewise. `cost_amount` of `cost_unit` is what it takes
    more of (negative: less). `fewer_preemptions_per_1000_per_unit` is its effect above the onset for one unit.
    `less_queue_seconds` and its rate: the same of the time that a request queues, on a ladder that can only queue.
    """

    arm: str
    title: str
    levels: list[Level]
    onset_predicted: list[int] | None
    onset_measured: int | None
    reached: list[Reached]
    first_out_of: OutOf
    first_out_at: int | None
    why: str
    cost_unit: str | None = None
    cost_amount: float | None = None
    fewer_preemptions_per_1000: float | None = None
    fewer_preemptions_per_1000_per_unit: float | None = None
    costs: list[LevelCost] = []
    moved: bool | None = None
    moved_by: TookBy | None = None
    moved_note: str = ""
    changes_work: str = ""
    resources: list[LevelResources] = []
    less_queue_seconds: float | None = None
    less_queue_seconds_per_unit: float | None = None
    gpus: int = 0
    only_queues: bool = False
    error_requests: int | None = None
    error_at_least: int | None = None
    fewer_preemptions_low: float | None = None
    fewer_preemptions_high: float | None = None
    less_queue_low: float | None = None
    less_queue_high: float | None = None


class LadderResult(Struct, frozen=True):
    """The ladder of a host. `levels` and the onsets are the control's.

    `onset_predicted`: [low, high], None where none was predicted. `onset_measured`: the lowest level with a preemption
    in any run; `onset_by_run` of each run by itself. `error_requests`: how far it lies outside the prediction,
    `error_at_least`: how far at least, where the levels do not say where the onset lies.
    `queue_from`: on a ladder that can only queue, the first level with more in flight than run at once.
    """

    host: str
    levels: list[Level]
    onset_predicted: list[int] | None
    onset_measured: int | None
    onset_by_run: list[int | None]
    error_requests: int | None
    prediction: str
    regime: list[str]
    arms: list[ArmLadder]
    queue_from: int | None = None
    error_at_least: int | None = None
