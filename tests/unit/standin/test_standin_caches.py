"""The stand-in's caches against what was seen on a real vLLM 0.32.0 on the CPU."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
REAL = json.loads((HERE / "real_counters.json").read_text(encoding="utf-8"))["counters"]
LOAD = "vllm:kv_offload_load_bytes_total"
STORE = "vllm:kv_offload_store_bytes_total"


def source(name: str) -> str:
    return f'vllm:prompt_tokens_by_source_total{{source="{name}"}}'


def gained(before: dict[str, float], after: dict[str, float], name: str) -> float:
    return after.get(name, 0.0) - before.get(name, 0.0)


@pytest.mark.parametrize("arm", ["control", "offload"])
def test_the_same_requests_leave_the_counters_of_the_real_engine(arm: str, launch: Any, prompt: Any) -> None:
    engine = launch(arm)
    targets = [prompt(f"T{index}") for index in range(3)]
    engine.ask(prompt("w"))
    engine.ask(prompt("sse"), 8)
    for target in targets + targets:
        engine.ask(target, 16)
    for index in range(8):
        engine.ask(prompt(f"F{index}"), 1)
    for target in targets:
        engine.ask(target, 16)
    engine.ask(targets[0], kv_transfer_params={"max_load_tokens": 0})
    samples = engine.samples()
    # How often the engine steps is its own affair; everything else that is a count is equal.
    differing = {
        name: (value, samples.get(name))
        for name, value in REAL[arm].items()
        if samples.get(name) != value and not name.startswith("vllm:iteration_tokens")
    }
    assert differing == {}
    assert samples["vllm:iteration_tokens_total_sum"] == REAL[arm]["vllm:iteration_tokens_total_sum"]


@pytest.mark.parametrize("arm", ["control", "offload"])
def test_a_return_after_pressure_is_loaded_with_a_tier_and_computed_without(arm: str, launch: Any, prompt: Any) -> None:
    engine = launch(arm)
    targets = [prompt(f"T{index}") for index in range(8)]
    for target in targets:
        engine.ask(target)
    assert engine.ask(targets[-1]).cached_tokens == 1024  # gpu_hit
    for index in range(8):
        engine.ask(prompt(f"F{index}"), 1)
    before = engine.samples()
    returned = [engine.ask(target).cached_tokens for target in targets]
    after = engine.samples()
    assert returned == [1024 if arm == "offload" else 0] * 8
    assert gained(before, after, "vllm:prefix_cache_hits_total") == 0
    assert gained(before, after, source("local_cache_hit")) == 0
    names = ("local_compute", "local_cache_hit", "external_kv_transfer")
    sources = sum(gained(before, after, source(name)) for name in names)
    assert sources == gained(before, after, "vllm:prompt_tokens_total") == 8 * 1040
    if arm == "offload":
        assert gained(before, after, LOAD) == 8 * 1024 * 4096
        assert gained(before, after, source("external_kv_transfer")) == 8 * 1024
    else:
        assert not any("vllm:kv_offload" in name for name in after)


# Three targets of 33 blocks on 192 usable ones; x blocks of pressure in four prompts; what is left of each target.
@pytest.mark.parametrize(("pressure_blocks", "local_hit"), [(96, 1024), (110, 672), (130, 32), (160, 0)])
def test_pressure_below_capacity_evicts_only_tails(
    pressure_blocks: int, local_hit: int, launch: Any, prompt: Any
) -> None:
    engine = launch("control")
    targets = [prompt(f"T{index}") for index in range(3)]
    for target in targets:
        engine.ask(target)
    share, rest = divmod(pressure_blocks, 4)
    for index in range(4):
        blocks = share + (index < rest)
        engine.ask(prompt(f"F{index}", blocks * 32 - 16), 1)
    assert [engine.ask(target).cached_tokens for target in targets] == [local_hit] * 3


@pytest.mark.parametrize(("prompts", "returned_tokens"), [(16, 1024), (17, 0), (20, 0)])
def test_a_cyclic_set_larger_than_the_tier_returns_nothing(
    prompts: int, returned_tokens: int, launch: Any, prompt: Any
) -> None:
    engine = launch("offload", tier_bytes=16 * 1024 * 4096)
    cycle = [prompt(f"T{index}") for index in range(prompts)]
    for target in cycle:
        engine.ask(target, 1)
    assert {engine.ask(target, 1).cached_tokens for target in cycle} == {returned_tokens}


def test_a_prompt_of_whole_blocks_is_recomputed_in_its_last_block_on_a_gpu_hit_only(launch: Any, prompt: Any) -> None:
    engine = launch("offload")
    engine.ask(prompt("whole", 1024))
    assert engine.ask(prompt("whole", 1024)).cached_tokens == 992
    for index in range(8):
        engine.ask(prompt(f"F{index}"), 1)
    assert engine.ask(prompt("whole", 1024)).cached_tokens == 1024


@pytest.mark.parametrize(
    ("cap", "loaded"), [(0, 0), (512, 512), (100, 64), (True, 1024), ("0", 1024), (None, 1024), (-1, 1024)]
)
def test_only_an_int_caps_the_load(cap: object, loaded: int, launch: Any, prompt: Any) -> None:
    engine = launch("offload", blocks=34)
    engine.ask(prompt("T"))
    engine.ask(prompt("F"))
    answer = engine.ask(prompt("T"), kv_transfer_params={"max_load_tokens": cap})
    assert (answer.status, answer.cached_tokens) == (200, loaded)


def test_the_salt_separates_caches_but_not_answers(launch: Any, prompt: Any) -> None:
    engine = launch("control")
    first = engine.ask(prompt("T"), cache_salt="a")
    other = engine.ask(prompt("T"), cache_salt="b")
    again = engine.ask(prompt("T"), cache_salt="a")
    assert (first.cached_tokens, other.cached_tokens, again.cached_tokens) == (0, 0, 1024)
    assert first.token_ids == other.token_ids == again.token_ids
    changed = prompt("T")
    changed[0] ^= 1
    assert engine.ask(changed).token_ids != first.token_ids


def closed_loop(engine: Any, concurrency: int, prompts: list[list[int]], output: int) -> float:
    before = engine.samples()
    with ThreadPoolExecutor(concurrency) as clients:
        answers = list(clients.map(lambda tokens: engine.ask(tokens, output), prompts))
    assert all(len(answer.token_ids) == output for answer in answers)
    after = engine.samples()
    assert gained(before, after, "vllm:request_num_preemptions_sum") == gained(
        before, after, "vllm:num_preemptions_total"
    )
    return gained(before, after, "vllm:num_preemptions_total")


@pytest.mark.parametrize(
    ("input_tokens", "output_tokens", "concurrency", "preempts"),
    [(256, 256, 4, False), (256, 256, 6, True), (64, 448, 4, False), (64, 448, 6, True), (448, 64, 12, False)],
)
def test_preemption_begins_where_blocks_of_input_and_output_no_longer_fit(
    input_tokens: int, output_tokens: int, concurrency: int, preempts: bool, launch: Any, prompt: Any
) -> None:
    engine = launch("control", blocks=65)
    prompts = [prompt(f"P{index}", input_tokens) for index in range(2 * concurrency)]
    preemptions = closed_loop(engine, concurrency, prompts, output_tokens)
    assert (preemptions > 0) == preempts
