"""Server-sent events of vLLM's /v1/completions, without I/O: bytes in, events out; stamped bytes in, an answer out.

Lines end at byte 0x0A and nowhere else. vLLM writes text into JSON unescaped, so U+0085, U+2028 and U+2029 stand inside
a line, and whoever splits by Unicode's rule (`str.splitlines`, and the line iterators of HTTP libraries) cuts the JSON
there.
"""

import hashlib
from collections.abc import Iterable
from operator import sub

import msgspec

EVENT_LIMIT_BYTES = 64 << 20
"""An event this long is no event: the longest real one carries a prompt's token ids, some 7 bytes each."""

_DONE = b"[DONE]"


class MalformedStream(Exception):
    """The bytes are not the stream that was asked for. The message says what was seen."""


class SseDecoder:
    """Cuts a byte stream into events. Any split of the same bytes over `feed` calls gives the same events.

    An event is the joined `data` of its lines, emitted by the blank line that ends it; comments and other fields are
    dropped; an event that the stream's end cuts off is never emitted. A line may end in CR LF; a lone CR ends nothing
    (the one departure from the WHATWG grammar: JSON never holds a bare CR, and servers of this API never write one).
    """

    __slots__ = ("_data", "_data_bytes", "_limit", "_pending_bytes", "_pieces")

    def __init__(self, limit_bytes: int = EVENT_LIMIT_BYTES) -> None:
        self._limit = limit_bytes
        self._pieces: list[bytes] = []
        self._pending_bytes = 0
        self._data: list[bytes] = []
        self._data_bytes = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Take the next bytes; return the events they complete. Raises MalformedStream past the limit of an event."""
        if b"\n" not in data:
            self._hold(data)
            return []
        self._pieces.append(data)
        *lines, rest = b"".join(self._pieces).split(b"\n")
        self._pieces.clear()
        self._pending_bytes = 0
        events: list[bytes] = []
        for line in lines:
            self._take_line(line, events)
        self._hold(rest)
        return events

    def _hold(self, piece: bytes) -> None:
        if piece:
            self._pieces.append(piece)
            self._pending_bytes += len(piece)
            self._check(self._pending_bytes)

    def _take_line(self, line: bytes, events: list[bytes]) -> None:
        self._check(len(line))
        if line.endswith(b"\r"):
            line = line[:-1]
        if not line:
            if self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
                self._data_bytes = 0
        elif line.startswith(b"data:"):
            value = line[6:] if line[5:6] == b" " else line[5:]
            self._data.append(value)
            self._data_bytes += len(value) + 1
            self._check(self._data_bytes)
        elif line == b"data":
            self._data.append(b"")
            self._data_bytes += 1

    def _check(self, size: int) -> None:
        if size > self._limit:
            raise MalformedStream(f"an event of more than {self._limit} bytes")


class _PromptTokensDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptTokensDetails | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    # Raw: text is looked at only where there are no ids.
    text: msgspec.Raw = msgspec.Raw(b'""')
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _ReportedError(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: _ReportedError | None = None


_event_decoder = msgspec.json.Decoder(_Event)
_text_decoder = msgspec.json.Decoder(str)


class StreamedAnswer(msgspec.Struct, kw_only=True):
    """What a stream said, also where it broke off. `*_ns` are the stamps of the caller's clock.

    `done`: the closing `[DONE]` was seen. `malformed`: what made the rest unreadable. `reported_error`: the code and
    message of an error event that the engine sent inside the stream.
    """

    output_token_ids: list[int] = []
    token_stamps_ns: list[int] = []
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    output_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    answer_sha256: str | None = None
    done: bool = False
    malformed: str | None = None
    reported_error: tuple[int | None, str] | None = None


class Reading:
    """The state of one pass over a stream: `take` its events, or tokens known otherwise, then `close`."""

    def __init__(self) -> None:
        self.answer = StreamedAnswer()
        self.usage: _Usage | None = None
        self.texts: list[bytes] = []
        self.first_choice_ns: int | None = None
        self.last_choice_ns: int | None = None

    def take(self, event: bytes, stamp_ns: int) -> None:
        """Take one event that came at `stamp_ns`. Raises MalformedStream."""
        answer = self.answer
        if answer.done:
            raise MalformedStream("an event after [DONE]")
        if event == _DONE:
            answer.done = True
            return
        parsed = _parse(event)
        if parsed.error is not None:
            code = parsed.error.code
            answer.reported_error = (code if isinstance(code, int) else None, parsed.error.message)
        if parsed.usage is not None:
            self.usage = parsed.usage
        for choice in parsed.choices or ():
            self._take_choice(choice, stamp_ns)

    def take_tokens(self, token_ids: list[int], stamps_ns: list[int]) -> None:
        """Take as many events as there are ids, each of one token, without an end. Raises MalformedStream."""
        if self.answer.done:
            raise MalformedStream("an event after [DONE]")
        self.answer.output_token_ids.extend(token_ids)
        self.answer.token_stamps_ns.extend(stamps_ns)

    def _take_choice(self, choice: _Choice, stamp_ns: int) -> None:
        if choice.index != 0:
            raise MalformedStream(f"a choice with index {choice.index}, though one was asked for")
        if self.first_choice_ns is None:
            self.first_choice_ns = stamp_ns
        self.last_choice_ns = stamp_ns
        if choice.token_ids:
            self.answer.output_token_ids.extend(choice.token_ids)
            self.answer.token_stamps_ns.extend([stamp_ns] * len(choice.token_ids))
        self.texts.append(bytes(choice.text))
        if choice.finish_reason is not None:
            self.answer.finish_reason = choice.finish_reason

    def close(self) -> StreamedAnswer:
        """The answer, as far as it came."""
        answer = self.answer
        if self.usage is not None:
            answer.prompt_tokens = self.usage.prompt_tokens
            if self.usage.prompt_tokens_details is not None:
                answer.cached_tokens = self.usage.prompt_tokens_details.cached_tokens
        if answer.output_token_ids:
            self._count_by_ids()
        else:
            self._count_by_usage()
        return answer

    def _count_by_ids(self) -> None:
        answer = self.answer
        answer.output_tokens = len(answer.output_token_ids)
        answer.first_token_ns = answer.token_stamps_ns[0]
        answer.last_token_ns = answer.token_stamps_ns[-1]
        answer.answer_sha256 = sha256_of_tokens(answer.output_token_ids)
        reported = self.usage.completion_tokens if self.usage is not None else None
        if answer.malformed is None and answer.done and reported not in (None, answer.output_tokens):
            answer.malformed = f"{answer.output_tokens} token ids, but usage.completion_tokens is {reported}"

    def _count_by_usage(self) -> None:
        # No ids: the events with a choice are all that is known of when tokens came; how many came with each is not.
        answer = self.answer
        answer.output_tokens = (self.usage.completion_tokens if self.usage is not None else None) or 0
        if answer.output_tokens:
            answer.first_token_ns = self.first_choice_ns
            answer.last_token_ns = self.last_choice_ns
            answer.answer_sha256 = _sha256_of_texts(self.texts)


def read_answer(chunks: Iterable[bytes], stamps_ns: Iterable[int]) -> StreamedAnswer:
    """Read a whole stream from its chunks and the stamp of each (same length); never raises for what it holds.

    A token's time is the stamp of the chunk that completed its event. Tokens are counted by `token_ids`, else by
    `usage`; never by events or text (an event may carry none or several, and its text may be empty).
    """
    decoder = SseDecoder()
    reading = Reading()
    try:
        for chunk, stamp_ns in zip(chunks, stamps_ns, strict=True):
            for event in decoder.feed(chunk):
                reading.take(event, stamp_ns)
    except MalformedStream as problem:
        reading.answer.malformed = str(problem)
    return reading.close()


def token_gaps_us(stamps_ns: list[int]) -> list[int]:
    """Gaps between successive stamps (ns, ascending) in whole microseconds; their sum is (last - first) // 1000."""
    if not stamps_ns:
        return []
    first_ns = stamps_ns[0]
    since_first = [(stamp - first_ns) // 1000 for stamp in stamps_ns]
    return list(map(sub, since_first[1:], since_first))


def sha256_of_tokens(token_ids: list[int]) -> str:
    """sha256 in hex of token ids as compact JSON (`[1,2,3]`)."""
    return hashlib.sha256(msgspec.json.encode(token_ids)).hexdigest()


def _parse(event: bytes) -> _Event:
    try:
        return _event_decoder.decode(event)
    # msgspec lets invalid UTF-8 and deep nesting through as errors of their own kinds.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedStream(f"an event that is no completion chunk ({error}), {len(event)} bytes") from None


def _sha256_of_texts(texts: list[bytes]) -> str | None:
    try:
        whole = "".join(_text_decoder.decode(text) for text in texts)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return hashlib.sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()
