# Licensed under the Apache License, Version 2.0

from __future__ import annotations

DOCUMENTATION = r"""
name: command
short_description: The command line of this run of Ansible, without secrets
version_added: "0.1.0"
description:
  - The words with which this playbook was started, for whoever does it again; what looks like a secret says REDACTED.
  - Paths inside the project are relative to its root, where the command is to be given.
options:
  _terms:
    description: The project's root.
    required: true
author:
  - kvtrial
"""

EXAMPLES = r"""
- name: Say how this was started
  ansible.builtin.debug:
    msg: "{{ lookup('kvtrial.vllm.command', kvtrial_root, wantlist=True) }}"
"""

RETURN = r"""
_raw:
  description: The words of the command; none where C(kvtrial) can't be loaded.
  type: list
  elements: str
"""

import sys

from ansible.plugins.lookup import LookupBase

try:
    from kvtrial.analysis.commandline import portable
except ImportError:
    # Whatever needs kvtrial says so in a sentence of its own.
    portable = None


class LookupModule(LookupBase):
    def run(self, terms, variables=None, **kwargs):
        self.set_options(var_options=variables, direct=kwargs)
        return portable(sys.argv, terms[0]) if portable else []
