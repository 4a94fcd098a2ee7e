"""The section on conditions: all it takes to repeat the campaign, its runs and time, the honesty card. Pure."""

import itertools
import json
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

from msgspec import Struct

from kvtrial.analysis import answer
from kvtrial.analysis.report.selection import (
    HOSTS_SHOWN_MAX,
    RUNS_SHOWN_MAX,
    Chosen,
    Row,
    distinct,
    largest,
    middle,
)
from kvtrial.analysis.report.words import Words
from kvtrial.record.calibration import Calibration
from kvtrial.record.record import PhaseRecord, Resolved, RunRecord
from kvtrial.record.store import RECORD
from kvtrial.record.verdict import Verdict

ENGLISH = Words()
CONDITION_HOSTS_SHOWN_MAX = 20
CONFIG_ENTRIES_MAX = 1500
COMMANDS = ("unpack", "campaign", "run", "verdict", "report")


class Section(Struct, frozen=True):
    """All of the section."""

    hosts: list[tuple[str, list[tuple[str, str]]]]
    hosts_left_out: str
    launches: list[tuple[str, str]]
    differences: list[Row]
    configurations: list[tuple[str, str]]
    prompts: list[Row]
    provenance: list[tuple[str, str]]
    commands: list[tuple[str, str]]
    runs: list[Row]
    runs_left_out: int
    time: list[Row]
    card: list[Row]
    calibrations: list[tuple[str, str]]


def section(
    verdict: Verdict,
    chosen: Chosen,
    campaign: dict[str, Any],
    commands: Mapping[str, str],
    words: Words,
    record_names: Mapping[tuple[str, str], str],
) -> Section:
    """The section; `campaign` is what campaign.json holds; `commands` may be copied, `record_names` are for links."""
    records = chosen.records
    return Section(
        hosts=_condition_groups(records, words),
        hosts_left_out=_hosts_left_out(records, words),
        launches=_launches(records),
        differences=_configuration_differences(records, chosen.arms),
        configurations=_configurations(records, chosen.arms),
        prompts=_prompt_rows(records, words),
        provenance=_provenance(campaign, words),
        commands=_commands(commands, words),
        runs=_run_rows(records, record_names, words),
        runs_left_out=max(0, len(records) - RUNS_SHOWN_MAX),
        time=_time_rows(verdict, words),
        card=_card_rows(records, chosen.arms, words),
        calibrations=_calibrations(records, words),
    )


def _condition_groups(records: Sequence[RunRecord], words: Words) -> list[tuple[str, list[tuple[str, str]]]]:
    """Host → (name, value) of its conditions. A value that changed between runs says so."""
    hosts = list(dict.fromkeys(record.host for record in records))[:CONDITION_HOSTS_SHOWN_MAX]
    groups = []
    for host in hosts:
        own = [record for record in records if record.host == host]
        facts = [
            (
                words(f"condition.{name}"),
                distinct((read(record, words) for record in own), words("changed"), words("not_measured")),
            )
            for name, read in CONDITIONS.items()
        ]
        groups.append((host, facts))
    return groups


def _hosts_left_out(records: Sequence[RunRecord], words: Words) -> str:
    """How many hosts' conditions and calibrations stand in the records alone; "" where all stand here."""
    left_out = len({record.host for record in records}) - CONDITION_HOSTS_SHOWN_MAX
    return words("conditions.left_out", count=words.whole(left_out)) if left_out > 0 else ""


def gpus_text(gpus: Sequence[Mapping[str, Any]], words: Words = ENGLISH) -> str:
    """What GPUs there are: how many of which name, memory and modes; clocks, which move in a run, are left out."""
    alike: dict[str, int] = {}
    for gpu in gpus:
        memory = str(gpu.get("memory.total", ""))
        size = words.bytes(float(memory) * 2**20) if memory.isdecimal() else ""
        mig, persistence = gpu.get("mig.mode.current"), gpu.get("persistence_mode")
        modes = (
            [f"MIG {words.or_else('mode.enabled', mig.lower())}"]
            if isinstance(mig, str) and mig.lower() == "enabled"
            else []
        )
        if isinstance(persistence, str) and persistence:
            modes.append(
                words("host.persistence", mode=words.or_else(f"mode.{persistence.lower()}", persistence.lower()))
            )
        said = ", ".join([str(gpu.get("name", words("host.unnamed_gpu"))), *filter(None, [size]), *modes])
        alike[said] = alike.get(said, 0) + 1
    return "; ".join(f"{count} × {said}" if count > 1 else said for said, count in alike.items())


def _tiers(record: RunRecord, words: Words) -> str:
    tiers = record.capacity.tier_bytes
    chunks = record.capacity.chunk_tokens
    return "; ".join(
        words("host.tier", arm=arm, size=words.bytes(size), bytes=words.whole(size))
        + (words("host.chunks", tokens=words.whole(chunks[arm])) if arm in chunks else "")
        for arm, size in tiers.items()
    )


def _kv_cache(record: RunRecord, words: Words) -> str:
    blocks, tokens = record.capacity.usable_gpu_blocks, record.capacity.block_tokens
    return words(
        "host.kv_cache", blocks=words.whole(blocks), each=words.whole(tokens), all=words.count(blocks * tokens, "token")
    )


def _cpu(record: RunRecord, words: Words) -> str:
    """Which CPU, and how many."""
    return words("host.cpu", model=record.conditions.cpu_model, cpus=words.whole(record.conditions.cpus))


CONDITIONS: dict[str, Callable[[RunRecord, Words], str]] = {
    "vllm": lambda record, _: record.resolved.vllm_version if record.resolved else "",
    "vllm_pinned": lambda record, _: record.vllm_version_pinned,
    "model": lambda record, words: (
        f"{record.model.name}, {words.or_else(f'weights.{record.model.weights}', record.model.weights)}"
    ),
    "revision": lambda record, _: record.model.revision,
    "kv_per_token": lambda record, words: words.bytes(record.model.kv_bytes_per_token),
    "kv_cache": _kv_cache,
    "tier": _tiers,
    "cpu": _cpu,
    "ram": lambda record, words: words.bytes(record.conditions.ram_total_bytes),
    "gpus": lambda record, words: gpus_text(record.conditions.gpus, words) or words("host.no_gpu"),
    "driver": lambda record, _: record.conditions.driver_version or "",
    "os": lambda record, _: record.conditions.os,
    "kernel": lambda record, _: record.conditions.kernel,
    "python": lambda record, _: record.conditions.python,
    "governor": lambda record, _: record.conditions.governor or "",
    "huge_pages": lambda record, _: record.conditions.transparent_hugepages or "",
    "clock": lambda record, _: record.conditions.clock_source or "",
    "boot": lambda record, _: record.conditions.boot_id,
    "packages": lambda record, _: record.resolved.packages_sha256 if record.resolved else "",
    "plan": lambda record, _: record.plan_sha256,
    "kvtrial": lambda record, _: record.kvtrial_version,
}


def _launches(records: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """(arm, command lines) of each arm, as first started; a line an engine."""
    launches = {}
    for record in records:
        if record.arm not in launches:
            launches[record.arm] = "\n".join(
                " ".join([*(f"{name}={shlex.quote(value)}" for name, value in sorted(engine.env.items())),
                          shlex.join(engine.argv)])
                for engine in record.launch.engines()
            )  # fmt: skip
    return list(launches.items())


def _resolved_config(records: Sequence[RunRecord], arm: str) -> dict[str, str]:
    """The first that is known; {} where none is. A record that was cut down for its size has none."""
    for record in records:
        if record.arm == arm and record.resolved is not None and (record.resolved.config or record.resolved.log_facts):
            found = {**record.resolved.config, **{f"log: {key}": v for key, v in record.resolved.log_facts.items()}}
            return {key: _plain(value) for key, value in sorted(found.items())}
    return {}


def _plain(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, sort_keys=True)
    return answer.one_line(text, 300)


def _configuration_differences(records: Sequence[RunRecord], arms: Sequence[str]) -> list[Row]:
    """Entries of the resolved configuration that are not the same in all arms.

    What differs between runs of one arm on one host, as a path of each start, is no difference of the arms; unless the
    arms' values lie apart, as the size of a cache that each start finds for itself.
    """
    configs = [_resolved_config(records, arm) for arm in arms]
    known = [config for config in configs if config]
    keys = sorted({key for config in known for key in config})
    # An arm whose configuration nobody knows differs from none.
    keys = [key for key in keys if len({config.get(key, "–") for config in known}) > 1]
    rows = [Row(key, [config.get(key, "–") for config in configs]) for key in keys]
    return [row for row in rows if not _is_of_a_start(records, row.head)][:CONFIG_ENTRIES_MAX]


OF_A_START = re.compile(r"/|[0-9a-f]{8}-|\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{8,}\b")
"""A path, a uuid or a long hexadecimal number: what every start has another of."""
KEY_OF_A_START = re.compile(r"(?:^|[._ -])(?:port|pid|id|ids|uuid|time|timestamp)(?:$|[._ -])")
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")


def _is_of_a_start(records: Sequence[RunRecord], key: str) -> bool:
    """Whether an entry has other values in other runs of one arm on one host, and the arms' values do not lie apart."""
    by_run: dict[tuple[str, str], set[str]] = {}
    by_arm: dict[str, set[str]] = {}
    for record in records:
        if record.resolved is not None and (record.resolved.config or record.resolved.log_facts):
            value = _entry(record.resolved, key)
            by_run.setdefault((record.host, record.arm), set()).add(value)
            by_arm.setdefault(record.arm, set()).add(value)
    if all(len(values) == 1 for values in by_run.values()):
        return False
    if KEY_OF_A_START.search(key) or any(OF_A_START.search(value) for values in by_arm.values() for value in values):
        return True
    return not any(_lie_apart(a, b) for a, b in itertools.combinations(by_arm.values(), 2))


def _lie_apart(a: set[str], b: set[str]) -> bool:
    """Whether two arms' values have nothing in common: of numbers, not even their ranges."""
    texts = {NUMBER.sub("#", value) for value in a | b}
    if len(texts) > 1 or "#" not in next(iter(texts)):
        return not a & b
    mine, theirs = (
        [[float(n.replace(",", "")) for n in NUMBER.findall(value)] for value in values] for values in (a, b)
    )
    return any(
        max(own) < min(other) or max(other) < min(own)
        for own, other in zip(zip(*mine, strict=True), zip(*theirs, strict=True), strict=True)
    )


def _entry(resolved: Resolved, key: str) -> str:
    of_the_log = key.removeprefix("log: ")
    known = resolved.log_facts if of_the_log != key else resolved.config
    return _plain(known.get(of_the_log, "–"))


def _configurations(records: Sequence[RunRecord], arms: Sequence[str]) -> list[tuple[str, str]]:
    """(arm, resolved configuration as lines)."""
    found = []
    for arm in arms:
        config = _resolved_config(records, arm)
        if config:
            lines = [f"{key} = {value}" for key, value in config.items()]
            found.append((arm, "\n".join(lines[:CONFIG_ENTRIES_MAX])))
    return found


def _prompt_rows(records: Sequence[RunRecord], words: Words) -> list[Row]:
    """Phase → requests, lengths, concurrency and the hash of its prompts in the first pair; a row a phase."""
    if not records:
        return []
    completed = [record for record in records if record.outcome == "completed"]
    with_requests = (record for record in completed if any(phase.requests for phase in record.phases))
    first = next(with_requests, (completed or records)[0])
    rows = []
    for phase in first.phases:
        lengths = sorted({item.prompt_tokens for item in phase.requests if item.prompt_tokens is not None})
        outputs = sorted({item.max_tokens for item in phase.requests})
        cells = [
            words.whole(phase.sent),
            words.local(_range(lengths)),
            words.local(_range(outputs)),
            _arrivals(phase),
            words.seconds(phase.seconds),
            phase.prompts_sha256[:16],
        ]
        rows.append(Row(phase.name, cells))
    return rows


def _arrivals(phase: PhaseRecord) -> str:
    if phase.concurrency is not None:
        return str(phase.concurrency)
    return phase.arrivals or "open loop"


def _range(values: Sequence[int]) -> str:
    if not values:
        return "–"
    return f"{values[0]:,}" if values[0] == values[-1] else f"{values[0]:,} – {values[-1]:,}"


def _provenance(campaign: dict[str, Any], words: Words) -> list[tuple[str, str]]:
    """campaign.json without the protocol and the plan, flattened to (dotted name, value)."""
    found: list[tuple[str, str]] = []

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), inner)
        elif prefix:
            found.append((prefix, _plain(value)))

    walk("", {key: value for key, value in campaign.items() if key not in ("plan", "protocol")})
    more = [("…", words("gates.more", count=words.whole(len(found) - HOSTS_SHOWN_MAX)))]
    return found if len(found) <= HOSTS_SHOWN_MAX else found[:HOSTS_SHOWN_MAX] + more


def _commands(given: Mapping[str, str], words: Words) -> list[tuple[str, str]]:
    """(what it does, command) pairs, to be copied."""
    return [(words(f"command.{name}"), given[name]) for name in COMMANDS if name in given]


def _run_rows(records: Sequence[RunRecord], names: Mapping[tuple[str, str], str], words: Words) -> list[Row]:
    """A row a run with a link to its record; runs with a fault are kept where the table is cut."""
    kept = list(records)
    if len(kept) > RUNS_SHOWN_MAX:
        chosen = sorted(kept, key=lambda record: record.outcome == "completed")[:RUNS_SHOWN_MAX]
        kept = sorted(chosen, key=lambda record: (record.host, record.pair, record.position, record.run))
    rows = []
    for record in kept:
        times, samples = record.times, record.samples
        fault = record.fault
        cells = [
            f"{record.pair}{' ' + words('spare') if record.spare else ''}",
            record.arm,
            words.seconds(times.start_seconds),
            words.seconds(times.phases_seconds),
            words.seconds(times.stop_seconds),
            words.bytes(samples.ram_used_peak_bytes) if samples else words("not_measured"),
            words(f"outcome.{record.outcome}"),
            f"{fault.fault}: {answer.one_line(fault.detail, 160)}" if fault else "",
        ]
        name = names.get((record.host, record.run), RECORD)
        link = "./" + quote(str(PurePosixPath("runs") / record.host / record.run / name))
        rows.append(Row(f"{record.host} / {record.run}", cells, kind=record.outcome, link=link))
    return rows


def _time_rows(verdict: Verdict, words: Words) -> list[Row]:
    budget = verdict.time_budget
    if budget is None:
        return []
    parts = {
        "starts": budget.engine_start_seconds,
        "phases": budget.phases_seconds,
        "stops": budget.engine_stop_seconds,
        "rest": budget.other_seconds,
    }
    whole = sum(value for value in parts.values() if math.isfinite(value))
    rows = [
        Row(words(f"time.{name}"), [words.seconds(value), words.share(value / whole) if whole > 0 else "–"])
        for name, value in parts.items()
    ]
    if budget.install_seconds is not None:
        rows.append(Row(words("time.install"), [words.seconds(budget.install_seconds), "–"]))
    return [*rows, Row(words("time.whole"), [words.seconds(budget.total_seconds), ""], kind="total")]


def _card_rows(records: Sequence[RunRecord], arms: Sequence[str], words: Words) -> list[Row]:
    """What the load client says of itself, an arm a column: the worst over all phases, CPU share the median."""
    columns = []
    for arm in arms:
        own = [record for record in records if record.arm == arm]
        cards = [phase.card for record in own for phase in record.phases]
        samples = [record.samples for record in own if record.samples is not None]
        columns.append(
            {
                "lag_p95": words.seconds(largest(card.dispatch_lag_p95_seconds for card in cards)),
                "lag_max": words.seconds(largest(card.dispatch_lag_max_seconds for card in cards)),
                "loop": words.seconds(largest(card.loop_lag_max_seconds for card in cards)),
                "cpu": words.share(middle(card.client_cpu_share for card in cards)),
                "gc": words.seconds(largest(card.gc_pause_max_seconds for card in cards)),
                "streams": words.whole(largest(card.streams_max for card in cards)),
                "connections": words.whole(sum(card.connections_opened for card in cards)),
                "steal": words.share(largest(card.steal_share for card in cards)),
                "foreign": words.share(largest(sample.foreign_cpu_share for sample in samples)),
                "clock": distinct((card.clock for card in cards), words("changed"), words("not_measured")),
                "pinning": distinct((card.pinning or "" for card in cards), words("changed"), words("not_measured")),
            }
        )
    names = list(columns[0]) if columns else []
    return [Row(words(f"card.{name}"), [column[name] for column in columns]) for name in names]


def _calibrations(records: Sequence[RunRecord], words: Words) -> list[tuple[str, str]]:
    """Host → what its calibration of the load client found, or that there is none; the first hosts."""
    found: dict[str, Calibration | None] = {}
    for record in records:
        found.setdefault(record.host, record.calibration)
    said = []
    for host, card in list(found.items())[:CONDITION_HOSTS_SHOWN_MAX]:
        held = [level for level in card.levels if level.held] if card is not None else []
        if not held:
            said.append((host, words("card.none")))
            continue
        said.append(
            (
                host,
                words(
                    "card.calibrated",
                    error=words.seconds(held[-1].ttft_error_p99_seconds),
                    streams=words.whole(held[-1].streams),
                ),
            )
        )
    return said
