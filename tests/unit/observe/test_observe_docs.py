"""docs/observe.md names what there is."""

import re
from pathlib import Path

import msgspec
from kvtrial.analysis.observe.answer import ORDER
from kvtrial.record.observed import HostFacts

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "observe.md").read_text()


def classes_named(package: str) -> set[str]:
    """Classes that the code of a package gives to findings."""
    text = "".join(path.read_text() for path in (ROOT / "analysis/kvtrial/analysis" / package).glob("*.py"))
    return set(re.findall(r'Finding\(\s*"([a-z_0-9]+)"', text))


def test_every_class_that_names_an_answer_is_explained():
    assert [name for name in (*ORDER, *sorted(classes_named("judge"))) if f"`{name}`" not in TEXT] == []


def test_every_class_of_check_is_explained():
    code = "".join(path.read_text() for path in (ROOT / "analysis/kvtrial/analysis").glob("check*.py"))
    classes = set(re.findall(r'Finding\(\s*"([a-z_0-9]+)"', code)) - {"unusable_input"}
    assert len(classes) > 25
    assert [name for name in sorted(classes) if f"`{name}`" not in TEXT[TEXT.index("## check") :]] == []


def test_the_facts_of_a_host_are_shown_with_every_field():
    shown = set(re.findall(r'"([a-z_]+)":', TEXT[TEXT.index("## A host's facts") : TEXT.index("## judge")]))
    fields = {field.name for field in msgspec.structs.fields(HostFacts)}
    assert fields <= shown


def test_every_option_of_the_command_is_explained():
    options = re.findall(r'"(--[a-z]+)"', (ROOT / "analysis/kvtrial/analysis/observe/command.py").read_text())
    assert [option for option in options if f"`{option}" not in TEXT and f"{option} " not in TEXT] == []
