"""Fetch a model's files from a Hugging Face hub at one exact revision. Standard library only, Python 3.8 and newer.

    fetch_model.py DIRECTORY --endpoint URL --repository OWNER/NAME --revision 40_HEX [--token-file FILE] [--exclude GLOB]

Every file is compared with what the hub says of that revision: the sha256 of large files, git's object id of the others.
A file that is there already and right is kept, so that a fetch that was killed goes on. The token is read from a file:
it stands in no argument, no environment and no output, and is not sent on to another host.
Prints one JSON line: `{"files": n, "bytes": n, "fetched": n}`. Bad input ends with status 2 and one sentence.
"""

import argparse
import fnmatch
import hashlib
import json
import os
import re
import sys
import urllib.error
import urllib.parse
import urllib.request

BLOCK_BYTES = 1 << 20
TIMEOUT_SECONDS = 60


class UnusableInput(Exception):
    """One clear sentence for the user."""


class Hub:
    """A hub, and the token that it is asked with."""

    def __init__(self, endpoint, token):
        self.endpoint = endpoint.rstrip("/")
        self._token = token

    def open(self, path):
        """The answer to a GET. Raises UnusableInput that names the address, never the token."""
        request = urllib.request.Request(self.endpoint + path, headers={"User-Agent": "kvtrial"})
        if self._token:
            request.add_unredirected_header("Authorization", "Bearer " + self._token)
        try:
            return urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
        except urllib.error.HTTPError as error:
            hint = {
                401: "; the model needs a token: name its file in model_token_file",
                403: "; the token's owner has to accept the model's terms on the hub",
                404: "; check model_repository and model_revision",
            }
            raise UnusableInput(
                "%s%s answered %d%s." % (self.endpoint, path, error.code, hint.get(error.code, ""))
            ) from None
        except (urllib.error.URLError, OSError) as error:
            raise UnusableInput(
                "%s can't be reached (%s); set model_endpoint to a hub or mirror that this host reaches, or bring the "
                "model from the controller (model_source=upload)." % (self.endpoint, getattr(error, "reason", error))
            ) from None


def listing(hub, repository, revision):
    """[(path, bytes or None, sha256 or None, git object id or None)] of the revision."""
    with hub.open("/api/models/%s/revision/%s?blobs=true" % (repository, revision)) as answer:
        told = json.loads(answer.read().decode("utf-8"))
    if told.get("sha") != revision:
        raise UnusableInput(
            "The hub knows revision %s of %s, %s was asked for; give the full commit hash."
            % (told.get("sha"), repository, revision)
        )
    files = []
    for entry in told.get("siblings", []):
        large = entry.get("lfs") or {}
        files.append(
            (entry["rfilename"], large.get("size", entry.get("size")), large.get("sha256"), entry.get("blobId"))
        )
    if not any(path == "config.json" for path, _, _, _ in files):
        raise UnusableInput("%s has no config.json at %s, so it is no model." % (repository, revision))
    return files


def digests_of(path):
    """(sha256, git object id) of a file."""
    sha256, git = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % os.stat(path).st_size)  # git's own name, no protection
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(BLOCK_BYTES), b""):
            sha256.update(block)
            git.update(block)
    return sha256.hexdigest(), git.hexdigest()


def is_right(path, size, sha256, git):
    """Whether the file is there and is what the hub says. The git id of a large file is that of its pointer."""
    if not os.path.isfile(path) or (size is not None and os.stat(path).st_size != size):
        return False
    if sha256 is None and git is None:
        return False
    found_sha256, found_git = digests_of(path)
    return found_sha256 == sha256 if sha256 is not None else found_git == git


def fetch_file(hub, repository, revision, name, target):
    """Write one file, whole or not at all."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    partial = target + ".partial"
    address = "/%s/resolve/%s/%s" % (repository, revision, urllib.parse.quote(name))
    with hub.open(address) as answer, open(partial, "wb") as file:
        for block in iter(lambda: answer.read(BLOCK_BYTES), b""):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, target)


def fetch(directory, hub, repository, revision, excluded):
    """Bring every file of the revision; what is printed. Raises UnusableInput."""
    total = fetched = count = 0
    for name, size, sha256, git in listing(hub, repository, revision):
        if any(fnmatch.fnmatch(name, pattern) for pattern in excluded):
            continue
        if name.startswith("/") or ".." in name.split("/"):
            raise UnusableInput("%s has a file %r outside itself; it is not fetched." % (repository, name))
        target = os.path.join(directory, *name.split("/"))
        if not is_right(target, size, sha256, git):
            fetch_file(hub, repository, revision, name, target)
            fetched += 1
            if not is_right(target, size, sha256, git):
                os.unlink(target)
                raise UnusableInput(
                    "%s of %s is not what the hub says of revision %s (sha256 or size differ); fetch again, or ask "
                    "another endpoint." % (name, repository, revision)
                )
        count += 1
        total += os.stat(target).st_size
    return {"files": count, "bytes": total, "fetched": fetched}


def token_in(path):
    """The token in a file; None without one."""
    if not path:
        return None
    try:
        with open(path) as file:
            return file.read().strip() or None
    except OSError as error:
        raise UnusableInput("model_token_file can't be read on the host: %s." % error.strerror) from None


def main():
    """Entry point. 0 done, 2 unusable input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("directory")
    for name in ("--endpoint", "--repository", "--revision"):
        parser.add_argument(name, required=True)
    parser.add_argument("--token-file", default="")
    parser.add_argument("--exclude", action="append", default=[])
    given = parser.parse_args()
    try:
        if not re.match(r"^[0-9a-f]{40}$", given.revision):
            raise UnusableInput("model_revision=%s is no full commit hash; give its 40 digits." % given.revision)
        hub = Hub(given.endpoint, token_in(given.token_file))
        print(json.dumps(fetch(given.directory, hub, given.repository, given.revision, given.exclude)))
    except (UnusableInput, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
