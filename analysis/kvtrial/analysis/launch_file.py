"""What a launch file or a host's facts must be, so that the checks can read them. Pure."""

import re
from collections.abc import Mapping
from typing import Any

from kvtrial.record.errors import UnusableInput
from kvtrial.record.launch import MOST_WHOLE

BACKENDS = ("cuda", "cpu")
OTHER_PLATFORMS = {"rocm": "an AMD GPU (ROCm)", "xpu": "an Intel GPU (XPU)"}
"""Platforms that vLLM has and this project does not try: they are refused by name, not as a slip."""

_VERSION = re.compile(r"\d+(\.\d+)*")
_VERSIONS = {"driver_version": "580.65.06", "glibc": "2.35", "python": "3.12"}
_COUNTS = (
    "dev_shm_free_bytes",
    "dev_shm_total_bytes",
    "ram_available_bytes",
    "ram_total_bytes",
    "ram_reserve_bytes",
    "gpu_memory_mib",
)


def refuse_unreadable(host: Mapping[str, Any], vllm: Mapping[str, Any], arms: Mapping[Any, Any], model: Any) -> None:
    """Raise UnusableInput for what can't be read as a launch; a host's facts that are null count as absent."""
    for name, example in _VERSIONS.items():
        _refuse_version(f"host.{name}", host.get(name), example)
    for name in _COUNTS:
        _refuse_count(f"host.{name}", host.get(name))
    for name in OTHER_PLATFORMS:
        if not isinstance(host.get(name, False), bool):
            raise UnusableInput(f"host.{name}={host[name]!r} is neither true nor false; give one of the two.")
    if "version" not in vllm:
        raise UnusableInput("vllm.version is missing; give the version that /version prints, such as 0.32.0.")
    refuse_number_as_version(vllm)
    backend = vllm.get("backend", "cuda")
    if backend not in (*BACKENDS, *OTHER_PLATFORMS):
        raise UnusableInput(f"vllm.backend={backend!r} is not known; give cuda or cpu.")
    _refuse_version("vllm.cuda", vllm.get("cuda"), "'12.9'")
    if model is not None and not isinstance(model, Mapping):
        raise UnusableInput(f"model={model!r} is not a mapping; give it as {{kv_bytes_per_token: 114688}}.")
    if not arms:
        raise UnusableInput("arms is empty; give control and at least one variant, each with args and env.")
    for name, spec in arms.items():
        if not isinstance(name, str):
            raise UnusableInput(f"arm name {name!r} is not text; write it in quotes.")
        if not isinstance(spec, Mapping):
            raise UnusableInput(f"Arm {name}: {spec!r} is not a mapping; give it as {{args: [...], env: {{...}}}}.")


def refuse_number_as_version(vllm: Mapping[str, Any]) -> None:
    """Raise UnusableInput where YAML read `version` as a number: 0.30 has become 0.3 then."""
    if isinstance(vllm.get("version"), float):
        raise UnusableInput(
            f"vllm.version={vllm['version']!r} was read as a number, in which 0.30 is 0.3; quote it: version: '0.30.0'."
        )


def _refuse_version(what: str, value: Any, example: str) -> None:
    if value not in (None, "") and (isinstance(value, bool) or not _VERSION.match(str(value))):
        raise UnusableInput(f"{what}={value!r} is not a version; give it as {example}, or leave it out.")


def _refuse_count(what: str, value: Any) -> None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_WHOLE):
        return
    unit = "MiB" if what.endswith("_mib") else "bytes"
    raise UnusableInput(f"{what}={value!r:.80} is not a whole number of {unit}; write digits only, or leave it out.")
