"""Kinds of "out of memory", told apart; none of them is a preemption. Pure.

CUDA's own error stands in the engine's log, at start or while serving. A process that the kernel killed leaves no word
in its log: that shows in counters of the kernel and the cgroup, and in the kernel's log. A preemption is none of it: KV
cache is set aside beforehand, the process lives on, and only vllm:num_preemptions_total rises.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import Struct

Kind = Literal["cuda_at_start", "cuda_in_flight", "kernel_oom_killer", "cgroup_limit", "preemption", "none"]

CUDA_CLASSES: dict[str, Kind] = {
    "gpu_memory_short_at_start": "cuda_at_start",
    "cuda_oom_runtime": "cuda_in_flight",
}
SENTENCES: dict[Kind, tuple[str, str]] = {
    "cuda_at_start": (
        "The GPU's memory was short at start: the engine served nothing, so this is no preemption.",
        "Find what else holds GPU memory, or size the KV cache smaller, in all arms alike.",
    ),
    "cuda_in_flight": (
        "The GPU ran out of memory while serving: a buffer beside the KV cache did not fit. This is no preemption; the "
        "KV cache was set aside at start.",
        "Leave more memory beside the KV cache (a smaller one, or fewer batched tokens), in all arms alike.",
    ),
    "kernel_oom_killer": (
        "The kernel's OOM killer ended a process: the whole machine was out of RAM. This is no preemption, and says "
        "nothing about the KV cache.",
        "Free RAM on the host, or take a smaller tier; kvtrial_ram_reserve_bytes ends a run before it comes to that.",
    ),
    "cgroup_limit": (
        "The memory limit of a cgroup (container, unit or slice) was reached and a process in it was killed, with "
        "RAM left on the machine. This is no preemption.",
        "Raise the limit (MemoryMax= of the unit, --memory of the container), or take a smaller tier.",
    ),
    "preemption": (
        "Requests were preempted: blocks of the KV cache ran out, the requests are computed again, and the engine "
        "lives. Nothing is out of memory.",
        "See the ladder: fewer requests at a time, shorter ones, or more KV memory.",
    ),
    "none": ("No memory ran out, and no request was preempted.", ""),
}
_GLOBAL = re.compile(r"\bOut of memory: Killed process (?P<pid>\d+)")
_CGROUP = re.compile(r"\bMemory cgroup out of memory: Killed process (?P<pid>\d+)")
_NAMED = re.compile(r"\bKilled process \d+ \((?P<name>[^)]+)\)")
_OF_AN_ENGINE = re.compile(r"vllm|engine|python|worker|pt_main_thread|^ray", re.IGNORECASE)
"""Names that the processes of a vLLM server have in the kernel's log, of 15 characters at most."""


def killed_others(kernel_lines: Iterable[str]) -> list[str]:
    """Lines about a killed process whose name is none of a vLLM server's processes; one without a name is not."""
    named = [(line, _NAMED.search(line)) for line in kernel_lines]
    return [line for line, found in named if found and not _OF_AN_ENGINE.search(found["name"])]


class MemoryCounters(Struct, frozen=True):
    """What the kernel had counted at a moment; None where it can't be read there.

    `kills`: of the whole kernel. `cgroup_kills` and `cgroup_limit_hits`: of the engine's cgroup and those above it.
    """

    kills: int | None
    cgroup_kills: int | None
    cgroup_limit_hits: int | None


class OutOfMemory(Struct, frozen=True):
    """What ran out, by which evidence, and what to do."""

    kind: Kind
    sentence: str
    do: str
    evidence: str


def tell_apart(
    log_class: str | None,
    before: MemoryCounters,
    after: MemoryCounters,
    kernel_lines: Iterable[str] = (),
    returncode: int | None = None,
    preemptions: float | None = None,
) -> OutOfMemory:
    """The kind of a failure. `log_class`: what the engine's log is known for. `kernel_lines`: those new since `before`.

    Kills of programs whose names are none of a vLLM server's are not its own, nor those in cgroups while its own
    counted none. The kernel's word outranks the engine's: an engine whose child was killed dies of that with any text.
    Only where the kernel counted a kill on the machine and says neither of whom nor where, CUDA's own error stands.
    `returncode` is a signal where negative. `preemptions` of the time in question count only where no memory ran out.
    """
    lines = list(kernel_lines)
    others = killed_others(lines)
    counted = _rise(before.cgroup_kills, after.cgroup_kills)
    if not counted and None not in (before.cgroup_kills, after.cgroup_kills):
        others += [line for line in lines if _CGROUP.search(line) and line not in others]
    killed = max(0, _rise(before.kills, after.kills) - len(others)) or counted
    lines = [line for line in lines if line not in others]
    said = _kernel_word(lines)
    if counted or said or (killed and log_class not in CUDA_CLASSES):
        hits = _rise(before.cgroup_limit_hits, after.cgroup_limit_hits)
        kind: Kind = said or ("cgroup_limit" if hits and counted else "kernel_oom_killer")
        evidence = [f"{killed} killed by the kernel's count" if killed else ""]
        evidence.append(f"{hits} times at the cgroup's limit" if hits else "")
        evidence.append(next((line.strip() for line in reversed(lines) if _kernel_word([line])), ""))
        evidence.append(f"ended by signal {-returncode}" if returncode is not None and returncode < 0 else "")
        return _told(kind, "; ".join(part for part in evidence if part))
    if log_class in CUDA_CLASSES:
        return _told(CUDA_CLASSES[log_class], f"the engine's log ({log_class})")
    if preemptions:
        return _told("preemption", f"vllm:num_preemptions_total rose by {preemptions:,.0f}")
    return _told("none", "")


def _told(kind: Kind, evidence: str) -> OutOfMemory:
    return OutOfMemory(kind, *SENTENCES[kind], evidence)


def _kernel_word(lines: Sequence[str]) -> Literal["kernel_oom_killer", "cgroup_limit"] | None:
    """What the last line about a kill says."""
    for line in reversed(lines):
        if _CGROUP.search(line):
            return "cgroup_limit"
        if _GLOBAL.search(line):
            return "kernel_oom_killer"
    return None


def _rise(before: int | None, after: int | None) -> int:
    return 0 if before is None or after is None else max(0, after - before)
