"""A command in a network of its own: loopback answers, everything else is gone, and the host program can tell."""

import subprocess
import sys
from pathlib import Path

import pytest
from kvtrial.host.engine import routable
from kvtrial.host.processes import loopback_alone
from kvtrial.record.record import Resolved, Socket

RUN = Path(__file__).parents[2] / "roles" / "preflight" / "files" / "loopback_only.py"
SEEN = """
import socket
from kvtrial.host.processes import loopback_alone
server = socket.create_server(("0.0.0.0", 0))
socket.create_connection(("127.0.0.1", server.getsockname()[1]), timeout=5).close()
print(loopback_alone())
"""
LOOPBACK = """Main:
  +-- 127.0.0.0/8 2 0 2
     +-- 127.0.0.0/31 1 0 0
        |-- 127.0.0.0
           /8 host LOCAL
        |-- 127.0.0.1
           /32 host LOCAL
"""
OUTSIDE = "        |-- 192.0.2.2\n           /32 host LOCAL\n"
LOOPBACK6 = "00000000000000000000000000000001 01 80 10 80       lo\n"
OUTSIDE6 = "fe800000000000000000000000000001 02 40 20 80     eth0\n"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, RUN, *arguments], capture_output=True, text=True, check=False)


def test_the_command_has_loopback_and_nothing_else() -> None:
    done = run(sys.executable, "-c", SEEN)
    if done.returncode == 2 and "can't be made here" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout.strip() == "True", done.stderr


def test_its_exit_status_is_the_commands_own() -> None:
    done = run(sys.executable, "-c", "raise SystemExit(7)")
    if done.returncode == 2 and "can't be made here" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 7


@pytest.mark.parametrize("arguments", [[], ["/no/such/command"]])
def test_what_cannot_be_run_is_refused_in_a_sentence(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("routes", "addresses", "alone"),
    [
        (LOOPBACK, LOOPBACK6, True),
        (LOOPBACK, "", True),
        (LOOPBACK + OUTSIDE, LOOPBACK6, False),
        (LOOPBACK, LOOPBACK6 + OUTSIDE6, False),
        ("", "", False),
        (None, LOOPBACK6, False),
    ],
)
def test_addresses_are_read_and_what_cannot_be_read_counts_as_reachable(
    routes: str | None, addresses: str, alone: bool, tmp_path: Path
) -> None:
    (tmp_path / "net").mkdir()
    if routes is not None:
        (tmp_path / "net" / "fib_trie").write_text(routes)
    (tmp_path / "net" / "if_inet6").write_text(addresses)
    assert loopback_alone(tmp_path) is alone


@pytest.mark.parametrize(("alone", "found"), [(False, [":::4000"]), (True, [])])
def test_a_socket_on_every_address_can_be_reached_unless_there_is_only_loopback(alone: bool, found: list[str]) -> None:
    sockets = [Socket(address="::", port=4000, pid=1), Socket(address="127.0.0.1", port=18000, pid=1)]
    resolved = Resolved("0.26.0", ["m"], {}, {}, {}, sockets, "", "", None, loopback_alone=alone)
    assert routable(resolved) == found
