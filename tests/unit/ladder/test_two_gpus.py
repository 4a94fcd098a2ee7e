"""A second GPU on the ladder: what a request costs in GPU-seconds, and what the launches of replicas may differ in."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from kvtrial.analysis.adopt.decision import _production
from kvtrial.analysis.answer import ten_lines
from kvtrial.analysis.ladder import resources_of
from kvtrial.analysis.levels import gpu_seconds_per_request, gpus_of
from kvtrial.analysis.protocols import load_protocol
from kvtrial.analysis.recommend import _same_arms
from kvtrial.analysis.report.preemption import _levels
from kvtrial.analysis.report.words import Words
from kvtrial.analysis.verdict import conclude
from kvtrial.record.errors import UnusableInput
from kvtrial.record.record import RunRecord
from ladder_build import ladder_protocol, ladder_records
from msgspec.structs import replace

PROTOCOLS = Path(__file__).resolve().parents[3] / "playbooks" / "protocols"
WORDS = Words()
GPU = {"name": "Example GPU", "memory.total": "143771"}


def on_two_gpus(run: RunRecord) -> RunRecord:
    """The run on a host with two GPUs, of which more_kv takes both, as two replicas, and the others one."""
    launch = run.launch
    if run.arm == "more_kv":
        second = replace(launch, port=launch.port + 1, env={**launch.env, "CUDA_VISIBLE_DEVICES": "1"})
        launch = replace(launch, also=[second])
    peaks = [2**34, 2**34 if launch.also else 0]
    samples = replace(run.samples, vram_used_peak_by_gpu_bytes=peaks, vram_foreign_processes=0)
    return replace(run, launch=launch, conditions=replace(run.conditions, gpus=[GPU, GPU]), samples=samples)


def test_gpu_seconds_are_the_arm_s_gpus_times_the_seconds_of_its_levels_for_a_request():
    before, after = ladder_records(), [on_two_gpus(run) for run in ladder_records()]
    for old, run in zip(before, after, strict=True):
        levels = [phase for phase in run.phases if phase.block == "above_onset"]
        gpus = 2 if run.arm == "more_kv" else 1
        assert gpus_of(run) == resources_of(run).gpus == gpus
        expected = gpus * sum(phase.seconds for phase in levels) / sum(phase.finished for phase in levels)
        assert gpu_seconds_per_request(run, "above_onset") == pytest.approx(expected)
        # Without a GPU there is nothing to reckon with.
        assert gpu_seconds_per_request(old, "above_onset") is None


def test_tensor_parallelism_takes_a_gpu_for_each_rank():
    run = on_two_gpus(ladder_records()[0])
    launch = replace(run.launch, argv=[*run.launch.argv, "--tensor-parallel-size", "2"])
    assert gpus_of(replace(run, launch=launch)) == 2


def test_report_and_answer_say_what_a_request_costs():
    records = [on_two_gpus(run) for run in ladder_records()]
    protocol = ladder_protocol()
    verdict = conclude(protocol, {"h1": records}, "c1")
    notes = {arm.arm: _levels(arm, WORDS).caption for arm in verdict.ladder.arms}
    assert "GPU-seconds of a request with GPUs: 2, by requests in flight: " in notes["more_kv"]
    assert "GPU-seconds of a request with GPUs: 1, by requests in flight: " in notes["base"]
    plain = conclude(protocol, {"h1": ladder_records()}, "c1")
    assert not any("GPU-seconds" in _levels(arm, WORDS).caption for arm in plain.ladder.arms)
    change = next(line for line in ten_lines(verdict, "results/c1") if line.startswith("Change: more_kv"))
    assert "on 2 GPUs instead of 1 a request costs " in change
    assert " GPU-seconds at 5 in flight (control " in change and " GPU-seconds at 7 in flight (control " in change
    assert not any("GPU-seconds" in line for line in ten_lines(plain, "results/c1"))


def test_the_protocol_of_two_gpus_compares_the_cost_of_both_arms():
    protocol = load_protocol("preemption_two_gpus", PROTOCOLS)
    assert list(protocol.arms) == ["base", "second_replica", "tensor_parallel"]
    compared = {(item.arm, item.phase) for item in protocol.comparisons if item.metric == "gpu_seconds_per_request"}
    assert compared == {
        (arm, phase) for arm in ("second_replica", "tensor_parallel") for phase in ("above_onset", "ladder")
    }


def test_a_replica_is_no_second_run_of_the_control():
    compared = SimpleNamespace(arm="second_replica", against="base")
    assert not _same_arms(load_protocol("preemption_two_gpus", PROTOCOLS), compared)
    assert _same_arms(load_protocol("preemption_noise", PROTOCOLS), SimpleNamespace(arm="again", against="base"))


def test_an_arm_of_several_engines_can_not_be_pinned_as_one():
    run = next(run for run in map(on_two_gpus, ladder_records()) if run.arm == "more_kv")
    plan = SimpleNamespace(launches={"more_kv": run.launch}, capacity=run.capacity, host="h1")
    with pytest.raises(UnusableInput, match="Arm more_kv is 2 engines on ports of their own"):
        _production(None, SimpleNamespace(plans=[plan]), "more_kv", None)
