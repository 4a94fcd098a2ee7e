"""The HTTP side: HTTP/1.1 with keep-alive, the paths of vLLM that the project uses, answers in vLLM's shape."""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, urlsplit

from engine_standin.engine import Engine, Request
from engine_standin.faults import Faults
from engine_standin.launch import VERSION, Launch

ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
SALT = re.compile(r"[^@/\\\0]{1,128}")
FINGERPRINT = f"vllm-{VERSION}-standin"


class HttpError(Exception):
    """An answer other than 200, with vLLM's error body."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError") -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": None, "code": status}}


@dataclass(frozen=True)
class Call:
    """One HTTP request, read whole."""

    method: str
    path: str
    query: Mapping[str, list[str]]
    body: bytes
    keep_alive: bool


class Server:
    """Answers from an engine. `server_info` is the body of /server_info, None outside development mode."""

    def __init__(
        self,
        engine: Engine,
        launch: Launch,
        faults: Faults,
        server_info: Mapping[str, Any] | None,
        log: Callable[[str], None],
    ) -> None:
        self.engine, self.launch, self.faults, self.log = engine, launch, faults, log
        self.server_info = server_info
        self.shown_name = shown_model_name(launch, faults)
        self.version = faults.text("wrong_version") if "wrong_version" in faults else VERSION
        self._streams = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either side ends it."""
        try:
            while (call := await _read_call(reader)) is not None:
                status, keep = await self._answer(call, reader, writer)
                peer = ":".join(map(str, writer.get_extra_info("peername") or ("?",)))
                reason = HTTPStatus(status).phrase
                self.log(f'INFO:     {peer} - "{call.method} {call.path} HTTP/1.1" {status} {reason}')
                if not keep:
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            pass
        except asyncio.CancelledError:
            pass  # the engine stops; asyncio would print a traceback for each open connection
        finally:
            writer.close()

    async def _answer(self, call: Call, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[int, bool]:
        started = time.monotonic()
        keep = call.keep_alive
        try:
            if (call.method, call.path) == ("POST", "/v1/completions"):
                keep = await self._complete(call, reader, writer) and keep
                self._count_http(time.monotonic() - started)
                return 200, keep
            status, body = self._plain(call)
        except HttpError as error:
            status, body = error.status, error.body
        if isinstance(body, str):
            head, data = "text/plain; version=1.0.0; charset=utf-8", body.encode()
        else:
            head, data = "application/json", b"" if body is None else _json(body)
        writer.write(_head(status, f"content-type: {head}\r\ncontent-length: {len(data)}", call.keep_alive) + data)
        await writer.drain()
        return status, keep

    def _plain(self, call: Call) -> tuple[int, object]:
        """Status and body (text, something for JSON, or None for nothing) of a call that is no completion."""
        route = (call.method, call.path.rstrip("/") or "/")
        if route in (("GET", "/health"), ("GET", "/ping")):
            return (503 if self.engine.dead else 200), None
        if route == ("GET", "/version"):
            return 200, {"version": self.version}
        if route == ("GET", "/v1/models"):
            return 200, {"object": "list", "data": [self._model_card()]}
        if route == ("GET", "/metrics"):
            return 200, self.engine.page()
        if route == ("GET", "/load"):
            return 200, {"server_load": len(self.engine.running)}
        if self.server_info is not None and route == ("GET", "/server_info"):
            as_json = call.query.get("config_format") == ["json"]
            config = self.server_info["vllm_config"]
            return 200, {**self.server_info, "vllm_config": config if as_json else str(config)}
        if self.server_info is not None and route == ("POST", "/reset_prefix_cache"):
            external = call.query.get("reset_external", [""])[0].lower() in ("true", "1")
            return 200, {"success": self.engine.reset_caches(external)}
        raise HttpError(404, "Not Found", "NotFoundError")

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self.shown_name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vllm",
            "root": self.launch.model_dir,
            "parent": None,
            "max_model_len": self.launch.max_model_len,
            "permission": [],
        }

    def _count_http(self, seconds: float) -> None:
        metrics, route = self.engine.metrics, {"handler": "/v1/completions"}
        metrics.add("http_requests_total", 1, **route, method="POST", status="2xx")
        metrics.add("http_request_size_bytes", 1, **route)
        metrics.add("http_response_size_bytes", 1, **route)
        metrics.observe("http_request_duration_highr_seconds", seconds)
        metrics.observe("http_request_duration_seconds", seconds, **route, method="POST")

    async def _complete(self, call: Call, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer a completion; False when the connection must not be used again."""
        asked = self._parse(call.body)
        request = self._request(asked)
        if self.engine.dead:
            raise HttpError(500, ENGINE_DEAD, "InternalServerError")
        self.engine.submit(request)
        reply = _Reply(self, asked, request)
        streaming = bool(asked.get("stream"))
        cut_every = int(self.faults.number("abort_requests", 5)) if "abort_requests" in self.faults else 0
        self._streams += streaming
        cut = streaming and cut_every > 0 and self._streams % cut_every == 0
        if streaming:
            writer.write(
                _head(200, "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked", True)
            )
        while request.finish_reason is None or not request.emitted.empty():
            token = await self._next_token(request, reader)
            if token is None and not streaming:
                raise HttpError(500, ENGINE_DEAD, "InternalServerError")
            if streaming:
                await _write_event(writer, reply.chunk(token) if token is not None else _dead_event())
            if token is None:
                break
            reply.tokens.append(token)
            if cut:
                self.engine.abort(request)
                writer.transport.abort()
                return False
        if not streaming:
            data = _json(reply.whole())
            writer.write(_head(200, f"content-type: application/json\r\ncontent-length: {len(data)}", True) + data)
        else:
            if request.finish_reason and (asked.get("stream_options") or {}).get("include_usage"):
                await _write_event(writer, reply.usage_chunk())
            await _write_event(writer, b"[DONE]")
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    async def _next_token(self, request: Request, reader: asyncio.StreamReader) -> int | None:
        while True:
            try:
                return await asyncio.wait_for(request.emitted.get(), 0.2)
            except TimeoutError:
                if reader.at_eof():
                    self.engine.abort(request)
                    raise ConnectionResetError("the client has gone") from None

    def _parse(self, body: bytes) -> dict[str, Any]:
        try:
            asked = json.loads(body)
        except ValueError as error:
            raise HttpError(400, f"JSON decode error: {error}") from None
        if not isinstance(asked, dict):
            raise HttpError(400, "Input should be a valid dictionary")
        return asked

    def _request(self, asked: Mapping[str, Any]) -> Request:
        if asked.get("model") not in (None, self.launch.model_name, self.shown_name):
            raise HttpError(404, f"The model `{asked['model']}` does not exist.", "NotFoundError")
        prompt = asked.get("prompt")
        if isinstance(prompt, str):
            prompt = list(prompt.encode())
        elif isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
            prompt = prompt[0]
        if not isinstance(prompt, list) or not prompt or any(type(token) is not int for token in prompt):
            raise HttpError(400, "the stand-in takes one prompt: a text or a list of token ids")
        output, limit = int(asked.get("max_tokens") or 16), self.launch.max_model_len
        if len(prompt) + output > limit:
            raise HttpError(
                400,
                f"This model's maximum context length is {limit} tokens. However, you requested {output} output "
                f"tokens and your prompt contains {len(prompt)} input tokens.",
            )
        salt = asked.get("cache_salt")
        if salt is not None and not (isinstance(salt, str) and salt):
            raise HttpError(400, "Parameter 'cache_salt' must be a non-empty string if provided.")
        if salt is not None and not SALT.fullmatch(salt):
            raise HttpError(
                400,
                "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', '\\\\', or NUL.",
            )
        transfer = asked.get("kv_transfer_params") or {}
        caps = {name: self._cap(name, transfer.get(name)) for name in ("max_load_tokens", "max_offload_tokens")}
        # The likeliest token ends the answer as soon as it may: that is after min_tokens others.
        biased = asked.get("logit_bias") or {}
        ends = any(str(token) in biased for token in asked.get("stop_token_ids") or [])
        stop_after = int(asked.get("min_tokens") or 0) + 1 if ends else None
        return Request(prompt, output, salt or "", caps["max_load_tokens"], caps["max_offload_tokens"], stop_after)

    def _cap(self, name: str, value: object) -> int | None:
        if type(value) is int and value >= 0:
            return value
        if value is not None and self.launch.transfer:
            self.engine.log_warning(f"{name} must be a non-negative int, got {value!r}; ignoring")
        return None


class _Reply:
    """One completion's answer in vLLM's shape, as chunks or whole."""

    def __init__(self, server: Server, asked: Mapping[str, Any], request: Request) -> None:
        self.asked, self.request = asked, request
        self.details = server.launch.prompt_details
        self.tokens: list[int] = []
        self.frame = {
            "id": f"cmpl-{asked.get('request_id') or uuid.uuid4().hex[:16]}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": server.shown_name,
        }

    def _choice(self, tokens: list[int], first: bool, last: bool) -> dict[str, Any]:
        show_ids = bool(self.asked.get("return_token_ids"))
        return {
            "index": 0,
            "text": "".join(map(text_of, tokens)),
            "logprobs": None,
            "finish_reason": self.request.finish_reason if last else None,
            "stop_reason": None,
            "prompt_token_ids": self.request.prompt if show_ids and first else None,
            "token_ids": tokens if show_ids else None,
        }

    def chunk(self, token: int) -> bytes:
        last = self.request.finish_reason is not None and self.request.emitted.empty()
        return _json({**self.frame, "choices": [self._choice([token], not self.tokens, last)]})

    def _usage(self) -> dict[str, Any]:
        prompt, output = len(self.request.prompt), len(self.tokens)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + output,
            "completion_tokens": output,
        }
        if self.details:
            cached = self.request.local_tokens + self.request.external_tokens
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return usage

    def usage_chunk(self) -> bytes:
        return _json({**self.frame, "choices": [], "usage": self._usage(), "system_fingerprint": FINGERPRINT})

    def whole(self) -> dict[str, Any]:
        choice = self._choice(self.tokens, True, True)
        return {**self.frame, "choices": [choice], "system_fingerprint": FINGERPRINT, "usage": self._usage()}


def text_of(token: int) -> str:
    """A character for a token id; for some it is U+0085, which str.splitlines() takes for a line's end."""
    return "\x85" if token % 13 == 0 else chr(token) if 32 <= token < 127 else ""


def shown_model_name(launch: Launch, faults: Faults) -> str:
    """The name in /v1/models, metrics and answers."""
    return launch.model_name + ("-other" if "wrong_model_name" in faults else "")


def _dead_event() -> bytes:
    return _json(HttpError(500, ENGINE_DEAD, "InternalServerError").body)


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _head(status: int, fields: str, keep_alive: bool) -> bytes:
    closing = "" if keep_alive else "connection: close\r\n"
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nserver: uvicorn\r\n{fields}\r\n{closing}\r\n".encode()


async def _write_event(writer: asyncio.StreamWriter, data: bytes) -> None:
    event = b"data: " + data + b"\n\n"
    writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
    await writer.drain()


async def _read_call(reader: asyncio.StreamReader) -> Call | None:
    """The next request of a connection; None at its end."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    method, target, protocol = first.split(" ")
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(fields.get("content-length", 0)))
    url = urlsplit(target)
    wish = fields.get("connection", "" if protocol == "HTTP/1.1" else "close").lower()
    return Call(method, url.path, parse_qs(url.query), body, wish != "close")
