"""What an engine's log shows: why it died or did not start, whether it stands still, whether its tier is pinned."""

import re
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from kvtrial.analysis.observe.capacity import Told
from kvtrial.analysis.observe.configuration import configuration_of_log, told_by_configuration
from kvtrial.analysis.observe.deadlocks import known_deadlocks, named
from kvtrial.analysis.observe.finding import Confidence, Finding
from kvtrial.analysis.observe.host import another_process_killed
from kvtrial.analysis.observe.loglines import STUCK_LEAST_LINES, by_lines, is_stalled, longest_stalled, longest_stuck
from kvtrial.analysis.observe.words import plural, span, whole
from kvtrial.record.enginelog import Diagnosis, EngineFacts, diagnose, engine_facts, without_request_texts
from kvtrial.record.hazards import watch_log
from kvtrial.record.oom import MemoryCounters, killed_others, tell_apart
from kvtrial.record.statuslines import StatusLine, interval_seconds, status_lines
from kvtrial.record.versions import outside_read_range

_MACHINE_PREEMPTION = re.compile(
    r"(?i)\b(spot|instance|node|pod|slurm\w*|kubelet|job)\b[^\n]*\bpreempt(ed|ion|ing)?\b|"
    r"\bpreempt(ed|ion|ing)?\b[^\n]*\b(spot|instance|node|pod|slurm\w*|kubelet)\b"
)
_CPU_ENGINE = re.compile(r"CPU KV cache (?:size|usage)|device_config=cpu\b")
_SERVES = re.compile(r"Application startup complete|Avg prompt throughput")
EARLIER_LIFE = "an earlier life of the server"
_START_FAILED = re.compile(r"Engine core initialization failed|EngineCore failed to start")
_START_BEGAN = re.compile(r"Initializing a V1 LLM engine|Starting to load model|Loading safetensors")
_LESS_BESIDE = (
    "Leave more memory beside the KV cache (smaller --kv-cache-memory-bytes or --max-num-batched-tokens) in all arms."
)
_NO_COUNTERS = MemoryCounters(None, None, None)


class Log(msgspec.Struct, frozen=True):
    """One log as it is read. `version`: as it says, or as stated from outside."""

    text: str
    version: str | None
    facts: EngineFacts
    diagnosis: Diagnosis | None
    status: dict[str, list[StatusLine]]

    @property
    def backend(self) -> Literal["cpu", "cuda"]:
        """Whether it is the CPU engine's: its lines name the device of the KV cache."""
        return "cpu" if _CPU_ENGINE.search(self.text) else "cuda"

    @property
    def lines(self) -> list[StatusLine]:
        """Periodic lines of all engines, in the order of the log."""
        return sorted((line for lines in self.status.values() for line in lines), key=lambda line: line.line_number)


def read_log(text: str, version: str | None = None) -> Log:
    """Read a log; `version` is what is known from elsewhere, and counts only where the log names none."""
    text = without_request_texts(text)
    facts = engine_facts(text)
    known = facts.engine_version or version
    usable = known if known is None or outside_read_range(known) is None else None
    return Log(text, known, facts, diagnose(text, usable), status_lines(text, usable))


def log_findings(log: Log) -> Iterator[Finding]:
    """Findings of one log, the worst first."""
    yield from _killed(log)
    yield from _machine_preempted(log)
    yield from _dead(log)
    yield from _stuck(log)
    yield from _stalled(log)
    yield from _not_pinned(log)
    yield from _watched(log)
    if log.diagnosis is None or _serves_again(log, log.diagnosis) is not None:
        yield from by_lines(log.status)
        yield from _nothing_periodic(log)


def told_by(log: Log) -> Told:
    """Sizes that a log states."""
    gib = log.facts.available_kv_cache_gib
    return Told(gpu_tokens=log.facts.kv_cache_tokens, gpu_bytes=None if gib is None else gib * 2**30, source="the log")


def _version(log: Log) -> str:
    return f"vLLM {log.version}" if log.version else "a version that the log does not name"


def _killed(log: Log) -> Iterator[Finding]:
    kernel = [line for line in log.text.splitlines() if "Killed process" in line]
    others = killed_others(kernel)
    yield from another_process_killed(others)
    told = tell_apart(None, _NO_COUNTERS, _NO_COUNTERS, kernel)
    if told.kind == "none":
        return
    yield Finding(
        f"out_of_memory_{told.kind}", "warn", f"{told.sentence} By this line: {told.evidence}", {}, told.do, about=None
    )


def _machine_preempted(log: Log) -> Iterator[Finding]:
    lines = [line for line in log.text.splitlines() if _MACHINE_PREEMPTION.search(line)]
    if lines:
        yield Finding(
            "not_preemption",
            "warn",
            f"What was preempted is the machine, the pod or the job, not requests in vLLM: "
            f"'{_short(lines[0].strip())}'. "
            "The scheduler of the cluster took the place away; vllm:num_preemptions_total knows nothing of it.",
            {"lines": len(lines), "delta": 0},
            "Look at the cluster's priorities and at spot instances; nothing in vLLM has to be resized for it.",
        )


def _dead(log: Log) -> Iterator[Finding]:
    found = log.diagnosis
    if found is None:
        return
    confidence: Confidence = "seen"
    if found.id == "cuda_oom_at_start" and not _START_FAILED.search(log.text):
        found, confidence = _oom_of_excerpt(log, found)
    said = [found.cause]
    before = [line for line in log.lines if line.line_number < found.line_number]
    numbers: dict[str, Any] = {**found.numbers, "line": found.line_number}
    if found.class_ == "gpu_memory_short_at_start":
        said.append("That is a failure to start: it is not a preemption and not a run-time CUDA out-of-memory error.")
    elif before:
        said.append(_load_before(before[-1], found.class_, interval_seconds(before)))
        numbers |= {"running": before[-1].running, "waiting": before[-1].waiting}
        numbers |= {
            "preemptions_last_interval": before[-1].preemptions,
            "kv_usage_percent": before[-1].kv_usage_percent,
        }
    if found.class_ == "dev_shm_shortage" and (size := _tier_bytes(log)):
        said.append(f"The tier asked for is {size:,.0f} B ({size / 2**30:.1f} GiB), a file in /dev/shm from 0.27 on.")
        numbers |= {"tier_bytes": size}
    if found.class_ == "cuda_oom_runtime" and "EngineDeadError" in log.text:
        said.append(
            "The engine is dead by it (EngineDeadError): every request fails from then on, and the run is invalid."
        )
    again = _serves_again(log, found)
    if again is not None:
        said.append(f"The server was started again after it and serves since (line {again}).")
        numbers["served_again_line"] = again
    said.append(f"({_version(log)}, line {found.line_number}: {_short(found.evidence_line)})")
    yield Finding(
        found.class_,
        "warn",
        " ".join(part for part in said if part),
        numbers,
        found.fix,
        confidence,
        None if again is None else EARLIER_LIFE,
    )


def _oom_of_excerpt(log: Log, found: Diagnosis) -> tuple[Diagnosis, Confidence]:
    """An out-of-memory error of the GPU with no line that says whether the server had started."""
    if "EngineDeadError" in log.text:
        cause = "The GPU ran out of memory while serving: the engine died of it (EngineDeadError), which a start can't."
        return msgspec.structs.replace(found, class_="cuda_oom_runtime", cause=cause, fix=_LESS_BESIDE), "inferred"
    if _START_BEGAN.search(log.text):
        return found, "inferred"
    cause = (
        "The GPU ran out of memory; whether at start or while serving is unknown: these lines hold neither the start "
        "nor its failure."
    )
    fix = f"Give the log from the start on. Look for another process on the GPU with nvidia-smi. {_LESS_BESIDE}"
    return msgspec.structs.replace(found, class_="cuda_oom_runtime", cause=cause, fix=fix), "unknown"


def _serves_again(log: Log, failed: Diagnosis) -> int | None:
    """The line after a failure on which a new start serves; None where there is none.

    The dying server's own last lines don't count: a start of an engine must lie between. One that did not start has
    none.
    """
    lines = log.text.splitlines()
    at = failed.line_number
    of_start = "did not start" in failed.cause
    started = next((n for n in range(at, len(lines)) if of_start or "Initializing a V1 LLM engine" in lines[n]), None)
    if started is None:
        return None
    return next((n + 1 for n in range(started, len(lines)) if _SERVES.search(lines[n])), None)


def _tier_bytes(log: Log) -> float | None:
    configuration = configuration_of_log(log.facts.non_default_args, log.version)
    return told_by_configuration(configuration, log.version).tier_bytes if configuration is not None else None


def _load_before(line: StatusLine, class_: str, each: float) -> str:
    state = f"running {whole(line.running or 0)}, waiting {whole(line.waiting or 0)}"
    if line.kv_usage_percent is not None:
        state += f", KV usage {line.kv_usage_percent:g} %"
    if line.preemptions and class_.startswith("engine_dead"):
        state += (
            f", {whole(line.preemptions)} preemptions in the interval before: heavy preemption is the load here, not "
            f"the "
            "cause"
        )
    elif line.preemptions:
        state += f", {whole(line.preemptions)} preemptions in the {each:.0f} s before, which are something else"
    return f"Last state before it: {state}."


def _stuck(log: Log) -> Iterator[Finding]:
    for engine, lines in log.status.items():
        run = longest_stuck(lines)
        if len(run) < STUCK_LEAST_LINES:
            continue
        each = interval_seconds(lines)
        last = run[-1]
        deferred = f" (Deferred {whole(last.deferred)})" if last.deferred is not None else ""
        health = log.text.count('"GET /health HTTP/1.1" 200')
        answers = f" while /health answered 200 ({health} times)" if health else ""
        ended = "" if run[-1] is lines[-1] else " It ended by itself; so it was a long stall, or a restart followed."
        known = known_deadlocks(log.version, None, log.facts.connector is not None)
        which = f" Engine {engine}." if len(log.status) > 1 else ""
        usage = (
            f", KV usage {last.kv_usage_percent:g} % (no part of the rule)" if last.kv_usage_percent is not None else ""
        )
        yield Finding(
            "scheduler_deadlock",
            "warn",
            f"The scheduler stands still: Running {span([line.running or 0 for line in run])}, Waiting "
            f"{span([line.waiting or 0 for line in run])}{deferred}, 0 tokens/s for {len(run)} log lines "
            f"({len(run) * each:.0f} s){answers}{usage}.{which}{ended}"
            + (f" Known for {_version(log)}: {named(known)}." if known else ""),
            {
                "lines": len(run),
                "seconds": len(run) * each,
                "running": last.running,
                "waiting": last.waiting,
                "deferred": last.deferred,
                "kv_usage_percent": last.kv_usage_percent,
                "first_line": run[0].line_number,
                "health_200": health,
                "known": [hazard.id for hazard in known],
            },
            (
                "Keep the log; what was measured meanwhile is invalid. "
                if ended
                else "Keep the log and two scrapes of /metrics, then restart the server; what was measured since is "
                "invalid. "
            )
            + "0.23 and newer for the first cause, 0.31 and newer for the one after an asynchronous load. Watch "
            "running = 0 with waiting > 0 instead of /health.",
        )


def _stalled(log: Log) -> Iterator[Finding]:
    for engine, lines in log.status.items():
        if not is_stalled(lines):
            continue
        run = longest_stalled(lines)
        each = interval_seconds(lines)
        ended = run[-1] is not lines[-1]
        yield Finding(
            "engine_stalled",
            "warn",
            f"The engine stands still with requests in its batch: Running {span([line.running or 0 for line in run])}, "
            f"Waiting {span([line.waiting or 0 for line in run])}, 0 tokens/s for {len(run)} log lines "
            f"({len(run) * each:.0f} s). That is no queue and no shortage: a worker or a collective that hangs looks "
            "like this, and so does one very long prefill, whose tokens are counted when it ends."
            + (" It ended by itself." if ended else ""),
            {
                "lines": len(run),
                "seconds": len(run) * each,
                "running": run[-1].running,
                "waiting": run[-1].waiting,
                "first_line": run[0].line_number,
            },
            "Look at what was asked for then (one very long prompt?); what was measured meanwhile is invalid."
            if ended
            else "Keep the log and the stacks of the engine's processes (py-spy dump), then restart the server; what "
            "was measured since is invalid.",
            "inferred",
            f"engine {engine}" if len(log.status) > 1 else None,
        )


def _not_pinned(log: Log) -> Iterator[Finding]:
    line = log.facts.offload_pinning_failed
    if line is None:
        return
    yield Finding(
        "tier_not_pinned",
        "warn",
        f"The tier's memory could not be pinned ({_version(log)}): '{_short(line)}'. The server goes on and every "
        f"load and "
        "store goes through pageable memory, several times slower. It is one warning at start and never repeated. "
        "Times "
        "measured so say nothing about the tier.",
        {"line": line},
        "Raise LimitMEMLOCK=infinity in the unit (--ulimit memlock=-1 of the container), take a tier below 512 GiB, or "
        "free RAM; then check that the warning is gone. A run with it is invalid.",
    )


def _watched(log: Log) -> Iterator[Finding]:
    if log.version is None or outside_read_range(log.version):
        return
    diagnosed = {"engine-dead", "abort-assert", "in-flight-store-assert", "negative-counter", "tier-not-pinned"}
    hits = [
        hit
        for hit in watch_log(log.text.splitlines(), log.version)
        if hit.hazard not in diagnosed
        and (log.diagnosis is None or hit.line_number != log.diagnosis.line_number)
        and (log.diagnosis is None or not hit.hazard.startswith("shm-"))
    ]
    for hazard in dict.fromkeys(hit.hazard for hit in hits):
        same = [hit for hit in hits if hit.hazard == hazard]
        yield Finding(
            "known_warning",
            "warn",
            f"{same[0].title}: {plural(len(same), 'line')}, first line {same[0].line_number}: {_short(same[0].line)}",
            {"hazard": hazard, "lines": len(same)},
            f"See `kvtrial hazards --vllm {log.version}`, {hazard}.",
        )


def _nothing_periodic(log: Log) -> Iterator[Finding]:
    if not log.status and log.facts.engine_version is not None:
        yield Finding(
            "no_fault_seen",
            "info",
            f"The log of {_version(log)} has no periodic line and names no failure.",
            {},
            "Give the part of the log in which the server misbehaves.",
            "unknown",
        )


def _short(line: str) -> str:
    return line if len(line) <= 160 else line[:157] + "..."
