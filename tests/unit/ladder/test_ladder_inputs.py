"""What a user gives to preemption_ladder and tier_size: one rule for whole numbers, and a sentence for what is none."""

import math

import pytest
from build import PROTOCOLS
from kvtrial.analysis.inputs import read_request
from kvtrial.analysis.plan import make_plan, requested_protocol
from kvtrial.record.errors import UnusableInput

HOST = {
    "may_be_disturbed": True, "backend": "cpu", "vllm_version": "0.32.0", "vllm_venv": "/opt/venv",
    "engine_args": {"block-size": 32, "max-num-seqs": 16, "num-gpu-blocks-override": 97},
    "model": {"name": "m", "path": "/m", "revision": "r", "weights": "random", "kv_bytes_per_token": 512,
              "low_token_id": 32, "high_token_id": 126},
    "ram_reserve_bytes": 2**28,
}  # fmt: skip
OWN_SPEC = {"connector_extra_config": {"spec_name": "HostOffloadingSpec", "spec_module_path": "kvtrial_host_offload"}}


def planned(host=None, protocol="preemption_ladder", **top):
    folders = {"protocols_dir": str(PROTOCOLS), "results_dir": "results"}
    asked = read_request({"protocol": protocol, **folders, "hosts": {"h1": {**HOST, **(host or {})}}, **top})
    return make_plan(asked, requested_protocol(asked))


@pytest.mark.parametrize("seven", [7, "7", 7.0, "7.0"], ids=repr)
def test_a_whole_number_may_be_given_as_its_text_or_without_a_fraction_wherever_it_stands(seven):
    assert list(planned(ladder=[1, 3, 4, 5, 6, seven]).hosts[0].ladder.levels.values()) == [1, 3, 4, 5, 6, 7]
    assert planned({"sizes": {"requests": seven}}).protocol.sizes["requests"] == 7
    assert planned(seed=seven).seed == 7


NO_WHOLE_NUMBERS = [7.5, "seven", "", True, None, math.nan, math.inf, [7], {"a": 7}]


@pytest.mark.parametrize("value", NO_WHOLE_NUMBERS, ids=repr)
def test_what_is_no_whole_number_is_refused_wherever_it_stands(value):
    with pytest.raises(UnusableInput, match=r"it must be a whole number; mend the variable kvtrial_ladder"):
        planned(ladder=[1, 3, 4, 5, 6, value])
    with pytest.raises(UnusableInput, match=r"^size requests=.* of kvtrial_sizes can't be used: it must be a whole"):
        planned({"sizes": {"requests": value}})


@pytest.mark.parametrize(
    ("levels", "said"),
    [
        ([], "kvtrial_ladder is empty; give levels, as"),
        ("[1,3,4,5,6,7]", r"a list or nothing, which name=value can't give; write -e '\{\"kvtrial_ladder\": …}'"),
        (7, "must be a list or nothing"),
        ([1, 3, 4, 5, 6, 9], r"set the size requests to 9 or more \(kvtrial_sizes\)"),
        ([0, 1, 3, 4, 5, 6], "kvtrial_ladder has 0"),
        ([1, 3, 4, 5, 6, 6], "kvtrial_ladder has 6 twice"),
    ],
    ids=["empty", "text", "a number", "more than are sent", "0", "twice"],
)  # fmt: skip
def test_levels_that_are_none_are_refused(levels, said):
    with pytest.raises(UnusableInput, match=said):
        planned(ladder=levels)


def test_levels_for_a_protocol_without_a_ladder_are_not_passed_over():
    with pytest.raises(UnusableInput, match="tier_size has no ladder, so kvtrial_ladder="):
        planned(protocol="tier_size", ladder=[1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize("value", [0, -1], ids=str)
@pytest.mark.parametrize("option", ["block-size", "max-num-seqs", "max-num-batched-tokens"])
def test_options_of_the_engine_that_count_something_count_from_1(option, value):
    with pytest.raises(UnusableInput, match=rf"host h1, arm base: {option}={value} can't be run; give 1 or more"):
        planned({"engine_args": {**HOST["engine_args"], option: value}})


def test_a_block_size_that_is_no_number_is_a_sentence():
    with pytest.raises(UnusableInput, match="host h1, arm base: block-size='x' is not a size vLLM reads"):
        planned({"engine_args": {"block-size": "x"}})


@pytest.mark.parametrize("protocol", ["preemption_ladder", "tier_size"])
def test_chunks_of_no_token_are_a_sentence(protocol):
    with pytest.raises(UnusableInput, match=r"chunk_tokens=0 of kvtrial_sizes can't be used, .*; give 1 or more"):
        planned({"sizes": {"chunk_tokens": 0}, **OWN_SPEC}, protocol)


def test_a_tier_of_no_byte_is_refused_where_an_arm_takes_it():
    with pytest.raises(UnusableInput, match=r"arm offload_all: .* without cpu_bytes_to_use \(0 counts as missing\)"):
        planned({"sizes": {"tier_bytes": 0}, **OWN_SPEC}, arms=["offload_all"])


def test_a_size_that_the_planner_fills_in_is_not_passed_over():
    """Its own value is no other: what a recorded plan says can be given again."""
    with pytest.raises(
        UnusableInput, match="more_kv_bytes=5 of kvtrial_sizes can't be used: it follows from the GPU's"
    ):
        planned({"sizes": {"more_kv_bytes": 5}}, arms=["more_kv_bytes"])
    filled = planned(arms=["more_kv_bytes"]).protocol.sizes
    assert planned({"sizes": filled}, arms=["more_kv_bytes"]).protocol.sizes == filled


@pytest.mark.parametrize("percent", [-1, 101])
def test_a_tolerance_of_ram_that_nothing_keeps_or_all_is_refused(percent):
    with pytest.raises(UnusableInput, match=f"ram_tolerance_percent={percent} is no tolerance; give 0 to 100"):
        planned({"sizes": {"ram_tolerance_percent": percent}})


@pytest.mark.parametrize(
    ("protocol", "arms", "add"),
    [
        ("preemption_ladder", ["base"], "add one of fewer_seqs, fp8_kv,"),
        ("tier_size", ["tier_2x"], r"no primary comparison left; add tier_4x\."),
    ],
)
def test_too_few_arms_are_refused_with_those_of_which_one_would_do(protocol, arms, add):
    with pytest.raises(UnusableInput, match=add):
        planned(protocol=protocol, arms=arms)


@pytest.mark.parametrize(
    ("prices", "said"),
    [
        ({"currency": " ", "gpu_hour": 2}, "names no currency; give one, such as EUR"),
        ({"currency": "", "gpu_hour": 2}, "names no currency; give one, such as EUR"),
        ({"currency": "EUR"}, "names no price; give currency and at least one of"),
        ({"currency": "EUR", "gpu_hour": 1e12}, r"gpu_hour=1\d*\.0 is no price; give a number from 0 to a billion"),
        ({"currency": "EUR", "gpu_hour": math.nan}, "gpu_hour=nan is no price"),
        ("2.4", "must be a mapping or nothing, which name=value can't give"),
    ],
)
def test_prices_that_are_none_are_refused(prices, said):
    with pytest.raises(UnusableInput, match=said):
        planned(prices=prices)


@pytest.mark.parametrize("name", ["a\nb", "a\tb", "\x1b[31m"], ids=repr)
def test_a_profile_whose_name_breaks_lines_is_refused(name):
    with pytest.raises(UnusableInput, match="can't be printed in a line; name it in plain characters"):
        planned(objectives={name: {"e2e_p95_seconds": 5}})
