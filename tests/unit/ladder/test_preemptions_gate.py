"""Counts of preemptions that what goes with them contradicts, planted in recorded campaigns and synthetic records."""

import functools
import hashlib
import tarfile
from pathlib import Path

import msgspec
import pytest
from counts_build import judged, recounted
from kvtrial.analysis.campaign import analyze, read_campaign, read_records
from kvtrial.analysis.gates.preemptions import _overfull
from kvtrial.analysis.laddering import ALL_LEVELS, PREEMPTIONS_GATE, with_ladder_gates
from kvtrial.analysis.levels import phases_of
from kvtrial.analysis.stalls import with_stalls
from kvtrial.record.errors import UnusableInput
from kvtrial.record.pressure import RequestTimes, median_gap_ns, phase_ledger, stalls_of
from kvtrial.record.record import RunRecord
from ladder_build import ARMS, ladder_protocol, ladder_records
from msgspec.structs import replace

RESULTS = Path(__file__).parents[3] / "docs" / "results"
CPU = RESULTS / "cpu-2026-11-30" / "ladder" / "campaign.tar.xz"
H200 = RESULTS / "h200-2026-11-29" / "ladder"
TWO_GPUS = RESULTS / "h200-x2-2026-11-30" / "ladder"


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cpu")
    with tarfile.open(CPU) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.iterdir())


@pytest.fixture(scope="module")
def cpu(unpacked):
    """The default ladder on two CPU cores, with its requests: its stalls are dated from them."""
    (records,) = read_records(unpacked).values()
    return records, read_campaign(unpacked).plan.protocol


@functools.cache
def without_requests(directory):
    """A committed campaign whose records alone are kept: its stalls are counted, not dated."""
    paths = sorted(directory.glob("runs/*/*/record.json"))
    records = [msgspec.json.decode(path.read_bytes(), type=RunRecord) for path in paths]
    return records, read_campaign(directory).plan.protocol


def test_the_recorded_ladders_pass_and_the_client_saw_each_preemption_of_the_default_one(cpu):
    result = judged(*cpu)
    assert result.passed is True
    assert "36 preemptions counted in 108 levels" in result.detail
    assert "by the client 36 times a request waited while others went on" in result.detail
    assert "the plan is older than this gate" in result.detail
    for directory in (H200, TWO_GPUS):
        assert judged(*without_requests(directory)).passed is True


ZERO, HALF = (lambda was: 0), (lambda was: was // 2)


@pytest.mark.parametrize("books", [False, True], ids=["the counter alone", "all of the engine's books"])
@pytest.mark.parametrize("pairs", [(2, 5), (1,), None], ids=["two pairs", "one pair", "all pairs"])
@pytest.mark.parametrize("count", [ZERO, HALF, lambda was: max(0, was - 1)], ids=["to 0", "halved", "one less"])
def test_counts_that_were_lost_are_found(cpu, count, pairs, books):
    """The fault that passed every gate: 0 in two of six pairs. The client's clock has them, whatever the engine says.

    Halves are rounded down, so the single preemption at 5 in flight is gone there, too.
    """
    records, protocol = cpu
    result = judged(recounted(records, count, pairs=pairs, books=books), protocol)
    assert result.passed is False
    assert f"pair {(pairs or (1,))[0]}, arm base, phase load_5: 0 preemptions counted" in result.detail
    assert ("while others went on" if books else "the time line read 1") in result.detail


def test_a_count_that_lost_one_of_three_is_found(cpu):
    records, protocol = cpu
    result = judged(recounted(records, lambda was: 2 if was == 3 else was, pairs=(4,)), protocol)
    assert result.passed is False
    said = "pair 4, arm base, phase load_7: 2 preemptions counted, and 3 times a request got no token for over"
    assert result.detail.startswith(said)


def test_a_campaign_that_was_tampered_with_on_disk_is_invalid(unpacked, tmp_path):
    """As kvtrial analyze reads it, digests made anew."""
    copy = tmp_path / unpacked.name
    copy.mkdir()
    for path in unpacked.rglob("*"):
        target = copy / path.relative_to(unpacked)
        if path.is_dir():
            target.mkdir(exist_ok=True, parents=True)
        else:
            target.parent.mkdir(exist_ok=True, parents=True)
            target.write_bytes(path.read_bytes())
    (records,) = read_records(copy).values()
    for run in recounted(records, ZERO, pairs=(2, 5)):
        folder = copy / "runs" / run.host / run.run
        content = msgspec.json.encode(
            replace(run, phases=[_undated(phase) for phase in run.phases]) if run.pair in (2, 5) else run
        )
        (folder / "record.json").write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        (folder / "record.sha256").write_text(f"{digest}  record.json\n")
    verdict = analyze(copy)
    assert verdict.verdict == "INVALID"
    assert f"gate {PREEMPTIONS_GATE} failed: pair 2, arm base, phase load_5: 0 preemptions counted" in verdict.reason


def _undated(phase):
    unsaid = {"stalls_at": None, "waits": None, "passed_by": None}
    return phase if phase.ledger is None else replace(phase, ledger=replace(phase.ledger, **unsaid))


@pytest.mark.parametrize("directory", [H200, TWO_GPUS], ids=["one H200", "two GPUs"])
@pytest.mark.parametrize("pairs", [(2, 5), None], ids=["two pairs", "all pairs"])
def test_without_the_requests_times_a_count_of_0_is_found_and_a_halved_one_is_not(directory, pairs):
    """What stalled is in the record, when is not: so the arithmetic says at which levels it was a preemption."""
    records, protocol = without_requests(directory)
    result = judged(recounted(records, ZERO, pairs=pairs), protocol)
    assert result.passed is False
    assert "stalled where 10 in flight can't all fit to their end" in result.detail
    halved = judged(recounted(records, lambda was: (was + 1) // 2, pairs=pairs), protocol)
    assert halved.passed is True and "a count which is too low shows only where it is 0" in halved.detail


@pytest.mark.parametrize("books", [False, True], ids=["the counter alone", "all of the engine's books"])
def test_counts_without_any_stall_are_found_where_what_runs_fits(cpu, books):
    """The reverse: preemptions where nobody stalled and the pool holds all that run."""
    records, protocol = cpu
    result = judged(recounted(records, lambda was: was + 2, arm="fewer_seqs", books=books), protocol)
    assert result.passed is False
    assert "2 preemptions counted, and" in result.detail


def test_a_time_line_that_falls_and_a_request_that_was_preempted_more_often_contradict_the_count():
    records, protocol = ladder_records(), ladder_protocol()
    assert judged(records, protocol).passed is True

    def with_level(change):
        return [replace(run, phases=[change(p) if p.name == "load_6" else p for p in run.phases]) for run in records]

    def falling(phase):
        first, second, *rest = phase.pressure
        return replace(phase, pressure=[replace(first, preemptions=4.0), replace(second, preemptions=1.0), *rest])

    assert "the time line's count falls while the level runs" in judged(with_level(falling), protocol).detail

    def by_request(phase):
        books = {"request_preemptions_sum": 0.0, "request_preemptions_count": 0.0}
        after = {"request_preemptions_sum": 9.0, "request_preemptions_count": float(phase.sent)}
        return replace(phase, before=phase.before | books, after=phase.after | after)

    assert "requests were preempted 9 times in all" in judged(with_level(by_request), protocol).detail


def test_a_count_that_is_not_exported_is_not_decided():
    records = [
        replace(run, phases=[replace(p, after=p.after | {"preemptions": None}) for p in run.phases])
        for run in ladder_records()
    ]
    assert judged(records, ladder_protocol()).passed is None


def test_an_engine_that_stands_still_is_no_preemption():
    """All in flight stall at once, nobody gets a token meanwhile: at 5 in flight where 4 fit, and nothing counted."""

    def frozen(phase):
        if phase.name != "load_5" or phase.ledger is None:
            return phase
        times = [_frozen_times(number) for number in range(5)]
        ledger = phase_ledger(times, phase.ledger.stall_multiple, phase.ledger.run_median_gap_ns)
        assert len(ledger.stalls_at) == 5 and not any(stall.others_amid for stall in ledger.stalls_at)
        return replace(phase, ledger=ledger)

    records = recounted(ladder_records(), ZERO)
    records = [
        replace(run, phases=[frozen(phase) for phase in run.phases if phase.name in ("load_1", "load_5")])
        for run in records
    ]
    assert judged(records, ladder_protocol()).passed is True


def _frozen_times(number):
    gaps = [2_000] * 100 + [500_000] + [2_000] * 100
    first = 30_000_000 + 100_000 * number
    return RequestTimes(f"load/{number}", 0, 1_000_000, first, first + 1000 * sum(gaps), gaps)


def test_a_stall_says_who_went_on_meanwhile():
    waiting = RequestTimes("a", 0, 0, 1_000_000, 0, [1_000, 100_000, 1_000])
    going = RequestTimes("b", 0, 0, 1_000_000, 0, [1_000] * 100)
    (stall,) = stalls_of([waiting, going], 20_000_000)
    assert (stall.key, stall.from_ns, stall.to_ns, stall.tokens) == ("a", 2_000_000, 102_000_000, 2)
    assert stall.others_amid == 51  # of 100 a token a millisecond, those between 27 and 77 ms


def test_a_median_of_0_makes_no_stall_of_every_gap():
    """Of a small model most tokens come several at a time: gaps of 0."""
    burst = RequestTimes("a", 0, 0, 0, 0, [0, 0, 0, 5_000] * 10)
    assert median_gap_ns([[burst]]) == 5_000_000
    assert median_gap_ns([[RequestTimes("a", 0, 0, 0, 0, [0, 0])]]) == 0
    assert median_gap_ns([]) == 0


def test_the_ladders_gate_stands_in_the_protocol_and_is_added_to_older_plans():
    protocol = ladder_protocol()
    assert protocol.gates[PREEMPTIONS_GATE] == {}
    older = replace(protocol, gates={n: p for n, p in protocol.gates.items() if n != PREEMPTIONS_GATE})
    assert with_ladder_gates(older).gates[PREEMPTIONS_GATE] == {"later_release": True}
    assert with_ladder_gates(protocol) is protocol
    assert set(ARMS) <= set(protocol.arms) and phases_of(ladder_records()[0], ALL_LEVELS)


def test_a_count_where_all_that_runs_fits_is_found_though_something_stalled(cpu):
    """A stall in which others got no token either is a hiccup of the engine, and no preemption."""
    records, protocol = cpu
    planted = 0
    found = []
    for run in records:
        phases = []
        for phase in run.phases:
            if run.arm == "more_kv" and phase.ledger is not None and phase.ledger.stalls:
                planted += 1
                hiccups = [replace(stall, others_amid=0) for stall in phase.ledger.stalls_at]
                after = {**phase.after, "preemptions": phase.before["preemptions"] + 3}
                phase = replace(phase, after=after, ledger=replace(phase.ledger, stalls_at=hiccups, waits=0))
            phases.append(phase)
        found.append(replace(run, phases=phases))
    assert planted, "no level of more_kv has a stall in this recording"
    result = judged([_without_other_books(run) if run.arm == "more_kv" else run for run in found], protocol)
    assert result.passed is False
    assert "3 preemptions counted, and no request waited while others went on" in result.detail


def _without_other_books(run):
    names = ("request_preemptions_sum", "request_preemptions_count")
    return replace(run, phases=[
        replace(phase, pressure=[],
                before={k: v for k, v in phase.before.items() if k not in names},
                after={k: v for k, v in phase.after.items() if k not in names})
        for phase in run.phases
    ])  # fmt: skip


def test_raw_requests_that_are_not_those_the_record_counted_are_refused(cpu, unpacked):
    records, _ = cpu
    run = next(run for run in records if run.arm == "base")
    older = replace(run, phases=[_undated(phase) for phase in run.phases])
    folder = unpacked / "runs" / run.host / run.run
    assert with_stalls(older, folder) == run
    phases = [
        replace(phase, ledger=replace(phase.ledger, counted=phase.ledger.counted + 1)) if phase.ledger else phase
        for phase in older.phases
    ]
    with pytest.raises(UnusableInput, match=r"its record counts \d+ with \d+; restore the file that was recorded"):
        with_stalls(replace(older, phases=phases), folder)


def test_a_scheduler_a_step_ahead_may_need_a_block_more_where_all_would_fit():
    """256 in and 257 out end at 512 tokens: 4 fill 64 blocks of 32, and the slot beyond is in a 17th of each."""
    run = next(run for run in ladder_records() if run.arm == "base")
    level = next(phase for phase in run.phases if phase.name == "load_4")
    level = replace(level, requests=[replace(request, output_tokens=257) for request in level.requests])
    assert _overfull(run, level) is False
    assert _overfull(replace(run, evidence="gpu"), level) is True
    # One that ends by its limit is known to end, and gets no slot beyond.
    limited = replace(level, requests=[replace(request, max_tokens=257) for request in level.requests])
    assert _overfull(replace(run, evidence="gpu"), limited) is False
    off = replace(run.launch, argv=[*run.launch.argv, "--no-async-scheduling"])
    assert _overfull(replace(run, evidence="gpu", launch=off), level) is False
