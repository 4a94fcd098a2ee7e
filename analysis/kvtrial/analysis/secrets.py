"""Secrets have no place in a plan: what is planned is written into campaign, records and report."""

import re
from collections.abc import Iterable

from kvtrial.record.errors import UnusableInput

SECRET_NAME = re.compile(
    r"(^|[-_])(api[-_]?key|access[-_]?key|key|token|secret|password|passwd|credential)s?($|[-_])", re.I
)


def refuse_secrets(arm: str, options: Iterable[str], environment: Iterable[str]) -> None:
    """Raise UnusableInput for an option or environment variable whose name says that it holds a secret."""
    for kind, names in (("option --", options), ("environment variable ", environment)):
        for name in names:
            if SECRET_NAME.search(name) and "tokens" not in name.lower():
                raise UnusableInput(
                    f"arm {arm}: {kind}{name} looks like a secret, and a plan is written into records and reports; "
                    f"leave it out: the engine listens on loopback only, and the model lies on the host."
                )
