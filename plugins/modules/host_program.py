#!/usr/bin/python
# Licensed under the Apache License, Version 2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: host_program
short_description: Start, stop or pack a campaign's host program
version_added: "0.1.0"
description:
  - Calls C(kvtrial-host), which does the work. Starting a program that runs already changes nothing.
  - Stopping ends the program and the engine that it started, and nothing else. It fails if something of them is left.
options:
  executable:
    description:
      - Path of C(kvtrial-host) on the host; required unless O(state=stopped).
      - Without it a program is stopped by its pid and start time alone, also if its installation is gone.
    type: path
  directory:
    description: The campaign's directory on the host, which holds its C(plan.json).
    type: path
    required: true
  state:
    description:
      - V(started) starts the program if it doesn't run.
      - V(stopped) ends it if it runs.
      - V(packed) writes the finished runs and their digests to O(archive).
    type: str
    choices: [started, stopped, packed]
    default: started
  archive:
    description: Where the archive is written; required with O(state=packed).
    type: path
  parts:
    description:
      - With O(state=packed) V(full) packs every file of a run, V(summary) the record and its digest alone, compressed.
    type: str
    choices: [summary, full]
    default: full
attributes:
  check_mode:
    description: In check mode it says whether the program would be started or stopped.
    support: full
author:
  - kvtrial
"""

EXAMPLES = r"""
- name: Start the host program
  kvtrial.vllm.host_program:
    executable: /opt/kvtrial/bin/kvtrial-host
    directory: /var/lib/kvtrial/campaigns/20261129-offload_return

- name: Stop the host program
  kvtrial.vllm.host_program:
    executable: /opt/kvtrial/bin/kvtrial-host
    directory: /var/lib/kvtrial/campaigns/20261129-offload_return
    state: stopped
"""

RETURN = r"""
stopped:
  description: Processes that were ended, with O(state=stopped).
  returned: with O(state=stopped)
  type: list
  elements: dict
reply:
  description: What C(kvtrial-host) printed.
  returned: when it was called
  type: dict
"""

import json
import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kvtrial.vllm.plugins.module_utils import program_state

COMMANDS = {"started": "start", "stopped": "stop", "packed": "pack"}


def parse_reply(output):
    """The last line of the output that is a JSON object; {} if there is none."""
    for line in reversed(output.splitlines()):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    return {}


def cause_of(status, output, errors):
    """Why a call of kvtrial-host failed: its last words."""
    lines = [line.strip() for line in (errors + "\n" + output).splitlines() if line.strip()]
    return lines[-1] if lines else "kvtrial-host ended with status %d and said nothing." % status


def stop(module, directory):
    """End what the campaign in `directory` runs, and leave the module; fail if something of it is still there."""
    before = program_state.own_processes(directory)
    reply = {}
    if module.params["executable"] is not None:
        # It also tidies up after an engine. What it can't end, or not without its packages, is ended below.
        command = [module.params["executable"], "stop", "--directory", directory]
        try:
            _, output, _ = module.run_command(command, handle_exceptions=False)
            reply = parse_reply(output)
        except OSError:
            pass
    left = program_state.end(directory)
    if left:
        words = ", ".join("pid %d (%s)" % (one["pid"], one["command"]) for one in left)
        module.fail_json(
            msg="What the campaign in %s started still runs: %s; end it yourself, or run again as its owner."
            % (directory, words)
        )
    module.exit_json(changed=bool(before), reply=reply, stopped=before)


def main():
    module = AnsibleModule(
        argument_spec={
            "executable": {"type": "path"},
            "directory": {"type": "path", "required": True},
            "state": {"type": "str", "choices": sorted(COMMANDS), "default": "started"},
            "archive": {"type": "path"},
            "parts": {"type": "str", "choices": ["summary", "full"], "default": "full"},
        },
        required_if=[("state", "packed", ["archive", "executable"]), ("state", "started", ["executable"])],
        supports_check_mode=True,
    )
    state, directory = module.params["state"], module.params["directory"]
    alive = program_state.describe(program_state.read_progress(directory))["alive"]
    if module.check_mode:
        module.exit_json(changed=state == "packed" or alive != (state == "started"))
    if state == "stopped":
        stop(module, directory)
    command = [module.params["executable"], COMMANDS[state], "--directory", directory]
    if state == "packed":
        command += ["--output", module.params["archive"], "--parts", module.params["parts"]]
    # A controller is here: a program that is started again must not find the word of a visit of hours ago.
    if os.path.isdir(directory):
        try:
            program_state.touch_heartbeat(directory)
        except OSError as error:
            module.warn("The heartbeat could not be written: %s" % error)
    status, output, errors = module.run_command(command, handle_exceptions=False)
    if status != 0:
        module.fail_json(msg=cause_of(status, output, errors), rc=status, command=command)
    reply = parse_reply(output)
    changed = bool(reply.get("started", not alive)) if state == "started" else True
    module.exit_json(changed=changed, reply=reply)


if __name__ == "__main__":
    main()
