"""Print, as one JSON line, what decides whether an environment can be installed here, or has to be. Changes nothing.

Arguments: the path of the virtual environment, the path of its marker. Runs on any Python 3, since which one it is is
part of the question.

What changed inside a finished environment is found without reading it: only files whose ctime is after the marker's are
looked at. One that a RECORD lists is hashed, and is right if it is what one of them says, since packages may share one;
of the others (a RECORD itself, a file that nobody installed) the mtime decides, since a copied environment has new
ctimes. Compiled files are left out. A package that was taken out leaves no file to look at: the packages that are there
are named, and whoever has the lock compares them with its.
"""

import base64
import csv
import ctypes
import glob
import hashlib
import json
import os
import platform
import shutil
import sys


def read(path):
    """A small file's text, stripped, or "" where it cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""


def can_load(library):
    """Whether the dynamic loader finds the library."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def can_import(module):
    """Whether the module is there."""
    try:
        __import__(module)
    except ImportError:
        return False
    return True


def nearest_existing(path):
    """The path itself or its first parent that exists."""
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def marker_content(path):
    """The marker's content, or None where it is missing or torn."""
    try:
        return json.loads(read(path))
    except ValueError:
        return None


def listed_files(venv, folder):
    """{path: [digest, ...]} of what the RECORDs in a folder of packages list with a digest (sha256, urlsafe base64)."""
    listed = {}
    for name in os.listdir(folder):
        record = os.path.join(folder, name, "RECORD")
        if not name.endswith(".dist-info") or not os.path.isfile(record):
            continue
        with open(record, encoding="utf-8", newline="") as file:
            for row in csv.reader(file):
                path = os.path.normpath(os.path.join(folder, row[0])) if row else ""
                if len(row) > 1 and row[1].startswith("sha256=") and path.startswith(venv + os.sep):
                    listed.setdefault(path, []).append(row[1][len("sha256=") :])
    return listed


def packages(venv):
    """What is installed in an environment: {"packages": [name==version, ...], "packages_sha256": of all their files}.

    Commands are left out of the hash: their first line names the folder that they were installed into.
    """
    named, digest = [], hashlib.sha256()
    # dist-packages: where a distribution's own Python has them, as under /usr/local of an image.
    library = os.path.join(glob.escape(venv), "lib", "python3*")
    places = [os.path.join(library, name, "*.dist-info") for name in ("dist-packages", "site-packages")]
    for info in sorted(path for place in places for path in glob.glob(place)):
        name, _, version = os.path.basename(info)[: -len(".dist-info")].rpartition("-")
        named.append("%s==%s" % (name, version))
        digest.update(("%s %s\n" % (name, version)).encode())
        for row in sorted(csv.reader(read(os.path.join(info, "RECORD")).splitlines())):
            if len(row) > 1 and row[1] and not row[0].startswith(("..", "/")) and ".dist-info/" not in row[0]:
                digest.update((" ".join(row) + "\n").encode())
    return {"packages": sorted(named), "packages_sha256": digest.hexdigest()}


def digest_of(path):
    """A file's sha256 as a RECORD writes it."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()


def is_changed(path, digests, finished):
    """Whether a file is another one than when the environment was finished."""
    facts = os.stat(path)
    if facts.st_ctime_ns <= finished.st_ctime_ns:
        return False
    return digest_of(path) not in digests if digests else facts.st_mtime_ns > finished.st_mtime_ns


def drift(venv, marker):
    """What changed in a finished environment since: {"paths": the first few, "count": of all}."""
    found = []
    if not os.path.isfile(marker):
        return {"paths": found, "count": 0}
    finished = os.stat(marker)
    library = os.path.join(venv, "lib")
    for python in os.listdir(library) if os.path.isdir(library) else []:
        folder = os.path.join(library, python, "site-packages")
        if not os.path.isdir(folder):
            continue
        listed = listed_files(venv, folder)
        seen = set()
        for place, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if name != "__pycache__"]
            seen.update(os.path.join(place, name) for name in names if not name.endswith(".pyc"))
        for path in sorted(seen | set(listed)):
            if not os.path.exists(path) or is_changed(path, listed.get(path), finished):
                found.append(os.path.relpath(path, venv))
    return {"paths": found[:3], "count": len(found)}


def main():
    venv, marker = os.path.abspath(sys.argv[1]), sys.argv[2]
    begun = os.path.join(os.path.dirname(venv), ".%s.kvtrial" % os.path.basename(venv))
    usable = os.access(os.path.join(venv, "bin", "python"), os.X_OK)
    print(
        json.dumps(
            {
                "python": "{}.{}".format(*sys.version_info[:2]),
                "implementation": platform.python_implementation(),
                "architecture": platform.machine(),
                "can_make_venv": can_import("ensurepip") and can_import("venv"),
                "has_libnuma": can_load("libnuma.so.1"),
                "free_bytes": shutil.disk_usage(nearest_existing(venv)).free,
                "exists": os.path.lexists(venv),
                "is_ours": os.path.isfile(os.path.join(venv, "pyvenv.cfg"))
                or os.path.isfile(begun)
                or not (os.path.isdir(venv) and os.listdir(venv)),
                "marker": marker_content(marker) if usable else None,
                "drift": drift(venv, marker) if usable else {"paths": [], "count": 0},
                **packages(venv),
            }
        )
    )


if __name__ == "__main__":
    main()
