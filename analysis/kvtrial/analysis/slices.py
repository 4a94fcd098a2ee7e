"""Campaigns of several controllers over parts of one inventory, put together as if one had run them all."""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvtrial.analysis.campaign import (
    Campaign,
    declared,
    lost_hosts_of,
    read_host_records,
    refuse_runs_without_record,
)
from kvtrial.analysis.drift import ALIKE, settings_of
from kvtrial.analysis.laddering import QUEUEING
from kvtrial.analysis.stages import read_stopped
from kvtrial.analysis.summaries import Outline, with_texts, without_collector
from kvtrial.record.errors import UnusableInput
from kvtrial.record.plan import HostPlan, Plan, RunPlan, canonical_json, plan_sha256
from kvtrial.record.protocol import Protocol, Trace
from kvtrial.record.store import write_atomically

KEPT = ("runs", "hosts", "plans", "workloads")


@without_collector()
def merge(parts: Sequence[Path], target: Path, may_differ: Sequence[str] = ()) -> Path:
    """Put the campaigns of `parts` together in the new folder `target`; they stay as they are. Returns `target`.

    `may_differ`: of ALIKE what parts may differ in, as kvtrial_may_differ says it of hosts. Raises UnusableInput where
    they are not parts of one: another protocol or seed, a host in two of them, hosts that the preflight would not have
    let run together, a part that stopped at its canary, a record that is damaged; or where `target` exists, or lies in
    a part.
    """
    target = target.resolve()
    for name in may_differ:
        if name not in ALIKE:
            raise UnusableInput(f"--may-differ {name}: parts are held against each other in {', '.join(ALIKE)}.")
    for part in parts:
        if target.is_relative_to(part.resolve()):
            raise UnusableInput(f"{target} lies in {part}, which stays as it is; name a folder outside the parts.")
    if target.exists():
        raise UnusableInput(f"{target} is there already; name a folder that is not there.")
    planned, text = _merged(parts, target.name, may_differ)
    incoming = target.with_name(f".{target.name}.incoming")
    shutil.rmtree(incoming, ignore_errors=True)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        incoming.mkdir()
        for part in parts:
            for name in KEPT:
                if (part / name).is_dir():
                    shutil.copytree(part / name, incoming / name, dirs_exist_ok=True)
        lost = sorted({host for part in parts for host in lost_hosts_of(part)} - {*planned})
        write_atomically(incoming / "lost.json", msgspec.json.encode(lost))
        write_atomically(incoming / "campaign.json", msgspec.json.format(text, indent=1))
        del text
        _settings(Outline(incoming))
        try:
            incoming.rename(target)
        except OSError as error:
            raise UnusableInput(
                f"{target} can't be made ({error.strerror}); name a folder that is not there."
            ) from None
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
    return target


def _merged(parts: Sequence[Path], name: str, may_differ: Sequence[str]) -> tuple[list[str], bytes]:
    """The hosts of all parts, and campaign.json of the campaign `name` that has them. Raises UnusableInput as merge."""
    outlines = [Outline(part) for part in parts]
    campaigns = [_without_runs(outline) for outline in outlines]
    _refuse_unlike(parts, campaigns)
    _refuse_stopped(parts)
    _refuse_other_pins(parts, [_settings(outline) for outline in outlines], may_differ)
    merged = together(campaigns, name)
    hosts = [host.host for host in merged.plan.hosts]
    outline_of = {host: outline for outline in outlines for host in outline.hosts}
    canonical = (msgspec.Raw(canonical_json(outline_of[host].plan_of(host))) for host in hosts)
    merged = msgspec.structs.replace(merged, plan_sha256=plan_sha256(with_texts(merged, canonical).plan))
    # Each host's plan as its part has it: records name the digest of that very text.
    told = (outline_of[host].text_of(host) for host in hosts)
    return hosts, msgspec.json.encode(with_texts(merged, told))


def _without_runs(outline: Outline) -> Campaign:
    """The campaign with what its hosts are; of their runs, which would take gigabytes, what can only queue.

    Raises as read_campaign.
    """

    def queueing(host: HostPlan) -> list[RunPlan]:
        found = [(run, [phase for phase in run.phases if phase.block == QUEUEING]) for run in host.runs]
        return [msgspec.structs.replace(run, phases=phases) for run, phases in found if phases]

    plans = (outline.plan_of(host) for host in outline.hosts)
    hosts = [msgspec.structs.replace(plan, runs=queueing(plan)) for plan in plans]
    campaign = outline.campaign
    return msgspec.structs.replace(campaign, plan=msgspec.structs.replace(campaign.plan, hosts=hosts))


def _settings(outline: Outline) -> dict[str, dict[str, str]]:
    """Host → what it ran on, of those with records, one host's records at a time. Raises UnusableInput as analyze."""
    directory = outline.directory
    refuse_runs_without_record(directory)
    outline.refuse_strangers()
    found = {}
    for host in outline.hosts:
        campaign, digest = outline.of(host)
        if records := read_host_records(directory, host, campaign, {host: digest}):
            found[host] = settings_of(records, campaign.plan.protocol.control)
    return found


def _refuse_stopped(parts: Sequence[Path]) -> None:
    for part in parts:
        if (stopped := read_stopped(part)) is not None:
            raise UnusableInput(
                f"{part} {stopped.reason.partition(';')[0]}, so it is no part of a whole campaign; run that part anew: "
                f"of the fleet the other parts alone say nothing."
            )


def _refuse_other_pins(
    parts: Sequence[Path], settings: Sequence[Mapping[str, Mapping[str, str]]], may_differ: Sequence[str]
) -> None:
    """Raise UnusableInput where the hosts of parts differ in what hosts of one campaign must have alike.

    What the hosts of one part differ in, its preflight was told that they may.
    """
    for name, setting in ALIKE.items():
        values = [_values(of_part.values(), setting) for of_part in settings]
        told = [(part, found) for part, found in zip(parts, values, strict=True) if found]
        if name in may_differ or any(len(found) > 1 for _, found in told):
            continue
        if len({next(iter(found)) for _, found in told}) > 1:
            said = ", ".join(f"{next(iter(found))} in {part}" for part, found in told)
            raise UnusableInput(
                f"the parts differ in {name}: {said}; the preflight of one campaign would have refused that. Run them "
                f"on one {name}, or give --may-differ {name} where it makes no difference."
            )


def _values(settings: Iterable[Mapping[str, str]], name: str) -> set[str]:
    return {of_host[name] for of_host in settings if name in of_host}


def _refuse_unlike(parts: Sequence[Path], campaigns: Sequence[Campaign]) -> None:
    first = campaigns[0]
    for part, campaign in zip(parts, campaigns, strict=True):
        for name, one, other in (
            ("protocol", _as_chosen(first.plan.protocol), _as_chosen(campaign.plan.protocol)),
            ("seed", first.plan.seed, campaign.plan.seed),
            ("own_hit_share", first.own_hit_share, campaign.own_hit_share),
            ("prices", first.prices, campaign.prices),
        ):
            if one != other:
                raise UnusableInput(
                    f"{part} has another {name} than {parts[0]}; parts of one campaign are run with the same settings."
                )
    owners: dict[str, Path] = {}
    for part, campaign in zip(parts, campaigns, strict=True):
        for host in campaign.plan.hosts:
            if host.host in owners:
                raise UnusableInput(
                    f"host {host.host} is in {owners[host.host]} and in {part}; parts of one campaign share no host."
                )
            owners[host.host] = part


def _as_chosen(protocol: Protocol) -> list[Any]:
    """Of a protocol what parts of one campaign have alike: not the sizes, which are those of the host that tells it."""
    traces = {work.file for work in (protocol.workloads or {}).values() if isinstance(work, Trace)}
    return [protocol.name, protocol.ladder, traces, *declared(protocol)]


def _telling(campaigns: Sequence[Campaign]) -> Protocol:
    """The protocol of the part with the host that would tell it to one controller: see plan.make_plan."""

    def queues(host: HostPlan) -> bool:
        return any(phase.block == QUEUEING for run in host.runs for phase in run.phases)

    told = [(queues(host), host.host, campaign) for campaign in campaigns for host in campaign.plan.hosts]
    return min(told, key=lambda host: host[:2])[2].plan.protocol


def _parts(campaign: Campaign) -> dict[str, dict[str, str]]:
    """The campaigns that its hosts' records bear → when each was made, and its night where it was told one."""
    own = {name: campaign.provenance[name] for name in ("created_at_utc", "night") if name in campaign.provenance}
    return campaign.provenance.get("parts") or {campaign.campaign: own}


def together(campaigns: Sequence[Campaign], name: str) -> Campaign:
    """The campaign that has all hosts of `campaigns`, called `name`; each host's records keep the id they have."""
    first = campaigns[0]
    hosts = sorted((host for campaign in campaigns for host in campaign.plan.hosts), key=lambda host: host.host)
    plan: Plan = msgspec.structs.replace(
        first.plan,
        protocol=_telling(campaigns),
        hosts=hosts,
        estimates={h: e for campaign in campaigns for h, e in campaign.plan.estimates.items()},
    )
    asked = [campaign.asked for campaign in campaigns if campaign.asked is not None]
    return msgspec.structs.replace(
        first,
        campaign=name,
        plan=plan,
        plan_sha256=plan_sha256(plan),
        protocol_sha256=plan_sha256(plan.protocol),
        pins={h: pins for campaign in campaigns for h, pins in campaign.pins.items()},
        provenance={
            **first.provenance,
            "merged_of": [campaign.campaign for campaign in campaigns],
            "parts": {name: made for campaign in campaigns for name, made in _parts(campaign).items()},
        },
        asked=msgspec.structs.replace(asked[0], hosts={h: s for part in asked for h, s in part.hosts.items()})
        if asked
        else None,
        campaign_of={
            host.host: campaign.campaign_of.get(host.host, campaign.campaign)
            for campaign in campaigns
            for host in campaign.plan.hosts
        },
        # Each part was a command of its own.
        command=[],
    )
