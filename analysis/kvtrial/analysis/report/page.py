"""The report as one HTML file and the brief as Markdown: sections put together, markup and style put in."""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from kvtrial.analysis import answer
from kvtrial.analysis.firsttokens import FirstTokens
from kvtrial.analysis.history.model import History
from kvtrial.analysis.lengths import LengthFit
from kvtrial.analysis.prices import Prices
from kvtrial.analysis.report import brief, comparisons, conditions, fleet, gates, offload, preemption, top
from kvtrial.analysis.report.said import said
from kvtrial.analysis.report.selection import choose, clipped, dropped_pairs
from kvtrial.analysis.report.words import Words, signs
from kvtrial.record.protocol import Protocol
from kvtrial.record.record import RunRecord
from kvtrial.record.verdict import Verdict

UNIT_SPACE = re.compile(r"(?<=\d) (?=(?:%|ms|s|B|[KMGT]iB|pairs?|runs?)\b|%)|(?<=\bp) (?=[=<.\d])|(?<=\bp =) (?=[.\d])")
"""The space between a number and its unit, or p and its value, where no line should break."""
LONG_HEADLINE = 160
SCRIPT_TEXTS = ("copy", "copied", "filter", "rows")


def build_report(
    verdict: Verdict,
    protocol: Protocol,
    records: list[RunRecord],
    campaign: dict[str, Any],
    summary_frame: pd.DataFrame | None,
    *,
    language: str = "en",
    history: History | None = None,
    fits: Sequence[LengthFit] = (),
    prices: Prices | None = None,
    commands: Mapping[str, str] | None = None,
    record_names: Mapping[tuple[str, str], str] | None = None,
    first_tokens: Mapping[tuple[str, str], FirstTokens] | None = None,
) -> str:
    """The report as HTML text: pure, the same input gives the same text.

    `records`: all runs, dropped and faulty ones too. `campaign`: what campaign.json holds. `history`: of earlier
    campaigns, if any. `fits`: from which prefix length on it pays, of this campaign and of others with other models.
    `prices`: what the user pays, for the brief. `commands`: what may be copied, by name (unpack, campaign, run,
    verdict, report). `record_names`: (host, run) → its record's file, where that is not record.json. `first_tokens`:
    (host, run) → the times of the deciding phase, of runs whose records are cut down.
    Everything that comes from a host, a log or a user is escaped. Missing parts (no run, one run, NaN) are laid out as
    "not measured".
    """
    words = Words(language)
    environment = _environment(words)
    chosen = choose(protocol, records, verdict)
    script = environment.get_template("report.js").render(
        words={name: words(f"script.{name}") for name in SCRIPT_TEXTS}
    )
    headline = top.headline(verdict, words)
    page = environment.get_template("page.html.j2").render(
        t=words,
        css=Markup(environment.get_template("report.css").render()),
        script=Markup(script),
        script_sha256=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        verdict=verdict,
        protocol=protocol,
        question=_question(protocol, words),
        question_is_quoted=words.is_quoted(protocol.question),
        mark=top.MARKS[verdict.verdict],
        headline=headline,
        headline_said=answer.headline(verdict) if words.is_english or top.headline_is_quoted(verdict) else "",
        headline_is_long=len(headline) > LONG_HEADLINE,
        evidence_name=words(f"evidence.{verdict.evidence or 'none'}"),
        evidence_limit=top.evidence_limit(verdict, words),
        merits=top.merits(verdict, words),
        answers=top.answers(verdict, words),
        next=top.next_step(verdict, words),
        next_said=answer.next_text(verdict) if top.next_is_the_tools(verdict, words) else "",
        started=min((record.times.started_at_utc for record in chosen.records), default=""),
        title=words.title(protocol.title),
        is_ladder=bool(protocol.ladder),
        arms=chosen.arms,
        arm_titles={arm: words.title(protocol.arms[arm].title) for arm in chosen.arms if arm in protocol.arms},
        counts=top.counts(verdict, words),
        gates=gates.gate_rows(verdict, words),
        faults=gates.fault_rows(chosen.records, words),
        faults_left_out=gates.faults_left_out(chosen.records, words),
        dropped=dropped_pairs(verdict, chosen.records),
        engine_faults=answer.engine_faults(verdict),
        comparisons=comparisons.groups(verdict.comparisons, words),
        offload=offload.section(verdict, protocol, chosen, fits, words, first_tokens),
        preemption=preemption.section(
            verdict.ladder, protocol.control, chosen, words, preemption.comparisons_of(verdict), len(verdict.hosts)
        ),
        fleet=fleet.section(verdict, chosen, history, words),
        conditions=conditions.section(verdict, chosen, campaign, commands or {}, words, record_names or {}),
        brief=brief.brief_of(verdict, protocol, chosen, words, prices, fits),
        summary_shape=None if summary_frame is None else summary_frame.shape,
    )
    return page.lstrip() + "\n"


def build_brief(
    verdict: Verdict,
    protocol: Protocol,
    records: list[RunRecord],
    *,
    language: str = "en",
    prices: Prices | None = None,
    fits: Sequence[LengthFit] = (),
) -> str:
    """brief.md: half a page of Markdown."""
    words = Words(language)
    made = brief.brief_of(verdict, protocol, choose(protocol, records, verdict), words, prices, fits)
    return brief.to_markdown(made, words("brief.from", campaign=verdict.campaign))


def _environment(words: Words) -> Environment:
    environment = Environment(
        loader=PackageLoader("kvtrial.analysis.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = lambda text: escape(text).replace("_", Markup("_<wbr>"))
    environment.filters["unbroken"] = lambda text: _unbroken(str(text))
    environment.filters["clip"] = lambda text: clipped(str(text))
    environment.filters["quoted"] = lambda text: _quoted(str(text), words)
    return environment


def _unbroken(text: str) -> str:
    return UNIT_SPACE.sub("\u00a0", signs(text))


def _quoted(text: str, words: Words) -> Markup:
    """Sentences of the analysis in the page's language; what stays English is marked so for screen readers."""
    lines = "\n".join(clipped(line) for line in text.splitlines())
    return Markup("").join(
        Markup('<span lang="en">{}</span>').format(_unbroken(part.text))
        if part.english
        else escape(_unbroken(part.text))
        for part in said(lines, words)
    )


def _question(protocol: Protocol, words: Words) -> str:
    question = words.title(protocol.question.strip())
    return question[:1].upper() + question[1:]
