"""The stream parser: any split gives the same, Unicode line ends cut nothing, and bad bytes have one error."""

import hashlib
import itertools
import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtrial.host.load.sse import (
    MalformedStream,
    SseDecoder,
    StreamedAnswer,
    read_answer,
    sha256_of_tokens,
    token_gaps_us,
)

REAL_STREAM = (Path(__file__).parent / "vllm_0_32_0_stream.txt").read_bytes()
"""What vLLM 0.32.0 on the CPU wrote for 8 tokens; only the list of prompt_token_ids is shortened."""

REAL_IDS = [167, 200, 277, 164, 242, 260, 120, 171]


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[begin:end] for begin, end in itertools.pairwise(edges)]


def events_of(pieces: list[bytes], limit_bytes: int = 1 << 20) -> tuple[list[bytes], str | None]:
    decoder, events = SseDecoder(limit_bytes), []
    try:
        for piece in pieces:
            events += decoder.feed(piece)
    except MalformedStream as problem:
        return [], str(problem)
    return events, None


def event(token_ids: list[int] | None, text: str = "", finish: str | None = None, index: int = 0) -> bytes:
    choice = {"index": index, "text": text, "finish_reason": finish}
    if token_ids is not None:
        choice["token_ids"] = token_ids
    return b"data: " + json.dumps({"choices": [choice]}, ensure_ascii=False).encode() + b"\n\n"


def usage(tokens: int, cached: int | None = None) -> bytes:
    details = {"prompt_tokens_details": {"cached_tokens": cached}} if cached is not None else {}
    body = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": tokens, **details}}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def read(chunks: list[bytes]) -> StreamedAnswer:
    return read_answer(chunks, [1000 * (number + 1) for number in range(len(chunks))])


# The decoder.


@given(
    st.lists(st.sampled_from([b"data: a", b"data:b", b"data", b": note", b"event: x", b"\r\n", b"\n", b"\r", b"\xff"])),
    st.lists(st.integers(0, 200)),
)
def test_any_split_of_line_like_bytes_gives_the_same_events(parts: list[bytes], cuts: list[int]) -> None:
    data = b"".join(parts)
    assert events_of(pieces_of(data, cuts)) == events_of([data])


@given(st.binary(max_size=400), st.lists(st.integers(0, 400)), st.integers(1, 50))
def test_any_split_of_any_bytes_gives_the_same_events_or_the_declared_error(
    data: bytes, cuts: list[int], limit: int
) -> None:
    assert events_of(pieces_of(data, cuts), limit) == events_of([data], limit)


def test_a_whole_stream_cut_at_every_byte_gives_the_same_events() -> None:
    whole, _ = events_of([REAL_STREAM])
    assert len(whole) == 10
    assert events_of([REAL_STREAM[i : i + 1] for i in range(len(REAL_STREAM))])[0] == whole


@pytest.mark.parametrize("separator", ["\u0085", "\u2028", "\u2029", "\x0b", "\x0c", "\x1c"])
def test_unicode_line_ends_do_not_end_a_line(separator: str) -> None:
    line = f"data: a{separator}b"
    assert len(line.splitlines()) == 2, "the fault this guards against"
    assert events_of([line.encode() + b"\n\n"])[0] == [f"a{separator}b".encode()]


def test_crlf_comments_other_fields_and_joined_data_lines() -> None:
    stream = b": ping\r\nevent: x\r\ndata: one\r\ndata:two\r\n\r\n\r\n\ndata\n\nid: 3\n\ndata: cut off\n"
    assert events_of([stream])[0] == [b"one\ntwo", b""]


@pytest.mark.parametrize("stream", [b"data: " + b"x" * 200, b"data: xxxxxxxx\n" * 20, b"x" * 101 + b"\n"])
def test_an_event_beyond_the_limit_is_refused(stream: bytes) -> None:
    with pytest.raises(MalformedStream, match="more than 100 bytes"):
        SseDecoder(limit_bytes=100).feed(stream)


# The answer.


def test_a_real_stream_of_vllm_is_read() -> None:
    answer = read_answer([REAL_STREAM], [5000])
    assert answer.output_token_ids == REAL_IDS
    assert (answer.output_tokens, answer.prompt_tokens, answer.cached_tokens) == (8, 1040, 0)
    assert (answer.finish_reason, answer.done, answer.malformed) == ("length", True, None)
    assert answer.answer_sha256 == sha256_of_tokens(REAL_IDS)


@given(st.lists(st.integers(0, len(REAL_STREAM)), max_size=40))
def test_any_split_of_a_real_stream_gives_the_same_answer_with_ascending_stamps(cuts: list[int]) -> None:
    answer = read(pieces_of(REAL_STREAM, cuts))
    assert answer.output_token_ids == REAL_IDS
    assert answer.done
    assert answer.token_stamps_ns == sorted(answer.token_stamps_ns)


def test_a_token_has_the_stamp_of_the_chunk_that_completed_its_event() -> None:
    first = event([1])
    answer = read_answer([first[:-1], first[-1:] + event([2]), usage(2) + DONE], [10, 20, 30])
    assert answer.token_stamps_ns == [20, 20]


def test_an_event_without_ids_is_no_token_and_one_with_three_is_three() -> None:
    answer = read([event([]), event([5, 6, 7], text=""), event([8], finish="length"), usage(4) + DONE])
    assert (answer.first_token_ns, answer.last_token_ns) == (2000, 3000)
    assert token_gaps_us(answer.token_stamps_ns) == [0, 0, 1]
    assert answer.output_tokens == 4


def test_without_ids_tokens_are_counted_by_usage_not_by_events() -> None:
    answer = read([event(None, "a"), event(None, "b", "length"), usage(5) + DONE])
    assert (answer.output_tokens, answer.output_token_ids, answer.token_stamps_ns) == (5, [], [])
    assert (answer.first_token_ns, answer.last_token_ns) == (1000, 2000)
    assert answer.answer_sha256 == hashlib.sha256(b"ab").hexdigest()


def test_a_stream_without_usage_is_still_counted_by_ids() -> None:
    answer = read([event([1]), event([2]), DONE])
    assert (answer.output_tokens, answer.prompt_tokens, answer.malformed) == (2, None, None)


def test_an_answer_that_contradicts_its_usage_is_malformed() -> None:
    answer = read([event([1]), event([2]), usage(3), DONE])
    assert answer.malformed == "2 token ids, but usage.completion_tokens is 3"


@pytest.mark.parametrize(
    "bad",
    [
        b"data: {\n\n",
        b"data: \xff\n\n",
        b'data: {"choices":[{"token_ids":["a"]}]}\n\n',
        b'data: {"choices":' + b"[" * 100_000 + b"\n\n",
        b"data: 7\n\n",
        b'data: {"choices":[{"text":"\\ud800","token_ids":[4]}]}\n\n',
        b"data\n\n",
        event([3], index=1),
        DONE + event([3]),
    ],
)
def test_a_malformed_event_is_named_and_what_came_before_is_kept(bad: bytes) -> None:
    answer = read([event([1]), bad, event([2])])
    assert answer.malformed
    assert answer.output_token_ids == [1]


def test_an_error_event_is_reported_with_its_code() -> None:
    answer = read([event([1]), b'data: {"error":{"message":"engine died","code":500}}\n\n', DONE])
    assert answer.reported_error == (500, "engine died")


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=50))
def test_gaps_sum_to_the_time_between_first_and_last_token(stamps: list[int]) -> None:
    stamps.sort()
    gaps = token_gaps_us(stamps)
    assert len(gaps) == len(stamps) - 1
    assert min(gaps, default=0) >= 0
    assert sum(gaps) == (stamps[-1] - stamps[0]) // 1000


# Random bytes.


def feed_random_bytes(total: int, seed: int) -> int:
    """Feed random bytes, half of them into valid beginnings of events; return how many answers were read."""
    rng, read_bytes, answers = random.Random(seed), 0, 0
    while read_bytes < total:
        noise = rng.randbytes(rng.randint(1, 20_000))
        chunk = rng.choice([noise, b"data: " + noise + b"\n\n", b'data: {"choices":[{"text":"' + noise + b'"}]}\n\n'])
        cut = rng.randint(0, len(chunk))
        answer = read_answer([chunk[:cut], chunk[cut:], REAL_STREAM], [1, 2, 3])
        assert answer.malformed is not None or answer.done
        answers += 1
        read_bytes += len(chunk)
    return answers


def test_a_million_random_bytes_raise_nothing() -> None:
    assert feed_random_bytes(1_000_000, seed=1)


@pytest.mark.full
def test_ten_million_random_bytes_raise_nothing() -> None:
    assert feed_random_bytes(10_000_000, seed=2)
