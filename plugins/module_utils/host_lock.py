# Licensed under the Apache License, Version 2.0
"""The lock that keeps two controllers from changing one host at once: a file on the host that says who holds it.

It outlives the tasks that take it, since Ansible has no process on a host from one task to the next. A holder that died
is noticed by its own controller (pid and start time), by a reboot of the host, and by age since it was taken last. Who
reads and changes it holds its folder (flock) meanwhile, so that of two who find it stale one alone takes it over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import os
import stat
import time

from ansible_collections.kvtrial.vllm.plugins.module_utils import ownership, processes

BREAK = "kvtrial_break_lock=true"


NAME = "provision.lock"
RUN, TMP = "/run/kvtrial", "/tmp/kvtrial-"
"""Root's folder, and where others have one of their own; both go with a reboot."""


LOCK_BYTES = 1 << 16
"""A lock has a few hundred; what comes after these is not read."""

UID_DIGITS = 10
"""As many has the largest number of a user."""

NO_LOCK = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)
"""What opening says where no file is: nothing at all, a link, a socket."""


class NotOurs(OSError):
    """The lock's folder can't be trusted; the message says why, and what to do."""


def default_path(uid, run=RUN, tmp=TMP):
    """Where a user's lock lies: root's where nobody else can write, another's in a folder that only that user can."""
    return os.path.join(run if uid == 0 else "%s%d" % (tmp, uid), NAME)


def elsewhere(uid, run=RUN, tmp=TMP):
    """Locks of the other users of this host, for each sees the others': {path: what it says}.

    Anybody may make a folder below /tmp of any name: one counts only for the user in its name, who has to own it.
    """
    found = {}
    for folder in [run, *sorted(glob.glob(glob.escape(tmp) + "*"))]:
        owner = 0 if folder == run else folder[len(tmp) :]
        if folder != run and not (owner.isascii() and owner.isdigit() and len(owner) <= UID_DIGITS):
            continue
        path = os.path.join(folder, NAME)
        if int(owner) != uid and _is_folder_of(folder, int(owner)):
            lock = read(path, int(owner))
            if lock is not None:
                found[path] = lock
    return found


def _is_folder_of(folder, uid):
    try:
        facts = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == uid


def read(path, uid=None):
    """What the lock says, or None if nobody holds it. A file that says nothing is held by somebody unknown.

    uid: whose lock it has to be, this process's own by default. Whoever owns the folder may have put a pipe, a link or
    a device there, which nobody's lock is: none is waited for or followed.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        return None if error.errno in NO_LOCK else {}
    try:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != (os.geteuid() if uid is None else uid):
            return None
        value = json.loads(os.read(handle, LOCK_BYTES).decode())
    except (OSError, ValueError, RecursionError):
        value = {}
    finally:
        os.close(handle)
    return value if isinstance(value, dict) else {}


def is_over(lock, now, boot_id):
    """Whether a lock no longer counts: from before a reboot, or too old."""
    if lock.get("boot_id", boot_id) != boot_id:
        return True
    until = lock.get("until")
    return isinstance(until, (int, float)) and now >= until


HOLDERS = {"experiment": "An experiment", "calibration": "A calibration", "removal": "A removal"}
"""What a lock is held for, in words; without a word it is another provision."""


def refusal(lock, now):
    """Why the host can't be changed now, and what to do: one sentence."""
    # Another user wrote it, whatever it is.
    try:
        passed = "%d s" % (now - lock.get("since"))
    except (TypeError, ValueError, OverflowError):
        passed = "an unknown time"
    return "%s, by %s, has held this host for %s; wait for its end, or if it is dead, add -e %s." % (
        HOLDERS.get(str(lock.get("purpose")), "Another provision"),
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


def removal_refusal(programs, unfetched):
    """Why a host is not taken from its campaigns, and what to do: one sentence, empty where nothing would be lost."""
    if programs:
        return (
            "Campaign %s runs here (host program, pid %s), and a removal would end it and take its runs; wait for its "
            "end and fetch them, or add -e kvtrial_purge=true."
            % (" and ".join(one["campaign"] for one in programs), ", ".join(str(one["pid"]) for one in programs))
        )
    if unfetched:
        return (
            "Runs that were not fetched whole lie here (%s), and a removal would take them; fetch them "
            "(playbooks/fetch.yml), or add -e kvtrial_purge=true."
            % ", ".join("%s: %d" % (name, count) for name, count in sorted(unfetched.items()))
        )
    return ""


def unfetched_runs(state_dir):
    """Finished runs below `state_dir` that no controller has whole, by campaign: {name: how many}.

    A controller that took in every file of runs leaves a note of them, {run: digest}; see roles/collect.
    """
    found = {}
    for path in glob.glob(os.path.join(glob.escape(state_dir), "campaigns", "*", "runs", "*", "record.sha256")):
        run = os.path.dirname(path)
        campaign = os.path.basename(os.path.dirname(os.path.dirname(run)))
        try:
            fetched = json.loads(processes.read_text(ownership.note_of(state_dir, campaign)))["runs"]
        except (ValueError, KeyError, TypeError):
            fetched = {}
        digest = (processes.read_text(path, 200).split() or [""])[0]
        if not os.path.basename(run).startswith(".") and fetched.get(os.path.basename(run)) != digest:
            found[campaign] = found.get(campaign, 0) + 1
    return found


@contextlib.contextmanager
def alone(path):
    """Nobody else reads and changes the lock meanwhile. Makes its folder. Raises OSError, NotOurs among them."""
    folder = os.path.dirname(path)
    while True:
        with contextlib.suppress(FileExistsError):
            os.makedirs(folder, mode=0o755)
            # Whatever the umask: others are to see who holds the host.
            os.chmod(folder, 0o755)
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        except NotADirectoryError:
            raise NotOurs("The lock's folder %s is no folder; remove it, and run again." % folder) from None
        facts = os.fstat(handle)
        if facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
            os.close(handle)
            raise NotOurs(
                "The lock's folder %s belongs to user %d and can be written by %s, so whoever made it could take and "
                "give this host; remove it, and run again."
                % (folder, facts.st_uid, "others" if facts.st_mode & 0o022 else "that user")
            )
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
            os.fchmod(file.fileno(), 0o644)
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
