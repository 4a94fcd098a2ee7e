"""Calibrate the load client on this host: against a server of known timing, in two processes, without an engine.

The client is pinned as in an experiment, and the server has the CPUs that an engine would have.

STATE_DIR/calibration.json     the card of the last calibration, whole or absent
"""

import hashlib
import importlib.metadata
import os
import platform
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec import Struct

import kvtrial
from kvtrial.host.affinity import Pinning, pinned_client
from kvtrial.host.conditions import read_conditions
from kvtrial.host.engine import RunFault, engine_cpus
from kvtrial.host.load.client import run_load_blocking
from kvtrial.host.load.honesty import cpu_ticks, quantile, steal_share
from kvtrial.host.loopback import loopback_client
from kvtrial.host.processes import foreign_engines
from kvtrial.host.stamped_server import MODEL, Schedule, ServedRequest, Stamps, running_server
from kvtrial.record.calibration import (
    CALIBRATION_SCHEMA,
    CalibratedFor,
    Calibration,
    CalibrationLevel,
    CalibrationLimits,
    with_id,
)
from kvtrial.record.cpulist import as_list
from kvtrial.record.errors import UnusableInput
from kvtrial.record.load import LoadOutcome, LoadSpec, RequestResult, RequestSpec
from kvtrial.record.store import write_atomically

CARD = "calibration.json"
HELD_P99_SECONDS = 0.005
"""With a larger TTFT error than this (p99), a number of streams is beyond what the client can be trusted with."""

_LIBRARIES = ("httptools", "msgspec", "uvloop", "zstandard")
_TIMEOUT_SECONDS = 30.0
_SOURCES = ("host/load/*.py", "record/load.py")


class _Step(Struct, frozen=True):
    """How one number of streams is tried. Times a request: about half the stagger, and tokens / rate."""

    streams: int
    requests: int
    tokens: int
    schedule: Schedule


def _step(streams: int) -> _Step:
    if streams == 1:
        return _Step(1, 60, 2, Schedule(tokens_per_second=50, first_seconds=0.01, stagger_seconds=0.02))
    schedule = Schedule(tokens_per_second=50, first_seconds=0.05, stagger_seconds=0.5)
    return _Step(streams, 2 * streams, 90, schedule) if streams > 128 else _Step(streams, 4 * streams, 40, schedule)


LEVELS = (1, 64, 256, 512)


def calibrate(state_dir: Path, levels: tuple[int, ...] = LEVELS, client_cpus: str = "auto") -> Calibration:
    """Calibrate and store the card; about 20 s. `client_cpus`: as of an experiment (`kvtrial_client_cpus`).

    Raises UnusableInput where even one stream can't be measured, or the CPUs leave none to client or engine. OSError is
    left to the caller (disk full).
    """
    try:
        servers = engine_cpus(client_cpus)
    except RunFault as fault:
        raise UnusableInput(f"{fault.fault.detail}.") from None
    began = time.monotonic()
    conditions = read_conditions()
    ticks = _ticks()
    with running_server() as (port, server):
        if servers:
            os.sched_setaffinity(server.pid, servers)
        with pinned_client(client_cpus, [server.pid]) as pinning:
            measured = [_measure(port, _step(streams), pinning) for streams in levels]
    held = [level for level in measured if level.held]
    if not measured[0].held:
        raise UnusableInput(
            f"with {measured[0].streams} stream the client's TTFT is off by "
            f"{measured[0].ttft_error_p99_seconds * 1e3:.1f} ms (p99), {HELD_P99_SECONDS * 1e3:g} ms are the most that "
            f"is of use; look at what else loads this host (load {conditions.load_average_1m:.1f}) and calibrate again."
        )
    top = max(held, key=lambda level: level.streams)
    card = with_id(
        Calibration(
            schema_version=CALIBRATION_SCHEMA,
            made_at_utc=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=time.monotonic() - began,
            calibrated_for=calibrated_for(client_cpus),
            cpus=conditions.cpus,
            clock_source=conditions.clock_source,
            governor=conditions.governor,
            load_average_1m=conditions.load_average_1m,
            steal_share=steal_share(ticks, _ticks()),
            levels=measured,
            limits=CalibrationLimits(streams_max=top.streams, chunks_per_second_max=top.chunks_per_second),
            cpu_affinity=pinning.cpus,
            pinning=pinning.pinning,
            numa_node=pinning.numa_node,
        )
    )
    state_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(state_dir / CARD, msgspec.json.format(msgspec.json.encode(card), indent=1))
    return card


def refuse_busy_host() -> None:
    """Raise UnusableInput where an engine runs: it would be disturbed, and would disturb."""
    if engines := foreign_engines(set()):
        pid, command = engines[0]
        raise UnusableInput(f"an engine runs on this host, pid {pid} ({command}); calibrate when it has ended.")


def read_calibration(state_dir: Path, client_cpus: str = "auto") -> Calibration | None:
    """The card of this client on this host, on such CPUs; None where there is none, or it holds for another."""
    try:
        card = msgspec.json.decode((state_dir / CARD).read_bytes(), type=Calibration)
    except (OSError, msgspec.DecodeError):
        return None
    if with_id(card).calibration_id != card.calibration_id or card.calibrated_for != calibrated_for(client_cpus):
        return None
    return card


def current_calibration_id(state_dir: Path) -> str | None:
    """The id of the card that holds for this client on this host, or None."""
    card = read_calibration(state_dir)
    return card.calibration_id if card else None


def alike(card: Calibration | None, pinning: Pinning) -> Calibration | None:
    """The card where the client may run on the CPUs that it was calibrated on, else None."""
    return card if card is not None and card.cpu_affinity == pinning.cpus else None


def calibrated_for(client_cpus: str = "auto") -> CalibratedFor:
    """What a calibration made now would hold for."""
    conditions = read_conditions()
    return CalibratedFor(
        kvtrial_version=kvtrial.__version__,
        client_sha256=client_sha256(),
        kernel=platform.release(),
        cpu_model=conditions.cpu_model,
        python=platform.python_version(),
        client_cpus=client_cpus,
    )


def client_sha256() -> str:
    """sha256 over the sources of what runs on a host, and the versions of the libraries that it reads with."""
    package = Path(kvtrial.__file__).parent
    digest = hashlib.sha256()
    for pattern in _SOURCES:
        for path in sorted(package.glob(pattern)):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for name in _LIBRARIES:
        digest.update(f"{name} {importlib.metadata.version(name)}\n".encode())
    return digest.hexdigest()


def table(card: Calibration) -> list[str]:
    """The card for people, one string a line."""
    columns = ("streams", "TTFT error p50", "p99", "CPU a chunk", "chunks/s", "server p50", "p99")
    steal = "unknown" if card.steal_share is None else f"{card.steal_share:.1%}"
    limits = card.limits
    return [
        "{:>7} {:>15} {:>9} {:>12} {:>9} {:>11} {:>9}".format(*columns),
        *map(_row, card.levels),
        f"The client: {card.pinning}, CPUs {as_list(set(card.cpu_affinity))}.",
        f"Calibrated up to {limits.streams_max} streams and {limits.chunks_per_second_max:,.0f} chunks/s; steal "
        f"{steal}, load {card.load_average_1m:.1f}; id {card.calibration_id[:12]}.",
    ]


def _row(level: CalibrationLevel) -> str:
    return (
        f"{level.streams:>7} {level.ttft_error_p50_seconds * 1e3:>12.3f} ms "
        f"{level.ttft_error_p99_seconds * 1e3:>6.2f} ms {level.cpu_us_per_chunk:>9.1f} µs "
        f"{level.chunks_per_second:>9,.0f} "
        f"{level.server_write_p50_us / 1e3:>8.3f} ms {level.server_write_p99_us / 1e3:>6.2f} ms"
        f"{'' if level.held else '   not held'}"
    )


def ttft_error_ns(sent_ns: int, first_token_ns: int, served: ServedRequest) -> int | None:
    """The client's TTFT minus the server's, ns; None where the server wrote no token."""
    if served.first_before_ns is None:
        return None
    arrived_ns = served.read_ns if served.arrived_ns is None else served.arrived_ns
    return (first_token_ns - sent_ns) - (served.first_before_ns - arrived_ns)


def _measure(port: int, step: _Step, pinning: Pinning) -> CalibrationLevel:
    base_url = f"http://127.0.0.1:{port}"
    requests = [
        RequestSpec(key=str(number), prompt_token_ids=[step.streams, number, 1], max_tokens=step.tokens)
        for number in range(step.requests)
    ]
    spec = LoadSpec(
        base_url=base_url,
        model=MODEL,
        concurrency=step.streams,
        idle_timeout_seconds=_TIMEOUT_SECONDS,
        request_timeout_seconds=_TIMEOUT_SECONDS,
        deadlock_seconds=_TIMEOUT_SECONDS,
    )
    results: list[RequestResult] = []
    with loopback_client(base_url, _TIMEOUT_SECONDS) as control:
        control.post("/kvtrial/schedule", content=msgspec.json.encode(step.schedule)).raise_for_status()
        outcome = run_load_blocking(spec, requests, results.append, pinning=pinning)
        stamps = msgspec.json.decode(control.post("/kvtrial/stamps").raise_for_status().content, type=Stamps)
    return level_of(step.streams, outcome, results, stamps)


def level_of(streams: int, outcome: LoadOutcome, results: list[RequestResult], stamps: Stamps) -> CalibrationLevel:
    """What the client said of its requests against what the server knows. Raises UnusableInput where nothing came."""
    served = {request.prompt_sha256: request for request in stamps.requests}
    errors = []
    for result in results:
        known = served.get(result.prompt_sha256)
        if known is None or result.error is not None or result.first_token_ns is None or result.sent_ns is None:
            continue
        error = ttft_error_ns(result.sent_ns, result.first_token_ns, known)
        if error is not None:
            errors.append(abs(error))
    if not errors or stamps.write is None or stamps.lateness is None:
        detail = next((result.error.detail for result in results if result.error is not None), "no token came")
        raise UnusableInput(f"the client got no stream from the stamped server with {streams} in flight: {detail}.")
    failed = len(results) - len(errors)
    p50, p99, worst = (_seconds(quantile(errors, share)) for share in (0.5, 0.99, 1.0))
    card = outcome.card
    return CalibrationLevel(
        streams=streams,
        requests=len(results),
        failed=failed,
        chunks=stamps.events,
        chunks_per_second=stamps.events / outcome.seconds,
        ttft_error_p50_seconds=p50,
        ttft_error_p99_seconds=p99,
        ttft_error_max_seconds=worst,
        dispatch_lag_p95_seconds=card.dispatch_lag_p95_seconds,
        cpu_us_per_chunk=card.client_cpu_seconds / stamps.events * 1e6,
        client_cpu_share=card.client_cpu_share,
        server_write_p50_us=stamps.write.p50_us,
        server_write_p99_us=stamps.write.p99_us,
        server_lateness_p50_us=stamps.lateness.p50_us,
        server_lateness_p99_us=stamps.lateness.p99_us,
        held=failed == 0 and p99 <= HELD_P99_SECONDS,
    )


def _seconds(nanoseconds: float | None) -> float:
    assert nanoseconds is not None, "there are values"
    return nanoseconds / 1e9


def _ticks() -> tuple[int, int] | None:
    try:
        return cpu_ticks(Path("/proc/stat").read_text())
    except OSError:
        return None
