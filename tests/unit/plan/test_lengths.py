"""Lines over the prompt's length, and from which length on an arm is sooner. Same data as committed: same figures."""

import json
import random
import tarfile
from pathlib import Path

import msgspec
import pytest
from build import honest_records
from kvtrial.analysis import campaign
from kvtrial.analysis.cli import main
from kvtrial.analysis.lengths import NEVER, crossing, line, root_between, root_of_line
from kvtrial.record.verdict import Verdict
from test_campaign_and_cli import concluded

RESULTS = Path(__file__).parents[3] / "docs" / "results" / "h200-2026-11-29"
TOKENS = [2056, 8200, 16392]


def on_lines(*lines):
    """A run a line: (seconds at no token, seconds a token)."""
    return [[start + slope * tokens for tokens in TOKENS] for start, slope in lines]


def test_exact_lines_are_found_again_and_cross_where_they_should():
    control = on_lines(*[(0.010, 8e-6)] * 6)
    offload = on_lines(*[(0.030, 4e-6)] * 6)
    fitted = line("offload", TOKENS, offload)
    assert fitted.intercept_seconds.estimate == pytest.approx(0.030)
    assert fitted.seconds_per_token.estimate == pytest.approx(4e-6)
    assert fitted.misfit_seconds < 1e-12 and abs(fitted.bend_seconds) < 1e-12
    for root in (root_of_line, root_between):
        found = crossing(TOKENS, offload, control, root)
        assert (found.tokens, found.low, found.high) == pytest.approx((5000, 5000, 5000))


def test_six_pairs_give_the_range_of_their_crossings_at_96_9_percent():
    control = on_lines(*[(0.0, 8e-6)] * 6)
    offload = on_lines(*[(start * 4e-6, 4e-6) for start in (3000, 4000, 5000, 6000, 7000, 9000)])
    found = crossing(TOKENS, offload, control, root_of_line)
    assert (found.low, found.high) == pytest.approx((3000, 9000))
    assert found.confidence == pytest.approx(0.96875)
    assert 5000 < found.tokens < 6000


@pytest.mark.parametrize("root", [root_of_line, root_between])
def test_an_arm_that_is_always_or_never_sooner_is_said_to_be(root):
    slow, fast = on_lines(*[(0.030, 8e-6)] * 6), on_lines(*[(0.010, 4e-6)] * 6)
    assert crossing(TOKENS, fast, slow, root).tokens == 0
    assert crossing(TOKENS, slow, fast, root).tokens == NEVER


def test_a_pair_without_a_crossing_leaves_the_interval_open():
    control = on_lines(*[(0.0, 8e-6)] * 6)
    offload = on_lines(*[(0.020, 4e-6)] * 5, (0.020, 9e-6))
    found = crossing(TOKENS, offload, control, root_of_line)
    assert found.tokens == pytest.approx(5000, rel=0.2) and found.high == NEVER


def test_a_bend_is_measured_and_interpolation_does_not_mind_it():
    bent = [[0.030, 0.070, 0.150]] * 6
    assert line("control", TOKENS, bent).bend_seconds < -0.005
    flat = [[0.060, 0.060, 0.060]] * 6
    assert crossing(TOKENS, flat, bent, root_between).tokens == pytest.approx(2056 + 6144 * 0.75)


def test_the_interval_holds_the_true_length_as_often_as_it_says():
    noise = random.Random(1)
    held = 0
    for _ in range(400):
        control = [[v + noise.gauss(0, 0.004) for v in run] for run in on_lines(*[(0.010, 8e-6)] * 6)]
        offload = [[v + noise.gauss(0, 0.004) for v in run] for run in on_lines(*[(0.030, 4e-6)] * 6)]
        found = crossing(TOKENS, offload, control, root_of_line)
        held += found.low <= 5000 <= found.high
    assert 0.94 < held / 400 < 0.99  # 96.9 % asked, 2 standard errors are 1.7


def test_one_length_is_refused_in_a_sentence(tmp_path, capsys):
    directory = concluded(tmp_path, honest_records())
    assert main(["fit-lengths", str(directory)]) == 2
    assert "a line needs at least two" in capsys.readouterr().err


def same(found, wanted):
    """Equal but for the last digits of numbers, which differ between Pythons."""
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(same(*both) for both in zip(found, wanted, strict=True))
    return found == (pytest.approx(wanted, rel=1e-9) if isinstance(wanted, float) else wanted)


def test_from_an_invalid_campaign_no_length_is_drawn(tmp_path, capsys, monkeypatch):
    broken = json.loads((RESULTS / "offload-8b" / "verdict.json").read_text())
    broken["hosts"][0] |= {"verdict": "INVALID"}
    broken |= {"verdict": "INVALID", "reason": "gate undisturbed failed"}
    monkeypatch.setattr(campaign, "analyze", lambda _: msgspec.convert(broken, Verdict))
    assert main(["fit-lengths", str(RESULTS / "offload-8b")]) == 2
    assert "is INVALID (gate undisturbed failed)" in capsys.readouterr().err


def test_the_committed_fit_is_that_of_the_committed_campaigns(tmp_path, capsys):
    folders = []
    for name in ("offload-0.6b", "offload-8b"):
        with tarfile.open(RESULTS / name / "campaign.tar.xz") as archive:
            archive.extractall(tmp_path / name, filter="data")
        folders.append(str(tmp_path / name / "whole"))
    assert main(["fit-lengths", *folders, "--json", "--plot", str(tmp_path / "lengths.svg")]) == 0
    assert same(json.loads(capsys.readouterr().out), json.loads((RESULTS / "lengths.json").read_text()))
    assert "<svg" in (tmp_path / "lengths.svg").read_text()
    assert main(["fit-lengths", *folders]) == 0
    said = capsys.readouterr().out
    assert "qwen3-8b-random" in said and "(extrapolated)" in said
