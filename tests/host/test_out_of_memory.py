"""Kinds of out of memory told apart: by a real kill at a cgroup's limit where one may be made, else by real texts."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from kvtrial.host import engine, memory
from kvtrial.host.keeper import EngineProcess, KeeperSpec
from kvtrial.host.memory import MemoryWatch, memory_counters
from kvtrial.record.enginelog import diagnose
from kvtrial.record.oom import SENTENCES, MemoryCounters, tell_apart
from kvtrial.record.plan import Launch

LIMIT_BYTES = 48 * 2**20
QUIET = MemoryCounters(0, 0, 0)
# Takes 256 MiB, page by page, once it is told to.
GREEDY = "import sys; sys.stdin.readline(); b = bytearray(256 << 20)\nfor at in range(0, len(b), 4096): b[at] = 1"
STARTED = "INFO: Application startup complete.\n"
CUDA = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB\n"
)
KERNEL = "[ 911.2] Out of memory: Killed process 4242 (VLLM::EngineCor) total-vm:9000kB, anon-rss:8000kB"
CGROUP = "[ 911.2] Memory cgroup out of memory: Killed process 4242 (VLLM::EngineCor) total-vm:9000kB, anon-rss:8000kB"


@pytest.fixture(name="limited")
def _limited():
    """A process in a cgroup of its own with a memory limit; skips where none can be made."""
    root = memory.CGROUPS / "memory" if (memory.CGROUPS / "memory").is_dir() else memory.CGROUPS
    folder = root / f"kvtrial-test-{os.getpid()}"
    limit = folder / ("memory.limit_in_bytes" if root.name == "memory" else "memory.max")
    try:
        folder.mkdir()
        limit.write_text(str(LIMIT_BYTES))
    except OSError as error:
        if folder.exists():
            folder.rmdir()
        pytest.skip(f"no cgroup with a memory limit can be made here: {error}")
    process = subprocess.Popen([sys.executable, "-c", GREEDY], stdin=subprocess.PIPE, text=True)
    try:
        (folder / "cgroup.procs").write_text(str(process.pid))
        yield process
    finally:
        process.kill()
        process.wait()
        until = time.monotonic() + 5
        while folder.exists() and time.monotonic() < until:
            try:
                folder.rmdir()
            except OSError:
                time.sleep(0.05)


def test_a_real_kill_at_a_cgroups_limit_is_told_from_one_of_the_whole_machine(limited, monkeypatch):
    folder = next(iter(memory._memory_cgroups(limited.pid)))
    assert folder.name.startswith("kvtrial-test-")
    # Its cgroup outlives it, as a container's does its engine; the process is asked for by then.
    monkeypatch.setattr(memory, "_memory_cgroups", lambda pid: iter([folder]))
    watch = MemoryWatch(limited.pid)
    before = memory_counters(limited.pid)
    limited.stdin.write("\n")
    limited.stdin.flush()
    returncode = limited.wait(timeout=60)
    assert returncode == -signal.SIGKILL
    after = watch.now()
    assert after.cgroup_kills - before.cgroup_kills == 1
    told = tell_apart(None, before, after, watch.new_lines(), returncode)
    assert told.kind == "cgroup_limit"
    assert "with RAM left on the machine" in told.sentence and "signal 9" in told.evidence
    assert tell_apart(None, before, after, [], returncode).kind == "cgroup_limit"


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("kernel_oom_killer", {"after": MemoryCounters(1, 1, 0), "kernel_lines": [KERNEL]}),
        ("kernel_oom_killer", {"after": MemoryCounters(1, 1, 0)}),
        # The kernel killed somebody, and neither its log nor the cgroup says whom.
        ("kernel_killed_somebody", {"after": MemoryCounters(1, None, None)}),
        ("kernel_killed_somebody", {"after": MemoryCounters(1, None, None), "kernel_lines": None, "returncode": 1}),
        ("killed_for_memory", {"after": MemoryCounters(1, None, None), "kernel_lines": None, "returncode": -9}),
        ("killed_for_memory", {"after": MemoryCounters(1, None, None), "kernel_lines": None, "unit_killed": True}),
        ("cgroup_limit", {"after": MemoryCounters(1, 1, 4, alone=True), "kernel_lines": None}),
        # A signal alone is no kill for lack of memory.
        ("none", {"after": QUIET, "returncode": -9}),
        ("cgroup_limit", {"after": MemoryCounters(1, 1, 7)}),
        ("cgroup_limit", {"after": MemoryCounters(None, None, None), "kernel_lines": [KERNEL, CGROUP]}),
        ("preemption", {"after": QUIET, "preemptions": 7.0}),
        ("none", {"after": QUIET, "preemptions": 0.0}),
        # At its limit a cgroup first gives back caches: that alone kills nobody.
        ("none", {"after": MemoryCounters(0, 0, 900)}),
    ],
)
def test_kinds_are_told_apart_by_counters_and_the_kernels_log(kind, told):
    assert tell_apart(None, QUIET, **told).kind == kind


@pytest.mark.parametrize(
    ("log", "kind"),
    [(CUDA, "cuda_at_start"), (STARTED + CUDA, "cuda_in_flight"), (STARTED + "all is well", "none")],
)
def test_cudas_own_error_is_told_by_the_engines_log_at_start_and_in_flight(log, kind):
    known = diagnose(log, "0.32.0")
    assert tell_apart(known.class_ if known else None, QUIET, QUIET).kind == kind


def test_a_kill_somewhere_on_the_machine_does_not_take_the_blame_for_cudas_own_error():
    elsewhere = MemoryCounters(1, 0, 0)
    assert tell_apart("cuda_oom_runtime", QUIET, elsewhere).kind == "cuda_in_flight"
    assert tell_apart("cuda_oom_runtime", QUIET, elsewhere, [KERNEL]).kind == "cuda_in_flight"
    assert tell_apart("cuda_oom_runtime", QUIET, elsewhere, [KERNEL], pids={4242}).kind == "kernel_oom_killer"
    unknown = MemoryCounters(1, None, None)
    assert tell_apart("cuda_oom_runtime", QUIET, unknown, None).kind == "cuda_in_flight"


PYTHON = "[7.1] Out of memory: Killed process 55 (python3) total-vm:1kB, anon-rss:1kB"


@pytest.mark.parametrize("after", [MemoryCounters(1, None, None), MemoryCounters(1, 1, 0), MemoryCounters(1, 0, 0)])
@pytest.mark.parametrize("line", [PYTHON, PYTHON.replace("Out of", "Memory cgroup out of")])
def test_another_python_that_the_kernel_killed_is_known_by_its_pid(after, line):
    """The engine died of CUDA's own error, or of something else, meanwhile; its pids are others."""
    assert tell_apart("cuda_oom_runtime", QUIET, after, [line], pids={40, 41}).kind == "cuda_in_flight"
    assert tell_apart(None, QUIET, after, [line], pids={40, 41}).kind == "none"
    assert tell_apart(None, QUIET, after, [line], pids={40, 55}).kind in ("kernel_oom_killer", "cgroup_limit")


def test_a_kill_at_the_limit_of_the_engines_own_unit_is_its_own_whatever_else_was_killed():
    """In a unit of its own the cgroup's count is the engine's, by version one and two, with a python killed beside."""
    own = CGROUP.replace("4242", "56")
    after = MemoryCounters(2, 1, 3, alone=True)
    told = tell_apart("cuda_oom_runtime", MemoryCounters(0, 0, 0, alone=True), after, [PYTHON, own], pids={56})
    assert told.kind == "cgroup_limit" and "Killed process 56" in told.evidence
    # The kernel's log can't be read: its count is enough.
    assert tell_apart(None, MemoryCounters(0, 0, 0, alone=True), after, None).kind == "cgroup_limit"


def test_what_was_told_by_a_name_alone_says_so():
    told = tell_apart(None, QUIET, MemoryCounters(1, None, None), [KERNEL])
    assert told.kind == "kernel_oom_killer" and "told by its name" in told.evidence
    assert "name" not in tell_apart(None, QUIET, MemoryCounters(1, None, None), [KERNEL], pids={4242}).evidence


def test_a_kernels_log_that_can_not_be_read_is_said_and_nothing_is_guessed():
    told = tell_apart("engine_core_died", QUIET, MemoryCounters(1, None, None), None, returncode=1)
    assert told.kind == "kernel_killed_somebody"
    assert "can't be told here" in told.sentence and "the kernel's log can't be read here" in told.evidence
    signalled = tell_apart(None, QUIET, MemoryCounters(1, None, None), None, returncode=-9)
    assert "ended by signal 9" in signalled.evidence and "can't be read" in signalled.evidence


def test_the_kernels_word_outranks_what_the_engines_parent_says():
    log = STARTED + "EngineCore encountered a fatal error"
    killed = tell_apart(diagnose(log, "0.32.0").class_, QUIET, MemoryCounters(1, 1, 3), [CGROUP])
    assert killed.kind == "cgroup_limit"


def test_a_preemption_during_a_cuda_error_is_still_the_error():
    assert tell_apart("cuda_oom_runtime", QUIET, QUIET, preemptions=5.0).kind == "cuda_in_flight"


def test_every_kind_has_its_own_sentence_and_says_what_it_is_not():
    sentences = [sentence for sentence, _ in SENTENCES.values()]
    assert len(set(sentences)) == len(SENTENCES)
    for kind in SENTENCES.keys() - {"preemption", "none"}:
        assert "no preemption" in SENTENCES[kind][0]


def test_a_version_two_cgroup_is_read_with_those_above_it(tmp_path, monkeypatch):
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    inner = groups / "system.slice" / "engine.service"
    inner.mkdir(parents=True)
    (proc / "7").mkdir(parents=True)
    (proc / "7" / "cgroup").write_text("0::/system.slice/engine.service\n")
    (proc / "vmstat").write_text("nr_free_pages 1\noom_kill 4\n")
    (inner / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 2\noom_kill 2\n")
    (inner.parent / "memory.events").write_text("low 0\nhigh 0\nmax 0\noom 0\noom_kill 3\n")
    monkeypatch.setattr(memory, "PROC", proc)
    monkeypatch.setattr(memory, "CGROUPS", groups)
    # The one above counts its other children's kills as well.
    assert memory_counters(7) == MemoryCounters(4, 2, 12)
    (Path(proc) / "vmstat").unlink()
    assert memory_counters(8) == MemoryCounters(None, None, None)


def v1_unit(tmp_path, monkeypatch, unit="kvtrial-engine@base.service"):
    """A machine with cgroup version one: the host program (self) and the engine (7) in units of their own."""
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    for pid, name in (("self", "kvtrial-host.service"), ("7", unit)):
        folder = groups / "memory" / "system.slice" / name
        folder.mkdir(parents=True)
        (proc / pid).mkdir(parents=True)
        (proc / pid / "cgroup").write_text(f"9:memory:/system.slice/{name}\n0::/system.slice/{name}\n")
        (folder / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
        (folder / "memory.failcnt").write_text("0\n")
    (proc / "vmstat").write_text("oom_kill 4\n")
    monkeypatch.setattr(memory, "PROC", proc)
    monkeypatch.setattr(memory, "CGROUPS", groups)
    monkeypatch.setattr(memory, "kernel_lines", lambda: None)
    return proc, groups / "memory" / "system.slice" / unit


def test_the_cgroup_of_the_engines_own_unit_is_read_by_version_one(tmp_path, monkeypatch):
    """The host program is in another one, whose count says nothing of the engine."""
    proc, folder = v1_unit(tmp_path, monkeypatch)
    watch = MemoryWatch()
    watch.follow(7)
    watch.follow(7)
    (folder / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    (folder / "memory.failcnt").write_text("31\n")
    (proc / "vmstat").write_text("oom_kill 5\n")
    assert (watch.before, watch.now()) == (
        MemoryCounters(4, 0, 0, alone=True), MemoryCounters(5, 1, 31, alone=True)
    )  # fmt: skip
    assert tell_apart(None, watch.before, watch.now(), watch.new_lines()).kind == "cgroup_limit"
    # It is gone with its unit: nothing is guessed from the kernel's count.
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    assert watch.now().cgroup_kills is None
    assert tell_apart(None, watch.before, watch.now(), watch.new_lines()).kind == "kernel_killed_somebody"
    assert tell_apart(None, watch.before, watch.now(), None, unit_killed=True).kind == "killed_for_memory"


def test_of_a_cgroup_that_is_the_programs_as_well_the_kills_of_others_are_left_out():
    after = MemoryCounters(1, 1, 1)
    assert tell_apart(None, QUIET, after, [CGROUP], pids={7}).kind == "none"
    assert tell_apart(None, QUIET, after, [CGROUP], pids={4242}).kind == "cgroup_limit"


@pytest.mark.parametrize(("namespace", "seen"), [(memory.INIT_PIDS, True), ("pid:[4026532291]", False), (None, False)])
def test_the_kernels_pids_are_seen_in_its_first_namespace_alone(tmp_path, monkeypatch, namespace, seen):
    monkeypatch.setattr(memory, "PROC", tmp_path)
    (tmp_path / "self" / "ns").mkdir(parents=True)
    if namespace:
        (tmp_path / "self" / "ns" / "pid").symlink_to(namespace)
    assert memory.sees_the_kernels_pids() is seen


@pytest.mark.parametrize(
    ("dmesg", "journal", "lines"),
    [("echo kill", "exit 1", ["kill"]), ("true", "echo x", []), ("exit 1", "echo kill", ["kill"]),
     ("exit 1", "echo '-- No entries --'", None), ("exit 1", "exit 1", None)],
    ids=["dmesg", "an empty log", "the journal", "no right to read it", "neither"],
)  # fmt: skip
def test_a_log_that_can_not_be_read_is_told_from_an_empty_one(tmp_path, monkeypatch, dmesg, journal, lines):
    for name, does in (("dmesg", dmesg), ("journalctl", journal)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert memory.kernel_lines() == lines


@pytest.mark.parametrize(
    ("line", "counters"),
    [
        ("[7.1] Out of memory: Killed process 55 (firefox) total-vm:1kB", MemoryCounters(1, 0, 0)),
        ("[7.1] Out of memory: Killed process 55 (firefox) total-vm:1kB", MemoryCounters(1, None, None)),
        ("[7.1] Memory cgroup out of memory: Killed process 55 (python3) total-vm:1kB", MemoryCounters(1, 0, 0)),
    ],
    ids=["another program", "the cgroup can't be read", "another cgroup"],
)
def test_the_kill_of_another_program_is_not_the_engines(line, counters):
    """The engine died of CUDA's own error meanwhile."""
    before = MemoryCounters(0, counters.cgroup_kills, counters.cgroup_limit_hits)
    assert tell_apart("cuda_oom_runtime", before, counters, [line]).kind == "cuda_in_flight"
    assert tell_apart(None, before, counters, [line]).kind == "none"
    own = MemoryCounters(1, 1, 1)
    assert tell_apart("cuda_oom_runtime", before, own, [line.replace("firefox", "VLLM::EngineCor")]).kind in (
        "kernel_oom_killer", "cgroup_limit",
    )  # fmt: skip


def test_the_keeper_hands_over_the_engines_pids_and_its_exit_status(tmp_path):
    launch = Launch("a", ["/bin/sh", "-c", "sleep 1.5 & wait; kill -9 $$"], {}, 8000, "model", None)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    spec = KeeperSpec(
        launch=launch, env={"PATH": "/usr/bin:/bin"}, scratch=str(scratch), log=str(tmp_path / "engine.log"),
        deadline_seconds=60.0, stop_timeout_seconds=1.0, ram_reserve_bytes=0, own_pids=[],
    )  # fmt: skip
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "keeper.json").write_bytes(msgspec.json.encode(spec))
    keeper = subprocess.Popen([sys.executable, "-m", "kvtrial.host.keeper", str(folder)], stdin=subprocess.PIPE)
    assert keeper.wait(timeout=60) == 0
    process = msgspec.json.decode((folder / "engine.json").read_bytes(), type=EngineProcess)
    assert process.returncode == -signal.SIGKILL
    # The shell and what it started.
    assert process.pid in process.pids and len(process.pids) == 2


@pytest.mark.parametrize(
    ("pids", "killed", "kind"),
    [(True, 55, "cgroup_limit"), (True, 4242, "none"), (False, 4242, "cgroup_limit")],
    ids=["one of its own", "another's", "in a container, by its name"],
)
def test_an_engines_fault_is_told_by_its_own_pids(tmp_path, monkeypatch, pids, killed, kind):
    monkeypatch.setattr(engine, "sees_the_kernels_pids", lambda: pids)
    its = object.__new__(engine.Engine)
    its.directory, its.unit, its.keeper = tmp_path, "", SimpleNamespace(poll=lambda: 0)
    its.memory = SimpleNamespace(
        before=QUIET, now=lambda: MemoryCounters(1, 1, 1), new_lines=lambda: [CGROUP.replace("4242", str(killed))]
    )
    process = EngineProcess(2**22 + 1, 1, "", pids=[54, 55], returncode=-9)
    (tmp_path / "engine.json").write_bytes(msgspec.json.encode(process))
    told = its._out_of_memory(None)
    assert told.kind == kind
    assert kind == "none" or "ended by signal 9" in told.evidence
