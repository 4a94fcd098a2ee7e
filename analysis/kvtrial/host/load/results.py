"""From a finished exchange to its result: the stream is read, and what went wrong gets its one class."""

import re
from array import array

import msgspec

from kvtrial.host.load.connection import Exchange
from kvtrial.host.load.http1 import MalformedResponse, Response
from kvtrial.host.load.quickread import read_quickly
from kvtrial.host.load.spool import Spool
from kvtrial.host.load.sse import StreamedAnswer, read_answer, token_gaps_us
from kvtrial.record.load import RequestError, RequestResult

DETAIL_CHARACTERS = 300

_ENDED_BY_US = ("idle_timeout", "request_timeout", "deadlock")


def result_of(exchange: Exchange, began_ns: int, spool: Spool) -> RequestResult:
    """The result of a finished exchange of a phase that began at `began_ns`. Its response is of no use afterwards."""
    response = exchange.response
    answer = _answer_of(response) if response.status == 200 else StreamedAnswer()
    error = _error(exchange, response, answer, spool)
    response.close()
    return RequestResult(
        key=exchange.key,
        prompt_sha256=exchange.prompt_sha256,
        prompt_tokens=answer.prompt_tokens,
        scheduled_ns=exchange.scheduled_ns - began_ns,
        sent_ns=_since(began_ns, exchange.sent_ns),
        first_byte_ns=_since(began_ns, exchange.first_byte_ns),
        first_token_ns=_since(began_ns, answer.first_token_ns),
        last_token_ns=_since(began_ns, answer.last_token_ns),
        token_gaps_us=token_gaps_us(answer.token_stamps_ns),
        output_token_ids=answer.output_token_ids,
        answer_sha256=answer.answer_sha256,
        output_tokens=answer.output_tokens,
        cached_tokens=answer.cached_tokens,
        finish_reason=answer.finish_reason,
        error=error,
    )


def _answer_of(response: Response) -> StreamedAnswer:
    if response.streaming and response.complete and not response.interim_seen:
        body_reads, stamps_ns = _without_head(response)
        answer = read_quickly(body_reads, stamps_ns)
        if answer is not None:
            return answer
    malformed = None
    try:
        body = response.frame()
    except MalformedResponse as problem:
        malformed, body = str(problem), response.frame()
    answer = read_answer(body.chunks, body.stamps_ns)
    if response.complete and not response.ended:
        malformed = malformed or "the response went on after its end"
    answer.malformed = answer.malformed or malformed
    return answer


def _without_head(response: Response) -> tuple[list[bytes], "array[int]"]:
    """The reads of a response from its body on, and their stamps."""
    seen = b""
    for number, read in enumerate(response.reads, start=1):
        seen += read
        if (at := seen.find(b"\r\n\r\n")) >= 0:
            begun = seen[at + 4 :]
            first = number - 1 if begun else number
            return [*([begun] if begun else []), *response.reads[number:]], response.stamps_ns[first:]
    return [], response.stamps_ns[:0]


def _error(exchange: Exchange, response: Response, answer: StreamedAnswer, spool: Spool) -> RequestError | None:
    """The one error of an exchange: what the server said outranks how the connection then ended."""
    ended_by_us = exchange.error is not None and exchange.error.error_class in _ENDED_BY_US
    if ended_by_us or response.status is None:
        return exchange.error or RequestError(error_class="malformed_stream", detail="a response without a status")
    if response.status != 200:
        detail = _told(b"".join(response.frame().chunks), spool[exchange.number].prompt_text())
        return RequestError(error_class="http_status", http_status=response.status, detail=detail)
    if answer.reported_error is not None:
        code, message = answer.reported_error
        told = _without_prompt(message, spool[exchange.number].prompt_text())
        detail = f"an error reported inside the stream: {told}"
        return RequestError(error_class="http_status", http_status=code, detail=detail)
    if response.content_type is not None and not response.content_type.startswith("text/event-stream"):
        detail = f"the content type is {response.content_type[:80]!r}, not text/event-stream"
        return RequestError(error_class="malformed_stream", detail=detail)
    if answer.malformed is not None:
        return RequestError(error_class="malformed_stream", detail=answer.malformed[:DETAIL_CHARACTERS])
    if not answer.done:
        no_done = f"the answer ended without [DONE] after {answer.output_tokens} tokens"
        return exchange.error or RequestError(error_class="stream_ended_without_done", detail=no_done)
    if exchange.error is not None and exchange.error.error_class == "malformed_stream":
        return exchange.error
    # The answer is whole; that the connection broke after [DONE] changes nothing of it.
    return None


def _told(body: bytes, prompt_text: str | None) -> str:
    """What an error body says, without the prompt: vLLM's validation messages quote their input."""
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        parsed = None
    message: object = None
    if isinstance(parsed, dict):
        inner = parsed.get("error")
        message = inner.get("message") if isinstance(inner, dict) else parsed.get("message")
    return _without_prompt(message if isinstance(message, str) else body.decode("utf-8", "replace"), prompt_text)


def _without_prompt(message: str, prompt_text: str | None) -> str:
    if prompt_text:
        message = message.replace(prompt_text, "<prompt>")
    message = re.sub(r"""(["']input["']\s*:).*""", r"\1 <input>", message, flags=re.DOTALL)
    return message[:DETAIL_CHARACTERS]


def _since(began_ns: int, at_ns: int | None) -> int | None:
    return None if at_ns is None else at_ns - began_ns
