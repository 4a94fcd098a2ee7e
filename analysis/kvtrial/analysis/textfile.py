"""A verdict as a page for node_exporter's textfile collector.

The campaign's name is a label of `kvtrial_verdict_info` only: on every series it would start new ones each night.
No sample carries a timestamp, which the collector forbids.
"""

import math
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from kvtrial.analysis.answer import share_is_told
from kvtrial.record.verdict import ComparisonResult, GateResult, Verdict

ALL_HOSTS = "all"
"""Label value of the campaign as a whole; Ansible reserves the name, so no host bears it."""

COMPARISON_LABELS = ("protocol", "host", "arm", "against", "phase", "against_phase", "metric", "role", "scale")


def to_textfile(verdict: Verdict) -> str:
    """The verdict in Prometheus text format, ending in a newline. An effect that was not measured has no sample."""
    return generate_latest(_registry(verdict)).decode()


def to_openmetrics(verdict: Verdict) -> str:
    """The same series in OpenMetrics text format, ending in # EOF."""
    page: bytes = openmetrics.generate_latest(_registry(verdict))  # type: ignore[no-untyped-call]
    return page.decode()


def _registry(verdict: Verdict) -> CollectorRegistry:
    registry = CollectorRegistry()
    _add_verdicts(registry, verdict)
    comparisons = [(ALL_HOSTS, verdict.comparisons), *((host.host, host.comparisons) for host in verdict.hosts)]
    _add_comparisons(registry, verdict.protocol, comparisons)
    _add_break_even(registry, verdict)
    _add_gates(registry, verdict)
    _add_runs(registry, verdict)
    return registry


def _add_verdicts(registry: CollectorRegistry, verdict: Verdict) -> None:
    info = Gauge(
        "kvtrial_verdict_info",
        "The verdict of a host or of the whole campaign (host=all); the value is always 1.",
        ("campaign", "protocol", "host", "verdict", "evidence"),
        registry=registry,
    )
    words = [(ALL_HOSTS, verdict.verdict), *((host.host, host.verdict) for host in verdict.hosts)]
    for host, word in words:
        info.labels(verdict.campaign, verdict.protocol, host, word, verdict.evidence or "none").set(1)


def _add_comparisons(
    registry: CollectorRegistry, protocol: str, comparisons: Iterable[tuple[str, Sequence[ComparisonResult]]]
) -> None:
    meaning = "arm / against on scale ratio, arm - against in the metric's unit on scale difference."
    effect = Gauge("kvtrial_effect", f"Effect: {meaning}", COMPARISON_LABELS, registry=registry)
    low = Gauge("kvtrial_effect_ci_low", "Lower bound of the effect's interval.", COMPARISON_LABELS, registry=registry)
    high = Gauge(
        "kvtrial_effect_ci_high", "Upper bound of the effect's interval.", COMPARISON_LABELS, registry=registry
    )
    delta = Gauge(
        "kvtrial_delta_ttft_seconds",
        "Time to first token, arm - against, median of the pairs; negative is sooner.",
        COMPARISON_LABELS,
        registry=registry,
    )
    pairs = Gauge("kvtrial_pairs", "Pairs that a comparison rests on.", COMPARISON_LABELS, registry=registry)
    p_value = Gauge("kvtrial_p_value", "p of the exact two-sided test.", COMPARISON_LABELS, registry=registry)
    for host, items in comparisons:
        for item in items:
            where = (item.phase, item.against_phase or item.phase)
            labels = (protocol, host, item.arm, item.against, *where, item.metric, item.role, item.effect_scale)
            measured = (
                (effect, item.effect), (low, item.ci_low), (high, item.ci_high), (delta, item.delta_ttft_seconds),
                (p_value, item.p_value), (pairs, float(item.pairs)),
            )  # fmt: skip
            for gauge, value in measured:
                if value is not None and math.isfinite(value):
                    gauge.labels(*labels).set(value)


def _add_break_even(registry: CollectorRegistry, verdict: Verdict) -> None:
    """The share of returning requests from which on it pays, where one number may stand for it."""
    gauge = Gauge(
        "kvtrial_break_even_hit_share",
        "Share of requests, 0 to 1, that must return to an evicted prefix: computed, or found by a sweep of shares.",
        ("protocol", "host", "how", "arm", "against", "prefix_tokens"),
        registry=registry,
    )
    even = verdict.break_even
    by_sweep = even.found if even is not None else None
    # What a sweep found stands before what is computed, also where it found that it pays at no share, or at all.
    computed = None if by_sweep is not None and by_sweep.pays != "above" else even
    for how, found in (("computed", computed), ("found", by_sweep)):
        if found is not None and share_is_told(found, verdict.verdict) and found.hit_share is not None:
            assert even is not None
            length = "" if even.prefix_tokens is None else str(even.prefix_tokens)
            gauge.labels(verdict.protocol, ALL_HOSTS, how, even.arm, even.against, length).set(found.hit_share)


def _add_gates(registry: CollectorRegistry, verdict: Verdict) -> None:
    gauge = Gauge(
        "kvtrial_gate_passed",
        "1 passed, 0 failed, NaN could not be decided there.",
        ("protocol", "host", "gate"),
        registry=registry,
    )
    results: list[tuple[str, Sequence[GateResult]]] = [(ALL_HOSTS, verdict.gates)]
    results += [(host.host, host.gates) for host in verdict.hosts]
    for host, gates in results:
        for gate in gates:
            gauge.labels(verdict.protocol, host, gate.gate).set(math.nan if gate.passed is None else gate.passed)


def _add_runs(registry: CollectorRegistry, verdict: Verdict) -> None:
    gauge = Gauge("kvtrial_runs", "Runs of the campaign by state.", ("protocol", "host", "state"), registry=registry)
    for host in verdict.hosts:
        runs = host.runs
        counts = {
            "planned": runs.planned,
            "valid": runs.valid,
            "dropped": runs.dropped,
            "engine_fault": runs.engine_faults,
        }
        for state, number in counts.items():
            gauge.labels(verdict.protocol, host.host, state).set(number)
