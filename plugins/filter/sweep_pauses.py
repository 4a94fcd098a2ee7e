# Licensed under the Apache License, Version 2.0
"""Filter sweep_pauses; documented in sweep_pauses.yml."""

from __future__ import annotations

from ansible.errors import AnsibleFilterError

GROWTH = 0.02
"""A pause is 2 % of the time passed: the end of a campaign is noticed at most that much late."""


def sweep_pauses(seconds, first=10, longest=60):
    """Pauses, whole seconds, that add up to at least `seconds`; each from `first` to `longest`. Raises ValueError."""
    seconds, first, longest = float(seconds), int(first), int(longest)
    if not 1 <= first <= longest:
        raise ValueError(
            "sweep pauses from %d to %d seconds: the first must be at least 1 and not the longer." % (first, longest)
        )
    pauses, passed = [], 0
    while passed < seconds:
        pause = min(longest, max(first, round(GROWTH * passed)))
        pauses.append(pause)
        passed += pause
    return pauses


def sweep_pauses_filter(seconds, first=10, longest=60):
    """`sweep_pauses` with the error that a template reports."""
    try:
        return sweep_pauses(seconds, first, longest)
    except (TypeError, ValueError) as error:
        raise AnsibleFilterError(str(error)) from None


class FilterModule:
    """Filters of this collection."""

    def filters(self):
        return {"sweep_pauses": sweep_pauses_filter}
