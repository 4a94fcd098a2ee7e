"""What a `vllm serve` command line asks for, read without starting anything."""

import json
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol

import msgspec

from kvtrial.record.errors import UnusableInput
from kvtrial.record.options import option_name, unclear_option
from kvtrial.record.versions import within

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
MOST_WHOLE = 2**63 - 1
NUMBER = re.compile(r"-\d+(\.\d+)?$")


class Started(Protocol):
    """Anything with the argv and the environment of an engine."""

    @property
    def argv(self) -> list[str]:
        """Arguments, with or without `vllm serve` in front."""
        ...

    @property
    def env(self) -> dict[str, str]:
        """Environment that the launch sets."""
        ...


class ArmLaunch(msgspec.Struct, frozen=True):
    """argv and environment of one arm. argv may begin with `vllm serve` or with the model."""

    argv: list[str]
    env: dict[str, str]


class ParsedArgs(msgspec.Struct, frozen=True):
    """A command line as vLLM reads it: underscores are dashes, `--no-x` is x=False, a repeated option's last value.

    `options`: long name without dashes -> text, or True/False for flags. `kv_transfer`: the JSON of
    --kv-transfer-config, dotted parts merged in; None when not given. `unclear`: a sentence on each option that vLLM
    may take for another one; whoever starts an engine refuses them, a record is read all the same.
    """

    model: str | None
    options: dict[str, str | bool]
    kv_transfer: dict[str, Any] | None
    repeated: list[str]
    unclear: list[str] = []

    def text(self, option: str) -> str | None:
        """Value of an option as text; None when it's absent or a flag."""
        value = self.options.get(option)
        return value if isinstance(value, str) else None

    def size(self, option: str) -> int | None:
        """Value of an option that takes sizes such as 256M, in units of one. Raises UnusableInput."""
        value = self.text(option)
        return None if value is None else human_int(value, f"--{option}")


class Tier(msgspec.Struct, frozen=True):
    """The connector an arm really gets. `cpu_bytes` None: not given or not a number."""

    connector: str
    extra: dict[str, Any]
    role: str | None
    cpu_bytes: int | None
    by_shortcut: bool
    by_json: bool


def human_int(text: str, what: str) -> int:
    """A whole number as vLLM takes it: `256M` = 2**20 x 256, `256m` = 256,000,000, `25.6k`; no decimals with K M G T.

    Source: vllm/utils/argparse_utils.py, 0.32.0. Raises UnusableInput, also for what no 64 bits hold.
    """
    text = text.strip()
    found = _SIZE.fullmatch(text)
    try:
        number, suffix = found.groups() if found else (text, "")
        size = int(float(number) * _DECIMAL[suffix]) if suffix in _DECIMAL else int(number) * _BINARY.get(suffix, 1)
    except (ValueError, OverflowError):
        size = None
    if size is None or abs(size) > MOST_WHOLE:
        raise UnusableInput(
            f"{what}={text[:80]!r} is not a size vLLM reads; give a whole number below 2**63, or one with k, m, g, t "
            "(powers of 1000) or K, M, G, T (powers of 1024, no decimals)."
        )
    return size


def parse_vllm_args(args: list[str]) -> ParsedArgs:
    """Read the arguments of `vllm serve` (with or without these two words in front).

    What is returned is not to be changed: the same arguments are read once. Raises UnusableInput when
    --kv-transfer-config is not a JSON object.
    """
    return _read_args(tuple(args))


@lru_cache(maxsize=1024)
def _read_args(args: tuple[str, ...]) -> ParsedArgs:
    # A judge asks for a run's options hundreds of times.
    rest = list(args)
    if rest and rest[0].rsplit("/", 1)[-1] == "vllm":
        rest.pop(0)
    if rest and rest[0] == "serve":
        rest.pop(0)
    model = rest.pop(0) if rest and not rest[0].startswith("-") else None
    options: dict[str, str | bool] = {}
    dotted: dict[str, Any] = {}
    repeated: list[str] = []
    unclear: list[str] = []
    while rest:
        token = rest.pop(0)
        if not token.startswith("-"):
            model = model or token
            continue
        name, _, inline = token.partition("=")
        values = [inline] if "=" in token else _values(rest)
        if complaint := unclear_option(name):
            unclear.append(complaint)
        if name.startswith(("--kv-transfer-config.", "--kv_transfer_config.")):
            _nest(dotted, name.split(".")[1:], _loaded(values[0] if values else "null"))
            continue
        option, value = _option(name, values)
        if option in options:
            repeated.append(option)
        options[option] = value
    model = model or (options["model"] if isinstance(options.get("model"), str) else None)  # type: ignore[assignment]
    return ParsedArgs(model, options, _kv_transfer(options.get("kv-transfer-config"), dotted), repeated, unclear)


SPREAD_OVER_GPUS = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")


def ranks(args: Mapping[str, Any]) -> int:
    """Workers that share a KV cache: tensor × pipeline parallel, of a launch's options under their long names."""
    return math.prod(int(args.get(option, 1)) for option in SPREAD_OVER_GPUS[:2])


def engine_gpus(argv: list[str]) -> int:
    """How many GPUs a command line takes: its ranks of tensor, pipeline and data parallelism, multiplied.

    Raises UnusableInput for a number that can't be read.
    """
    parsed = parse_vllm_args(argv)
    return math.prod(parsed.size(option) or 1 for option in SPREAD_OVER_GPUS)


def tier_of(parsed: ParsedArgs, env: Mapping[str, str], version: str) -> Tier | None:
    """The connector this launch gets in this version, or None.

    From 0.14 --kv-offloading-size overwrites connector, role and size of the JSON and keeps its other keys, without a
    word; before, --kv-offloading-backend does (config/vllm.py, _post_init_kv_transfer_config).
    """
    given = parsed.kv_transfer or {}
    inner = given.get("kv_connector_extra_config")
    extra = dict(inner) if isinstance(inner, dict) else {}
    name, role = given.get("kv_connector"), given.get("kv_role")
    shortcut = parsed.text("kv-offloading-size")
    if shortcut is not None and not (within(version, "0.14", None) or parsed.text("kv-offloading-backend")):
        shortcut = None
    if shortcut is not None:
        shortcut_bytes = int(_gibibytes(shortcut) * 2**30)
        role = "kv_both"
        backend = parsed.text("kv-offloading-backend") or "native"
        if backend == "native":
            simple = env.get("VLLM_USE_SIMPLE_KV_OFFLOAD", "0") not in ("", "0") and within(version, "0.19", None)
            name = "SimpleCPUOffloadConnector" if simple else "OffloadingConnector"
            extra["cpu_bytes_to_use"] = shortcut_bytes
        else:
            name = "LMCacheMPConnector" if within(version, "0.23", None) else "LMCacheConnectorV1"
    if name is None:
        return None
    return Tier(
        str(name),
        extra,
        role,
        _whole(extra.get("cpu_bytes_to_use")),
        shortcut is not None,
        parsed.kv_transfer is not None,
    )


def async_scheduling(parsed: ParsedArgs, version: str) -> bool:
    """Whether async scheduling may be on: asked for, or left to the engine from 0.14, which normally turns it on."""
    asked = parsed.options.get("async-scheduling")
    return bool(asked) if asked is not None else within(version, "0.14", None)


def _values(rest: list[str]) -> list[str]:
    values = []
    while rest and (not rest[0].startswith("-") or NUMBER.match(rest[0])):
        values.append(rest.pop(0))
    return values


def _option(name: str, values: list[str]) -> tuple[str, str | bool]:
    option = option_name(name)
    if not values and option.startswith("no-"):
        return option[3:], False
    return option, " ".join(values) if values else True


def _kv_transfer(value: str | bool | None, dotted: dict[str, Any]) -> dict[str, Any] | None:
    if value is None:
        return dotted or None
    loaded = _loaded(value) if isinstance(value, str) else None
    if not isinstance(loaded, dict):
        raise UnusableInput(
            f"--kv-transfer-config={str(value)[:80]!r} is not a JSON object; give one such as "
            '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", '
            '"kv_connector_extra_config": {"cpu_bytes_to_use": 8589934592}}.'
        )
    for key, inner in dotted.items():
        if isinstance(inner, dict) and isinstance(loaded.get(key), dict):
            loaded[key].update(inner)
        else:
            loaded[key] = inner
    return loaded


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _nest(target: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            raise UnusableInput(
                f"--kv-transfer-config.{'.'.join(keys)} lies inside {key}, which is given a value of its own; give one "
                f"of the two."
            )
    target[keys[-1]] = value


def _gibibytes(text: str) -> float:
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not (math.isfinite(size * 2**30) and size > 0):
        raise UnusableInput(
            f"--kv-offloading-size={text[:80]!r} is not a number above 0; it is the size of the CPU tier in GiB, "
            "such as 8."
        )
    return size


def _whole(value: Any) -> int | None:
    if isinstance(value, bool) or value is None:
        return None
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None
