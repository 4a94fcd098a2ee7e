"""A server of known timing: no engine, but streams in vLLM's form on a schedule, each event's write stamped.

    python -m kvtrial.host.stamped_server     prints {"port": PORT, "pid": PID} when it listens; ends with its stdin

What a client says of a stream can be held against what this server knows of it. One thread waits in epoll; events are
prepared bytes, so that a write costs little more than its system call, and CLOCK_MONOTONIC is read just before and
just after `send`. A request's own arrival is stamped by the kernel where it can (SO_TIMESTAMPNS), so that a late read
of this server is no error of the client's. Its own errors (how long a write took, how late it was) are handed out with
the stamps. Pure Python: a host under test has no compiler.

POST /v1/completions     a stream of `max_tokens` events, one token each; `kv_transfer_params` may hold first_token_us
                         and interval_us, else the schedule holds that was given last
POST /kvtrial/schedule   a Schedule as JSON: how streams are timed that say nothing themselves; begins the count anew
POST /kvtrial/stamps     hand out Stamps as JSON and begin anew
GET  /health, /v1/models
"""

import ctypes
import gc
import hashlib
import heapq
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import msgspec
from msgspec import Struct

from kvtrial.record.errors import UnusableInput

NAME = "kvtrial-stamped-server"
MODEL = "stamped-server-no-engine"

_BACKLOG = 4096
_READ_BYTES = 1 << 18
_POLL_EVERY = 32
"""Sockets are looked at after this many writes, however many more are due: requests must not wait for an overload."""

_SLEEP_MARGIN_NS = 30_000
_GOLDEN = 0.6180339887498949
_PREPARED_EVENTS = 1024
_PR_SET_TIMERSLACK = 29
_SO_TIMESTAMPNS = 35
_TIMESPEC = struct.Struct("qq")
_CHECK_STDIN_SECONDS = 0.5


class Schedule(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When the tokens of a stream are due, from the arrival of its request.

    The first comes after `first_seconds` and a share of `stagger_seconds`; the shares of successive requests fill the
    range evenly (multiples of the golden ratio, modulo 1), however many there are. The others follow at
    `tokens_per_second`.
    """

    tokens_per_second: float = 50.0
    first_seconds: float = 0.05
    stagger_seconds: float = 1.0


class Spread(Struct, frozen=True):
    """A distribution in microseconds."""

    count: int
    p50_us: float
    p95_us: float
    p99_us: float
    max_us: float


class ServedRequest(Struct, frozen=True, kw_only=True):
    """One answered request. `*_ns` are CLOCK_MONOTONIC.

    `identity`: the request's X-Request-Id, else empty; `prompt_sha256`: over the prompt's JSON as it came. `arrived_ns`
    is the kernel's stamp of its last bytes, None where the kernel gives none; `read_ns` is when this server had read
    it. `first_*` and `last_*` bracket the writes of the first and of the last token's event, None where there was none.
    `blocked`: events that waited because the client had not read earlier ones.
    """

    number: int
    identity: str
    prompt_sha256: str
    arrived_ns: int | None
    read_ns: int
    tokens: int
    first_due_ns: int
    first_before_ns: int | None
    first_after_ns: int | None
    last_before_ns: int | None
    last_after_ns: int | None
    blocked: int
    finished: bool


class Stamps(Struct, frozen=True, kw_only=True):
    """What the server knows since it was last asked, and its own error.

    `write`: after minus before, how uncertain a stamp is. `lateness`: before minus due; stamps are of what was done,
    so it is no error of theirs. `read_lag`: a request's read minus its arrival. `cpu_seconds` over `wall_seconds`.
    """

    server: str
    requests: list[ServedRequest]
    events: int
    write: Spread | None
    lateness: Spread | None
    read_lag: Spread | None
    blocked_events: int
    in_flight_max: int
    cpu_seconds: float
    wall_seconds: float


class _Body(Struct):
    """What is looked at in a request."""

    max_tokens: int | None = None
    prompt: msgspec.Raw = msgspec.Raw(b'""')
    stream: bool = False
    return_token_ids: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None


class _Prepared:
    """The bytes of events after the id and before it, for any stream. With or without token ids, as it was asked."""

    def __init__(self, with_ids: bool) -> None:
        self.with_ids = with_ids
        middle = [self._event(number, None) for number in range(_PREPARED_EVENTS)]
        self.heads = [head for head, _ in middle]
        self.tails = [tail for _, tail in middle]

    def _event(self, number: int, finish_reason: str | None) -> tuple[bytes, bytes]:
        choice: dict[str, Any] = {"index": 0, "text": " x", "logprobs": None, "finish_reason": finish_reason}
        choice["stop_reason"] = None
        if self.with_ids:
            choice |= {"prompt_token_ids": None, "token_ids": [1000 + number % _PREPARED_EVENTS]}
        return framed(_chunk([choice]))

    def last(self, number: int) -> tuple[bytes, bytes]:
        """The event of the last token, which says why it is the last."""
        return self._event(number, "length")


def _chunk(choices: list[dict[str, Any]], **more: Any) -> bytes:
    content = {"id": _ID, "object": "text_completion", "created": 0, "model": MODEL, "choices": choices, **more}
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


_ID = "cmpl-stamped-00000000"


def framed(event: bytes) -> tuple[bytes, bytes]:
    """An event as an HTTP chunk, in two parts: up to its id, and after it."""
    head, _, tail = event.partition(_ID.encode())
    return b"%x\r\n%s" % (len(event), head), tail + b"\r\n"


def _closing(with_usage: tuple[int, int]) -> tuple[bytes, bytes]:
    prompt_tokens, tokens = with_usage
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + tokens, "completion_tokens": tokens}
    head, tail = framed(_chunk([], usage={**usage, "prompt_tokens_details": {"cached_tokens": 0}}))
    return head, tail + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


_HEADERS = (
    f"HTTP/1.1 200 OK\r\nServer: {NAME}\r\nX-Kvtrial-Engine: none; timing is planted\r\n"
    "Content-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
).encode()


class _Stream:
    """One answer under way."""

    __slots__ = ("blocked", "due_ns", "first_after_ns", "first_before_ns", "first_due_ns", "ident", "interval_ns",
                 "last_after_ns", "last_before_ns", "number", "peer", "prepared", "prompt_tokens", "request", "sent",
                 "tokens")  # fmt: skip

    def __init__(self, number: int, peer: "_Peer", tokens: int, first_due_ns: int, interval_ns: int) -> None:
        self.number = number
        self.ident = b"cmpl-stamped-%08d" % (number % 100_000_000)
        self.peer = peer
        self.tokens = tokens
        self.sent = 0
        self.due_ns = self.first_due_ns = first_due_ns
        self.interval_ns = interval_ns
        self.first_before_ns = self.first_after_ns = self.last_before_ns = self.last_after_ns = 0
        self.blocked = 0
        self.prepared = _WITH_IDS
        self.prompt_tokens = 0
        self.request: tuple[str, bytes, int | None, int] = ("", b"", None, 0)


class _Peer:
    """One connection."""

    __slots__ = ("buffer", "fd", "sock", "stamp_ns", "stream", "unsent")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.buffer = b""
        self.unsent = b""
        self.stream: _Stream | None = None
        self.stamp_ns: int | None = None


_WITH_IDS = _Prepared(True)
_WITHOUT_IDS = _Prepared(False)


class StampedServer:
    """The server. `serve` until told to stop; `on_first` is called at the first request after each beginning anew."""

    def __init__(self, port: int = 0, on_first: Callable[[int], None] | None = None) -> None:
        self.listener = socket.create_server(("127.0.0.1", port), backlog=_BACKLOG)
        self.listener.setblocking(False)
        # Connections inherit both. Where the kernel has none, a request's arrival is not known and its stamp is None.
        with suppress(OSError):
            self.listener.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        # Every kernel has Reno, and it sends what is written at once; BBR, some machines' default, paces by a timer.
        with suppress(OSError):
            self.listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
        self.port: int = self.listener.getsockname()[1]
        self.schedule = Schedule()
        self.stopping = False
        self._on_first = on_first
        self._epoll = select.epoll()
        self._epoll.register(self.listener.fileno(), select.EPOLLIN)
        self._peers: dict[int, _Peer] = {}
        self._due: list[tuple[int, int, _Stream]] = []
        self._wall_offset_ns = time.time_ns() - time.monotonic_ns()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._number = 0
        self._requests: list[ServedRequest] = []
        self._write_ns = array("q")
        self._late_ns = array("q")
        self._read_lag_ns = array("q")
        self._blocked = 0
        self._in_flight = len(self._due)
        self._in_flight_max = self._in_flight
        self._cpu_began_ns = time.process_time_ns()
        self._wall_began_ns = time.monotonic_ns()

    def serve(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Answer until `stopping`, or until `is_over` says so (asked about twice a second)."""
        asked = time.monotonic()
        while not self.stopping:
            wait_ns = self._write_due()
            # epoll itself counts whole milliseconds; a select on it counts microseconds.
            if wait_ns > _SLEEP_MARGIN_NS:
                select.select([self._epoll], [], [], min(wait_ns / 1e9, _CHECK_STDIN_SECONDS))
            self._look_at_sockets()
            if time.monotonic() - asked > _CHECK_STDIN_SECONDS:
                asked = time.monotonic()
                if is_over():
                    return

    def close(self) -> None:
        """Close every socket."""
        for peer in list(self._peers.values()):
            self._drop(peer)
        self._epoll.close()
        self.listener.close()

    # Writing on time.

    def _write_due(self) -> int:
        """Write what is due, at most a few at once; how long nothing more is, ns."""
        due = self._due
        clock = time.monotonic_ns
        written = 0
        while due:
            due_ns, _, stream = due[0]
            now_ns = clock()
            if due_ns > now_ns:
                return due_ns - now_ns
            if written == _POLL_EVERY:
                return 0
            written += 1
            number = stream.sent
            if number + 1 == stream.tokens:
                head, tail = stream.prepared.last(number)
            else:
                slot = number % _PREPARED_EVENTS
                head, tail = stream.prepared.heads[slot], stream.prepared.tails[slot]
            data = b"%s%s%s" % (head, stream.ident, tail)
            peer = stream.peer
            if peer.unsent:
                peer.unsent += data
                before_ns = after_ns = clock()
                stream.blocked += 1
                self._blocked += 1
            else:
                before_ns = clock()
                try:
                    sent = peer.sock.send(data)
                except BlockingIOError:
                    sent = 0
                except OSError:
                    self._drop(peer)
                    continue
                after_ns = clock()
                if sent != len(data):
                    self._hold(peer, data[sent:])
                    stream.blocked += 1
                    self._blocked += 1
            self._write_ns.append(after_ns - before_ns)
            self._late_ns.append(before_ns - due_ns)
            if number == 0:
                stream.first_before_ns, stream.first_after_ns = before_ns, after_ns
            stream.sent = number + 1
            if stream.sent < stream.tokens:
                stream.due_ns = due_ns + stream.interval_ns
                heapq.heapreplace(due, (stream.due_ns, stream.number, stream))
                continue
            heapq.heappop(due)
            stream.last_before_ns, stream.last_after_ns = before_ns, after_ns
            head, tail = _closing((stream.prompt_tokens, stream.tokens))
            self._send(peer, b"%s%s%s" % (head, stream.ident, tail))
            self._finish(stream)
        return round(_CHECK_STDIN_SECONDS * 1e9)

    def _send(self, peer: _Peer, data: bytes) -> None:
        """Send what is no token's event."""
        if peer.unsent:
            peer.unsent += data
            return
        try:
            sent = peer.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._drop(peer)
            return
        if sent != len(data):
            self._hold(peer, data[sent:])

    def _hold(self, peer: _Peer, rest: bytes) -> None:
        peer.unsent = rest
        self._epoll.modify(peer.fd, select.EPOLLIN | select.EPOLLOUT)

    def _finish(self, stream: _Stream, finished: bool = True) -> None:
        identity, prompt, arrived_ns, read_ns = stream.request
        self._in_flight -= 1
        stream.peer.stream = None
        self._requests.append(
            ServedRequest(
                number=stream.number,
                identity=identity,
                prompt_sha256=_sha256(prompt),
                arrived_ns=arrived_ns,
                read_ns=read_ns,
                tokens=stream.sent,
                first_due_ns=stream.first_due_ns,
                first_before_ns=stream.first_before_ns or None,
                first_after_ns=stream.first_after_ns or None,
                last_before_ns=stream.last_before_ns or None,
                last_after_ns=stream.last_after_ns or None,
                blocked=stream.blocked,
                finished=finished,
            )
        )

    # Sockets.

    def _look_at_sockets(self) -> None:
        listener = self.listener.fileno()
        for fd, what in self._epoll.poll(0):
            if fd == listener:
                self._accept()
                continue
            peer = self._peers.get(fd)
            if peer is None:
                continue
            if what & select.EPOLLOUT:
                self._go_on(peer)
            if what & ~select.EPOLLOUT:
                self._read(peer)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = _Peer(sock)
            self._peers[peer.fd] = peer
            self._epoll.register(peer.fd, select.EPOLLIN)

    def _go_on(self, peer: _Peer) -> None:
        try:
            sent = peer.sock.send(peer.unsent)
        except BlockingIOError:
            return
        except OSError:
            self._drop(peer)
            return
        peer.unsent = peer.unsent[sent:]
        if not peer.unsent:
            self._epoll.modify(peer.fd, select.EPOLLIN)

    def _read(self, peer: _Peer) -> None:
        try:
            data, ancillary, _, _ = peer.sock.recvmsg(_READ_BYTES, 64)
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        if not data:
            self._drop(peer)
            return
        read_ns = time.monotonic_ns()
        peer.stamp_ns = None
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS and len(content) == _TIMESPEC.size:
                seconds, nanoseconds = _TIMESPEC.unpack(content)
                peer.stamp_ns = seconds * 1_000_000_000 + nanoseconds - self._wall_offset_ns
        peer.buffer = peer.buffer + data if peer.buffer else data
        while (request := self._cut_request(peer)) is not None:
            self._answer(peer, *request, read_ns)

    def _cut_request(self, peer: _Peer) -> tuple[bytes, bytes, bytes] | None:
        """(request line, headers, body) if a whole request is there."""
        head, found, rest = peer.buffer.partition(b"\r\n\r\n")
        if not found:
            return None
        line, _, headers = head.partition(b"\r\n")
        length = int(_header(headers, b"content-length") or 0)
        if len(rest) < length:
            return None
        peer.buffer = rest[length:]
        return line, headers, rest[:length]

    def _answer(self, peer: _Peer, line: bytes, headers: bytes, body: bytes, read_ns: int) -> None:
        path = line.split(b" ")[1] if line.count(b" ") >= 2 else b""
        try:
            if path in (b"/v1/completions", b"/v1/chat/completions"):
                self._begin_stream(peer, headers, body, read_ns, path)
            elif path == b"/kvtrial/schedule":
                self.schedule = msgspec.json.decode(body, type=Schedule)
                self._begin_anew()
                self._plain(peer, 200, msgspec.json.encode(self.schedule))
            elif path == b"/kvtrial/stamps":
                self._plain(peer, 200, msgspec.json.encode(self._hand_out()))
            elif path == b"/v1/models":
                models = {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": NAME}]}
                self._plain(peer, 200, msgspec.json.encode(models))
            elif path == b"/health":
                self._plain(peer, 200, b"")
            else:
                self._plain(peer, 404, msgspec.json.encode({"error": {"message": f"{NAME} has no such page"}}))
        except (msgspec.DecodeError, UnusableInput) as error:
            self._plain(peer, 400, msgspec.json.encode({"error": {"message": str(error)}}))

    def _plain(self, peer: _Peer, status: int, content: bytes) -> None:
        reason = {200: "OK", 400: "Bad Request", 404: "Not Found"}[status]
        head = f"HTTP/1.1 {status} {reason}\r\nServer: {NAME}\r\nContent-Type: application/json\r\n"
        self._send(peer, f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)

    def _begin_stream(self, peer: _Peer, headers: bytes, body: bytes, read_ns: int, path: bytes) -> None:
        asked = msgspec.json.decode(body, type=_Body)
        if path != b"/v1/completions" or not asked.stream or not asked.max_tokens or asked.max_tokens < 1:
            raise UnusableInput(f"{NAME} answers /v1/completions with stream: true and max_tokens of 1 or more only.")
        if peer.stream is not None:
            raise UnusableInput(f"{NAME} takes no second request before the first is answered.")
        if self._number == 0 and self._on_first is not None:
            self._on_first(read_ns)
        own = asked.kv_transfer_params or {}
        schedule = self.schedule
        share = self._number * _GOLDEN % 1.0
        first_ns = round((schedule.first_seconds + share * schedule.stagger_seconds) * 1e9)
        first_ns = int(own["first_token_us"]) * 1000 if "first_token_us" in own else first_ns
        interval_ns = round(1e9 / schedule.tokens_per_second)
        interval_ns = int(own["interval_us"]) * 1000 if "interval_us" in own else interval_ns
        began_ns = read_ns if peer.stamp_ns is None else peer.stamp_ns
        stream = _Stream(self._number, peer, asked.max_tokens, began_ns + first_ns, interval_ns)
        stream.prepared = _WITH_IDS if asked.return_token_ids else _WITHOUT_IDS
        prompt = bytes(asked.prompt)
        stream.prompt_tokens = prompt.count(b",") + 1 if prompt[:1] == b"[" else len(prompt) // 4
        stream.request = (_header(headers, b"x-request-id"), prompt, peer.stamp_ns, read_ns)
        if peer.stamp_ns is not None:
            self._read_lag_ns.append(read_ns - peer.stamp_ns)
        self._number += 1
        self._in_flight += 1
        self._in_flight_max = max(self._in_flight_max, self._in_flight)
        peer.stream = stream
        heapq.heappush(self._due, (stream.due_ns, stream.number, stream))
        self._send(peer, _HEADERS)

    def _drop(self, peer: _Peer) -> None:
        self._peers.pop(peer.fd, None)
        peer.sock.close()
        if peer.stream is not None:
            stream = peer.stream
            self._due = [entry for entry in self._due if entry[2] is not stream]
            heapq.heapify(self._due)
            self._finish(stream, finished=False)

    def _hand_out(self) -> Stamps:
        stamps = Stamps(
            server=NAME,
            requests=self._requests,
            events=len(self._write_ns),
            write=spread_us(self._write_ns),
            lateness=spread_us(self._late_ns),
            read_lag=spread_us(self._read_lag_ns),
            blocked_events=self._blocked,
            in_flight_max=self._in_flight_max,
            cpu_seconds=(time.process_time_ns() - self._cpu_began_ns) / 1e9,
            wall_seconds=(time.monotonic_ns() - self._wall_began_ns) / 1e9,
        )
        self._begin_anew()
        return stamps


def spread_us(values_ns: Sequence[int]) -> Spread | None:
    """The distribution of nanoseconds, in microseconds (nearest rank); None of nothing."""
    if not values_ns:
        return None
    ordered = sorted(values_ns)
    last = len(ordered) - 1

    def at(share: float) -> float:
        return ordered[round(share * last)] / 1000

    return Spread(len(ordered), at(0.5), at(0.95), at(0.99), ordered[-1] / 1000)


def _header(headers: bytes, name: bytes) -> str:
    for line in headers.split(b"\r\n"):
        found, _, value = line.partition(b":")
        if found.lower() == name:
            return value.strip().decode("latin-1")
    return ""


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@contextmanager
def running_server(cpu: int | None = None) -> Iterator[tuple[int, "subprocess.Popen[bytes]"]]:
    """The server as a process of its own, on the CPU `cpu` if one is named; (port, process). It ends with the block."""
    command = [sys.executable, "-m", "kvtrial.host.stamped_server"]
    process = subprocess.Popen(
        command + ([] if cpu is None else ["--cpu", str(cpu)]), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise UnusableInput(f"the stamped server did not start (exit status {process.wait(10)}).")
        yield int(msgspec.json.decode(line)["port"]), process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> int:
    """Serve until standard input ends or SIGTERM comes; the first line on standard output tells the port."""
    if "--cpu" in sys.argv:
        os.sched_setaffinity(0, {int(sys.argv[sys.argv.index("--cpu") + 1])})
    # Sleep as exactly as the kernel can. Where it can't be had, events are written some 50 µs later, as the stamps say.
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
    gc.disable()
    server = StampedServer(on_first=lambda at_ns: print(f'{{"first_request_ns": {at_ns}}}', flush=True))

    def stop(_number: int, _frame: FrameType | None) -> None:
        server.stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print(msgspec.json.encode({"port": server.port, "pid": os.getpid()}).decode(), flush=True)
    server.serve(is_over=_stdin_ended)
    server.close()
    return 0


def _stdin_ended() -> bool:
    ready, _, _ = select.select([0], [], [], 0)
    return bool(ready) and not os.read(0, 1)


if __name__ == "__main__":
    sys.exit(main())
