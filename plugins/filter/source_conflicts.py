# Licensed under the Apache License, Version 2.0
"""Filter source_conflicts; documented beside."""

from __future__ import annotations


def source_conflicts(others, key_sha256, components):
    """Why entries of a repository can't be taken as they are, in words, an entry each; empty where each can.

    others: what driver_info found. key_sha256: of the pinned key; empty where nothing is signed. components: those
    asked for.
    """
    said = []
    for entry in others:
        reason = _reason(entry, key_sha256, components)
        if reason:
            said.append("%s (%s)" % (entry["file"], reason))
    return said


def _reason(entry, key_sha256, components):
    """What is not as the pin has it; empty where all is."""
    signed_by = entry["signed_by"]
    if entry["trusted"]:
        return "trusted=%s, by which no key is asked" % entry["trusted"]
    if not key_sha256:
        return "no entry beside that of the folder of packages is taken"
    if not signed_by:
        return "no Signed-By, so any key does that apt trusts"
    if not signed_by.startswith("/"):
        return "its key is no file"
    if entry["key_sha256"] is None:
        return "its key %s can't be read" % signed_by
    if entry["key_sha256"] != key_sha256:
        return "its key %s has sha256 %s" % (signed_by, entry["key_sha256"])
    if "deb" not in entry["kinds"]:
        return "it gives sources only"
    missing = [name for name in components if name not in entry["components"]]
    return "it lacks component %s" % ", ".join(missing) if missing else ""


class FilterModule:
    """Filters of this collection."""

    def filters(self):
        return {"source_conflicts": source_conflicts}
