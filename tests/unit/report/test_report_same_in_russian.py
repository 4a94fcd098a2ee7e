"""The Russian page says what the English one says: cause, advice, and what is not shown."""

import re

import msgspec
import pytest
import report_builder as build
from kvtrial.analysis import answer
from kvtrial.analysis.report import top
from kvtrial.analysis.report.conditions import gpus_text
from kvtrial.analysis.report.said import said_text
from kvtrial.analysis.report.words import Words, catalogue
from kvtrial.record.verdict import Recommendation
from test_report_page import Page, render

RU = Words("ru")


def test_a_fault_of_the_engine_is_no_praise() -> None:
    verdict = build.engine_fault()
    withheld = build.verdict(
        verdict="INCONCLUSIVE", reason="BETTER is withheld because of engine faults: 1 of 6 runs of offload died"
    )
    for faulty in (verdict, withheld):
        page = render(faulty, language="ru")
        assert "раньше с offload" not in Page(page).text
        assert said_text(answer.headline(faulty), RU)[:12] in Page(page).text.replace("\u00a0", " ")


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("adopt offload", "Принять offload."),
        ("do not adopt offload", "Не принимать offload: почему, сказано ниже."),
        ("Keep control", "Оставить control."),
        ("keep the control (as it is)", "Оставить контрольную настройку (как есть)."),
        ("keep the control (my own words)", "Оставить контрольную настройку (my own words)."),
        ("use this spread to choose the number of pairs", "По этому разбросу выбрать число пар."),
        ("run again with more pairs: 17 pairs needed", "Повторить с большим числом пар: нужно 17."),
        ("run again, with at least 6 valid pairs", "Повторить: нужно не меньше 6 годных пар."),
        ("mend what gate hazards found, then run again", "Устранить то, что нашла проверка hazards, затем повторить."),
    ],
)
def test_the_advice_is_the_recommendations_not_the_words(action: str, said: str) -> None:
    for word in ("BETTER", "EQUIVALENT", "INCONCLUSIVE"):
        verdict = build.verdict(verdict=word, recommendation=Recommendation(action=action, reason="", pins={}))
        assert top.next_step(verdict, RU) == said
        assert not top.next_is_the_tools(verdict, RU)


def test_an_advice_without_a_translation_is_quoted() -> None:
    verdict = build.verdict(recommendation=Recommendation(action="plug it in again", reason="", pins={}))
    assert '<span lang="en">Plug it in again.</span>' in render(verdict, language="ru")


def test_every_advice_has_its_text() -> None:
    for language in ("en", "ru"):
        texts = {name.removeprefix("next.") for name in catalogue(language) if name.startswith("next.")}
        assert texts == set(top.ACTIONS)


def test_an_undecided_gate_has_not_failed() -> None:
    host = build.host_verdict(gates=build.gates(launch_differs_as_declared=(None, "no record")), verdict="INVALID")
    verdict = build.verdict(verdict="INVALID", reason="no run left a record", hosts=[host])
    assert top.headline(verdict, RU) == "Вывода сделать нельзя: ни один запуск не оставил записи."
    assert top.headline(msgspec.structs.replace(verdict, reason="the moon was full"), RU) == RU("head.invalid")


def test_a_failed_gate_is_named_with_what_it_asks() -> None:
    said = top.headline(build.invalid(), RU)
    assert "не пройдена проверка treatment_delivered. Проверяется: " in said


def test_facts_of_a_host_are_russian_with_their_numbers() -> None:
    """ "2,299 usable blocks" is two point three in Russian."""
    page = render(build.verdict(), language="ru").replace("\u202f", " ").replace("\u00a0", " ")
    english = ("usable blocks", "random weights", "trained weights", "chunks of", " bytes)", " CPUs<", "persistence m")
    assert [text for text in english if text in page] == []
    assert "случайные веса" in page and "доступных блоков" in page
    host = page[page.index("доступных блоков") :][:80]
    assert not re.search(r"\d,\d{3}\b", host)
    gpu = {"name": "NVIDIA H200", "memory.total": "143771", "persistence_mode": "Enabled"}
    assert gpus_text([gpu], RU).replace("\u00a0", " ") == "NVIDIA H200, 140,4 ГиБ, режим persistence включён"
    heads = [RU(f"runs.{name}") for name in ("run", "pair", "start", "phases", "stop", "ram", "outcome")]
    assert len({head.split(" (")[0] for head in heads}) == len(heads)


def test_no_guard_is_not_called_proved() -> None:
    texts = " ".join(catalogue("ru").values())
    assert "как показано, не хуже" not in texts


def test_a_worse_guard_forbids_adopting_in_russian_too() -> None:
    items = [
        msgspec.structs.replace(item, verdict="WORSE") if item.role == "guard" else item for item in build.comparisons()
    ]
    said = {label: text for label, text, _ in top.answers(build.verdict(comparisons=items), RU)}
    assert "принимать нельзя" in said[RU("answer.elsewhere")]


def test_a_reason_in_an_invalid_brief_that_has_no_translation_is_marked_as_english() -> None:
    unknown = build.verdict(verdict="INVALID", reason="the moon was full over the rack")
    assert '<dd lang="en">The moon was full' in render(unknown, language="ru")
    assert '<dd lang="en">' not in render(unknown)
    assert "Не пройдена проверка treatment_delivered" in render(build.invalid(), language="ru")


def test_the_same_within_a_margin_names_metric_and_place() -> None:
    verdict = build.verdict(verdict="EQUIVALENT", comparisons=build.comparisons(verdict="EQUIVALENT", effect=1.0))
    said = top.headline(verdict, RU)
    assert "одинаковы в пределах" in said
    assert "для вытесненного префикса" in said


def test_a_real_cause_of_an_invalid_verdict_is_the_headline_and_is_said_once() -> None:
    detail = "return: pressure of 90 blocks is under 1.2 × 96 usable GPU blocks"
    verdict = build.verdict(verdict="INVALID", reason=f"gate working_set failed: {detail}", break_even=None)
    expected = "не пройдена проверка working_set: return: давление 90 блоков меньше 1,2 × 96 блоков GPU"
    assert top.headline(verdict, RU) == f"Вывода сделать нельзя: {expected}."
    assert expected not in " ".join(text for _, text, _ in top.answers(verdict, RU))


def test_a_reason_of_an_advice_is_given_without_the_advice_again() -> None:
    advice = Recommendation(
        action="adopt more_kv", reason="more_kv is BETTER by the primary comparison and no guard is WORSE", pins={}
    )
    page = Page(render(build.verdict(recommendation=advice), language="ru")).text.replace("\u00a0", " ")
    assert "Принять more_kv." in page
    assert "more_kv: по главному сравнению BETTER, и ни один страж не WORSE." in page
    assert "Принять more_kv. more_kv" not in page
