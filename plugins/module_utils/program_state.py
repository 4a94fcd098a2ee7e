# Licensed under the Apache License, Version 2.0
"""The state of a campaign's host program, as its directory tells it. Standard library only, Python 3.8 and newer."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import signal
import time

from ansible_collections.kvtrial.vllm.plugins.module_utils import ownership, processes

FIELDS = (
    "state",
    "reason",
    "campaign",
    "plan_sha256",
    "pid",
    "pid_start_ticks",
    "boot_id",
    "run",
    "pair",
    "pairs",
    "arm",
    "phase",
    "runs_done",
    "runs_planned",
    "seconds_to_go",
    "updated_monotonic_seconds",
    "message",
)
OVER = ("finished", "stopped", "failed")
SHUT_DOWN = "by SIGTERM"
"""In the reason of a program that systemd stopped."""
TEXT_CHARACTERS = 1000
PROGRESS_BYTES = 1 << 16
PLAN_BYTES = 1 << 24
STOP_SECONDS = 60.0
"""An engine's time to end, where no plan says it; the program adds ENDING_SECONDS for itself."""
ENDING_SECONDS = 40.0


def read_progress(directory):
    """DIRECTORY/progress.json, known fields only and texts cut, so that a reply stays small; {} if there is none."""
    try:
        value = json.loads(processes.read_text(os.path.join(directory, "progress.json"), PROGRESS_BYTES))
    except ValueError:
        return {}
    if not isinstance(value, dict):
        return {}
    return {name: _cut(value[name]) for name in FIELDS if name in value}


def _cut(value):
    return value[:TEXT_CHARACTERS] if isinstance(value, str) else value


def describe(progress, proc="/proc"):
    """What a controller has to know of a progress file: {state, alive, over, died, progress}.

    `state` is the file's, or "absent". `died`: the program says it runs, but its process is gone (or is another one,
    or a zombie, or the host was started anew), or a shutdown of the host stopped it. A program that hasn't written its
    pid yet is taken to be alive.
    """
    state = progress.get("state", "absent")
    pid, ticks = progress.get("pid"), progress.get("pid_start_ticks")
    known = isinstance(pid, int) and isinstance(ticks, int)
    alive = processes.is_alive(pid, ticks, proc) if known else state == "starting"
    boot_id = processes.read_text(os.path.join(proc, "sys", "kernel", "random", "boot_id"), 64).strip()
    rebooted = bool(boot_id) and progress.get("boot_id", boot_id) != boot_id
    alive = alive and not rebooted
    over = state in OVER and not (rebooted and state == "stopped" and SHUT_DOWN in str(progress.get("reason")))
    return {"state": state, "alive": alive, "over": over, "died": not over and not alive, "progress": progress}


def running_programs(state_dir, proc="/proc"):
    """Host programs under `state_dir` whose process is alive: [{directory, campaign, pid}]."""
    found = []
    for path in sorted(glob.glob(os.path.join(state_dir, "campaigns", "*", "progress.json"))):
        directory = os.path.dirname(path)
        progress = read_progress(directory)
        if isinstance(progress.get("pid"), int) and describe(progress, proc)["alive"]:
            found.append({"directory": directory, "campaign": os.path.basename(directory), "pid": progress["pid"]})
    return found


def touch_heartbeat(directory):
    """Tell the host program that a controller is there: the time on this host's monotonic clock, seconds."""
    path = os.path.join(directory, "heartbeat")
    temporary = path + ".tmp"
    with ownership.as_owner_of(directory):
        try:
            with open(temporary, "w") as file:
                file.write("%.3f\n" % time.monotonic())
            os.replace(temporary, path)
        except OSError:
            # A full disk: nothing is to be left there.
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def own_processes(directory, proc="/proc"):
    """Living processes of the campaign in `directory`: [{pid, start_ticks, command, role}], by pid.

    The host program and the engine are known by (pid, start ticks) in their files; program and keeper also by a command
    line that names the directory. Their descendants are theirs, and so is everything in an engine's process group.
    """
    directory = os.path.realpath(directory)
    roles = {}
    for role, name in (("program", "progress.json"), ("engine", os.path.join("runs", ".partial", "engine.json"))):
        named = _named_process(os.path.join(directory, name))
        if named is not None:
            roles[named] = role
    stats, commands = {}, {}
    for pid in processes.all_pids(proc):
        stat = processes.read_stat(pid, proc)
        if stat is None or stat["state"] in ("Z", "X"):
            continue
        stats[pid] = stat
        commands[pid] = processes.read_text(os.path.join(proc, str(pid), "cmdline"), 65536).split("\0")
        role = _role_by_command(commands[pid], directory)
        if role:
            roles.setdefault((pid, stat["start_ticks"]), role)
    # A group counts only while its leader, known by pid and start time, lives: else its number may be another's by now.
    leaders = {pid for (pid, ticks), role in roles.items() if role == "engine" and _lives(pid, ticks, stats)}
    found = []
    for pid, stat in sorted(stats.items()):
        key = (pid, stat["start_ticks"])
        if pid != os.getpid() and (stat["group"] in leaders or processes.is_own(pid, stats, set(roles))):
            words = processes.redact(" ".join(commands[pid]).strip())[: processes.COMMAND_CHARACTERS]
            found.append({"pid": pid, "start_ticks": key[1], "command": words, "role": roles.get(key, "child")})
    return found


def _lives(pid, start_ticks, stats):
    return pid in stats and stats[pid]["start_ticks"] == start_ticks


def _named_process(path):
    """(pid, start ticks) that a file of the program or the keeper names, or None."""
    try:
        value = json.loads(processes.read_text(path, PROGRESS_BYTES))
        return int(value["pid"]), int(value.get("pid_start_ticks", value.get("start_ticks")))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _role_by_command(words, directory):
    """ "program" or "keeper" for their command lines in `directory`, else ""."""
    for module, role in (("kvtrial.host.program", "program"), ("kvtrial.host.keeper", "keeper")):
        if module in words and any(_is_below(word, directory) for word in words if word.startswith("/")):
            return role
    return ""


def _is_below(path, directory):
    path = os.path.realpath(path)
    return path == directory or path.startswith(directory + os.sep)


def end(directory, proc="/proc"):
    """End what the campaign in `directory` runs; return what still lives.

    The program gets SIGTERM and the time that its plan gives, for it ends its engine and keeps the records. Whatever is
    left then gets SIGTERM, and SIGKILL after a while. Only the very processes found are signalled.
    """
    grace = stop_seconds(directory)
    for number, wanted, seconds in (
        (signal.SIGTERM, ("program",), grace + ENDING_SECONDS),
        # The keeper ignores signals: it ends with its engine, or the program.
        (0, ("keeper", "engine", "child"), 5.0),
        (signal.SIGTERM, ("engine", "child"), min(grace, 20.0)),
        (signal.SIGKILL, ("program", "keeper", "engine", "child"), 5.0),
    ):
        left = [one for one in own_processes(directory, proc) if one["role"] in wanted]
        for one in left:
            _send(one, number, proc)
        until = time.monotonic() + seconds
        while left and time.monotonic() < until:
            time.sleep(0.05)
            left = [one for one in left if processes.is_alive(one["pid"], one["start_ticks"], proc)]
    return own_processes(directory, proc)


def _send(one, number, proc):
    if number and processes.is_alive(one["pid"], one["start_ticks"], proc):
        # Gone meanwhile, or another user's: what is left is looked at afterwards.
        with contextlib.suppress(OSError):
            os.kill(one["pid"], number)


def stop_seconds(directory):
    """How long the campaign's plan gives an engine to end."""
    try:
        plan = json.loads(processes.read_text(os.path.join(directory, "plan.json"), PLAN_BYTES))
        return float(plan["limits"]["stop_timeout_seconds"])
    except (ValueError, KeyError, TypeError):
        return STOP_SECONDS
