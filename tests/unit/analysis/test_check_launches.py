"""Launches that must be refused before anything starts, each beside the same launch mended, which must be quiet."""

import contextlib
import copy
import json
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from kvtrial.analysis.check import check_launches
from kvtrial.analysis.cli import main
from kvtrial.record.errors import UnusableInput

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"
MIXED, CHUNK, SMALL, DRIVER = (
    "both-interfaces",
    "block-size-not-multiple",
    "tier-smaller-than-gpu-kv",
    "driver-too-old-for-wheel",
)


def case(name):
    return yaml.safe_load((CONFIGS / f"{name}.yml").read_text())


def check(launch, model=None):
    return check_launches(launch["host"], launch["vllm"], launch["arms"], model)


def classes(findings, severity=None):
    return [f.class_ for f in findings if severity in (None, f.severity)]


def option(launch, arm, name, value):
    """Set, or with None remove, an option that takes a value."""
    args = launch["arms"][arm]["args"]
    if name in args:
        at = args.index(name)
        del args[at : at + 2]
    if value is not None:
        args += [name, str(value)]
    return launch


def connector(launch, **extra):
    """Change keys of the variant's kv_connector_extra_config; None removes one."""
    args = launch["arms"]["variant"]["args"]
    at = args.index("--kv-transfer-config") + 1
    config = json.loads(args[at])
    for key, value in extra.items():
        if value is None:
            config["kv_connector_extra_config"].pop(key, None)
        else:
            config["kv_connector_extra_config"][key] = value
    args[at] = json.dumps(config)
    return launch


def good(version="0.32.0"):
    """A launch nothing speaks against: 16 GiB tier, 4 GiB of GPU KV, equal arms."""
    launch = option(case(MIXED), "variant", "--kv-offloading-size", None)
    launch["vllm"] = {"version": version, "source": "pypi"}
    return launch


@pytest.mark.parametrize("version", ["0.26.0", "0.28.0", "0.30.0", "0.32.0", "0.33.0"])
def test_a_good_launch_is_quiet(version):
    assert check(good(version)) == []


def test_both_interfaces():
    found = check(case(MIXED))
    assert found[0].class_ == "mixed_interfaces"
    assert found[0].severity == "refuse"
    assert found[0].arm == "variant"
    assert found[0].numbers["effective_cpu_bytes_to_use"] == 4294967296
    for part in (
        "neither rejects",
        "--kv-offloading-size wins",
        "4 * 2**30 = 4294967296",
        "not the 17179869184",
        "survive",
    ):
        assert part in found[0].reason
    assert "Keep one interface" in found[0].do
    assert classes(found) == ["mixed_interfaces", "tier_smaller_than_gpu_kv"]
    assert check(option(case(MIXED), "variant", "--kv-offloading-size", None)) == []
    by_shortcut_alone = option(
        option(case(MIXED), "variant", "--kv-transfer-config", None), "variant", "--kv-offloading-size", 16
    )
    assert check(by_shortcut_alone) == []


def test_block_size_that_is_no_multiple():
    found = check(case(CHUNK))
    assert classes(found) == ["block_size_not_multiple"]
    assert "100 is not a multiple of the GPU block size 16" in found[0].reason
    assert "AssertionError without any text" in found[0].reason
    assert "96 or 112" in found[0].do
    assert "blocks_per_chunk 6 or 7 (never both)" in found[0].do
    assert check(connector(case(CHUNK), block_size=96)) == []
    assert check(connector(case(CHUNK), block_size=None, blocks_per_chunk=6)) == []


def test_block_size_has_a_text_from_0_30_and_no_blocks_per_chunk_before_0_26():
    launch = case(CHUNK)
    launch["vllm"]["version"] = "0.30.0"
    assert "must be a multiple of the GPU KV cache block size (16 tokens)" in check(launch)[0].reason
    launch["vllm"]["version"] = "0.25.1"
    assert "blocks_per_chunk" not in check(launch)[0].do


def test_block_size_follows_the_engine_s_own():
    launch = connector(good(), block_size=48)
    assert check(launch) == []
    for arm in ("control", "variant"):
        option(launch, arm, "--block-size", 32)
    assert classes(check(launch)) == ["block_size_not_multiple"]


def test_tier_smaller_than_the_gpu_s_kv_cache():
    found = check(case(SMALL))
    assert classes(found) == ["tier_smaller_than_gpu_kv"]
    for part in ("7021 blocks = 112336 tokens", "11702 blocks = 187232 tokens", "mirror the GPU", "adds no hits"):
        assert part in found[0].reason
    assert "2x or more" in found[0].do
    assert check(connector(case(SMALL), cpu_bytes_to_use=40 * 2**30)) == []
    shrunk = case(SMALL)
    for arm in ("control", "variant"):
        option(shrunk, arm, "--kv-cache-memory-bytes", "4G")
    assert check(shrunk) == []


def test_tier_is_compared_in_tokens_of_the_given_model():
    launch = good()
    for arm in launch["arms"].values():
        arm["args"][0] = "some/model"
    assert classes(check(launch)) == ["tier_not_compared"]
    for arm in ("control", "variant"):
        option(launch, arm, "--num-gpu-blocks-override", 8193)
    assert classes(check(launch, {"kv_bytes_per_token": 147456})) == ["tier_smaller_than_gpu_kv"]
    assert check(launch, {"kv_bytes_per_token": 57344}) == []


def test_two_workers_hold_twice_the_gpu_kv():
    launch = good()
    for arm in launch["arms"].values():
        arm["args"] += ["--tensor-parallel-size", "4"]
    found = check(launch)
    assert classes(found) == ["tier_smaller_than_gpu_kv"]
    assert found[0].numbers["gpu_kv_blocks"] == 4 * 2**32 // 1835008


def test_a_tier_barely_larger_is_warned_of():
    assert classes(check(connector(good(), cpu_bytes_to_use=5 * 2**30))) == ["tier_leaves_no_room"]


def test_an_unpinned_gpu_kv_is_warned_of():
    launch = good()
    for arm in ("control", "variant"):
        option(launch, arm, "--kv-cache-memory-bytes", None)
    assert classes(check(launch)) == ["gpu_kv_not_pinned"]


def test_driver_too_old():
    found = check(case(DRIVER))
    assert classes(found, "refuse") == ["driver_too_old"]
    for part in ("570.86.10 < 580", "PyPI vLLM 0.20 and newer", "0.22.1", "torch 2.11 / CUDA 13.0"):
        assert part in found[0].reason
    for part in (">= 580", "<= 0.19.1", "cu129"):
        assert part in found[0].do
    assert "toolkit" not in found[0].do
    mended = case(DRIVER)
    mended["host"]["driver_version"] = "580.65.06"
    assert classes(check(mended)) == []
    older = case(DRIVER)
    older["vllm"]["version"] = "0.19.1"
    assert "driver_too_old" not in classes(check(older))
    other_build = case(DRIVER)
    other_build["vllm"]["source"] = "https://wheels.example.org/vllm-0.22.1+cu129-cp38-abi3-manylinux_2_28_x86_64.whl"
    assert classes(check(other_build)) == []


def test_a_driver_needs_no_judging_on_the_cpu():
    launch = case(DRIVER)
    launch["vllm"]["backend"] = "cpu"
    assert "driver_too_old" not in classes(check(launch))


def test_an_old_c_library_and_an_old_python_are_refused():
    launch = good("0.20.2")
    launch["host"]["glibc"] = "2.31"
    assert "glibc_too_old" in classes(check(launch))
    launch = good("0.32.0")
    launch["host"]["python"] = "3.10"
    assert classes(check(launch)) == ["python_not_supported"]


def test_obsolete_key():
    found = check(connector(good("0.26.0"), cpu_bytes_to_use=None, num_cpu_blocks=4680))
    assert classes(found, "refuse") == ["obsolete_key"]
    assert "not read since vLLM 0.14" in found[0].reason
    assert "8587837440 bytes" in found[0].do
    both = check(connector(good("0.26.0"), num_cpu_blocks=4680))
    assert classes(both) == ["obsolete_key"]
    assert "ignored without a word" in both[0].reason
    assert "obsolete_key" not in classes(check(connector(good("0.13.0"), cpu_bytes_to_use=None, num_cpu_blocks=4680)))


@pytest.mark.parametrize(
    ("version", "key", "says"),
    [
        ("0.32.0", "cpu_byte_to_use", "did you mean cpu_bytes_to_use?"),
        ("0.32.0", "lazy_offload", "it is a key of SimpleCPUOffloadConnector"),
        ("0.25.1", "blocks_per_chunk", "exists from vLLM 0.26; 0.25.1 ignores it"),
        ("0.32.0", "sync_load_budget_bytes", "exists from vLLM 0.33"),
    ],
)
def test_unknown_key(version, key, says):
    found = check(connector(good(version), **{key: 2}))
    assert classes(found, "refuse") == ["unknown_key"]
    assert says in found[0].reason


def test_a_key_beside_the_extra_config_instead_of_inside():
    launch = good()
    args = launch["arms"]["variant"]["args"]
    at = args.index("--kv-transfer-config") + 1
    args[at] = json.dumps(json.loads(args[at]) | {"cpu_bytes_to_use": 5})
    found = check(launch)
    assert classes(found) == ["unknown_key"]
    assert "inside kv_connector_extra_config" in found[0].reason


def test_a_spec_of_one_s_own_may_have_keys_of_its_own():
    own = {"spec_name": "HostSpec", "spec_module_path": "host_spec"}
    (found,) = check(connector(good(), emulated_bytes_per_s=1, **own))
    assert (found.class_, found.severity) == ("unknown_key", "warn")
    assert "whether the spec of host_spec reads it" in found.reason
    assert "kvtrial_connector_extra_keys" in found.do
    assert classes(check(connector(good(), cpu_bytes_to_used=1, **own)), "refuse") == ["unknown_key"]


@pytest.mark.parametrize("name", ["my_magic_knob", "lazy_offload", "cpu_bytes_to_used"])
def test_the_project_s_own_spec_has_no_keys_beside_vllm_s(name):
    own = {"spec_name": "HostOffloadingSpec", "spec_module_path": "kvtrial_host_offload"}
    assert classes(check(connector(good("0.32.0"), **{name: True}, **own)), "refuse") == ["unknown_key"]


@pytest.mark.parametrize(
    ("extra", "class_"),
    [
        ({"cpu_bytes_to_use": "16G"}, "unusable_value"),
        ({"offload_prompt_only": "false"}, "unusable_value"),
        ({"eviction_policy": "fifo"}, "unusable_value"),
        ({"block_size": 64, "blocks_per_chunk": 4}, "both_chunk_sizes"),
    ],
)
def test_values_that_do_not_mean_what_they_say(extra, class_):
    assert classes(check(connector(good(), **extra)), "refuse") == [class_]


def test_digits_in_quotes_are_a_size():
    assert check(connector(good(), cpu_bytes_to_use=str(16 * 2**30))) == []


def test_tier_below_one_block_and_gib_taken_for_bytes():
    found = check(connector(good(), cpu_bytes_to_use=8))
    assert classes(found) == ["tier_below_one_block", "cpu_bytes_looks_like_gib"]
    assert found[1].reason == "cpu_bytes_to_use=8 is 8 bytes; did you mean 8 GiB (8589934592)?"
    assert found[0].numbers["chunks"] == 0
    assert classes(check(connector(good(), cpu_bytes_to_use=1835007))) == ["tier_below_one_block"]


def test_dev_shm_too_small_from_0_27_on():
    launch = good("0.28.0")
    launch["host"]["dev_shm_free_bytes"] = 64 * 2**20
    found = check(launch)
    assert classes(found) == ["dev_shm_too_small"]
    assert found[0].numbers == {"cpu_bytes_to_use": 17179869184, "dev_shm_free_bytes": 67108864}
    launch["vllm"]["version"] = "0.26.0"
    assert check(launch) == []
    own = connector(good("0.32.0"), spec_name="HostSpec", spec_module_path="host_spec")
    own["host"]["dev_shm_free_bytes"] = 0
    assert check(own) == []


def test_a_tier_beyond_the_host_s_memory():
    launch = good()
    for room, refused in [(20, ["host_memory_too_small"]), (24, []), (25, [])]:
        launch["host"]["ram_available_bytes"] = room * 2**30
        assert classes(check(launch), "refuse") == refused
    launch["host"]["ram_total_bytes"] = 100 * 2**30
    assert classes(check(launch), "refuse") == ["host_memory_too_small"]
    launch["host"]["ram_available_bytes"] = 15 * 2**30
    assert classes(check(launch), "refuse") == ["host_memory_too_small"]


def test_a_tier_that_can_not_be_compared_is_said():
    launch = good()
    for arm in launch["arms"].values():
        arm["args"][0] = "some/model"
    assert classes(check(launch), "warn") == ["tier_not_compared"]
    assert "some/model" in check(launch)[0].reason
    assert check(launch, {"kv_bytes_per_token": 57344}) == []


def test_what_the_command_did_not_check_is_said_with_a_version_of_its_answer(tmp_path, capsys):
    launch = good()
    launch["host"] = {"python": "3.12"}
    (tmp_path / "launch.yml").write_text(json.dumps(launch))
    main(["check", str(tmp_path / "launch.yml"), "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema_version"] == 1
    assert answer["notes"] == [
        "Not checked, since host does not state it: glibc, driver_version, ram_available_bytes, dev_shm_free_bytes."
    ]


def test_development_endpoints_beyond_loopback():
    launch = good()
    for arm in ("control", "variant"):
        launch["arms"][arm]["env"]["VLLM_SERVER_DEV_MODE"] = "1"
    assert check(launch) == []
    for arm in ("control", "variant"):
        option(launch, arm, "--host", "0.0.0.0")
    assert classes(check(launch)) == ["dev_mode_exposed", "dev_mode_exposed"]
    for arm in ("control", "variant"):
        option(launch, arm, "--host", None)
    assert classes(check(launch)) == ["dev_mode_exposed", "dev_mode_exposed"]


def test_a_bind_beyond_loopback_is_warned_of():
    launch = good()
    for arm in ("control", "variant"):
        option(launch, arm, "--host", "::")
    assert classes(check(launch)) == ["non_loopback_bind"] * 2
    for arm in ("control", "variant"):
        option(launch, arm, "--host", "::1")
    assert check(launch) == []


def test_unknown_connector_and_missing_role():
    launch = good()
    args = launch["arms"]["variant"]["args"]
    at = args.index("--kv-transfer-config") + 1
    config = json.loads(args[at])
    args[at] = json.dumps(config | {"kv_connector": "OfloadingConnector"})
    found = check(launch)
    assert classes(found) == ["unknown_connector"]
    assert "did you mean OffloadingConnector?" in found[0].reason
    args[at] = json.dumps({key: value for key, value in config.items() if key != "kv_role"})
    assert classes(check(launch)) == ["kv_role_missing"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("--max-num-seqs", "32"),
        ("--gpu-memory-utilization", "0.8"),
        ("--kv-cache-memory-bytes", "3G"),
        ("--revision", "main"),
    ],
)
def test_arms_that_differ_in_more_than_the_tier_are_not_comparable(name, value):
    found = check(option(good(), "variant", name, value))
    assert classes(found) == ["arms_not_comparable"]
    assert name in found[0].reason
    assert value in found[0].reason


def test_another_model_or_environment_in_one_arm_is_not_comparable():
    launch = good()
    launch["arms"]["variant"]["env"]["OMP_NUM_THREADS"] = "4"
    assert classes(check(launch)) == ["arms_not_comparable"]
    launch = good()
    launch["arms"]["control"]["args"][0] = "Qwen/Qwen3-1.7B"
    assert classes(check(launch)) == ["arms_not_comparable"]


def test_a_guard_set_in_one_arm_only_is_a_difference():
    launch = good("0.26.0")
    launch["arms"]["control"]["args"].remove("--no-async-scheduling")
    assert classes(check(launch)) == ["arms_not_comparable", "version_hazard_unguarded"]


@pytest.mark.parametrize(
    ("version", "facts", "hazard"),
    [
        ("0.26.0", {"ram_total_bytes": 12 * 2**30}, "host-memory-double"),
        ("0.28.0", {"shm_files_left_over": 2}, "shm-left-over"),
    ],
)
def test_what_a_hosts_facts_show_of_a_known_defect_is_warned_of_before_the_start(version, facts, hazard):
    launch = good(version)
    launch["host"] |= facts
    (found,) = [one for one in check(launch) if one.class_ == "version_hazard_at_hand"]
    assert (found.severity, found.arm, found.numbers) == ("warn", "variant", {"hazard": hazard})
    for other in (facts | {name: 10 * value for name, value in facts.items() if name == "ram_total_bytes"}, {}):
        quiet = good("0.30.0" if other == facts else version)
        quiet["host"] |= other
        assert "version_hazard_at_hand" not in classes(check(quiet))


def test_the_port_and_two_spellings_of_a_size_are_no_difference():
    launch = option(option(good(), "variant", "--port", 8001), "variant", "--kv-cache-memory-bytes", "4G")
    assert check(launch) == []


def test_one_tested_setting_without_a_connector_is_fine_and_two_are_not():
    launch = good()
    launch["arms"]["variant"] = copy.deepcopy(launch["arms"]["control"])
    assert check(launch) == []
    option(launch, "variant", "--max-num-seqs", 16)
    assert check(launch) == []
    option(launch, "variant", "--max-num-batched-tokens", 2048)
    assert classes(check(launch)) == ["arms_not_comparable"]


def test_the_layout_of_the_control():
    launch = good()
    del launch["arms"]["variant"]["env"]["VLLM_KV_CACHE_LAYOUT"]
    assert check(launch) == []
    del launch["arms"]["control"]["env"]["VLLM_KV_CACHE_LAYOUT"]
    assert classes(check(launch)) == ["kv_layout_differs"]
    launch["arms"]["variant"]["env"]["VLLM_KV_CACHE_LAYOUT"] = "HND"
    assert classes(check(launch)) == ["arms_not_comparable"]


def test_the_cpu_engine_wants_a_spec_of_its_own_and_blocks_of_32():
    launch = good()
    launch["vllm"]["backend"] = "cpu"
    assert "platform_unsupported" in classes(check(launch))
    connector(
        launch, spec_name="HostOffloadingSpec", spec_module_path="host_offload", block_size=64, cpu_bytes_to_use=2**35
    )
    for arm in ("control", "variant"):
        option(launch, arm, "--block-size", 32)
    assert check(launch) == []
    for arm in ("control", "variant"):
        option(launch, arm, "--block-size", 16)
    assert set(classes(check(launch))) == {"block_size_not_multiple"}


@pytest.mark.parametrize(
    ("vllm", "arms", "says"),
    [
        ({}, {"control": {"args": []}}, "version is missing"),
        ({"version": "newest"}, {"control": {"args": ["m"]}}, "'newest' is not of the form"),
        ({"version": "0.32.0"}, {}, "arms is empty"),
        ({"version": "0.32.0"}, {"control": {"args": "m --x"}}, "args must be a list"),
        (
            {"version": "0.32.0"},
            {"variant": {"args": ["m", "--kv-transfer-config", "{"]}},
            "Arm variant: --kv-transfer-config",
        ),
        ({"version": "0.32.0"}, {"variant": {"args": ["m", "--kv-offloading-size", "4G"]}}, "is not a number"),
        ({"version": "0.32.0"}, {"variant": {"args": ["m", "--kv-offloading-size", "1e308"]}}, "is not a number"),
        (
            {"version": "0.32.0"},
            {"variant": {"args": ["m", "--kv-offloading-size", "-8"]}},
            "'-8' is not a number above 0",
        ),
        (
            {"version": "0.32.0"},
            {"variant": {"args": ["m", "--kv-offloading-size", "0"]}},
            "'0' is not a number above 0",
        ),
        (
            {"version": "0.32.0"},
            {"variant": {"args": ["m", "--kv-offloading-size=-8", "--kv-offloading-backend", "lmcache"]}},
            "'-8' is not a number above 0",
        ),
        (
            {"version": "0.32.0"},
            {"variant": {"args": ["m", "--kv-cache-memory-bytes", "9" * 400 + "g"]}},
            "is not a size vLLM reads",
        ),
        ({"version": "0.32.0"}, {"variant": {"args": ["m", "--block-size", "9" * 18]}}, "give 1 to 2147483648"),
        (
            {"version": "0.32.0"},
            {"variant": {"args": ["m"], "env": {"A B=": "1"}}},
            "'A B=' is no name of an environment",
        ),
        (
            {"version": "0.32.0"},
            {"variant": {"args": ["m", "--kv-transfer-config.a", "1", "--kv-transfer-config.a.b", "2"]}},
            r"--kv-transfer-config\.a\.b lies inside a",
        ),
        (
            {"version": "0.32.0"},
            {"variant": {"args": ["m", "--block-size", "big"]}},
            "--block-size='big' is not a size",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_in_a_sentence(vllm, arms, says):
    with pytest.raises(UnusableInput, match=says):
        check_launches({}, vllm, arms)


ARM = {"args": ["m"]}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"arms": {"a": ARM, "b": 3}}, "Arm b: 3 is not a mapping"),
        ({"arms": {"a": ARM, "b": None}}, "Arm b: None is not a mapping"),
        ({"arms": {1: ARM}}, "arm name 1 is not text"),
        ({"arms": {"a": {"args": ["m", None]}}}, "Arm a: argument None is None"),
        ({"arms": {"a": {"args": ["m"], "env": {"X": {}}}}}, r"Arm a: env\.X is {}, which is no text"),
        ({"model": 5}, "model=5 is not a mapping"),
        ({"host": {"dev_shm_free_bytes": "some"}}, "host.dev_shm_free_bytes='some' is not a whole number of bytes"),
        ({"host": {"ram_available_bytes": -1}}, "host.ram_available_bytes=-1 is not a whole number"),
        ({"host": {"ram_available_bytes": True}}, "host.ram_available_bytes=True is not a whole number"),
        ({"host": {"driver_version": "x"}}, "host.driver_version='x' is not a version; give it as 580.65.06"),
        ({"host": {"glibc": "musl"}}, "host.glibc='musl' is not a version"),
        ({"host": {"python": []}}, r"host.python=\[\] is not a version"),
        ({"host": {"rocm": "yes"}}, "host.rocm='yes' is neither true nor false"),
        ({"vllm": {"version": "0.32.0", "cuda": "x"}}, "vllm.cuda='x' is not a version"),
        ({"vllm": {"version": "0.32.0", "backend": "banana"}}, "vllm.backend='banana' is not known; give cuda or cpu"),
    ],
)
def test_a_launch_file_with_a_wrong_type_is_refused_in_a_sentence(changes, says):
    launch = {**good(), **changes}
    with pytest.raises(UnusableInput, match=says):
        check(launch, launch.get("model"))


@pytest.mark.parametrize(
    ("host", "backend", "named"),
    [
        ({}, "rocm", ["vllm.backend=rocm is an AMD GPU (ROCm)"]),
        ({}, "xpu", ["vllm.backend=xpu is an Intel GPU (XPU)"]),
        ({"rocm": True, "xpu": True}, "cuda", ["host.rocm is true", "host.xpu is true"]),
    ],
)
def test_another_platform_is_refused_by_name(host, backend, named):
    launch = good()
    launch["host"] = host
    launch["vllm"]["backend"] = backend
    found = [f for f in check(launch) if f.class_ == "platform_unsupported"]
    assert [f.severity for f in found] == ["refuse"] * len(named)
    for finding, words in zip(found, named, strict=True):
        assert words in finding.reason


def test_the_cpu_engine_runs_beside_any_gpu():
    launch = {"host": {"rocm": True, "xpu": True}, "vllm": {"version": "0.32.0", "backend": "cpu"},
              "arms": {"control": {"args": ["m", "--host", "127.0.0.1"]}}}  # fmt: skip
    assert check(launch) == []


@given(st.dictionaries(st.sampled_from(["host", "vllm", "arms", "model"]), st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["driver_version", "python", "glibc", "dev_shm_free_bytes", "cuda", "args", "env", "control", "version"]),
        inner, max_size=3),
)))  # fmt: skip
def test_no_launch_file_ends_in_a_traceback(changes):
    launch = {**good(), "model": None, **changes}
    if all(isinstance(launch[name], dict) for name in ("host", "vllm", "arms")):
        with contextlib.suppress(UnusableInput):
            check(launch, launch["model"])


@pytest.mark.parametrize("size", [None, 0])
def test_a_tier_without_a_size(size):
    assert classes(check(connector(good(), cpu_bytes_to_use=size))) == ["cpu_bytes_missing"]


@pytest.mark.parametrize("size", [-1, -(2**40), 2**50 + 1, 10**26, int("9" * 400)])
def test_a_tier_of_less_than_nothing_or_more_than_any_host_has(size):
    launch = connector(good(), cpu_bytes_to_use=size)
    launch["host"]["ram_available_bytes"] = 2**40
    found = check(launch)
    assert classes(found, "refuse") == ["unusable_value"]
    assert "is no size of a CPU tier: those have 1 to 1125899906842624 bytes" in found[0].reason


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("version", "name", "refused"),
    [
        ("0.32.0", "MySpec", True),
        ("0.32.0", None, True),
        ("0.21.0", "TieringOffloadingSpec", True),
        ("0.32.0", "TieringOffloadingSpec", False),
        ("0.32.0", "CPUOffloadingSpec", False),
    ],
)
def test_a_spec_that_vllm_has_not_takes_a_module_path(backend, version, name, refused):
    def findings(**extra):
        launch = good(version)
        launch["vllm"]["backend"] = backend
        args = launch["arms"]["variant"]["args"]
        at = args.index("--kv-transfer-config") + 1
        config = json.loads(args[at])
        config["kv_connector_extra_config"] |= {"spec_name": name, **extra}
        args[at] = json.dumps(config)
        return [finding for finding in check(launch) if finding.numbers.get("key") == "spec_name"]

    found = findings()
    assert [f.severity for f in found] == (["refuse"] if refused else [])
    if refused:
        assert f"spec_name={name!r} is no spec of vLLM {version}" in found[0].reason
        assert f"'Unsupported spec type: {name}'" in found[0].reason
    assert findings(spec_module_path="mine") == []


def test_a_spec_of_vllms_own_stays_one_with_a_module_path_and_does_not_run_on_the_cpu_engine():
    for extra in ({"spec_module_path": "mine"}, {"spec_name": "TieringOffloadingSpec"}):
        launch = connector(good(), **extra)
        launch["vllm"]["backend"] = "cpu"
        assert "platform_unsupported" in classes(check(launch))


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_memory_is_judged_on_both_backends_and_by_the_reserve_that_a_host_declares(backend):
    def found(**host):
        launch = connector(good(), spec_name="S", spec_module_path="s", block_size=None)
        launch["vllm"]["backend"] = backend
        launch["host"] |= {"ram_available_bytes": 20 * 2**30, **host}
        return [f.severity for f in check(launch) if f.class_ == "host_memory_too_small"]

    assert found() == ["refuse"]
    assert found(ram_reserve_bytes=2**30) == []
    assert found(ram_available_bytes=8_000_000_000) == ["refuse"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
KEYS = ["cpu_bytes_to_use", "block_size", "blocks_per_chunk", "eviction_policy", "spec_name", "spec_module_path"]


@given(
    st.dictionaries(st.sampled_from(KEYS), JSON),
    st.fixed_dictionaries({}, optional={"kv_connector": JSON, "kv_role": JSON, "kv_connector_extra_config": JSON}),
    st.sampled_from(["0.11.2", "0.20.2", "0.26.0", "0.28.0", "0.32.0"]),
    st.sampled_from(["cpu", "cuda"]),
)
def test_no_configuration_ends_in_a_traceback(extra, top, version, backend):
    launch = good(version)
    launch["vllm"]["backend"] = backend
    args = launch["arms"]["variant"]["args"]
    at = args.index("--kv-transfer-config") + 1
    config = json.loads(args[at])
    config["kv_connector_extra_config"] |= extra
    args[at] = json.dumps(config | top)
    for finding in check(launch):
        msgspec.json.encode(finding)


def test_findings_are_written_under_the_name_class():
    first = json.loads(msgspec.json.encode(check(case(CHUNK))))[0]
    assert set(first) == {"class", "severity", "arm", "reason", "numbers", "do"}


def test_a_version_that_yaml_reads_as_a_number_is_to_be_quoted():
    launch = case(DRIVER)
    launch["vllm"]["version"] = 0.30
    with pytest.raises(UnusableInput, match="quote it"):
        check(launch)


def test_a_chunk_of_no_blocks_is_refused():
    launch = connector(case(CHUNK), block_size=None, blocks_per_chunk=0)
    assert "blocks_per_chunk_not_positive" in classes(check(launch), "refuse")
    assert "blocks_per_chunk_not_positive" not in classes(check(connector(launch, blocks_per_chunk=4)))


def test_a_finding_on_the_host_names_no_arm(tmp_path, capsys):
    (tmp_path / "launch.yml").write_text(yaml.safe_dump(case(DRIVER)))
    main(["check", str(tmp_path / "launch.yml")])
    said = capsys.readouterr().out
    assert "refuse driver_too_old" in said and "(None)" not in said
