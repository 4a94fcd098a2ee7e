"""What the engine's periodic log lines show: a standstill, preemptions by interval, a queue, nothing. Pure."""

from collections.abc import Callable, Iterator

from kvtrial.analysis.observe.finding import Finding
from kvtrial.analysis.observe.preemption import PRESSURE_SHARE
from kvtrial.analysis.observe.shapes import LEAST_INTERVALS, shape_of
from kvtrial.analysis.observe.standstill import STALL_LEAST_SECONDS
from kvtrial.analysis.observe.words import listed, seconds, span, whole
from kvtrial.record.statuslines import StatusLine, interval_seconds

STUCK_LEAST_LINES = 3
DEFERRED_LEAST = 2


def longest_stuck(lines: list[StatusLine]) -> list[StatusLine]:
    """The longest row of lines on which nothing runs, requests wait and no token comes."""
    return _longest(lines, lambda line: line.running == 0 and (line.waiting or 0) > 0)


def longest_stalled(lines: list[StatusLine]) -> list[StatusLine]:
    """The longest row of lines on which requests run and no token comes."""
    return _longest(lines, lambda line: (line.running or 0) > 0 and not line.preemptions)


def is_stalled(lines: list[StatusLine]) -> bool:
    """Whether such a row is longer than a long prefill takes."""
    run = longest_stalled(lines)
    return len(run) >= STUCK_LEAST_LINES and len(run) * interval_seconds(lines) >= STALL_LEAST_SECONDS


def _longest(lines: list[StatusLine], state: Callable[[StatusLine], bool]) -> list[StatusLine]:
    best: list[StatusLine] = []
    run: list[StatusLine] = []
    for line in lines:
        still = not line.prompt_tokens_per_second and not line.generation_tokens_per_second
        if still and state(line):
            run.append(line)
            best = run if len(run) > len(best) else best
        else:
            run = []
    return best


def by_lines(status: dict[str, list[StatusLine]]) -> Iterator[Finding]:
    """Findings of the periodic lines, engine by engine; none for an engine that stands still."""
    for engine, lines in status.items():
        about = f"engine {engine}" if len(status) > 1 else None
        if len(longest_stuck(lines)) >= STUCK_LEAST_LINES or is_stalled(lines):
            continue
        preempted = [line.preemptions or 0.0 for line in lines]
        usage = [line.kv_usage_percent for line in lines if line.kv_usage_percent is not None]
        waiting = [line.waiting or 0.0 for line in lines]
        running = [line.running or 0.0 for line in lines]
        # A request that waits for a load of its own is deferred, too: one alone is how a tier works.
        queued = [line.waiting or 0.0 for line in lines if (line.waiting or 0.0) != (line.deferred or 0.0)]
        deferred = max((line.deferred or 0.0) for line in lines)
        if sum(preempted):
            yield _preempting(lines, preempted, usage, running, waiting, about)
        elif lines[-1] in (*longest_stuck(lines), *longest_stalled(lines)):
            yield _standing(lines, about)
        elif any(queued) or deferred >= DEFERRED_LEAST:
            yield _queueing(lines, usage, running, waiting, about)
        elif max(waiting) == 0 and not any(line.generation_tokens_per_second for line in lines[1:] or lines):
            yield Finding(
                "idle",
                "info",
                f"The server is idle, not stuck: Waiting 0 on every line, so nobody is kept waiting ({len(lines)} "
                f"lines, "
                f"Running {span(running)}).",
                {"lines": len(lines), "waiting": 0, "running": span(running)},
                "Nothing.",
                about=about,
            )
        else:
            yield Finding(
                "no_fault_seen",
                "info",
                f"Nothing wrong is seen in {len(lines)} periodic lines: Running {span(running)}, "
                f"Waiting {span(waiting)}" + (f", KV usage {span(usage, '.1f')} %" if usage else "") + ".",
                {"lines": len(lines), "running": span(running), "waiting": max(waiting)},
                "Nothing.",
                about=about,
            )


def _standing(lines: list[StatusLine], about: str | None) -> Finding:
    last = lines[-1]
    return Finding(
        "standstill_unknown",
        "warn",
        f"The log ends on 0 tokens/s with Running {whole(last.running or 0)}, Waiting {whole(last.waiting or 0)}: "
        "whether the engine stands still is unknown from so few lines; a load or a long prefill looks the same.",
        {"lines": len(lines), "running": last.running, "waiting": last.waiting},
        f"Look longer: at least {STUCK_LEAST_LINES} such lines ({STALL_LEAST_SECONDS:g} s), or --url with --window 60.",
        "unknown",
        about,
    )


def _preempting(
    lines: list[StatusLine],
    preempted: list[float],
    usage: list[float],
    running: list[float],
    waiting: list[float],
    about: str | None,
) -> Finding:
    shape = shape_of(preempted)
    near = [line.kv_usage_percent for line in lines if line.preemptions and line.kv_usage_percent is not None]
    each = interval_seconds(lines)
    counted = (
        f"{whole(sum(preempted))} preemptions in {len(lines)} lines ({len(lines) * each:.0f} s; the log counts them by "
        f"interval: {listed([whole(value) for value in preempted], 12)})"
    )
    low = bool(near) and max(near) < 100 * PRESSURE_SHARE and max(waiting) == 0
    class_, do = {
        "burst": ("preemption_single_burst", "Don't resize on this evidence; look at what arrived then."),
        "continuous": (
            "preemption_continuous",
            "Cap the concurrency near what runs, or give more KV memory, or shorten contexts.",
        ),
        "ongoing": ("preemption_ongoing", "Watch on: a burst ends by itself, a shortage does not."),
        "intermittent": ("preemption_intermittent", "Compare with what arrived in these intervals."),
        "unknown": ("preemption_shape_unknown", f"Give at least {LEAST_INTERVALS} lines around it."),
    }[shape]
    pressure = f"KV usage {span(near, '.1f')} % where they happened" if near else "KV usage is not printed"
    if low:
        class_ = "preemption_not_from_kv_pressure"
        do = "Look for calls of /reset_prefix_cache with reset_running_requests=true around these lines."
        pressure += ", so not from a full KV cache"
    ends = {"burst": ": one burst, and it is over", "continuous": ", in every interval"}.get(shape, "")
    return Finding(
        class_,
        "info" if shape == "burst" and not low else "warn",
        f"{counted}{ends}. {pressure}; Running {span(running)}, Waiting {span(waiting)}. It is no out-of-memory error.",
        {"delta": sum(preempted), "per_interval": preempted, "kv_usage_percent": near},
        do,
        "inferred" if low else "seen",
        about,
    )


def _queueing(
    lines: list[StatusLine], usage: list[float], running: list[float], waiting: list[float], about: str | None
) -> Finding:
    deferred = max((line.deferred or 0.0) for line in lines)
    top = f", KV usage up to {max(usage):g} %" if usage else ""
    if deferred >= DEFERRED_LEAST and deferred >= max(waiting) / 2:
        return Finding(
            "deferred_behind_load",
            "warn",
            f"Requests wait for a load or another passing constraint, not for room: Waiting up to "
            f"{whole(max(waiting))}, "
            f"Deferred up to {whole(deferred)}, Running {span(running)}{top}; tokens keep coming, so nothing is stuck.",
            {"waiting": max(waiting), "deferred": deferred, "running": span(running)},
            "Compare time to first token with the connector off; keep requests that share a long beginning from "
            "arriving "
            "together while it is loaded.",
            "inferred",
            about,
        )
    length = seconds(len(lines) * interval_seconds(lines))
    if usage and max(usage) >= 100 * PRESSURE_SHARE:
        return Finding(
            "preemption_unknown",
            "warn",
            f"Requests queue beside a full KV cache: Waiting up to {whole(max(waiting))}, Running {span(running)}"
            f"{top}, over {len(lines)} lines ({length}). Whether any is preempted the log does not tell: it prints no "
            "'Preemptions:', and vLLM clears that count before it prints it (PR #38452).",
            {"waiting": max(waiting), "running": span(running), "delta": None},
            "Look at vllm:num_preemptions_total: two pages of /metrics, or --url.",
            "unknown",
            about,
        )
    return Finding(
        "not_preemption",
        "warn",
        "Requests queue while the KV cache has room, so nothing has to be preempted: Waiting up to "
        f"{whole(max(waiting))}, Running {span(running)}{top}, over {len(lines)} lines ({length}).",
        {"waiting": max(waiting), "running": span(running), "delta": 0},
        "More seats (--max-num-seqs) where KV usage leaves room, else more KV memory or a replica.",
        about=about,
    )
