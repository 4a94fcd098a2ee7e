"""What may explain a host's numbers: clocks, power and ECC as somebody set them, and the clock at work."""

import os

import pytest
from build import honest_records
from kvtrial.analysis.drift import changes, likely_causes, settings_of
from kvtrial.host.conditions import read_conditions
from msgspec.structs import replace

GPU = {"name": "GPU", "clocks.max.sm": "1980", "clocks.applications.graphics": "1980", "power.limit": "700.00",
       "ecc.mode.current": "Enabled"}  # fmt: skip


def of_a_night(mhz: float = 1900.0, **gpu: str) -> dict[str, str]:
    return settings_of(
        [
            replace(record, conditions=replace(record.conditions, gpus=[GPU | gpu]),
                    samples=replace(record.samples, gpu_mhz_median=mhz))
            for record in honest_records()
        ],
        "control",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("gpu", "said"),
    [
        ({"clocks.applications.graphics": "1200"}, {"clocks_application_mhz": ("1980", "1200")}),
        ({"power.limit": "450.00"}, {"power_limit_watts": ("700.00", "450.00")}),
        ({"ecc.mode.current": "Disabled"}, {"ecc_mode": ("Enabled", "Disabled")}),
    ],
)
def test_what_somebody_set_on_a_gpu_is_named(gpu, said):
    assert changes(of_a_night(), of_a_night(**gpu)) == said


def test_a_clock_that_was_locked_is_seen_at_work_and_a_little_less_is_no_change():
    assert changes(of_a_night(1900), of_a_night(1200)) == {"gpu_mhz_at_work": ("1900", "1200")}
    assert changes(of_a_night(1900), of_a_night(1850)) == {}
    told = of_a_night(1900)
    older = {name: value for name, value in told.items() if name != "gpu_mhz_at_work"}
    assert changes(older, told) == {}
    # Of hosts it is told with what was measured, once.
    assert likely_causes("a", {"a": of_a_night(1200), "b": told, "c": told}, {}) == []


SMI = """#!/bin/sh
case "$*" in
*power.limit*) %s ;;
*) echo "GPU, GPU-1, 580.126, 81920, 1900, 1980, Enabled, Disabled, 0x0" ;;
esac
"""


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ('echo "1200, 450.00, Enabled"', {"clocks.applications.graphics": "1200", "power.limit": "450.00",
                                          "ecc.mode.current": "Enabled"}),
        ('echo "[N/A], 450.00, [Not Supported]"', {"power.limit": "450.00"}),
        ('echo "Field is not a valid field to query."; exit 2', {}),
    ],
)  # fmt: skip
def test_a_driver_that_does_not_know_them_still_tells_the_rest(tmp_path, monkeypatch, answers, told):
    (tmp_path / "nvidia-smi").write_text(SMI % answers)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    [gpu] = read_conditions().gpus
    assert gpu["clocks.max.sm"] == "1980"
    asked = ("clocks.applications.graphics", "power.limit", "ecc.mode.current")
    assert {name: gpu[name] for name in asked if name in gpu} == told
