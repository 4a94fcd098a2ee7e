"""Each gate that an engine can fail, seen failing on an engine with that fault: one run of each arm."""

import pytest

PLANTED = [
    ("no_load", "", "treatment_delivered", False),
    ("wrong_load_bytes", "", "treatment_delivered", False),
    ("corrupt_on_load", "", "answers_equal", False),
    ("same_answer", "", "answers_equal", None),
    ("local_hits", "", "prefix_evicted", False),
    ("connector_in_control", "", "control_untreated", False),
    ("counter_reset:30", "offload", "counters_monotone", False),
    ("wrong_model_name", "", "model_and_version", False),
    ("wrong_version:0.31.0", "", "model_and_version", False),
    ("short_output", "offload", "prompts_and_outputs_equal", False),
    ("extra_config", "offload", "launch_differs_as_declared", False),
    ("routable_bind", "", "loopback_only", False),
    ("host_register_failed", "offload", "hazards", False),
]


@pytest.mark.parametrize(("fault", "arm", "gate", "passed"), PLANTED, ids=[f"{p[0]}-{p[2]}" for p in PLANTED])
@pytest.mark.usefixtures("nothing_left")
def test_a_planted_fault_fails_its_gate(trial, fault, arm, gate, passed):
    trial = trial(runs=2, faults=fault, fault_arm=arm)
    trial.run()
    result = trial.gate(gate)
    assert result.passed is passed, result
    assert trial.verdict().verdict in ("INVALID", "INCONCLUSIVE")


@pytest.mark.usefixtures("nothing_left")
def test_an_honest_pair_passes_every_gate_but_two_runs_prove_nothing(trial):
    trial = trial(runs=2, slowdown=4)
    trial.run()
    verdict = trial.verdict()
    failed = [gate for gate in verdict.hosts[0].gates if gate.passed is not True and gate.gate != "undisturbed"]
    assert failed == []
    assert verdict.evidence == "standin"
    assert verdict.verdict in ("INCONCLUSIVE", "INVALID")
