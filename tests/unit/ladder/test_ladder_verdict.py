"""A ladder's answer from synthetic records: onset beside prediction, regime, objectives, prices, and MOVED."""

import pytest
from build import PROTOCOLS
from kvtrial.analysis.answer import ten_lines
from kvtrial.analysis.ladder import (
    first_out,
    level_facts,
    onset_error,
    onset_errors,
    pattern_of,
    reach,
    starts_pattern_of,
)
from kvtrial.analysis.ledger import judge_moved, server_ledger
from kvtrial.analysis.levels import phases_of
from kvtrial.analysis.plan import for_host
from kvtrial.analysis.prices import Prices, Resources, costs, lacks_price, price_per_hour
from kvtrial.analysis.protocols import load_protocol, only_arms
from kvtrial.analysis.recommend import recommend
from kvtrial.analysis.regime import change_sentences, instead_sentences, recomputed_sentence
from kvtrial.analysis.report import build_report
from kvtrial.analysis.report.preemption import MEASURES
from kvtrial.analysis.report.words import Words
from kvtrial.analysis.verdict import conclude
from kvtrial.record.plan import OnsetPlan
from kvtrial.record.pressure import PressurePoint, RequestTimes, Stall, phase_ledger, request_ledger
from kvtrial.record.protocol import Objective
from ladder_build import LEVELS, REQUESTS, Shape, cpu_host, ladder_protocol, ladder_records, preempting
from msgspec.structs import replace


@pytest.fixture(scope="module")
def verdict():
    return conclude(ladder_protocol(), {"h1": ladder_records()}, "c1")


def compared(verdict, arm, metric):
    return next(c for c in verdict.comparisons if c.arm == arm and c.metric == metric)


def _waits(phase, starts_seconds, amid=200):
    """A level with stalls of 0.5 s that begin then, while others got so many tokens."""
    stalls = [Stall(f"load/{n}", round(1e9 * at), round(1e9 * (at + 0.5)), 9, amid)
              for n, at in enumerate(starts_seconds)]  # fmt: skip
    return replace(phase, seconds=4.0, ledger=replace(phase.ledger, stalls_at=stalls, stalls=len(stalls)))


@pytest.mark.parametrize(
    ("starts", "amid", "pattern"),
    [
        ((1.0, 1.2), 200, "one burst"),
        ((1.0, 3.2), 200, "continuous"),
        ((1.0,), 200, "not seen"),
        ((1.0, 1.2), 0, "not seen"),
    ],
    ids=["within a fifth", "all along", "one of two has no date", "the engine stood still"],
)
def test_preemptions_are_dated_by_where_the_waits_of_their_requests_begin(starts, amid, pattern):
    run = next(run for run in ladder_records() if run.arm == "base")
    level = next(phase for phase in run.phases if phase.name == "load_5")
    assert round(level.after["preemptions"] - level.before["preemptions"]) == 2
    assert starts_pattern_of([_waits(level, starts, amid)]) == pattern
    older = replace(level, ledger=replace(level.ledger, stalls_at=None))
    assert starts_pattern_of([older]) == "not seen"
    calm = next(phase for phase in run.phases if phase.name == "load_4")
    assert starts_pattern_of([calm]) == "none"


def test_the_service_says_which_of_the_two_it_dates(verdict):
    text = " ".join(verdict.ladder.regime)
    assert "preempted in one burst by the client's clock, their requests returned in one burst" in text


def test_an_arm_that_gave_nothing_moved_nothing():
    more_stall = ([0.11, 0.12, 0.13, 0.12, 0.11, 0.13], [0.10] * 6)
    microseconds = ([3e-5, 2e-5, 4e-5, 3e-5, 2e-5, 3e-5], [1e-5] * 6)
    assert judge_moved("a", "b", more_stall, microseconds).moved is False


def test_more_kv_memory_is_better_on_preemptions_by_a_difference_per_1000_requests(verdict):
    assert verdict.verdict == "BETTER", verdict.reason
    primary = compared(verdict, "more_kv", "preemptions_per_1000_requests")
    assert (primary.role, primary.effect_scale, primary.phase) == ("primary", "difference", "above_onset")
    # 2, 4 and 6 preemptions over three levels of 8 requests.
    assert primary.effect == pytest.approx(-1000 * 12 / 24)
    assert primary.moved is False


def test_fewer_sequences_take_the_preemptions_away_and_move_the_delay_into_the_queue(verdict):
    fewer = compared(verdict, "fewer_seqs", "preemptions_per_1000_requests")
    assert fewer.verdict == "BETTER"
    assert fewer.moved is True
    arm = next(arm for arm in verdict.ladder.arms if arm.arm == "fewer_seqs")
    assert arm.moved_note.startswith("MOVED: queueing took what preemption gave")


def test_of_a_fleet_it_is_said_on_which_hosts_the_delay_moved():
    def moving(arm, level, pair):
        return preempting("fewer_seqs" if arm == "more_kv" else arm, level, pair)

    hosts = {"alpha": ladder_records(), "beta": ladder_records(moving), "gamma": ladder_records()}
    advice = conclude(ladder_protocol(), hosts, "c1").recommendation
    assert advice.action == "do not adopt more_kv"
    assert advice.reason.endswith("the delay only moved; said of 1 of 3 hosts: beta")
    alone = conclude(ladder_protocol(), {"beta": hosts["beta"]}, "c1").recommendation
    assert alone.reason.endswith("the delay only moved")


def test_a_real_gain_is_not_called_moved():
    def gaining(arm, level, pair):
        """Fewer sequences queue a tenth of what they no longer stall."""
        shape = preempting(arm, level, pair)
        if arm == "fewer_seqs" and level > 4:
            return Shape(0, 0.01 * (level - 4), 0.0)
        return shape

    verdict = conclude(ladder_protocol(), {"h1": ladder_records(gaining)}, "c1")
    fewer = compared(verdict, "fewer_seqs", "preemptions_per_1000_requests")
    assert (fewer.verdict, fewer.moved) == ("BETTER", False)
    arm = next(arm for arm in verdict.ladder.arms if arm.arm == "fewer_seqs")
    assert arm.moved_note.startswith("not moved: a request stalls")


@pytest.mark.parametrize(
    ("queue", "moved"),
    [(0.0, False), (0.02, False), (0.2, True), (0.5, True)],
    ids=["nothing taken", "a tenth taken", "all of it", "more than it"],
)
def test_moved_is_said_only_when_the_queue_took_as_much_as_preemption_gave(queue, moved):
    noise = [0.001, -0.001, 0.002, -0.002, 0.0005, -0.0005]
    stall = [0.0 + n for n in noise], [0.2 - n for n in noise]
    waits = [queue + 0.01 + n for n in noise], [0.01] * 6
    assert judge_moved("a", "b", stall, waits).moved is moved


# Seconds a request stalled and queued above the onset in six pairs of the default ladder on the real CPU engine (vLLM
# 0.32.0, two cores, 2026-11-29): the base, more KV memory, and fewer sequences, which never stalled.
REAL_BASE = [0.1037, 0.1092, 0.1217, 0.1075, 0.1044, 0.1053], [1.69e-5, 1.75e-5, 1.99e-5, 1.71e-5, 1.82e-5, 1.78e-5]
REAL_MORE_KV = [0.0050, 0.0046, 0.0020, 0.0022, 0.0020, 0.0019], [1.91e-5, 1.74e-5, 1.74e-5, 1.65e-5, 1.83e-5, 1.68e-5]
REAL_FEWER_SEQS = [0.0] * 6, [0.1559, 0.1584, 0.1708, 0.1522, 0.1494, 0.1537]


def moved_from_base(stall, queue):
    return judge_moved("arm", "base", (stall, REAL_BASE[0]), (queue, REAL_BASE[1]))


def test_a_gain_of_the_real_engine_is_not_called_moved_and_the_same_gain_with_a_planted_shift_is():
    stall, queue = REAL_MORE_KV
    assert moved_from_base(stall, queue).moved is False
    shifted = [wait + gave for wait, gave in zip(queue, REAL_BASE[0], strict=True)]
    assert moved_from_base(stall, shifted).moved is True
    half = [wait + gave / 2 for wait, gave in zip(queue, REAL_BASE[0], strict=True)]
    assert moved_from_base(stall, half).moved is False


def test_fewer_sequences_moved_the_delay_on_the_real_engine():
    found = moved_from_base(*REAL_FEWER_SEQS)
    assert found.moved is True
    assert found.taken_seconds_per_request > found.given_seconds_per_request > 0.1


def test_five_pairs_are_too_few_to_say_moved():
    assert judge_moved("a", "b", ([0.0] * 5, [0.2] * 5), ([0.3] * 5, [0.0] * 5)).moved is None


def test_the_measured_onset_stands_beside_the_predicted_one(verdict):
    ladder = verdict.ladder
    assert (ladder.onset_predicted, ladder.onset_measured, ladder.error_requests) == ([5, 5], 5, 0)
    assert ladder.onset_by_run == [5] * 6
    assert [level.concurrency for level in ladder.levels] == list(LEVELS)
    assert [level.preemptions for level in ladder.levels] == [0, 0, 0, 12, 24, 36]
    assert ladder.levels[0].requests == 6 * REQUESTS
    assert (
        "Preemption begins at 5 requests in flight, in every one of 6 runs (predicted 5, error 0 requests)."
        in ladder.regime
    )


@pytest.mark.parametrize(("measured", "error"), [(5, 0), (7, 0), (9, 0), (4, -1), (11, 2), (None, None)])
def test_the_error_of_a_range_is_how_far_outside_it_the_onset_lies(measured, error):
    assert onset_error(OnsetPlan("range", 5, 9, 4, ""), measured) == error


def test_process_and_service_are_separate_lines(verdict):
    lines = {line.split(":")[0]: line for line in verdict.ladder.regime}
    assert "0 failed, 0 aborted; the server stayed alive" in lines["Process"]
    assert "Nothing is out of memory" in lines["Process"]
    assert "at 7 in flight 0.75 preemptions a request" in lines["Service"]
    assert "longest gap between tokens" in lines["Service"]


def test_a_big_reserve_with_short_answers_is_named(verdict):
    line = next(line for line in verdict.ladder.regime if line.startswith("Reserve"))
    assert "max_tokens 512 on average, answers of 256 tokens; 0% of answers reach the limit" in line


def test_recomputed_tokens_are_a_bound_that_says_how_it_is_made(verdict):
    line = next(line for line in verdict.ladder.regime if line.startswith("Recomputed"))
    assert f"at most {72 * 511:,} tokens" in line
    assert "No version counts them" in line


def failing(run, index, **changes):
    """A run whose level 5 lost a request: it has no usage, so no prompt length of its own, and a part of its answer."""
    lost = {"error_class": "server_died", "prompt_tokens": None, "output_tokens": 40, "finish_reason": None}
    return replace(
        run,
        phases=[
            replace(p, requests=[replace(f, **lost, **changes) if n == index else f for n, f in enumerate(p.requests)])
            if p.name == "load_5"
            else p
            for p in run.phases
        ],
    )


def test_the_bound_of_recomputed_tokens_counts_a_failed_request_with_the_answer_that_it_was_to_get():
    run = next(run for run in ladder_records(pairs=1) if run.arm == "base")
    long = {f.prompt_sha256: 700 for f in run.phases[0].requests[:1]}
    run = replace(
        run,
        phases=[
            replace(p, requests=[replace(f, prompt_tokens=long.get(f.prompt_sha256, 256)) for f in p.requests])
            for p in run.phases
        ],
    )
    # The longest request of the level fails; the level before it has its length.
    assert level_facts([failing(run, 0)], "load_5", 256).recomputed_tokens_at_most == 2 * (700 + 256 - 1)
    assert level_facts([failing(run, 0)], "load_5").recomputed_tokens_at_most == 2 * (700 + 512 - 1)
    unknown = failing(run, 0, prompt_sha256="0" * 64)
    assert level_facts([unknown], "load_5", 256).recomputed_tokens_at_most is None


def test_a_bound_that_is_not_known_is_not_left_out(verdict):
    levels = [replace(level, recomputed_tokens_at_most=None) for level in verdict.ladder.levels]
    assert recomputed_sentence(levels).startswith("Recomputed: no bound can be given")
    assert recomputed_sentence(levels[:2]) == ""


def test_what_a_change_buys_is_said_per_unit_of_what_it_costs(verdict):
    arm = next(arm for arm in verdict.ladder.arms if arm.arm == "more_kv")
    gib = 64 * 32 * 512 / 2**30
    assert (arm.cost_unit, arm.cost_amount) == ("GiB of KV cache", pytest.approx(gib))
    assert arm.fewer_preemptions_per_1000_per_unit == pytest.approx(500 / gib)
    fewer = next(arm for arm in verdict.ladder.arms if arm.arm == "fewer_seqs")
    assert (fewer.cost_unit, fewer.cost_amount) == ("sequence", -12)
    said = {line.split(" ")[0]: line for line in verdict.ladder.regime if "above the onset" in line}
    bought = "above the onset (interval 500 to 500) for 0.000977 more GiB of KV cache (512,000 per GiB of KV cache); "
    assert bought in said["more_kv"]
    # Sequences that it does without cost nothing by the piece.
    assert "above the onset (interval 500 to 500) with 12 fewer sequences; " in said["fewer_seqs"]


@pytest.mark.parametrize(
    ("unit", "amount", "said"),
    [
        ("sequence", -1.0, " with 1 fewer sequence; "),
        ("GiB of KV cache", -2.0, " with 2 less GiB of KV cache; "),
        ("token of answer", 128.0, " for 128 fewer tokens of answer (2 per token of answer); "),
        ("replica", 1.0, " for 1 more replica (2 per replica); "),
        ("GPU", 2.0, " for 2 more GPUs (2 per GPU); "),
        (None, None, " above the onset (interval 500 to 500); "),
    ],
)
def test_what_a_change_takes_is_said_in_grammar(verdict, unit, amount, said):
    base, more_kv = (next(arm for arm in verdict.ladder.arms if arm.arm == name) for name in ("base", "more_kv"))
    rate = None if amount is None else 2.0
    changed = replace(more_kv, cost_unit=unit, cost_amount=amount, fewer_preemptions_per_1000_per_unit=rate)
    assert said in change_sentences(changed, base)[0]


def test_the_first_resource_to_run_out_is_named_by_arm(verdict):
    found = {arm.arm: (arm.first_out_of, arm.first_out_at) for arm in verdict.ladder.arms}
    assert found["base"] == ("KV cache", 5)
    assert found["fewer_seqs"] == ("sequences", 5)


def test_compute_runs_out_where_throughput_stops_growing_and_nothing_waits(verdict):
    flat = [
        replace(level, preemptions=0, waiting_peak=0.0, kv_used_share_peak=0.3, output_tokens_per_second=rate)
        for level, rate in zip(verdict.ladder.levels, (100.0, 190.0, 191.0, 192.0, 192.0, 192.0), strict=True)
    ]
    assert [(level.concurrency, level.requests // level.runs) for level in flat[:4]] == [(1, 8), (3, 8), (4, 8), (5, 8)]
    out, at, why = first_out(flat, 16)
    assert (out, at) == ("compute", 4)
    assert why.startswith("throughput ×1.01 against the level before, and no higher level has more, KV use 30%")
    assert first_out(flat[:2], 16)[:2] == ("nothing yet", None)


def test_compute_did_not_run_out_where_a_higher_level_has_more_or_as_many_rounds_are_sent(verdict):
    """On two H200: 20 requests at 7 and at 9 in flight are three rounds each; 13 in flight had 1.4 times as much."""

    def at(levels):
        return [
            replace(
                verdict.ladder.levels[0], concurrency=number, runs=4, requests=80, preemptions=0, waiting_peak=0.0,
                output_tokens_per_second=rate,
            )
            for number, rate in levels
        ]  # fmt: skip

    two = [(7, 1267.0), (9, 1279.0), (10, 1268.0), (13, 1812.0), (20, 1877.0)]
    assert first_out(at(two), 64)[:2] == ("nothing yet", None)
    assert first_out(at([(7, 1267.0), (9, 1279.0)]), 64)[:2] == ("nothing yet", None)
    assert first_out(at([(7, 1267.0), (10, 1268.0), (13, 1270.0)]), 64)[:2] == ("compute", 10)


def test_profiles_reach_the_highest_level_below_which_all_keep_them(verdict):
    reached = {entry.profile: entry for entry in verdict.ladder.arms[0].reached}
    assert reached["interactive"].concurrency == 4
    assert "at 5 in flight preemptions per 1,000 requests is 250, allowed 0" in reached["interactive"].broken_by
    records = [run for run in ladder_records() if run.arm == "base"]
    own = reach(records, verdict.ladder.levels, "mine", Objective(ttft_p95_seconds=0.001))
    assert own.concurrency is None and "time to first token" in own.broken_by


def test_what_an_arm_reaches_is_said_where_it_is_another_level_than_the_controls(verdict):
    said = "With more_kv interactive: up to 7 in flight instead of 4; no higher level was asked for."
    assert said in verdict.ladder.regime
    change = next(line for line in ten_lines(verdict, "results/c1") if line.startswith("Change: more_kv"))
    assert said in change and "With fewer_seqs" not in change
    base, more_kv = (next(arm for arm in verdict.ladder.arms if arm.arm == name) for name in ("base", "more_kv"))
    assert instead_sentences(replace(more_kv, reached=base.reached), base) == []
    none = [replace(entry, concurrency=None, broken_by="at 1 in flight 3 requests failed") for entry in base.reached]
    assert instead_sentences(replace(more_kv, reached=none), base)[0] == (
        "With more_kv interactive: not even one request at a time instead of 4; at 1 in flight 3 requests failed."
    )
    assert instead_sentences(more_kv, replace(base, reached=none))[0].startswith(
        "With more_kv interactive: up to 7 in flight instead of not even one request at a time; "
    )


def test_without_prices_a_level_is_said_in_resources(verdict):
    taken = next(one for one in verdict.ladder.arms[0].resources if one.profile == "interactive")
    level = next(level for level in verdict.ladder.levels if level.concurrency == 4)
    assert (taken.concurrency, taken.gpus, taken.replicas) == (4, 0, 1)
    assert taken.hours_per_million_output_tokens == pytest.approx(1e6 / level.output_tokens_per_second / 3600)
    assert taken.seconds_per_request_within_objective == pytest.approx(256 / level.output_tokens_per_second)
    line = next(line for line in verdict.ladder.regime if line.startswith("Resources of base at 4 in flight"))
    assert "GiB of RAM, 1 replica, for " in line and " hours per million output tokens, " in line
    assert line.endswith(" for a request within the objective.") and "GPU" not in line


def test_a_price_list_turns_a_level_into_money_and_nothing_is_said_without_one(verdict):
    assert all(arm.costs == [] for arm in verdict.ladder.arms)
    prices = Prices(currency="EUR", replica_hour=3.6)
    priced = conclude(ladder_protocol(), {"h1": ladder_records()}, "c1", prices=prices)
    cost = next(cost for cost in priced.ladder.arms[0].costs if cost.profile == "interactive")
    level = next(level for level in priced.ladder.levels if level.concurrency == 4)
    assert cost.per_million_output_tokens == pytest.approx(0.001 / level.output_tokens_per_second * 1e6)
    assert cost.per_request_within_objective == pytest.approx(0.001 / (level.output_tokens_per_second / 256))
    assert any(line.startswith("Cost of base at 4 in flight (interactive)") for line in priced.ladder.regime)


@pytest.mark.parametrize(
    ("prices", "said"),
    [
        (Prices("EUR", gpu_hour=2.4), "No cost: this host has no GPU that gpu_hour could be for; give replica_hour."),
        (Prices("EUR", ram_gib_hour=0.1), "kvtrial_prices no price of a replica; give replica_hour."),
    ],
    ids=["GPUs", "RAM"],
)
def test_prices_that_give_no_cost_on_a_host_are_not_swallowed(verdict, prices, said):
    priced = conclude(ladder_protocol(), {"h1": ladder_records()}, "c1", prices=prices)
    assert priced.ladder.arms[0].costs == []
    assert priced.ladder.regime[-1].endswith(said)
    assert any(line.startswith("Profiles: ") and said in line for line in ten_lines(priced, "results/c1"))
    assert not any(line.startswith("No cost") for line in verdict.ladder.regime)


def test_gpus_without_a_price_are_named():
    assert lacks_price(Prices("EUR", replica_hour=1.0), Resources(2, 0.0, 1)) == (
        "kvtrial_prices names no price of the 2 GPUs in use; give gpu_hour"
    )
    assert lacks_price(Prices("EUR", gpu_hour=1.0), Resources(2, 0.0, 1)) is None


def test_a_price_list_without_a_price_of_what_is_used_gives_no_cost():
    assert price_per_hour(Prices("EUR", ram_gib_hour=1.0), Resources(1, 10.0, 1)) is None
    assert price_per_hour(Prices("EUR", gpu_hour=2.0, ram_gib_hour=0.1), Resources(2, 10.0, 1)) == pytest.approx(5.0)
    nothing = costs(Prices("EUR", gpu_hour=2.0), Resources(1, 0.0, 1), 0.0, 0.0)
    assert nothing.per_million_output_tokens is None and nothing.per_request_within_objective is None


def test_a_ledger_adds_up_request_by_request(verdict):
    for record in ladder_records(pairs=1):
        for phase in phases_of(record, "ladder"):
            for row in phase.ledger.requests:
                assert row.lag_ns + row.first_token_ns + row.normal_gaps_ns + row.stall_gaps_ns == row.e2e_ns


def test_a_gap_above_the_multiple_of_the_runs_median_is_a_stall_and_one_at_it_is_not():
    gaps = [2000] * 9 + [10_000, 10_001]
    times = RequestTimes("a", 0, 10, 5_000_000, 5_000_000 + 1000 * sum(gaps), gaps)
    row = request_ledger(times, 5 * 2_000_000)
    assert (row.stalls, row.stall_gaps_ns, row.longest_gap_ns) == (1, 10_001_000, 10_001_000)
    later = RequestTimes("b", 0, 4_000_000, 7_000_000, 8_000_000, [1000])
    # The first waits for its own first token, 5 ms after its send; the second for that of the first, 1 ms after.
    both = phase_ledger([times, later], 5.0, 2_000_000)
    assert both.next_first_token_ns == (5_000_000 - 10) + (5_000_000 - 4_000_000)
    whole = phase_ledger([times], 5.0, 2_000_000)
    assert (whole.stalled_requests, whole.stall_above_ns) == (1, 10_000_000)


def test_the_engines_ledger_shows_its_difference():
    phase = phases_of(ladder_records(pairs=1)[0], "ladder")[0]
    assert server_ledger(phase).difference_share == pytest.approx(0.002)


def test_a_request_that_the_engine_lost_on_abort_is_counted_though_its_counter_is_not():
    run = next(run for run in ladder_records(pairs=1) if run.arm == "base")
    assert level_facts([run], "load_5").aborted == 0
    lost = [replace(p, after=p.after | {"requests_finished_stop": p.after["requests_finished_stop"] - 2})
            for p in run.phases]  # fmt: skip
    level = level_facts([replace(run, phases=lost)], "load_5")
    assert level.aborted == 2


def test_a_levels_lengths_are_said_with_their_range_where_they_differ():
    run = next(run for run in ladder_records(pairs=1) if run.arm == "base")
    assert level_facts([run], "load_5").prompt_tokens_range == [256, 256]
    mixed = [replace(p, requests=[replace(p.requests[0], prompt_tokens=32, output_tokens=9), *p.requests[1:]])
             for p in run.phases]  # fmt: skip
    level = level_facts([replace(run, phases=mixed)], "load_5")
    assert (level.prompt_tokens_range, level.answer_tokens_range) == ([32, 256], [9, 256])
    said = [MEASURES[name](level, Words()) for name in ("prompt", "limit", "answer", "starts")]
    assert said == ["228\n32 – 256", "512", "225\n9 – 256", "in one burst"]


def test_a_burst_and_a_continuous_regime_are_told_apart():
    phase = phases_of(ladder_records(pairs=1)[0], "above_onset")[0]

    def at(counts):
        points = [PressurePoint(0.1 * n * phase.seconds, 4.0, 1.0, 1.0, float(c)) for n, c in enumerate(counts, 1)]
        return pattern_of([replace(phase, pressure=points)])

    assert at([0, 0, 2, 2, 2, 2, 2, 2, 2]) == "one burst"
    assert at([0, 1, 1, 1, 1, 1, 1, 1, 2]) == "continuous"
    assert at([]) == "not seen"
    calm = phases_of(ladder_records(pairs=1)[0], "ladder")[0]
    assert pattern_of([calm]) == "none"


def test_arms_that_change_the_work_say_that_quality_is_not_compared():
    protocol = ladder_protocol(("shorter_inputs",))
    records = [
        replace(run, arm="shorter_inputs") if run.arm == "more_kv" else run
        for run in ladder_records(arms=("base", "more_kv"))
    ]
    result = conclude(protocol, {"h1": records}, "c1")
    primary = next(c for c in result.comparisons if c.role == "primary")
    assert (primary.arm, primary.quality) == ("shorter_inputs", "not_compared")


def test_an_invalid_host_gets_no_ladder():
    records = [
        replace(run, phases=[replace(p, reset=replace(p.reset, succeeded=False)) for p in run.phases])
        for run in ladder_records()
    ]
    result = conclude(ladder_protocol(), {"h1": records}, "c1")
    assert result.verdict == "INVALID" and "levels_reset" in result.reason
    assert result.ladder is None


def test_the_terminal_gets_the_answer_in_ten_lines(verdict):
    lines = ten_lines(verdict, "results/c1")
    assert len(lines) <= 10
    text = "\n".join(lines)
    assert "BETTER: The number of preemptions above the onset is 500 preemptions per 1,000 requests lower" in text
    assert "Ladder: Preemption begins at 5 requests in flight" in text
    assert "Profiles: interactive: up to 4 in flight with base" in text
    assert "Change: fewer_seqs (fewer sequences at a time (max_num_seqs)): 500 fewer preemptions" in text
    assert "MOVED" in text


def queue_protocol():
    """The shipped protocol of a host whose prompts fill its pool: 448 tokens in and 64 out, four at a time."""
    sizes = {"prompt_tokens": 448, "output_tokens": 64}
    protocol = only_arms(load_protocol("preemption_ladder", PROTOCOLS), ["more_kv"])
    return for_host(replace(protocol, ladder=replace(protocol.ladder, levels=list(LEVELS))), cpu_host(sizes=sizes))


def queueing(arm, level, pair):
    """The base lets in four; with more KV memory nobody waits."""
    waits = 0.1 * (level - 4) + 0.002 * (pair % 3) if arm == "base" and level > 4 else 0.001
    return Shape(0, waits, 0.0)


def queue_records(shapes=queueing):
    records = []
    for run in ladder_records(shapes, arms=("base", "more_kv")):
        phases = [replace(p, block="queueing" if p.block == "above_onset" else p.block) for p in run.phases]
        facts = [[replace(f, prompt_tokens=448, output_tokens=64) for f in p.requests] for p in phases]
        phases = [replace(p, requests=own) for p, own in zip(phases, facts, strict=True)]
        records.append(replace(run, phases=phases, evidence="gpu"))
    return records


def test_a_ladder_that_can_only_queue_says_so_and_is_judged_by_its_times():
    result = conclude(queue_protocol(), {"h1": queue_records()}, "c1")
    assert result.verdict == "BETTER", result.reason
    primary = next(c for c in result.comparisons if c.role == "primary")
    assert (primary.metric, primary.effect) == ("queue_seconds_per_request", pytest.approx(-0.2, abs=0.01))
    assert all(c.effect is not None for c in result.comparisons if c.metric != "longest_gap_p95_seconds")
    assert (result.ladder.onset_measured, result.ladder.queue_from) == (None, 5)
    text = "\n".join(ten_lines(result, "results/c1"))
    assert "Ladder: These requests only queue, from 5 in flight on: no level was preempted, as predicted." in text
    assert "A request waits 1 ms at 4, 102 ms at 5, 302 ms at 7 in flight before it is first scheduled" in text
    assert "Change: more_kv (more KV memory): a request queues 201 ms less with more in flight than run at once" in text
    assert " more GiB of KV cache (" in text and " s per GiB of KV cache)" in text
    assert result.recommendation.action == "adopt more_kv"
    assert "above the onset" not in text


def test_a_change_that_leaves_the_queue_as_it_was_is_not_worth_having():
    result = conclude(
        queue_protocol(), {"h1": queue_records(lambda _, level, pair: queueing("base", level, pair))}, "c1"
    )
    assert result.verdict == "EQUIVALENT", result.reason
    assert result.recommendation.action.startswith("keep the control")


def test_an_arm_that_only_moves_the_delay_is_not_recommended():
    protocol = ladder_protocol(("fewer_seqs",))
    records = [run for run in ladder_records() if run.arm != "more_kv"]
    records = [replace(run, evidence="gpu", position=min(run.position, 1)) for run in records]
    result = conclude(protocol, {"h1": records}, "c1")
    assert result.verdict == "BETTER", result.reason
    assert result.recommendation.action == "do not adopt fewer_seqs"
    assert "the delay only moved" in result.recommendation.reason


def test_the_report_shows_levels_and_time_lines_and_says_what_is_a_bound(verdict):
    page = build_report(verdict, ladder_protocol(), ladder_records(pairs=6), {}, None)
    assert "The ladder" in page and "Onset: predicted 5, measured 5." in page
    assert "End-to-end not in the engine&#39;s own times" in page
    assert "Preemptions so far" in page and "Recomputed tokens are a bound" in page


def test_another_arm_that_is_better_too_is_named_unless_it_was_compared(verdict):
    protocol, records = ladder_protocol(), [replace(run, evidence="gpu") for run in ladder_records()]

    def reason(comparisons):
        return recommend(protocol, "BETTER", "", "gpu", comparisons, records).reason

    primary = next(c for c in verdict.comparisons if c.role == "primary")
    assert (primary.arm, primary.verdict) == ("more_kv", "BETTER")
    other = replace(primary, arm="fewer_seqs", role="secondary")
    assert reason([primary, other]).endswith("; fewer_seqs is BETTER, too, and not compared with it")
    two = [primary, other, replace(other, arm="fp8_kv")]
    assert reason(two).endswith("; fewer_seqs and fp8_kv are BETTER, too, and not compared with it")
    worked = ladder_protocol(("fewer_seqs", "truncated_answers"))
    differs = replace(other, arm="truncated_answers", quality="not_compared")
    assert recommend(worked, "BETTER", "", "gpu", [primary, differs], records).reason.endswith(
        "; truncated_answers (quality: not compared) is BETTER, too, and not compared with it"
    )
    for silent in (
        [replace(other, verdict="INCONCLUSIVE")],
        [replace(other, moved=True)],
        [replace(other, metric="e2e_p95_seconds")],
        [other, replace(other, against="more_kv", verdict="EQUIVALENT")],
    ):
        assert reason([primary, *silent]) == "more_kv is BETTER by the primary comparison and no guard is WORSE"


@pytest.mark.parametrize("arm", ["shorter_inputs", "truncated_answers", "less_reserve"])
def test_an_arm_of_other_sizes_alone_is_no_twin_of_the_control(arm):
    arms = ("base", arm)
    records = ladder_records(
        lambda a, level, pair: preempting("base" if a == "base" else "more_kv", level, pair), 6, arms
    )
    found = conclude(ladder_protocol(arms), {"h1": records}, "c1")
    assert found.verdict == "BETTER", found.reason
    assert "noise" not in found.recommendation.reason and "spread" not in found.recommendation.action


def calm(arm, level, pair):
    return Shape(0, 0.001, 0.0)


@pytest.mark.parametrize("hosts", [("h1",), ("h1", "h2", "h3")])
def test_a_ladder_on_which_nobody_was_preempted_answers_nothing(hosts):
    found = conclude(ladder_protocol(), {host: ladder_records(calm) for host in hosts}, "c1")
    assert found.verdict == "INCONCLUSIVE"
    assert found.reason.startswith("no request was preempted"), found.reason
    assert found.recommendation.action.startswith("raise the ladder, or let the answers grow")
    assert next(c for c in found.comparisons if c.role == "primary").verdict == "INCONCLUSIVE"


def test_hosts_on_which_nobody_was_preempted_take_no_part_in_a_fleets_answer():
    """Thirteen hosts that show nothing do not make the one that does the same within the margin."""
    hosts = {f"h{number:02}": ladder_records(calm) for number in range(13)} | {"h13": ladder_records()}
    found = conclude(ladder_protocol(), hosts, "c1")
    assert found.verdict == "INCONCLUSIVE" and found.reason.startswith("1 of 14 planned hosts are valid"), found.reason
    assert "h00: no request was preempted" in found.reason


def test_arms_that_preempt_as_often_as_the_control_are_still_equivalent():
    alike = ladder_records(lambda arm, level, pair: preempting("base", level, pair))
    assert conclude(ladder_protocol(), {"h1": alike}, "c1").verdict == "EQUIVALENT"


MANY = ("base", "more_kv", "fewer_seqs", "less_reserve", "truncated_answers", "shorter_inputs")


def as_declared(arm, level, pair):
    """truncated_answers and shorter_inputs take the preemptions away, less_reserve has more of them in odd pairs."""
    if arm == "less_reserve" and level > 4:
        base = preempting("base", level, pair)
        return Shape(base.preemptions + 1, base.queue_seconds, base.stall_seconds)
    return preempting({"truncated_answers": "more_kv", "shorter_inputs": "more_kv"}.get(arm, arm), level, pair)


def test_from_the_fourth_arm_on_every_change_keeps_its_figures_and_the_proof_stays():
    found = conclude(ladder_protocol(MANY), {"h1": ladder_records(as_declared, 6, MANY)}, "c1")
    said = ten_lines(found, "results/c1")
    assert len(said) <= 10 and "see the report" not in " ".join(said)
    changes = "; ".join(line.removeprefix("Changes: ").rstrip(".") for line in said if line.startswith("Changes: "))
    by_arm = {text.split(" ")[0]: text for text in changes.split("; ")}
    assert list(by_arm) == list(MANY[1:])
    assert by_arm["more_kv"] == (
        "more_kv 500 fewer preemptions per 1,000 (500 to 500) for 0.000977 more GiB of KV cache (512,000 per GiB of KV "
        "cache)"
    )
    assert by_arm["fewer_seqs"].endswith("with 12 fewer sequences, MOVED into the queue")
    assert by_arm["less_reserve"] == "less_reserve 125 MORE preemptions per 1,000 (125 to 125)"
    for arm in ("truncated_answers", "shorter_inputs"):
        assert by_arm[arm].endswith(", quality: not compared")
    proof = next(line for line in said if line.startswith("Proof: "))
    assert " gates passed" in proof and "36 of 36 runs valid" in proof


def test_an_arm_that_changes_the_work_says_in_the_terminal_that_quality_was_not_compared():
    arms = ("base", "truncated_answers")
    records = ladder_records(
        lambda a, level, pair: preempting("base" if a == "base" else "more_kv", level, pair), 6, arms
    )
    found = conclude(ladder_protocol(arms), {"h1": records}, "c1")
    change = next(line for line in ten_lines(found, "results/c1") if line.startswith("Change: truncated_answers"))
    assert "quality: not compared" in change


def test_the_calm_level_of_the_service_line_lies_below_the_first_preemption():
    def only_at_six(arm, level, pair):
        return Shape(2, 0.001, 0.3) if level == 6 and arm == "base" else Shape(0, 0.001, 0.0)

    found = conclude(ladder_protocol(), {"h1": ladder_records(only_at_six)}, "c1")
    service = next(line for line in found.ladder.regime if line.startswith("Service: "))
    assert "at 6 in flight" in service and "against 5 in flight" in service


def test_an_arm_is_shown_beside_its_own_prediction(verdict):
    text = change_sentences(
        replace(next(a for a in verdict.ladder.arms if a.arm == "more_kv"), onset_predicted=[9, 9]),
        replace(verdict.ladder.arms[0], onset_measured=None),
    )[0]
    assert "no preemption on this ladder (predicted 9, no error up to 7 in flight, control none)" in text


def test_an_arms_onset_has_its_error_against_its_own_prediction(verdict):
    """An engine that gives an arm another pool than planned is seen to, and not called useless alone."""
    base, more_kv = (next(a for a in verdict.ladder.arms if a.arm == name) for name in ("base", "more_kv"))
    assert (base.error_requests, base.error_at_least) == (0, None)
    assert (more_kv.onset_predicted, more_kv.error_requests, more_kv.error_at_least) == ([9, 9], None, 0)
    small = conclude(
        ladder_protocol(), {"h1": ladder_records(lambda arm, level, pair: preempting("base", level, pair))}, "c1"
    )
    arm = next(a for a in small.ladder.arms if a.arm == "more_kv")
    assert (arm.onset_measured, arm.error_requests) == (5, -4)
    assert any("onset 5 (predicted 9, error -4 requests, control 5)" in line for line in small.ladder.regime)


def test_where_nobody_was_preempted_the_error_is_said_as_a_bound():
    found = conclude(ladder_protocol(), {"h1": ladder_records(calm)}, "c1")
    assert (found.ladder.error_requests, found.ladder.error_at_least) == (None, 3)
    assert found.ladder.regime[0] == (
        "No level was preempted up to 7 in flight (predicted 5, error at least +3 requests)."
    )
    assert onset_errors(OnsetPlan("range", 5, 12, 4, ""), [1, 4, 7], None) == (None, 0)
    assert onset_errors(OnsetPlan("never", None, None, 4, ""), [1, 4, 7], None) == (0, None)


@pytest.mark.parametrize(
    ("levels", "measured", "errors"),
    [
        ([9, 13, 20], 20, (None, 0)),
        ([9, 18, 19, 20], 20, (1, None)),
        ([9, 18, 19, 20], 19, (0, None)),
        ([9, 20, 26], 26, (None, 2)),
        ([9, 13, 20], 13, (None, -6)),
        ([9, 13, 20], None, (None, 2)),
    ],
    ids=["as predicted or above", "above", "exact", "above at least", "below at least", "above all levels"],
)
def test_between_levels_that_are_no_neighbours_an_error_is_a_bound(levels, measured, errors):
    """Two replicas on two H200, predicted at 19: the ladder had 13 and 20, which show no error."""
    assert onset_errors(OnsetPlan("exact", 19, 19, 18, ""), levels, measured) == errors


def test_that_no_level_shows_an_error_is_said(verdict):
    base, more_kv = (next(a for a in verdict.ladder.arms if a.arm == name) for name in ("base", "more_kv"))
    between = replace(more_kv, onset_predicted=[2, 2], onset_measured=3, error_requests=None, error_at_least=0)
    text = change_sentences(between, base)[0]
    assert "onset 3 (predicted 2, no error shown with no level from 2 to 2, control 5)" in text


def test_a_ladder_of_several_hosts_names_the_one_that_it_is_of():
    hosts = {host: ladder_records() for host in ("h1", "h2", "h3")}
    lines = ten_lines(conclude(ladder_protocol(), hosts, "c1"), "r")
    line = next(text for text in lines if text.startswith("Ladder"))
    assert line.startswith("Ladder of h1, one of 3 hosts: Preemption begins")
    for what in ("Profiles on h1: ", "Change on h1: more_kv", "Change on h1: fewer_seqs"):
        assert any(text.startswith(what) for text in lines), what
    assert any(text.startswith("Proof: ") and " On h1: no connector in 6 runs" in text for text in lines)
