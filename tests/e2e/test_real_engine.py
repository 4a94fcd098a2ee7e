"""The real engine on this machine's CPU: a campaign from an installed collection, and a planted corruption."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from conftest import BIN, ROOT, Project, leftovers
from kvtrial.analysis.faults import sort_pairs
from kvtrial.analysis.gates import GateContext, run_gates
from kvtrial.analysis.inputs import read_request
from kvtrial.analysis.plan import make_plan, requested_protocol
from msgspec.structs import replace
from trial import Trial

pytestmark = pytest.mark.e2e_real
STATE = ROOT / ".kvtrial"
KV_BYTES_PER_TOKEN = 4096


@pytest.fixture(name="installed", scope="module")
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The collection built from the checkout and installed in a folder of its own; its path."""
    folder = tmp_path_factory.mktemp("installed")
    galaxy = str(BIN / "ansible-galaxy")
    subprocess.run([galaxy, "collection", "build", "--output-path", str(folder)], cwd=ROOT, check=True)
    archive = next(folder.glob("kvtrial-vllm-*.tar.gz"))
    subprocess.run(
        [galaxy, "collection", "install", str(archive), "-p", str(folder), "--offline"], cwd=folder, check=True
    )
    return folder / "ansible_collections" / "kvtrial" / "vllm"


def local_variables() -> dict:
    """The variables of the inventory `local`, with the engine and model of this checkout."""
    read = yaml.safe_load((ROOT / "inventories" / "local" / "hosts.yml").read_text())
    return {**read["all"]["hosts"]["this-machine"], "kvtrial_state_dir": str(STATE),
            "workload_wheel_cache": str(STATE / "wheels")}  # fmt: skip


@pytest.mark.timeout(900)
def test_the_installed_collection_reaches_a_verdict_with_the_real_engine(installed, tmp_path, monkeypatch):
    monkeypatch.setenv("ANSIBLE_COLLECTIONS_PATH", str(installed.parents[2]))
    project = Project(tmp_path, local_variables(), root=installed, playbooks="kvtrial.vllm.")
    environment = {**project.environment(), "ANSIBLE_COLLECTIONS_PATH": str(installed.parents[2])}
    done = subprocess.run(project.command("experiment.yml", "-e", "kvtrial_pairs=2"), cwd=tmp_path, env=environment,
                          capture_output=True, text=True, timeout=1500, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert str(installed) in done.stdout or (tmp_path / "results").is_dir()
    verdict = project.verdict()
    assert verdict["evidence"] == "cpu"
    assert verdict["verdict"] == "INCONCLUSIVE"
    assert [gate for gate in verdict["hosts"][0]["gates"] if gate["passed"] is not True] == []
    records = [json.loads(path.read_text()) for path in project.results.glob("latest/runs/*/*/record.json")]
    assert len(records) == 4
    for record in records:
        phase = next(phase for phase in record["phases"] if phase["name"] == "return")
        loaded = phase["after"]["load_bytes"], phase["before"]["load_bytes"]
        if record["arm"] == "offload":
            assert loaded[0] - loaded[1] == 8 * 512 * KV_BYTES_PER_TOKEN
        else:
            assert loaded == (None, None)
    primary = next(c for c in verdict["comparisons"] if c["role"] == "primary")
    assert max(primary["pair_effects"]) < 1, "a return from the tier was slower than recomputing it"
    assert leftovers(STATE / "campaigns") == []


def test_a_planted_corruption_on_load_is_caught_by_the_answer_gate(tmp_path):
    venvs = sorted(STATE.glob("venvs/vllm-0.32.0-*"))
    manifests = {path.parent: json.loads(path.read_text()) for path in STATE.glob("models/made-*/manifest.json")}
    # Beside the usual model may lie the smaller one that a ladder has made.
    usual = [model for model, manifest in manifests.items() if manifest["kv_bytes_per_token"] == KV_BYTES_PER_TOKEN]
    if not venvs or not usual:
        pytest.skip("no engine in .kvtrial yet: the test above installs it")
    given, model = local_variables(), usual[0]
    manifest = manifests[model]
    request = {
        "protocol": "offload_return",
        "protocols_dir": str(ROOT / "playbooks" / "protocols"),
        "results_dir": str(tmp_path / "results"),
        "hosts": {"h1": {
            "may_be_disturbed": True, "backend": "cpu", "vllm_version": "0.32.0", "vllm_venv": str(venvs[-1]),
            "port": 18766, "engine_args": given["kvtrial_engine_args"],
            "engine_env": {**given["kvtrial_engine_env"], "KVTRIAL_HOST_OFFLOAD_CORRUPT": "1"},
            "connector_extra_config": given["kvtrial_connector_extra_config"],
            "model": {"name": "m", "path": str(model), "revision": manifest["revision"], "weights": "random",
                      "kv_bytes_per_token": manifest["kv_bytes_per_token"], "low_token_id": 32, "high_token_id": 126},
            "ram_reserve_bytes": 2**30,
        }},
    }  # fmt: skip
    checked = read_request(request)
    plan = make_plan(checked, requested_protocol(checked))
    first = next(run for run in plan.hosts[0].runs if run.arm == "offload")
    kept = [phase for phase in first.phases if phase.block in ("warmup", "return")]
    trial = Trial(tmp_path / "host", plan, [replace(first, phases=kept)])
    trial.run()
    record = trial.records()[0]
    assert record.outcome == "completed", record.fault
    returned = next(phase for phase in record.phases if phase.name == "return")
    assert returned.after["load_bytes"] - returned.before["load_bytes"] == 8 * 512 * KV_BYTES_PER_TOKEN
    # One run of one arm is no pair, so the gate is asked about the run itself.
    context = GateContext(plan.protocol, "h1", sort_pairs([record], list(plan.protocol.arms)), [record])
    gate = next(result for result in run_gates(context) if result.gate == "answers_equal")
    assert gate.passed is False, gate
    assert "wrong answers: 4 of 4" in gate.detail
    shutil.rmtree(tmp_path / "host")
