"""Secrets have no place in a plan: what is planned is written into campaign, records and report."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvtrial.record.credentials import CREDENTIALS
from kvtrial.record.errors import UnusableInput

SECRET_NAME = re.compile(
    r"(api|access|private|secret|auth|sign\w*|encryption)[-_.]?key|keys?$|(^|[-_.])(pats?|pass|auth|bearer|cookies?)$"
    # Tokens are counted far more often than they are secret.
    r"|token(?!s|iz|[-_](threshold|ids?)(?![a-z]))|secret|passw|passphrase|credential|authorization|webhook",
    re.IGNORECASE,
)
_INSTEAD = "leave it out: the engine listens on loopback only, and the model lies on the host."


def refuse_secrets(arm: str, options: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
    """Raise UnusableInput for an option or environment variable that by its name or value holds a secret.

    A name says so by a word in it, also a key inside a value; a value by an address with a user or a password.
    """
    for kind, given in (("option --", options), ("environment variable ", environment)):
        for name, value in given.items():
            for inner, text in _settings(name, value):
                where = f"arm {arm}: {kind}{name}" + (f" ({inner})" if inner != name else "")
                if SECRET_NAME.search(inner):
                    raise UnusableInput(
                        f"{where} looks like a secret, and a plan is written into records and reports; {_INSTEAD}"
                    )
                if CREDENTIALS.search(text):
                    raise UnusableInput(
                        f"{where} holds an address with a user or password (before its @), and a plan is written into "
                        f"records and reports; {_INSTEAD}"
                    )


def _settings(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Names and texts in a setting. A flag has none: true and false tell nobody anything."""
    if isinstance(value, dict):
        yield name, ""
        for key, inner in value.items():
            yield from _settings(str(key), inner)
    elif isinstance(value, list):
        yield name, " ".join(map(str, value))
        for inner in value:
            if isinstance(inner, dict | list):
                yield from _settings(name, inner)
    elif not isinstance(value, bool):
        yield name, str(value)
