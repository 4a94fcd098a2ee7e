# Licensed under the Apache License, Version 2.0
"""Filters driver_specs and driver_due: a driver's packages against its pin; documented beside."""

from __future__ import annotations

import hashlib
import re

from ansible.errors import AnsibleFilterError
from ansible_collections.kvtrial.vllm.plugins.module_utils.driver_facts import upstream_version


def driver_specs(packages, version):
    """Packages as apt takes them: name=version where one is given, else name=upstream-* of the pin."""
    return [package if "=" in package else "%s=%s-*" % (package, version) for package in packages]


def driver_due(installed, wanted, version):
    """What has to change, in words: wanted packages that are missing or at another version, and installed packages of
    the driver at another version than `version`.

    installed: {name: version}. wanted: what driver_specs gave.
    """
    due = {}
    for spec in wanted:
        name, _, asked = spec.partition("=")
        have = installed.get(name)
        pattern = re.escape(asked).replace(r"\*", ".*")
        if have is None or not re.match(r"^(\d+:)?%s$" % pattern, have):
            due[name] = "%s %s" % (name, have or "missing")
    for name, have in installed.items():
        if name not in due and upstream_version(have) not in (None, version):
            due[name] = "%s %s" % (name, have)
    return [due[name] for name in sorted(due)]


def file_sha256(path):
    """sha256 of a file of the controller. Raises AnsibleFilterError where it can't be read."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                digest.update(block)
    except OSError as error:
        raise AnsibleFilterError(str(error)) from None
    return digest.hexdigest()


class FilterModule:
    """Filters of this collection."""

    def filters(self):
        return {"driver_specs": driver_specs, "driver_due": driver_due, "file_sha256": file_sha256}
