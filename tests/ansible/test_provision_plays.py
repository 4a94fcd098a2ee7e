"""The plays of playbooks/provision.yml, with roles that only say their names: who is served, and in which order."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PARTS = [
    "main",
    "preflight",
    "inventory",
    "lock",
    "unlock",
    "bundle",
    "provision",
    "configure",
    "verify",
    "remove",
    "stop",
    "purge",
    "fleet",
]
SAYS = """
- name: DO {role} {part}
  ansible.builtin.assert: {{that: "'{role}/{part}' != fails | default('')", quiet: true}}
"""


@pytest.fixture
def provision(tmp_path, tools):
    """provision(host={variables}, ...): {host: [what was done, in order]}, and whether the command failed.

    Hosts h1 and h2 are due a driver, h3 is not; `fails` names the part at which a host fails.
    """
    text = (ROOT / "playbooks" / "provision.yml").read_text()
    roles = set(re.findall(r"name: kvtrial\.vllm\.(\w+)", text))
    plays = yaml.safe_load(re.sub(r"name: kvtrial\.vllm\.(\w+)", r"name: says_\1", text))[1:]
    for play in plays:
        for task in play["tasks"]:
            if "kvtrial.vllm.host_purge" in task:
                del task["kvtrial.vllm.host_purge"]
                task["ansible.builtin.import_role"] = {"name": "says_trial", "tasks_from": "purge"}
    (tmp_path / "play.yml").write_text(yaml.safe_dump(plays, sort_keys=False))
    for role in roles:
        folder = tmp_path / "roles" / f"says_{role}" / "tasks"
        folder.mkdir(parents=True)
        for part in PARTS:
            (folder / f"{part}.yml").write_text(SAYS.format(role=role, part=part))

    def play(*arguments: str, **hosts: dict[str, object]):
        shared = {"ansible_connection": "local", "kvtrial_supervisor": "systemd", "kvtrial_backend": "cuda",
                  "kvtrial_bundle": "", "kvtrial_state": "present", "nvidia_driver_change": True}  # fmt: skip
        known = {"h1": {}, "h2": {}, "h3": {"nvidia_driver_change": False}}
        told = {name: shared | variables | hosts.get(name, {}) for name, variables in known.items()}
        (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": told}}))
        done = tools.run(
            "ansible-playbook", "-i", str(tmp_path / "hosts.yml"), str(tmp_path / "play.yml"), *arguments,
            ANSIBLE_STDOUT_CALLBACK="ansible.builtin.default",
        )  # fmt: skip
        did: dict[str, list[str]] = {name: [] for name in told}
        part = ""
        for line in done.stdout.splitlines():
            if found := re.match(r"TASK \[(?:.*: DO ([\w ]+))?", line):
                part = found[1] or ""
            elif (found := re.match(r"(ok|fatal): \[(\w+)\]", line)) and part:
                did[found[2]].append(part if found[1] == "ok" else f"{part} FAILED")
        return did, done

    return play


BROUGHT = ["vllm main", "preflight lock", "model main", "workload main", "engine main", "preflight fleet"]


def test_the_canary_first_then_all_is_brought_and_each_host_is_given_back_once(provision):
    did, done = provision()
    assert done.returncode == 0, done.stdout
    for host in did:
        # Its lock lies in /run, which goes with the reboot: it is taken again before other hosts' drivers.
        due = [] if host == "h3" else ["preflight lock"]
        assert [part for part in did[host] if part in BROUGHT] == ["preflight lock", *due, "preflight lock", *BROUGHT]
        if due:
            assert did[host][did[host].index("nvidia_driver main") + 1] == "preflight lock"
        assert did[host][-1] == "preflight unlock" and did[host].count("preflight unlock") == 1
        assert ("nvidia_driver main" in did[host]) is (host != "h3")
        assert did[host].index("workload preflight") < did[host].index("vllm main")
    assert done.stdout.index("PLAY [Change the driver of the canary]") < done.stdout.index("DO nvidia_driver main")


def test_a_canary_that_fails_is_given_back_and_so_is_who_waited_for_it(provision):
    did, done = provision(h1={"fails": "nvidia_driver/main"})
    assert done.returncode != 0
    assert did["h1"][-2:] == ["nvidia_driver main FAILED", "preflight unlock"]
    assert "nvidia_driver main" not in did["h2"] and did["h2"][-1] == "preflight unlock"
    assert set(BROUGHT) <= set(did["h3"])


@pytest.mark.parametrize("part", ["model/main", "preflight/provision", "preflight/fleet"])
def test_a_host_that_fails_is_given_back_and_the_others_are_served(provision, part):
    did, done = provision(h2={"fails": part})
    assert done.returncode != 0
    assert did["h2"][-2:] == [part.replace("/", " ") + " FAILED", "preflight unlock"]
    for host in ("h1", "h3"):
        assert set(BROUGHT) <= set(did[host]) and did[host][-1] == "preflight unlock"


def test_also_where_every_host_fails_each_is_given_back(provision):
    did, _ = provision(**{host: {"fails": "vllm/main"} for host in ("h1", "h2", "h3")})
    assert all(done[-2:] == ["vllm main FAILED", "preflight unlock"] for done in did.values()), did


def test_a_host_whose_driver_goes_is_not_the_canary_of_the_one_that_comes(provision):
    did, done = provision(h1={"kvtrial_state": "absent"}, h2={"fails": "nvidia_driver/main"})
    assert done.returncode != 0
    assert did["h2"][-2:] == ["nvidia_driver main FAILED", "preflight unlock"]
    assert "nvidia_driver main" in did["h1"], "what breaks an installation breaks no removal"
    assert did["h1"][-1] == "preflight unlock"


def test_a_removal_that_fails_on_its_first_host_is_tried_on_no_other_and_keeps_no_driver_off(provision):
    absent = {"kvtrial_state": "absent"}
    did, done = provision(h1=absent | {"fails": "nvidia_driver/main"}, h2=absent, h3={"nvidia_driver_change": True})
    assert done.returncode != 0
    assert did["h1"][-2:] == ["nvidia_driver main FAILED", "preflight unlock"]
    assert "nvidia_driver main" not in did["h2"] and did["h2"][-1] == "preflight unlock"
    assert "h2: the driver was not touched, since the canary h1 did not lose it well" in " ".join(done.stdout.split())
    assert "nvidia_driver main" in did["h3"] and set(BROUGHT) <= set(did["h3"])


REMOVED = ["trial stop", "engine remove", "workload main", "model main", "vllm main", "trial purge"]


def test_a_host_that_is_to_be_removed_is_removed_and_nothing_is_brought_to_it(provision):
    did, done = provision(h2={"kvtrial_state": "absent"})
    assert done.returncode == 0, done.stdout
    assert [part for part in did["h2"] if part in REMOVED] == [*REMOVED, "trial purge"]
    assert did["h2"].index("nvidia_driver main") < len(did["h2"]) - did["h2"][::-1].index("trial purge") - 1
    for host in ("h1", "h3"):
        assert "trial stop" not in did[host] and set(BROUGHT) <= set(did[host])
    did, done = provision("-e", "kvtrial_state=absent")
    assert done.returncode == 0, done.stdout
    for host in did:
        assert [part for part in did[host] if part in REMOVED] == [*REMOVED, "trial purge"]
        assert "engine main" not in did[host] and did[host][-1] == "preflight unlock"
