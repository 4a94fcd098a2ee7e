"""False verdicts under swapped labels: what is counted, what ends the program with 1, and how many pairs it takes."""

from collections import Counter

import msgspec
import pytest
from bench import ladder_swaps
from kvtrial.analysis.faults import Pair
from ladder_build import ladder_records
from msgspec.structs import replace


def rows(better, moved):
    """Of 256 labellings, in so many is a comparison BETTER, and in so many MOVED is said."""
    words = {"a of above_onset": Counter({"BETTER": better, "EQUIVALENT": 256 - better})}
    return ladder_swaps.table(words, Counter({"True": moved, "False": 256 - moved}))


@pytest.mark.parametrize(
    ("better", "moved", "said"),
    [(12, 12, []), (13, 0, ["all comparisons"]), (0, 13, ["delay of again"])],
    ids=["within", "false verdicts", "false MOVED"],
)
def test_more_than_one_in_twenty_false_verdicts_or_false_words_of_the_delay_are_above_the_limit(better, moved, said):
    found = rows(better, moved)
    assert ladder_swaps.above(found) == said
    assert found[-1] == {
        "subject": "delay of again", "metric": "MOVED", "value": moved / 256, "unit": "share of swaps"
    }  # fmt: skip


def test_every_labelling_of_the_pairs_is_looked_at_once():
    pairs = [Pair(number, {"base": number, "again": -number}) for number in (1, 2, 3)]
    found = {tuple(pair.runs["base"] for pair in labelled) for labelled in ladder_swaps.labellings(pairs)}
    assert len(found) == 8 and (1, 2, 3) in found and (-1, -2, -3) in found


def test_a_folder_without_eight_pairs_is_refused_and_leaves_the_result_alone(tmp_path, monkeypatch):
    for run in ladder_records(pairs=2, arms=("base", "again")):
        folder = tmp_path / "runs" / run.run
        folder.mkdir(parents=True)
        (folder / "record.json").write_bytes(msgspec.json.encode(replace(run, protocol="preemption_noise")))
    monkeypatch.setattr(ladder_swaps, "RESULT", tmp_path / "result.json")
    monkeypatch.setattr("sys.argv", ["ladder_swaps.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="holds 2 whole pairs of preemption_noise, 8 are needed"):
        ladder_swaps.main()
    assert not ladder_swaps.RESULT.exists()


@pytest.mark.parametrize(("moved", "status"), [(0, 0), (256, 1)])
def test_what_is_above_the_limit_ends_the_program_with_1(tmp_path, monkeypatch, capsys, moved, status):
    words = {"a of above_onset": Counter({"EQUIVALENT": 256})}
    monkeypatch.setattr(ladder_swaps, "read_pairs", lambda folder: [Pair(number, {}) for number in range(8)])
    monkeypatch.setattr(ladder_swaps, "counted", lambda pairs: (words, Counter({"True": moved, "False": 256 - moved})))
    monkeypatch.setattr(ladder_swaps, "RESULT", tmp_path / "result.json")
    monkeypatch.setattr("sys.argv", ["ladder_swaps.py", "folder"])
    with pytest.raises(SystemExit) as ended:
        ladder_swaps.main()
    assert ended.value.code == status
    assert "8 pairs, 256 labellings" in capsys.readouterr().out
    written = msgspec.json.decode(ladder_swaps.RESULT.read_bytes())
    assert written["rows"][-1]["value"] == moved / 256
