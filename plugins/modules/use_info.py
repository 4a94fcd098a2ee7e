#!/usr/bin/python
# Licensed under the Apache License, Version 2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: use_info
short_description: Say who uses an installation of this project on a host
version_added: "0.2.0"
description:
  - Names the processes that run from a folder or have files of it mapped, and the campaigns whose host program works.
    Changes nothing.
options:
  path:
    description: The folder of the installation.
    type: path
    required: true
  state_dir:
    description: Where this project keeps its campaigns on the host.
    type: path
    required: true
attributes:
  check_mode:
    description: Runs the same in check mode.
    support: full
author:
  - kvtrial
"""

EXAMPLES = r"""
- name: Look who uses the engine
  kvtrial.vllm.use_info:
    path: /var/lib/kvtrial/venvs/vllm-0.32.0-0123456789ab
    state_dir: /var/lib/kvtrial
  register: use
"""

RETURN = r"""
users:
  description: The processes, each with its C(pid), C(start_ticks) and C(command).
  returned: always
  type: list
  elements: dict
campaigns:
  description: Campaigns at work on the host.
  returned: always
  type: list
  elements: str
words:
  description: Both in words; empty where nobody is at work.
  returned: always
  type: str
  sample: campaign 20260101-a runs here (host program, pid 7)
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kvtrial.vllm.plugins.module_utils import processes, program_state


def words_on(programs, users):
    """Who is at work, for people."""
    words = ["campaign %s runs here (host program, pid %d)" % (one["campaign"], one["pid"]) for one in programs]
    if users:
        pids = ", ".join(str(one["pid"]) for one in users[:5]) + (", and more" if len(users) > 5 else "")
        words.append("process %s uses it" % pids)
    return " and ".join(words)


def main():
    module = AnsibleModule(
        argument_spec={"path": {"type": "path", "required": True}, "state_dir": {"type": "path", "required": True}},
        supports_check_mode=True,
    )
    programs = program_state.running_programs(module.params["state_dir"])
    users = processes.users_of(module.params["path"])
    module.exit_json(
        changed=False,
        users=users,
        campaigns=[one["campaign"] for one in programs],
        words=words_on(programs, users),
    )


if __name__ == "__main__":
    main()
