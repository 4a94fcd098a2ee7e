"""The stand-in's HTTP side and page, against samples of a real vLLM 0.32.0 on the CPU."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
FRAME = {"id", "object", "created", "model", "choices"}
CHOICE = {"index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids"}


def real_types(arm: str) -> set[str]:
    lines = (HERE / "real_page_types.txt").read_text(encoding="utf-8").splitlines()
    return {line.removeprefix(f"{arm} ") for line in lines if line.startswith(f"{arm} ")}


def page_types(engine: Any) -> set[str]:
    page = engine.get("/metrics")[1].decode()
    return {line.removeprefix("# TYPE ") for line in page.split("\n") if line.startswith("# TYPE ")}


@pytest.mark.parametrize("arm", ["control", "offload"])
def test_the_page_has_the_families_and_types_of_the_real_one(arm: str, launch: Any, prompt: Any) -> None:
    engine = launch(arm, blocks=34)
    engine.ask(prompt("T"))
    engine.ask(prompt("F"))
    engine.ask(prompt("T"))
    assert page_types(engine) == real_types(arm)


def test_flat_transfer_families_have_a_type_but_no_sample_before_the_first_transfer(launch: Any, prompt: Any) -> None:
    engine = launch("offload")
    idle = engine.samples()
    assert "vllm:kv_offload_store_bytes_total counter" in page_types(engine)
    assert "vllm:kv_offload_store_bytes_created gauge" not in page_types(engine)
    assert not {name for name in idle if name.startswith(("vllm:kv_offload_load", "vllm:kv_offload_store"))}
    assert idle['vllm:kv_offload_total_bytes_total{transfer_type="CPU_to_GPU"}'] == 0
    engine.ask(prompt("T"))
    stored = engine.samples()
    assert stored["vllm:kv_offload_store_bytes_total"] == 1024 * 4096
    assert "vllm:kv_offload_load_bytes_total" not in stored


def test_cache_config_labels_are_those_of_193_blocks(launch: Any) -> None:
    page = launch("control").get("/metrics")[1].decode()
    info = next(line for line in page.split("\n") if line.startswith("vllm:cache_config_info{"))
    for label in (
        'num_gpu_blocks="193"',
        'block_size="32"',
        'kv_cache_size_tokens="6176"',
        'kv_cache_max_concurrency="1.5078125"',
        'kv_cache_memory_bytes="268435456"',
        'kv_cache_layout="None"',
        'engine="0"',
    ):
        assert label in info
    assert "model_name" not in info


def test_histogram_buckets_rise_to_the_count(launch: Any, prompt: Any) -> None:
    engine = launch("control")
    engine.ask(prompt("T"))
    page = engine.get("/metrics")[1].decode().split("\n")
    buckets = [line for line in page if line.startswith("vllm:request_prompt_tokens_bucket")]
    bounds = [line.split('le="')[1].split('"')[0] for line in buckets]
    assert bounds[:4] == ["1.0", "2.0", "5.0", "10.0"]
    assert bounds[-3:] == ["1000.0", "2000.0", "+Inf"]
    assert [float(line.rsplit(" ", 1)[1]) for line in buckets] == [0.0] * 10 + [1.0] * 2


def test_a_stream_has_the_shape_of_vllm(launch: Any, prompt: Any) -> None:
    engine = launch("control")
    answer = engine.ask(prompt("T"), 8)
    assert answer.raw.endswith(b"\n\n")
    events = [event.removeprefix(b"data: ") for event in answer.raw.split(b"\n\n") if event]
    assert events[-1] == b"[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    tokens, usage = chunks[:-1], chunks[-1]
    assert len(tokens) == 8
    assert all(set(chunk) == FRAME and set(chunk["choices"][0]) == CHOICE for chunk in tokens)
    assert [chunk["choices"][0]["finish_reason"] for chunk in tokens] == [None] * 7 + ["length"]
    assert tokens[0]["choices"][0]["prompt_token_ids"] == prompt("T")
    assert {chunk["choices"][0]["prompt_token_ids"] is None for chunk in tokens[1:]} == {True}
    assert [len(chunk["choices"][0]["token_ids"]) for chunk in tokens] == [1] * 8
    assert set(usage) == FRAME | {"usage", "system_fingerprint"}
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 1040,
        "total_tokens": 1048,
        "completion_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_the_text_breaks_line_readers_that_follow_unicode(launch: Any, prompt: Any) -> None:
    engine = launch("control")
    raw = engine.ask(prompt("T"), 200).raw
    assert "\x85" in raw.decode()
    assert len(raw.decode().splitlines()) > len(raw.split(b"\n"))


def test_one_connection_serves_many_requests_and_a_whole_answer(launch: Any, prompt: Any) -> None:
    engine = launch("control")
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=20)
    connection.connect()
    local = connection.sock.getsockname()
    body = json.dumps({"model": "tiny", "prompt": prompt("T"), "max_tokens": 3, "return_token_ids": True})
    for _ in range(3):
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        assert connection.sock.getsockname() == local
    connection.close()
    assert answer["choices"][0]["token_ids"] == engine.ask(prompt("T"), 3).token_ids
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"model": "another"}, 404),
        ({"cache_salt": ""}, 400),
        ({"cache_salt": "a/b"}, 400),
        ({"cache_salt": "x" * 129}, 400),
        ({"max_tokens": 4000}, 400),
        ({"prompt": []}, 400),
        ({"cache_salt": "kt.p1.ret"}, 200),
    ],
)
def test_bad_requests_get_the_status_of_vllm(fields: dict[str, Any], status: int, launch: Any, prompt: Any) -> None:
    engine = launch("control")
    assert engine.ask(prompt("T"), **fields).status == status


def test_development_endpoints_exist_only_in_development_mode(launch: Any) -> None:
    closed = launch("offload")
    assert closed.get("/server_info?config_format=json")[0] == 404
    assert closed.get("/reset_prefix_cache", "POST")[0] == 404


def test_server_info_tells_the_launch(launch: Any) -> None:
    control = launch("control", VLLM_SERVER_DEV_MODE="1").get_json("/server_info?config_format=json")
    offload = launch("offload", VLLM_SERVER_DEV_MODE="1").get_json("/server_info?config_format=json")
    assert set(control) == {"vllm_config", "vllm_env", "system_env"}
    ours, theirs = control["vllm_config"], offload["vllm_config"]
    assert {name for name in ours if ours[name] != theirs[name]} == {"kv_transfer_config", "instance_id"}
    assert ours["kv_transfer_config"] is None
    assert theirs["kv_transfer_config"]["kv_connector_extra_config"]["cpu_bytes_to_use"] == 268_435_456
    assert ours["scheduler_config"]["max_num_seqs"] == 16
    assert ours["cache_config"]["num_gpu_blocks"] == 193
    assert ours["model_config"]["served_model_name"] == "tiny"
    assert ours["model_config"]["enforce_eager"] is True
    assert control["vllm_env"]["VLLM_SERVER_DEV_MODE"] is True


@pytest.mark.parametrize(("external", "cached"), [("true", 0), ("false", 1024)])
def test_reset_clears_the_tier_only_when_told(external: str, cached: int, launch: Any, prompt: Any) -> None:
    engine = launch("offload", VLLM_SERVER_DEV_MODE="1")
    engine.ask(prompt("T"))
    status, body = engine.get(f"/reset_prefix_cache?reset_external={external}", "POST")
    assert (status, json.loads(body)) == (200, {"success": True})
    assert engine.ask(prompt("T")).cached_tokens == cached


def test_models_and_version(launch: Any) -> None:
    engine = launch("control")
    assert engine.get_json("/version") == {"version": "0.32.0"}
    card = engine.get_json("/v1/models")["data"][0]
    assert (card["id"], card["max_model_len"], card["root"]) == ("tiny", 4096, "/nowhere/model")


def test_kv_bytes_per_token_come_from_the_models_manifest(launch: Any, prompt: Any, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"kv_bytes_per_token": 8192}', encoding="utf-8")
    engine = launch("offload", model=str(tmp_path))
    engine.ask(prompt("T"))
    assert engine.samples()["vllm:kv_offload_store_bytes_total"] == 1024 * 8192
