"""Fetch a model's files from a Hugging Face hub at one exact revision. Standard library only, Python 3.10 and newer.

    fetch_model.py DIRECTORY --endpoint URL --repository OWNER/NAME --revision HASH [--exclude GLOB]
                   [--only] [--token-file FILE | --token-on-stdin]

Every file is compared with what the hub says of that revision: the sha256 of large files, git's object id of others. A
file that is there already and right is kept, so that a fetch that was killed goes on; with --only, what else lies there
is removed at the end. The token is read from a file or
from standard input: it stands in no argument, no environment and no output, is not sent on to another host, and goes to
another machine by TLS only.
Prints one JSON line: `{"files": n, "bytes": n, "fetched": n}`. Bad input ends with status 2 and one sentence.
"""

import argparse
import fnmatch
import hashlib
import http.client
import json
import os
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK_BYTES = 1 << 20
TIMEOUT_SECONDS = 60
SAFE_FOR_A_TOKEN = re.compile(r"https://|http://(127\.0\.0\.1|localhost|\[::1\])([:/]|$)")
HINTS = {
    401: "; the model needs a token: name its file in model_token_file",
    403: "; the token's owner has to accept the model's terms on the hub",
    404: "; check model_repository and model_revision",
}


class UnusableInput(Exception):
    """One clear sentence for the user."""


class Hub:
    """A hub, and the token that it is asked with."""

    def __init__(self, endpoint: str, token: str) -> None:
        if token and not SAFE_FOR_A_TOKEN.match(endpoint):
            raise UnusableInput(
                f"model_endpoint={endpoint} has no TLS, and the token would be readable on its way; name an https:// "
                "address, or leave model_token_file empty."
            )
        self.endpoint = endpoint.rstrip("/")
        self._token = token

    def open(self, path: str) -> Any:
        """The answer to a GET. Raises UnusableInput that names the address, never the token."""
        try:
            request = urllib.request.Request(self.endpoint + path, headers={"User-Agent": "kvtrial"})
            if self._token:
                request.add_unredirected_header("Authorization", f"Bearer {self._token}")
            return urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
        except urllib.error.HTTPError as error:
            hint = HINTS.get(error.code, "")
            raise UnusableInput(f"{self.endpoint}{path} answered {error.code}{hint}.") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise UnusableInput(
                f"{self.endpoint} can't be reached ({getattr(error, 'reason', error)}); set model_endpoint to a hub or "
                "mirror that this host reaches, or bring the model from the controller (model_source=upload)."
            ) from None


@dataclass(frozen=True)
class File:
    """A file as the hub lists it. `git` is the object id, of a large file that of its pointer."""

    path: str
    size_bytes: int | None
    sha256: str | None
    git: str | None

    def is_at(self, path: Path) -> bool:
        """Whether the file is there and is what the hub says."""
        if not path.is_file() or self.size_bytes not in (None, path.stat().st_size):
            return False
        sha256, git = digests_of(path)
        return sha256 == self.sha256 if self.sha256 else git == self.git


def listing(hub: Hub, repository: str, revision: str) -> list[File]:
    """The files of the revision. Raises UnusableInput where the hub has another one, or no model."""
    path = f"/api/models/{repository}/revision/{revision}?blobs=true"
    try:
        with hub.open(path) as answer:
            told = json.load(answer)
        files = [file_of(entry) for entry in told.get("siblings", [])]
    except (ValueError, TypeError, KeyError, AttributeError, http.client.HTTPException):
        raise UnusableInput(
            f"{hub.endpoint}{path} answered something else than a hub's list of files; set model_endpoint to the "
            "address of a hub or of a mirror that has its interface."
        ) from None
    if told.get("sha") != revision:
        raise UnusableInput(
            f"The hub knows revision {told.get('sha')} of {repository}, {revision} was asked for; give the full commit "
            "hash."
        )
    if not any(file.path == "config.json" for file in files):
        raise UnusableInput(f"{repository} has no config.json at {revision}, so it is no model.")
    return files


def file_of(entry: dict[str, Any]) -> File:
    """A file of the hub's list. Raises KeyError, TypeError or AttributeError where it is none."""
    large = entry.get("lfs") or {}
    return File(str(entry["rfilename"]), large.get("size", entry.get("size")), large.get("sha256"), entry.get("blobId"))


def digests_of(path: Path) -> tuple[str, str]:
    """(sha256, git object id) of a file; the latter is git's name of it and protects nothing."""
    sha256, git = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        for block in iter(lambda: file.read(BLOCK_BYTES), b""):
            sha256.update(block)
            git.update(block)
    return sha256.hexdigest(), git.hexdigest()


def fetch_file(hub: Hub, repository: str, revision: str, name: str, target: Path) -> None:
    """Write one file, whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.partial")
    address = f"/{repository}/resolve/{revision}/{urllib.parse.quote(name)}"
    try:
        with hub.open(address) as answer, partial.open("wb") as file:
            for block in iter(lambda: answer.read(BLOCK_BYTES), b""):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
    except http.client.HTTPException:
        raise UnusableInput(f"{hub.endpoint} ended in the middle of {name}; run the same command again.") from None
    partial.replace(target)


def fetch(
    directory: Path, hub: Hub, repository: str, revision: str, excluded: list[str], only: bool = False
) -> dict[str, int]:
    """Bring every file of the revision, and with `only` nothing else; what is printed. Raises UnusableInput."""
    total = fetched = 0
    brought: set[Path] = set()
    for file in listing(hub, repository, revision):
        if any(fnmatch.fnmatch(file.path, pattern) for pattern in excluded):
            continue
        if file.path.startswith("/") or ".." in file.path.split("/"):
            raise UnusableInput(f"{repository} has a file {file.path!r} outside itself; it is not fetched.")
        target = directory / file.path
        if not file.is_at(target):
            fetch_file(hub, repository, revision, file.path, target)
            fetched += 1
            if not file.is_at(target):
                target.unlink()
                raise UnusableInput(
                    f"{file.path} of {repository} is not what the hub says of revision {revision} (sha256 or size "
                    "differ); fetch again, or ask another endpoint."
                )
        brought.add(target)
        total += target.stat().st_size
    for path in list(directory.rglob("*")) if only else []:
        if path.is_file() and path not in brought:
            path.unlink()
    return {"files": len(brought), "bytes": total, "fetched": fetched}


def token_in(path: str) -> str:
    """The token in a file; empty without one."""
    try:
        return Path(path).read_text(encoding="utf-8").strip() if path else ""
    except OSError as error:
        raise UnusableInput(f"model_token_file={path} can't be read: {error.strerror}.") from None


def main() -> int:
    """Entry point. 0 done, 2 unusable input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("directory", type=Path)
    for name in ("--endpoint", "--repository", "--revision"):
        parser.add_argument(name, required=True)
    parser.add_argument("--token-file", default="")
    parser.add_argument("--token-on-stdin", action="store_true")
    parser.add_argument("--only", action="store_true")
    parser.add_argument("--exclude", action="append", default=[])
    given = parser.parse_args()
    try:
        if not re.fullmatch(r"[0-9a-f]{40}", given.revision):
            raise UnusableInput(f"model_revision={given.revision} is no full commit hash; give its 40 digits.")
        token = sys.stdin.readline().strip() if given.token_on_stdin else token_in(given.token_file)
        hub = Hub(given.endpoint, token)
        print(json.dumps(fetch(given.directory, hub, given.repository, given.revision, given.exclude, given.only)))
    except (UnusableInput, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
