"""What an engine's log says: the facts it prints while it starts, and why it failed."""

import re
from functools import cache
from typing import Any, Literal

import msgspec

from kvtrial.record.versions import data, within

_REQUEST_TEXT = re.compile(
    r"^([^\n]*?\b(?:Received request [^:\n]+|Request \S+ details|Generated response [^:\n]+): (?:prompt|output): )"
    r"[^\n]*",
    re.MULTILINE,
)


class Pattern(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An expression with a group `value`, for versions [since, until)."""

    pattern: str
    since: str | None = None
    until: str | None = None


class Fact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fact and the texts that carry it."""

    type: Literal["text", "integer", "number"]
    patterns: list[Pattern]


class FactTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`data/log_facts.yml`."""

    facts: dict[str, Fact]


class Cause(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"class_": "class"}):
    """A known failure, its line, and what to do."""

    id: str
    class_: str
    pattern: str
    cause: str
    fix: str
    after: str | None = None
    not_after: str | None = None
    since: str | None = None
    until: str | None = None
    differences: dict[str, tuple[str, str]] = {}


class CauseTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`data/log_causes.yml`."""

    causes: list[Cause]


class EngineFacts(msgspec.Struct, frozen=True):
    """What the log of a start states; None where it doesn't. `kv_cache_tokens` counts the reserved block in."""

    engine_version: str | None = None
    kv_cache_tokens: int | None = None
    max_concurrency: float | None = None
    available_kv_cache_gib: float | None = None
    num_gpu_blocks_profiled: int | None = None
    num_gpu_blocks_override: int | None = None
    kv_cache_layout: str | None = None
    connector: str | None = None
    engine_id: str | None = None
    spec: str | None = None
    offload_region: str | None = None
    offload_pinning_failed: str | None = None
    non_default_args: str | None = None


class Diagnosis(msgspec.Struct, frozen=True, rename={"class_": "class"}):
    """Why an engine failed: one cause, what to do, and the line that shows it. `numbers`: what the line states."""

    id: str
    class_: str
    cause: str
    fix: str
    evidence_line: str
    line_number: int
    numbers: dict[str, float]


def engine_facts(log_text: str, version: str | None = None) -> EngineFacts:
    """Facts of the first start in a log; `version` None takes the version that the log states, else tries all texts."""
    version = version or _stated_version(log_text)
    found: dict[str, Any] = {}
    for name, fact in data("log_facts", FactTable).facts.items():
        for pattern in fact.patterns:
            if version is not None and not within(version, pattern.since, pattern.until):
                continue
            match = _compiled(pattern.pattern).search(log_text)
            if match:
                found[name] = _typed(match["value"], fact.type)
                break
    return EngineFacts(**found)


def without_request_texts(log_text: str) -> str:
    """A log without what users wrote or got, as --enable-log-requests quotes it: that is no word of the engine."""
    return _REQUEST_TEXT.sub(r"\1...", log_text)


def diagnose(log_text: str, version: str | None = None) -> Diagnosis | None:
    """The known cause of a failed start or a dead engine, or None where the log shows none.

    The table's order decides: a specific cause counts before the general line that follows it. `version` None takes the
    version that the log states, else tries the causes of all versions.
    """
    version = version or _stated_version(log_text)
    lines = without_request_texts(log_text).splitlines()
    for cause in data("log_causes", CauseTable).causes:
        if version is not None and not within(version, cause.since, cause.until):
            continue
        hit = _first(lines, cause)
        if hit is not None:
            number, match = hit
            groups = {name: value for name, value in match.groupdict().items() if value is not None}
            numbers = _numbers(groups, cause)
            shown = groups | {name: f"{numbers[name]:.1f}" for name in cause.differences}
            return Diagnosis(
                cause.id,
                cause.class_,
                _filled(cause.cause, shown),
                _filled(cause.fix, shown),
                lines[number].strip(),
                number + 1,
                numbers,
            )
    return None


def _stated_version(log_text: str) -> str | None:
    for pattern in data("log_facts", FactTable).facts["engine_version"].patterns:
        match = _compiled(pattern.pattern).search(log_text)
        if match:
            return match["value"]
    return None


def _first(lines: list[str], cause: Cause) -> tuple[int, re.Match[str]] | None:
    reached = cause.after is None
    for number, line in enumerate(lines):
        if cause.not_after is not None and _compiled(cause.not_after).search(line):
            return None
        if not reached and cause.after is not None and _compiled(cause.after).search(line):
            reached = True
        match = _compiled(cause.pattern).search(line) if reached else None
        if match:
            return number, match
    return None


def _numbers(groups: dict[str, str], cause: Cause) -> dict[str, float]:
    numbers = {name: float(value) for name, value in groups.items() if re.fullmatch(r"\d+(\.\d+)?", value)}
    for name, (minuend, subtrahend) in cause.differences.items():
        numbers[name] = round(numbers[minuend] - numbers[subtrahend], 6)
    return numbers


def _filled(text: str, groups: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda name: groups.get(name[1], "?").strip(), text)


def _typed(text: str, kind: str) -> str | int | float:
    if kind == "integer":
        return int(text.replace(",", ""))
    return float(text) if kind == "number" else text.strip()


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.MULTILINE)
