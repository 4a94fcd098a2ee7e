import re
from pathlib import Path
from string import Formatter
from typing import get_args

import pytest
import report_builder as build
import yaml
from kvtrial.analysis import answer, report
from kvtrial.analysis.gates import GATES
from kvtrial.analysis.report.gates import gate_rows
from kvtrial.analysis.report.preemption import MEASURES
from kvtrial.analysis.report.words import Words, catalogue, signs
from kvtrial.record.errors import UnusableInput
from kvtrial.record.ladder import Pattern
from kvtrial.record.protocol import Objective
from kvtrial.record.verdict import Word
from ladder_builder import ladder_page
from test_report_fleet import fleet_page
from test_report_page import Page, render

ROOM = Path(report.__file__).parent
TERMINALS = ("word.", "metric.", "short.", "said.")
"""Names that only other languages have: in English the terminal's words hold."""


def fields(text: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(text) if name}


def test_both_catalogues_have_the_same_names_and_fields() -> None:
    english, russian = catalogue("en"), catalogue("ru")
    extra = {name for name in set(english) ^ set(russian) if not name.startswith(TERMINALS)}
    assert extra == set()
    for name, text in english.items():
        # English leaves out what the terminal's sentence says already.
        assert fields(text) <= fields(russian[name]) or name == "answer.counts", name
        assert fields(russian[name]) <= fields(text) or name == "answer.counts", name


def test_every_text_that_is_asked_for_is_there() -> None:
    asked: set[str] = set()
    for path in [*ROOM.glob("*.py"), *ROOM.glob("templates/*.j2")]:
        asked |= set(re.findall(r'\b(?:words|t)\(\s*"([a-z0-9_.A-Z]+)"', path.read_text()))
    assert len(asked) > 150
    assert {name for name in asked if not name.endswith(".")} <= set(catalogue("en"))


def test_every_text_is_asked_for_by_name_or_by_its_family() -> None:
    source = "".join(path.read_text() for path in [*ROOM.glob("*.py"), *ROOM.glob("templates/*.j2")])
    families = set(re.findall(r"""f["']([a-z_]+\.(?:[a-z_]+\.?)?)\{""", source))
    families |= set(re.findall(r'"([a-z_]+\.)" ~', source))
    families |= {"n.", "n.cost.", "next.", "size."}
    asked = set(re.findall(r"""["']([a-z0-9_]+(?:\.[A-Za-z0-9_ ]+)*)["']""", source))
    unused = [
        name
        for name in catalogue("en")
        if name not in asked and not any(name.startswith(family) for family in families)
    ]
    assert unused == []


def test_every_member_of_a_family_is_there() -> None:
    for language in ("en", "ru"):
        words = Words(language)
        for family, members in {
            "evidence.": ["gpu", "cpu", "standin", "none"],
            "limit.": ["gpu", "cpu", "cpu_shown", "standin", "none"],
            "state.": get_args(answer.GateState),
            "means.": get_args(Word),
            "level.": MEASURES,
            "outcome.": ["completed", "engine_fault", "environment_fault"],
            "pattern.": get_args(Pattern),
            "objective.": Objective.__struct_fields__,
        }.items():
            assert [name for name in members if not words.has(f"{family}{name}")] == [], family


def test_every_gate_is_explained_and_nothing_else_is() -> None:
    for language in ("en", "ru"):
        explained = {name.removeprefix("gate.") for name in catalogue(language) if name.startswith("gate.")}
        assert explained == set(GATES)


@pytest.mark.parametrize(("language", "asked"), [("en", "Asked: "), ("ru", "Проверяется: ")])
def test_beside_a_failed_gate_stands_what_was_asked_not_what_holds(language: str, asked: str) -> None:
    words = Words(language)
    notes = {row.head: row for row in gate_rows(build.invalid(), words)}
    for name, row in notes.items():
        assert row.note.startswith(asked) == (row.kind != "passed"), name
    assert notes["treatment_delivered"].kind == "failed"


@pytest.mark.parametrize("page", [lambda: render(build.verdict(), language="ru"), lambda: ladder_page("ru"),
                                  lambda: fleet_page("ru")])  # fmt: skip
def test_a_russian_page_is_russian_and_marks_what_it_quotes(page) -> None:
    made = page()
    assert '<html lang="ru">' in made
    assert Page(made).open == []
    own = re.sub(r'<span lang="en">.*?</span>', "", made, flags=re.DOTALL)
    headings = re.findall(r"<h[23][^>]*>([^<]+)<", own)
    assert headings
    assert [text for text in headings if not re.search("[а-яё]", text, flags=re.IGNORECASE)] in ([], ["RAM и VRAM"])


def test_the_russian_sentence_says_what_the_english_says() -> None:
    page = Page(render(build.verdict(), language="ru")).text.replace("\u00a0", " ")
    assert "Первый токен вытесненного префикса приходит в 6,6 раза раньше с offload, чем с control." in page
    assert "×0,151" in page
    assert "интервал 97 %" in page
    assert "−0,200" in page


def test_russian_numbers_and_counts_are_russian() -> None:
    words = Words("ru")
    assert words.seconds(0.0342) == "34,2 мс"
    assert words.bytes(1.5 * 2**30) == "1,5 ГиБ"
    assert words.whole(16777216) == "16\u202f777\u202f216"
    said = [words.count(number, "run").replace("\u00a0", " ") for number in (1, 2, 5, 11, 21, 112)]
    assert said == ["1 запуск", "2 запуска", "5 запусков", "11 запусков", "21 запуск", "112 запусков"]
    assert Words("en").seconds(0.0342) == "34.2 ms"


def test_numbers_have_one_sign_and_one_form_on_every_page() -> None:
    said = signs("x0.204 (.17 to 0.23), 96.9% interval, p <.001, -3 of -0.5, x86_64, GPU-2624, 2026-11-29, p01-1")
    assert said.replace("\u00a0", " ") == (
        "×0.204 (0.17 to 0.23), 96.9 % interval, p <0.001, −3 of −0.5, x86_64, GPU-2624, 2026-11-29, p01-1"
    )


@pytest.mark.parametrize(
    ("value", "unit", "english", "russian"),
    [
        (1, "replica", "+1 replica", "+1 реплика"),
        (2, "replica", "+2 replicas", "+2 реплики"),
        (-23, "sequence", "−23 sequences", "−23 последовательности"),
        (0.0009765625, "GiB of KV cache", "+1 MiB of KV cache", "+1 МиБ KV-кеша"),
        (1, "sheep", "+1 sheep", "+1 sheep"),
    ],
)
def test_what_a_way_takes_is_in_its_form(value: float, unit: str, english: str, russian: str) -> None:
    assert Words("en").cost(value, unit).replace("\u00a0", " ") == english
    assert Words("ru").cost(value, unit).replace("\u00a0", " ") == russian


def test_a_fraction_takes_its_own_form() -> None:
    said = [Words("ru").amount(value, "preemption").replace("\u00a0", " ") for value in (62.5, 1.0, 5.0, 0.0)]
    assert said == ["62,5 вытеснения", "1 вытеснение", "5 вытеснений", "0 вытеснений"]
    assert Words("en").amount(1.5, "preemption").replace("\u00a0", " ") == "1.5 preemptions"


def test_every_shipped_title_and_question_is_there_in_russian() -> None:
    words = Words("ru")
    for path in sorted(build.PROTOCOLS.glob("*.yml")):
        raw = yaml.safe_load(path.read_text())
        said = [raw.get("question"), *((arm or {}).get("title") for arm in (raw.get("arms") or {}).values())]
        assert [text for text in said if text and words.is_quoted(text)] == [], path.name


def test_a_language_without_a_catalogue_is_refused() -> None:
    with pytest.raises(UnusableInput, match="give en or ru"):
        Words("fr")
