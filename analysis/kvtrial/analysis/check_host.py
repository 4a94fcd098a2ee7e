"""Whether a host can run a vLLM build: Python, C library and NVIDIA driver."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from kvtrial.analysis.launch_arm import Backend, Finding
from kvtrial.record.versions import cuda_of_local_version, data, within


class Wheel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the PyPI wheels of versions [since, until) need."""

    since: str
    cuda: str
    python_min: str
    python_max: str
    torch: str
    until: str | None = None
    glibc_min: str | None = None


class Driver(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Least NVIDIA driver (major) for a CUDA major."""

    cuda_major: int
    least_driver: int


class CudaTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`data/cuda.yml`."""

    wheels: list[Wheel]
    drivers: list[Driver]


def check_host(host: Mapping[str, Any], vllm: Mapping[str, Any], version: str, backend: Backend) -> Iterator[Finding]:
    """Findings on a host's driver_version, glibc and python for a vLLM build; absent facts are not judged."""
    table = data("cuda", CudaTable)
    wheel = next((wheel for wheel in table.wheels if within(version, wheel.since, wheel.until)), None)
    if wheel is None:
        return
    python = host.get("python")
    if python and not _numbers(wheel.python_min) <= _numbers(str(python))[:2] <= _numbers(wheel.python_max):
        yield Finding(
            "python_not_supported",
            "refuse",
            None,
            f"Python {python} is outside {wheel.python_min} to {wheel.python_max}, which the wheel of vLLM "
            f"{version} takes.",
            {"python": str(python)},
            f"Use a Python from {wheel.python_min} to {wheel.python_max}.",
        )
    if backend == "cpu":
        return
    glibc = host.get("glibc")
    if glibc and wheel.glibc_min and _numbers(str(glibc)) < _numbers(wheel.glibc_min):
        yield Finding(
            "glibc_too_old",
            "refuse",
            None,
            f"glibc {glibc} is older than {wheel.glibc_min}, which the PyPI wheel of vLLM {version} needs.",
            {"glibc": str(glibc), "least_glibc": wheel.glibc_min},
            "Use a newer distribution, a container, or another vLLM version.",
        )
    yield from _check_driver(host, vllm, version, wheel, table)


def _check_driver(
    host: Mapping[str, Any], vllm: Mapping[str, Any], version: str, wheel: Wheel, table: CudaTable
) -> Iterator[Finding]:
    driver = host.get("driver_version")
    if not driver:
        return
    source = str(vllm.get("source") or "pypi")
    named = re.search(r"cu(\d{2})(\d)", source)
    stated = vllm.get("cuda") or cuda_of_local_version(version) or (f"{named[1]}.{named[2]}" if named else None)
    if stated is None and source != "pypi":
        yield Finding(
            "driver_not_judged",
            "warn",
            None,
            f"The CUDA of this vLLM build ({source}) is not stated, so driver {driver} was not judged.",
            {"driver_version": str(driver)},
            "Give vllm.cuda, such as '12.9'.",
        )
        return
    cuda = str(stated or wheel.cuda)
    least = next((row.least_driver for row in table.drivers if row.cuda_major == _numbers(cuda)[0]), None)
    if least is None or _numbers(str(driver))[0] >= least:
        return
    built = (
        f"the PyPI wheel of vLLM {version} comes with torch {wheel.torch} / CUDA {cuda}"
        if stated is None
        else f"this build is for CUDA {cuda}"
    )
    yield Finding(
        "driver_too_old",
        "refuse",
        None,
        f"Driver {driver} < {least}, the least that CUDA {cuda.split('.')[0]} wheels (PyPI vLLM 0.20 and newer) "
        f"need; {built}."
        if stated is None
        else f"Driver {driver} < {least}, the least that CUDA {cuda.split('.')[0]} needs; {built}.",
        {"driver_version": str(driver), "least_driver": least, "cuda": cuda, "torch": wheel.torch},
        f"Update the driver to >= {least}, or use vLLM <= 0.19.1, or a cu129 build by its full wheel URL (on "
        "data-centre GPUs NVIDIA's "
        "forward-compatibility package can lift this)."
        if least > 525
        else f"Update the driver to >= {least}.",
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))
