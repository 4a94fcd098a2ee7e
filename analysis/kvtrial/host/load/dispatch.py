"""One phase of load: which request is due when, what is in flight, and the connections between."""

import asyncio
import contextlib
import heapq
import time
from collections import deque
from collections.abc import Callable
from time import perf_counter_ns

from kvtrial.host.load.alarm import Alarm
from kvtrial.host.load.connection import Connection, Exchange
from kvtrial.host.load.deadlock import DeadlockWatch
from kvtrial.host.load.honesty import HonestyMeter
from kvtrial.host.load.http1 import MalformedResponse
from kvtrial.host.load.results import DETAIL_CHARACTERS, result_of
from kvtrial.host.load.spool import Spool
from kvtrial.record.load import ErrorClass, LoadOutcome, LoadSpec, RequestError, RequestResult

OnResult = Callable[[RequestResult], None]
"""Called once for each request, in the order of completion."""

Progress = Callable[[int, int], None]
"""Called with (requests done, requests in all), at most every 0.5 s while the phase runs."""

BEAT_SECONDS = 0.05
PROGRESS_NS = 500_000_000
PREOPEN_SECONDS = 5.0
CLOSE_SECONDS = 1.0

REUSE_WITHIN_NS = 2_000_000_000
"""A kept connection idle for longer is replaced. uvicorn, under vLLM, closes one after 5 s; a request sent into that
close would be lost, and it may not be sent twice."""

SWEEP_NS = 500_000_000
"""Requests in flight are looked over this often, or four times within the shorter timeout; some at each beat, since a
look takes some 2 µs and tokens wait meanwhile."""

QUIET_NS = 250_000_000
"""A stream without a byte for so long is looked at: it may have ended in a way that its last read does not show."""

BUFFER_LIMIT_BYTES = 64 << 20
"""Beyond this many raw bytes answers are read within the phase, a little at a time; beyond twice as many, at once."""

EXCHANGE_BYTES = 4096
"""What an answer takes in memory beside its bytes."""

READ_EVERY_SECONDS = 0.004
READ_SLICE_NS = 500_000
"""While much is buffered, this much is read every so often: a token that comes meanwhile is stamped so much later."""


class Phase:
    """Sends the requests of a spool. `run` it once, inside a running event loop."""

    def __init__(
        self,
        spec: LoadSpec,
        spool: Spool,
        addresses: list[tuple[str, int]],
        on_result: OnResult,
        on_progress: Progress | None,
        meter: HonestyMeter,
    ) -> None:
        self._spec = spec
        self._spool = spool
        self._addresses = addresses
        self._busy = [0] * len(addresses)
        self._on_result = on_result
        self._on_progress = on_progress
        self._meter = meter
        self._loop = asyncio.get_running_loop()
        self._due = spool.in_order_of_schedule()
        self._next_due: int | None = None
        self._at_hand: Exchange | None = None
        self._pausing: list[tuple[int, int]] = []
        self._ready: deque[tuple[int, int]] = deque()
        self._free_since: deque[int] = deque()
        self._filling = False
        self._stopped = False
        self._deadlock: str | None = None
        self._in_flight: set[Exchange] = set()
        self._idle: list[list[Connection]] = [[] for _ in addresses]
        self._connections: set[Connection] = set()
        self._unread: deque[tuple[Exchange, int]] = deque()
        self._unread_bytes = 0
        self._finished = 0
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._alarm = Alarm(self._loop, self._dispatch_due)
        self._began_ns = 0
        self._ended_ns = 0
        self._beat_due_ns = 0
        self._swept_ns = 0
        self._to_look_at: list[Exchange] = []
        self._looks_a_beat = 0
        self._reported_ns = 0
        self._idle_timeout_ns = round(spec.idle_timeout_seconds * 1e9)
        self._request_timeout_ns = round(spec.request_timeout_seconds * 1e9)
        self._sweep_ns = min(SWEEP_NS, self._idle_timeout_ns // 4, self._request_timeout_ns // 4)

    async def run(self) -> LoadOutcome:
        """Send everything and hand out every result."""
        try:
            if self._spec.concurrency is not None:
                await self._preopen(min(self._spec.concurrency, len(self._spool)))
            self._fetch()
            with contextlib.ExitStack() as watches:
                for engine in range(len(self._addresses)):
                    watches.enter_context(self._watch_for_deadlock(engine))
                self._meter.start()
                started_monotonic_ns = time.monotonic_ns()
                started_cpu_ns = time.process_time_ns()
                self._began_ns = perf_counter_ns()
                self._start_dispatching()
                self._start_beating()
                await self._over
            card = self._meter.finish()
        finally:
            self._meter.stop()
            self._stopped = True
            self._alarm.close()
            for timer in self._timers.values():
                timer.cancel()
            await self._close_connections()
        while self._unread:
            self._read_next()
        return LoadOutcome(
            sent=len(self._spool),
            prompts_sha256=self._spool.prompts_sha256,
            card=card,
            started_monotonic_ns=started_monotonic_ns,
            started_cpu_ns=started_cpu_ns,
            seconds=(self._ended_ns - self._began_ns) / 1e9,
        )

    # Dispatch. A request is due at its scheduled time, or a pause after the end of the one it comes after; in a closed
    # loop it waits for a free slot besides. Later turns that are due go before first turns.

    def _start_dispatching(self) -> None:
        if self._spec.concurrency is not None:
            self._free_since.extend([self._began_ns] * min(self._spec.concurrency, len(self._spool)))
        self._dispatch_due()

    def _dispatch_due(self) -> None:
        """Send whatever is due now, and set the timer for the next that will be."""
        if self._filling:
            return
        self._filling = True
        try:
            due_ns = self._fill()
        except Exception as error:  # nothing awaits a timer
            self._fail(error)
            return
        finally:
            self._filling = False
        if due_ns is not None:
            self._alarm.set(due_ns)

    def _fill(self) -> int | None:
        """Dispatch what can be; return when the next is due, None where none has a time."""
        closed = self._spec.concurrency is not None
        while self._finished < len(self._spool) and not self._stopped:
            now_ns = perf_counter_ns()
            while self._pausing and (self._pausing[0][0] <= now_ns or self._deadlock is not None):
                self._ready.append(heapq.heappop(self._pausing))
            if closed and not self._free_since:
                break
            if self._ready:
                due_ns, number = self._ready.popleft()
            elif (number_due := self._peek_due()) is None:
                break
            else:
                due_ns, number = self._began_ns + self._spool.scheduled_ns[number_due], number_due
                if not closed and due_ns > now_ns and self._deadlock is None:
                    break
                self._next_due = None
            self._dispatch(number, max(due_ns, self._free_since.popleft()) if closed else due_ns)
        self._fetch()
        times = [self._pausing[0][0]] if self._pausing else []
        if not closed and (number_due := self._peek_due()) is not None:
            times.append(self._began_ns + self._spool.scheduled_ns[number_due])
        return min(times) if times else None

    def _peek_due(self) -> int | None:
        if self._next_due is None:
            self._next_due = next(self._due, None)
        return self._next_due

    def _fetch(self) -> None:
        """Make the next request ready while there is time, so that little but the write is left when it is due."""
        if self._at_hand is None and (number := self._peek_due()) is not None:
            self._at_hand = self._exchange(number)

    def _exchange(self, number: int) -> Exchange:
        request = self._spool[number]
        return Exchange(number, request.key, request.prompt_sha256, request.wire)

    def _dispatch(self, number: int, scheduled_ns: int) -> None:
        exchange = self._at_hand
        if exchange is not None and exchange.number == number:
            self._at_hand = None
        else:
            exchange = self._exchange(number)
        exchange.scheduled_ns = scheduled_ns
        exchange.began_ns = now_ns = perf_counter_ns()
        exchange.engine = self._busy.index(min(self._busy))
        self._busy[exchange.engine] += 1
        self._in_flight.add(exchange)
        if self._deadlock is not None:
            self.on_failed(exchange, "deadlock", f"not sent: {self._deadlock}")
            while self._unread:
                self._read_next()
            return
        connection = self._take_idle(exchange.engine, now_ns)
        if connection is not None:
            self._send(exchange, connection)
        else:
            exchange.connecting = self._loop.create_task(self._connect_and_send(exchange))
        self._meter.streaming(len(self._in_flight))

    def _send(self, exchange: Exchange, connection: Connection) -> None:
        self._meter.dispatched(connection.send(exchange) - exchange.scheduled_ns)

    # Connections.

    async def _preopen(self, count: int) -> None:
        """Open the connections of a closed loop before its clock starts; what fails here is met again at dispatch."""
        opening = [self._loop.create_task(self._open(number % len(self._addresses))) for number in range(count)]
        try:
            await asyncio.wait(opening, timeout=min(PREOPEN_SECONDS, self._spec.idle_timeout_seconds))
        finally:
            for task in opening:
                task.cancel()
            opened = await asyncio.gather(*opening, return_exceptions=True)
        for connection in opened:
            if isinstance(connection, Connection):
                self._idle[connection.engine].append(connection)

    async def _open(self, engine: int) -> Connection:
        connection = Connection(self, engine)
        try:
            await self._loop.create_connection(lambda: connection, *self._addresses[engine])
        except asyncio.CancelledError:
            # It may have been opened in the same turn of the loop that cancelled it.
            connection.abort()
            raise
        return connection

    async def _connect_and_send(self, exchange: Exchange) -> None:
        try:
            connection = await self._open(exchange.engine)
        except OSError as error:
            exchange.connecting = None
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

    def _take_idle(self, engine: int, now_ns: int) -> Connection | None:
        while self._idle[engine]:
            connection = self._idle[engine].pop()
            if connection.usable and now_ns - connection.idle_since_ns <= REUSE_WITHIN_NS:
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
        give_up = self._loop.time() + CLOSE_SECONDS
        while self._connections and self._loop.time() < give_up:
            await asyncio.sleep(0.001)

    # What connections report.

    def on_connected(self, connection: Connection) -> None:
        """A connection is open."""
        self._connections.add(connection)
        self._meter.connected()

    def on_disconnected(self, connection: Connection, error: Exception | None) -> None:
        """A connection is closed."""
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

    def on_answered(self, exchange: Exchange, connection: Connection, now_ns: int) -> None:
        """A whole response is there."""
        connection.release()
        if connection.usable:
            connection.idle_since_ns = now_ns
            self._idle[connection.engine].append(connection)
        self._finish(exchange, now_ns)

    def on_failed(self, exchange: Exchange, error_class: ErrorClass, detail: str) -> None:
        """An exchange cannot go on."""
        exchange.error = RequestError(error_class=error_class, detail=detail[:DETAIL_CHARACTERS])
        if exchange.connecting is not None:
            exchange.connecting.cancel()
            exchange.connecting = None
        if exchange.connection is not None:
            connection = exchange.connection
            connection.release()
            connection.abort()
        self._finish(exchange, perf_counter_ns())

    def _finish(self, exchange: Exchange, now_ns: int) -> None:
        """An exchange is over: send first what has waited for its end, and only then see to the rest of it."""
        if exchange in self._in_flight:
            self._in_flight.remove(exchange)
            self._busy[exchange.engine] -= 1
        if self._stopped:
            return
        size = _size_of(exchange)
        self._unread.append((exchange, size))
        self._finished += 1
        for number, pause_ns in self._spool.followers(exchange.number):
            heapq.heappush(self._pausing, (now_ns + pause_ns, number))
        if self._spec.concurrency is not None:
            self._free_since.append(now_ns)
        over = self._finished == len(self._spool)
        if not over:
            self._dispatch_due()
        exchange.wire = b""
        self._meter.received(len(exchange.response.reads))
        self._unread_bytes += size
        if self._unread_bytes > BUFFER_LIMIT_BYTES:
            self._read_in_the_phase()
        if over and not self._over.done():
            self._ended_ns = now_ns
            self._over.set_result(None)

    # The beat: loop lag, timeouts, progress.

    def _start_beating(self) -> None:
        self._swept_ns = self._reported_ns = self._began_ns
        self._beat_due_ns = perf_counter_ns() + round(BEAT_SECONDS * 1e9)
        self._timers["beat"] = self._loop.call_later(BEAT_SECONDS, self._beat)

    def _beat(self) -> None:
        now_ns = perf_counter_ns()
        self._meter.beat(max(0, now_ns - self._beat_due_ns))
        try:
            self._sweep(now_ns)
            self._report_progress(now_ns)
        except Exception as error:
            # Nothing awaits a timer: without this the phase would go on without timeouts.
            self._fail(error)
            return
        self._beat_due_ns = perf_counter_ns() + round(BEAT_SECONDS * 1e9)
        self._timers["beat"] = self._loop.call_later(BEAT_SECONDS, self._beat)

    def _fail(self, error: Exception) -> None:
        if not self._over.done():
            self._over.set_exception(error)

    def _sweep(self, now_ns: int) -> None:
        if not self._to_look_at and now_ns - self._swept_ns >= self._sweep_ns:
            self._swept_ns = now_ns
            self._to_look_at = list(self._in_flight)
            beats = max(1, self._sweep_ns // round(BEAT_SECONDS * 1e9))
            self._looks_a_beat = -(-len(self._to_look_at) // beats)
        now, self._to_look_at = self._to_look_at[: self._looks_a_beat], self._to_look_at[self._looks_a_beat :]
        for exchange in self._in_flight.intersection(now):
            silent_ns = now_ns - exchange.last_activity_ns
            if now_ns - exchange.began_ns > self._request_timeout_ns:
                self._time_out(exchange, "request_timeout", f"no end in {self._spec.request_timeout_seconds} s")
            elif silent_ns > self._idle_timeout_ns:
                self._time_out(exchange, "idle_timeout", f"no byte for {self._spec.idle_timeout_seconds} s")
            elif exchange.connection is not None:
                self._look_at(exchange, exchange.connection, silent_ns, now_ns)

    def _look_at(self, exchange: Exchange, connection: Connection, silent_ns: int, now_ns: int) -> None:
        """Mind the size of a response; look for an end that its last read did not show, once it has fallen silent."""
        response = exchange.response
        try:
            response.mind_its_size()
            if silent_ns > QUIET_NS and response.unframed:
                response.frame()
        except MalformedResponse as problem:
            self.on_failed(exchange, "malformed_stream", str(problem))
            return
        if response.complete:
            self.on_answered(exchange, connection, now_ns)

    def _time_out(self, exchange: Exchange, error_class: ErrorClass, detail: str) -> None:
        self.on_failed(exchange, error_class, f"{detail}, {_stage(exchange)}")

    def _report_progress(self, now_ns: int) -> None:
        if self._on_progress is not None and now_ns - self._reported_ns >= PROGRESS_NS:
            self._reported_ns = now_ns
            self._on_progress(self._finished, len(self._spool))

    # A deadlock of the engine.

    def _watch_for_deadlock(self, engine: int) -> DeadlockWatch:
        def silent_since() -> float | None:
            in_flight = {exchange for exchange in self._in_flight.copy() if exchange.engine == engine}
            if not in_flight:
                return None
            return time.monotonic() - (perf_counter_ns() - max(e.last_activity_ns for e in in_flight)) / 1e9

        def tell(sentence: str) -> None:
            self._loop.call_soon_threadsafe(self._on_deadlock, sentence)

        return DeadlockWatch(self._spec.urls()[engine], self._spec.deadlock_seconds, silent_since, tell)

    def _on_deadlock(self, sentence: str) -> None:
        """End every request in flight, and every one to come: nothing of this arm can be measured any more."""
        if self._over.done():
            return
        self._deadlock = sentence
        self._filling = True  # the slots are filled once, below, not from within each end
        for exchange in list(self._in_flight):
            self.on_failed(exchange, "deadlock", f"{sentence}; {_stage(exchange)}")
        self._filling = False
        self._dispatch_due()

    # Results.

    def _read_in_the_phase(self) -> None:
        if "read" not in self._timers:
            self._timers["read"] = self._loop.call_later(READ_EVERY_SECONDS, self._read_some)
        try:
            while self._unread and self._unread_bytes > 2 * BUFFER_LIMIT_BYTES:
                self._read_next()
        except Exception as error:
            self._fail(error)

    def _read_some(self) -> None:
        """Read buffered answers for a moment."""
        del self._timers["read"]
        give_up_ns = perf_counter_ns() + READ_SLICE_NS
        try:
            while self._unread and self._unread_bytes > BUFFER_LIMIT_BYTES // 2 and perf_counter_ns() < give_up_ns:
                self._read_next()
        except Exception as error:
            self._fail(error)
            return
        if self._unread_bytes > BUFFER_LIMIT_BYTES // 2:
            self._timers["read"] = self._loop.call_later(READ_EVERY_SECONDS, self._read_some)

    def _read_next(self) -> None:
        exchange, size = self._unread.popleft()
        self._unread_bytes -= size
        self._on_result(result_of(exchange, self._began_ns, self._spool))


def _size_of(exchange: Exchange) -> int:
    """Bytes in memory. Past the limit of a body what counts of it is what was counted before."""
    try:
        return EXCHANGE_BYTES + exchange.response.measure()
    except MalformedResponse:
        return EXCHANGE_BYTES + exchange.response.received_bytes


def _stage(exchange: Exchange) -> str:
    if exchange.sent_ns is None:
        return "not connected yet"
    if exchange.first_byte_ns is None:
        return "nothing of the answer"
    return "in the answer"
