#!/usr/bin/python
# Licensed under the Apache License, Version 2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: host_program_info
short_description: Read how far a campaign's host program is
version_added: "0.1.0"
description:
  - Reads the program's progress file, says whether its process is alive, and returns at once.
  - Tells the program that a controller is there by its C(heartbeat) file, which is all that it writes.
options:
  directory:
    description: The campaign's directory on the host.
    type: path
    required: true
  heartbeat:
    description: Whether to tell the program that a controller is there.
    type: bool
    default: true
attributes:
  check_mode:
    description: Runs in check mode, without the heartbeat.
    support: full
author:
  - kvtrial
"""

EXAMPLES = r"""
- name: Ask the host program how far it is
  kvtrial.vllm.host_program_info:
    directory: /var/lib/kvtrial/campaigns/20261129-offload_return
  register: program
"""

RETURN = r"""
state:
  description: The program's state, or V(absent) if it has left no progress file.
  returned: always
  type: str
  sample: running
alive:
  description: Whether the very process that wrote the progress file runs. A zombie doesn't.
  returned: always
  type: bool
over:
  description: Whether the program has ended by itself (V(finished), V(stopped) or V(failed)).
  returned: always
  type: bool
died:
  description: Whether the program was ended from outside before it was done.
  returned: always
  type: bool
progress:
  description: The progress file, with texts cut at 1,000 characters.
  returned: always
  type: dict
  sample: {state: running, pair: 2, pairs: 6, arm: offload, phase: return, runs_done: 3, runs_planned: 12}
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kvtrial.vllm.plugins.module_utils import program_state


def main():
    module = AnsibleModule(
        argument_spec={
            "directory": {"type": "path", "required": True},
            "heartbeat": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    directory = module.params["directory"]
    if module.params["heartbeat"] and not module.check_mode and os.path.isdir(directory):
        try:
            program_state.touch_heartbeat(directory)
        except OSError as error:
            module.warn("The heartbeat could not be written: %s" % error)
    module.exit_json(changed=False, **program_state.describe(program_state.read_progress(directory)))


if __name__ == "__main__":
    main()
