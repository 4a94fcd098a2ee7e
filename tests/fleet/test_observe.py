"""playbooks/observe.yml over SSH on real hosts, with the stand-in engine: what is found, told and left alone."""

import json

import pytest
from playing import Playbooks, furnish_standin, last_line

pytestmark = pytest.mark.timeout(900)
pytest.importorskip("kvtrial.analysis.observe")

SECRET = "sk-never-to-be-seen-4711"
SERVE = "/opt/standin-venv/bin/vllm serve /opt/model --max-num-seqs 8 --block-size 32 --num-gpu-blocks-override 33"
UNIT = f"""[Service]
Environment=VLLM_API_KEY={SECRET}
Environment=VLLM_KV_CACHE_LAYOUT=HND
ExecStart={SERVE} --host 0.0.0.0 --port 8000 --api-key {SECRET}
MemoryMax=2G
"""


def wait_for(host, port):
    ask = f"import urllib.request as u; u.urlopen('http://127.0.0.1:{port}/health')"
    host.sh(f'for n in $(seq 150); do python3 -c "{ask}" 2>/dev/null && exit 0; sleep 0.2; done; exit 1')


@pytest.fixture(scope="module")
def project(playbooks):
    project: Playbooks = playbooks(3, {"ansible_become": True})
    one, two, _ = project.fleet.hosts
    furnish_standin(project.fleet)
    one.write("/etc/systemd/system/vllm.service", UNIT)
    one.sh("systemctl daemon-reload; systemctl start vllm")
    two.sh(f"setsid {SERVE} --host 127.0.0.1 --port 8001 > /var/log/engine.log 2>&1 < /dev/null & sleep 0.1")
    wait_for(one, 8000)
    wait_for(two, 8001)
    return project


def state(host):
    """What a reader must leave as it is: files but those of Ansible and logs, running services, engines."""
    changing = "/proc /sys /run /tmp /var/log /root/.ansible /home/deploy/.ansible"
    pruned = " -o ".join(f"-path {folder}" for folder in changing.split())
    files = f"find / -xdev \\( {pruned} \\) -prune -o -type f -newer /etc/machine-id -printf '%p %s %T@\\n' | sort"
    running = "systemctl list-units --type=service --state=running --plain --no-legend | cut -d' ' -f1"
    services = f"{running} | grep -v -e session -e user@"
    return [host.sh(command) for command in (files, services, "pgrep -f '[v]llm serve' | sort")]


@pytest.fixture(scope="module")
def seen(project):
    before = [state(host) for host in project.fleet.hosts]
    done = project.play("playbooks/observe.yml", "-e", "observe_window_seconds=2", fails=False)
    after = [state(host) for host in project.fleet.hosts]
    return done, before, after


def test_every_server_is_found_and_a_host_without_one_is_named(project, seen):
    done = seen[0]
    assert "No vLLM server was found on h3." in done.stdout
    fleet = json.loads(next(project.results.glob("observed-*/fleet.json")).read_text())
    assert set(fleet["servers"]) == {"h1:8000", "h2:8001"}
    assert last_line(done).startswith("Kept in ")
    assert "Fleet: 2 servers on 3 hosts, two looks " in done.stdout


def facts(project, host, port):
    folder = next(project.results.glob("observed-*")) / host / str(port)
    return json.loads((folder / "facts.json").read_text()), folder


def test_a_unit_is_told_with_its_limit_its_sockets_and_its_journal(project, seen):
    told, folder = facts(project, "h1", 8000)
    assert told["unit_name"] == "vllm.service"
    assert told["cgroup_limit_bytes"] == 2 * 2**30
    assert {"address": "0.0.0.0", "port": 8000} in [{k: s[k] for k in ("address", "port")} for s in told["listening"]]
    assert told["env"]["VLLM_KV_CACHE_LAYOUT"] == "HND"
    assert told["vllm_version"] == "0.32.0"
    assert "Starting vLLM" in (folder / "server.log").read_text()
    assert (folder / "0.prom").read_text() and (folder / "1.prom").read_text()


def test_a_process_is_told_with_the_file_that_it_writes_to(project, seen):
    told, folder = facts(project, "h2", 8001)
    assert told["unit_name"] is None or told["unit_name"] != "vllm.service"
    assert "Starting vLLM" in (folder / "server.log").read_text()
    assert told["argv"][1:3] == ["serve", "/opt/model"]


def test_no_key_leaves_the_host(project, seen):
    for path in project.results.rglob("*"):
        assert not path.is_file() or SECRET not in path.read_text(errors="replace"), path
    assert SECRET not in seen[0].stdout + seen[0].stderr


def test_the_hosts_are_as_they_were(seen):
    _, before, after = seen
    for was, now in zip(before, after, strict=True):
        for first, second in zip(was, now, strict=True):
            assert sorted(set(second.splitlines()) ^ set(first.splitlines())) == []


def test_an_address_beyond_loopback_is_told_and_the_key_is_no_excuse(project, seen):
    answer = json.loads((facts(project, "h1", 8000)[1] / "answer.json").read_text())
    assert any("0.0.0.0" in json.dumps(finding) for finding in answer["findings"])


def test_a_host_that_is_gone_and_a_port_without_a_server_are_sentences(project, seen):
    project.fleet.hosts[2].cut()
    try:
        done = project.play(
            "playbooks/observe.yml", "-e", '{"observe_window_seconds": 1, "observe_ports": [9999]}', fails=True
        )
    finally:
        project.fleet.hosts[2].heal()
    assert "h3 could not be asked" in done.stdout
    assert last_line(done).startswith("No server could be read: h1:9999: /metrics could not be read (ConnectionRefused")
