#!/usr/bin/python
# Licensed under the Apache License, Version 2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: text_files
short_description: Write or remove small text files together, with a diff
version_added: "0.2.0"
description:
  - Brings files to the given texts, and makes the folders that they lie in. In check mode a file whose folder is not
    there yet has its diff all the same, which M(ansible.builtin.copy) refuses.
  - Each file is whole at any time. A link is followed; nothing that is no file is replaced.
options:
  files:
    description: The files.
    type: list
    elements: dict
    required: true
    suboptions:
      path:
        description: Where it lies.
        type: path
        required: true
      text:
        description: What it holds; without it there is to be no such file.
        type: str
attributes:
  check_mode:
    description: In check mode nothing is written.
    support: full
  diff_mode:
    description: Shows each file before and after.
    support: full
author:
  - kvtrial
"""

EXAMPLES = r"""
- name: Show what would be written
  kvtrial.vllm.text_files:
    files:
      - path: inventories/fleet/group_vars/all/90-adopted.yml
        text: "kvtrial_vllm_version: 0.32.0\n"
  check_mode: true
  diff: true
"""

RETURN = r"""
written:
  description: Paths that were, or would be, written or removed.
  returned: success
  type: list
  elements: str
"""

import io
import os
import tempfile

from ansible.module_utils.basic import AnsibleModule


def read(path):
    """The text of a file, None if there is none. Raises OSError for what is no file, ValueError for what is no text."""
    try:
        with io.open(path, encoding="utf-8", newline="") as file:
            return file.read()
    except FileNotFoundError:
        return None


def write(path, text):
    """Bring a file to a text (None: to nothing), whole at any time."""
    target = os.path.realpath(path)
    if text is None:
        os.unlink(path)
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".kvtrial-")
    try:
        with io.open(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, 0o644)
        os.rename(partial, target)
    except BaseException:
        os.unlink(partial)
        raise


def main():
    module = AnsibleModule(
        argument_spec={
            "files": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {"path": {"type": "path", "required": True}, "text": {"type": "str"}},
            }
        },
        supports_check_mode=True,
    )
    due, path = [], ""
    try:
        for file in module.params["files"]:
            path, text = file["path"], file["text"]
            before = read(path)
            if before != text:
                due.append((path, before, text))
        for path, _, text in [] if module.check_mode else due:
            write(path, text)
    except (OSError, ValueError) as error:
        module.fail_json(msg="%s can't be read or written (%s); make that possible, and run again." % (path, error))
    diff = [
        {"before": before or "", "after": text or "", "before_header": path, "after_header": path}
        for path, before, text in due
    ]
    module.exit_json(changed=bool(due), written=[path for path, _, _ in due], diff=diff)


if __name__ == "__main__":
    main()
