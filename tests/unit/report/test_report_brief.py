import re

import msgspec
import pytest
import report_builder as build
from kvtrial.analysis.prices import Prices
from kvtrial.analysis.report import build_brief, build_report
from kvtrial.analysis.report.words import Words
from kvtrial.record.verdict import Verdict
from ladder_builder import PRICES, ladder_brief, ladder_page, ladder_protocol, ladder_records, ladder_verdict
from test_report_page import HOSTILE, Page, render


def brief(verdict: Verdict, language: str = "en") -> str:
    return build_brief(verdict, build.protocol(), build.records(), language=language)


def test_the_brief_names_the_regime_by_profile_and_where_preemptions_are_rare() -> None:
    said = ladder_brief()
    # Not "from 5 on, 250": at 7 it is 750.
    onset = "None up to 4 in flight; 250 per 1,000 at 5, 750 at 7."
    assert f"**Where preemptions are rare**: {onset}\n" in said
    russian = ladder_brief(language="ru").replace("\u202f", " ")
    assert "До 4 одновременно их нет; при 5 их 250 на 1000 запросов, при 7 – 750.\n" in russian
    assert "| In flight: interactive | batch |" in said
    assert "| base | control | – | 4 | 4 |" in said


def test_stability_and_service_are_said_apart() -> None:
    said = ladder_brief()
    assert said.index("**Stability of the process**") < said.index("**Quality of service**")
    process = next(line for line in said.splitlines() if "Stability of the process" in line)
    assert "0 failed" in process
    assert "the server lived" in process
    service = next(line for line in said.splitlines() if "Quality of service" in line)
    assert "preempted per 1,000" in service


def test_ways_to_more_capacity_stand_in_the_users_prices() -> None:
    priced, plain = ladder_brief(PRICES), ladder_brief()
    assert "| EUR/hour · per million tokens: interactive | batch |" in priced
    assert re.search(r"\| base \|.* \| [\d.]+ · [\d.]+ \| [\d.]+ · [\d.]+ \| – \|", priced)
    assert "EUR" not in plain
    assert "Prices (none given)" in plain
    assert "Not tried: " in plain
    assert "MOVED" in plain
    assert "| more\\_kv | memory: +" in plain


def test_what_was_not_measured_is_listed() -> None:
    said = brief(build.verdict())
    assert "Times on a GPU" in said
    assert "Where preemption begins" in said
    assert "Your production traffic" in said
    assert "Prices (none given)" not in said
    assert "Prices (none given)" in ladder_brief()
    assert "Prices (none given)" not in ladder_brief(PRICES)


@pytest.mark.parametrize(
    ("language", "none", "why"),
    [("en", "Prices (none given)", "give replica_hour."), ("ru", "Цены (не заданы)", "задайте replica_hour.")],
)
def test_prices_that_price_nothing_are_not_called_missing_and_the_cause_is_said(
    language: str, none: str, why: str
) -> None:
    said = ladder_brief(Prices("EUR", gpu_hour=2.0), language).replace("\\", "")
    assert none not in said
    assert why in said
    assert none in ladder_brief(language=language)


@pytest.mark.parametrize("language", ["en", "ru"])
@pytest.mark.parametrize("verdict", [build.verdict(), build.invalid(), build.inconclusive(), build.engine_fault()])
def test_every_verdict_has_a_brief_of_half_a_page(verdict: Verdict, language: str) -> None:
    said = brief(verdict, language)
    assert verdict.verdict in said
    assert len(said.split()) < 400


def test_the_page_and_the_file_say_the_same() -> None:
    page = Page(ladder_page()).text.replace("\u00a0", " ")
    for line in ladder_brief(PRICES).splitlines():
        if line.startswith("- **"):
            assert line.partition("**: ")[2].replace("\\", "").replace("\u00a0", " ") in page


def test_hostile_names_are_no_markdown() -> None:
    verdict = build.verdict(campaign=HOSTILE, verdict="INVALID", reason=HOSTILE)
    said = brief(verdict)
    assert not re.search(r"(?<!\\)<", said)
    assert re.findall(r"(?m)^#+ (.*)$", said)[1:] == ["What was not measured"]


def test_russian() -> None:
    assert "Устойчивость процесса" in ladder_brief(language="ru")
    assert "## Что не измерено" in ladder_brief(language="ru")
    assert "## Что не измерено" in build_brief(build.verdict(), build.protocol(), build.records(), language="ru")


def test_what_was_not_measured_has_its_heading() -> None:
    said = brief(build.verdict())
    assert said.index("## What was not measured") < said.index("Times on a GPU")
    assert "## What was not measured" in ladder_brief()


@pytest.mark.parametrize(("language", "unknown"), [("en", "is not valid"), ("ru", "измерение негодно")])
def test_an_invalid_ladder_gives_no_figures(language: str, unknown: str) -> None:
    verdict = msgspec.structs.replace(
        ladder_verdict(PRICES), verdict="INVALID", reason="gate levels_reset failed: caches were not emptied"
    )
    said = build_brief(verdict, ladder_protocol(), ladder_records(), language=language)
    assert "INVALID" in said.splitlines()[2]
    assert "caches were not emptied" in said
    assert unknown in said
    for figure in ("EUR", "MOVED", "1,000", "tokens/s", "токенов", "|"):
        assert figure not in said


def test_undecided_guards_are_told_apart_by_their_arms() -> None:
    guards = [item for item in build.comparisons() if item.role == "guard"][:1]
    guards = [msgspec.structs.replace(guards[0], verdict="INCONCLUSIVE", arm=arm) for arm in ("one", "two")]
    verdict = build.verdict(comparisons=[build.comparison(), *guards])
    assert "Undecided in so many pairs" not in brief(verdict)
    page = Page(render(verdict)).text
    line = page[page.index("Undecided in so many pairs") :][:200]
    assert "one / control" in line
    assert "two / control" in line


def test_sections_of_an_invalid_ladder_say_that_their_numbers_answer_nothing() -> None:
    verdict = msgspec.structs.replace(ladder_verdict(PRICES), verdict="INVALID", reason="gate levels_reset failed: no")
    page = build_report(verdict, ladder_protocol(), ladder_records(), {}, None)
    section = page[page.index('<h2 id="preemption">') :]
    assert section.index("these numbers answer nothing") < section.index("<ul>")
    assert "these numbers answer nothing" not in ladder_page()


RAW = ("ttft_", "_seconds", "\\_seconds", "per_1000", "(miss)", "(above_onset)", "phase return", " p =", "p .0", "x0.")


@pytest.mark.parametrize("language", ["en", "ru"])
@pytest.mark.parametrize("verdict", [build.verdict(), build.inconclusive()], ids=lambda verdict: verdict.verdict)
def test_a_partner_in_finance_meets_no_name_of_a_metric_and_no_statistics(verdict: Verdict, language: str) -> None:
    said = brief(verdict, language)
    assert [word for word in RAW if word in said] == []


def test_the_word_is_said_in_plain_words() -> None:
    assert brief(build.verdict()).splitlines()[2].startswith("BETTER (shown to help). The first token of an evicted")
    assert "comes anywhere from 14 % sooner to 21 % later" in brief(build.inconclusive())


def test_what_it_takes_is_said_with_its_price() -> None:
    verdict = build.verdict()
    assert "**What it takes**: +285 MiB of the host's RAM at its peak with offload (+260 MiB to +301 MiB)." in brief(
        verdict
    )
    priced = build_brief(verdict, build.protocol(), build.records(), prices=PRICES)
    assert "0.00278 EUR an hour at your price of RAM" in priced


def test_a_guard_that_leans_to_worse_is_named_though_its_size_is_not_shown() -> None:
    items = build.comparisons()
    items[1] = msgspec.structs.replace(items[1], effect=1.06, ci_low=1.03, ci_high=1.10)
    said = brief(build.verdict(comparisons=items))
    assert "Worse, by how much is not shown yet: The first token of a prompt never seen before comes 6 % later" in said
    assert "(3 % later to 10 % later)" in said
    better = [msgspec.structs.replace(item, ci_low=0.8, ci_high=0.9) if item is items[1] else item for item in items]
    assert "Worse, by how much" not in brief(build.verdict(comparisons=better))


def test_a_length_has_its_words() -> None:
    words = Words("en")
    assert words.subject("return_16k") == "an evicted prefix (16k\u00a0tokens)"
    assert words.subject("return_together") == "an evicted prefix, several asked for at once"
    assert "phase" not in Words("ru").subject("gpu_hit_2k")


def test_a_profile_says_what_it_asks() -> None:
    said = ladder_brief()
    asked = "At most preempted per 1,000, first token, end of 95 % (what base gives): interactive "
    assert re.search(re.escape(asked) + r"0, [\d.]+ s, [\d.]+ s \([\d,]+ tokens/s\); batch 200, ", said)


def test_an_interval_is_not_said_to_hold_the_true_value_and_levels_taken_together_are_not_all_of_the_ladder() -> None:
    """438 in "(438 preempted per 1,000)" is no interval, and an interval of 97 % misses 3 times in 100."""
    for language, interval, together in (
        ("en", "Two numbers in brackets: an interval; in some 95 to 97 of 100", "those levels together"),
        ("ru", "Два числа в скобках: интервал; примерно в 95–97 из 100", "все такие ступени вместе"),
    ):
        words = Words(language)
        assert interval in words("brief.terms")
        assert together in words("brief.service_all_levels", where="")


def test_a_break_even_that_is_no_number_is_named_as_not_measured() -> None:
    even = build.verdict().break_even
    assert even is not None
    nan = msgspec.structs.replace(even, hit_share=float("nan"))
    assert "From which share of returning requests on a tier pays" in brief(build.verdict(break_even=nan))
    assert "From which share of returning requests on a tier pays" not in brief(build.verdict())


@pytest.mark.parametrize("language", ["en", "ru"])
def test_the_brief_of_a_ladder_is_half_a_page_beside_its_table_and_names_no_file(language: str) -> None:
    said = ladder_brief(language=language)
    text = " ".join(line for line in said.splitlines() if not line.startswith("|"))
    assert len(text.split()) < 400
    assert not re.search(r"kvtrial|playbooks|\.yml", text.replace("kvtrial-model", ""))
    assert "evicted: no longer" not in said
    assert "evicted: no longer" in Page(ladder_page()).text
