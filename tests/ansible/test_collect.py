"""What a fetch leaves on a host."""

import json
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]


def test_root_writes_no_note_through_a_link_of_the_programs_account(tmp_path, tools):
    """The campaign's folder belongs to the account of the host program, which may have turned bad."""
    tasks = yaml.safe_load((ROOT / "roles" / "collect" / "tasks" / "main.yml").read_text())
    note = next(task for task in tasks[0]["block"] if "kvtrial.vllm.text_files" in task)
    campaign, victim = tmp_path / "state" / "campaigns" / "c-1", tmp_path / "victim"
    campaign.mkdir(parents=True)
    victim.write_text("secret of root's\n")
    for name in ("fetched.json", "fetched", "c-1.json"):
        (campaign / name).symlink_to(victim)
    told = {
        **yaml.safe_load((ROOT / "roles" / "collect" / "vars" / "main.yml").read_text()),
        "ansible_connection": "local",
        "collect_directory": str(campaign),
        "collect_parts": "full",
        "__collect_packed": {"reply": {"runs": {"p01-1-control": "1" * 64}}},
    }
    (tmp_path / "play.yml").write_text(
        yaml.safe_dump([{"hosts": "localhost", "gather_facts": False, "vars": told, "tasks": [note]}])
    )
    done = tools.run("ansible-playbook", "--diff", str(tmp_path / "play.yml"))
    assert done.returncode == 0, done.stdout
    assert victim.read_text() == "secret of root's\n" and "secret of root's" not in done.stdout
    assert json.loads((tmp_path / "state" / "fetched" / "c-1.json").read_text()) == {
        "runs": {"p01-1-control": "1" * 64}
    }
