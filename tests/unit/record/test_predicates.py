"""Conditions as data: what holds, what does not, and what is not known."""

import pytest
from kvtrial.record.predicates import Facts, Wanted, holds, holds_any, named

KNOWN = Facts({"a": 6, "b": "4G", "c": None, "d": True, "option.x": "off"}, frozenset({"option"}))


@pytest.mark.parametrize(
    ("condition", "answer"),
    [
        ({}, True),
        ({"a": 6}, True),
        ({"a": 7}, False),
        ({"d": True}, True),
        ({"d": 1}, False),
        ({"a": True}, False),
        ({"option.x": "off"}, True),
        ({"option.x": ["on", "off"]}, True),
        ({"option.x": ["on"]}, False),
        ({"c": "off"}, False),
        ({"c": 0}, False),
        ({"c": Wanted(given=False)}, True),
        ({"a": Wanted(given=False)}, False),
        ({"option.gone": Wanted(given=False)}, True),
        ({"option.gone": Wanted(set=False)}, True),
        ({"option.x": Wanted(set=True)}, True),
        ({"a": Wanted(above=5)}, True),
        ({"a": Wanted(above=6)}, False),
        ({"a": Wanted(at_least=6, at_most=6)}, True),
        ({"a": Wanted(below=6)}, False),
        ({"b": Wanted(at_least=2**32)}, True),
        ({"c": Wanted(above=0)}, False),
        ({"option.x": Wanted(above=0)}, False),
        ({"a": Wanted(below="b")}, True),
        ({"b": Wanted(below="a", times=2**30)}, True),
        ({"a": Wanted(below="unknown")}, None),
        ({"a": Wanted(below="c")}, False),
        ({"unknown": 1}, None),
        ({"unknown": Wanted(given=False)}, None),
        ({"unknown": 1, "a": 7}, False),
        ({"unknown": 1, "a": 6}, None),
        ({"option.x": Wanted(matches="^of+")}, True),
        ({"c": Wanted(matches="")}, False),
    ],
)
def test_a_condition_holds_does_not_or_is_not_known(condition, answer):
    assert holds(condition, KNOWN) is answer


def test_one_of_several_is_enough_and_what_is_not_known_is_no_no():
    assert holds_any([{"a": 7}, {"a": 6}], KNOWN) is True
    assert holds_any([{"a": 7}, {"unknown": 1}], KNOWN) is None
    assert holds_any([{"a": 7}], KNOWN) is False
    assert holds_any([], KNOWN) is False


def test_facts_are_shown_with_their_values():
    condition = {"a": 6, "c": 1, "unknown": 1, "share": Wanted(below=1)}
    facts = KNOWN.also(Facts({"share": 0.12345, "a": 6000.0}))
    assert named(condition, facts) == "a 6,000, c absent, unknown not known, share 0.123"
