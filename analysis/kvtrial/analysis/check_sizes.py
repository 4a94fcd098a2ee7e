"""Whether the CPU tier's size makes sense beside the GPU's KV cache, /dev/shm and the host's memory."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvtrial.analysis.check_connector import CPU_BLOCK_MULTIPLE
from kvtrial.analysis.launch_arm import CPU_BLOCK_TOKENS, Arm, Finding
from kvtrial.analysis.reserve import GIB, ram_reserve
from kvtrial.record.errors import UnusableInput
from kvtrial.record.hazards import DEFAULT_SPEC
from kvtrial.record.launch import Tier, human_int
from kvtrial.record.versions import within

GIB_SUSPICION_BYTES = 65536
MOST_TIER_BYTES = 2**50
TIER_OVER_GPU_COMFORT = 1.5
OVERRIDE_IS_LOOKED_AT = "0.20"
"""From here the engine looks whether one request fits overridden blocks; 0.19.1 does not."""

_IF_WHOLE = ", if every layer attends to the whole context (layers with a sliding window or a state take less)"


def check_sizes(arm: Arm, host: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings on an arm's sizes, compared in tokens where the model's bytes per token are known."""
    if arm.backend == "cpu" and arm.block_tokens % CPU_BLOCK_MULTIPLE:
        yield Finding(
            "block_size_not_multiple",
            "refuse",
            arm.name,
            f"--block-size {arm.block_tokens} is not a multiple of {CPU_BLOCK_MULTIPLE}; the CPU engine ends in "
            f"'No common block size for {arm.block_tokens}'.",
            {"block_size": arm.block_tokens, "multiple": CPU_BLOCK_MULTIPLE},
            f"Give --block-size {CPU_BLOCK_MULTIPLE}, 64 or {CPU_BLOCK_TOKENS}.",
        )
    tier = arm.tier
    if tier is not None:
        yield from _check_tier(arm, tier, host)
    yield from _check_length(arm, host)


def _check_tier(arm: Arm, tier: Tier, host: Mapping[str, Any]) -> Iterator[Finding]:
    if _size_is_missing(arm):
        yield Finding(
            "cpu_bytes_missing",
            "refuse",
            arm.name,
            f"{tier.connector} is given without cpu_bytes_to_use (0 counts as missing); the engine would end in "
            "'cpu_bytes_to_use must be specified in kv_connector_extra_config'.",
            {},
            "Give cpu_bytes_to_use in bytes, for all workers together, such as 8589934592 for 8 GiB.",
        )
    elif tier.cpu_bytes is not None and not 0 < tier.cpu_bytes <= MOST_TIER_BYTES:
        yield Finding(
            "unusable_value",
            "refuse",
            arm.name,
            f"cpu_bytes_to_use={str(tier.cpu_bytes)[:40]} is no size of a CPU tier: those have 1 to {MOST_TIER_BYTES} "
            "bytes (1 PiB).",
            {"most_bytes": MOST_TIER_BYTES},
            "Give bytes, for all workers together, such as 8589934592 for 8 GiB.",
        )
        return
    if not tier.cpu_bytes:
        return
    if tier.connector == "OffloadingConnector" and within(arm.version, "0.14", None):
        yield from _check_capacity(arm, tier.cpu_bytes)
    elif tier.connector in ("OffloadingConnector", "SimpleCPUOffloadConnector"):
        yield Finding(
            "tier_not_compared",
            "warn",
            arm.name,
            f"How {tier.connector} of vLLM {arm.version} lays out its {tier.cpu_bytes} bytes was not read, so whether "
            "that is more than the GPU's KV cache was not checked.",
            {"cpu_bytes_to_use": tier.cpu_bytes},
            "Make the tier clearly larger than the GPU's KV cache (2x or more).",
        )
    yield from _check_room(arm, tier.cpu_bytes, host)


def _size_is_missing(arm: Arm) -> bool:
    tier = arm.tier
    return (
        tier is not None
        and tier.connector == "OffloadingConnector"
        and within(arm.version, "0.14", None)
        and not tier.extra.get("cpu_bytes_to_use")
        and "num_cpu_blocks" not in tier.extra
    )


def _check_capacity(arm: Arm, tier_bytes: int) -> Iterator[Finding]:
    chunk = arm.chunk_bytes
    guess = f"; did you mean {tier_bytes} GiB ({tier_bytes * GIB})?" if 0 < tier_bytes <= GIB_SUSPICION_BYTES else ""
    if chunk is not None and tier_bytes < chunk:
        yield Finding(
            "tier_below_one_block",
            "refuse",
            arm.name,
            f"cpu_bytes_to_use={tier_bytes} is {tier_bytes} bytes, less than one chunk of {arm.chunk_tokens} "
            f"tokens ({chunk} bytes): the tier would hold 0 "
            f"chunks and vLLM says nothing{guess or '.'}",
            {
                "cpu_bytes_to_use": tier_bytes,
                "chunk_bytes": chunk,
                "chunks": 0,
                "bytes_if_gib": tier_bytes * GIB if guess else None,
            },
            f"Give bytes: {tier_bytes * GIB}."
            if guess
            else "Give a tier of many chunks, larger than the GPU's KV cache.",
        )
    if guess and chunk is None:
        # No model's chunk is as small as this, whatever the model is.
        yield Finding(
            "tier_below_one_block",
            "refuse",
            arm.name,
            f"cpu_bytes_to_use={tier_bytes} is {tier_bytes} bytes, less than one chunk of {arm.chunk_tokens} tokens of "
            f"any model read here: the tier would hold 0 chunks and vLLM says nothing{guess}",
            {"cpu_bytes_to_use": tier_bytes, "chunks": 0, "bytes_if_gib": tier_bytes * GIB},
            f"Give bytes: {tier_bytes * GIB}.",
        )
    if guess:
        yield Finding(
            "cpu_bytes_looks_like_gib",
            "refuse",
            arm.name,
            f"cpu_bytes_to_use={tier_bytes} is {tier_bytes} bytes{guess}",
            {"cpu_bytes_to_use": tier_bytes, "bytes_if_gib": tier_bytes * GIB},
            f"Give bytes: {tier_bytes * GIB}.",
        )
    if chunk is None and not guess:
        why, do = arm.bytes_missing
        yield Finding(
            "tier_not_compared",
            "warn",
            arm.name,
            f"How many bytes of KV cache a token of {arm.parsed.model or 'the model'} takes is not known ({why}), so "
            f"whether the tier of {tier_bytes} bytes holds a chunk, and more tokens than the GPU's KV cache, was not "
            "checked.",
            {"cpu_bytes_to_use": tier_bytes},
            do,
        )
    if guess or chunk is None or tier_bytes < chunk:
        return
    yield from _check_against_gpu(arm, tier_bytes // chunk)


def _check_against_gpu(arm: Arm, chunks: int) -> Iterator[Finding]:
    tier_tokens = chunks * arm.chunk_tokens
    gpu_blocks = _gpu_blocks(arm)
    if gpu_blocks is None:
        yield Finding(
            "gpu_kv_not_pinned",
            "warn",
            arm.name,
            f"The GPU's KV cache follows from the memory left over, so whether the tier of {tier_tokens} tokens is "
            "larger can't be told beforehand, and arms may "
            "get different sizes.",
            {"tier_tokens": tier_tokens},
            "Pin --kv-cache-memory-bytes (or --num-gpu-blocks-override) in all arms.",
        )
        return
    block = arm.block_tokens
    gpu_tokens = gpu_blocks * block
    numbers = {
        "tier_blocks": tier_tokens // block,
        "tier_tokens": tier_tokens,
        "gpu_kv_blocks": gpu_blocks,
        "gpu_kv_tokens": gpu_tokens,
        "kv_bytes_per_token": arm.kv_bytes_per_token,
    }
    sizes = (
        f"the tier holds {tier_tokens // block} blocks = {tier_tokens} tokens, "
        f"the GPU's KV cache {gpu_blocks} blocks = {gpu_tokens} tokens"
    )
    if tier_tokens <= gpu_tokens:
        yield Finding(
            "tier_smaller_than_gpu_kv",
            "refuse",
            arm.name,
            f"The CPU tier is not larger than the GPU's KV cache: {sizes}; stores are immediate and mirror the "
            "GPU, so such a tier adds no hits and the "
            "trial can't show a gain.",
            numbers,
            "Make the tier clearly larger than the GPU's KV cache (2x or more), or shrink --kv-cache-memory-bytes "
            "in all arms.",
        )
    elif tier_tokens < TIER_OVER_GPU_COMFORT * gpu_tokens:
        yield Finding(
            "tier_leaves_no_room",
            "warn",
            arm.name,
            f"The CPU tier is less than {TIER_OVER_GPU_COMFORT} times the GPU's KV cache: {sizes}; evicting "
            "prompts surely and staying below 0.8 of the tier does "
            "not fit.",
            numbers,
            "Make the tier 2x the GPU's KV cache or more, or shrink --kv-cache-memory-bytes in all arms.",
        )


def _gpu_blocks(arm: Arm) -> int | None:
    override = arm.parsed.size("num-gpu-blocks-override")
    if override is not None:
        return override
    kv_bytes = arm.parsed.size("kv-cache-memory-bytes")
    if kv_bytes is None or arm.kv_bytes_per_token is None:
        return None
    return kv_bytes * arm.workers // (arm.kv_bytes_per_token * arm.block_tokens)


def _check_length(arm: Arm, host: Mapping[str, Any]) -> Iterator[Finding]:
    """A request of --max-model-len tokens must fit the KV cache; the engine looks at that when it starts."""
    length, each = _asked_length(arm), arm.kv_bytes_per_token
    if length is None:
        return
    blocks, needed = _gpu_blocks(arm), -(-length // arm.block_tokens)
    numbers: dict[str, Any] = {"max_model_len": length, "blocks_needed": needed, "kv_bytes_per_token": each}
    do = "Lower --max-model-len in all arms, or give the KV cache more memory."
    if blocks is None:
        most = _most_kv_tokens(arm, host)
        if most is None or length <= most:
            return
        share = _share_of_gpu(arm)
        yield Finding(
            "max_model_len_over_kv_cache",
            "refuse" if arm.whole_context else "warn",
            arm.name,
            f"--max-model-len {length} is more than the GPU's KV cache can hold: {host['gpu_memory_mib']} MiB a GPU x "
            f"{share:g} x {arm.workers} are at most {most} tokens of {each} bytes, before the weights "
            f"take their part; the engine would not start{_IF_WHOLE if not arm.whole_context else ''}.",
            numbers | {"gpu_kv_tokens_at_most": most, "gpu_memory_utilization": share},
            do,
        )
        return
    if needed <= blocks:
        return
    tokens = blocks * arm.block_tokens
    overridden = arm.parsed.text("num-gpu-blocks-override") is not None
    looks = not overridden or within(arm.version, OVERRIDE_IS_LOOKED_AT, None)
    certain = overridden or arm.whole_context
    if_whole = "" if certain else _IF_WHOLE
    numbers |= {"gpu_kv_blocks": blocks, "gpu_kv_tokens": tokens}
    yield Finding(
        "max_model_len_over_kv_cache",
        "refuse" if looks and certain else "warn",
        arm.name,
        f"--max-model-len {length} takes {needed} blocks of {arm.block_tokens} tokens, the GPU's KV cache has {blocks} "
        f"({tokens} tokens"
        + ("" if overridden else f", by {each} bytes a token")
        + "); "
        + (
            f"the engine ends in 'To serve at least one request with the model's max seq len ({length})'{if_whole}."
            if looks
            else f"vLLM before {OVERRIDE_IS_LOOKED_AT} starts all the same, and a request longer than that never runs."
        ),
        numbers,
        do,
    )


def length_not_checked(arm: Arm, host: Mapping[str, Any]) -> str | None:
    """A sentence where it is not known whether a request of the arm's greatest length fits its KV cache."""
    length, given = _asked_length(arm), arm.parsed.text("max-model-len")
    if length is None and given is not None:
        return None
    what = "the model's own greatest length (no --max-model-len is given)" if length is None else f"{length} tokens"
    blocks = _gpu_blocks(arm)
    if blocks is not None and length is not None:
        return _by_ranks(arm, length, blocks)
    if blocks is not None:
        return f"Not known: whether {what} fits the GPU's KV cache."
    if length is not None and (most := _most_kv_tokens(arm, host)) is not None and length > most:
        return None
    why = (
        f"how many bytes a token takes is not known ({arm.bytes_missing[0]})"
        if arm.kv_bytes_per_token is None
        else "its size follows from the memory left over; --kv-cache-memory-bytes pins it"
    )
    return f"Not known: whether {what} fits the KV cache: {why}."


def _by_ranks(arm: Arm, length: int, blocks: int) -> str | None:
    """A sentence where a length fits only if tensor parallelism splits the KV cache, which it does not always do."""
    ranks = arm.parsed.size("tensor-parallel-size") or 1
    each, needed = blocks // ranks, -(-length // arm.block_tokens)
    if arm.parsed.text("num-gpu-blocks-override") is not None or not each < needed <= blocks:
        return None
    return (
        f"Not known: whether {length} tokens fits the KV cache: it does where each of {ranks} ranks holds a part of a "
        f"token; with MLA, or with fewer KV heads than ranks, ranks hold copies, in the worst case {each} blocks = "
        f"{each * arm.block_tokens} tokens."
    )


def _asked_length(arm: Arm) -> int | None:
    """--max-model-len in tokens; None where it is not given, or left to the engine (auto, -1)."""
    given = arm.parsed.text("max-model-len")
    if given is None or given.strip().lower() in ("auto", "-1"):
        return None
    length = human_int(given, "--max-model-len")
    if length < 1:
        raise UnusableInput(f"Arm {arm.name}: --max-model-len={given} can't be used; give 1 or more, or auto.")
    return length


def _most_kv_tokens(arm: Arm, host: Mapping[str, Any]) -> int | None:
    """Tokens that the KV cache holds at most, were there no weights; None where that can't be told."""
    memory = host.get("gpu_memory_mib")
    if arm.backend != "cuda" or memory is None or arm.kv_bytes_per_token is None:
        return None
    return int(int(memory) * 2**20 * _share_of_gpu(arm)) * arm.workers // arm.kv_bytes_per_token


def _share_of_gpu(arm: Arm) -> float:
    """--gpu-memory-utilization, or its default: 0.9 until 0.19, 0.92 since."""
    given = arm.parsed.text("gpu-memory-utilization")
    try:
        return float(given) if given is not None else 0.92 if within(arm.version, "0.20", None) else 0.9
    except ValueError:
        return 1.0


def _check_room(arm: Arm, tier_bytes: int, host: Mapping[str, Any]) -> Iterator[Finding]:
    shm_free, ram = host.get("dev_shm_free_bytes"), host.get("ram_available_bytes")
    since = "0.27" if arm.tier and arm.tier.extra.get("spec_name", DEFAULT_SPEC) == DEFAULT_SPEC else "0.22"
    in_shm = (
        arm.backend == "cuda"
        and arm.tier is not None
        and arm.tier.connector == "OffloadingConnector"
        and not arm.tier.extra.get("spec_module_path")
        and within(arm.version, since, None)
    )
    if in_shm and shm_free is not None and int(shm_free) < tier_bytes:
        says = (
            "'OSError: [Errno 14] Bad address'"
            if within(arm.version, None, "0.28")
            else "'Insufficient space in /dev/shm'"
        )
        yield Finding(
            "dev_shm_too_small",
            "refuse",
            arm.name,
            f"The tier of {tier_bytes} bytes ({tier_bytes / GIB:.1f} GiB) is a file in /dev/shm from {since}, "
            f"where {shm_free} bytes "
            f"({int(shm_free) / GIB:.1f} GiB) are free; {arm.version} ends in {says}.",
            {"cpu_bytes_to_use": tier_bytes, "dev_shm_free_bytes": int(shm_free)},
            "Enlarge /dev/shm (container --ipc=host or --shm-size, else remount) above the tier, remove left-over "
            "vllm_offload_*.mmap that no process maps, or "
            "take a smaller tier.",
        )
    if ram is None:
        return
    left = int(ram) - tier_bytes
    declared = host.get("ram_reserve_bytes")
    # Where the whole is not known, a tenth of what is available is the least that it can be.
    reserve = ram_reserve(int(host.get("ram_total_bytes") or ram), None if declared is None else int(declared))
    if left < reserve:
        yield Finding(
            "host_memory_too_small",
            "refuse",
            arm.name,
            f"Of {ram} bytes of available memory ({int(ram) / GIB:.1f} GiB) the tier of {tier_bytes} bytes leaves "
            f"{left} ({left / GIB:.1f} GiB), less than the "
            f"reserve of {reserve} ({reserve / GIB:.1f} GiB).",
            {
                "ram_available_bytes": int(ram),
                "cpu_bytes_to_use": tier_bytes,
                "left_bytes": left,
                "reserve_bytes": reserve,
            },
            "Take a smaller tier, or free memory on the host.",
        )
