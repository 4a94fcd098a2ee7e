"""The HTTP/1.1 reader: any split gives the same, stamps belong to reads, and bad bytes have one error."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtrial.host.load import http1
from kvtrial.host.load.http1 import MalformedResponse, Response, post_bytes

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: Text/Event-Stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKED = HEAD + b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"


def read(pieces: list[bytes]) -> Response:
    response = Response()
    for number, piece in enumerate(pieces):
        feed(response, piece, number)
    return response


def feed(response: Response, piece: bytes, stamp_ns: int) -> None:
    response.reads.append(piece)
    response.stamps_ns.append(stamp_ns)
    response.frame()


def body_of(response: Response) -> bytes:
    return b"".join(response.frame().chunks)


@given(st.lists(st.integers(0, len(CHUNKED)), max_size=30))
def test_any_split_gives_the_same_body_with_a_stamp_for_each_chunk(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(CHUNKED)]
    response = read([CHUNKED[begin:end] for begin, end in itertools.pairwise(edges) if end > begin])
    body = response.frame()
    assert body_of(response) == b"hello world"
    assert len(body.chunks) == len(body.stamps_ns)
    assert body.stamps_ns == sorted(body.stamps_ns)
    assert (response.status, response.complete, response.keep_alive) == (200, True, True)
    assert response.content_type == "text/event-stream; charset=utf-8"


def test_a_chunk_has_the_stamp_of_the_read_that_brought_it() -> None:
    body = read([HEAD + b"5\r\nhe", b"llo\r\n6\r\n world\r\n", b"0\r\n\r\n"]).frame()
    assert list(zip(body.chunks, body.stamps_ns, strict=True)) == [(b"he", 0), (b"llo", 1), (b" world", 1)]


def test_a_response_with_a_length_is_complete_with_its_last_byte() -> None:
    response = read([b"HTTP/1.1 400 Bad Request\r\nContent-Length: 3\r\n\r\non"])
    assert not response.complete
    feed(response, b"e", 1)
    assert (response.complete, response.status, response.keep_alive, response.streaming) == (True, 400, True, False)
    assert body_of(response) == b"one"


STREAM = HEAD + b'15\r\ndata: {"choices":1}\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n'


@given(st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_the_end_of_a_stream_is_seen_at_its_last_byte_whatever_the_split(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    response = Response()
    pieces = [STREAM[begin:end] for begin, end in itertools.pairwise(edges) if end > begin]
    for number, piece in enumerate(pieces, start=1):
        response.reads.append(piece)
        response.stamps_ns.append(0)
        # As the connection does it: a running stream is looked at only where its end may be.
        if not response.streaming or piece.endswith(http1.END_OF_MESSAGE) or len(piece) < len(http1.END_OF_MESSAGE):
            assert response.look() == (number == len(pieces))
    assert response.complete
    assert body_of(response).endswith(b"data: [DONE]\n\n")
    assert response.ended


def test_what_looks_like_the_end_inside_a_chunk_is_not_the_end() -> None:
    response = Response()
    response.reads.append(HEAD + b"9\r\na\r\n0\r\n\r\n")
    response.stamps_ns.append(0)
    assert not response.look()
    feed(response, b"b\r\n0\r\n\r\n", 1)
    assert response.complete
    assert body_of(response) == b"a\r\n0\r\n\r\nb"


def test_an_interim_response_is_skipped() -> None:
    response = read([b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED])
    assert (response.status, body_of(response), response.complete) == (200, b"hello world", True)


def test_connection_close_is_heard() -> None:
    assert not read([HEAD.replace(b"Content-Type", b"Connection: close\r\nA") + b"0\r\n\r\n"]).keep_alive


def test_a_body_until_close_is_kept_but_never_complete() -> None:
    response = read([b"HTTP/1.1 200 OK\r\n\r\nabc", b"def"])
    assert (body_of(response), response.complete, response.keep_alive) == (b"abcdef", False, False)


def test_an_unasked_response_does_not_touch_the_one_before() -> None:
    response = read([CHUNKED + b"HTTP/1.1 500 Oops\r\nContent-Length: 2\r\nContent-Type: a/b\r\n\r\nno"])
    assert response.surplus
    assert (response.status, body_of(response)) == (200, b"hello world")


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x00" * 10,
        HEAD + b"zz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: " + b"a" * (http1.HEADER_LIMIT_BYTES + 1),
    ],
)
def test_what_is_no_response_has_the_declared_error(data: bytes) -> None:
    with pytest.raises(MalformedResponse):
        read([data])


def test_a_body_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "BODY_LIMIT_BYTES", 10)
    with pytest.raises(MalformedResponse, match="more than 10 bytes"):
        read([CHUNKED])


def test_random_bytes_raise_nothing_but_the_declared_error() -> None:
    rng, refused = random.Random(3), 0
    for _ in range(500):
        noise = rng.randbytes(rng.randint(1, 2000))
        response = Response()
        try:
            for piece in (rng.choice([b"", b"HTTP/1.1 ", HEAD, HEAD + b"5\r\nhello\r\n"]), noise, noise):
                feed(response, piece, 0)
        except MalformedResponse:
            refused += 1
    assert refused > 400


def test_a_request_is_framed_as_one_post() -> None:
    assert post_bytes("127.0.0.1:8000", "/v1/completions", b'{"a":1}') == (
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nContent-Type: application/json\r\n"
        b'Accept: text/event-stream\r\nContent-Length: 7\r\n\r\n{"a":1}'
    )
