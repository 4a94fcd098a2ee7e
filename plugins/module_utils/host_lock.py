# Licensed under the Apache License, Version 2.0
"""The lock that keeps two controllers from changing one host at once: a file on the host that says who holds it.

It outlives the tasks that take it, since Ansible has no process on a host from one task to the next. A holder that died
is noticed by its own controller (pid and start time), by a reboot of the host, and by age since it was taken last. Who
reads and changes it holds its folder (flock) meanwhile, so that of two who find it stale one alone takes it over.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time

BREAK = "kvtrial_break_lock=true"


def default_path(uid):
    """Where the lock lies: it goes with a reboot, and two users who may not change the same things share none."""
    return "/run/kvtrial/provision.lock" if uid == 0 else "/tmp/kvtrial-%d/provision.lock" % uid


def read(path):
    """What the lock says, or None if nobody holds it. A file that says nothing is held by somebody unknown."""
    try:
        with open(path) as file:
            value = json.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError):
        value = {}
    return value if isinstance(value, dict) else {}


def is_over(lock, now, boot_id):
    """Whether a lock no longer counts: from before a reboot, or too old."""
    if lock.get("boot_id", boot_id) != boot_id:
        return True
    until = lock.get("until")
    return isinstance(until, (int, float)) and now >= until


HOLDERS = {"experiment": "An experiment", "calibration": "A calibration"}
"""What a lock is held for, in words; without a word it is another provision."""


def refusal(lock, now):
    """Why the host can't be changed now, and what to do: one sentence."""
    since = lock.get("since")
    passed = "%d s" % (now - since) if isinstance(since, (int, float)) else "an unknown time"
    return "%s, by %s, has held this host for %s; wait for its end, or if it is dead, add -e %s." % (
        HOLDERS.get(lock.get("purpose"), "Another provision"),
        lock.get("by") or "somebody unknown",
        passed,
        BREAK,
    )


def campaign_refusal(programs):
    """Why a host whose host programs measure can't be changed now, and what to do: one sentence."""
    return (
        "Campaign %s runs here (host program, pid %s), and a change of the host would spoil what it measures; wait for "
        "its end, or stop it with playbooks/teardown.yml."
        % (" and ".join(one["campaign"] for one in programs), ", ".join(str(one["pid"]) for one in programs))
    )


@contextlib.contextmanager
def alone(path):
    """Nobody else reads and changes the lock meanwhile. Makes its folder. Raises OSError."""
    folder = os.path.dirname(path)
    while True:
        os.makedirs(folder, mode=0o755, exist_ok=True)
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        fcntl.flock(handle, fcntl.LOCK_EX)
        # Whoever had it may have removed the folder: then another one of its name is the lock's.
        if _is(handle, folder):
            break
        os.close(handle)
    try:
        yield
    finally:
        os.close(handle)


def _is(handle, folder):
    try:
        return os.path.samestat(os.fstat(handle), os.stat(folder))
    except FileNotFoundError:
        return False


def take(path, lock, may_replace=lambda found: False):
    """Write the lock where nobody has it, or where `may_replace` allows it of what is found; (taken, found).

    The file appears whole or not at all.
    """
    with alone(path):
        found = read(path)
        if found is not None and not may_replace(found):
            return False, found
        temporary = "%s.%d" % (path, os.getpid())
        with open(temporary, "w") as file:
            json.dump(lock, file)
        os.replace(temporary, path)
        return True, found


def give_back(path, owner):
    """Remove the lock of this owner, and its folder where nothing else is in it; what it said, or None."""
    if read(path) is None:
        return None
    with alone(path):
        found = read(path)
        if found is not None and found.get("owner") == owner:
            os.unlink(path)
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(path))
        return found


def monotonic():
    """Seconds on the host's clock that never jumps; it starts anew with the host, as the folder of the lock does."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
