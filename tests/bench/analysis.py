"""Analysis at the size of a large fleet: 1,000 hosts × 16 runs × 2,000 requests, generated.

    make bench-analysis             all of it; writes results/analysis.json
    make bench-analysis STEP=end    one step of the four below; its rows take the place of those that are there
    make bench-analysis HOSTS=20    fewer hosts, not written

What is measured is in processes of its own whose peak memory the kernel counts. `summaries`:
- records → summaries (`kvtrial summarise`), host by host: a record as a host makes it, with its 2,000 requests listed.
  Each host's records are made by this program right before, and removed after (together they would take over 10 GB of
  disk), so the making is in nobody's figure;
- summaries → verdict (`kvtrial analyze --summaries`), from the command's start to verdict.json, no record being there.
`end`, every record being there, compressed as `kvtrial_fetch: summary` leaves it:
- the end of a night's campaign: verdict, summaries, summary.csv, report, brief and history;
- summaries → verdict as before, beside the records that they were made of;
- the same where every record looks other than it did, as after a copy, so that each is held against its digest;
- the campaign into another history (`kvtrial history --add`).
`merge`, plans alone, no record being there: ten campaigns of a tenth of the hosts each, put together into one (what
`kvtrial merge` does before the verdict over it).
`nights`: `kvtrial history` over a store of 14 nights, as it is asked each night. Its rows are made as the tests of the
history make theirs, with six pairs a host and night; on the last night one host is 40 % slower.

What is generated is offload_return with more prompts than it ships with, every gate satisfied, the hosts' effects
spread by 5 %, one of them off by 40 %.
"""

import argparse
import datetime
import hashlib
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pyarrow.parquet
import zstandard

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "analysis"), str(ROOT / "tests"), str(ROOT / "tests" / "unit" / "analysis"),
                str(ROOT / "tests" / "unit" / "history")]  # fmt: skip

import build  # noqa: E402
import history_build  # noqa: E402
from kvtrial.analysis.campaign import Campaign, HostState  # noqa: E402
from kvtrial.analysis.verdict import conclude  # noqa: E402
from kvtrial.record.plan import HostPlan, Limits, PhasePlan, Plan, PromptPlan, RunPlan  # noqa: E402
from kvtrial.record.record import PhaseRecord, RunRecord  # noqa: E402
from kvtrial.record.store import PACKED_RECORD, SUMMARY_ONLY  # noqa: E402
from msgspec.structs import replace  # noqa: E402

RESULT = Path(__file__).parent / "results" / "analysis.json"
PAIRS = 8
SIZES = {"targets": 100, "pressure": 200, "fits": 72, "misses": 993, "warmups": 8}
TIER_BYTES = 2**35
MADE = "20261114T010000Z"
NAME = f"offload_return-{MADE}"
ODD_HOST = 500
PARTS = 10
NIGHTS = 14
HOST = "host-0000"


def made_protocol(sizes: dict[str, int]) -> Any:
    """offload_return with so many prompts, and a tier that holds them."""
    shipped = msgspec.convert(msgspec.json.decode(msgspec.json.encode(build.protocol())), type=type(build.protocol()))
    return replace(shipped, sizes=shipped.sizes | sizes | {"tier_bytes": TIER_BYTES})


def records(scale: float) -> list[RunRecord]:
    """The runs of one host, whose offload arm is slower by `scale`."""
    return [_whole(record) for record in build.honest_records(PAIRS, "standin", HOST, 0, scale)]


def _whole(record: RunRecord) -> RunRecord:
    run = f"p{record.pair:02}-{record.position + 1}-{record.arm}"
    return replace(record, campaign=NAME, run=run, files={}, phases=[_listed(phase) for phase in record.phases])


def _listed(phase: PhaseRecord) -> PhaseRecord:
    """Times that differ from request to request, with the phase's numbers made of them."""
    generator = numpy.random.default_rng(len(phase.requests))
    spread = numpy.exp(0.02 * generator.standard_normal(len(phase.requests)))
    times = [round(float(request.ttft_seconds * by), 7) for request, by in zip(phase.requests, spread, strict=True)]
    facts = [
        replace(r, ttft_seconds=t, e2e_seconds=round(t + 0.1, 7)) for r, t in zip(phase.requests, times, strict=True)
    ]
    return replace(phase, requests=facts, ttft_median_seconds=statistics.median(times))


def plan_of(host: str, made: list[RunRecord], protocol: Any) -> HostPlan:
    """The host's part of the plan, each phase with its prompts' indices."""
    first = made[0]
    runs = [RunPlan(r.run, r.pair, r.position, r.arm, False, [_phase_plan(phase) for phase in r.phases]) for r in made]
    return HostPlan(
        schema_version="1.0", protocol=protocol.name, host=host, seed=1, backend="cpu", vllm_version="0.32.0",
        model=first.model, capacity=first.capacity, launches={r.arm: r.launch for r in made}, runs=runs,
        replacement_pairs=2, limits=Limits(3600, 60, 60, 60, 60, 60, 1800, 900, 0, 0, 0),
        if_controller_gone="continue",
    )  # fmt: skip


def _phase_plan(phase: PhaseRecord) -> PhasePlan:
    indices = [int(request.key.rpartition("/")[2]) for request in phase.requests]
    prompts = PromptPlan(phase.name, "s", len(indices), build.PROMPT_TOKENS, 0, 32, 126)
    return PhasePlan(phase.name, phase.block, prompts, indices, phase.block, 1, 1, None)


class Fleet:
    """A campaign's folder whose hosts are copies of a few, made one at a time. `sizes`: prompts, enough for 2,000
    requests a run; none: as offload_return ships.
    """

    def __init__(self, directory: Path, hosts: int, sizes: dict[str, int] | None = None) -> None:
        self.directory = directory
        self.hosts = [f"host-{number:04}" for number in range(hosts)]
        protocol = made_protocol(SIZES if sizes is None else sizes)
        if hasattr(build.protocol, "cache_clear"):
            build.protocol.cache_clear()
        build.protocol = lambda: protocol  # type: ignore[assignment]
        build.TIER_BYTES = TIER_BYTES
        scales = [float(numpy.exp(0.05 * (k - 4.5) / 2.87)) for k in range(10)]
        kinds = [records(scale) for scale in [*scales, 1.4]]
        self._bytes = [[(r.run, msgspec.json.encode(r)) for r in made] for made in kinds]
        self.requests = sum(phase.sent for phase in kinds[0][0].phases)
        part = plan_of(HOST, kinds[0], protocol)
        parts = [replace(part, host=host) for host in self.hosts]
        directory.mkdir()
        campaign = Campaign(
            "1.0", NAME, Plan("1.0", protocol, 1, [], {}), "generated", {}, {"created_at_utc": MADE}, None
        )
        raw = msgspec.json.encode(campaign).replace(
            b'"hosts":[]', b'"hosts":[' + b",".join(map(msgspec.json.encode, parts)) + b"]", 1
        )
        (directory / "campaign.json").write_bytes(raw)
        (directory / "hosts").mkdir()
        self._digests = {p.host: hashlib.sha256(msgspec.json.encode(p, order="sorted")).hexdigest() for p in parts}
        self.plan_bytes = len(raw)

    def _texts(self, number: int) -> Iterator[tuple[Path, bytes]]:
        """A host's records, each with its folder, which has its digest by then."""
        host = self.hosts[number]
        kind = 10 if number == ODD_HOST else number % 10
        for run, raw in self._bytes[kind]:
            folder = self.directory / "runs" / host / run
            folder.mkdir(parents=True)
            own = raw.replace(f'"host":"{HOST}"'.encode(), f'"host":"{host}"'.encode(), 1)
            own = own.replace(build._sha("plan").encode(), self._digests[host].encode(), 1)
            (folder / "record.sha256").write_text(f"{hashlib.sha256(own).hexdigest()}  record.json\n")
            yield folder, own

    def make(self, number: int) -> int:
        """Write a host's records; their bytes."""
        return sum((folder / "record.json").write_bytes(own) for folder, own in self._texts(number))

    def pack(self, number: int) -> int:
        """Write a host's records as `kvtrial_fetch: summary` leaves them, quickly rather than small; their bytes."""
        total = 0
        for folder, own in self._texts(number):
            total += (folder / PACKED_RECORD).write_bytes(zstandard.ZstdCompressor(level=1).compress(own))
            (folder / SUMMARY_ONLY).touch()
        state = HostState(host=self.hosts[number], state="finished", reason="")
        (self.directory / "hosts" / f"{self.hosts[number]}.json").write_bytes(msgspec.json.encode(state))
        return total

    def remove(self, number: int) -> None:
        shutil.rmtree(self.directory / "runs" / self.hosts[number])


PEAK = """
def peak():
    # VmHWM begins anew with a program; what getrusage says is handed down from the one that started it.
    return next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
"""
SUMMARISE = (
    PEAK
    + """
import sys, time
from pathlib import Path
from kvtrial.analysis.summaries import Outline, summarise_host
outline, seconds = Outline(Path(sys.argv[1])), 0.0
for line in sys.stdin:
    started = time.process_time()
    summarise_host(outline, line.strip())
    seconds += time.process_time() - started
    print("done", flush=True)
print(seconds, peak(), flush=True)
"""
)
TIMED = (
    PEAK
    + """
import pathlib, sys, time
started = time.monotonic()
from kvtrial.analysis.{module} import {name} as run
done = run({arguments})
status = done["exit_status"] if isinstance(done, dict) else done if isinstance(done, int) else 0
print(status, time.monotonic() - started, time.process_time(), peak())
"""
)
Rows = list[dict[str, Any]]


def timed(subject: str, arguments: str, module: str = "cli", name: str = "main") -> Rows:
    """Wall time, CPU and peak memory of a call, as rows."""
    command = [sys.executable, "-c", TIMED.format(module=module, name=name, arguments=arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "analysis"), "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout
    status, wall, cpu, memory = answer.splitlines()[-1].split()
    print(f"{subject}: {answer.splitlines()[0]} (status {status})", flush=True)
    return [
        row(subject, "wall time", float(wall), "seconds"),
        row(subject, "CPU time", float(cpu), "seconds"),
        row(subject, "peak memory", float(memory) / 2**20, "GiB"),
    ]


def row(subject: str, metric: str, value: float, unit: str) -> dict[str, Any]:
    """A row of the table."""
    return {"subject": subject, "metric": metric, "value": round(value, 3), "unit": unit}


def verdict_rows(fleet: Fleet, subject: str) -> Rows:
    """What the verdict that was written says of the hosts; one of them is odd."""
    hosts = json.loads((fleet.directory / "verdict.json").read_text())["hosts"]
    return [
        row(subject, "hosts that count", sum(host["verdict"] != "INVALID" for host in hosts), "hosts"),
        row(subject, "hosts called odd (one is)", sum(bool(host["odd"]) for host in hosts), "hosts"),
    ]


def measure_summaries(fleet: Fleet) -> Rows:
    """Records to summaries, and these to a verdict."""
    hosts = len(fleet.hosts)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "analysis"), "OMP_NUM_THREADS": "1"}
    worker = subprocess.Popen(
        [sys.executable, "-c", SUMMARISE, str(fleet.directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env=environment,
    )  # fmt: skip
    assert worker.stdin and worker.stdout
    raw_bytes = 0
    for number in range(hosts):
        raw_bytes += fleet.make(number)
        worker.stdin.write(fleet.hosts[number] + "\n")
        worker.stdin.flush()
        if worker.stdout.readline().strip() != "done":
            raise SystemExit(f"summarising {fleet.hosts[number]} failed")
        fleet.remove(number)
    worker.stdin.close()
    seconds, peak = map(float, worker.stdout.read().split())
    worker.wait()
    kept = sum(path.stat().st_size for path in (fleet.directory / "summaries").iterdir())
    runs = hosts * 2 * PAIRS
    return [
        row("size", "hosts", hosts, "hosts"),
        row("size", "runs per host", 2 * PAIRS, "runs"),
        row("size", "requests per run", fleet.requests, "requests"),
        row("size", "records of a run", raw_bytes / runs / 1024, "KiB"),
        row("size", "records together", raw_bytes / 2**30, "GiB"),
        row("size", "campaign.json", fleet.plan_bytes / 2**20, "MiB"),
        row("records to summaries", "peak memory", peak / 2**20, "GiB"),
        row("records to summaries", "CPU per run", 1000 * seconds / runs, "milliseconds"),
        row("records to summaries", "CPU together", seconds, "seconds"),
        row("records to summaries", "summary per run", kept / runs / 1024, "KiB"),
        *timed("summaries to verdict", repr(["analyze", str(fleet.directory), "--summaries"])),
        *verdict_rows(fleet, "summaries to verdict"),
    ]


def measure_end(fleet: Fleet) -> Rows:
    """The end of a night's campaign, and what is asked of it afterwards, with its records there."""
    packed_bytes = sum(map(fleet.pack, range(len(fleet.hosts))))
    rows = [row("end of a night", "records, compressed", packed_bytes / 2**30, "GiB")]
    directory = str(fleet.directory)
    rows += timed("end of a night", f"{directory!r}, summaries=True", "campaign", "conclude")
    verdict = (fleet.directory / "verdict.json").read_text()
    summaries = repr(["analyze", directory, "--summaries"])
    for subject in ("summaries to verdict, records there", "summaries to verdict, records copied"):
        rows += timed(subject, summaries)
        if (fleet.directory / "verdict.json").read_text() != verdict:
            raise SystemExit("the end of the campaign and its summaries differ in their verdict")
        if subject.endswith("there"):
            rows += timed("into another history", repr(["history", f"{directory}-store", "--add", directory]))
            for path in fleet.directory.glob("runs/*/*/*"):
                path.touch()
    return rows


def measure_merge(fleet: Fleet) -> Rows:
    """Parts of the campaign, as so many controllers leave them, into one."""
    whole = json.loads((fleet.directory / "campaign.json").read_bytes())
    hosts = whole["plan"]["hosts"]
    parts = [fleet.directory.with_name(f"{NAME}-{number}") for number in range(PARTS)]
    written = 0
    for number, part in enumerate(parts):
        own = hosts[number::PARTS]
        (part / "plans").mkdir(parents=True)
        for host in own:
            (part / "plans" / f"{host['host']}.json").write_bytes(msgspec.json.encode(host, order="sorted"))
        plan = {**whole["plan"], "hosts": own}
        text = msgspec.json.format(msgspec.json.encode({**whole, "campaign": part.name, "plan": plan}), indent=1)
        written += (part / "campaign.json").write_bytes(text)
    del whole, hosts
    subject = f"merge of {PARTS} parts"
    into = fleet.directory.with_name("all")
    paths = ", ".join(f"pathlib.Path({str(path)!r})" for path in parts)
    rows = timed(subject, f"[{paths}], pathlib.Path({str(into)!r})", "slices", "merge")
    merged = len(json.loads((into / "campaign.json").read_bytes())["plan"]["hosts"])
    return [
        row(subject, "campaign.json of the parts", written / 2**20, "MiB"),
        *rows,
        row(subject, "hosts in the plan that was made", merged, "hosts"),
    ]


def measure_nights(fleet: Fleet) -> Rows:
    """A look at a store of many nights."""
    store, textfile = fleet.directory.with_name("history"), fleet.directory.with_name("history.prom")
    odd = fleet.hosts[min(ODD_HOST, len(fleet.hosts) - 1)]
    [template] = conclude(build.protocol(), {HOST: build.honest_records(host=HOST)}, NAME).hosts
    history_build.HOSTS = tuple(fleet.hosts)  # type: ignore[assignment]
    history_build._TEMPLATE.update({host: replace(template, host=host) for host in fleet.hosts})
    slower = history_build.plant(odd, history_build.night(NIGHTS - 1), control=1.4, driver="580.159")
    history_build.store_of(store, slower, nights=NIGHTS)
    files = list(store.rglob("*.parquet"))
    subject = f"look at {NIGHTS} nights"
    rows = timed(subject, repr(["history", str(store), "--textfile", str(textfile)]))
    alarms = re.findall(r"^kvtrial_history_alarms\{.*\} [1-9]", textfile.read_text(), re.MULTILINE)
    return [
        row(subject, "rows in the store", sum(pyarrow.parquet.read_metadata(file).num_rows for file in files), "rows"),
        row(subject, "store", sum(file.stat().st_size for file in files) / 2**20, "MiB"),
        *rows,
        row(subject, "hosts with an alarm (one is slower)", len(alarms), "hosts"),
    ]


STEPS = {"summaries": measure_summaries, "end": measure_end, "merge": measure_merge, "nights": measure_nights}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("hosts", type=int, nargs="?", default=1000)
    options.add_argument("--step", choices=STEPS, action="append", help="this step alone")
    asked = options.parse_args()
    started = time.monotonic()
    rows = []
    for name in asked.step or STEPS:
        with tempfile.TemporaryDirectory(prefix="kvtrial-bench-") as folder:
            rows += STEPS[name](Fleet(Path(folder) / NAME, asked.hosts))
    for each in rows:
        print(f"{each['subject']:36} {each['metric']:28} {each['value']:12g} {each['unit']}")
    print(f"took {time.monotonic() - started:.0f} s, making records included")
    if asked.hosts == 1000:
        write(rows)
    return 0


def write(rows: Rows) -> None:
    """Write the table; rows of a step that was not run stay, with the date and the machine of their own."""
    measured = {each["subject"] for each in rows}
    before = json.loads(RESULT.read_text())["rows"] if RESULT.is_file() else []
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    machine = f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f} at the end"
    stay = [each for each in before if each["subject"] not in measured]
    table = {"benchmark": "analysis", "rows": [*stay, *({**each, "date": date, "machine": machine} for each in rows)]}
    RESULT.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
