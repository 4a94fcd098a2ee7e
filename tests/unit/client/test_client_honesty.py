"""The honesty card's arithmetic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtrial.host.load.honesty import HonestyMeter, cpu_ticks, quantile, steal_share

PROC_STAT = "cpu  100 20 30 800 40 0 10 {steal} 50 0\ncpu0 50 10 15 400 20 0 5 0 25 0\nintr 5\n"


def test_quantiles_interpolate_between_order_statistics() -> None:
    assert quantile([4, 1, 3, 2], 0.5) == 2.5
    assert quantile([7], 0.95) == 7
    assert quantile([], 0.5) is None


@given(st.lists(st.integers(0, 10**9), min_size=1), st.floats(0, 1))
def test_a_quantile_lies_within_its_values(values: list[int], share: float) -> None:
    found = quantile(values, share)
    assert found is not None
    assert min(values) <= found <= max(values)


def test_stolen_time_is_a_share_of_all_cpu_time_without_counting_guests_twice() -> None:
    before, after = cpu_ticks(PROC_STAT.format(steal=0)), cpu_ticks("cpu 150 20 30 800 40 0 10 50 50 0\n")
    assert before == (0, 1000)
    assert after == (50, 1100)
    assert steal_share(before, after) == 0.5


@pytest.mark.parametrize("text", ["", "cpu 1 2 3 4\n", "cpu a b c d e f g h\n", "intr 1 2 3 4 5 6 7 8 9\n"])
def test_an_unreadable_proc_stat_is_unknown_not_zero(text: str) -> None:
    assert cpu_ticks(text) is None
    assert steal_share(None, (1, 2)) is None
    assert steal_share((0, 5), (0, 5)) is None


def test_the_most_connections_open_at_once_are_counted_not_all_ever() -> None:
    meter = HonestyMeter()
    meter.start()
    for step in ("+", "+", "-", "+", "-", "-", "+"):
        meter.connected() if step == "+" else meter.disconnected()
    meter.dispatched(2_000_000)
    card = meter.finish()
    assert (card.connections_opened, card.connections_max_open) == (4, 2)
    assert card.dispatch_lag_p95_seconds == 0.002
    assert card.loop_lag_p50_seconds is None
