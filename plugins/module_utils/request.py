# Licensed under the Apache License, Version 2.0
"""What a user asked for, brought into the types the planner takes. Texts come from `-e name=value`."""

from __future__ import annotations

import os
import subprocess


class Unusable(ValueError):
    """A value that can't be used; the message is one sentence for the user."""


def whole_number(value, name):
    """An int from an int or its text; None from None, "" and "null"."""
    if value is None or (isinstance(value, str) and value.strip().lower() in ("", "null", "none")):
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        return int(str(value).strip())
    except ValueError:
        raise Unusable("%s=%s is not a whole number; write digits only." % (name, value)) from None


def truth(value, name):
    """A bool from a bool or the usual words for it."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in ("true", "yes", "on", "1"):
        return True
    if word in ("false", "no", "off", "0", ""):
        return False
    raise Unusable("%s=%s is neither true nor false; give one of the two." % (name, value))


def names(value, name):
    """A list of names from a list or from text with commas; None from None and ""."""
    if value is None or value == "":
        return None
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, list) or not all(isinstance(item, str) and item.strip() for item in value):
        raise Unusable("%s=%s is not a list of names; write them with commas: control,offload." % (name, value))
    return [item.strip() for item in value]


def normalise(inputs):
    """The planner's inputs with every scalar in its type. Raises Unusable."""
    result = dict(inputs)
    result["seed"] = whole_number(inputs.get("seed"), "kvtrial_seed")
    result["pairs"] = whole_number(inputs.get("pairs"), "kvtrial_pairs")
    result["arms"] = names(inputs.get("arms"), "kvtrial_arms")
    if inputs.get("own_hit_share") in (None, ""):
        result["own_hit_share"] = None
    for name in ("new_campaign", "dry_run"):
        result[name] = truth(inputs.get(name, False), "kvtrial_" + name)
    result["hosts"] = {name: _host(host) for name, host in (inputs.get("hosts") or {}).items()}
    return result


def _host(host):
    result = dict(host)
    if "port" in host:
        result["port"] = whole_number(host["port"], "kvtrial_port")
    if "ram_reserve_bytes" in host:
        result["ram_reserve_bytes"] = whole_number(host["ram_reserve_bytes"], "kvtrial_ram_reserve_bytes")
    if host.get("if_controller_gone", "continue") not in ("continue", "stop"):
        raise Unusable(
            "kvtrial_if_controller_gone=%s is unknown; set it to continue or stop." % (host["if_controller_gone"],)
        )
    if "may_be_disturbed" in host:
        result["may_be_disturbed"] = truth(host["may_be_disturbed"], "kvtrial_host_may_be_disturbed")
    return result


def standing(info):
    """{state, reason} of a host program, from what host_program_info returned. One that was killed is "stopped"."""
    progress = info.get("progress") or {}
    if info.get("died"):
        return {"state": "stopped", "reason": "the host program was ended from outside"}
    return {"state": info.get("state", "unreachable"), "reason": progress.get("reason") or ""}


def project_state(directory):
    """{commit, dirty} of the checkout in `directory`; both None where it is no git checkout of its own."""
    if not os.path.exists(os.path.join(directory, ".git")):
        return {"commit": None, "dirty": None}
    commit = _git(directory, "rev-parse", "HEAD")
    status = _git(directory, "status", "--porcelain")
    return {"commit": commit.strip() if commit else None, "dirty": bool(status) if status is not None else None}


def _git(directory, *arguments):
    """What git prints, or None if it isn't there or fails."""
    try:
        done = subprocess.run(
            ["git", "-C", directory, *arguments], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None
