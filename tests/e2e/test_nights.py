"""Nights by ansible-runner as the timer starts them, on this machine: what is kept, found, skipped and said.

tests/fleet/test_nightly.py does it on real hosts with the timer itself.
"""

import importlib.util
import json
import subprocess
import sys

import pytest
import yaml
from conftest import BIN, ROOT

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]
HAS_HISTORY = importlib.util.find_spec("kvtrial.analysis.history") is not None


class Nights:
    """A private data directory of ansible-runner, as the role `nightly` makes it."""

    def __init__(self, project) -> None:
        self.project = project
        self.folder = project.folder / "private"
        self.store = str(project.folder / "history") if HAS_HISTORY else ""
        (self.folder / "env").mkdir(parents=True)
        (self.folder / "project").symlink_to(ROOT)
        (self.folder / "inventory").symlink_to(project.inventory)
        (self.folder / "env" / "settings").write_text(json.dumps({"idle_timeout": 0, "job_timeout": 0}))
        environment = {"NO_COLOR": "1", "ANSIBLE_STDOUT_CALLBACK": "kvtrial.vllm.console"}
        (self.folder / "env" / "envvars").write_text(json.dumps(environment))

    def tell(self, **variables) -> None:
        """Change the inventory."""
        path = self.project.inventory / "hosts.yml"
        hosts = yaml.safe_load(path.read_text())
        hosts["all"]["hosts"]["h1"].update(variables)
        path.write_text(yaml.safe_dump(hosts))

    def night(self, date: str):
        """One night: (status, what was printed, what set_stats handed on)."""
        extra = {
            "kvtrial_new_campaign": True,
            "kvtrial_if_controller_gone": "stop",
            "kvtrial_pairs": 2,
            "kvtrial_fetch": "summary",
            "kvtrial_history_store": self.store,
            "kvtrial_night": date,
            "kvtrial_noise_protocol": str(ROOT / "tests" / "e2e" / "standin_noise.yml"),
        }
        (self.folder / "env" / "extravars").write_text(json.dumps(extra))
        done = subprocess.run(
            [BIN / "ansible-runner", "run", self.folder, "--playbook", "playbooks/night.yml", "--ident", date,
             "--rotate-artifacts", "3"],
            env=self.project.environment(), capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert "Traceback" not in done.stdout + done.stderr
        events = [json.loads(p.read_text()) for p in (self.folder / "artifacts" / date / "job_events").glob("*.json")]
        [stats] = [event["event_data"] for event in events if event["event"] == "playbook_on_stats"]
        return done.returncode, done.stdout, stats.get("artifact_data") or {}


def test_three_nights_the_last_slower_then_one_skipped_and_one_that_fails(standin_project):
    project = standin_project()
    nights = Nights(project)
    told = []
    # A pace beside which the machine's own load is little: of three nights a step is told by its size alone.
    for date, slowdown in (("2027-01-01", "10"), ("2027-01-02", "10"), ("2027-01-03", "40")):
        if slowdown == "40":
            (project.folder / "venv" / "lib/python3.11/site-packages/update-2.0.dist-info").mkdir(parents=True)
        nights.tell(kvtrial_engine_env={"VLLM_SERVER_DEV_MODE": "1", "STANDIN_SLOWDOWN": slowdown})
        status, output, handed_on = nights.night(date)
        assert status == 0, output[-3000:]
        assert handed_on["kvtrial_verdict"] == "INCONCLUSIVE"
        assert "INCONCLUSIVE: " in output.partition("PLAY RECAP")[2]
        told.append(handed_on)
    assert len({night["kvtrial_campaign"] for night in told}) == 3
    assert all(night["kvtrial_noise_campaign"].startswith("aa_noise-") for night in told)
    if HAS_HISTORY:
        alarms = [[line for line in n["kvtrial_history"] if "ALARM" in line and "TTFT" in line] for n in told]
        assert alarms[0] == alarms[1] == []
        assert alarms[2], "\n".join(told[2]["kvtrial_history"])
        assert "rose" in alarms[2][0] and "on 3 Jan; vllm_lock" in alarms[2][0], told[2]
        assert told[2]["kvtrial_history_alarm"]
        assert any(line.startswith("noise of h1, ") for line in told[0]["kvtrial_history"]), told[0]

    foreign = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", "vllm serve other"])
    try:
        status, output, handed_on = nights.night("2027-01-04")
    finally:
        foreign.kill()
        foreign.wait()
    assert status == 0
    assert f"skipped: h1: another engine runs here, pid {foreign.pid} (" in output
    assert "The night is skipped: others use every host (h1)." in output
    assert "another engine runs here" in handed_on["kvtrial_skipped_hosts"]["h1"]
    assert "kvtrial_verdict" not in handed_on

    nights.tell(kvtrial_host_may_be_disturbed=False)
    status, output, _ = nights.night("2027-01-05")
    assert status != 0
    assert [line for line in output.splitlines() if line.strip()][-1].startswith(
        "h1: kvtrial_host_may_be_disturbed is False; an experiment loads the host"
    )
    kept = sorted(path.name for path in (nights.folder / "artifacts").iterdir())
    assert kept == ["2027-01-03", "2027-01-04", "2027-01-05"]
