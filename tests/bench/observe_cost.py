"""What being observed costs a server: `python -m bench.observe_cost [BLOCKS] [WINDOW_SECONDS]`.

A small real engine (`served`) on the machine's first CPU, the watcher and the load client on its last. Two questions:

- CPU: what `kvtrial observe --url --window 60` takes of the server, beyond two plain reads of /metrics a window apart.
  The server is idle meanwhile, all its processes are counted, and the two ways alternate (ABBA).
- Answers: the load client's inter-token p99 while its server is observed, against not (B and A).
  A load goes on a little longer than a window, so that as many reads fall into it as `observe` makes. A block is
  A, A, B in a changing order; the floor is what A differs from A by, block by block.

The watcher is `kvtrial.analysis.observe.live`, loaded beforehand: what it computes afterwards is the controller's work.
Needs a machine with nothing else to do. Prints a table and writes results/observe-cost.json.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from kvtrial.record.load import read_results
from served import SERVED, Engine, make_model
from trial import free_port

from bench.observe import keep
from bench.processes import tree_cpu_ns

ROOT = Path(__file__).parents[2]
WATCHER = """
import sys
from kvtrial.analysis.observe.live import watch
for line in sys.stdin:
    url, window, reads = line.split()
    print(len(watch(url, float(window), int(reads)).pages), flush=True)
"""
STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS, WARMUP_REQUESTS = 4, 32, 192, 100
SEED = (0, 1, 2), (2, 0, 1), (1, 2, 0), (0, 2, 1), (2, 1, 0), (1, 0, 2)
"""Places of A, A and B in a block; B is as often first as second and third."""


class Watcher:
    """A process that has everything loaded and watches when it is told to."""

    def __init__(self, cpu: int) -> None:
        self.process = subprocess.Popen(
            ["taskset", "-c", str(cpu), sys.executable, "-c", WATCHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env={**os.environ, "PYTHONPATH": f"{ROOT / 'analysis'}"},
        )  # fmt: skip

    def begin(self, url: str, window: float, reads: int) -> None:
        assert self.process.stdin
        self.process.stdin.write(f"{url} {window} {reads}\n")
        self.process.stdin.flush()

    def over(self) -> int:
        assert self.process.stdout
        return int(self.process.stdout.readline())


def plain_reads(url: str, window: float) -> None:
    """Two reads of /metrics, as anybody's scraper does them."""
    for pause in (window, 0.0):
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            answer.read()
        time.sleep(pause)


def cpu_of(engine: Engine, act: Any) -> float:
    """CPU seconds of all the server's processes while `act` goes on."""
    before = tree_cpu_ns(engine.process.pid)
    act()
    time.sleep(1.0)
    return (tree_cpu_ns(engine.process.pid) - before) / 1e9


def observed_cpu(engine: Engine, watcher: Watcher, window: float) -> list[tuple[float, float]]:
    """(plain, observed) CPU seconds a window, ABBA."""

    def observe() -> None:
        watcher.begin(engine.url, window, 4)
        assert watcher.over() == 4

    found: dict[str, list[float]] = {"A": [], "B": []}
    for name in "ABBA":
        act = observe if name == "B" else lambda: plain_reads(engine.url, window)
        found[name].append(cpu_of(engine, act))
    return list(zip(found["A"], found["B"], strict=True))


def p99_ms(
    engine: Engine, watcher: Watcher | None, folder: Path, cpu: int, number: int, requests: int, window: float = 0.0
) -> float:
    """Inter-token p99 of one load, ms. With a watcher four reads, /version and /v1/models fall into it."""
    folder.mkdir()
    load = {"base_url": engine.url, "model": SERVED, "concurrency": STREAMS, "idle_timeout_seconds": 60,
            "request_timeout_seconds": 120, "deadlock_seconds": 60}  # fmt: skip
    (folder / "spec.json").write_text(json.dumps({"load": load, "requests": "requests.jsonl"}))
    (folder / "requests.jsonl").write_text("".join(
        json.dumps({"key": str(n), "max_tokens": OUTPUT_TOKENS,
                    "prompt_token_ids": [32 + (number * 13 + n * 7 + k) % 90 for k in range(PROMPT_TOKENS)]}) + "\n"
        for n in range(requests)))  # fmt: skip
    command = ["taskset", "-c", str(cpu), sys.executable, "-m", "kvtrial.host.load.client", str(folder / "spec.json"),
               str(folder / "out")]  # fmt: skip
    client = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": f"{ROOT / 'analysis'}"})
    time.sleep(2.0)
    if watcher is not None:
        watcher.begin(engine.url, window, 4)
        watcher.over()
        assert client.poll() is None, "the load ended before the window did"
    assert client.wait(240) == 0
    gaps = sorted(gap for row in read_results(folder / "out" / "requests.jsonl.zst") for gap in row["token_gaps_us"])
    return gaps[math.ceil(0.99 * len(gaps)) - 1] / 1000


def measure(blocks: int, window: float) -> list[dict[str, Any]]:
    """Rows of the table."""
    venv = Path(os.environ.get("KVTRIAL_ENGINE_VENV") or sorted((ROOT / ".kvtrial" / "venvs").glob("vllm-*"))[-1])
    server_cpu, other_cpu = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(venv / "bin" / "python", folder / "model")
        os.sched_setaffinity(0, {server_cpu})
        engine = Engine(venv, model, free_port(), folder / "engine.log", ("--max-num-seqs", "16"))
        os.sched_setaffinity(0, {other_cpu})
        watcher = Watcher(other_cpu)
        try:
            engine.wait()
            began = time.monotonic()
            p99_ms(engine, None, folder / "warmup", other_cpu, 99, WARMUP_REQUESTS)
            requests = math.ceil(1.3 * (window + 4) * WARMUP_REQUESTS / (time.monotonic() - began))
            cpu = observed_cpu(engine, watcher, window)
            rows = _cpu_rows(cpu, window)
            print(*(f"{row['metric']}: {row['value']} {row['unit']}" for row in rows), sep="\n", flush=True)
            loads: list[list[float]] = []
            for block in range(blocks):
                found: dict[int, float] = {}
                for place in SEED[block % len(SEED)]:
                    watching = watcher if place == 2 else None
                    load = folder / f"{block}-{place}"
                    found[place] = p99_ms(engine, watching, load, other_cpu, 3 * block + place, requests, window)
                loads.append([found[0], found[1], found[2]])
                print(
                    f"block {block + 1}: p99 {found[0]:.3f} and {found[1]:.3f} ms, observed {found[2]:.3f} ms",
                    flush=True,
                )
            return rows + _p99_rows(loads)
        finally:
            engine.end()
            watcher.process.kill()
            watcher.process.wait()


def _cpu_rows(cpu: list[tuple[float, float]], window: float) -> list[dict[str, Any]]:
    subject = f"CPU of an idle server over {window:g} s"
    beyond = statistics.mean(observed - plain for plain, observed in cpu)
    found = [
        ("two reads of /metrics", 1000 * statistics.mean(plain for plain, _ in cpu), "ms"),
        ("kvtrial observe", 1000 * statistics.mean(observed for _, observed in cpu), "ms"),
        ("beyond two reads", 100 * beyond / window, "% of a core"),
        ("largest pair beyond two reads", 100 * max(o - p for p, o in cpu) / window, "% of a core"),
    ]
    return [{"subject": subject, "metric": m, "value": round(v, 4), "unit": u} for m, v, u in found]


def _p99_rows(loads: list[list[float]]) -> list[dict[str, Any]]:
    """The middle of B against the mean of its block's A's, beside what A against A shows."""
    subject = f"inter-token p99, {STREAMS} streams, {len(loads)} blocks"
    floor = [100 * (math.exp(abs(math.log(second / first))) - 1) for first, second, _ in loads]
    apart = [100 * (b / math.sqrt(first * second) - 1) for first, second, b in loads]
    found = [
        ("not observed", statistics.median([x for first, second, _ in loads for x in (first, second)]), "ms"),
        ("observed", statistics.median([b for _, _, b in loads]), "ms"),
        ("observed against not, middle of the blocks", statistics.median(apart), "%"),
        ("A against A, middle of the blocks", statistics.median(floor), "%"),
        ("A against A, largest", max(floor), "%"),
    ]
    return [{"subject": subject, "metric": m, "value": round(v, 3), "unit": u} for m, v, u in found]


def main() -> None:
    """Measure, print, keep."""
    blocks = int(sys.argv[1]) if len(sys.argv) > 1 else 6
    window = float(sys.argv[2]) if len(sys.argv) > 2 else 60.0
    keep("observe-cost", measure(blocks, window))


if __name__ == "__main__":
    main()
