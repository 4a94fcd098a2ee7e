"""Synthetic records of `preemption_ladder` with the numbers of the CPU engine: 64 usable blocks of 32, 256 in and out.

Made, not measured: their evidence is `standin`. A level's requests stall and queue as a shape says, so that a delay
that moved into the queue can be planted beside a real gain.
"""

from collections.abc import Callable
from functools import cache

from build import PROTOCOLS, VERSION, _card, _sha, honest_records
from kvtrial.analysis.inputs import HostInput, ModelInput
from kvtrial.analysis.plan import for_host
from kvtrial.analysis.protocols import load_protocol, only_arms
from kvtrial.record.pressure import PressurePoint, RequestTimes, ResetFact, phase_ledger
from kvtrial.record.protocol import Protocol
from kvtrial.record.record import PhaseRecord, RequestFact, RunRecord
from msgspec import Struct
from msgspec.structs import replace

REQUESTS = 8
PROMPT = ANSWER = 256
LIMIT = 512
LEVELS = (1, 3, 4, 5, 6, 7)
GAP_NS = 2_000_000
STALL_MULTIPLE = 5.0
ARMS = ("base", "more_kv", "fewer_seqs")


class Shape(Struct, frozen=True):
    """What a level does: preemptions of its requests, seconds that a request queues and stalls on average."""

    preemptions: int = 0
    queue_seconds: float = 0.0
    stall_seconds: float = 0.0


Shapes = Callable[[str, int, int], Shape]
"""(arm, level, pair) → shape."""


def preempting(arm: str, level: int, pair: int) -> Shape:
    """As the engine does it: the base preempts from 5 on, more KV memory nothing, fewer sequences queue instead."""
    jitter = 0.002 * (pair % 3)
    if level < 5 or arm == "more_kv":
        return Shape(0, 0.001, 0.0)
    stall = 0.1 * (level - 4)
    if arm == "base":
        return Shape(2 * (level - 4), 0.001, stall + jitter)
    return Shape(0, stall + 0.05 + jitter, 0.0)


@cache
def ladder_protocol(arms: tuple[str, ...] = ARMS) -> Protocol:
    """The shipped protocol with its default arms, or some of the others, as a CPU host has it."""
    protocol = only_arms(load_protocol("preemption_ladder", PROTOCOLS), list(arms))
    return for_host(protocol, cpu_host())


def cpu_host(**changes: object) -> HostInput:
    """A host as the local inventory describes it."""
    host = HostInput(
        may_be_disturbed=True,
        backend="cpu",
        vllm_version=VERSION,
        vllm_venv="/opt/venv",
        model=ModelInput("kvtrial-model", "/models/a", "rev-1", 512, "random", 32, 126),
        engine_args={"block-size": 32, "max-num-seqs": 16, "num-gpu-blocks-override": 97},
        ram_reserve_bytes=2**28,
    )
    return replace(host, **changes)


def ladder_records(shapes: Shapes = preempting, pairs: int = 6, arms: tuple[str, ...] = ARMS) -> list[RunRecord]:
    """A run for each arm and pair, in ABBA order, every gate of the protocol satisfied."""
    template = [record for record in honest_records(pairs) if record.arm == "control"]
    records = []
    for run in template:
        order = arms if run.pair % 2 else arms[::-1]
        records += [_run(run, arm, position, shapes) for position, arm in enumerate(order)]
    return records


def _run(template: RunRecord, arm: str, position: int, shapes: Shapes) -> RunRecord:
    assert template.resolved is not None
    blocks, running = (129 if arm == "more_kv" else 65), (4 if arm == "fewer_seqs" else 16)
    started = 1000.0 + 200.0 * template.pair + 60.0 * position
    argv = [
        "/opt/venv/bin/vllm", "serve", "/models/a", "--served-model-name", "kvtrial-model", "--host", "127.0.0.1",
        "--port", "8000", "--block-size", "32", "--max-model-len", "1024", "--max-num-seqs", str(running),
        "--num-gpu-blocks-override", str(blocks),
    ]  # fmt: skip
    config = {
        **template.resolved.config,
        "vllm_config.instance_id": f"{arm}{template.pair}",
        "vllm_config.scheduler_config.max_num_seqs": running,
        "vllm_config.cache_config.num_gpu_blocks_override": blocks,
        "vllm_config.cache_config.num_gpu_blocks": blocks,
        "vllm_config.cache_config.kv_cache_size_tokens": 32 * blocks,
        "vllm_config.cache_config.kv_cache_max_concurrency": blocks / 32,
    }
    start = (template.phases[0].before["process_start_time_seconds"] or 0.0) + 10 * position
    counters = {role: None if value is None else 0.0 for role, value in template.phases[0].before.items()}
    counters["process_start_time_seconds"] = start
    phases, clock = [], started + 16
    for level in LEVELS:
        phase = _level(template.pair, arm, level, clock, counters, shapes(arm, level, template.pair))
        counters = dict(phase.after)
        clock += 5.0
        phases.append(phase)
    return replace(
        template,
        protocol="preemption_ladder",
        run=f"p{template.pair}-{arm}",
        arm=arm,
        position=position,
        launch=replace(template.launch, arm=arm, argv=argv, connector=None),
        capacity=replace(
            template.capacity, usable_gpu_blocks=64, kv_bytes_per_token=512, tier_bytes={}, chunk_tokens={}
        ),
        resolved=replace(
            template.resolved, config=config, cache_config={"num_gpu_blocks": str(blocks), "block_size": "32"}
        ),
        times=replace(template.times, started_monotonic_seconds=started, ended_monotonic_seconds=started + 50),
        phases=phases,
    )


def _level(pair: int, arm: str, level: int, clock: float, before: dict[str, float | None], shape: Shape) -> PhaseRecord:
    times = [_times(index, shape) for index in range(REQUESTS)]
    facts = [_fact(pair, index, one) for index, one in enumerate(times)]
    seconds = sum(one.last_token_ns for one in times) / 1e9 / min(level, 4) + 0.01
    ttfts, e2es = [f.ttft_seconds or 0.0 for f in facts], [f.e2e_seconds or 0.0 for f in facts]
    after = _counted(before, shape, sum(e2es))
    points = [PressurePoint(0.2 * n, float(min(level, 4)), float(max(0, level - 4)), min(1.0, level / 4), 0.0)
              for n in range(1, 6)]  # fmt: skip
    if shape.preemptions:
        points = [replace(point, preemptions=float(shape.preemptions * (point.seconds > 0.3))) for point in points]
    return PhaseRecord(
        name=f"load_{level}",
        block="above_onset" if level >= 5 else "ladder",
        started_monotonic_seconds=clock,
        seconds=seconds,
        scrape_seconds=0.05,
        concurrency=level,
        prompts_sha256=_sha("load", pair),
        sent=REQUESTS,
        finished=REQUESTS,
        failed=0,
        errors={},
        output_tokens=ANSWER * REQUESTS,
        ttft_median_seconds=sorted(ttfts)[len(ttfts) // 2],
        ttft_p95_seconds=max(ttfts),
        inter_token_median_seconds=GAP_NS / 1e9,
        inter_token_p95_seconds=GAP_NS / 1e9,
        e2e_median_seconds=sorted(e2es)[len(e2es) // 2],
        output_throughput_tokens_per_second=ANSWER * REQUESTS / seconds,
        before=before,
        after=after,
        metrics_caveats=[],
        card=_card(seconds),
        requests=facts,
        e2e_p95_seconds=max(e2es),
        reset=ResetFact(True, False, 1, 0.01, marker_hit_tokens=PROMPT - 32.0),
        pressure=points,
        ledger=phase_ledger(times, STALL_MULTIPLE, GAP_NS),
    )


def _times(index: int, shape: Shape) -> RequestTimes:
    """As many requests stall as are preempted, each in one gap, alike; all queue alike."""
    stalled = min(shape.preemptions, REQUESTS)
    stall_us = round(1e6 * shape.stall_seconds * REQUESTS / stalled) if index < stalled else 0
    gaps = [GAP_NS // 1000] * (ANSWER - 1)
    if stall_us:
        gaps[100] = stall_us
    first = 1_000_000 + round(30e6 + 1e9 * shape.queue_seconds)
    return RequestTimes(f"load/{index}", 0, 1_000_000, first, first + 1000 * sum(gaps), gaps)


def _fact(pair: int, index: int, times: RequestTimes) -> RequestFact:
    return RequestFact(
        key=times.key,
        prompt_sha256=_sha("load", pair, index),
        prompt_tokens=PROMPT,
        max_tokens=LIMIT,
        ttft_seconds=(times.first_token_ns - times.due_ns) / 1e9,
        e2e_seconds=(times.last_token_ns - times.due_ns) / 1e9,
        longest_gap_seconds=max(times.gaps_us) / 1e6,
        output_tokens=ANSWER,
        cached_tokens=None,
        answer_sha256=_sha("answer", pair, index),
        finish_reason="stop",
        error_class=None,
    )


def _counted(before: dict[str, float | None], shape: Shape, e2e: float) -> dict[str, float | None]:
    rises = {
        "preemptions": shape.preemptions,
        "requests_finished_stop": REQUESTS,
        "prompt_tokens": PROMPT * REQUESTS,
        "prompt_tokens_computed": PROMPT * REQUESTS,
        "prefix_cache_queries_tokens": PROMPT * REQUESTS,
        "generation_tokens": ANSWER * REQUESTS,
        "queue_seconds_sum": shape.queue_seconds * REQUESTS,
        "queue_seconds_count": REQUESTS,
        "prefill_seconds_sum": 0.03 * REQUESTS,
        "decode_seconds_sum": 0.998 * e2e - (shape.queue_seconds + 0.03) * REQUESTS,
        "e2e_seconds_sum": e2e,
        "ttft_seconds_sum": 0.0015 * e2e + (shape.queue_seconds + 0.03) * REQUESTS,
        "e2e_seconds_count": REQUESTS,
    }
    return before | {role: (before.get(role) or 0.0) + amount for role, amount in rises.items()}
