"""calibrate.yml as a user runs it, and what an experiment then makes of it."""

import json

import pytest
from conftest import last_line


def test_a_host_is_calibrated_once_and_its_card_fetched(standin_project):
    project = standin_project()
    card_path = project.folder / "state" / "calibration.json"
    first = project.play("playbooks/calibrate.yml")
    assert first.returncode == 0, first.stdout[-3000:]
    assert "Calibrated up to" in first.stdout
    card = json.loads(card_path.read_text())
    fetched = project.results / "calibrations" / "h1.json"
    assert json.loads(fetched.read_text()) == card

    second = project.play("playbooks/calibrate.yml")
    assert second.returncode == 0, second.stdout[-3000:]
    assert "changed=0" in [line for line in second.stdout.splitlines() if line.startswith("h1 ")][-1]
    assert json.loads(card_path.read_text()) == card


@pytest.mark.full
def test_an_experiment_that_requires_it_refuses_without_and_runs_with_it(standin_project):
    project = standin_project()
    required = ("experiment.yml", "-e", "kvtrial_pairs=2", "-e", "kvtrial_require_calibration=true")
    refused = project.play(*required)
    assert refused.returncode != 0
    assert "the load client is not calibrated on this host" in last_line(refused)
    assert project.play("playbooks/calibrate.yml").returncode == 0
    done = project.play(*required)
    assert done.returncode == 0, done.stdout[-3000:]
    assert not any("not calibrated" in caveat for caveat in project.verdict()["caveats"])
