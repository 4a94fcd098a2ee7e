"""Who waits, and for what: loads in flight, room in the KV cache, a seat in the batch."""

from collections.abc import Iterator
from typing import Any

from kvtrial.analysis.observe.finding import Finding
from kvtrial.analysis.observe.preemption import PRESSURE_SHARE
from kvtrial.analysis.observe.standstill import deadlock
from kvtrial.analysis.observe.window import Window, exports_connector, fits_tokens
from kvtrial.analysis.observe.words import percent, plural, seconds, signed_bytes, span, whole

DEFERRED_LEAST = 2
DEFERRED_PAGES = 3
LOOKUP_SHARE_OF_TTFT = 0.25
LOOKUP_LEAST_SECONDS = 0.05
QUEUE_SHARE_OF_TTFT = 0.2
QUEUE_LEAST_SECONDS = 0.1


def deferred_behind_load(window: Window) -> Iterator[Finding]:
    """Requests put off because a prefix they share is being loaded, or because loads take long."""
    deferred = window.gauge("requests_waiting_deferred")
    if not deferred or next(deadlock(window), None) is not None:
        return
    lookups = window.rise("offload_lookup_async_delay_seconds_count")
    delay = window.mean("offload_lookup_async_delay_seconds")
    ttft = window.mean("ttft_seconds")
    slow = (
        delay is not None
        and ttft is not None
        and delay >= LOOKUP_LEAST_SECONDS
        and delay >= LOOKUP_SHARE_OF_TTFT * ttft
    )
    # A request that waits for a load of its own is deferred, too: one alone, now and then, is how a tier works.
    seen_often = sum(1 for value in deferred if value >= 1) >= DEFERRED_PAGES or max(deferred) >= DEFERRED_LEAST
    if not exports_connector(window):
        if max(deferred) >= 1:
            yield _deferred_otherwise(window, deferred)
        return
    if not (seen_often or (slow and max(deferred) >= 1)):
        return
    usage, capacity = window.gauge("kv_cache_usage_share"), window.gauge("requests_waiting_capacity")
    load, running = window.rise("load_bytes"), window.gauge("requests_running")
    waits = f" A deferred lookup took {seconds(delay)} in the mean ({whole(lookups or 0)} of them)." if delay else ""
    of_ttft = f" Time to first token is {seconds(ttft)} in the mean." if ttft else ""
    full = bool(usage) and max(usage) >= PRESSURE_SHARE
    pressure = (
        f"KV usage is up to {percent(max(usage))}, so this is {'not only ' if full else 'not '}a shortage of KV memory"
        if usage
        else "KV usage is not known"
    )
    yield Finding(
        "deferred_behind_load",
        "warn",
        f"Requests wait for loads from the tier, not for room: {span(deferred)} deferred and "
        f"{span(capacity) if capacity else 'an unknown number'} waiting for capacity, {span(running)} running; load "
        f"{signed_bytes(load or 0)} {window.during}. {pressure}. A request whose prefix is being loaded for another "
        f"one "
        f"is put off until that has landed (#44294, 0.15 and newer).{waits}{of_ttft} The engine is not stuck: "
        f"{whole(window.rise('generation_tokens') or 0)} tokens were generated.",
        {
            "deferred": max(deferred),
            "deferred_by_page": deferred,
            "capacity": max(capacity) if capacity else None,
            "running": span(running) if running else None,
            "load": load,
            "load_bytes": window.whole.per_engine.get("load_bytes", {}),
            "lookup_delay_seconds": delay,
            "lookups": lookups,
            "ttft_seconds": ttft,
            "kv_usage_max": max(usage) if usage else None,
        },
        "Compare time to first token with the connector off before more tier is given. Keep requests that share a long "
        "beginning from arriving together while it is loaded, or keep that beginning in the GPU cache.",
        "seen" if slow or (load or 0) > 0 else "inferred",
        window.about,
    )


def _deferred_otherwise(window: Window, deferred: list[float]) -> Finding:
    running = window.gauge("requests_running")
    return Finding(
        "requests_deferred",
        "warn",
        f"{span(deferred)} requests are deferred on the pages"
        + (f", {span(running)} running" if running else "")
        + ", and the page exports no series of the OffloadingConnector. Deferred means a passing constraint other than "
        "room (a LoRA budget, a grammar that is compiled, a KV transfer of another connector), not a full KV cache.",
        {"deferred": max(deferred), "deferred_by_page": deferred, "running": span(running) if running else None},
        "Look which of these the server uses (--max-loras, structured outputs, another connector) before anything is "
        "resized.",
        about=window.about,
    )


def queueing(window: Window) -> Iterator[Finding]:
    """What looks like preemption and is none: an old count, a queue for seats or for room."""
    count = window.rise("preemptions")
    if count is None or count > 0:
        return
    capacity = window.gauge("requests_waiting_capacity") or window.gauge("requests_waiting")
    usage, running = window.gauge("kv_cache_usage_share"), window.gauge("requests_running")
    queue, ttft = window.mean("queue_seconds"), window.mean("ttft_seconds")
    waited = (
        queue is not None and ttft is not None and queue >= QUEUE_LEAST_SECONDS and queue >= QUEUE_SHARE_OF_TTFT * ttft
    )
    old = 0.0 if window.since_start else window.last.values.get("preemptions") or 0.0
    full = bool(usage) and max(usage) >= PRESSURE_SHARE
    waits = max(capacity, default=0.0) > 0
    if not (waited or waits or old or full):
        return
    said = [
        f"No request was preempted {window.during}"
        + (f": vllm:num_preemptions_total stands at {whole(old)}, all of it from before" if old else "")
    ]
    do = "Nothing to resize for preemption here."
    if waits or waited:
        said.append(_what_for(window, capacity, usage, running))
        do = _remedy(usage)
    elif full:
        said.append(f"KV usage of {percent(max(usage))} by itself is no fault: nobody waited, nobody was put out")
    if queue is not None and ttft:
        said.append(f"of {seconds(ttft)} to the first token {seconds(queue)} are queue (means of the window)")
    yield Finding(
        "not_preemption",
        "warn" if waits or waited else "info",
        "; ".join(said) + ".",
        {
            "delta": 0,
            "preemptions": 0,
            "before": old,
            "waiting": max(capacity, default=None),
            "running": span(running) if running else None,
            "kv_usage_max": max(usage) if usage else None,
            "queue_seconds": queue,
            "ttft_seconds": ttft,
            "kv_tokens": fits_tokens(window.last),
        },
        do,
        about=window.about,
    )


def _what_for(window: Window, capacity: list[float], usage: list[float], running: list[float]) -> str:
    queue = (
        f"{span(capacity)} waiting for capacity, {span(running)} running" if capacity and running else "requests waited"
    )
    if usage and max(usage) < PRESSURE_SHARE:
        level = bool(running) and len(set(running)) == 1 and max(capacity, default=0) > 0
        limit = (
            f" (running stands at {whole(running[0])} on every page, which looks like --max-num-seqs)" if level else ""
        )
        return (
            f"what takes time is a queue for a seat in the batch, not for memory: {queue}, KV usage up to "
            f"{percent(max(usage))}{limit}"
        )
    if usage:
        return f"what takes time is a queue for room in the KV cache: {queue}, KV usage up to {percent(max(usage))}"
    return f"what takes time is a queue: {queue}; KV usage is not known"


def _remedy(usage: list[float]) -> str:
    if usage and max(usage) < PRESSURE_SHARE:
        return (
            "More seats (--max-num-seqs) or another replica: the KV cache has room. Watch KV usage and "
            "vllm:num_preemptions_total while raising it."
        )
    return "More KV memory, shorter contexts or another replica; more seats would turn this queue into preemptions."


def flow(window: Window) -> Iterator[Finding]:
    """What the server did in the window, where nothing else is to be said."""
    finished, generated = window.finished, window.rise("generation_tokens")
    running, usage = window.gauge("requests_running"), window.gauge("kv_cache_usage_share")
    numbers: dict[str, Any] = {
        "finished": finished,
        "generation_tokens": generated,
        "running": span(running) if running else None,
        "kv_usage_max": max(usage) if usage else None,
        "ttft_seconds": window.mean("ttft_seconds"),
    }
    if not finished and not generated and max(running, default=0.0) == 0:
        asleep = window.last.values.get("engine_awake") == 0
        state = "asleep (Sleep Mode)" if asleep else "idle"
        yield Finding(
            "idle",
            "info",
            f"The server is {state}: nothing running, nothing waiting, no token {window.during}.",
            numbers,
            "Look again while it is used.",
            about=window.about,
        )
        return
    ttft = window.mean("ttft_seconds")
    times = f", {seconds(ttft)} to the first token in the mean" if ttft else ""
    top = f", KV usage up to {percent(max(usage))}" if usage else ""
    yield Finding(
        "no_fault_seen",
        "info",
        f"Nothing wrong is seen in these counters: {plural(finished or 0, 'request')} ended {window.during}, "
        f"{whole(generated or 0)} tokens generated{times}{top}, nobody preempted, nobody waiting for capacity.",
        numbers,
        "Nothing.",
        about=window.about,
    )
