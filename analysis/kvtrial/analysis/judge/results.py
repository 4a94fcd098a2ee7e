"""Result sets: runs by pair, with request values, counters, start of the server and a digest of the answers."""

import json
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from kvtrial.record.errors import UnusableInput

ARMS = ("control", "variant")
DEFAULT_MIN_EFFECT_PCT = 5.0
LEAST_VALUES_TO_TELL = 3
_MARKS = ("invalid", "excluded", "dropped", "discarded")
_MAY_BE_NEGATIVE = {"server_start", "client_lag_p95_ms", "min_effect_pct"}
_SETTINGS = {"load_bytes", "store_bytes", "local_hit_tokens", "external_hit_tokens"}


class Run(msgspec.Struct, frozen=True):
    """One run of one arm. `values`: of single requests, or one for the run. None: not stated (or no such series).

    `mark`: why whoever made it calls it invalid. `started`: when it began, any unit, for the order alone.
    `client_lag_p95_ms`: how late the load client sent, where it says so.
    """

    values: list[float]
    sent: float | None = None
    completed: float | None = None
    failed: float | None = None
    server_start: float | None = None
    local_hit_tokens: float | None = None
    external_hit_tokens: float | None = None
    load_bytes: float | None = None
    store_bytes: float | None = None
    preemptions: float | None = None
    prompt_tokens: float | None = None
    output_digest: str | None = None
    mark: str | None = None
    started: float | None = None
    client_lag_p95_ms: float | None = None

    @property
    def value(self) -> float:
        """The run's value: the median of its requests."""
        return median(self.values)


class Pair(msgspec.Struct, frozen=True):
    """Control and variant run back to back. `order`: first arm first; empty where it is not known."""

    name: str
    control: Run
    variant: Run
    order: list[str]
    mark: str | None = None


class Results(msgspec.Struct, frozen=True):
    """A result set. `min_effect_pct`: the change that matters; `source`: what made it.

    `launches`: arm -> args and env of its server, empty where they are not stated.
    """

    metric: str
    lower_is_better: bool
    min_effect_pct: float
    pairs: list[Pair]
    arms_identical: bool = False
    vllm_version: str | None = None
    prompt_tokens_per_run: float | None = None
    same_prompts: bool | None = None
    seed: Any = None
    aa_noise_pct: float | None = None
    source: str = "results"
    proves_loads: bool = True
    notes: list[str] = []
    launches: dict[str, dict[str, Any]] = {}


def read_results(path: Path) -> Results:
    """A result set in JSON. Raises UnusableInput naming what is missing."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnusableInput(f"{path} can't be read ({error.strerror}); give an existing file.") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise UnusableInput(
            f"{path} is not JSON ({error}); give a result set, as docs/observe.md describes it."
        ) from None
    return results_of(raw, str(path))


def results_of(raw: Any, where: str) -> Results:
    """A result set from its mapping. Raises UnusableInput naming what is missing."""
    if not isinstance(raw, dict) or not isinstance(raw.get("pairs"), list):
        raise UnusableInput(
            f"{where} has no list `pairs`; give a result set, or pairs of files with --control and --variant."
        )
    metric = str(raw.get("metric") or "ttft_ms")
    min_effect = _number(raw, "min_effect_pct", where)
    workload = raw.get("workload") if isinstance(raw.get("workload"), dict) else {}
    pairs = [_pair(item, index, metric, where) for index, item in enumerate(raw["pairs"], start=1)]
    if not pairs:
        raise UnusableInput(f"{where} has no pair; nothing can be judged.")
    _refuse_repeats(pairs, where)
    _refuse_no_metric(raw["pairs"], pairs, metric, where)
    lower = raw.get("lower_is_better", True)
    if not isinstance(lower, bool):
        raise UnusableInput(f"{where}: lower_is_better={lower!r} is neither true nor false.")
    if min_effect is not None and not 0 < min_effect < 100:
        raise UnusableInput(f"{where}: min_effect_pct={min_effect:g} must lie between 0 and 100.")
    return Results(
        metric,
        lower,
        DEFAULT_MIN_EFFECT_PCT if min_effect is None else min_effect,
        pairs,
        bool(raw.get("arms_identical", False)),
        str(raw["vllm_version"]) if raw.get("vllm_version") else None,
        _number(workload or {}, "prompt_tokens_per_run", where),
        (workload or {}).get("same_prompts_every_pair"),
        (workload or {}).get("seed"),
        _number(raw, "aa_noise_pct", where),
        launches=_launches(raw.get("launches"), where),
    )


def _refuse_repeats(pairs: list[Pair], where: str) -> None:
    """Refuse a pair that stands there twice: it would count as evidence of its own."""
    names: set[str] = set()
    for pair in pairs:
        if pair.name in names:
            raise UnusableInput(f"{where}: pair {pair.name} is listed twice; list each pair once, by its own name.")
        names.add(pair.name)
    for arm in ARMS:
        seen: dict[bytes, str] = {}
        for pair in pairs:
            run = getattr(pair, arm)
            # Two runs may well agree in one rounded value, not in every request.
            if len(set(run.values)) < LEAST_VALUES_TO_TELL:
                continue
            other = seen.setdefault(msgspec.msgpack.encode(run), pair.name)
            if other != pair.name:
                raise UnusableInput(
                    f"{where}: the {arm} runs of pairs {other} and {pair.name} are the same in every value; list each "
                    "run once."
                )


def _refuse_no_metric(raw: list[dict[str, Any]], pairs: list[Pair], metric: str, where: str) -> None:
    if any(getattr(pair, arm).values for pair in pairs for arm in ARMS):
        return
    known = {field for field in Run.__struct_fields__ if field != "values"} | {"order", "valid"}
    has = sorted(
        {
            str(name)
            for item in raw
            for arm in ARMS
            for name, value in item[arm].items()
            if name not in known and (isinstance(value, list) or type(value) in (int, float))
        }
    )
    if has:
        raise UnusableInput(f"{where}: no run has {metric}; they have {', '.join(has)}. Name one of these as `metric`.")


def _launches(given: Any, where: str) -> dict[str, dict[str, Any]]:
    if given is None:
        return {}
    fits = isinstance(given, dict) and all(
        isinstance(given.get(arm), dict) and isinstance(given[arm].get("args"), list) for arm in ARMS
    )
    if not fits:
        raise UnusableInput(f"{where}: launches must give control and variant, each with a list args and perhaps env.")
    return {arm: {"args": given[arm]["args"], "env": given[arm].get("env") or {}} for arm in ARMS}


def _pair(item: Any, index: int, metric: str, where: str) -> Pair:
    if not isinstance(item, dict):
        raise UnusableInput(f"{where}: pair {index} is no mapping.")
    name = str(item.get("pair", index))
    runs = {}
    for arm in ARMS:
        if not isinstance(item.get(arm), dict):
            raise UnusableInput(f"{where}: pair {name} has no {arm}; a pair is one run of each arm.")
        runs[arm] = _run(item[arm], metric, f"{where}: pair {name}, {arm}")
    order = item.get("order")
    known = [str(arm) for arm in order] if isinstance(order, list) else []
    if known and sorted(known) != sorted(ARMS):
        raise UnusableInput(f"{where}: pair {name} has order {known}; it must name control and variant once each.")
    return Pair(name, runs["control"], runs["variant"], known, _mark(item, f"{where}: pair {name}"))


def _run(raw: dict[str, Any], metric: str, where: str) -> Run:
    given = raw.get(metric)
    values = given if isinstance(given, list) else [] if given is None else [given]
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0 or value == float("inf"):
            raise UnusableInput(f"{where}: {metric} holds {value!r}; every value must be a number above 0.")
    digest = raw.get("output_digest")
    return Run(
        [float(value) for value in values],
        **{
            name: _number(raw, name, where)
            for name in (
                "sent",
                "completed",
                "failed",
                "server_start",
                "preemptions",
                "prompt_tokens",
                "client_lag_p95_ms",
                *sorted(_SETTINGS),
            )
        },
        output_digest=None if digest is None else str(digest),
        mark=_mark(raw, where),
    )


def _number(raw: dict[str, Any], name: str, where: str) -> float | None:
    value = raw.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise UnusableInput(f"{where}: {name}={value!r} is no number; give a number, or null where it is not known.")
    if value < 0 and name not in _MAY_BE_NEGATIVE:
        raise UnusableInput(f"{where}: {name}={value!r} is below 0; a counter that fell is no rise, give null then.")
    return float(value)


def _mark(raw: dict[str, Any], where: str) -> str | None:
    """Why whoever made the set marks a pair or run as invalid, in their words."""
    if not isinstance(raw.get("valid", True), bool | None):
        raise UnusableInput(f"{where}: valid={raw['valid']!r} is neither true nor false; write it without quotes.")
    reason = next(
        (str(raw[key]) for key in ("invalid_reason", "reason", "invalid_because", "note", "error") if raw.get(key)), ""
    )
    if raw.get("valid") is False or any(raw.get(mark) is True for mark in _MARKS):
        return reason or "marked as invalid"
    worded = next((str(raw[mark]) for mark in _MARKS if isinstance(raw.get(mark), str) and raw[mark]), None)
    if worded is None and any(value is True for key, value in raw.items() if "restart" in str(key)):
        return "the server was restarted in it"
    return worded
