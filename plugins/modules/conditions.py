#!/usr/bin/python
# Licensed under the Apache License, Version 2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: conditions
short_description: Check conditions in order; the first that does not hold fails the host with its sentence
version_added: "0.1.0"
description:
  - What a row of M(ansible.builtin.assert) does, as one task.
  - A sentence is rendered only where its condition does not hold.
options:
  checks:
    description: The conditions, in order.
    type: list
    elements: dict
    required: true
    suboptions:
      that:
        description: An expression, or a list of them, that has to be true.
        type: raw
        required: true
      fail_msg:
        description: The sentence that the host fails with.
        type: str
        required: true
      when:
        description: An expression, or a list of them; where it is false, this condition is not checked.
        type: raw
  once:
    description:
      - Names of variables that are worked out once, before the first check, and not anew in each place that names them.
      - Also for what other variables say by them.
    type: list
    elements: str
    default: []
  fails:
    description: Whether the host fails. Otherwise the sentence is returned, and the host goes on.
    type: bool
    default: true
attributes:
  check_mode:
    description: Checks the same in check mode.
    support: full
  action:
    description: Runs on the controller as an action plugin; nothing is sent to a host.
    support: full
author:
  - kvtrial
"""

EXAMPLES = r"""
- name: Check what the inventory says
  kvtrial.vllm.conditions:
    checks:
      - that: kvtrial_backend in ['cpu', 'cuda']
        fail_msg: "kvtrial_backend={{ kvtrial_backend }} is unknown; set it to cpu or cuda."
      - that: kvtrial_driver_version | length > 0
        when: kvtrial_driver_manage | bool
        fail_msg: kvtrial_driver_version is empty; name the exact version.
"""

RETURN = r"""
assertion:
  description: The condition that does not hold.
  returned: where one does not hold
  type: raw
msg:
  description: Its sentence.
  returned: where one does not hold
  type: str
"""
