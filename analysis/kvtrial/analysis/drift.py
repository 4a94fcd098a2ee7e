"""What a host is, as far as it may explain its numbers: pins and settings in words, and where hosts or nights differ.

Names are those of a verdict's pins where there is one. Values are texts; what a host does not tell has no entry. Pure.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from kvtrial.record.record import RunRecord

SETTINGS = (
    "workload", "driver", "kernel", "vllm", "vllm_lock", "model", "model_revision", "clocks_max_sm_mhz",
    "clocks_application_mhz", "power_limit_watts", "ecc_mode", "gpu_mhz_at_work", "governor",
    "persistence_mode", "mig_mode", "gpu", "gpu_memory", "cpu", "cpus", "transparent_hugepages", "clock_source", "os",
    "python", "kvtrial", "control_launch",
)  # fmt: skip
"""Pins and settings, the likelier cause first."""
MEASURED = ("gpu_mhz_at_work",)
"""Of SETTINGS what was measured: nothing else tells clocks that are locked. It differs beyond a tolerance."""
WORKLOAD = "workload"
"""Of SETTINGS what was sent, as `workload_of` tells it."""
_DRAWN_ANEW = ("salt", "seed", "token_seed", "file")
"""Of a plan what makes its prompts others without making them unlike."""
ALIKE = {
    "driver": "driver", "kernel": "kernel", "engine_lock": "vllm_lock", "model": "model_revision", "gpu": "gpu",
    "governor": "governor", "persistence_mode": "persistence_mode",
}  # fmt: skip
"""In what the hosts of one campaign are alike, by the preflight's names, and the settings that tell it."""
NAMED_HOSTS = 3
"""As many hosts are named of those that have a value of their own."""
CLOCK_TOLERANCE_SHARE = 0.05
FOREIGN_TOLERANCE_PERCENT = 5.0
_OF_GPU = {
    "gpu": "name", "gpu_memory": "memory.total", "clocks_max_sm_mhz": "clocks.max.sm",
    "clocks_application_mhz": "clocks.applications.graphics", "power_limit_watts": "power.limit",
    "ecc_mode": "ecc.mode.current", "persistence_mode": "persistence_mode",
    "mig_mode": "mig.mode.current",
}  # fmt: skip


def settings_of(records: Sequence[RunRecord], control: str) -> dict[str, str]:
    """Pins and settings of one host over its runs, in the order of SETTINGS; values that runs differ in stand together.

    `control_launch`: the first digits of a digest over the control's command line and environment.
    """
    found: dict[str, dict[str, None]] = {}

    def say(name: str, value: object) -> None:
        if value not in (None, "", []):
            found.setdefault(name, {})[str(value)] = None

    for record in records:
        conditions, resolved = record.conditions, record.resolved
        say("driver", conditions.driver_version)
        say("kernel", conditions.kernel)
        say("vllm", resolved.vllm_version if resolved else record.vllm_version_pinned)
        say("vllm_lock", resolved.packages_sha256[:12] if resolved else None)
        say("model", record.model.name)
        say("model_revision", record.model.revision)
        for name, field in _OF_GPU.items():
            say(name, " + ".join(dict.fromkeys(gpu[field] for gpu in conditions.gpus if gpu.get(field))))
        say("governor", conditions.governor)
        say("cpu", conditions.cpu_model)
        say("cpus", conditions.cpus)
        say("transparent_hugepages", conditions.transparent_hugepages)
        say("clock_source", conditions.clock_source)
        say("os", conditions.os)
        say("python", conditions.python)
        say("kvtrial", record.kvtrial_version)
        if record.arm == control:
            launch = json.dumps([record.launch.argv, record.launch.env], sort_keys=True)
            say("control_launch", hashlib.sha256(launch.encode()).hexdigest()[:12])
    if (clock := measured_of(records).get("gpu_mhz")) is not None:
        say("gpu_mhz_at_work", f"{clock:.0f}")
    return {name: ", ".join(sorted(found[name])) for name in SETTINGS if name in found}


def workload_of(plan: Mapping[str, Any], control: str, sizes: Mapping[str, object]) -> str:
    """What a host's planned runs send: the first digits of a digest, then the sizes by name; empty where it isn't told.

    Of the control's first run the phases, with the tokens and counts of their prompts, concurrency, arrivals and trace,
    without salts and seeds of tokens; those of an arm that sends others; and the arms' tiers. `plan`: the host's part,
    as its text has it.
    """
    sent: dict[str, Any] = {}
    for run in plan["runs"]:
        sent.setdefault(str(run["arm"]), _as_sent(run["phases"]))
    own = sent.get(control)
    if not own:
        return ""
    unlike = {arm: phases for arm, phases in sent.items() if arm == control or phases != own}
    tiers = [plan["capacity"][name] for name in ("tier_bytes", "chunk_tokens")]
    text = json.dumps([unlike, tiers], sort_keys=True)
    named = ", ".join(f"{name}={value}" for name, value in sorted(sizes.items()))
    return f"{hashlib.sha256(text.encode()).hexdigest()[:12]} {named}".rstrip()


def digest_of_workload(told: str) -> str:
    """Of what `workload_of` told, the digest alone."""
    return told.partition(" ")[0]


def _as_sent(part: Any) -> Any:
    if isinstance(part, Mapping):
        return {name: _as_sent(value) for name, value in part.items() if name not in _DRAWN_ANEW}
    return [_as_sent(value) for value in part] if isinstance(part, list) else part


def _unlike_sizes(was: str, now: str) -> tuple[str, str]:
    """The sizes in which two workloads differ; where none does, their digests."""
    before, after = (dict.fromkeys(told.partition(" ")[2].split(", ")) for told in (was, now))
    said = [", ".join(size for size in one if size not in other) for one, other in ((before, after), (after, before))]
    return (said[0], said[1]) if all(said) else (digest_of_workload(was), digest_of_workload(now))


def measured_of(records: Sequence[RunRecord]) -> dict[str, float]:
    """Clocks (median over the runs), foreign CPU and throttled runs of one host."""
    samples = [record.samples for record in records if record.samples is not None]
    found = {
        "gpu_mhz": [s.gpu_mhz_median for s in samples if s.gpu_mhz_median is not None],
        "cpu_mhz": [s.cpu_mhz_median for s in samples if s.cpu_mhz_median is not None],
        "foreign_cpu_percent": [100 * s.foreign_cpu_share for s in samples],
    }
    values = {name: float(median(listed)) for name, listed in found.items() if listed}
    throttled = [s.throttle_events > 0 for s in samples if s.throttle_events is not None]
    return values | ({"throttled_runs": float(sum(throttled))} if throttled else {})


def likely_causes(
    host: str, settings: Mapping[str, Mapping[str, str]], measured: Mapping[str, Mapping[str, float]]
) -> list[str]:
    """In what a host differs from most of the others, the likelier cause first: settings, then what was measured.

    A setting counts where more than half of the other hosts that tell it have one value and this host has another.
    What no other host shares comes first. None of it is proof: it is where to look.
    """
    others = [name for name in settings if name != host]
    alone: list[str] = []
    shared: list[str] = []
    for name in (name for name in SETTINGS if name not in MEASURED):
        mine = settings[host].get(name)
        theirs = Counter(settings[other][name] for other in others if name in settings[other])
        if mine is None or not theirs:
            continue
        usual, count = theirs.most_common(1)[0]
        if mine != usual and 2 * count > theirs.total():
            (shared if mine in theirs else alone).append(
                f"{name} {mine}, {usual} on {count} of {theirs.total()} other hosts"
            )
    return [*alone, *shared, *_unlike(host, others, measured)]


def differences(settings: Mapping[str, Mapping[str, str]]) -> list[str]:
    """In what the hosts of a campaign are not alike though they should be, a sentence each: values, and who has them.

    `settings`: host → what it ran on. The preflight refuses such hosts unless it was told that they may differ.
    """
    said = []
    for name, setting in ALIKE.items():
        having: dict[str, list[str]] = {}
        for host, told in settings.items():
            if setting in told:
                having.setdefault(told[setting], []).append(host)
        if len(having) < 2:
            continue
        ordered = sorted(having.items(), key=lambda item: -len(item[1]))
        values = [f"{ordered[0][0]} ({len(ordered[0][1])})"] + [
            f"{value} ({len(hosts)}: {', '.join(hosts[:NAMED_HOSTS])}{', …' if len(hosts) > NAMED_HOSTS else ''})"
            for value, hosts in ordered[1:]
        ]
        said.append(f"hosts differ in {name}: {', '.join(values)}; the verdict is over hosts that are not alike")
    return said


def _unlike(host: str, others: Sequence[str], measured: Mapping[str, Mapping[str, float]]) -> list[str]:
    said = []
    for name, far in _FAR.items():
        mine = measured.get(host, {}).get(name)
        theirs = [measured[other][name] for other in others if name in measured.get(other, {})]
        if mine is not None and theirs and far(mine, median(theirs)):
            said.append(f"{name} {mine:.4g}, median of the other hosts {median(theirs):.4g}")
    return said


def _clock_is_far(mine: float, usual: float) -> bool:
    return abs(mine - usual) > CLOCK_TOLERANCE_SHARE * usual


_FAR: dict[str, Callable[[float, float], bool]] = {
    "gpu_mhz": _clock_is_far,
    "cpu_mhz": _clock_is_far,
    "foreign_cpu_percent": lambda mine, usual: mine - usual > FOREIGN_TOLERANCE_PERCENT,
    "throttled_runs": lambda mine, usual: mine > usual,
}


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """name → (was, is) of the settings that differ, in the order of SETTINGS; "not told" where one side lacks it."""
    names: Iterable[str] = [name for name in SETTINGS if name in before or name in after]
    found = {
        name: (before.get(name, "not told"), after.get(name, "not told"))
        for name in names
        if _differ(name, before.get(name), after.get(name))
    }
    return found | ({WORKLOAD: _unlike_sizes(*found[WORKLOAD])} if WORKLOAD in found else {})


def _differ(name: str, was: str | None, now: str | None) -> bool:
    """Whether a setting changed. Of a measured one, beyond the tolerance, and where both nights tell it."""
    if name == WORKLOAD:
        return digest_of_workload(was or "") != digest_of_workload(now or "")
    if name not in MEASURED:
        return was != now
    return was is not None and now is not None and _clock_is_far(float(now), float(was))
