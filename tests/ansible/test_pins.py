"""What keeps a fleet alike: names that are read, wheels that a host can run, hosts that do not differ."""

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ansible_collections.kvtrial.vllm.plugins.filter.odd_hosts import (
    changed_since,
    odd_hosts,
    unlike_fleet,
    unlike_pins,
)
from ansible_collections.kvtrial.vllm.plugins.filter.wheel_needs import wheel_needs
from ansible_collections.kvtrial.vllm.plugins.module_utils import variable_names

ROOT = Path(__file__).resolve().parents[2]
TABLE = yaml.safe_load((ROOT / "analysis/kvtrial/record/data/cuda.yml").read_text())


def slips(names, own=(), removed=None):
    known, prefixes = variable_names.known_names(str(ROOT)), variable_names.prefixes(str(ROOT))
    settable = variable_names.settings(str(ROOT))
    return variable_names.slips(names, known, set(own), prefixes, removed, settable)


def test_a_misspelt_name_is_named_with_the_one_that_was_meant():
    assert slips(["kvtrial_pais"]) == ["kvtrial_pais is unknown (did you mean kvtrial_pairs?)"]
    assert slips(["nvidia_driver_verson"])[0].endswith("(did you mean nvidia_driver_version?)")
    assert slips(["kvtrial_shape"], own=["kvtrial_shape"]) == []
    assert slips(["my_own", "ansible_host", "protocol", "arms", "model_revision"]) == []


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("kvtrail_pairs", "kvtrial_pairs"),
        ("kvtrail_pais", "kvtrial_pairs"),
        ("kvtrial__pairs", "kvtrial_pairs"),
        ("kvtrials_pairs", "kvtrial_pairs"),
        ("kv_trial_pairs", "kvtrial_pairs"),
        ("vktrial_state", "kvtrial_state"),
        ("ktrial_port", "kvtrial_port"),
        ("vlm_lock", "vllm_lock"),
        ("vllms_lock", "vllm_lock"),
        ("nvidia_reboot_allowed", "nvidia_driver_reboot_allowed"),
        ("nvida_driver_reboot_allowed", "nvidia_driver_reboot_allowed"),
        ("modle_manifest_revision", "model_manifest_revision"),
        ("nvdia_driver_packages", "nvidia_driver_packages"),
        ("nvidia_drivers_version", "nvidia_driver_version"),
        ("nvidia_version", "nvidia_driver_version"),
        ("nvidia_packages", "nvidia_driver_packages"),
        ("nvida_version", "nvidia_driver_version"),
        ("nvidia_drver_version", "nvidia_driver_version"),
        ("wokload_python", "workload_python"),
        ("workloads_python", "workload_python"),
        ("workloads_wheelhouse", "workload_wheelhouse"),
        ("modle_root", "model_root"),
        ("egnine_backend", "engine_backend"),
        ("preflght_port", "preflight_port"),
    ],
)
def test_a_name_misspelt_in_its_prefix_is_named_with_the_one_that_was_meant(name, meant):
    (sentence,) = slips([name])
    assert sentence.startswith(f"{name} is ") and sentence.endswith(f"(did you mean {meant}?)")
    assert slips([name], own=[name]) == []


@pytest.mark.parametrize(
    "name",
    [
        "models_root", "models_directory", "engines_port", "trail_state", "trials", "my_pairs", "site_name",
        "hub_token", "retrial_count", "material_seed", "kv_cache_dtype", "kv_store_port", "llvm_version", "llm_lock",
        "nvidia_smi_path", "nvidia_gpu_count", "nvidia_container_toolkit_version", "driver_packages",
        "nvidia_cuda_version", "workloads_enabled", "packages", "python_version", "mode_root", "modal_port",
        "trail_campaign", "adapt_state", "trials_campaign", "observer_port", "cuda_version", "driver_model",
        "node_exporter_port",
        "vlan_id", "virtual_machine_host", "rack", "gpu_count", "modern_python", "workloads", "ansible_user",
        "ansible_port", "inventory_hostname", "group_names", "omit", "playbook_dir", "trust_model_root",
        "collected_facts", "llm_version", "vision_lock",
    ],
)  # fmt: skip
def test_a_name_of_the_users_own_is_not_taken_for_a_slip(name):
    assert slips([name]) == []


@pytest.mark.parametrize("name", ["pairs", "seed", "sizes", "hosts", "purge", "trace"])
def test_a_short_name_that_nobody_reads_is_named_with_its_long_one(name):
    assert slips([name]) == [f"{name} is read by nobody (did you mean kvtrial_{name}?)"]
    assert slips([name], own=[name]) == []


def test_a_removed_name_is_named_with_its_replacement():
    assert slips(["vllm_release"], removed={"vllm_release": "vllm_version"}) == [
        "vllm_release was removed; set vllm_version"
    ]


def test_no_removed_name_is_still_read_and_each_replacement_is():
    known = variable_names.known_names(str(ROOT))
    for name, replacement in variable_names.REMOVED.items():
        assert name not in known and replacement in known


INVENTORIES = sorted(p for p in (ROOT / "inventories").iterdir() if p.is_dir())


@pytest.mark.parametrize("inventory", INVENTORIES, ids=lambda p: p.name)
def test_every_name_in_our_inventories_is_known(inventory, tools):
    done = tools.run("ansible-inventory", "-i", str(inventory), "--list", "--playbook-dir", "playbooks")
    for name, variables in json.loads(done.stdout)["_meta"]["hostvars"].items():
        assert slips(variables, own=variables.get("kvtrial_own_variables", [])) == [], name


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("kvtrial_pais=2", "this-machine: kvtrial_pais is unknown (did you mean kvtrial_pairs?)"),
        ("pairs=2", "this-machine: pairs is read by nobody (did you mean kvtrial_pairs?)"),
        ("kvtrail_pairs=2", "this-machine: kvtrail_pairs is read by nobody (did you mean kvtrial_pairs?)"),
        ("kvtrial_model_manifest_revison=x", "did you mean kvtrial_model_manifest_revision?"),
    ],
)
@pytest.mark.parametrize("playbook", ["experiment.yml", "playbooks/provision.yml"])
def test_a_misspelt_name_stops_a_playbook_before_a_host_is_touched(playbook, setting, sentence, tools):
    done = tools.run("ansible-playbook", playbook, "-e", setting)
    assert done.returncode != 0
    assert sentence in done.stdout.strip().splitlines()[-1]
    assert "Read the host's facts" not in done.stdout


def test_provision_refuses_a_host_without_consent(tools):
    done = tools.run("ansible-playbook", "playbooks/provision.yml", "-e", "kvtrial_host_may_be_disturbed=false")
    assert done.returncode != 0
    assert "kvtrial_host_may_be_disturbed is false" in done.stdout.strip().splitlines()[-1]
    assert "Read the host's facts" not in done.stdout


@pytest.mark.parametrize(
    ("version", "wheel", "needs"),
    [
        ("0.19.1", "", ("12.8", 525, "3.10")),
        ("0.22.1", "", ("13.0", 580, "3.10")),
        ("0.33.0", "", ("13.0", 580, "3.11")),
        ("0.26.0", "vllm-0.26.1.dev5+gf98d1fc49.cu129-cp38-abi3-manylinux_2_28_x86_64.whl", ("12.9", 525, "3.10")),
        ("9.9.9", "", ("13.0", 580, "3.11")),
    ],
)
def test_a_wheels_needs_follow_from_the_table(version, wheel, needs):
    found = wheel_needs(TABLE, version, wheel)
    assert (found["cuda"], found["least_driver"], found["python_min"]) == needs


def test_the_odd_host_is_named():
    hosts = {name: {"driver": "580.1.1", "governor": "performance"} for name in ("a", "b", "c")}
    assert odd_hosts(hosts) == []
    hosts["b"]["driver"] = "570.1.1"
    assert odd_hosts(hosts) == ["driver: b has 570.1.1, the other hosts 580.1.1"]
    assert odd_hosts(hosts, may_differ=["driver"]) == []
    hosts["c"]["governor"] = None
    assert odd_hosts(hosts)[1] == "governor: c has none, the other hosts performance"


def test_hosts_are_compared_in_all_that_makes_them_one_instrument():
    defaults = yaml.safe_load((ROOT / "roles" / "preflight" / "defaults" / "main.yml").read_text())
    compared = ["driver", "kernel", "engine_lock", "model", "gpu", "governor", "persistence_mode"]
    assert list(defaults["preflight_own_likeness"]) == compared
    variables = yaml.safe_load((ROOT / "roles" / "preflight" / "vars" / "main.yml").read_text())
    assert variables["__preflight_properties"] == compared
    hosts = {name: dict.fromkeys(compared, "same") for name in ("a", "b", "c")}
    hosts["b"] = dict.fromkeys(compared, "other")
    assert odd_hosts(hosts) == [f"{name}: b has other, the other hosts same" for name in compared]


def test_two_hosts_that_differ_are_both_named():
    assert odd_hosts({"a": {"gpu": "H200"}, "b": {"gpu": "H100"}}) == ["gpu: a has H200, b has H100"]


def test_a_host_unlike_the_pins_is_told_in_what():
    assert unlike_pins({"driver": "570.1.1", "model": "x"}, {"driver": "580.1.1", "model": ""}) == [
        "driver is 570.1.1, pinned is 580.1.1"
    ]
    assert unlike_pins({"driver": "570.1.1"}, {"driver": "580.1.1"}, ["driver"]) == []


LOOKED_AT = {
    "driver_version": "580.1.1",
    "kernel": "6.1.0-18-amd64",
    "gpus": [{"name": "NVIDIA H200", "persistence_mode": "Enabled"}] * 2,
    "cpu_governor": "performance",
}
PINNED = {
    "kvtrial_kernel": "6.1.0-18-amd64",
    "kvtrial_gpu_type": "NVIDIA H200",
    "kvtrial_cpu_governor": "performance",
    "kvtrial_persistence_mode": "Enabled",
}


@pytest.mark.parametrize(
    ("facts", "pins", "sentence"),
    [
        ({}, PINNED, None),
        ({}, {}, None),
        ({"kernel": "6.1.0-20-amd64"}, PINNED, "kernel is 6.1.0-20-amd64, pinned is 6.1.0-18-amd64"),
        ({"cpu_governor": None}, PINNED, "governor is none, pinned is performance"),
        ({"cpu_governor": None}, {**PINNED, "kvtrial_may_differ": ["governor"]}, None),
        ({"gpus": []}, PINNED, "gpu is none, pinned is NVIDIA H200"),
        (
            {"gpus": [{"name": name, "persistence_mode": "Disabled"} for name in ("NVIDIA H200", "NVIDIA L4")]},
            PINNED,
            "gpu is NVIDIA H200, NVIDIA L4, pinned is NVIDIA H200, NVIDIA H200; "
            "persistence_mode is Disabled, pinned is Enabled",
        ),
    ],
)
def test_kernel_gpu_governor_and_persistence_mode_can_be_pinned(facts, pins, sentence, tmp_path, tools):
    play = [{"hosts": "all", "gather_facts": False, "tasks": [
        {"ansible.builtin.import_role": {"name": "kvtrial.vllm.preflight", "tasks_from": "fleet"}}]}]  # fmt: skip
    (tmp_path / "play.yml").write_text(yaml.safe_dump(play))
    told = {"__preflight_host": {"facts": {**LOOKED_AT, **facts}}, **pins}
    done = tools.run("ansible-playbook", "-i", "inventories/local", str(tmp_path / "play.yml"), "-e", json.dumps(told))
    said = " ".join(done.stdout.split())
    assert (done.returncode == 0) == (sentence is None), said
    assert sentence is None or sentence in said, said


def test_every_odd_host_is_named_once():
    hosts = {name: {"driver": "580.1.1", "kernel": "6.1"} for name in ("a", "b", "c")}
    pins = {name: {"driver": "580.1.1", "model": "m"} for name in hosts}
    assert unlike_fleet(hosts, pins) == []
    hosts["b"] = {"driver": "570.1.1", "kernel": "6.1"}
    hosts["c"] = {"driver": None, "kernel": "5.9"}
    assert unlike_fleet(hosts, pins, failed={"d": "d: the model is another."}) == [
        "b is not as pinned: driver is 570.1.1, pinned is 580.1.1",
        "c is not as pinned: driver is none, pinned is 580.1.1",
        "d is not as pinned: d: the model is another",
        "kernel: c has 5.9, the other hosts 6.1",
    ]
    assert unlike_fleet(hosts, pins, ["driver", "kernel", "model"], {"d": "x"}) == []
    assert unlike_fleet(hosts, {}) == [
        "driver: a has 580.1.1, b has 570.1.1, c has none",
        "kernel: c has 5.9, the other hosts 6.1",
    ]


def test_what_one_host_may_differ_in_is_compared_with_the_others_hosts_all_the_same():
    """Whichever host the inventory names first."""
    hosts = {name: {"driver": "580.1.1", "kernel": "6.1"} for name in ("a", "b", "c")}
    pins = {name: {"driver": "580.1.1"} for name in hosts}
    hosts["a"] = {"driver": "590.1.1", "kernel": "6.9"}
    hosts["c"] = {"driver": "570.1.1", "kernel": "6.1"}
    allowed = {"a": ["driver", "kernel"], "b": [], "c": []}
    assert unlike_fleet(hosts, pins, allowed) == ["c is not as pinned: driver is 570.1.1, pinned is 580.1.1"]
    assert unlike_fleet(hosts, {}, allowed) == ["driver: b has 580.1.1, c has 570.1.1"]
    assert unlike_fleet(hosts, {}, {"a": ["driver"], "b": [], "c": ["driver"]}) == [
        "kernel: a has 6.9, the other hosts 6.1"
    ]
    assert unlike_fleet({}, {}, {"a": ["model"]}, {"a": "x", "b": "y"}) == ["b is not as pinned: y"]


def test_a_host_that_changed_is_told_in_what():
    before = {"driver": "580.1.1", "governor": None, "kernel": "6.1", "model": "m"}
    assert changed_since(dict(before), before) == []
    now = {"driver": "570.1.1", "governor": "performance", "kernel": "6.1"}
    assert changed_since(now, before) == ["driver is 570.1.1, it was 580.1.1", "governor is performance, it was none"]
    assert changed_since(now, before, ["driver"]) == ["governor is performance, it was none"]


FLEET = """
- name: Look at the hosts
  hosts: all
  gather_facts: false
  tasks:
    - kvtrial.vllm.conditions:
        checks: [{that: inventory_hostname not in broken, fail_msg: "{{ inventory_hostname }}: another sha256."}]
      register: model_verified
    - ansible.builtin.import_role: {name: kvtrial.vllm.preflight, tasks_from: fleet}
- name: Measure
  hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.debug: {msg: "measured"}
"""


@pytest.mark.parametrize(
    ("unlike", "broken", "sentence"),
    [
        ({}, [], ""),
        ({"h2": "570.1.1"}, [], "instrument. h2 is not as pinned: driver is 570.1.1, pinned is 580.1.1. Bring"),
        ({"h2": "570.1.1", "h3": None}, [], "h3 is not as pinned: driver is none, pinned is 580.1.1. Bring them to"),
        ({}, ["h1"], "instrument. h1 is not as pinned: h1: another sha256. Bring"),
    ],
)
def test_one_host_unlike_the_pin_stops_the_whole_fleet(unlike, broken, sentence, tmp_path, tools):
    """Three planted hosts, two of which are as pinned: nothing is measured on any."""
    (tmp_path / "play.yml").write_text(FLEET)
    likeness = {"driver": "580.1.1", "kernel": "6.1", "model": "m"}
    hosts = {
        name: {
            "ansible_connection": "local",
            "preflight_own_likeness": {**likeness, "driver": unlike.get(name, "580.1.1")},
            "preflight_pins": {"driver": "580.1.1", "model": ""},
        }
        for name in ("h1", "h2", "h3")
    }
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts}}))
    told = json.dumps({"broken": broken})
    done = tools.run("ansible-playbook", "-i", str(tmp_path / "hosts.yml"), str(tmp_path / "play.yml"), "-e", told)
    if not sentence:
        assert done.returncode == 0 and done.stdout.count("measured") == 3, done.stdout
        return
    assert done.returncode != 0
    assert "measured" not in done.stdout, done.stdout
    last = [line for line in done.stdout.splitlines() if line.strip()][-1]
    assert sentence in last or last == "h1: another sha256.", done.stdout
    assert sentence in done.stdout
    assert all(f"{host} is not as pinned" in done.stdout for host in [*unlike, *broken])


def test_a_host_whose_own_pins_let_it_differ_does_not_speak_for_the_others(tmp_path, tools):
    """The first host of the play may be of another driver; h3 may not."""
    (tmp_path / "play.yml").write_text(FLEET)
    drivers = {"h1": "590.1.1", "h2": "580.1.1", "h3": "570.1.1"}
    hosts = {
        name: {"ansible_connection": "local", "preflight_own_likeness": {"driver": driver}, "preflight_pins": {}}
        for name, driver in drivers.items()
    }
    hosts["h1"]["kvtrial_may_differ"] = ["driver"]
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts}}))
    done = tools.run("ansible-playbook", "-i", str(tmp_path / "hosts.yml"), str(tmp_path / "play.yml"), "-e", "broken=")
    assert done.returncode != 0 and "driver: h2 has 580.1.1, h3 has 570.1.1" in done.stdout, done.stdout
    assert "h1 has" not in done.stdout


def test_a_host_whose_model_failed_does_not_mark_the_others_of_a_provision_as_failed(tmp_path, tools):
    play = FLEET.replace("tasks_from: fleet}", "tasks_from: fleet}\n      vars: {__preflight_of_all: false}")
    (tmp_path / "play.yml").write_text(play)
    hosts = {
        name: {"ansible_connection": "local", "preflight_own_likeness": {"model": "m"}, "preflight_pins": {}}
        for name in ("h1", "h2", "h3")
    }
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts}}))
    told = json.dumps({"broken": ["h2"]})
    done = tools.run("ansible-playbook", "-i", str(tmp_path / "hosts.yml"), str(tmp_path / "play.yml"), "-e", told)
    assert done.returncode != 0 and done.stdout.count("measured") == 2, done.stdout
    book = (ROOT / "playbooks" / "provision.yml").read_text()
    assert (
        "__preflight_of_all: false" in book and "__preflight_of_all" not in (ROOT / "playbooks/prepare.yml").read_text()
    )


AGAIN = """
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.set_fact: {preflight_likeness: "{{ was }}"}
    - ansible.builtin.import_role: {name: kvtrial.vllm.preflight, tasks_from: again}
    - ansible.builtin.debug: {msg: "MEASURING"}
"""


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("nothing", ""),
        ("kernel", "h1 is no longer as it was made ready: kernel is {kernel}, it was 5.9. Nothing was started on it;"),
        ("model", "h1 is no longer as it was made ready: model is n, it was m. Nothing"),
        ("engine", "h1 is no longer as it was made ready: engine_lock is as found, 2 packages with sha256 "),
        ("allowed", ""),
    ],
)
def test_a_host_that_changed_since_it_was_made_ready_is_not_started(change, sentence, tmp_path, tools):
    """A provision between a campaign's stages, or a reboot into another kernel before its program is started again."""
    venv, manifest = tmp_path / "venv", tmp_path / "manifest.json"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    site = venv / "lib" / "python3.11" / "site-packages"
    (site / "vllm-1.dist-info").mkdir(parents=True)
    manifest.write_text('{"revision": "m"}')
    told = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "kvtrial_state_dir": str(tmp_path / "state"),
        "vllm_existing_venv": str(venv),
        "engine_inputs": {"model": {"revision": "m", "manifest": str(manifest)}},
        "kvtrial_may_differ": ["kernel"] if change == "allowed" else [],
    }
    probe = [sys.executable, str(ROOT / "roles/vllm/files/probe_host.py"), str(venv), "none"]
    packages = json.loads(subprocess.run(probe, check=True, capture_output=True, text=True).stdout)["packages_sha256"]
    was = {
        "kernel": "5.9" if change in ("kernel", "allowed") else platform.release(),
        "engine_lock": f"as found, 1 packages with sha256 {packages}",
        "model": "m",
    }
    if change == "model":
        manifest.write_text('{"revision": "n"}')
    if change == "engine":
        (site / "flashinfer-1.dist-info").mkdir()
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"h1": told | {"was": was}}}}))
    (tmp_path / "play.yml").write_text(AGAIN)
    done = tools.run("ansible-playbook", "-i", str(tmp_path / "hosts.yml"), str(tmp_path / "play.yml"))
    said = " ".join(done.stdout.split())
    assert ("MEASURING" in said) is (sentence == ""), said
    assert sentence.format(kernel=platform.release()) in said, said


def test_a_host_is_held_and_compared_again_before_each_start():
    """In every stage, and where a program that ended is started again."""
    plays = {play["name"]: play for play in yaml.safe_load((ROOT / "playbooks" / "measure.yml").read_text())}
    stage = next(task for task in plays["Run the host programs"]["tasks"] if task["name"] == "Start what is due")
    restart = yaml.safe_load((ROOT / "roles" / "trial" / "tasks" / "restart.yml").read_text())
    for tasks, always in (
        (stage["block"], stage["always"]),
        ([*restart, *restart[-1]["block"]], restart[-1]["always"]),
    ):
        said = [str(task) for task in tasks]
        held, again, start = (
            next(i for i, words in enumerate(said) if wanted in words and "'block'" not in words)
            for wanted in (
                "'purpose': 'experiment'",
                "'tasks_from': 'again'",
                "vllm.trial'" if tasks is stage["block"] else "host_program'",
            )
        )
        assert held < again < start, said
        assert "'tasks_from': 'unlock'" in str(always)


def test_the_fleet_is_judged_before_anything_is_installed_and_again_with_engine_and_model():
    looked = yaml.safe_load((ROOT / "roles" / "preflight" / "tasks" / "main.yml").read_text())
    assert [task.get("ansible.builtin.import_tasks") for task in looked][1] == "fleet.yml"
    plays = {play["name"]: str(play) for play in yaml.safe_load((ROOT / "playbooks" / "prepare.yml").read_text())}
    assert "tasks_from': 'fleet'" in plays["Prepare the hosts"]


@pytest.mark.parametrize("protocol", ["preemption_ladder", "preemption_noise", "tier_size"])
def test_on_this_machine_a_ladder_and_its_noise_get_the_same_small_model(protocol, tools):
    done = tools.run(
        "ansible", "this-machine", "-i", "inventories/local", "-m", "ansible.builtin.debug", "-a",
        "var=local_small_model", "-e", f"protocol={protocol}",
    )  # fmt: skip
    assert f"local_small_model: {str(protocol.startswith('preemption_')).lower()}" in done.stdout
