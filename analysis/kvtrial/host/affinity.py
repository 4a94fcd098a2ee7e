"""Where the load client runs: on CPUs that the engine does not use, where there are any. Linux.

The client's process is pinned by `sched_setaffinity`; threads that exist by then keep their own mask, so it is done for
each of them.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from kvtrial.host.processes import PROC
from kvtrial.record.cpulist import cpu_list

SYSFS = Path("/sys")


class Pinning(Struct, frozen=True):
    """Where the client may run and how that came to be; `numa_node` None: several nodes, or unknown."""

    cpus: list[int]
    pinning: str
    numa_node: int | None


def current_pinning(said: str = "not asked") -> Pinning:
    """Where this process may run as it is."""
    cpus = sorted(os.sched_getaffinity(0))
    return Pinning(cpus, said, numa_node_of(cpus))


def numa_node_of(cpus: Iterable[int], sysfs: Path = SYSFS) -> int | None:
    """The one NUMA node that all of `cpus` belong to."""
    wanted = set(cpus)
    nodes = [number for number, members in numa_nodes(sysfs).items() if wanted & members]
    return nodes[0] if len(nodes) == 1 else None


def numa_nodes(sysfs: Path = SYSFS) -> dict[int, set[int]]:
    """CPUs by NUMA node; empty where the kernel does not say."""
    nodes = {}
    for path in (sysfs / "devices/system/node").glob("node[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            nodes[int(path.name[4:])] = cpu_list((path / "cpulist").read_text())
    return nodes


def gpu_node(sysfs: Path = SYSFS) -> int | None:
    """The NUMA node of the machine's NVIDIA GPUs, if all are on one and the kernel knows it."""
    found = set()
    for device in (sysfs / "bus/pci/drivers/nvidia").glob("*:*:*.*"):
        with contextlib.suppress(OSError, ValueError):
            found.add(int((device / "numa_node").read_text()))
    return found.pop() if len(found) == 1 and min(found) >= 0 else None


def allowed_cpus(pids: Iterable[int], proc: Path = PROC) -> set[int]:
    """Every CPU that a thread of one of `pids` may run on."""
    cpus: set[int] = set()
    for pid in pids:
        for status in (proc / str(pid) / "task").glob("*/status"):
            with contextlib.suppress(OSError, ValueError):
                if found := re.search(r"^Cpus_allowed_list:\s*(\S+)", status.read_text(), re.MULTILINE):
                    cpus |= cpu_list(found[1])
    return cpus


def choose(ours: set[int], engines: set[int], node: set[int] | None) -> set[int]:
    """The CPUs of `ours` that the engine cannot run on; of these the ones on `node` where there are any."""
    free = ours - engines
    return free & node if node and free & node else free


def with_siblings(cpus: set[int], sysfs: Path = SYSFS) -> set[int]:
    """`cpus` and the hyperthreads that share a core with one of them."""
    found = set(cpus)
    for cpu in cpus:
        with contextlib.suppress(OSError, ValueError):
            found |= cpu_list((sysfs / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
    return found


@contextmanager
def pinned_client(asked: str, engine_pids: Iterable[int], sysfs: Path = SYSFS) -> Iterator[Pinning]:
    """Pin this process as `kvtrial_client_cpus` asks ("auto", "none" or a list of CPUs), and let it loose again.

    With "auto" a core whose other hyperthread the engine may use is not free. A list is met as far as this process may
    use its CPUs; the engine was started on the others.
    """
    before = os.sched_getaffinity(0)
    if asked == "none":
        yield current_pinning("not asked")
        return
    if asked == "auto":
        node = gpu_node(sysfs)
        engines = with_siblings(allowed_cpus(engine_pids), sysfs)
        chosen = choose(before, engines, numa_nodes(sysfs).get(node) if node is not None else None)
    else:
        chosen = cpu_list(asked) & before
    if not chosen:
        yield current_pinning("no core is free of the engine")
        return
    set_affinity(chosen)
    try:
        yield current_pinning("pinned")
    finally:
        set_affinity(before)


def set_affinity(cpus: set[int]) -> None:
    """Pin every thread of this process."""
    for thread in (PROC / "self" / "task").iterdir():
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(thread.name), cpus)
