"""An engine that is there already: what it is has to be known, for hosts are compared by it."""

import sys

import pytest
import yaml

PLAY = [
    {
        "hosts": "localhost",
        "gather_facts": False,
        "tasks": [
            {"ansible.builtin.import_role": {"name": "kvtrial.vllm.vllm", "tasks_from": "existing"}},
            {"ansible.builtin.debug": {"msg": "TAKEN {{ vllm_lock_sha256 }}"}},
        ],
    }
]


@pytest.mark.parametrize(
    ("folder", "packages", "said"),
    [
        ("site-packages", ["vllm-0.32.0+cpu", "torch-2.9.0"], "TAKEN as found, 2 packages with sha256 "),
        # As in the images of vLLM, whose Python is the distribution's.
        ("dist-packages", ["vllm-0.32.0"], "TAKEN as found, 1 packages with sha256 "),
        # The engine is the system's: the environment only sees it.
        ("site-packages", ["pip-25.0"], "holds no package vllm (1 other in its lib/python3*/site-packages)"),
        ("elsewhere", ["vllm-0.32.0"], "holds no package vllm (0 others in its lib/python3*/site-packages)"),
    ],
    ids=["venv", "image", "system", "nothing"],
)
def test_an_engine_of_which_nothing_is_known_is_not_taken(folder, packages, said, tmp_path, tools):
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    (venv / "bin" / "vllm").write_text("#!/bin/sh\n")
    (venv / "bin" / "vllm").chmod(0o755)
    for package in packages:
        (venv / "lib" / "python3.11" / folder / f"{package}.dist-info").mkdir(parents=True)
    told = {"ansible_connection": "local", "vllm_existing_venv": str(venv)}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([{**PLAY[0], "vars": told}]))
    done = tools.run("ansible-playbook", str(tmp_path / "play.yml"))
    answer = " ".join(done.stdout.split())
    assert said in answer, answer
    assert (done.returncode == 0) is said.startswith("TAKEN")
