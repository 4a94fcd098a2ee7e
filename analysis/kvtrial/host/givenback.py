"""Whether an engine's memory is back where it was before its start: GPU memory, and RAM that outlives processes."""

import time
from collections.abc import Iterable
from pathlib import Path

from kvtrial.host.conditions import nvidia_smi

POLL_SECONDS = 0.25
VRAM_SLACK_BYTES = 64 * 2**20


def vram_used_bytes() -> int | None:
    """GPU memory in use, all GPUs together; None without one."""
    gpus = nvidia_smi("memory.used")
    return sum(int(gpu["memory.used"]) for gpu in gpus) * 2**20 if gpus else None


def left_behind(before: int | None, now: int | None, files: Iterable[str]) -> str:
    """What the engine still holds, in a sentence; empty when all is back (GPU memory within 64 MiB).

    `before` and `now` are bytes of GPU memory, `files` what of the engine's still lies in /dev/shm. Other RAM goes with
    the processes that held it, and what others on the machine take or give back meanwhile is not the engine's.
    """
    parts = []
    if before is not None and now is not None and now > before + VRAM_SLACK_BYTES:
        parts.append(f"{now - before} bytes of GPU memory (before: {before}, now: {now})")
    if files := sorted(files):
        parts.append(f"the memory of {', '.join(files)}")
    return f"{' and '.join(parts)} did not come back after the engine's end" if parts else ""


def wait_until_given_back(before: int | None, shared_memory: Iterable[str], seconds: float) -> str:
    """Wait until memory is back where it was, `seconds` at most; what is left then, in a sentence."""
    names = list(shared_memory)
    until = time.monotonic() + seconds
    while True:
        left = left_behind(before, vram_used_bytes(), [name for name in names if Path(name).exists()])
        if not left or time.monotonic() >= until:
            return left
        time.sleep(POLL_SECONDS)
