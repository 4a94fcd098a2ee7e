"""Pages of /metrics in time order: how odd they are, whose they are, and the windows they make."""

import math
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal

import msgspec

from kvtrial.analysis.observe.finding import Finding
from kvtrial.analysis.observe.window import Window, fits_tokens, labels_of_engines, of_engines, window_of
from kvtrial.analysis.observe.words import listed, percent, plural, signed_bytes, whole
from kvtrial.record.errors import UnusableInput
from kvtrial.record.exposition import Page, metric_table, parse_page, read_models
from kvtrial.record.fingerprint import VersionRange, versions_of
from kvtrial.record.versions import outside_read_range, within

_TIMESTAMP = re.compile(
    r"^vllm:[^\n]*[} ](?:[-+]?[0-9.]+(?:e[-+]?[0-9]+)?|NaN|[+-]Inf) [0-9]{9,}(?:\.[0-9]+)?$", re.M | re.I
)
_START = "process_start_time_seconds"
CUT_LEAST = 3
"""Families that a page must lack at its end to count as cut; one or two a relay may have left out."""
_UNUSED = "Nothing of it is used, not even the families before the cut; fetch it again, whole."
_ALWAYS_MOVES = re.compile(r'^(?:process_cpu_seconds_total[ {]|http_requests_total\{[^}\n]*handler="/metrics")', re.M)
"""What a server moves by being scraped, so that equal values mean one scrape."""
_NEVER_NEGATIVE = ("_total", "_count")
_HARMLESS_SIGNS: dict[str, Callable[[str], bool]] = {
    "sample timestamps": lambda text: bool(_TIMESTAMP.search(text)),
    "an OpenMetrics end mark (# EOF)": lambda text: text.rstrip().endswith("# EOF"),
    "exemplars": lambda text: " # {" in text,
    "Windows line ends": lambda text: "\r\n" in text,
    "a byte order mark": lambda text: text.startswith("\ufeff"),
}
"""What a relay or another exposition format adds; it changes no value."""


class Pages(msgspec.Struct, frozen=True):
    """The windows of a series of pages, by model, and what is odd about the pages.

    `odd`: something is unknown or was mended; `harmless`: read as usual.
    """

    windows: list[Window]
    odd: list[str]
    harmless: list[str]
    versions: VersionRange
    notes: list[str]

    @property
    def main(self) -> Window:
        """The window of the model that did most."""
        return max(self.windows, key=lambda window: window.last.values.get("prompt_tokens") or 0.0)


def read_pages(
    texts: Sequence[tuple[str, str]],
    version: str | None = None,
    interval_seconds: float | None = None,
    backend: str | None = None,
) -> Pages:
    """Pages as (name, text) in time order. Raises UnusableInput, with the name, for what no vLLM server sends."""
    pages = [_page(name, text) for name, text in texts]
    for (_, earlier), (name, later) in pairwise(zip([name for name, _ in texts], pages, strict=True)):
        _refuse_early_end(name, earlier, later)
    versions = versions_of(pages[-1])
    stated = version if version is None or outside_read_range(version) is None else None
    series = [read_models(page, stated) for page in pages]
    notes = [note for note in [version and outside_read_range(version)] if note]
    if notes:
        notes[0] += f" What the page exports decides ({versions.described()} by it)."
    notes += _contradicted(stated, versions)
    windows = []
    scrapes = _scrapes([text for _, text in texts])
    for model in series[-1]:
        readings = [readings[model] for readings in series if model in readings]
        if len(readings) < len(series):
            notes.append(f"Model {model!r} is missing from {len(series) - len(readings)} of {len(series)} pages.")
        about = model if len(series[-1]) > 1 else None
        window = _of_first_page(window_of(readings, interval_seconds, versions, stated, about, backend), notes)
        windows.append(msgspec.structs.replace(window, scrapes=scrapes))
    gone = [model for model in series[0] if model not in series[-1]]
    if gone:
        notes.append(f"{listed([repr(name) for name in gone])} is on the first page and not on the last.")
    caveats = [caveat for readings in series for reading in readings.values() for caveat in reading.caveats]
    odd = list(dict.fromkeys(caveat for caveat in caveats if "differs between engines" not in caveat))
    odd += [text for text in _not_finite(pages) if not any(text.split(" ", 1)[0] in caveat for caveat in odd)]
    harmless = [sign for sign, seen in _HARMLESS_SIGNS.items() if any(seen(text) for _, text in texts)]
    return Pages(windows, odd, harmless, versions, notes)


def _of_first_page(window: Window, notes: list[str]) -> Window:
    """The window without engines that are not on its first page: what they counted is of another time."""
    first = labels_of_engines(window.first)
    later = sorted(set().union(*map(labels_of_engines, window.readings)) - first)
    gone = sorted(first - labels_of_engines(window.last))
    of_model = f" (model {window.about!r})" if window.about else ""
    notes += [f"Engine {name}{of_model} is on the first page and not on the last: it vanished." for name in gone]
    if not first or not later:
        return window
    notes += [
        f"Engine {name}{of_model} is not on the first page: no difference known, so it is left out." for name in later
    ]
    readings = [msgspec.structs.replace(reading, buckets={}) for reading in window.readings]
    # Buckets are summed over the engines, so none is known of the others alone.
    return of_engines(msgspec.structs.replace(window, readings=readings), first, window.about)


def _scrapes(texts: Sequence[str]) -> Literal["apart", "alike", "same"]:
    """Whether pages are one scrape given again, by a copy or a caching proxy: every sample line is equal."""
    samples = [[line.rstrip() for line in text.split("\n") if not line.startswith("#")] for text in texts]
    if len(samples) < 2 or any(later != samples[0] for later in samples[1:]):
        return "apart"
    return "same" if _ALWAYS_MOVES.search(texts[0]) else "alike"


def _contradicted(stated: str | None, versions: VersionRange) -> list[str]:
    """A note where a version that was stated is none of those that the page can come from."""
    if stated is None or within(stated, versions.since, versions.until):
        return []
    return [
        f"vLLM {stated} was stated, and the page is of {versions.described()} by what it exports "
        f"({listed(versions.because, 3)}): the version is another one, or the page is another server's. It was read as "
        f"{stated}, so what is said by version may be wrong."
    ]


def several(pages: Pages) -> Finding | None:
    """How the page's models and engines are told apart, where there is more than one of either."""
    models = [window.last.model_name or "" for window in pages.windows]
    main = pages.main
    engines = sorted({engine for by_engine in main.last.per_engine.values() for engine in by_engine if engine})
    if len(models) < 2 and len(engines) < 2:
        return None
    said = [_of_model(main, engines)]
    others: dict[str, Any] = {}
    for window in pages.windows:
        if window is main:
            continue
        name = window.last.model_name or ""
        count, stands = window.rise("preemptions"), window.last.values.get("preemptions")
        others[name] = {"delta": count, "preemptions": stands}
        said.append(
            f"{name!r} is another model and is counted apart: its {whole(stands)} preemptions are old (no change)"
            if stands and count == 0
            else f"{name!r} is another model and is counted apart: {whole(count or 0)} preemptions {window.during}"
            if count is not None
            else f"{name!r} is another model and is counted apart"
        )
    return Finding(
        "parsed_per_model_and_engine",
        "info",
        f"The page has {plural(len(models), 'model')} and {plural(max(1, len(engines)), 'engine')}. "
        + ". ".join(said)
        + ". Counters are summed over the engines of one model, gauges kept by engine.",
        _numbers(main) | {"models": models, "engines": engines, "others": others},
        "Sum counters over the engines of one model and never over models; read gauges by engine (the largest, or "
        "all).",
    )


def caveats(pages: Pages) -> Finding | None:
    """What was odd about the pages and how it was read."""
    if not pages.odd and not pages.harmless:
        return None
    main = pages.main
    unknown = [role for role in _SAID if main.last.values.get(role) is None and _lost(role, pages)]
    parts = [text.rstrip(".") for text in pages.odd]
    if pages.harmless:
        parts.append(f"{listed(pages.harmless)}: read as usual, the values are the same")
    lost = f" Unknown, which is not zero: {listed(unknown)}." if unknown else ""
    absent = [role for role in _SAID if main.last.values.get(role) is None and role not in unknown]
    if absent:
        lost += f" Not exported here, which is not zero either: {listed(absent)}."
    bare = [role for role in _SAID if main.last.values.get(role) == 0 and not main.last.per_engine.get(role)]
    if bare:
        lost += f" Declared without a sample, which is 0: {listed(bare)}."
    return Finding(
        "parsed_with_caveats",
        "warn" if pages.odd else "info",
        f"The page was read, with caveats: {'; '.join(parts)}.{lost} {_summary(main)}",
        _numbers(main) | {"caveats": len(pages.odd), "unknown": unknown, "not_exported": absent},
        "Fetch the server's own /metrics, whole and without a relay, where a value is unknown."
        if pages.odd
        else "Nothing.",
    )


_SAID = (
    "preemptions",
    "load_bytes",
    "store_bytes",
    "external_prefix_cache_hits_tokens",
    "requests_running",
    "requests_waiting",
    "kv_cache_usage_share",
    "ttft_seconds_sum",
    "queue_seconds_sum",
)


def _page(name: str, text: str) -> Page:
    """A whole page. One that was cut is refused: a family behind the cut would look as if it were not exported."""
    try:
        page = parse_page(text)
    except UnusableInput as error:
        raise UnusableInput(f"{name}: {error}") from None
    if not page.whole and page.unreadable:
        last = text.rsplit("\n", 1)[-1]
        unclosed = " and its label set is not closed" if "{" in last and "}" not in last else ""
        raise UnusableInput(
            f"{name}: {page.caveats[0].rstrip('.')}. {len(text.encode())} bytes came{unclosed}. Nothing of it is used, "
            "not even the families before the cut."
        )
    _refuse_unfinished_histogram(name, text, page)
    return page


def _refuse_unfinished_histogram(name: str, text: str, page: Page) -> None:
    """A page that ends among the buckets of a histogram, at the end of a line: sum and count never came."""
    last = text.rstrip().rsplit("\n", 1)[-1]
    family = re.match(r"(vllm:\w+)_bucket\{", last)
    if family and not any(f"{family[1]}_{end}" in page.samples for end in ("sum", "count")):
        raise UnusableInput(
            f"{name}: the page ends among the buckets of {family[1]}, whose sum and count never came "
            f"({len(text.encode())} bytes). {_UNUSED}"
        )


def _refuse_early_end(name: str, earlier: Page, later: Page) -> None:
    """A later page of the same process without the last families of an earlier one: it was cut at the end of a line."""
    starts = [[sample.value for sample in page.samples.get(_START, [])] for page in (earlier, later)]
    order = [family for family in earlier.types if family.startswith("vllm:")]
    missing = [family for family in order if family not in later.types]
    if starts[0] and starts[0] == starts[1] and len(missing) >= CUT_LEAST and order[-len(missing) :] == missing:
        raise UnusableInput(
            f"{name}: the page lacks the last {plural(len(missing), 'family', 'families')} of the page before, of the "
            f"same process (from {missing[0]} on), so it was cut at the end of a line. {_UNUSED}"
        )


def _not_finite(pages: Sequence[Page]) -> list[str]:
    """Families with a value that is no number, whether a role reads them or not."""
    found = {
        name: sample.value
        for page in pages
        for name, samples in page.samples.items()
        for sample in samples
        if not math.isfinite(sample.value) or (sample.value < 0 and name.endswith(_NEVER_NEGATIVE))
    }
    return [f"{name} is {value:g}; unknown, and not used here" for name, value in found.items()]


def _numbers(window: Window) -> dict[str, Any]:
    by_engine = window.whole.per_engine
    last = window.last
    return {
        "model": last.model_name,
        "preempt": by_engine.get("preemptions", {}) or window.rise("preemptions"),
        "delta": window.rise("preemptions"),
        "load_bytes": by_engine.get("load_bytes", {}),
        "load": window.rise("load_bytes"),
        "store_bytes": by_engine.get("store_bytes", {}),
        "store": window.rise("store_bytes"),
        "external_hits": window.rise("external_prefix_cache_hits_tokens"),
        "local_hits": window.rise("prefix_cache_hits_tokens"),
        "prompt": window.rise("prompt_tokens"),
        "running": last.values.get("requests_running"),
        "waiting": last.values.get("requests_waiting"),
        "running_by_engine": last.per_engine.get("requests_running", {}),
        "waiting_by_engine": last.per_engine.get("requests_waiting", {}),
        "kv_usage": last.per_engine.get("kv_cache_usage_share", {}),
        "finished": window.finished,
        "kv_tokens": fits_tokens(last),
    }


def _of_model(window: Window, engines: list[str]) -> str:
    name = window.last.model_name or ""
    by_engine = window.whole.per_engine
    parts = []
    if (count := window.rise("preemptions")) is not None:
        parts.append(f"{whole(count)} preemptions{_each(by_engine.get('preemptions', {}), whole)}")
    loads = by_engine.get("load_bytes", {})
    if any(loads.values()):
        parts.append(f"load {', '.join(f'{signed_bytes(v)} (engine {e})' for e, v in sorted(loads.items()))}")
    usage = window.last.per_engine.get("kv_cache_usage_share", {})
    if usage:
        parts.append(f"KV usage {', '.join(f'{percent(v)} (engine {e})' for e, v in sorted(usage.items()))}")
    waiting = window.last.per_engine.get("requests_waiting", {})
    total = sum(waiting.values())
    holding = [engine for engine, value in waiting.items() if value]
    if waiting:
        where = f", all on engine {holding[0]}" if len(holding) == 1 and len(engines) > 1 else _each(waiting, whole)
        parts.append(f"waiting {whole(total)}{where if total else ''}")
    running = window.last.values.get("requests_running")
    if running is not None:
        parts.append(f"running {whole(running)}{_each(window.last.per_engine.get('requests_running', {}), whole)}")
    return f"For {name!r}: {', '.join(parts)}"


def _each(values: dict[str, float], form: Any) -> str:
    if len(values) < 2:
        return ""
    return f" ({', '.join(f'engine {engine}: {form(value)}' for engine, value in sorted(values.items()))})"


def _summary(window: Window) -> str:
    count, load = window.rise("preemptions"), window.rise("load_bytes")
    parts = ["preemptions unknown" if count is None else f"{plural(count, 'preemption')} {window.during}"]
    if load is not None:
        store = window.rise("store_bytes")
        stored = "store unknown" if store is None else f"store {signed_bytes(store)}"
        parts.append(f"load {signed_bytes(load)}, {stored}")
    elif window.last.whole and not any("offload" in name for name in window.last.caveats):
        parts.append("the offload families are not exported (no connector), which is not a load of 0")
    return f"What can be told: {', '.join(parts)}."


def _lost(role: str, pages: Pages) -> bool:
    names = [source.name for source in metric_table().values[role].sources]
    stems = [name.removesuffix("_total").removesuffix("_sum").removesuffix("_count") for name in names]
    return any(stem in caveat for stem in stems for caveat in pages.odd)
