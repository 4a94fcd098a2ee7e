"""The figure of a series over nights, with those on which its level changed."""

import math
from collections.abc import Sequence

from matplotlib.ticker import FuncFormatter

from kvtrial.analysis import answer
from kvtrial.analysis.history.model import ChangePoint, Series
from kvtrial.analysis.report.drawing import ARMS, BAD, INK, QUIET, Drawing, shown, style
from kvtrial.analysis.report.words import Words

POINTS_DRAWN_MAX = 400


def history_plot(
    name: str, series: Series, changes: Sequence[ChangePoint], words: Words, title: str, text: str
) -> str | None:
    """Levels over nights with intervals; a dashed line where the level changed, and the levels on both sides.

    None of fewer than two nights.
    """
    points = [point for point in series.points if math.isfinite(point.value)][-POINTS_DRAWN_MAX:]
    if len(points) < 2:
        return None
    places = {point.night: index for index, point in enumerate(points)}
    with style():
        drawing = Drawing(name, words, 3.0)
        axes = drawing.axes
        if series.kind == "effect":
            axes.axhline(1.0 if series.scale == "ratio" else 0.0, color=QUIET, linewidth=1, zorder=0)
        for index, point in enumerate(points):
            marks = []
            if point.low is not None and point.high is not None:
                marks += axes.plot([index] * 2, [point.low, point.high], color=ARMS[1], linewidth=1.6)
            marks += axes.plot([index], [point.value], "o", color=ARMS[1], markersize=5)
            drawing.tip(marks, f"{point.night}: {level_text(point.value, series, words)}")
        inside = sorted((places[change.night], change) for change in changes if change.night in places)
        starts = [0, *(at for at, _ in inside), len(points)]
        for number, (at, change) in enumerate(inside, start=1):
            axes.axvline(at - 0.5, color=BAD, linestyle="--", linewidth=1.4)
            axes.plot([starts[number - 1], at - 0.5], [change.from_value] * 2, color=INK, linewidth=1.4, zorder=3)
            axes.plot([at - 0.5, starts[number + 1] - 1], [change.to_value] * 2, color=INK, linewidth=1.4, zorder=3)
            axes.annotate(shown(change.night, 12), (at - 0.5, 1.0), xycoords=("data", "axes fraction"), xytext=(3, -2),
                          textcoords="offset points", va="top", fontsize=8.5, color=BAD)  # fmt: skip
        step = -(-len(points) // 5)
        axes.set_xticks(range(0, len(points), step), [shown(point.night, 11) for point in points[::step]], fontsize=8.5)
        axes.set_xlim(-0.6, len(points) - 0.4)
        axes.margins(y=0.15)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: level_text(value, series, words)))
        axes.grid(axis="y")
        axes.set_ylabel(words("axis.effect_linear") if series.kind == "effect" else words.short_metric(series.metric))
        return drawing.svg(title, text)


def level_text(value: float, series: Series, words: Words) -> str:
    """A level of a series: a ratio of an effect, else in the metric's unit."""
    if series.kind == "effect" and series.scale == "ratio":
        return words.local(f"×{answer.number_text(value)}")
    return words.local(answer.in_unit(value, series.unit, signed=series.kind == "effect"))
