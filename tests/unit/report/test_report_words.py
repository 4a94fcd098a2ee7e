import re
from pathlib import Path
from string import Formatter

import pytest
import report_builder as build
from kvtrial.analysis import report
from kvtrial.analysis.gates import GATES
from kvtrial.analysis.report.gates import gate_rows
from kvtrial.analysis.report.words import Words, catalogue
from kvtrial.record.errors import UnusableInput
from ladder_builder import ladder_page
from test_report_fleet import fleet_page
from test_report_page import Page, render

ROOM = Path(report.__file__).parent
TERMINALS = ("word.", "metric.", "short.")
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
    assert 'lang="en"' in made


def test_the_russian_sentence_says_what_the_english_says() -> None:
    page = Page(render(build.verdict(), language="ru")).text.replace("\u00a0", " ")
    assert "Первый токен вытесненного префикса приходит в 6,6 раза раньше с offload, чем с control." in page
    assert "×0,151" in page
    assert "интервал 97 %" in page
    assert "-0,200" in page


def test_russian_numbers_and_counts_are_russian() -> None:
    words = Words("ru")
    assert words.seconds(0.0342) == "34,2 мс"
    assert words.bytes(1.5 * 2**30) == "1,5 ГиБ"
    assert words.whole(16777216) == "16\u202f777\u202f216"
    said = [words.count(number, "run").replace("\u00a0", " ") for number in (1, 2, 5, 11, 21, 112)]
    assert said == ["1 запуск", "2 запуска", "5 запусков", "11 запусков", "21 запуск", "112 запусков"]
    assert Words("en").seconds(0.0342) == "34.2 ms"


def test_a_language_without_a_catalogue_is_refused() -> None:
    with pytest.raises(UnusableInput, match="give en or ru"):
        Words("fr")
