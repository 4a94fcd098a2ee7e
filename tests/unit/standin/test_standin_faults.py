"""Start, stop and every planted fault: each is seen from outside, and gone without it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LOAD = "vllm:kv_offload_load_bytes_total"
STORE = "vllm:kv_offload_store_bytes_total"
LISTENING = "0A"


def roundtrip(engine: Any, prompt: Any) -> list[Any]:
    """Populate, evict, return on 33 usable blocks: the answers to the same prompt."""
    first = engine.ask(prompt("T"))
    engine.ask(prompt("F"))
    return [first, engine.ask(prompt("T"))]


def title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()


def test_the_log_has_the_lines_that_facts_are_read_from(launch: Any) -> None:
    engine = launch("offload")
    log = engine.log()
    for text in (
        "STAND-IN ENGINE: not vLLM; results are evidence standin",
        "version 0.32.0",
        "non-default args: {",
        "'unheard_of_flag': 7",
        "'kv_cache_memory_bytes': 268435456",
        "KVTransferConfig(kv_connector='OffloadingConnector', engine_id='",
        "Using LBHNC KV cache layout.",
        "Overriding num_gpu_blocks=2048 with num_gpu_blocks_override=193",
        "CPU KV cache size: 6,176 tokens, Maximum concurrency for 4,096 tokens per request: 1.51x",
        "Creating v1 connector with name: OffloadingConnector and engine_id: ",
        "Creating offloading spec with name: HostOffloadingSpec",
    ):
        assert text in log
    assert "Creating v1 connector" not in launch("control").log()


def test_two_processes_in_one_group_and_sigterm_ends_both_with_status_0(launch: Any) -> None:
    engine = launch("control")
    core = next(pid for pid in engine.group() if pid != engine.process.pid)
    assert title(core) == "VLLM::EngineCore"
    assert f"(EngineCore pid={core})" in engine.log()
    assert engine.terminate() == 0
    assert engine.group() == []
    assert "[shutdown] API server: shutdown triggered" in engine.log()


def test_sigterm_under_load_and_with_an_idle_connection_leaves_no_traceback(launch: Any, prompt: Any) -> None:
    engine = launch("control", STANDIN_SLOWDOWN="50")
    with (
        socket.create_connection(("127.0.0.1", engine.port)) as idle,
        socket.create_connection(("127.0.0.1", engine.port)) as asking,
    ):
        idle.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        assert idle.recv(64).startswith(b"HTTP/1.1 200 OK")
        body = b'{"model":"tiny","prompt":"abc","max_tokens":200,"stream":true}'
        asking.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        assert asking.recv(64).startswith(b"HTTP/1.1 200 OK")
        assert engine.terminate() == 0
    assert "Traceback" not in engine.log()
    assert engine.group() == []


def test_engine_core_ends_when_its_parent_is_killed(launch: Any) -> None:
    engine = launch("control")
    engine.process.kill()
    engine.process.wait(20)
    engine.wait_until(lambda: engine.group() == [])


def test_sigterm_before_the_port_opens_ends_it_too(launch: Any) -> None:
    engine = launch("control", healthy=False, STANDIN_FAULT="never_healthy")
    engine.wait_until(lambda: "non-default args" in engine.log())
    assert engine.terminate() == 0
    assert engine.group() == []


def test_a_fault_may_be_limited_to_one_arm(launch: Any, prompt: Any) -> None:
    fault = {"STANDIN_FAULT": "short_output", "STANDIN_FAULT_ARM": "offload"}
    assert len(launch("control", **fault).ask(prompt("T")).token_ids) == 6
    assert len(launch("offload", **fault).ask(prompt("T")).token_ids) == 5


def test_an_unknown_fault_is_refused(launch: Any) -> None:
    engine = launch("control", healthy=False, STANDIN_FAULT="no_laod")
    assert engine.process.wait(20) == 2
    assert "no_laod" in engine.log()


@pytest.mark.parametrize(
    ("fault", "tokens", "count"), [("", 1024, 1024), ("no_load", 0, 0), ("wrong_load_bytes", 1024, 1056)]
)
def test_loads_and_their_count(fault: str, tokens: int, count: int, launch: Any, prompt: Any) -> None:
    engine = launch("offload", blocks=34, STANDIN_FAULT=fault)
    assert roundtrip(engine, prompt)[1].cached_tokens == tokens
    samples = engine.samples()
    assert samples.get(LOAD, 0.0) == count * 4096
    assert samples[STORE] == 2 * 1024 * 4096


@pytest.mark.parametrize(("fault", "equal"), [("", True), ("corrupt_on_load", False)])
def test_a_corrupted_load_changes_the_answer(fault: str, equal: bool, launch: Any, prompt: Any) -> None:
    first, returned = roundtrip(launch("offload", blocks=34, STANDIN_FAULT=fault), prompt)
    assert (first.token_ids == returned.token_ids) == equal


@pytest.mark.parametrize(("fault", "equal"), [("", False), ("same_answer", True)])
def test_answers_discriminate_between_prompts(fault: str, equal: bool, launch: Any, prompt: Any) -> None:
    engine = launch("control", STANDIN_FAULT=fault)
    assert (engine.ask(prompt("A")).token_ids == engine.ask(prompt("B")).token_ids) == equal


@pytest.mark.parametrize(("fault", "cached"), [("", 0), ("local_hits", 1024)])
def test_local_hits_mean_no_eviction(fault: str, cached: int, launch: Any, prompt: Any) -> None:
    engine = launch("control", blocks=34, STANDIN_FAULT=fault)
    assert roundtrip(engine, prompt)[1].cached_tokens == cached


def test_a_control_may_show_loads(launch: Any, prompt: Any) -> None:
    engine = launch("control", STANDIN_FAULT="connector_in_control")
    engine.ask(prompt("T"))
    assert engine.samples()[LOAD] > 0


def test_counters_may_restart_once(launch: Any, prompt: Any) -> None:
    engine = launch("control", STANDIN_FAULT="counter_reset:2")
    engine.ask(prompt("T"))
    before = engine.samples()
    engine.ask(prompt("T"))
    after = engine.samples()
    assert after["vllm:prompt_tokens_total"] < before["vllm:prompt_tokens_total"]
    assert after["process_start_time_seconds"] > before["process_start_time_seconds"]
    engine.ask(prompt("T"))
    assert engine.samples()["vllm:prompt_tokens_total"] > after["vllm:prompt_tokens_total"]


def test_the_engine_may_be_killed(launch: Any, prompt: Any) -> None:
    engine = launch("control", STANDIN_FAULT="die_after:2")
    assert engine.ask(prompt("T")).status == 200
    assert len(engine.ask(prompt("T")).token_ids) == 6
    assert engine.process.wait(20) == -signal.SIGKILL
    engine.wait_until(lambda: engine.group() == [])


def test_the_engine_core_may_die(launch: Any, prompt: Any) -> None:
    engine = launch("control", STANDIN_FAULT="engine_dead_after:1")
    assert engine.get("/health")[0] == 200
    engine.ask(prompt("T"))
    assert engine.get("/health")[0] == 503
    assert engine.ask(prompt("T")).status == 500
    assert "EngineDeadError" in engine.log()
    assert "EngineCore encountered a fatal error." in engine.log()


def test_the_scheduler_may_deadlock(launch: Any, prompt: Any) -> None:
    engine = launch("control", STANDIN_FAULT="deadlock_after:1")
    engine.ask(prompt("T"))
    with socket.create_connection(("127.0.0.1", engine.port), timeout=0.5) as client:
        body = b'{"model":"tiny","prompt":"abc"}'
        client.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        engine.wait_until(lambda: engine.samples()["vllm:num_requests_waiting"] == 1)
        assert engine.samples()["vllm:num_requests_running"] == 0
        assert engine.get("/health")[0] == 200
        with pytest.raises(TimeoutError):
            client.recv(1)


def test_a_start_may_fail_for_want_of_shared_memory(launch: Any) -> None:
    engine = launch("offload", healthy=False, STANDIN_FAULT="fail_start")
    assert engine.process.wait(20) == 1
    assert "RuntimeError: Insufficient space in /dev/shm for CPU KV offload shared region" in engine.log()
    assert engine.group() == []


def test_a_start_may_be_slow(launch: Any) -> None:
    engine = launch("control", healthy=False, STANDIN_FAULT="slow_start:1")
    engine.wait_until(lambda: "non-default args" in engine.log())
    with pytest.raises(ConnectionRefusedError):
        engine.get("/health")
    engine.wait_healthy()


def listening_addresses(pid: int) -> set[str]:
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:  # closed since the folder was listed
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == LISTENING and row[9] in inodes}


@pytest.mark.parametrize(("fault", "addresses"), [("", {"0100007F"}), ("routable_bind", {"0100007F", "00000000"})])
def test_a_routable_socket_may_be_open(fault: str, addresses: set[str], launch: Any) -> None:
    assert listening_addresses(launch("control", STANDIN_FAULT=fault).process.pid) == addresses


def test_the_model_name_may_be_wrong(launch: Any, prompt: Any) -> None:
    engine = launch("control", STANDIN_FAULT="wrong_model_name")
    assert engine.get_json("/v1/models")["data"][0]["id"] == "tiny-other"
    assert 'model_name="tiny-other"' in engine.get("/metrics")[1].decode()
    assert engine.ask(prompt("T")).status == 200


def test_the_version_may_be_wrong(launch: Any) -> None:
    engine = launch("control", STANDIN_FAULT="wrong_version:0.26.0")
    assert engine.get_json("/version") == {"version": "0.26.0"}
    assert "version 0.26.0" in engine.log()


def test_a_scheduler_field_may_differ(launch: Any) -> None:
    engine = launch("control", STANDIN_FAULT="extra_config", VLLM_SERVER_DEV_MODE="1")
    config = engine.get_json("/server_info?config_format=json")["vllm_config"]["scheduler_config"]
    assert config["long_prefill_token_threshold"] == 512


def test_engine_core_may_be_orphaned(launch: Any) -> None:
    engine = launch("control", STANDIN_FAULT="orphan_core")
    core = next(pid for pid in engine.group() if pid != engine.process.pid)
    assert engine.terminate() == 0
    os.killpg(engine.process.pid, signal.SIGTERM)
    assert engine.group() == [core]
    os.killpg(engine.process.pid, signal.SIGKILL)
    engine.wait_until(lambda: engine.group() == [])


def test_sigterm_may_be_ignored(launch: Any) -> None:
    engine = launch("control", STANDIN_FAULT="ignore_sigterm")
    engine.process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        engine.process.wait(0.5)
    assert engine.get("/health")[0] == 200


def test_every_nth_stream_may_be_cut(launch: Any, prompt: Any) -> None:
    engine = launch("control", STANDIN_FAULT="abort_requests:2")
    assert [engine.ask(prompt(f"T{index}")).broken for index in range(4)] == [False, True, False, True]
    samples = engine.samples()
    assert samples['vllm:request_success_total{finished_reason="length"}'] == 2
    assert samples['vllm:request_success_total{finished_reason="abort"}'] == 0
    assert samples["vllm:num_requests_running"] == 0


@pytest.mark.parametrize(("fault", "logged"), [("", False), ("host_register_failed", True)])
def test_pinning_may_fail(fault: str, logged: bool, launch: Any) -> None:
    log = launch("offload", STANDIN_FAULT=fault).log()
    assert ("the offload region stays pageable" in log) == logged


@pytest.mark.parametrize("fault", ["", "late_store_count"])
def test_the_store_may_be_counted_late(fault: str, prompt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine_standin.engine import Engine, Pace, Request
    from engine_standin.faults import planted_faults
    from engine_standin.launch import cache_config, read_launch
    from engine_standin.metrics import Metrics

    extra = '{"block_size":64,"cpu_bytes_to_use":268435456}'
    transfer = f'{{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":{extra}}}'
    sizes = ["--block-size", "32", "--num-gpu-blocks-override", "193"]
    launched = read_launch(["m", *sizes, "--kv-transfer-config", transfer])
    labels = {name: str(value) for name, value in cache_config(launched).items()}
    metrics = Metrics("m", 4096, True, labels)
    delayed: list[tuple[float, Any]] = []

    async def one_request() -> None:
        loop = asyncio.get_running_loop()
        engine = Engine(launched, planted_faults({"STANDIN_FAULT": fault}, True), Pace(slowdown=0.0), metrics)
        monkeypatch.setattr(loop, "call_later", lambda delay, call, *args: delayed.append((delay, lambda: call(*args))))
        scheduling = asyncio.create_task(engine.run())
        request = Request(prompt("T"), 1)
        engine.submit(request)
        await request.emitted.get()
        scheduling.cancel()

    asyncio.run(one_request())
    assert (f"{STORE}{{" in metrics.page()) == (not fault)
    assert [delay for delay, _ in delayed] == ([0.1] if fault else [])
    for _, publish in delayed:
        publish()
    assert f'{STORE}{{engine="0",model_name="m"}} 4.194304e+06' in metrics.page()


def test_a_block_size_that_the_cpu_cannot_do_ends_the_start(launch: Any) -> None:
    engine = launch("control", healthy=False, arguments=["--block-size", "16"])
    assert engine.process.wait(20) == 1
    assert "No common block size for 16" in engine.log()


def test_a_tier_without_a_size_ends_the_start(launch: Any) -> None:
    engine = launch("offload", healthy=False, extra={"cpu_bytes_to_use": 0})
    assert engine.process.wait(20) == 1
    assert "cpu_bytes_to_use must be specified in kv_connector_extra_config" in engine.log()


def test_every_fault_is_told_by_the_command() -> None:
    command = [sys.executable, str(Path(__file__).parents[2] / "standin" / "vllm"), "--faults"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    folder = Path(__file__).parents[2] / "host"
    tried = "".join(path.read_text(encoding="utf-8") for path in (Path(__file__), *folder.glob("test_*.py")))
    untried = [line.split()[0] for line in told.splitlines() if line.split()[0] not in tried]
    assert untried == []
