"""experiment.yml as a user runs it, with the stand-in engine: endings, interruptions, refusals, teardown."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import yaml
from conftest import last_line, progress_of, wait_for


def leftovers(folder: Path) -> list[str]:
    """Command lines of living processes of ours that concern `folder`; whole ones, where ps would cut them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in words and re.search(r"kvtrial|vllm", words):
            found.append(words)
    return found


def test_two_pairs_end_inconclusive_and_leave_every_promised_file(standin_project):
    project = standin_project()
    done = project.play("experiment.yml", "-e", "kvtrial_pairs=2")
    assert done.returncode == 0, done.stdout[-3000:]
    latest = project.results / "latest"
    assert latest.is_symlink()
    for name in ("campaign.json", "verdict.json", "summary.csv", "summary.parquet", "report.html", "metrics.prom"):
        assert (latest / name).stat().st_size > 0, name
    runs = sorted(path.parent for path in latest.glob("runs/h1/*/record.json"))
    assert len(runs) == 4
    for run in runs:
        assert (run / "requests.jsonl.zst").is_file()
        assert (run / "engine.log.zst").is_file()
        assert (run / "metrics" / "return.before.prom").is_file()
        assert (run / "metrics" / "return.after.prom").is_file()
    verdict = project.verdict()
    assert verdict["verdict"] == "INCONCLUSIVE"
    assert verdict["evidence"] == "standin"
    assert "INCONCLUSIVE" in done.stdout
    assert "can't reach p < .05" in done.stdout
    assert leftovers(project.folder) == []
    # A removal asks the host whether its runs are here.
    (fetched,) = (project.folder / "state").glob("fetched/*.json")
    digests = {run.name: (run / "record.sha256").read_text().split()[0] for run in runs}
    assert json.loads(fetched.read_text()) == {"runs": digests}


def test_an_invalid_campaign_fails_with_the_cause_in_the_last_line(standin_project):
    project = standin_project(faults="no_load")
    done = project.play("experiment.yml", "-e", "kvtrial_pairs=2")
    assert done.returncode != 0
    assert "treatment_delivered" in last_line(done)
    assert project.verdict()["verdict"] == "INVALID"


MOMENTS = [
    ("while the first engine starts", lambda p: p.get("run") is not None),
    ("in the middle of a pair", lambda p: p.get("runs_done", 0) >= 1 and p.get("phase") == "return"),
    ("in the last pair", lambda p: p.get("runs_done", 0) >= 2),
]


def test_the_playbook_killed_at_three_moments_the_same_command_goes_on(standin_project):
    project = standin_project(faults="slow_start:1")
    state = project.folder / "state"
    for _name, moment in MOMENTS:
        playbook = project.start("-e", "kvtrial_pairs=2")
        wait_for(lambda moment=moment: moment(progress_of(state)))
        os.killpg(playbook.pid, signal.SIGKILL)
        playbook.communicate()
        assert progress_of(state)["state"] in ("running", "starting", "finished")
    done = project.play("experiment.yml", "-e", "kvtrial_pairs=2")
    assert done.returncode == 0, done.stdout[-3000:]
    assert len(project.campaigns()) == 1
    assert len(list(project.results.glob("latest/runs/h1/*/record.json"))) == 4
    assert project.verdict()["verdict"] == "INCONCLUSIVE"
    assert leftovers(project.folder) == []


def test_another_plan_does_not_resume_an_unfinished_campaign(standin_project):
    project = standin_project(faults="slow_start:3")
    playbook = project.start("-e", "kvtrial_pairs=2")
    wait_for(lambda: progress_of(project.folder / "state").get("run") is not None)
    os.killpg(playbook.pid, signal.SIGTERM)
    playbook.communicate()
    stopped = project.play("playbooks/teardown.yml")
    assert stopped.returncode == 0, stopped.stdout[-3000:]
    assert leftovers(project.folder) == []
    refused = project.play("experiment.yml", "-e", "kvtrial_pairs=4")
    assert refused.returncode != 0
    assert "is unfinished and its plan differs" in last_line(refused)
    assert "kvtrial_new_campaign=true" in last_line(refused)
    assert len(project.campaigns()) == 1


def test_teardown_stops_a_program_whose_installation_is_gone(standin_project):
    project = standin_project(faults="slow_start:3")
    playbook = project.start("-e", "kvtrial_pairs=2")
    wait_for(lambda: progress_of(project.folder / "state").get("phase") is not None)
    os.killpg(playbook.pid, signal.SIGKILL)
    playbook.communicate()
    assert leftovers(project.folder) != []
    stopped = project.play("playbooks/teardown.yml", "-e", "workload_venv_root=/nowhere", "-e", "kvtrial_purge=true")
    assert stopped.returncode == 0, stopped.stdout[-3000:]
    assert leftovers(project.folder) == []
    assert not (project.folder / "state").exists()


def test_a_host_that_is_out_of_reach_from_the_start_is_named_and_the_others_go_on(standin_project):
    project = standin_project()
    path = project.inventory / "hosts.yml"
    hosts = yaml.safe_load(path.read_text())["all"]["hosts"]
    # The lost host comes first: what is done once for all hosts must not depend on it.
    lost = {**hosts["h1"], "ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 9,
            "ansible_ssh_extra_args": "-o ConnectTimeout=2"}  # fmt: skip
    path.write_text(yaml.safe_dump({"all": {"hosts": {"a0": lost, **hosts}}}))
    done = project.play("experiment.yml", "-e", "kvtrial_pairs=2")
    assert done.returncode == 0, done.stdout[-3000:]
    after_recap = done.stdout.split("PLAY RECAP")[1]
    assert "a0 did not take part to the end: a0 could not be reached" in after_recap
    assert after_recap.index("a0 did not take part") < after_recap.index("INCONCLUSIVE")
    assert len(list(project.results.glob("latest/runs/h1/*/record.json"))) == 4
    # It is still away: the same command goes on with that campaign, and does nothing again.
    before = {path: path.stat().st_mtime_ns for path in project.results.glob("latest/runs/h1/*/record.json")}
    again = project.play("experiment.yml", "-e", "kvtrial_pairs=2")
    assert again.returncode == 0, again.stdout[-3000:]
    assert "whose hosts a0 (never planned) are not at hand" in " ".join(again.stdout.split()), again.stdout[-3000:]
    assert "Nothing is left to do on those at hand" in " ".join(again.stdout.split())
    assert len(list(project.results.glob("*-*/campaign.json"))) == 1
    assert {path: path.stat().st_mtime_ns for path in before} == before


REFUSED = [
    ("protocol=offload_retrun", "Did you mean offload_return"),
    ("arms=offlaod", "known: control, offload"),
    ("kvtrial_pairs=5", "even number"),
    ("kvtrial_pairs=six", "kvtrial_pairs=six"),
    ("kvtrial_seed=x", "kvtrial_seed=x"),
    ("kvtrial_host_may_be_disturbed=false", "kvtrial_host_may_be_disturbed"),
    ("kvtrial_port=0", "kvtrial_port"),
    ('{"kvtrial_sizes": {"tier_bytes": 8}}', "did you mean 8 GiB (8589934592)"),
    ('{"kvtrial_sizes": {"pressure": 3, "prompt_tokens": 144}}', "num-gpu-blocks-override"),
    ('{"kvtrial_connector_extra_config": {"cpu_byte_to_use": 5}}', "cpu_bytes_to_use"),
    ('{"kvtrial_engine_args": {"kv-offloading-size": 4, "block-size": 32, "num-gpu-blocks-override": 33}}',
     "--kv-offloading-size"),
    ('{"kvtrial_engine_args": {"host": "0.0.0.0", "num-gpu-blocks-override": 33}}', "127.0.0.1"),
    ("kvtrial_backend=rocm", "rocm"),
    ("kvtrial_own_hit_share=30", "0 to 1"),
    ("vllm_existing_venv=/nowhere", "/nowhere"),
    ("protocol=seed_example", "num-gpu-blocks-override"),
]  # fmt: skip


@pytest.mark.parametrize(("extra", "named"), REFUSED, ids=[extra[:40] for extra, _ in REFUSED])
def test_bad_input_is_refused_in_the_last_line_before_anything_starts(standin_project, extra, named):
    more = {}
    if extra == "protocol=seed_example":
        sizes_as_declared = {"block-size": 32, "max-model-len": 512, "kv-cache-memory-bytes": "256M"}
        more = {"kvtrial_sizes": {}, "kvtrial_engine_args": {**sizes_as_declared, "num-gpu-blocks-override": 33}}
    project = standin_project(**more)
    started = time.monotonic()
    done = project.play("experiment.yml", "-e", extra)
    assert done.returncode != 0, f"{time.monotonic() - started:.0f} s\n{done.stdout[-3000:]}"
    assert named in last_line(done), done.stdout[-2500:]
    assert project.campaigns() == []
    assert progress_of(project.folder / "state") == {}
