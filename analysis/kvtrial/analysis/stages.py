"""A campaign in stages (one host, a tenth, all): whether what came back so far forbids to go on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from kvtrial.analysis.hostverdict import without_effect
from kvtrial.analysis.recommend import recommend
from kvtrial.record.plan import Plan
from kvtrial.record.record import RunRecord
from kvtrial.record.store import write_atomically
from kvtrial.record.verdict import Verdict

STOPPED = "stopped.json"
LARGEST_SHARE_INVALID = 0.2
"""Of the hosts asked so far. More could not be left out of the fleet's verdict either: four fifths must count."""
CANARY_SHARE = 0.2
"""While no larger share of the planned hosts was asked (one host, a tenth), a single INVALID is too much."""


class Stopped(Struct, frozen=True):
    """Why the hosts of later stages were not started, in one sentence, and which hosts were asked before."""

    reason: str
    asked: list[str]


def stop_sentence(verdict: Verdict, planned: int) -> str:
    """Why the other hosts are not to be started; empty where they are.

    `verdict` is over the hosts that were asked so far, `planned` counts all hosts of the campaign.
    """
    hosts = verdict.hosts
    invalid = [host for host in hosts if host.verdict == "INVALID"]
    is_canary = len(hosts) == 1 or len(hosts) <= CANARY_SHARE * planned
    if len(invalid) > (0 if is_canary else LARGEST_SHARE_INVALID * len(hosts)):
        found, first = f"{len(invalid)} of them INVALID", invalid[0]
    elif all(host.runs.valid == 0 for host in hosts):
        found, first = "none of which has a valid pair", hosts[0]
    else:
        return ""
    return (
        f"stopped after {len(hosts)} of {planned} hosts, {found} ({first.host}: {first.reason}); the others were not "
        f"started: mend that, then start anew with -e kvtrial_new_campaign=true"
    )


def remember(directory: Path, reason: str, asked: Sequence[str]) -> None:
    """Keep that the campaign stopped here; with an empty reason, that it did not."""
    if reason:
        write_atomically(directory / STOPPED, msgspec.json.encode(Stopped(reason, sorted(asked))))
    else:
        (directory / STOPPED).unlink(missing_ok=True)


def read_stopped(directory: Path) -> Stopped | None:
    """What `remember` kept; None where the campaign did not stop, or where that can't be read."""
    try:
        return msgspec.json.decode((directory / STOPPED).read_bytes(), type=Stopped)
    except (OSError, msgspec.DecodeError):
        return None


def part_of(plan: Plan, hosts: Sequence[str]) -> Plan:
    """The plan of these hosts alone."""
    return msgspec.structs.replace(plan, hosts=[host for host in plan.hosts if host.host in hosts])


def stopped_verdict(verdict: Verdict, stopped: Stopped, plan: Plan, records: dict[str, list[RunRecord]]) -> Verdict:
    """The verdict of a campaign that stopped: INVALID, whatever its few hosts gave."""
    comparisons = [without_effect(result, "INVALID", stopped.reason) for result in verdict.comparisons]
    changes: dict[str, Any] = {
        "verdict": "INVALID",
        "reason": stopped.reason,
        "comparisons": comparisons,
        "break_even": None,
        "tier_budget": None,
        "recommendation": recommend(
            plan.protocol, "INVALID", stopped.reason, verdict.evidence, comparisons,
            [record for some in records.values() for record in some],
        ),
    }  # fmt: skip
    return msgspec.structs.replace(verdict, **changes)
