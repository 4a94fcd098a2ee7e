"""Hazards by version and arm, their guards, and the watches on log lines."""

import pytest
from kvtrial.record.hazards import hazards_for, watch_log
from kvtrial.record.launch import ArmLaunch

OFFLOAD = [
    "--kv-transfer-config",
    '{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":{"cpu_bytes_to_use":8589934592}}',
]


def arms(control=(), variant=(), variant_env=None):
    return {
        "control": ArmLaunch(["Qwen/Qwen3-0.6B", *control], {}),
        "offload": ArmLaunch(["Qwen/Qwen3-0.6B", *OFFLOAD, *variant], variant_env or {}),
    }


def hit(version, launches, identity, **options):
    return next((h for h in hazards_for(version, launches, **options) if h.hazard.id == identity), None)


@pytest.mark.parametrize("version", ["0.24.0", "0.26.0", "0.29.1"])
def test_the_preemption_cascade_wants_its_guard_in_every_arm(version):
    bare = hit(version, arms(), "preemption-cascade")
    assert bare.action == "guard"
    assert not bare.guarded
    assert bare.applies_to_arms == ["offload"]
    assert "--no-async-scheduling" in bare.detail
    only_variant = hit(version, arms(variant=["--no-async-scheduling"]), "preemption-cascade")
    assert not only_variant.guarded
    assert "missing in control" in only_variant.detail
    both = hit(version, arms(["--no-async-scheduling"], ["--no_async_scheduling"]), "preemption-cascade")
    assert both.guarded


@pytest.mark.parametrize("version", ["0.23.0", "0.30.0", "0.32.0"])
def test_the_preemption_cascade_ends_where_it_was_mended(version):
    assert hit(version, arms(), "preemption-cascade") is None


def test_a_trial_without_a_connector_meets_no_hazard_of_the_connector():
    plain = {"control": ArmLaunch(["m"], {}), "variant": ArmLaunch(["m", "--max-num-seqs", "8"], {})}
    defects = {h.hazard.id for h in hazards_for("0.32.0", plain) if h.hazard.about == "defect"}
    assert defects == {"aborted-requests-missing", "engine-dead"}
    assert all(h.action == "watch" for h in hazards_for("0.26.0", plain))


def test_0_32_with_offloading_is_watched_and_neither_blocked_nor_unguarded():
    for backend in ("cpu", "cuda"):
        actions = {h.action for h in hazards_for("0.32.0", arms(), backend)}
        assert actions == {"watch"}
    names = {h.hazard.id for h in hazards_for("0.32.0", arms(), "cuda")}
    assert {
        "deferred-behind-load",
        "tier-not-pinned",
        "shm-insufficient",
        "reset-keeps-tier",
        "deadlock-async-load-stuck",
    } <= names
    assert not {"tier-not-pinned", "shm-insufficient"} & {h.hazard.id for h in hazards_for("0.32.0", arms(), "cpu")}


def test_0_26_with_offloading_watches_the_abort_assert_and_the_deadlock():
    names = {h.hazard.id for h in hazards_for("0.26.0", arms(), "cuda")}
    assert {"abort-assert", "deadlock-async-load", "deferred-behind-load", "usage-gauges-not-residency"} <= names
    assert "abort-assert" not in {h.hazard.id for h in hazards_for("0.27.0", arms(), "cuda")}


@pytest.mark.parametrize(
    ("version", "launches", "identity"),
    [
        ("0.32.0", arms(variant_env={"VLLM_USE_SIMPLE_KV_OFFLOAD": "1"}), "simple-offload-by-environment"),
        ("0.32.0", arms(variant=["--api-server-count", "4"]), "api-servers"),
        ("0.18.0", arms(), "negative-counter"),
        ("0.20.2", arms(), "reset-external-no-op"),
        (
            "0.13.0",
            {"a": ArmLaunch(["m", "--kv-offloading-size=4", "--kv-offloading-backend=native"], {})},
            "shortcut-unusable",
        ),
        ("0.26.0", arms(variant=["--speculative-config", '{"method":"mtp"}']), "deadlock-spec-decode"),
    ],
)
def test_what_blocks(version, launches, identity):
    assert hit(version, launches, identity).action == "block"


def test_one_api_server_does_not_block():
    assert hit("0.32.0", arms(variant=["--api-server-count", "1"]), "api-servers") is None


def test_hazards_of_other_claims_are_left_out():
    assert hit("0.20.2", arms(), "reset-external-no-op", concerns=("offload",)) is None


@pytest.mark.parametrize(
    ("version", "line", "identity"),
    [
        ("0.26.0", "ERROR     assert len(offload_keys) == len(offload_block_ids)", "abort-assert"),
        (
            "0.28.0",
            "cudaHostRegister failed for rank=0 (code=2) — transfers will still work but may be slower (unpinned DMA)",
            "tier-not-pinned",
        ),
        (
            "0.31.0",
            "cudaHostRegister failed for rank=0 at 3.00 of 8.00 GB (code=2); the offload region stays pageable",
            "tier-not-pinned",
        ),
        (
            "0.33.0",
            "WARNING host_register failed for rank=0 at 3.00 of 8.00 GB; the offload region stays pageable",
            "tier-not-pinned",
        ),
        (
            "0.32.0",
            "RuntimeError: Insufficient space in /dev/shm for CPU KV offload shared region in /dev/shm: 8192 MiB "
            "required",
            "shm-insufficient",
        ),
        (
            "0.32.0",
            "DEBUG Delaying request cmpl-1 since some of its chunks are already being loaded",
            "deferred-behind-load",
        ),
        ("0.32.0", "WARNING Request cmpl-1: cannot store chunks", "tier-full"),
        ("0.22.0", "WARNING Request cmpl-1: cannot store blocks", "tier-full"),
        (
            "0.32.0",
            "WARNING max_load_tokens must be a non-negative int, got 1.5; ignoring",
            "per-request-limit-ignored",
        ),
        ("0.32.0", "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.", "engine-dead"),
        ("0.18.0", "ValueError: Counters can only be incremented by non-negative amounts.", "negative-counter"),
    ],
)
def test_a_watch_knows_its_line(version, line, identity):
    hits = watch_log(["INFO quiet", line], version)
    assert [(h.hazard, h.line_number) for h in hits] == [(identity, 2)]


def test_a_line_of_another_version_is_not_that_hazard():
    assert watch_log(["assert len(offload_keys) == len(offload_block_ids)"], "0.32.0") == []
