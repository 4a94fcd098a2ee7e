"""make ends with the cause: a copy of the Makefile and its script, in a folder of its own."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORDS = ("bash", "cat", "dirname", "env", "make", "mkdir", "rm", "sed", "touch")


@pytest.fixture
def project(tmp_path):
    (tmp_path / "requirements").mkdir()
    for name in ("Makefile", "pyproject.toml", "requirements/install.sh"):
        shutil.copy2(ROOT / name, tmp_path / name)
    return tmp_path


def made(project: Path) -> None:
    """As after a make setup that went well."""
    (project / ".venv" / "bin").mkdir(parents=True)
    (project / ".venv" / "setup-done").touch()


def environment() -> dict[str, str]:
    """This one, as if no make had started these tests."""
    return {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}


def make(project: Path, *words: str, **changes: str) -> subprocess.CompletedProcess[str]:
    env = {**environment(), **changes}
    return subprocess.run(["make", *words], cwd=project, env=env, capture_output=True, text=True, check=False)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode != 0
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("target", ["setup", "experiment", "test"])
def test_a_python_that_is_not_there_is_the_last_line(target, project):
    done = make(project, target, "PYTHON=/nonexistent/python")
    assert "PYTHON=/nonexistent/python does not run here; give Python 3.11, 3.12 or 3.13" in last_line(done)
    assert "No such file" not in done.stderr


def test_a_python_of_another_version_is_the_last_line(project):
    old = project / "old-python"
    old.write_text("#!/bin/sh\necho 3.9\n")
    old.chmod(0o755)
    assert f"{old} is Python 3.9; give Python 3.11, 3.12 or 3.13" in last_line(make(project, "setup", f"PYTHON={old}"))


def test_no_python_at_all_is_the_last_line(project):
    (project / "bin").mkdir()
    for word in WORDS:
        (project / "bin" / word).symlink_to(str(shutil.which(word)))
    done = make(project, "setup", PATH=str(project / "bin"))
    assert "No Python 3.11, 3.12 or 3.13 with its venv module was found" in last_line(done)


def test_an_installation_that_breaks_says_where_to_look(project):
    broken = project / "broken-python"
    broken.write_text('#!/bin/sh\ncase "$*" in *version_info*) echo 3.11;; "-m venv"*) echo no space; exit 1;; esac\n')
    broken.chmod(0o755)
    done = make(project, "setup", f"PYTHON={broken}")
    assert "could not be installed into .venv (status 1); the lines above say why" in last_line(done)


def test_what_failed_before_counts_for_nothing_after_a_success(project):
    make(project, "setup", "PYTHON=/nonexistent/python")
    made(project)
    done = make(project, "setup")
    assert done.returncode == 0, done.stderr


def test_an_option_that_the_playbook_does_not_take_is_named(project, tools):
    made(project)
    (project / ".venv" / "bin" / "ansible-playbook").symlink_to(tools.path("ansible-playbook"))
    (project / "experiment.yml").write_text("[]\n")
    assert "ansible-playbook does not take ARGS=--banana;" in last_line(make(project, "experiment", "ARGS=--banana"))


def test_after_ctrl_c_the_playbook_has_the_last_word(project):
    made(project)
    playbook = project / ".venv" / "bin" / "ansible-playbook"
    # It takes a moment to end, as Ansible does. Where a child is gone before make has seen the signal, make loses count
    # ("wait: No child processes").
    playbook.write_text(
        "#!/bin/bash\ntrap 'sleep 0.5; echo the last word; exit 99' INT\necho started\n"
        "while :; do sleep 1 & wait $!; done\n"
    )
    playbook.chmod(0o755)
    with subprocess.Popen(["make", "experiment"], cwd=project, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, start_new_session=True, env=environment(),
                          # Tests that run in the background are started with Ctrl-C ignored, which is inherited.
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) as running:  # fmt: skip
        assert running.stdout.readline() == "started\n"
        os.killpg(running.pid, signal.SIGINT)
        rest = running.stdout.read().strip().splitlines()
    assert running.returncode != 0
    assert rest[-1] == "the last word", rest
