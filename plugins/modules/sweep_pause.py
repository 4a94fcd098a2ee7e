#!/usr/bin/python
# Licensed under the Apache License, Version 2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: sweep_pause
short_description: Wait between two sweeps over the hosts
version_added: "0.1.0"
description:
  - Waits on the controller, once for all hosts of the batch, without output.
  - M(ansible.builtin.pause) would print a line each time, and answer an interrupt with a question.
options:
  seconds:
    description: How long to wait; at most 300.
    type: float
    required: true
attributes:
  check_mode:
    description: Doesn't wait in check mode.
    support: full
  action:
    description: Runs on the controller as an action plugin; nothing is sent to a host.
    support: full
  bypass_host_loop:
    description: Runs once for all hosts.
    support: full
author:
  - kvtrial
"""

EXAMPLES = r"""
- name: Wait for the next sweep
  kvtrial.vllm.sweep_pause:
    seconds: 10
"""

RETURN = r"""
monotonic_seconds:
  description: The controller's monotonic clock afterwards.
  returned: success
  type: float
"""
