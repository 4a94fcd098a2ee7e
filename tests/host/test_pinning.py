"""The client and the engine on CPUs of their own, in every arm alike, and the record says so."""

import os

import pytest
from kvtrial.record.cpulist import as_list

OURS = sorted(os.sched_getaffinity(0))


@pytest.mark.skipif(len(OURS) < 2, reason="one CPU cannot be shared out")
@pytest.mark.usefixtures("nothing_left")
def test_named_cpus_are_the_clients_and_the_engine_has_the_others(trial):
    client, engine = {OURS[0]}, set(OURS[1:])
    trial = trial(runs=2, client_cpus=as_list(client))
    trial.command("start")
    progress = trial.wait(lambda p: p.phase == "populate")
    pid = int((trial.folder.partial / "engine.json").read_text().split('"pid":')[1].split(",")[0])
    assert os.sched_getaffinity(pid) == engine
    assert os.sched_getaffinity(progress.pid) == client
    trial.wait(lambda p: p.state == "finished")
    for record in trial.records():
        assert record.outcome == "completed"
        for phase in record.phases:
            assert (phase.card.pinning, phase.card.cpu_affinity) == ("pinned", sorted(client))


@pytest.mark.usefixtures("nothing_left")
def test_cpus_that_leave_none_to_the_engine_are_a_fault_of_the_environment(trial):
    trial = trial(runs=1, client_cpus=as_list(set(OURS)))
    trial.run()
    [record] = trial.records()
    assert (record.outcome, record.fault.fault) == ("environment_fault", "client_cpus")
    assert f"kvtrial_client_cpus={as_list(set(OURS))} leaves no CPU to the engine" in record.fault.detail


@pytest.mark.usefixtures("nothing_left")
def test_an_engine_that_may_run_anywhere_leaves_no_core_and_the_record_says_so(trial):
    trial = trial(runs=1, phases=("warmup", "populate"))
    trial.run()
    [record] = trial.records()
    assert {phase.card.pinning for phase in record.phases} == {"no core is free of the engine"}
