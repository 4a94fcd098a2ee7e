"""Sentences of the analysis in the page's language: each form once, with holes for its numbers and names. Pure.

Gates, reasons and caveats are written in English by what decides them, and a verdict keeps them so. A catalogue
`texts/said.LANGUAGE.yml` holds the English form of each with its translation, as gettext does, and
`texts/known.LANGUAGE.yml` those of what is known of engines' failures and defects; a sentence is known by its form, so
that verdicts of earlier releases are translated, too. What no form fits stays English and is told apart, for a page to
mark it so. English has forms where a sentence quotes the name of a metric.
"""

import functools
import re
from collections.abc import Callable, Sequence
from importlib import resources

import yaml
from msgspec import Struct

from kvtrial.analysis.report.words import Words

HOLE = re.compile(r"\{([a-z]+)(\d*)\}")
NUMBER = r"[-+−×x]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?%?|nan|inf"
HOLES = {
    "n": NUMBER,
    "q": rf"not measured|(?:{NUMBER})(?: ?(?:%|ms|s|min|h|B|[KMGT]iB)(?: \d+ (?:s|min))?)?",
    "b": r"\d[\d,]*",
    "sec": NUMBER,
    "diff": NUMBER,
    "w": r"[^\s;,()]+",
    "s": r".+?",
    "title": r".+?",
    "profile": r"[A-Za-z0-9_.-]+",
    "metric": r"[a-z0-9]+(?:_[a-z0-9]+)+",
    "phase": r"[A-Za-z0-9_.-]+",
}
"""What fits a hole, by its kind."""
OPTIONAL = re.compile(r"\\\[(\w+)\\\]")
PROSE = re.compile(r"[A-Za-z]{2,} [a-z]{2,}")
"""Two words in a row: a text in which no form was found, and which is more than names and numbers."""
STOP = re.compile(r"[.?!]?\n|[.?!](?:$| )")
"""What ends a sentence."""
DEPTH_MAX = 6
LIST_ITEMS_MAX = 40
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Part(Struct, frozen=True):
    """A stretch of text; `english` where it stands in English on a page of another language."""

    text: str
    english: bool = False


class Form(Struct, frozen=True):
    """An English form as a pattern, the kinds of its holes, and the translation, texts and holes in turn."""

    pattern: re.Pattern[str]
    kinds: dict[str, str]
    translation: list[str]


def said(text: str, words: Words) -> list[Part]:
    """`text`, a sentence or some of the analysis, in the page's language; what no form fits is left and marked."""
    return list(_said(text, words.language))


def said_text(text: str, words: Words) -> str:
    """The same as one text, where nothing can be marked."""
    return "".join(part.text for part in said(text, words))


def is_said(text: str, words: Words) -> bool:
    """Whether nothing of `text` stands in English on a page of another language."""
    return not any(part.english for part in said(text, words))


@functools.cache
def forms(language: str) -> list[Form]:
    """The forms of a language, those with the most text of their own first."""
    folder = resources.files("kvtrial.analysis.report") / "texts"
    paths = [folder / f"{name}.{language}.yml" for name in ("known", "said")]
    found = [yaml.load(path.read_text(encoding="utf-8"), _Loader) for path in paths if path.is_file()]
    listed = {english: translation for forms in found for english, translation in forms.items()}.items()
    return [_form(*item) for item in sorted(listed, key=lambda item: len(HOLE.sub("", item[0])), reverse=True)]


def _form(english: str, translation: str) -> Form:
    pattern, kinds, end = "", {}, 0
    for hole in HOLE.finditer(english):
        pattern += re.escape(english[end : hole.start()]) + f"(?P<{hole[1]}{hole[2]}>{HOLES[hole[1]]})"
        kinds[hole[1] + hole[2]] = hole[1]
        end = hole.end()
    pattern = OPTIONAL.sub(r"(?:\1)?", pattern + re.escape(english[end:]))
    return Form(re.compile(pattern), kinds, re.split(r"\{(\w+)\}", translation))


@functools.lru_cache(maxsize=4096)
def _said(text: str, language: str) -> tuple[Part, ...]:
    words = Words(language)
    found: list[Part] = []
    for line in text.splitlines(keepends=True):
        for sentence, end in _sentences(line):
            parts = _sentence(sentence, words) if sentence else []
            found += [*parts, Part(end, english=bool(parts) and parts[-1].english)]
    return tuple(_joined(found))


def _sentence(text: str, words: Words) -> list[Part]:
    """One sentence; a form may begin small where the sentence begins with a capital, or with a metric's name."""
    parts = _joined(_clauses(text, words, 0))
    first = text.split(" ")[0]
    if not first[:1].isupper() and ("_" not in first or parts[0].text.startswith(first)):
        return parts
    small = _joined(_clauses(text[0].lower() + text[1:], words, 0))
    # English has forms for names of metrics alone, and nothing in it is marked.
    formed = words.is_english and "".join(part.text for part in small) != text[0].lower() + text[1:]
    if formed or _english(small) < _english(parts):
        parts = small
    begun = parts[0].text
    if not parts[0].english and begun.split(" ")[0].isalpha():
        parts = [Part(begun[:1].upper() + begun[1:]), *parts[1:]]
    return parts


def _english(parts: Sequence[Part]) -> int:
    return sum(len(part.text) for part in parts if part.english)


def _sentences(text: str) -> list[tuple[str, str]]:
    """(sentence, what ends it) of a text; a point inside brackets ends none."""
    found, begun, depth = [], 0, 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth <= 0 and (stop := STOP.match(text, place)):
            end = stop.end()
            found.append((text[begun:place], text[place:end]))
            begun = end
    return [*found, (text[begun:], "")] if begun < len(text) else found


def _split(text: str, mark: str) -> list[str]:
    """`text` cut at a mark that stands in no brackets."""
    found, begun, depth = [], 0, 0
    for place, character in enumerate(text):
        depth += (character in "([") - (character in ")]")
        if depth <= 0 and place >= begun and text.startswith(mark, place):
            found.append(text[begun:place])
            begun = place + len(mark)
    return [*found, text[begun:]]


def _clauses(text: str, words: Words, depth: int) -> list[Part]:
    """The clauses of a sentence, each by its own form."""
    return _between([_clause(clause, words, depth) for clause in _split(text, "; ")], "; ")


def _clause(text: str, words: Words, depth: int) -> list[Part]:
    """One clause; a title inside a sentence begins with a capital, its form does not."""
    known = _known(text, words, depth)
    if not known and depth and text[:1].isupper():
        known = _known(text[0].lower() + text[1:], words, depth)
    return known or [Part(*_left(text, words))]


def _left(text: str, words: Words) -> tuple[str, bool]:
    """What no form fits: names and numbers as they are, prose in English."""
    if words.is_english:
        return text, False
    return (text, True) if PROSE.search(text) else (text, False)


def _known(text: str, words: Words, depth: int) -> list[Part]:
    """A clause by the form that fits it, or by its pieces; empty where none does."""
    if depth > DEPTH_MAX or not text:
        return []
    if formed := _formed(text, words, depth):
        return formed
    ways: Sequence[Callable[[str, Words, int], list[Part]]] = (_bracketed, _headed, _listed)
    return next((parts for way in ways if (parts := way(text, words, depth + 1))), [])


def _formed(text: str, words: Words, depth: int) -> list[Part]:
    """A clause by the first form that fits it."""
    for form in forms(words.language):
        if found := form.pattern.fullmatch(text):
            return _filled(form, found, words, depth)
    return []


def _filled(form: Form, found: re.Match[str], words: Words, depth: int) -> list[Part]:
    parts: list[Part] = []
    for place, piece in enumerate(form.translation):
        if place % 2 == 0:
            parts.append(Part(piece))
            continue
        value, kind = found[piece], form.kinds[piece]
        if kind == "s":
            parts += _clauses(value.strip(), words, depth + 1)
        elif kind == "title":
            parts.append(Part(words.title(value), words.is_quoted(value)))
        elif kind == "profile":
            parts.append(Part(words.or_else(f"profile.{value}", value)))
        elif kind == "metric":
            parts.append(Part(words.metric(value)))
        elif kind == "phase":
            parts.append(Part(words.place(value)))
        elif kind == "b":
            parts.append(Part(words.bytes(float(value.replace(",", "")))))
        elif kind in ("sec", "diff"):
            parts.append(Part(words.seconds(float(value), signed=kind == "diff")))
        else:
            parts.append(Part(value if kind == "w" else words.local(value)))
    return parts


def _bracketed(text: str, words: Words, depth: int) -> list[Part]:
    """ "head (what is in brackets)", both by forms of their own."""
    if not text.endswith(")"):
        return []
    pieces = _split(text[::-1].translate(_TURNED), " ")
    head, inside = text[: len(text) - len(pieces[0])].rstrip(), text[len(text) - len(pieces[0]) :]
    known = _known(head, words, depth) if inside.startswith("(") and head else []
    return [*known, Part(" ("), *_clauses(inside[1:-1], words, depth), Part(")")] if known else []


_TURNED = str.maketrans("()", ")(")


def _headed(text: str, words: Words, depth: int) -> list[Part]:
    """ "where: what", the place a name or by a form of its own."""
    head, mark, rest = text.partition(": ")
    if not mark or not rest:
        return []
    heading = _formed(head, words, depth) if PROSE.search(head) else [Part(head)]
    known = _known(rest, words, depth)
    if not heading or (not known and " " not in head):
        return []
    return [*heading, Part(": "), *(known or [Part(*_left(rest, words))])]


def _listed(text: str, words: Words, depth: int) -> list[Part]:
    """A list with commas, every item by a form or a name."""
    items = _split(text, ", ")
    if not 1 < len(items) <= LIST_ITEMS_MAX:
        return []
    known = [_known(item, words, depth) for item in items]
    if not any(known) or any(not found and PROSE.search(item) for found, item in zip(known, items, strict=True)):
        return []
    return _between([found or [Part(item)] for found, item in zip(known, items, strict=True)], ", ")


def _between(groups: Sequence[list[Part]], mark: str) -> list[Part]:
    return [part for place, group in enumerate(groups) for part in ([Part(mark)] if place else []) + group]


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Neighbours of one language as one part."""
    found: list[Part] = []
    for part in parts:
        if found and found[-1].english == part.english:
            found[-1] = Part(found[-1].text + part.text, part.english)
        elif part.text:
            found.append(part)
    return found
