"""The section on offloading: regimes, where prompt tokens came from, bytes, lengths, tier sizes, memory. Pure."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from kvtrial.analysis import answer
from kvtrial.analysis.firsttokens import FirstTokens
from kvtrial.analysis.lengths import NEVER, Crossing, LengthFit
from kvtrial.analysis.report import comparisons, top
from kvtrial.analysis.report import figures_offload as figures
from kvtrial.analysis.report.drawing import ARMS
from kvtrial.analysis.report.figures_offload import Span, Stack
from kvtrial.analysis.report.selection import (
    HOSTS_SHOWN_MAX,
    Chosen,
    Plot,
    Row,
    Table,
    clipped,
    drawn,
    finite,
    mean,
    middle,
    phase_names,
    phases_of,
    rise,
)
from kvtrial.analysis.report.words import Words
from kvtrial.record.protocol import Protocol
from kvtrial.record.record import PhaseRecord, RunRecord, Samples
from kvtrial.record.verdict import TierBudget, Verdict

REGIMES = ("return", "noload_return", "gpu_hit", "fits_return", "miss")
SOURCES = ("prompt_tokens_computed", "prompt_tokens_local_hit", "prompt_tokens_external")
MEMORY = ("ram_used_peak_bytes", "engine_rss_peak_bytes", "shared_memory_peak_bytes", "vram_used_peak_bytes")
MARGIN = 0.05
STACKS_DRAWN_MAX = 26
LEFT_OUT_NAMED_MAX = 8


class SourceRow(Struct, frozen=True):
    """Where the prompt tokens of a phase came from, mean a run. Shares are of `total`, 0..1."""

    phase: str
    arm: str
    computed: str
    local: str
    tier: str
    total: str
    shares: list[float]
    load_bytes: str
    store_bytes: str


class Section(Struct, frozen=True):
    """All of the section."""

    plots: list[Plot]
    regimes: list[Row]
    sources: list[SourceRow]
    memory: Table | None
    lengths: Table | None
    tiers: Table | None
    advice: str
    left_out: str


def section(
    verdict: Verdict,
    protocol: Protocol,
    chosen: Chosen,
    fits: Sequence[LengthFit],
    words: Words,
    first_tokens: Mapping[tuple[str, str], FirstTokens] | None = None,
) -> Section:
    """The section; what was not measured is empty. `first_tokens`: see build_report."""
    sources = _sources(chosen)
    plots = [
        comparisons.pairs_plot(verdict, words),
        comparisons.effects_plot(verdict.comparisons, words),
        _regimes_plot(protocol, chosen, words),
        _sources_plot(sources, words),
        _moved_plot(sources, words),
        comparisons.ecdf_plot(verdict, chosen, words, first_tokens),
        comparisons.mix_plot(verdict, _pays(verdict, words), words),
        _lengths_plot(fits, words),
        _tiers_plot(verdict, words),
        _memory_plot(chosen, words),
    ]
    return Section(
        plots=[plot for plot in plots if plot is not None],
        regimes=regime_rows(protocol, chosen, words),
        sources=[_source_row(source, words) for source in sources],
        memory=_memory_table(chosen, words),
        lengths=_lengths_table(fits, words),
        tiers=_tiers_table(verdict.tier_budget, words),
        advice=verdict.tier_budget.advice if verdict.tier_budget else "",
        left_out=_left_out(chosen, words),
    )


def _left_out(chosen: Chosen, words: Words) -> str:
    """Which records no figure and no table of sums holds; "" where it is all of them."""
    said = []
    if chosen.invalid:
        named = ", ".join(chosen.invalid[:LEFT_OUT_NAMED_MAX])
        more = " …" if len(chosen.invalid) > LEFT_OUT_NAMED_MAX else ""
        hosts = words.count(len(chosen.invalid), "host")
        said.append(words("measured.without_hosts", hosts=hosts, names=clipped(named) + more))
    if chosen.runs_left:
        said.append(words("measured.without_runs", runs=words.count(chosen.runs_left, "run")))
    return " ".join(said)


# ----------------------------------------------------------------------------------------------------------- regimes


def _pays(verdict: Verdict, words: Words) -> str:
    """The break-even in a sentence."""
    if not words.is_english:
        return top.break_even(verdict, words)
    return answer.break_even_text(verdict.break_even, verdict.verdict) or ""


def _is_mix(phase: str) -> bool:
    return answer.MIX.fullmatch(phase) is not None or phase in answer.MIX_SUBJECTS


def _regime_names(protocol: Protocol, chosen: Chosen) -> list[str]:
    """Regimes, mixes first; of protocols without either, the phases that are compared."""
    measured = phase_names(chosen.used)
    declared = {phase.name for phase in protocol.phases} | set(measured)
    lengths = [name for name in measured if name.startswith(("return_", "gpu_hit_")) or name.endswith("_together")]
    names = [*sorted(filter(_is_mix, measured)), *(name for name in REGIMES if name in declared), *lengths]
    return list(dict.fromkeys(names)) or list(
        dict.fromkeys(item.phase for item in protocol.comparisons if item.phase in declared)
    )


def _ttft(phase: PhaseRecord) -> float | None:
    """A mix holds returns and misses, so its mean is taken: a median would be one or the other."""
    return phase.ttft_mean_seconds if _is_mix(phase.name) else phase.ttft_median_seconds


def regime_rows(protocol: Protocol, chosen: Chosen, words: Words) -> list[Row]:
    """Median over runs of the run's median TTFT, per regime and arm, with the range over runs; last the arms' ratio."""
    rows = []
    for name in _regime_names(protocol, chosen):
        cells, middles = [], []
        for arm in chosen.arms:
            values = finite(_ttft(phase) for phase in phases_of(chosen.used, arm, name))
            center = middle(values)
            middles.append(center)
            if center is None:
                cells.append(words("not_measured"))
                continue
            spread = words("spread", low=words.seconds(min(values)), high=words.seconds(max(values)))
            cells.append(f"{words.seconds(center)}\n{spread}, {words.count(len(values), 'run')}")
        for other in middles[1:]:
            first = middles[0]
            cells.append(words.local(f"x{answer.number_text(other / first)}") if first and other is not None else "–")
        note = words("regime.mix") if _is_mix(name) else words.or_else(f"regime.{name}", _asked_for(name, words))
        rows.append(Row(name, cells, note=note))
    return rows


def _asked_for(phase: str, words: Words) -> str:
    """What a phase asks for where its name says so; else nothing."""
    found = words.subject(phase)
    return "" if found == words("subject.other", phase=phase) else words("regime.asks", subject=found)


def _regimes_plot(protocol: Protocol, chosen: Chosen, words: Words) -> Plot | None:
    regimes: dict[str, dict[str, Span]] = {}
    for name in _regime_names(protocol, chosen):
        for arm in chosen.arms:
            values = finite(_ttft(phase) for phase in phases_of(chosen.used, arm, name))
            if values:
                regimes.setdefault(name, {})[arm] = _span(values)
    caption = words("caption.regimes")
    if "noload_return" in regimes:
        caption += " " + words("caption.noload")
    return drawn(figures.regimes_plot(regimes, chosen.arms, words, caption), words("figure.regimes"), caption)


def _span(values: Sequence[float]) -> Span:
    center = middle(values)
    assert center is not None
    return Span(center, min(values), max(values), len(values))


# ----------------------------------------------------------------------------------------------------------- sources


class Source(Struct, frozen=True):
    """Prompt tokens of a phase and arm by source, and bytes moved; means over runs, None where not counted."""

    phase: str
    arm: str
    tokens: list[float | None]
    load_bytes: float | None
    store_bytes: float | None


def _sources(chosen: Chosen) -> list[Source]:
    found = []
    by_arm: dict[tuple[str, str], list[PhaseRecord]] = {}
    for record in chosen.used:
        for phase in record.phases:
            by_arm.setdefault((record.arm, phase.name), []).append(phase)
    for name in phase_names(chosen.used):
        for arm in chosen.arms:
            phases = by_arm.get((arm, name), [])
            tokens = [mean(rise(phase, role) for phase in phases) for role in SOURCES]
            if any(value is not None for value in tokens):
                load, store = (mean(rise(phase, role) for phase in phases) for role in ("load_bytes", "store_bytes"))
                found.append(Source(name, arm, tokens, load, store))
    return found


def _source_row(source: Source, words: Words) -> SourceRow:
    known = [value or 0.0 for value in source.tokens]
    total = sum(known)
    shares = [max(0.0, value) / total if total > 0 else 0.0 for value in known]
    computed, local, tier = map(words.whole, source.tokens)
    load, store = ("–" if value is None else words.bytes(value) for value in (source.load_bytes, source.store_bytes))
    return SourceRow(source.phase, source.arm, computed, local, tier, words.whole(total), shares, load, store)


def _sources_plot(sources: Sequence[Source], words: Words) -> Plot | None:
    """The phases in which something was given back, and the regimes beside them; the table has them all."""
    given = {source.phase for source in sources if any(value for value in source.tokens[1:])}
    kept = [
        source
        for source in sources
        if source.phase in (*REGIMES, "populate") or (source.phase in given and not source.phase.startswith("warmup"))
    ]
    left_out = list(dict.fromkeys(source.phase for source in kept[STACKS_DRAWN_MAX:]))
    kept = [source for source in kept if source.phase not in left_out]
    stacks = [Stack(source.phase, source.arm, [value or 0.0 for value in source.tokens]) for source in kept]
    names = [words(f"source.{name}") for name in ("computed", "local", "tier")]
    caption = words("caption.sources") + _phases_not_drawn(left_out, words)
    svg = figures.stacked_plot(
        "sources-plot", stacks, names, words("axis.prompt_tokens"), words, words("figure.sources"), caption
    )
    return drawn(svg, words("figure.sources"), caption)


def _moved_plot(sources: Sequence[Source], words: Words) -> Plot | None:
    """Bytes stored and loaded by phase, of the arm that moved most."""
    by_arm: dict[str, dict[str, tuple[float, float]]] = {}
    for source in sources:
        pair = (source.load_bytes or 0.0, source.store_bytes or 0.0)
        if any(pair):
            by_arm.setdefault(source.arm, {})[source.phase] = pair
    if not by_arm:
        return None
    arm, moved = max(by_arm.items(), key=lambda item: sum(map(sum, item[1].values())))
    caption = words("caption.moved", arm=arm)
    if others := [name for name in by_arm if name != arm]:
        caption += " " + words("caption.moved_others", arms=", ".join(others))
    told = list(moved)
    if len(told) > figures.PHASES_DRAWN_MAX:
        # What fills the caches has the least to tell.
        told = [phase for phase in told if not phase.startswith(("warmup", "pressure"))][: figures.PHASES_DRAWN_MAX]
    caption += _phases_not_drawn([phase for phase in moved if phase not in told], words)
    kept = {phase: pair for phase, pair in moved.items() if phase in told}
    return drawn(figures.moved_plot(kept, arm, words, caption), words("figure.moved"), caption)


def _phases_not_drawn(phases: Sequence[str], words: Words) -> str:
    """What a caption adds where phases have no room in a figure."""
    return f" {words('caption.phases_not_drawn', phases=', '.join(phases))}" if phases else ""


# ------------------------------------------------------------------------------------------------- lengths and sizes


def _lengths_plot(fits: Sequence[LengthFit], words: Words) -> Plot | None:
    caption = words("caption.lengths")
    kept = _some_fits(fits, len(ARMS))
    if len(kept) < len(fits):
        caption += " " + words("caption.lengths_drawn", count=len(kept), all=words.whole(len(fits)))
    return drawn(figures.lengths_plot(kept, words, caption), words("figure.lengths"), caption)


def _some_fits(fits: Sequence[LengthFit], most: int) -> list[LengthFit]:
    """So many fits; where there are more, the first of every campaign and model before their other hosts."""
    if len(fits) <= most:
        return list(fits)
    first = {(fit.campaign, fit.model): fit for fit in reversed(fits)}
    return sorted(fits, key=lambda fit: fit is not first[fit.campaign, fit.model])[:most]


def _lengths_table(fits: Sequence[LengthFit], words: Words) -> Table | None:
    """From which prefix length on it pays, a row a model and host."""
    rows = [
        Row(
            fit.model or fit.host,
            [
                fit.host,
                "; ".join(words.whole(tokens) for tokens in fit.tokens),
                pays_from(fit.by_lines, fit, words),
                pays_from(fit.by_interpolation, fit, words),
                words.count(len(fit.arm_seconds), "pair"),
            ],
            note=fit.campaign,
        )
        for fit in _some_fits(fits, HOSTS_SHOWN_MAX)
    ]
    if len(fits) > len(rows):
        rows.append(Row(words("gates.more_hosts", count=words.whole(len(fits) - len(rows))), [""] * 5))
    heads = [words(f"lengths.{name}") for name in ("model", "host", "tokens", "by_lines", "between", "pairs")]
    return Table(heads, rows, title=words("figure.lengths")) if rows else None


def pays_from(found: Crossing, fit: LengthFit, words: Words) -> str:
    """From which length on it pays, and below it the interval of that length."""
    said = from_length(found.tokens, fit, words)
    bounds = [_length(bound, fit, words) for bound in (found.low, found.high)]
    return f"{said}\n" + words("merit.interval", confidence=words.share(found.confidence),
                               interval=words("spread", low=bounds[0], high=bounds[1]))  # fmt: skip


def from_length(tokens: float, fit: LengthFit, words: Words) -> str:
    """ "from 6,504 tokens on", "at every measured length"."""
    if tokens == NEVER:
        return words("lengths.never")
    if tokens == 0:
        return words("lengths.always")
    said = words.length(tokens, "of_tokens")
    if fit.tokens[0] <= tokens <= fit.tokens[-1]:
        return words("lengths.from", tokens=said)
    return words("lengths.from_outside", tokens=said, outside=words("lengths.outside"))


def _length(tokens: float, fit: LengthFit, words: Words) -> str:
    """A length in tokens; what lies outside the measured lengths is said to."""
    if tokens == NEVER:
        return words("lengths.no_length")
    if tokens == 0:
        return words("lengths.under", tokens=words.whole(fit.tokens[0]))
    said = words.whole(tokens)
    return said if fit.tokens[0] <= tokens <= fit.tokens[-1] else f"{said} ({words('lengths.outside')})"


def _tiers_plot(verdict: Verdict, words: Words) -> Plot | None:
    if verdict.tier_budget is None:
        return None
    primary = answer.primary_of(verdict.comparisons)
    margin = primary.margin if primary is not None and primary.effect_scale == "ratio" else MARGIN
    caption = words("caption.tiers")
    svg = figures.tiers_plot(verdict.tier_budget, margin, words, caption)
    return drawn(svg, words("figure.tiers"), caption)


def _tiers_table(budget: TierBudget | None, words: Words) -> Table | None:
    if budget is None:
        return None
    rows = [
        Row(
            row.arm,
            [
                words.bytes(row.tier_bytes),
                words.local(f"×{row.times_gpu_kv:.3g}"),
                words.bytes(row.loaded_bytes_per_run),
                words.local(f"×{row.effect:.3g}") if answer.is_number(row.effect) else words("not_measured"),
                words.local(f"{row.ci_low:.3g} – {row.ci_high:.3g}") if answer.is_number(row.ci_low) else "–",
                row.verdict,
            ],
            kind=row.verdict,
        )
        for row in budget.tiers
    ]
    heads = [words(f"tiers.{name}") for name in ("arm", "size", "times", "loaded", "effect", "interval", "verdict")]
    return Table(heads, rows, title=words("figure.tiers"))


# ------------------------------------------------------------------------------------------------------------ memory


def _peaks(records: Sequence[RunRecord], arm: str, kind: str) -> list[float]:
    samples: list[Samples] = [record.samples for record in records if record.arm == arm and record.samples is not None]
    return finite(getattr(sample, kind) for sample in samples)


def _memory_plot(chosen: Chosen, words: Words) -> Plot | None:
    memory: dict[str, dict[str, Span]] = {}
    for kind in MEMORY:
        for arm in chosen.arms:
            values = _peaks(chosen.used, arm, kind)
            if values and max(values) > 0:
                memory.setdefault(words(f"memory.{kind}"), {})[arm] = _span(values)
    caption = words("caption.memory")
    return drawn(figures.memory_plot(memory, chosen.arms, words, caption), words("figure.memory"), caption)


def _memory_table(chosen: Chosen, words: Words) -> Table | None:
    rows = []
    for kind in MEMORY:
        cells = []
        for arm in chosen.arms:
            values = _peaks(chosen.used, arm, kind)
            cells.append(
                f"{words.bytes(middle(values))}\n{words.bytes(min(values))} – {words.bytes(max(values))}"
                if values
                else words("not_measured")
            )
        rows.append(Row(words(f"memory.{kind}"), cells))
    return Table([words("memory.kind"), *chosen.arms], rows, title=words("figure.memory")) if chosen.used else None
