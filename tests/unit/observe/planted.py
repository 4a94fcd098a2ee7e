"""Pages of /metrics and logs with a planted fault, made from families as a version exports them. Not a real server."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kvtrial.analysis.observe as observing
from kvtrial.analysis.observe.answer import Answer
from kvtrial.analysis.observe.client import Client
from kvtrial.analysis.observe.configuration import Configuration
from kvtrial.analysis.observe.logs import read_log
from kvtrial.analysis.observe.pages import Pages, read_pages
from kvtrial.record.launch import ArmLaunch
from kvtrial.record.observed import HostFacts
from kvtrial.record.versions import within

CASES = Path(__file__).parents[2] / "fixtures" / "cases"
METRICS = Path(__file__).parents[2] / "fixtures" / "metrics"
MODEL = "some-model"
STARTED = 1_790_000_000.0
_REASONS = ("stop", "length", "abort", "error", "repetition")


def page(
    version: str = "0.26.0",
    model: str = MODEL,
    engine: str = "0",
    connector: bool = False,
    started: float = STARTED,
    cache: Mapping[str, str] | None = None,
    per_request: list[float] | None = None,
    resets: float | None = None,
    tier: Mapping[str, str] | None = None,
    **given: float,
) -> str:
    """One page of one engine. Numbers by short name; what is not given is 0, what the version lacks is not there.

    per_request: how often each finished request was preempted.
    """
    labels = f'engine="{engine}",model_name="{model}"'
    at = {"running": 0.0, "waiting": 0.0, "deferred": 0.0, "usage": 0.1, "ttft": 0.1, "queue": 0.0, **given}
    finished = at.get("finished", 0.0)
    lines = [f"process_start_time_seconds {started}"]

    def family(name: str, kind: str, *samples: tuple[str, float]) -> None:
        lines.append(f"# HELP {name} text")
        lines.append(f"# TYPE {name} {kind}")
        lines.extend(f"{sample} {value}" for sample, value in samples)

    def counter(name: str, value: float, extra: str = "") -> None:
        family(name, "counter", (f"{name}{{{labels}{extra}}}", value))

    def histogram(name: str, total: float, count: float) -> None:
        family(name, "histogram", (f"{name}_sum{{{labels}}}", total), (f"{name}_count{{{labels}}}", count))

    def gauge(name: str, value: float, extra: str = "") -> None:
        family(name, "gauge", (f"{name}{{{labels}{extra}}}", value))

    gauge("vllm:num_requests_running", at["running"])
    gauge("vllm:num_requests_waiting", at["waiting"] + at["deferred"])
    if within(version, "0.20", None):
        family(
            "vllm:num_requests_waiting_by_reason",
            "gauge",
            (f'vllm:num_requests_waiting_by_reason{{{labels},reason="capacity"}}', at["waiting"]),
            (f'vllm:num_requests_waiting_by_reason{{{labels},reason="deferred"}}', at["deferred"]),
        )
    gauge("vllm:kv_cache_usage_perc", at["usage"])
    counter("vllm:num_preemptions_total", at.get("preemptions", 0.0))
    gauge("vllm:num_preemptions_created", started + 5)
    counter("vllm:prompt_tokens_total", at.get("prompt", 0.0))
    counter("vllm:generation_tokens_total", at.get("generated", 0.0))
    counter("vllm:prefix_cache_queries_total", at.get("prompt", 0.0))
    counter("vllm:prefix_cache_hits_total", at.get("local", 0.0))
    counter("vllm:external_prefix_cache_queries_total", at.get("asked", 0.0))
    counter("vllm:external_prefix_cache_hits_total", at.get("external", 0.0))
    if within(version, "0.16", None):
        sources = {"local_compute": 0.0, "local_cache_hit": at.get("local", 0.0), "external_kv_transfer": 0.0}
        name = "vllm:prompt_tokens_by_source_total"
        family(name, "counter", *((f'{name}{{{labels},source="{one}"}}', value) for one, value in sources.items()))
    name = "vllm:request_success_total"
    family(
        name,
        "counter",
        *((f'{name}{{{labels},finished_reason="{r}"}}', finished if r == "stop" else 0.0) for r in _REASONS),
    )
    histogram("vllm:time_to_first_token_seconds", at["ttft"] * finished, at.get("first_tokens", finished))
    histogram("vllm:request_queue_time_seconds", at["queue"] * finished, finished)
    histogram("vllm:request_prompt_tokens", at.get("ended_prompt", at.get("prompt", 0.0)), finished)
    if "asked_output" in at:
        histogram("vllm:request_params_max_tokens", at["asked_output"] * finished, finished)
        histogram("vllm:request_generation_tokens", at["real_output"] * finished, finished)
    if within(version, "0.30", None):
        _per_request(lines, labels, per_request or [0.0] * int(finished))
    if connector:
        _connector(lines, labels, version, at, tier)
    if within(version, "0.32", None):
        family("vllm:num_requests_kv_fetch_by_stage", "gauge")
        family("vllm:prompt_tokens_cached_by_source_total", "counter")
    info = {"block_size": "16", "num_gpu_blocks": "4096", "cache_dtype": "auto", "enable_prefix_caching": "True"}
    info |= {"kv_cache_size_tokens": "65536"} if within(version, "0.24", None) else {}
    info |= {"kv_cache_layout": "LBHNC"} if within(version, "0.29", None) else {}
    info |= dict(cache or {})
    joined = ",".join(f'{key}="{value}"' for key, value in {**info, "engine": engine}.items())
    family("vllm:cache_config_info", "gauge", (f"vllm:cache_config_info{{{joined}}}", 1.0))
    if resets is not None:
        called = 'http_requests_total{handler="/reset_prefix_cache",method="POST",status="2xx"}'
        family("http_requests_total", "counter", (called, resets))
    return "\n".join(lines) + "\n"


def _per_request(lines: list[str], labels: str, counts: list[float]) -> None:
    name = "vllm:request_num_preemptions"
    lines.append(f"# TYPE {name} histogram")
    for bound in (1, 2, 3, 4, 5, 10, 20):
        below = sum(1 for count in counts if count <= bound)
        lines.append(f'{name}_bucket{{{labels},le="{bound}.0"}} {below}')
    lines.append(f'{name}_bucket{{{labels},le="+Inf"}} {len(counts)}')
    lines.append(f"{name}_sum{{{labels}}} {sum(counts)}")
    lines.append(f"{name}_count{{{labels}}} {len(counts)}")


def _connector(
    lines: list[str], labels: str, version: str, at: Mapping[str, float], tier: Mapping[str, str] | None
) -> None:
    load, store, took = at.get("load", 0.0), at.get("store", 0.0), at.get("load_seconds", 0.0)
    name = "vllm:kv_offload_total_bytes_total"
    lines.append(f"# TYPE {name} counter")
    if within(version, "0.24", None) or load:
        lines.append(f'{name}{{{labels},transfer_type="CPU_to_GPU"}} {load}')
    if within(version, "0.24", None) or store:
        lines.append(f'{name}{{{labels},transfer_type="GPU_to_CPU"}} {store}')
    if within(version, None, "0.24"):
        return
    for flat, value in (("load_bytes", load), ("store_bytes", store), ("load_time", took)):
        lines.append(f"# TYPE vllm:kv_offload_{flat}_total counter")
        if value:
            lines.append(f"vllm:kv_offload_{flat}_total{{{labels}}} {value}")
    lines.append("# TYPE vllm:kv_offload_load_size histogram")
    if load:
        lines.append(f"vllm:kv_offload_load_size_count{{{labels}}} {at.get('load_jobs', load / 2e8)}")
    lines.append("# TYPE vllm:kv_offload_cpu_cache_usage_perc gauge")
    lines.append(f"vllm:kv_offload_cpu_cache_usage_perc{{{labels}}} 0.0")
    if within(version, "0.26", None):
        lookups = at.get("lookups", 0.0)
        for sort, value in (("sum", lookups * at.get("lookup_seconds", 0.0)), ("count", lookups)):
            lines.append(f"vllm:kv_offload_lookup_async_delay_seconds_{sort}{{{labels}}} {value}")
        lines.append("# TYPE vllm:kv_offload_cpu_cache_read_usage_perc gauge")
        lines.append("# TYPE vllm:kv_offload_allocation_failure_total counter")
        if "failed_stores" in at:
            lines.append(f"vllm:kv_offload_allocation_failure_total{{{labels}}} {at['failed_stores']}")
    if tier is not None:
        joined = ",".join(f'{key}="{value}"' for key, value in tier.items())
        lines.append("# TYPE vllm:kv_offload_config_info gauge")
        lines.append(f"vllm:kv_offload_config_info{{{labels},{joined}}} 1.0")


def pages(*texts: str, interval: float | None = 30.0, version: str | None = None) -> Pages:
    """Pages as they are read."""
    return read_pages([(f"page {n}", text) for n, text in enumerate(texts)], version, interval)


def seen(*texts: str, control: tuple[str, ...] = (), client: Client | None = None, **more: Any) -> Answer:
    """The answer to pages."""
    return observing.observe(
        pages(*texts, version=more.get("version")),
        pages(*control, version=more.get("version")) if control else None,
        client=client,
        **more,
    )


def logged(text: str, version: str | None = None) -> Answer:
    """The answer to a log."""
    return observing.observe(log=read_log(text, version))


def classes(answer: Answer) -> list[str]:
    """Classes of all findings, in order."""
    return [finding.class_ for finding in answer.findings]


def launch(*argv: str, version: str = "0.32.0", **env: str) -> Configuration:
    """A configuration given by hand."""
    return Configuration(ArmLaunch(["serve", "Qwen/Qwen3-0.6B", *argv], env), "a test", version)


def host(**facts: Any) -> HostFacts:
    """A host's facts given by hand."""
    return HostFacts(**facts)


def status_line(
    second: int,
    running: float = 1,
    waiting: float = 0,
    generation: float = 50.0,
    usage: float = 10.0,
    preemptions: float = 0,
    deferred: float = 0,
    engine: str = "000",
) -> str:
    """One periodic line as 0.26 prints it, `second` seconds after 22:00:00."""
    time = f"11-23 22:{second // 60:02d}:{second % 60:02d}"
    more = f", Deferred: {deferred:g} reqs" if deferred else ""
    more += f", Preemptions: {preemptions:g}" if preemptions else ""
    return (
        f"(APIServer pid=7) INFO {time} [loggers.py:310] Engine {engine}: Avg prompt throughput: {generation:.1f} "
        f"tokens/s, "
        f"Avg generation throughput: {generation:.1f} tokens/s, Running: {running:g} reqs, Waiting: {waiting:g} "
        f"reqs{more}, "
        f"GPU KV cache usage: {usage:.1f}%, Prefix cache hit rate: 4.0%"
    )


def log_of(*lines: str, version: str = "0.26.0") -> str:
    """A log with a start of that version before the lines."""
    return (
        "\n".join(
            [f"(EngineCore pid=8) INFO [core.py:116] Initializing a V1 LLM engine (v{version}) with config", *lines]
        )
        + "\n"
    )
