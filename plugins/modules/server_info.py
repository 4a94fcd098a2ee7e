#!/usr/bin/python
# Licensed under the Apache License, Version 2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: server_info
short_description: Read what the vLLM servers of a host tell
version_added: "0.2.0"
description:
  - Finds API servers by their command lines, reads their C(/metrics), C(/version) and C(/v1/models), their argv, unit,
    log, sockets and limits, and the host's memory and GPUs.
  - Changes nothing, sends no request to a model, and no key is asked for or used. Values of keys and tokens are
    replaced before anything leaves the host.
  - Without root it reads what it may; what it may not is left out.
options:
  ports:
    description: Only servers on these ports; a port on which no server was found is asked all the same.
    type: list
    elements: int
    default: []
  log:
    description: The file of the server's log, where neither journal nor standard output is it; for one server a host.
    type: path
  log_lines:
    description: Lines of the journal's end that are read; of a file as many times 200 bytes.
    type: int
    default: 5000
  again:
    description: What an earlier read returned as RV(again); pages and logs of these servers are then read, no more.
    type: list
    elements: dict
attributes:
  check_mode:
    description: Runs the same in check mode.
    support: full
author:
  - kvtrial
"""

EXAMPLES = r"""
- name: Read the servers
  kvtrial.vllm.server_info:
  register: first

- name: Read them again
  kvtrial.vllm.server_info:
    again: "{{ first.again }}"
"""

RETURN = r"""
servers:
  description:
    - Each server with C(port), C(page) and, on the first read, its C(facts); on the second its C(log) and C(alive).
    - The page's C(text) is packed (zlib, base64); its C(monotonic_seconds) is the host's clock.
  returned: success
  type: list
  elements: dict
again:
  description: What a second read has to be told of each server.
  returned: on the first read
  type: list
  elements: dict
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kvtrial.vllm.plugins.module_utils import host_facts, processes, servers

KERNEL = "Out of memory|oom-kill|Killed process|NVRM: Xid"
BYTES_A_LINE = 200


def run(module, *command):
    """What a command prints, None where it isn't there or fails."""
    path = module.get_bin_path(command[0])
    if path is None:
        return None
    status, output, _ = module.run_command([path, *command[1:]], errors="surrogate_then_replace")
    return output if status == 0 else None


def nvidia_smi(module, query, fields):
    """The CSV that nvidia-smi prints for a query; empty where there is no nvidia-smi or it fails."""
    command = ("nvidia-smi", "--query-%s=%s" % (query, ",".join(fields)), "--format=csv,noheader,nounits")
    return run(module, *command) or ""


def of_host(module):
    """What all servers of the host share."""
    gpus = host_facts.parse_gpus(nvidia_smi(module, "gpu", host_facts.GPU_FIELDS))
    on_gpus = nvidia_smi(module, "compute-apps", ("pid", "used_memory", "gpu_uuid"))
    found = servers.shm_files()
    if found:
        mapped = processes.mapped_files("/dev/shm") if os.geteuid() == 0 else None
        found = servers.shm_files(mapped=mapped)
    kernel = run(module, "journalctl", "-k", "-q", "--no-pager", "-o", "short-iso", "-n", "20", "-g", KERNEL)
    memory = host_facts.memory(host_facts.parse_meminfo(processes.read_text("/proc/meminfo")))
    return {
        "gpus": gpus,
        "gpu_processes": host_facts.parse_gpu_processes(on_gpus),
        "driver_version": gpus[0]["driver_version"] if gpus else None,
        "shm_files": found,
        "kernel_lines": [servers.redacted_text(line) for line in (kernel or "").splitlines()],
        "ram_total_bytes": memory["ram_total_bytes"],
        "ram_available_bytes": memory["ram_available_bytes"],
    }


def facts_of(module, server, host):
    """One server's facts, by the names that kvtrial observe --host takes."""
    pid, tree = server["pid"], server["tree"]
    unit, limits, shm = servers.unit_of(pid), servers.cgroup_memory(pid), servers.shared_memory(pid)
    text = run(module, "systemctl", "cat", "--no-pager", unit) if unit else None
    return {
        "unit_name": unit,
        "unit": servers.redacted_text(text) if text else None,
        "argv": servers.redacted_argv(server["argv"]),
        "env": servers.environment_of(pid),
        "driver_version": host["driver_version"],
        "gpus": servers.gpus_seen(host["gpus"], host["gpu_processes"], tree),
        "ram_total_bytes": host["ram_total_bytes"],
        "ram_available_bytes": host["ram_available_bytes"],
        "dev_shm_total_bytes": shm["total_bytes"],
        "dev_shm_free_bytes": shm["free_bytes"],
        "shm_files": host["shm_files"],
        "cgroup_limit_bytes": limits["limit_bytes"],
        "cgroup_used_bytes": limits["used_bytes"],
        "cgroup_oom_kills": limits["oom_kills"],
        "listening": servers.listening(tree),
        "kernel_lines": host["kernel_lines"],
    }


def first(module):
    """Find the servers and read everything but their logs."""
    wanted, host = module.params["ports"], of_host(module)
    found, again = [], []
    for server in servers.find_servers():
        address = servers.address_of(server["argv"])
        port = address["port"] if address else None
        if wanted and port not in wanted:
            continue
        facts = facts_of(module, server, host)
        found.append(asked(port, address, facts))
        again.append({"pid": server["pid"], "start_ticks": server["start_ticks"], "port": port, "address": address,
                      "unit": facts["unit_name"], "log": servers.log_file_of(server["pid"])})  # fmt: skip
    for port in sorted(set(wanted) - {server["port"] for server in found}):
        address = {"scheme": "http", "host": "127.0.0.1", "port": port}
        server = {"pid": 0, "tree": [], "argv": []}
        shared = dict(facts_of(module, server, host), listening=[])
        found.append(asked(port, address, shared))
        again.append({"pid": None, "start_ticks": None, "port": port, "address": address, "unit": None, "log": None})
    module.exit_json(changed=False, servers=found, again=again)


def asked(port, address, facts):
    """A server with what it says itself."""
    if address is None:
        page = {"text": None, "bytes": 0, "monotonic_seconds": 0.0, "status": None,
                "error": "it listens on a Unix socket, which is not read"}  # fmt: skip
        return {"port": port, "page": page, "facts": facts, "models": None}
    page = servers.page(address)
    version, models = servers.said(address, "/version"), servers.said(address, "/v1/models")
    facts["vllm_version"] = version.get("version") if isinstance(version, dict) else None
    named = models.get("data") if isinstance(models, dict) else None
    return {
        "port": port,
        "page": page,
        "facts": facts,
        "models": [model.get("id") for model in named] if isinstance(named, list) else None,
        "models_status": models.get("status") if isinstance(models, dict) else None,
    }


def second(module):
    """Read pages and logs of servers that are known."""
    found = []
    for server in module.params["again"]:
        pid, ticks = server.get("pid"), server.get("start_ticks")
        page = servers.page(server["address"]) if server.get("address") else None
        found.append(
            {
                "port": server.get("port"),
                "page": page,
                "log": log_of(module, server),
                "alive": None if pid is None else processes.is_alive(int(pid), int(ticks)),
            }
        )
    module.exit_json(changed=False, servers=found)


def log_of(module, server):
    """{source, text} of a server's log, packed; None where there is none to read."""
    path, lines = module.params["log"] or server.get("log"), module.params["log_lines"]
    text, source = None, None
    if server.get("unit") and not module.params["log"]:
        unit = server["unit"]
        text = run(module, "journalctl", "-q", "--no-pager", "-o", "cat", "-n", str(lines), "-u", unit)
        source = "journal of %s" % unit
    # A unit may send its output to a file, and its journal then holds only what systemd says.
    if path and (text is None or len(text.splitlines()) < 20):
        of_file = servers.tail(path, lines * BYTES_A_LINE)
        if of_file is not None and len(of_file) > len(text or ""):
            text, source = of_file, path
    if not text:
        return None
    return {"source": source, "text": servers.pack(servers.redacted_text(text).encode("utf-8"))}


def main():
    module = AnsibleModule(
        argument_spec={
            "ports": {"type": "list", "elements": "int", "default": []},
            "log": {"type": "path"},
            "log_lines": {"type": "int", "default": 5000},
            "again": {"type": "list", "elements": "dict"},
        },
        supports_check_mode=True,
    )
    (first if module.params["again"] is None else second)(module)


if __name__ == "__main__":
    main()
