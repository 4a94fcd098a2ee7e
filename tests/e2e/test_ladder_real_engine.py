"""A ladder on the real CPU engine: preemption begins where it was predicted; a killed engine is told from that."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.onset import MODEL, plan_of
from conftest import ROOT
from kvtrial.analysis.ladder import run_onset
from kvtrial.analysis.levels import phases_of, risen
from kvtrial.host import memory
from trial import Trial, free_port

pytestmark = pytest.mark.e2e_real
STATE = ROOT / ".kvtrial"
TOO_LITTLE_BYTES = 700_000_000
"""The engine's two processes need about 1.1 GB to start."""
ROOM_BYTES = 64 * 2**20
# Takes 512 MiB, page by page, and is the last that the kernel would kill.
GREEDY = (
    "open('/proc/self/oom_score_adj', 'w').write('-1000'); b = bytearray(512 << 20)\n"
    "for at in range(0, len(b), 4096): b[at] = 1"
)


@pytest.fixture(name="engine", scope="module")
def _engine(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """(virtual environment, model of two layers)."""
    venvs = sorted(STATE.glob("venvs/vllm-0.32.0-*"))
    if not venvs:
        pytest.skip("no engine in .kvtrial yet; tests/run.sh installs it")
    model = tmp_path_factory.mktemp("models") / "small"
    maker = ROOT / "roles" / "model" / "files" / "make_model.py"
    subprocess.run([venvs[-1] / "bin" / "python", maker, "make", *MODEL, model], check=True, stdout=subprocess.DEVNULL)
    return str(venvs[-1]), str(model)


def base_run(engine: tuple[str, str], folder: Path) -> Trial:
    """The control's first run of the mix of 256 tokens in and out, answers stopped short of their limit."""
    plan = plan_of("fixed_256_256", 7, *engine, free_port())
    base = next(run for run in plan.hosts[0].runs if run.arm == "base")
    return Trial(folder, plan, [base])


def test_preemption_begins_exactly_where_it_was_predicted(engine, tmp_path):
    trial = base_run(engine, tmp_path / "host")
    predicted = trial.host_plan.ladder.onset["base"]
    trial.run()
    record = trial.records()[0]
    assert record.outcome == "completed", record.fault
    assert run_onset(record) == predicted.low == predicted.high == 5
    for phase in phases_of(record, "ladder"):
        assert (risen([phase], "preemptions") > 0) == (phase.concurrency >= 5)
        assert phase.reset.succeeded and risen([phase], "prefix_cache_hits_tokens") == 0
        # All but the last of the eight blocks of the first prompt, found before the reset and not after it.
        assert phase.reset.marker_hit_tokens >= 224
        for row in phase.ledger.requests:
            assert row.lag_ns + row.first_token_ns + row.normal_gaps_ns + row.stall_gaps_ns == row.e2e_ns
    shutil.rmtree(tmp_path / "host")


@pytest.fixture(name="group")
def _group() -> Iterator[Path]:
    """A memory cgroup of its own; skips where none can be made."""
    root = memory.CGROUPS / "memory" if (memory.CGROUPS / "memory").is_dir() else memory.CGROUPS
    group = root / f"kvtrial-e2e-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    yield group
    until = time.monotonic() + 10
    while group.exists() and time.monotonic() < until:
        try:
            group.rmdir()
        except OSError:
            time.sleep(0.1)


def limit(group: Path, size_bytes: int) -> None:
    """Limit a cgroup's memory; skips where that can't be done."""
    name = "memory.limit_in_bytes" if group.parent.name == "memory" else "memory.max"
    try:
        (group / name).write_text(str(size_bytes))
    except OSError as error:
        pytest.skip(f"no cgroup with a memory limit can be made here: {error}")


def used_bytes(group: Path) -> int:
    """What the processes of a cgroup hold and the kernel can't take back."""
    fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int(fields.get("total_rss") or fields.get("anon", 0)) + int(fields.get("shmem", 0))


def python_in(group: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """A Python in a cgroup."""
    join = f"import os, sys; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid())); "
    run = "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    return subprocess.Popen(
        [sys.executable, "-c", join + run, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def program_in(group: Path, trial: Trial) -> subprocess.Popen[bytes]:
    """The host program, and with it the engine, in a cgroup."""
    return python_in(group, "-m", "kvtrial.host.program", "run", "--directory", str(trial.folder.directory))


def test_an_engine_killed_at_a_cgroups_limit_is_told_so(engine, group, tmp_path):
    limit(group, TOO_LITTLE_BYTES)
    trial = base_run(engine, tmp_path / "host")
    program_in(group, trial).wait(timeout=250)
    fault = trial.records()[0].fault
    assert fault.fault == "engine_died_at_start"
    assert fault.cause.startswith("The memory limit of a cgroup"), fault
    assert "This is no preemption" in fault.cause and "MemoryMax=" in fault.fix
    shutil.rmtree(tmp_path / "host")


def test_an_engine_killed_at_a_cgroups_limit_while_it_serves_is_told_from_preemption(engine, group, tmp_path):
    """Requests are preempted at the time, and the engine dies of something else."""
    trial = base_run(engine, tmp_path / "host")
    program = program_in(group, trial)
    processes = [program]
    try:
        until = time.monotonic() + 400
        while (progress := trial.folder.read_progress()) is None or progress.phase != "load_7":
            assert program.poll() is None and time.monotonic() < until, progress
            time.sleep(0.02)
        limit(group, used_bytes(group) + ROOM_BYTES)
        processes.append(python_in(group, "-c", GREEDY))
        program.wait(timeout=120)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    record = trial.records()[0]
    # The API server outlives its engine core for a moment, and says so.
    assert record.fault.fault in ("engine_dead", "engine_died"), record.fault
    assert record.fault.phase == "load_7"
    assert record.fault.cause.startswith("The memory limit of a cgroup"), record.fault
    assert "This is no preemption" in record.fault.cause
    # Levels that were through show the preemptions that it is told from.
    assert run_onset(record) == 5
    shutil.rmtree(tmp_path / "host")
