"""Known defects of vLLM versions, matched against launches, pages of /metrics, a host and log lines.

What a defect takes is data (`data/hazards.yml`); here is only how it is asked. See `predicates` for conditions and
`hazardfacts` for the facts that they name.
"""

import datetime
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Literal

import msgspec

from kvtrial.record.hazardfacts import DEFAULT_SPEC, Backend, launch_facts
from kvtrial.record.launch import Started, parse_vllm_args
from kvtrial.record.predicates import Condition, Facts, holds, holds_any, named
from kvtrial.record.versions import NEWEST_READ, data, within

__all__ = [
    "DEFAULT_SPEC", "Action", "Backend", "Concern", "Guard", "Hazard", "HazardHit", "HazardTable", "Sighting", "Watch",
    "WatchHit", "all_hazards", "facts_seen", "hazards_for", "hazards_of", "hazards_sighted", "watch_log",
]  # fmt: skip

Action = Literal["block", "guard", "watch"]
Concern = Literal["preemptions", "offload", "cold", "answers"]
State = Literal["seen", "applies", "guarded", "possible"]


class Guard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What makes a hazard harmless when it is set in every arm."""

    args: list[str] = []
    env: dict[str, str] = {}


class Watch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What looks out for a hazard: expressions on log lines, conditions on facts, and other parts of a trial."""

    log: list[str] = []
    facts: list[Condition] = []
    others: list[Literal["deadlock_watch", "requests_complete", "engine_fault"]] = []


class Hazard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of `data/hazards.yml`. Holds for `since` <= version < `until`.

    `when`: the configuration it takes, one of several conditions. `concerns`: it matters only to trials that claim one
    of these. `about`: a defect spoils a run; a reading misleads whoever reads the numbers, and spoils nothing.
    `said_as`: the class under which `kvtrial check` says the same by itself. `do`: what avoids it, in a sentence.
    """

    id: str
    title: str
    when: Condition | list[Condition]
    action: Action
    symptom: str
    do: str
    source: str
    date_read: datetime.date
    since: str | None = None
    until: str | None = None
    concerns: list[Concern] | None = None
    about: Literal["defect", "reading"] = "defect"
    guard: Guard | None = None
    watch: Watch = Watch()
    said_as: str | None = None

    @property
    def configurations(self) -> list[Condition]:
        """The configurations it takes, any one of them."""
        return self.when if isinstance(self.when, list) else [self.when]


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


class Sighting(msgspec.Struct, frozen=True):
    """A hazard of a server as found. `evidence`: the line, or the facts with their values.

    `seen`: its log line or its numbers are there. `applies`: the version and the configuration are those it takes, and
    nothing of it was seen. `guarded`: as applies, and its guard is set. `possible`: the version is, the configuration
    is not known.
    """

    hazard: Hazard
    state: State
    evidence: str


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
    known: Facts | None = None,
) -> list[HazardHit]:
    """Hazards that at least one arm meets, in the order of the table.

    A guard counts only if it is set in all arms: set in one it would be a difference between them. A guard hazard is
    met by what the arms would be without the guard, so a guarded one is listed too, as guarded. `concerns`: what the
    trial claims; by default everything. `known`: what is known beside the launches, of a host or a model.
    """
    claimed = set(concerns)
    hits = []
    for hazard in hazards_of(version):
        if hazard.concerns is not None and not claimed.intersection(hazard.concerns):
            continue
        met = [name for name, launch in launches.items() if _meets(hazard, launch, version, backend, known)]
        guard = hazard.guard
        unset = [name for name, launch in launches.items() if guard is not None and not _is_guarded(launch, guard)]
        if met:
            guarded = guard is not None and not unset
            hits.append(HazardHit(hazard, met, hazard.action, guarded, _detail(hazard, met, unset)))
    return hits


def hazards_sighted(
    version: str | None,
    launch: Started | None,
    known: Iterable[Facts],
    lines: Iterable[str] = (),
    backend: Backend | None = None,
) -> list[Sighting]:
    """Hazards of one running server, in the order of the table.

    `launch`: its argv and environment, None where they are not known. `known`: facts of its pages and its host; with
    several engines one set for each, any of which may show a hazard. `version` None: only what is seen is told.
    """
    sets = list(known) or [Facts({})]
    in_log: dict[str, WatchHit] = {}
    for hit in watch_log(lines, version):
        in_log.setdefault(hit.hazard, hit)
    among = hazards_of(version) if version is not None else all_hazards()
    found = (_sighted(hazard, version, launch, sets, in_log.get(hazard.id), backend) for hazard in among)
    return [sighting for sighting in found if sighting is not None]


def _sighted(
    hazard: Hazard,
    version: str | None,
    launch: Started | None,
    known: list[Facts],
    hit: WatchHit | None,
    backend: Backend | None,
) -> Sighting | None:
    bare = Facts({}) if launch is None else _unguarded(launch, hazard, version or NEWEST_READ, backend)
    sets = [bare.also(facts) for facts in known]
    configured = [holds_any(hazard.configurations, facts) for facts in sets]
    possible = [facts for facts, answer in zip(sets, configured, strict=True) if answer is not False]
    if not possible:
        return None
    if hit is not None:
        return Sighting(hazard, "seen", f"log line {hit.line_number}: {hit.line}")
    if launch is not None and hazard.guard is not None and _is_guarded(launch, hazard.guard):
        return Sighting(hazard, "guarded", _settings(hazard.guard))
    numbers = next((said for facts in possible if (said := facts_seen(hazard, facts))), "")
    if numbers:
        return Sighting(hazard, "seen", numbers)
    if version is None:
        return None
    met = next((facts for facts, answer in zip(sets, configured, strict=True) if answer), None)
    return Sighting(hazard, "possible", "") if met is None else Sighting(hazard, "applies", _met_by(hazard, met))


def facts_seen(hazard: Hazard, facts: Facts) -> str:
    """The numbers by which a hazard's condition on facts holds, for people; empty where none does or is known to."""
    return next((named(condition, facts) for condition in hazard.watch.facts if holds(condition, facts)), "")


def watch_log(lines: Iterable[str], version: str | None) -> list[WatchHit]:
    """Lines that a watch of this version knows (None: of any); one hit a line and hazard."""
    among = hazards_of(version) if version is not None else all_hazards()
    watched = [(hazard, [_compiled(pattern) for pattern in hazard.watch.log]) for hazard in among if hazard.watch.log]
    # A log may be large, and nearly every line is of no interest: one expression sorts these out.
    any_of_them = _compiled("|".join(f"(?:{pattern})" for hazard, _ in watched for pattern in hazard.watch.log))
    hits = []
    for number, line in enumerate(lines, start=1):
        if not watched or not any_of_them.search(line):
            continue
        for hazard, patterns in watched:
            if any(pattern.search(line) for pattern in patterns):
                hits.append(WatchHit(hazard.id, hazard.title, number, line.rstrip("\n")))
    return hits


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _meets(hazard: Hazard, launch: Started, version: str, backend: Backend, known: Facts | None) -> bool:
    facts = _unguarded(launch, hazard, version, backend)
    return holds_any(hazard.configurations, facts if known is None else facts.also(known)) is True


def _unguarded(launch: Started, hazard: Hazard, version: str, backend: Backend | None) -> Facts:
    """Facts of a launch as it would be without the hazard's guard: whoever sets that is one that needs it."""
    guard = hazard.guard or Guard()
    return launch_facts(launch, version, backend, parse_vllm_args(guard.args).options, guard.env)


def _is_guarded(launch: Started, guard: Guard) -> bool:
    wanted, options = parse_vllm_args(guard.args).options, parse_vllm_args(launch.argv).options
    return all(options.get(name) == value for name, value in wanted.items()) and all(
        launch.env.get(name) == value for name, value in guard.env.items()
    )


def _settings(guard: Guard) -> str:
    return " ".join([*guard.args, *(f"{name}={value}" for name, value in guard.env.items())])


def _met_by(hazard: Hazard, facts: Facts) -> str:
    return next((named(condition, facts) for condition in hazard.configurations if holds(condition, facts)), "")


def _detail(hazard: Hazard, met: list[str], unset: list[str]) -> str:
    text = f"{hazard.title} ({hazard.source}); concerns {', '.join(met)}."
    if hazard.guard is None:
        return text
    settings = _settings(hazard.guard)
    return (
        f"{text} {settings} is set in every arm."
        if not unset
        else f"{text} Set {settings} in every arm; it is missing in {', '.join(unset)}."
    )
