"""A ladder's answer in words: the regime, what it rests on, and what each change buys. Pure."""

from collections.abc import Sequence

from kvtrial.record.ladder import ArmLadder, LadderResult, Level, Pattern, Reached, TookBy
from kvtrial.record.oom import SENTENCES

FEW_DIGITS = 3
IN_SHORT: dict[TookBy, str] = {
    "queue": "MOVED into the queue",
    "first_token": "MOVED to before the first token",
    "queue_or_prompts": "waits as much longer for its first token",
}
"""Where the delay of preemption went, in a line of several changes."""
CHANGE_MARKS = (" preemptions per 1,000 requests above the onset", " with more in flight than run at once")
"""By which a sentence on what a change buys is known."""


def regime_of(result: LadderResult, control: str) -> list[str]:
    """The regime of a host in sentences: onset, service, process, what runs out first, changes, recomputation."""
    own = next(ladder for ladder in result.arms if ladder.arm == control)
    said = [onset_sentence(result), out_sentence(own)]
    said += [reached_sentence(control, entry) for entry in own.reached]
    said += [process_sentence(own.levels), service_sentence(own.levels), reserve_sentence(own.levels)]
    said += [recomputed_sentence(own.levels)]
    for ladder in result.arms:
        if ladder.arm != control:
            said += change_sentences(ladder, own) + instead_sentences(ladder, own)
    for ladder in result.arms:
        said += resource_sentences(ladder) + cost_sentences(ladder)
    return [sentence for sentence in said if sentence]


def onset_sentence(result: LadderResult) -> str:
    """The measured onset beside the predicted one, with the error in requests."""
    predicted = result.onset_predicted
    told = "no preemption was predicted" if predicted is None else f"predicted {_span(predicted)}"
    error = _error(result.error_requests, result.error_at_least, result.onset_measured, result.levels)
    error = error if predicted is not None else ""
    if result.onset_measured is None and result.queue_from is not None:
        return queue_sentence(result.levels, result.queue_from)
    if result.onset_measured is None:
        return f"No level was preempted up to {result.levels[-1].concurrency} in flight ({told}{error})."
    runs = len(result.onset_by_run)
    same = sum(onset == result.onset_measured for onset in result.onset_by_run)
    every = f"in {same} of {runs} runs" if same < runs else f"in every one of {runs} runs" if runs > 1 else "in 1 run"
    return f"Preemption begins at {result.onset_measured} requests in flight, {every} ({told}{error})."


def _error(error: int | None, at_least: int | None, measured: int | None, levels: Sequence[Level]) -> str:
    """How far an onset is off, or how far at least where the levels don't say, as a further item of a list."""
    if error is not None:
        return f", error {_requests(error)}"
    if at_least:
        return f", error at least {_requests(at_least)}"
    if at_least is None:
        return ""
    if measured is None:
        return f", no error up to {levels[-1].concurrency} in flight"
    calm = max((level.concurrency for level in levels if level.concurrency < measured), default=0)
    return f", no error shown with no level from {calm + 1} to {measured - 1}"


def queue_sentence(levels: Sequence[Level], queue_from: int) -> str:
    """What a ladder shows that can only queue, as it was predicted to."""
    calm = next((level for level in reversed(levels) if level.concurrency < queue_from), None)
    shown = [level for level in levels if level.concurrency >= queue_from]
    first_and_last = list(dict.fromkeys([level.concurrency for level in (shown[0], shown[-1])]))
    told = [
        f"{_seconds(level.queue_seconds_per_request)} at {level.concurrency}"
        for level in [*([calm] if calm else []), *shown]
        if level is calm or level.concurrency in first_and_last
    ]
    before = "" if calm is None else f" ({_seconds(calm.ttft_p95_seconds)} at {calm.concurrency})"
    return (
        f"These requests only queue, from {queue_from} in flight on: no level was preempted, as predicted. A request "
        f"waits {', '.join(told)} in flight before it is first scheduled (mean), and the p95 of the time to first "
        f"token is {_seconds(shown[-1].ttft_p95_seconds)} at {shown[-1].concurrency}{before}."
    )


def _span(ends: Sequence[int]) -> str:
    return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def _requests(error: int) -> str:
    return "0 requests" if not error else f"{error:+d} request{'s' if abs(error) > 1 else ''}"


def out_sentence(ladder: ArmLadder) -> str:
    """Which resource runs out first."""
    if ladder.first_out_at is None:
        return f"Nothing runs out within the ladder: {ladder.why}."
    names = {
        "KV cache": "the KV cache",
        "sequences": "the number of sequences (max_num_seqs)",
        "compute": "the compute",
    }
    return f"The first to run out is {names[ladder.first_out_of]}, at {ladder.first_out_at} in flight: {ladder.why}."


def reached_sentence(arm: str, entry: Reached) -> str:
    """The highest load within a profile."""
    if entry.concurrency is None:
        return f"Profile {entry.profile}: not even one request at a time keeps it with {arm}: {entry.broken_by}."
    rate = "" if entry.output_tokens_per_second is None else f", {entry.output_tokens_per_second:,.0f} output tokens/s"
    end = f"; {entry.broken_by}" if entry.broken_by else "; no higher level was asked for"
    return f"Profile {entry.profile}: up to {entry.concurrency} in flight with {arm}{rate}{end}."


def instead_sentences(ladder: ArmLadder, control: ArmLadder) -> list[str]:
    """For each profile of which an arm keeps another load than the control: which, in place of which."""
    theirs = {entry.profile: entry.concurrency for entry in control.reached}
    said = []
    for entry in ladder.reached:
        mine, other = entry.concurrency, theirs.get(entry.profile)
        if mine == other:
            continue
        reached = "not even one request at a time" if mine is None else f"up to {mine} in flight"
        instead = "not even one request at a time" if other is None else f"{other}"
        end = entry.broken_by or "no higher level was asked for"
        said.append(f"With {ladder.arm} {entry.profile}: {reached} instead of {instead}; {end}.")
    return said


def process_sentence(levels: Sequence[Level]) -> str:
    """Whether the process was stable, by itself: nothing failed."""
    requests = sum(level.requests for level in levels)
    failed, aborted = sum(level.failed for level in levels), sum(level.aborted for level in levels)
    text = f"Process: {requests:,} requests completed, {failed} failed, {aborted} aborted; the server stayed alive."
    return f"{text} {SENTENCES['preemption'][0]}" if any(level.preemptions for level in levels) else text


_STARTS: dict[Pattern, str] = {
    "none": "",
    "not seen": "",
    "one burst": ", preempted in one burst by the client's clock",
    "continuous": ", preempted all along by the client's clock",
}
"""When the waits of preempted requests begin, by the times of their tokens."""
_RETURNS: dict[Pattern, str] = {
    "none": "",
    "not seen": "",
    "one burst": ", their requests returned in one burst",
    "continuous": ", their requests returned all along",
}
"""The engine counts a preemption with its request's next output: what its counter dates is the return."""


def service_sentence(levels: Sequence[Level]) -> str:
    """What service the requests got where preemption is heaviest, against the level before the first one."""
    worst = max((level for level in levels if level.preemptions), key=_preempted, default=None)
    if worst is None:
        return "Service: no request was preempted at any level."
    text = (
        f"Service: at {worst.concurrency} in flight {_preempted(worst):.2g} preemptions a request "
        f"({worst.preemptions} in {worst.runs} runs{_STARTS[worst.starts_pattern]}{_RETURNS[worst.pattern]})"
    )
    first = next(level.concurrency for level in levels if level.preemptions)
    calm = next((level for level in reversed(levels) if level.concurrency < first), None)
    if calm is None:
        return f"{text}."
    return (
        f"{text}; against {calm.concurrency} in flight the p95 from send to last token is "
        f"{_seconds(worst.e2e_p95_seconds)} ({_seconds(calm.e2e_p95_seconds)}), the longest gap between tokens "
        f"{_seconds(worst.longest_gap_max_seconds)} ({_seconds(calm.longest_gap_max_seconds)}), the median time to "
        f"first token {_seconds(worst.ttft_median_seconds)} ({_seconds(calm.ttft_median_seconds)})."
    )


def _preempted(level: Level) -> float:
    return level.preemptions_per_request or 0.0


def reserve_sentence(levels: Sequence[Level]) -> str:
    """Requested max_tokens against what the answers got."""
    level = levels[-1]
    if level.limit_reached_share is None or level.max_tokens_mean is None or level.answer_tokens_mean is None:
        return ""
    share = f"{level.limit_reached_share:.0%} of answers reach the limit that was asked for"
    return (
        f"Reserve: max_tokens {level.max_tokens_mean:,.0f} on average, answers of {level.answer_tokens_mean:,.0f} "
        f"tokens; {share}. V1 sets nothing aside for max_tokens: answers take blocks as they grow."
    )


def recomputed_sentence(levels: Sequence[Level]) -> str:
    """The bound of recomputed tokens, and how it is made."""
    if any(level.preemptions and level.recomputed_tokens_at_most is None for level in levels):
        return "Recomputed: no bound can be given, since the longest request of a level is not known."
    most = sum(level.recomputed_tokens_at_most or 0 for level in levels)
    if not most:
        return ""
    return (
        f"Recomputed: at most {most:,} tokens. No version counts them; the bound is preemptions × (tokens of the "
        f"longest request sent − 1) by level, and what of it the prefix cache gave back is counted nowhere."
    )


def change_sentences(ladder: ArmLadder, control: ArmLadder) -> list[str]:
    """What one change buys: preemptions, where its delay went, and per unit of what it costs."""
    if ladder.less_queue_seconds is not None:
        return _queue_change(ladder)
    if ladder.fewer_preemptions_per_1000 is None:
        return []
    more = ladder.fewer_preemptions_per_1000
    word = "fewer" if more >= 0 else "MORE"
    text = f"{ladder.arm} ({ladder.title}): {abs(more):.3g} {word} preemptions per 1,000 requests above the onset"
    if ladder.fewer_preemptions_low is not None and ladder.fewer_preemptions_high is not None:
        low, high = _ends(more, ladder.fewer_preemptions_low, ladder.fewer_preemptions_high)
        text += f" (interval {low:.3g} to {high:.3g})"
    text += taken_words(ladder, ladder.fewer_preemptions_per_1000_per_unit)
    moved = ladder.moved_note or "where its delay went is not known"
    said = [f"{text}; {_onset_of_arm(ladder, control)}; {moved}{_gpu_seconds(ladder, control)}."]
    return said + _work_sentences(ladder)


def _onset_of_arm(ladder: ArmLadder, control: ArmLadder) -> str:
    """An arm's onset beside its own prediction, with the error in requests, and beside the control's."""
    onset = f"onset {ladder.onset_measured}" if ladder.onset_measured is not None else "no preemption on this ladder"
    told = ""
    if ladder.onset_predicted:
        told = f"predicted {_span(ladder.onset_predicted)}"
        told += f"{_error(ladder.error_requests, ladder.error_at_least, ladder.onset_measured, ladder.levels)}, "
    elif ladder.only_queues:
        told = "none predicted, "
    return f"{onset} ({told}control {'none' if control.onset_measured is None else control.onset_measured})"


def change_in_short(ladder: ArmLadder) -> str:
    """What one change buys, for a line of several: effect with its interval, for what, MOVED or MORE, the quality."""
    if ladder.less_queue_seconds is not None:
        less = ladder.less_queue_seconds
        text = f"queues {_seconds(abs(less))} {'less' if less >= 0 else 'LONGER'}"
        text += _interval_in_short(less, ladder.less_queue_low, ladder.less_queue_high, 1e3, " ms")
        text += taken_words(ladder, ladder.less_queue_seconds_per_unit, " s")
    elif ladder.fewer_preemptions_per_1000 is not None:
        more = ladder.fewer_preemptions_per_1000
        text = f"{abs(more):.3g} {'fewer' if more >= 0 else 'MORE'} preemptions per 1,000"
        text += _interval_in_short(more, ladder.fewer_preemptions_low, ladder.fewer_preemptions_high)
        text += taken_words(ladder, ladder.fewer_preemptions_per_1000_per_unit)
        if ladder.moved_by is not None or ladder.moved:
            text += f", {IN_SHORT[ladder.moved_by or 'queue']}"
    else:
        return ""
    return f"{ladder.arm} {text}" + (", quality: not compared" if ladder.changes_work else "")


def _interval_in_short(
    effect: float, low: float | None, high: float | None, factor: float = 1.0, unit: str = ""
) -> str:
    if low is None or high is None:
        return ""
    low, high = _ends(effect, low, high)
    return f" ({factor * low:.3g} to {factor * high:.3g}{unit})"


def _ends(effect: float, low: float, high: float) -> tuple[float, float]:
    """The interval of an effect that is said without its sign; a zero that would be negative is none."""
    low, high = (low, high) if effect >= 0 else (-high, -low)
    return low + 0.0, high + 0.0


def _queue_change(ladder: ArmLadder) -> list[str]:
    """What one change buys where requests only queue: time before they are first scheduled, and what it takes."""
    less = ladder.less_queue_seconds or 0.0
    text = f"{ladder.arm} ({ladder.title}): a request queues {_seconds(abs(less))} {'less' if less >= 0 else 'LONGER'}"
    text += " with more in flight than run at once"
    if ladder.less_queue_low is not None and ladder.less_queue_high is not None:
        low, high = _ends(less, ladder.less_queue_low, ladder.less_queue_high)
        text += f" (interval {1e3 * low:.3g} to {1e3 * high:.3g} ms)"
    text += taken_words(ladder, ladder.less_queue_seconds_per_unit, " s")
    onset = "" if ladder.onset_measured is None else f"; with it preemption begins at {ladder.onset_measured}"
    return [f"{text}{onset}.", *_work_sentences(ladder)]


def _work_sentences(ladder: ArmLadder) -> list[str]:
    return [f"{ladder.arm} changes the work: {ladder.changes_work}."] if ladder.changes_work else []


def _gpu_seconds(ladder: ArmLadder, control: ArmLadder) -> str:
    """A request's cost in GPU-seconds, at the onset and at the top, where an arm takes other GPUs than the control."""
    theirs = {level.concurrency: level.gpu_seconds_per_request for level in control.levels}
    shown = {control.onset_measured, control.levels[-1].concurrency}
    costs = [
        f"{_number(level.gpu_seconds_per_request)} GPU-seconds at {level.concurrency} in flight (control "
        f"{_number(other)})"
        for level in ladder.levels
        if level.concurrency in shown
        and level.gpu_seconds_per_request is not None
        and (other := theirs.get(level.concurrency)) is not None
    ]
    if not costs or ladder.gpus == control.gpus:
        return ""
    return f"; on {ladder.gpus} GPUs instead of {control.gpus} a request costs {' and '.join(costs)}"


def taken_words(ladder: ArmLadder, rate: float | None, rate_unit: str = "") -> str:
    """What a change takes. What it takes less of costs nothing by the piece: its price is queue and throughput."""
    amount, unit = ladder.cost_amount, ladder.cost_unit
    if not amount or unit is None:
        return ""
    what = unit if unit.startswith("GiB") else _plural(unit, abs(amount))
    if amount < 0:
        return f" with {_number(-amount)} {'less' if unit.startswith('GiB') else 'fewer'} {what}"
    change = "fewer" if unit.startswith("token") else "more"
    by_piece = "" if not rate else f" ({_number(abs(rate))}{rate_unit} per {unit})"
    return f" for {_number(amount)} {change} {what}{by_piece}"


def _plural(unit: str, count: float) -> str:
    """A unit whose first word is counted: "tokens of answer"."""
    head, _, rest = unit.partition(" ")
    return unit if count == 1 else f"{head}s {rest}".rstrip()


def resource_sentences(ladder: ArmLadder) -> list[str]:
    """What the highest level within each profile takes of GPUs, RAM and replicas, whatever they cost."""
    said = []
    for taken in ladder.resources:
        parts = [f"{taken.ram_gib:.3g} GiB of RAM", f"{taken.replicas} {_plural('replica', taken.replicas)}"]
        if taken.gpus:
            parts.insert(0, f"{taken.gpus} {_plural('GPU', taken.gpus)}")
        within = taken.seconds_per_request_within_objective
        each = "" if within is None else f", {_seconds(within)} for a request within the objective"
        said.append(
            f"Resources of {ladder.arm} at {taken.concurrency} in flight ({taken.profile}): {', '.join(parts)}, for "
            f"{_number(taken.hours_per_million_output_tokens)} hours per million output tokens{each}."
        )
    return said


def cost_sentences(ladder: ArmLadder) -> list[str]:
    """Money, from the user's own prices."""
    said = []
    for cost in ladder.costs:
        parts = [f"{cost.per_hour:.4g} {cost.currency} an hour"]
        if cost.per_million_output_tokens is not None:
            parts.append(f"{cost.per_million_output_tokens:.4g} {cost.currency} per million output tokens")
        if cost.per_request_within_objective is not None:
            parts.append(f"{cost.per_request_within_objective:.4g} {cost.currency} per request within the objective")
        said.append(f"Cost of {ladder.arm} at {cost.concurrency} in flight ({cost.profile}): {', '.join(parts)}.")
    return said


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.{FEW_DIGITS}g}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "not measured"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"
