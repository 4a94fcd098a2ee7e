"""One request on its way, and the connection that carries it.

A read is stamped and kept; nothing else happens in the receive callback of a running stream.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Generator
from time import perf_counter_ns
from typing import Protocol, cast

from kvtrial.host.load.http1 import MalformedResponse, Response
from kvtrial.record.load import ErrorClass, RequestError

_CARRIAGE_RETURN = 13


class Exchange:
    """One request from before its dispatch to its result.

    Times are perf_counter_ns. The dispatcher sets when it was due, `scheduled_ns`, when it began to send it, and to
    which of the engines.
    """

    __slots__ = (
        "began_ns",
        "connecting",
        "connection",
        "engine",
        "error",
        "key",
        "number",
        "prompt_sha256",
        "response",
        "scheduled_ns",
        "sent_ns",
        "wire",
    )

    def __init__(self, number: int, key: str, prompt_sha256: str, wire: bytes) -> None:
        self.number = number
        self.key = key
        self.prompt_sha256 = prompt_sha256
        self.wire = wire
        self.scheduled_ns = 0
        self.began_ns = 0
        self.engine = 0
        self.sent_ns: int | None = None
        self.connecting: asyncio.Task[None] | None = None
        self.connection: Connection | None = None
        self.response = Response()
        self.error: RequestError | None = None

    @property
    def first_byte_ns(self) -> int | None:
        """When the first byte of the response came."""
        return self.response.stamps_ns[0] if self.response.reads else None

    @property
    def last_activity_ns(self) -> int:
        """When the last byte came; before the first, when the request was sent or its dispatch began."""
        if self.response.reads:
            return self.response.stamps_ns[-1]
        return self.sent_ns or self.began_ns


class Owner(Protocol):
    """Whoever opened the connections and is told what happens on them."""

    def on_connected(self, connection: "Connection") -> None:
        """The connection is open."""

    def on_disconnected(self, connection: "Connection", error: Exception | None) -> None:
        """The connection is closed; its exchange, if it has one, is still on it."""

    def on_answered(self, exchange: Exchange, connection: "Connection", now_ns: int) -> None:
        """The whole response is there; the exchange is still on the connection."""

    def on_failed(self, exchange: Exchange, error_class: ErrorClass, detail: str) -> None:
        """The exchange cannot go on; it is still on its connection, if it has one."""


def receiving(connection: "Connection", response: Response) -> Generator[None, bytes, None]:
    """The receive callback of one response, by its `send`: stamp a read, keep it, and see whether it may be the last.

    A generator, since one resumed by `send` costs less than a method called, and looks nothing up.
    """
    clock, stamp, keep, length = perf_counter_ns, response.stamps_ns.append, response.reads.append, len
    received_bytes = 0
    while not response.streaming:
        data = yield
        stamp(clock())
        keep(data)
        received_bytes += length(data)
        response.count(received_bytes)
        connection.look()
    while True:
        data = yield
        stamp(clock())
        keep(data)
        received_bytes += length(data)
        # A stream ends with END_OF_MESSAGE; where an event ends, the fourth byte from its end is another.
        with contextlib.suppress(IndexError):
            while data[-4] != _CARRIAGE_RETURN:
                data = yield
                stamp(clock())
                keep(data)
                received_bytes += length(data)
        response.count(received_bytes)
        connection.look()


def _ignore(_: bytes) -> None:
    """What is done with reads while there is no connection."""


class Connection(asyncio.BaseProtocol):
    """One kept-alive connection to one of the engines, with at most one exchange on it.

    `data_received` is called by the loop for every read.
    """

    __slots__ = (
        "_descriptor",
        "_owner",
        "_response",
        "_transport",
        "data_received",
        "engine",
        "exchange",
        "idle_since_ns",
    )

    def __init__(self, owner: Owner, engine: int = 0) -> None:
        self._owner = owner
        self.engine = engine
        self._response: Response | None = None
        self._transport: asyncio.Transport | None = None
        self.exchange: Exchange | None = None
        self._descriptor = -1
        self.idle_since_ns = 0
        self.data_received: Callable[[bytes], None] = _ignore

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop: the connection is open."""
        # A cast, not a check: uvloop's transports are not registered as asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)
        self._descriptor = transport.get_extra_info("socket").fileno()
        # asyncio and uvloop both set TCP_NODELAY on their TCP transports.
        self.idle_since_ns = perf_counter_ns()
        self._hand_reads_to(self._unasked)
        self._owner.on_connected(self)

    def eof_received(self) -> None:
        """Called by the loop: the server writes no more; the loop then closes the connection."""

    def _unasked(self, _: bytes) -> None:
        self.abort()

    def _hand_reads_to(self, callback: Callable[[bytes], None]) -> None:
        if self._transport is not None:
            self.data_received = callback
            self._transport.set_protocol(self)  # uvloop asks a protocol for its callback only then

    def look(self) -> None:
        """See whether the response has ended, and tell the owner."""
        exchange, response = self.exchange, self._response
        if exchange is None or response is None:
            self.abort()  # nobody asked for these bytes
            return
        try:
            complete = response.look()
        except MalformedResponse as problem:
            self._owner.on_failed(exchange, "malformed_stream", str(problem))
            return
        if complete:
            self._owner.on_answered(exchange, self, response.stamps_ns[-1])

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop: the connection is gone."""
        self._transport = None
        self.data_received = _ignore  # with the collector off a method of its own would keep it in memory
        self._owner.on_disconnected(self, exc)

    @property
    def usable(self) -> bool:
        """Open, and no exchange on it."""
        return self.exchange is None and self._transport is not None and not self._transport.is_closing()

    def send(self, exchange: Exchange) -> int:
        """Write the request; return the stamp taken just before."""
        assert self._transport is not None
        self.exchange = exchange
        exchange.connection = self
        self._response = response = exchange.response
        receiver = receiving(self, response)
        next(receiver)
        self._hand_reads_to(receiver.send)
        wire, exchange.wire = exchange.wire, b""
        sent_ns = perf_counter_ns()
        exchange.sent_ns = sent_ns
        # Not through the transport: uvloop would write after all that is ready in this turn of the loop, so that of a
        # burst none left before the last was stamped. What the socket does not take at once is left to the transport.
        written = 0
        if not self._transport.get_write_buffer_size():
            with contextlib.suppress(OSError):  # the transport meets it again and tells
                written = os.write(self._descriptor, wire)
        if written < len(wire):
            self._transport.write(wire[written:])
        return sent_ns

    def release(self) -> None:
        """Part from the exchange. Closes what cannot be used again."""
        if self.exchange is not None:
            self.exchange.connection = None
            self.exchange = None
        response, self._response = self._response, None
        self._hand_reads_to(self._unasked)
        if response is None or response.surplus or not response.keep_alive:
            self.close()

    def close(self) -> None:
        """Close once everything is written."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()
