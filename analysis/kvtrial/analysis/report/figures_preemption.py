"""Figures of the preemption section: the ladder, a run's time line, the ledger, lengths asked for and given."""

import math
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from msgspec import Struct

from kvtrial.analysis.report.drawing import (
    ARMS,
    BAD,
    BAND,
    INK,
    LINES,
    MARKERS,
    PAPER,
    QUIET,
    Drawing,
    arm_fill,
    finite,
    heading,
    legend_above,
    level_axis,
    number_axis,
    percent_axis,
    shown,
    style,
    time_scale,
)
from kvtrial.analysis.report.words import Words
from kvtrial.record.ladder import LadderResult, Level
from kvtrial.record.pressure import PressurePoint

ARMS_DRAWN_MAX = 6
HATCHES = ("", "////", "", "xxxx")
PART_COLORS = (QUIET, ARMS[0], ARMS[2], ARMS[3])
POINTS_MAX = 400
ASIDE = 0.07


class LevelParts(Struct, frozen=True):
    """Where a level's time went: seconds a request by the client's four parts."""

    level: int
    seconds: Sequence[float]


Value = Callable[[Level], float | None]


def ladder_plot(ladder: LadderResult, words: Words, text: str) -> str | None:
    """Preemptions, first token, queue and last token by requests in flight, an arm a line."""
    arms = [arm for arm in ladder.arms[:ARMS_DRAWN_MAX] if arm.levels]
    if not arms:
        return None
    levels = sorted({level.concurrency for arm in arms for level in arm.levels})
    place = {level: index for index, level in enumerate(levels)}
    panels: list[tuple[str, Value, bool]] = [
        ("axis.preemptions", lambda level: level.preemptions_per_request, False),
        ("axis.ttft_p95", lambda level: level.ttft_p95_seconds, True),
        ("axis.queue", lambda level: level.queue_seconds_per_request, True),
        ("axis.e2e_p95", lambda level: level.e2e_p95_seconds, True),
    ]
    with style():
        drawing = Drawing("ladder-plot", words, 6.6, panels=len(panels))
        for axes, (name, value, is_time) in zip(drawing.panels, panels, strict=True):
            found = finite([value(level) for arm in arms for level in arm.levels])
            factor, unit = time_scale(max(found, default=0.0), words) if is_time else (1.0, "")
            _onset_band(axes, ladder, levels)
            for index, arm in enumerate(arms):
                points = [
                    (place[level.concurrency], measured * factor)
                    for level in arm.levels
                    if (measured := value(level)) is not None and math.isfinite(measured)
                ]
                # Arms with the same value stand beside each other, so that none hides another.
                aside = (index - (len(arms) - 1) / 2) * ASIDE
                axes.plot([x + aside for x, _ in points], [y for _, y in points], linestyle=LINES[index % len(LINES)],
                          color=ARMS[index], linewidth=1.8, label=shown(arm.arm, 18))  # fmt: skip
                for x, y in points:
                    mark = axes.plot([x + aside], [y], MARKERS[index % len(MARKERS)], color=ARMS[index], markersize=5,
                                     clip_on=False)  # fmt: skip
                    said = words.local(f"{y:,.3g}{f' {unit}' if unit else ''}")
                    drawing.tip(mark, f"{arm.arm}, {words('figure.in_flight', level=levels[x])}: {said}")
            axes.margins(y=0.08)
            axes.set_ylim(bottom=0)
            number_axis(axes.yaxis, words, 4)
            axes.grid(axis="y")
            heading(axes, f"{words(name)}{f', {unit}' if unit else ''}")
        level_axis(drawing.panels[-1], levels, words)
        drawing.panels[-1].set_xlabel(words("axis.in_flight"))
        legend_above(drawing.axes)
        return drawing.svg(words("figure.ladder"), text)


def _onset_band(axes: Axes, ladder: LadderResult, levels: Sequence[int]) -> None:
    """The control's predicted onset as a band over the places of the levels, interpolated between them."""
    if ladder.onset_predicted is None:
        return
    low, high = (_place(value, levels) for value in ladder.onset_predicted)
    axes.axvspan(low - 0.12, high + 0.12, color=BAND, linewidth=0, zorder=0)


def _place(value: float, levels: Sequence[int]) -> float:
    """Where a number of requests lies among the levels, which stand at equal distances."""
    if value <= levels[0]:
        return 0.0
    for index in range(1, len(levels)):
        if value <= levels[index]:
            return index - 1 + (value - levels[index - 1]) / (levels[index] - levels[index - 1])
    return float(len(levels) - 1)


def time_line_plot(points: Sequence[PressurePoint], words: Words, title: str, text: str) -> str | None:
    """Running and waiting requests, KV use, and preemptions so far over a level's time."""
    if len(points) < 2:
        return None
    step = -(-len(points) // POINTS_MAX)
    kept = points[::step] if (len(points) - 1) % step == 0 else [*points[::step], points[-1]]
    seconds = [point.seconds for point in kept]
    with style():
        drawing = Drawing("time-line", words, 4.4, panels=3)
        counts, used, preempted = drawing.panels
        for index, (name, values) in enumerate(
            (
                ("figure.running", [point.running for point in kept]),
                ("figure.waiting", [point.waiting for point in kept]),
            )
        ):
            counts.step(seconds, _gaps(values), where="post", color=ARMS[index], linestyle=LINES[index], linewidth=1.8,
                        label=words(name))  # fmt: skip
        used.step(seconds, _gaps([point.kv_used_share for point in kept]), where="post", color=ARMS[2], linewidth=1.8)
        used.axhline(1.0, color=QUIET, linewidth=0.8, linestyle=":")
        preempted.step(seconds, _gaps([point.preemptions for point in kept]), where="post", color=BAD, linewidth=2)
        # What is pointed at is the moment: an invisible mark in each panel's height says all of it.
        for point in kept:
            said = ", ".join(
                (
                    words.seconds(point.seconds),
                    f"{words('figure.running')} {words.whole(point.running)}",
                    f"{words('figure.waiting')} {words.whole(point.waiting)}",
                    f"{words('figure.kv_used')} {words.share(point.kv_used_share)}",
                    f"{words('figure.preempted')} {words.whole(point.preemptions)}",
                )
            )
            if point.running is not None:
                drawing.tip(counts.plot([point.seconds], [point.running], "o", color=ARMS[0], markersize=2.5), said)
        counts.set_ylim(bottom=0)
        number_axis(counts.yaxis, words, 4, whole=True)
        heading(counts, words("figure.requests"))
        legend_above(counts)
        used.set_ylim(0, 1.08)
        percent_axis(used.yaxis, words, (0, 0.5, 1))
        heading(used, words("figure.kv_used"))
        preempted.set_ylim(bottom=0)
        number_axis(preempted.yaxis, words, 4, whole=True)
        heading(preempted, words("figure.preempted"))
        preempted.set_xlim(0, 1.02 * max(seconds) or 1)
        number_axis(preempted.xaxis, words)
        for axes in drawing.panels:
            axes.grid(axis="y")
        preempted.set_xlabel(words("axis.seconds_of_level"))
        return drawing.svg(title, text)


def _gaps(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def ledger_plot(levels: Sequence[LevelParts], parts: Sequence[str], words: Words, text: str) -> str | None:
    """Seconds of a request by part, stacked to the end-to-end time, a bar a level."""
    drawn = [level for level in levels if sum(level.seconds) > 0]
    if not drawn:
        return None
    factor, unit = time_scale(max(sum(level.seconds) for level in drawn), words)
    with style():
        drawing = Drawing("ledger", words, 3.0)
        axes = drawing.axes
        for place, level in enumerate(drawn):
            bottom, whole = 0.0, sum(level.seconds)
            for number, seconds in enumerate(level.seconds):
                bar = axes.bar([place], [seconds * factor], 0.74, bottom=bottom, color=PART_COLORS[number],
                               hatch=HATCHES[number], edgecolor=PAPER, linewidth=0.6)  # fmt: skip
                if seconds > 0:
                    drawing.tip(
                        bar,
                        f"{words('figure.in_flight', level=level.level)}: {parts[number]} {words.seconds(seconds)} "
                        f"({words.share(seconds / whole)})",
                    )
                bottom += seconds * factor
        for number, part in enumerate(parts):
            axes.bar([math.nan], [math.nan], color=PART_COLORS[number], hatch=HATCHES[number], edgecolor=PAPER,
                     label=part)  # fmt: skip
        level_axis(axes, [level.level for level in drawn], words)
        number_axis(axes.yaxis, words)
        axes.grid(axis="y")
        axes.set_xlabel(words("axis.in_flight"))
        axes.set_ylabel(f"{words('axis.of_a_request')}, {unit}")
        legend_above(axes)
        return drawing.svg(words("figure.ledger"), text)


def lengths_given_plot(pairs: Sequence[tuple[int, int]], words: Words, text: str) -> str | None:
    """How many answers were so long, beside the limits that were asked for. `pairs`: (max_tokens, output_tokens)."""
    if not pairs:
        return None
    asked, given = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    longest = max(max(asked), max(given), 1)
    width = max(1, math.ceil(longest / 24))
    bins = range(0, longest + 2 * width, width)
    with style():
        drawing = Drawing("lengths-given", words, 2.8)
        axes = drawing.axes
        for index, (values, name) in enumerate(((asked, "figure.asked"), (given, "figure.given"))):
            counts = [sum(low <= value < low + width for value in values) for low in bins]
            places = [low + width / 2 for low in bins]
            bars = axes.bar(places, counts, width * 0.94, color=ARMS[index],
                            hatch="" if index else "////", edgecolor=PAPER, linewidth=0.5,
                            alpha=0.55 if index == 0 else 0.9, label=words(name))  # fmt: skip
            for bar, low, count in zip(bars, bins, counts, strict=True):
                if count:
                    drawing.tip(
                        bar,
                        f"{words(name)}, {words.whole(low)}–{words.whole(low + width - 1)} {words('unit.tokens')}: "
                        f"{words.count(count, 'request')}",
                    )
        axes.set_xlim(0, longest + 1.5 * width)
        number_axis(axes.xaxis, words)
        number_axis(axes.yaxis, words, 5, whole=True)
        axes.grid(axis="y")
        axes.set_xlabel(words("axis.output_tokens"))
        axes.set_ylabel(words("axis.requests"))
        legend_above(axes)
        return drawing.svg(words("figure.lengths_given"), text)


def reached_plot(ladder: LadderResult, words: Words, text: str) -> str | None:
    """The highest load within each profile, arms side by side."""
    arms = ladder.arms
    profiles = list(dict.fromkeys(entry.profile for arm in arms for entry in arm.reached))
    if not profiles:
        return None
    kept = list(arms)[:ARMS_DRAWN_MAX]
    with style():
        drawing = Drawing("reached", words, 0.9 + 0.24 * len(profiles) * max(2, len(kept)))
        axes = drawing.axes
        height = 0.8 / len(kept)
        for index, arm in enumerate(kept):
            by_profile = {entry.profile: entry for entry in arm.reached}
            for row, profile in enumerate(profiles):
                if profile not in by_profile:
                    continue
                y = len(profiles) - 1 - row + 0.4 - (index + 0.5) * height
                level = by_profile[profile].concurrency or 0
                # Where no higher level was tried the arm bears at least so many.
                said = f"{'≥' if level and not by_profile[profile].broken_by else ''}{level}"
                bar = axes.barh([y], [level], height * 0.9, **arm_fill(index))
                axes.annotate(f" {said}", (level, y), va="center", fontsize=8.5, color=INK)
                drawing.tip(bar, f"{arm.arm}, {profile}: {said}")
            axes.barh([math.nan], [math.nan], **arm_fill(index), label=shown(arm.arm, 18))
        axes.set_yticks(
            [len(profiles) - 1 - row for row in range(len(profiles))],
            [shown(words.or_else(f"profile.{p}", p), 20) for p in profiles],
        )
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(-0.5, len(profiles) - 0.5)
        axes.margins(x=0.08)
        axes.set_xlim(left=0)
        number_axis(axes.xaxis, words, whole=True)
        axes.grid(axis="x")
        axes.set_xlabel(words("axis.in_flight"))
        legend_above(axes, 3)
        return drawing.svg(words("figure.reached"), text)
