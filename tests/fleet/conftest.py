"""Real hosts for the tests of this folder. Where there can be none, every test is skipped with the reason."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from playing import Playbooks, wheels_for
from rig import SUITE, CannotRig, Fleet, a_fleet


@pytest.fixture(scope="module")
def boot() -> Iterator[Callable[..., Fleet]]:
    """boot(count, disk_size="", binds=(), suite=..): a fleet that is down again after the module's tests."""
    with contextlib.ExitStack() as stack:

        def make(count: int, disk_size: str = "", binds: Sequence[str] = (), suite: str = SUITE) -> Fleet:
            try:
                return stack.enter_context(a_fleet(count, disk_size, binds, suite))
            except CannotRig as error:
                pytest.skip(str(error))

        yield make


@pytest.fixture(scope="module")
def playbooks(boot: Callable[..., Fleet]) -> Callable[..., Playbooks]:
    """playbooks(count, variables, disk_size=..): a fleet of its own, and the project's playbooks run on it."""

    def make(
        count: int,
        variables: dict[str, object] | None = None,
        disk_size: str = "",
        binds: Sequence[str] = (),
        suite: str = SUITE,
    ) -> Playbooks:
        return Playbooks(boot(count, disk_size, binds, suite), variables or {})

    return make


@pytest.fixture(scope="session")
def host_wheels() -> Path:
    """The wheels of the hosts' host program, fetched once."""
    return wheels_for("3.11")
