import ast
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import report_builder as build
import test_report_page as pages
import yaml
from kvtrial.analysis import answer
from kvtrial.analysis.report import top
from kvtrial.analysis.report.said import HOLE, forms, is_said, said, said_text
from kvtrial.analysis.report.words import Words
from msgspec.structs import replace

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "analysis" / "kvtrial" / "analysis"
RU = Words("ru")
WRITERS = (
    *(f"gates/{path.name}" for path in sorted((SOURCES / "gates").glob("*.py"))),
    "faults.py", "hostverdict.py", "verdict.py", "compare.py", "effect.py", "oddhost.py", "recommend.py",
    "breakeven.py", "tiers.py", "regime.py", "ledger.py", "mixes.py", "prices.py",
)  # fmt: skip
"""What writes the sentences of a verdict."""
NO_SENTENCE = {
    "not told",
    "one burst",
    "not seen",
    "planned hosts are valid",
    "engine fault",
    "the variant",
    "shown on a",
}
"""Values and marks that a page has words of its own for, or that other pieces hold."""
NO_SENTENCE_FROM = ("UnusableInput", "ValueError", "re.compile")
"""What a user is refused with stands on no page."""
TWO_WORDS = re.compile(r"[A-Za-z]{2,} [a-z]{2,}")


def pieces(source: str) -> Iterator[str]:
    """Every stretch of two words or more that a sentence of this source holds between its numbers and names."""
    tree = ast.parse(source)
    passed_over: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for inner in body if isinstance(body, list) else []:
            if isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant):
                passed_over.add(id(inner.value))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in NO_SENTENCE_FROM:
            passed_over |= {id(inner) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) not in passed_over and isinstance(node, ast.Constant) and isinstance(node.value, str):
            for piece in re.split(r"; |\. ", node.value):
                if TWO_WORDS.search(piece):
                    yield piece.strip(" ,.;:()?")


def plain(text: str) -> str:
    return " ".join(re.findall(r"[A-Za-z0-9#'-]+", text))


@functools.cache
def english_of_forms() -> str:
    """The English of all forms, words alone, a line each, with # for every hole."""
    text = (SOURCES / "report" / "texts" / "said.ru.yml").read_text(encoding="utf-8")
    lines = [plain(HOLE.sub(" # ", english).replace("[s]", "s")) for english in yaml.safe_load(text)]
    return "\n".join([*lines, *(line.replace("preemptions counted", "preemption counted") for line in lines)])


def known(piece: str) -> bool:
    """Whether a form holds the piece; a number in front of it, and its unit, belong to the hole."""
    return re.sub(r"^(?:s|ms|x|0) ", "", plain(piece)) in english_of_forms()


@pytest.mark.parametrize("name", WRITERS)
def test_every_sentence_that_is_written_has_a_russian_form(name: str) -> None:
    written = set(pieces((SOURCES / name).read_text(encoding="utf-8")))
    assert {piece for piece in written - NO_SENTENCE if not known(piece)} == set()


def test_a_new_sentence_would_be_found() -> None:
    assert list(
        pieces('def f():\n    """A docstring of many words."""\n    return f"{n} engines fell asleep; {m} more"\n')
    ) == ["engines fell asleep"]
    assert not known("engines fell asleep")
    assert known("local hit tokens in")


@pytest.mark.parametrize("language", ["en", "ru"])
def test_a_translation_has_the_holes_of_its_form_and_no_other(language: str) -> None:
    for form in forms(language):
        assert set(form.translation[1::2]) == set(form.kinds), form.pattern.pattern


def sentences_of(path: Path) -> Iterator[str]:
    verdict = json.loads(path.read_text(encoding="utf-8"))
    yield verdict["reason"]
    yield from (verdict["recommendation"]["reason"], *verdict["caveats"])
    yield from (gate["detail"] for host in verdict["hosts"] for gate in host["gates"])
    yield from (item["note"] for item in verdict["comparisons"])
    yield from (verdict.get("ladder") or {}).get("regime", [])
    yield (verdict.get("break_even") or {}).get("note") or ""
    yield (verdict.get("tier_budget") or {}).get("advice") or ""


def test_what_real_campaigns_say_is_wholly_russian() -> None:
    paths = sorted((ROOT / "docs" / "results").glob("*/*/verdict.json"))
    assert len(paths) > 5
    english = {text for path in paths for text in sentences_of(path) if not is_said(text, RU)}
    assert english == set()


def known_of_engines() -> Iterator[str]:
    """Causes, what to do and titles of defects, with something in each hole."""
    data = ROOT / "analysis" / "kvtrial" / "record" / "data"
    for cause in yaml.safe_load((data / "log_causes.yml").read_text())["causes"]:
        yield from (re.sub(r"\{\w+\}", "3.5", cause[name]) for name in ("cause", "fix"))
    for hazard in yaml.safe_load((data / "hazards.yml").read_text())["hazards"]:
        yield f"{hazard['title']} (#12345); concerns offload, control."


def test_causes_of_failures_and_titles_of_defects_are_russian() -> None:
    assert [text for text in known_of_engines() if not is_said(answer.sentence(text), RU)] == []
    assert said_text("Guard missing: The engine process died (#1); concerns offload.", RU).endswith(
        "процесс движка умер (#1); касается: offload."
    )


def test_the_russian_page_says_why_an_engine_failed() -> None:
    fault = build.died().fault
    assert fault is not None
    told = replace(
        fault,
        cause="/dev/shm is too small: 512 MiB are needed, 64 MiB are free. It is no GPU memory.",
        fix="Give 1 or more.",
    )
    page = pages.render(build.engine_fault(), [*build.records(), build.died(fault=told)], language="ru")
    text = pages.Page(page).text.replace("\u00a0", " ")
    assert "/dev/shm слишком мал: нужно 512 МиБ, свободно 64 МиБ. Это не память GPU." in text
    assert "Дайте 1 или больше." in text
    assert "too small" not in page


CASES = {
    "hosts differ in driver: 580.126 (5), 570.86 (2: g03, g05); the verdict is over hosts that are not alike":
    "хосты различаются (driver): 580.126 (5), 570.86 (2: g03, g05); вердикт вынесен по неодинаковым хостам",
    "gate working_set failed: return: pressure 12 blocks = 0.1 × 96 usable GPU blocks (and 1 more: hazards)":
    "не пройдена проверка working_set: return: давление 12 блоков = 0,1 × 96 блоков GPU (и ещё 1: hazards)",
    "pair 3, arm offload, phase return: 1,024 prompt tokens came from the engine's own prefix cache; and 4 more":
    "пара 3, плечо offload, фаза return: из кеша префиксов самого движка пришло токенов: 1\u202f024; и ещё 4",
    "2 of 6 pairs are valid, at least 6 are needed: with fewer the exact two-sided test cannot reach p < .05":
    "годных пар 2 из 6, нужно не меньше 6: с меньшим числом точный двусторонний критерий не достигает p < 0,05",
    "ttft_median_seconds of return, offload against control: ×0.15 [0.14, 0.2] at 96.9%, p = 0.031, 6 pairs":
    "Медиана времени до первого токена для вытесненного префикса, offload относительно control: "
    "×0,15 [0,14; 0,2] при доверии 96,9\u00a0%, p = 0,031, пар 6",
    "Adopt more_kv. more_kv is BETTER by the primary comparison and no guard is WORSE.":
    "Принять more_kv. more_kv: по главному сравнению BETTER, и ни один страж не WORSE.",
    "a request stalls 0.0954 s less and queues 3.55e-06 s longer (sum -0.0954 s, interval -0.105 to -0.0931)":
    "запрос простаивает на 95,4 мс меньше и ждёт в очереди на 0,00355 мс дольше "
    "(вместе −95,4 мс, интервал −105 мс … −93,1 мс)",
}  # fmt: skip


@pytest.mark.parametrize("english", CASES)
def test_a_sentence_is_said_in_russian_with_its_numbers(english: str) -> None:
    assert said_text(english, RU) == CASES[english]


def test_what_no_form_fits_is_marked_and_the_rest_is_not() -> None:
    parts = said("h1: engine faults: crash of arm offload in pair 2, phase return: the core died of <b>grief</b>", RU)
    assert [part.text for part in parts if part.english] == ["the core died of <b>grief</b>"]
    assert parts[0].text == "h1: отказы движка: crash: плечо offload, пара 2, фаза return: "
    assert [part.english for part in said("the moon is full", RU)] == [True]
    assert [part.english for part in said("the moon is full", Words("en"))] == [False]


def test_the_russian_page_marks_english_and_escapes_it() -> None:
    verdict = build.invalid()
    host = verdict.hosts[0]
    gates = [replace(gate, detail="it broke <script>") if not gate.holds else gate for gate in host.gates]
    page = pages.render(replace(verdict, hosts=[replace(host, gates=gates)], gates=[]), language="ru")
    assert '<span lang="en">it broke &lt;script&gt;</span>' in page
    assert "не пройдена" in page


def test_why_names_a_metric_in_words_in_both_languages() -> None:
    reason = "ttft_median_seconds of return, offload against control: ×0.99 [0.96, 1.1] at 96.9%, p = 0.44, 6 pairs"
    verdict = replace(build.verdict(), reason=reason, verdict="INCONCLUSIVE")
    for language, expected in (("en", "Median time to first token"), ("ru", "Медиана времени до первого токена")):
        words = Words(language)
        why = {label: said_text(text, words) for label, text, _ in top.answers(verdict, words)}
        shown = [why.get(words("answer.why"), ""), said_text(answer.headline(verdict), words)]
        assert any(text.startswith(expected) for text in shown)
        assert "ttft_median_seconds of return" not in " ".join([*shown, *why.values()])


@pytest.mark.parametrize(
    "hostile", ["(" * 900, ", ".join("ab cd" for _ in range(400)), "a: " * 600, "; x" * 600, "x or " * 300]
)
def test_a_long_text_of_marks_is_left_as_it_is(hostile: str) -> None:
    assert said_text(hostile, RU) == hostile
