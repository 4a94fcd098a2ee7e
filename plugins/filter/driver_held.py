# Licensed under the Apache License, Version 2.0
"""Filter driver_held; documented beside."""

from __future__ import annotations

import re

from ansible_collections.kvtrial.vllm.plugins.module_utils.driver_facts import upstream_version


def driver_held(packages, version):
    """What unattended upgrades leave alone: each installed package of the driver's version, by its whole name.

    packages: {name: version} of the driver's packages, also of companions, which count only at that version.
    """
    names = sorted(name for name, have in packages.items() if upstream_version(have) == version)
    return ["^%s$" % re.sub(r"([.+])", r"\\\1", name) for name in names]


class FilterModule:
    """Filters of this collection."""

    def filters(self):
        return {"driver_held": driver_held}
