# Licensed under the Apache License, Version 2.0
"""Filter driver_due; documented beside."""

from __future__ import annotations

import re

from ansible_collections.kvtrial.vllm.plugins.module_utils.driver_facts import COMPANIONS, upstream_version


def driver_due(installed, wanted, version):
    """What has to change, in words: wanted packages that are missing or at another version, and installed packages of
    the driver at another version than `version`, but for companions, which have versions of their own, and for those
    whose name ends in their version: they stand beside another's, as Ubuntu's nvidia-firmware-580-580.82.07 does.

    installed: {name: version}. wanted: what driver_specs gave.
    """
    due = {}
    for spec in wanted:
        name, _, asked = spec.partition("=")
        have = installed.get(name)
        pattern = re.escape(asked).replace(r"\*", ".*")
        if have is None or not re.match(r"^(\d+:)?%s$" % pattern, have):
            due[name] = "%s %s" % (name, have or "missing")
    for name, have in installed.items():
        own = upstream_version(have)
        beside = own is not None and name.endswith("-" + own)
        if name not in due and name not in COMPANIONS and not beside and own not in (None, version):
            due[name] = "%s %s" % (name, have)
    return [due[name] for name in sorted(due)]


class FilterModule:
    """Filters of this collection."""

    def filters(self):
        return {"driver_due": driver_due}
