"""What a report of a large fleet takes to build: `python -m bench.report [HOSTS] [RUNS_A_HOST]`, 100 and 16 by default.

The records are synthetic (tests/unit/report/report_builder.py); nothing of them was measured. What is timed is what a
campaign's end does for its pages: report.html in both languages and brief.md, from records and verdict in memory, in a
fresh process, its imports counted apart, and beside the wall clock the CPU time, since this machine may be busy. Fails
where report and brief take more than the bound by the wall clock, or imports and all more than it of CPU time. Prints a
table and writes results/report.json.
"""

import datetime
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results" / "report.json"
BOUND_SECONDS = 10.0
LARGEST_BYTES = 5_000_000


def measure(hosts: int, runs: int) -> dict[str, float]:
    """Seconds and bytes of one build, in this process."""
    sys.path[:0] = [str(ROOT / "tests" / "unit" / "report"), str(ROOT / "tests")]
    import msgspec
    import report_builder as build

    started, cpu = time.perf_counter(), time.process_time()
    from kvtrial.analysis.report import build_brief, build_report
    from kvtrial.analysis.summary import to_frame

    imported, cpu_imports = time.perf_counter(), time.process_time() - cpu
    names = [f"gpu{number:03d}" for number in range(hosts)]
    records = [record for name in names for record in build.records(name, pairs=runs // 2)]
    verdicts = []
    for number, name in enumerate(names):
        arm = [value * (1 + number / 1000) for value in build.OFFLOAD]
        item = build.comparison(arm_values=arm, effect=0.15 * (1 + number / 1000))
        verdicts.append(build.host_verdict(name, comparisons=[item, *build.comparisons()[1:]]))
    verdict = build.verdict(hosts=verdicts)
    protocol, frame = build.protocol(), to_frame(records)
    found: dict[str, float] = {
        "import_seconds": imported - started,
        "import_cpu_seconds": cpu_imports,
        "records": len(records),
    }
    for language in ("en", "ru"):
        begun, cpu = time.perf_counter(), time.process_time()
        page = build_report(verdict, protocol, records, build.CAMPAIGN, frame, language=language)
        found[f"report_{language}_seconds"] = time.perf_counter() - begun
        found[f"report_{language}_cpu_seconds"] = time.process_time() - cpu
        found[f"report_{language}_bytes"] = len(page.encode())
    begun = time.perf_counter()
    build_brief(verdict, protocol, records)
    found["brief_seconds"] = time.perf_counter() - begun
    begun = time.perf_counter()
    build_report(msgspec.structs.replace(verdict, hosts=verdicts[:1]), protocol, build.records(), {}, None)
    found["report_of_one_host_seconds"] = time.perf_counter() - begun
    return found


def main() -> int:
    """Measure in a process of its own, print, write, and hold it against the bound."""
    if sys.argv[1:2] == ["--inside"]:
        print(json.dumps(measure(int(sys.argv[2]), int(sys.argv[3]))))
        return 0
    hosts, runs = (int(given) for given in [*sys.argv[1:3], *["100", "16"][len(sys.argv) - 1 :]])
    command = [sys.executable, "-m", "bench.report", "--inside", str(hosts), str(runs)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT / "tests").stdout)
    wall = found["report_en_seconds"] + found["brief_seconds"]
    cpu = found["import_cpu_seconds"] + found["report_en_cpu_seconds"] + found["brief_seconds"]
    subject = f"{hosts} hosts x {runs} runs"
    rows = [
        {"subject": subject, "metric": name, "value": round(value, 3), "unit": name.rpartition("_")[2]}
        for name, value in {
            **found,
            "report_and_brief_seconds": wall,
            "imports_report_and_brief_cpu_seconds": cpu,
        }.items()
    ]
    for row in rows:
        print(f"{row['subject']:<22} {row['metric']:<34} {row['value']:>12,.3f} {row['unit']}")
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    machine += f", load {os.getloadavg()[0]:.1f}"
    answer = {"benchmark": "report", "date": datetime.date.today().isoformat(), "machine": machine, "rows": rows}
    RESULTS.write_text(json.dumps(answer, indent=1) + "\n")
    held = max(wall, cpu) <= BOUND_SECONDS and max(found["report_en_bytes"], found["report_ru_bytes"]) < LARGEST_BYTES
    print(f"{'within' if held else 'ABOVE'} {BOUND_SECONDS:g} s and {LARGEST_BYTES:,} bytes")
    return 0 if held else 1


if __name__ == "__main__":
    raise SystemExit(main())
