"""The gates of a ladder, each seen failing on a planted fault."""

import re

import pytest
from kvtrial.analysis.faults import MAX_PAIR_GAP_SECONDS, completed_runs, sort_pairs
from kvtrial.analysis.gates import GATES, GateContext, run_gates
from kvtrial.analysis.gates.ladder import _beside_others, _books
from kvtrial.analysis.hostverdict import judge_host
from kvtrial.analysis.laddering import ALL_LEVELS
from kvtrial.analysis.levels import phases_of
from kvtrial.analysis.verdict import conclude
from kvtrial.record.plan import LadderPlan
from ladder_build import ARMS, REQUESTS, ladder_protocol, ladder_records
from msgspec.structs import replace

LADDER_GATES = {"levels_reset", "preemptions_add_up", "server_time_adds_up", "capacity_as_planned", "vram_headroom"}
GPU = {"name": "Example GPU", "memory.total": "143771"}


def context_of(records, protocol=None):
    pairs = sort_pairs(records, list(ARMS), {n: len(ARMS) for n in range(1, 7)}, MAX_PAIR_GAP_SECONDS)
    return GateContext(protocol or ladder_protocol(), "h1", pairs, completed_runs(records, pairs))


def judged(records, protocol=None):
    return {result.gate: result for result in run_gates(context_of(records, protocol))}


def books_of(records):
    found = [_books(run, phase) for run in records for phase in phases_of(run, ALL_LEVELS)]
    return [own for own in found if own is not None]


def everywhere(change, arm=None):
    """Records with a change to one level of one run of an arm."""
    records = ladder_records()
    at = next(n for n, run in enumerate(records) if run.pair == 3 and run.arm == (arm or "base"))
    run = records[at]
    phases = [change(phase) if phase.name == "load_5" else phase for phase in run.phases]
    records[at] = replace(run, phases=phases)
    return records


def raised(phase, **amounts):
    return replace(phase, after=phase.after | {k: (phase.after.get(k) or 0.0) + v for k, v in amounts.items()})


def test_honest_records_pass_every_gate():
    assert {name: result.passed for name, result in judged(ladder_records()).items() if not result.passed} == {}


def test_what_follows_from_the_pools_size_may_differ_only_where_an_arm_sizes_it():
    """more_kv declares another number of blocks and shows what follows from it; fewer_seqs declares none."""
    assert judged(ladder_records())["launch_differs_as_declared"].passed
    for field in ("num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency"):
        path = f"vllm_config.cache_config.{field}"
        records = [
            replace(run, resolved=replace(run.resolved, config={**run.resolved.config, path: 7}))
            if run.arm == "fewer_seqs"
            else run
            for run in ladder_records()
        ]
        result = judged(records)["launch_differs_as_declared"]
        assert result.passed is False and f"{path} is" in result.detail and "fewer_seqs" in result.detail


def test_the_ladders_gates_are_registered_and_planted_here():
    assert set(GATES) >= LADDER_GATES
    assert set(ladder_protocol().gates) >= LADDER_GATES


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p: replace(p, reset=replace(p.reset, succeeded=False, tries=40, detail="status 200")), "40 tries"),
        (lambda p: raised(p, prefix_cache_hits_tokens=256.0), "256 prompt tokens came from the engine's own"),
        (lambda p: raised(p, external_prefix_cache_hits_tokens=64.0), "64 prompt tokens came from the tier"),
        (lambda p: replace(p, before=p.before | {"requests_running": 1.0}), "requests running 1 when the level began"),
        (lambda p: replace(p, before=p.before | {"requests_waiting": 2.0}), "requests waiting 2 when the level began"),
    ],
    ids=["no success", "hits in its own cache", "hits in a tier", "somebody runs", "somebody waits"],
)
def test_a_level_that_did_not_begin_empty_fails(change, says):
    result = judged(everywhere(change))["levels_reset"]
    assert result.passed is False
    assert "pair 3, arm base, phase load_5" in result.detail and says in result.detail


def test_a_connector_whose_tier_was_not_emptied_fails():
    records = [replace(run, launch=replace(run.launch, connector="OffloadingConnector")) for run in ladder_records()]
    assert "the tier was not emptied" in judged(records)["levels_reset"].detail


@pytest.mark.parametrize("seconds", [0.5, -0.5])
def test_times_of_the_engine_that_do_not_add_up_fail_in_both_directions(seconds):
    result = judged(everywhere(lambda p: raised(p, decode_seconds_sum=seconds)))["server_time_adds_up"]
    assert result.passed is False and "differ from end-to-end" in result.detail


def test_a_pool_of_another_size_than_planned_fails():
    records = ladder_records()
    records = [
        replace(run, resolved=replace(run.resolved, cache_config={"num_gpu_blocks": "64", "block_size": "32"}))
        if run.arm == "base"
        else run
        for run in records
    ]
    assert "63 usable blocks of 32 tokens, planned were 64" in judged(records)["capacity_as_planned"].detail


PLANNED = LadderPlan({"load_1": 1}, {}, {"base": 64, "more_kv": 128, "fewer_seqs": 64})


def test_every_arm_has_the_pool_that_its_own_onset_was_predicted_from():
    def gate(records, ladder=PLANNED):
        context = replace(context_of(records), ladder=ladder)
        return next(result for result in run_gates(context) if result.gate == "capacity_as_planned")

    honest = gate(ladder_records())
    assert honest.passed is True
    assert honest.detail == (
        "64 usable blocks of 32 tokens in every run of base, as planned; and as planned more_kv 128, fewer_seqs 64"
    )
    other = {"num_gpu_blocks": "65", "block_size": "32"}
    small = [
        replace(run, resolved=replace(run.resolved, cache_config=other)) if run.arm == "more_kv" else run
        for run in ladder_records()
    ]
    found = gate(small)
    assert found.passed is False
    assert "arm more_kv has 64 usable blocks of 32 tokens, planned were 128 of 32" in found.detail
    # An arm that sizes its own KV cache has no number planned, and that is said.
    own = gate(small, replace(PLANNED, usable_gpu_blocks={"base": 64, "fewer_seqs": 64}))
    assert own.passed is True and own.detail.endswith("for more_kv no number of blocks was planned")


@pytest.mark.parametrize(("used_mib", "passed"), [(140_000, True), (142_000, False)])
def test_more_kv_cache_must_leave_the_headroom_of_the_other_buffers(used_mib, passed):
    records = [
        replace(
            run,
            conditions=replace(run.conditions, gpus=[GPU]),
            samples=replace(run.samples, vram_used_peak_bytes=used_mib * 2**20, vram_foreign_processes=0),
        )
        for run in ladder_records()
    ]
    result = judged(records)["vram_headroom"]
    assert result.passed is passed and "least free VRAM" in result.detail


@pytest.mark.parametrize(
    ("peaks_mib", "passed", "said"),
    [
        # One full GPU is not helped by an idle one beside it.
        ([142_700, 4], False, "GPU 0 of 2"),
        ([4, 142_700], False, "GPU 1 of 2"),
        ([100_000, 100_000], True, "least free VRAM at the peak 45,897,220,096 bytes"),
        ([], None, "of several GPUs only all together"),
    ],
)
def test_the_headroom_is_that_of_each_gpu(peaks_mib, passed, said):
    records = [
        replace(
            run,
            conditions=replace(run.conditions, gpus=[GPU, GPU]),
            samples=replace(
                run.samples,
                vram_used_peak_bytes=sum(peaks_mib) * 2**20,
                vram_used_peak_by_gpu_bytes=[mib * 2**20 for mib in peaks_mib],
                vram_foreign_processes=0,
            ),
        )
        for run in ladder_records()
    ]
    result = judged(records)["vram_headroom"]
    assert result.passed is passed and said in result.detail


def test_vram_that_was_not_sampled_is_not_decided():
    records = [replace(run, conditions=replace(run.conditions, gpus=[GPU])) for run in ladder_records()]
    assert judged(records)["vram_headroom"].passed is None


def test_what_a_larger_pool_brings_with_it_is_declared_and_the_same_in_an_arm_without_one_is_not():
    assert judged(ladder_records())["launch_differs_as_declared"].passed is True

    def with_size(run):
        config = {**run.resolved.config, "vllm_config.cache_config.kv_cache_size_tokens": 4128}
        return replace(run, resolved=replace(run.resolved, config=config))

    records = [with_size(run) if run.arm == "fewer_seqs" else run for run in ladder_records()]
    result = judged(records)["launch_differs_as_declared"]
    assert result.passed is False
    assert "kv_cache_size_tokens is 2080 in base and 4128 in fewer_seqs, which no arm declares" in result.detail


def test_the_proof_of_a_reset_says_what_would_have_been_found():
    detail = judged(ladder_records())["levels_reset"].detail
    assert "of each level's first prompt at least 224 tokens were found just before the reset" in detail
    older = [replace(run, phases=[replace(p, reset=replace(p.reset, marker_hit_tokens=None)) for p in run.phases])
             for run in ladder_records()]  # fmt: skip
    assert "no prompt was sent that would have been found" in judged(older)["levels_reset"].detail
    off = [replace(run, phases=[replace(p, reset=replace(p.reset, marker_hit_tokens=0.0)) for p in run.phases])
           for run in ladder_records()]  # fmt: skip
    assert "this engine keeps nothing that could be found" in judged(off)["levels_reset"].detail


EVERY_PAIR = range(1, 7)


def on_the_way(seconds, level=5, arms=("base",), pairs=(3,)):
    """So much more of each request of a level lies before the queue, as end-to-end and first token both count it."""

    def longer(phase):
        if phase.concurrency != level:
            return phase
        return raised(phase, e2e_seconds_sum=seconds * REQUESTS, ttft_seconds_sum=seconds * REQUESTS)

    return [
        replace(run, phases=[longer(phase) for phase in run.phases]) if run.arm in arms and run.pair in pairs else run
        for run in ladder_records()
    ]


def everywhere_on_the_way(seconds, level=5):
    return on_the_way(seconds, level, ARMS, EVERY_PAIR)


def test_the_wait_for_the_step_under_way_is_shown_and_is_no_fault_of_the_books():
    """25 ms: a request alone takes 1 ms on its way, and a step with prompts 30."""
    result = judged(everywhere_on_the_way(0.025))["server_time_adds_up"]
    assert result.passed is True
    said = result.detail.split("; ")
    # First what adds up and within what, then of the part that does not why it passes.
    assert re.match(
        r"queue \+ prefill \+ decode \+ way against end-to-end differ by at most 0\.\d\d % .*\(allowed 2 %\)", said[0]
    )
    assert re.fullmatch(r"without the way by at most 0\.\d\d % with one in flight \(allowed 2 %\)", said[1])
    beyond = re.fullmatch(
        r"without it by at most ([\d.]+) % with more, ([\d.]+) ms of a request, where the step under way when one came "
        r"takes up to ([\d.]+) ms \(allowed 2 % beside that\)", said[2],
    )  # fmt: skip
    assert float(beyond[1]) > 2 and float(beyond[2]) < float(beyond[3])
    share = r"\(\d\.\d\d %, at . in flight\)"
    assert re.search(rf"would look the same up to 15 ms a request {share} where one run loses it", result.detail)
    assert re.search(rf"and \d\d ms a request {share} where all runs of the level do", result.detail)


@pytest.mark.parametrize("level", [5, 6, 7])
def test_what_a_request_may_spend_on_its_way_does_not_grow_with_those_beside_it(level):
    """Beyond the step under way and 2 % of end-to-end nothing is allowed, however many are in flight."""
    result = judged(on_the_way(0.05, level))["server_time_adds_up"]
    assert result.passed is False
    assert re.search(r"the step under way when it came explains 3[01]\.\d ms", result.detail)


def test_a_step_under_way_has_ended_when_anybody_gets_a_first_token():
    """By the client's clock: 25 ms before the queue are too many where others got first tokens 5 ms after a send."""

    def sooner(phase):
        return replace(phase, ledger=replace(phase.ledger, next_first_token_ns=5_000_000 * phase.ledger.counted))

    records = [replace(run, phases=[sooner(phase) for phase in run.phases]) for run in everywhere_on_the_way(0.025)]
    result = judged(records)["server_time_adds_up"]
    assert result.passed is False and "the step under way when it came explains 5.0 ms" in result.detail
    older = [
        replace(run, phases=[replace(p, ledger=replace(p.ledger, next_first_token_ns=None)) for p in run.phases])
        for run in everywhere_on_the_way(0.025)
    ]
    assert judged(older)["server_time_adds_up"].passed is True


def test_a_request_alone_waits_for_no_step():
    result = judged(on_the_way(0.015, level=1))["server_time_adds_up"]
    assert result.passed is False
    assert "of a request with none beside it, which nothing explains" in result.detail
    assert judged(on_the_way(0.005, level=1))["server_time_adds_up"].passed is True


@pytest.mark.parametrize("pairs", [(2,), (2, 5), (1, 2, 5), EVERY_PAIR], ids=["one", "two", "half", "every pair"])
@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("seconds", [0.02, 0.028])
def test_time_that_an_arms_queue_loses_is_found_beside_the_others_in_whichever_pairs(seconds, arm, pairs):
    """In each run by itself 20 ms are no more than the step under way; beside the others of the level they are.

    A disturbed run looks the same, so fewer than half of an arm's runs are no fault of the books; nor do they pass.
    """
    result = judged(on_the_way(seconds, arms=[arm], pairs=pairs))["server_time_adds_up"]
    assert result.passed is (False if len(pairs) >= 3 else None)
    assert result.disturbed is (len(pairs) < 3)
    said = rf"pair {pairs[0]}, arm {arm}, phase load_5: requests spend \d+\.\d ms more on the way into the engine core"
    assert re.search(said, result.detail) or f"arm {arm} at 5 in flight: on the way" in result.detail


def test_a_disturbed_run_leaves_the_campaign_undecided_and_a_fault_of_the_books_invalid():
    disturbed = conclude(ladder_protocol(), {"h1": on_the_way(0.03, 7, ["more_kv"], (2,))}, "c1")
    assert disturbed.verdict == "INCONCLUSIVE"
    assert disturbed.recommendation.action == "run again, with nothing else at work on the host"
    assert "nobody can tell the two apart, so run it again" in disturbed.reason
    assert next(result for result in disturbed.comparisons if result.role == "primary").verdict == "INCONCLUSIVE"
    faulty = conclude(ladder_protocol(), {"h1": on_the_way(0.03, 7, ["more_kv"], EVERY_PAIR)}, "c1")
    assert (faulty.verdict, "gate server_time_adds_up failed" in faulty.reason) == ("INVALID", True)


def test_a_disturbed_host_takes_no_part_in_a_fleets_answer():
    records = on_the_way(0.03, 7, ["more_kv"], (2,))
    assert judge_host(ladder_protocol(), "h1", ladder_records()).counts is True
    assert judge_host(ladder_protocol(), "h1", records).counts is False


def test_less_than_half_a_step_of_one_run_and_a_step_of_all_runs_can_not_be_told_from_honest_books():
    """What the gate can't catch, as it says itself: 12 ms of a step of 30."""
    assert judged(on_the_way(0.012, arms=["more_kv"], pairs=(2, 5)))["server_time_adds_up"].passed is True
    assert judged(everywhere_on_the_way(0.028))["server_time_adds_up"].passed is True


def test_an_arm_of_other_work_is_not_held_against_the_others():
    """A smaller model's prefill is short while its way through the API server is not."""
    protocol = ladder_protocol()
    other = replace(protocol.arms["more_kv"], model="smaller")
    smaller = replace(protocol, arms=protocol.arms | {"more_kv": other})
    slow = on_the_way(0.016, arms=["more_kv"], pairs=EVERY_PAIR)
    found = _beside_others(context_of(slow, smaller), books_of(slow))
    assert all(left <= most for left, most in found.values())
    found = _beside_others(context_of(slow, protocol), books_of(slow))
    assert sum(left > most for left, most in found.values()) == 6


@pytest.mark.parametrize(
    "change",
    [
        lambda p: raised(p, e2e_seconds_sum=0.5, ttft_seconds_sum=0.5),  # more than any way takes
        lambda p: raised(p, e2e_seconds_sum=0.2),  # that the first token does not show
        lambda p: raised(p, queue_seconds_sum=0.2),  # queue counted twice
        lambda p: raised(p, queue_seconds_sum=-0.5, prefill_seconds_sum=-0.1),
    ],
    ids=["too much outside", "lost on the way out", "queue too long", "queue and prefill too short"],
)
def test_time_that_no_way_explains_is_a_fault_of_the_books(change):
    assert judged(everywhere(change))["server_time_adds_up"].passed is False


@pytest.mark.parametrize("bound", ["way_max_seconds", "outside_core_max_seconds"])
def test_bounds_that_earlier_campaigns_declared_are_read_and_loosen_nothing(bound):
    protocol = ladder_protocol()
    declared = {"tolerance_percent": 2, bound: 5.0}
    earlier = replace(protocol, gates=protocol.gates | {"server_time_adds_up": declared})
    assert judged(on_the_way(0.05), earlier)["server_time_adds_up"].passed is False
    result = judged(everywhere_on_the_way(0.025), earlier)["server_time_adds_up"]
    assert result.passed is True and f"{bound} of an earlier release: read, not used" in result.detail


def test_of_what_the_engines_times_leave_is_said_what_lies_outside_its_core():
    detail = judged(ladder_records())["server_time_adds_up"].detail
    assert "with the way" not in detail and "differ by at most 0.05 % in 108 levels (allowed 2 %)" in detail
    assert "without the way by at most 0.20 % with one in flight" in detail


def test_arms_of_one_pool_must_have_the_same_blocks():
    records = ladder_records()
    records = [
        replace(run, resolved=replace(run.resolved, cache_config={"num_gpu_blocks": "70", "block_size": "32"}))
        if run.arm == "fewer_seqs" and run.pair == 2
        else run
        for run in records
    ]
    assert judged(records)["launch_differs_as_declared"].passed is False
