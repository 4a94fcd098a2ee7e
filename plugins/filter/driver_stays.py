# Licensed under the Apache License, Version 2.0
"""Filter driver_stays; documented beside."""

from __future__ import annotations

from ansible_collections.kvtrial.vllm.plugins.module_utils.driver_facts import COMPANIONS, upstream_version


def driver_stays(packages, record):
    """Why an installed driver is not removed with this project, in words; empty where this project brought it.

    packages: {name: version} that is installed. record: {found, versions} that installations leave (what was there
    before the first, and every version brought); None where there was none.
    """
    if not packages:
        return ""
    if not record:
        return "this project did not bring it"
    found = sorted(name for name in record["found"] if name not in COMPANIONS)
    if found:
        first = "%s %s" % (found[0], record["found"][found[0]])
        return "one was there before this project (%s%s)" % (first, " and so on" if len(found) > 1 else "")
    if not any(upstream_version(version) in (None, *record["versions"]) for version in packages.values()):
        return "this project brought %s, and somebody another one since" % ", ".join(record["versions"])
    return ""


class FilterModule:
    """Filters of this collection."""

    def filters(self):
        return {"driver_stays": driver_stays}
