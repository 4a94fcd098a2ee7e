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
  - Root does it as the owner of the folder, who may have put a link there.
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
      owner:
        description: Whom it belongs to; not set, as it is, or whoever writes it.
        type: str
      group:
        description: Its group; not set, as it is, or of whoever writes it.
        type: str
      mode:
        description: Its mode, an octal number as a text; not set, C(0644) where it is written.
        type: str
      validate:
        description: A command that must accept the text in a file in place of C(%s) before it takes its place.
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
from ansible_collections.kvtrial.vllm.plugins.module_utils import ownership


def read(path):
    """The text of a file, None if there is none. Raises OSError for what is no file, ValueError for what is no text."""
    try:
        with io.open(path, encoding="utf-8", newline="") as file:
            return file.read()
    except FileNotFoundError:
        return None


def make_folders(folder):
    """Make a folder and those that it lies in, open to all that read, whatever the umask is."""
    if not os.path.isdir(folder):
        make_folders(os.path.dirname(folder))
        os.mkdir(folder)
        os.chmod(folder, 0o755)


class Refused(Exception):
    """What checks a text did not accept it."""


def write(path, text, accept=lambda partial: None, settle=lambda partial: os.chmod(partial, 0o644)):
    """Bring a file to a text (None: to nothing), whole at any time, with its owner and mode from the first moment.

    `accept` and `settle` take the path of the text before it has its place; the first one may raise Refused.
    """
    target = os.path.realpath(path)
    if text is None:
        os.unlink(path)
        return
    make_folders(os.path.dirname(target))
    handle, partial = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".kvtrial-")
    try:
        with io.open(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        accept(partial)
        settle(partial)
        os.rename(partial, target)
    except BaseException:
        os.unlink(partial)
        raise


def attributes(module, file, path):
    """What Ansible's own functions take to give `path` the owner, group and mode that are asked for."""
    return module.load_file_common_arguments({name: file[name] for name in ("owner", "group", "mode")}, path=path)


def put(module, file):
    """Write one file as it is asked for. Raises OSError, ValueError and Refused."""

    def accept(partial):
        if file["validate"]:
            status, output, errors = module.run_command(file["validate"].replace("%s", partial))
            if status != 0:
                raise Refused(" ".join((errors or output).replace(partial, file["path"]).split()))

    def settle(partial):
        os.chmod(partial, 0o644)
        module.set_fs_attributes_if_different(attributes(module, file, partial), False)

    write(file["path"], file["text"], accept, settle)


def main():
    module = AnsibleModule(
        argument_spec={
            "files": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "path": {"type": "path", "required": True},
                    "text": {"type": "str"},
                    "owner": {"type": "str"},
                    "group": {"type": "str"},
                    "mode": {"type": "str"},
                    "validate": {"type": "str"},
                },
            }
        },
        supports_check_mode=True,
    )
    due, path, changed = [], "", False
    try:
        for file in module.params["files"]:
            path, text = file["path"], file["text"]
            with ownership.as_owner_of(os.path.dirname(os.path.abspath(path))):
                before = read(path)
                if before != text:
                    due.append((path, before, text))
                    if not module.check_mode:
                        put(module, file)
                elif text is not None:
                    changed = module.set_fs_attributes_if_different(attributes(module, file, path), changed)
    except (OSError, ValueError) as error:
        module.fail_json(msg="%s can't be read or written (%s); make that possible, and run again." % (path, error))
    except Refused as error:
        module.fail_json(msg="%s was not written, since its check refused it: %s." % (path, error))
    diff = [
        {"before": before or "", "after": text or "", "before_header": path, "after_header": path}
        for path, before, text in due
    ]
    module.exit_json(changed=bool(due) or changed, written=[path for path, _, _ in due], diff=diff)


if __name__ == "__main__":
    main()
