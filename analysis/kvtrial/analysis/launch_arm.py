"""One arm of a launch as the checks see it, and what a check says."""

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from kvtrial.record.errors import UnusableInput
from kvtrial.record.launch import ArmLaunch, ParsedArgs, Tier, parse_vllm_args, tier_of
from kvtrial.record.versions import data, within

Severity = Literal["refuse", "warn"]
Backend = Literal["cpu", "cuda"]

PAGE_BYTES = 4096
GPU_BLOCK_TOKENS = 16
CPU_BLOCK_TOKENS = 128

_COUNTS = {
    "block-size": 2**31,
    "num-gpu-blocks-override": 2**31,
    "kv-cache-memory-bytes": 2**50,
    "tensor-parallel-size": 2**10,
    "pipeline-parallel-size": 2**10,
}
"""Options that count something, with more of it than any host has."""
_SHARE_OF_16_BITS = {"auto": 1, "bfloat16": 1, "float16": 1, "fp8": 2, "fp8_e4m3": 2, "fp8_e5m2": 2}
"""--kv-cache-dtype -> how many times smaller a token is than as stated; others have scales and layouts of their own."""
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Finding(msgspec.Struct, frozen=True, rename={"class_": "class"}):
    """One thing found: its class, whether the launch must be refused, one sentence with the numbers, and what to do."""

    class_: str
    severity: Severity
    arm: str | None
    reason: str
    numbers: dict[str, Any]
    do: str


def ended(reason: str) -> str:
    """A reason with one mark at its end, so that another sentence can follow."""
    bare = reason.rstrip(".")
    return bare if bare.endswith("?") else f"{bare}."


class KnownModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes of KV cache a token takes."""

    kv_bytes_per_token: int
    source: str


class ModelTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`data/models.yml`."""

    models: dict[str, KnownModel]


class Arm(msgspec.Struct, frozen=True):
    """One arm as the checks see it. `kv_bytes_per_token` None: the model's is not known."""

    name: str
    parsed: ParsedArgs
    env: dict[str, str]
    tier: Tier | None
    version: str
    backend: Backend
    kv_bytes_per_token: int | None
    launch: ArmLaunch

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of the engine's KV cache."""
        given = self.parsed.size("block-size")
        return given if given else CPU_BLOCK_TOKENS if self.backend == "cpu" else GPU_BLOCK_TOKENS

    @property
    def bytes_missing(self) -> tuple[str, str]:
        """Why `kv_bytes_per_token` is not known, and what to do, where it is not."""
        kind = self.parsed.text("kv-cache-dtype") or "auto"
        if kind in _SHARE_OF_16_BITS:
            return "model.kv_bytes_per_token is not stated", "Give model.kv_bytes_per_token, such as 114688."
        return (
            f"what a token takes with --kv-cache-dtype {kind} was not read",
            "Make the CPU tier clearly larger than the GPU's KV cache (2x or more) by the sizes that the engine logs.",
        )

    @property
    def whole_context(self) -> bool:
        """Whether every layer is known to attend to the whole context, so that bytes grow with the tokens."""
        options = self.parsed.options
        known = self.parsed.model in data("models", ModelTable).models
        return known and not any(name.partition(".")[0] == "hf-overrides" for name in options)

    @property
    def workers(self) -> int:
        """Workers the KV cache is spread over."""
        return (self.parsed.size("tensor-parallel-size") or 1) * (self.parsed.size("pipeline-parallel-size") or 1)

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk of the CPU tier."""
        extra = self.tier.extra if self.tier else {}
        tokens, blocks = extra.get("block_size"), extra.get("blocks_per_chunk")
        if isinstance(tokens, int) and tokens > 0:
            return tokens
        return self.block_tokens * (blocks if isinstance(blocks, int) and blocks > 0 else 1)

    @property
    def chunk_bytes(self) -> int | None:
        """Bytes a chunk takes in the tier; whole pages from 0.27."""
        if self.kv_bytes_per_token is None:
            return None
        plain = self.kv_bytes_per_token * self.chunk_tokens
        return -(-plain // PAGE_BYTES) * PAGE_BYTES if within(self.version, "0.27", None) else plain


def after_vllm(argv: list[str]) -> list[str]:
    """Without the interpreter in front of `vllm serve model` or of `-m vllm.entrypoints.openai.api_server`."""
    for index, word in enumerate(argv[:8]):
        before, rest = argv[:index], argv[index + 1 :]
        if word.rsplit("/", 1)[-1] == "vllm" and (not before or rest[:1] == ["serve"]):
            return argv[index:]
        if word.startswith("vllm.entrypoints") and before[-1:] in ([], ["-m"]):
            return rest if rest[:1] == ["serve"] else ["serve", *rest]
    return argv


def read_arm(
    name: str, spec: Mapping[str, Any], version: str, backend: Backend, model: Mapping[str, Any] | None
) -> Arm:
    """Read one arm's `args` and `env`. Raises UnusableInput with the arm's name."""
    args, env = spec.get("args"), spec.get("env") or {}
    if not isinstance(args, list) or not isinstance(env, Mapping):
        raise UnusableInput(f"Arm {name}: args must be a list of `vllm serve` arguments and env a mapping.")
    for what, value in [
        *((f"argument {value!r}", value) for value in args),
        *((f"env.{k}", v) for k, v in env.items()),
    ]:
        if value is None or isinstance(value, dict | list):
            raise UnusableInput(f"Arm {name}: {what} is {value!r}, which is no text; write it in quotes.")
        if "\0" in str(value):
            raise UnusableInput(f"Arm {name}: {what} holds a NUL, which no process can be given; take it out.")
    for variable in env:
        if not _ENV_NAME.fullmatch(str(variable)):
            raise UnusableInput(
                f"Arm {name}: {str(variable)!r} is no name of an environment variable; those have letters, digits and "
                f"underscores, and no digit in front: correct it."
            )
    environment = {str(key): str(value) for key, value in env.items()}
    launch = ArmLaunch(after_vllm([str(arg) for arg in args]), environment)
    try:
        parsed = parse_vllm_args(launch.argv)
        for complaint in parsed.unclear:
            raise UnusableInput(complaint)
        tier = tier_of(parsed, environment, version)
        for option, most in _COUNTS.items():
            count = parsed.size(option)
            if count is not None and not 1 <= count <= most:
                raise UnusableInput(f"--{option}={count} can't be used; give 1 to {most}.")
    except UnusableInput as error:
        raise UnusableInput(f"Arm {name}: {error}") from None
    return Arm(name, parsed, environment, tier, version, backend, _kv_bytes_per_token(parsed, model), launch)


def _kv_bytes_per_token(parsed: ParsedArgs, model: Mapping[str, Any] | None) -> int | None:
    given = model.get("kv_bytes_per_token") if model else None
    if given is None:
        known = data("models", ModelTable).models.get(parsed.model or "")
        given = known.kv_bytes_per_token if known else None
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int) or given < 2:
        raise UnusableInput(f"model.kv_bytes_per_token={given!r} must be a whole number of bytes, such as 114688.")
    share = _SHARE_OF_16_BITS.get(parsed.text("kv-cache-dtype") or "auto")
    return None if share is None else given // share
