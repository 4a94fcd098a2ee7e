"""Gates on the circumstances: an honest client, the same host state in both arms, no disturbance, memory left."""

from collections.abc import Callable
from statistics import median

from msgspec import Struct

from kvtrial.analysis.gates.context import Decision, GateContext, NoParameters, gate, some, where
from kvtrial.analysis.levels import quantile
from kvtrial.analysis.metrics import find_metric
from kvtrial.record.calibration import NOT_CALIBRATED
from kvtrial.record.record import PhaseRecord, RunRecord, Samples

_GPU_FIELDS_THAT_MUST_HOLD = (
    "name",
    "uuid",
    "driver_version",
    "memory.total",
    "clocks.max.sm",
    "persistence_mode",
    "mig.mode.current",
)


class ClientHonest(Struct, frozen=True, forbid_unknown_fields=True):
    """Most dispatch lag at the 95th percentile, in seconds."""

    lag_p95_max_seconds: float


_P95_NEEDS_REQUESTS = 20
"""Of fewer requests the 95th percentile is their latest one, weighted by how few they are."""


@gate("client_honest", ClientHonest)
def client_honest(context: GateContext, parameters: ClientHonest) -> Decision:
    """The client sent on time and within its calibration.

    The 95th percentile of the lag is within the limit, in the deciding phases also within half the margin of the TTFT.
    It is each run's own; a phase of fewer than 20 requests is taken together over its arm's runs. Where the host has a
    calibration of this client, no phase had more streams in flight or read more chunks a second than was calibrated.
    """
    primary = context.primary()
    deciding = {primary.phase, primary.against_phase} if primary else set()
    share = 0.0
    if primary and primary.effect_scale == "ratio" and find_metric(primary.metric).unit == "seconds":
        share = float(primary.margin) / 2
    problems, largest, tightest = [], 0.0, parameters.lag_p95_max_seconds
    for measured in _measured_together(context):
        (run, phase), *more = measured
        named = where(run, phase) if not more else f"{run.host} {run.arm}/{phase.name} ({len(measured)} runs)"
        limit = parameters.lag_p95_max_seconds
        if phase.name in deciding and share:
            medians = [each.ttft_median_seconds for _, each in measured]
            if None in medians:
                return None, f"{named}: no TTFT to measure the client's lag by"
            limit = min(limit, *(share * each for each in medians if each is not None))
        lag = _lag_p95_seconds([each for _, each in measured])
        if lag is None:
            return None, f"{named}: the client's dispatch lag is not recorded"
        largest, tightest = max(largest, lag), min(tightest, limit)
        if lag > limit:
            problems.append(f"{named}: dispatch lag p95 {lag * 1e3:.3f} ms, allowed are {limit * 1e3:.3f} ms")
    for run in context.runs:
        for phase in run.phases:
            problems += _beyond_calibration(run, phase)
    if problems:
        return False, some(problems)
    return True, (
        f"dispatch lag p95 at most {largest * 1e3:.3f} ms; allowed {parameters.lag_p95_max_seconds * 1e3:g} ms, in the "
        f"deciding phases half the margin of the TTFT (down to {tightest * 1e3:.3f} ms); {_calibrations(context.runs)}"
    )


def _measured_together(context: GateContext) -> list[list[tuple[RunRecord, PhaseRecord]]]:
    """The phases of all runs: each by itself, or the short ones of an arm, of one name, together."""
    alone: list[list[tuple[RunRecord, PhaseRecord]]] = []
    together: dict[tuple[str, str], list[tuple[RunRecord, PhaseRecord]]] = {}
    for run in context.runs:
        for phase in run.phases:
            if phase.sent >= _P95_NEEDS_REQUESTS or _lags_seconds(phase) is None:
                alone.append([(run, phase)])
            else:
                together.setdefault((run.arm, phase.name), []).append((run, phase))
    return alone + list(together.values())


def _lag_p95_seconds(phases: list[PhaseRecord]) -> float | None:
    if len(phases) == 1:
        return phases[0].card.dispatch_lag_p95_seconds
    lags = [lag for phase in phases for lag in _lags_seconds(phase) or ()]
    return quantile(lags, 0.95)


def _lags_seconds(phase: PhaseRecord) -> list[float] | None:
    """The lag of every request sent; None where the record does not list them."""
    lags = [fact.dispatch_lag_seconds for fact in phase.requests if fact.dispatch_lag_seconds is not None]
    return lags if lags and len(phase.requests) == phase.sent else None


def _beyond_calibration(run: RunRecord, phase: PhaseRecord) -> list[str]:
    """Where a phase asked more of the client than its calibration on this host vouches for."""
    if run.calibration is None:
        return []
    limits, name = run.calibration.limits, run.calibration.calibration_id[:12]
    card = phase.card
    problems = []
    streams = card.connections_max_open if card.streams_max is None else card.streams_max
    if streams > limits.streams_max:
        problems.append(
            f"{where(run, phase)}: {streams:,} streams in flight, the client is calibrated up to "
            f"{limits.streams_max:,} here (calibration {name})"
        )
    rate = card.chunks / card.wall_seconds if card.chunks and card.wall_seconds else 0.0
    if rate > limits.chunks_per_second_max:
        problems.append(
            f"{where(run, phase)}: the client read {rate:,.0f} chunks/s, it is calibrated up to "
            f"{limits.chunks_per_second_max:,.0f} here (calibration {name})"
        )
    return problems


def _calibrations(runs: list[RunRecord]) -> str:
    caveat = calibration_caveat(runs)
    if caveat is not None:
        return caveat
    cards = {run.calibration.calibration_id: run.calibration for run in runs if run.calibration is not None}
    errors = [level.ttft_error_p99_seconds for card in cards.values() for level in card.levels if level.held]
    worst = max(errors, default=0.0)
    named = ", ".join(sorted(name[:12] for name in cards))
    return f"within calibration {named}, whose TTFT error is at most {worst * 1e3:.3f} ms (p99)"


def calibration_caveat(runs: list[RunRecord]) -> str | None:
    """What must be said of runs whose client was not calibrated on their host; None where all were."""
    without = sorted({run.host for run in runs if run.calibration is None})
    if not without:
        return None
    return (
        f"{NOT_CALIBRATED} {', '.join(without)}, so how far its times are off there is not known "
        "(playbooks/calibrate.yml measures it)"
    )


class ConditionsEqual(Struct, frozen=True, forbid_unknown_fields=True):
    """Tolerance of the CPU clock between arms (relative), most client CPU (cores), and its most difference of arms.

    `ram_tolerance_percent`: how far the host's RAM may differ between runs, for virtual machines that are given memory
    as they use it.
    """

    cpu_mhz_tolerance_share: float
    client_cpu_share_max: float
    client_cpu_difference_max: float = 0.30
    ram_tolerance_percent: float = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError for a tolerance of RAM that nothing keeps, or all."""
        if not 0 <= self.ram_tolerance_percent <= 100:
            raise ValueError(
                f"ram_tolerance_percent={self.ram_tolerance_percent:g} is no tolerance; give 0 to 100 (size "
                f"ram_tolerance_percent)"
            )


@gate("conditions_equal", ConditionsEqual)
def conditions_equal(context: GateContext, parameters: ConditionsEqual) -> Decision:
    """Host, kernel, driver and governor are the same in all runs; clock, throttling, client CPU alike in all arms.

    A boot between pairs is allowed (a host that was cut and came back); inside a pair it drops the pair.
    """
    problems = [
        f"{what} is not the same in all runs: {some(sorted(values))}"
        for what, read in _FIXED.items()
        if len(values := {str(read(run)) for run in context.runs}) > 1
    ]
    details = []
    for text, problem in (
        _clock(context, parameters.cpu_mhz_tolerance_share),
        _gpu(context),
        _throttle(context),
        _client_cpu(context, parameters),
        _ram(context, parameters.ram_tolerance_percent),
    ):
        details += [text] if text else []
        problems += [problem] if problem else []
    if problems:
        return False, some(problems)
    boots = len({run.conditions.boot_id for run in context.runs})
    read = [what for what, value in _FIXED.items() if all(value(run) is not None for run in context.runs)]
    fixed = f"{', '.join(read)} equal in {len(context.runs)} runs ({boots} boot{'s' if boots > 1 else ''})"
    unread = [what for what in _FIXED if what not in read]
    return True, "; ".join([fixed, *([f"{', '.join(unread)} unknown"] if unread else []), *details])


_FIXED: dict[str, Callable[[RunRecord], object]] = {
    "CPU model": lambda run: run.conditions.cpu_model,
    "CPUs": lambda run: run.conditions.cpus,
    "kernel": lambda run: run.conditions.kernel,
    "governor": lambda run: run.conditions.governor,
    "transparent huge pages": lambda run: run.conditions.transparent_hugepages,
    "clock source": lambda run: run.conditions.clock_source,
    "driver": lambda run: run.conditions.driver_version,
    "GPUs": lambda run: [{name: gpu.get(name) for name in _GPU_FIELDS_THAT_MUST_HOLD} for gpu in run.conditions.gpus],
}


def _clock(context: GateContext, tolerance: float) -> tuple[str, str | None]:
    known = {
        arm: [s.cpu_mhz_median for s in _samples(context, arm) if s.cpu_mhz_median is not None]
        for arm in context.arms()
    }
    medians = {arm: median(values) for arm, values in known.items() if values}
    if not medians:
        return "CPU clock unknown", None
    shown = ", ".join(f"{arm} {medians[arm]:,.0f} MHz" if arm in medians else f"{arm} unknown" for arm in known)
    if max(medians.values()) > (1 + tolerance) * min(medians.values()):
        return "", f"CPU clock differs between arms by more than {tolerance:.0%}: {shown}"
    return f"CPU clock {shown}", None


def _gpu(context: GateContext) -> tuple[str, str | None]:
    """Clock and power of the GPUs by arm. Shown only: heavier work itself draws more and may clock lower."""
    shown = []
    for arm in context.arms():
        mhz = [s.gpu_mhz_median for s in _samples(context, arm) if s.gpu_mhz_median is not None]
        watts = [s.gpu_power_watts_median for s in _samples(context, arm) if s.gpu_power_watts_median is not None]
        if mhz and watts:
            shown.append(f"{arm} {median(mhz):,.0f} MHz at {median(watts):,.0f} W")
    return (f"GPU {', '.join(shown)}" if shown else ""), None


def _ram(context: GateContext, tolerance_percent: float) -> tuple[str, str | None]:
    sizes = [run.conditions.ram_total_bytes for run in context.runs]
    least, most = min(sizes), max(sizes)
    if least == most:
        return f"RAM {most:,} bytes in all runs", None
    shown = f"RAM is not the same in all runs: {least:,} to {most:,} bytes"
    if most - least > tolerance_percent / 100 * most:
        return "", shown
    return f"{shown} (allowed are {tolerance_percent:g} %)", None


def _throttle(context: GateContext) -> tuple[str, str | None]:
    """Throttle events by arm. An arm in which a run did not read them has no known total."""
    counts = {
        arm: [run.samples.throttle_events if run.samples else None for run in context.of_arm(arm)]
        for arm in context.arms()
    }
    known = {arm: sum(count for count in found if count is not None) for arm, found in counts.items()}
    unread = {arm: sum(count is None for count in found) for arm, found in counts.items()}
    if all(unread[arm] == len(found) for arm, found in counts.items()):
        return "throttle events unknown", None
    shown = ", ".join(
        f"{arm} {known[arm]}"
        if not unread[arm]
        else f"{arm} unknown"
        if unread[arm] == len(counts[arm])
        else f"{arm} {known[arm]} (unknown in {unread[arm]} of {len(counts[arm])} runs)"
        for arm in counts
    )
    untouched = [arm for arm in counts if not known[arm] and not unread[arm]]
    if any(known.values()) and untouched:
        return "", f"throttling in one arm only: {shown}"
    return f"throttle events {shown}", None


def _client_cpu(context: GateContext, parameters: ConditionsEqual) -> tuple[str, str | None]:
    worst = max(
        ((phase.card.client_cpu_share, run, phase) for run in context.runs for phase in run.phases),
        key=lambda item: item[0],
    )
    if worst[0] > parameters.client_cpu_share_max:
        share, run, phase = worst
        return (
            "",
            f"{where(run, phase)}: the client used {share:.2f} of a core, "
            f"allowed are {parameters.client_cpu_share_max:g}",
        )
    medians = {arm: median(_whole_run_share(run.phases) for run in context.of_arm(arm)) for arm in context.arms()}
    shown = ", ".join(f"{arm} {share:.2f}" for arm, share in medians.items())
    if max(medians.values()) - min(medians.values()) > parameters.client_cpu_difference_max:
        return "", f"client CPU differs between arms: {shown} of a core"
    return f"client CPU {shown} of a core, at most {worst[0]:.2f} in a phase", None


def _whole_run_share(phases: list[PhaseRecord]) -> float:
    wall = sum(phase.card.wall_seconds for phase in phases)
    return sum(phase.card.client_cpu_seconds for phase in phases) / wall if wall else 0.0


def _samples(context: GateContext, arm: str) -> list[Samples]:
    return [run.samples for run in context.of_arm(arm) if run.samples is not None]


class Undisturbed(Struct, frozen=True, forbid_unknown_fields=True):
    """Most CPU of foreign processes and most time stolen by a hypervisor, in shares of the machine."""

    foreign_cpu_share_max: float
    steal_share_max: float


@gate("undisturbed", Undisturbed)
def undisturbed(context: GateContext, parameters: Undisturbed) -> Decision:
    """Nobody else used the machine beyond the limits: foreign CPU, steal, a foreign process on a GPU."""
    problems, foreign, steal = [], 0.0, 0.0
    for run in context.runs:
        if run.samples is None or run.samples.count == 0:
            return None, f"{where(run)} has no samples of the machine"
        foreign, steal = max(foreign, run.samples.foreign_cpu_share), max(steal, run.samples.steal_share)
        if run.samples.foreign_cpu_share > parameters.foreign_cpu_share_max:
            problems.append(
                f"{where(run)}: foreign processes used {run.samples.foreign_cpu_share:.0%} of the CPUs, allowed are "
                f"{parameters.foreign_cpu_share_max:.0%}"
            )
        if run.samples.steal_share > parameters.steal_share_max:
            problems.append(
                f"{where(run)}: {run.samples.steal_share:.0%} of CPU time was stolen, "
                f"allowed are {parameters.steal_share_max:.0%}"
            )
        if run.samples.vram_foreign_processes:
            problems.append(f"{where(run)}: {run.samples.vram_foreign_processes} foreign processes were on the GPU")
    if problems:
        return False, some(problems)
    on_gpus = [run.samples.vram_foreign_processes for run in context.runs if run.samples and run.conditions.gpus]
    return True, (
        f"foreign CPU at most {foreign:.0%}, steal at most {steal:.0%}, in {len(context.runs)} runs"
        + ("; no foreign process on a GPU" if on_gpus and None not in on_gpus else "")
        + ("; whose the processes on the GPUs were is not known here" if None in on_gpus else "")
    )


@gate("memory_left", NoParameters)
def memory_left(context: GateContext, parameters: NoParameters) -> Decision:
    """Available RAM never fell under the declared reserve."""
    problems, least = [], float("inf")
    for run in context.runs:
        if run.samples is None or run.samples.count == 0:
            return None, f"{where(run)} has no samples of the machine"
        least = min(least, run.samples.ram_available_min_bytes)
        if run.samples.ram_available_min_bytes < run.ram_reserve_bytes:
            problems.append(
                f"{where(run)}: {run.samples.ram_available_min_bytes:,} bytes of RAM were left, the reserve is "
                f"{run.ram_reserve_bytes:,}"
            )
    if problems:
        return False, some(problems)
    return True, f"at least {least:,.0f} bytes of RAM were left, the reserve is {context.runs[0].ram_reserve_bytes:,}"
