"""What forbids adopting an arm is that arm's guards: a default ladder tries others beside it, whose may be worse."""

import pytest
from kvtrial.analysis import answer
from kvtrial.analysis.recommend import caveats_of, recommend
from kvtrial.analysis.report import top
from kvtrial.analysis.report.said import is_said
from kvtrial.analysis.report.words import Words
from kvtrial.analysis.verdict import conclude
from ladder_build import ladder_protocol, ladder_records
from msgspec.structs import replace


@pytest.fixture(scope="module")
def verdict():
    return conclude(ladder_protocol(), {"h1": ladder_records()}, "c1")


def test_another_arms_worse_guards_do_not_forbid_the_arm_that_is_better(verdict):
    worse = {item.arm for item in verdict.comparisons if (item.role, item.verdict) == ("guard", "WORSE")}
    assert (worse, verdict.verdict) == ({"fewer_seqs"}, "BETTER")
    advice = recommend(ladder_protocol(), "BETTER", verdict.reason, "gpu", verdict.comparisons, ladder_records())
    assert advice.action == "adopt more_kv"
    assert "forbid" not in f"{verdict.recommendation.reason} {' '.join(verdict.caveats)}"
    assert "must not be adopted" not in (answer.elsewhere_text(verdict) or "")
    for language in ("en", "ru"):
        said = " ".join(text for _, text, _ in top.answers(verdict, Words(language)))
        assert "must not be adopted" not in said and "принимать нельзя" not in said


def test_the_arms_own_worse_guards_forbid_it_and_the_arm_is_named(verdict):
    planted = [
        replace(item, verdict="WORSE") if (item.role, item.arm) == ("guard", "more_kv") else item
        for item in verdict.comparisons
    ]
    advice = recommend(ladder_protocol(), "BETTER", verdict.reason, "gpu", planted, ladder_records())
    assert advice.action == "do not adopt more_kv"
    assert "guards of more_kv are WORSE, which forbids adopt" in advice.reason
    forbidden = [caveat for caveat in caveats_of(ladder_protocol(), "gpu", planted) if "forbidden" in caveat]
    assert len(forbidden) == 2 and all("is WORSE with more_kv: adopt is forbidden" in caveat for caveat in forbidden)
    assert all(is_said(text, Words("ru")) for text in [advice.reason, *forbidden])
    said = answer.elsewhere_text(replace(verdict, comparisons=planted)) or ""
    assert said.startswith("with more_kv 2 guards of 2 WORSE, so it must not be adopted (with other arms 2 of 2 WORSE)")
