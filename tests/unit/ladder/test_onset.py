"""The predicted onset: arithmetic against a replay of the scheduler's rules, and against what a real engine did."""

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kvtrial.analysis import onset
from kvtrial.analysis.onset import (
    LEAST_LEVELS,
    MOST_RATIO,
    Length,
    blocks_at_end,
    ladder_levels,
    onset_words,
    predict_onset,
    refuse_ladder,
    replay_preemptions,
)
from kvtrial.record.errors import UnusableInput
from kvtrial.record.plan import OnsetPlan

BLOCK = 32
POOL = 64


@pytest.mark.parametrize(
    ("prompt", "answer", "onset"),
    [(256, 256, 5), (64, 448, 5), (448, 64, None)],
    ids=["256 in, 256 out", "64 in, 448 out", "448 in, 64 out only queues"],
)
def test_the_onset_of_fixed_lengths_is_the_one_that_the_cpu_engine_showed(prompt, answer, onset):
    found = predict_onset([Length(prompt, answer)] * 12, POOL, BLOCK)
    assert (found.low, found.high) == (onset, onset)
    assert found.last_safe == 4
    assert found.kind == ("exact" if onset else "never")


def test_the_onset_on_a_gpu_lies_where_it_was_predicted():
    # 500 in, 600 out over 1,023 blocks of 16: 12 in flight had no preemption, 16 had 7.
    found = predict_onset([Length(500, 600)] * 64, 1023, 16)
    assert (found.last_safe, found.low) == (14, 15)


LONG = Length(2048, 96)
"""Of which 44 fit into 6,000 blocks of 16 to their end."""


@pytest.mark.parametrize(("batched", "onset"), [(8192, ("exact", 45, 45)), (2048, ("range", 45, 46))])
def test_where_prompts_come_in_over_many_steps_the_prediction_holds_what_the_replays_do(batched, onset):
    """A prompt a step: the first answers end before the last have grown, and 45 fit after all."""
    found = predict_onset([LONG] * 64, 6000, 16, batched_tokens=batched)
    assert (found.kind, found.low, found.high, found.last_safe) == (*onset, 44)
    assert predict_onset([LONG] * 64, 6000, 16).kind == "range"  # the engine chooses 2,048 at least
    replayed = {
        level: [
            replay_preemptions([LONG] * 64, level, 6000, 16, None, turnaround, 0, batched, first)
            for turnaround in (0, 2, 6)
            for first in (0, 1)
        ]
        for level in range(44, 48)
    }
    assert not any(replayed[44]) and all(replayed[found.high])
    if found.kind == "range":
        assert not all(replayed[45])
        assert "45 prompts come in over up to 45 steps (max-num-batched-tokens 2048)" in onset_words(found)


def test_prompts_that_come_in_one_after_another_for_longer_than_an_answer_takes_never_preempt():
    found = predict_onset([Length(8000, 16)] * 30, 6000, 16, batched_tokens=2048)
    assert found.kind == "never" and "come in over up to 44 steps" in found.why
    assert predict_onset([Length(8000, 16)] * 30, 6000, 16, batched_tokens=200_000).low == 12


@given(lengths := st.builds(Length, st.integers(1, 300), st.integers(1, 300)), st.integers(2, 60), st.integers(32, 900))
@settings(max_examples=60, deadline=None)
def test_up_to_the_last_safe_level_no_budget_of_a_step_preempts(length, pool, budget):
    assume(blocks_at_end(length, 16) <= pool)
    found = predict_onset([length] * 30, pool, 16, batched_tokens=budget)
    for first in (0, 1):
        assert replay_preemptions([length] * 30, found.last_safe, pool, 16, None, 0, 0, budget, first) == 0
    # Exact is said of prompts that come in within one step, as many as are in flight.
    if found.kind == "exact":
        sent = [length] * max(30, found.low)
        assert replay_preemptions(sent, found.low, pool, 16, None, 0, 0, budget, 0) > 0


@pytest.mark.parametrize(("pool", "high"), [(84, 6), (80, 5)])
def test_an_onset_is_exact_only_if_a_first_request_one_step_early_does_not_move_it(pool, high):
    """256 in and 258 out take a 17th block for the last token alone: of 5 that lack one block the first has gone."""
    early = [replay_preemptions([Length(256, 258)] * 5, 5, pool, BLOCK, early_steps=alone) for alone in (0, 1)]
    found = predict_onset([Length(256, 258)] * 8, pool, BLOCK, 16, 4096)
    assert (found.low, found.high, found.last_safe) == (5, high, 4)
    assert (found.kind == "exact") == all(early)


@pytest.mark.parametrize(
    ("length", "pool", "block"),
    [(Length(256, 33), 83, 32), (Length(64, 16), 45, 16)],
    ids=["measured 10 to 16 on the CPU engine", "six before four"],
)
def test_an_onset_is_not_exact_where_it_depends_on_who_is_early(length, pool, block):
    found = predict_onset([length] * 20, pool, block, 64, 8192)
    assert (found.kind, found.low) == ("range", found.last_safe + 1)
    assert found.high > found.low
    if pool == 83:
        assert found.low <= 10 and found.high >= 16 and "it depends on who comes first" in found.why


@given(lengths, st.integers(1, 60), st.sampled_from([16, 32]), st.integers(0, 40), st.integers(0, 4))
@settings(max_examples=150, deadline=None)
def test_where_an_onset_is_exact_it_does_not_matter_who_is_early(length, pool, block, early, steps):
    assume(blocks_at_end(length, block) <= pool)
    found = predict_onset([length] * 60, pool, block, batched_tokens=100_000)
    assume(found.kind == "exact")
    for level, preempts in ((found.last_safe, False), (found.low, True)):
        sent = [length] * level
        assert (replay_preemptions(sent, level, pool, block, early_steps=steps, early=early) > 0) == preempts


def test_half_of_the_answer_is_the_wrong_measure():
    found = predict_onset([Length(256, 256)] * 12, POOL, BLOCK)
    assert found.last_safe != POOL * BLOCK // (256 + 128)


@given(lengths, st.integers(1, 40), st.sampled_from([16, 32, 128]), st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_fixed_lengths_are_safe_up_to_the_prediction_and_not_beyond(length, pool, block, more):
    assume(blocks_at_end(length, block) <= pool)
    found = predict_onset([length] * 60, pool, block)
    requests = [length] * min(60, 2 * (found.last_safe + 1 + more))
    assert replay_preemptions(requests, found.last_safe, pool, block) == 0
    beyond = found.last_safe + 1 + more
    assume(beyond <= len(requests))
    assert (replay_preemptions(requests, beyond, pool, block) > 0) == (found.kind != "never")
    assert found.kind == "never" or found.low == found.last_safe + 1


@given(st.lists(lengths, min_size=2, max_size=12), st.integers(20, 60), st.integers(0, 5), st.integers(0, 5))
@settings(max_examples=150, deadline=None)
def test_below_the_range_no_order_and_no_timing_preempts(requests, pool, turnaround, stagger):
    assume(max(blocks_at_end(length, 16) for length in requests) <= pool)
    found = predict_onset(requests, pool, 16)
    safe = min(found.last_safe, len(requests))
    assert replay_preemptions(requests[::-1], safe, pool, 16, None, turnaround, stagger) == 0
    if found.kind == "range":
        assert found.last_safe < found.low <= found.high
        assert found.high <= len(requests) or len(set(requests)) == 1


@given(st.lists(lengths, min_size=1, max_size=12), st.integers(20, 60), st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_a_replay_serves_every_token_whatever_is_preempted(requests, pool, in_flight):
    assume(max(blocks_at_end(length, 16) for length in requests) <= pool)
    assert replay_preemptions(requests, in_flight, pool, 16) >= 0  # it ends: nobody is preempted for good


def test_fewer_sequences_than_fit_can_only_queue():
    found = predict_onset([Length(256, 256)] * 12, POOL, BLOCK, max_running=4)
    assert found.kind == "never"
    assert "max-num-seqs lets in 4" in found.why
    assert "no preemption is predicted" in onset_words(found)
    assert predict_onset([Length(256, 256)] * 12, POOL, BLOCK, max_running=5).kind == "exact"


RANDOM = [Length(128, answer) for answer in (64, 448, 300, 200, 100, 400, 128, 256)]


@pytest.mark.parametrize("count", [4, 5])
def test_where_all_requests_run_at_once_they_are_too_few_and_nobody_is_said_to_queue(count):
    found = predict_onset(RANDOM[:count], POOL, BLOCK)
    assert found.kind == "never" and "queue" not in found.why
    assert f"all {count} are let in at once and fit, too few requests: set the size requests to" in found.why
    assert int(found.why.split("requests to ")[1].split()[0]) >= 2 * count
    assert predict_onset(RANDOM * 2, POOL, BLOCK).kind == "range"


@pytest.mark.parametrize(
    ("lengths", "running"),
    [([Length(448, 64), Length(440, 60)] * 4, None), (RANDOM, 4), (RANDOM[:4], 4)],
    ids=["long prompts", "few sequences", "as many sequences as requests"],
)
def test_where_more_requests_would_only_queue_they_are_not_asked_for(lengths, running):
    found = predict_onset(lengths, POOL, BLOCK, running)
    assert found.kind == "never" and found.why.endswith("so requests queue and none is preempted")


MANY = [Length(128, 64 + (97 * number) % 385) for number in range(160)]


def test_a_mix_that_fits_with_more_in_flight_than_are_replayed_is_not_said_to_queue(monkeypatch):
    """1,200 blocks hold any 36 to their end, and the prompts of 150; level by level 40 are replayed."""
    monkeypatch.setattr(onset, "REPLAYED_REQUESTS_MAX", 40)
    found = predict_onset(MANY, 1_200, 16, 2048, 200_000)
    assert (found.kind, found.low, found.last_safe, found.sure_end) == ("range", 37, 36, False)
    assert "queue" not in found.why and "with 40 a replay of the first 40 does not preempt" in found.why
    assert replay_preemptions(MANY, found.high, 1_200, 16, 2048, batched_tokens=200_000) > 0
    # Prompts alone need not fill the pool: a replay of all preempts with half as many in flight.
    assert found.high is not None and found.high <= 75
    assert predict_onset(MANY, 1_200, 16, 100, 200_000).high == found.high


@pytest.mark.parametrize("running", [52, 55, 58])
def test_a_mix_of_more_in_flight_than_are_replayed_level_by_level_that_only_queues_is_said_to(running, monkeypatch):
    """More are let in than the 50 that fit to their end on average, and yet no replay of all preempts."""
    monkeypatch.setattr(onset, "REPLAYED_REQUESTS_MAX", 40)
    found = predict_onset(MANY, 1_200, 16, running, 200_000)
    assert found.kind == "never" and found.why.endswith("so requests queue and none is preempted")
    assert replay_preemptions(MANY, len(MANY), 1_200, 16, running, batched_tokens=200_000) == 0


def test_one_length_of_which_more_fit_than_are_replayed_has_no_sure_end(monkeypatch):
    """The KV cache of a small model on a large GPU: level by level that would take minutes."""
    monkeypatch.setattr(onset, "replay_preemptions", lambda *_, **__: pytest.fail("replayed"))
    found = predict_onset([Length(512, 257)] * 64, 70_000, 16, None, 8192)
    assert (found.kind, found.low, found.high, found.sure_end) == ("range", 1459, 2918, False)
    assert found.why.endswith("so many are not replayed, and it may be up to 2918 and beyond")
    assert predict_onset([Length(512, 257)] * 64, 70_000, 16, 2048, 8192).high == 2048


def test_a_request_that_does_not_fit_alone_is_refused():
    with pytest.raises(UnusableInput, match="takes 70 blocks of 32 tokens at its end, the KV cache has 64"):
        predict_onset([Length(1000, 1241)], POOL, BLOCK)


@given(st.integers(1, 60), st.integers(0, 20), st.sampled_from(["exact", "range"]))
@settings(max_examples=100, deadline=None)
def test_a_ladder_holds_one_the_last_safe_level_and_the_onset_and_steps_finely_there(safe, width, kind):
    onset = _onset(kind, safe, width if kind == "range" else 0)
    levels = ladder_levels(onset, 10_000)
    refuse_ladder(levels, onset)
    assert levels[0] == 1 and len(levels) >= LEAST_LEVELS
    assert {safe, onset.low} <= set(levels)
    assert sum(level > onset.high for level in levels) >= 2
    near = [level for level in levels if level >= min(safe, max(1, safe - 1))]
    assert all(upper <= max(lower + 1, MOST_RATIO * lower) for lower, upper in itertools.pairwise(near))


@pytest.mark.parametrize(
    ("levels", "said"),
    [
        ([1, 2, 3, 4, 6, 7], "lacks 5: the last safe level is 4, the onset 5"),
        ([2, 3, 4, 5, 6, 7], "lacks 1, the single request"),
        ([1, 2, 3, 4, 5], "no 6 different levels"),
        ([1, 2, 3, 4, 5, 9], "steps from 5 to 9 near the onset"),
    ],
)
def test_a_ladder_that_can_not_show_the_onset_is_refused_with_one_that_can(levels, said):
    with pytest.raises(UnusableInput, match=said) as refused:
        refuse_ladder(levels, _onset("exact", 4, 0))
    assert "for example [1, 3, 4, 5, 6, 7]" in str(refused.value)


def test_a_ladder_needs_as_many_requests_as_its_highest_level():
    with pytest.raises(UnusableInput, match="goes to 7 requests in flight and sends 6"):
        ladder_levels(_onset("exact", 4, 0), 6)


def _onset(kind, safe, width):
    return OnsetPlan(kind=kind, low=safe + 1, high=safe + 1 + width, last_safe=safe, why="")


@pytest.mark.parametrize(("length", "blocks", "safe"), [(Length(128, 40), 43, 3), (Length(64, 40), 38, 5)])
def test_short_answers_of_one_length_whose_prompts_fit_into_a_step_are_exact(length, blocks, safe):
    found = predict_onset([length] * 24, blocks, 16, 64, 2048)
    assert (found.kind, found.low, found.high, found.last_safe) == ("exact", safe + 1, safe + 1, safe)
    assert "steps" not in found.why


@pytest.mark.parametrize(
    ("length", "blocks", "safe"), [(Length(128, 2), 43, 4), (Length(128, 12), 72, 8), (Length(64, 2), 38, 7)]
)
def test_answers_so_short_that_the_first_is_over_before_the_last_prompt_is_in_get_a_range(length, blocks, safe):
    """A first request that begins a step early takes the last free block, and the last prompt waits instead."""
    found = predict_onset([length] * 24, blocks, 16, 64, 2048)
    assert (found.kind, found.low, found.last_safe) == ("range", safe + 1, safe)
    assert found.high > found.low and "some begin up to 4 steps before the others" in found.why
