"""What /proc says about processes. Linux only, no third-party import.

A process is named by (pid, start ticks): a pid alone may have been given to another process since. State Z (zombie)
counts as dead: it holds nothing and only waits for its parent.

What an engine looks like and what is hidden of a command line is said again in plugins/module_utils/processes.py, which
runs where this package isn't installed; a test holds the two together.
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from msgspec import Struct

from kvtrial.record.credentials import without_credentials
from kvtrial.record.record import Socket

PROC = Path("/proc")
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
ENGINE_COMMAND = re.compile(r"(^|[/ ])vllm serve( |$)|vllm\.entrypoints\.|VLLM::(EngineCore|Worker|APIServer)")
SECRET = re.compile(r"(-{0,2}[\w-]*(?:key|token(?!s|iz)|password|secret)[\w-]*)([= ])([^\s,}\"']+)", re.IGNORECASE)
MORE_KEYS = re.compile(r"(--[\w-]*api[-_]key) \*\*\*(?: +(?!-)\S+)+", re.IGNORECASE)
"""Of API keys several may follow, up to the next option."""
COMMAND_CHARACTERS = 300
LISTEN = "0A"


class Process(Struct, frozen=True):
    """A live process: identity, group, parent, CPU ticks used, resident bytes."""

    pid: int
    start_ticks: int
    state: str
    parent: int
    group: int
    cpu_ticks: int
    rss_bytes: int


def read_process(pid: int) -> Process | None:
    """The process `pid`, or None if there is none. A zombie is returned with state Z."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return Process(
        pid=pid,
        state=fields[0],
        parent=int(fields[1]),
        group=int(fields[2]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        start_ticks=int(fields[19]),
        rss_bytes=int(fields[21]) * PAGE_BYTES,
    )


def is_alive(pid: int, start_ticks: int) -> bool:
    """Whether the very process (pid, start ticks) still runs; zombies don't."""
    process = read_process(pid)
    return process is not None and process.start_ticks == start_ticks and process.state not in "ZX"


def all_processes() -> list[Process]:
    """Every live process of the machine that can be read, zombies left out."""
    found = (read_process(int(entry)) for entry in os.listdir(PROC) if entry.isdigit())  # noqa: PTH208  names only, often
    return [process for process in found if process is not None and process.state not in "ZX"]


def members(processes: Iterable[Process], group: int, root: int) -> list[Process]:
    """The processes of process group `group`, and every descendant of `root`."""
    processes = list(processes)
    wanted = {root}
    grown = True
    while grown:
        more = {p.pid for p in processes if p.pid not in wanted and (p.parent in wanted or p.group == group)}
        grown = bool(more)
        wanted |= more
    return [p for p in processes if p.pid in wanted]


def command_line(pid: int) -> bytes:
    """The raw argv of a process, NUL separated; empty if it can't be read."""
    try:
        return (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return b""


def command_text(raw: bytes) -> str:
    """A raw argv as one line."""
    return raw.replace(b"\0", b" ").decode(errors="replace").strip()


def is_engine(command: str) -> bool:
    """Whether a command line is that of a vLLM engine."""
    return ENGINE_COMMAND.search(command) is not None


def foreign_engines(own: set[int]) -> list[tuple[int, str]]:
    """(pid, shortened command) of inference engines on this machine that are not in `own`."""
    found = []
    for process in all_processes():
        if process.pid in own or process.pid == os.getpid():
            continue
        command = command_text(command_line(process.pid))
        if is_engine(command):
            found.append((process.pid, redact(command)[:COMMAND_CHARACTERS]))
    return found


def redact(command: str) -> str:
    """A command line without the values of keys and tokens, and without users and passwords in addresses."""
    return without_credentials(MORE_KEYS.sub(r"\1 ***", SECRET.sub(r"\1\2***", command)))


def _decode_address(text: str) -> tuple[str, int]:
    address, port = text.split(":")
    raw = bytes.fromhex(address)
    if len(raw) == 4:
        return ".".join(str(b) for b in raw[::-1]), int(port, 16)
    words = [raw[i : i + 4][::-1] for i in range(0, 16, 4)]
    whole = b"".join(words)
    if whole[:12] == b"\0" * 10 + b"\xff\xff":
        return ".".join(str(b) for b in whole[12:]), int(port, 16)
    if whole == b"\0" * 15 + b"\x01":
        return "::1", int(port, 16)
    if whole == b"\0" * 16:
        return "::", int(port, 16)
    return ":".join(whole[i : i + 2].hex() for i in range(0, 16, 2)), int(port, 16)


def listening_sockets(pids: Iterable[int]) -> list[Socket]:
    """Every listening TCP socket, IPv4 and IPv6, held by one of `pids`."""
    owners: dict[str, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in (PROC / str(pid) / "fd").iterdir():
                with contextlib.suppress(OSError):
                    target = str(descriptor.readlink())
                    if target.startswith("socket:["):
                        owners[target[8:-1]] = pid
    sockets = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN and fields[9] in owners:
                    address, port = _decode_address(fields[1])
                    sockets.append(Socket(address=address, port=port, pid=owners[fields[9]]))
    return sorted(sockets, key=lambda s: (s.port, s.address))


def loopback_alone(proc: Path = PROC) -> bool:
    """Whether this network namespace has loopback addresses and no other. False where that can't be read."""
    try:
        lines = (proc / "net" / "fib_trie").read_text().splitlines()
        beyond = [line.split() for line in (proc / "net" / "if_inet6").read_text().splitlines()]
    except OSError:
        return False
    addresses = [above.split()[-1] for above, line in pairwise(lines) if line.strip().startswith("/32 host LOCAL")]
    return (
        bool(addresses)
        and all(address.startswith("127.") for address in addresses)
        and all(fields[-1] == "lo" for fields in beyond)
    )


def port_is_taken(port: int) -> bool:
    """Whether any process listens on TCP `port`, on any address."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN and int(fields[1].rsplit(":", 1)[1], 16) == port:
                    return True
    return False


def mapped_shared_memory(pids: Iterable[int]) -> set[str]:
    """Names of files in /dev/shm that one of `pids` maps."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            maps = (PROC / str(pid) / "maps").read_text(errors="replace")
            found.update(re.findall(r"(/dev/shm/\S+)", maps))
    return found


def end_processes(processes: Iterable[Process], grace_seconds: float) -> bool:
    """SIGTERM, wait up to `grace_seconds`, SIGKILL. Only the very processes given (pid and start ticks); never others.

    Returns whether SIGKILL was needed for any.
    """
    left = [p for p in processes if is_alive(p.pid, p.start_ticks)]
    for process in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
    until = time.monotonic() + grace_seconds
    while left and time.monotonic() < until:
        time.sleep(0.02)
        left = [p for p in left if is_alive(p.pid, p.start_ticks)]
    for process in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    until = time.monotonic() + 10.0
    killed = bool(left)
    while left and time.monotonic() < until:
        time.sleep(0.02)
        left = [p for p in left if is_alive(p.pid, p.start_ticks)]
    return killed
