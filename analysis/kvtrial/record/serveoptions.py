"""Which options `vllm serve` has in a release, as read from the wheels: `data/serve_options.yml`."""

import re
from functools import cache

import msgspec

from kvtrial.record.versions import data, release, within

_RELEASED = re.compile(r"v?\d+\.\d+\.\d+(\.post\d+)?(\+\S*)?")


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Releases [since, until) that have an option; minor versions, of those that were read."""

    since: str | None = None
    until: str | None = None


class ServeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`data/serve_options.yml`. `releases`: those read, oldest first. `options`: name -> when it was there.

    `aliases`: another name, a short one with its dash -> the long name. `takes`: on_off (a flag with a `--no-` form),
    switch (a flag without), int, float or value -> the options that are so in all releases read.
    """

    releases: list[str]
    options: dict[str, list[Span]]
    aliases: dict[str, str]
    takes: dict[str, list[str]]


def serve_options() -> ServeOptions:
    """The table."""
    return data("serve_options", ServeOptions)


def was_read(version: str) -> bool:
    """Whether this very release's options were read; a build of it for another CUDA has the same ones."""
    if not _RELEASED.fullmatch(version.strip()):
        return False
    return release(version) in {release(name) for name in serve_options().releases}


def neighbours(version: str) -> list[str]:
    """The releases read that lie next to a version: the last at or below it and, where that is another, the next."""
    names = serve_options().releases
    below = [name for name in names if release(name) <= release(version)]
    above = [name for name in names if release(name) > release(version)]
    return below[-1:] if was_read(version) else [*below[-1:], *above[:1]]


@cache
def options_of(version: str) -> frozenset[str]:
    """Options that a version has, or that a release next to it has where it was not read itself."""
    return frozenset(
        name
        for near in neighbours(version)
        for name, spans in serve_options().options.items()
        if any(within(near, span.since, span.until) for span in spans)
    )


@cache
def kinds() -> dict[str, str]:
    """What an option takes, one of the words of `ServeOptions.takes`; those for which it is not known are absent."""
    return {name: kind for kind, names in serve_options().takes.items() for name in names}


def long_name(name: str, version: str) -> str:
    """The long name, without dashes, of an option under any of the names that a version has for it."""
    return serve_options().aliases.get(name, name) if name in options_of(version) else name


def when(name: str) -> str | None:
    """In words when an option was there, such as `until 0.17.1`; None for one that no release read has."""
    spans = serve_options().options.get(name)
    return None if spans is None else " and ".join(_span(span) for span in spans)


def range_read() -> str:
    """Which releases were read, in words."""
    names = serve_options().releases
    return f"{names[0]} to {names[-1]}, {len(names)} releases"


def _span(span: Span) -> str:
    since = f"from {span.since}" if span.since else ""
    if span.until is None:
        return since or "always"
    last = [name for name in serve_options().releases if release(name) < release(span.until)][-1]
    return f"{since} until {last}".strip()
