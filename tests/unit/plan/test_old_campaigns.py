"""A campaign of an earlier release is read, keeps its hashes and gives the verdict that it gave."""

import hashlib
import subprocess
import sys
import tarfile
from pathlib import Path

import msgspec
import pytest
from kvtrial.analysis.campaign import analyze, read_campaign
from kvtrial.record.plan import canonical_json, plan_sha256

RESULTS = Path(__file__).parents[3] / "docs" / "results" / "h200-2026-11-29"
TWO_GPUS = RESULTS.parent / "h200-x2-2026-11-30" / "ladder-tp2"
ARCHIVE = RESULTS / "offload-0.6b" / "campaign.tar.xz"


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder / "whole"


def test_its_plan_keeps_its_bytes_and_hash_though_it_has_a_limit_that_is_gone(campaign):
    read = read_campaign(campaign)
    assert plan_sha256(read.plan) == read.plan_sha256
    for host in read.plan.hosts:
        assert host.limits.foreign_cpu_share_max == 0.5
        shipped = (campaign / "plans" / f"{host.host}.json").read_bytes()
        assert canonical_json(host) == shipped
        assert plan_sha256(host) == hashlib.sha256(shipped).hexdigest()


def test_its_records_give_the_verdict_they_gave(campaign):
    """Later releases may add fields and caveats and say more of a gate; nothing else that was there may change."""
    then = msgspec.json.decode((campaign / "verdict.json").read_bytes())
    now = msgspec.to_builtins(analyze(campaign))
    assert list(_changed(then, now, "verdict")) == []


def test_the_three_arms_of_the_layout_campaign_give_the_committed_verdict(tmp_path):
    with tarfile.open(RESULTS / "layout" / "campaign.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    now = msgspec.to_builtins(analyze(tmp_path / "layout" / "campaign"))
    committed = msgspec.json.decode((RESULTS / "layout" / "verdict.json").read_bytes())
    assert list(_changed(committed, now, "verdict")) == []
    assert now["verdict"] == "EQUIVALENT" and now["evidence"] == "gpu"
    assert now["recommendation"]["action"] == "keep the control (no KV connector)"
    on_the_machine = msgspec.json.decode((RESULTS / "layout" / "verdict-on-the-machine.json").read_bytes())
    assert [line.split(":")[0] for line in _changed(on_the_machine, committed, "verdict")] == [
        "verdict.recommendation.action"
    ]


def test_the_layout_pages_numbers_are_those_of_its_records():
    script = [sys.executable, str(RESULTS / "layout" / "arms.py"), str(RESULTS / "layout")]
    made = subprocess.run(script, capture_output=True, text=True, check=True).stdout.splitlines()
    committed = (RESULTS / "layout" / "numbers.csv").read_text().splitlines()
    assert len(made) == len(committed)
    for found, wanted in zip(made, committed, strict=True):
        for cell, other in zip(found.split(","), wanted.split(","), strict=True):
            assert cell == other or float(cell) == pytest.approx(float(other), rel=1e-4)


def test_the_ladder_on_two_gpus_gives_the_committed_verdict(tmp_path):
    with tarfile.open(TWO_GPUS / "campaign.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    now = msgspec.to_builtins(analyze(tmp_path / "ladder-tp2" / "campaign"))
    committed = msgspec.json.decode((TWO_GPUS / "verdict.json").read_bytes())
    # Its sentences may become others; words, effects, gates and levels may not.
    for name in ("verdict", "evidence", "comparisons", "gates"):
        assert list(_changed(_rounded(committed[name]), _rounded(now[name]), name)) == []
    for then, arm in zip(committed["ladder"]["arms"], now["ladder"]["arms"], strict=True):
        for name in ("arm", "levels", "onset_predicted", "onset_measured", "moved"):
            assert list(_changed(_rounded(then[name]), _rounded(arm[name]), name)) == []
    onsets = {arm["arm"]: (arm["onset_predicted"], arm["onset_measured"]) for arm in now["ladder"]["arms"]}
    assert onsets == {"base": ([10, 10], 10), "second_replica": ([19, 19], 19), "tensor_parallel": ([20, 20], 20)}
    assert {gate["passed"] for gate in now["gates"]} == {True}


def _rounded(value):
    """A verdict with nine digits of each number: another Python's sums differ in the last."""
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def _changed(then, now, path):
    if isinstance(then, dict) and isinstance(now, dict):
        for key, value in then.items():
            yield from _changed(value, now.get(key, "gone"), f"{path}.{key}")
    elif path.endswith(".caveats"):
        yield from (f"{path}: {caveat!r} is gone" for caveat in then if caveat not in now)
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for index, (a, b) in enumerate(zip(then, now, strict=True)):
            yield from _changed(a, b, f"{path}[{index}]")
    elif then != now and not path.endswith("].detail"):
        yield f"{path}: {then!r} became {now!r}"
