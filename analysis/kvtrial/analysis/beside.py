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
from kvtrial.analysis import campaign as campaigns
from kvtrial.analysis.campaign import Campaign
from kvtrial.analysis.report.conditions import gpus_text
from kvtrial.record.record import RunRecord
from kvtrial.record.verdict import ComparisonResult, Verdict
from kvtrial.record.version import SCHEMA_VERSION

CELL_CHARACTERS = 48
LONGEST = 100_000
ALONE_SHOWN_MAX = 8
NAMED_MAX = 8
NOT_INTERLEAVED = "Campaigns are not interleaved: what differs may be the machine or the hour as well as the change."


class Side(Struct, frozen=True):
    """One campaign's answer."""

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
    made = [made_with(campaigns.read_campaign(path), _records(path)) for path in (first, second)]
    return put_beside(campaigns.analyze(first), campaigns.analyze(second), made[0], made[1])


def _records(directory: Path) -> list[RunRecord]:
    return [record for runs in campaigns.read_records(directory).values() for record in runs]


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
    primary = answer.primary_of(verdict.comparisons)
    return Side(
        campaign=verdict.campaign,
        protocol=verdict.protocol,
        evidence=verdict.evidence,
        verdict=verdict.verdict,
        reason=verdict.reason,
        runs=answer.runs_text(verdict),
        gates=answer.gates_text(verdict),
        break_even=_even(verdict),
        delta_ttft_seconds=primary.delta_ttft_seconds if primary is not None else None,
        onset=verdict.ladder.onset_measured if verdict.ladder is not None else None,
    )


BY_SWEEP = {"none": "found at none of the shares", "every": "found at every share", "unknown": "not told by the sweep"}
"""What stands for a share where a sweep found none."""


def _even(verdict: Verdict) -> str:
    """The break-even hit share, found before computed, with its interval; "" where none may be named."""
    even = verdict.break_even
    by_sweep = even.found if even is not None else None
    if by_sweep is not None and by_sweep.pays in BY_SWEEP:
        return BY_SWEEP[by_sweep.pays]
    for found in (by_sweep, even):
        if found is not None and answer.share_is_told(found, verdict.verdict):
            bounds = f"{answer.share_text(found.ci_low)} to {answer.share_text(found.ci_high)}"
            return f"{answer.share_text(found.hit_share)} ({bounds})"
    return ""


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
        entry.what for entry in _in_both(conditions) if entry.what == "arms" or entry.what.startswith("size ")
    ]:
        more = f" and {len(sizes) - NAMED_MAX} more" if len(sizes) > NAMED_MAX else ""
        said.append(f"what was asked for differs ({', '.join(sizes[:NAMED_MAX])}{more})")
    invalid = [verdict.campaign for verdict in (a, b) if verdict.verdict == "INVALID"]
    if invalid:
        said.append(f"{' and '.join(invalid)} is INVALID: its numbers answer nothing")
    return said


def _in_both(conditions: Sequence[Difference]) -> list[Difference]:
    """What both campaigns have: a size that only one protocol knows is no difference of the other."""
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
    bounds = (a.ci_low, a.ci_high, b.ci_low, b.ci_high)
    if not all(map(answer.is_number, bounds)):
        return None
    assert a.ci_low is not None and a.ci_high is not None and b.ci_low is not None and b.ci_high is not None
    return a.ci_high < b.ci_low or b.ci_high < a.ci_low


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
    rows += [
        (name, one or "–", other or "–", "" if one == other else "differs")
        for name, one, other in (
            ("break-even hit share", a.break_even, b.break_even),
            ("delta_ttft_seconds", _delta(a), _delta(b)),
            ("onset of preemption", str(a.onset or ""), str(b.onset or "")),
        )
        if one or other
    ]
    alone = [pair for pair in found.comparisons if pair.a is None or pair.b is None]
    # A few are shown; very many are two protocols that have little in common.
    hidden = alone if len(alone) > ALONE_SHOWN_MAX else []
    for pair in found.comparisons:
        if pair in hidden:
            continue
        word = {True: "intervals apart", False: "intervals meet", None: ""}[pair.apart]
        name = f"{pair.phase} {answer.SHORT_NAMES.get(pair.metric, pair.metric)}, {pair.arm}/{pair.against}"
        rows.append((name, _cell(pair.a), _cell(pair.b), word))
    rows += _rows_by_role(alone)
    rows += [(f"gate {entry.what}", entry.a, entry.b, "differs") for entry in found.gates]
    rows += [(entry.what, *_short(entry.a, entry.b), "differs") for entry in [*found.pins, *_in_both(found.conditions)]]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    table = [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, [*widths, 0], strict=True)).rstrip() for row in rows
    ]
    notes = [*found.comparable]
    if hidden:
        notes.append(f"{len(hidden)} comparisons stand in one of the two alone and are left out here; --json has them")
    return [*table, *(f"Note: {said}." for said in notes), NOT_INTERLEAVED]


def _delta(side: Side) -> str:
    return "" if side.delta_ttft_seconds is None else f"{side.delta_ttft_seconds:+.3f}"


def _rows_by_role(alone: Sequence[Pair]) -> list[tuple[str, str, str, str]]:
    """What decides, and the guards of one metric and phase, beside each other where their arms' names part them."""
    rows = []
    theirs = [pair.b for pair in alone if pair.b is not None]
    for a in (pair.a for pair in alone if pair.a is not None and pair.a.role != "secondary"):
        b = next((item for item in theirs if _alike(a, item)), None)
        if b is None:
            continue
        theirs.remove(b)
        word = {True: "intervals apart", False: "intervals meet", None: ""}[_apart(a, b)]
        names = " beside ".join(f"{item.phase}, {item.arm}/{item.against}" for item in (a, b))
        role = "deciding" if a.role == "primary" else "guard"
        rows.append((f"{role} {answer.SHORT_NAMES.get(a.metric, a.metric)}: {names}", _cell(a), _cell(b), word))
    return rows


def _alike(a: ComparisonResult, b: ComparisonResult) -> bool:
    same = (a.role, a.metric, a.effect_scale) == (b.role, b.metric, b.effect_scale)
    return same and (a.role == "primary" or a.phase == b.phase)


def _cell(item: ComparisonResult | None) -> str:
    if item is None:
        return "–"
    text = f"{answer.effect_text(item)} ({answer.interval_text(item)}) {item.verdict}"
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
