"""A user's file of requests is read as it is or refused, a sentence for each bad line, and goes to the host whole."""

import contextlib
import json
from pathlib import Path

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtrial.analysis import campaign as campaigns
from kvtrial.analysis.inputs import read_request
from kvtrial.analysis.plan import for_host, requested_protocol
from kvtrial.analysis.traces import Facts, read_traces, trace_lines
from kvtrial.host.workload import check_traces, phase_requests
from kvtrial.record.errors import UnusableInput
from kvtrial.record.plan import HostPlan
from kvtrial.record.protocol import FromAnswer, Trace
from kvtrial.record.trace import TraceLine, raw_lines, read_trace, write_trace
from test_workloads import lines_of_a_trace

ROOT = Path(__file__).parents[3]
PROTOCOL = """
schema_version: "1.0"
name: mine
extends: offload_return
workloads: {mine: {kind: trace, max_tokens: 8}}
phases:
  - {name: warmup, block: w, prompts: warm, salt: warm, max_tokens: 2}
  - {name: replay, block: r, workload: mine, salt: r, arrivals: {kind: recorded, speed: 10}}
comparisons: [{arm: offload, against: control, phase: replay, metric: ttft_median_seconds, role: primary}]
alternate_blocks: []
break_even: {}
gates: {prefix_evicted: null, treatment_delivered: null, noload_respected: null, answers_equal: null}
"""
GOOD = [
    {"time": 100.0, "prompt": "hello there", "max_tokens": 4, "salt": "a"},
    {"time": 100.5, "prompt_token_ids": [40, 41, 42], "max_tokens": 4, "salt": "b"},
    {"time": 102, "prompt_tokens": 100},
]


def read(path, **rule):
    trace = Trace(**{"max_tokens": 8, **rule})
    facts = Facts(path.name)
    return list(facts.noting(trace_lines(path, path.name, trace, facts)))


def written(folder, lines, name="trace.jsonl"):
    path = folder / name
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def refusal(path, **rule) -> str:
    with pytest.raises(UnusableInput) as refused:
        read(path, **rule)
    sentence = str(refused.value)
    assert "\n" not in sentence
    return sentence


def test_a_good_file_is_read_as_it_is_and_missing_output_lengths_are_those_declared(tmp_path):
    first, second, third = read(written(tmp_path, GOOD))
    assert (first.time, first.prompt, first.max_tokens, first.salt) == (100.0, "hello there", 4, "a")
    assert (second.prompt_token_ids, second.salt) == ([40, 41, 42], "b")
    assert (third.prompt_tokens, third.max_tokens, third.salt) == (100, 8, None)


BAD = [
    ("{", ["line 2: { is no JSON"]),
    ("", ["line 2", "one object a line"]),
    ("[1, 2]", ["line 2", "[1, 2]", "no JSON object"]),
    ('"text"', ["line 2", "no JSON object"]),
    ({"max_tokens": 3}, ["line 2", "no prompt", "exactly one of prompt, prompt_token_ids, prompt_tokens"]),
    ({"prompt": "x", "prompt_tokens": 3}, ["prompt and prompt_tokens", "exactly one"]),
    ({"prompt": "x", "max_token": 3}, ['field "max_token"', "allowed are", "max_tokens"]),
    ({"prompt": "x", "max_tokens": "many"}, ['max_tokens="many"', "whole number from 1 to 10000000"]),
    ({"prompt": "x", "max_tokens": 0}, ["max_tokens=0", "from 1"]),
    ({"prompt": "x", "max_tokens": True}, ["max_tokens=true"]),
    ({"prompt": "x", "max_tokens": 2.5}, ["max_tokens=2.5"]),
    ({"prompt": ""}, ['prompt=""', "not empty"]),
    ({"prompt": 5}, ["prompt=5", "a text"]),
    ({"prompt_token_ids": []}, ["prompt_token_ids=[]", "1 to"]),
    ({"prompt_token_ids": [1, -1]}, ["prompt_token_ids=[1, -1]", "from 0"]),
    ({"prompt_token_ids": [*range(99), "x"]}, ["prompt_token_ids=[0, 1, 2", "…"]),
    ({"prompt_tokens": -3}, ["prompt_tokens=-3"]),
    ({"prompt": "x", "salt": ""}, ['salt=""', "left out for the phase's own"]),
    ({"prompt": "x", "salt": 7}, ["salt=7"]),
    ({"prompt": "x", "time": "noon"}, ['time="noon"', "number of seconds"]),
    ({"prompt": "x", "time": 3}, ["time=3.0", "before the 100.0", "in order"]),
    ({"prompt": "x", "time": 101, "after": 2}, ["after=2", "no earlier line", "1 to 1"]),
    ({"prompt": "x", "time": 101, "after": 0}, ["after=0"]),
    ({"prompt": "x", "time": 101, "pause_seconds": 2}, ["pause_seconds=2", "no after"]),
    ({"prompt": "x", "after": 1, "pause_seconds": -1}, ["pause_seconds=-1"]),
    ({"conversations": "no"}, ["no conversation"]),
    ({"conversations": [{"from": "human"}]}, ["message 1", "value"]),
    ({"conversations": [{"from": "alien", "value": "x"}]}, ['message 1 is from "alien"', "human"]),
    ('{"prompt": "\\ud800"}', ["line 2"]),
    ('{"prompt": "x", "time": 1e999}', ["line 2"]),
    ('{"prompt": ' + "[" * 100_000, ["line 2", "no JSON"]),
    ('{"prompt_tokens": ' + "9" * 5000 + "}", ["line 2"]),
]


@pytest.mark.parametrize(("line", "named"), BAD, ids=[str(line)[:40] for line, _ in BAD])
def test_a_bad_line_is_refused_in_a_sentence_with_file_line_value_and_what_is_allowed(tmp_path, line, named):
    sentence = refusal(written(tmp_path, [GOOD[0], line, GOOD[2]]))
    for part in ["trace.jsonl line 2", *named]:
        assert part in sentence, sentence


def test_each_of_the_first_bad_lines_has_a_sentence_of_its_own(tmp_path):
    bad = {"prompt": "x", "max_tokens": 0}
    sentence = refusal(written(tmp_path, [bad, GOOD[0], bad, bad, bad]))
    assert [f"line {number}:" in sentence for number in (1, 2, 3, 4, 5)] == [True, False, True, True, False]


def test_a_line_without_output_length_is_refused_where_none_is_declared(tmp_path):
    assert "line 3 has no max_tokens" in refusal(written(tmp_path, GOOD), max_tokens=None)


def test_bytes_that_are_no_utf_8_and_files_without_requests_are_refused(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}\n')
    assert "trace.jsonl line 1" in refusal(path)
    path.write_bytes(b"")
    assert "holds no request" in refusal(path)


@given(lines=lines_of_a_trace)
@settings(max_examples=50, deadline=None)
def test_what_was_written_is_read_as_a_users_file_and_stays_what_it_is(tmp_path_factory, lines):
    folder = tmp_path_factory.mktemp("trace")
    digest = write_trace(folder / "a.zst", lines)
    again = read(folder / "a.zst", max_tokens=None)
    assert again == lines
    assert write_trace(folder / "b.zst", again) == digest
    plain = written(folder, [msgspec.to_builtins(line) for line in lines])
    assert read(plain, max_tokens=None) == lines


@given(content=st.binary(max_size=300), packed=st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_read_or_refused_in_a_sentence(tmp_path_factory, content, packed):
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    path.write_bytes(zstandard.compress(content) if packed else content)
    with contextlib.suppress(UnusableInput, UnicodeDecodeError):
        assert read(path)


@given(content=st.lists(st.binary(max_size=9).map(lambda b: b.replace(b"\n", b"")), min_size=1), size=st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_lines_are_the_same_however_the_file_is_cut_into_blocks(tmp_path_factory, content, size):
    from kvtrial.record import trace as module

    path = tmp_path_factory.mktemp("trace") / "lines"
    path.write_bytes(b"\n".join([*content, b""]))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "_READ_BYTES", size)
        assert list(raw_lines(path)) == content


CONVERSATION = [
    {"id": "a", "conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "One?"},
                                  {"from": "gpt", "value": "x" * 41}, {"from": "human", "value": "Two?"},
                                  {"from": "gpt", "value": "y" * 4000}]},
    {"id": "b", "conversations": []},
    {"id": "c", "conversations": [{"from": "gpt", "value": "Hello."}, {"from": "user", "value": "Three?"}]},
]  # fmt: skip


@pytest.mark.parametrize("form", ["array", "indented", "lines"])
def test_sharegpt_gives_a_request_a_question_after_all_that_was_said(tmp_path, form):
    path = tmp_path / "share.json"
    if form == "lines":
        path.write_text("\n".join(json.dumps(entry) for entry in CONVERSATION))
    else:
        path.write_text(json.dumps(CONVERSATION, indent=2 if form == "indented" else None))
    one, two, three = read(path, max_tokens=FromAnswer(least=2, most=64, characters_per_token=4.0))
    assert one.prompt == "Be brief.\nOne?"
    assert two.prompt == f"Be brief.\nOne?\n{'x' * 41}\nTwo?"
    assert three.prompt == "Hello.\nThree?"
    assert [line.max_tokens for line in (one, two, three)] == [11, 64, 2]
    assert [line.after for line in (one, two, three)] == [None, 1, None]
    assert one.prompt_id == two.prompt_id != three.prompt_id
    assert len(read(path, max_tokens=5, requests=2)) == 2
    assert "declare max_tokens" in refusal(path, max_tokens=None)


def test_elements_longer_than_a_block_are_read_and_a_list_without_an_end_is_refused_with_its_line(tmp_path):
    talks = [{"conversations": [{"from": "human", "value": "q" * 700_000}]} for _ in range(3)]
    path = tmp_path / "share.json"
    path.write_text(json.dumps(talks))
    assert [len(line.prompt) for line in read(path)] == [700_000] * 3
    path.write_text(json.dumps(CONVERSATION, indent=1)[:-5])
    assert f"line {json.dumps(CONVERSATION, indent=1).count(chr(10)) - 12}" in refusal(path)


@pytest.mark.parametrize(
    "value",
    ["NaN", "Infinity", "-Infinity", "1e999", "9" * 30, "9" * 5000, "[" * 100_000, '"\\ud800"'],
    ids=["NaN", "Infinity", "-Infinity", "1e999", "30 digits", "5000 digits", "deep", "half a character"],
)
@pytest.mark.parametrize("field", ["time", "prompt_tokens", "prompt", "salt"])
def test_what_is_no_value_is_refused_in_a_list_as_in_a_line(tmp_path, field, value):
    path = tmp_path / "trace.json"
    prompt = '"prompt": "x", ' if field in ("time", "salt") else ""
    path.write_text(f'[{{"prompt": "x"}},\n{{{prompt}"{field}": {value}}}]')
    if (field, value) != ("time", "9" * 30):
        assert "trace.json line 2" in refusal(path)


def request_of(tmp_path, trace="trace.jsonl", protocol=PROTOCOL, **top):
    (tmp_path / "mine.yml").write_text(protocol)
    host = {
        "may_be_disturbed": True, "backend": "cpu", "vllm_version": "0.32.0", "vllm_venv": "/opt/engine",
        "engine_args": {"block-size": 32, "num-gpu-blocks-override": 97, "max-model-len": 2048, "enforce-eager": True},
        "connector_extra_config": {"spec_name": "HostOffloadingSpec", "spec_module_path": "kvtrial_host_offload"},
        "model": {"name": "m", "path": "/m", "revision": "r", "weights": "random", "kv_bytes_per_token": 4096,
                  "low_token_id": 32, "high_token_id": 126},
        "ram_reserve_bytes": 2**30,
    }  # fmt: skip
    return {"protocol": str(tmp_path / "mine.yml"), "protocols_dir": str(ROOT / "playbooks" / "protocols"),
            "results_dir": str(tmp_path / "results"), "hosts": {"h1": host, "h2": host}, "trace": trace,
            "working_dir": str(tmp_path), **top}  # fmt: skip


def test_a_campaign_keeps_the_trace_and_the_host_gets_the_same_requests_from_it(tmp_path):
    written(tmp_path, GOOD)
    raw = request_of(tmp_path)
    campaigns.validate(raw)
    assert not (tmp_path / "results").exists()
    done = campaigns.prepare(raw)
    assert any("3 requests over 2 s" in line for line in done["announcement"])
    folder = Path(done["directory"])
    for host in ("h1", "h2"):
        (shipped,) = done["traces"][host]
        assert Path(shipped["path"]) == folder / shipped["file"]
        plan = msgspec.json.decode((folder / "plans" / f"{host}.json").read_bytes(), type=HostPlan)
        check_traces(plan, folder)
        replay = next(phase for phase in plan.runs[0].phases if phase.name == "replay")
        requests = list(phase_requests(replay, folder))
        assert [r.scheduled_seconds for r in requests] == [0.0, pytest.approx(0.05), pytest.approx(0.2)]
        assert requests[0].prompt_text == "hello there"
        assert len({r.cache_salt for r in requests}) == 3
    # The same content elsewhere is the same plan; the campaign's own copy too.
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "trace.jsonl").rename(tmp_path / "elsewhere" / "other.jsonl")
    for path in ("elsewhere/other.jsonl", str(folder / shipped["file"])):
        again = campaigns.prepare(request_of(tmp_path, path))
        assert again["resumed"] and again["plan_sha256"] == done["plan_sha256"]


def test_a_trace_that_was_damaged_on_its_way_is_refused_before_anything_is_sent(tmp_path):
    written(tmp_path, GOOD)
    done = campaigns.prepare(request_of(tmp_path))
    folder = Path(done["directory"])
    plan = msgspec.json.decode((folder / "plans" / "h1.json").read_bytes(), type=HostPlan)
    replay = next(phase for phase in plan.runs[0].phases if phase.name == "replay")
    path = folder / done["traces"]["h1"][0]["file"]
    whole = path.read_bytes()
    lines = [msgspec.json.decode(line, type=TraceLine) for line in raw_lines(path)]
    for damage in ("cut", "edited", "gone"):
        if damage == "cut":
            path.write_bytes(whole[:-5])
        elif damage == "edited":
            write_trace(path, [*lines[:-1], msgspec.structs.replace(lines[-1], max_tokens=9)])
        else:
            path.unlink()
        for reads in (lambda: check_traces(plan, folder), lambda: list(phase_requests(replay, folder))):
            with pytest.raises(UnusableInput, match=path.name):
                reads()


REFUSED = [
    ({"trace": None}, ["protocol mine replays a trace", "-e kvtrial_trace=PATH"]),
    ({"trace": "nope.jsonl"}, ["nope.jsonl", "no such file"]),
    ({"trace": "."}, ["no such file"]),
    ({"protocol": PROTOCOL.replace("mine: {kind: trace, max_tokens: 8}", "mine: {kind: trace, max_tokens: 0}")},
     ["workload mine: max_tokens=0"]),
    ({"protocol": PROTOCOL.replace("speed: 10", "speed: 0")}, ["arrivals.speed=0"]),
    ({"protocol": PROTOCOL.replace("workload: mine", "workload: mien")}, ["mien", "Did you mean mine"]),
    ({"protocol": PROTOCOL.replace("workload: mine, salt", "workload: mine, max_tokens: 4, salt")}, ["leave it out"]),
    ({"protocol": PROTOCOL.replace("workload: mine, salt", "workload: mine, take: 4, salt")}, ["take or repeat"]),
    ({"protocol": PROTOCOL.replace("workload: mine", "prompts: warm, workload: mine")}, ["both prompts and"]),
    ({"protocol": PROTOCOL.replace("workload: mine, ", "")}, ["neither prompts nor a workload"]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "named"), REFUSED, ids=[str(changes)[-50:] for changes, _ in REFUSED])
def test_a_request_that_cannot_be_replayed_is_refused_in_a_sentence(tmp_path, changes, named):
    written(tmp_path, GOOD)
    with pytest.raises(UnusableInput) as refused:
        campaigns.validate(request_of(tmp_path, **changes))
    for part in named:
        assert part in str(refused.value), str(refused.value)


def test_recorded_times_need_a_time_in_every_line_and_other_arrivals_do_not(tmp_path):
    written(tmp_path, [GOOD[0], {"prompt": "x"}])
    with pytest.raises(UnusableInput, match="line 2 has no time"):
        campaigns.validate(request_of(tmp_path))
    poisson = PROTOCOL.replace("{kind: recorded, speed: 10}", "{kind: poisson, rate_per_minute: 30}")
    campaigns.validate(request_of(tmp_path, protocol=poisson))


def test_a_trace_for_a_protocol_that_replays_none_is_refused(tmp_path):
    written(tmp_path, GOOD)
    raw = {**request_of(tmp_path), "protocol": "offload_return"}
    with pytest.raises(UnusableInput, match="replays no trace"):
        campaigns.validate(raw)


def test_a_prompt_longer_than_the_engine_serves_is_refused_where_its_length_is_known(tmp_path):
    written(tmp_path, [{"time": 1, "prompt_tokens": 2045, "max_tokens": 4}])
    with pytest.raises(UnusableInput, match="replay has 2049 tokens"):
        campaigns.validate(request_of(tmp_path))
    written(tmp_path, [{"time": 1, "prompt": "x" * 40_000, "max_tokens": 4}])
    campaigns.validate(request_of(tmp_path))


def test_a_trace_is_read_once_for_hosts_of_the_same_sizes(tmp_path):
    written(tmp_path, GOOD)
    request = read_request(request_of(tmp_path))
    protocol = requested_protocol(request)
    resolved = [for_host(protocol, host) for host in request.hosts.values()]
    with read_traces(request, protocol, resolved) as traces:
        (only,) = traces.files.values()
        assert list(read_trace(traces.folder / only.file, only.sha256)) == read(tmp_path / "trace.jsonl")
        folder = traces.folder
    assert not folder.exists()


def test_reproduce_names_the_campaigns_own_copy(tmp_path):
    from kvtrial.analysis.reproduce import _trace_words

    written(tmp_path, GOOD)
    done = campaigns.prepare(request_of(tmp_path))
    folder = Path(done["directory"])
    plan = campaigns.read_campaign(folder).plan
    words = _trace_words(plan.hosts[0], folder, plan.protocol.sizes)
    assert words == ["-e", f"kvtrial_trace={done['traces']['h1'][0]['path']}"]
