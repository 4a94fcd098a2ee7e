# Licensed under the Apache License, Version 2.0
"""Filter file_sha256; documented beside."""

from __future__ import annotations

import hashlib

from ansible.errors import AnsibleFilterError


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
        return {"file_sha256": file_sha256}
