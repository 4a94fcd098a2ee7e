"""The /metrics page: the families of a real vLLM 0.32.0 page (families.json), filled with the stand-in's counts."""

from __future__ import annotations

import json
import os
import resource
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FAMILIES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8"))
TOKEN_BUCKETS = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0]
Labels = tuple[tuple[str, str], ...]


def token_buckets(max_model_len: int) -> list[float]:
    """The 1-2-5 series up to max_model_len, as the real request_tokens histograms have."""
    series = (float(step * 10**power) for power in range(9) for step in (1, 2, 5))
    return [bound for bound in series if bound <= max_model_len]


def exposition_number(value: float) -> str:
    """A float as prometheus_client prints it (1e6 and more with an exponent)."""
    text = repr(float(value))
    dot = text.find(".")
    if value > 0 and dot > 6:
        mantissa = f"{text[0]}.{text[1:dot]}{text[dot + 1 :]}".rstrip("0.")
        return f"{mantissa}e+0{dot - 1}"
    return text


class Histogram:
    """Counts by bucket, and the sum."""

    def __init__(self, bounds: list[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Metrics:
    """Values of the page. Series that the real engine binds late stay absent until first used."""

    def __init__(self, model_name: str, max_model_len: int, connector: bool, cache_config: Mapping[str, str]) -> None:
        self._common = {"engine": "0", "model_name": model_name}
        self._families = [family for family in FAMILIES if connector or not family.get("connector")]
        self._buckets = {
            family["name"]: (
                token_buckets(max_model_len) if family["buckets"] == TOKEN_BUCKETS else list(family["buckets"])
            )
            for family in self._families
            if family["type"] == "histogram"
        }
        self._known = {family["name"]: family for family in self._families}
        self._cache_config = dict(cache_config)
        self.restart(_process_start_seconds())

    def restart(self, start_seconds: float) -> None:
        """All counts at zero, as after a start at that wall-clock time."""
        self._values: dict[tuple[str, Labels], float] = {}
        self._histograms: dict[tuple[str, Labels], Histogram] = {}
        self._created: dict[tuple[str, Labels], float] = {}
        self._start_seconds = start_seconds
        for family in self._families:
            for labels in [] if family.get("lazy") else family["series"]:
                self._bind(family["name"], labels)
        self.put("vllm:engine_sleep_state", 1.0, sleep_state="awake")
        self.put("vllm:cache_config_info", 1.0)
        self.put("process_start_time_seconds", start_seconds)

    def _bind(self, name: str, labels: Mapping[str, str]) -> tuple[str, Labels]:
        key = (name, tuple(sorted(labels.items())))
        if key not in self._created:
            assert dict(labels) in self._known[name]["series"], (name, labels)
            self._created[key] = time.time()
            if name in self._buckets:
                self._histograms[key] = Histogram(self._buckets[name])
            else:
                self._values[key] = 1.0 if name == "python_info" else 0.0
        return key

    def add(self, name: str, amount: float, **labels: str) -> None:
        self._values[self._bind(name, labels)] += amount

    def put(self, name: str, value: float, **labels: str) -> None:
        self._values[self._bind(name, labels)] = value

    def observe(self, name: str, value: float, **labels: str) -> None:
        self._histograms[self._bind(name, labels)].observe(value)

    def page(self) -> str:
        """The page in the text exposition format."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()
        self.put("process_virtual_memory_bytes", int(pages[0]) * resource.getpagesize())
        self.put("process_resident_memory_bytes", int(pages[1]) * resource.getpagesize())
        self.put("process_cpu_seconds_total", usage.ru_utime + usage.ru_stime)
        self.put("process_open_fds", sum(1 for _ in Path("/proc/self/fd").iterdir()))
        self.put("process_max_fds", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        return "\n".join(line for family in self._families for line in self._lines(family)) + "\n"

    def _lines(self, family: Mapping[str, Any]) -> Iterator[str]:
        name, kind = family["name"], family["type"]
        yield f"# HELP {name} {family['help']}"
        yield f"# TYPE {name} {kind}"
        common = {label: self._common[label] for label in family["labels"]}
        common.update(self._cache_config if name == "vllm:cache_config_info" else {})
        bound = [(name, tuple(sorted(labels.items()))) for labels in family["series"]]
        bound = [key for key in bound if key in self._created]
        for key in bound:
            labels = {**common, **dict(key[1])}
            if kind == "histogram":
                yield from _histogram_lines(name, labels, self._histograms[key])
            elif kind == "summary":
                yield f"{name}_count{_braces(labels)} {exposition_number(self._values[key])}"
                yield f"{name}_sum{_braces(labels)} 0.0"
            else:
                yield f"{name}{_braces(labels)} {exposition_number(self._values[key])}"
        if family["created"] and bound:
            created = f"{name.removesuffix('_total') if kind == 'counter' else name}_created"
            yield f"# HELP {created} {family['help']}"
            yield f"# TYPE {created} gauge"
            for key in bound:
                yield f"{created}{_braces({**common, **dict(key[1])})} {exposition_number(self._created[key])}"


def _braces(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{key}="{value}"' for key, value in sorted(labels.items())) + "}" if labels else ""


def _histogram_lines(name: str, labels: Mapping[str, str], histogram: Histogram) -> Iterator[str]:
    below = 0
    for bound, count in zip([*map(exposition_number, histogram.bounds), "+Inf"], histogram.counts, strict=True):
        below += count
        yield f"{name}_bucket{_braces({**labels, 'le': bound})} {exposition_number(below)}"
    yield f"{name}_count{_braces(labels)} {exposition_number(below)}"
    yield f"{name}_sum{_braces(labels)} {exposition_number(histogram.sum)}"


def _process_start_seconds() -> float:
    ticks = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
    boot = next(line for line in Path("/proc/stat").read_text(encoding="ascii").splitlines() if line[:5] == "btime")
    return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
