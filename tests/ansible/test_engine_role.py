"""The role engine takes over and removes nothing of the host's own, and blames no unit but its own."""

import re
import subprocess
import sys

import pytest
import yaml

OUR_ENTRY = "kvtrial:x:998:998:kvtrial host program and engine:/nonexistent:/usr/sbin/nologin"
THEIR_ENTRY = "kvtrial:x:1000:1000:Deploys,,,:/home/kvtrial:/bin/bash"
COMMANDS = (f"/usr/bin/systemctl {verb} kvtrial-engine@{arm}.service" for arm in "ab" for verb in ("start", "stop"))
OUR_RULE = f"kvtrial ALL=(root) NOPASSWD: {', '.join(COMMANDS)}\n"
THEIR_RULE = "kvtrial ALL=(ALL) NOPASSWD: ALL\n"
TAKEN = "kvtrial that this project did not make (its comment is Deploys,,,; that of ours is kvtrial host program and "
RULES = "/kvtrial holds rules that this project did not write; it is left as it is"
# name: (entry in passwd, text of the sudoers file or None, what a provision is told, what a removal leaves)
HOSTS: dict[str, tuple[str, str | None, str, set[str]]] = {
    "bare": ("", None, "", {"account", "rule"}),
    "of-ours": (OUR_ENTRY, OUR_RULE, "", set()),
    "their-account": (THEIR_ENTRY, None, TAKEN, {"account", "rule"}),
    "their-rule": ("", f"# deploys\n{THEIR_RULE}", RULES, {"account", "rule"}),
    "rule-added": (OUR_ENTRY, OUR_RULE + THEIR_RULE, RULES, {"rule"}),
    "command-added": (OUR_ENTRY, OUR_RULE.replace("\n", ", /bin/sh\n"), RULES, {"rule"}),
}
# What systemd 249 says of snapd's socket, which every unit depends on, and of a unit of ours.
WARNED = {
    "bare": "/etc/systemd/system/other.service:6: Unknown key name 'RestartMode' in section 'Service', ignoring.\n",
    "of-ours": "/etc/systemd/system/kvtrial-engine@.service:9: Unknown key name 'Typ', ignoring.\n",
}


@pytest.fixture
def engine(tmp_path, tools):
    """engine(part, *arguments): [(task, state, host, words)] of a part of the role on HOSTS, with files of their own.

    What getent and systemd-analyze say is planted, and systemd and sudo are said to be there.
    """
    (tmp_path / "run" / "systemd" / "system").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    analyze = 'cat "${KVTRIAL_PASSWD%passwd}said" >&2'
    for name, text in {"getent": 'grep . "$KVTRIAL_PASSWD"', "sudo": "exit 1", "systemd-analyze": analyze}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    for name, (entry, rules, _, _) in HOSTS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "passwd").write_text(entry)
        (tmp_path / name / "said").write_text(WARNED.get(name, ""))
        if rules is not None:
            (tmp_path / name / "kvtrial").write_text(rules)
    hosts = {
        name: {"ansible_connection": "local", "ansible_python_interpreter": sys.executable, "own": str(tmp_path / name)}
        for name in HOSTS
    }
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts}}))

    def play(part, *arguments):
        surroundings = {"KVTRIAL_PASSWD": "{{ own }}/passwd"}
        role = {"name": "kvtrial.vllm.engine", "tasks_from": part, "apply": {"environment": surroundings}}
        paths = {"sudoers": "kvtrial", "units": "units", "logs": "log"}
        names = {f"__engine_{name}": f"{{{{ own }}}}/{path}" for name, path in paths.items()}
        task = {"ansible.builtin.include_role": role, "vars": {**names, "engine_cache": "{{ own }}/cache"}}
        (tmp_path / "play.yml").write_text(yaml.safe_dump([{"hosts": "all", "gather_facts": False, "tasks": [task]}]))
        environment = tools.environment(
            ANSIBLE_STDOUT_CALLBACK="ansible.builtin.default", ANSIBLE_CALLBACK_RESULT_FORMAT="json"
        )
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", f'mount --bind {tmp_path}/run /run && exec "$@"', "sh",
             tools.path("ansible-playbook"), "-i", tmp_path / "hosts.yml", tmp_path / "play.yml", *arguments],
            cwd=tools.root, env={**environment, "PATH": f"{tmp_path}/bin:{environment['PATH']}"},
            capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
        told, task_name = [], ""
        for line in done.stdout.splitlines():
            if found := re.match(r"TASK \[(?:.* : )?(.*)\]", line):
                task_name = found[1]
            elif found := re.match(r"(ok|changed|skipping|fatal|failed): \[([\w-]+)\](.*)", line):
                told.append((task_name, found[1], found[2], found[3]))
        assert told, done.stdout + done.stderr
        return told

    return play


def test_an_account_or_a_sudoers_file_of_somebody_elses_is_refused(engine):
    refused = {
        host: words
        for _, state, host, words in engine("preflight", "-e", "engine_supervisor=systemd")
        if state == "fatal"
    }
    for name, (_, _, told, _) in HOSTS.items():
        assert (told in refused[name]) if told else name not in refused, (name, refused.get(name))


def test_a_removal_takes_the_account_and_the_rule_only_where_they_are_ours(engine):
    told = engine("remove", "--check")
    assert not [line for line in told if line[1] == "fatal"], told
    for name, (_, _, _, left) in HOSTS.items():
        asked = {state for task, state, host, _ in told if task == "Remove the account" and host == name}
        assert asked == (set() if name == "their-account" else {"ok"}), (name, asked)
        gone = [words for task, state, host, words in told if state == "changed" and host == name]
        assert bool([words for words in gone if f"{name}/kvtrial" in words]) == ("rule" not in left), (name, gone)


def test_a_warning_of_another_unit_is_no_defect_of_ours(engine):
    refused = {host: words for _, state, host, words in engine("verify") if state == "fatal"}
    assert list(refused) == ["of-ours"] and "does not accept kvtrial-engine@.service" in refused["of-ours"], refused
