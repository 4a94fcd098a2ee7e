"""Synthetic verdicts and records. The figures are made up after a real campaign; nothing here was measured."""

import inspect
from pathlib import Path
from typing import Any

import msgspec
import yaml
from kvtrial.record.load import HonestyCard
from kvtrial.record.plan import Capacity, Launch, Model
from kvtrial.record.protocol import Protocol
from kvtrial.record.record import (
    Conditions,
    Fault,
    PhaseRecord,
    RequestFact,
    Resolved,
    RunRecord,
    Samples,
    Socket,
    Times,
)
from kvtrial.record.verdict import (
    BreakEven,
    ComparisonResult,
    GateResult,
    HostVerdict,
    Recommendation,
    RunCounts,
    TimeBudget,
    Verdict,
)

PROTOCOLS = Path(__file__).resolve().parents[3] / "playbooks" / "protocols"
CONTROL = [0.2329, 0.2325, 0.2231, 0.2443, 0.2413, 0.1936]
OFFLOAD = [0.0322, 0.0332, 0.0327, 0.0378, 0.0381, 0.0376]
GATES = {
    "launch_differs_as_declared": "the arms differ in kv-transfer-config only",
    "treatment_delivered": "offload loaded 33,554,432 bytes in return = 8,192 tokens x 4,096 in each of 6 runs",
    "control_untreated": "control has no connector and no load series in any of 6 runs",
    "prefix_evicted": "0 local hits in return and noload_return in all 12 runs",
    "working_set": "pressure 8,320 tokens is 1.35 of the engine's KV cache, the set 16,640 is 0.25 of the tier",
    "prompts_and_outputs_equal": "prompt hashes and output lengths are equal in 6 of 6 pairs",
    "answers_equal": "48 of 48 answers in return equal those in gpu_hit token for token",
    "client_honest": "dispatch lag p95 at most 0.3 ms, allowed 0.8 ms",
    "memory_left": "at least 3.1 GiB were left, 2 GiB must be",
    "loopback_only": "every listening socket is on 127.0.0.1",
    "hazards": "no known defect of vLLM 0.32.0 went off",
}


def protocol() -> Protocol:
    return msgspec.convert(yaml.safe_load((PROTOCOLS / "offload_return.yml").read_text()), Protocol)


def comparison(**changes: Any) -> ComparisonResult:
    base = ComparisonResult(
        arm="offload",
        against="control",
        phase="return",
        metric="ttft_median_seconds",
        unit="seconds",
        role="primary",
        effect_scale="ratio",
        effect=0.151,
        ci_low=0.138,
        ci_high=0.194,
        confidence=0.96875,
        p_value=0.03125,
        pairs=6,
        mde=1.3,
        margin=0.05,
        verdict="BETTER",
        note="",
        delta_ttft_seconds=-0.2004,
        moved=None,
        quality="equal",
        heterogeneity=None,
        pair_effects=[arm / against for arm, against in zip(OFFLOAD, CONTROL, strict=True)],
        arm_values=OFFLOAD,
        against_values=CONTROL,
    )
    return msgspec.structs.replace(base, **changes)


def side(phase: str, metric: str, effect: float, low: float, high: float, **changes: Any) -> ComparisonResult:
    """A comparison beside the primary, without values per pair."""
    base: dict[str, Any] = {
        "role": "guard",
        "verdict": "INCONCLUSIVE",
        "delta_ttft_seconds": None,
        "arm_values": [],
        "against_values": [],
        "pair_effects": [],
    }
    base |= {"phase": phase, "metric": metric, "effect": effect, "ci_low": low, "ci_high": high}
    return comparison(**(base | changes))


def comparisons(**primary: Any) -> list[ComparisonResult]:
    return [
        comparison(**primary),
        side("miss", "ttft_median_seconds", 0.91, 0.78, 1.06, p_value=0.31, delta_ttft_seconds=-0.018),
        side("return", "inter_token_p95_seconds", 1.02, 0.97, 1.09, p_value=0.44),
        side(
            "return",
            "output_throughput_tokens_per_second",
            2.6,
            2.3,
            2.9,
            verdict="BETTER",
            unit="tokens per second",
        ),
        side(
            "run",
            "ram_used_peak_bytes",
            285 * 2**20,
            260 * 2**20,
            301 * 2**20,
            effect_scale="difference",
            unit="bytes",
            margin=384 * 2**20,
            mde=40 * 2**20,
            verdict="EQUIVALENT",
        ),
        side("populate", "ttft_median_seconds", 0.93, 0.77, 1.08, role="secondary"),
        side("fits_return", "ttft_median_seconds", 1.06, 0.92, 1.13, role="secondary"),
        side(
            "return",
            "ttft_median_seconds",
            0.174,
            0.155,
            0.201,
            role="secondary",
            verdict="BETTER",
            against="offload",
            against_phase="noload_return",
            note="Within one server: free of differences between servers.",
        ),
    ]


def gates(**changed: tuple[bool | None, str]) -> list[GateResult]:
    results = [GateResult(gate=name, passed=True, detail=detail) for name, detail in GATES.items()]
    return [
        GateResult(gate=item.gate, passed=changed[item.gate][0], detail=changed[item.gate][1])
        if item.gate in changed
        else item
        for item in results
    ]


def host_verdict(host: str = "localhost", **changes: Any) -> HostVerdict:
    base = HostVerdict(
        host=host,
        verdict="BETTER",
        reason="the whole interval is beyond the margin of 5 %",
        gates=gates(),
        runs=RunCounts(planned=12, valid=12, dropped=0, engine_faults=0),
        comparisons=comparisons(),
    )
    return msgspec.structs.replace(base, **changes)


def verdict(**changes: Any) -> Verdict:
    base = Verdict(
        schema_version="1.0",
        campaign="20261129T101500Z-offload_return-7f3a",
        protocol="offload_return",
        evidence="cpu",
        verdict="BETTER",
        reason="the whole interval is beyond the margin of 5 %",
        comparisons=comparisons(),
        hosts=[host_verdict()],
        gates=[],
        recommendation=Recommendation(
            action="Run the same protocol on a GPU host",
            reason="on a CPU only the mechanism can be shown",
            pins={"vllm": "0.32.0", "cpu_bytes_to_use": "268435456"},
        ),
        break_even=BreakEven(
            hit_share=0.083,
            ci_low=0.02,
            ci_high=0.19,
            confidence=0.96875,
            cost_seconds=0.018,
            gain_seconds=0.2,
            own_hit_share=0.3,
            note="",
        ),
        time_budget=TimeBudget(
            install_seconds=None,
            engine_start_seconds=196.0,
            engine_stop_seconds=6.2,
            phases_seconds=205.0,
            other_seconds=29.0,
            total_seconds=436.2,
            other_share=0.066,
        ),
    )
    return msgspec.structs.replace(base, **changes)


def inconclusive() -> Verdict:
    reason = "the interval 0.86 to 1.21 holds both better and worse; about 40 pairs would be needed"
    primary = {"effect": 1.03, "ci_low": 0.86, "ci_high": 1.21, "p_value": 0.69, "verdict": "INCONCLUSIVE"}
    items = comparisons(**primary, delta_ttft_seconds=0.006, arm_values=[0.2, 0.24, 0.22, 0.25, 0.23, 0.21])
    return verdict(
        verdict="INCONCLUSIVE",
        reason=reason,
        comparisons=items,
        hosts=[host_verdict(verdict="INCONCLUSIVE", reason=reason, comparisons=items)],
    )


def invalid() -> Verdict:
    detail = "offload loaded 0 bytes in return in 6 of 6 runs; 33,554,432 were due"
    reason = f"gate treatment_delivered failed: {detail}"
    checked = gates(treatment_delivered=(False, detail), hazards=(None, "the log was not kept"))
    host = host_verdict(verdict="INVALID", reason=reason, gates=checked)
    return verdict(verdict="INVALID", reason=reason, hosts=[host], break_even=None)


def engine_fault() -> Verdict:
    reason = "the engine of arm offload died in 1 of 6 runs (localhost, pair 3): a setting that crashes is not better"
    runs = RunCounts(planned=12, valid=11, dropped=0, engine_faults=1)
    return verdict(
        verdict="WORSE", reason=reason, hosts=[host_verdict(verdict="WORSE", reason=reason, runs=runs)], break_even=None
    )


def card(**changes: Any) -> HonestyCard:
    fields: dict[str, Any] = {
        "dispatch_lag_p50_seconds": 0.00011,
        "dispatch_lag_p95_seconds": 0.0003,
        "dispatch_lag_max_seconds": 0.0009,
        "loop_lag_p50_seconds": 0.0002,
        "loop_lag_max_seconds": 0.0021,
        "client_cpu_seconds": 0.05,
        "wall_seconds": 2.0,
        "client_cpu_share": 0.025,
        "connections_opened": 1,
        "connections_max_open": 1,
        "gc_collections": 2,
        "gc_pause_max_seconds": 0.0012,
        "clock": "CLOCK_MONOTONIC",
        "cpu_affinity": [0, 1],
        "steal_share": 0.004,
    }
    return HonestyCard(**(fields | changes))


def phase(
    name: str, ttft: float | None, *, tokens: tuple[float | None, ...] = (8320, 0, 0), **changes: Any
) -> PhaseRecord:
    """`tokens`: computed, local hit, external, as the counters grew."""
    roles = ("prompt_tokens_computed", "prompt_tokens_local_hit", "prompt_tokens_external")
    after = dict(zip(roles, tokens, strict=True))
    external = tokens[2]
    requests = [
        RequestFact(
            key=f"{name}.{index}",
            prompt_sha256="ab" * 32,
            prompt_tokens=1040,
            max_tokens=6,
            ttft_seconds=None if ttft is None else ttft * (0.94 + 0.02 * index),
            e2e_seconds=None if ttft is None else ttft + 0.08,
            longest_gap_seconds=0.016,
            output_tokens=6,
            cached_tokens=0,
            answer_sha256="cd" * 32,
            finish_reason="length",
            error_class=None,
        )
        for index in range(8)
    ]
    base = PhaseRecord(
        name=name,
        block=name.removeprefix("noload_"),
        started_monotonic_seconds=100.0,
        seconds=2.4,
        scrape_seconds=0.1,
        concurrency=1,
        prompts_sha256="ef" * 32,
        sent=8,
        finished=8,
        failed=0,
        errors={},
        output_tokens=48,
        ttft_median_seconds=ttft,
        ttft_p95_seconds=ttft,
        inter_token_median_seconds=0.0155,
        inter_token_p95_seconds=0.0165,
        e2e_median_seconds=None if ttft is None else ttft + 0.08,
        output_throughput_tokens_per_second=20.0,
        before={role: None if value is None else 0.0 for role, value in after.items()} | {"load_bytes": 0.0},
        after=after | {"load_bytes": None if external is None else external * 4096},
        metrics_caveats=[],
        card=card(),
        requests=requests,
    )
    return msgspec.structs.replace(base, **changes)


def record(arm: str = "control", pair: int = 1, *, host: str = "localhost", **changes: Any) -> RunRecord:
    tier = arm != "control"
    ttft = (OFFLOAD if tier else CONTROL)[(pair - 1) % 6]
    loaded = (128, 0, 8192) if tier else (8320, 0, 0)
    fields: dict[str, Any] = {
        "schema_version": "1.0",
        "kvtrial_version": "0.1.0",
        "campaign": "20261129T101500Z-offload_return-7f3a",
        "plan_sha256": "12" * 32,
        "protocol": "offload_return",
        "host": host,
        "run": f"p{pair:02d}-{1 if (pair % 2 == 1) != tier else 2}-{arm}",
        "pair": pair,
        "position": 1 if (pair % 2 == 1) != tier else 2,
        "arm": arm,
        "spare": False,
        "attempt": 1,
        "evidence": "cpu",
        "outcome": "completed",
        "fault": None,
        "launch": Launch(
            arm=arm,
            argv=["vllm", "serve", "/srv/models/small", "--host", "127.0.0.1", "--port", "18000"]
            + (["--kv-transfer-config", '{"kv_connector":"OffloadingConnector"}'] if tier else []),
            env={"VLLM_HOST_IP": "127.0.0.1"},
            port=18000,
            served_model_name="small",
            connector="OffloadingConnector" if tier else None,
        ),
        "model": Model(
            name="small",
            path="/srv/models/small",
            revision="sha256:" + "34" * 8,
            weights="random",
            kv_bytes_per_token=4096,
        ),
        "vllm_version_pinned": "0.32.0",
        "capacity": Capacity(
            block_tokens=32,
            usable_gpu_blocks=192,
            kv_bytes_per_token=4096,
            tier_bytes={"offload": 268435456},
            chunk_tokens={"offload": 64},
        ),
        "ram_reserve_bytes": 2 * 2**30,
        "resolved": Resolved(
            vllm_version="0.32.0",
            served_models=["small"],
            config={"cache_config.block_size": 32, "kv_transfer_config": "OffloadingConnector" if tier else None},
            cache_config={"num_gpu_blocks": "193"},
            log_facts={"kv_layout": "LBHNC"},
            listening=[Socket(address="127.0.0.1", port=18000, pid=4242)],
            packages_sha256="56" * 32,
            model_revision="sha256:" + "34" * 8,
            api_process_started=1.0,
        ),
        "conditions": Conditions(
            cpu_model="Xeon, a made-up one",
            cpus=2,
            ram_total_bytes=16 * 2**30,
            kernel="6.1.0",
            os="Debian 12",
            python="3.11.2",
            boot_id="made-up",
            governor=None,
            transparent_hugepages="madvise",
            clock_source="tsc",
            load_average_1m=0.3,
            gpus=[],
            driver_version=None,
        ),
        "times": Times(
            started_monotonic_seconds=10.0,
            ended_monotonic_seconds=46.0,
            started_at_utc=f"2026-11-29T10:{15 + pair:02d}:00Z",
            start_seconds=16.3,
            phases_seconds=17.0,
            scrape_seconds=0.8,
            stop_seconds=0.5,
            other_seconds=1.4,
        ),
        "samples": Samples(
            count=36,
            interval_seconds=1.0,
            ram_available_start_bytes=12 * 2**30,
            ram_available_min_bytes=10 * 2**30,
            ram_used_peak_bytes=(6 * 2**30) + (285 * 2**20 if tier else 0),
            engine_rss_peak_bytes=2 * 2**30,
            shared_memory_peak_bytes=0,
            vram_used_peak_bytes=None,
            vram_foreign_processes=None,
            foreign_cpu_share=0.03,
            steal_share=0.01,
            cpu_mhz_median=2600.0,
            throttle_events=None,
        ),
        "phases": [
            phase("populate", 0.235),
            phase("gpu_hit", 0.026, tokens=(64, 4096, 0)),
            phase("pressure", 0.23),
            phase("return", ttft, tokens=loaded),
            phase("noload_return", 0.231),
            phase("fits_return", 0.026, tokens=(96, 6144, 0)),
            phase("miss", 0.22, tokens=(6240, 0, 0)),
        ],
        "watch_hits": [],
        "files": {},
    }
    known = set(inspect.signature(RunRecord).parameters)
    return RunRecord(**{name: value for name, value in (fields | changes).items() if name in known})


def records(host: str = "localhost", pairs: int = 6) -> list[RunRecord]:
    return [record(arm, pair, host=host) for pair in range(1, pairs + 1) for arm in ("control", "offload")]


def died(**changes: Any) -> RunRecord:
    fault = Fault(
        origin="engine",
        fault="engine_died",
        phase="return",
        detail="the engine's process ended with signal 9",
        cause="unknown",
        fix="see the log",
        log_tail=["INFO ready", "ERROR EngineCore died <b>here</b>"],
    )
    fields: dict[str, Any] = {"outcome": "engine_fault", "fault": fault, "phases": []}
    return record("offload", 3, **(fields | changes))


CAMPAIGN: dict[str, Any] = {
    "seed": 7,
    "pins": {"vllm": "0.32.0"},
    "provenance": {"commit": "made-up", "dirty": False},
    "protocol": {"name": "left out"},
    "plan": {"left": "out"},
}
