"""What a provision that changes nothing costs the controller: CPU and tasks per host, over real hosts of the rig.

    python tests/bench/fleet.py [HOSTS]     prints a table and writes tests/bench/results/fleet.json

Driver, engine and model are the tests' stand-ins, so that what is measured is the project's own work; the hosts share
this machine with the controller, which makes the wall time longer than on a fleet but not the controller's CPU time.
"""

import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "fleet"))

from playing import Playbooks, recap  # noqa: E402
from rig import CannotRig, a_fleet  # noqa: E402
from supplies import MID, Supplies  # noqa: E402
from vendor import HEADERS  # noqa: E402

RESULT = Path(__file__).parent / "results" / "fleet.json"
PROVISION = "playbooks/provision.yml"
ALLOWED_CPU_SECONDS = 5.0
"""Of the controller, a host, for a provision that changes nothing."""
WHEELS = ROOT / ".kvtrial" / "host-wheels"


def fetch_host_wheels() -> None:
    """The host program's wheels, from where pip is configured to look."""
    lock = ROOT / "requirements" / "host.txt"
    command = ["python3.11", "-m", "pip", "download", "--quiet", "--require-hashes", "--no-deps"]
    subprocess.run([*command, "--only-binary=:all:", "-r", lock, "-d", WHEELS], check=True, capture_output=True)


def cpu_seconds() -> float:
    """CPU time of this process's ended children: Ansible, its workers and their ssh."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(plays: Playbooks) -> dict[str, float]:
    """One provision: CPU and wall seconds, tasks that ran and that were skipped by host, changes."""
    before, started = cpu_seconds(), time.monotonic()
    done = plays.play(PROVISION, fails=False, seconds=1200)
    wall, cpu = time.monotonic() - started, cpu_seconds() - before
    counts = {name: c for name, c in recap(done).items() if name != "localhost"}
    return {
        "cpu": cpu,
        "wall": wall,
        "tasks": sum(c["ok"] for c in counts.values()) / len(counts),
        "skipped": sum(c["skipped"] for c in counts.values()) / len(counts),
        "changed": sum(c["changed"] for c in counts.values()),
    }


def main() -> int:
    """Entry point."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    fetch_host_wheels()
    try:
        with tempfile.TemporaryDirectory() as name, a_fleet(count) as fleet:
            supplies = Supplies(Path(name) / "supplies")
            supplies.drivers(MID)
            url = fleet.serve(supplies.repository.folder, 8081)
            plays = Playbooks(fleet, supplies.variables(url, WHEELS, Path(name) / "cache"))
            for host in fleet.hosts:
                host.sh(HEADERS)
            first, again = measure(plays), measure(plays)
            supplies.repository.close()
    except CannotRig as error:
        print(f"bench-fleet needs real hosts: {error}", file=sys.stderr)
        return 1
    rows = []
    for subject, found in (("first provision", first), ("provision without a change", again)):
        rows += [
            {"subject": subject, "metric": "controller CPU per host", "value": found["cpu"] / count, "unit": "seconds"},
            {"subject": subject, "metric": "wall time of the fleet", "value": found["wall"], "unit": "seconds"},
            {"subject": subject, "metric": "tasks per host", "value": found["tasks"], "unit": "tasks"},
            {"subject": subject, "metric": "tasks skipped per host", "value": found["skipped"], "unit": "tasks"},
            {"subject": subject, "metric": "changes", "value": found["changed"], "unit": "tasks"},
        ]
    rows = [{**row, "value": round(float(row["value"]), 2)} for row in rows]
    machine = (
        f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[1]:.1f} at the end, {count} hosts on it"
    )
    document = {"benchmark": "fleet", "date": datetime.date.today().isoformat(), "machine": machine, "rows": rows}
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(document, indent=2) + "\n")
    for row in rows:
        print(f"{row['subject']:<28} {row['metric']:<26} {row['value']:>9.2f} {row['unit']}")
    print(f"{machine}; written to {RESULT.relative_to(ROOT)}")
    if again["changed"]:
        print("bench-fleet: the second provision changed something", file=sys.stderr)
    if again["cpu"] / count > ALLOWED_CPU_SECONDS:
        print(f"bench-fleet: more than {ALLOWED_CPU_SECONDS} s of CPU a host without a change", file=sys.stderr)
    return 1 if again["changed"] or again["cpu"] / count > ALLOWED_CPU_SECONDS else 0


if __name__ == "__main__":
    sys.exit(main())
