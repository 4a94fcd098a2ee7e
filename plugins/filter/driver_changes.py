# Licensed under the Apache License, Version 2.0
"""Filter driver_changes; documented beside."""

from __future__ import annotations


def driver_changes(before, after):
    """What differs between two looks at a host's driver, in words, a string a thing; empty where nothing does.

    before, after: facts of the module driver_info.
    """
    said = []
    for name, value in (("loaded module", "module_version"), ("running kernel", "kernel")):
        if before[value] != after[value]:
            said.append("%s %s to %s" % (name, before[value] or "none", after[value] or "none"))
    for what, kind in (("packages", "package"), ("units", "unit")):
        for name in sorted({*before[what], *after[what]}):
            old, new = _words(before[what].get(name)), _words(after[what].get(name))
            if old != new:
                said.append("%s %s %s to %s" % (kind, name, old, new))
    for path in sorted({*before["files"], *after["files"]}):
        old, new = before["files"].get(path), after["files"].get(path)
        if old != new:
            said.append("%s %s" % (path, "removed" if new is None else "written" if old is None else "rewritten"))
    installed, gone = set(after["kernels"]) - set(before["kernels"]), set(before["kernels"]) - set(after["kernels"])
    said += ["kernel %s brought" % name for name in sorted(installed)]
    said += ["kernel %s removed" % name for name in sorted(gone)]
    return said


def _words(value):
    """A version, or the state of a unit, as it is said."""
    if isinstance(value, dict):
        return "%s, %s" % (value["active"], "enabled" if value["enabled"] else "not enabled")
    return value or "none"


class FilterModule:
    """Filters of this collection."""

    def filters(self):
        return {"driver_changes": driver_changes}
