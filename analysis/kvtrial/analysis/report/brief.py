"""The brief: half a page for the owner of the GPUs and a partner in finance, as a section and as brief.md. Pure."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from kvtrial.analysis import answer
from kvtrial.analysis.lengths import NEVER, LengthFit
from kvtrial.analysis.metrics import find_metric
from kvtrial.analysis.objectives import limits_of
from kvtrial.analysis.prices import Prices
from kvtrial.analysis.report import offload, preemption, top
from kvtrial.analysis.report.comparisons import compact
from kvtrial.analysis.report.said import is_said, said_text
from kvtrial.analysis.report.selection import Chosen, Row, Table, clipped
from kvtrial.analysis.report.words import Words, signs
from kvtrial.record.ladder import ArmLadder, LadderResult, Level
from kvtrial.record.protocol import Protocol
from kvtrial.record.verdict import ComparisonResult, Verdict

MEMORY_UNITS = ("GiB of KV cache", "GiB of RAM")
CONTEXT_UNITS = ("token of answer", "token of prompt")
REPLICA_UNITS = ("replica", "GPU")
RAM = "ram_used_peak_bytes"
LENGTHS_SAID_MAX = 3
WORSE_SAID_MAX = 3
GPU_SECONDS = "gpu_seconds_per_request"
MARKDOWN_SPECIAL = "\\`*_[]<>|#"


class Brief(Struct, frozen=True):
    """The brief: its answer, (label, sentence) pairs, the ways to more capacity, what was not measured, and its terms.

    `undecided` and `terms` stand on the page alone: brief.md is half a page. `quoted`: labels whose sentence is
    English on a page of another language.
    """

    title: str
    answer: str
    points: list[tuple[str, str]]
    ways: Table | None
    ways_note: str
    unmeasured_title: str
    unmeasured: list[str]
    undecided: str
    terms: str
    quoted: list[str]


def brief_of(
    verdict: Verdict,
    protocol: Protocol,
    chosen: Chosen,
    words: Words,
    prices: Prices | None = None,
    fits: Sequence[LengthFit] = (),
) -> Brief:
    """The brief of a campaign; it says what there is, and names what there is not.

    `prices`: the user's own. `fits`: from which prefix length on it pays; those of this campaign are said.
    """
    if verdict.verdict == "INVALID":
        return _invalid(verdict, chosen, words)
    ladder = verdict.ladder
    points = [
        (words("brief.compared"), _compared(verdict, protocol, words)),
        (words("brief.todo"), top.next_step(verdict, words)),
        (words("brief.regime"), f"{_regime(ladder, words)} {preemption.host_words(ladder, len(verdict.hosts), words)}"),
        *_profiles(ladder, protocol, words),
        (words("brief.process"), _process(verdict, chosen, ladder, words)),
        (words("brief.service"), _service(verdict, ladder, protocol.control, words)),
        (words("brief.takes"), _takes(verdict, prices, words)),
    ]
    points[2:2] = [(words("brief.pays"), top.break_even(verdict, words)), *_lengths(verdict, fits, words)]
    return Brief(
        title=words("brief.title"),
        answer=_answer(verdict, words),
        points=[(label, text.rstrip()) for label, text in points if text.strip()],
        ways=_ways(verdict, protocol.control, words),
        ways_note=_ways_note(ladder, words),
        unmeasured_title=words("brief.unmeasured"),
        unmeasured=_unmeasured(verdict, chosen, ladder, words),
        undecided=_undecided(verdict, words),
        terms=words("brief.terms"),
        quoted=[]
        if is_said(answer.next_text(verdict), words) or not top.next_is_the_tools(verdict, words)
        else [words("brief.todo")],
    )


def _invalid(verdict: Verdict, chosen: Chosen, words: Words) -> Brief:
    """The brief of an INVALID campaign: what is not valid, and no figure of it."""
    return Brief(
        title=words("brief.title"),
        answer=_answer(verdict, words),
        points=[
            *([] if words.is_english else [(words("answer.why"), said_text(answer.sentence(verdict.reason), words))]),
            (words("brief.process"), _process(verdict, chosen, None, words)),
            (words("brief.service"), words("brief.invalid")),
        ],
        ways=None,
        ways_note="",
        unmeasured_title=words("brief.unmeasured"),
        unmeasured=[words("unmeasured.invalid")],
        undecided="",
        terms="",
        quoted=[] if is_said(verdict.reason, words) else [words("answer.why")],
    )


def _answer(verdict: Verdict, words: Words) -> str:
    """The word, what it means, what was found in plain words, and what such evidence can't say."""
    found = top.headline(verdict, words)
    primary = answer.primary_of(verdict.comparisons)
    if verdict.verdict == "INCONCLUSIVE" and primary is not None and not top.headline_is_quoted(verdict):
        found = top.as_measured(primary, words)
    return f"{verdict.verdict} ({words(f'means.{verdict.verdict}')}). {found} {top.evidence_limit(verdict, words)}"


# ------------------------------------------------------------------------------------------------------------ points


def _compared(verdict: Verdict, protocol: Protocol, words: Words) -> str:
    """Both arms that decide, with what they are; of a ladder the table has them."""
    primary = answer.primary_of(verdict.comparisons)
    if primary is None or verdict.ladder is not None:
        return ""
    names = list(dict.fromkeys((primary.arm, primary.against)))
    said = [f"{arm}: {words.title(protocol.arms[arm].title)}" for arm in names if arm in protocol.arms]
    return "; ".join(said) + "." if said else ""


def _lengths(verdict: Verdict, fits: Sequence[LengthFit], words: Words) -> list[tuple[str, str]]:
    """From which prefix length on a return is sooner, a point a host and model, by interpolation."""
    said = []
    for fit in [fit for fit in fits if fit.campaign == verdict.campaign][:LENGTHS_SAID_MAX]:
        where, _, interval = offload.pays_from(fit.by_interpolation, fit, words).partition("\n")
        where = f"{where} ({interval})" if interval else where
        if fit.by_interpolation.high == NEVER:
            # The pairs do not rule out that no length pays.
            said.append((words("brief.length"), words("brief.length_not_shown", interval=interval)))
            continue
        names = {"model": clipped(fit.model or "–", 60), "host": clipped(fit.host, 60)}
        said.append((words("brief.length"), words("brief.length_pays", where=where, **names)))
    return said


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
    return words("brief.onset", calm=max(below), onset=ladder.onset_measured, rate=words.amount(rate, "preemption"))


def _profiles(ladder: LadderResult | None, protocol: Protocol, words: Words) -> list[tuple[str, str]]:
    """For each profile (interactive, batch), with what it asks for, the highest load that keeps it."""
    if ladder is None:
        return []
    own = next((arm for arm in ladder.arms if arm.arm == protocol.control), None)
    said = []
    for entry in own.reached if own is not None else []:
        label = words("brief.profile", profile=words.or_else(f"profile.{entry.profile}", entry.profile))
        asked = _objective(entry.profile, protocol, words)
        if entry.concurrency is None:
            said.append((label, words("brief.profile_none") + asked + "."))
            continue
        highest = not entry.broken_by
        text = words("brief.profile_at_least" if highest else "brief.profile_up_to", level=entry.concurrency) + asked
        if entry.output_tokens_per_second is not None:
            text += words("brief.profile_rate", rate=words.whole(entry.output_tokens_per_second))
        preempted = _preempted_at(ladder.levels, entry.concurrency)
        if preempted:
            text += words("brief.profile_preempted", rate=words.amount(1000 * preempted, "preemption"))
        said.append((label, text + "."))
    return said


def _objective(profile: str, protocol: Protocol, words: Words) -> str:
    """What a profile asks of every level, in brackets; "" where the protocol does not say."""
    declared = protocol.ladder.objectives.get(profile) if protocol.ladder else None
    if declared is None:
        return ""
    limits = [
        words(f"objective.{name}", limit=words.seconds(limit) if name.endswith("seconds") else words.number(limit))
        for name, limit in limits_of(declared).items()
    ]
    return f" ({', '.join(limits)})"


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


def _service(verdict: Verdict, ladder: LadderResult | None, control: str, words: Words) -> str:
    """What service requests got, apart from whether the server lived: the guards, and of a ladder its levels."""
    if ladder is None:
        guards = [item for item in verdict.comparisons if item.role == "guard" and item.metric != RAM]
        primary = answer.primary_of(verdict.comparisons)
        if primary is None or not answer.is_number(primary.effect):
            return words("brief.service_unknown")
        if not guards:
            return words("brief.service_no_guard")
        worse = [item for item in guards if item.verdict == "WORSE"]
        hinted = [item for item in guards if item.verdict == "INCONCLUSIVE" and _leans_worse(item)]
        said = [words("brief.service_worse", what=_listed(worse, words))] if worse else []
        said += [words("brief.service_hinted", what=_listed(hinted, words))] if hinted else []
        named = len(worse) + len(hinted)
        if named < len(guards):
            said.append(words("brief.service_rest" if named else "brief.service_guards", count=len(guards) - named))
            open_ = sum(item.verdict == "INCONCLUSIVE" for item in guards) - len(hinted)
            said += [words("brief.service_undecided", count=open_)] if open_ else []
        return " ".join(said)
    worst = max(ladder.levels, key=lambda level: level.preemptions_per_request or 0.0, default=None)
    if worst is None or not worst.preemptions:
        return words("brief.service_calm")
    calm = next((level for level in reversed(ladder.levels) if not level.preemptions), None)
    text = words(
        "brief.service_worst",
        level=worst.concurrency,
        rate=words.amount(1000 * (worst.preemptions_per_request or 0.0), "preemption"),
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
    return f"{text} {_arms_worse(verdict, ladder, control, words)}".rstrip()


def _arms_worse(verdict: Verdict, ladder: LadderResult, control: str, words: Words) -> str:
    """What is shown to be worse with each change, the one to adopt first; "" where nothing is."""
    first = top.adopted(verdict)
    said = []
    for arm in sorted((arm.arm for arm in ladder.arms), key=lambda arm: arm != first):
        worse = [
            item
            for item in verdict.comparisons
            if (item.arm, item.against, item.verdict) == (arm, control, "WORSE") and item.role != "primary"
        ]
        # What a request costs, then what may not be worse, then the rest.
        worse.sort(key=lambda item: (item.metric != GPU_SECONDS, item.role != "guard"))
        if worse:
            said.append(f"{arm}: {_worse_words(worse, words)}")
    text = words("brief.service_arms", control=control, what=". ".join(said)) if said else ""
    guards = [
        item
        for item in verdict.comparisons
        if item.role == "guard" and item.verdict == "INCONCLUSIVE" and first in (item.arm, None)
    ]
    return f"{text} {words('brief.service_undecided', count=len(guards))}".lstrip() if guards else text


def _worse_words(worse: Sequence[ComparisonResult], words: Words) -> str:
    """The first of an arm's worse measures by where they were taken, and how many more there are."""
    by_place: dict[str, list[str]] = {}
    for item in worse[:WORSE_SAID_MAX]:
        effect, interval = (compact(text, words) for text in (answer.effect_text(item), answer.interval_text(item)))
        by_place.setdefault(words.place(item.phase), []).append(
            f"{words.short_metric(item.metric)} {effect} ({interval})"
        )
    said = "; ".join(f"{place} {', '.join(items)}" for place, items in by_place.items())
    more = len(worse) - WORSE_SAID_MAX
    return f"{said}; {words('gates.more', count=more)}" if more > 0 else said


def _leans_worse(item: ComparisonResult) -> bool:
    """Whether the whole interval lies on the worse side of no difference, though not beyond the margin."""
    low, high = item.ci_low, item.ci_high
    if low is None or high is None:
        return False
    none = 1.0 if item.effect_scale == "ratio" else 0.0
    return low > none if find_metric(item.metric).better == "lower" else high < none


def _listed(items: Sequence[ComparisonResult], words: Words) -> str:
    return " ".join(
        f"{top.effect_words(item, words).rstrip('.')} ({top.interval_words(item, words)})." for item in items
    )


def _takes(verdict: Verdict, prices: Prices | None, words: Words) -> str:
    """The memory that the change takes, and its price where the user gave one; of a ladder the table has it."""
    if verdict.ladder is not None:
        return ""
    primary = answer.primary_of(verdict.comparisons)
    arm = primary.arm if primary is not None else None
    found = next((item for item in verdict.comparisons if item.metric == RAM and item.arm == arm), None)
    if found is None or not answer.is_number(found.effect):
        sizes = {row.arm: row.tier_bytes for row in verdict.tier_budget.tiers} if verdict.tier_budget else {}
        if arm in sizes:
            return words("brief.takes_tier", size=words.bytes(sizes[arm]), arm=arm)
        return words("brief.takes_unknown")
    interval = words.local(answer.interval_text(found))
    text = words("brief.takes_ram", effect=words.local(answer.effect_text(found)), interval=interval, arm=found.arm)
    if prices is not None and prices.ram_gib_hour is not None and found.effect_scale == "difference":
        hour = (found.effect or 0.0) / 2**30 * prices.ram_gib_hour
        text += words("brief.takes_price", hour=words.number(hour), currency=clipped(prices.currency, 12))
    return text + "."


# -------------------------------------------------------------------------------------------------------------- ways


def _ways(verdict: Verdict, control: str, words: Words) -> Table | None:
    """Memory, replicas, context limit and fewer at a time, side by side: what each gives, takes and costs."""
    ladder = verdict.ladder
    if ladder is None:
        return None
    profiles = [entry.profile for entry in ladder.arms[0].reached] if ladder.arms else []
    top_level = max((level.concurrency for level in ladder.levels), default=0)
    gpu_seconds = {
        arm.arm: level.gpu_seconds_per_request
        for arm in ladder.arms
        for level in arm.levels
        if level.concurrency == top_level and level.gpu_seconds_per_request is not None
    }
    rows = [_way(arm, verdict, control, profiles, gpu_seconds, words) for arm in ladder.arms]
    heads = [
        words("ways.arm"),
        words("ways.kind"),
        words("ways.takes"),
        words("ways.preempted"),
        *(words("ways.up_to", profile=words.or_else(f"profile.{name}", name)) for name in profiles),
        *([words("ways.gpu_seconds", level=top_level)] if gpu_seconds else []),
        words("ways.price"),
        words("ways.moved"),
    ]
    return Table(heads, rows, title=words("ways.title"))


def _way(
    arm: ArmLadder,
    verdict: Verdict,
    control: str,
    profiles: Sequence[str],
    gpu_seconds: Mapping[str, float],
    words: Words,
) -> Row:
    unit = arm.cost_unit or ""
    kind = "control" if arm.arm == control else "other"
    for name, units in (("memory", MEMORY_UNITS), ("replica", REPLICA_UNITS), ("context", CONTEXT_UNITS),
                        ("sequences", ("sequence",))):  # fmt: skip
        kind = name if unit in units else kind
    takes = words.cost(arm.cost_amount, unit) if arm.cost_amount and unit else "–"
    theirs = next((one for one in verdict.ladder.arms if one.arm == control), None) if verdict.ladder else None
    if gpus := preemption.gpus_words(arm, theirs, words):
        takes += f"\n{gpus}"
    by_profile = {entry.profile: entry for entry in arm.reached}
    reached = [preemption.reached_words(by_profile.get(name), words) for name in profiles]
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
    moved = "–" if arm.moved is None else preemption.moved_words(arm, words)
    of_a_request = [words.number(gpu_seconds.get(arm.arm))] if gpu_seconds else []
    preempted = preemption.preempted_words(arm, verdict.comparisons, control, words)
    cells = [words(f"way.{kind}"), takes, preempted, *reached, *of_a_request,
             "\n".join(prices) or words("ways.no_price"), moved]  # fmt: skip
    return Row(arm.arm, cells, kind="moved" if arm.moved else "", note=words.title(arm.title))


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
    if any(arm.moved for arm in ladder.arms):
        said.append(words("ways.moved_means"))
    return " ".join(said)


# --------------------------------------------------------------------------------------------------- not measured


def _unmeasured(verdict: Verdict, chosen: Chosen, ladder: LadderResult | None, words: Words) -> list[str]:
    """What a reader might take for measured and is not."""
    samples = [record.samples for record in chosen.records if record.samples is not None]
    primary = answer.primary_of(verdict.comparisons)
    missing = [
        ("gpu", verdict.evidence != "gpu"),
        ("ladder", ladder is None),
        ("costs", ladder is not None and not any(arm.costs for arm in ladder.arms)),
        ("even", verdict.break_even is None or not top.break_even(verdict, words)),
        ("vram", not any(sample.vram_used_peak_bytes for sample in samples)),
        ("quality", primary is not None and primary.quality == "not_compared"),
        ("calibration", any(record.calibration is None for record in chosen.records)),
        ("one_host", len(verdict.hosts) < 2),
        ("recomputed", ladder is not None and any(level.preemptions for level in ladder.levels)),
    ]
    said = [words(f"unmeasured.{name}") for name, lacks in missing if lacks]
    return [*said, words("unmeasured.production")]


def _undecided(verdict: Verdict, words: Words) -> str:
    """The guards that so many pairs leave undecided; "" where there is none."""
    names = [
        f"{words.short_metric(item.metric)} {words.place(item.phase)} ({item.arm} / {item.against})"
        for item in verdict.comparisons
        if item.role == "guard" and item.verdict == "INCONCLUSIVE"
    ]
    return words("unmeasured.guards", names="; ".join(names)) if names else ""


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
    lines += [f"- {_plain(said)}" for said in brief.unmeasured]
    lines += ["", _plain(campaign), ""]
    return "\n".join(lines)


def _cells(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_plain("; ".join(cell.splitlines())) for cell in cells) + " |"


def _plain(text: str) -> str:
    line = clipped(signs(text))
    return "".join(f"\\{character}" if character in MARKDOWN_SPECIAL else character for character in line)
