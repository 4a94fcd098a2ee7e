"""The gate on counts of preemptions over some records, and records with other counts."""

from kvtrial.analysis.faults import MAX_PAIR_GAP_SECONDS, completed_runs, sort_pairs
from kvtrial.analysis.gates import GateContext, run_gates
from kvtrial.analysis.laddering import PREEMPTIONS_GATE, with_ladder_gates
from msgspec.structs import replace


def judged(records, protocol):
    arms = list(protocol.arms)
    pairs = sort_pairs(records, arms, {n: len(arms) for n in {r.pair for r in records}}, MAX_PAIR_GAP_SECONDS)
    context = GateContext(with_ladder_gates(protocol), "h1", pairs, completed_runs(records, pairs))
    return next(result for result in run_gates(context) if result.gate == PREEMPTIONS_GATE)


def recounted(records, count, arm="base", pairs=None, books=True):
    """Records with other counts in an arm's levels: `count` of the one that was. `books`: the engine's others too."""
    found = []
    for run in records:
        if run.arm != arm or (pairs and run.pair not in pairs):
            found.append(run)
            continue
        total, phases = run.phases[0].before["preemptions"], []
        for phase in run.phases:
            was = round(phase.after["preemptions"] - phase.before["preemptions"])
            now = count(was) if phase.ledger is not None else was
            before, after = {**phase.before, "preemptions": total}, {**phase.after, "preemptions": total + now}
            line = phase.pressure
            if books:
                line = [p if p.preemptions is None else replace(p, preemptions=min(p.preemptions, now)) for p in line]
                if after.get("request_preemptions_sum") is not None:
                    before["request_preemptions_sum"], after["request_preemptions_sum"] = total, total + now
            total += now
            phases.append(replace(phase, before=before, after=after, pressure=line))
        found.append(replace(run, phases=phases))
    return found
