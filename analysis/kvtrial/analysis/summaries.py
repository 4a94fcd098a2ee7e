"""A host's runs as a summary of kilobytes, made one host at a time, and the verdict from the summaries alone.

results/CAMPAIGN/summaries/HOST.json.zst: the host's outcome (gates, pairs, intervals, ladder), and its records without
what only gates read: lists of requests, resolved configurations, scrapes. So a fleet's records are never in memory
together, and the verdict of a thousand hosts needs none of them.
"""

import gc
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zstandard
from msgspec import Struct
from msgspec.structs import replace

from kvtrial.analysis.campaign import (
    Campaign,
    campaign_seconds_of,
    disk_errors_said,
    finished_hosts,
    lost_hosts_of,
    missing_sentence,
    read_campaign,
    read_host_records,
)
from kvtrial.analysis.effect import Interval
from kvtrial.analysis.faults import DroppedPair, EngineFault, Pair, Pairs
from kvtrial.analysis.hostverdict import HostOutcome
from kvtrial.analysis.verdict import judge_planned, over_fleet
from kvtrial.record.errors import UnusableInput
from kvtrial.record.plan import HostPlan, Plan
from kvtrial.record.protocol import Protocol
from kvtrial.record.record import PhaseRecord, RunRecord
from kvtrial.record.store import stated_digest, write_atomically
from kvtrial.record.verdict import HostVerdict, Verdict
from kvtrial.record.version import SCHEMA_VERSION, refuse_newer

SUMMARIES = "summaries"
ROLES_KEPT = ("load_bytes",)
"""What is still asked of a phase's scrapes once the hosts are judged: what a tier gave back."""
_LEVEL = 6


class HostSummary(Struct, frozen=True):
    """What is left of a host for the fleet's verdict.

    `valid`: pair → arm → run. `digests`: run → sha256 of its record.
    """

    schema_version: str
    campaign: str
    host: str
    verdict: HostVerdict
    intervals: list[Interval | None]
    valid: dict[int, dict[str, str]]
    dropped: list[DroppedPair]
    engine_faults: list[EngineFault]
    engine_faulted: list[int]
    spares_unused: list[int]
    records: list[RunRecord]
    digests: dict[str, str]

    def outcome(self) -> HostOutcome:
        """As it was judged, over records that are cut down."""
        runs = {record.run: record for record in self.records}
        pairs = [Pair(number, {arm: runs[run] for arm, run in arms.items()}) for number, arms in self.valid.items()]
        return HostOutcome(
            self.verdict,
            Pairs(pairs, self.dropped, self.engine_faults, self.engine_faulted, self.spares_unused),
            self.intervals,
        )


class _Plan(Struct, frozen=True):
    """A plan whose hosts are not read yet: of a large fleet all of them take gigabytes."""

    schema_version: str
    protocol: Protocol
    seed: int
    hosts: list[msgspec.Raw]


class _Run(Struct, frozen=True):
    run: str
    spare: bool


class _Part(Struct, frozen=True):
    """Of a host's part of the plan what names its runs."""

    host: str
    runs: list[_Run]


_Outline: Any = msgspec.defstruct(
    "_Outline",
    [
        (
            field.name,
            _Plan if field.name == "plan" else field.type,
            msgspec.field()
            if field.required
            else msgspec.field(default=field.default, default_factory=field.default_factory),  # type: ignore[call-overload]
        )
        for field in msgspec.structs.fields(Campaign)
    ],
    frozen=True,
)


class Outline:
    """A campaign whose hosts are read one at a time."""

    def __init__(self, directory: Path) -> None:
        """Raises UnusableInput as read_campaign does."""
        path = directory / "campaign.json"
        self.directory = directory
        try:
            raw = path.read_bytes()
            refuse_newer(str(msgspec.json.decode(raw, type=_Version).schema_version), str(path))
            self._read = msgspec.json.decode(raw, type=_Outline)
            self._parts = {msgspec.json.decode(part, type=_Part).host: part for part in self._read.plan.hosts}
        except (OSError, msgspec.DecodeError):
            read_campaign(directory)
            raise

    @property
    def hosts(self) -> list[str]:
        """In the plan's order."""
        return list(self._parts)

    @property
    def campaign(self) -> Campaign:
        """The campaign without any host."""
        return self._with([])

    def runs_of(self, host: str) -> list[_Run]:
        """The planned runs of a host, spares included."""
        return msgspec.json.decode(self._parts[host], type=_Part).runs

    def of(self, host: str) -> tuple[Campaign, str]:
        """The campaign with this host alone, and the sha256 of the host's part of the plan."""
        part = self._parts[host]
        # From the text, not from the types, as everywhere: see campaign.host_plan_digests.
        digest = hashlib.sha256(msgspec.json.encode(msgspec.json.decode(part), order="sorted")).hexdigest()
        return self._with([msgspec.json.decode(part, type=HostPlan)]), digest

    def _with(self, hosts: list[HostPlan]) -> Campaign:
        fields = {name: getattr(self._read, name) for name in Campaign.__struct_fields__}
        plan = self._read.plan
        return Campaign(**{**fields, "plan": Plan(plan.schema_version, plan.protocol, plan.seed, hosts, {})})


class _Version(Struct, frozen=True):
    schema_version: str


def summarise(directory: Path, hosts: Sequence[str] | None = None) -> Iterator[Path]:
    """Write the summary of each host (None: of all), one after the other; yields the files. Raises UnusableInput."""
    outline = Outline(directory)
    for host in outline.hosts if hosts is None else hosts:
        yield summarise_host(outline, host)


def summarise_host(outline: Outline, host: str) -> Path:
    """Judge one host from its records and write its summary. Raises UnusableInput for records that can't be used."""
    campaign, digest = outline.of(host)
    folder = outline.directory / "runs" / host
    records = read_host_records(outline.directory, host, campaign, {host: digest})
    outcome = judge_planned(campaign.plan.protocol, host, records, campaign.plan, prices=campaign.prices)
    summary = HostSummary(
        schema_version=SCHEMA_VERSION,
        campaign=campaign.campaign,
        host=host,
        verdict=outcome.verdict,
        intervals=outcome.intervals,
        valid={pair.number: {arm: run.run for arm, run in pair.runs.items()} for pair in outcome.pairs.valid},
        dropped=outcome.pairs.dropped,
        engine_faults=outcome.pairs.engine_faults,
        engine_faulted=outcome.pairs.engine_faulted,
        spares_unused=outcome.pairs.spares_unused,
        records=[cut_down(record) for record in records],
        digests={record.run: stated_digest(folder / record.run / "record.sha256") for record in records},
    )
    path = outline.directory / SUMMARIES / f"{host}.json.zst"
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, zstandard.ZstdCompressor(level=_LEVEL).compress(msgspec.json.encode(summary)))
    return path


def cut_down(record: RunRecord) -> RunRecord:
    """The record without what only gates read."""
    resolved = record.resolved
    if resolved is not None:
        resolved = replace(resolved, config={}, cache_config={}, log_facts={}, listening=[])
    return replace(record, resolved=resolved, phases=[_cut_phase(phase) for phase in record.phases], files={})


def _cut_phase(phase: PhaseRecord) -> PhaseRecord:
    before, after = ({r: values[r] for r in ROLES_KEPT if r in values} for values in (phase.before, phase.after))
    return replace(phase, before=before, after=after, requests=[], pressure=[], metrics_caveats=[])


def read_summary(path: Path) -> HostSummary:
    """Raises UnusableInput where it is missing, damaged or newer."""
    try:
        raw = zstandard.ZstdDecompressor().decompress(path.read_bytes())
        refuse_newer(str(msgspec.json.decode(raw, type=_Version).schema_version), str(path))
        return msgspec.json.decode(raw, type=HostSummary)
    except FileNotFoundError:
        raise UnusableInput(f"{path} is missing; kvtrial summarise {path.parents[1]} makes it.") from None
    except (zstandard.ZstdError, msgspec.DecodeError) as error:
        raise UnusableInput(
            f"{path} can't be read ({error}); kvtrial summarise {path.parents[1]} makes it anew."
        ) from None


@disk_errors_said()
def verdict_of(directory: Path) -> Verdict:
    """The verdict of a campaign from its hosts' summaries alone; the same as from the records they were made of.

    Records that are here are held against the digests in the summary. Raises UnusableInput for a summary that is
    missing, damaged, of another campaign, or older than the host's records.
    """
    with _without_collector():
        return _verdict_of(directory)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Nothing read here refers in a circle, and the collector would look through all hosts again for each few more."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _verdict_of(directory: Path) -> Verdict:
    outline = Outline(directory)
    campaign = outline.campaign
    outcomes, records, missing = {}, {}, []
    finished = finished_hosts(directory)
    for host in outline.hosts:
        path = directory / SUMMARIES / f"{host}.json.zst"
        summary = read_summary(path)
        if (summary.campaign, summary.host) != (campaign.campaign, host):
            raise UnusableInput(
                f"{path} is of host {summary.host} in {summary.campaign}; kvtrial summarise {directory} makes it anew."
            )
        _refuse_outdated(directory, path, summary)
        outcomes[host], records[host] = summary.outcome(), summary.records
        if host in finished and (said := missing_sentence(host, outline.runs_of(host), summary.digests)):
            missing.append(said)
    verdict = over_fleet(
        campaign.plan.protocol,
        outcomes,
        records,
        campaign.campaign,
        campaign.own_hit_share,
        campaign.provenance.get("install_seconds"),
        campaign_seconds_of(directory),
        lost_hosts_of(directory),
    )
    return replace(verdict, caveats=[*missing, *verdict.caveats])


def _refuse_outdated(directory: Path, path: Path, summary: HostSummary) -> None:
    there = {found.parent.name: found for found in (directory / "runs" / summary.host).glob("p*/record.sha256")}
    unlike = [run for run, found in there.items() if summary.digests.get(run) != stated_digest(found)]
    if unlike:
        raise UnusableInput(
            f"{path} was made before run {unlike[0]} came; kvtrial summarise {directory} makes it anew."
        )
