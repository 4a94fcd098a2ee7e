"""What a plan makes of a declared ladder: levels, comparisons, arms that can't run, mixes that only queue."""

import math
import re
from pathlib import Path

import msgspec
import pytest
import yaml
from build import PROTOCOLS
from kvtrial.analysis.campaign import announcement
from kvtrial.analysis.inputs import ModelInput, Request, read_request
from kvtrial.analysis.ladder import onset_error, onset_errors
from kvtrial.analysis.laddering import answer_seconds, ladder_lines, refuse_arms, with_ladder_comparisons
from kvtrial.analysis.plan import for_host, make_plan, requested_protocol
from kvtrial.analysis.protocols import load_protocol, only_arms
from kvtrial.analysis.workloads import NO_TRACES
from kvtrial.record.errors import UnusableInput
from kvtrial.record.plan import canonical_json
from kvtrial.record.protocol import Objective
from kvtrial.record.workload import request_shapes
from ladder_build import cpu_host
from msgspec import UNSET
from msgspec.structs import replace

ROOT = Path(__file__).parents[3]


def request(**changes) -> Request:
    hosts = {"h1": cpu_host(**changes.pop("host", {}))}
    base = Request(protocol="preemption_ladder", protocols_dir=str(PROTOCOLS), results_dir="results", hosts=hosts)
    return replace(base, **changes)


def planned(**changes):
    asked = request(**changes)
    return make_plan(asked, requested_protocol(asked))


def test_by_default_the_base_more_kv_memory_and_fewer_sequences_run():
    plan = planned()
    assert list(plan.hosts[0].launches) == ["base", "more_kv", "fewer_seqs"]
    assert len([run for run in plan.hosts[0].runs if not run.spare]) == 18


def test_the_prediction_stands_in_the_plan_for_every_arm():
    ladder = planned().hosts[0].ladder
    assert list(ladder.levels.values()) == [1, 3, 4, 5, 6, 7]
    assert {arm: (onset.kind, onset.low) for arm, onset in ladder.onset.items()} == {
        "base": ("exact", 5),
        "more_kv": ("exact", 9),
        "fewer_seqs": ("never", None),
    }
    assert ladder.usable_gpu_blocks == {"base": 64, "more_kv": 128, "fewer_seqs": 64}


@pytest.mark.parametrize("number", [7, 12], ids=["the top level", "above it"])
def test_fewer_sequences_that_are_no_fewer_than_are_ever_in_flight_are_refused(number):
    said = f"lets {number} sequences run at once and the ladder ends at 7 in flight, so it limits nothing"
    with pytest.raises(UnusableInput, match=said) as told:
        planned(host={"sizes": {"fewer_seqs": number}})
    assert "give it a max-num-seqs below 7, or leave it out (-e arms=more_kv)" in str(told.value)
    assert "fewer_seqs" in planned(host={"sizes": {"fewer_seqs": 6}}).hosts[0].launches


@pytest.mark.parametrize(("number", "labelled"), [(4, True), (3, False)])
def test_fewer_sequences_that_are_no_fewer_than_the_pool_lets_in_are_labelled_before_anything_starts(number, labelled):
    """448 tokens in take 14 of 64 blocks: 4 are let in, whatever max-num-seqs says above that."""
    sizes = {"prompt_tokens": 448, "output_tokens": 64, "fewer_seqs": number}
    asked = request(host={"sizes": sizes}, ladder=[1, 2, 3, 4, 5, 6, 8])
    told = announcement(asked, make_plan(asked, requested_protocol(asked)), None, NO_TRACES)
    said = (
        "h1, arm fewer_seqs: warning: it lets 4 sequences run at once, and the KV cache has room for the prompts of 4"
    )
    assert any(line.startswith(said) for line in told) is labelled


def test_the_same_plan_comes_out_twice():
    assert canonical_json(planned()) == canonical_json(planned())


def test_every_level_sends_the_same_prompts_in_one_salt_after_a_reset():
    run = planned().hosts[0].runs[0]
    levels = [phase for phase in run.phases if phase.reset]
    assert len(levels) == 6 and len({phase.salt for phase in levels}) == 1
    sent = {tuple(shape.identity for shape in request_shapes(phase)) for phase in levels}
    assert len(sent) == 1
    assert [phase.block for phase in levels] == ["ladder"] * 3 + ["above_onset"] * 3
    assert all(phase.watch_seconds and phase.stall_multiple for phase in levels)


def test_exactly_one_comparison_is_primary_whichever_arms_are_chosen():
    for arms in (None, ["fewer_seqs"], ["shorter_inputs", "less_reserve"]):
        protocol = requested_protocol(request(arms=arms))
        assert sum(c.role == "primary" for c in protocol.comparisons) == 1
        assert {c.against for c in protocol.comparisons} == {"base"}


def test_an_arm_with_sizes_of_its_own_sends_its_own_work_at_the_controls_levels():
    plan = planned(arms=["shorter_inputs", "truncated_answers", "less_reserve"])
    runs = {run.arm: run.phases[-1] for run in plan.hosts[0].runs[:4]}
    assert {arm: phase.concurrency for arm, phase in runs.items()} == dict.fromkeys(runs, 7)
    assert runs["shorter_inputs"].prompts.tokens == 128
    assert (runs["base"].max_tokens, runs["less_reserve"].max_tokens, runs["truncated_answers"].max_tokens) == (
        512,
        320,
        128,
    )
    assert plan.hosts[0].ladder.onset["truncated_answers"].low == 6


def test_a_mix_that_can_only_queue_is_refused_before_anything_starts():
    sizes = {"prompt_tokens": 448, "output_tokens": 64}
    with pytest.raises(UnusableInput, match="host h1: no preemption is predicted at any level") as refused:
        planned(host={"sizes": sizes})
    assert "so requests queue and none is preempted" in str(refused.value)
    labelled = planned(host={"sizes": sizes}, ladder=[1, 2, 3, 4, 5, 6])
    assert labelled.hosts[0].ladder.onset["base"].kind == "never"


QUEUES = {"sizes": {"prompt_tokens": 448, "output_tokens": 64}}


def test_a_ladder_that_can_only_queue_is_compared_by_the_queue_over_the_levels_that_do():
    plan = planned(host=QUEUES, ladder=[1, 2, 3, 4, 6, 8])
    blocks = {phase.concurrency: phase.block for phase in plan.hosts[0].runs[0].phases if phase.reset}
    assert {level for level, block in blocks.items() if block == "queueing"} == {6, 8}
    comparisons = plan.protocol.comparisons
    primary = next(c for c in comparisons if c.role == "primary")
    assert (primary.arm, primary.metric, primary.phase) == ("more_kv", "queue_seconds_per_request", "queueing")
    assert {c.phase for c in comparisons} == {"queueing"} and sum(c.role == "primary" for c in comparisons) == 1
    assert ladder_lines(plan.hosts[0])[-1].startswith("h1: this ladder can only queue")
    assert not any("only queue" in line for line in ladder_lines(planned().hosts[0]))


def test_a_ladder_on_which_not_even_a_queue_can_be_seen_is_refused():
    sizes = {"prompt_tokens": 448, "output_tokens": 33, "gpu_blocks": 136, "requests": 16}
    with pytest.raises(UnusableInput, match="shows not even a queue; give levels above 9"):
        planned(host={"sizes": sizes}, ladder=[1, 2, 3, 4, 5, 6])


def test_of_a_fleet_the_protocol_is_that_of_a_host_that_preempts():
    hosts = {"a": cpu_host(**QUEUES), "b": cpu_host()}
    asked = replace(request(ladder=[1, 3, 4, 5, 6, 7]), hosts=hosts)
    plan = make_plan(asked, requested_protocol(asked))
    primary = next(c for c in plan.protocol.comparisons if c.role == "primary")
    assert (primary.metric, primary.phase) == ("preemptions_per_1000_requests", "above_onset")


def test_a_random_mix_with_too_few_requests_is_told_how_many_it_takes():
    """All six run at once: nothing queues, and longer answers are not the cure."""
    mix = str(ROOT / "tests" / "bench" / "mixes" / "random_128_64to448.yml")
    with pytest.raises(UnusableInput, match=r"too few requests: set the size requests to \d+ or more") as refused:
        planned(protocol=mix, host={"sizes": {"requests": 6}})
    assert "queue" not in str(refused.value) and "Let the answers grow" not in str(refused.value)
    enough = int(str(refused.value).split("requests to ")[1].split()[0])
    assert planned(protocol=mix, host={"sizes": {"requests": enough}}).hosts[0].ladder.onset["base"].kind == "range"


@pytest.mark.parametrize("arm", ["shorter_inputs", "truncated_answers"])
def test_a_size_that_no_request_of_a_mix_depends_on_makes_no_arm(arm):
    mix = str(ROOT / "tests" / "bench" / "mixes" / "random_128_64to448.yml")
    with pytest.raises(UnusableInput, match=rf"host h1: arm {arm} \(\w+_tokens=128\) runs exactly as base does here"):
        planned(protocol=mix, arms=[arm])
    with pytest.raises(UnusableInput, match=r"leave it out \(-e arms=more_kv\)"):
        planned(protocol=mix, arms=[arm, "more_kv"])


def test_all_idle_arms_are_named_at_once_and_only_one_that_is_not_idle_is_advised():
    mix = str(ROOT / "tests" / "bench" / "mixes" / "random_128_64to448.yml")
    with pytest.raises(UnusableInput) as told:
        planned(protocol=mix, arms=["shorter_inputs", "truncated_answers", "more_kv"])
    assert "arms truncated_answers (reserve_tokens=128) and shorter_inputs (prompt_tokens=128) run exactly" in str(
        told.value
    )
    assert "leave them out (-e arms=more_kv)" in str(told.value)
    with pytest.raises(UnusableInput, match="or choose another arm"):
        planned(protocol=mix, arms=["shorter_inputs", "truncated_answers"])


BATCH = {"engine_args": cpu_host().engine_args | {"max-num-batched-tokens": 4096}}


@pytest.mark.parametrize(
    ("arm", "sizes", "said"),
    [
        ("more_kv", {"more_gpu_blocks": 33}, "num-gpu-blocks-override=33, base has 65; set more_gpu_blocks above 65"),
        ("more_kv", {"more_gpu_blocks": 65}, "num-gpu-blocks-override=65, base has 65; set more_gpu_blocks above 65"),
        ("fewer_seqs", {"fewer_seqs": 32}, "max-num-seqs=32, base has 16; set fewer_seqs below 16"),
        (
            "shorter_model_len",
            {"shorter_model_tokens": 2048},
            "max-model-len=2048, base has 1024; set shorter_model_tok",
        ),
        (
            "longer_model_len",
            {"longer_model_tokens": 512},
            "max-model-len=512, base has 1024; set longer_model_tokens ab",
        ),
        (
            "smaller_batch",
            {"fewer_batched_tokens": 8192},
            "max-num-batched-tokens=8192, base has 4096; set fewer_batche",
        ),
        (
            "shorter_inputs",
            {"prompt_tokens": 1, "requests": 24},
            "prompt_tokens=1, base has 1; set prompt_tokens above 1",
        ),
        ("less_reserve", {"reserve_tokens": 300}, "reserve_tokens=320, base has 300; set reserve_tokens above 320"),
        ("less_reserve", {"output_tokens": 500}, "reserve_tokens=625, base has 512; set reserve_tokens above 625"),
        ("more_kv", {"output_tokens": 600}, "answers are to have 600 tokens (output_tokens) and may have 512"),
    ],
)
def test_an_arm_whose_size_changes_nothing_or_the_opposite_is_refused(arm, sizes, said):
    with pytest.raises(UnusableInput, match="host h1: ") as refused:
        planned(arms=[arm], host={**BATCH, "sizes": sizes})
    assert said in str(refused.value) and "kvtrial_sizes" in str(refused.value)


@pytest.mark.parametrize(
    ("arm", "limit", "said"),
    [
        ("truncated_answers", 300, "so it cuts no answer; set output_tokens above 300"),
        ("less_reserve", 200, "so it cuts the answers, which it does not declare; set output_tokens to 200 or less"),
    ],
)
def test_a_limit_of_ones_own_must_cut_answers_where_that_is_declared_and_nowhere_else(tmp_path, arm, limit, said):
    own = tmp_path / "own.yml"
    arms = {arm: {"sizes": {"reserve_tokens": limit}}}
    own.write_text(
        yaml.safe_dump({"schema_version": "1.0", "name": "own", "extends": "preemption_ladder", "arms": arms})
    )
    with pytest.raises(UnusableInput, match="host h1: ") as refused:
        planned(protocol=str(own), arms=[arm], host=BATCH)
    assert said in str(refused.value)


@pytest.mark.parametrize(("prompt", "answer"), [(128, 256), (256, 400), (64, 300)])
def test_what_an_arm_sends_follows_what_the_base_sends(prompt, answer):
    """An inventory with prompts of 128 tokens has shorter ones in shorter_inputs too, and so on."""
    sizes = {"prompt_tokens": prompt, "output_tokens": answer, "requests": 14}
    plan = planned(arms=["shorter_inputs", "truncated_answers", "less_reserve"], host={**BATCH, "sizes": sizes})
    runs = {run.arm: run.phases[-1] for run in plan.hosts[0].runs[:4]}
    assert (runs["base"].prompts.tokens, runs["shorter_inputs"].prompts.tokens) == (prompt, prompt // 2)
    assert runs["truncated_answers"].max_tokens == answer // 2
    assert answer < runs["less_reserve"].max_tokens < runs["base"].max_tokens == 512


def test_more_kv_memory_in_bytes_is_twice_the_bases_and_has_an_onset_of_its_own():
    plan = planned(arms=["more_kv_bytes"]).hosts[0]
    argv = plan.launches["more_kv_bytes"].argv
    assert argv[argv.index("--kv-cache-memory-bytes") + 1] == str(2 * 64 * 32 * 512)
    assert "--num-gpu-blocks-override" not in argv
    # 128 blocks, one of them reserved, of which a request takes 16.
    assert (plan.ladder.usable_gpu_blocks["more_kv_bytes"], plan.ladder.onset["more_kv_bytes"].low) == (127, 8)


def test_a_percentage_of_what_is_no_size_is_refused(tmp_path):
    own = tmp_path / "own.yml"
    arms = {"shorter_inputs": {"sizes": {"prompt_tokens": {"percent": 50, "of": "prompt_token"}}}}
    own.write_text(
        yaml.safe_dump({"schema_version": "1.0", "name": "own", "extends": "preemption_ladder", "arms": arms})
    )
    with pytest.raises(UnusableInput, match=r'"prompt_token" is not known.*Did you mean prompt_tokens'):
        planned(protocol=str(own), arms=["shorter_inputs"])


def test_an_arm_whose_value_is_the_controls_is_refused_and_one_that_is_meant_to_be_the_same_is_not():
    fp8 = {"backend": "cuda", "engine_args": cpu_host().engine_args | {"kv-cache-dtype": "fp8"}}
    with pytest.raises(UnusableInput, match=r"arm fp8_kv \(kv-cache-dtype=fp8\) runs exactly"):
        planned(arms=["fp8_kv"], host=fp8 | {"sizes": {"fp8_gpu_blocks": 65}})
    assert list(planned(protocol="preemption_noise").hosts[0].launches) == ["base", "again"]


def test_a_headroom_below_0_is_refused_where_a_host_sets_it():
    with pytest.raises(UnusableInput, match=r"vram_headroom.*bytes=-5 is below 0.*give .* 0 or more"):
        planned(host={"sizes": {"vram_headroom_bytes": -5}})
    planned(host={"sizes": {"vram_headroom_bytes": 0}})


def test_a_ladder_of_ones_own_must_show_the_onset():
    with pytest.raises(UnusableInput, match=r"host h1: the ladder .* lacks 5"):
        planned(ladder=[1, 2, 3, 4, 6, 7])
    assert list(planned(ladder=[1, 2, 3, 4, 5, 6]).hosts[0].ladder.levels.values()) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("arm", "host", "said"),
    [
        ("fp8_kv", {}, "arm fp8_kv can't run: it needs the cuda engine"),
        ("kv_offloading_size", {}, "vLLM's own CPU tier needs a GPU"),
        ("tensor_parallel", {}, "it needs the cuda engine"),
        ("second_replica", {}, "each replica takes a GPU of its own"),
        ("tensor_parallel", {"backend": "cuda", "facts": {"gpus": [{}]}}, "it needs 2 GPUs, this host has 1"),
        ("offload_all", {"vllm_version": "0.23.0"}, "an engine with a connector can die of a preemption"),
        ("more_memory_share", {}, "gpu_memory_utilization shares out a GPU's memory"),
        (
            "smaller_model",
            {},
            "the inventory names no smaller model (kvtrial_smaller_model); which smaller model would do",
        ),
        (
            "kv_offloading_size",
            {"backend": "cuda", "vllm_version": "0.26.0"},
            "before 0.30 a connector with asynchronous scheduling corrupts the count of preemptions (#49674); choose",
        ),
    ],
)
def test_an_arm_that_a_host_can_not_run_is_refused_with_the_reason(arm, host, said):
    protocol = only_arms(load_protocol("preemption_ladder", PROTOCOLS), [arm])
    with pytest.raises(UnusableInput, match="host h1") as refused:
        refuse_arms("h1", cpu_host(**host), protocol)
    assert said in str(refused.value)
    assert not re.search(r"\. [a-z]", str(refused.value))


@pytest.mark.parametrize("arm", ["offload_prompts", "offload_all"])
@pytest.mark.parametrize(
    ("version", "guarded"), [("0.24.0", True), ("0.26.0", True), ("0.29.3", True), ("0.30.0", False)]
)
def test_where_a_connector_corrupts_the_count_every_arm_has_the_guard(arm, version, guarded):
    plan = planned(arms=["more_kv", arm], host={"backend": "cuda", "vllm_version": version})
    for launch in plan.hosts[0].launches.values():
        assert ("--no-async-scheduling" in launch.argv) is guarded, launch.arm


def test_a_ladder_without_a_connector_needs_no_guard():
    plan = planned(host={"backend": "cuda", "vllm_version": "0.26.0"})
    assert not any("--no-async-scheduling" in launch.argv for launch in plan.hosts[0].launches.values())


def test_the_container_inventorys_sizes_preempt_on_its_gpu():
    """Its sizes are known to the protocol, its graphs cover every level, and each arm has its onset."""
    name = ROOT / "inventories" / "gpu_container" / "group_vars" / "all" / "10-container.yml"
    settings = yaml.safe_load(name.read_text())
    sizes = settings["container_ladder_sizes"] | {"tier_bytes": 28 * 134217728, "ram_tolerance_percent": 10}
    args = {"block-size": 16, "max-model-len": 16640} | settings["container_ladder_args"]
    host = {"backend": "cuda", "vllm_version": "0.26.0", "sizes": sizes, "engine_args": args}
    host["model"] = ModelInput("m", "/m", "r", 114688, "random", 32, 126)
    plan = planned(arms=["more_kv", "fewer_seqs", "offload_all"], pairs=6, host=host).hosts[0]
    assert {arm: (onset.kind, onset.low) for arm, onset in plan.ladder.onset.items()} == {
        "base": ("exact", 10),
        "more_kv": ("exact", 19),
        "fewer_seqs": ("never", None),
        "offload_all": ("exact", 10),
    }
    assert set(plan.ladder.levels.values()) <= set(args["compilation-config"]["cudagraph_capture_sizes"])
    stored = sizes["requests"] * (sizes["prompt_tokens"] + sizes["output_tokens"]) * 114688
    assert stored < 0.8 * sizes["tier_bytes"]


@pytest.mark.parametrize("arm", ["tensor_parallel", "second_replica"])
def test_two_gpus_run_what_needs_two_and_one_does_not(arm):
    protocol = only_arms(load_protocol("preemption_ladder", PROTOCOLS), [arm])
    refuse_arms("h1", cpu_host(backend="cuda", facts={"gpus": [{}, {}]}), protocol)
    with pytest.raises(UnusableInput, match="it needs 2 GPUs, this host has 1"):
        refuse_arms("h1", cpu_host(backend="cuda", facts={"gpus": [{}]}), protocol)


@pytest.mark.parametrize(("args", "async_off"), [({}, False), ({"no-async-scheduling": True}, True)])
def test_a_scheduler_a_step_ahead_takes_a_slot_more_of_answers_that_end_by_their_stop(args, async_off):
    """128 in and 385 out end at 512 tokens, 32 blocks of 16; the slot beyond is in a 33rd, and 4 overrun 128."""
    args = {"block-size": 16, "max-num-seqs": 16, **args}
    sizes = {"gpu_blocks": 129, "prompt_tokens": 128, "output_tokens": 385, "more_gpu_blocks": 257, "fewer_seqs": 3}
    host = {"backend": "cuda", "vllm_version": "0.32.0", "engine_args": args, "sizes": sizes}
    ladder = planned(host=host).hosts[0].ladder
    assert ladder.onset["base"].last_safe == (4 if async_off else 3)


LENGTHS = """
schema_version: "1.0"
name: mine
extends: preemption_ladder
workloads:
  load: {kind: lengths, requests: 20, prompt_tokens: 257, output_tokens: 255, shared_prefix_tokens: %d}
phases:
  - {name: warmup, block: warmup, prompts: warm, salt: warm, max_tokens: $warmup_tokens}
  - {name: load, block: ladder, workload: load, salt: load}
"""


def test_requests_of_a_ladder_that_share_a_prefix_are_refused(tmp_path):
    mine = tmp_path / "mine.yml"
    mine.write_text(LENGTHS % 192)
    with pytest.raises(UnusableInput, match="the requests of phase load begin with the same 192 tokens, and a ladder"):
        planned(protocol=str(mine))
    mine.write_text(LENGTHS % 16)  # half a block of 32: nothing is found of it
    assert planned(protocol=str(mine)).hosts[0].ladder.onset["base"].kind == "exact"


def test_prompts_of_a_ladder_that_are_sent_twice_are_refused(tmp_path):
    mine = tmp_path / "mine.yml"
    talks = "{kind: conversations, conversations: 12, turns: 2, question_tokens: 64, answer_tokens: 256}"
    mine.write_text(re.sub(r"\{kind: lengths.*", talks, LENGTHS))
    with pytest.raises(UnusableInput, match="phase load repeat a prompt, or go on from one"):
        planned(protocol=str(mine))


@pytest.mark.parametrize(
    ("args", "version", "said"),
    [
        ({"watermark": "0.5"}, "0.32.0", "arm base: --watermark keeps blocks free"),
        ({"no-scheduler-reserve-full-isl": True}, "0.32.0", "--no-scheduler-reserve-full-isl lets a prompt in before"),
        ({"scheduler-reserve-full-isl": False}, "0.32.0", "--no-scheduler-reserve-full-isl lets a prompt in before"),
        ({"long-prefill-token-threshold": 64}, "0.32.0", "--long-prefill-token-threshold lets a long prompt in"),
        ({"speculative-config.method": "ngram"}, "0.32.0", "--speculative-config takes blocks for drafted"),
        ({"max-num-scheduled-tokens": 64}, "0.32.0", "--max-num-scheduled-tokens bounds a step"),
        ({"enable-chunked-prefill": False}, "0.32.0", "--no-enable-chunked-prefill computes a prompt in one step"),
        ({"speculative-config": {"method": "ngram"}}, "0.32.0", "--speculative-config takes blocks for drafted"),
        ({}, "0.18.0", "vLLM 0.18.0 lets a prompt in before all of it has room"),
    ],
)
def test_a_ladder_whose_onset_can_not_be_predicted_is_refused_by_the_option(args, version, said):
    host = cpu_host().engine_args | args
    with pytest.raises(UnusableInput, match=re.escape(said)):
        planned(host={"engine_args": host, "vllm_version": version})
    # Given so that they change nothing they forbid nothing.
    planned(host={"engine_args": cpu_host().engine_args | {"watermark": 0, "scheduler-reserve-full-isl": True}})


def test_a_ladder_beyond_the_sequences_that_an_engine_may_run_by_itself_needs_them_set():
    args = {name: value for name, value in cpu_host().engine_args.items() if name != "max-num-seqs"}
    wide = {"gpu_blocks": 501, "more_gpu_blocks": 1001, "prompt_tokens": 60, "output_tokens": 64, "requests": 300}
    host = {"engine_args": args, "sizes": wide}
    with pytest.raises(UnusableInput, match="max-num-seqs is not set, of which the engine may take 128; set max-num"):
        planned(host=host)
    assert planned(host={"engine_args": args}).hosts[0].ladder.levels


def test_a_smaller_model_is_served_under_the_same_name_and_sent_the_same():
    host = {"smaller_model": ModelInput("other", "/models/b", "rev-2", 256, "random", 0, 9)}
    asked = request(arms=["smaller_model"], host=host)
    plan = make_plan(asked, requested_protocol(asked)).hosts[0]
    base, smaller = plan.launches["base"], plan.launches["smaller_model"]
    assert [base.argv[2], smaller.argv[2]] == ["/models/a", "/models/b"]
    assert base.served_model_name == smaller.served_model_name == "kvtrial-model"
    assert (plan.model_of("base").revision, plan.model_of("smaller_model").revision) == ("rev-1", "rev-2")
    runs = {run.arm: run.phases for run in plan.runs[:2]}
    assert runs["base"] == runs["smaller_model"]
    # As many bytes of KV cache at half the bytes a token: twice the blocks.
    assert (plan.ladder.onset["base"].low, plan.ladder.onset["smaller_model"].low) == (5, 9)


@pytest.mark.parametrize("arm", [name for name in load_protocol("preemption_ladder", PROTOCOLS).arms if name != "base"])
def test_every_arm_can_be_planned_on_a_host_that_has_what_it_requires(arm):
    host = {
        "backend": "cuda",
        "facts": {"gpus": [{}, {}]},
        "smaller_model": ModelInput("other", "/models/b", "rev-2", 256, "random", 0, 9),
    }
    asked = request(arms=[arm], host=host)
    assert list(make_plan(asked, requested_protocol(asked)).hosts[0].launches) == ["base", arm]


def test_every_change_that_the_ladder_is_to_compare_is_an_arm():
    protocol = load_protocol("preemption_ladder", PROTOCOLS)
    changes = {
        "fewer_seqs": "max-num-seqs", "more_kv": "num-gpu-blocks-override", "more_kv_bytes": "kv-cache-memory-bytes",
        "more_memory_share": "gpu-memory-utilization", "fp8_kv": "kv-cache-dtype",
        "shorter_model_len": "max-model-len", "longer_model_len": "max-model-len",
        "smaller_batch": "max-num-batched-tokens", "offload_prompts": "kv-transfer-config",
        "offload_all": "kv-transfer-config", "kv_offloading_size": "kv-offloading-size",
        "tensor_parallel": "tensor-parallel-size",
    }  # fmt: skip
    for arm, option in changes.items():
        assert option in protocol.arms[arm].args, arm
    assert {arm for arm, spec in protocol.arms.items() if spec.sizes} == {
        "less_reserve", "truncated_answers", "shorter_inputs"
    }  # fmt: skip
    assert set(protocol.arms) == {
        "base",
        "less_reserve",
        "truncated_answers",
        "shorter_inputs",
        "smaller_model",
        "second_replica",
        *changes,
    }
    assert list(load_protocol("preemption_noise", PROTOCOLS).arms) == ["base", "again"]


def test_arms_that_change_the_work_declare_it_and_the_negative_control_does_not():
    arms = load_protocol("preemption_ladder", PROTOCOLS).arms
    assert arms["less_reserve"].may_differ == []
    assert set(arms["truncated_answers"].may_differ) == {"output_length", "answer"}
    assert set(arms["shorter_inputs"].may_differ) == {"prompt", "answer"}
    for name in ("offload_prompts", "offload_all"):
        assert "kv-offloading-size" not in arms[name].args
    assert "kv-transfer-config" not in arms["kv_offloading_size"].args


def test_the_estimate_counts_the_answers():
    run = planned().hosts[0].runs[0]
    assert answer_seconds(run.phases, 0.0025) == pytest.approx(
        8 * 256 * 0.0025 * sum(1 / n for n in (1, 3, 4, 5, 6, 7))
    )


def test_prices_and_objectives_are_checked_where_they_enter():
    raw = {"protocol": "preemption_ladder", "protocols_dir": "", "results_dir": "", "hosts": {"h1": {}}}
    good = {"may_be_disturbed": True, "backend": "cpu", "vllm_version": "0.32.0", "vllm_venv": "",
            "model": {"name": "m", "path": "", "revision": "", "kv_bytes_per_token": 512}}  # fmt: skip
    raw["hosts"] = {"h1": good}
    with pytest.raises(UnusableInput, match=r"gpu_hour=-1\.0 is no price"):
        read_request(raw | {"prices": {"currency": "EUR", "gpu_hour": -1.0}})
    with pytest.raises(UnusableInput, match="names no price"):
        read_request(raw | {"prices": {"currency": "EUR"}})
    own = read_request(raw | {"objectives": {"night": {"e2e_p95_seconds": 5}}})
    assert own.objectives["night"].e2e_p95_seconds == 5


def test_an_arm_with_the_smaller_model_never_gets_the_usual_one():
    protocol = only_arms(load_protocol("preemption_ladder", PROTOCOLS), ["smaller_model"])
    bare = replace(protocol.arms["smaller_model"], requires=UNSET)
    with pytest.raises(UnusableInput, match="names no smaller model"):
        refuse_arms("h1", cpu_host(), replace(protocol, arms=protocol.arms | {"smaller_model": bare}))


def test_a_smaller_model_without_its_bytes_a_token_is_refused():
    model = {"name": "m", "path": "", "revision": "", "kv_bytes_per_token": 512}
    host = {"may_be_disturbed": True, "backend": "cpu", "vllm_version": "0.32.0", "vllm_venv": "", "model": model,
            "smaller_model": model | {"kv_bytes_per_token": 0}}  # fmt: skip
    raw = {"protocol": "preemption_ladder", "protocols_dir": "", "results_dir": "", "hosts": {"h1": host}}
    with pytest.raises(UnusableInput, match="kvtrial_smaller_model lacks kv_bytes_per_token"):
        read_request(raw)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({}, "night sets no limit, so every level would keep it; give at least one of preemptions_per_1000_requests"),
        ({"ttft_p95_seconds": -1}, r"night.ttft_p95_seconds=-1.0 is no limit; give a number of 0 or more"),
        ({"ttft_p95_seconds": math.nan}, r"night.ttft_p95_seconds=nan is no limit"),
        ({"e2e_p95_seconds": math.inf}, r"night.e2e_p95_seconds=inf is no limit"),
        ({"e2e_p95_seconds": 0}, r"night.e2e_p95_seconds=0.0 is kept by no request; give more than 0 seconds"),
    ],
    ids=["none", "negative", "nan", "infinite", "zero"],
)
def test_an_objective_that_limits_nothing_is_refused_of_a_user_and_of_a_protocol(limits, said):
    model = {"name": "m", "path": "", "revision": "", "kv_bytes_per_token": 512}
    host = {"may_be_disturbed": True, "backend": "cpu", "vllm_version": "0.32.0", "vllm_venv": "", "model": model}
    raw = {"protocol": "preemption_ladder", "protocols_dir": "", "results_dir": "", "hosts": {"h1": host}}
    with pytest.raises(UnusableInput, match=f"kvtrial_objectives: {said}"):
        read_request(raw | {"objectives": {"night": limits}})
    protocol = load_protocol("preemption_ladder", PROTOCOLS)
    ladder = replace(protocol.ladder, objectives={"night": msgspec.convert(limits, Objective)})
    with pytest.raises(UnusableInput, match=f"protocol preemption_ladder: ladder: objectives: {said}"):
        with_ladder_comparisons(replace(protocol, ladder=ladder))


def test_a_limit_of_ones_own_leaves_the_profiles_other_limits():
    own = requested_protocol(request(objectives={"interactive": Objective(ttft_p95_seconds=0.5)})).ladder.objectives
    assert own["interactive"] == Objective(preemptions_per_1000_requests=0, ttft_p95_seconds=0.5, e2e_p95_seconds=30)
    assert own["batch"].e2e_p95_seconds == 300


def test_own_objectives_stand_beside_the_protocols():
    protocol = requested_protocol(request(objectives={"night": Objective(e2e_p95_seconds=5.0)}))
    assert set(protocol.ladder.objectives) == {"interactive", "batch", "night"}


def test_a_host_without_its_own_sizes_gets_levels_for_its_own_pool():
    protocol = requested_protocol(request())
    host = cpu_host(sizes={"gpu_blocks": 97, "requests": 12})
    assert [phase.concurrency for phase in for_host(protocol, host).phases if phase.reset][-3:] == [7, 9, 11]


def test_two_replicas_bear_what_each_bears_and_are_launched_alike_but_for_port_and_gpu():
    host = {"backend": "cuda", "facts": {"gpus": [{}, {}]}}
    asked = request(arms=["second_replica"], host=host)
    plan = make_plan(asked, requested_protocol(asked)).hosts[0]
    base, replicas = plan.launches["base"], plan.launches["second_replica"]
    # Of one engine: 4 fit, 5 don't. Of two that are sent the same number each: 8 fit, the ninth does not.
    assert [(plan.ladder.onset[arm].last_safe, plan.ladder.onset[arm].low) for arm in plan.launches] == [(4, 5), (8, 9)]
    assert (replicas.argv, replicas.env, replicas.port) == (base.argv, base.env, base.port)
    (second,) = replicas.also
    at = base.argv.index("--port") + 1
    assert second.argv == [*base.argv[:at], str(base.port + 1), *base.argv[at + 1 :]]
    assert second.env == base.env | {"CUDA_VISIBLE_DEVICES": "1"}
    assert second.port == base.port + 1
    assert not base.also


def test_nothing_is_predicted_of_engines_among_which_vllm_itself_splits_the_requests(tmp_path):
    own = tmp_path / "own.yml"
    arms = {"second_replica": {"replicas": None, "args": {"data-parallel-size": 2}}}
    own.write_text(
        yaml.safe_dump(
            {"schema_version": "1.0", "name": "own", "extends": str(PROTOCOLS / "preemption_ladder.yml"), "arms": arms}
        )
    )
    host = {"backend": "cuda", "facts": {"gpus": [{}, {}]}}
    asked = request(protocol=str(own), arms=["second_replica"], host=host)
    plan = make_plan(asked, requested_protocol(asked)).hosts[0]
    assert set(plan.ladder.onset) == {"base"}
    assert any("second_replica: no onset is predicted" in line for line in ladder_lines(plan))


@pytest.mark.parametrize(
    ("arm", "host", "said"),
    [
        (
            "second_replica",
            {"supervisor": "systemd", "facts": {"gpus": [{}, {}]}},
            "2 replicas can't be supervised by systemd, an arm has one unit",
        ),
        (
            "tensor_parallel",
            {"facts": {"gpus": [{}, {}]}, "engine_args": {"pipeline-parallel-size": 2}},
            "arm tensor_parallel: its engines take 4 GPUs",
        ),
        ("base", {"facts": {"gpus": [{}]}, "engine_args": {"tensor-parallel-size": 2}}, "its engines take 2 GPUs"),
    ],
)
def test_what_takes_more_gpus_than_there_are_is_refused(arm, host, said):
    args = cpu_host().engine_args | host.get("engine_args", {})
    asked = request(arms=["more_kv" if arm == "base" else arm], host={"backend": "cuda"} | host | {"engine_args": args})
    with pytest.raises(UnusableInput, match=re.escape(said)):
        make_plan(asked, requested_protocol(asked))


def test_a_pool_given_in_bytes_is_that_of_each_rank_and_every_worker_needs_ram():
    args = {"block-size": 32, "kv-cache-memory-bytes": 64 * 32 * 1024, "max-model-len": 2048}
    host = {"backend": "cuda", "facts": {"gpus": [{}, {}]}, "model": ModelInput("m", "/m", "r", 1024, "random", 0, 9)}
    plans = {
        ranks: make_plan(asked, requested_protocol(asked)).hosts[0]
        for ranks in (1, 2)
        for asked in [
            request(
                protocol="preemption_noise",
                host=host | {"engine_args": args | {"tensor-parallel-size": ranks, "num-gpu-blocks-override": None}},
            )
        ]
    }
    assert plans[2].limits.engine_ram_bytes == 2 * plans[1].limits.engine_ram_bytes


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"preemptions_margin": -5}, "margin '$preemptions_margin' = -5 of preemptions_per_1000_requests"),
        ({"preemptions_margin": 0}, "above 0, in the metric's unit as preemptions_margin of kvtrial_sizes"),
        ({"output_tokens": 0}, "output_tokens=0 of kvtrial_sizes can't be used, phase load takes it as stop_after"),
        ({"output_tokens": -5}, "output_tokens=-5 of kvtrial_sizes can't be used"),
        ({"fewer_seqs": 0}, "fewer_seqs=0 of kvtrial_sizes can't be used, arm fewer_seqs takes it as max-num-seqs"),
        ({"model_tokens": 100}, "set model_tokens to 768 or more in kvtrial_sizes"),
        ({"reserve_tokens": 10}, "set reserve_tokens to 256 or more in kvtrial_sizes"),
    ],
)
def test_a_size_that_no_ladder_can_have_is_refused_by_its_name(sizes, said):
    with pytest.raises(UnusableInput, match=re.escape(said)):
        planned(host={"sizes": {**cpu_host().sizes, **sizes}})


def test_a_margin_of_an_inventory_is_judged_in_every_protocol():
    with pytest.raises(UnusableInput, match="preemptions_margin of kvtrial_sizes"):
        planned(protocol="preemption_noise", host={"sizes": {**cpu_host().sizes, "preemptions_margin": -5}})


@pytest.mark.parametrize(
    ("levels", "said"), [([1, 3, 4, 5, 5, 6, 7], "has 5 twice"), ([0, 1, 3, 4, 5, 6, 7], "has 0, and a level has 1")]
)
def test_levels_that_stand_twice_or_are_none_are_refused_as_that(levels, said):
    with pytest.raises(UnusableInput, match=said):
        planned(ladder=levels)


def test_an_objective_with_an_unknown_limit_is_told_the_known_ones():
    with pytest.raises(UnusableInput, match="known are preemptions_per_1000_requests, ttft_p95_seconds"):
        read_request({**msgspec.to_builtins(request()), "objectives": {"mine": {"ttft": 1}}})


def test_the_plan_says_of_a_difference_what_is_known_beforehand_in_its_unit():
    asked = request(host={"sizes": {**cpu_host().sizes, "preemptions_margin": 30}})
    said = " ".join(announcement(asked, make_plan(asked, requested_protocol(asked)), None, NO_TRACES))
    assert "the least effect that 6 pairs will find is not known beforehand" in said
    assert "beyond the margin of 30 preemptions per 1,000 requests." in said
    assert "a factor of" not in said


@pytest.mark.parametrize(
    ("prices", "says"),
    [
        ({}, r"missing required field `currency`; give currency and at least one of gpu_hour"),
        ({"currency": "EUR", "gpu_hours": 2}, r"unknown field `gpu_hours`; give currency and at least one of gpu_hour"),
        ({"currency": "EUR", "gpu_hour": "two"}, r"prices.gpu_hour='two' can't be used: it must be a number"),
    ],
)
def test_prices_that_cant_be_read_are_refused_by_the_variable_that_there_is(prices, says):
    with pytest.raises(UnusableInput, match=says) as told:
        read_request({"protocol": "preemption_ladder", "protocols_dir": str(PROTOCOLS), "results_dir": "results",
                      "hosts": {}, "prices": prices})  # fmt: skip
    assert "mend the variable kvtrial_prices in the inventory" in str(told.value)


def test_a_profile_has_a_name():
    with pytest.raises(UnusableInput, match="kvtrial_objectives has a profile without a name"):
        read_request({"protocol": "preemption_ladder", "protocols_dir": str(PROTOCOLS), "results_dir": "results",
                      "hosts": {}, "objectives": {" ": {"ttft_p95_seconds": 1}}})  # fmt: skip


def test_an_arm_that_is_named_twice_is_refused():
    with pytest.raises(UnusableInput, match="arm more_kv is asked for 2 times; name each arm once"):
        only_arms(load_protocol("preemption_ladder", PROTOCOLS), ["more_kv", "fewer_seqs", "more_kv"])


def share_planned(facts):
    host = {"backend": "cuda", "facts": facts}
    return planned(arms=["more_memory_share"], host=host).hosts[0]


def test_a_share_of_the_gpus_memory_is_said_to_be_one_change_by_two_options_and_has_an_onset():
    """The engine sizes it: no less than the base's, and no more than the share holds were there nothing else in it."""
    plan = share_planned({"gpus": [{"memory_total_bytes": 2 * 2**20}]})
    base, onset = plan.ladder.onset["base"], plan.ladder.onset["more_memory_share"]
    # 0.95 of 2 MiB at 32 x 512 bytes a block: 121 blocks, of which 16 or 17 are a request's.
    assert (base.low, onset.kind, onset.low, onset.high, onset.sure_end) == (base.low, "range", base.low, 8, True)
    line = next(line for line in ladder_lines(plan) if "more_memory_share" in line)
    assert "two options for one change, since the share counts only without it" in line and "at most 121 blocks" in line
    assert "more_memory_share" not in plan.ladder.usable_gpu_blocks


@pytest.mark.parametrize("facts", [{"gpus": [{"memory_total_bytes": 80 * 2**30}]}, {"gpus": [{}]}, {}])
def test_where_a_share_of_the_gpus_memory_may_hold_all_no_upper_end_is_claimed(facts):
    onset = share_planned(facts).ladder.onset["more_memory_share"]
    assert (onset.kind, onset.sure_end) == ("range", False) and onset.why.endswith(", or none")
    assert onset_error(onset, 10**6) == 0 and onset_errors(onset, [10**6], None) == (None, 0)
    assert onset_error(onset, onset.low - 1) == -1


@pytest.mark.parametrize("facts", [{}, {"ram_total_bytes": 2**45, "ram_available_bytes": 2**45}])
def test_a_kv_cache_that_all_requests_leave_empty_is_warned_of_with_its_bytes(facts):
    asked = request(host={"facts": facts, "sizes": {"more_gpu_blocks": 100_000_000}})
    told = announcement(asked, make_plan(asked, requested_protocol(asked)), None, NO_TRACES)
    said = (
        "h1, arm more_kv: warning: its KV cache of 99,999,999 blocks takes 1,525.9 GiB, and the 8 requests that a "
        "level sends take 128 blocks, were all in flight at once; a smaller one shows the same."
    )
    assert said in told and any("1528.4 GiB of RAM" in line for line in told)
    usual = announcement(request(), planned(), None, NO_TRACES)
    assert not any("KV cache of" in line for line in usual)


def test_the_kv_cache_of_the_largest_arm_counts_as_ram_on_a_cpu_host():
    facts = {"ram_available_bytes": 16 * 2**30, "ram_total_bytes": 16 * 2**30}
    assert planned(host={"facts": facts}).hosts[0].launches
    with pytest.raises(UnusableInput, match=r"KV cache 1638400000000, .*lower the size of the KV cache or tier_bytes"):
        planned(host={"facts": facts, "sizes": {"more_gpu_blocks": 100_000_000}})
