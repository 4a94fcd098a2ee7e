#!/usr/bin/python
# Licensed under the Apache License, Version 2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: host_info
short_description: Read what decides whether a campaign can run on a host
version_added: "0.1.0"
description:
  - Reads hardware, memory, free space, GPUs, listening ports and running inference engines. Changes nothing.
  - Command lines of engines are returned without the values of keys and tokens.
options:
  state_dir:
    description: Where this project keeps its campaigns on the host; used to tell its own processes from foreign ones.
    type: path
    required: true
  disk_path:
    description: Where free disk space is measured. The nearest existing parent counts.
    type: path
    required: true
  port:
    description: A TCP port that the engine is to use.
    type: int
    required: true
attributes:
  check_mode:
    description: Runs the same in check mode.
    support: full
author:
  - kvtrial
"""

EXAMPLES = r"""
- name: Read the host's facts
  kvtrial.vllm.host_info:
    state_dir: /var/lib/kvtrial
    disk_path: /var/lib/kvtrial
    port: 18000
  register: host
"""

RETURN = r"""
facts:
  description:
    - What was read. Stable facts say what the host is (C(architecture), C(cpus), C(cpu_model), C(cpu_flags),
      C(ram_total_bytes), C(swap_total_bytes), C(kernel), C(os), C(glibc), C(module_python), C(gpus),
      C(gpu_memory_mib), C(driver_version), C(nvidia), C(rocm), C(xpu)).
    - Volatile ones are named in RV(volatile); a plan must not depend on them.
  returned: always
  type: dict
  sample: {architecture: x86_64, cpus: 2, ram_total_bytes: 16000000000, port_in_use: false}
volatile:
  description: The keys of RV(facts) that change from one minute to the next.
  returned: always
  type: list
  elements: str
"""

import os
import platform

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kvtrial.vllm.plugins.module_utils import driver_facts, host_facts, processes, program_state

VOLATILE = (
    "boot_id",
    "cuda_node",
    "disk_free_bytes",
    "dev_shm_free_bytes",
    "engines",
    "gpu_processes",
    "host_programs",
    "port_in_use",
    "ram_available_bytes",
    "shared_memory_leftovers",
)


def nvidia_smi(module, query, fields):
    """The CSV that nvidia-smi prints for a query; empty where there is no nvidia-smi or it fails."""
    path = module.get_bin_path("nvidia-smi")
    if path is None:
        return ""
    status, output, _ = module.run_command(
        [path, "--query-%s=%s" % (query, ",".join(fields)), "--format=csv,noheader,nounits"]
    )
    return output if status == 0 else ""


def gather(module):
    """All facts of this host."""
    state_dir, read = module.params["state_dir"], processes.read_text
    cpu_model, cpu_flags = host_facts.parse_cpuinfo(read("/proc/cpuinfo"))
    gpus = host_facts.parse_gpus(nvidia_smi(module, "gpu", host_facts.GPU_FIELDS))
    facts = {
        "architecture": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "cpu_model": cpu_model,
        "cpu_flags": cpu_flags,
        "cpu_governor": host_facts.governor(),
        "kernel": platform.release(),
        "os": host_facts.parse_os_release(read("/etc/os-release")),
        "glibc": platform.libc_ver()[1],
        "module_python": platform.python_version(),
        "cuda_node": driver_facts.is_node("/dev/nvidia-uvm"),
        "boot_id": read("/proc/sys/kernel/random/boot_id", 64).strip(),
        "systemd": os.path.isdir("/run/systemd/system"),
        "disk_free_bytes": host_facts.free_bytes(module.params["disk_path"]),
        "dev_shm_free_bytes": host_facts.free_bytes("/dev/shm"),
        "gpus": gpus,
        "gpu_memory_mib": host_facts.smallest_gpu_mebibytes(gpus),
        "driver_version": gpus[0]["driver_version"] if gpus else None,
        "gpu_processes": host_facts.parse_gpu_processes(
            nvidia_smi(module, "compute-apps", ("pid", "used_memory", "gpu_uuid"))
        ),
        "port_in_use": module.params["port"] in processes.listening_ports(),
        "engines": processes.engines(own=host_facts.own_processes(state_dir)),
        "host_programs": program_state.running_programs(state_dir),
        "shared_memory_leftovers": host_facts.shared_memory_leftovers(),
    }
    facts.update(host_facts.memory(host_facts.parse_meminfo(read("/proc/meminfo")), host_facts.cgroup_memory()))
    facts.update(host_facts.accelerators())
    return facts


def main():
    module = AnsibleModule(
        argument_spec={
            "state_dir": {"type": "path", "required": True},
            "disk_path": {"type": "path", "required": True},
            "port": {"type": "int", "required": True},
        },
        supports_check_mode=True,
    )
    module.exit_json(changed=False, facts=gather(module), volatile=list(VOLATILE))


if __name__ == "__main__":
    main()
