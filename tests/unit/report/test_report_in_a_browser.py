import functools
import html
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import report_builder as build
import test_report_page as pages
from browser import ANSWER_LAYOUT, ASK_AXE, ASK_LAYOUT, asked, axe, dumped, printed
from ladder_builder import ladder_page
from test_report_fleet import fleet_page
from test_report_half_a_page import VERDICTS, committed


def hostile() -> str:
    return pages.hostile_page()


@functools.cache
def offload() -> str:
    return pages.render(build.verdict())


PAGES: dict[str, Callable[[], str]] = {
    "offload": offload,
    "offload in Russian": lambda: pages.render(build.verdict(), language="ru"),
    "ladder": ladder_page,
    "fleet with a history": fleet_page,
    "invalid": lambda: pages.render(build.invalid()),
    "nothing": pages.empty_page,
    "hostile": hostile,
}
BRIEF_MM_MAX = 195
"""Of 257 that A4 leaves between its margins; a ladder with four ways is the longest."""
DARK = ("ladder", "offload in Russian")


@functools.cache
def visited(name: str) -> dict[str, Any]:
    """What a page answers on a screen: its layout, and what axe says of it. Two of them in the dark."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        script = f"{axe()}\n{ASK_LAYOUT}\n{ASK_AXE}"
        return asked(PAGES[name](), script, Path(folder), dark=name in DARK)


@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_nothing_serious(name: str) -> None:
    found = visited(name)
    assert found["passes"] > 10
    assert [one for one in found["violations"] if one[0] in ("serious", "critical")] == []


@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_wider_than_the_screen_and_no_labels_overlap(name: str) -> None:
    layout = visited(name)["layout"]
    assert layout["scroll"] <= layout["width"]
    assert layout["boxes"] == []


def test_axe_finds_what_is_planted(tmp_path: Path) -> None:
    page = offload().replace("<main>", '<main><img src="./x.png"><p style="color:#bbb">faint</p>')
    found = asked(page, f"{axe()}\n{ASK_LAYOUT}\n{ASK_AXE}", tmp_path)
    assert {"image-alt", "color-contrast"} <= {one[1] for one in found["violations"]}


@pytest.mark.parametrize("name", ["offload in Russian", "ladder", "hostile"])
def test_a_narrow_window_cuts_nothing(name: str, tmp_path: Path) -> None:
    layout = asked(PAGES[name](), f"{ASK_LAYOUT}\n{ANSWER_LAYOUT}", tmp_path, width=500)
    assert layout["scroll"] <= layout["width"]
    assert layout["boxes"] == []


@pytest.mark.parametrize(
    "page", [offload, ladder_page, lambda: ladder_page("ru")], ids=["offload", "ladder", "Russian"]
)
def test_a_phone_of_390_pixels_sees_no_cut_page(page: Callable[[], str], tmp_path: Path) -> None:
    # A window is never narrower than 500; a frame in it is.
    frame = (
        f'<!DOCTYPE html><html><body><iframe id=f width=390 height=900 srcdoc="{html.escape(page())}"></iframe>'
        "<script>"
        "f.onload = () => { const root = f.contentDocument ? f.contentDocument.documentElement : null;"
        "const said = root ? root.scrollWidth + '/' + root.clientWidth : 'none';"
        "document.documentElement.setAttribute('data-answer', said); };"
        "</script></body></html>"
    )
    dom = dumped(frame, tmp_path)
    found = re.search(r'data-answer="(\d+)/(\d+)"', dom)
    assert found is not None
    assert int(found[1]) <= int(found[2])


@pytest.mark.parametrize(("name", "most"), [("ladder", 14), ("offload in Russian", 11), ("fleet with a history", 13)])
def test_a_print_is_full_size_and_short(name: str, most: int, tmp_path: Path) -> None:
    sheets, points_a_pixel = printed(PAGES[name](), tmp_path)
    assert points_a_pixel == pytest.approx(0.75, abs=0.01)
    assert sheets <= most


def set_in_type(brief: str) -> str:
    """brief.md as a plain style sheet sets it on A4: 170 mm wide, 10.5 pt."""
    made, rows = "", ""
    for line in [*brief.replace("\\", "").splitlines(), ""]:
        said = re.sub(r"\*\*(.*?)\*\*", r"<b>\1</b>", html.escape(line))
        if line.startswith("|"):
            if not set(line) <= set("|-"):
                rows += "<tr>" + "".join(f"<td>{cell.strip()}</td>" for cell in said.strip("|").split("|")) + "</tr>"
            continue
        made += f"<table border=1>{rows}</table>" if rows else ""
        rows = ""
        for mark, tag in (("## ", "h3"), ("# ", "h2"), ("- ", "li"), ("", "p")):
            if said.startswith(mark):
                made += f"<{tag}>{said.removeprefix(mark)}</{tag}>" if said else ""
                break
    style = (
        "body{margin:0;width:170mm;font:10.5pt/1.3 serif}h2,h3,p{margin:.4em 0}"
        "table{border-collapse:collapse;width:100%}"
    )
    return (
        f"<!DOCTYPE html><meta charset=utf-8><style>{style}</style><body>{made}<script>document.documentElement."
        "setAttribute('data-height', document.body.getBoundingClientRect().height / 96 * 25.4)</script></body>"
    )


def height_mm(brief: str, folder: Path) -> float:
    found = re.search(r'data-height="([\d.]+)"', dumped(set_in_type(brief), folder))
    assert found is not None
    return float(found[1])


@pytest.mark.parametrize("path", VERDICTS, ids=lambda path: f"{path.parts[-3]}-{path.parts[-2]}")
def test_the_brief_in_print_is_short(path: Path, tmp_path: Path) -> None:
    """Words say nothing of a table's height."""
    assert height_mm(committed(path), tmp_path) <= BRIEF_MM_MAX


def test_a_table_too_wide_for_the_sheet_is_noticed(tmp_path: Path) -> None:
    wide = offload().replace("</main>", '<table style="width:1600px"><tr><td>wide</td></tr></table></main>')
    assert printed(wide, tmp_path)[1] < 0.7


def test_light_and_dark_are_really_two() -> None:
    assert visited("offload")["layout"]["background"] == "rgb(255, 255, 255)"
    assert visited("ladder")["layout"]["background"] != "rgb(255, 255, 255)"


def test_the_page_runs_its_own_script_and_no_other(tmp_path: Path) -> None:
    page = offload()
    planted = page.replace("</main>", "<script>document.documentElement.id = 'planted'</script></main>")
    dom = dumped(planted, tmp_path)
    assert 'class="tip"' in dom
    assert 'id="planted"' not in dom
