"""Gauges read from a page, resets that only claim success, and answers that end before their limit."""

import http.server
import json
import threading
import time
from pathlib import Path

import pytest
from kvtrial.host import pressure
from kvtrial.host.load.spool import request_body
from kvtrial.host.pressure import PressureWatch, RunLedger, read_gauges, reset_caches, series_of
from kvtrial.record.exposition import parse_page, read_page
from kvtrial.record.load import RequestResult, RequestSpec

PAGES = Path(__file__).parents[2] / "fixtures" / "metrics"
VERSION = "0.32.0"


@pytest.mark.parametrize("name", ["vllm-0.32.0-cpu-after-preemptions", "vllm-0.32.0-cpu-idle"])
def test_gauges_are_those_of_a_whole_reading_of_the_page(name):
    text = (PAGES / f"{name}.prom").read_text()
    model = next(
        part.split('"')[1]
        for part in text.split()
        if 'model_name="' in part
        for part in [part[part.index('model_name="') :]]
    )
    whole = read_page(parse_page(text), VERSION, model).values
    found = read_gauges(text.encode(), series_of(VERSION))
    assert found == {role: whole[role] for role in found}


def test_several_engines_are_added_up_and_of_shares_the_largest_counts():
    page = b"\n".join([
        b"# TYPE vllm:num_requests_running gauge",
        b'vllm:num_requests_running{engine="0"} 3.0',
        b'vllm:num_requests_running{engine="1"} 4.0',
        b'vllm:num_requests_running_other{engine="1"} 9.0',
        b'vllm:kv_cache_usage_perc{engine="0"} 0.25',
        b'vllm:kv_cache_usage_perc{engine="1"} 0.5',
    ])  # fmt: skip
    found = read_gauges(page, series_of(VERSION))
    assert found == {
        "requests_running": 7.0,
        "requests_waiting": None,
        "kv_cache_usage_share": 0.5,
        "preemptions": None,
    }


class Server(http.server.ThreadingHTTPServer):
    """Answers /reset_prefix_cache with the scripted (status, body) pairs, the last one for good, and counts."""

    def __init__(self, script):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.asked = list(script), []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.server.asked.append(self.path)
        status, body = self.server.script.pop(0) if len(self.server.script) > 1 else self.server.script[0]
        self.answer(status, body)

    def do_GET(self):
        self.server.asked.append(self.path)
        self.answer(200, b'\nvllm:num_requests_running{engine="0"} 2.0\nvllm:num_preemptions_total{engine="0"} 7.0\n')

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        """Silent."""


@pytest.fixture(name="serve")
def _serve(monkeypatch):
    monkeypatch.setattr(pressure, "RESET_PAUSE_SECONDS", 0.001)
    servers = []

    def start(*script):
        servers.append(Server(script))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_reset_is_tried_until_the_body_says_success(serve):
    server = serve((200, b'{"success": false}'), (200, b'{"success": false}'), (200, b'{"success": true}'))
    fact = reset_caches(server.url, VERSION, None)
    assert (fact.succeeded, fact.tries, fact.external) == (True, 3, False)
    assert server.asked == ["/reset_prefix_cache"] * 3


def test_status_200_without_success_is_no_reset(serve):
    fact = reset_caches(serve((200, b'{"success": false}')).url, VERSION, None)
    assert fact.succeeded is False and fact.tries == pressure.RESET_TRIES and "false" in fact.detail


def test_a_tier_is_emptied_too_and_before_0_22_that_is_not_claimed(serve):
    server = serve((200, b""))
    assert reset_caches(server.url, VERSION, "OffloadingConnector").external is True
    assert reset_caches(server.url, "0.21.0", "OffloadingConnector").external is False
    assert server.asked == ["/reset_prefix_cache?reset_external=true", "/reset_prefix_cache"]


def test_an_engine_without_the_endpoint_is_told_at_once(serve):
    fact = reset_caches(serve((404, b"")).url, VERSION, None)
    assert (fact.succeeded, fact.tries) == (False, 1) and "VLLM_SERVER_DEV_MODE" in fact.detail


def test_a_watch_counts_preemptions_since_the_phase_began(serve):
    server = serve((200, b""))
    began = time.monotonic_ns()
    with PressureWatch([server.url], VERSION, 0.05) as watch:
        while len(server.asked) < 3:
            time.sleep(0.01)
    points = watch.points(began, 5.0)
    assert len(points) >= 2
    assert {(point.running, point.preemptions, point.waiting) for point in points} == {(2.0, 2.0, None)}
    assert watch.points(time.monotonic_ns(), 5.0) == []


def test_a_long_phase_keeps_a_line_over_all_of_its_time(serve, monkeypatch):
    monkeypatch.setattr(pressure, "POINTS_MAX", 6)
    server = serve((200, b""))
    with PressureWatch([server.url], VERSION, 0.005) as watch:
        while len(server.asked) < 30:
            time.sleep(0.01)
    points = watch.points(0, 0.0)
    assert len(points) <= 7
    assert points[-1].seconds - points[0].seconds > 0.05


def test_an_answer_that_ends_early_is_made_to_end_exactly_there():
    spec = RequestSpec(key="a", prompt_token_ids=[1, 2], max_tokens=512, stop_after=256, stop_token_id=32)
    body = json.loads(request_body("m", spec))
    assert (body["max_tokens"], body["min_tokens"], body["stop_token_ids"]) == (512, 255, [32])
    assert body["logit_bias"] == {"32": 100}
    plain = json.loads(request_body("m", RequestSpec(key="a", prompt_token_ids=[1], max_tokens=8)))
    assert plain["min_tokens"] == 8 and "stop_token_ids" not in plain and "logit_bias" not in plain


def test_the_threshold_of_stalls_is_the_whole_runs():
    ledger = RunLedger()
    for phase, gaps in (("calm", [2000] * 9), ("busy", [2000, 2000, 50_000])):
        ledger.begin(phase, 20.0)
        ledger.take(phase, result(gaps))
        ledger.take(phase, result(gaps, error=True))
        ledger.take("warmup", result(gaps))
    found = ledger.ledgers()
    assert set(found) == {"calm", "busy"}
    assert {entry.run_median_gap_ns for entry in found.values()} == {2_000_000}
    assert (found["calm"].stalls, found["busy"].stalls, found["busy"].counted) == (0, 1, 1)


def result(gaps, error=False):
    from kvtrial.record.load import RequestError

    return RequestResult(
        key="a", prompt_sha256="", prompt_tokens=1, scheduled_ns=0, sent_ns=10, first_byte_ns=20, first_token_ns=1000,
        last_token_ns=1000 + 1000 * sum(gaps), token_gaps_us=gaps, output_token_ids=[], answer_sha256=None,
        output_tokens=len(gaps) + 1, cached_tokens=None, finish_reason="stop",
        error=RequestError(error_class="idle_timeout", detail="") if error else None,
    )  # fmt: skip
