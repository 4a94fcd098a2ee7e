"""What the preemption counters really say: how many, when, whose, and under which pressure."""

from collections.abc import Iterator, Sequence
from typing import Any

from kvtrial.analysis.observe.finding import Confidence, Finding
from kvtrial.analysis.observe.shapes import LEAST_INTERVALS, Concentration, Shape, concentration_of, shape_of
from kvtrial.analysis.observe.window import Window, fits_tokens
from kvtrial.analysis.observe.words import percent, plural, seconds, span, whole
from kvtrial.record.versions import within

PRESSURE_SHARE = 0.9
"""KV usage from which a page counts as under pressure."""
ONE_ENGINE_SHARE = 0.9
LEAST_FOR_ONE_ENGINE = 10
ROOM_TO_KEEP = (0.85, 0.97)
"""Share of the requests that ran at full KV cache which is advised as a cap: the rest is room for their growth."""


def preemption(window: Window) -> Iterator[Finding]:
    """Findings on preemptions within the window. None where there were none."""
    count = window.rise("preemptions")
    if count is None:
        if window.last.values.get("preemptions") is None:
            yield Finding(
                "preemption_unknown",
                "warn",
                "The page does not tell how many requests were preempted (vllm:num_preemptions_total is missing or "
                "unreadable): unknown, which is not none.",
                {"delta": None},
                "Fetch the server's own /metrics, whole.",
                "unknown",
                window.about,
            )
        return
    if count <= 0:
        return
    numbers = _numbers(window, count)
    per_interval = window.rises("preemptions") or [count]
    shape = shape_of(per_interval)
    concentration = concentration_of(window)
    if concentration is not None and concentration.concentrated:
        yield _concentrated(window, count, concentration, numbers)
    elif (engine := _one_engine(window, count)) is not None:
        yield _on_one_engine(window, count, engine, numbers)
    reset = window.rise("http_reset_prefix_cache_calls") or 0.0
    if _nothing_ran(window, per_interval):
        yield _unshaped(window, count, per_interval, "unknown", numbers, reset, idle=True)
    elif (sign := _no_pressure(window, per_interval)) is not None:
        yield _not_from_pressure(window, count, reset, sign, numbers)
    elif shape == "burst":
        yield _burst(window, count, per_interval, numbers)
    elif shape == "continuous":
        yield _continuous(window, count, per_interval, numbers)
    else:
        yield _unshaped(window, count, per_interval, shape, numbers, reset)


def _one_engine(window: Window, count: float) -> str | None:
    """The engine of several on which nearly all preemptions fall."""
    by_engine = window.whole.per_engine.get("preemptions", {})
    if len(by_engine) < 2 or count < LEAST_FOR_ONE_ENGINE:
        return None
    engine = max(by_engine, key=lambda name: by_engine[name])
    return engine if by_engine[engine] >= ONE_ENGINE_SHARE * count else None


def _numbers(window: Window, count: float) -> dict[str, Any]:
    finished, length = window.finished, window.seconds
    usage, running, waiting = (
        window.gauge(role) for role in ("kv_cache_usage_share", "requests_running", "requests_waiting")
    )
    return {
        "delta": count,
        "per_interval": window.rises("preemptions"),
        "before": 0.0 if window.since_start else window.first.values.get("preemptions"),
        "after": window.last.values.get("preemptions"),
        "per_second": count / length if length else None,
        "finished": finished,
        "per_finished_request": count / finished if finished else None,
        "kv_tokens": fits_tokens(window.last),
        "kv_usage_max": max(usage) if usage else None,
        "running": span(running) if running else None,
        "waiting": span(waiting) if waiting else None,
        "by_engine": window.whole.per_engine.get("preemptions", {}),
    }


def _rate(numbers: dict[str, Any]) -> str:
    each = numbers["per_finished_request"]
    return "" if each is None else f", {1000 * each:.0f} for every 1,000 of the {whole(numbers['finished'])} that ended"


def _counted(window: Window, count: float, numbers: dict[str, Any]) -> str:
    if window.since_start:
        return f"{plural(count, 'preemption')} since the server's start{_rate(numbers)}"
    return (
        f"{plural(count, 'preemption')} {window.during} "
        f"({whole(numbers['before'])} -> {whole(numbers['after'])}){_rate(numbers)}"
    )


def _pressure(window: Window) -> str:
    usage = window.gauge("kv_cache_usage_share")
    if not usage:
        return "KV usage is not known"
    top = max(usage)
    at = f" at page {usage.index(top)} (counting from 0)" if len(usage) > 2 else ""
    return f"KV usage is up to {percent(top)}{at}"


def _around(per_interval: Sequence[float]) -> list[int]:
    """Pages at both ends of the intervals in which there were preemptions."""
    active = [index for index, count in enumerate(per_interval) if count > 0]
    return sorted({page for index in active for page in (index, index + 1)})


def _nothing_ran(window: Window, per_interval: Sequence[float]) -> bool:
    """Whether the pages around the preemptions were read while nothing ran: their KV usage says nothing then."""
    running = window.gauge("requests_running")
    if window.since_start or len(running) != len(window.readings):
        return False
    return not any(running[page] for page in _around(per_interval))


def _no_pressure(window: Window, per_interval: Sequence[float]) -> str | None:
    """Why the preemptions can't come from a full KV cache, or None where they may."""
    usage = window.gauge("kv_cache_usage_share")
    if len(usage) != len(window.readings) or window.since_start:
        return None
    near = [usage[page] for page in _around(per_interval)]
    capacity = window.gauge("requests_waiting_capacity") or window.gauge("requests_waiting")
    queue, ttft = window.mean("queue_seconds"), window.mean("ttft_seconds")
    queued = max(capacity, default=0.0) > 0 or (queue is not None and ttft is not None and queue > 0.1 * ttft)
    if max(near) >= PRESSURE_SHARE:
        return None
    if queued and len(per_interval) < LEAST_INTERVALS:
        # Two pages far apart can have a full cache between them, and the queue says that they had.
        return None
    waited = "" if queued else " and nobody waited for room"
    return f"KV usage is {span([100 * share for share in near])} % around them{waited}"


def _not_from_pressure(window: Window, count: float, reset: float, sign: str, numbers: dict[str, Any]) -> Finding:
    usage = window.gauge("kv_cache_usage_share")
    running = window.gauge("requests_running")
    return Finding(
        "preemption_not_from_kv_pressure",
        "warn",
        f"{_counted(window, count, numbers)}, and they hardly come from a full KV cache: {sign}; KV usage is "
        f"{span([100 * share for share in usage])} % over the window"
        + (f", {span(running)} running" if running else "")
        + ". POST /reset_prefix_cache with reset_running_requests=true preempts every running request and counts "
        f"each, which looks just like this{_reset_called(reset)}.",
        {**numbers, "reset_calls": reset, "kv_usage": usage},
        "Don't resize anything on this. Look in the access log for who calls /reset_prefix_cache (a benchmark script, "
        "a "
        "training loop that swaps weights), and keep it off a server in service."
        + ("" if reset else " Scrape more often (every 5 s): a short rise of KV usage between two pages is not seen."),
        "inferred",
        window.about,
    )


def _reset_called(reset: float) -> str:
    if not reset:
        return ""
    return (
        f"; /reset_prefix_cache was called {plural(reset, 'time')} in the window, and whether with "
        "reset_running_requests the page does not tell (a plain call preempts nobody)"
    )


def _burst(window: Window, count: float, per_interval: Sequence[float], numbers: dict[str, Any]) -> Finding:
    active = [index for index, value in enumerate(per_interval) if value > 0]
    parts = " + ".join(whole(per_interval[index]) for index in active)
    where = ", ".join(f"t{index}-t{index + 1}" for index in active)
    return Finding(
        "preemption_single_burst",
        "info",
        f"{_counted(window, count, numbers)}: {parts} in {'the interval' if len(active) == 1 else 'the intervals'} "
        f"{where}, 0 in the others. That is one burst, and it is over. {_pressure(window)}, so the KV cache was full "
        "then. It is no out-of-memory error: the server went on.",
        numbers,
        f"Don't resize on this evidence. Look at what arrived in {where} (long prompts, a batch job) and keep "
        f"watching.",
        about=window.about,
    )


def _continuous(window: Window, count: float, per_interval: Sequence[float], numbers: dict[str, Any]) -> Finding:
    usage, running = window.gauge("kv_cache_usage_share"), window.gauge("requests_running")
    waiting = window.gauge("requests_waiting_capacity") or window.gauge("requests_waiting")
    state = []
    if usage:
        state.append(f"KV usage {span([100 * share for share in usage])} %")
    else:
        state.append("KV usage is not known, so that the cache was full is inferred from the preemptions")
    if running:
        state.append(f"about {whole(sum(running) / len(running))} running")
    if waiting:
        state.append(f"about {whole(sum(waiting) / len(waiting))} waiting for capacity")
    if numbers["kv_tokens"]:
        state.append(f"room for {whole(numbers['kv_tokens'])} tokens")
    queue, ttft = window.mean("queue_seconds"), window.mean("ttft_seconds")
    queued = ""
    if queue is not None and ttft:
        mostly = f"nearly all queue time: {seconds(queue)} of {seconds(ttft)}"
        partly = f"{seconds(ttft)}, {seconds(queue)} of it in the queue"
        queued = (
            f" Time to first token is {mostly if queue > 0.8 * ttft else partly} (means of the window; waits after a "
            "preemption are not in the queue's)."
        )
        numbers = {**numbers, "queue_seconds": round(queue, 3), "ttft_seconds": round(ttft, 3)}
    return Finding(
        "preemption_continuous",
        "warn",
        f"{_counted(window, count, numbers)}: {span(per_interval)} in every interval, without an end. "
        f"{', '.join(state)}. More requests are admitted than the KV cache can carry to their end: a shortage of "
        f"capacity, not an out-of-memory error.{queued} How many tokens were computed again is in no metric of any "
        "version.",
        numbers,
        _cap(window, running, waiting) + " Each moves the wait elsewhere, so measure from send to last token.",
        "seen" if usage else "inferred",
        window.about,
    )


def _cap(window: Window, running: Sequence[float], waiting: Sequence[float]) -> str:
    where = "below what runs now"
    if running and waiting and max(waiting) > 0:
        fits = sum(running) / len(running)
        low, high = (round(fits * share) for share in ROOM_TO_KEEP)
        where = f"near what fits, about {low}-{high}"
    version = window.version
    has_watermark = within(version, "0.24", None) if version else window.versions.may_be("0.24", None)
    room = "; --watermark (0.24 and newer) keeps room free for the running" if has_watermark else ""
    return (
        f"Cap the concurrency {where} (--max-num-seqs, or the client), or give more KV memory, or shorten contexts and "
        f"outputs{room}."
    )


def _unshaped(
    window: Window,
    count: float,
    per_interval: Sequence[float],
    shape: Shape,
    numbers: dict[str, Any],
    reset: float,
    idle: bool = False,
) -> Finding:
    confidence: Confidence = "seen"
    if idle:
        said = (
            "nothing ran when the pages around them were read, so neither their shape nor the KV usage at that time "
            "is known"
        )
        do = "Take pages every 5 to 15 s while requests run, before anything is changed."
        confidence = "unknown"
    elif window.since_start:
        said = "one page alone holds everything since the start: whether it happened today can't be known"
        do = "Give a second page, some minutes later: --metrics first.prom second.prom."
        confidence = "unknown"
    elif shape == "unknown":
        said = "burst or continuous: unknown from so few pages"
        do = "Take four or more pages, 15 to 30 s apart, before anything is resized."
        confidence = "unknown"
    elif shape == "ongoing":
        said = f"they began within the window and go on at its end ({', '.join(whole(v) for v in per_interval)})"
        do = "Watch on: a burst ends by itself, a shortage does not."
    else:
        said = f"now and then ({', '.join(whole(v) for v in per_interval)} by interval)"
        do = "Compare the intervals with what arrived in them; the load that fills the cache comes and goes."
    return Finding(
        f"preemption_{'shape_unknown' if shape == 'unknown' else shape}",
        "warn",
        f"{_counted(window, count, numbers)}; {said}. {_pressure(window)}"
        + (f". One possibility is a reset of the running requests{_reset_called(reset)}" if reset else "")
        + ".",
        {**numbers, "reset_calls": reset} if reset else numbers,
        do,
        confidence,
        window.about,
    )


def _concentrated(window: Window, count: float, found: Concentration, numbers: dict[str, Any]) -> Finding:
    least_each = found.heavy_least / found.heavy
    mean = found.preemptions / found.requests
    return Finding(
        "preemption_concentrated",
        "warn",
        f"{_counted(window, count, numbers)}, and they fall on few: {plural(found.heavy, 'request')} of "
        f"{whole(found.requests)} that ended ({percent(found.heavy / found.requests)}) carry at least "
        f"{whole(found.heavy_least)} of the {whole(found.preemptions)} preemptions counted with them, "
        f"{least_each:.1f} or more each; the other {whole(found.requests - found.heavy)} had one or none. The mean of "
        f"{mean:.2f} a request describes nobody. The same requests are put out again and again, usually the latest or "
        "the longest.",
        {
            **numbers,
            "requests": found.requests,
            "preemptions": found.preemptions,
            "heavy_requests": found.heavy,
            "preempted_requests": found.heavy,
            "heavy_preemptions_least": found.heavy_least,
            "mean_per_request": mean,
        },
        "Look at the lengths of these few requests first: give them a limit, a server of their own, or "
        "--long-prefill-token-threshold. Resizing for all would be paid by those who have no trouble.",
        confidence="seen" if found.proved else "inferred",
        about=window.about,
    )


def _on_one_engine(window: Window, count: float, engine: str, numbers: dict[str, Any]) -> Finding:
    by_engine = window.whole.per_engine["preemptions"]
    usage = window.last.per_engine.get("kv_cache_usage_share", {})
    levels = ", ".join(f"engine {name}: {percent(value)}" for name, value in sorted(usage.items()))
    return Finding(
        "preemption_concentrated",
        "warn",
        f"{_counted(window, count, numbers)}, and they fall on one engine: {whole(by_engine[engine])} of "
        f"{whole(count)} on "
        f"engine {engine} of {len(by_engine)}" + (f"; KV usage is {levels}" if levels else "") + ". The sum over the "
        "engines describes none of them.",
        {**numbers, "engine": engine, "preempt": by_engine},
        "Look at how requests are spread over the engines (sticky sessions, a router by prefix) before anything is "
        "resized.",
        about=window.about,
    )
