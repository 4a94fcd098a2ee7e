# Licensed under the Apache License, Version 2.0
"""Names of variables that the project knows, and slips among those that an inventory or a command line sets."""

from __future__ import annotations

import difflib
import glob
import os
import re

import yaml

# The parser in C where PyYAML has it: every host of a fleet has its names checked.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# Former names and what took their place. An entry goes with the release after the next.
REMOVED = {}


# Read beside their long names, and documented so.
SHORT = ("protocol", "arms")


def prefixes(root):
    """The prefixes of the project's variables: its own and its roles'."""
    roles = sorted(
        os.path.basename(path) for path in glob.glob(os.path.join(root, "roles", "*")) if os.path.isdir(path)
    )
    return tuple(name + "_" for name in ["kvtrial", *roles])


def known_names(root):
    """Every name that the pins, the roles and the playbooks define or take."""
    names = set()
    pins = [os.path.join(root, "group_vars", "all", "pins.yml")]
    for path in pins + glob.glob(os.path.join(root, "roles", "*", "*", "main.yml")):
        if os.path.basename(os.path.dirname(path)) in ("defaults", "vars", "all"):
            with open(path, encoding="utf-8") as file:
                names |= set(yaml.load(file, Loader=LOADER) or {})
    for path in glob.glob(os.path.join(root, "roles", "*", "meta", "argument_specs.yml")):
        with open(path, encoding="utf-8") as file:
            for entry in (yaml.load(file, Loader=LOADER) or {}).get("argument_specs", {}).values():
                names |= set(entry.get("options") or {})
    # What a playbook or a task takes by `| default(…)`, registers or keeps as a fact.
    for path in glob.glob(os.path.join(root, "playbooks", "*.yml")) + glob.glob(
        os.path.join(root, "roles", "*", "tasks", "*.yml")
    ):
        with open(path, encoding="utf-8") as file:
            names |= set(re.findall(r"\b[a-z][a-z0-9_]*\b", file.read()))
    return names


def settings(root):
    """Names that users give on the command line or in an inventory: the pins, and what is taken by default."""
    with open(os.path.join(root, "group_vars", "all", "pins.yml"), encoding="utf-8") as file:
        names = set(yaml.safe_load(file) or {})
    for path in glob.glob(os.path.join(root, "playbooks", "*.yml")) + glob.glob(
        os.path.join(root, "roles", "*", "defaults", "main.yml")
    ):
        with open(path, encoding="utf-8") as file:
            names |= set(re.findall(r"\b(kvtrial_[a-z0-9_]+) *\| *default\(", file.read()))
    return {name for name in names if name.startswith("kvtrial_")}


def distance(one, other):
    """How many letters are wrong, missing, too many, or exchanged with the next."""
    rows = [list(range(len(other) + 1))]
    for i, letter in enumerate(one, 1):
        row = [i]
        for j, wanted in enumerate(other, 1):
            row.append(min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != wanted)))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                row[-1] = min(row[-1], rows[-2][j - 2] + 1)
        rows.append(row)
    return rows[-1][-1]


DISTINCT = ("kvtrial_", "vllm_", "nvidia_driver_", "workload_")
"""Prefixes under which a word of the project's is taken for its own, whatever the word: one of theirs with a letter
wrong, or with a word left out (nvidia_version), is a slip. model_, engine_ and the like are words of everybody's."""
EVERYBODYS = (
    *("llm", "llvm", "mode", "model", "modal", "motel", "trail", "triad", "adapt", "adept", "observer", "observed"),
    *("collector", "collected", "calibrations"),
)
"""Words a letter or two beside a prefix that mean something themselves."""


def _is_slip(begin, prefix, rest):
    """Whether `begin` is a prefix of the project's with a slip, beside the rest of a name that has that prefix."""
    whole = prefix.rstrip("_")
    first = whole.split("_")[0]
    if prefix in DISTINCT:
        left_out = begin in whole.split("_") if "_" in rest else begin == first
        return left_out or distance(begin, whole) == 1 or (first != whole and distance(begin, first) == 1)
    if begin in whole.split("_") or distance(begin, whole) == 1:
        # With a word of its own behind it, models_ is somebody's plural; modle_ is no word.
        return "_" in rest or begin != whole + "s"
    return False


def meant(name, known, of_the_project):
    """The known name that one with a slip in its prefix was meant to be; empty where it is nobody's of the project.

    Slips are a letter of the prefix, an underscore in it (kv_trial_pairs), and a word of it left out
    (nvidia_reboot_allowed).
    """
    words = name.split("_")
    for parts in (1, 2):
        begin, rest = "".join(words[:parts]), "_".join(words[parts:])
        off = distance(begin, "kvtrial") if abs(len(begin) - 7) < 3 else 9
        if rest and (off < 2 or (off == 2 and begin.startswith("kv"))):
            wanted = "kvtrial_" + rest
            near = difflib.get_close_matches(wanted, sorted(n for n in known if n.startswith("kvtrial_")), 1, 0.6)
            return wanted if wanted in known else near[0] if near else wanted
    for prefix in of_the_project:
        for parts in range(1, len(prefix.rstrip("_").split("_")) + 1):
            begin, rest = "_".join(words[:parts]), "_".join(words[parts:])
            if rest and prefix + rest in known and begin not in EVERYBODYS and _is_slip(begin, prefix, rest):
                return prefix + rest
    return ""


def slips(names, known, own, of_the_project, removed=None, settable=()):
    """Sentences about names that nobody reads: former ones and unknown ones with a prefix of the project's.

    A name that is one of `settable` without its prefix is a slip as well, but for the two that are read.
    """
    removed = REMOVED if removed is None else removed
    sentences = []
    for name in sorted(names):
        if name in removed:
            sentences.append("%s was removed; set %s" % (name, removed[name]))
        elif name.startswith(of_the_project) and name not in known and name not in own:
            near = difflib.get_close_matches(name, sorted(n for n in known if n.startswith(of_the_project)), 1, 0.6)
            sentences.append("%s is unknown%s" % (name, " (did you mean %s?)" % near[0] if near else ""))
        elif "kvtrial_" + name in settable and not name.startswith(of_the_project) and name not in (*SHORT, *own):
            sentences.append("%s is read by nobody (did you mean kvtrial_%s?)" % (name, name))
        elif not name.startswith((*of_the_project, "ansible_", "_")) and name not in (*SHORT, *own):
            near = meant(name, known, of_the_project)
            if near and near != name:
                sentences.append("%s is read by nobody (did you mean %s?)" % (name, near))
    return sentences
