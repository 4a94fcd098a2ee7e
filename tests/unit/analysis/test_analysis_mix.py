"""The sweep of shares: gates that hold the mix to what was declared, the break-even found, and what is said of it."""

import msgspec
import pytest
from build import add, change, with_phase, with_requests
from kvtrial.analysis import answer
from kvtrial.analysis.breakeven import find_break_even
from kvtrial.analysis.faults import completed_runs, sort_pairs
from kvtrial.analysis.gates import GateContext, run_gates
from kvtrial.analysis.mixes import declared_shares, saturated_phases, trace_phases
from kvtrial.analysis.recommend import recommend
from kvtrial.analysis.report import build_report
from kvtrial.analysis.verdict import conclude
from kvtrial.record.verdict import Verdict
from mix_build import line, mix_protocol, mix_records, with_open_loop
from msgspec.structs import replace

SHARES = {"mix_00": 0.0, "mix_25": 0.25, "mix_50": 0.5, "mix_75": 0.75, "mix_100": 1.0}


def judge(records, name="offload_mix"):
    on = mix_protocol(name)
    pairs = sort_pairs(records, list(on.arms))
    return {g.gate: g for g in run_gates(GateContext(on, "h1", pairs, completed_runs(records, pairs)))}


def found_of(records):
    pairs = sort_pairs(records, ["control", "offload"]).valid
    return find_break_even(pairs, "offload", "control", SHARES, ("return", "miss"))


def offload(records, how, pair=None):
    return change(records, how, arm="offload", **({} if pair is None else {"pair": pair}))


# ------------------------------------------------------------------------------------------------------------ gates


def test_the_shares_are_those_of_the_protocol():
    assert declared_shares(mix_protocol()) == SHARES
    assert declared_shares(mix_protocol("offload_mix_share")) == {"mix": 0.5}
    assert trace_phases(mix_protocol("offload_mix_trace")) == ["trace"]
    assert trace_phases(mix_protocol()) == []


def test_an_honest_sweep_passes_every_gate_and_says_its_tokens():
    results = judge(mix_records())
    assert [result for result in results.values() if result.passed is not True] == []
    detail = results["treatment_delivered"].detail
    assert "as declared, tokens loaded × 4,096 = bytes: mix_00 0, mix_25 4,096, mix_50 8,192, mix_75 12,288" in detail
    assert "mix_50: pressure 264 blocks" in results["working_set"].detail
    assert "no queue grew through mix_00" in results["keeps_up"].detail


def loaded(phase: str, tokens: int):
    """`tokens` more (or fewer) from the tier in a phase, with bytes, hits and sources that fit."""

    def how(run):
        return add(
            run, phase, prompt_tokens_external=tokens, external_prefix_cache_hits_tokens=tokens,
            prompt_tokens_computed=-tokens, load_bytes=tokens * 4096,
        )  # fmt: skip

    return how


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (loaded("mix_50", 1024), "9,216 tokens came from the tier, due are 8,192"),
        (loaded("mix_50", -1024), "7,168 tokens came from the tier, due are 8,192"),
        (loaded("mix_00", 1024), "1,024 tokens came from the tier, due are 0"),
        (loaded("mix_25", -4096), "0 bytes were loaded"),
        (lambda run: add(run, "mix_75", load_bytes=4096.0), "50,335,744 bytes loaded, but 12,288 external tokens"),
    ],
)
def test_counters_that_do_not_match_the_declared_share_are_no_treatment(plant, says):
    result = judge(offload(mix_records(), plant, 2))["treatment_delivered"]
    assert result.passed is False
    assert says in result.detail
    assert "pair 2, arm offload" in result.detail


def test_another_share_than_declared_is_no_treatment():
    """One request of mix_50 goes to a prompt never seen, in both arms, and the tier loads as much as then is due."""

    def stray(run):
        phase = next(p for p in run.phases if p.name == "mix_50")
        first = next(r for r in phase.requests if r.key.startswith("target"))
        changed = [replace(r, prompt_sha256="0" * 64) if r is first else r for r in phase.requests]
        return with_phase(run, "mix_50", requests=changed)

    records = offload(change(mix_records(), stray), loaded("mix_50", -1024))
    result = judge(records)["treatment_delivered"]
    assert result.passed is False
    assert "7 of 16 requests return to a prompt sent before, declared are 8 (50%)" in result.detail


def test_a_mix_of_which_not_all_requests_are_listed_can_not_be_held_to_its_share():
    records = offload(mix_records(), lambda run: with_phase(run, "mix_50", sent=17))
    assert "only 16 of 17 requests are listed" in judge(records)["treatment_delivered"].detail


def test_returns_in_another_order_than_populated_fail_the_working_set():
    def reverse(run):
        phase = next(p for p in run.phases if p.name == "mix_50")
        return with_phase(run, "mix_50", requests=phase.requests[::-1])

    result = judge(change(mix_records(), reverse))["working_set"]
    assert result.passed is False
    assert "mix_50: the prompts return in another order" in result.detail


def test_a_return_that_the_engines_own_cache_answers_was_not_evicted():
    result = judge(offload(mix_records(), lambda r: add(r, "mix_25", prefix_cache_hits_tokens=32.0)))["prefix_evicted"]
    assert result.passed is False
    assert "mix_25" in result.detail


# ------------------------------------------------------------------------------------------------------- saturation


def saturate(records, phase="mix_00", first=0.4, second=2.0, arm="control"):
    return change(records, lambda run: with_open_loop(run, phase, first, second), arm=arm)


def test_an_arm_that_falls_behind_fails_the_gate_with_its_numbers():
    records = saturate(mix_records())
    result = judge(records)["keeps_up"]
    assert result.passed is False
    assert (
        "arm control, phase mix_00: the mean TTFT grew from 0.4 s in the first half to 2 s in the second"
        in result.detail
    )
    assert "20 s in 100 s of arrivals" in result.detail
    assert conclude(mix_protocol(), {"h1": records}, "c1").verdict == "INVALID"


@pytest.mark.parametrize(
    ("first", "second", "is_saturated"),
    [
        (0.4, 0.5, False),
        (0.4, 1.3, True),
        (0.4, 0.7, False),
        (0.1, 0.25, True),
        (0.030, 0.070, False),
        (0.5, 0.2, False),
    ],
)
def test_a_queue_that_grows_is_told_from_noise(first, second, is_saturated):
    assert bool(saturated_phases(saturate(mix_records(), first=first, second=second))) is is_saturated


def test_one_crowd_at_the_end_of_one_run_is_chance():
    records = change(mix_records(), lambda run: with_open_loop(run, "mix_00", 0.4, 2.0), arm="control", pair=3)
    assert saturated_phases(records) == []


def test_where_no_gate_asks_saturation_is_a_caveat():
    on = mix_protocol()
    ungated = replace(on, gates={name: given for name, given in on.gates.items() if name != "keeps_up"})
    verdict = conclude(ungated, {"h1": saturate(mix_records())}, "c1")
    assert verdict.verdict != "INVALID"
    assert any("did not keep up with the arrivals" in caveat for caveat in verdict.caveats)
    assert not any("keep up" in caveat for caveat in conclude(ungated, {"h1": mix_records()}, "c1").caveats)


def test_an_open_loop_that_was_not_recorded_can_not_be_judged():
    records = change(mix_records(), lambda run: with_phase(run, "mix_50", open_loop=None))
    assert judge(records)["keeps_up"].passed is None


# ---------------------------------------------------------------------------------------------- the break-even found


def test_the_zero_of_the_line_is_found():
    found = found_of(mix_records(line(cost=0.02, gain=0.18)))
    assert found.pays == "above"
    assert found.hit_share == pytest.approx(0.1)
    assert found.cost_seconds == pytest.approx(0.02)
    assert found.gain_seconds == pytest.approx(0.18)
    assert found.confidence == pytest.approx(0.96875)
    assert [round(point.difference_seconds, 3) for point in found.points] == [0.02, -0.03, -0.08, -0.13, -0.18]
    assert [point.hit_share for point in found.points] == list(SHARES.values())


@pytest.mark.parametrize(
    ("cost", "gain", "pays", "says"),
    [
        (-0.02, 0.18, "every", "pays at every share measured (0% to 100%)"),
        (0.05, -0.01, "none", "pays at none of the shares measured (0% to 100%)"),
        (-0.02, -0.01, "unknown", "the gain falls as more requests return"),
    ],
)
def test_where_no_zero_lies_inside_it_is_said(cost, gain, pays, says):
    found = found_of(mix_records(line(cost, gain)))
    assert found.pays == pays
    assert found.hit_share is None
    assert says in found.note
    assert answer.found_text(found).startswith("Found by the sweep: ")
    assert says in answer.found_text(found)


def test_a_noisy_zero_has_a_wide_interval_and_one_in_the_noise_is_not_located():
    quiet, noisy = (found_of(mix_records(line(0.02, 0.18, jitter))) for jitter in (0.002, 0.05))
    assert quiet.ci_high - quiet.ci_low < noisy.ci_high - noisy.ci_low
    assert quiet.ci_low <= 0.1 <= quiet.ci_high
    drowned = found_of(mix_records(line(0.004, 0.004, jitter=0.2)))
    assert drowned.pays != "above" or "not located" in drowned.note or drowned.ci_high - drowned.ci_low > 0.5


@pytest.mark.parametrize(
    ("own", "says"), [(0.5, "your share of 50% is above it"), (0.01, "your share of 1% is below it")]
)
def test_the_users_own_share_is_set_beside_the_found_one(own, says):
    verdict = conclude(mix_protocol(), {"h1": mix_records(line(0.02, 0.18, 0.005))}, "c1", own_hit_share=own)
    assert verdict.break_even is not None
    assert verdict.break_even.found is not None
    assert says in verdict.break_even.found.note


def test_two_shares_make_a_line_and_one_does_not():
    pairs = sort_pairs(mix_records(), ["control", "offload"]).valid
    two = find_break_even(pairs, "offload", "control", {"mix_00": 0.0, "mix_100": 1.0}, ("return", "miss"))
    assert two is not None
    assert two.hit_share == pytest.approx(0.1)
    assert find_break_even(pairs, "offload", "control", {"mix_50": 0.5}, ("return", "miss")) is None


def test_a_pair_that_lacks_a_share_is_left_out_and_said():
    records = offload(mix_records(), lambda run: with_phase(run, "mix_75", ttft_mean_seconds=None), 4)
    found = found_of(records)
    assert found.pairs == 5
    assert "1 pairs lack a share and are left out" in found.note


def test_the_found_share_is_set_beside_the_computed_one_of_the_same_pairs():
    """The records' own return gains about 195 ms and a miss costs nothing, so a computed share is about 0."""
    verdict = conclude(mix_protocol(), {"h1": mix_records()}, "c1")
    even = verdict.break_even
    assert even is not None
    assert even.found is not None
    assert even.hit_share is not None
    assert even.found.minus_computed == pytest.approx(even.found.hit_share - even.hit_share, abs=0.06)
    text = answer.break_even_text(even)
    assert text.startswith(
        "offload against control: Found by the sweep of 5 shares: it pays when more than 10 % of requests return"
    )
    assert "Computed from a return and a miss by themselves, it pays when more than" in text
    assert msgspec.json.decode(msgspec.json.encode(verdict), type=Verdict) == verdict


# ------------------------------------------------------------------------------------------- what the user is told


def test_the_verdict_of_a_sweep_is_that_of_half_the_requests_returning():
    verdict = conclude(mix_protocol(), {"h1": mix_records()}, "c1")
    assert verdict.verdict == "BETTER"
    lines = answer.ten_lines(verdict, "results/x")
    assert len(lines) <= 10
    assert lines[0].startswith(
        "BETTER: On average the first token of a request of a mix in which 50 % return to an evicted prefix comes 2"
    )
    assert any(text.startswith("Break-even: offload against control: Found by the sweep of 5 shares") for text in lines)


def test_a_single_share_is_the_users_own():
    on = mix_protocol("offload_mix_share")
    records = [
        replace(run, phases=[replace(p, name=p.name.replace("mix_50", "mix").replace("_50", "_mix"),
                                     block=p.block.replace("mix_50", "mix"))
                             for p in run.phases if p.block in ("warmup", "return", "miss", "mix_50")])
        for run in mix_records()
    ]  # fmt: skip
    verdict = conclude(on, {"h1": records}, "c1")
    assert [gate for gate in verdict.gates if gate.passed is not True] == []
    assert verdict.break_even is not None
    assert verdict.break_even.found is None
    assert verdict.break_even.own_hit_share == 0.5


def test_the_report_draws_the_sweep_with_both_break_evens():
    records = mix_records()
    verdict = conclude(mix_protocol(), {"h1": records}, "c1")
    page = build_report(verdict, mix_protocol(), records, {}, None)
    assert 'aria-labelledby="mix-title' in page
    assert "The sweep of shares" in page
    assert "break-even hit share, found" in page
    assert "break-even hit share, computed" in page
    assert page == build_report(verdict, mix_protocol(), records, {}, None)


@pytest.mark.parametrize("gain", [-0.1, 0.18])
def test_a_sweep_without_a_zero_is_drawn_too(gain):
    records = mix_records(line(-0.02 if gain > 0 else 0.1, gain))
    verdict = conclude(mix_protocol(), {"h1": records}, "c1")
    page = build_report(verdict, mix_protocol(), records, {}, None)
    assert "none inside" in page
    assert ("pays at every share" if gain > 0 else "pays at none") in page


# ------------------------------------------------------------------------------------------------------------ traces


def as_trace(records):
    """mix_50 taken for the trace phase, at the end of the run."""
    changed = []
    for run in records:
        kept = [p for p in run.phases if p.block in ("warmup", "return", "miss")]
        mix = next(p for p in run.phases if p.name == "mix_50")
        changed.append(replace(run, phases=[*kept, replace(mix, name="trace", block="trace")]))
    return changed


def test_a_trace_says_where_its_tokens_came_from():
    results = judge(as_trace(mix_records()), "offload_mix_trace")
    assert [result for result in results.values() if result.passed is not True] == []
    detail = results["treatment_delivered"].detail
    assert "offload: 0.0% of 99,840 prompt tokens from the engine's own cache, 49.2% from the tier" in detail
    assert "control: 0.0% of 99,840 prompt tokens from the engine's own cache, 0.0% from the tier, 100.0%" in detail


def test_a_trace_that_never_asks_the_tier_is_neither_a_gain_nor_a_loss():
    records = as_trace(offload(mix_records(), loaded("mix_50", -8192)))
    verdict = conclude(mix_protocol("offload_mix_trace"), {"h1": records}, "c1")
    assert verdict.verdict == "INVALID"
    assert "neither a gain nor a loss: the treatment was not delivered" in verdict.reason
    assert all(comparison.effect is None for comparison in verdict.comparisons)
    advice = recommend(mix_protocol("offload_mix_trace"), "INVALID", verdict.reason, "cpu", [], [])
    assert advice.action.startswith("keep the plain GPU cache for such requests")


def test_more_requests_than_a_record_lists_are_complete_all_the_same():
    def long(run):
        phase = next(p for p in run.phases if p.name == "trace")
        listed = [replace(phase.requests[0], key=f"t/{i}") for i in range(1000)]
        more = add(run, "trace", requests_finished_length=1500.0 - phase.sent)
        return with_phase(more, "trace", sent=1500, finished=1500, requests=listed)

    records = change(as_trace(mix_records()), long)
    assert judge(records, "offload_mix_trace")["requests_complete"].passed is True
    lost = change(records, lambda run: with_phase(run, "trace", requests=run.phases[-1].requests[:999]))
    assert judge(lost, "offload_mix_trace")["requests_complete"].passed is False


def test_requests_keep_their_length_in_both_arms():
    records = offload(
        mix_records(), lambda run: with_requests(run, "mix_75", lambda r: replace(r, output_tokens=15)), 1
    )
    assert judge(records)["prompts_and_outputs_equal"].passed is False
