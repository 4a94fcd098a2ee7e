"""Documents that name tests, tables and versions say what is so."""

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
