"""Blocks and chunks: does the workload evict what it must, and does the tier hold what it must? Pure.

Sources: vLLM's block pool keeps one block in reserve; a request takes ceil((prompt + output − 1) / block) blocks;
eviction is LRU; the tier mirrors the GPU, so a cyclic set one prompt too large returns nothing.
"""

import math

from msgspec import Struct

from kvtrial.record.plan import Capacity, PhasePlan


class WorkingSet(Struct, frozen=True):
    """What a run's phases need.

    `pressure`: pressure phase → (prompts, blocks a prompt). `resident_blocks`: phase that must be answered by the GPU
    cache → blocks it asks for. Chunks are counted over the whole run, every salt; `tier_chunks` None: no tier.
    """

    pressure: dict[str, tuple[int, int]]
    resident_blocks: dict[str, int]
    stored_chunks: int
    tier_chunks: int | None
    prompt_tokens: list[int]


def request_blocks(prompt_tokens: int, output_tokens: int, block_tokens: int) -> int:
    """GPU blocks that a request takes at its end."""
    return math.ceil((prompt_tokens + output_tokens - 1) / block_tokens)


def tier_chunks(tier_bytes: int, chunk_tokens: int, kv_bytes_per_token: int) -> int:
    """Whole chunks that a tier holds."""
    return tier_bytes // (chunk_tokens * kv_bytes_per_token)


def is_pressure(phase: str) -> bool:
    """Phases named `pressure` or `…_pressure` are those that push a prefix out of the GPU cache."""
    return phase == "pressure" or phase.endswith("_pressure")


def is_resident(phase: str) -> bool:
    """Phases that the GPU cache must answer: `gpu_hit` and those of a set that fits it."""
    return phase == "gpu_hit" or (phase.startswith("fits") and phase.endswith("return"))


def working_set(phases: list[PhasePlan], capacity: Capacity, arm: str) -> WorkingSet:
    """What the phases of a run need, for the tier of `arm`."""
    chunk = capacity.chunk_tokens.get(arm)
    stored: set[tuple[str, str, int]] = set()
    chunks = 0
    pressure: dict[str, tuple[int, int]] = {}
    resident: dict[str, int] = {}
    for phase in phases:
        tokens = phase.prompts.tokens
        blocks = request_blocks(tokens, phase.max_tokens, capacity.block_tokens)
        if is_pressure(phase.name):
            pressure[phase.name] = (len(phase.indices), blocks)
        if is_resident(phase.name):
            resident[phase.name] = blocks * len(set(phase.indices))
        for index in phase.indices:
            key = (phase.salt, phase.prompts.seed, index)
            if key not in stored:
                stored.add(key)
                chunks += tokens // chunk if chunk else 0
    return WorkingSet(
        pressure=pressure,
        resident_blocks=resident,
        stored_chunks=chunks,
        tier_chunks=tier_chunks(capacity.tier_bytes[arm], chunk, capacity.kv_bytes_per_token) if chunk else None,
        prompt_tokens=sorted({phase.prompts.tokens for phase in phases}),
    )
