"""The load client's deadlock watchdog on a stand-in engine: it fires on a deadlock, not on a slow engine."""

from typing import Any

from kvtrial.host.client import run_load_blocking
from kvtrial.record.load import LoadSpec, RequestResult, RequestSpec


def results_of(engine: Any, count: int, deadlock_seconds: float) -> dict[str, RequestResult]:
    spec = LoadSpec(
        base_url=f"http://127.0.0.1:{engine.port}",
        model="tiny",
        concurrency=3,
        idle_timeout_seconds=60,
        request_timeout_seconds=120,
        deadlock_seconds=deadlock_seconds,
    )
    found: list[RequestResult] = []
    requests = [
        RequestSpec(key=str(n), prompt_token_ids=[40 + n] * 64, max_tokens=2, cache_salt="s") for n in range(count)
    ]
    run_load_blocking(spec, requests, found.append)
    return {result.key: result for result in found}


def test_a_deadlocked_engine_ends_the_phase(launch: Any) -> None:
    engine = launch("control", STANDIN_FAULT="deadlock_after:2")
    results = results_of(engine, 8, deadlock_seconds=0.5)
    assert len(results) == 8
    failed = [result for result in results.values() if result.error is not None]
    assert {result.error.error_class for result in failed if result.error} == {"deadlock"}
    assert 2 <= 8 - len(failed) < 8
    assert any(result.sent_ns is None for result in failed), "the last ones were not sent any more"


def test_an_engine_that_takes_longer_than_the_limit_for_a_token_is_left_to_its_work(launch: Any) -> None:
    # A prompt takes some 1.2 s, in silence; the watchdog asks after 0.15 s, and would fire 0.3 s later.
    engine = launch("control", STANDIN_SLOWDOWN="300", STANDIN_NOISE="0")
    results = results_of(engine, 3, deadlock_seconds=0.3)
    assert [result.error for result in results.values()] == [None] * 3
