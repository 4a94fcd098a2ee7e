# Licensed under the Apache License, Version 2.0
"""The state of a campaign's host program, as its directory tells it. Standard library only, Python 3.8 and newer."""

from __future__ import annotations

import glob
import json
import os
import time

from ansible_collections.kvtrial.vllm.plugins.module_utils import processes

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
TEXT_CHARACTERS = 1000
PROGRESS_BYTES = 1 << 16


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
    or a zombie, or the host was started anew). A program that hasn't written its pid yet is taken to be alive.
    """
    state = progress.get("state", "absent")
    pid, ticks = progress.get("pid"), progress.get("pid_start_ticks")
    known = isinstance(pid, int) and isinstance(ticks, int)
    alive = processes.is_alive(pid, ticks, proc) if known else state == "starting"
    boot_id = processes.read_text(os.path.join(proc, "sys", "kernel", "random", "boot_id"), 64).strip()
    if boot_id and progress.get("boot_id", boot_id) != boot_id:
        alive = False
    over = state in OVER
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
    with open(temporary, "w") as file:
        file.write("%.3f\n" % time.monotonic())
    os.replace(temporary, path)
