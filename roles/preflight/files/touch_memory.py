#!/usr/bin/env python3
"""Touch memory once and give it back, on a virtual machine that is given memory only as it uses it.

    python3 touch_memory.py BYTES        prints what the kernel says of the machine's RAM before and after

Such a machine shows a small total at first, and a trial that needs more is refused: facts are taken as they are. Touch
what the trial needs (tier, model and reserve) beforehand. Standard library only.
"""

import mmap
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Protocol

PARTS = 8


class Barrier(Protocol):
    """Where all parts wait for each other."""

    def wait(self) -> int:
        """Wait for the others."""
        ...


def touch(size: int, barrier: Barrier) -> None:
    """Write one byte of every page of `size` bytes, and hold them until the other parts are done."""
    with mmap.mmap(-1, size) as memory:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        for offset in range(0, size, mmap.PAGESIZE):
            memory[offset] = 1
        barrier.wait()


def ram() -> dict[str, int]:
    """MemTotal and MemAvailable, bytes."""
    values = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return {name: int(values[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable")}


def main(arguments: list[str]) -> int:
    """Entry point. 0 done, 2 unusable input."""
    if len(arguments) != 1 or not arguments[0].isdigit() or int(arguments[0]) < PARTS * mmap.PAGESIZE:
        print("touch_memory.py takes one argument, a number of bytes.", file=sys.stderr)
        return 2
    started = time.monotonic()
    print("before", ram(), flush=True)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(PARTS)
    parts = [context.Process(target=touch, args=(int(arguments[0]) // PARTS, barrier)) for _ in range(PARTS)]
    for part in parts:
        part.start()
    for part in parts:
        part.join()
    print("after", ram(), f"{time.monotonic() - started:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
