"""A run's record carries the calibration that holds on its host, and none that does not."""

import os

import msgspec
import pytest
from kvtrial.host.calibration import calibrated_for
from kvtrial.record.calibration import Calibration, CalibrationLimits, with_id
from msgspec.structs import replace


def card(cpus=None, **of) -> Calibration:
    made_for = replace(calibrated_for(), **of)
    return with_id(
        Calibration(
            schema_version="1.0", made_at_utc="2026-11-29T12:00:00+00:00", seconds=20.0, calibrated_for=made_for,
            cpus=2, clock_source=None, governor=None, load_average_1m=0.0, steal_share=None, levels=[],
            limits=CalibrationLimits(streams_max=512, chunks_per_second_max=20_000.0),
            cpu_affinity=sorted(os.sched_getaffinity(0)) if cpus is None else cpus,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    "of",
    [{}, {"kernel": "another"}, {"cpus": [9999]}],
    ids=["holds", "of another kernel", "of other CPUs"],
)
def test_a_record_carries_the_calibration_that_holds(of, trial, tmp_path, nothing_left):
    (tmp_path / "calibration.json").write_bytes(msgspec.json.encode(card(**of)))
    one = trial(runs=1, phases=("warmup", "populate"))
    one.run()
    (record,) = one.records()
    assert record.calibration == (None if of else card())
    named = {phase.card.calibration_id for phase in record.phases}
    assert named == {None if of else card().calibration_id}
