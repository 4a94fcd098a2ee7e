"""The benchmark of the load client: what it counts, how it joins, and that its check fails on a slow client."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
from bench import client as bench_client
from bench.client import Bench, benching, holds, judge_quick, markdown, most_streams, quick_ratio, together
from bench.processes import Ran, run, tree_cpu_ns
from bench.subjects import ROOT, Step, Subject, c_reference, kvtrial

SLOW = [sys.executable, str(ROOT / "tests" / "bench" / "slow_client.py")]
SPIN = "import time\nuntil = time.process_time() + {}\nwhile time.process_time() < until: pass\n"

needs_two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU is too few for two processes")
needs_compiler = pytest.mark.skipif(bool(c_reference().absent), reason=f"no reference: {c_reference().absent}")


def found(**fields) -> dict:
    return {"missing": 0, "last_p99_ms": 1.0, "server_late_p99_ms": 1.0, "n": 4, **fields}


def test_a_client_that_became_slow_fails_the_check():
    assert judge_quick(2.0, 1.5) == ""
    assert judge_quick(3.0, 1.5) == ""
    sentence = judge_quick(3.1, 1.5)
    assert "3.10 times the CPU per chunk of the C reference; 1.50 are committed" in sentence


@needs_two_cpus
@needs_compiler
def test_the_check_fails_on_a_client_with_json_on_its_hot_path(monkeypatch):
    """The planted fault, measured: the same client made slow costs several times the honest one."""
    monkeypatch.setattr(bench_client, "QUICK_STEP", Step(32, 32, 40, stagger_seconds=0.2))
    with benching() as bench:
        honest, _ = quick_ratio(bench, kvtrial(), c_reference(), rounds=1)
        slow, _ = quick_ratio(bench, kvtrial(SLOW), c_reference(), rounds=1)
    assert judge_quick(slow, honest)


@needs_two_cpus
def test_a_run_joins_every_request_and_counts_every_chunk():
    with benching() as bench:
        measured = bench.measure(kvtrial(), Step(4, 8, 5, stagger_seconds=0.05))
    assert (measured["n"], measured["missing"], measured["chunks"]) == (8, 0, 40)
    assert 0 < measured["cpu_us_per_chunk"] < 100_000
    assert measured["cpu_us_per_request"] == pytest.approx(measured["cpu_us_per_chunk"] * 5)


@needs_two_cpus
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ([sys.executable, "-c", "import sys; sys.exit('no such model')"], "ended with status 1: no such model"),
        ([sys.executable, "-c", "pass"], "it sent nothing"),
    ],
)
def test_a_client_that_cannot_do_it_has_a_reason_and_no_figure(program, reason, monkeypatch):
    monkeypatch.setattr(bench_client, "RUN_SECONDS", 0.5)
    with benching() as bench:
        measured = bench.measure(kvtrial(program), Step(1, 1, 2))
    assert reason in measured["reason"]
    assert "cpu_us_per_chunk" not in measured


def test_what_fell_behind_or_lost_an_answer_is_not_held():
    assert holds(found())
    assert not holds(found(last_p99_ms=21.0))
    assert not holds(found(missing=1))
    assert not holds({"reason": "it died"})


@pytest.mark.parametrize(("capacity", "expected"), [(1100, 1000), (300, 256), (20, 16), (5000, 2000)])
def test_the_most_streams_are_found_by_bisection(capacity, expected):
    class Planted(Bench):
        def __init__(self) -> None:
            pass

        def measure(self, subject: Subject, step: Step) -> dict:
            return found(last_p99_ms=1.0 if step.streams <= capacity else 500.0)

    streams, _, _ = most_streams(Planted(), kvtrial(), {})
    assert streams == expected


def test_where_the_server_was_late_that_is_said_and_not_held_against_the_client():
    class Late(Bench):
        def __init__(self) -> None:
            pass

        def measure(self, subject: Subject, step: Step) -> dict:
            late = step.streams > 1000
            return found(last_p99_ms=500.0 if late else 1.0, server_late_p99_ms=300.0 if late else 1.0)

    streams, note, _ = most_streams(Late(), kvtrial(), {})
    assert streams == 1000
    assert "the server itself was late" in note


def test_cpu_of_children_counts_and_what_came_before_the_first_send_does_not(tmp_path):
    ready = tmp_path / "ready"
    child = f"import subprocess, sys, time\nsubprocess.run([sys.executable, '-c', {SPIN.format(0.5)!r}])\n"
    code = SPIN.format(0.4) + f"open({str(ready)!r}, 'w').close()\ntime.sleep(0.5)\n" + child
    cpu = min(os.sched_getaffinity(0))
    ran = run([sys.executable, "-c", code], cpu, tmp_path / "log", lambda: _appears(ready), 60.0, {})
    assert ran.returncode == 0
    counted = ran.cpu_ns_until(ran.end[0])
    assert counted >= 0.49e9, "the child's CPU is in it"
    assert counted <= ran.end[1] - 0.35e9, "what was used before the first send is not"


def _appears(path: Path) -> bool:
    while not path.exists():
        time.sleep(0.01)
    return True


def test_the_clock_of_a_process_tree_runs_with_its_cpu():
    before = tree_cpu_ns(os.getpid())
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    assert tree_cpu_ns(os.getpid()) - before >= 0.1e9


def test_cpu_is_taken_where_the_record_was_written():
    ran = Ran(0, samples=[(0, 100), (100, 300)], end=(200, 900))
    assert ran.cpu_ns_until(0) == 0
    assert ran.cpu_ns_until(50) == 100
    assert ran.cpu_ns_until(150) == 500
    assert ran.cpu_ns_until(10_000) == 800


def found_with(cpu: float, p99_ms: float = 0.3) -> dict:
    return {"n": 2000, "missing": 0, "cpu_us_per_chunk": cpu, "cpu_us_per_request": 100 * cpu, "error_p99_ms": p99_ms,
            "steal_share": None, "load_average_1m": 1.0}  # fmt: skip


def test_runs_of_one_level_give_the_median_of_their_cpu_and_the_worst_of_the_rest():
    found = together(together(found_with(12.0), found_with(9.0, p99_ms=2.0)), found_with(10.0))
    assert (found["cpu_us_per_chunk"], found["cpu_us_per_request"], found["error_p99_ms"]) == (10.0, 1000.0, 2.0)
    assert found["cpu_us_per_chunk_runs"] == [12.0, 9.0, 10.0] and found["n"] == 6000
    failed = {"reason": "it sent nothing"}
    assert together(found, failed) == failed == together(failed, found)


def test_a_missing_figure_is_a_dash_with_its_reason():
    content = {
        "date": "2026-11-29",
        "machine": {"cpu_model": "C", "cpus": 2, "kernel": "6", "python": "3.11", "steal_share": None,
                    "load_average_1m": 0.1},
        "versions": {},
        "rows": [
            {"subject": "kvtrial", "metric": "cpu_us_per_chunk", "value": 5.25, "unit": "µs", "n": 4},
            {"subject": "aiperf", "metric": "cpu_us_per_chunk", "value": None, "unit": "µs", "n": 0, "reason": "gone"},
            *({"subject": "stamped-server", "metric": f"{name}_at_{level}", "value": 0.1, "unit": "ms", "n": 1}
              for level in bench_client.LEVELS for name in ("write_p50_ms", "write_p99_ms", "late_p99_ms")),
        ],
    }  # fmt: skip
    text = markdown(content)
    assert "| `cpu_us_per_chunk` | 5.250 |  |  | – (1) |  |" in text
    assert "1. aiperf: gone" in text


def test_the_committed_result_has_every_row_that_is_promised():
    if not bench_client.RESULTS.exists():
        pytest.skip("no result is committed yet")
    rows = json.loads(bench_client.RESULTS.read_text())["rows"]
    there = {(row["subject"], row["metric"]) for row in rows}
    metrics = ["cpu_us_per_chunk", "cpu_us_per_request", "max_streams_at_50_per_core"]
    metrics += [f"ttft_error_{p}_ms_at_{n}" for p in ("p50", "p99") for n in (1, 64, 256, 512)]
    subjects = ("kvtrial", "c-reference", "guidellm", "aiperf", "vllm-bench")
    assert {(subject, metric) for subject in subjects for metric in metrics} <= there
    assert all(row["value"] is not None or row["reason"] for row in rows)


def test_the_reference_says_what_is_missing_where_there_is_no_compiler(monkeypatch):
    monkeypatch.setattr("bench.subjects.shutil.which", lambda _name: None)
    assert c_reference().absent == "no C compiler is here"
    assert bench_client.quick() == 0


def test_its_sources_name_no_path_of_this_machine():
    for path in Path(bench_client.__file__).parent.glob("*.py"):
        assert "/tmp/" not in path.read_text()
