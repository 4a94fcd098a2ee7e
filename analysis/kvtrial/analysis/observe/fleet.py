"""Many servers at once: an answer for each, and what the fleet shows together.

A folder holds one folder a server, named as people name it, with `t0.prom` ... in time order and, where they are known,
`server.log`, `facts.json` (a host's facts), `client.json` and `window.json` ({"interval_seconds": 20.0}). A server that
did not answer has `error.txt` with the reason instead of pages.
"""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvtrial.analysis.observe.answer import ORDER, Answer
from kvtrial.analysis.observe.finding import Finding
from kvtrial.analysis.observe.words import listed, plural
from kvtrial.record.errors import UnusableInput
from kvtrial.record.launch import parse_vllm_args

WELL = {"healthy_tier_serving", "no_fault_seen", "idle", "gpu_cache_answered", "parsed_per_model_and_engine"}
_OWN_TO_A_SERVER = {"port", "host", "served-model-name", "uds", "api-key", "data-parallel-rank"}


class Given(msgspec.Struct, frozen=True):
    """What a server's folder holds."""

    pages: list[Path]
    log: Path | None
    facts: Path | None
    client: Path | None
    interval_seconds: float | None
    error: str | None


class FleetAnswer(msgspec.Struct, frozen=True, rename={"class_": "class"}):
    """Answers by server and what they show together. `class_`: the gravest class that some server has."""

    schema_version: int
    verdict: str
    class_: str | None
    findings: list[Finding]
    servers: dict[str, Answer]


def servers_in(folder: Path) -> dict[str, Given]:
    """What each server's folder holds, by its name. Raises UnusableInput where there is none."""
    try:
        folders = sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError as error:
        raise UnusableInput(f"{folder} can't be read ({error.strerror}); give the folder of a fleet.") from None
    found = {path.name: _given(path) for path in folders}
    known = {name: given for name, given in found.items() if given.pages or given.error or given.facts or given.log}
    if not known:
        raise UnusableInput(
            f"{folder} holds no server; it must hold one folder a server with t0.prom, t1.prom and so on "
            f"(docs/observe.md)."
        )
    return known


def together(answers: Mapping[str, Answer]) -> FleetAnswer:
    """What the servers show together: which class where, and what differs between them."""
    found = [_overview(answers), *_versions(answers), *_options(answers), *_hazards(answers)]
    rank = {name: index for index, name in enumerate(ORDER)}
    classes = [answer.class_ for answer in answers.values() if answer.class_ and answer.class_ not in WELL]
    gravest = min(classes, key=lambda name: rank.get(name, len(rank))) if classes else None
    return FleetAnswer(
        1,
        "INVALID" if any(answer.verdict == "INVALID" for answer in answers.values()) else "report",
        gravest or next(iter(answers.values())).class_,
        found,
        dict(answers),
    )


def lines_of_fleet(fleet: FleetAnswer) -> list[str]:
    """A line a server, the ones with trouble first, then what the fleet shows."""
    rank = {name: index for index, name in enumerate(ORDER)}

    def gravity(item: tuple[str, Answer]) -> tuple[bool, int, str]:
        name, answer = item
        return answer.class_ in WELL, rank.get(answer.class_ or "", len(rank)), name

    said = []
    for name, answer in sorted(fleet.servers.items(), key=gravity):
        first = answer.findings[0].reason if answer.findings else "nothing to say"
        said.append(f"{name}: {answer.class_ or answer.verdict}: {first}")
    said += [f"fleet: {finding.reason} {finding.do}" for finding in fleet.findings]
    return said


def _given(folder: Path) -> Given:
    pages = sorted(folder.glob("*.prom"), key=_in_time)
    window = folder / "window.json"
    interval = None
    if window.exists():
        try:
            raw = msgspec.json.decode(window.read_bytes())
            interval = float(raw["interval_seconds"]) if raw.get("interval_seconds") else None
        except (msgspec.DecodeError, AttributeError, TypeError, ValueError, KeyError):
            raise UnusableInput(f'{window} must be such as {{"interval_seconds": 20.0}}.') from None
    error = folder / "error.txt"
    log, facts, client = (
        path if (path := folder / name).exists() else None for name in ("server.log", "facts.json", "client.json")
    )
    said = error.read_text(encoding="utf-8").strip() if error.exists() else None
    return Given(pages, log, facts, client, interval, said)


def _in_time(path: Path) -> tuple[int, str]:
    """`t2` before `t10`."""
    number = re.search(r"(\d+)$", path.stem)
    return int(number[1]) if number else -1, path.stem


def _overview(answers: Mapping[str, Answer]) -> Finding:
    counted = Counter(answer.class_ or answer.verdict for answer in answers.values())
    rank = {name: index for index, name in enumerate(ORDER)}
    ordered = sorted(counted, key=lambda name: (name in WELL, rank.get(name, len(rank))))
    parts = []
    for class_ in ordered:
        names = [name for name, answer in answers.items() if (answer.class_ or answer.verdict) == class_]
        parts.append(f"{counted[class_]} {class_} ({listed(names, 4)})")
    well = sum(count for name, count in counted.items() if name in WELL)
    return Finding(
        "fleet_overview",
        "info",
        f"{plural(len(answers), 'server')}, {well} of them without trouble: {'; '.join(parts)}.",
        {"servers": len(answers), "by_class": dict(counted), "without_trouble": well},
        "Begin with the first." if well < len(answers) else "Nothing.",
    )


def _versions(answers: Mapping[str, Answer]) -> list[Finding]:
    by_version: dict[str, list[str]] = {}
    for name, answer in answers.items():
        if version := answer.server.get("version"):
            by_version.setdefault(str(version), []).append(name)
    if len(by_version) < 2:
        return []
    usual = max(by_version, key=lambda version: len(by_version[version]))
    odd = {version: names for version, names in by_version.items() if version != usual}
    each = "; ".join(f"{version} on {listed(names, 4)}" for version, names in sorted(odd.items()))
    return [
        Finding(
            "fleet_versions_differ",
            "warn",
            f"Versions differ: {usual} on {len(by_version[usual])} servers, {each}. Names and meanings of metrics "
            f"differ "
            "with them, and so do the known defects.",
            {"by_version": {version: len(names) for version, names in by_version.items()}},
            "Bring them to one version before their numbers are compared.",
        )
    ]


def _options(answers: Mapping[str, Answer]) -> list[Finding]:
    """Options in which a few servers differ from the usual value."""
    parsed = {
        name: parse_vllm_args(argv).options for name, answer in answers.items() if (argv := answer.server.get("argv"))
    }
    if len(parsed) < 3:
        return []
    odd: dict[str, dict[str, Any]] = {}
    for option in sorted({key for options in parsed.values() for key in options} - _OWN_TO_A_SERVER):
        values = Counter(str(options.get(option, "not set")) for options in parsed.values())
        usual, count = values.most_common(1)[0]
        if count == len(parsed) or count <= len(parsed) / 2:
            continue
        for name, given in parsed.items():
            if (value := str(given.get(option, "not set"))) != usual:
                odd.setdefault(name, {})[f"--{option}"] = {"here": value, "usual": usual}
    if not odd:
        return []
    shown = []
    for name, options in odd.items():
        each = [f"{option} {value['here']}, else {value['usual']}" for option, value in options.items()]
        shown.append(f"{name} ({', '.join(each)})")
    return [
        Finding(
            "fleet_configurations_differ",
            "warn",
            f"{plural(len(odd), 'server')} of {len(parsed)} were started otherwise than most: {listed(shown, 4)}.",
            {"odd": odd},
            "Make them alike, or keep them apart when the fleet's numbers are read.",
        )
    ]


def _hazards(answers: Mapping[str, Answer]) -> list[Finding]:
    seen: dict[str, list[str]] = {}
    for name, answer in answers.items():
        for hazard in answer.hazards:
            if hazard.state == "seen" and hazard.about != "reading":
                seen.setdefault(hazard.id, []).append(name)
    if not seen:
        return []
    each = "; ".join(f"{hazard} on {len(names)} ({listed(names, 3)})" for hazard, names in sorted(seen.items()))
    return [
        Finding(
            "fleet_hazards_seen",
            "warn",
            f"Known defects seen at work: {each}.",
            {"seen": {hazard: len(names) for hazard, names in seen.items()}},
            "`kvtrial hazards --vllm <version>` says what avoids each.",
        )
    ]
