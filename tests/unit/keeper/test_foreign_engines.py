"""Which engines on the machine are not the one that is kept."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from kvtrial.host.keeper import Sampler
from kvtrial.host.processes import all_processes, members, read_process

LOOKS_LIKE_AN_ENGINE = ["vllm", "serve", "made-up"]
FORKS_WHEN_TOLD = (
    "import os, sys, time; print(flush=True); sys.stdin.readline(); os.fork(); print(flush=True); time.sleep(60)"
)


@pytest.fixture(name="engine")
def _engine() -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own that looks like an engine, and forks once a line comes in."""
    argv = [sys.executable, "-c", FORKS_WHEN_TOLD, *LOOKS_LIKE_AN_ENGINE]
    engine = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    engine.stdout.readline()
    yield engine
    os.killpg(engine.pid, signal.SIGKILL)
    engine.communicate()


def sampler_of(engine: subprocess.Popen[str]) -> Sampler:
    process = read_process(engine.pid)
    assert process is not None
    return Sampler(process, [])


def ours(engine: subprocess.Popen[str]) -> set[int]:
    return {p.pid for p in members(all_processes(), engine.pid, engine.pid)}


def test_a_child_that_the_engine_has_forked_since_the_sample_is_not_foreign(engine):
    sampler = sampler_of(engine)
    sampler.sample()
    print(file=engine.stdin, flush=True)
    engine.stdout.readline()
    sampled = set(sampler.pids)
    assert {pid for pid, _ in sampler.foreign_engines()} & ours(engine) == set()
    assert ours(engine) > sampled, "it has not forked: nothing was tried"


def test_an_engine_that_is_not_kept_is_foreign(engine):
    argv = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)", *LOOKS_LIKE_AN_ENGINE]
    stranger = subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True)
    try:
        stranger.stdout.readline()  # a process that is just being executed has no command line yet
        sampler = sampler_of(engine)
        sampler.sample()
        assert stranger.pid in {pid for pid, _ in sampler.foreign_engines()}
    finally:
        stranger.kill()
        stranger.communicate()
