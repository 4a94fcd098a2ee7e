# Licensed under the Apache License, Version 2.0
"""Filter venv_drift: in what an installed virtual environment is another one than its lock's; documented beside."""

from __future__ import annotations

import re

from ansible.errors import AnsibleFilterError

PIN = re.compile(r"(?m)^([A-Za-z0-9][\w.-]*)==[^\s;]+ *(?:; *([^\\\n]*))?")
BROUGHT_BY_VENV = frozenset(("pip", "setuptools", "wheel"))
"""What `python -m venv` puts there by itself, more or less of it by version of Python."""


def _plain(name):
    """A distribution's name as two writings of it compare equal (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked_names(lock, python, architecture):
    """The names that a hash-locked requirements file has for a CPython such as 3.11 on such a Linux."""
    environment = {
        "python_version": python,
        "python_full_version": "%s.0" % python,
        "platform_machine": architecture,
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    try:
        from packaging.markers import Marker
    except ImportError:
        raise AnsibleFilterError("The Python package packaging, which ansible-core needs, can't be loaded.") from None
    return {
        _plain(name)
        for name, condition in PIN.findall(lock)
        if not condition.strip() or Marker(condition.strip()).evaluate(environment)
    }


def venv_drift(host, venv, lock, own=()):
    """Clauses on what differs in a finished environment; none where it is as it was installed, or is not finished.

    host: what roles/vllm/files/probe_host.py said; own: packages that come beside the lock's.
    """
    changed, missing, more = host["drift"], [], []
    if host["marker"] is not None:
        there = {_plain(one.partition("==")[0]) for one in host["packages"]}
        wanted = locked_names(lock, host["python"], host["architecture"]) | set(map(_plain, own))
        missing, more = sorted(wanted - there), sorted(there - wanted - BROUGHT_BY_VENV)
    clauses = []
    if missing:
        clauses.append("%s of the lock %s missing in %s" % (", ".join(missing), _are(missing), venv))
    if more:
        clauses.append("%s %s in %s and not in the lock" % (", ".join(more), _are(more), venv))
    if changed["count"]:
        named = ", ".join(changed["paths"]) + (", and more" if changed["count"] > len(changed["paths"]) else "")
        clauses.append("%d files in %s are not as they were installed: %s" % (changed["count"], venv, named))
    return clauses


def _are(names):
    return "is" if len(names) == 1 else "are"


class FilterModule:
    """Filters of this collection."""

    def filters(self):
        return {"venv_drift": venv_drift}
