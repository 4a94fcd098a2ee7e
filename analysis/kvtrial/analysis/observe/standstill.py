"""Whether a server, or one of its engines, stands still: a stuck scheduler, a hung batch, asleep. Pure."""

from collections.abc import Iterator

import msgspec

from kvtrial.analysis.observe.deadlocks import known_deadlocks, named
from kvtrial.analysis.observe.finding import Finding
from kvtrial.analysis.observe.window import Window, engines_of, exports_connector, of_engines
from kvtrial.analysis.observe.words import percent, plural, span, whole
from kvtrial.record.hazards import Hazard

DEADLOCK_LEAST_SECONDS = 10.0
"""Under this a load in progress looks the same."""
STALL_LEAST_SECONDS = 30.0
"""Under this a long prefill looks the same: its tokens are counted when it ends."""
_ALIKE = (
    " Every value of these pages is equal, and they export none that always moves (process_cpu_seconds_total), so the "
    "same scrape twice (a copy, a caching proxy) looks like this too."
)
_OF_WORK = ("prompt_tokens", "requests_finished_stop", "requests_finished_length")
"""Counters that an engine moves only by working, whatever tokens it counted."""


def standstills(window: Window) -> Iterator[Finding]:
    """Standstills of the whole server, else of those of its engines that stand still while others go on.

    Of one scrape given again nothing is said but that; where it may be one, that is said beside it.
    """
    if window.scrapes == "same":
        yield from _same_scrape(window)
        return
    for finding in _standing(window):
        if window.scrapes == "alike" and finding.class_ in ("scheduler_deadlock", "engine_stalled"):
            yield msgspec.structs.replace(finding, reason=finding.reason + _ALIKE, confidence="inferred")
        else:
            yield finding


def _standing(window: Window) -> Iterator[Finding]:
    whole_server = _of_one(window)
    engines = engines_of(window)
    if len(engines) < 2:
        yield from whole_server
        return
    alone = {engine: of_engines(window, [engine], window.about) for engine in engines}
    found = {engine: _of_one(one) for engine, one in alone.items()}
    stuck = [engine for engine in engines if found[engine]]
    if not stuck or (len(stuck) == len(engines) and whole_server):
        yield from whole_server
        return
    others = [_going(engine, alone[engine]) for engine in engines if engine not in stuck]
    beside = f" The others: {'; '.join(others)}." if others else ""
    hidden = "" if whole_server else " Summed over its engines the page looks healthy."
    for engine in stuck:
        for finding in found[engine]:
            about = f"{window.about}, engine {engine}" if window.about else f"engine {engine}"
            yield msgspec.structs.replace(
                finding,
                reason=f"Engine {engine} of {len(engines)}: {finding.reason}{beside}{hidden}",
                numbers=finding.numbers | {"engine": engine, "engines_stuck": stuck, "engines": engines},
                do=f"{finding.do} A balancer in front should send nothing to engine {engine} meanwhile.",
                about=about,
            )


def _same_scrape(window: Window) -> Iterator[Finding]:
    running, waiting = window.gauge("requests_running"), window.gauge("requests_waiting")
    if not any((*running, *waiting)):
        return
    count = len(window.readings)
    times = "twice" if count == 2 else f"{count} times"
    yield Finding(
        "standstill_unknown",
        "warn",
        f"These pages are the same scrape {times} (a copy or a caching proxy): every value is equal, also those that a "
        f"server moves by being scraped (process_cpu_seconds_total), with running {span(running) if running else '?'} "
        f"and waiting {span(waiting) if waiting else '?'}. Nothing can be told of a window.",
        {"running": running, "waiting": waiting, "same_scrape": True, "window_seconds": window.seconds},
        "Fetch the server's own /metrics twice, at least 30 s apart and without a proxy between.",
        "unknown",
        window.about,
    )


def _of_one(window: Window) -> list[Finding]:
    return list(deadlock(window)) or list(stalled(window))


def _going(engine: str, window: Window) -> str:
    """What an engine that doesn't stand still did in the window."""
    tokens, running = window.rise("generation_tokens"), window.gauge("requests_running")
    if not tokens and max(running, default=0.0) == 0:
        return f"engine {engine} is idle"
    said = "unknown tokens" if tokens is None else f"{whole(tokens)} tokens generated"
    return f"engine {engine} goes on ({said}, {plural(window.finished or 0, 'request')} ended)"


def deadlock(window: Window) -> Iterator[Finding]:
    """Nothing runs, requests wait and no token comes, over the whole window."""
    running, waiting = window.gauge("requests_running"), window.gauge("requests_waiting")
    generated = window.rise("generation_tokens")
    if window.since_start or len(running) != len(window.readings) or len(waiting) != len(running):
        return
    if max(running) > 0 or min(waiting) < 1 or generated is None or generated > 0 or any(map(window.rise, _OF_WORK)):
        return
    if window.last.values.get("engine_awake") == 0:
        yield _asleep(window, waiting)
        return
    if window.seconds is not None and window.seconds < DEADLOCK_LEAST_SECONDS:
        yield _too_short(window, running, waiting, "a load in progress looks the same", DEADLOCK_LEAST_SECONDS)
        return
    capacity, deferred = (window.last.values.get(f"requests_waiting_{reason}") for reason in ("capacity", "deferred"))
    usage = window.last.values.get("kv_cache_usage_share")
    reasons = (
        "" if capacity is None or deferred is None else f" ({whole(capacity)} capacity, {whole(deferred)} deferred)"
    )
    loaded = window.last.values.get("requests_kv_fetch_completed_waiting")
    fetched = f", {whole(loaded)} of them with a finished load" if loaded else ""
    stuck = "" if usage is None else f", KV usage stuck at {percent(usage)} (the figure is no part of the rule)"
    known = known_deadlocks(window.version, window.versions, exports_connector(window))
    yield Finding(
        "scheduler_deadlock",
        "warn",
        f"The scheduler stands still: running {span(running)}, waiting {span(waiting)}{reasons}{fetched}, and "
        f"generation_tokens_total is flat {window.during}{stuck}. /health answers 200 all the same: it only says that "
        f"the process lives.{_known(known)} A queue gauge that froze when all clients hung up looks alike (#22545).",
        {
            "running": running,
            "waiting": waiting,
            "waiting_capacity": capacity,
            "waiting_deferred": deferred,
            "generation_tokens_delta": generated,
            "kv_usage": usage,
            "window_seconds": window.seconds,
            "known": [hazard.id for hazard in known],
        },
        "Keep the log and these pages, then restart the server; what was measured since is invalid. 0.23 and newer for "
        "the first cause, 0.31 and newer for the one after a load. Watch running = 0 with waiting > 0 instead of "
        "/health.",
        "seen" if window.seconds is not None and window.seconds >= STALL_LEAST_SECONDS else "inferred",
        window.about,
    )


def stalled(window: Window) -> Iterator[Finding]:
    """Requests run on every page, and no counter of work moves over the whole window."""
    running, waiting = window.gauge("requests_running"), window.gauge("requests_waiting")
    if window.since_start or len(running) != len(window.readings) or min(running) < 1:
        return
    tokens = window.rise("generation_tokens"), window.rise("prompt_tokens")
    moved = (window.finished, window.rise("preemptions"), window.rise("load_bytes"), window.rise("store_bytes"))
    if None in tokens or any(tokens) or any(moved):
        return
    if window.seconds is None or window.seconds < STALL_LEAST_SECONDS:
        yield _too_short(window, running, waiting, "a long prefill looks the same", STALL_LEAST_SECONDS)
        return
    usage = window.last.values.get("kv_cache_usage_share")
    yield Finding(
        "engine_stalled",
        "warn",
        f"The engine stands still with requests in its batch: running {span(running)}"
        + (f", waiting {span(waiting)}" if waiting else "")
        + f" on every page, and {window.during} no token was computed or generated and no request ended"
        + (f"; KV usage {percent(usage)}" if usage is not None else "")
        + ". That is no queue and no shortage. A worker or a collective that hangs looks like this, and so does one "
        "prefill longer than the window, whose tokens are counted when it ends. /health may answer 200 all the same.",
        {
            "running": running,
            "waiting": waiting,
            "generation_tokens_delta": 0,
            "prompt_tokens_delta": 0,
            "kv_usage": usage,
            "window_seconds": window.seconds,
        },
        "Read two more pages a minute later. If they are flat still: keep the log and the pages, take the stacks of "
        "the engine's processes (py-spy dump), then restart the server; what was measured since is invalid.",
        "inferred",
        window.about,
    )


def _too_short(window: Window, running: list[float], waiting: list[float], alike: str, least: float) -> Finding:
    return Finding(
        "standstill_unknown",
        "warn",
        f"No token came {window.during}, with running {span(running)} and waiting "
        f"{span(waiting) if waiting else 'unknown'}: whether the engine stands still is unknown from so short a "
        f"window; {alike}.",
        {"running": running, "waiting": waiting, "generation_tokens_delta": 0, "window_seconds": window.seconds},
        f"Look longer: pages at least {least:g} s apart, with --interval, or --url with --window 60.",
        "unknown",
        window.about,
    )


def _asleep(window: Window, waiting: list[float]) -> Finding:
    return Finding(
        "server_asleep",
        "warn",
        f"The server is asleep (Sleep Mode) and {span(waiting)} requests wait for it to wake: nothing runs and no "
        f"token comes {window.during}, as it was told. That is no deadlock and no shortage.",
        {"waiting": waiting, "running": window.gauge("requests_running"), "generation_tokens_delta": 0},
        "POST /wake_up, or keep clients away while it sleeps.",
        about=window.about,
    )


def _known(known: list[Hazard]) -> str:
    return f" Known for versions this can be: {named(known)}." if known else ""
