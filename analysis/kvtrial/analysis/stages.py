"""A campaign in stages (one host, a tenth, all): whether what came back so far forbids to go on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from kvtrial.analysis.hostverdict import without_effect
from kvtrial.analysis.recommend import recommend
from kvtrial.record.errors import UnusableInput
from kvtrial.record.plan import Plan
from kvtrial.record.record import RunRecord
from kvtrial.record.store import write_atomically
from kvtrial.record.verdict import HostVerdict, Verdict

STOPPED = "stopped.json"
LARGEST_SHARE_INVALID = 0.2
"""Of the hosts asked so far. More could not be left out of the fleet's verdict either: four fifths must count."""
CANARY_SHARE = 0.2
"""While no larger share of the planned hosts was asked (one host, a tenth), a single INVALID is too much."""


class Stopped(Struct, frozen=True):
    """Why the hosts of later stages were not started, in one sentence, and which hosts were asked before."""

    reason: str
    asked: list[str]


def stop_sentence(hosts: Sequence[HostVerdict], planned: int, lost: Sequence[str] = ()) -> str:
    """Why the other hosts are not to be started; empty where they are.

    `hosts`: those that were asked so far and answered, `lost`: those that were asked and given up, `planned` counts all
    hosts of the campaign.
    """
    invalid = [host for host in hosts if host.verdict == "INVALID"]
    empty = [host for host in hosts if host.verdict != "INVALID" and host.runs.valid == 0]
    asked = len(hosts) + len(lost)
    is_canary = asked == 1 or asked <= CANARY_SHARE * planned
    useless = len(invalid) + len(empty) + len(lost)
    if not ((invalid and is_canary) or useless > LARGEST_SHARE_INVALID * asked):
        return ""
    counted = [(len(invalid), "INVALID"), (len(empty), "without a valid pair"), (len(lost), "lost")]
    found = ", ".join(f"{count} of them {what}" for count, what in counted if count)
    example = next((f"{host.host}: {host.reason}" for host in [*invalid, *empty]), ", ".join(lost[:1]))
    return (
        f"stopped after {asked} of {planned} hosts, {found} ({example}); the others were not "
        f"started: mend that, then start anew with -e kvtrial_new_campaign=true"
    )


def remember(directory: Path, reason: str, asked: Sequence[str]) -> None:
    """Keep that the campaign stopped here; with an empty reason, that it did not."""
    if reason:
        write_atomically(directory / STOPPED, msgspec.json.encode(Stopped(reason, sorted(asked))))
    else:
        (directory / STOPPED).unlink(missing_ok=True)


def read_stopped(directory: Path) -> Stopped | None:
    """What `remember` kept; None where the campaign did not stop. Raises UnusableInput where that can't be read."""
    path = directory / STOPPED
    try:
        return msgspec.json.decode(path.read_bytes(), type=Stopped)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise UnusableInput(
            f"{path} can't be read ({error}); it says why the campaign stopped at its canary: restore it, or start "
            f"anew."
        ) from None


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
