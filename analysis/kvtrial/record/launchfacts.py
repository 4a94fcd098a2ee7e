"""What an engine resolved its launch to, and how two of them differ.

Input is the JSON of /server_info?config_format=json: `vllm_config`, `vllm_env`, `system_env`.
"""

import json
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from kvtrial.record.versions import data, within

Scalar = str | int | float | bool | None
Backend = Literal["cpu", "cuda"]
Kind = Literal["volatile", "consequence", "other"]
ABSENT = "<absent>"
_ENVIRONMENT = "system_env.env_vars"


class VolatileField(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A field that differs between any two engines."""

    path: str
    reason: str


class Consequence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A field that the connector changes by itself in versions [since, until)."""

    path: str
    reason: str
    since: str | None = None
    until: str | None = None
    backends: tuple[Backend, ...] = ("cpu", "cuda")


class OptionConsequence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fields that any of these options of `vllm serve` changes beside the field of its own name."""

    options: list[str]
    paths: list[str]
    reason: str


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Memory layout of the KV cache with and without the OffloadingConnector."""

    with_connector: str
    without: str
    backends: list[Backend]
    since: str | None = None
    until: str | None = None


class ConsequenceTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`data/consequences.yml`."""

    volatile: list[VolatileField]
    consequences: list[Consequence]
    of_options: list[OptionConsequence]
    layouts: list[Layout]


class Difference(msgspec.Struct, frozen=True):
    """A field in which two engines differ; `<absent>` where one has no such field."""

    path: str
    control: Scalar
    variant: Scalar
    kind: Kind
    reason: str


def consequence_table() -> ConsequenceTable:
    """The table of volatile fields and known consequences."""
    return data("consequences", ConsequenceTable)


def flatten(config: dict[str, Any]) -> dict[str, Scalar]:
    """A nested configuration as dotted paths.

    Lists of scalars become their JSON, lists of objects are numbered. `system_env.env_vars`, one text of NAME=VALUE
    lines, is taken apart by name. An object without fields is `{}`.
    """
    flat: dict[str, Scalar] = {}
    _flatten(config, "", flat)
    return flat


def differences(
    control: dict[str, Any], variant: dict[str, Any], version: str, backend: Backend = "cuda"
) -> list[Difference]:
    """Fields in which two /server_info answers differ, sorted by path, each with its kind.

    An object on one side and null on the other are compared field by field. What an arm declares is the caller's to
    allow: see `undeclared`.
    """
    return differences_of_flat(flatten(control), flatten(variant), version, backend)


def differences_of_flat(
    left: dict[str, Scalar], right: dict[str, Scalar], version: str, backend: Backend = "cuda"
) -> list[Difference]:
    """`differences` of two that are flat already: one that is held against many is flattened once."""
    found = []
    both = ((path, left.get(path, ABSENT), right.get(path, ABSENT)) for path in left.keys() | right.keys())
    differing = {path: (was, now) for path, was, now in both if was != now or type(was) is not type(now)}
    for path, (was, now) in sorted(differing.items(), key=lambda entry: entry[0]):
        # null against an object: its fields are listed by themselves.
        if {was, now} == {None, ABSENT} and any(
            other.startswith(path + ".") for other in (left if now is None else right)
        ):
            continue
        kind, reason = _kind(path, version, backend)
        found.append(Difference(path, was, now, kind, reason))
    return found


def undeclared(found: Iterable[Difference], declared: Iterable[str]) -> list[Difference]:
    """Differences that are neither volatile, nor a known consequence, nor at or below a declared path."""
    prefixes = tuple(declared)
    return [
        difference
        for difference in found
        if difference.kind == "other" and not any(_at_or_below(difference.path, prefix) for prefix in prefixes)
    ]


def changed_by(options: Iterable[str]) -> list[str]:
    """Paths that differ because of these options (long, without dashes in front), beside those of their own names."""
    asked = set(options)
    return [path for entry in consequence_table().of_options if asked & set(entry.options) for path in entry.paths]


def layouts(version: str, backend: Backend) -> Layout | None:
    """Known layouts with and without the OffloadingConnector, or None where none was read."""
    for layout in consequence_table().layouts:
        if backend in layout.backends and within(version, layout.since, layout.until):
            return layout
    return None


def _flatten(value: Any, path: str, flat: dict[str, Scalar]) -> None:
    if path == _ENVIRONMENT and isinstance(value, str):
        value = dict(line.split("=", 1) for line in value.splitlines() if "=" in line)
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            name = f"{path}.{key}" if path else str(key)
            if isinstance(inner, dict | list) or name == _ENVIRONMENT:
                _flatten(inner, name, flat)
            else:
                flat[name] = inner
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for index, item in enumerate(value):
            _flatten(item, f"{path}[{index}]", flat)
    elif isinstance(value, dict | list):
        flat[path] = json.dumps(value)
    else:
        flat[path] = value


def _kind(path: str, version: str, backend: Backend) -> tuple[Kind, str]:
    table = consequence_table()
    for field in table.volatile:
        if path == field.path or (field.path.endswith("*") and path.startswith(field.path[:-1])):
            return "volatile", field.reason
    for consequence in table.consequences:
        if (
            path == consequence.path
            and backend in consequence.backends
            and within(version, consequence.since, consequence.until)
        ):
            return "consequence", consequence.reason
    return "other", ""


def _at_or_below(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith((prefix + ".", prefix + "["))
