"""Make a random-weight Llama or Qwen3 model with a byte-level tokenizer: no download, same seed, same bytes.

Run by the engine's own Python (making needs torch, numpy, safetensors and tokenizers). Prints one JSON line:
`{"changed": bool, "revision": sha256, "directory": path}`. Bad input ends with status 2 and one sentence.

The weights are normal with standard deviation 1/sqrt(fan_in) (embedding 1, output head tripled, query and key doubled),
so that another prompt gives another answer: a model whose answer never changes could not show a wrong KV block.

Qwen3 has the shapes of a family in use (28 layers of 1024 are its 0.6B, 36 of 4096 its 8B), so that compute, KV size
and transfers are real; only the vocabulary is small, which makes the output head cheaper. Its queries and keys are
normalised, so their gain stands in the weights of the norms.
"""

import argparse
import hashlib
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MANIFEST = "manifest.json"
RECIPES = {  # how weights follow from the seed, by generator; another name for every change of it
    "numpy": "normal-pcg64-1",
    "torch-cpu": "normal-torch-cpu-1",
    "torch-cuda": "normal-torch-cuda-1",
}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
FEW_TENSORS_BYTES = 2_000_000_000  # a file of weights holds about this much: making needs no more RAM than twice that
QWEN3_NORM_GAIN = 1.75  # scores of random tokens then have deviation 3: a few tokens of 16,000 decide, so the KV counts
BYTES_PER_VALUE = 2  # bfloat16
VALUE_BYTES = {"bfloat16": BYTES_PER_VALUE, "float16": BYTES_PER_VALUE, "float32": 4}
BYTE_TOKENS = 256
BLOCK_BYTES = 1 << 20
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


@dataclass(frozen=True)
class Recipe:
    """What is made beside the shape: architecture, whether the embedding is also the head, where numbers come from."""

    architecture: str = "llama"
    tied: bool = False
    seed: int = 0
    generator: str = "numpy"

    @property
    def manifest(self) -> dict[str, Any]:
        """The recipe as the manifest has it. A Llama's is that of the manifests of old."""
        entries: dict[str, Any] = {"recipe": RECIPES[self.generator], "seed": self.seed}
        entries["architectures"] = [ARCHITECTURES[self.architecture]]
        if self.architecture != "llama":
            entries["tied_embeddings"] = self.tied
        return entries


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


def write_config(directory: Path, dimensions: Dimensions, recipe: Recipe) -> None:
    """Write config.json and generation_config.json."""
    ids = {"bos_token_id": BYTE_TOKENS, "eos_token_id": BYTE_TOKENS + 1, "pad_token_id": BYTE_TOKENS + 2}
    own: dict[str, Any] = {"rope_theta": 10000.0, "mlp_bias": False}
    if recipe.architecture == "qwen3":
        own = {"rope_theta": 1000000.0, "use_sliding_window": False, "max_window_layers": dimensions.layers}
    write_json(
        directory / "config.json",
        {
            "architectures": [ARCHITECTURES[recipe.architecture]],
            "model_type": recipe.architecture,
            "hidden_size": dimensions.hidden_size,
            "intermediate_size": dimensions.intermediate_size,
            "num_hidden_layers": dimensions.layers,
            "num_attention_heads": dimensions.attention_heads,
            "num_key_value_heads": dimensions.kv_heads,
            "head_dim": dimensions.head_dim,
            "vocab_size": dimensions.vocab_size,
            "max_position_embeddings": dimensions.max_position_tokens,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "tie_word_embeddings": recipe.tied,
            "attention_bias": False,
            "torch_dtype": "bfloat16",
            **own,
            **ids,
        },
    )
    write_json(directory / "generation_config.json", ids)


Normal = Callable[[int, int, float], "torch.Tensor"]


def normal_numbers(recipe: Recipe) -> Normal:
    """A function (rows, columns, deviation) -> bfloat16 tensor on the CPU, drawn in turn from one generator.

    numpy's numbers are the same on every host; torch's depend on the device and its library, and come much faster on a
    GPU. Raises UnusableInput where the device is missing.
    """
    import torch

    if recipe.generator == "numpy":
        import numpy as np

        drawing = np.random.Generator(np.random.PCG64(recipe.seed))

        def by_numpy(rows: int, columns: int, deviation: float) -> "torch.Tensor":
            values = drawing.standard_normal((rows, columns), dtype=np.float32)
            return torch.from_numpy(values * np.float32(deviation)).to(torch.bfloat16)

        return by_numpy
    device = recipe.generator.removeprefix("torch-")
    if device == "cuda" and not torch.cuda.is_available():
        raise UnusableInput(
            "generator=torch-cuda needs a GPU that torch can use, and there is none; use numpy, which takes many times "
            "as long."
        )
    source = torch.Generator(device=device).manual_seed(recipe.seed)

    def by_torch(rows: int, columns: int, deviation: float) -> "torch.Tensor":
        values = torch.randn((rows, columns), generator=source, device=device, dtype=torch.float32)
        return (values * deviation).to(torch.bfloat16).cpu()

    return by_torch


def random_weights(dimensions: Dimensions, recipe: Recipe) -> "Iterator[tuple[str, torch.Tensor]]":
    """Weights by name, bfloat16. One generator and a fixed order: the same recipe gives the same bytes."""
    import torch

    normal = normal_numbers(recipe)
    qwen3 = recipe.architecture == "qwen3"

    def projection(rows: int, fan_in: int, gain: float = 1.0) -> "torch.Tensor":
        return normal(rows, fan_in, gain / fan_in**0.5)

    def constant(size: int, value: float = 1.0) -> "torch.Tensor":
        return torch.full((size,), value, dtype=torch.bfloat16)

    hidden, intermediate = dimensions.hidden_size, dimensions.intermediate_size
    query_rows = dimensions.attention_heads * dimensions.head_dim
    kv_rows = dimensions.kv_heads * dimensions.head_dim
    # A tied embedding is scaled as a head: at 1 the model would only repeat its last token.
    yield "model.embed_tokens.weight", normal(dimensions.vocab_size, hidden, 3.0 / hidden**0.5 if recipe.tied else 1.0)
    if not recipe.tied:
        yield "lm_head.weight", projection(dimensions.vocab_size, hidden, 3.0)
    yield "model.norm.weight", constant(hidden)
    gain = 1.0 if qwen3 else 2.0
    for layer in range(dimensions.layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "self_attn.q_proj.weight", projection(query_rows, hidden, gain)
        yield prefix + "self_attn.k_proj.weight", projection(kv_rows, hidden, gain)
        yield prefix + "self_attn.v_proj.weight", projection(kv_rows, hidden)
        yield prefix + "self_attn.o_proj.weight", projection(hidden, query_rows)
        if qwen3:
            yield prefix + "self_attn.q_norm.weight", constant(dimensions.head_dim, QWEN3_NORM_GAIN)
            yield prefix + "self_attn.k_norm.weight", constant(dimensions.head_dim, QWEN3_NORM_GAIN)
        yield prefix + "mlp.gate_proj.weight", projection(intermediate, hidden)
        yield prefix + "mlp.up_proj.weight", projection(intermediate, hidden)
        yield prefix + "mlp.down_proj.weight", projection(hidden, intermediate)
        yield prefix + "input_layernorm.weight", constant(hidden)
        yield prefix + "post_attention_layernorm.weight", constant(hidden)


def write_weights(directory: Path, dimensions: Dimensions, recipe: Recipe) -> None:
    """Write model.safetensors, or several files and their index where one would be too large to hold in RAM."""
    from safetensors.torch import save_file  # slow to import, and a model that is there needs no torch

    batches: list[list[str]] = []
    batch: dict[str, torch.Tensor] = {}
    total = 0

    def flush() -> None:
        save_file(batch, directory / f"part-{len(batches) + 1:05d}.safetensors", metadata={"format": "pt"})
        batches.append(list(batch))
        batch.clear()

    for name, tensor in random_weights(dimensions, recipe):
        batch[name] = tensor
        total += tensor.nbytes
        if sum(held.nbytes for held in batch.values()) >= FEW_TENSORS_BYTES:
            flush()
    if batch:
        flush()
    if len(batches) == 1:
        (directory / "part-00001.safetensors").rename(directory / "model.safetensors")
        return
    files = [f"model-{number:05d}-of-{len(batches):05d}.safetensors" for number in range(1, len(batches) + 1)]
    for number, file in enumerate(files, start=1):
        (directory / f"part-{number:05d}.safetensors").rename(directory / file)
    weight_map = {name: file for file, names in zip(files, batches, strict=True) for name in names}
    write_json(
        directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
    )


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON with sorted keys, so that the same content has the same bytes."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def sha256_of(path: Path) -> str:
    """sha256 of a file's content in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:  # by hand: hashlib.file_digest is not in Python 3.10
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def files_of(directory: Path) -> dict[str, dict[str, Any]]:
    """Every file below `directory` but the manifest, by relative path: `{size_bytes, sha256}`."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path != directory / MANIFEST)
    return {
        path.relative_to(directory).as_posix(): {"size_bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, digests_of(paths), strict=True)
    }


def digests_of(paths: list[Path]) -> list[str]:
    """sha256 of each file, several at a time: hashing leaves the interpreter's lock."""
    with ThreadPoolExecutor(max_workers=8) as pool:
        return list(pool.map(sha256_of, paths))


def revision_of(files: dict[str, dict[str, Any]]) -> str:
    """sha256 over the file list: the model's revision. Two directories with equal files have equal revisions."""
    return hashlib.sha256(json.dumps(files, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def manifest_of(files: dict[str, dict[str, Any]], weights: str, **facts: Any) -> dict[str, Any]:
    """The manifest: what the model is, and the digest of each file."""
    return {"schema_version": "1.0", "weights": weights, **facts, "revision": revision_of(files), "files": files}


def facts_of_config(directory: Path) -> dict[str, Any]:
    """Architectures and KV bytes per token of a directory with a Hugging Face config.json.

    `kv_bytes_per_token` is None where the config does not determine it (compressed KV, several text parts, an
    unknown type of values): the engine's own figure counts then. Raises UnusableInput for what is no configuration.
    """
    path = directory / "config.json"
    try:
        return facts_in(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, AttributeError) as error:
        raise UnusableInput(
            f"{path} is no configuration of a model ({error}); it should be a JSON object, and a Git LFS pointer or a "
            "copy that was cut off is none: bring the model's own file."
        ) from None


def facts_in(config: dict[str, Any]) -> dict[str, Any]:
    """Of what a config.json holds. Raises TypeError or AttributeError where it is no configuration."""
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
    for name, digest in zip(listed, digests_of([directory / name for name in listed]), strict=True):
        if digest != listed[name]["sha256"]:
            return f"{directory / name} has another sha256 than the manifest says"
    if revision != revision_of(listed):
        return f"{directory}/{MANIFEST} has a revision that does not follow from its file list"
    present = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    if unlisted := sorted(present - set(listed) - {MANIFEST}):
        return f"{directory}/{unlisted[0]} is not in the manifest"
    return None


def is_made_as_asked(directory: Path, dimensions: Dimensions, recipe: Recipe) -> bool:
    """True when the directory is whole and was made from these dimensions by this recipe."""
    if problem_with(directory):
        return False
    manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    asked = {"dimensions": asdict(dimensions), **recipe.manifest}
    return all(manifest.get(name) == value for name, value in asked.items())


def make(directory: Path, dimensions: Dimensions, recipe: Recipe) -> bool:
    """Make the model in `directory`, whole or not at all; return False where it was already there.

    A directory that this program did not make (no manifest with `weights: random`) is never replaced.
    """
    check_dimensions(dimensions)
    if is_made_as_asked(directory, dimensions, recipe):
        return False
    refuse_foreign(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    mark = directory.with_name(f".{directory.name}.kvtrial")  # whose it is, before there is anything
    mark.write_text(json.dumps({"made_by": "kvtrial", "name": directory.name}) + "\n", encoding="utf-8")
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        write_tokenizer(staging, dimensions)
        write_config(staging, dimensions, recipe)
        write_weights(staging, dimensions, recipe)
        facts = {
            **recipe.manifest,
            "dimensions": asdict(dimensions),
            "kv_bytes_per_token": dimensions.kv_bytes_per_token,
        }
        if recipe.architecture != "llama":
            facts["unlike_the_named_model"] = (
                f"weights are random; the vocabulary has {dimensions.vocab_size} entries, a token a byte"
            )
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


def unpack_single_folder(directory: Path) -> None:
    """Where an archive held the model in one folder, lift its files up."""
    entries = [path for path in directory.iterdir() if path.name != MANIFEST]
    if len(entries) == 1 and entries[0].is_dir() and (entries[0] / "config.json").is_file():
        for path in entries[0].iterdir():
            path.rename(directory / path.name)
        entries[0].rmdir()


def digest_of(path: Path) -> str:
    """What pins a model that is brought from the controller: an archive's sha256, a directory's revision."""
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UnusableInput(
                f"{path} has no config.json; name the directory that holds it, the tokenizer and weights."
            )
        return revision_of(files_of(path))
    return sha256_of(path)


def refuse_unreadable(directory: Path, account: str) -> None:
    """Raise UnusableInput where the account can't read a file; one still to be made has no rights of its own."""
    if not account or os.geteuid() != 0:
        return
    try:
        entry = pwd.getpwnam(account)
        user, group, groups = entry.pw_uid, entry.pw_gid, os.getgrouplist(account, entry.pw_gid)
    except KeyError:
        user, group, groups = 65534, 65534, []
    files = sorted(str(path) for path in directory.rglob("*") if path.is_file())
    script = 'for file; do test -r "$file" || { echo "$file"; exit 1; }; done'
    done = subprocess.run(
        ["/bin/sh", "-c", script, "sh", *files], user=user, group=group, extra_groups=groups, cwd="/",
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise UnusableInput(
            f"{done.stdout.strip()} can't be read by the account {account}, as which engines run; to them "
            f"it is missing. Let everybody read it (chmod -R a+rX {directory}) and pass through every folder above it."
        )


def adopt(directory: Path, manifest_path: Path, check: bool = False, reader: str = "", **facts: Any) -> dict[str, Any]:
    """Write the manifest of a given model directory, unless `check`; return whether it changed, and to what."""
    if not (directory / "config.json").is_file():
        raise UnusableInput(
            f"{directory} has no config.json; a model directory has config.json, a tokenizer and weights, "
            "so name the directory that holds them."
        )
    refuse_unreadable(directory, reader)
    manifest = manifest_of(files_of(directory), "given", **facts_of_config(directory), **facts)
    text = json.dumps(manifest, indent=2, sort_keys=True) + "\n"
    changed = not manifest_path.is_file() or manifest_path.read_text(encoding="utf-8") != text
    told = {"changed": changed, "directory": str(directory), "revision": manifest["revision"]}
    if check or not changed:
        return told
    manifest_path.parent.mkdir(parents=True, exist_ok=True)
    temporary = manifest_path.with_name(f".{manifest_path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.chmod(0o644)
    temporary.replace(manifest_path)
    return told


def parser() -> argparse.ArgumentParser:
    """The command line: `make`, `adopt`, `verify`."""
    top = argparse.ArgumentParser(description="Make a random-weight model, or verify a model by its manifest.")
    commands = top.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="make it (or leave it, where it is whole and the same)")
    making.add_argument("directory", type=Path)
    making.add_argument("--seed", type=int, default=0)
    making.add_argument("--architecture", choices=sorted(ARCHITECTURES), default="llama")
    making.add_argument("--tied", action="store_true", help="the embedding is also the output head")
    making.add_argument("--generator", choices=sorted(RECIPES), default="numpy")
    for name, default in asdict(Dimensions()).items():
        making.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    adopting = commands.add_parser("adopt", help="compute the manifest of a given directory")
    adopting.add_argument("directory", type=Path)
    adopting.add_argument("--manifest", type=Path, required=True)
    for command in (making, adopting):
        command.add_argument("--check", action="store_true", help="say what would change, and write nothing")
    adopting.add_argument("--reader", default="", help="the account that has to be able to read it")
    adopting.add_argument("--unpacked", action="store_true", help="it may lie in one folder of an archive")
    digesting = commands.add_parser("digest", help="print what pins a directory or an archive")
    digesting.add_argument("directory", type=Path)
    verifying = commands.add_parser("verify", help="compare a directory with its manifest")
    verifying.add_argument("directory", type=Path)
    return top


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Carry out one command; return what is printed."""
    directory: Path = arguments.directory
    if arguments.command == "adopt":
        if arguments.unpacked:
            unpack_single_folder(directory)
            make_world_readable(directory)
        # What the role brought it may remove again; a model of the user's own, never.
        facts = {"brought_here": True} if arguments.unpacked else {}
        return adopt(directory, arguments.manifest, arguments.check, arguments.reader, **facts)
    changed = False
    if arguments.command == "verify":
        if problem := problem_with(directory):
            raise UnusableInput(f"{problem}; remove the directory and run again to make it anew.")
    else:
        dimensions = Dimensions(**{name: getattr(arguments, name) for name in asdict(Dimensions())})
        recipe = Recipe(arguments.architecture, arguments.tied, arguments.seed, arguments.generator)
        if arguments.check and not is_made_as_asked(directory, dimensions, recipe):
            check_dimensions(dimensions)
            refuse_foreign(directory)
            return {"changed": True, "directory": str(directory), "revision": ""}
        changed = make(directory, dimensions, recipe)
    manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    return {"changed": changed, "directory": str(directory), "revision": manifest["revision"]}


def main() -> int:
    """Entry point. 0 done, 2 unusable input."""
    arguments = parser().parse_args()
    try:
        if arguments.command == "digest":
            print(digest_of(arguments.directory))
        else:
            print(json.dumps(run(arguments)))
    except (UnusableInput, OSError) as error:
        print(str(error), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
