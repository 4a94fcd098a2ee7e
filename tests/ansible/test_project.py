"""The project as a whole: every playbook, inventory, role and plugin, checked as its users and tools see it."""

import configparser
import json
import re
import sys
import tarfile
from pathlib import Path

import pytest
import yaml
from ansible_collections.kvtrial.vllm.plugins.module_utils import host_facts

ROOT = Path(__file__).resolve().parents[2]
PLAYBOOKS = [Path("experiment.yml"), *sorted(p.relative_to(ROOT) for p in ROOT.glob("playbooks/*.yml"))]
INVENTORIES = sorted(p.relative_to(ROOT) for p in ROOT.glob("inventories/*") if p.is_dir())
ROLES = sorted(p.name for p in ROOT.glob("roles/*") if p.is_dir())
PHASES = ("preflight", "install", "configure", "verify")
PLUGINS = [
    (kind, path.stem)
    for kind, folder in (("module", "modules"), ("callback", "callback"), ("filter", "filter"), ("lookup", "lookup"))
    for path in sorted((ROOT / "plugins" / folder).glob("*.py"))
]


def load(path: Path):
    return yaml.safe_load(path.read_text()) or {}


def test_there_is_something_to_check():
    assert len(PLAYBOOKS) >= 3
    assert {path.name for path in INVENTORIES} >= {"local", "example_fleet"}
    assert {"preflight", "vllm", "model", "workload", "engine", "trial", "collect"} <= set(ROLES)
    assert len(PLUGINS) >= 7


@pytest.mark.parametrize("inventory", INVENTORIES, ids=str)
@pytest.mark.parametrize("playbook", PLAYBOOKS, ids=str)
def test_a_playbook_is_well_formed_with_every_inventory(playbook, inventory, tools):
    done = tools.run("ansible-playbook", "--syntax-check", "-i", str(inventory), str(playbook))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("inventory", INVENTORIES, ids=str)
def test_the_pins_reach_every_host_of_every_inventory(inventory, tools):
    done = tools.run("ansible-inventory", "-i", str(inventory), "--list")
    assert done.returncode == 0, done.stderr
    hosts = json.loads(done.stdout)["_meta"]["hostvars"]
    assert hosts
    pinned = load(ROOT / "group_vars" / "all" / "pins.yml")
    for name, variables in hosts.items():
        assert variables.get("kvtrial_pins_schema") == pinned["kvtrial_pins_schema"], name
        assert set(pinned) <= set(variables), name


@pytest.mark.parametrize("inventory", INVENTORIES, ids=str)
def test_an_inventorys_pins_are_a_link_and_no_copy(inventory):
    link = ROOT / inventory / "group_vars" / "all" / "00-pins.yml"
    assert link.is_symlink()
    assert link.resolve() == ROOT / "group_vars" / "all" / "pins.yml"


def test_only_the_local_inventory_gives_consent(tools):
    for inventory in INVENTORIES:
        done = tools.run("ansible-inventory", "-i", str(inventory), "--list")
        given = {v["kvtrial_host_may_be_disturbed"] for v in json.loads(done.stdout)["_meta"]["hostvars"].values()}
        assert given == {inventory.name == "local"}


TEMPLATED = ("kvtrial_model_kv_bytes_per_token", "model_dimensions", "model_tied_embeddings", "kvtrial_engine_env")


@pytest.mark.parametrize(
    ("shape", "kv_bytes_per_token", "tied"),
    [
        ("qwen3-0.6b", 114688, True),
        ("qwen3-1.7b", 114688, True),
        ("qwen3-4b", 147456, True),
        ("qwen3-8b", 147456, False),
    ],
)
def test_the_containers_shapes_are_those_of_the_family(shape, kv_bytes_per_token, tied, tools):
    asked = "{{ [" + ", ".join(TEMPLATED) + "] | to_json }}"
    told = ["-e", f"kvtrial_shape={shape}", "-e", f"kvtrial_root={ROOT}", "--playbook-dir", "playbooks"]
    done = tools.run("ansible", "-i", "inventories/gpu_container", "all", "-m", "ansible.builtin.debug", "-a",
                     f"msg={asked}", *told, ANSIBLE_STDOUT_CALLBACK="ansible.builtin.minimal",
                     ANSIBLE_CALLBACK_RESULT_FORMAT="json")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    shown = json.loads(done.stdout.split("=>", 1)[1])["msg"]
    kv, dimensions, is_tied, env = json.loads(shown) if isinstance(shown, str) else shown
    assert kv == kv_bytes_per_token == dimensions["layers"] * 2 * dimensions["kv_heads"] * dimensions["head_dim"] * 2
    assert is_tied is tied
    assert dimensions["attention_heads"] % dimensions["kv_heads"] == 0
    assert env["VLLM_KV_CACHE_LAYOUT"] == "HND"
    assert env["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


@pytest.mark.parametrize(
    ("protocol", "eager", "size"),
    [
        ("offload_lengths", True, None),
        ("offload_layout", True, None),
        ("offload_mix", True, ("prompt_tokens", 4104)),
        ("preemption_ladder", False, ("gpu_blocks", 228)),
        ("preemption_noise", False, ("gpu_blocks", 228)),
    ],
)
def test_the_containers_engine_and_sizes_are_those_of_the_protocol(protocol, eager, size, tools):
    told = ["-e", f"kvtrial_protocol={protocol}", "-e", f"kvtrial_root={ROOT}", "--playbook-dir", "playbooks"]
    done = tools.run("ansible", "-i", "inventories/gpu_container", "all", "-m", "ansible.builtin.debug", "-a",
                     "msg={{ [kvtrial_engine_args, kvtrial_sizes] | to_json }}", *told,
                     ANSIBLE_STDOUT_CALLBACK="ansible.builtin.minimal",
                     ANSIBLE_CALLBACK_RESULT_FORMAT="json")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    shown = json.loads(done.stdout.split("=>", 1)[1])["msg"]
    args, sizes = json.loads(shown) if isinstance(shown, str) else shown
    assert (args.get("enforce-eager") is True) is eager and ("compilation-config" in args) is not eager
    assert sizes["ram_tolerance_percent"] == 10 and isinstance(sizes["tier_bytes"], int)
    assert size is None or sizes[size[0]] == size[1]


def test_an_inventory_without_pins_is_refused_in_a_sentence(tmp_path, tools):
    (tmp_path / "hosts.yml").write_text("all: {hosts: {lonely: {ansible_connection: local}}}\n")
    done = tools.run("ansible-playbook", "-i", str(tmp_path / "hosts.yml"), "experiment.yml")
    assert done.returncode != 0
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("lonely: kvtrial_pins_schema is not set"), done.stdout
    assert "group_vars/all/00-pins.yml" in last


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"kvtrial_host_may_be_disturbed": False}, "kvtrial_host_may_be_disturbed is False"),
        ({"kvtrial_host_may_be_disturbed": "maybe"}, "kvtrial_host_may_be_disturbed=maybe is neither true nor false"),
        (
            {"kvtrial_driver_manage": "maybe"},
            "kvtrial_driver_manage=maybe is neither true nor false; set it to true to",
        ),
        ({"kvtrial_may_differ": "driver"}, "kvtrial_may_differ=driver is no list of properties; hosts are compared in"),
        (
            {"kvtrial_may_differ": ["drivr"]},
            "is no list of properties; hosts are compared in driver, kernel, engine_lock",
        ),
        ({"kvtrial_port": "abc"}, "kvtrial_port=abc is not a whole number from 0; write digits only."),
        ({"kvtrial_disk_reserve_bytes": "x"}, "kvtrial_disk_reserve_bytes=x is not a whole number"),
        ({"kvtrial_sweep_first_seconds": "x"}, "kvtrial_sweep_first_seconds=x is not a whole number"),
        ({"kvtrial_engine_args": "x"}, "kvtrial_engine_args=x is not a mapping"),
        ({"kvtrial_limits": "x"}, "kvtrial_limits=x is not a mapping"),
        ({"kvtrial_state_dir": ""}, "kvtrial_state_dir=(empty) is no absolute path below /"),
        ({"kvtrial_state_dir": "a/b"}, "kvtrial_state_dir=a/b is no absolute path below /"),
        ({"kvtrial_state_dir": "//"}, "kvtrial_state_dir=// is no absolute path below /"),
        ({"kvtrial_results_dir": "/proc/x"}, "kvtrial_results_dir=/proc/x can't be used"),
        ({"arms": ","}, "kvtrial_arms=, is not a list of names"),
        ({"kvtrial_hosts": "nohost"}, "kvtrial_hosts=nohost matches no host of the inventory; known are this-machine."),
        ({"kvtrial_backend": "rocm"}, "kvtrial_backend=rocm is unknown; set it to cpu or cuda."),
        ({"kvtrial_engine_args": {"host": "0.0.0.0"}}, "the engine would listen on 0.0.0.0"),
        ({"kvtrial_engine_env": {"VLLM_HOST_IP": "10.0.0.1"}}, "the engine would listen on 10.0.0.1"),
        ({"kvtrial_engine_env_more": {"VLLM_HOST_IP": "10.0.0.2"}}, "remove VLLM_HOST_IP from kvtrial_engine_env_more"),
    ],
)
def test_a_host_is_refused_in_the_last_line_before_it_is_touched(settings, sentence, tmp_path, tools):
    cause = tmp_path / "cause"
    done = tools.run("ansible-playbook", "experiment.yml", "-e", json.dumps(settings), KVTRIAL_CAUSE_FILE=str(cause))
    assert done.returncode != 0
    last = done.stdout.strip().splitlines()[-1]
    assert sentence in last
    assert cause.read_text().strip() == last
    assert "Look at the hosts" not in done.stdout


@pytest.mark.parametrize("port", [0, 70000])
def test_a_provision_refuses_what_is_no_port_before_a_host_is_asked(port, tools):
    """An experiment's planner does, too; a provision has none."""
    done = tools.run("ansible-playbook", "playbooks/provision.yml", "--check", "-e", f"kvtrial_port={port}")
    last = done.stdout.strip().splitlines()[-1]
    assert done.returncode and f"kvtrial_port={port} is no port; give one from 1 to 65535." in last, done.stdout
    assert "Read the host's facts" not in done.stdout


@pytest.mark.parametrize("state_dir", ["", "/", "a/b", "/a/../.."])
def test_teardown_refuses_a_state_directory_that_is_not_the_projects_own(state_dir, tools):
    settings = json.dumps({"kvtrial_state_dir": state_dir, "kvtrial_purge": True})
    done = tools.run("ansible-playbook", "playbooks/teardown.yml", "-e", settings)
    assert done.returncode != 0
    assert "is no absolute path below /" in done.stdout.strip().splitlines()[-1]


def test_check_mode_says_what_would_be_done_on_a_bare_host_and_leaves_nothing(tmp_path, tools):
    settings = {
        "kvtrial_state_dir": str(tmp_path / "state"),
        "kvtrial_results_dir": str(tmp_path / "results"),
        "kvtrial_ram_reserve_bytes": 1,
        "kvtrial_port": 18766,
        "vllm_python": sys.executable,
    }
    done = tools.run("ansible-playbook", "experiment.yml", "--check", "-e", json.dumps(settings))
    assert done.returncode == 0, done.stdout
    for words in (
        "vLLM 0.32.0 (cpu) would be installed",
        "the model would be made in",
        "The host program would be installed",
    ):
        assert words in done.stdout
    assert "12 runs (6 pairs of control, offload)" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_clone_started_without_its_settings_is_refused(tmp_path, tools):
    empty = tmp_path / "empty.cfg"
    empty.write_text("")
    command = ("ansible-playbook", "-i", str(ROOT / "inventories" / "local"), str(ROOT / "experiment.yml"))
    done = tools.run(*command, cwd=tmp_path, ANSIBLE_CONFIG=str(empty))
    assert done.returncode != 0
    assert f"change to {ROOT} and start the playbook there" in " ".join(done.stdout.split())
    assert "Look at the hosts" not in done.stdout


@pytest.mark.parametrize("playbook", ["experiment.yml", "provision.yml", "teardown.yml"])
def test_a_playbook_started_in_its_own_folder_is_refused_with_where_to_start_it(playbook, tools, tmp_path):
    (tmp_path / "empty.cfg").touch()
    done = tools.run("ansible-playbook", playbook, cwd=ROOT / "playbooks", ANSIBLE_CONFIG=str(tmp_path / "empty.cfg"))
    assert done.returncode != 0
    said = " ".join((done.stdout + done.stderr).split())
    assert f"change to {ROOT} and start the playbook there" in said, said
    assert "was not found" not in said


def test_a_plan_made_by_hand_is_shown(tools):
    done = tools.run("ansible-playbook", "playbooks/plan.yml")
    assert done.returncode == 0, done.stdout
    assert "12 runs (6 pairs of control, offload)" in done.stdout


def test_the_host_program_gets_the_disk_reserve_that_the_preflight_checks(tools):
    done = tools.run("ansible", "all", "-m", "ansible.builtin.debug", "-a", "var=kvtrial_host_inputs.limits",
                     "-e", '{"kvtrial_disk_reserve_bytes": 7, "kvtrial_limits": {"deadline_seconds": 9}}')  # fmt: skip
    assert "disk_reserve_bytes: 7" in done.stdout, done.stdout
    assert "deadline_seconds: 9" in done.stdout


CHECK_HOST = """
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.include_vars: {file: "{{ root }}/roles/preflight/vars/main.yml"}
    - ansible.builtin.include_tasks: "{{ root }}/roles/preflight/tasks/host.yml"
    - ansible.builtin.include_tasks: "{{ root }}/roles/preflight/tasks/neighbours.yml"
"""
FACTS = {
    "architecture": "x86_64",
    "cpu_model": "Some CPU",
    "cpu_flags": ["f16c", "avx2"],
    "nvidia": False,
    "rocm": False,
    "xpu": False,
    "gpus": [],
    "ram_total_bytes": 64 * 2**30,
    "ram_available_bytes": 60 * 2**30,
    "dev_shm_free_bytes": 30 * 2**30,
    "disk_free_bytes": 2**40,
    "engines": [],
    "gpu_processes": [],
    "cuda_node": True,
    "port_in_use": False,
    "shared_memory_leftovers": [],
}
OWN = [{"pid": 7, "start_ticks": 1, "command": "vllm serve m", "own": True}]
FOREIGN = [{"pid": 8, "start_ticks": 1, "command": "vllm serve m", "own": False}]
LEFTOVER = [{"path": "/dev/shm/vllm_offload_x.mmap", "bytes": 1, "mapped": False}]


def old_cpu_flags():
    return host_facts.parse_cpuinfo("model name: Some CPU\nflags: fpu sse2 avx avx2\n")[1]


@pytest.mark.parametrize(
    ("facts", "backend", "sentence"),
    [
        ({}, "cpu", None),
        ({"rocm": True}, "cuda", "has an AMD GPU (ROCm)"),
        ({"xpu": True}, "cuda", "has an Intel GPU (XPU)"),
        ({"rocm": True}, "cpu", None),
        ({"rocm": True, "nvidia": True, "gpus": [{}]}, "cuda", None),
        ({"rocm": True, "nvidia": True}, "cuda", "nvidia-smi shows no GPU"),
        (
            {"cpu_flags": old_cpu_flags()},
            "cpu",
            "(Some CPU) has no f16c, the engine's wheels for the CPU need avx2 and f16c",
        ),
        ({"cpu_flags": []}, "cpu", "has no avx2 and no f16c"),
        ({"cpu_flags": None}, "cpu", None),
        ({"cpu_flags": [], "architecture": "aarch64"}, "cpu", None),
        ({"cpu_flags": [], "gpus": [{}]}, "cuda", None),
        ({}, "cuda", "nvidia-smi shows no GPU"),
        ({"ram_available_bytes": 2**30}, "cpu", "1073741824 bytes of RAM are available, 8589934592 must stay free"),
        ({"disk_free_bytes": 1}, "cpu", "1 bytes are free below"),
        ({"engines": FOREIGN}, "cpu", "another engine runs here, pid 8 (vllm serve m)"),
        ({"engines": OWN, "port_in_use": True, "ram_available_bytes": 1}, "cpu", None),
        ({"port_in_use": True}, "cpu", "port 18000 is taken"),
        ({"shared_memory_leftovers": LEFTOVER}, "cpu", "vllm_offload_x.mmap was left in memory"),
        ({"gpus": [{}], "cuda_node": False}, "cuda", "/dev/nvidia-uvm is missing, and an engine's unit, which has no"),
        ({"cuda_node": False}, "cpu", None),
        ({"gpus": [{}], "gpu_processes": [{"pid": 9}]}, "cuda", "process 9 uses a GPU"),
        ({"gpus": [{}], "gpu_processes": [{"pid": 7}], "engines": OWN}, "cuda", None),
    ],
)
def test_preflight_refuses_each_fault_and_nothing_else(facts, backend, sentence, tmp_path, tools):
    (tmp_path / "play.yml").write_text(CHECK_HOST)
    variables = {
        "root": str(ROOT),
        "__preflight_host": {"facts": {**FACTS, **facts}},
        "preflight_backend": backend,
        "preflight_supervisor": "systemd",
        "preflight_port": 18000,
        "preflight_state_dir": "/s",
        "preflight_ram_reserve_bytes": 2**33,
        "preflight_disk_reserve_bytes": 2**31,
        "preflight_engine_args": {},
        "preflight_engine_env": {},
        "ansible_connection": "local",
    }
    (tmp_path / "variables.json").write_text(json.dumps(variables))
    done = tools.run("ansible-playbook", "-i", "h,", str(tmp_path / "play.yml"), "-e", f"@{tmp_path}/variables.json")
    last = done.stdout.strip().splitlines()[-1]
    if sentence is None:
        assert done.returncode == 0, done.stdout
    else:
        assert done.returncode != 0
        assert sentence in last


CHECK_MEMORY = """
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.import_role: {name: kvtrial.vllm.preflight, tasks_from: memory}
"""
RESERVE = 2 * 2**30  # of the inventory local
STOCK_ON_GPU = {
    "kvtrial_backend": "cuda",
    "kvtrial_connector_extra_config": {},
    "kvtrial_engine_args": {"num-gpu-blocks-override": 97, "max-model-len": 2048, "block-size": 32},
    "kvtrial_sizes": {"tier_bytes": 2**34},
}


@pytest.mark.parametrize(
    ("facts", "settings", "sentence"),
    [
        ({}, {}, None),
        ({"ram_available_bytes": RESERVE + 2**28}, {}, "KV cache 12713984, engine 2684354560, reserve 2147483648)"),
        ({"ram_available_bytes": RESERVE + 2**28, "engines": OWN}, {}, None),
        ({"dev_shm_free_bytes": 2**30}, STOCK_ON_GPU, "is a file in /dev/shm from 0.27, where 1073741824 bytes"),
        ({}, STOCK_ON_GPU, None),
    ],
)
def test_what_the_memory_cant_hold_is_refused_before_anything_is_installed(facts, settings, sentence, tmp_path, tools):
    (tmp_path / "play.yml").write_text(CHECK_MEMORY)
    told = {"kvtrial_root": str(ROOT), "__preflight_host": {"facts": {**FACTS, **facts}}, **settings}
    done = tools.run("ansible-playbook", str(tmp_path / "play.yml"), "-e", json.dumps(told), cwd=ROOT)
    if sentence is None:
        assert done.returncode == 0, done.stdout
    else:
        assert done.returncode != 0, done.stdout
        assert sentence in done.stdout.strip().splitlines()[-1], done.stdout


def test_the_experiment_looks_at_the_memory_before_it_installs_anything():
    plays = {play["name"]: play for play in load(ROOT / "playbooks" / "prepare.yml")}
    names = list(plays)
    assert names.index("Look at the hosts") < names.index("Prepare the hosts")
    (check,) = plays["Look at the hosts"]["tasks"]
    assert check["ansible.builtin.import_role"]["tasks_from"] == "memory"
    assert [role["role"] for role in plays["Look at the hosts"]["roles"]] == ["kvtrial.vllm.preflight"]


@pytest.mark.parametrize("role", ROLES)
def test_a_roles_argument_specs_name_exactly_its_defaults(role):
    entry_points = load(ROOT / "roles" / role / "meta" / "argument_specs.yml")["argument_specs"]
    assert "main" in entry_points
    described = {name for entry in entry_points.values() for name in entry.get("options", {})}
    defaults = set(load(ROOT / "roles" / role / "defaults" / "main.yml"))
    assert described == defaults
    assert all(name.startswith(f"{role}_") for name in defaults)


@pytest.mark.parametrize("role", ROLES)
def test_a_role_is_documented(role, tools):
    done = tools.run("ansible-doc", "--type", "role", "--json", f"kvtrial.vllm.{role}")
    assert done.returncode == 0, done.stderr
    entry = json.loads(done.stdout)[f"kvtrial.vllm.{role}"]["entry_points"]["main"]
    assert entry["short_description"]


@pytest.mark.parametrize(("kind", "name"), PLUGINS, ids=lambda value: value)
def test_a_plugin_is_documented(kind, name, tools):
    done = tools.run("ansible-doc", "--type", kind, "--json", f"kvtrial.vllm.{name}")
    assert done.returncode == 0, done.stderr
    entry = json.loads(done.stdout)[f"kvtrial.vllm.{name}"]["doc"]
    assert entry["short_description"]
    assert entry["description"]


@pytest.mark.parametrize("path", sorted(ROOT.glob("plugins/modules/*.py")), ids=lambda path: path.name)
def test_a_modules_check_mode_is_documented(path, tools):
    done = tools.run("ansible-doc", "--json", f"kvtrial.vllm.{path.stem}")
    assert "check_mode" in json.loads(done.stdout)[f"kvtrial.vllm.{path.stem}"]["doc"]["attributes"]


def test_ansible_lint_is_content_in_its_strictest_profile(tools):
    done = tools.run("ansible-lint", "--offline", "--profile", "production", "--nocolor")
    assert done.returncode == 0, done.stdout + done.stderr


def test_yamllint_is_content(tools):
    done = tools.run("yamllint", "--strict", ".")
    assert done.returncode == 0, done.stdout


def test_requirements_name_only_what_the_roles_use():
    assert load(ROOT / "requirements.yml") == {"collections": []}


@pytest.fixture(scope="session")
def collection(tmp_path_factory, tools) -> list[str]:
    """Names of the files in the built collection."""
    out = tmp_path_factory.mktemp("collection")
    done = tools.run("ansible-galaxy", "collection", "build", "--output-path", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = out.glob("kvtrial-vllm-*.tar.gz")
    with tarfile.open(archive) as tar:
        return tar.getnames()


@pytest.mark.parametrize(
    "name",
    [
        "playbooks/experiment.yml",
        "playbooks/measure.yml",
        "playbooks/prepare.yml",
        "playbooks/protocols/offload_return.yml",
        "roles/preflight/tasks/main.yml",
        "plugins/modules/campaign.py",
        "plugins/callback/console.py",
        "analysis/kvtrial/record/plan.py",
        "requirements/host.txt",
        "pyproject.toml",
        "group_vars/all/pins.yml",
        "inventories/local/group_vars/all/00-pins.yml",
        "LICENSE",
    ],
)
def test_the_collection_holds_what_a_project_needs(name, collection):
    assert name in collection


def test_the_collection_holds_nothing_that_was_made_or_only_tests(collection):
    unwanted = ("tests", "collections", "results", ".venv", ".kvtrial", ".git", ".ansible")
    assert [name for name in collection if name.split("/")[0] in unwanted] == []
    assert [name for name in collection if "__pycache__" in name or name.endswith(".pyc")] == []


def test_roles_have_the_phases_and_tags_that_the_documentation_names(tools):
    """A phase by its tag, a role by its own; what guards a host is taken whatever the tags."""
    text = (ROOT / "docs" / "provision" / "hosts.md").read_text()
    named = set()
    for row in text.split("compares it with the roles -->\n")[1].split("\n\n")[0].splitlines()[2:]:
        role, *cells = (cell.strip().strip("`") for cell in row.strip("| ").split("|"))
        named |= {role, *(f"{role}_{phase}" for phase, cell in zip(PHASES, cells, strict=False) if cell)}
    done = tools.run("ansible-playbook", "--list-tags", "-i", "inventories/local", "playbooks/provision.yml")
    assert done.returncode == 0, done.stderr
    tags = set(re.findall(r"\w+", " ".join(re.findall(r"TASK TAGS: \[(.*)\]", done.stdout))))
    assert named == tags - {"always"}
    plays = yaml.safe_load((ROOT / "playbooks" / "provision.yml").read_text())
    always = [play["name"] for play in plays if play.get("tags") == ["always"]]
    assert always == ["Check the hosts", "Give the hosts back"]


def test_no_inventory_gives_an_option_of_ssh_that_ansible_cfg_gives_before_it():
    config = configparser.ConfigParser()
    config.read(ROOT / "ansible.cfg")
    # ssh takes the first value. These come before an inventory's, and so does `timeout`, as ConnectTimeout.
    given = {*re.findall(r"-o (\w+)=", config["ssh_connection"]["ssh_args"]), "ConnectTimeout"}
    assert "ServerAliveInterval" in given
    for path in sorted((ROOT / "inventories").glob("*/hosts.yml")):
        for words in re.findall(r"ansible_ssh_(?:common|extra)_args: (.*)", path.read_text()):
            assert not given & set(re.findall(r"-o (\w+)=", words)), f"{path}: {words} changes nothing"
