# Licensed under the Apache License, Version 2.0
"""What below a state directory this project made, and no one else. Standard library only, Python 3.8 and newer.

A name alone proves nothing: each thing must also hold what the project writes into it (or nothing any more), or a mark
beside it says whose it is. The mark is there before the thing, so that what an interrupted run left is known as well.
Links are never followed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil

from ansible_collections.kvtrial.vllm.plugins.module_utils import processes

FOLDERS = ("cache", "campaigns", "fetched", "models", "venvs", "wheels")
MARKED = ("models", "venvs")
VENV = re.compile(r"(vllm-.+|workload)-[0-9a-f]{12}$")
MADE_MODEL = re.compile(r"made-[0-9a-f]{12}$")
BROUGHT_MODEL = re.compile(r"(upload|[^/]+--[^/]+)-[0-9a-f]{12}$")
GIVEN_MANIFEST = re.compile(r"given-[0-9a-f]{12}\.manifest\.json$")
WHEEL_FOLDER = re.compile(r"[0-9a-f]{12}$")
WHEEL = re.compile(r"kvtrial-[^/]+\.whl$")
MARK = re.compile(r"\.(.+)\.kvtrial$")
"""Beside venvs and models: `.NAME.kvtrial` owns NAME, NAME.partial (a model on its way), .NAME.* (one being made)."""
ANY = re.compile("")
MARKER = "kvtrial-installed.json"
IDENTITIES = (MARKER, "campaign", "manifest.json", "plan.json")
"""What a thing is known by; removed last and in this order, so that a removal that was interrupted is gone on with."""
CARD = "calibration.json"
JSON_BYTES = 1 << 26


def refusal_of(state_dir):
    """Why a directory can't be the project's own, in one sentence; empty if it can."""
    parts = [part for part in state_dir.split("/") if part not in ("", ".")]
    if state_dir.startswith("/") and parts and ".." not in parts:
        return ""
    return (
        "kvtrial_state_dir=%s is no absolute path below /; give the project a directory of its own, such as "
        "/var/lib/kvtrial." % (state_dir or "(empty)")
    )


@contextlib.contextmanager
def as_owner_of(folder):
    """Do what follows as the folder's owner, where this is root: no link that an account planted leads root on.

    Also where the folder is still to be made: then as the owner of the one that it will lie in.
    """
    while not os.path.isdir(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    facts = os.stat(folder)
    if os.geteuid() != 0 or facts.st_uid == 0:
        yield
        return
    group, groups = os.getegid(), os.getgroups()
    os.setgroups([facts.st_gid])
    os.setegid(facts.st_gid)
    os.seteuid(facts.st_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)
        os.setgroups(groups)


def note_of(state_dir, campaign):
    """The note of which of a campaign's runs were fetched whole.

    Not in the campaign's folder, which belongs to the account of its program: that is neither to write it, nor to plant
    a link at which root would.
    """
    return os.path.join(state_dir, "fetched", campaign + ".json")


def made_here(state_dir):
    """Paths below `state_dir` that this project made, sorted; whole folders and single files."""
    found = []
    for folder, is_ours in (
        ("campaigns", _is_campaign),
        # After the campaigns: what is left of one that was cut off was fetched all the same.
        ("fetched", _is_note),
        ("models", _is_model),
        ("venvs", _is_venv),
        ("wheels", _is_wheel_folder),
    ):
        children = _children(os.path.join(state_dir, folder))
        found += [path for path in children if is_ours(path) or _is_emptied(path)]
        owned = [MARK.match(os.path.basename(path))[1] for path in children if folder in MARKED and _is_mark(path)]
        found += [path for path in children if not os.path.islink(path) and _is_owned(os.path.basename(path), owned)]
    cache = os.path.join(state_dir, "cache", "vllm")
    if _is_folder(cache):
        found.append(cache)
    card = os.path.join(state_dir, CARD)
    if os.path.isfile(card) and not os.path.islink(card) and "calibration_id" in _object_in(card):
        found.append(card)
    return sorted(set(found))


def remove(state_dir, paths):
    """Remove `paths`, then the project's folders and `state_dir` where they are empty. Raises OSError."""
    for path in sorted(paths, key=_is_mark):
        if _is_folder(path):
            remove_folder(path)
        else:
            os.unlink(path)
    for path in [os.path.join(state_dir, name) for name in FOLDERS] + [state_dir]:
        if _is_folder(path) and not os.listdir(path):
            os.rmdir(path)


def remove_folder(path):
    """Remove a folder, and what it is known by last. Raises OSError."""
    for name in sorted(os.listdir(path), key=lambda name: IDENTITIES.index(name) if name in IDENTITIES else -1):
        inner = os.path.join(path, name)
        if _is_folder(inner):
            shutil.rmtree(inner)
        else:
            os.unlink(inner)
    os.rmdir(path)


def left_in(state_dir):
    """What is left: the state directory's entries, and those of the project's folders."""
    left = []
    for path in _children(state_dir):
        inner = _children(path) if os.path.basename(path) in FOLDERS and _is_folder(path) else []
        left += inner or [path]
    return left


def _children(folder):
    try:
        return sorted(os.path.join(folder, name) for name in os.listdir(folder))
    except OSError:
        return []


def _is_folder(path):
    return os.path.isdir(path) and not os.path.islink(path)


def _object_in(path):
    """The JSON object in a file; {} if there is none."""
    try:
        value = json.loads(processes.read_text(path, JSON_BYTES))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _is_emptied(path):
    """A folder of ours that has nothing in it yet, as a campaign's before its plan is there, or any more."""
    name, folder = os.path.basename(path), os.path.basename(os.path.dirname(path))
    patterns = {
        "venvs": (VENV,),
        "models": (MADE_MODEL, BROUGHT_MODEL),
        "wheels": (WHEEL_FOLDER,),
        "campaigns": (ANY,),
        "fetched": (),
    }
    return _is_folder(path) and not os.listdir(path) and any(one.match(name) for one in patterns[folder])


def _is_campaign(path):
    return _is_folder(path) and "schema_version" in _object_in(os.path.join(path, "plan.json"))


def _is_note(path):
    return path.endswith(".json") and os.path.isfile(path) and not os.path.islink(path) and "runs" in _object_in(path)


def _is_venv(path):
    return (
        bool(VENV.match(os.path.basename(path)))
        and _is_folder(path)
        and "lock_sha256" in _object_in(os.path.join(path, MARKER))
    )


def _is_model(path):
    name = os.path.basename(path)
    if GIVEN_MANIFEST.match(name) and os.path.isfile(path) and not os.path.islink(path):
        return {"schema_version", "revision", "files"} <= set(_object_in(path))
    if not _is_folder(path):
        return False
    manifest = _object_in(os.path.join(path, "manifest.json"))
    if BROUGHT_MODEL.match(name):
        return "schema_version" in manifest and manifest.get("brought_here") is True
    return bool(MADE_MODEL.match(name)) and "schema_version" in manifest and manifest.get("weights") == "random"


def _is_mark(path):
    """Whether it is a mark of this project: a file that says so, and names what it owns."""
    match = MARK.match(os.path.basename(path))
    if not match or os.path.islink(path) or not os.path.isfile(path):
        return False
    # Torn where its writer was killed: then it is empty.
    said = _object_in(path) if os.path.getsize(path) else {"made_by": "kvtrial", "name": match[1]}
    named = VENV.match(match[1]) or MADE_MODEL.match(match[1]) or BROUGHT_MODEL.match(match[1])
    return bool(named) and said.get("made_by") == "kvtrial" and said.get("name") == match[1]


def _is_owned(name, owned):
    """Whether the marks of `owned` own what has this name, or are it."""
    return any(name in (one, one + ".partial") or name.startswith(".%s." % one) for one in owned)


def _is_wheel_folder(path):
    names = os.listdir(path) if _is_folder(path) else []
    return bool(WHEEL_FOLDER.match(os.path.basename(path)) and names and all(WHEEL.match(name) for name in names))
