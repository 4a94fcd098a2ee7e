"""Result files of other load clients as runs: `vllm bench serve --save-detailed`, guidellm (JSON), aiperf (JSON lines).

Formats read in vLLM 0.32.0, guidellm 0.8.1 and aiperf as locked in requirements/. None of them records the server's
counters, so what is read here proves no load from a tier.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvtrial.analysis.judge.results import Pair, Results, Run
from kvtrial.record.errors import UnusableInput

Metric = Literal["ttft_ms", "itl_ms", "e2e_ms"]
METRICS: tuple[Metric, ...] = ("ttft_ms", "itl_ms", "e2e_ms")
_AIPERF_NAMES = {"ttft_ms": "time_to_first_token", "itl_ms": "inter_token_latency", "e2e_ms": "request_latency"}


class PeerRun(msgspec.Struct, frozen=True):
    """One file: the run, the client that made it, and the prompt lengths it states."""

    client: str
    run: Run
    prompt_lengths: list[int]


def read_pairs(control: list[Path], variant: list[Path], metric: Metric, min_effect_pct: float) -> Results:
    """The n-th control file against the n-th variant file. Raises UnusableInput."""
    if len(control) != len(variant):
        raise UnusableInput(
            f"{len(control)} files of control and {len(variant)} of variant make no pairs; give as many of each, in "
            f"the "
            "same order."
        )
    read = [(read_file(one, metric), read_file(other, metric)) for one, other in zip(control, variant, strict=True)]
    clients = sorted({run.client for pair in read for run in pair})
    if len(clients) > 1:
        raise UnusableInput(
            f"The files come from {', '.join(clients)}; clients measure times differently, so compare files of one."
        )
    notes = [
        f"{clients[0]} records no counters of the server: whether a tier gave anything is not to be known from it."
    ]
    for (one, other), path in zip(read, control, strict=True):
        if one.prompt_lengths and other.prompt_lengths and one.prompt_lengths != other.prompt_lengths:
            notes.append(f"{path.name}: prompt lengths differ between control and variant, so the prompts do.")
    alike = [tuple(one.prompt_lengths) for one, _ in read if one.prompt_lengths]
    repeated = len(alike) > 1 and len(set(alike)) == 1 and len(set(alike[0])) > 1
    if repeated:
        notes.append(
            "Every run has the same prompt lengths in the same order, as one seed gives them (seed 0 is the default "
            "of vllm "
            "bench serve): where the server was not restarted in between, later runs met a warm cache (#52884)."
        )
    pairs = [
        Pair(str(number), one.run, other.run, _order(one.run, other.run))
        for number, (one, other) in enumerate(read, start=1)
    ]
    return Results(
        metric,
        True,
        min_effect_pct,
        pairs,
        same_prompts=repeated or None,
        source=clients[0],
        proves_loads=False,
        notes=notes,
    )


def read_file(path: Path, metric: Metric) -> PeerRun:
    """One result file, whichever client made it. Raises UnusableInput."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UnusableInput(f"{path} can't be read ({error.strerror}); give an existing file.") from None
    except UnicodeDecodeError:
        raise UnusableInput(f"{path} is not UTF-8.") from None
    lines = _json_lines(text)
    if lines and "metrics" in lines[0] and "metadata" in lines[0]:
        return _finished(path, metric, _aiperf(lines, metric))
    if len(lines) > 1:
        raise UnusableInput(f"{path} holds {len(lines)} results; a run is one file (no --append-result).")
    raw = lines[0] if lines else _whole(path, text)
    if isinstance(raw, dict) and isinstance(raw.get("benchmarks"), list):
        return _finished(path, metric, _guidellm(path, raw, metric))
    if isinstance(raw, dict) and "ttfts" in raw:
        return _finished(path, metric, _vllm(raw, metric))
    if isinstance(raw, dict) and "median_ttft_ms" in raw:
        raise UnusableInput(
            f"{path} is of vllm bench serve without --save-detailed: it lists no request; run it with it."
        )
    if isinstance(raw, dict) and ("time_to_first_token" in raw or "records" in raw):
        raise UnusableInput(f"{path} is aiperf's summary; give profile_export.jsonl, which lists the requests.")
    raise UnusableInput(
        f"{path} is no result file of vllm bench serve --save-detailed, guidellm (JSON) or aiperf "
        f"(profile_export.jsonl)."
    )


def _json_lines(text: str) -> list[dict[str, Any]]:
    found = []
    for line in text.splitlines():
        if line.strip():
            try:
                item = json.loads(line)
            except ValueError:
                return []
            if not isinstance(item, dict):
                return []
            found.append(item)
    return found


def _whole(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UnusableInput(f"{path} is not JSON ({error}).") from None


def _finished(path: Path, metric: Metric, read: PeerRun) -> PeerRun:
    if not read.run.values:
        raise UnusableInput(f"{path} ({read.client}) has no request that ended well with a value for {metric}.")
    return read


def _vllm(raw: dict[str, Any], metric: Metric) -> PeerRun:
    errors = raw.get("errors") or [""] * len(raw["ttfts"])
    # A failed request stands in the lists with zeros; nothing of it is a time.
    good = [index for index, error in enumerate(errors) if not error and raw["ttfts"][index] > 0]
    itls = raw.get("itls") or []

    def ended(index: int) -> float:
        latencies = raw.get("latencies")
        return float(latencies[index]) if latencies else raw["ttfts"][index] + sum(itls[index])

    take: dict[Metric, Callable[[], Iterable[float]]] = {
        "ttft_ms": lambda: (raw["ttfts"][index] for index in good),
        "itl_ms": lambda: (gap for index in good for gap in itls[index]),
        "e2e_ms": lambda: (ended(index) for index in good),
    }
    texts = raw.get("generated_texts")
    lengths = [int(length) for length in raw.get("input_lens") or []]
    return PeerRun(
        "vllm bench serve",
        Run(
            [1000 * value for value in take[metric]() if value > 0],
            sent=float(raw.get("num_prompts") or len(errors)),
            completed=float(raw.get("completed", len(good))),
            failed=float(raw.get("failed", len(errors) - len(good))),
            output_digest=_digest(texts) if texts else None,
            started=_moment(raw.get("date"), "%Y%m%d-%H%M%S"),
        ),
        lengths,
    )


def _guidellm(path: Path, raw: dict[str, Any], metric: Metric) -> PeerRun:
    if len(raw["benchmarks"]) != 1:
        raise UnusableInput(
            f"{path} holds {len(raw['benchmarks'])} benchmarks of guidellm; a pair compares one rate: run one at a "
            f"time."
        )
    benchmark = raw["benchmarks"][0]
    requests = benchmark.get("requests") or {}
    good = requests.get("successful") or []
    bad = len(requests.get("errored") or []) + len(requests.get("incomplete") or [])
    take: dict[Metric, Callable[[dict[str, Any]], float | None]] = {
        "ttft_ms": lambda one: one.get("time_to_first_token_ms"),
        "itl_ms": lambda one: one.get("inter_token_latency_ms"),
        "e2e_ms": lambda one: None if one.get("request_latency") is None else 1000 * one["request_latency"],
    }
    values = [float(value) for one in good if (value := take[metric](one))]
    lengths = [int(one["prompt_tokens"]) for one in good if one.get("prompt_tokens")]
    started = benchmark.get("start_time")
    return PeerRun(
        "guidellm",
        Run(
            values,
            sent=float(len(good) + bad),
            completed=float(len(good)),
            failed=float(bad),
            started=float(started) if isinstance(started, int | float) else None,
        ),
        sorted(lengths),
    )


def _aiperf(lines: list[dict[str, Any]], metric: Metric) -> PeerRun:
    measured = [line for line in lines if line["metadata"].get("benchmark_phase", "profiling") == "profiling"]
    good = [line for line in measured if line.get("error") is None and not line["metadata"].get("was_cancelled")]
    name = _AIPERF_NAMES[metric]
    values = []
    for line in good:
        found = line["metrics"].get(name)
        if found and found.get("value"):
            scale = {"ms": 1.0, "s": 1e3, "us": 1e-3, "ns": 1e-6}.get(found.get("unit", "ms"), 1.0)
            values.append(scale * float(found["value"]))
    starts = [line["metadata"].get("request_start_ns") for line in measured]
    known = [start for start in starts if isinstance(start, int | float)]
    lengths = [line["metrics"].get("input_sequence_length", {}).get("value") for line in good]
    return PeerRun(
        "aiperf",
        Run(
            values,
            sent=float(len(measured)),
            completed=float(len(good)),
            failed=float(len(measured) - len(good)),
            started=min(known) / 1e9 if known else None,
        ),
        sorted(int(length) for length in lengths if length),
    )


def _order(control: Run, variant: Run) -> list[str]:
    if control.started is None or variant.started is None or control.started == variant.started:
        return []
    return ["control", "variant"] if control.started < variant.started else ["variant", "control"]


def _digest(texts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


def _moment(text: Any, form: str) -> float | None:
    try:
        return datetime.strptime(str(text), form).timestamp()
    except ValueError:
        return None
