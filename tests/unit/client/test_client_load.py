"""The load client against a stand-in server: each error class, the stamps, the pacing, the connections, the card."""

import asyncio
import gc
import itertools
import json
import resource
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from kvtrial.host.load import client, dispatch
from kvtrial.host.load.client import run_load
from kvtrial.host.load.connection import Connection
from kvtrial.host.load.spool import request_body
from kvtrial.host.load.sse import sha256_of_tokens
from kvtrial.record.errors import UnusableInput
from kvtrial.record.load import RequestResult, RequestSpec
from loading import load, spec_for
from stamped_server import Script, StampedServer


def requests(count: int, **fields: Any) -> list[RequestSpec]:
    return [
        RequestSpec(key=f"r{number}", prompt_token_ids=[number, 1, 2, 3], max_tokens=3, **fields)
        for number in range(count)
    ]


def by_request(scripts: dict[int, Script], otherwise: Script | None = None) -> Callable[[dict[str, Any]], Script]:
    """Choose a script by the first prompt token, which `requests` sets to the request's number."""
    return lambda body: scripts.get(body["prompt"][0], otherwise or Script())


def error_of(result: RequestResult) -> tuple[str, int | None]:
    assert result.error is not None, "an error was planted"
    return result.error.error_class, result.error.http_status


def assert_in_order(result: RequestResult) -> None:
    moments = [
        result.scheduled_ns,
        result.sent_ns,
        result.first_byte_ns,
        result.first_token_ns,
        result.last_token_ns,
    ]
    known = [moment for moment in moments if moment is not None]
    assert known == sorted(known)
    if result.token_gaps_us:
        assert result.first_token_ns is not None
        assert result.last_token_ns is not None
        assert len(result.token_gaps_us) == result.output_tokens - 1
        assert sum(result.token_gaps_us) == (result.last_token_ns - result.first_token_ns) // 1000


# A whole answer.


def test_an_answer_is_recorded_whole() -> None:
    script = Script(token_groups=((5,), (6,), (7,)), first_seconds=0.02, gap_seconds=0.01)
    with StampedServer(lambda body: script) as server:
        outcome = load(server.base_url, requests(2))
    assert [result.key for result in outcome.results] == ["r0", "r1"]
    for number, result in enumerate(outcome.results):
        assert result.error is None
        assert (result.output_token_ids, result.output_tokens, result.finish_reason) == ([5, 6, 7], 3, "length")
        assert (result.prompt_tokens, result.cached_tokens) == (4, 7)
        assert result.prompt_sha256 == sha256_of_tokens([number, 1, 2, 3])
        assert result.answer_sha256 == sha256_of_tokens([5, 6, 7])
        assert_in_order(result)
        assert None not in (result.sent_ns, result.first_byte_ns, result.first_token_ns, result.last_token_ns)


def test_stamps_lie_after_the_servers_own_and_between_its_writes() -> None:
    script = Script(token_groups=((5,), (6,), (7,)), first_seconds=0.05, gap_seconds=0.25)
    with StampedServer(lambda body: script) as server:
        outcome = load(server.base_url, requests(1))
        [served] = server.served
    [result] = outcome.results
    assert result.sent_ns is not None
    assert result.first_byte_ns is not None
    assert result.first_token_ns is not None
    # One machine, one clock: the server's stamps need only the start of the phase taken off.
    written = [stamp - outcome.outcome.started_monotonic_ns for stamp in served.token_written_ns]
    slack_ns = 50_000_000  # between the two stamps of the phase's start; not a speed
    assert result.sent_ns <= served.arrived_ns - outcome.outcome.started_monotonic_ns + slack_ns
    assert written[0] - slack_ns <= result.first_token_ns <= written[1]
    # Headers come at once, the first token 50 ms later: first byte and first token must not be confused.
    assert result.first_byte_ns < result.first_token_ns - 10_000_000
    assert len(result.token_gaps_us) == 2
    assert min(result.token_gaps_us) > 100_000


def test_several_tokens_in_one_event_are_counted_and_have_no_gap_between_them() -> None:
    script = Script(token_groups=((1,), (2, 3, 4), (5,)), gap_seconds=0.02)
    with StampedServer(lambda body: script) as server:
        [result] = load(server.base_url, requests(1)).results
    assert result.output_token_ids == [1, 2, 3, 4, 5]
    assert result.token_gaps_us[1:3] == [0, 0]
    assert result.token_gaps_us[0] > 0
    assert result.token_gaps_us[3] > 0
    assert_in_order(result)


@pytest.mark.parametrize(
    "script",
    [
        Script(cut_bytes=1),
        Script(cut_bytes=7, newline="\r\n"),
        Script(text="a\u0085b\u2028c\u2029d\x1c"),
        Script(text=""),
        Script(framing="until_close"),
        Script(connection_close=True),
        Script(ending="done_then_reset"),
    ],
    ids=["byte by byte", "crlf", "unicode line ends", "no text", "until close", "connection close", "reset after done"],
)
def test_an_answer_is_whole_however_it_is_written(script: Script) -> None:
    with StampedServer(lambda body: script) as server:
        outcome = load(server.base_url, requests(3))
    for result in outcome.results:
        assert result.error is None
        assert result.output_token_ids == [101, 102, 103]
        assert_in_order(result)


def test_a_server_without_ids_is_counted_by_usage() -> None:
    with StampedServer(lambda body: Script(with_ids=False, text="ab")) as server:
        [result] = load(server.base_url, requests(1)).results
    assert (result.error, result.output_tokens, result.output_token_ids, result.token_gaps_us) == (None, 3, [], [])
    assert result.answer_sha256 is not None
    assert_in_order(result)


# Errors: one test a class; none hangs, none is dropped, the others go on.

ERRORS: dict[str, tuple[Script, str, int | None]] = {
    "reset in the stream": (Script(ending="reset_in_stream"), "connection_reset", None),
    "closed before an answer": (Script(ending="no_answer_close"), "connection_reset", None),
    "status 400": (Script(status=400), "http_status", 400),
    "status 500": (Script(status=500, error_body="plain words"), "http_status", 500),
    "status 503 and close": (Script(status=503, connection_close=True), "http_status", 503),
    "no [DONE]": (Script(ending="no_done"), "stream_ended_without_done", None),
    "closed in the stream": (Script(ending="close_in_stream"), "stream_ended_without_done", None),
    "closed in an unframed stream": (
        Script(ending="close_in_stream", framing="until_close"),
        "stream_ended_without_done",
        None,
    ),
    "broken JSON": (Script(insert_event='{"choices":['), "malformed_stream", None),
    "usage contradicts ids": (Script(usage_tokens=4), "malformed_stream", None),
    "not an event stream": (Script(content_type="text/html"), "malformed_stream", None),
    "not HTTP": (Script(raw_response=b"220 mail ready\r\n"), "malformed_stream", None),
    "error event": (Script(insert_event='{"error":{"message":"dead","code":500}}'), "http_status", 500),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_fault_is_its_class_and_the_requests_around_it_succeed(name: str) -> None:
    script, error_class, status = ERRORS[name]
    with StampedServer(by_request({1: script})) as server:
        outcome = load(server.base_url, requests(4))
        assert len(server.served) == 4, "every request is sent exactly once"
    assert [result.key for result in outcome.results] == ["r0", "r1", "r2", "r3"]
    assert [result.error is None for result in outcome.results] == [True, False, True, True]
    assert error_of(outcome.results[1]) == (error_class, status)
    for result in outcome.results:
        assert_in_order(result)


def test_what_came_before_a_fault_is_kept() -> None:
    with StampedServer(lambda body: Script(ending="reset_in_stream", token_groups=((9, 8), (7,)))) as server:
        [result] = load(server.base_url, requests(1)).results
    assert (result.output_token_ids, result.output_tokens) == ([9, 8], 2)
    assert result.first_token_ns is not None
    assert result.finish_reason is None


def test_a_refused_connection_is_a_result_for_every_request() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        outcome = load(f"http://127.0.0.1:{unused.getsockname()[1]}", requests(5), concurrency=2)
    assert [error_of(result) for result in outcome.results] == [("connection_refused", None)] * 5
    assert all(result.sent_ns is None and result.first_byte_ns is None for result in outcome.results)
    assert outcome.card.dispatch_lag_p95_seconds is None


def test_a_server_that_is_gone_for_a_while_fails_only_what_it_missed() -> None:
    with StampedServer() as server:
        url = server.base_url
        first = load(url, requests(1))
    second = load(url, requests(1))
    assert first.results[0].error is None
    assert error_of(second.results[0]) == ("connection_refused", None)


def test_a_stalled_answer_times_out_as_idle_and_its_connection_is_given_up() -> None:
    with StampedServer(by_request({0: Script(ending="stall")})) as server:
        outcome = load(server.base_url, requests(2), idle_timeout_seconds=0.8)
        assert server.wait_for_connections(0) == 0
    assert error_of(outcome.results[0]) == ("idle_timeout", None)
    assert outcome.results[0].output_token_ids == [101]
    assert outcome.results[1].error is None


def test_a_server_that_never_answers_times_out_as_idle() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen(8)
        outcome = load(f"http://127.0.0.1:{mute.getsockname()[1]}", requests(3), 3, idle_timeout_seconds=0.2)
    assert [error_of(result) for result in outcome.results] == [("idle_timeout", None)] * 3
    assert all(result.sent_ns is not None and result.first_byte_ns is None for result in outcome.results)


def test_an_answer_that_drips_without_end_times_out_as_a_request() -> None:
    drip = Script(token_groups=tuple((number,) for number in range(10_000)), gap_seconds=0.02)
    with StampedServer(by_request({0: drip})) as server:
        outcome = load(server.base_url, requests(2), idle_timeout_seconds=5, request_timeout_seconds=0.6)
    assert error_of(outcome.results[0]) == ("request_timeout", None)
    assert outcome.results[0].output_tokens >= 1
    assert outcome.results[1].error is None


def test_an_error_does_not_repeat_the_prompt() -> None:
    body = json.dumps({"error": {"message": "bad value: secret words, {'input': {'prompt': [7, 7, 7]}}"}})
    wanted = [RequestSpec(key="a", prompt_text="secret words", max_tokens=1)]
    with StampedServer(lambda _: Script(status=400, error_body=body)) as server:
        [result] = load(server.base_url, wanted).results
    assert result.error is not None
    assert result.error.detail == "bad value: <prompt>, {'input': <input>"


# Pacing.


@pytest.mark.parametrize("concurrency", [1, 3, 8])
def test_a_closed_loop_keeps_exactly_n_in_flight_on_n_connections(concurrency: int) -> None:
    with StampedServer(lambda body: Script(gap_seconds=0.02)) as server:
        outcome = load(server.base_url, requests(24), concurrency)
        assert server.in_flight_max == concurrency
        assert server.connections_opened == concurrency
        assert server.wait_for_connections(0) == 0
    assert all(result.error is None for result in outcome.results)
    assert (outcome.card.connections_opened, outcome.card.connections_max_open) == (concurrency, concurrency)


def test_a_closed_loop_of_one_sends_in_order_and_each_after_the_answer_before() -> None:
    with StampedServer() as server:
        outcome = load(server.base_url, requests(6))
        assert [served.body["prompt"][0] for served in server.served] == list(range(6))
    for earlier, later in itertools.pairwise(outcome.results):
        assert earlier.last_token_ns is not None
        assert later.sent_ns is not None
        assert earlier.last_token_ns <= later.scheduled_ns <= later.sent_ns


def test_more_slots_than_requests_open_no_more_connections_than_requests() -> None:
    with StampedServer() as server:
        assert load(server.base_url, requests(2), 16).card.connections_opened == 2


def test_an_open_loop_does_not_wait_for_earlier_answers() -> None:
    # The first answer is held back until the last request has arrived: a client that waits would never end well.
    hold = Script(first_seconds=0.6)
    wanted = [
        RequestSpec(key=f"r{number}", prompt_token_ids=[number], max_tokens=3, scheduled_seconds=0.02 * number)
        for number in range(10)
    ]
    with StampedServer(by_request({}, hold)) as server:
        outcome = load(server.base_url, wanted, None)
        assert server.in_flight_max == 10
        assert server.wait_for_connections(0) == 0
    last_sent = outcome.results[-1].sent_ns
    first_token = outcome.results[0].first_token_ns
    assert last_sent is not None
    assert first_token is not None
    assert last_sent < first_token
    for number, result in enumerate(outcome.results):
        assert result.error is None
        assert result.scheduled_ns == number * 20_000_000
        assert_in_order(result)


def test_an_open_loop_keeps_to_the_clock_not_to_the_order_given() -> None:
    wanted = [
        RequestSpec(key=key, prompt_token_ids=[1], max_tokens=1, scheduled_seconds=seconds)
        for key, seconds in (("late", 0.1), ("early", 0.0), ("middle", 0.05))
    ]
    with StampedServer() as server:
        outcome = load(server.base_url, wanted, None)
    assert [result.key for result in outcome.results] == ["late", "early", "middle"]
    assert sorted(outcome.results, key=lambda r: r.sent_ns or 0) == sorted(
        outcome.results, key=lambda r: r.scheduled_ns
    )


def test_an_open_loop_reuses_a_free_connection() -> None:
    wanted = [RequestSpec(key=f"r{n}", prompt_token_ids=[1], max_tokens=1, scheduled_seconds=0.2 * n) for n in range(4)]
    with StampedServer() as server:
        load(server.base_url, wanted, None)
        assert server.connections_opened == 1


# Connections.


def test_a_connection_that_the_server_closed_while_idle_is_replaced() -> None:
    wanted = [RequestSpec(key=f"r{n}", prompt_token_ids=[n], max_tokens=1, scheduled_seconds=0.3 * n) for n in range(3)]
    with StampedServer(lambda body: Script(close_after_seconds=0.05)) as server:
        outcome = load(server.base_url, wanted, None)
        assert server.connections_opened == 3
    assert [result.error for result in outcome.results] == [None] * 3


def test_a_connection_idle_for_long_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "REUSE_WITHIN_NS", 50_000_000)
    wanted = [RequestSpec(key=f"r{n}", prompt_token_ids=[n], max_tokens=1, scheduled_seconds=0.3 * n) for n in range(3)]
    with StampedServer() as server:
        outcome = load(server.base_url, wanted, None)
        assert server.connections_opened == 3
    assert [result.error for result in outcome.results] == [None] * 3


def test_nagles_algorithm_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    made = Connection.connection_made

    def spy(self: Any, transport: asyncio.BaseTransport) -> None:
        sock = transport.get_extra_info("socket")
        seen.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        made(self, transport)

    monkeypatch.setattr(Connection, "connection_made", spy)
    with StampedServer() as server:
        load(server.base_url, requests(1))
    assert len(seen) == 1
    assert seen[0] != 0


# Bodies.


def test_bodies_arrive_as_specified() -> None:
    wanted = [
        RequestSpec(key="ids", prompt_token_ids=[3, 4], max_tokens=5, cache_salt="s", kv_transfer_params={"a": 0}),
        RequestSpec(key="text", prompt_text="привет", max_tokens=6, ignore_eos=False),
    ]
    with StampedServer(lambda body: Script()) as server:
        load(server.base_url, wanted)
        assert [served.raw_body for served in server.served] == [request_body("m", request) for request in wanted]
        first, second = (served.body for served in server.served)
    assert first == {
        "model": "m",
        "prompt": [3, 4],
        "max_tokens": 5,
        "min_tokens": 5,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "cache_salt": "s",
        "kv_transfer_params": {"a": 0},
    }
    assert (second["prompt"], second["min_tokens"], second["ignore_eos"]) == ("привет", 0, False)
    assert "cache_salt" not in second
    assert "kv_transfer_params" not in second


def test_a_body_larger_than_a_socket_buffer_arrives_whole() -> None:
    ids = list(range(1_000_000))
    with StampedServer() as server:
        [result] = load(server.base_url, [RequestSpec(key="a", prompt_token_ids=ids, max_tokens=3)]).results
        assert server.served[0].body["prompt"] == ids
    assert result.error is None
    assert result.prompt_tokens == len(ids)


# The card and the collector.


def test_the_card_states_what_the_client_did() -> None:
    with StampedServer(lambda body: Script(gap_seconds=0.05)) as server:
        before_ns = time.monotonic_ns()
        outcome = load(server.base_url, requests(4), 2)
        after_ns = time.monotonic_ns()
    card = outcome.card
    assert before_ns <= outcome.outcome.started_monotonic_ns <= after_ns
    assert 0 < outcome.outcome.seconds <= card.wall_seconds <= (after_ns - before_ns) / 1e9
    lags = (card.dispatch_lag_p50_seconds, card.dispatch_lag_p95_seconds, card.dispatch_lag_max_seconds)
    measured = sorted((r.sent_ns or 0) - r.scheduled_ns for r in outcome.results)
    assert lags[2] == measured[-1] / 1e9
    known_lags = [lag for lag in lags if lag is not None]
    assert len(known_lags) == 3
    assert known_lags == sorted(known_lags)
    assert card.loop_lag_max_seconds is not None
    assert card.loop_lag_p50_seconds is not None
    assert card.client_cpu_seconds > 0
    assert card.client_cpu_share == pytest.approx(card.client_cpu_seconds / card.wall_seconds)
    assert "CLOCK_MONOTONIC" in card.clock
    assert card.cpu_affinity
    assert card.gc_collections == 0
    assert card.gc_pause_max_seconds == 0


def test_a_loop_that_is_held_up_shows_in_the_card() -> None:
    def hold_up(done: int, total: int) -> None:
        time.sleep(0.1)

    wanted = [
        RequestSpec(key=f"r{n}", prompt_token_ids=[1], max_tokens=1, scheduled_seconds=0.005 * n) for n in range(140)
    ]
    with StampedServer() as server:
        card = load(server.base_url, wanted, None, on_progress=hold_up).card
    # on_progress runs inside the beat, so the hold shows in what is dispatched late.
    assert card.dispatch_lag_max_seconds is not None
    assert card.dispatch_lag_max_seconds > 0.05


@pytest.mark.parametrize("frozen", [False, True])
def test_the_collector_is_off_in_the_phase_and_as_before_afterwards(frozen: bool) -> None:
    states: list[bool] = []
    gc.unfreeze()
    if frozen:
        gc.freeze()
    with StampedServer(lambda body: Script(first_seconds=0.6)) as server:
        assert gc.isenabled()
        load(server.base_url, requests(1), on_progress=lambda done, total: states.append(gc.isenabled()))
    assert states == [False]
    assert gc.isenabled()
    assert (gc.get_freeze_count() > 0) == frozen


def test_a_collection_inside_the_phase_is_seen() -> None:
    with StampedServer(lambda body: Script(gap_seconds=0.3)) as server:
        card = load(server.base_url, requests(1), on_progress=lambda done, total: gc.collect() and None).card
    assert card.gc_collections == 1
    assert card.gc_pause_max_seconds > 0


def test_progress_is_reported_seldom_and_with_the_right_numbers() -> None:
    seen: list[tuple[int, int, float]] = []
    with StampedServer(lambda body: Script(gap_seconds=0.3)) as server:
        load(server.base_url, requests(2), on_progress=lambda done, total: seen.append((done, total, time.monotonic())))
    assert [total for _, total, _ in seen] == [2] * len(seen)
    assert seen
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert all(later[2] - earlier[2] >= 0.5 for earlier, later in itertools.pairwise(seen))


def test_a_callback_that_fails_ends_the_phase_with_its_error() -> None:
    def fail(done: int, total: int) -> None:
        raise RuntimeError("planted")

    with StampedServer(lambda body: Script(ending="stall")) as server:
        with pytest.raises(RuntimeError, match="planted"):
            load(server.base_url, requests(2), on_progress=fail)
        assert server.wait_for_connections(0) == 0
        assert len(server.served) == 1, "nothing is sent any more"


def test_a_cancelled_phase_leaves_no_connection_and_sends_nothing_more() -> None:
    with StampedServer(lambda body: Script(ending="stall")) as server:
        spec = spec_for(server.base_url, 2)

        async def cancel() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(run_load(spec, requests(5), lambda result: None), 0.3)

        asyncio.run(cancel())
        assert server.wait_for_connections(0) == 0
        assert len(server.served) == 2


def test_requests_in_flight_are_looked_over_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[list[object]] = []
    sweep, look_at = dispatch.Phase._sweep, dispatch.Phase._look_at

    def spy_sweep(self: Any, now_ns: int) -> None:
        looked.append([])
        sweep(self, now_ns)

    def spy_look_at(self: Any, exchange: Any, *rest: Any) -> None:
        looked[-1].append(exchange.key)
        look_at(self, exchange, *rest)

    monkeypatch.setattr(dispatch.Phase, "_sweep", spy_sweep)
    monkeypatch.setattr(dispatch.Phase, "_look_at", spy_look_at)
    with StampedServer(lambda body: Script(gap_seconds=0.6)) as server:
        outcome = load(server.base_url, requests(40), 40)
    assert all(result.error is None for result in outcome.results)
    assert max(map(len, looked)) <= 4, "of 40, over ten beats"
    assert {key for keys in looked for key in keys} == {result.key for result in outcome.results}


def test_much_buffered_is_read_during_the_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "BUFFER_LIMIT_BYTES", 2000)
    read_during: list[int] = []
    with StampedServer(lambda body: Script(gap_seconds=0.03)) as server:
        read_next = dispatch.Phase._read_next

        def spy(self: Any) -> None:
            read_during.append(self._finished)
            read_next(self)

        monkeypatch.setattr(dispatch.Phase, "_read_next", spy)
        outcome = load(server.base_url, requests(12))
    assert read_during[0] < 12, "some answers were read before the last had come"
    assert len(read_during) == 12
    assert all(result.error is None for result in outcome.results)


def test_plain_asyncio_gives_the_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    with StampedServer(by_request({1: Script(ending="reset_in_stream"), 2: Script(status=400)})) as server:
        with_uvloop = load(server.base_url, requests(4), 2)
        monkeypatch.setattr(client, "_loop_factory", lambda: asyncio.new_event_loop)
        without = load(server.base_url, requests(4), 2)
    for one, other in zip(with_uvloop.results, without.results, strict=True):
        assert one.output_token_ids == other.output_token_ids
        assert (one.error and error_of(one)) == (other.error and error_of(other))


# Specifications that cannot be run.


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://10.0.0.1:8000", "10.0.0.1"),
        ("http://example.org:80", "on this host only"),
        ("http://localhost:8000", "127.0.0.1:PORT"),
        ("https://127.0.0.1:8000", "https"),
        ("http://127.0.0.1", "no port"),
        ("http://127.0.0.1:99999", "127.0.0.1:PORT"),
        ("http://127.0.0.1:8000/v1", "/v1"),
        ("http://0.0.0.0:8000", "0.0.0.0"),
        ("nonsense", "nonsense"),
    ],
)
def test_only_an_engine_on_this_host_is_loaded(url: str, said: str) -> None:
    with pytest.raises(UnusableInput, match=said):
        load(url, requests(1))


@pytest.mark.parametrize(
    ("wanted", "fields", "said"),
    [
        ([], {}, "at least one request"),
        (requests(1) * 2, {}, "'r0' stands twice"),
        (requests(1), {"concurrency": 0}, "concurrency=0"),
        (requests(1), {"concurrency": None}, "scheduled_seconds=None"),
        (requests(1, scheduled_seconds=1.0), {}, "in a closed loop"),
        (requests(1, scheduled_seconds=-1.0), {"concurrency": None}, "scheduled_seconds=-1.0"),
        (requests(1, scheduled_seconds=float("nan")), {"concurrency": None}, "scheduled_seconds=nan"),
        (requests(1, cache_salt=""), {}, "cache_salt"),
        (requests(1, prompt_text="a"), {}, "exactly one of"),
        ([RequestSpec(key="a", max_tokens=1)], {}, "exactly one of"),
        ([RequestSpec(key="a", prompt_text="", max_tokens=1)], {}, "empty prompt"),
        ([RequestSpec(key="a", prompt_text="b", max_tokens=0)], {}, "max_tokens=0"),
        (requests(1), {"idle_timeout_seconds": 0.0}, "idle_timeout_seconds=0.0"),
        (requests(1), {"request_timeout_seconds": float("nan")}, "request_timeout_seconds=nan"),
    ],
)
def test_a_specification_that_cannot_be_run_is_refused(
    wanted: list[RequestSpec], fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(UnusableInput, match=said):
        load("http://127.0.0.1:9", wanted, **fields)


def test_more_connections_than_open_files_are_refused_before_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 512))
    with pytest.raises(UnusableInput, match="hard limit here is 512"):
        load("http://127.0.0.1:9", requests(1000), 1000)
