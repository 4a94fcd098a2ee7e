"""HTTP/1.1 as the load client needs it, without I/O: the bytes of a POST, and a response as it arrives.

While a stream runs nothing of it is parsed: its reads are kept as they came, each with its stamp. What is looked at is
only whether it may have ended. The framing is taken off afterwards.
"""

from array import array

import httptools
import msgspec

HEADER_LIMIT_BYTES = 64 << 10
BODY_LIMIT_BYTES = 256 << 20

READ_LIMIT_BYTES = 256 << 10
"""No loop reads more at once: asyncio 256 KiB, uvloop 256,000 bytes."""

END_OF_MESSAGE = b"\r\n\r\n"
"""A chunked message ends so, trailers or not. An event in its chunk ends otherwise: `\\n\\n\\r\\n`."""

_END_OF_STREAM = b"data: [DONE]\n\n\r\n0\r\n\r\n"


class MalformedResponse(Exception):
    """The bytes are no HTTP/1.1 response, or one beyond the limits. The message says what was seen."""


class Body(msgspec.Struct, kw_only=True):
    """A body freed of its framing. `chunks` and `stamps_ns` have equal length."""

    chunks: list[bytes] = []
    stamps_ns: list[int] = []


def post_bytes(host: str, path: str, body: bytes) -> bytes:
    """A whole POST of a JSON body on a connection to be kept. `host` is the Host header (`127.0.0.1:8000`)."""
    head = (
        f"POST {path} HTTP/1.1\r\n"
        f"Host: {host}\r\n"
        "Content-Type: application/json\r\n"
        "Accept: text/event-stream\r\n"
        f"Content-Length: {len(body)}\r\n"
        "\r\n"
    )
    return head.encode("ascii") + body


class Response:
    """One response as far as it arrived: `reads`, and `stamps_ns` of the same length (append to both, then `look`).

    `streaming`: the status is 200 and the body comes in chunks; then `look` is needed only after reads that end with
    END_OF_MESSAGE or are shorter than it. Interim (1xx) responses are skipped. `surplus`: bytes came that belong to no
    response that was asked for, so the connection cannot be used again. `close` it: it and its parser hold each other.
    """

    __slots__ = (
        "_body",
        "_ended",
        "_fed",
        "_framed_bytes",
        "_interim",
        "_now_ns",
        "_parser",
        "_sized",
        "complete",
        "content_type",
        "interim_seen",
        "keep_alive",
        "reads",
        "received_bytes",
        "stamps_ns",
        "status",
        "streaming",
        "surplus",
    )

    def __init__(self) -> None:
        self.reads: list[bytes] = []
        self.stamps_ns = array("q")
        self.status: int | None = None
        self.content_type: str | None = None
        self.keep_alive = False
        self.streaming = False
        self.complete = False
        self.surplus = False
        self.interim_seen = False
        self.received_bytes = 0
        self._framed_bytes = 0
        self._ended = False
        self._sized = 0
        self._fed = 0
        self._interim = False
        self._now_ns = 0
        self._body = Body()
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)

    def look(self) -> bool:
        """Whether the response is complete. Raises MalformedResponse."""
        if not (self.streaming and self._ends_plainly()):
            self.frame()
        else:
            self.complete = True
        return self.complete

    def _ends_plainly(self) -> bool:
        """Whether the last bytes are the stream's own end and that of its framing; anything else is worth a parse."""
        tail = self.reads[-1]
        at = len(self.reads) - 2
        while len(tail) < len(_END_OF_STREAM) and at >= 0:
            tail = self.reads[at] + tail
            at -= 1
        return tail.endswith(_END_OF_STREAM)

    def count(self, received_bytes: int) -> None:
        """Be told how many bytes all reads so far have."""
        self.received_bytes = received_bytes
        self._sized = len(self.reads)

    def measure(self) -> int:
        """Bytes received so far. Raises MalformedResponse past the limit of a body."""
        self.count(self.received_bytes + sum(map(len, self.reads[self._sized :])))
        if self.received_bytes > BODY_LIMIT_BYTES + HEADER_LIMIT_BYTES:
            raise MalformedResponse(f"a body of more than {BODY_LIMIT_BYTES} bytes")
        return self.received_bytes

    def mind_its_size(self) -> None:
        """Raise MalformedResponse past the limit of a body. Looks at no read while they can't be that many bytes."""
        if self.received_bytes + READ_LIMIT_BYTES * (len(self.reads) - self._sized) > BODY_LIMIT_BYTES:
            self.measure()

    @property
    def unframed(self) -> bool:
        """Some reads have not been through the parser yet."""
        return self._fed < len(self.reads)

    @property
    def ended(self) -> bool:
        """The parser saw the end of the message."""
        return self._ended

    def frame(self) -> Body:
        """Free the body of its framing, as far as it came. Raises MalformedResponse once; what came before is kept."""
        while self._fed < len(self.reads):
            if self._parser is None:
                raise MalformedResponse("bytes after the connection was given up")
            data = self.reads[self._fed]
            self._now_ns = self.stamps_ns[self._fed]
            self._fed += 1
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade:
                raise MalformedResponse("a switch to another protocol") from None
            except httptools.HttpParserError as error:
                raise MalformedResponse(f"no HTTP/1.1 response ({error})") from None
            if self.status is None and sum(map(len, self.reads[: self._fed])) > HEADER_LIMIT_BYTES:
                raise MalformedResponse(f"headers of more than {HEADER_LIMIT_BYTES} bytes")
            if self._framed_bytes > BODY_LIMIT_BYTES:
                raise MalformedResponse(f"a body of more than {BODY_LIMIT_BYTES} bytes")
        return self._body

    def close(self) -> None:
        """Let go of the parser. Idempotent."""
        self._parser = None

    def on_message_begin(self) -> None:
        """Called by the parser: a response begins."""
        self.surplus = self._ended

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser: one header."""
        if self.surplus:
            return
        lowered = name.lower()
        if lowered == b"content-type":
            self.content_type = value.decode("latin-1").strip().lower()
        elif lowered == b"transfer-encoding":
            self.streaming = value.strip().lower() == b"chunked"

    def on_headers_complete(self) -> None:
        """Called by the parser: the status and the headers are known."""
        assert self._parser is not None
        status = self._parser.get_status_code()
        self._interim = 100 <= status < 200
        if self._interim:
            self.interim_seen = True
            self.streaming = False
        elif not self.surplus:
            self.status = status
            self.streaming = self.streaming and status == 200
            self.keep_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        """Called by the parser: bytes of the body, freed of their framing."""
        if self.surplus or self._interim:
            return
        self._body.chunks.append(body)
        self._body.stamps_ns.append(self._now_ns)
        self._framed_bytes += len(body)

    def on_message_complete(self) -> None:
        """Called by the parser: the response ended."""
        if self._interim or self.surplus:
            return
        self._ended = self.complete = True
