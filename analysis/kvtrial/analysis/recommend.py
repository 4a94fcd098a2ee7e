"""What to do with a verdict, and what it does not say."""

import json
from collections.abc import Mapping, Sequence

from kvtrial.analysis.armchange import declared_alike
from kvtrial.analysis.effect import LEAST_PAIRS, inner_margin, outward
from kvtrial.analysis.ledger import WHAT_TOOK_IT
from kvtrial.record.ladder import TookBy
from kvtrial.record.protocol import Protocol
from kvtrial.record.record import Evidence, RunRecord
from kvtrial.record.verdict import ComparisonResult, Recommendation, Word

CPU_CAVEAT = "CPU engine: the mechanism was shown, the times say nothing about GPUs"
NEVER_PREEMPTED = "no request was preempted"
"""How a host's verdict says that a ladder ended below what it is about."""
NOT_COMBINED = "two hosts are shown, not combined"
"""How a comparison over two hosts says that their words differ."""
NEVER_ASKED = "the treatment was not delivered. No prefix of the trace came back"
"""How the gate treatment_delivered says that a trace left the tier nothing to do."""
STANDIN_CAVEAT = "stand-in engine: tests only"


def recommend(
    protocol: Protocol,
    word: Word,
    reason: str,
    evidence: Evidence | None,
    comparisons: Sequence[ComparisonResult],
    records: Sequence[RunRecord],
    pairs_needed: str = "",
    took: Mapping[str, TookBy] | None = None,
) -> Recommendation:
    """Action, reason and the pins the verdict rests on. `took`: what took the delay of a ladder's arms."""
    took = took or {}
    primary = next((result for result in comparisons if result.role == "primary"), None)
    action, why = _action(protocol, word, reason, evidence, primary, worse_guards(comparisons), pairs_needed, took)
    if primary is not None and action == f"adopt {primary.arm}":
        why += _better_too(protocol, primary, comparisons, took)
    if (
        primary is not None
        and primary.arm in action
        and primary.quality == "not_compared"
        and _answers(protocol, primary)
    ):
        why += f"; {QUALITY_NOT_COMPARED}"
    return Recommendation(action, why, pins_of(protocol, records, primary))


def _action(
    protocol: Protocol,
    word: Word,
    reason: str,
    evidence: Evidence | None,
    primary: ComparisonResult | None,
    worse: Sequence[ComparisonResult],
    pairs_needed: str,
    took: Mapping[str, TookBy],
) -> tuple[str, str]:
    arm = primary.arm if primary else "the variant"
    if word == "INVALID":
        return _mend(reason), reason
    if word == "INCONCLUSIVE":
        return _go_on(reason, pairs_needed, primary), reason
    if primary is not None and _same_arms(protocol, primary):
        return "use this spread to choose the number of pairs", "both arms are one configuration: what differs is noise"
    keep = _keep(protocol, primary)
    if word in ("WORSE", "EQUIVALENT"):
        why = f"{arm} is {'worse' if word == 'WORSE' else 'not worth having: the same within the margin'}"
        if evidence == "cpu":
            why += "; on a CPU engine, so run the same protocol on a GPU host before you decide for one"
        return keep, why
    if primary is not None and primary.metric.startswith("preemptions") and (primary.moved or arm in took):
        return f"do not adopt {arm}", WHAT_TOOK_IT[took.get(arm, "queue")]
    if worse:
        guards = ", ".join(f"{guard.metric} of {guard.phase}" for guard in worse)
        of = f" of {arm}" if len(protocol.arms) > 2 else ""
        return (
            f"do not adopt {arm}",
            f"the primary comparison is BETTER, but guards{of} are WORSE, which forbids adopt: {guards}",
        )
    if evidence == "gpu":
        return f"adopt {arm}", f"{arm} is BETTER by the primary comparison and no guard is WORSE"
    if evidence == "cpu":
        return (
            "run the same protocol on a GPU host",
            f"{arm} is BETTER on a CPU engine, which shows the mechanism and no GPU's times",
        )
    return "run the same protocol on a real engine", "a stand-in shows that the tool works and nothing else"


NOT_COMPARED = "quality: not compared"
QUALITY_NOT_COMPARED = "the answers may differ and their quality was not compared: look at it before you adopt"


def _answers(protocol: Protocol, primary: ComparisonResult) -> bool:
    """Whether an arm declares that its answers may be others."""
    arm = protocol.arms.get(primary.arm)
    return arm is not None and "answer" in arm.may_differ


def _better_too(
    protocol: Protocol,
    primary: ComparisonResult,
    comparisons: Sequence[ComparisonResult],
    took: Mapping[str, TookBy],
) -> str:
    """The other arms that are BETTER by what decided, where nothing compares them with the primary's."""
    of = (primary.metric, primary.phase, primary.against)
    compared = {frozenset((result.arm, result.against)) for result in comparisons}
    arms = [
        result.arm + (f" ({NOT_COMPARED})" if result.quality == "not_compared" and _answers(protocol, result) else "")
        for result in comparisons
        if (result.metric, result.phase, result.against) == of
        and result.verdict == "BETTER"
        and not result.moved
        and result.arm not in took
        and result.arm != primary.arm
        and frozenset((result.arm, primary.arm)) not in compared
    ]
    if not arms:
        return ""
    return f"; {' and '.join(arms)} {'is' if len(arms) == 1 else 'are'} BETTER, too, and not compared with it"


def _mend(reason: str) -> str:
    if NEVER_ASKED in reason:
        return "keep the plain GPU cache for such requests, or replay a trace in which evicted prefixes come back"
    if reason.startswith("gate "):
        return f"mend what gate {reason.split()[1]} found, then run again"
    return "mend the cause, then run again"


def _go_on(reason: str, pairs_needed: str, primary: ComparisonResult | None) -> str:
    if NEVER_PREEMPTED in reason:
        return "raise the ladder, or let the answers grow against the KV cache, then run again"
    # A gate that leaves a verdict open was disturbed on the way.
    if reason.startswith("gate "):
        return "run again, with nothing else at work on the host"
    if "engine fault" in reason:
        return "mend or report the engine fault, then run again"
    if "planned hosts are valid" in reason:
        return "mend the hosts that are not valid, then run again"
    needed = next((part.strip() for part in pairs_needed.split(",") if "needed" in part), "")
    if needed:
        return f"run again with more pairs: {needed}"
    if primary is None or primary.pairs < LEAST_PAIRS:
        return f"run again, with at least {LEAST_PAIRS} valid pairs"
    if NOT_COMBINED in reason:
        return "judge the hosts apart, each by its own verdict: they differ"
    return "run again with more pairs"


def _keep(protocol: Protocol, primary: ComparisonResult | None) -> str:
    """What to keep where the primary comparison shows nothing better: a tier in another arm is not decided by it."""
    control = protocol.arms.get(protocol.control)
    title = control.title if control else protocol.control
    decided = {primary.arm, primary.against} if primary else protocol.arms.keys()
    arms = [arm for name, arm in protocol.arms.items() if name in decided]
    if any("kv-transfer-config" in arm.args or "kv-offloading-size" in arm.args for arm in arms):
        return f"keep the plain GPU cache ({title})"
    return f"keep the control ({title})"


def _same_arms(protocol: Protocol, primary: ComparisonResult) -> bool:
    arm, against = protocol.arms.get(primary.arm), protocol.arms.get(primary.against)
    return primary.arm != primary.against and arm is not None and against is not None and declared_alike(arm, against)


def worse_guards(comparisons: Sequence[ComparisonResult]) -> list[ComparisonResult]:
    """The WORSE guards of the arm that the primary comparison is about: another arm's say nothing about adopting it."""
    arm = next((result.arm for result in comparisons if result.role == "primary"), None)
    return [r for r in comparisons if (r.role, r.verdict) == ("guard", "WORSE") and arm in (None, r.arm)]


def pins_of(protocol: Protocol, records: Sequence[RunRecord], primary: ComparisonResult | None) -> dict[str, str]:
    """What the records were made with; a pin on which they do not agree lists all its values."""
    values: dict[str, set[str]] = {}

    def pin(name: str, value: object) -> None:
        if value not in (None, ""):
            values.setdefault(name, set()).add(str(value))

    for record in records:
        pin("vllm", record.resolved.vllm_version if record.resolved else record.vllm_version_pinned)
        pin("model", record.model.name)
        pin("model_revision", record.model.revision)
        pin("packages_sha256", record.resolved.packages_sha256 if record.resolved else None)
        pin("driver", record.conditions.driver_version)
        pin("kernel", record.conditions.kernel)
        pin("plan_sha256", record.plan_sha256)
        if primary is not None and record.arm == primary.arm:
            declared = protocol.arms.get(record.arm)
            if declared is not None and (declared.args or declared.env or declared.replicas):
                change = {"args": declared.args, "env": declared.env}
                more = {"replicas": declared.replicas} if declared.replicas else {}
                pin(f"arm {record.arm}", json.dumps(change | more, sort_keys=True))
    return {name: ", ".join(sorted(found)) for name, found in values.items()}


def caveats_of(protocol: Protocol, evidence: Evidence | None, comparisons: Sequence[ComparisonResult]) -> list[str]:
    """What the verdict does not say: the evidence, effects too small to see, guards that forbid adopt."""
    said = []
    if evidence == "standin":
        said.append(STANDIN_CAVEAT)
    if evidence == "cpu":
        said.append(CPU_CAVEAT)
    for result in comparisons:
        if result.role == "primary" and result.mde is not None and result.effect_scale == "ratio":
            border = outward(inner_margin(result.margin, "ratio"), "ratio")
            if result.mde > border:
                said.append(
                    f"least detectable effect (80 % power): ×{result.mde:.3g} with {result.pairs} pairs, above the "
                    f"margin of ×{border:.3g}: EQUIVALENT is out of reach with this noise"
                )
    for guard in worse_guards(comparisons):
        arm = f" with {guard.arm}" if len(protocol.arms) > 2 else ""
        said.append(f"guard {guard.metric} of {guard.phase} is WORSE{arm}: adopt is forbidden")
    tested = sum(result.role != "primary" and result.p_value is not None for result in comparisons)
    if tested:
        said.append(
            f"{tested} guard and secondary comparisons stand beside the primary, each at its own "
            "confidence: one of them alone proves little"
        )
    return said
