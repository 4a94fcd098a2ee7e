"""Every package that is installed is pinned with its digests, and no lock names where it came from."""

import re
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).parents[2] / "requirements"
LOCKS = sorted(REQUIREMENTS.glob("*.txt"))
EXPECTED = {
    "bench-aiperf-py311.txt",
    "bench-guidellm-py311.txt",
    "controller-py311.txt",
    "controller-py312.txt",
    "engine-vllm-cpu-0.32.0-py311.txt",
    "engine-vllm-cuda-0.26.0.txt",
    "engine-vllm-cuda-0.30.0.txt",
    "engine-vllm-cuda-0.32.0.txt",
    "engine-vllm-cuda-0.33.0.txt",
    "engine-vllm-cuda-0.26.0-beside-torch-py312.txt",
    "host.txt",
    "test-py311.txt",
    "test-py312.txt",
}
PIN = re.compile(r"^(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[^\s;]+)(?P<marker> ; .+)?$")
HASH = re.compile(r"^--hash=sha256:[0-9a-f]{64}$")
LEAK = re.compile(r"https?://|file:|find-links|index-url|(^|\s)/\w+/", re.MULTILINE)


class NotLocked(Exception):
    """A lock's entry is not what a lock's entry must be."""


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins_of(text: str) -> dict[str, str]:
    """Version by normalized name. Raises NotLocked at an entry without a pin or without digests, or a second pin."""
    joined = re.sub(
        r"\s*\\\n\s*", " ", "\n".join(line for line in text.splitlines() if not line.strip().startswith("#"))
    )
    pins: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    for entry in filter(None, joined.splitlines()):
        requirement, *digests = re.split(r" (?=--hash)", entry.strip())
        pin = PIN.match(requirement)
        if not pin:
            raise NotLocked(f"{requirement} is not name==version")
        if not digests or not all(HASH.match(digest) for digest in digests):
            raise NotLocked(f"{requirement} has no digest, or a bad one")
        # Two versions under two conditions are one pin each: an environment meets only one of them.
        if (key := (normalized(pin["name"]), pin["marker"] or "")) in seen:
            raise NotLocked(f"{pin['name']} is pinned twice")
        seen.add(key)
        pins[normalized(pin["name"])] = pin["version"]
    return pins


def names_in(path: Path) -> dict[str, str | None]:
    """Normalized names of an .in file (and those it includes) with the pinned version where it pins one."""
    names: dict[str, str | None] = {}
    for raw in path.read_text(encoding="utf-8").splitlines():
        line = raw.split("#")[0].strip()
        if line.startswith("-r "):
            names |= names_in(path.parent / line[3:].strip())
        elif line:
            name, _, version = line.partition("==")
            names[normalized(re.split(r"[<>~=!]", name)[0])] = version or None
    return names


def input_of(lock: Path) -> Path:
    return REQUIREMENTS / ("test.in" if lock.name.startswith("test-") else f"{lock.stem}.in")


def test_the_locks_are_those_that_the_project_installs() -> None:
    assert {lock.name for lock in LOCKS} == EXPECTED


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_every_entry_is_pinned_with_digests(lock: Path) -> None:
    assert pins_of(lock.read_text(encoding="utf-8"))


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_every_direct_dependency_is_in_its_lock_at_the_asked_version(lock: Path) -> None:
    pins = pins_of(lock.read_text(encoding="utf-8"))
    for name, version in names_in(input_of(lock)).items():
        assert name in pins
        assert version in (None, pins[name])


@pytest.mark.parametrize("path", [*LOCKS, *sorted(REQUIREMENTS.glob("*.in"))], ids=lambda path: path.name)
def test_no_file_names_an_index_or_a_machine(path: Path) -> None:
    assert not LEAK.search(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("python", ["py311", "py312"])
def test_locks_that_meet_in_one_environment_agree(python: str) -> None:
    host, controller, test = (
        pins_of((REQUIREMENTS / name).read_text(encoding="utf-8"))
        for name in ("host.txt", f"controller-{python}.txt", f"test-{python}.txt")
    )
    assert not {name for name in host.keys() & controller.keys() if host[name] != controller[name]}
    assert not {name for name in controller.keys() & test.keys() if controller[name] != test[name]}


def test_every_direct_dependency_says_why() -> None:
    for path in REQUIREMENTS.glob("*.in"):
        if path.name.startswith("engine-"):
            continue
        for line in path.read_text(encoding="utf-8").splitlines():
            assert line.startswith(("#", "-r")) or "  # " in line, f"{path.name}: {line}"


def test_the_engine_lock_leaves_out_what_the_cpu_does_not_need() -> None:
    pins = pins_of((REQUIREMENTS / "engine-vllm-cpu-0.32.0-py311.txt").read_text(encoding="utf-8"))
    assert not {"triton", "torchvision", "torchaudio", "torchcodec"} & pins.keys()
    assert (pins["torch"], pins["vllm-cpu"]) == ("2.13.0+cpu", "0.32.0")


@pytest.mark.parametrize(
    "planted",
    ["httpx==0.28.1\n", "httpx>=0.28 --hash=sha256:" + "0" * 64, "httpx==0.28.1 \\\n    --hash=sha256:12\n"],
)
def test_an_unlocked_entry_is_noticed(planted: str) -> None:
    with pytest.raises(NotLocked):
        pins_of(planted)


@pytest.mark.parametrize("planted", ["--find-links /srv/wheels", "--index-url https://index.example/simple"])
def test_a_leak_is_noticed(planted: str) -> None:
    assert LEAK.search(planted)
