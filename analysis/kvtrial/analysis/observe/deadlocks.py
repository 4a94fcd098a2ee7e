"""Which deadlocks are known for a version and a configuration."""

from collections.abc import Sequence

from kvtrial.record.fingerprint import VersionRange
from kvtrial.record.hazards import Hazard, all_hazards
from kvtrial.record.predicates import Facts, holds_any
from kvtrial.record.versions import outside_read_range, within


def known_deadlocks(version: str | None, versions: VersionRange | None, connector: bool) -> list[Hazard]:
    """Entries of the hazard table about deadlocks that the version can have and the configuration surely takes.

    `version` None: `versions` is what the page's families leave open.
    """
    if version is not None and outside_read_range(version):
        return []
    facts = Facts({"connector": "OffloadingConnector" if connector else None})
    found = []
    for hazard in all_hazards():
        if "deadlock_watch" not in hazard.watch.others or holds_any(hazard.configurations, facts) is not True:
            continue
        if version is not None:
            fits = within(version, hazard.since, hazard.until)
        else:
            fits = versions is not None and versions.may_be(hazard.since, hazard.until)
        if fits:
            found.append(hazard)
    return found


def named(known: Sequence[Hazard]) -> str:
    """Entries in words, the first two."""
    return "; ".join(f"{hazard.title} ({hazard.source})" for hazard in known[:2])
