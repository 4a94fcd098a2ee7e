"""What schedules a campaign elsewhere: the execution environment, and the files for AWX."""

import fcntl
import json
import re
import shutil
import subprocess
import sys
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
@pytest.mark.parametrize("is_a_host", [False, True])
def test_systemd_takes_the_service_and_the_timer(tmp_path, is_a_host):
    """Rendered with the role's defaults; what starts there is a stand-in."""
    given = yaml.safe_load((ROOT / "roles" / "nightly" / "defaults" / "main.yml").read_text())
    more = {"ansible_managed": "test", "__nightly_is_a_host": is_a_host}
    folder = {"nightly_project": str(tmp_path), "nightly_venv": str(tmp_path), "nightly_directory": str(tmp_path)}
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ansible-runner").write_text("#!/bin/sh\n")
    rendering = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True, autoescape=False)
    rendering.filters["comment"] = lambda text: f"# {text}"
    rendering.filters["bool"] = bool
    paths = []
    for kind in ("service", "timer"):
        template = (ROOT / "roles" / "nightly" / "templates" / f"kvtrial-nightly.{kind}.j2").read_text()
        paths.append(tmp_path / f"kvtrial-nightly.{kind}")
        paths[-1].write_text(rendering.from_string(template).render({**given, **folder, **more}))
    done = subprocess.run(["systemd-analyze", "verify", *paths], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    text = paths[0].read_text()
    assert "flock --nonblock --close --conflict-exit-code 75" in text and "SuccessExitStatus=75" in text
    # A host of its own fleet writes units, and may need sudo.
    assert ("ProtectSystem=full" in text and "NoNewPrivileges=yes" in text) is not is_a_host
    assert "Persistent=true" in paths[1].read_text()


@pytest.mark.skipif(shutil.which("flock") is None, reason="flock is not here")
def test_a_night_that_meets_the_lock_says_so_and_one_without_knows_its_date(tmp_path):
    """The very line of the service, with a stand-in for ansible-runner."""
    line = (ROOT / "roles" / "nightly" / "templates" / "kvtrial-nightly.service.j2").read_text()
    line = next(text for text in line.splitlines() if text.startswith("ExecStart=")).removeprefix("ExecStart=")
    line = jinja2.Environment(autoescape=False).from_string(line).render(
        nightly_directory=tmp_path, nightly_venv=tmp_path, nightly_keep=3
    ).replace("%%", "%").replace("$$", "$")  # fmt: skip
    (tmp_path / "bin").mkdir()
    runner = tmp_path / "bin" / "ansible-runner"
    runner.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/argv\nexit 3\n')
    runner.chmod(0o755)
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, ""), done.stderr
    given = (tmp_path / "argv").read_text().splitlines()
    assert re.fullmatch(r"--cmdline=-e kvtrial_night=\d{4}-\d\d-\d\d", given[-1])
    with (tmp_path / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == 75
    assert done.stdout == (
        f"The night is skipped: another one is at work here and holds {tmp_path}/lock (lslocks names its process).\n"
    )


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
        # No jitter is a jitter: what is refused is the folder.
        ({"nightly_jitter_seconds": 0, "nightly_directory": "/"}, "below a folder of / and without '..'"),
        ({"nightly_keep": 0}, "nightly_keep=0 is no whole number"),
        ({"nightly_on_failure": "a b; rm"}, "is no unit's name"),
        ({"nightly_keep_campaigns": 0}, "nightly_keep_campaigns=0 is no whole number"),
        ({"nightly_directory": "/var/lib/a b"}, "without blanks or quotes"),
        ({"nightly_directory": "/"}, "below a folder of / and without '..'"),
        ({"nightly_directory": "/home"}, "below a folder of / and without '..'"),
        ({"nightly_directory": "/var/lib/../.."}, "below a folder of / and without '..'"),
        ({"nightly_directory": "/usr/bin"}, "was not made by this role and holds"),
        ({"nightly_directory": "/usr/bin", "nightly_state": "absent"}, "was not made by this role and holds"),
        ({"nightly_directory": "/", "nightly_state": "absent"}, "below a folder of / and without '..'"),
        ({"nightly_catch_up": "perhaps"}, "nightly_catch_up"),
        ({"nightly_variables": "protocol=aa_noise"}, "nightly_variables is no mapping of names to values"),
        ({"nightly_environment": '{"A": 1}'}, "nightly_environment is no mapping"),
        ({"nightly_account": "no such"}, "nightly_account=no such is no account of this machine"),
        ({"nightly_account": "kvtrial-nobody-here"}, "kvtrial-nobody-here is no account of this machine"),
        ({"nightly_store": "results'"}, "without blanks or quotes"),
    ],
)
def test_what_a_unit_could_not_bear_is_refused_in_a_sentence(tools, tmp_path, given, said):
    play = [{"hosts": "localhost", "connection": "local", "gather_facts": False,
             "roles": [{"role": "kvtrial.vllm.nightly"}]}]  # fmt: skip
    (tmp_path / "play.yml").write_text(yaml.safe_dump(play))
    own = {
        "nightly_inventory": "/srv/inventory",
        "nightly_project": str(ROOT),
        "nightly_directory": f"{tmp_path}/nights",
    }
    variables = own | {"ansible_python_interpreter": sys.executable} | given
    done = tools.run("ansible-playbook", str(tmp_path / "play.yml"), "-i", "localhost,", "--tags", "nightly_preflight",
                     "-e", json.dumps(variables))  # fmt: skip
    assert done.returncode != 0 and said in " ".join(done.stdout.split()), done.stdout + done.stderr


@pytest.fixture
def nights(tools, tmp_path):
    """Parts of the role on this machine that need no systemd; its folder, timer and stamp lie in the test's folder."""
    (tmp_path / "units").mkdir()
    (tmp_path / "at").mkdir()
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"g01": {"ansible_host": "g01.example"}}}}))
    timer = f"{tmp_path}/units/kvtrial-nightly.timer"
    settings = {
        "__nightly_name": "kvtrial-nightly",
        "__nightly_units": f"{tmp_path}/units",
        "__nightly_stamp": f"{tmp_path}/stamp",
        "nightly_inventory": f"{tmp_path}/hosts.yml",
        "nightly_project": str(ROOT),
        "nightly_venv": str(Path(tools.path("x")).parents[1]),
        "nightly_directory": f"{tmp_path}/at/nights",
    }
    defaults = yaml.safe_load((ROOT / "roles" / "nightly" / "defaults" / "main.yml").read_text())
    template = {"src": str(ROOT / "roles/nightly/templates/kvtrial-nightly.timer.j2"), "dest": timer, "mode": "0644"}
    given = {name: defaults[name] for name in ("nightly_on_calendar", "nightly_jitter_seconds")}
    render = {"ansible.builtin.template": template, "vars": given}

    def play_it(state, *variables):
        parts = ("folder", "preflight", "install") if state == "present" else ("folder", "remove")
        tasks = [
            {"ansible.builtin.include_role": {"name": "kvtrial.vllm.nightly", "tasks_from": part}, "vars": settings}
            for part in parts
        ]
        play = {"hosts": "localhost", "connection": "local", "gather_facts": False}
        play["tasks"] = [*tasks, render] if state == "present" else tasks
        (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
        words = ["kvtrial_root=/", f"ansible_python_interpreter={sys.executable}", *variables]
        return tools.run("ansible-playbook", str(tmp_path / "play.yml"), "-i", "localhost,", "-e", " ".join(words))

    return play_it


def test_values_as_they_are_given_on_a_command_line_are_understood(nights, tmp_path):
    done = nights("present", "nightly_catch_up=false")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Persistent=false" in (tmp_path / "units" / "kvtrial-nightly.timer").read_text()
    folder = tmp_path / "at" / "nights"
    assert (folder / ".kvtrial-nightly").is_file()
    (folder / "artifacts" / "20260101").mkdir()
    (tmp_path / "stamp").touch()
    (tmp_path / "units" / "kvtrial-nightly.timer").unlink()
    done = nights("absent", "nightly_purge=false")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "stamp").exists(), "nights set up again later would begin with one that was missed"
    assert sorted(path.name for path in folder.iterdir()) == [".kvtrial-nightly", "artifacts"]
    (folder / "mine.txt").write_text("x")
    done = nights("absent", "nightly_purge=true")
    assert f"not made by this role and left in {folder}: mine.txt" in done.stdout, done.stdout
    assert sorted(path.name for path in folder.iterdir()) == [".kvtrial-nightly", "mine.txt"]
    (folder / "mine.txt").unlink()
    assert nights("absent", "nightly_purge=yes").returncode == 0
    assert not folder.exists()


@pytest.mark.parametrize(("connection", "is_kept_off"), [("ssh", True), ("ansible.builtin.local", False)])
def test_the_service_alone_can_be_brought_and_knows_whether_a_host_is_the_controller(
    tools, tmp_path, connection, is_kept_off
):
    (tmp_path / "hosts.yml").write_text(
        yaml.safe_dump({"all": {"hosts": {"g01": {"ansible_connection": connection, "ansible_host": "g01.example"}}}})
    )
    play = [{"hosts": "localhost", "connection": "local", "gather_facts": False,
             "roles": [{"role": "kvtrial.vllm.nightly"}]}]  # fmt: skip
    (tmp_path / "play.yml").write_text(yaml.safe_dump(play))
    for folder in ("units", "nights", "nights/env", "nights/project", "nights/inventory"):
        (tmp_path / folder).mkdir()
    (tmp_path / "nights" / ".kvtrial-nightly").touch()
    given = {
        "nightly_inventory": f"{tmp_path}/hosts.yml",
        "nightly_project": str(ROOT),
        "nightly_venv": str(Path(tools.path("x")).parents[1]),
        "nightly_directory": f"{tmp_path}/nights",
        "__nightly_units": f"{tmp_path}/units",
        "__nightly_stamp": f"{tmp_path}/stamp",
        "ansible_python_interpreter": sys.executable,
    }
    done = tools.run("ansible-playbook", str(tmp_path / "play.yml"), "-i", "localhost,", "--tags", "nightly_configure",
                     "-e", json.dumps(given))  # fmt: skip
    # Where no systemd is, the timer can't be set, which comes last.
    service = tmp_path / "units" / "kvtrial-nightly.service"
    assert service.is_file(), done.stdout + done.stderr
    assert ("ProtectSystem=full" in service.read_text()) is is_kept_off
