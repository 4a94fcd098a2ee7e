"""What an engine does wrong is a result of its arm: recorded with its class, the other runs done, nothing left."""

import pytest
from kvtrial.record.oom import SENTENCES

FAULTS = [
    ("die_after:1", "offload", "engine_died"),
    ("die_after:20", "offload", "engine_died"),
    ("engine_dead_after:20", "offload", "engine_dead"),
    ("deadlock_after:20", "offload", "deadlock"),
    ("fail_start", "offload", "engine_died_at_start"),
    ("abort_requests:20", "control", "requests_failed"),
    ("routable_bind", "control", "routable_bind"),
]


@pytest.mark.parametrize(("fault", "arm", "name"), FAULTS, ids=[f[0] for f in FAULTS])
@pytest.mark.usefixtures("nothing_left")
def test_an_engine_fault_is_recorded_and_the_rest_is_done(trial, fault, arm, name):
    # The watchdog is to see a deadlock before the idle timeout ends the requests.
    limits = {"deadlock_seconds": 1.0, "idle_timeout_seconds": 30.0} if name == "deadlock" else {}
    trial = trial(runs=2, faults=fault, fault_arm=arm, limits=limits)
    trial.run()
    records = trial.records()
    assert len(records) == 2
    faulty = [record for record in records if record.arm == arm]
    assert {record.outcome for record in faulty} == {"engine_fault"}
    assert {record.fault.fault for record in faulty} == {name}
    assert all(record.fault.log_tail for record in faulty)
    if name == "deadlock":
        [failed] = {frozenset(record.phases[-1].errors) for record in faulty}
        assert failed == {"deadlock"}, "every request that was in flight or still to come, and none dropped"
    assert {record.outcome for record in records if record.arm != arm} == {"completed"}
    verdict = trial.verdict()
    assert verdict.verdict != "BETTER"
    assert verdict.hosts[0].runs.engine_faults == 1
    assert name in verdict.reason


@pytest.mark.usefixtures("nothing_left")
def test_a_known_cause_is_named_with_its_fix(trial):
    trial = trial(runs=2, faults="fail_start", fault_arm="offload")
    trial.run()
    fault = next(record.fault for record in trial.records() if record.arm == "offload")
    assert "/dev/shm" in fault.cause
    assert fault.fix


@pytest.mark.parametrize(
    ("fault", "name", "says"),
    [
        ("cuda_oom_at_start", "engine_died_at_start", SENTENCES["cuda_at_start"][0]),
        ("cuda_oom_after:20", "engine_dead", SENTENCES["cuda_in_flight"][0]),
    ],
)
@pytest.mark.usefixtures("nothing_left")
def test_cudas_own_error_is_told_from_a_preemption_at_start_and_in_flight(trial, fault, name, says):
    trial = trial(runs=2, faults=fault, fault_arm="offload")
    trial.run()
    fault = next(record.fault for record in trial.records() if record.arm == "offload")
    assert fault.fault == name
    assert fault.cause.startswith(says) and "no preemption" in fault.cause


@pytest.mark.usefixtures("nothing_left")
def test_an_engine_that_never_gets_healthy_ends_at_the_limit(trial):
    trial = trial(runs=1, faults="never_healthy", limits={"start_timeout_seconds": 2.0})
    trial.run()
    assert trial.records()[0].fault.fault == "start_timeout"


@pytest.mark.usefixtures("nothing_left")
def test_an_engine_that_ignores_sigterm_is_killed_with_its_children(trial):
    trial = trial(runs=1, faults="ignore_sigterm,orphan_core", limits={"stop_timeout_seconds": 1.0})
    trial.run()
    assert trial.records()[0].outcome == "completed"
