#!/usr/bin/python
# Licensed under the Apache License, Version 2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: observation
short_description: Say what servers that already run show, from what their hosts told
version_added: "0.2.0"
description:
  - Writes what M(kvtrial.vllm.server_info) read of each server into a folder on the controller, asks C(kvtrial observe)
    for each, and puts the answers together.
  - Asks no host.
options:
  first:
    description: By host what M(kvtrial.vllm.server_info) returned at the first look; one without servers was lost.
    type: dict
    required: true
  second:
    description: By host what it returned at the second look.
    type: dict
    required: true
  directory:
    description: Where the files of this observation are kept on the controller.
    type: path
    required: true
attributes:
  check_mode:
    description: Runs the same in check mode; the folder on the controller is its output.
    support: full
author:
  - kvtrial
"""

EXAMPLES = r"""
- name: Say what the servers show
  kvtrial.vllm.observation:
    directory: results/observed-20261129T120000Z
    first: {gpu01: "{{ first }}"}
    second: {gpu01: "{{ second }}"}
  delegate_to: localhost
  run_once: true
"""

RETURN = r"""
answer:
  description: The answer for people, one string a line.
  returned: success
  type: list
  elements: str
servers:
  description: By server (host and port) the class that names its answer.
  returned: success
  type: dict
directory:
  description: Where the files are.
  returned: success
  type: str
exit_status:
  description: 0, or 2 where no server could be read.
  returned: success
  type: int
cause:
  description: Why no server could be read, in one sentence; empty if one was.
  returned: success
  type: str
"""

import importlib
import sys
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule


def main():
    module = AnsibleModule(
        argument_spec={
            "first": {"type": "dict", "required": True},
            "second": {"type": "dict", "required": True},
            "directory": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    try:
        observing = importlib.import_module("kvtrial.analysis.observing")
        errors = importlib.import_module("kvtrial.record.errors")
    except ImportError as error:
        module.fail_json(
            msg="The Python package kvtrial can't be loaded by %s (%s); run make setup, and start the playbook with "
            ".venv/bin/ansible-playbook." % (sys.executable, error)
        )
    try:
        result = observing.observe_fleet(
            module.params["first"], module.params["second"], Path(module.params["directory"])
        )
    except (errors.UnusableInput, OSError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
