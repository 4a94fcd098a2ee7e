"""The brief is half a page, whatever the campaign, and what it says names its arm, its length and its hosts."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import report_builder as build
from kvtrial.analysis import answer
from kvtrial.analysis.lengths import NEVER, Crossing, LengthFit, fits_of
from kvtrial.analysis.mixes import prompt_tokens
from kvtrial.analysis.protocols import load_protocol
from kvtrial.analysis.report import build_brief, top
from kvtrial.analysis.report.words import Words
from kvtrial.analysis.textfile import to_textfile
from kvtrial.record.protocol import Protocol
from kvtrial.record.verdict import BreakEven, Verdict
from ladder_builder import PRICES, ladder_brief, ladder_protocol, ladder_records, ladder_verdict
from test_report_page import Page, render

ROOT = Path(__file__).resolve().parents[3]
VERDICTS = sorted((ROOT / "docs" / "results").glob("*/*/verdict.json"))
WORDS_MAX = 285
EN = Words("en")


def words_of(brief: str) -> int:
    """Words, numbers and names; not the marks of a table."""
    return sum(any(character.isalnum() for character in word) for word in brief.split())


def protocol_of(path: Path, verdict: Verdict) -> Protocol:
    """As the campaign had it, or, where only its archive holds it, as it ships."""
    campaign = path.with_name("campaign.json")
    if campaign.is_file():
        return msgspec.convert(json.loads(campaign.read_text())["plan"]["protocol"], Protocol)
    return load_protocol(verdict.protocol, ROOT / "playbooks" / "protocols")


def of_today(verdict: Verdict, protocol: Protocol) -> Verdict:
    """The verdict with the arms of its break-even, which earlier releases did not keep."""
    even, declared = verdict.break_even, protocol.break_even
    if even is None:
        return verdict
    tokens = prompt_tokens(protocol, declared["hit"])
    even = msgspec.structs.replace(even, arm=declared["arm"], against=declared["against"], prefix_tokens=tokens)
    return msgspec.structs.replace(verdict, break_even=even)


def committed(path: Path, language: str = "en") -> str:
    verdict = msgspec.json.decode(path.read_bytes(), type=Verdict)
    protocol = protocol_of(path, verdict)
    fits = fits_of(verdict.campaign, protocol, verdict, {host.host: "a-model" for host in verdict.hosts})
    return build_brief(of_today(verdict, protocol), protocol, [], language=language, fits=fits).replace("\u00a0", " ")


@pytest.mark.parametrize("language", ["en", "ru"])
@pytest.mark.parametrize("path", VERDICTS, ids=lambda path: f"{path.parts[-3]}-{path.parts[-2]}")
def test_the_brief_of_every_committed_verdict_is_half_a_page(path: Path, language: str) -> None:
    said = committed(path, language)
    assert words_of(said) <= WORDS_MAX
    assert "report.html" in said.splitlines()[-1]


@pytest.mark.parametrize("language", ["en", "ru"])
def test_prices_and_a_fleet_are_half_a_page_too(language: str) -> None:
    assert words_of(ladder_brief(PRICES, language)) <= WORDS_MAX + 10
    assert words_of(build_brief(fleet(), build.protocol(), build.records(), language=language, fits=FITS)) <= WORDS_MAX


def test_the_parts_that_the_brief_owes_are_in_the_half_page() -> None:
    said = ladder_brief(PRICES)
    for part in (
        "Where preemptions are rare", "interactive | batch |", "Interactive and batch",
        "## Memory, replicas, context limit",
        "EUR/hour · per million tokens", "Stability of the process", "Quality of service", "What was not measured",
    ):  # fmt: skip
        assert part in said


# ------------------------------------------------------------------------------------------------------- break-even


def of_arms(**changes: object) -> Verdict:
    even = build.verdict().break_even
    assert even is not None
    return build.verdict(break_even=msgspec.structs.replace(even, **{"arm": "offload", "against": "control"} | changes))


def test_a_break_even_names_its_arms_and_length_wherever_it_stands() -> None:
    verdict = of_arms(prefix_tokens=8200)
    tile = next(" | ".join(merit) for merit in top.merits(verdict, EN) if merit[0].startswith("break-even"))
    assert tile.replace("\u00a0", " ") == (
        "break-even hit share | 8.3 % | interval 2 % to 19 %; offload against control, prefixes of 8,200 tokens"
    )
    said = build_brief(verdict, build.protocol(), build.records())
    assert "**When offloading pays**: offload against control: from 8.3 %" in said
    assert "return to an evicted prefix of 8,200 tokens" in said
    line = next(line for line in answer.ten_lines(verdict, "x") if line.startswith("Break-even"))
    assert line.startswith("Break-even: offload against control: it pays when more than 8.3 %")
    assert "of 8,200 tokens" in line
    labels = 'against="control",arm="offload",host="all",how="computed",prefix_tokens="8200",protocol="offload_return"'
    assert f"kvtrial_break_even_hit_share{{{labels}}} 0.083" in to_textfile(verdict)
    russian = build_brief(verdict, build.protocol(), build.records(), language="ru").replace("\u202f", " ")
    assert "offload относительно control: если к вытесненному префиксу в 8 200 токенов" in russian


def test_a_phase_of_prompts_has_one_length_and_a_mix_has_none() -> None:
    declared = build.protocol()
    assert prompt_tokens(declared, "return") == 528
    assert prompt_tokens(declared, "nowhere") is None
    mixes = load_protocol("offload_mix", ROOT / "playbooks" / "protocols")
    assert prompt_tokens(mixes, next(phase.name for phase in mixes.phases if phase.name.startswith("mix"))) is None


def test_a_verdict_of_an_earlier_release_has_no_arm_and_is_read() -> None:
    raw = json.loads(msgspec.json.encode(build.verdict()))
    for name in ("arm", "against", "prefix_tokens"):
        del raw["break_even"][name]
    read = msgspec.convert(raw, Verdict)
    assert read.break_even is not None
    assert read.break_even.arm == ""
    assert "**When offloading pays**: from 8.3 %" in build_brief(read, build.protocol(), build.records())


def test_where_another_arm_offloads_the_brief_says_so_and_what_it_takes() -> None:
    said = committed(next(path for path in VERDICTS if path.parts[-2] == "layout"))
    assert "**When offloading pays**: offload against control: from 5.4 %" in said
    assert "of 16,392 tokens" in said
    assert "**What it takes**: +36.49 GiB of the host's RAM at its peak with offload" in said
    assert "Memory was not compared" not in said
    assert (
        "**Also found**: The first token of an evicted prefix (16k tokens) comes 5.5 times sooner with offload" in said
    )


# ------------------------------------------------------------------------------------------------------------ guards


def test_undecided_guards_are_counted_and_named() -> None:
    said = build_brief(build.verdict(), build.protocol(), build.records())
    assert "Of 3 measures watched none is shown to be worse." in said
    assert "Undecided of them: 2 (first token, gap between tokens (p95))." in said


def test_measures_watched_name_their_arm_where_another_is_found_better_and_what_leans_to_worse_of_it_is_said() -> None:
    path = next(path for path in VERDICTS if path.parts[-2] == "layout")
    said = committed(path)
    assert "Of 3 measures watched with default\\_layout none is shown to be worse." in said
    also = next(line for line in said.splitlines() if "Also found" in line)
    assert (
        "(BETTER). With offload worse or leaning to it: first token for a prompt never seen before ×1.05, throughput"
        in also
    )
    assert "and 1 more." in also
    russian = next(line for line in committed(path, "ru").splitlines() if "Найдено также" in line)
    assert "(BETTER). С offload хуже или похоже на то: первый токен" in russian
    assert "×1,05" in russian


def test_guards_that_are_undecided_on_a_ladder_without_an_arm_to_adopt_are_called_guards() -> None:
    path = next(path for path in VERDICTS if path.parts[-3] == "cpu-2026-11-30" and path.parts[-2] == "ladder")
    assert re.search(r"Undecided guards: \d+\.", committed(path))
    assert re.search(r"Не решено стражей: \d+\.", committed(path, "ru"))


def test_a_brief_says_why_what_a_request_costs_above_the_onset_is_not_that_of_the_highest_level() -> None:
    path = next(path for path in VERDICTS if path.parts[-2] == "ladder-tp2")
    assert "×1.68" in committed(path)
    assert "Worse than base above the onset (those levels together): second\\_replica GPU-seconds" in committed(path)
    assert "| GPU-seconds/request at 20 alone |" in committed(path)
    assert "выше порога вытеснений (все такие ступени вместе): second\\_replica" in committed(path, "ru")
    assert "| GPU-секунд на запрос только при 20 |" in committed(path, "ru")
    assert "(those levels" not in ladder_brief()


def test_what_leans_to_worse_on_a_ladder_is_named_with_its_arm() -> None:
    leaning = build.comparison(arm="more_kv", against="base", phase="above_onset", metric="e2e_p95_seconds",
                               role="guard", verdict="INCONCLUSIVE", effect=1.08, ci_low=1.01,
                               ci_high=1.15)  # fmt: skip
    verdict = ladder_verdict()
    verdict = msgspec.structs.replace(verdict, comparisons=[*verdict.comparisons, leaning])
    said = build_brief(verdict, ladder_protocol(), ladder_records())
    assert "Leaning to worse: more\\_kv last token (p95) ×1.08" in said
    assert "Leaning" not in ladder_brief()


# ------------------------------------------------------------------------------------------------------------- fleet


def fit(host: str, tokens: float, high: float | None = None) -> LengthFit:
    at = Crossing(tokens=tokens, low=0.0, high=tokens + 700.0 if high is None else high, confidence=0.97)
    rows = [[1.2, 0.8], [1.1, 0.7]]
    ones = [[1.0, 1.0]] * 2
    return LengthFit("1.0", build.verdict().campaign, "p", host, "m", "BETTER", "offload", "control", [1000, 4000],
                     rows, ones, [], at, at)  # fmt: skip


FITS: Sequence[LengthFit] = [
    *(fit(f"h{number}", 1500.0 + 100 * number) for number in range(8)), fit("h8", 0.0, 0.0), fit("h9", 2000.0, NEVER),
]  # fmt: skip


def fleet() -> Verdict:
    hosts = [build.host_verdict(f"h{number}") for number in range(10)]
    hosts[9] = msgspec.structs.replace(hosts[9], verdict="INVALID")
    return build.verdict(hosts=hosts)


def test_the_lengths_of_a_fleet_are_one_sentence_over_all_hosts() -> None:
    said = build_brief(fleet(), build.protocol(), build.records(), fits=FITS)
    line = next(line for line in said.splitlines() if "From which prefix length on" in line)
    assert line.partition("**: ")[2] == (
        "sooner, as shown: on 8 from 2,200 to 2,900 tokens on; on 1 at every measured length; on 1 not shown for any "
        "(of 10 hosts, m)."
    )
    assert "10 hosts, 1 INVALID." in said


@pytest.mark.parametrize(
    ("tokens", "high", "english", "russian"),
    [
        (0.0, 2363.0, "shown to be sooner from 2,363 tokens on (estimate: at every measured length; "
         "97 % interval under 1,000 to 2,363).", "возврат быстрее, показано: с 2 363 токенов (оценка: при всех"),
        (1504.0, 3734.0, "shown to be sooner from 3,734 tokens on (estimate: from 1,504 tokens on; "
         "97 % interval under 1,000 to 3,734).", "с 3 734 токенов (оценка: с 1 504 токенов;"),
        (0.0, 0.0, "shown to be sooner at every measured length (97 % interval under 1,000 to under 1,000).",
         "показано: при всех измеренных длинах (интервал"),
        (2000.0, NEVER, "not shown for any length (97 % interval under 1,000 to none).", "не показано ни для какой"),
    ],
)  # fmt: skip
def test_the_length_that_is_said_is_the_one_that_is_shown(
    tokens: float, high: float, english: str, russian: str
) -> None:
    for language, expected in (("en", english), ("ru", russian)):
        fits = [fit("localhost", tokens, high)]
        said = build_brief(build.verdict(), build.protocol(), build.records(), language=language, fits=fits)
        assert expected in said.replace("\u00a0", " ").replace("\u202f", " ")


def test_fleets_whose_hosts_agree_say_one_length() -> None:
    fits = [fit("h1", 1500.0), fit("h2", 1500.0)]
    said = build_brief(fleet(), build.protocol(), build.records(), fits=fits)
    assert "sooner, as shown: on 2 from 2,200 tokens on (of 2 hosts, m)." in said
    russian = build_brief(fleet(), build.protocol(), build.records(), language="ru", fits=FITS).replace("\u202f", " ")
    assert "возврат быстрее, показано: с длины от 2 200 до 2 900 токенов: 8; при всех" in russian


def test_a_length_in_russian_takes_the_form_of_its_number() -> None:
    for tokens, dative, accusative in (
        (16392, "в 16 392 токена", "префиксы в 16 392 токена"), (8200, "в 8 200 токенов", "префиксы в 8 200 токенов"),
        (8201, "в 8 201 токен ", "префиксы в 8 201 токен"),
    ):  # fmt: skip
        verdict = of_arms(prefix_tokens=tokens)
        said = build_brief(verdict, build.protocol(), build.records(), language="ru")
        words = Words("ru")
        tile = next(" | ".join(merit) for merit in top.merits(verdict, words) if merit[0] == words("merit.even"))
        said, tile = (text.replace("\u202f", " ").replace("\u00a0", " ") for text in (said, tile))
        assert f"вытесненному префиксу {dative}" in said
        assert tile.endswith(accusative)
    one = build_brief(build.verdict(), build.protocol(), build.records(), language="ru",
                      fits=[fit("localhost", 0.0, 2021.0)])  # fmt: skip
    assert "с 2 021 токена" in one.replace("\u202f", " ").replace("\u00a0", " ")


def test_the_headline_says_the_length_of_an_evicted_prefix() -> None:
    verdict = of_arms(prefix_tokens=8200, hit="return")
    english = "he first token of an evicted prefix (8,200 tokens) comes 6.6 times sooner"
    for said in (
        answer.headline(verdict), top.headline(verdict, EN), build_brief(verdict, build.protocol(), build.records()),
    ):  # fmt: skip
        assert english in said.replace("\u00a0", " ")
    for said in (
        top.headline(verdict, Words("ru")),
        build_brief(verdict, build.protocol(), build.records(), language="ru"),
    ):
        assert "(8 200 токенов)" in said.replace("\u202f", " ").replace("\u00a0", " ")
    undecided = msgspec.structs.replace(
        verdict, verdict="INCONCLUSIVE", comparisons=build.comparisons(verdict="INCONCLUSIVE")
    )
    assert "(8,200 tokens)" in build_brief(undecided, build.protocol(), build.records()).splitlines()[2]
    # A phase of another length, or of no length that is known, keeps its name.
    assert "(8,200" not in answer.headline(of_arms(prefix_tokens=8200, hit="miss"))
    assert "tokens)" not in answer.headline(build.verdict())


# ---------------------------------------------------------------------------------------------------------- sentences


def test_an_arm_at_the_beginning_of_a_sentence_keeps_its_name() -> None:
    advice = msgspec.structs.replace(
        build.verdict().recommendation, action="adopt offload",
        reason="offload is BETTER by the primary comparison and no guard is WORSE; offload may be smaller",
    )  # fmt: skip
    verdict = build.verdict(recommendation=advice, reason="offload pays")
    assert answer.next_text(verdict).startswith("Adopt offload. offload is BETTER")
    for language in ("en", "ru"):
        page = Page(render(verdict, language=language)).text
        assert "Offload" not in page.replace("Offloading", "")
        assert "Offload " not in build_brief(verdict, build.protocol(), build.records(), language=language)
    assert answer.sentence("control is shorter", ("offload",)) == "Control is shorter."


def test_the_russian_top_lists_what_fits_the_cache_as_the_english_does() -> None:
    for language, text in (("en", "in fits_return"), ("ru", "помещающегося")):
        words = Words(language)
        elsewhere = next(text for label, text, _ in top.answers(build.verdict(), words)
                         if label == words("answer.elsewhere"))  # fmt: skip
        assert text in elsewhere
        assert "1.06" in elsewhere.replace(",", ".")


def test_what_is_within_a_declared_size_is_not_tagged_as_the_same() -> None:
    items = [
        msgspec.structs.replace(item, note="a tier takes RAM.") if item.metric == "ram_used_peak_bytes" else item
        for item in build.comparisons()
    ]
    page = render(build.verdict(comparisons=items))
    row = page[page.index("whole run: peak RAM") :]
    row = row[: row.index("</tr>")].replace("\u00a0", " ")
    assert '<span class="tag EQUIVALENT">within the declared size</span>' in row
    assert "A tier takes RAM. Within the declared 384 MiB" in row
    assert ".." not in row


def test_a_break_even_without_a_number_keeps_its_arm() -> None:
    never = BreakEven(None, None, None, None, 0.01, -0.004, None, "", arm="offload", against="control")
    said = build_brief(build.verdict(verdict="WORSE", break_even=never), build.protocol(), build.records())
    assert "**When offloading pays**: offload against control: at no share" in said
