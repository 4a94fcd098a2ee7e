"""How an open loop went, from its results: the span, what was left at its end, and the mean TTFT of its halves."""

import pytest
from kvtrial.host.phases import PhaseFacts
from kvtrial.record.load import RequestError, RequestResult


def result(due: float, ttft: float | None, ended: float | None = None) -> RequestResult:
    first = None if ttft is None else int((due + ttft) * 1e9)
    return RequestResult(
        key=f"k{due}", prompt_sha256="ab", prompt_tokens=8, scheduled_ns=int(due * 1e9), sent_ns=None,
        first_byte_ns=first, first_token_ns=first, last_token_ns=None if ended is None else int(ended * 1e9),
        token_gaps_us=[], output_token_ids=[], answer_sha256=None, output_tokens=1, cached_tokens=None,
        finish_reason=None,
        error=None if ttft is not None else RequestError(error_class="idle_timeout", detail="silent"),
    )  # fmt: skip


def test_a_queue_that_grows_shows_in_the_halves_and_in_the_drain():
    facts = PhaseFacts()
    for due in range(10):
        facts.add(result(due, 0.2 + 0.5 * due, due + 0.3 + 0.5 * due))
    loop = facts.open_loop()
    assert loop is not None
    assert loop.span_seconds == 9
    assert loop.drain_seconds == pytest.approx(0.3 + 4.5)
    assert loop.ttft_mean_first_half_seconds == pytest.approx(0.2 + 0.5 * 2)
    assert loop.ttft_mean_second_half_seconds == pytest.approx(0.2 + 0.5 * 7)


def test_results_come_in_order_of_completion_and_a_failed_one_has_no_ttft():
    facts = PhaseFacts()
    facts.add(result(3, 0.1, 3.2))
    facts.add(result(4, None))
    facts.add(result(0, 0.4, 3.9))
    loop = facts.open_loop()
    assert loop is not None
    assert (loop.span_seconds, loop.drain_seconds) == (4, 0)
    assert loop.ttft_mean_first_half_seconds == pytest.approx(0.4)
    assert loop.ttft_mean_second_half_seconds == pytest.approx(0.1)


def test_without_a_first_token_nothing_is_said():
    facts = PhaseFacts()
    facts.add(result(0, None))
    assert facts.open_loop() is None
