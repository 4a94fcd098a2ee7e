"""What a night sent is a part of what the history knows of it: a change of the request is named, and no riddle."""

import shutil
import statistics
from datetime import datetime
from pathlib import Path

import msgspec
import pandas
import pytest
from build import honest_records
from kvtrial.analysis import campaign
from kvtrial.analysis.drift import changes, workload_of
from kvtrial.analysis.history.reading import read
from kvtrial.analysis.history.store import add
from msgspec.structs import replace
from test_campaign_and_cli import as_planned, write_run
from test_plan import request


class At:
    """A clock that stands: campaigns are called by the second in which they are made."""

    second = 0

    @classmethod
    def now(cls, zone):
        return datetime.fromtimestamp(1_795_000_000 + cls.second, zone)


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(campaign, "datetime", At)
    return At


def slower(record, factor):
    phases = []
    for phase in record.phases:
        requests = [
            replace(r, ttft_seconds=None if r.ttft_seconds is None else r.ttft_seconds * factor) for r in phase.requests
        ]
        times = [r.ttft_seconds for r in requests if r.error_class is None and r.ttft_seconds is not None]
        phases.append(
            replace(phase, requests=requests, ttft_median_seconds=statistics.median(times) if times else None)
        )
    return replace(record, phases=phases)


def ran(results: Path, hosts: tuple[str, ...] = ("h1",), factor: float = 1.0, **changes) -> Path:
    """A campaign of that request on these hosts, fetched whole."""
    asked = request(**changes)
    asked |= {"hosts": dict.fromkeys(hosts, asked["hosts"]["h1"]), "results_dir": str(results)}
    directory = Path(campaign.prepare(asked)["directory"])
    for host in hosts:
        for record in as_planned(directory, honest_records(host=host), host):
            write_run(directory / "runs" / host / record.run, slower(record, factor))
        campaign.collect(str(directory), host, None, {"state": "finished"})
    return directory


def night(number: int) -> str:
    return f"2026-11-{number:02}"


def test_a_change_of_the_request_is_what_changed_that_night(tmp_path, clock):
    for number in range(1, 10):
        clock.second = number
        sizes = {"concurrency": 2} if number == 9 else {"concurrency": 1}
        factor = (1.4 if number == 9 else 1.0) * (1 + 0.002 * (-1) ** number)
        add(tmp_path / "s", ran(tmp_path / str(number), factor=factor, sizes=sizes), night(number))
    [alarm] = [c for c in read(tmp_path / "s").new_alarms if (c.kind, c.phase) == ("control", "return")]
    assert alarm.pins_changed == {"workload": ["concurrency=1", "concurrency=2"]}
    assert "rose 40 % on host h1 on 9 Nov; workload concurrency=1 → concurrency=2 that night" in alarm.sentence


def told(directory: Path) -> str:
    store = directory.parent / "s"
    add(store, directory, night(1))
    [path] = store.glob("*/*/*.parquet")
    [text] = set(pandas.read_parquet(path)["settings"])
    path.unlink()
    return msgspec.json.decode(text)["workload"]


@pytest.mark.parametrize(
    ("asked", "was", "now"),
    [
        ({"sizes": {"output_tokens": 8}}, "output_tokens=6", "output_tokens=8"),
        ({"sizes": {"tier_bytes": 2**29}}, f"tier_bytes={2**28}", f"tier_bytes={2**29}"),
        ({"arms": ["control", "offload"]}, "", ""),
        ({"seed": 2}, "", ""),
        ({"pairs": 8}, "", ""),
    ],
)
def test_what_is_sent_is_told_apart_and_nothing_else(tmp_path, clock, asked, was, now):
    before = told(ran(tmp_path / "a"))
    clock.second += 1
    after = told(ran(tmp_path / "b", **asked))
    found = changes({"workload": before}, {"workload": after})
    assert found == ({"workload": (was, now)} if was else {})


def test_a_store_of_an_earlier_release_did_not_tell_the_request_and_that_is_no_change(tmp_path, clock):
    for number in (1, 2):
        clock.second = number
        add(tmp_path / "s", ran(tmp_path / str(number)), night(number))
    path = next((tmp_path / "s").glob("*/night=2026-11-01/*.parquet"))
    frame = pandas.read_parquet(path)
    older = {n: v for n, v in msgspec.json.decode(frame["settings"][0]).items() if n != "workload"}
    frame["settings"] = msgspec.json.encode(older).decode()
    frame.to_parquet(path, index=False)
    from kvtrial.analysis.history.reading import _changes_at, _settings
    from kvtrial.analysis.history.store import files_of, nights_of

    settings = _settings(nights_of(files_of(tmp_path / "s"), "pandas")[1])
    assert "workload" in settings["offload_return", "h1"][night(2)]
    assert _changes_at(settings, "offload_return", "h1", night(2)) == {}


def test_salts_and_seeds_are_no_part_of_what_is_sent():
    def runs(salt, tokens=8, arm="control"):
        prompts = {"name": "targets", "seed": salt, "count": 4, "tokens": tokens}
        return [{"arm": arm, "phases": [{"name": "return", "salt": salt, "concurrency": 1, "prompts": prompts}]}]

    def told_of(planned):
        return workload_of({"runs": planned, "capacity": {"tier_bytes": {}, "chunk_tokens": {}}}, "control", {})

    one = told_of(runs("a"))
    assert one == told_of(runs("b")) != told_of(runs("a", 9))
    assert one == told_of([*runs("a"), *runs("a", 8, "offload")])
    assert one != told_of([*runs("a"), *runs("a", 9, "offload")]), "an arm with sizes of its own"
    assert told_of([{"arm": "control", "phases": []}]) == ""


def hosts_in(store: Path) -> list[str]:
    return sorted({host for path in store.glob("*/*/*.parquet") for host in pandas.read_parquet(path)["host"]})


def test_two_controllers_that_plan_in_one_second_lose_no_host_of_each_other_in_a_history(tmp_path, clock):
    one, other = ran(tmp_path / "a", ("h1", "h2")), ran(tmp_path / "b", ("h3",))
    assert one.name == other.name
    for part in (one, other, one, one):
        add(tmp_path / "s", part)
    assert hosts_in(tmp_path / "s") == ["h1", "h2", "h3"]
    [made] = read(tmp_path / "s").nights
    shutil.rmtree(one / "runs" / "h2")
    assert add(tmp_path / "s", one, night(1)).replaced == 1
    assert hosts_in(tmp_path / "s") == ["h1", "h3"], "what the plan has and has no records any more leaves"
    assert read(tmp_path / "s").nights == [night(1), made]
    shutil.rmtree(one / "runs" / "h1")
    add(tmp_path / "s", one)
    assert hosts_in(tmp_path / "s") == ["h3"]
