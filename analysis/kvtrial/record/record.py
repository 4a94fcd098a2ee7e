"""Schema of a record: the facts that one run leaves. Facts only; what they mean is decided in kvtrial.analysis."""

from typing import Any, Literal

from msgspec import Struct

from kvtrial.record.calibration import Calibration
from kvtrial.record.load import HonestyCard
from kvtrial.record.plan import Capacity, Launch, Model, Supervisor
from kvtrial.record.pressure import PhaseLedger, PressurePoint, ResetFact

Evidence = Literal["gpu", "cpu", "standin"]
Outcome = Literal["completed", "engine_fault", "environment_fault"]
FaultOrigin = Literal["engine", "environment"]


class Fault(Struct, frozen=True):
    """Why a run is not complete. `fault` is a class name such as engine_died, deadlock, start_timeout, disk_full."""

    origin: FaultOrigin
    fault: str
    phase: str | None
    detail: str
    cause: str | None = None
    fix: str | None = None
    log_tail: list[str] = []


class Socket(Struct, frozen=True):
    """A listening TCP socket of a process of the engine."""

    address: str
    port: int
    pid: int


class Resolved(Struct, frozen=True):
    """What the engine really is, asked from itself after start.

    `config` is the flattened resolved configuration (`/server_info`), dotted path to value; `cache_config` the labels
    of vllm:cache_config_info; `log_facts` what only the log says (KV layout, spec name). `loopback_alone`: the network
    namespace that the engine is in has loopback addresses and no other, so that nobody outside can reach any socket.
    """

    vllm_version: str
    served_models: list[str]
    config: dict[str, Any]
    cache_config: dict[str, str]
    log_facts: dict[str, Any]
    listening: list[Socket]
    packages_sha256: str
    model_revision: str
    api_process_started: float | None
    loopback_alone: bool = False


class Conditions(Struct, frozen=True):
    """The host under test. None where it can't be read there."""

    cpu_model: str
    cpus: int
    ram_total_bytes: int
    kernel: str
    os: str
    python: str
    boot_id: str
    governor: str | None
    transparent_hugepages: str | None
    clock_source: str | None
    load_average_1m: float
    gpus: list[dict[str, str]]
    driver_version: str | None


class Samples(Struct, frozen=True):
    """RAM, VRAM and CPU sampled from engine start to engine stop. Bytes; shares are of the whole machine, 0..1.

    `foreign_cpu_share` is CPU time of processes that are neither the engine's nor ours, `steal_share` the
    hypervisor's. `ram_used_peak_bytes` is MemTotal − least MemAvailable.

    Of GPUs, every tenth sample, None without them: `vram_foreign_processes` is the most processes on them that were not
    the engine's (None also where a container hides whose they are), `throttle_events` the samples in which heat or
    supply slowed one down. `vram_used_peak_bytes` is of all GPUs together, `vram_used_peak_by_gpu_bytes` of each by
    itself in the order of the conditions, empty in older records. `rss_peak_by_process_bytes`: the largest of the
    engine's processes, each at its own peak, largest first; what processes share counts in each.
    """

    count: int
    interval_seconds: float
    ram_available_start_bytes: int
    ram_available_min_bytes: int
    ram_used_peak_bytes: int
    engine_rss_peak_bytes: int
    shared_memory_peak_bytes: int
    vram_used_peak_bytes: int | None
    vram_foreign_processes: int | None
    foreign_cpu_share: float
    steal_share: float
    cpu_mhz_median: float | None
    throttle_events: int | None
    gpu_mhz_median: float | None = None
    gpu_power_watts_median: float | None = None
    vram_used_peak_by_gpu_bytes: list[int] = []
    rss_peak_by_process_bytes: list[int] = []


class Times(Struct, frozen=True):
    """Seconds on the host's monotonic clock. `other_seconds` is what is neither start, phases nor stop."""

    started_monotonic_seconds: float
    ended_monotonic_seconds: float
    started_at_utc: str
    start_seconds: float | None
    phases_seconds: float
    scrape_seconds: float
    stop_seconds: float | None
    other_seconds: float


class RequestFact(Struct, frozen=True):
    """One request of a phase, short form; all timestamps are in requests.jsonl.zst.

    `dispatch_lag_seconds`: sent minus scheduled, None where it was not sent.
    """

    key: str
    prompt_sha256: str
    prompt_tokens: int | None
    max_tokens: int
    ttft_seconds: float | None
    e2e_seconds: float | None
    longest_gap_seconds: float | None
    output_tokens: int
    cached_tokens: int | None
    answer_sha256: str | None
    finish_reason: str | None
    error_class: str | None
    dispatch_lag_seconds: float | None = None


class OpenLoop(Struct, frozen=True):
    """How an open loop went, to tell whether the engine kept up with what arrived.

    `span_seconds` lie between the first and the last time at which a request was due, `drain_seconds` between that last
    time and the end of the last answer. The halves are of the span, by when a request was due.
    """

    span_seconds: float
    drain_seconds: float
    ttft_mean_first_half_seconds: float | None
    ttft_mean_second_half_seconds: float | None


class PhaseRecord(Struct, frozen=True):
    """One phase as measured. `before` and `after` map metric roles to values; None = the engine does not export it.

    `token_gaps` percentiles are over all requests of the phase. Throughput is output tokens over the phase's seconds.
    `concurrency` is None for an open loop; `arrivals` says in words how requests came, None in records that are older.
    `requests` lists the first thousand, in the order of the plan.

    Of a ladder's level: the `reset` before it, `pressure` over its time, and its `ledger`.
    """

    name: str
    block: str
    started_monotonic_seconds: float
    seconds: float
    scrape_seconds: float
    concurrency: int | None
    prompts_sha256: str
    sent: int
    finished: int
    failed: int
    errors: dict[str, int]
    output_tokens: int
    ttft_median_seconds: float | None
    ttft_p95_seconds: float | None
    inter_token_median_seconds: float | None
    inter_token_p95_seconds: float | None
    e2e_median_seconds: float | None
    output_throughput_tokens_per_second: float | None
    before: dict[str, float | None]
    after: dict[str, float | None]
    metrics_caveats: list[str]
    card: HonestyCard
    requests: list[RequestFact]
    ttft_mean_seconds: float | None = None
    inter_token_mean_seconds: float | None = None
    e2e_p95_seconds: float | None = None
    arrivals: str | None = None
    open_loop: OpenLoop | None = None
    reset: ResetFact | None = None
    pressure: list[PressurePoint] = []
    ledger: PhaseLedger | None = None


class Supervision(Struct, frozen=True):
    """What started and watched the engine. `exposure` is systemd-analyze's, 0 safe to 10 unsafe."""

    kind: Supervisor
    unit: str | None = None
    systemd: str | None = None
    exposure: float | None = None


class WatchHit(Struct, frozen=True):
    """A watch of a known hazard that went off."""

    hazard: str
    evidence: str


class RunRecord(Struct, frozen=True):
    """All facts of one run. `attempt` is 1 plus the number of interruptions of the campaign on this host before it.

    `calibration` is the card of the load client that was in force on this host, None where there was none.
    `left_behind`: what the engine still held after its end, in a sentence; empty when memory was back where it was.
    """

    schema_version: str
    kvtrial_version: str
    campaign: str
    plan_sha256: str
    protocol: str
    host: str
    run: str
    pair: int
    position: int
    arm: str
    spare: bool
    attempt: int
    evidence: Evidence
    outcome: Outcome
    fault: Fault | None
    launch: Launch
    model: Model
    vllm_version_pinned: str
    capacity: Capacity
    ram_reserve_bytes: int
    resolved: Resolved | None
    conditions: Conditions
    times: Times
    samples: Samples | None
    phases: list[PhaseRecord]
    watch_hits: list[WatchHit]
    files: dict[str, str]
    calibration: Calibration | None = None
    supervision: Supervision = Supervision("process")
    left_behind: str = ""
