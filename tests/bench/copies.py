"""A fleet's campaign made of a committed one: real records of one host, under the names of many.

Nothing of such a fleet was measured on it: every host is the same host again, and where the campaign has fewer pairs than
asked, its first ones stand again under later numbers. What a record weighs, its logs, scrapes and requests are real.
"""

import hashlib
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from kvtrial.analysis.stalls import with_stalls
from kvtrial.record.record import RunRecord

ROOT = Path(__file__).parents[2]
LABEL = "generated: one committed host under the names of many"


class Copies:
    """A campaign's folder of so many hosts with so many runs each, made of `docs/results/SOURCE/campaign.tar.xz`.

    `older`: the records as they were committed. Else with what this release writes into a record besides, so that it
    need not be found in the requests again.
    """

    def __init__(self, folder: Path, source: str, hosts: int, runs: int, *, older: bool = False) -> None:
        with tarfile.open(ROOT / "docs" / "results" / source / "campaign.tar.xz") as archive:
            archive.extractall(folder / "source", filter="data")
        (plan,) = (folder / "source").rglob("campaign.json")
        campaign = json.loads(plan.read_text())
        self.protocol: str = campaign["plan"]["protocol"]["name"]
        self.hosts = [f"host-{number:04}" for number in range(hosts)]
        self.directory = folder / "results" / campaign["campaign"]
        self.directory.mkdir(parents=True)
        (part,) = campaign["plan"]["hosts"]
        self._source = plan.parent / "runs" / part["host"]
        planned = _planned(part["runs"], runs)
        parts = [part | {"host": host, "runs": [run for _, run in planned]} for host in self.hosts]
        campaign["plan"]["hosts"] = parts
        campaign["provenance"] |= {"generated": LABEL}
        (self.directory / "campaign.json").write_bytes(msgspec.json.encode(campaign))
        self.record_bytes = 0
        self.requests = 0
        records = [(run, self._record(was, run, older)) for was, run in planned]
        for host_part in parts:
            digest = hashlib.sha256(msgspec.json.encode(host_part, order="sorted")).hexdigest()
            for run, record in records:
                self._write(host_part["host"], run["run"], record | {"host": host_part["host"], "plan_sha256": digest})

    def _record(self, was: str, run: dict[str, Any], older: bool) -> dict[str, Any]:
        """A run's record under its own name and pair; its files stay in the source's folder of run `was`."""
        text = (self._source / was / "record.json").read_bytes()
        if not older:
            text = msgspec.json.encode(with_stalls(msgspec.json.decode(text, type=RunRecord), self._source / was))
        record = msgspec.json.decode(text)
        self.requests = max(self.requests, sum(phase["sent"] for phase in record["phases"]))
        return {**record, **{name: run[name] for name in ("run", "pair", "position", "arm", "spare")}, "was": was}

    def _write(self, host: str, run: str, record: dict[str, Any]) -> None:
        folder = self.directory / "runs" / host / run
        folder.mkdir(parents=True)
        source = self._source / record.pop("was")
        for name in record["files"]:
            (folder / name).parent.mkdir(exist_ok=True)
            os.link(source / name, folder / name)
        text = msgspec.json.format(msgspec.json.encode(record), indent=1)
        (folder / "record.json").write_bytes(text)
        (folder / "record.sha256").write_text(f"{hashlib.sha256(text).hexdigest()}  record.json\n")
        self.record_bytes += len(text)


def _planned(runs: list[dict[str, Any]], wanted: int) -> list[tuple[str, dict[str, Any]]]:
    """So many runs, whole pairs as they were planned and then these again: the run copied, and the plan's line."""
    own = [run for run in runs if not run["spare"]]
    pairs = max(run["pair"] for run in own)
    return [(run["run"], _renamed(run, run["pair"] + pairs * again)) for again, run in _again(own, wanted)]


def _again(runs: list[dict[str, Any]], wanted: int) -> Iterator[tuple[int, dict[str, Any]]]:
    for number in range(wanted):
        yield divmod(number, len(runs))[0], runs[number % len(runs)]


def _renamed(run: dict[str, Any], pair: int) -> dict[str, Any]:
    return run | {"pair": pair, "run": f"p{pair:02}-{run['position'] + 1}-{run['arm']}"}
