"""Recorded requests as a file of JSON lines: the one form in which the controller writes them and the host reads them.

The form is also one that users may write by hand; playbooks/protocols/README.md describes it. Files are written and
read a line at a time.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import zstandard
from msgspec import Meta

from kvtrial.record.errors import UnusableInput
from kvtrial.record.store import sync_directory

_ZSTD_LEVEL = 3
_READ_BYTES = 1 << 18
MOST_TOKENS = 10_000_000
MOST_PAUSE_SECONDS = 3600.0
Tokens = Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Text = Annotated[str, Meta(min_length=1)]


class TraceLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One recorded request: exactly one of `prompt` (text), `prompt_token_ids` and `prompt_tokens` (a length).

    `time` in seconds from any origin. `prompt_id`: prompts of one id begin alike, the shorter being the beginning of
    the longer; where only lengths are given they are made so. `after`: number (from 1) of an earlier line that must
    have ended first; this request is then sent `pause_seconds` later, whatever its time. `max_tokens` is always there
    in a file that kvtrial wrote. `salt` None: the phase's own.
    """

    time: float | None = None
    prompt: Text | None = None
    prompt_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MOST_TOKENS)] | None = None
    prompt_tokens: Tokens | None = None
    prompt_id: Text | None = None
    max_tokens: Tokens | None = None
    salt: Text | None = None
    after: Annotated[int, Meta(ge=1)] | None = None
    pause_seconds: Annotated[float, Meta(ge=0, le=MOST_PAUSE_SECONDS)] = 0.0


def write_trace(path: Path, lines: Iterable[TraceLine]) -> str:
    """Write lines to `path` (zstandard); return the sha256 in hex of the lines before compression.

    The file appears whole or not at all. Raises OSError.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    encoder = msgspec.json.Encoder()
    digest = hashlib.sha256()
    try:
        with temporary.open("wb") as file:
            compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True)
            with compressor.stream_writer(file, closefd=False) as writer:
                for line in lines:
                    content = encoder.encode(line) + b"\n"
                    digest.update(content)
                    writer.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
    return digest.hexdigest()


def read_trace(path: Path, sha256: str) -> Iterator[TraceLine]:
    """Read what `write_trace` wrote. Raises UnusableInput at the end where the lines don't have that sha256.

    Whoever sends requests must have read all of them first.
    """
    decoder = msgspec.json.Decoder(TraceLine)
    digest = hashlib.sha256()
    try:
        for content in raw_lines(path):
            digest.update(content + b"\n")
            yield decoder.decode(content)
    except OSError as error:
        raise UnusableInput(f"{path} can't be read ({error.strerror}); run the same command again.") from None
    except msgspec.DecodeError:
        raise _damaged(path) from None
    if digest.hexdigest() != sha256:
        raise _damaged(path)


def check_trace(path: Path, sha256: str) -> None:
    """Raise UnusableInput unless the lines of `path` have that sha256."""
    for _ in read_trace(path, sha256):
        pass


def _damaged(path: Path) -> UnusableInput:
    return UnusableInput(
        f"{path} does not match its digest: it was cut, damaged or edited; run the same command again, which ships it "
        f"anew."
    )


def raw_lines(path: Path) -> Iterator[bytes]:
    """Lines of a file, compressed with zstandard or plain, without their ends. A last line need not have an end.

    Raises OSError, and UnusableInput for a compressed file that is not whole.
    """
    tail = b""
    for block in raw_blocks(path):
        first, *rest = block.split(b"\n")
        if not rest:
            # Joined only once a line's end is there: long lines arrive in many blocks.
            tail += first
            continue
        yield tail + first
        yield from rest[:-1]
        tail = rest[-1]
    if tail:
        yield tail


def raw_blocks(path: Path) -> Iterator[bytes]:
    """Content of a file, compressed with zstandard or plain, in pieces. Raises as `raw_lines`."""
    with path.open("rb") as file:
        packed = file.read(4) == zstandard.FRAME_HEADER
        file.seek(0)
        if not packed:
            while block := file.read(_READ_BYTES):
                yield block
            return
        # A stream reader of zstandard takes a cut file for a short one; a decompression object knows the frame's end.
        frame = zstandard.ZstdDecompressor().decompressobj()
        while not frame.eof:
            packed_block = file.read(_READ_BYTES)
            if not packed_block:
                raise UnusableInput(f"{path} ends in the middle of its compressed content; copy it again.")
            try:
                yield frame.decompress(packed_block)
            except zstandard.ZstdError as error:
                raise UnusableInput(f"{path} is not a whole zstandard file ({error}); copy it again.") from None
