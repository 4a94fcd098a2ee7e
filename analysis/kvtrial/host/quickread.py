"""A quick reader for streams of vLLM: most events repeat all but their text and their token id.

It reads such runs by one regular expression, which is made from the first event of its kind, and hands every other
event to the general parser. Whatever it is not sure of makes it give up (None): the general readers (`http1`, `sse`)
then say what the bytes are. Where it answers, it answers as they do; a property test holds it to that.
"""

import re
from array import array
from bisect import bisect_left
from functools import lru_cache
from itertools import accumulate

import msgspec

from kvtrial.host.sse import MalformedStream, Reading, StreamedAnswer

_END = b"0\r\n\r\n"
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


def read_quickly(body: bytes, read_ends: list[int], stamps_ns: "array[int]") -> StreamedAnswer | None:
    """Read the framed body of a whole stream; None where it is not plainly one that the general readers would accept.

    `read_ends`: where in `body` each read ended, ascending; `stamps_ns` its stamp.
    """
    if not body.endswith(_END) or not _is_utf8(body):
        return None
    reading = Reading()
    template: _Template | None = None
    at, end = 0, len(body) - len(_END)
    try:
        while at < end:
            if template is not None:
                ran_to = _read_run(reading, template, body, at, read_ends, stamps_ns)
                if ran_to is None:
                    return None
                if ran_to > at:
                    at = ran_to
                    continue
            event, next_at = _one_event(body, at)
            if event is None:
                return None
            reading.take(event, stamps_ns[bisect_left(read_ends, next_at - 2)])
            template = _template_of(event) or template
            at = next_at
    except MalformedStream:
        return None
    return reading.close() if at == end and reading.answer.done else None


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


def _read_run(
    reading: Reading, template: _Template, body: bytes, at: int, read_ends: list[int], stamps_ns: "array[int]"
) -> int | None:
    """Read the events of the template from `at` on; return where they end, None where a chunk's size is wrong."""
    found = template.findall(body, at, len(body) - len(_END))
    if found and not found[-1][0]:
        found.pop()
    if not found:
        return at
    sizes, heads, texts, ids = zip(*found, strict=True)
    constant = template.constant_bytes
    lengths = [constant + a + b + c for a, b, c in zip(map(len, heads), map(len, texts), map(len, ids), strict=True)]
    length_of = {size: int(size, 16) for size in set(sizes)}
    if list(map(length_of.__getitem__, sizes)) != lengths:
        return None
    spans = [len(size) + len(b"\r\n\r\n") + length for size, length in zip(sizes, lengths, strict=True)]
    ends = list(accumulate(spans, initial=at))[1:]
    # An event is complete where its data ends: before the two bytes that close its chunk.
    first = bisect_left(read_ends, ends[0] - 2)
    if read_ends[first : first + len(ends)] == ends:
        stamps = stamps_ns[first : first + len(ends)].tolist()
    else:
        stamps = [stamps_ns[bisect_left(read_ends, end - 2)] for end in ends]
    reading.take_tokens(_ids_decoder.decode(b"[" + b",".join(ids) + b"]"), stamps)
    return ends[-1]
