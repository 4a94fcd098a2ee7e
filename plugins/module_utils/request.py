# Licensed under the Apache License, Version 2.0
"""What a user asked for, brought into the types the planner takes. Texts come from `-e name=value`."""

from __future__ import annotations

import os
import subprocess
import tempfile


class Unusable(ValueError):
    """A value that can't be used; the message is one sentence for the user."""


def whole_number(value, name):
    """An int from an int, its text or a number without a fraction; None from None, "" and "null"."""
    if value is None or (isinstance(value, str) and value.strip().lower() in ("", "null", "none")):
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    text = str(value).strip()
    whole, _, parts = text.partition(".")
    try:
        # 6.0 is what YAML or a template may make of 6.
        return int(text if parts.strip("0") else whole)
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


def names(value, name, once=True):
    """Names from a list or from text with commas; None from None and "". `once`: what comes again is left out."""
    if value is None or value == "":
        return None
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) and item.strip() for item in items):
        raise Unusable("%s=%s is not a list of names; write them with commas: control,offload." % (name, value))
    found = [item.strip() for item in items]
    return list(dict.fromkeys(found)) if once else found


def mapping(value, name):
    """A dict from a dict; {} from None and ""."""
    if value is None or value == "":
        return {}
    if not isinstance(value, dict):
        raise Unusable("%s=%s is not a mapping of names to values; write {name: value}." % (name, value))
    return dict(value)


def texts(value, name):
    """Environment variables, each value as text: YAML reads an unquoted 2 as a number and true as a truth."""
    result = {}
    for key, item in mapping(value, name).items():
        if isinstance(item, (dict, list)) or item is None:
            raise Unusable("%s.%s=%s is no text; write it in quotes." % (name, key, item))
        result[str(key)] = str(item)
    return result


def refuse_results_dir(path):
    """Raise Unusable where the campaigns' folder can't be made or written, before any host is asked. Leaves nothing."""
    existing = os.path.abspath(path)
    while not os.path.lexists(existing) and existing != os.path.dirname(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        why = "%s is no directory" % existing
    else:
        try:
            # Root and read-only file systems make a mode say little: only trying tells.
            with tempfile.TemporaryDirectory(prefix=".kvtrial-", dir=existing):
                return
        except OSError as error:
            why = "%s can't be written (%s)" % (existing, error.strerror)
    raise Unusable("kvtrial_results_dir=%s can't be used: %s; set it to a directory that you may write." % (path, why))


def normalise(inputs):
    """The planner's inputs with every scalar in its type. Raises Unusable."""
    result = dict(inputs)
    result["seed"] = whole_number(inputs.get("seed"), "kvtrial_seed")
    result["pairs"] = whole_number(inputs.get("pairs"), "kvtrial_pairs")
    for name in ("hit_share_percent", "arrivals_per_minute"):
        result[name] = whole_number(inputs.get(name), "kvtrial_" + name)
    result["arms"] = names(inputs.get("arms"), "kvtrial_arms", once=False)
    for name in ("own_hit_share", "trace"):
        if inputs.get(name) in (None, ""):
            result[name] = None
    for name in ("new_campaign", "dry_run"):
        result[name] = truth(inputs.get(name, False), "kvtrial_" + name)
    result["hosts"] = {name: _host(host) for name, host in (inputs.get("hosts") or {}).items()}
    return result


def _host(host):
    result = dict(host)
    if "port" in host:
        result["port"] = whole_number(host["port"], "kvtrial_port")
    if "client_cpus" in host:
        # A single CPU is a number to YAML.
        result["client_cpus"] = str(host["client_cpus"])
    if "ram_reserve_bytes" in host:
        result["ram_reserve_bytes"] = whole_number(host["ram_reserve_bytes"], "kvtrial_ram_reserve_bytes")
    if host.get("if_controller_gone", "continue") not in ("continue", "stop"):
        raise Unusable(
            "kvtrial_if_controller_gone=%s is unknown; set it to continue or stop." % (host["if_controller_gone"],)
        )
    for key in ("engine_args", "connector_extra_config", "sizes", "limits"):
        if key in host:
            result[key] = mapping(host[key], "kvtrial_" + key)
    if "connector_extra_keys" in host:
        result["connector_extra_keys"] = names(host["connector_extra_keys"], "kvtrial_connector_extra_keys") or []
    if "engine_env" in host:
        result["engine_env"] = texts(host["engine_env"], "kvtrial_engine_env")
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
