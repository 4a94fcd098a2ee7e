"""Two campaigns side by side: what each said, how far their effects lie apart, and what they were made with. Pure but
for reading both.

The difference of two effects has an interval only as far as the two intervals tell: two intervals that do not meet lie
apart; two that do meet show nothing either way. Nothing is tested here: campaigns are not interleaved, so what differs
between them may be the machine, the hour or the change, and it is said so.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from kvtrial.analysis import answer
from kvtrial.analysis import campaign as campaigns
from kvtrial.record.verdict import ComparisonResult, Verdict
from kvtrial.record.version import SCHEMA_VERSION

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


def compare_campaigns(first: Path, second: Path) -> Beside:
    """Both campaigns from their records. Raises UnusableInput where one can't be read."""
    return put_beside(campaigns.analyze(first), campaigns.analyze(second))


def put_beside(a: Verdict, b: Verdict) -> Beside:
    """Two verdicts side by side; `comparable` says what forbids to lay their differences to one change."""
    pins = _differences(a.recommendation.pins, b.recommendation.pins, skip=("plan_sha256",))
    return Beside(
        schema_version=SCHEMA_VERSION,
        a=_side(a),
        b=_side(b),
        comparable=_comparable(a, b, pins),
        comparisons=_pairs(a.comparisons, b.comparisons),
        gates=_differences(_states(a), _states(b)),
        pins=pins,
    )


def _side(verdict: Verdict) -> Side:
    return Side(
        campaign=verdict.campaign,
        protocol=verdict.protocol,
        evidence=verdict.evidence,
        verdict=verdict.verdict,
        reason=verdict.reason,
        runs=answer.runs_text(verdict),
        gates=answer.gates_text(verdict),
    )


def _comparable(a: Verdict, b: Verdict, pins: Sequence[Difference]) -> list[str]:
    said = []
    if a.protocol != b.protocol:
        said.append(f"the protocols differ ({a.protocol}, {b.protocol}): only comparisons of the same names stand here")
    if a.evidence != b.evidence:
        said.append(f"the evidence differs ({a.evidence}, {b.evidence})")
    if {host.host for host in a.hosts} != {host.host for host in b.hosts}:
        said.append("the hosts differ")
    if len(pins) > 1:
        said.append(f"{len(pins)} pins differ, so no difference belongs to one of them")
    invalid = [verdict.campaign for verdict in (a, b) if verdict.verdict == "INVALID"]
    if invalid:
        said.append(f"{' and '.join(invalid)} is INVALID: its numbers answer nothing")
    return said


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
    for pair in found.comparisons:
        word = {True: "intervals apart", False: "intervals meet", None: ""}[pair.apart]
        name = f"{pair.phase} {answer.SHORT_NAMES.get(pair.metric, pair.metric)}, {pair.arm}/{pair.against}"
        rows.append((name, _cell(pair.a), _cell(pair.b), word))
    rows += _deciding_rows(found)
    rows += [(f"gate {entry.what}", entry.a, entry.b, "differs") for entry in found.gates]
    rows += [(entry.what, _short(entry.a), _short(entry.b), "differs") for entry in found.pins]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    table = [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, [*widths, 0], strict=True)).rstrip() for row in rows
    ]
    return [*table, *(f"Note: {said}." for said in found.comparable), NOT_INTERLEAVED]


def _deciding_rows(found: Beside) -> list[tuple[str, str, str, str]]:
    """What decides in either campaign, beside each other, where their names keep it in two rows."""
    a = next((pair.a for pair in found.comparisons if pair.a is not None and pair.a.role == "primary"), None)
    b = next((pair.b for pair in found.comparisons if pair.b is not None and pair.b.role == "primary"), None)
    if a is None or b is None or _key(a) == _key(b) or (a.metric, a.effect_scale) != (b.metric, b.effect_scale):
        return []
    word = {True: "intervals apart", False: "intervals meet", None: ""}[_apart(a, b)]
    names = " beside ".join(f"{item.phase}, {item.arm}/{item.against}" for item in (a, b))
    return [(f"deciding {answer.SHORT_NAMES.get(a.metric, a.metric)}: {names}", _cell(a), _cell(b), word)]


def _cell(item: ComparisonResult | None) -> str:
    if item is None:
        return "–"
    text = f"{answer.effect_text(item)} ({answer.interval_text(item)}) {item.verdict}"
    # The row's name has said what is counted.
    return text.replace(f" {item.unit}", "") if item.effect_scale == "difference" else text


def _short(text: str, limit: int = 48) -> str:
    return answer.one_line(text, limit)


def as_json(found: Beside) -> str:
    """The same for programs."""
    return msgspec.json.format(msgspec.json.encode(found), indent=1).decode()
