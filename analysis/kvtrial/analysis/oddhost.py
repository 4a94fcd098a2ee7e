"""Which host's effect departs from the others', what sets it apart, and how sure such a host would be found. Pure."""

import math
from collections.abc import Mapping, Sequence

from kvtrial.analysis.drift import likely_causes, measured_of, settings_of
from kvtrial.analysis.effect import Interval, outward
from kvtrial.analysis.fleet import LEAST_HOSTS, combine, odd_host_power, odd_hosts
from kvtrial.analysis.hostverdict import HostOutcome
from kvtrial.record.protocol import Protocol
from kvtrial.record.record import RunRecord
from kvtrial.record.verdict import OddNote

ODD_SHIFT = 1.2
ODD_FLEET = 100
"""What the power to find an odd host is printed for: one of so many hosts, off by this ratio."""


def _primary_intervals(protocol: Protocol, counted: Mapping[str, HostOutcome]) -> tuple[int, dict[str, Interval]]:
    """Index of the primary comparison (-1: none), and its interval on each host that counts and has one."""
    index = next((i for i, c in enumerate(protocol.comparisons) if c.role == "primary"), -1)
    if index < 0:
        return index, {}
    return index, {host: interval for host, o in counted.items() if (interval := o.intervals[index]) is not None}


def odd_notes(
    protocol: Protocol, counted: Mapping[str, HostOutcome], records_by_host: Mapping[str, Sequence[RunRecord]]
) -> dict[str, OddNote]:
    """The hosts whose primary effect departs from the others', with what sets them apart."""
    _, intervals = _primary_intervals(protocol, counted)
    found = odd_hosts(intervals, {host: class_of(counted[host]) for host in intervals})
    if not found:
        return {}
    settings = {host: settings_of(records_by_host.get(host, ()), protocol.control) for host in counted}
    measured = {host: measured_of(records_by_host.get(host, ())) for host in counted}
    return {odd.host: OddNote(odd.deviation, odd.p_value, likely_causes(odd.host, settings, measured)) for odd in found}


def sentences(protocol: Protocol, counted: Mapping[str, HostOutcome], odd: Mapping[str, OddNote]) -> list[str]:
    """What is said of odd hosts, and of the power to find one."""
    index, intervals = _primary_intervals(protocol, counted)
    if len(intervals) < LEAST_HOSTS:
        return []
    scale = protocol.comparisons[index].effect_scale
    said = []
    for host, note in odd.items():
        causes = "; ".join(note.likely_causes)
        cause = f"likely cause: {causes}" if causes else "nothing that is recorded sets it apart"
        said.append(
            f"{host} is the odd host: its effect {outward(intervals[host].estimate, scale):.4g} lies "
            f"{note.deviation:+.1f} standard errors from the others' (p = {note.p_value:.2g}, false discovery rate 5 % "
            f"over {len(intervals)} hosts); {cause}"
        )
    return [*said, *([power] if scale == "ratio" and (power := _power_caveat(list(intervals.values()))) else [])]


def _power_caveat(intervals: Sequence[Interval]) -> str:
    """With which power one host that is 20 % off would be named among 100 of such hosts."""
    known = [interval for interval in intervals if interval.sd is not None]
    if len(known) < LEAST_HOSTS:
        return ""
    pairs = min(interval.pairs for interval in known)
    pair_sd = math.sqrt(sum((i.pairs - 1) * (i.sd or 0.0) ** 2 for i in known) / sum(i.pairs - 1 for i in known))
    odd = {found.host for found in odd_hosts({str(n): i for n, i in enumerate(known)}, {})}
    alike = [interval for n, interval in enumerate(known) if str(n) not in odd]
    tau2 = combine(alike).tau2 if len(alike) >= LEAST_HOSTS else 0.0
    power = odd_host_power(math.log(ODD_SHIFT), pair_sd, pairs, ODD_FLEET, tau2)
    return (
        f"one host that is {ODD_SHIFT - 1:.0%} off among {ODD_FLEET} such hosts would be named with a power of "
        f"{power:.0%} ({pairs} pairs a host, pair noise {pair_sd:.1%}, spread of the hosts {math.sqrt(tau2):.1%})"
    )


def class_of(outcome: HostOutcome) -> str:
    """Hosts of one class have the same CPU and GPUs, and share the noise of a pair."""
    conditions = next(iter(outcome.pairs.valid[0].runs.values())).conditions
    return f"{conditions.cpu_model} | {', '.join(gpu.get('name', '?') for gpu in conditions.gpus)}"
