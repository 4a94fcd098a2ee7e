"""Known defects of vLLM versions, matched against the arms of a trial and against log lines."""

import datetime
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Literal

import msgspec

from kvtrial.record.launch import ParsedArgs, Started, Tier, async_scheduling, parse_vllm_args, tier_of
from kvtrial.record.versions import data, within

Action = Literal["block", "guard", "watch"]
Backend = Literal["cpu", "cuda"]
Concern = Literal["preemptions", "offload", "cold", "answers"]
DEFAULT_SPEC = "CPUOffloadingSpec"


class Condition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What must hold in an arm, all of it.

    `args_any`: an option that is given, or `option>N`. `concerns`: what the trial claims.
    """

    connector: list[str] | None = None
    async_scheduling: bool | None = None
    backend: Backend | None = None
    spec_default: bool | None = None
    args_any: list[str] | None = None
    env_any: list[str] | None = None
    concerns: list[Concern] | None = None


class Guard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What makes a hazard harmless when it is set in every arm."""

    args: list[str] = []
    env: dict[str, str] = {}


class Watch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What looks out for a hazard: expressions on log lines, and other parts of a trial."""

    log: list[str] = []
    others: list[Literal["deadlock_watch", "requests_complete", "engine_fault"]] = []


class Hazard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of `data/hazards.yml`. Holds for `since` <= version < `until`."""

    id: str
    title: str
    when: Condition
    action: Action
    symptom: str
    source: str
    date_read: datetime.date
    since: str | None = None
    until: str | None = None
    guard: Guard | None = None
    watch: Watch = Watch()


class HazardTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`data/hazards.yml`."""

    hazards: list[Hazard]


class HazardHit(msgspec.Struct, frozen=True):
    """A hazard that some arm meets. `guarded`: its guard is set in every arm, also in those that don't meet it."""

    hazard: Hazard
    applies_to_arms: list[str]
    action: Action
    guarded: bool
    detail: str


class WatchHit(msgspec.Struct, frozen=True):
    """A log line that a watch knows. `line_number` counts from 1."""

    hazard: str
    title: str
    line_number: int
    line: str


class _Arm(msgspec.Struct, frozen=True):
    parsed: ParsedArgs
    env: Mapping[str, str]
    tier: Tier | None


def all_hazards() -> list[Hazard]:
    """Every entry of the table."""
    return data("hazards", HazardTable).hazards


def hazards_of(version: str) -> list[Hazard]:
    """Entries that hold for a version, whatever the arms."""
    return [hazard for hazard in all_hazards() if within(version, hazard.since, hazard.until)]


def hazards_for(
    version: str,
    launches: Mapping[str, Started],
    backend: Backend = "cuda",
    concerns: Iterable[Concern] = ("preemptions", "offload", "cold", "answers"),
) -> list[HazardHit]:
    """Hazards that at least one arm meets, in the order of the table.

    A guard counts only if it is set in all arms: set in one it would be a difference between them. A guard hazard is
    met by what the arms would be without the guard, so a guarded one is listed too, as guarded. `concerns`: what the
    trial claims; by default everything.
    """
    arms = {name: _arm(launch, version) for name, launch in launches.items()}
    claimed = set(concerns)
    hits = []
    for hazard in hazards_of(version):
        if hazard.when.concerns is not None and not claimed.intersection(hazard.when.concerns):
            continue
        met = [name for name, arm in arms.items() if _meets(arm, hazard, version, backend)]
        unset = [name for name, arm in arms.items() if hazard.guard is not None and not _guarded(arm, hazard.guard)]
        if met:
            guarded = hazard.guard is not None and not unset
            hits.append(HazardHit(hazard, met, hazard.action, guarded, _detail(hazard, met, unset)))
    return hits


def watch_log(lines: Iterable[str], version: str) -> list[WatchHit]:
    """Lines that a watch of this version knows; one hit a line and hazard."""
    watched = [
        (hazard, [_compiled(pattern) for pattern in hazard.watch.log])
        for hazard in hazards_of(version)
        if hazard.watch.log
    ]
    hits = []
    for number, line in enumerate(lines, start=1):
        for hazard, patterns in watched:
            if any(pattern.search(line) for pattern in patterns):
                hits.append(WatchHit(hazard.id, hazard.title, number, line.rstrip("\n")))
    return hits


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _arm(launch: Started, version: str) -> _Arm:
    parsed = parse_vllm_args(launch.argv)
    return _Arm(parsed, launch.env, tier_of(parsed, launch.env, version))


def _meets(arm: _Arm, hazard: Hazard, version: str, backend: Backend) -> bool:
    when = hazard.when
    if when.backend is not None and when.backend != backend:
        return False
    if when.connector is not None and (
        arm.tier is None or not {"any", arm.tier.connector}.intersection(when.connector)
    ):
        return False
    if when.spec_default is not None and (arm.tier is None or _default_spec(arm.tier) != when.spec_default):
        return False
    # The guard is judged apart: an arm that sets it is still one that needs it.
    judged = hazard.guard is None and when.async_scheduling is not None
    if judged and async_scheduling(arm.parsed, version) != when.async_scheduling:
        return False
    if when.args_any is not None and not any(_given(arm.parsed, option) for option in when.args_any):
        return False
    return when.env_any is None or any(arm.env.get(name, "0") not in ("", "0") for name in when.env_any)


def _default_spec(tier: Tier) -> bool:
    return tier.extra.get("spec_name", DEFAULT_SPEC) == DEFAULT_SPEC and not tier.extra.get("spec_module_path")


def _given(parsed: ParsedArgs, option: str) -> bool:
    name, above, limit = option.partition(">")
    if not above:
        return name in parsed.options and parsed.options[name] is not False
    value = parsed.text(name)
    return value is not None and value.isdigit() and int(value) > int(limit)


def _guarded(arm: _Arm, guard: Guard) -> bool:
    wanted = parse_vllm_args(guard.args).options
    return all(arm.parsed.options.get(name) == value for name, value in wanted.items()) and all(
        arm.env.get(name) == value for name, value in guard.env.items()
    )


def _detail(hazard: Hazard, met: list[str], unset: list[str]) -> str:
    text = f"{hazard.title} ({hazard.source}); concerns {', '.join(met)}."
    if hazard.guard is None:
        return text
    settings = " ".join([*hazard.guard.args, *(f"{name}={value}" for name, value in hazard.guard.env.items())])
    return (
        f"{text} {settings} is set in every arm."
        if not unset
        else f"{text} Set {settings} in every arm; it is missing in {', '.join(unset)}."
    )
