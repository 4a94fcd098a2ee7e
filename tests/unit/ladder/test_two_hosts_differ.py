"""Two hosts whose words differ: what to do next is not what is done already."""

import pytest
from kvtrial.analysis.recommend import recommend
from kvtrial.analysis.report import build_brief, build_report, top
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


def test_a_hosts_number_has_that_hosts_word_and_the_table_names_the_host(verdict):
    """The pool's −250 is INCONCLUSIVE; the ladder is h1's, which by itself is −500 and BETTER."""
    runs = [run for of_host in records().values() for run in of_host]
    for language, word, title in (
        ("en", "BETTER", "## Memory, replicas, context limit: host h1"),
        ("ru", "лучше", "## Память, реплики, предел контекста: хост h1"),
    ):
        brief = build_brief(verdict, ladder_protocol(), runs, language=language)
        row = next(line for line in brief.splitlines() if line.startswith("| more"))
        assert f"−500, {word}" in row
        assert title in brief
    page = build_report(verdict, ladder_protocol(), runs, {}, None)
    changes = page[page.index('<table class="changes">') :]
    assert "500 fewer preemptions per 1,000\nBETTER" in changes[: changes.index("</table>")].replace("\u00a0", " ")
