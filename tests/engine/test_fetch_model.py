"""A model comes from a hub at one revision, every file compared; the token goes nowhere else.

The hub is a stand-in on loopback with two addresses, so that a redirect to another host can be told.
"""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "roles" / "model" / "files" / "fetch_model.py"
MAKER = SCRIPT.with_name("make_model.py")
REVISION = "c1899de289a04d12100db370d81485cdf75e47ca"
TOKEN = "hf_a_token_of_the_test"
FILES = {"config.json": b'{"num_hidden_layers": 1}', "model.safetensors": b"weights" * 9, "README.md": b"words"}


class Hub:
    """What the hub holds, and what it was asked."""

    def __init__(self) -> None:
        self.files = dict(FILES)
        self.asked: list[tuple[str, str | None]] = []
        self.private = False
        self.elsewhere = ""
        self.says: bytes | None = None
        self.waits = threading.Event()
        self.waits.set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                """Say nothing."""

            def do_GET(self) -> None:
                token = self.headers.get("Authorization")
                hub.asked.append((self.path, token))
                own = self.headers["Host"].startswith("127.0.0.1")
                if own and hub.private and token != f"Bearer {TOKEN}":
                    return self.send_error(401)
                if "/api/" in self.path:
                    return self.answer(json.dumps(hub.listing()).encode() if hub.says is None else hub.says)
                hub.waits.wait(60)
                if own and hub.elsewhere and self.path.endswith("safetensors"):
                    self.send_response(302)
                    self.send_header("Location", hub.elsewhere + self.path)
                    self.send_header("Content-Length", "0")
                    return self.end_headers()
                return self.answer(hub.files[self.path.rsplit("/", 1)[1]])

            def answer(self, body: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def listing(self) -> dict[str, Any]:
        """The revision's files as the hub lists them: of what they were at first."""
        entries: list[dict[str, Any]] = []
        for name, body in FILES.items():
            git = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
            entry: dict[str, Any] = {"rfilename": name, "size": len(body), "blobId": git}
            if name.endswith("safetensors"):
                entry["lfs"] = {"sha256": hashlib.sha256(body).hexdigest(), "size": len(body)}
            entries.append(entry)
        return {"sha": REVISION, "siblings": entries}


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def fetch(
    hub: Hub, folder: Path, *more: str, revision: str = REVISION, given: str = ""
) -> subprocess.CompletedProcess[str]:
    """`given`: what goes into its standard input."""
    command = [sys.executable, SCRIPT, folder, "--endpoint", f"http://127.0.0.1:{hub.port}", "--repository", "a/b"]
    command += ["--revision", revision, "--exclude", "*.md", *more]
    return subprocess.run(command, capture_output=True, text=True, check=False, input=given)


def test_the_files_of_the_revision_arrive_and_are_not_fetched_twice(hub: Hub, tmp_path: Path) -> None:
    assert json.loads(fetch(hub, tmp_path / "m").stdout) == {"files": 2, "bytes": 87, "fetched": 2}
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads(fetch(hub, tmp_path / "m").stdout)["fetched"] == 0


def test_a_fetch_that_was_killed_goes_on_with_what_is_missing(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(FILES["config.json"])
    (tmp_path / "model.safetensors.partial").write_bytes(b"half")
    assert json.loads(fetch(hub, tmp_path).stdout)["fetched"] == 1
    assert not list(tmp_path.glob("*.partial"))


def test_a_model_that_was_there_before_goes_where_this_one_is_asked_for_alone(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "old-00001-of-00002.safetensors").write_bytes(b"of another model")
    assert fetch(hub, tmp_path).returncode == 0 and (tmp_path / "old-00001-of-00002.safetensors").is_file()
    assert json.loads(fetch(hub, tmp_path, "--only").stdout)["fetched"] == 0
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_is_not_what_the_hub_lists_is_refused(hub: Hub, tmp_path: Path, name: str) -> None:
    hub.files[name] = bytes(len(FILES[name]))
    done = fetch(hub, tmp_path)
    assert done.returncode == 2 and f"{name} of a/b is not what the hub says of revision {REVISION}" in done.stderr
    assert not (tmp_path / name).exists()


def test_a_branch_is_no_revision(hub: Hub, tmp_path: Path) -> None:
    assert "model_revision=main is no full commit hash" in fetch(hub, tmp_path, revision="main").stderr
    assert "The hub knows revision" in fetch(hub, tmp_path, revision="0" * 40).stderr


def test_a_model_that_needs_a_token_says_so_and_the_token_is_shown_to_nobody_else(hub: Hub, tmp_path: Path) -> None:
    hub.private = True
    assert "answered 401; the model needs a token: name its file in model_token_file" in fetch(hub, tmp_path).stderr
    hub.elsewhere = f"http://localhost:{hub.port}"
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    hub.asked.clear()
    done = fetch(hub, tmp_path / "m", "--token-file", str(tmp_path / "token"))
    assert done.returncode == 0, done.stderr
    weights = [token for path, token in hub.asked if path.endswith("safetensors")]
    assert weights == [f"Bearer {TOKEN}", None]
    assert TOKEN not in done.stdout + done.stderr


def test_the_token_may_come_by_standard_input(hub: Hub, tmp_path: Path) -> None:
    hub.private = True
    done = fetch(hub, tmp_path, "--token-on-stdin", given=f"{TOKEN}\n")
    assert done.returncode == 0, done.stderr
    assert {token for _, token in hub.asked} == {f"Bearer {TOKEN}"}


@pytest.mark.parametrize("address", ["http://mirror.example.invalid", "http://127.0.0.1.example.invalid", "ftp://x"])
def test_a_token_is_not_sent_where_it_can_be_read_on_its_way(hub: Hub, tmp_path: Path, address: str) -> None:
    done = fetch(hub, tmp_path, "--token-on-stdin", "--endpoint", address, given=TOKEN)
    assert done.returncode == 2
    assert f"model_endpoint={address} has no TLS, and the token would be readable on its way" in done.stderr
    assert TOKEN not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "says",
    [b"<html>a portal</html>", b"", b"[]", b'"x"', b"\xff\xfe", b"null", b'{"sha": "x", "siblings": [3]}',
     b'{"sha": "x", "siblings": {"a": 1}}', b'{"sha": "x", "siblings": 4}'],
)  # fmt: skip
def test_an_answer_that_is_no_list_of_files_is_told_in_a_sentence(hub: Hub, tmp_path: Path, says: bytes) -> None:
    hub.says = says
    done = fetch(hub, tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "answered something else than a hub's list of files; set model_endpoint to the address" in line


def test_an_address_that_is_none_is_told_in_a_sentence(hub: Hub, tmp_path: Path) -> None:
    for address in ("mirror", "http://[::1", "http://127.0.0.1:x"):
        done = fetch(hub, tmp_path, "--endpoint", address)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
        assert "can't be reached" in done.stderr


def places_of(token: str, *folders: Path) -> list[str]:
    """Where the token stands: files below the folders and in memory-backed ones, arguments and environments."""
    folders = (*folders, Path("/dev/shm"), Path("/run/kvtrial"))
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.name != "token"]
    for process in [path for path in Path("/proc").iterdir() if path.name.isdigit()]:
        files += [process / "cmdline", process / "environ"]
    found = []
    for path in files:
        with contextlib.suppress(OSError):  # a process may be over by now
            found += [str(path)] if token.encode() in path.read_bytes() else []
    return found


def test_during_a_fetch_and_after_its_controller_was_killed_the_token_lies_nowhere(hub: Hub, tmp_path: Path) -> None:
    """The role itself, over a local connection; the hub keeps the fetch waiting. Pipelining is off in the settings."""
    hub.private = True
    hub.waits.clear()
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    variables = {
        "ansible_python_interpreter": sys.executable,
        "model_python": sys.executable,
        "model_root": str(tmp_path / "root"),
        "model_source": "huggingface",
        "model_endpoint": f"http://127.0.0.1:{hub.port}",
        "model_repository": "a/b",
        "model_revision": REVISION,
        "model_token_file": str(tmp_path / "token"),
    }
    book = [{"hosts": "localhost", "gather_facts": False, "vars": variables, "roles": ["model"]}]
    (tmp_path / "play.yml").write_text(json.dumps(book))
    temporary = {name: str(tmp_path / name) for name in ("ANSIBLE_LOCAL_TEMP", "ANSIBLE_REMOTE_TEMP", "TMPDIR")}
    (tmp_path / "TMPDIR").mkdir()
    environment = os.environ | temporary | {
        "ANSIBLE_ROLES_PATH": str(SCRIPT.parents[2]),
        "ANSIBLE_COLLECTIONS_PATH": str(SCRIPT.parents[3] / "collections"),
        "ANSIBLE_PIPELINING": "false",
    }  # fmt: skip
    command = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", "localhost,", "-c", "local", "-vvvv"]
    with (tmp_path / "said").open("w") as said:
        playing = subprocess.Popen(
            [*command, str(tmp_path / "play.yml")], env=environment, cwd=tmp_path, stdout=said, stderr=said,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            until = time.monotonic() + 60
            while not any(path.endswith("config.json") for path, _ in hub.asked):
                assert time.monotonic() < until and playing.poll() is None, (tmp_path / "said").read_text()
                time.sleep(0.05)
            assert hub.asked[-1][1] == f"Bearer {TOKEN}"
            assert places_of(TOKEN, tmp_path) == []
        finally:
            os.killpg(playing.pid, signal.SIGKILL)
            playing.wait()
            left = places_of(TOKEN, tmp_path)
            hub.waits.set()  # the fetch itself goes on without its controller
    assert left == []
    (tmp_path / "planted").write_text(TOKEN)
    assert places_of(TOKEN, tmp_path) == [str(tmp_path / "planted")]


@pytest.mark.parametrize(
    ("settings", "become", "reason"),
    [
        ({"ANSIBLE_KEEP_REMOTE_FILES": "true"}, {}, "ANSIBLE_KEEP_REMOTE_FILES is set"),
        ({}, {"ansible_become": True, "ansible_become_method": "su"}, "become_method=su takes modules as files"),
        ({}, {"ansible_become": True, "ansible_become_method": "sudo"}, ""),
    ],
)
def test_a_token_that_would_lie_in_a_file_on_the_host_is_not_sent(
    hub: Hub, tmp_path: Path, settings: dict[str, str], become: dict[str, object], reason: str
) -> None:
    """Where Ansible sends modules as files, their arguments lie there with them."""
    if become and (os.geteuid() or not shutil.which(str(become["ansible_become_method"]))):
        pytest.skip("to become another user takes root, and the command")
    hub.private = True
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    variables = become | {
        "ansible_python_interpreter": sys.executable,
        "model_python": sys.executable,
        "model_root": str(tmp_path / "root"),
        "model_source": "huggingface",
        "model_endpoint": f"http://127.0.0.1:{hub.port}",
        "model_repository": "a/b",
        "model_revision": REVISION,
        "model_token_file": str(tmp_path / "token"),
    }
    book = [{"hosts": "localhost", "gather_facts": False, "vars": variables, "roles": ["model"]}]
    (tmp_path / "play.yml").write_text(json.dumps(book))
    temporary = {name: str(tmp_path / name) for name in ("ANSIBLE_LOCAL_TEMP", "ANSIBLE_REMOTE_TEMP")}
    environment = os.environ | temporary | settings | {
        "ANSIBLE_ROLES_PATH": str(SCRIPT.parents[2]),
        "ANSIBLE_COLLECTIONS_PATH": str(SCRIPT.parents[3] / "collections"),
    }  # fmt: skip
    command = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", "localhost,", "-c", "local"]
    done = subprocess.run([*command, str(tmp_path / "play.yml")], env=environment, cwd=tmp_path, text=True,
                          stdin=subprocess.DEVNULL, capture_output=True, check=False)  # fmt: skip
    said = " ".join(done.stdout.split())
    assert places_of(TOKEN, tmp_path) == []
    if reason:
        assert f"localhost: the token of model_token_file would lie in a file on the host, since {reason};" in said
        assert done.returncode == 2 and hub.asked == []
    else:
        # The hub's config.json is no model's: what counts is that it was asked, and with what.
        assert {token for _, token in hub.asked} == {f"Bearer {TOKEN}"}, said


def test_a_hub_that_is_not_there_is_named(tmp_path: Path) -> None:
    hub = Hub()
    hub.server.shutdown()
    hub.server.server_close()
    assert "can't be reached" in fetch(hub, tmp_path).stderr


def test_what_was_brought_is_adopted_and_a_change_is_found(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    fetch(hub, folder)
    adopt = [sys.executable, MAKER, "adopt", folder, "--unpacked", "--manifest", folder / "manifest.json"]
    assert subprocess.run(adopt, capture_output=True, check=False).returncode == 0
    digest = subprocess.run(
        [sys.executable, MAKER, "digest", folder], capture_output=True, text=True, check=True
    ).stdout
    assert json.loads((folder / "manifest.json").read_text())["revision"] == digest.strip()
    (folder / "model.safetensors").write_bytes(b"other")
    found = subprocess.run([sys.executable, MAKER, "verify", folder], capture_output=True, text=True, check=False)
    assert found.returncode == 2 and "model.safetensors has 5 bytes, the manifest says 63" in found.stderr
