"""Whether an engine is exposed, and whether arms can be compared: one thing tested, all else alike."""

import ipaddress
import json
from collections.abc import Iterator, Mapping
from typing import Any

from kvtrial.analysis.check_options import dashes, settings_of
from kvtrial.analysis.launch_arm import Arm, Finding
from kvtrial.record.errors import UnusableInput
from kvtrial.record.launch import human_int
from kvtrial.record.versions import within

_WHAT_IS_TESTED = frozenset({"kv-transfer-config", "kv-offloading-size", "kv-offloading-backend"})
_SIZE_OF_THE_POOL = frozenset({"--num-gpu-blocks-override", "--kv-cache-memory-bytes"})
_BRING_ANOTHER_POOL = frozenset({"--kv-cache-dtype", "--tensor-parallel-size", "--gpu-memory-utilization", "--model"})
"""One of these changed is one change, though as many bytes of KV cache are then another number of blocks."""
_FREE_TO_DIFFER = frozenset({"port", "uds", "api-key"})
_ENV_FREE_TO_DIFFER = frozenset({"VLLM_PORT", "VLLM_API_KEY", "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME"})


def check_exposure(arm: Arm) -> Iterator[Finding]:
    """Findings on where an arm listens: development endpoints beyond loopback are refused, other binds warned of."""
    address = arm.parsed.text("host")
    if arm.parsed.text("uds") or (address is not None and loopback(address)):
        return
    where = f"--host {address}" if address else "no --host, which is every address of the machine"
    if arm.env.get("VLLM_SERVER_DEV_MODE", "0") not in ("", "0"):
        yield Finding(
            "dev_mode_exposed",
            "refuse",
            arm.name,
            f"VLLM_SERVER_DEV_MODE={arm.env['VLLM_SERVER_DEV_MODE']} with {where}: /reset_prefix_cache, /sleep, "
            "/collective_rpc and other development "
            "endpoints answer without a key (--api-key does not guard them) to whoever reaches the port.",
            {"host": address},
            "Bind to --host 127.0.0.1, or leave VLLM_SERVER_DEV_MODE unset in all arms.",
        )
    else:
        yield Finding(
            "non_loopback_bind",
            "warn",
            arm.name,
            f"The engine listens beyond loopback ({where}); /metrics, /tokenize and /invocations are never "
            "guarded, and other clients would disturb the trial.",
            {"host": address},
            "Bind to --host 127.0.0.1.",
        )


def loopback(address: str) -> bool:
    """Whether an address is reached from this machine alone."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return False


def check_comparable(arms: list[Arm]) -> Iterator[Finding]:
    """Findings on each arm against the control (the arm of that name, else the first): more than one thing changed."""
    for arm in arms:
        if "config" in arm.parsed.options:
            yield Finding(
                "config_file_not_seen",
                "warn",
                arm.name,
                f"--config {arm.parsed.options['config']} is read by the engine and was not seen here.",
                {},
                "Give its content as arguments.",
            )
        if arm.parsed.repeated:
            yield Finding(
                "repeated_option",
                "warn",
                arm.name,
                f"{', '.join(dashes(name) for name in arm.parsed.repeated)} is given more than once; the last one "
                "counts.",
                {"options": arm.parsed.repeated},
                "Give it once.",
            )
    control = next((arm for arm in arms if arm.name == "control"), arms[0])
    for variant in arms:
        if variant is not control:
            yield from _check_pair(control, variant)


def _check_pair(control: Arm, variant: Arm) -> Iterator[Finding]:
    options = _differing(settings_of(control), settings_of(variant), _WHAT_IS_TESTED | _FREE_TO_DIFFER | {"model"})
    if control.parsed.model != variant.parsed.model:
        options["model"] = (control.parsed.model, variant.parsed.model)
    environment = _differing(control.env, variant.env, _ENV_FREE_TO_DIFFER)
    layout = environment.get("VLLM_KV_CACHE_LAYOUT")
    adds_connector = variant.tier is not None and control.tier is None
    # HND in the control alone gives it the layout that the connector asks for by itself.
    if layout == ("HND", None) and adds_connector:
        del environment["VLLM_KV_CACHE_LAYOUT"]
    tested = control.tier != variant.tier
    found = {dashes(name): pair for name, pair in options.items()} | environment
    if not tested and len(_BRING_ANOTHER_POOL & found.keys()) == 1:
        found = {name: pair for name, pair in found.items() if name not in _SIZE_OF_THE_POOL}
    if not tested and found.keys() <= _SIZE_OF_THE_POOL:
        # Blocks in one arm and bytes in the other: one change, the pool's size.
        found = {}
    if found and (tested or len(found) > 1):
        listed = "; ".join(
            f"{name}: control {_shown(pair[0])}, {variant.name} {_shown(pair[1])}" for name, pair in found.items()
        )
        yield Finding(
            "arms_not_comparable",
            "refuse",
            variant.name,
            f"{control.name} and {variant.name} differ in more than what is tested"
            + (f" ({_tier_change(control, variant)})" if tested else "")
            + f": {listed}; an effect could come from any of these.",
            {name: {"control": pair[0], "variant": pair[1]} for name, pair in found.items()},
            "Set these alike in all arms, and change one thing between them.",
        )
    pinned = {arm.env.get("VLLM_KV_CACHE_LAYOUT") for arm in (control, variant)}
    if adds_connector and variant.backend == "cuda" and pinned == {None} and within(variant.version, "0.22", None):
        yield Finding(
            "kv_layout_differs",
            "warn",
            variant.name,
            f"{variant.tier.connector if variant.tier else ''} changes the layout of the GPU's KV cache in "
            f"{variant.version}; {control.name} runs another one, so "
            "the comparison holds the layout's effect too.",
            {},
            "Set VLLM_KV_CACHE_LAYOUT=HND in all arms, or compare within one server (max_load_tokens 0, from 0.31).",
        )


def _differing(left: Mapping[str, Any], right: Mapping[str, Any], free: frozenset[str]) -> dict[str, tuple[Any, Any]]:
    names = [name for name in {**left, **right} if name not in free]
    return {name: (left.get(name), right.get(name)) for name in names if not _same(left.get(name), right.get(name))}


def _same(left: Any, right: Any) -> bool:
    """Equal values, also where a size is written in two ways (256M and 268435456)."""
    if left == right or not (isinstance(left, str) and isinstance(right, str)):
        return bool(left == right)
    try:
        return human_int(left, "left") == human_int(right, "right")
    except UnusableInput:
        return False


def _tier_change(control: Arm, variant: Arm) -> str:
    names = [arm.tier.connector if arm.tier else "no connector" for arm in (control, variant)]
    return f"{names[0]} against {names[1]}" if names[0] != names[1] else f"{names[0]} with other settings"


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value) if isinstance(value, dict) else str(value)
