# Licensed under the Apache License, Version 2.0
"""Which entries of a host's apt sources name a repository, as apt reads them. Standard library only, Python 3.8.

apt takes entries with the same address and suite for one repository, and reads no source at all where their options
differ ("Conflicting values set for option Signed-By"). So apt 2.6.1 and 3.0.4; tests/ansible/test_apt_sources.py asks.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shlex

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
ONE_LINE = re.compile(r"^\s*(deb|deb-src)\s+(?:\[([^\]]*)\]\s*)?(.+)$")
DISABLED = ("no", "false", "without", "off", "disable", "0")


def parse_list(text):
    """Entries of a one-line file (.list): [{kinds, uris, suites, components, signed_by, trusted}]."""
    found = []
    for line in text.splitlines():
        match = ONE_LINE.match(line.split("#", 1)[0])
        if not match:
            continue
        try:
            words = shlex.split(match.group(3))
            options = dict(word.split("=", 1) for word in shlex.split(match.group(2) or "") if "=" in word)
        except ValueError:
            continue
        options = {name.rstrip("+-").lower(): value for name, value in options.items()}
        if len(words) > 1:
            found.append(
                {
                    "kinds": [match.group(1)],
                    "uris": words[:1],
                    "suites": words[1:2],
                    "components": words[2:],
                    "signed_by": options.get("signed-by", ""),
                    "trusted": options.get("trusted", ""),
                }
            )
    return found


def parse_deb822(text):
    """Entries of a deb822 file (.sources), those that are switched off left out; as parse_list gives them."""
    found = []
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for block in re.split(r"\n(?:[ \t]*\n)+", "\n".join(lines)):
        fields, name = {}, None
        for line in block.splitlines():
            if line[:1] in (" ", "\t"):
                if name is not None:
                    fields[name] += "\n" + line.strip()
            elif ":" in line:
                name, _, value = line.partition(":")
                name = name.strip().lower()
                fields[name] = value.strip()
        if fields.get("enabled", "yes").lower() in DISABLED or "uris" not in fields:
            continue
        found.append(
            {
                "kinds": fields.get("types", "").split(),
                "uris": fields["uris"].split(),
                "suites": fields.get("suites", "").split(),
                "components": fields.get("components", "").split(),
                "signed_by": fields.get("signed-by", "").strip(),
                "trusted": fields.get("trusted", ""),
            }
        )
    return found


def repository(uri, suite, machine):
    """What apt tells repositories apart by: address with its last slash, and suite, both with $(ARCH) put in."""
    architecture = ARCHITECTURES.get(machine, machine)
    uri, suite = (word.replace("$(ARCH)", architecture) for word in (uri, suite))
    return (uri if uri.endswith("/") else uri + "/", suite)


def others(uri, suite, machine, own="", root="/etc/apt"):
    """[{file, kinds, components, signed_by, key_sha256, trusted}] of the repository's entries in files but `own`.

    key_sha256: that of the file that Signed-By names; None where it names no single file that can be read.
    """
    wanted, found = repository(uri, suite, machine), []
    paths = [os.path.join(root, "sources.list")]
    paths += sorted(glob.glob(os.path.join(root, "sources.list.d", "*.list")))
    paths += sorted(glob.glob(os.path.join(root, "sources.list.d", "*.sources")))
    for path in paths:
        if path == own:
            continue
        try:
            with open(path, errors="replace") as file:
                text = file.read()
        except OSError:
            continue
        for entry in parse_deb822(text) if path.endswith(".sources") else parse_list(text):
            if wanted in [repository(one, other, machine) for one in entry["uris"] for other in entry["suites"]]:
                kept = {name: entry[name] for name in ("kinds", "components", "signed_by", "trusted")}
                found.append(dict(kept, file=path, key_sha256=_digest(entry["signed_by"])))
    return found


def _digest(path):
    """sha256 of a file; None where it is none."""
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except (OSError, ValueError):
        return None
