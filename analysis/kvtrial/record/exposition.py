"""Reading a page of /metrics: text in, values by role out.

Roles and their exported names by version are data (`data/metrics.yml`). Three states are kept apart: a value; 0.0,
where the family is declared (`# TYPE`) and the engine has bound no sample to it yet; None, where the family is not
exported (no connector, another version) or was lost with the cut end of a page. Absent never becomes zero.
"""

import math
import re
from collections.abc import Iterable
from functools import cache
from typing import Literal

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from kvtrial.record.errors import UnusableInput
from kvtrial.record.versions import data, outside_read_range, within

NO_ENGINE = ""
CREATED = "counters_created_seconds"
NOT_SETTLED = "/metrics did not settle"
"""The caveat of a page that still changed when nothing was left to wait for begins so."""
_LABELS_OF_EVERY_SERIES = {"engine", "model_name"}
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_EXEMPLAR = re.compile(r"(?<=[0-9naf]) # \{.*$", re.IGNORECASE)


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where versions in [since, until) export a value: sample name and the labels that select it."""

    name: str
    labels: dict[str, str] = {}
    since: str | None = None
    until: str | None = None


class ValueRole(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value the project reads, by its own stable name."""

    meaning: str
    type: Literal["counter", "gauge", "histogram_sum", "histogram_count"]
    unit: str
    sources: list[Source]
    across_engines: Literal["sum", "max"] = "sum"

    @property
    def accumulates(self) -> bool:
        """Whether the value only rises in one process, so that a difference of two pages means something."""
        return self.type != "gauge"


class InfoRole(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A family whose labels carry the facts and whose value is 1."""

    meaning: str
    sources: list[Source]


class MetricTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`data/metrics.yml`. `buckets`: histograms of which the single buckets are read."""

    values: dict[str, ValueRole]
    info: dict[str, InfoRole]
    buckets: dict[str, InfoRole] = {}


class Sample(msgspec.Struct, frozen=True):
    """One sample line."""

    name: str
    labels: dict[str, str]
    value: float


class Page(msgspec.Struct, frozen=True):
    """The vLLM and process families of one page. `whole` is false where the page ends inside a line."""

    types: dict[str, str]
    samples: dict[str, list[Sample]]
    unreadable: frozenset[str]
    whole: bool
    caveats: list[str]

    def models(self) -> list[str]:
        """Values of `model_name` on the page, unescaped, in order of appearance."""
        seen = {
            s.labels["model_name"]: None for group in self.samples.values() for s in group if "model_name" in s.labels
        }
        return list(seen)

    def exports(self, sample_name: str) -> bool:
        """Whether the family of a sample name is declared or has samples."""
        return sample_name in self.samples or any(base in self.types for base in _family_names(sample_name))


class Reading(msgspec.Struct, frozen=True):
    """Values of one page for one version and model.

    `values`: role -> number, 0.0 (declared, nothing bound yet) or None (not exported, or unknown). `per_engine`: role
    -> engine label -> number. `info`: role -> labels. `whole` false: a None may also mean "behind the cut". `buckets`:
    role -> upper bound as printed -> requests at or below it, summed over engines.
    """

    values: dict[str, float | None]
    per_engine: dict[str, dict[str, float]]
    info: dict[str, dict[str, str]]
    caveats: list[str]
    model_name: str | None = None
    whole: bool = True
    buckets: dict[str, dict[str, float]] = {}


class Delta(msgspec.Struct, frozen=True):
    """What accumulated between two readings of one server. After a restart every value is None: the window is lost."""

    values: dict[str, float | None]
    per_engine: dict[str, dict[str, float]]
    monotone: bool
    restarted: bool
    fell: list[str]


def metric_table() -> MetricTable:
    """The table of roles."""
    return data("metrics", MetricTable)


@cache
def accumulating_roles() -> tuple[str, ...]:
    """The roles that only ever rise, in the table's order."""
    return tuple(role for role, entry in metric_table().values.items() if entry.accumulates)


def parse_page(text: str) -> Page:
    """Parse a page of /metrics in the Prometheus text format.

    Raises UnusableInput for what is not one: HTML, JSON, nothing, another program's metrics. A page that ends inside a
    line is read with a caveat and `whole=False`; the family at the cut is unknown. A line that can't be read makes its
    family unknown, not zero.
    """
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    _refuse_what_is_no_metrics_text(text)
    whole = text.endswith("\n")
    lines = text.split("\n")
    caveats: list[str] = []
    unreadable: set[str] = set()
    if not whole:
        lost = _family_at_the_cut(lines[-1])
        if lost is not None:
            cut = lines.pop()
            unreadable.add(lost)
            caveats.append(
                f"The page ends inside a line ({cut[-60:]!r}, no newline): {lost or 'what follows'} is unknown and "
                "families behind the cut are missing, not zero; fetch the page again."
            )
        else:
            caveats.append(
                "The page does not end with a newline; what may have followed its last line is missing, not zero."
            )
    kept = [line for line in lines if _is_ours(line)]
    types = _declared_types(kept)
    samples, bad = _samples(kept)
    caveats += _named_without_total(types, samples)
    for line in bad:
        name = _NAME.match(line)
        unreadable.add(name.group() if name else line[:40])
        caveats.append(f"The line {line[:80]!r} can't be read; its family is unknown.")
    page = Page(types, samples, frozenset(unreadable), whole, caveats)
    if not any(name.startswith("vllm:") for name in (*types, *samples)):
        raise UnusableInput(
            f"This is a metrics page of {len(text.encode())} bytes, but it has no vllm: family "
            f"({_what_else(lines)}); give the "
            "/metrics address of the vLLM server."
        )
    return page


def refuse_cut_page(page: Page) -> None:
    """Raise UnusableInput where a page ends inside a line, for callers that need every family."""
    if not page.whole and page.unreadable:
        raise UnusableInput(page.caveats[0])


def read_page(page: Page, version: str | None, model_name: str | None = None) -> Reading:
    """Values by role for a vLLM version (None: whichever source the page exports, the newest first).

    Counters and numbers of requests are summed over engines, shares and times take the largest; `per_engine` keeps them
    apart. With several models on the page one must be named, as its unescaped label value: adding them up would mix
    servers. Raises UnusableInput for that, and for a model that is not on the page.
    """
    models = page.models()
    if model_name is None and len(models) > 1:
        raise UnusableInput(f"The page has {len(models)} models ({', '.join(map(repr, models))}); name one of them.")
    if model_name is not None and models and model_name not in models:
        raise UnusableInput(f"Model {model_name!r} is not on the page; it has {', '.join(map(repr, models))}.")
    caveats = list(page.caveats)
    if version is not None and (note := outside_read_range(version)):
        caveats.append(note)
        # What such a version exports is not known by its number, so what the page shows decides.
        version = None
    table = metric_table()
    values: dict[str, float | None] = {}
    per_engine: dict[str, dict[str, float]] = {}
    for role, entry in table.values.items():
        source = _source(entry.sources, version, page)
        by_engine = None if source is None else _by_engine(page, source, model_name, entry, caveats)
        values[role] = None if by_engine is None else _across(by_engine, entry)
        if by_engine:
            per_engine[role] = by_engine
    info = {}
    for role, described in table.info.items():
        labels = _info(page, _source(described.sources, version, page), caveats)
        if labels is not None:
            info[role] = labels
    buckets = {}
    for role, described in table.buckets.items():
        bounds = _buckets(page, _source(described.sources, version, page), model_name)
        if bounds:
            buckets[role] = bounds
    return Reading(
        values,
        per_engine,
        info,
        list(dict.fromkeys(caveats)),
        model_name or next(iter(models), None),
        page.whole,
        buckets,
    )


def read_models(page: Page, version: str | None) -> dict[str, Reading]:
    """A reading for each model on the page; a page without any model label gives one under the empty name."""
    return {name: read_page(page, version, name or None) for name in page.models() or [""]}


def delta(before: Reading, after: Reading) -> Delta:
    """What accumulated from `before` to `after`: counters, sums and counts only.

    Restarted: the process start time or an engine's counters' creation time changed, or, where neither is known,
    something fell. `fell` looks at each engine, since a sum can hide one engine's reset. A role that is None in either
    reading is None.
    """
    accumulating = [role for role, entry in metric_table().values.items() if entry.accumulates]
    fell = [role for role in accumulating if _fell(before, after, role)]
    starts = before.values.get("process_start_time_seconds"), after.values.get("process_start_time_seconds")
    restarted = bool(fell) if None in starts else starts[0] != starts[1]
    restarted = restarted or bool(created_anew(before, after))
    values = {role: None if restarted or role in fell else _difference(before, after, role) for role in accumulating}
    per_engine = {
        role: {
            engine: now - before.per_engine.get(role, {}).get(engine, 0.0)
            for engine, now in after.per_engine[role].items()
        }
        for role, value in values.items()
        if value is not None and role in after.per_engine
    }
    return Delta(values, per_engine, monotone=not fell, restarted=restarted, fell=fell)


def created_anew(before: Reading, after: Reading) -> dict[str, tuple[float, float]]:
    """Engines whose counters were created anew between two readings: engine -> (before, after), seconds since epoch.

    It shows a restart also where a counter has overtaken its old value, and where no process start time is exported.
    """
    was, now = before.per_engine.get(CREATED, {}), after.per_engine.get(CREATED, {})
    return {engine: (was[engine], now[engine]) for engine in was.keys() & now.keys() if was[engine] != now[engine]}


def _refuse_what_is_no_metrics_text(text: str) -> None:
    start = text.lstrip()[:200]
    size = len(text.encode())
    advice = "give the server's own /metrics address, without a proxy in between"
    if not start:
        raise UnusableInput(
            f"The page is empty ({size} bytes); a vLLM server that is up answers with tens of kilobytes: {advice}."
        )
    if start.startswith("<"):
        login = (
            ", which looks like a login page of a proxy"
            if re.search(r"sign in|log ?in|oauth", text, re.IGNORECASE)
            else ""
        )
        raise UnusableInput(f"This is HTML ({size} bytes, begins {start[:40]!r}){login}, not metrics text: {advice}.")
    if start[0] in "{[":
        kind = "an error object" if '"error"' in text or '"detail"' in text else "JSON"
        raise UnusableInput(
            f"This is {kind} in JSON ({size} bytes, begins {start[:60]!r}), not metrics text: {advice}."
        )
    if not any(line.startswith("# TYPE ") or _SAMPLE_LINE.match(line) for line in text.split("\n")):
        raise UnusableInput(f"This is not metrics text ({size} bytes, begins {start[:40]!r}): {advice}.")


_TYPES = {"counter", "gauge", "histogram", "summary", "untyped", "unknown", "info", "stateset"}
_SAMPLE_LINE = re.compile(r"^[a-zA-Z_:][a-zA-Z0-9_:]*(\{.*\})?\s+[-+]?([0-9]|inf|nan)", re.IGNORECASE)


def _family_at_the_cut(line: str) -> str | None:
    """Name of the family that a last line without newline leaves unknown ("" where the name itself is cut), or None.

    An info sample is complete when its label set is closed, for its value is 1. Any other number may have lost digits.
    """
    if line.strip() in ("", "# EOF"):
        return None
    if line.startswith("#"):
        parts = line.split(" ")
        if line.startswith("# TYPE ") and parts[-1] in _TYPES:
            return None
        return parts[2] if len(parts) > 3 else ""
    name = _NAME.match(line)
    if name is None:
        return ""
    if name.group().endswith("_info") and re.search(r"\}\s+1(\.0?)?$", line):
        return None
    return name.group() if len(name.group()) < len(line) else ""


def _is_ours(line: str) -> bool:
    """Families that roles read. Of buckets and creation times, two thirds of a page, few are read."""
    name = line.split(" ", 3)[2] if line.startswith(("# TYPE ", "# HELP ")) and line.count(" ") >= 2 else line
    if not name.startswith(("vllm:", "process_start_time_seconds", "http_requests_total")):
        return False
    if line.startswith("# HELP"):
        return False
    bare = name.split("{", 1)[0].split(" ", 1)[0]
    return not bare.endswith(("_bucket", "_created")) or bare in _read_by_name()


@cache
def _read_by_name() -> frozenset[str]:
    """Sample names that roles name."""
    table = metric_table()
    described: list[ValueRole | InfoRole] = [*table.values.values(), *table.info.values(), *table.buckets.values()]
    return frozenset(source.name for role in described for source in role.sources)


def _declared_types(lines: Iterable[str]) -> dict[str, str]:
    declared = {}
    for line in lines:
        if line.startswith("# TYPE "):
            parts = line.split(" ")
            if len(parts) >= 4:
                declared[parts[2]] = parts[3].strip()
    return declared


def _samples(lines: list[str]) -> tuple[dict[str, list[Sample]], list[str]]:
    """Samples by name, and the lines that could not be read. Comments are left out: the types are read apart."""
    sample_lines = [line for line in lines if line and not line.startswith("#")]
    try:
        return _parsed(sample_lines), []
    except ValueError:
        good, bad = [], []
        for line in sample_lines:
            line = _EXEMPLAR.sub("", line)
            try:
                _parsed([line])
            except ValueError:
                bad.append(line)
            else:
                good.append(line)
        return _parsed(good), bad


def _parsed(sample_lines: list[str]) -> dict[str, list[Sample]]:
    grouped: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families("\n".join(sample_lines) + "\n"):
        for sample in family.samples:
            grouped.setdefault(sample.name, []).append(Sample(sample.name, dict(sample.labels), float(sample.value)))
    return grouped


def _named_without_total(types: dict[str, str], samples: dict[str, list[Sample]]) -> list[str]:
    """Give counters whose samples lost `_total` on the way (some relays strip it) their name; say for which."""
    bare = [
        name
        for name in samples
        if not name.endswith("_total")
        and name + "_total" not in samples
        and (types.get(name) == "counter" or name + "_total" in _read_by_name())
    ]
    for name in bare:
        samples[name + "_total"] = samples[name]
    return [f"{', '.join(bare)}: counters without _total, read as if they had it."] if bare else []


def _family_names(sample_name: str) -> Iterable[str]:
    """Names under which a sample's family may be declared; OpenMetrics leaves `_total` off."""
    yield sample_name
    for suffix in ("_total", "_sum", "_count", "_bucket"):
        if sample_name.endswith(suffix):
            yield sample_name.removesuffix(suffix)


def _source(sources: list[Source], version: str | None, page: Page) -> Source | None:
    """The source that holds for a version and is exported, else None; without a version the newest one exported."""
    for source in reversed(sources):
        if version is not None and not within(version, source.since, source.until):
            continue
        if page.exports(source.name):
            return source
    return None


def _by_engine(
    page: Page, source: Source, model_name: str | None, role: ValueRole, caveats: list[str]
) -> dict[str, float] | None:
    """Engine label -> value. Empty where the family is declared without a fitting sample, None where it is unknown."""
    if any(name in page.unreadable for name in _family_names(source.name)):
        return None
    found: dict[tuple[tuple[str, str], ...], Sample] = {}
    for sample in page.samples.get(source.name, []):
        if any(sample.labels.get(key) != value for key, value in source.labels.items()):
            continue
        if model_name is not None and sample.labels.get("model_name", model_name) != model_name:
            continue
        identity = tuple(sorted(sample.labels.items()))
        if identity in found and found[identity].value != sample.value:
            caveats.append(
                f"{source.name} has the same labels twice with different values ({found[identity].value:g} and "
                f"{sample.value:g}): unknown, neither was taken."
            )
            return None
        if identity in found:
            caveats.append(f"{source.name} has the same labels twice with the same value; one was taken.")
        found[identity] = sample
    if not found and model_name is not None and len(page.models()) > 1 and page.samples.get(source.name):
        # Another model's server exports the family; whether this one's does can't be seen.
        return None
    by_engine: dict[str, float] = {}
    for sample in found.values():
        if not math.isfinite(sample.value):
            caveats.append(f"{source.name} is {sample.value}; treated as unknown.")
            return None
        engine = sample.labels.get("engine", NO_ENGINE)
        if engine in by_engine:
            extra = sorted(set(sample.labels) - _LABELS_OF_EVERY_SERIES - set(source.labels))
            caveats.append(
                f"{source.name} has several series for engine {engine!r} (they differ in {', '.join(extra)}); "
                "taken together."
            )
            by_engine[engine] = _across({"a": by_engine[engine], "b": sample.value}, role)
        else:
            by_engine[engine] = sample.value
    return by_engine


def _across(by_engine: dict[str, float], role: ValueRole) -> float:
    if not by_engine:
        return 0.0
    return max(by_engine.values()) if role.across_engines == "max" else math.fsum(by_engine.values())


def _buckets(page: Page, source: Source | None, model_name: str | None) -> dict[str, float]:
    """Upper bound -> cumulative count, summed over engines; empty where it is not exported or not a number."""
    if source is None:
        return {}
    counted: dict[str, float] = {}
    for sample in page.samples.get(source.name, []):
        if model_name is not None and sample.labels.get("model_name", model_name) != model_name:
            continue
        bound = sample.labels.get("le")
        if bound is None or not math.isfinite(sample.value):
            return {}
        counted[bound] = counted.get(bound, 0.0) + sample.value
    return counted


def _info(page: Page, source: Source | None, caveats: list[str]) -> dict[str, str] | None:
    if source is None or source.name in page.unreadable:
        return None
    samples = page.samples.get(source.name, [])
    if not samples:
        return None
    first = {key: value for key, value in samples[0].labels.items() if key != "engine"}
    for other in samples[1:]:
        differing = sorted(key for key in first if other.labels.get(key) != first[key])
        if differing:
            caveats.append(
                f"{source.name} differs between engines in {', '.join(differing)}; the first engine's labels are given."
            )
    return first


def _fell(before: Reading, after: Reading, role: str) -> bool:
    was, now = before.values.get(role), after.values.get(role)
    if was is None or now is None:
        return False
    engines = after.per_engine.get(role, {})
    return now < was or any(
        engines.get(engine, 0.0) < value for engine, value in before.per_engine.get(role, {}).items()
    )


def _difference(before: Reading, after: Reading, role: str) -> float | None:
    was, now = before.values.get(role), after.values.get(role)
    return None if was is None or now is None else now - was


def _what_else(lines: list[str]) -> str:
    names = [line.split(" ")[2] for line in lines if line.startswith("# TYPE ") and line.count(" ") >= 3]
    return f"it has {', '.join(names[:3])}" if names else "it declares no family"
