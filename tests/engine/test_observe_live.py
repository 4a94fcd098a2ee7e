"""`kvtrial observe` on a live engine: idle, under preemption, with a tier that serves, with a wrong one, killed.

The engines are real, small and on the CPU; what is asserted are their own counts, read beside the command's.
"""

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvtrial.analysis.cli import main
from served import BLOCK_TOKENS, KV_BYTES_PER_TOKEN, SERVED, Engine, loaded, make_model, tier
from trial import free_port

pytestmark = pytest.mark.timeout(600)
GPU_BLOCKS = 49
GPU_TOKENS = (GPU_BLOCKS - 1) * BLOCK_TOKENS
PROMPT_TOKENS = 496
# Eight prompts in turn are more than the GPU's cache holds, so none is there any more when it comes back.
PREFIXES = 8
CHUNKS = PROMPT_TOKENS // BLOCK_TOKENS


@pytest.fixture(name="engines", scope="module")
def _engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    """Two engines that start side by side: with a tier half the GPU cache's size, and with one four times as large."""
    venv = os.environ.get("KVTRIAL_ENGINE_VENV")
    if not venv:
        pytest.skip("KVTRIAL_ENGINE_VENV does not name an engine's virtual environment")
    folder = tmp_path_factory.mktemp("served")
    model = make_model(Path(venv, "bin", "python"), folder / "model")
    sizes = ("--num-gpu-blocks-override", str(GPU_BLOCKS), "--max-num-seqs", "16")
    started = [
        Engine(Path(venv), model, free_port(), folder / f"tier-{share}.log",
               (*sizes, *tier(int(share * GPU_TOKENS * KV_BYTES_PER_TOKEN))))
        for share in (0.5, 4)
    ]  # fmt: skip
    try:
        small, large = (engine.wait() for engine in started)
        yield small, large
    finally:
        for engine in started:
            engine.end()


@pytest.fixture(name="small", scope="module")
def _small(engines: tuple[Engine, Engine]) -> Engine:
    return engines[0]


def observed(capsys: pytest.CaptureFixture[str], engine: Engine, window: float, *more: str) -> dict[str, Any]:
    assert main(["observe", "--url", engine.url, "--window", str(window), "--json", *more]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def finding(answer: dict[str, Any], class_: str) -> dict[str, Any]:
    found = [one for one in answer["findings"] if one["class"] == class_]
    assert len(found) == 1, [one["class"] for one in answer["findings"]]
    return found[0]


def test_an_idle_server_is_idle_and_says_what_it_is(small, capsys):
    answer = observed(capsys, small, 2, "--log", str(small.log))
    assert (answer["verdict"], answer["class"]) == ("report", "idle")
    assert answer["server"]["version"] == "0.32.0" and answer["server"]["models"] == [SERVED]
    assert answer["findings"][0]["numbers"]["finished"] == 0
    assert answer["server"]["window_seconds"] == pytest.approx(2, rel=0.5)


def test_a_tier_smaller_than_the_gpus_cache_stores_and_never_gives(small, capsys):
    with loaded(small.url, 1, PROMPT_TOKENS, 2, PREFIXES) as load:
        while load.completed < PREFIXES:
            time.sleep(0.05)
        answer = observed(capsys, small, 5, "--log", str(small.log))
        alone = observed(capsys, small, 2)
    assert answer["class"] == "tier_smaller_than_gpu_kv"
    numbers = answer["findings"][0]["numbers"]
    assert numbers["load"] == 0 and numbers["external_hits"] == 0 and numbers["local_hits"] == 0
    assert numbers["store"] > 0 and numbers["store"] % (BLOCK_TOKENS * KV_BYTES_PER_TOKEN) == 0
    assert numbers["tier_bytes"] == GPU_TOKENS // 2 * KV_BYTES_PER_TOKEN
    assert GPU_TOKENS // 2 <= numbers["tier_tokens_at_most"] < numbers["gpu_kv_tokens"]
    # Before 0.33 no metric says how large a tier is: without the log that is not known, and said so.
    assert alone["class"] == "no_reuse_in_workload"
    assert "How large the tier is these pages don't say" in alone["findings"][0]["reason"]


def test_preemption_is_counted_as_the_engine_counts_it(small, capsys):
    with loaded(small.url, 14, 64, 224):
        time.sleep(1.5)
        before = small.counter("vllm:num_preemptions_total")
        answer = observed(capsys, small, 8, "--reads", "5", "--log", str(small.log))
        after = small.counter("vllm:num_preemptions_total")
    assert answer["class"] == "preemption_continuous"
    told = answer["findings"][0]
    numbers = told["numbers"]
    assert 0 < numbers["delta"] <= after - before
    assert before <= numbers["before"] and numbers["after"] <= after
    assert sum(numbers["per_interval"]) == numbers["delta"] and len(numbers["per_interval"]) == 4
    assert numbers["per_finished_request"] == pytest.approx(numbers["delta"] / numbers["finished"])
    assert numbers["kv_usage_max"] > 0.9
    assert f"{numbers['delta']:.0f} preemptions" in told["reason"] and told["confidence"] == "seen"
    # What the log's lines of other moments say does not stand against it.
    assert {"idle", "no_fault_seen", "not_preemption"}.isdisjoint(one["class"] for one in answer["findings"])
    assert "protocol=preemption_ladder" in answer["settle"]["command"]


def test_a_killed_engine_is_dead_by_its_log_and_silent_by_its_address(small, capsys):
    with loaded(small.url, 4, 64, 128):
        time.sleep(1.0)
        os.kill(small.core(), 9)
        small.process.wait(60)
    answer = observed(capsys, small, 1, "--log", str(small.log))
    assert (answer["verdict"], answer["class"]) == ("report", "engine_dead")
    assert "killed from outside" in answer["findings"][0]["reason"]
    assert "no preemption" in answer["findings"][0]["do"]
    assert "does not answer" in finding(answer, "server_does_not_answer")["reason"]
    assert main(["observe", "--url", small.url, "--window", "1", "--json"]) == 2
    alone = json.loads(capsys.readouterr().out)
    assert (alone["verdict"], alone["class"]) == ("error", "server_does_not_answer")


def test_a_tier_that_serves_is_told_by_its_loads(engines, capsys):
    engine = engines[1]
    with loaded(engine.url, 1, PROMPT_TOKENS, 2, PREFIXES) as load:
        while load.completed < 2 * PREFIXES:
            time.sleep(0.05)
        before = engine.counter("vllm:external_prefix_cache_hits_total")
        answer = observed(capsys, engine, 5, "--log", str(engine.log))
        after = engine.counter("vllm:external_prefix_cache_hits_total")
    assert answer["class"] == "healthy_tier_serving"
    numbers = answer["findings"][0]["numbers"]
    assert 0 < numbers["external_hits"] <= after - before
    # Whole chunks of each prompt: 480 of its 496 tokens.
    assert numbers["external_hits"] % (CHUNKS * BLOCK_TOKENS) == 0
    # A load is counted a step after its hit, at both ends of the window.
    expected = numbers["external_hits"] * KV_BYTES_PER_TOKEN
    assert abs(numbers["load"] - expected) <= CHUNKS * BLOCK_TOKENS * KV_BYTES_PER_TOKEN
    assert numbers["share_of_prompt"] == pytest.approx(CHUNKS * BLOCK_TOKENS / PROMPT_TOKENS, abs=0.1)
    percent = re.search(r"kvtrial_hit_share_percent=(\d+)", answer["settle"]["command"])
    assert percent and 85 <= int(percent[1]) <= 100
    assert not any(one["class"] in ("tier_not_pinned", "tier_smaller_than_gpu_kv") for one in answer["findings"])
