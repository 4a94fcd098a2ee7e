"""Whether `vllm serve` has the options of an arm in its version, by the lists read from the wheels."""

import difflib
import json
from collections.abc import Iterator
from typing import Any

from kvtrial.analysis.launch_arm import Arm, Finding
from kvtrial.record.serveoptions import long_name, neighbours, options_of, range_read, was_read, when
from kvtrial.record.versions import within

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
            for key in reversed(keys.split(".")):
                value = {key: _loaded(value)}
            dotted.append((_settled(name, arm.version), value))
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
