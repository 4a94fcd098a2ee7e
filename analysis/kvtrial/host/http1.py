"""HTTP/1.1 as the load client needs it, without I/O: the bytes of a POST, and a reader of responses.

The reader keeps body chunks raw, each with the stamp of the read that brought it; it looks at nothing in the body.
"""

import httptools
import msgspec

HEADER_LIMIT_BYTES = 64 << 10
BODY_LIMIT_BYTES = 256 << 20


class MalformedResponse(Exception):
    """The bytes are no HTTP/1.1 response, or one beyond the limits. The message says what was seen."""


class Response(msgspec.Struct, kw_only=True):
    """A response as far as it arrived. `chunks` and `stamps_ns` have equal length; `complete`: the message ended."""

    status: int | None = None
    content_type: str | None = None
    chunks: list[bytes] = []
    stamps_ns: list[int] = []
    body_bytes: int = 0
    complete: bool = False
    keep_alive: bool = False


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


class ResponseReader:
    """Reads the responses of one connection, one at a time: `feed` until `complete`, then `take`.

    Interim (1xx) responses are skipped. `surplus` is true once bytes came that no request asked for: the connection
    cannot be used again. The parser and its reader hold each other, so `close` it where the collector is off.
    """

    __slots__ = ("_header_bytes", "_now_ns", "_parser", "_response", "_skipping", "surplus")

    def __init__(self) -> None:
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._response = Response()
        self._now_ns = 0
        self._header_bytes = 0
        self._skipping = False
        self.surplus = False

    @property
    def complete(self) -> bool:
        """The response ended; `take` it before the next one."""
        return self._response.complete

    def feed(self, data: bytes, stamp_ns: int) -> None:
        """Take bytes that arrived at `stamp_ns`. Raises MalformedResponse; the connection is then of no further use."""
        if self._parser is None:
            raise MalformedResponse("bytes after the connection was given up")
        self._now_ns = stamp_ns
        if self._response.status is None:
            self._header_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise MalformedResponse("a switch to another protocol") from None
        except httptools.HttpParserError as error:
            raise MalformedResponse(f"no HTTP/1.1 response ({error})") from None
        if self._response.status is None and self._header_bytes > HEADER_LIMIT_BYTES:
            raise MalformedResponse(f"headers of more than {HEADER_LIMIT_BYTES} bytes")
        if self._response.body_bytes > BODY_LIMIT_BYTES:
            raise MalformedResponse(f"a body of more than {BODY_LIMIT_BYTES} bytes")

    def take(self) -> Response:
        """Hand out what arrived, whole or not, and make ready for the next response."""
        response, self._response = self._response, Response()
        self._header_bytes = 0
        return response

    def close(self) -> None:
        """Let go of the parser. Idempotent."""
        self._parser = None

    def on_message_begin(self) -> None:
        """Called by the parser: a response begins."""
        if self._response.complete:
            self.surplus = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser: one header."""
        if name.lower() == b"content-type" and not self.surplus:
            self._response.content_type = value.decode("latin-1").strip().lower()

    def on_headers_complete(self) -> None:
        """Called by the parser: the status and the headers are known."""
        assert self._parser is not None
        status = self._parser.get_status_code()
        self._skipping = 100 <= status < 200
        if not self._skipping and not self.surplus:
            self._response.status = status

    def on_body(self, body: bytes) -> None:
        """Called by the parser: bytes of the body, freed of their framing."""
        if self.surplus or self._skipping:
            return
        response = self._response
        response.chunks.append(body)
        response.stamps_ns.append(self._now_ns)
        response.body_bytes += len(body)

    def on_message_complete(self) -> None:
        """Called by the parser: the response ended."""
        if self._skipping or self.surplus:
            return
        assert self._parser is not None
        self._response.keep_alive = self._parser.should_keep_alive()
        self._response.complete = True
