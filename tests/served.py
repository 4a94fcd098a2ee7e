"""A small real engine on the CPU as a user runs one: `vllm serve` by itself, and a load of completions on it.

The launch is the local inventory's (`inventories/local`), smaller. Run as a program it is the load:

    python tests/served.py http://127.0.0.1:8000 MODEL SECONDS CLIENTS PROMPT_TOKENS OUTPUT_TOKENS PREFIXES
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MODEL_SHAPE = ("--layers", "2", "--hidden-size", "128", "--intermediate-size", "512", "--attention-heads", "4",
               "--kv-heads", "2", "--head-dim", "32")  # fmt: skip
KV_BYTES_PER_TOKEN = 2 * 2 * 2 * 32 * 2
BLOCK_TOKENS = 32
SERVED = "small"
ARGS = (
    "--host", "127.0.0.1", "--served-model-name", SERVED, "--enforce-eager", "--distributed-executor-backend", "uni",
    "--block-size", str(BLOCK_TOKENS), "--max-model-len", "1024", "--max-num-batched-tokens", "2048",
    "--kv-cache-memory-bytes", "64M",
)  # fmt: skip
ENV = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOG_STATS_INTERVAL": "1",
}
START_SECONDS = 180.0


def tier(size_bytes: int, chunk_tokens: int = BLOCK_TOKENS) -> tuple[str, str]:
    """The option that gives the CPU engine a tier of that size (the project's own host copy)."""
    extra = {"cpu_bytes_to_use": size_bytes, "block_size": chunk_tokens, "spec_name": "HostOffloadingSpec",
             "spec_module_path": "kvtrial_host_offload"}  # fmt: skip
    config = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return "--kv-transfer-config", json.dumps(config)


def make_model(python: Path, folder: Path) -> Path:
    """A model of two layers with random weights; a page of 32 tokens of its KV cache takes 16 KiB."""
    maker = ROOT / "roles" / "model" / "files" / "make_model.py"
    subprocess.run([python, maker, "make", *MODEL_SHAPE, folder], check=True, stdout=subprocess.DEVNULL)
    return folder


class Engine:
    """One `vllm serve` in a session of its own. `venv`: with vLLM; `log`: where its output goes."""

    def __init__(
        self, venv: Path, model: Path, port: int, log: Path, args: Sequence[str] = (), env: Mapping[str, str] = ENV
    ) -> None:
        self.url, self.log = f"http://127.0.0.1:{port}", log
        command = [str(venv / "bin" / "vllm"), "serve", str(model), *ARGS, "--port", str(port), *args]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                                            stdin=subprocess.DEVNULL, env={**kept, **env})  # fmt: skip

    def wait(self) -> "Engine":
        """Until it serves."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self.process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=2).close()
                return self
            time.sleep(0.2)
        raise AssertionError(f"the engine does not serve:\n{self.log.read_text(errors='replace')[-4000:]}")

    def core(self) -> int:
        """The process that computes, where it is one of its own."""
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        below = [int(pid) for path in children for pid in path.read_text().split()]
        return next(pid for pid in below if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes())

    def counter(self, name: str) -> float:
        """The sum of a family's samples on its page; 0 where there is none."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))

    def end(self) -> None:
        """End it and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def prompt(number: int, tokens: int) -> list[int]:
    """The tokens of one of many prompts; each begins otherwise."""
    head = [32 + int(digit) for digit in f"{number:06}"]
    return (head + [42 + (number * 31 + place * 7) % 80 for place in range(tokens)])[:tokens]


class Load:
    """`clients` that each send one completion after the other, of `prefixes` prompts in turn, until `stop`."""

    def __init__(
        self, url: str, clients: int, prompt_tokens: int, output_tokens: int, prefixes: int = 10**6, model: str = SERVED
    ) -> None:
        self._numbers = itertools.count()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self.completed = 0
        shape = {"model": model, "max_tokens": output_tokens, "ignore_eos": True, "temperature": 0}

        def ask(body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            request = urllib.request.Request(f"{url}/v1/completions", data, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=120) as answer:
                answer.read()

        def client() -> None:
            while not self._over.is_set():
                with self._lock:
                    number = next(self._numbers) % prefixes
                try:
                    ask({**shape, "prompt": prompt(number, prompt_tokens)})
                except (OSError, urllib.error.URLError, EOFError):
                    if self._over.wait(0.5):
                        return
                    continue
                with self._lock:
                    self.completed += 1

        self._threads = [threading.Thread(target=client, daemon=True) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Until the last answer has come."""
        self._over.set()
        for thread in self._threads:
            thread.join(150)


@contextlib.contextmanager
def loaded(*args: Any, **more: Any) -> Iterator[Load]:
    """A load that is over at the end."""
    load = Load(*args, **more)
    try:
        yield load
    finally:
        load.stop()


if __name__ == "__main__":
    address, name, *numbers = sys.argv[1:]
    seconds, count, long, short, many = map(int, numbers)
    with loaded(address, count, long, short, many, name):
        time.sleep(seconds)
