# Licensed under the Apache License, Version 2.0
# ruff: noqa: E402, PTH123
"""Counts what hosts answered, by task, into the file that KVTRIAL_COUNTS names. For tests/bench/fleet.py."""

from __future__ import annotations

DOCUMENTATION = r"""
name: counting
type: aggregate
short_description: Count results by task
description:
  - Writes a JSON mapping of task names to how many results came of each.
"""

import collections
import json
import os

from ansible.plugins.callback import CallbackBase


class CallbackModule(CallbackBase):
    """One number a task."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "counting"

    def __init__(self):
        super().__init__()
        self._counts = collections.Counter()

    def v2_runner_on_ok(self, result):
        task = getattr(result, "task", None) or result._task
        self._counts[task.get_name()] += 1

    def v2_playbook_on_stats(self, stats):
        with open(os.environ["KVTRIAL_COUNTS"], "w", encoding="utf-8") as file:
            json.dump(self._counts, file)
