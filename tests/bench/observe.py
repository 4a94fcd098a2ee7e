"""What observing a hundred servers takes beyond the window: `python -m bench.observe [SERVERS] [WINDOW_SECONDS]`.

Each host of the inventory is this machine under another name, and its Python is a stub that answers as a host with one
server does, with a real page. So all of the controller's work is there, and neither the hosts' nor the network's: on a
fleet these go on beside each other. Prints a table and writes results/observe.json.
"""

import base64
import datetime
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "tests" / "fixtures" / "metrics"
RESULTS = Path(__file__).parent / "results"
STUB = """#!/bin/sh
told=$(cat)
case "$told" in *start_ticks*) cat {folder}/second.json ;; *) cat {folder}/first.json ;; esac
"""


def answers(window: float) -> dict[str, object]:
    """What server_info returns at either look, of a host with one server."""
    looks: dict[str, object] = {}
    for name, when, at in (("first", "before", 0.0), ("second", "after", window)):
        page = (PAGES / f"vllm-0.26.0-h200-8b-offload-{when}-return.prom").read_bytes()
        text = base64.b64encode(zlib.compress(page)).decode()
        told = {"text": text, "bytes": len(page), "monotonic_seconds": at, "error": None, "status": 200}
        server: dict[str, object] = {"port": 8000, "page": told}
        if name == "first":
            server["facts"] = {"argv": ["vllm", "serve", "m", "--host", "127.0.0.1"], "vllm_version": "0.26.0"}
        looks[name] = {"changed": False, "servers": [server]}
    address = {"scheme": "http", "host": "127.0.0.1", "port": 8000}
    again = {"pid": 1, "start_ticks": 1, "port": 8000, "address": address, "unit": None, "log": None}
    looks["first"] = {**looks["first"], "again": [again]}  # type: ignore[dict-item]
    return looks


def measure(servers: int, window: float) -> list[dict[str, object]]:
    """Rows of the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for look, answer in answers(window).items():
            (folder / f"{look}.json").write_text(json.dumps(answer))
        stub = folder / "python3"
        stub.write_text(STUB.format(folder=folder))
        stub.chmod(0o755)
        shared = {"ansible_connection": "local", "ansible_python_interpreter": str(stub)}
        hosts = {f"h{n:03}": {} for n in range(servers)}
        (folder / "hosts.json").write_text(json.dumps({"all": {"hosts": hosts, "vars": shared}}))
        told = json.dumps({"observe_window_seconds": window, "kvtrial_results_dir": name})
        command = [
            str(Path(sys.executable).parent / "ansible-playbook"), "playbooks/observe.yml",
            "-i", f"{folder}/hosts.json", "-e", told,
        ]  # fmt: skip
        began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        took, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode or f"{servers} servers on {servers} hosts" not in done.stdout:
            sys.exit(done.stdout[-3000:] + done.stderr[-1000:])
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    subject = f"{servers} servers, window {window:g} s"
    return [
        {"subject": subject, "metric": "whole playbook", "value": round(took, 1), "unit": "s"},
        {"subject": subject, "metric": "beyond the window", "value": round(took - window, 1), "unit": "s"},
        {"subject": subject, "metric": "CPU of the controller", "value": round(cpu, 1), "unit": "s"},
    ]


def keep(benchmark: str, rows: list[dict[str, Any]]) -> None:
    """Print the table and write results/<benchmark>.json."""
    wide = [max(len(str(row[name])) for row in rows) for name in ("subject", "metric", "value")]
    for row in rows:
        print(f"{row['subject']:{wide[0]}}  {row['metric']:{wide[1]}}  {row['value']:>{wide[2]}} {row['unit']}")
    load = f"load {os.getloadavg()[2]:.1f} over the last 15 minutes"
    said = {
        "benchmark": benchmark,
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPUs, {os.uname().machine}, {load}",
        "rows": rows,
    }
    (RESULTS / f"{benchmark}.json").write_text(json.dumps(said, indent=1) + "\n")


def main() -> None:
    """Measure, print, keep."""
    servers = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    window = float(sys.argv[2]) if len(sys.argv) > 2 else 60.0
    keep("observe", measure(servers, window))


if __name__ == "__main__":
    main()
