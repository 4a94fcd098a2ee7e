"""Two bounds of a level's preemptions by the client's clock, and counts beyond them: lost short ones, invented ones."""

import tarfile
from pathlib import Path

import pytest
from counts_build import judged, recounted
from kvtrial.analysis.campaign import read_campaign, read_records
from kvtrial.record.pressure import RequestTimes, passed_by_others, phase_ledger
from ladder_build import ladder_protocol, ladder_records
from msgspec.structs import replace

RESULTS = Path(__file__).parents[3] / "docs" / "results"
STEP_US = 2_000
MEDIAN_NS = 1000 * STEP_US


def unpacked(folder, name):
    with tarfile.open(RESULTS / name / "campaign.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    (plan,) = folder.rglob("campaign.json")
    (records,) = read_records(plan.parent).values()
    return records, read_campaign(plan.parent).plan.protocol


@pytest.fixture(scope="module")
def h200(tmp_path_factory):
    """Preempted requests there wait hardly longer than the threshold of a stall: 178 stalls beside 204 preemptions."""
    return unpacked(tmp_path_factory.mktemp("tp2"), "h200-x2-2026-11-30/ladder-tp2")


@pytest.fixture(scope="module")
def cpu(tmp_path_factory):
    return unpacked(tmp_path_factory.mktemp("cpu"), "cpu-2026-11-30/ladder")


def one(number, gaps, first_us=30_000):
    first = 1000 * first_us
    return RequestTimes(f"load/{number}", 0, 1_000_000, first, first + 1000 * sum(gaps), gaps)


def steady(number, steps=100, jitter_us=0):
    return one(number, [STEP_US] * steps, 30_000 + jitter_us)


def test_a_request_that_is_computed_again_in_the_next_step_is_passed_by_and_does_not_wait():
    short = one(9, [STEP_US] * 40 + [2 * STEP_US] + [STEP_US] * 58)
    assert passed_by_others([short, *(steady(n, jitter_us=100 * n) for n in range(3))], MEDIAN_NS) == (0, 1)


def test_a_long_step_that_all_wait_for_passes_nobody_by():
    same = [one(n, [STEP_US] * 40 + [30_000] + [STEP_US] * 58, 30_000 + 100 * n) for n in range(4)]
    assert passed_by_others(same, MEDIAN_NS) == (0, 0)


def test_tokens_of_one_step_that_come_apart_pass_nobody_by():
    """Up to a quarter of a step; further apart where it is one of several, but not where it is the late one itself."""
    late = one(9, [STEP_US] * 40 + [STEP_US + 400, STEP_US - 400] + [STEP_US] * 58)
    assert passed_by_others([late, *(steady(n) for n in range(3))], MEDIAN_NS) == (0, 0)
    later = one(9, [STEP_US] * 40 + [STEP_US + 900, STEP_US - 900] + [STEP_US] * 58)
    assert passed_by_others([later, *(steady(n) for n in range(3))], MEDIAN_NS) == (0, 1)


@pytest.mark.parametrize("victims", [1, 3, 6])
def test_each_of_those_preempted_at_once_waits_and_is_passed_by(victims):
    """They can't get a token while they wait, so that they say nothing of each other."""
    waiting = [one(10 + n, [STEP_US] * 40 + [20 * STEP_US] + [STEP_US] * 39, 30_000 + 50 * n) for n in range(victims)]
    assert passed_by_others([*waiting, steady(1), steady(2)], MEDIAN_NS) == (victims, victims)


def test_waits_below_the_threshold_of_a_stall_are_in_the_ledger():
    waiting = one(9, [STEP_US] * 40 + [15 * STEP_US] + [STEP_US] * 44)
    ledger = phase_ledger([waiting, steady(1), steady(2)], 20.0, MEDIAN_NS)
    assert (ledger.stalls, ledger.waits, ledger.passed_by) == (0, 1, 1)
    assert phase_ledger([waiting], 20.0, 0).waits is None


def test_counts_whose_waits_are_no_stalls_can_not_be_lost_unseen(h200):
    """Half of the preempted requests at 10 in flight: below 140 ms, the threshold of a stall there."""
    records, protocol = h200
    honest = judged(records, protocol)
    assert honest.passed is True and "204 times a request waited while others went on" in honest.detail

    def lost(was):
        return was - 1 if was == 2 else was

    result = judged(recounted(records, lost, pairs=(2, 5)), protocol)
    assert result.passed is False
    assert "pair 2, arm base, phase load_10: 1 preemption counted, and 2 times a request got no token" in result.detail


def test_counts_that_were_doubled_in_all_of_the_engines_books_are_found_where_the_client_saw_less(h200):
    records, protocol = h200
    result = judged(recounted(records, lambda was: 2 * was, pairs=(3,)), protocol)
    assert result.passed is False
    assert "times others got a token in a gap of a request's; each takes one" in result.detail
    assert "would not show up to" in judged(records, protocol).detail


def test_what_is_too_high_on_a_busy_machine_shows_when_it_is_gross_and_the_gate_says_from_where_on(cpu):
    """Tokens of one step that come apart on two cores look like steps that passed a request by."""
    records, protocol = cpu
    assert judged(recounted(records, lambda was: was + 3 if was else 0), protocol).passed is True
    assert judged(recounted(records, lambda was: 100 * was), protocol).passed is False


def test_a_count_above_what_the_client_allows_is_found_in_synthetic_records():
    records, protocol = _of_one_step(ladder_records()), ladder_protocol()
    assert judged(records, protocol).passed is True
    result = judged(recounted(records, lambda was: was + 1 if was else 0), protocol)
    assert result.passed is False and "3 preemptions counted, and only 2 times others got a token" in result.detail


def test_where_a_request_may_be_computed_again_in_several_steps_no_count_is_too_high():
    """Between two of them it may be preempted again, all in one gap."""
    records, protocol = _of_one_step(ladder_records(), tokens=512), ladder_protocol()
    result = judged(recounted(records, lambda was: was + 1 if was else 0), protocol)
    assert result.passed is True
    assert "by the client no level's count is bounded above" in result.detail


def _of_one_step(records, tokens=8192):
    named = {"vllm_config.scheduler_config.max_num_batched_tokens": tokens}
    return [replace(run, resolved=replace(run.resolved, config=run.resolved.config | named)) for run in records]


@pytest.mark.parametrize(("elsewhere", "passed"), [(0, False), (1, False), (2, None)])
def test_waits_where_all_fits_say_that_others_need_be_no_preemptions(elsewhere, passed):
    """A machine that holds up single requests: two waits too many prove nothing where a level that fits has two."""

    def held_up(phase, arm):
        if phase.name == "load_4" and arm == "more_kv":
            return replace(phase, ledger=replace(phase.ledger, waits=elsewhere))
        if phase.name == "load_5" and arm == "base":
            return replace(phase, ledger=replace(phase.ledger, waits=4))
        return phase

    records = [replace(run, phases=[held_up(p, run.arm) for p in run.phases]) for run in ladder_records()]
    result = judged(records, ladder_protocol())
    assert result.passed is passed
    assert "2 preemptions counted, and 4 times a request got no token for over 20 ms" in result.detail
    assert ("run it again on a quieter machine" in result.detail) is (passed is None)
