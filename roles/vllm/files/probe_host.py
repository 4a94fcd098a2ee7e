"""Print, as one JSON line, what decides whether an engine can be installed here. Changes nothing.

Arguments: the path of the virtual environment, the path of its marker. Runs on any Python 3, since which one it is is
part of the question.
"""

import ctypes
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


def main():
    venv, marker = os.path.abspath(sys.argv[1]), sys.argv[2]
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
                or not (os.path.isdir(venv) and os.listdir(venv)),
                "marker": marker_content(marker) if usable else None,
            }
        )
    )


if __name__ == "__main__":
    main()
