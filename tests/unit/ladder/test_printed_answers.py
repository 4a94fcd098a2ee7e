"""What docs/preemption.md prints of committed campaigns is what their verdicts print."""

import re
from pathlib import Path

import msgspec
import pytest
from kvtrial.analysis.answer import ten_lines
from kvtrial.record.verdict import Verdict

DOCS = Path(__file__).parents[3] / "docs"
ANSWERS = re.compile(r"\[its\s+verdict\]\((results/\S+?)/README\.md\)\):\n\n```\n(.*?)```", re.DOTALL)
PRINTED = ANSWERS.findall((DOCS / "preemption.md").read_text(encoding="utf-8"))


def test_every_printed_answer_is_found():
    assert [folder.rpartition("/")[2] for folder, _ in PRINTED] == ["ladder", "noise", "tier_size"]


@pytest.mark.parametrize(("folder", "printed"), PRINTED, ids=[folder for folder, _ in PRINTED])
def test_a_printed_answer_is_its_verdicts(folder, printed):
    verdict = msgspec.json.decode((DOCS / folder / "verdict.json").read_bytes(), type=Verdict)
    assert set(printed.splitlines()) <= set(ten_lines(verdict, "results/latest"))
