"""The unit that playbooks/adopt.yml renders, on a real host: systemd has nothing to say of it, and it serves.

The verdict is one that was reached on an H200; the host's `vllm` is the tests' stand-in, and no time of it counts.
"""

import json
import re
import subprocess

import pytest
from playing import BIN, ROOT, Playbooks, furnish_standin

pytestmark = pytest.mark.timeout(600)
UNIT = "kvtrial-production.service"
KEY = "sk-of-production-4711"


@pytest.fixture(scope="module")
def host(playbooks, tmp_path_factory):
    project: Playbooks = playbooks(1, {"ansible_become": True})
    furnish_standin(project.fleet)
    folder = tmp_path_factory.mktemp("adopting") / "fleet"
    (folder / "group_vars" / "all").mkdir(parents=True)
    (folder / "hosts.yml").write_text("all: {hosts: {gpu01: {}}}\n")
    told = {
        "adopt_campaign": "docs/results/h200-2026-11-29/offload-8b", "adopt_apply": True, "adopt_ask_hosts": False,
        "adopt_gpu": "NVIDIA H200", "adopt_today": "2026-12-01", "kvtrial_vllm_version": "0.26.0",
        "kvtrial_model_name": "qwen3-8b-random", "adopt_executable": "/opt/standin-venv/bin/vllm",
        "adopt_model_path": "/opt/model",
    }  # fmt: skip
    done = subprocess.run([BIN / "ansible-playbook", "playbooks/adopt.yml", "-i", folder, "-e", json.dumps(told)],
                          cwd=ROOT, env=project.environment(), capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    (host,) = project.fleet.hosts
    host.sh("useradd --system --no-create-home vllm")
    # The stand-in is a CPU engine, which has no blocks of 16 tokens; nothing else of the unit is changed.
    text, changed = re.subn(r'(--block-size"? "?)16\b', r"\g<1>32", (folder / ".adopted" / UNIT).read_text())
    assert changed == 1
    host.write(f"/etc/systemd/system/{UNIT}", text)
    host.write("/etc/kvtrial/production.env", f"VLLM_API_KEY={KEY}\n", "0600")
    host.sh("systemctl daemon-reload")
    return host


def show(host, *names):
    lines = host.sh(f"systemctl show {UNIT} {' '.join(f'-p {name}' for name in names)}").splitlines()
    return dict(line.split("=", 1) for line in lines)


def test_systemd_has_nothing_to_say_of_the_unit(host):
    assert host.sh(f"systemd-analyze verify /etc/systemd/system/{UNIT} 2>&1") == ""
    assert show(host, "LoadState", "ActiveState") == {"LoadState": "loaded", "ActiveState": "inactive"}


def test_it_serves_on_loopback_as_it_was_adopted_and_ends_when_it_is_told_to(host):
    host.sh(f"systemctl start {UNIT}")
    ask = "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health')"
    wait = f'for n in $(seq 150); do python3 -c "{ask}" 2>/dev/null && exit 0; sleep 0.2; done'
    host.sh(f"{wait}; journalctl -u {UNIT}; exit 1")
    assert show(host, "ActiveState", "User", "NRestarts") == {"ActiveState": "active", "User": "vllm", "NRestarts": "0"}
    listening = [line.split()[3] for line in host.sh("ss -Hltn").splitlines() if ":8000" in line]
    assert listening == ["127.0.0.1:8000"]
    pid = show(host, "MainPID")["MainPID"]
    argv = host.sh(f"tr '\\0' '\\n' < /proc/{pid}/cmdline").splitlines()
    config = json.loads(argv[argv.index("--kv-transfer-config") + 1])
    assert config["kv_connector"] == "OffloadingConnector"
    assert config["kv_connector_extra_config"]["cpu_bytes_to_use"] == 36 * 2**30
    environment = host.sh(f"tr '\\0' '\\n' < /proc/{pid}/environ")
    assert "DEV_MODE" not in environment and f"VLLM_API_KEY={KEY}" in environment
    # The key lies in a file that the account itself can't read, and nobody sees it in the unit.
    assert KEY not in host.sh(f"systemctl cat {UNIT}; systemctl show {UNIT}")
    assert host.sh("setpriv --reuid vllm --clear-groups cat /etc/kvtrial/production.env 2>&1 || true").endswith(
        "denied"
    )
    host.sh(f"systemctl stop {UNIT}")
    assert show(host, "ActiveState", "Result") == {"ActiveState": "inactive", "Result": "success"}
    assert host.sh("pgrep -u vllm || true") == ""


def test_adopting_starts_nothing_by_itself(host):
    assert host.sh(f"systemctl is-enabled {UNIT} || true") == "disabled"
