"""The measuring load client: streaming completions over raw HTTP/1.1, stamped in the receive callback.

Every request is sent exactly once and yields exactly one result; nothing is retried, because a second try would be
another measurement. How it measures: docs/load-client.md.

    python -m kvtrial.host.load.client SPEC.json OUT_DIR

sends the load of a file {"load": LoadSpec, "requests": "FILE"} by itself, where FILE holds a RequestSpec a line (JSON,
with .zst compressed), beside SPEC.json; it writes OUT_DIR/requests.jsonl.zst and OUT_DIR/outcome.json.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from kvtrial.host.affinity import Pinning, current_pinning
from kvtrial.host.load.checks import check_spec, room_for_connections
from kvtrial.host.load.dispatch import OnResult, Phase, Progress
from kvtrial.host.load.honesty import HonestyMeter, quiet_collector
from kvtrial.host.load.spool import Spool
from kvtrial.record.errors import UnusableInput
from kvtrial.record.load import LoadOutcome, LoadSpec, RequestSpec, ResultsWriter, read_lines
from kvtrial.record.store import write_atomically


def run_load_blocking(
    spec: LoadSpec,
    requests: Iterable[RequestSpec],
    on_result: OnResult,
    on_progress: Progress | None = None,
    *,
    calibration_id: str | None = None,
    pinning: Pinning | None = None,
    spool_directory: Path | None = None,
) -> LoadOutcome:
    """`run_load` on an event loop of its own (uvloop where installed) with the garbage collector off."""
    with quiet_collector(), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(
            run_load(
                spec,
                requests,
                on_result,
                on_progress,
                calibration_id=calibration_id,
                pinning=pinning,
                spool_directory=spool_directory,
            )
        )


async def run_load(
    spec: LoadSpec,
    requests: Iterable[RequestSpec],
    on_result: OnResult,
    on_progress: Progress | None = None,
    *,
    calibration_id: str | None = None,
    pinning: Pinning | None = None,
    spool_directory: Path | None = None,
) -> LoadOutcome:
    """Send every request once and hand out one result for each, in the order in which they end.

    Closed loop: `concurrency` requests in flight, the next one sent when an answer has ended. Open loop: each request
    sent at its `scheduled_seconds`, whatever became of earlier ones. In both a request with `after` is due when that
    one has ended and the pause is over. Connections are kept alive and reused, as many as there are requests in
    flight; there is no other limit. Of several engines a request goes to the one with the fewest in flight. A request
    is aborted only by its two timeouts, or with all others where an engine is found in a deadlock; then those not yet
    sent fail too, unsent.

    All requests are read and serialised before the first is sent; many go to a file without a name in
    `spool_directory` (None: where temporary files go). `calibration_id` and `pinning` are noted on the card.

    Raises UnusableInput for a load that cannot be sent and OSError where the disk is full; a server's faults are
    results, never exceptions.
    """
    addresses = check_spec(spec)
    spool = Spool(spec, requests, spool_directory)
    meter = HonestyMeter(calibration_id=calibration_id, pinning=pinning or current_pinning())
    try:
        with room_for_connections(spec.concurrency, len(spool)):
            return await Phase(spec, spool, addresses, on_result, on_progress, meter).run()
    finally:
        spool.close()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


class _Work(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    load: LoadSpec
    requests: str


class _Report(msgspec.Struct, frozen=True):
    """outcome.json. `cpu_seconds`: CPU time of the whole process from the first send until the results are on disk."""

    outcome: LoadOutcome
    cpu_seconds: float
    wall_seconds: float
    chunks: int


def send_file(spec_file: Path, out: Path) -> _Report:
    """Send the load of `spec_file`, write results and report to `out`. Raises UnusableInput and OSError."""
    try:
        work = msgspec.json.decode(spec_file.read_bytes(), type=_Work)
    except msgspec.DecodeError as error:
        raise UnusableInput(f"{spec_file} is no load: {error}; give {{load, requests}}.") from None
    out.mkdir(parents=True, exist_ok=True)
    with ResultsWriter(out / "requests.jsonl.zst") as writer:
        outcome = run_load_blocking(
            work.load, _requests_of(spec_file.parent / work.requests), lambda result: writer.write("load", result)
        )
    report = _Report(
        outcome=outcome,
        cpu_seconds=(time.process_time_ns() - outcome.started_cpu_ns) / 1e9,
        wall_seconds=(time.monotonic_ns() - outcome.started_monotonic_ns) / 1e9,
        chunks=outcome.card.chunks or 0,
    )
    write_atomically(out / "outcome.json", msgspec.json.encode(report))
    return report


def _requests_of(path: Path) -> Iterator[RequestSpec]:
    decoder = msgspec.json.Decoder(RequestSpec)
    for number, line in enumerate(read_lines(path), start=1):
        try:
            yield decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UnusableInput(f"{path}: line {number} is no request ({error}).") from None


def main(arguments: list[str]) -> int:
    """Exit status 0, or 2 for unusable input with one sentence on stderr."""
    if len(arguments) != 2:
        print("usage: python -m kvtrial.host.load.client SPEC.json OUT_DIR", file=sys.stderr)
        return 2
    try:
        report = send_file(Path(arguments[0]), Path(arguments[1]))
    except (UnusableInput, OSError) as error:
        print(str(error), file=sys.stderr)
        return 2
    print(f"{report.outcome.sent} requests, {report.chunks} chunks, {report.cpu_seconds:.3f} s of CPU")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
