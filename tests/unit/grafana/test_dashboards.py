import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from from_npm import LOCK, ROOT, NotThereError, node, node_modules
from kvtrial.record.exposition import metric_table

FOLDER = ROOT / "grafana"
FILES = ("engines.json", "history.json")
OURS = {"kvtrial_effect", "kvtrial_effect_ci_low", "kvtrial_effect_ci_high", "kvtrial_gate_passed", "kvtrial_runs",
        "kvtrial_verdict_info"}  # fmt: skip


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


def test_every_series_of_the_history_is_one_that_the_textfile_has() -> None:
    asked = {name for text in expressions(read("history.json")) for name in re.findall(r"kvtrial_\w+", text)}
    assert asked == OURS


@pytest.mark.parametrize("name", FILES)
def test_both_arms_or_hosts_can_be_chosen_and_panels_do_not_overlap(name: str) -> None:
    dashboard = read(name)
    chosen = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = {word for text in expressions(dashboard) for word in re.findall(r"\$(\w+)", text)} - {"__rate_interval"}
    assert used <= chosen
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(places)
    for panel in dashboard["panels"]:
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
