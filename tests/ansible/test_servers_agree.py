"""What a host's module and the controller's package both do, they do alike: secrets, and addresses of sockets.

The module runs under whatever Python a host has and can't import the package, so both hold the code.
"""

import ipaddress
import os
import socket

import pytest
from ansible_collections.kvtrial.vllm.plugins.module_utils import servers
from kvtrial.host import processes
from kvtrial.record import observed

SECRET = "sk-THE-KEY-NOBODY-MAY-SEE"
ARGVS = [
    ["vllm", "serve", "m", "--api-key", SECRET, SECRET, "--port", "1"],
    ["vllm", "serve", "m", f"--api-key={SECRET}", f"--hf-token={SECRET}"],
    ["vllm", "serve", f"https://user:{SECRET}@mirror/m", "--max-num-batched-tokens", "8192"],
    ["vllm", "serve", "m", "--api_key", SECRET, "--ssl-keyfile", "/etc/key"],
]
TEXTS = [
    f"Environment=VLLM_API_KEY={SECRET}\nExecStart=vllm serve m --api-key {SECRET} --port 1\n",
    f"ExecStart=vllm serve m --api-key {SECRET} {SECRET} --port 1 \\\n  --api-key {SECRET} {SECRET}\nMemoryMax=2G\n",
    f"Environment=\"HF_TOKEN={SECRET}\"\nEnvironment=SOME_PASSWORD='{SECRET}'\n",
    f"INFO non-default args: {{'model_tag': 'm', 'api_key': ['{SECRET}'], 'max_num_seqs': 4}}",
    f"INFO fetching https://user:{SECRET}@mirror/m at 4 tokens_per_second=3",
]


@pytest.mark.parametrize("argv", ARGVS, ids=range(len(ARGVS)))
def test_a_command_line_is_redacted_alike_and_wholly(argv):
    shown = servers.redacted_argv(argv)
    assert shown == observed.redacted_argv(argv)
    assert SECRET not in " ".join(shown)
    # The host program shows command lines too, shortened and in its own form; it hides no less.
    assert SECRET not in processes.redact(" ".join(argv))
    kept = [word for word in argv if SECRET not in word and not word.startswith("--")]
    assert all(word in shown for word in kept)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_a_unit_or_a_log_is_redacted_alike_and_wholly(text):
    shown = servers.redacted_text(text)
    assert shown == observed.redacted_text(text)
    assert SECRET not in shown
    assert [word for word in ("MemoryMax=2G", "--port 1") if (word in text) != (word in shown)] == []


SECRETS = ["VLLM_API_KEY", "HF_TOKEN", "api-key", "--hf-token", "SOME_PASSWORD", "credentials"]
COUNTS = ["max-num-batched-tokens", "tokens_per_second", "num_gpu_tokens", "VLLM_PORT"]


@pytest.mark.parametrize("name", SECRETS + COUNTS)
def test_a_name_is_a_secret_to_both_or_to_none(name):
    assert servers.is_secret_name(name) == observed.is_secret_name(name) == (name in SECRETS)


@pytest.mark.parametrize("packed", [
    bytes([127, 0, 0, 1]), bytes([0, 0, 0, 0]), bytes([10, 1, 2, 3]), bytes(15) + b"\1", bytes(16),
    bytes(10) + b"\xff\xff" + bytes([127, 0, 0, 1]), bytes(10) + b"\xff\xff" + bytes([192, 168, 7, 9]),
    bytes.fromhex("fe800000000000000a0027fffe4e66a1"),
], ids=lambda packed: packed.hex())  # fmt: skip
def test_an_address_of_the_kernels_table_is_read_alike(packed):
    # The table prints words of 32 bits in the order of this machine.
    table = "".join(packed[at : at + 4][::-1].hex().upper() for at in range(0, len(packed), 4))
    theirs = processes._decode_address(f"{table}:1F40")[0]
    ours = servers.plain_address(table)
    assert ipaddress.ip_address(ours) == ipaddress.ip_address(theirs)
    mapped = ipaddress.ip_address(packed)
    expected = getattr(mapped, "ipv4_mapped", None) or mapped
    assert ipaddress.ip_address(ours) == expected


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_real_listening_socket_is_found_by_both(family):
    address = "127.0.0.1" if family == socket.AF_INET else "::1"
    with socket.socket(family) as server:
        try:
            server.bind((address, 0))
        except OSError:
            pytest.skip(f"{address} is not to be had here")
        server.listen()
        port = server.getsockname()[1]
        ours = {(s["address"], s["port"]) for s in servers.listening([os.getpid()])}
        theirs = {(s.address, s.port) for s in processes.listening_sockets([os.getpid()])}
    assert (address, port) in ours and (address, port) in theirs
