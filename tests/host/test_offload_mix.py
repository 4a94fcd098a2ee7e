"""A whole offload_mix campaign by the host program on the stand-in engine: sweep, saturation, trace."""

import json
import shutil
from pathlib import Path

import pytest
from kvtrial.analysis.campaign import prepare, read_campaign
from kvtrial.analysis.faults import sort_pairs
from kvtrial.analysis.gates import GateContext, run_gates
from kvtrial.analysis.inputs import read_request
from kvtrial.analysis.plan import make_plan, requested_protocol
from msgspec.structs import replace
from trial import Trial, request_for

MIX = {
    "prompt_tokens": 144,
    "tier_bytes": 67108864,
    "targets": 8,
    "pressure": 8,
    "warmups": 7,
    "misses": 4,
    "mix_requests": 8,
    "arrivals_per_minute": 1800,
    "mix_output_tokens": 4,
}
CHUNKS_TOKENS = 128
"""Whole chunks of 64 in a prompt of 144."""


def phase_of(record, name):
    return next(phase for phase in record.phases if phase.name == name)


@pytest.mark.usefixtures("nothing_left")
def test_a_sweep_loads_exactly_the_declared_share_and_passes_its_gates(trial):
    trial = trial(runs=2, protocol="offload_mix", sizes=MIX)
    trial.run()
    records = trial.records()
    assert [record.outcome for record in records] == ["completed"] * 2
    offload = next(record for record in records if record.arm == "offload")
    for percent in (0, 25, 50, 75, 100):
        phase = phase_of(offload, f"mix_{percent:02d}")
        tokens = phase.after["prompt_tokens_external"] - phase.before["prompt_tokens_external"]
        assert tokens == percent * 8 // 100 * CHUNKS_TOKENS
        assert phase.after["load_bytes"] - phase.before["load_bytes"] == tokens * 4096
        assert (phase.concurrency, phase.arrivals) == (None, "Poisson, 30 a second")
        assert phase.open_loop is not None
        assert phase.ttft_mean_seconds is not None
    verdict = trial.verdict()
    # How busy this machine is says nothing of the protocol: it is not the stand-in's to answer.
    timed = ("undisturbed", "client_honest", "conditions_equal", "keeps_up")
    failed = [gate for gate in verdict.hosts[0].gates if gate.passed is not True and gate.gate not in timed]
    assert failed == []
    assert verdict.protocol == "offload_mix"


def one_share(tmp_path, faults="", slowdown=2.0, runs=2, **sizes):
    """Runs that hold nothing but the warm-up and the block of one mix: a pair of them, or one."""
    request = read_request(
        request_for(tmp_path, faults, slowdown=slowdown, protocol="offload_mix_share", sizes={**MIX, **sizes})
    )
    plan = make_plan(request, requested_protocol(request))
    kept = [replace(run, phases=[phase for phase in run.phases if phase.block in ("warmup", "mix")])
            for run in plan.hosts[0].runs[:runs]]  # fmt: skip
    return Trial(tmp_path / "campaigns" / "share", plan, kept)


@pytest.mark.usefixtures("trial", "nothing_left")
def test_an_engine_slower_than_the_arrivals_fails_the_gate_on_it(tmp_path):
    trial = one_share(tmp_path, slowdown=15, runs=1, mix_requests=12, hit_share_percent=0, warmups=2)
    trial.run()
    record = trial.records()[0]
    loop = phase_of(record, "mix").open_loop
    assert loop.ttft_mean_second_half_seconds > 2 * loop.ttft_mean_first_half_seconds
    declared = {"keeps_up": trial.plan.protocol.gates["keeps_up"]}
    gate = run_gates(GateContext(replace(trial.plan.protocol, gates=declared), "h1", [], [record]))[0]
    assert gate.passed is False
    assert "the engine did not keep up with the arrivals" in gate.detail


@pytest.mark.usefixtures("trial", "nothing_left")
def test_a_tier_that_loads_nothing_is_no_treatment_in_the_mix(tmp_path):
    trial = one_share(tmp_path, faults="no_load")
    trial.run()
    records = trial.records()
    on = replace(trial.plan.protocol, gates={"treatment_delivered": {"arm": "offload", "phase": "mix"}})
    context = GateContext(on, "h1", sort_pairs(records, list(on.arms)), records)
    gate = run_gates(context)[0]
    assert gate.passed is False
    assert "0 bytes were loaded" in gate.detail


# ------------------------------------------------------------------------------------------------------------ traces


def replay(tmp_path: Path, lines: list[dict[str, object]]) -> Trial:
    """A trial of one pair that replays a trace, prepared as the controller does it and shipped by hand."""
    trace = tmp_path / "requests.jsonl"
    trace.write_text("\n".join(json.dumps(line) for line in lines))
    request = {**request_for(tmp_path, protocol="offload_mix", sizes=MIX), "trace": str(trace)}
    directory = Path(prepare(request)["directory"])
    trial = Trial(tmp_path / "campaigns" / "trace", read_campaign(directory).plan, 2)
    shutil.copytree(directory / "workloads", trial.folder.directory / "workloads")
    return trial


def visits(passes: list[str]) -> list[dict[str, object]]:
    """Eight prompts of 144 tokens, asked for in each pass with that pass's salt; three passes overrun the GPU cache."""
    return [
        {"time": 0.04 * (8 * number + prompt), "prompt_id": f"p{prompt}", "prompt_tokens": 144, "max_tokens": 2}
        | {"salt": salt}
        for number, salt in enumerate(passes)
        for prompt in range(8)
    ]


@pytest.mark.usefixtures("trial", "nothing_left")
def test_a_trace_is_replayed_with_its_salts_kept_apart(tmp_path):
    trial = replay(tmp_path, visits(["tenant-a", "tenant-b", "tenant-a"]))
    trial.run()
    records = trial.records()
    assert [record.outcome for record in records] == ["completed"] * 2
    phases = {record.arm: phase_of(record, "trace") for record in records}
    sources = {
        arm: [phase.after[role] - phase.before[role] for role in
              ("prompt_tokens_computed", "prompt_tokens_local_hit", "prompt_tokens_external")]
        for arm, phase in phases.items()
    }  # fmt: skip
    # Only the third pass finds its own salt again, and the second found nothing of the first.
    assert sources["offload"] == [24 * 144 - 8 * CHUNKS_TOKENS, 0, 8 * CHUNKS_TOKENS]
    assert sources["control"] == [24 * 144, 0, 0]
    assert phases["control"].prompts_sha256 == phases["offload"].prompts_sha256
    assert phases["offload"].arrivals == "as recorded"
    gate = trial.gate("treatment_delivered")
    assert gate.passed is True, gate
    assert "29.6% from the tier, 70.4% recomputed" in gate.detail


@pytest.mark.usefixtures("trial", "nothing_left")
def test_a_trace_whose_salts_never_meet_leaves_the_tier_nothing_to_do(tmp_path):
    trial = replay(tmp_path, visits(["tenant-a", "tenant-b", "tenant-c"]))
    trial.run()
    verdict = trial.verdict()
    gate = trial.gate("treatment_delivered")
    assert gate.passed is False
    assert "neither a gain nor a loss: the treatment was not delivered" in gate.detail
    assert verdict.verdict == "INVALID"
