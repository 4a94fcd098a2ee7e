"""From records to a verdict: pairs, faults, words, evidence, fleets, and what is said beside them."""

import msgspec
import pytest
from build import add, change, faulted, honest_records, protocol, with_phase, with_requests, with_ttft
from kvtrial.analysis.breakeven import break_even
from kvtrial.analysis.effect import hodges_lehmann
from kvtrial.analysis.faults import Pair, sort_pairs
from kvtrial.analysis.fleet import combine, odd_hosts, paule_mandel
from kvtrial.analysis.metrics import METRICS, find_metric
from kvtrial.analysis.recommend import recommend
from kvtrial.analysis.summary import columns, to_frame
from kvtrial.analysis.timebudget import time_budget
from kvtrial.analysis.verdict import conclude, least_evidence
from kvtrial.record.errors import UnusableInput
from kvtrial.record.plan import HostPlan, Limits, Plan, RunPlan
from kvtrial.record.protocol import Arm, Comparison
from kvtrial.record.verdict import Verdict
from msgspec.structs import replace

ARMS = ["control", "offload"]


def verdict(records, on=None, **more) -> Verdict:
    return conclude(on or protocol(), {"h1": records}, "c1", **more)


def primary(found: Verdict):
    return next(c for c in found.comparisons if c.role == "primary")


def slower(factor):
    return lambda run: with_ttft(run, "return", primary_control(run.pair) * factor)


def primary_control(pair: int) -> float:
    from build import RETURN_CONTROL

    return RETURN_CONTROL[(pair - 1) % 6]


def later(run, seconds):
    times = run.times
    started, ended = times.started_monotonic_seconds + seconds, times.ended_monotonic_seconds + seconds
    return replace(run, times=replace(times, started_monotonic_seconds=started, ended_monotonic_seconds=ended))


# ------------------------------------------------------------------------------------------------ words


def test_the_honest_campaign_is_better_with_the_measured_numbers():
    found = verdict(honest_records())
    assert found.verdict == "BETTER"
    effect = primary(found)
    assert effect.effect == pytest.approx(0.151, abs=5e-4)
    assert (effect.ci_low, effect.ci_high) == pytest.approx((0.138, 0.194), abs=5e-4)
    assert effect.confidence == pytest.approx(0.96875)
    assert effect.p_value == pytest.approx(0.03125)
    assert effect.delta_ttft_seconds == pytest.approx(-0.200, abs=5e-4)
    assert effect.quality == "equal"
    assert effect.moved is False
    assert effect.mde > 1.05
    assert len(effect.pair_effects) == len(effect.arm_values) == len(effect.against_values) == 6


@pytest.mark.parametrize(("factor", "word"), [(1.4, "WORSE"), (1.001, "EQUIVALENT"), (0.5, "BETTER")])
def test_the_word_is_the_primary_comparisons(factor, word):
    found = verdict(change(honest_records(), slower(factor), arm="offload"))
    assert found.verdict == found.hosts[0].verdict == primary(found).verdict == word


def test_a_clear_rise_of_a_throughput_is_better_and_of_a_latency_worse():
    found = verdict(honest_records())
    throughput = next(c for c in found.comparisons if "throughput" in c.metric)
    assert throughput.effect > 1
    assert throughput.verdict == "BETTER"


def test_swapping_the_arms_swaps_the_word():
    swapped = [replace(c, arm=c.against, against=c.arm) if c.role == "primary" else c for c in protocol().comparisons]
    assert verdict(honest_records(), replace(protocol(), comparisons=swapped)).verdict == "WORSE"


def test_the_within_server_comparison_sets_two_phases_of_one_run_side_by_side():
    within = next(c for c in verdict(honest_records()).comparisons if c.against_phase == "noload_return")
    assert within.arm == within.against == "offload"
    assert within.verdict == "BETTER"
    assert within.quality == "not_compared"


@pytest.mark.parametrize("pairs", [1, 3, 5])
def test_too_few_pairs_are_inconclusive_with_the_numbers(pairs):
    found = verdict(honest_records(pairs))
    assert found.verdict == "INCONCLUSIVE"
    assert f"{pairs} of {pairs} pairs are valid, at least 6 are needed" in found.reason
    assert "with" in primary(found).note
    assert "6" in found.recommendation.action


def test_a_margin_can_be_set_by_metric():
    found = verdict(honest_records(), margins={"ttft_median_seconds": 20.0})
    assert primary(found).margin == 20.0
    assert found.verdict == "EQUIVALENT"
    with pytest.raises(UnusableInput, match="metric"):
        verdict(honest_records(), margins={"speed": 1.0})


def test_a_worse_guard_forbids_adopting_and_says_that_the_delay_moved():
    records = honest_records(evidence="gpu")
    assert verdict(records).recommendation.action == "adopt offload"
    records = change(records, lambda run: with_ttft(run, "miss", 0.5), arm="offload")
    found = verdict(records)
    assert found.verdict == "BETTER"
    assert found.recommendation.action == "do not adopt offload"
    assert "forbids adopt" in found.recommendation.reason
    assert any("adopt is forbidden" in caveat for caveat in found.caveats)
    assert primary(found).moved is True


# --------------------------------------------------------------------------------------------- evidence


@pytest.mark.parametrize(
    ("evidence", "action", "caveat"),
    [
        ("gpu", "adopt offload", None),
        ("cpu", "run the same protocol on a GPU host", "CPU engine"),
        ("standin", "run the same protocol on a real engine", "stand-in engine: tests only"),
    ],
)
def test_evidence_is_said_and_decides_what_to_do(evidence, action, caveat):
    found = verdict(honest_records(evidence=evidence))
    assert found.evidence == evidence
    assert found.recommendation.action == action
    assert caveat is None or any(caveat in text for text in found.caveats)
    assert ("say nothing about GPUs" in found.reason) == (evidence == "cpu")


def test_the_weakest_evidence_of_the_records_counts():
    mixed = honest_records(evidence="gpu")[:6] + honest_records(evidence="standin")[6:]
    assert least_evidence(mixed) == "standin"
    assert least_evidence([]) is None


def test_worse_and_equivalent_keep_the_plain_cache():
    found = verdict(change(honest_records(evidence="gpu"), slower(1.4), arm="offload"))
    assert found.recommendation.action == "keep the plain GPU cache (no KV connector)"
    assert found.recommendation.pins["vllm"] == "0.32.0+cpu"


def test_where_a_tier_is_not_what_was_decided_the_advice_says_nothing_against_it():
    records = honest_records(evidence="gpu")
    layout = replace(primary(verdict(records)), arm="default_layout", verdict="EQUIVALENT")
    arms = {**protocol().arms, "default_layout": Arm(title="own layout", env={"VLLM_KV_CACHE_LAYOUT": None})}
    three = replace(protocol(), arms=arms)
    advice = recommend(three, "EQUIVALENT", "", "gpu", [layout], records)
    assert advice.action == "keep the control (no KV connector)"
    offload = recommend(three, "EQUIVALENT", "", "gpu", [replace(layout, arm="offload")], records)
    assert offload.action == "keep the plain GPU cache (no KV connector)"


def test_an_a_a_campaign_that_finds_nothing_says_what_its_spread_is_for():
    declared = protocol()
    same = replace(
        declared,
        name="aa",
        arms={"control": declared.arms["control"], "again": declared.arms["control"]},
        gates={"memory_left": {}},
        comparisons=[Comparison("again", "control", "return", "ttft_median_seconds", "primary")],
        break_even={},
    )
    records = [replace(r, arm="again") if r.arm == "offload" else r for r in honest_records()]
    records = change(records, slower(1.0), arm="again")
    found = verdict(records, same)
    assert found.verdict == "EQUIVALENT"
    assert "spread" in found.recommendation.action
    assert found.break_even is None


# ---------------------------------------------------------------------------------------------- faults


def test_an_engine_fault_withholds_better_and_is_named():
    records = change(honest_records(7), lambda r: faulted(r, "engine", "engine_died"), arm="offload", pair=3)
    found = verdict(records)
    assert found.verdict == "INCONCLUSIVE"
    assert "engine_died of arm offload in pair 3, phase return" in found.reason
    assert primary(found).verdict == primary(found.hosts[0]).verdict == "INCONCLUSIVE"
    assert primary(found).note.startswith("BETTER is withheld")
    assert primary(found).effect == pytest.approx(0.151, abs=0.01)
    assert found.hosts[0].runs.engine_faults == 1
    assert found.hosts[0].runs.valid == 12
    assert "engine fault" in found.recommendation.action


def test_an_engine_fault_leaves_worse_as_it_is():
    records = change(honest_records(7), slower(1.4), arm="offload")
    records = change(records, lambda r: faulted(r, "engine", "deadlock"), arm="offload", pair=3)
    found = verdict(records)
    assert found.verdict == "WORSE"
    assert "deadlock of arm offload" in found.reason


def test_an_engine_fault_is_never_replaced_by_a_spare_pair():
    records = change(
        honest_records(6, spare_pairs=1), lambda r: faulted(r, "engine", "deadlock"), arm="offload", pair=2
    )
    pairs = sort_pairs(records, ARMS)
    assert [p.number for p in pairs.valid] == [1, 3, 4, 5, 6]
    assert pairs.spares_unused == [7]
    assert verdict(records).verdict == "INCONCLUSIVE"


def test_an_arm_that_dies_in_every_pair_is_a_result_and_not_invalid():
    records = change(honest_records(), lambda r: faulted(r, "engine", "engine_died"), arm="offload")
    found = verdict(records)
    assert found.verdict == "INCONCLUSIVE"
    assert "0 of 6 pairs are valid" in found.reason
    assert "engine_died of arm offload in pair 1" in found.reason


def test_a_wrong_answer_is_an_engine_fault_of_its_arm():
    wrong = lambda r: with_requests(r, "return", lambda q: replace(q, answer_sha256="bad" + q.key))  # noqa: E731
    found = verdict(change(honest_records(), wrong, arm="offload", pair=4))
    assert found.verdict == "INVALID"
    assert "answers_equal" in found.reason
    assert "pair 4, arm offload" in found.reason
    assert found.hosts[0].runs.engine_faults == 1
    assert primary(found).quality == "differs"
    assert any("wrong_answer of arm offload in pair 4" in caveat for caveat in found.caveats)


def test_a_fault_of_the_environment_drops_the_whole_pair_and_a_spare_replaces_it():
    records = change(
        honest_records(6, spare_pairs=1), lambda r: faulted(r, "environment", "disk_full"), arm="control", pair=2
    )
    found = verdict(records)
    assert found.verdict == "BETTER"
    assert found.hosts[0].runs.dropped == 2
    assert found.hosts[0].runs.valid == 12
    assert found.hosts[0].runs.planned == 12
    assert any("pair 2 (disk_full" in caveat for caveat in found.caveats)


def test_a_spare_pair_too_many_is_shown_and_not_counted():
    pairs = sort_pairs(honest_records(6, spare_pairs=2), ARMS)
    assert len(pairs.valid) == 6
    assert pairs.spares_unused == [7, 8]


@pytest.mark.parametrize(
    ("plant", "fault"),
    [
        (lambda r: replace(r, conditions=replace(r.conditions, boot_id="other")), "pair_cut"),
        (lambda r: later(r, 1850), "pair_cut"),
        (lambda r: replace(r, arm="control"), "record_missing"),
    ],
)  # fmt: skip
def test_a_cut_or_incomplete_pair_is_dropped(plant, fault):
    # Pair 3 runs the control first, so its offload run is the later one.
    records = change(honest_records(), plant, arm="offload", pair=3)
    pairs = sort_pairs(records, ARMS)
    assert [(p.number, p.fault) for p in pairs.dropped] == [(3, fault)]
    assert len(pairs.valid) == 5


def plan_of(host="h1", max_pair_gap_seconds=1800.0, pairs=6) -> Plan:
    first = honest_records(1)[0]
    limits = Limits(**dict.fromkeys(Limits.__struct_fields__, 1) | {"max_pair_gap_seconds": max_pair_gap_seconds})
    runs = [RunPlan(f"p{n}-{arm}", n, i, arm, n > 6, []) for n in range(1, pairs + 1) for i, arm in enumerate(ARMS)]
    part = HostPlan(
        "1.0", "offload_return", host, 1, "cpu", "0.32.0", first.model, first.capacity, {}, runs, 2, limits, "continue"
    )
    return Plan("1.0", protocol(), 1, [part], {})


def test_the_plan_says_what_should_be_there_and_how_long_a_pair_may_take():
    assert verdict(honest_records(), planned=plan_of()).verdict == "BETTER"
    short = verdict(honest_records(5), planned=plan_of())
    assert "5 of 6 pairs are valid" in short.reason
    assert "pair 6 (record_missing" in short.reason
    assert short.hosts[0].runs.planned == 12
    assert "pair_cut" in verdict(honest_records(), planned=plan_of(max_pair_gap_seconds=10.0)).reason
    spare = verdict(honest_records(6), planned=plan_of(pairs=8))
    assert spare.hosts[0].runs.planned == 12
    nothing = conclude(protocol(), {}, "c1", plan_of())
    assert (nothing.verdict, nothing.reason) == ("INVALID", "no run left a record")
    assert nothing.hosts[0].runs.planned == 12


def test_a_record_twice_drops_the_pair():
    records = honest_records()
    assert [p.fault for p in sort_pairs([*records, records[0]], ARMS).dropped] == ["record_twice"]


def test_a_planned_pair_without_any_record_is_dropped_and_counted():
    pairs = sort_pairs(honest_records(5), ARMS, planned_pairs=range(1, 7))
    assert [(p.number, p.fault) for p in pairs.dropped] == [(6, "record_missing")]


# ----------------------------------------------------------------------------------- poor and missing data


@pytest.mark.parametrize("records", [{}, {"h1": []}])
def test_no_record_at_all_is_invalid_and_no_exception(records):
    found = conclude(protocol(), records, "c1")
    assert found.verdict == "INVALID"
    assert found.reason == "no run left a record"
    assert found.evidence is None
    assert [gate.passed for gate in found.gates] == [None] * len(protocol().gates)
    assert len(found.comparisons) == (len(protocol().comparisons))
    msgspec.json.encode(found)


def test_a_missing_value_in_one_pair_is_inconclusive_and_not_left_out():
    records = change(
        honest_records(7), lambda r: with_phase(r, "return", e2e_median_seconds=None), arm="offload", pair=2
    )
    found = next(c for c in verdict(records).comparisons if c.metric == "e2e_median_seconds")
    assert found.verdict == "INCONCLUSIVE"
    assert "missing in pair 2 (arm offload)" in found.note


@pytest.mark.parametrize(
    "damage",
    [
        lambda r: replace(r, phases=[]),
        lambda r: replace(r, phases=r.phases[:4]),
        lambda r: replace(r, samples=None),
        lambda r: replace(r, resolved=None),
        lambda r: replace(r, phases=[replace(p, before={}, after={}) for p in r.phases]),
        lambda r: replace(r, phases=[replace(p, requests=[]) for p in r.phases]),
        lambda r: replace(r, launch=replace(r.launch, argv=[])),
        lambda r: replace(r, launch=replace(r.launch, argv=["vllm", "serve", "--kv-transfer-config", "{"])),
        lambda r: replace(r, vllm_version_pinned="nightly"),
        lambda r: replace(r, capacity=replace(r.capacity, block_tokens=0)),
    ],
)
@pytest.mark.parametrize("where", [{}, {"arm": "offload"}, {"pair": 3}])
def test_truncated_records_never_raise_and_never_win(damage, where):
    found = verdict(change(honest_records(), damage, **where))
    assert found.verdict in ("INVALID", "INCONCLUSIVE")
    assert found.reason
    to_frame(change(honest_records(), damage, **where))


# ------------------------------------------------------------------------------------------------- fleets


def fleet(*scales: float, pairs: int = 6):
    return {f"h{i}": honest_records(pairs, host=f"h{i}", scale_offload=s) for i, s in enumerate(scales, start=1)}


def test_three_hosts_are_combined_with_their_heterogeneity():
    found = conclude(protocol(), fleet(1.0, 1.1, 0.95), "c1")
    assert found.verdict == "BETTER"
    effect = primary(found)
    assert effect.pairs == 18
    assert effect.ci_low < effect.effect < effect.ci_high
    assert set(effect.heterogeneity) == {"tau2", "I2", "q", "q_p_value", "hosts"}
    assert len(found.hosts) == 3
    assert "3 of 3 hosts" in found.reason


def test_two_hosts_are_shown_and_must_agree():
    agreed = conclude(protocol(), fleet(1.0, 1.1), "c1")
    assert agreed.verdict == "BETTER"
    assert "not combined" in primary(agreed).note
    parted = conclude(protocol(), fleet(1.0, 12.0), "c1")
    assert [host.verdict for host in parted.hosts] == ["BETTER", "WORSE"]
    assert parted.verdict == "INCONCLUSIVE"


def test_under_80_percent_of_the_hosts_nothing_is_concluded():
    records = fleet(1.0, 1.0, 1.0, 1.0) | {"h5": honest_records(3, host="h5")}
    assert conclude(protocol(), records, "c1").verdict == "BETTER"
    del records["h4"]
    found = conclude(protocol(), records, "c1")
    assert found.verdict == "INCONCLUSIVE"
    assert "3 of 4 planned hosts are valid" in found.reason
    assert "h5: 3 of 3 pairs" in found.reason


def test_a_host_that_failed_a_gate_is_left_out_and_named():
    records = fleet(1.0, 1.0, 1.0, 1.0, 1.0)
    records["h5"] = change(records["h5"], lambda r: add(r, "return", prefix_cache_hits_tokens=32.0))
    found = conclude(protocol(), records, "c1")
    assert found.verdict == "BETTER"
    assert "left out: h5: gate prefix_evicted failed" in found.reason
    assert next(g for g in found.gates if g.gate == "prefix_evicted").passed is False


def test_an_engine_fault_on_one_host_withholds_better_from_the_fleet():
    records = fleet(1.0, 1.0, 1.0, pairs=7)
    records["h2"] = change(records["h2"], lambda r: faulted(r, "engine", "engine_died"), arm="offload", pair=1)
    found = conclude(protocol(), records, "c1")
    assert found.verdict == "INCONCLUSIVE"
    assert "h2: engine_died" in found.reason


def test_all_hosts_invalid_is_invalid():
    records = {h: change(r, lambda x: replace(x, samples=None)) for h, r in fleet(1.0, 1.0).items()}
    assert conclude(protocol(), records, "c1").verdict == "INVALID"


def test_an_odd_host_is_named_and_agreeing_hosts_are_not():
    assert not any("odd host" in c for c in conclude(protocol(), fleet(1.0, 1.02, 0.98, 1.0, 1.01), "c1").caveats)
    found = conclude(protocol(), fleet(1.0, 1.0, 1.0, 1.0, 3.0), "c1")
    assert any(caveat.startswith("h5 is the odd host") for caveat in found.caveats)


def test_paule_mandel_balances_the_sum_of_squares():
    effects, variances = [0.1, 0.5, -0.3, 0.9], [0.01, 0.02, 0.01, 0.03]
    tau2 = paule_mandel(effects, variances)
    weights = [1 / (v + tau2) for v in variances]
    mean = sum(w * e for w, e in zip(weights, effects, strict=True)) / sum(weights)
    assert sum(w * (e - mean) ** 2 for w, e in zip(weights, effects, strict=True)) == pytest.approx(3)
    assert paule_mandel([0.1, 0.1, 0.1], [0.01, 0.01, 0.01]) == 0.0


def test_the_fleets_interval_covers_as_often_as_it_says():
    import random

    generator = random.Random(11)
    campaigns, covered = 400, 0
    for _ in range(campaigns):
        hosts = []
        for _ in range(5):
            centre = generator.gauss(-0.2, 0.1)
            hosts.append(hodges_lehmann([generator.gauss(centre, 0.15) for _ in range(6)]))
        interval = combine(hosts).interval
        covered += interval.low <= -0.2 <= interval.high
    assert 0.92 <= covered / campaigns <= 0.99


def test_two_hosts_can_not_be_combined():
    with pytest.raises(ValueError, match="at least 3"):
        combine([hodges_lehmann([0.1, 0.2])] * 2)
    assert odd_hosts({"a": hodges_lehmann([0.1, 0.2])}, {}) == []


# ---------------------------------------------------------------------- break-even, time, metrics, table


def made_pairs(hit_control, hit_variant, miss_control, miss_variant):
    pairs = []
    for number in range(1, 7):
        runs = {r.arm: r for r in honest_records() if r.pair == number}
        jitter = 1 + number / 1000
        runs["control"] = with_ttft(with_ttft(runs["control"], "return", hit_control * jitter), "miss", miss_control)
        runs["offload"] = with_ttft(with_ttft(runs["offload"], "return", hit_variant), "miss", miss_variant * jitter)
        pairs.append(Pair(number, runs))
    return pairs


def at(*values, own=None):
    return break_even(made_pairs(*values), "offload", "control", "return", "miss", own)


def test_break_even_is_cost_over_gain_and_cost():
    found = at(0.230, 0.030, 0.200, 0.250)
    assert found.cost_seconds == pytest.approx(0.050, abs=0.002)
    assert found.gain_seconds == pytest.approx(0.200, abs=0.002)
    assert found.hit_share == pytest.approx(0.2, abs=0.01)
    assert found.ci_low <= found.hit_share <= found.ci_high
    assert found.confidence == pytest.approx(0.96875)


def test_without_a_cost_any_return_pays_and_without_a_gain_none():
    assert at(0.230, 0.030, 0.200, 0.190).note == "no cost shown: any return pays"
    assert at(0.230, 0.030, 0.200, 0.190).hit_share == 0.0
    nothing = at(0.230, 0.300, 0.200, 0.250)
    assert nothing.note == "does not pay at any share: a return is no faster"
    assert nothing.hit_share is None


@pytest.mark.parametrize(("own", "says"), [(0.5, "above"), (0.05, "below"), (None, "")])
def test_the_users_own_share_is_set_beside(own, says):
    found = at(0.230, 0.030, 0.200, 0.250, own=own)
    assert says in found.note
    assert found.own_hit_share == own


def test_break_even_keeps_its_arms_and_the_length_of_its_prefixes():
    even = conclude(protocol(), {"h1": honest_records()}, "c1").break_even
    assert (even.arm, even.against, even.hit) == ("offload", "control", "return")
    assert even.prefix_tokens == protocol().sizes["prompt_tokens"]


def test_break_even_without_values_is_a_note():
    pairs = [
        replace(p, runs={a: with_phase(r, "miss", ttft_median_seconds=None) for a, r in p.runs.items()})
        for p in made_pairs(1, 1, 1, 1)
    ]
    assert "no pair" in break_even(pairs, "offload", "control", "return", "miss").note


def test_the_time_budget_adds_up():
    budget = time_budget(honest_records(), install_seconds=100.0, campaign_seconds=450.0)
    assert budget.engine_start_seconds == pytest.approx(12 * 16)
    assert budget.other_seconds == pytest.approx(12 * 2.5 + (450 - 12 * 35))
    parts = budget.engine_start_seconds + budget.engine_stop_seconds + budget.phases_seconds + budget.other_seconds
    assert budget.total_seconds == pytest.approx(parts + 100)
    assert budget.other_share == pytest.approx(budget.other_seconds / parts)
    assert time_budget([]).other_share == 0.0


def test_an_unknown_metric_is_refused_with_the_allowed_names():
    with pytest.raises(UnusableInput, match="ttft_median_seconds, ttft_p95_seconds"):
        find_metric("ttft")
    assert METRICS["output_throughput_tokens_per_second"].better == "higher"


def test_preemptions_are_per_1000_requests():
    run = add(honest_records(1)[0], "miss", preemptions=3.0)
    assert find_metric("preemptions_per_1000_requests").extract(run, "miss") == 500.0
    assert find_metric("preemptions_per_1000_requests").extract(run, "return") == 0.0
    assert find_metric("preemptions_per_1000_requests").extract(run, "nowhere") is None


def test_the_table_has_a_row_a_run_and_phase_and_fixed_columns():
    records = honest_records()
    frame = to_frame(records)
    assert len(frame) == sum(len(r.phases) for r in records)
    assert list(frame.columns) == columns() == list(to_frame([]).columns)
    row = frame[(frame.arm == "offload") & (frame.phase == "return") & (frame.pair == 1)].iloc[0]
    assert row.delta_load_bytes == 33_554_432
    assert frame[(frame.arm == "control")].delta_load_bytes.isna().all()
    shuffled = to_frame(records[::-1])
    assert shuffled.equals(frame)
    dead = to_frame([replace(faulted(records[0], "engine", "engine_died"), phases=[])])
    assert list(dead.fault) == ["engine_died"]


def test_a_verdict_survives_json():
    found = verdict(honest_records(), own_hit_share=0.3)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Verdict) == found
    assert found.break_even.own_hit_share == 0.3


def test_a_host_that_could_not_be_planned_counts_against_the_fleet():
    records = {f"h{i}": honest_records(host=f"h{i}") for i in range(1, 4)}
    assert conclude(protocol(), records, "c1").verdict == "BETTER"
    found = conclude(protocol(), records, "c1", lost_hosts=["h4"])
    assert found.verdict == "INCONCLUSIVE"
    assert "3 of 4 planned hosts are valid" in found.reason
    assert (found.hosts[-1].host, found.hosts[-1].verdict, found.hosts[-1].reason) == (
        "h4",
        "INVALID",
        "unreachable, not planned",
    )
    assert found.hosts[-1].gates == []
    assert any("h4: unreachable, not planned" in caveat for caveat in found.caveats)
    assert [gate.passed for gate in found.gates] == [gate.passed for gate in conclude(protocol(), records, "c1").gates]
