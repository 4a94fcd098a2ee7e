"""What playbooks/bundle.yml and playbooks/provision.yml refuse of a bundle, in a sentence; no host is asked."""

import hashlib
import json
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
HUB = {
    "kvtrial_model_endpoint": "https://hub.example.invalid",
    "kvtrial_model_repository": "Qwen/Qwen3-0.6B",
    "kvtrial_model_revision": "c1899de289a04d12100db370d81485cdf75e47ca",
}
DRIVER = {"kvtrial_backend": "cuda", "kvtrial_driver_manage": "true"}


def bundle(folder, *names):
    """A bundle that holds those files, whole by its list."""
    lines = []
    for name in ("wheels/a.whl", *names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
        lines.append(f"{hashlib.sha256(name.encode()).hexdigest()}  {name}\n")
    (folder / "SHA256SUMS").write_text("".join(lines))
    return str(folder)


# name: (files of the bundle, variables of the host, what is said; nothing where it is taken)
BUNDLES = {
    "no-model": (
        [],
        HUB,
        "has no folder model: Qwen/Qwen3-0.6B would be fetched from https://hub.example.invalid; make the bundle again",
    ),
    "hub-all-the-same": (
        ["model/config.json"],
        {**HUB, "model_source": "huggingface"},
        "huggingface passes it by: Qwen/Qwen3-0.6B would be fetched from https://hub.example.invalid; take model_s",
    ),
    "a-model": (["model/config.json"], HUB, ""),
    "a-made-model": ([], {}, ""),
    "a-directory-of-the-host": ([], {**HUB, "kvtrial_model_directory": "/srv/model"}, ""),
    "no-debs": (
        [],
        DRIVER,
        "has no folder debs, and the driver would come from the vendor's repository; make the bundle",
    ),
    "debs": (["debs/Packages"], DRIVER, ""),
    "debs-of-the-users": ([], {**DRIVER, "nvidia_driver_debs": "/srv/debs"}, ""),
    "a-driver-that-is-verified": ([], {"kvtrial_backend": "cuda"}, ""),
    "no-gpu": ([], {**DRIVER, "kvtrial_backend": "cpu"}, ""),
    "removal": ([], {**DRIVER, **HUB, "kvtrial_state": "absent"}, ""),
}


@pytest.fixture(scope="module")
def checked(tmp_path_factory, tools):
    """What roles/preflight says of the bundles, by case."""
    folder = tmp_path_factory.mktemp("bundles")
    (folder / "group_vars").mkdir()
    (folder / "group_vars" / "all.yml").symlink_to(ROOT / "group_vars" / "all" / "pins.yml")
    hosts = {
        name: {
            "ansible_connection": "local",
            "kvtrial_bundle": bundle(folder / name, *files),
            "kvtrial_backend": "cpu",
            **variables,
        }
        for name, (files, variables, _) in BUNDLES.items()
    }
    (folder / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts}}))
    role = {"ansible.builtin.import_role": {"name": "kvtrial.vllm.preflight", "tasks_from": "bundle"}}
    (folder / "play.yml").write_text(yaml.safe_dump([{"hosts": "all", "gather_facts": False, "tasks": [role]}]))
    done = tools.run(
        "ansible-playbook", "-i", str(folder / "hosts.yml"), str(folder / "play.yml"),
        ANSIBLE_STDOUT_CALLBACK="ansible.builtin.default", ANSIBLE_CALLBACK_RESULT_FORMAT="json",
    )  # fmt: skip
    assert "PLAY RECAP" in done.stdout, done.stdout + done.stderr
    failed = re.findall(r"fatal: \[(\S+)\]: FAILED! => (\{.*\})", done.stdout)
    return dict.fromkeys(hosts, "") | {name: json.loads(result)["msg"] for name, result in failed}


@pytest.mark.parametrize("name", BUNDLES)
def test_a_bundle_that_would_send_a_host_to_the_network_is_refused(checked, name):
    told = BUNDLES[name][2]
    assert told in checked[name] if told else checked[name] == "", checked[name]


@pytest.fixture
def inventory(tmp_path):
    """inventory(variables): a folder with the pins and one host, some-host."""

    def write(**variables):
        pins = tmp_path / "inventory" / "group_vars" / "all"
        pins.mkdir(parents=True)
        (pins / "00-pins.yml").symlink_to(ROOT / "group_vars" / "all" / "pins.yml")
        (tmp_path / "inventory" / "hosts.yml").write_text(json.dumps({"all": {"hosts": {"some-host": variables}}}))
        return str(tmp_path / "inventory")

    return write


BESIDE = {
    "a-longer-name": ("{}-models/qwen", "{}-models/qwen"),
    "the-bundles-own": ("{}/model", ""),
    "the-bundles-own-written-otherwise": ("{}/../BUNDLE/model/", ""),
    "another-in-the-bundle": ("{}/mine", "{}/mine"),
    "none": ("", ""),
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_model_beside_the_bundle_is_taken_into_it(inventory, tools, tmp_path, name):
    upload, taken = (path.format(tmp_path / "BUNDLE") for path in BESIDE[name])
    _, play = yaml.safe_load((ROOT / "playbooks" / "bundle.yml").read_text())
    (collect,) = (task for task in play["tasks"] if task["name"].startswith("Collect it"))
    asked = {"ansible.builtin.debug": {"msg": "taken=<{{ kvtrial_bundle_request.model.directory }}>"}}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([{**play, "tasks": [{**asked, "vars": collect["vars"]}]}]))
    given = {"kvtrial_bundle": str(tmp_path / "BUNDLE"), "kvtrial_bundle_pythons": ["3.11"], "vllm_lock": "/none"}
    done = tools.run(
        "ansible-playbook", "-i", inventory(kvtrial_model_upload=upload), str(tmp_path / "play.yml"),
        "-e", json.dumps(given),
    )  # fmt: skip
    assert f"taken=<{taken}>" in done.stdout, done.stdout


def test_a_misspelt_name_is_refused_before_a_bundle_is_made(inventory, tools, tmp_path):
    variables = {"kvtrial_model_repositry": "Qwen/Qwen3-0.6B", "kvtrial_mine": 1}
    given = {"kvtrial_bundle": str(tmp_path / "BUNDLE"), "kvtrial_bundle_pythons": ["3.11"], "vllm_lock": "/none"}
    done = tools.run(
        "ansible-playbook", "-i", inventory(kvtrial_own_variables=["kvtrial_mine"], **variables),
        "playbooks/bundle.yml", "-e", json.dumps({**given, "kvtrial_bundle_architecturs": ["aarch64"]}),
    )  # fmt: skip
    assert done.returncode and done.stdout.splitlines()[-1] == (
        "some-host: kvtrial_bundle_architecturs is unknown (did you mean kvtrial_bundle_architectures?); "
        "kvtrial_model_repositry is unknown (did you mean kvtrial_model_repository?); put the name right in the "
        "inventory or on the command line (names of your own go into kvtrial_own_variables)."
    ), done.stdout
    assert not (tmp_path / "BUNDLE").exists()
