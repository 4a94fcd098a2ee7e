"""The stamped server and what calibrating against it leaves. Nothing here depends on how fast the machine is."""

import json
import os
import socket
from pathlib import Path

import httpx
import msgspec
import pytest
from kvtrial.host import calibration
from kvtrial.host.affinity import Pinning
from kvtrial.host.calibration import alike, calibrate, current_calibration_id, level_of, read_calibration, table
from kvtrial.host.load.client import run_load_blocking
from kvtrial.host.program import main
from kvtrial.host.stamped_server import MODEL, NAME, Schedule, Stamps, running_server, spread_us
from kvtrial.record.errors import UnusableInput
from kvtrial.record.load import LoadOutcome, LoadSpec, RequestResult, RequestSpec


@pytest.fixture(name="generous", autouse=True)
def _generous(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no fault of the code, and other tests' engines are no engines of a user."""
    monkeypatch.setattr(calibration, "HELD_P99_SECONDS", 60.0)
    monkeypatch.setattr(calibration, "foreign_engines", lambda _own: [])
    monkeypatch.setattr(calibration, "_step", short_step)


def short_step(streams: int) -> calibration._Step:
    """What is asked here of a calibration does not hang on how long it is."""
    return calibration._Step(
        streams, 4 * streams, 4, Schedule(tokens_per_second=200, first_seconds=0.01, stagger_seconds=0.02)
    )


def load(port: int, count: int, tokens: int, **params: int) -> tuple[list[RequestSpec], LoadSpec]:
    requests = [
        RequestSpec(key=str(n), prompt_token_ids=[n, 2, 3], max_tokens=tokens, kv_transfer_params=params or None)
        for n in range(count)
    ]
    return requests, LoadSpec(
        base_url=f"http://127.0.0.1:{port}", model=MODEL, concurrency=4, idle_timeout_seconds=20,
        request_timeout_seconds=20, deadlock_seconds=20,
    )  # fmt: skip


@pytest.fixture(name="measured", scope="module")
def _measured() -> tuple[LoadOutcome, list[RequestResult], Stamps]:
    """Eight requests of five tokens, by the client and by the server."""
    results: list[RequestResult] = []
    with running_server() as (port, _):
        requests, spec = load(port, 8, 5, first_token_us=2000, interval_us=1000)
        outcome = run_load_blocking(spec, requests, results.append)
        content = httpx.post(f"http://127.0.0.1:{port}/kvtrial/stamps").content
    return outcome, results, msgspec.json.decode(content, type=Stamps)


def test_its_streams_are_whole_answers_in_the_engines_form(measured):
    _, results, stamps = measured
    assert [result.error for result in results] == [None] * 8
    assert {result.output_tokens for result in results} == {5}
    assert {result.finish_reason for result in results} == {"length"}
    assert {result.prompt_tokens for result in results} == {3}
    assert all(request.finished and request.tokens == 5 for request in stamps.requests)
    assert stamps.events == 40


def test_its_stamps_are_of_the_clock_the_client_reads_and_in_order(measured):
    outcome, results, stamps = measured
    served = {request.prompt_sha256: request for request in stamps.requests}
    for result in results:
        known = served[result.prompt_sha256]
        assert result.sent_ns is not None and result.first_token_ns is not None
        assert known.first_before_ns is not None and known.arrived_ns is not None
        began = outcome.started_monotonic_ns
        # The wall clock that the kernel stamps arrivals with is read beside the monotonic one, to some microseconds.
        assert began + result.sent_ns < known.arrived_ns + 1_000_000
        assert known.arrived_ns <= known.read_ns + 1_000_000
        assert known.first_due_ns <= known.first_before_ns <= began + result.first_token_ns


def test_it_names_itself_as_no_engine():
    with running_server() as (port, _), httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        models = client.get("/v1/models")
        body = {"prompt": "a b", "max_tokens": 2, "stream": True, "model": "m"}
        answer = client.post("/v1/completions", json=body)
    assert models.headers["server"] == NAME
    assert models.json()["data"][0]["id"] == MODEL == "stamped-server-no-engine"
    assert answer.headers["x-kvtrial-engine"].startswith("none")
    assert MODEL in answer.text


def test_it_refuses_what_it_cannot_do_and_goes_on():
    with running_server() as (port, _), httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        assert client.post("/v1/completions", content=b"{not json").status_code == 400
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 0, "stream": True}).status_code == 400
        assert client.get("/metrics").status_code == 404
        assert client.get("/health").status_code == 200


def test_a_client_that_goes_away_leaves_an_unfinished_request_and_a_live_server():
    with running_server() as (port, _), httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        body = json.dumps({"prompt": "a", "max_tokens": 100, "stream": True}).encode()
        with socket.create_connection(("127.0.0.1", port)) as gone:
            gone.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            gone.recv(10)
        while not (stamps := client.post("/kvtrial/stamps").json())["requests"]:
            pass
    assert [request["finished"] for request in stamps["requests"]] == [False]


def test_the_server_ends_with_the_block():
    with running_server() as (_, process):
        pass
    assert process.returncode == 0


def test_a_late_client_is_seen_by_its_calibration(measured):
    """The planted fault of a calibration: a client whose first token is stamped 80 ms late."""
    outcome, results, stamps = measured
    honest = level_of(4, outcome, results, stamps)
    late = [
        msgspec.structs.replace(result, first_token_ns=(result.first_token_ns or 0) + 80_000_000) for result in results
    ]
    found = level_of(4, outcome, late, stamps)
    assert found.ttft_error_p50_seconds > honest.ttft_error_p50_seconds + 0.05


def test_a_number_of_streams_with_too_large_an_error_does_not_hold(measured, monkeypatch):
    outcome, results, stamps = measured
    assert level_of(4, outcome, results, stamps).held
    monkeypatch.setattr(calibration, "HELD_P99_SECONDS", 1e-9)
    assert not level_of(4, outcome, results, stamps).held


def test_a_failed_request_is_counted_and_the_level_does_not_hold(measured):
    outcome, results, stamps = measured
    broken = [msgspec.structs.replace(results[0], first_token_ns=None), *results[1:]]
    found = level_of(4, outcome, broken, stamps)
    assert (found.failed, found.held) == (1, False)


@pytest.fixture(name="card_dir", scope="module")
def _card_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "HELD_P99_SECONDS", 60.0)
        patch.setattr(calibration, "_step", short_step)
        calibrate(state, levels=(1, 8))
    return state


def test_a_card_is_stored_whole_and_holds_for_this_client_on_this_host(card_dir):
    card = read_calibration(card_dir)
    assert card is not None
    assert [level.streams for level in card.levels] == [1, 8]
    assert card.limits.streams_max == 8
    assert current_calibration_id(card_dir) == card.calibration_id
    assert any(line.startswith("Calibrated up to 8 streams") for line in table(card))
    assert [path.name for path in card_dir.iterdir()] == ["calibration.json"]


@pytest.mark.parametrize("field", ["kvtrial_version", "client_sha256", "kernel", "cpu_model", "python", "client_cpus"])
def test_a_card_of_another_client_or_host_does_not_hold(field, card_dir, tmp_path):
    card = read_calibration(card_dir)
    assert card is not None
    other = msgspec.structs.replace(card.calibrated_for, **{field: "other"})
    changed = msgspec.structs.replace(card, calibrated_for=other)
    (tmp_path / "calibration.json").write_bytes(msgspec.json.encode(calibration.with_id(changed)))
    assert current_calibration_id(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"schema_version":"1.0"}'])
def test_a_damaged_card_is_none(content, tmp_path):
    (tmp_path / "calibration.json").write_bytes(content)
    assert current_calibration_id(tmp_path) is None


def test_an_edited_card_is_none(card_dir, tmp_path):
    text = (card_dir / "calibration.json").read_text()
    (tmp_path / "calibration.json").write_text(text.replace('"streams_max": 8', '"streams_max": 800'))
    assert current_calibration_id(tmp_path) is None


def test_a_host_on_which_one_stream_cannot_be_measured_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(calibration, "HELD_P99_SECONDS", 1e-9)
    with pytest.raises(UnusableInput, match="with 1 stream the client's TTFT is off by"):
        calibrate(tmp_path, levels=(1,))
    assert list(tmp_path.iterdir()) == []


def test_the_command_calibrates_once_and_again_when_asked(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(calibration, "LEVELS", (1,))
    monkeypatch.setattr(
        "kvtrial.host.program.calibrate", lambda state, client_cpus: calibrate(state, (1,), client_cpus)
    )
    monkeypatch.setattr("kvtrial.host.program.refuse_busy_host", lambda: None)

    def run(*more: str):
        assert main([*more, "--directory", str(tmp_path)]) == 0
        return json.loads(capsys.readouterr().out)

    assert run("calibration") == {"calibration": None}
    first = run("calibrate")
    assert first["changed"]
    second = run("calibrate")
    assert not second["changed"]
    assert second["calibration"] == first["calibration"] == run("calibration")["calibration"]
    assert run("calibrate", "--again")["changed"]


OURS = sorted(os.sched_getaffinity(0))


@pytest.mark.skipif(len(OURS) < 2, reason="one CPU cannot be shared out")
def test_the_client_is_pinned_as_in_an_experiment_and_the_server_where_an_engine_would_be(tmp_path, monkeypatch):
    seen: dict[str, set[int]] = {}

    def spy(spec, requests, take, **how):
        server = int(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()[-1])
        seen.update(client=os.sched_getaffinity(0), server=os.sched_getaffinity(server))
        return run_load_blocking(spec, requests, take, **how)

    monkeypatch.setattr(calibration, "run_load_blocking", spy)
    card = calibrate(tmp_path, (1,), client_cpus=str(OURS[-1]))
    assert seen == {"client": {OURS[-1]}, "server": set(OURS[:-1])}
    assert (card.pinning, card.cpu_affinity) == ("pinned", [OURS[-1]])
    assert os.sched_getaffinity(0) == set(OURS), "the pin is taken off"
    assert read_calibration(tmp_path) is None, "it does not hold for a client that is not pinned"
    assert read_calibration(tmp_path, str(OURS[-1])) == card


def test_a_client_that_is_not_pinned_has_a_card_that_says_so(card_dir):
    card = read_calibration(card_dir)
    assert card is not None
    assert (card.pinning, card.cpu_affinity) == ("no core is free of the engine", OURS)
    assert alike(card, Pinning(OURS, "", None)) == card
    assert alike(card, Pinning([9999], "", None)) is None


@pytest.mark.parametrize(("cpus", "said"), [("9999", "leaves no CPU to the client"), ("x", "'x' is neither a CPU")])
def test_cpus_that_cannot_be_shared_out_are_refused(cpus, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("kvtrial.host.program.refuse_busy_host", lambda: None)
    assert main(["calibrate", "--directory", str(tmp_path), "--client-cpus", cpus]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_host_with_an_engine_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(calibration, "foreign_engines", lambda _own: [(7, "vllm serve m")])
    assert main(["calibrate", "--directory", str(tmp_path)]) == 2
    assert "an engine runs on this host, pid 7 (vllm serve m)" in capsys.readouterr().err


def test_a_distribution_is_by_nearest_rank():
    found = spread_us([*range(1000, 102_000, 1000)])
    assert found is not None
    assert (found.count, found.p50_us, found.p99_us, found.max_us) == (101, 51.0, 100.0, 101.0)
    assert spread_us([]) is None
