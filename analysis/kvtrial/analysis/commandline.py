"""The command line of a campaign, for whoever gives it again: without secrets, with paths from the project's root."""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from kvtrial.analysis.secrets import SECRET_NAME
from kvtrial.record.credentials import without_credentials

REDACTED = "REDACTED"
EXTRA = ("-e", "--extra-vars")
SETTING = re.compile(r"""(?P<name>[A-Za-z_][\w.-]*)=(?P<value>"[^"]*"|'[^']*'|\S+)""")
SAFE_NAME = re.compile(r"^kvtrial_(?!.*(token|password|secret|webhook))|_(file|path|dir|directory)$")
"""Variables of the project hold no secret but those named so, and a path to one is none."""


def portable(words: Sequence[str], root: str | Path, here: Path | None = None) -> list[str]:
    """A command's words without secrets, its program and what lies in the project from `root` on.

    `here`: where the command was given, by default where this process stands.
    """
    base, stand = Path(root).resolve(), here or Path.cwd()
    found, extra = [], False
    for number, word in enumerate(words):
        option, equals, value = word.partition("=")
        if extra:
            found.append(_variables(word, base, stand))
        elif equals and option in EXTRA:
            found.append(f"{option}={_variables(value, base, stand)}")
        elif word.startswith("-e") and len(word) > 2 and not word.startswith("--"):
            found.append(f"-e{_variables(word[2:], base, stand)}")
        elif equals and option.startswith("--") and not option.endswith("-file") and SECRET_NAME.search(option):
            found.append(f"{option}={REDACTED}")
        else:
            found.append(without_credentials(_from(base, stand, word, is_program=number == 0)))
        extra = word in EXTRA and not extra
    return found


def _from(root: Path, here: Path, word: str, *, is_program: bool = False) -> str:
    """A path inside the project relative to its root; another program by its name, anything else as it is."""
    if not word or word.startswith("-"):
        return word
    path = Path(os.path.normpath(here / word))
    # A link inside the project, as a virtual environment may be, is named as it is.
    for inside in (path, path.resolve()):
        if path.exists() and inside.is_relative_to(root):
            return str(inside.relative_to(root))
    return path.name if is_program else word


def _variables(given: str, root: Path, here: Path) -> str:
    """What stands behind -e: a file, YAML or JSON, or name=value pairs; secrets replaced."""
    if given.startswith("@"):
        return f"@{_from(root, here, given[1:])}"
    if given.lstrip().startswith(("{", "[")):
        try:
            return json.dumps(_without_secrets(yaml.safe_load(given)), ensure_ascii=False)
        except (yaml.YAMLError, TypeError, ValueError):
            return REDACTED
    kept = SETTING.sub(lambda found: f"{found['name']}={REDACTED}" if _is_secret(found["name"]) else found[0], given)
    return without_credentials(kept)


def _is_secret(name: str) -> bool:
    return bool(SECRET_NAME.search(name)) and not SAFE_NAME.search(name)


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: REDACTED if _is_secret(str(key)) and not isinstance(inner, bool) else _without_secrets(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_without_secrets(inner) for inner in value]
    return without_credentials(value) if isinstance(value, str) else value
