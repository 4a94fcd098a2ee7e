# Licensed under the Apache License, Version 2.0
"""Say whether a module goes to the host through the session alone. See plugins/modules/pipelining.py."""

from __future__ import annotations

from ansible import constants
from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    """Asks the connection and its way to become another user, as Ansible does before it sends a module."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        become = self._connection.become
        reason = ""
        if not self._is_pipelining_enabled("new"):
            reason = "pipelining is off"
            if constants.DEFAULT_KEEP_REMOTE_FILES:
                reason = "ANSIBLE_KEEP_REMOTE_FILES is set"
            elif become is not None and not become.pipelining:
                reason = "become_method=%s takes modules as files" % become.name.rpartition(".")[2]
            elif not self._connection.has_pipelining:
                reason = "the connection %s takes modules as files" % self._connection.transport
        result.update(changed=False, reason=reason)
        return result
