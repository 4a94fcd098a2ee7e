"""A user's host is not ours: each guard of the host program is seen firing, with its sentence."""

import contextlib
import mmap
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kvtrial.host.keeper import EngineProcess, Sampler, _sweep_files
from kvtrial.host.processes import read_process, redact


def reason(trial) -> str:
    trial.run(check=False)
    progress = trial.folder.read_progress()
    assert progress.state in ("stopped", "failed")
    return progress.reason


def test_without_consent_nothing_is_started(trial):
    trial = trial(runs=1)
    trial.folder.consent.unlink()
    assert "consent was withdrawn" in reason(trial)
    assert trial.records() == []


@pytest.mark.usefixtures("nothing_left")
def test_consent_withdrawn_between_runs_stops_before_the_next(trial):
    trial = trial(pairs=2)
    trial.command("start")
    trial.wait(lambda p: p.phase == "populate")
    trial.folder.consent.unlink()
    progress = trial.wait(lambda p: p.state == "stopped")
    assert "consent was withdrawn" in progress.reason
    assert len(trial.records()) == 1


@pytest.mark.usefixtures("nothing_left")
def test_the_deadline_passes_and_the_engine_is_ended(trial):
    trial = trial(runs=2, faults="slow_start:30", limits={"deadline_seconds": 2.0})
    assert "deadline of 2 s passed" in reason(trial)
    assert trial.records() == []


@pytest.mark.usefixtures("nothing_left")
def test_if_controller_gone_stop_ends_it_when_the_controller_falls_silent(trial):
    trial = trial(
        pairs=2, if_controller_gone="stop", visited_every_seconds=0.3, limits={"controller_gone_seconds": 1.0}
    )
    trial.folder.heartbeat.write_text(str(time.monotonic()))
    assert "controller has been silent" in reason(trial)


def test_a_foreign_engine_on_the_host_is_refused_and_left_alone(trial):
    trial = trial(runs=1)
    foreign = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "vllm", "serve", "someone's"])
    try:
        sentence = reason(trial)
        assert f"pid {foreign.pid}" in sentence
        assert foreign.poll() is None
    finally:
        foreign.kill()
        foreign.wait()


@pytest.mark.usefixtures("nothing_left")
def test_a_foreign_engine_that_starts_within_a_run_spoils_the_pair(trial):
    trial = trial(runs=2, faults="slow_start:15")
    trial.command("start")
    trial.wait(lambda p: (p.phase or "").startswith("engine starting"))
    foreign = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "vllm", "serve", "someone's"])
    try:
        trial.wait(lambda p: p.state != "running", 30)
        assert trial.records()[0].fault.fault == "foreign_engine"
        assert foreign.poll() is None
    finally:
        foreign.kill()
        foreign.wait()


def test_too_little_ram_is_refused_with_the_numbers(trial):
    sentence = reason(trial(runs=1, ram_reserve_bytes=2**50))
    assert str(2**50) in sentence
    assert "RAM" in sentence


def test_too_little_disk_is_refused_with_the_numbers(trial):
    assert "bytes are free on disk" in reason(trial(runs=1, limits={"disk_reserve_bytes": 2**60}))


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system of its own needs root")
@pytest.mark.usefixtures("nothing_left")
def test_a_disk_that_fills_up_within_a_run_ends_the_engine_and_says_so(trial, tmp_path):
    trial = trial(runs=2, limits={"disk_reserve_bytes": 4096})
    directory = trial.folder.directory
    kept = {path.name: path.read_bytes() for path in directory.iterdir()}
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(directory)], check=True)
    try:
        for name, content in kept.items():
            (directory / name).write_bytes(content)
        program = subprocess.Popen([sys.executable, "-m", "kvtrial.host.program", "run", "--directory", str(directory)],
                                   stdout=subprocess.PIPE, text=True)  # fmt: skip
        trial.wait(lambda progress: progress.phase == "populate")
        with contextlib.suppress(OSError), (directory / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(1024))
        said = program.communicate(timeout=60)[0]
        assert program.returncode == 1
        assert "No space left on device" in said
        assert "free the disk and start again" in said
        assert trial.records() == []
        (directory / "filler").unlink()
        trial.run()
        assert len(trial.records()) == 2
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def test_a_port_that_was_taken_meanwhile_is_a_fault_of_the_environment(trial):
    trial = trial(runs=1)
    with socket.create_server(("127.0.0.1", trial.host_plan.launches["control"].port)):
        trial.run(check=False)
    fault = trial.records()[0].fault
    assert fault.fault == "port_taken"
    assert "kvtrial_port" in fault.detail


def test_a_file_that_lay_in_shared_memory_before_is_never_the_engines(tmp_path):
    theirs, made = (Path("/dev/shm") / f"kvtrial-test-{os.getpid()}-{name}" for name in ("theirs", "made"))
    theirs.write_bytes(b"x" * 4096)
    sampler = Sampler(read_process(os.getpid()), [])
    made.write_bytes(b"x" * 4096)
    try:
        with theirs.open("rb") as a, made.open("rb") as b:
            maps = [mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) for file in (a, b)]
            sampler.sample()
            assert sampler.shared_memory == {str(made)}
            for mapped in maps:
                mapped.close()
        _sweep_files(EngineProcess(1, 1, str(tmp_path / "scratch"), sorted(sampler.shared_memory)))
        assert theirs.exists()
        assert not made.exists()
    finally:
        theirs.unlink(missing_ok=True)
        made.unlink(missing_ok=True)


def test_keys_are_redacted_from_command_lines():
    assert redact("vllm serve m --api-key s3cret --port 1") == "vllm serve m --api-key *** --port 1"
    assert redact("x --hf-token=abc") == "x --hf-token=***"
    assert redact("x --proxy http://u:s3cret@h:1") == "x --proxy http://***@h:1"
    tokens = "vllm serve m --tokenizer t --max-num-batched-tokens 4096"
    assert redact(tokens) == tokens
