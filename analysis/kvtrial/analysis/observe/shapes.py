"""The shape of preemptions: over time, and over the requests that ended. Pure."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from kvtrial.analysis.observe.window import Window

Shape = Literal["burst", "continuous", "ongoing", "intermittent", "unknown"]

LEAST_INTERVALS = 3
CONTINUOUS_SHARE = 0.75
HEAVY_REQUESTS_SHARE = 0.15
HEAVY_LEAST_MEAN = 3.0
VERY_HEAVY_LEAST_MEAN = 10.0
"""The last bucket (over 20) bounds a request from below alone, so those in it may carry far more than is provable."""


class Concentration(msgspec.Struct, frozen=True):
    """How preemptions lie over the requests that ended.

    `heavy`: those with two or more; `heavy_least`: at least how many of the preemptions are theirs.
    """

    requests: float
    preemptions: float
    heavy: float
    heavy_least: float

    @property
    def proved(self) -> bool:
        """Whether the buckets prove that the heavy ones carry half of it or more."""
        return self.heavy_least >= 0.5 * self.preemptions

    @property
    def concentrated(self) -> bool:
        """Few requests carry much of it, each several times."""
        if not self.heavy or self.heavy > HEAVY_REQUESTS_SHARE * self.requests:
            return False
        each = self.heavy_least / self.heavy
        if self.proved:
            return each >= HEAVY_LEAST_MEAN
        return each >= VERY_HEAVY_LEAST_MEAN and self.heavy_least >= 0.3 * self.preemptions


def shape_of(per_interval: Sequence[float]) -> Shape:
    """A burst that is over, continuous, still going on at the end, now and then, or unknown (under three intervals)."""
    if len(per_interval) < LEAST_INTERVALS:
        return "unknown"
    active = [index for index, count in enumerate(per_interval) if count > 0]
    if not active:
        return "unknown"
    over = active[-1] < len(per_interval) - 1
    together = active[-1] - active[0] + 1 == len(active)
    if len(active) >= CONTINUOUS_SHARE * len(per_interval) and not over:
        return "continuous"
    if together and over and len(active) <= (len(per_interval) + 1) // 2:
        return "burst"
    return "ongoing" if together and not over else "intermittent"


def concentration_of(window: Window) -> Concentration | None:
    """From the histogram of preemptions by request (0.30 and newer); None where it is not exported."""
    role = "request_preemptions"
    after, before = window.last.buckets.get(role), window.first.buckets.get(role, {})
    requests, preemptions = window.rise("request_preemptions_count"), window.rise("request_preemptions_sum")
    if not after or not requests or preemptions is None:
        return None
    if window.since_start:
        before = {}
    bounds = sorted(after, key=_bound)
    risen = [after[bound] - before.get(bound, 0.0) for bound in bounds]
    heavy = heavy_least = 0.0
    for index, bound in enumerate(bounds):
        inside = risen[index] - (risen[index - 1] if index else 0.0)
        below = _bound(bounds[index - 1]) if index else 0.0
        if _bound(bound) > 1 and inside > 0:
            heavy += inside
            # A bucket (below, bound] holds requests of at least the next whole number.
            heavy_least += inside * (below + 1)
    # The first bucket holds 0 and 1, so what it can carry at most is one each; the rest is the others' for sure.
    light_most = max(0.0, requests - heavy)
    return Concentration(requests, preemptions, heavy, max(heavy_least, preemptions - light_most))


def _bound(text: str) -> float:
    return float(text)
