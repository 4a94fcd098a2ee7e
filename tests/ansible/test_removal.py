"""Removal takes all that a run brought or was bringing, wherever it lies and wherever it is asked for."""

import json

import pytest
from test_ownership import INTERRUPTED, NOT_MARKED, OTHER, OURS, files_in, plant


def test_absent_in_an_inventory_leaves_nothing_of_an_interrupted_run(machine):
    plant(machine.state, OURS | INTERRUPTED)
    for name in ("venvs/elsewhere", "models"):
        (machine.state / name).mkdir(exist_ok=True)
    (machine.state / "models" / ".token").write_text("of an earlier version")
    (machine.state / "venvs" / "elsewhere").rmdir()
    done = machine.play("playbooks/provision.yml", kvtrial_state="absent")
    assert done.returncode == 0, done.stdout
    assert not machine.state.exists(), files_in(machine.state)
    assert "Bring the engine" not in done.stdout and not machine.lock.exists()


def test_what_is_not_the_projects_stays_and_is_named(machine):
    plant(machine.state, INTERRUPTED | NOT_MARKED)
    done = machine.play("playbooks/provision.yml", "-e", "kvtrial_state=absent")
    assert done.returncode == 0, done.stdout
    assert files_in(machine.state) == set(NOT_MARKED)
    assert f"{machine.state}/models/mine" in done.stdout


def test_a_removal_passes_where_the_engines_lock_is_gone(machine):
    """The engine's path follows from its lock; without, what lies below the state directory is known by its mark."""
    plant(machine.state, OURS)
    done = machine.play("playbooks/provision.yml", kvtrial_state="absent", vllm_lock="/none/lock.txt")
    assert done.returncode == 0, done.stdout
    assert not machine.state.exists(), files_in(machine.state)


@pytest.mark.full
def test_an_interrupted_model_outside_the_state_directory_goes_too(machine, tmp_path):
    """The roles' own removal knows where they were told to put things."""
    elsewhere = tmp_path / "elsewhere"
    plant(elsewhere, {f"upload-{OTHER}.partial/config.json": {}, ".token": {}, "mine.txt": {}})
    sha = {"model_source": "upload", "model_upload_sha256": OTHER, "model_upload": "/nonexistent"}
    done = machine.play("playbooks/provision.yml", kvtrial_state="absent", model_root=str(elsewhere), **sha)
    assert done.returncode == 0, done.stdout
    assert files_in(elsewhere) == {"mine.txt"}


def test_check_mode_says_what_would_be_removed_and_leaves_it(machine):
    plant(machine.state, OURS | INTERRUPTED)
    before = files_in(machine.state)
    done = machine.play("playbooks/provision.yml", "--check", kvtrial_state="absent")
    assert done.returncode == 0, done.stdout
    assert files_in(machine.state) == before
    assert "changed=0" not in done.stdout.partition("PLAY RECAP")[2].splitlines()[1]


def test_an_experiment_refuses_hosts_that_are_to_be_removed(machine):
    done = machine.play("experiment.yml", kvtrial_state="absent")
    assert done.returncode != 0
    assert machine.last(done).startswith("h1: kvtrial_state=absent removes what was brought, which playbooks/provision")
    done = machine.play("playbooks/provision.yml", kvtrial_state="gone")
    assert machine.last(done) == "h1: kvtrial_state=gone is unknown; set it to present or absent."


def test_a_local_connection_is_one_by_its_long_name_too(tools):
    """Engines are then started as processes, not as units."""
    for name, supervisor in (("local", "process"), ("ansible.builtin.local", "process"), ("ssh", "systemd")):
        done = tools.run(
            "ansible", "this-machine", "-i", "inventories/local", "-m", "ansible.builtin.debug", "-a",
            "var=kvtrial_supervisor", "-e", json.dumps({"ansible_connection": name}),
        )  # fmt: skip
        assert f"kvtrial_supervisor: {supervisor}" in done.stdout, done.stdout
