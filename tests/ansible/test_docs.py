"""Documents that name tests, tables and versions say what is so."""

import json
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_that_the_table_of_complaints_names_exists():
    text = (ROOT / "docs" / "provision" / "complaints.md").read_text()
    rows = re.findall(r"^\| (\d+) \|.*\|$", text, re.MULTILINE)
    assert rows == [str(number) for number in range(1, 11)]
    for row in re.findall(r"^\| \d+ \|.*$", text, re.MULTILINE):
        assert "::test_" in row


def test_every_test_that_a_document_names_is_collected(tools):
    """By pytest itself: a name that is written somewhere, and of no test, would pass for one else."""
    texts = [path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")]]
    named = {found for text in texts for found in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)}
    assert len(named) > 30
    files = sorted({path for path, _ in named})
    done = tools.run("python", "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files)
    collected = set(re.findall(r"^(tests/[\w/]+\.py)::(\w+)", done.stdout, re.MULTILINE))
    assert named - collected == set(), done.stdout[-2000:] + done.stderr[-2000:]


def test_the_table_of_drivers_is_that_of_the_data():
    table = yaml.safe_load((ROOT / "analysis/kvtrial/record/data/cuda.yml").read_text())
    least = {row["cuda_major"]: row["least_driver"] for row in table["drivers"]}
    lines = []
    for row in table["wheels"]:
        releases = f"{row['since']} to before {row['until']}" if "until" in row else f"{row['since']} and newer"
        driver = least[int(row["cuda"].split(".")[0])]
        lines.append(f"| {releases} | {row['cuda']} | {driver} | {row['python_min']} to {row['python_max']} |")
    text = (ROOT / "docs" / "provision" / "driver.md").read_text()
    assert "\n".join(lines) in text


def test_the_table_of_locks_is_that_of_the_locks():
    text = (ROOT / "docs" / "provision" / "engine.md").read_text()
    for lock in sorted((ROOT / "requirements").glob("engine-vllm-cuda-*.0.txt")):
        wheels = re.findall(r"^# wheels (\S+): (.+)$", lock.read_text(), re.MULTILINE)
        pythons = {pythons for _, pythons in wheels}
        assert len(pythons) == 1, lock
        versions = pythons.pop().split()
        row = f"| `requirements/{lock.name}` | {versions[0]} to {versions[-1]} | {', '.join(a for a, _ in wheels)} |"
        assert row in text


def test_ansible_core_is_locked_and_its_version_checked():
    """Complaint 9."""
    for lock in (ROOT / "requirements").glob("controller-*.txt"):
        assert re.search(r"^ansible-core==[\d.]+ \\\n    --hash=sha256:", lock.read_text(), re.MULTILINE), lock
    inventory = (ROOT / "roles" / "preflight" / "tasks" / "inventory.yml").read_text()
    assert "ansible_version.full is version(__preflight_ansible, '>=')" in inventory
    for name in ("provision", "prepare"):
        assert "tasks_from: inventory" in (ROOT / "playbooks" / f"{name}.yml").read_text()


def test_what_a_provision_costs_the_controller_is_said_as_it_was_measured():
    rows = json.loads((ROOT / "tests" / "bench" / "results" / "fleet.json").read_text())["rows"]
    measured = {(row["subject"], row["metric"]): row["value"] for row in rows}
    text = (ROOT / "docs" / "provision" / "tests.md").read_text()
    for words, metric in (
        ("CPU of the controller a host, s", "controller CPU per host"),
        ("tasks a host", "tasks per host"),
        ("of them skipped", "tasks skipped per host"),
        ("wall time of the ten, s", "wall time of the fleet"),
    ):
        first, again = (
            measured[f"{subject}, 10 hosts", metric] for subject in ("first provision", "provision without a change")
        )
        assert f"| {words} | {first} | {again} |" in text
    assert measured["provision without a change, 10 hosts", "controller CPU per host"] <= 5
