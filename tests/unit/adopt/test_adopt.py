"""What is done with a verdict. The verdicts are those that were reached on an H200, as they lie in docs/results."""

import functools
import json
import shutil
from pathlib import Path

import msgspec
import pytest
import yaml
from kvtrial.analysis.adopt import FleetHost, Wish, adopt, decide
from kvtrial.analysis.adopt.decision import NAMES
from kvtrial.analysis.adopt.texts import group_vars, read_tried, read_verdict, unit_lines
from kvtrial.record.errors import UnusableInput
from msgspec.structs import replace

RESULTS = Path(__file__).parents[3] / "docs" / "results" / "h200-2026-11-29"
H200 = ["NVIDIA H200"]
TODAY = "2026-12-01"


@functools.cache
def real(name):
    return read_verdict(RESULTS / name), read_tried(RESULTS / name)


def host(model="qwen3-8b-random", **fields):
    return FleetHost(
        **{"vllm_version": "0.26.0", "model_name": model, "gpus": H200, "ram_total_bytes": 2**37, **fields}
    )


def decided(name="offload-8b", fleet=None, verdict=None, tried=None, **wish):
    was, how = real(name)
    model = "qwen3-8b-random" if name == "offload-8b" else "qwen3-0.6b-random"
    return decide(verdict or was, tried or how, fleet or {"gpu01": host(model)}, Wish(**{"today": TODAY, **wish}))


def names(decision):
    return [refusal.name for refusal in decision.refusals]


def comparison(verdict, where, /, **fields):
    """The verdict with a comparison changed: the first of that role, or on that metric and phase."""
    at = next(i for i, c in enumerate(verdict.comparisons) if where in (c.role, f"{c.metric} of {c.phase}"))
    changed = replace(verdict.comparisons[at], **fields)
    return replace(verdict, comparisons=[*verdict.comparisons[:at], changed, *verdict.comparisons[at + 1 :]])


# --- what the real verdicts lead to


def test_the_8b_offload_is_adopted_with_its_pins():
    decision = decided()
    assert (decision.action, decision.cause, decision.refusals) == ("adopt", "", [])
    pins = decision.pins
    assert (pins.vllm_version, pins.model_name, pins.gpu) == ("0.26.0", "qwen3-8b-random", "NVIDIA H200")
    assert pins.tier_bytes == 36 * 2**30
    assert ["--no-async-scheduling"] in pins.args, "the guard of this version's hazard stays"
    assert "VLLM_SERVER_DEV_MODE" not in pins.env
    assert not {"--host", "--port"} & {words[0] for words in pins.args}
    said = "\n".join(decision.answer)
    assert "fixed the GPU's KV cache at 2300 blocks" in said
    assert "weights were random" in said
    assert "Left out: VLLM_SERVER_DEV_MODE (development mode, never adopted)." in said
    assert "Kept from the trial: VLLM_HOST_IP, GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME (the engine's own conn" in said


def test_the_smaller_models_offload_is_refused_for_its_guard():
    decision = decided("offload-0.6b")
    assert (decision.action, decision.pins) == ("refuse", None)
    assert names(decision) == ["guard_worse"]
    assert decision.cause.startswith(
        "Not adopted: guard ttft_median_seconds of miss (offload against control) is WORSE"
    )
    assert decision.cause.endswith("-e adopt_force=guard_worse")


def test_a_refusal_can_be_forced_by_its_name_and_the_pins_say_so():
    decision = decided("offload-0.6b", force=["guard_worse"])
    assert decision.action == "adopt"
    assert decision.pins.forced == ["guard_worse"]
    assert any(line.startswith("FORCED past guard_worse: guard ttft") for line in decision.answer)
    assert decided("offload-0.6b", force=["age"]).action == "refuse"


def test_the_ladder_is_adopted_without_a_tier():
    decision = decided("ladder")
    assert decision.action == "adopt"
    assert decision.pins.tier_bytes == 0
    assert ["--num-gpu-blocks-override", "455"] in decision.pins.args
    assert "no CPU tier" in "\n".join(decision.answer)


def test_an_undecided_trial_is_told_the_pairs_it_needs_as_a_command():
    decision = decided("aa")
    assert (decision.action, decision.cause, decision.pins) == ("more_pairs", "", None)
    assert decision.answer[1].startswith("Next: 17 pairs are needed, that is 18")
    assert decision.answer[2].endswith("-e protocol=aa_lengths -e kvtrial_pairs=18 -e kvtrial_new_campaign=true")


# --- each refusal, alone


@pytest.mark.parametrize(
    ("name", "fields", "sentence"),
    [
        ("evidence", {"evidence": "cpu"}, "the evidence is cpu, not gpu"),
        ("evidence", {"evidence": "standin"}, "the evidence is standin"),
        ("evidence", {"evidence": None}, "the evidence is not known"),
    ],
)
def test_other_evidence_is_refused(name, fields, sentence):
    decision = decided(verdict=replace(real("offload-8b")[0], **fields))
    assert names(decision) == [name] and sentence in decision.cause


@pytest.mark.parametrize(
    ("name", "where", "fields"),
    [
        ("guard_worse", "ram_used_peak_bytes of run", {"verdict": "WORSE"}),
        ("ttft", "ttft_median_seconds of return_2k", {"verdict": "WORSE"}),
        ("answers", "primary", {"quality": "differs"}),
    ],
)
def test_what_a_comparison_says_against_it_is_refused(name, where, fields):
    decision = decided(verdict=comparison(real("offload-8b")[0], where, **fields))
    assert names(decision) == [name]


def test_preemptions_that_only_moved_into_the_queue_are_refused():
    decision = decided("ladder", verdict=comparison(real("ladder")[0], "primary", moved=True))
    assert names(decision) == ["moved"]


def test_slower_filling_of_the_caches_is_no_ttft_that_users_meet():
    worse = comparison(real("offload-8b")[0], "ttft_median_seconds of populate_16k", verdict="WORSE")
    assert decided(verdict=worse).action == "adopt"


@pytest.mark.parametrize("passed", [None, False])
def test_loads_that_are_not_confirmed_are_refused(passed):
    verdict = real("offload-8b")[0]
    gates = [
        replace(gate, passed=passed, detail="no load") if gate.gate == "treatment_delivered" else gate
        for gate in verdict.hosts[0].gates
    ]
    decision = decided(verdict=replace(verdict, hosts=[replace(verdict.hosts[0], gates=gates)]))
    assert names(decision) == ["loads"] and "the gate says: no load" in decision.cause


@pytest.mark.parametrize(
    ("name", "facts", "sentence"),
    [
        ("version", {"vllm_version": "0.32.0"}, "gpu01: the inventory says vLLM 0.32.0, the verdict is of 0.26.0"),
        ("model", {"model_name": "other"}, "gpu01: the inventory says model other"),
        ("model", {"model_revision": "abc"}, "the inventory says model revision abc"),
        ("gpu", {"gpus": ["NVIDIA H100"]}, "gpu01: it has NVIDIA H100, the verdict is of NVIDIA H200"),
        ("gpu", {"gpus": []}, "it has no GPU"),
        ("gpu", {"gpus": None}, "its GPU is not known"),
        ("ram", {"ram_total_bytes": 2**35}, "it has 34,359,738,368 bytes of RAM; the tier takes 39,225,882,624"),
        ("ram", {"ram_reserve_bytes": 2**37}, "are to stay free"),
    ],
)
def test_another_fleet_is_refused(name, facts, sentence):
    decision = decided(fleet={"gpu01": host(**facts)})
    assert names(decision) == [name] and sentence in decision.cause
    assert decided(fleet={"gpu01": host(**facts)}, force=[name]).action == "adopt"


def test_hosts_with_the_same_fault_are_named_together():
    fleet = {"a": host(), "b": host(gpus=["NVIDIA H100"]), "c": host(gpus=["NVIDIA H100"])}
    assert decided(fleet=fleet).refusals[0].sentence.startswith("b, c: it has NVIDIA H100")


def test_what_is_not_known_of_a_host_is_not_held_against_it_but_for_its_gpu():
    fleet = {"gpu01": host(ram_total_bytes=None, model_revision="")}
    assert decided(fleet=fleet).action == "adopt"


@pytest.mark.parametrize(
    ("today", "days", "refused"),
    [("2026-12-29", 30, False), ("2026-12-31", 30, True), ("2026-12-01", 1, True), ("2026-11-01", 30, True)],
)
def test_age(today, days, refused):
    decision = decided(today=today, max_age_days=days)
    assert (names(decision) == ["age"]) is refused


def test_bounds_of_ones_own():
    assert set(names(decided(ttft_max_seconds=0.05))) == {"ttft"}
    assert decided(ttft_max_seconds=5).action == "adopt"
    assert names(decided(ram_max_bytes=2**30)) == ["ram"]
    assert decided(ram_max_bytes=2**36).action == "adopt"


def test_a_launch_that_meets_a_defect_is_refused():
    _, tried = real("offload-8b")
    plan = tried.plans[0]
    launch = plan.launches["offload"]
    bare = replace(launch, argv=[word for word in launch.argv if word != "--no-async-scheduling"])
    plan = replace(plan, launches={**plan.launches, "offload": bare})
    decision = decided(tried=replace(tried, plans=[plan]))
    assert names(decision) == ["hazard"] and "--no-async-scheduling" in decision.cause


# --- no gain, nothing valid, nothing that fits


@pytest.mark.parametrize("word", ["WORSE", "EQUIVALENT"])
def test_without_a_gain_the_plain_cache_is_recommended_and_why(word):
    verdict = real("offload-8b")[0]
    advice = replace(
        verdict.recommendation, action="keep the plain GPU cache (plain)", reason="offload is not worth it"
    )
    decision = decided(verdict=replace(verdict, verdict=word, recommendation=advice))
    assert (decision.action, decision.cause, decision.pins) == ("keep", "", None)
    assert decision.answer[0] == "Nothing is adopted: Keep the plain GPU cache (plain)."
    assert decision.answer[1].startswith(f"Why: offload is not worth it. {word}, by ttft_median_seconds")


def test_invalid_names_the_gate_to_mend_and_cannot_be_forced():
    verdict = real("offload-8b")[0]
    gates = [replace(verdict.gates[0], passed=False, detail="--x differs"), *verdict.gates[1:]]
    advice = replace(verdict.recommendation, action="mend what gate launch_differs_as_declared found, then run again")
    invalid = replace(verdict, verdict="INVALID", gates=gates, recommendation=advice)
    decision = decided(verdict=invalid, force=list(NAMES))
    assert (decision.action, decision.pins) == ("mend", None)
    assert decision.answer[0] == "Failed gate launch_differs_as_declared: --x differs."
    assert decision.cause.endswith("mend what gate launch_differs_as_declared found, then run again.")


@pytest.mark.parametrize(
    ("wish", "sentence"),
    [
        ({"force": ["everything"]}, "adopt_force=everything is no refusal that can be forced; known are evidence"),
        ({"without": ["kv-transfer-config"]}, "adopt_without=kv-transfer-config can't be left out"),
        ({"max_age_days": 0}, "adopt_max_age_days=0"),
        ({"max_age_days": float("nan")}, "is no number of days"),
        ({"today": "tomorrow"}, "'tomorrow' is no date"),
    ],
)
def test_a_wish_that_cannot_be_is_refused(wish, sentence):
    with pytest.raises(UnusableInput, match=sentence):
        decided(**wish)


def test_a_verdict_of_another_campaign_is_refused():
    with pytest.raises(UnusableInput, match=r"verdict\.json is of campaign other"):
        decided(verdict=replace(real("offload-8b")[0], campaign="other"))


def test_what_a_trial_set_for_its_own_ends_can_be_left_out():
    pins = decided(without=["num-gpu-blocks-override", "enforce-eager"]).pins
    assert not {"--num-gpu-blocks-override", "--enforce-eager"} & {words[0] for words in pins.args}
    assert pins.left_out["--enforce-eager"].startswith("asked for in adopt_without")


# --- the texts


def test_the_group_vars_are_yaml_that_a_second_run_writes_alike():
    decision = decided()
    text = group_vars(decision, decision.pins)
    read = yaml.safe_load(text)
    assert read["kvtrial_vllm_version"] == "0.26.0"
    assert read["kvtrial_production"]["tier_bytes"] == 36 * 2**30
    assert read["kvtrial_production"]["args"] == decision.pins.args
    assert text == group_vars(decided(), decided().pins)
    assert "DEV_MODE" not in str(read)


def test_the_unit_starts_what_was_tried_where_production_listens():
    pins = decided().pins
    unit = unit_lines(pins, {"executable": "/opt/vllm/bin/vllm", "model": "/srv/m", "address": "", "port": 9000})
    assert unit["exec_start"].startswith('"/opt/vllm/bin/vllm" "serve" "/srv/m" "--host" "127.0.0.1" "--port" "9000"')
    assert '"cpu_bytes_to_use\\":38654705664' in unit["exec_start"].replace('\\"cpu', '"cpu')
    assert '"VLLM_KV_CACHE_LAYOUT=HND"' in unit["environment"]


def test_a_folder_is_read_and_one_that_is_none_is_refused(tmp_path):
    fleet = {"gpu01": msgspec.to_builtins(host())}
    told = adopt(RESULTS / "offload-8b" / "verdict.json", fleet, {"today": TODAY}, {})
    assert (told["action"], told["exit_status"]) == ("adopt", 0)
    assert told["answer"][-1].startswith("Nothing is written yet")
    with pytest.raises(UnusableInput, match=r"holds no verdict\.json"):
        adopt(tmp_path, fleet, {"today": TODAY}, {})
    (tmp_path / "verdict.json").write_text("{}")
    with pytest.raises(UnusableInput, match="is not a verdict"):
        adopt(tmp_path, fleet, {"today": TODAY}, {})
    newer = json.loads((RESULTS / "offload-8b" / "verdict.json").read_text()) | {"schema_version": "2.0"}
    (tmp_path / "verdict.json").write_text(json.dumps(newer))
    with pytest.raises(UnusableInput, match="newer"):
        adopt(tmp_path, fleet, {"today": TODAY}, {})


def test_without_records_the_gpu_of_the_trial_is_not_known_and_nothing_fits_it(tmp_path):
    for name in ("verdict.json", "campaign.json"):
        shutil.copy(RESULTS / "offload-8b" / name, tmp_path)
    told = adopt(tmp_path, {"gpu01": msgspec.to_builtins(host())}, {"today": TODAY}, {})
    assert (told["action"], told["refusals"]) == ("refuse", ["gpu"])


def test_a_hosts_facts_that_are_none_are_refused_in_a_sentence():
    with pytest.raises(UnusableInput, match=r"host gpu01: .*vllm_version"):
        adopt(RESULTS / "offload-8b", {"gpu01": {"model_name": "m"}}, {"today": TODAY}, {})


def test_a_worse_guard_of_another_arm_does_not_refuse_the_arm_to_adopt():
    verdict = real("ladder")[0]
    planted = [
        replace(item, verdict="WORSE") if item.role == "guard" and item.arm != "more_kv" else item
        for item in verdict.comparisons
    ]
    assert planted != verdict.comparisons
    decision = decided("ladder", verdict=replace(verdict, comparisons=planted))
    assert "guard_worse" not in names(decision)
