"""The metrics a comparison may name: unit, direction, and how a run's record gives the value.

A metric takes one number from one run (the unit of analysis) and one of its phases. The pseudo-phase `run` stands for
the whole engine lifetime.
"""

from collections.abc import Callable

from msgspec import Struct

from kvtrial.analysis.effect import Better
from kvtrial.analysis.laddering import GROUPS
from kvtrial.analysis.levels import (
    gpu_seconds_per_request,
    pooled_quantile,
    preemptions_per_1000_requests,
    queue_seconds_per_request,
    stall_seconds_per_request,
    throughput,
)
from kvtrial.record.errors import UnusableInput
from kvtrial.record.record import PhaseRecord, RunRecord

WHOLE_RUN = "run"

Extract = Callable[[RunRecord, str], float | None]


class Metric(Struct, frozen=True):
    """`extract(record, phase)` is the run's value, or None where it is lacking. `is_ttft`: time to first token."""

    name: str
    unit: str
    better: Better
    extract: Extract
    whole_run: bool = False
    is_ttft: bool = False


def find_phase(record: RunRecord, name: str) -> PhaseRecord | None:
    """The phase of that name, or None."""
    return next((phase for phase in record.phases if phase.name == name), None)


def delta(phase: PhaseRecord, role: str) -> float | None:
    """Rise of a metric role over the phase, or None where the engine did not export it at both ends."""
    before, after = phase.before.get(role), phase.after.get(role)
    return None if before is None or after is None else after - before


def find_metric(name: str) -> Metric:
    """The metric of that name. Raises UnusableInput, with the allowed names, for any other."""
    try:
        return METRICS[name]
    except KeyError:
        raise UnusableInput(f'metric "{name}" is unknown; use one of {", ".join(METRICS)}.') from None


def _of_phase(field: str) -> Extract:
    def extract(record: RunRecord, phase: str) -> float | None:
        if phase in GROUPS:
            return _OF_LEVELS[field](record, phase) if field in _OF_LEVELS else None
        found = find_phase(record, phase)
        value: float | None = None if found is None else getattr(found, field)
        return value

    return extract


_OF_LEVELS: dict[str, Extract] = {
    "ttft_median_seconds": pooled_quantile(lambda request: request.ttft_seconds, 0.5),
    "ttft_p95_seconds": pooled_quantile(lambda request: request.ttft_seconds, 0.95),
    "e2e_median_seconds": pooled_quantile(lambda request: request.e2e_seconds, 0.5),
    "e2e_p95_seconds": pooled_quantile(lambda request: request.e2e_seconds, 0.95),
    "output_throughput_tokens_per_second": throughput,
}
"""How a field of a phase is read of several levels together: quantiles over all their requests."""


def _ram_used_peak(record: RunRecord, phase: str) -> float | None:
    return None if record.samples is None else float(record.samples.ram_used_peak_bytes)


def _registry(*metrics: Metric) -> dict[str, Metric]:
    return {metric.name: metric for metric in metrics}


METRICS = _registry(
    Metric("ttft_mean_seconds", "seconds", "lower", _of_phase("ttft_mean_seconds"), is_ttft=True),
    Metric("ttft_median_seconds", "seconds", "lower", _of_phase("ttft_median_seconds"), is_ttft=True),
    Metric("ttft_p95_seconds", "seconds", "lower", _of_phase("ttft_p95_seconds"), is_ttft=True),
    Metric("inter_token_median_seconds", "seconds", "lower", _of_phase("inter_token_median_seconds")),
    Metric("inter_token_p95_seconds", "seconds", "lower", _of_phase("inter_token_p95_seconds")),
    Metric("e2e_median_seconds", "seconds", "lower", _of_phase("e2e_median_seconds")),
    Metric(
        "output_throughput_tokens_per_second",
        "tokens/second",
        "higher",
        _of_phase("output_throughput_tokens_per_second"),
    ),
    Metric("ram_used_peak_bytes", "bytes", "lower", _ram_used_peak, whole_run=True),
    Metric("e2e_p95_seconds", "seconds", "lower", _of_phase("e2e_p95_seconds")),
    Metric("longest_gap_p95_seconds", "seconds", "lower", pooled_quantile(lambda r: r.longest_gap_seconds, 0.95)),
    Metric("stall_seconds_per_request", "seconds", "lower", stall_seconds_per_request),
    Metric("queue_seconds_per_request", "seconds", "lower", queue_seconds_per_request),
    Metric("gpu_seconds_per_request", "GPU-seconds", "lower", gpu_seconds_per_request),
    Metric("preemptions_per_1000_requests", "preemptions per 1,000 requests", "lower", preemptions_per_1000_requests),
)
