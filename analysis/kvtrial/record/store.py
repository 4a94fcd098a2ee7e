"""Files that are whole or absent."""

import hashlib
import os
from pathlib import Path

import zstandard

RECORD = "record.json"
"""The record in a run's folder, as the host wrote it."""
PACKED_RECORD = "record.json.zst"
"""A record that came alone, compressed. Its stated digest is that of the text in it."""
MOST_RECORD_BYTES = 2**30
_LEVEL = 12
_READ_BYTES = 1 << 18

SUMMARY_ONLY = "summary-only"
"""A file in a fetched run of which the record came alone: the files that the record names are still on the host."""


FOR_OTHERS = 0o644
"""The mode of a file that another account reads, whatever the umask."""


def write_atomically(path: Path, content: bytes, mode: int | None = None) -> str:
    """Write `content` to `path` by a temporary file, fsync and rename; return its sha256 in hex.

    `mode`: of the file; without it as the umask says. A reader sees the old file or the new one, never a part. Raises
    OSError (disk full, no permission) and leaves no temporary file behind then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
    return hashlib.sha256(content).hexdigest()


def sync_directory(path: Path) -> None:
    """fsync a directory, so that a rename in it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def stated_digest(path: Path) -> str:
    """The sha256 that `path` states, a line as sha256sum writes it. Raises ValueError where it states none."""
    words = path.read_text().split()
    if not words:
        raise ValueError(f"{path.name} is empty")
    return words[0]


def sha256_of_file(path: Path) -> str:
    """sha256 of a file's content in hex."""
    digest = hashlib.sha256()
    # Unbuffered: most files of a run are small, and hashlib.file_digest makes a large buffer for each.
    with path.open("rb", buffering=0) as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def packed_record(content: bytes) -> bytes:
    """What PACKED_RECORD holds for a record of this text."""
    return zstandard.ZstdCompressor(level=_LEVEL).compress(content)


def record_path(run: Path) -> Path:
    """The record in a run's folder, as it is there; RECORD where there is none."""
    whole, packed = run / RECORD, run / PACKED_RECORD
    return packed if packed.is_file() and not whole.is_file() else whole


def record_text(run: Path) -> bytes:
    """The text of the record in a run's folder. Raises OSError, and ValueError for a compressed one that is damaged."""
    path = record_path(run)
    content = path.read_bytes()
    if path.name == RECORD:
        return content
    try:
        if zstandard.frame_content_size(content) > MOST_RECORD_BYTES:
            raise ValueError(f"{path.name} unpacks to more than a record is")
        return zstandard.ZstdDecompressor().decompress(content)
    except zstandard.ZstdError as error:
        raise ValueError(f"{path.name} can't be unpacked ({error})") from None
