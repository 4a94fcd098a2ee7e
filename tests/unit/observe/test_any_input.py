"""Whatever is given, the answer is an answer or one sentence."""

import json
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from kvtrial.analysis.judge import judge
from kvtrial.analysis.judge.results import results_of
from kvtrial.analysis.observe.report import lines_of
from kvtrial.record.errors import UnusableInput
from planted import CASES, METRICS, logged, seen

REAL = (METRICS / "vllm-0.32.0-cpu-after-offload.prom").read_text().splitlines()
LOG = (CASES / "29-deadlock-health-200" / "server.log").read_text().splitlines()
SET = json.loads((CASES / "31-three-runs-too-few" / "results.json").read_text())
VALUES = ["NaN", "+Inf", "-Inf", "-1", "0", "1e300", "nonsense", ""]


def damaged(draw_lines: list[int], value: str, lines: list[str]) -> str:
    """Lines with some left out and some given another value."""
    kept = []
    for number, line in enumerate(lines):
        if number % 97 in draw_lines:
            if value == "" or line.startswith("#"):
                continue
            line = line.rpartition(" ")[0] + " " + value
        kept.append(line)
    return "\n".join(kept) + "\n"


@settings(max_examples=40)
@given(st.lists(st.integers(0, 96), max_size=30), st.sampled_from(VALUES), st.integers(1, 3))
def test_a_damaged_page_is_read_or_refused(numbers: list[int], value: str, pages: int):
    try:
        answer = seen(*["\n".join(REAL) + "\n"] * (pages - 1), damaged(numbers, value, REAL))
    except UnusableInput:
        return
    assert answer.verdict in ("report", "INVALID")
    assert answer.class_ and lines_of(answer)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 96), max_size=60), st.sampled_from(VALUES))
def test_a_damaged_log_is_read(numbers: list[int], value: str):
    assert lines_of(logged(damaged(numbers, value, LOG)))


def leaves(value, path=()):
    """Paths of everything in a nested value."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from leaves(inner, (*path, index))


PATHS = [path for path in leaves(SET) if path]


@settings(max_examples=150)
@given(st.sampled_from(PATHS), st.sampled_from([None, 0, -1, "x", [], {}, True, 1e308, float("nan")]))
def test_a_damaged_result_set_is_judged_or_refused(path: tuple, value):
    raw = json.loads(json.dumps(SET))
    place = raw
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    try:
        results = results_of(raw, "a set")
    except UnusableInput:
        return
    assert judge(results).verdict


def test_there_is_a_real_page_to_damage():
    assert len(REAL) > 100 and Path(METRICS).exists()
