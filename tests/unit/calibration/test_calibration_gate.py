"""client_honest with a calibration: passes within it, fails beyond it, says so where there is none."""

from build import change, honest_records, protocol, with_phase
from kvtrial.analysis.answer import ten_lines
from kvtrial.analysis.faults import completed_runs, sort_pairs
from kvtrial.analysis.gates import GateContext, run_gates
from kvtrial.analysis.gates.conditions import calibration_caveat
from kvtrial.analysis.verdict import conclude
from kvtrial.record.calibration import (
    CalibratedFor,
    Calibration,
    CalibrationLevel,
    CalibrationLimits,
    with_id,
)
from kvtrial.record.record import RunRecord
from kvtrial.record.verdict import GateResult
from msgspec.structs import replace


def level(streams: int, held: bool = True) -> CalibrationLevel:
    return CalibrationLevel(
        streams=streams, requests=4 * streams, failed=0, chunks=40 * streams, chunks_per_second=50.0 * streams,
        ttft_error_p50_seconds=0.00005, ttft_error_p99_seconds=0.0004, ttft_error_max_seconds=0.001,
        dispatch_lag_p95_seconds=0.0001, cpu_us_per_chunk=7.0, client_cpu_share=0.1, server_write_p50_us=5.0,
        server_write_p99_us=20.0, server_lateness_p50_us=60.0, server_lateness_p99_us=200.0, held=held,
    )  # fmt: skip


def card(streams_max: int = 64, chunks_per_second_max: float = 3200.0) -> Calibration:
    return with_id(
        Calibration(
            schema_version="1.0",
            made_at_utc="2026-11-29T12:00:00+00:00",
            seconds=15.0,
            calibrated_for=CalibratedFor(
                kvtrial_version="0.1.0",
                client_sha256="a" * 64,
                kernel="6.1.0",
                cpu_model="Example CPU",
                python="3.11.7",
            ),
            cpus=2,
            clock_source="tsc",
            governor="performance",
            load_average_1m=0.1,
            steal_share=0.0,
            levels=[level(1), level(64)],
            limits=CalibrationLimits(streams_max=streams_max, chunks_per_second_max=chunks_per_second_max),
        )
    )  # fmt: skip


def calibrated(records: list[RunRecord], calibration: Calibration | None = None) -> list[RunRecord]:
    return [replace(record, calibration=calibration or card()) for record in records]


def in_return(**fields):
    def how(run: RunRecord) -> RunRecord:
        phase = next(phase for phase in run.phases if phase.name == "return")
        return with_phase(run, "return", card=replace(phase.card, **fields))

    return how


def judge(records: list[RunRecord]) -> GateResult:
    pairs = sort_pairs(records, list(protocol().arms))
    gates = run_gates(GateContext(protocol(), "h1", pairs, completed_runs(records, pairs)))
    return next(gate for gate in gates if gate.gate == "client_honest")


def test_within_the_calibration_the_gate_names_it_and_its_error():
    found = judge(calibrated(honest_records()))
    assert found.passed
    assert (
        f"within calibration {card().calibration_id[:12]}, whose TTFT error is at most 0.400 ms (p99)" in found.detail
    )


def test_more_streams_in_flight_than_calibrated_fail():
    records = change(calibrated(honest_records()), in_return(streams_max=65), arm="offload", pair=1)
    found = judge(records)
    assert found.passed is False
    assert "65 streams in flight, the client is calibrated up to 64 here" in found.detail


def test_where_streams_were_not_counted_open_connections_are():
    records = change(calibrated(honest_records()), in_return(connections_max_open=65), arm="offload", pair=1)
    assert judge(records).passed is False


def test_more_chunks_a_second_than_calibrated_fail():
    records = change(calibrated(honest_records()), in_return(chunks=9_000, wall_seconds=2.0), arm="control", pair=2)
    found = judge(records)
    assert found.passed is False
    assert "the client read 4,500 chunks/s, it is calibrated up to 3,200 here" in found.detail


def test_a_run_past_the_limits_is_invalid_as_a_whole():
    records = change(calibrated(honest_records()), in_return(streams_max=65), arm="offload", pair=1)
    assert conclude(protocol(), {"h1": records}, campaign="c1").verdict == "INVALID"


def test_without_a_calibration_the_gate_passes_and_the_verdict_warns():
    records = honest_records()
    assert judge(records).passed
    assert "the load client is not calibrated on h1" in judge(records).detail
    verdict = conclude(protocol(), {"h1": records}, campaign="c1")
    assert any("not calibrated on h1" in caveat for caveat in verdict.caveats)
    (evidence,) = [line for line in ten_lines(verdict, "results/c1") if line.startswith("Evidence: ")]
    assert "The load client is not calibrated on h1, so how far its times are off there is not known" in evidence


def test_with_one_nothing_is_warned_of():
    assert calibration_caveat(calibrated(honest_records())) is None
    verdict = conclude(protocol(), {"h1": calibrated(honest_records())}, campaign="c1")
    assert not any("calibrated" in caveat for caveat in verdict.caveats)
    assert not any("calibrated" in line for line in ten_lines(verdict, "results/c1"))
