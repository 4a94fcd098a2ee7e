"""A version with a known defect is refused before anything is installed, by the same table as everywhere else."""

import json


def refused(tools, tmp_path, **settings):
    told = {"kvtrial_state_dir": str(tmp_path / "s"), "kvtrial_results_dir": str(tmp_path / "r"), **settings}
    done = tools.run("ansible-playbook", "playbooks/plan.yml", "-e", json.dumps(told))
    return done.returncode, done.stdout.strip().splitlines()[-1]


def test_a_blocked_version_is_refused_with_its_source_and_the_pinned_one_is_not(tools, tmp_path):
    status, last = refused(tools, tmp_path, kvtrial_vllm_version="0.18.1")
    assert status != 0
    assert "arm offload: vLLM 0.18.1: Prompt accounting goes negative" in last
    assert "#37354" in last and last.endswith("Use 0.20 or newer.")
    assert refused(tools, tmp_path)[0] == 0


def test_an_environment_that_starts_another_connector_is_refused(tools, tmp_path):
    status, last = refused(tools, tmp_path, kvtrial_engine_env_more={"VLLM_USE_SIMPLE_KV_OFFLOAD": "1"})
    assert status != 0
    assert "VLLM_USE_SIMPLE_KV_OFFLOAD changes what the shortcut starts" in last
