"""Every gate passes on an honest campaign and fails on the fault that it is there for."""

import json
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import pytest
from build import (
    add,
    change,
    honest_records,
    protocol,
    with_phase,
    with_requests,
    without_phase,
)
from kvtrial.analysis.answer import gates_text
from kvtrial.analysis.faults import completed_runs, sort_pairs
from kvtrial.analysis.gates import GATES, GateContext, run_gates, validate_gates
from kvtrial.analysis.verdict import conclude
from kvtrial.record.errors import UnusableInput
from kvtrial.record.record import RunRecord, Socket, WatchHit
from kvtrial.record.verdict import GateResult
from msgspec.structs import replace

Records = list[RunRecord]


def judge(records: Records, on=None) -> dict[str, GateResult]:
    on = on or protocol()
    pairs = sort_pairs(records, list(on.arms))
    return {g.gate: g for g in run_gates(GateContext(on, "h1", pairs, completed_runs(records, pairs)))}


def offload(records: Records, how: Callable[[RunRecord], RunRecord], pair: int | None = None) -> Records:
    return change(records, how, arm="offload", **({} if pair is None else {"pair": pair}))


def control(records: Records, how: Callable[[RunRecord], RunRecord], pair: int | None = None) -> Records:
    return change(records, how, arm="control", **({} if pair is None else {"pair": pair}))


def resolved(**fields) -> Callable[[RunRecord], RunRecord]:
    return lambda run: replace(run, resolved=replace(run.resolved, **fields))


def config(path: str, value: object) -> Callable[[RunRecord], RunRecord]:
    return lambda run: replace(run, resolved=replace(run.resolved, config={**run.resolved.config, path: value}))


def argv(*more: str) -> Callable[[RunRecord], RunRecord]:
    return lambda run: replace(run, launch=replace(run.launch, argv=[*run.launch.argv, *more]))


def env(**more: str) -> Callable[[RunRecord], RunRecord]:
    return lambda run: replace(run, launch=replace(run.launch, env=run.launch.env | more))


def conditions(**fields) -> Callable[[RunRecord], RunRecord]:
    return lambda run: replace(run, conditions=replace(run.conditions, **fields))


def samples(**fields) -> Callable[[RunRecord], RunRecord]:
    return lambda run: replace(run, samples=replace(run.samples, **fields))


def card(phase: str, **fields) -> Callable[[RunRecord], RunRecord]:
    def how(run: RunRecord) -> RunRecord:
        found = next(p for p in run.phases if p.name == phase)
        return with_phase(run, phase, card=replace(found.card, **fields))

    return how


def lags(phase: str, seconds: float | None, only: int | None = None) -> Callable[[RunRecord], RunRecord]:
    """The requests of a phase (or only one of them) sent so late."""

    def how(run: RunRecord) -> RunRecord:
        found = next(p for p in run.phases if p.name == phase)
        changed = [
            replace(request, dispatch_lag_seconds=seconds) if only in (None, at) else request
            for at, request in enumerate(found.requests)
        ]
        return with_phase(run, phase, requests=changed)

    return how


def capacity(**fields) -> Callable[[RunRecord], RunRecord]:
    return lambda run: replace(run, capacity=replace(run.capacity, **fields))


def requests(phase: str, **fields) -> Callable[[RunRecord], RunRecord]:
    return lambda run: with_requests(run, phase, lambda request: replace(request, **fields))


def reversed_return(run: RunRecord) -> RunRecord:
    found = next(p for p in run.phases if p.name == "return")
    return with_phase(run, "return", requests=found.requests[::-1])


def restarted(run: RunRecord) -> RunRecord:
    phases = list(run.phases)
    phases[-1] = replace(phases[-1], after=phases[-1].after | {"process_start_time_seconds": 1.0})
    return replace(run, phases=phases)


def fallen(run: RunRecord) -> RunRecord:
    phases = list(run.phases)
    phases[-1] = replace(phases[-1], after=phases[-1].after | {"generation_tokens": 0.0})
    return replace(run, phases=phases)


def store_without_room(run: RunRecord) -> RunRecord:
    found = next(p for p in run.phases if p.name == "return")
    failures = "offload_allocation_failures"
    return with_phase(run, "return", before=found.before | {failures: 0.0}, after=found.after | {failures: 3.0})


def connector_series(run: RunRecord) -> RunRecord:
    return replace(
        run,
        phases=[
            replace(p, before=p.before | {"load_bytes": 0.0}, after=p.after | {"load_bytes": 0.0}) for p in run.phases
        ],
    )


def tampered_tier(run: RunRecord) -> RunRecord:
    return replace(run, capacity=replace(run.capacity, tier_bytes={"offload": 900 * 64 * 4096}))


def wrong_answer(run: RunRecord) -> RunRecord:
    return with_requests(run, "return", lambda request: replace(request, answer_sha256="0" * 64 + request.key))


def first_answers_wrong(run: RunRecord) -> RunRecord:
    """The first prompt's return is wrong; by then the GPU cache has lost it, so no hit was asked for it."""
    found = next(phase for phase in run.phases if phase.name == "return")
    return with_phase(run, "return", requests=[replace(found.requests[0], answer_sha256="0" * 64), *found.requests[1:]])


def all_alike(run: RunRecord) -> RunRecord:
    for phase in ("gpu_hit", "return"):
        run = requests(phase, answer_sha256="same")(run)
    return run


def same_prompts(records: Records) -> Records:
    """Pair 2 sends pair 1's prompts again, in both arms."""
    first = {r.arm: r for r in records if r.pair == 1}

    def how(run: RunRecord) -> RunRecord:
        sha = next(p for p in first[run.arm].phases if p.name == "miss").prompts_sha256
        return with_phase(run, "miss", prompts_sha256=sha)

    return change(records, how, pair=2)


def one_server_for_two_runs(records: Records) -> Records:
    start = (
        next(r for r in records if r.pair == 1 and r.arm == "offload").phases[0].before["process_start_time_seconds"]
    )

    def how(run: RunRecord) -> RunRecord:
        same = {"process_start_time_seconds": start}
        return replace(run, phases=[replace(p, before=p.before | same, after=p.after | same) for p in run.phases])

    return offload(records, how, 2)


@dataclass
class Fault:
    """A planted fault: which gate must fail, how, and what its detail says."""

    gate: str
    name: str
    plant: Callable[[Records], Records]
    says: str
    passed: bool | None = False


FAULTS = [
    Fault(
        "launch_differs_as_declared",
        "an option more in one arm",
        lambda r: offload(r, argv("--max-num-seqs", "4")),
        "--max-num-seqs differs",
    ),
    Fault(
        "launch_differs_as_declared",
        "a variable more in one arm",
        lambda r: offload(r, env(OMP_NUM_THREADS="1")),
        "OMP_NUM_THREADS differs",
    ),
    Fault(
        "launch_differs_as_declared",
        "a resolved field",
        lambda r: offload(r, config("vllm_config.scheduler_config.max_num_seqs", 4)),
        "max_num_seqs is 16",
    ),
    Fault(
        "launch_differs_as_declared",
        "a field changed between runs",
        lambda r: offload(r, config("vllm_config.cache_config.block_size", 16), 4),
        "resolved otherwise in pair 4",
    ),
    Fault(
        "launch_differs_as_declared",
        "a launch changed between runs",
        lambda r: control(r, argv("--seed", "1"), 5),
        "launched otherwise in pair 5",
    ),
    Fault(
        "launch_differs_as_declared",
        "GPU blocks",
        lambda r: offload(r, resolved(cache_config={"num_gpu_blocks": "200"})),
        "num_gpu_blocks is not the same",
    ),
    Fault(
        "launch_differs_as_declared",
        "packages",
        lambda r: offload(r, resolved(packages_sha256="x"), 2),
        "packages_sha256 is not the same",
    ),
    Fault(
        "launch_differs_as_declared",
        "KV layout",
        lambda r: offload(r, resolved(log_facts={"kv_cache_layout": "NHD"})),
        "KV layout LBHNC in control and NHD in offload",
    ),
    Fault(
        "launch_differs_as_declared",
        "nothing was asked",
        lambda r: control(r, lambda run: replace(run, resolved=None)),
        "was not asked",
        None,
    ),
    Fault(
        "launch_differs_as_declared",
        "the declared option is missing",
        lambda r: offload(r, lambda run: replace(run, launch=replace(run.launch, argv=run.launch.argv[:-2]))),
        "is declared, yet both launches have it alike",
    ),
    Fault(
        "model_and_version",
        "another model",
        lambda r: control(r, resolved(served_models=["other"]), 1),
        "kvtrial-model is not among",
    ),
    Fault(
        "model_and_version",
        "another version",
        lambda r: offload(r, resolved(vllm_version="0.31.0")),
        "vLLM 0.31.0, pinned is 0.32.0",
    ),
    Fault(
        "model_and_version",
        "another revision",
        lambda r: offload(r, resolved(model_revision="rev-2"), 3),
        "revision rev-2",
    ),
    Fault(
        "treatment_delivered",
        "one byte short",
        lambda r: offload(r, lambda run: add(run, "return", load_bytes=-4096.0), 3),
        "33,550,336 bytes loaded, but 8,192 external tokens × 4,096 = 33,554,432",
    ),
    Fault(
        "treatment_delivered",
        "nothing loaded, the GPU cache answered",
        lambda r: offload(
            r,
            lambda run: add(
                run,
                "return",
                load_bytes=-33554432.0,
                prompt_tokens_external=-8192.0,
                prompt_tokens_local_hit=8192.0,
                external_prefix_cache_hits_tokens=-8192.0,
            ),
            2,
        ),
        "0 bytes were loaded",
    ),
    Fault(
        "treatment_delivered",
        "hits without tokens",
        lambda r: offload(r, lambda run: add(run, "return", external_prefix_cache_hits_tokens=64.0), 1),
        "8,256 external hit tokens",
    ),
    Fault(
        "treatment_delivered",
        "sources do not add up",
        lambda r: control(r, lambda run: add(run, "miss", prompt_tokens=32.0), 6),
        "is not 6,272 prompt tokens",
    ),
    Fault(
        "treatment_delivered",
        "phase missing",
        lambda r: offload(r, lambda run: without_phase(run, "return"), 1),
        "has no phase return",
        None,
    ),
    Fault(
        "treatment_delivered",
        "not exported",
        lambda r: offload(r, lambda run: with_phase(run, "return", after={})),
        "not exported",
        None,
    ),
    Fault(
        "control_untreated",
        "connector in the control",
        lambda r: control(r, connector_series, 2),
        "load_bytes is exported (0), so a connector is there",
    ),
    Fault(
        "control_untreated",
        "external queries",
        lambda r: control(r, lambda run: add(run, "return", external_prefix_cache_queries_tokens=640.0), 2),
        "640 tokens were asked",
    ),
    Fault(
        "noload_respected",
        "loads in spite of the limit",
        lambda r: offload(r, lambda run: add(run, "noload_return", load_bytes=4096.0), 2),
        "4,096 bytes were loaded",
    ),
    Fault(
        "noload_respected",
        "nothing stored",
        lambda r: offload(
            r,
            lambda run: replace(
                run,
                phases=[
                    replace(p, before=p.before | {"store_bytes": 0.0}, after=p.after | {"store_bytes": 0.0})
                    for p in run.phases
                ],
            ),
            2,
        ),
        "nothing was stored",
    ),
    Fault(
        "noload_respected",
        "phase missing",
        lambda r: offload(r, lambda run: without_phase(run, "noload_return"), 2),
        "not recorded",
        None,
    ),
    Fault(
        "prefix_evicted",
        "one block stayed",
        lambda r: control(r, lambda run: add(run, "return", prefix_cache_hits_tokens=32.0), 4),
        "32 prompt tokens came from the engine's own prefix cache",
    ),
    Fault(
        "working_set", "too little pressure", lambda r: change(r, capacity(usable_gpu_blocks=230)), "planned were 230"
    ),
    Fault(
        "working_set",
        "short pressure prompts",
        lambda r: change(r, requests("pressure", prompt_tokens=800)),
        "under 1.2 × 192",
    ),
    Fault(
        "working_set",
        "tier nearly full",
        lambda r: offload(r, tampered_tier),
        "768 chunks stored, 900 in the tier of offload, more than 0.8",
    ),
    Fault("working_set", "another order", lambda r: change(r, reversed_return), "another order"),
    Fault(
        "working_set",
        "prompts end at a border",
        lambda r: change(r, requests("return", prompt_tokens=1024)),
        "ends at a block's border",
    ),
    Fault(
        "working_set",
        "never populated",
        lambda r: change(r, lambda run: without_phase(run, "populate")),
        "were not populated before",
    ),
    Fault(
        "prompts_and_outputs_equal",
        "other prompts",
        lambda r: offload(r, lambda run: with_phase(run, "miss", prompts_sha256="other"), 5),
        "other prompts than the control's",
    ),
    Fault(
        "prompts_and_outputs_equal",
        "shorter outputs",
        lambda r: offload(r, requests("miss", output_tokens=5), 5),
        "6 outputs are not as long",
    ),
    Fault(
        "prompts_and_outputs_equal",
        "a phase less",
        lambda r: offload(r, lambda run: without_phase(run, "miss"), 5),
        "other phases than the control",
    ),
    Fault("prompts_and_outputs_equal", "prompts of an earlier pair", same_prompts, "the prompts of pair 1 again"),
    Fault("answers_equal", "corrupted load", lambda r: offload(r, wrong_answer, 4), "wrong answers: 4 of 24"),
    Fault(
        "answers_equal",
        "wrong only where no hit was asked",
        lambda r: offload(r, first_answers_wrong),
        "6 of 24 answers of return to prompts that gpu_hit did not ask differ from the control's, 0 of 24 of those",
    ),
    Fault(
        "answers_equal",
        "too far from the control",
        lambda r: control(r, wrong_answer),
        "48 of 48 answers of return differ from the control's",
    ),
    Fault(
        "answers_equal", "a model that always says the same", lambda r: change(r, all_alike), "not discriminating", None
    ),
    Fault("counters_monotone", "a counter fell", lambda r: control(r, fallen, 3), "generation_tokens fell from"),
    Fault(
        "counters_monotone",
        "a page that did not settle",
        lambda r: offload(
            r, lambda run: with_phase(run, "return", metrics_caveats=["/metrics did not settle within 5.0 s"]), 2
        ),
        "return: /metrics did not settle within 5.0 s",
    ),
    Fault("counters_monotone", "a restart", lambda r: control(r, restarted, 3), "was restarted"),
    Fault("counters_monotone", "one server for two runs", one_server_for_two_runs, "used the same server as"),
    Fault(
        "requests_complete",
        "one lost at the server",
        lambda r: control(r, lambda run: add(run, "miss", requests_finished_length=-1.0), 3),
        "finished 6 at the client and 5 at the server",
    ),
    Fault(
        "requests_complete",
        "one failed",
        lambda r: control(
            r, lambda run: with_phase(run, "miss", finished=5, failed=1, errors={"connection_reset": 1}), 3
        ),
        "connection_reset 1",
    ),
    Fault(
        "requests_complete",
        "one aborted",
        lambda r: offload(r, lambda run: add(run, "return", requests_finished_abort=1.0), 3),
        "aborted or in error 1",
    ),
    Fault(
        "client_honest",
        "one run late in the deciding phase",
        lambda r: offload(r, lags("return", 0.001), 1),
        "offload/return (6 runs): dispatch lag p95 1.000 ms, allowed are 0.",
    ),
    Fault(
        "client_honest",
        "one request of every run late in the deciding phase",
        lambda r: offload(r, lags("return", 0.001, only=0)),
        "dispatch lag p95 1.000 ms",
    ),
    Fault(
        "client_honest",
        "late in the deciding phase of a run whose requests are not listed",
        lambda r: offload(offload(r, lags("return", None), 1), card("return", dispatch_lag_p95_seconds=0.001), 1),
        "dispatch lag p95 1.000 ms, allowed are 0.805 ms",
    ),
    Fault(
        "client_honest",
        "late elsewhere",
        lambda r: offload(r, lags("miss", 0.011), 1),
        "allowed are 10.000 ms",
    ),
    Fault(
        "client_honest",
        "no lag recorded",
        lambda r: offload(offload(r, lags("miss", None), 1), card("miss", dispatch_lag_p95_seconds=None), 1),
        "not recorded",
        None,
    ),
    Fault(
        "conditions_equal",
        "governor",
        lambda r: offload(r, conditions(governor="powersave")),
        "governor is not the same",
    ),
    Fault(
        "conditions_equal", "kernel", lambda r: change(r, conditions(kernel="6.2.0"), pair=4), "kernel is not the same"
    ),
    Fault(
        "conditions_equal",
        "huge pages",
        lambda r: offload(r, conditions(transparent_hugepages="always")),
        "huge pages is not the same",
    ),
    Fault(
        "conditions_equal",
        "driver",
        lambda r: change(r, conditions(driver_version="590"), pair=4),
        "driver is not the same",
    ),
    Fault(
        "conditions_equal",
        "clock",
        lambda r: offload(r, samples(cpu_mhz_median=2000.0)),
        "differs between arms by more than 10%",
    ),
    Fault(
        "conditions_equal",
        "busy client",
        lambda r: offload(r, card("miss", client_cpu_share=0.9), 2),
        "used 0.90 of a core",
    ),
    Fault(
        "conditions_equal",
        "client CPU unequal",
        lambda r: offload(
            r,
            lambda run: replace(
                run,
                phases=[
                    replace(p, card=replace(p.card, client_cpu_share=0.5, client_cpu_seconds=0.5 * p.seconds))
                    for p in run.phases
                ],
            ),
        ),
        "client CPU differs between arms",
    ),
    Fault(
        "undisturbed",
        "foreign load",
        lambda r: offload(r, samples(foreign_cpu_share=0.7), 2),
        "foreign processes used 70%",
    ),
    Fault("undisturbed", "steal", lambda r: offload(r, samples(steal_share=0.2), 2), "20% of CPU time was stolen"),
    Fault(
        "undisturbed",
        "somebody on the GPU",
        lambda r: offload(r, samples(vram_foreign_processes=1), 2),
        "foreign processes were on the GPU",
    ),
    Fault(
        "undisturbed", "no samples", lambda r: offload(r, lambda run: replace(run, samples=None), 2), "no samples", None
    ),
    Fault(
        "memory_left",
        "under the reserve",
        lambda r: offload(r, samples(ram_available_min_bytes=2**30), 2),
        "1,073,741,824 bytes of RAM were left, the reserve is 2,147,483,648",
    ),
    Fault(
        "loopback_only",
        "a public socket",
        lambda r: control(r, resolved(listening=[Socket("0.0.0.0", 8000, 1)]), 2),
        "0.0.0.0:8000",
    ),
    Fault("loopback_only", "no socket", lambda r: control(r, resolved(listening=[]), 2), "no listening socket", None),
    Fault(
        "hazards",
        "a watch went off",
        lambda r: offload(
            r, lambda run: replace(run, watch_hits=[WatchHit("tier-not-pinned", "host_register failed")]), 2
        ),
        "watch tier-not-pinned went off",
    ),
    Fault(
        "hazards",
        "a watch on the metrics",
        lambda r: offload(r, store_without_room, 2),
        "watch tier-full went off in return: delta.offload_allocation_failures 3",
    ),
    Fault(
        "hazards",
        "a blocked version",
        lambda r: change(r, lambda run: replace(run, vllm_version_pinned="0.17.1")),
        "blocked:",
    ),
]


def test_the_honest_campaign_passes_every_gate():
    results = judge(honest_records())
    assert [name for name, result in results.items() if not result.holds] == []
    assert list(results) == list(protocol().gates)


def test_the_honest_campaign_says_its_numbers():
    results = judge(honest_records())
    assert "33,554,432 bytes loaded = 8,192 tokens × 4,096" in results["treatment_delivered"].detail
    assert "in 6 of 6 offload runs" in results["treatment_delivered"].detail
    assert "264 blocks = 1.38 × 192" in results["working_set"].detail
    assert "768 chunks stored, 1,024 in the tier" in results["working_set"].detail
    said = "none blocks; 0 guarded in all arms; 7 watched, quiet in 12 runs; 5 more to know when reading"
    assert said in results["hazards"].detail


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.gate}: {fault.name}")
def test_each_gate_fails_on_its_planted_fault(fault):
    records = fault.plant(honest_records())
    result = judge(records)[fault.gate]
    assert result.passed is fault.passed
    assert fault.says in result.detail
    verdict = conclude(protocol(), {"h1": records}, "c1")
    assert verdict.verdict == "INVALID"
    assert verdict.reason.startswith("gate ")
    assert all(c.effect is None and c.verdict == "INVALID" for c in verdict.comparisons)


LADDER_GATES = {"levels_reset", "preemptions_add_up", "server_time_adds_up", "capacity_as_planned", "vram_headroom"}


def test_every_registered_gate_has_a_planted_fault():
    # The open loop's gate is planted in test_analysis_mix.py, those of a ladder in ladder/test_ladder_gates.py.
    assert {fault.gate for fault in FAULTS} == set(GATES) - {"keeps_up"} - LADDER_GATES
    assert set(GATES) == {*protocol().gates, "keeps_up", *LADDER_GATES}


@pytest.mark.parametrize("fault", ["throttle in one arm only"])
def test_throttling_in_one_arm_drops_the_pair_before_any_gate(fault):
    records = change(honest_records(), samples(throttle_events=0))
    records = change(records, samples(throttle_events=3), arm="offload", pair=2)
    pairs = sort_pairs(records, ["control", "offload"])
    assert [(p.number, p.fault) for p in pairs.dropped] == [(2, "throttle_in_one_arm")]


def test_one_late_request_of_an_arms_48_is_within_its_95th_percentile():
    late = lags("return", 0.002, only=3)
    assert judge(offload(honest_records(), late, 1))["client_honest"].holds
    assert not judge(offload(honest_records(), late))["client_honest"].holds


def test_after_a_preemption_bytes_may_exceed_the_tokens_but_not_fall_short():
    more = lambda run: add(run, "return", load_bytes=8192.0, preemptions=1.0)  # noqa: E731
    less = lambda run: add(run, "return", load_bytes=-8192.0, preemptions=1.0)  # noqa: E731
    assert judge(offload(honest_records(), more))["treatment_delivered"].holds
    assert not judge(offload(honest_records(), less))["treatment_delivered"].holds


def test_divergence_from_the_control_inside_the_budget_passes():
    def two_differ(run: RunRecord) -> RunRecord:
        phase = next(p for p in run.phases if p.name == "return")
        changed = [replace(q, answer_sha256="x" + q.key) if i in (0, 7) else q for i, q in enumerate(phase.requests)]
        return with_phase(run, "return", requests=changed)

    result = judge(control(honest_records(), two_differ))["answers_equal"]
    assert result.holds
    assert "12 of 48 differ from the control's" in result.detail


def test_a_hit_that_the_tier_or_the_model_gave_verifies_no_answer():
    def moved(to: str) -> Callable[[RunRecord], RunRecord]:
        amounts = {"prefix_cache_hits_tokens": -64.0, "prompt_tokens_local_hit": -64.0, to: 64.0}
        return lambda run: add(run, "gpu_hit", **amounts)

    for source in ("prompt_tokens_external", "prompt_tokens_computed"):
        records = offload(honest_records(), moved(source))
        result = judge(records)["answers_equal"]
        assert result.passed is None, result
        assert "so gpu_hit verifies nothing" in result.detail
        assert conclude(protocol(), {"h1": records}, "c1").verdict == "INVALID"


def test_a_cache_that_never_answers_does_not_show_that_a_prefix_was_evicted():
    def off(run: RunRecord) -> RunRecord:
        none = {"prefix_cache_hits_tokens": 0.0}
        return replace(run, phases=[replace(p, before=p.before | none, after=p.after | none) for p in run.phases])

    result = judge(change(honest_records(), off))["prefix_evicted"]
    assert result.passed is None
    assert "answered nothing in the whole run; is it on?" in result.detail


def test_an_old_version_has_no_noload_phase_and_that_is_no_failure():
    def old(run: RunRecord) -> RunRecord:
        for phase in ("noload_populate", "noload_pressure", "noload_return"):
            run = without_phase(run, phase)
        run = replace(run, vllm_version_pinned="0.30.0", resolved=replace(run.resolved, vllm_version="0.30.0"))
        return replace(run, launch=replace(run.launch, argv=[*run.launch.argv, "--no-async-scheduling"]))

    records = change(honest_records(), old)
    results = judge(records)
    assert (results["noload_respected"].passed, results["noload_respected"].required) == (None, False)
    assert results["noload_respected"].holds
    assert "not planned: needs vLLM ≥ 0.31" in results["noload_respected"].detail
    assert results["prefix_evicted"].holds
    verdict = conclude(protocol(), {"h1": records}, "c1")
    assert verdict.verdict == "BETTER"
    assert (
        gates_text(verdict)
        == f"{len(results) - 1} of {len(results) - 1} gates passed; not required here: noload_respected"
    )
    within = next(c for c in verdict.comparisons if c.against_phase == "noload_return")
    assert within.effect is None
    assert "not planned" in within.note


def test_a_protocol_resolved_for_an_old_version_still_names_its_gates_phases():
    declared = protocol()
    kept = [phase for phase in declared.phases if phase.block != "noload"]
    comparisons = [c for c in declared.comparisons if c.against_phase is None]
    records = [replace(r, phases=[phase for phase in r.phases if phase.block != "noload"]) for r in honest_records()]
    found = conclude(replace(declared, phases=kept, comparisons=comparisons), {"h1": records}, "c1")
    assert found.verdict == "BETTER"
    result = next(g for g in found.gates if g.gate == "noload_respected")
    assert (result.passed, result.required) == (None, False)
    assert "noload_return is not planned in this protocol for vLLM 0.32.0" in result.detail


def test_a_temporary_directory_of_each_runs_own_is_no_difference():
    def scratch(run: RunRecord) -> RunRecord:
        own = f"/tmp/kvtrial-{run.run}"
        paths = {"vllm_env.VLLM_RPC_BASE_PATH": own, "vllm_env.VLLM_CACHE_ROOT": f"{own}/cache"}
        return replace(run, resolved=replace(run.resolved, config={**run.resolved.config, **paths}))

    records = change(honest_records(), scratch)
    assert judge(records)["launch_differs_as_declared"].holds
    elsewhere = offload(records, config("vllm_env.VLLM_CACHE_ROOT", "/var/cache/vllm"))
    assert "VLLM_CACHE_ROOT" in judge(elsewhere)["launch_differs_as_declared"].detail


def test_a_control_with_a_layout_of_its_own_is_a_known_consequence_on_gpus():
    gpu = change(honest_records(evidence="gpu"), resolved(log_facts={"kv_cache_layout": "LBHNC"}))
    gpu = control(gpu, resolved(log_facts={"kv_cache_layout": "LBNHC"}))
    assert judge(gpu)["launch_differs_as_declared"].holds
    strange = control(gpu, resolved(log_facts={"kv_cache_layout": "NHD"}))
    assert not judge(strange)["launch_differs_as_declared"].holds


def declaring(**fields):
    declared = protocol()
    return replace(declared, arms=declared.arms | {"offload": replace(declared.arms["offload"], **fields)})


def test_an_arm_may_take_out_a_variable_which_must_then_have_been_there():
    without = declaring(env={"VLLM_KV_CACHE_LAYOUT": None})
    pinned = control(honest_records(evidence="gpu"), env(VLLM_KV_CACHE_LAYOUT="HND"))
    pinned = control(pinned, resolved(log_facts={"kv_cache_layout": "HND"}))
    assert judge(pinned, without)["launch_differs_as_declared"].holds
    undeclared = judge(pinned)["launch_differs_as_declared"]
    assert not undeclared.holds and "VLLM_KV_CACHE_LAYOUT differs" in undeclared.detail
    for alike in (honest_records(evidence="gpu"), offload(pinned, env(VLLM_KV_CACHE_LAYOUT="HND"))):
        result = judge(alike, without)["launch_differs_as_declared"]
        assert not result.holds
        assert "environment VLLM_KV_CACHE_LAYOUT is declared, yet both launches have it alike" in result.detail


def test_an_arm_may_take_out_an_option_which_need_not_have_been_there():
    without = declaring(args={**protocol().arms["offload"].args, "max_num_seqs": None})
    given = control(honest_records(), argv("--max-num-seqs", "4"))
    assert judge(given, without)["launch_differs_as_declared"].holds
    assert not judge(given)["launch_differs_as_declared"].holds
    assert judge(honest_records(), without)["launch_differs_as_declared"].holds


def test_prompts_may_differ_where_an_arm_declares_it():
    declared = protocol()
    arms = declared.arms | {"offload": replace(declared.arms["offload"], may_differ=["prompt", "output_length"])}
    loose = replace(declared, arms=arms)
    records = offload(honest_records(), lambda run: with_phase(run, "miss", prompts_sha256="other"))
    records = offload(records, requests("miss", output_tokens=5))
    assert not judge(records)["prompts_and_outputs_equal"].holds
    assert judge(records, loose)["prompts_and_outputs_equal"].holds


def test_a_reboot_between_pairs_is_a_fact_and_no_failure():
    records = change(honest_records(), conditions(boot_id="boot-2"), pair=6)
    result = judge(records)["conditions_equal"]
    assert result.holds
    assert "2 boots" in result.detail


def test_a_record_too_damaged_to_judge_leaves_the_gate_undecided():
    records = control(honest_records(), resolved(cache_config={"num_gpu_blocks": "many"}))
    result = judge(records)["working_set"]
    assert result.passed is None
    assert "can't be judged" in result.detail


def with_gate(name: str, **parameters: object):
    """The shipped protocol with other parameters of one gate."""
    declared = protocol()
    return replace(declared, gates=declared.gates | {name: declared.gates[name] | parameters})


def test_a_treatment_must_be_delivered_in_every_phase_that_is_named():
    both = with_gate("treatment_delivered", phases=["warmup_return"])
    result = judge(honest_records(), both)["treatment_delivered"]
    assert result.holds
    assert "return: 33,554,432 bytes" in result.detail
    assert "warmup_return: 4,194,304 bytes" in result.detail
    short = offload(honest_records(), lambda run: add(run, "warmup_return", load_bytes=-4096.0), pair=3)
    assert not judge(short, both)["treatment_delivered"].holds
    assert judge(short)["treatment_delivered"].holds


def test_answers_are_compared_in_every_pair_of_phases():
    both = with_gate("answers_equal", hit=["gpu_hit", "gpu_hit"], **{"return": ["return", "return"]})
    assert judge(honest_records(), both)["answers_equal"].detail.count("equal the same run's gpu_hit") == 2
    result = judge(offload(honest_records(), wrong_answer, 2), both)["answers_equal"]
    assert result.passed is False
    second = with_gate("answers_equal", hit=["fits_return", "gpu_hit"], **{"return": ["fits_return", "return"]})
    assert judge(offload(honest_records(), wrong_answer, 2), second)["answers_equal"].passed is False
    found = conclude(second, {"h1": offload(honest_records(), wrong_answer, 2)}, "c1")
    assert found.verdict != "BETTER"


def test_a_tier_of_one_block_is_enough_where_the_protocol_says_so():
    by_block = with_gate("working_set", tier_scope="block")
    small = offload(honest_records(), capacity(tier_bytes={"offload": 128 * 1024 * 1024}))
    assert not judge(small)["working_set"].holds
    result = judge(small, by_block)["working_set"]
    assert result.holds
    assert "256 chunks stored in the largest block of phases, 512 in the tier" in result.detail
    smaller = offload(honest_records(), capacity(tier_bytes={"offload": 64 * 1024 * 1024}))
    assert not judge(smaller, by_block)["working_set"].holds


def test_a_tier_that_may_keep_what_is_old_is_judged_by_the_whole_run():
    def arc(run: RunRecord) -> RunRecord:
        words = [word.replace('"offload_prompt_only"', '"eviction_policy": "arc", "offload_prompt_only"') for word in
                 run.launch.argv]  # fmt: skip
        return replace(run, launch=replace(run.launch, argv=words))

    small = offload(honest_records(), capacity(tier_bytes={"offload": 128 * 1024 * 1024}))
    records = offload(small, arc)
    assert any("arc" in word for run in records if run.arm == "offload" for word in run.launch.argv)
    result = judge(records, with_gate("working_set", tier_scope="block"))["working_set"]
    assert result.passed is False
    assert "768 chunks stored, 512 in the tier" in result.detail


def test_a_socket_on_every_address_counts_as_loopback_only_where_there_is_nothing_else():
    everywhere = resolved(listening=[Socket(address="::", port=4000, pid=1)])
    assert not judge(offload(honest_records(), everywhere))["loopback_only"].holds
    alone = change(offload(honest_records(), everywhere), resolved(loopback_alone=True))
    result = judge(alone)["loopback_only"]
    assert result.holds
    assert "12 runs in a network namespace that has nothing else" in result.detail


def test_an_address_in_memory_is_no_difference():
    def addressed(run: RunRecord) -> RunRecord:
        value = f"<function f at 0x7f{run.pair}{len(run.arm)}0>"
        return config("vllm_config.some_hook", value)(run)

    records = change(honest_records(), addressed)
    assert judge(records)["launch_differs_as_declared"].holds
    other = offload(records, config("vllm_config.some_hook", "<function g at 0x7f0>"))
    assert "some_hook" in judge(other)["launch_differs_as_declared"].detail


def test_ram_may_differ_between_runs_as_far_as_the_protocol_allows():
    grown = change(honest_records(), conditions(ram_total_bytes=24_000_000_000))
    grown = change(grown, conditions(ram_total_bytes=25_000_000_000), pair=4)
    result = judge(grown)["conditions_equal"]
    assert result.passed is False
    assert "RAM is not the same in all runs: 24,000,000,000 to 25,000,000,000 bytes" in result.detail
    tolerant = judge(grown, with_gate("conditions_equal", ram_tolerance_percent=10))["conditions_equal"]
    assert tolerant.holds
    assert "(allowed are 10 %)" in tolerant.detail
    assert not judge(grown, with_gate("conditions_equal", ram_tolerance_percent=3))["conditions_equal"].holds


def gated(gates: dict[str, dict[str, object]]):
    return replace(protocol(), gates=gates)


@pytest.mark.parametrize(
    ("gates", "says"),
    [
        ({"is_it_nice": {}}, 'gate "is_it_nice" is unknown; use one of'),
        ({"memory_left": {"bytes": 1}}, "unknown field `bytes`"),
        ({"treatment_delivered": {"arm": "offload"}}, "missing required field `phase`"),
        ({"treatment_delivered": {"arm": "tier", "phase": "return"}}, 'names arm "tier"'),
        ({"treatment_delivered": {"arm": "offload", "phase": "again"}}, 'names phase "again"'),
        ({"prefix_evicted": {"phases": ["again"]}}, 'names phase "again"'),
        ({"answers_equal": {"arm": "offload", "hit": "gpu_hit", "return": "again"}}, 'names phase "again"'),
        ({"answers_equal": {"arm": "offload", "hit": "gpu_hit", "return": ["return", "miss"]}}, "equally many phases"),
        ({"working_set": {"pressure_share_min": 1, "tier_share_max": 1, "tier_scope": "day"}}, "tier_scope"),
        ({"undisturbed": {"foreign_cpu_share_max": "much", "steal_share_max": 0.1}}, "Expected `float`"),
    ],
)
def test_unknown_gates_and_parameters_are_refused_in_a_sentence(gates, says):
    with pytest.raises(UnusableInput, match=r"gate") as raised:
        validate_gates(gated(gates))
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_shipped_protocol_is_valid_and_a_size_may_stand_in_a_parameter():
    validate_gates(protocol())
    sized = replace(protocol(), sizes=protocol().sizes | {"limit": 1})
    validate_gates(replace(sized, gates={"client_honest": {"lag_p95_max_seconds": "$limit"}}))


def test_details_survive_json():
    encoded = json.loads(msgspec.json.encode(list(judge(honest_records()).values())))
    assert all(set(entry) == {"gate", "passed", "detail"} for entry in encoded)


@pytest.mark.parametrize(("phase", "kept"), [("return", "gpu_hit"), ("gpu_hit", "return")])
def test_a_missing_answer_is_neither_equal_nor_wrong(phase, kept):
    one = judge(offload(honest_records(), requests(phase, answer_sha256=None)))["answers_equal"]
    assert one.passed is None
    assert "24 of 24 answers of return can't be compared" in one.detail
    both = offload(honest_records(), requests(phase, answer_sha256=None))
    result = judge(offload(both, requests(kept, answer_sha256=None)))["answers_equal"]
    assert result.passed is None
    assert "missing" in result.detail
    assert conclude(protocol(), {"h1": both}, "c1").verdict == "INVALID"


def test_a_model_that_answers_some_prompts_alike_is_not_discriminating():
    def two_alike(run: RunRecord) -> RunRecord:
        for name in ("gpu_hit", "return"):
            phase = next(p for p in run.phases if p.name == name)
            alike = {q.prompt_sha256 for q in next(p for p in run.phases if p.name == "return").requests[-2:]}
            changed = [replace(q, answer_sha256="same") if q.prompt_sha256 in alike else q for q in phase.requests]
            run = with_phase(run, name, requests=changed)
        return run

    result = judge(change(honest_records(), two_alike))["answers_equal"]
    assert result.passed is None
    assert "not discriminating: 8 different prompts got only 7 different answers" in result.detail
    assert "at least 90% are needed" in result.detail


def test_what_was_not_measured_is_said_to_be_unknown():
    nothing = change(honest_records(), samples(throttle_events=None, cpu_mhz_median=None))
    detail = judge(nothing)["conditions_equal"].detail
    assert "throttle events unknown" in detail
    assert "CPU clock unknown" in detail
    assert "driver unknown" in detail
    part = control(change(nothing, samples(throttle_events=0, cpu_mhz_median=2700.0)), samples(throttle_events=None), 2)
    detail = judge(offload(part, samples(cpu_mhz_median=None)))["conditions_equal"].detail
    assert "control 0 (unknown in 1 of 6 runs), offload 0" in detail
    assert "CPU clock control 2,700 MHz, offload unknown" in detail


def test_events_in_one_arm_say_nothing_where_the_other_did_not_read_them():
    records = control(change(honest_records(), samples(throttle_events=3)), samples(throttle_events=None))
    result = judge(records)["conditions_equal"]
    assert result.holds
    assert "throttle events control unknown, offload 18" in result.detail


@pytest.mark.parametrize(("version", "stored"), [("0.32.0", 0), ("0.22.0", 1)])
def test_an_unset_offload_prompt_only_is_true_from_0_23_on(version, stored):
    """With outputs as long as a chunk, an engine that stores them needs a chunk more a request."""

    def long_outputs(run: RunRecord) -> RunRecord:
        argv = [word.replace(', "offload_prompt_only": true', "") for word in run.launch.argv]
        assert not any("offload_prompt_only" in word for word in argv)
        phases = [replace(p, requests=[replace(q, max_tokens=65) for q in p.requests]) for p in run.phases]
        return replace(run, phases=phases, vllm_version_pinned=version, launch=replace(run.launch, argv=argv))

    def chunks(records: Records) -> int:
        detail = judge(records)["working_set"].detail
        return int(detail.partition(" chunks stored")[0].rpartition(" ")[2].replace(",", ""))

    plain = chunks(honest_records())
    prompts = plain // 16
    assert chunks(change(honest_records(), long_outputs)) == plain + stored * prompts
