"""What a result set is worth: each class planted, and quiet on the set beside it."""

import copy
import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtrial.analysis import effect
from kvtrial.analysis.cli import main
from kvtrial.analysis.judge import judge
from kvtrial.analysis.judge.plain import signflip_p, t_interval
from kvtrial.analysis.judge.results import results_of
from kvtrial.record.errors import UnusableInput

LOADED = 22_020_096_000


def run(value: float, rng: random.Random, variant: bool, **more: Any) -> dict[str, Any]:
    """One run of twelve requests around a value in ms."""
    made = {
        "ttft_ms": [round(value * (1 + rng.gauss(0, 0.005)), 3) for _ in range(12)],
        "sent": 12,
        "completed": 12,
        "failed": 0,
        "server_start": 1000.0 + variant,
        "local_hit_tokens": 0,
        "external_hit_tokens": 192_000 if variant else 0,
        "load_bytes": LOADED if variant else None,
        "store_bytes": 0 if variant else None,
        "preemptions": 0,
        "output_digest": "abc",
    }
    return made | more


def results(ratio: float = 0.7, pairs: int = 10, noise: float = 0.01, **more: Any) -> dict[str, Any]:
    """A clean set: ABBA, equal answers, loads in the variant alone. `ratio`: variant / control."""
    rng = random.Random(7)
    made = []
    for number in range(1, pairs + 1):
        order = ["control", "variant"] if number % 4 in (1, 0) else ["variant", "control"]
        control = 100 * (1 + rng.gauss(0, noise))
        made.append(
            {
                "pair": number,
                "order": order,
                "control": run(control, rng, False),
                "variant": run(control * ratio * (1 + rng.gauss(0, noise)), rng, True),
            }
        )
    return {"metric": "ttft_ms", "lower_is_better": True, "min_effect_pct": 5.0, "pairs": made, **more}


def judged(raw: dict[str, Any]):
    return judge(results_of(raw, "a set"))


def test_a_clean_gain_is_a_valid_improvement():
    answer = judged(results(0.7))
    assert (answer.verdict, answer.class_) == ("BETTER", "improvement_valid")
    assert answer.comparison is not None and answer.comparison.ci_high < 0.8
    assert "22,020,096,000 B" in answer.findings[0].reason and "null, not 0" in answer.findings[0].reason


def test_a_clean_loss_is_a_valid_regression():
    answer = judged(results(1.3))
    assert (answer.verdict, answer.class_) == ("WORSE", "regression_valid")
    assert "10 of 10 pairs worse" in answer.findings[0].reason


@pytest.mark.parametrize(
    ("ratio", "margin", "says"),
    [
        (0.62, 40.0, "lies beyond -28.6 %, which is 40 % the other way round."),
        (0.7, 5.0, "lies beyond -4.8 %, which is 5 % the other way round."),
        (1.6, 40.0, "lies beyond +40 %."),
        (1.0, 40.0, "inside -28.6 % to +40 %."),
    ],
)
def test_the_bound_is_said_in_the_direction_in_which_it_was_used(ratio: float, margin: float, says: str):
    assert says in judged(results(ratio, min_effect_pct=margin)).findings[0].reason


def test_throughput_turns_the_sides_round():
    raw = results(1.3, lower_is_better=False)
    assert judged(raw).class_ == "improvement_valid"


def test_the_verdict_is_that_of_the_projects_own_statistics():
    raw = results(0.93, noise=0.03)
    answer = judged(raw)
    ratios = [math.log(sorted_median(p["variant"]) / sorted_median(p["control"])) for p in raw["pairs"]]
    interval = effect.hodges_lehmann(ratios)
    word, _ = effect.decide(interval, 0.05, "ratio", "lower")
    assert answer.comparison is not None
    assert answer.verdict == word
    assert answer.comparison.effect == pytest.approx(math.exp(interval.estimate))
    assert answer.comparison.p_value == interval.p_value


def sorted_median(one: dict[str, Any]) -> float:
    ordered = sorted(one["ttft_ms"])
    return (ordered[5] + ordered[6]) / 2


@pytest.mark.parametrize("pairs", [1, 2, 3, 4, 5])
def test_under_six_pairs_nothing_is_shown_however_clear_it_looks(pairs: int):
    answer = judged(results(0.5, pairs))
    assert (answer.verdict, answer.class_) == ("INCONCLUSIVE", "too_few_pairs")
    assert judged(results(0.5, 6)).class_ == "improvement_valid"


def test_a_difference_within_the_noise_is_not_shown():
    answer = judged(results(0.99, noise=0.08))
    assert (answer.verdict, answer.class_) == ("INCONCLUSIVE", "difference_not_shown")
    assert "pairs needed" in answer.findings[0].reason


def test_equality_within_the_margin_is_equivalent():
    assert judged(results(1.0, 12, noise=0.005)).verdict == "EQUIVALENT"


def test_one_order_for_all_pairs_confounds_order_with_arm():
    raw = results(0.7)
    for pair in raw["pairs"]:
        pair["order"] = ["control", "variant"]
    answer = judged(raw)
    assert (answer.verdict, answer.class_) == ("INVALID", "order_confounded_with_arm")
    assert answer.findings[0].numbers["control_first"] == 10
    assert answer.comparison is None


def test_an_order_that_changes_once_in_ten_confounds_too_and_one_in_three_does_not():
    raw = results(0.7)
    for number, pair in enumerate(raw["pairs"]):
        pair["order"] = ["variant", "control"] if number == 4 else ["control", "variant"]
    assert judged(raw).class_ == "order_confounded_with_arm"
    for number, pair in enumerate(raw["pairs"]):
        pair["order"] = ["variant", "control"] if number % 3 == 0 else ["control", "variant"]
    assert judged(raw).class_ == "improvement_valid"


def test_all_of_one_arm_before_all_of_the_other_is_seen_by_the_starts():
    raw = results(0.7)
    for number, pair in enumerate(raw["pairs"]):
        pair["control"]["server_start"], pair["variant"]["server_start"] = 1000.0 + number, 2000.0 + number
    assert judged(raw).class_ == "order_confounded_with_arm"


@pytest.mark.parametrize("starts", [True, False])
def test_where_no_order_is_known_none_is_judged_and_that_is_said(starts: bool):
    raw = results(0.7)
    assert "order_unknown" not in [one.class_ for one in judged(raw).findings]
    for pair in raw["pairs"]:
        del pair["order"]
        if not starts:
            del pair["control"]["server_start"], pair["variant"]["server_start"]
    answer = judged(raw)
    assert answer.class_ == "improvement_valid"
    assert "not stated for any pair" in answer.findings[1].reason and answer.findings[1].class_ == "order_unknown"
    assert answer.findings[0].do.startswith("Settle first")


def test_starts_of_a_server_for_every_run_say_the_order():
    raw = results(0.7)
    for number, pair in enumerate(raw["pairs"]):
        del pair["order"]
        pair["control"]["server_start"], pair["variant"]["server_start"] = 1000.0 + 10 * number, 1005.0 + 10 * number
    assert judged(raw).class_ == "order_confounded_with_arm"
    for number, pair in enumerate(raw["pairs"]):
        pair["variant"]["server_start"] += -9 * (number % 2)
    assert [one.class_ for one in judged(raw).findings] == ["improvement_valid"]


@pytest.mark.parametrize("ratio", [0.7, 1.4])
def test_noise_of_identical_arms_as_large_as_the_effect_shows_no_difference(ratio: float):
    answer = judged(results(ratio, aa_noise_pct=45))
    assert (answer.verdict, answer.class_) == ("INCONCLUSIVE", "difference_not_shown")
    assert "by 45 %" in answer.findings[0].reason and "Publish" not in answer.findings[0].do
    assert judged(results(ratio, aa_noise_pct=2)).verdict in ("BETTER", "WORSE")


def test_another_answer_makes_times_worthless():
    raw = results(0.4)
    raw["pairs"][3]["variant"]["output_digest"] = "xyz"
    answer = judged(raw)
    assert (answer.verdict, answer.class_) == ("INVALID", "response_mismatch")
    assert answer.findings[0].numbers["mismatched_pairs"] == ["4"]
    for pair in raw["pairs"]:
        pair["control"]["output_digest"] = pair["variant"]["output_digest"] = None
    assert judged(raw).class_ == "improvement_valid"


def warm(raw: dict[str, Any], numbers: range, arm: str = "variant") -> dict[str, Any]:
    raw = copy.deepcopy(raw)
    for number in numbers:
        raw["pairs"][number][arm] |= {"local_hit_tokens": 191_000, "external_hit_tokens": 0, "load_bytes": 0}
    return raw


def test_gpu_hits_in_one_arm_alone_contaminate_the_set():
    workload = {"prompt_tokens_per_run": 192_000, "seed": 0, "same_prompts_every_pair": True}
    answer = judged(warm(results(0.4, workload=workload), range(1, 10)))
    assert (answer.verdict, answer.class_) == ("INVALID", "warm_cache_contamination")
    assert "The prompts repeat (seed 0" in answer.findings[0].reason
    assert judged(warm(results(1.0), range(10), "control")).class_ == "warm_cache_contamination"


def test_gpu_hits_alike_and_small_in_both_arms_are_a_shared_beginning():
    raw = results(0.7, workload={"prompt_tokens_per_run": 192_000})
    for pair in raw["pairs"]:
        pair["control"]["local_hit_tokens"] = pair["variant"]["local_hit_tokens"] = 6_000
    assert judged(raw).class_ == "improvement_valid"


def test_gpu_hits_in_both_arms_of_prompts_of_unknown_length_leave_it_open_whether_the_cache_was_evicted():
    raw = results(0.7)
    for pair in raw["pairs"]:
        pair["control"]["local_hit_tokens"] = pair["variant"]["local_hit_tokens"] = 6_000
    answer = judged(raw)
    assert answer.verdict == "BETTER"
    found = next(one for one in answer.findings if one.class_ == "gpu_hits_in_both_arms")
    assert "6,000 tokens a run" in found.reason and "is unknown" in found.reason and found.confidence == "unknown"
    half = judged(raw | {"workload": {"prompt_tokens_per_run": 12_000}})
    assert "50 % of the variant's" in next(f.reason for f in half.findings if f.class_ == "gpu_hits_in_both_arms")
    small = judged(raw | {"workload": {"prompt_tokens_per_run": 192_000}})
    assert "gpu_hits_in_both_arms" not in [one.class_ for one in small.findings]


def test_both_arms_served_by_the_gpu_cache_did_not_try_the_tier():
    raw = results(1.0, workload={"prompt_tokens_per_run": 192_000})
    for pair in raw["pairs"]:
        pair["control"]["local_hit_tokens"] = pair["variant"]["local_hit_tokens"] = 190_000
        pair["variant"] |= {"load_bytes": 0, "external_hit_tokens": 0}
    answer = judged(raw)
    assert answer.class_ == "warm_cache_contamination"
    assert "in both arms" in answer.findings[0].reason


def test_a_variant_that_never_loaded_is_no_treatment():
    raw = results(0.7)
    for pair in raw["pairs"]:
        pair["variant"] |= {"load_bytes": 0, "external_hit_tokens": 0}
    assert (judged(raw).verdict, judged(raw).class_) == ("INVALID", "treatment_not_delivered")


def test_a_control_that_loads_is_no_control():
    raw = results(0.7)
    for pair in raw["pairs"]:
        pair["control"]["load_bytes"] = LOADED
    assert judged(raw).class_ == "control_not_clean"


@pytest.mark.parametrize(
    ("arm", "fault", "reason"),
    [
        ("control", {"failed": 3, "completed": 9}, "3 requests failed (9 of 12 completed)"),
        ("variant", {"completed": 7}, "7 of 12 requests completed"),
        ("variant", {"load_bytes": 0}, "0 B were loaded"),
        ("control", {"load_bytes": LOADED}, "so it was no control"),
        ("variant", {"ttft_ms": []}, "has no value"),
        ("control", {"ttft_ms": [100.0, 101.0, 99.0]}, "3 values for 12 completed requests"),
        ("variant", {"sent": 10, "completed": 10}, "control sent 12 requests and variant 10"),
        ("control", {"valid": False, "reason": "host was busy"}, "host was busy"),
        ("variant", {"invalid": "engine restarted"}, "engine restarted"),
        ("control", {"server_restarted": True}, "restarted"),
        ("variant", {"local_hit_tokens": 180_000}, "GPU prefix cache of one arm"),
    ],
)
def test_a_pair_with_a_fault_goes_as_a_whole_and_is_named(arm: str, fault: dict[str, Any], reason: str):
    raw = results(0.7, workload={"prompt_tokens_per_run": 192_000})
    raw["pairs"][4][arm] |= fault
    answer = judged(raw)
    assert answer.class_ == "invalid_pairs_removed"
    assert answer.verdict == "BETTER"
    assert reason in answer.findings[0].reason
    assert answer.findings[0].numbers["removed"] == ["5"]
    assert answer.findings[0].numbers["n_pairs"] == 9
    assert answer.findings[1].class_ == "improvement_valid"


def test_preemptions_are_told_and_drop_no_pair():
    raw = results(0.7)
    raw["pairs"][2]["control"]["preemptions"] = 14
    answer = judged(raw)
    assert answer.class_ == "improvement_valid"
    assert "Preemptions: control 14, variant 0" in answer.findings[0].reason


def test_a_pair_may_be_marked_itself():
    raw = results(0.7)
    raw["pairs"][0]["valid"] = False
    assert judged(raw).class_ == "invalid_pairs_removed"


def test_what_remains_under_six_pairs_shows_nothing():
    raw = results(0.5, 8)
    for number in (0, 3, 5):
        raw["pairs"][number]["control"]["failed"] = 2
    answer = judged(raw)
    assert (answer.verdict, answer.class_) == ("INCONCLUSIVE", "invalid_pairs_removed")
    assert answer.findings[1].class_ == "too_few_pairs"


def test_many_faults_of_the_variant_alone_are_not_left_out_to_its_gain():
    raw = results(0.5, 12)
    for number in (0, 3, 5):
        raw["pairs"][number]["variant"] |= {"failed": 2, "completed": 10}
    assert judged(raw).verdict == "INCONCLUSIVE"
    assert "speaks against it" in judged(raw).findings[0].reason
    for number in (1, 2, 4):
        raw["pairs"][number]["control"] |= {"failed": 2, "completed": 10}
    assert judged(raw).verdict == "BETTER"


def identical(raw: dict[str, Any]) -> dict[str, Any]:
    for pair in raw["pairs"]:
        pair["variant"] |= {"load_bytes": None, "store_bytes": None, "external_hit_tokens": 0}
    return raw | {"arms_identical": True}


def test_an_a_a_without_a_difference_gives_the_noise_floor():
    answer = judged(identical(results(1.0, 10, noise=0.04)))
    assert answer.class_ == "aa_pass_with_noise_floor"
    assert answer.verdict in ("EQUIVALENT", "INCONCLUSIVE")
    assert "noise floor" in answer.findings[0].reason


def test_an_a_a_with_a_difference_says_that_the_set_up_is_wrong():
    answer = judged(identical(results(0.8, 10)))
    assert (answer.verdict, answer.class_) == ("INVALID", "aa_differs")


@given(st.lists(st.floats(-30, 30).filter(lambda value: abs(value) > 0.01), min_size=2, max_size=9))
def test_the_plain_test_treats_both_signs_alike(values: list[float]):
    turned = [-value for value in values]
    assert signflip_p(values) == pytest.approx(signflip_p(turned))
    low, high = t_interval(values) or (0, 0)
    assert t_interval(turned) == pytest.approx((-high, -low))
    assert signflip_p(values) >= 2 / 2 ** len(values)


def test_swapping_the_arms_turns_the_verdict():
    raw = results(0.7)
    swapped = copy.deepcopy(raw)
    for pair in swapped["pairs"]:
        pair["control"]["ttft_ms"], pair["variant"]["ttft_ms"] = pair["variant"]["ttft_ms"], pair["control"]["ttft_ms"]
    assert (judged(raw).verdict, judged(swapped).verdict) == ("BETTER", "WORSE")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pairs": []}, "no pair"),
        ({"pairs": None}, "no list `pairs`"),
        ({"pairs": [{"control": {}}]}, "has no variant"),
        ({"min_effect_pct": 0}, "between 0 and 100"),
        ({"min_effect_pct": "5"}, "is no number"),
        ({"lower_is_better": "yes"}, "neither true nor false"),
    ],
)
def test_what_can_not_be_judged_is_refused_in_a_sentence(change: dict[str, Any], says: str):
    with pytest.raises(UnusableInput, match=says):
        results_of(results() | change, "a set")


def test_values_that_are_no_times_are_refused():
    raw = results()
    raw["pairs"][0]["control"]["ttft_ms"][3] = -1
    with pytest.raises(UnusableInput, match="above 0"):
        results_of(raw, "a set")


def test_the_command_ends_with_0_or_2(tmp_path, capsys):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results()))
    assert main(["judge", str(path)]) == 0
    assert "BETTER: improvement_valid" in capsys.readouterr().out
    path.write_text("{")
    assert main(["judge", str(path), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["verdict"] == "error"
    assert main(["judge"]) == 2


def _with(change: str) -> dict[str, Any]:
    raw = results()
    first = raw["pairs"][0]
    if change == "pair":
        raw["pairs"][3]["pair"] = 1
    elif change == "run":
        raw["pairs"][3]["variant"] = copy.deepcopy(first["variant"])
    elif change == "valid":
        first["valid"] = "false"
    elif change == "load":
        first["variant"]["load_bytes"] = -5
    else:
        raw["metric"] = "foo"
    return raw


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("pair", "pair 1 is listed twice"),
        ("run", "the variant runs of pairs 1 and 4 are the same in every value"),
        ("valid", "valid='false' is neither true nor false"),
        ("load", "load_bytes=-5 is below 0"),
        ("metric", "no run has foo; they have ttft_ms"),
    ],
)
def test_what_can_be_no_result_is_refused_in_a_sentence(change: str, says: str):
    with pytest.raises(UnusableInput, match=says):
        judged(_with(change))


def test_equal_pairs_are_neither_better_nor_worse():
    raw = results()
    for pair in raw["pairs"]:
        pair["variant"]["ttft_ms"] = list(pair["control"]["ttft_ms"])
    assert "all 10 pairs equal" in " ".join(finding.reason for finding in judged(raw).findings)


def test_an_interval_beyond_zero_is_not_said_to_contain_what_it_excludes():
    reason = judged(results(0.7, pairs=4)).findings[0].reason
    assert "excludes 0, and its far end lies beyond the 5 % of interest." in reason


# values that no server gave


def shifted(values: list[float], by: float, scale: float = 1.0) -> list[float]:
    return [round(scale * value + by, 3) for value in values]


def in_seconds(raw: dict[str, Any]) -> None:
    for pair in raw["pairs"]:
        pair["variant"]["ttft_ms"] = [value / 1000 for value in pair["variant"]["ttft_ms"]]


def in_other_seconds(raw: dict[str, Any]) -> None:
    for pair in raw["pairs"]:
        pair["control"]["ttft_ms"] = [value / 1000 for value in pair["control"]["ttft_ms"]]


@pytest.mark.parametrize("change", [in_seconds, in_other_seconds])
def test_arms_in_two_units_show_no_difference(change: Any):
    raw = results(0.7)
    change(raw)
    answer = judged(raw)
    assert (answer.verdict, answer.class_) == ("INCONCLUSIVE", "difference_not_shown")
    assert "is one arm in seconds and the other in ms?" in answer.findings[0].reason
    assert answer.comparison is not None and answer.comparison.verdict == "INCONCLUSIVE"


def test_arms_ninety_times_apart_may_be_true():
    assert judged(results(1 / 90)).class_ == "improvement_valid"


def computed_ratio(raw: dict[str, Any]) -> None:
    for pair in raw["pairs"]:
        pair["variant"]["ttft_ms"] = shifted(pair["control"]["ttft_ms"], 0.0, 0.65)


def computed_single(raw: dict[str, Any]) -> None:
    for pair in raw["pairs"]:
        pair["control"]["ttft_ms"] = pair["control"]["ttft_ms"][0]
        pair["variant"]["ttft_ms"] = round(0.65 * pair["control"]["ttft_ms"], 3)


def constant(raw: dict[str, Any]) -> None:
    for pair in raw["pairs"]:
        pair["variant"]["ttft_ms"] = [70.0 + 0.25] * 12


def constant_single(raw: dict[str, Any]) -> None:
    for pair in raw["pairs"]:
        pair["variant"]["ttft_ms"] = 70.25


def jittered(raw: dict[str, Any]) -> None:
    for number, pair in enumerate(raw["pairs"]):
        source = raw["pairs"][number % 3]
        for arm in ("control", "variant"):
            pair[arm]["ttft_ms"] = shifted(source[arm]["ttft_ms"], 0.01 * number)


def jittered_single(raw: dict[str, Any]) -> None:
    jittered(raw)
    for number, pair in enumerate(raw["pairs"]):
        source = raw["pairs"][number % 3]
        for arm in ("control", "variant"):
            first = source[arm]["ttft_ms"]
            pair[arm]["ttft_ms"] = round((first if isinstance(first, float) else first[0]) + 0.01 * number, 3)


def one_copy(raw: dict[str, Any]) -> None:
    raw["pairs"][7]["variant"]["ttft_ms"] = shifted(raw["pairs"][2]["variant"]["ttft_ms"], 0.3, 1.01)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (computed_ratio, "variant / control is 0.6500 in all 10 pairs"),
        (computed_single, "variant / control is 0.6500 in all 10 pairs"),
        (constant, "every value of the variant is 70.25 in all 10 pairs"),
        (constant_single, "every value of the variant is 70.25 in all 10 pairs"),
        (jittered, "control of pair 4 is control of pair 1 shifted or scaled, request by request"),
        (jittered_single, "variant - control takes only 3 values in 10 pairs"),
        (one_copy, "variant of pair 8 is variant of pair 3 shifted or scaled"),
    ],
)
def test_runs_that_look_computed_show_no_difference(change: Any, says: str):
    raw = results(0.7)
    change(raw)
    answer = judged(raw)
    assert (answer.verdict, answer.class_) == ("INCONCLUSIVE", "difference_not_shown")
    assert "look computed, not measured" in answer.findings[0].reason and says in answer.findings[0].reason


@pytest.mark.parametrize("digits", [3, 1, 0])
def test_rounded_runs_look_measured(digits: int):
    raw = results(0.7)
    for pair in raw["pairs"]:
        for arm in ("control", "variant"):
            pair[arm]["ttft_ms"] = [round(value / 5, digits) for value in pair[arm]["ttft_ms"]]
    assert judged(raw).class_ == "improvement_valid"
    for pair in raw["pairs"]:
        for arm in ("control", "variant"):
            pair[arm]["ttft_ms"] = pair[arm]["ttft_ms"][0]
    assert judged(raw).class_ == "improvement_valid"


def test_counts_may_be_equal_in_every_run():
    raw = results(0.7, metric="preemptions")
    for number, pair in enumerate(raw["pairs"]):
        pair["control"]["preemptions"], pair["variant"]["preemptions"] = 4000 + 10 * number, 3
    assert not any("computed" in one.reason or "in ms?" in one.reason for one in judged(raw).findings)


@pytest.mark.parametrize("arm", ["control", "variant"])
def test_one_server_for_an_arm_beside_a_fresh_one_each_run_is_said(arm: str):
    raw = results(0.7)
    for number, pair in enumerate(raw["pairs"]):
        pair[arm]["server_start"] = 5000.0 + 1000 * number
    noted = " ".join(judged(raw).notes)
    assert "Lifetimes of the servers are the arms' too." in noted
    assert f"{arm}: every run on a fresh server" in noted.lower()
    assert "one server for all 10 runs" in noted


def test_servers_of_equal_lifetime_and_new_prompts_need_no_caveat():
    raw = results(0.7, workload={"seed": "new per pair"})
    assert not any("Lifetimes" in note or "every pair" in note for note in judged(raw).notes)
    for number, pair in enumerate(raw["pairs"]):
        for late, arm in enumerate(("control", "variant")):
            pair[arm]["server_start"] = 5000.0 + 1000 * number + 100 * (late if number % 2 else 1 - late)
    assert not any("Lifetimes" in note for note in judged(raw).notes)


@pytest.mark.parametrize(
    ("workload", "says"),
    [
        ({"seed": 0}, "seed 0 for every pair, so its prompts may repeat"),
        ({"seed": 7, "same_prompts_every_pair": True}, "seed 7 for every pair, so its prompts repeat"),
        ({"same_prompts_every_pair": True}, "same prompts for every pair, so its prompts repeat"),
    ],
)
def test_one_seed_for_all_pairs_is_said(workload: dict[str, Any], says: str):
    assert any(says in note for note in judged(results(0.7, workload=workload)).notes)


def test_a_seed_that_is_stated_to_change_the_prompts_needs_no_caveat():
    workload = {"seed": 0, "same_prompts_every_pair": False}
    assert not any("seed 0" in note for note in judged(results(0.7, workload=workload)).notes)
