"""A campaign on the controller's disk: prepare or resume it, take in what hosts send, conclude it.

results/CAMPAIGN/campaign.json          protocol, plan, seed, pins, provenance; written once
results/CAMPAIGN/plans/HOST.json        what is shipped to each host
results/CAMPAIGN/workloads/SHA256…      traces that are replayed, in normal form, shipped beside the plan
results/CAMPAIGN/runs/HOST/RUN/         records as the host wrote them
results/CAMPAIGN/hosts/HOST.json        how the host program stood when it was last fetched
results/CAMPAIGN/lost.json              hosts of the inventory that could not be planned
results/CAMPAIGN/{verdict.json,…}       what they mean; written anew at each conclusion
results/history/                        every campaign's numbers by host, protocol and night (kvtrial.analysis.history)
results/latest                          link to the newest that something was fetched of
"""

import errno
import hashlib
import itertools
import math
import os
import platform
import re
import shutil
import stat
import statistics
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from typing import Protocol as Protocol_

import msgspec
from msgspec import Struct

import kvtrial
from kvtrial.analysis.answer import NO_RECORD, cause, ten_lines
from kvtrial.analysis.armchange import loose_limit_lines, spare_pool_lines
from kvtrial.analysis.compare import margin_of
from kvtrial.analysis.inputs import Request, read_request
from kvtrial.analysis.laddering import ladder_lines
from kvtrial.analysis.metrics import find_metric
from kvtrial.analysis.plan import PROMPT_ONLY, VISITS_MISSED, findings, for_host, make_plan, requested_protocol
from kvtrial.analysis.prices import Prices
from kvtrial.analysis.protocols import is_path, with_sizes
from kvtrial.analysis.stages import part_of, read_stopped, remember, stop_sentence
from kvtrial.analysis.stalls import with_stalls
from kvtrial.analysis.textfile import to_textfile
from kvtrial.analysis.traces import TRACES_FOLDER, read_traces, trace_sentence
from kvtrial.analysis.verdict import LEAST_SHARE_OF_HOSTS
from kvtrial.analysis.workloads import Traces
from kvtrial.record.errors import UnusableInput
from kvtrial.record.plan import HostPlan, Plan, canonical_json, files_of_traces, plan_sha256
from kvtrial.record.protocol import Protocol
from kvtrial.record.record import PhaseRecord, RunRecord
from kvtrial.record.store import (
    FOR_OTHERS,
    PACKED_RECORD,
    RECORD,
    SUMMARY_ONLY,
    record_path,
    record_text,
    sha256_of_file,
    stated_digest,
    sync_directory,
    write_atomically,
)
from kvtrial.record.verdict import Verdict
from kvtrial.record.version import SCHEMA_VERSION, refuse_newer

if TYPE_CHECKING:
    from kvtrial.analysis.history.model import History
    from kvtrial.analysis.lengths import LengthFit
    from kvtrial.analysis.reproduce import Archive
    from kvtrial.analysis.summaries import Judged, Outline

TEMPORARY = re.compile(r"\.(.+)\.\d+\.tmp")
"""How a file is called while it is written."""
EXIT_STATUS = {"INVALID": 4, "INCONCLUSIVE": 3}
UNUSABLE = 2
HISTORY = "history"
"""The folder beside the campaigns that holds the history of all of them."""
ARCHIVE = "campaign.tar.xz"
"""What a published campaign's folder holds it all in, where beside it lies only what is small."""
SAME_NUMBER = 1e-9
"""Relative difference up to which two forms of one number are the same."""
KEPT_OF_A_HOST = (
    "backend", "vllm_version", "engine_args", "engine_env", "connector_extra_config", "sizes", "limits",
    "client_cpus",
)  # fmt: skip
"""Settings of a host that a command line may give as well and that change what is run."""
LEAST_VISITS_MISSED = 2
"""Of VISITS_MISSED: for so many at the least a host program of a campaign that is gone on with must wait."""
RUN_NAME = re.compile(r"p\d{2,}-\d+-[A-Za-z0-9_]+")


class Asked(Struct, frozen=True):
    """What inventory and command line gave, as far as the plan does not tell it: for who does the campaign again.

    `protocol`: its name, or the path of its file. `request` and each of `hosts`: by the names of the variables, without
    kvtrial_ in front.
    """

    protocol: str
    request: dict[str, Any]
    hosts: dict[str, dict[str, Any]]


class Campaign(Struct, frozen=True):
    """campaign.json: what was decided, once, and from what. `asked` None: made by a release that did not keep it.

    `campaign_of`: of a campaign put together from parts, the id that the records of each host bear. `command`: what was
    typed, without secrets; empty where nobody knows. `protocol_sha256`: of the protocol in the plan, as the records'
    digests are of the hosts' parts; empty of a release that did not keep it.
    """

    schema_version: str
    campaign: str
    plan: Plan
    plan_sha256: str
    pins: dict[str, dict[str, str]]
    provenance: dict[str, Any]
    own_hit_share: float | None
    prices: Prices | None = None
    asked: Asked | None = None
    campaign_of: dict[str, str] = {}
    command: list[str] = []
    protocol_sha256: str = ""


class PlannedRun(Protocol_):
    """A run as a plan names it."""

    @property
    def run(self) -> str:
        """Its name."""

    @property
    def spare(self) -> bool:
        """Whether it only takes the place of a dropped one."""


class HostState(Struct, frozen=True):
    """How a host's program stood when last fetched. `state`: finished, running, stopped, failed, unreachable."""

    host: str
    state: str
    reason: str


@contextmanager
def disk_errors_said() -> Iterator[None]:
    """Turn what the disk refuses (no permission, full, read-only, a folder for a file) into UnusableInput."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UnusableInput(disk_sentence(error)) from None


def disk_sentence(error: OSError) -> str:
    """What the disk refused and on which file, in one sentence."""
    where = error.filename2 or error.filename
    if isinstance(where, str) and (temporary := TEMPORARY.fullmatch(Path(where).name)):
        # The file that was to be written is known to whoever named it, the one on its way to it is not.
        where = str(Path(where).with_name(temporary[1]))
    if error.errno == errno.ENOENT and isinstance(where, str) and not Path(where).parent.is_dir():
        return f"{where} can't be written: there is no folder {Path(where).parent}; make it, or name another."
    what = (error.strerror or str(error)).lower()
    return (
        f"{where or 'a file'} can't be read or written ({what}); look at its permissions and at the free space, then "
        f"run the same command again."
    )


def validate(raw: dict[str, Any]) -> None:
    """Check a request before any host is touched. Raises UnusableInput with the sentence."""
    request = read_request(raw)
    protocol = requested_protocol(request)
    hosts = {name: msgspec.structs.replace(host, facts={}) for name, host in request.hosts.items()}
    with _read_traces(request, protocol) as traces:
        make_plan(msgspec.structs.replace(request, hosts=hosts), protocol, traces)


def _read_traces(request: Request, protocol: Protocol) -> AbstractContextManager[Traces]:
    return read_traces(
        request,
        protocol,
        [for_host(protocol, request.hosts[name], request.seed, name=name) for name in sorted(request.hosts)],
    )


@disk_errors_said()
def prepare(raw: dict[str, Any]) -> dict[str, Any]:
    """Make a campaign, or resume the unfinished one of the same plan; see the module's text for the files.

    Returns campaign, directory, resumed, complete, plan_sha256, plans {host: path} of the hosts at hand, absent [its
    other hosts], traces {host: [{path, file, sha256}]} to be shipped beside the plan, announcement [lines]. Raises
    UnusableInput where the plan must be refused, or where an unfinished campaign of these hosts has another plan.
    """
    request = read_request(raw)
    protocol = requested_protocol(request)
    with _read_traces(request, protocol) as traces:
        return _prepare(request, make_plan(request, protocol, traces), traces)


def _prepare(request: Request, plan: Plan, traces: Traces) -> dict[str, Any]:
    if request.dry_run:
        return {"campaign": None, "directory": None, "resumed": False, "complete": False,
                "plan_sha256": plan_sha256(plan), "plans": {}, "absent": [], "traces": {},
                "announcement": announcement(request, plan, None, traces)}  # fmt: skip
    results = Path(request.results_dir)
    if not results.is_dir():
        results.mkdir(parents=True, exist_ok=True)
        _let_others_pass(results)
    unfinished = None if request.new_campaign else _unfinished(results, plan)
    said = []
    if unfinished is not None:
        patient = _as_patient_as(unfinished.plan, plan)
        differs = _difference(*_as_far_as_both_go(unfinished.plan, patient))
        if differs and not _absent(unfinished, plan):
            raise UnusableInput(
                f"campaign {unfinished.campaign} is unfinished and its plan differs ({differs}); finish it with its "
                f"own settings, or start anew with -e kvtrial_new_campaign=true."
            )
        if differs:
            said = [
                f"Begins beside campaign {unfinished.campaign}, which is unfinished and stays so: its plan of these "
                f"hosts differs ({differs})."
            ]
            unfinished = None
        else:
            plan, unfinished = patient, _joined(results, unfinished, request, patient)
            said = _what_is_gone_on_with(results / unfinished.campaign, unfinished, plan)
    campaign = unfinished or _create(results, request, plan, plan_sha256(plan))
    directory = results / campaign.campaign
    (directory / "plans").mkdir(exist_ok=True)
    _keep_traces(traces, directory)
    paths, shipped = {}, {}
    for host_plan in plan.hosts:
        path = directory / "plans" / f"{host_plan.host}.json"
        write_atomically(path, canonical_json(host_plan))
        paths[host_plan.host] = str(path)
        shipped[host_plan.host] = [
            {"path": str(directory / file), "file": file, "sha256": sha256_of_file(directory / file)}
            for file in files_of_traces(host_plan)
        ]
    return {
        "campaign": campaign.campaign,
        "directory": str(directory),
        "resumed": unfinished is not None,
        "complete": False,
        "plan_sha256": campaign.plan_sha256,
        "plans": paths,
        "absent": _absent(campaign, plan),
        "traces": shipped,
        "announcement": [*announcement(request, plan, directory if unfinished else None, traces), *said],
    }


def _absent(campaign: Campaign, plan: Plan) -> list[str]:
    """Hosts of a campaign that this command does not plan: it was not asked for them, or could not reach them."""
    return sorted({host.host for host in campaign.plan.hosts} - {host.host for host in plan.hosts})


def _what_is_gone_on_with(directory: Path, campaign: Campaign, plan: Plan) -> list[str]:
    """Which campaign this command goes on with where it was stopped, or is over other hosts than it has at hand."""
    finished = finished_hosts(directory)
    stopped = read_stopped(directory)
    said = [f"Campaign {campaign.campaign} had been {stopped.reason}."] if stopped is not None else []
    away = [f"{host}{' (finished)' if host in finished else ''}" for host in _absent(campaign, plan)]
    away += [f"{host} (never planned)" for host in lost_hosts_of(directory)]
    if not away:
        return said
    left = "" if any(host.host not in finished for host in plan.hosts) else " Nothing is left to do on those at hand."
    return [
        *said,
        f"Goes on with campaign {campaign.campaign}, whose hosts {', '.join(away)} are not at hand or not asked for: "
        f"what they have done stays, and the same command takes in what is missing of them when they are there.{left} "
        f"Another campaign begins with -e kvtrial_new_campaign=true.",
    ]


def _as_patient_as(before: Plan, plan: Plan) -> Plan:
    """The plan with the controller_gone_seconds of one that is gone on with.

    They follow the size of the inventory and the pauses between sweeps, and say nothing of what is measured. It stays
    as it is where a host program would then end beside a controller that comes by as often as this one.
    """
    were = {host.host: host.limits.controller_gone_seconds for host in before.hosts}

    def as_before(host: HostPlan) -> HostPlan:
        was, now = were.get(host.host), host.limits.controller_gone_seconds
        if was is None or (host.if_controller_gone == "stop" and was * VISITS_MISSED < now * LEAST_VISITS_MISSED):
            return host
        return msgspec.structs.replace(host, limits=msgspec.structs.replace(host.limits, controller_gone_seconds=was))

    return msgspec.structs.replace(plan, hosts=[as_before(host) for host in plan.hosts])


def _keep_traces(traces: Traces, directory: Path) -> None:
    """Put the traces that were read into the campaign's folder, each whole or not at all."""
    (directory / TRACES_FOLDER).mkdir(exist_ok=True)
    for file in sorted({read.file for read in traces.files.values()}):
        incoming = directory / f"{file}.{os.getpid()}.tmp"
        try:
            with (traces.folder / file).open("rb") as source, incoming.open("wb") as target:
                shutil.copyfileobj(source, target)
                target.flush()
                os.fsync(target.fileno())
            incoming.replace(directory / file)
        except BaseException:
            incoming.unlink(missing_ok=True)
            raise
    sync_directory(directory / TRACES_FOLDER)


def announcement(request: Request, plan: Plan, resumed: Path | None, traces: Traces) -> list[str]:
    """What the user is told before anything starts: question, runs, time, RAM, least detectable effect, warnings."""
    protocol = plan.protocol
    lines = [f"{protocol.name}: {protocol.question}", *map(trace_sentence, traces.files.values())]
    for host in plan.hosts:
        estimate = plan.estimates[host.host]
        done = len(_finished_runs(resumed, host.host)) if resumed else 0
        lines.append(
            f"{host.host}: {estimate.runs} runs ({estimate.pairs} pairs of {', '.join(host.launches)}), "
            f"{f'{done} of them done, ' if done else ''}about {estimate.seconds / 60:.0f} min, "
            f"{estimate.ram_bytes / 2**30:.1f} GiB of RAM."
        )
        if estimate.mde_ratio is None:
            lines.append(
                f"{host.host}: {estimate.pairs} pairs can't reach p < .05, so the verdict can only be INCONCLUSIVE; "
                f"6 pairs are the least that can prove anything."
            )
        elif _is_difference(protocol):
            lines.append(
                f"{host.host}: the least effect that {estimate.pairs} pairs will find is not known beforehand, since "
                f"nothing says how much the pairs will differ; BETTER needs the whole interval beyond the "
                f"margin{_margin(protocol, request.hosts[host.host].sizes)}."
            )
        else:
            lines.append(
                f"{host.host}: the least effect that {estimate.pairs} pairs will find is a factor of "
                f"{estimate.mde_ratio:.2f} (80 % power, pair noise {estimate.log_ratio_sd_assumed:g} assumed); that is "
                f"against no difference: BETTER also needs the whole interval beyond the "
                f"margin{_margin(protocol, request.hosts[host.host].sizes)}, so "
                f"a larger effect."
            )
        lines += ladder_lines(host) + loose_limit_lines(host, protocol.control) + spare_pool_lines(host)
        if not request.hosts[host.host].facts:
            lines.append(f"{host.host}: not looked at; GPUs, free RAM, ports and versions are checked when it runs.")
        for finding in findings(request.hosts[host.host], protocol):
            if finding.severity == "warn":
                lines.append(f"{host.host}, arm {finding.arm}: warning: {finding.reason}")
        lines += [
            f"{host.host}, arm {arm}: warning: {PROMPT_ONLY} is set by the protocol, so what is measured is not the "
            f"tier as the engine has it."
            for arm, launch in host.launches.items()
            if any(PROMPT_ONLY in word for word in launch.argv)
        ]
    return lines


def _is_difference(protocol: Protocol) -> bool:
    return any(c.role == "primary" and c.effect_scale == "difference" for c in protocol.comparisons)


def _margin(protocol: Protocol, sizes: dict[str, Any]) -> str:
    """The margin of the deciding comparison on a host in words and with its unit, with a space in front."""
    primary = next((c for c in protocol.comparisons if c.role == "primary"), None)
    if primary is None:
        return ""
    margin = margin_of(primary, with_sizes(protocol, sizes))
    return (
        f" of {margin * 100:g} %"
        if primary.effect_scale == "ratio"
        else f" of {margin:g} {find_metric(primary.metric).unit}"
    )


def _create(results: Path, request: Request, plan: Plan, digest: str) -> Campaign:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    name = _new_folder(results, f"{plan.protocol.name}-{stamp}")
    campaign = Campaign(
        schema_version=SCHEMA_VERSION,
        campaign=name,
        plan=plan,
        plan_sha256=digest,
        pins=_pins(plan),
        provenance={
            "kvtrial_version": kvtrial.__version__,
            "project": request.project,
            "created_at_utc": stamp,
            "controller_python": platform.python_version(),
            "install_seconds": request.install_seconds,
            **({"night": request.night} if request.night else {}),
        },
        own_hit_share=request.own_hit_share,
        prices=request.prices,
        asked=_asked(request),
        command=request.command,
        protocol_sha256=plan_sha256(plan.protocol),
    )  # fmt: skip
    write_atomically(results / name / "campaign.json", msgspec.json.format(msgspec.json.encode(campaign), indent=1))
    return campaign


def _new_folder(results: Path, name: str) -> str:
    """Make the campaign's folder; its name, with -2, -3 where others took it: controllers may share the folder."""
    for suffix in itertools.count(1):
        chosen = name if suffix == 1 else f"{name}-{suffix}"
        try:
            (results / chosen).mkdir()
        except FileExistsError:
            continue
        _let_others_pass(results / chosen)
        return chosen
    raise AssertionError


def _let_others_pass(folder: Path) -> None:
    """Let every account reach metrics.prom, which node_exporter reads; what else is made there keeps to the umask."""
    folder.chmod(stat.S_IMODE(folder.stat().st_mode) | 0o055)


def _asked(request: Request) -> Asked:
    path = is_path(request.protocol)
    settings = {name: getattr(request, name) for name in ("ladder", "objectives", "prices", "own_hit_share")}
    return Asked(
        protocol=str(Path(request.protocol).resolve()) if path else request.protocol,
        request={name: msgspec.to_builtins(value) for name, value in settings.items() if value not in (None, {})},
        hosts={
            name: {setting: getattr(host, setting) for setting in KEPT_OF_A_HOST}
            for name, host in sorted(request.hosts.items())
        },
    )


def read_campaign(directory: Path) -> Campaign:
    """campaign.json of a folder. Raises UnusableInput if there is none, or it is damaged or newer."""
    path = directory / "campaign.json"
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise UnusableInput(f"{directory} holds no campaign.json; give a folder under results/.") from None
    try:
        refuse_newer(str(msgspec.json.decode(raw)["schema_version"]), str(path))
        refuse_edited_protocol(raw, path)
        return msgspec.json.decode(raw, type=Campaign)
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise UnusableInput(f"{path} can't be read ({error}); restore it or start a new campaign.") from None


class _ToldPlan(Struct, frozen=True):
    protocol: msgspec.Raw


class _Told(Struct, frozen=True):
    """Of campaign.json what says whether its protocol is the one that was planned."""

    plan: _ToldPlan
    protocol_sha256: str = ""


def refuse_edited_protocol(raw: bytes, path: Path) -> None:
    """Raise UnusableInput where a campaign's protocol is not as it was written. Raises msgspec.DecodeError."""
    told = msgspec.json.decode(raw, type=_Told)
    # Of the text, as a host's part: see host_plan_digests.
    text = msgspec.json.encode(msgspec.json.decode(told.plan.protocol), order="sorted")
    if told.protocol_sha256 and hashlib.sha256(text).hexdigest() != told.protocol_sha256:
        raise UnusableInput(
            f"{path} was edited: its protocol (margins, gates, comparisons) is not the one that was planned; restore "
            f"it, or run a new campaign by the other protocol."
        )


def _unfinished(results: Path, plan: Plan) -> Campaign | None:
    """The newest campaign of this protocol that has these hosts, or had lost them, if it is not finished.

    It may have others, which are away or were not asked for this time. An old campaign.json that can't be read is
    passed over, and so is a campaign put together from parts: none of its hosts knows it by that name. Raises
    UnusableInput where the newest can't be read: that one may be what should go on.
    """
    hosts = {h.host for h in plan.hosts}
    paths = sorted(results.glob(f"{plan.protocol.name}-*/campaign.json"), reverse=True)
    done_since = False
    for path in paths:
        try:
            campaign = read_campaign(path.parent)
            planned = {h.host for h in campaign.plan.hosts}
            known = planned | set(lost_hosts_of(path.parent))
        except UnusableInput as error:
            if path == paths[0]:
                raise UnusableInput(f"{error} To leave it aside: -e kvtrial_new_campaign=true.") from None
            continue
        if campaign.plan.protocol.name != plan.protocol.name or campaign.campaign_of:
            continue
        if not hosts <= known:
            continue
        if is_finished(path.parent, planned):
            if planned == hosts:
                return None
            done_since = True
        elif planned == hosts or not done_since:
            return campaign
    return None


def is_finished(directory: Path, planned: Iterable[str]) -> bool:
    """Whether every planned host has finished, and the campaign can stand without those that could not be planned."""
    planned = sorted(planned)
    return is_complete(directory, planned) and _finished_share(directory, planned) >= LEAST_SHARE_OF_HOSTS


def _as_far_as_both_go(before: Plan, now: Plan) -> tuple[Plan, Plan]:
    """Two plans over the hosts that both have, to be compared: each host's part of a plan is its own.

    The protocol as planned follows the host that tells it (its sizes, phases, groups of levels). Where that one may be
    away, the protocol counts as the same if what no host changes is.
    """
    both = {host.host for host in before.hosts} & {host.host for host in now.hosts}
    one, other = (msgspec.structs.replace(part_of(plan, sorted(both)), estimates={}) for plan in (before, now))
    if len(both) < len(before.hosts) and declared(one.protocol) == declared(other.protocol):
        other = msgspec.structs.replace(other, protocol=one.protocol)
    return one, other


def declared(protocol: Protocol) -> list[Any]:
    """Of a protocol what stands there whatever the host's sizes, release and ladder."""
    comparisons = [(c.arm, c.against, c.metric, c.effect_scale, c.margin) for c in protocol.comparisons]
    return [protocol.title, protocol.question, sorted(protocol.arms), protocol.control, protocol.gates, protocol.nights,
            protocol.pairs, protocol.faults, comparisons]  # fmt: skip


def _joined(results: Path, campaign: Campaign, request: Request, plan: Plan) -> Campaign:
    """The campaign with hosts of `plan` that it had lost and that are there now.

    Each host's part of a plan is its own, so what the others have done stays as it is.
    """
    planned = {host.host for host in campaign.plan.hosts}
    new = [host for host in plan.hosts if host.host not in planned]
    if not new:
        return campaign
    whole = msgspec.structs.replace(
        campaign.plan,
        hosts=sorted([*campaign.plan.hosts, *new], key=lambda host: host.host),
        estimates={**campaign.plan.estimates, **plan.estimates},
    )
    asked = _asked(request)
    before = campaign.asked.hosts if campaign.asked is not None else {}
    joined = msgspec.structs.replace(
        campaign,
        plan=whole,
        plan_sha256=plan_sha256(whole),
        pins=_pins(whole),
        # By a later release the protocol may be written with more fields.
        protocol_sha256=plan_sha256(whole.protocol),
        asked=msgspec.structs.replace(asked, hosts={**before, **asked.hosts}),
    )
    directory = results / campaign.campaign
    write_atomically(directory / "campaign.json", msgspec.json.format(msgspec.json.encode(joined), indent=1))
    lost = set(lost_hosts_of(directory)) - {host.host for host in whole.hosts}
    write_atomically(directory / "lost.json", msgspec.json.encode(sorted(lost)))
    return joined


def _pins(plan: Plan) -> dict[str, dict[str, str]]:
    return {
        h.host: {"vllm": h.vllm_version, "model": h.model.name, "model_revision": h.model.revision} for h in plan.hosts
    }


def is_complete(directory: Path, hosts: Iterable[str]) -> bool:
    """Whether the program of every planned host has finished and was fetched."""
    return finished_hosts(directory) >= set(hosts)


def _difference(old: Plan, new: Plan) -> str:
    """Where two plans differ first, by dotted path; empty where they do not."""

    def walk(a: Any, b: Any, path: str) -> str | None:
        if isinstance(a, dict) and isinstance(b, dict):
            for key in sorted(set(a) | set(b)):
                if found := walk(a.get(key), b.get(key), f"{path}.{key}" if path else str(key)):
                    return found
            return None
        if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
            return next(
                (found for i, (x, y) in enumerate(zip(a, b, strict=True)) if (found := walk(x, y, f"{path}[{i}]"))),
                None,
            )
        return None if a == b else f"{path}: was {_short(a)}, now {_short(b)}"

    if old == new:
        return ""
    # What the user chose is named before what follows from it.
    parts = [(old.seed, new.seed, "seed"), (old.protocol, new.protocol, "protocol"), (old, new, "")]
    differences = (walk(msgspec.to_builtins(a), msgspec.to_builtins(b), path) for a, b, path in parts)
    return next(filter(None, differences), "in its order")


def _short(value: Any) -> str:
    text = str(value) if not isinstance(value, list | dict) else f"{len(value)} entries"
    return text if len(text) < 60 else text[:57] + "…"


def _link_latest(results: Path, directory: Path) -> None:
    temporary = results / f".latest.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(directory.name)
    temporary.replace(results / "latest")


@disk_errors_said()
def collect(directory_name: str, host: str, archive: str | None, state: dict[str, Any] | None = None) -> dict[str, Any]:
    """Take in a host's archive: each run is unpacked, checked against its digest, and put in place whole.

    A run that is here already is left alone, but for files that stayed on the host so far. `state`: the host program's
    last progress. Raises UnusableInput for a record that does not match its digest.
    """
    directory = Path(directory_name)
    target = directory / "runs" / host
    target.mkdir(parents=True, exist_ok=True)
    added = []
    if archive is not None:
        incoming = target / ".incoming"
        shutil.rmtree(incoming, ignore_errors=True)
        incoming.mkdir()
        try:
            added = _taken(Path(archive), incoming, target, host)
        finally:
            shutil.rmtree(incoming, ignore_errors=True)
        sync_directory(target)
    # Not when it is planned: a campaign that a host then refuses, since another one runs there, has nothing to show.
    _link_latest(directory.parent, directory)
    if state is not None:
        (directory / "hosts").mkdir(exist_ok=True)
        stood = HostState(host=host, state=str(state.get("state", "unreachable")), reason=str(state.get("reason", "")))
        write_atomically(directory / "hosts" / f"{host}.json", msgspec.json.encode(stood))
    return {"host": host, "added": added, "runs": sorted(_finished_runs(directory, host))}


def _taken(archive: Path, incoming: Path, target: Path, host: str) -> list[str]:
    """Unpack a host's archive into `incoming`, then each run into its place; the runs that something came of."""
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(incoming, filter="data")
    except tarfile.TarError as error:
        raise UnusableInput(
            f"the archive of host {host} can't be read ({error}); run the same command again."
        ) from None
    added = []
    for path in sorted(p for p in incoming.iterdir() if RUN_NAME.fullmatch(p.name)):
        check_digests(path)
        if take_in(path, target / path.name):
            added.append(path.name)
    return added


@disk_errors_said()
def find(directory_name: str) -> dict[str, Any]:
    """A campaign that is here: its id, its folder (a link followed), and its hosts."""
    directory = Path(directory_name).resolve()
    campaign = read_campaign(directory)
    if campaign.campaign_of:
        raise UnusableInput(f"{directory} was put together from parts; give one of them, whose hosts keep its files.")
    return {
        "campaign": campaign.campaign,
        "directory": str(directory),
        "hosts": [host.host for host in campaign.plan.hosts],
    }


class _Version(Struct, frozen=True):
    """Of a record only the version of its schema."""

    schema_version: Any


class _Files(Struct, frozen=True):
    """Of a record only the files that it names."""

    files: dict[str, str]


def _named_files(record: bytes) -> dict[str, str]:
    """File → sha256, as a run's record names them. Raises msgspec.DecodeError."""
    return msgspec.json.decode(record, type=_Files).files


def take_in(incoming: Path, place: Path) -> bool:
    """Put an unpacked run in its place; whether anything came that was not here.

    Of a run that is here only files are taken that its record names and that stayed on the host so far: what is here is
    never replaced. Raises UnusableInput where the host sent another record than the one that is here.
    """
    if not place.exists():
        incoming.rename(place)
        return True
    if not (place / SUMMARY_ONLY).exists() or (incoming / SUMMARY_ONLY).exists():
        return False
    record = record_text(place)
    if record_text(incoming) != record:
        raise UnusableInput(f"the host's record of {place.name} is not the one in {place}; find out who changed which.")
    for name in [*_named_files(record), RECORD]:
        if not (place / name).exists():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (incoming / name).rename(place / name)
    sync_directory(place)
    (place / PACKED_RECORD).unlink(missing_ok=True)
    (place / SUMMARY_ONLY).unlink()
    return True


def check_digests(run: Path) -> bytes:
    """The text of a run's record. Raises UnusableInput if it or a file that it names was truncated or edited.

    Of a run of which the record came alone, the files that it names may be absent; those that are here must match.
    """
    try:
        record, stated = _text_or_none(run), stated_digest(run / "record.sha256")
        if record is None or hashlib.sha256(record).hexdigest() != stated:
            raise UnusableInput(
                f"{record_path(run)} does not match its digest: it was truncated or edited; restore it."
            )
        alone = (run / SUMMARY_ONLY).exists()
        for name, digest in _named_files(record).items():
            if alone and not (run / name).exists():
                continue
            if sha256_of_file(run / name) != digest:
                raise UnusableInput(f"{run / name} does not match its digest: it was truncated or edited; restore it.")
        return record
    except (OSError, ValueError, msgspec.DecodeError) as error:
        archive = run.parents[2] / ARCHIVE if len(run.parents) > 2 else None
        do = (
            f"the whole campaign is in {archive}: unpack it elsewhere, and name its folder."
            if archive is not None and archive.is_file()
            else "fetch it again."
        )
        raise UnusableInput(f"run {run} is not whole ({error}); {do}") from None


def _text_or_none(run: Path) -> bytes | None:
    """The text of a run's record; None for a compressed one that is damaged. Raises OSError."""
    try:
        return record_text(run)
    except ValueError:
        return None


def _finished_runs(directory: Path | None, host: str) -> list[str]:
    folder = directory / "runs" / host if directory else None
    return [run.name for run in folder.glob("p*") if record_path(run).is_file()] if folder and folder.is_dir() else []


def _host_states(directory: Path) -> list[HostState]:
    return [_host_state(path) for path in sorted(directory.glob("hosts/*.json"))]


def _host_state(path: Path) -> HostState:
    try:
        return msgspec.json.decode(path.read_bytes(), type=HostState)
    except (OSError, msgspec.DecodeError) as error:
        raise UnusableInput(
            f"{path} can't be read ({error}); delete it and run the experiment's command again, which fetches it anew."
        ) from None


def lost_hosts_of(directory: Path) -> list[str]:
    """Hosts of the inventory that could not be planned. Raises UnusableInput if the list of them is damaged."""
    path = directory / "lost.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[str])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.DecodeError) as error:
        raise UnusableInput(f"{path} can't be read ({error}); write the lost hosts' names into it, or [].") from None


def read_records(directory: Path) -> dict[str, list[RunRecord]]:
    """Every record of a campaign by host, digests checked.

    Raises UnusableInput naming the one that is damaged, edited, or not of this campaign's plan.
    """
    campaign = read_campaign(directory)
    digests = host_plan_digests(directory)
    refuse_runs_without_record(directory)
    hosts = sorted({run.parent.name for run in directory.glob("runs/*/p*") if record_path(run).is_file()})
    return {host: read_host_records(directory, host, campaign, digests) for host in hosts}


def read_host_records(directory: Path, host: str, campaign: Campaign, digests: dict[str, str]) -> list[RunRecord]:
    """The records of one host, checked as `read_records` does. `digests`: host → sha256 of its part of the plan."""
    records = []
    for path in map(record_path, sorted((directory / "runs" / host).glob("p*"))):
        if not path.is_file():
            continue
        record = whole_record(path)
        _refuse_stranger(path, record, campaign, digests)
        for phase in record.phases:
            _refuse_edited(path, phase)
        records.append(with_stalls(record, path.parent))
    return records


def whole_record(path: Path) -> RunRecord:
    """The record in this file. Raises UnusableInput if a digest does not match, it is newer, or is no record."""
    text = check_digests(path.parent)
    try:
        record = msgspec.json.decode(text, type=RunRecord)
        refuse_newer(record.schema_version, str(path))
        return record
    except msgspec.DecodeError as error:
        with suppress(msgspec.DecodeError):
            refuse_newer(str(msgspec.json.decode(text, type=_Version).schema_version), str(path))
        raise UnusableInput(f"{path} is not a record of this kvtrial ({error}).") from None


def size_of_records(directory: Path, host: str) -> int:
    """Bytes of a host's records as texts, about: a compressed one takes ten times as much, unpacked."""
    paths = [record_path(run) for run in (directory / "runs" / host).glob("p*")]
    return sum(path.stat().st_size * (10 if path.name == PACKED_RECORD else 1) for path in paths if path.is_file())


def refuse_runs_without_record(directory: Path) -> None:
    """Raise UnusableInput for a run's folder without its record: it was fetched whole, so the record was removed."""
    for path in sorted(directory.glob("runs/*/p*")):
        if path.is_dir() and RUN_NAME.fullmatch(path.name) and not record_path(path).is_file():
            raise UnusableInput(
                f"{record_path(path)} is missing: the run was fetched whole, so it was removed; restore it, or take "
                f"the folder {path} out, and the run counts as missing."
            )


def finished_hosts(directory: Path) -> set[str]:
    """Hosts whose program had finished when it was last fetched."""
    return {state.host for state in _host_states(directory) if state.state == "finished"}


def missing_sentence(host: str, planned: Iterable[PlannedRun], there: Iterable[str]) -> str:
    """What is said of a finished host that planned runs have no record of; empty where none is missing."""
    left = set(there)
    gone = [run.run for run in planned if not run.spare and run.run not in left]
    if not gone:
        return ""
    return (
        f"{host} {NO_RECORD} {', '.join(gone)}, though it finished; the pair is not counted, and the time it took is "
        f"among the rest"
    )


def host_plan_digests(directory: Path) -> dict[str, str]:
    """Host → sha256 of its part of the plan, as campaign.json holds it.

    Taken from the text, not from the types: a later release may add fields with defaults, and old records must still
    be of their plan.
    """
    raw = msgspec.json.decode((directory / "campaign.json").read_bytes())
    return {
        host["host"]: hashlib.sha256(msgspec.json.encode(host, order="sorted")).hexdigest()
        for host in raw["plan"]["hosts"]
    }


def _refuse_stranger(path: Path, record: RunRecord, campaign: Campaign, digests: dict[str, str]) -> None:
    """Raise UnusableInput for a record that is not of this campaign, host, run and plan."""
    host, run = path.parent.parent.name, path.parent.name
    plan = next((part for part in campaign.plan.hosts if part.host == host), None)
    planned = next((entry for entry in plan.runs if entry.run == run), None) if plan else None
    differences = [
        (f"its host is {record.host}, the folder's {host}", record.host != host),
        (f"host {host} is not in the plan", plan is None),
        (f"its run is {record.run}, the folder's {run}", record.run != run),
        (f"run {run} is not in the plan", plan is not None and planned is None),
        (
            f"its campaign is {record.campaign}, that of host {host} here is "
            f"{campaign.campaign_of.get(host, campaign.campaign)}",
            record.campaign != campaign.campaign_of.get(host, campaign.campaign),
        ),
        (
            f"its plan_sha256 is {record.plan_sha256[:12]}…, that of host {host} here is {digests.get(host, '')[:12]}…",
            record.plan_sha256 != digests.get(host),
        ),
        (
            f"its pair, arm and spare are {record.pair}, {record.arm} and {record.spare}, the plan has others",
            planned is not None
            and (planned.pair, planned.arm, planned.spare) != (record.pair, record.arm, record.spare),
        ),
    ]
    found = [sentence for sentence, differs in differences if differs]
    if found:
        raise UnusableInput(
            f"{path} is not a record of this campaign: {found[0]}; take its folder out, or restore the right one."
        )


def _refuse_edited(path: Path, phase: PhaseRecord) -> None:
    """Raise UnusableInput where a phase's numbers are not those of its requests, as far as all are listed."""
    if len(phase.requests) != phase.sent:
        return
    whole = [request for request in phase.requests if request.error_class is None]
    times = [request.ttft_seconds for request in whole if request.ttft_seconds is not None]
    median = statistics.median(times) if times else None
    stated = phase.ttft_median_seconds
    wrong = [
        f"{name} is {says}, its {phase.sent} requests give {gives}"
        for name, says, gives in (
            ("finished", phase.finished, len(whole)),
            ("failed", phase.failed, phase.sent - len(whole)),
        )
        if says != gives
    ]
    same = stated == median or (
        stated is not None and median is not None and math.isclose(stated, median, rel_tol=SAME_NUMBER)
    )
    if not same:
        wrong.append(f"ttft_median_seconds is {stated}, its {phase.sent} requests give {median}")
    if wrong:
        raise UnusableInput(f"{path} was edited: phase {phase.name}: {wrong[0]}; restore it or take its folder out.")


def analyze(directory: Path) -> Verdict:
    """The verdict of a campaign from its records alone."""
    # What judges imports this module.
    from kvtrial.analysis.summaries import judge

    return judge(directory).verdict


@disk_errors_said()
def next_stage(
    directory_name: str, hosts: Sequence[str], gone: Sequence[str] = (), absent: Sequence[str] = ()
) -> dict[str, Any]:
    """Whether these hosts may be started, after what the others gave so far. Returns go, reason (empty: go).

    Asked so far are hosts with records, those whose program ended without any, and those of `gone` (hosts that this
    command has no more to do with) whose program has not ended: they were given up. Of `absent` (hosts that this
    command did not begin with) only those are heard that finished: the others are gone on with when they are there.
    Where the campaign had been stopped, so are those of `hosts` that finished: no command without stages passes it by.
    """
    from kvtrial.analysis.summaries import Outline, judge

    directory = Path(directory_name)
    outline = Outline(directory)
    ended = {state.host for state in _host_states(directory) if state.state in ("finished", "failed")}
    finished = finished_hosts(directory)
    unheard = {*hosts} - (finished if read_stopped(directory) is not None else set()) | set(absent) - finished
    others = [host for host in outline.hosts if host not in unheard]
    lost = [host for host in others if host in gone and host not in ended]
    asked = [h for h in others if h not in lost and (h in ended or _finished_runs(directory, h))]
    reason = ""
    if asked or lost:
        answered = judge(directory, asked).verdict.hosts if asked else []
        reason = stop_sentence(answered, len(outline.hosts), lost)
    remember(directory, reason, [*asked, *lost])
    return {"go": not reason, "reason": reason}


def campaign_seconds_of(directory: Path) -> float | None:
    """What the campaign took from plan to verdict, seconds; None where it was resumed or never concluded."""
    try:
        return float(msgspec.json.decode((directory / "duration.json").read_bytes())["campaign_seconds"])
    except (OSError, msgspec.DecodeError, KeyError, TypeError):
        return None


def write_verdict(directory: Path, verdict: Verdict) -> None:
    """Write verdict.json and metrics.prom."""
    write_atomically(directory / "verdict.json", msgspec.json.format(msgspec.json.encode(verdict), indent=1))
    write_atomically(directory / "metrics.prom", to_textfile(verdict).encode(), FOR_OTHERS)


@disk_errors_said()
def write_outputs(
    directory: Path,
    *,
    language: str = "en",
    history: "History | None" = None,
    beside: "Sequence[LengthFit]" = (),
    arguments: Sequence[str] = (),
    archives: "Mapping[Path, Archive] | None" = None,
) -> Verdict:
    """Judge a campaign and write verdict.json, summary.csv/.parquet, metrics.prom, report.html and brief.md.

    `language`, `history`: of the report. `beside`: fits over lengths of other campaigns, shown with its own.
    `arguments`: those of kvtrial report that gave them, for whoever makes the page again. `archives`: what the campaign
    and those beside it are kept in, by folder, where the page is read without these.
    """
    made = _judged_for_a_page(directory)
    _write_outputs(directory, made, language, history, beside, arguments, archives)
    return made.judged.verdict


class _ForAPage(msgspec.Struct, frozen=True):
    """A campaign as its outputs need it: whole records as far as WHOLE_BYTES goes, and of every host what they sum up:
    the rows of summary.csv, and the first tokens of the deciding phase by (host, run).
    """

    judged: "Judged"
    frames: "list[Any]"
    first_tokens: "dict[tuple[str, str], Any]"


def _judged_for_a_page(directory: Path, summaries: bool = False) -> _ForAPage:
    """`summaries`: write those of the hosts as well."""
    # pandas and matplotlib take over a second to import: planning and sweeping go without.
    from kvtrial.analysis.firsttokens import deciding_phase, first_tokens_of_runs
    from kvtrial.analysis.summaries import WHOLE_BYTES, Outline, judge
    from kvtrial.analysis.summary import to_frame

    frames: list[Any] = []
    first_tokens: dict[tuple[str, str], Any] = {}
    phase = deciding_phase(Outline(directory).campaign.plan.protocol)

    def look(records: Sequence[RunRecord]) -> None:
        frames.append(to_frame(records))
        first_tokens.update(first_tokens_of_runs(records, phase))

    judged = judge(directory, whole_bytes=WHOLE_BYTES, each=look, summaries=summaries)
    return _ForAPage(judged, frames, first_tokens)


def _write_outputs(
    directory: Path,
    made: _ForAPage,
    language: str = "en",
    history: "History | None" = None,
    beside: "Sequence[LengthFit]" = (),
    arguments: Sequence[str] = (),
    archives: "Mapping[Path, Archive] | None" = None,
) -> None:
    from kvtrial.analysis.export import write_summary
    from kvtrial.analysis.lengths import fits_of
    from kvtrial.analysis.report import build_brief, build_report
    from kvtrial.analysis.reproduce import commands_of
    from kvtrial.analysis.summaries import without_collector
    from kvtrial.analysis.summary import joined

    judged, verdict, campaign = made.judged, made.judged.verdict, made.judged.campaign
    records = [record for host in sorted(judged.records) for record in judged.records[host]]
    frame = joined(made.frames)
    write_verdict(directory, verdict)
    write_summary(frame, directory)
    protocol = campaign.plan.protocol
    about = {**campaign.provenance, "campaign": campaign.campaign, "seed": campaign.plan.seed,
             "plan_sha256": campaign.plan_sha256, "pins": campaign.pins}  # fmt: skip
    models = {host.host: host.model.name for host in campaign.plan.hosts}
    fits = [*fits_of(campaign.campaign, protocol, verdict, models), *beside]
    with without_collector():
        page = build_report(
            verdict, protocol, records, about, frame, language=language, history=history, fits=fits,
            prices=campaign.prices, commands=commands_of(directory, campaign, records, language, arguments, archives),
            record_names=_record_names(directory, records), first_tokens=made.first_tokens,
        )  # fmt: skip
    write_atomically(directory / "report.html", page.encode())
    brief = build_brief(verdict, protocol, records, language=language, prices=campaign.prices, fits=fits)
    write_atomically(directory / "brief.md", brief.encode())


def _record_names(directory: Path, records: "Sequence[RunRecord]") -> dict[tuple[str, str], str]:
    """(host, run) → the name of its record's file, which may be compressed."""
    runs = [(record.host, record.run) for record in records]
    return {(host, run): record_path(directory / "runs" / host / run).name for host, run in runs}


def _into_history(directory: Path, judged: "Judged") -> None:
    """The campaign into the history beside it, results/history; again when it is concluded anew."""
    from kvtrial.analysis.history.store import add

    add(directory.resolve().parent / HISTORY, directory, judged=judged)


def history_beside(directory: Path, protocol: str) -> "History | None":
    """What the history beside a campaign says of its protocol; None of a single night, or where it can't be read.

    None too of a store so large that reading it would keep a campaign waiting: kvtrial report --history takes it.
    """
    from kvtrial.analysis.history.file import read_history
    from kvtrial.analysis.history.store import engine_for, files_of

    store = directory.resolve().parent / HISTORY
    try:
        if engine_for(files_of(store, protocol)) != "pandas":
            return None
        history = read_history(store, protocol)
    except UnusableInput:
        return None
    return history if len(history.nights) > 1 else None


@disk_errors_said()
def conclude(
    directory_name: str,
    passed_seconds: float | None = None,
    lost_hosts: Sequence[str] | None = None,
    summaries: bool = False,
    absent: Sequence[str] = (),
    inventory: Sequence[str] = (),
) -> dict[str, Any]:
    """Analyse, write every output, and say how the command should end.

    `passed_seconds`: since the command that ran the whole campaign began, installs included; None for a resumed one.
    `lost_hosts`: hosts of the command that it could not plan; in lost.json those are kept that the campaign has no plan
    of, beside what it had lost before and `inventory` still has; None: as kept there. `absent`: planned hosts that the
    command did not begin with. `summaries`: write those of the hosts as well, for who asks again.
    Returns exit_status (0 verdict, 2 not finished, 3 INCONCLUSIVE, 4 INVALID), verdict, answer [lines], cause, report.
    A fleet of which at least four fifths are finished ends as its verdict says; `cause` names the others.
    """
    directory = Path(directory_name)
    started = time.monotonic()
    from kvtrial.analysis.summaries import Outline

    outline = Outline(directory)
    if passed_seconds is not None:
        took = {"campaign_seconds": passed_seconds - (outline.campaign.provenance.get("install_seconds") or 0.0)}
        write_atomically(directory / "duration.json", msgspec.json.encode(took))
    if lost_hosts is not None:
        lost = {*lost_hosts, *(set(lost_hosts_of(directory)) & set(inventory))} - set(outline.hosts)
        write_atomically(directory / "lost.json", msgspec.json.encode(sorted(lost)))
    made = _judged_for_a_page(directory, summaries)
    verdict = made.judged.verdict
    try:
        _into_history(directory, made.judged)
    finally:
        history = history_beside(directory, verdict.protocol)
        store = ["--history", str(directory.resolve().parent / HISTORY)] if history else []
        _write_outputs(directory, made, history=history, arguments=store)
    status = EXIT_STATUS.get(verdict.verdict, 0)
    why, unfinished = cause(verdict), ""
    if read_stopped(directory) is None and not is_complete(directory, outline.hosts):
        unfinished = unfinished_sentence(
            outline,
            {host: "not at hand this time" if host in (lost_hosts or ()) else "not asked this time" for host in absent},
        )
        enough = _finished_share(directory, outline.hosts) >= LEAST_SHARE_OF_HOSTS
        status, why = (status, f"{why.rstrip('.')}; {unfinished}") if enough else (UNUSABLE, unfinished)
    return {
        "exit_status": status,
        "verdict": verdict.verdict,
        "answer": ten_lines(verdict, str(directory)),
        "cause": why,
        "unfinished": unfinished,
        "report": str(directory / "report.html"),
        "directory": str(directory),
        "analysis_seconds": time.monotonic() - started,
    }


def _finished_share(directory: Path, hosts: Sequence[str]) -> float:
    """Hosts that are finished, as a share of those planned and those that could not be planned."""
    states = {state.host: state.state for state in _host_states(directory)}
    return sum(states.get(host) == "finished" for host in hosts) / len({*hosts, *lost_hosts_of(directory)})


def unfinished_sentence(outline: "Outline", away: Mapping[str, str] | None = None) -> str:
    """Which hosts are not finished and why, and that the same command goes on. `away`: hosts → why this one left them.

    Of a campaign put together from parts none goes on: each host knows it by its part's name.
    """
    campaign_of = outline.campaign.campaign_of
    unfinished_parts = set()
    states = {state.host: state for state in _host_states(outline.directory)}
    parts = []
    for host in outline.hosts:
        state = states.get(host)
        if state is None or state.state != "finished":
            done = len(_finished_runs(outline.directory, host))
            planned = sum(not run.spare for run in outline.runs_of(host))
            why = f"{state.state}{f': {state.reason}' if state.reason else ''}" if state else "nothing was fetched"
            if away and host in away:
                why = f"{away[host]}{f', when last fetched {why}' if state else ''}"
            parts.append(f"{host} ({why}; {done} of {planned} runs done)")
            unfinished_parts.add(campaign_of.get(host, ""))
    told = f"not finished on {', '.join(parts)}"
    if campaign_of:
        part = ", ".join(sorted(unfinished_parts))
        return f"{told}; go on with {part} by its own command, then merge the parts into a new folder."
    return f"{told}; the same command goes on with what is missing."
