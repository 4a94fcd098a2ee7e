"""What a fleet costs its controller: CPU, wall time, tasks and bytes per host, over real hosts of the rig.

    python tests/bench/fleet.py provision [HOSTS]       a provision, and one that changes nothing; 10 hosts
    python tests/bench/fleet.py campaign [HOSTS...]     a whole campaign of two pairs over SSH; 1, 10 and 30 hosts
    python tests/bench/fleet.py runs                    one host with two pairs and with six: do the tasks grow?
    python tests/bench/fleet.py fit                     the growth, and from it 1,000 hosts on paper

Each prints its rows and keeps them in tests/bench/results/fleet.json beside those of the others. Driver, engine and
model are the tests' stand-ins, so that what is measured is the project's own work; the hosts share this machine with
the controller, which makes the wall time longer than on a fleet but not the controller's CPU time.
"""

import datetime
import functools
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "fleet"))

from campaigns import records  # noqa: E402
from playing import Playbooks, furnish_standin, recap, standin_variables  # noqa: E402
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


SIZES = (1, 10, 30)
FLEET = 1000
"""Hosts of the plan on paper."""
VENVS = ROOT / ".kvtrial" / "bench" / "fleet-venvs"
SWEEP_SECONDS = 20
SWEEP_TASK = "Ask the host program how far it is"
Row = dict[str, Any]


class Counted(Playbooks):
    """Playbooks that count results by task."""

    @property
    def counts_file(self) -> Path:
        """Where the counts of the last play are."""
        return self.fleet.folder / "counts.json"

    def environment(self) -> dict[str, str]:
        """As usual, with the callback that counts."""
        return {
            **super().environment(),
            "ANSIBLE_CALLBACK_PLUGINS": str(ROOT / "tests" / "bench" / "callback"),
            "ANSIBLE_CALLBACKS_ENABLED": "counting",
            "KVTRIAL_COUNTS": str(self.counts_file),
        }

    def counts(self) -> dict[str, int]:
        """Results by task of the last play."""
        found: dict[str, int] = json.loads(self.counts_file.read_text())
        return found


def provision(count: int) -> list[Row]:
    """Rows of a first provision and of one that changes nothing."""
    with tempfile.TemporaryDirectory() as name, a_fleet(count) as fleet:
        supplies = Supplies(Path(name) / "supplies")
        supplies.drivers(MID)
        url = fleet.serve(supplies.repository.folder, 8081)
        plays = Playbooks(fleet, supplies.variables(url, WHEELS, Path(name) / "cache"))
        for host in fleet.hosts:
            host.sh(HEADERS)
        first, again = measure(plays), measure(plays)
        supplies.repository.close()
    rows = []
    for subject, found in (("first provision", first), ("provision without a change", again)):
        subject = f"{subject}, {count} hosts"
        rows += [
            row(subject, "controller CPU per host", found["cpu"] / count, "seconds"),
            row(subject, "wall time of the fleet", found["wall"], "seconds"),
            row(subject, "tasks per host", found["tasks"], "tasks"),
            row(subject, "tasks skipped per host", found["skipped"], "tasks"),
            row(subject, "changes", found["changed"], "tasks"),
        ]
    if again["changed"]:
        raise Failed("the second provision changed something")
    if again["cpu"] / count > ALLOWED_CPU_SECONDS:
        raise Failed(f"{again['cpu'] / count:.2f} s of CPU a host without a change, {ALLOWED_CPU_SECONDS} are allowed")
    return rows


class Failed(Exception):
    """What was measured is not what must be."""


@functools.cache
def installed_venvs() -> Path:
    """The host program's environment as the project installs it on a host of the rig: made once a command, of the tree
    as it is now, then shown to all hosts."""
    shutil.rmtree(VENVS, ignore_errors=True)
    with a_fleet(1) as fleet:
        furnish_standin(fleet)
        Playbooks(fleet, standin_variables(WHEELS)).play("playbooks/provision.yml", fails=False, seconds=1200)
        VENVS.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(fleet.hosts[0].folder / "disk/up/var/lib/kvtrial/venvs", VENVS, symlinks=True)
    return VENVS


def campaign(count: int, pairs: int = 2, fetch: str = "summary") -> tuple[Row, dict[str, int]]:
    """One campaign over `count` hosts that are installed already: what it cost, and results by task."""
    variables = {
        **standin_variables(WHEELS),
        "kvtrial_pairs": pairs,
        "kvtrial_fetch": fetch,
        "kvtrial_sweep_first_seconds": SWEEP_SECONDS,
        "kvtrial_sweep_longest_seconds": SWEEP_SECONDS,
    }
    with a_fleet(count, binds=[f"{installed_venvs()}:/var/lib/kvtrial/venvs"]) as fleet:
        furnish_standin(fleet)
        plays = Counted(fleet, variables)
        # Accounts, units and the lock come with the first play, as on a fleet that is provisioned.
        plays.play(PROVISION, fails=False, seconds=1200)
        before, started = cpu_seconds(), time.monotonic()
        done = plays.play("experiment.yml", fails=False, seconds=2400)
        wall, cpu = time.monotonic() - started, cpu_seconds() - before
        found = records(plays.results)
        assert len(found) == count * pairs * 2, done.stdout[-3000:]
        spans = [span([r["times"] for (h, _), r in found.items() if h == host]) for host in {h for h, _ in found}]
        kept = sum(path.stat().st_size for path in plays.results.glob("latest/runs/*/*/*") if path.is_file())
        counts = plays.counts()
    hosts = {name: c for name, c in recap(done).items() if name != "localhost"}
    sweeps = sum(n for task, n in counts.items() if task.endswith(SWEEP_TASK)) / count
    tasks = sum(c["ok"] for c in hosts.values()) / count
    return {
        "cpu": cpu, "wall": wall, "beside": wall - max(spans), "tasks": tasks, "sweeps": sweeps,
        "other_tasks": tasks - 2 * sweeps, "bytes": kept / len(found), "load": os.getloadavg()[0],
    }, counts  # fmt: skip


def span(times: Sequence[Row]) -> float:
    """Seconds from the start of a host's first run to the end of its last."""
    return float(max(t["ended_monotonic_seconds"] for t in times) - min(t["started_monotonic_seconds"] for t in times))


def campaign_rows(subject: str, count: int, found: Row) -> list[Row]:
    """Rows of one campaign."""
    return [
        row(subject, "controller CPU", found["cpu"], "seconds"),
        row(subject, "controller CPU per host", found["cpu"] / count, "seconds"),
        row(subject, "wall time beside the runs of the slowest host", found["beside"], "seconds"),
        row(subject, "wall time beside the runs, per host", found["beside"] / count, "seconds"),
        row(subject, "wall time", found["wall"], "seconds"),
        row(subject, "tasks per host", found["tasks"], "tasks"),
        row(subject, "sweeps", found["sweeps"], "sweeps"),
        row(subject, "tasks per host without sweeps", found["other_tasks"], "tasks"),
        row(subject, "bytes on the controller per run", found["bytes"], "bytes"),
    ]


def fit(rows: Sequence[Row]) -> list[Row]:
    """CPU = once + per host × hosts, by least squares over the campaigns' rows; and what it says of FLEET hosts."""
    points = {}
    for found in rows:
        if found["subject"].startswith("campaign, ") and found["metric"] in ("controller CPU", "sweeps"):
            points.setdefault(int(found["subject"].split()[1]), {})[found["metric"]] = found["value"]
    sizes = sorted(points)
    if len(sizes) < 2:
        raise Failed("the fit needs campaigns of at least two sizes; run the part campaign first")
    cpu = [points[size]["controller CPU"] for size in sizes]
    mean_x, mean_y = sum(sizes) / len(sizes), sum(cpu) / len(cpu)
    spread = sum((size - mean_x) ** 2 for size in sizes)
    slope = sum((size - mean_x) * (y - mean_y) for size, y in zip(sizes, cpu, strict=True)) / spread
    once = mean_y - slope * mean_x
    worst = max(abs(once + slope * size - y) / y for size, y in zip(sizes, cpu, strict=True))
    subject = f"campaign, fitted over {', '.join(map(str, sizes))} hosts"
    paper = f"{FLEET} hosts on paper"
    return [
        row(subject, "controller CPU once", once, "seconds"),
        row(subject, "controller CPU per further host", slope, "seconds"),
        row(subject, "largest deviation from the line", 100 * worst, "percent"),
        row(paper, "controller CPU, one controller", once + slope * FLEET, "seconds"),
        row(paper, "the same, ten slices of 100: CPU of each", once + slope * FLEET / 10, "seconds"),
    ]


def row(subject: str, metric: str, value: float, unit: str) -> Row:
    """A row of the result."""
    return {"subject": subject, "metric": metric, "value": round(float(value), 2), "unit": unit}


def keep(rows: Sequence[Row], parts: str) -> None:
    """Print the rows, and write them into the result in place of those of the same subjects."""
    document = json.loads(RESULT.read_text()) if RESULT.exists() else {"rows": []}
    subjects = {found["subject"] for found in rows}
    document = {
        "benchmark": "fleet",
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, which the hosts share with the controller; load "
        f"{os.getloadavg()[1]:.1f} at the end of the last part ({parts})",
        "rows": [*(found for found in document["rows"] if found["subject"] not in subjects), *rows],
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(document, indent=2) + "\n")
    for found in rows:
        print(f"{found['subject']:<42} {found['metric']:<46} {found['value']:>12.2f} {found['unit']}", flush=True)


def main(arguments: list[str]) -> int:
    """Entry point."""
    part, *given = arguments or ["all"]
    sizes = [int(size) for size in given]
    try:
        fetch_host_wheels()
        if part in ("all", "provision"):
            keep(provision(sizes[0] if sizes and part == "provision" else 10), part)
        for size in (sizes or SIZES) if part in ("all", "campaign") else ():
            keep(campaign_rows(f"campaign, {size} hosts", size, campaign(size)[0]), part)
        if part in ("all", "runs"):
            few, many = campaign(1, pairs=2)[0], campaign(1, pairs=6)[0]
            for pairs, found in ((2, few), (6, many)):
                keep(campaign_rows(f"one host, {2 * pairs} runs", 1, found), part)
            if few["other_tasks"] != many["other_tasks"]:
                raise Failed(f"tasks grow with runs: {few['other_tasks']} for 4, {many['other_tasks']} for 12")
        if part in ("all", "fit", "campaign"):
            keep(fit(json.loads(RESULT.read_text())["rows"]), part)
    except CannotRig as error:
        print(f"bench-fleet needs real hosts: {error}", file=sys.stderr)
        return 1
    except Failed as error:
        print(f"bench-fleet: {error}", file=sys.stderr)
        return 1
    print(f"written to {RESULT.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
