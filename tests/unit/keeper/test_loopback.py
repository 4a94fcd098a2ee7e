"""The client for pages of the engine."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from kvtrial.host.loopback import loopback_client
from trial import free_port


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"here")

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy"])
def test_a_proxy_in_the_environment_is_not_asked_for_pages_on_loopback(monkeypatch, name):
    monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    server = HTTPServer(("127.0.0.1", 0), _Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with loopback_client(f"http://127.0.0.1:{server.server_port}", 5.0) as client:
            assert client.get("/metrics").text == "here"
    finally:
        server.shutdown()
        server.server_close()
