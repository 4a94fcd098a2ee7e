"""The GPU block pool and the CPU tier, with the eviction rules observed on vLLM 0.32.0."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


def extend_chain(chain: list[int], tokens: Sequence[int], block_size: int, salt: str) -> None:
    """Append to `chain` the hashes of the whole blocks of `tokens` it lacks; the salt enters the first block only."""
    for start in range(len(chain) * block_size, len(tokens) - block_size + 1, block_size):
        before: object = chain[-1] if chain else ("salt", salt)
        chain.append(hash((before, tuple(tokens[start : start + block_size]))))


class BlockPool:
    """GPU blocks: LRU over freed blocks, the tail of a prompt first, blocks without a hash before all others."""

    def __init__(self, usable_blocks: int | None) -> None:
        """`usable_blocks` is num_gpu_blocks - 1 (one is reserved); None is a pool without end."""
        self.usable_blocks = usable_blocks
        self._made = 0
        self._users: dict[int, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict()
        self._hash_of: dict[int, int] = {}
        self._block_of: dict[int, int] = {}

    @property
    def usage(self) -> float:
        """Share of the usable blocks held by requests, 0..1."""
        return len(self._users) / self.usable_blocks if self.usable_blocks else 0.0

    def cached_prefix(self, chain: Sequence[int]) -> list[int]:
        """Blocks that hold the longest cached beginning of the chain."""
        found: list[int] = []
        for block_hash in chain:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def take(self, cached: Sequence[int], fresh: int) -> list[int] | None:
        """Hold the cached blocks and `fresh` others; None, and nothing changed, when there are too few."""
        idle = sum(block in self._free for block in cached)
        if self.usable_blocks is not None and self.usable_blocks - len(self._users) < idle + fresh:
            return None
        for block in cached:
            self._free.pop(block, None)
            self._users[block] = self._users.get(block, 0) + 1
        return [*cached, *(self._take_one() for _ in range(fresh))]

    def _take_one(self) -> int:
        first = next(iter(self._free), None)
        unmade = self.usable_blocks is None or self._made < self.usable_blocks
        # Blocks never used stand in the queue behind freed ones without a hash and before those with one.
        if first is None or (first in self._hash_of and unmade):
            block, self._made = self._made, self._made + 1
        else:
            block = first
            del self._free[block]
            self._forget(block)
        self._users[block] = 1
        return block

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None and self._block_of.get(block_hash) == block:
            del self._block_of[block_hash]

    def name(self, blocks: Sequence[int], chain: Sequence[int]) -> None:
        """Give full blocks their hashes; content that is already cached elsewhere keeps its first block."""
        for block, block_hash in zip(blocks, chain, strict=False):
            if block not in self._hash_of and block_hash not in self._block_of:
                self._hash_of[block], self._block_of[block_hash] = block_hash, block

    def release(self, blocks: Sequence[int]) -> None:
        """End one request's hold on its blocks."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                del self._users[block]
                self._free[block] = None
                if block not in self._hash_of:
                    self._free.move_to_end(block, last=False)

    def reset(self) -> bool:
        """Forget all content; False while a request holds blocks."""
        if self._users:
            return False
        for block in list(self._hash_of):
            self._forget(block)
        return True


class Tier:
    """The CPU tier: an LRU of whole chunks of prompts. A chunk is known by the hash of its last GPU block."""

    def __init__(self, capacity_chunks: int, chunk_tokens: int) -> None:
        self.capacity_chunks = capacity_chunks
        self.chunk_tokens = chunk_tokens
        self._chunks: OrderedDict[int, None] = OrderedDict()

    def loadable_tokens(self, keys: Sequence[int], local_tokens: int, cap_tokens: int | None) -> int:
        """Tokens beyond the local hit that whole chunks can supply; less than one chunk's worth is not loaded.

        The order of the steps is that of OffloadingConnector in vLLM 0.32 (`_lookup_complete_chunks`).
        """
        end = len(keys) * self.chunk_tokens
        if cap_tokens is not None:
            end = min(end, (local_tokens + cap_tokens) // self.chunk_tokens * self.chunk_tokens)
        if end - local_tokens < self.chunk_tokens:
            return 0
        first = hit = local_tokens // self.chunk_tokens
        while hit < end // self.chunk_tokens and keys[hit] in self._chunks:
            hit += 1
        return hit * self.chunk_tokens - local_tokens if hit > first else 0

    def store(self, keys: Sequence[int]) -> int | None:
        """Use and store the chunks; returns how many were new, None when they do not fit at all."""
        new = [key for key in keys if key not in self._chunks]
        if len(keys) > self.capacity_chunks and new:
            return None
        for key in reversed(keys):
            if key in self._chunks:
                self._chunks.move_to_end(key)
        for _ in range(len(self._chunks) + len(new) - self.capacity_chunks):
            self._chunks.popitem(last=False)
        for key in reversed(new):
            self._chunks[key] = None
        return len(new)

    def reset(self) -> None:
        self._chunks.clear()
