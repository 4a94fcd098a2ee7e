# Licensed under the Apache License, Version 2.0
"""Filter wheel_needs: what a wheel of vLLM needs of a host; documented beside."""

from __future__ import annotations

import re


def _numbers(version):
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3]]


def wheel_needs(table, version, wheel=""):
    """{cuda, least_driver, python_min} of a release, or of a wheel whose name says its CUDA (…+cu129…).

    `table` is analysis/kvtrial/record/data/cuda.yml. What the table doesn't know is "" or 0: then nothing is refused.
    """
    row = {}
    for candidate in table["wheels"]:
        until = candidate.get("until")
        if _numbers(candidate["since"]) <= _numbers(version) and (not until or _numbers(version) < _numbers(until)):
            row = candidate
    named = re.search(r"\bcu(\d{2})(\d)\b|\+cu(\d{2})(\d)", wheel or version)
    cuda = row.get("cuda", "")
    if named:
        cuda = ".".join(part for part in named.groups() if part)
    least = 0
    for driver in table["drivers"]:
        if cuda and driver["cuda_major"] == int(cuda.split(".")[0]):
            least = driver["least_driver"]
    return {"cuda": cuda, "least_driver": least, "python_min": row.get("python_min", "")}


class FilterModule:
    """Filters of this collection."""

    def filters(self):
        return {"wheel_needs": wheel_needs}
