"""A page in a real browser without a window: what it looks like to a reader, asked by a script put into it.

Needs a chromium and takes axe from npm: tests/install_browser.sh brings both before the tests where it can. Without
them the tests that ask skip with the reason that it left.
"""

import contextlib
import functools
import html
import json
import re
import shutil
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pytest
from from_npm import NotThereError, node_modules, why_missing

PRINTER_SCALE = 72 / 300
"""Points a dot of what Chromium prints with."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
ASK_LAYOUT = """
const boxes = [];
for (const svg of document.querySelectorAll("figure svg")) {
  const frame = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll("text")].filter((text) => text.textContent.trim());
  const places = texts.map((text) => [text.textContent, text.getBoundingClientRect()]);
  for (let i = 0; i < places.length; i++) {
    const [said, one] = places[i];
    const sides = one.left < frame.left - 3 || one.right > frame.right + 3;
    if (sides || one.top < frame.top - 3 || one.bottom > frame.bottom + 3)
      boxes.push("cut: " + said);
    for (let j = i + 1; j < places.length; j++) {
      const [other, two] = places[j];
      const wide = Math.min(one.right, two.right) - Math.max(one.left, two.left);
      const high = Math.min(one.bottom, two.bottom) - Math.max(one.top, two.top);
      if (wide > 2 && high > 3) boxes.push("over each other: " + said + " / " + other);
    }
  }
}
const layout = {
  width: document.documentElement.clientWidth, scroll: document.documentElement.scrollWidth, boxes,
  background: getComputedStyle(document.body).backgroundColor, script: Boolean(document.querySelector(".tip")),
  title: document.title,
};
"""
ANSWER_LAYOUT = "answer(layout);"
ASK_AXE = """
axe.run(document, {resultTypes: ["violations"]}).then((found) => answer({
  layout,
  violations: found.violations.map((one) => [one.impact, one.id, one.nodes.length, one.nodes[0].html.slice(0, 200)]),
  passes: found.passes.length,
}), (error) => answer({error: String(error)}));
"""


@functools.cache
def browser() -> str:
    """The browser's path; skips the test that asks where there is none."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"there is no chromium here: {why_missing()}")
    return found


def axe() -> str:
    """axe-core's source; skips the test that asks where npm does not bring it."""
    try:
        return (node_modules() / "axe-core" / "axe.min.js").read_text(encoding="utf-8")
    except NotThereError as why:
        pytest.skip(f"axe was not asked: {why}")


def asked(page: str, script: str, folder: Path, *, width: int = 1240, dark: bool = False) -> dict[str, Any]:
    """What `script` answers about the page by calling answer(object). The page's own policy would forbid the script."""
    open_page, count = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    assert count == 1
    put_in = (
        "<script>const answer = (found) => document.documentElement.setAttribute('data-answer', JSON.stringify(found));"
        f"</script><script>{script}</script></body>"
    )
    dom = dumped(open_page.replace("</body>", put_in), folder, width=width, dark=dark)
    found = re.search(r'data-answer="([^"]*)"', dom)
    assert found is not None, "the page gave no answer"
    return dict(json.loads(html.unescape(found[1])))


def printed(page: str, folder: Path) -> tuple[int, float]:
    """(sheets, points a pixel) of the page as a PDF. 0.75 is full size; less was shrunk to bring in what is wide."""
    path, target = folder / "page.html", folder / "page.pdf"
    path.write_text(page, encoding="utf-8")
    _run(path, folder, "--no-pdf-header-footer", f"--print-to-pdf={target}")
    raw = target.read_bytes()
    scales = []
    for stream in re.findall(rb"stream\r?\n(.*?)endstream", raw, flags=re.DOTALL):
        with contextlib.suppress(zlib.error):
            drawn = zlib.decompress(stream)
            found = re.findall(rb"^([\d.]+) 0 0 -?[\d.]+ [-\d.]+ [-\d.]+ cm", drawn, flags=re.MULTILINE)
            # The sheet's own matrix, by which a page is known (glyphs have others), and in it that of the page.
            if len(found) > 1 and abs(float(found[0]) - PRINTER_SCALE) < 1e-3:
                scales.append(float(found[0]) * float(found[1]))
    return len(re.findall(rb"/Type\s*/Page[^s]", raw)), min(scales)


def dumped(page: str, folder: Path, *, width: int = 1240, dark: bool = False) -> str:
    """The document as the browser has it after its scripts."""
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    wanted = (
        f"--window-size={width},1400",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--virtual-time-budget=15000",
        "--dump-dom",
    )
    return _run(path, folder, *wanted)


def _run(path: Path, folder: Path, *wanted: str) -> str:
    command = [
        browser(),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={folder / 'profile'}",
        *wanted,
        path.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
