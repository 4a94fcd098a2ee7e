"""The made model is the same for the same seed, and its manifest notices every change."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

MAKER = Path(__file__).parents[2] / "roles" / "model" / "files" / "make_model.py"
SMALL = [
    "--layers=2",
    "--hidden-size=32",
    "--intermediate-size=64",
    "--attention-heads=2",
    "--kv-heads=1",
    "--head-dim=16",
]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    specification = importlib.util.spec_from_file_location("make_model", MAKER)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["make_model"] = module
    specification.loader.exec_module(module)
    return module


def run_with(python: Path | str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, MAKER, *map(str, arguments)], capture_output=True, text=True, check=False, env={"PATH": os.defpath}
    )


@pytest.fixture
def engine() -> Run:
    venv = os.environ.get("KVTRIAL_ENGINE_VENV")
    if not venv:
        pytest.skip("KVTRIAL_ENGINE_VENV does not name an engine's virtual environment; torch is only there")
    return lambda *arguments: run_with(Path(venv, "bin", "python"), *arguments)


def manifest_of(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
    return content


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """A directory that looks like a model to the manifest: no weights are read."""
    directory = tmp_path / "given"
    directory.mkdir()
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    (directory / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}), encoding="utf-8")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def test_the_default_shape_has_4096_bytes_of_kv_per_token(maker: ModuleType) -> None:
    assert maker.Dimensions().kv_bytes_per_token == 4096


@pytest.mark.parametrize(
    ("dimensions", "kv_bytes_per_token"),
    [
        ({"layers": 28, "hidden_size": 1024, "intermediate_size": 3072, "attention_heads": 16}, 114_688),
        ({"layers": 36, "hidden_size": 4096, "intermediate_size": 12288, "attention_heads": 32}, 147_456),
    ],
)
def test_the_shapes_of_qwen3_have_its_kv(
    dimensions: dict[str, int], kv_bytes_per_token: int, maker: ModuleType, tmp_path: Path
) -> None:
    shape = maker.Dimensions(**dimensions, kv_heads=8, head_dim=128, max_position_tokens=40960)
    assert shape.kv_bytes_per_token == kv_bytes_per_token
    maker.write_config(tmp_path, shape, maker.Recipe("qwen3", tied=True))
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert maker.facts_of_config(tmp_path)["kv_bytes_per_token"] == kv_bytes_per_token


def test_a_llamas_manifest_is_that_of_old(maker: ModuleType) -> None:
    assert maker.Recipe(seed=3).manifest == {
        "recipe": "normal-pcg64-1",
        "seed": 3,
        "architectures": ["LlamaForCausalLM"],
    }


def test_a_qwen3_has_norms_of_queries_and_keys_and_says_what_it_is_not(engine: Run, tmp_path: Path) -> None:
    for name, more in (("tied", ["--tied"]), ("untied", [])):
        done = engine("make", tmp_path / name, "--architecture=qwen3", "--generator=torch-cpu", *more, *SMALL)
        assert done.returncode == 0, done.stderr
        manifest = manifest_of(tmp_path / name)
        assert manifest["recipe"] == "normal-torch-cpu-1"
        assert manifest["tied_embeddings"] is (name == "tied")
        assert "the vocabulary has 320 entries" in manifest["unlike_the_named_model"]
        header = (tmp_path / name / "model.safetensors").read_bytes()
        assert b"model.layers.1.self_attn.q_norm.weight" in header
        assert (b"lm_head.weight" in header) is (name == "untied")
    again = engine("make", tmp_path / "tied", "--architecture=qwen3", "--generator=torch-cpu", "--tied", *SMALL)
    assert json.loads(again.stdout)["changed"] is False
    other = engine("make", tmp_path / "tied", "--architecture=qwen3", "--generator=numpy", "--tied", *SMALL)
    assert json.loads(other.stdout)["changed"] is True


SPLIT = """
import sys
sys.path.insert(0, sys.argv[1])
import make_model
make_model.FEW_TENSORS_BYTES = 4000
sizes = dict(layers=2, hidden_size=32, intermediate_size=64, attention_heads=2, kv_heads=1, head_dim=16)
shape = make_model.Dimensions(**sizes)
make_model.make(make_model.Path(sys.argv[2]), shape, make_model.Recipe("qwen3", True, 5))
import safetensors.torch as files, json, pathlib
folder = pathlib.Path(sys.argv[2])
index = json.loads((folder / "model.safetensors.index.json").read_text())
held = {name: file.name for file in folder.glob("model-*.safetensors") for name in files.load_file(file)}
assert held == index["weight_map"], (held, index)
assert len(set(held.values())) > 2
assert make_model.problem_with(folder) is None
print(index["metadata"]["total_size"] == sum(t.nbytes for f in folder.glob("model-*") for t in
      (files.load_file(f).values() if f.suffix == ".safetensors" else [])))
"""


def test_a_model_of_several_files_has_an_index_that_names_every_tensor(engine: Run, tmp_path: Path) -> None:
    python = Path(os.environ["KVTRIAL_ENGINE_VENV"], "bin", "python")
    done = subprocess.run([python, "-c", SPLIT, MAKER.parent, tmp_path / "model"], capture_output=True, text=True,
                          check=False, env={"PATH": os.defpath})  # fmt: skip
    assert done.stdout.strip() == "True", done.stderr


def test_the_same_seed_gives_the_same_files_and_another_seed_does_not(engine: Run, tmp_path: Path) -> None:
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        result = engine("make", tmp_path / name, "--seed", seed, *SMALL)
        assert result.returncode == 0, result.stderr
    a, b, c = (manifest_of(tmp_path / name) for name in "abc")
    assert a["files"] == b["files"]
    assert a["revision"] == b["revision"] != c["revision"]
    assert a["files"]["model.safetensors"] != c["files"]["model.safetensors"]
    assert (a["weights"], a["kv_bytes_per_token"]) == ("random", 2 * 2 * 1 * 16 * 2)


def test_a_second_run_changes_nothing_and_a_damaged_model_is_made_anew(engine: Run, tmp_path: Path) -> None:
    model = tmp_path / "model"
    assert json.loads(engine("make", model, *SMALL).stdout)["changed"] is True
    revision = manifest_of(model)["revision"]
    assert json.loads(engine("make", model, *SMALL).stdout)["changed"] is False
    (model / "config.json").write_text("{}", encoding="utf-8")
    assert engine("verify", model).returncode == 2
    assert json.loads(engine("make", model, *SMALL).stdout) == {
        "changed": True,
        "directory": str(model),
        "revision": revision,
    }
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".model.kvtrial", "model"], "nothing is left of the making but the mark of whose it is"


def test_every_user_can_read_the_model(engine: Run, tmp_path: Path) -> None:
    previous = os.umask(0o077)
    try:
        engine("make", tmp_path / "model", *SMALL)
    finally:
        os.umask(previous)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
    assert set(modes.values()) == {0o644}
    assert (tmp_path / "model").stat().st_mode & 0o777 == 0o755


def test_a_directory_of_somebody_elses_is_never_replaced(given: Path) -> None:
    result = run_with(sys.executable, "make", given, *SMALL)
    assert result.returncode == 2
    assert "not made by this role" in result.stderr
    assert (given / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("--kv-heads=3", "attention_heads=8 is not a multiple of kv_heads=3"),
        ("--layers=0", "layers=0 is no size"),
        ("--head-dim=7", "head_dim=7 is odd"),
        ("--vocab-size=100", "vocab_size=100 is too small"),
    ],
)
def test_bad_dimensions_are_refused_in_one_sentence(tmp_path: Path, argument: str, sentence: str) -> None:
    result = run_with(sys.executable, "make", tmp_path / "model", argument)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "model").exists()


def test_the_manifest_of_a_given_directory_follows_its_content(given: Path, tmp_path: Path) -> None:
    arguments = ("adopt", given, "--manifest", tmp_path / "given.manifest.json")
    first = json.loads(run_with(sys.executable, *arguments).stdout)
    again = json.loads(run_with(sys.executable, *arguments).stdout)
    (given / "model.safetensors").write_bytes(b"Weights")
    other = json.loads(run_with(sys.executable, *arguments).stdout)
    assert (first["changed"], again["changed"], other["changed"]) == (True, False, True)
    assert first["revision"] == again["revision"] != other["revision"]
    manifest = json.loads((tmp_path / "given.manifest.json").read_text(encoding="utf-8"))
    assert manifest["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2
    assert sorted(path.name for path in given.iterdir()) == ["config.json", "model.safetensors"]


def test_kv_bytes_are_not_guessed_where_the_config_does_not_say(given: Path, maker: ModuleType) -> None:
    config = json.loads((given / "config.json").read_text(encoding="utf-8"))
    (given / "config.json").write_text(json.dumps(config | {"kv_lora_rank": 512}), encoding="utf-8")
    assert maker.facts_of_config(given)["kv_bytes_per_token"] is None


def test_a_directory_without_a_config_is_refused_in_one_sentence(tmp_path: Path) -> None:
    result = run_with(sys.executable, "adopt", tmp_path, "--manifest", tmp_path / "m.json")
    assert result.returncode == 2
    assert "has no config.json" in result.stderr


@pytest.mark.parametrize(
    "text",
    ["version https://git-lfs", '{"num_hidden_layers": 2,', "[]", '{"torch_dtype": {"a": 1}}', "\xff"],
)
def test_what_is_no_configuration_is_refused_in_one_sentence(given: Path, tmp_path: Path, text: str) -> None:
    (given / "config.json").write_text(text, encoding="latin-1")
    result = run_with(sys.executable, "adopt", given, "--manifest", tmp_path / "m.json")
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1, result.stderr
    assert f"{given}/config.json is no configuration of a model (" in result.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can ask what another account may read")
def test_a_model_that_the_engines_account_cannot_read_is_refused_naming_the_file(given: Path) -> None:
    """A file that it can't read looks to the engine like one that is not there."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        Path(name).chmod(0o755)
        model = Path(name, "of mine", "model")
        shutil.copytree(given, model)
        adopt = ("adopt", model, "--manifest", Path(name, "m.json"), "--reader", "kvtrial-of-no-host")
        assert run_with(sys.executable, *adopt).returncode == 0
        (model / "model.safetensors").chmod(0o600)
        refused = run_with(sys.executable, *adopt)
        assert refused.returncode == 2 and f"{model}/model.safetensors can't be read by the account" in refused.stderr
        (model / "model.safetensors").chmod(0o644)
        model.parent.chmod(0o700)
        assert f"{model}/config.json can't be read by the account" in run_with(sys.executable, *adopt).stderr


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda d: (d / "model.safetensors").write_bytes(b"Weights"), "another sha256"),
        (lambda d: (d / "model.safetensors").write_bytes(b"weight"), "has 6 bytes, the manifest says 7"),
        (lambda d: (d / "model.safetensors").unlink(), "missing"),
        (lambda d: (d / "extra.bin").write_bytes(b""), "is not in the manifest"),
        (lambda d: (d / "manifest.json").write_text("{", encoding="utf-8"), "is not a manifest"),
        (lambda d: (d / "manifest.json").unlink(), "has no manifest.json"),
    ],
    ids=["a byte", "a size", "a file lost", "a file more", "a torn manifest", "no manifest"],
)
def test_verification_names_the_damage(
    maker: ModuleType, given: Path, damage: Callable[[Path], object], sentence: str
) -> None:
    maker.write_json(given / "manifest.json", maker.manifest_of(maker.files_of(given), "given"))
    assert maker.problem_with(given) is None
    damage(given)
    assert sentence in maker.problem_with(given)


def test_a_forged_revision_is_noticed(maker: ModuleType, given: Path) -> None:
    manifest = maker.manifest_of(maker.files_of(given), "given") | {"revision": "0" * 64}
    maker.write_json(given / "manifest.json", manifest)
    assert "revision that does not follow" in maker.problem_with(given)
