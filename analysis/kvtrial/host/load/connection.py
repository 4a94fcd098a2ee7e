"""One request on its way, and the connection that carries it.

A read is stamped and kept; nothing else happens in the receive callback of a running stream.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable
from time import perf_counter_ns
from typing import Protocol, cast

from kvtrial.host.load.http1 import END_OF_MESSAGE, MalformedResponse, Response
from kvtrial.record.load import ErrorClass, RequestError

_SHORT = len(END_OF_MESSAGE)


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


def _ignore(_: int | bytes) -> None:
    """What is done with a read that no request asked for."""


class Connection(asyncio.Protocol):
    """One kept-alive connection to one of the engines, with at most one exchange on it."""

    __slots__ = (
        "_descriptor",
        "_keep",
        "_owner",
        "_response",
        "_stamp",
        "_streaming",
        "_transport",
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
        # What a read needs, looked up once for each request and not for each read.
        self._stamp: Callable[[int], None] = _ignore
        self._keep: Callable[[bytes], None] = _ignore
        self._streaming = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop: the connection is open."""
        # A cast, not a check: uvloop's transports are not registered as asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)
        self._descriptor = transport.get_extra_info("socket").fileno()
        # asyncio and uvloop both set TCP_NODELAY on their TCP transports.
        self.idle_since_ns = perf_counter_ns()
        self._owner.on_connected(self)

    def data_received(self, data: bytes) -> None:
        """Called by the loop for every read: stamp it, keep it, and see whether it may be the last."""
        self._stamp(perf_counter_ns())
        self._keep(data)
        if self._streaming and not data.endswith(END_OF_MESSAGE) and len(data) >= _SHORT:
            return
        self._look()

    def _look(self) -> None:
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
        else:
            self._streaming = response.streaming

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop: the connection is gone."""
        self._transport = None
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
        self._stamp, self._keep, self._streaming = response.stamps_ns.append, response.reads.append, False
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
        self._stamp, self._keep, self._streaming = _ignore, _ignore, False
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
