"""experiment.yml over SSH with the real engine on the CPU, under its units: the same record as without systemd.

The engine's packages are this machine's, bound read-only into the host; its Python is the host's own.
"""

import json
import os
from pathlib import Path

import pytest
import yaml
from playing import ROOT, Playbooks

pytestmark = [pytest.mark.full, pytest.mark.e2e_real, pytest.mark.timeout(2400)]
ENGINE = "/opt/engine"
QUIET = ("undisturbed", "conditions_equal", "client_honest")
"""Gates that a busy machine fails. How quiet it was is not what is tested here."""


def engine_venv() -> Path:
    """An installed engine of this machine."""
    found = [Path(os.environ["KVTRIAL_ENGINE_VENV"])] if "KVTRIAL_ENGINE_VENV" in os.environ else []
    found += sorted((ROOT / ".kvtrial" / "venvs").glob("vllm-*"))
    for venv in found:
        if (venv / "bin" / "vllm").exists():
            return venv.resolve()
    pytest.skip("no engine is installed: tests/install_engine.yml does that, or KVTRIAL_ENGINE_VENV names one")


def variables(wheels: Path) -> dict[str, object]:
    """Those of the inventory `local`, on a host that is reached over SSH."""
    read = yaml.safe_load((ROOT / "inventories" / "local" / "hosts.yml").read_text())
    given = read["all"]["hosts"]["this-machine"]
    kept = {name: value for name, value in given.items() if name.startswith("kvtrial_") and name != "kvtrial_state_dir"}
    return {
        **kept,
        "ansible_become": True,
        "vllm_existing_venv": ENGINE,
        "workload_wheelhouse": str(wheels),
        "workload_wheel_cache": str(ROOT / ".kvtrial" / "wheels"),
    }


@pytest.fixture(scope="module")
def project(playbooks, host_wheels):
    venv = engine_venv()
    project: Playbooks = playbooks(1, variables(host_wheels), binds=[f"{venv}/lib:{ENGINE}/lib"])
    furnish_engine(project.fleet.hosts[0], venv)
    return project


def furnish_engine(host, venv):
    """Put an engine to use on a host into which its `lib` is bound."""
    script = (venv / "bin" / "vllm").read_text().split("\n", 1)[1]
    host.write(f"{ENGINE}/bin/vllm", f"#!{ENGINE}/bin/python3\n{script}", "0755")
    host.write(f"{ENGINE}/pyvenv.cfg", "home = /usr/bin\ninclude-system-site-packages = false\nversion = 3.11\n")
    host.sh(f"for name in python python3 python3.11; do ln -s /usr/bin/python3.11 {ENGINE}/bin/$name; done")


def records(project):
    """The records of the last campaign, by pair and arm."""
    found = [json.loads(path.read_text()) for path in project.results.glob("latest/runs/*/*/record.json")]
    return {(record["pair"], record["arm"]): record for record in found}


def test_the_real_engine_under_its_units_gives_a_sound_campaign(project):
    host = project.fleet.hosts[0]
    done = project.play("experiment.yml", "-e", "kvtrial_pairs=2", seconds=2000)
    assert (project.results / "latest" / "verdict.json").exists(), done.stdout[-6000:]
    verdict = json.loads((project.results / "latest" / "verdict.json").read_text())
    assert verdict["evidence"] == "cpu"
    failed = [gate for gate in verdict["hosts"][0]["gates"] if gate["passed"] is not True]
    assert [gate for gate in failed if gate["gate"] not in QUIET] == []
    assert verdict["verdict"] == ("INVALID" if failed else "INCONCLUSIVE"), verdict["reason"]
    assert len(records(project)) == 4
    for record in records(project).values():
        assert record["supervision"]["unit"] == f"kvtrial-engine@{record['arm']}.service"
        assert record["supervision"]["exposure"] < 3
        assert record["left_behind"] == ""
        listening = record["resolved"]["listening"]
        assert len(listening) > 1  # its port is not the only socket that it opens
        assert all(socket["address"] in ("127.0.0.1", "::1") for socket in listening)
        phase = next(phase for phase in record["phases"] if phase["name"] == "return")
        loaded = phase["after"]["load_bytes"], phase["before"]["load_bytes"]
        if record["arm"] == "offload":
            assert loaded[0] - loaded[1] == 8 * 512 * 4096
        else:
            assert loaded == (None, None)
    assert host.sh("pgrep -u kvtrial || true") == ""
    assert host.sh("ls /dev/shm") == ""


def test_the_record_is_the_local_one(project):
    """The same plan without systemd on the same host: the same requests, prompts and answers, the same facts."""
    first = (project.results / "latest").resolve()
    under_units = records(project)
    done = project.play("experiment.yml", "-e", "kvtrial_pairs=2", "-e", "kvtrial_supervisor=process", seconds=2000)
    assert (project.results / "latest").resolve() != first, done.stdout[-6000:]
    local = records(project)
    assert under_units.keys() == local.keys()
    for key, one in under_units.items():
        other = local[key]
        assert (one["supervision"]["kind"], other["supervision"]["kind"]) == ("systemd", "process")
        assert one.keys() == other.keys()
        assert sorted(one["files"]) == sorted(other["files"])
        for name in ("run", "arm", "outcome", "fault", "evidence", "launch", "model", "capacity", "position"):
            assert one[name] == other[name], name
        for name in ("vllm_version", "served_models", "packages_sha256", "model_revision"):
            assert one["resolved"][name] == other["resolved"][name], name
        for a, b in zip(one["phases"], other["phases"], strict=True):
            for name in ("name", "prompts_sha256", "sent", "finished", "failed", "output_tokens"):
                assert a[name] == b[name], (a["name"], name)
            facts = [[(r["key"], r["prompt_sha256"], r["output_tokens"], r["cached_tokens"]) for r in phase["requests"]]
                     for phase in (a, b)]  # fmt: skip
            assert facts[0] == facts[1]


FAULTS = r"""
import glob, json, os, signal, time
wanted = {0: ("return", signal.SIGKILL), 1: ("populate", signal.SIGSTOP)}
while wanted:
    time.sleep(0.005)
    try:
        now = json.load(open(max(glob.glob("/var/lib/kvtrial/campaigns/*/progress.json"), key=os.path.getmtime)))
    except (OSError, ValueError):
        continue
    phase, number = wanted.get(now["runs_done"], ("", 0))
    if not phase or now["state"] != "running" or now["phase"] != phase:
        continue
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            if b"VLLM::EngineCore" in open(path, "rb").read():
                os.kill(int(path.split("/")[2]), number)
                wanted.pop(now["runs_done"], None)
        except OSError:
            pass
"""


def test_the_real_engine_killed_in_a_phase_and_one_that_hangs_are_results_of_their_arms(project):
    """EngineCore is killed in the first run and stopped in the second; what follows is sound, and nothing is left."""
    host = project.fleet.hosts[0]
    host.write("/root/faults.py", FAULTS)
    host.sh("systemd-run -q --unit=faults python3 /root/faults.py")
    limits = {"kvtrial_limits": {"idle_timeout_seconds": 20, "stop_timeout_seconds": 10, "deadlock_seconds": 5}}
    try:
        done = project.play("experiment.yml", "-e", "kvtrial_pairs=2", "-e", json.dumps(limits),
                            "-e", "kvtrial_new_campaign=true", seconds=2000)  # fmt: skip
    finally:
        host.sh("systemctl stop faults", check=False)
    found = sorted(records(project).values(), key=lambda record: record["times"]["started_monotonic_seconds"])
    assert [record["outcome"] for record in found] == ["engine_fault", "engine_fault", "completed", "completed"], (
        done.stdout[-4000:]
    )
    assert found[0]["fault"]["phase"] == "return"
    assert found[0]["fault"]["fault"] in ("engine_died", "engine_dead")
    assert found[1]["fault"]["phase"] == "populate"
    assert found[1]["fault"]["fault"] in ("deadlock", "requests_failed", "requests_timed_out")
    assert host.sh("pgrep -u kvtrial || true") == ""
    assert host.sh("ls /dev/shm") == ""
