"""The quick reader says what the general readers say, or nothing."""

import itertools
import json
import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtrial.host.load.http1 import MalformedResponse, Response
from kvtrial.host.load.quickread import read_quickly
from kvtrial.host.load.sse import StreamedAnswer, read_answer

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
FRAME = {"id": "cmpl-8f", "object": "text_completion", "created": 1795959623, "model": "tiny"}
USAGE = {"prompt_tokens": 9, "total_tokens": 12, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}}


def event(token_ids: list[int] | None, text: str = "x", finish: str | None = None, **more: object) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    choice |= {"prompt_token_ids": None, "token_ids": token_ids}
    return data_of({**FRAME, "choices": [choice], **more})


def data_of(content: dict[str, object]) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def chunk(data: bytes) -> bytes:
    framed = b"data: " + data + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(framed), framed)


def body_of(events: list[bytes]) -> bytes:
    return b"".join(map(chunk, events)) + b"0\r\n\r\n"


def whole(ids: list[int], texts: list[str]) -> list[bytes]:
    tokens = [event([token], text) for token, text in zip(ids, texts, strict=True)]
    usage = data_of({**FRAME, "choices": [], "usage": {**USAGE, "completion_tokens": len(ids) + 1}})
    return [*tokens, event([7], "", "length"), usage, b"[DONE]"]


def split(body: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    return [body[begin:end] for begin, end in itertools.pairwise(edges) if end > begin]


def quickly(pieces: list[bytes]) -> StreamedAnswer | None:
    return read_quickly(pieces, array("q", range(1000, 1000 + len(pieces))))


def generally(pieces: list[bytes]) -> StreamedAnswer | None:
    """What the general readers make of it; None where the framing is at fault or has no end."""
    response = Response()
    response.reads += [HEAD, *pieces]
    response.stamps_ns.extend([0, *range(1000, 1000 + len(pieces))])
    try:
        body = response.frame()
    except MalformedResponse:
        return None
    return read_answer(body.chunks, body.stamps_ns) if response.ended and not response.surplus else None


TEXTS = st.one_of(
    st.text(max_size=6),
    st.sampled_from(["", '"', "\\", "\n", "\x00", "\u2028", "é", "\ud83d\ude00", '"text":"', '"token_ids":[1]']),
)
IDS = st.integers(0, 2**40)


@given(st.lists(st.tuples(IDS, TEXTS.filter(lambda t: t.isprintable() or t == "\n")), max_size=30), st.lists(IDS))
def test_a_plain_stream_is_read_quickly_and_alike(tokens: list[tuple[int, str]], cuts: list[int]) -> None:
    pieces = split(body_of(whole([i for i, _ in tokens], [t for _, t in tokens])), cuts)
    found = quickly(pieces)
    assert found is not None
    assert found == generally(pieces)


@given(st.lists(st.tuples(IDS, TEXTS), max_size=12), st.lists(IDS, max_size=12), st.data())
def test_what_it_says_of_a_damaged_stream_is_what_the_general_readers_say(
    tokens: list[tuple[int, str]], cuts: list[int], data: st.DataObject
) -> None:
    body = bytearray(body_of(whole([i for i, _ in tokens], [t for _, t in tokens])))
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(body) - 1))
        match data.draw(st.sampled_from(["byte", "cut", "twice"])):
            case "byte":
                body[at] = data.draw(st.integers(0, 255))
            case "cut":
                del body[at : at + data.draw(st.integers(1, 20))]
            case _:
                body[at:at] = body[at : at + data.draw(st.integers(1, 400))]
        if not body:
            return
    pieces = split(bytes(body), cuts)
    found = quickly(pieces)
    if found is not None:
        assert found == generally(pieces)


@given(st.lists(st.tuples(IDS, TEXTS), min_size=2, max_size=12), st.data())
def test_what_it_says_of_reads_of_one_event_each_is_what_the_general_readers_say(
    tokens: list[tuple[int, str]], data: st.DataObject
) -> None:
    pieces = [*map(chunk, whole([i for i, _ in tokens], [t for _, t in tokens])), b"0\r\n\r\n"]
    for _ in range(data.draw(st.integers(0, 2))):
        number = data.draw(st.integers(0, len(pieces) - 1))
        at = data.draw(st.integers(0, len(pieces[number]) - 1))
        put = data.draw(st.sampled_from([b"", b"\t", b"\n", b"[", b"1", b",", b" ", b'"', b"\\", b"\xff"]))
        pieces[number] = pieces[number][:at] + put + pieces[number][at + data.draw(st.integers(0, 1)) :]
    found = quickly(pieces)
    if found is not None:
        assert found == generally(pieces)


BETWEEN = b'","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":['

ODD: dict[str, list[bytes]] = {
    "a tab for what is between": [event([1]), event([2]), event([3]).replace(BETWEEN, b"\t"), event([4]), b"[DONE]"],
    "a tab, and what is between twice": [
        event([1]),
        event([2]).replace(BETWEEN, b"\t"),
        event([3]).replace(BETWEEN, BETWEEN + BETWEEN),
        event([4]),
        b"[DONE]",
    ],
    "two ids among single ones": [event([1]), event([2]), event([3, 4]), event([5]), b"[DONE]"],
    "an id with a blank": [event([1]), event([2]), event([3]).replace(b"[3]", b"[ 3]"), event([4]), b"[DONE]"],
    "an id with a fraction": [event([1]), event([2]), event([3]).replace(b"[3]", b"[3.0]"), event([4]), b"[DONE]"],
    "brackets in texts": [event([1]), event([2], "["), event([3], "x[[y"), event([4]), b"[DONE]"],
    "an end in every event": [event([1], "a", "stop"), event([2], "b", "stop"), b"[DONE]"],
    "usage in every event": [event([1], usage=USAGE), event([2], usage=USAGE), event([3], usage=USAGE), b"[DONE]"],
    "an error in every event": [event([1], error={"message": "m", "code": 5})] * 2 + [b"[DONE]"],
    "two ids": [event([1, 2]), event([3, 4]), event([5]), b"[DONE]"],
    "no ids": [event(None), event(None, "b"), b"[DONE]"],
    "an id that is no id": [event([1]), event([1]).replace(b"[1]", b"[01]"), b"[DONE]"],
    "ids twice": [event([1]).replace(b'"index":0', b'"token_ids":[9],"index":0')] * 3 + [b"[DONE]"],
    "a hidden key": [event([1]).replace(b'"index":0', b'"token\\u005fids":[9],"index":0')] * 3 + [b"[DONE]"],
    "another choice": [event([1]), event([2]).replace(b'"index":0', b'"index":1'), b"[DONE]"],
    "nothing after the end": [event([1]), b"[DONE]", event([2]), event([3])],
    "bad UTF-8": [event([1]), event([2]), event([3]).replace(b'"x"', b'"\xff"'), b"[DONE]"],
    "no creation time": [event([1]).replace(b'"created":1795959623,', b"")] * 3 + [b"[DONE]"],
    "wrong usage": [*whole([1, 2], ["", ""])[:-2], data_of({**FRAME, "choices": [], "usage": USAGE}), b"[DONE]"],
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_stream_is_read_alike_or_left_to_the_general_readers(name: str) -> None:
    pieces = [*map(chunk, ODD[name]), b"0\r\n\r\n"]
    found = quickly(pieces)
    if found is not None:
        assert found == generally(pieces)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_wrong_chunk_size_is_not_believed(shift: int) -> None:
    plain = [chunk(event([token])) for token in (1, 2, 3)]
    size, rest = plain[1].split(b"\r\n", 1)
    pieces = [plain[0], b"%x\r\n%s" % (int(size, 16) + shift, rest), plain[2], chunk(b"[DONE]"), b"0\r\n\r\n"]
    assert quickly(pieces) is None


def test_a_stamp_is_of_the_read_that_completed_the_event_not_its_chunk() -> None:
    one, two = chunk(event([1])), chunk(event([2]))
    body = one + two + chunk(event([3])) + chunk(b"[DONE]") + b"0\r\n\r\n"
    edges = [len(one), len(one) + len(two) - 2, len(one) + len(two) - 1]
    pieces = split(body, edges)
    found = quickly(pieces)
    assert found is not None
    assert found.token_stamps_ns == [1000, 1001, 1003]
    assert found == generally(pieces)


def test_a_long_stream_of_irregular_events_is_read_in_time_that_grows_with_its_length() -> None:
    # Every other event has an escape that the template leaves to the general parser; a scan of the rest at each of
    # them would look at every byte thousands of times and run into the test's timeout.
    events = [event([number], "\x01" if number % 2 else "a") for number in range(20_000)]
    assert (found := quickly([*map(chunk, events), chunk(b"[DONE]"), b"0\r\n\r\n"])) is not None
    assert found.output_token_ids == list(range(20_000))


def test_ten_million_random_bytes_crash_no_reader() -> None:
    rng, fed, quick = random.Random(5), 0, 0
    plain = body_of(whole(list(range(40)), ["a"] * 40))
    while fed < 10_000_000:
        noise = rng.randbytes(rng.randint(1, 60_000))
        body = bytearray(plain)
        for _ in range(rng.randint(0, 4)):
            at = rng.randrange(len(body))
            body[at : at + rng.randint(0, 3)] = rng.choice([b"", noise[:3], b"\r\n", b"\n\n", b"0\r\n\r\n", b'"'])
        for stream in (bytes(noise), bytes(body), chunk(noise) + bytes(body), bytes(body) + noise[:2000]):
            pieces = split(stream, [rng.randrange(len(stream) + 1) for _ in range(rng.randint(0, 6))])
            found, expected = quickly(pieces), generally(pieces)
            assert found is None or found == expected
            quick += found is not None
            fed += len(stream)
    assert quick > 10, "some of it was readable, so the comparison above compared something"
