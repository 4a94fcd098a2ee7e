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
    def play(tasks: str, prints: dict, status: int = 0, error: str = "", before: str = "", **variables):
        program = tmp_path / "kvtrial-host"
        program.write_text(f"#!/bin/sh\n{before}\necho '{json.dumps(prints)}'\necho '{error}' >&2\nexit {status}\n")
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
        return tools.run("ansible-playbook", "-i", "h1,", str(tmp_path / "play.yml"), "-e", settings)

    return play


WARNING = "h1: warning: the load client is not calibrated on this host"


def test_without_a_calibration_it_warns_and_goes_on(play):
    done = play("main", {"calibration": None})
    assert done.returncode == 0, done.stdout
    assert WARNING in done.stdout


def test_without_a_calibration_it_refuses_where_one_is_required(play):
    done = play("main", {"calibration": None}, kvtrial_require_calibration="true")
    assert done.returncode != 0
    assert "h1: the load client is not calibrated on this host" in done.stdout.strip().splitlines()[-1]


def test_with_a_calibration_it_says_nothing(play):
    done = play("main", CARD, kvtrial_require_calibration=True)
    assert done.returncode == 0, done.stdout
    assert "warning" not in done.stdout


def test_a_host_that_cannot_be_calibrated_fails_with_the_sentence(play):
    done = play("calibrate", {}, status=2, error="an engine runs on this host, pid 7 (vllm serve m)")
    assert done.returncode != 0
    assert "h1: an engine runs on this host, pid 7" in done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize(("changed", "told"), [(True, "h1:"), (False, "h1: calibrated before")])
def test_the_table_is_shown_and_the_card_fetched(changed, told, play, tmp_path):
    done = play("calibrate", {"changed": changed, **CARD, "table": ["streams  TTFT error", "      1  0.05 ms"]})
    assert done.returncode == 0, done.stdout
    assert told in done.stdout
    assert "      1  0.05 ms" in done.stdout
    assert json.loads((tmp_path / "cards" / "h1.json").read_text()) == CARD["calibration"]


def test_in_check_mode_nothing_is_run(play, tmp_path, tools):
    play("calibrate", {"changed": True, **CARD, "table": []})
    (tmp_path / "kvtrial-host").unlink()
    done = tools.run("ansible-playbook", "--check", "-i", "h1,", str(tmp_path / "play.yml"), "-e",
                     json.dumps({"calibration_executable": str(tmp_path / "kvtrial-host"),
                                 "calibration_state_dir": str(tmp_path), "calibration_cards": str(tmp_path / "cards"),
                                 "ansible_python_interpreter": "{{ ansible_playbook_python }}"}))  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "would be calibrated" in done.stdout


@pytest.mark.parametrize("again", [True, False])
def test_it_calibrates_again_only_when_asked(again, play, tmp_path):
    program = 'echo "$@" >"$(dirname "$0")/asked"'
    play("calibrate", {}, status=2, before=program, kvtrial_recalibrate=again)
    asked = (tmp_path / "asked").read_text().split()
    assert asked == ["calibrate", "--directory", str(tmp_path), *(["--again"] if again else [])]
