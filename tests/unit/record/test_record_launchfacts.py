"""Two real engines' resolved configurations, and command lines."""

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtrial.record.errors import UnusableInput
from kvtrial.record.launch import async_scheduling, human_int, parse_vllm_args, tier_of
from kvtrial.record.launchfacts import ABSENT, differences, flatten, layouts, undeclared

FOLDER = Path(__file__).parents[2] / "fixtures" / "server_info"
DECLARED = ["vllm_config.kv_transfer_config"]


@pytest.fixture
def control():
    return json.loads((FOLDER / "vllm-0.32.0-cpu-control.json").read_text())


@pytest.fixture
def offload():
    return json.loads((FOLDER / "vllm-0.32.0-cpu-offload.json").read_text())


def test_two_real_engines_differ_only_in_what_was_declared(control, offload):
    found = differences(control, offload, "0.32.0", "cpu")
    assert {d.path for d in found if d.kind == "volatile"} == {
        "vllm_config.instance_id",
        "vllm_config.kv_transfer_config.engine_id",
        "vllm_env.VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME",
        "system_env.env_vars.VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME",
    }
    assert undeclared(found, DECLARED) == []
    assert {d.path for d in undeclared(found, [])} >= {"vllm_config.kv_transfer_config.kv_connector"}
    connector = next(d for d in found if d.path == "vllm_config.kv_transfer_config.kv_connector")
    assert (connector.control, connector.variant) == (ABSENT, "OffloadingConnector")


def test_an_undeclared_difference_is_found(control, offload):
    offload["vllm_config"]["scheduler_config"]["max_num_seqs"] += 1
    offload["system_env"]["env_vars"] += "\nOMP_NUM_THREADS=2"
    assert {d.path for d in undeclared(differences(control, offload, "0.32.0", "cpu"), DECLARED)} == {
        "vllm_config.scheduler_config.max_num_seqs",
        "system_env.env_vars.OMP_NUM_THREADS",
    }


def test_false_and_zero_are_not_the_same(control):
    changed = copy.deepcopy(control)
    changed["vllm_config"]["scheduler_config"]["async_scheduling"] = 0
    assert [d.path for d in differences(control, changed, "0.32.0", "cpu")] == [
        "vllm_config.scheduler_config.async_scheduling"
    ]


def test_the_layout_is_a_consequence_on_a_gpu_and_a_fault_on_the_cpu(control, offload):
    offload["vllm_config"]["cache_config"]["kv_cache_layout"] = "LBHNC"
    kinds = {}
    for backend in ("cuda", "cpu"):
        found = differences(control, offload, "0.32.0", backend)
        kinds[backend] = next(d.kind for d in found if d.path.endswith("kv_cache_layout"))
    assert kinds == {"cuda": "consequence", "cpu": "other"}
    assert (
        next(d.kind for d in differences(control, offload, "0.26.0", "cuda") if d.path.endswith("kv_cache_layout"))
        == "other"
    )


def test_layouts_by_version():
    assert layouts("0.32.0", "cuda").with_connector == "LBHNC"
    assert layouts("0.32.0", "cpu").without == "LBHNC"
    assert "HND" in layouts("0.26.0", "cuda").with_connector
    assert layouts("0.11.2", "cuda") is None


def test_flatten_gives_scalars_by_dotted_path():
    assert flatten({"a": {"b": [1, 2], "c": [{"d": None}], "e": {}}}) == {
        "a.b": "[1, 2]",
        "a.c[0].d": None,
        "a.e": "{}",
    }


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda x: st.dictionaries(st.text(min_size=1), x) | st.lists(x),
    )
)
def test_an_engine_does_not_differ_from_itself(value):
    assert differences({"x": value}, {"x": copy.deepcopy(value)}, "0.32.0") == []


@pytest.mark.parametrize(
    ("text", "number"),
    [("256M", 268435456), ("256m", 256000000), ("4G", 4294967296), ("25.6k", 25600), ("4294967296", 4294967296)],
)
def test_sizes_are_read_as_vllm_reads_them(text, number):
    assert human_int(text, "x") == number


@pytest.mark.parametrize("text", ["1.5G", "4GiB", "lots", ""])
def test_a_size_that_vllm_would_not_read_is_refused(text):
    with pytest.raises(UnusableInput, match="is not a size"):
        human_int(text, "--kv-cache-memory-bytes")


def test_a_command_line_is_read_as_vllm_reads_it():
    line = "/opt/venv/bin/vllm serve Qwen/Qwen3-0.6B --max_model_len=4096 --enforce-eager --no-async-scheduling -tp 2 "
    line += "--served-model-name a b --kv-cache-memory 256M --port 1 --port 2"
    parsed = parse_vllm_args(line.split())
    assert parsed.model == "Qwen/Qwen3-0.6B"
    assert parsed.options == {
        "max-model-len": "4096",
        "enforce-eager": True,
        "async-scheduling": False,
        "tensor-parallel-size": "2",
        "served-model-name": "a b",
        "kv-cache-memory-bytes": "256M",
        "port": "2",
    }
    assert parsed.size("kv-cache-memory-bytes") == 268435456
    assert parsed.repeated == ["port"]


def test_a_dotted_connector_configuration_is_merged():
    parsed = parse_vllm_args(
        [
            "m",
            "--kv-transfer-config.kv_connector",
            "OffloadingConnector",
            "--kv-transfer-config.kv_connector_extra_config.cpu_bytes_to_use=8",
        ]
    )
    assert parsed.kv_transfer == {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 8},
    }


def test_a_connector_configuration_that_is_no_json_is_refused_in_a_sentence():
    with pytest.raises(UnusableInput, match="is not a JSON object"):
        parse_vllm_args(["m", "--kv-transfer-config", "{kv_connector: OffloadingConnector}"])


def test_the_shortcut_overwrites_the_json_and_keeps_its_other_keys():
    parsed = parse_vllm_args(
        [
            "m",
            "--kv-offloading-size",
            "4",
            "--kv-transfer-config",
            '{"kv_connector":"MultiConnector","kv_connector_extra_config":{"cpu_bytes_to_use":1,"store_threshold":2}}',
        ]
    )
    tier = tier_of(parsed, {}, "0.26.0")
    assert (tier.connector, tier.role, tier.cpu_bytes, tier.extra["store_threshold"]) == (
        "OffloadingConnector",
        "kv_both",
        4 * 2**30,
        2,
    )
    assert tier_of(parsed, {"VLLM_USE_SIMPLE_KV_OFFLOAD": "1"}, "0.26.0").connector == "SimpleCPUOffloadConnector"
    assert tier_of(parse_vllm_args(["m"]), {}, "0.26.0") is None


def test_async_scheduling_is_left_to_the_engine_from_0_14():
    assert async_scheduling(parse_vllm_args(["m"]), "0.14.1")
    assert not async_scheduling(parse_vllm_args(["m"]), "0.13.0")
    assert not async_scheduling(parse_vllm_args(["m", "--no-async-scheduling"]), "0.32.0")
