# Licensed under the Apache License, Version 2.0
"""What /proc says about processes, for modules that run on a host. Standard library only, Python 3.8 and newer.

A process is named by (pid, start ticks): a pid alone may have been given to another process since. State Z (zombie)
counts as dead: it holds nothing and only waits for its parent. `proc` is a parameter so that tests can pass a copy.

The package's kvtrial.host.processes says some of this again: a module is sent to hosts that don't have the package, so
it can't import it. A test holds the two together.
"""

from __future__ import annotations

import os
import re

ENGINE_COMMAND = re.compile(r"(^|[/ ])vllm serve( |$)|vllm\.entrypoints\.|VLLM::(EngineCore|Worker|APIServer)")
SECRET = re.compile(r"(-{0,2}[\w-]*(?:key|token(?!s|iz)|password|secret)[\w-]*)([= ])([^\s,}\"']+)", re.IGNORECASE)
CREDENTIALS = re.compile(r"(://)[^/\s\"']+@")
COMMAND_CHARACTERS = 300


def read_text(path, limit=1 << 20):
    """The text of a file, at most `limit` bytes of it; empty if it can't be read. No pipe is waited for."""
    try:
        with open(path, "rb", opener=_at_once) as file:
            return (file.read(limit) or b"").decode("utf-8", "replace")
    except OSError:
        return ""


def _at_once(path, flags):
    return os.open(path, flags | os.O_NONBLOCK)


def read_stat(pid, proc="/proc"):
    """{pid, state, parent, group, start_ticks} of a process, or None if there is none."""
    text = read_text(os.path.join(proc, str(pid), "stat"), 4096)
    if ")" not in text:
        return None
    # The name stands in parentheses and may itself hold spaces and parentheses.
    fields = text[text.rindex(")") + 1 :].split()
    if len(fields) < 20:
        return None
    return {
        "pid": int(pid),
        "state": fields[0],
        "parent": int(fields[1]),
        "group": int(fields[2]),
        "start_ticks": int(fields[19]),
    }


def is_alive(pid, start_ticks, proc="/proc"):
    """Whether the very process (pid, start ticks) still runs."""
    stat = read_stat(pid, proc)
    return stat is not None and stat["start_ticks"] == start_ticks and stat["state"] not in ("Z", "X")


def redact(command):
    """A command line without the values of keys and tokens, and without users and passwords in addresses."""
    return CREDENTIALS.sub(r"\1***@", SECRET.sub(r"\1\2***", command))


def all_pids(proc="/proc"):
    """Every process id in `proc`, ascending."""
    return sorted(int(name) for name in os.listdir(proc) if name.isdigit())


def is_engine(command):
    """Whether a command line is that of a vLLM engine."""
    return ENGINE_COMMAND.search(command) is not None


def engines(proc="/proc", own=()):
    """Processes that look like a vLLM engine: [{pid, start_ticks, command, own}], by pid.

    `own` holds (pid, start ticks) of processes this project started; their descendants are its own too.
    """
    stats = {}
    for pid in all_pids(proc):
        stat = read_stat(pid, proc)
        if stat is not None and stat["state"] not in ("Z", "X"):
            stats[pid] = stat
    found = []
    for pid, stat in sorted(stats.items()):
        command = read_text(os.path.join(proc, str(pid), "cmdline"), 65536).replace("\0", " ").strip()
        if is_engine(command):
            found.append(
                {
                    "pid": pid,
                    "start_ticks": stat["start_ticks"],
                    "command": redact(command)[:COMMAND_CHARACTERS],
                    "own": is_own(pid, stats, set(own)),
                }
            )
    return found


def is_own(pid, stats, own):
    """Whether `pid` or one of its ancestors in `stats` ({pid: stat}) is one of `own` ((pid, start ticks))."""
    seen = set()
    while pid in stats and pid not in seen:
        seen.add(pid)
        if (pid, stats[pid]["start_ticks"]) in own:
            return True
        pid = stats[pid]["parent"]
    return False


def users_of(folder, proc="/proc"):
    """Living processes that run from `folder` or have files of it mapped: [{pid, start_ticks, command}], by pid.

    Of another user's process only the command line can be read without root.
    """
    folder = os.path.realpath(folder) + os.sep
    found = []
    for pid in all_pids(proc):
        stat = read_stat(pid, proc)
        if stat is None or stat["state"] in ("Z", "X") or pid == os.getpid():
            continue
        words = read_text(os.path.join(proc, str(pid), "cmdline"), 65536).split("\0")
        # A module of Ansible that looks at the folder names it, too, but not as what it runs.
        runs = any(word.startswith(folder) for word in words[:2])
        if runs or folder in read_text(os.path.join(proc, str(pid), "maps"), 1 << 24):
            command = redact(" ".join(words).strip())[:COMMAND_CHARACTERS]
            found.append({"pid": pid, "start_ticks": stat["start_ticks"], "command": command})
    return found


def mapped_files(directory, proc="/proc"):
    """Paths under `directory` that some process maps. Processes of other users can't be read without root."""
    mapped = set()
    for pid in all_pids(proc):
        for line in read_text(os.path.join(proc, str(pid), "maps"), 1 << 24).splitlines():
            fields = line.split(None, 5)
            if len(fields) == 6 and fields[5].startswith(directory):
                mapped.add(fields[5].replace(" (deleted)", ""))
    return mapped


def listening_ports(proc="/proc"):
    """TCP ports on which something listens, on any address, IPv4 and IPv6."""
    ports = set()
    for name in ("tcp", "tcp6"):
        for line in read_text(os.path.join(proc, "net", name), 1 << 24).splitlines()[1:]:
            fields = line.split()
            if len(fields) > 3 and fields[3] == "0A":
                ports.add(int(fields[1].rsplit(":", 1)[1], 16))
    return ports
