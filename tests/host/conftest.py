"""Trials on the stand-in that leave nothing behind."""

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvtrial.analysis.inputs import read_request
from kvtrial.analysis.plan import make_plan, requested_protocol
from msgspec.structs import replace
from trial import Trial, ours, request_for


@pytest.fixture(name="trial")
def _trial(tmp_path: Path) -> Iterator[Callable[..., Trial]]:
    """Makes a trial: trial(runs=2, faults="no_load", fault_arm="offload", **host changes). Leaves nothing behind.

    `phases`: with these alone, where no verdict is asked for.
    """

    def make(
        runs: int | None = None,
        faults: str = "",
        fault_arm: str = "",
        folder: str = "host",
        phases: tuple[str, ...] = (),
        **changes: Any,
    ) -> Trial:
        request = read_request(request_for(tmp_path, faults, fault_arm, **changes))
        plan = make_plan(request, requested_protocol(request))
        kept = [replace(run, phases=[phase for phase in run.phases if not phases or phase.name in phases])
                for run in plan.hosts[0].runs[:runs]]  # fmt: skip
        return Trial(tmp_path / "campaigns" / folder, plan, kept)

    yield make
    for pid in ours(tmp_path):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(name="nothing_left")
def _nothing_left(tmp_path: Path) -> Iterator[None]:
    """Fails the test that leaves a process, a temporary folder or a shared memory file of ours."""
    temporary = Path(tempfile.gettempdir())
    before = {*temporary.glob("kvtrial-*"), *Path("/dev/shm").glob("vllm*")}
    yield
    until = time.monotonic() + 5.0
    while ours(tmp_path) and time.monotonic() < until:
        time.sleep(0.05)
    assert not ours(tmp_path)
    assert {*temporary.glob("kvtrial-*"), *Path("/dev/shm").glob("vllm*")} <= before
