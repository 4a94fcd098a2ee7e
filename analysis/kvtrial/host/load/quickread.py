"""A quick reader for streams of vLLM: most events repeat all but their text and their token id.

What they repeat is known from the first event of their kind. What differs is cut out of many at once, and what repeats
is put around it again, which must give the very bytes that came. Every other event goes to the general parser. Whatever
the reader is not sure of makes it give up (None): the general readers (`http1`, `sse`) then say what the bytes are.
Where it answers, it answers as they do; a property test holds it to that.
"""

import re
from array import array
from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate, repeat
from operator import getitem
from typing import cast

import msgspec

from kvtrial.host.load.sse import MalformedStream, Reading, StreamedAnswer

_END = b"0\r\n\r\n"
_BEFORE_EVENT = b"\r\ndata: "
_END_OF_EVENT = b"\n\n\r\n"
_CHUNK = re.compile(rb"([0-9a-f]{1,7})\r\n")
_TEXT = rb'[^"\\\x00-\x1f]*+(?:\\["\\/bfnrt][^"\\\x00-\x1f]*+)*+'
_EVENT = re.compile(
    rb'\{"id":"[^\\]*?"text":"(?P<text>' + _TEXT + rb')(?P<between>"[^\\]*?"token_ids":\[)(?:0|[1-9][0-9]{0,8})'
    rb"(?P<close>\][^\\]*)"
)  # fmt: skip
_TEXT_KEY = b'"text":"'
_IDS_KEY = b'"token_ids":['
_TEXTS_AND_IDS = re.compile(rb"(?:" + _TEXT + rb"\t(?:0|[1-9][0-9]{0,8})\n)*+")
_PLAIN = bytes(byte for byte in range(32, 256) if byte not in b'"\\')
_cut = cast(Callable[[bytes, slice], bytes], getitem)
_AT_ONCE = 128
_AT_ONCE_AFTER_A_FAILURE = 8
_ODD = 8
_ids_decoder = msgspec.json.Decoder(list[int])


class _Shape:
    """How an event of a stream goes, and so those that differ from it in text and token id alone.

    Its chunk is the size, `head`, the text, `between`, the id, and `tail`. By a chunk's size in all, of those that
    `knows` was asked about: `begins` is the tail of the chunk before and what stands before the text, `cuts` is where
    text, `between` and id are.
    """

    def __init__(self, found: re.Match[bytes]) -> None:
        self.head = _BEFORE_EVENT + found.string[: found.start("text")]
        self.between = found["between"]
        self.tail = found["close"] + _END_OF_EVENT
        self.begins: dict[int, bytes] = {}
        self.cuts: dict[int, slice] = {}

    def fits(self, chunk: bytes) -> bool:
        """Whether the chunk, with or without its tail, looks like one event of this shape."""
        return self.between in chunk and chunk.startswith(self.head, chunk.find(b"\r"))

    def fits_at(self, body: bytes, at: int) -> bool:
        """Whether the chunk that begins at `at` looks so."""
        size_end = body.find(b"\r", at, at + 8)
        if size_end < 0 or not body.startswith(self.head, size_end):
            return False
        text_at = size_end + len(self.head)
        return body.find(self.between, text_at, body.find(b"\n", text_at)) >= 0

    def knows(self, sizes: list[int]) -> bool:
        """Whether chunks can have these sizes in all."""
        for size in set(sizes).difference(self.cuts):
            size_line = _size_line(size)
            if not size_line:
                return False
            self.begins[size] = self.tail + size_line + self.head
            self.cuts[size] = slice(len(size_line) + len(self.head), size - len(self.tail))
        return True


@lru_cache(maxsize=1024)
def _size_line(size: int) -> bytes:
    """The hexadecimal digits that a chunk of `size` bytes in all begins with; empty where there is no such chunk."""
    sizes = (b"%x" % max(0, size - digits - len(b"\r\n\r\n")) for digits in range(1, 8))
    return next((line for digits, line in enumerate(sizes, start=1) if len(line) == digits), b"")


def read_quickly(reads: list[bytes], stamps_ns: "array[int]") -> StreamedAnswer | None:
    """Read the framed body of a whole stream; None where it is not plainly one that the general readers would accept.

    `reads`: the body as it was read, in pieces of one byte or more; `stamps_ns`: the stamp of each.
    """
    stream = _Stream(reads, stamps_ns)
    body, end = stream.body, len(stream.body) - len(_END)
    if not body.endswith(_END) or not _is_utf8(body):
        return None
    reading = Reading()
    shape: _Shape | None = None
    before: bytes | None = None
    at = 0
    try:
        while at < end:
            if before is not None and _begins_alike(before, body, at):
                shape = _shape_of(before) or shape
            if shape is not None and shape.fits_at(body, at) and (ran_to := _read_run(reading, shape, stream, at)) > at:
                at, before = ran_to, None
                continue
            before, next_at = _one_event(body, at)
            if before is None:
                return None
            reading.take(before, stamps_ns[stream.read_that_completed(next_at)])
            at = next_at
    except MalformedStream:
        return None
    return reading.close() if at == end and reading.answer.done else None


class _Stream:
    """A body, and where each read of it ended."""

    def __init__(self, reads: list[bytes], stamps_ns: "array[int]") -> None:
        self.reads = reads
        self.stamps_ns = stamps_ns
        self.body = b"".join(reads)
        self.sizes = list(map(len, reads))
        self.ends = list(accumulate(self.sizes))
        self.aligned = True
        self.at_once = _AT_ONCE

    def read_that_begins(self, at: int) -> int | None:
        """The read that begins with the byte at `at`; None where none does."""
        number = bisect_left(self.ends, at + 1)
        return number if (self.ends[number - 1] if number else 0) == at else None

    def read_that_completed(self, chunk_end: int) -> int:
        """The read that completed the event in the chunk that ends at `chunk_end`: its data ends two bytes before."""
        return bisect_left(self.ends, chunk_end - 2)


def _is_utf8(body: bytes) -> bool:
    try:
        return body.isascii() or bool(body.decode())
    except UnicodeDecodeError:
        return False


def _one_event(body: bytes, at: int) -> tuple[bytes | None, int]:
    """The event in the chunk at `at` and where the chunk ends; no event where the chunk is not exactly one."""
    head = _CHUNK.match(body, at)
    if head is None:
        return None, at
    begin = head.end()
    end = begin + int(head[1], 16)
    plain = (
        body.startswith(b"data: ", begin)
        and body.startswith(b"\n\n\r\n", end - 2)
        and body.find(b"\n", begin) == end - 2
        and b"\r" not in body[begin:end]
    )
    return (body[begin + 6 : end - 2], end + 2) if plain else (None, at)


def _begins_alike(event: bytes, body: bytes, at: int) -> bool:
    """Whether the event in the chunk at `at` goes like `event` up to its text."""
    text_at, begin = event.find(_TEXT_KEY), body.find(_BEFORE_EVENT, at, at + 16)
    if text_at < 0 or begin < 0:
        return False
    return body.startswith(event[: text_at + len(_TEXT_KEY)], begin + len(_BEFORE_EVENT))


def _shape_of(event: bytes) -> _Shape | None:
    """The shape of an event that the general parser took, if others may differ from it in text and id alone."""
    found = _EVENT.fullmatch(event)
    if found is None or event.count(_TEXT_KEY) != 1 or event.count(_IDS_KEY) != 1:
        return None
    if _says_more(event):
        return None
    return _Shape(found)


def _says_more(event: bytes) -> bool:
    """Whether the event says more than a token: an end, usage, an error; that must not stand in every event."""
    try:
        parsed = msgspec.json.decode(event)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return True
    choices = parsed.get("choices")
    return (
        parsed.get("usage") is not None
        or parsed.get("error") is not None
        or not isinstance(choices, list)
        or len(choices) != 1
        or choices[0].get("finish_reason") is not None
        or choices[0].get("token_ids") is None
    )


def _read_run(reading: Reading, shape: _Shape, stream: _Stream, at: int) -> int:
    """Read events of the shape from `at` on, many at once, and return where they end: `at` where it is not sure."""
    first = stream.read_that_begins(at) if stream.aligned else None
    if first is not None:
        reads = stream.reads[first : first + stream.at_once]
        last = first + _without_odd_end(shape, reads)
        ids = _ids_of(shape, stream.body, at, reads, stream.sizes[first:last])
        if ids:
            reading.take_tokens(ids, stream.stamps_ns[first:last].tolist())
            return stream.ends[last - 1]
    # Reads and events don't begin together: the events are cut out of the body.
    stream.aligned = False
    first_size = stream.body.find(b"\n", stream.body.find(b"\n", at) + 1) + len(_END_OF_EVENT) - at
    pieces = stream.body[at : at + stream.at_once * first_size].split(shape.tail)[:-1]
    sizes = [len(piece) + len(shape.tail) for piece in pieces[: _without_odd_end(shape, pieces)]]
    ids = _ids_of(shape, stream.body, at, pieces, sizes)
    if not ids:
        stream.at_once = _AT_ONCE_AFTER_A_FAILURE
        return at
    stream.at_once = _AT_ONCE
    # An event was complete once its data were there, which end two bytes before its chunk.
    completed = list(accumulate(sizes, initial=at - 2))
    numbers = map(bisect_left, repeat(stream.ends), completed[1:])
    reading.take_tokens(ids, list(map(stream.stamps_ns.__getitem__, numbers)))
    return completed[-1] + 2


def _without_odd_end(shape: _Shape, chunks: list[bytes]) -> int:
    """How many of the chunks to take for events of the shape: all but some at the end that end a stream."""
    count = len(chunks)
    while count and len(chunks) - count < _ODD and not shape.fits(chunks[count - 1]):
        count -= 1
    return count


def _ids_of(shape: _Shape, body: bytes, at: int, chunks: list[bytes], sizes: list[int]) -> list[int] | None:
    """The token ids of the first chunks from byte `at` of the body on; None where not each is an event of the shape.

    `sizes`: of so many chunks, with the tails that they may have or not.
    """
    if not shape.knows(sizes):
        return None
    middles = list(map(_cut, chunks, map(shape.cuts.__getitem__, sizes)))
    parts = [b""] * (2 * len(sizes))
    parts[::2] = map(shape.begins.__getitem__, sizes)
    parts[1::2] = middles
    rebuilt = b"".join(parts) + shape.tail
    if len(rebuilt) != len(shape.tail) + sum(sizes) or not body.startswith(rebuilt[len(shape.tail) :], at):
        return None
    joined = b"\n".join(middles) + b"\n"
    # A tab and a line's end stand in no JSON text; the bracket that ends what is between may, and is found faster.
    texts_and_ids = b"\t".join(map(bytes.removesuffix, joined.split(b"["), repeat(shape.between[:-1])))
    expected_bytes = len(joined) - len(sizes) * (len(shape.between) - 1)
    if len(texts_and_ids) != expected_bytes:
        texts_and_ids = joined.replace(shape.between, b"\t")
    if len(texts_and_ids) != expected_bytes or not _are_texts_and_ids(texts_and_ids, len(sizes)):
        return None
    ids = texts_and_ids.replace(b"\t", b"\n").split(b"\n")[1::2]
    try:
        decoded = _ids_decoder.decode(b"[" + b",".join(ids) + b"]")
    except msgspec.DecodeError:
        return None
    return decoded if len(ids) == len(sizes) == len(decoded) else None


def _are_texts_and_ids(lines: bytes, count: int) -> bool:
    """Whether the lines are `count` times a text that may stand in JSON, a tab, and what may be an id."""
    return lines.translate(None, _PLAIN) == b"\t\n" * count or _TEXTS_AND_IDS.fullmatch(lines) is not None
