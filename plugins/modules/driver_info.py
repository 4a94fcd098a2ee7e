#!/usr/bin/python
# Licensed under the Apache License, Version 2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: driver_info
short_description: Read what an NVIDIA driver's installation depends on, and which driver is there
version_added: "0.2.0"
description:
  - Reads packages, kernel, headers, DKMS, secure boot, the loaded module, nvidia-smi, apt's lock. Changes nothing.
options:
  wait_for_apt_seconds:
    description: How long to wait while another process holds apt's lock; its holder is returned if it still does.
    type: int
    default: 0
  files:
    description: Files whose sha256 is returned.
    type: list
    elements: path
    default: []
  units:
    description: Units of systemd whose state is returned.
    type: list
    elements: str
    default: []
  record:
    description: What an installation left, in JSON.
    type: path
  repository:
    description: C(uri) and C(suite) of a repository; its entries in apt's sources are returned, but for those in C(own)
    type: dict
    default: {}
attributes:
  check_mode:
    description: Runs the same in check mode.
    support: full
author:
  - kvtrial
"""

EXAMPLES = r"""
- name: Read the driver's facts
  kvtrial.vllm.driver_info:
  register: driver
"""

RETURN = r"""
facts:
  description:
    - C(packages) of the driver with their versions, its C(unfinished) packages, all packages of the host that dpkg has
      C(begun) and not ended, those of the driver of which only what was C(configured) is left,
      C(kernels) installed, running C(kernel), C(headers), C(dkms), C(secure_boot),
      C(module_version) that is loaded, C(smi_version) and C(smi_error), C(gpus), C(gpu_processes), C(gpu_unknown) (why
      nobody can say whether a GPU is in use; empty otherwise), C(uvm_node), C(nvswitch), C(os), C(architecture),
      the C(record) (null where there is none), the C(sources) that name the repository, whether dpkg's C(journal) holds
      what an interrupted run of it noted,
      C(systemd) (whether it runs, and may be told anything, which takes root), C(apt_lock), the sha256 of C(files) and
      the state of C(units).
  returned: always
  type: dict
  sample: {module_version: "580.95.05", smi_version: "580.95.05", headers: true, apt_lock: null}
"""

import hashlib
import json
import os
import platform
import time

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kvtrial.vllm.plugins.module_utils import apt_sources, driver_facts, processes

PACKAGE_FORMAT = "${Package}\\t${Version}\\t${db:Status-Status}\\n"


def command(module, *argv):
    """(output, error) of a command; output is "" where it is missing or fails."""
    path = module.get_bin_path(argv[0], opt_dirs=["/usr/sbin", "/sbin"])
    if path is None:
        return "", "%s is not installed" % argv[0]
    status, output, error = module.run_command([path, *argv[1:]])
    return (output, "") if status == 0 else ("", " ".join((error or output).split()) or "status %d" % status)


def gather(module):
    """All facts."""
    kernel = platform.release()
    packages = driver_facts.parse_packages(command(module, "dpkg-query", "-W", "-f", PACKAGE_FORMAT)[0])
    smi, smi_error = command(
        module, "nvidia-smi", "--query-gpu=" + ",".join(driver_facts.GPU_FIELDS), "--format=csv,noheader"
    )
    gpus = driver_facts.parse_gpus(smi)
    busy, busy_error = command(module, "nvidia-smi", "--query-compute-apps=pid,process_name", "--format=csv,noheader")
    loaded = driver_facts.module_version(processes.read_text("/proc/driver/nvidia/version"))
    found, opens = driver_facts.device_users(), driver_facts.module_opens()
    return {
        "packages": packages["driver"],
        "unfinished": packages["unfinished"],
        "begun": packages["begun"],
        "configured": packages["configured"],
        "kernels": packages["kernels"],
        "kernel": kernel,
        "headers": driver_facts.has_headers(kernel),
        "dkms": driver_facts.parse_dkms(command(module, "dkms", "status")[0]),
        "secure_boot": driver_facts.secure_boot(),
        "module_version": loaded,
        "smi_version": gpus[0]["driver_version"] if gpus else None,
        "smi_error": smi_error,
        "gpus": gpus,
        "gpu_processes": driver_facts.busy(driver_facts.parse_processes(busy), found),
        "gpu_unknown": driver_facts.why_unknown(smi_error or busy_error, loaded is not None or opens > 0, found, opens),
        "uvm_node": driver_facts.is_node("/dev/nvidia-uvm"),
        "nvswitch": driver_facts.has_nvswitch(),
        "os": driver_facts.os_release(processes.read_text("/etc/os-release")),
        "architecture": platform.machine(),
        "journal": driver_facts.has_journal(),
        "reboot_required": os.path.exists("/run/reboot-required"),
        "systemd": os.path.isdir("/run/systemd/system") and os.geteuid() == 0,
    }


def states(module, units):
    """{unit: {active, enabled}} as systemd says; empty where nobody asks, or there is no systemd."""
    asked = ["systemctl", "show", "--property=Id,ActiveState,UnitFileState", *units]
    return driver_facts.parse_units(command(module, *asked)[0]) if units else {}


def apt_lock(seconds):
    """apt's lock holder, after waiting for it that long."""
    until = time.monotonic() + seconds
    while True:
        holder = driver_facts.lock_holder()
        if holder is None or time.monotonic() >= until:
            return holder
        time.sleep(1)


def digests(paths):
    """{path: sha256} of those files that can be read."""
    found = {}
    for path in paths:
        try:
            with open(path, "rb") as file:
                found[path] = hashlib.sha256(file.read()).hexdigest()
        except OSError:
            continue
    return found


def read_record(path):
    """The JSON of a file; None where there is none, or it is cut off."""
    try:
        with open(path) as file:
            return json.load(file)
    except (OSError, TypeError, ValueError):
        return None


def main():
    module = AnsibleModule(
        argument_spec={
            "wait_for_apt_seconds": {"type": "int", "default": 0},
            "files": {"type": "list", "elements": "path", "default": []},
            "units": {"type": "list", "elements": "str", "default": []},
            "record": {"type": "path"},
            "repository": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    facts = gather(module)
    facts["apt_lock"] = apt_lock(module.params["wait_for_apt_seconds"])
    facts["files"] = digests(module.params["files"])
    facts["record"] = read_record(module.params["record"])
    asked = module.params["repository"]
    facts["sources"] = (
        apt_sources.others(asked["uri"], asked["suite"], platform.machine(), asked["own"]) if asked else []
    )
    facts["units"] = states(module, module.params["units"])
    module.exit_json(changed=False, facts=facts)


if __name__ == "__main__":
    main()
