# Licensed under the Apache License, Version 2.0
"""Wait between two sweeps over the hosts, once for the whole batch. Documented in plugins/modules/sweep_pause.py."""

from __future__ import annotations

import time

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

LONGEST_SECONDS = 300.0


def pause_seconds(value):
    """How long to wait. Raises ValueError with a sentence for anything but a number from 0 to 300."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0.0 <= seconds <= LONGEST_SECONDS:
        raise ValueError("seconds=%s: give a number of seconds from 0 to %d." % (value, LONGEST_SECONDS))
    return seconds


class ActionModule(ActionBase):
    """One process sleeps for all hosts: the strategy runs a task with BYPASS_HOST_LOOP once."""

    BYPASS_HOST_LOOP = True
    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        try:
            seconds = pause_seconds(self._task.args.get("seconds"))
        except ValueError as error:
            raise AnsibleActionFail(str(error)) from None
        if not self._task.check_mode:
            time.sleep(seconds)
        return {"changed": False, "monotonic_seconds": time.monotonic()}
