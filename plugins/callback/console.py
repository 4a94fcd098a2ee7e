# Licensed under the Apache License, Version 2.0
"""Screen output of the playbooks: Ansible's own, with one line of progress a host, and the answer at the end."""

from __future__ import annotations

DOCUMENTATION = r"""
name: console
type: stdout
short_description: Ansible's output, with progress in lines and the answer at the end
version_added: "0.1.0"
description:
  - Like P(ansible.builtin.default#callback), but a sweep over the host programs prints one line for each host whose
    progress has changed, and nothing else.
  - After the recap comes the campaign's answer. If the playbook fails, the last line is the cause, in one sentence.
  - Interrupted by Ctrl-C, the last line says what goes on by itself and how to pick it up or end it.
extends_documentation_fragment:
  - default_callback
  - result_format_callback
options:
  cause_file:
    description: A file that the cause is written to as well, for whoever starts the playbook.
    type: str
    env:
      - name: KVTRIAL_CAUSE_FILE
    ini:
      - section: callback_console
        key: cause_file
requirements:
  - set as stdout in configuration
"""

import atexit
import os
import re
import signal

from ansible import constants as C
from ansible.plugins.callback.default import CallbackModule as Default

SWEEP_TAG = "sweep"
ANSWERS = ("kvtrial.vllm.campaign", "kvtrial.vllm.adoption", "kvtrial.vllm.observation")
INFO_ACTION = "kvtrial.vllm.host_program_info"
PROGRAM_ACTION = "kvtrial.vllm.host_program"
DEBUG_ACTIONS = ("ansible.builtin.debug", "debug")

AT_WORK = ("starting", "running")

PIP_HASHES = "THESE PACKAGES DO NOT MATCH THE HASHES"

LOST = "could not be reached"
GO_ON = "run the same command again when it is back: %swhat is whole stays as it is."
NOT_HELD_UP = "the other hosts were not held up, and "


def interrupted_words(hosts):
    """What Ctrl-C leaves: `hosts` are those whose host program was at work when last heard of."""
    if not hosts:
        return "Interrupted; no host program was started by this command yet, and the same command picks up."
    return (
        "Interrupted; on %s the host program and its engine go on by themselves, and the same command picks up: "
        "finished runs are kept. playbooks/teardown.yml ends them at once; started with -e "
        "kvtrial_if_controller_gone=stop they end by themselves when nobody has asked for their progress for minutes."
        % ", ".join(sorted(hosts))
    )


def part(result, name):
    """`result.result`, `.task` or `.host`: newer versions of ansible-core have them without the underscore."""
    value = getattr(result, name, None)
    return getattr(result, "_" + name) if value is None else value


def is_sweep(tags):
    """Whether a task belongs to the sweeps, which are shown as lines of progress only."""
    return SWEEP_TAG in (tags or [])


def time_to_go(seconds):
    """ "about 4 min to go" from seconds; empty if it isn't known."""
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or seconds <= 0:
        return ""
    if seconds < 90:
        return "about %d s to go" % (max(1, round(seconds / 10)) * 10)
    if seconds < 90 * 60:
        return "about %d min to go" % round(seconds / 60)
    return "about %.1f h to go" % (seconds / 3600)


def progress_line(host, result):
    """One host's progress in one line, from what host_program_info returned."""
    progress = result.get("progress") or {}
    state = result.get("state", "absent")
    runs = "%s/%s runs" % (progress.get("runs_done", 0), progress.get("runs_planned", "?"))
    if result.get("died"):
        words = [host, "the host program was ended from outside", runs]
    elif state == "running":
        pair, pairs = progress.get("pair"), progress.get("pairs")
        words = [
            host,
            "pair %s/%s" % (pair, pairs) if pair is not None else "",
            progress.get("arm") or "",
            progress.get("phase") or "between two runs",
            runs,
            time_to_go(progress.get("seconds_to_go")),
        ]
    else:
        reason = progress.get("reason") if state != "finished" else ""
        words = [host, state, runs, reason or ""]
    return "  ".join(str(word) for word in words if word)


def other_sha256(stderr):
    """pip's words on files that are not those of a lock, as one sentence. Its last line is a bare hash."""
    found = re.findall(
        r"^ +(\S+) from .*\n +Expected sha256 (\w+(?:\n +Expected +or \w+)*)\n +Got +(\w+)", stderr, re.MULTILINE
    )
    files = [
        "%s has sha256 %s, the lock says %s" % (name, got, " or ".join(re.findall(r"\w{40,}", expected)))
        for name, expected, got in found
    ]
    return (
        "Another file than the locked one came from where pip is configured to look: %s; nothing of it was "
        "installed. See what that index or mirror serves, and change the lock only for a file that you have checked."
        % ("; ".join(files) or "pip did not name it")
    )


def sentence_of(result):
    """Why a task failed, in one line: its message, or the last words of the command that it ran."""
    for item in result.get("results") or []:
        if isinstance(item, dict) and (item.get("failed") or item.get("unreachable")):
            return sentence_of(item)
    message = " ".join(str(result.get("msg") or "").split())
    if message and message not in ("non-zero return code", "MODULE FAILURE"):
        return message
    if PIP_HASHES in str(result.get("stderr") or ""):
        return other_sha256(result["stderr"])
    for name in ("stderr", "module_stderr", "stdout", "module_stdout"):
        lines = [line.strip() for line in str(result.get(name) or "").splitlines() if line.strip()]
        if lines:
            return lines[-1]
    return message or "The task failed and said nothing."


def last_words(failures, answer, concluded):
    """(lines, cause) to end with.

    `failures`: [(host, sentence, was before the answer)] in order. With an answer, hosts that were lost on the way
    are named before it and don't make the playbook fail; `concluded` is whether the answer is of use. The cause is
    empty when the playbook succeeded. Without an answer it is what befell the first host, after a line for each other.
    """
    if not answer:
        return _without_answer(failures)
    lines = ["%s did not take part to the end: %s" % (host, text) for host, text, before in failures if before]
    after = [text for _, text, before in failures if not before]
    cause = "" if concluded and not after else (after[0] if after else "The campaign is of no use.")
    return lines + list(answer), cause


def _without_answer(failures):
    if not failures:
        return [], ""
    first, cause, _ = failures[0]
    if cause.startswith("%s %s" % (first, LOST)):
        alone = all(host == first for host, _, _ in failures)
        cause = "%s; %s" % (cause.rstrip(". "), GO_ON % (NOT_HELD_UP if alone else ""))
    others = {}
    for host, text, _ in failures:
        if host != first and text != failures[0][1]:
            others.setdefault(host, text)
    return list(others.values()), cause


class CallbackModule(Default):
    """Ansible's default output with the sweeps condensed and the answer last."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "stdout"
    CALLBACK_NAME = "kvtrial.vllm.console"

    def __init__(self):
        super().__init__()
        self._lines = {}
        self._failures = []
        self._answer = []
        self._concluded = True
        self._at_work = set()
        self._interrupted = False

    def v2_playbook_on_start(self, playbook):
        # After Ctrl-C no callback is asked any more, and Ansible's own last words come at the very end.
        try:
            before = signal.getsignal(signal.SIGINT)
            if not callable(before):
                return
            main = os.getpid()

            def note(number, frame):
                self._interrupted = True
                return before(number, frame)

            def last_words_of_main():
                if self._interrupted and os.getpid() == main:
                    words = interrupted_words(self._at_work)
                    self._write_cause(words)
                    self._display.display(words, color=C.COLOR_ERROR)

            signal.signal(signal.SIGINT, note)
            atexit.register(last_words_of_main)
        except ValueError:
            # Signals belong to the main thread; whoever runs a playbook in another has Ctrl-C to himself.
            return

    def v2_playbook_on_task_start(self, task, is_conditional):
        if is_sweep(task.tags):
            # The name is kept for a failure's banner; without one, no banner is printed.
            self._task_type_cache[task._uuid] = "TASK"
            self._last_task_name = task.get_name().strip()
            return
        super().v2_playbook_on_task_start(task, is_conditional)

    def v2_playbook_on_include(self, included_file):
        if not is_sweep(getattr(included_file._task, "tags", None)):
            super().v2_playbook_on_include(included_file)

    def v2_runner_on_ok(self, result):
        task, values = part(result, "task"), part(result, "result")
        if task.action in ANSWERS and "answer" in values:
            # A night has an answer for each of its campaigns: what came before the last one is before it.
            self._failures = [(host, sentence, True) for host, sentence, _ in self._failures]
            self._answer = list(values["answer"])
            self._concluded = values.get("exit_status", 0) in (0, 3)
        if task.action == PROGRAM_ACTION:
            self._at_work.add(part(result, "host").get_name())
        if is_sweep(task.tags):
            if task.action == INFO_ACTION:
                self._show_progress(part(result, "host").get_name(), values)
            return
        if task.action in DEBUG_ACTIONS and isinstance(values.get("msg"), list):
            if values["msg"] != self._answer:
                self._show_lines(task, values["msg"])
            return
        super().v2_runner_on_ok(result)

    def v2_runner_item_on_ok(self, result):
        if not is_sweep(part(result, "task").tags):
            super().v2_runner_item_on_ok(result)

    def v2_runner_on_skipped(self, result):
        if not is_sweep(part(result, "task").tags):
            super().v2_runner_on_skipped(result)

    def v2_runner_item_on_skipped(self, result):
        if not is_sweep(part(result, "task").tags):
            super().v2_runner_item_on_skipped(result)

    def v2_runner_on_failed(self, result, ignore_errors=False):
        if not ignore_errors:
            host = part(result, "host").get_name()
            self._failures.append((host, sentence_of(part(result, "result")), not self._answer))
        super().v2_runner_on_failed(result, ignore_errors)

    def v2_runner_on_unreachable(self, result):
        host, task = part(result, "host").get_name(), part(result, "task")
        if is_sweep(task.tags):
            self._show_line(host, "%s  could not be reached, will be asked again" % host)
            return
        if not task.ignore_unreachable:
            sentence = "%s %s: %s" % (host, LOST, sentence_of(part(result, "result")))
            self._failures.append((host, sentence, not self._answer))
        super().v2_runner_on_unreachable(result)

    def v2_playbook_on_stats(self, stats):
        super().v2_playbook_on_stats(stats)
        lines, cause = last_words(self._failures, self._answer, self._concluded)
        for line in lines:
            self._display.display(line)
        if cause:
            self._write_cause(cause)
            self._display.display(cause, color=C.COLOR_ERROR)

    def _show_progress(self, host, values):
        if "state" in values:
            at_work = values["state"] in AT_WORK and not values.get("died")
            (self._at_work.add if at_work else self._at_work.discard)(host)
            self._show_line(host, progress_line(host, values))

    def _show_line(self, host, line):
        if self._lines.get(host) != line:
            self._lines[host] = line
            self._display.display(line)

    def _show_lines(self, task, lines):
        if self._last_task_banner != task._uuid:
            self._print_task_banner(task)
        for line in lines:
            self._display.display(str(line))

    def _write_cause(self, cause):
        path = self.get_option("cause_file")
        if not path:
            return
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(cause + "\n")
        except OSError as error:
            self._display.warning("The cause could not be written to %s: %s" % (path, error))
