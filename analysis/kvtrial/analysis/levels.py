"""A run's levels: values of one phase, or of several levels of a ladder together, from its record alone. Pure."""

from collections.abc import Callable, Sequence

from kvtrial.analysis.laddering import ALL_LEVELS, GROUPS
from kvtrial.record.launch import engine_gpus, parse_vllm_args
from kvtrial.record.pressure import PhaseLedger, Stall, went_on
from kvtrial.record.record import PhaseRecord, RequestFact, RunRecord

Value = Callable[[RequestFact], float | None]


def phases_of(record: RunRecord, name: str) -> list[PhaseRecord]:
    """The phases that a comparison's phase stands for: one, or several levels of a ladder."""
    if name not in GROUPS:
        return [phase for phase in record.phases if phase.name == name]
    wanted = GROUPS if name == ALL_LEVELS else (name,)
    return [phase for phase in record.phases if phase.block in wanted and phase.reset is not None]


def level_of(phase: PhaseRecord) -> int:
    """Requests in flight at a level."""
    return phase.concurrency or 0


def risen(phases: Sequence[PhaseRecord], role: str) -> float | None:
    """The rise of a counter over phases, added up; None where one of them lacks it."""
    total = 0.0
    for phase in phases:
        before, after = phase.before.get(role), phase.after.get(role)
        if before is None or after is None:
            return None
        total += after - before
    return total if phases else None


def per_request(phases: Sequence[PhaseRecord], total: float | None, scale: float = 1.0) -> float | None:
    """A total over the finished requests of the phases."""
    finished = sum(phase.finished for phase in phases)
    return None if total is None or not finished else scale * total / finished


def pooled(phases: Sequence[PhaseRecord], value: Value) -> list[float]:
    """A value of every listed finished request of the phases."""
    return [
        found
        for phase in phases
        for request in phase.requests
        if request.error_class is None and (found := value(request)) is not None
    ]


def quantile(values: Sequence[float], share: float) -> float | None:
    """The `share` quantile with linear interpolation (Hyndman-Fan type 7), None for no values."""
    if not values:
        return None
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def pooled_quantile(value: Value, share: float) -> Callable[[RunRecord, str], float | None]:
    """How a comparison's metric is read: a quantile over the requests of a phase or group of levels."""
    return lambda record, phase: quantile(pooled(phases_of(record, phase), value), share)


def preemptions_per_1000_requests(record: RunRecord, phase: str) -> float | None:
    """Preemptions by the engine's counter for 1,000 finished requests."""
    phases = phases_of(record, phase)
    return per_request(phases, risen(phases, "preemptions"), 1000)


def queue_seconds_per_request(record: RunRecord, phase: str) -> float | None:
    """Mean wait before the first scheduling, by the engine; waits after a preemption are not in it."""
    phases = phases_of(record, phase)
    total, count = risen(phases, "queue_seconds_sum"), risen(phases, "queue_seconds_count")
    return None if total is None or not count else total / count


def first_token_wait_seconds_per_request(record: RunRecord, phase: str) -> float | None:
    """Mean time from a send to the first token by the client, beyond what the same run's requests take alone.

    Whatever the engine books it as: queue, prefill or neither. None without a level with one in flight.
    """
    loaded = _first_token_seconds(phases_of(record, phase))
    alone = _first_token_seconds([each for each in phases_of(record, ALL_LEVELS) if level_of(each) == 1])
    return None if loaded is None or alone is None else loaded - alone


def _first_token_seconds(phases: Sequence[PhaseRecord]) -> float | None:
    ledgers = [phase.ledger for phase in phases]
    counted = sum(ledger.counted for ledger in ledgers if ledger is not None)
    if None in ledgers or not counted:
        return None
    return sum(ledger.first_token_ns for ledger in ledgers if ledger is not None) / counted / 1e9


def stall_seconds_per_request(record: RunRecord, phase: str) -> float | None:
    """Mean time of a request in gaps between tokens that are stalls, by the client."""
    ledgers = [phase.ledger for phase in phases_of(record, phase)]
    counted = sum(ledger.counted for ledger in ledgers if ledger is not None)
    if None in ledgers or not counted:
        return None
    return sum(ledger.stall_gaps_ns for ledger in ledgers if ledger is not None) / counted / 1e9


def engines_of(record: RunRecord) -> int:
    """Engines that share the requests: replicas, each with its ranks of data parallelism."""
    return len(record.launch.engines()) * (parse_vllm_args(record.launch.argv).size("data-parallel-size") or 1)


def waited_alone(stall: Stall, ledger: PhaseLedger) -> bool:
    """Whether others went on while a request stalled."""
    return went_on(stall.others_amid, stall.to_ns - stall.from_ns, ledger.run_median_gap_ns)


def gpus_of(record: RunRecord) -> int:
    """GPUs that a run's engines take by their launch; 0 on a host without any."""
    return sum(engine_gpus(engine.argv) for engine in record.launch.engines()) if record.conditions.gpus else 0


def gpu_seconds_per_request(record: RunRecord, phase: str) -> float | None:
    """GPUs of the arm × the phases' seconds, for a finished request: what it costs while nothing else is served."""
    phases = phases_of(record, phase)
    gpus = gpus_of(record)
    return per_request(phases, gpus * sum(each.seconds for each in phases)) if gpus and phases else None


def throughput(record: RunRecord, phase: str) -> float | None:
    """Output tokens a second over the phases' own seconds."""
    phases = phases_of(record, phase)
    seconds = sum(phase.seconds for phase in phases)
    return sum(phase.output_tokens for phase in phases) / seconds if seconds else None
