"""The figure of fits over lengths: an SVG file of its own, on white, without a style sheet. Same input, same bytes."""

import io
import re
from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from kvtrial.analysis.lengths import NEVER, LengthFit
from kvtrial.analysis.report.drawing import ARMS, BAND, INK, LINES, QUIET, STYLE, WIDTH_INCHES, shown

ALONE = {
    INK: "#1b1f24", QUIET: "#59636e", BAND: "#d9dee5",
    ARMS[0]: "#0072b2", ARMS[1]: "#c04e00", ARMS[2]: "#007a5a", ARMS[3]: "#a0457f",
}  # fmt: skip
"""Colours of a figure that stands in a file of its own, on white: those of the page's light style sheet."""
MARKS = ("o", "s")
HEIGHT_INCHES = 3.8


def lengths_plot(fits: Sequence[LengthFit]) -> str:
    """A file of its own: TTFT over the prompt's length, a panel a fit, runs as marks, lines, and where they cross.

    The grey band is the interval in which neither arm is shown to be sooner, as far as it lies in the panel.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_INCHES * len(fits), HEIGHT_INCHES), layout="constrained")
        for axes, fit in zip(figure.subplots(1, len(fits), squeeze=False)[0], fits, strict=True):
            _lengths_panel(axes, fit)
        buffer = io.BytesIO()
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(buffer, format="svg", metadata=nothing)
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", buffer.getvalue().decode(), flags=re.DOTALL)
    for color, own in ALONE.items():
        text = text.replace(color, own)
    return text


def _lengths_panel(axes: Axes, fit: LengthFit) -> None:
    longest = fit.tokens[-1] * 1.06
    crossing = fit.by_lines
    if crossing.low < longest:
        axes.axvspan(crossing.low, min(crossing.high, longest), color=BAND, linewidth=0, zorder=0)
    if crossing.tokens not in (0.0, NEVER) and crossing.tokens < longest:
        axes.axvline(crossing.tokens, color=QUIET, linewidth=1, linestyle=":", zorder=1)
        axes.annotate(
            f" {crossing.tokens:,.0f} tokens", (crossing.tokens, 0.97), xycoords=("data", "axes fraction"), va="top"
        )
    for index, (found, runs) in enumerate(zip(fit.lines, (fit.against_seconds, fit.arm_seconds), strict=True)):
        for run in runs:
            axes.plot(fit.tokens, [seconds * 1000 for seconds in run], MARKS[index], color=ARMS[index], markersize=4,
                      alpha=0.7, zorder=2)  # fmt: skip
        start, slope = found.intercept_seconds.estimate, found.seconds_per_token.estimate
        ends = [(start + slope * tokens) * 1000 for tokens in (0.0, longest)]
        label = f"{shown(found.arm, 18)}: {start * 1000:.0f} ms + {slope * 1e6:.1f} µs a token"
        axes.plot([0.0, longest], ends, color=ARMS[index], linestyle=LINES[index], linewidth=2, label=label, zorder=3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(0, longest)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("time to first token, ms")
    axes.set_title(shown(fit.model), fontsize=11)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False, fontsize=9)
