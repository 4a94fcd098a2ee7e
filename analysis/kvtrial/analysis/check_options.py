"""Whether `vllm serve` has the options of an arm in its version, by the lists read from the wheels."""

import difflib
from collections.abc import Iterator

from kvtrial.analysis.launch_arm import Arm, Finding
from kvtrial.record.serveoptions import neighbours, options_of, range_read, was_read, when

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


def _dashes(name: str) -> str:
    return name if name.startswith("-") else f"--{name}"


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
    option = _dashes(name)
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
    return f" (did you mean {_dashes(close[0])}?)" if close else ""
