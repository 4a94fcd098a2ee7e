"""The brief: half a page for the owner of the GPUs and a partner in finance, as a section and as brief.md. Pure."""

from collections.abc import Sequence

from msgspec import Struct

from kvtrial.analysis import answer
from kvtrial.analysis.report import top
from kvtrial.analysis.report.selection import Chosen, Row, Table, clipped
from kvtrial.analysis.report.words import Words
from kvtrial.record.ladder import ArmLadder, LadderResult, Level
from kvtrial.record.verdict import Verdict

MEMORY_UNITS = ("GiB of KV cache", "GiB of RAM")
CONTEXT_UNITS = ("token of answer", "token of prompt")
REPLICA_UNITS = ("replica", "GPU")
MARKDOWN_SPECIAL = "\\`*_[]<>|#"


class Brief(Struct, frozen=True):
    """The brief: its answer, (label, sentence) pairs, the ways to more capacity, and what was not measured."""

    title: str
    answer: str
    points: list[tuple[str, str]]
    ways: Table | None
    ways_note: str
    unmeasured_title: str
    unmeasured: list[str]


def brief_of(verdict: Verdict, control: str, chosen: Chosen, words: Words) -> Brief:
    """The brief of a campaign; it says what there is, and names what there is not."""
    if verdict.verdict == "INVALID":
        return _invalid(verdict, chosen, words)
    ladder = verdict.ladder
    points = [
        (words("brief.regime"), _regime(ladder, words)),
        *((words("brief.profile", profile=name), said) for name, said in _profiles(ladder, control, words)),
        (words("brief.process"), _process(verdict, chosen, ladder, words)),
        (words("brief.service"), _service(verdict, ladder, words)),
    ]
    if even := top.break_even(verdict, words):
        points.insert(0, (words("brief.pays"), even))
    return Brief(
        title=words("brief.title"),
        answer=f"{verdict.verdict}. {top.headline(verdict, words)} {top.evidence_limit(verdict, words)}",
        points=points,
        ways=_ways(ladder, control, words),
        ways_note=_ways_note(ladder, words),
        unmeasured_title=words("brief.unmeasured"),
        unmeasured=_unmeasured(verdict, chosen, ladder, words),
    )


def _invalid(verdict: Verdict, chosen: Chosen, words: Words) -> Brief:
    """The brief of an INVALID campaign: what is not valid, and no figure of it."""
    return Brief(
        title=words("brief.title"),
        answer=f"{verdict.verdict}. {top.headline(verdict, words)} {top.evidence_limit(verdict, words)}",
        points=[
            *([] if words.is_english else [(words("answer.why"), answer.sentence(verdict.reason))]),
            (words("brief.process"), _process(verdict, chosen, None, words)),
            (words("brief.service"), words("brief.invalid")),
        ],
        ways=None,
        ways_note="",
        unmeasured_title=words("brief.unmeasured"),
        unmeasured=[words("unmeasured.invalid")],
    )


# ------------------------------------------------------------------------------------------------------------ points


def _regime(ladder: LadderResult | None, words: Words) -> str:
    """Where preemptions are rare, and where they begin."""
    if ladder is None:
        return words("brief.no_ladder")
    calm = max((level.concurrency for level in ladder.levels if not level.preemptions), default=None)
    if ladder.onset_measured is None:
        return words("brief.never", highest=max((level.concurrency for level in ladder.levels), default=0))
    below = [level.concurrency for level in ladder.levels if level.concurrency < ladder.onset_measured]
    if not below or calm is None:
        return words("brief.at_once", onset=ladder.onset_measured)
    level = next(level for level in ladder.levels if level.concurrency == ladder.onset_measured)
    rate = 1000 * (level.preemptions_per_request or 0.0)
    return words("brief.onset", calm=max(below), onset=ladder.onset_measured, rate=words.number(rate))


def _profiles(ladder: LadderResult | None, control: str, words: Words) -> list[tuple[str, str]]:
    """For each profile (interactive, batch) the highest load that keeps it."""
    if ladder is None:
        return []
    own = next((arm for arm in ladder.arms if arm.arm == control), None)
    said = []
    for entry in own.reached if own is not None else []:
        name = words.or_else(f"profile.{entry.profile}", entry.profile)
        if entry.concurrency is None:
            said.append((name, words("brief.profile_none")))
            continue
        text = words("brief.profile_up_to", level=entry.concurrency)
        if entry.output_tokens_per_second is not None:
            text += words("brief.profile_rate", rate=words.whole(entry.output_tokens_per_second))
        preempted = _preempted_at(ladder.levels, entry.concurrency)
        if preempted is not None:
            text += words("brief.profile_preempted", rate=words.number(1000 * preempted))
        said.append((name, text + "."))
    return said


def _preempted_at(levels: Sequence[Level], concurrency: int) -> float | None:
    return next((level.preemptions_per_request for level in levels if level.concurrency == concurrency), None)


def _process(verdict: Verdict, chosen: Chosen, ladder: LadderResult | None, words: Words) -> str:
    """Whether the process was stable: runs, engine faults, failed requests. Nothing of its service."""
    phases = [phase for record in chosen.records for phase in record.phases]
    sent, failed = sum(phase.sent for phase in phases), sum(phase.failed for phase in phases)
    faults = answer.engine_faults(verdict)
    text = words(
        "brief.process_counts",
        runs=words.count(len(chosen.records), "run"),
        sent=words.whole(sent),
        failed=words.whole(failed),
        faults=words.count(faults, "engine_fault"),
    )
    if ladder is not None and any(level.preemptions for level in ladder.levels) and not faults:
        text += " " + words("brief.process_alive")
    return text


def _service(verdict: Verdict, ladder: LadderResult | None, words: Words) -> str:
    """What service requests got, apart from whether the server lived."""
    if ladder is None:
        primary = answer.primary_of(verdict.comparisons)
        if primary is None or not answer.is_number(primary.effect):
            return words("brief.service_unknown")
        worse = [item for item in verdict.comparisons if item.role == "guard" and item.verdict == "WORSE"]
        text = words(
            "brief.service_effect",
            metric=words.metric(primary.metric),
            effect=words.local(answer.effect_text(primary)),
            interval=words.local(answer.interval_text(primary)),
        )
        if worse:
            named = ", ".join(f"{words.short_metric(item.metric)} ({item.phase})" for item in worse)
            return f"{text} {words('brief.service_worse', guards=named)}"
        return f"{text} {words('brief.service_guards')}"
    worst = max(ladder.levels, key=lambda level: level.preemptions_per_request or 0.0, default=None)
    if worst is None or not worst.preemptions:
        return words("brief.service_calm")
    calm = next((level for level in reversed(ladder.levels) if not level.preemptions), None)
    text = words(
        "brief.service_worst",
        level=worst.concurrency,
        rate=words.number(1000 * (worst.preemptions_per_request or 0.0)),
        e2e=words.seconds(worst.e2e_p95_seconds),
        gap=words.seconds(worst.longest_gap_max_seconds),
    )
    if calm is not None:
        text += " " + words(
            "brief.service_calm_level",
            level=calm.concurrency,
            e2e=words.seconds(calm.e2e_p95_seconds),
            gap=words.seconds(calm.longest_gap_max_seconds),
        )
    return text


# -------------------------------------------------------------------------------------------------------------- ways


def _ways(ladder: LadderResult | None, control: str, words: Words) -> Table | None:
    """Memory, replicas, context limit and fewer at a time, side by side: what each gives, takes and costs."""
    if ladder is None:
        return None
    profiles = [entry.profile for entry in ladder.arms[0].reached] if ladder.arms else []
    rows = [_way(arm, arm.arm == control, profiles, words) for arm in ladder.arms]
    heads = [
        words("ways.arm"),
        words("ways.kind"),
        words("ways.takes"),
        *(words("ways.up_to", profile=words.or_else(f"profile.{name}", name)) for name in profiles),
        words("ways.price"),
        words("ways.moved"),
    ]
    return Table(heads, rows, title=words("ways.title"))


def _way(arm: ArmLadder, is_control: bool, profiles: Sequence[str], words: Words) -> Row:
    unit = arm.cost_unit or ""
    kind = "control" if is_control else "other"
    for name, units in (("memory", MEMORY_UNITS), ("replica", REPLICA_UNITS), ("context", CONTEXT_UNITS),
                        ("sequences", ("sequence",))):  # fmt: skip
        kind = name if unit in units else kind
    takes = "–"
    if arm.cost_amount and unit:
        takes = f"{words.local(f'{arm.cost_amount:+,.3g}')} {words.or_else(f'cost.{unit}', unit)}"
    by_profile = {entry.profile: entry.concurrency for entry in arm.reached}
    reached = ["–" if by_profile.get(name) is None else str(by_profile[name]) for name in profiles]
    prices = [
        words(
            "ways.price_cell",
            profile=words.or_else(f"profile.{cost.profile}", cost.profile),
            hour=words.number(cost.per_hour),
            million=words.number(cost.per_million_output_tokens),
            currency=clipped(cost.currency, 12),
        )
        for cost in arm.costs
    ]
    moved = {True: words("change.is_moved"), False: words("change.not_moved"), None: "–"}[arm.moved]
    cells = [words(f"way.{kind}"), takes, *reached, "\n".join(prices) or words("ways.no_price"), moved]
    return Row(arm.arm, cells, kind="moved" if arm.moved else "", note=arm.title)


def _ways_note(ladder: LadderResult | None, words: Words) -> str:
    if ladder is None:
        return words("ways.none")
    kinds = {arm.cost_unit for arm in ladder.arms}
    missing = [
        words(f"way.{name}")
        for name, units in (("memory", MEMORY_UNITS), ("replica", REPLICA_UNITS), ("context", CONTEXT_UNITS))
        if not kinds & set(units)
    ]
    said = [] if any(arm.costs for arm in ladder.arms) else [words("ways.give_prices")]
    if missing:
        said.append(words("ways.not_tried", names=", ".join(missing)))
    return " ".join(said)


# --------------------------------------------------------------------------------------------------- not measured


def _unmeasured(verdict: Verdict, chosen: Chosen, ladder: LadderResult | None, words: Words) -> list[str]:
    """What a reader might take for measured and is not."""
    samples = [record.samples for record in chosen.records if record.samples is not None]
    primary = answer.primary_of(verdict.comparisons)
    undecided = [
        f"{words.short_metric(item.metric)} ({item.phase}, {item.arm} / {item.against})"
        for item in verdict.comparisons
        if item.role == "guard" and item.verdict == "INCONCLUSIVE"
    ]
    missing = [
        ("gpu", verdict.evidence != "gpu"),
        ("ladder", ladder is None),
        ("costs", ladder is not None and not any(arm.costs for arm in ladder.arms)),
        ("even", verdict.break_even is None or verdict.break_even.hit_share is None),
        ("vram", not any(sample.vram_used_peak_bytes for sample in samples)),
        ("quality", primary is not None and primary.quality == "not_compared"),
        ("calibration", any(record.calibration is None for record in chosen.records)),
        ("one_host", len(verdict.hosts) < 2),
        ("recomputed", ladder is not None and any(level.preemptions for level in ladder.levels)),
    ]
    said = [words(f"unmeasured.{name}") for name, lacks in missing if lacks]
    if undecided:
        said.append(words("unmeasured.guards", names="; ".join(undecided)))
    return [*said, words("unmeasured.production")]


# ---------------------------------------------------------------------------------------------------------- markdown


def to_markdown(brief: Brief, campaign: str) -> str:
    """brief.md: the same words, with what others wrote escaped."""
    lines = [f"# {_plain(brief.title)}", "", _plain(brief.answer), ""]
    lines += [f"- **{_plain(label)}**: {_plain(text)}" for label, text in brief.points]
    if brief.ways is not None:
        lines += ["", f"## {_plain(brief.ways.title)}", "", _cells(brief.ways.heads)]
        lines.append("|" + " --- |" * len(brief.ways.heads))
        lines += [_cells([f"{row.head}: {row.note}" if row.note else row.head, *row.cells]) for row in brief.ways.rows]
    if brief.ways_note:
        lines += ["", _plain(brief.ways_note)]
    lines += ["", f"## {_plain(brief.unmeasured_title)}", ""]
    lines += [*(f"- {_plain(said)}" for said in brief.unmeasured), "", _plain(campaign), ""]
    return "\n".join(lines)


def _cells(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_plain("; ".join(cell.splitlines())) for cell in cells) + " |"


def _plain(text: str) -> str:
    line = clipped(text)
    return "".join(f"\\{character}" if character in MARKDOWN_SPECIAL else character for character in line)
