"""What a report of a large fleet takes: `python -m bench.report [HOSTS]`, 100 hosts by default, with 16 runs each.

The records are generated (bench.analysis): offload_return as it ships, every gate satisfied; nothing of them was
measured. They lie on disk as hosts leave them, and what is timed is `kvtrial report`, in a process of its own, from its
imports to its last file: every record read, held against its digest and judged, a host at a time, then verdict.json,
summary.csv, summary.parquet, report.html and brief.md; in both languages. Beside the wall clock stands the CPU time,
since this machine may be busy. Fails where the English report takes more than the bound of either, or a page is too
large. Prints a table and writes results/report.json (of 100 hosts alone).
"""

import datetime
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.analysis import NAME, PAIRS, Fleet, timed

RESULTS = Path(__file__).parent / "results" / "report.json"
BOUND_SECONDS = 10.0
LARGEST_BYTES = 5_000_000
HOSTS = 100


def measure(hosts: int, folder: Path) -> dict[str, tuple[float, str]]:
    """Metric → value and unit."""
    fleet = Fleet(folder / NAME, hosts, sizes={})
    records_bytes = sum(map(fleet.make, range(hosts)))
    runs = hosts * 2 * PAIRS
    found: dict[str, tuple[float, str]] = {
        "records": (runs, "records"),
        "requests per run": (fleet.requests, "requests"),
        "records of a run": (records_bytes / runs / 1024, "KiB"),
        "records together": (records_bytes / 2**20, "MiB"),
    }
    for language in ("en", "ru"):
        took = timed(f"report {language}", repr(["report", str(fleet.directory), "--lang", language]))
        found |= {f"report {language}, {row['metric']}": (row["value"], row["unit"]) for row in took}
        found[f"report.html {language}"] = ((fleet.directory / "report.html").stat().st_size, "bytes")
    return found


def main() -> int:
    """Measure, print, write, and hold it against the bound."""
    hosts = int(sys.argv[1]) if len(sys.argv) > 1 else HOSTS
    with tempfile.TemporaryDirectory(prefix="kvtrial-bench-") as folder:
        found = measure(hosts, Path(folder))
    subject = f"{hosts} hosts x {2 * PAIRS} runs"
    rows: list[dict[str, Any]] = [
        {"subject": subject, "metric": name, "value": round(value, 3), "unit": unit}
        for name, (value, unit) in found.items()
    ]
    for row in rows:
        print(f"{row['subject']:<22} {row['metric']:<28} {row['value']:>14,.3f} {row['unit']}")
    if hosts == HOSTS:
        machine = f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
        machine += f", load {os.getloadavg()[0]:.1f} at the end"
        answer = {"benchmark": "report", "date": datetime.date.today().isoformat(), "machine": machine, "rows": rows}
        RESULTS.write_text(json.dumps(answer, indent=1) + "\n")
    seconds = max(found["report en, wall time"][0], found["report en, CPU time"][0])
    held = seconds <= BOUND_SECONDS and max(found[f"report.html {lang}"][0] for lang in ("en", "ru")) < LARGEST_BYTES
    print(f"{'within' if held else 'ABOVE'} {BOUND_SECONDS:g} s and {LARGEST_BYTES:,} bytes")
    return 0 if held else 1


if __name__ == "__main__":
    raise SystemExit(main())
