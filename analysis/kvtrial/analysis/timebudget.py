"""Where the time of a campaign went, added up from its records."""

from collections import defaultdict
from collections.abc import Iterable

from kvtrial.record.record import RunRecord
from kvtrial.record.verdict import TimeBudget


def time_budget(
    records: Iterable[RunRecord], install_seconds: float | None = None, campaign_seconds: float | None = None
) -> TimeBudget:
    """Sums over all runs of all hosts, in seconds; a run that never started counts what it took.

    `campaign_seconds` is the campaign's wall time without installation. What it exceeds the busiest host's runs by
    (hosts work at the same time) is added to `other`. `other_share` is other / (starts + stops + phases + other).
    """
    start = stop = phases = other = 0.0
    by_host: dict[str, float] = defaultdict(float)
    for record in records:
        times = record.times
        start += times.start_seconds or 0.0
        stop += times.stop_seconds or 0.0
        phases += times.phases_seconds
        other += times.other_seconds
        by_host[record.host] += times.ended_monotonic_seconds - times.started_monotonic_seconds
    if campaign_seconds is not None:
        other += max(0.0, campaign_seconds - max(by_host.values(), default=0.0))
    campaign = start + stop + phases + other
    return TimeBudget(
        install_seconds=install_seconds,
        engine_start_seconds=start,
        engine_stop_seconds=stop,
        phases_seconds=phases,
        other_seconds=other,
        total_seconds=campaign + (install_seconds or 0.0),
        other_share=other / campaign if campaign else 0.0,
    )
