"""Files that are whole or absent."""

import hashlib
import os
from pathlib import Path

SUMMARY_ONLY = "summary-only"
"""A file in a fetched run of which the record came alone: the files that the record names are still on the host."""


def write_atomically(path: Path, content: bytes) -> str:
    """Write `content` to `path` by a temporary file, fsync and rename; return its sha256 in hex.

    A reader sees the old file or the new one, never a part. Raises OSError (disk full, no permission) and leaves no
    temporary file behind then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
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
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
