# Licensed under the Apache License, Version 2.0
"""Filter engine_units; documented in engine_units.yml."""

from __future__ import annotations

from ansible.errors import AnsibleFilterError

OF_ROOT = {"owner": "root", "group": "root", "mode": "0644"}


def engine_units(plan):
    """{drop_ins: [{path, text, owner, group, mode}], sudo_rule} of a host's plan, given as text or as a mapping."""
    try:
        import msgspec
        from kvtrial.host import units
        from kvtrial.record.errors import UnusableInput
        from kvtrial.record.plan import HostPlan
    except ImportError as error:
        raise AnsibleFilterError(
            "The Python package kvtrial can't be loaded (%s); run make setup, and start the playbook with "
            ".venv/bin/ansible-playbook." % error
        ) from None
    try:
        host_plan = (
            msgspec.convert(plan, HostPlan) if isinstance(plan, dict) else msgspec.json.decode(plan, type=HostPlan)
        )
        arms = sorted(host_plan.launches)
        drop_ins = [
            {"path": str(units.drop_in_path(arm)), "text": units.drop_in(host_plan, arm), **OF_ROOT} for arm in arms
        ]
        return {"drop_ins": drop_ins, "sudo_rule": units.sudo_rule(arms)}
    except UnusableInput as error:
        raise AnsibleFilterError(str(error)) from None
    except (msgspec.DecodeError, TypeError) as error:
        raise AnsibleFilterError("engine_units: this is not a host's part of a plan: %s" % error) from None


class FilterModule:
    """Filters of this collection."""

    def filters(self):
        return {"engine_units": engine_units}
