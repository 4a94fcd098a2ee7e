"""Whether `vllm serve` has the options of an arm in its version, by the lists read from the wheels."""

import difflib
import json
from collections.abc import Callable, Iterator
from typing import Any

from kvtrial.analysis.launch_arm import Arm, Finding
from kvtrial.record.serveoptions import kinds, long_name, neighbours, options_of, range_read, was_read, when
from kvtrial.record.versions import within

_LEVELS = ("0", "1", "2", "3")
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_WORDS = {"int": "a whole number", "float": "a number"}
_TAKEN: dict[str, tuple[Callable[[float], bool], str]] = {
    "gpu-memory-utilization": (lambda share: 0 < share <= 1, "a number above 0 and up to 1"),
    "max-lora-rank": (_RANKS.__contains__, f"one of {', '.join(map(str, _RANKS))}"),
}
"""What some numbers have to be, in all releases read (config/cache.py, config/lora.py)."""
_ASK_FOR_HELP = frozenset({"help", "-h"})


def check_options(arm: Arm) -> Iterator[Finding]:
    """Findings on options that the version does not have: refused where its own list was read, else warned of."""
    here = options_of(arm.version)
    for written in dict.fromkeys(name.partition(".")[0] for name in arm.parsed.options):
        name = _whole(written, here)
        if name in here or name in _ASK_FOR_HELP or _level(name):
            continue
        longer = [option for option in here if not option.startswith("-") and option.startswith(name)]
        if len(longer) == 1 and not name.startswith("-"):
            yield _abbreviated(arm, name, longer[0])
        else:
            yield _not_there(arm, name)
    yield from _check_level(arm)
    yield from _check_values(arm, here)


def _check_level(arm: Arm) -> Iterator[Finding]:
    """Findings on -O, which became the level with 0.12: it takes no JSON and, from 0.13, no key with a value apart."""
    words = arm.launch.argv
    for at, word in enumerate(words):
        after = words[at + 1] if at + 1 < len(words) else ""
        if word == "-O" and after not in _LEVELS and within(arm.version, "0.12", None):
            yield _unusable(arm, "-O", f"-O {after}".strip(), "-O takes 0, 1, 2 or 3 since 0.12", "-O")
        elif word.startswith("-O.") and "=" not in word and within(arm.version, "0.13", None):
            yield _unusable(arm, "-O", f"{word} {after}".strip(), "-O takes a level alone since 0.13", after)


def _check_values(arm: Arm, here: frozenset[str]) -> Iterator[Finding]:
    """Findings on flags with a value, on `--no-` before what is no such flag, and on values that are none of theirs."""
    for written, value in arm.parsed.options.items():
        name = long_name(written, arm.version)
        kind, option = kinds().get(name), dashes(written)
        if name not in here or (kind is None and name not in _TAKEN):
            continue
        if value is False and kind != "on_off" and f"no-{written}" not in here:
            yield _unusable(arm, name, f"--no-{written}", f"{option} has no such form", f"--no-{written}")
        elif kind in ("on_off", "switch") and isinstance(value, str):
            inline = any(word.partition("=")[0].replace("_", "-") == option for word in arm.launch.argv if "=" in word)
            # A word after a flag may be the model, where it stands nowhere else.
            if inline or arm.parsed.model is not None:
                yield _unusable(arm, name, f"{option} {value}", f"{option} is a flag without a value", value)
        elif isinstance(value, str) and not _fits(name, kind, value.partition(" ")[0]):
            wants = _TAKEN[name][1] if name in _TAKEN else _WORDS[kind or ""]
            yield _unusable(arm, name, f"{option} {value}", f"{option} takes {wants}", value)


def _fits(name: str, kind: str | None, value: str) -> bool:
    try:
        number = int(value) if kind == "int" else float(value)
    except ValueError:
        # Numbers that may be left out are taken as None.
        return name not in _TAKEN and (kind not in ("int", "float") or value in ("", "None"))
    return name not in _TAKEN or _TAKEN[name][0](number)


def _unusable(arm: Arm, name: str, typed: str, why: str, word: str) -> Finding:
    read = was_read(arm.version)
    return Finding(
        "unusable_value",
        "refuse" if read else "warn",
        arm.name,
        f"{typed[:80]} can't be used: {why}; the engine would end at it"
        + ("." if read else f", if {arm.version} is as the releases next to it are."),
        {"option": name, "word": word[:80], "version": arm.version},
        f"Correct {typed[:80]}, or take it out.",
    )


def _whole(written: str, here: frozenset[str]) -> str:
    """The option's name: without `no-`, which turns a flag off, unless that is part of the name."""
    bare = written.removeprefix("no-")
    return bare if written not in here and bare in here else written


def _level(name: str) -> bool:
    """-O3 is --optimization-level 3, without a space."""
    return name.startswith("-O")


def dashes(name: str) -> str:
    """An option's name as it is typed: a short one has its dash already."""
    return name if name.startswith("-") else f"--{name}"


def settings_of(arm: Arm) -> dict[str, Any]:
    """An arm's options by their long names in its version, with the keys after a dot merged into an option's JSON."""
    found: dict[str, Any] = {}
    dotted: list[tuple[str, Any]] = []
    for written, value in arm.parsed.options.items():
        name, dot, keys = written.partition(".")
        if dot:
            nested = _loaded(value)
            for key in reversed(keys.split(".")):
                nested = {key: nested}
            dotted.append((_settled(name, arm.version), nested))
        elif _level(name) and within(arm.version, "0.12", None):
            found["optimization-level"] = value if name == "-O" else name.removeprefix("-O")
        else:
            found[_settled(name, arm.version)] = _loaded(value) if str(value).startswith("{") else value
    for name, value in dotted:
        found[name] = _merged(found[name], value) if isinstance(found.get(name), dict) else value
    return found


def _settled(name: str, version: str) -> str:
    # -O.mode was moved to -cc for one release, when -O became the level.
    return "compilation-config" if name == "-O" else long_name(name, version)


def _loaded(value: Any) -> Any:
    """What vLLM reads in an option's JSON, or after a dot."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _merged(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    both = {key for key in left.keys() & right.keys() if isinstance(left[key], dict) and isinstance(right[key], dict)}
    return left | right | {key: _merged(left[key], right[key]) for key in both}


def _abbreviated(arm: Arm, name: str, whole: str) -> Finding:
    return Finding(
        "option_abbreviated",
        "warn",
        arm.name,
        f"--{name} is no whole name; vLLM {arm.version} takes it for --{whole}, and another version for what then "
        "begins like it.",
        {"option": name, "taken_for": whole},
        f"Write --{whole}.",
    )


def _not_there(arm: Arm, name: str) -> Finding:
    known, read = when(name), was_read(arm.version)
    option = dashes(name)
    ends = f"the engine would end in 'unrecognized arguments: {option}'"
    near = _near(name, options_of(arm.version))
    numbers = {"option": name, "version": arm.version, "read": read}
    if known is None:
        return Finding(
            "unknown_option",
            "refuse" if read else "warn",
            arm.name,
            f"{option} is not an option of any vLLM version that kvtrial knows ({range_read()}); mistyped?{near}"
            + (f" {ends[0].upper()}{ends[1:]}." if read else f" The list of {arm.version} itself was not read."),
            numbers,
            f"Correct {option}, or take it out.",
        )
    between = " and ".join(neighbours(arm.version))
    return Finding(
        "option_not_in_version",
        "refuse" if read else "warn",
        arm.name,
        f"{option} is not an option of vLLM {arm.version}{near}: releases have it {known}; {ends}."
        if read
        else f"Releases have {option} {known}; {between}, read next to {arm.version}, "
        f"ha{'ve' if ' and ' in between else 's'} none of that name{near}, so {arm.version} very likely has none.",
        numbers | {"was_there": known},
        f"Take {option} out, or use a version that has it in all arms.",
    )


def _near(name: str, here: frozenset[str]) -> str:
    close = difflib.get_close_matches(name, sorted(here), n=1, cutoff=0.8)
    return f" (did you mean {dashes(close[0])}?)" if close else ""
