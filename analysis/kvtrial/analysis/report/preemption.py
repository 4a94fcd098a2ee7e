"""The section on a ladder: levels, time line, ledger, lengths, and what each change buys. Pure."""

from collections.abc import Callable, Sequence

from msgspec import Struct

from kvtrial.analysis.regime import CHANGE_MARKS
from kvtrial.analysis.report import figures_preemption as figures
from kvtrial.analysis.report.said import said_text
from kvtrial.analysis.report.selection import Chosen, Plot, Row, Table, clipped, drawn
from kvtrial.analysis.report.words import Words
from kvtrial.record.ladder import ArmLadder, LadderResult, Level, Reached
from kvtrial.record.pressure import PressurePoint
from kvtrial.record.record import PhaseRecord, RunRecord
from kvtrial.record.verdict import ComparisonResult, Verdict

LINE_POINTS_MAX = 40
PREEMPTED = "preemptions_per_1000_requests"
PARTS = ("lag", "first_token", "gaps", "stalls")


class Section(Struct, frozen=True):
    """All of the section."""

    words: list[str]
    more_words: list[str]
    plots: list[Plot]
    changes: Table | None
    ledger: Table | None
    lengths: Table | None
    levels: list[Table]
    lines: list[Table]
    how: str
    host: str


def section(
    ladder: LadderResult | None,
    control: str,
    chosen: Chosen,
    words: Words,
    comparisons: Sequence[ComparisonResult] = (),
    hosts: int = 1,
) -> Section | None:
    """The section of a campaign with a ladder, None without."""
    if ladder is None:
        return None
    # From the first change on the table of changes says it.
    marked = (number for number, line in enumerate(ladder.regime) if any(mark in line for mark in CHANGE_MARKS))
    said = next(marked, len(ladder.regime))
    own = [run for run in chosen.used if run.arm == control and run.host == ladder.host]
    told = _time_line_phase(own)
    plots = [
        _arms_plot(figures.ladder_plot, ladder, "ladder", words),
        _time_line(told, words),
        _ledger_plot(own, ladder, words),
        _lengths_plot(own, words),
        _arms_plot(figures.reached_plot, ladder, "reached", words),
    ]
    return Section(
        words=ladder.regime[:said],
        more_words=ladder.regime[said:],
        plots=[plot for plot in plots if plot is not None],
        changes=_changes(ladder, control, comparisons, words),
        ledger=_ledger_table(own, ladder, words),
        lengths=_lengths_table(ladder, words),
        levels=[_levels(arm, words) for arm in ladder.arms],
        lines=_lines(own, words),
        how=_how(own, ladder, words),
        host=host_words(ladder, hosts, words),
    )


def host_words(ladder: LadderResult | None, hosts: int, words: Words) -> str:
    """Which host a ladder is of, where a campaign has several; "" where it has one."""
    if ladder is None or hosts < 2:
        return ""
    return words("preemption.host", host=clipped(ladder.host, 60), hosts=words.count(hosts, "host_of"))


def comparisons_of(verdict: Verdict) -> list[ComparisonResult]:
    """The comparisons of the host that the ladder is of: a fleet's words do not belong beside one host's numbers."""
    own = verdict.ladder.host if verdict.ladder is not None and len(verdict.hosts) > 1 else None
    return next((host.comparisons for host in verdict.hosts if host.host == own), verdict.comparisons)


def _arms_plot(
    draw: Callable[[LadderResult, Words, str], str | None], ladder: LadderResult, name: str, words: Words
) -> Plot | None:
    """A figure of all arms; its caption names those that it has no room for."""
    caption = words(f"caption.{name}")
    if left_out := [arm.arm for arm in ladder.arms[figures.ARMS_DRAWN_MAX :]]:
        caption += " " + words("caption.arms_not_drawn", arms=", ".join(left_out))
    return drawn(draw(ladder, words, caption), words(f"figure.{name}"), caption)


# ------------------------------------------------------------------------------------------------- change by change


def _changes(ladder: LadderResult, control: str, comparisons: Sequence[ComparisonResult], words: Words) -> Table | None:
    """A row an arm that differs from the control in one thing: what it buys, for what, and whether the delay moved."""
    theirs = next((arm for arm in ladder.arms if arm.arm == control), None)
    rows = [_change(arm, theirs, comparisons, control, words) for arm in ladder.arms if arm.arm != control]
    if not rows:
        return None
    heads = [words(f"change.{name}") for name in ("head", "buys", "costs", "onset", "reached", "moved")]
    return Table(heads, rows)


def reached_words(entry: Reached | None, words: Words) -> str:
    """The load up to which a profile is kept; at least that where no higher level was tried."""
    if entry is None or entry.concurrency is None:
        return words("change.none") if entry is not None else "–"
    level = words.whole(entry.concurrency)
    return level if entry.broken_by else words("change.at_least", level=level)


def reached_in_brief(entry: Reached | None, words: Words) -> str:
    """The same in a sign: "≥ 16" where no higher level was tried."""
    if entry is None or entry.concurrency is None:
        return words("change.none") if entry is not None else "–"
    return f"{'' if entry.broken_by else '≥ '}{words.whole(entry.concurrency)}"


def moved_words(arm: ArmLadder, words: Words) -> str:
    """Where the delay went; nothing could move where no preemption was taken away."""
    if arm.moved is None:
        return words("change.unknown")
    if arm.moved:
        return words("change.is_moved")
    return words("change.nothing_given" if _gives_nothing(arm) else "change.not_moved")


def moved_in_brief(arm: ArmLadder, words: Words) -> str:
    """The same in a word."""
    if arm.moved:
        return words("change.is_moved")
    return words("ways.no_gain" if _gives_nothing(arm) else "ways.not_moved")


def _gives_nothing(arm: ArmLadder) -> bool:
    return arm.fewer_preemptions_per_1000 is not None and arm.fewer_preemptions_per_1000 <= 0


def preempted_words(arm: ArmLadder, comparisons: Sequence[ComparisonResult], control: str, words: Words) -> str:
    """An arm's change in preemptions per 1,000 requests, with its verdict."""
    if arm.fewer_preemptions_per_1000 is None:
        return "–"
    number = words.local(f"{-arm.fewer_preemptions_per_1000:+.3g}") if arm.fewer_preemptions_per_1000 else "0"
    word = _preempted_word(arm.arm, comparisons, control, words)
    return f"{number}, {word}" if word else number


def _preempted_word(arm: str, comparisons: Sequence[ComparisonResult], control: str, words: Words) -> str:
    """The verdict on an arm's preemptions, in the page's language; the one that decides before others."""
    found = [item for item in comparisons if (item.arm, item.against, item.metric) == (arm, control, PREEMPTED)]
    found.sort(key=lambda item: item.role != "primary")
    return words.or_else(f"word.{found[0].verdict}", found[0].verdict) if found else ""


def gpus_words(arm: ArmLadder, control: ArmLadder | None, words: Words) -> str:
    """How many GPUs an arm takes where that is not what the control takes."""
    if control is None or not arm.gpus or arm.gpus == control.gpus:
        return ""
    return words("change.gpus", mine=words.count(arm.gpus, "cost.GPU"), theirs=control.gpus)


def _change(
    arm: ArmLadder,
    theirs: ArmLadder | None,
    comparisons: Sequence[ComparisonResult],
    control: str,
    words: Words,
) -> Row:
    fewer = arm.fewer_preemptions_per_1000
    buys = "–"
    if fewer is not None:
        key = "change.fewer" if fewer >= 0 else "change.more"
        buys = words(key, number=words.number(abs(fewer)))
        if word := _preempted_word(arm.arm, comparisons, control, words):
            buys += f"\n{word}"
    if arm.less_queue_seconds is not None:
        key = "change.queues_less" if arm.less_queue_seconds >= 0 else "change.queues_longer"
        buys = words(key, time=words.seconds(abs(arm.less_queue_seconds)))
    cost = "–"
    if arm.cost_amount and arm.cost_unit:
        cost = words.cost(arm.cost_amount, arm.cost_unit)
        if arm.fewer_preemptions_per_1000_per_unit is not None:
            rate = words.number(abs(arm.fewer_preemptions_per_1000_per_unit))
            cost += "\n" + words("change.per_unit", rate=rate, unit=words.piece(arm.cost_unit))
    if gpus := gpus_words(arm, theirs, words):
        cost += f"\n{gpus}"
    onset = words.whole(arm.onset_measured) if arm.onset_measured is not None else words("change.no_onset")
    reached = "\n".join(
        f"{words.or_else(f'profile.{entry.profile}', entry.profile)}: " + reached_words(entry, words)
        for entry in arm.reached
    )
    state = moved_words(arm, words)
    kind = {True: "moved", False: "" if _gives_nothing(arm) else "stayed", None: ""}[arm.moved]
    note = words.title(arm.title) + (
        f". {words('change.work')} {said_text(arm.changes_work, words)}." if arm.changes_work else ""
    )
    return Row(
        arm.arm,
        [buys, cost, onset, reached or "–", state, arm.moved_note.removeprefix("not moved: ").removeprefix("MOVED: ")],
        kind=kind,
        note=note,
    )


# ------------------------------------------------------------------------------------------------------------ ledger


def _levels_of(runs: Sequence[RunRecord]) -> dict[int, list[PhaseRecord]]:
    found: dict[int, list[PhaseRecord]] = {}
    for run in runs:
        for phase in run.phases:
            if phase.ledger is not None and phase.ledger.counted and phase.concurrency is not None:
                found.setdefault(phase.concurrency, []).append(phase)
    return dict(sorted(found.items()))


def _parts(phases: Sequence[PhaseRecord]) -> list[float]:
    """Seconds a request by part, over the phases of one level."""
    ledgers = [phase.ledger for phase in phases if phase.ledger is not None]
    counted = sum(ledger.counted for ledger in ledgers)
    sums = (
        sum(ledger.lag_ns for ledger in ledgers),
        sum(ledger.first_token_ns for ledger in ledgers),
        sum(ledger.normal_gaps_ns for ledger in ledgers),
        sum(ledger.stall_gaps_ns for ledger in ledgers),
    )
    return [part / counted / 1e9 for part in sums]


def _stalls(phases: Sequence[PhaseRecord]) -> int:
    return sum(phase.ledger.stalls for phase in phases if phase.ledger is not None)


def _preempted(ladder: LadderResult) -> dict[int, int]:
    """Preemptions of the control by level."""
    return {level.concurrency: level.preemptions for level in ladder.levels}


def _fewer_stalls(runs: Sequence[RunRecord], ladder: LadderResult) -> list[int]:
    """The levels at which fewer stalls were seen than preemptions counted: some waits were too short for a stall."""
    preempted = _preempted(ladder)
    return [level for level, phases in _levels_of(runs).items() if _stalls(phases) < preempted.get(level, 0)]


def _how(runs: Sequence[RunRecord], ladder: LadderResult, words: Words) -> str:
    """How the levels' numbers are made; stalls bound the waits after preemptions only where each wait became one."""
    if not any(_preempted(ladder).values()):
        return words("ladder.how")
    return f"{words('ladder.how')} {words('ladder.short_waits' if _fewer_stalls(runs, ladder) else 'ladder.bound')}"


def _ledger_plot(runs: Sequence[RunRecord], ladder: LadderResult, words: Words) -> Plot | None:
    by_level = _levels_of(runs)
    levels = [figures.LevelParts(level, _parts(phases)) for level, phases in by_level.items()]
    caption = words("caption.ledger")
    preempted = sum(count for level, count in _preempted(ladder).items() if level in by_level)
    if preempted:
        stalls = sum(map(_stalls, by_level.values()))
        counted = {"preemptions": words.count(preempted, "preemption"), "stalls": words.count(stalls, "stall")}
        caption += " " + words("caption.ledger_stalls", **counted)
        if fewer := _fewer_stalls(runs, ladder):
            caption += " " + words("caption.ledger_short", levels=", ".join(map(words.whole, fewer)))
    names = [words(f"ledger.{part}") for part in PARTS]
    return drawn(figures.ledger_plot(levels, names, words, caption), words("figure.ledger"), caption)


def _ledger_table(runs: Sequence[RunRecord], ladder: LadderResult, words: Words) -> Table | None:
    rows, preempted = [], _preempted(ladder)
    for level, phases in _levels_of(runs).items():
        parts = _parts(phases)
        cells = [*(words.seconds(part) for part in parts), words.seconds(sum(parts)), words.whole(_stalls(phases)),
                 words.whole(preempted.get(level))]  # fmt: skip
        rows.append(Row(str(level), cells))
    heads = [words("axis.in_flight"), *(words(f"ledger.{part}") for part in PARTS), words("ledger.whole"),
             words("ledger.count"), words("level.preemptions")]  # fmt: skip
    return Table(heads, rows, title=words("figure.ledger")) if rows else None


# ----------------------------------------------------------------------------------------------------------- lengths


def _lengths_plot(runs: Sequence[RunRecord], words: Words) -> Plot | None:
    pairs = [
        (request.max_tokens, request.output_tokens)
        for run in runs
        for phase in run.phases
        if phase.ledger is not None
        for request in phase.requests
        if request.error_class is None
    ]
    caption = words("caption.lengths_given")
    return drawn(figures.lengths_given_plot(pairs, words, caption), words("figure.lengths_given"), caption)


def _lengths_table(ladder: LadderResult, words: Words) -> Table | None:
    rows = [
        Row(
            str(level.concurrency),
            [
                _spanned(level.prompt_tokens_mean, level.prompt_tokens_range, words),
                words.number(level.max_tokens_mean),
                _spanned(level.answer_tokens_mean, level.answer_tokens_range, words),
                words.share(level.limit_reached_share),
            ],
        )
        for level in ladder.levels
    ]
    heads = [words("axis.in_flight"), *(words(f"lengths.{name}") for name in ("prompt", "asked", "given", "reached"))]
    return Table(heads, rows, title=words("figure.lengths_given")) if rows else None


# ---------------------------------------------------------------------------------------------------------- time line


def _time_line_phase(runs: Sequence[RunRecord]) -> tuple[RunRecord, PhaseRecord] | None:
    """The level that preempts most in the control's first run that has a time line."""
    for run in runs:
        phases = [phase for phase in run.phases if len(phase.pressure) > 1]
        if phases:
            return run, max(phases, key=lambda phase: (phase.pressure[-1].preemptions or 0, phase.concurrency or 0))
    return None


def _time_line(told: tuple[RunRecord, PhaseRecord] | None, words: Words) -> Plot | None:
    if told is None:
        return None
    run, phase = told
    caption = words("caption.time_line", run=run.run, level=phase.concurrency)
    return drawn(
        figures.time_line_plot(phase.pressure, words, words("figure.time_line"), caption),
        words("figure.time_line"),
        caption,
    )


def _lines(runs: Sequence[RunRecord], words: Words) -> list[Table]:
    """Seconds, running, waiting, KV used, preemptions of the first run with a time line, a table a level."""
    run = next((run for run in runs if any(phase.pressure for phase in run.phases)), None)
    if run is None:
        return []
    heads = [words("line.seconds"), words("figure.running"), words("figure.waiting"), words("figure.kv_used"),
             words("figure.preempted")]  # fmt: skip
    return [
        Table(
            heads,
            [_point(point, words) for point in _thinned(phase.pressure)],
            title=words("line.title", level=phase.concurrency, run=run.run),
        )
        for phase in run.phases
        if phase.pressure
    ]


def _thinned(points: Sequence[PressurePoint]) -> Sequence[PressurePoint]:
    """Points evenly from all, the last among them: it has the counts of the whole level."""
    step = -(-len(points) // LINE_POINTS_MAX)
    return points[::step] if (len(points) - 1) % step == 0 else [*points[::step], points[-1]]


def _point(point: PressurePoint, words: Words) -> Row:
    return Row(
        words.local(f"{point.seconds:.2f}"),
        [
            words.number(point.running),
            words.number(point.waiting),
            words.share(point.kv_used_share),
            words.number(point.preemptions),
        ],
    )


# ------------------------------------------------------------------------------------------------------------- levels


def _levels(arm: ArmLadder, words: Words) -> Table:
    """Measures down, levels across: a number a cell, and as narrow as a ladder has levels."""
    heads = [words("level.in_flight"), *(words.whole(level.concurrency) for level in arm.levels)]
    rows = [
        Row(words(f"level.{name}"), [read(level, words) for level in arm.levels]) for name, read in MEASURES.items()
    ]
    return Table(heads, rows, f"{arm.arm}: {words.title(arm.title)}", caption=_onsets(arm, words))


def _onsets(arm: ArmLadder, words: Words) -> str:
    predicted = arm.onset_predicted
    if predicted is None:
        told = words("onset.none_predicted")
    elif predicted[0] == predicted[1]:
        told = words("onset.predicted", value=predicted[0])
    else:
        told = words("onset.predicted_span", low=predicted[0], high=predicted[1])
    measured = words("onset.none") if arm.onset_measured is None else str(arm.onset_measured)
    sentence = words("onset.sentence", predicted=told, measured=measured)
    costs = [
        words("level.gpu_seconds", cost=words.number(level.gpu_seconds_per_request), level=level.concurrency)
        for level in arm.levels
        if level.gpu_seconds_per_request is not None
    ]
    return f"{sentence} {words('onset.gpu_seconds', gpus=arm.gpus, costs=', '.join(costs))}" if costs else sentence


def _spanned(mean: float | None, span: Sequence[int] | None, words: Words) -> str:
    """A mean, with the least and the most where they are not alike."""
    if not span or span[0] == span[1]:
        return words.number(mean)
    return f"{words.number(mean)}\n{words('level.span', low=words.whole(span[0]), high=words.whole(span[1]))}"


MEASURES: dict[str, Callable[[Level, Words], str]] = {
    "preemptions": lambda level, words: words.whole(level.preemptions),
    "preemptions_per_request": lambda level, words: words.number(level.preemptions_per_request),
    "preemptions_per_second": lambda level, words: words.number(level.preemptions_per_second),
    "starts": lambda level, words: words.or_else(f"starts.{level.starts_pattern}", level.starts_pattern),
    "pattern": lambda level, words: words.or_else(f"pattern.{level.pattern}", level.pattern),
    "completed": lambda level, words: words.whole(level.requests),
    "failed": lambda level, words: words.whole(level.failed),
    "aborted": lambda level, words: words.whole(level.aborted),
    "ttft_median": lambda level, words: words.seconds(level.ttft_median_seconds),
    "ttft_p95": lambda level, words: words.seconds(level.ttft_p95_seconds),
    "gap_median": lambda level, words: words.seconds(level.inter_token_median_seconds),
    "gap_longest": lambda level, words: words.seconds(level.longest_gap_p95_seconds),
    "queue": lambda level, words: words.seconds(level.queue_seconds_per_request),
    "stall": lambda level, words: words.seconds(level.stall_seconds_per_request),
    "e2e_median": lambda level, words: words.seconds(level.e2e_median_seconds),
    "e2e_p95": lambda level, words: words.seconds(level.e2e_p95_seconds),
    "throughput": lambda level, words: words.number(level.output_tokens_per_second),
    "running": lambda level, words: words.whole(level.running_peak),
    "waiting": lambda level, words: words.whole(level.waiting_peak),
    "kv_used": lambda level, words: words.share(level.kv_used_share_peak),
    "prompt": lambda level, words: _spanned(level.prompt_tokens_mean, level.prompt_tokens_range, words),
    "limit": lambda level, words: words.number(level.max_tokens_mean),
    "answer": lambda level, words: _spanned(level.answer_tokens_mean, level.answer_tokens_range, words),
    "recomputed": lambda level, words: words.whole(level.recomputed_tokens_at_most),
    "short": lambda level, words: words.share(level.server_difference_share),
    "outside": lambda level, words: words.share(level.server_outside_core_share),
}
"""What a level's column says, top to bottom."""
