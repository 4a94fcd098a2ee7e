"""From records to a verdict: gates first, then pairs, then effects, then what to do. Pure; never raises for poor data."""

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from kvtrial.analysis.breakeven import break_even
from kvtrial.analysis.compare import Compared, blank_result, compare
from kvtrial.analysis.effect import LEAST_PAIRS, Interval, decide, outward
from kvtrial.analysis.faults import MAX_PAIR_GAP_SECONDS, Pairs, completed_runs, sort_pairs
from kvtrial.analysis.fleet import LEAST_HOSTS, combine, odd_hosts
from kvtrial.analysis.gates import GateContext, holds, run_gates
from kvtrial.analysis.gates.answers import AnswersEqual, compare_answers, wrong_answers
from kvtrial.analysis.gates.context import read_parameters
from kvtrial.analysis.metrics import WHOLE_RUN, find_metric
from kvtrial.analysis.recommend import caveats_of, recommend
from kvtrial.analysis.timebudget import time_budget
from kvtrial.record.plan import Plan
from kvtrial.record.protocol import Comparison, Protocol
from kvtrial.record.record import Evidence, RunRecord
from kvtrial.record.verdict import (
    BreakEven,
    ComparisonResult,
    GateResult,
    HostVerdict,
    Quality,
    RunCounts,
    Verdict,
    Word,
)
from kvtrial.record.version import SCHEMA_VERSION

LEAST_SHARE_OF_HOSTS = 0.8
_EVIDENCE_ORDER: tuple[Evidence, ...] = ("standin", "cpu", "gpu")


class HostOutcome(Struct, frozen=True):
    """A host's verdict with what it rests on: pairs, and the intervals of the comparisons in the protocol's order."""

    verdict: HostVerdict
    pairs: Pairs
    intervals: list[Interval | None]

    @property
    def counts(self) -> bool:
        """Whether the host takes part in the fleet's answer."""
        return self.verdict.verdict != "INVALID" and len(self.pairs.valid) >= LEAST_PAIRS


def conclude(
    protocol: Protocol,
    records_by_host: Mapping[str, Sequence[RunRecord]],
    campaign: str,
    planned: Plan | None = None,
    own_hit_share: float | None = None,
    margins: Mapping[str, float] | None = None,
    max_pair_gap_seconds: float = MAX_PAIR_GAP_SECONDS,
    install_seconds: float | None = None,
    campaign_seconds: float | None = None,
) -> Verdict:
    """The verdict of a campaign.

    `protocol` as resolved for the campaign; `planned` gives the hosts and runs that should be there (else those that
    are count). `margins`: metric name → margin, in place of the protocol's. `own_hit_share`: the user's share of
    requests that return, 0..1. Raises UnusableInput for a protocol that can't be judged (an unknown gate or metric).
    """
    protocol = _with_margins(protocol, margins or {})
    hosts = _hosts(records_by_host, planned)
    outcomes = {
        host: judge_host(
            protocol, host, records_by_host.get(host, ()), _planned_runs(planned, host), max_pair_gap_seconds
        )
        for host in hosts
    }
    records = [record for host in hosts for record in records_by_host.get(host, ())]
    evidence = least_evidence(records)
    counted = {host: outcome for host, outcome in outcomes.items() if outcome.counts}
    comparisons = _over_hosts(protocol, outcomes, counted)
    word, reason = _top(protocol, outcomes, counted, comparisons)
    if word == "INVALID":
        comparisons = [without_effect(result, "INVALID", reason) for result in comparisons]
    comparisons = _with_moved(comparisons)
    if evidence == "cpu":
        reason += "; shown on a CPU engine: this is about the mechanism, its times say nothing about GPUs"
    pairs_needed = _pairs_needed_note(comparisons)
    return Verdict(
        schema_version=SCHEMA_VERSION,
        campaign=campaign,
        protocol=protocol.name,
        evidence=evidence,
        verdict=word,
        reason=reason,
        comparisons=comparisons,
        hosts=[outcome.verdict for outcome in outcomes.values()],
        gates=_over_hosts_gates(protocol, outcomes),
        recommendation=recommend(protocol, word, reason, evidence, comparisons, records, pairs_needed),
        break_even=_break_even(protocol, outcomes, counted, own_hit_share) if word != "INVALID" else None,
        time_budget=time_budget(records, install_seconds, campaign_seconds) if records else None,
        caveats=[
            *caveats_of(protocol, evidence, comparisons),
            *_pair_caveats(outcomes),
            *_odd_host_caveats(protocol, counted, records_by_host),
        ],
    )


def judge_host(
    protocol: Protocol,
    host: str,
    records: Sequence[RunRecord],
    planned_runs: Mapping[int, int] | None = None,
    max_pair_gap_seconds: float = MAX_PAIR_GAP_SECONDS,
) -> HostOutcome:
    """One host's verdict. `planned_runs`: pair number → runs, without spares; None: what the records themselves show."""
    arms = list(protocol.arms)
    if planned_runs is None:
        numbers = {record.pair for record in records if not record.spare}
        planned_runs = {number: len(arms) for number in sorted(numbers)}
    pairs = sort_pairs(records, arms, planned_runs, max_pair_gap_seconds)
    context = GateContext(protocol, host, pairs, completed_runs(records, pairs))
    gates = run_gates(context)
    pairs = _with_wrong_answers(context)
    compared = [compare(c, protocol, pairs.valid, _quality(context, c, gates)) for c in protocol.comparisons]
    compared = [_explained(context, declared, found) for declared, found in zip(protocol.comparisons, compared, strict=True)]
    word, reason = _host_word(protocol, records, pairs, gates, compared)
    results = [found.result for found in compared]
    if word == "INVALID":
        results = [without_effect(result, "INVALID", reason) for result in results]
    counts = RunCounts(
        planned=sum(planned_runs.values()),
        valid=len(arms) * len(pairs.valid),
        dropped=sum(pair.records for pair in pairs.dropped),
        engine_faults=len(pairs.engine_faults),
    )
    verdict = HostVerdict(host, word, reason, gates, counts, _with_moved(results))
    return HostOutcome(verdict, pairs, [found.interval for found in compared])


def least_evidence(records: Sequence[RunRecord]) -> Evidence | None:
    """The weakest evidence among the records; None without any."""
    kinds = {record.evidence for record in records}
    return next((kind for kind in _EVIDENCE_ORDER if kind in kinds), None)


def without_effect(result: ComparisonResult, word: Word, note: str) -> ComparisonResult:
    """The comparison with its raw values but no effect: from what is invalid no number is drawn."""
    return replace(
        result, effect=None, ci_low=None, ci_high=None, confidence=None, p_value=None, mde=None,
        delta_ttft_seconds=None, heterogeneity=None, verdict=word, note=note,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------- one host


def _host_word(
    protocol: Protocol,
    records: Sequence[RunRecord],
    pairs: Pairs,
    gates: Sequence[GateResult],
    compared: Sequence[Compared],
) -> tuple[Word, str]:
    if not records:
        return "INVALID", "no run left a record"
    failed = [gate for gate in gates if gate.passed is False]
    undecided = [gate for gate in gates if not holds(gate) and gate.passed is None]
    if failed:
        more = f" (and {len(failed) - 1} more: {', '.join(gate.gate for gate in failed[1:])})" if failed[1:] else ""
        return "INVALID", f"gate {failed[0].gate} failed: {failed[0].detail}{more}"
    planned = len(pairs.valid) + len(pairs.dropped) + len(pairs.engine_faulted)
    numbers = (
        f"{len(pairs.valid)} of {planned} pairs are valid, at least {LEAST_PAIRS} are needed: with fewer the exact two-sided "
        f"test cannot reach p < .05"
    )
    if pairs.engine_faults:
        numbers += f"; engine faults are a result of their arm: {pairs.describe_faults()}"
    if pairs.dropped:
        numbers += f"; dropped: {_dropped(pairs)}"
    if undecided and pairs.valid:
        return "INVALID", f"gate {undecided[0].gate} can't be decided: {undecided[0].detail}"
    if len(pairs.valid) < LEAST_PAIRS:
        return "INCONCLUSIVE", numbers
    primary = _primary(protocol, compared)
    if primary is None:
        return "INCONCLUSIVE", "the protocol has no primary comparison"
    word, reason = primary.verdict, describe(primary)
    if pairs.engine_faults:
        reason += f"; engine faults, a result of their arm: {pairs.describe_faults()}"
        if word == "BETTER":
            word = "INCONCLUSIVE"
            reason = f"BETTER is withheld because of engine faults: {pairs.describe_faults()}; {describe(primary)}"
    return word, reason


def describe(result: ComparisonResult) -> str:
    """A comparison's numbers in one sentence."""
    what = f"{result.metric} of {result.phase}, {result.arm} against {result.against}"
    if result.against_phase:
        what += f" ({result.against_phase})"
    if result.effect is None or result.ci_low is None or result.ci_high is None or result.confidence is None:
        return f"{what}: {result.note or 'not measured'}"
    mark = "×" if result.effect_scale == "ratio" else ""
    text = f"{what}: {mark}{result.effect:.4g} [{result.ci_low:.4g}, {result.ci_high:.4g}] at {result.confidence:.1%}"
    p = "" if result.p_value is None else f", p = {result.p_value:.2g}"
    return f"{text}{p}, {result.pairs} pairs" + (f"; {result.note}" if result.note else "")


def _primary(protocol: Protocol, compared: Sequence[Compared]) -> ComparisonResult | None:
    return next((found.result for found in compared if found.result.role == "primary"), None)


def _dropped(pairs: Pairs) -> str:
    return "; ".join(f"pair {pair.number} ({pair.fault}: {pair.detail})" for pair in pairs.dropped)


def _answers_parameters(context: GateContext) -> AnswersEqual | None:
    if "answers_equal" not in context.protocol.gates:
        return None
    parameters = read_parameters(context.protocol, "answers_equal")
    return parameters if isinstance(parameters, AnswersEqual) else None


def _with_wrong_answers(context: GateContext) -> Pairs:
    parameters = _answers_parameters(context)
    wrong = wrong_answers(context.runs, parameters) if parameters else []
    return replace(context.pairs, engine_faults=[*context.pairs.engine_faults, *wrong])


def _quality(context: GateContext, comparison: Comparison, gates: Sequence[GateResult]) -> Quality:
    """Whether the answers are the same; inside the declared divergence budget they count as equal."""
    arms = {comparison.arm, comparison.against}
    if any("answer" in context.protocol.arms[arm].may_differ for arm in arms if arm in context.protocol.arms):
        return "not_compared"
    parameters = _answers_parameters(context)
    gate = next((gate for gate in gates if gate.gate == "answers_equal"), None)
    if gate is not None and parameters is not None and parameters.arm in arms:
        if gate.passed is False:
            return "differs"
        if gate.passed is None:
            return "not_compared"
    if len(arms) < 2 or comparison.against_phase or comparison.phase == WHOLE_RUN:
        return "not_compared"
    if not arms <= set(context.protocol.arms):
        return "not_compared"
    differing, total = compare_answers(context, comparison.arm, comparison.against, comparison.phase)
    budget = parameters.divergence_max_share if parameters else 0.0
    if total == 0:
        return "not_compared"
    return "equal" if differing <= budget * total else "differs"


def _explained(context: GateContext, comparison: Comparison, found: Compared) -> Compared:
    """Say where a phase is missing because it was never planned for this version."""
    for phase in (comparison.phase, comparison.against_phase):
        if found.interval is None and context.runs and phase and phase != WHOLE_RUN:
            absent = context.not_planned(phase)
            if absent is not None:
                return Compared(replace(found.result, note=absent), None)
    return found


# ------------------------------------------------------------------------------------------------------- the fleet


def _top(
    protocol: Protocol,
    outcomes: Mapping[str, HostOutcome],
    counted: Mapping[str, HostOutcome],
    comparisons: Sequence[ComparisonResult],
) -> tuple[Word, str]:
    if not outcomes:
        return "INVALID", "no run left a record"
    if len(outcomes) == 1:
        only = next(iter(outcomes.values())).verdict
        return only.verdict, only.reason
    if all(outcome.verdict.verdict == "INVALID" for outcome in outcomes.values()):
        host, first = next(iter(outcomes.items()))
        return "INVALID", f"all {len(outcomes)} hosts are INVALID; {host}: {first.verdict.reason}"
    left_out = "; ".join(f"{host}: {o.verdict.reason}" for host, o in outcomes.items() if host not in counted)
    if len(counted) < LEAST_SHARE_OF_HOSTS * len(outcomes):
        return "INCONCLUSIVE", (
            f"{len(counted)} of {len(outcomes)} planned hosts are valid, at least {LEAST_SHARE_OF_HOSTS:.0%} are needed; {left_out}"
        )
    primary = next((result for result in comparisons if result.role == "primary"), None)
    if primary is None:
        return "INCONCLUSIVE", "the protocol has no primary comparison"
    word, reason = primary.verdict, f"{describe(primary)}, {len(counted)} of {len(outcomes)} hosts"
    faults = {host: outcome.pairs.describe_faults() for host, outcome in outcomes.items() if outcome.pairs.engine_faults}
    if faults:
        said = "; ".join(f"{host}: {text}" for host, text in faults.items())
        if word == "BETTER":
            return "INCONCLUSIVE", f"BETTER is withheld because of engine faults: {said}; {reason}"
        reason += f"; engine faults: {said}"
    return word, reason + (f"; left out: {left_out}" if left_out else "")


def _over_hosts(
    protocol: Protocol, outcomes: Mapping[str, HostOutcome], counted: Mapping[str, HostOutcome]
) -> list[ComparisonResult]:
    if len(outcomes) == 1:
        return list(next(iter(outcomes.values())).verdict.comparisons)
    return [_combined(protocol, index, comparison, counted) for index, comparison in enumerate(protocol.comparisons)]


def _combined(
    protocol: Protocol, index: int, comparison: Comparison, counted: Mapping[str, HostOutcome]
) -> ComparisonResult:
    """One comparison over the hosts that count."""
    results = {host: outcome.verdict.comparisons[index] for host, outcome in counted.items()}
    intervals = {host: outcome.intervals[index] for host, outcome in counted.items()}
    known = {host: interval for host, interval in intervals.items() if interval is not None and interval.sd is not None}
    blank = blank_result(comparison, protocol, _worst_quality(results.values()))
    if len(known) < len(counted) or not known:
        lacking = ", ".join(host for host in counted if host not in known) or "every host"
        return replace(blank, note=f"no effect on {lacking}")
    if len(known) == 1:
        return replace(next(iter(results.values())), heterogeneity=None)
    if len(known) < LEAST_HOSTS:
        return _two_hosts(blank, comparison, results, known)
    combined = combine(list(known.values()))
    interval = combined.interval
    word, note = decide(interval, blank.margin, comparison.effect_scale, find_metric(comparison.metric).better)
    missing = [host for host, result in results.items() if "is missing in" in result.note]
    if missing:
        word, note = "INCONCLUSIVE", f"values are missing on {', '.join(missing)}"
    note = note.split(", more than")[0] if word == "INCONCLUSIVE" else note
    return replace(
        blank,
        effect=outward(interval.estimate, comparison.effect_scale),
        ci_low=outward(interval.low, comparison.effect_scale),
        ci_high=outward(interval.high, comparison.effect_scale),
        confidence=interval.confidence,
        p_value=interval.p_value,
        pairs=interval.pairs,
        verdict=word,
        note=note,
        delta_ttft_seconds=_mean_delta(results.values()),
        heterogeneity={"tau2": combined.tau2, "I2": combined.i2, "q": combined.q},
    )


def _two_hosts(
    blank: ComparisonResult,
    comparison: Comparison,
    results: Mapping[str, ComparisonResult],
    known: Mapping[str, Interval],
) -> ComparisonResult:
    """Two hosts have no estimable spread between them: both are shown, and only agreement is a verdict."""
    words = {host: result.verdict for host, result in results.items()}
    agree = len(set(words.values())) == 1
    shown = ", ".join(f"{host} {word}" for host, word in words.items())
    intervals = list(known.values())
    return replace(
        blank,
        effect=outward(sum(interval.estimate for interval in intervals) / len(intervals), comparison.effect_scale),
        ci_low=outward(min(interval.low for interval in intervals), comparison.effect_scale),
        ci_high=outward(max(interval.high for interval in intervals), comparison.effect_scale),
        confidence=min(interval.confidence for interval in intervals),
        pairs=sum(interval.pairs for interval in intervals),
        verdict=next(iter(words.values())) if agree else "INCONCLUSIVE",
        note=f"two hosts are shown, not combined ({shown}); the interval spans both",
        delta_ttft_seconds=_mean_delta(results.values()),
    )


def _mean_delta(results: Sequence[ComparisonResult] | object) -> float | None:
    found = [r.delta_ttft_seconds for r in results if r.delta_ttft_seconds is not None]  # type: ignore[attr-defined]
    return sum(found) / len(found) if found else None


def _worst_quality(results: object) -> Quality:
    found = {r.quality for r in results}  # type: ignore[attr-defined]
    if "differs" in found:
        return "differs"
    return "equal" if found == {"equal"} else "not_compared"


def _over_hosts_gates(protocol: Protocol, outcomes: Mapping[str, HostOutcome]) -> list[GateResult]:
    """Each gate over all hosts: failed where it failed on one, undecided where it is undecided on one."""
    results = []
    for name in protocol.gates:
        found = [(host, gate) for host, o in outcomes.items() for gate in o.verdict.gates if gate.gate == name]
        bad = [item for item in found if item[1].passed is False] or [item for item in found if item[1].passed is None]
        if not found:
            results.append(GateResult(name, None, "no host left a record"))
        elif len(found) == 1:
            results.append(found[0][1])
        elif bad:
            said = "; ".join(f"{host}: {gate.detail}" for host, gate in bad[:3])
            results.append(GateResult(name, bad[0][1].passed, f"on {len(bad)} of {len(found)} hosts: {said}"))
        else:
            results.append(GateResult(name, True, f"on all {len(found)} hosts; {found[0][0]}: {found[0][1].detail}"))
    return results


def _break_even(
    protocol: Protocol, outcomes: Mapping[str, HostOutcome], counted: Mapping[str, HostOutcome], own: float | None
) -> BreakEven | None:
    """Over the pairs of all hosts that count; a pair is a pair whichever host it ran on."""
    declared = protocol.break_even
    if not {"arm", "against", "hit", "miss"} <= declared.keys():
        return None
    pairs = [pair for outcome in (counted or outcomes).values() for pair in outcome.pairs.valid]
    return break_even(pairs, declared["arm"], declared["against"], declared["hit"], declared["miss"], own)


# ------------------------------------------------------------------------------------------------------- the rest


def _with_moved(results: Sequence[ComparisonResult]) -> list[ComparisonResult]:
    """Set `moved`: a BETTER whose delay turned up elsewhere, in a time or throughput guard of the same arm that is WORSE."""
    return [replace(result, moved=_moved(result, results)) for result in results]


def _moved(result: ComparisonResult, results: Sequence[ComparisonResult]) -> bool | None:
    if result.verdict != "BETTER":
        return None
    others = [
        other
        for other in results
        if other.role != "secondary" and other is not result and other.arm == result.arm and "second" in other.unit
    ]
    if not others:
        return None
    return any(other.verdict == "WORSE" for other in others)


def _with_margins(protocol: Protocol, margins: Mapping[str, float]) -> Protocol:
    for name in margins:
        find_metric(name)
    changed = [replace(c, margin=margins[c.metric]) if c.metric in margins else c for c in protocol.comparisons]
    return replace(protocol, comparisons=changed)


def _hosts(records_by_host: Mapping[str, Sequence[RunRecord]], planned: Plan | None) -> list[str]:
    named = [] if planned is None else [host.host for host in planned.hosts]
    return [*named, *(host for host in records_by_host if host not in named)]


def _planned_runs(planned: Plan | None, host: str) -> dict[int, int] | None:
    part = None if planned is None else next((entry for entry in planned.hosts if entry.host == host), None)
    if part is None:
        return None
    runs: dict[int, int] = {}
    for run in part.runs:
        if not run.spare:
            runs[run.pair] = runs.get(run.pair, 0) + 1
    return runs


def _pairs_needed_note(comparisons: Sequence[ComparisonResult]) -> str:
    primary = next((result for result in comparisons if result.role == "primary"), None)
    return primary.note if primary is not None and primary.verdict == "INCONCLUSIVE" else ""


def _pair_caveats(outcomes: Mapping[str, HostOutcome]) -> list[str]:
    said = []
    for host, outcome in outcomes.items():
        if outcome.pairs.dropped:
            said.append(f"{host}: dropped for faults of the environment: {_dropped(outcome.pairs)}")
        if outcome.pairs.engine_faults:
            said.append(f"{host}: engine faults: {outcome.pairs.describe_faults()}")
        if outcome.pairs.spares_unused:
            said.append(f"{host}: spare pairs ran that replace nothing and are not counted: {outcome.pairs.spares_unused}")
    return said


def _odd_host_caveats(
    protocol: Protocol, counted: Mapping[str, HostOutcome], records_by_host: Mapping[str, Sequence[RunRecord]]
) -> list[str]:
    index = next((i for i, c in enumerate(protocol.comparisons) if c.role == "primary"), None)
    if index is None:
        return []
    scale = protocol.comparisons[index].effect_scale
    intervals = {host: interval for host, o in counted.items() if (interval := o.intervals[index]) is not None}
    classes = {host: _class_of(records_by_host[host][0]) for host in intervals}
    return [
        f"{odd.host} is the odd host: its effect {outward(intervals[odd.host].estimate, scale):.4g} lies {odd.deviation:+.1f} "
        f"standard errors from the others' (p = {odd.p_value:.2g}, false discovery rate 5 % over {len(intervals)} hosts)"
        for odd in odd_hosts(intervals, classes)
    ]


def _class_of(record: RunRecord) -> str:
    gpus = ", ".join(gpu.get("name", "?") for gpu in record.conditions.gpus)
    return f"{record.conditions.cpu_model} | {gpus}"
