"""`kvtrial plan` refuses what the experiment refuses, in one sentence that names the value and its place."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kvtrial.analysis.planning import _ended_before_a_task, refuse_extra_vars
from kvtrial.record.errors import UnusableInput

ROOT = Path(__file__).resolve().parents[2]


def plan(*arguments: str) -> tuple[int, str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    done = subprocess.run(
        [sys.executable, "-m", "kvtrial.analysis.cli", "plan", *arguments], cwd=ROOT, capture_output=True, text=True,
        env={**kept, "PYTHONPATH": str(ROOT / "analysis")}, timeout=200, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_a_plan_is_shown():
    code, out, err = plan()
    assert (code, err) == (0, "")
    assert "12 runs (6 pairs of control, offload)" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-e", "kvtrial_pair=2"], "kvtrial_pair is unknown (did you mean kvtrial_pairs?); put the name right"),
        (["-e", "pairs=2"], "pairs is read by nobody (did you mean kvtrial_pairs?)"),
        (["-e", '{"kvtrial_engine_env": {"VLLM_HOST_IP": "10.0.0.1"}}'], "the engine would listen on 10.0.0.1"),
        (["-e", "kvtrial_backend=rocm"], "kvtrial_backend=rocm is unknown; set it to cpu or cuda"),
        (["-e", "kvtrial_pairs=3"], "pairs=3 can't be run"),
        (["-e", "kvtrial_fetch=summry"], "kvtrial_fetch=summry is unknown; set it to full"),
        (["-e", "kvtrial_stages=1,10%"], "kvtrial_stages=1,10% is no list of whole numbers of hosts"),
        (["-e", '{"kvtrial_stages": [0, "100%"]}'], "is no list of whole numbers of hosts from 1"),
        (["-e", '{"kvtrial_stages": [1, "110%"]}'], "and shares from 1% to 100%"),
        (["-e", '{"kvtrial_stages": []}'], "kvtrial_stages=[] is no list"),
        (["-e", "kvtrial_lost_after_seconds=soon"], "kvtrial_lost_after_seconds=soon is not a whole number"),
        (["-e", "kvtrial_sweep_first_seconds=90"], "kvtrial_sweep_first_seconds=90 must be at least 1 and not above"),
        (["-i", "README.md"], "the inventory README.md can't be read: "),
    ],
    ids=lambda value: value[-1][:40] if isinstance(value, list) else "",
)
def test_a_plan_is_refused_in_one_sentence(arguments, said):
    code, out, err = plan(*arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert "\x1b" not in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{broken", "-e {broken is neither JSON nor YAML"),
        ("@/nonexist.json", "-e @/nonexist.json: /nonexist.json can't be read (No such file or directory)"),
        ("[1, 2]", "is no mapping"),
        ("kvtrial_pairs", "-e kvtrial_pairs sets nothing; give name=value"),
        ("a='b", "sets nothing"),
        ("", "sets nothing"),
    ],
)
def test_extra_variables_that_ansible_cannot_take_are_named(given, said):
    with pytest.raises(UnusableInput, match="give name=value, a mapping as") as refused:
        refuse_extra_vars(given)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_extra_variables_that_ansible_takes_pass(tmp_path):
    file = tmp_path / "more.yml"
    file.write_text("kvtrial_pairs: 2\nsecret: !vault |\n  $ANSIBLE_VAULT;1.1;AES256\n  00\n")
    for given in ("a=b", "a=b c='d e'", '{"a": 1}', "{a: 1}", f"@{file}"):
        refuse_extra_vars(given)


def test_what_ansible_wrote_is_shown_from_its_beginning_and_without_terminal_escapes():
    said = _ended_before_a_task(
        Path("inventories/local"), "\x1b[1;31m[ERROR]: the role x was not found\nin y\x1b[0m" + " z" * 900
    )
    assert said.startswith("Ansible ended before the plan: the role x was not found in y z")
    assert "\x1b" not in said
