"""Whether a window can be used at all: one server without a restart, and every request accounted for."""

from collections.abc import Iterator
from typing import Any

from kvtrial.analysis.observe.client import Client
from kvtrial.analysis.observe.finding import Finding
from kvtrial.analysis.observe.window import Window, created_times, labels_of_engines, restarted_at, start_times
from kvtrial.analysis.observe.words import listed, plural, whole
from kvtrial.record.exposition import CREATED, Reading

_SHOWN_FIRST = ("prompt_tokens", "generation_tokens", "load_bytes", "store_bytes")


def counter_reset(window: Window) -> Iterator[Finding]:
    """A restart or a fall of counters within the window: nothing that rose in it means anything."""
    step = None if window.since_start else restarted_at(window)
    if step is None:
        return
    before, after = window.readings[step], window.readings[step + 1]
    starts, created = start_times(window, step), created_times(window, step)
    moved = None not in starts and starts[0] != starts[1]
    fell = _fallen(before, after, window.steps[step].fell)
    signs = []
    numbers: dict[str, Any] = {}
    if moved:
        also = ", and every _created with it" if created else ""
        signs.append(f"process_start_time_seconds moved from {starts[0]:.2f} to {starts[1]:.2f}{also}")
        numbers["process_start_time_seconds"] = [starts[0], starts[1]]
    elif created:
        engine, (was, now) = next(iter(created.items()))
        signs.append(f"the _created of engine {engine or '0'} moved from {was:.2f} to {now:.2f}")
    if created:
        numbers[CREATED] = {name: list(times) for name, times in created.items()}
    gone = sorted(labels_of_engines(before) - labels_of_engines(after))
    if gone:
        signs.append(f"engine{'s' if len(gone) > 1 else ''} {listed(gone)} vanished")
        numbers["engines_vanished"] = gone
    if fell:
        shown = [f"{role} {whole(was)} -> {whole(now)}" for role, (was, now) in fell.items()]
        signs.append(f"counters fell ({listed(shown, 3)})")
        numbers["fell"] = {role: list(pair) for role, pair in fell.items()}
    overtaken = _overtaken(before, after) if moved or created else None
    also = ""
    if overtaken:
        role, was, now = overtaken
        also = f", not even {role} {whole(was)} -> {whole(now)}, which happens to be higher"
        numbers["overtaken"] = {role: [was, now]}
    where = f" between page {step + 1} and page {step + 2}" if len(window.steps) > 1 else ""
    turned = moved and starts[0] is not None and starts[1] is not None and starts[1] < starts[0]
    restarted = not turned and bool(moved or created or None in starts)
    cause = (
        f"Not every engine of the earlier page is on the later one{where}, so the sums over engines fell"
        if gone and not (moved or created)
        else f"The later page{where} is of a process that started before that of the earlier one: the pages are in "
        "another order than they were taken, or they come from different servers behind one address"
        if turned
        else f"The server was restarted{where}"
        if moved or created or None in starts
        else f"Counters fell{where} although the process start time stayed: the pages are in another order than they "
        "were taken, or they come from different servers behind one address"
    )
    yield Finding(
        "counter_reset",
        "refuse",
        f"{cause}: {'; '.join(signs)}. No difference of this window can be used{also}.",
        numbers,
        "Discard the window. Find out why the server restarted (its log, `systemctl status`, `journalctl -u`), then "
        "measure again."
        if restarted
        else "Find out why an engine left (the log, fewer data-parallel engines), and measure again with all of them."
        if gone
        else "Give the pages in the order in which they were taken, the earliest first. If they were, fetch them from "
        "the one server itself, not from an address that several stand behind.",
        about=window.about,
    )


def _fallen(before: Reading, after: Reading, roles: list[str]) -> dict[str, tuple[float, float]]:
    ordered = [role for role in _SHOWN_FIRST if role in roles] + [role for role in roles if role not in _SHOWN_FIRST]
    pairs = {role: (before.values.get(role), after.values.get(role)) for role in ordered}
    known = {role: (was, now) for role, (was, now) in pairs.items() if was is not None and now is not None}
    # Sums and counts of histograms fall with the counters, and say less; they are shown where nothing else fell.
    return {role: pair for role, pair in known.items() if not role.endswith(("_sum", "_count"))} or known


def _overtaken(before: Reading, after: Reading) -> tuple[str, float, float] | None:
    for role, name in (("preemptions", "num_preemptions"), ("prompt_tokens", "prompt_tokens")):
        was, now = before.values.get(role), after.values.get(role)
        if was is not None and now is not None and now > was > 0:
            return name, was, now
    return None


def requests_missing(window: Window, client: Client | None) -> Iterator[Finding]:
    """Requests that a client sent and the server never counted as ended, or that began here and never ended."""
    finished = window.finished
    if finished is None:
        return
    in_flight = _in_flight(window.last)
    # One page alone has nothing before it: all that was ever sent is compared.
    before = 0.0 if window.since_start else _in_flight(window.first)
    if client is not None and client.sent is not None:
        missing = client.sent + before - finished - in_flight
        if missing > 0:
            yield _missing_by_client(window, client, client.sent, finished, in_flight, missing)
        elif missing < 0:
            yield Finding(
                "requests_of_others",
                "refuse",
                f"The server finished {whole(finished)} requests {window.during} and the client sent "
                f"{whole(client.sent)}: {plural(-missing, 'request')} came from somebody else.",
                {"sent": client.sent, "finished": finished, "others": -missing},
                "Measure again while nobody else uses the server, or take the window as that of a shared server.",
                about=window.about,
            )
        return
    began = window.rise("ttft_seconds_count")
    lost = None if began is None else began - finished - in_flight
    if lost is not None and lost > 0:
        yield Finding(
            "requests_aborted",
            "warn",
            f"At least {plural(lost, 'request')} got a first token {window.during} and never ended: "
            f"{whole(began or 0)} "
            f"first tokens, {whole(finished)} ended, {whole(in_flight)} still there. Requests that a client drops are "
            "in no count of ended requests, and their preemptions are lost.",
            {"first_tokens": began, "finished": finished, "in_flight": in_flight, "missing": lost},
            "Look for time limits of clients and of proxies shorter than the answers take. Where a client sent this "
            "load, give what it sent with --client.",
            "inferred",
            window.about,
        )


def _in_flight(reading: Reading) -> float:
    return (reading.values.get("requests_running") or 0.0) + (reading.values.get("requests_waiting") or 0.0)


def _missing_by_client(
    window: Window, client: Client, sent: float, finished: float, in_flight: float, missing: float
) -> Finding:
    own = {name: value for name, value in client.outcomes().items() if value}
    says = f"; the client itself says {listed([f'{whole(v)} {k}' for k, v in own.items()])}" if own else ""
    there = f" and {whole(in_flight)} still there" if in_flight else ""
    began = window.rise("ttft_seconds_count")
    prompt = window.rise("prompt_tokens")
    kept = window.rise("request_prompt_tokens_sum")
    trace = ""
    if began is not None and began > finished:
        trace = f" {whole(began)} got a first token."
    if prompt is not None and kept is not None and prompt > kept:
        trace += f" Their prompts are in prompt_tokens ({whole(prompt)}) and not among ended requests ({whole(kept)})."
    return Finding(
        "requests_missing",
        "refuse",
        f"{plural(missing, 'request')} of {whole(sent)} that the client sent are missing: the server counts "
        f"{whole(finished)} ended{there} {window.during}{says}. Aborted requests are in no request_success_total and "
        f"in "
        f"no histogram of ended requests.{trace} Means and preemptions of this window leave out just these.",
        {
            "sent": sent,
            "finished": finished,
            "missing": missing,
            "in_flight": in_flight,
            "client": own,
            "first_tokens": began,
            "prompt_tokens": prompt,
        },
        "Don't use this window. Let every request end before the last scrape (no client time limit shorter than the "
        "answers take), and send the load again.",
        about=window.about,
    )
