"""Sizes of a CPU tier: planned as shares of the GPU cache, and the RAM budget that follows from what each gave back."""

import pytest
from build import PROTOCOLS, honest_records
from kvtrial.analysis.compare import blank_result
from kvtrial.analysis.faults import Pair
from kvtrial.analysis.plan import for_host
from kvtrial.analysis.protocols import load_protocol
from kvtrial.analysis.tiers import tier_budget, with_budget
from kvtrial.analysis.workingset import tier_chunks
from kvtrial.record.verdict import Recommendation
from ladder_build import cpu_host
from msgspec.structs import replace

SIZES = {"tier_4x": 4, "tier_2x": 2, "tier_1_2x": 1.2}


@pytest.fixture(name="protocol", scope="module")
def _protocol():
    return for_host(load_protocol("tier_size", PROTOCOLS), cpu_host())


def test_tiers_are_so_many_times_the_usable_gpu_cache_in_whole_chunks(protocol):
    gpu_chunks = 96 * 32 / 64
    for arm, times in SIZES.items():
        extra = protocol.arms[arm].args["kv-transfer-config"]["kv_connector_extra_config"]
        chunks = tier_chunks(extra["cpu_bytes_to_use"], 64, 512)
        assert times * gpu_chunks <= chunks < times * gpu_chunks + 1
        assert extra["cpu_bytes_to_use"] % (64 * 512) == 0
    assert protocol.control == "off" and protocol.arms["off"].args == {}


SOME_PAY = {"tier_4x": "BETTER", "tier_2x": "BETTER", "tier_1_2x": "INCONCLUSIVE"}


def _broken(phase, fault):
    """The return with answers that are not those of the GPU's own hits, or without a byte loaded."""
    if phase.name != "return":
        return phase
    if fault == "loads":
        return replace(phase, after=phase.after | {"load_bytes": phase.before["load_bytes"]})
    return replace(phase, requests=[replace(request, answer_sha256="0" * 64) for request in phase.requests])


def judged(protocol, words, against_largest="EQUIVALENT", low=0.97, idle=(), broken=""):
    """The budget where the arms' primary comparisons have these words, and tiers that are `idle` gave nothing back."""
    runs = honest_records(1)
    gpu = 192 * 32 * 4096
    pair = {"off": replace(runs[0], arm="off")}
    for arm, times in SIZES.items():
        capacity = replace(runs[1].capacity, tier_bytes={arm: int(times * gpu)}, chunk_tokens={arm: 64})
        phases = [
            replace(phase, after=phase.after | {"load_bytes": phase.before.get("load_bytes")}) if arm in idle else phase
            for phase in runs[1].phases
        ]
        if arm == "tier_2x" and broken in ("answers", "loads"):
            phases = [_broken(phase, broken) for phase in phases]
        pair[arm] = replace(runs[1], arm=arm, capacity=capacity, phases=phases)
    comparisons = []
    for declared in protocol.comparisons:
        result = blank_result(declared, protocol, "not_compared")
        if declared.phase == "return" and declared.metric == "ttft_median_seconds":
            if declared.against == "off":
                result = replace(result, verdict=words[declared.arm], effect=0.2, ci_low=0.18, ci_high=0.22)
            else:
                result = replace(result, verdict=against_largest, effect=1.0, ci_low=low, ci_high=1.04)
        slow = {"misses": ("tier_2x", "off", "miss"), "throughput": ("tier_2x", "off", "return")}.get(broken)
        is_miss_or_rate = declared.phase == "miss" or "throughput" in declared.metric
        if is_miss_or_rate and slow == (declared.arm, declared.against, declared.phase):
            result = replace(result, verdict="WORSE")
        comparisons.append(result)
    return tier_budget(protocol, [Pair(1, pair)], comparisons)


def test_the_smallest_tier_that_gives_what_the_largest_gives_is_the_budget(protocol):
    budget = judged(protocol, SOME_PAY)
    assert budget.budget_bytes == 2 * 192 * 32 * 4096
    assert budget.advice.startswith("tier_2x: 50,331,648 bytes of RAM (2 times the GPU's KV cache)")
    assert "tier_4x buys nothing more: shrink it" in budget.advice
    assert "tier_1_2x is not shown to pay as much" in budget.advice
    assert "tier_1_2x gives nothing back: drop it" in judged(protocol, SOME_PAY, idle=("tier_1_2x",)).advice


def test_a_smaller_tier_that_is_shown_to_give_less_is_no_budget(protocol):
    words = {"tier_4x": "BETTER", "tier_2x": "BETTER", "tier_1_2x": "WORSE"}
    assert judged(protocol, words, "WORSE", 1.2).budget_bytes == 4 * 192 * 32 * 4096


def test_where_no_tier_pays_it_is_dropped(protocol):
    budget = judged(protocol, dict.fromkeys(SIZES, "EQUIVALENT"))
    assert budget.budget_bytes is None
    assert budget.advice.startswith("no tier is shown to pay: drop it (tier_1_2x EQUIVALENT ×0.2, ")
    assert [row.arm for row in budget.tiers] == ["tier_1_2x", "tier_2x", "tier_4x"]


def test_while_a_tier_that_gives_something_back_is_undecided_none_is_dropped(protocol):
    advice = judged(protocol, dict.fromkeys(SIZES, "INCONCLUSIVE"), idle=("tier_1_2x",)).advice
    assert advice.startswith("no tier is shown to pay: tier_2x, tier_4x undecided, so none is dropped yet (")
    assert "drop it (" in judged(protocol, dict.fromkeys(SIZES, "INCONCLUSIVE"), idle=SIZES).advice


def test_the_recommendation_names_the_tier_that_is_the_budget(protocol):
    largest = Recommendation("adopt tier_4x", "tier_4x is BETTER by the primary comparison", {})
    budget = judged(protocol, SOME_PAY)
    advised = with_budget(largest, budget, protocol, [], [])
    assert advised.action == "adopt tier_2x"
    assert advised.reason.endswith("; tier_2x is not shown to give less and takes less RAM")
    assert with_budget(replace(largest, action="run again"), budget, protocol, [], []).action == "run again"
    alone = judged(protocol, {"tier_4x": "BETTER", "tier_2x": "BETTER", "tier_1_2x": "WORSE"}, "WORSE", 1.2)
    assert with_budget(largest, alone, protocol, [], []) == with_budget(largest, None, protocol, [], []) == largest


def test_the_recommendation_pins_the_tier_that_it_names(protocol):
    budget = judged(protocol, SOME_PAY)
    records = [replace(honest_records(1)[1], arm=arm) for arm in SIZES]
    comparisons = [blank_result(declared, protocol, "not_compared") for declared in protocol.comparisons]
    largest = Recommendation("adopt tier_4x", "tier_4x is BETTER by the primary comparison", {"arm tier_4x": "{}"})
    pins = with_budget(largest, budget, protocol, records, comparisons).pins
    assert [name for name in pins if name.startswith("arm ")] == ["arm tier_2x"]


def test_a_tier_that_is_not_told_apart_from_the_largest_is_no_budget_yet(protocol):
    """A wide interval says neither that it gives as much nor that it gives less."""
    budget = judged(protocol, SOME_PAY, "INCONCLUSIVE")
    assert budget.budget_bytes == 4 * 192 * 32 * 4096
    assert (
        "tier_2x pays as well and is not told apart from it (×1, 0.97 to 1.04; as good would be within" in budget.advice
    )
    assert "buys nothing more" not in budget.advice and "shrink it to that" not in budget.advice


FAULTS = {
    "answers": "its answers differ", "loads": "it loaded nothing in a run", "misses": "its misses are slower",
    "throughput": "its throughput is lower",
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_smaller_tier_is_held_against_what_the_largest_is_held_against(protocol, fault):
    assert judged(protocol, SOME_PAY).budget_bytes == 2 * 192 * 32 * 4096
    budget = judged(protocol, SOME_PAY, broken=fault)
    assert budget.budget_bytes == 4 * 192 * 32 * 4096
    assert f"; tier_2x would pay, but {FAULTS[fault]}: it is left out" in budget.advice
    assert "tier_2x is not shown to pay as much" not in budget.advice


@pytest.mark.parametrize("against", ["tier_1_2x", "tier_2x", "tier_4x"])
def test_throughput_of_every_tier_that_may_be_chosen_is_compared(protocol, against):
    found = [c for c in protocol.comparisons if c.arm == against and c.metric == "output_throughput_tokens_per_second"]
    assert [(c.against, c.phase) for c in found] == [("off", "return")]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("largest", ["INCONCLUSIVE", "WORSE"])
def test_also_the_largest_tier_that_pays_is_held_to_it_where_it_is_not_the_primarys(protocol, fault, largest):
    words = {"tier_4x": largest, "tier_2x": "BETTER", "tier_1_2x": "INCONCLUSIVE"}
    assert judged(protocol, words).budget_bytes == 2 * 192 * 32 * 4096
    broken = judged(protocol, words, broken=fault)
    assert broken.budget_bytes is None and "no tier is taken" in broken.advice
    assert "shrink it to that" not in judged(protocol, words, "INCONCLUSIVE").advice


def test_the_advice_names_the_set_for_which_it_was_shown(protocol):
    assert "; shown for a set of " in judged(protocol, SOME_PAY).advice


def test_other_protocols_have_no_budget():
    assert tier_budget(load_protocol("offload_return", PROTOCOLS), [], []) is None
