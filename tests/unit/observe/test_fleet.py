"""Many servers in one folder: an answer for each, and what they show together."""

import json
from pathlib import Path

import pytest
from kvtrial.analysis.cli import main
from kvtrial.analysis.observe.fleet import servers_in
from kvtrial.record.errors import UnusableInput
from planted import page


def server(folder: Path, name: str, *pages: str, **files: object) -> None:
    """One server's folder."""
    (folder / name).mkdir()
    for number, text in enumerate(pages):
        (folder / name / f"t{number}.prom").write_text(text)
    for file, content in files.items():
        suffix = {"window": "json", "facts": "json", "error": "txt", "server": "log"}[file]
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name / f"{file}.{suffix}").write_text(text)


def facts(*argv: str, version: str = "0.31.0") -> dict[str, object]:
    return {"argv": ["vllm", "serve", "m", "--host", "127.0.0.1", *argv], "vllm_version": version}


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    busy = [page(version="0.31.0", running=3, finished=n, prompt=n, generated=n) for n in (10, 20)]
    stuck = [page(version="0.31.0", running=0, waiting=4)] * 2
    for number in range(4):
        server(tmp_path, f"well-{number}", *busy, facts=facts("--max-num-seqs", "64"), window={"interval_seconds": 60})
    server(tmp_path, "stuck", *stuck, facts=facts("--max-num-seqs", "64"), window={"interval_seconds": 60})
    server(tmp_path, "other", *busy, facts=facts("--max-num-seqs", "512", version="0.26.0"))
    server(tmp_path, "gone", error="http://gone:8000/metrics does not answer (connection refused)")
    return tmp_path


def test_every_server_has_its_answer_and_one_that_is_gone_stops_no_other(fleet, capsys):
    assert main(["observe", "--fleet", str(fleet), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {name: one["class"] for name, one in answer["servers"].items()} == {
        **{f"well-{number}": "no_fault_seen" for number in range(4)},
        "other": "no_fault_seen",
        "stuck": "scheduler_deadlock",
        "gone": "server_does_not_answer",
    }
    assert answer["class"] == "scheduler_deadlock"


def test_the_fleet_is_summed_up_and_the_odd_one_named(fleet, capsys):
    main(["observe", "--fleet", str(fleet), "--json"])
    found = {one["class"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert found["fleet_overview"]["numbers"]["without_trouble"] == 5
    assert "0.26.0 on other" in found["fleet_versions_differ"]["reason"]
    assert "other (--max-num-seqs 512, else 64)" in found["fleet_configurations_differ"]["reason"]


def test_those_in_trouble_come_first(fleet, capsys):
    main(["observe", "--fleet", str(fleet)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("stuck: scheduler_deadlock")
    assert lines[1].startswith("gone: server_does_not_answer")
    assert any(line.startswith("fleet: 7 servers, 5 of them without trouble") for line in lines)


def test_a_fleet_of_equals_has_nothing_that_differs(tmp_path, capsys):
    for number in range(3):
        server(tmp_path, f"h{number}", page(finished=1), page(finished=2), facts=facts())
    main(["observe", "--fleet", str(tmp_path), "--json"])
    assert [one["class"] for one in json.loads(capsys.readouterr().out)["findings"]] == ["fleet_overview"]


def test_pages_are_taken_in_the_order_of_their_numbers(tmp_path):
    server(tmp_path, "h", *[page(finished=n) for n in range(12)])
    assert [path.name for path in servers_in(tmp_path)["h"].pages][:3] == ["t0.prom", "t1.prom", "t2.prom"]
    assert servers_in(tmp_path)["h"].pages[-1].name == "t11.prom"


def test_a_folder_without_a_server_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnusableInput, match="holds no server"):
        servers_in(tmp_path)
