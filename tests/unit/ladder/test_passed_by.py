"""The gaps in which a request was passed by, held against their definition: each gap asked of each other request."""

from bisect import bisect_left, bisect_right
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from kvtrial.record.pressure import EDGE_PARTS, WAIT_MEDIANS, RequestTimes, passed_by_others, went_on

MEDIAN_US = 8


def times(number, first_us, gaps):
    first = 1000 * first_us
    return RequestTimes(f"load/{number}", 0, 0, first, first + 1000 * sum(gaps), gaps)


def as_defined(requests, median_ns):
    """Quadratic: every gap against every token of every other request."""
    tokens = []
    for one in requests:
        at = [one.first_token_ns]
        for gap in one.gaps_us:
            at.append(at[-1] + 1000 * gap)
        tokens.append(at)
    tokens = [one for one in tokens if len(one) > 1]
    everything = sorted(token for one in tokens for token in one)
    edge, waits, passed_by = median_ns // EDGE_PARTS, 0, 0
    for own in tokens:
        for low, high in pairwise(own):
            if not any(low + edge < token < high - edge for token in everything):
                continue
            quarter, middle = (high - low) // 4, (low + high) // 2
            amid = bisect_right(everything, high - quarter) - bisect_left(everything, low + quarter)
            waits += high - low > WAIT_MEDIANS * median_ns and went_on(amid, high - low, median_ns)
            asked = [
                any(low + edge < token < high - edge for token in other)
                for other in tokens
                if other is not own
                and other[0] <= low + edge < other[-1]
                and not any(a <= middle < b and b - a > WAIT_MEDIANS * median_ns for a, b in pairwise(other))
            ]
            passed_by += 2 * sum(asked) >= len(asked)
    return waits, passed_by


steps = st.lists(
    st.one_of(st.integers(MEDIAN_US - 3, MEDIAN_US + 3), st.integers(0, 3 * MEDIAN_US), st.integers(70, 400)),
    max_size=25,
)
phases = st.lists(st.tuples(st.integers(0, 300), steps), max_size=7)


@settings(max_examples=400, deadline=None)
@given(phases, st.sampled_from([1, 3, 1000, 1000 * MEDIAN_US, 3001 * MEDIAN_US]))
def test_it_is_what_each_gap_asked_of_each_other_request_gives(phase, median_ns):
    requests = [times(number, first, gaps) for number, (first, gaps) in enumerate(phase)]
    assert passed_by_others(requests, median_ns) == as_defined(requests, median_ns)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.lists(st.sampled_from([1, 1, 1, 1, 2, 15, 40]), max_size=40)), max_size=9)
)
def test_it_is_so_where_all_get_their_tokens_in_the_same_steps(phase):
    requests = [times(n, MEDIAN_US * at, [MEDIAN_US * gap for gap in gaps]) for n, (at, gaps) in enumerate(phase)]
    assert passed_by_others(requests, 1000 * MEDIAN_US) == as_defined(requests, 1000 * MEDIAN_US)
