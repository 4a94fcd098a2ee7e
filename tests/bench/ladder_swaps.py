"""False verdicts of a ladder on real A/A pairs: every comparison under every swap of labels within pairs.

    python tests/bench/ladder_swaps.py FOLDER      a folder that holds runs/<run>/record.json of preemption_noise

With n pairs there are 2^n ways to call one of a pair's servers the variant. None of them differs in anything, so BETTER
and WORSE are false each time, and so is MOVED. Prints a table, writes results/ladder-swaps.json, and ends with 1 where
more than 5 % of all verdicts, or of what is said of the delay, are false. Takes eight pairs, no more and no fewer.
"""

import datetime
import itertools
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "analysis"))

from kvtrial.analysis.compare import compare  # noqa: E402
from kvtrial.analysis.faults import Pair  # noqa: E402
from kvtrial.analysis.ladder import moved_of  # noqa: E402
from kvtrial.analysis.protocols import load_protocol, resolve  # noqa: E402
from kvtrial.record.record import RunRecord  # noqa: E402
from msgspec.structs import replace  # noqa: E402

RESULT = Path(__file__).parent / "results" / "ladder-swaps.json"
LIMIT = 0.05
PAIRS = 8
ALL, ALL_MOVED = "all comparisons", "delay of again"
UNIT = "share of swaps"


def read_pairs(folder: Path) -> list[Pair]:
    """The whole pairs of a campaign of preemption_noise."""
    runs: dict[int, dict[str, RunRecord]] = {}
    for path in sorted(folder.glob("**/record.json")):
        record = msgspec.json.decode(path.read_bytes(), type=RunRecord)
        if record.outcome == "completed" and not record.spare:
            runs.setdefault(record.pair, {})[record.arm] = record
    return [Pair(number, found) for number, found in sorted(runs.items()) if len(found) == 2]


def labellings(pairs: list[Pair]) -> list[list[Pair]]:
    """Every way to call one of each pair's servers the variant."""
    return [
        [
            replace(pair, runs={"base": pair.runs["again"], "again": pair.runs["base"]}) if swapped else pair
            for pair, swapped in zip(pairs, swaps, strict=True)
        ]
        for swaps in itertools.product([False, True], repeat=len(pairs))
    ]


def counted(pairs: list[Pair]) -> tuple[dict[str, Counter[str]], Counter[str]]:
    """Verdicts of each comparison, and how often MOVED was said, over every labelling of the pairs."""
    protocol = resolve(load_protocol("preemption_noise", ROOT / "playbooks" / "protocols"), "0.32.0")
    words: dict[str, Counter[str]] = {}
    moved = Counter[str]()
    for labelled in labellings(pairs):
        for comparison in protocol.comparisons:
            name = f"{comparison.metric} of {comparison.phase}"
            words.setdefault(name, Counter())[compare(comparison, protocol, labelled).result.verdict] += 1
        moved.update(str(found.moved) for found in moved_of(protocol, labelled))
    return words, moved


def table(words: dict[str, Counter[str]], moved: Counter[str]) -> list[dict[str, Any]]:
    """Rows of the result: the share of false verdicts by comparison and over all, and that of MOVED."""
    words = {**words, ALL: sum(words.values(), Counter())}
    rows = [
        {"subject": name, "metric": "BETTER + WORSE", "value": _share(found, "BETTER", "WORSE"), "unit": UNIT}
        for name, found in words.items()
    ]
    return [*rows, {"subject": ALL_MOVED, "metric": "MOVED", "value": _share(moved, "True"), "unit": UNIT}]


def _share(found: Counter[str], *false: str) -> float:
    return sum(found[word] for word in false) / found.total()


def above(rows: list[dict[str, Any]]) -> list[str]:
    """What of all comparisons, and of MOVED, is false more often than allowed."""
    return [row["subject"] for row in rows if row["subject"] in (ALL, ALL_MOVED) and row["value"] > LIMIT]


def main() -> None:
    pairs = read_pairs(Path(sys.argv[1])) if len(sys.argv) == 2 else sys.exit(__doc__)
    if len(pairs) != PAIRS:
        sys.exit(
            f"{sys.argv[1]} holds {len(pairs)} whole pairs of preemption_noise, {PAIRS} are needed; give the folder of "
            f"a campaign with kvtrial_pairs={PAIRS}."
        )
    words, moved = counted(pairs)
    rows = table(words, moved)
    for row in rows:
        found = moved if row["metric"] == "MOVED" else words.get(row["subject"])
        print(f"{row['subject']:60} {row['value']:7.2%}   {dict(found) if found else ''}")
    machine = f"{len(pairs)} pairs, {2 ** len(pairs)} labellings, {os.cpu_count()} CPUs"
    result = {"benchmark": "ladder-swaps", "date": datetime.date.today().isoformat(), "machine": machine, "rows": rows}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    wrong = above(rows)
    print(f"{machine}: {'ABOVE' if wrong else 'within'} {LIMIT:.0%}{': ' if wrong else ''}{', '.join(wrong)}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
