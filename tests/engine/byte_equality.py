"""Random stores and loads through the host-copy worker, against a plain dictionary; run by the engine's Python.

    byte_equality.py [--cases N] [--seed S]

Exit status 0: every byte equal. 1: the first difference, in one line. Not a test file: torch and vLLM are only in the
engine's virtual environment, and `test_host_offload.py` starts this there.
"""

import argparse
import random
import sys

import torch
from kvtrial_host_offload import HostCopyWorker
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

Groups = list[tuple[int, list[int], list[int]]]  # first block's index, device blocks, tier chunks


class Different(Exception):
    """Two sides that must be equal byte for byte are not."""


class Case:
    """One engine's KV tensors, one worker, and the dictionary that says what the tier must hold."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.blocks, self.chunks = dice.randint(4, 24), dice.randint(3, 12)
        self.blocks_per_chunk = dice.choice([1, 2, 3, 4, 8])
        pages = [dice.choice([8, 24, 64]) for _ in range(dice.randint(1, 3))]
        shapes = [(self.blocks, page) if dice.random() < 0.5 else (self.blocks, 2, page // 2) for page in pages]
        self.tensors = [torch.zeros(shape, dtype=torch.int8) for shape in shapes]
        # A layer may use less than its padded page: what lies behind must not be touched.
        self.references = [
            [
                (index, dice.choice([page, page - 4]))
                for index, page in enumerate(pages)
                if group == 0 or dice.random() < 0.7
            ]
            for group in range(dice.randint(1, 3))
        ]
        self.worker = HostCopyWorker(
            CanonicalKVCaches(
                tensors=[
                    CanonicalKVCacheTensor(tensor, page) for tensor, page in zip(self.tensors, pages, strict=True)
                ],
                group_data_refs=[
                    [CanonicalKVCacheRef(tensor_idx=index, page_size_bytes=size) for index, size in references]
                    for references in self.references
                ],
            ),
            self.blocks_per_chunk,
            self.chunks,
        )
        self.tier: dict[tuple[int, int, int], bytes] = {}
        self.device = [[bytes(page)] * self.blocks for page in pages]

    def scribble(self) -> None:
        """Let the engine write random bytes into some blocks."""
        for index, tensor in enumerate(self.tensors):
            for block in self.dice.sample(range(self.blocks), self.dice.randint(1, self.blocks)):
                content = self.dice.randbytes(len(self.device[index][block]))
                row = torch.frombuffer(bytearray(content), dtype=torch.int8)
                tensor[block] = row.view(tensor[block].shape)
                self.device[index][block] = content

    def some_groups(self) -> Groups:
        """A transfer's blocks and chunks: per group a run of blocks that may begin and end inside a chunk."""
        free_blocks = self.dice.sample(range(self.blocks), self.blocks)
        free_chunks = self.dice.sample(range(self.chunks), self.chunks)
        groups: Groups = []
        for _ in self.references:
            first = self.dice.randint(0, 40)
            room = min(len(free_blocks), len(free_chunks) * self.blocks_per_chunk - first % self.blocks_per_chunk)
            size = self.dice.randint(0, max(room, 0))
            touched = len({(first + offset) // self.blocks_per_chunk for offset in range(size)})
            groups.append(
                (first, [free_blocks.pop() for _ in range(size)], [free_chunks.pop() for _ in range(touched)])
            )
        return groups

    def transfer(self, job: int, store: bool) -> None:
        """One transfer by the worker and by the dictionary; then both sides must agree."""
        groups = self.some_groups()
        device = GPULoadStoreSpec(
            [block for _, blocks, _ in groups for block in blocks],
            group_sizes=[len(blocks) for _, blocks, _ in groups],
            block_indices=[first for first, _, _ in groups],
        )
        tier = CPULoadStoreSpec([chunk for _, _, chunks in groups for chunk in chunks])
        submitted = self.worker.submit_store(job, device, tier) if store else self.worker.submit_load(job, tier, device)
        moved_bytes = self.expect(groups, store)
        (result,) = self.worker.get_finished()
        if not (submitted and result.success and (result.job_id, result.transfer_size) == (job, moved_bytes)):
            raise Different(f"job {job} reports {result}, expected {moved_bytes} bytes")
        self.compare(f"after job {job} ({'store' if store else 'load'})")

    def expect(self, groups: Groups, store: bool) -> int:
        """The same transfer, block by block, in the dictionary; returns the bytes that it moves."""
        moved_bytes = 0
        for references, (first, blocks, chunks) in zip(self.references, groups, strict=True):
            for offset, block in enumerate(blocks):
                ordinal = (first + offset) // self.blocks_per_chunk - first // self.blocks_per_chunk
                place = chunks[ordinal] if chunks else -1, (first + offset) % self.blocks_per_chunk
                for index, size in references:
                    page = self.device[index][block]
                    kept = self.tier.get((index, *place), bytes(len(page)))
                    if store:
                        self.tier[(index, *place)] = page[:size] + kept[size:]
                    else:
                        self.device[index][block] = kept[:size] + page[size:]
                    moved_bytes += size
        return moved_bytes

    def compare(self, when: str) -> None:
        """Raise Different at the first block that is not what the dictionary says."""
        for index, tensor in enumerate(self.tensors):
            for block in range(self.blocks):
                if tensor[block].contiguous().view(-1).numpy().tobytes() != self.device[index][block]:
                    raise Different(f"tensor {index} block {block} differs {when}")


def main() -> int:
    """Entry point. 0 equal, 1 different."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    for number in range(arguments.seed, arguments.seed + arguments.cases):
        case = Case(random.Random(number))
        try:
            for job in range(30):
                case.scribble()
                case.transfer(job, store=case.dice.random() < 0.6)
        except Different as difference:
            print(f"case {number}: {difference}")
            return 1
    print(f"{arguments.cases} cases equal")
    return 0


if __name__ == "__main__":
    sys.exit(main())
