"""Whether an arm's connector configuration means what it says: keys, values, chunk size, platform."""

import difflib
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from kvtrial.analysis.launch_arm import Arm, Finding
from kvtrial.record.hazards import DEFAULT_SPEC
from kvtrial.record.launch import Tier
from kvtrial.record.versions import data, within

KeyType = Literal["string", "integer", "number", "boolean", "object", "array"]
CPU_BLOCK_MULTIPLE = 32
TIERING_SPEC = "TieringOffloadingSpec"
LEAST_THRESHOLD = 2
"""store_threshold from which stores are left out."""

_PYTHON_TYPES: dict[KeyType, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
}


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A configuration key, for versions [since, until)."""

    type: KeyType
    since: str | None = None
    until: str | None = None
    allowed: list[str] | None = None
    replaced_by: str | None = None


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A spec of vLLM's own, from version `since`."""

    since: str | None = None


class KeyTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`data/connector_keys.yml`."""

    top_level: dict[str, Key]
    top_level_not_judged: list[str]
    connectors: dict[str, dict[str, Key]]
    offloading_backends: list[str]
    specs: dict[str, Spec]
    out_of_tree_specs: dict[str, dict[str, Key]]
    other_connectors: list[str]
    request_params: dict[str, Key]


def check_connector(arm: Arm) -> Iterator[Finding]:
    """Findings on an arm's --kv-transfer-config and --kv-offloading-size in its version."""
    tier = arm.tier
    yield from _check_top_level(arm)
    yield from _check_shortcut(arm)
    if tier is None:
        return
    if tier.by_shortcut and tier.by_json:
        yield _mixed_interfaces(arm, tier)
    table = data("connector_keys", KeyTable)
    given = arm.parsed.kv_transfer or {}
    custom = bool(given.get("kv_connector_module_path"))
    if tier.connector not in table.connectors and not custom:
        known = tier.connector in table.other_connectors
        near = _near(tier.connector, [*table.connectors, *table.other_connectors])
        yield Finding(
            "unknown_connector",
            "warn" if known else "refuse",
            arm.name,
            f"{tier.connector} is a connector of vLLM, but its keys are not known here and were not checked."
            if known
            else f"There is no connector {tier.connector!r} in vLLM; the engine would end in 'Unsupported connector "
            f"type: {tier.connector}'{near}.",
            {"kv_connector": tier.connector},
            "Give OffloadingConnector, or kv_connector_module_path for a connector of your own.",
        )
    if not tier.role:
        yield Finding(
            "kv_role_missing",
            "refuse",
            arm.name,
            "kv_connector is given without kv_role; the engine would end in 'Please specify kv_role when "
            "kv_connector is set'.",
            {},
            'Give "kv_role": "kv_both".',
        )
    if tier.connector in table.connectors:
        yield from _check_keys(arm, tier, table)
        own_specs = [name for name, spec in table.specs.items() if within(arm.version, spec.since, None)]
        yield from _check_spec(arm, tier, own_specs)
        yield from _check_platform(arm, tier, own_specs)


def _mixed_interfaces(arm: Arm, tier: Tier) -> Finding:
    inner = (arm.parsed.kv_transfer or {}).get("kv_connector_extra_config")
    written = inner.get("cpu_bytes_to_use") if isinstance(inner, dict) else None
    size = arm.parsed.text("kv-offloading-size")
    instead = f", not the {written} written in the JSON" if written is not None else ""
    return Finding(
        "mixed_interfaces",
        "refuse",
        arm.name,
        f"Both --kv-offloading-size {size} and --kv-transfer-config are given; vLLM neither rejects this nor "
        "warns: --kv-offloading-size wins, the "
        f"connector is {tier.connector}, effective cpu_bytes_to_use = {size} * 2**30 = {tier.cpu_bytes}{instead}, "
        "and the other keys of the JSON survive.",
        {
            "effective_cpu_bytes_to_use": tier.cpu_bytes,
            "written_cpu_bytes_to_use": written,
            "kv_offloading_size_gib": size,
        },
        "Keep one interface (the JSON), delete the other, and record the effective value.",
    )


def _check_shortcut(arm: Arm) -> Iterator[Finding]:
    """Findings on --kv-offloading-size and --kv-offloading-backend where not both are given as the version needs it."""
    size, backend = arm.parsed.text("kv-offloading-size"), arm.parsed.text("kv-offloading-backend")
    by_size = within(arm.version, "0.14", None)
    table = data("connector_keys", KeyTable)
    if backend is not None and backend not in table.offloading_backends:
        yield Finding(
            "unusable_value",
            "refuse",
            arm.name,
            f"--kv-offloading-backend {backend!r} is not one of {', '.join(table.offloading_backends)}"
            f"{_near(backend, table.offloading_backends)}.",
            {"key": "kv-offloading-backend", "value": backend, "allowed": table.offloading_backends},
            f"Give one of {', '.join(table.offloading_backends)}.",
        )
    elif backend is not None and size is None:
        without = "without any tier" if arm.tier is None else f"with the {arm.tier.connector} of the JSON alone"
        yield Finding(
            "offloading_not_activated",
            "warn" if by_size and arm.tier is not None else "refuse",
            arm.name,
            f"--kv-offloading-backend {backend} is given without --kv-offloading-size, which alone activates "
            f"offloading in vLLM {arm.version}: it is ignored without a word, and the engine runs {without}."
            if by_size
            else f"--kv-offloading-backend {backend} is given without --kv-offloading-size; vLLM {arm.version} ends in "
            "'You must set kv_offloading_size when kv_offloading_backend is set.'",
            {"kv_offloading_backend": backend, "kv_offloading_size_gib": None},
            "Give --kv-offloading-size in GiB, or take --kv-offloading-backend out.",
        )
    elif size is not None and not by_size and backend != "lmcache":
        yield Finding(
            "offloading_not_activated",
            "refuse",
            arm.name,
            f"--kv-offloading-size {size} is given without --kv-offloading-backend, which activates offloading before "
            f"0.14 (here {arm.version}): it is ignored without a word, and the engine runs "
            f"{'without any tier' if arm.tier is None else f'with the {arm.tier.connector} of the JSON alone'}."
            if backend is None
            else f"--kv-offloading-backend {backend} with --kv-offloading-size {size}: before 0.14 (here "
            f"{arm.version}) this sets num_cpu_blocks to 0, and the engine ends in 'num_cpu_blocks must be specified "
            "in kv_connector_extra_config'.",
            {"kv_offloading_backend": backend, "kv_offloading_size_gib": size},
            "Give num_cpu_blocks in --kv-transfer-config instead, or use vLLM 0.14 or newer in all arms.",
        )


def _check_top_level(arm: Arm) -> Iterator[Finding]:
    table = data("connector_keys", KeyTable)
    for key, value in (arm.parsed.kv_transfer or {}).items():
        if key in table.top_level_not_judged:
            yield Finding(
                "unknown_key",
                "warn",
                arm.name,
                f"{key} in --kv-transfer-config belongs to older point-to-point connectors; whether {arm.version} "
                "still takes it was not read.",
                {"key": key},
                f"Take {key} out.",
            )
        elif key not in table.top_level:
            inside = key in table.connectors.get("OffloadingConnector", {})
            yield Finding(
                "unknown_key",
                "refuse",
                arm.name,
                f"{key} is no key of --kv-transfer-config; the engine would refuse to start"
                + (
                    ", it belongs inside kv_connector_extra_config."
                    if inside
                    else f"{_near(key, list(table.top_level))}."
                ),
                {"key": key, "value": value},
                f"Move {key} into kv_connector_extra_config." if inside else f"Take {key} out or correct it.",
            )
        else:
            yield from _check_value(arm, key, value, table.top_level[key])


def _check_keys(arm: Arm, tier: Tier, table: KeyTable) -> Iterator[Finding]:
    keys = table.connectors[tier.connector]
    module = tier.extra.get("spec_module_path") if "spec_module_path" in keys else None
    foreign = isinstance(module, str) and bool(module) and module not in table.out_of_tree_specs
    if isinstance(module, str):
        keys = keys | table.out_of_tree_specs.get(module, {})
    for name, value in tier.extra.items():
        key = keys.get(name)
        if key is None:
            near = _near(name, list(keys))
            owners = [other for other, theirs in table.connectors.items() if name in theirs and other != tier.connector]
            belongs = f"; it is a key of {owners[0]}" if owners else near
            if foreign:
                yield _unknown_to_foreign_spec(arm, tier, name, value, str(module), near, belongs)
                continue
            yield Finding(
                "unknown_key",
                "refuse",
                arm.name,
                f"{name} is no key of {tier.connector} in any version read; vLLM ignores it without a word{belongs}.",
                {"key": name, "value": value},
                f"Take {name} out or correct it.",
            )
        elif key.until is not None and not within(arm.version, None, key.until):
            yield _obsolete(arm, tier, name, value, key)
        elif not within(arm.version, key.since, None):
            yield Finding(
                "unknown_key",
                "refuse",
                arm.name,
                f"{name} exists from vLLM {key.since}; {arm.version} ignores it without a word.",
                {"key": name, "value": value, "since": key.since},
                f"Take {name} out, or use vLLM {key.since} or newer in all arms.",
            )
        else:
            yield from _check_value(arm, name, value, key)
    yield from _check_chunk(arm, tier)


def _unknown_to_foreign_spec(
    arm: Arm, tier: Tier, name: str, value: Any, module: str, near: str, belongs: str
) -> Finding:
    """An out-of-tree spec reads the same dictionary, so the key may be one of its own; nothing here can tell."""
    return Finding(
        "unknown_key",
        "refuse" if near else "warn",
        arm.name,
        f"{name} is no key of {tier.connector} in any version read, and whether the spec of {module} reads it is not "
        f"known here; vLLM ignores what nobody reads without a word{belongs}.",
        {"key": name, "value": value, "spec_module_path": module},
        f"Take {name} out or correct it, or name it in kvtrial_connector_extra_keys if {module} reads it.",
    )


def _obsolete(arm: Arm, tier: Tier, name: str, value: Any, key: Key) -> Finding:
    also = key.replaced_by is not None and key.replaced_by in tier.extra
    then = (
        f"{key.replaced_by} is given too and counts, {name} is ignored without a word"
        if also
        else f"the engine would end in '{key.replaced_by} must be specified in kv_connector_extra_config'"
    )
    numbers: dict[str, Any] = {"key": name, "value": value, "until": key.until}
    do = f"Take {name} out."
    if not also:
        do = f"Give {key.replaced_by} in bytes for all workers together instead of {name}"
        if isinstance(value, int) and arm.kv_bytes_per_token:
            same = value * arm.kv_bytes_per_token * arm.block_tokens
            numbers["same_in_bytes"] = same
            do += f"; {value} blocks of {arm.block_tokens} tokens are {same} bytes"
        do += "."
    return Finding(
        "obsolete_key",
        "refuse",
        arm.name,
        f"{name} is not read since vLLM {key.until} (here {arm.version}); {then}.",
        numbers,
        do,
    )


def _check_value(arm: Arm, name: str, value: Any, key: Key) -> Iterator[Finding]:
    if value is None:
        return
    right = isinstance(value, _PYTHON_TYPES[key.type]) and (key.type == "boolean" or not isinstance(value, bool))
    # vLLM passes sizes through int(), so digits in quotes and whole floats do.
    if key.type == "integer" and not right:
        right = (isinstance(value, str) and value.strip().isdigit()) or (
            isinstance(value, float) and value.is_integer()
        )
    if not right:
        yield Finding(
            "unusable_value",
            "refuse",
            arm.name,
            f"{name}={value!r} is not of type {key.type}, as vLLM expects it.",
            {"key": name, "value": value},
            "Give whole bytes, such as 8589934592 for 8 GiB."
            if name.startswith("cpu_bytes")
            else f"Give {name} as {key.type}.",
        )
    elif key.allowed is not None and value not in key.allowed and not _own_policy(arm):
        yield Finding(
            "unusable_value",
            "refuse",
            arm.name,
            f"{name}={value!r} is not one of {', '.join(key.allowed)}{_near(str(value), key.allowed)}.",
            {"key": name, "value": value, "allowed": key.allowed},
            f"Give one of {', '.join(key.allowed)}.",
        )


def _own_policy(arm: Arm) -> bool:
    return arm.tier is not None and bool(arm.tier.extra.get("cache_policy_module_path"))


def _check_chunk(arm: Arm, tier: Tier) -> Iterator[Finding]:
    chunk, block = tier.extra.get("block_size"), arm.block_tokens
    if arm.backend == "cpu" and block % CPU_BLOCK_MULTIPLE:
        return
    if "block_size" in tier.extra and "blocks_per_chunk" in tier.extra:
        yield Finding(
            "both_chunk_sizes",
            "refuse",
            arm.name,
            f"block_size={chunk} and blocks_per_chunk={tier.extra['blocks_per_chunk']} are both given; from 0.26 "
            "the engine ends in 'Specify only one of "
            "'block_size' or 'blocks_per_chunk''.",
            {"block_size": chunk, "blocks_per_chunk": tier.extra["blocks_per_chunk"]},
            "Keep one of them.",
        )
    each = tier.extra.get("blocks_per_chunk")
    if isinstance(each, int) and not isinstance(each, bool) and each < 1:
        yield Finding(
            "blocks_per_chunk_not_positive",
            "refuse",
            arm.name,
            f"blocks_per_chunk={each}: a chunk of the tier must hold at least one GPU block.",
            {"blocks_per_chunk": each},
            "Give 1 or more, or leave it out.",
        )
    if not isinstance(chunk, int) or isinstance(chunk, bool) or (chunk > 0 and chunk % block == 0):
        return
    below = chunk // block * block
    above = below + block
    fitting = [size for size in (below, above) if size > 0]
    says = (
        "an AssertionError without any text"
        if within(arm.version, None, "0.30")
        else f"'block_size'={chunk} in kv_connector_extra_config must be a multiple of the GPU KV cache block size "
        f"({block} tokens)"
    )
    in_blocks = (
        f", or blocks_per_chunk {' or '.join(str(size // block) for size in fitting)} (never both)"
        if within(arm.version, "0.26", None)
        else ""
    )
    yield Finding(
        "block_size_not_multiple",
        "refuse",
        arm.name,
        f"block_size={chunk} is not a multiple of the GPU block size {block}; in {arm.version} the start ends in "
        f"{says}.",
        {"block_size": chunk, "gpu_block_size": block, "fitting": fitting},
        f"Use {' or '.join(map(str, fitting))}{in_blocks}.",
    )


def _check_spec(arm: Arm, tier: Tier, own_specs: list[str]) -> Iterator[Finding]:
    name = tier.extra.get("spec_name", DEFAULT_SPEC)
    if tier.connector == "OffloadingConnector" and name not in own_specs and tier.extra.get("spec_module_path") is None:
        yield Finding(
            "unusable_value",
            "refuse",
            arm.name,
            f"spec_name={name!r} is no spec of vLLM {arm.version}, which has {' and '.join(own_specs)}, and "
            f"spec_module_path is not given; the engine would end in 'Unsupported spec type: {name}'"
            f"{_near(str(name), own_specs)}.",
            {"key": "spec_name", "value": name, "allowed": own_specs},
            "Leave spec_name out, or give spec_module_path for a spec of your own.",
        )
    threshold = tier.extra.get("store_threshold")
    if name == TIERING_SPEC and name in own_specs and _as_count(threshold) >= LEAST_THRESHOLD:
        yield Finding(
            "unusable_value",
            "refuse",
            arm.name,
            f"store_threshold={threshold} does not go with {TIERING_SPEC}: the engine ends in 'store_threshold is not "
            f"supported for {TIERING_SPEC}' (below {LEAST_THRESHOLD} it is off).",
            {"key": "store_threshold", "value": threshold, "spec_name": name},
            "Leave store_threshold out, or take the default spec.",
        )


def _as_count(value: Any) -> int:
    """A value as vLLM's int() has it; 0 for none, and for what another check refuses."""
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return 0


def _check_platform(arm: Arm, tier: Tier, own_specs: list[str]) -> Iterator[Finding]:
    own_spec = tier.extra.get("spec_name", DEFAULT_SPEC) in own_specs
    if arm.backend == "cpu" and (own_spec or tier.connector == "SimpleCPUOffloadConnector"):
        yield Finding(
            "platform_unsupported",
            "refuse",
            arm.name,
            f"{tier.connector} with its stock spec runs only on CUDA-alike GPUs; on the CPU engine it ends in 'CPU "
            "Offloading is currently only supported on "
            "CUDA-alike and XPU GPUs'.",
            {},
            "Name an out-of-tree spec with spec_name and spec_module_path.",
        )
    allocator = arm.env.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if "expandable_segments:True" in allocator and within(arm.version, "0.21", None):
        yield Finding(
            "incompatible_environment",
            "refuse",
            arm.name,
            f"PYTORCH_CUDA_ALLOC_CONF={allocator} does not go with {tier.connector}; the engine refuses to start.",
            {},
            "Unset it in all arms.",
        )


def _near(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f"; did you mean {close[0]}?" if close else ""
