import base64
import functools
import hashlib
import re
from html.parser import HTMLParser
from typing import Any

import msgspec
import pandas as pd
import pytest
import report_builder as build
from kvtrial.analysis import answer
from kvtrial.analysis.report import build_report
from kvtrial.analysis.report.said import said_text
from kvtrial.analysis.report.words import Words, signs
from kvtrial.record.record import RunRecord
from kvtrial.record.verdict import Verdict

FRAME = pd.DataFrame({"run": ["p01-1-control"], "phase": ["return"], "ttft_median_seconds": [0.2]})
VOID = {"meta", "br", "wbr", "link", "img", "input", "hr"}
COMMANDS = {
    "campaign": ".venv/bin/ansible-playbook experiment.yml -e kvtrial_seed=7",
    "run": ".venv/bin/kvtrial reproduce results/c/runs/localhost/p01-1-control/record.json",
}
HOSTILE = '</pre></title><script>alert("x")</script><img src="http://evil.example/x.png" onerror=alert(1)>'


class Page(HTMLParser):
    """Collects tags with their attributes, ids and the text, and checks that elements nest."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def render(verdict: Verdict, records: list[RunRecord] | None = None, language: str = "en", **campaign: Any) -> str:
    chosen = build.records() if records is None else records
    about = {**build.CAMPAIGN, **campaign}
    return _rendered(msgspec.msgpack.encode((verdict, chosen)), msgspec.msgpack.encode(about), language)


@functools.cache
def _rendered(input_: bytes, about: bytes, language: str) -> str:
    """A page is drawn once for all tests that look at it: drawing takes longer than looking."""
    verdict, records = msgspec.msgpack.decode(input_, type=tuple[Verdict, list[RunRecord]])
    campaign = msgspec.msgpack.decode(about)
    return build_report(verdict, build.protocol(), records, campaign, FRAME, language=language, commands=COMMANDS)


@pytest.fixture(scope="module")
def better() -> str:
    return render(build.verdict())


def assert_offline(page: str) -> None:
    """No element of the page loads or points at anything outside its own folder, and only its own script runs."""
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", page, flags=re.DOTALL)
    allowed = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert [f"'sha256-{digest}'" for digest in allowed] == re.findall(r"'sha256-[^']+'", page)
    for tag, attributes in Page(page).tags:
        assert tag not in {"link", "iframe", "object", "embed", "base", "form", "img"}
        assert tag != "script" or set(attributes) == {"type"}
        for name, value in attributes.items():
            assert not name.startswith("on"), f"<{tag} {name}>"
            if name in {"src", "href", "xlink:href", "action", "data", "srcset", "poster"}:
                assert value is not None
                assert value.startswith(("#", "./")), f"<{tag} {name}={value}>"
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)


@pytest.mark.parametrize("language", ["en", "ru"])
@pytest.mark.parametrize(
    "verdict",
    [build.verdict(), build.inconclusive(), build.invalid(), build.engine_fault()],
    ids=lambda verdict: verdict.verdict,
)
def test_the_word_and_its_reason_stand_on_top_of_every_verdict(verdict: Verdict, language: str) -> None:
    page = Page(render(verdict, language=language))
    words = Words(language)
    assert page.open == []
    top = page.text[: page.text.index(words("gates.title"))]
    assert verdict.verdict in top
    reason = signs(said_text(answer.sentence(verdict.reason), words)).replace("\u00a0", " ")
    assert reason[1:] in top.replace("\u00a0", " ")
    assert f"{words('evidence')}: {words('evidence.cpu')}" in top
    assert f"{words('next')}:" in top


def test_it_opens_offline(better: str) -> None:
    assert_offline(better)


def test_the_offline_check_finds_what_it_looks_for(better: str) -> None:
    for planted in (
        '<img src="https://example.org/x.png">',
        '<a href="http://example.org/">x</a>',
        "<script></script>",
    ):
        with pytest.raises(AssertionError):
            assert_offline(better.replace("</main>", planted + "</main>"))


def test_it_is_small_and_the_same_input_gives_the_same_bytes(better: str) -> None:
    assert len(better.encode()) < 5_000_000
    fresh = build_report(build.verdict(), build.protocol(), build.records(), build.CAMPAIGN, FRAME, commands=COMMANDS)
    assert fresh == better
    shuffled = list(reversed(build.records()))
    assert render(build.verdict(), shuffled) == better


def test_it_can_be_read_by_a_screen_reader(better: str) -> None:
    page = Page(better)
    assert page.all("html")[0]["lang"] == "en"
    assert len(page.all("title")) >= 1
    assert all(heading.get("scope") in {"col", "row", "rowgroup"} for heading in page.all("th"))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    drawings = page.all("svg")
    assert len(drawings) == 7
    for drawing in drawings:
        assert drawing["role"] == "img"
        assert set((drawing["aria-labelledby"] or "").split()) <= set(ids)
    for attributes in page.all("section"):
        assert "aria-labelledby" not in attributes or attributes["aria-labelledby"] in ids or attributes.get("class")
    links = {(link["href"] or "")[1:] for link in page.all("a") if (link["href"] or "").startswith("#")}
    assert links <= set(ids)
    assert len(page.all("h1")) == 1


def test_light_dark_print_and_phone_are_provided_for(better: str) -> None:
    assert "prefers-color-scheme: dark" in better
    assert "@media print" in better
    assert 'name="viewport"' in better
    assert "#0a0b0c" not in better, "a figure's stand-in colour was not replaced"


def hostile_page(language: str = "en") -> str:
    """A page in which whatever a host, a log or a user wrote holds markup."""
    died, one = build.died().fault, build.record("offload", 1, host=HOSTILE)
    assert died is not None
    assert one.resolved is not None
    fault = msgspec.structs.replace(died, detail=HOSTILE, log_tail=[HOSTILE, "\x1b[31mred"], cause=HOSTILE)
    one = msgspec.structs.replace(
        one,
        run=HOSTILE,
        model=msgspec.structs.replace(one.model, name=HOSTILE, revision=HOSTILE),
        launch=msgspec.structs.replace(one.launch, argv=["vllm", HOSTILE], env={HOSTILE: HOSTILE}),
        resolved=msgspec.structs.replace(one.resolved, config={HOSTILE: HOSTILE}),
    )
    hostile_arm = msgspec.structs.replace(build.record("control", 2), arm=HOSTILE)
    items = [msgspec.structs.replace(item, arm=HOSTILE, note=HOSTILE) for item in build.comparisons()]
    host = build.host_verdict(HOSTILE, gates=build.gates(hazards=(False, HOSTILE)), comparisons=items, reason=HOSTILE)
    verdict = build.verdict(
        campaign=HOSTILE, reason=HOSTILE, comparisons=items, hosts=[host, build.host_verdict()], caveats=[HOSTILE]
    )
    records = [one, hostile_arm, build.died(fault=fault)]
    return build_report(
        verdict, build.protocol(), records, {**build.CAMPAIGN, HOSTILE: HOSTILE}, FRAME, language=language,
        commands={"campaign": HOSTILE, "run": HOSTILE},
    )  # fmt: skip


@pytest.mark.parametrize("language", ["en", "ru"])
def test_hostile_content_is_escaped_everywhere(language: str) -> None:
    page = hostile_page(language)
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "\x1b" not in page
    assert_offline(page)
    assert Page(page).open == []


def test_failed_gates_come_first_and_faults_are_counted() -> None:
    page = render(build.invalid())
    assert page.index('class="tag failed"') < page.index('class="tag undecided"') < page.index('class="tag passed"')
    survivors = [record for record in build.records() if (record.pair, record.arm) != (3, "offload")]
    faulty = render(build.engine_fault(), [*survivors, build.died()])
    assert "engine_died" in faulty
    assert "ERROR EngineCore died &lt;b&gt;here&lt;/b&gt;" in faulty
    assert "1 engine fault" in faulty


def test_an_invalid_verdict_shows_no_effect_on_top() -> None:
    page = Page(render(build.invalid())).text
    assert "×0.151" not in page[: page.index("Comparisons", page.index("may these numbers"))]
    assert "these numbers answer nothing" in page


def test_tokens_by_source_and_regimes_are_in_the_tables(better: str) -> None:
    text = Page(better).text
    assert "8,192" in text
    assert "32 MiB" in text
    assert "233 ms" in text
    assert "×0.152" in text


def test_commands_stand_to_be_copied(better: str) -> None:
    said = Page(better).text
    for command in COMMANDS.values():
        assert command in said


def test_runs_of_a_dropped_pair_are_listed_but_not_summed_up() -> None:
    slow = [msgspec.structs.replace(item, seconds=9.0, ttft_median_seconds=9.0) for item in build.record().phases]
    broken = build.record("control", 9, outcome="environment_fault", phases=slow)
    beside = build.record("offload", 9, phases=slow)
    page = render(build.verdict(), [*build.records(), broken, beside])
    assert "p09" in page
    assert "9 s, 7 runs" not in page
    assert "environment fault" in page


EMPTY: dict[str, Any] = {
    "verdict": "INVALID",
    "reason": "no run left a record",
    "evidence": None,
    "comparisons": [],
    "hosts": [],
    "break_even": None,
    "time_budget": None,
}


def empty_page() -> str:
    return render(build.verdict(**EMPTY), [])


def test_nothing_one_run_and_nan_are_laid_out() -> None:
    empty = build.verdict(**EMPTY)
    for page in (render(empty, []), build_report(empty, build.protocol(), [], {}, None)):
        assert Page(page).open == []
        assert "No run left a record" in page
    nan = float("nan")
    items = build.comparisons(effect=nan, ci_low=nan, ci_high=nan, mde=nan, p_value=None, arm_values=[nan] * 6)
    items += [build.side("miss", "e2e_median_seconds", 0.0, -1.0, nan)]
    bare = build.record(
        phases=[build.phase("return", nan), build.phase("miss", None, tokens=(None, None, None))],
        samples=None,
        resolved=None,
    )
    page = render(build.verdict(verdict="INCONCLUSIVE", reason="one run", comparisons=items), [bare])
    assert Page(page).open == []
    assert not re.search(r">[^<]*\bnan\b", page)


def test_ten_thousand_hosts_stay_readable_and_small() -> None:
    usual = build.host_verdict(comparisons=[build.comparison()])
    hosts = [msgspec.structs.replace(usual, host=f"gpu{number:05d}") for number in range(10_000)]
    hosts[7000] = build.host_verdict("gpu07000", verdict="INVALID", reason="odd one", comparisons=[])
    page = render(build.verdict(hosts=hosts), build.records("gpu00001"))
    assert len(page.encode()) < 5_000_000
    table = page[page.index("<h3>Hosts</h3>") :]
    assert table.index("gpu07000") < table.index("gpu00000")
    assert "9,800 more hosts" in page
    assert "500 of them are drawn" in page
