"""One effect from several hosts: each host is one draw of a random effect, and a host that does not fit is named.

Combination: Paule and Mandel's between-host variance (J. Res. NBS 87, 1982, 377) with Hartung and Knapp's variance of
the mean and t quantiles of k − 1 degrees of freedom (Stat. Med. 20, 2001, 3875). A host's own error comes from the pair
variance pooled over the hosts of its class (same CPU and GPU): SE² = s² / n · π/3 for the Hodges-Lehmann estimate of
normal pairs. Hosts of a class with equally many pairs then weigh the same, and the interval is the t interval of the
hosts' effects: it covers what it says for normal host effects, whatever their spread and however few they are.
Where hosts are of unlike precision (variances more than a factor of UNLIKE apart) few of them can't tell how much more
the precise ones should weigh, and weighted intervals cover too seldom, also with their factor kept above 1 (Röver,
Knapp, Friede, BMC Med. Res. Methodol. 15:99, 2015). There all hosts weigh the same: the t interval of normal values of
unlike variance covers at least as often as it says, whatever the variances (Bakirov, Székely, J. Math. Sci. 139, 2006,
6497; Ibragimov, Müller, J. Bus. Econ. Stat. 28, 2010, 453). `make bench-fleet-statistics` measures all of them.

The functions on arrays take any shape whose last axis is the hosts; an infinite variance stands for an absent host.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
from msgspec import Struct
from numpy.typing import NDArray
from scipy import special

from kvtrial.analysis.effect import Interval

LEAST_HOSTS = 3
FALSE_DISCOVERY_RATE = 0.05
HODGES_LEHMANN_VARIANCE = math.pi / 3
"""Asymptotic variance of the Hodges-Lehmann estimate of normal values, over that of their mean."""
UNLIKE = 2.0
"""Largest variance of a host over the least, from which on hosts weigh the same."""
LEAST_SHARE_OF_NOISE = 0.1
"""Of the mean's standard error by noise and spread alone. Hosts that agree better than that agree by chance."""
_SMALLEST_VARIANCE = 1e-18
_HALVINGS = 80
_SAME_VARIANCE = 1e-12

Floats = NDArray[numpy.float64]


class Combined(Struct, frozen=True):
    """The hosts' mean effect on the inner scale. `tau2`: variance between hosts, `i2`: its share of the total (0..1).

    `detectable`: the least mean shift found with 80 % power at this spread of hosts. `q` is Cochran's, `q_p_value` that
    of no difference between hosts.
    """

    interval: Interval
    detectable: float
    tau2: float
    i2: float
    q: float
    q_p_value: float


class OddHost(Struct, frozen=True):
    """A host whose effect departs from the others' by `deviation` standard errors; `p_value` two-sided, unadjusted."""

    host: str
    deviation: float
    p_value: float


class Pooled(Struct, frozen=True):
    """Mean over hosts, its standard error and degrees of freedom, and the variance between hosts; arrays."""

    mean: Floats
    error: Floats
    freedom: Floats
    tau2: Floats


def combine(hosts: Sequence[Interval], classes: Sequence[str] | None = None, confidence: float = 0.95) -> Combined:
    """Random-effects mean of at least three hosts; `classes`: the class of each, None: they are of one.

    Raises ValueError for fewer hosts, or one with under two pairs.
    """
    if len(hosts) < LEAST_HOSTS:
        raise ValueError(f"at least {LEAST_HOSTS} hosts")
    if any(host.sd is None for host in hosts):
        raise ValueError("a host with one pair has no variance")
    effects = numpy.array([host.estimate for host in hosts])
    variances = pooled_variances(hosts, classes or [""] * len(hosts))
    pooled = pool(effects, variances)
    mean, error, freedom, tau2 = (float(value) for value in (pooled.mean, pooled.error, pooled.freedom, pooled.tau2))
    error = max(error, math.sqrt(_SMALLEST_VARIANCE))
    reach = float(special.stdtrit(freedom, (1 + confidence) / 2)) * error
    q = float(_q(effects, 1 / variances)[0])
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
    i2 = max(0.0, 1 - freedom / q) if q > 0 else 0.0
    return Combined(interval, detectable, tau2, i2, q, float(special.chdtrc(freedom, q)))


def pool(effects: Floats, variances: Floats) -> Pooled:
    """Mean over hosts: Hartung and Knapp's, or of hosts of unlike precision the plain one with its own standard error.

    τ² is Paule and Mandel's in both.
    """
    weighted = hartung_knapp(effects, variances)
    present = numpy.isfinite(variances)
    q, mean = _q(effects, present * 1.0)
    unlike = _unlike(variances, present)
    error = numpy.where(unlike, numpy.sqrt(q / weighted.freedom / present.sum(axis=-1)), weighted.error)
    by_noise = 1 / numpy.sqrt((1 / (variances + weighted.tau2[..., None])).sum(axis=-1))
    error = numpy.maximum(error, LEAST_SHARE_OF_NOISE * by_noise)
    return Pooled(numpy.where(unlike, mean, weighted.mean), error, weighted.freedom, weighted.tau2)


def hartung_knapp(effects: Floats, variances: Floats) -> Pooled:
    """Paule and Mandel's τ², the mean weighted by 1 / (variance + τ²), and Hartung and Knapp's standard error of it."""
    tau2 = paule_mandel(effects, variances)
    weights = 1 / (variances + tau2[..., None])
    freedom = numpy.isfinite(variances).sum(axis=-1) - 1.0
    q, mean = _q(effects, weights)
    return Pooled(mean, numpy.sqrt(q / freedom / weights.sum(axis=-1)), freedom, tau2)


def _unlike(variances: Floats, present: NDArray[numpy.bool_]) -> NDArray[numpy.bool_]:
    """Whether the hosts are of unlike precision."""
    smallest = numpy.where(present, variances, math.inf).min(axis=-1)
    largest = numpy.where(present, variances, -math.inf).max(axis=-1)
    return numpy.asarray(largest > UNLIKE * smallest)


def paule_mandel(effects: Any, variances: Any) -> Floats:
    """Between-host variance τ² at which the weighted sum of squares equals k − 1; 0 where it is below that already.

    With one variance for all hosts that is the hosts' sample variance less that one; else it is found by halving.
    """
    effects, variances = numpy.asarray(effects, float), numpy.asarray(variances, float)
    present = numpy.isfinite(variances)
    freedom = present.sum(axis=-1) - 1.0
    smallest = numpy.where(present, variances, math.inf).min(axis=-1)
    largest = numpy.where(present, variances, -math.inf).max(axis=-1)
    mean = numpy.where(present, effects, 0).sum(axis=-1) / present.sum(axis=-1)
    squares = numpy.where(present, (effects - mean[..., None]) ** 2, 0).sum(axis=-1)
    if bool(numpy.all(largest - smallest <= _SAME_VARIANCE * largest)):
        return numpy.asarray(numpy.maximum(0.0, squares / freedom - smallest), float)
    # At this τ² every weight is below 1 / τ², so the weighted sum is below k − 1.
    low, high = numpy.zeros_like(squares), squares / freedom
    settled = _q(effects, 1 / variances)[0] <= freedom
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        above = _q(effects, 1 / (variances + middle[..., None]))[0] > freedom
        low, high = numpy.where(above, middle, low), numpy.where(above, high, middle)
    return numpy.asarray(numpy.where(settled, 0.0, high), float)


def _q(effects: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """The weighted sum of squares about the weighted mean, and that mean."""
    total = weights.sum(axis=-1)
    mean = (weights * effects).sum(axis=-1) / total
    return (weights * (effects - mean[..., None]) ** 2).sum(axis=-1), mean


def pooled_variances(hosts: Sequence[Interval], classes: Sequence[str]) -> Floats:
    """Each host's variance of its estimate, from the pair variance of its class."""
    freedom: dict[str, int] = {}
    squares: dict[str, float] = {}
    for host, name in zip(hosts, classes, strict=True):
        freedom[name] = freedom.get(name, 0) + host.pairs - 1
        squares[name] = squares.get(name, 0.0) + (host.pairs - 1) * (host.sd or 0.0) ** 2
    variances = [
        max(squares[name] / freedom[name] * HODGES_LEHMANN_VARIANCE / host.pairs, _SMALLEST_VARIANCE)
        for host, name in zip(hosts, classes, strict=True)
    ]
    return numpy.array(variances)


# -------------------------------------------------------------------------------------------------- the odd host


def odd_hosts(hosts: Mapping[str, Interval], classes: Mapping[str, str]) -> list[OddHost]:
    """Hosts whose effect departs from the others', at a false discovery rate of 5 % (Benjamini-Hochberg over hosts).

    See `deviations`. The hosts of a class have the same CPU and GPU.
    """
    usable = {name: host for name, host in hosts.items() if host.sd is not None}
    if len(usable) < LEAST_HOSTS:
        return []
    listed = list(usable.values())
    variances = pooled_variances(listed, [classes.get(name, "") for name in usable])
    unpooled = numpy.array([(host.sd or 0.0) ** 2 * HODGES_LEHMANN_VARIANCE / host.pairs for host in listed])
    deviation, p_values = deviations(numpy.array([host.estimate for host in listed]), variances, unpooled)
    named = discoveries(p_values)
    found = [
        OddHost(name, float(deviation[index]), float(p_values[index]))
        for index, name in enumerate(usable)
        if named[index]
    ]
    return sorted(found, key=lambda odd: odd.p_value)


def deviations(effects: Floats, variances: Floats, unpooled: Floats) -> tuple[Floats, Floats]:
    """Studentised deleted residual of each host and its two-sided p (Viechtbauer, Cheung, Res. Synth. Methods 1, 2010).

    `variances` of the estimates are pooled by class, `unpooled` are from each host's own pairs. A host is judged by the
    larger of its two: one that was quiet by chance is not called odd for it, and one whose pairs are noisier than its
    class's is no surer than they are.

    (effect − the others' mean) / √(own variance + the others' τ² + variance of their mean), against t: a host is held
    against how far the others lie apart, never closer than measurement noise lets them. How far they lie apart is known
    from k − 1 of them alone, so t has k − 2 degrees of freedom; of hosts of unlike precision the precise ones tell it,
    and it has (Σw)² / Σw² − 1 of the others' weights, which is k − 2 where they weigh the same. Exact for normal host
    effects of one precision; below it where the hosts do not differ. Three hosts leave one degree of freedom: there a
    host is hardly ever odd.
    """
    if effects.ndim == 1:
        found = deviations(effects[None], variances[None], unpooled[None])
        return found[0][0], found[1][0]
    present = numpy.isfinite(variances)
    result = numpy.zeros_like(effects)
    p_values = numpy.ones_like(effects)
    for index in range(effects.shape[-1]):
        others = variances.copy()
        others[..., index] = math.inf
        tau2 = paule_mandel(effects, others)
        weights = 1 / (others + tau2[..., None])
        total = weights.sum(axis=-1)
        mean = (weights * effects).sum(axis=-1) / total
        own = numpy.where(present[..., index], numpy.maximum(variances, unpooled)[..., index], 1.0)
        spread = own + tau2 + 1 / total
        degrees = numpy.maximum(total**2 / (weights**2).sum(axis=-1) - 1, 1.0)
        there = present[..., index]
        result[..., index] = numpy.where(there, (effects[..., index] - mean) / numpy.sqrt(spread), 0.0)
        p_values[..., index] = numpy.where(there, 2 * special.stdtr(degrees, -numpy.abs(result[..., index])), 1.0)
    return result, p_values


def discoveries(p_values: Floats, rate: float = FALSE_DISCOVERY_RATE) -> NDArray[numpy.bool_]:
    """Benjamini and Hochberg's step-up procedure over the last axis; which hypotheses are rejected."""
    count = p_values.shape[-1]
    if not count:
        return numpy.zeros_like(p_values, dtype=bool)
    ordered = numpy.sort(p_values, axis=-1)
    kept = ordered <= rate * numpy.arange(1, count + 1) / count
    limit = numpy.where(kept, ordered, -1.0).max(axis=-1)
    return numpy.asarray(p_values <= limit[..., None])


def odd_host_power(shift: float, pair_sd: float, pairs: int, hosts: int, tau2: float = 0.0) -> float:
    """Chance that one host off by `shift` (inner scale) among `hosts` is named, at the least level that the false
    discovery rate leaves to a single one, 5 % / hosts. Pair noise `pair_sd` pooled over the hosts, spread `tau2`.
    """
    own = pair_sd**2 * HODGES_LEHMANN_VARIANCE / pairs
    spread = (own + tau2) * (1 + 1 / (hosts - 1))
    freedom = hosts - 2
    if spread <= 0:
        return 1.0
    limit = -float(special.stdtrit(freedom, FALSE_DISCOVERY_RATE / hosts / 2))
    distance = shift / math.sqrt(spread)
    return float(special.nctdtr(freedom, -distance, -limit) + special.nctdtr(freedom, distance, -limit))
