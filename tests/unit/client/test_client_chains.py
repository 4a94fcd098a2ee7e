"""Conversations: a later turn is due a pause after the end of the one before, in closed and open loops."""

from typing import Any

import pytest
from kvtrial.record.errors import UnusableInput
from kvtrial.record.load import RequestResult, RequestSpec
from loading import load
from stamped_server import Script, StampedServer


def turn(key: str, after: str | None = None, **fields: Any) -> RequestSpec:
    return RequestSpec(key=key, prompt_token_ids=[ord(key[0]), 1], max_tokens=3, after=after, **fields)


def end_of(result: RequestResult) -> int:
    """A moment no later than the end of the request."""
    return result.last_token_ns or result.first_byte_ns or result.scheduled_ns


@pytest.mark.parametrize("open_loop", [False, True])
def test_a_turn_waits_for_the_one_before_and_the_pause(open_loop: bool) -> None:
    first = {"scheduled_seconds": 0.0} if open_loop else {}
    wanted = [
        turn("a1", **first),
        turn("b1", **first),
        turn("a2", "a1", pause_seconds=0.15),
        turn("b2", "b1"),
        turn("a3", "a2", pause_seconds=0.05),
    ]
    with StampedServer(lambda body: Script(gap_seconds=0.02)) as server:
        results = load(server.base_url, wanted, None if open_loop else 2).results
    found = {result.key: result for result in results}
    assert [result.error for result in results] == [None] * 5
    for request in wanted:
        if request.after is not None:
            pause_ns = round(request.pause_seconds * 1e9)
            due = found[request.key].scheduled_ns
            assert due >= end_of(found[request.after]) + pause_ns
            assert (found[request.key].sent_ns or 0) >= due


def test_a_pause_does_not_hold_a_slot_and_a_later_turn_that_is_due_goes_first() -> None:
    wanted = [turn("a1"), turn("b1"), turn("c1"), turn("d1"), turn("a2", "a1", pause_seconds=0.05), turn("b2", "b1")]
    with StampedServer(lambda body: Script(gap_seconds=0.03)) as server:
        load(server.base_url, wanted, 1)
        order = [chr(served.body["prompt"][0]) for served in server.served]
        assert server.in_flight_max == 1
    # While a pauses b runs; b's second turn is due at once and takes the slot; by then a's is due as well.
    assert order == ["a", "b", "b", "a", "c", "d"] or order == ["a", "b", "a", "b", "c", "d"]


def test_an_open_loop_counts_a_later_turn_from_the_end_not_from_when_it_was_sent() -> None:
    wanted = [turn("a1", scheduled_seconds=0.0), turn("a2", "a1", pause_seconds=0.1)]
    with StampedServer() as server:
        first, second = load(server.base_url, wanted, None).results
    lag_ns = (second.sent_ns or 0) - second.scheduled_ns
    assert second.scheduled_ns >= end_of(first) + 100_000_000
    assert lag_ns >= 0


@pytest.mark.parametrize("script", [Script(status=500), Script(ending="reset_in_stream"), Script(ending="stall")])
def test_a_failed_turn_does_not_swallow_the_next(script: Script) -> None:
    with StampedServer(lambda body: script if body["prompt"][0] == ord("a") else Script()) as server:
        wanted = [turn("a1"), turn("b1", "a1"), turn("b2", "b1")]
        results = load(server.base_url, wanted, 1, idle_timeout_seconds=0.8).results
    assert [result.error is None for result in results] == [False, True, True]


def test_several_may_follow_one() -> None:
    with StampedServer() as server:
        results = load(server.base_url, [turn("a"), turn("b", "a"), turn("c", "a"), turn("d", "b")], 4).results
    assert [result.error for result in results] == [None] * 4
    assert min(result.scheduled_ns for result in results[1:]) >= end_of(results[0])


@pytest.mark.parametrize("concurrency", [1, 2, 7])
def test_many_conversations_all_end(concurrency: int) -> None:
    wanted = [
        turn(f"{chr(97 + c)}{t}", f"{chr(97 + c)}{t - 1}" if t else None, pause_seconds=0.01 * (t % 2) if t else 0.0)
        for t in range(5)
        for c in range(6)
    ]
    with StampedServer() as server:
        results = load(server.base_url, wanted, concurrency).results
        assert server.in_flight_max <= concurrency
    assert [result.error for result in results] == [None] * 30
    keys = [request.key for request in wanted]
    for request, result in zip(wanted, results, strict=True):
        if request.after is not None:
            before = results[keys.index(request.after)]
            assert result.scheduled_ns >= end_of(before) + round(request.pause_seconds * 1e9)


@pytest.mark.parametrize(
    ("wanted", "concurrency", "said"),
    [
        ([turn("a", "nobody")], 1, "'a' comes after a request that is not in this phase"),
        ([turn("a", "b"), turn("b")], 1, "'a' comes after 'b', which is not given before it"),
        ([turn("a", "a")], 1, "'a' comes after 'a'"),
        ([turn("a", "b"), turn("b", "a")], 1, "not given before"),
        ([turn("a", pause_seconds=1.0)], 1, "pause_seconds=1.0"),
        ([turn("a"), turn("b", "a", pause_seconds=-1.0)], 1, "pause_seconds=-1.0"),
        ([turn("a"), turn("b", "a", pause_seconds=float("nan"))], 1, "pause_seconds=nan"),
        (
            [turn("a", scheduled_seconds=0.0), turn("b", "a", scheduled_seconds=1.0)],
            None,
            "leave scheduled_seconds out",
        ),
    ],
)
def test_a_chain_that_cannot_be_walked_is_refused(
    wanted: list[RequestSpec], concurrency: int | None, said: str
) -> None:
    with pytest.raises(UnusableInput, match=said):
        load("http://127.0.0.1:9", wanted, concurrency)
