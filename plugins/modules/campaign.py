#!/usr/bin/python
# Licensed under the Apache License, Version 2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: campaign
short_description: Plan a campaign, take in its records and reach a verdict
version_added: "0.1.0"
description:
  - The steps of a campaign that happen on the controller. A thin shell over the Python package C(kvtrial).
  - Runs on the controller only, with the Python that C(kvtrial) is installed in.
  - Unusable input fails with one sentence that names the value, what is allowed and what to do.
options:
  action:
    description:
      - V(validate) checks the request as far as no host has to be asked.
      - V(prepare) plans the campaign, or finds the unfinished one with the same plan, and writes each host's part.
      - V(collect) takes in one host's archive of runs.
      - V(stage) says whether O(hosts) may be started, after what the other hosts gave so far.
      - V(find) finds a campaign in O(directory), for whoever fetches more of it.
      - V(retire) removes campaigns of older nights from the controller, when those in O(landed) came to their end.
      - V(conclude) decides gates, effects and the verdict, and writes the report.
    type: str
    required: true
    choices: [validate, prepare, collect, stage, find, conclude, retire]
  inputs:
    description: The request and the hosts; required with O(action=validate) and O(action=prepare).
    type: dict
  project_dir:
    description: The project's checkout; its commit is recorded.
    type: path
  summaries:
    description: Whether hosts' summaries are written, so that the history needs no records; with O(action=conclude).
    type: bool
    default: false
  since_monotonic_seconds:
    description:
      - What an earlier step returned as RV(monotonic_seconds). With O(action=prepare) the time since then is recorded
        as the time that installation took.
    type: float
  directory:
    description: The campaign's directory; required but with V(validate), V(prepare) and V(retire).
    type: path
  host:
    description: The host that an archive comes from; required with O(action=collect).
    type: str
  hosts:
    description: Hosts that are to be started next; required with O(action=stage).
    type: list
    elements: str
  gone:
    description: Hosts that this command has no more to do with, ended or given up; with O(action=stage).
    type: list
    elements: str
  absent:
    description:
      - Planned hosts that this command did not begin with, as V(prepare) returned them; with O(action=stage) and
        O(action=conclude).
    type: list
    elements: str
  inventory:
    description: All hosts of the inventory; of those lost before only these are kept in mind. With O(action=conclude).
    type: list
    elements: str
  archive:
    description: The archive of one host's runs for O(action=collect); without it only how its program ended counts.
    type: path
  state:
    description: How the host program stood, as M(kvtrial.vllm.host_program_info) returned it; with O(action=collect).
    type: dict
  lost_hosts:
    description: Hosts of the request that were lost before the plan was made; with O(action=conclude).
    type: list
    elements: str
  landed:
    description: Directories of the campaigns of the night that ends; required with O(action=retire).
    type: list
    elements: path
  keep_nights:
    description: How many nights' campaigns are kept; required with O(action=retire).
    type: int
attributes:
  check_mode:
    description: In check mode V(prepare) only says what would be done; V(collect), V(conclude), V(retire) do nothing.
    support: full
author:
  - kvtrial
"""

EXAMPLES = r"""
- name: Check the request
  kvtrial.vllm.campaign:
    action: validate
    inputs:
      protocol: offload_return
      protocols_dir: "{{ playbook_dir }}/protocols"
      results_dir: results
      hosts: {}
  delegate_to: localhost

- name: Reach a verdict
  kvtrial.vllm.campaign:
    action: conclude
    directory: results/latest
  delegate_to: localhost
"""

RETURN = r"""
monotonic_seconds:
  description: The controller's monotonic clock when the step was done.
  returned: success
  type: float
campaign:
  description: Id of the campaign.
  returned: with O(action=prepare) and O(action=find)
  type: str
directory:
  description: The campaign's directory on the controller.
  returned: with O(action=prepare) and O(action=conclude)
  type: str
resumed:
  description: Whether an unfinished campaign with the same plan was found.
  returned: with O(action=prepare)
  type: bool
complete:
  description: Whether nothing is left to run.
  returned: with O(action=prepare)
  type: bool
plan_sha256:
  description: Hash of the plan.
  returned: with O(action=prepare)
  type: str
plans:
  description: For each host the path of its part of the plan on the controller.
  returned: with O(action=prepare)
  type: dict
absent:
  description: Hosts of the campaign that this command does not plan, since they are away or were not asked for.
  returned: with O(action=prepare)
  type: list
  elements: str
traces:
  description:
    - For each host the traces that go beside its plan, each with its C(path) on the controller, its C(file) below the
      campaign's directory on the host, and the C(sha256) of the file.
  returned: with O(action=prepare)
  type: dict
announcement:
  description: What will be done, for people; one string a line.
  returned: with O(action=prepare)
  type: list
  elements: str
go:
  description: Whether the hosts may be started.
  returned: with O(action=stage)
  type: bool
reason:
  description: Why they may not, in one sentence.
  returned: with O(action=stage)
  type: str
retired:
  description: Names of campaigns that were removed now and before, the newest first.
  returned: with O(action=retire)
  type: list
  elements: str
exit_status:
  description: 0 for a verdict, 3 for INCONCLUSIVE, 4 for INVALID, 2 for unusable input.
  returned: with O(action=conclude)
  type: int
verdict:
  description: The verdict.
  returned: with O(action=conclude)
  type: str
answer:
  description: The answer, for people; one string a line.
  returned: with O(action=conclude)
  type: list
  elements: str
cause:
  description: Why the campaign is of no use, in one sentence; empty if it is of use.
  returned: with O(action=conclude)
  type: str
report:
  description: Path of the report.
  returned: with O(action=conclude)
  type: str
"""

import importlib
import sys
import time
import traceback

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kvtrial.vllm.plugins.module_utils import request

ACTIONS = ("validate", "prepare", "collect", "stage", "find", "conclude", "retire")


def load(module):
    """(kvtrial.analysis.campaign, UnusableInput), or fail with what to do."""
    try:
        campaign = importlib.import_module("kvtrial.analysis.campaign")
        errors = importlib.import_module("kvtrial.record.errors")
    except ImportError as error:
        module.fail_json(
            msg="The Python package kvtrial can't be loaded by %s (%s); run make setup, and start the playbook with "
            ".venv/bin/ansible-playbook." % (sys.executable, error)
        )
    return campaign, errors.UnusableInput


def perform(campaign, parameters, check_mode):
    """Do one action; return the module's result. Raises what kvtrial raises, and request.Unusable."""
    action = parameters["action"]
    if action in ("validate", "prepare"):
        inputs = request.normalise(parameters["inputs"])
        inputs["project"] = request.project_state(parameters["project_dir"] or ".")
        if parameters["since_monotonic_seconds"] is not None:
            inputs["install_seconds"] = time.monotonic() - parameters["since_monotonic_seconds"]
        if action == "validate":
            if not check_mode and inputs.get("results_dir"):
                request.refuse_results_dir(inputs["results_dir"])
            campaign.validate(inputs)
            return {"changed": False}
        inputs["dry_run"] = inputs["dry_run"] or check_mode
        result = campaign.prepare(inputs)
        return dict(result, changed=not (inputs["dry_run"] or result.get("resumed", False)))
    if check_mode:
        return {"changed": False}
    if action == "collect":
        state = request.standing(parameters["state"]) if parameters["state"] is not None else None
        taken = campaign.collect(parameters["directory"], parameters["host"], parameters["archive"], state)
        return dict(taken, changed=bool(taken.get("added", True)))
    if action == "stage":
        gone, absent = parameters["gone"] or [], parameters["absent"] or []
        return dict(campaign.next_stage(parameters["directory"], parameters["hosts"], gone, absent), changed=False)
    if action == "find":
        return dict(campaign.find(parameters["directory"]), changed=False)
    if action == "retire":
        retention = importlib.import_module("kvtrial.analysis.retention")
        return {"retired": retention.retire(parameters["landed"], parameters["keep_nights"]), "changed": True}
    since = parameters["since_monotonic_seconds"]
    passed = None if since is None else time.monotonic() - since
    named = ("lost_hosts", "absent", "inventory")
    given = {name: sorted(parameters[name]) for name in named if parameters[name] is not None}
    given["summaries"] = bool(parameters["summaries"])
    return dict(campaign.conclude(parameters["directory"], passed, **given), changed=True)


def main():
    module = AnsibleModule(
        argument_spec={
            "action": {"type": "str", "required": True, "choices": list(ACTIONS)},
            "inputs": {"type": "dict"},
            "project_dir": {"type": "path"},
            "directory": {"type": "path"},
            "host": {"type": "str"},
            "archive": {"type": "path"},
            "state": {"type": "dict"},
            "hosts": {"type": "list", "elements": "str"},
            "gone": {"type": "list", "elements": "str"},
            "absent": {"type": "list", "elements": "str"},
            "inventory": {"type": "list", "elements": "str"},
            "lost_hosts": {"type": "list", "elements": "str"},
            "summaries": {"type": "bool", "default": False},
            "since_monotonic_seconds": {"type": "float"},
            "landed": {"type": "list", "elements": "path"},
            "keep_nights": {"type": "int"},
        },
        required_if=[
            ("action", "validate", ["inputs"]),
            ("action", "prepare", ["inputs"]),
            ("action", "collect", ["directory", "host"]),
            ("action", "stage", ["directory", "hosts"]),
            ("action", "find", ["directory"]),
            ("action", "conclude", ["directory"]),
            ("action", "retire", ["landed", "keep_nights"]),
        ],
        supports_check_mode=True,
    )
    campaign, unusable_input = load(module)
    try:
        result = perform(campaign, module.params, module.check_mode)
    except (unusable_input, request.Unusable) as error:
        module.fail_json(msg=str(error), unusable_input=True)
    except OSError as error:
        module.fail_json(msg="%s of the campaign failed: %s." % (module.params["action"].capitalize(), error))
    except Exception as error:
        # The last net: a user never sees a traceback, a developer finds it in -vvv.
        module.fail_json(
            msg="%s of the campaign failed by a fault in kvtrial (%s: %s); run again with -vvv for its origin."
            % (module.params["action"].capitalize(), type(error).__name__, error),
            origin=traceback.format_exc().splitlines(),
        )
    module.exit_json(monotonic_seconds=time.monotonic(), **result)


if __name__ == "__main__":
    main()
