#!/usr/bin/python
# Licensed under the Apache License, Version 2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: host_purge
short_description: Remove what this project made on a host, and nothing else
version_added: "0.1.0"
description:
  - Removes installations that hold the project's marker, models with random weights and manifests that it made, wheels,
    the engine's cache, the calibration, and campaigns with a plan. Folders that are empty then go too.
  - Whatever else lies below the directory stays and is named in RV(left).
options:
  state_dir:
    description: Where this project keeps what it has on the host; an absolute path below /.
    type: str
    required: true
attributes:
  check_mode:
    description: In check mode it says what would be removed.
    support: full
author:
  - kvtrial
"""

EXAMPLES = r"""
- name: Remove what the project made
  kvtrial.vllm.host_purge:
    state_dir: /var/lib/kvtrial
"""

RETURN = r"""
removed:
  description: What was removed, or would be in check mode.
  returned: success
  type: list
  elements: str
left:
  description: What is left below the directory.
  returned: success
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kvtrial.vllm.plugins.module_utils import ownership, program_state


def main():
    module = AnsibleModule(
        argument_spec={"state_dir": {"type": "str", "required": True}},
        supports_check_mode=True,
    )
    state_dir = module.params["state_dir"]
    refusal = ownership.refusal_of(state_dir)
    if refusal:
        module.fail_json(msg=refusal)
    running = program_state.running_programs(state_dir)
    if running:
        module.fail_json(msg="A host program still works in %s; stop it first." % running[0]["directory"])
    paths = ownership.made_here(state_dir)
    if not module.check_mode:
        try:
            ownership.remove(state_dir, paths)
        except OSError as error:
            module.fail_json(msg="Not everything of the project could be removed (%s); run again as its owner." % error)
    module.exit_json(changed=bool(paths), removed=paths, left=ownership.left_in(state_dir))


if __name__ == "__main__":
    main()
