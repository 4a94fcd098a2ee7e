"""A server that answers over HTTP: two reads or four, nothing changed, no load."""

import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import httpx
import pytest
from kvtrial.analysis.cli import main
from kvtrial.analysis.observe import live
from kvtrial.analysis.observe.live import NoAnswer, base_of, reads_for, watch
from kvtrial.record.errors import UnusableInput
from planted import page


class Server:
    """Answers /metrics with one page after the other, and keeps what it was asked."""

    def __init__(
        self, pages: list[str], version: str | None = "0.31.0", models: tuple[str, ...] = ("some-model",)
    ) -> None:
        self.asked: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self._pages, self._version, self._models = list(pages), version, models

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((request.method, request.url.path))
        self.headers.append(dict(request.headers))
        if request.url.path == "/metrics":
            return httpx.Response(200, text=self._pages.pop(0) if len(self._pages) > 1 else self._pages[0])
        if request.url.path == "/version" and self._version:
            return httpx.Response(200, json={"version": self._version})
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": name} for name in self._models]})
        return httpx.Response(404, json={"error": "no"})


def seen(server: Server, window: float = 60.0, url: str = "127.0.0.1:8000", **more):
    return watch(url, window, sleep=lambda _: None, transport=httpx.MockTransport(server.answer), **more)


def test_a_minute_is_four_reads_of_metrics_and_nothing_but_reads():
    server = Server([page()])
    assert len(seen(server).pages) == 4
    assert [path for _, path in server.asked].count("/metrics") == 4
    assert {method for method, _ in server.asked} == {"GET"}
    assert {path for _, path in server.asked} == {"/metrics", "/version", "/v1/models"}


def test_a_short_window_is_two_reads():
    assert len(seen(Server([page()]), 5.0).pages) == 2
    assert (reads_for(10), reads_for(60)) == (2, 4)


def test_no_compression_is_asked_for_since_it_would_be_the_servers_work():
    server = Server([page()])
    seen(server)
    assert {headers["accept-encoding"] for headers in server.headers} == {"identity"}


def test_the_version_is_the_servers_word_and_its_absence_is_noted():
    assert seen(Server([page()])).version == "0.31.0"
    silent = seen(Server([page()], version=None))
    assert silent.version is None and any("/version" in note for note in silent.notes)


def test_an_api_key_goes_to_the_guarded_route_alone():
    server = Server([page()])
    seen(server, api_key="hidden")
    sent = {path: headers.get("authorization") for (_, path), headers in zip(server.asked, server.headers, strict=True)}
    assert sent == {"/metrics": None, "/version": None, "/v1/models": "Bearer hidden"}


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("127.0.0.1:8000/metrics", "http://127.0.0.1:8000"),
        ("https://h/prefix/v1/", "https://h/prefix"),
        ("http://user:secret@h:1", "http://h:1"),
    ],
)
def test_an_address_is_read_with_or_without_its_path(url: str, base: str):
    assert base_of(url) == base


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://h:port"])
def test_what_is_no_address_is_refused(url: str):
    with pytest.raises(UnusableInput, match="no address of a server"):
        base_of(url)


def test_a_server_that_answers_something_else_is_described():
    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(502, text="<html>Bad Gateway")

    with pytest.raises(UnusableInput, match="answers 502"):
        watch("h:1", 1.0, sleep=lambda _: None, transport=httpx.MockTransport(answer))


@pytest.fixture
def address() -> Iterator[tuple[str, list[str]]]:
    """A server on loopback that gives two pages, the second with preemptions."""
    pages = [page(version="0.31.0", finished=10, preemptions=0, running=9, usage=0.99, prompt=1e3)]
    pages.append(page(version="0.31.0", finished=20, preemptions=30, running=9, usage=0.99, prompt=2e3))
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            count = asked.count("/metrics")
            body = {"/metrics": pages[min(count, 2) - 1], "/version": json.dumps({"version": "0.31.0"})}.get(self.path)
            self.send_response(200 if body else 404)
            self.end_headers()
            self.wfile.write((body or "{}").encode())

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def test_the_command_watches_a_server_over_its_window(address, capsys):
    url, asked = address
    assert main(["observe", "--url", url, "--window", "0.2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["class"] == "preemption_shape_unknown"
    assert answer["findings"][0]["numbers"]["delta"] == 30
    assert answer["server"]["version"] == "0.31.0"
    assert asked.count("/metrics") == 2


def test_a_server_that_is_not_there_is_one_sentence(capsys):
    assert main(["observe", "--url", "http://127.0.0.1:9", "--window", "1"]) == 2
    said = capsys.readouterr().err
    assert "does not answer" in said and said.count("\n") == 1


def test_a_server_that_dies_within_the_window_did_answer_at_the_start():
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        if asked.count("/metrics") > 1:
            raise httpx.ConnectError("Connection refused")
        return httpx.Response(200, text=page())

    with pytest.raises(NoAnswer, match=r"answered at the start \(1 of 2 pages\)"):
        watch("h:1", 1.0, sleep=lambda _: None, transport=httpx.MockTransport(answer))


def test_a_page_that_drips_in_is_given_up(monkeypatch):
    monkeypatch.setattr(live, "MOST_SECONDS_A_PAGE", 0.05)

    class Drip(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            for line in page().splitlines(keepends=True):
                time.sleep(0.02)
                yield line.encode()

    with pytest.raises(NoAnswer, match="not the whole page"):
        watch("h:1", 1.0, transport=httpx.MockTransport(lambda _: httpx.Response(200, stream=Drip())))
