"""How large the CPU tier is beside the GPU's KV cache, from whatever says so: metrics, configuration, log. Pure."""

import msgspec

from kvtrial.analysis.observe.window import fits_tokens
from kvtrial.record.exposition import Reading

GIB = 2**30


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of both, where known. `source`: what says how large the tier is. `tokens_inferred`: by bytes a token.

    `tier_tokens_at_most`: where a token's bytes are not known, by the fewest that it can take.
    """

    tier_bytes: float | None = None
    tier_tokens: float | None = None
    gpu_bytes: float | None = None
    gpu_tokens: float | None = None
    source: str = ""
    tokens_inferred: bool = False
    tier_tokens_at_most: float | None = None

    @property
    def tier_not_larger(self) -> bool | None:
        """Whether the tier holds no more than the GPU's KV cache; None where that can't be told."""
        if self.tier_tokens is not None and self.gpu_tokens is not None:
            return self.tier_tokens <= self.gpu_tokens
        if self.tier_bytes is not None and self.gpu_bytes is not None:
            return self.tier_bytes <= self.gpu_bytes
        if self.tier_tokens_at_most is not None and self.gpu_tokens is not None:
            return True if self.tier_tokens_at_most <= self.gpu_tokens else None
        return None

    def described(self) -> str:
        """Both sizes in words; empty where they are not known."""
        if self.tier_tokens is not None and self.gpu_tokens is not None:
            about = "about " if self.tokens_inferred else ""
            bytes_ = f" ({self.tier_bytes:,.0f} B)" if self.tier_bytes else ""
            return (
                f"the tier holds {about}{self.tier_tokens:,.0f} tokens{bytes_}, the GPU's KV cache "
                f"{self.gpu_tokens:,.0f} tokens"
            )
        if self.tier_bytes is not None and self.gpu_bytes is not None:
            return f"the tier has {self.tier_bytes:,.0f} B, the GPU's KV cache {self.gpu_bytes:,.0f} B"
        if self.tier_tokens_at_most is not None and self.gpu_tokens is not None:
            return (
                f"the tier of {self.tier_bytes:,.0f} B holds at most {self.tier_tokens_at_most:,.0f} tokens by what "
                f"was stored for each, the GPU's KV cache {self.gpu_tokens:,.0f} tokens"
            )
        return ""


class Told(msgspec.Struct, frozen=True):
    """What a configuration or a log says of the tier and the model."""

    tier_bytes: float | None = None
    kv_bytes_per_token: float | None = None
    gpu_bytes: float | None = None
    gpu_tokens: float | None = None
    source: str = ""
    blocks_overridden: bool = False


def sizes_of(reading: Reading, told: Told | None = None, bytes_per_token: float | None = None) -> Sizes:
    """Sizes by the most direct word: kv_offload_config_info (0.33+), the configuration, cache_config_info.

    `bytes_per_token`: as loads and external hits of the window give it.
    """
    told = told or Told()
    cache, tier = reading.info.get("cache_config", {}), reading.info.get("offload_config", {})
    gpu_tokens = fits_tokens(reading) or told.gpu_tokens
    gpu_bytes = _number(cache.get("kv_cache_memory_bytes")) or told.gpu_bytes
    if told.blocks_overridden or _number(cache.get("num_gpu_blocks_override")):
        # The blocks are then as many as asked for, whatever memory was set aside.
        gpu_bytes = None
    tier_tokens = _number(tier.get("cpu_kv_cache_size_tokens"))
    tier_bytes = _number(tier.get("cpu_kv_cache_size_bytes"))
    if tier_tokens is None:
        chunks, blocks = _number(tier.get("cpu_num_chunks")), _number(tier.get("cpu_blocks_per_chunk"))
        block = _number(cache.get("block_size"))
        tier_tokens = chunks * blocks * block if chunks and blocks and block else None
    source = "vllm:kv_offload_config_info" if tier_tokens or tier_bytes else ""
    if tier_tokens is None and tier_bytes is None and told.tier_bytes is not None:
        tier_bytes, source = told.tier_bytes, told.source
    if tier_tokens is None and tier_bytes is None and (gib := _number(cache.get("kv_offloading_size"))):
        tier_bytes, source = gib * GIB, "kv_offloading_size in vllm:cache_config_info"
    # A page with several engines gives their load together, and each its own cache; a token's bytes are the same.
    each = told.kv_bytes_per_token or bytes_per_token or _of_pinned_cache(gpu_bytes, gpu_tokens)
    inferred = False
    if tier_tokens is None and tier_bytes is not None and each:
        tier_tokens, inferred = tier_bytes // each, True
    if gpu_tokens is None and gpu_bytes is not None and each:
        gpu_tokens = gpu_bytes // each
    least = _least_bytes_per_token(reading)
    at_most = tier_bytes // least if tier_tokens is None and tier_bytes and least else None
    return Sizes(tier_bytes, tier_tokens, gpu_bytes, gpu_tokens, source, inferred or at_most is not None, at_most)


def _least_bytes_per_token(reading: Reading) -> float | None:
    """Bytes that a token takes at least: a request stores each of its tokens once, or not at all.

    A preempted request may store again, so with preemptions there is no such bound.
    """
    stored, preemptions = reading.values.get("store_bytes"), reading.values.get("preemptions")
    tokens = [reading.values.get(role) for role in ("prompt_tokens", "generation_tokens")]
    if not stored or preemptions != 0 or None in tokens:
        return None
    total = sum(value for value in tokens if value is not None)
    return stored / total if total else None


def _of_pinned_cache(gpu_bytes: float | None, gpu_tokens: float | None) -> float | None:
    return gpu_bytes / gpu_tokens if gpu_bytes and gpu_tokens else None


def _number(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value > 0 else None
