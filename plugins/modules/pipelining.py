#!/usr/bin/python
# Licensed under the Apache License, Version 2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: pipelining
short_description: Say whether modules go to the host through the session alone, or as files
version_added: "0.2.0"
description:
  - A module that is sent as a file lies on the host's disk with all its arguments, for as long as it runs and longer
    where the session is cut off. Nothing is asked of the host.
attributes:
  action:
    description: It is done on the controller.
    support: full
  check_mode:
    description: Runs the same in check mode.
    support: full
author:
  - kvtrial
"""

EXAMPLES = r"""
- name: Ask how modules go to the host
  kvtrial.vllm.pipelining:
  register: way
"""

RETURN = r"""
reason:
  description: Why they go as files; empty where they do not.
  returned: always
  type: str
  sample: become_method=su takes modules as files
"""
