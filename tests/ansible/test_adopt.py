"""playbooks/adopt.yml as a user plays it, on the verdicts in docs/results, for a fleet in a folder of the test."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from ansible_collections.kvtrial.vllm.plugins.modules import text_files

ROOT = Path(__file__).resolve().parents[2]
RESULTS = "docs/results/h200-2026-11-29"


@pytest.fixture
def fleet(tmp_path):
    """A fleet of two hosts with the pins and what the trial of the 8B model was made with; never connected to."""
    folder = tmp_path / "fleet"
    (folder / "group_vars" / "all").mkdir(parents=True)
    (folder / "group_vars" / "all" / "00-pins.yml").symlink_to(ROOT / "group_vars" / "all" / "pins.yml")
    (folder / "hosts.yml").write_text("all: {hosts: {gpu01: {}, gpu02: {}}}\n")
    (folder / "group_vars" / "all" / "10-fleet.yml").write_text(
        yaml.safe_dump(
            {
                "kvtrial_vllm_version": "0.26.0",
                "kvtrial_model_name": "qwen3-8b-random",
                "adopt_gpu": "NVIDIA H200",
                "adopt_ask_hosts": False,
                "adopt_today": "2026-12-01",
            }
        )
    )
    return folder


def play(tools, fleet, campaign, *arguments, **settings):
    told = {"adopt_campaign": campaign, **settings}
    return tools.run("ansible-playbook", "playbooks/adopt.yml", "-i", str(fleet), "-e", json.dumps(told), *arguments,
                     PWD=str(ROOT))  # fmt: skip


def files(fleet):
    return {str(path.relative_to(fleet)): path.read_text() for path in fleet.rglob("*") if path.is_file()}


def last(done):
    return done.stdout.strip().splitlines()[-1]


def test_it_shows_a_diff_then_writes_it_changes_nothing_twice_and_goes_back(fleet, tools):
    before = files(fleet)
    shown = play(tools, fleet, f"{RESULTS}/offload-8b")
    assert shown.returncode == 0, shown.stdout
    assert "+kvtrial_vllm_version: 0.26.0" in shown.stdout
    assert "+ExecStart=" in shown.stdout and "DEV_MODE=" not in shown.stdout
    assert last(shown).startswith("Nothing is written yet: look at the diff above")
    assert files(fleet) == before

    # A command and an account that are there, so that systemd has nothing to say of the unit.
    real = {"adopt_apply": True, "adopt_executable": "/bin/sleep", "adopt_account": "root"}
    written = play(tools, fleet, f"{RESULTS}/offload-8b/verdict.json", **real)
    assert written.returncode == 0, written.stdout
    assert "no service was touched" in last(written)
    after = files(fleet)
    assert set(after) - set(before) == {"group_vars/all/90-adopted.yml", ".adopted/kvtrial-production.service"}
    assert {name: after[name] for name in before} == before

    # Ansible itself takes the pins, and takes nothing else there for an inventory.
    listed = tools.run("ansible-inventory", "-i", str(fleet), "--host", "gpu02", "--playbook-dir", "playbooks")
    assert json.loads(listed.stdout)["kvtrial_production"]["tier_bytes"] == 36 * 2**30, listed.stderr
    assert "WARNING" not in listed.stderr

    unit = fleet / ".adopted" / "kvtrial-production.service"
    assert "Restart=on-failure" in unit.read_text() and "0.0.0.0" not in unit.read_text()
    if analyze := shutil.which("systemd-analyze"):
        verified = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True, check=False)
        assert (verified.returncode, verified.stderr) == (0, "")

    again = play(tools, fleet, f"{RESULTS}/offload-8b", **real)
    assert "changed=0" in again.stdout and files(fleet) == after

    back = play(tools, fleet, "", adopt_rollback=True)
    assert back.returncode == 0 and files(fleet) == after, back.stdout
    back = play(tools, fleet, "", adopt_rollback=True, adopt_apply=True)
    assert back.returncode == 0 and "group_vars/all/90-adopted.yml" not in files(fleet), back.stdout


@pytest.mark.full
def test_another_adoption_keeps_the_one_before_and_goes_back_to_it(fleet, tools):
    assert play(tools, fleet, f"{RESULTS}/offload-8b", adopt_apply=True).returncode == 0
    first = (fleet / "group_vars/all/90-adopted.yml").read_text()
    assert play(tools, fleet, f"{RESULTS}/offload-8b", "--check", adopt_apply=True).returncode == 0
    done = play(tools, fleet, f"{RESULTS}/ladder", adopt_apply=True, adopt_force="model")
    assert done.returncode == 0, done.stdout
    second = yaml.safe_load((fleet / "group_vars/all/90-adopted.yml").read_text())["kvtrial_production"]
    assert (second["arm"], second["forced"]) == ("more_kv", ["model"])
    assert (fleet / f".adopted/before-{second['campaign']}.yml").read_text() == first
    assert play(tools, fleet, "", adopt_rollback=True, adopt_apply=True).returncode == 0
    assert (fleet / "group_vars/all/90-adopted.yml").read_text() == first
    assert play(tools, fleet, "", adopt_rollback=True, adopt_apply=True).returncode == 0
    none = play(tools, fleet, "", adopt_rollback=True, adopt_apply=True)
    assert none.returncode != 0 and last(none).endswith("there is nothing to go back from.")


def test_a_refusal_is_the_last_line_and_writes_nothing(fleet, tools):
    before = files(fleet)
    settings = {"kvtrial_model_name": "qwen3-0.6b-random", "adopt_apply": True}
    done = play(tools, fleet, f"{RESULTS}/offload-0.6b", **settings)
    assert done.returncode != 0
    assert last(done).startswith("Not adopted: guard ttft_median_seconds of miss (offload against control) is WORSE")
    assert files(fleet) == before


def test_an_undecided_trial_is_no_failure_and_names_the_pairs(fleet, tools):
    done = play(tools, fleet, f"{RESULTS}/aa", adopt_apply=True)
    assert done.returncode == 0
    assert "-e kvtrial_pairs=18" in last(done)
    assert "90-adopted.yml" not in str(files(fleet))


def test_a_file_that_the_pins_would_hide_is_named(fleet, tools):
    (fleet / "group_vars" / "gpus.yml").write_text("x: 1\n")
    done = play(tools, fleet, f"{RESULTS}/offload-8b", adopt_group="gpus")
    assert done.returncode != 0
    assert "group_vars/gpus.yml is a file, and Ansible would pass it over" in last(done)


def test_text_files_are_written_whole_and_only_where_they_differ(tmp_path):
    path = tmp_path / "a" / "b.yml"
    assert text_files.read(str(path)) is None
    text_files.write(str(path), "é\r\n")
    assert text_files.read(str(path)) == "é\r\n"
    assert [p.name for p in path.parent.iterdir()] == ["b.yml"]
    link = tmp_path / "link"
    link.symlink_to(path)
    text_files.write(str(link), "new")
    assert link.is_symlink() and path.read_text() == "new"
    text_files.write(str(path), None)
    assert not path.exists()


def test_a_text_that_its_check_refuses_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "rule"
    path.write_text("before")

    def refuse(partial):
        assert Path(partial).read_text() == "after"
        raise text_files.Refused("not a rule")

    with pytest.raises(text_files.Refused):
        text_files.write(str(path), "after", refuse)
    assert path.read_text() == "before" and [p.name for p in tmp_path.iterdir()] == ["rule"]


def test_files_get_owner_mode_and_readable_folders_whatever_the_umask(tmp_path, tools):
    def play(text, mode, validate="grep -q good %s"):
        path = tmp_path / "new" / "folder" / "rule"
        given = {"files": [{"path": str(path), "text": text, "mode": mode, "validate": validate}]}
        command = [tools.path("ansible"), "localhost", "-m", "kvtrial.vllm.text_files", "-a", json.dumps(given)]
        return path, subprocess.run(["sh", "-c", 'umask 077 && exec "$@"', "-", *command], cwd=ROOT, check=False,
                                    env=tools.environment(), capture_output=True, text=True)  # fmt: skip

    path, done = play("good", "0440")
    assert done.returncode == 0 and "CHANGED" in done.stdout, done.stdout
    assert path.stat().st_mode & 0o777 == 0o440 and path.parent.stat().st_mode & 0o777 == 0o755
    assert "CHANGED" not in play("good", "0440")[1].stdout
    assert "CHANGED" in play("good", "0640")[1].stdout and path.stat().st_mode & 0o777 == 0o640
    _, refused = play("bad", "0440")
    assert refused.returncode != 0 and "since its check refused it" in refused.stdout
    assert path.read_text() == "good"
