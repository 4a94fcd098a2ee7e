"""What goes into the load client and what comes out: a specification in, results and an honesty card out.

These types are parts of the record, so both sides read them. They carry no version of their own: the record that holds
them does. `ResultsWriter` and `read_results` are the only code that knows how `requests.jsonl.zst` is laid out.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import msgspec
import zstandard

from kvtrial.record.errors import UnusableInput
from kvtrial.record.store import sync_directory

ErrorClass = Literal[
    "connection_refused",
    "connection_reset",
    "http_status",
    "stream_ended_without_done",
    "idle_timeout",
    "request_timeout",
    "malformed_stream",
    "deadlock",
]

_ZSTD_LEVEL = 1
_READ_BYTES = 1 << 18


class RequestSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One completion request. Exactly one of `prompt_token_ids` and `prompt_text` is given.

    Sampling is always temperature 0. With `ignore_eos` (the default) `min_tokens` equals `max_tokens`, so that both
    arms produce the same number of tokens. `scheduled_seconds` is the offset from the start of the phase; it is given
    for every request of an open loop without `after`, and for no other.

    `after` is the key of an earlier request of the same phase that must have ended first (the turn before in a
    conversation); this one is then due `pause_seconds` after that end, also where the earlier one failed.

    With `stop_after` below `max_tokens` the answer ends after exactly so many tokens: `stop_token_id`, which ends it,
    is forbidden before and then the likeliest of all.
    """

    key: str
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    max_tokens: int
    cache_salt: str | None = None
    kv_transfer_params: dict[str, int] | None = None
    scheduled_seconds: float | None = None
    ignore_eos: bool = True
    after: str | None = None
    pause_seconds: float = 0.0
    stop_after: int | None = None
    stop_token_id: int | None = None


class LoadSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a phase of load is sent: `concurrency` requests in flight, or None: an open loop by `scheduled_seconds`.

    `base_url` is `http://127.0.0.1:PORT` (loopback only). `idle_timeout_seconds` bounds the time without a byte,
    `request_timeout_seconds` the whole request, both from the moment the request was due to be sent. After
    `deadlock_seconds` in which the engine is healthy, runs nothing and lets requests wait, all in flight end.
    `also_urls`: further engines that share the load; a request goes to the one with the fewest in flight, the first of
    equals.
    """

    base_url: str
    model: str
    concurrency: int | None
    idle_timeout_seconds: float
    request_timeout_seconds: float
    deadlock_seconds: float
    also_urls: list[str] = []

    def urls(self) -> list[str]:
        """Every engine's address."""
        return [self.base_url, *self.also_urls]


class RequestError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request has no whole answer.

    `http_status` is the status of the response; for an error that the engine reports inside a stream of status 200 it
    is the code in that report (the detail says so).
    """

    error_class: ErrorClass
    http_status: int | None = None
    detail: str


class RequestResult(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to one request. Every RequestSpec yields exactly one.

    `*_ns` are nanoseconds since the start of the phase on the monotonic clock, None where it never happened. In a
    closed loop `scheduled_ns` is the moment the slot became free (with `after`, not before the end of that request and
    the pause). `first_byte_ns` is the first byte of the response,
    headers included. `token_gaps_us` are the gaps between successive tokens (one less than the tokens; where one event
    carried several tokens all but its first are 0), rounded so that they sum to the whole microseconds between first
    and last token. `output_tokens` counts token ids, or comes from `usage` where the server sends no ids; then
    `token_gaps_us` and `output_token_ids` are empty.

    `prompt_sha256` and `answer_sha256` are `sha256_of_tokens` of the ids, or the sha256 of the text in UTF-8 where
    there are no ids; `answer_sha256` is None where no token arrived.
    """

    key: str
    prompt_sha256: str
    prompt_tokens: int | None
    scheduled_ns: int
    sent_ns: int | None
    first_byte_ns: int | None
    first_token_ns: int | None
    last_token_ns: int | None
    token_gaps_us: list[int]
    output_token_ids: list[int]
    answer_sha256: str | None
    output_tokens: int
    cached_tokens: int | None
    finish_reason: str | None
    error: RequestError | None


class HonestyCard(msgspec.Struct, frozen=True, kw_only=True):
    """How far the client itself may be trusted in this phase. Facts only; gates decide.

    `dispatch_lag_*` is sent minus scheduled over the requests that were sent (closed loop: sent minus the moment the
    slot became free), None where none was sent. `loop_lag_*` is how late the event loop ran a regular timer (its
    resolution is 1 ms), None where the phase was shorter than one beat of it. `client_cpu_seconds` is the CPU time of
    the whole process, `client_cpu_share` that over `wall_seconds` (1.0 is one core). `steal_share` is the stolen share
    of all CPU time of the machine, None where /proc/stat does not say.

    `cpu_affinity` are the CPUs that the client was allowed to run on, `pinning` says how that came to be, `numa_node`
    is the node that all of them belong to (None: several, or unknown). `streams_max` is the most requests in flight,
    `chunks` the reads that brought bytes of answers. `calibration_id` names the calibration of this client on this
    host, None where there is none.
    """

    dispatch_lag_p50_seconds: float | None
    dispatch_lag_p95_seconds: float | None
    dispatch_lag_max_seconds: float | None
    loop_lag_p50_seconds: float | None
    loop_lag_max_seconds: float | None
    client_cpu_seconds: float
    wall_seconds: float
    client_cpu_share: float
    connections_opened: int
    connections_max_open: int
    gc_collections: int
    gc_pause_max_seconds: float
    clock: str
    cpu_affinity: list[int]
    steal_share: float | None
    calibration_id: str | None = None
    pinning: str | None = None
    numa_node: int | None = None
    loop_lag_p95_seconds: float | None = None
    streams_max: int | None = None
    chunks: int | None = None
    gc_pause_total_seconds: float | None = None


class LoadOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests were sent for (each has its result), the card, when the phase began and how long it took.

    `prompts_sha256` is over the hashes of the prompts in the order in which the requests were given, one a line.
    `started_cpu_ns` is the CPU time that the process had used when the phase began.
    """

    sent: int
    prompts_sha256: str
    card: HonestyCard
    started_monotonic_ns: int
    started_cpu_ns: int
    seconds: float


class ResultsWriter:
    """Writes (phase, result) pairs to `path` as they come: JSON lines with a `phase` field, compressed with zstandard.

    A context manager. The file appears whole (temporary file, fsync, rename) when the context is left without an
    exception, else not at all. Raises OSError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._encoder = msgspec.json.Encoder()
        self._compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True).compressobj()

    def __enter__(self) -> "ResultsWriter":
        self._file = self._temporary.open("wb")
        return self

    def write(self, phase: str, result: RequestResult) -> None:
        """Take one result."""
        fields = {"phase": phase, **{name: getattr(result, name) for name in RequestResult.__struct_fields__}}
        self._file.write(self._compressor.compress(self._encoder.encode(fields) + b"\n"))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            with self._file:
                if kind is None:
                    self._file.write(self._compressor.flush())
                    self._file.flush()
                    os.fsync(self._file.fileno())
            if kind is None:
                self._temporary.replace(self._path)
                sync_directory(self._path.parent)
        finally:
            self._temporary.unlink(missing_ok=True)


def write_results(path: Path, results: Iterable[tuple[str, RequestResult]]) -> None:
    """Write (phase, result) pairs to `path` by a ResultsWriter: whole or not at all. Raises OSError."""
    with ResultsWriter(path) as writer:
        for phase, result in results:
            writer.write(phase, result)


def read_results(path: Path) -> Iterator[dict[str, Any]]:
    """Read what `write_results` wrote, one dict a request (a RequestResult's fields and `phase`), without loading all.

    Raises UnusableInput where the file is cut, damaged or not of this kind, OSError where it cannot be read.
    """
    decoder = msgspec.json.Decoder(dict[str, Any])
    for number, line in enumerate(_zstd_lines(path), start=1):
        try:
            yield decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UnusableInput(
                f"{path}: line {number} is not a JSON object ({error}); fetch the run's record again."
            ) from None


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, compressed where its name ends in .zst, without their ends. Errors as read_results."""
    if path.suffix == ".zst":
        yield from _zstd_lines(path)
        return
    with path.open("rb") as file:
        for line in file:
            yield line.removesuffix(b"\n")


def _zstd_lines(path: Path) -> Iterator[bytes]:
    # A stream reader of zstandard takes a cut file for a short one; a decompression object knows the frame's end.
    frame = zstandard.ZstdDecompressor().decompressobj()
    tail = b""
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            try:
                text = tail + frame.decompress(block)
            except zstandard.ZstdError as error:
                raise UnusableInput(
                    f"{path} is not a whole zstandard file ({error}); fetch the run's record again."
                ) from None
            *lines, tail = text.split(b"\n")
            yield from lines
            if frame.eof:
                break
    if not frame.eof or tail:
        raise UnusableInput(f"{path} ends in the middle; fetch the run's record again.")
