"""What a page calls things, which entries it lists, and how its bars are told apart."""

import re

import msgspec
import pytest
import report_builder as build
from kvtrial.analysis import answer
from kvtrial.analysis.ledger import judge_moved
from kvtrial.analysis.protocols import load_protocol
from kvtrial.analysis.report import build_report, conditions, preemption, top
from kvtrial.analysis.report import figures_offload as figures
from kvtrial.analysis.report.selection import choose
from kvtrial.analysis.report.words import Words, signs
from kvtrial.record.pressure import PressurePoint
from kvtrial.record.verdict import Recommendation
from ladder_builder import ladder_protocol, ladder_records, ladder_verdict
from test_report_page import Page, render

EN, RU = Words("en"), Words("ru")


@pytest.mark.parametrize(
    "text",
    ["6.6 times sooner with x2 than with 1x", "x2, control and x4: x86", "keep x2.", "x2 (x3)",
     "--max-num-seqs -1", "set -O -1, max-num-seqs",
     "arm x2, 97 % of the runs", "x4 (2 to 3 replicas)", "with -e kvtrial_pairs -1, or -e kvtrial_pairs=-1"],
)  # fmt: skip
def test_names_and_options_stand_as_they_are(text: str) -> None:
    assert signs(text) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("(x12, 97 % interval 9 to 14)", "(×12, 97 % interval 9 to 14)"),
        ("first token x1.02 (.9 to 1.1)", "first token ×1.02 (0.9 to 1.1)"),
        ("queue x3 (2 to 4) WORSE", "queue ×3 (2 to 4) WORSE"),
        ("a change of x2 or more, -3 to -1", "a change of ×2 or more, −3 to −1"),
    ],
)
def test_ratios_and_differences_have_their_signs(text: str, said: str) -> None:
    assert signs(text) == said
    assert EN.local("x12") == "×12"


def test_an_entry_that_differs_between_starts_of_one_arm_is_no_difference_of_the_arms() -> None:
    records = []
    for record in build.records():
        assert record.resolved is not None
        config = {**record.resolved.config, "VLLM_RPC_BASE_PATH": f"/tmp/{record.run}"}
        records.append(
            msgspec.structs.replace(record, resolved=msgspec.structs.replace(record.resolved, config=config))
        )
    chosen = choose(build.protocol(), records, build.verdict())
    rows = conditions.section(build.verdict(), chosen, {}, {}, EN, {}).differences
    assert [row.head for row in rows] == ["kv_transfer_config"]


def section(verdict=None, words: Words = EN) -> preemption.Section:  # type: ignore[no-untyped-def]
    verdict = verdict or ladder_verdict()
    found = preemption.section(
        verdict.ladder, "base", choose(ladder_protocol(), ladder_records(), verdict), words, verdict.comparisons
    )
    assert found is not None
    assert found.changes is not None
    return found


def test_a_rate_names_its_unit_and_an_arm_its_gpus() -> None:
    ladder = ladder_verdict().ladder
    assert ladder is not None
    assert section().changes.rows[0].cells[1].endswith("per GiB")  # type: ignore[union-attr]
    assert section(words=RU).changes.rows[0].cells[1].endswith("за единицу (ГиБ)")  # type: ignore[union-attr]
    arms = [msgspec.structs.replace(arm, gpus=2 if arm.arm == "more_kv" else 1) for arm in ladder.arms]
    verdict = msgspec.structs.replace(ladder_verdict(), ladder=msgspec.structs.replace(ladder, arms=arms))
    rows = section(verdict).changes.rows  # type: ignore[union-attr]
    assert rows[0].cells[1].replace("\u00a0", " ").endswith("2 GPUs instead of 1")
    assert "instead of" not in rows[1].cells[1]


def test_a_time_line_ends_with_its_last_point() -> None:
    points = [PressurePoint(float(n), 1.0, 0.0, 0.5, float(n)) for n in range(80)]
    kept = preemption._thinned(points)
    assert kept[-1] == points[-1]
    assert len(kept) <= preemption.LINE_POINTS_MAX + 1
    assert list(preemption._thinned(points[:3])) == points[:3]


def test_arms_that_a_figure_has_no_room_for_are_named() -> None:
    ladder = ladder_verdict().ladder
    assert ladder is not None
    more = [msgspec.structs.replace(ladder.arms[0], arm=f"arm{number}") for number in range(6)]
    verdict = msgspec.structs.replace(
        ladder_verdict(), ladder=msgspec.structs.replace(ladder, arms=[*ladder.arms, *more])
    )
    captions = {plot.title: plot.caption for plot in section(verdict).plots}
    for title in ("The ladder", "What each arm reaches"):
        assert "Not drawn: arm3, arm4, arm5" in captions[title]
    assert all("Not drawn" not in plot.caption for plot in section().plots)


def test_bars_of_arms_are_told_apart_without_colours() -> None:
    span = figures.Span(1.0, 0.9, 1.1, 6)
    arms = [f"arm{number}" for number in range(8)]
    for draw in (figures.regimes_plot, figures.memory_plot):
        svg = draw({"return": dict.fromkeys(arms, span)}, arms, EN, "")
        assert svg is not None
        assert len(set(re.findall(r'<pattern id="([^"]+)"', svg))) >= 6


def test_no_time_stands_in_exponent_form() -> None:
    moved = judge_moved("a", "b", ([0.0] * 6, [0.1] * 6), ([3.55e-6] * 6, [0.0] * 6))
    assert "queues 0.000004 s longer" in moved.note
    assert "e-0" not in moved.note


def test_gigabytes_more_are_not_called_the_same() -> None:
    verdict = build.verdict()
    said = answer.elsewhere_text(verdict)
    assert said is not None
    assert "peak RAM +285 MiB (+260 MiB to +301 MiB) within the declared 384 MiB" in said
    assert "within the declared 384" in Page(render(verdict)).text.replace("\u00a0", " ")
    assert "в пределах объявленных 384" in Page(render(verdict, language="ru")).text.replace("\u00a0", " ")


@pytest.mark.parametrize("language", ["en", "ru"])
def test_a_ladder_without_records_is_still_a_page_on_preemption(language: str) -> None:
    verdict = msgspec.structs.replace(ladder_verdict(), ladder=None, comparisons=[], verdict="INVALID")
    page = build_report(verdict, ladder_protocol(), [], {}, None, language=language)
    words = Words(language)
    assert f'<h2 id="preemption">{words("preemption.title")}</h2>' in page
    assert '<a href="#preemption">' in page
    assert words("offload.title") not in page
    assert words("nav.offload") not in page


def test_a_page_without_a_ladder_has_no_section_on_preemption() -> None:
    page = render(build.verdict())
    assert 'id="preemption"' not in page
    assert EN("offload.title") in page


def test_the_title_is_in_the_pages_language() -> None:
    for path in sorted(build.PROTOCOLS.glob("*.yml")):
        title = load_protocol(path.stem, build.PROTOCOLS).title
        assert RU.title(title) != title, path.stem
    assert "<title>BETTER: Возврат вытесненного префикса" in render(build.verdict(), language="ru")


def test_too_few_pairs_are_an_advice_in_the_pages_language() -> None:
    action = "run again with more pairs: with 5 pairs the exact two-sided test cannot reach p < .05 (its least p is " \
             "0.0625); at least 6 pairs are needed"  # fmt: skip
    verdict = build.verdict(verdict="INCONCLUSIVE", recommendation=Recommendation(action, "", {}))
    assert top.next_step(verdict, RU).startswith("Повторить с большим числом пар: при 5 парах")


def differing(**values: list[object]) -> list[str]:
    """The entries that differ where these are the values of two runs of control and then two of offload."""
    records = [build.record(arm, pair) for arm in ("control", "offload") for pair in (1, 2)]
    made = []
    for number, record in enumerate(records):
        assert record.resolved is not None
        config = {name: of_runs[number] for name, of_runs in values.items()}
        made.append(msgspec.structs.replace(record, resolved=msgspec.structs.replace(record.resolved, config=config)))
    return [row.head for row in conditions._configuration_differences(made, ["control", "offload"])]


def test_what_varies_from_start_to_start_is_left_out_only_where_the_arms_overlap() -> None:
    assert differing(num_gpu_blocks=[12_000, 12_001, 4_000, 4_001]) == ["num_gpu_blocks"]
    assert differing(cache=["12,000 blocks", "12,010 blocks", "11,990 blocks", "12,005 blocks"]) == []
    assert differing(cache=["1.25 GiB", "1.27 GiB", "3.5 GiB", "3.6 GiB"]) == ["cache"]
    assert differing(backend=["a", "b", "c", "d"]) == ["backend"]
    assert differing(backend=["a", "b", "b", "a"]) == []
    assert differing(path=["/run/1", "/run/2", "/run/3", "/run/4"]) == []
    assert differing(port=[1, 2, 30, 40]) == []
    assert differing(engine_id=["0a1b2c3d4e", "1a1b2c3d4e", "2a1b2c3d4e", "3a1b2c3d4e"]) == []
    assert differing(block_size=[16, 16, 64, 64]) == ["block_size"]
