"""Which run is next: finished runs are kept, spoilt pairs are repeated by spares, engine faults never are."""

import msgspec
from build import faulted, honest_records
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtrial.host.processes import _decode_address
from kvtrial.host.schedule import dropped_pairs, next_run, runs_left
from kvtrial.record.plan import HostPlan
from kvtrial.record.record import RunRecord
from test_plan import plan

HOST = plan().hosts[0]
TEMPLATE = honest_records()[0]
BOOT = TEMPLATE.conditions.boot_id


def record_of(run, number: int) -> RunRecord:
    """A completed record of a planned run, the `number`th in time."""
    times = msgspec.structs.replace(
        TEMPLATE.times, started_monotonic_seconds=100.0 * number, ended_monotonic_seconds=100.0 * number + 40
    )
    return msgspec.structs.replace(
        TEMPLATE, run=run.run, pair=run.pair, position=run.position, arm=run.arm, spare=run.spare, times=times
    )


def work_through(host: HostPlan, spoil: dict[int, str]) -> list[RunRecord]:
    """Do every run that is due; the nth run done gets the fault that `spoil` names for n."""
    finished: dict[str, RunRecord] = {}
    done = []
    while (run := next_run(host, finished, BOOT)) is not None:
        assert run.run not in finished
        assert runs_left(host, finished, BOOT) > 0
        record = record_of(run, len(done))
        if origin := spoil.get(len(done)):
            record = faulted(record, origin, "planted")
        finished[run.run] = record
        done.append(record)
        assert len(done) <= len(host.runs)
    assert runs_left(host, finished, BOOT) == 0
    return done


def test_without_faults_the_planned_runs_are_done_in_order_and_no_spare():
    assert [r.run for r in work_through(HOST, {})] == [run.run for run in HOST.runs if not run.spare]


def test_an_engine_fault_is_never_repeated():
    done = work_through(HOST, {3: "engine", 7: "engine"})
    assert len(done) == 12
    assert not any(record.spare for record in done)


def test_a_pair_cut_by_the_environment_is_dropped_whole_and_repeated_at_the_end():
    done = work_through(HOST, {2: "environment"})
    assert [record.pair for record in done].count(2) == 1, "the other half of a spoilt pair is not run"
    assert [record.pair for record in done[-2:]] == [7, 7]
    assert all(record.spare for record in done[-2:])


def test_at_most_two_pairs_are_repeated():
    done = work_through(HOST, {0: "environment", 1: "environment", 2: "environment"})
    assert len({record.pair for record in done if record.spare}) == HOST.replacement_pairs == 2


@given(st.dictionaries(st.integers(0, 15), st.sampled_from(["engine", "environment"])))
@settings(max_examples=60, deadline=None)
def test_whatever_goes_wrong_it_ends_and_spares_stand_only_for_dropped_pairs(spoil):
    done = work_through(HOST, spoil)
    finished = {record.run: record for record in done}
    spares = {record.pair for record in done if record.spare}
    assert len(spares) <= min(HOST.replacement_pairs, len(dropped_pairs(HOST, finished, BOOT)))


def test_a_pair_with_half_an_hour_between_its_runs_or_a_reboot_is_dropped():
    first, second = (run for run in HOST.runs if run.pair == 1)
    late = {first.run: record_of(first, 0), second.run: record_of(second, 19)}
    assert "pair_cut" in dropped_pairs(HOST, late, BOOT)[1]
    near = {first.run: record_of(first, 0), second.run: record_of(second, 1)}
    assert dropped_pairs(HOST, near, BOOT) == {}
    assert "rebooted" in dropped_pairs(HOST, {first.run: record_of(first, 0)}, "another boot")[1]


def test_addresses_of_the_kernels_tables_are_read():
    assert _decode_address("0100007F:1F90") == ("127.0.0.1", 8080)
    assert _decode_address("00000000:0050") == ("0.0.0.0", 80)
    assert _decode_address("00000000000000000000000001000000:0050") == ("::1", 80)
    assert _decode_address("00000000000000000000000000000000:0050") == ("::", 80)
    assert _decode_address("0000000000000000FFFF00000100007F:0050") == ("127.0.0.1", 80)
