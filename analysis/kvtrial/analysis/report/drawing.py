"""What all figures of the report share: an SVG that belongs to the page, with marks that answer when pointed at.

matplotlib draws them, because it needs no browser and no script and its SVG is plain markup that prints. Colours and
text are left to the page's style sheet (light, dark, print), so each figure is written with stand-in colours that are
replaced by CSS variables. A mark may carry its numbers: they stand in the SVG as its title, which a browser shows by
itself, and the page's script shows them at once, also under a finger. The same input gives the same bytes.
"""

import html
import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from kvtrial.analysis.report.words import Words

INK, QUIET, BAND = "#010203", "#040506", "#070809"
ARMS = ("#0a0b0c", "#0d0e0f", "#101112", "#131415", "#161718", "#191a1b")
BAD, GOOD = "#1c1d1e", "#1f2021"
PAPER = "#222324"
CSS_OF = {INK: "currentColor", QUIET: "var(--quiet)", BAND: "var(--band)", BAD: "var(--bad)", GOOD: "var(--good)",
          PAPER: "var(--paper)"} | {color: f"var(--arm{index})" for index, color in enumerate(ARMS)}  # fmt: skip
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))
MARKERS = ("o", "s", "D", "^", "v", "P")
ARM_HATCHES = ("", "////", "\\\\\\\\", "xxxx", "----", "||||")
"""Of bars, an arm each: in black and white, and to some eyes, colours alone look alike."""
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
    "axes.labelsize": 9.5,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "grid.color": BAND,
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.fontsize": 9.5,
    "legend.frameon": False,
}
WIDTH_INCHES = 4.7
LABEL_CHARACTERS_MAX = 46
TIPS_MAX = 1500
"""Marks of one figure that carry their numbers; more would make the page heavy, and no finger could part them."""
RATIO_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
QUARTER_TICKS = (0.64, 0.8, 1.0, 1.25, 1.6)
SPARSE_TICKS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
DECADES = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)
LEAST_TICK_STEP = 0.18
"""Of the axis: closer ticks' labels would touch."""
NEAR_ONE_TICKS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.6, 2.0)
FINE_TICKS = (0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15)


class Drawing:
    """A figure under construction: matplotlib's, and what its marks say when pointed at."""

    def __init__(self, name: str, words: Words, height_inches: float = 2.9, *, panels: int = 1) -> None:
        """`name` prefixes the ids, which must be unique on the page; `panels` share the horizontal axis."""
        self.name, self.words = name, words
        self.tips: dict[str, str] = {}
        self.figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
        self.figure.patch.set_visible(False)
        self.panels: list[Axes] = list(self.figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0])
        for axes in self.panels:
            axes.patch.set_visible(False)
            axes.spines[["top", "right"]].set_visible(False)

    @property
    def axes(self) -> Axes:
        """The only, or the first panel."""
        return self.panels[0]

    def tip(self, artists: Artist | Iterable[Artist], text: str) -> None:
        """Let a mark say `text`. Of very many marks only the first carry theirs."""
        for artist in [artists] if isinstance(artists, Artist) else artists:
            if len(self.tips) < TIPS_MAX:
                identity = f"mark{len(self.tips)}"
                artist.set_gid(identity)
                self.tips[identity] = text

    def svg(self, title: str, description: str) -> str:
        """The figure as an <svg> element for the page: named for screen readers, without metadata."""
        buffer = io.BytesIO()
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        self.figure.savefig(buffer, format="svg", metadata=nothing)
        text = buffer.getvalue().decode()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        text = re.sub(r'<g id="(mark\d+)">', self._mark, text)
        text = re.sub(r'(?<!-)\bid="', f'id="{self.name}-', text)
        text = re.sub(r'(href="#|url\(#)', rf"\g<1>{self.name}-", text)
        # Groups need no ids; what is used by others (clip paths, markers) keeps its own.
        text = re.sub(r'<g id="[^"]*">', "<g>", text)
        for color, css in CSS_OF.items():
            text = text.replace(color, css)
        opening = re.match(r"<svg[^>]*>", text)
        view_box = re.search(r'viewBox="[^"]*"', opening.group(0)) if opening else None
        if opening is None or view_box is None:
            raise AssertionError("matplotlib wrote an SVG without a viewBox")
        head = (
            f'<svg {view_box.group(0)} xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'role="img" aria-labelledby="{self.name}-title {self.name}-description">'
            f'<title id="{self.name}-title">{html.escape(title)}</title>'
            f'<desc id="{self.name}-description">{html.escape(description)}</desc>'
        )
        return head + text[opening.end() :]

    def _mark(self, found: re.Match[str]) -> str:
        tip = self.tips.get(found[1])
        return found[0] if tip is None else f'<g class="mark"><title>{html.escape(shown(tip, 300))}</title>'


def arm_fill(index: int) -> dict[str, Any]:
    """How the bars of an arm are filled; of more arms than colours the hatch tells the later ones from the first."""
    return {
        "color": ARMS[index % len(ARMS)],
        "hatch": ARM_HATCHES[(index + index // len(ARMS)) % len(ARM_HATCHES)],
        "edgecolor": PAPER,
        "linewidth": 0.6,
    }


def style() -> Any:
    """matplotlib's settings for the report's figures, as a context."""
    return matplotlib.rc_context(STYLE)


def shown(label: str, limit: int = LABEL_CHARACTERS_MAX) -> str:
    """A label as drawn: printable, and short enough for the figure."""
    clean = "".join(character if character.isprintable() else " " for character in label)
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def apart(labels: Sequence[str], limit: int = LABEL_CHARACTERS_MAX) -> list[str]:
    """Labels short enough, and still different: what long ones end with in common goes, then their middle."""
    clean = [shown(label, 10_000) for label in labels]
    long = [label for label in clean if len(label) > limit]
    # Only whole parts of a name go, as a domain that all hosts share.
    ends = [label[at:] for label in long[:1] for at, letter in enumerate(label) if letter == "."]
    end = next((end for end in ends if len(long) > 1 and all(label.endswith(end) for label in long)), "")
    if end:
        clean = [f"{label.removesuffix(end)}…" if label in long else label for label in clean]
    half = (limit - 1) // 2
    return [label if len(label) <= limit else f"{label[: limit - 1 - half]}…{label[-half:]}" for label in clean]


def time_scale(largest: float, words: Words) -> tuple[float, str]:
    """(factor, unit name) for an axis of durations."""
    if largest < 0.002:
        return 1e6, words("unit.us")
    return (1000.0, words("unit.ms")) if largest < 2 else (1.0, words("unit.s"))


def byte_scale(largest: float, words: Words) -> tuple[float, str]:
    """(factor, unit name) for an axis of sizes."""
    for power, unit in ((3, "unit.gib"), (2, "unit.mib"), (1, "unit.kib")):
        if largest >= 1024**power:
            return 1 / 1024**power, words(unit)
    return 1.0, words("unit.b")


def finite(values: Iterable[float | None]) -> list[float]:
    """The values that were measured."""
    return [value for value in values if value is not None and math.isfinite(value)]


def ratio_axis(axes: Axes, low: float, high: float, words: Words) -> None:
    """A logarithmic horizontal axis of ratios from `low` to `high`, labelled x0.5, x1, x2."""
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    ticks = _round_ends(low, high)
    for choice in (FINE_TICKS, NEAR_ONE_TICKS, RATIO_TICKS, QUARTER_TICKS, SPARSE_TICKS, DECADES):
        inside = [tick for tick in choice if low <= tick <= high]
        steps = [math.log(after / before) for before, after in pairwise(inside)]
        covered = sum(steps) >= 0.4 * math.log(high / low)
        if len(inside) >= 2 and covered and min(steps) >= LEAST_TICK_STEP * math.log(high / low):
            ticks = inside
            break
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: words.local(f"×{value:g}")))


def _round_ends(low: float, high: float) -> list[float]:
    """The ends of an axis, rounded inwards to as few digits as leave two ticks, and 1 where it lies between."""
    for digits in range(2, 16):
        ends = [_rounded(low, digits, math.ceil), _rounded(high, digits, math.floor)]
        if low < 1 < high:
            apart = LEAST_TICK_STEP * math.log(high / low)
            ends = sorted({1.0, *(tick for tick in ends if abs(math.log(tick)) >= apart)})
        if len(ends) > 1 and low <= ends[0] < ends[-1] <= high:
            return ends
    return [low, high]


def _rounded(value: float, digits: int, way: Callable[[float], int]) -> float:
    """A positive value rounded up or down to so many digits that count."""
    step = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    return float(f"{way(value / step) * step:.{digits}g}")


def number_axis(axis: Any, words: Words, most: int = 6, *, whole: bool = False) -> None:
    """Round ticks with digits grouped as the language does."""
    axis.set_major_locator(MaxNLocator(most, integer=whole))
    axis.set_major_formatter(FuncFormatter(lambda value, _: words.local(f"{value:,.10g}")))


def percent_axis(axis: Any, words: Words, ticks: Sequence[float] = (0, 0.25, 0.5, 0.75, 1)) -> None:
    """Shares 0..1 in percent."""
    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: words.local(f"{value * 100:.0f} %")))


def level_axis(axes: Axes, levels: Sequence[int], words: Words) -> None:
    """Levels of a ladder side by side at equal distances, named at the last panel; of many every second or third."""
    step = -(-len(levels) // 12)
    axes.set_xticks(list(range(0, len(levels), step)), [words.local(f"{level:,}") for level in levels[::step]])
    axes.set_xlim(-0.5, len(levels) - 0.5)


def heading(axes: Axes, text: str) -> None:
    """What the vertical axis measures, above it: a text that stands upright has room at any length."""
    axes.set_title(shown(text, 70), fontsize=9.5, loc="left", pad=5)


def legend_above(axes: Axes, columns: int = 3) -> None:
    """A legend above the axes from the figure's left edge on, where it covers no mark and is not cut."""
    handles, labels = axes.get_legend_handles_labels()
    longest = max(map(len, labels), default=0)
    columns = min(columns, 1 if longest > 26 else 2 if longest > 13 else 3)
    axes.figure.legend(handles, labels, loc="outside upper left", ncols=columns, handlelength=1.8, columnspacing=1.2)
