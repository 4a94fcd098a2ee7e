"""The report's texts: one catalogue a language, and numbers as that language writes them.

A text has a name; `texts/en.yml` and `texts/ru.yml` hold the same names. Sentences of the verdict and of gates come
from the records' analysis in English; where the catalogue has no text for them, a page in another language quotes them
and marks them as English.
"""

import functools
import re
from importlib import resources
from typing import Any

import yaml

from kvtrial.analysis import answer
from kvtrial.record.errors import UnusableInput

LANGUAGES = ("en", "ru")
NBSP = "\u00a0"
_RU_UNITS = {
    "not measured": "не измерено", "no interval": "без интервала", "ms": "мс", "s": "с", "min": "мин", "h": "ч",
    "B": "Б", "KiB": "КиБ", "MiB": "МиБ", "GiB": "ГиБ", "TiB": "ТиБ", "to": "…", "tokens per second": "токенов/с",
    "preemptions per 1,000 requests": "вытеснений на 1000 запросов", "per 1,000 requests": "на 1000 запросов",
}  # fmt: skip
MINUS = "\u2212"
_TIMES = re.compile(r"(?<!\w)x(?=\d[\d,]*(?:\.\d+)?(?![\w.-]))")
_TIMES_IN_A_SENTENCE = re.compile(
    r"(?<!\w)x(?=\d[\d,]*(?:\.\d+(?![\w.-])| \(-?[\d.,]+ to -?[\d.,]+\)|, \d+ ?% interval| or more))"
)
"""A name may be x2 as well: a ratio has a fraction, an interval, or so much "or more"."""
_MINUS = re.compile(r"(?<![\w.,)\]\-=/])-(?=\d)")
_MINUS_IN_A_SENTENCE = re.compile(r"(--?[A-Za-z][\w.-]* (?:[A-Za-z][\w.-]*[ =])?)?(?<![\w.,)\]\-=/])-(?=\d)")
"""Behind an option stands what a shell is to take."""
_SIGNS = (
    (re.compile(r"(?<![\w.,])\.(?=\d)"), "0."),
    (re.compile(r"(?<=\d)%"), f"{NBSP}%"),
)
_UNIT = re.compile(r"(?<![\w.])(?:" + "|".join(sorted(map(re.escape, _RU_UNITS), key=len, reverse=True)) + r")(?!\w)")


def signs(text: str) -> str:
    """A sentence with numbers as the pages write them: ×0.2, 0.031, 97 %, −3; a terminal has x0.2, .031 and -3."""
    text = _TIMES_IN_A_SENTENCE.sub("×", text)
    text = _MINUS_IN_A_SENTENCE.sub(lambda found: found[0] if found[1] else MINUS, text)
    return _other_signs(text)


def _number_signs(text: str) -> str:
    """The same of a number by itself, which is no name."""
    return _other_signs(_MINUS.sub(MINUS, _TIMES.sub("×", text)))


def _other_signs(text: str) -> str:
    for found, written in _SIGNS:
        text = found.sub(written, text)
    return text


class Words:
    """Texts and numbers of one language: `words("gates.title")`, `words.seconds(0.2)`."""

    def __init__(self, language: str = "en") -> None:
        """Raises UnusableInput for a language that there is no catalogue of."""
        if language not in LANGUAGES:
            raise UnusableInput(f"--lang {language}: there is no such catalogue of texts; give en or ru.")
        self.language = language
        self.texts = catalogue(language)

    @property
    def is_english(self) -> bool:
        """Whether sentences of the analysis need no quoting."""
        return self.language == "en"

    def __call__(self, key: str, **values: Any) -> str:
        """The text of a name with its values put in."""
        text = self.texts[key]
        return text.format(**values) if values else text

    def has(self, key: str) -> bool:
        """Whether the catalogue has such a text."""
        return key in self.texts

    def or_else(self, key: str, default: str) -> str:
        """The text of a name, `default` where there is none (an arm, phase or gate that a user named)."""
        return self.texts.get(key, default)

    def count(self, number: int, noun: str) -> str:
        """ "1 pair", "6 pairs"; the catalogue's `n.NOUN` holds the forms, "one|many" or in Russian "one|few|many"."""
        return self.amount(number, noun)

    def amount(self, value: float, noun: str, *, signed: bool = False) -> str:
        """A number that need not be whole with its noun: "1 pair", "62.5 preemptions", "−23 sequences"."""
        shown = answer.number_text(value) if value != round(value) else f"{value:,.0f}"
        plus = "+" if signed and value > 0 else ""
        return f"{self.local(f'{plus}{shown}')}{NBSP}{self.form(value, noun)}"

    def form(self, value: float, noun: str) -> str:
        """The form of a noun that goes with a number."""
        fraction = value != round(value) and "." in answer.number_text(value)
        forms = self.texts[f"n.{noun}"].split("|")
        size = abs(round(value))
        if len(forms) == 2:
            return forms[0] if size == 1 and not fraction else forms[1]
        # In Russian a fraction takes the form of two.
        tens, ones = size % 100, size % 10
        few = fraction or (2 <= ones <= 4 and not 12 <= tens <= 14)
        return forms[1] if few else forms[0] if ones == 1 and tens != 11 else forms[2]

    def length(self, tokens: float | str, noun: str = "token") -> str:
        """A length: "8,200 tokens", "16k tokens"; `noun`: "of_tokens" where the sentence asks "of how many"."""
        if isinstance(tokens, str):
            # A name as 16k is of thousands.
            return f"{tokens}{NBSP}{self.form(1000, noun)}"
        return self.count(round(tokens), noun)

    def cost(self, value: float, unit: str) -> str:
        """What a change takes more of (negative: less), in its protocol's unit: "+1 MiB of KV cache", "+1 replica"."""
        size, _, what = unit.partition(" of ")
        if size == "GiB":
            return self(f"cost.{what}", size=self.bytes(value * 2**30, signed=True))
        return self.amount(value, f"cost.{unit}", signed=True) if self.has(f"n.cost.{unit}") else self.local(
            f"{value:+,.3g} {unit}"
        )  # fmt: skip

    def local(self, text: str) -> str:
        """A formatted number with its unit as this language writes it; not for sentences."""
        text = _number_signs(text)
        if self.is_english:
            return text
        text = _UNIT.sub(lambda found: _RU_UNITS[found[0]], text)
        text = re.sub(r"(?<=\d),(?=\d{3})", "\u202f", text)
        return re.sub(r"(?<=\d)\.(?=\d)", ",", text)

    def seconds(self, value: float | None, *, signed: bool = False) -> str:
        """A duration."""
        return self.local(answer.seconds_text(value, signed=signed))

    def bytes(self, value: float | None, *, signed: bool = False) -> str:
        """A size in binary units."""
        return self.local(answer.bytes_text(value, signed=signed))

    def share(self, value: float | None) -> str:
        """A share 0..1 in percent."""
        return self.local(answer.share_text(value))

    def number(self, value: float | None) -> str:
        """A plain number with three significant digits."""
        return self.local(answer.number_text(value))

    def whole(self, value: float | None) -> str:
        """A count; "–" where there is none."""
        return "–" if value is None or not answer.is_number(value) else self.local(f"{value:,.0f}")

    def piece(self, unit: str) -> str:
        """One of what a change takes: "GiB", "replica"."""
        if unit.startswith("GiB"):
            return self("unit.gib")
        return self.texts[f"n.cost.{unit}"].split("|")[0] if self.has(f"n.cost.{unit}") else unit

    def title(self, text: str) -> str:
        """An arm's title or a protocol's question, as a protocol says it; in another language where there is a text."""
        return self.or_else(f"said.{' '.join(text.split())}", text)

    def is_quoted(self, text: str) -> bool:
        """Whether a protocol's text stands in English on a page of another language."""
        return not self.is_english and self.title(text) == text

    def subject(self, phase: str) -> str:
        """What a phase asks for: "an evicted prefix", "an evicted prefix of 16k tokens"."""
        if mix := answer.MIX.fullmatch(phase):
            return self("subject.mix", share=int(mix[1]))
        if found := answer.OF_LENGTH.fullmatch(phase):
            return self("subject.of_length", subject=self.subject(found[1]), tokens=self.length(found[2]))
        if found := answer.TOGETHER.fullmatch(phase):
            return self("subject.together", subject=self.subject(found[1]))
        return self.or_else(f"subject.{phase}", self("subject.other", phase=phase))

    def place(self, phase: str) -> str:
        """Where something was measured: "above the onset", "for an evicted prefix"."""
        if self.has(f"where.{phase}"):
            return self(f"where.{phase}")
        found = self.subject(phase)
        return self("where.other", phase=phase) if found == self("subject.other", phase=phase) else self(
            "where.for", subject=found
        )  # fmt: skip

    def metric(self, name: str) -> str:
        """A metric in words."""
        return self.or_else(f"metric.{name}", answer.METRIC_NAMES.get(name, name))

    def short_metric(self, name: str) -> str:
        """A metric in a word or two."""
        return self.or_else(f"short.{name}", answer.SHORT_NAMES.get(name, self.metric(name)))


@functools.cache
def catalogue(language: str) -> dict[str, str]:
    """The texts of a language, name → text."""
    path = resources.files("kvtrial.analysis.report") / "texts" / f"{language}.yml"
    return {str(key): str(text) for key, text in yaml.load(path.read_text(encoding="utf-8"), _Loader).items()}


_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
