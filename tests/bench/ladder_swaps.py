"""False verdicts of a ladder on real A/A pairs: every comparison under every swap of labels within pairs.

    python tests/bench/ladder_swaps.py FOLDER      a folder that holds runs/<run>/record.json of preemption_noise

With n pairs there are 2^n ways to call one of a pair's servers the variant. None of them differs in anything, so BETTER
and WORSE are false each time. Prints a table and writes results/ladder-swaps.json.
"""

import datetime
import itertools
import json
import os
import sys
from collections import Counter
from pathlib import Path

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


def read_pairs(folder: Path) -> list[Pair]:
    """The whole pairs of a campaign of preemption_noise."""
    runs: dict[int, dict[str, RunRecord]] = {}
    for path in sorted(folder.glob("**/record.json")):
        record = msgspec.json.decode(path.read_bytes(), type=RunRecord)
        if record.outcome == "completed" and not record.spare:
            runs.setdefault(record.pair, {})[record.arm] = record
    return [Pair(number, found) for number, found in sorted(runs.items()) if len(found) == 2]


def main() -> None:
    pairs = read_pairs(Path(sys.argv[1]))
    protocol = load_protocol("preemption_noise", ROOT / "playbooks" / "protocols")
    protocol = resolve(protocol, "0.32.0")
    words: dict[str, Counter[str]] = {}
    moved = Counter[str]()
    for swaps in itertools.product([False, True], repeat=len(pairs)):
        labelled = [
            replace(pair, runs={"base": pair.runs["again"], "again": pair.runs["base"]}) if swapped else pair
            for pair, swapped in zip(pairs, swaps, strict=True)
        ]
        for comparison in protocol.comparisons:
            name = f"{comparison.metric} of {comparison.phase}"
            words.setdefault(name, Counter())[compare(comparison, protocol, labelled).result.verdict] += 1
        moved.update(str(found.moved) for found in moved_of(protocol, labelled))
    rows, every = [], Counter[str]()
    for name, counted in words.items():
        every.update(counted)
        false = (counted["BETTER"] + counted["WORSE"]) / counted.total()
        rows.append({"subject": name, "metric": "BETTER + WORSE", "value": false, "unit": "share of swaps"})
        print(f"{name:60} {false:7.2%}   {dict(counted)}")
    false = (every["BETTER"] + every["WORSE"]) / every.total()
    rows.append({"subject": "all comparisons", "metric": "BETTER + WORSE", "value": false, "unit": "share of swaps"})
    print(f"{'all comparisons':60} {false:7.2%}   {'within' if false <= LIMIT else 'ABOVE'} {LIMIT:.0%}")
    print(f"MOVED under {moved.total()} labellings: {dict(moved)}")
    machine = f"{len(pairs)} pairs, {os.cpu_count()} CPUs"
    result = {"benchmark": "ladder-swaps", "date": datetime.date.today().isoformat(), "machine": machine, "rows": rows}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
