"""Conditions as data: named facts, tests on them, and the one evaluator.

A condition names facts and what must be true of each; all of it must hold. There are three answers: it holds (True), it
does not (False), or a fact it names is not known (None). Not known is never taken for absent: a fact that is not listed
is absent only where whoever collected the facts says that its namespace (what stands before the first dot of its name)
is complete.
"""

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import msgspec

from kvtrial.record.errors import UnusableInput
from kvtrial.record.launch import human_int

Scalar = bool | int | float | str


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What must be true of a fact; every part that is given.

    `given`: there is a value. `set`: there is one other than false, 0 and an empty text. `above`, `below`, `at_least`,
    `at_most`: a number, or the name of another fact, `times` that often. `matches`: an expression found in its text.
    """

    given: bool | None = None
    set: bool | None = None
    above: float | str | None = None
    below: float | str | None = None
    at_least: float | str | None = None
    at_most: float | str | None = None
    times: float = 1.0
    matches: str | None = None


Condition = dict[str, bool | int | float | str | list[str] | Wanted]
"""Fact -> what it must be: a value, one of several texts, or Wanted. Empty: holds always."""


class Facts(msgspec.Struct, frozen=True):
    """`values`: name -> value, None where it is known to be absent. `complete`: namespaces in which all is listed."""

    values: Mapping[str, Any]
    complete: frozenset[str] = frozenset()

    def also(self, other: "Facts") -> "Facts":
        """These facts and others; of a name in both the other's value counts."""
        return Facts({**self.values, **other.values}, self.complete | other.complete)


class _Unknown:
    """A fact that nobody has looked for."""


_UNKNOWN = _Unknown()


def holds(condition: Condition, facts: Facts) -> bool | None:
    """Whether everything in a condition is true; None where that depends on a fact that is not known."""
    answers = [_passes(wanted, _look_up(name, facts), facts) for name, wanted in condition.items()]
    if False in answers:
        return False
    return None if None in answers else True


def holds_any(conditions: Iterable[Condition], facts: Facts) -> bool | None:
    """Whether one of several conditions holds; None where none does and one is not known."""
    answers = [holds(condition, facts) for condition in conditions]
    if True in answers:
        return True
    return None if None in answers else False


def named(condition: Condition, facts: Facts) -> str:
    """The facts that a condition names, with their values, for people: `now.requests_waiting 6, window_seconds 60`."""
    shown = []
    for name in condition:
        value = _look_up(name, facts)
        text = "not known" if isinstance(value, _Unknown) else "absent" if value is None else _text(value)
        shown.append(f"{name} {text}")
    return ", ".join(shown)


def _look_up(name: str, facts: Facts) -> Any:
    if name in facts.values:
        return facts.values[name]
    return None if name.partition(".")[0] in facts.complete else _UNKNOWN


def _passes(wanted: Scalar | list[str] | Wanted, value: Any, facts: Facts) -> bool | None:
    if isinstance(value, _Unknown):
        return None
    if isinstance(wanted, Wanted):
        return _passes_wanted(wanted, value, facts)
    if isinstance(wanted, list):
        return value in wanted
    if isinstance(wanted, bool) or isinstance(value, bool):
        return value is wanted
    if isinstance(wanted, str):
        return bool(value == wanted)
    return number(value) == wanted


def _passes_wanted(wanted: Wanted, value: Any, facts: Facts) -> bool | None:
    answers: list[bool | None] = []
    if wanted.given is not None:
        answers.append((value is not None) is wanted.given)
    if wanted.set is not None:
        answers.append((value not in (None, False, 0, "", "0", "false", "False")) is wanted.set)
    if wanted.matches is not None:
        answers.append(value is not None and _compiled(wanted.matches).search(str(value)) is not None)
    bounds: list[tuple[float | str | None, Callable[[float, float], bool]]] = [
        (wanted.above, operator.gt),
        (wanted.below, operator.lt),
        (wanted.at_least, operator.ge),
        (wanted.at_most, operator.le),
    ]
    for bound, fits in bounds:
        if bound is not None:
            answers.append(_within(value, bound, fits, wanted.times, facts))
    if False in answers:
        return False
    return None if None in answers else True


def _within(
    value: Any, bound: float | str, fits: Callable[[float, float], bool], times: float, facts: Facts
) -> bool | None:
    limit = _look_up(bound, facts) if isinstance(bound, str) else bound
    if isinstance(limit, _Unknown):
        return None
    here, there = number(value), number(limit)
    return here is not None and there is not None and fits(here, there * times)


def number(value: Any) -> float | None:
    """A value as a number, also from text as vLLM reads sizes (`4`, `8G`); None for what is no number."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        pass
    try:
        return human_int(str(value), "a fact")
    except UnusableInput:
        return None


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.3g}"


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
