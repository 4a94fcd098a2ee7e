"""MOVED where the engine books a wait before the first token as something else than queue time, planted and real."""

import tarfile
from pathlib import Path

import pytest
from kvtrial.analysis.campaign import read_campaign, read_records
from kvtrial.analysis.faults import Pair
from kvtrial.analysis.ladder import moved_of, prompts_alike
from kvtrial.analysis.ledger import judge_moved
from kvtrial.analysis.protocols import load_protocol
from kvtrial.analysis.recommend import recommend
from kvtrial.analysis.verdict import conclude
from ladder_build import PROTOCOLS, ladder_protocol, ladder_records
from msgspec.structs import replace

CPU = Path(__file__).parents[3] / "docs" / "results" / "cpu-2026-11-30" / "ladder" / "campaign.tar.xz"


def booked_as_prefill(run, share=1.0):
    """The run's queue time above one in flight moved into the engine's prefill: sums and whole stay what they were."""
    shift, phases = 0.0, []
    for phase in run.phases:
        before = dict(phase.before)
        for role, sign in (("queue_seconds_sum", -1), ("prefill_seconds_sum", 1)):
            before[role] += sign * shift
        if phase.ledger is not None:
            shift += share * (phase.after["queue_seconds_sum"] - phase.before["queue_seconds_sum"])
        after = dict(phase.after)
        for role, sign in (("queue_seconds_sum", -1), ("prefill_seconds_sum", 1)):
            after[role] += sign * shift
        phases.append(replace(phase, before=before, after=after))
    return replace(run, phases=phases)


def said(records, protocol, arm="fewer_seqs"):
    pairs = {}
    for run in records:
        pairs.setdefault(run.pair, {})[run.arm] = run
    found = moved_of(protocol, [Pair(number, runs) for number, runs in sorted(pairs.items())])
    return next(moved for moved in found if moved.arm == arm)


@pytest.fixture(scope="module")
def cpu(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cpu")
    with tarfile.open(CPU) as archive:
        archive.extractall(folder, filter="data")
    (campaign,) = folder.iterdir()
    (records,) = read_records(campaign).values()
    return [run for run in records if run.outcome == "completed"], read_campaign(campaign).plan.protocol


@pytest.mark.parametrize("share", [1.0, 0.5], ids=["all of it", "half of it"])
def test_a_queue_that_the_engine_books_as_prefill_is_moved_all_the_same(share):
    """The fault that passed every gate: sums add up, the queue is empty, and requests wait for their first token."""
    planted = [booked_as_prefill(run, share) if run.arm == "fewer_seqs" else run for run in ladder_records()]
    verdict = conclude(ladder_protocol(), {"h1": planted}, "c1")
    arm = next(arm for arm in verdict.ladder.arms if arm.arm == "fewer_seqs")
    assert arm.moved is True
    assert arm.moved_by == "first_token"
    assert arm.moved_note.startswith("MOVED: the wait for the first token took what preemption gave: a request stalls")
    assert "the engine does not book that as queue time" in arm.moved_note
    counts = [c for c in verdict.comparisons if (c.arm, c.metric) == ("fewer_seqs", "preemptions_per_1000_requests")]
    assert [c.moved for c in counts] == [True]
    gain = next(arm for arm in verdict.ladder.arms if arm.arm == "more_kv")
    assert gain.moved is False and "disagree" not in gain.moved_note


def test_the_same_on_the_real_engine(cpu):
    records, protocol = cpu
    honest = said(records, protocol)
    assert honest.moved is True and "disagree" not in honest.note
    planted = said([booked_as_prefill(run) if run.arm == "fewer_seqs" else run for run in records], protocol)
    assert planted.moved is True and planted.by == "first_token"
    assert "queueing took" not in planted.note
    assert said(records, protocol, "more_kv").moved is False


def test_where_the_queue_alone_took_it_that_is_said():
    """A queue that grows while the prefill behind it shrinks: the client waits less longer than the queue says."""
    given, nothing = ([0.0] * 6, [0.1] * 6), [0.0] * 6
    found = judge_moved("a", "b", given, ([0.15] * 6, nothing), ([0.05] * 6, nothing))
    assert found.moved is True
    assert "by the client's clock requests wait less than that longer" in found.note


def test_without_a_level_of_one_in_flight_the_engines_queue_decides():
    records = [
        replace(run, phases=[phase for phase in run.phases if phase.concurrency != 1]) for run in ladder_records()
    ]
    found = said(records, ladder_protocol())
    assert found.moved is True and "client" not in found.note


GIVEN, NOTHING = ([0.0] * 6, [0.1] * 6), [0.0] * 6
LATER = ([0.15] * 6, NOTHING)


def test_what_the_clients_clock_decides_is_printed_with_its_own_words_and_numbers():
    found = judge_moved("a", "b", GIVEN, (NOTHING, NOTHING), LATER)
    assert (found.moved, found.by) == (True, "first_token")
    assert found.taken_seconds_per_request == found.taken_low == pytest.approx(0.15)
    assert found.net_low == found.net_high == pytest.approx(0.05)
    assert found.note == (
        "MOVED: the wait for the first token took what preemption gave: a request stalls 0.1 s less and waits 0.15 s "
        "longer for its first token, beyond what one alone does (sum +0.05 s, interval +0.05 to +0.05), by the "
        "client's clock; the engine does not book that as queue time, by which it queues 0 s longer (sum -0.1 s, "
        "interval -0.1 to -0.1)"
    )
    both = judge_moved("a", "b", GIVEN, LATER, LATER)
    assert both.by == "queue" and both.note.startswith("MOVED: queueing took what preemption gave")


def test_a_later_first_token_of_an_arm_that_computes_prompts_otherwise_is_not_called_queueing():
    found = judge_moved("a", "b", GIVEN, (NOTHING, NOTHING), LATER, prompts_alike=False)
    assert (found.moved, found.by) == (None, "queue_or_prompts")
    assert "MOVED" not in found.note and "nobody can say whether requests queue or their prompts take longer" in (
        found.note
    )
    # What the engine itself books as queue time is queueing in any arm.
    assert judge_moved("a", "b", GIVEN, LATER, LATER, prompts_alike=False).by == "queue"


@pytest.mark.parametrize(
    ("arm", "alike"),
    [("more_kv", True), ("fewer_seqs", True), ("second_replica", True), ("smaller_batch", False),
     ("offload_all", False), ("kv_offloading_size", False), ("fp8_kv", False), ("tensor_parallel", False),
     ("smaller_model", False), ("shorter_inputs", False)],
)  # fmt: skip
def test_which_arms_compute_prompts_as_the_base_does(arm, alike):
    assert prompts_alike(load_protocol("preemption_ladder", PROTOCOLS), arm) is alike


@pytest.mark.parametrize(
    ("by", "said"), [("queue", "queue for as long"), ("first_token", "by the client's clock"),
                     ("queue_or_prompts", "for how it computes prompts")],
)  # fmt: skip
def test_what_took_the_delay_is_why_an_arm_is_not_recommended(by, said):
    verdict = conclude(ladder_protocol(), {"h1": ladder_records()}, "c1")
    primary = verdict.comparisons[0]
    advice = recommend(ladder_protocol(), "BETTER", "", "gpu", [primary], [], took={primary.arm: by})
    assert advice.action == f"do not adopt {primary.arm}" and said in advice.reason
