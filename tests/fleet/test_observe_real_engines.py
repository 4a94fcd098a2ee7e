"""playbooks/observe.yml on three real hosts with a real engine each: preempting, with a tier that serves, a wrong one.

The engines' packages are this machine's, bound read-only into the hosts; each has a unit and is loaded from its host.
"""

import json
import time

import pytest
from playing import ROOT, Playbooks
from served import ARGS, BLOCK_TOKENS, ENV, KV_BYTES_PER_TOKEN, SERVED, make_model, tier
from test_real_engine_over_ssh import ENGINE, engine_venv, furnish_engine

pytestmark = [pytest.mark.full, pytest.mark.e2e_real, pytest.mark.timeout(1500)]
GPU_BLOCKS = 49
GPU_TOKENS = (GPU_BLOCKS - 1) * BLOCK_TOKENS
PORT = 8000
HOSTS = {
    # options, and the load: clients, prompt tokens, output tokens, prefixes
    "h1": ((), (14, 64, 224, 10**6)),
    "h2": (tier(4 * GPU_TOKENS * KV_BYTES_PER_TOKEN), (1, 496, 2, 8)),
    "h3": (tier(GPU_TOKENS // 2 * KV_BYTES_PER_TOKEN), (1, 496, 2, 8)),
}


def quoted(word):
    return '"' + word.replace('"', '\\"') + '"'


@pytest.fixture(scope="module")
def project(playbooks, tmp_path_factory):
    venv = engine_venv()
    model = make_model(venv / "bin" / "python", tmp_path_factory.mktemp("made") / "model")
    project: Playbooks = playbooks(3, {"ansible_become": True}, binds=[f"{venv}/lib:{ENGINE}/lib"])
    for host, (options, _) in zip(project.fleet.hosts, HOSTS.values(), strict=True):
        furnish_engine(host, venv)
        host.put(model, "/opt/model")
        host.write("/opt/served.py", (ROOT / "tests" / "served.py").read_text())
        sizes = ("--num-gpu-blocks-override", str(GPU_BLOCKS), "--max-num-seqs", "16", "--port", str(PORT))
        words = [f"{ENGINE}/bin/vllm", "serve", "/opt/model", *ARGS, *sizes, *options]
        environment = {**ENV, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HOME": "/root"}
        host.write("/etc/systemd/system/vllm.service", "\n".join([
            "[Service]", *(f"Environment={name}={value}" for name, value in environment.items()),
            f"ExecStart={' '.join(map(quoted, words))}"]) + "\n")  # fmt: skip
        host.sh("systemctl daemon-reload; systemctl start vllm")
    for host, (_, load) in zip(project.fleet.hosts, HOSTS.values(), strict=True):
        ask = f"import urllib.request as u; u.urlopen('http://127.0.0.1:{PORT}/health', timeout=5)"
        host.sh(f'for n in $(seq 400); do python3 -c "{ask}" 2>/dev/null && exit 0; sleep 1; done; exit 1')
        numbers = " ".join(map(str, load))
        host.sh(
            f"systemd-run --quiet --unit load python3 /opt/served.py http://127.0.0.1:{PORT} {SERVED} 600 {numbers}"
        )
    # Every prefix once round, so that what is seen is what stays.
    time.sleep(15)
    return project


def answer(project, host):
    folder = next(project.results.glob("observed-*")) / host / str(PORT)
    return json.loads((folder / "answer.json").read_text()), folder


@pytest.fixture(scope="module")
def seen(project):
    return project.play("playbooks/observe.yml", "-e", "observe_window_seconds=20", fails=False)


def numbers_of(read, class_):
    return next(finding["numbers"] for finding in read["findings"] if finding["class"] == class_)


def test_three_servers_are_told_apart_by_what_is_wrong_with_each(project, seen):
    answers = {name: answer(project, name)[0] for name in HOSTS}
    assert {name: read["class"] for name, read in answers.items()} == {
        # Two looks give the rate and not the shape, and this vLLM's log has no word of preemptions.
        "h1": "preemption_shape_unknown",
        "h2": "healthy_tier_serving",
        "h3": "tier_smaller_than_gpu_kv",
    }
    assert all(
        read["server"]["version"] == "0.32.0" and read["server"]["models"] == [SERVED] for read in answers.values()
    )
    assert "Fleet: 3 servers on 3 hosts" in seen.stdout


def test_the_numbers_are_the_engines_own(project, seen):
    preempted, served, wrong = (answer(project, name)[0] for name in HOSTS)
    assert numbers_of(preempted, "preemption_shape_unknown")["delta"] > 0
    tiered = numbers_of(served, "healthy_tier_serving")
    assert tiered["external_hits"] > 0 and tiered["share_of_prompt"] > 0.85
    assert abs(tiered["load"] - tiered["external_hits"] * KV_BYTES_PER_TOKEN) <= 480 * KV_BYTES_PER_TOKEN
    small = numbers_of(wrong, "tier_smaller_than_gpu_kv")
    assert small["tier_bytes"] == GPU_TOKENS // 2 * KV_BYTES_PER_TOKEN
    assert (small["load"], small["external_hits"]) == (0, 0) and small["store"] > 0
    for _, folder in (answer(project, name) for name in HOSTS):
        facts = json.loads((folder / "facts.json").read_text())
        assert facts["unit_name"] == "vllm.service"
        assert {socket["address"] for socket in facts["listening"]} == {"127.0.0.1"}


def test_a_server_that_was_killed_is_missed_and_the_others_are_still_told(project, seen):
    host = project.fleet.hosts[2]
    host.sh("systemctl kill --signal=SIGKILL vllm; sleep 1")
    done = project.play("playbooks/observe.yml", "-e", f'{{"observe_window_seconds": 5, "observe_ports": [{PORT}]}}')
    assert "h3" in done.stdout and "could not be read (ConnectionRefused" in done.stdout
    assert "not_read: h3:8000" in done.stdout
    assert "preemption_shape_unknown: h1:8000" in done.stdout and "healthy_tier_serving: h2:8000" in done.stdout
