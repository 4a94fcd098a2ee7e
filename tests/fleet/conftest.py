"""Real hosts for the tests of this folder. Where there can be none, every test is skipped with the reason."""

import contextlib
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from playing import ROOT, Playbooks
from rig import CannotRig, Fleet, a_fleet


@pytest.fixture(scope="module")
def boot() -> Iterator[Callable[..., Fleet]]:
    """boot(count, disk_size="", binds=()): a fleet that is down again after the module's tests, whatever happens."""
    with contextlib.ExitStack() as stack:

        def make(count: int, disk_size: str = "", binds: Sequence[str] = ()) -> Fleet:
            try:
                return stack.enter_context(a_fleet(count, disk_size, binds))
            except CannotRig as error:
                pytest.skip(str(error))

        yield make


@pytest.fixture(scope="module")
def playbooks(boot: Callable[..., Fleet]) -> Callable[..., Playbooks]:
    """playbooks(count, variables, disk_size=..): a fleet of its own, and the project's playbooks run on it."""

    def make(
        count: int, variables: dict[str, object] | None = None, disk_size: str = "", binds: Sequence[str] = ()
    ) -> Playbooks:
        return Playbooks(boot(count, disk_size, binds), variables or {})

    return make


@pytest.fixture(scope="session")
def host_wheels() -> Path:
    """The wheels of requirements/host.txt, fetched once from where this machine's pip is configured to look."""
    folder = ROOT / ".kvtrial" / "host-wheels"
    done = subprocess.run(
        ["python3.11", "-m", "pip", "download", "--quiet", "--require-hashes", "--no-deps", "--only-binary=:all:",
         "-r", ROOT / "requirements" / "host.txt", "-d", folder],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"pip can't fetch requirements/host.txt: {done.stderr.strip().splitlines()[-1]}")
    return folder
