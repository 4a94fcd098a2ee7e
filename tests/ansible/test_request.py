"""What users write on the command line, in the planner's types."""

import subprocess

import pytest
from ansible_collections.kvtrial.vllm.plugins.module_utils import request


@pytest.mark.parametrize(
    ("value", "expected"), [("6", 6), (6, 6), (6.0, 6), ("6.0", 6), (None, None), ("", None), ("null", None)]
)
def test_whole_numbers(value, expected):
    assert request.whole_number(value, "kvtrial_pairs") == expected


@pytest.mark.parametrize("value", ["six", "6.5", "1.0.0", ".", True, [6], float("nan"), float("inf")])
def test_what_is_no_whole_number_is_named(value):
    with pytest.raises(request.Unusable, match=r"kvtrial_pairs=.* is not a whole number; .*\.$"):
        request.whole_number(value, "kvtrial_pairs")


@pytest.mark.parametrize(("value", "expected"), [("yes", True), ("False", False), (True, True), ("0", False)])
def test_truths(value, expected):
    assert request.truth(value, "x") is expected


def test_what_is_no_truth_is_named():
    with pytest.raises(request.Unusable, match="x=perhaps is neither true nor false"):
        request.truth("perhaps", "x")


@pytest.mark.parametrize(
    ("value", "expected"), [("a,b", ["a", "b"]), ("a, b,a", ["a", "b"]), (["a"], ["a"]), ("", None), (None, None)]
)
def test_names(value, expected):
    assert request.names(value, "kvtrial_arms") == expected


def test_an_arm_that_is_named_twice_reaches_the_planner_which_refuses_it():
    assert request.normalise({"arms": "more_kv, more_kv"})["arms"] == ["more_kv", "more_kv"]


def test_what_are_no_names_is_named():
    for value in ("a,,b", ",", {"a": 1}, 5):
        with pytest.raises(request.Unusable, match="kvtrial_arms="):
            request.names(value, "kvtrial_arms")


def test_environment_variables_become_texts():
    host = {"engine_env": {"OMP_NUM_THREADS": 2, "A": "b"}, "limits": None}
    typed = request.normalise({"hosts": {"h": host}})["hosts"]["h"]
    assert typed == {"engine_env": {"OMP_NUM_THREADS": "2", "A": "b"}, "limits": {}}


@pytest.mark.parametrize("key", ["engine_args", "engine_env", "connector_extra_config", "sizes", "limits"])
def test_what_is_no_mapping_is_named(key):
    with pytest.raises(request.Unusable, match=f"kvtrial_{key}=x is not a mapping"):
        request.normalise({"hosts": {"h": {key: "x"}}})


def test_an_environment_variable_that_is_no_text_is_named():
    with pytest.raises(request.Unusable, match=r"kvtrial_engine_env\.A="):
        request.normalise({"hosts": {"h": {"engine_env": {"A": [1]}}}})


def test_results_that_cannot_be_written_are_refused_and_nothing_is_made(tmp_path):
    request.refuse_results_dir(str(tmp_path / "a" / "b"))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "b", tmp_path / "file"):
        with pytest.raises(request.Unusable, match=r"kvtrial_results_dir=.*is no directory; set it"):
            request.refuse_results_dir(str(path))
    with pytest.raises(request.Unusable, match=r"kvtrial_results_dir=/proc/x can't be used"):
        request.refuse_results_dir("/proc/x")


def test_a_request_comes_out_typed():
    host = {"port": "18000", "ram_reserve_bytes": "", "may_be_disturbed": "true"}
    result = request.normalise({"pairs": "4", "seed": "1", "arms": None, "new_campaign": "no", "hosts": {"h": host}})
    assert result["pairs"] == 4
    assert result["new_campaign"] is False
    assert result["dry_run"] is False
    assert result["hosts"]["h"] == {"port": 18000, "ram_reserve_bytes": None, "may_be_disturbed": True}


def test_an_unknown_choice_is_named():
    with pytest.raises(request.Unusable, match=r"kvtrial_if_controller_gone=wait is unknown"):
        request.normalise({"hosts": {"h": {"if_controller_gone": "wait"}}})


@pytest.mark.parametrize(
    ("info", "state"),
    [
        ({"state": "finished", "progress": {"reason": "all runs are done"}}, "finished"),
        ({"state": "running", "died": True}, "stopped"),
        ({"unreachable": True}, "unreachable"),
    ],
)
def test_how_a_host_program_stood(info, state):
    assert request.standing(info)["state"] == state


def test_the_commit_of_a_checkout_is_told_and_whether_it_is_dirty(tmp_path):
    assert request.project_state(str(tmp_path)) == {"commit": None, "dirty": None}
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "a").write_text("a")
    subprocess.run([*git, "add", "a"], check=True)
    subprocess.run([*git, "commit", "-qm", "a"], check=True)
    state = request.project_state(str(tmp_path))
    assert len(state["commit"]) == 40
    assert state["dirty"] is False
    (tmp_path / "b").write_text("b")
    assert request.project_state(str(tmp_path))["dirty"] is True
