# Licensed under the Apache License, Version 2.0
"""The lock that keeps two controllers from changing one host at once: a file on the host that says who holds it.

It outlives the tasks that take it, since Ansible has no process on a host from one task to the next. A holder that died
is noticed by its own controller (pid and start time), by a reboot of the host, and by age.
"""

from __future__ import annotations

import contextlib
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


def refusal(lock, now):
    """Why the host can't be changed now, and what to do: one sentence."""
    since = lock.get("since")
    passed = "%d s" % (now - since) if isinstance(since, (int, float)) else "an unknown time"
    return "Another provision, by %s, has held this host for %s; wait for its end, or if it is dead, add -e %s." % (
        lock.get("by") or "somebody unknown",
        passed,
        BREAK,
    )


def take(path, lock):
    """Write the lock if nobody has it; False if somebody was quicker. The file appears whole or not at all."""
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    temporary = "%s.%d" % (path, os.getpid())
    with open(temporary, "w") as file:
        json.dump(lock, file)
    try:
        os.link(temporary, path)
        return True
    except FileExistsError:
        return False
    finally:
        os.unlink(temporary)


def give_back(path):
    """Remove the lock, and its folder where nothing else is in it; whether there was one."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(path))
    return True


def monotonic():
    """Seconds on the host's clock that never jumps; it starts anew with the host, as the folder of the lock does."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
