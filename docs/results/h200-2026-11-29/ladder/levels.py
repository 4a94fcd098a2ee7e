"""The tables of this folder's page, from the records alone: python levels.py FOLDER, which holds runs/*/*/record.json.

A pair's effect above the onset pools the requests of the levels 10, 13 and 16. Estimates are Hodges-Lehmann over the
six pairs; the interval is their range, which is the exact signed-rank one at 96.9 %. Standard library only.
"""

import json
import math
import sys
from itertools import combinations_with_replacement
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

ARMS = ("base", "more_kv", "fewer_seqs", "offload_all")
LEVELS = (1, 7, 9, 10, 13, 16)
ABOVE = (10, 13, 16)
Phase = dict[str, Any]


def risen(phase: Phase, role: str) -> float:
    """What a counter or sum rose by in a phase."""
    return (phase["after"].get(role) or 0.0) - (phase["before"].get(role) or 0.0)


def stall(phase: Phase) -> float:
    """Stall seconds of a request, mean."""
    return mean(request["stall_gaps_ns"] for request in phase["ledger"]["requests"]) / 1e9


def queue(phase: Phase) -> float:
    """Queue seconds of a request by the engine, mean."""
    return risen(phase, "queue_seconds_sum") / risen(phase, "queue_seconds_count")


def outside_core(phase: Phase) -> float:
    """Seconds a request between its arrival at the server and the engine core's queue: TTFT less queue and prefill."""
    return (
        risen(phase, "ttft_seconds_sum") - risen(phase, "queue_seconds_sum") - risen(phase, "prefill_seconds_sum")
    ) / phase["finished"]


def of(phases: list[Phase], field: str) -> list[float]:
    """A field of all requests of some phases."""
    return [request[field] for phase in phases for request in phase["requests"]]


def p95(values: list[float]) -> float:
    """The 95th percentile, interpolated."""
    return quantiles(values, n=20, method="inclusive")[-1]


METRICS = {
    "preemptions per 1,000 requests": (
        lambda q: 1000 * mean(risen(p, "preemptions") / p["finished"] for p in q),
        False,
    ),
    "whole request, median": (lambda q: median(of(q, "e2e_seconds")), True),
    "whole request, p95": (lambda q: p95(of(q, "e2e_seconds")), True),
    "throughput": (lambda q: sum(p["output_tokens"] for p in q) / sum(p["seconds"] for p in q), True),
    "first token, median": (lambda q: median(of(q, "ttft_seconds")), True),
    "first token, p95": (lambda q: p95(of(q, "ttft_seconds")), True),
    "stall, s a request": (lambda q: mean(map(stall, q)), False),
    "queue, s a request": (lambda q: mean(map(queue, q)), False),
}  # fmt: skip


def main(folder: Path) -> None:
    """Print both tables as Markdown rows."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("runs/*/*/record.json"))]
    at = {
        (run["arm"], run["pair"], int(phase["name"][5:])): phase
        for run in runs
        for phase in run["phases"]
        if phase["name"].startswith("load_")
    }
    pairs = sorted({pair for _, pair, _ in at})
    for arm in ARMS:
        for level in LEVELS:
            six = [at[arm, pair, level] for pair in pairs]
            counts = ", ".join(f"{risen(phase, 'preemptions'):.0f}" for phase in six)
            longest = [max(r["longest_gap_ns"] for r in p["ledger"]["requests"]) / 1e6 for p in six]
            print(
                f"| {arm} | {level} | {counts} | {1e3 * median(p['ttft_median_seconds'] for p in six):.0f}"
                f" / {1e3 * median(p['ttft_p95_seconds'] for p in six):.0f}"
                f" | {median(p['e2e_median_seconds'] for p in six):.2f}"
                f" / {median(p['e2e_p95_seconds'] for p in six):.2f}"
                f" | {median(longest):.0f} | {1e3 * mean(map(stall, six)):.0f} | {1e3 * mean(map(queue, six)):.0f}"
                f" | {median(p['output_throughput_tokens_per_second'] for p in six):,.0f}"
                f" | {1e3 * min(map(outside_core, six)):.0f} to {1e3 * max(map(outside_core, six)):.0f} |"
            )
    for arm in ARMS[1:]:
        for name, (value, ratio) in METRICS.items():
            mine, base = (
                [value([at[which, pair, level] for level in ABOVE]) for pair in pairs] for which in (arm, "base")
            )
            found = [math.log(a / b) if ratio else a - b for a, b in zip(mine, base, strict=True)]
            walsh = [(a + b) / 2 for a, b in combinations_with_replacement(found, 2)]
            shown = [math.exp(x) if ratio else x for x in (median(walsh), min(found), max(found))]
            print(f"| {arm} | {name} | {median(base):.4g} | {median(mine):.4g} | {'×' if ratio else ''}"
                  f"{shown[0]:.4g} ({shown[1]:.4g} to {shown[2]:.4g}) |")  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))
