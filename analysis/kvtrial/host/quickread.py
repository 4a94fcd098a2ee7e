"""A quick reader for streams of vLLM: most events repeat all but their text and their token id.

It reads such runs by one regular expression, which is made from the first event of its kind, and hands every other
event to the general parser. Whatever it is not sure of makes it give up (None): the general readers (`http1`, `sse`)
then say what the bytes are. Where it answers, it answers as they do; a property test holds it to that.
"""

import re
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate, repeat

import msgspec

from kvtrial.host.sse import MalformedStream, Reading, StreamedAnswer

_END = b"0\r\n\r\n"
_END_OF_EVENT = b"\n\n\r\n"
_CHUNK = re.compile(rb"([0-9a-f]{1,7})\r\n")
_TEXT = rb'[^"\\\x00-\x1f]*+(?:\\["\\/bfnrt][^"\\\x00-\x1f]*+)*+'
_EVENT = re.compile(
    rb'(?P<open>\{"id":")(?P<id>[^"\\\x00-\x1f]*+)(?P<mid>"[^\\]*?"created":)(?P<created>0|[1-9][0-9]{0,17})'
    rb'(?P<before>,[^\\]*?"text":")(?P<text>' + _TEXT + rb')(?P<after>"[^\\]*?"token_ids":\[)'
    rb"(?P<token>0|[1-9][0-9]{0,8})"
    rb"(?P<close>\][^\\]*)"
)  # fmt: skip
_TEXT_KEY = b'"text":"'
_IDS_KEY = b'"token_ids":['
_ids_decoder = msgspec.json.Decoder(list[int])


class _Template:
    """The expression for events of one shape: its groups are size, head, text and token id of a chunk of HTTP.

    At the first byte that fits no such event, the rest is swallowed by a match with empty groups.
    """

    def __init__(self, opening: bytes, middle: bytes, before: bytes, after: bytes, closing: bytes) -> None:
        self.constant_bytes = len(b"data: \n\n") + sum(map(len, (opening, before, after, closing)))
        self.findall = re.compile(
            rb"([0-9a-f]{1,7})\r\ndata: " + re.escape(opening)
            + rb'([^"\\\x00-\x1f]*+' + re.escape(middle) + rb"(?:0|[1-9][0-9]{0,17}))" + re.escape(before)
            + rb"(" + _TEXT + rb")" + re.escape(after) + rb"(0|[1-9][0-9]{0,8})" + re.escape(closing) + rb"\n\n\r\n"
            + rb"|(?s:.+)"
        ).findall  # fmt: skip


_template = lru_cache(maxsize=8)(_Template)


def read_quickly(reads: list[bytes], stamps_ns: "array[int]") -> StreamedAnswer | None:
    """Read the framed body of a whole stream; None where it is not plainly one that the general readers would accept.

    `reads`: the body as it was read, in pieces of one byte or more; `stamps_ns`: the stamp of each.
    """
    stream = _Stream(reads, stamps_ns)
    body, end = stream.body, len(stream.body) - len(_END)
    if not body.endswith(_END) or not _is_utf8(body):
        return None
    reading = Reading()
    template: _Template | None = None
    at = 0
    try:
        while at < end:
            if template is not None:
                ran_to = _read_run(reading, template, stream, at)
                if ran_to is None:
                    return None
                if ran_to > at:
                    at = ran_to
                    continue
            event, next_at = _one_event(body, at)
            if event is None:
                return None
            reading.take(event, stamps_ns[stream.read_that_completed(next_at)])
            template = _template_of(event) or template
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

    def read_that_completed(self, chunk_end: int) -> int:
        """The read that completed the event in the chunk that ends at `chunk_end`: its data ends two bytes before."""
        return bisect_left(self.ends, chunk_end - 2)

    def reads_of(self, begin: int, end: int, events: int) -> slice | None:
        """The reads from `begin` to `end` if each of them brought one of the `events` in between, and nothing else."""
        first, last = bisect_left(self.ends, begin + 1), bisect_left(self.ends, end) + 1
        if last - first != events or self.ends[last - 1] != end or (self.ends[first - 1] if first else 0) != begin:
            return None
        # As many reads as events, and each ends where an event does, which is nowhere else: so each is one.
        aligned = all(map(bytes.endswith, self.reads[first:last], repeat(_END_OF_EVENT)))
        return slice(first, last) if aligned else None


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


def _template_of(event: bytes) -> _Template | None:
    """The template of an event that the general parser took, if others may differ from it in text and id alone."""
    found = _EVENT.fullmatch(event)
    if found is None or event.count(_TEXT_KEY) != 1 or event.count(_IDS_KEY) != 1:
        return None
    if _says_more(event):
        return None
    return _template(found["open"], found["mid"], found["before"], found["after"], found["close"])


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


def _read_run(reading: Reading, template: _Template, stream: _Stream, at: int) -> int | None:
    """Read the events of the template from `at` on; return where they end, None where a chunk's size is wrong."""
    found = template.findall(stream.body, at, len(stream.body) - len(_END))
    if found and not found[-1][0]:
        found.pop()
    if not found:
        return at
    sizes, heads, texts, ids = zip(*found, strict=True)
    variable = sum(len(b"".join(parts)) for parts in (sizes, heads, texts, ids))
    end = at + variable + len(found) * (template.constant_bytes + len(b"\r\n\r\n"))
    reads = stream.reads_of(at, end, len(found))
    if reads is not None:
        spans: Iterable[int] = stream.sizes[reads]
        stamps = stream.stamps_ns[reads].tolist()
    else:
        constant = template.constant_bytes + len(b"\r\n\r\n")
        spans = [constant + sum(map(len, event)) for event in found]
        stamps = [stream.stamps_ns[stream.read_that_completed(end)] for end in list(accumulate(spans, initial=at))[1:]]
    if any(int(size, 16) + len(size) + len(b"\r\n\r\n") != span for size, span in set(zip(sizes, spans, strict=True))):
        return None
    reading.take_tokens(_ids_decoder.decode(b"[" + b",".join(ids) + b"]"), stamps)
    return end
