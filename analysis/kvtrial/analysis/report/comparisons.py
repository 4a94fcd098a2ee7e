"""The table of comparisons, the figures of pairs and effects. Pure."""

import math
from collections.abc import Mapping, Sequence

from kvtrial.analysis import answer
from kvtrial.analysis.firsttokens import FirstTokens, first_tokens_of_runs
from kvtrial.analysis.metrics import find_metric
from kvtrial.analysis.report import figures
from kvtrial.analysis.report.said import said_text
from kvtrial.analysis.report.selection import Chosen, Plot, Row, drawn
from kvtrial.analysis.report.words import Words
from kvtrial.record.record import RunRecord
from kvtrial.record.verdict import ComparisonResult, Verdict

PREEMPTIONS = "preemptions per 1,000 requests"
LABEL_LINE_MAX = 36
LINE_BREAK = "\n"
ROLES = ("primary", "guard", "secondary")


def groups(comparisons: Sequence[ComparisonResult], words: Words) -> list[tuple[str, list[Row]]]:
    """A group of rows a role. A note is shown where it is first said."""
    found = []
    said: set[str] = set()
    for role in ROLES:
        rows = []
        for item in comparisons:
            if item.role == role:
                rows.append(_row(item, words, with_note=item.note not in said))
                said.add(item.note)
        if rows:
            found.append((words(f"role.{role}"), rows))
    return found


def _row(item: ComparisonResult, words: Words, *, with_note: bool) -> Row:
    against = f"{item.against}, {item.against_phase}" if item.against_phase else item.against
    delta = words.local(f"{item.delta_ttft_seconds:+.3f}") if answer.is_number(item.delta_ttft_seconds) else "–"
    within = answer.is_within_a_size(item)
    detectable = "–"
    if item.mde is not None and math.isfinite(item.mde):
        ratio = item.effect_scale == "ratio"
        detectable = f"x{answer.number_text(item.mde)}" if ratio else answer.in_unit(item.mde, answer.unit_of(item))
    confidence = f"\n{words.share(item.confidence)}" if answer.is_number(item.confidence) else ""
    p_value = words.local(f"p {answer.p_text(item.p_value)}") if answer.is_number(item.p_value) else words("no_p")
    cells = [
        item.verdict,
        words("word.within") if within else "",
        compact(answer.effect_text(item), words),
        f"{compact(answer.interval_text(item), words)}{confidence}",
        f"{p_value}\n{words.count(item.pairs, 'pair')}",
        delta,
        compact(f"{answer.margin_text(item)}\n{detectable}", words),
        words(f"quality.{item.quality}"),
    ]
    note = words("comparison.against", arm=item.arm, against=against)
    if item.note and with_note:
        note += f". {said_text(answer.sentence(item.note, (item.arm, item.against)), words)}"
    if within:
        note = f"{note.rstrip('.')}. {words('comparison.within', margin=words.local(answer.margin_text(item)))}"
    where = words("whole_run") if item.phase == "run" else item.phase
    moved = "moved" if item.moved else ""
    return Row(f"{where}: {words.metric(item.metric)}", cells, kind=moved or item.verdict, note=note)


def compact(text: str, words: Words) -> str:
    """A formatted value without the unit that its metric's name has already said."""
    return words.local(text.replace(f" {PREEMPTIONS}", ""))


def pairs_plot(verdict: Verdict, words: Words) -> Plot | None:
    """Each pair's two arms, joined."""
    primary = answer.primary_of(verdict.comparisons)
    if primary is None:
        return None
    named = [(host.host, answer.primary_of(host.comparisons)) for host in verdict.hosts]
    # A host that is INVALID has no effect: its pairs are shown only where that is so of all.
    counted = [(host, item) for host, item in named if item is not None and item.arm_values]
    sources = [found for found in counted if found[1].effect is not None] or counted or [("", primary)]
    pairs, names = [], []
    for host, item in sources:
        for number, pair in enumerate(zip(item.against_values, item.arm_values, strict=False), start=1):
            pairs.append(pair)
            names.append(f"{host}, {words('pair')} {number}" if host else f"{words('pair')} {number}")
    if not pairs:
        return None
    metric = words.metric(primary.metric)
    if words.is_english and answer.unit_of(primary) == PREEMPTIONS:
        metric = PREEMPTIONS
    caption = words(
        "caption.paired",
        metric=metric[0].upper() + metric[1:],
        phase=primary.phase,
        arm=primary.arm,
        fewer=sum(arm < against for against, arm in pairs),
        pairs=words.count(len(pairs), "of_pairs"),
    )
    if len(pairs) > figures.PAIRS_DRAWN_MAX:
        caption += " " + words("caption.drawn", count=figures.PAIRS_DRAWN_MAX)
    svg = figures.paired_plot(
        pairs,
        primary.against,
        primary.arm,
        metric,
        words,
        caption,
        is_time=answer.unit_of(primary) == "seconds",
        names=names,
    )
    return drawn(svg, words("figure.paired"), caption)


def effects_plot(comparisons: Sequence[ComparisonResult], words: Words) -> Plot | None:
    """Every comparison that is a ratio, with its interval and margin."""
    rows = []
    ratios = [item for item in comparisons if item.effect_scale == "ratio" and item.effect is not None]
    several = len({(item.arm, item.against) for item in ratios}) > 1
    opponents = len({item.against for item in ratios}) > 1
    phases = len({(item.phase, item.against_phase) for item in ratios}) > 1
    for item in ratios:
        assert item.effect is not None
        # What is the same in all rows is not said in each.
        other = f" – {item.against_phase}" if item.against_phase else ""
        arms = (f"{item.arm} / {item.against}" if opponents else item.arm) if several else ""
        where = f"{item.phase}{other}" if phases or not several else ""
        metric = words.short_metric(item.metric)
        if find_metric(item.metric).better == "higher":
            metric += f" {words('figure.more_is_better')}"
        place = ", ".join(filter(None, [arms, where]))
        label = f"{place}:{LINE_BREAK if len(place) + len(metric) > LABEL_LINE_MAX else ' '}{metric}"
        rows.append(
            figures.ForestRow(
                label, item.effect, item.ci_low, item.ci_high, item.margin,
                "deciding" if item.role == "primary" else "usual", word=item.verdict,
            )
        )  # fmt: skip
    caption = words("caption.effects")
    if left_out := sum(item.effect_scale != "ratio" for item in comparisons):
        caption += " " + words("caption.no_ratio", count=words.count(left_out, "comparison"))
    svg = figures.forest_plot("forest", rows, words("axis.effect"), words, words("figure.effects"), caption)
    return drawn(svg, words("figure.effects"), caption)


def ecdf_plot(
    verdict: Verdict, chosen: Chosen, words: Words, kept: Mapping[tuple[str, str], FirstTokens] | None = None
) -> Plot | None:
    """The times to first token of all requests of the deciding phase.

    `kept`: (host, run) → those of runs whose records do not list their requests any more.
    """
    primary = answer.primary_of(verdict.comparisons)
    phase = primary.phase if primary else "return"
    of_runs = {**(kept or {}), **first_tokens_of_runs([run for run in chosen.used if _lists(run, phase)], phase)}
    times = {
        arm: [of_runs[run.host, run.run] for run in chosen.used if run.arm == arm and (run.host, run.run) in of_runs]
        for arm in chosen.arms
    }
    caption = words("caption.ecdf", phase=phase)
    return drawn(figures.ecdf_plot(times, words, caption), words("figure.ecdf"), caption)


def _lists(run: RunRecord, phase: str) -> bool:
    return any(found.name == phase and found.requests for found in run.phases)


def mix_plot(verdict: Verdict, pays: str, words: Words) -> Plot | None:
    """The sweep of shares with both break-evens; None where there was none. `pays`: the break-even in a sentence."""
    even = verdict.break_even
    if even is None or even.found is None or not even.found.points:
        return None
    primary = answer.primary_of(verdict.comparisons)
    arms = f"{primary.arm} − {primary.against}" if primary else "arm − against"
    caption = words("caption.mix", arms=arms, pairs=words.count(even.found.pairs, "pair"))
    if pays:
        caption += f" {answer.sentence(pays)}"
    svg = figures.mix_plot(even.found, even, f"{arms}, {words('axis.mean_ttft')}", words, caption)
    return drawn(svg, words("figure.mix"), caption)
