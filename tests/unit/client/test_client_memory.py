"""Memory stays bounded: what a request leaves behind in the client is a few dozen bytes, however long the phase is."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from kvtrial.host.spool import Spool
from kvtrial.host.stamped_server import running_server
from kvtrial.record.load import LoadSpec, RequestSpec, read_results

REQUESTS = {"stream": (5_000, 20_000), "keep": (2_000, 5_000)}
GROWTH_BYTES_MAX = 150
AT_ONCE = {"first_token_us": 0, "interval_us": 1}

DRIVER = """
import sys
from kvtrial.host import client, dispatch, spool
dispatch.BUFFER_LIMIT_BYTES = 2 << 20  # reached by few requests, so that both runs have reached it
spool.MEMORY_LIMIT_BYTES = 1 << 20
if sys.argv.pop() == "keep":
    kept = []
    send = client.run_load_blocking
    client.run_load_blocking = lambda spec, requests, take: send(
        spec, requests, lambda result: (kept.append(result), take(result)))
status = client.main(sys.argv[1:])
# Not getrusage: that still holds what the parent had when it forked.
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
sys.exit(status)
"""


def lines(count: int) -> Iterator[bytes]:
    for number in range(count):
        request = RequestSpec(
            key=f"request/{number}", prompt_token_ids=[number, 7], max_tokens=2, kv_transfer_params=AT_ONCE
        )
        yield msgspec.json.encode(request) + b"\n"


def peak_bytes(folder: Path, port: int, count: int, how: str) -> int:
    """Peak resident bytes of a process that sends `count` short requests."""
    folder.mkdir()
    load = LoadSpec(
        base_url=f"http://127.0.0.1:{port}",
        model="stamped-server-no-engine",
        concurrency=16,
        idle_timeout_seconds=30,
        request_timeout_seconds=60,
        deadlock_seconds=60,
    )
    (folder / "requests.jsonl").write_bytes(b"".join(lines(count)))
    (folder / "spec.json").write_bytes(msgspec.json.encode({"load": load, "requests": "requests.jsonl"}))
    command = [sys.executable, "-c", DRIVER, folder / "spec.json", folder / "out", how]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = [row["key"] for row in read_results(folder / "out" / "requests.jsonl.zst") if row["error"] is None]
    assert sorted(found) == sorted(f"request/{number}" for number in range(count))
    return int(told.split()[-1]) * 1024


@pytest.mark.parametrize("how", ["stream", "keep"])
def test_memory_does_not_grow_with_the_number_of_requests(tmp_path: Path, how: str) -> None:
    few, many = REQUESTS[how]
    with running_server() as (port, _):
        peaks = [peak_bytes(tmp_path / str(count), port, count, how) for count in (few, many)]
    growth = (peaks[1] - peaks[0]) / (many - few)
    # A client that kept its results is the planted fault: the measure must tell the two apart.
    assert growth > GROWTH_BYTES_MAX if how == "keep" else growth <= GROWTH_BYTES_MAX, f"{growth:.0f} bytes a request"


def test_a_spool_on_disk_and_one_in_memory_hold_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = LoadSpec(
        base_url="http://127.0.0.1:9",
        model="m",
        concurrency=1,
        idle_timeout_seconds=1,
        request_timeout_seconds=1,
        deadlock_seconds=1,
    )
    wanted = [RequestSpec(key=f"k{n}é", prompt_token_ids=[n] * (n + 1), max_tokens=1) for n in range(50)]
    wanted.append(RequestSpec(key="text", prompt_text="a\r\n\r\nb", max_tokens=1))
    held = Spool(spec, wanted, tmp_path)
    monkeypatch.setattr("kvtrial.host.spool.MEMORY_LIMIT_BYTES", 1000)
    spilled = Spool(spec, wanted, tmp_path)
    assert list(tmp_path.iterdir()) == [], "the file has no name"
    assert [held[n] for n in range(51)] == [spilled[n] for n in range(51)]
    assert held.prompts_sha256 == spilled.prompts_sha256
    assert [spilled[n].key for n in range(51)] == [request.key for request in wanted]
    assert (spilled[50].prompt_text(), spilled[49].prompt_text()) == ("a\r\n\r\nb", None)
    spilled.close()
    spilled.close()


def test_a_disk_that_is_full_is_an_error_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtrial.host.spool.MEMORY_LIMIT_BYTES", 0)
    full = Path("/dev/full").open("wb")  # noqa: SIM115
    monkeypatch.setattr("kvtrial.host.spool.tempfile.TemporaryFile", lambda **_: full)
    spec = LoadSpec(
        base_url="http://127.0.0.1:9",
        model="m",
        concurrency=1,
        idle_timeout_seconds=1,
        request_timeout_seconds=1,
        deadlock_seconds=1,
    )
    with pytest.raises(OSError, match="No space left"):
        Spool(spec, [RequestSpec(key="a", prompt_token_ids=[1] * 10_000, max_tokens=1)])
