"""The scheduler: one queue, steps that sleep instead of computing, recompute preemption, and what is counted."""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

from engine_standin.caches import BlockPool, Tier, extend_chain
from engine_standin.faults import Faults
from engine_standin.launch import Launch
from engine_standin.metrics import Metrics

PRINTABLE = range(32, 127)


@dataclass(frozen=True)
class Pace:
    """How long things take, in seconds, before the slowdown factor. `noise` is a standard deviation of log time."""

    base: float = 0.002
    computed_token: float = 30e-6
    loaded_token: float = 3e-6
    decode_step: float = 0.001
    noise: float = 0.02
    slowdown: float = 1.0
    seed: str = "0"


def read_pace(environment: Mapping[str, str]) -> Pace:
    """The pace set by STANDIN_US_PER_TOKEN, STANDIN_US_PER_LOADED_TOKEN, STANDIN_NOISE, _SLOWDOWN and _SEED."""
    return Pace(
        computed_token=float(environment.get("STANDIN_US_PER_TOKEN", 30)) * 1e-6,
        loaded_token=float(environment.get("STANDIN_US_PER_LOADED_TOKEN", 3)) * 1e-6,
        noise=float(environment.get("STANDIN_NOISE", 0.02)),
        slowdown=float(environment.get("STANDIN_SLOWDOWN", 1.0)),
        seed=environment.get("STANDIN_SEED", "0"),
    )


@dataclass(eq=False)
class Request:
    """One completion. `emitted` carries token ids to the HTTP side, None when the engine died."""

    prompt: list[int]
    max_tokens: int
    salt: str = ""
    load_cap_tokens: int | None = None
    store_cap_tokens: int | None = None
    stop_after: int | None = None
    emitted: asyncio.Queue[int | None] = field(default_factory=asyncio.Queue)
    outputs: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    chain: list[int] = field(default_factory=list)
    local_tokens: int = 0
    external_tokens: int = 0
    preemptions: int = 0
    finish_reason: str | None = None
    arrived: float = field(default_factory=time.monotonic)
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    answer_seed: bytes = b""

    @property
    def tokens(self) -> int:
        """Tokens whose KV the next step needs."""
        return len(self.prompt) + len(self.outputs)


class Engine:
    """Feed it with `submit`; `run` is its loop. `on_dead` and `on_kill` act out the planted deaths."""

    def __init__(self, launch: Launch, faults: Faults, pace: Pace, metrics: Metrics) -> None:
        self.launch, self.faults, self.pace, self.metrics = launch, faults, pace, metrics
        self.block = launch.block_tokens
        self.caching = bool(launch.arguments.get("enable_prefix_caching", True))
        self.pool = BlockPool(None if "local_hits" in faults else launch.num_gpu_blocks - 1)
        self.tier = Tier(launch.tier_chunks, launch.chunk_tokens) if launch.transfer else None
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.finished = 0
        self.dead = False
        self.on_dead: Callable[[], None] = lambda: None
        self.on_kill: Callable[[], None] = lambda: None
        self.log_warning: Callable[[str], None] = lambda text: None
        self._served = 0
        self._step_tokens = 0
        self._wake = asyncio.Event()
        self._reset_done = False

    def submit(self, request: Request) -> None:
        self.waiting.append(request)
        self._wake.set()

    def abort(self, request: Request) -> None:
        """Drop a request whose client has gone: it is counted in no success and no histogram."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self.running.remove(request)
            self.pool.release(request.blocks)
        request.finish_reason = "abort"

    def reset_caches(self, external: bool) -> bool:
        """What /reset_prefix_cache does; False while blocks are held."""
        if "reset_in_name" in self.faults:
            return True
        if external and self.tier:
            self.tier.reset()
        return self.pool.reset()

    async def run(self) -> None:
        while not self.dead:
            if not self.running and (not self.waiting or self._deadlocked()):
                self._wake.clear()
                await self._wake.wait()
                continue
            await asyncio.sleep(self._schedule() * self.pace.slowdown)
            self._emit()

    def _deadlocked(self) -> bool:
        return self.faults.reached("deadlock_after", self.finished)

    # Scheduling: running requests grow first; the last admitted pays for a lack of blocks.

    def _schedule(self) -> float:
        """Plan one step and return its duration in seconds."""
        preempted = self._grow_running()
        step = self.pace.decode_step
        self._step_tokens = len(self.running)
        while self.waiting and not preempted and len(self.running) < self.launch.max_num_seqs:
            if self._deadlocked() or self._step_tokens >= self.launch.max_num_batched_tokens:
                break
            seconds = self._admit(self.waiting[0])
            if seconds is None:
                break
            step = seconds if step == self.pace.decode_step else step + seconds - self.pace.base
        return step

    def _grow_running(self) -> bool:
        preempted = False
        for request in list(self.running):
            while request in self.running:
                missing = -(-request.tokens // self.block) - len(request.blocks)
                taken = self.pool.take([], max(0, missing))
                if taken is not None:
                    request.blocks += taken
                    self._name_blocks(request)
                    break
                self._preempt(self.running.pop())
                preempted = True
        return preempted

    def _preempt(self, victim: Request) -> None:
        self.pool.release(victim.blocks)
        victim.blocks = []
        victim.preemptions += 1
        self.waiting.appendleft(victim)
        self.metrics.add("vllm:num_preemptions_total", 1)

    def _name_blocks(self, request: Request) -> None:
        extend_chain(request.chain, request.prompt + request.outputs, self.block, request.salt)
        self.pool.name(request.blocks, request.chain)

    def _admit(self, request: Request) -> float | None:
        """Give the request its blocks; seconds its prefill takes, or None when it does not fit now."""
        extend_chain(request.chain, request.prompt + request.outputs, self.block, request.salt)
        # The last token has to be computed, hence one token less may come from the GPU cache.
        reusable = request.chain[: (request.tokens - 1) // self.block]
        cached = self.pool.cached_prefix(reusable) if self.caching else []
        local = len(cached) * self.block
        blocks = self.pool.take(cached, -(-request.tokens // self.block) - len(cached))
        if blocks is None:
            return None
        keys = self._chunk_keys(request)
        loaded = 0
        if self.tier and "no_load" not in self.faults:
            loaded = self.tier.loadable_tokens(keys, local, request.load_cap_tokens)
        self.waiting.popleft()
        self.running.append(request)
        request.blocks = blocks
        if not request.preemptions:
            request.scheduled = time.monotonic()
            request.local_tokens, request.external_tokens = local, loaded
            self._seed_answer(request)
        self.pool.name(blocks, request.chain)
        self._count_transfers(request, keys, loaded)
        computed = max(1, request.tokens - local - loaded)
        self._step_tokens += computed + 1
        self._served += 1
        arm = "offload" if self.tier else "control"
        noise = random.Random(f"{self.pace.seed}|{arm}|{self._served}|{request.answer_seed.hex()}")
        work = self.pace.base + computed * self.pace.computed_token + loaded * self.pace.loaded_token
        return work * noise.lognormvariate(0.0, self.pace.noise)

    def _chunk_keys(self, request: Request) -> list[int]:
        per_chunk = self.launch.chunk_tokens // self.block
        whole = len(request.prompt) // self.launch.chunk_tokens
        return [request.chain[(index + 1) * per_chunk - 1] for index in range(whole)]

    def _seed_answer(self, request: Request) -> None:
        content = b"" if "same_answer" in self.faults else array("q", request.prompt).tobytes()
        if request.external_tokens and "corrupt_on_load" in self.faults:
            content += b"corrupt"
        request.answer_seed = blake2b(content, digest_size=16).digest()

    def _count_transfers(self, request: Request, keys: list[int], loaded_tokens: int) -> None:
        if self.tier is None:
            return
        kv_bytes = self.launch.kv_bytes_per_token
        self.metrics.observe("vllm:kv_offload_lookup_sync_delay_seconds", 17e-6)
        if loaded_tokens:
            surplus = self.block if "wrong_load_bytes" in self.faults else 0
            self._count_transfer("load", (loaded_tokens + surplus) * kv_bytes)
        if request.store_cap_tokens is not None:
            keys = keys[: request.store_cap_tokens // self.launch.chunk_tokens]
        new = self.tier.store(keys)
        if new is None:
            self.log_warning(f"Request {id(request):x}: cannot store chunks")
            self.metrics.add("vllm:kv_offload_allocation_failure_total", 1)
        elif new:
            self.metrics.observe("vllm:kv_offload_cpu_allocation_size", new)
            stored_bytes = new * self.launch.chunk_tokens * kv_bytes
            if "late_store_count" in self.faults:
                asyncio.get_running_loop().call_later(0.1, self._count_transfer, "store", stored_bytes)
            else:
                self._count_transfer("store", stored_bytes)

    def _count_transfer(self, way: str, amount_bytes: int) -> None:
        """Flat families and the deprecated ones count the same event."""
        seconds = amount_bytes / 4e9
        kind = {"load": "CPU_to_GPU", "store": "GPU_to_CPU"}[way]
        self.metrics.add(f"vllm:kv_offload_{way}_bytes_total", amount_bytes)
        self.metrics.add(f"vllm:kv_offload_{way}_time_total", seconds)
        self.metrics.observe(f"vllm:kv_offload_{way}_size", amount_bytes)
        self.metrics.add("vllm:kv_offload_total_bytes_total", amount_bytes, transfer_type=kind)
        self.metrics.add("vllm:kv_offload_total_time_total", seconds, transfer_type=kind)
        self.metrics.observe("vllm:kv_offload_size", amount_bytes, transfer_type=kind)

    # After the step: one token each.

    def _emit(self) -> None:
        self.metrics.observe("vllm:iteration_tokens_total", self._step_tokens)
        now = time.monotonic()
        for request in list(self.running):
            draw = blake2b(request.answer_seed + bytes([len(request.outputs) % 256]), digest_size=2).digest()
            token = PRINTABLE[int.from_bytes(draw) % len(PRINTABLE)]
            request.outputs.append(token)
            self.metrics.add("vllm:generation_tokens_total", 1)
            if len(request.outputs) == 1:
                request.first_token = now
                self._count_prompt(request)
            else:
                self.metrics.observe("vllm:inter_token_latency_seconds", now - request.last_token)
            request.last_token = now
            short = "short_output" in self.faults and len(request.outputs) >= max(1, request.max_tokens - 1)
            short = short and request.max_tokens > 1
            stopped = short or len(request.outputs) == request.stop_after
            if stopped or len(request.outputs) >= request.max_tokens:
                request.finish_reason = "stop" if stopped else "length"
                self._finish(request)
            request.emitted.put_nowait(token)
            if self.dead:
                return

    def _count_prompt(self, request: Request) -> None:
        prompt, local, external = len(request.prompt), request.local_tokens, request.external_tokens
        add = self.metrics.add
        add("vllm:prompt_tokens_total", prompt)
        add("vllm:prefix_cache_queries_total", prompt)
        add("vllm:prefix_cache_hits_total", local)
        if self.tier:
            add("vllm:external_prefix_cache_queries_total", prompt - local)
            add("vllm:external_prefix_cache_hits_total", external)
        add("vllm:prompt_tokens_by_source_total", prompt - local - external, source="local_compute")
        add("vllm:prompt_tokens_by_source_total", local, source="local_cache_hit")
        add("vllm:prompt_tokens_by_source_total", external, source="external_kv_transfer")
        add("vllm:prompt_tokens_cached_total", local + external)
        add("vllm:prompt_tokens_cached_by_source_total", local, source="device")
        add("vllm:prompt_tokens_cached_by_source_total", external, source="host")
        self.metrics.observe("vllm:time_to_first_token_seconds", request.first_token - request.arrived)

    def _finish(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.release(request.blocks)
        self.finished += 1
        outputs = len(request.outputs)
        decode = request.last_token - request.first_token
        observed = {
            "request_prompt_tokens": len(request.prompt),
            "request_generation_tokens": outputs,
            "request_max_num_generation_tokens": outputs,
            "request_params_n": 1,
            "request_params_max_tokens": request.max_tokens,
            "request_time_per_output_token_seconds": decode / max(1, outputs - 1),
            "e2e_request_latency_seconds": request.last_token - request.arrived,
            "request_queue_time_seconds": request.scheduled - request.arrived,
            "request_inference_time_seconds": request.last_token - request.scheduled,
            "request_prefill_time_seconds": request.first_token - request.scheduled,
            "request_decode_time_seconds": decode,
            "request_num_preemptions": request.preemptions,
            "request_prefill_kv_computed_tokens": (
                len(request.prompt) - request.local_tokens - request.external_tokens
            ),
        }
        for name, value in observed.items():
            self.metrics.observe(f"vllm:{name}", value)
        self.metrics.add("vllm:request_success_total", 1, finished_reason=request.finish_reason or "")
        self._act_out_faults()

    def _act_out_faults(self) -> None:
        if "connector_in_control" in self.faults and self.tier is None:
            self._count_transfer("load", self.block * self.launch.kv_bytes_per_token)
        if self.faults.reached("counter_reset", self.finished) and not self._reset_done:
            self._reset_done = True
            self.metrics.restart(time.time())
        if self.faults.reached("die_after", self.finished):
            # A moment, so that the last answer still reaches its client.
            asyncio.get_running_loop().call_later(0.05, self.on_kill)
        if self.faults.reached("engine_dead_after", self.finished) and not self.dead:
            self.dead = True
            for request in [*self.running, *self.waiting]:
                request.emitted.put_nowait(None)
            self.running, self.waiting = [], deque()
            self.on_dead()

    def page(self) -> str:
        """The /metrics page of now."""
        self.metrics.put("vllm:num_requests_running", len(self.running))
        self.metrics.put("vllm:num_requests_waiting", len(self.waiting))
        self.metrics.put("vllm:num_requests_waiting_by_reason", len(self.waiting), reason="capacity")
        self.metrics.put("vllm:kv_cache_usage_perc", self.pool.usage)
        return self.metrics.page()
