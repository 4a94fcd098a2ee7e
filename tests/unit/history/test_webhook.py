"""The webhook, posted to a server on this machine's loopback."""

import http.server
import io
import json
import os
import threading
from contextlib import contextmanager

import pytest
from history_build import night, plant, store_of
from kvtrial.analysis.cli import main
from kvtrial.analysis.history import command
from kvtrial.analysis.history.command import post
from kvtrial.analysis.history.reading import read


@contextmanager
def taking(*statuses):
    """A server that answers with these statuses in turn, or (status, header, value); yields its URL and what came."""
    bodies, left = [], list(statuses)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            status = left.pop(0)
            self.send_response(status[0] if isinstance(status, tuple) else status)
            if isinstance(status, tuple):
                self.send_header(*status[1:])
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hook", bodies
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    store_of(folder, plant("g07", night(3), control=1.2), nights=5)
    return folder


@pytest.fixture
def store(made):
    """Of which nobody was told anything."""
    (made / "told.json").unlink(missing_ok=True)
    return made


@pytest.fixture
def history(store):
    return read(store)


def test_alarms_are_posted_once_it_is_taken(store):
    with taking(200) as (url, bodies):
        assert main(["history", str(store), "--webhook", url]) == 5
    assert len(bodies) == 1
    assert "rose 20 % on host g07 on 4 Nov" in bodies[0]["text"]
    assert {alarm["host"] for alarm in bodies[0]["alarms"]} == {"g07"}


def test_a_server_in_trouble_is_asked_again(history):
    with taking(503, 429, 200) as (url, bodies):
        assert post(url, history.alarms, first_pause_seconds=0.01) == ""
    assert len(bodies) == 3


def test_it_gives_up_in_one_sentence(history):
    with taking(*[500] * command.WEBHOOK_ATTEMPTS) as (url, bodies):
        assert "did not take" in post(url, history.alarms, first_pause_seconds=0.01)
    assert len(bodies) == command.WEBHOOK_ATTEMPTS
    assert "did not take" in post(url, history.alarms, first_pause_seconds=0.01)


def test_what_is_refused_is_not_asked_again(history):
    with taking(404) as (url, bodies):
        assert "status 404" in post(url, history.alarms, first_pause_seconds=0.01)
    assert len(bodies) == 1


def test_an_alarm_that_was_not_delivered_ends_with_a_status_of_its_own(store, capsys, monkeypatch):
    monkeypatch.setattr(command, "WEBHOOK_ATTEMPTS", 1)
    with taking(500) as (url, _):
        assert main(["history", str(store), "--webhook", url]) == command.UNDELIVERED == 6
    assert "did not take" in capsys.readouterr().err


def test_an_alarm_that_was_not_delivered_is_posted_the_next_time(store, monkeypatch, capsys):
    monkeypatch.setattr(command, "WEBHOOK_ATTEMPTS", 1)
    with taking(500, 200) as (url, bodies):
        assert main(["history", str(store), "--webhook", url]) == 6
        assert "posted again the next time" in capsys.readouterr().err
        assert main(["history", str(store), "--webhook", url]) == 5
        assert bodies[0] == bodies[1]
        assert main(["history", str(store), "--webhook", url]) == 0
    assert len(bodies) == 2


def test_a_textfile_that_cannot_be_written_keeps_no_alarm_back(store, tmp_path, capsys):
    nowhere = str(tmp_path / "none" / "x.prom")
    with taking(200) as (url, bodies):
        assert main(["history", str(store), "--textfile", nowhere, "--webhook", url]) == 5
    assert len(bodies) == 1
    assert f"--textfile {nowhere} can't be written" in capsys.readouterr().err
    assert main(["history", str(store), "--newest", "0", "--textfile", nowhere]) == command.NO_TEXTFILE == 7


def test_the_textfile_can_be_read_by_the_account_of_node_exporter(store, tmp_path):
    before = os.umask(0o077)
    try:
        main(["history", str(store), "--textfile", str(tmp_path / "x.prom")])
    finally:
        os.umask(before)
    assert (tmp_path / "x.prom").stat().st_mode & 0o777 == 0o644


def test_the_url_may_come_by_standard_input_and_is_never_repeated(store, monkeypatch, capsys):
    with taking(200) as (url, bodies):
        monkeypatch.setattr("sys.stdin", io.StringIO(url + "\n"))
        assert main(["history", str(store), "--webhook", "-"]) == 5
    assert len(bodies) == 1
    assert main(["history", str(store), "--webhook", "ftp://chat.example/secret"]) == 2
    monkeypatch.setattr(command, "WEBHOOK_ATTEMPTS", 1)
    (store / "told.json").unlink()
    with taking(500) as (url, _):
        assert main(["history", str(store), "--webhook", f"{url}/secret"]) == 6
    said = capsys.readouterr()
    assert "secret" not in said.out + said.err


def test_the_server_says_when_it_wants_to_be_asked_again(history, monkeypatch):
    slept = []
    monkeypatch.setattr(command.time, "sleep", slept.append)
    answers = [(429, "retry-after", "7"), (503, "retry-after", "3600"), (503, "retry-after", "Wed, 21 Oct 2026"), 200]
    with taking(*answers) as (url, _):
        assert post(url, history.alarms) == ""
    assert slept == [7, 60, 4]
    with taking((302, "location", "/other")) as (url, bodies):
        assert "a redirect; give the address" in post(url, history.alarms)
    assert len(bodies) == 1


def test_nothing_is_posted_without_an_alarm(store):
    with taking() as (url, bodies):
        assert main(["history", str(store), "--newest", "0", "--webhook", url]) == 0
    assert bodies == [] and not (store / "told.json").exists(), "what was told to nobody is not known"


@pytest.mark.parametrize("host", ["hooks..example", f"{'a' * 64}.example", "xn--", "xn--.example", ".", "\u200b"])
def test_an_address_whose_host_no_resolver_can_be_asked_for_is_refused_before_the_night_has_an_alarm(
    store, host, capsys
):
    assert main(["history", str(store), "--webhook", f"https://{host}/SECRET"]) == 2
    said = capsys.readouterr()
    assert "what --webhook gives is no URL that can be posted to" in said.err
    assert "SECRET" not in said.out + said.err


@pytest.mark.parametrize("host", ["127.0.0.1:9", "[::1]:9", "h\u00fcte.example.", "a.b-c.example"])
def test_an_address_that_can_be_asked_for_is_taken(host):
    command.check_url(f"https://{host}/services/T0/B0")


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("NO_PROXY", "fd00::/8", "InvalidURL"),
        ("NO_PROXY", "[::1]", "InvalidURL"),
        ("HTTP_PROXY", "http://proxy example:x", "InvalidURL"),
        ("ALL_PROXY", "socks5://127.0.0.1:1", "ImportError"),
        ("SSL_CERT_FILE", "/none/SECRET.pem", "FileNotFoundError"),
    ],
)
def test_whatever_fails_in_posting_keeps_no_alarm_back(store, tmp_path, monkeypatch, capsys, name, value, why):
    for other in ("NO_PROXY", "ALL_PROXY", "HTTP_PROXY", "SSL_CERT_FILE"):
        monkeypatch.delenv(other, raising=False)
        monkeypatch.delenv(other.lower(), raising=False)
    monkeypatch.setenv(name, value)
    textfile = tmp_path / "x.prom"
    arguments = ["history", str(store), "--webhook", "http://127.0.0.1:9/SECRET", "--textfile", str(textfile)]
    assert main(arguments) == command.UNDELIVERED
    said = capsys.readouterr()
    assert "ALARM" in said.out
    assert "the webhook at 127.0.0.1 did not take the" in said.err and f"({why}" in said.err
    assert "posted again the next time" in said.err
    assert "SECRET" not in said.out + said.err
    assert textfile.exists()
