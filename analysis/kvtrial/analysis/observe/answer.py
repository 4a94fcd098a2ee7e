"""The answer about one server: findings in order, the class of the first, what stays open. Pure."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from kvtrial.analysis.observe.cascade import against_control
from kvtrial.analysis.observe.client import Client
from kvtrial.analysis.observe.configuration import (
    Configuration,
    async_scheduling_of,
    configuration_of_log,
    configured_connector,
    launch_findings,
    told_by_configuration,
)
from kvtrial.analysis.observe.finding import Finding
from kvtrial.analysis.observe.host import exposure, memory
from kvtrial.analysis.observe.known import HazardHere, hazards_here
from kvtrial.analysis.observe.lengths import output_lengths
from kvtrial.analysis.observe.logs import EARLIER_LIFE, Log, log_findings, told_by
from kvtrial.analysis.observe.pages import Pages, caveats, several
from kvtrial.analysis.observe.preemption import preemption
from kvtrial.analysis.observe.queue import deferred_behind_load, flow, queueing
from kvtrial.analysis.observe.settle import Experiment, experiment_for
from kvtrial.analysis.observe.standstill import standstills
from kvtrial.analysis.observe.tier import tier
from kvtrial.analysis.observe.usable import counter_reset, requests_missing
from kvtrial.analysis.observe.wanted import neighbours
from kvtrial.analysis.observe.window import Window, engines_of, exports_connector, of_engines
from kvtrial.analysis.observe.words import listed
from kvtrial.record.observed import HostFacts
from kvtrial.record.versions import hazards_not_read, outside_read_range

Verdict = Literal["report", "INVALID", "error"]

ORDER = (
    "counter_reset",
    "requests_missing",
    "requests_of_others",
    "engine_dead_known_bug",
    "out_of_memory_kernel_oom_killer",
    "out_of_memory_cgroup_limit",
    "gpu_memory_short_at_start",
    "cuda_oom_runtime",
    "dev_shm_shortage",
    "engine_start_failed",
    "engine_dead",
    "server_does_not_answer",
    "server_asleep",
    "scheduler_deadlock",
    "engine_stalled",
    "standstill_unknown",
    "parsed_per_model_and_engine",
    "parsed_with_caveats",
    "version_hazard_preemption_cascade",
    "tier_not_pinned",
    "preemption_concentrated",
    "preemption_not_from_kv_pressure",
    "preemption_continuous",
    "preemption_single_burst",
    "preemption_ongoing",
    "preemption_intermittent",
    "preemption_shape_unknown",
    "deferred_behind_load",
    "requests_deferred",
    "mixed_interfaces",
    "tier_below_one_block",
    "obsolete_key",
    "unknown_key",
    "tier_smaller_than_gpu_kv",
    "gpu_cache_answered",
    "no_reuse_in_workload",
    "healthy_tier_serving",
    "preemption_higher_with_connector",
    "not_preemption",
    "preemption_unknown",
    "tier_loads_unknown",
    "tier_full",
    "tier_idle",
    "requests_aborted",
    "connector_absent",
)
"""Which class names the answer where several hold: what forbids reading on, what kills, what is slow, facts."""

_ENDS_THE_START = {"unknown_option", "option_not_in_version", "unusable_value", "max_model_len_over_kv_cache"}
"""What check refuses since no engine starts with it."""
_AT_THE_END = ("idle", "no_fault_seen")


class Answer(msgspec.Struct, frozen=True, rename={"class_": "class"}):
    """What is known of one server. `class_`: of the first finding. `settle`: the experiment for what is open.

    `hazards`: known defects that it shows or meets; `hazards_possible`: those of its version whose configuration is not
    known.
    """

    schema_version: int
    verdict: Verdict
    class_: str | None
    findings: list[Finding]
    server: dict[str, Any] = {}
    hazards: list[HazardHere] = []
    hazards_possible: list[str] = []
    settle: Experiment | None = None
    notes: list[str] = []


def observe(
    pages: Pages | None = None,
    control: Pages | None = None,
    log: Log | None = None,
    configuration: Configuration | None = None,
    facts: HostFacts | None = None,
    client: Client | None = None,
    version: str | None = None,
    silent: str | None = None,
) -> Answer:
    """The answer about one server from whatever was given of it.

    pages: of the server, in time order; control: of another server beside it. version: as stated or as /version says.
    silent: how it did not answer, where it was asked in vain. Every part may be absent; without pages and log only the
    configuration and the host are judged.
    """
    of_log = log.version if log is not None else None
    version = version or (configuration.version if configuration else None) or of_log
    configuration = configuration or (
        configuration_of_log(log.facts.non_default_args, of_log, log.backend)
        if log is not None and pages is not None
        else None
    )
    found: list[Finding] = []
    if pages is not None:
        found += _of_pages(pages, control, log, configuration, client, version)
    if silent is not None:
        found.append(_does_not_answer(silent, log))
    if log is not None:
        found += _beside_pages(list(log_findings(log)), pages)
    if configuration is not None and configuration.source != "the log's start":
        said = {finding.class_ for finding in found}
        if pages is not None:
            # A server that answers has started, so it took its options and its length.
            said |= _ENDS_THE_START
        if "healthy_tier_serving" in said:
            # What is seen to serve is not judged by its size on paper.
            said.add("tier_smaller_than_gpu_kv")
        found += [one for one in launch_findings(configuration, version) if one.class_ not in said]
    if facts is not None or configuration is not None:
        found += exposure(facts, configuration, version)
    if facts is not None:
        told = told_by_configuration(configuration, version) if configuration else None
        found += memory(facts, told) if told else ()
    found = in_order(found)
    if pages is not None and not any(finding.severity == "refuse" for finding in found):
        found += neighbours([finding.class_ for finding in found], pages.main, configuration)
    known = hazards_here(pages, log, configuration, facts, version)
    share = next((f.numbers.get("share_of_prompt") for f in found if f.class_ == "healthy_tier_serving"), None)
    refused = any(finding.severity == "refuse" for finding in found)
    return Answer(
        1,
        "INVALID" if refused else "report",
        found[0].class_ if found else None,
        found,
        _server(pages, configuration, version, facts),
        [hazard for hazard in known if hazard.state != "possible"],
        [hazard.id for hazard in known if hazard.state == "possible"],
        None if refused else experiment_for(_open(found), share),
        _notes(pages, (configuration.version if configuration else None) or version),
    )


def _notes(pages: Pages | None, version: str | None) -> list[str]:
    notes = list(pages.notes) if pages is not None else []
    if version is None or (unread := hazards_not_read(version)) is None:
        return notes
    beyond = outside_read_range(version) or ""
    said = any(note.startswith(beyond) for note in notes)
    return [*notes, unread if said else f"{beyond} {unread}"]


def _does_not_answer(silent: str, log: Log | None) -> Finding:
    dead = log is not None and log.diagnosis is not None
    why = "" if log is None or dead else " The end of its log names no failure: it was ended from outside, or is stuck."
    return Finding(
        "server_does_not_answer",
        "warn",
        f"{silent}{why}",
        {},
        "Look whether the process lives (`systemctl status`), and for 'Killed process' in `journalctl -k`.",
    )


def _beside_pages(of_log: list[Finding], pages: Pages | None) -> list[Finding]:
    """A log's findings without those that pages know better: its periodic lines are single moments of another time."""
    if pages is None:
        return of_log
    # A machine that was taken away is told by a line of its own, which counts nothing that runs.
    of_queues = ("not_preemption", "deferred_behind_load", "preemption_unknown", "standstill_unknown")
    queue = [one for one in of_log if one.class_ in of_queues and "running" in one.numbers]
    return [one for one in of_log if one.class_ not in ("idle", "no_fault_seen") and one not in queue]


def _open(found: Sequence[Finding]) -> list[str]:
    """Classes that may leave a question: a queue that nobody stands in leaves none."""
    return [one.class_ for one in found if one.class_ != "not_preemption" or one.severity == "warn"]


def in_order(found: Sequence[Finding]) -> list[Finding]:
    """Findings by ORDER, then warnings, then facts; what says that all is well only where nothing else does."""
    rank: dict[str, float] = {name: index for index, name in enumerate(ORDER)}
    apart = next((one for one in found if one.class_ == "parsed_per_model_and_engine"), None)
    if apart is not None and len(apart.numbers.get("models", [])) == 1:
        # Several engines of one model are one server: what is wrong with it says more than how it was read.
        rank[apart.class_] = rank["preemption_shape_unknown"] - 0.5
    others = [finding for finding in found if finding.class_ not in _AT_THE_END]
    kept = others or list(found)
    if others and all(one.about == EARLIER_LIFE and "did not start" in one.reason for one in others):
        # What it does now names the answer; that it did not start once is said beside it.
        kept = list(found)
    if others and all(finding.class_ == "not_preemption" and finding.severity == "info" for finding in others):
        # An old count names the answer, and that nobody asks anything now is said beside it.
        kept = list(found)
    ordered = sorted(
        kept, key=lambda one: (one.about == EARLIER_LIFE, rank.get(one.class_, len(rank)), one.severity == "info")
    )
    harmless = [f for f in ordered if f.class_ == "parsed_with_caveats" and f.severity == "info"]
    if harmless and len(ordered) > len(harmless):
        # Oddities that change no value don't name the answer where something else can.
        ordered = [finding for finding in ordered if finding not in harmless] + harmless
    return ordered


def _of_pages(
    pages: Pages,
    control: Pages | None,
    log: Log | None,
    configuration: Configuration | None,
    client: Client | None,
    version: str | None,
) -> Iterator[Finding]:
    resets = [finding for window in pages.windows for finding in counter_reset(window)]
    resets += (
        [_of_control(finding) for window in control.windows for finding in counter_reset(window)] if control else []
    )
    if resets:
        yield from resets
        return
    if (apart := several(pages)) is not None:
        yield apart
    if (odd := caveats(pages)) is not None:
        yield odd
    told = told_by_configuration(configuration, version) if configuration else told_by(log) if log is not None else None
    for window in pages.windows:
        counted = list(requests_missing(window, client if window is pages.main else None))
        yield from counted
        if not any(finding.severity == "refuse" for finding in counted):
            yield from _of_window(window, told)
    if control is not None:
        asynchronous = async_scheduling_of(configuration, version)
        yield from against_control(pages.main, control.main, asynchronous)
    if configuration is not None and (name := configured_connector(configuration, version)):
        yield from _connector_absent(pages.main, name, configuration)


def _of_window(window: Window, told: Any) -> Iterator[Finding]:
    stuck = list(standstills(window))
    yield from stuck
    going_on = [engine for engine in engines_of(window) if not any(engine in _engines(one) for one in stuck)]
    if stuck and not (going_on and all(_engines(one) for one in stuck)):
        return
    if stuck:
        # A queue in front of an engine that hangs is no queue for seats: the rest is said of the engines that go on.
        window = of_engines(window, going_on, _named(window.about, going_on))
    yield from preemption(window)
    yield from deferred_behind_load(window)
    yield from tier(window, told)
    yield from queueing(window)
    yield from output_lengths(window)
    yield from flow(window)


def _engines(finding: Finding) -> list[str]:
    """Engines of several that a standstill is said of; empty where it is the whole server's."""
    engine = finding.numbers.get("engine")
    return [] if engine is None else [str(engine)]


def _named(model: str | None, engines: Sequence[str]) -> str:
    said = f"engine{'s' if len(engines) > 1 else ''} {listed(engines, len(engines))}"
    return f"{model}, {said}" if model else said


def _of_control(finding: Finding) -> Finding:
    return msgspec.structs.replace(finding, about="control")


def _connector_absent(window: Window, name: str, configuration: Configuration) -> Iterator[Finding]:
    if exports_connector(window) or name != "OffloadingConnector" or not window.versions.may_be("0.24", None):
        return
    yield Finding(
        "connector_absent",
        "warn",
        f"{configuration.source} asks for {name}, and the page exports none of its series: the server that answers was "
        "started without it, or it is another server.",
        {"connector": name},
        "Compare the argv of the running process with the launch, and the port with the unit's.",
        about=window.about,
    )


def _server(
    pages: Pages | None, configuration: Configuration | None, version: str | None, facts: HostFacts | None
) -> dict[str, Any]:
    known: dict[str, Any] = {"version": version, "host": facts.host if facts else None}
    if facts is not None:
        known |= {
            "unit_name": facts.unit_name,
            "driver_version": facts.driver_version,
            "gpus": [msgspec.to_builtins(gpu) for gpu in facts.gpus],
            "ram_total_bytes": facts.ram_total_bytes,
            "ram_available_bytes": facts.ram_available_bytes,
            "dev_shm_total_bytes": facts.dev_shm_total_bytes,
            "dev_shm_free_bytes": facts.dev_shm_free_bytes,
            "cgroup_limit_bytes": facts.cgroup_limit_bytes,
            "cgroup_used_bytes": facts.cgroup_used_bytes,
        }
    if configuration is not None:
        known["argv"] = configuration.launch.argv
        known["configuration"] = configuration.source
    if pages is not None:
        main = pages.main
        known |= {
            "models": [window.last.model_name for window in pages.windows],
            "engines": sorted({e for engines in main.last.per_engine.values() for e in engines if e}),
            "pages": len(main.readings),
            "window_seconds": main.seconds,
            "versions_by_page": pages.versions.described(),
            "versions_because": pages.versions.because,
        }
    return known
