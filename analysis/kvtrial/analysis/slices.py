"""Campaigns of several controllers over parts of one inventory, put together as if one had run them all."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvtrial.analysis.campaign import Campaign, lost_hosts_of, read_campaign, read_records
from kvtrial.record.errors import UnusableInput
from kvtrial.record.plan import Plan, plan_sha256
from kvtrial.record.store import write_atomically

KEPT = ("runs", "hosts", "plans", "workloads")


def merge(parts: Sequence[Path], target: Path) -> Path:
    """Put the campaigns of `parts` together in the new folder `target`; they stay as they are. Returns `target`.

    Raises UnusableInput where they are not parts of one: another protocol or seed, a host in two of them, a record that
    is damaged; or where `target` exists.
    """
    campaigns = [read_campaign(part) for part in parts]
    for part in parts:
        read_records(part)
    _refuse_unlike(parts, campaigns)
    merged = together(campaigns, target.name)
    incoming = target.with_name(f".{target.name}.incoming")
    shutil.rmtree(incoming, ignore_errors=True)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        incoming.mkdir()
        for part in parts:
            for name in KEPT:
                if (part / name).is_dir():
                    shutil.copytree(part / name, incoming / name, dirs_exist_ok=True)
        planned = {host.host for host in merged.plan.hosts}
        lost = sorted({host for part in parts for host in lost_hosts_of(part)} - planned)
        write_atomically(incoming / "lost.json", msgspec.json.encode(lost))
        write_atomically(incoming / "campaign.json", _as_text(merged, parts))
        read_records(incoming)
        try:
            incoming.rename(target)
        except OSError as error:
            raise UnusableInput(
                f"{target} can't be made ({error.strerror}); name a folder that is not there."
            ) from None
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
    return target


def _as_text(merged: Campaign, parts: Sequence[Path]) -> bytes:
    """campaign.json of `merged`, each host's plan as its part has it: records name the digest of that very text."""
    raw = msgspec.json.decode(msgspec.json.encode(merged))
    told = [msgspec.json.decode((part / "campaign.json").read_bytes())["plan"]["hosts"] for part in parts]
    raw["plan"]["hosts"] = sorted((host for hosts in told for host in hosts), key=lambda host: str(host["host"]))
    return msgspec.json.format(msgspec.json.encode(raw), indent=1)


def _refuse_unlike(parts: Sequence[Path], campaigns: Sequence[Campaign]) -> None:
    first = campaigns[0]
    for part, campaign in zip(parts, campaigns, strict=True):
        for name, one, other in (
            ("protocol", first.plan.protocol, campaign.plan.protocol),
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


def together(campaigns: Sequence[Campaign], name: str) -> Campaign:
    """The campaign that has all hosts of `campaigns`, called `name`; each host's records keep the id they have."""
    first = campaigns[0]
    hosts = sorted((host for campaign in campaigns for host in campaign.plan.hosts), key=lambda host: host.host)
    plan: Plan = msgspec.structs.replace(
        first.plan,
        hosts=hosts,
        estimates={h: e for campaign in campaigns for h, e in campaign.plan.estimates.items()},
    )
    asked = [campaign.asked for campaign in campaigns if campaign.asked is not None]
    return msgspec.structs.replace(
        first,
        campaign=name,
        plan=plan,
        plan_sha256=plan_sha256(plan),
        pins={h: pins for campaign in campaigns for h, pins in campaign.pins.items()},
        provenance={**first.provenance, "merged_of": [campaign.campaign for campaign in campaigns]},
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
