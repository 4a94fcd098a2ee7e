"""Cases of our own making: each gets its answer, and each neighbour another one."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvtrial.analysis.cli import main
from planted import CASES

MADE: list[dict[str, Any]] = yaml.safe_load((CASES.parent / "cases_of_our_own.yml").read_text())
EXPECTED = {"what", "class", "verdict", "confidence", "also", "must_say", "must_not_say"}
"""What is said of a case; all else is its input."""


def told_of(case: dict[str, Any]) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(name, input, expected) of a case and of its neighbours."""
    given = {name: value for name, value in case.items() if name not in EXPECTED | {"id", "expected", "quiet"}}
    found = [(case["id"], given, case["expected"])]
    for number, quiet in enumerate(case.get("quiet", [])):
        changed = {name: value for name, value in quiet.items() if name not in EXPECTED}
        found.append((f"{case['id']}-quiet-{number}", given | changed, quiet))
    return found


TOLD = [told for case in MADE for told in told_of(case)]


def of_page(given: Any, number: int) -> Any:
    """What is given for one page and for all."""
    both = [given[key] for key in ("all", number) if given and key in given]
    return [item for part in both for item in part] if both and isinstance(both[0], list) else dict(
        pair for part in both for pair in part.items())  # fmt: skip


def page(case: dict[str, Any], number: int) -> str:
    """A page of a field case with what this case changes."""
    text = (CASES / case["pages"][number]).read_text()
    if cut := case.get("cut", {}).get(number):
        text = text[: text.index(cut)]
    lines = [line for line in text.splitlines() if not any(part in line for part in case.get("drop", []))]
    for key, value in of_page(case.get("change", {}), number).items():
        family, _, label = key.partition("|")
        at = [n for n, line in enumerate(lines) if re.match(rf"{family}[{{ ]", line) and label in line]
        assert at, (key, case["pages"][number])
        lines[at[0]] = f"{lines[at[0]].rpartition(' ')[0]} {str(value).replace('nan', 'NaN').replace('inf', '+Inf')}"
    for name, value in case.get("cache", {}).items():
        lines = [re.sub(rf'{name}="[^"]*"', f'{name}="{value}"', line) if "cache_config_info{" in line else line
                 for line in lines]  # fmt: skip
    lines += of_page(case.get("add", {}), number)
    whole = "\n".join(lines) + "\n"
    return whole.replace(*case["replace"]) if "replace" in case else whole


def result_set(case: dict[str, Any]) -> str:
    """A result set of a field case, fewer pairs of it, and what its runs are given."""
    raw = json.loads((CASES / case["results"]).read_text())
    raw |= case.get("top", {})
    raw["pairs"] = raw["pairs"][: case.get("take")]
    for pair in raw["pairs"]:
        for arm, fields in case.get("runs", {}).items():
            pair[arm].update(fields)
    return json.dumps(raw)


def arguments(case: dict[str, Any], folder: Path) -> list[str]:
    """The command line of a case, its files written into a folder."""
    if "results" in case:
        (folder / "results.json").write_text(result_set(case))
        return ["judge", str(folder / "results.json")]
    given = ["observe", *map(str, case.get("arguments", []))]
    if "pages" in case:
        given.append("--metrics")
        for number, name in enumerate(case["pages"]):
            path = folder / f"{number}-{Path(name).name}"
            path.write_text(page(case, number))
            given.append(str(path))
    for name in ("log", "launch", "client"):
        if name in case:
            text = json.dumps(case[name]) if name == "client" else case[name]
            (folder / name).write_text(text)
            given += [{"log": "--log", "launch": "--config", "client": "--client"}[name], str(folder / name)]
    return given + (["--interval", str(case["interval"])] if "interval" in case else [])


@pytest.mark.parametrize(("name", "case", "expected"), TOLD, ids=[name for name, _, _ in TOLD])
def test_a_case_of_our_own_gets_its_answer(name, case, expected, tmp_path, capsys):
    call = arguments(case, tmp_path)
    status = main([*call, "--json"])
    read = json.loads(capsys.readouterr().out)
    main(call)
    shown = capsys.readouterr()
    text = shown.out + shown.err
    classes = [finding["class"] for finding in read["findings"]]
    assert read["class"] == expected["class"], text
    assert read["verdict"] == expected.get("verdict", "report")
    assert status == (2 if read["verdict"] == "error" else 0)
    assert set(expected.get("also", [])) <= set(classes), classes
    if "confidence" in expected:
        assert read["findings"][0]["confidence"] == expected["confidence"]
    assert [phrase for phrase in expected.get("must_say", []) if phrase not in text] == [], text
    assert [phrase for phrase in expected.get("must_not_say", []) if phrase in text] == [], text


def test_the_cases_are_many_and_most_have_a_neighbour():
    assert len(MADE) >= 20 and len({case["id"] for case in MADE}) == len(MADE)
    assert sum("quiet" in case for case in MADE) >= 0.7 * len(MADE)
