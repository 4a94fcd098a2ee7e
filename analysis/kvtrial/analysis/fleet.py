"""One effect from several hosts: each host is one draw of a random effect, and a host that does not fit is named.

Combination: Paule and Mandel's between-host variance (J. Res. NBS 87, 1982, 377) with Hartung and Knapp's variance of
the mean and t quantiles of k − 1 degrees of freedom (Stat. Med. 20, 2001, 3875), whose factor is not let fall below 1
(Röver, Knapp, Friede, BMC Med. Res. Methodol. 15:99, 2015), so that agreeing hosts don't give a falsely short interval.
A host's own error comes from its pair variance: SE² = s² / n · π/3 for the Hodges-Lehmann estimate of normal pairs.
"""

import math
from collections.abc import Mapping, Sequence

from msgspec import Struct
from scipy import special

from kvtrial.analysis.effect import Interval

LEAST_HOSTS = 3
FALSE_DISCOVERY_RATE = 0.05
_HODGES_LEHMANN_VARIANCE = math.pi / 3
_SMALLEST_VARIANCE = 1e-18


class Combined(Struct, frozen=True):
    """The hosts' mean effect on the inner scale. `tau2`: variance between hosts, `i2`: its share of the total (0..1).

    `detectable`: the least mean shift found with 80 % power at this spread of hosts.
    """

    interval: Interval
    detectable: float
    tau2: float
    i2: float
    q: float


class OddHost(Struct, frozen=True):
    """A host whose effect departs from the others' by `deviation` standard errors; `p_value` two-sided, unadjusted."""

    host: str
    deviation: float
    p_value: float


def combine(hosts: Sequence[Interval], confidence: float = 0.95) -> Combined:
    """Random-effects mean of at least three hosts. Raises ValueError for fewer, or a host with under two pairs."""
    if len(hosts) < LEAST_HOSTS:
        raise ValueError(f"at least {LEAST_HOSTS} hosts")
    effects = [host.estimate for host in hosts]
    variances = [max(_variance(host), _SMALLEST_VARIANCE) for host in hosts]
    tau2 = paule_mandel(effects, variances)
    weights = [1 / (variance + tau2) for variance in variances]
    mean = _mean(effects, weights)
    freedom = len(hosts) - 1
    factor = max(1.0, _q(effects, weights, mean) / freedom)
    error = math.sqrt(factor / math.fsum(weights))
    reach = float(special.stdtrit(freedom, (1 + confidence) / 2)) * error
    fixed = [1 / variance for variance in variances]
    q = _q(effects, fixed, _mean(effects, fixed))
    interval = Interval(
        estimate=mean,
        low=mean - reach,
        high=mean + reach,
        confidence=confidence,
        p_value=float(2 * special.stdtr(freedom, -abs(mean) / error)),
        pairs=sum(host.pairs for host in hosts),
        sd=error * math.sqrt(len(hosts)),
    )
    detectable = error * float(special.stdtrit(freedom, (1 + confidence) / 2) + special.stdtrit(freedom, 0.8))
    return Combined(interval, detectable, tau2, max(0.0, 1 - freedom / q) if q > 0 else 0.0, q)


def paule_mandel(effects: Sequence[float], variances: Sequence[float]) -> float:
    """Between-host variance τ² at which the weighted sum of squares equals k − 1; 0 where it is below that already."""

    def excess(tau2: float) -> float:
        weights = [1 / (variance + tau2) for variance in variances]
        return _q(effects, weights, _mean(effects, weights)) - (len(effects) - 1)

    if excess(0.0) <= 0:
        return 0.0
    low, high = 0.0, (max(effects) - min(effects)) ** 2
    while excess(high) > 0:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high


def odd_hosts(hosts: Mapping[str, Interval], classes: Mapping[str, str]) -> list[OddHost]:
    """Hosts whose effect departs from the others', at a false discovery rate of 5 % (Benjamini-Hochberg over hosts).

    The pair variance is pooled over the hosts of a class (same CPU and GPU), so that a quiet host by chance is not
    called odd; the deviation is from the mean of the other hosts, tested by t with the pooled degrees of freedom.
    """
    usable = {name: host for name, host in hosts.items() if host.sd is not None}
    if len(usable) < LEAST_HOSTS:
        return []
    variance, freedom = {}, {}
    for name in usable:
        peers = [host for other, host in usable.items() if classes.get(other) == classes.get(name)]
        freedom[name] = sum(peer.pairs - 1 for peer in peers)
        pooled = math.fsum((peer.pairs - 1) * (peer.sd or 0.0) ** 2 for peer in peers) / freedom[name]
        variance[name] = max(pooled * _HODGES_LEHMANN_VARIANCE / usable[name].pairs, _SMALLEST_VARIANCE)
    found = []
    for name, host in usable.items():
        others = [other for other in usable if other != name]
        weights = [1 / variance[other] for other in others]
        mean = _mean([usable[other].estimate for other in others], weights)
        deviation = (host.estimate - mean) / math.sqrt(variance[name] + 1 / math.fsum(weights))
        found.append(OddHost(name, deviation, float(2 * special.stdtr(freedom[name], -abs(deviation)))))
    found.sort(key=lambda odd: odd.p_value)
    kept = [rank for rank, odd in enumerate(found, start=1) if odd.p_value <= FALSE_DISCOVERY_RATE * rank / len(found)]
    return found[: max(kept, default=0)]


def _variance(host: Interval) -> float:
    if host.sd is None:
        raise ValueError("a host with one pair has no variance")
    return host.sd**2 / host.pairs * _HODGES_LEHMANN_VARIANCE


def _mean(effects: Sequence[float], weights: Sequence[float]) -> float:
    return math.fsum(w * e for w, e in zip(weights, effects, strict=True)) / math.fsum(weights)


def _q(effects: Sequence[float], weights: Sequence[float], mean: float) -> float:
    return math.fsum(w * (e - mean) ** 2 for w, e in zip(weights, effects, strict=True))
