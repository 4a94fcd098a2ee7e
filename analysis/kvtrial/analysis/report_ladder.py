"""The report's part on a ladder: the regime in sentences, and a table of levels for each arm. Pure."""

from collections.abc import Sequence

from msgspec import Struct

from kvtrial.analysis.answer import number_text, seconds_text, share_text
from kvtrial.record.ladder import ArmLadder, LadderResult, Level
from kvtrial.record.pressure import PressurePoint
from kvtrial.record.record import RunRecord

LINE_POINTS_MAX = 40


class LevelRow(Struct, frozen=True):
    """A level as the table shows it."""

    head: str
    cells: list[str]


class LadderTable(Struct, frozen=True):
    """One arm's levels; `note`: its onset, predicted and measured."""

    title: str
    note: str
    rows: list[LevelRow]


HEADS = (
    "In flight", "Preemptions (a request, a second)", "In time", "Completed, failed, aborted", "First token, p95",
    "Gap between tokens, longest p95", "Queue (engine), stall (client) a request", "Last token, p95", "Tokens/s",
    "Most running, waiting, KV used", "In, limit, answer tokens", "Recomputed at most",
    "Engine's times short of end-to-end, of it outside its core",
)  # fmt: skip


def ladder_tables(ladder: LadderResult | None) -> list[LadderTable]:
    """A table for each arm, the control's first."""
    if ladder is None:
        return []
    return [
        LadderTable(f"{arm.arm}: {arm.title}", _onsets(arm), [_row(level) for level in arm.levels])
        for arm in ladder.arms
    ]


def _onsets(arm: ArmLadder) -> str:
    predicted = arm.onset_predicted
    told = (
        "none predicted"
        if predicted is None
        else f"predicted {predicted[0]}" + (f" to {predicted[1]}" if predicted[0] != predicted[1] else "")
    )
    measured = arm.onset_measured if arm.onset_measured is not None else "none"
    return f"Onset: {told}, measured {measured}.{_gpu_seconds(arm)}"


def _gpu_seconds(arm: ArmLadder) -> str:
    """What a request costs in GPU-seconds at each level; nothing without GPUs."""
    costs = [
        f"{number_text(level.gpu_seconds_per_request)} at {level.concurrency}"
        for level in arm.levels
        if level.gpu_seconds_per_request is not None
    ]
    if not costs:
        return ""
    gpus = f"{arm.gpus} GPU{'s' if arm.gpus > 1 else ''}"
    return f" GPU-seconds of a request with {gpus}, by requests in flight: {', '.join(costs)}."


def _row(level: Level) -> LevelRow:
    peak = ", ".join(
        (number_text(level.running_peak), number_text(level.waiting_peak), share_text(level.kv_used_share_peak))
    )
    return LevelRow(
        head=str(level.concurrency),
        cells=[
            f"{level.preemptions} ({number_text(level.preemptions_per_request)}, "
            f"{number_text(level.preemptions_per_second)})",
            level.pattern,
            f"{level.requests}, {level.failed}, {level.aborted}",
            f"{seconds_text(level.ttft_median_seconds)}, {seconds_text(level.ttft_p95_seconds)}",
            f"{seconds_text(level.inter_token_median_seconds)}, {seconds_text(level.longest_gap_p95_seconds)}",
            f"{seconds_text(level.queue_seconds_per_request)}, {seconds_text(level.stall_seconds_per_request)}",
            f"{seconds_text(level.e2e_median_seconds)}, {seconds_text(level.e2e_p95_seconds)}",
            number_text(level.output_tokens_per_second),
            peak,
            f"{_lengths(level.prompt_tokens_mean, level.prompt_tokens_range)}, {number_text(level.max_tokens_mean)}, "
            f"{_lengths(level.answer_tokens_mean, level.answer_tokens_range)}",
            number_text(level.recomputed_tokens_at_most),
            f"{share_text(level.server_difference_share)}, {share_text(level.server_outside_core_share)}",
        ],
    )


def _lengths(mean: float | None, span: Sequence[int] | None) -> str:
    """A mean, with the least and the most where they are not alike."""
    between = f" ({span[0]} to {span[1]})" if span and span[0] != span[1] else ""
    return f"{number_text(mean)}{between}"


def time_lines(records: Sequence[RunRecord], control: str) -> list[tuple[str, list[tuple[str, ...]]]]:
    """(level, rows of seconds, running, waiting, KV used, preemptions) of the control's first run with a ladder."""
    run = next((run for run in records if run.arm == control and any(phase.pressure for phase in run.phases)), None)
    if run is None:
        return []
    return [
        (f"{phase.concurrency} in flight, run {run.run}", [_point(point) for point in _thinned(phase.pressure)])
        for phase in run.phases
        if phase.pressure
    ]


def _thinned(points: Sequence[PressurePoint]) -> Sequence[PressurePoint]:
    step = -(-len(points) // LINE_POINTS_MAX)
    return points[::step]


def _point(point: PressurePoint) -> tuple[str, ...]:
    return (
        f"{point.seconds:.2f}",
        number_text(point.running),
        number_text(point.waiting),
        share_text(point.kv_used_share),
        number_text(point.preemptions),
    )
