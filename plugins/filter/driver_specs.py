# Licensed under the Apache License, Version 2.0
"""Filter driver_specs; documented beside."""

from __future__ import annotations


def driver_specs(packages, version):
    """Packages as apt takes them: name=version where one is given, else name=upstream-* of the pin."""
    return [package if "=" in package else "%s=%s-*" % (package, version) for package in packages]


class FilterModule:
    """Filters of this collection."""

    def filters(self):
        return {"driver_specs": driver_specs}
