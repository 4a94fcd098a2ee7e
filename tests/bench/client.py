"""make bench-client: the load client beside a C reference and three peers, on one server of known timing, in one run.

    PYTHONPATH=tests python -m bench.client            all of it, some ten minutes; writes results/client.{json,md}
    PYTHONPATH=tests python -m bench.client --quick    kvtrial and the C reference; fails where kvtrial has become slow

What is measured and how: README.md here.
"""

import argparse
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
from kvtrial.host.conditions import read_conditions
from kvtrial.host.load.honesty import cpu_ticks, quantile, steal_share
from kvtrial.host.stamped_server import Schedule, Stamps, running_server
from kvtrial.record.store import write_atomically

from bench.processes import Ran, last_write_ns, run
from bench.subjects import ROOT, Step, Subject, aiperf, c_reference, guidellm, kvtrial, vllm_bench

RESULTS = Path(__file__).parent / "results" / "client.json"
LEVELS = (1, 64, 256, 512, 1000)
STEPS = {
    1: Step(1, 100, 2, first_seconds=0.01, stagger_seconds=0.02),
    64: Step(64, 256, 50),
    256: Step(256, 512, 100),
    512: Step(512, 1024, 100),
    1000: Step(1000, 2000, 100),
}
CPU_LEVEL = 1000
"""CPU per chunk and per request are those of this level: one core is asked to hold 1,000 streams at 50 tokens/s."""

CPU_ROUNDS = 5
"""So often are kvtrial and the C reference, whose figures are near each other, measured at CPU_LEVEL, ABBA."""

HELD_SECONDS = 0.020
"""A client that reads a token later than the next one is due (p99) has fallen behind."""

RATE = 50.0
FIRST_TRIES = (16, 32, 64, 128, 256, 384, 512, 768, 1000, 1250, 1500, 1750, 2000)
RUN_SECONDS = 120.0
QUICK_STEP = Step(256, 256, 60, stagger_seconds=0.5)
QUICK_ROUNDS = 3
QUICK_LIMIT = 2.0
"""The check fails where the ratio of CPU per chunk to the C reference's is this many times the committed one."""


class Bench:
    """One stamped server on one CPU, and clients that are run against it one after the other on another."""

    def __init__(self, port: int, server: "subprocess.Popen[bytes]", client_cpu: int, folder: Path) -> None:
        self.port = port
        self.client_cpu = client_cpu
        self.folder = folder
        self.control = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        self._server = server
        self._first = threading.Event()
        self._numbers = itertools.count(1)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._server.stdout is not None
        for _ in self._server.stdout:
            self._first.set()

    def measure(self, subject: Subject, step: Step) -> dict[str, Any]:
        """Run `subject` on `step`; what was found, or {"reason": why nothing could be}."""
        folder = self.folder / f"{next(self._numbers):03d}-{subject.name}-{step.streams}"
        schedule = Schedule(
            tokens_per_second=RATE, first_seconds=step.first_seconds, stagger_seconds=step.stagger_seconds
        )
        self.control.post("/kvtrial/schedule", content=msgspec.json.encode(schedule)).raise_for_status()
        self._first.clear()
        before, load = _ticks(), os.getloadavg()[0]
        log = folder.with_suffix(".log")
        command = subject.command(self.port, step, folder)
        sent = partial(self._first.wait, RUN_SECONDS)
        ran = run(command, self.client_cpu, log, sent, RUN_SECONDS, environment(subject))
        steal = steal_share(before, _ticks())
        stamps = msgspec.json.decode(self.control.post("/kvtrial/stamps").content, type=Stamps)
        found = {"steal_share": steal, "load_average_1m": load, **_found(subject, step, folder, ran, stamps)}
        shown = found.get("reason") or (
            f"{found['cpu_us_per_chunk']:7.2f} µs/chunk  TTFT error p50 {found['error_p50_ms']:.3f} p99 "
            f"{found['error_p99_ms']:.3f} ms  last token p99 {found['last_p99_ms']:.2f} ms  "
            f"server late p99 {found['server_late_p99_ms']:.2f} ms"
        )
        print(f"{subject.name:12} {step.streams:5} streams  {shown}", flush=True)
        return found


def _found(subject: Subject, step: Step, folder: Path, ran: Ran, stamps: Stamps) -> dict[str, Any]:
    if ran.timed_out:
        return {"reason": f"it did not end within {RUN_SECONDS:g} s"}
    if ran.returncode != 0:
        return {"reason": f"it ended with status {ran.returncode}: {_last_line(folder.with_suffix('.log'))}"}
    if not ran.samples or stamps.write is None or stamps.lateness is None:
        return {"reason": "it sent nothing"}
    try:
        joined = list(subject.read(folder, stamps.requests))
    except (OSError, KeyError, ValueError, IndexError, TypeError) as error:
        return {"reason": f"its record can't be read ({type(error).__name__}: {error})"}
    errors, lasts = [], []
    for served, said in joined:
        if served.first_before_ns is None or served.last_before_ns is None:
            continue
        arrived = served.read_ns if served.arrived_ns is None else served.arrived_ns
        errors.append(abs(said.ttft_seconds * 1e3 - (served.first_before_ns - arrived) / 1e6))
        lasts.append(said.last_seconds * 1e3 - (served.last_before_ns - arrived) / 1e6)
    if not errors:
        return {"reason": "none of its requests has a first token in its record"}
    cpu_ns = ran.cpu_ns_until(last_write_ns(folder))
    return {
        "n": len(errors),
        "missing": step.requests - len(errors),
        "chunks": stamps.events,
        "cpu_us_per_chunk": cpu_ns / 1e3 / stamps.events,
        "cpu_us_per_request": cpu_ns / 1e3 / step.requests,
        "error_p50_ms": _quantile(errors, 0.5),
        "error_p99_ms": _quantile(errors, 0.99),
        "last_p99_ms": _quantile(lasts, 0.99),
        "server_write_p50_ms": stamps.write.p50_us / 1e3,
        "server_write_p99_ms": stamps.write.p99_us / 1e3,
        "server_late_p99_ms": stamps.lateness.p99_us / 1e3,
        "server_cpu_share": stamps.cpu_seconds / stamps.wall_seconds,
        "in_flight_max": stamps.in_flight_max,
    }


def holds(found: dict[str, Any]) -> bool:
    """Whether a client kept up: every answer is in its record, and its last token was read within a token's time."""
    return not found.get("reason") and not found["missing"] and found["last_p99_ms"] <= HELD_SECONDS * 1e3


def server_kept_up(found: dict[str, Any]) -> bool:
    """Whether what is seen is the client's doing: the server itself was on time."""
    return bool(found.get("reason")) or found["server_late_p99_ms"] <= HELD_SECONDS * 1e3


def most_streams(bench: Bench, subject: Subject, known: dict[int, dict[str, Any]]) -> tuple[int | None, str, int]:
    """(the most streams of FIRST_TRIES that the subject holds on its one CPU, a note, steps tried) by bisection.

    Every step has all its streams at once, 4 s each. The levels measured before say where to begin.
    """
    low, high = 0, len(FIRST_TRIES)  # FIRST_TRIES[low - 1] is held, FIRST_TRIES[high] is not
    for streams, found in known.items():
        if streams in FIRST_TRIES:
            position = FIRST_TRIES.index(streams)
            if holds(found):
                low = max(low, position + 1)
            elif server_kept_up(found):
                high = min(high, position)
    note, tried = "", 0
    while low < high:
        # The first try beyond what is known is 1,000: the number that is asked about.
        middle = FIRST_TRIES.index(1000) if not tried and low <= FIRST_TRIES.index(1000) < high else (low + high) // 2
        streams = FIRST_TRIES[middle]
        found = bench.measure(subject, Step(streams, streams, 200))
        tried += 1
        if holds(found):
            low = middle + 1
        elif not server_kept_up(found):
            note, high = f"at {streams} the server itself was late", middle
        else:
            high = middle
    if low == 0:
        return None, note or f"it holds not even {FIRST_TRIES[0]}", tried
    if low == len(FIRST_TRIES):
        note = "the largest number tried"
    return FIRST_TRIES[low - 1], note, tried


def together(before: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """What is known of a subject at a level with one more run of it: the median of their CPU, the worst of the rest.

    A run that failed stays: it is what the subject's rows say then.
    """
    if "reason" in before or "reason" in more:
        return before if "reason" in before else more
    runs = [*before.get("cpu_us_per_chunk_runs", [before["cpu_us_per_chunk"]]), more["cpu_us_per_chunk"]]
    worst = {name: max(before[name], more[name]) for name in more if name != "n" and before[name] is not None}
    requests = before["cpu_us_per_request"] / before["cpu_us_per_chunk"]
    cpu = statistics.median(runs)
    return {
        **before,
        **worst,
        "n": before["n"] + more["n"],
        "missing": before["missing"] + more["missing"],
        "cpu_us_per_chunk": cpu,
        "cpu_us_per_request": cpu * requests,
        "cpu_us_per_chunk_runs": runs,
    }


def quick_ratio(
    bench: Bench, ours: Subject, reference: Subject, rounds: int = QUICK_ROUNDS
) -> tuple[float, list[float]]:
    """CPU per chunk of `ours` over that of `reference`, ABBA: (the median of the rounds, each round).

    Raises RuntimeError where one of the two could not be measured.
    """
    ratios = []
    for number in range(rounds):
        order = [ours, reference] if number % 2 == 0 else [reference, ours]
        cpu = {}
        for subject in order:
            found = bench.measure(subject, QUICK_STEP)
            if "reason" in found:
                raise RuntimeError(f"{subject.name}: {found['reason']}")
            cpu[subject.name] = found["cpu_us_per_chunk"]
        ratios.append(cpu[ours.name] / cpu[reference.name])
    return statistics.median(ratios), ratios


def judge_quick(ratio: float, committed: float) -> str:
    """Empty where the ratio is allowed, else the sentence that says why not."""
    if ratio <= QUICK_LIMIT * committed:
        return ""
    return (
        f"kvtrial's client uses {ratio:.2f} times the CPU per chunk of the C reference; {committed:.2f} are committed "
        f"in {RESULTS.relative_to(ROOT)}, and more than {QUICK_LIMIT:g} times that is refused."
    )


def committed_ratio() -> float | None:
    """The ratio that the last full run left; None where there is none."""
    try:
        rows = json.loads(RESULTS.read_text())["rows"]
    except (OSError, ValueError, KeyError):
        return None
    return next((row["value"] for row in rows if row["metric"] == "cpu_ratio_quick"), None)


@contextmanager
def benching() -> Iterator[Bench]:
    """A bench with a server on the first allowed CPU and clients on the last; its folder is removed at the end."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        raise SystemExit("The benchmark needs two CPUs: one for the server, one for the client.")
    # What only waits must not wait on the client's CPU.
    os.sched_setaffinity(0, set(cpus[:-1]))
    folder = Path(tempfile.mkdtemp(prefix="kvtrial-bench-"))
    try:
        with running_server(cpu=cpus[0]) as (port, server):
            yield Bench(port, server, cpus[-1], folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.sched_setaffinity(0, set(cpus))


def environment(subject: Subject) -> dict[str, str]:
    """This environment without what would lead a peer's Python astray, with the subject's own."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return {**kept, **subject.env}


# ---------------------------------------------------------------------------------------------------------- the runs


def quick() -> int:
    """The check that `make test` runs. 0: passed or skipped with a reason, 1: failed."""
    committed, reference = committed_ratio(), c_reference()
    if reference.absent:
        print(f"skipped: {reference.absent}")
        return 0
    if committed is None:
        print(f"skipped: {RESULTS.relative_to(ROOT)} holds no ratio to compare with; make bench-client leaves one")
        return 0
    if len(os.sched_getaffinity(0)) < 2:
        print("skipped: one CPU is too few for a server and a client")
        return 0
    planted = os.environ.get("KVTRIAL_BENCH_CLIENT")
    with benching() as bench:
        ratio, rounds = quick_ratio(bench, kvtrial(planted.split() if planted else None), reference)
    print(f"ratio {ratio:.2f} (rounds {', '.join(f'{value:.2f}' for value in rounds)}), committed {committed:.2f}")
    sentence = judge_quick(ratio, committed)
    if sentence:
        print(sentence)
    return 1 if sentence else 0


def full() -> int:
    """Everything, interleaved: at every level each subject after the other."""
    subjects = [kvtrial(), c_reference(), guidellm(), aiperf(), vllm_bench(_engine_venv())]
    present = [subject for subject in subjects if not subject.absent]
    for subject in subjects:
        if subject.absent:
            print(f"{subject.name}: {subject.absent}", flush=True)
    began, ticks = time.monotonic(), _ticks()
    found: dict[str, dict[int, dict[str, Any]]] = {subject.name: {} for subject in present}
    most: dict[str, tuple[int | None, str, int]] = {}
    ratio: tuple[float, list[float]] | None = None
    with benching() as bench:
        if {"kvtrial", "c-reference"} <= found.keys():
            ratio = quick_ratio(bench, subjects[0], subjects[1])
        for level in LEVELS:
            for subject in present:
                found[subject.name][level] = bench.measure(subject, STEPS[level])
        near = [subject for subject in present if subject.name in ("kvtrial", "c-reference")]
        again = [near[:: -1 if number % 2 else 1] for number in range(1, CPU_ROUNDS)]
        for subject in itertools.chain(*again):
            found[subject.name][CPU_LEVEL] = together(
                found[subject.name][CPU_LEVEL], bench.measure(subject, STEPS[CPU_LEVEL])
            )
        for subject in present:
            most[subject.name] = most_streams(bench, subject, found[subject.name])
    rows = [row for subject in subjects for row in _rows(subject, found.get(subject.name), most.get(subject.name))]
    if ratio is not None:
        n = QUICK_ROUNDS
        rows.append({"subject": "kvtrial", "metric": "cpu_ratio_quick", "value": ratio[0], "unit": "ratio", "n": n})
    rows += _server_rows(found)
    content = {
        "benchmark": "client",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(steal_share(ticks, _ticks()), time.monotonic() - began),
        "versions": {subject.name: subject.version for subject in subjects if subject.version},
        "rows": rows,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    table = markdown(content)
    write_atomically(RESULTS, json.dumps(content, indent=1).encode() + b"\n")
    write_atomically(RESULTS.with_suffix(".md"), table.encode())
    print("\n" + table)
    return 0


def _rows(
    subject: Subject, found: dict[int, dict[str, Any]] | None, most: tuple[int | None, str, int] | None
) -> Iterator[dict[str, Any]]:
    def row(metric: str, value: float | None, unit: str, at: dict[str, Any], reason: str = "") -> dict[str, Any]:
        made = {"subject": subject.name, "metric": metric, "value": value, "unit": unit, "n": at.get("n", 0)}
        made |= {name: at[name] for name in ("steal_share", "load_average_1m") if name in at}
        if metric.startswith("cpu_us_per_chunk") and "cpu_us_per_chunk_runs" in at:
            made["runs"] = at["cpu_us_per_chunk_runs"]
        why = reason or at.get("reason", "")
        return {**made, "reason": why} if why else made

    by_level = found or {level: {"reason": subject.absent} for level in LEVELS}
    at = by_level[CPU_LEVEL]
    yield row("cpu_us_per_chunk", at.get("cpu_us_per_chunk"), "µs", at)
    yield row("cpu_us_per_request", at.get("cpu_us_per_request"), "µs", at)
    streams, note, tried = most or (None, subject.absent, 0)
    yield row("max_streams_at_50_per_core", streams, "streams", {"n": tried}, note)
    for level, at in by_level.items():
        yield row(f"ttft_error_p50_ms_at_{level}", at.get("error_p50_ms"), "ms", at)
        yield row(f"ttft_error_p99_ms_at_{level}", at.get("error_p99_ms"), "ms", at)
        yield row(f"cpu_us_per_chunk_at_{level}", at.get("cpu_us_per_chunk"), "µs", at)
        yield row(f"requests_missing_at_{level}", at.get("missing"), "requests", at)


def _server_rows(found: dict[str, dict[int, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """The server's own error beside the clients': the median over the subjects of each level."""
    for level in LEVELS:
        at = [by_level[level] for by_level in found.values() if "reason" not in by_level[level]]
        for name in ("server_write_p50_ms", "server_write_p99_ms", "server_late_p99_ms"):
            value = statistics.median(entry[name] for entry in at) if at else None
            yield {"subject": "stamped-server", "metric": f"{name.removeprefix('server_')}_at_{level}", "value": value,
                   "unit": "ms", "n": len(at)}  # fmt: skip


def markdown(content: dict[str, Any]) -> str:
    """The table: a row a metric, a column a subject; what a subject could not do is told below."""
    rows = content["rows"]
    names = ["kvtrial", "c-reference", "guidellm", "aiperf", "vllm-bench"]
    values = {(row["subject"], row["metric"]): row for row in rows}
    metrics = list(dict.fromkeys(row["metric"] for row in rows if row["subject"] == "kvtrial"))
    machine = content["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    lines = [
        f"`make bench-client`, {content['date']}: {machine['cpu_model']}, {machine['cpus']} CPUs, kernel "
        f"{machine['kernel']}, Python {machine['python']}; steal {_share(machine['steal_share'])}, load "
        f"{machine['load_average_1m']:.2f} at its end; {versions}",
        "",
        "| | " + " | ".join(names) + " |",
        "| --- |" + " ---: |" * len(names),
    ]
    reasons: list[str] = []
    for metric in metrics:
        cells = []
        for name in names:
            row = values.get((name, metric))
            cells.append("" if row is None else _cell(row, reasons))
        lines.append(f"| `{metric}` | " + " | ".join(cells) + " |")
    lines += ["", "The server's own error (how long a write took, and how late it was), ms:", ""]
    lines += ["| | " + " | ".join(f"{level} streams" for level in LEVELS) + " |", "| --- |" + " ---: |" * len(LEVELS)]
    for name in ("write_p50_ms", "write_p99_ms", "late_p99_ms"):
        cells = [_number(values[("stamped-server", f"{name}_at_{level}")]["value"]) for level in LEVELS]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    lines += ["", *(f"{number}. {reason}" for number, reason in enumerate(reasons, start=1))] if reasons else []
    steals = [row["steal_share"] for row in rows if row.get("steal_share") is not None]
    worst = f"{max(steals):.2%}" if steals else "unknown"
    return "\n".join([*lines, "", f"Steal in the worst single run: {worst}."]) + "\n"


def _cell(row: dict[str, Any], reasons: list[str]) -> str:
    text = _number(row["value"])
    if row.get("runs"):
        text += f" [{_number(min(row['runs']))} to {_number(max(row['runs']))}]"
    if row.get("reason"):
        said = f"{row['subject']}: {row['reason']}"
        if said not in reasons:
            reasons.append(said)
        text += f" ({reasons.index(said) + 1})"
    return text


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2%}"


def _machine(steal: float | None, seconds: float) -> dict[str, Any]:
    conditions = read_conditions()
    return {
        "cpu_model": conditions.cpu_model,
        "cpus": conditions.cpus,
        "ram_bytes": conditions.ram_total_bytes,
        "kernel": conditions.kernel,
        "os": conditions.os,
        "python": platform.python_version(),
        "governor": conditions.governor,
        "clock_source": conditions.clock_source,
        "load_average_1m": conditions.load_average_1m,
        "steal_share": steal,
        "seconds": seconds,
    }


def _engine_venv() -> Path | None:
    named = os.environ.get("KVTRIAL_ENGINE_VENV")
    found = sorted((ROOT / ".kvtrial" / "venvs").glob("vllm-*/bin/vllm"))
    return Path(named) if named else found[-1].parent.parent if found else None


def _ticks() -> tuple[int, int] | None:
    try:
        return cpu_ticks(Path("/proc/stat").read_text())
    except OSError:
        return None


def _quantile(values: list[float], share: float) -> float:
    found = quantile(values, share)  # type: ignore[arg-type]
    assert found is not None
    return float(found)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][-200:] if lines else "it said nothing"


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    return quick() if parser.parse_args().quick else full()


if __name__ == "__main__":
    sys.exit(main())
