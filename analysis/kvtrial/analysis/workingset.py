"""Blocks and chunks: does the workload evict what it must, and does the tier hold what it must? Pure.

Sources: vLLM's block pool keeps one block in reserve; a request takes ceil((prompt + output − 1) / block) blocks;
eviction is LRU; the tier mirrors the GPU, so a cyclic set one prompt too large returns nothing.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from kvtrial.record.plan import MixPlan, PhasePlan, TracePlan
from kvtrial.record.workload import request_shapes

TierScope = Literal["run", "block"]
"""What the tier has to hold at once: all that a run stores, or the largest of its blocks of phases."""


class PhaseNeed(Struct):
    """What the requests of a phase add up to.

    `blocks` counts the GPU blocks of every request, `distinct_blocks` (of phases that the GPU cache must answer) those
    of each prompt once. `longest_tokens`: the longest prompt with its answer, of prompts whose length is known.
    `edge_tokens`: a length that ends at the edge of a block, where the protocol states the lengths. `last_seconds`:
    when the last request is due, None in a closed loop.
    """

    requests: int = 0
    prompt_tokens: int = 0
    blocks: int = 0
    distinct_blocks: int = 0
    longest_tokens: int = 0
    edge_tokens: int | None = None
    last_seconds: float | None = None


class Held:
    """Prompts that a run stores: each once, with the most tokens of it that are asked for, and its block of phases.

    A prompt takes about 100 bytes here, so that a million can be counted.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, int] = {}
        self._held: dict[Hashable, int] = {}
        self._sharing: Counter[tuple[int, Hashable, int]] = Counter()
        self._crosses = False

    def add(self, block: str, key: Hashable, tokens: int, shared: Hashable = None, shared_tokens: int = 0) -> None:
        """Count a prompt, which begins with `shared_tokens` that all of `shared` have."""
        number = self._blocks.setdefault(block, len(self._blocks))
        before = self._held.get(key)
        if before is None:
            self._held[key] = tokens * _MOST_BLOCKS + number
            if shared_tokens:
                self._sharing[number, shared, shared_tokens] += 1
            return
        old, where = divmod(before, _MOST_BLOCKS)
        self._crosses |= where != number
        if tokens > old:
            self._held[key] = tokens * _MOST_BLOCKS + where

    def chunks(self, chunk_tokens: int, scope: TierScope) -> int:
        """Whole chunks that a tier has to hold at once.

        With scope `block` the largest block counts, unless a prompt is asked for in two blocks: its way through the
        tier then spans both, and the whole run counts.
        """
        by_block: Counter[int] = Counter()
        for held in self._held.values():
            tokens, number = divmod(held, _MOST_BLOCKS)
            by_block[number] += tokens // chunk_tokens
        for (number, _, tokens), prompts in self._sharing.items():
            by_block[number] -= (prompts - 1) * (tokens // chunk_tokens)
        return sum(by_block.values()) if scope == "run" or self._crosses else max(by_block.values(), default=0)


class RunNeeds(Struct):
    """What the phases of a run need, by phase, and what they store."""

    phases: dict[str, PhaseNeed]
    held: Held


_MOST_BLOCKS = 1 << 16


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


def held_at_once(stored: Iterable[tuple[str, Hashable, int]], scope: TierScope) -> int:
    """Chunks that a tier has to hold at once, of (block of phases, key, chunks): each key counts once, its most chunks.

    With scope `block` the largest block counts, unless a key is asked for in two blocks: its way through the tier then
    spans both, and the whole run counts.
    """
    held = Held()
    for block, key, chunks in stored:
        held.add(block, key, chunks)
    return held.chunks(1, scope)


def run_needs(phases: list[PhasePlan], block_tokens: int, folder: Path | None = None) -> RunNeeds:
    """What the phases of a run need; each of its requests is looked at once. `folder`: where traces lie.

    What a trace stores is not held against the tier: it is as large as it is, and how much the tier gave is measured.
    """
    needs = RunNeeds({}, Held())
    for phase in phases:
        need = needs.phases[phase.name] = PhaseNeed()
        distinct: dict[int, int] = {}
        for shape in request_shapes(phase, folder):
            blocks = request_blocks(shape.prompt_tokens, shape.max_tokens, block_tokens)
            need.requests += 1
            need.prompt_tokens += shape.prompt_tokens
            need.blocks += blocks
            if not shape.estimated:
                need.longest_tokens = max(need.longest_tokens, shape.prompt_tokens + shape.max_tokens)
            if shape.scheduled_seconds is not None:
                need.last_seconds = shape.scheduled_seconds
            if shape.prompt_tokens % block_tokens == 0 and isinstance(phase.workload, MixPlan | None):
                need.edge_tokens = shape.prompt_tokens
            key = _key(shape.salt, shape.identity)
            if is_resident(phase.name):
                distinct[key] = max(blocks, distinct.get(key, 0))
            if not isinstance(phase.workload, TracePlan):
                needs.held.add(phase.block, key, shape.prompt_tokens, (shape.salt, shape.shared), shape.shared_tokens)
        need.distinct_blocks = sum(distinct.values())
    return needs


def _key(salt: str, identity: str) -> int:
    """A number for a prompt in its salt: small, for there are many. Two of a million are alike once in 10^8 runs."""
    return int.from_bytes(hashlib.blake2b(f"{salt}\0{identity}".encode(), digest_size=8).digest())
