"""Known defects of the version that a result set names: the gate's own catalogue, and never silence."""

import json
from typing import Any

import pytest
from kvtrial.analysis.judge.results import results_of
from kvtrial.record.errors import UnusableInput
from test_judge import judged, results

OFFLOAD = [
    "serve", "m", "--host", "127.0.0.1", "--kv-transfer-config",
    '{"kv_connector":"OffloadingConnector","kv_role":"kv_both",'
    '"kv_connector_extra_config":{"cpu_bytes_to_use":17179869184}}',
]  # fmt: skip
PLAIN = OFFLOAD[:4]


def preempting(raw: dict[str, Any], control: int, variant: int) -> dict[str, Any]:
    for pair in raw["pairs"]:
        pair["control"]["preemptions"], pair["variant"]["preemptions"] = control, variant
    return raw


@pytest.mark.parametrize("stated", [True, False])
def test_a_version_with_which_the_gate_blocks_a_connector_is_no_gain(stated: bool):
    launches = {"control": {"args": PLAIN}, "variant": {"args": OFFLOAD}} if stated else None
    answer = judged(results(0.7, vllm_version="0.17.1", launches=launches))
    assert (answer.verdict, answer.class_, answer.comparison) == ("INVALID", "version_hazard", None)
    assert "negative-counter" in answer.findings[0].reason and "#37354" in answer.findings[0].reason
    assert "Publish" not in answer.findings[0].do
    assert judged(results(0.7, vllm_version="0.20.0")).verdict == "BETTER"


def test_two_arms_without_a_connector_meet_no_defect_of_connectors():
    raw = results(0.7, vllm_version="0.17.1", launches={"control": {"args": PLAIN}, "variant": {"args": PLAIN}})
    for pair in raw["pairs"]:
        pair["variant"] |= {"load_bytes": None, "store_bytes": None, "external_hit_tokens": 0}
    assert judged(raw).verdict == "BETTER"


def test_preemptions_in_the_variant_alone_are_not_trusted_where_a_defect_makes_them():
    answer = judged(preempting(results(0.7, vllm_version="0.26.0"), 0, 5_000))
    assert answer.verdict == "BETTER"
    found = next(one for one in answer.findings if one.class_ == "version_hazard_seen")
    assert "#49674" in found.reason and "not to be trusted" in found.reason
    assert found.numbers["preemptions"] == {"control": 0, "variant": 50_000}
    assert "--no-async-scheduling" in found.do and answer.findings[0].do.startswith("Settle first")
    for quiet in (
        preempting(results(0.7, vllm_version="0.30.0"), 0, 5_000),
        results(0.7, vllm_version="0.26.0"),
    ):
        assert "version_hazard_seen" not in [one.class_ for one in judged(quiet).findings]


def test_counts_that_a_defect_makes_are_no_result_where_they_are_the_metric():
    raw = preempting(results(0.7, vllm_version="0.26.0"), 10, 5_000) | {"metric": "preemptions"}
    assert (judged(raw).verdict, judged(raw).class_) == ("INVALID", "version_hazard")


def test_a_guard_that_launches_lack_is_refused_and_one_in_every_arm_is_not():
    bare = {"control": {"args": PLAIN}, "variant": {"args": OFFLOAD}}
    answer = judged(results(0.7, vllm_version="0.26.0", launches=bare))
    assert (answer.verdict, answer.findings[0].numbers["hazard"]) == ("INVALID", "preemption-cascade")
    guarded = {arm: {"args": [*spec["args"], "--no-async-scheduling"]} for arm, spec in bare.items()}
    assert judged(preempting(results(0.7, vllm_version="0.26.0", launches=guarded), 0, 9)).verdict == "BETTER"


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("nightly", "'nightly' can't be read as a version"),
        (None, "vllm_version is not stated"),
        ("0.99.0", "newer than 0.33"),
        ("0.31.0", "can't be ruled out without the arms' `launches`"),
    ],
)
def test_what_was_not_looked_for_is_said(version: str | None, says: str):
    assert says in " ".join(judged(results(0.7, vllm_version=version)).notes)


def test_a_version_that_can_not_be_read_is_no_error_with_launches_either():
    launches = {"control": {"args": PLAIN}, "variant": {"args": OFFLOAD}}
    answer = judged(results(0.7, vllm_version="nightly", launches=launches))
    assert answer.verdict == "BETTER" and "nor were the launches checked" in answer.notes[0]
    with pytest.raises(UnusableInput):
        results_of(json.loads('{"pairs": [], "vllm_version": "nightly"}'), "a set")
