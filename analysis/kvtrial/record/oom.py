"""Kinds of "out of memory", told apart; none of them is a preemption. Pure.

CUDA's own error stands in the engine's log, at start or while serving. A process that the kernel killed leaves no word
in its log: that shows in the kernel's log, which names the pid, in the counters of the engine's cgroup, in systemd's
result for its unit, and in its exit status. The kernel's own count says that somebody was killed, and not who. A
preemption is none of it: KV cache is set aside beforehand, the process lives on, and only vllm:num_preemptions_total
rises.
"""

import re
import signal
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from msgspec import Struct

Kind = Literal[
    "cuda_at_start",
    "cuda_in_flight",
    "kernel_oom_killer",
    "cgroup_limit",
    "killed_for_memory",
    "kernel_killed_somebody",
    "preemption",
    "none",
]

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
    "killed_for_memory": (
        "The kernel ended a process of the engine for lack of memory; whether the whole machine was out of RAM or a "
        "cgroup at its limit can't be told here. This is no preemption.",
        "Read the kernel's log as root (dmesg, or journalctl -k); then raise the limit, free RAM, or take a smaller "
        "tier.",
    ),
    "kernel_killed_somebody": (
        "The kernel ended a process on this machine for lack of memory, and whether it was one of the engine's can't "
        "be told here. This is no preemption.",
        "Read the kernel's log as root (dmesg, or journalctl -k): it names the process and its pid.",
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
_KILLED = re.compile(r"\bKilled process (?P<pid>\d+)(?: \((?P<name>[^)]+)\))?")
_OF_AN_ENGINE = re.compile(r"vllm|engine|python|worker|pt_main_thread|^ray", re.IGNORECASE)
"""Names that the processes of a vLLM server have in the kernel's log, of 15 characters at most."""


def killed_others(kernel_lines: Iterable[str], pids: Collection[int] | None = None) -> list[str]:
    """Lines about a killed process that is not the engine's: by its pid, where the engine's `pids` are known.

    Else by a name that none of a vLLM server's processes has; one without a name is not another's.
    """
    killed = [(line, found) for line in kernel_lines if (found := _KILLED.search(line))]
    if pids is not None:
        return [line for line, found in killed if int(found["pid"]) not in pids]
    return [line for line, found in killed if found["name"] and not _OF_AN_ENGINE.search(found["name"])]


class MemoryCounters(Struct, frozen=True):
    """What the kernel had counted at a moment; None where it can't be read there.

    `kills`: of the whole kernel. `cgroup_kills`: of processes in the engine's cgroup. `cgroup_limit_hits`: of that and
    those above it. `alone`: nothing but the engine is in that cgroup, as where it has a unit of its own.
    """

    kills: int | None
    cgroup_kills: int | None
    cgroup_limit_hits: int | None
    alone: bool = False


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
    kernel_lines: Iterable[str] | None = (),
    returncode: int | None = None,
    preemptions: float | None = None,
    pids: Collection[int] | None = None,
    unit_killed: bool = False,
) -> OutOfMemory:
    """The kind of a failure.

    `log_class`: what the engine's log is known for. `kernel_lines`: those new since `before`, None where the kernel's
    log can't be read. `pids`: those of the engine's process tree, None where the kernel's pids are others than those
    seen here, as in a container: lines are then told by names. `unit_killed`: systemd says of the engine's unit that
    the OOM killer was at work in it. `returncode` is a signal where negative. `preemptions` of the time in question
    count only where no memory ran out.

    A kill of one of the engine's processes outranks all else: its parent dies of that with any text. Where its cgroup
    counted none, none was killed, but for what the kernel's log says of its pids. A kill that the kernel counted, of
    whom nothing here says, is taken for the engine's only where that was ended by SIGKILL.
    """
    lines = list(kernel_lines or ())
    others = killed_others(lines, pids)
    own = [line for line in lines if line not in others and _kernel_word([line])]
    known = None not in (before.cgroup_kills, after.cgroup_kills)
    counted = _rise(before.cgroup_kills, after.cgroup_kills)
    if pids is None and known and not counted:
        own = []
    if not after.alone:
        counted = max(0, counted - len(others))
    signalled = f"ended by signal {-returncode}" if returncode is not None and returncode < 0 else ""
    if own or counted or unit_killed:
        hits = _rise(before.cgroup_limit_hits, after.cgroup_limit_hits)
        kind: Kind = _kernel_word(own) or (
            "cgroup_limit" if hits else "kernel_oom_killer" if counted else "killed_for_memory"
        )
        evidence = [
            f"{counted} killed in the engine's cgroup by its count" if counted else "",
            f"{hits} times at the cgroup's limit" if hits else "",
            "systemd's result of the unit is oom-kill" if unit_killed else "",
            own[-1].strip() if own else "",
            "told by its name, since the kernel's pids are not those seen here" if own and pids is None else "",
            signalled,
        ]
        return _told(kind, evidence)
    if log_class in CUDA_CLASSES:
        return _told(CUDA_CLASSES[log_class], [f"the engine's log ({log_class})", signalled])
    # Of a cgroup that counted none nobody was killed; of one that can't be read somebody may have been.
    killed = 0 if known else max(0, _rise(before.kills, after.kills) - len(others))
    if killed:
        unread = "the kernel's log can't be read here" if kernel_lines is None else "the kernel's log does not say whom"
        counts = f"{killed} killed by the kernel's count"
        if returncode == -signal.SIGKILL:
            return _told(
                "killed_for_memory", [counts, f"{signalled}, and nothing else is known to have sent it", unread]
            )
        return _told("kernel_killed_somebody", [counts, unread, signalled])
    if preemptions:
        return _told("preemption", [f"vllm:num_preemptions_total rose by {preemptions:,.0f}"])
    return _told("none", [])


def _told(kind: Kind, evidence: Sequence[str]) -> OutOfMemory:
    return OutOfMemory(kind, *SENTENCES[kind], "; ".join(part for part in evidence if part))


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
