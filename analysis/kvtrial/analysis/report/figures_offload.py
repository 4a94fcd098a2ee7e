"""Figures of the offload section: regimes, sources of tokens, bytes moved, lengths, tier sizes, memory."""

import math
from collections.abc import Mapping, Sequence

from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from msgspec import Struct

from kvtrial.analysis.effect import Interval, hodges_lehmann, log_ratios
from kvtrial.analysis.lengths import NEVER, LengthFit
from kvtrial.analysis.report.drawing import (
    ARMS,
    BAND,
    INK,
    LINES,
    MARKERS,
    PAPER,
    QUIET,
    Drawing,
    arm_fill,
    byte_scale,
    finite,
    legend_above,
    number_axis,
    shown,
    style,
    time_scale,
)
from kvtrial.analysis.report.words import Words
from kvtrial.record.verdict import TierBudget

HATCHES = ("", "", "////")
SOURCE_COLORS = (QUIET, ARMS[0], ARMS[1])
PHASES_DRAWN_MAX = 14


class Span(Struct, frozen=True):
    """A value of an arm in a phase over runs: median, least and largest."""

    middle: float
    low: float
    high: float
    runs: int


class Stack(Struct, frozen=True):
    """Parts of a whole, a bar: where it stands, its label, and the parts in order."""

    group: str
    arm: str
    parts: Sequence[float]


def regimes_plot(regimes: Mapping[str, Mapping[str, Span]], arms: Sequence[str], words: Words, text: str) -> str | None:
    """Time to first token by regime, arms side by side; a line is the range. `regimes`: phase → arm → span."""
    spans = [span for by_arm in regimes.values() for span in by_arm.values()]
    if not spans:
        return None
    factor, unit = time_scale(max(span.high for span in spans), words)
    with style():
        drawing = Drawing("regimes-plot", words, 0.9 + 0.2 * len(regimes) * max(2, len(arms)))
        axes = drawing.axes
        height = 0.78 / max(1, len(arms))
        for index, arm in enumerate(arms):
            for row, (phase, by_arm) in enumerate(regimes.items()):
                span = by_arm.get(arm)
                if span is None:
                    continue
                y = len(regimes) - 1 - row + 0.39 - (index + 0.5) * height
                marks = axes.barh([y], [span.middle * factor], height * 0.9, **arm_fill(index))
                axes.plot([span.low * factor, span.high * factor], [y, y], color=INK, linewidth=1.2, zorder=3)
                drawing.tip(
                    marks,
                    f"{phase}, {arm}: {words.seconds(span.middle)} ({words.seconds(span.low)} – "
                    f"{words.seconds(span.high)}, {words.count(span.runs, 'run')})",
                )
            axes.barh([math.nan], [math.nan], **arm_fill(index), label=shown(arm, 18))
        axes.set_yticks([len(regimes) - 1 - row for row in range(len(regimes))], [shown(name, 22) for name in regimes])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(-0.5, len(regimes) - 0.5)
        axes.set_xlim(left=0)
        number_axis(axes.xaxis, words)
        axes.grid(axis="x")
        axes.set_xlabel(f"{words('axis.ttft')}, {unit}")
        legend_above(axes, 3)
        return drawing.svg(words("figure.regimes"), text)


def stacked_plot(
    name: str, stacks: Sequence[Stack], parts: Sequence[str], axis: str, words: Words, title: str, text: str
) -> str | None:
    """Bars of parts that add up to the whole, arms of a group one above the other."""
    drawn = [stack for stack in stacks if sum(finite(stack.parts)) > 0]
    if not drawn:
        return None
    with style():
        drawing = Drawing(name, words, 1.0 + 0.22 * len(drawn) + 0.06 * len({stack.group for stack in drawn}))
        axes = drawing.axes
        place, places = 0.0, []
        for index, stack in enumerate(drawn):
            if index and stack.group != drawn[index - 1].group:
                place -= 0.35
            places.append(place)
            left = 0.0
            for number, value in enumerate(stack.parts):
                size = value if math.isfinite(value) and value > 0 else 0.0
                bar = axes.barh([place], [size], 0.84, left=left, color=SOURCE_COLORS[number], hatch=HATCHES[number],
                                edgecolor=PAPER, linewidth=0.6)  # fmt: skip
                share = f" ({words.share(size / sum(finite(stack.parts)))})"
                if size > 0:
                    drawing.tip(bar, f"{stack.group}, {stack.arm}: {parts[number]} {words.whole(size)}{share}")
                left += size
            place -= 1.0
        for number, part in enumerate(parts):
            axes.barh([math.nan], [math.nan], color=SOURCE_COLORS[number], hatch=HATCHES[number], edgecolor=PAPER,
                      label=part)  # fmt: skip
        axes.set_yticks(places, [shown(f"{stack.group} · {stack.arm}", 34) for stack in drawn], fontsize=8.5)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(places[-1] - 0.6, 0.6)
        axes.set_xlim(left=0)
        number_axis(axes.xaxis, words, 5)
        axes.set_xlabel(axis)
        legend_above(axes, 3)
        return drawing.svg(title, text)


def moved_plot(moved: Mapping[str, tuple[float, float]], arm: str, words: Words, text: str) -> str | None:
    """Bytes stored (to the left) and loaded (to the right) by phase. `moved`: phase → (loaded, stored), mean a run."""
    kept = dict(list(moved.items())[:PHASES_DRAWN_MAX])
    most = max((max(pair) for pair in kept.values()), default=0.0)
    if most <= 0:
        return None
    factor, unit = byte_scale(most, words)
    with style():
        drawing = Drawing("moved", words, 0.9 + 0.28 * len(kept))
        axes = drawing.axes
        for row, (phase, (loaded, stored)) in enumerate(kept.items()):
            y = len(kept) - 1 - row
            drawing.tip(
                axes.barh([y], [loaded * factor], 0.7, color=ARMS[1], hatch="////", edgecolor=PAPER, linewidth=0.6),
                f"{phase}: {words('figure.loaded')} {words.bytes(loaded)}",
            )
            drawing.tip(
                axes.barh([y], [-stored * factor], 0.7, color=ARMS[2]),
                f"{phase}: {words('figure.stored')} {words.bytes(stored)}",
            )
        axes.barh([math.nan], [math.nan], color=ARMS[2], label=words("figure.stored"))
        axes.barh([math.nan], [math.nan], color=ARMS[1], hatch="////", edgecolor=PAPER, label=words("figure.loaded"))
        axes.axvline(0, color=QUIET, linewidth=1)
        axes.set_yticks([len(kept) - 1 - row for row in range(len(kept))], [shown(name, 24) for name in kept])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(-0.6, len(kept) - 0.4)
        number_axis(axes.xaxis, words)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: words.local(f"{abs(value):,.6g}")))
        axes.grid(axis="x")
        axes.set_xlabel(words("axis.moved", arm=shown(arm, 18), unit=unit))
        legend_above(axes)
        return drawing.svg(words("figure.moved"), text)


def length_effects(fit: LengthFit) -> list[Interval]:
    """The effect at each length with its interval on the log scale, over pairs, as the comparisons have it."""
    return [
        hodges_lehmann(log_ratios(arm, against))
        for arm, against in zip(zip(*fit.arm_seconds, strict=True), zip(*fit.against_seconds, strict=True), strict=True)
    ]


def lengths_plot(fits: Sequence[LengthFit], words: Words, text: str) -> str | None:
    """The ratio of both arms' times to first token over the prefix length, a line a model, with where it pays from."""
    if not fits:
        return None
    with style():
        drawing = Drawing("lengths", words, 3.2)
        axes = drawing.axes
        axes.axhline(1.0, color=QUIET, linewidth=1, zorder=0)
        values = [1.0]
        for index, fit in enumerate(fits[: len(ARMS)]):
            color = ARMS[index]
            effects = [
                (math.exp(found.estimate), math.exp(found.low), math.exp(found.high)) for found in length_effects(fit)
            ]
            values += [high for _, _, high in effects]
            axes.plot(fit.tokens, [middle for middle, _, _ in effects], linestyle=LINES[index % len(LINES)],
                      marker=MARKERS[index % len(MARKERS)], color=color, linewidth=2, markersize=6.5,
                      label=shown(f"{fit.model}, {fit.host}", 40))  # fmt: skip
            for tokens, (middle, low, high) in zip(fit.tokens, effects, strict=True):
                spread = axes.plot([tokens] * 2, [low, high], color=color, linewidth=1.4)
                said = words.local(f"×{middle:.3g} ({low:.3g} – {high:.3g})")
                drawing.tip(spread, f"{fit.model}, {words.whole(tokens)}: {said}")
            crossing = fit.by_interpolation.tokens
            low, high = (
                min(max(bound, fit.tokens[0]), fit.tokens[-1])
                for bound in (fit.by_interpolation.low, fit.by_interpolation.high)
            )
            if low < high:
                # Both models may cross in one place: their bars lie a little apart.
                axes.plot([low, high], [1.0 + 0.012 * index] * 2, color=color, linewidth=4, alpha=0.55, zorder=3,
                          solid_capstyle="butt")  # fmt: skip
            if 0 < crossing < NEVER and fit.tokens[0] <= crossing <= fit.tokens[-1]:
                mark = axes.plot([crossing], [1.0], "X", color=color, markersize=9, zorder=4)
                drawing.tip(mark, f"{fit.model}: {words('figure.pays_from', tokens=words.whole(crossing))}")
        axes.set_xscale("log", base=2)
        ticks = sorted({tokens for fit in fits for tokens in fit.tokens})
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: words.local(f"{value:,.0f}")))
        axes.set_ylim(0, max(1.15, max(values) * 1.08))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: words.local(f"×{value:g}")))
        axes.grid(axis="y")
        axes.set_xlabel(words("axis.prefix_tokens"))
        axes.set_ylabel(words("axis.ttft_ratio"))
        legend_above(axes, 1)
        return drawing.svg(words("figure.lengths"), text)


def tiers_plot(budget: TierBudget, margin: float, words: Words, text: str) -> str | None:
    """The effect of each tier size with its interval; the size that is enough is marked."""
    rows = [row for row in budget.tiers if row.effect is not None and math.isfinite(row.effect) and row.effect > 0]
    if not rows:
        return None
    factor, unit = byte_scale(max(row.tier_bytes for row in rows), words)
    with style():
        drawing = Drawing("tiers", words, 3.0)
        axes = drawing.axes
        axes.axhspan(1 / (1 + margin), 1 + margin, color=BAND, linewidth=0)
        axes.axhline(1.0, color=QUIET, linewidth=1)
        sizes = [row.tier_bytes * factor for row in rows]
        axes.plot(sizes, [row.effect or 0.0 for row in rows], color=ARMS[1], linewidth=1.4)
        for row, size in zip(rows, sizes, strict=True):
            assert row.effect is not None
            low, high = row.ci_low or row.effect, row.ci_high or row.effect
            enough = row.tier_bytes == budget.budget_bytes
            marks = axes.plot([size] * 2, [low, high], color=ARMS[1], linewidth=2.2)
            marks += axes.plot([size], [row.effect], "D" if enough else "o", color=INK if enough else ARMS[1],
                               markersize=8 if enough else 6.5, zorder=3)  # fmt: skip
            drawing.tip(
                marks,
                f"{row.arm}, {words.bytes(row.tier_bytes)}: "
                f"{words.local(f'×{row.effect:.3g} ({low:.3g} – {high:.3g})')}, {row.verdict}",
            )
            axes.annotate(shown(row.arm, 14), (size, high), xytext=(0, 9), textcoords="offset points", ha="center",
                          va="bottom", fontsize=9, fontweight="bold" if enough else "normal", zorder=5,
                          bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.5})  # fmt: skip
        axes.margins(x=0.14, y=0.2)
        number_axis(axes.xaxis, words)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: words.local(f"×{value:g}")))
        axes.grid(axis="y")
        axes.set_xlabel(f"{words('axis.tier')}, {unit}")
        axes.set_ylabel(words("axis.ttft_ratio"))
        return drawing.svg(words("figure.tiers"), text)


def memory_plot(memory: Mapping[str, Mapping[str, Span]], arms: Sequence[str], words: Words, text: str) -> str | None:
    """Peaks of memory by kind, arms side by side. `memory`: kind → arm → bytes over runs."""
    spans = [span for by_arm in memory.values() for span in by_arm.values()]
    if not spans or max(span.high for span in spans) <= 0:
        return None
    factor, unit = byte_scale(max(span.high for span in spans), words)
    with style():
        drawing = Drawing("memory", words, 0.9 + 0.22 * len(memory) * max(2, len(arms)))
        axes = drawing.axes
        height = 0.78 / max(1, len(arms))
        for index, arm in enumerate(arms):
            for row, (kind, by_arm) in enumerate(memory.items()):
                span = by_arm.get(arm)
                if span is not None:
                    y = len(memory) - 1 - row + 0.39 - (index + 0.5) * height
                    bar = axes.barh([y], [span.middle * factor], height * 0.9, **arm_fill(index))
                    drawing.tip(bar, f"{kind}, {arm}: {words.bytes(span.middle)} ({words.bytes(span.low)} – "
                                     f"{words.bytes(span.high)})")  # fmt: skip
            axes.barh([math.nan], [math.nan], **arm_fill(index), label=shown(arm, 18))
        axes.set_yticks([len(memory) - 1 - row for row in range(len(memory))], [shown(kind, 40) for kind in memory])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(-0.5, len(memory) - 0.5)
        axes.set_xlim(left=0)
        number_axis(axes.xaxis, words)
        axes.grid(axis="x")
        axes.set_xlabel(f"{words('axis.memory')}, {unit}")
        legend_above(axes, 3)
        return drawing.svg(words("figure.memory"), text)
