"""Several engines of an arm: who gets a request, what is read of all together, and how they start and end as one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from kvtrial.host.load.client import run_load_blocking
from kvtrial.host.phases import Scrape, together, write_scrapes
from kvtrial.host.pressure import all_reset, read_gauges, series_of
from kvtrial.host.replicas import ReplicaStart, launcher
from kvtrial.record.errors import UnusableInput
from kvtrial.record.load import RequestResult, RequestSpec
from kvtrial.record.pressure import ResetFact
from loading import spec_for
from stamped_server import Script, StampedServer


def send(first: StampedServer, second: StampedServer, count: int, concurrency: int | None) -> list[RequestResult]:
    found: list[RequestResult] = []
    scheduled = None if concurrency else 0.0
    wanted = [
        RequestSpec(key=f"r{n}", prompt_token_ids=[n, 1, 2], max_tokens=3, scheduled_seconds=scheduled)
        for n in range(count)
    ]
    spec = msgspec.structs.replace(spec_for(first.base_url, concurrency), also_urls=[second.base_url])
    run_load_blocking(spec, wanted, found.append)
    return found


@pytest.mark.parametrize(("concurrency", "most"), [(1, (1, 0)), (2, (1, 1)), (5, (3, 2)), (None, (4, 4))])
def test_a_request_goes_to_the_engine_with_the_fewest_in_flight(concurrency, most):
    script = Script(token_groups=((5,), (6,)), first_seconds=0.1, gap_seconds=0.01)
    with StampedServer(lambda body: script) as first, StampedServer(lambda body: script) as second:
        results = send(first, second, 8, concurrency)
    assert len(results) == len(first.served) + len(second.served) == 8
    assert all(result.error is None for result in results)
    assert (first.in_flight_max, second.in_flight_max) == most


def test_a_slow_engine_gets_fewer():
    slow, fast = Script(token_groups=((5,),), first_seconds=1.0), Script(token_groups=((5,),), first_seconds=0.02)
    with StampedServer(lambda body: slow) as first, StampedServer(lambda body: fast) as second:
        send(first, second, 10, 2)
    assert len(first.served) < len(second.served)
    assert first.in_flight_max == second.in_flight_max == 1


def test_an_engine_that_is_not_on_loopback_is_refused_among_others_too():
    with StampedServer(lambda body: Script()) as server:
        spec = msgspec.structs.replace(spec_for(server.base_url), also_urls=["http://10.0.0.1:8000"])
        with pytest.raises(UnusableInput, match=r"10\.0\.0\.1"):
            run_load_blocking(spec, [RequestSpec(key="a", prompt_token_ids=[1], max_tokens=1)], lambda result: None)


def test_counts_are_added_up_the_fullest_cache_is_shown_and_what_one_lacks_is_unknown(tmp_path: Path):
    def scrape(text: str, **values: float | None) -> Scrape:
        return Scrape(text, values, [f"caveat of {text}"], 0.5)

    both = together(
        [
            scrape("a", preemptions=2.0, kv_cache_usage_share=0.5, load_bytes=None),
            scrape("b", preemptions=3.0, kv_cache_usage_share=0.9, load_bytes=7.0),
        ]
    )
    assert both.values == {"preemptions": 5.0, "kv_cache_usage_share": 0.9, "load_bytes": None}
    assert (both.caveats, both.seconds) == (["caveat of a", "caveat of b"], 1.0)
    write_scrapes(tmp_path / "metrics", "load_1", both, scrape("c"))
    assert {path.name: path.read_text() for path in (tmp_path / "metrics").iterdir()} == {
        "load_1.before.prom": "a",
        "load_1.before.2.prom": "b",
        "load_1.after.prom": "c",
    }


def test_pages_of_two_engines_are_read_as_one():
    page = b'\nvllm:num_requests_running{engine="0"} 4\nvllm:kv_cache_usage_perc{engine="0"} 0.5\n'
    other = b'\nvllm:num_requests_running{engine="0"} 3\nvllm:kv_cache_usage_perc{engine="0"} 0.7\n'
    found = read_gauges(page + b"\n" + other, series_of("0.32.0"))
    assert (found["requests_running"], found["kv_cache_usage_share"]) == (7.0, 0.7)


def test_a_reset_succeeded_where_every_engine_says_so():
    good, bad = ResetFact(True, False, 1, 0.1), ResetFact(False, False, 40, 4.0, "status 500")
    assert all_reset([good]) == good
    both = all_reset([good, bad])
    assert (both.succeeded, both.tries, both.detail) == (False, 40, "status 500")
    assert all_reset([good, good]).succeeded


def _started(tmp_path: Path, scripts: list[str]) -> subprocess.Popen[bytes]:
    starts = [ReplicaStart([sys.executable, "-c", script], dict(os.environ)) for script in scripts]
    (tmp_path / "replicas.json").write_bytes(msgspec.json.encode(starts))
    return subprocess.Popen(launcher(tmp_path / "replicas.json"), env=dict(os.environ))


def test_an_engine_that_ends_ends_the_others_and_gives_its_status(tmp_path: Path):
    told = tmp_path / "told"
    waits = (
        "import signal, sys, time\n"
        f"def end(*_): open({json.dumps(str(told))}, 'w').write('asked to end'); sys.exit(0)\n"
        f"signal.signal(signal.SIGTERM, end); open({json.dumps(str(told))}, 'w').write('up'); time.sleep(60)"
    )
    ends = (
        f"import os, time\nwhile not os.path.exists({json.dumps(str(told))}): time.sleep(0.01)\n"
        "time.sleep(0.1); raise SystemExit(7)"
    )
    assert _started(tmp_path, [waits, ends]).wait(30) == 7
    assert told.read_text() == "asked to end"


def test_asked_to_end_it_ends_all(tmp_path: Path):
    up = [tmp_path / name for name in ("a", "b")]
    engines = _started(
        tmp_path,
        [f"import time; open({json.dumps(str(file))}, 'w').write(str(1)); time.sleep(60)" for file in up],
    )
    until = time.monotonic() + 20
    while not all(file.exists() for file in up) and time.monotonic() < until:
        time.sleep(0.02)
    engines.send_signal(signal.SIGTERM)
    assert engines.wait(20) == -signal.SIGTERM or engines.returncode != 0
