"""Two hosts whose words differ: what to do next is not what is done already."""

import pytest
from kvtrial.analysis.recommend import recommend
from kvtrial.analysis.report import top
from kvtrial.analysis.report.words import Words
from kvtrial.analysis.verdict import conclude
from ladder_build import Shape, ladder_protocol, ladder_records
from msgspec.structs import replace


def late(arm, level, pair):
    """A host that preempts at the two highest levels alone, where more_kv changes nothing."""
    if level < 6:
        return Shape(0, 0.001, 0.0)
    return Shape(0, 0.4, 0.05) if arm == "fewer_seqs" else Shape(1, 0.001, 0.05)


def records():
    return {"h1": ladder_records(), "h2": [replace(run, host="h2") for run in ladder_records(late)]}


@pytest.fixture(scope="module")
def verdict():
    return conclude(ladder_protocol(), records(), "c1")


def test_six_valid_pairs_a_host_are_not_asked_for_again(verdict):
    assert (verdict.verdict, [host.verdict for host in verdict.hosts]) == ("INCONCLUSIVE", ["BETTER", "EQUIVALENT"])
    assert verdict.recommendation.action == "judge the hosts apart, each by its own verdict: they differ"
    assert top.next_step(verdict, Words("ru")).startswith("Судить хосты порознь")


@pytest.mark.parametrize(
    ("pairs", "action"), [(12, "run again with more pairs"), (5, "run again, with at least 6 valid pairs")]
)
def test_pairs_are_asked_for_by_what_is_there(verdict, pairs, action):
    planted = [replace(item, pairs=pairs) for item in verdict.comparisons]
    assert recommend(ladder_protocol(), "INCONCLUSIVE", "open", "gpu", planted, []).action == action
