# ruff: noqa: E501  a case a line
"""Each hazard of the catalogue fires on a configuration, a page or a log of its own, and is quiet on a neighbour.

A case is a server as observe finds one: argv, environment, two pages of /metrics (real ones, with samples changed), log
lines, facts of host and model. `Case.neighbour` is the same server with one thing other.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from kvtrial.record.exposition import parse_page, read_page
from kvtrial.record.hazardfacts import host_facts, page_facts
from kvtrial.record.hazards import all_hazards, hazards_sighted
from kvtrial.record.launch import ArmLaunch
from kvtrial.record.predicates import Facts

FIXTURES = Path(__file__).parents[2] / "fixtures"
GIB = 2**30
OFFLOAD = ["--kv-offloading-size", "8"]
PLAIN = ["--max-num-seqs", "64"]
LOOPBACK = ["--host", "127.0.0.1"]


def connector(name="OffloadingConnector", top="", **extra):
    keys = ",".join(f'"{key}":{value}' for key, value in extra.items()) or '"cpu_bytes_to_use":8589934592'
    return ["--kv-transfer-config",
            f'{{"kv_connector":"{name}","kv_role":"kv_both",{top}"kv_connector_extra_config":{{{keys}}}}}']  # fmt: skip


@cache
def text(name):
    return (FIXTURES / "metrics" / name).read_text()


def page(samples, name="vllm-0.26.0-h200-8b-offload-after-return.prom"):
    """A real page with samples changed: `name|label` -> value; a sample that is not there follows its # TYPE line."""
    lines = text(name).splitlines()
    for key, value in samples.items():
        wanted, _, label = key.partition("|")
        if not wanted.startswith("http_"):
            wanted = f"vllm:{wanted}"
        at = [i for i, line in enumerate(lines) if re.match(rf"{wanted}[{{ ]", line) and label in line]
        if at:
            lines[at[0]] = f"{lines[at[0]].rsplit(' ', 1)[0]} {value}"
        else:
            family = next(i for i, line in enumerate(lines) if line.startswith(f"# TYPE {wanted} "))
            labels = (
                'engine="0",model_name="qwen3-0.6b"' if not label else f'handler="{label}",method="POST",status="2xx"'
            )
            lines.insert(family + 1, f"{wanted}{{{labels}}} {value}")
    return "\n".join(lines) + "\n"


class Case:
    """`version`, `argv` and so on are the server that fires; `state` how; `neighbour` what is other in the quiet one."""

    def __init__(self, hazard: str, state: str, version: str, neighbour: dict[str, Any], **server: Any) -> None:
        self.hazard, self.state = hazard, state
        self.server = {"version": version, **server}
        self.quiet = {**self.server, **neighbour}


def sighted(version, argv=OFFLOAD, env=None, before=None, after=None, seconds=60.0, lines=(), host=None, model=None,
            backend="cuda"):  # fmt: skip
    known = Facts(model or {}).also(host_facts(host or {}))
    if after is not None:
        readings = [read_page(parse_page(page(samples)), version).values for samples in (before or {}, after)]
        known = known.also(page_facts(readings[1], readings[0], seconds))
    launch = ArmLaunch(["Qwen/Qwen3-0.6B", *LOOPBACK, *argv] if "--host" not in argv else ["m", *argv], env or {})
    return {s.hazard.id: s for s in hazards_sighted(version, launch, [known], lines, backend)}


def stuck(running=0):
    return {"num_requests_running": running, "num_requests_waiting": 6}


DEADLOCK = {"before": {"num_requests_running": 0, "num_requests_waiting": 6}, "after": stuck()}
RUNNING = {"after": stuck(running=2)}
TRANSFER_ERROR = "(Worker pid=9) WARNING 11-26 14:03:04 [gpu_worker.py:250] "
CASES = [
    Case("preemption-cascade", "applies", "0.26.0", {"version": "0.30.0"}),
    Case("preemption-cascade", "seen", "0.26.0", {"after": {}}, after={"num_preemptions_total": 44}),
    Case("preemption-cascade", "guarded", "0.26.0", {"argv": OFFLOAD}, argv=[*OFFLOAD, "--no-async-scheduling"]),
    Case("preemption-cascade", "applies", "0.24.0", {"argv": PLAIN}, argv=connector("NixlConnector")),
    Case("abort-assert", "seen", "0.26.0", {"lines": (FIXTURES / "logs/deadlock-health-200.log").read_text().splitlines()},
         lines=(FIXTURES / "logs/assert-after-abort.log").read_text().splitlines()),
    Case("abort-assert", "applies", "0.26.0", {"version": "0.27.0"}),
    Case("in-flight-store-assert", "seen", "0.22.1", {"lines": ["    assert not req_status.finished"]},
         lines=["(EngineCore pid=8) ERROR 11-26 14:02:30 [core.py:1332]     assert not req_status.transfer_jobs, req"]),
    Case("in-flight-store-assert", "applies", "0.23.0", {"argv": PLAIN}),
    Case("deferred-behind-load", "seen", "0.26.0", {"after": {"kv_offload_load_bytes_total": 1.6e10}},
         after={"num_requests_waiting_by_reason|deferred": 11, "kv_offload_load_bytes_total": 1.6e10}),
    Case("deferred-behind-load", "seen", "0.32.0", {"lines": ["DEBUG Delaying request 7 until its grammar is there"]},
         lines=["DEBUG 11-26 [scheduler.py:1041] Delaying request cmpl-7 since some of its chunks are already being loaded"]),
    Case("deadlock-kv-pressure", "seen", "0.22.1", RUNNING, argv=PLAIN, **DEADLOCK),
    Case("deadlock-kv-pressure", "seen", "0.22.1", {"seconds": 2.0}, argv=PLAIN, **DEADLOCK),
    Case("deadlock-async-load", "seen", "0.26.0", {"after": {**stuck(), "generation_tokens_total": 185}}, **DEADLOCK),
    Case("deadlock-async-load", "seen", "0.26.0", {"argv": PLAIN}, **DEADLOCK),
    Case("deadlock-async-load-stuck", "seen", "0.32.0", RUNNING, **DEADLOCK),
    Case("deadlock-spec-decode", "applies", "0.30.0", {"version": "0.31.0"},
         argv=[*OFFLOAD, "--speculative-config", '{"method":"mtp"}']),
    Case("deadlock-spec-decode", "applies", "0.26.0", {"argv": ["--speculative-model", "m"]},
         argv=[*OFFLOAD, "--speculative-model", "m"]),
    Case("prefill-thrash", "seen", "0.18.1", {"version": "0.19.1"}, argv=PLAIN, after={"num_preemptions_total": 3}),
    Case("recompute-not-counted", "seen", "0.32.0", {"after": {}}, argv=PLAIN, after={"num_preemptions_total": 3}),
    Case("preemptions-not-in-log", "applies", "0.32.0", {"argv": ["--disable-log-stats"]}, argv=PLAIN),
    Case("preempted-lookups-hidden", "seen", "0.26.0",
         {"after": {"kv_offload_load_bytes_total": 1.6e10, "external_prefix_cache_hits_total": 112000}},
         after={"kv_offload_load_bytes_total": 1.6e10}),
    Case("decode-not-offloaded", "applies", "0.30.0", {"argv": connector(cpu_bytes_to_use=GIB, offload_prompt_only="false")}),
    Case("decode-not-offloaded", "applies", "0.23.0", {"version": "0.22.1"},
         argv=connector(cpu_bytes_to_use=GIB, offload_prompt_only="true")),
    *(Case("tier-not-pinned", "seen", version, {"lines": [TRANSFER_ERROR + "host_register took 3.1 s for rank=0"]},
           lines=[TRANSFER_ERROR + line]) for version, line in (
        ("0.28.0", "cudaHostRegister failed for rank=1 (code=2) — transfers will still work but may be slower"),
        ("0.33.0", "host_register failed for rank=1 at 3.00 of 8.00 GB; the offload region stays pageable"))),
    Case("region-too-large-to-pin", "applies", "0.30.0", {"argv": ["--kv-offloading-size", "511"]},
         argv=["--kv-offloading-size", "512"]),
    *(Case("region-too-large-to-pin", "seen", version,
           {"lines": [TRANSFER_ERROR + line.replace("644.25", "64.42").replace("1099.51", "109.95")]},
           argv=["--kv-offloading-size", size], lines=[TRANSFER_ERROR + line]) for version, size, line in (
        ("0.31.0", "600", "cudaHostRegister failed for rank=0 at 512.00 of 644.25 GB (code=2); the offload region stays"),
        ("0.33.0", "1024", "host_register failed for rank=3 at 0.00 of 1099.51 GB; the offload region stays pageable"))),
    Case("shm-bad-address", "seen", "0.27.1", {"lines": ["OSError: [Errno 28] No space left on device"]},
         lines=["    OSError: [Errno 14] Bad address: '/dev/shm/vllm_offload_5.mmap'"]),
    Case("shm-bad-address", "seen", "0.27.1", {"host": {"dev_shm_total_bytes": 9 * GIB}}, host={"dev_shm_total_bytes": 2**26}),
    Case("shm-insufficient", "seen", "0.28.0", {"lines": ["INFO Sufficient space in /dev/shm: 8192 MiB free"]},
         lines=["RuntimeError: Insufficient space in /dev/shm: 8192.0 MiB required, 64.0 MiB free. Increase it."]),
    Case("shm-insufficient", "seen", "0.33.0", {"version": "0.26.0"}, host={"dev_shm_total_bytes": 2**26}),
    Case("shm-left-over", "seen", "0.28.0", {"host": {"shm_files_left_over": 0}}, host={"shm_files_left_over": 2}),
    Case("shm-left-over", "applies", "0.27.1", {"version": "0.29.0"}),
    Case("host-memory-double", "seen", "0.26.0", {"host": {"ram_total_bytes": 16 * GIB}}, host={"ram_total_bytes": 15 * GIB}),
    Case("host-memory-double", "applies", "0.26.0", {"version": "0.27.0"}),
    Case("reset-keeps-tier", "applies", "0.32.0", {"argv": connector("NixlConnector")}),
    Case("reset-keeps-tier", "seen", "0.32.0",
         {"after": {"http_requests_total|/reset_prefix_cache": 3, "external_prefix_cache_hits_total": 0}},
         after={"http_requests_total|/reset_prefix_cache": 3, "external_prefix_cache_hits_total": 112000}),
    Case("reset-keeps-tier", "seen", "0.26.0",
         {"before": {"http_requests_total|/reset_prefix_cache": 3}},
         after={"http_requests_total|/reset_prefix_cache": 3, "external_prefix_cache_hits_total": 112000}),
    Case("reset-external-no-op", "applies", "0.21.0", {"version": "0.22.1"}),
    Case("reset-external-no-op", "seen", "0.20.2", {"lines": ["DEBUG Connector cache reset requested and done"]},
         lines=["DEBUG [base.py:9] Connector cache reset requested, but OffloadingConnector does not implement "
                "reset_cache()."]),
    Case("reset-refused-quietly", "applies", "0.26.0", {"version": "0.25.1"}),
    Case("warm-replay", "seen", "0.32.0", {"after": {"prefix_cache_queries_total": 996512, "prefix_cache_hits_total": 20000,
                                                     "request_success_total|length": 60}},
         argv=PLAIN, after={"prefix_cache_queries_total": 996512, "prefix_cache_hits_total": 115884,
                            "request_success_total|length": 60}),
    Case("no-flat-metrics", "applies", "0.23.0", {"version": "0.24.0"}),
    Case("no-offload-metrics", "applies", "0.15.1", {"version": "0.16.0"}),
    Case("usage-gauges-not-residency", "seen", "0.26.0",
         {"after": {"kv_offload_cpu_cache_usage_perc": 0.4, "kv_offload_load_bytes_total": 1.6e10}},
         after={"kv_offload_load_bytes_total": 1.6e10}),
    Case("aborted-requests-missing", "seen", "0.26.0",
         {"after": {"time_to_first_token_seconds_count": 60, "request_success_total|length": 60}},
         argv=PLAIN, after={"time_to_first_token_seconds_count": 60, "request_success_total|length": 59}),
    Case("aborted-requests-missing", "seen", "0.26.0",
         {"after": {"time_to_first_token_seconds_count": 60, "num_requests_running": 3}},
         argv=PLAIN, after={"time_to_first_token_seconds_count": 60}),
    Case("gauges-freeze", "seen", "0.32.0",
         {"after": {"num_requests_running": 4, "generation_tokens_total": 185}},
         argv=PLAIN, before={"num_requests_running": 4}, after={"num_requests_running": 4}),
    Case("external-queries-whole-prompt", "seen", "0.15.1", {"version": "0.16.0"},
         after={"external_prefix_cache_queries_total": 990528}),
    Case("prompt-logprobs-misses", "applies", "0.30.0", {"argv": PLAIN}),
    Case("negative-counter", "applies", "0.19.1", {"version": "0.20.2"}),
    Case("negative-counter", "seen", "0.18.1", {"lines": ["ValueError: Gauges can be incremented by any amount"]},
         lines=["ERROR [async_llm.py:707] AsyncLLM output_handler failed.",
                "ValueError: Counters can only be incremented by non-negative amounts."]),
    Case("limit-ignored-before-031", "applies", "0.30.0", {"version": "0.31.0"}),
    Case("log-stats-off", "applies", "0.32.0", {"argv": PLAIN}, argv=["--disable-log-stats"]),
    Case("pid-labels", "applies", "0.11.0", {"version": "0.11.2"}, argv=["--api-server-count=2"]),
    Case("api-servers", "applies", "0.32.0", {"argv": ["--api-server-count", "1"]}, argv=["--api-server-count", "4"]),
    Case("engine-dead", "seen", "0.32.0", {"lines": ["INFO EngineCore shut down as asked"]},
         lines=["(EngineCore pid=846) ERROR 11-26 14:05:31 [core.py:1332] EngineCore encountered a fatal error."]),
    Case("engine-dead", "seen", "0.32.0", {"lines": ["INFO [core_client.py:777] [shutdown] MPClient: complete"]},
         lines=["(APIServer pid=9) ERROR 11-30 02:59:19 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: "
                "EngineCore encountered an issue."]),
    Case("failed-transfer-kills", "applies", "0.33.0", {"argv": connector("LMCacheConnectorV1")}),
    Case("load-failure-fails-request", "seen", "0.30.0", {"after": {}}, after={"request_success_total|error": 2}),
    Case("load-failure-fails-request", "applies", "0.17.1",
         {"argv": connector(top='"kv_load_failure_policy":"recompute",')}, argv=connector()),
    Case("wrong-tokens", "applies", "0.13.0", {"version": "0.14.1"}, argv=connector()),
    Case("simple-offload-corrupt", "applies", "0.32.0", {"env": {}}, env={"VLLM_USE_SIMPLE_KV_OFFLOAD": "1"}),
    Case("simple-offload-by-environment", "applies", "0.32.0", {"env": {"VLLM_USE_SIMPLE_KV_OFFLOAD": "0"}},
         env={"VLLM_USE_SIMPLE_KV_OFFLOAD": "1"}),
    Case("nested-stale-kv", "applies", "0.32.0", {"argv": connector()}, argv=connector("MultiConnector")),
    Case("chunk-larger-than-block", "applies", "0.11.0", {"argv": connector(num_cpu_blocks=99)},
         argv=connector(num_cpu_blocks=99, block_size=64)),
    Case("cannot-store-index-error", "applies", "0.11.0", {"version": "0.11.2"}, argv=connector(num_cpu_blocks=99)),
    Case("cannot-store-index-error", "seen", "0.11.0",
         {"lines": ["(EngineCore_DP0 pid=9) INFO 10-28 07:03:32 [offloading_connector.py:290] Stored 21 blocks"]},
         argv=connector(num_cpu_blocks=99),
         lines=["(EngineCore_DP0 pid=9) WARNING 10-28 07:03:32 [offloading_connector.py:281] Cannot store 21 blocks",
                "(EngineCore_DP0 pid=9) ERROR 10-28 07:03:32 [core.py:710] IndexError: list index out of range"]),
    Case("tier-divided-by-groups", "seen", "0.29.0", {"model": {"kv_cache_groups": 1}},
         model={"kv_cache_groups": 9}, after={"kv_offload_store_bytes_total": 1.3e11}),
    Case("tier-divided-by-groups", "applies", "0.29.0", {"argv": PLAIN}, model={"kv_cache_groups": 9}),
    Case("groups-not-aligned", "seen", "0.30.0", {"lines": ["block_size=24 not divisible by 16, rounded"]},
         lines=["AssertionError: tokens_per_block=4 not divisible by tokens_per_hash=64. Hybrid models (e.g. Mamba"]),
    Case("groups-not-aligned", "seen", "0.22.1", {"model": {"kv_cache_groups": 1}},
         lines=["AssertionError: gpu_block_size=528 not divisible by hash_block_size=16. Hybrid"]),
    Case("groups-assert-on-hit", "seen", "0.26.0", {"model": {"kv_cache_groups": 1}},
         lines=["ERROR [core.py:1332]     assert num_new_tokens + num_locally_computed_tokens <= n"]),
    Case("shortcut-unusable", "applies", "0.13.0", {"argv": OFFLOAD},
         argv=[*OFFLOAD, "--kv-offloading-backend", "native"]),
    Case("shortcut-unusable", "seen", "0.11.2", {"version": "0.14.1"},
         argv=[*OFFLOAD, "--kv-offloading-backend", "native"],
         lines=["Exception: num_cpu_blocks must be specified in kv_connector_extra_config"]),
    Case("shortcut-overwrites", "applies", "0.26.0", {"argv": OFFLOAD}, argv=[*OFFLOAD, *connector(cpu_bytes_to_use=1)]),
    Case("blocks-key-is-gone", "applies", "0.26.0", {"argv": connector(num_cpu_blocks=9, cpu_bytes_to_use=GIB)},
         argv=connector(num_cpu_blocks=9)),
    Case("blocks-key-is-gone", "seen", "0.30.0", {"version": "0.13.0"}, argv=connector(num_cpu_blocks=9),
         lines=["(EngineCore pid=8) ERROR 11-26 14:02:30 [core.py:1332] Exception: cpu_bytes_to_use must be specified in "
                "kv_connector_extra_config"]),
    Case("expandable-segments", "seen", "0.33.0", {"env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}},
         env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
         lines=["pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig",
                "  Value error, KV connector OffloadingConnector is incompatible with "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True unless enable_cumem_allocator is also enabled."]),
    Case("expandable-segments", "applies", "0.26.0", {"argv": PLAIN},
         env={"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}),
    Case("expandable-segments", "applies", "0.26.0", {"argv": [*OFFLOAD, "--enable-cumem-allocator"]},
         env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    Case("layout-differs", "applies", "0.26.0", {"env": {"VLLM_KV_CACHE_LAYOUT": "HND"}}),
    Case("layout-differs", "applies", "0.30.0", {"backend": "cpu"}),
    Case("tier-mirrors-gpu", "applies", "0.32.0", {"argv": [*OFFLOAD, "--kv-cache-memory-bytes", "4G"]},
         argv=[*OFFLOAD, "--kv-cache-memory-bytes", "9G"]),
    Case("tier-mirrors-gpu", "applies", "0.32.0",
         {"argv": [*OFFLOAD, "--kv-cache-memory-bytes", "9G", "--num-gpu-blocks-override", "97"]},
         argv=[*OFFLOAD, "--kv-cache-memory-bytes", "9G"]),
    Case("tier-mirrors-gpu", "seen", "0.26.0",
         {"after": {"kv_offload_store_bytes_total": 1.3e11, "kv_offload_load_bytes_total": 1.6e10}},
         argv=[*OFFLOAD, "--kv-cache-memory-bytes", "9G"], after={"kv_offload_store_bytes_total": 1.3e11}),
    Case("tier-full", "seen", "0.26.0", {"after": {}}, after={"kv_offload_allocation_failure_total": 4}),
    Case("tier-full", "seen", "0.22.0", {"lines": ["INFO Request cmpl-1: can store 4 blocks"]},
         lines=["(EngineCore pid=7) WARNING 11-26 [scheduler.py:800] Request cmpl-1-9: cannot store blocks"]),
    Case("per-request-limit-ignored", "seen", "0.32.0", {"lines": ["max_tokens must be a positive int, got 0"]},
         lines=["WARNING [scheduler.py:401] max_offload_tokens must be a non-negative int, got 1.5; ignoring"]),
    Case("dev-mode-exposed", "applies", "0.32.0", {"argv": ["--host", "::1"]}, argv=["--host", "10.1.2.3"],
         env={"VLLM_SERVER_DEV_MODE": "1"}),
    Case("key-guards-some-routes", "applies", "0.32.0", {"argv": ["--host", "127.0.0.1", "--api-key", "x"]},
         argv=["--host", "0.0.0.0", "--api-key", "x"]),
    Case("pause-without-dev-mode", "applies", "0.22.1", {"version": "0.23.0"}, argv=["--host", "10.1.2.3"]),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.hazard}-{case.state}")
def test_a_hazard_fires_on_its_own_and_is_quiet_on_a_neighbour(case):
    found = sighted(**case.server)
    assert case.hazard in found, sorted(found)
    assert found[case.hazard].state == case.state
    neighbour = sighted(**case.quiet)
    assert case.hazard not in neighbour or neighbour[case.hazard].state != case.state


@pytest.mark.parametrize("hazard", all_hazards(), ids=lambda hazard: hazard.id)
def test_each_entry_has_a_server_on_which_it_fires_by_every_way_that_it_is_watched(hazard):
    """No entry without a case, no expression without a line and no numbers without a page or host that set them off."""
    cases = [case for case in CASES if case.hazard == hazard.id]
    assert cases, "give it a server on which it fires, and a neighbour on which it is quiet"
    seen = [case for case in cases if case.state == "seen"]
    lines = [line for case in seen for line in case.server.get("lines", ())]
    for pattern in hazard.watch.log:
        fitting = [line for line in lines if re.search(pattern, line)]
        assert fitting and pattern not in fitting, pattern
    by_numbers = [case for case in seen if case.server.get("after") is not None or case.server.get("host")]
    assert by_numbers or not hazard.watch.facts


def test_no_case_is_of_an_entry_that_is_gone():
    assert {case.hazard for case in CASES} == {hazard.id for hazard in all_hazards()}


def test_no_line_of_a_healthy_start_or_run_is_taken_for_a_hazard():
    for name, version in (("vllm-0.26.0-h200-0.6b-control-start.log", "0.26.0"),
                          ("vllm-0.26.0-h200-8b-offload.log", "0.26.0"),
                          ("vllm-0.32.0-cpu-offload-start.log", "0.32.0")):  # fmt: skip
        lines = (FIXTURES / "logs" / name).read_text().splitlines()
        assert [s.hazard.id for s in hazards_sighted(version, None, [], lines) if s.state == "seen"] == [], name


def test_without_a_configuration_a_hazard_is_possible_and_its_evidence_is_still_evidence():
    found = {s.hazard.id: s for s in hazards_sighted("0.26.0", None, [])}
    assert found["preemption-cascade"].state == "possible"
    line = "(Worker pid=9) WARNING host_register failed for rank=1"
    seen = {s.hazard.id: s for s in hazards_sighted("0.26.0", None, [], [line])}["tier-not-pinned"]
    assert (seen.state, seen.evidence) == ("seen", f"log line 1: {line}")


def test_with_an_unknown_version_only_what_is_seen_is_told():
    assert hazards_sighted(None, ArmLaunch(["m", *OFFLOAD], {}), []) == []
    (seen,) = hazards_sighted(None, None, [], ["EngineDeadError: EngineCore encountered an issue."])
    assert seen.hazard.id == "engine-dead"


def test_of_several_engines_one_that_stands_still_is_enough():
    busy = page_facts({"requests_running": 3, "requests_waiting": 0, "generation_tokens": 9},
                      {"requests_running": 3, "requests_waiting": 0, "generation_tokens": 1}, 60.0)  # fmt: skip
    still = page_facts({"requests_running": 0, "requests_waiting": 6, "generation_tokens": 9},
                       {"requests_running": 0, "requests_waiting": 6, "generation_tokens": 9}, 60.0)  # fmt: skip
    found = {s.hazard.id: s for s in hazards_sighted("0.22.1", None, [busy, still])}["deadlock-kv-pressure"]
    assert found.state == "seen"
    assert "now.requests_waiting 6" in found.evidence and "window_seconds 60" in found.evidence
