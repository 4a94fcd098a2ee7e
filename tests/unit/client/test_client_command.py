"""The client as a command: a load from files, results and an account of them in a folder."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from kvtrial.host.client import main
from kvtrial.record.load import RequestResult, RequestSpec, read_results
from loading import spec_for
from stamped_server import StampedServer


def written(folder: Path, url: str, name: str = "requests.jsonl", **changes: Any) -> Path:
    requests = b"".join(
        msgspec.json.encode(RequestSpec(key=f"r{n}", prompt_token_ids=[n], max_tokens=3)) + b"\n" for n in range(4)
    )
    (folder / name).write_bytes(zstandard.compress(requests) if name.endswith(".zst") else requests)
    load = msgspec.to_builtins(spec_for(url, 2)) | changes
    (folder / "spec.json").write_text(json.dumps({"load": load, "requests": name}))
    return folder / "spec.json"


@pytest.mark.parametrize("name", ["requests.jsonl", "requests.jsonl.zst"])
def test_a_load_from_files_leaves_results_and_an_account(tmp_path: Path, name: str) -> None:
    with StampedServer() as server:
        assert main([str(written(tmp_path, server.base_url, name)), str(tmp_path / "out")]) == 0
    rows = list(read_results(tmp_path / "out" / "requests.jsonl.zst"))
    assert {row.pop("phase") for row in rows} == {"load"}
    assert sorted(msgspec.convert(row, RequestResult).key for row in rows) == ["r0", "r1", "r2", "r3"]
    report = json.loads((tmp_path / "out" / "outcome.json").read_text())
    card = report["outcome"]["card"]
    assert (report["outcome"]["sent"], report["chunks"]) == (4, card["chunks"])
    assert card["chunks"] >= 4
    assert report["cpu_seconds"] >= card["client_cpu_seconds"] > 0
    assert report["wall_seconds"] >= report["outcome"]["seconds"] > 0


def test_what_cannot_be_used_is_said_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main([str(tmp_path / "none.json"), str(tmp_path)]) == 2
    assert main([str(written(tmp_path, "http://10.0.0.1:1")), str(tmp_path / "out")]) == 2
    bad = written(tmp_path, "http://127.0.0.1:9")
    (tmp_path / "requests.jsonl").write_text('{"key": "a", "max_tokens": 1}\n{"no": 1}\n')
    assert main([str(bad), str(tmp_path / "out")]) == 2
    bad.write_text('{"load": 7}')
    assert main([str(bad), str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 5
    for words, line in zip(
        ["usage", "none.json", "on this host only", "exactly one of", "is no load"], told, strict=True
    ):
        assert words in line
    assert not (tmp_path / "out" / "requests.jsonl.zst").exists()
