#!/usr/bin/python
# Licensed under the Apache License, Version 2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: host_retire
short_description: Remove campaigns of older nights from a host
version_added: "0.1.0"
description:
  - Removes the campaigns that are named, where they hold this project's plan, bear that name, and no host program works
    in them. Everything else stays. One that can't be removed is named in a warning, and is due again the next time.
options:
  state_dir:
    description: Where this project keeps what it has on the host; an absolute path below /.
    type: str
    required: true
  campaigns:
    description: Names of campaigns.
    type: list
    elements: str
    required: true
attributes:
  check_mode:
    description: In check mode it says what would be removed.
    support: full
author:
  - kvtrial
"""

EXAMPLES = r"""
- name: Remove a night that the controller keeps no longer
  kvtrial.vllm.host_retire:
    state_dir: /var/lib/kvtrial
    campaigns: [offload_return-20260901T010000Z]
"""

RETURN = r"""
left:
  description: What could not be removed, with the reason.
  returned: success
  type: list
  elements: str
removed:
  description: What was removed, or would be in check mode.
  returned: success
  type: list
  elements: str
"""

import contextlib
import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kvtrial.vllm.plugins.module_utils import ownership, processes, program_state


def due(state_dir, names):
    """Folders of the campaigns in `names` that this project made here and in which nothing works."""
    folder = os.path.join(state_dir, "campaigns")
    known = set(names)
    busy = {one["campaign"] for one in program_state.running_programs(state_dir)}
    return [
        path
        for path in ownership.made_here(state_dir)
        if os.path.dirname(path) == folder
        and os.path.basename(path) in known - busy
        and (
            processes.read_text(os.path.join(path, "campaign"), 4096).strip() == os.path.basename(path)
            # What a removal that was cut off left.
            or set(os.listdir(path)) <= {"plan.json"}
        )
    ]


def remove(paths):
    """Remove the folders; those that were removed, and a sentence on each that could not be."""
    removed, left = [], []
    for path in paths:
        try:
            ownership.remove_folder(path)
            removed.append(path)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(ownership.note_of(os.path.dirname(os.path.dirname(path)), os.path.basename(path)))
        except OSError as error:
            left.append("%s, of an older night, could not be removed (%s); remove it as its owner." % (path, error))
    return removed, left


def main():
    module = AnsibleModule(
        argument_spec={
            "state_dir": {"type": "str", "required": True},
            "campaigns": {"type": "list", "elements": "str", "required": True},
        },
        supports_check_mode=True,
    )
    state_dir = module.params["state_dir"]
    refusal = ownership.refusal_of(state_dir)
    if refusal:
        module.fail_json(msg=refusal)
    removed, left = due(state_dir, module.params["campaigns"]), []
    if not module.check_mode:
        removed, left = remove(removed)
    for sentence in left:
        module.warn(sentence)
    module.exit_json(changed=bool(removed), removed=removed, left=left)


if __name__ == "__main__":
    main()
