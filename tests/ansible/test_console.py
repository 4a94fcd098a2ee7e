"""The logic of the screen output."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from ansible_collections.kvtrial.vllm.plugins.callback import console

PROGRESS = {"pair": 2, "pairs": 6, "arm": "offload", "phase": "return", "runs_done": 5, "runs_planned": 12}


def test_progress_is_one_line():
    result = {"state": "running", "progress": {**PROGRESS, "seconds_to_go": 250}}
    assert console.progress_line("gpu01", result) == ("gpu01  pair 2/6  offload  return  5/12 runs  about 4 min to go")


def test_what_is_not_known_is_left_out():
    assert console.progress_line("h", {"state": "starting", "progress": {}}) == "h  starting  0/? runs"


def test_an_end_says_why_unless_all_is_well():
    finished = {"state": "finished", "progress": {**PROGRESS, "reason": "all runs are done", "runs_done": 12}}
    assert console.progress_line("h", finished) == "h  finished  12/12 runs"
    stopped = {"state": "stopped", "progress": {**PROGRESS, "reason": "consent was withdrawn"}}
    assert console.progress_line("h", stopped).endswith("consent was withdrawn")
    died = {"state": "running", "died": True, "progress": PROGRESS}
    assert "ended from outside" in console.progress_line("h", died)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, ""), (0, ""), (3, "about 10 s to go"), (44, "about 40 s to go"), (600, "about 10 min to go"),
     (9000, "about 2.5 h to go"), (True, "")],
)  # fmt: skip
def test_time_to_go(seconds, words):
    assert console.time_to_go(seconds) == words


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        ({"msg": "one\n  two"}, "one two"),
        ({"msg": "non-zero return code", "stderr": "noise\nthe reason\n"}, "the reason"),
        ({"msg": "One or more items failed", "results": [{"msg": "fine"}, {"failed": True, "msg": "why"}]}, "why"),
        ({}, "The task failed and said nothing."),
    ],
)
def test_the_sentence_of_a_failure(result, sentence):
    assert console.sentence_of(result) == sentence


PIP = """\
WARNING: Retrying
ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If you have updated the package
    thing==1.0 from file:///w/thing-1.0-py3-none-any.whl (from -r r (line 1)):
        Expected sha256 {a}
        Expected     or {b}
             Got        {c}

"""
"""As pip 24 prints it; its last line is no sentence."""


@pytest.mark.parametrize("several", [True, False])
def test_pips_words_on_another_file_than_the_locked_one_are_a_sentence(several):
    a, b, c = ("0" * 64, "1" * 64, "2" * 64)
    text = PIP.format(a=a, b=b, c=c)
    text = text if several else "\n".join(line for line in text.splitlines() if b not in line)
    said = console.sentence_of({"msg": "non-zero return code", "stderr": text})
    assert f"thing==1.0 has sha256 {c}, the lock says {f'{a} or {b}' if several else a}; nothing of it was" in said
    assert "pip did not name it" in console.sentence_of({"msg": "", "stderr": console.PIP_HASHES})


def test_without_an_answer_the_first_failure_is_the_cause_and_the_others_are_named():
    assert console.last_words([("a", "first", True), ("b", "second", True)], [], True) == (["second"], "first")


def test_a_lost_host_is_named_and_does_not_fail_an_answer():
    lines, cause = console.last_words([("a", "lost", True)], ["BETTER"], True)
    assert lines == ["a did not take part to the end: lost", "BETTER"]
    assert cause == ""


def test_an_answer_of_no_use_ends_with_its_cause():
    failures = [("a", "lost", True), ("b", "gate evicted failed", False)]
    assert console.last_words(failures, ["INVALID"], False)[1] == "gate evicted failed"


def test_what_failed_before_the_last_of_two_answers_does_not_fail_it():
    """A night has two: of its A/A pairs, then of its campaign."""
    shown = console.CallbackModule()
    task = SimpleNamespace(action="kvtrial.vllm.campaign", tags=[], no_log=False)
    shown._failures = [("h1", "lost", True)]
    for verdict in ("aa", "offload"):
        found = {"answer": [verdict], "exit_status": 0, "changed": True}
        with contextlib.suppress(AttributeError, TypeError):  # what Ansible itself would print of so bare a result
            shown.v2_runner_on_ok(SimpleNamespace(task=task, _task=task, result=found, _result=found))
        shown._failures.append(("h2", "failed between them", not shown._answer))
    lines, cause = console.last_words(shown._failures[:-1], shown._answer, True)
    assert lines[-1] == "offload" and cause == ""
    assert "h2 did not take part to the end: failed between them" in lines


def test_nothing_failed_nothing_said():
    assert console.last_words([], [], True) == ([], "")


@pytest.mark.parametrize("prefix", ["", "_"])
def test_results_are_read_with_and_without_the_underscore(prefix):
    result = SimpleNamespace(**{f"{prefix}result": {"a": 1}})
    assert console.part(result, "result") == {"a": 1}


def test_a_lost_host_is_the_last_line_with_how_to_go_on_and_others_have_a_line_each():
    failures = [("h1", "h1 could not be reached: timed out.", True), ("h2", "h2: no disk.", True), ("h2", "x", True)]
    lines, cause = console.last_words(failures, [], True)
    assert lines == ["h2: no disk."]
    assert cause == (
        "h1 could not be reached: timed out; run the same command again when it is back: what is whole stays as it is."
    )
    assert "the other hosts were not held up" in console.last_words(failures[:1], [], True)[1]
    assert console.last_words([("h1", "port taken", True), ("h2", "port taken", True)], [], True) == ([], "port taken")


def test_ctrl_c_says_what_goes_on_and_how_to_choose_otherwise():
    words = console.interrupted_words({"h2", "h1"})
    assert words.startswith("Interrupted; on h1, h2 the host program and its engine go on by themselves")
    for part in ("the same command picks up", "playbooks/teardown.yml", "kvtrial_if_controller_gone=stop"):
        assert part in words
    assert "no host program was started" in console.interrupted_words(set())


def test_a_host_is_at_work_from_its_start_until_its_end_is_seen():
    shown = object.__new__(console.CallbackModule)
    shown._lines, shown._at_work, shown._display = {}, set(), SimpleNamespace(display=lambda line: None)
    shown._show_progress("h", {"state": "running", "progress": PROGRESS})
    assert shown._at_work == {"h"}
    shown._show_progress("h", {"state": "running", "died": True, "progress": PROGRESS})
    assert shown._at_work == set()
    shown._show_progress("h", {"state": "running", "progress": PROGRESS})
    shown._show_progress("h", {"state": "finished", "progress": PROGRESS})
    assert shown._at_work == set()


def test_ctrl_c_has_its_words_in_the_last_line_of_a_playbook(tmp_path, tools):
    begun, cause = tmp_path / "begun", tmp_path / "cause"
    task = {"name": "Wait", "ansible.builtin.command": f"sh -c 'touch {begun}; exec sleep 60'"}
    python = {"ansible_python_interpreter": sys.executable}
    play = [{"hosts": "localhost", "connection": "local", "gather_facts": False, "vars": python, "tasks": [task]}]
    (tmp_path / "play.yml").write_text(json.dumps(play))
    command = [tools.path("ansible-playbook"), "-i", "localhost,", str(tmp_path / "play.yml")]
    settings = tools.environment(KVTRIAL_CAUSE_FILE=str(cause))
    with subprocess.Popen(
        command, env=settings, cwd=tools.root, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    ) as running:  # fmt: skip
        while not begun.exists() and running.poll() is None:
            time.sleep(0.05)
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGINT)
        rest = running.stdout.read().strip().splitlines()
    assert running.returncode not in (0, 2)
    assert rest[-1].startswith("Interrupted; no host program was started by this command yet"), rest
    assert cause.read_text().strip() == rest[-1]
