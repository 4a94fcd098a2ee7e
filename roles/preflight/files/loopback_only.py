#!/usr/bin/env python3
"""Run a command in a network namespace of its own that has loopback and nothing else.

    python3 loopback_only.py COMMAND [ARGUMENT...]

For an engine that opens sockets on every address: there, nobody outside can reach them. Needs root, or user namespaces
that anybody may make; the command then sees itself as root. Standard library only, Linux.
"""

import ctypes
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS = 0x8913, 0x8914
IFF_UP = 1


class UnusableInput(Exception):
    """One clear sentence for the user."""


def leave_the_network() -> None:
    """Move this process into a network namespace of its own. Raises UnusableInput where that is not allowed."""
    user, group = os.getuid(), os.getgid()
    flags = CLONE_NEWNET if user == 0 else CLONE_NEWNET | CLONE_NEWUSER
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise UnusableInput(
            f"a network namespace can't be made here ({reason}); run this as root, or allow user namespaces."
        )
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def raise_loopback() -> None:
    """Bring the interface lo up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack_from("h", fcntl.ioctl(sock, SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))


def main(arguments: list[str]) -> int:
    """Entry point. Becomes the command; 2 for unusable input."""
    try:
        if not arguments:
            raise UnusableInput("loopback_only.py takes the command to run and its arguments.")
        leave_the_network()
        raise_loopback()
        os.execvp(arguments[0], arguments)
    except UnusableInput as error:
        print(str(error), file=sys.stderr)
    except OSError as error:
        print(f"{arguments[0]} could not be run: {error}.", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
