"""Blocks and chunks: does the workload evict what it must, and does the tier hold what it must? Pure.

Sources: vLLM's block pool keeps one block in reserve; a request takes ceil((prompt + output − 1) / block) blocks;
eviction is LRU; the tier mirrors the GPU, so a cyclic set one prompt too large returns nothing.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Literal

from msgspec import Struct

from kvtrial.record.plan import Capacity, PhasePlan

TierScope = Literal["run", "block"]
"""What the tier has to hold at once: all that a run stores, or the largest of its blocks of phases."""


class WorkingSet(Struct, frozen=True):
    """What a run's phases need.

    `pressure`: pressure phase → (prompts, blocks a prompt). `resident_blocks`: phase that must be answered by the GPU
    cache → blocks it asks for. `stored_chunks` counts every salt, in the whole run or in the largest block of phases;
    `tier_chunks` None: no tier.
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
    """Phases named `pressure`, `pressure_…` or `…_pressure` are those that push a prefix out of the GPU cache."""
    return phase == "pressure" or phase.endswith("_pressure") or phase.startswith("pressure_")


def is_resident(phase: str) -> bool:
    """Phases that the GPU cache must answer: `gpu_hit` and those of a set that fits it."""
    if phase == "gpu_hit" or phase.startswith("gpu_hit_"):
        return True
    return phase.startswith("fits") and phase.endswith("return")


def tier_scope(declared: str, extra_config: dict[str, Any]) -> TierScope:
    """The scope that a tier of this connector configuration allows, `declared` by the protocol.

    A block of phases counts by itself only in a tier that throws out what was used longest ago: whatever earlier blocks
    left is then older than all of this block and goes first. Any other policy may keep it, so the whole run counts.
    """
    return "block" if declared == "block" and extra_config.get("eviction_policy", "lru") == "lru" else "run"


def held_at_once(stored: Iterable[tuple[str, Any, int]], scope: TierScope) -> int:
    """Chunks that a tier has to hold at once, of (block of phases, key, chunks): each key counts once, its most chunks.

    With scope `block` the largest block counts, unless a key is asked for in two blocks: its way through the tier then
    spans both, and the whole run counts.
    """
    by_block: dict[str, dict[Any, int]] = defaultdict(dict)
    for block, key, chunks in stored:
        by_block[block][key] = max(by_block[block].get(key, 0), chunks)
    whole: dict[Any, int] = {}
    for held in by_block.values():
        whole |= {key: max(chunks, whole.get(key, 0)) for key, chunks in held.items()}
    shared = sum(len(held) for held in by_block.values()) > len(whole)
    if scope == "run" or shared:
        return sum(whole.values())
    return max((sum(held.values()) for held in by_block.values()), default=0)


def working_set(phases: list[PhasePlan], capacity: Capacity, arm: str, scope: TierScope = "run") -> WorkingSet:
    """What the phases of a run need, for the tier of `arm`."""
    chunk = capacity.chunk_tokens.get(arm)
    stored: list[tuple[str, Any, int]] = []
    pressure: dict[str, tuple[int, int]] = {}
    resident: dict[str, int] = {}
    for phase in phases:
        tokens = phase.prompts.tokens
        blocks = request_blocks(tokens, phase.max_tokens, capacity.block_tokens)
        if is_pressure(phase.name):
            pressure[phase.name] = (len(phase.indices), blocks)
        if is_resident(phase.name):
            resident[phase.name] = blocks * len(set(phase.indices))
        stored += [
            (phase.block, (phase.salt, phase.prompts.seed, index), tokens // chunk if chunk else 0)
            for index in phase.indices
        ]
    return WorkingSet(
        pressure=pressure,
        resident_blocks=resident,
        stored_chunks=held_at_once(stored, scope),
        tier_chunks=tier_chunks(capacity.tier_bytes[arm], chunk, capacity.kv_bytes_per_token) if chunk else None,
        prompt_tokens=sorted({phase.prompts.tokens for phase in phases}),
    )
