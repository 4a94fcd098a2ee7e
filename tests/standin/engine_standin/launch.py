"""The command line: what the flags mean, what a real engine would refuse, and what /server_info shows of them."""

from __future__ import annotations

import ast
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_standin.faults import Faults

VERSION = "0.32.0"
SERVER_INFO: dict[str, Any] = json.loads(Path(__file__).with_name("server_info.json").read_text(encoding="utf-8"))
DEFAULT_KV_BYTES_PER_TOKEN = 4096
PAGE_BYTES = 4096
SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


class RefusedLaunch(Exception):
    """The real engine would end here, with this text in its log."""


@dataclass(frozen=True)
class Launch:
    """One launch, resolved. Sizes in bytes and tokens as the names say; `arguments` holds every flag as given."""

    arguments: Mapping[str, Any]
    model_dir: str
    model_name: str
    host: str
    port: int
    block_tokens: int
    num_gpu_blocks: int
    override: int | None
    kv_cache_bytes: int
    kv_bytes_per_token: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    transfer: Mapping[str, Any] | None
    chunk_tokens: int
    tier_chunks: int
    prompt_details: bool

    @property
    def concurrency(self) -> float:
        """Requests of max_model_len that the blocks hold (the reserved block included, as vLLM prints it)."""
        return self.num_gpu_blocks / -(-self.max_model_len // self.block_tokens)

    @property
    def cache_tokens(self) -> int:
        return int(self.concurrency * self.max_model_len)


def whole_number(text: str) -> int:
    """`256M` and the like, as vLLM's human_readable_int reads them (m decimal, M binary)."""
    return int(float(text[:-1]) * SUFFIXES[text[-1]]) if text[-1:] in SUFFIXES else int(text)


def read_flags(argv: Sequence[str]) -> dict[str, Any]:
    """Every flag as name -> value; unknown ones too. A flag without a value is True, `--no-x` is x=False."""
    flags: dict[str, Any] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            flags.setdefault("model_tag", word)
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if equals:
            flags[name] = value
        elif words and not words[0].startswith("--"):
            flags[name] = words.pop(0)
        elif name.startswith("no_"):
            flags[name[3:]] = False
        else:
            flags[name] = True
    return flags


def read_launch(argv: Sequence[str]) -> Launch:
    """The launch meant by the words after `vllm serve`. Raises RefusedLaunch with the real engine's text."""
    flags = read_flags(argv)
    number = {name: whole_number(str(flags[name])) for name in flags if _is_number(flags[name])}
    model_dir = str(flags.get("model_tag") or flags.get("model", ""))
    kv_bytes = DEFAULT_KV_BYTES_PER_TOKEN
    manifest = Path(model_dir, "manifest.json")
    if manifest.is_file():
        kv_bytes = int(json.loads(manifest.read_bytes()).get("kv_bytes_per_token", kv_bytes))
    block = number.get("block_size", 128)
    if block % 32:
        raise RefusedLaunch(f"ValueError: No common block size for {block} (CPU_ATTN: [MultipleOf(32)])")
    kv_cache_bytes = number.get("kv_cache_memory_bytes", 4 * 2**30)
    transfer = _transfer_config(flags.get("kv_transfer_config"))
    chunk, tier_chunks = _tier_size(transfer, block, kv_bytes)
    override = number.get("num_gpu_blocks_override")
    return Launch(
        arguments={**flags, **number, **({"kv_transfer_config": transfer} if transfer else {})},
        model_dir=model_dir,
        model_name=str(flags.get("served_model_name", model_dir)),
        host=str(flags.get("host", "127.0.0.1")),
        port=number.get("port", 8000),
        block_tokens=block,
        num_gpu_blocks=override or kv_cache_bytes // (block * kv_bytes),
        override=override,
        kv_cache_bytes=kv_cache_bytes,
        kv_bytes_per_token=kv_bytes,
        max_model_len=number.get("max_model_len", 4096),
        max_num_seqs=number.get("max_num_seqs", 256),
        max_num_batched_tokens=number.get("max_num_batched_tokens", 4096),
        transfer=transfer,
        chunk_tokens=chunk,
        tier_chunks=tier_chunks,
        prompt_details=bool(flags.get("enable_prompt_tokens_details")),
    )


def _is_number(value: object) -> bool:
    try:
        whole_number(str(value))
    except ValueError:
        return False
    return True


def _transfer_config(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    given = json.loads(text)
    if given.get("kv_connector") != "OffloadingConnector":
        raise RefusedLaunch(f"ValueError: Unsupported connector type: {given.get('kv_connector')}")
    if "kv_role" not in given:
        raise RefusedLaunch("ValueError: Please specify kv_role when kv_connector is set, supported roles are (...)")
    return {
        "kv_connector": "OffloadingConnector",
        "engine_id": given.get("engine_id") or str(uuid.uuid4()),
        "kv_buffer_device": "cpu",
        "kv_role": given["kv_role"],
        "kv_port": 14579,
        "kv_connector_extra_config": given.get("kv_connector_extra_config", {}),
        "kv_connector_module_path": None,
        "enable_permute_local_kv": False,
        "kv_load_failure_policy": given.get("kv_load_failure_policy", "fail"),
    }


def _tier_size(transfer: Mapping[str, Any] | None, block: int, kv_bytes: int) -> tuple[int, int]:
    """Tokens a chunk, and chunks in the tier (0 without a connector)."""
    if transfer is None:
        return block, 0
    extra = transfer["kv_connector_extra_config"]
    if not extra.get("cpu_bytes_to_use"):
        raise RefusedLaunch("Exception: cpu_bytes_to_use must be specified in kv_connector_extra_config")
    chunk = int(extra.get("block_size", block * extra.get("blocks_per_chunk", 1)))
    if chunk % block:
        raise RefusedLaunch(
            f"ValueError: 'block_size'={chunk} in kv_connector_extra_config must be a multiple of the GPU KV cache "
            f"block size ({block} tokens). Use {-(-chunk // block) * block} instead, or set 'blocks_per_chunk' to "
            "express the chunk size in blocks."
        )
    chunk_bytes = -(-kv_bytes * chunk // PAGE_BYTES) * PAGE_BYTES
    return chunk, int(extra["cpu_bytes_to_use"]) // chunk_bytes


def cache_config(launch: Launch) -> dict[str, Any]:
    """The CacheConfig fields of this launch: values in /server_info, labels (as text) in cache_config_info."""
    return {
        **SERVER_INFO["vllm_config"]["cache_config"],
        "block_size": launch.block_tokens,
        "user_specified_block_size": "block_size" in launch.arguments,
        "effective_attention_block_size": launch.block_tokens,
        "num_gpu_blocks": launch.num_gpu_blocks,
        "num_gpu_blocks_override": launch.override,
        "kv_cache_size_tokens": launch.cache_tokens,
        "kv_cache_max_concurrency": launch.concurrency,
        "kv_cache_memory_bytes": launch.kv_cache_bytes,
        "enable_prefix_caching": launch.arguments.get("enable_prefix_caching", True),
    }


def server_info(launch: Launch, environment: Mapping[str, str], faults: Faults, started_ns: int) -> dict[str, Any]:
    """The body of /server_info?config_format=json; flags whose names are known fields show their values."""
    config: dict[str, Any] = json.loads(json.dumps(SERVER_INFO["vllm_config"]))
    for section in ("model_config", "parallel_config", "scheduler_config"):
        config[section].update({k: v for k, v in launch.arguments.items() if k in config[section]})
    config["model_config"].update(
        model=launch.model_dir,
        tokenizer=launch.model_dir,
        served_model_name=launch.model_name,
        max_model_len=launch.max_model_len,
    )
    config["scheduler_config"].update(
        max_num_seqs=launch.max_num_seqs, max_num_batched_tokens=launch.max_num_batched_tokens
    )
    if "extra_config" in faults:
        config["scheduler_config"]["long_prefill_token_threshold"] = 512
    config["cache_config"] = cache_config(launch)
    config["kv_transfer_config"] = launch.transfer
    config["instance_id"] = str(started_ns)
    named = {name: value for name, value in environment.items() if name.startswith("VLLM_") and "KEY" not in name}
    system = {**SERVER_INFO["system_env"], "env_vars": "\n".join(f"{name}={named[name]}" for name in named)}
    shown = {**SERVER_INFO["vllm_env"], **{name: _env_value(value) for name, value in named.items()}}
    return {"vllm_config": config, "vllm_env": shown, "system_env": system}


def _env_value(text: str) -> object:
    return bool(int(text)) if text in ("0", "1") else ast.literal_eval(text) if text.isdecimal() else text
