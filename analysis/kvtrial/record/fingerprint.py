"""Which vLLM versions a page of /metrics can come from, by what it exports."""

import msgspec

from kvtrial.record.exposition import Page
from kvtrial.record.versions import data, release, within


class Shown(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A family that tells the version by being there, or by being absent."""

    family: str
    since: str | None = None
    until: str | None = None


class Label(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A label of vllm:cache_config_info that tells the version by being there."""

    label: str
    since: str


class FingerprintTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`data/fingerprints.yml`."""

    shows: list[Shown]
    labels: list[Label]
    lacks: list[Shown]


class VersionRange(msgspec.Struct, frozen=True):
    """Versions [since, until) a page can come from; None: no bound seen. `because`: what on the page says so.

    `since` rests on what is there; `until` may rest on what is absent, and a relay can drop families.
    """

    since: str | None
    until: str | None
    because: list[str]

    def may_be(self, since: str | None, until: str | None) -> bool:
        """Whether some version of this range lies in [since, until)."""
        below = until is None or self.since is None or release(self.since) < release(until)
        above = since is None or self.until is None or release(since) < release(self.until)
        return below and above

    def described(self) -> str:
        """The range in words, such as `0.26 to below 0.30`."""
        if self.since and self.until:
            return f"{self.since} to below {self.until}"
        if self.since:
            return f"{self.since} or newer"
        return f"below {self.until}" if self.until else "any version"


def versions_of(page: Page) -> VersionRange:
    """The versions that a page can come from. What contradicts itself (a relay, a merge) has no upper bound."""
    table = data("fingerprints", FingerprintTable)
    labels = {key for sample in page.samples.get("vllm:cache_config_info", []) for key in sample.labels}
    because: list[str] = []
    since: str | None = None
    until: str | None = None
    for shown in table.shows:
        if not _there(page, shown.family):
            continue
        if shown.since and (since is None or release(shown.since) > release(since)):
            since = shown.since
            because.append(f"{shown.family} ({shown.since}+)")
        if shown.until and (until is None or release(shown.until) < release(until)):
            until = shown.until
            because.append(f"{shown.family} (ended in {shown.until})")
    for label in table.labels:
        if label.label in labels and (since is None or release(label.since) > release(since)):
            since = label.since
            because.append(f"label {label.label} ({label.since}+)")
    for absent in table.lacks:
        if absent.until and page.whole and not _there(page, absent.family) and not _lost(page, absent.family):
            if until is None or release(absent.until) < release(until):
                until = absent.until
                because.append(f"what {absent.until} and newer always export is absent")
            break
    if since and until and not within(since, None, until):
        return VersionRange(since, None, because)
    return VersionRange(since, until, because)


def _there(page: Page, family: str) -> bool:
    return page.exports(family) or page.exports(f"{family}_total") or page.exports(f"{family}_count")


def _lost(page: Page, family: str) -> bool:
    return any(name.startswith(family) for name in page.unreadable)
