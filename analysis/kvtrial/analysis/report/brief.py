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
from kvtrial.record.ladder import ArmLadder, LadderResult, Level, Reached
from kvtrial.record.protocol import Protocol
from kvtrial.record.verdict import ComparisonResult, Verdict

MEMORY_UNITS = ("GiB of KV cache", "GiB of RAM")
CONTEXT_UNITS = ("token of answer", "token of prompt")
REPLICA_UNITS = ("replica", "GPU")
RAM = "ram_used_peak_bytes"
NAMED_MAX = 3
WORSE_SAID_MAX = 2
ALSO_SAID_MAX = 2
NO_COST = "No cost: "
"""How a ladder says why prices that were given price nothing."""
GPU_SECONDS = "gpu_seconds_per_request"
MARKDOWN_SPECIAL = "\\`*_[]<>|#~&"


class Brief(Struct, frozen=True):
    """The brief: its answer, (label, sentence) pairs, tables with their note, what was not measured, and its terms.

    `undecided`, `terms` and the notes of rows stand on the page alone: brief.md is half a page, and says so in its last
    line. `quoted`: labels whose sentence is English on a page of another language.
    """

    title: str
    answer: str
    points: list[tuple[str, str]]
    tables: list[Table]
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
        (words("brief.todo"), top.next_in_brief(verdict, words)),
        (words("brief.also"), _also(verdict, protocol.control, words)),
        (words("brief.pays"), top.break_even(verdict, words)),
        (words("brief.length"), _lengths(verdict, fits, words)),
        (words("brief.regime"), f"{_regime(ladder, words)} {preemption.host_words(ladder, len(verdict.hosts), words)}"),
        (words("brief.profiles"), _profiles(ladder, protocol, words)),
        (words("brief.process"), _process(verdict, chosen, ladder, words)),
        (words("brief.service"), _service(verdict, ladder, protocol.control, words)),
        (words("brief.takes"), _takes(verdict, prices, words)),
    ]
    ways = _ways(verdict, protocol.control, words)
    return Brief(
        title=words("brief.title"),
        answer=_answer(verdict, words),
        points=[(label, text.rstrip()) for label, text in points if text.strip()],
        tables=[] if ways is None else [ways],
        ways_note=_ways_note(ladder, words),
        unmeasured_title=words("brief.unmeasured"),
        unmeasured=_unmeasured(verdict, chosen, ladder, words, prices),
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
            *([] if words.is_english else [(words("answer.why"), _why(verdict, words))]),
            (words("brief.process"), _process(verdict, chosen, None, words)),
            (words("brief.service"), words("brief.invalid")),
        ],
        tables=[],
        ways_note="",
        unmeasured_title=words("brief.unmeasured"),
        unmeasured=[words("unmeasured.invalid")],
        undecided="",
        terms="",
        quoted=[] if is_said(verdict.reason, words) else [words("answer.why")],
    )


def _why(verdict: Verdict, words: Words) -> str:
    return said_text(answer.sentence(verdict.reason, answer.arms_in(verdict)), words)


def _answer(verdict: Verdict, words: Words) -> str:
    """The word, what it means, what was found in plain words, and what such evidence can't say."""
    found = top.headline(verdict, words)
    primary = answer.primary_of(verdict.comparisons)
    if verdict.verdict == "INCONCLUSIVE" and primary is not None and not top.headline_is_quoted(verdict):
        found = top.as_measured(primary, words, answer.prefix_tokens_of(primary, verdict))
    limit = words("brief.limit_gpu") if verdict.evidence == "gpu" else top.evidence_limit(verdict, words)
    return f"{verdict.verdict} ({words(f'means.{verdict.verdict}')}). {found} {limit}"


# ------------------------------------------------------------------------------------------------------------ points


def _compared(verdict: Verdict, protocol: Protocol, words: Words) -> str:
    """Both arms that decide, with what they are; of a ladder the table has them."""
    primary = answer.primary_of(verdict.comparisons)
    if primary is None or verdict.ladder is not None:
        return ""
    names = list(dict.fromkeys((primary.arm, primary.against)))
    said = [f"{arm}: {words.title(protocol.arms[arm].title)}" for arm in names if arm in protocol.arms]
    return "; ".join(said) + "." if said else ""


def _also(verdict: Verdict, control: str, words: Words) -> str:
    """What is BETTER than the control beside the arm that decides, and what is worse of that arm or leans to it.

    Of a ladder and of a tier's sizes a table has it.
    """
    primary = answer.primary_of(verdict.comparisons)
    if primary is None or verdict.ladder is not None or verdict.tier_budget is not None:
        return ""
    found: dict[str, ComparisonResult] = {}
    for item in sorted(verdict.comparisons, key=lambda item: _what(item) != _what(primary)):
        is_other = item.arm not in (primary.arm, control) and item.against == control and item.against_phase is None
        if is_other and item.verdict == "BETTER":
            found.setdefault(item.arm, item)
    said = []
    for item in list(found.values())[:ALSO_SAID_MAX]:
        said.append(words("brief.also_better", what=top.effect_words(item, words).rstrip(".")))
        worse = [
            other
            for other in verdict.comparisons
            if (other.arm, other.against, other.against_phase) == (item.arm, item.against, None)
            and other.metric != RAM
            and (other.verdict == "WORSE" or (other.verdict == "INCONCLUSIVE" and _leans_worse(other)))
        ]
        if worse:
            # Other measures are named before the same measure in another phase.
            named = _one_of_a_metric(worse)
            named += [other for other in worse if other not in named]
            said.append(words("brief.also_worse", arm=item.arm, what=_worse_words(named, "", words)))
    return " ".join(said)


def _what(item: ComparisonResult) -> tuple[str, str]:
    return item.metric, item.phase


def _lengths(verdict: Verdict, fits: Sequence[LengthFit], words: Words) -> str:
    """From which prefix length on a return is shown to be sooner, by interpolation; of hosts in one sentence a model.

    What is shown is the interval's upper end: between its ends neither is.
    """
    own = [fit for fit in fits if fit.campaign == verdict.campaign]
    if len(own) == 1:
        return _length(own[0], words)
    by_model: dict[str, list[LengthFit]] = {}
    for fit in own:
        by_model.setdefault(fit.model, []).append(fit)
    return " ".join(_lengths_of_hosts(model, of_model, words) for model, of_model in by_model.items())


def _length(fit: LengthFit, words: Words) -> str:
    """Of one host."""
    estimate, _, interval = offload.pays_from(fit.by_interpolation, fit, words).partition("\n")
    high = fit.by_interpolation.high
    if high == NEVER:
        # The pairs do not rule out that no length pays.
        return words("brief.length_not_shown", interval=interval)
    where = offload.from_length(high, fit, words)
    if high == 0:
        return words("brief.length_always", where=where, interval=interval)
    return words("brief.length_pays", where=where, estimate=estimate, interval=interval)


def _lengths_of_hosts(model: str, fits: Sequence[LengthFit], words: Words) -> str:
    """Of hosts with one model: from which lengths on, how many pay at every length, on how many nothing is shown."""
    shown = [fit.by_interpolation.high for fit in fits if fit.by_interpolation.high != NEVER]
    from_a_length = sorted(tokens for tokens in shown if tokens)
    said = []
    if from_a_length:
        hosts = words.whole(len(from_a_length))
        low, high = words.whole(from_a_length[0]), words.length(from_a_length[-1], "of_tokens")
        if words.length(from_a_length[0], "of_tokens") == high:
            said.append(words("brief.lengths_from_one", hosts=hosts, low=high))
        else:
            said.append(words("brief.lengths_from", hosts=hosts, low=low, high=high))
    for name, number in (("always", len(shown) - len(from_a_length)), ("not_shown", len(fits) - len(shown))):
        if number:
            said.append(words(f"brief.lengths_{name}", hosts=words.whole(number)))
    return words("brief.lengths", hosts=words.whole(len(fits)), model=clipped(model or "–", 60), said="; ".join(said))


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
    worst = max(ladder.levels, key=lambda level: level.preemptions_per_request or 0.0)
    said = words("brief.onset", calm=max(below), onset=level.concurrency, rate=_per_1000(level, words))
    if worst.concurrency != level.concurrency:
        said += words("brief.onset_worst", level=worst.concurrency, rate=_per_1000(worst, words))
    return f"{said}."


def _per_1000(level: Level, words: Words) -> str:
    return words.number(1000 * (level.preemptions_per_request or 0.0))


def _profiles(ladder: LadderResult | None, protocol: Protocol, words: Words) -> str:
    """For each profile (interactive, batch) what it asks for, and what the control gives at its highest such load."""
    own = next((arm for arm in ladder.arms if arm.arm == protocol.control), None) if ladder is not None else None
    if ladder is None or own is None or not own.reached:
        return ""
    limits = _limits(protocol, [entry.profile for entry in own.reached])
    said = []
    for entry in own.reached:
        one = words(
            "profiles.one",
            profile=words.or_else(f"profile.{entry.profile}", entry.profile),
            asks=_objective(entry.profile, limits, protocol, words),
            rate=words.whole(entry.output_tokens_per_second),
        )
        said.append(one)
    asked = ", ".join(words(f"objective.{name}") for name in limits)
    return words("profiles.asks", what=asked, control=own.arm, said="; ".join(said))


def _limits(protocol: Protocol, profiles: Sequence[str]) -> list[str]:
    """What any of the profiles asks for, in one order."""
    declared = [protocol.ladder.objectives[name] for name in profiles if protocol.ladder and
                name in protocol.ladder.objectives]  # fmt: skip
    return list(dict.fromkeys(name for objective in declared for name in limits_of(objective)))


def _objective(profile: str, limits: Sequence[str], protocol: Protocol, words: Words) -> str:
    """What a profile asks of every level, in the order in which they are named; "–" where it asks nothing."""
    declared = protocol.ladder.objectives.get(profile) if protocol.ladder else None
    asked = {} if declared is None else limits_of(declared)
    said = {
        name: words.seconds(limit) if name.endswith("seconds") else words.number(limit) for name, limit in asked.items()
    }
    return ", ".join(said.get(name, "–") for name in limits) or "–"


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
    if len(verdict.hosts) > 1:
        invalid = sum(host.verdict == "INVALID" for host in verdict.hosts)
        text = words("brief.hosts", hosts=words.whole(len(verdict.hosts)), invalid=words.whole(invalid)) + f" {text}"
    if ladder is not None and any(level.preemptions for level in ladder.levels) and not faults:
        text += " " + words("brief.process_alive")
    return text


def _service(verdict: Verdict, ladder: LadderResult | None, control: str, words: Words) -> str:
    """What service requests got, apart from whether the server lived: the guards, and of a ladder its levels."""
    if ladder is None:
        return _guards(verdict, control, words)
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
        text += words(
            "brief.service_calm_level",
            level=calm.concurrency,
            e2e=words.seconds(calm.e2e_p95_seconds),
            gap=words.seconds(calm.longest_gap_max_seconds),
        )
    return f"{text}. {_arms_worse(verdict, ladder, control, words)}".rstrip()


def _guards(verdict: Verdict, control: str, words: Words) -> str:
    """What was watched beside: the worse, those that lean to it, and how many of the others are undecided."""
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
    rest = [item for item in guards if item not in worse and item not in hinted]
    if rest:
        key = "brief.service_rest" if len(rest) < len(guards) else "brief.service_guards"
        # Where another arm stands beside the one that decides, the guards are the latter's.
        names_arm = {item.arm for item in guards} == {primary.arm} and _also(verdict, control, words)
        of = words("brief.service_of", arm=primary.arm) if names_arm else ""
        said.append(words(key, count=len(rest), of=of))
        if open_ := [item for item in rest if item.verdict == "INCONCLUSIVE"]:
            said.append(words("brief.service_undecided", count=len(open_), names=_names(open_, words)))
    return " ".join(said)


def _arms_worse(verdict: Verdict, ladder: LadderResult, control: str, words: Words) -> str:
    """What is worse with each change, what leans to it, and what is undecided of the arm to adopt; that arm first.

    A measure is named once an arm; where it is worse elsewhere, too, the report has it.
    """
    first = top.adopted(verdict)
    arms = sorted((arm.arm for arm in ladder.arms if arm.arm != control), key=lambda arm: arm != first)
    primary = answer.primary_of(verdict.comparisons)
    place = primary.phase if primary is not None else ""
    found: dict[str, list[str]] = {"worse": [], "leaning": []}
    for arm in arms:
        of_arm = [
            item
            for item in verdict.comparisons
            if (item.arm, item.against) == (arm, control) and item.role != "primary" and item.against_phase is None
        ]
        # What a request costs, then what may not be worse, then the rest; above the onset before elsewhere.
        of_arm.sort(key=lambda item: (item.metric != GPU_SECONDS, item.role != "guard", item.phase != place))
        worse = _one_of_a_metric([item for item in of_arm if item.verdict == "WORSE"])
        known = {item.metric for item in worse}
        leaning = _one_of_a_metric(
            [item for item in of_arm if item.role == "guard" and item.verdict == "INCONCLUSIVE" and _leans_worse(item)]
        )
        for name, items in (("worse", worse), ("leaning", [item for item in leaning if item.metric not in known])):
            if items:
                found[name].append(f"{arm} {_worse_words(items, place, words)}")
    where = words.place(place) if place else ""
    if any((item.metric, item.phase, item.verdict) == (GPU_SECONDS, place, "WORSE") for item in verdict.comparisons):
        # What a request costs stands in the table, too, of one level.
        where = words("brief.service_all_levels", where=where)
    said = [
        words(f"brief.service_arms_{name}", control=control, where=where, what="; ".join(listed))
        for name, listed in found.items()
        if listed
    ]
    open_ = [item for item in verdict.comparisons if item.role == "guard" and item.verdict == "INCONCLUSIVE"]
    adopted = [item for item in open_ if item.arm == first]
    if adopted:
        said.append(words("brief.service_open", arm=first, names=_names(adopted, words)))
    elif open_ and not first:
        said.append(words("brief.service_open_any", count=len(open_)))
    return " ".join(said)


def _one_of_a_metric(items: Sequence[ComparisonResult]) -> list[ComparisonResult]:
    found: dict[str, ComparisonResult] = {}
    for item in items:
        found.setdefault(item.metric, item)
    return list(found.values())


def _worse_words(worse: Sequence[ComparisonResult], place: str, words: Words) -> str:
    """The first of an arm's measures with their effects, and how many more there are; `place` has been said."""
    said = [
        f"{words.short_metric(item.metric)}{'' if item.phase == place else f' {words.place(item.phase)}'} "
        f"{compact(answer.effect_text(item), words)}"
        for item in worse[:WORSE_SAID_MAX]
    ]
    more = len(worse) - WORSE_SAID_MAX
    return ", ".join([*said, *([words("gates.more", count=more)] if more > 0 else [])])


def _names(items: Sequence[ComparisonResult], words: Words) -> str:
    """The measures in a word or two, a few of them."""
    names = list(dict.fromkeys(words.short_metric(item.metric) for item in items))
    more = len(names) - NAMED_MAX
    return ", ".join([*names[:NAMED_MAX], *([words("gates.more", count=more)] if more > 0 else [])])


def _leans_worse(item: ComparisonResult) -> bool:
    """Whether the whole interval lies on the worse side of no difference, though not beyond the margin."""
    low, high = item.ci_low, item.ci_high
    if low is None or high is None:
        return False
    none = 1.0 if item.effect_scale == "ratio" else 0.0
    return low > none if find_metric(item.metric).better == "lower" else high < none


def _listed(items: Sequence[ComparisonResult], words: Words) -> str:
    said = [
        f"{top.effect_words(item, words).rstrip('.')} ({top.interval_words(item, words)})."
        for item in items[:NAMED_MAX]
    ]
    more = len(items) - NAMED_MAX
    return " ".join([*said, *([f"{words('gates.more', count=more)}."] if more > 0 else [])])


def _takes(verdict: Verdict, prices: Prices | None, words: Words) -> str:
    """The memory that the change takes, and its price where the user gave one; of a ladder the table has it."""
    if verdict.ladder is not None:
        return ""
    primary, even = answer.primary_of(verdict.comparisons), verdict.break_even
    arm = primary.arm if primary is not None else None
    measured = {
        item.arm: item
        for item in reversed(verdict.comparisons)
        if item.metric == RAM and item.against_phase is None and answer.is_number(item.effect)
    }
    found = measured.get(arm or "") or measured.get(even.arm if even is not None else "")
    if found is None:
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
    priced = next((cost for arm in ladder.arms for cost in arm.costs), None)
    rows = [_way(arm, verdict, control, profiles, gpu_seconds, priced is not None, words) for arm in ladder.arms]
    names = [words.or_else(f"profile.{name}", name) for name in profiles]
    heads = [
        words("ways.arm"),
        words("ways.takes"),
        words("ways.preempted"),
        *(words("ways.up_to", profile=name) if name == names[0] else name for name in names),
        *([words("ways.gpu_seconds", level=top_level)] if gpu_seconds else []),
        *([words("ways.price", profile=names[0], currency=clipped(priced.currency, 12)), *names[1:]] if priced else []),
        words("ways.moved"),
    ]
    title = words("ways.title")
    if len(verdict.hosts) > 1:
        title = words("ways.title_of_host", title=title, host=clipped(ladder.host, 60))
    return Table(heads, rows, title=title)


def _way(
    arm: ArmLadder,
    verdict: Verdict,
    control: str,
    profiles: Sequence[str],
    gpu_seconds: Mapping[str, float],
    priced: bool,
    words: Words,
) -> Row:
    unit = arm.cost_unit or ""
    kind = "control" if arm.arm == control else "other"
    for name, units in (("memory", MEMORY_UNITS), ("replica", REPLICA_UNITS), ("context", CONTEXT_UNITS),
                        ("sequences", ("sequence",))):  # fmt: skip
        kind = name if unit in units else kind
    takes = words(f"way.{kind}")
    if arm.cost_amount and unit:
        takes += f": {words.cost(arm.cost_amount, unit)}"
    theirs = next((one for one in verdict.ladder.arms if one.arm == control), None) if verdict.ladder else None
    if gpus := preemption.gpus_words(arm, theirs, words):
        takes += f"\n{gpus}"
    by_profile = {entry.profile: entry for entry in arm.reached}
    costs = {cost.profile: cost for cost in arm.costs}
    prices = [
        f"{words.number(cost.per_hour)} · {words.number(cost.per_million_output_tokens)}" if cost else "–"
        for cost in map(costs.get, profiles if priced else [])
    ]
    cells = [
        takes,
        preemption.preempted_words(arm, preemption.comparisons_of(verdict), control, words),
        *(preemption.reached_in_brief(by_profile.get(name), words) for name in profiles),
        *([words.number(gpu_seconds.get(arm.arm))] if gpu_seconds else []),
        *prices,
        "–" if arm.moved is None else preemption.moved_in_brief(arm, words),
    ]
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
    said = [words("ways.at_least")] if any(_is_open(entry) for arm in ladder.arms for entry in arm.reached) else []
    if missing:
        said.append(words("ways.not_tried", names=", ".join(missing)))
    if any(arm.moved for arm in ladder.arms):
        said.append(words("ways.moved_means"))
    return " ".join(said)


def _is_open(entry: Reached) -> bool:
    """Whether a profile is kept at the highest level tried."""
    return entry.concurrency is not None and not entry.broken_by


# --------------------------------------------------------------------------------------------------- not measured


def _unmeasured(
    verdict: Verdict, chosen: Chosen, ladder: LadderResult | None, words: Words, prices: Prices | None
) -> list[str]:
    """What a reader might take for measured and is not."""
    samples = [record.samples for record in chosen.records if record.samples is not None]
    primary = answer.primary_of(verdict.comparisons)
    priced = ladder is not None and any(arm.costs for arm in ladder.arms)
    no_cost = _no_cost(ladder, prices, words) if not priced else ""
    missing = [
        ("gpu", verdict.evidence != "gpu"),
        ("ladder", ladder is None),
        ("costs", ladder is not None and not priced and not no_cost),
        ("even", ladder is None and not top.break_even(verdict, words)),
        ("vram", not any(sample.vram_used_peak_bytes for sample in samples)),
        ("quality", primary is not None and primary.quality == "not_compared"),
        ("calibration", any(record.calibration is None for record in chosen.records)),
        ("one_host", len(verdict.hosts) < 2),
        ("recomputed", ladder is not None and any(level.preemptions for level in ladder.levels)),
    ]
    said = [words(f"unmeasured.{name}") for name, lacks in missing if lacks]
    return [*said, *([no_cost] if no_cost else []), words("unmeasured.production")]


def _no_cost(ladder: LadderResult | None, prices: Prices | None, words: Words) -> str:
    """Why the prices that were given price nothing, as the ladder says; "" where none were given."""
    if ladder is None or prices is None:
        return ""
    lacking = next((line for line in ladder.regime if line.startswith(NO_COST)), "")
    return said_text(lacking, words) if lacking else words("unmeasured.costs_unknown")


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
    for table in brief.tables:
        lines += ["", f"## {_plain(table.title)}"] if table.title else []
        lines += ["", _cells(table.heads), "|" + "---|" * len(table.heads)]
        lines += [_cells([row.head, *row.cells]) for row in table.rows]
    if brief.ways_note:
        lines += ["", _plain(brief.ways_note)]
    lines += ["", f"## {_plain(brief.unmeasured_title)}", "", " ".join(map(_plain, brief.unmeasured))]
    lines += ["", _plain(campaign), ""]
    return "\n".join(lines)


def _cells(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_plain("; ".join(cell.splitlines())) for cell in cells) + " |"


def _plain(text: str) -> str:
    line = clipped(signs(text))
    return "".join(f"\\{character}" if character in MARKDOWN_SPECIAL else character for character in line)
