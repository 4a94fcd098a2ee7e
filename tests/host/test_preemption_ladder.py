"""A pair of preemption_ladder by the host program on the stand-in engine: counts, resets, ledger, time line."""

import pytest
import yaml
from kvtrial.analysis.faults import sort_pairs
from kvtrial.analysis.gates import GateContext, run_gates
from kvtrial.analysis.levels import phases_of, risen
from trial import free_port

LADDER = {
    "gpu_blocks": 17,
    "more_gpu_blocks": 33,
    "prompt_tokens": 64,
    "output_tokens": 64,
    "reserve_tokens": 100,
    "warmup_tokens": 4,
    "model_tokens": 512,
}
BLOCKS_A_REQUEST = 4


def ladder(trial, runs=3, **changes):
    return trial(runs=runs, protocol="preemption_ladder", sizes=LADDER, slowdown=2, **changes)


@pytest.mark.usefixtures("nothing_left")
def test_preemption_begins_at_the_predicted_level_and_more_blocks_take_it_away(trial):
    trial = ladder(trial)
    planned = trial.host_plan.ladder
    assert planned.onset["base"].low == 16 // BLOCKS_A_REQUEST + 1
    trial.run()
    runs = {record.arm: record for record in trial.records()}
    assert [run.outcome for run in runs.values()] == ["completed"] * 3
    counts = {
        arm: {phase.concurrency: risen([phase], "preemptions") for phase in phases_of(run, "ladder")}
        for arm, run in runs.items()
    }
    assert all((count > 0) == (level >= 5) for level, count in counts["base"].items())
    assert set(counts["more_kv"].values()) == set(counts["fewer_seqs"].values()) == {0.0}
    for run in runs.values():
        for phase in phases_of(run, "ladder"):
            assert phase.reset.succeeded
            # At least one of the two blocks of its prompt: the last token has to be computed.
            assert phase.reset.marker_hit_tokens >= 32
            assert risen([phase], "prefix_cache_hits_tokens") == 0
            assert {(r.output_tokens, r.max_tokens, r.finish_reason) for r in phase.requests} == {(64, 100, "stop")}
            assert phase.ledger.counted == phase.finished == 8
            for row in phase.ledger.requests:
                assert row.lag_ns + row.first_token_ns + row.normal_gaps_ns + row.stall_gaps_ns == row.e2e_ns
    busiest = phases_of(runs["base"], "above_onset")[-1]
    assert max(point.kv_used_share for point in busiest.pressure) > 0.5
    assert trial.gate("levels_reset").passed is True
    assert trial.gate("prompts_and_outputs_equal").passed is not False


@pytest.mark.usefixtures("nothing_left")
def test_prompts_that_fill_the_pool_queue_and_the_levels_that_do_are_told_from_the_others(trial):
    sizes = LADDER | {"prompt_tokens": 112, "output_tokens": 8, "requests": 8}
    trial = trial(
        runs=1, protocol="preemption_ladder", arms=["more_kv"], ladder=[1, 2, 3, 4, 6, 8], sizes=sizes, slowdown=2
    )
    assert trial.host_plan.ladder.onset["base"].kind == "never"
    trial.run()
    record = trial.records()[0]
    assert [phase.concurrency for phase in phases_of(record, "queueing")] == [6, 8]
    for phase in phases_of(record, "ladder"):
        assert risen([phase], "preemptions") == 0
        assert phase.ledger.next_first_token_ns > 0
    assert phases_of(record, "above_onset") == []


@pytest.mark.usefixtures("nothing_left")
def test_an_engine_that_can_not_be_reset_fails_the_gate_that_proves_it(trial):
    trial = ladder(trial, runs=1, engine_env={"VLLM_SERVER_DEV_MODE": "0"})
    trial.run()
    record = trial.records()[0]
    assert {phase.reset.succeeded for phase in phases_of(record, "ladder")} == {False}
    # One run of one arm is no pair, so the gate is asked about the run itself.
    protocol = trial.plan.protocol
    context = GateContext(protocol, "h1", sort_pairs([record], list(protocol.arms)), [record])
    gate = next(result for result in run_gates(context) if result.gate == "levels_reset")
    assert gate.passed is False
    assert "the reset did not succeed" in gate.detail
    # The set is twice the pool and sent in its order: without the prompt that was sent last nothing would be found.
    assert all(risen([phase], "prefix_cache_hits_tokens") >= 32 for phase in phases_of(record, "ladder"))


@pytest.mark.usefixtures("nothing_left")
def test_a_reset_that_only_claims_success_is_found_out_by_the_prompt_sent_before_it(trial):
    trial = ladder(trial, runs=1, faults="reset_in_name")
    trial.run()
    record = trial.records()[0]
    assert {phase.reset.succeeded for phase in phases_of(record, "ladder")} == {True}
    protocol = trial.plan.protocol
    context = GateContext(protocol, "h1", sort_pairs([record], list(protocol.arms)), [record])
    gate = next(result for result in run_gates(context) if result.gate == "levels_reset")
    assert gate.passed is False
    assert "prompt tokens came from the engine's own prefix cache" in gate.detail


@pytest.mark.usefixtures("nothing_left")
def test_two_replicas_take_what_one_can_not_and_are_one_arm(trial, tmp_path):
    arms = {"second_replica": {"requires": None}}
    own = {"schema_version": "1.0", "name": "preemption_own", "extends": "preemption_ladder", "arms": arms}
    (tmp_path / "preemption_own.yml").write_text(yaml.safe_dump(own))
    trial = trial(
        runs=2, protocol=str(tmp_path / "preemption_own.yml"), arms=["second_replica"], sizes=LADDER, slowdown=2,
        port=free_port() - 1,
    )  # fmt: skip
    planned = trial.host_plan.ladder.onset
    assert (planned["base"].low, planned["second_replica"].low) == (5, 9)
    trial.run()
    runs = {record.arm: record for record in trial.records()}
    assert [run.outcome for run in runs.values()] == ["completed"] * 2
    replicas = runs["second_replica"]
    ports = [engine.port for engine in replicas.launch.engines()]
    assert len(set(ports)) == 2 and {socket.port for socket in replicas.resolved.listening} >= set(ports)
    for phase in phases_of(replicas, "ladder"):
        assert risen([phase], "preemptions") == 0
        assert phase.reset.succeeded
        # Both engines' counters: each request was served by one of them.
        served = risen([phase], "requests_finished_stop")
        assert served == phase.sent == phase.finished == 8
        # Both were asked for the prompt just before the reset.
        assert phase.reset.marker_hit_tokens >= 64
        pages = {path.name for path in (trial.folder.runs / replicas.run / "metrics").glob(f"{phase.name}.*")}
        assert pages == {
            f"{phase.name}.{moment}{number}.prom" for moment in ("before", "after") for number in ("", ".2")
        }
    assert risen(phases_of(runs["base"], "above_onset"), "preemptions") > 0
