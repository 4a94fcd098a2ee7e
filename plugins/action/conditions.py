# Licensed under the Apache License, Version 2.0
"""Check conditions in order, on the controller. Documented in plugins/modules/conditions.py."""

from __future__ import annotations

from ansible.errors import AnsibleActionFail
from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    """One task in place of a row of asserts: each task costs the controller a process a host.

    A sentence is rendered only where its condition fails, when what it names may not be there otherwise.
    """

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True

    @classmethod
    def finalize_task_arg(cls, name, value, templar, context):
        """Leave the checks as they are written; `run` evaluates one after the other."""
        return value if name == "checks" else super().finalize_task_arg(name, value, templar, context)

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        once = self._task.args.get("once") or []
        if missing := [name for name in once if name not in task_vars]:
            raise AnsibleActionFail(f"once names {', '.join(missing)}, and there is no such variable.")
        known = {name: self._templar.template(task_vars[name]) for name in once}
        self._templar.available_variables = {**task_vars, **known}
        for check in self._task.args.get("checks") or []:
            if "when" in check and not self._hold(check["when"]):
                continue
            if not self._hold(check["that"]):
                result.update(failed=boolean(self._task.args.get("fails", True)), assertion=check["that"])
                result.update(changed=False, msg=self._templar.template(check["fail_msg"]))
                return result
        result.update(changed=False)
        return result

    def _hold(self, conditions):
        conditions = conditions if isinstance(conditions, list) else [conditions]
        return all(self._templar.evaluate_conditional(conditional=condition) for condition in conditions)
