"""Names of options of `vllm serve`: which are read here, what else they are called, and which can't be told."""

import re
from functools import cache

import msgspec

from kvtrial.record.versions import data

_NAME = re.compile(r"--[a-z0-9]+(-[a-z0-9]+)*")


class OptionTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`data/options.yml`. `aliases`: another name, with its dashes -> the long name without."""

    read: list[str]
    aliases: dict[str, str]


def option_name(written: str) -> str:
    """The long name of an option without dashes in front: `-tp`, `--tensor_parallel_size` -> tensor-parallel-size."""
    name = _dashed(written)
    return data("options", OptionTable).aliases.get(name, name.removeprefix("--"))


def unclear_option(written: str) -> str | None:
    """One sentence on an option whose name (with its dashes) can't be relied on to mean what it says, else None.

    That is one in another form than vLLM's, or an abbreviation of one that is read here. A key after a dot
    (`--kv-transfer-config.kv_role`) is not judged.
    """
    name = _dashed(written).partition(".")[0]
    if name in _spellings() or not name.startswith("-"):
        return None
    if name.startswith("--") and not _NAME.fullmatch(name):
        return (
            f"{written!r} is no name of an option; those of `vllm serve` are lower-case words with dashes, such as "
            f"--max-num-seqs: correct it."
        )
    if whole := [spelling for spelling in _spellings() if spelling.startswith(name)]:
        return (
            f"{written} is an abbreviation, which vLLM would take for {' or '.join(whole[:3])} and no check here sees; "
            f"write the option's whole name."
        )
    return None


def _dashed(written: str) -> str:
    """Underscores as dashes, up to the first dot, as vLLM has it."""
    name, dot, key = written.partition(".")
    return (name.replace("_", "-") if name.startswith("--") else name) + dot + key


@cache
def _spellings() -> tuple[str, ...]:
    """Every way to write an option that is read, the plain ones first."""
    table = data("options", OptionTable)
    return (*(f"--{name}" for name in table.read), *table.aliases, *(f"--no-{name}" for name in table.read))
