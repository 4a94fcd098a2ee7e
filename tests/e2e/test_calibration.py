"""calibrate.yml as a user runs it, and what an experiment then makes of it."""

import json

from conftest import last_line


def test_a_host_is_calibrated_once_and_its_records_carry_the_card(standin_project):
    project = standin_project()
    card_path = project.folder / "state" / "calibration.json"
    refused = project.play("experiment.yml", "-e", "kvtrial_pairs=2", "-e", "kvtrial_require_calibration=true")
    assert refused.returncode != 0
    assert "the load client is not calibrated on this host" in last_line(refused)
    assert not card_path.exists()

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

    done = project.play("experiment.yml", "-e", "kvtrial_pairs=2", "-e", "kvtrial_require_calibration=true")
    assert done.returncode == 0, done.stdout[-3000:]
    records = [json.loads(path.read_text()) for path in project.results.glob("latest/runs/h1/*/record.json")]
    assert records
    for record in records:
        assert record["calibration"] == card
        assert {phase["card"]["calibration_id"] for phase in record["phases"]} == {card["calibration_id"]}
    assert not any("not calibrated" in caveat for caveat in project.verdict()["caveats"])

    # What the project put there it also takes away.
    torn = project.play("playbooks/teardown.yml", "-e", "kvtrial_purge=true", "-e", "workload_venv_root=/nonexistent")
    assert torn.returncode == 0, torn.stdout[-3000:]
    assert not card_path.exists()
