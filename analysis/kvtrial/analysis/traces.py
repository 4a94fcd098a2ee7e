"""Read the user's own requests: JSON lines or ShareGPT-shaped JSON, checked line by line, written in one normal form.

Files are read and written a request at a time. A user's file is never changed. What is wrong is said before anything
starts: a sentence a line, with the file, the line, the value and what is allowed.
"""

import codecs
import json
import math
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from kvtrial.analysis.inputs import Request
from kvtrial.analysis.workloads import MOST_REQUESTS, TraceFile, Traces
from kvtrial.record.errors import UnusableInput
from kvtrial.record.protocol import FromAnswer, Protocol, Recorded, Trace
from kvtrial.record.trace import MOST_PAUSE_SECONDS, MOST_TOKENS, TraceLine, raw_blocks, raw_lines, write_trace

TRACES_FOLDER = "workloads"
MOST_SENTENCES = 3
"""Bad lines that are named before reading is given up."""
LONGEST_ENTRY_CHARACTERS = 1 << 24
LONGEST_SHOWN = 60
BETWEEN = re.compile(r"[\s,]*")
LINE = msgspec.json.Decoder(TraceLine)
QUESTION = ("human", "user")
ANSWER = ("gpt", "assistant", "chatgpt", "bing", "bard", "model", "bot")
CONTEXT = ("system",)
FORMS = ("prompt", "prompt_token_ids", "prompt_tokens")
ALLOWED = {
    "time": "a number of seconds",
    "prompt": "a text that is not empty",
    "prompt_token_ids": f"a list of 1 to {MOST_TOKENS} whole numbers from 0 to {2**32 - 1}",
    "prompt_tokens": f"a whole number from 1 to {MOST_TOKENS}",
    "prompt_id": "a text that is not empty",
    "max_tokens": f"a whole number from 1 to {MOST_TOKENS}",
    "salt": "a text that is not empty, or left out for the phase's own salt",
    "after": "the number of an earlier line, from 1",
    "pause_seconds": f"a number from 0 to {MOST_PAUSE_SECONDS:g}",
}


class Entry(Struct, frozen=True):
    """One JSON object of a file: the line that it begins in, and what it holds (as bytes where nothing read it yet)."""

    line: int
    content: Any


class Message(Struct, frozen=True):
    """One message of a ShareGPT-shaped conversation; other fields are ignored."""

    role: str = msgspec.field(name="from")
    value: str


@contextmanager
def read_traces(request: Request, protocol: Protocol, resolved: list[Protocol]) -> Iterator[Traces]:
    """The traces that a protocol replays, read and written to a folder that is there as long as this is open.

    `resolved`: the protocol as each host has it. Raises UnusableInput.
    """
    wanted = [trace for protocol_here in resolved for trace in _replayed(protocol_here)]
    if request.trace and not wanted:
        raise UnusableInput(
            f"kvtrial_trace={request.trace} is given, and protocol {protocol.name} replays no trace; leave it out, or "
            f"choose a protocol with a workload of kind trace."
        )
    with tempfile.TemporaryDirectory(prefix="kvtrial-traces-") as name:
        folder = Path(name)
        (folder / TRACES_FOLDER).mkdir()
        files = {trace: _read(trace, request, protocol.name, folder) for trace in dict.fromkeys(wanted)}
        for protocol_here in resolved:
            _refuse_untimed(protocol_here, files)
        yield Traces(folder, files)


def _replayed(protocol: Protocol) -> list[Trace]:
    used = {phase.workload for phase in protocol.phases}
    return [
        workload
        for name, workload in (protocol.workloads or {}).items()
        if isinstance(workload, Trace) and name in used
    ]


def _refuse_untimed(protocol: Protocol, files: dict[Trace, TraceFile]) -> None:
    """Raise UnusableInput where a phase replays recorded times and a line has none."""
    for phase in protocol.phases:
        workload = (protocol.workloads or {}).get(phase.workload) if phase.workload else None
        if isinstance(workload, Trace) and isinstance(phase.arrivals, Recorded):
            read = files[workload]
            if read.untimed_line is not None:
                raise UnusableInput(
                    f"{read.source} line {read.untimed_line} has no time, and phase {phase.name} replays recorded "
                    f"times; give every line a time in seconds, or other arrivals."
                )


def _read(trace: Trace, request: Request, protocol: str, folder: Path) -> TraceFile:
    """Read one trace and write it below `folder`, named by the sha256 of its lines."""
    given = request.trace or trace.file
    if not given:
        raise UnusableInput(
            f"protocol {protocol} replays a trace, and none is given; name a file: -e kvtrial_trace=PATH, or file of "
            f"the workload."
        )
    path = Path(request.working_dir) / Path(given).expanduser()
    if not path.is_file():
        raise UnusableInput(f"trace {given}: no such file in {path.parent}; give the path of a file of requests.")
    facts = Facts(given)
    temporary = folder / "incoming"
    try:
        digest = write_trace(temporary, facts.noting(trace_lines(path, given, trace, facts)))
    except OSError as error:
        raise UnusableInput(
            f"trace {given} can't be read or written ({error.strerror}); give a readable file."
        ) from None
    except UnicodeDecodeError as error:
        raise UnusableInput(f"trace {given} is not UTF-8 ({error.reason}); save it as UTF-8.") from None
    file = f"{TRACES_FOLDER}/{digest}.jsonl.zst"
    temporary.rename(folder / file)
    return facts.trace_file(file, digest)


class Facts:
    """What is learned of a trace while it passes."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.requests = 0
        self.first: float | None = None
        self.last: float | None = None
        self.untimed_line: int | None = None
        self.text = False
        self.left_out = 0

    def noting(self, lines: Iterator[TraceLine]) -> Iterator[TraceLine]:
        """The same lines. Raises UnusableInput for none, and for too many."""
        for line in lines:
            self.requests += 1
            if self.requests > MOST_REQUESTS:
                raise UnusableInput(
                    f"trace {self.source} has more than {MOST_REQUESTS} requests; declare requests of the workload, "
                    f"which takes the first of them."
                )
            self.text |= line.prompt is not None
            if line.after is None:
                self.first = line.time if self.first is None else self.first
                self.last = line.time if line.time is not None else self.last
                if line.time is None and self.untimed_line is None:
                    self.untimed_line = self.requests
            yield line
        if not self.requests:
            raise UnusableInput(f"trace {self.source} holds no request; give a file with at least one.")

    def trace_file(self, file: str, sha256: str) -> TraceFile:
        """What there is to know of the trace that was written as `file`."""
        timed = self.first is not None and self.last is not None and self.untimed_line is None
        return TraceFile(
            source=self.source,
            file=file,
            sha256=sha256,
            requests=self.requests,
            seconds=(self.last or 0.0) - (self.first or 0.0) if timed else None,
            untimed_line=self.untimed_line,
            text=self.text,
            left_out=self.left_out,
        )


def trace_sentence(read: TraceFile) -> str:
    """What was read, for people."""
    over = "" if read.seconds is None else f" over {read.seconds:.0f} s"
    text = "; prompts are text, so their lengths in tokens are estimates" if read.text else ""
    skipped = f"; {read.left_out} conversations in which nothing is asked are left out" if read.left_out else ""
    return f"trace {read.source}: {read.requests} requests{over}{text}{skipped}."


def trace_lines(path: Path, name: str, trace: Trace, facts: Facts) -> Iterator[TraceLine]:
    """The requests of a user's file in normal form. Raises UnusableInput, a sentence for each of the first bad ones."""
    problems: list[str] = []
    made, latest, most = 0, None, int(trace.requests) or math.inf
    for entry in entries(path, name):
        try:
            lines = _requests_of(entry, name, trace, made, latest)
        except UnusableInput as error:
            problems.append(str(error))
            if len(problems) == MOST_SENTENCES:
                break
            made += 1
            continue
        facts.left_out += not lines
        for line in lines[: None if most == math.inf else int(most) - made]:
            made += 1
            latest = line.time if line.time is not None and line.after is None else latest
            if not problems:
                yield line
        if made >= most:
            break
    if problems:
        raise UnusableInput(" ".join(problems))


def entries(path: Path, name: str) -> Iterator[Entry]:
    """The objects of a file: elements of a JSON array, or lines. Raises UnusableInput for a list that is not whole."""
    if _is_array(path):
        yield from _elements(path, name)
        return
    for number, line in enumerate(raw_lines(path), start=1):
        yield Entry(number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)


def _is_array(path: Path) -> bool:
    for block in raw_blocks(path):
        if content := block.removeprefix(b"\xef\xbb\xbf").lstrip():
            return content.startswith(b"[")
    return False


def _elements(path: Path, name: str) -> Iterator[Entry]:
    """Elements of a JSON array, each read when it is whole: memory holds the longest one and a block."""
    decoder = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)
    blocks = _texts(path)
    text, line = "", 1
    while "[" not in text:
        text += next(blocks)
    at = text.index("[") + 1
    line += text.count("\n", 0, at)
    while True:
        begin = _between(text, at)
        line += text.count("\n", at, begin)
        at = begin
        if text.startswith("]", at):
            return
        why = "the list has no end"
        try:
            content, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            why = error.msg
        except (ValueError, RecursionError) as error:  # a number of a thousand digits, lists in lists in lists
            raise UnusableInput(
                f"{name} line {line}: {_shown(text[at : at + LONGEST_SHOWN])} can't be used ({error})."
            ) from None
        else:
            yield Entry(line, content)
            line += text.count("\n", at, end)
            at = end
            continue
        # It may only be cut by the block's end.
        more = next(blocks, None)
        if more is None or len(text) - at > LONGEST_ENTRY_CHARACTERS:
            raise UnusableInput(
                f"{name} line {line}: {_shown(text[at : at + LONGEST_SHOWN])} is not whole JSON ({why}); give a list "
                f"of conversations in the form of ShareGPT."
            )
        text, at = text[at:] + more, 0


def _finite(number: str) -> float:
    """A number of JSON, which knows no NaN and nothing infinite. Raises ValueError."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is no number that can be used")
    return value


def _between(text: str, at: int) -> int:
    """Where the next element or the end of the list begins."""
    found = BETWEEN.match(text, at)
    return found.end() if found else at


def _texts(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    for block in raw_blocks(path):
        yield decoder.decode(block)
    yield decoder.decode(b"", final=True)


def _requests_of(entry: Entry, name: str, trace: Trace, made: int, latest: float | None) -> list[TraceLine]:
    """The requests of one line or element, of which `made` come before. Raises UnusableInput with the sentence."""
    where = f"{name} line {entry.line}"
    content = entry.content
    if isinstance(content, bytes):
        if b'"conversations"' not in content:
            return [_checked(_typed(content, where), where, trace, made, latest)]
        content = _object(content, where)
    if isinstance(content, dict) and "conversations" not in content:
        return [_checked(_typed(json.dumps(content).encode(), where), where, trace, made, latest)]
    return _turns(content, where, trace, made)


def _object(content: bytes, where: str) -> Any:
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnusableInput(f"{where}: {_shown(content)} is no JSON ({error}); give one object a line.") from None


def _typed(content: bytes, where: str) -> TraceLine:
    """A line's fields in their types, or the sentence that names the wrong one."""
    try:
        return LINE.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = str(error)
    raw = _object(content, where)
    if not isinstance(raw, dict):
        raise UnusableInput(
            f"{where}: {_shown(content)} is no JSON object; give one a line, such as "
            f'{{"prompt": "Hello", "max_tokens": 8}}.'
        )
    for field, value in raw.items():
        if field not in ALLOWED:
            raise UnusableInput(f"{where} has a field {_shown(field)}; allowed are {', '.join(ALLOWED)}.")
        try:
            msgspec.convert({field: value}, type=TraceLine)
        except msgspec.ValidationError:
            raise UnusableInput(f"{where}: {field}={_shown(value)} can't be used; give {ALLOWED[field]}.") from None
    raise UnusableInput(f"{where}: {_shown(content)} can't be used: {message}.")


def _checked(line: TraceLine, where: str, trace: Trace, made: int, latest: float | None) -> TraceLine:
    """The line with its max_tokens. Raises UnusableInput where its fields contradict each other or what came before."""
    given = [form for form in FORMS if getattr(line, form) is not None]
    if len(given) != 1:
        raise UnusableInput(
            f"{where} has {' and '.join(given) or 'no prompt'}; give exactly one of {', '.join(FORMS)}."
        )
    if line.after is not None and line.after > made:
        raise UnusableInput(f"{where}: after={line.after} is no earlier line; give a number from 1 to {made}.")
    if line.after is None and line.pause_seconds:
        raise UnusableInput(f"{where} has pause_seconds={line.pause_seconds:g} and no after; give both or neither.")
    if line.time is not None and line.after is None and latest is not None and line.time < latest:
        raise UnusableInput(
            f"{where}: time={line.time!r} is before the {latest!r} of a line above; give times in order: sort them."
        )
    if line.max_tokens is not None:
        return line
    if not isinstance(trace.max_tokens, int):
        raise UnusableInput(
            f"{where} has no max_tokens; give {ALLOWED['max_tokens']}, or max_tokens of the protocol's workload."
        )
    return msgspec.structs.replace(line, max_tokens=trace.max_tokens)


def _turns(content: Any, where: str, trace: Trace, made: int) -> list[TraceLine]:
    """A ShareGPT-shaped conversation as requests: one a question, after all messages before it, joined by line ends."""
    rule = trace.max_tokens
    if rule is None:
        raise UnusableInput(
            f"{where} is a conversation, which says nothing of output lengths; declare max_tokens of the protocol's "
            f"workload: a number, or {{kind: from_answer, least: 1, most: 512}}."
        )
    messages = _messages(content, where)
    lines: list[TraceLine] = []
    said = ""
    for at, message in enumerate(messages):
        said = f"{said}\n{message.value}" if said else message.value
        if message.role not in QUESTION or not said:
            continue
        answer = messages[at + 1].value if at + 1 < len(messages) and messages[at + 1].role in ANSWER else ""
        lines.append(
            TraceLine(
                prompt=said,
                prompt_id=f"{made + 1}",
                max_tokens=_answer_tokens(answer, rule) if isinstance(rule, FromAnswer) else int(rule),
                after=made + len(lines) if lines else None,
            )
        )
    return lines


def _messages(content: Any, where: str) -> list[Message]:
    said = content.get("conversations") if isinstance(content, dict) else None
    if not isinstance(said, list):
        raise UnusableInput(
            f"{where}: {_shown(content)} is no conversation; give "
            f'{{"conversations": [{{"from": "human", "value": "…"}}, …]}}.'
        )
    messages = []
    for number, message in enumerate(said, start=1):
        try:
            read = msgspec.convert(message, type=Message)
        except msgspec.ValidationError as error:
            raise UnusableInput(
                f"{where}: message {number} is {_shown(message)} ({error}); give it a from and a value, both texts."
            ) from None
        if read.role not in (*QUESTION, *ANSWER, *CONTEXT):
            raise UnusableInput(
                f"{where}: message {number} is from {_shown(read.role)}; allowed are "
                f"{', '.join((*QUESTION, *ANSWER, *CONTEXT))}."
            )
        messages.append(read)
    return messages


def _answer_tokens(answer: str, rule: FromAnswer) -> int:
    return min(max(math.ceil(len(answer) / rule.characters_per_token), int(rule.least)), int(rule.most))


def _shown(value: Any) -> str:
    """A value as the file has it, cut where it is long."""
    if isinstance(value, bytes):
        text = value.decode("utf-8", errors="replace")
    elif isinstance(value, str) and value.startswith("{"):
        text = value
    else:
        text = json.dumps(value, ensure_ascii=False)
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 1] + "…"
