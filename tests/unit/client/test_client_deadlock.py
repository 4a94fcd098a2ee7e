"""The deadlock watchdog: it ends what hangs in a stuck engine, and leaves a slow one alone."""

import time
from typing import Any

import pytest
from kvtrial.host.load.deadlock import queue_of
from kvtrial.record.load import RequestSpec
from loading import load
from stamped_server import Script, StampedServer

STUCK = "vllm:num_requests_running 0.0\nvllm:num_requests_waiting 2.0\n"
BUSY = "vllm:num_requests_running 1.0\nvllm:num_requests_waiting 2.0\n"
MUTE = Script(first_seconds=60.0)
STALL = Script(ending="stall")
LIMITS: dict[str, Any] = {"deadlock_seconds": 0.2, "idle_timeout_seconds": 0.6}


def requests(count: int) -> list[RequestSpec]:
    return [RequestSpec(key=f"r{n}", prompt_token_ids=[n], max_tokens=3) for n in range(count)]


def planted(server: StampedServer, page: str, health: int = 200) -> None:
    server.pages |= {"/health": (health, ""), "/metrics": (200, page)}


@pytest.mark.parametrize("script", [MUTE, STALL], ids=["before the first token", "in the stream"])
@pytest.mark.parametrize("concurrency", [2, None])
def test_a_stuck_engine_ends_every_request_with_its_class(script: Script, concurrency: int | None) -> None:
    due = {} if concurrency else {"scheduled_seconds": 0.0}
    wanted = [RequestSpec(key=f"r{n}", prompt_token_ids=[n], max_tokens=3, **due) for n in range(5)]
    with StampedServer(lambda body: script) as server:
        planted(server, STUCK)
        results = load(server.base_url, wanted, concurrency, deadlock_seconds=0.4).results
    assert [result.error and result.error.error_class for result in results] == ["deadlock"] * 5
    sent = [result for result in results if result.sent_ns is not None]
    assert len(sent) == (concurrency or 5), "what was not sent yet is not sent into a deadlock"
    for result in results:
        assert result.error is not None
        assert "/health answers 200, yet 0 requests run and 2 wait" in result.error.detail
        assert result.error.detail.startswith("not sent") == (result.sent_ns is None)


@pytest.mark.parametrize(
    ("page", "health"), [(BUSY, 200), (STUCK, 503), (STUCK.replace("2.0", "0.0"), 200), ("", 200)],
    ids=["it runs one", "it is not healthy", "nothing waits", "it does not say"],
)  # fmt: skip
def test_an_engine_that_is_merely_slow_or_dead_is_no_deadlock(page: str, health: int) -> None:
    with StampedServer(lambda body: MUTE) as server:
        planted(server, page, health)
        results = load(server.base_url, requests(2), 2, **LIMITS).results
        assert "/health" in server.asked, "the watchdog did ask"
    assert [result.error and result.error.error_class for result in results] == ["idle_timeout"] * 2


def test_a_deadlock_that_resolves_itself_is_none() -> None:
    with StampedServer(lambda body: Script(first_seconds=0.6)) as server:
        planted(server, STUCK)
        # 0.6 s of silence: asked from 0.4 s on, and not stuck for as long as 0.8 s.
        results = load(server.base_url, requests(2), 1, deadlock_seconds=0.8).results
        assert "/metrics" in server.asked
    assert [result.error for result in results] == [None] * 2


def test_an_engine_that_streams_is_never_asked() -> None:
    with StampedServer(lambda body: Script(token_groups=((1,),) * 20, gap_seconds=0.05)) as server:
        planted(server, STUCK)
        # Longer than the 0.8 s of silence after which it would be asked.
        results = load(server.base_url, requests(2), 2, deadlock_seconds=1.6).results
        assert server.asked == []
    assert [result.error for result in results] == [None] * 2


def test_a_server_without_pages_keeps_its_timeouts_and_the_phase_ends() -> None:
    with StampedServer(lambda body: MUTE) as server:
        before = time.monotonic()
        results = load(server.base_url, requests(1), 1, **LIMITS).results
        assert time.monotonic() - before < 30
    assert results[0].error is not None
    assert results[0].error.error_class == "idle_timeout"


@pytest.mark.parametrize(
    ("page", "queue"),
    [
        (
            'vllm:num_requests_running{engine="0",model_name="m"} 3.0\nvllm:num_requests_waiting{engine="0"} 1e1\n',
            (3, 10),
        ),
        ("vllm:num_requests_running 1\nvllm:num_requests_waiting 2\n", (1, 2)),
        (
            'vllm:num_requests_running{engine="0"} 1\nvllm:num_requests_running{engine="1"} 1\n'
            'vllm:num_requests_waiting{engine="0"} 0\nvllm:num_requests_waiting_by_reason{reason="capacity"} 5\n',
            (2, 0),
        ),
        ("vllm:num_requests_running 1\n", None),
        ("vllm:num_requests_running x\nvllm:num_requests_waiting 2\n", None),
        ("# HELP vllm:num_requests_running 1\n<html>", None),
    ],
)
def test_the_queue_is_read_from_the_page(page: str, queue: tuple[float, float] | None) -> None:
    assert queue_of(page) == queue
