"""Make a random-weight Llama model with a byte-level tokenizer: no download, same seed, same bytes.

Run by the engine's own Python (making needs torch, numpy, safetensors and tokenizers). Prints one JSON line:
`{"changed": bool, "revision": sha256, "directory": path}`. Bad input ends with status 2 and one sentence.

The weights are normal with standard deviation 1/sqrt(fan_in) (embedding 1, output head tripled, query and key doubled),
so that another prompt gives another answer: a model whose answer never changes could not show a wrong KV block.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MANIFEST = "manifest.json"
RECIPE = "normal-pcg64-1"  # how weights follow from the seed; another name for every change of it
BYTES_PER_VALUE = 2  # bfloat16
VALUE_BYTES = {"bfloat16": BYTES_PER_VALUE, "float16": BYTES_PER_VALUE, "float32": 4}
BYTE_TOKENS = 256
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}assistant: "
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>")


class UnusableInput(Exception):
    """One clear sentence for the user."""


@dataclass(frozen=True)
class Dimensions:
    """Shape of the model. Counts, except where the name says otherwise."""

    layers: int = 8
    hidden_size: int = 512
    intermediate_size: int = 2048
    attention_heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    vocab_size: int = 320
    max_position_tokens: int = 8192

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache per token: a key and a value per layer, KV head and head dimension, in bfloat16."""
        return self.layers * 2 * self.kv_heads * self.head_dim * BYTES_PER_VALUE


def check_dimensions(dimensions: Dimensions) -> None:
    """Raise UnusableInput with the value, what is allowed and what to do."""
    for name, value in asdict(dimensions).items():
        if value < 1:
            raise UnusableInput(f"{name}={value} is no size; give a whole number of at least 1.")
    if dimensions.attention_heads % dimensions.kv_heads:
        raise UnusableInput(
            f"attention_heads={dimensions.attention_heads} is not a multiple of kv_heads={dimensions.kv_heads}; "
            "every KV head serves the same number of attention heads, so choose kv_heads that divides attention_heads."
        )
    if dimensions.head_dim % 2:
        raise UnusableInput(
            f"head_dim={dimensions.head_dim} is odd; rotary position embedding needs an even number, such as 64."
        )
    least = BYTE_TOKENS + len(SPECIAL_TOKENS)
    if dimensions.vocab_size < least:
        raise UnusableInput(
            f"vocab_size={dimensions.vocab_size} is too small; the byte-level tokenizer needs at least {least}."
        )


def byte_alphabet() -> dict[str, int]:
    """The 256 printable characters by which a byte-level BPE writes bytes, each with its byte as the token id."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(BYTE_TOKENS) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    characters |= {byte: chr(BYTE_TOKENS + offset) for offset, byte in enumerate(others)}
    return {characters[byte]: byte for byte in range(BYTE_TOKENS)}


def write_tokenizer(directory: Path, dimensions: Dimensions) -> None:
    """Write tokenizer.json and tokenizer_config.json: one token a byte, no merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(directory / "tokenizer.json"))
    bos, eos, pad = SPECIAL_TOKENS
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": bos,
            "eos_token": eos,
            "pad_token": pad,
            "model_max_length": dimensions.max_position_tokens,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def write_config(directory: Path, dimensions: Dimensions) -> None:
    """Write config.json and generation_config.json of a Llama model."""
    ids = {"bos_token_id": BYTE_TOKENS, "eos_token_id": BYTE_TOKENS + 1, "pad_token_id": BYTE_TOKENS + 2}
    write_json(
        directory / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": dimensions.hidden_size,
            "intermediate_size": dimensions.intermediate_size,
            "num_hidden_layers": dimensions.layers,
            "num_attention_heads": dimensions.attention_heads,
            "num_key_value_heads": dimensions.kv_heads,
            "head_dim": dimensions.head_dim,
            "vocab_size": dimensions.vocab_size,
            "max_position_embeddings": dimensions.max_position_tokens,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "torch_dtype": "bfloat16",
            **ids,
        },
    )
    write_json(directory / "generation_config.json", ids)


def random_weights(dimensions: Dimensions, seed: int) -> "dict[str, torch.Tensor]":
    """Weights by name, bfloat16. One generator and a fixed order: the same seed gives the same bytes.

    numpy draws them, since torch's normal numbers depend on the instructions that the processor has, and the hosts
    of a fleet must get the same model.
    """
    import numpy as np
    import torch

    generator = np.random.Generator(np.random.PCG64(seed))

    def normal(rows: int, columns: int, deviation: float) -> "torch.Tensor":
        values = generator.standard_normal((rows, columns), dtype=np.float32)
        return torch.from_numpy(values * np.float32(deviation)).to(torch.bfloat16)

    def projection(rows: int, fan_in: int, gain: float = 1.0) -> "torch.Tensor":
        return normal(rows, fan_in, gain / fan_in**0.5)

    def ones() -> "torch.Tensor":
        return torch.ones(hidden, dtype=torch.bfloat16)

    hidden, intermediate = dimensions.hidden_size, dimensions.intermediate_size
    query_rows = dimensions.attention_heads * dimensions.head_dim
    kv_rows = dimensions.kv_heads * dimensions.head_dim
    weights = {
        "model.embed_tokens.weight": normal(dimensions.vocab_size, hidden, 1.0),
        "lm_head.weight": projection(dimensions.vocab_size, hidden, 3.0),
        "model.norm.weight": ones(),
    }
    for layer in range(dimensions.layers):
        prefix = f"model.layers.{layer}."
        weights[prefix + "self_attn.q_proj.weight"] = projection(query_rows, hidden, 2.0)
        weights[prefix + "self_attn.k_proj.weight"] = projection(kv_rows, hidden, 2.0)
        weights[prefix + "self_attn.v_proj.weight"] = projection(kv_rows, hidden)
        weights[prefix + "self_attn.o_proj.weight"] = projection(hidden, query_rows)
        weights[prefix + "mlp.gate_proj.weight"] = projection(intermediate, hidden)
        weights[prefix + "mlp.up_proj.weight"] = projection(intermediate, hidden)
        weights[prefix + "mlp.down_proj.weight"] = projection(hidden, intermediate)
        weights[prefix + "input_layernorm.weight"] = ones()
        weights[prefix + "post_attention_layernorm.weight"] = ones()
    return weights


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON with sorted keys, so that the same content has the same bytes."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def sha256_of(path: Path) -> str:
    """sha256 of a file's content in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_of(directory: Path) -> dict[str, dict[str, Any]]:
    """Every file below `directory` but the manifest, by relative path: `{size_bytes, sha256}`."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path != directory / MANIFEST)
    return {
        path.relative_to(directory).as_posix(): {"size_bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in paths
    }


def revision_of(files: dict[str, dict[str, Any]]) -> str:
    """sha256 over the file list: the model's revision. Two directories with equal files have equal revisions."""
    return hashlib.sha256(json.dumps(files, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def manifest_of(files: dict[str, dict[str, Any]], weights: str, **facts: Any) -> dict[str, Any]:
    """The manifest: what the model is, and the digest of each file."""
    return {"schema_version": "1.0", "weights": weights, **facts, "revision": revision_of(files), "files": files}


def facts_of_config(directory: Path) -> dict[str, Any]:
    """Architectures and KV bytes per token of a directory with a Hugging Face config.json.

    `kv_bytes_per_token` is None where the config does not determine it (compressed KV, several text parts, an
    unknown type of values): the engine's own figure counts then.
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    value_bytes = VALUE_BYTES.get(config.get("torch_dtype") or config.get("dtype") or "")
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    known = value_bytes and layers and heads and config.get("hidden_size") and "kv_lora_rank" not in config
    kv_bytes_per_token = None
    if known:
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        kv_bytes_per_token = layers * 2 * kv_heads * head_dim * value_bytes
    return {"architectures": config.get("architectures", []), "kv_bytes_per_token": kv_bytes_per_token}


def problem_with(directory: Path) -> str | None:
    """Why the directory does not match its manifest, in a sentence, or None. Sizes are compared before digests."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        listed: dict[str, dict[str, Any]] = manifest["files"]
        revision = manifest["revision"]
    except FileNotFoundError:
        return f"{directory} has no {MANIFEST}"
    except (ValueError, KeyError, TypeError):
        return f"{directory}/{MANIFEST} is not a manifest"
    for name, facts in listed.items():
        path = directory / name
        if not path.is_file():
            return f"{path} is in the manifest but missing"
        if path.stat().st_size != facts["size_bytes"]:
            return f"{path} has {path.stat().st_size} bytes, the manifest says {facts['size_bytes']}"
        if sha256_of(path) != facts["sha256"]:
            return f"{path} has another sha256 than the manifest says"
    if revision != revision_of(listed):
        return f"{directory}/{MANIFEST} has a revision that does not follow from its file list"
    present = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    if unlisted := sorted(present - set(listed) - {MANIFEST}):
        return f"{directory}/{unlisted[0]} is not in the manifest"
    return None


def is_made_as_asked(directory: Path, dimensions: Dimensions, seed: int) -> bool:
    """True when the directory is whole and was made from these dimensions and this seed."""
    if problem_with(directory):
        return False
    manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    asked = {"dimensions": asdict(dimensions), "seed": seed, "recipe": RECIPE}
    return all(manifest.get(name) == value for name, value in asked.items())


def make(directory: Path, dimensions: Dimensions, seed: int) -> bool:
    """Make the model in `directory`, whole or not at all; return False where it was already there.

    A directory that this program did not make (no manifest with `weights: random`) is never replaced.
    """
    check_dimensions(dimensions)
    if is_made_as_asked(directory, dimensions, seed):
        return False
    refuse_foreign(directory)
    from safetensors.torch import save_file  # slow to import, and a model that is there needs no torch

    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        write_tokenizer(staging, dimensions)
        write_config(staging, dimensions)
        save_file(random_weights(dimensions, seed), staging / "model.safetensors", metadata={"format": "pt"})
        facts = {
            "recipe": RECIPE,
            "seed": seed,
            "dimensions": asdict(dimensions),
            "kv_bytes_per_token": dimensions.kv_bytes_per_token,
            "architectures": ["LlamaForCausalLM"],
        }
        write_json(staging / MANIFEST, manifest_of(files_of(staging), "random", **facts))
        make_world_readable(staging)
        if directory.exists():
            shutil.rmtree(directory)
        staging.rename(directory)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return True


def refuse_foreign(directory: Path) -> None:
    """Raise UnusableInput where `directory` holds something that this program did not make."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    try:
        ours = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))["weights"] == "random"
    except (OSError, ValueError, KeyError, TypeError):
        ours = False
    if not ours:
        raise UnusableInput(
            f"{directory} holds files that were not made by this role; it is not replaced, "
            "so name another directory or remove it yourself."
        )


def make_world_readable(directory: Path) -> None:
    """The engine may run as another user: a file it cannot read looks to it like a file that is not there."""
    directory.chmod(0o755)
    for path in directory.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
        with path.open("rb") as file:
            os.fsync(file.fileno())


def adopt(directory: Path, manifest_path: Path) -> bool:
    """Write the manifest of a given model directory to `manifest_path`; return whether it changed."""
    if not (directory / "config.json").is_file():
        raise UnusableInput(
            f"{directory} has no config.json; a model directory has config.json, a tokenizer and weights, "
            "so name the directory that holds them."
        )
    manifest = manifest_of(files_of(directory), "given", **facts_of_config(directory))
    text = json.dumps(manifest, indent=2, sort_keys=True) + "\n"
    if manifest_path.is_file() and manifest_path.read_text(encoding="utf-8") == text:
        return False
    manifest_path.parent.mkdir(parents=True, exist_ok=True)
    temporary = manifest_path.with_name(f".{manifest_path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.chmod(0o644)
    temporary.replace(manifest_path)
    return True


def parser() -> argparse.ArgumentParser:
    """The command line: `make`, `adopt`, `verify`."""
    top = argparse.ArgumentParser(description="Make a random-weight model, or verify a model by its manifest.")
    commands = top.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="make it (or leave it, where it is whole and the same)")
    making.add_argument("directory", type=Path)
    making.add_argument("--seed", type=int, default=0)
    for name, default in asdict(Dimensions()).items():
        making.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    adopting = commands.add_parser("adopt", help="compute the manifest of a given directory")
    adopting.add_argument("directory", type=Path)
    adopting.add_argument("--manifest", type=Path, required=True)
    verifying = commands.add_parser("verify", help="compare a directory with its manifest")
    verifying.add_argument("directory", type=Path)
    return top


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Carry out one command; return what is printed."""
    directory: Path = arguments.directory
    if arguments.command == "verify":
        if problem := problem_with(directory):
            raise UnusableInput(f"{problem}; remove the directory and run again to make it anew.")
        manifest_path, changed = directory / MANIFEST, False
    elif arguments.command == "adopt":
        manifest_path, changed = arguments.manifest, adopt(directory, arguments.manifest)
    else:
        dimensions = Dimensions(**{name: getattr(arguments, name) for name in asdict(Dimensions())})
        manifest_path, changed = directory / MANIFEST, make(directory, dimensions, arguments.seed)
    manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
    return {"changed": changed, "directory": str(directory), "revision": manifest["revision"]}


def main() -> int:
    """Entry point. 0 done, 2 unusable input."""
    try:
        print(json.dumps(run(parser().parse_args())))
    except UnusableInput as error:
        print(str(error), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
