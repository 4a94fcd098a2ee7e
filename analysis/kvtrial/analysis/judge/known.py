"""Known defects of the version that a result set was made with: the catalogue, asked as the gate `hazards` asks it."""

from collections.abc import Iterator

import msgspec

from kvtrial.analysis.judge.results import ARMS, Results, Run
from kvtrial.analysis.observe.configuration import likely_backend
from kvtrial.analysis.observe.finding import Finding
from kvtrial.analysis.observe.words import listed, whole
from kvtrial.record.errors import UnusableInput
from kvtrial.record.hazardfacts import launch_facts
from kvtrial.record.hazards import Concern, Hazard, facts_seen, hazards_for, hazards_sighted
from kvtrial.record.launch import ArmLaunch, parse_vllm_args, tier_of
from kvtrial.record.predicates import Facts
from kvtrial.record.versions import NEWEST_READ, hazards_not_read, is_newer_than_read, outside_read_range, release

_COUNTED = {
    "preemptions": "preemptions",
    "load_bytes": "load_bytes",
    "store_bytes": "store_bytes",
    "external_hit_tokens": "external_prefix_cache_hits_tokens",
    "local_hit_tokens": "prefix_cache_hits_tokens",
}
"""What a run states -> its role in `data/metrics.yml`."""
_NO_MATTER_OF_RESULTS = {"dev_mode_exposed"}
_ORDER = ("seen", "applies", "guarded", "possible")


class Met(msgspec.Struct, frozen=True):
    """A known defect that arms of a set meet. `state`: as of Sighting; `stated`: whether their launches are."""

    hazard: Hazard
    state: str
    arms: list[str]
    evidence: str
    stated: bool

    @property
    def blocks(self) -> bool:
        """Whether the gate `hazards` lets no trial through with it; an unknown launch may hold the guard."""
        met = self.state in ("seen", "applies")
        return met and (self.hazard.action == "block" or (self.hazard.action == "guard" and self.stated))

    @property
    def spoils_preemptions(self) -> bool:
        """Whether it was seen by preemptions, so that their counts are those of a defect."""
        return self.state == "seen" and "preemptions" in self.evidence


def hazards_met(results: Results) -> list[Met]:
    """Defects of the set's version that its arms meet or may meet, those seen first; none where that is not known.

    Launches that are stated are asked as the gate does. Else the series that a run has say whether it had a connector.
    """
    version = results.vllm_version
    if version is None or _unreadable(version):
        return []
    newer = is_newer_than_read(version)
    if outside_read_range(version) and not newer:
        return []
    asked = NEWEST_READ if newer else version
    found = _of_launches(results, asked) if results.launches else _of_series(results, asked)
    met = [one for one in found if one.hazard.about == "defect" and one.hazard.said_as not in _NO_MATTER_OF_RESULTS]
    if newer:
        met = [msgspec.structs.replace(one, state="possible") for one in met]
    return sorted(met, key=lambda one: _ORDER.index(one.state))


def refused(results: Results, said: set[str]) -> Iterator[Finding]:
    """Findings on defects with which this project's own trial would be INVALID; not those `said` by another class."""
    for one in hazards_met(results):
        counts = one.spoils_preemptions and "preemptions" in results.metric
        if (one.blocks or counts) and one.hazard.said_as not in said:
            yield _finding(results, one, "version_hazard", "refuse")


def warned(results: Results) -> Iterator[Finding]:
    """Findings on defects that the runs' numbers show and that refuse nothing."""
    for one in hazards_met(results):
        if one.state == "seen" and not one.blocks:
            yield _finding(results, one, "version_hazard_seen", "warn")


def notes(results: Results) -> list[str]:
    """What of the version's defects was not looked for, and which can be neither said nor ruled out."""
    version = results.vllm_version
    if version is None:
        return ["vllm_version is not stated: known defects of the version were not looked for."]
    if _unreadable(version):
        return [
            f"vllm_version {version!r} can't be read as a version: known defects were not looked for"
            + (", nor were the launches checked" if results.launches else "")
            + ". State what /version prints, such as 0.32.0."
        ]
    found = [f"{outside_read_range(version)} {unread}"] if (unread := hazards_not_read(version)) else []
    possible = [
        one.hazard.id
        for one in hazards_met(results)
        if one.state == "possible" and one.hazard.action in ("block", "guard")
    ]
    if possible:
        found.append(
            f"Defects of vLLM {version} with which a trial is refused, and that can't be ruled out without the arms' "
            f"`launches`: {listed(possible, 8)} (`kvtrial hazards --vllm {version}`)."
        )
    return found


def unreadable_version(results: Results) -> bool:
    """Whether a version is stated that names none, such as `nightly`."""
    return results.vllm_version is not None and _unreadable(results.vllm_version)


def _unreadable(version: str) -> bool:
    try:
        release(version)
    except UnusableInput:
        return True
    return False


def _finding(results: Results, one: Met, class_: str, severity: str) -> Finding:
    hazard = one.hazard
    counts = {arm: sum(getattr(pair, arm).preemptions or 0 for pair in results.pairs) for arm in ARMS}
    untrusted = (
        f" The counts of preemptions (control {whole(counts['control'])}, variant {whole(counts['variant'])}) are not "
        "to be trusted, and what they cost is in the times."
        if one.spoils_preemptions
        else ""
    )
    how = "blocked by the gate on known defects" if severity == "refuse" else "a known defect shows"
    return Finding(
        class_,
        "refuse" if severity == "refuse" else "warn",
        f"vLLM {results.vllm_version}, {listed(one.arms)}: {how}: {hazard.id}, {hazard.title} ({hazard.source}). "
        f"{hazard.symptom}" + (f" By: {one.evidence}." if one.evidence else "") + untrusted,
        {"hazard": hazard.id, "since": hazard.since, "until": hazard.until, "state": one.state, "arms": one.arms}
        | ({"preemptions": counts} if one.spoils_preemptions else {}),
        hazard.do,
        "seen" if one.state == "seen" or one.stated else "inferred",
    )


def _of_launches(results: Results, version: str) -> Iterator[Met]:
    launches = {
        arm: ArmLaunch([str(word) for word in spec["args"]], {str(k): str(v) for k, v in spec["env"].items()})
        for arm, spec in results.launches.items()
    }
    backend = likely_backend([], {name: value for launch in launches.values() for name, value in launch.env.items()})
    offload = any(tier_of(parse_vllm_args(launch.argv), launch.env, version) for launch in launches.values())
    for hit in hazards_for(version, launches, backend, _concerns(results, offload)):
        shown = "" if hit.guarded else _shown(results, hit.hazard, hit.applies_to_arms, launches, version)
        state = "guarded" if hit.guarded else "seen" if shown else "applies"
        yield Met(hit.hazard, state, hit.applies_to_arms, shown, True)


def _shown(results: Results, hazard: Hazard, arms: list[str], launches: dict[str, ArmLaunch], version: str) -> str:
    for arm in arms:
        launch = launch_facts(launches[arm], version)
        for pair in results.pairs:
            if said := facts_seen(hazard, launch.also(_counted(getattr(pair, arm)))):
                return f"pair {pair.name}, {arm}: {said}"
    return ""


def _of_series(results: Results, version: str) -> Iterator[Met]:
    connectors = {arm: _connector(results, arm) for arm in ARMS}
    if not any(connectors.values()) and results.arms_identical:
        return
    concerns = _concerns(results, any(connectors.values()))
    found: dict[str, Met] = {}
    for arm in ARMS if all(connectors.values()) else ("variant",):
        known = [_of_run(results, pair_run, connectors[arm]) for pair_run in _runs(results, arm)]
        for one in hazards_sighted(version, None, known):
            limits = one.hazard.concerns
            if limits is not None and not set(limits) & set(concerns):
                continue
            before = found.get(one.hazard.id)
            if before is None or _ORDER.index(one.state) < _ORDER.index(before.state):
                found[one.hazard.id] = Met(one.hazard, one.state, [arm], one.evidence, False)
            elif before.state == one.state and arm not in before.arms:
                found[one.hazard.id] = msgspec.structs.replace(before, arms=[*before.arms, arm])
    yield from found.values()


def _runs(results: Results, arm: str) -> list[Run]:
    return [getattr(pair, arm) for pair in results.pairs]


def _of_run(results: Results, run: Run, connector: str | None) -> Facts:
    if connector is not None:
        return Facts({"connector": connector}).also(_counted(run))
    # Without a connector's series a count of preemptions points at one only where it rose in the variant alone.
    rose = sum(one.preemptions or 0 for one in _runs(results, "variant")) > sum(
        one.preemptions or 0 for one in _runs(results, "control")
    )
    return _counted(run) if rose else Facts({})


def _connector(results: Results, arm: str) -> str | None:
    """The connector that an arm had, by the series that its runs state; None where they tell of none."""
    runs = _runs(results, arm)
    if any(run.load_bytes is not None or run.store_bytes is not None for run in runs):
        return "OffloadingConnector"
    # External hits without the series of loads: some connector, and not vLLM's own as far as is stated.
    return "unnamed" if any(run.external_hit_tokens for run in runs) else None


def _counted(run: Run) -> Facts:
    stated = {role: getattr(run, field) for field, role in _COUNTED.items()}
    return Facts({f"delta.{role}": value for role, value in stated.items() if value is not None})


def _concerns(results: Results, offload: bool) -> list[Concern]:
    """As the gate `hazards` takes them from a protocol: what is compared, and whether a tier is."""
    concerns: list[Concern] = ["preemptions"] if "preemptions" in results.metric else []
    return [*concerns, "offload", "answers"] if offload else concerns
