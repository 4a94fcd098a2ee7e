"""Where the client runs: lists of CPUs, what is free of the engine, and that the pin holds and is taken off."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtrial.host.affinity import allowed_cpus, choose, gpu_node, numa_node_of, numa_nodes, pinned_client, with_siblings
from kvtrial.host.engine import RunFault, engine_cpus
from kvtrial.record.cpulist import as_list, cpu_list

OURS = sorted(os.sched_getaffinity(0))


@given(st.sets(st.integers(0, 300)))
def test_a_list_of_cpus_is_read_back(cpus: set[int]) -> None:
    assert cpu_list(as_list(cpus)) == cpus


def test_lists_are_written_as_linux_writes_them() -> None:
    assert cpu_list("0-3,8, 10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert as_list({0, 1, 2, 8, 10, 11}) == "0-2,8,10-11"
    assert cpu_list("") == set()


@pytest.mark.parametrize("text", ["a", "3-", "-3", "3-1", "1,,2", "0x3", "1-2-3", "99999999"])
def test_what_is_no_list_of_cpus_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"CPU"):
        cpu_list(text)


@pytest.fixture(name="machine")
def _machine(tmp_path: Path) -> Path:
    """A machine of two nodes with four CPUs each, of which 0/4, 1/5, … share a core; its GPU is on node 1."""
    nodes = tmp_path / "devices/system/node"
    for node, cpus in ((0, "0-1,4-5"), (1, "2-3,6-7")):
        (nodes / f"node{node}").mkdir(parents=True)
        (nodes / f"node{node}/cpulist").write_text(cpus + "\n")
    for cpu in range(8):
        topology = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    gpu = tmp_path / "bus/pci/drivers/nvidia/0000:41:00.0"
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text("1\n")
    return tmp_path


def test_the_machine_is_read(machine: Path) -> None:
    assert numa_nodes(machine) == {0: {0, 1, 4, 5}, 1: {2, 3, 6, 7}}
    assert gpu_node(machine) == 1
    assert (numa_node_of([2, 7], machine), numa_node_of([1, 2], machine)) == (1, None)
    assert with_siblings({0, 3}, machine) == {0, 4, 3, 7}


def test_a_machine_that_says_nothing_is_unknown(tmp_path: Path) -> None:
    assert (numa_nodes(tmp_path), gpu_node(tmp_path), numa_node_of([0], tmp_path)) == ({}, None, None)
    assert with_siblings({0}, tmp_path) == {0}


@pytest.mark.parametrize(
    ("ours", "engines", "node", "chosen"),
    [
        ({0, 1, 2, 3}, {0, 1}, None, {2, 3}),
        ({0, 1, 2, 3}, {0, 1}, {3, 7}, {3}),
        ({0, 1, 2, 3}, {0, 3}, {3, 7}, {1, 2}),
        ({0, 1}, {0, 1, 2}, {0}, set()),
        ({0, 1}, set(), None, {0, 1}),
    ],
    ids=["the engine's are left out", "near the GPU", "none is near", "none is free", "no engine"],
)
def test_the_client_takes_what_the_engine_cannot_use(
    ours: set[int], engines: set[int], node: set[int] | None, chosen: set[int]
) -> None:
    assert choose(ours, engines, node) == chosen


def test_a_process_may_run_where_its_threads_may() -> None:
    one = OURS[-1]
    program = f"import os; os.sched_setaffinity(0, {{{one}}}); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert allowed_cpus([process.pid]) == {one}
        assert allowed_cpus([process.pid, os.getpid()]) == set(OURS)
        process.communicate(b"\n")
    assert allowed_cpus([process.pid]) == set()


def test_the_pin_holds_and_is_taken_off() -> None:
    with pinned_client(str(OURS[0]), []) as pinning:
        assert os.sched_getaffinity(0) == {OURS[0]}
        assert (pinning.pinning, pinning.cpus) == ("pinned", [OURS[0]])
    assert sorted(os.sched_getaffinity(0)) == OURS


def test_without_a_free_core_nothing_is_pinned_and_the_card_says_so() -> None:
    with pinned_client("auto", [os.getpid()]) as pinning:
        assert (pinning.pinning, pinning.cpus) == ("no core is free of the engine", OURS)
    with pinned_client("none", [os.getpid()]) as pinning:
        assert (pinning.pinning, pinning.cpus) == ("not asked", OURS)


def test_the_engine_gets_the_cpus_that_are_not_the_clients() -> None:
    assert engine_cpus("auto") == engine_cpus("none") == set()
    if len(OURS) > 1:
        assert engine_cpus(str(OURS[0])) == set(OURS[1:])
    for unfit in (as_list(set(OURS)), "60000"):
        with pytest.raises(RunFault, match=f"kvtrial_client_cpus={unfit} leaves no CPU"):
            engine_cpus(unfit)
