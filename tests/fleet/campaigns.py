"""Campaigns on hosts of the rig, as the tests of faults and the bench need them: progress, and what is left over."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from kvtrial.record.store import record_path, record_text
from playing import Playbooks
from rig import Host

T = TypeVar("T")
CAMPAIGNS = "/var/lib/kvtrial/campaigns"
QUICK = {
    "kvtrial_pairs": 2,
    "kvtrial_sweep_first_seconds": 2,
    "kvtrial_sweep_longest_seconds": 4,
    "kvtrial_lost_after_seconds": 16,
}
"""Variables of a short campaign that gives a lost host up within seconds."""


def wait_for(wanted: Callable[[], T], seconds: float = 600.0) -> T:
    """The first true value of `wanted`. Far beyond what it takes: a busy machine is no failure."""
    until = time.monotonic() + seconds
    while not (found := wanted()):
        assert time.monotonic() < until, f"waited {seconds} s in vain"
        time.sleep(0.1)
    return found


def progress(host: Host) -> dict[str, Any]:
    """The progress of the newest campaign on a host; empty while there is none, or the host is down."""
    if host.init() is None:
        return {}
    text = host.sh(f"cat $(ls -td {CAMPAIGNS}/*/ | head -1)progress.json 2>/dev/null || true", check=False)
    try:
        found: dict[str, Any] = json.loads(text)
    except ValueError:
        return {}
    return found


def measuring(host: Host, runs: int = 0, phase: str = "") -> bool:
    """Whether the host is in a run with at least `runs` done, in a phase (any, if none is named)."""
    now = progress(host)
    return bool(now.get("state") == "running" and now["runs_done"] >= runs and now["phase"]
                and phase in now["phase"])  # fmt: skip


def records(results: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """(host, run) → record of the newest campaign that a controller has."""
    newest = sorted(results.glob("*-*/campaign.json"))[-1].parent
    return {
        (run.parent.name, run.name): json.loads(record_text(run))
        for run in newest.glob("runs/*/p*")
        if record_path(run).is_file()
    }


def ended(found: dict[tuple[str, str], dict[str, Any]]) -> dict[tuple[str, str], tuple[str, float]]:
    """What tells a run from the same run done again: when it started, by label and by the host's own clock."""
    return {key: (r["times"]["started_at_utc"], r["times"]["ended_monotonic_seconds"]) for key, r in found.items()}


def verdict(results: Path) -> dict[str, Any]:
    """verdict.json of the newest campaign."""
    found: dict[str, Any] = json.loads((results / "latest" / "verdict.json").read_text())
    return found


LEFT = r"""
for p in /proc/[0-9]*; do
  [ "$p" != /proc/$$ ] || continue
  c=$(tr '\0' ' ' <$p/cmdline 2>/dev/null) || continue
  case "$c" in *kvtrial-host*|*kvtrial.host*|*'vllm serve'*|*VLLM::*) echo "process $c";; esac
done
systemctl list-units --plain --no-legend --state=active,activating,deactivating 'kvtrial*' | sed 's/^/unit /'
ls -d /run/kvtrial 2>/dev/null | sed 's/^/lock /'
find /dev/shm /var/lib/kvtrial /tmp -name '*.tmp' -o -name .partial -o -name archive.tar -o -name '.archive*' \
  -o -path '/dev/shm/*vllm*' -o -path '/dev/shm/*kvtrial*' 2>/dev/null | sed 's/^/file /'
"""


def left_on(host: Host) -> list[str]:
    """Engines, units, locks and temporary files of the project on a host."""
    return [line for line in host.sh(LEFT, check=False).splitlines() if line]


def left_here(results: Path) -> list[str]:
    """Temporary files on the controller."""
    return [str(path) for path in results.rglob("*") if path.name.startswith(".") or path.name.endswith(".tmp")]


def nothing_left(plays: Playbooks) -> None:
    """Assert that no engine, unit, lock or temporary file is left, on any host that is up or on the controller."""
    for host in plays.fleet.hosts:
        if host.init() is not None:
            assert left_on(host) == [], (host.name, left_on(host))
    assert left_here(plays.results) == []


def forget(plays: Playbooks) -> None:
    """Take the campaigns off the hosts and the controller, so that the next test starts anew."""
    for host in plays.fleet.hosts:
        host.sh(
            f"systemctl stop kvtrial-host 2>/dev/null || true; rm -rf {CAMPAIGNS} /run/kvtrial; systemctl reset-failed"
        )
