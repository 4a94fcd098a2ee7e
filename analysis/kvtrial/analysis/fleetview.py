"""What is said of a fleet whose servers were each observed: one answer from many. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from kvtrial.analysis.launch_arm import ended

QUIET = ("healthy", "idle", "no_fault_seen", "parsed_per_model_and_engine")
"""Classes that nobody has to do anything about; a class that begins so counts too."""


class Observed(msgspec.Struct, frozen=True):
    """One server as `kvtrial observe --json` answered; `answer` {} where it could not, and `error` says why."""

    host: str
    port: int | None
    answer: Mapping[str, Any]
    error: str = ""

    @property
    def name(self) -> str:
        """host:port, or the host alone."""
        return f"{self.host}:{self.port}" if self.port else self.host

    @property
    def class_(self) -> str:
        """The class that names its answer."""
        return str(self.answer.get("class") or ("not_read" if self.error or not self.answer else "nothing_to_say"))

    @property
    def is_quiet(self) -> bool:
        """Whether nothing has to be done about it."""
        return not self.error and self.class_.startswith(QUIET)


def fleet_lines(observed: list[Observed], without: list[str], lost: Mapping[str, str], window: str) -> Iterator[str]:
    """The answer of a fleet, for people: each server that needs somebody, the rest in a line, what all share.

    `without`: hosts on which no server was found. `lost`: host -> why it could not be asked.
    """
    for server in sorted(observed, key=lambda one: (one.is_quiet, one.name)):
        yield from _server(server)
    yield from _shared(observed)
    for host, why in sorted(lost.items()):
        yield f"{host} could not be asked: {ended(why)}"
    if without:
        yield f"No vLLM server was found on {', '.join(sorted(without))}."
    yield _summary(observed, without, lost, window)


def _server(server: Observed) -> Iterator[str]:
    if server.error:
        yield f"{server.name}: {ended(server.error)}"
        return
    findings = server.answer.get("findings", [])
    about = server.answer.get("server") or {}
    version = f" (vLLM {about['version']})" if about.get("version") else ""
    yield f"{server.name}{version}: {server.class_}"
    for finding in findings:
        if finding["severity"] != "info" or finding is findings[0]:
            sure = {"inferred": " (inferred)", "unknown": " (not to be known from this)"}.get(
                finding.get("confidence", "seen"), ""
            )
            yield f"  - {finding['class']}{sure}: {ended(finding['reason'])} {finding['do']}"
    if settle := server.answer.get("settle"):
        yield f"  Open: {settle.get('question', '')} {settle.get('command', '')}".rstrip()


def _shared(observed: list[Observed]) -> Iterator[str]:
    """Classes and defects by server, and versions where they differ."""
    by_hazard: dict[str, tuple[Mapping[str, Any], list[str]]] = {}
    by_version: dict[str, list[str]] = {}
    for server in observed:
        for hazard in server.answer.get("hazards", []):
            open_guard = hazard.get("action") in ("block", "guard") and not hazard.get("guarded")
            if open_guard or hazard.get("state") == "seen":
                by_hazard.setdefault(hazard["id"], (hazard, []))[1].append(server.name)
        version = (server.answer.get("server") or {}).get("version")
        if version:
            by_version.setdefault(str(version), []).append(server.name)
    for identity, (hazard, servers) in sorted(by_hazard.items()):
        word = "seen" if hazard.get("state") == "seen" else hazard["action"]
        yield f"Known defect {identity} ({word}): {ended(hazard['title'])} {some(servers)}."
    if len(by_version) > 1:
        said = "; ".join(f"{version} on {some(servers)}" for version, servers in sorted(by_version.items()))
        yield f"The fleet runs {len(by_version)} versions of vLLM: {said}."


def _summary(observed: list[Observed], without: list[str], lost: Mapping[str, str], window: str) -> str:
    hosts = len({server.host for server in observed}) + len(without) + len(lost)
    by_class: dict[str, list[str]] = {}
    for server in observed:
        by_class.setdefault(server.class_, []).append(server.name)
    said = "; ".join(f"{name}: {some(servers)}" for name, servers in sorted(by_class.items()))
    count = f"{len(observed)} server{'' if len(observed) == 1 else 's'} on {hosts} host{'' if hosts == 1 else 's'}"
    return f"Fleet: {count}, {window}. {said or 'Nothing was read'}."


def some(names: list[str], most: int = 5) -> str:
    """Names, with commas; of many the first and how many more."""
    shown = sorted(names)
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")
