"""One host's verdict: gates first, then pairs, then effects."""

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from kvtrial.analysis.compare import Compared, compare
from kvtrial.analysis.effect import LEAST_PAIRS, Interval
from kvtrial.analysis.faults import MAX_PAIR_GAP_SECONDS, Pairs, completed_runs, sort_pairs
from kvtrial.analysis.gates import GateContext, run_gates
from kvtrial.analysis.gates.answers import AnswersEqual, compare_answers, wrong_answers
from kvtrial.analysis.gates.context import read_parameters
from kvtrial.analysis.levels import phases_of, risen
from kvtrial.analysis.metrics import WHOLE_RUN
from kvtrial.analysis.recommend import NEVER_PREEMPTED
from kvtrial.record.plan import LadderPlan
from kvtrial.record.protocol import Comparison, Protocol
from kvtrial.record.record import RunRecord
from kvtrial.record.verdict import ComparisonResult, GateResult, HostVerdict, Quality, RunCounts, Word


class HostOutcome(Struct, frozen=True):
    """A host's verdict with what it rests on: pairs, and the intervals of the comparisons in the protocol's order."""

    verdict: HostVerdict
    pairs: Pairs
    intervals: list[Interval | None]

    @property
    def counts(self) -> bool:
        """Whether the host takes part in the fleet's answer."""
        disturbed = any(gate.disturbed for gate in self.verdict.gates)
        shown = self.verdict.verdict != "INVALID" and not self.verdict.reason.startswith(NEVER_PREEMPTED)
        return shown and len(self.pairs.valid) >= LEAST_PAIRS and not disturbed


def judge_host(
    protocol: Protocol,
    host: str,
    records: Sequence[RunRecord],
    planned_runs: Mapping[int, int] | None = None,
    max_pair_gap_seconds: float = MAX_PAIR_GAP_SECONDS,
    ladder: LadderPlan | None = None,
) -> HostOutcome:
    """One host's verdict. `planned_runs`: pair number → runs, without spares; None: as the records show.

    `ladder`: the host's ladder as planned, where the plan is known.
    """
    arms = list(protocol.arms)
    if planned_runs is None:
        numbers = {record.pair for record in records if not record.spare}
        planned_runs = {number: len(arms) for number in sorted(numbers)}
    pairs = sort_pairs(records, arms, planned_runs, max_pair_gap_seconds)
    faulted = [record for record in records if record.outcome == "engine_fault"]
    context = GateContext(protocol, host, pairs, completed_runs(records, pairs), faulted, ladder)
    gates = run_gates(context)
    pairs = _with_wrong_answers(context)
    compared = [compare(c, protocol, pairs.valid, _quality(context, c, gates)) for c in protocol.comparisons]
    compared = [
        _explained(context, declared, found) for declared, found in zip(protocol.comparisons, compared, strict=True)
    ]
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
    verdict = HostVerdict(host, word, reason, gates, counts, with_moved(agreeing(results, word)))
    return HostOutcome(verdict, pairs, [found.interval for found in compared])


def without_effect(result: ComparisonResult, word: Word, note: str) -> ComparisonResult:
    """The comparison with its raw values but no effect: from what is invalid no number is drawn."""
    return replace(
        result, effect=None, ci_low=None, ci_high=None, confidence=None, p_value=None, mde=None,
        delta_ttft_seconds=None, heterogeneity=None, verdict=word, note=note,
    )  # fmt: skip


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
    undecided = [gate for gate in gates if gate.undecided and not gate.disturbed]
    disturbed = [gate for gate in gates if gate.disturbed]
    if failed:
        more = f" (and {len(failed) - 1} more: {', '.join(gate.gate for gate in failed[1:])})" if failed[1:] else ""
        faults = f"; engine faults: {pairs.describe_faults()}" if pairs.engine_faults else ""
        return "INVALID", f"gate {failed[0].gate} failed: {failed[0].detail}{more}{faults}"
    planned = len(pairs.valid) + len(pairs.dropped) + len(pairs.engine_faulted)
    numbers = (
        f"{len(pairs.valid)} of {planned} pairs are valid, at least {LEAST_PAIRS} are needed: with fewer the exact "
        f"two-sided test cannot reach p < .05"
    )
    if pairs.engine_faults:
        numbers += f"; engine faults are a result of their arm: {pairs.describe_faults()}"
    if pairs.dropped:
        numbers += f"; dropped: {describe_dropped(pairs)}"
    if undecided and pairs.valid:
        return "INVALID", f"gate {undecided[0].gate} can't be decided: {undecided[0].detail}"
    if disturbed and pairs.valid:
        return "INCONCLUSIVE", f"gate {disturbed[0].gate}: {disturbed[0].detail}"
    if len(pairs.valid) < LEAST_PAIRS:
        return "INCONCLUSIVE", numbers
    primary = _primary(protocol, compared)
    if primary is None:
        return "INCONCLUSIVE", "the protocol has no primary comparison"
    word, reason = primary.verdict, describe(primary)
    if word == "EQUIVALENT" and _never_preempted(primary, pairs):
        return "INCONCLUSIVE", (
            f"{NEVER_PREEMPTED}, neither in {primary.arm} nor in {primary.against}, so nothing is shown of "
            f"{primary.arm}; {reason}"
        )
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


def _never_preempted(primary: ComparisonResult, pairs: Pairs) -> bool:
    """Whether a comparison of preemptions has none to compare."""
    counts = [
        risen(phases_of(pair.runs[arm], primary.phase), "preemptions")
        for pair in pairs.valid
        for arm in (primary.arm, primary.against)
        if arm in pair.runs
    ]
    return primary.metric.startswith("preemptions") and bool(counts) and all(count == 0 for count in counts)


def _primary(protocol: Protocol, compared: Sequence[Compared]) -> ComparisonResult | None:
    return next((found.result for found in compared if found.result.role == "primary"), None)


def describe_dropped(pairs: Pairs) -> str:
    """Dropped pairs in words."""
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


def agreeing(results: Sequence[ComparisonResult], word: Word) -> list[ComparisonResult]:
    """Give the primary comparison the word that was reached, where faults or missing hosts withheld its own."""
    return [
        replace(
            result,
            verdict=word,
            note="; ".join(part for part in (f"{result.verdict} is withheld", result.note) if part),
        )
        if result.role == "primary" and result.verdict != word
        else result
        for result in results
    ]


def with_moved(results: Sequence[ComparisonResult]) -> list[ComparisonResult]:
    """Set `moved`: of a BETTER, whether a time or throughput guard of the same arm is WORSE: the delay only moved."""
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
