"""The webhook, posted to a server on this machine's loopback."""

import http.server
import json
import threading
from contextlib import contextmanager

import pytest
from history_build import night, plant, store_of
from kvtrial.analysis.cli import main
from kvtrial.analysis.history import command
from kvtrial.analysis.history.command import post
from kvtrial.analysis.history.reading import read


@contextmanager
def taking(*statuses: int):
    """A server that answers with these statuses in turn; yields its URL and the bodies that came."""
    bodies, left = [], list(statuses)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(left.pop(0))
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
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    store_of(folder, plant("g07", night(3), control=1.2), nights=5)
    return folder


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
        assert post(url, history, first_pause_seconds=0.01) == ""
    assert len(bodies) == 3


def test_it_gives_up_in_one_sentence(history):
    with taking(*[500] * command.WEBHOOK_ATTEMPTS) as (url, bodies):
        assert "did not take" in post(url, history, first_pause_seconds=0.01)
    assert len(bodies) == command.WEBHOOK_ATTEMPTS
    assert "did not take" in post(url, history, first_pause_seconds=0.01)


def test_what_is_refused_is_not_asked_again(history):
    with taking(404) as (url, bodies):
        assert "status 404" in post(url, history, first_pause_seconds=0.01)
    assert len(bodies) == 1


def test_an_alarm_that_was_not_delivered_ends_with_a_status_of_its_own(store, capsys, monkeypatch):
    monkeypatch.setattr(command, "WEBHOOK_ATTEMPTS", 1)
    (store / "told.json").unlink(missing_ok=True)
    with taking(500) as (url, _):
        assert main(["history", str(store), "--webhook", url]) == command.UNDELIVERED == 6
    assert "did not take" in capsys.readouterr().err


def test_nothing_is_posted_without_an_alarm(store):
    with taking() as (url, bodies):
        (store / "told.json").unlink(missing_ok=True)
        assert main(["history", str(store), "--newest", "0", "--webhook", url]) == 0
    assert bodies == [] and not (store / "told.json").exists(), "what was told to nobody is not known"
