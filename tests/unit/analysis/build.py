"""Synthetic records for the analysis tests, with the numbers of a real campaign on the CPU engine.

8 targets of 1,040 tokens, chunks of 64, 4,096 bytes of KV cache a token, 193 blocks of 32, a tier of 256 MiB. They are
made, not measured, so their evidence is `standin` unless a test asks otherwise. `honest_records` passes every gate; the
other functions plant one fault each.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import yaml
from kvtrial.record.exposition import metric_table
from kvtrial.record.load import HonestyCard
from kvtrial.record.plan import Capacity, Launch, Model
from kvtrial.record.protocol import Phase, Protocol
from kvtrial.record.record import (
    Conditions,
    Evidence,
    Fault,
    PhaseRecord,
    RequestFact,
    Resolved,
    RunRecord,
    Samples,
    Socket,
    Times,
)
from msgspec.structs import replace

PROTOCOLS = Path(__file__).parents[3] / "playbooks" / "protocols"
PROMPT_TOKENS = 1040
LOADED_TOKENS = 1024
BYTES_PER_TOKEN = 4096
BLOCK_TOKENS = 32
TIER_BYTES = 268_435_456
CHUNK_TOKENS = 64
VERSION = "0.32.0"

# Median TTFT of a run, seconds, six pairs: as measured for `return`, in the measured range for the rest.
RETURN_CONTROL = (0.2329, 0.2325, 0.2231, 0.2443, 0.2413, 0.1936)
RETURN_OFFLOAD = (0.0322, 0.0332, 0.0327, 0.0378, 0.0381, 0.0376)
MISS_CONTROL = (0.228, 0.241, 0.214, 0.236, 0.249, 0.190)
MISS_OFFLOAD = (0.229, 0.195, 0.224, 0.241, 0.230, 0.197)
HIT = (0.026, 0.027, 0.026, 0.028, 0.027, 0.025)


@cache
def protocol() -> Protocol:
    """The shipped offload_return protocol."""
    return msgspec.convert(yaml.safe_load((PROTOCOLS / "offload_return.yml").read_text()), Protocol)


def honest_records(
    pairs: int = 6,
    evidence: Evidence = "standin",
    host: str = "h1",
    spare_pairs: int = 0,
    scale_offload: float = 1.0,
) -> list[RunRecord]:
    """Two runs a pair, in ABBA order, all gates satisfied. `scale_offload` multiplies the offload arm's return TTFT."""
    records = []
    for pair in range(1, pairs + spare_pairs + 1):
        order = ("control", "offload") if pair % 2 else ("offload", "control")
        for position, arm in enumerate(order):
            records.append(_record(pair, position, arm, evidence, host, pair > pairs, scale_offload))
    return records


def change(records: Iterable[RunRecord], how: Callable[[RunRecord], RunRecord], **where: Any) -> list[RunRecord]:
    """Records with `how` applied to those whose fields equal `where`, e.g. arm="offload", pair=3."""
    return [how(r) if all(getattr(r, name) == value for name, value in where.items()) else r for r in records]


def with_phase(record: RunRecord, name: str, **fields: Any) -> RunRecord:
    """The record with fields of one phase replaced."""
    return replace(record, phases=[replace(p, **fields) if p.name == name else p for p in record.phases])


def without_phase(record: RunRecord, name: str) -> RunRecord:
    """The record without one phase."""
    return replace(record, phases=[phase for phase in record.phases if phase.name != name])


def add(record: RunRecord, phase_name: str, **amounts: float) -> RunRecord:
    """Roles raised during one phase and kept so afterwards, as a counter would be."""
    phases, later = [], False
    for phase in record.phases:
        before = _raised(phase.before, amounts) if later else phase.before
        later = later or phase.name == phase_name
        phases.append(replace(phase, before=before, after=_raised(phase.after, amounts) if later else phase.after))
    return replace(record, phases=phases)


def with_requests(record: RunRecord, phase_name: str, how: Callable[[RequestFact], RequestFact]) -> RunRecord:
    """The record with every request of one phase changed."""
    phase = next(phase for phase in record.phases if phase.name == phase_name)
    return with_phase(record, phase_name, requests=[how(request) for request in phase.requests])


def with_ttft(record: RunRecord, phase_name: str, seconds: float) -> RunRecord:
    """The record with another median TTFT in one phase."""
    return with_phase(record, phase_name, ttft_median_seconds=seconds)


def faulted(record: RunRecord, origin: str, fault: str, phase: str | None = "return") -> RunRecord:
    """The record of a run that ended in a fault."""
    outcome = "engine_fault" if origin == "engine" else "environment_fault"
    what = Fault(origin=origin, fault=fault, phase=phase, detail=f"planted {fault}")  # type: ignore[arg-type]
    return replace(record, outcome=outcome, fault=what, phases=record.phases[:3])  # type: ignore[arg-type]


def _raised(values: dict[str, float | None], amounts: dict[str, float]) -> dict[str, float | None]:
    return values | {role: (values.get(role) or 0.0) + amount for role, amount in amounts.items()}


def _sha(*parts: object) -> str:
    return hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest()


def _record(
    pair: int, position: int, arm: str, evidence: Evidence, host: str, spare: bool, scale_offload: float
) -> RunRecord:
    started = 1000.0 + 120.0 * pair + 50.0 * position
    phases = _phases(pair, arm, host, started + 16, scale_offload)
    return RunRecord(
        schema_version="1.0",
        kvtrial_version="0.1.0",
        campaign="c1",
        plan_sha256=_sha("plan"),
        protocol="offload_return",
        host=host,
        run=f"p{pair}-{arm}",
        pair=pair,
        position=position,
        arm=arm,
        spare=spare,
        attempt=1,
        evidence=evidence,
        outcome="completed",
        fault=None,
        launch=_launch(arm),
        model=Model("kvtrial-model", "/models/a", "rev-1", "random", BYTES_PER_TOKEN),
        vllm_version_pinned=VERSION,
        capacity=Capacity(BLOCK_TOKENS, 192, BYTES_PER_TOKEN, {"offload": TIER_BYTES}, {"offload": CHUNK_TOKENS}),
        ram_reserve_bytes=2 * 2**30,
        resolved=_resolved(arm, pair),
        conditions=Conditions(
            cpu_model="Example CPU", cpus=2, ram_total_bytes=16 * 2**30, kernel="6.1.0", os="Example OS",
            python="3.11.7",
            boot_id="boot-1", governor="performance", transparent_hugepages="madvise", clock_source="tsc",
            load_average_1m=0.4, gpus=[], driver_version=None,
        ),
        times=Times(started, started + 35, "2026-11-29T12:00:00Z", 16.0, 16.0, 0.8, 0.5, 2.5),
        samples=Samples(
            count=70, interval_seconds=0.5, ram_available_start_bytes=12 * 2**30, ram_available_min_bytes=10 * 2**30,
            ram_used_peak_bytes=4 * 2**30 + 1_000_000 * pair + (285 * 2**20 if arm == "offload" else 0),
            engine_rss_peak_bytes=2**30, shared_memory_peak_bytes=2**20, vram_used_peak_bytes=None,
            vram_foreign_processes=None, foreign_cpu_share=0.02, steal_share=0.001, cpu_mhz_median=2700.0 + pair,
            throttle_events=None,
        ),
        phases=phases,
        watch_hits=[],
        files={},
    )  # fmt: skip


def _launch(arm: str) -> Launch:
    argv = [
        "/opt/venv/bin/vllm", "serve", "/models/a", "--served-model-name", "kvtrial-model", "--host", "127.0.0.1",
        "--port", "8000", "--block-size", "32", "--num-gpu-blocks-override", "193",
    ]  # fmt: skip
    if arm == "offload":
        argv += ["--kv-transfer-config", json.dumps(_connector())]
    return Launch(
        arm,
        argv,
        {"VLLM_SERVER_DEV_MODE": "1"},
        8000,
        "kvtrial-model",
        "OffloadingConnector" if arm == "offload" else None,
    )


def _connector() -> dict[str, Any]:
    extra = {"cpu_bytes_to_use": TIER_BYTES, "block_size": CHUNK_TOKENS, "offload_prompt_only": True}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _resolved(arm: str, pair: int) -> Resolved:
    config: dict[str, Any] = {
        "vllm_config.instance_id": f"{arm}{pair}",
        "vllm_config.cache_config.block_size": 32,
        "vllm_config.scheduler_config.max_num_seqs": 16,
        "vllm_config.kv_transfer_config": None,
    }
    if arm == "offload":
        del config["vllm_config.kv_transfer_config"]
        config |= {
            "vllm_config.kv_transfer_config.kv_connector": "OffloadingConnector",
            "vllm_config.kv_transfer_config.kv_connector_extra_config.cpu_bytes_to_use": TIER_BYTES,
            "vllm_config.kv_transfer_config.engine_id": f"engine-{pair}",
        }
    return Resolved(
        vllm_version=f"{VERSION}+cpu",
        served_models=["kvtrial-model"],
        config=config,
        cache_config={"num_gpu_blocks": "193", "block_size": "32"},
        log_facts={"kv_cache_layout": "LBHNC"},
        listening=[Socket("127.0.0.1", 8000, 4242)],
        packages_sha256=_sha("packages"),
        model_revision="rev-1",
        api_process_started=None,
    )


def _phases(pair: int, arm: str, host: str, started: float, scale_offload: float) -> list[PhaseRecord]:
    """The phases of a run, with counters that run through."""
    sizes, declared = protocol().sizes, protocol()
    counters = _fresh_counters(pair, arm, host)
    stored: set[str] = set()
    records = []
    clock = started
    for phase in _ordered(declared.phases, pair):
        prompt_set = declared.prompt_sets[phase.prompts]
        count = _int(prompt_set.count, sizes)
        take = _int(phase.take, sizes)
        indices = list(range(count))
        indices = (indices[:take] if take > 0 else indices[take:] if take < 0 else indices) * phase.repeat
        max_tokens = _int(phase.max_tokens, sizes)
        shas = [_sha("prompt", host, pair, phase.prompts, index) for index in indices]
        sources = _source_of(phase.name, arm)
        before = dict(counters)
        _count(counters, phase.name, arm, shas, sources, max_tokens, stored)
        records.append(
            _phase(phase, pair, arm, clock, indices, shas, max_tokens, before, dict(counters), scale_offload)
        )
        clock += 1.5
    return records


def _ordered(phases: list[Phase], pair: int) -> list[Phase]:
    """The blocks `return` and `noload` change places in every other pair."""
    order = (
        ["warmup", "return", "noload", "fits", "miss"] if pair % 2 else ["warmup", "noload", "return", "fits", "miss"]
    )
    return sorted(phases, key=lambda phase: order.index(phase.block))


def _fresh_counters(pair: int, arm: str, host: str) -> dict[str, float | None]:
    values: dict[str, float | None] = {}
    for role in metric_table().values:
        offload = role.startswith(("load_", "store_", "offload_"))
        values[role] = None if offload and arm == "control" else 0.0
    values["process_start_time_seconds"] = (
        1_795_950_000.0 + 1000 * pair + (500 if arm == "offload" else 0) + hash_of(host)
    )
    return values


def hash_of(host: str) -> int:
    """A small number of a host's own."""
    return int(_sha(host)[:4], 16) * 100_000


def _source_of(phase: str, arm: str) -> str:
    if phase in ("gpu_hit", "fits_return"):
        return "local"
    return "external" if arm == "offload" and phase in ("return", "warmup_return") else "computed"


def _count(
    counters: dict[str, float | None],
    phase: str,
    arm: str,
    shas: list[str],
    source: str,
    max_tokens: int,
    stored: set[str],
) -> None:
    def rise(role: str, amount: float) -> None:
        counters[role] = (counters[role] or 0.0) + amount

    requests = len(shas)
    hits = 0 if source == "computed" else LOADED_TOKENS * requests
    rise("prompt_tokens", PROMPT_TOKENS * requests)
    rise("prompt_tokens_computed", PROMPT_TOKENS * requests - hits)
    rise("requests_finished_length", requests)
    rise("generation_tokens", max_tokens * requests)
    if source == "local":
        rise("prompt_tokens_local_hit", hits)
        rise("prefix_cache_hits_tokens", hits)
    if source == "external":
        rise("prompt_tokens_external", hits)
        rise("external_prefix_cache_hits_tokens", hits)
        rise("load_bytes", hits * BYTES_PER_TOKEN)
    if arm == "offload":
        rise("external_prefix_cache_queries_tokens", PROMPT_TOKENS * requests - (hits if source == "local" else 0))
        new = set(shas) - stored
        rise("store_bytes", len(new) * LOADED_TOKENS * BYTES_PER_TOKEN)
        stored |= new


def _ttft(phase: str, pair: int, arm: str, scale_offload: float) -> float:
    index = (pair - 1) % 6
    if phase in ("gpu_hit", "fits_return"):
        return HIT[index] * (1.02 if arm == "offload" else 1.0)
    if phase in ("return", "warmup_return"):
        return RETURN_OFFLOAD[index] * scale_offload if arm == "offload" else RETURN_CONTROL[index]
    return MISS_OFFLOAD[index] if arm == "offload" else MISS_CONTROL[index]


def _phase(
    phase: Phase,
    pair: int,
    arm: str,
    clock: float,
    indices: list[int],
    shas: list[str],
    max_tokens: int,
    before: dict[str, float | None],
    after: dict[str, float | None],
    scale_offload: float,
) -> PhaseRecord:
    ttft = _ttft(phase.name, pair, arm, scale_offload)
    gap = 0.0155 * (1 + 0.01 * ((pair * 7 + (3 if arm == "offload" else 0)) % 5 - 2))
    seconds = len(shas) * (ttft + (max_tokens - 1) * gap)
    return PhaseRecord(
        name=phase.name,
        block=phase.block,
        started_monotonic_seconds=clock,
        seconds=seconds,
        scrape_seconds=0.05,
        concurrency=1,
        prompts_sha256=_sha(*shas),
        sent=len(shas),
        finished=len(shas),
        failed=0,
        errors={},
        output_tokens=max_tokens * len(shas),
        ttft_median_seconds=ttft,
        ttft_p95_seconds=ttft * 1.05,
        inter_token_median_seconds=gap if max_tokens > 1 else None,
        inter_token_p95_seconds=gap * 1.1 if max_tokens > 1 else None,
        e2e_median_seconds=ttft + (max_tokens - 1) * gap,
        output_throughput_tokens_per_second=max_tokens * len(shas) / seconds,
        before=before,
        after=after,
        metrics_caveats=[],
        card=_card(seconds),
        requests=[
            RequestFact(
                key=f"{phase.prompts}/{index}", prompt_sha256=sha, prompt_tokens=PROMPT_TOKENS, max_tokens=max_tokens,
                ttft_seconds=ttft, e2e_seconds=ttft, longest_gap_seconds=gap, output_tokens=max_tokens,
                cached_tokens=None,
                answer_sha256=_sha("answer", sha, max_tokens), finish_reason="length", error_class=None,
                dispatch_lag_seconds=0.0001,
            )
            for index, sha in zip(indices, shas, strict=True)
        ],
    )  # fmt: skip


def _card(seconds: float) -> HonestyCard:
    return HonestyCard(
        dispatch_lag_p50_seconds=0.0001, dispatch_lag_p95_seconds=0.0003, dispatch_lag_max_seconds=0.0005,
        loop_lag_p50_seconds=0.0001, loop_lag_max_seconds=0.001, client_cpu_seconds=0.05 * seconds,
        wall_seconds=seconds,
        client_cpu_share=0.05, connections_opened=1, connections_max_open=1, gc_collections=0, gc_pause_max_seconds=0.0,
        clock="CLOCK_MONOTONIC", cpu_affinity=[0, 1], steal_share=0.001,
    )  # fmt: skip


def _int(size: int | str, sizes: dict[str, int]) -> int:
    return sizes[size[1:]] if isinstance(size, str) else size
