"""From which prefix length on an arm pays: a line through each run's TTFT over its lengths, and where two lines cross.

Of a campaign that returns prefixes of several lengths in each run (protocol `offload_lengths`). The unit is the pair:
each run's medians give one line TTFT = a + b · tokens by least squares, and the pairs' lines give estimates with the
exact signed-rank interval (see effect.py). Where the arm becomes sooner is found by inverting the same test: the
interval holds every length at which the pairs' differences do not exclude zero. Lines are linear in the data, so that
is where the Walsh averages of the pairs' lines cross zero; no ratio is averaged.

A line is a model. `Line.bend_seconds` says how far the middle lengths lie from it, and the crossing is given a second
time by interpolating between neighbouring lengths, which assumes nothing about the whole and never extrapolates.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import linear_regression, median

from msgspec import Struct

from kvtrial.analysis import campaign as campaigns
from kvtrial.analysis.answer import count, seconds_text, share_text
from kvtrial.analysis.effect import Interval, critical_value, hodges_lehmann
from kvtrial.analysis.mixes import prompt_tokens
from kvtrial.record.errors import UnusableInput
from kvtrial.record.protocol import Protocol
from kvtrial.record.verdict import ComparisonResult, HostVerdict, Verdict, Word
from kvtrial.record.version import SCHEMA_VERSION

METRIC = "ttft_median_seconds"
ALPHA = 0.05
NEVER = math.inf
"""A length beyond all: the arm is not sooner from any length on."""

Values = Sequence[Sequence[float]]
"""By pair, and in it by length: seconds."""


class Line(Struct, frozen=True):
    """TTFT of one arm over the prompt's length, over the pairs.

    `misfit_seconds` is the furthest that any run's median lies from its own line. `bend_seconds`: measured minus line
    at the middle lengths, the mean over runs of the length where that is largest in size; negative where the true
    curve hangs below its line. Zero with two lengths.
    """

    arm: str
    intercept_seconds: Interval
    seconds_per_token: Interval
    misfit_seconds: float
    bend_seconds: float


class Crossing(Struct, frozen=True):
    """From how many tokens on the arm is sooner, with the exact interval. NEVER (null in JSON): from none on.

    0 by lines and 0 by interpolation mean: at every length, and at every measured length. `low` to `high` are the
    lengths at which neither is shown to be sooner.
    """

    tokens: float
    low: float
    high: float
    confidence: float


class LengthFit(Struct, frozen=True):
    """What the lengths of a campaign say on one host. `arm_seconds` and `against_seconds`: by pair, then by length."""

    schema_version: str
    campaign: str
    protocol: str
    host: str
    model: str
    verdict: Word
    arm: str
    against: str
    tokens: list[int]
    arm_seconds: list[list[float]]
    against_seconds: list[list[float]]
    lines: list[Line]
    by_lines: Crossing
    by_interpolation: Crossing


Root = Callable[[Sequence[int], Sequence[float]], float]


def root_of_line(tokens: Sequence[int], differences: Sequence[float]) -> float:
    """Where the line through the differences (arm minus other, seconds) falls below zero: tokens, 0 or more.

    NEVER where it does not fall with the length, for then there is no length from which on the arm is sooner.
    """
    slope, intercept = linear_regression(tokens, differences)
    return NEVER if slope >= 0 else max(0.0, -intercept / slope)


def root_between(tokens: Sequence[int], differences: Sequence[float]) -> float:
    """The same without a model: between the last length at which the arm is not sooner and the next, interpolated.

    0 where the arm is sooner at every measured length, NEVER where it is not at the longest.
    """
    if differences[-1] >= 0:
        return NEVER
    for index in reversed(range(len(tokens) - 1)):
        before, after = differences[index], differences[index + 1]
        if before >= 0:
            return tokens[index] + (tokens[index + 1] - tokens[index]) * before / (before - after)
    return 0.0


def crossing(tokens: Sequence[int], arm: Values, against: Values, root: Root) -> Crossing:
    """From which length on the arm is sooner, over the pairs, with the interval of the inverted signed-rank test.

    At a length n the test's interval lies below zero where at most c of the Walsh averages do not, c being the
    critical value; each average falls below zero at its own root, so the bounds are roots in order. The estimate is
    their median. Where differences fall and rise again with the length the interval is only as good as that.
    """
    differences = [
        [a - b for a, b in zip(mine, theirs, strict=True)] for mine, theirs in zip(arm, against, strict=True)
    ]
    pairs = len(differences)
    roots = sorted(
        root(tokens, [(x + y) / 2 for x, y in zip(differences[i], differences[j], strict=True)])
        for i in range(pairs)
        for j in range(i, pairs)
    )
    cut = critical_value(pairs, ALPHA) or 0
    attained = hodges_lehmann([float(number) for number in range(1, pairs + 1)], 1 - ALPHA).confidence
    return Crossing(tokens=median(roots), low=roots[cut], high=roots[-1 - cut], confidence=attained)


def line(arm: str, tokens: Sequence[int], values: Values) -> Line:
    """The line of one arm over the pairs: each run's own by least squares, then the pairs' estimate and interval."""
    own = [linear_regression(tokens, run) for run in values]
    rests = [
        [seconds - fit.intercept - fit.slope * length for length, seconds in zip(tokens, run, strict=True)]
        for fit, run in zip(own, values, strict=True)
    ]
    middle = [math.fsum(column) / len(column) for column in list(zip(*rests, strict=True))[1:-1]]
    return Line(
        arm=arm,
        intercept_seconds=hodges_lehmann([fit.intercept for fit in own]),
        seconds_per_token=hodges_lehmann([fit.slope for fit in own]),
        misfit_seconds=max(abs(rest) for run in rests for rest in run),
        bend_seconds=max(middle, key=abs, default=0.0),
    )


def fit_campaign(directory: Path) -> list[LengthFit]:
    """A fit for each host of a campaign that counts. Raises UnusableInput where there is nothing to fit."""
    decided = campaigns.read_campaign(directory)
    verdict = campaigns.analyze(directory)
    protocol = decided.plan.protocol
    lengths = _lengths(protocol)
    models = {host.host: host.model.name for host in decided.plan.hosts}
    hosts = [host for host in verdict.hosts if host.verdict != "INVALID"]
    if not hosts:
        raise UnusableInput(f"campaign {decided.campaign} is INVALID ({verdict.reason}); from it no length is drawn.")
    return [_fit_host(decided.campaign, protocol, lengths, host, models.get(host.host, "")) for host in hosts]


def fits_of(campaign: str, protocol: Protocol, verdict: Verdict, models: Mapping[str, str]) -> list[LengthFit]:
    """A fit for each host of a verdict, as far as there are lengths, pairs and values; [] where there are none."""
    fits = []
    for host in verdict.hosts:
        try:
            if host.verdict != "INVALID":
                fits.append(_fit_host(campaign, protocol, _lengths(protocol), host, models.get(host.host, "")))
        except UnusableInput:
            continue
    return fits


def _lengths(protocol: Protocol) -> dict[str, int]:
    """Phase of a return → tokens of its prompts, the shortest first. Raises UnusableInput for fewer than two."""
    returns = protocol.gates.get("prefix_evicted", {}).get("phases", [])
    sent = {phase.name: prompt_tokens(protocol, phase.name) for phase in protocol.phases if phase.name in returns}
    tokens = {name: length for name, length in sent.items() if length is not None}
    lengths = dict(sorted(tokens.items(), key=lambda item: item[1]))
    if len(set(lengths.values())) < 2 or len(set(lengths.values())) < len(lengths):
        raise UnusableInput(
            f"protocol {protocol.name} returns prefixes of {len(set(lengths.values()))} different lengths in "
            f"{count(len(lengths), 'phase')}; a line needs at least two, each in a phase of its own, as in "
            f"protocol offload_lengths."
        )
    return lengths


def _fit_host(campaign: str, protocol: Protocol, lengths: dict[str, int], host: HostVerdict, model: str) -> LengthFit:
    primary = next((found for found in host.comparisons if found.role == "primary"), None)
    compared: dict[str, ComparisonResult] = {
        found.phase: found
        for found in host.comparisons
        if primary is not None
        and (found.arm, found.against, found.against_phase) == (primary.arm, primary.against, None)
        and found.metric == METRIC
    }
    missing = [phase for phase in lengths if phase not in compared]
    if primary is None or missing:
        raise UnusableInput(
            f"protocol {protocol.name} does not compare {METRIC} of phase {missing[0] if missing else '(no primary)'}; "
            f"declare it for every length."
        )
    sides = [[getattr(compared[phase], side) or [] for phase in lengths] for side in ("arm_values", "against_values")]
    pairs = {len(values) for side in sides for values in side}
    if len(pairs) != 1 or pairs == {0}:
        raise UnusableInput(
            f"campaign {campaign}, host {host.host}: a length lacks values of a pair; there is no line."
        )
    arm, against = ([list(run) for run in zip(*side, strict=True)] for side in sides)
    tokens = list(lengths.values())
    return LengthFit(
        schema_version=SCHEMA_VERSION,
        campaign=campaign,
        protocol=protocol.name,
        host=host.host,
        model=model,
        verdict=host.verdict,
        arm=primary.arm,
        against=primary.against,
        tokens=tokens,
        arm_seconds=arm,
        against_seconds=against,
        lines=[line(primary.against, tokens, against), line(primary.arm, tokens, arm)],
        by_lines=crossing(tokens, arm, against, root_of_line),
        by_interpolation=crossing(tokens, arm, against, root_between),
    )


def describe(fit: LengthFit) -> list[str]:
    """The fit in words, a line each."""
    listed = ", ".join(f"{tokens:,}" for tokens in fit.tokens)
    said = [
        f"{fit.model} on {fit.host}: {fit.campaign}, {fit.verdict}, {count(len(fit.arm_seconds), 'pair')}, "
        f"prompts of {listed} tokens"
    ]
    for found in fit.lines:
        start, slope = found.intercept_seconds, found.seconds_per_token
        said.append(
            f"  {found.arm}: TTFT = {seconds_text(start.estimate)} ({seconds_text(start.low)} to "
            f"{seconds_text(start.high)}) + {seconds_text(1000 * slope.estimate)} "
            f"({seconds_text(1000 * slope.low)} to {seconds_text(1000 * slope.high)}) per 1,000 tokens; "
            f"furthest from it {seconds_text(found.misfit_seconds)}, bend "
            f"{seconds_text(found.bend_seconds, signed=True)}"
        )
    for name, found_at in (("by lines", fit.by_lines), ("interpolated", fit.by_interpolation)):
        said.append(
            f"  {name}: {fit.arm} is sooner {_from(found_at.tokens, fit)} ({share_text(found_at.confidence)} interval: "
            f"{_bound(found_at.low, fit)} to {_bound(found_at.high, fit)})"
        )
    return said


def _from(tokens: float, fit: LengthFit) -> str:
    if tokens == NEVER:
        return "from no length on"
    return "at every measured length" if tokens == 0 else f"from {_bound(tokens, fit)} tokens on"


def _bound(tokens: float, fit: LengthFit) -> str:
    """A length in words; what lies outside the measured lengths is said to."""
    if tokens == NEVER:
        return "none"
    if tokens == 0:
        return f"under {fit.tokens[0]:,}"
    outside = "" if fit.tokens[0] <= tokens <= fit.tokens[-1] else " (extrapolated)"
    return f"{tokens:,.0f}{outside}"
