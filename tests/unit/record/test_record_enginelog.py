"""Facts and causes from engine logs, most of them real."""

from pathlib import Path

import pytest
from kvtrial.record.enginelog import diagnose, engine_facts

LOGS = Path(__file__).parents[2] / "fixtures" / "logs"


def text(name):
    return (LOGS / f"{name}.log").read_text(encoding="utf-8")


def test_facts_of_0_32_on_the_cpu_with_an_out_of_tree_spec():
    facts = engine_facts(text("vllm-0.32.0-cpu-offload-start"))
    assert facts.engine_version == "0.32.0"
    assert facts.kv_cache_tokens == 1280
    assert facts.max_concurrency == 1.25
    assert (facts.num_gpu_blocks_profiled, facts.num_gpu_blocks_override) == (4096, 40)
    assert facts.kv_cache_layout == "LBHNC"
    assert (facts.connector, facts.spec) == ("OffloadingConnector", "HostOffloadingSpec")
    assert facts.engine_id == "e89f4653-6963-4e28-9652-549e20cc866f"
    assert "'block_size': 32" in facts.non_default_args


def test_facts_of_0_26_on_a_gpu_with_and_without_the_connector():
    offload, control = (
        engine_facts(text("vllm-0.26.0-h200-8b-offload")),
        engine_facts(text("vllm-0.26.0-h200-0.6b-control-start")),
    )
    assert offload.kv_cache_tokens == control.kv_cache_tokens == 65536
    assert (offload.connector, offload.spec) == ("OffloadingConnector", "CPUOffloadingSpec")
    assert (control.connector, control.spec) == (None, None)
    assert control.available_kv_cache_gib == 126.93


def test_the_words_of_a_newer_version_are_not_looked_for_in_an_older_one():
    line = "(EngineCore) INFO CPU KV cache size: 1,280 tokens, Maximum concurrency for 1,024 tokens per request: 1.25x"
    assert engine_facts(line, "0.32.0").kv_cache_tokens == 1280
    assert engine_facts(line, "0.26.0").kv_cache_tokens is None


@pytest.mark.parametrize(
    "name", ["vllm-0.32.0-cpu-offload-start", "vllm-0.26.0-h200-8b-offload", "vllm-0.26.0-h200-0.6b-control-start"]
)
def test_a_healthy_log_has_no_cause(name):
    assert diagnose(text(name)) is None


def test_memory_short_at_start_is_told_with_its_numbers():
    found = diagnose(text("memory-short-at-start"))
    assert found.class_ == "gpu_memory_short_at_start"
    for part in ("52.11 of 139.80 GiB", "128.62 GiB (0.92)", "about 87.7 GiB", "did not start"):
        assert part in found.cause
    assert found.numbers["held_gib"] == pytest.approx(87.69)
    assert "nvidia-smi" in found.fix
    assert "Free memory on device" in found.evidence_line


def test_the_assert_after_an_abort_is_the_known_bug_and_not_the_preemptions_before_it():
    found = diagnose(text("assert-after-abort"))
    assert found.class_ == "engine_dead_known_bug"
    assert "#49118" in found.cause
    assert "not the cause" in found.cause
    assert diagnose(text("assert-after-abort"), "0.32.0").class_ == "engine_dead"


@pytest.mark.parametrize(
    ("version", "line", "identity"),
    [
        (
            "0.32.0",
            "AttributeError: '_OpNamespace' '_C' object has no attribute 'init_cpu_memory_env'",
            "libnuma_missing",
        ),
        ("0.32.0", "ValueError: No common block size for 16 (CPU_ATTN: [MultipleOf(32)])", "cpu_block_size"),
        ("0.32.0", "Exception: CPU Offloading is currently only supported on CUDA-alike and XPU GPUs", "platform"),
        ("0.22.0", "Exception: CPU Offloading is currently only supported on CUDA-alike GPUs", "platform"),
        ("0.32.0", "Exception: cpu_bytes_to_use must be specified in kv_connector_extra_config", "cpu_bytes_missing"),
        ("0.13.0", "Exception: num_cpu_blocks must be specified in kv_connector_extra_config", "cpu_blocks_missing"),
        (
            "0.33.0",
            "ValueError: 'block_size'=100 in kv_connector_extra_config must be a multiple of the GPU KV cache "
            "block size (16 tokens). Use 112",
            "chunk_not_multiple",
        ),
        (
            "0.32.0",
            "ValueError: Specify only one of 'block_size' or 'blocks_per_chunk' in kv_connector_extra_config.",
            "both_chunk_sizes",
        ),
        ("0.32.0", "ValueError: Unsupported connector type: OfloadingConnector", "connector_unknown"),
        (
            "0.32.0",
            "ValueError: Please specify kv_role when kv_connector is set, supported roles are (...)",
            "role_missing",
        ),
        ("0.32.0", "ValueError: Unsupported spec type: HostSpec", "spec_unknown"),
        ("0.18.0", "ValueError: Unknown eviction policy: fifo. Supported policies: lru, arc", "policy_unknown"),
        ("0.32.0", "ValueError: Unknown cache policy: 'fifo'. Supported: ['lru', 'arc'].", "policy_unknown"),
        (
            "0.32.0",
            "RuntimeError: Insufficient space in /dev/shm for CPU KV offload shared region in /dev/shm: 8192 MiB "
            "required, 64 MiB free.",
            "dev_shm_short_offload",
        ),
        (
            "0.29.0",
            "RuntimeError: Insufficient space in /dev/shm: 8192 MiB required, 64 MiB free. Increase",
            "dev_shm_short_offload",
        ),
        ("0.27.1", "OSError: [Errno 14] Bad address", "dev_shm_bad_address"),
        ("0.32.0", "OSError: [Errno 98] Address already in use", "port_in_use"),
        ("0.32.0", "FileNotFoundError: No such file or directory: /srv/model/model.safetensors", "weights_missing"),
        ("0.32.0", "PermissionError: [Errno 13] Permission denied: '/srv/model/config.json'", "weights_forbidden"),
        (
            "0.32.0",
            "ValueError: KV connector OffloadingConnector is incompatible with "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True unless",
            "expandable_segments",
        ),
        ("0.32.0", "ValueError: No available memory for the cache blocks. Try increasing", "kv_cache_no_memory"),
        (
            "0.32.0",
            "ValueError: To serve at least one request with the model's max seq len (4096), (1.5 GiB KV cache is "
            "needed, which is larger than the available KV cache memory (0.5 GiB).",
            "kv_cache_below_one_request",
        ),
        ("0.32.0", "RuntimeError: Engine core initialization failed. See root cause above.", "start_failed"),
        ("0.32.0", "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.", "engine_dead"),
    ],
)
def test_a_failure_has_one_cause_and_a_fix(version, line, identity):
    later = "\n(APIServer) RuntimeError: Engine core initialization failed. See root cause above."
    found = diagnose(f"INFO start\n(EngineCore) ERROR {line}{later}", version)
    assert found.id == identity
    assert "{" not in found.cause + found.fix
    assert "?" not in found.cause + found.fix
    assert found.line_number == 2 or identity == "start_failed"


def test_a_missing_file_is_no_cause_once_the_engine_serves():
    line = "FileNotFoundError: [Errno 2] No such file or directory: 'chat_template.jinja'"
    assert diagnose(line, "0.32.0").id == "weights_missing"
    assert diagnose(f"INFO: Application startup complete.\n{line}", "0.32.0") is None


def test_out_of_memory_at_run_time_is_told_from_one_at_start():
    line = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert diagnose(line, "0.32.0").class_ == "gpu_memory_short_at_start"
    assert diagnose(f"INFO: Application startup complete.\n{line}", "0.32.0").class_ == "cuda_oom_runtime"
