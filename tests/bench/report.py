"""What a report of a large fleet takes: `python -m bench.report [HOSTS]`, 100 hosts by default, with 16 runs each.

Nothing of what is judged was measured on such a fleet. `offload_return, light` is generated whole (bench.analysis):
every gate satisfied, no file beside a record. The others are committed campaigns of one GPU host under many names
(bench.copies), with the records' real weight and the scrapes, logs and requests beside them, each held against its
digest: offload_return, offload_lengths, a ladder of four arms as this release records it, and the same as an older
release did, whose waits are found in the requests again.

All lies on disk as hosts leave it. Timed are, each in a process of its own from its imports to its end, the verdict
(every record read, held with its files against their digests, and judged, a host at a time), and `kvtrial report`,
which does the same and builds report.html, brief.md, summary.csv and summary.parquet, in both languages. What it takes
to build the report is the difference. Beside the wall clock stands the CPU time, since
this machine may be busy. Fails where building a report, in either language and by either clock, takes more than the
bound, or a page is too large. Prints a table and writes results/report.json (of 100 hosts, all subjects).
"""

import argparse
import datetime
import json
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.analysis import NAME, PAIRS, Fleet, Rows, timed
from bench.copies import Copies

RESULTS = Path(__file__).parent / "results" / "report.json"
BOUND_SECONDS = 10.0
LARGEST_BYTES = 5_000_000
HOSTS = 100
LANGUAGES = ("en", "ru")
CLOCKS = ("wall time", "CPU time")
Found = dict[str, tuple[float, str]]


def light(folder: Path, hosts: int) -> tuple[Path, int, int]:
    """The campaign's folder, requests of a run, bytes of all records."""
    fleet = Fleet(folder / NAME, hosts, sizes={})
    return fleet.directory, fleet.requests, sum(map(fleet.make, range(hosts)))


def copied(source: str, *, older: bool = False) -> Callable[[Path, int], tuple[Path, int, int]]:
    def made(folder: Path, hosts: int) -> tuple[Path, int, int]:
        fleet = Copies(folder, source, hosts, 2 * PAIRS, older=older)
        return fleet.directory, fleet.requests, fleet.record_bytes

    return made


SUBJECTS = {
    "offload_return, light": light,
    "offload_return": copied("h200-x2-2026-11-30/offload"),
    "offload_lengths": copied("h200-2026-11-29/offload-8b"),
    "preemption_ladder": copied("h200-2026-11-29/ladder"),
    "preemption_ladder, older": copied("h200-2026-11-29/ladder", older=True),
}


def measure(subject: str, hosts: int, folder: Path) -> Found:
    """Metric → value and unit."""
    directory, requests, record_bytes = SUBJECTS[subject](folder, hosts)
    runs = hosts * 2 * PAIRS
    found: Found = {
        "records": (runs, "records"),
        "requests per run": (requests, "requests"),
        "records of a run": (record_bytes / runs / 1024, "KiB"),
        "records together": (record_bytes / 2**20, "MiB"),
    }
    judging = _by_metric(timed(f"{subject}, judging", f"pathlib.Path({str(directory)!r})", "campaign", "analyze"))
    found |= {f"judging, {metric}": took for metric, took in judging.items()}
    for language in LANGUAGES:
        arguments = repr(["report", str(directory), "--lang", language])
        whole = _by_metric(timed(f"{subject}, {language}", arguments))
        found |= {f"report {language}, {metric}": took for metric, took in whole.items()}
        for clock in CLOCKS:
            found[f"built {language}, {clock}"] = (whole[clock][0] - judging[clock][0], "seconds")
        found[f"report.html {language}"] = ((directory / "report.html").stat().st_size, "bytes")
    return found


def _by_metric(rows: Rows) -> Found:
    return {row["metric"]: (row["value"], row["unit"]) for row in rows}


def held(found: Found) -> bool:
    """Whether both reports are within the bounds."""
    seconds = [found[f"built {language}, {clock}"][0] for language in LANGUAGES for clock in CLOCKS]
    sizes = [found[f"report.html {language}"][0] for language in LANGUAGES]
    return max(seconds) <= BOUND_SECONDS and max(sizes) < LARGEST_BYTES


def main() -> int:
    """Measure, print, write, and hold it against the bound."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("hosts", type=int, nargs="?", default=HOSTS)
    options.add_argument("--subject", choices=SUBJECTS, action="append", help="this one alone; then nothing is written")
    asked = options.parse_args()
    rows: list[dict[str, Any]] = []
    outcomes: dict[str, bool] = {}
    for subject in asked.subject or SUBJECTS:
        with tempfile.TemporaryDirectory(prefix="kvtrial-bench-") as folder:
            found = measure(subject, asked.hosts, Path(folder))
        name = f"{subject}: {asked.hosts} hosts x {2 * PAIRS} runs"
        rows += [
            {"subject": name, "metric": metric, "value": round(value, 3), "unit": unit}
            for metric, (value, unit) in found.items()
        ]
        outcomes[name] = held(found)
    for row in rows:
        print(f"{row['subject']:<48} {row['metric']:<24} {row['value']:>14,.3f} {row['unit']}")
    if asked.hosts == HOSTS and not asked.subject:
        machine = f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
        machine += f", load {os.getloadavg()[0]:.1f} at the end"
        answer = {"benchmark": "report", "date": datetime.date.today().isoformat(), "machine": machine, "rows": rows}
        RESULTS.write_text(json.dumps(answer, indent=1) + "\n")
    for name, within in outcomes.items():
        print(f"{name}: building is {'within' if within else 'ABOVE'} {BOUND_SECONDS:g} s and {LARGEST_BYTES:,} bytes")
    return 0 if all(outcomes.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
