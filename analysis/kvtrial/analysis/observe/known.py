"""Which known defects this very server meets: asked of the hazard table with what is known of it."""

from collections.abc import Iterable

import msgspec

from kvtrial.analysis.observe.configuration import Configuration
from kvtrial.analysis.observe.logs import Log
from kvtrial.analysis.observe.pages import Pages
from kvtrial.analysis.observe.window import Window, exports_connector
from kvtrial.record.hazardfacts import host_facts, page_facts
from kvtrial.record.hazards import hazards_sighted
from kvtrial.record.observed import HostFacts
from kvtrial.record.predicates import Facts
from kvtrial.record.versions import NEWEST_READ, is_newer_than_read, outside_read_range

_OF_HOST = ("ram_total_bytes", "ram_available_bytes", "dev_shm_total_bytes", "dev_shm_free_bytes", "driver_version")


class HazardHere(msgspec.Struct, frozen=True):
    """A known defect that this server shows (seen), meets (applies, guarded) or may meet (possible).

    `guarded`: its guard is set, so it does no harm.
    """

    id: str
    state: str
    guarded: bool
    action: str
    about: str
    title: str
    do: str
    source: str
    evidence: str


def hazards_here(
    pages: Pages | None,
    log: Log | None,
    configuration: Configuration | None,
    facts: HostFacts | None,
    version: str | None,
) -> list[HazardHere]:
    """Hazards of one server, those seen first; none where neither its version nor its configuration is known.

    A log alone names no configuration: what it shows has findings of its own. Of a version newer than those read, the
    hazards of the newest read are possible, and no more.
    """
    stated = (configuration.version if configuration else None) or version
    newer = stated is not None and is_newer_than_read(stated)
    if stated is None or (outside_read_range(stated) and not newer):
        return []
    if configuration is None and pages is None and not newer:
        return []
    launch = configuration.launch if configuration is not None and configuration.launch.argv else None
    found = hazards_sighted(
        NEWEST_READ if newer else stated,
        launch,
        _facts(pages, facts, launch is None),
        log.text.splitlines() if log is not None else (),
        configuration.backend if configuration is not None else None,
    )
    order = {"seen": 0, "applies": 1, "guarded": 2, "possible": 3}
    here = [
        HazardHere(
            one.hazard.id,
            "possible" if newer else one.state,
            one.state == "guarded",
            one.hazard.action,
            one.hazard.about,
            one.hazard.title,
            one.hazard.do,
            one.hazard.source,
            one.evidence,
        )
        for one in found
    ]
    return sorted(here, key=lambda one: (order[one.state], one.about == "reading"))


def _facts(pages: Pages | None, facts: HostFacts | None, from_page: bool) -> list[Facts]:
    of_host = host_facts(_of_host(facts)) if facts is not None else Facts({})
    if pages is None:
        return [of_host]
    window = pages.main
    connector = Facts({"connector": "OffloadingConnector" if exports_connector(window) else None})
    extra = connector if from_page else Facts({})
    sets = [page_facts(*values, window.seconds) for values in _by_engine(window)]
    return [extra.also(of_page).also(of_host) for of_page in sets]


def _of_host(facts: HostFacts) -> dict[str, object]:
    known: dict[str, object] = {name: getattr(facts, name) for name in _OF_HOST}
    if any(file.mapped is not None for file in facts.shm_files) or not facts.shm_files:
        known["shm_files_left_over"] = sum(1 for file in facts.shm_files if file.mapped is False)
    return known


def _by_engine(window: Window) -> Iterable[tuple[dict[str, float | None], dict[str, float | None] | None]]:
    last, first = window.last, None if window.since_start else window.first
    engines = sorted({engine for by_engine in last.per_engine.values() for engine in by_engine if engine})
    if len(engines) < 2:
        return [(last.values, None if first is None else first.values)]

    def of(
        values: dict[str, float | None], by_role: dict[str, dict[str, float]], engine: str
    ) -> dict[str, float | None]:
        return {
            role: by_role[role].get(engine, 0.0) if role in by_role and any(by_role[role]) else value
            for role, value in values.items()
        }

    return [
        (
            of(last.values, last.per_engine, engine),
            None if first is None else of(first.values, first.per_engine, engine),
        )
        for engine in engines
    ]
