"""The figure of a series over campaigns, with the points at which its level changed."""

import math

from matplotlib.ticker import FuncFormatter

from kvtrial.analysis.report.drawing import ARMS, BAD, INK, QUIET, Drawing, shown, style
from kvtrial.analysis.report.history import Series
from kvtrial.analysis.report.words import Words

POINTS_DRAWN_MAX = 400


def history_plot(name: str, series: Series, words: Words, text: str) -> str | None:
    """Effects over campaigns with intervals; a dashed line where the level changed, and the levels on both sides."""
    points = [
        point
        for point in series.points[-POINTS_DRAWN_MAX:]
        if point.effect is not None and math.isfinite(point.effect) and point.effect > 0
    ]
    if len(points) < 2:
        return None
    places = {point.campaign: index for index, point in enumerate(points)}
    with style():
        drawing = Drawing(name, words, 3.0)
        axes = drawing.axes
        axes.axhline(1.0, color=QUIET, linewidth=1, zorder=0)
        for index, point in enumerate(points):
            assert point.effect is not None
            marks = []
            if point.ci_low is not None and point.ci_high is not None and point.ci_low > 0:
                marks += axes.plot([index] * 2, [point.ci_low, point.ci_high], color=ARMS[1], linewidth=1.6)
            marks += axes.plot([index], [point.effect], "o", color=ARMS[1], markersize=5)
            drawing.tip(marks, f"{point.at}, {point.campaign}: {words.local(f'×{point.effect:.3g}')}, {point.verdict}")
        starts = [0, *(places[change.campaign] for change in series.changes if change.campaign in places), len(points)]
        for change in series.changes:
            if change.campaign not in places:
                continue
            at = places[change.campaign]
            before = max(start for start in starts if start < at) if at else 0
            after = min(start for start in starts if start > at)
            axes.axvline(at - 0.5, color=BAD, linestyle="--", linewidth=1.4)
            axes.plot([before, at - 0.5], [change.before] * 2, color=INK, linewidth=1.4, zorder=3)
            axes.plot([at - 0.5, after - 1], [change.after] * 2, color=INK, linewidth=1.4, zorder=3)
            axes.annotate(shown(change.at, 12), (at - 0.5, 1.0), xycoords=("data", "axes fraction"), xytext=(3, -2),
                          textcoords="offset points", va="top", fontsize=8.5, color=BAD)  # fmt: skip
        step = -(-len(points) // 5)
        axes.set_xticks(range(0, len(points), step), [shown(point.at, 11) for point in points[::step]], fontsize=8.5)
        axes.margins(y=0.15)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: words.local(f"×{value:.3g}")))
        axes.grid(axis="y")
        axes.set_ylabel(words("axis.effect_linear"))
        return drawing.svg(words("figure.history", host=series.host), text)
