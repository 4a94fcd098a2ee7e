"""The measuring load client: streaming completions over raw HTTP/1.1, stamped in the receive callback.

What happens while a request is in flight is kept to the least that can be done: stamp the read, cut the HTTP framing,
keep the raw chunk. Events and JSON are read after the phase, or between beats once much is buffered. Every request is
sent exactly once and yields exactly one result; nothing is retried, because a second try would be another measurement.
"""

import asyncio
import hashlib
import ipaddress
import re
import resource
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast
from urllib.parse import SplitResult, urlsplit

import msgspec

from kvtrial.host.honesty import HonestyMeter, quiet_collector
from kvtrial.host.http1 import MalformedResponse, Response, ResponseReader, post_bytes
from kvtrial.host.sse import StreamedAnswer, read_answer, sha256_of_tokens, token_gaps_us
from kvtrial.record.errors import UnusableInput
from kvtrial.record.load import (
    ErrorClass,
    LoadOutcome,
    LoadSpec,
    RequestError,
    RequestResult,
    RequestSpec,
)

OnResult = Callable[[RequestResult], None]
"""Called once for each request, in the order of completion."""

Progress = Callable[[int, int], None]
"""Called with (requests done, requests in all), at most every 0.5 s while the phase runs."""

_PATH = "/v1/completions"
_BEAT_SECONDS = 0.05
_PROGRESS_NS = 500_000_000
_SPARE_DESCRIPTORS = 64
_DETAIL_CHARACTERS = 300
_PREOPEN_SECONDS = 5.0
_CLOSE_SECONDS = 1.0

_REUSE_WITHIN_NS = 2_000_000_000
"""A kept connection idle for longer is replaced. uvicorn, under vLLM, closes one after 5 s; a request sent into that
close would be lost, and it may not be sent twice."""

_BUFFER_LIMIT_BYTES = 64 << 20
"""Answers beyond this many raw bytes are read while the phase runs, for at most half of each beat."""


def request_body(model: str, request: RequestSpec) -> bytes:
    """The JSON body of one request, as it is sent."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": request.prompt_token_ids if request.prompt_token_ids is not None else request.prompt_text,
        "max_tokens": request.max_tokens,
        # Without ignore_eos a minimum would suppress the very end that was allowed.
        "min_tokens": request.max_tokens if request.ignore_eos else 0,
        "ignore_eos": request.ignore_eos,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if request.cache_salt is not None:
        body["cache_salt"] = request.cache_salt
    if request.kv_transfer_params is not None:
        body["kv_transfer_params"] = request.kv_transfer_params
    return msgspec.json.encode(body)


def run_load_blocking(
    spec: LoadSpec,
    requests: Iterable[RequestSpec],
    on_result: OnResult,
    on_progress: Progress | None = None,
    *,
    calibration_id: str | None = None,
) -> LoadOutcome:
    """`run_load` on an event loop of its own (uvloop where installed) with the garbage collector off."""
    with quiet_collector(), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(run_load(spec, requests, on_result, on_progress, calibration_id=calibration_id))


async def run_load(
    spec: LoadSpec,
    requests: Iterable[RequestSpec],
    on_result: OnResult,
    on_progress: Progress | None = None,
    *,
    calibration_id: str | None = None,
) -> LoadOutcome:
    """Send every request once and hand out one result for each, in the order in which they end.

    Closed loop: `concurrency` requests in flight, the next one sent when an answer has ended. Open loop: each request
    sent at its `scheduled_seconds`, whatever became of earlier ones. Connections are kept alive and reused, as many as
    there are requests in flight; there is no other limit. A request is aborted only by its two timeouts.

    Raises UnusableInput for a specification that cannot be run; a server's faults are results, never exceptions.
    """
    wanted = list(requests)
    address = _check(spec, wanted)
    with _room_for_connections(spec.concurrency, len(wanted)):
        return await _Phase(spec, wanted, address, on_result, on_progress, calibration_id).run()


class _Exchange:
    """One request on its way. Times are absolute perf_counter_ns."""

    __slots__ = (
        "began_ns",
        "connecting",
        "connection",
        "error",
        "first_byte_ns",
        "last_activity_ns",
        "prompt_sha256",
        "request",
        "response",
        "scheduled_ns",
        "sent_ns",
        "wire",
    )

    def __init__(self, request: RequestSpec, wire: bytes) -> None:
        self.request = request
        self.wire = wire
        self.prompt_sha256 = _sha256_of_prompt(request)
        self.scheduled_ns = 0
        self.began_ns = 0
        self.sent_ns: int | None = None
        self.first_byte_ns: int | None = None
        self.last_activity_ns = 0
        self.connecting: asyncio.Task[None] | None = None
        self.connection: _Connection | None = None
        self.response: Response | None = None
        self.error: RequestError | None = None


class _Connection(asyncio.Protocol):
    """One kept-alive connection, with at most one exchange on it."""

    def __init__(self, phase: "_Phase") -> None:
        self._phase = phase
        self._reader = ResponseReader()
        self._transport: asyncio.Transport | None = None
        self.exchange: _Exchange | None = None
        self.idle_since_ns = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, not a check: uvloop's transports are not registered as asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)
        # asyncio and uvloop both set TCP_NODELAY on their TCP transports.
        self.idle_since_ns = time.perf_counter_ns()
        self._phase.on_connected(self)

    def data_received(self, data: bytes) -> None:
        now_ns = time.perf_counter_ns()
        exchange = self.exchange
        if exchange is None:
            self.abort()
            return
        if exchange.first_byte_ns is None:
            exchange.first_byte_ns = now_ns
        exchange.last_activity_ns = now_ns
        try:
            self._reader.feed(data, now_ns)
        except MalformedResponse as problem:
            self._phase.on_failed(exchange, "malformed_stream", str(problem))
            return
        if self._reader.complete:
            self._phase.on_answered(exchange, self, now_ns)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._phase.on_disconnected(self, exc)
        self._reader.close()

    @property
    def usable(self) -> bool:
        """Open, and no exchange on it."""
        return self.exchange is None and self._transport is not None and not self._transport.is_closing()

    def send(self, exchange: _Exchange) -> int:
        """Write the request; return the stamp taken just before."""
        assert self._transport is not None
        self.exchange = exchange
        exchange.connection = self
        sent_ns = time.perf_counter_ns()
        exchange.sent_ns = exchange.last_activity_ns = sent_ns
        self._transport.write(exchange.wire)
        exchange.wire = b""
        return sent_ns

    def release(self) -> Response:
        """Part from the exchange; hand out the response as far as it came. Closes what cannot be used again."""
        if self.exchange is not None:
            self.exchange.connection = None
            self.exchange = None
        response = self._reader.take()
        if self._reader.surplus or not response.keep_alive:
            self.close()
        return response

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class _Phase:
    """One phase of load: what is waiting, in flight and finished, and the connections between."""

    def __init__(
        self,
        spec: LoadSpec,
        requests: list[RequestSpec],
        address: tuple[str, int],
        on_result: OnResult,
        on_progress: Progress | None,
        calibration_id: str | None,
    ) -> None:
        self._spec = spec
        self._on_result = on_result
        self._calibration_id = calibration_id
        self._host, self._port = address
        self._on_progress = on_progress
        self._loop = asyncio.get_running_loop()
        self._meter = HonestyMeter()
        host_header = urlsplit(spec.base_url).netloc
        self._exchanges = [
            _Exchange(request, post_bytes(host_header, _PATH, request_body(spec.model, request)))
            for request in requests
        ]
        self._waiting: deque[_Exchange] = deque()
        self._in_flight: set[_Exchange] = set()
        self._idle: list[_Connection] = []
        self._connections: set[_Connection] = set()
        self._unread: deque[_Exchange] = deque()
        self._unread_bytes = 0
        self._finished = 0
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._began_ns = 0
        self._ended_ns = 0
        self._beat_due_ns = 0
        self._swept_ns = 0
        self._reported_ns = 0
        self._idle_timeout_ns = round(spec.idle_timeout_seconds * 1e9)
        self._request_timeout_ns = round(spec.request_timeout_seconds * 1e9)
        self._sweep_ns = min(100_000_000, self._idle_timeout_ns // 4, self._request_timeout_ns // 4)

    async def run(self) -> LoadOutcome:
        try:
            if self._spec.concurrency is not None:
                await self._preopen(min(self._spec.concurrency, len(self._exchanges)))
            self._meter.start()
            self._began_ns = time.perf_counter_ns()
            started_monotonic_ns = time.monotonic_ns()
            self._start_dispatching()
            self._start_beating()
            await self._over
            card = self._meter.finish()
        finally:
            self._meter.stop()
            self._waiting.clear()
            for timer in self._timers.values():
                timer.cancel()
            await self._close_connections()
        while self._unread:
            self._read_next()
        return LoadOutcome(
            sent=len(self._exchanges),
            prompts_sha256=hashlib.sha256("\n".join(e.prompt_sha256 for e in self._exchanges).encode()).hexdigest(),
            card=msgspec.structs.replace(card, calibration_id=self._calibration_id),
            started_monotonic_ns=started_monotonic_ns,
            seconds=(self._ended_ns - self._began_ns) / 1e9,
        )

    # Dispatch.

    def _start_dispatching(self) -> None:
        if self._spec.concurrency is not None:
            self._waiting.extend(self._exchanges)
            for _ in range(min(self._spec.concurrency, len(self._exchanges))):
                self._dispatch_next(self._began_ns)
            return
        for exchange in self._exchanges:
            exchange.scheduled_ns = self._began_ns + round((exchange.request.scheduled_seconds or 0.0) * 1e9)
        self._waiting.extend(sorted(self._exchanges, key=lambda exchange: exchange.scheduled_ns))
        self._dispatch_due()

    def _dispatch_next(self, free_since_ns: int) -> None:
        if self._waiting:
            exchange = self._waiting.popleft()
            exchange.scheduled_ns = free_since_ns
            self._dispatch(exchange)

    def _dispatch_due(self) -> None:
        # A timer of uvloop counts whole milliseconds and may fire early; then it is set again for what is left.
        while self._waiting:
            wait_ns = self._waiting[0].scheduled_ns - time.perf_counter_ns()
            if wait_ns > 0:
                self._timers["dispatch"] = self._loop.call_later(wait_ns / 1e9, self._dispatch_due)
                return
            self._dispatch(self._waiting.popleft())

    def _dispatch(self, exchange: _Exchange) -> None:
        now_ns = time.perf_counter_ns()
        exchange.began_ns = exchange.last_activity_ns = now_ns
        self._in_flight.add(exchange)
        connection = self._take_idle(now_ns)
        if connection is not None:
            self._send(exchange, connection)
        else:
            exchange.connecting = self._loop.create_task(self._connect_and_send(exchange))

    def _send(self, exchange: _Exchange, connection: _Connection) -> None:
        self._meter.dispatched(connection.send(exchange) - exchange.scheduled_ns)

    # Connections.

    async def _preopen(self, count: int) -> None:
        """Open the connections of a closed loop before its clock starts; what fails here is met again at dispatch."""
        opening = [self._loop.create_task(self._open()) for _ in range(count)]
        try:
            await asyncio.wait(opening, timeout=min(_PREOPEN_SECONDS, self._spec.idle_timeout_seconds))
        finally:
            for task in opening:
                task.cancel()
            opened = await asyncio.gather(*opening, return_exceptions=True)
        self._idle.extend(connection for connection in opened if isinstance(connection, _Connection))

    async def _open(self) -> _Connection:
        connection = _Connection(self)
        try:
            await self._loop.create_connection(lambda: connection, self._host, self._port)
        except asyncio.CancelledError:
            # It may have been opened in the same turn of the loop that cancelled it.
            connection.abort()
            raise
        return connection

    async def _connect_and_send(self, exchange: _Exchange) -> None:
        try:
            connection = await self._open()
        except OSError as error:
            reset = isinstance(error, ConnectionResetError | BrokenPipeError)
            self.on_failed(exchange, "connection_reset" if reset else "connection_refused", str(error))
            return
        exchange.connecting = None
        if exchange not in self._in_flight:
            connection.close()
        elif connection.usable:
            self._send(exchange, connection)
        else:
            self.on_failed(exchange, "connection_reset", "the server closed the connection as soon as it was open")

    def _take_idle(self, now_ns: int) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and now_ns - connection.idle_since_ns <= _REUSE_WITHIN_NS:
                return connection
            connection.close()
        return None

    async def _close_connections(self) -> None:
        connecting = [exchange.connecting for exchange in self._in_flight if exchange.connecting is not None]
        for task in connecting:
            task.cancel()
        await asyncio.gather(*connecting, return_exceptions=True)
        for connection in list(self._connections):
            if connection.exchange is None:
                connection.close()
            else:
                connection.abort()
        give_up = self._loop.time() + _CLOSE_SECONDS
        while self._connections and self._loop.time() < give_up:
            await asyncio.sleep(0.001)

    # What connections report.

    def on_connected(self, connection: _Connection) -> None:
        self._connections.add(connection)
        self._meter.connected()

    def on_disconnected(self, connection: _Connection, error: Exception | None) -> None:
        self._connections.discard(connection)
        self._meter.disconnected()
        exchange = connection.exchange
        if exchange is None:
            return
        if error is not None:
            self.on_failed(exchange, "connection_reset", f"the connection broke: {error}")
        elif exchange.first_byte_ns is None:
            self.on_failed(exchange, "connection_reset", "the server closed the connection before it answered")
        else:
            self.on_failed(exchange, "stream_ended_without_done", "the server closed the connection in the answer")

    def on_answered(self, exchange: _Exchange, connection: _Connection, now_ns: int) -> None:
        exchange.response = connection.release()
        if connection.usable:
            connection.idle_since_ns = now_ns
            self._idle.append(connection)
        self._finish(exchange, now_ns)

    def on_failed(self, exchange: _Exchange, error_class: ErrorClass, detail: str) -> None:
        exchange.error = RequestError(error_class=error_class, detail=detail[:_DETAIL_CHARACTERS])
        if exchange.connection is not None:
            connection = exchange.connection
            exchange.response = connection.release()
            connection.abort()
        self._finish(exchange, time.perf_counter_ns())

    def _finish(self, exchange: _Exchange, now_ns: int) -> None:
        self._in_flight.discard(exchange)
        self._unread.append(exchange)
        self._unread_bytes += _buffered_bytes(exchange)
        self._finished += 1
        if self._spec.concurrency is not None:
            self._dispatch_next(now_ns)
        if self._finished == len(self._exchanges) and not self._over.done():
            self._ended_ns = now_ns
            self._over.set_result(None)

    # The beat: loop lag, timeouts, buffered answers, progress.

    def _start_beating(self) -> None:
        self._swept_ns = self._reported_ns = self._began_ns
        self._beat_due_ns = time.perf_counter_ns() + round(_BEAT_SECONDS * 1e9)
        self._timers["beat"] = self._loop.call_later(_BEAT_SECONDS, self._beat)

    def _beat(self) -> None:
        now_ns = time.perf_counter_ns()
        self._meter.beat(max(0, now_ns - self._beat_due_ns))
        try:
            self._sweep(now_ns)
            self._read_while_much_is_buffered(now_ns)
            self._report_progress(now_ns)
        except Exception as error:
            # Nothing awaits a timer: without this the phase would go on without timeouts.
            if not self._over.done():
                self._over.set_exception(error)
            return
        self._beat_due_ns = time.perf_counter_ns() + round(_BEAT_SECONDS * 1e9)
        self._timers["beat"] = self._loop.call_later(_BEAT_SECONDS, self._beat)

    def _sweep(self, now_ns: int) -> None:
        if now_ns - self._swept_ns < self._sweep_ns:
            return
        self._swept_ns = now_ns
        for exchange in list(self._in_flight):
            if now_ns - exchange.began_ns > self._request_timeout_ns:
                self._time_out(exchange, "request_timeout", f"no end in {self._spec.request_timeout_seconds} s")
            elif now_ns - exchange.last_activity_ns > self._idle_timeout_ns:
                self._time_out(exchange, "idle_timeout", f"no byte for {self._spec.idle_timeout_seconds} s")

    def _time_out(self, exchange: _Exchange, error_class: ErrorClass, detail: str) -> None:
        if exchange.connecting is not None:
            exchange.connecting.cancel()
            exchange.connecting = None
        self.on_failed(exchange, error_class, f"{detail}, {_stage(exchange)}")

    def _read_while_much_is_buffered(self, now_ns: int) -> None:
        give_up_ns = now_ns + round(_BEAT_SECONDS * 1e9) // 2
        while self._unread and self._unread_bytes > _BUFFER_LIMIT_BYTES and time.perf_counter_ns() < give_up_ns:
            self._read_next()

    def _report_progress(self, now_ns: int) -> None:
        if self._on_progress is not None and now_ns - self._reported_ns >= _PROGRESS_NS:
            self._reported_ns = now_ns
            self._on_progress(self._finished, len(self._exchanges))

    # Results.

    def _read_next(self) -> None:
        exchange = self._unread.popleft()
        self._unread_bytes -= _buffered_bytes(exchange)
        self._on_result(_result(exchange, self._began_ns))
        exchange.response = None


def _result(exchange: _Exchange, began_ns: int) -> RequestResult:
    response = exchange.response or Response()
    answer = StreamedAnswer()
    if response.status == 200:
        answer = read_answer(response.chunks, response.stamps_ns)
    return RequestResult(
        key=exchange.request.key,
        prompt_sha256=exchange.prompt_sha256,
        prompt_tokens=answer.prompt_tokens,
        scheduled_ns=exchange.scheduled_ns - began_ns,
        sent_ns=_since(began_ns, exchange.sent_ns),
        first_byte_ns=_since(began_ns, exchange.first_byte_ns),
        first_token_ns=_since(began_ns, answer.first_token_ns),
        last_token_ns=_since(began_ns, answer.last_token_ns),
        token_gaps_us=token_gaps_us(answer.token_stamps_ns),
        output_token_ids=answer.output_token_ids,
        answer_sha256=answer.answer_sha256,
        output_tokens=answer.output_tokens,
        cached_tokens=answer.cached_tokens,
        finish_reason=answer.finish_reason,
        error=_error(exchange, response, answer),
    )


def _error(exchange: _Exchange, response: Response, answer: StreamedAnswer) -> RequestError | None:
    """The one error of an exchange: what the server said outranks how the connection then ended."""
    timed_out = exchange.error is not None and exchange.error.error_class in ("idle_timeout", "request_timeout")
    if timed_out or response.status is None:
        return exchange.error or RequestError(error_class="malformed_stream", detail="a response without a status")
    if response.status != 200:
        detail = _told(b"".join(response.chunks), exchange.request)
        return RequestError(error_class="http_status", http_status=response.status, detail=detail)
    if answer.reported_error is not None:
        code, message = answer.reported_error
        detail = "an error reported inside the stream: " + _without_prompt(message, exchange.request)
        return RequestError(error_class="http_status", http_status=code, detail=detail)
    if response.content_type is not None and not response.content_type.startswith("text/event-stream"):
        detail = f"the content type is {response.content_type[:80]!r}, not text/event-stream"
        return RequestError(error_class="malformed_stream", detail=detail)
    if answer.malformed is not None:
        return RequestError(error_class="malformed_stream", detail=answer.malformed[:_DETAIL_CHARACTERS])
    if not answer.done:
        no_done = f"the answer ended without [DONE] after {answer.output_tokens} tokens"
        return exchange.error or RequestError(error_class="stream_ended_without_done", detail=no_done)
    if exchange.error is not None and exchange.error.error_class == "malformed_stream":
        return exchange.error
    # The answer is whole; that the connection broke after [DONE] changes nothing of it.
    return None


def _told(body: bytes, request: RequestSpec) -> str:
    """What an error body says, without the prompt: vLLM's validation messages quote their input."""
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        parsed = None
    message: object = None
    if isinstance(parsed, dict):
        inner = parsed.get("error")
        message = inner.get("message") if isinstance(inner, dict) else parsed.get("message")
    return _without_prompt(message if isinstance(message, str) else body.decode("utf-8", "replace"), request)


def _without_prompt(message: str, request: RequestSpec) -> str:
    if request.prompt_text:
        message = message.replace(request.prompt_text, "<prompt>")
    message = re.sub(r"""(["']input["']\s*:).*""", r"\1 <input>", message, flags=re.DOTALL)
    return message[:_DETAIL_CHARACTERS]


def _stage(exchange: _Exchange) -> str:
    if exchange.sent_ns is None:
        return "not connected yet"
    if exchange.first_byte_ns is None:
        return "nothing of the answer"
    return "in the answer"


def _since(began_ns: int, at_ns: int | None) -> int | None:
    return None if at_ns is None else at_ns - began_ns


def _buffered_bytes(exchange: _Exchange) -> int:
    return exchange.response.body_bytes if exchange.response is not None else 0


def _sha256_of_prompt(request: RequestSpec) -> str:
    if request.prompt_token_ids is not None:
        return sha256_of_tokens(request.prompt_token_ids)
    return hashlib.sha256((request.prompt_text or "").encode("utf-8")).hexdigest()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


# Validation of a specification.


def _check(spec: LoadSpec, requests: list[RequestSpec]) -> tuple[str, int]:
    """The address to connect to. Raises UnusableInput for a specification that cannot be run."""
    address = _loopback_address(spec.base_url)
    if spec.concurrency is not None and spec.concurrency < 1:
        raise UnusableInput(
            f"concurrency={spec.concurrency} sends nothing; give at least 1, or none for an open loop by "
            "scheduled_seconds."
        )
    for name in ("idle_timeout_seconds", "request_timeout_seconds", "deadlock_seconds"):
        if not getattr(spec, name) > 0:
            raise UnusableInput(f"{name}={getattr(spec, name)} ends every request at once; give a number above 0.")
    if not requests:
        raise UnusableInput("no requests are no load; give at least one request.")
    keys: set[str] = set()
    for request in requests:
        if request.key in keys:
            raise UnusableInput(f"request key {request.key!r} stands twice; keys are unique within a phase.")
        keys.add(request.key)
        _check_request(request, open_loop=spec.concurrency is None)
    return address


def _check_request(request: RequestSpec, *, open_loop: bool) -> None:
    name = f"request {request.key!r}"
    if (request.prompt_token_ids is None) == (request.prompt_text is None):
        raise UnusableInput(f"{name} needs exactly one of prompt_token_ids and prompt_text.")
    if not (request.prompt_token_ids or request.prompt_text):
        raise UnusableInput(f"{name} has an empty prompt; vLLM takes one token or more.")
    if request.max_tokens < 1:
        raise UnusableInput(f"{name} has max_tokens={request.max_tokens}; give at least 1.")
    if request.cache_salt == "":
        raise UnusableInput(f"{name} has an empty cache_salt, which vLLM refuses; give a text or leave it out.")
    seconds = request.scheduled_seconds
    if open_loop and (seconds is None or not 0 <= seconds < float("inf")):
        raise UnusableInput(f"{name} has scheduled_seconds={seconds}; an open loop needs an offset of 0 or more.")
    if not open_loop and seconds is not None:
        raise UnusableInput(
            f"{name} has scheduled_seconds={seconds} in a closed loop; leave it out, or leave concurrency out."
        )


def _loopback_address(base_url: str) -> tuple[str, int]:
    try:
        parts: SplitResult = urlsplit(base_url)
        host, port = parts.hostname, parts.port
        loopback = host is not None and ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback or parts.scheme != "http" or parts.path not in ("", "/") or parts.query or parts.username:
        raise UnusableInput(
            f"base_url={base_url!r} is not http://127.0.0.1:PORT; load is sent to engines on this host only."
        )
    if not host or not port:
        raise UnusableInput(f"base_url={base_url!r} names no port; give http://127.0.0.1:PORT.")
    return host, port


@contextmanager
def _room_for_connections(concurrency: int | None, requests: int) -> Iterator[None]:
    """Raise this process's soft limit of open files where the load may need it, and put it back.

    Raises UnusableInput where a closed loop cannot fit. How many an open loop needs is the server's to decide.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = min(concurrency or requests, requests) + _SPARE_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or needed <= soft:
        yield
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        if concurrency is not None:
            raise UnusableInput(
                f"concurrency={concurrency} needs {needed} open files, and the hard limit here is {hard}; raise it "
                "(LimitNOFILE= of the unit, or ulimit -Hn) or lower the concurrency."
            )
        needed = hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
