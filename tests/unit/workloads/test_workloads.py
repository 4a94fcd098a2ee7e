"""What a phase sends is a function of its plan: the same requests on every host and in both arms, as declared."""

import itertools
import math
import statistics
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtrial.host.workload import load_spec, phase_requests, stream_ids
from kvtrial.record.plan import (
    ClosedPlan,
    ConstantPlan,
    ConversationsPlan,
    Launch,
    LengthsPlan,
    Limits,
    MixPlan,
    PhasePlan,
    PoissonPlan,
    PromptPlan,
    RecordedPlan,
    TracePlan,
)
from kvtrial.record.protocol import Choice, Fixed, LogNormal, Uniform
from kvtrial.record.trace import TraceLine, read_trace, write_trace
from kvtrial.record.workload import draw_integer, draw_number, mix_hits, request_shapes

SALT = "kvtrial.p1.s"
NOTHING = Path("/nonexistent")


def prompt_set(name="set", count=8, tokens=20, suffix=2):
    return PromptPlan(
        name=name, seed=f"1/h/1/{name}", count=count, tokens=tokens, suffix_tokens=suffix, low_id=32, high_id=126
    )


def phase(workload=None, arrivals=None, **changes):
    plan = PhasePlan(
        name="p", block="b", prompts=None if workload else prompt_set(), indices=[] if workload else [0, 3, 0],
        salt=SALT, max_tokens=4 if workload is None or isinstance(workload, MixPlan) else 0, concurrency=2,
        kv_transfer_params=None, workload=workload, arrivals=arrivals,
    )  # fmt: skip
    return msgspec.structs.replace(plan, **changes)


def mix(requests, share, seed="s"):
    return MixPlan(
        returning=prompt_set("old", count=max(requests, 1)),
        fresh=prompt_set("new", count=max(requests, 1)),
        hit_share_percent=share, requests=requests, seed=seed,
    )  # fmt: skip


bounds = st.tuples(st.integers(1, 60), st.integers(0, 60)).map(lambda pair: (pair[0], pair[0] + pair[1]))
distributions = st.one_of(
    st.integers(1, 60).map(Fixed),
    bounds.map(lambda pair: Uniform(*pair)),
    st.tuples(bounds, st.floats(0.1, 1.5)).map(
        lambda drawn: LogNormal(sum(drawn[0]) // 2, drawn[1], drawn[0][0], drawn[0][1])
    ),
    st.lists(st.tuples(st.integers(1, 60), st.floats(0.1, 9)), min_size=1, max_size=4).map(
        lambda pairs: Choice([value for value, _ in pairs], [weight for _, weight in pairs])
    ),
)
lengths_plans = st.builds(
    LengthsPlan, name=st.just("l"), requests=st.integers(1, 20), prompt_tokens=distributions,
    output_tokens=distributions, shared_prefix_tokens=st.just(0), block_tokens=st.sampled_from([1, 16, 32]),
    shape_seed=st.text(max_size=4), token_seed=st.text(max_size=4), low_id=st.just(32), high_id=st.just(126),
)  # fmt: skip
talk_plans = st.builds(
    ConversationsPlan, name=st.just("t"), conversations=st.integers(1, 5), turns=st.builds(Fixed, st.integers(1, 4)),
    question_tokens=distributions, answer_tokens=distributions,
    pause_seconds=st.builds(Uniform, st.floats(0, 1), st.floats(1, 3)), shared_prefix_tokens=st.integers(0, 9),
    shape_seed=st.text(max_size=4), token_seed=st.text(max_size=4), low_id=st.just(32), high_id=st.just(126),
)  # fmt: skip
mixes = st.builds(mix, st.integers(1, 40), st.integers(0, 100), st.text(max_size=4))
made_workloads = st.one_of(st.none(), mixes, lengths_plans, talk_plans)
drawn_arrivals = st.one_of(
    st.none(),
    st.builds(ClosedPlan, st.integers(1, 9)),
    st.builds(ConstantPlan, st.floats(0.1, 100)),
    st.builds(PoissonPlan, st.floats(0.1, 100), st.text(max_size=4)),
)


@given(workload=made_workloads, arrivals=drawn_arrivals)
@settings(max_examples=60, deadline=None)
def test_the_same_plan_gives_the_same_requests_also_after_it_was_shipped(workload, arrivals):
    planned = phase(workload, arrivals)
    shipped = msgspec.json.decode(msgspec.json.encode(planned), type=PhasePlan)
    assert list(phase_requests(planned, NOTHING)) == list(phase_requests(shipped, NOTHING))


@given(workload=made_workloads, arrivals=drawn_arrivals)
@settings(max_examples=60, deadline=None)
def test_shapes_are_those_of_the_requests(workload, arrivals):
    planned = phase(workload, arrivals)
    requests = list(phase_requests(planned, NOTHING))
    shapes = list(request_shapes(planned))
    assert [
        (s.key, s.prompt_tokens, s.max_tokens, s.salt, s.scheduled_seconds, s.after, s.pause_seconds) for s in shapes
    ] == [
        (r.key, len(r.prompt_token_ids), r.max_tokens, r.cache_salt, r.scheduled_seconds, r.after, r.pause_seconds)
        for r in requests
    ]
    assert len({r.key for r in requests}) == len(requests)
    assert all(32 <= token <= 126 for r in requests for token in r.prompt_token_ids)
    for (a, x), (b, y) in itertools.combinations(zip(shapes, requests, strict=True), 2):
        if a.identity == b.identity:
            shorter = min(a.prompt_tokens, b.prompt_tokens)
            assert x.prompt_token_ids[:shorter] == y.prompt_token_ids[:shorter]
        if a.shared and a.shared == b.shared:
            assert x.prompt_token_ids[: a.shared_tokens] == y.prompt_token_ids[: b.shared_tokens]


@given(requests=st.integers(1, 300), share=st.integers(0, 100), seed=st.text(max_size=6))
@settings(max_examples=100, deadline=None)
def test_a_mix_has_exactly_its_share_of_returns_evenly_spread_and_each_prompt_once_in_order(requests, share, seed):
    planned = phase(mix(requests, share, seed))
    keys = [shape.key for shape in request_shapes(planned)]
    returning = [key for key in keys if key.startswith("old/")]
    fresh = [key for key in keys if key.startswith("new/")]
    assert len(keys) == requests
    assert len(returning) == round(share * requests / 100) == mix_hits(planned.workload)
    assert returning == [f"old/{number}" for number in range(len(returning))]
    assert fresh == [f"new/{number}" for number in range(len(fresh))]
    # Evenly: any stretch has its share of returns, to within one.
    for begin in range(0, requests, max(1, requests // 7)):
        stretch = keys[begin : begin + 10]
        here = sum(key.startswith("old/") for key in stretch)
        assert abs(here - len(stretch) * len(returning) / requests) <= 1


def test_a_return_of_a_mix_is_the_prompt_that_was_sent_before():
    workload = mix(8, 50)
    populate = phase(None, prompts=workload.returning, indices=list(range(8)))
    sent = {r.key: r.prompt_token_ids for r in phase_requests(populate, NOTHING)}
    returned = [r for r in phase_requests(phase(workload), NOTHING) if r.key.startswith("old/")]
    assert len(returned) == 4
    assert all(r.prompt_token_ids == sent[r.key] and r.cache_salt == SALT for r in returned)


@given(rate=st.floats(0.1, 1000), seed=st.text(max_size=5))
@settings(max_examples=30, deadline=None)
def test_arrivals_come_in_order_from_zero_on_and_at_their_mean_rate(rate, seed):
    lengths = LengthsPlan("l", 4000, Fixed(1), Fixed(1), 0, 1, "a", "b", 32, 126)
    for arrivals, tolerance in ((ConstantPlan(rate), 1e-9), (PoissonPlan(rate, seed), 0.08)):
        times = [shape.scheduled_seconds for shape in request_shapes(phase(lengths, arrivals))]
        assert times[0] == 0 and times == sorted(times)
        # 3999 exponential gaps: their mean is off by 1.6 % (one deviation).
        assert math.isclose(times[-1] / 3999, 1 / rate, rel_tol=tolerance)
        assert times == [shape.scheduled_seconds for shape in request_shapes(phase(lengths, arrivals))]


def test_a_poisson_process_has_gaps_as_scattered_as_long_and_another_seed_other_gaps():
    lengths = LengthsPlan("l", 4000, Fixed(1), Fixed(1), 0, 1, "a", "b", 32, 126)
    one, other = (
        [s.scheduled_seconds for s in request_shapes(phase(lengths, PoissonPlan(5.0, seed)))] for seed in ("x", "y")
    )
    gaps = [b - a for a, b in itertools.pairwise(one)]
    assert math.isclose(statistics.stdev(gaps), 0.2, rel_tol=0.1)
    assert one != other


@given(distribution=distributions, share=st.floats(0, 1, exclude_max=True))
@settings(max_examples=200, deadline=None)
def test_drawn_lengths_stay_within_their_bounds_and_grow_with_the_share(distribution, share):
    value = draw_integer(distribution, share)
    match distribution:
        case Fixed():
            assert value == distribution.value
        case Choice():
            assert value in distribution.values
        case _:
            assert distribution.least <= value <= distribution.most
            assert value <= draw_integer(distribution, min(share + 0.1, 0.9999999))
            assert distribution.least <= draw_number(distribution, share) <= distribution.most


def test_distributions_draw_what_their_names_say():
    shares = [(number + 0.5) / 10000 for number in range(10000)]
    assert statistics.mean(draw_integer(Uniform(1, 4), s) for s in shares) == pytest.approx(2.5)
    assert statistics.median(draw_integer(LogNormal(500, 1.0, 1, 100000), s) for s in shares) == pytest.approx(
        500, abs=1
    )
    logs = [math.log(draw_number(LogNormal(500.0, 0.7, 1.0, 1e9), s)) for s in shares]
    assert statistics.stdev(logs) == pytest.approx(0.7, rel=0.01)
    drawn = Counter(draw_integer(Choice([16, 64], [3, 1]), s) for s in shares)
    assert drawn == {16: 7500, 64: 2500}


@given(workload=lengths_plans)
@settings(max_examples=40, deadline=None)
def test_no_drawn_prompt_ends_at_the_edge_of_a_block(workload):
    if workload.block_tokens > 1:
        assert all(shape.prompt_tokens % workload.block_tokens for shape in request_shapes(phase(workload)))


@given(workload=talk_plans)
@settings(max_examples=40, deadline=None)
def test_a_turn_holds_the_turn_before_it_and_its_scripted_answer_and_follows_it(workload):
    requests = {r.key: r for r in phase_requests(phase(workload, ConstantPlan(2.0)), NOTHING)}
    for request in requests.values():
        if request.after is None:
            assert request.scheduled_seconds is not None and request.pause_seconds == 0
            continue
        before = requests[request.after]
        grown = len(request.prompt_token_ids) - len(before.prompt_token_ids)
        assert request.prompt_token_ids[: len(before.prompt_token_ids)] == before.prompt_token_ids
        assert grown > before.max_tokens
        assert request.scheduled_seconds is None
        assert workload.pause_seconds.least <= request.pause_seconds <= workload.pause_seconds.most
    assert [r.key for r in requests.values() if r.after is None] == [f"t/{n}.0" for n in range(workload.conversations)]


@given(seed=st.text(max_size=5), fewer=st.integers(0, 50), more=st.integers(0, 50))
def test_fewer_tokens_of_a_stream_are_the_beginning_of_more(seed, fewer, more):
    assert stream_ids(seed, fewer + more, 7, 900)[:fewer] == stream_ids(seed, fewer, 7, 900)


def test_a_closed_loop_has_its_concurrency_and_an_open_one_has_none():
    launch = Launch("control", [], {}, 1, "m", None)
    limits = Limits(60, 60, 60, 7, 8, 9, 60, 60, 0, 0, 0)
    for arrivals, concurrency in ((None, 2), (ClosedPlan(5), 5), (ConstantPlan(1.0), None), (RecordedPlan(1.0), None)):
        spec = load_spec(phase(mix(2, 50), arrivals), launch, limits)
        assert spec.concurrency == concurrency
        assert (spec.idle_timeout_seconds, spec.request_timeout_seconds, spec.deadlock_seconds) == (7, 8, 9)


texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
lines_of_a_trace = st.lists(
    st.builds(
        lambda form, **fields: TraceLine(**fields, **form),
        form=st.one_of(
            st.builds(dict, prompt=texts),
            st.builds(dict, prompt_token_ids=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8)),
            st.builds(dict, prompt_tokens=st.integers(1, 40)),
            st.builds(dict, prompt_tokens=st.integers(1, 40), prompt_id=texts),
        ),
        max_tokens=st.integers(1, 9),
        salt=st.none() | texts,
    ),
    min_size=1,
    max_size=12,
).flatmap(
    lambda lines: st.lists(st.floats(0, 1e9), min_size=len(lines), max_size=len(lines)).map(
        lambda times: [
            msgspec.structs.replace(line, time=time) for line, time in zip(lines, sorted(times), strict=True)
        ]
    )
)


def trace_phase(folder, lines, arrivals=None, **changes):
    digest = write_trace(folder / "t.jsonl.zst", lines)
    plan = TracePlan("mine", "t.jsonl.zst", digest, len(lines), 0.0, 4.0, "seed", 32, 126)
    return phase(plan, arrivals, **changes)


@given(lines=lines_of_a_trace)
@settings(max_examples=60, deadline=None)
def test_a_trace_round_trips_and_its_requests_are_its_lines(tmp_path_factory, lines):
    folder = tmp_path_factory.mktemp("trace")
    planned = trace_phase(folder, lines, RecordedPlan(4.0))
    assert list(read_trace(folder / "t.jsonl.zst", planned.workload.sha256)) == lines
    requests = list(phase_requests(planned, folder))
    shapes = list(request_shapes(planned, folder))
    for line, request, shape in zip(lines, requests, shapes, strict=True):
        assert request.prompt_text == line.prompt
        assert line.prompt_token_ids in (None, request.prompt_token_ids)
        assert line.prompt_tokens in (None, len(request.prompt_token_ids or []))
        assert request.max_tokens == line.max_tokens == shape.max_tokens
        assert request.scheduled_seconds == (line.time - lines[0].time) / 4.0
        assert shape.estimated == (line.prompt is not None)
        assert shape.key == request.key


@given(lines=lines_of_a_trace)
@settings(max_examples=60, deadline=None)
def test_salts_are_never_merged_within_a_phase_nor_between_pairs_and_phases(tmp_path_factory, lines):
    folder = tmp_path_factory.mktemp("trace")
    own = ["kvtrial.p1.s", "kvtrial.p2.s", "kvtrial.p1.s2"]
    seen = {}
    for salt in own:
        for line, request in zip(lines, phase_requests(trace_phase(folder, lines, salt=salt), folder), strict=True):
            assert request.cache_salt.startswith(salt)
            assert seen.setdefault(request.cache_salt, (salt, line.salt)) == (salt, line.salt)
    assert len(seen) == len(own) * len({line.salt for line in lines})


def test_lengths_of_one_prompt_id_begin_alike_and_others_do_not(tmp_path):
    lines = [
        TraceLine(prompt_tokens=10, prompt_id="a", max_tokens=1),
        TraceLine(prompt_tokens=30, prompt_id="a", max_tokens=1),
        TraceLine(prompt_tokens=30, prompt_id="b", max_tokens=1),
        TraceLine(prompt_tokens=30, max_tokens=1),
    ]
    short, long, other, nameless = (r.prompt_token_ids for r in phase_requests(trace_phase(tmp_path, lines), tmp_path))
    assert long[:10] == short
    assert len({tuple(long), tuple(other), tuple(nameless)}) == 3
