"""A user's trace through the playbook: shipped beside the plan, checked on the host, and named by `reproduce`."""

import json
import subprocess
from pathlib import Path

import pytest
from conftest import BIN, last_line

HERE = Path(__file__).parent
PROTOCOL, TRACE = HERE / "standin_trace.yml", HERE / "standin_trace.jsonl"


def project_with_trace(standin_project):
    """The project, and what names the trace on its command line."""
    return standin_project(protocol=str(PROTOCOL)), ("-e", "kvtrial_pairs=2", "-e", f"kvtrial_trace={TRACE}")


def test_check_mode_reads_the_trace_and_leaves_nothing(standin_project):
    project, said = project_with_trace(standin_project)
    checked = project.play("experiment.yml", "--check", *said)
    assert checked.returncode == 0, checked.stdout
    assert "3 requests over 1 s" in checked.stdout
    assert not project.results.exists()


@pytest.mark.full
def test_a_trace_is_shipped_replayed_and_named_by_reproduce(standin_project, tmp_path):
    project, said = project_with_trace(standin_project)
    done = project.play("experiment.yml", *said)
    assert done.returncode == 0, done.stdout
    (campaign,) = project.campaigns()
    (kept,) = (campaign / "workloads").iterdir()
    (shipped,) = (tmp_path / "state" / "campaigns" / campaign.name / "workloads").iterdir()
    assert shipped.read_bytes() == kept.read_bytes()
    record = next(campaign.glob("runs/h1/*/record.json"))
    replay = next(phase for phase in json.loads(record.read_bytes())["phases"] if phase["name"] == "replay")
    assert (replay["sent"], replay["failed"], replay["output_tokens"]) == (3, 0, 9)
    again = subprocess.run([BIN / "kvtrial", "reproduce", record], capture_output=True, text=True, check=True).stdout
    assert f"kvtrial_trace={kept}" in again


def test_a_bad_line_is_refused_in_the_last_line_before_anything_starts(standin_project, tmp_path):
    first = TRACE.read_text().splitlines()[0]
    (tmp_path / "trace.jsonl").write_text(first + '\n{"time": 8, "prompt": "x", "max_tokens": 0}\n')
    project = standin_project(protocol=str(PROTOCOL))
    done = project.play("experiment.yml", "-e", f"kvtrial_trace={tmp_path / 'trace.jsonl'}")
    assert done.returncode != 0
    assert "trace.jsonl line 2: max_tokens=0 can't be used; give a whole number from 1 to" in last_line(done)
    assert not (tmp_path / "state").exists()
