"""The worker: copies KV blocks between the engine's KV tensors and a buffer, both in host memory.

Words as in vLLM: a *block* is the engine's unit (`block_size` tokens), a *chunk* is the tier's unit
(`blocks_per_chunk` blocks). A transfer names device blocks one by one and tier chunks as wholes; where its first block
lies inside a chunk, the blocks of the chunk before it are skipped.
"""

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

# Below "vllm.", since only loggers under it reach the engine's log.
logger = init_logger("vllm.kvtrial_host_offload")

CORRUPT_VARIABLE = "KVTRIAL_HOST_OFFLOAD_CORRUPT"

Ids = npt.NDArray[np.int64]


class GroupTransfer(NamedTuple):
    """The blocks of one KV cache group in a transfer; both arrays have one entry a block, in the same order."""

    group: int
    device_blocks: Ids
    host_blocks: Ids


def corruption_is_asked_for(environment: Mapping[str, str]) -> bool:
    """Whether loads plant zeros. Raises ValueError on a value that is neither empty, 0 nor 1."""
    value = environment.get(CORRUPT_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(
            f"{CORRUPT_VARIABLE}={value} is not understood; 1 plants zeros on every load, 0 or unset does not."
        )
    return value == "1"


def group_transfers(device: GPULoadStoreSpec, chunks: Ids, blocks_per_chunk: int) -> Iterator[GroupTransfer]:
    """Pair each device block of a transfer with its block in the tier, group by group.

    `chunks`: tier chunk ids of all groups, in group order, each group taking as many as its blocks touch. Raises
    ValueError when the two sides do not cover each other, which would be a changed interface of vLLM.
    """
    blocks = device.block_ids.astype(np.int64)
    taken_blocks = taken_chunks = 0
    for group, (size, first) in enumerate(zip(device.group_sizes, device.block_indices, strict=True)):
        if size == 0:
            continue
        skipped = first % blocks_per_chunk
        touched = -(-(skipped + size) // blocks_per_chunk)
        own_chunks = chunks[taken_chunks : taken_chunks + touched]
        rows = (own_chunks[:, None] * blocks_per_chunk + np.arange(blocks_per_chunk)).ravel()[skipped : skipped + size]
        yield GroupTransfer(group, blocks[taken_blocks : taken_blocks + size], rows)
        taken_blocks += size
        taken_chunks += touched
    if (taken_blocks, taken_chunks) != (len(blocks), len(chunks)):
        raise ValueError(
            f"a transfer of {len(blocks)} blocks and {len(chunks)} chunks covers {taken_blocks} and {taken_chunks}; "
            "this vLLM speaks another offloading interface than 0.32."
        )


def pages_of(cache: CanonicalKVCacheTensor) -> torch.Tensor:
    """A view of one KV tensor as bytes, shape (blocks, page_size_bytes). Never a copy: writes reach the engine."""
    tensor = cache.tensor.view(torch.int8)
    if tensor.ndim == 2 and tensor.shape[1] == cache.page_size_bytes:
        return tensor
    return tensor.view(-1, cache.page_size_bytes)


class HostCopyWorker(OffloadingWorker):
    """Stores to and loads from a buffer in host memory; each transfer is complete when its submission returns.

    `kv_caches`: the engine's KV tensors; `blocks_per_chunk` and `chunks`: the tier's unit and size. The buffer has
    `chunks * blocks_per_chunk` pages for each tensor and is committed at once, so that a machine with too little
    memory fails at the start and not inside a measurement.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, chunks: int) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._references = kv_caches.group_data_refs
        self._device = [pages_of(cache) for cache in kv_caches.tensors]
        self._host = [
            torch.empty(chunks * blocks_per_chunk, pages.shape[1], dtype=torch.int8).fill_(0) for pages in self._device
        ]
        self._corrupt = corruption_is_asked_for(os.environ)
        self._finished: deque[TransferResult] = deque()
        logger.info(
            "kvtrial out-of-tree host copy (HostOffloadingSpec): host memory to host memory, no PCIe, no GPU; "
            "%d chunks of %d blocks, %d KV tensors, %d bytes",
            chunks,
            blocks_per_chunk,
            len(self._device),
            sum(pages.nbytes for pages in self._host),
        )
        if self._corrupt:
            logger.warning("%s=1: every load plants zeros instead of the stored KV, on purpose", CORRUPT_VARIABLE)

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Copy the engine's blocks into the tier's chunks."""
        return self._transfer(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Copy the tier's chunks into the engine's blocks."""
        return self._transfer(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        """The transfers finished since the last call."""
        finished = list(self._finished)
        self._finished.clear()
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing to wait for: a transfer is complete when it has been submitted."""

    def _transfer(self, job_id: int, device: GPULoadStoreSpec, tier: LoadStoreSpec, store: bool) -> bool:
        if not isinstance(tier, BlockIDsLoadStoreSpec):
            raise TypeError(f"the tier is addressed by {type(tier).__name__}, not by chunk ids as in vLLM 0.32")
        started = time.perf_counter()
        moved_bytes = 0
        for transfer in group_transfers(device, tier.block_ids.astype(np.int64), self._blocks_per_chunk):
            device_rows, host_rows = torch.from_numpy(transfer.device_blocks), torch.from_numpy(transfer.host_blocks)
            for reference in self._references[transfer.group]:
                size = reference.page_size_bytes
                device_pages = self._device[reference.tensor_idx][:, :size]
                host_pages = self._host[reference.tensor_idx][:, :size]
                if store:
                    host_pages[host_rows] = device_pages[device_rows]
                elif self._corrupt:
                    device_pages[device_rows] = 0
                else:
                    device_pages[device_rows] = host_pages[host_rows]
                moved_bytes += len(device_rows) * size
        elapsed = time.perf_counter() - started
        self._finished.append(
            TransferResult(job_id=job_id, success=True, transfer_size=moved_bytes, transfer_time=elapsed)
        )
        return True
