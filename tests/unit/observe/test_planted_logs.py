"""Each class in a log with that fault planted, and quiet on the log beside it."""

import pytest
from kvtrial.record.statuslines import interval_seconds, status_lines
from planted import METRICS, classes, log_of, logged, status_line

LOGS = METRICS.parent / "logs"
SERVING = "INFO: Application startup complete."
CREATED = "INFO [factory.py:62] Creating v1 connector with name: OffloadingConnector and engine_id: 0-1"


def lines(**by_line: list[float]) -> list[str]:
    """Periodic lines, ten seconds apart."""
    count = len(next(iter(by_line.values())))
    return [status_line(10 * n, **{name: values[n] for name, values in by_line.items()}) for n in range(count)]


FREE = (
    "ValueError: Free memory on device cuda:1 (3.10/79.10 GiB) on startup is less than desired GPU memory utilization"
)
SHORT = "RuntimeError: Insufficient space in /dev/shm"
SIZES = "16384.0 MiB required, 64.0 MiB free."
STORE_JOBS = "    assert len(offload_keys) == len(offload_block_ids)"


@pytest.mark.parametrize(
    ("version", "text", "class_"),
    [
        ("0.26.0", f"{FREE} (0.9, 71.19 GiB). Decrease", "gpu_memory_short_at_start"),
        ("0.31.0", "ValueError: No available memory for the cache blocks. Try", "gpu_memory_short_at_start"),
        ("0.30.0", "RuntimeError: CUDA out of memory occurred when warming up sampler", "gpu_memory_short_at_start"),
        ("0.28.0", f"{SHORT}: {SIZES} Increase", "dev_shm_shortage"),
        ("0.32.0", f"{SHORT} for CPU KV offload shared region in /dev/shm: {SIZES}", "dev_shm_shortage"),
        ("0.27.1", "OSError: [Errno 14] Bad address", "dev_shm_shortage"),
        ("0.21.0", "    assert not req_status.transfer_jobs", "engine_dead_known_bug"),
        ("0.18.1", "ValueError: Counters can only be incremented by non-negative amounts", "engine_dead_known_bug"),
        ("0.22.1", STORE_JOBS, "engine_dead_known_bug"),
        ("0.29.0", STORE_JOBS, "engine_dead"),
    ],
)
def test_a_known_failure_is_named(version: str, text: str, class_: str):
    answer = logged(log_of(CREATED, f"ERROR {text}", "ERROR EngineCore failed to start.", version=version))
    assert answer.class_ == class_
    assert answer.findings[0].reason and answer.findings[0].do


def test_the_same_assert_is_another_bug_once_the_first_is_fixed():
    assert_ = f"ERROR {STORE_JOBS}"
    assert "#49118, in 0.20-0.26" in logged(log_of(assert_, version="0.26.0")).findings[0].reason
    assert "#55503" in logged(log_of(assert_, version="0.29.0")).findings[0].reason


def test_a_bad_address_of_another_version_is_no_shortage_of_shared_memory():
    answer = logged(log_of("OSError: [Errno 14] Bad address", "ERROR EngineCore failed to start.", version="0.30.0"))
    assert answer.class_ == "engine_start_failed"


def test_out_of_memory_while_serving_is_told_from_out_of_memory_at_start():
    oom = (
        "ERROR torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of "
        "79.10 GiB of which 612.00 MiB is free."
    )
    serving = logged(log_of(SERVING, status_line(0, running=40, usage=93.0, preemptions=3), oom))
    assert serving.class_ == "cuda_oom_runtime"
    assert "1.50 GiB were asked for" in serving.findings[0].reason
    assert "which are something else" in serving.findings[0].reason
    assert serving.findings[0].numbers["wanted_gib"] == 1.5 and serving.findings[0].numbers["free_mib"] == 612
    assert logged(log_of(oom)).class_ == "gpu_memory_short_at_start"


def test_a_shortage_of_shared_memory_names_the_tier_that_was_asked_for():
    args = "INFO [api_utils.py:273] non-default args: {'model_tag': 'm', 'kv_offloading_size': 32.0}"
    answer = logged(log_of(args, CREATED, "OSError: [Errno 14] Bad address", version="0.27.1"))
    assert "34,359,738,368 B (32.0 GiB)" in answer.findings[0].reason


def test_a_dead_engine_after_out_of_memory_is_said_to_be_dead():
    oom = "ERROR torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    dead = "ERROR vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."
    answer = logged(log_of(SERVING, oom, dead))
    assert answer.class_ == "cuda_oom_runtime" and "The engine is dead by it" in answer.findings[0].reason


def test_what_the_kernel_killed_is_no_cuda_error_and_no_preemption():
    for line, class_ in [
        ("kernel: Out of memory: Killed process 811 (VLLM::EngineCor)", "out_of_memory_kernel_oom_killer"),
        ("kernel: Memory cgroup out of memory: Killed process 811 (VLLM)", "out_of_memory_cgroup_limit"),
        ("kernel: Out of memory: Killed process 811 (chrome) total-vm:9kB", "another_process_killed"),
    ]:
        assert logged(log_of(status_line(0), line)).class_ == class_


def test_a_scheduler_that_stands_still_in_a_log():
    stuck = lines(
        running=[5, 0, 0, 0, 0], waiting=[1, 4, 4, 4, 4], generation=[90, 0, 0, 0, 0], deferred=[0, 3, 3, 3, 3]
    )
    answer = logged(log_of(CREATED, *stuck, version="0.22.1"))
    assert answer.class_ == "scheduler_deadlock"
    assert (answer.findings[0].numbers["lines"], answer.findings[0].numbers["seconds"]) == (4, 40)
    assert answer.findings[0].numbers["known"] == ["deadlock-kv-pressure"]
    assert "It ended by itself" not in answer.findings[0].reason


def test_a_stall_that_ended_is_said_to_have_ended():
    stuck = lines(running=[0, 0, 0, 3], waiting=[4, 4, 4, 1], generation=[0, 0, 0, 50])
    assert "It ended by itself" in logged(log_of(*stuck)).findings[0].reason


@pytest.mark.parametrize(
    "quiet",
    [
        lines(running=[0] * 6, waiting=[0] * 6, generation=[0] * 6),
        lines(running=[0, 0], waiting=[4, 4], generation=[0, 0]),
        lines(running=[2] * 6, waiting=[4] * 6, generation=[0] * 6),
        lines(running=[0] * 6, waiting=[4] * 6, generation=[30] * 6),
    ],
    ids=["idle", "two lines", "running", "tokens come"],
)
def test_what_only_looks_like_a_deadlock(quiet: list[str]):
    assert "scheduler_deadlock" not in classes(logged(log_of(*quiet)))


def test_lines_of_several_engines_are_not_mixed():
    mixed = [
        line
        for n in range(5)
        for line in (
            status_line(10 * n, engine="000", running=3),
            status_line(10 * n, engine="001", running=0, waiting=7, generation=0),
        )
    ]
    answer = logged(log_of(*mixed))
    assert answer.class_ == "scheduler_deadlock"
    assert "Engine 001" in answer.findings[0].reason
    assert answer.findings[0].numbers["lines"] == 5


@pytest.mark.parametrize(
    ("version", "text"),
    [
        ("0.26.0", "cudaHostRegister failed for rank=0 (code=2) — transfers will still work but may be slower"),
        ("0.31.0", "cudaHostRegister failed for rank=0 at 12.00 of 64.00 GB (code=2); the offload region stays"),
        ("0.32.0", "host_register failed for rank=1 at 0.00 of 600.00 GB; the offload region stays pageable"),
    ],
)
def test_a_tier_that_was_not_pinned(version: str, text: str):
    answer = logged(log_of(CREATED, f"WARNING [gpu_worker.py:250] {text}", SERVING, status_line(0), version=version))
    assert (answer.class_, answer.findings[0].confidence) == ("tier_not_pinned", "seen")
    pinned = logged(log_of(CREATED, "INFO Created mmap file /dev/shm/vllm_offload_0.mmap (64.00 GB)", status_line(0)))
    assert "tier_not_pinned" not in classes(pinned)


def test_preemptions_by_line_have_a_shape_too():
    burst = lines(running=[30] * 8, preemptions=[0, 0, 40, 9, 0, 0, 0, 0], usage=[60, 80, 99, 97, 60, 50, 50, 50])
    steady = lines(running=[30] * 6, preemptions=[9, 8, 11, 10, 9, 9], usage=[99] * 6, waiting=[50] * 6)
    cool = lines(running=[30] * 6, preemptions=[0, 0, 20, 0, 0, 0], usage=[20] * 6)
    assert logged(log_of(*burst)).class_ == "preemption_single_burst"
    assert logged(log_of(*steady)).class_ == "preemption_continuous"
    assert logged(log_of(*cool)).class_ == "preemption_not_from_kv_pressure"


def test_a_machine_that_was_taken_away_is_no_preemption_of_requests():
    answer = logged(log_of(status_line(0), "systemd: Spot instance is being preempted, shutting down", status_line(10)))
    assert answer.class_ == "not_preemption"
    assert "the machine" in answer.findings[0].reason


def test_a_queue_without_preemptions_is_none():
    queue = lines(running=[64] * 5, waiting=[30] * 5, usage=[45] * 5)
    assert logged(log_of(*queue)).class_ == "not_preemption"
    behind = lines(running=[2] * 5, waiting=[9] * 5, deferred=[8] * 5, usage=[20] * 5)
    assert logged(log_of(*behind)).class_ == "deferred_behind_load"


def test_known_warnings_of_the_version_are_listed_and_others_are_not():
    full = "WARNING [scheduler.py:1995] Request cmpl-1: cannot store chunks"
    assert "known_warning" in classes(logged(log_of(full, status_line(0), version="0.31.0")))
    assert "known_warning" not in classes(logged(log_of("WARNING nothing", status_line(0), version="0.31.0")))


def test_the_interval_is_read_from_the_lines_and_across_midnight_does_not_matter():
    text = "\n".join([status_line(5), status_line(10), status_line(15)])
    assert interval_seconds(status_lines(text)["000"]) == 5
    assert interval_seconds(status_lines(status_line(5))["000"]) == 10


@pytest.mark.parametrize("name", sorted(path.name for path in LOGS.glob("vllm-*.log")))
def test_logs_of_real_engines_without_a_fault_are_given_none(name: str):
    answer = logged((LOGS / name).read_text())
    assert {f.class_ for f in answer.findings} <= {"no_fault_seen", "idle", "not_preemption"}


def test_an_engine_that_hangs_with_requests_in_its_batch_is_neither_busy_nor_idle():
    for waiting in (0, 6):
        answer = logged(log_of(*lines(running=[4] * 12, waiting=[waiting] * 12, generation=[0] * 12)))
        assert classes(answer) == ["engine_stalled"]
    busy = logged(log_of(*lines(running=[4] * 5, generation=[50, 0, 0, 50, 50])))
    assert classes(busy) == ["no_fault_seen"]


def test_two_lines_of_a_standstill_are_too_few_and_no_queue_for_seats():
    answer = logged(log_of(*lines(running=[0] * 2, waiting=[3] * 2, generation=[0] * 2)))
    assert (answer.class_, answer.findings[0].confidence) == ("standstill_unknown", "unknown")


def test_a_standstill_that_is_over_asks_for_no_restart():
    stuck = lines(running=[0, 0, 0, 3], waiting=[4, 4, 4, 1], generation=[0, 0, 0, 50])
    assert "restart" not in logged(log_of(*stuck)).findings[0].do


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


@pytest.mark.parametrize(
    "quote",
    [
        f'INFO [logger.py:39] Received request cmpl-1: prompt: "{OOM}", params: SamplingParams()',
        'INFO [logger.py:39] Received request cmpl-1: prompt: "spot instance preempted", params: S()',
        f"DEBUG [logger.py:39] Request cmpl-1 details: prompt: '{OOM}', prompt_token_ids: None",
        f"INFO [logger.py:99] Generated response cmpl-1 (streaming): output: '{OOM}', output_token_ids: None",
    ],
)
def test_what_users_write_is_no_word_of_the_engine(quote: str):
    answer = logged(log_of(SERVING, quote, *lines(running=[2] * 4), version="0.32.0"))
    assert classes(answer) == ["no_fault_seen"]


def test_an_engine_that_runs_afterwards_did_start():
    failed = "(EngineCore pid=8) ERROR Engine core initialization failed. See root cause above."
    answer = logged(log_of(failed, SERVING, *lines(running=[2] * 4)))
    assert answer.class_ == "no_fault_seen"
    assert answer.findings[1].about == "an earlier life of the server"


@pytest.mark.parametrize(
    ("more", "class_", "confidence"),
    [
        ("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.", "cuda_oom_runtime", "inferred"),
        ("", "cuda_oom_runtime", "unknown"),
        ("RuntimeError: Engine core initialization failed.", "gpu_memory_short_at_start", "seen"),
    ],
)
def test_an_excerpt_tells_no_failure_to_start_that_it_does_not_hold(more: str, class_: str, confidence: str):
    answer = logged(f"INFO [api_server.py:1] vLLM API server version 0.32.0\nERROR [core.py:1] {OOM}.\n{more}\n")
    assert (answer.class_, answer.findings[0].confidence) == (class_, confidence)


def test_a_key_that_is_not_in_the_log_is_not_named():
    failed = "Exception: cpu_bytes_to_use must be specified in kv_connector_extra_config"
    answer = logged(log_of(CREATED, f"(EngineCore pid=8) {failed}", version="0.28.0"))
    assert "num_cpu_blocks" not in " ".join(finding.reason for finding in answer.findings)
