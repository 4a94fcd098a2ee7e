"""The module that checks a row of conditions in one task."""

import pytest

PLAY = """
- hosts: localhost
  gather_facts: false
  vars:
    asked: "{{{{ lookup('ansible.builtin.pipe', 'echo 7 | tee -a {log}') | int }}}}"
    doubled: "{{{{ 2 * asked }}}}"
  tasks:
    - kvtrial.vllm.conditions:
        once: {once}
        checks:
          - {{that: [asked < 8, doubled < {limit}], fail_msg: "asked={{{{ asked }}}} doubled={{{{ doubled }}}}"}}
          - {{that: asked > 0, when: doubled > 1, fail_msg: never}}
          - {{that: undefined_anywhere, when: asked > 7, fail_msg: never}}
"""


@pytest.mark.parametrize(("once", "limit", "times"), [("[asked]", 15, 1), ("[]", 15, 5), ("[asked]", 14, 1)])
def test_what_is_to_be_worked_out_once_is_also_for_what_names_it(once, limit, times, tmp_path, tools):
    log = tmp_path / "log"
    (tmp_path / "play.yml").write_text(PLAY.format(log=log, once=once, limit=limit))
    done = tools.run("ansible-playbook", str(tmp_path / "play.yml"))
    assert ("asked=7 doubled=14" in done.stdout) == (limit == 14) == bool(done.returncode), done.stdout
    assert log.read_text().split() == ["7"] * times


def test_a_name_that_is_not_there_is_told(tmp_path, tools):
    (tmp_path / "play.yml").write_text(PLAY.format(log=tmp_path / "log", once="[aksed]", limit=15))
    done = tools.run("ansible-playbook", str(tmp_path / "play.yml"))
    assert done.returncode and "once names aksed, and there is no such variable" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
