"""One run: start the arm's engine, work through its phases, stop it, leave a record. A record is whole or absent."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path

import httpx
import msgspec
import zstandard
from msgspec import Struct

import kvtrial
from kvtrial.host.affinity import Pinning, pinned_client
from kvtrial.host.calibration import alike
from kvtrial.host.conditions import read_conditions
from kvtrial.host.engine import Engine, RunFault, refuse_port, routable
from kvtrial.host.keeper import EngineExit
from kvtrial.host.phases import Scrape, phase_record, run_phase, settled_scrapes, write_scrapes
from kvtrial.host.pressure import PressureWatch, RunLedger, all_reset, reset_caches, send_marker
from kvtrial.host.workload import phase_requests
from kvtrial.record.calibration import Calibration
from kvtrial.record.hazards import watch_log
from kvtrial.record.load import RequestResult, ResultsWriter
from kvtrial.record.plan import HostPlan, PhasePlan, RunPlan
from kvtrial.record.pressure import ResetFact
from kvtrial.record.record import (
    Evidence,
    Fault,
    FaultOrigin,
    Outcome,
    PhaseRecord,
    Resolved,
    RunRecord,
    Supervision,
    Times,
    WatchHit,
)
from kvtrial.record.store import sha256_of_file, sync_directory, write_atomically
from kvtrial.record.version import SCHEMA_VERSION

KEEPER_FILES = ("keeper.json", "keeper.log", "engine.json", "exit.json", "engine.log", "replicas.json")
GONE_WITHIN_SECONDS = 2.0
OUTCOMES: dict[FaultOrigin, Outcome] = {"engine": "engine_fault", "environment": "environment_fault"}
STOPPING_REASONS = {
    "ram_below_reserve": ("ram_below_reserve", "available RAM fell below the reserve; the engine was ended"),
    "foreign_engine": (
        "foreign_engine",
        "another engine was started on this host within the run; the run is worth nothing",
    ),
    "keeper_killed": ("keeper_killed", "the engine's keeper was killed from outside; its engine was ended"),
}


class RunContext(Struct, frozen=True):
    """What a run needs from the program: ids, deadline, and how to tell progress or learn of a stop.

    `folder` is where the plan lies, with the traces it names. `calibration` is the load client's card on this host.
    """

    campaign: str
    plan: HostPlan
    plan_sha256: str
    attempt: int
    deadline_seconds: float
    on_phase: Callable[[str], None]
    on_engine: Callable[[Engine | None], None]
    is_stopping: Callable[[], bool]
    folder: Path
    calibration: Calibration | None = None


class Interrupted(Exception):
    """The program has to end within a run (asked, or its deadline): no record is left, the run comes again."""


class _Facts:
    """What a run has gathered so far."""

    def __init__(self, calibration: Calibration | None) -> None:
        self.calibration = calibration
        self.started = time.monotonic()
        self.started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self.resolved: Resolved | None = None
        self.start_seconds: float | None = None
        self.phases: list[PhaseRecord] = []
        self.scrape_seconds = 0.0
        self.fault: Fault | None = None
        self.standin = False
        self.ledger = RunLedger()


def execute(run: RunPlan, directory: Path, context: RunContext) -> RunRecord:
    """Do one run in `directory` (made new) and write its record there. Raises Interrupted on a stop request.

    Whatever the engine does becomes part of the record; OSError (disk full) is left to the caller, who stops.
    """
    directory.mkdir(parents=True)
    facts = _Facts(context.calibration)
    conditions = read_conditions()
    engine: Engine | None = None
    exit_facts: EngineExit | None = None
    served_log = ""
    with ResultsWriter(directory / "requests.jsonl.zst") as results:
        try:
            for launch in context.plan.launches[run.arm].engines():
                refuse_port(launch.port)
            engine = Engine(directory, context.plan.launches[run.arm], context.plan, context.deadline_seconds)
            context.on_engine(engine)
            _measure(run, directory, context, engine, facts, results)
        except RunFault as error:
            facts.fault = error.fault
        finally:
            if engine is not None:
                # What an engine logs while it is being ended says nothing about the run.
                served_log = engine.log_text()
                try:
                    context.on_phase("stopping the engine")
                finally:  # whatever can't be written: the engine is ended
                    exit_facts = engine.stop()
                    context.on_engine(None)
    if context.is_stopping() or (exit_facts is not None and exit_facts.reason == "deadline"):
        raise Interrupted
    if exit_facts is not None and exit_facts.reason in STOPPING_REASONS:
        name, detail = STOPPING_REASONS[exit_facts.reason]
        facts.fault = Fault(origin="environment", fault=name, phase=_last_phase(facts), detail=detail)
    facts.fault = _with_exit(facts.fault, exit_facts)
    files = _write_files(directory)
    supervised = engine.supervision() if engine is not None else Supervision("process")
    ended = time.monotonic()
    record = RunRecord(
        schema_version=SCHEMA_VERSION,
        kvtrial_version=kvtrial.__version__,
        campaign=context.campaign,
        plan_sha256=context.plan_sha256,
        protocol=context.plan.protocol,
        host=context.plan.host,
        run=run.run,
        pair=run.pair,
        position=run.position,
        arm=run.arm,
        spare=run.spare,
        attempt=context.attempt,
        evidence=_evidence(context.plan, facts),
        outcome="completed" if facts.fault is None else OUTCOMES[facts.fault.origin],
        fault=facts.fault,
        launch=context.plan.launches[run.arm],
        model=context.plan.model_of(run.arm),
        vllm_version_pinned=context.plan.vllm_version,
        capacity=context.plan.capacity,
        ram_reserve_bytes=context.plan.limits.ram_reserve_bytes,
        resolved=facts.resolved,
        conditions=conditions,
        times=_times(facts, exit_facts, ended),
        samples=exit_facts.samples if exit_facts else None,
        phases=facts.ledger.attached(facts.phases),
        watch_hits=[
            WatchHit(hazard=hit.hazard, evidence=hit.line)
            for hit in watch_log(served_log.splitlines(), context.plan.vllm_version)
        ],
        files=files,
        calibration=facts.calibration,
        supervision=supervised,
        left_behind=exit_facts.left_behind if exit_facts else "",
    )
    content = msgspec.json.format(msgspec.json.encode(record), indent=1)
    digest = write_atomically(directory / "record.json", content)
    write_atomically(directory / "record.sha256", f"{digest}  record.json\n".encode())
    return record


def _measure(
    run: RunPlan, directory: Path, context: RunContext, engine: Engine, facts: _Facts, results: ResultsWriter
) -> None:
    """Wait for the engine, learn what it is, run the phases. Raises RunFault."""

    def waiting(seconds: float) -> None:
        context.on_phase(f"engine starting ({seconds:.0f} s)")

    facts.start_seconds = engine.wait_healthy(waiting, context.is_stopping)
    facts.standin = engine.is_standin()
    asked = engine.ask_config()
    resolved = facts.resolved = engine.resolve()
    if exposed := routable(facts.resolved):
        detail = f"the engine listens on {', '.join(exposed)}, not on loopback alone; it was stopped at once"
        raise RunFault(engine.fault("routable_bind", None, detail))
    boundary: Scrape | None = None
    with pinned_client(context.plan.client_cpus, engine.pids()) as pinning:
        facts.calibration = alike(context.calibration, pinning)
        for number, phase in enumerate(run.phases):
            context.on_phase(phase.name)
            boundary = _one_phase(phase, directory, context, engine, facts, results, pinning, boundary)
            if number == 0:
                facts.resolved = msgspec.structs.replace(resolved, config=engine.config_of(asked))


def _one_phase(
    phase: PhasePlan,
    directory: Path,
    context: RunContext,
    engine: Engine,
    facts: _Facts,
    results: ResultsWriter,
    pinning: Pinning,
    boundary: Scrape | None,
) -> Scrape:
    """One phase; its closing scrape is returned, to open the next. Raises RunFault when the engine failed in it."""
    plan, urls = context.plan, engine.base_urls
    try:
        reset = None
        if phase.reset:
            reset, boundary = _emptied(phase, context, engine, boundary)
        before = boundary or settled_scrapes(urls, plan.vllm_version, plan.model.name)
        if phase.stall_multiple:
            facts.ledger.begin(phase.name, phase.stall_multiple)

        def take(result: RequestResult) -> None:
            results.write(phase.name, result)
            facts.ledger.take(phase.name, result)

        watch = PressureWatch(urls, plan.vllm_version, phase.watch_seconds) if phase.watch_seconds else None
        with watch or nullcontext():
            outcome, found = run_phase(
                phase,
                engine.launch,
                plan.limits,
                context.folder,
                take,
                calibration_id=facts.calibration.calibration_id if facts.calibration else None,
                pinning=pinning,
                spool_directory=directory,
            )
        after = settled_scrapes(urls, plan.vllm_version, plan.model.name)
    except httpx.HTTPError as error:
        raise RunFault(_why_failed(engine, phase.name, f"the engine does not answer: {error!r}", context)) from error
    facts.scrape_seconds += after.seconds + (0.0 if boundary and not reset else before.seconds)
    record = phase_record(phase, before, after, outcome, found)
    if watch or reset:
        points = watch.points(outcome.started_monotonic_ns, before.values.get("preemptions")) if watch else []
        record = msgspec.structs.replace(record, reset=reset, pressure=points)
    facts.phases.append(record)
    write_scrapes(directory / "metrics", phase.name, before, after)
    if record.failed:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(record.errors.items()))
        detail = f"{record.failed} of {record.sent} requests failed ({counts}); the first: {found.first_error}"
        deadlocked = "deadlock" in record.errors
        raise RunFault(_why_failed(engine, phase.name, detail, context, after, deadlocked=deadlocked))
    return after


def _emptied(
    phase: PhasePlan, context: RunContext, engine: Engine, boundary: Scrape | None
) -> tuple[ResetFact, Scrape]:
    """Empty the caches, with the phase's first prompt in them that would be found otherwise; the scrape before."""
    plan = context.plan
    without = boundary or settled_scrapes(engine.base_urls, plan.vllm_version, plan.model.name)
    first = next(phase_requests(phase, context.folder))
    for url in engine.base_urls:
        send_marker(url, plan.model.name, first, plan.limits.request_timeout_seconds)
    held = settled_scrapes(engine.base_urls, plan.vllm_version, plan.model.name)
    reset = all_reset([reset_caches(url, plan.vllm_version, engine.launch.connector) for url in engine.base_urls])
    hits = [scrape.values.get("prefix_cache_hits_tokens") for scrape in (without, held)]
    found = None if hits[0] is None or hits[1] is None else hits[1] - hits[0]
    return msgspec.structs.replace(reset, marker_hit_tokens=found), held


def _why_failed(
    engine: Engine,
    phase: str,
    detail: str,
    context: RunContext,
    after: Scrape | None = None,
    *,
    deadlocked: bool = False,
) -> Fault:
    """Name the engine's failure: died, dead (health 503), deadlock (health 200, nothing runs), or failed requests.

    `deadlocked`: the client's watchdog saw it while the requests were in flight.
    """
    status = engine.health_status()
    # A process that is being killed answers nothing for a moment before it is gone.
    give_up = time.monotonic() + GONE_WITHIN_SECONDS
    while status is None and engine.is_up() and time.monotonic() < give_up:
        time.sleep(0.05)
    if not engine.is_up():
        return engine.fault("engine_died", phase, f"the engine ended in phase {phase}; {detail}")
    if status != 200:
        return engine.fault("engine_dead", phase, f"/health answers {status} in phase {phase}; {detail}")
    if deadlocked:
        return engine.fault("deadlock", phase, detail)
    if after is not None:
        waiting, running = after.values.get("requests_waiting"), after.values.get("requests_running")
        if waiting and running == 0:
            stuck = f"/health answers 200, yet 0 requests run and {waiting:.0f} wait in phase {phase}; {detail}"
            return engine.fault("deadlock", phase, stuck)
    return engine.fault("requests_failed", phase, detail)


def _with_exit(fault: Fault | None, exit_facts: EngineExit | None) -> Fault | None:
    """The fault, with the engine's exit status where the engine ended by itself."""
    if fault is None or exit_facts is None or exit_facts.reason != "exited" or exit_facts.returncode is None:
        return fault
    code = exit_facts.returncode
    ended = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
    return msgspec.structs.replace(fault, detail=f"{fault.detail} (the engine's own process: {ended})")


def _evidence(plan: HostPlan, facts: _Facts) -> Evidence:
    if facts.standin:
        return "standin"
    return "gpu" if plan.backend == "cuda" else "cpu"


def _last_phase(facts: _Facts) -> str | None:
    return facts.phases[-1].name if facts.phases else None


def _times(facts: _Facts, exit_facts: EngineExit | None, ended: float) -> Times:
    phases = sum(phase.seconds for phase in facts.phases)
    start = facts.start_seconds or 0.0
    stop = exit_facts.stop_seconds if exit_facts else 0.0
    return Times(
        started_monotonic_seconds=facts.started,
        ended_monotonic_seconds=ended,
        started_at_utc=facts.started_at,
        start_seconds=facts.start_seconds,
        phases_seconds=phases,
        scrape_seconds=facts.scrape_seconds,
        stop_seconds=exit_facts.stop_seconds if exit_facts else None,
        other_seconds=ended - facts.started - phases - start - stop,
    )


def _write_files(directory: Path) -> dict[str, str]:
    """Write the log compressed, drop the keeper's own files; return the sha256 of every file left."""
    log = directory / "engine.log"
    content = log.read_bytes() if log.exists() else b""
    write_atomically(directory / "engine.log.zst", zstandard.compress(content, 3))
    for name in KEEPER_FILES:
        (directory / name).unlink(missing_ok=True)
    return {str(p.relative_to(directory)): sha256_of_file(p) for p in sorted(directory.rglob("*")) if p.is_file()}


def publish(partial: Path, final: Path) -> None:
    """Give a whole run its place: rename, then fsync the folder."""
    partial.rename(final)
    sync_directory(final.parent)
