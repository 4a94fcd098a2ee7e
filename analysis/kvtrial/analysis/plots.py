"""The report's figures as inline SVG.

matplotlib, because it draws all three without a browser and its SVG is plain markup that prints. Colours and text are
left to the page's style sheet (light, dark, print), so each figure is written with stand-in colours that are replaced
by CSS variables. The same input gives the same bytes.
"""

import html
import io
import math
import re
import statistics
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from msgspec import Struct

from kvtrial.record.verdict import BreakEven, FoundBreakEven

INK, QUIET, BAND = "#010203", "#040506", "#070809"
ARMS = ("#0a0b0c", "#0d0e0f", "#101112", "#131415")
CSS_OF = {INK: "currentColor", QUIET: "var(--quiet)", BAND: "var(--band)"} | {
    color: f"var(--arm{index})" for index, color in enumerate(ARMS)
}
LINES = ("-", "--", "-.", ":")
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "kvtrial",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "axes.formatter.use_mathtext": False,
    "font.family": "sans-serif",
    "font.size": 10.0,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": QUIET,
    "xtick.color": INK,
    "ytick.color": INK,
}
WIDTH_INCHES = 4.5
PAIRS_DRAWN_MAX = 500
ECDF_POINTS_MAX = 400
RATIO_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
LABEL_CHARACTERS_MAX = 46


class ForestRow(Struct, frozen=True):
    """A row of a forest plot: ratios with their interval and margin (0.05 is 5 %)."""

    label: str
    effect: float
    ci_low: float | None
    ci_high: float | None
    margin: float
    is_primary: bool


def _figure(height_inches: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
    figure.patch.set_visible(False)
    axes = figure.add_subplot()
    axes.patch.set_visible(False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _to_svg(figure: Figure, name: str, title: str, description: str) -> str:
    """The figure as an <svg> element for a page: ids prefixed by `name`, named for screen readers, no metadata."""
    buffer = io.BytesIO()
    nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
    figure.savefig(buffer, format="svg", metadata=nothing)
    text = buffer.getvalue().decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", text)
    for color, css in CSS_OF.items():
        text = text.replace(color, css)
    opening = re.match(r"<svg[^>]*>", text)
    view_box = re.search(r'viewBox="[^"]*"', opening.group(0)) if opening else None
    if opening is None or view_box is None:
        raise AssertionError("matplotlib wrote an SVG without a viewBox")
    head = (
        f'<svg {view_box.group(0)} xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'role="img" aria-labelledby="{name}-title {name}-description">'
        f'<title id="{name}-title">{html.escape(title)}</title>'
        f'<desc id="{name}-description">{html.escape(description)}</desc>'
    )
    return head + text[opening.end() :]


def shown(label: str, limit: int = LABEL_CHARACTERS_MAX) -> str:
    """A label as drawn: printable, and short enough for the figure."""
    clean = "".join(character if character.isprintable() else " " for character in label)
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def _time_scale(largest: float) -> tuple[float, str]:
    """(factor, unit name) for an axis of durations."""
    return (1000.0, "ms") if largest < 2 else (1.0, "s")


def _finite(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def paired_plot(
    pairs: Sequence[tuple[float, float]], against: str, arm: str, metric: str, *, is_time: bool, description: str
) -> str | None:
    """Each pair's two values joined by a line, `against` on the left. None if there is no pair to draw.

    Of more than PAIRS_DRAWN_MAX pairs that many are drawn, evenly by rank; the medians are those of all.

    `pairs`: (against, arm) per pair, seconds where `is_time`. The axis starts at zero, so lengths can be compared.
    """
    drawn = [pair for pair in pairs if all(math.isfinite(value) for value in pair)]
    if not drawn:
        return None
    factor, unit = _time_scale(max(max(pair) for pair in drawn)) if is_time else (1.0, "")
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure(2.9)
        medians = [statistics.median(pair[side] for pair in drawn) * factor for side in (0, 1)]
        step = len(drawn) / min(len(drawn), PAIRS_DRAWN_MAX)
        ranked = sorted(drawn)
        drawn = [ranked[int(rank * step)] for rank in range(min(len(drawn), PAIRS_DRAWN_MAX))]
        strength = 0.9 if len(drawn) <= 30 else max(0.15, 25 / len(drawn))
        for left, right in drawn:
            axes.plot([0, 1], [left * factor, right * factor], color=QUIET, linewidth=1.1, alpha=strength, zorder=1)
        marks = [(0, [pair[0] for pair in drawn], "o"), (1, [pair[1] for pair in drawn], "s")]
        for position, values, marker in marks:
            heights = [value * factor for value in values]
            axes.plot([position] * len(heights), heights, marker, color=ARMS[position], markersize=6.5, zorder=2)
            middle = medians[position]
            text = f"{middle:,.3g}{f' {unit}' if unit else ''}"
            side, shift = ("right", -10) if position == 0 else ("left", 10)
            axes.annotate(
                text,
                (position, middle),
                xytext=(shift, 0),
                textcoords="offset points",
                ha=side,
                va="center",
                fontweight="bold",
            )
        axes.set_xticks([0, 1], [shown(against, 18), shown(arm, 18)])
        axes.set_xlim(-0.45, 1.45)
        axes.set_ylim(bottom=min(0.0, min(min(pair) for pair in drawn) * factor))
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.set_ylabel(shown(f"{metric}{f', {unit}' if unit else ''}"))
        axes.tick_params(axis="x", length=0)
        return _to_svg(figure, "paired", f"Pairs: {against} and {arm}", description)


def forest_plot(rows: Sequence[ForestRow], description: str) -> str | None:
    """Effects (arm / against) with interval and the ±margin band on a log axis. None if there is nothing to draw."""
    drawn = [row for row in rows if math.isfinite(row.effect) and row.effect > 0]
    if not drawn:
        return None
    with matplotlib.rc_context(STYLE):
        roomy = min(6.6, 0.85 + 0.9 * len(drawn))
        figure, axes = _figure(max(roomy, 0.85 + 0.58 * len(drawn)))
        values: list[float] = [1 / (1 + max(row.margin for row in drawn)) / 1.1, 1.1]
        for position, row in enumerate(drawn):
            height = len(drawn) - 1 - position
            inside = [1 / (1 + row.margin), 1 + row.margin]
            axes.fill_between(inside, height - 0.55, height + 0.45, color=BAND, linewidth=0, zorder=0)
            bounds = [bound for bound in _finite([row.ci_low, row.ci_high]) if bound > 0]
            if len(bounds) == 2:
                axes.plot(bounds, [height - 0.1] * 2, color=ARMS[1], linewidth=2.2, solid_capstyle="butt", zorder=1)
            marker = "D" if row.is_primary else "o"
            axes.plot([row.effect], [height - 0.1], marker, color=ARMS[1], markersize=6.5, zorder=2)
            axes.annotate(
                shown(row.label),
                (0, height + 0.16),
                xycoords=("axes fraction", "data"),
                va="bottom",
                fontsize=9,
                fontweight="bold" if row.is_primary else "normal",
            )
            values += [row.effect, *bounds]
        axes.axvline(1.0, color=QUIET, linewidth=1, zorder=0)
        axes.set_xscale("log")
        low, high = min(values) / 1.08, max(values) * 1.08
        axes.set_xlim(low, high)
        ticks = [tick for tick in RATIO_TICKS if low <= tick <= high]
        if high / low < 2.2:
            ticks = [tick for tick in (0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.6) if low <= tick <= high]
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"x{value:g}"))
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_ylim(-0.6, len(drawn) - 0.3)
        axes.set_xlabel("arm / against (log scale)")
        return _to_svg(figure, "forest", "Effects with intervals", description)


def mix_plot(found: FoundBreakEven, computed: BreakEven, label: str, description: str) -> str | None:
    """Differences of mean TTFT over the share of returns, the line through them, and both break-even shares below.

    The line is drawn by its ends, which are Hodges-Lehmann estimates over the pairs. None without a point.
    """
    points = [point for point in found.points if math.isfinite(point.difference_seconds)]
    if not points:
        return None
    bounds = _finite([value for point in points for value in (point.ci_low, point.ci_high)])
    factor, unit = _time_scale(max(map(abs, bounds), default=0.0))
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure(3.2)
        axes.axhline(0, color=QUIET, linewidth=1, zorder=0)
        if found.cost_seconds is not None and found.gain_seconds is not None:
            ends = [found.cost_seconds * factor, -found.gain_seconds * factor]
            axes.plot([0, 100], ends, color=ARMS[1], linewidth=1.4, zorder=1)
        for point in points:
            share = point.hit_share * 100
            axes.plot([share] * 2, [point.ci_low * factor, point.ci_high * factor], color=ARMS[1], linewidth=2.2)
            axes.plot([share], [point.difference_seconds * factor], "o", color=ARMS[1], markersize=6.5, zorder=2)
        # Both shares lie on rows of their own under the points, so that their intervals can be compared.
        low, high = axes.get_ylim()
        step = (high - low) * 0.13
        rows: list[tuple[str, BreakEven | FoundBreakEven, str]] = [
            ("found", found, "D"),
            ("computed", computed, "s"),
        ]
        for number, (name, even, marker) in enumerate(rows, start=1):
            height = low - number * step
            axes.annotate(name, (0.01, height), xycoords=("axes fraction", "data"), va="center", fontsize=9)
            if even.hit_share is None:
                axes.annotate("none inside", (50, height), ha="center", va="center", fontsize=9)
                continue
            if even.ci_low is not None and even.ci_high is not None:
                axes.plot([even.ci_low * 100, even.ci_high * 100], [height] * 2, color=INK, linewidth=1.6)
            axes.plot([even.hit_share * 100], [height], marker, color=INK, markersize=6)
        axes.set_ylim(low - 2.7 * step, high)
        axes.set_xlim(-34, 104)
        axes.xaxis.set_major_locator(FixedLocator([0, 25, 50, 75, 100]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.set_xlabel("share of requests that return")
        axes.set_ylabel(shown(f"{label}, {unit}"))
        return _to_svg(figure, "mix", "The sweep of shares", description)


def ecdf_plot(times_seconds: dict[str, list[float | None]], description: str) -> str | None:
    """Share of requests whose first token came within a time, one line an arm. None if no request has a time.

    A request without a time (failed) counts in the share's denominator: its arm's line ends below 1.
    """
    arms = {arm: sorted(_finite(values)) for arm, values in times_seconds.items()}
    if not any(arms.values()):
        return None
    largest = max(values[-1] for values in arms.values() if values)
    factor, unit = _time_scale(largest)
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure(2.9)
        for index, (arm, values) in enumerate(arms.items()):
            if not values:
                continue
            sent = len(times_seconds[arm])
            step = max(1, math.ceil(len(values) / ECDF_POINTS_MAX))
            ranks = sorted({*range(0, len(values), step), len(values) - 1})
            x = [values[rank] * factor for rank in ranks]
            y = [(rank + 1) / sent for rank in ranks]
            line = LINES[index % len(LINES)]
            axes.step(
                [x[0], *x, largest * factor * 1.04],
                [0, *y, y[-1]],
                where="post",
                color=ARMS[index % len(ARMS)],
                linestyle=line,
                linewidth=2,
                label=f"{shown(arm, 18)} ({sent:,})",
            )
        axes.set_xlim(0, largest * factor * 1.04)
        axes.set_ylim(0, 1.03)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * 100:.0f} %"))
        axes.set_xlabel(f"time to first token, {unit}")
        axes.set_ylabel("share of requests")
        axes.legend(loc="best", frameon=False, title="arm (requests)", alignment="left")
        return _to_svg(figure, "ecdf", "Distribution of the time to first token", description)
