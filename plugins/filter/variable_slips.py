# Licensed under the Apache License, Version 2.0
"""Filter variable_slips; documented beside."""

from __future__ import annotations

import functools

from ansible_collections.kvtrial.vllm.plugins.module_utils import variable_names


@functools.lru_cache(maxsize=4)
def _known(root):
    known = frozenset(variable_names.known_names(root))
    return known, variable_names.prefixes(root), frozenset(variable_names.settings(root))


def variable_slips(names, root, own=(), removed=None):
    """Sentences about names that the project does not know; see module_utils/variable_names."""
    known, of_the_project, settable = _known(root)
    return variable_names.slips(list(names), known, set(own), of_the_project, removed, settable)


class FilterModule:
    """Filters of this collection."""

    def filters(self):
        return {"variable_slips": variable_slips}
