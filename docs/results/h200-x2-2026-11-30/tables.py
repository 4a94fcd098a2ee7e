"""The tables of these pages, from records and verdict alone: python tables.py FOLDER (offload, ladder or ladder-tp2).

FOLDER holds verdict.json and runs/*/*/record.json. Times of a level or phase are medians over runs of the run's own
value. Standard library only.
"""

import json
import sys
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

GIB = 2**30
Record = dict[str, Any]


def risen(phase: Record, role: str) -> float | None:
    """What a counter rose by in a phase; None where it is not exported."""
    before, after = phase["before"].get(role), phase["after"].get(role)
    return None if before is None or after is None else after - before


def row(*cells: object) -> None:
    """A line of a table."""
    print("|", " | ".join(str(cell) for cell in cells), "|")


def head(*cells: str) -> None:
    """The first two lines of a table."""
    row(*cells)
    row(*("---" for _ in cells))


def times(records: list[Record]) -> None:
    """How long each run took."""
    head("run", "start s", "phases s", "stop s", "other s")
    for record in records:
        spent = record["times"]
        parts = (spent[f"{name}_seconds"] for name in ("start", "phases", "stop", "other"))
        row(record["run"], *(f"{part:.1f}" for part in parts))


def memory(records: list[Record]) -> None:
    """RAM and VRAM at their peaks."""
    head(
        "run", "RAM used, GiB", "Shmem, GiB", "engine's processes, GiB", "largest of them, GiB", "VRAM of each GPU, GiB"
    )
    for record in records:
        seen = record["samples"]
        row(
            record["run"],
            *(f"{seen[name] / GIB:.2f}" for name in ("ram_used_peak_bytes", "shared_memory_peak_bytes")),
            f"{seen['engine_rss_peak_bytes'] / GIB:.2f}",
            ", ".join(f"{value / GIB:.2f}" for value in seen["rss_peak_by_process_bytes"][:4]),
            ", ".join(f"{value / GIB:.2f}" for value in seen["vram_used_peak_by_gpu_bytes"]),
        )


def phases(records: list[Record]) -> None:
    """Medians of the phases by arm, and what was loaded and stored in them."""
    head(
        "phase",
        "arm",
        "first token, ms: median (least to most of runs)",
        "tokens from the tier",
        "bytes loaded",
        "stored",
    )
    names = [phase["name"] for phase in records[0]["phases"]]
    for name in names:
        for arm, group in groupby(sorted(records, key=lambda record: record["arm"]), key=lambda record: record["arm"]):
            found = [phase for record in group for phase in record["phases"] if phase["name"] == name]
            ttft = [phase["ttft_median_seconds"] * 1e3 for phase in found]
            counts = [
                sorted({risen(phase, role) for phase in found}, key=lambda value: value or 0)
                for role in ("prompt_tokens_external", "load_bytes", "store_bytes")
            ]
            said = [
                " or ".join("absent" if value is None else f"{value:,.0f}" for value in values) for values in counts
            ]
            row(name, arm, f"{median(ttft):.1f} ({min(ttft):.1f} to {max(ttft):.1f})", *said)


def ladder(verdict: Record) -> None:
    """Every level of every arm."""
    head(
        "arm", "in flight", "preemptions in pairs 1 to 6", "first token, ms", "whole request, s", "longest gap, ms",
        "stall, ms", "queue, ms", "tok/s", "GPU-seconds a request",
    )  # fmt: skip
    for arm in verdict["ladder"]["arms"]:
        for level in arm["levels"]:
            row(
                arm["arm"],
                level["concurrency"],
                ", ".join(map(str, level["preemptions_by_run"])),
                f"{level['ttft_median_seconds'] * 1e3:.0f} / {level['ttft_p95_seconds'] * 1e3:.0f}",
                f"{level['e2e_median_seconds']:.3f} / {level['e2e_p95_seconds']:.3f}",
                f"{level['longest_gap_p95_seconds'] * 1e3:.0f}",
                f"{level['stall_seconds_per_request'] * 1e3:.1f}",
                f"{level['queue_seconds_per_request'] * 1e3:.1f}",
                f"{level['output_tokens_per_second']:,.0f}",
                f"{level['gpu_seconds_per_request']:.4f}",
            )


def comparisons(verdict: Record) -> None:
    """Every comparison as the tool has it."""
    head("arm", "phase", "metric", "role", "effect", "interval", "p", "verdict")
    for item in verdict["comparisons"]:
        digits = [
            None if item[name] is None else f"{item[name]:.4g}" for name in ("effect", "ci_low", "ci_high", "p_value")
        ]
        sign = "×" if item["effect_scale"] == "ratio" else ""
        row(
            item["arm"], item["phase"], item["metric"], item["role"], f"{sign}{digits[0]}", f"{digits[1]} to {digits[2]}",
            digits[3], item["verdict"] + (" (MOVED)" if item.get("moved") else ""),
        )  # fmt: skip


def gates(verdict: Record) -> None:
    """Every gate with its sentence."""
    head("gate", "", "detail")
    said = {True: "passed", False: "failed", None: "undecided"}
    for gate in verdict["hosts"][0]["gates"]:
        row(gate["gate"], said[gate["passed"]], gate["detail"])


def main(folder: Path) -> None:
    """Print every table of a campaign."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("runs/*/*/record.json"))]
    verdict = json.loads((folder / "verdict.json").read_text())
    print(verdict["verdict"], verdict["reason"], verdict["recommendation"], sep="\n", end="\n\n")
    tables = [lambda: ladder(verdict)] if verdict.get("ladder") else [lambda: phases(records)]
    for table in (
        *tables,
        lambda: comparisons(verdict),
        lambda: memory(records),
        lambda: gates(verdict),
        lambda: times(records),
    ):
        table()
        print()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
