"""Starts the stand-in as a process, as the product would, and talks HTTP to it with the standard library."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

EXECUTABLE = Path(__file__).parents[2] / "standin" / "vllm"
sys.path.insert(0, str(EXECUTABLE.parent))
DEADLINE_SECONDS = 20.0
SAMPLE = re.compile(r"^([a-z_:A-Z]+)(?:\{(.*)\})? (\S+)$")


@dataclass
class Answer:
    """What a client saw of one completion."""

    status: int
    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int | None = None
    finish_reason: str | None = None
    raw: bytes = b""
    broken: bool = False


class StandIn:
    """One running stand-in in its own process group."""

    def __init__(self, arguments: list[str], environment: dict[str, str], log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.log_path = log
        argv = [sys.executable, str(EXECUTABLE), "serve", *arguments[:1], "--served-model-name", "tiny"]
        argv += ["--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager", "--unheard-of-flag", "7"]
        argv += arguments[1:]
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                argv,
                env={"PATH": os.environ["PATH"], "STANDIN_SLOWDOWN": "0.05", **environment},
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8")

    def wait_healthy(self) -> None:
        self.wait_until(lambda: self.get("/health")[0] == 200)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        limit = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < limit:
            try:
                if condition():
                    return
            except OSError:
                assert self.process.poll() is None, self.log()
            time.sleep(0.02)
        raise AssertionError(f"not within {DEADLINE_SECONDS} s:\n{self.log()}")

    def get(self, path: str, method: str = "GET") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_SECONDS)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def get_json(self, path: str) -> Any:
        return json.loads(self.get(path)[1])

    def ask(self, token_ids: list[int], output: int = 6, *, timeout: float = DEADLINE_SECONDS, **fields: Any) -> Answer:
        """One streamed completion, greedy, with exact output length."""
        body = {
            "model": "tiny",
            "prompt": token_ids,
            "max_tokens": output,
            "min_tokens": output,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "cache_salt": "s",
            **fields,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            try:
                answer = Answer(response.status, raw=response.read())
            except (http.client.IncompleteRead, ConnectionError):
                return Answer(response.status, broken=True)
        finally:
            connection.close()
        for event in answer.raw.split(b"\n"):
            if not event.startswith(b"data: {"):
                continue
            chunk = json.loads(event[6:])
            if chunk.get("usage"):
                answer.cached_tokens = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
            for choice in chunk.get("choices", []):
                answer.token_ids += choice["token_ids"]
                answer.finish_reason = choice["finish_reason"] or answer.finish_reason
        return answer

    def samples(self) -> dict[str, float]:
        """Series of the page without buckets and creation times, without the engine and model labels."""
        found = {}
        for line in self.get("/metrics")[1].decode().split("\n"):
            match = SAMPLE.match(line)
            if match and not match[1].endswith(("_bucket", "_created")):
                labels = [f'{k}="{v}"' for k, v in re.findall(r'(\w+)="([^"]*)"', match[2] or "")]
                labels = [label for label in labels if not label.startswith(("engine=", "model_name="))]
                found[match[1] + ("{" + ",".join(labels) + "}" if labels else "")] = float(match[3])
        return found

    def group(self) -> list[int]:
        """Living (not zombie) processes of the process group."""
        members = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    state, _parent, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                except OSError:
                    continue
                if int(group) == self.process.pid and state != "Z":
                    members.append(int(entry.name))
        return members

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_SECONDS)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(DEADLINE_SECONDS)


Launcher = Callable[..., StandIn]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launcher]:
    """launch('offload' | 'control', healthy=True, blocks=193, fault='', ...) -> StandIn; all are ended afterwards."""
    started: list[StandIn] = []

    def start(
        arm: str,
        *,
        healthy: bool = True,
        blocks: int = 193,
        tier_bytes: int = 268_435_456,
        extra: dict[str, Any] | None = None,
        model: str = "/nowhere/model",
        arguments: Sequence[str] = (),
        **environment: str,
    ) -> StandIn:
        words = [model, "--block-size", "32"]
        words += ["--num-gpu-blocks-override", str(blocks), "--kv-cache-memory-bytes", "256M"]
        words += ["--max-model-len", "4096", "--max-num-seqs", "16", "--max-num-batched-tokens", "4096"]
        words += ["--enable-prompt-tokens-details"]
        if arm == "offload":
            tier = {"block_size": 64, "cpu_bytes_to_use": tier_bytes, "spec_name": "HostOffloadingSpec"}
            config: dict[str, Any] = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
            config["kv_connector_extra_config"] = {**tier, **(extra or {})}
            words += ["--kv-transfer-config", json.dumps(config)]
        words += arguments
        standin = StandIn(words, environment, tmp_path / f"engine{len(started)}.log")
        started.append(standin)
        if healthy:
            standin.wait_healthy()
        return standin

    yield start
    for standin in started:
        standin.end()


@pytest.fixture
def prompt() -> Callable[..., list[int]]:
    """prompt('T1', 1040): printable token ids drawn from the name."""

    def draw(name: str, tokens: int = 1040) -> list[int]:
        source = random.Random(name)
        return [source.randrange(32, 127) for _ in range(tokens)]

    return draw
