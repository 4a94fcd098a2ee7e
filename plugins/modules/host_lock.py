#!/usr/bin/python
# Licensed under the Apache License, Version 2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: host_lock
short_description: Keep two provisions, or a provision and an experiment, from changing one host at once
version_added: "0.1.0"
description:
  - Takes or gives back a lock file on the host. Taking a lock that O(owner) holds already renews it.
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
  dead:
    description: An owner who is known to be dead; what it left is taken over. The action plugin of this name sets it.
    type: str
    default: ""
  lasts_seconds:
    description: After this time without a new take the lock no longer counts.
    type: int
    default: 7200
  purpose:
    description:
      - What the host is taken for. A C(provision) is refused while a host program of a campaign works there; an
        C(experiment) is not, since it may be the one that goes on with it, and a C(calibration) asks by itself.
      - A C(removal) is refused there, too, and where runs lie that no controller has fetched whole.
    type: str
    choices: [provision, experiment, calibration, removal]
    default: provision
  results_may_go:
    description: With O(purpose=removal) campaigns at work are no reason to refuse it, nor are runs that nobody fetched.
    type: bool
    default: false
  state_dir:
    description: Where campaigns lie on the host; empty, it is not looked for any.
    type: str
    default: ""
  force:
    description: Take it whoever holds it. A campaign at work is no holder, and is not passed over.
    type: bool
    default: false
  path:
    description:
      - The lock's file. Root's is /run/kvtrial/provision.lock; another user has one in a folder of its own below /tmp,
        which is refused where somebody else made it. Each of them counts for all users of the host.
    type: path
attributes:
  check_mode:
    description: In check mode nothing is written and nothing refused; RV(refusal) says what a run would be refused for.
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
programs:
  description: Host programs at work below O(state_dir), each with its C(campaign) and C(pid).
  returned: with O(state=held)
  type: list
  elements: dict
refusal:
  description: In check mode, why the host could not be taken now; empty where it could.
  returned: with O(state=held)
  type: str
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kvtrial.vllm.plugins.module_utils import host_lock, processes, program_state

PURPOSES = ("provision", "experiment", "calibration", "removal")


def hold(module, boot_id):
    """Take the lock, or fail with a sentence."""
    asked, now = module.params, host_lock.monotonic()
    found = host_lock.read(asked["path"]) or {}
    mine = found.get("owner") == asked["owner"]
    lock = {name: asked[name] for name in ("owner", "by", "purpose")}
    lock.update(boot_id=boot_id, since=found.get("since", now) if mine else now, until=now + asked["lasts_seconds"])

    def may_replace(there):
        owner = there.get("owner", "")
        known = bool(owner) and owner in (asked["owner"], asked["dead"])
        return asked["force"] or known or host_lock.is_over(there, now, boot_id)

    if module.check_mode:
        taken = not found or may_replace(found)
    else:
        taken, found = host_lock.take(asked["path"], lock, may_replace)
    found = found or {}
    refusal = "" if taken else host_lock.refusal(found, now)
    # After the lock was taken, so that of two users who come at once at least one sees the other's; and a host program
    # is started by who holds it.
    others = host_lock.elsewhere(os.geteuid()) if taken and asked["others"] else {}
    for there in others.values():
        if not refusal and not may_replace(there):
            refusal, found = host_lock.refusal(there, now), there
    programs = program_state.running_programs(asked["state_dir"]) if asked["state_dir"] else []
    refusal = refusal or refused_for_campaigns(asked, programs)
    if refusal and not module.check_mode:
        if taken:
            host_lock.give_back(asked["path"], asked["owner"])
        module.fail_json(msg=refusal, lock=found, programs=programs)
    module.exit_json(changed=False, lock=found, programs=programs, refusal=refusal)


def refused_for_campaigns(asked, programs):
    """Why a host with these host programs, and with the runs that lie there, is not taken; empty where it is."""
    if asked["purpose"] == "provision" and programs:
        return host_lock.campaign_refusal(programs)
    if asked["purpose"] == "removal" and asked["state_dir"] and not asked["results_may_go"]:
        return host_lock.removal_refusal(programs, host_lock.unfetched_runs(asked["state_dir"]))
    return ""


def main():
    module = AnsibleModule(
        argument_spec={
            "owner": {"type": "str", "default": ""},
            "by": {"type": "str", "default": ""},
            "state": {"type": "str", "choices": ["held", "free"], "default": "held"},
            "dead": {"type": "str", "default": ""},
            "lasts_seconds": {"type": "int", "default": 7200},
            "purpose": {"type": "str", "choices": list(PURPOSES), "default": "provision"},
            "results_may_go": {"type": "bool", "default": False},
            "state_dir": {"type": "str", "default": ""},
            "force": {"type": "bool", "default": False},
            "path": {"type": "path"},
        },
        supports_check_mode=True,
    )
    module.params["others"] = module.params["path"] is None
    path = module.params["path"] = module.params["path"] or host_lock.default_path(os.geteuid())
    boot_id = processes.read_text("/proc/sys/kernel/random/boot_id", 64).strip()
    try:
        if module.params["state"] == "held":
            hold(module, boot_id)
        found = host_lock.read(path) if module.check_mode else host_lock.give_back(path, module.params["owner"])
    except host_lock.NotOurs as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg="The lock %s can't be written: %s; make that possible, and run again." % (path, error))
    module.exit_json(changed=False, lock=found or {})


if __name__ == "__main__":
    main()
