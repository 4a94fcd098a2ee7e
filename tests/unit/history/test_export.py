"""`kvtrial export`: a history or a campaign's requests as one file."""

import pandas
import pytest
from history_build import campaign_on, night, store_of
from kvtrial.analysis import exportrows
from kvtrial.analysis.cli import main
from kvtrial.record.load import RequestError, RequestResult, write_results


def result(number, **changes):
    fields = {
        "key": f"k{number}", "prompt_sha256": "a" * 64, "prompt_tokens": 10, "scheduled_ns": 0, "sent_ns": 5,
        "first_byte_ns": 7, "first_token_ns": 9, "last_token_ns": 20, "token_gaps_us": [11], "output_token_ids": [1, 2],
        "answer_sha256": "b" * 64, "output_tokens": 2, "cached_tokens": None, "finish_reason": "length", "error": None,
    }  # fmt: skip
    return RequestResult(**(fields | changes))


@pytest.fixture
def campaign(tmp_path):
    return campaign_on(tmp_path / "results", night(0), ("g01",))


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_a_history_becomes_one_table(tmp_path, suffix, capsys):
    store_of(tmp_path / "s", nights=2)
    output = tmp_path / f"all.{suffix}"
    assert main(["export", str(tmp_path / "s"), "--format", suffix, "--output", str(output)]) == 0
    frame = pandas.read_parquet(output) if suffix == "parquet" else pandas.read_csv(output)
    assert f"{len(frame):,} rows" in capsys.readouterr().out
    assert set(frame["night"]) == {night(0), night(1)} and set(frame["host"]) == {"g01", "g03", "g07", "g09"}
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["s", output.name])


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_the_requests_of_a_campaign_become_one_table(campaign, tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(exportrows, "BATCH_ROWS", 3)
    failed = RequestError(error_class="connection_reset", detail="x")
    results = [("return", result(n)) for n in range(7)] + [("miss", result(7, error=failed, first_token_ns=None))]
    write_results(campaign / "runs" / "g01" / "p01-1-control" / "requests.jsonl.zst", results)
    output = tmp_path / f"r.{suffix}"
    assert main(["export", str(campaign), "--requests", "--format", suffix, "--output", str(output)]) == 0
    frame = pandas.read_parquet(output) if suffix == "parquet" else pandas.read_csv(output)
    assert list(frame["key"]) == [f"k{n}" for n in range(8)]
    assert set(frame["run"]) == {"p01-1-control"} and frame["error_class"].dropna().tolist() == ["connection_reset"]


def test_bad_input_is_one_sentence_and_leaves_nothing(campaign, tmp_path, capsys):
    csv, requests = ["--format", "csv"], ["--requests", "--format", "csv"]
    for arguments, said in (
        ([str(campaign), "--requests", "--format", "json", "-o", "x"], "written as csv or parquet"),
        ([str(campaign), *requests], "give -o FILE"),
        ([str(campaign), *requests, "-o", str(tmp_path / "x.csv")], "stayed on the hosts"),
        ([str(tmp_path / "none"), *csv, "-o", str(tmp_path / "x.csv")], "holds no campaign.json"),
        ([str(campaign), str(tmp_path), *csv, "-o", str(tmp_path / "x.csv")], "one campaign is exported at a time"),
        ([str(campaign), str(tmp_path), *requests, "-o", str(tmp_path / "x.csv")], "holds no campaign.json"),
        ([str(campaign), *csv, "-o", str(tmp_path / "no" / "x.csv")], "can't be"),
    ):
        assert main(["export", *arguments]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["results"]


def test_a_damaged_file_of_requests_is_named(campaign, tmp_path, capsys):
    (campaign / "runs" / "g01" / "p01-1-control" / "requests.jsonl.zst").write_bytes(b"nothing of the kind")
    assert main(["export", str(campaign), "--requests", "--format", "parquet", "-o", str(tmp_path / "x.parquet")]) == 2
    assert "requests.jsonl.zst is not a whole zstandard file" in capsys.readouterr().err
