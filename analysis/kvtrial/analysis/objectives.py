"""Objectives of a ladder: what a level must keep, checked, and a user's own beside or over the protocol's. Pure."""

import math
from collections.abc import Mapping

from msgspec.structs import replace

from kvtrial.record.errors import UnusableInput
from kvtrial.record.protocol import Objective


def limits_of(objective: Objective) -> dict[str, float]:
    """The limits that an objective sets, by field."""
    given = {name: getattr(objective, name) for name in Objective.__struct_fields__}
    return {name: limit for name, limit in given.items() if limit is not None}


def refuse_objectives(objectives: Mapping[str, Objective], where: str) -> None:
    """Raise UnusableInput for an objective without a limit, which every level would keep, or with one that is none."""
    for profile, objective in objectives.items():
        limits = limits_of(objective)
        if not profile.strip():
            raise UnusableInput(f"{where} has a profile without a name; name it.")
        if not profile.isprintable():
            raise UnusableInput(
                f"{where}: profile {profile!r} can't be printed in a line; name it in plain characters."
            )
        if not limits:
            raise UnusableInput(
                f"{where}: {profile} sets no limit, so every level would keep it; give at least one of "
                f"{', '.join(Objective.__struct_fields__)}."
            )
        for name, limit in limits.items():
            if not 0 <= limit < math.inf:
                raise UnusableInput(f"{where}: {profile}.{name}={limit} is no limit; give a number of 0 or more.")
            if not limit and name.endswith("_seconds"):
                raise UnusableInput(
                    f"{where}: {profile}.{name}={limit} is kept by no request; give more than 0 seconds."
                )


def with_own(declared: Mapping[str, Objective], own: Mapping[str, Objective]) -> dict[str, Objective]:
    """The protocol's objectives and the user's: of a profile that both have, the limits that the user gives count."""
    return {**declared, **{name: replace(declared.get(name, Objective()), **limits_of(it)) for name, it in own.items()}}
