"""Two servers side by side: does the one with a connector preempt without reason?"""

from collections.abc import Iterator

from kvtrial.analysis.observe.finding import Finding
from kvtrial.analysis.observe.window import Window, exports_connector
from kvtrial.analysis.observe.words import percent, plural, whole
from kvtrial.record.hazards import all_hazards
from kvtrial.record.versions import within

CASCADE = "preemption-cascade"
LEAST_PREEMPTIONS = 10
LEAST_RATIO = 3.0
USAGE_APART = 0.15


def against_control(window: Window, control: Window, async_scheduling: bool | None = None) -> Iterator[Finding]:
    """Findings on a server with a connector beside one without, under the same load.

    `async_scheduling`: as the configuration says, None where it is not known.
    """
    ours, theirs = window.rise("preemptions"), control.rise("preemptions")
    if ours is None or theirs is None:
        return
    rates = [count / done if done else None for count, done in ((ours, window.finished), (theirs, control.finished))]
    usage = [max(one.gauge("kv_cache_usage_share"), default=None) for one in (window, control)]
    numbers = {
        "delta": ours,
        "control_delta": theirs,
        "variant": ours,
        "control": theirs,
        "finished": window.finished,
        "control_finished": control.finished,
        "per_finished_request": rates[0],
        "control_per_finished_request": rates[1],
        "kv_usage_max": usage[0],
        "control_kv_usage_max": usage[1],
    }
    more = ours >= LEAST_PREEMPTIONS and ours >= LEAST_RATIO * theirs
    if rates[0] is not None and rates[1] is not None:
        more = more and rates[0] >= LEAST_RATIO * rates[1]
    if not more or not exports_connector(window):
        return
    alike = usage[0] is None or usage[1] is None or abs(usage[0] - usage[1]) <= USAGE_APART
    hazard = next(hazard for hazard in all_hazards() if hazard.id == CASCADE)
    possible = (
        within(window.version, hazard.since, hazard.until)
        if window.version
        else window.versions.may_be(hazard.since, hazard.until)
    )
    usages = (
        f"at about the same KV usage ({percent(usage[0])} and {percent(usage[1])})"
        if alike and usage[0] is not None and usage[1] is not None
        else "with KV usage unknown"
        if alike
        else f"at another KV usage ({percent(usage[0] or 0)} and {percent(usage[1] or 0)})"
    )
    counts = (
        f"{plural(ours, 'preemption')} with the connector and {whole(theirs)} without {window.during}, {usages}; "
        f"{whole(window.finished or 0)} and {whole(control.finished or 0)} requests ended"
    )
    if possible and alike and async_scheduling is not False:
        version = window.version or f"{window.versions.described()} by what the page exports"
        yield Finding(
            "version_hazard_preemption_cascade",
            "warn",
            f"{counts}. That fits a known defect: with a connector and async scheduling, vLLM {hazard.since} to below "
            f"{hazard.until} preempts many requests for one failed allocation ({hazard.source}); this is {version}. It "
            "says nothing about what offloading costs.",
            numbers | {"hazard": hazard.id, "version": window.version, "versions": window.versions.described()},
            "Don't compare preemptions between these arms. Set --no-async-scheduling in both, or use 0.30 or newer, "
            "and "
            "measure again.",
            "seen" if window.version and async_scheduling else "inferred",
            window.about,
        )
        return
    why = (
        f"async scheduling is off, so it is not the cascade of {hazard.source}"
        if async_scheduling is False
        else f"the version can't have the cascade of {hazard.source}"
        if not possible
        else "KV usage differs, so the arms carried different loads"
    )
    yield Finding(
        "preemption_higher_with_connector",
        "warn",
        f"{counts}; {why}.",
        numbers,
        "Compare both launches with `kvtrial check`, and run the pair again in the other order.",
        "inferred",
        window.about,
    )
