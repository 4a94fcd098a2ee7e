"""A host's ladder: levels in numbers, the measured onset beside the predicted one, objectives, what runs out. Pure."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from statistics import fmean, median

from msgspec.structs import replace

from kvtrial.analysis.faults import Pair
from kvtrial.analysis.laddering import ABOVE_ONSET, ALL_LEVELS, QUEUE_METRIC, QUEUEING, lengths_of_facts
from kvtrial.analysis.launch import dashed
from kvtrial.analysis.ledger import judge_moved, server_ledger
from kvtrial.analysis.levels import (
    engines_of,
    first_token_wait_seconds_per_request,
    gpu_seconds_per_request,
    gpus_of,
    level_of,
    per_request,
    phases_of,
    pooled,
    quantile,
    queue_seconds_per_request,
    risen,
    stall_seconds_per_request,
    waited_alone,
)
from kvtrial.analysis.onset import onset_words, predict_onset
from kvtrial.analysis.prices import SECONDS_PER_HOUR, Prices, Resources, costs, lacks_price
from kvtrial.record.errors import UnusableInput
from kvtrial.record.ladder import ArmLadder, LadderResult, Level, LevelCost, LevelResources, OutOf, Pattern, Reached
from kvtrial.record.launch import parse_vllm_args
from kvtrial.record.plan import RESERVED_BLOCKS, LadderPlan, OnsetPlan
from kvtrial.record.protocol import Cost, Objective, Protocol
from kvtrial.record.record import PhaseRecord, RunRecord
from kvtrial.record.verdict import ComparisonResult, Moved

GIB = 2**30
BURST_SHARE = 0.2
"""Preempted requests that all stop, or all return, within this share of a level's time do so in one burst."""
FULL_SHARE = 0.9
"""KV use from which on the cache is called full: the last blocks are seldom free for a whole request."""
FLAT_GAIN = 1.03
"""Throughput that gains less than this from one level to the next has stopped growing."""
WAITS = (stall_seconds_per_request, queue_seconds_per_request, first_token_wait_seconds_per_request)
"""Where a request waits: between tokens and before the first by the client, before the first by the engine's queue."""
WHO_RUNS = {
    "num-gpu-blocks-override",
    "kv-cache-memory-bytes",
    "gpu-memory-utilization",
    "max-num-seqs",
    "max-model-len",
}
"""Options that say how many requests may run or fit, and nothing of how a prompt is computed."""
SERVED_REASONS = ("stop", "length", "repetition", "error")
TOKENS_OF = {"token of prompt": "prompt_tokens", "token of answer": "output_tokens"}
"""Units of which a change takes by sending or answering less: a request has so many fewer than in the control."""


def host_ladder(
    protocol: Protocol,
    host: str,
    pairs: Sequence[Pair],
    comparisons: Sequence[ComparisonResult],
    planned: LadderPlan | None = None,
    prices: Prices | None = None,
) -> LadderResult | None:
    """The ladder over the valid pairs of a host; None without a ladder or without a run of the control."""
    if not protocol.ladder:
        return None
    arms = {}
    for arm in protocol.arms:
        runs = [pair.runs[arm] for pair in pairs if arm in pair.runs]
        if runs and phases_of(runs[0], ALL_LEVELS):
            arms[arm] = runs
    control = arms.get(protocol.control)
    if not control:
        return None
    predicted = _prediction(protocol.control, control[0], planned)
    ladders = [
        _arm_ladder(protocol, arm, runs, control, pairs, comparisons, planned, prices) for arm, runs in arms.items()
    ]
    own = next(ladder for ladder in ladders if ladder.arm == protocol.control)
    return LadderResult(
        host=host,
        levels=own.levels,
        onset_predicted=own.onset_predicted,
        onset_measured=own.onset_measured,
        onset_by_run=[run_onset(run) for run in control],
        error_requests=own.error_requests,
        prediction="" if predicted is None else onset_words(predicted),
        regime=[],
        arms=ladders,
        queue_from=min((level_of(phase) for phase in phases_of(control[0], QUEUEING)), default=None),
        error_at_least=own.error_at_least,
    )


def moved_of(protocol: Protocol, pairs: Sequence[Pair]) -> list[Moved]:
    """For each variant of a ladder whether its delay moved into the queue, over the levels above the onset."""
    if not protocol.ladder:
        return []
    found = []
    for arm in protocol.arms:
        both = [
            (pair.runs[arm], pair.runs[protocol.control])
            for pair in pairs
            if arm in pair.runs and protocol.control in pair.runs
        ]
        if arm != protocol.control and both:
            stall, queue, wait = (_by_pair(both, value) for value in WAITS)
            if len(stall[0]) == len(queue[0]) == len(both):
                by_client = wait if len(wait[0]) == len(both) else None
                alike = prompts_alike(protocol, arm)
                found.append(judge_moved(arm, protocol.control, stall, queue, by_client, alike))
    return found


def prompts_alike(protocol: Protocol, arm: str) -> bool:
    """Whether an arm computes prompts as the control does: it differs at most in how many requests may run or fit."""
    mine, theirs = protocol.arms[arm], protocol.arms[protocol.control]
    of_mine, of_theirs = dashed(mine.args), dashed(theirs.args)
    names = {name for name in {*of_mine, *of_theirs} if of_mine.get(name) != of_theirs.get(name)}
    return names <= WHO_RUNS and mine.env == theirs.env and not mine.model and "prompt" not in mine.may_differ


def _by_pair(
    both: Sequence[tuple[RunRecord, RunRecord]], value: Callable[[RunRecord, str], float | None]
) -> tuple[list[float], list[float]]:
    mine, theirs = [], []
    for arm, control in both:
        of_arm, of_control = value(arm, ABOVE_ONSET), value(control, ABOVE_ONSET)
        if of_arm is not None and of_control is not None:
            mine.append(of_arm)
            theirs.append(of_control)
    return mine, theirs


# ------------------------------------------------------------------------------------------------------------ onset


def _prediction(arm: str, run: RunRecord, planned: LadderPlan | None) -> OnsetPlan | None:
    """The plan's prediction for an arm; without a plan made anew from the record's blocks and requests."""
    if planned is not None:
        return planned.onset.get(arm)
    lengths = lengths_of_facts(phases_of(run, ALL_LEVELS))
    parsed = parse_vllm_args(run.launch.argv)
    running, batched = parsed.size("max-num-seqs"), parsed.size("max-num-batched-tokens")
    # The record's capacity is the control's.
    blocks = parsed.size("num-gpu-blocks-override")
    usable = run.capacity.usable_gpu_blocks if blocks is None else blocks - RESERVED_BLOCKS
    try:
        return predict_onset(lengths, usable, run.capacity.block_tokens, running, batched)
    except UnusableInput:
        return None


def run_onset(run: RunRecord) -> int | None:
    """The lowest level at which a run preempted, None where none did."""
    return min(
        (level_of(phase) for phase in phases_of(run, ALL_LEVELS) if (risen([phase], "preemptions") or 0) > 0),
        default=None,
    )


def onset_error(predicted: OnsetPlan | None, measured: int | None) -> int | None:
    """How many requests the measured onset lies outside the predicted one: 0 inside, below it negative."""
    if predicted is None:
        return None
    if predicted.low is None or predicted.high is None:
        return 0 if measured is None else None
    if measured is None:
        return None
    above = max(0, measured - predicted.high) if predicted.sure_end else 0
    return min(0, measured - predicted.low) + above


def onset_errors(
    predicted: OnsetPlan | None, levels: Sequence[int], measured: int | None
) -> tuple[int | None, int | None]:
    """(error, None), or (None, the least that it can be) where the levels do not say where the onset lies.

    It lies above the highest of `levels` where no level was preempted, and between the level below and the measured one
    where these are no neighbours and the prediction does not hold the measured one itself.
    """
    if predicted is None or predicted.low is None or predicted.high is None:
        return onset_error(predicted, measured), None
    calm = max((level for level in levels if measured is None or level < measured), default=0)
    if measured is not None and (calm == measured - 1 or onset_error(predicted, measured) == 0):
        return onset_error(predicted, measured), None
    above = max(0, calm + 1 - predicted.high) if predicted.sure_end else 0
    return None, above + (0 if measured is None else min(0, measured - predicted.low))


# ----------------------------------------------------------------------------------------------------------- levels


def _arm_ladder(
    protocol: Protocol,
    arm: str,
    runs: Sequence[RunRecord],
    control: Sequence[RunRecord],
    pairs: Sequence[Pair],
    comparisons: Sequence[ComparisonResult],
    planned: LadderPlan | None,
    prices: Prices | None,
) -> ArmLadder:
    assert protocol.ladder
    predicted = _prediction(arm, runs[0], planned)
    names = [phase.name for phase in phases_of(runs[0], ALL_LEVELS)]
    levels = [level_facts(runs, name, _stop_after(protocol, name)) for name in names]
    reached = [reach(runs, levels, name, wanted) for name, wanted in protocol.ladder.objectives.items()]
    out, at, why = first_out(levels, _max_running(runs[0]))
    declared = protocol.arms[arm]
    measured = min((level.concurrency for level in levels if level.preemptions), default=None)
    error, at_least = onset_errors(predicted, [level.concurrency for level in levels], measured)
    ladder = ArmLadder(
        arm=arm,
        title=declared.title,
        levels=levels,
        onset_predicted=None
        if predicted is None or predicted.low is None or predicted.high is None
        else [predicted.low, predicted.high],
        onset_measured=measured,
        reached=reached,
        first_out_of=out,
        first_out_at=at,
        why=why,
        resources=_resources(runs, levels, reached),
        costs=_costs(runs, levels, reached, prices),
        changes_work=work_words(declared.may_differ),
        gpus=gpus_of(runs[0]),
        only_queues=predicted is not None and predicted.kind == "never",
        error_requests=error,
        error_at_least=at_least,
    )
    return ladder if arm == protocol.control else _against(protocol, ladder, runs, control, pairs, comparisons)


def level_facts(runs: Sequence[RunRecord], name: str, stop_after: int | None = None) -> Level:
    """A level over an arm's runs. `stop_after`: answers end there, below the limit that was asked for."""
    phases = [phase for run in runs for phase in run.phases if phase.name == name]
    counts = [round(risen([phase], "preemptions") or 0) for phase in phases]
    facts = [request for phase in phases for request in phase.requests if request.error_class is None]
    longest = _longest(runs, phases, stop_after)
    gaps = pooled(phases, lambda fact: fact.longest_gap_seconds)
    ledgers = [phase.ledger for phase in phases if phase.ledger is not None]
    server = [ledger for phase in phases if (ledger := server_ledger(phase)) is not None]
    largest = max(server, key=lambda ledger: abs(ledger.difference_share or 0.0), default=None)
    points = [point for phase in phases for point in phase.pressure]
    return Level(
        concurrency=level_of(phases[0]),
        runs=len(phases),
        requests=sum(phase.finished for phase in phases),
        preemptions=sum(counts),
        failed=sum(phase.failed for phase in phases),
        aborted=_aborted(phases),
        preemptions_by_run=counts,
        preemptions_per_request=per_request(phases, float(sum(counts))),
        preemptions_per_second=_ratio(sum(counts), sum(phase.seconds for phase in phases)),
        pattern=pattern_of(phases),
        ttft_median_seconds=_median(phases, lambda phase: phase.ttft_median_seconds),
        ttft_p95_seconds=_median(phases, lambda phase: phase.ttft_p95_seconds),
        inter_token_median_seconds=_median(phases, lambda phase: phase.inter_token_median_seconds),
        longest_gap_p95_seconds=quantile(gaps, 0.95),
        longest_gap_max_seconds=max(gaps, default=None),
        queue_seconds_per_request=_median(phases, lambda phase: _mean_of(phase, "queue_seconds")),
        stall_seconds_per_request=_ratio(
            sum(ledger.stall_gaps_ns for ledger in ledgers) / 1e9, sum(ledger.counted for ledger in ledgers)
        ),
        stalled_requests=sum(ledger.stalled_requests for ledger in ledgers),
        e2e_median_seconds=_median(phases, lambda phase: phase.e2e_median_seconds),
        e2e_p95_seconds=_median(phases, lambda phase: phase.e2e_p95_seconds),
        output_tokens_per_second=_median(phases, lambda phase: phase.output_throughput_tokens_per_second),
        running_peak=max((p.running for p in points if p.running is not None), default=None),
        waiting_peak=max((p.waiting for p in points if p.waiting is not None), default=None),
        kv_used_share_peak=max((p.kv_used_share for p in points if p.kv_used_share is not None), default=None),
        prompt_tokens_mean=_mean(fact.prompt_tokens for fact in facts if fact.prompt_tokens is not None),
        max_tokens_mean=_mean(fact.max_tokens for fact in facts),
        answer_tokens_mean=_mean(fact.output_tokens for fact in facts),
        limit_reached_share=_ratio(sum(fact.output_tokens >= fact.max_tokens for fact in facts), len(facts)),
        recomputed_tokens_at_most=None if longest is None else sum(counts) * (longest - 1),
        server_difference_share=largest.difference_share if largest else None,
        server_outside_core_share=largest.outside_core_share if largest else None,
        prompt_tokens_range=_span([fact.prompt_tokens for fact in facts if fact.prompt_tokens is not None]),
        answer_tokens_range=_span([fact.output_tokens for fact in facts]),
        gpu_seconds_per_request=_gpu_seconds(runs, name),
        starts_pattern=starts_pattern_of(
            [phase for run in runs if engines_of(run) == 1 for phase in run.phases if phase.name == name]
        ),
    )


def _gpu_seconds(runs: Sequence[RunRecord], name: str) -> float | None:
    found = [value for run in runs if (value := gpu_seconds_per_request(run, name)) is not None]
    return median(found) if found else None


def _aborted(phases: Sequence[PhaseRecord]) -> int:
    """Requests that the engine did not finish. No version counts them all as aborted (#31503), so sent − finished."""
    counted = round(risen(phases, "requests_finished_abort") or 0)
    served = [risen(phases, f"requests_finished_{reason}") for reason in SERVED_REASONS]
    if all(number is None for number in served):
        return counted
    return max(counted, sum(phase.sent for phase in phases) - round(sum(number or 0 for number in served)))


def pattern_of(phases: Sequence[PhaseRecord]) -> Pattern:
    """How the preempted requests of a level return: in one burst in every run that has some, or all along.

    The counter rises with the next output of a preempted request, so what it dates is the return.
    """
    spans = []
    for phase in phases:
        if not (risen([phase], "preemptions") or 0):
            continue
        seen = [point for point in phase.pressure if point.preemptions is not None]
        rises = [
            (before.seconds, after.seconds)
            for before, after in pairwise(seen)
            if (after.preemptions or 0) > (before.preemptions or 0)
        ]
        if seen and (seen[0].preemptions or 0) > 0:
            rises.insert(0, (0.0, seen[0].seconds))
        if seen and (seen[-1].preemptions or 0) < (risen([phase], "preemptions") or 0):
            rises.append((seen[-1].seconds, phase.seconds))
        if not seen or not phase.seconds:
            return "not seen"
        # The first return lies within the first rise and the last within the last one.
        spans.append(max(0.0, rises[-1][0] - rises[0][1]) / phase.seconds if len(rises) > 1 else 0.0)
    if not spans:
        return "none"
    return "one burst" if max(spans) <= BURST_SHARE else "continuous"


def starts_pattern_of(phases: Sequence[PhaseRecord]) -> Pattern:
    """How the preemptions of a level lie in time by the client's clock: where the waits of their requests begin.

    `phases` of runs with one engine. Not seen where a count has more than waits were seen: the others have no date.
    """
    spans = []
    for phase in phases:
        counted = round(risen([phase], "preemptions") or 0)
        if not counted:
            continue
        ledger = phase.ledger
        if ledger is None or ledger.stalls_at is None or not phase.seconds:
            return "not seen"
        starts = [stall.from_ns for stall in ledger.stalls_at if waited_alone(stall, ledger)]
        if len(starts) < counted:
            return "not seen"
        spans.append((max(starts) - min(starts)) / 1e9 / phase.seconds)
    if not spans:
        return "none"
    return "one burst" if max(spans) <= BURST_SHARE else "continuous"


def _stop_after(protocol: Protocol, name: str) -> int | None:
    """After how many tokens a level's answers end; None where nothing but their limit ends them."""
    phase = next((phase for phase in protocol.phases if phase.name == name), None)
    if phase is None or not isinstance(phase.stop_after, int) or not phase.prompts:
        return None
    return phase.stop_after


def _longest(runs: Sequence[RunRecord], phases: Sequence[PhaseRecord], stop_after: int | None) -> int | None:
    """The most tokens that a request sent at a level can have had, failed ones as well: those are preempted too.

    A prompt's length is the engine's word, which a failed request lacks; the same prompt at another level has it. None
    where no level has it, or where requests of several lengths are not all listed.
    """
    told = {
        fact.prompt_sha256: fact.prompt_tokens
        for run in runs
        for phase in run.phases
        for fact in phase.requests
        if fact.prompt_tokens is not None
    }
    facts = [fact for phase in phases for fact in phase.requests]
    if any(fact.prompt_sha256 not in told for fact in facts):
        return None
    most = {
        told[fact.prompt_sha256] + max(fact.output_tokens, min(fact.max_tokens, stop_after or fact.max_tokens))
        for fact in facts
    }
    unlisted = any(phase.sent > len(phase.requests) for phase in phases)
    return None if unlisted and len(most) > 1 else max(most, default=None)


def _mean_of(phase: PhaseRecord, histogram: str) -> float | None:
    total, count = risen([phase], f"{histogram}_sum"), risen([phase], f"{histogram}_count")
    return None if total is None or not count else total / count


def _median(phases: Sequence[PhaseRecord], value: Callable[[PhaseRecord], float | None]) -> float | None:
    found = [number for phase in phases if (number := value(phase)) is not None]
    return median(found) if found else None


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None


def _span(values: Sequence[int]) -> list[int] | None:
    return [min(values), max(values)] if values else None


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


# -------------------------------------------------------------------------------------------- objectives, resources


def reach(runs: Sequence[RunRecord], levels: Sequence[Level], profile: str, wanted: Objective) -> Reached:
    """The highest level up to which all levels keep an objective."""
    best: Level | None = None
    broken = ""
    for level in levels:
        broken = broken_by(level, wanted)
        if broken:
            break
        best = level
    if best is None:
        return Reached(profile, None, None, None, broken)
    return Reached(
        profile, best.concurrency, within_share(runs, best.concurrency, wanted), best.output_tokens_per_second, broken
    )


def broken_by(level: Level, wanted: Objective) -> str:
    """What of an objective a level does not keep, as a sentence's end; empty where it keeps all."""
    per_1000 = None if level.preemptions_per_request is None else 1000 * level.preemptions_per_request
    for name, value, limit in (
        ("preemptions per 1,000 requests", per_1000, wanted.preemptions_per_1000_requests),
        ("p95 of the time to first token, s,", level.ttft_p95_seconds, wanted.ttft_p95_seconds),
        ("p95 from send to last token, s,", level.e2e_p95_seconds, wanted.e2e_p95_seconds),
    ):
        if limit is not None and (value is None or value > limit):
            shown = "not measured" if value is None else f"{value:.3g}"
            return f"at {level.concurrency} in flight {name} is {shown}, allowed {limit:g}"
    return "" if not level.failed else f"at {level.concurrency} in flight {level.failed} requests failed"


def within_share(runs: Sequence[RunRecord], concurrency: int, wanted: Objective) -> float | None:
    """Share of a level's requests that kept the objective's times, each by itself."""
    facts = [
        fact for run in runs for phase in phases_of(run, ALL_LEVELS) if level_of(phase) == concurrency
        for fact in phase.requests
    ]  # fmt: skip
    kept = sum(
        fact.error_class is None
        and _keeps(fact.ttft_seconds, wanted.ttft_p95_seconds)
        and _keeps(fact.e2e_seconds, wanted.e2e_p95_seconds)
        for fact in facts
    )
    return _ratio(kept, len(facts))


def _keeps(value: float | None, limit: float | None) -> bool:
    return limit is None or (value is not None and value <= limit)


def first_out(levels: Sequence[Level], max_running: int | None) -> tuple[OutOf, int | None, str]:
    """The resource that runs out first on the way up: what, at which level, and by which numbers.

    Compute: throughput is flat, no higher level has more, and the level does its requests in fewer rounds. Two levels
    with as many rounds (20 requests at 7 and at 9 in flight: three) take as long each, whatever is left.
    """
    for number, (before, level) in enumerate(zip([None, *levels], levels, strict=False)):
        used = level.kv_used_share_peak
        shown = "KV use not seen" if used is None else f"KV use {used:.0%} in its highest sample"
        waiting = level.waiting_peak or 0
        if level.preemptions:
            count = f"{level.preemptions} preemption{'s' if level.preemptions > 1 else ''}"
            return "KV cache", level.concurrency, f"{count}, {shown}"
        if max_running is not None and level.concurrency > max_running and waiting:
            return "sequences", level.concurrency, f"max-num-seqs {max_running}, {waiting:.0f} waiting, {shown}"
        if waiting and used is not None and used >= FULL_SHARE:
            return "KV cache", level.concurrency, f"{waiting:.0f} waiting without a preemption, {shown}"
        gains = [_gain(before, later) for later in levels[number:]]
        if (
            before is not None
            and _rounds(level) < _rounds(before)
            and all(gain is not None and gain < FLAT_GAIN for gain in gains)
        ):
            more = ", and no higher level has more" if len(gains) > 1 else ", and no higher level was sent"
            return "compute", level.concurrency, f"throughput ×{gains[0]:.2f} against the level before{more}, {shown}"
    return "nothing yet", None, "throughput is not shown to have stopped growing, and nothing waits or is preempted"


def _rounds(level: Level) -> int:
    """How many times in a row a level's client has that many in flight, until a run's requests are sent."""
    return math.ceil(level.requests / max(1, level.runs) / level.concurrency)


def _gain(before: Level | None, level: Level) -> float | None:
    if before is None or not before.output_tokens_per_second or level.output_tokens_per_second is None:
        return None
    return level.output_tokens_per_second / before.output_tokens_per_second


def _max_running(run: RunRecord) -> int | None:
    return parse_vllm_args(run.launch.argv).size("max-num-seqs")


def resources_of(run: RunRecord) -> Resources:
    """What the engines of a run occupied: its GPUs, and the RAM of its processes and shared memory at the peak."""
    replicas = engines_of(run)
    gpus = gpus_of(run)
    ram = run.samples.engine_rss_peak_bytes + run.samples.shared_memory_peak_bytes if run.samples else 0
    return Resources(gpus=gpus, ram_gib=ram / GIB, replicas=replicas)


def _served(levels: Sequence[Level], reached: Sequence[Reached]) -> list[tuple[Reached, Level, float, float]]:
    """For each profile that is kept at all its highest level, output tokens and requests within it, a second."""
    found = []
    for entry in reached:
        level = next((level for level in levels if level.concurrency == entry.concurrency), None)
        if level is not None and level.output_tokens_per_second and level.answer_tokens_mean:
            within = level.output_tokens_per_second / level.answer_tokens_mean * (entry.requests_within_share or 0.0)
            found.append((entry, level, level.output_tokens_per_second, within))
    return found


def _resources(runs: Sequence[RunRecord], levels: Sequence[Level], reached: Sequence[Reached]) -> list[LevelResources]:
    taken = resources_of(runs[0])
    return [
        LevelResources(
            profile=entry.profile,
            concurrency=level.concurrency,
            gpus=taken.gpus,
            ram_gib=taken.ram_gib,
            replicas=taken.replicas,
            hours_per_million_output_tokens=1e6 / tokens / SECONDS_PER_HOUR,
            seconds_per_request_within_objective=1 / requests if requests else None,
        )
        for entry, level, tokens, requests in _served(levels, reached)
    ]


def _costs(
    runs: Sequence[RunRecord], levels: Sequence[Level], reached: Sequence[Reached], prices: Prices | None
) -> list[LevelCost]:
    if prices is None:
        return []
    found = []
    for entry, level, tokens, requests in _served(levels, reached):
        cost = costs(prices, resources_of(runs[0]), tokens, requests)
        if cost is not None:
            found.append(
                LevelCost(
                    profile=entry.profile,
                    concurrency=level.concurrency,
                    currency=cost.currency,
                    per_hour=cost.per_hour,
                    per_million_output_tokens=cost.per_million_output_tokens,
                    per_request_within_objective=cost.per_request_within_objective,
                )
            )
    return found


def no_cost(protocol: Protocol, pairs: Sequence[Pair], prices: Prices | None) -> list[str]:
    """Why a user's prices give no cost on a host, in a sentence; nothing where they do, or where there are none."""
    run = next((pair.runs[protocol.control] for pair in pairs if protocol.control in pair.runs), None)
    lacking = None if prices is None or run is None else lacks_price(prices, resources_of(run))
    return [] if lacking is None else [f"No cost: {lacking}."]


# ---------------------------------------------------------------------------------------------------------- changes


def work_words(may_differ: Sequence[str]) -> str:
    """What an arm does to the work itself, as a sentence; empty for one that leaves it alone."""
    if not may_differ:
        return ""
    said = {"prompt": "other prompts", "output_length": "answers of another length", "answer": "other answers"}
    return f"it may give {', '.join(said[kind] for kind in may_differ)}; quality: not compared"


def _against(
    protocol: Protocol,
    ladder: ArmLadder,
    runs: Sequence[RunRecord],
    control: Sequence[RunRecord],
    pairs: Sequence[Pair],
    comparisons: Sequence[ComparisonResult],
) -> ArmLadder:
    own = [result for result in comparisons if result.arm == ladder.arm]
    declared = protocol.arms[ladder.arm].costs
    amount = cost_amount(declared, runs[0], control[0]) if declared else None
    moved = next((found for found in moved_of(protocol, pairs) if found.arm == ladder.arm), None)
    fewer, fewer_low, fewer_high = _less(own, "preemptions_per_1000_requests", ABOVE_ONSET)
    queue, queue_low, queue_high = _less(own, QUEUE_METRIC, QUEUEING)
    return replace(
        ladder,
        cost_unit=declared.unit if declared else None,
        cost_amount=amount,
        fewer_preemptions_per_1000=fewer,
        fewer_preemptions_low=fewer_low,
        fewer_preemptions_high=fewer_high,
        fewer_preemptions_per_1000_per_unit=None if fewer is None or not amount else fewer / amount,
        moved=moved.moved if moved else None,
        moved_by=moved.by if moved else None,
        moved_note=moved.note if moved else "",
        less_queue_seconds=queue,
        less_queue_low=queue_low,
        less_queue_high=queue_high,
        less_queue_seconds_per_unit=None if queue is None or not amount else queue / amount,
    )


def _less(
    results: Sequence[ComparisonResult], metric: str, phase: str
) -> tuple[float | None, float | None, float | None]:
    """By how much an arm has less of a metric than the control, with its interval; None where that isn't known."""
    found = next((result for result in results if (result.metric, result.phase) == (metric, phase)), None)
    if found is None:
        return None, None, None
    effect, low, high = (
        None if value is None else 0.0 - value for value in (found.effect, found.ci_high, found.ci_low)
    )
    return effect, low, high


def cost_amount(declared: Cost, run: RunRecord, control: RunRecord) -> float | None:
    """What an arm takes more of than the control: as declared, else from the two launches."""
    if declared.amount is not None:
        return float(declared.amount)
    mine, theirs = parse_vllm_args(run.launch.argv), parse_vllm_args(control.launch.argv)
    if declared.unit == "GiB of KV cache":
        block = control.capacity.block_tokens
        blocks = [_blocks(record) for record in (run, control)]
        if blocks[0] is None or blocks[1] is None:
            return None
        return (blocks[0] - blocks[1]) * block * control.capacity.kv_bytes_per_token / GIB
    if declared.unit == "sequence":
        sizes = mine.size("max-num-seqs"), theirs.size("max-num-seqs")
        return None if sizes[0] is None or sizes[1] is None else float(sizes[0] - sizes[1])
    if declared.unit in TOKENS_OF:
        tokens = [_mean(_tokens(record, TOKENS_OF[declared.unit])) for record in (control, run)]
        return None if tokens[0] is None or tokens[1] is None else tokens[0] - tokens[1]
    if declared.unit == "GiB of RAM":
        return run.capacity.tier_bytes.get(run.arm, 0) / GIB or None
    return None


def _tokens(record: RunRecord, field: str) -> list[float]:
    facts = [fact for phase in phases_of(record, ALL_LEVELS) for fact in phase.requests if fact.error_class is None]
    return [value for fact in facts if (value := getattr(fact, field)) is not None]


def _blocks(record: RunRecord) -> int | None:
    text = record.resolved.cache_config.get("num_gpu_blocks", "") if record.resolved else ""
    return int(text) if text.isdigit() else None
