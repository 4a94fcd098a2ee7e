#!/usr/bin/python
# Licensed under the Apache License, Version 2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: adoption
short_description: Decide what a fleet is to do with a campaign's verdict
version_added: "0.2.0"
description:
  - Reads a campaign's folder on the controller and says whether what it tried is to be adopted, with the texts to
    write.
  - A thin shell over the Python package C(kvtrial). Changes nothing and asks no host.
options:
  campaign:
    description: The campaign's folder, or its verdict.json.
    type: path
    required: true
  fleet:
    description:
      - The hosts that are to adopt it, each with C(vllm_version), C(model_name), C(model_revision), C(gpus),
        C(ram_total_bytes) and C(ram_reserve_bytes).
    type: dict
    required: true
  today:
    description: The day on which it is decided, as 2026-11-29.
    type: str
    required: true
  max_age_days:
    description: Older campaigns are refused.
    type: float
    default: 30
  ttft_max_seconds:
    description: A time to first token that must not be exceeded.
    type: float
  ram_max_bytes:
    description: RAM that must not be exceeded.
    type: int
  without:
    description: Options that the trial set for its own ends, and that are left out.
    type: list
    elements: str
    default: []
  force:
    description: Refusals that are passed over, by name.
    type: list
    elements: str
    default: []
  apply:
    description: Whether the texts are written then; the answer tells.
    type: bool
    default: false
  executable:
    description: The engine's command in production; empty takes the campaign's.
    type: str
    default: ""
  model:
    description: The model's folder in production; empty takes the campaign's.
    type: str
    default: ""
  address:
    description: Where production listens.
    type: str
    default: 127.0.0.1
  port:
    description: The port on which production listens.
    type: int
    default: 8000
attributes:
  check_mode:
    description: Runs the same in check mode.
    support: full
author:
  - kvtrial
"""

EXAMPLES = r"""
- name: Decide
  kvtrial.vllm.adoption:
    campaign: results/latest
    today: "2026-11-29"
    fleet:
      gpu01: {vllm_version: 0.32.0, model_name: my-model, gpus: [NVIDIA H200]}
  delegate_to: localhost
  run_once: true
"""

RETURN = r"""
action:
  description: What to do, one of adopt, keep, more_pairs, mend and refuse.
  returned: success
  type: str
answer:
  description: The decision for people, one string a line.
  returned: success
  type: list
  elements: str
cause:
  description: Why the verdict is of no use here, in one sentence; empty if it is of use.
  returned: success
  type: str
refusals:
  description: Names of what speaks against it, also of what was forced.
  returned: success
  type: list
  elements: str
exit_status:
  description: 0, or 4 where it is of no use.
  returned: success
  type: int
campaign:
  description: Id of the campaign.
  returned: success
  type: str
group_vars:
  description: The text of the pins; empty unless it is to be adopted.
  returned: success
  type: str
unit:
  description: C(name), C(exec_start) and C(environment) of the production unit; empty unless it is to be adopted.
  returned: success
  type: dict
"""

import importlib
import sys
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

OF_THE_UNIT = ("executable", "model", "address", "port")
OF_THE_WISH = ("today", "max_age_days", "ttft_max_seconds", "ram_max_bytes", "without", "force")


def main():
    module = AnsibleModule(
        argument_spec={
            "campaign": {"type": "path", "required": True},
            "fleet": {"type": "dict", "required": True},
            "today": {"type": "str", "required": True},
            "max_age_days": {"type": "float", "default": 30},
            "ttft_max_seconds": {"type": "float"},
            "ram_max_bytes": {"type": "int"},
            "without": {"type": "list", "elements": "str", "default": []},
            "force": {"type": "list", "elements": "str", "default": []},
            "apply": {"type": "bool", "default": False},
            "executable": {"type": "str", "default": ""},
            "model": {"type": "str", "default": ""},
            "address": {"type": "str", "default": "127.0.0.1"},
            "port": {"type": "int", "default": 8000},
        },
        supports_check_mode=True,
    )
    try:
        adopting = importlib.import_module("kvtrial.analysis.adopt")
        errors = importlib.import_module("kvtrial.record.errors")
    except ImportError as error:
        module.fail_json(
            msg="The Python package kvtrial can't be loaded by %s (%s); run make setup, and start the playbook with "
            ".venv/bin/ansible-playbook." % (sys.executable, error)
        )
    asked = module.params
    try:
        result = adopting.adopt(
            Path(asked["campaign"]),
            asked["fleet"],
            {name: asked[name] for name in OF_THE_WISH},
            {name: asked[name] for name in OF_THE_UNIT},
            asked["apply"],
        )
    except errors.UnusableInput as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
