"""playbooks/night.yml before its campaign, what it removes after it, and playbooks/fetch.yml with nothing to fetch."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ansible_collections.kvtrial.vllm.plugins.modules import host_retire
from kvtrial.analysis import campaign
from kvtrial.analysis.retention import RETIRED, retire
from kvtrial.record.errors import UnusableInput

ROOT = Path(__file__).parents[2]
LOCAL = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
DEAD = {"ansible_host": "127.0.0.1", "ansible_port": 1, "ansible_ssh_common_args": "-o ConnectTimeout=2"}


@pytest.fixture
def fleet(tmp_path, tools):
    """Plays a playbook on an inventory with the pins."""
    (tmp_path / "inventory" / "group_vars" / "all").mkdir(parents=True)
    (tmp_path / "inventory" / "group_vars" / "all" / "00-pins.yml").symlink_to(ROOT / "group_vars" / "all" / "pins.yml")

    def play(playbook, hosts, here=None, **variables):
        own = {"kvtrial_state_dir": str(tmp_path / "state"), "kvtrial_backend": "cpu", **variables}
        inventory = {"all": {"hosts": hosts, "vars": own}}
        (tmp_path / "inventory" / "hosts.yml").write_text(yaml.safe_dump(inventory))
        seen_from = {"PWD": str(here)} if here else {}
        return tools.run("ansible-playbook", f"playbooks/{playbook}", "-i", str(tmp_path / "inventory"), **seen_from)

    return play


@pytest.fixture
def foreign():
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", "vllm serve other"])
    yield other
    other.kill()
    other.wait()


def test_a_night_without_a_host_is_skipped_in_one_sentence_that_names_busy_and_unreachable_ones(fleet, foreign):
    done = fleet("night.yml", {"h1": LOCAL, "dead": DEAD}, kvtrial_history_store="/nonexistent")
    said = "The night is skipped: no host is left; others use h1, and dead could not be reached."
    assert said in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout
    assert re.search(rf"skipped: h1: another engine runs here, pid [\d, ]*\b{foreign.pid}\b", done.stdout), done.stdout


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"kvtrial_history_arguments": ["--webhook", "https://chat.example/hook-of-ours"]},
            "give the address as kvtrial_",
        ),
        (
            {"kvtrial_history_arguments": ["--webho", "https://chat.example/hook-of-ours"]},
            "give the address as kvtrial_",
        ),
        ({"kvtrial_history_arguments": "--textfile /x/h.prom"}, "kvtrial_history_arguments is no list; give each word"),
        ({"kvtrial_noise_pairs": "two"}, "kvtrial_noise_pairs=two is no whole number from 0"),
        ({"kvtrial_keep_campaigns": -1}, "kvtrial_keep_campaigns=-1 is no whole number from 0"),
    ],
)
def test_what_a_night_cannot_use_is_refused_before_a_host_is_asked(tools, tmp_path, given, said):
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"dead": DEAD}}}))
    done = tools.run("ansible-playbook", "playbooks/night.yml", "-i", str(tmp_path), "-e", json.dumps(given))
    assert done.returncode != 0 and said in " ".join(done.stdout.split()), done.stdout
    assert "hook-of-ours" not in done.stdout and "unreachable=1" not in done.stdout


def test_a_host_that_was_not_made_ready_is_left_out_of_the_campaign_by_name(tools, tmp_path):
    """The A/A pairs' end has forgotten its failure; h1 is ready, h2 failed before, h3 is in use by others."""
    plays = yaml.safe_load((ROOT / "playbooks" / "night.yml").read_text())
    turn = next(play for play in plays if play["name"] == "Turn to the campaign")
    turn["hosts"] = "all"
    after = {
        "hosts": "all",
        "gather_facts": False,
        "tasks": [{"name": "Measure", "ansible.builtin.debug": {"msg": "x"}}],
    }
    (tmp_path / "play.yml").write_text(yaml.safe_dump([turn, after]))
    hosts = {"h1": {**LOCAL, "engine_inputs": {}}, "h2": LOCAL, "h3": LOCAL}
    groups = {"all": {"hosts": hosts}, "kvtrial_busy": {"hosts": {"h3": {}}}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(groups))
    done = tools.run("ansible-playbook", "-i", str(tmp_path / "hosts.yml"), str(tmp_path / "play.yml"))
    assert "h2 was not made ready, so it takes no part in this night's campaign" in done.stdout
    measured = done.stdout.partition("TASK [Measure]")[2]
    assert "ok: [h1]" in measured and "[h2] =>" not in measured.partition("PLAY RECAP")[0], measured


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "aa_noise"),
        ({"protocol": "preemption_ladder"}, "preemption_noise"),
        ({"protocol": "offload_mix"}, None),
        ({"protocol": "offload_mix", "kvtrial_noise_protocol": "mine"}, "mine"),
        ({"kvtrial_noise_pairs": 0}, None),
        # What stands in the inventory, of which a play's choice of hosts knows nothing by itself.
        ({"inventory": {"protocol": "offload_mix"}}, None),
        ({"inventory": {"protocol": "preemption_ladder"}}, "preemption_noise"),
        ({"inventory": {"kvtrial_noise_pairs": 0}}, None),
    ],
)
def test_the_aa_pairs_are_of_a_protocol_that_knows_the_campaigns_sizes_or_there_are_none(tools, tmp_path, given, said):
    given = dict(given)
    plays = yaml.safe_load((ROOT / "playbooks" / "night.yml").read_text())
    pairs = next(play for play in plays if play["name"] == "Run the A/A pairs")
    pairs["ansible.builtin.import_playbook"] = "measure.yml"
    pairs["vars"] |= {"kvtrial_hosts_free": "h2", "kvtrial_tonight": "x"}
    look = next(play for play in plays if play["name"] == "Look for hosts that others use")
    look["tasks"] = [task for task in look["tasks"] if task["name"] == "Take note of the hosts that run A/A pairs"]
    (tmp_path / "night.yml").write_text(yaml.safe_dump([look, pairs]))
    measure = yaml.safe_load((ROOT / "playbooks" / "measure.yml").read_text())[0]
    measure["tasks"] = [{"ansible.builtin.debug": {"msg": "by {{ kvtrial_request_tonight.protocol }}"}}]
    (tmp_path / "measure.yml").write_text(yaml.safe_dump([measure]))
    fleet = {"hosts": {"h1": LOCAL, "h2": LOCAL}, "vars": given.pop("inventory", {})}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": fleet}))
    done = tools.run(
        "ansible-playbook", "-i", str(tmp_path / "hosts.yml"), str(tmp_path / "night.yml"), "-e", json.dumps(given)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ran = re.findall(r"ok: \[(\w+)\] => (?:.|\n)*?msg: (.*)", done.stdout.partition("TASK [ansible.builtin.debug]")[2])
    assert ran == ([] if said is None else [("h2", f"by {said}")]), done.stdout


def made(results: Path, name: str, night: str) -> Path:
    """A campaign's folder with what its plan is made of left out."""
    folder = results / name
    folder.mkdir(parents=True)
    told = {**json.loads(TEMPLATE), "campaign": name}
    told["provenance"]["night"] = night
    (folder / "campaign.json").write_text(json.dumps(told))
    return folder


@pytest.fixture(scope="module", autouse=True)
def template(tmp_path_factory):
    global TEMPLATE
    sys.path.insert(0, str(ROOT / "tests" / "unit" / "plan"))
    from test_plan import request

    asked = {**request(), "results_dir": str(tmp_path_factory.mktemp("results"))}
    TEMPLATE = (Path(campaign.prepare(asked)["directory"]) / "campaign.json").read_text()


TEMPLATE = ""


def test_older_nights_go_when_one_has_landed_and_nothing_else_goes(tmp_path):
    results = tmp_path / "results"
    by_hand = made(results, "offload_return-x", "")
    for number in (1, 2, 3, 4):
        names = (f"offload_return-{number}", f"aa_noise-{number}")
        tonight = [made(results, name, f"2026-11-0{number}") for name in names]
        if number == 3:
            continue  # it never landed, and may be gone on with
        gone = retire([str(folder) for folder in tonight], keep_nights=2)
    assert gone == ["offload_return-1", "aa_noise-1"]
    left = sorted(path.name for path in results.iterdir())
    kept = [f"{protocol}-{night}" for protocol in ("aa_noise", "offload_return") for night in (2, 3, 4)]
    assert left == sorted([*kept, by_hand.name, RETIRED])
    # Cut off after they were named: the rest is removed the next time, and hosts are told again.
    (results / "offload_return-4").rename(results / ".retired-offload_return-4")
    assert retire([str(results / "aa_noise-4")], keep_nights=1) == [
        "offload_return-2", "aa_noise-2", "offload_return-1", "aa_noise-1",
    ]  # fmt: skip
    assert not list(results.glob(".retired-*"))


def test_the_newest_by_the_link_stays_and_keeping_none_is_refused(tmp_path):
    results = tmp_path / "results"
    old, new = made(results, "a-1", "2026-11-01"), made(results, "a-2", "2026-11-02")
    (results / "latest").symlink_to("a-1")
    retire([str(old)], keep_nights=1)
    assert retire([str(new)], keep_nights=1) == []
    assert old.is_dir()
    with pytest.raises(UnusableInput, match="kvtrial_keep_campaigns=0 keeps no night"):
        retire([str(new)], keep_nights=0)


def test_a_host_removes_the_campaigns_that_are_named_and_its_own(tmp_path):
    for name in ("c-1", "c-2", "c-3", "notes"):
        (tmp_path / "campaigns" / name).mkdir(parents=True)
    for name in ("c-1", "c-2", "c-3"):
        (tmp_path / "campaigns" / name / "plan.json").write_text('{"schema_version": "1.0"}')
    for name, word in (("c-1", "c-1"), ("c-2", "other"), ("c-3", "c-3")):
        (tmp_path / "campaigns" / name / "campaign").write_text(f"{word}\n")
    (tmp_path / "campaigns" / "notes" / "mine").write_text("kept")
    # c-2 does not bear its name, c-3 is not named, notes are somebody's.
    assert host_retire.due(str(tmp_path), ["c-1", "c-2", "notes", "../.."]) == [str(tmp_path / "campaigns" / "c-1")]


@pytest.mark.parametrize("left", [["plan.json", "campaign"], ["plan.json"], []])
def test_a_removal_that_was_cut_off_is_gone_on_with(tmp_path, left, monkeypatch):
    folder = tmp_path / "campaigns" / "c-1"
    (folder / "runs").mkdir(parents=True)
    for name, text in (("plan.json", '{"schema_version": "1.0"}'), ("campaign", "c-1\n"), ("runs/x", "y")):
        (folder / name).write_text(text)
    unlink, gone = host_retire.os.unlink, []

    def cut_off(path, *rest, **more):
        if {one.name for one in folder.iterdir()} == set(left):
            raise OSError(5, "cut off", str(path))
        gone.append(path)
        unlink(path, *rest, **more)

    monkeypatch.setattr(host_retire.os, "unlink", cut_off)
    host_retire.remove([str(folder)])
    monkeypatch.undo()
    assert host_retire.due(str(tmp_path), ["c-1"]) == ([str(folder)] if folder.exists() else [])
    assert host_retire.remove(host_retire.due(str(tmp_path), ["c-1"]))[1] == [] and not folder.exists()


def test_a_night_that_goes_takes_along_what_says_that_its_runs_were_fetched(tmp_path):
    (tmp_path / "campaigns" / "c-1").mkdir(parents=True)
    (tmp_path / "fetched").mkdir()
    for name in ("c-1", "c-2"):
        (tmp_path / "fetched" / f"{name}.json").write_text('{"runs": {}}')
    assert host_retire.remove([str(tmp_path / "campaigns" / "c-1")])[1] == []
    assert [path.name for path in (tmp_path / "fetched").iterdir()] == ["c-2.json"]


def test_a_folder_that_can_not_be_removed_is_named_and_fails_no_night(tmp_path, monkeypatch):
    (tmp_path / "campaigns" / "c-1").mkdir(parents=True)

    def refuse(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(host_retire.ownership, "remove_folder", refuse)
    removed, [said] = host_retire.remove([str(tmp_path / "campaigns" / "c-1")])
    assert removed == [] and "c-1, of an older night, could not be removed ([Errno 13] Permission denied" in said


def test_two_controllers_on_one_folder_of_results_remove_the_same_night(tmp_path, monkeypatch):
    results = tmp_path / "results"
    old, new = made(results, "a-1", "2026-11-01"), made(results, "a-2", "2026-11-02")
    retire([str(old)], keep_nights=1)
    rename = Path.rename

    def another_was_first(path, target):
        shutil.rmtree(path)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", another_was_first)
    assert retire([str(new)], keep_nights=1) == ["a-1"] and not old.exists()


def test_the_metrics_of_a_night_can_be_reached_by_another_account_and_nothing_else_can(tmp_path):
    sys.path.insert(0, str(ROOT / "tests" / "unit" / "plan"))
    from test_plan import request

    umask = os.umask(0o077)
    try:
        folder = Path(campaign.prepare({**request(), "results_dir": str(tmp_path / "results")})["directory"])
    finally:
        os.umask(umask)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder.parent, folder)] == [0o755, 0o755]
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in folder.iterdir()} == {0}


def ready(**facts):
    """A host with what the preflight found, as the fleet's check takes it."""
    found = {"driver_version": "580.126", "kernel": "6.8", "gpus": [], "cpu_governor": "performance", **facts}
    return {**LOCAL, "__preflight_host": {"facts": found}, "vllm_lock_sha256": facts.get("lock", "a")}


def test_a_host_with_another_driver_is_measured_in_a_night_and_one_with_another_engine_left_out(tools, tmp_path):
    """So that "TTFT of the control rose on host g07; driver 580.126 → 580.159 that night" can come of the defaults."""
    [play] = [p for p in yaml.safe_load((ROOT / "playbooks" / "night.yml").read_text()) if p["name"].startswith("Make")]
    given = {name: value for name, value in play["vars"].items() if name.startswith("preflight_")}
    check = {"ansible.builtin.import_role": {"name": "kvtrial.vllm.preflight", "tasks_from": "fleet"},
             "vars": {"__preflight_not_known": ["model"]}}  # fmt: skip
    after = {"name": "Measure", "ansible.builtin.debug": {"msg": "x"}}
    (tmp_path / "play.yml").write_text(
        yaml.safe_dump([{"hosts": "all", "gather_facts": False, "vars": given, "tasks": [check, after]}])
    )
    hosts = {"g01": ready(), "g02": ready(), "g03": ready(lock="b"), "g07": ready(driver_version="580.159")}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts}}))
    where = ("-i", str(tmp_path / "hosts.yml"), str(tmp_path / "play.yml"))
    done = tools.run("ansible-playbook", *where)
    measured = done.stdout.partition("TASK [Measure]")[2].partition("PLAY RECAP")[0]
    assert re.findall(r"ok: \[(g\d+)\]", measured) == ["g01", "g02", "g07"], done.stdout + done.stderr
    assert "driver: g07 has 580.159, the other hosts 580.126" in done.stdout
    assert "g03 is left out: engine_lock is b, most hosts have a. Bring it to the pins" in " ".join(done.stdout.split())
    # Whoever wants it strict, has it; and an experiment is as before.
    strict = tools.run("ansible-playbook", *where, "-e", json.dumps({"kvtrial_night_may_differ": []}))
    assert "g07 is left out: driver is 580.159, most hosts have 580.126" in " ".join(strict.stdout.split())
    alone = tools.run("ansible-playbook", *where, "-e", "preflight_alone=false")
    assert "ok: [g01]" not in alone.stdout.partition("TASK [Measure]")[2]


def ended_with(tools, tmp_path, status, cause, here=ROOT, planted="", **variables):
    """The end of a night over g01, whose campaign ended with `status`: measure.yml's last task, and the plays after.

    `planted`: what every Python of it runs first.
    """
    sys.path[:0] = [str(ROOT / "tests" / "unit" / name) for name in ("history", "analysis")]
    from history_build import campaign_on, night, plant, store_of

    store_of(tmp_path / "store", plant("g07", night(13), control=1.3, driver="580.159"))
    directory = campaign_on(tmp_path / "results", "2026-11-18", ("g01",))
    plays = yaml.safe_load((ROOT / "playbooks" / "night.yml").read_text())
    verdict = yaml.safe_load((ROOT / "playbooks" / "measure.yml").read_text())[-1]
    verdict = {"name": "Verdict", "hosts": "all", "gather_facts": False, "tasks": verdict["tasks"][-1:],
               "vars": {"kvtrial_hosts_tonight": "all"}}  # fmt: skip
    names = [play["name"] for play in plays]
    after = plays[names.index("Put the campaign into the history") :]
    (tmp_path / "play.yml").write_text(yaml.safe_dump([verdict, *after]))
    concluded = {"exit_status": status, "cause": cause, "directory": str(directory)}
    g01 = {**LOCAL, "kvtrial_campaign": {"directory": str(directory)}, "kvtrial_conclusion": concluded}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"g01": g01}}}))
    given = {"kvtrial_history_store": str(tmp_path / "store"), **variables}
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "sitecustomize.py").write_text(planted)
    done = tools.run(
        "ansible-playbook", "-i", str(tmp_path / "hosts.yml"), str(tmp_path / "play.yml"), "-e", json.dumps(given),
        PYTHONPATH=f"{tmp_path / 'planted'}:{ROOT / 'analysis'}", ANSIBLE_STDOUT_CALLBACK="kvtrial.vllm.console",
        PWD=str(here),
    )  # fmt: skip
    return done, directory


@pytest.mark.parametrize("status", [0, 2, 4])
def test_a_night_lands_and_alarms_whatever_its_end_and_fails_at_the_end(tools, tmp_path, status):
    done, directory = ended_with(tools, tmp_path, status, "not finished on g02 (unreachable; 0 of 4 runs done).")
    assert list((tmp_path / "store").glob(f"*/*/{directory.name}.parquet")), done.stdout + done.stderr
    assert "ALARM: TTFT of the control" in done.stdout and "driver 580.126" in done.stdout
    assert done.returncode == (2 if status else 0)
    assert not status or "not finished on g02" in done.stdout.strip().splitlines()[-1]


FULL = """
import os
replace = os.replace
def full(source, target, **more):
    if str(target).endswith("told.json"):
        raise OSError(28, "No space left on device", str(target))
    return replace(source, target, **more)
os.replace = full
"""


def test_an_alarm_is_said_before_what_came_after_it_fails_the_night(tools, tmp_path):
    done, _ = ended_with(tools, tmp_path, 0, "", planted=FULL)
    assert done.returncode == 2 and "no space left on device" in done.stdout, done.stdout + done.stderr
    assert "ALARM: TTFT of the control" in done.stdout and "driver 580.126" in done.stdout


def test_an_alarm_that_can_not_be_posted_fails_no_night(tools, tmp_path):
    webhook = {"kvtrial_history_webhook": "http://127.0.0.1:9/SECRET"}
    planted = "import os\nos.environ['NO_PROXY'] = 'fd00::/8'\n"
    done, _ = ended_with(tools, tmp_path, 0, "", planted=planted, **webhook)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ALARM: TTFT of the control" in done.stdout and "posted again the next time" in done.stdout
    assert "SECRET" not in done.stdout + done.stderr


def test_a_page_that_can_not_be_drawn_takes_no_alarm_away(tools, tmp_path):
    (tmp_path / "results" / "offload_return-20261118T010000Z").mkdir(parents=True)
    (tmp_path / "results" / "offload_return-20261118T010000Z" / "report.html" / "x").mkdir(parents=True)
    done, _ = ended_with(tools, tmp_path, 0, "")
    assert "ALARM: TTFT of the control" in done.stdout, done.stdout + done.stderr
    assert "The report is without the history: " in done.stdout and "report.html" in done.stdout
    assert done.returncode == 0, done.stdout


def test_fetching_from_hosts_that_have_nothing_of_the_campaign_fails_and_names_them(fleet, tmp_path):
    folder = made(tmp_path / "results", "offload_return-9", "2026-11-09")
    planned = json.loads(TEMPLATE)["plan"]["hosts"][0]["host"]
    done = fleet("fetch.yml", {"other": LOCAL}, kvtrial_fetch_campaign=str(folder))
    assert done.returncode != 0
    assert "other: left out, it is no host of offload_return-9." in done.stdout, done.stdout
    assert f"{planned}: left out, of the campaign but not in this inventory." in done.stdout
    assert f"Nothing was fetched of offload_return-9: its hosts are {planned};" in done.stdout.strip().splitlines()[-1]
    done = fleet("fetch.yml", {planned: LOCAL}, kvtrial_fetch_campaign=str(folder))
    assert done.returncode != 0
    assert f"{planned}: left out, the host program is not installed there any more" in done.stdout


def test_paths_of_results_and_history_are_seen_from_where_the_command_was_given(fleet, tools, tmp_path):
    made(tmp_path / "results", "offload_return-9", "2026-11-09")
    (tmp_path / "results" / "latest").symlink_to("offload_return-9")
    for given in ({"kvtrial_fetch_campaign": "results/offload_return-9"}, {"kvtrial_results_dir": "results"}):
        done = fleet("fetch.yml", {"other": {**LOCAL, **given}}, here=tmp_path)
        assert "Nothing was fetched of offload_return-9" in done.stdout, done.stdout
    show = {"hosts": "all", "gather_facts": False, "tasks": [{"debug": {"var": "kvtrial_request.results_dir"}}]}
    (tmp_path / "x.yml").write_text(yaml.safe_dump([show]))
    (tmp_path / "inventory" / "hosts.yml").write_text("all: {hosts: {h1: {kvtrial_results_dir: mine}}}")
    done = tools.run("ansible-playbook", str(tmp_path / "x.yml"), "-i", str(tmp_path / "inventory"), PWD="/somewhere")
    assert "/somewhere/mine" in done.stdout, done.stdout
    done, directory = ended_with(tools, tmp_path, 0, "", here=tmp_path, kvtrial_history_store="store",
                                 kvtrial_history_arguments=["--textfile", "history.prom"])  # fmt: skip
    assert (done.returncode, "The report is without the history" in done.stdout) == (0, False), (
        done.stdout + done.stderr
    )
    assert list((tmp_path / "store").glob(f"*/*/{directory.name}.parquet"))
    assert (tmp_path / "history.prom").is_file() and not (tmp_path / "playbooks").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, ""),
        (
            {"kvtrial_noise_pairs": 3},
            "The A/A pairs of the night (kvtrial_noise_protocol=aa_noise, kvtrial_noise_pairs=3) can't be run: pairs=3",
        ),
        (
            {"kvtrial_noise_protocol": "aa_nois"},
            "(kvtrial_noise_protocol=aa_nois, kvtrial_noise_pairs=2) can't be run: ",
        ),
        ({"kvtrial_night": "tonight", "kvtrial_noise_pairs": 0}, "kvtrial_night=tonight is no date"),
    ],
)
def test_what_the_aa_pairs_ask_is_checked_before_a_host_is_made_ready(tools, tmp_path, given, said):
    plays = yaml.safe_load((ROOT / "playbooks" / "night.yml").read_text())
    ready = next(play for play in plays if play["name"] == "Make the hosts ready")
    date = {"kvtrial_hosts_free": "all", "kvtrial_tonight": "{{ kvtrial_night | default('2026-11-14') }}"}
    look = next(play for play in plays if play["name"] == "Look for hosts that others use")
    look["tasks"] = [task for task in look["tasks"] if task["name"] == "Take note of the hosts that run A/A pairs"]
    check = yaml.safe_load((ROOT / "playbooks" / "prepare.yml").read_text())[0]
    check["vars"] = {**ready["vars"], **date}
    # As in the project: what is read lies beside and above the playbook.
    for name in ("playbooks", "group_vars", "inventories", "results"):
        (tmp_path / name).mkdir() if name in ("playbooks", "results") else (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "playbooks" / "protocols").symlink_to(ROOT / "playbooks" / "protocols")
    (tmp_path / "playbooks" / "x.yml").write_text(yaml.safe_dump([look, check]))
    where = ("-i", str(ROOT / "inventories" / "local"), "-e", json.dumps(given))
    done = tools.run("ansible-playbook", str(tmp_path / "playbooks" / "x.yml"), *where)
    assert (done.returncode != 0) == bool(said), done.stdout + done.stderr
    assert said in " ".join(done.stdout.split()), done.stdout


def test_a_host_that_is_away_again_holds_no_stage_back_and_is_named_as_missing(tools, tmp_path):
    """The second half of measure.yml by the same command, while a host of the unfinished campaign is still away."""
    sys.path.insert(0, str(ROOT / "tests" / "unit" / "plan"))
    from test_plan import request

    def asks(hosts):
        every = {host: request()["hosts"]["h1"] for host in hosts}
        return campaign.prepare({**request(hosts=every), "results_dir": str(tmp_path / "results")})

    first, again = asks(["dead", "h1", "h2"]), asks(["h1", "h2"])
    assert again["directory"] == first["directory"]
    facts = {"kvtrial_campaign": again, "kvtrial_checked": {"monotonic_seconds": 1.0}}
    plan, run, verdict = yaml.safe_load((ROOT / "playbooks" / "measure.yml").read_text())
    plan["tasks"] = [{"ansible.builtin.ping": {}}, {"ansible.builtin.set_fact": facts}]
    run["tasks"] = [*run["tasks"][:1], {"ansible.builtin.debug": {"var": "kvtrial_stage.go"}}]
    verdict["tasks"] = [*verdict["tasks"][:2], {"ansible.builtin.debug": {"var": "kvtrial_conclusion.cause"}}]
    (tmp_path / "play.yml").write_text(yaml.safe_dump([plan, run, verdict], width=1000))
    hosts = {"dead": DEAD, "h1": LOCAL, "h2": LOCAL}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts}}))
    done = tools.run("ansible-playbook", "-i", str(tmp_path / "hosts.yml"), str(tmp_path / "play.yml"))
    assert "kvtrial_stage.go: true" in done.stdout, done.stdout + done.stderr
    assert "not finished on dead (not at hand this time; 0 of 12 runs done), h1" in " ".join(done.stdout.split())
    assert campaign.lost_hosts_of(Path(again["directory"])) == []
