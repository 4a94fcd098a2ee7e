"""Servers that run on a host: found, read and told without secrets. The host is made up, the sockets are real."""

import http.server
import json
import socket
import threading
from pathlib import Path

import pytest
from ansible_collections.kvtrial.vllm.plugins.module_utils import servers

SECRET = "sk-THE-KEY-NOBODY-MAY-SEE"


def add(proc, pid, command, parent=1, ticks=100, files=None, links=None):
    proc(pid, "x", parent=parent, ticks=ticks)
    folder = Path(proc.root) / str(pid)
    (folder / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in command))
    for name in (*(files or {}), *(links or {})):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    for name, text in (files or {}).items():
        (folder / name).write_text(text)
    for name, target in (links or {}).items():
        (folder / name).symlink_to(target)


# --- which processes are servers


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        (["/v/bin/vllm", "serve", "m", "--port", "1"], ["/v/bin/vllm", "serve", "m", "--port", "1"]),
        (["/v/bin/python", "/v/bin/vllm", "serve", "m"], ["/v/bin/vllm", "serve", "m"]),
        (["python3", "-m", servers.API_MODULE, "--model", "m"], ["vllm", "serve", "--model", "m"]),
        (["sudo", "-u", "vllm", "/v/bin/vllm", "serve", "m"], None),
        (["sh", "-c", "vllm serve m"], None),
        (["grep", "vllm", "serve"], None),
        (["vllm", "bench", "serve"], None),
        (["VLLM::EngineCore"], None),
        ([], None),
    ],
)
def test_a_server_is_told_by_its_own_words_not_by_those_of_whoever_names_it(words, argv):
    assert servers.serve_argv(words) == argv


def test_servers_are_found_with_their_trees_and_forked_workers_are_none(proc):
    serve = ["/v/bin/vllm", "serve", "m"]
    add(proc, 10, ["sudo", *serve])
    add(proc, 11, serve, parent=10)
    add(proc, 12, serve, parent=11)
    add(proc, 13, ["VLLM::EngineCore"], parent=12)
    add(proc, 20, ["/v/bin/vllm", "serve", "n", "--port=8001"], ticks=7)
    add(proc, 30, ["python3", "unrelated.py"])
    found = servers.find_servers(proc.root)
    assert [(s["pid"], s["tree"]) for s in found] == [(11, [11, 12, 13]), (20, [20])]
    assert found[1]["start_ticks"] == 7
    assert found[1]["argv"] == ["/v/bin/vllm", "serve", "n", "--port=8001"]


@pytest.mark.parametrize(
    ("argv", "address"),
    [
        ([], ("http", "127.0.0.1", 8000)),
        (["--host", "0.0.0.0", "--port", "9"], ("http", "127.0.0.1", 9)),
        (["--host=10.1.2.3", "--port=9", "--ssl-certfile", "c"], ("https", "10.1.2.3", 9)),
        (["--host", "::"], ("http", "127.0.0.1", 8000)),
        (["--port", "1", "--port", "2"], ("http", "127.0.0.1", 2)),
    ],
)
def test_a_server_is_asked_where_it_listens(argv, address):
    found = servers.address_of(["vllm", "serve", "m", *argv])
    assert (found["scheme"], found["host"], found["port"]) == address


def test_a_unix_socket_is_no_address():
    assert servers.address_of(["vllm", "serve", "m", "--uds", "/run/s"]) is None


# --- secrets


@pytest.mark.parametrize(
    "argv",
    [
        ["--api-key", SECRET],
        ["--api-key", "one", SECRET],
        [f"--api-key={SECRET}"],
        [f"--hf_token={SECRET}"],
        ["--hf-token", SECRET],
        [f"--otlp-traces-endpoint=http://user:{SECRET}@collector"],
        ["--otlp-traces-endpoint", f"http://user:{SECRET}@collector"],
    ],
)
def test_no_secret_of_an_argv_is_told(argv):
    told = servers.redacted_argv(["vllm", "serve", "m", *argv, "--max-num-batched-tokens", "8192"])
    assert SECRET not in " ".join(told)
    assert told[:3] == ["vllm", "serve", "m"] and told[-2:] == ["--max-num-batched-tokens", "8192"]


@pytest.mark.parametrize(
    "text",
    [
        f"ExecStart=/v/bin/vllm serve m --api-key {SECRET} --port 1",
        f"Environment=VLLM_API_KEY={SECRET}",
        f'Environment="HF_TOKEN={SECRET}" X=1',
        f"non-default args: {{'model_tag': 'm', 'api_key': ['{SECRET}'], 'port': 1}}",
        f"proxy http://me:{SECRET}@proxy:3128",
    ],
)
def test_no_secret_of_a_unit_or_a_log_is_told(text):
    assert SECRET not in servers.redacted_text(text)


def test_counts_of_tokens_are_no_secrets():
    line = "--max-num-batched-tokens 8192 --max-model-len 4 num_tokens=7"
    assert servers.redacted_text(line) == line


def test_of_an_environment_only_what_matters_is_told(proc):
    text = f"VLLM_API_KEY={SECRET}\0MY_TOKEN={SECRET}\0PATH=/bin\0"
    text += "VLLM_KV_CACHE_LAYOUT=HND\0PYTORCH_CUDA_ALLOC_CONF=a:b=c\0"
    add(proc, 5, ["vllm"], files={"environ": text})
    assert servers.environment_of(5, proc.root) == {
        "VLLM_API_KEY": servers.REDACTED,
        "VLLM_KV_CACHE_LAYOUT": "HND",
        "PYTORCH_CUDA_ALLOC_CONF": "a:b=c",
    }


# --- unit, log, sockets, limits


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("0::/system.slice/vllm.service\n", "vllm.service"),
        ("0::/system.slice/system-vllm.slice/vllm@a.service/engine\n", "vllm@a.service"),
        ("12:memory:/system.slice/vllm.service\n1:name=systemd:/system.slice/vllm.service\n", "vllm.service"),
        ("0::/user.slice/user-1000.slice/user@1000.service\n", None),
        ("0::/docker/0123\n", None),
        ("", None),
    ],
)
def test_the_unit_is_that_of_the_cgroup(cgroup, unit, proc):
    add(proc, 5, ["vllm"], files={"cgroup": cgroup})
    assert servers.unit_of(5, proc.root) == unit


def test_the_log_is_the_file_that_the_output_goes_to(proc, tmp_path):
    log = tmp_path / "engine.log"
    log.write_text("x\n")
    add(proc, 5, ["vllm"], links={"fd/1": str(log)})
    add(proc, 6, ["vllm"], links={"fd/1": "pipe:[7]", "fd/2": str(log)})
    add(proc, 7, ["vllm"], links={"fd/1": "/dev/null", "fd/2": "socket:[8]"})
    assert [servers.log_file_of(pid, proc.root) for pid in (5, 6, 7)] == [str(log), str(log), None]


def test_sockets_are_those_of_the_tree_with_address_and_owner(proc):
    head = "  sl  local_address rem_address st\n"
    row = " {n}: {local} 00000000:0000 {state} 0:0 0:0 0 0 0 {inode} 1\n"
    tcp = head + row.format(n=0, local="0100007F:1F40", state="0A", inode=70)
    tcp += row.format(n=1, local="00000000:1F41", state="0A", inode=71)
    tcp += row.format(n=2, local="00000000:0016", state="0A", inode=99)
    tcp += row.format(n=3, local="0100007F:1F42", state="01", inode=70)
    tcp6 = head + row.format(n=0, local="00000000000000000000000001000000:1F43", state="0A", inode=72)
    add(proc, 5, ["vllm"], files={"net/tcp": tcp, "net/tcp6": tcp6, "comm": "vllm\n"},
        links={"fd/3": "socket:[70]", "fd/4": "socket:[72]"})  # fmt: skip
    add(proc, 6, ["core"], parent=5, files={"comm": "VLLM::EngineCor\n"}, links={"fd/3": "socket:[71]"})
    assert servers.listening([5, 6], proc.root) == [
        {"address": "0.0.0.0", "port": 8001, "process": "VLLM::EngineCor"},
        {"address": "127.0.0.1", "port": 8000, "process": "vllm"},
        {"address": "::1", "port": 8003, "process": "vllm"},
    ]


def cgroup_files(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_smallest_limit_upwards_counts(proc, tmp_path):
    cgroup_files(tmp_path / "cg", {
        "a.slice/memory.max": "1000\n", "a.slice/s.service/memory.max": "max\n",
        "a.slice/s.service/memory.current": "700\n", "a.slice/s.service/memory.events": "low 0\noom 1\noom_kill 2\n",
    })  # fmt: skip
    add(proc, 5, ["vllm"], files={"cgroup": "0::/a.slice/s.service\n"})
    assert servers.cgroup_memory(5, proc.root, str(tmp_path / "cg")) == {
        "limit_bytes": 1000, "used_bytes": 700, "oom_kills": 2
    }  # fmt: skip


def test_the_first_version_of_cgroups_is_read_and_its_no_limit_is_none(proc, tmp_path):
    cgroup_files(tmp_path / "cg" / "memory" / "s.service", {
        "memory.limit_in_bytes": "9223372036854771712", "memory.usage_in_bytes": "5",
        "memory.oom_control": "oom_kill 0\n",
    })  # fmt: skip
    add(proc, 5, ["vllm"], files={"cgroup": "9:memory:/s.service\n0::/s.service\n"})
    assert servers.cgroup_memory(5, proc.root, str(tmp_path / "cg")) == {
        "limit_bytes": None, "used_bytes": 5, "oom_kills": 0
    }  # fmt: skip
    add(proc, 6, ["vllm"])
    assert set(servers.cgroup_memory(6, proc.root, str(tmp_path / "cg")).values()) == {None}


def test_memory_of_others_on_a_gpu_is_told_apart():
    gpus = [{"uuid": "a", "name": "H200", "memory_total_bytes": 10, "memory_used_bytes": 9}]
    used = [{"gpu_uuid": "a", "pid": 1, "memory_bytes": 6}, {"gpu_uuid": "a", "pid": 9, "memory_bytes": 3}]
    assert servers.gpus_seen(gpus, used, [1])[0]["other_bytes"] == 3
    assert servers.gpus_seen(gpus, [], [1])[0]["other_bytes"] is None


# --- what a server answers


class Handler(http.server.BaseHTTPRequestHandler):
    asked: list = []  # noqa: RUF012  one for all requests of a test
    pages: dict = {}  # noqa: RUF012

    def do_GET(self):
        Handler.asked.append((self.command, self.path, dict(self.headers)))
        status, body = Handler.pages.get(self.path, (404, b""))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def address():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    Handler.asked, Handler.pages = [], {"/metrics": (200, b"vllm:x 1\n"), "/version": (200, b'{"version": "0.26.0"}'),
                                        "/v1/models": (401, b"{}")}  # fmt: skip
    yield {"scheme": "http", "host": "127.0.0.1", "port": server.server_port}
    server.shutdown()
    server.server_close()


def test_a_page_comes_whole_with_the_time_and_nothing_but_reads_is_sent(address):
    page = servers.page(address)
    assert servers.unpack(page["text"]) == b"vllm:x 1\n"
    assert page["error"] is None and page["monotonic_seconds"] > 0
    assert servers.said(address, "/version") == {"version": "0.26.0"}
    assert servers.said(address, "/v1/models") == {"status": 401}
    assert {method for method, _, _ in Handler.asked} == {"GET"}
    assert not any("authorization" in {name.lower() for name in headers} for _, _, headers in Handler.asked)


def test_a_large_page_loses_its_buckets_and_nothing_else(address):
    line = b'vllm:h_bucket{le="%d"} 1\n'
    body = b"vllm:x 1\n" + b"".join(line % n for n in range(400_000)) + b"vllm:h_sum 2\n"
    Handler.pages["/metrics"] = (200, body)
    page = servers.page(address)
    assert page["bytes"] == len(body)
    assert servers.unpack(page["text"]) == b"vllm:x 1\nvllm:h_sum 2\n"


def test_a_page_that_is_none_says_why(address):
    Handler.pages["/metrics"] = (503, b"")
    assert servers.page(address)["error"] == "HTTP status 503"
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = {"scheme": "http", "host": "127.0.0.1", "port": closed.getsockname()[1]}
        assert servers.page(nobody)["error"].startswith("ConnectionRefusedError")
    assert "more than 10 bytes" in json.dumps(_too_long(address))


def _too_long(address):
    Handler.pages["/metrics"] = (200, b"x" * 11)
    with pytest.raises(ValueError, match="more than 10 bytes") as refused:
        servers.get(address, "/metrics", limit=10)
    return str(refused.value)


def test_of_a_long_log_the_beginning_and_the_end_are_read_in_whole_lines(tmp_path):
    log = tmp_path / "log"
    log.write_text("".join(f"line {n}\n" for n in range(100_000)))
    text = servers.tail(str(log), 1000, 200)
    assert text.startswith("line 0\n") and text.endswith("line 99999\n")
    assert len(text) <= 1200 and all(line.startswith("line ") for line in text.splitlines())
    assert servers.tail(str(log), 10**7) == log.read_text()
    assert servers.tail(str(tmp_path / "none"), 10) is None


def test_files_of_tiers_are_told_with_whether_anybody_maps_them(tmp_path):
    (tmp_path / "vllm_offload_a.mmap").write_bytes(b"xx")
    path = str(tmp_path / "vllm_offload_a.mmap")
    assert servers.shm_files(str(tmp_path), {path})[0] == {"path": path, "size_bytes": 2, "mapped": True}
    assert servers.shm_files(str(tmp_path), set())[0]["mapped"] is False
    assert servers.shm_files(str(tmp_path))[0]["mapped"] is None
