import importlib.util
import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from from_npm import LOCK, ROOT, NotThereError, node, node_modules
from kvtrial.analysis.history.command import to_textfile as history_textfile
from kvtrial.analysis.history.model import NoiseFloor
from kvtrial.analysis.textfile import to_textfile
from kvtrial.record.exposition import metric_table
from prometheus_client.parser import text_string_to_metric_families

_REPORT = ROOT / "tests" / "unit" / "report"
if str(_REPORT) not in sys.path:
    sys.path.append(str(_REPORT))

import report_builder as build  # noqa: E402
from test_report_fleet import change, history  # noqa: E402

FOLDER = ROOT / "grafana"
FILES = ("engines.json", "history.json")


def expressions(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def read(name: str) -> dict[str, Any]:
    return dict(json.loads((FOLDER / name).read_text()))


def type_errors(tmp_path: Path, dashboards: list[dict[str, Any]]) -> list[str]:
    """What TypeScript says of dashboards against Grafana's own types."""
    try:
        modules, program = node_modules(), node()
    except NotThereError as why:
        pytest.skip(f"Grafana's schema was not asked: {why}")
    (tmp_path / "node_modules").symlink_to(modules)
    shutil.copy(LOCK / "tsconfig.json", tmp_path)
    source = (LOCK / "check_dashboards.ts").read_text()
    literals = ",\n".join(map(json.dumps, dashboards))
    (tmp_path / "check_dashboards.ts").write_text(source.replace("/* DASHBOARDS */", literals))
    command = [program, str(modules / "typescript" / "bin" / "tsc"), "-p", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return [line for line in done.stdout.splitlines() if "error" in line]


def test_grafanas_own_schema_takes_both_dashboards(tmp_path: Path) -> None:
    assert type_errors(tmp_path, [read(name) for name in FILES]) == []


def test_the_schema_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    invented = read("engines.json") | {"paneles": []}
    mistyped = read("engines.json")
    mistyped["panels"][0]["options"]["tooltip"]["mode"] = "many"
    mistyped["panels"][1]["gridPos"]["w"] = "12"
    said = type_errors(tmp_path, [invented, mistyped])
    assert len(said) >= 2
    assert any("paneles" in line for line in said)


def test_what_is_committed_is_what_the_program_makes() -> None:
    spec = importlib.util.spec_from_file_location("make_dashboards", FOLDER / "make_dashboards.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.dashboards()
    assert sorted(made) == sorted(FILES)
    for name, dashboard in made.items():
        assert (FOLDER / name).read_text() == module.text_of(dashboard)


def test_every_series_of_the_engines_is_one_that_vllm_exports() -> None:
    known = {source.name for entry in metric_table().values.values() for source in entry.sources}
    known |= {re.sub(r"_(sum|count)$", "_bucket", name) for name in known}
    asked = {name for text in expressions(read("engines.json")) for name in re.findall(r"vllm:\w+", text)}
    assert asked
    assert asked <= known


SELECTED = re.compile(r"(kvtrial_\w+)(?:\{([^}]*)\})?")


def written() -> dict[str, set[str]]:
    """Name → labels of every series that kvtrial itself writes for Grafana: of a verdict, and of a history."""
    alarm = change(kind="control", against="")
    floor = NoiseFloor("h1", "aa_noise", "return", "ttft_median_seconds", 0.02, 6, 3)
    pages = [to_textfile(build.verdict()), history_textfile(history(changes=[alarm], noise=[floor]))]
    found: dict[str, set[str]] = {}
    for page in pages:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_series_and_label_of_the_history_is_one_that_a_textfile_has() -> None:
    there, asked = written(), set()
    for panel in read("history.json")["panels"]:
        for target in panel["targets"]:
            for name, selector in SELECTED.findall(target["expr"]):
                asked.add(name)
                assert name in there, name
                assert set(re.findall(r"(\w+)\s*(?:=~|!=|=)", selector)) <= there[name], (name, selector)
            legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert legend <= set.union(*(there[name] for name, _ in SELECTED.findall(target["expr"])))
    assert asked == set(there)


def test_a_series_without_a_writer_would_be_found() -> None:
    assert "kvtrial_history_mood" not in written()
    assert "rack" not in written()["kvtrial_effect"]


def test_a_difference_is_never_divided() -> None:
    for text in expressions(read("history.json")):
        if " / " in text:
            assert 'scale="ratio"' in text


def overlapping(panels: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Panels that lie over each other, by their titles."""
    found = []
    for one, other in itertools.combinations(panels, 2):
        a, b = one["gridPos"], other["gridPos"]
        across = a["x"] < b["x"] + b["w"] and b["x"] < a["x"] + a["w"]
        down = a["y"] < b["y"] + b["h"] and b["y"] < a["y"] + a["h"]
        if across and down:
            found.append((one["title"], other["title"]))
    return found


@pytest.mark.parametrize("name", FILES)
def test_both_arms_or_hosts_can_be_chosen_and_panels_do_not_overlap(name: str) -> None:
    dashboard = read(name)
    chosen = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(dashboard))) - {"__rate_interval"}
    assert "datasource" in used
    assert used <= chosen
    assert overlapping(dashboard["panels"]) == []
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in dashboard["panels"])
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for panel in dashboard["panels"]:
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_panels_that_overlap_are_found() -> None:
    panels = read("history.json")["panels"]
    panels[1]["gridPos"]["x"] -= 1
    assert overlapping(panels) == [(panels[0]["title"], panels[1]["title"])]
