"""What observing a hundred servers takes beyond the window: `python -m bench.observe [SERVERS] [WINDOW_SECONDS]`.

Each host of the inventory is this machine under another name and has one port that answers with a real page, so the
controller's work is all there and the network's is not. Prints a table and writes results/observe.json.
"""

import datetime
import http.server
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "tests" / "fixtures" / "metrics" / "vllm-0.26.0-h200-8b-offload-after-return.prom"
RESULTS = Path(__file__).parent / "results" / "observe.json"


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers as a server that is idle."""

    body = PAGE.read_bytes()

    def do_GET(self) -> None:
        """A page, a version, or nothing."""
        answer = {"/metrics": self.body, "/version": b'{"version": "0.26.0"}'}.get(self.path)
        self.send_response(404 if answer is None else 200)
        self.end_headers()
        self.wfile.write(answer or b"")

    def log_message(self, *arguments: object) -> None:
        """Nothing."""


def measure(servers: int, window: float) -> list[dict[str, object]]:
    """Rows of the table."""
    started = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(servers)]
    for server in started:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        hosts = {
            f"h{n:03}": {"ansible_connection": "local", "ansible_python_interpreter": sys.executable,
                         "observe_ports": [server.server_port]}
            for n, server in enumerate(started)
        }  # fmt: skip
        (Path(folder) / "hosts.json").write_text(json.dumps({"all": {"hosts": hosts}}))
        told = json.dumps({"observe_window_seconds": window, "kvtrial_results_dir": folder})
        command = [
            str(Path(sys.executable).parent / "ansible-playbook"), "playbooks/observe.yml",
            "-i", f"{folder}/hosts.json", "-e", told,
        ]  # fmt: skip
        began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "ANSIBLE_FORKS": "50"}, capture_output=True, text=True, check=False
        )
        took, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode or f"{servers} servers on {servers} hosts" not in done.stdout:
            sys.exit(done.stdout[-3000:] + done.stderr[-1000:])
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    subject = f"{servers} servers, window {window:g} s"
    return [
        {"subject": subject, "metric": "whole playbook", "value": round(took, 1), "unit": "s"},
        {"subject": subject, "metric": "beyond the window", "value": round(took - window, 1), "unit": "s"},
        {"subject": subject, "metric": "CPU, the hosts' too", "value": round(cpu, 1), "unit": "s"},
    ]  # fmt: skip


def main() -> None:
    """Measure, print, keep."""
    servers = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    window = float(sys.argv[2]) if len(sys.argv) > 2 else 60.0
    rows = measure(servers, window)
    for row in rows:
        print(f"{row['subject']:32} {row['metric']:70} {row['value']:>8} {row['unit']}")
    machine = f"{os.cpu_count()} CPUs, {os.uname().machine}"
    RESULTS.write_text(json.dumps({"benchmark": "observe", "date": datetime.date.today().isoformat(),
                                   "machine": machine, "rows": rows}, indent=1) + "\n")  # fmt: skip


if __name__ == "__main__":
    main()
