"""Options that a version does not have, lengths that no KV cache holds, and settings that switch nothing on."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml
from kvtrial.analysis.answerschemas import schema_named
from kvtrial.analysis.check import check_launches
from kvtrial.analysis.cli import main
from kvtrial.analysis.launch_arm import read_arm
from kvtrial.record.options import unclear_option
from kvtrial.record.serveoptions import kinds, neighbours, options_of, serve_options, was_read, when
from kvtrial.record.versions import release
from test_check_launches import CONFIGS, case, check, classes, connector, good, option

OPTIONS = Path(__file__).parents[2] / "fixtures" / "options"
LATEST = serve_options().releases[-1]


def both(launch, *args):
    """Options that both arms get, so that they stay comparable."""
    for arm in ("control", "variant"):
        launch["arms"][arm]["args"] += args
    return launch


# --- options by version


def test_the_list_read_from_the_wheel_is_the_one_that_the_engine_prints():
    printed = {line.strip() for line in (OPTIONS / "vllm-0.32.0.txt").read_text().splitlines() if line.startswith("-")}
    read = {name if name.startswith("-") else f"--{name}" for name in options_of("0.32.0")}
    off = {name for name in printed if name.startswith("--no-") and f"--{name.removeprefix('--no-')}" in read}
    assert printed - off - {"-h", "--help"} - read == set()
    takes = {name: kind for name, kind in kinds().items() if f"--{name}" in printed}
    assert {name for name, kind in takes.items() if kind == "on_off"} == {name.removeprefix("--no-") for name in off}
    assert len(takes) > 200
    assert {name for name in read - printed if name.startswith("--")} == set()


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("guided-decoding-backend", None, "0.11"),
        ("swap-space", None, "0.17"),
        ("max-num-partial-prefills", None, "0.26"),
        ("max-long-partial-prefills", None, "0.26"),
        ("scheduler-reserve-full-isl", "0.19", None),
        ("watermark", "0.24", None),
        ("prefill-schedule-interval", "0.24", None),
        ("max-num-queued-reqs", "0.29", None),
        ("max-num-active-seqs", "0.31", None),
        ("custom-histogram-buckets", "0.32", None),
        ("kv-offloading-size", None, None),
        ("kv-cache-memory-bytes", None, None),
        ("num-gpu-blocks-override", None, None),
    ],
)
def test_options_come_and_go_where_the_changes_were_read_before(name, first, last):
    there = [version for version in serve_options().releases if name in options_of(version)]
    assert there
    assert there[0].startswith(first or serve_options().releases[0])
    assert there[-1].startswith(last or LATEST)


@pytest.mark.parametrize("version", ["0.18.1", "0.26.0", "0.28.0", "0.33.0"])
def test_an_option_that_is_gone_is_refused(version):
    found = check(both(good(version), "--swap-space", "4"))
    gone = [one for one in found if one.class_ == "option_not_in_version"]
    assert [one.severity for one in gone] == ["refuse", "refuse"]
    assert f"--swap-space is not an option of vLLM {version}: releases have it until 0.17.1" in gone[0].reason
    assert "unrecognized arguments: --swap-space" in gone[0].reason
    assert "option_not_in_version" not in classes(check(both(good("0.17.1"), "--swap-space", "4")))


def test_an_option_of_a_later_version_is_refused_before_it():
    found = check(both(good("0.23.0"), "--watermark", "0.05"))
    assert "--watermark is not an option of vLLM 0.23.0: releases have it from 0.24" in found[0].reason
    assert "option_not_in_version" not in classes(check(both(good("0.24.0"), "--watermark", "0.05")))


@pytest.mark.parametrize("version", ["0.11.2", "0.20.2", "0.28.0", "0.33.0", "0.32.0+cu129"])
def test_an_option_that_no_version_has_is_refused_where_the_list_was_read(version):
    found = [one for one in check(both(good(version), "--wibble")) if one.class_ == "unknown_option"]
    assert [one.severity for one in found] == ["refuse", "refuse"]
    assert "--wibble is not an option of any vLLM version that kvtrial knows (0.11.2 to 0.33.0, 23 releases)" in (
        found[0].reason
    )
    assert "mistyped?" in found[0].reason


@pytest.mark.parametrize("version", ["0.26.3", "0.34.0", "0.31.1rc2.dev7+gf98d1fc49", "0.32.0rc1"])
def test_where_the_list_was_not_read_it_is_warned_of(version):
    launch = both(good(version), "--wibble", "--swap-space", "4")
    found = {one.class_: one for one in check(launch) if "option" in one.class_}
    assert set(found) == {"unknown_option", "option_not_in_version"}
    assert {one.severity for one in found.values()} == {"warn"}
    assert f"The list of {version} itself was not read" in found["unknown_option"].reason
    assert "until 0.17.1" in found["option_not_in_version"].reason
    assert not was_read(version)


def test_the_releases_next_to_a_version_are_named():
    assert neighbours("0.26.0") == ["0.26.0"]
    assert neighbours("0.26.3") == ["0.26.0", "0.27.1"]
    assert neighbours("0.40.0") == [LATEST]
    assert neighbours("0.9.0") == ["0.11.2"]
    assert "0.26.0 and 0.27.1, read next to 0.26.3, have none" in next(
        one.reason for one in check(both(good("0.26.3"), "--swap-space", "4")) if one.class_ == "option_not_in_version"
    )


def test_a_slip_is_told_what_it_looks_like():
    found = [one for one in check(both(good(), "--enforce-eagre")) if one.class_ == "unknown_option"]
    assert "(did you mean --enforce-eager?)" in found[0].reason


def test_an_abbreviation_is_warned_of():
    found = [one for one in check(both(good(), "--enforce-ea")) if "option" in one.class_]
    assert {(one.class_, one.severity) for one in found} == {("option_abbreviated", "warn")}
    assert "takes it for --enforce-eager" in found[0].reason


@pytest.mark.parametrize("version", ["0.12.0", "0.20.2", "0.26.0", "0.33.0"])
def test_every_option_of_a_version_is_quiet_in_it(version):
    spelt = [name if name.startswith("-") else f"--{name}" for name in sorted(options_of(version))]
    for name in [*spelt, "-O3", "--no-enable-prefix-caching", "--hf-overrides.rope_theta", "--kv_cache_dtype"]:
        if name.startswith(("--kv-transfer", "--kv-offloading")) or unclear_option(name):
            continue
        launch = {"a": {"args": ["m", name] if name.startswith(("--no-", "-O3")) else ["m", name, "1"]}}
        said = [one for one in check_launches({}, {"version": version}, launch) if "option" in one.class_]
        assert [one.reason for one in said if one.class_ != "repeated_option"] == []


def test_spans_lie_within_the_releases_read():
    for name, spans in serve_options().options.items():
        assert spans, name
        for span in spans:
            for bound in (span.since, span.until):
                assert bound is None or any(one.startswith(f"{bound}.") for one in serve_options().releases)
        assert when(name)
    assert serve_options().releases == sorted(serve_options().releases, key=release)


def test_the_list_is_read_from_the_text_of_a_wheel(tmp_path):
    import subprocess
    import sys

    root = tmp_path / "9.9.0" / "vllm"
    (root / "engine").mkdir(parents=True)
    (root / "entrypoints" / "cli").mkdir(parents=True)
    (root / "entrypoints" / "common").mkdir()
    (root / "engine" / "arg_utils.py").write_text(
        "class EngineArgs:\n  def add_cli_args(p):\n    k = get_kwargs(C)\n"
        '    p.add_argument("--old-one", "-oo", **k["old"])\n'
        '    for arg, type in [("--of-loop", str), ("--other-of-loop", bool)]:\n      p.add_argument(arg, type=type)\n'
        '    p.add_argument("--a-flag", **{**k["flag"], "default": None})\n'
        "class C:\n  old: int | None\n  flag: bool\n"
        'class Other:\n  def f(p): p.add_argument("--not-this")\n'
    )
    (root / "entrypoints" / "cli" / "serve.py").write_text("")
    (root / "entrypoints" / "common" / "cli_args.py").write_text(
        'class FrontendArgs:\n  api_key: str = ""\n  def f(k):\n    k["x"]["flags"] = ["-x"]\n'
        'def make_arg_parser(p):\n  p.add_argument("--headless", action="store_true")\n'
    )
    script = Path(__file__).parents[3] / "requirements" / "read_options.py"
    done = subprocess.run([sys.executable, script, root.parent], capture_output=True, text=True, check=True)
    read = yaml.safe_load(done.stdout)
    assert read["releases"] == ["9.9.0"]
    assert set(read["options"]) == {"old-one", "-oo", "of-loop", "other-of-loop", "-x", "api-key", "headless", "a-flag"}
    assert read["aliases"] == {"-oo": "old-one"}
    assert read["takes"] == {"on_off": ["a-flag"], "switch": ["headless"], "int": ["old-one"], "float": None,
                             "value": ["api-key", "of-loop", "other-of-loop"]}  # fmt: skip


# --- the same option under two names


@pytest.mark.parametrize(
    ("version", "left", "right"),
    [
        ("0.32.0", ["-ep"], ["--enable-expert-parallel"]),
        ("0.32.0", ["-O3"], ["--optimization-level", "3"]),
        ("0.32.0", ["-O", "3"], ["-O=3"]),
        ("0.32.0", ["-cc", '{"mode":3}'], ["--compilation-config.mode", "3"]),
        ("0.32.0", ["-cc.mode=3", "-cc.x.y", "1"], ["--compilation-config", '{"x": {"y": 1}, "mode": 3}']),
        ("0.12.0", ["-O.mode=3"], ["-cc.mode=3"]),
        ("0.11.2", ["-O", '{"mode":3}'], ["--compilation-config", '{"mode": 3}']),
        (
            "0.32.0",
            ["--hf-overrides", '{"a":{"b":1}}', "--hf-overrides.a.c", "2"],
            ["--hf-overrides.a", '{"b":1,"c":2}'],
        ),
    ],
)
def test_an_option_under_another_of_its_names_is_no_difference(version, left, right):
    launch = good(version)
    launch["arms"]["control"]["args"] += left
    launch["arms"]["variant"]["args"] += right
    assert "arms_not_comparable" not in classes(check(launch))
    launch["arms"]["variant"]["args"] = good(version)["arms"]["variant"]["args"]
    found = [one for one in check(launch) if one.class_ == "arms_not_comparable"]
    assert len(found) == 1
    assert "---" not in found[0].reason


@pytest.mark.parametrize(
    "front",
    [
        ["/usr/bin/python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"],
        ["python", "-m", "vllm.entrypoints.cli.main", "serve", "m"],
        ["/opt/venv/bin/python", "/opt/venv/bin/vllm", "serve", "m"],
        ["vllm", "serve", "m"],
        ["serve", "m"],
        ["m", "--served-model-name", "vllm"],
        ["m", "--tokenizer", "vllm.entrypoints"],
    ],
)
def test_a_pasted_command_line_is_read_from_vllm_on(front):
    arms = {"a": {"args": [*front, "--host", "127.0.0.1", "--wibble"]}}
    found = check_launches({}, {"version": "0.32.0"}, arms)
    assert [(one.class_, one.numbers["option"]) for one in found] == [("unknown_option", "wibble")]
    arm = read_arm("a", arms["a"], "0.32.0", "cuda", None)
    assert arm.parsed.model == "m"
    assert len(arm.parsed.options) == len([word for word in front if word.startswith("--")]) + 2


def test_a_short_name_is_said_with_one_dash():
    launch = good()
    launch["arms"]["control"]["args"] += ["-zz", "1", "-zz", "2"]
    said = [one.reason for one in check(launch) if one.class_ in ("arms_not_comparable", "repeated_option")]
    assert len(said) == 2
    assert all("-zz" in reason and "--zz" not in reason for reason in said)


# --- what the parser of vLLM does not take


@pytest.mark.parametrize(
    ("version", "words", "says"),
    [
        ("0.32.0", ["-O", '{"mode":3}'], "-O takes 0, 1, 2 or 3 since 0.12"),
        ("0.32.0", ["-O"], "-O takes 0, 1, 2 or 3"),
        ("0.12.0", ["-O", '{"mode":3}'], "-O takes 0, 1, 2 or 3"),
        ("0.32.0", ["-O.cudagraph_mode", "FULL"], "-O takes a level alone since 0.13"),
        ("0.32.0", ["--no-disable-log-stats"], "--disable-log-stats has no such form"),
        ("0.32.0", ["--no-max-model-len"], "--max-model-len has no such form"),
        ("0.32.0", ["--enable-chunked-prefill=True"], "--enable-chunked-prefill is a flag without a value"),
        ("0.32.0", ["--enforce-eager", "False"], "--enforce-eager is a flag without a value"),
        ("0.32.0", ["--headless", "x"], "--headless is a flag without a value"),
        ("0.32.0", ["--gpu-memory-utilization", "0,9"], "takes a number above 0 and up to 1"),
        ("0.32.0", ["--gpu-memory-utilization", "1.5"], "takes a number above 0 and up to 1"),
        ("0.32.0", ["--gpu-memory-utilization", "nan"], "takes a number above 0 and up to 1"),
        ("0.32.0", ["--max-lora-rank", "100"], "takes one of 1, 8, 16, 32"),
        ("0.32.0", ["--seed", "one"], "--seed takes a whole number"),
        ("0.32.0", ["-n", "two"], "-n takes a whole number"),
    ],
)
def test_what_the_parser_does_not_take_is_refused(version, words, says):
    arms = {"a": {"args": ["m", "--host", "127.0.0.1", *words]}}
    found = check_launches({}, {"version": version}, arms)
    assert [(one.class_, one.severity) for one in found] == [("unusable_value", "refuse")]
    assert says in found[0].reason


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0.11.2", ["-O", '{"mode":3}']),
        ("0.11.2", ["-O.cudagraph_mode", "FULL"]),
        ("0.12.0", ["-O.cudagraph_mode", "FULL"]),
        *(
            ("0.32.0", words.split())
            for words in (
                "-O.mode=3", "-O 3", "-O3", "-O=3", "-Odecode", "--no-trust-remote-code", "--no-enable-log-requests",
                "--max-model-len=-1", "-tp=2", "-ep", "-cc.cudagraph_mode=FULL", "--seed -1", "--enable-log-requests",
                "--speculative-config.method ngram --speculative-config.num_speculative_tokens=3", "-n 1 -r 0",
                "--limit-mm-per-prompt.image 2", "--compilation-config.cudagraph_capture_sizes+ 1",
                "--lora-modules a=/x b=/y --max-lora-rank 64", "--no-enable-lora --no-use-tqdm-on-load",
                "--hf-overrides.rope_parameters.factor 4", "--kv-cache-dtype nvfp4", "--gpu-memory-utilization 1",
                "--gpu-memory-utilization=.8",
                "--max-num-batched-tokens 8k", "--no-async-scheduling", "--no-enable-prefix-caching", "--hf-token",
                "-dp 2 -dpl 1 -dpa 10.0.0.1 -dpp 13345 -dpr 1", "--generation-config vllm --root-path /a",
            )
        ),
    ],
)  # fmt: skip
def test_what_the_parser_takes_is_not(version, words):
    arms = {"a": {"args": ["m", "--host", "127.0.0.1", *words]}}
    assert check_launches({}, {"version": version}, arms) == []


def test_a_word_after_a_flag_is_the_model_where_none_is_given():
    found = check_launches({}, {"version": "0.32.0"}, {"a": {"args": ["--enforce-eager", "m", "--host", "127.0.0.1"]}})
    assert found == []


# --- the greatest length beside the KV cache


def test_a_length_that_the_kv_cache_does_not_hold_is_refused_with_the_numbers():
    launch = good()
    for arm in ("control", "variant"):
        option(launch, arm, "--max-model-len", 40000)
    found = [one for one in check(launch) if one.class_ == "max_model_len_over_kv_cache"]
    assert [(one.arm, one.severity) for one in found] == [("control", "refuse"), ("variant", "refuse")]
    assert "--max-model-len 40000 takes 2500 blocks of 16 tokens, the GPU's KV cache has 2340 (37440 tokens" in (
        found[0].reason
    )
    assert "seq len (40000)" in found[0].reason
    for arm in ("control", "variant"):
        option(launch, arm, "--max-model-len", 37440)
    assert check(launch) == []


@pytest.mark.parametrize(("version", "severity"), [("0.19.1", "warn"), ("0.20.2", "refuse"), ("0.33.0", "refuse")])
def test_blocks_that_are_overridden_were_not_looked_at_before_0_20(version, severity):
    launch = {"a": {"args": ["some/model", "--num-gpu-blocks-override", "100", "--max-model-len", "1601"]}}
    found = [f for f in check_launches({}, {"version": version}, launch) if f.class_ == "max_model_len_over_kv_cache"]
    assert [one.severity for one in found] == [severity]
    assert "101 blocks of 16 tokens, the GPU's KV cache has 100 (1600 tokens)" in found[0].reason
    launch["a"]["args"][-1] = "1600"
    found = check_launches({}, {"version": version}, launch)
    assert "max_model_len_over_kv_cache" not in classes(found)


def test_a_length_that_the_whole_gpu_could_not_hold():
    model = {"kv_bytes_per_token": 131072}
    launch = {"a": {"args": ["some/model", "--max-model-len", "1M", "--host", "127.0.0.1"]}}
    host = {"gpu_memory_mib": 81559}
    found = check_launches(host, {"version": "0.30.0"}, launch, model)
    assert [(one.class_, one.severity) for one in found] == [("max_model_len_over_kv_cache", "warn")]
    assert "would not start, if every layer attends to the whole context" in found[0].reason
    most = int(81559 * 2**20 * 0.92) // 131072
    assert f"at most {most} tokens of 131072 bytes" in found[0].reason
    for quiet in (str(most), "auto", "-1"):
        launch["a"]["args"][2] = quiet
        assert check_launches(host, {"version": "0.30.0"}, launch, model) == []
    launch["a"]["args"][2] = str(most + 1)
    launch["a"]["args"] += ["--tensor-parallel-size", "2"]
    assert check_launches(host, {"version": "0.30.0"}, launch, model) == []


def test_a_length_is_refused_by_bytes_only_where_every_layer_is_known_to_attend_to_all():
    pinned = ["--kv-cache-memory-bytes", "4G", "--max-model-len", "40960", "--host", "127.0.0.1"]
    model, version = {"kv_bytes_per_token": 114688}, {"version": "0.32.0"}
    for name, more, severity in [
        ("some/model", [], "warn"),
        ("Qwen/Qwen3-0.6B", [], "refuse"),
        ("Qwen/Qwen3-0.6B", ["--hf-overrides", '{"sliding_window": 4096}'], "warn"),
        ("some/model", ["--num-gpu-blocks-override", "100"], "refuse"),
    ]:
        found = check_launches({}, version, {"a": {"args": [name, *pinned, *more]}}, model)
        assert [(one.class_, one.severity) for one in found] == [("max_model_len_over_kv_cache", severity)]
        assert ("if every layer attends to the whole context" in found[0].reason) == (severity == "warn")


@pytest.mark.parametrize("kind", ["nvfp4", "int8_per_token_head", "turboquant_k8v4", "int4_per_token_head", "fp8_inc",
                                  "fp8_ds_mla", "fp8_per_token_head"])  # fmt: skip
def test_bytes_of_a_kv_dtype_that_was_not_read_are_not_known(kind, tmp_path, capsys):
    args = ["m", "--kv-cache-memory-bytes", "2G", "--max-model-len", "40960", "--host", "127.0.0.1"]
    launch = {"host": {}, "vllm": {"version": "0.32.0"}, "arms": {"a": {"args": [*args, "--kv-cache-dtype", kind]}}}
    launch["model"] = {"kv_bytes_per_token": 114688}
    assert check_launches({}, launch["vllm"], launch["arms"], launch["model"]) == []
    assert any(
        f"what a token takes with --kv-cache-dtype {kind} was not read" in note
        for note in notes(launch, tmp_path, capsys)
    )
    for known, tokens in (("auto", 18720), ("bfloat16", 18720), ("fp8", 37440), ("fp8_e5m2", 37440)):
        launch["arms"]["a"]["args"][-1] = known
        found = check_launches({}, launch["vllm"], launch["arms"], launch["model"])
        assert f"({tokens} tokens" in found[0].reason
    launch = both(good(), "--kv-cache-dtype", kind)
    found = check(launch)
    assert classes(found) == ["tier_not_compared"]
    assert "model.kv_bytes_per_token" not in found[0].do


def test_a_length_that_fits_only_where_ranks_hold_parts_is_noted(tmp_path, capsys):
    args = ["m", "-tp", "8", "--kv-cache-memory-bytes", "4G", "--max-model-len", "163840", "--host", "127.0.0.1"]
    launch = {"host": {}, "vllm": {"version": "0.32.0"}, "arms": {"a": {"args": args}}}
    launch["model"] = {"kv_bytes_per_token": 70272}
    assert any("with MLA, or with fewer KV heads than ranks" in note for note in notes(launch, tmp_path, capsys))
    args[6] = "32768"
    assert not any("MLA" in note for note in notes(launch, tmp_path, capsys))


def notes(launch, tmp_path, capsys):
    path = tmp_path / "launch.yml"
    path.write_text(yaml.safe_dump(launch))
    main(["check", str(path), "--json"])
    return json.loads(capsys.readouterr().out)["notes"]


def test_what_is_not_known_of_the_length_is_said(tmp_path, capsys):
    launch = {"host": {}, "vllm": {"version": "0.30.0"}, "arms": {"a": {"args": ["m", "--max-model-len", "8192"]}}}
    assert any("Not known: whether 8192 tokens fits the KV cache" in note for note in notes(launch, tmp_path, capsys))
    launch["model"] = {"kv_bytes_per_token": 114688}
    assert any("--kv-cache-memory-bytes pins it" in note for note in notes(launch, tmp_path, capsys))
    launch["arms"]["a"]["args"] += ["--kv-cache-memory-bytes", "4G"]
    assert not any("fits" in note for note in notes(launch, tmp_path, capsys))
    del launch["arms"]["a"]["args"][1:3]
    assert any("the model's own greatest length" in note for note in notes(launch, tmp_path, capsys))


def test_a_length_that_is_none_is_refused(tmp_path, capsys):
    launch = good()
    option(launch, "control", "--max-model-len", 0)
    path = tmp_path / "launch.yml"
    path.write_text(yaml.safe_dump(launch))
    assert main(["check", str(path)]) == 2
    assert "--max-model-len=0 can't be used" in capsys.readouterr().err


# --- settings that do not go together, or switch nothing on


@pytest.mark.parametrize("value", [2, 5, "2"])
def test_a_threshold_does_not_go_with_tiering(value):
    found = check(connector(good(), spec_name="TieringOffloadingSpec", store_threshold=value))
    assert classes(found, "refuse") == ["unusable_value"]
    assert "store_threshold is not supported for TieringOffloadingSpec" in found[0].reason


@pytest.mark.parametrize("more", [{"store_threshold": 2}, {"spec_name": "TieringOffloadingSpec", "store_threshold": 1}])
def test_a_threshold_alone_or_one_that_is_off_is_quiet(more):
    assert "unusable_value" not in classes(check(connector(good(), **more)))


def bare(version="0.32.0"):
    launch = good(version)
    option(launch, "variant", "--kv-transfer-config", None)
    return launch


@pytest.mark.parametrize("backend", ["native", "lmcache"])
def test_a_backend_without_a_size_switches_nothing_on(backend):
    launch = option(bare(), "variant", "--kv-offloading-backend", backend)
    found = check(launch)
    assert classes(found, "refuse") == ["offloading_not_activated"]
    assert "ignored without a word, and the engine runs without any tier" in found[0].reason
    assert "offloading_not_activated" not in classes(check(option(launch, "variant", "--kv-offloading-size", 16)))


def test_a_backend_beside_the_json_is_ignored():
    found = check(option(good(), "variant", "--kv-offloading-backend", "native"))
    assert classes(found) == ["offloading_not_activated"]
    assert found[0].severity == "warn"
    assert "with the OffloadingConnector of the JSON alone" in found[0].reason


def test_before_0_14_the_backend_switches_on_and_never_works_natively():
    alone = check(option(bare("0.13.0"), "variant", "--kv-offloading-backend", "native"))
    assert "You must set kv_offloading_size when kv_offloading_backend is set." in alone[0].reason
    size = check(option(bare("0.13.0"), "variant", "--kv-offloading-size", 16))
    assert [one.class_ for one in size if one.severity == "refuse"] == ["offloading_not_activated"]
    assert "ignored without a word, and the engine runs without any tier" in size[0].reason
    launch = option(bare("0.13.0"), "variant", "--kv-offloading-size", 16)
    together = check(option(launch, "variant", "--kv-offloading-backend", "native"))
    assert "num_cpu_blocks must be specified" in together[0].reason
    assert all(one.severity == "refuse" for one in (alone[0], size[0], together[0]))
    lmcache = check(option(launch, "variant", "--kv-offloading-backend", "lmcache"))
    assert not any("num_cpu_blocks" in one.reason for one in lmcache)


def test_a_backend_that_vllm_does_not_have():
    launch = option(bare(), "variant", "--kv-offloading-size", 16)
    found = check(option(launch, "variant", "--kv-offloading-backend", "natvie"))
    assert "natvie' is not one of native, lmcache; did you mean native?" in found[0].reason


# --- the answer in JSON


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yml")))
def test_the_answer_has_the_form_of_its_schema(name, tmp_path, capsys):
    status = main(["check", str(CONFIGS / f"{name}.yml"), "--json"])
    answer = json.loads(capsys.readouterr().out)
    jsonschema.validate(answer, schema_named("check_answer"))
    assert (answer["verdict"] == "INVALID") == (status == 4)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**answer, "verdict": "maybe"}, schema_named("check_answer"))
    path = tmp_path / "no.yml"
    path.write_text("host: {}\n")
    assert main(["check", str(path), "--json"]) == 2
    said = capsys.readouterr()
    jsonschema.validate(json.loads(said.out), schema_named("check_answer"))
    assert re.search(r"lacks vllm", said.err)


def test_a_config_case_is_as_refused_as_before():
    assert classes(check(case("tier-smaller-than-gpu-kv"))) == ["tier_smaller_than_gpu_kv"]
