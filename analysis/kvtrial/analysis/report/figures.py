"""Figures of comparisons: pairs, effects, requests, the sweep of shares. Each is None where nothing can be drawn."""

import bisect
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

from msgspec import Struct

from kvtrial.analysis.firsttokens import FirstTokens
from kvtrial.analysis.report.drawing import (
    ARMS,
    BAD,
    BAND,
    GOOD,
    INK,
    LINES,
    MARKERS,
    QUIET,
    Drawing,
    apart,
    finite,
    heading,
    legend_above,
    number_axis,
    percent_axis,
    ratio_axis,
    shown,
    style,
    time_scale,
)
from kvtrial.analysis.report.words import Words
from kvtrial.record.verdict import BreakEven, FoundBreakEven

PAIRS_DRAWN_MAX = 500
ECDF_POINTS_MAX = 400


FOREST_LABEL_MAX = 44
KIND_COLORS = {"odd": ARMS[3], "pool": INK}
WORD_COLORS = {"BETTER": GOOD, "WORSE": BAD, "EQUIVALENT": INK, "INCONCLUSIVE": QUIET, "INVALID": QUIET}
WORD_MARKERS = {"BETTER": "^", "WORSE": "v", "EQUIVALENT": "s", "INCONCLUSIVE": "o", "INVALID": "x"}
"""A shape beside the colour, for who tells colours badly."""


class ForestRow(Struct, frozen=True):
    """A row of a forest plot: ratios with their interval and margin (0.05 is 5 %).

    `kind`: usual, deciding, odd, pool. `word`: its verdict, where rows are marked by theirs.
    """

    label: str
    effect: float
    ci_low: float | None
    ci_high: float | None
    margin: float
    kind: str = "usual"
    tip: str = ""
    word: str = ""


def paired_plot(
    pairs: Sequence[tuple[float, float]],
    against: str,
    arm: str,
    metric: str,
    words: Words,
    description: str,
    *,
    is_time: bool,
    names: Sequence[str] = (),
) -> str | None:
    """Each pair's two values joined by a line, `against` on the left.

    Of more than PAIRS_DRAWN_MAX pairs that many are drawn, evenly by rank; the medians are those of all.

    `pairs`: (against, arm) per pair, seconds where `is_time`; `names` of the pairs. The axis starts at zero, so that
    lengths can be compared.
    """
    kept = [
        (pair, name)
        for pair, name in zip(pairs, [*names, *[""] * (len(pairs) - len(names))], strict=True)
        if all(math.isfinite(value) for value in pair)
    ]
    if not kept:
        return None
    factor, unit = time_scale(max(max(pair) for pair, _ in kept), words) if is_time else (1.0, "")
    after = f" {unit}" if unit else ""
    with style():
        drawing = Drawing("paired", words)
        axes = drawing.axes
        medians = [statistics.median(pair[side] for pair, _ in kept) * factor for side in (0, 1)]
        ranked, step = sorted(kept), len(kept) / min(len(kept), PAIRS_DRAWN_MAX)
        kept = [ranked[int(rank * step)] for rank in range(min(len(kept), PAIRS_DRAWN_MAX))]
        strength = 0.9 if len(kept) <= 30 else max(0.15, 25 / len(kept))
        for (left, right), name in kept:
            drawn = axes.plot(
                [0, 1], [left * factor, right * factor], color=QUIET, linewidth=1.4, alpha=strength, zorder=1
            )
            ratio = f", ×{right / left:.3g}" if left > 0 else ""
            said = words.local(f"{left * factor:,.3g} → {right * factor:,.3g}{after}{ratio}")
            drawing.tip(drawn, f"{name}: {said}" if name else said)
        for position, marker in ((0, MARKERS[0]), (1, MARKERS[1])):
            heights = [pair[position] * factor for pair, _ in kept]
            axes.plot([position] * len(heights), heights, marker, color=ARMS[position], markersize=7, zorder=2)
            side, shift = ("right", -11) if position == 0 else ("left", 11)
            axes.annotate(
                words.local(f"{medians[position]:,.3g}{after}"),
                (position, medians[position]),
                xytext=(shift, 0),
                textcoords="offset points",
                ha=side,
                va="center",
                fontsize=11,
                fontweight="bold",
            )
        axes.set_xticks([0, 1], [shown(against, 18), shown(arm, 18)])
        axes.set_xlim(-0.5, 1.5)
        top = axes.get_ylim()[1]
        # A little below zero, so that a value at zero stands free of the names below the axis.
        axes.set_ylim(bottom=min(-0.06 * top, min(min(pair) for pair, _ in kept) * factor))
        number_axis(axes.yaxis, words)
        axes.grid(axis="y")
        heading(axes, f"{metric}{f', {unit}' if unit else ''}")
        axes.tick_params(axis="x", length=0)
        return drawing.svg(f"{against} – {arm}", description)


def forest_plot(
    name: str,
    rows: Sequence[ForestRow],
    axis: str,
    words: Words,
    title: str,
    description: str,
    *,
    is_ratio: bool = True,
) -> str | None:
    """Effects with interval and the ±margin band: ratios on a log axis about 1, else differences about 0."""
    least, times = (0.0, "×") if is_ratio else (-math.inf, "")
    drawn = [row for row in rows if math.isfinite(row.effect) and row.effect > least]
    if not drawn:
        return None
    dense = len(drawn) > 30
    height = 0.17 if dense else 0.46
    names = apart([row.label for row in drawn], FOREST_LABEL_MAX)
    # A label of two lines is kept so: there is room where rows are few.
    labels = [
        "\n".join(shown(line, FOREST_LABEL_MAX) for line in row.label.split("\n")) if "\n" in row.label else name
        for row, name in zip(drawn, names, strict=True)
    ]
    with style():
        drawing = Drawing(name, words, 0.75 + max(3, len(drawn)) * height)
        axes = drawing.axes
        widest = max(row.margin for row in drawn)
        band = (1 / (1 + widest), 1 + widest) if is_ratio else (-widest, widest)
        values: list[float] = [band[0] / 1.1, 1.1] if is_ratio else list(band)
        axes.axvspan(*band, color=BAND, linewidth=0, zorder=0)
        for index, row in enumerate(drawn):
            y = len(drawn) - 1 - index
            color = WORD_COLORS.get(row.word) or KIND_COLORS.get(row.kind, ARMS[1])
            bounds = [bound for bound in finite([row.ci_low, row.ci_high]) if bound > least]
            marks = []
            if len(bounds) == 2:
                width = 1.2 if dense else 2.4
                marks += axes.plot(bounds, [y] * 2, color=color, linewidth=width, solid_capstyle="butt", zorder=1)
            marker = WORD_MARKERS.get(row.word) or ("o" if row.kind == "usual" else "D")
            marks += axes.plot([row.effect], [y], marker, color=color, markersize=3.5 if dense else 7, zorder=2,
                               clip_on=False)  # fmt: skip
            span = f" ({bounds[0]:.3g} – {bounds[1]:.3g})" if len(bounds) == 2 else ""
            drawing.tip(
                marks,
                row.tip or f"{shown(row.label)}: {words.local(f'{times}{row.effect:.3g}{span}')}",
            )
            values += [row.effect, *bounds]
        axes.axvline(1.0 if is_ratio else 0.0, color=QUIET, linewidth=1, zorder=0)
        if is_ratio:
            room = max(1.05, (max(values) / min(values)) ** 0.04)
            ratio_axis(axes, min(values) / room, max(values) * room, words)
        else:
            edge = 0.05 * (max(values) - min(values)) or 1.0
            axes.set_xlim(min(values) - edge, max(values) + edge)
            number_axis(axes.xaxis, words)
        axes.set_yticks(
            [len(drawn) - 1 - index for index in range(len(drawn))],
            labels,
            fontsize=7 if dense else 8.5,
        )
        for tick, row in zip(axes.get_yticklabels(), drawn, strict=True):
            tick.set_fontweight("normal" if row.kind == "usual" else "bold")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set_ylim(-0.6, len(drawn) - 0.4)
        # From the right edge to the left, where the labels leave room: the axes of long labels are narrow.
        axes.set_xlabel(axis, loc="right")
        return drawing.svg(title, description)


def mix_plot(found: FoundBreakEven, computed: BreakEven, label: str, words: Words, description: str) -> str | None:
    """Differences of mean TTFT over the share of returns, the line through them, and both break-even shares below.

    The line is drawn by its ends, which are Hodges-Lehmann estimates over the pairs. None without a point.
    """
    points = [point for point in found.points if math.isfinite(point.difference_seconds)]
    if not points:
        return None
    bounds = finite([value for point in points for value in (point.ci_low, point.ci_high)])
    factor, unit = time_scale(max(map(abs, bounds), default=0.0), words)
    with style():
        drawing = Drawing("mix", words, 3.2)
        axes = drawing.axes
        axes.axhline(0, color=QUIET, linewidth=1, zorder=0)
        if found.cost_seconds is not None and found.gain_seconds is not None:
            ends = [found.cost_seconds * factor, -found.gain_seconds * factor]
            axes.plot([0, 1], ends, color=ARMS[1], linewidth=1.4, zorder=1)
        for point in points:
            low, high = point.ci_low * factor, point.ci_high * factor
            marks = axes.plot([point.hit_share] * 2, [low, high], color=ARMS[1], linewidth=2.2)
            marks += axes.plot([point.hit_share], [point.difference_seconds * factor], "o", color=ARMS[1], markersize=7)
            drawing.tip(
                marks,
                f"{words.share(point.hit_share)}: {words.seconds(point.difference_seconds, signed=True)} "
                f"({words.seconds(point.ci_low, signed=True)} – {words.seconds(point.ci_high, signed=True)})",
            )
        # Both shares lie on rows of their own under the points, so that their intervals can be compared.
        low, high = axes.get_ylim()
        step = (high - low) * 0.13
        rows: list[tuple[str, BreakEven | FoundBreakEven, str]] = [
            (words("figure.found"), found, "D"),
            (words("figure.computed"), computed, "s"),
        ]
        for number, (name, even, marker) in enumerate(rows, start=1):
            height = low - number * step
            axes.annotate(name, (0.01, height), xycoords=("axes fraction", "data"), va="center", fontsize=9)
            if even.hit_share is None:
                axes.annotate(words("figure.none_inside"), (0.5, height), ha="center", va="center", fontsize=9)
                continue
            if even.ci_low is not None and even.ci_high is not None:
                axes.plot([even.ci_low, even.ci_high], [height] * 2, color=INK, linewidth=1.6)
            axes.plot([even.hit_share], [height], marker, color=INK, markersize=6)
        axes.set_ylim(low - 2.7 * step, high)
        axes.set_xlim(-0.34, 1.04)
        percent_axis(axes.xaxis, words)
        number_axis(axes.yaxis, words)
        axes.set_xlabel(words("axis.hit_share"))
        axes.set_ylabel(shown(f"{label}, {unit}"))
        return drawing.svg(words("figure.mix"), description)


def ecdf_plot(times: Mapping[str, Sequence[FirstTokens]], words: Words, description: str) -> str | None:
    """Share of requests whose first token came within a time, one line an arm. None if no request has a time.

    A request without a time (failed) counts in the share's denominator: its arm's line ends below 1.
    """
    arms = {arm: _put_together(runs) for arm, runs in times.items()}
    if not any(values for values, _ in arms.values()):
        return None
    longest = max(values[-1] for values, _ in arms.values() if values)
    factor, unit = time_scale(longest, words)
    with style():
        drawing = Drawing("ecdf", words)
        axes = drawing.axes
        for index, (arm, (values, came)) in enumerate(arms.items()):
            if not values:
                continue
            sent = sum(run.sent for run in times[arm])
            step = max(1, math.ceil(len(values) / ECDF_POINTS_MAX))
            ranks = sorted({*range(0, len(values), step), len(values) - 1})
            x = [values[rank] * factor for rank in ranks]
            y = [came[rank] / sent for rank in ranks]
            color, line = ARMS[index % len(ARMS)], LINES[index % len(LINES)]
            axes.step([x[0], *x, longest * factor * 1.04], [0, *y, y[-1]], where="post", color=color, linestyle=line,
                      linewidth=2, label=f"{shown(arm, 18)} ({words.whole(sent)})")  # fmt: skip
            for share in (0.5, 0.95):
                rank = bisect.bisect_left(came, max(1, math.ceil(share * sent)))
                if rank >= len(values):
                    # So many failed that this share of the requests never got a first token.
                    continue
                mark = axes.plot([values[rank] * factor], [came[rank] / sent], "o", color=color, markersize=6)
                drawing.tip(mark, f"{arm}, p{share * 100:.0f}: {words.seconds(values[rank])}")
        axes.set_xlim(0, longest * factor * 1.04)
        axes.set_ylim(0, 1.03)
        number_axis(axes.xaxis, words)
        percent_axis(axes.yaxis, words)
        axes.grid()
        axes.set_xlabel(f"{words('axis.ttft')}, {unit}")
        axes.set_ylabel(words("axis.share_of_requests"))
        legend_above(axes)
        return drawing.svg(words("figure.ecdf"), description)


def _put_together(runs: Sequence[FirstTokens]) -> tuple[list[float], list[int]]:
    """The times of all runs in ascending order, and how many requests had come by each."""
    points = sorted(point for run in runs for point in zip(run.seconds, run.requests, strict=True))
    return [seconds for seconds, _ in points], list(itertools.accumulate(requests for _, requests in points))
