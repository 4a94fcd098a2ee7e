"""A campaign judged one host at a time: a fleet's records are never in memory together.

What is left of a host is its outcome (gates, pairs, intervals, ladder), and its records without what only gates read:
lists of requests, resolved configurations, scrapes. `judge` keeps that in memory, for the end of a campaign;
`summarise` writes it to results/CAMPAIGN/summaries/HOST.json.zst, with its digest beside it, and the verdict of a
thousand hosts needs no record then.
"""

import gc
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zstandard
from msgspec import Struct
from msgspec.structs import replace

import kvtrial
from kvtrial.analysis.campaign import (
    Campaign,
    campaign_seconds_of,
    check_digests,
    disk_errors_said,
    finished_hosts,
    lost_hosts_of,
    missing_sentence,
    read_campaign,
    read_host_records,
    refuse_edited_protocol,
    refuse_runs_without_record,
    size_of_records,
)
from kvtrial.analysis.drift import workload_of
from kvtrial.analysis.effect import Interval
from kvtrial.analysis.faults import DroppedPair, EngineFault, Pair, Pairs
from kvtrial.analysis.hostverdict import HostOutcome
from kvtrial.analysis.stages import read_stopped, stopped_verdict
from kvtrial.analysis.verdict import judge_planned, over_fleet
from kvtrial.record.errors import UnusableInput
from kvtrial.record.plan import Estimate, HostPlan, Plan
from kvtrial.record.protocol import Protocol
from kvtrial.record.record import PhaseRecord, RunRecord
from kvtrial.record.store import stated_digest, write_atomically
from kvtrial.record.verdict import HostVerdict, Verdict
from kvtrial.record.version import SCHEMA_VERSION, refuse_newer

SUMMARIES = "summaries"
ROLES_KEPT = ("load_bytes",)
"""What is still asked of a phase's scrapes once the hosts are judged: what a tier gave back."""
PAGE_ROLES = (*ROLES_KEPT, "store_bytes", "prompt_tokens_computed", "prompt_tokens_local_hit", "prompt_tokens_external")
"""And what a report adds up over all hosts: where prompt tokens came from, what was stored and loaded."""
WHOLE_BYTES = 128 * 2**20
"""Of records as texts. Up to so much a campaign's records stay whole for its report; they take twice that in memory."""
_LEVEL = 6


class HostSummary(Struct, frozen=True):
    """What is left of a host for the fleet's verdict.

    `valid`: pair → arm → run. `digests`: run → sha256 of its record. `looks`: run → `look_of` its folder before it was
    read. `release`: of kvtrial, which judged.
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
    looks: dict[str, str] = {}
    release: str = ""

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
    estimates: dict[str, Estimate] = {}


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
            # What is kept of it takes a third without the line ends that people read it by.
            raw = msgspec.json.format(path.read_bytes(), indent=-1)
            refuse_newer(str(msgspec.json.decode(raw, type=_Version).schema_version), str(path))
            refuse_edited_protocol(raw, path)
            self._read = msgspec.json.decode(raw, type=_Outline)
            self._parts: dict[str, msgspec.Raw] = {
                msgspec.json.decode(part, type=_Part).host: part for part in self._read.plan.hosts
            }
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

    def refuse_strangers(self) -> None:
        """Raise UnusableInput for the records of a host that is not in the plan."""
        for folder in sorted(self.directory.glob("runs/*")):
            if folder.name not in self._parts and any(folder.glob("p*")):
                raise UnusableInput(
                    f"{folder} is not of this campaign: host {folder.name} is not in the plan; take the folder out, or "
                    f"restore the right one."
                )

    def runs_of(self, host: str) -> list[_Run]:
        """The planned runs of a host, spares included."""
        return msgspec.json.decode(self._parts[host], type=_Part).runs

    def text_of(self, host: str) -> msgspec.Raw:
        """A host's part of the plan, in the digits and the order that stand there."""
        return self._parts[host]

    def plan_of(self, host: str) -> HostPlan:
        """A host's part of the plan. Raises UnusableInput as read_campaign does."""
        try:
            return msgspec.json.decode(self._parts[host], type=HostPlan)
        except msgspec.DecodeError:
            read_campaign(self.directory)
            raise

    def workload_of(self, host: str) -> str:
        """What the runs of a host send, with its sizes by name: see drift.workload_of."""
        protocol, asked = self._read.plan.protocol, self._read.asked.hosts if self._read.asked is not None else {}
        # The protocol has the sizes of the host that tells it, which may be that one's own.
        others = {size for of_host in asked.values() for size in of_host.get("sizes", {})} | {*(protocol.tiers or ())}
        shared = {size: value for size, value in protocol.sizes.items() if size not in others} if asked else {}
        given = asked.get(host, {}).get("sizes", {})
        return workload_of(msgspec.json.decode(self._parts[host]), protocol.control, {**shared, **given})

    def of(self, host: str) -> tuple[Campaign, str]:
        """The campaign with this host alone, and the sha256 of the host's part of the plan."""
        # From the text, not from the types, as everywhere: see campaign.host_plan_digests.
        text = msgspec.json.encode(msgspec.json.decode(self._parts[host]), order="sorted")
        return self._with([self.plan_of(host)]), hashlib.sha256(text).hexdigest()

    def _with(self, hosts: list[HostPlan]) -> Campaign:
        fields = {name: getattr(self._read, name) for name in Campaign.__struct_fields__}
        plan = self._read.plan
        return Campaign(
            **{**fields, "plan": Plan(plan.schema_version, plan.protocol, plan.seed, hosts, plan.estimates)}
        )


def with_texts(campaign: Campaign, hosts: Iterable[msgspec.Raw]) -> Any:
    """The campaign, to be written, with these texts as its hosts' parts of the plan."""
    fields = {name: getattr(campaign, name) for name in Campaign.__struct_fields__}
    plan = campaign.plan
    return _Outline(
        **{**fields, "plan": _Plan(plan.schema_version, plan.protocol, plan.seed, list(hosts), plan.estimates)}
    )


class _Version(Struct, frozen=True):
    schema_version: str


class Judged(Struct, frozen=True):
    """A campaign with its verdict. `campaign` has what a host's first planned run sends, and the others without it.

    `records`: see `judge`.
    """

    campaign: Campaign
    verdict: Verdict
    records: dict[str, list[RunRecord]]


@disk_errors_said()
def judge(
    directory: Path,
    hosts: Sequence[str] | None = None,
    whole_bytes: int | None = None,
    each: Callable[[Sequence[RunRecord]], None] | None = None,
    summaries: bool = False,
) -> Judged:
    """Judge a campaign from its records, one host after the other; with `hosts` as if it had these alone.

    Records are kept without what only gates read. For a report (`whole_bytes`) the first so many bytes of them stay as
    they are, and those of the hosts of which a report shows one run (`_Shown`). `each` is given every host's whole
    records in turn. `summaries`: write those of the hosts as well. Raises UnusableInput for records
    that can't be used.
    """
    with without_collector():
        outline = Outline(directory)
        refuse_runs_without_record(directory)
        outline.refuse_strangers()
        left, cut = whole_bytes or 0, set()
        outcomes, records, plans = {}, {}, []
        shown = _Shown()
        for host in outline.hosts if hosts is None else hosts:
            campaign, digest = outline.of(host)
            looks = _looks(directory, host) if summaries else {}
            found = read_host_records(directory, host, campaign, {host: digest})
            shown.look(host, found)
            if each is not None:
                each(found)
            outcome = judge_planned(campaign.plan.protocol, host, found, campaign.plan, prices=campaign.prices)
            left -= size_of_records(directory, host) if left > 0 else 0
            kept = found
            if left <= 0:
                kept = [cut_down(record, PAGE_ROLES) for record in found]
                cut.add(host)
            if summaries:
                few = [cut_down(record) for record in kept]
                _write_summary(directory, campaign.campaign, outcome, few, looks)
            outcomes[host] = _over(outcome, kept)
            records[host] = kept
            first, *others = campaign.plan.hosts[0].runs
            plans.append(replace(campaign.plan.hosts[0], runs=[first, *(replace(run, phases=[]) for run in others)]))
        verdict = _verdict(outline, outcomes, records, hosts is None)
        for host in shown.hosts(verdict) & cut if whole_bytes is not None else ():
            campaign, digest = outline.of(host)
            records[host] = read_host_records(directory, host, campaign, {host: digest})
        campaign = outline.campaign
        return Judged(replace(campaign, plan=replace(campaign.plan, hosts=plans)), verdict, records)


def _is_configured(record: RunRecord) -> bool:
    return record.resolved is not None and bool(record.resolved.config or record.resolved.log_facts)


class _Shown:
    """The hosts of which a report shows one run: the first by name with a record, with a completed run (its prompts),
    and, for each arm, with its configuration; and the one whose ladder the verdict has (its time line).
    """

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], str] = {}

    def look(self, host: str, records: Sequence[RunRecord]) -> None:
        """Take note of what a host's whole records have."""
        has = {("record", "")} if records else set()
        has |= {("completed", "") for record in records if record.outcome == "completed"}
        has |= {("config", record.arm) for record in records if _is_configured(record)}
        for what in has:
            self._first[what] = min(host, self._first.get(what, host))

    def hosts(self, verdict: Verdict) -> set[str]:
        return {*self._first.values(), *([verdict.ladder.host] if verdict.ladder is not None else [])}


def _over(outcome: HostOutcome, records: Sequence[RunRecord]) -> HostOutcome:
    """The outcome with its pairs over these forms of its records."""
    runs = {record.run: record for record in records}
    pairs = [Pair(p.number, {arm: runs[run.run] for arm, run in p.runs.items()}) for p in outcome.pairs.valid]
    return replace(outcome, pairs=replace(outcome.pairs, valid=pairs))


def _verdict(
    outline: Outline, outcomes: Mapping[str, HostOutcome], records: dict[str, list[RunRecord]], whole: bool
) -> Verdict:
    """The verdict over these hosts; of a `whole` campaign with whom it lost, what is missing, and if it stopped."""
    campaign, directory = outline.campaign, outline.directory
    if not whole:
        return over_fleet(campaign.plan.protocol, outcomes, records, campaign.campaign)
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
    if (stopped := read_stopped(directory)) is not None:
        verdict = stopped_verdict(verdict, stopped, campaign.plan, records)
    finished = finished_hosts(directory)
    missing = [
        said
        for host in outline.hosts
        if host in finished
        and (said := missing_sentence(host, outline.runs_of(host), [record.run for record in records[host]]))
    ]
    return replace(verdict, caveats=[*missing, *verdict.caveats])


@disk_errors_said()
def summarise(directory: Path, hosts: Sequence[str] | None = None) -> Iterator[Path]:
    """Write the summary of each host (None: of all), one after the other; yields the files. Raises UnusableInput."""
    outline = Outline(directory)
    for host in hosts or ():
        if host not in outline.hosts:
            raise UnusableInput(f"{directory} has no host {host}; its hosts are {_some(outline.hosts)}.")
    for host in outline.hosts if hosts is None else hosts:
        yield summarise_host(outline, host)


def _some(hosts: Sequence[str], most: int = 8) -> str:
    more = f" and {len(hosts) - most} more" if len(hosts) > most else ""
    return ", ".join(hosts[:most]) + more


def summarise_host(outline: Outline, host: str) -> Path:
    """Judge one host from its records and write its summary. Raises UnusableInput for records that can't be used."""
    campaign, digest = outline.of(host)
    looks = _looks(outline.directory, host)
    records = read_host_records(outline.directory, host, campaign, {host: digest})
    outcome = judge_planned(campaign.plan.protocol, host, records, campaign.plan, prices=campaign.prices)
    return _write_summary(
        outline.directory, campaign.campaign, outcome, [cut_down(record) for record in records], looks
    )


def _write_summary(
    directory: Path, campaign: str, outcome: HostOutcome, records: list[RunRecord], looks: dict[str, str]
) -> Path:
    """Write a host's summary; `records` are cut down."""
    host = outcome.verdict.host
    folder = directory / "runs" / host
    summary = HostSummary(
        schema_version=SCHEMA_VERSION,
        campaign=campaign,
        host=host,
        verdict=outcome.verdict,
        intervals=outcome.intervals,
        valid={pair.number: {arm: run.run for arm, run in pair.runs.items()} for pair in outcome.pairs.valid},
        dropped=outcome.pairs.dropped,
        engine_faults=outcome.pairs.engine_faults,
        engine_faulted=outcome.pairs.engine_faulted,
        spares_unused=outcome.pairs.spares_unused,
        records=records,
        digests={record.run: stated_digest(folder / record.run / "record.sha256") for record in records},
        looks=looks,
        release=kvtrial.__version__,
    )
    path = directory / SUMMARIES / f"{host}.json.zst"
    path.parent.mkdir(exist_ok=True)
    # The digest goes first: a summary that was cut off between the two is refused, and made anew.
    packed = zstandard.ZstdCompressor(level=_LEVEL).compress(msgspec.json.encode(summary))
    digest_line = f"{hashlib.sha256(packed).hexdigest()}  {path.name}\n"
    write_atomically(digest_path(path), digest_line.encode())
    write_atomically(path, packed)
    return path


def _looks(directory: Path, host: str) -> dict[str, str]:
    """Run → `look_of` its folder, of the runs of a host that are here."""
    try:
        with os.scandir(directory / "runs" / host) as entries:
            return {entry.name: look_of(entry.path) for entry in entries if entry.is_dir() and entry.name[0] == "p"}
    except FileNotFoundError:
        return {}


def look_of(folder: str) -> str:
    """What tells without reading that no file of a folder was changed since: a hash of names, sizes, times and inodes.

    Writing a file changes its ctime, which nobody can set: a copy, or an edited file, looks different.
    """
    told = hashlib.blake2b(digest_size=16)
    folders = [folder]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in sorted(entries, key=lambda found: found.name):
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                    continue
                seen = entry.stat()
                told.update(
                    f"{entry.path[len(folder) :]} {seen.st_size} {seen.st_mtime_ns} {seen.st_ctime_ns} "
                    f"{seen.st_dev} {seen.st_ino}\n".encode()
                )
    return told.hexdigest()


def digest_path(summary: Path) -> Path:
    """Where the digest of a summary stands."""
    return summary.with_name(f"{summary.name}.sha256")


def cut_down(record: RunRecord, roles: Sequence[str] = ROLES_KEPT) -> RunRecord:
    """The record without what only gates read; of scrapes these roles stay."""
    resolved = record.resolved
    if resolved is not None:
        resolved = replace(resolved, config={}, cache_config={}, log_facts={}, listening=[])
    return replace(record, resolved=resolved, phases=[_cut_phase(phase, roles) for phase in record.phases], files={})


def _cut_phase(phase: PhaseRecord, roles: Sequence[str]) -> PhaseRecord:
    before, after = ({r: values[r] for r in roles if r in values} for values in (phase.before, phase.after))
    return replace(phase, before=before, after=after, requests=[], pressure=[], metrics_caveats=[])


def read_summary(path: Path) -> HostSummary:
    """Raises UnusableInput where it is missing, truncated, edited or newer."""
    try:
        packed = path.read_bytes()
        if hashlib.sha256(packed).hexdigest() != stated_digest(digest_path(path)):
            raise UnusableInput(
                f"{path} does not match its digest: it was truncated or edited; kvtrial summarise {path.parents[1]} "
                f"makes it anew."
            )
        raw = zstandard.ZstdDecompressor().decompress(packed)
        refuse_newer(str(msgspec.json.decode(raw, type=_Version).schema_version), str(path))
        return msgspec.json.decode(raw, type=HostSummary)
    except FileNotFoundError as error:
        raise UnusableInput(f"{error.filename} is missing; kvtrial summarise {path.parents[1]} makes it.") from None
    except (zstandard.ZstdError, msgspec.DecodeError, ValueError) as error:
        raise UnusableInput(
            f"{path} can't be read ({error}); kvtrial summarise {path.parents[1]} makes it anew."
        ) from None


@disk_errors_said()
def verdict_of(directory: Path) -> Verdict:
    """The verdict of a campaign from its hosts' summaries alone; the same as from the records they were made of.

    Each summary is held against its digest, and the records that are here against theirs and those in the summary.
    Raises UnusableInput for a summary that is missing, truncated, edited, of another campaign, or older than the host's
    records, and for a record that was truncated or edited.
    """
    with without_collector():
        return _from_summaries(directory).verdict


@disk_errors_said()
def judged_before(directory: Path) -> Judged:
    """As `judge`, from the hosts' summaries where all are here, whole, and of this very release; else from records."""
    with without_collector():
        try:
            return _from_summaries(directory, kvtrial.__version__)
        except UnusableInput:
            pass
    return judge(directory)


@contextmanager
def without_collector() -> Iterator[None]:
    """Nothing read here refers in a circle, and the collector would look through all hosts again for each few more."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _from_summaries(directory: Path, release: str | None = None) -> Judged:
    """`release`: which must have made them. The campaign is without its plan's hosts."""
    outline = Outline(directory)
    outline.refuse_strangers()
    campaign = outline.campaign
    outcomes, records = {}, {}
    for host in outline.hosts:
        path = directory / SUMMARIES / f"{host}.json.zst"
        summary = read_summary(path)
        if (summary.campaign, summary.host) != (campaign.campaign, host):
            raise UnusableInput(
                f"{path} is of host {summary.host} in {summary.campaign}; kvtrial summarise {directory} makes it anew."
            )
        if release not in (None, summary.release):
            raise UnusableInput(f"{path} was made by release {summary.release}, this is {release}.")
        _refuse_outdated(directory, path, summary)
        outcomes[host], records[host] = summary.outcome(), summary.records
    return Judged(campaign, _verdict(outline, outcomes, records, whole=True), records)


def _refuse_outdated(directory: Path, path: Path, summary: HostSummary) -> None:
    """Raise UnusableInput for a run that came after the summary, and for a file that does not match its digest.

    What looks as it did when it was summarised is not read again.
    """
    for run, look in sorted(_looks(directory, summary.host).items()):
        if summary.looks.get(run) == look:
            continue
        found = directory / "runs" / summary.host / run / "record.sha256"
        if not found.is_file():
            continue
        if summary.digests.get(run) != stated_digest(found):
            raise UnusableInput(f"{path} was made before run {run} came; kvtrial summarise {directory} makes it anew.")
        check_digests(found.parent)
