"""The stand-in server: one thread with an event loop, a script for each request, a log of what it saw and wrote."""

import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

Ending = Literal["done", "no_done", "close_in_stream", "reset_in_stream", "stall", "no_answer_close", "done_then_reset"]


@dataclass(frozen=True)
class Script:
    """How one request is answered.

    `token_groups`: the token ids of each event; `gap_seconds` passes before each but the first, `first_seconds` before
    that. `cut_bytes`: the size of the pieces the HTTP chunk data is cut into, each an HTTP chunk and a write of its own
    (0: an event is one chunk). `ending`: how the answer ends. `status` other than 200 answers `error_body` at once.
    """

    token_groups: tuple[tuple[int, ...], ...] = ((101,), (102,), (103,))
    first_seconds: float = 0.0
    gap_seconds: float = 0.0
    text: str = "x"
    ending: Ending = "done"
    status: int = 200
    error_body: str = '{"error":{"message":"planted","type":"standin","param":null,"code":500}}'
    content_type: str = "text/event-stream; charset=utf-8"
    cut_bytes: int = 0
    newline: str = "\n"
    with_ids: bool = True
    usage_tokens: int | None = None
    cached_tokens: int | None = 7
    insert_event: str | None = None
    insert_after: int = 1
    connection_close: bool = False
    close_after_seconds: float | None = None
    framing: Literal["chunked", "until_close"] = "chunked"
    raw_response: bytes | None = None


@dataclass
class Served:
    """What the server saw of one request and when it wrote its token events (perf_counter_ns)."""

    body: dict[str, Any]
    raw_body: bytes
    arrived_ns: int
    connection: int
    token_written_ns: list[int] = field(default_factory=list)
    answered: bool = False


class StampedServer:
    """Use as a context manager: `with StampedServer(script_for) as server: ... server.base_url`.

    `script_for` gets the decoded body of each request. `in_flight_max` is the most requests seen at one time,
    `connections_open` the connections open now. `pages`: path -> (status, text) of what GET answers (others: 404);
    `asked` are the paths that were got.
    """

    def __init__(self, script_for: Callable[[dict[str, Any]], Script] = lambda body: Script()) -> None:
        self._script_for = script_for
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.base_url = ""
        self.served: list[Served] = []
        self.connections_opened = 0
        self.connections_open = 0
        self.pages: dict[str, tuple[int, str]] = {}
        self.asked: list[str] = []
        self.in_flight = 0
        self.in_flight_max = 0

    def __enter__(self) -> "StampedServer":
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def wait_for_connections(self, count: int, within_seconds: float = 5.0) -> int:
        """Wait until `count` connections are open (a peer's close takes a turn of the loop); return how many are."""
        give_up = time.monotonic() + within_seconds
        while self.connections_open != count and time.monotonic() < give_up:
            time.sleep(0.002)
        return self.connections_open

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=2048)
        self.base_url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections_opened += 1
        self.connections_open += 1
        connection = self.connections_opened
        try:
            while await self._one(reader, writer, connection):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self.connections_open -= 1
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET "):
            return await self._page(head.split(b" ", 2)[1].decode(), writer)
        lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
        raw_body = await reader.readexactly(int(lengths[0]))
        served = Served(json.loads(raw_body), raw_body, time.perf_counter_ns(), connection)
        self.served.append(served)
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        try:
            again = await self._answer(served, self._script_for(served.body), writer, reader)
        finally:
            self.in_flight -= 1
        served.answered = True
        return again

    async def _page(self, path: str, writer: asyncio.StreamWriter) -> bool:
        self.asked.append(path)
        status, text = self.pages.get(path, (404, "no such page"))
        body = text.encode()
        head = f"HTTP/1.1 {status} Planted\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        return True

    async def _answer(
        self, served: Served, script: Script, writer: asyncio.StreamWriter, reader: asyncio.StreamReader
    ) -> bool:
        if script.raw_response is not None:
            writer.write(script.raw_response)
            await writer.drain()
            return False
        if script.ending == "no_answer_close":
            return False
        if script.status != 200:
            body = script.error_body.encode()
            writer.write(_head(script, f"Content-Length: {len(body)}\r\n") + body)
            await writer.drain()
            return not script.connection_close
        chunked = script.framing == "chunked"
        writer.write(_head(script, "Transfer-Encoding: chunked\r\n" if chunked else ""))
        await asyncio.sleep(script.first_seconds)
        if not await self._stream(served, script, writer, reader):
            return False
        if chunked:
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        if script.close_after_seconds is not None:
            await asyncio.sleep(script.close_after_seconds)
            return False
        return chunked and not script.connection_close

    async def _stream(
        self, served: Served, script: Script, writer: asyncio.StreamWriter, reader: asyncio.StreamReader
    ) -> bool:
        """Write the events; return whether the answer came to its proper end."""
        for number, group in enumerate(script.token_groups):
            if number == script.insert_after and script.insert_event is not None:
                await self._event(writer, script, script.insert_event)
            if number:
                await asyncio.sleep(script.gap_seconds)
            last = number == len(script.token_groups) - 1
            served.token_written_ns += [time.perf_counter_ns()] * len(group)
            await self._event(writer, script, _chunk_json(served.body, script, number, group, last=last))
            if number == 0 and script.ending in ("close_in_stream", "reset_in_stream", "stall"):
                return await _break_off(script.ending, writer, reader)
        tokens = sum(map(len, script.token_groups)) if script.usage_tokens is None else script.usage_tokens
        await self._event(writer, script, _usage_json(served.body, script, tokens))
        if script.ending != "no_done":
            await self._event(writer, script, "[DONE]")
        if script.ending == "done_then_reset":
            return await _break_off("reset_in_stream", writer, reader)
        return True

    async def _event(self, writer: asyncio.StreamWriter, script: Script, data: str) -> None:
        event = f"data: {data}{script.newline}{script.newline}".encode()
        size = script.cut_bytes or len(event)
        for begin in range(0, len(event), size):
            piece = event[begin : begin + size]
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece) if script.framing == "chunked" else piece)
            await writer.drain()
            if script.cut_bytes:
                await asyncio.sleep(0)


async def _break_off(ending: Ending, writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> bool:
    await writer.drain()
    if ending == "stall":
        await reader.read()  # until the client goes away
    elif ending == "reset_in_stream":
        # The event reaches the client before the reset throws away what is unread.
        await asyncio.sleep(0.05)
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    return False


def _head(script: Script, framing: str) -> bytes:
    reasons = {200: "OK", 400: "Bad Request", 404: "Not Found", 500: "Internal Server Error", 503: "Unavailable"}
    content_type = script.content_type if script.status == 200 else "application/json"
    close = "Connection: close\r\n" if script.connection_close or not framing else ""
    return (
        f"HTTP/1.1 {script.status} {reasons[script.status]}\r\nServer: kvtrial-stamped-server (standin)\r\n"
        f"Content-Type: {content_type}\r\n{close}{framing}\r\n"
    ).encode()


def _chunk_json(body: dict[str, Any], script: Script, number: int, group: tuple[int, ...], *, last: bool) -> str:
    choice: dict[str, Any] = {
        "index": 0,
        "text": script.text,
        "logprobs": None,
        "finish_reason": "length" if last else None,
        "stop_reason": None,
    }
    if script.with_ids:
        choice["prompt_token_ids"] = body["prompt"] if number == 0 and isinstance(body["prompt"], list) else None
        choice["token_ids"] = list(group)
    return _json({"id": "cmpl-standin", "object": "text_completion", "model": body["model"], "choices": [choice]})


def _usage_json(body: dict[str, Any], script: Script, tokens: int) -> str:
    prompt_tokens = len(body["prompt"])
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + tokens,
        "completion_tokens": tokens,
    }
    if script.cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": script.cached_tokens}
    return _json({"id": "cmpl-standin", "object": "text_completion", "choices": [], "usage": usage})


def _json(value: dict[str, Any]) -> str:
    # As vLLM writes it: nothing escaped that JSON does not demand.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
