"""A version with a known defect is refused before anything is installed, by the same table as everywhere else."""

import json


def refused(tools, tmp_path, **settings):
    told = {"kvtrial_state_dir": str(tmp_path / "s"), "kvtrial_results_dir": str(tmp_path / "r"), **settings}
    done = tools.run("ansible-playbook", "playbooks/plan.yml", "-e", json.dumps(told))
    return done.returncode, done.stdout.strip().splitlines()[-1]


def test_a_blocked_version_is_refused_with_its_source_and_the_pinned_one_is_not(tools, tmp_path):
    status, last = refused(tools, tmp_path, kvtrial_vllm_version="0.18.1")
    assert status != 0
    assert last.startswith("vLLM 0.18.1 has a defect that this experiment would meet: Prompt accounting goes negative")
    assert "#37354" in last
    assert refused(tools, tmp_path)[0] == 0


def test_options_that_take_the_metrics_away_are_refused(tools, tmp_path):
    status, last = refused(tools, tmp_path, kvtrial_engine_args={"disable-log-stats": True})
    assert status != 0
    assert "--disable-log-stats takes the engine's metrics away" in last
