"""What schedules a campaign elsewhere: the execution environment, and the files for AWX."""

import json
import shutil
import subprocess
from pathlib import Path

import jinja2
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
AWX = ROOT / "docs" / "awx"
SPECS = json.loads((ROOT / "tests" / "fixtures" / "awx" / "argument_specs.json").read_text())
"""Options of modules of awx.awx, as the collection documents them."""
TYPES = {"str": str, "int": int, "bool": bool, "dict": dict, "list": list, "path": str}


def test_ansible_builder_takes_the_execution_environment(tools, tmp_path):
    definition = ROOT / "execution-environment.yml"
    done = tools.run("ansible-builder", "create", "--file", str(definition), "--context", str(tmp_path / "context"))
    assert done.returncode == 0, done.stdout + done.stderr
    [recipe] = [p for p in (tmp_path / "context").iterdir() if p.is_file()]
    assert "--require-hashes" in recipe.read_text()
    build = tmp_path / "context" / "_build" / "kvtrial"
    assert (build / "analysis" / "kvtrial" / "__init__.py").is_file()
    # No version but the lock's: the builder installs these two before the lock.
    lock = (build / "controller-py312.txt").read_text()
    given = yaml.safe_load(definition.read_text())["dependencies"]
    for name in ("ansible_core", "ansible_runner"):
        assert f"\n{given[name]['package_pip']} \\" in f"\n{lock}", given[name]


def tasks():
    [play] = yaml.safe_load((AWX / "setup.yml").read_text())
    return play["tasks"]


def complaints(task) -> list[str]:
    """What awx.awx would complain of in a task."""
    [module] = [key for key in task if "." in key]
    options = SPECS["modules"].get(module.removeprefix("awx.awx."))
    if options is None:
        return [f"{module} is unknown"]
    given = task[module]
    names = {alias: name for name, option in options.items() for alias in (name, *option.get("aliases", []))}
    found = [f"{module}: {key} is unknown" for key in given if key not in names]
    missing = {name for name, option in options.items() if option.get("required")} - {names.get(k) for k in given}
    found += [f"{module} lacks {name}" for name in missing]
    for key, value in given.items():
        option = options.get(names.get(key, ""), {})
        if "choices" in option and value not in option["choices"]:
            found.append(f"{module}: {key}={value}, allowed are {option['choices']}")
        templated = isinstance(value, str) and "{{" in value
        if not templated and not isinstance(value, TYPES.get(option.get("type", "str"), object)):
            found.append(f"{module}: {key} is no {option.get('type')}")
    return found


@pytest.mark.parametrize("task", tasks(), ids=lambda task: task["name"])
def test_a_task_for_awx_is_as_its_module_wants_it(task):
    assert complaints(task) == []


def test_a_wrong_task_for_awx_would_be_found():
    wrong = {"name": "x", "awx.awx.job_template": {"nmae": "x", "job_type": "walk", "forks": "many"}}
    assert len(complaints(wrong)) == 4


def test_the_survey_asks_for_what_the_project_takes():
    survey = json.loads((AWX / "survey.json").read_text())
    pins = yaml.safe_load((ROOT / "group_vars" / "all" / "pins.yml").read_text())
    protocols = {path.stem for path in (ROOT / "playbooks" / "protocols").glob("*.yml")}
    assert set(survey) == {"name", "description", "spec"}
    for question in survey["spec"]:
        assert {"question_name", "question_description", "variable", "type", "required", "default"} <= set(question)
        assert question["variable"] in {*pins, "protocol"}
        assert question["type"] in ("text", "textarea", "password", "integer", "float", "multiplechoice", "multiselect")
        if question["type"] == "multiplechoice":
            assert question["default"] in question["choices"]
    [asked] = [question for question in survey["spec"] if question["variable"] == "protocol"]
    assert set(asked["choices"]) <= protocols


def test_the_job_templates_play_what_is_there_with_variables_that_are_known():
    pins = yaml.safe_load((ROOT / "group_vars" / "all" / "pins.yml").read_text())
    night = (ROOT / "playbooks" / "night.yml").read_text()
    for task in tasks():
        template = task.get("awx.awx.job_template")
        if template:
            assert (ROOT / template["playbook"]).is_file()
            assert all(name in pins or name in night for name in template["extra_vars"])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_systemd_takes_the_service_and_the_timer(tmp_path):
    """Rendered with the role's defaults; what starts there is a stand-in."""
    given = yaml.safe_load((ROOT / "roles" / "nightly" / "defaults" / "main.yml").read_text())
    folder = {"nightly_project": str(tmp_path), "nightly_venv": str(tmp_path), "nightly_directory": str(tmp_path)}
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ansible-runner").write_text("#!/bin/sh\n")
    rendering = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True, autoescape=False)
    rendering.filters["comment"] = lambda text: f"# {text}"
    paths = []
    for kind in ("service", "timer"):
        template = (ROOT / "roles" / "nightly" / "templates" / f"kvtrial-nightly.{kind}.j2").read_text()
        paths.append(tmp_path / f"kvtrial-nightly.{kind}")
        paths[-1].write_text(rendering.from_string(template).render({**given, **folder, "ansible_managed": "test"}))
    done = subprocess.run(["systemd-analyze", "verify", *paths], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    text = paths[0].read_text()
    assert "flock --nonblock --close --conflict-exit-code 75" in text and "SuccessExitStatus=75" in text
    assert "Persistent=true" in paths[1].read_text()


def test_busy_hosts_are_left_out_also_where_kvtrial_hosts_asks_for_them(tools, tmp_path):
    inventory = tmp_path / "hosts.yml"
    hosts = {"h1": None, "h2": None, "h3": None}
    inventory.write_text(
        yaml.safe_dump({"all": {"hosts": hosts, "children": {"kvtrial_busy": {"hosts": {"h2": None}}}}})
    )
    for asked in ("h1,h2", "h1:h2"):
        done = tools.run("ansible-playbook", "playbooks/night.yml", "-i", str(inventory), "--list-hosts",
                         "-e", f"kvtrial_hosts={asked}")  # fmt: skip
        assert done.returncode == 0, done.stderr
        # Each play of experiment.yml.
        campaign = done.stdout[done.stdout.index("Check the request") : done.stdout.index("Put the campaign")]
        assert "h1" in campaign and "h2\n" not in campaign.replace("!kvtrial_busy", ""), campaign


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"nightly_budget_seconds": 0}, "nightly_budget_seconds=0 is no whole number above 0"),
        ({"nightly_jitter_seconds": -5}, "nightly_jitter_seconds=-5 is no whole number"),
        ({"nightly_keep": 0}, "nightly_keep=0 is no whole number"),
        ({"nightly_on_failure": "a b; rm"}, "is no unit's name"),
        ({"nightly_directory": "/var/lib/a b"}, "without blanks or quotes"),
        ({"nightly_store": "results'"}, "without blanks or quotes"),
    ],
)
def test_what_a_unit_could_not_bear_is_refused_in_a_sentence(tools, tmp_path, given, said):
    play = [{"hosts": "localhost", "connection": "local", "gather_facts": False,
             "roles": [{"role": "kvtrial.vllm.nightly"}]}]  # fmt: skip
    (tmp_path / "play.yml").write_text(yaml.safe_dump(play))
    variables = {"nightly_inventory": "/srv/inventory", "nightly_project": str(ROOT)} | given
    done = tools.run("ansible-playbook", str(tmp_path / "play.yml"), "-i", "localhost,", "--tags", "nightly_preflight",
                     "-e", json.dumps(variables))  # fmt: skip
    assert done.returncode != 0 and said in " ".join(done.stdout.split()), done.stdout + done.stderr
