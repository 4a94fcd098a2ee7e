"""Two campaigns side by side: what each said, how far their effects lie apart, and what they were made with. Pure but
for reading both.

The difference of two effects has an interval only as far as the two intervals tell: two intervals that do not meet lie
apart; two that do meet show nothing either way. Nothing is tested here: campaigns are not interleaved, so what differs
between them may be the machine, the hour or the change, and it is said so.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from kvtrial.analysis import answer
from kvtrial.analysis.campaign import Campaign
from kvtrial.analysis.report.conditions import gpus_text
from kvtrial.analysis.summaries import judge
from kvtrial.record.record import RunRecord
from kvtrial.record.verdict import BreakEven, ComparisonResult, Verdict
from kvtrial.record.version import SCHEMA_VERSION

CELL_CHARACTERS = 48
LONGEST = 100_000
ALONE_SHOWN_MAX = 8
NAMED_MAX = 8
Bounds = tuple[float | None, float | None]
MEETING = {True: "intervals apart", False: "intervals meet", None: ""}
NOT_INTERLEAVED = "Campaigns are not interleaved: what differs may be the machine or the hour as well as the change."


class Side(Struct, frozen=True):
    """One campaign's answer. `…_of`: the arms, of the break-even and of the delta, whose phase it names, too.

    `break_even_how`: found by a sweep or computed, where it is a share with bounds. `onsets`: of each run by itself.
    """

    campaign: str
    protocol: str
    evidence: str | None
    verdict: str
    reason: str
    runs: str
    gates: str
    break_even: str = ""
    delta_ttft_seconds: float | None = None
    onset: int | None = None
    break_even_of: str = ""
    break_even_how: str = ""
    break_even_low: float | None = None
    break_even_high: float | None = None
    delta_of: str = ""
    onsets: list[int] = []


class Pair(Struct, frozen=True):
    """One comparison in both: None where a campaign has none such. `apart`: their intervals do not meet."""

    arm: str
    against: str
    phase: str
    metric: str
    a: ComparisonResult | None
    b: ComparisonResult | None
    apart: bool | None


class Difference(Struct, frozen=True):
    """A pin, a gate's state or a size that is not the same in both."""

    what: str
    a: str
    b: str


class Beside(Struct, frozen=True):
    """Two campaigns side by side."""

    schema_version: str
    a: Side
    b: Side
    comparable: list[str]
    comparisons: list[Pair]
    gates: list[Difference]
    pins: list[Difference]
    conditions: list[Difference] = []


def compare_campaigns(first: Path, second: Path) -> Beside:
    """Both campaigns from their records. Raises UnusableInput where one can't be read."""
    (a, made_a), (b, made_b) = map(_read, (first, second))
    return put_beside(a, b, made_a, made_b)


def _read(directory: Path) -> tuple[Verdict, dict[str, str]]:
    """A campaign's verdict and what it was made with, in one reading of its records, a host at a time."""
    judged = judge(directory)
    records = [record for host in judged.records.values() for record in host]
    return judged.verdict, made_with(judged.campaign, records)


def made_with(campaign: Campaign, records: Sequence[RunRecord]) -> dict[str, str]:
    """What a campaign was made with beside its pins: sizes, arms, pairs, prices, seed, version and machines."""
    protocol = campaign.plan.protocol
    pairs = {len({run.pair for run in host.runs if not run.spare}) for host in campaign.plan.hosts}
    machines = {
        "CPUs": [f"{record.conditions.cpus} × {record.conditions.cpu_model}" for record in records],
        "RAM": [answer.bytes_text(record.conditions.ram_total_bytes) for record in records],
        "GPUs": [gpus_text(record.conditions.gpus) or "none" for record in records],
        "kvtrial": [record.kvtrial_version for record in records],
    }
    return {
        "arms": ", ".join(protocol.arms),
        "pairs": ", ".join(map(str, sorted(pairs))),
        "seed": str(campaign.plan.seed),
        "prices": "none" if campaign.prices is None else msgspec.json.encode(campaign.prices).decode(),
        **{f"size {name}": str(value) for name, value in protocol.sizes.items()},
        **{name: "; ".join(sorted(set(values))) or "–" for name, values in machines.items()},
    }


def put_beside(
    a: Verdict, b: Verdict, made_a: Mapping[str, str] | None = None, made_b: Mapping[str, str] | None = None
) -> Beside:
    """Two verdicts side by side; `comparable` says what forbids to lay their differences to one change.

    `made_a`, `made_b`: what each was made with beside its pins (`made_with`).
    """
    pins = _differences(a.recommendation.pins, b.recommendation.pins, skip=("plan_sha256",))
    conditions = _differences(dict(made_a or {}), dict(made_b or {}))
    return Beside(
        schema_version=SCHEMA_VERSION,
        a=_side(a),
        b=_side(b),
        comparable=_comparable(a, b, pins, conditions),
        comparisons=_pairs(a.comparisons, b.comparisons),
        gates=_differences(_states(a), _states(b)),
        pins=pins,
        conditions=conditions,
    )


def _side(verdict: Verdict) -> Side:
    primary, even, ladder = answer.primary_of(verdict.comparisons), verdict.break_even, verdict.ladder
    told = _even(verdict)
    return Side(
        campaign=verdict.campaign,
        protocol=verdict.protocol,
        evidence=verdict.evidence,
        verdict=verdict.verdict,
        reason=verdict.reason,
        runs=answer.runs_text(verdict),
        gates=answer.gates_text(verdict),
        break_even=told.text,
        delta_ttft_seconds=primary.delta_ttft_seconds if primary is not None else None,
        onset=ladder.onset_measured if ladder is not None else None,
        break_even_of=_even_of(even) if even is not None and told.text else "",
        break_even_how=told.how,
        break_even_low=told.low,
        break_even_high=told.high,
        delta_of=f"{primary.phase}, {primary.arm}/{primary.against}" if primary is not None else "",
        onsets=sorted({onset for onset in ladder.onset_by_run if onset is not None}) if ladder is not None else [],
    )


BY_SWEEP = {"none": "found at none of the shares", "every": "found at every share", "unknown": "not told by the sweep"}
"""What stands for a share where a sweep found none."""


class _Told(Struct, frozen=True):
    """A break-even in words, and the interval that two of one kind are held beside each other by."""

    text: str = ""
    how: str = ""
    low: float | None = None
    high: float | None = None


def _even_of(even: BreakEven) -> str:
    length = answer.prefix_length(even)
    return ", ".join(
        filter(None, [f"{even.arm}/{even.against}" if even.arm else "", f"{length} tokens" if length else ""])
    )


def _even(verdict: Verdict) -> _Told:
    """The break-even hit share with its interval, found or computed; no text where none may be named.

    Where shares were swept, what the sweep found is the answer, and no computed share stands in for it.
    """
    even = verdict.break_even
    if even is None or verdict.verdict == "INVALID":
        return _Told()
    how, share = ("computed", even) if even.found is None else ("found", even.found)
    if even.found is not None and even.found.pays in BY_SWEEP:
        return _Told(BY_SWEEP["unknown" if verdict.verdict == "INCONCLUSIVE" else even.found.pays])
    if not answer.share_is_told(share, verdict.verdict):
        return _Told(BY_SWEEP["unknown"] if even.found is not None else "")
    bounds = f"{answer.share_text(share.ci_low)} to {answer.share_text(share.ci_high)}"
    return _Told(f"{how} {answer.share_text(share.hit_share)} ({bounds})", how, share.ci_low, share.ci_high)


def _comparable(a: Verdict, b: Verdict, pins: Sequence[Difference], conditions: Sequence[Difference]) -> list[str]:
    said = []
    if a.campaign == b.campaign:
        said.append("A and B are one campaign")
    if a.protocol != b.protocol:
        said.append(f"the protocols differ ({a.protocol}, {b.protocol}): only comparisons of the same names stand here")
    if a.evidence != b.evidence:
        said.append(f"the evidence differs ({a.evidence}, {b.evidence})")
    if {host.host for host in a.hosts} != {host.host for host in b.hosts}:
        said.append("the hosts differ")
    if len(pins) > 1:
        said.append(f"{len(pins)} pins differ, so no difference belongs to one of them")
    if machines := [entry.what for entry in conditions if entry.what in ("CPUs", "RAM", "GPUs", "kvtrial")]:
        said.append(f"{', '.join(machines)} differ")
    if sizes := [
        entry.what
        for entry in _comparable_conditions(a, b, conditions)
        if entry.what in ASKED_FOR or entry.what.startswith("size ")
    ]:
        more = f" and {len(sizes) - NAMED_MAX} more" if len(sizes) > NAMED_MAX else ""
        said.append(f"what was asked for differs ({', '.join(sizes[:NAMED_MAX])}{more})")
    invalid = [verdict.campaign for verdict in (a, b) if verdict.verdict == "INVALID"]
    if invalid:
        said.append(f"{' and '.join(invalid)} is INVALID: its numbers answer nothing")
    return said


ASKED_FOR = ("arms", "pairs", "prices")


def _comparable_conditions(a: Verdict | Side, b: Verdict | Side, conditions: Sequence[Difference]) -> list[Difference]:
    """Of two protocols what both have: a size that only one of them knows is no difference of the other."""
    if a.protocol == b.protocol:
        return list(conditions)
    return [entry for entry in conditions if "–" not in (entry.a, entry.b)]


def _pairs(first: Sequence[ComparisonResult], second: Sequence[ComparisonResult]) -> list[Pair]:
    mine, theirs = ({_key(item): item for item in items} for items in (first, second))
    found = []
    for key in [*mine, *(key for key in theirs if key not in mine)]:
        a, b = mine.get(key), theirs.get(key)
        arm, against, phase, metric = key[:4]
        found.append(Pair(arm, against, phase, metric, a, b, _apart(a, b)))
    return found


def _key(item: ComparisonResult) -> tuple[str, ...]:
    return item.arm, item.against, item.phase, item.metric, item.against_phase or "", item.effect_scale


def _apart(a: ComparisonResult | None, b: ComparisonResult | None) -> bool | None:
    if a is None or b is None:
        return None
    return _lie_apart((a.ci_low, a.ci_high), (b.ci_low, b.ci_high))


def _lie_apart(a: Bounds, b: Bounds) -> bool | None:
    """Whether two intervals do not meet; None where one has no bounds."""
    (low, high), (other_low, other_high) = a, b
    if not all(map(answer.is_number, (low, high, other_low, other_high))):
        return None
    assert low is not None and high is not None and other_low is not None and other_high is not None
    return high < other_low or other_high < low


def _states(verdict: Verdict) -> dict[str, str]:
    return {
        name: answer.gate_state([result for _, result in results])
        for name, results in answer.gates_by_name(verdict).items()
    }


def _differences(a: dict[str, str], b: dict[str, str], skip: Sequence[str] = ()) -> list[Difference]:
    return [
        Difference(name, a.get(name, "–"), b.get(name, "–"))
        for name in [*a, *(name for name in b if name not in a)]
        if name not in skip and a.get(name) != b.get(name)
    ]


def lines(found: Beside) -> list[str]:
    """The two campaigns as a table for a terminal."""
    a, b = found.a, found.b
    rows = [
        ("", "A", "B", ""),
        ("campaign", a.campaign, b.campaign, ""),
        ("protocol", a.protocol, b.protocol, "" if a.protocol == b.protocol else "differs"),
        ("evidence", a.evidence or "none", b.evidence or "none", "" if a.evidence == b.evidence else "differs"),
        ("verdict", a.verdict, b.verdict, "" if a.verdict == b.verdict else "differs"),
        ("runs", a.runs, b.runs, ""),
    ]
    rows += _numbers(a, b)
    alone = [pair for pair in found.comparisons if pair.a is None or pair.b is None]
    beside, matched = _rows_by_role(alone)
    left = [pair for pair in alone if pair not in matched]
    # A few are shown, and what decides always; very many are two protocols that have little in common.
    hidden = [pair for pair in left if not _decides(pair)] if len(left) > ALONE_SHOWN_MAX else []
    for pair in found.comparisons:
        if pair in hidden or pair in matched:
            continue
        name = f"{pair.phase} {answer.SHORT_NAMES.get(pair.metric, pair.metric)}, {pair.arm}/{pair.against}"
        rows.append((name, _cell(pair.a), _cell(pair.b), MEETING[pair.apart]))
    rows += beside
    rows += [(f"gate {entry.what}", entry.a, entry.b, "differs") for entry in found.gates]
    rows += [
        (entry.what, *_short(entry.a, entry.b), "differs")
        for entry in [*found.pins, *_comparable_conditions(a, b, found.conditions)]
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    table = [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, [*widths, 0], strict=True)).rstrip() for row in rows
    ]
    notes = [*found.comparable]
    if hidden:
        notes.append(f"{len(hidden)} comparisons stand in one of the two alone and are left out here; --json has them")
    return [*table, *(f"Note: {said}." for said in notes), NOT_INTERLEAVED]


def _numbers(a: Side, b: Side) -> list[tuple[str, str, str, str]]:
    """Break-even, delta and onset, each with its arms; no word for what has no interval to compare by."""
    rows = []
    if a.break_even or b.break_even:
        alike = a.break_even_how == b.break_even_how and a.break_even_of == b.break_even_of
        apart = _lie_apart((a.break_even_low, a.break_even_high), (b.break_even_low, b.break_even_high))
        cells = _named((a.break_even_of, a.break_even), (b.break_even_of, b.break_even), "break-even hit share")
        rows.append((*cells, MEETING[apart if alike else None]))
    if a.delta_ttft_seconds is not None or b.delta_ttft_seconds is not None:
        cells = _named((a.delta_of, _delta(a)), (b.delta_of, _delta(b)), "delta_ttft_seconds")
        rows.append((*cells, ""))
    if a.onset is not None or b.onset is not None:
        apart = _lie_apart(_ends(a.onsets), _ends(b.onsets))
        word = {True: "runs' onsets apart", False: "runs' onsets meet", None: ""}[apart]
        rows.append(("onset of preemption", str(a.onset or "–"), str(b.onset or "–"), word))
    return rows


def _ends(values: Sequence[int]) -> Bounds:
    return (values[0], values[-1]) if values else (None, None)


def _named(a: tuple[str, str], b: tuple[str, str], what: str) -> tuple[str, str, str]:
    """(row's name, cell, cell) of two (of what, text); of what is said once where it is the same."""
    if a[0] == b[0] or not (a[1] and b[1]):
        of = a[0] if a[1] else b[0]
        return f"{what}, {of}" if of else what, a[1] or "–", b[1] or "–"
    mine, theirs = (f"{of}: {text}" if of else text for of, text in (a, b))
    return what, mine, theirs


def _decides(pair: Pair) -> bool:
    return any(item is not None and item.role == "primary" for item in (pair.a, pair.b))


def _delta(side: Side) -> str:
    return "" if side.delta_ttft_seconds is None else f"{side.delta_ttft_seconds:+.3f}"


def _rows_by_role(alone: Sequence[Pair]) -> tuple[list[tuple[str, str, str, str]], list[Pair]]:
    """What decides, and the guards of one metric and phase, beside each other where their arms' names part them.

    They are of other treatments, so no word says whether their intervals meet. With the pairs that stand there.
    """
    rows, matched = [], []
    theirs = [pair for pair in alone if pair.b is not None]
    for mine in (pair for pair in alone if pair.a is not None and pair.a.role != "secondary"):
        assert mine.a is not None
        other = next((pair for pair in theirs if pair.b is not None and _alike(mine.a, pair.b)), None)
        if other is None or other.b is None:
            continue
        theirs.remove(other)
        matched += [mine, other]
        names = " beside ".join(f"{item.phase}, {item.arm}/{item.against}" for item in (mine.a, other.b))
        role = "deciding" if mine.a.role == "primary" else "guard"
        name = f"{role} {answer.SHORT_NAMES.get(mine.a.metric, mine.a.metric)}: {names}"
        rows.append((name, _cell(mine.a), _cell(other.b), ""))
    return rows, matched


def _alike(a: ComparisonResult, b: ComparisonResult) -> bool:
    same = (a.role, a.metric, a.effect_scale) == (b.role, b.metric, b.effect_scale)
    return same and (a.role == "primary" or a.phase == b.phase)


def _cell(item: ComparisonResult | None) -> str:
    if item is None:
        return "–"
    word = "within the declared size" if answer.is_within_a_size(item) else item.verdict
    text = f"{answer.effect_text(item)} ({answer.interval_text(item)}) {word}"
    # The row's name has said what is counted.
    return text.replace(f" {item.unit}", "") if item.effect_scale == "difference" else text


def _short(a: str, b: str) -> tuple[str, str]:
    """Two texts that differ, long ones from a little before the first difference on."""
    a, b = (answer.one_line(text, LONGEST) for text in (a, b))
    if max(len(a), len(b)) <= CELL_CHARACTERS:
        return a, b
    same = next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    begin = max(0, same - 12)
    return _from(a, begin), _from(b, begin)


def _from(text: str, begin: int) -> str:
    cut = f"{'…' if begin else ''}{text[begin:]}"
    return answer.one_line(cut, CELL_CHARACTERS)


def as_json(found: Beside) -> str:
    """The same for programs."""
    return msgspec.json.format(msgspec.json.encode(found), indent=1).decode()
