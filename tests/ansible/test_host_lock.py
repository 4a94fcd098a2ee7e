"""The lock of a host: who holds it, and when it no longer counts."""

import subprocess
import sys

import pytest
from ansible_collections.kvtrial.vllm.plugins.action import host_lock as action
from ansible_collections.kvtrial.vllm.plugins.module_utils import host_lock


def test_a_lock_is_taken_once_and_given_back(tmp_path):
    path = str(tmp_path / "run" / "provision.lock")
    assert host_lock.read(path) is None
    assert host_lock.take(path, {"owner": "a"})
    assert not host_lock.take(path, {"owner": "b"})
    assert host_lock.read(path) == {"owner": "a"}
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["provision.lock"]
    assert host_lock.give_back(path)
    assert not host_lock.give_back(path)


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
