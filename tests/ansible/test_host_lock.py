"""The lock of a host: who holds it, and when it no longer counts."""

import json
import os
import resource
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from ansible_collections.kvtrial.vllm.plugins.action import host_lock as action
from ansible_collections.kvtrial.vllm.plugins.module_utils import host_lock, processes


def test_a_lock_is_taken_once_and_given_back_by_its_owner(tmp_path):
    path = str(tmp_path / "run" / "provision.lock")
    assert host_lock.read(path) is None
    assert host_lock.take(path, {"owner": "a"}) == (True, None)
    assert host_lock.take(path, {"owner": "b"}) == (False, {"owner": "a"})
    assert host_lock.read(path) == {"owner": "a"}
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["provision.lock"]
    assert host_lock.give_back(path, "b") == {"owner": "a"} == host_lock.read(path)
    assert host_lock.give_back(path, "a") == {"owner": "a"}
    assert not (tmp_path / "run").exists()
    assert host_lock.give_back(path, "a") is None
    assert not (tmp_path / "run").exists()


def test_of_two_who_find_a_stale_lock_one_alone_takes_it_over(tmp_path):
    """The second comes while the first has read the lock and has not written its own yet."""
    path = str(tmp_path / "run" / "provision.lock")
    host_lock.take(path, {"owner": "dead"})
    taken = {}

    def second():
        taken["second"] = host_lock.take(path, {"owner": "second"}, lambda found: found["owner"] == "dead")[0]

    other = threading.Thread(target=second)

    def first_may(found):
        other.start()
        other.join(0.5)
        return found["owner"] == "dead"

    taken["first"] = host_lock.take(path, {"owner": "first"}, first_may)[0]
    other.join()
    assert taken == {"first": True, "second": False}
    assert host_lock.read(path) == {"owner": "first"}


def test_a_lock_whose_folder_goes_while_one_waits_is_taken_in_the_new_one(tmp_path):
    path = str(tmp_path / "run" / "provision.lock")
    host_lock.take(path, {"owner": "a"})
    taken = []
    other = threading.Thread(target=lambda: taken.append(host_lock.take(path, {"owner": "b"})))
    with host_lock.alone(path):
        other.start()
        other.join(0.3)
        Path(path).unlink()
        Path(path).parent.rmdir()
    other.join()
    assert taken == [(True, None)]
    assert host_lock.read(path) == {"owner": "b"}


def lock_module(**arguments):
    """Run the module itself on this machine; what it answers."""
    told = {"ANSIBLE_MODULE_ARGS": {"owner": "me", "by": "me", **arguments}}
    done = subprocess.run(
        [sys.executable, "-c", MODULE], input=json.dumps(told), capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT / "collections")},
    )  # fmt: skip
    return json.loads(done.stdout)


ROOT = Path(__file__).resolve().parents[2]
MODULE = """
import sys
from ansible.module_utils import basic
from ansible.module_utils.testing import patch_module_args
import json
with patch_module_args(json.load(sys.stdin)["ANSIBLE_MODULE_ARGS"]):
    from ansible_collections.kvtrial.vllm.plugins.modules import host_lock
    host_lock.main()
"""


def test_a_lock_is_renewed_by_its_owner(tmp_path):
    path = tmp_path / "run" / "provision.lock"
    lock_module(path=str(path), lasts_seconds=10)
    first = json.loads(path.read_text())
    lock_module(path=str(path), lasts_seconds=100)
    second = json.loads(path.read_text())
    assert second["until"] > first["until"] + 80 and second["since"] == first["since"]


def test_a_lock_of_a_dead_owner_is_not_taken_from_one_who_was_quicker(tmp_path):
    path = tmp_path / "run" / "provision.lock"
    host_lock.take(str(path), {"owner": "dead", "by": "it", "since": 0})
    assert not lock_module(path=str(path), owner="quicker", dead="dead").get("failed")
    refused = lock_module(path=str(path), owner="slower", dead="dead")
    assert refused["failed"] and json.loads(path.read_text())["owner"] == "quicker"


@pytest.fixture
def campaign(tmp_path):
    """A state directory with a campaign whose host program, this very process, works."""
    folder = tmp_path / "state" / "campaigns" / "20260101-a"
    folder.mkdir(parents=True)
    ticks = processes.read_stat(os.getpid())["start_ticks"]
    (folder / "progress.json").write_text(
        json.dumps({"state": "running", "pid": os.getpid(), "pid_start_ticks": ticks})
    )
    return tmp_path / "state"


def test_a_provision_is_refused_while_a_campaign_runs_and_its_own_experiment_is_not(tmp_path, campaign):
    path = tmp_path / "run" / "provision.lock"
    asked = {"path": str(path), "state_dir": str(campaign)}
    refused = lock_module(**asked)
    assert refused["failed"]
    assert refused["msg"].startswith(f"Campaign 20260101-a runs here (host program, pid {os.getpid()}), and a change")
    assert not path.exists()
    assert not lock_module(**asked, purpose="experiment").get("failed")
    assert path.exists()


def test_check_mode_writes_nothing_and_so_is_refused_nothing(tmp_path, campaign):
    """What a run would be refused for is said."""
    path = tmp_path / "run" / "provision.lock"
    asked = {"path": str(path), "state_dir": str(campaign), "_ansible_check_mode": True}
    looked = lock_module(**asked)
    assert not looked.get("failed") and not path.parent.exists()
    assert looked["refusal"].startswith("Campaign 20260101-a runs here") and looked["programs"][0]["pid"] == os.getpid()
    assert lock_module(**asked, purpose="experiment")["refusal"] == ""
    host_lock.take(str(path), {"owner": "other", "by": "ann on ctl (pid 7)", "since": 0})
    assert lock_module(**asked, purpose="experiment")["refusal"].startswith("Another provision, by ann on ctl (pid 7)")


def test_a_removal_is_refused_beside_a_campaign_and_where_runs_lie_that_nobody_fetched(tmp_path, campaign):
    path = tmp_path / "run" / "provision.lock"
    asked = {"path": str(path), "state_dir": str(campaign), "purpose": "removal"}
    refused = lock_module(**asked)
    assert refused["msg"] == (
        f"Campaign 20260101-a runs here (host program, pid {os.getpid()}), and a removal would end it and take its "
        "runs; wait for its end and fetch them, or add -e kvtrial_purge=true."
    )
    (campaign / "campaigns" / "20260101-a" / "progress.json").unlink()
    assert not lock_module(**asked).get("failed")
    for run, digest in (("p01-1-control", "1" * 64), ("p01-2-offload", "2" * 64), (".partial", "3" * 64)):
        folder = campaign / "campaigns" / "20260101-a" / "runs" / run
        folder.mkdir(parents=True)
        (folder / "record.sha256").write_text(f"{digest}  record.json\n")
    sentence = (
        "Runs that were not fetched whole lie here (20260101-a: {}), and a removal would take them; fetch them "
        "(playbooks/fetch.yml), or add -e kvtrial_purge=true."
    )
    assert lock_module(**asked)["msg"] == sentence.format(2)
    # Not in the campaign's own folder: that belongs to its program's account.
    forged = campaign / "campaigns" / "20260101-a" / "fetched.json"
    forged.write_text(json.dumps({"runs": {"p01-1-control": "1" * 64, "p01-2-offload": "2" * 64}}))
    assert lock_module(**asked)["msg"] == sentence.format(2)
    (campaign / "fetched").mkdir()
    fetched = campaign / "fetched" / "20260101-a.json"
    # One of them was measured anew since.
    fetched.write_text(json.dumps({"runs": {"p01-1-control": "1" * 64, "p01-2-offload": "0" * 64}}))
    assert lock_module(**asked)["msg"] == sentence.format(1)
    assert not lock_module(**asked, results_may_go=True).get("failed")
    fetched.write_text(json.dumps({"runs": {"p01-1-control": "1" * 64, "p01-2-offload": "2" * 64}}))
    assert not lock_module(**asked).get("failed")
    fetched.write_text("{")
    assert lock_module(**asked)["msg"] == sentence.format(2)
    # The program's account may put anything in its folder.
    for run in ("p01-1-control", "p01-2-offload"):
        digest = campaign / "campaigns" / "20260101-a" / "runs" / run / "record.sha256"
        digest.unlink()
        os.mkfifo(digest)
    assert lock_module(**asked)["msg"] == sentence.format(2)


def test_each_users_lock_is_seen_by_the_others_and_nobody_makes_one_for_another(tmp_path):
    """Root's provision and a user's experiment are of one host."""
    if os.geteuid():
        pytest.skip("to give a folder to another user takes root")
    run, tmp = str(tmp_path / "run" / "kvtrial"), str(tmp_path / "kvtrial-")
    places = {uid: host_lock.default_path(uid, run, tmp) for uid in (0, 1000, 1001)}
    assert places[0] == f"{run}/provision.lock" and places[1000] == f"{tmp}1000/provision.lock"
    host_lock.take(places[0], {"owner": "root"})
    assert host_lock.elsewhere(0, run, tmp) == {}
    assert host_lock.elsewhere(1000, run, tmp) == {places[0]: {"owner": "root"}}
    host_lock.take(places[1000], {"owner": "ann"})
    # Root made that folder, so it is no lock of user 1000's.
    assert host_lock.elsewhere(0, run, tmp) == {}
    os.chown(Path(places[1000]).parent, 1000, 1000)
    assert host_lock.elsewhere(0, run, tmp) == {}
    os.chown(places[1000], 1000, 1000)
    # Nor is one of what no user's number is.
    for name in ("\u00b2", "9" * 30):
        (tmp_path / f"kvtrial-{name}").mkdir()
    assert host_lock.elsewhere(0, run, tmp) == {places[1000]: {"owner": "ann"}}
    assert set(host_lock.elsewhere(1001, run, tmp)) == {places[0], places[1000]}
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "provision.lock").write_text("{}")
    (tmp_path / "kvtrial-1002").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "kvtrial-x").mkdir()
    assert set(host_lock.elsewhere(0, run, tmp)) == {places[1000]}


def planted(kind: str, path: Path) -> None:
    """What a user may put in place of a lock of its own."""
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    elif kind == "link-to-a-lock":
        (path.parent / "lock").write_text('{"owner": "x"}')
        path.symlink_to("lock")
    elif kind == "device":
        try:
            os.mknod(path, 0o644 | stat.S_IFCHR, os.makedev(1, 5))
        except OSError:
            pytest.skip("devices can't be made here")
    elif kind == "folder":
        path.mkdir()
    elif kind == "anothers":
        path.write_text('{"owner": "x"}')
        os.chown(path, 1001, 1001)
    else:
        path.write_text(kind)


@pytest.mark.parametrize("kind", ["fifo", "link", "link-to-a-lock", "device", "folder", "anothers"])
def test_what_a_user_plants_in_place_of_a_lock_is_none_and_hangs_nobody(tmp_path, kind):
    """Any account can make its folder below /tmp, and root looks into it."""
    if os.geteuid():
        pytest.skip("to give a folder to another user takes root")
    folder = tmp_path / "kvtrial-1000"
    folder.mkdir()
    planted(kind, folder / "provision.lock")
    os.chown(folder, 1000, 1000)
    if kind != "anothers":
        os.chown(folder / "provision.lock", 1000, 1000, follow_symlinks=False)
    asked = "import sys; from ansible_collections.kvtrial.vllm.plugins.module_utils import host_lock as h; "
    asked += "print(h.elsewhere(0, *sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", asked, str(tmp_path / "run"), f"{tmp_path}/kvtrial-"],
        capture_output=True, text=True, check=False, timeout=10,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)),
        env={**os.environ, "PYTHONPATH": str(ROOT / "collections")},
    )  # fmt: skip
    assert done.stdout == "{}\n", done.stderr


@pytest.mark.parametrize(
    "text",
    ["[" * 60000, '{"since": 1e999}', '{"since": 1' + "0" * 400 + "}", '{"purpose": []}', " " * (1 << 20) + "{}"],
    ids=["deep", "infinite", "long", "purpose", "large"],
)
def test_whatever_a_lock_says_its_holder_is_told_in_a_sentence(tmp_path, text):
    path = tmp_path / "provision.lock"
    path.write_text(text)
    sentence = host_lock.refusal(host_lock.read(str(path)), 1.0)
    assert sentence.startswith("Another provision, by somebody unknown, has held this host for an unknown time; ")


@pytest.mark.parametrize("wrong", ["owner", "mode", "link", "file"])
def test_a_folder_that_somebody_else_made_first_is_refused(tmp_path, wrong):
    folder = tmp_path / "kvtrial-0"
    if wrong == "link":
        (tmp_path / "theirs").mkdir()
        folder.symlink_to(tmp_path / "theirs")
    elif wrong == "file":
        folder.write_text("")
    else:
        folder.mkdir(mode=0o755)
    if wrong == "owner":
        if os.geteuid():
            pytest.skip("to give a folder to another user takes root")
        os.chown(folder, 1000, 1000)
    if wrong == "mode":
        folder.chmod(0o777)
    refused = lock_module(path=str(folder / "provision.lock"))
    assert refused["failed"] and f"The lock's folder {folder} " in refused["msg"], refused
    assert refused["msg"].endswith("remove it, and run again.")
    assert not list(tmp_path.glob("*/provision.lock"))


AS_USERS = """
import json, os, subprocess, sys
from ansible.module_utils import basic
from ansible.module_utils.testing import patch_module_args
from ansible_collections.kvtrial.vllm.plugins.modules import host_lock
def lock(uid, told):
    with patch_module_args({"owner": str(uid), "by": "user %d" % uid, **told}):
        host_lock.main()
def run(uid, told):
    print(flush=True)
    if os.fork() == 0:
        os.setegid(uid), os.seteuid(uid)
        lock(uid, told)
    os.wait()
# What is imported late is there before the folders are changed.
try:
    lock(0, {"path": sys.argv[1] + "/warm/provision.lock"})
except SystemExit:
    pass
for place in ("run", "tmp"):
    subprocess.run(["mount", "--bind", sys.argv[1] + "/" + place, "/" + place], check=True)
run(0, {})
run(1000, {"purpose": "experiment"})
run(0, {"state": "free"})
run(1000, {"purpose": "experiment"})
run(0, {})
print("\\n" + json.dumps([os.path.exists("/run/kvtrial"), os.listdir("/tmp/kvtrial-1000")]))
"""


def test_a_users_experiment_and_roots_provision_of_one_host_keep_each_other_off(tmp_path):
    """By the module itself, as two users of this machine, with a /run and a /tmp of their own."""
    if os.geteuid() or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("other users, and a /tmp of one's own, take root")
    for name in ("run", "tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", AS_USERS, tmp_path], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "collections")},
    )  # fmt: skip
    assert done.stderr == "", done.stderr
    *said, left = [json.loads(line) for line in done.stdout.splitlines() if line]
    assert [one.get("failed", False) for one in said] == [False, False, True, False, False, True], done.stdout
    assert said[2]["msg"].startswith("Another provision, by user 0, has held this host for ")
    assert said[5]["msg"].startswith("An experiment, by user 1000, has held this host for ")
    assert left == [False, ["provision.lock"]]


def test_an_experiment_that_holds_a_host_is_named(tmp_path):
    path = tmp_path / "run" / "provision.lock"
    assert not lock_module(path=str(path), purpose="experiment", by="ann on ctl (pid 7)").get("failed")
    refused = lock_module(path=str(path), owner="other")
    assert refused["msg"].startswith("An experiment, by ann on ctl (pid 7), has held this host for ")


def test_a_lock_that_says_nothing_is_held_by_somebody_unknown(tmp_path):
    path = tmp_path / "provision.lock"
    path.write_text("{")
    assert host_lock.read(str(path)) == {}
    assert "by somebody unknown, has held this host for an unknown time" in host_lock.refusal({}, 5.0)


@pytest.mark.parametrize(
    ("lock", "over"),
    [
        ({"boot_id": "now", "until": 10.0}, False),
        ({"boot_id": "now", "until": 4.0}, True),
        ({"boot_id": "before", "until": 10.0}, True),
        ({}, False),
    ],
)
def test_a_lock_is_over_after_a_reboot_and_when_it_is_too_old(lock, over):
    assert host_lock.is_over(lock, 5.0, "now") is over


def test_the_refusal_names_holder_time_and_what_to_do():
    sentence = host_lock.refusal({"by": "ann on ctl (pid 7)", "since": 100.0}, 130.0)
    assert sentence == (
        "Another provision, by ann on ctl (pid 7), has held this host for 30 s; wait for its end, or if it is dead, "
        "add -e kvtrial_break_lock=true."
    )


def test_only_a_dead_process_of_this_controller_is_known_to_be_dead():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = action.owner_of(child.pid)
    assert not action.is_dead(owner)
    child.communicate(b"\n")
    assert action.is_dead(owner)
    assert not action.is_dead(owner.replace("/", "x/", 1))
    assert not action.is_dead("")


PLAYBOOKS = Path(__file__).resolve().parents[2] / "playbooks"


def test_every_play_that_holds_hosts_gives_back_those_that_fail_in_it():
    """Ansible ends with a play whose hosts have all failed, so that a last play is not enough."""
    plays = yaml.safe_load((PLAYBOOKS / "provision.yml").read_text())
    holding = [play for play in plays if "tasks" in play and "block" in play["tasks"][0]]
    assert [play["name"] for play in holding] == [
        "Check the hosts",
        "Remove what was brought",
        "Change the driver of the canary",
        "Change the driver of the other hosts",
        "Bring what is pinned",
    ]
    for play in holding:
        (block,) = play["tasks"]
        (freed,) = block["always"]
        assert freed["ansible.builtin.import_role"]["tasks_from"] == "unlock"
        assert freed["when"] == "inventory_hostname not in ansible_play_hosts" and freed["tags"] == ["always"]


def test_a_host_whose_provision_failed_is_given_back(machine):
    done = machine.play("playbooks/provision.yml", vllm_existing_venv="/nonexistent")
    assert done.returncode != 0
    assert "vllm_existing_venv=/nonexistent holds no command bin/vllm" in machine.last(done), done.stdout
    assert "Give the host back" in done.stdout
    assert not machine.lock.exists()


@pytest.mark.parametrize(
    ("playbook", "sentence"),
    [
        ("experiment.yml", "h1: Another provision, by ann on elsewhere (pid 1), has held this host for "),
        ("playbooks/provision.yml", "h1: Another provision, by ann on elsewhere (pid 1), has held this host for "),
    ],
)
def test_whoever_else_holds_a_host_is_named(machine, playbook, sentence):
    host_lock.take(str(machine.lock), {"owner": "elsewhere/x/y:1:1", "by": "ann on elsewhere (pid 1)", "since": 0})
    done = machine.play(playbook)
    assert done.returncode != 0
    assert machine.last(done).startswith(sentence), done.stdout[-3000:]
    assert json.loads(machine.lock.read_text())["owner"] == "elsewhere/x/y:1:1"
    assert not machine.state.exists()


def test_check_mode_beside_a_campaign_says_what_differs_and_reads_no_model(machine, campaign):
    model = {"kvtrial_model_directory": "/nonexistent"}
    done = machine.play(
        "playbooks/provision.yml", "--check", "--diff", apart=False, kvtrial_state_dir=str(campaign), **model
    )
    said = " ".join(done.stdout.split())
    assert done.returncode == 0, said
    assert "h1: as things are, a run would be refused: Campaign 20260101-a runs here (host program, pid " in said
    assert "would be installed into" in said
    assert (
        "h1: the model in /nonexistent is not compared, since reading it would disturb the campaign that runs" in said
    )
    assert not machine.lock.exists()


def test_a_removal_beside_a_campaign_is_refused_and_takes_nothing(machine, campaign):
    done = machine.play("playbooks/provision.yml", apart=False, kvtrial_state_dir=str(campaign), kvtrial_state="absent")
    assert done.returncode != 0
    assert "and a removal would end it and take its runs; wait for its end" in machine.last(done), done.stdout[-3000:]
    assert (campaign / "campaigns" / "20260101-a" / "progress.json").exists() and not machine.lock.exists()


def test_a_provision_is_refused_beside_a_campaign_in_a_sentence(machine, campaign):
    done = machine.play("playbooks/provision.yml", apart=False, kvtrial_state_dir=str(campaign))
    assert done.returncode != 0
    assert machine.last(done).startswith("h1: Campaign 20260101-a runs here (host program, pid "), done.stdout[-3000:]
    assert not machine.lock.exists()
