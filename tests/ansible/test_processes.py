"""What modules read from /proc, on made-up machines."""

import pytest
from ansible_collections.kvtrial.vllm.plugins.module_utils import processes
from kvtrial.host import processes as host_processes


def test_a_process_is_alive_only_with_its_own_start_time(proc):
    proc(10, ticks=500)
    assert processes.is_alive(10, 500, proc.root)
    assert not processes.is_alive(10, 501, proc.root)
    assert not processes.is_alive(11, 500, proc.root)


@pytest.mark.parametrize("state", ["Z", "X"])
def test_a_zombie_counts_as_dead(proc, state):
    proc(10, state=state, ticks=500)
    assert not processes.is_alive(10, 500, proc.root)


@pytest.mark.parametrize(
    "command",
    [
        "/venv/bin/python3 /venv/bin/vllm serve /models/a --port 1",
        "vllm serve m",
        "python -m vllm.entrypoints.openai.api_server --model m",
        "VLLM::EngineCore",
    ],
)
def test_an_engine_is_recognised(proc, command):
    proc(10, command)
    assert [engine["pid"] for engine in processes.engines(proc.root)] == [10]


@pytest.mark.parametrize("command", ["vim vllm-serve.md", "tail -f vllm.log", "grep vllm serve.log", "sleep 5"])
def test_other_processes_are_no_engines(proc, command):
    proc(10, command)
    assert processes.engines(proc.root) == []


def test_an_engine_is_own_if_an_ancestor_is_own(proc):
    proc(10, "kvtrial-host run", ticks=7)
    proc(11, "keeper", parent=10)
    proc(12, "vllm serve m", parent=11)
    proc(20, "vllm serve other")
    engines = processes.engines(proc.root, own=[(10, 7)])
    assert [(engine["pid"], engine["own"]) for engine in engines] == [(12, True), (20, False)]
    reused = processes.engines(proc.root, own=[(10, 8)])
    assert [engine["own"] for engine in reused] == [False, False]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("vllm serve m --api-key s3cret --port 1", "vllm serve m --api-key *** --port 1"),
        ("vllm serve m --api-key=s3cret", "vllm serve m --api-key=***"),
        ("HF_TOKEN=s3cret vllm serve m", "HF_TOKEN=*** vllm serve m"),
        ("vllm serve m --max-num-batched-tokens 4096", "vllm serve m --max-num-batched-tokens 4096"),
        ("vllm serve m --proxy http://u:s3cret@h:1/x", "vllm serve m --proxy http://***@h:1/x"),
        ("vllm serve m --tokenizer mine", "vllm serve m --tokenizer mine"),
    ],
)
def test_keys_are_redacted_and_token_counts_are_not(command, expected):
    assert processes.redact(command) == expected


COMMANDS = [
    "/venv/bin/python3 /venv/bin/vllm serve /models/a --port 1",
    "vllm serve",
    "vllm serve m --tokenizer mine --max-num-batched-tokens 4096 --api-key s3cret",
    "HF_TOKEN=s3cret vllm serve m --hf-token=abc",
    'vllm serve m --kv-transfer-config {"api_key": "s3cret", "cpu_bytes_to_use": 8}',
    "HTTPS_PROXY=https://s3cret@h vllm serve m --x http://u:s3@cret@h:1/a@b",
    "python -m vllm.entrypoints.openai.api_server --model m --ssl-keyfile k",
    "VLLM::EngineCore",
    "VLLM::EngineCore_DP0",
    "VLLM::Worker_TP1",
    "VLLM::APIServer_0",
    "VLLM::DPCoordinator",
    "vim vllm-serve.md",
    "tail -f vllm.log",
    "/opt/vllm serve-docs",
    "sleep 5",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_modules_and_host_program_see_the_same_engines_and_hide_the_same(command):
    seen = host_processes.command_text(command.replace(" ", "\0").encode() + b"\0")
    assert seen == command
    assert host_processes.is_engine(seen) == processes.is_engine(command)
    assert host_processes.redact(seen) == processes.redact(command)


@pytest.mark.parametrize("command", ["VLLM::EngineCore", "VLLM::Worker_TP1", "VLLM::APIServer_0", "vllm serve"])
def test_each_process_of_an_engine_is_one_to_the_host_program(command):
    assert host_processes.is_engine(command)


def test_a_redacted_command_is_all_that_leaves_the_host(proc):
    proc(10, "vllm serve m --api-key s3cret " + "x" * 1000)
    (engine,) = processes.engines(proc.root)
    assert "s3cret" not in engine["command"]
    assert len(engine["command"]) <= processes.COMMAND_CHARACTERS


def test_listening_ports_are_those_in_state_listen(tmp_path):
    (tmp_path / "net").mkdir()
    header = "  sl  local_address rem_address   st\n"
    (tmp_path / "net" / "tcp").write_text(
        f"{header}   0: 0100007F:4650 00000000:0000 0A 0\n   1: 0100007F:1F90 0100007F:AAAA 01 0\n"
    )
    (tmp_path / "net" / "tcp6").write_text(f"{header}   0: {'0' * 31}1:0050 {'0' * 32}:0000 0A 0\n")
    assert processes.listening_ports(str(tmp_path)) == {18000, 80}


def test_a_mapped_file_is_found_also_when_it_was_deleted(proc):
    proc(10, maps="7f0-7f1 rw-s 0000 00:01 5    /dev/shm/vllm_offload_a.mmap\n")
    proc(11, maps="7f0-7f1 rw-s 0000 00:01 6    /dev/shm/vllm_offload_b.mmap (deleted)\n7f2-7f3 rw-p 0 0:0 0\n")
    found = processes.mapped_files("/dev/shm", proc.root)
    assert found == {"/dev/shm/vllm_offload_a.mmap", "/dev/shm/vllm_offload_b.mmap"}
