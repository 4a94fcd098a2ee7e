"""A plan is a pure function of protocol, hosts and seed; what can't show anything is refused with the numbers."""

import json
import math
import re
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtrial.analysis.inputs import read_request
from kvtrial.analysis.plan import make_plan, requested_protocol
from kvtrial.analysis.workingset import held_at_once, request_blocks, tier_chunks, tier_scope
from kvtrial.host.workload import load_spec, make_prompts, phase_requests
from kvtrial.record.errors import UnusableInput
from kvtrial.record.hazards import Guard, HazardHit, hazards_of
from kvtrial.record.plan import canonical_json

ROOT = Path(__file__).parents[3]


def request(**changes):
    """A request for one CPU host as the local inventory gives it; `changes` go into the host, or to the top."""
    top = {name: changes.pop(name) for name in ("protocol", "seed", "pairs", "arms", "hosts") if name in changes}
    host = {
        "may_be_disturbed": True,
        "backend": "cpu",
        "vllm_version": "0.32.0",
        "vllm_venv": "/opt/engine",
        "engine_args": {"block-size": 32, "num-gpu-blocks-override": 97, "max-model-len": 2048, "enforce-eager": True},
        "engine_env": {"OMP_NUM_THREADS": "2"},
        "connector_extra_config": {"spec_name": "HostOffloadingSpec", "spec_module_path": "kvtrial_host_offload"},
        "model": {"name": "m", "path": "/m", "revision": "r", "weights": "random", "kv_bytes_per_token": 4096,
                  "low_token_id": 32, "high_token_id": 126},
        "ram_reserve_bytes": 2**30,
    }  # fmt: skip
    for name, value in changes.items():
        host[name] = {**host[name], **value} if isinstance(value, dict) and isinstance(host.get(name), dict) else value
    return {"protocol": "offload_return", "protocols_dir": str(ROOT / "playbooks" / "protocols"),
            "results_dir": "results", "hosts": {"h1": host}, **top}  # fmt: skip


def plan(**changes):
    checked = read_request(request(**changes))
    return make_plan(checked, requested_protocol(checked))


def refusal(**changes) -> str:
    with pytest.raises(UnusableInput) as refused:
        plan(**changes)
    sentence = str(refused.value)
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize(("visited", "gone"), [(60, 180), (15, 180), (300, 900), (500, 1500)])
def test_a_controller_is_gone_only_when_it_missed_three_visits(visited, gone):
    planned = plan(if_controller_gone="stop", visited_every_seconds=visited)
    assert planned.hosts[0].limits.controller_gone_seconds == gone
    # Where nobody ends for it, a limit of one's own is taken as it is.
    assert plan(visited_every_seconds=visited, limits={"controller_gone_seconds": 1.0})


def test_a_key_that_is_declared_for_a_spec_of_one_s_own_is_taken():
    config = {"spec_module_path": "mine", "knob": 5, "block_sizes": 1}
    planned = plan(connector_extra_config=config, connector_extra_keys=["knob", "block_sizes"])
    assert '"knob":5' in " ".join(planned.hosts[0].launches["offload"].argv)


@given(seed=st.integers(0, 2**31), pairs=st.sampled_from([2, 6, 8]))
@settings(max_examples=15, deadline=None)
def test_same_inputs_give_the_same_bytes(seed, pairs):
    assert canonical_json(plan(seed=seed, pairs=pairs)) == canonical_json(plan(seed=seed, pairs=pairs))


@given(seed=st.integers(0, 2**31), pairs=st.sampled_from([2, 6, 8, 12]))
@settings(max_examples=25, deadline=None)
def test_arms_are_balanced_and_alternate_abba(seed, pairs):
    runs = [run for run in plan(seed=seed, pairs=pairs).hosts[0].runs if not run.spare]
    order = [run.arm for run in runs]
    assert len(runs) == 2 * pairs
    assert order.count("control") == order.count("offload") == pairs
    firsts = order[::2]
    assert all(a != b for a, b in pairwise(firsts))
    assert [run.pair for run in runs] == [1 + i // 2 for i in range(2 * pairs)]


def test_the_seed_decides_who_is_first():
    assert {plan(seed=seed).hosts[0].runs[0].arm for seed in range(12)} == {"control", "offload"}


def test_both_arms_of_a_pair_send_the_same_and_every_pair_sends_something_new():
    runs = plan().hosts[0].runs
    by_pair = {pair: [run for run in runs if run.pair == pair] for pair in {run.pair for run in runs}}
    for members in by_pair.values():
        assert members[0].phases == members[1].phases
    seeds = {phase.prompts.seed for run in runs for phase in run.phases}
    sets = {phase.prompts.name for run in runs for phase in run.phases}
    assert len(seeds) == len(by_pair) * len(sets)


def test_the_two_blocks_alternate_by_pair():
    runs = {run.pair: [phase.name for phase in run.phases] for run in plan().hosts[0].runs}
    assert runs[1].index("return") < runs[1].index("noload_return")
    assert runs[2].index("return") > runs[2].index("noload_return")
    assert sorted(runs[1]) == sorted(runs[2])
    assert runs[1][:2] == runs[2][:2] == ["warmup", "warmup_return"]


def test_arms_differ_in_the_connector_and_in_nothing_else():
    launches = plan().hosts[0].launches
    control, offload = launches["control"].argv, launches["offload"].argv
    at = offload.index("--kv-transfer-config")
    assert offload[:at] + offload[at + 2 :] == control
    assert launches["control"].env == launches["offload"].env
    assert control[control.index("--host") + 1] == "127.0.0.1"
    assert launches["control"].env["VLLM_HOST_IP"] == "127.0.0.1"
    config = json.loads(offload[at + 1])
    assert config["kv_connector_extra_config"]["cpu_bytes_to_use"] == 268435456
    assert config["kv_connector_extra_config"]["spec_name"] == "HostOffloadingSpec"


def test_an_old_vllm_leaves_out_the_phases_it_cannot_do_and_sets_the_guards_in_all_arms():
    gpu = {"backend": "cuda", "connector_extra_config": {"spec_name": "CPUOffloadingSpec", "spec_module_path": None}}
    old = plan(vllm_version="0.26.0", **gpu).hosts[0]
    assert not any(phase.name.startswith("noload") for phase in old.runs[0].phases)
    assert all("--no-async-scheduling" in launch.argv for launch in old.launches.values())
    assert not any("--no-async-scheduling" in launch.argv for launch in plan(**gpu).hosts[0].launches.values())


@given(count=st.integers(1, 6), tokens=st.integers(8, 60), suffix=st.integers(0, 8), seed=st.text(max_size=5))
def test_prompts_are_repeatable_distinct_and_end_alike(count, tokens, suffix, seed):
    from kvtrial.record.plan import PromptPlan

    made = PromptPlan(
        name="s", seed=seed, count=count, tokens=tokens + suffix, suffix_tokens=suffix, low_id=32, high_id=126
    )
    prompts = make_prompts(made)
    assert prompts == make_prompts(made)
    assert all(len(prompt) == tokens + suffix for prompt in prompts)
    assert all(32 <= token <= 126 for prompt in prompts for token in prompt)
    assert len({tuple(prompt) for prompt in prompts}) == count
    if suffix:
        assert len({tuple(prompt[-suffix:]) for prompt in prompts}) == 1


def test_a_repeated_phase_sends_every_prompt_twice_under_its_own_key():
    host = plan().hosts[0]
    phase = next(phase for phase in host.runs[0].phases if phase.name == "fits_return")
    requests = list(phase_requests(phase, Path()))
    assert load_spec(phase, host.launches["control"], host.limits).concurrency == 1
    assert [r.key for r in requests] == ["fits/0", "fits/1", "fits/2", "fits/0#2", "fits/1#2", "fits/2#2"]
    assert requests[0].prompt_token_ids == requests[3].prompt_token_ids
    assert {r.cache_salt for r in requests} == {"kvtrial.p1.fits"}


@given(prompt=st.integers(1, 5000), output=st.integers(1, 500), block=st.sampled_from([16, 32, 128]))
def test_a_request_takes_the_blocks_of_all_tokens_but_the_last(prompt, output, block):
    assert request_blocks(prompt, output, block) == math.ceil((prompt + output - 1) / block)


def test_a_tier_holds_whole_chunks():
    assert tier_chunks(268435456, 64, 4096) == 1024
    assert tier_chunks(262143, 64, 4096) == 0


REFUSALS = [
    ({"protocol": "offload_retrun"}, ["offload_retrun", "offload_return", "Did you mean"]),
    ({"arms": ["offlaod"]}, ["offlaod", "known: control, offload"]),
    ({"pairs": 5}, ["pairs=5", "even", "6"]),
    ({"pairs": 0}, ["pairs=0", "2 to 100"]),
    ({"sizes": {"presure": 3}}, ["presure", "Did you mean pressure"]),
    ({"sizes": {"tier_bytes": "much"}}, ["'much'", "whole number", "kvtrial_sizes"]),
    ({"sizes": {"tier_bytes": 8}}, ["cpu_bytes_to_use=8 is 8 bytes", "8 GiB (8589934592)"]),
    ({"sizes": {"tier_bytes": 10_000_000}}, ["not larger than the GPU", "3104 tokens"]),
    ({"sizes": {"tier_bytes": 110_000_000}}, ["0.8", "384 chunks", "tier_bytes to 125829120"]),
    ({"sizes": {"pressure": 4}}, ["takes 68 blocks", "holds 96", "7 prompts or more"]),
    ({"sizes": {"fits": 9}}, ["fits_return", "153 blocks", "holds 96"]),
    ({"sizes": {"prompt_tokens": 512}}, ["512 tokens end at the edge of a block", "528"]),
    ({"sizes": {"chunk_tokens": 100}}, ["100", "not a multiple", "32"]),
    ({"connector_extra_config": {"cpu_byte_to_use": 1}}, ["cpu_byte_to_use", "cpu_bytes_to_use"]),
    ({"connector_extra_config": {"my_magic_knob": 5}}, ["my_magic_knob is no key of OffloadingConnector"]),
    ({"connector_extra_config": {"my_magic_knob": 5}, "connector_extra_keys": ["my_magic_knob"]}, ["my_magic_knob"]),
    ({"connector_extra_config": {"lazy_offload": True}}, ["lazy_offload", "a key of SimpleCPUOffloadConnector"]),
    (
        {"connector_extra_config": {"spec_module_path": "mine", "knob": 5}, "connector_extra_keys": ["other"]},
        ["knob is no key", "whether the spec of mine reads it", "kvtrial_connector_extra_keys"],
    ),
    ({"engine_args": {"kv-offloading-size": 4}}, ["--kv-offloading-size", "--kv-transfer-config", "4294967296"]),
    ({"engine_args": {"host": "0.0.0.0"}}, ["0.0.0.0", "127.0.0.1"]),
    ({"engine_args": {"port": 9}}, ["port", "kvtrial_port"]),
    ({"may_be_disturbed": False}, ["h1", "kvtrial_host_may_be_disturbed"]),
    ({"backend": "rocm"}, ["backend='rocm'", "allowed are cpu, cuda", "kvtrial_backend"]),
    ({"model": {"weights": "none"}}, ["model.weights='none'", "allowed are random, trained"]),
    ({"connector_extra_config": {"offload_prompt_only": True}}, ["offload_prompt_only=True", "take it out"]),
    ({"connector_extra_config": {"cpu_byte_to_use": 1}}, ["did you mean cpu_bytes_to_use? Take"]),
    ({"engine_args": {"enable-prefix-caching": False}}, ["prefix caching is off", "kvtrial_engine_args"]),
    ({"engine_args": {"no-enable-prefix-caching": True}}, ["prefix caching is off", "kvtrial_engine_args"]),
    ({"client_cpus": "14_15"}, ["kvtrial_client_cpus='14_15'", "14-15"]),
    ({"client_cpus": ""}, ["kvtrial_client_cpus is empty", "auto"]),
    ({"seed": "abc"}, ["seed='abc'", "kvtrial_seed"]),
    ({"vllm_version": "new"}, ["'new'", "0.32.0"]),
    ({"limits": {"deadline": 3}}, ["deadline", "deadline_seconds"]),
    ({"facts": {"ram_available_bytes": 10**9}}, ["1000000000 bytes of RAM", "268435456"]),
    ({"protocol": "seed_example"}, ["holds 2047", "kv-cache-memory-bytes to 14942208 or less", "145 prompts"]),
    ({"hosts": {}}, ["no host"]),
    ({"port": 0}, ["kvtrial_port=0", "65535"]),
    ({"port": 70000}, ["70000"]),
    ({"ram_reserve_bytes": -1}, ["kvtrial_ram_reserve_bytes=-1"]),
    ({"sizes": {"targets": 0}}, ["target has 0 prompts"]),
    ({"sizes": {"pressure": -3}}, ["-3 prompts"]),
    ({"sizes": {"prompt_tokens": -1}}, ["-1 tokens"]),
    ({"sizes": {"suffix_tokens": 600}}, ["600 are their common end"]),
    ({"sizes": {"output_tokens": 0}}, ["max_tokens=0"]),
    ({"sizes": {"concurrency": 0}}, ["concurrency=0"]),
    ({"limits": {"deadline_seconds": -5}}, ["deadline_seconds=-5"]),
    ({"limits": {"idle_timeout_seconds": float("nan")}}, ["above 0"]),
    ({"engine_args": {"max-model-len": 500}}, ["534 tokens with its answer", "max-model-len is 500", "534 or more"]),
    ({"engine_args": {"max_model_len": "0.5k"}}, ["max-model-len is 500"]),
    ({"model": {"low_token_id": 200}}, ["token ids 200 to 126"]),
    ({"model": {"low_token_id": -1}}, ["token ids -1 to 126"]),
    ({"vllm_version": "99.0.0"}, ["vLLM 99.0.0 is newer than 0.33", "pin a vLLM from 0.11 to 0.33"]),
    ({"vllm_version": "0.8.0"}, ["vLLM 0.8.0 is older than 0.11"]),
    ({"engine_args": {"uds": "/tmp/s"}}, ["--uds='/tmp/s'", "remove it"]),
    ({"protocol": "/nonexist.yml"}, ["/nonexist.yml", "no such file"]),
    ({"protocol": "/tmp"}, ["/tmp", "no such file"]),
    ({"engine_env": {"A": 5}}, ["engine_env.A=5", "kvtrial_engine_env in"]),
    ({"limits": {"deadline_seconds": "soon"}}, ["limits.deadline_seconds='soon'", "kvtrial_limits in"]),
    (
        {"if_controller_gone": "stop", "visited_every_seconds": 500, "limits": {"controller_gone_seconds": 900}},
        ["controller_gone_seconds=900", "every 500 s", "give 1500 or more"],
    ),
    ({"hosts": {"a/b": {}}}, ["'a/b'", "slash"]),
    ({"hosts": {".hidden": {}}}, ["'.hidden'", "dot"]),
    ({"hosts": {"a\0b": {}}}, ["NUL"]),
]


@pytest.mark.parametrize(("changes", "named"), REFUSALS, ids=[str(changes)[:50] for changes, _ in REFUSALS])
def test_bad_input_is_refused_in_a_sentence_that_names_it(changes, named):
    changes = dict(changes)
    if changes.get("hosts"):
        changes["hosts"] = dict.fromkeys(changes["hosts"], request()["hosts"]["h1"])
    if changes.get("protocol") == "seed_example":
        changes["engine_args"] = {"kv-cache-memory-bytes": "256M"}
    sentence = refusal(**changes)
    for part in named:
        assert part in sentence, sentence


def test_what_the_refusal_of_the_seeds_example_offers_can_be_done_and_is_the_smallest():
    pool = {"kv-cache-memory-bytes": "256M"}
    sentence = refusal(protocol="seed_example", engine_args=pool, sizes={"misses": 7})
    pool_bytes = int(re.search(r"kv-cache-memory-bytes to (\d+) or less", sentence)[1])
    assert plan(protocol="seed_example", engine_args={"kv-cache-memory-bytes": pool_bytes})
    refusal(protocol="seed_example", engine_args={"kv-cache-memory-bytes": pool_bytes + 32 * 4096})
    offered = json.loads(re.search(r"-e '(\{.*\})'", sentence)[1])["kvtrial_sizes"]
    assert offered["misses"] == 7
    assert plan(protocol="seed_example", engine_args=pool, sizes=offered)
    refusal(protocol="seed_example", engine_args=pool, sizes={**offered, "pressure": offered["pressure"] - 1})


def test_a_size_that_the_protocol_has_not_is_not_offered():
    sentence = refusal(protocol="offload_mix", engine_args={"num-gpu-blocks-override": 1000})
    offered = json.loads(re.search(r"-e '(\{.*\})'", sentence)[1])["kvtrial_sizes"]
    assert list(offered) == ["pressure"]


def test_the_seeds_own_command_is_refused_for_its_own_model_with_the_numbers():
    sentence = refusal(
        protocol="seed_example",
        backend="cuda",
        engine_args={"block-size": None, "enforce-eager": None, "kv-cache-memory-bytes": "20G"},
        connector_extra_config=STOCK,
        model={"kv_bytes_per_token": 114688},
    )
    assert "not larger than the GPU" in sentence or "smaller" in sentence, sentence


def test_a_protocol_that_contradicts_itself_is_refused(tmp_path):
    base = (ROOT / "playbooks" / "protocols" / "offload_return.yml").read_text()
    wrong = {
        "role: primary}": ("role: guard}", "0 primary comparisons"),
        "prompts: warm, salt": ("prompts: wram, salt", "wram"),
        "control: control\n": ("control: contrl\n", "contrl"),
        'schema_version: "1.0"': ('schema_version: "2.0"', "2.0"),
        "  prefix_evicted:": ("  prefix_evictd:", "prefix_evictd"),
        "question:": ("qestion:", "qestion"),
        "name: offload_return\n": ("name: ../up\n", "protocol name '../up'"),
        "  offload:\n": ("  off/load:\n", "arm name 'off/load'"),
        "name: gpu_hit, ": ("name: gpu hit, ", "phase name 'gpu hit'"),
        "faults: {replacement_pairs: 2}": (
            "faults: {replacement_pairs: 50}",
            "replacement_pairs=50 can't be used; give 0 to 2",
        ),
    }
    for old, (new, named) in wrong.items():
        assert old in base
        path = tmp_path / "mine.yml"
        path.write_text(base.replace(old, new, 1))
        assert named in refusal(protocol=str(path))


@pytest.mark.parametrize("margin", ["-1", "0", ".nan", ".inf", "2", "$tier_bytes"])
def test_a_margin_that_can_decide_nothing_is_refused(tmp_path, margin):
    base = (ROOT / "playbooks" / "protocols" / "offload_return.yml").read_text()
    assert "role: primary}" in base
    path = tmp_path / "mine.yml"
    path.write_text(base.replace("role: primary}", f"role: primary, margin: {margin}}}", 1))
    assert "can't be used; give a number above 0, up to 1 (0.05 is 5 %)" in refusal(protocol=str(path))


def test_the_prompt_length_that_is_advised_is_never_at_an_edge():
    for block in (16, 32, 48):
        sizes = {"prompt_tokens": 30 * block, "chunk_tokens": block, "targets": 2, "fits": 1, "gpu_hits": -1}
        args = {"block-size": block, "num-gpu-blocks-override": 65, "max-model-len": 65 * block}
        assert f"{30 * block + block // 2}." in refusal(engine_args=args, sizes=sizes, backend="cuda",
                                                        connector_extra_config=STOCK)  # fmt: skip


STOCK = {"spec_name": "CPUOffloadingSpec", "spec_module_path": None}


def test_a_guard_is_set_as_a_whole_even_where_one_of_its_words_is_there_already(monkeypatch):
    guarded = Guard(args=["--max-logprobs", "2"])
    hazard = msgspec.structs.replace(hazards_of("0.26.0")[0], guard=guarded)
    hit = HazardHit(hazard, ["control"], "guard", False, "planted")
    monkeypatch.setattr("kvtrial.analysis.plan.hazards_for", lambda *_: [hit])
    launches = plan(engine_args={"max-num-seqs": 2}).hosts[0].launches
    assert all(launch.argv[-2:] == ["--max-logprobs", "2"] for launch in launches.values())
    launches = plan(engine_args={"max-logprobs": 2}).hosts[0].launches
    assert all(launch.argv.count("--max-logprobs") == 1 for launch in launches.values())


def test_a_protocol_file_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "latin.yml").write_bytes("question: für wen?\n".encode("latin-1"))
    assert "not UTF-8" in refusal(protocol=str(tmp_path / "latin.yml"))


def test_a_loop_of_extends_and_a_file_that_is_no_yaml_are_refused(tmp_path):
    (tmp_path / "a.yml").write_text("extends: b\n")
    (tmp_path / "b.yml").write_text("extends: a\n")
    assert "extends itself" in refusal(protocol=str(tmp_path / "a.yml"))
    (tmp_path / "c.yml").write_text("a: [")
    assert "not YAML" in refusal(protocol=str(tmp_path / "c.yml"))


def test_fewer_than_six_pairs_are_planned_without_a_least_detectable_effect():
    estimate = plan(pairs=2).estimates["h1"]
    assert estimate.mde_ratio is None
    assert plan().estimates["h1"].mde_ratio > 1


LENGTHS = {
    "protocol": "offload_lengths",
    "backend": "cuda",
    "vllm_version": "0.26.0",
    "engine_args": {"block-size": 16, "num-gpu-blocks-override": 2300, "max-model-len": 16640},
    "connector_extra_config": {"spec_name": "CPUOffloadingSpec", "spec_module_path": None},
}


def lengths(kv_bytes_per_token, **changes):
    merged = {**LENGTHS, **changes}
    merged["connector_extra_config"] = {
        **LENGTHS["connector_extra_config"],
        **changes.get("connector_extra_config", {}),
    }
    return {**merged, "model": {"kv_bytes_per_token": kv_bytes_per_token}}


@pytest.mark.parametrize("kv_bytes_per_token", [114688, 147456])
def test_prefixes_of_three_lengths_fit_one_tier_one_after_another(kv_bytes_per_token):
    host = plan(**lengths(kv_bytes_per_token)).hosts[0]
    assert sum(not run.spare for run in host.runs) == 12
    assert all("--no-async-scheduling" in launch.argv for launch in host.launches.values())
    first, second = (list(dict.fromkeys(p.block for p in run.phases)) for run in (host.runs[0], host.runs[2]))
    assert first == ["warmup", "l2k", "l8k", "l16k", "fits", "miss"]
    assert second == ["warmup", "l16k", "l8k", "l2k", "fits", "miss"]
    for run in host.runs:
        sizes = {p.name: (len(p.indices), p.prompts.tokens) for p in run.phases}
        assert sizes["return_2k"] == (8, 2056)
        assert sizes["return_8k"] == (8, 8200)
        assert sizes["return_16k"] == (8, 16392)
        assert all(p.prompts.tokens % 64 == p.prompts.tokens % 16 == 8 for p in run.phases)


def test_a_tier_that_does_not_hold_one_length_is_refused_with_the_least_that_does():
    sentence = refusal(**lengths(147456, sizes={"tier_bytes": 30_000_000_000}))
    assert "stores 2816 chunks of 64 tokens in one block of phases" in sentence
    assert f"Set tier_bytes to {2816 / 0.8 * 64 * 147456:.0f} or more" in sentence


def test_a_tier_that_may_keep_what_is_old_must_hold_the_whole_run():
    sentence = refusal(**lengths(147456, connector_extra_config={"eviction_policy": "arc"}))
    assert "in one block of phases" not in sentence
    assert "a cyclic set loses everything" in sentence


def test_pressure_of_one_length_is_refused_by_its_own_name():
    sentence = refusal(**lengths(114688, sizes={"pressure_2k": 8}))
    assert "pressure_2k takes 1032 blocks" in sentence
    assert 'send 22 prompts or more there: -e \'{"kvtrial_sizes": {"pressure_2k": 22}}\'' in sentence


def test_a_hit_of_one_length_must_still_be_in_the_gpu_cache():
    assert "gpu_hit_16k asks for 3075 blocks" in refusal(**lengths(114688, sizes={"gpu_hits": -3}))


def test_a_tier_holds_the_largest_block_unless_blocks_share_prompts_or_the_run_counts():
    stored = [("a", "p", 3), ("a", "p", 4), ("a", "q", 1), ("b", "r", 2)]
    assert held_at_once(stored, "block") == 5
    assert held_at_once(stored, "run") == 7
    assert held_at_once([*stored, ("b", "p", 6)], "block") == 6 + 1 + 2
    assert held_at_once([], "block") == 0


def test_only_a_tier_that_throws_out_what_is_oldest_is_counted_by_block():
    assert tier_scope("block", {}) == tier_scope("block", {"eviction_policy": "lru"}) == "block"
    assert tier_scope("block", {"eviction_policy": "arc"}) == tier_scope("run", {}) == "run"


def test_control_against_control_has_the_phases_and_comparisons_of_the_trial_whose_noise_it_shows():
    sizes = {"fits": 1, "misses": 3}
    trial = plan(**lengths(114688, sizes=sizes))
    as_there = {**LENGTHS["engine_args"], "no-async-scheduling": True}
    noise = plan(**lengths(114688, protocol="aa_lengths", sizes=sizes, engine_args=as_there))
    mine, theirs = noise.hosts[0], trial.hosts[0]
    assert sorted(mine.launches) == ["again", "control"]
    assert mine.launches["again"].argv == mine.launches["control"].argv
    assert sorted(mine.launches["control"].argv) == sorted(theirs.launches["control"].argv)
    assert mine.launches["again"].env == mine.launches["control"].env
    assert [[(p.name, p.block, len(p.indices), p.prompts.tokens) for p in run.phases] for run in mine.runs] == [
        [(p.name, p.block, len(p.indices), p.prompts.tokens) for p in run.phases] for run in theirs.runs
    ]
    declared = [
        [(c.phase, c.metric, c.role, c.effect_scale) for c in campaign.protocol.comparisons]
        for campaign in (noise, trial)
    ]
    assert declared[0] == declared[1]
    assert mine.capacity.tier_bytes == {}
    assert not {"treatment_delivered", "answers_equal", "noload_respected"} & set(noise.protocol.gates)


def layouts(**changes):
    asked = {"protocol": "offload_layout", "engine_env": {"VLLM_KV_CACHE_LAYOUT": "HND"}, **changes}
    return lengths(147456, sizes={"tier_bytes": 36 * 2**30, **asked.pop("sizes", {})}, **asked)


def test_the_arm_in_the_engines_own_layout_is_the_control_without_the_variable_that_pins_it():
    host = plan(**layouts()).hosts[0]
    assert sum(not run.spare for run in host.runs) == 18
    control, default, offload = (host.launches[arm] for arm in ("control", "default_layout", "offload"))
    assert control.argv == default.argv
    assert {**default.env, "VLLM_KV_CACHE_LAYOUT": "HND"} == control.env == offload.env
    assert "VLLM_KV_CACHE_LAYOUT" not in default.env
    assert all("--no-async-scheduling" in launch.argv for launch in host.launches.values())


def test_returns_with_several_in_flight_stand_beside_those_with_one_and_fit_the_gpu_cache_together():
    host = plan(**layouts()).hosts[0]
    for run in host.runs:
        phases = {phase.name: phase for phase in run.phases}
        several = phases["return_together"]
        assert (several.concurrency, len(several.indices), several.prompts.tokens) == (4, 12, 8200)
        assert several.concurrency * request_blocks(8200, several.max_tokens, 16) <= host.capacity.usable_gpu_blocks
        assert phases["populate_together"].salt == several.salt != phases["return_8k"].salt
        assert {phase.concurrency for name, phase in phases.items() if not name.endswith("_together")} == {1}
    first, second = (list(dict.fromkeys(p.block for p in run.phases)) for run in (host.runs[0], host.runs[3]))
    assert first == ["warmup", "l8k", "l16k", "together", "miss"]
    assert second == ["warmup", "together", "l16k", "l8k", "miss"]


def test_a_variable_taken_out_may_be_secret_by_its_name_for_nothing_of_it_is_written(tmp_path):
    text = (ROOT / "playbooks" / "protocols" / "offload_layout.yml").read_text()
    (tmp_path / "mine.yml").write_text(
        text.replace("{VLLM_KV_CACHE_LAYOUT: null}", "{SOME_API_KEY: null, VLLM_KV_CACHE_LAYOUT: null}")
    )
    planned = plan(**layouts(protocol=str(tmp_path / "mine.yml")))
    assert "SOME_API_KEY" not in planned.hosts[0].launches["default_layout"].env


def test_an_arm_that_takes_out_what_the_host_does_not_set_is_refused():
    with pytest.raises(
        UnusableInput, match=r"default_layout \(VLLM_KV_CACHE_LAYOUT\) runs exactly as control does here"
    ):
        plan(**layouts(engine_env={}))
