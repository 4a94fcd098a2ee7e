"""The engines of an arm with several replicas, as one process tree: all are started, and one that ends ends the others.

It is what the keeper starts in place of the one engine of other arms, and stays in front of them, so that samples, ends
and ownership are those of a tree whatever is in it. It carries no request: the load client splits those by itself.

    python -m kvtrial.host.replicas FILE      FILE holds a ReplicaStart for each engine (JSON)

Stop command: SIGTERM.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
from msgspec import Struct

POLL_SECONDS = 0.1


class ReplicaStart(Struct, frozen=True):
    """How one engine is started: its argv and its whole environment."""

    argv: list[str]
    env: dict[str, str]


def launcher(file: Path) -> list[str]:
    """The command that starts the engines that `file` holds."""
    return [sys.executable, "-m", "kvtrial.host.replicas", str(file)]


def run_all(starts: list[ReplicaStart]) -> int:
    """Start every engine, wait until one has ended, end the others; the exit status of the one that ended first."""
    engines: list[subprocess.Popen[bytes]] = []
    asked = False

    def end(*_: object) -> None:
        nonlocal asked
        asked = True
        for engine in engines:
            if engine.poll() is None:
                engine.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    for start in starts:
        engines.append(subprocess.Popen(start.argv, env=start.env, stdin=subprocess.DEVNULL))
    while all(engine.poll() is None for engine in engines) and not asked:
        time.sleep(POLL_SECONDS)
    first = next((engine.returncode for engine in engines if engine.returncode is not None), None)
    end()
    ended = [engine.wait() for engine in engines]
    return first if first is not None else max(ended, key=abs)


if __name__ == "__main__":
    sys.exit(run_all(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=list[ReplicaStart])))
