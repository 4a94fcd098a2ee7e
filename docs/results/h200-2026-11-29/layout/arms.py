"""The tables of this folder's page, from the records alone: python arms.py FOLDER, which holds runs/*/*/record.json.

First, as CSV, arm against arm in every phase: medians over the runs, the pairs' ratios, their Hodges-Lehmann estimate
with the range of the six pairs (the exact signed-rank interval at 96.9 %), and the SD of their logarithms and of their
differences. Then the break-even shares of returns, and how many answers of the arms are alike. Standard library only.
"""

import csv
import json
import math
import sys
from collections.abc import Iterable
from itertools import combinations_with_replacement
from pathlib import Path
from statistics import median, stdev
from typing import Any

AGAINST = (("default_layout", "control"), ("offload", "control"), ("offload", "default_layout"))
METRICS = (
    "ttft_median_seconds",
    "inter_token_p95_seconds",
    "e2e_median_seconds",
    "output_throughput_tokens_per_second",
)
COLUMNS = "phase,metric,arm,against,arm_median,against_median,effect,least,most,log_ratio_sd,difference_sd"
BREAK_EVEN = (
    ("return_16k", "miss"),
    ("return_8k", "populate_8k"),
    ("return_together", "populate_together"),
)
"""A return, and the phase of prompts in no cache whose cost stands against it."""
Runs = dict[tuple[int, str], dict[str, dict[str, Any]]]


def hodges_lehmann(values: list[float]) -> float:
    """The median of the means of all pairs of values, each with itself too."""
    return median((a + b) / 2 for a, b in combinations_with_replacement(values, 2))


def read(folder: Path) -> Runs:
    """Phases by name of each run, by pair and arm."""
    records = (json.loads(path.read_text()) for path in sorted(folder.glob("runs/*/*/record.json")))
    return {(run["pair"], run["arm"]): {phase["name"]: phase for phase in run["phases"]} for run in records}


def values(runs: Runs, arm: str, phase: str, metric: str) -> list[float]:
    """An arm's values, by pair."""
    return [phases[phase][metric] for (_, name), phases in sorted(runs.items()) if name == arm]


def comparisons(runs: Runs) -> Iterable[list[str]]:
    """One row a phase, metric and pair of arms."""
    for phase in next(iter(runs.values())):
        for metric in METRICS:
            for arm, against in AGAINST:
                ours, theirs = values(runs, arm, phase, metric), values(runs, against, phase, metric)
                if not (all(ours) and all(theirs)):
                    continue
                logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
                differences = [a - b for a, b in zip(ours, theirs, strict=True)]
                numbers = (
                    median(ours),
                    median(theirs),
                    math.exp(hodges_lehmann(logs)),
                    math.exp(min(logs)),
                    math.exp(max(logs)),
                    stdev(logs),
                    stdev(differences),
                )
                yield [phase, metric, arm, against, *(f"{number:.6g}" for number in numbers)]


def shares(runs: Runs, against: str, returned: str, missed: str) -> list[float]:
    """The share of returns from which the tier pays, by pair: cost of a miss / (gain of a return + cost of a miss)."""
    gains, costs = (
        [
            sign * (a - b)
            for a, b in zip(
                values(runs, "offload", phase, "ttft_median_seconds"),
                values(runs, against, phase, "ttft_median_seconds"),
                strict=True,
            )
        ]
        for phase, sign in ((returned, -1), (missed, 1))
    )
    return [cost / (gain + cost) for gain, cost in zip(gains, costs, strict=True)]


def alike(runs: Runs, arm: str, against: str, phase: str) -> tuple[int, int]:
    """How many answers of an arm equal the other's to the same prompt, and of how many."""
    same = total = 0
    for pair in sorted({pair for pair, _ in runs}):
        ours, theirs = (
            {request["key"]: request["answer_sha256"] for request in runs[pair, name][phase]["requests"]}
            for name in (arm, against)
        )
        same += sum(ours[key] == theirs[key] for key in ours)
        total += len(ours)
    return same, total


def main(folder: str) -> None:
    """Print the tables."""
    runs = read(Path(folder))
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(COLUMNS.split(","))
    out.writerows(comparisons(runs))
    print("\nbreak-even share of returns: against, return, miss, estimate, least, most")
    for against in ("control", "default_layout"):
        for returned, missed in BREAK_EVEN:
            found = shares(runs, against, returned, missed)
            print(f"{against},{returned},{missed},{hodges_lehmann(found):.4f},{min(found):.4f},{max(found):.4f}")
    print("\nanswers alike: arm, against, phase, alike, of")
    for arm, against in AGAINST:
        for phase in ("populate_8k", "return_8k", "populate_16k", "return_16k", "populate_together", "return_together"):
            print(f"{arm},{against},{phase},{','.join(map(str, alike(runs, arm, against, phase)))}")


if __name__ == "__main__":
    main(sys.argv[1])
