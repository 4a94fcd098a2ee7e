"""From records to the campaign's verdict: every host by itself, then the fleet, then what to do. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from kvtrial.analysis.breakeven import break_even
from kvtrial.analysis.compare import blank_result
from kvtrial.analysis.drift import NAMED_HOSTS, differences, settings_of
from kvtrial.analysis.effect import Interval, decide, outward
from kvtrial.analysis.faults import MAX_PAIR_GAP_SECONDS, Pair
from kvtrial.analysis.fleet import LEAST_HOSTS, combine
from kvtrial.analysis.gates.conditions import calibration_caveat
from kvtrial.analysis.hostverdict import (
    HostOutcome,
    agreeing,
    describe,
    describe_dropped,
    judge_host,
    with_moved,
    without_effect,
)
from kvtrial.analysis.ladder import host_ladder, no_cost
from kvtrial.analysis.laddering import with_ladder_gates
from kvtrial.analysis.ledger import WHAT_TOOK_IT
from kvtrial.analysis.metrics import find_metric
from kvtrial.analysis.mixes import declared_shares, prompt_tokens, saturated_phases
from kvtrial.analysis.oddhost import class_of, odd_notes, sentences
from kvtrial.analysis.prices import Prices
from kvtrial.analysis.recommend import NEVER_PREEMPTED, caveats_of, recommend
from kvtrial.analysis.regime import regime_of
from kvtrial.analysis.tiers import tier_budget, with_budget
from kvtrial.analysis.timebudget import time_budget
from kvtrial.record.ladder import LadderResult, TookBy
from kvtrial.record.plan import LadderPlan, Plan
from kvtrial.record.protocol import Comparison, Protocol
from kvtrial.record.record import Evidence, RunRecord
from kvtrial.record.verdict import BreakEven, ComparisonResult, GateResult, Quality, Verdict, Word
from kvtrial.record.version import SCHEMA_VERSION

LEAST_SHARE_OF_HOSTS = 0.8
LOST = "unreachable, not planned"
_EVIDENCE_ORDER: tuple[Evidence, ...] = ("standin", "cpu", "gpu")


def conclude(
    protocol: Protocol,
    records_by_host: Mapping[str, Sequence[RunRecord]],
    campaign: str,
    planned: Plan | None = None,
    own_hit_share: float | None = None,
    margins: Mapping[str, float] | None = None,
    max_pair_gap_seconds: float | None = None,
    install_seconds: float | None = None,
    campaign_seconds: float | None = None,
    lost_hosts: Sequence[str] = (),
    prices: Prices | None = None,
) -> Verdict:
    """The verdict of a campaign.

    `protocol` as resolved for the campaign; `planned` gives the hosts and runs that should be there (else those that
    are there count) and the longest gap inside a pair. `margins`: metric name → margin, in place of the protocol's.
    `prices`: the user's, for a ladder. `own_hit_share`: the user's share of requests that return, 0..1. `lost_hosts`:
    hosts that should have been planned and could not be; they count as planned hosts without records. Raises
    UnusableInput for a protocol that can't be judged (an unknown gate or metric), never for records.
    """
    protocol = _with_margins(protocol, margins or {})
    outcomes = {
        host: judge_planned(protocol, host, records_by_host.get(host, ()), planned, max_pair_gap_seconds, prices)
        for host in _hosts(records_by_host, planned)
    }
    return over_fleet(
        protocol, outcomes, records_by_host, campaign, own_hit_share, install_seconds, campaign_seconds, lost_hosts
    )


def judge_planned(
    protocol: Protocol,
    host: str,
    records: Sequence[RunRecord],
    planned: Plan | None,
    max_pair_gap_seconds: float | None = None,
    prices: Prices | None = None,
) -> HostOutcome:
    """One host's outcome by itself, its ladder included. `planned` may hold this host's part alone."""
    protocol = with_ladder_gates(protocol)
    gap = _pair_gap(planned, host) if max_pair_gap_seconds is None else max_pair_gap_seconds
    ladder = _planned_ladder(planned, host)
    outcome = judge_host(protocol, host, records, _planned_runs(planned, host), gap, ladder)
    return _with_ladder(protocol, host, outcome, ladder, prices) if protocol.ladder else outcome


def over_fleet(
    protocol: Protocol,
    outcomes: Mapping[str, HostOutcome],
    records_by_host: Mapping[str, Sequence[RunRecord]],
    campaign: str,
    own_hit_share: float | None = None,
    install_seconds: float | None = None,
    campaign_seconds: float | None = None,
    lost_hosts: Sequence[str] = (),
) -> Verdict:
    """The verdict from the hosts' outcomes. Of records only what a summary keeps is read: no list of requests."""
    protocol = with_ladder_gates(protocol)
    lost = [host for host in lost_hosts if host not in outcomes]
    hosts = list(outcomes)
    outcomes = {**outcomes, **{host: _lost(protocol, host) for host in lost}}
    records = [record for host in hosts for record in records_by_host.get(host, ())]
    evidence = least_evidence(records)
    counted = {host: outcome for host, outcome in outcomes.items() if outcome.counts}
    comparisons = _over_hosts(protocol, outcomes, counted)
    word, reason = _top(protocol, outcomes, counted, comparisons)
    if word == "INVALID":
        comparisons = [without_effect(result, "INVALID", reason) for result in comparisons]
    comparisons = with_moved(agreeing(comparisons, word))
    if protocol.ladder:
        comparisons = with_ledger_moved(comparisons, [outcome.verdict.ladder for outcome in counted.values()])
    if evidence == "cpu" and word != "INVALID":
        shown = "" if word == "INCONCLUSIVE" else "shown on a "
        reason += f"; {shown}CPU engine: this is about the mechanism, its times say nothing about GPUs"
    odd = odd_notes(protocol, counted, records_by_host)
    outcomes |= {
        host: replace(o, verdict=replace(o.verdict, odd=odd[host])) for host, o in counted.items() if host in odd
    }
    pairs_needed = _pairs_needed_note(comparisons)
    budget = tier_budget(protocol, _all_pairs(counted), comparisons) if word != "INVALID" else None
    took = _took([outcome.verdict.ladder for outcome in counted.values()])
    advice = recommend(protocol, word, reason, evidence, comparisons, records, pairs_needed, took)
    if advice.reason in WHAT_TOOK_IT.values() and (of := _said_of(counted, comparisons)):
        advice = replace(advice, reason=f"{advice.reason}; {of}")
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
        recommendation=with_budget(advice, budget, protocol, records, comparisons) if word == "BETTER" else advice,
        break_even=_break_even(protocol, outcomes, counted, own_hit_share) if word != "INVALID" else None,
        time_budget=time_budget(records, install_seconds, campaign_seconds) if records else None,
        tier_budget=budget,
        ladder=_lowest([outcome.verdict.ladder for outcome in outcomes.values()]),
        caveats=[
            *caveats_of(protocol, evidence, comparisons),
            *(f"{host}: {LOST}; it counts as a planned host without records" for host in lost),
            *differences({host: settings_of(records_by_host.get(host, ()), protocol.control) for host in hosts}),
            *_pair_caveats(outcomes),
            *([uncalibrated] if (uncalibrated := calibration_caveat(records)) else []),
            *_saturation_caveats(protocol, records_by_host),
            *sentences(protocol, counted, odd),
        ],
    )


def _with_ladder(
    protocol: Protocol, host: str, outcome: HostOutcome, planned: LadderPlan | None, prices: Prices | None
) -> HostOutcome:
    """The host's outcome with its ladder; none is drawn from what is INVALID."""
    if outcome.verdict.verdict == "INVALID":
        return outcome
    ladder = host_ladder(protocol, host, outcome.pairs.valid, outcome.verdict.comparisons, planned, prices)
    if ladder is None:
        return outcome
    unpriced = no_cost(protocol, outcome.pairs.valid, prices)
    ladder = replace(ladder, regime=regime_of(ladder, protocol.control) + unpriced)
    compared = with_ledger_moved(outcome.verdict.comparisons, [ladder])
    return replace(outcome, verdict=replace(outcome.verdict, ladder=ladder, comparisons=compared))


def with_ledger_moved(
    results: Sequence[ComparisonResult], ladders: Sequence[LadderResult | None]
) -> list[ComparisonResult]:
    """`moved` of the comparisons of preemptions by the ledger: where it is said of a host, it is said."""
    found: dict[str, bool] = {}
    for arm in (arm for ladder in ladders if ladder is not None for arm in ladder.arms):
        if arm.moved is not None:
            found[arm.arm] = found.get(arm.arm, False) or arm.moved
    return [
        replace(result, moved=found[result.arm])
        if result.metric.startswith("preemptions") and result.arm in found
        else result
        for result in results
    ]


def _took(ladders: Sequence[LadderResult | None]) -> dict[str, TookBy]:
    """What took an arm's delay, where that is said of a host; the queue first."""
    said = [arm for ladder in ladders if ladder is not None for arm in ladder.arms if arm.moved_by is not None]
    said.sort(key=lambda arm: arm.moved_by == "queue")
    return {arm.arm: arm.moved_by for arm in said if arm.moved_by is not None}


def _said_of(counted: Mapping[str, HostOutcome], comparisons: Sequence[ComparisonResult]) -> str:
    """Of which of a fleet's hosts it is said that something took the delay of the primary comparison's arm."""
    arm = next((result.arm for result in comparisons if result.role == "primary"), None)
    said = [
        host
        for host, outcome in counted.items()
        if outcome.verdict.ladder is not None
        and any(found.arm == arm and found.moved_by is not None for found in outcome.verdict.ladder.arms)
    ]
    if len(counted) < 2 or not said:
        return ""
    names = ", ".join(said[:NAMED_HOSTS]) + (", …" if len(said) > NAMED_HOSTS else "")
    return f"said of {len(said)} of {len(counted)} hosts: {names}"


def _all_pairs(counted: Mapping[str, HostOutcome]) -> list[Pair]:
    return [pair for outcome in counted.values() for pair in outcome.pairs.valid]


def _lowest(ladders: Sequence[LadderResult | None]) -> LadderResult | None:
    """Of several hosts' ladders the one whose requests are preempted first."""
    known = [ladder for ladder in ladders if ladder is not None]
    return min(known, key=lambda ladder: (ladder.onset_measured is None, ladder.onset_measured or 0), default=None)


def _lost(protocol: Protocol, host: str) -> HostOutcome:
    """The outcome of a host that could not be planned: there is nothing to judge."""
    empty = judge_host(protocol, host, (), {})
    return replace(empty, verdict=replace(empty.verdict, reason=LOST, gates=[]))


def least_evidence(records: Sequence[RunRecord]) -> Evidence | None:
    """The weakest evidence among the records; None without any."""
    kinds = {record.evidence for record in records}
    return next((kind for kind in _EVIDENCE_ORDER if kind in kinds), None)


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
    valid = [outcome.verdict.reason for outcome in outcomes.values() if outcome.verdict.verdict != "INVALID"]
    if valid and all(reason.startswith(NEVER_PREEMPTED) for reason in valid):
        return "INCONCLUSIVE", f"{NEVER_PREEMPTED} on any host; {valid[0]}"
    left_out = "; ".join(f"{host}: {o.verdict.reason}" for host, o in outcomes.items() if host not in counted)
    if len(counted) < LEAST_SHARE_OF_HOSTS * len(outcomes):
        return "INCONCLUSIVE", (
            f"{len(counted)} of {len(outcomes)} planned hosts are valid, at least "
            f"{LEAST_SHARE_OF_HOSTS:.0%} are needed; {left_out}"
        )
    primary = next((result for result in comparisons if result.role == "primary"), None)
    if primary is None:
        return "INCONCLUSIVE", "the protocol has no primary comparison"
    word, reason = primary.verdict, f"{describe(primary)}, {len(counted)} of {len(outcomes)} hosts"
    faults = {
        host: outcome.pairs.describe_faults() for host, outcome in outcomes.items() if outcome.pairs.engine_faults
    }
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
    combined = combine(list(known.values()), [class_of(counted[host]) for host in known])
    interval = combined.interval
    word, note = decide(interval, blank.margin, comparison.effect_scale, find_metric(comparison.metric).better)
    missing = [host for host, result in results.items() if "is missing in" in result.note]
    if missing:
        word, note = "INCONCLUSIVE", f"values are missing on {', '.join(missing)}"
    elif word == "INCONCLUSIVE":
        note = f"{note.rpartition(', ')[0]}, more hosts or more pairs needed"
    return replace(
        blank,
        effect=outward(interval.estimate, comparison.effect_scale),
        ci_low=outward(interval.low, comparison.effect_scale),
        ci_high=outward(interval.high, comparison.effect_scale),
        confidence=interval.confidence,
        p_value=interval.p_value,
        pairs=interval.pairs,
        mde=outward(combined.detectable, comparison.effect_scale),
        verdict=word,
        note=note,
        delta_ttft_seconds=_mean_delta(results.values()),
        heterogeneity={
            "tau2": combined.tau2,
            "I2": combined.i2,
            "q": combined.q,
            "q_p_value": combined.q_p_value,
            "hosts": float(len(known)),
        },
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


def _mean_delta(results: Iterable[ComparisonResult]) -> float | None:
    found = [r.delta_ttft_seconds for r in results if r.delta_ttft_seconds is not None]
    return sum(found) / len(found) if found else None


def _worst_quality(results: Iterable[ComparisonResult]) -> Quality:
    found = {r.quality for r in results}
    if "differs" in found:
        return "differs"
    return "equal" if found == {"equal"} else "not_compared"


def _over_hosts_gates(protocol: Protocol, outcomes: Mapping[str, HostOutcome]) -> list[GateResult]:
    """Each gate over all hosts: failed where it failed on one, undecided where it is undecided on one."""
    results = []
    for name in protocol.gates:
        found = [(host, gate) for host, o in outcomes.items() for gate in o.verdict.gates if gate.gate == name]
        bad = [item for item in found if item[1].passed is False] or [item for item in found if item[1].undecided]
        if not found:
            results.append(GateResult(name, None, "no host left a record"))
        elif len(found) == 1 or not any(gate.required for _, gate in found):
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
    shares = declared_shares(protocol)
    if own is None and len(set(shares.values())) == 1:
        own = next(iter(shares.values()))
    arm, against, hit = declared["arm"], declared["against"], declared["hit"]
    return break_even(pairs, arm, against, hit, declared["miss"], own, shares, prompt_tokens(protocol, hit))


# ------------------------------------------------------------------------------------------------------- the rest


def _with_margins(protocol: Protocol, margins: Mapping[str, float]) -> Protocol:
    for name in margins:
        find_metric(name)
    changed = [replace(c, margin=margins[c.metric]) if c.metric in margins else c for c in protocol.comparisons]
    return replace(protocol, comparisons=changed)


def _hosts(records_by_host: Mapping[str, Sequence[RunRecord]], planned: Plan | None) -> list[str]:
    named = [] if planned is None else [host.host for host in planned.hosts]
    return [*named, *(host for host in records_by_host if host not in named)]


def _pair_gap(planned: Plan | None, host: str) -> float:
    part = None if planned is None else next((entry for entry in planned.hosts if entry.host == host), None)
    return MAX_PAIR_GAP_SECONDS if part is None else part.limits.max_pair_gap_seconds


def _planned_ladder(planned: Plan | None, host: str) -> LadderPlan | None:
    part = None if planned is None else next((entry for entry in planned.hosts if entry.host == host), None)
    return (part.ladder or None) if part else None


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
            said.append(f"{host}: dropped for faults of the environment: {describe_dropped(outcome.pairs)}")
        if outcome.pairs.engine_faults:
            said.append(f"{host}: engine faults: {outcome.pairs.describe_faults()}")
        if outcome.pairs.spares_unused:
            said.append(
                f"{host}: spare pairs ran that replace nothing and are not counted: {outcome.pairs.spares_unused}"
            )
    return said


def _saturation_caveats(protocol: Protocol, records_by_host: Mapping[str, Sequence[RunRecord]]) -> list[str]:
    """Arms that did not keep up with an open loop, where no gate has said so."""
    if "keeps_up" in protocol.gates:
        return []
    return [
        f"{host}: the engine did not keep up with the arrivals, so the size of the effect is a matter of how long the "
        f"phase was: {saturated}"
        for host, records in records_by_host.items()
        for saturated in saturated_phases(record for record in records if record.outcome == "completed")
    ]
