import os
import shutil
import subprocess
from pathlib import Path

import pytest
from from_npm import ROOT

APT = '#!/bin/sh\necho "$@" >>"$CALLS"\nexit "${APT_STATUS:-0}"\n'
NEEDED = ("bash", "dirname", "mkdir", "rm", "tee", "tail", "timeout", "echo", "cat", "sh")


def installed(tmp_path: Path, *, there: tuple[str, ...] = (), root: bool = True, **more: str) -> tuple[str, str, str]:
    """(calls of apt-get, what was said, the reason that was kept) on a machine that has the programs `there`."""
    folder, tree = tmp_path / "bin", tmp_path / "tree"
    folder.mkdir()
    (tree / "tests").mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "install_browser.sh", tree / "tests")
    for name in NEEDED:
        if (found := shutil.which(name)) is not None:
            (folder / name).symlink_to(found)
    programs = {"apt-get": APT, "id": f"#!/bin/sh\necho {0 if root else 1000}\n", **dict.fromkeys(there, "#!/bin/sh\n")}
    if more.pop("APT", "yes") == "none":
        del programs["apt-get"]
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    calls = tmp_path / "calls"
    calls.touch()
    environment = {"PATH": str(folder), "CALLS": str(calls), "HOME": os.environ.get("HOME", "/"), **more}
    done = subprocess.run(
        [str(folder / "bash"), str(tree / "tests" / "install_browser.sh")],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    kept = tree / ".kvtrial" / "no-browser"
    return calls.read_text(), done.stdout + done.stderr, kept.read_text() if kept.is_file() else ""


def test_a_machine_that_has_all_is_left_alone(tmp_path: Path) -> None:
    assert installed(tmp_path, there=("chromium", "npm", "node")) == ("", "", "")


@pytest.mark.parametrize(
    ("there", "wanted"), [((), "chromium npm"), (("npm", "node"), "chromium"), (("google-chrome", "node"), "npm")]
)
def test_what_is_missing_is_installed_and_no_more(tmp_path: Path, there: tuple[str, ...], wanted: str) -> None:
    calls, _, kept = installed(tmp_path, there=there)
    assert calls.splitlines() == ["-qq update", f"-qq install -y --no-install-recommends {wanted}"]
    assert kept == ""


@pytest.mark.parametrize(
    ("machine", "why"),
    [
        ({"root": False}, "this user is not root"),
        ({"APT": "none"}, "there is no apt-get here"),
        ({"KVTRIAL_APT": "no"}, "KVTRIAL_APT=no"),
        ({"APT_STATUS": "100"}, "apt-get could not install chromium npm"),
    ],
)
def test_where_it_can_not_be_had_the_reason_is_kept_and_nothing_fails(
    tmp_path: Path, machine: dict[str, str], why: str
) -> None:
    _, said, kept = installed(tmp_path, **machine)  # type: ignore[arg-type]
    assert kept.startswith(why)
    assert "apt-get install --no-install-recommends chromium npm" in kept
    assert kept.strip() in said
