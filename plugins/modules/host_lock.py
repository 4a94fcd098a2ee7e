#!/usr/bin/python
# Licensed under the Apache License, Version 2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: host_lock
short_description: Keep two provisions from changing one host at once
version_added: "0.1.0"
description:
  - Takes or gives back a lock file on the host. Taking a lock that O(owner) holds already changes nothing.
  - A lock no longer counts when its holder was a process of this controller that lives no more, when the host was
    booted since, and when it is too old.
options:
  owner:
    description: Who takes it, the same for all tasks of one run of a playbook. The action plugin of this name sets it.
    type: str
    default: ""
  by:
    description: The owner for people, as user, controller and pid. The action plugin of this name sets it.
    type: str
    default: ""
  state:
    description: Whether to take the lock or to give it back.
    type: str
    choices: [held, free]
    default: held
  lasts_seconds:
    description: After this time without a new take the lock no longer counts.
    type: int
    default: 7200
  force:
    description: Take it whoever holds it.
    type: bool
    default: false
  path:
    description: The lock's file. Root's is /run/kvtrial/provision.lock; another user has one of its own below /tmp.
    type: path
attributes:
  check_mode:
    description: In check mode it only says whether it could be taken.
    support: full
author:
  - kvtrial
"""

EXAMPLES = r"""
- name: Take the host
  kvtrial.vllm.host_lock:

- name: Give it back
  kvtrial.vllm.host_lock:
    state: free
"""

RETURN = r"""
lock:
  description: What the lock said before; empty if nobody held it.
  returned: always
  type: dict
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kvtrial.vllm.plugins.module_utils import host_lock, processes


def hold(module, found, boot_id):
    """Take the lock, or fail with a sentence."""
    asked, now = module.params, host_lock.monotonic()
    changed = found is None or found.get("owner") != asked["owner"]
    if found is not None and changed and not (asked["force"] or host_lock.is_over(found, now, boot_id)):
        module.fail_json(msg=host_lock.refusal(found, now), lock=found)
    if module.check_mode:
        module.exit_json(changed=False, lock=found or {})
    if found is not None:
        host_lock.give_back(asked["path"])
    lock = {"owner": asked["owner"], "by": asked["by"], "boot_id": boot_id, "since": now}
    lock["until"] = now + asked["lasts_seconds"]
    if not changed:
        lock["since"] = found.get("since", now)
    if not host_lock.take(asked["path"], lock):
        module.fail_json(msg=host_lock.refusal(host_lock.read(asked["path"]) or {}, now), lock=found or {})
    module.exit_json(changed=False, lock=found or {})


def main():
    module = AnsibleModule(
        argument_spec={
            "owner": {"type": "str", "default": ""},
            "by": {"type": "str", "default": ""},
            "state": {"type": "str", "choices": ["held", "free"], "default": "held"},
            "lasts_seconds": {"type": "int", "default": 7200},
            "force": {"type": "bool", "default": False},
            "path": {"type": "path"},
        },
        supports_check_mode=True,
    )
    path = module.params["path"] = module.params["path"] or host_lock.default_path(os.geteuid())
    boot_id = processes.read_text("/proc/sys/kernel/random/boot_id", 64).strip()
    found = host_lock.read(path)
    try:
        if module.params["state"] == "held":
            hold(module, found, boot_id)
        if not module.check_mode and found is not None and found.get("owner") == module.params["owner"]:
            host_lock.give_back(path)
    except OSError as error:
        module.fail_json(msg="The lock %s can't be written: %s; make that possible, and run again." % (path, error))
    module.exit_json(changed=False, lock=found or {})


if __name__ == "__main__":
    main()
