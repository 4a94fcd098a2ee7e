"""The role calibration: what it says and refuses before an experiment, and how calibrating can fail."""

import json

import pytest

PLAY = """
- hosts: all
  connection: local
  gather_facts: false
  tasks:
    - ansible.builtin.include_role:
        name: kvtrial.vllm.calibration
        tasks_from: {tasks}
"""
CARD = {"calibration": {"calibration_id": "c" * 64}}


@pytest.fixture(name="play")
def _play(tmp_path, tools):
    def play(tasks: str, prints: dict, status: int = 0, error: str = "", options: tuple[str, ...] = (), **variables):
        program = tmp_path / "kvtrial-host"
        asked = f"""echo "$@" >'{tmp_path}/asked'"""
        program.write_text(f"#!/bin/sh\n{asked}\necho '{json.dumps(prints)}'\necho '{error}' >&2\nexit {status}\n")
        program.chmod(0o755)
        (tmp_path / "play.yml").write_text(PLAY.format(tasks=tasks))
        (tmp_path / "calibration.json").write_text(json.dumps(CARD["calibration"]))
        given = {
            "calibration_executable": str(program),
            "calibration_state_dir": str(tmp_path),
            "calibration_cards": str(tmp_path / "cards"),
            "ansible_python_interpreter": "{{ ansible_playbook_python }}",
            **variables,
        }
        settings = json.dumps(given)
        return tools.run("ansible-playbook", *options, "-i", "h1,", str(tmp_path / "play.yml"), "-e", settings)

    return play


WHERE = ["--client-cpus"]
WARNING = "h1: warning: the load client is not calibrated on this host"


def test_without_a_calibration_it_warns_and_goes_on(play, tmp_path):
    done = play("main", {"calibration": None})
    assert done.returncode == 0, done.stdout
    assert WARNING in done.stdout
    assert (tmp_path / "asked").read_text().split() == ["calibration", "--directory", str(tmp_path), *WHERE, "auto"]


def test_without_a_calibration_it_refuses_where_one_is_required(play, tmp_path):
    done = play("main", {"calibration": None}, kvtrial_require_calibration="true", kvtrial_client_cpus=3)
    assert done.returncode != 0
    assert "h1: the load client is not calibrated on this host" in done.stdout.strip().splitlines()[-1]
    assert (tmp_path / "asked").read_text().split()[3:] == [*WHERE, "3"]


def test_with_a_calibration_it_says_nothing(play):
    done = play("main", CARD, kvtrial_require_calibration=True)
    assert done.returncode == 0, done.stdout
    assert "warning" not in done.stdout


def test_a_host_that_cannot_be_calibrated_fails_with_the_sentence(play):
    done = play("calibrate", {}, status=2, error="an engine runs on this host, pid 7 (vllm serve m)")
    assert done.returncode != 0
    assert "h1: an engine runs on this host, pid 7" in done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("again", "told", "said", "expected"),
    [
        (True, "h1:", {"kvtrial_client_cpus": 3}, ["3", "--again"]),
        (False, "h1: calibrated before", {}, ["auto"]),
    ],
)
def test_it_calibrates_where_and_as_asked_shows_the_table_and_fetches_the_card(
    again, told, said, expected, play, tmp_path
):
    prints = {"changed": again, **CARD, "table": ["streams  TTFT error", "      1  0.05 ms"]}
    done = play("calibrate", prints, kvtrial_recalibrate=again, **said)
    assert done.returncode == 0, done.stdout
    assert told in done.stdout
    assert "      1  0.05 ms" in done.stdout
    assert json.loads((tmp_path / "cards" / "h1.json").read_text()) == CARD["calibration"]
    assert (tmp_path / "asked").read_text().split() == ["calibrate", "--directory", str(tmp_path), *WHERE, *expected]


def test_in_check_mode_nothing_is_run(play, tmp_path):
    done = play("calibrate", {"changed": True, **CARD, "table": []}, options=("--check",))
    assert done.returncode == 0, done.stdout
    assert "would be calibrated" in done.stdout
    assert not (tmp_path / "asked").exists()
    assert not (tmp_path / "cards").exists()
