"""Records as one table: a row a run and phase, in a column order that does not change."""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import pandas

from kvtrial.record.exposition import accumulating_roles
from kvtrial.record.record import PhaseRecord, RunRecord

RUN_COLUMNS = (
    "campaign", "protocol", "host", "pair", "position", "run", "arm", "spare", "evidence", "outcome", "fault",
    "vllm_version",
)  # fmt: skip
PHASE_COLUMNS = (
    "phase", "block", "started_monotonic_seconds", "phase_seconds", "scrape_seconds", "concurrency", "arrivals", "sent",
    "finished", "failed",
    "output_tokens", "ttft_mean_seconds", "ttft_median_seconds", "ttft_p95_seconds", "inter_token_median_seconds",
    "inter_token_p95_seconds",
    "e2e_median_seconds", "output_throughput_tokens_per_second", "dispatch_lag_p95_seconds", "client_cpu_cores",
    "prompts_sha256",
)  # fmt: skip
RUN_MEASURES = (
    "engine_start_seconds", "engine_stop_seconds", "ram_used_peak_bytes", "ram_available_min_bytes",
    "vram_used_peak_bytes",
    "foreign_cpu_share", "steal_share", "cpu_mhz_median", "throttle_events",
)  # fmt: skip


TEXTS = frozenset(
    {"campaign", "protocol", "host", "run", "arm", "evidence", "outcome", "fault", "vllm_version", "phase", "block",
     "arrivals", "prompts_sha256"}
)  # fmt: skip
COUNTS = frozenset({"pair", "position", "sent", "finished", "failed", "output_tokens"})
FLAGS = frozenset({"spare"})
"""What a column holds; all others are measures. Tables of two campaigns have one type a column, measured or not."""


def columns() -> list[str]:
    """The columns in order; one `delta_<role>` for every role that accumulates."""
    return [*RUN_COLUMNS, *PHASE_COLUMNS, *RUN_MEASURES, *(column for column, _ in _delta_columns())]


def to_frame(records: Iterable[RunRecord]) -> pandas.DataFrame:
    """A row for each phase of each run, ordered by host, pair, position and time; missing values are None.

    A run that left no phase has one row, so that none vanishes. Dropped and faulted runs are in it, with their outcome.
    """
    rows: list[dict[str, Any]] = []
    for record in sorted(records, key=lambda r: (r.host, r.pair, r.position, r.run)):
        in_time: list[PhaseRecord | None] = [*sorted(record.phases, key=lambda phase: phase.started_monotonic_seconds)]
        rows.extend(_of_run(record) | (_of_phase(phase) if phase else {}) for phase in in_time or [None])
    return pandas.DataFrame(rows, columns=columns())


def joined(frames: Sequence[pandas.DataFrame]) -> pandas.DataFrame:
    """The tables of hosts, one host's each, as `to_frame` gives them of all records together."""
    told = [frame for frame in frames if len(frame)]
    ordered = sorted(told, key=lambda frame: str(frame["host"].iloc[0]))
    return pandas.concat(ordered, ignore_index=True) if ordered else to_frame([])


def _of_run(record: RunRecord) -> dict[str, Any]:
    row: dict[str, Any] = {name: getattr(record, name) for name in RUN_COLUMNS if name not in ("fault", "vllm_version")}
    row["fault"] = record.fault.fault if record.fault else None
    row["vllm_version"] = record.resolved.vllm_version if record.resolved else record.vllm_version_pinned
    row["engine_start_seconds"] = record.times.start_seconds
    row["engine_stop_seconds"] = record.times.stop_seconds
    if record.samples is not None:
        row.update({name: getattr(record.samples, name) for name in RUN_MEASURES[2:]})
    return row


def _of_phase(phase: PhaseRecord) -> dict[str, Any]:
    named = {"phase", "phase_seconds", "dispatch_lag_p95_seconds", "client_cpu_cores"}
    row: dict[str, Any] = {name: getattr(phase, name) for name in PHASE_COLUMNS if name not in named}
    row["phase"], row["phase_seconds"] = phase.name, phase.seconds
    row["dispatch_lag_p95_seconds"] = phase.card.dispatch_lag_p95_seconds
    row["client_cpu_cores"] = phase.card.client_cpu_share
    before, after = phase.before, phase.after
    return row | {
        column: None if (was := before.get(role)) is None or (now := after.get(role)) is None else now - was
        for column, role in _delta_columns()
    }


@cache
def _delta_columns() -> list[tuple[str, str]]:
    return [(f"delta_{role}", role) for role in accumulating_roles()]
