"""Every kind of workload through the host program, on the stand-in engine: all is sent, and alike in both arms."""

import json
import shutil

import pytest
import yaml
from kvtrial.analysis.inputs import read_request
from kvtrial.analysis.plan import for_host, make_plan, requested_protocol
from kvtrial.analysis.traces import read_traces
from kvtrial.host.workload import phase_requests
from kvtrial.record.load import read_results
from trial import Trial, request_for

PROTOCOL = {
    "schema_version": "1.0",
    "name": "mine",
    "extends": "offload_return",
    "workloads": {
        "half": {"kind": "mix", "returning": "target", "fresh": "miss", "hit_share_percent": 50, "requests": 6},
        "drawn": {"kind": "lengths", "requests": 5, "output_tokens": 3,
                  "prompt_tokens": {"kind": "uniform", "least": 20, "most": 90}},
        "talks": {"kind": "conversations", "conversations": 2, "turns": 3, "question_tokens": 20, "answer_tokens": 4,
                  "pause_seconds": 0.02},
        "recorded": {"kind": "trace", "max_tokens": 3},
    },
    "phases": [
        {"name": "populate", "block": "r", "prompts": "target", "salt": "r", "max_tokens": 2},
        {"name": "pressure", "block": "r", "prompts": "pressure", "salt": "r", "max_tokens": 1},
        {"name": "mixed", "block": "r", "workload": "half", "salt": "r", "max_tokens": 2,
         "arrivals": {"kind": "poisson", "rate_per_second": 50}},
        {"name": "drawn", "block": "d", "workload": "drawn", "salt": "d",
         "arrivals": {"kind": "constant", "rate_per_second": 50}},
        {"name": "talks", "block": "t", "workload": "talks", "salt": "t", "concurrency": 2},
        {"name": "talks_open", "block": "t", "workload": "talks", "salt": "o",
         "arrivals": {"kind": "constant", "rate_per_second": 20}},
        {"name": "replay", "block": "p", "workload": "recorded", "salt": "p",
         "arrivals": {"kind": "recorded", "speed": 10}},
        {"name": "ladder", "block": "l", "prompts": "miss", "salt": "l", "max_tokens": 2, "concurrency": [1, 4]},
    ],
    "comparisons": [{"arm": "offload", "against": "control", "phase": "mixed", "metric": "ttft_median_seconds",
                     "role": "primary"}],
    "alternate_blocks": [],
    "break_even": {},
    "gates": {"prefix_evicted": None, "treatment_delivered": None, "noload_respected": None, "answers_equal": None,
              "working_set": None},
}  # fmt: skip
TRACE = [
    {"time": 7.0, "prompt": "hello there", "salt": "a"},
    {"time": 7.5, "prompt_token_ids": [40, 41, 42] * 20, "salt": "b"},
    {"time": 8.0, "prompt_tokens": 70, "max_tokens": 5},
    {"time": 8.0, "prompt_tokens": 75, "after": 3, "prompt_id": "x"},
]


@pytest.fixture(name="made")
def _made(tmp_path, nothing_left, trial):
    (tmp_path / "mine.yml").write_text(yaml.safe_dump(PROTOCOL))
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, TRACE)))
    raw = request_for(tmp_path, protocol=str(tmp_path / "mine.yml"), pairs=2)
    request = read_request({**raw, "trace": "trace.jsonl", "working_dir": str(tmp_path)})
    protocol = requested_protocol(request)
    folder = tmp_path / "campaigns" / "host"
    with read_traces(request, protocol, [for_host(protocol, request.hosts["h1"])]) as traces:
        made = Trial(folder, make_plan(request, protocol, traces), 2)
        shutil.copytree(traces.folder / "workloads", folder / "workloads")
    return made


def test_every_kind_of_workload_is_sent_wholly_and_alike_in_both_arms(made):
    made.run()
    records = made.records()
    assert [record.outcome for record in records] == ["completed", "completed"], [r.fault for r in records]
    runs = {run.run: run for run in made.host_plan.runs}
    for record in records:
        planned = {phase.name: list(phase_requests(phase, made.folder.directory)) for phase in runs[record.run].phases}
        sent = {phase.name: phase for phase in record.phases}
        assert list(sent) == list(planned)
        for name, requests in planned.items():
            assert (sent[name].sent, sent[name].failed) == (len(requests), 0), name
            assert sent[name].output_tokens == sum(r.max_tokens for r in requests), name
        results = list(read_results(made.folder.runs / record.run / "requests.jsonl.zst"))
        assert sorted((r["phase"], r["key"]) for r in results) == sorted(
            (name, request.key) for name, requests in planned.items() for request in requests
        )
        by_key = {r["key"]: r for r in results if r["phase"] == "talks_open"}
        for request in planned["talks_open"]:
            if request.after is not None:
                assert by_key[request.key]["sent_ns"] >= by_key[request.after]["last_token_ns"] + 20_000_000
        assert sent["mixed"].concurrency is sent["replay"].concurrency is None
        assert [sent[name].concurrency for name in ("ladder_1", "ladder_4", "talks")] == [1, 4, 2]
    first, second = ({p.name: p.prompts_sha256 for p in record.phases} for record in records)
    assert first == second


def test_the_program_does_not_start_with_a_trace_that_did_not_arrive_whole(made):
    (path,) = (made.folder.directory / "workloads").iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    started = made.command("start", check=False)
    assert started.returncode != 0
    assert path.name in started.stdout + started.stderr
    assert "Traceback" not in started.stdout + started.stderr
    assert made.records() == []
