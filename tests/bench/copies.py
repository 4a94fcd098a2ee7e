"""A fleet's campaign made of a committed one: real records of one host, under the names of many.

Nothing of such a fleet was measured on it: every host is the same host again. Where the campaign has fewer pairs than
asked, its first ones stand again under later numbers, told apart by the name of their prompts and the start of their
server, so that the gates take them for pairs. What a record weighs, its logs, scrapes and requests are real.
"""

import hashlib
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import msgspec
from kvtrial.analysis.gates.counts import START_TIME
from kvtrial.analysis.stalls import with_stalls
from kvtrial.record.record import RunRecord

ROOT = Path(__file__).parents[2]
LABEL = "generated: one committed host under the names of many"
Fields = dict[str, Any]


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
        self.hosts = [f"host-{number:04}" for number in range(hosts)]
        self.directory = folder / "results" / campaign["campaign"]
        self.directory.mkdir(parents=True)
        (part,) = campaign["plan"]["hosts"]
        self._source = plan.parent / "runs" / part["host"]
        planned = _planned(part["runs"], runs)
        parts = [part | {"host": host, "runs": [run for _, _, run in planned]} for host in self.hosts]
        campaign["plan"]["hosts"] = parts
        campaign["provenance"] |= {"generated": LABEL}
        (self.directory / "campaign.json").write_bytes(msgspec.json.encode(campaign))
        self.record_bytes = self.requests = 0
        records = [(was, self._record(was, again, run, older)) for was, again, run in planned]
        for host_part in parts:
            digest = hashlib.sha256(msgspec.json.encode(host_part, order="sorted")).hexdigest()
            for was, record in records:
                self._write(self._source / was, record | {"host": host_part["host"], "plan_sha256": digest})

    def _record(self, was: str, again: int, run: Fields, older: bool) -> Fields:
        """A run's record under its own name and pair; its files stay in the source's folder of run `was`."""
        text = (self._source / was / "record.json").read_bytes()
        if not older:
            text = msgspec.json.encode(with_stalls(msgspec.json.decode(text, type=RunRecord), self._source / was))
        record: Fields = msgspec.json.decode(text)
        for phase in record["phases"] if again else ():
            phase["prompts_sha256"] = hashlib.sha256(f"{phase['prompts_sha256']} {again}".encode()).hexdigest()
            for page in (phase["before"], phase["after"]):
                page[START_TIME] += 86_400 * again
        self.requests = max(self.requests, sum(phase["sent"] for phase in record["phases"]))
        return record | {name: run[name] for name in ("run", "pair", "position", "arm", "spare")}

    def _write(self, source: Path, record: Fields) -> None:
        folder = self.directory / "runs" / record["host"] / record["run"]
        folder.mkdir(parents=True)
        for name in record["files"]:
            (folder / name).parent.mkdir(exist_ok=True)
            os.link(source / name, folder / name)
        text = msgspec.json.format(msgspec.json.encode(record), indent=1)
        (folder / "record.json").write_bytes(text)
        (folder / "record.sha256").write_text(f"{hashlib.sha256(text).hexdigest()}  record.json\n")
        self.record_bytes += len(text)


def _planned(runs: list[Fields], wanted: int) -> list[tuple[str, int, Fields]]:
    """So many runs, the planned pairs and then these again: the run copied, how often it stood before, its line."""
    own = [run for run in runs if not run["spare"]]
    pairs = max(run["pair"] for run in own)
    found = []
    for number in range(wanted):
        again, place = divmod(number, len(own))
        run, pair = own[place], own[place]["pair"] + pairs * again
        name = f"p{pair:02}-{run['position'] + 1}-{run['arm']}"
        found.append((run["run"], again, run | {"pair": pair, "run": name}))
    return found
