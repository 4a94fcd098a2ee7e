"""What the keeper samples of GPUs, with an nvidia-smi that is no GPU's: a script that prints what it is told."""

import os
from pathlib import Path

import pytest
from kvtrial.host.conditions import slowed_down
from kvtrial.host.keeper import Sampler, foreign_on_gpus
from kvtrial.host.processes import read_process

QUIET = "0x0000000000000004"
HOT = "0x0000000000000060"


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """smi(gpus, pids): lines of --query-gpu and --query-compute-apps."""

    def make(gpus: list[str], pids: list[int]) -> None:
        script = tmp_path / "nvidia-smi"
        apps = "\n".join(map(str, pids))
        printed = "\n".join(gpus)
        script.write_text(
            f"#!/bin/sh\ncase $1 in --query-gpu=*) cat <<'X'\n{printed}\nX\n;; *) cat <<'X'\n{apps}\nX\n;; esac\n"
        )
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return make


def samples(times: int = 1, gpus: int | None = None):
    me = read_process(os.getpid())
    assert me is not None
    sampler = Sampler(me, [], gpus)
    for _ in range(times):
        sampler.sample()
    return sampler.summary()


def test_memory_clock_and_power_of_all_gpus(smi):
    smi([f"100, 1980, 300.5, {QUIET}", f"200, 1900, 310.5, {QUIET}"], [os.getpid()])
    found = samples()
    assert found.vram_used_peak_bytes == 300 * 2**20
    assert (found.gpu_mhz_median, found.gpu_power_watts_median) == (1940, 305.5)
    assert found.throttle_events == 0
    assert found.vram_foreign_processes == 0


def test_each_gpu_has_a_peak_of_its_own_and_an_idle_one_s_clock_is_not_the_engine_s(smi):
    smi([f"100, 1980, 300.5, {QUIET}", f"200, 345, 75, {QUIET}"], [os.getpid()])
    found = samples(gpus=1)
    assert found.vram_used_peak_by_gpu_bytes == [100 * 2**20, 200 * 2**20]
    assert (found.gpu_mhz_median, found.gpu_power_watts_median) == (1980, 300.5)
    assert found.rss_peak_by_process_bytes[0] > 2**20


def test_heat_is_counted_and_the_power_cap_is_not(smi):
    smi([f"100, 1200, 650, {HOT}"], [os.getpid()])
    assert samples(11).throttle_events == 2
    assert slowed_down(QUIET) is False
    assert slowed_down("[N/A]") is None


def test_another_process_on_the_gpu_is_seen(smi):
    smi([f"100, 1980, 300, {QUIET}"], [os.getpid(), os.getppid()])
    assert samples().vram_foreign_processes == 1


def test_pids_of_another_namespace_are_nobodys(smi):
    smi([f"100, 1980, 300, {QUIET}"], [2**22 + 1])
    assert foreign_on_gpus({os.getpid()}, {os.getpid()}) is None
    assert samples().vram_foreign_processes is None


def test_what_a_driver_does_not_say_is_unknown(smi):
    smi(["[N/A], [N/A], [N/A], [N/A]"], [])
    found = samples()
    assert (found.gpu_mhz_median, found.gpu_power_watts_median, found.throttle_events) == (None, None, None)
