"""Result files of other load clients.

The files are real: each client against a server of known timing, first tokens after 50 ms (a) and 30 ms (b).
"""

import json
import random
from pathlib import Path

import pytest
from kvtrial.analysis.cli import main
from kvtrial.analysis.judge import judge
from kvtrial.analysis.judge.peers import METRICS, read_file, read_pairs
from kvtrial.record.errors import UnusableInput

PEERS = Path(__file__).parents[2] / "fixtures" / "peers"
FILES = {
    "vllm bench serve": ("vllm-bench-0.32.0-a.json", "vllm-bench-0.32.0-b.json"),
    "guidellm": ("guidellm-0.8.1-a.json", "guidellm-0.8.1-b.json"),
    "aiperf": ("aiperf-0.13.0-a.jsonl", "aiperf-0.13.0-b.jsonl"),
}


@pytest.mark.parametrize("client", FILES)
@pytest.mark.parametrize("name", METRICS)
def test_every_client_gives_six_requests_and_times_that_fit_the_server(client: str, name):
    slow, fast = (read_file(PEERS / file, name) for file in FILES[client])
    assert slow.client == fast.client == client
    assert (slow.run.sent, slow.run.completed, slow.run.failed) == (6, 6, 0)
    least = {"ttft_ms": 50, "itl_ms": 5, "e2e_ms": 70}[name]
    assert least <= slow.run.value < 250
    if name != "itl_ms":
        assert fast.run.value < slow.run.value


@pytest.mark.parametrize("client", FILES)
def test_pairs_of_files_go_through_the_same_statistics(client: str):
    slow, fast = (PEERS / file for file in FILES[client])
    answer = judge(read_pairs([slow], [fast], "ttft_ms", 5.0))
    assert (answer.verdict, answer.class_) == ("INCONCLUSIVE", "too_few_pairs")
    assert answer.comparison is not None and answer.comparison.effect < 1
    assert any("no counters of the server" in note for note in answer.notes)


@pytest.mark.parametrize("client", FILES)
def test_the_order_is_read_from_the_files_own_times(client: str):
    slow, fast = (PEERS / file for file in FILES[client])
    assert read_pairs([slow], [fast], "ttft_ms", 5.0).pairs[0].order == ["control", "variant"]
    assert read_pairs([fast], [slow], "ttft_ms", 5.0).pairs[0].order == ["variant", "control"]


def many(tmp_path: Path, ratio: float, **change) -> tuple[list[Path], list[Path]]:
    """Eight pairs of vllm bench serve files, made from a real one, each request with noise of its own."""
    base = json.loads((PEERS / FILES["vllm bench serve"][0]).read_text())
    rng = random.Random(3)
    made: dict[str, list[Path]] = {"control": [], "variant": []}
    for number in range(8):
        for arm in made:
            late = (arm == "variant") == (number % 4 in (0, 3))
            scale = (ratio if arm == "variant" else 1.0) * (1 + 0.002 * ((number * 7) % 5))
            raw = base | {"ttfts": [scale * value * rng.uniform(0.98, 1.02) for value in base["ttfts"]]}
            raw["date"] = f"20261129-{10 + number:02d}{30 if late else 10}00"
            raw["input_lens"] = [5 + (number + index) % 7 for index in range(6)]
            path = tmp_path / f"{arm}-{number}.json"
            path.write_text(json.dumps(raw | change))
            made[arm].append(path)
    return made["control"], made["variant"]


def test_a_difference_shown_by_peers_files_is_shown_and_its_cause_is_not(tmp_path):
    answer = judge(read_pairs(*many(tmp_path, 0.6), "ttft_ms", 5.0))
    assert (answer.verdict, answer.class_) == ("BETTER", "improvement_valid")
    assert answer.findings[0].confidence == "inferred"
    assert "not proved" in answer.findings[0].reason


def test_the_same_lengths_in_every_run_are_a_sign_of_one_seed(tmp_path):
    same = many(tmp_path, 0.6, input_lens=[5, 6, 7, 5, 6, 9])
    assert any("#52884" in note for note in read_pairs(*same, "ttft_ms", 5.0).notes)
    assert not any("#52884" in note for note in read_pairs(*many(tmp_path, 0.6), "ttft_ms", 5.0).notes)


def test_failed_requests_of_a_peer_drop_the_pair_and_their_zeros_are_no_times(tmp_path):
    control, variant = many(tmp_path, 0.6)
    raw = json.loads(variant[2].read_text())
    raw["errors"][0], raw["ttfts"][0], raw["failed"], raw["completed"] = "timeout", 0.0, 1, 5
    variant[2].write_text(json.dumps(raw))
    assert len(read_file(variant[2], "ttft_ms").run.values) == 5
    assert judge(read_pairs(control, variant, "ttft_ms", 5.0)).class_ == "invalid_pairs_removed"


def test_files_of_two_clients_are_not_compared():
    with pytest.raises(UnusableInput, match="clients measure times differently"):
        read_pairs([PEERS / FILES["guidellm"][0]], [PEERS / FILES["aiperf"][1]], "ttft_ms", 5.0)


def test_unequal_numbers_of_files_make_no_pairs():
    slow, fast = (PEERS / file for file in FILES["guidellm"])
    with pytest.raises(UnusableInput, match="make no pairs"):
        read_pairs([slow, slow], [fast], "ttft_ms", 5.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"median_ttft_ms": 3.0, "completed": 6}', "without --save-detailed"),
        ('{"benchmarks": [{}, {}]}', "2 benchmarks"),
        ('{"benchmarks": [{"requests": {"successful": []}}]}', "no request that ended well"),
        ('{"ttfts": [1]}\n{"ttfts": [1]}', "holds 2 results"),
        ('{"something": 1}', "no result file"),
        ("<html>", "not JSON"),
    ],
)
def test_other_files_are_refused_with_what_they_are(text: str, says: str, tmp_path):
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(UnusableInput, match=says):
        read_file(tmp_path / "file.json", "ttft_ms")


def test_aiperfs_summary_is_refused_and_the_right_file_named():
    with pytest.raises(UnusableInput, match=r"profile_export\.jsonl"):
        read_file(PEERS / "aiperf-0.13.0-summary.json", "ttft_ms")


def test_the_command_takes_pairs_of_files(tmp_path, capsys):
    control, variant = many(tmp_path, 0.6)
    argv = ["judge", "--control", *map(str, control), "--variant", *map(str, variant), "--margin", "10", "--json"]
    assert main(argv) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["verdict"], answer["comparison"]["margin"]) == ("BETTER", 0.1)
