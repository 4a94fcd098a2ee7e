"""The reports that are committed are what this release draws; `make reports` draws them anew."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"
DRAWN = sorted(path.parent for path in RESULTS.glob("*/*/campaign.tar.xz") if (path.parent / "report.html").is_file())
QUICKEST = min(DRAWN, key=lambda folder: (folder / "campaign.tar.xz").stat().st_size)


def reports() -> Any:
    spec = importlib.util.spec_from_file_location("reports", RESULTS / "reports.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def folders() -> list[Any]:
    return [
        pytest.param(folder, id=folder.name, marks=[] if folder == QUICKEST else pytest.mark.full) for folder in DRAWN
    ]


@pytest.mark.parametrize("folder", folders())
def test_a_committed_report_is_what_this_release_draws(folder: Path) -> None:
    files, _ = reports().drawn(folder)
    for name, content in files.items():
        assert content == (folder / name).read_bytes(), f"{name} differs: make reports"


def test_models_of_one_machine_are_drawn_beside_each_other() -> None:
    named = {folder: [other.name for other in reports().others_of_the_machine(folder)] for folder in DRAWN}
    machine = RESULTS / "h200-2026-11-29"
    assert named[machine / "offload-0.6b"] == ["offload-8b"]
    assert named[machine / "offload-8b"] == ["offload-0.6b"]
    assert [folder.name for folder, others in named.items() if others] == ["offload-0.6b", "offload-8b"]


def test_the_committed_page_of_a_model_has_the_break_even_of_both() -> None:
    page = (RESULTS / "h200-2026-11-29" / "offload-0.6b" / "report.html").read_text()
    for part in ("--beside results/offload_lengths-20261129T165104Z", "offload-8b/campaign.tar.xz -C results/"):
        assert part in page, f"{part} is not on the page: make reports"
