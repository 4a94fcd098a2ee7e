# Licensed under the Apache License, Version 2.0
"""Take or give back a host's lock in the name of this run of ansible-playbook. See plugins/modules/host_lock.py."""

from __future__ import annotations

import getpass
import os
import socket

from ansible.plugins.action import ActionBase
from ansible_collections.kvtrial.vllm.plugins.module_utils import processes


def controller():
    """What tells this controller's pids from another's: its machine and its start."""
    machine = processes.read_text("/etc/machine-id", 64).strip()
    return "%s/%s/%s" % (
        socket.gethostname(),
        machine,
        processes.read_text("/proc/sys/kernel/random/boot_id", 64).strip(),
    )


def owner_of(pid):
    """A process of this controller as the owner of locks."""
    stat = processes.read_stat(pid) or {"start_ticks": 0}
    return "%s:%d:%d" % (controller(), pid, stat["start_ticks"])


def is_dead(owner):
    """Whether an owner was a process of this controller that lives no more. False where that can't be known."""
    name, _, rest = owner.partition(":")
    numbers = rest.split(":")
    if name != controller() or len(numbers) != 2 or not all(number.isdigit() for number in numbers):
        return False
    return not processes.is_alive(int(numbers[0]), int(numbers[1]))


class ActionModule(ActionBase):
    """Runs in a worker, whose parent is ansible-playbook: that one owns the lock."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        pid = os.getppid()
        arguments = dict(self._task.args, owner=owner_of(pid))
        arguments["by"] = "%s on %s (pid %d)" % (getpass.getuser(), socket.gethostname(), pid)
        result = self._execute_module("kvtrial.vllm.host_lock", arguments, task_vars=task_vars)
        owner = (result.get("lock") or {}).get("owner", "")
        if (result.get("failed") or result.get("refusal")) and is_dead(owner):
            # Not by force: another one of this controller may have seen so, too, and been quicker.
            arguments["dead"] = owner
            result = self._execute_module("kvtrial.vllm.host_lock", arguments, task_vars=task_vars)
        if result.get("failed") and "msg" in result:
            result["msg"] = "%s: %s" % (task_vars["inventory_hostname"], result["msg"])
        return result
