"""The history: planted changes are found on their night with their cause, and a quiet store stays quiet."""

import fcntl
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import history_build
import msgspec
import numpy
import pandas
import pytest
from build import honest_records, protocol
from history_build import HOSTS, NIGHTS, campaign_on, night, plant, store_of
from kvtrial.analysis.campaign import conclude
from kvtrial.analysis.cli import main
from kvtrial.analysis.history import ALL_HOSTS
from kvtrial.analysis.history.changepoints import Nightly, best_split, changed, told_from
from kvtrial.analysis.history.command import to_textfile
from kvtrial.analysis.history.reading import read
from kvtrial.analysis.history.store import add, files_of, nights_of, rows_of
from kvtrial.analysis.history.told import remember
from kvtrial.analysis.verdict import conclude as conclude_verdict
from kvtrial.record.errors import UnusableInput
from kvtrial.record.protocol import Nights
from msgspec.structs import replace


def ttft_of(history, host):
    """Changes of the control's TTFT of the return, the primary comparison's, in time order."""
    wanted = (host, "control", "return", "ttft_median_seconds")
    return sorted((c for c in history.changes if (c.host, c.kind, c.phase, c.metric) == wanted), key=lambda c: c.night)


def test_a_planted_rise_of_the_control_is_found_on_its_night_with_its_cause(tmp_path):
    store_of(tmp_path, plant("g07", night(13), control=1.12, driver="580.159"))
    found = read(tmp_path)
    levels = ttft_of(found, "g07")
    assert len(levels) == 1
    assert (levels[0].night, levels[0].before_night) == (night(13), night(12))
    assert levels[0].ratio == pytest.approx(1.12, rel=0.02)
    assert levels[0].pins_changed == {"driver": ["580.126", "580.159"]}
    assert levels[0].worse and levels[0].alarm
    assert levels[0].sentence == (
        "TTFT of the control (return) rose 12 % on host g07 on 14 Nov; driver 580.126 → 580.159 that night"
    )
    assert {c.host for c in found.alarms} == {"g07"}


def test_a_change_of_the_effect_is_told_from_one_of_the_control(tmp_path):
    store_of(tmp_path, plant("g03", night(10), effect=1.3))
    found = [c for c in read(tmp_path).changes if c.host == "g03"]
    assert {(c.kind, c.night) for c in found} == {("effect", night(10))}
    assert all("nothing recorded changed that night" in c.sentence for c in found)
    assert found[0].to_value / found[0].from_value == pytest.approx(1.3, rel=0.03)


def test_what_all_hosts_do_is_a_change_of_the_fleet(tmp_path):
    store_of(tmp_path, *(plant(host, night(12), control=0.9, kernel="6.9") for host in ("g01", "g03", "g07", "g09")))
    (found,) = ttft_of(read(tmp_path), ALL_HOSTS)
    assert (found.night, found.pins_changed) == (night(12), {"kernel": ["6.8", "6.9"]})
    assert not found.worse and not found.alarm
    assert "fell 10 % over the fleet on 13 Nov; kernel 6.8 → 6.9 that night" in found.sentence


def test_an_old_change_is_told_and_raises_no_alarm(tmp_path):
    store_of(tmp_path, plant("g07", night(5), control=1.2))
    found = read(tmp_path)
    assert [c.night for c in ttft_of(found, "g07")] == [night(5)]
    assert not found.alarms and read(tmp_path, newest_nights=NIGHTS).alarms


def test_a_change_below_the_margin_raises_no_alarm(tmp_path):
    store_of(tmp_path, plant("g07", night(10), control=1.03), noise=0.002)
    found = read(tmp_path)
    assert any(c.host == "g07" for c in found.changes) and not found.alarms


def test_two_changes_of_one_series_are_both_found(tmp_path):
    store_of(tmp_path, plant("g07", night(5), control=1.2), plant("g07", night(10), control=1.2))
    found = ttft_of(read(tmp_path), "g07")
    assert [(c.night, c.nights_before, c.nights_after) for c in found] == [(night(5), 5, 5), (night(10), 5, 6)]


def test_three_nights_show_a_large_step_by_its_size(tmp_path, capsys):
    store_of(tmp_path, plant("g07", night(2), control=1.88, vllm_lock="b" * 64), nights=3)
    found = [c for c in read(tmp_path).alarms if c.host == "g07"]
    assert found and "size" in {c.evidence for c in found} and {c.night for c in found} == {night(2)}
    assert all("vllm_lock aaaaaaaaaaaa → bbbbbbbbbbbb that night" in c.sentence for c in found)
    assert main(["history", str(tmp_path)]) == 5
    said = capsys.readouterr().out
    assert "few nights: shown by size, not by test" in said and "a test takes 5 more" in said


def test_what_is_not_told_yet_of_few_nights_is_said(tmp_path, capsys):
    for nights, said in ((1, "after 1 night nothing is told, however large"), (2, "after 2 nights nothing is told")):
        store_of(tmp_path / str(nights), nights=nights)
        assert main(["history", str(tmp_path / str(nights))]) == 0
        assert said in capsys.readouterr().out
    store_of(tmp_path / "5", nights=5, noise=0.15)
    few = read(tmp_path / "5").few_nights
    assert (few.nights, few.told + few.untold) == (5, read(tmp_path / "5").series) and 0.25 < few.in_half < few.in_all
    main(["history", str(tmp_path / "5")])
    said = (
        f"tonight a rise of {few.in_half:.0%} or more in half of {few.told} series, of {few.in_all:.0%} in all of them"
    )
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("nights", [3, 4, 5, 7])
@pytest.mark.parametrize("spread", [0, 0.03, 0.12])
def test_a_step_on_the_newest_night_is_told_from_the_size_that_is_said(nights, spread):
    generator = numpy.random.default_rng([nights, int(100 * spread)])
    as_said = 0
    for _ in range(30):
        values = spread * generator.standard_normal((12, nights, 1)) + 0.03 * generator.standard_normal((12, nights, 6))
        least = dict.fromkeys(range(12), 0.049)
        step = told_from({n: nightly(values[n]) for n in range(12)}, least)[0]
        lies = values[0].mean(axis=1)
        told = []
        for factor in (0.97, 1.01):
            stepped = values.copy()
            stepped[0, -1] += factor * step - (lies[-1] - lies[:-1].mean())
            told.append(0 in changed({n: nightly(stepped[n]) for n in range(12)}, 0.0, least))
        as_said += told == [False, True]
    # Of seven nights that lie far apart another night may split the series better.
    assert as_said >= 28


def quiet_fleets_called(nights, spread, together=1, fleets=200):
    """Share of fleets of twelve series, six runs a night, noise of 3 % between runs, in which a change is called.

    `spread`: SD of nights, `together`: how many series share what a night is, as those of one host do.
    """
    generator = numpy.random.default_rng([nights, together])
    called = 0
    for _ in range(fleets):
        levels = numpy.repeat(spread * generator.standard_normal((12 // together, nights, 1)), together, axis=0)
        values = levels + 0.03 * generator.standard_normal((12, nights, 6))
        called += bool(changed({n: nightly(values[n]) for n in range(12)}, 0.05, dict.fromkeys(range(12), 0.049)))
    return called / fleets


@pytest.mark.parametrize("spread", [0, 0.02, 0.05, 0.12, 0.17])
def test_nights_that_differ_more_than_runs_raise_no_false_alarms(spread):
    for nights in (2, 3, 5, 7, 20):
        called = quiet_fleets_called(nights, spread)
        assert called <= 0.05 + 2.6 * math.sqrt(0.05 * 0.95 / 200), nights


def test_few_nights_of_series_that_move_together_raise_few_false_alarms():
    assert quiet_fleets_called(3, 0.12, together=4) <= 0.05 + 2.6 * math.sqrt(0.05 * 0.95 / 200)
    assert quiet_fleets_called(2, 0.5, together=12) == 0


def test_a_short_side_of_a_long_series_is_not_split_by_runs():
    generator = numpy.random.default_rng(5)
    extra = 0
    for _ in range(100):
        levels = 0.05 * generator.standard_normal((20, 1)) + numpy.where(numpy.arange(20) >= 14, 0.4, 0)[:, None]
        extra += len(changed({0: nightly(levels + 0.01 * generator.standard_normal((20, 6)))})[0]) > 1
    assert extra <= 12


def test_hosts_that_come_and_go_are_no_cause(tmp_path):
    from kvtrial.analysis.history.reading import _changes_at

    a, b = {"driver": "1"}, {"driver": "1", "governor": "performance"}
    settings = {("p", "g1"): {"n1": a, "n3": a}, ("p", "g2"): {"n1": a, "n3": b}, ("p", "g3"): {"n3": b},
                ("p", "g4"): {"n3": b}}  # fmt: skip
    assert _changes_at(settings, "p", ALL_HOSTS, "n3") == {}
    settings["p", "g1"]["n4"] = {"driver": "2"}
    assert _changes_at(settings, "p", "g1", "n4") == {"driver": ("1", "2")}


def test_a_setting_that_changed_a_night_beside_is_named_as_such(tmp_path):
    store_of(tmp_path, plant("g07", night(10), control=1.3), plant("g07", night(9), driver="580.159"))
    (found,) = ttft_of(read(tmp_path), "g07")
    assert found.pins_changed == {} and found.sentence.endswith(
        "nothing recorded changed that night; driver 580.126 → 580.159 the night before"
    )


def test_the_noise_floor_is_of_the_phase(tmp_path):
    from kvtrial.analysis.history.reading import _floor

    floors = {("aa", "g1", "miss", "m"): 0.5, ("aa", "g1", "return", "m"): 0.1}
    assert _floor(floors, "p", "g1", "return", "m") == 0.1 and _floor(floors, "p", "g1", "x", "m") is None


def test_a_textfile_in_a_folder_that_is_not_there_is_a_sentence(tmp_path, capsys):
    store_of(tmp_path / "s", nights=2)
    assert main(["history", str(tmp_path / "s"), "--textfile", str(tmp_path / "no" / "h.prom")]) == 7
    assert "--textfile" in (said := capsys.readouterr().err) and said.count("\n") == 1


def test_quiet_stores_give_false_alarms_at_most_as_often_as_they_say():
    """400 fleets of six hosts × two series without a change: at 5 % at most 20 of them are expected to name one."""
    for nights in (5, 20):
        generator = numpy.random.default_rng(nights)
        fleets = sum(
            bool(changed({n: nightly(generator.normal(0, 0.03, (nights, 6))) for n in range(12)})) for _ in range(400)
        )
        assert fleets <= 20 + 2.6 * math.sqrt(400 * 0.05 * 0.95)


def test_the_check_of_quiet_stores_can_fail():
    """Without the price for choosing the night, quiet series would be called changed far more often than 5 %."""
    generator = numpy.random.default_rng(1)
    called = 0
    for _ in range(300):
        split = best_split(nightly(generator.normal(0, 0.03, (20, 6))))
        called += split.p_value / 19 < 0.05
    assert called / 300 > 0.2


def nightly(values):
    return Nightly(
        [night(n) for n in range(len(values))],
        [float(v) for v in values.mean(axis=1)],
        [values.shape[1]] * len(values),
        [float(v) for v in values.std(axis=1, ddof=1)],
    )


def test_one_night_that_was_off_is_no_change():
    generator = numpy.random.default_rng(4)
    values = generator.normal(0, 0.02, (20, 6))
    values[9] += 0.5
    assert changed({"x": nightly(values)}) == {}


def test_nights_that_agree_exactly_do_not_break_it():
    assert best_split(nightly(numpy.zeros((10, 6)))).p_value == 1.0
    assert best_split(nightly(numpy.zeros((1, 6)))) is None
    alone = Nightly([night(0), night(1)], [0.0, 1.0], [1, 1], [math.nan, math.nan])
    assert best_split(alone).p_value == 1.0 and changed({0: alone}, 0.05, {0: 0.0}) == {}


# -------------------------------------------------------------------------------------------------------- the store


def test_the_same_campaign_twice_is_once(tmp_path):
    directory = campaign_on(tmp_path / "results", night(0), ("g01", "g03"))
    first, second = add(tmp_path / "s", directory), add(tmp_path / "s", directory)
    assert (first.replaced, second.replaced) == (0, 2) and first.rows == second.rows
    assert len(files_of(tmp_path / "s")) == 1
    moved = add(tmp_path / "s", directory, night(5))
    assert moved.replaced == 2 and {p.parent.name for p in files_of(tmp_path / "s")} == {f"night={night(5)}"}


def test_a_campaign_lands_in_the_history_when_it_is_concluded(tmp_path):
    from kvtrial.analysis.campaign import conclude

    directory = campaign_on(tmp_path / "results", night(0), ("g01",))
    conclude(str(directory))
    conclude(str(directory))
    (path,) = files_of(tmp_path / "results" / "history")
    frame = pandas.read_parquet(path, partitioning=None)
    assert set(frame["kind"]) == {"control", "effect"} and set(frame["night"]) == {night(0)}
    assert json.loads(frame["settings"][0])["driver"] == "580.126"


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    directory = campaign_on(tmp_path / "results", night(0), ("g01",))
    add(tmp_path / "s", directory)
    (path,) = files_of(tmp_path / "s")
    before = path.read_bytes()
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UnusableInput, match="no space left"):
        add(tmp_path / "s", directory)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_pandas_and_duckdb_read_the_same(tmp_path):
    store_of(tmp_path, plant("g07", night(3), control=1.2), nights=6)
    (a, first), (b, second) = (nights_of(files_of(tmp_path), engine) for engine in ("pandas", "duckdb"))
    assert first == second and set(first) == {("offload_return", host) for host in HOSTS}
    b = b.astype({name: "str" for name in b.columns if b[name].dtype == "category"})
    pandas.testing.assert_frame_equal(a[sorted(a.columns)], b[sorted(b.columns)], check_dtype=False)
    told = [
        {(c.host, c.kind, c.metric, c.phase, c.night, c.sentence) for c in read(tmp_path, engine=engine).changes}
        for engine in ("pandas", "duckdb")
    ]
    assert told[0] == told[1] != set()


def test_a_large_store_is_read_by_duckdb(tmp_path, monkeypatch):
    store_of(tmp_path, nights=2)
    monkeypatch.setattr("kvtrial.analysis.history.store.PANDAS_MOST_BYTES", 10)
    assert read(tmp_path).engine == "duckdb"


def test_nights_that_were_invalid_are_left_out_and_said(tmp_path):
    store_of(tmp_path, plant("g07", night(4), invalid=True), nights=6)
    found = read(tmp_path)
    assert found.invalid_nights == {"offload_return": {"g07": [night(4), night(5)]}}
    assert not found.changes


def test_a_pair_nights_give_the_noise_floor(tmp_path):
    store_of(tmp_path, nights=6, same_arms=True, noise=0.03)
    floors = {f.host: f for f in read(tmp_path).noise if f.metric == "ttft_median_seconds"}
    assert floors["g01"].sd == pytest.approx(0.03 * math.sqrt(2), rel=0.4)
    assert (floors["g01"].pairs, floors["g01"].nights) == (36, 6)


# --------------------------------------------------------------------------------------------------- pooled nights


def test_nights_are_pooled_only_by_a_declared_rule(tmp_path):
    store_of(tmp_path / "a", nights=4)
    assert read(tmp_path / "a").pooled == []
    store_of(tmp_path / "b", nights=4, rule=Nights(looks=4))
    found = {p.host: p for p in read(tmp_path / "b").pooled}
    assert set(found) == {"g01", "g03", "g07", "g09", ALL_HOSTS}
    assert found["g01"].verdict == "BETTER" and found["g01"].looks == 4
    assert found["g01"].decided_at is not None and found["g01"].confidence > 0.95


def test_a_full_trial_of_nights_is_followed_by_a_new_one(tmp_path):
    store_of(tmp_path, nights=6, rule=Nights(looks=4))
    assert {tuple(p.nights) for p in read(tmp_path).pooled} == {(night(4), night(5))}


def with_primary(store, metric, nights, rule):
    """Those nights of the store anew, with the comparison of another metric as the primary one."""
    before = dict(history_build._TEMPLATE)
    for host, verdict in before.items():
        other = next(c for c in verdict.comparisons if c.metric == metric)
        changed = [
            replace(c, role="primary" if c is other else "secondary" if c.role == "primary" else c.role)
            for c in verdict.comparisons
        ]
        history_build._TEMPLATE[host] = replace(verdict, comparisons=changed)
    store_of(store / "other", nights=max(nights) + 1, rule=rule)
    history_build._TEMPLATE.update(before)
    for path in files_of(store / "other"):
        if path.parent.name in {f"night={night(number)}" for number in nights}:
            place = store / path.relative_to(store / "other")
            place.parent.mkdir(parents=True, exist_ok=True)
            path.rename(place)
    shutil.rmtree(store / "other")


def test_another_primary_comparison_begins_a_new_trial(tmp_path):
    rule = Nights(looks=7)
    store_of(tmp_path, nights=4, rule=rule)
    assert {p.metric for p in read(tmp_path).pooled} == {"ttft_median_seconds"}
    with_primary(tmp_path, "output_throughput_tokens_per_second", (4, 5), rule)
    for pooled in read(tmp_path).pooled:
        assert (pooled.metric, pooled.nights) == ("output_throughput_tokens_per_second", [night(4), night(5)])


def test_what_changed_within_a_trial_is_named(tmp_path, capsys):
    planted = [plant(host, night(3), effect=3.0, driver="999") for host in HOSTS]
    store_of(tmp_path, *planted, nights=6, rule=Nights(looks=7))
    pooled = read(tmp_path).pooled
    assert len(pooled) == 5
    assert all("within these nights changed driver 580.126 → 999 on 4 Nov" in p.note for p in pooled)


def sent(since, told, hosts=HOSTS):
    return [plant(host, night(since), workload=told) for host in hosts]


def test_another_request_begins_a_new_trial(tmp_path):
    planted = [*sent(0, "aaa concurrency=1"), *sent(3, "bbb concurrency=2")]
    store_of(tmp_path, *planted, nights=6, rule=Nights(looks=7))
    pooled = read(tmp_path).pooled
    assert len(pooled) == 5 and {tuple(p.nights) for p in pooled} == {(night(3), night(4), night(5))}


def test_a_host_that_alone_was_sent_another_request_pools_its_own_nights_since(tmp_path):
    planted = [*sent(0, "aaa concurrency=1"), *sent(3, "bbb concurrency=2", ("g07",))]
    store_of(tmp_path, *planted, nights=6, rule=Nights(looks=7, spending="obrien_fleming"), noise=0.5)
    pooled = {p.host: p for p in read(tmp_path).pooled}
    assert {len(p.nights) for p in pooled.values()} == {6}
    assert pooled["g01"].pairs == 6 * pooled["g01"].look and pooled["g07"].look == 6, pooled["g07"]
    assert (
        pooled["g07"].pairs == 6 * 3 and "changed workload concurrency=1 → concurrency=2 on 4 Nov" in pooled["g07"].note
    )
    assert read(tmp_path, host="g07").pooled == [pooled["g07"]]


def test_nights_of_an_earlier_release_which_told_no_request_are_of_the_same_trial(tmp_path):
    store_of(tmp_path, *sent(3, "aaa concurrency=1"), nights=6, rule=Nights(looks=7))
    assert {len(p.nights) for p in read(tmp_path).pooled} == {6}


# ------------------------------------------------------------------------------------------------------ the command


def test_the_command_says_it_in_sentences_and_ends_with_5(tmp_path, capsys):
    store_of(tmp_path, plant("g07", night(13), control=1.12, driver="580.159"))
    assert main(["history", str(tmp_path)]) == 5
    said = capsys.readouterr().out
    assert "ALARM: TTFT of the control (return) rose 12 % on host g07 on 14 Nov; driver 580.126 → 580.159" in said
    assert main(["history", str(tmp_path), "--newest", "0"]) == 0
    assert main(["history", str(tmp_path), "--host", "g01"]) == 0


def test_json_is_the_typed_history(tmp_path, capsys):
    from kvtrial.analysis.history import History

    store_of(tmp_path, plant("g07", night(13), control=1.12))
    main(["history", str(tmp_path), "--json"])
    assert msgspec.json.decode(capsys.readouterr().out, type=History) == read(tmp_path)


def test_the_textfile_counts_alarms_and_bears_no_night(tmp_path):
    store_of(tmp_path, plant("g07", night(13), control=1.12))
    assert main(["history", str(tmp_path), "--textfile", str(tmp_path / "h.prom")]) == 5
    page = (tmp_path / "h.prom").read_text()
    assert 'kvtrial_history_alarms{host="g01",protocol="offload_return"} 0.0' in page
    assert 'kvtrial_history_alarms{host="g07",protocol="offload_return"} 0.0' not in page
    assert "2026-11" not in page and page == to_textfile(read(tmp_path))


# --------------------------------------------------------------------------------------- each in its place, and once


def levels_of(store):
    """Host → night → runs of the primary effect."""
    return {s.host: {p.night: p.runs for p in s.points} for s in read(store).shown if s.kind == "effect"}


def test_parts_that_are_merged_stay_in_the_history_as_they_were(tmp_path):
    results = tmp_path / "results"
    parts = [campaign_on(results, night(0), ("g01", "g03")), campaign_on(results, night(1), ("g07", "g09"))]
    for part in parts:
        assert main(["analyze", str(part)]) == 0
    before = levels_of(results / "history")
    assert main(["merge", *map(str, parts), "--into", str(results / "all")]) == 0
    assert levels_of(results / "history") == before
    assert before["g01"] == {night(0): 6} and before["g07"] == {night(1): 6}
    # The same where the parts themselves never came here.
    add(tmp_path / "elsewhere", results / "all")
    assert levels_of(tmp_path / "elsewhere") == before


def test_a_host_without_records_leaves_when_its_campaign_is_added_again(tmp_path):
    directory = campaign_on(tmp_path / "results", night(0), ("g01", "g03"))
    add(tmp_path / "s", directory)
    shutil.rmtree(directory / "runs" / "g03")
    assert add(tmp_path / "s", directory).replaced == 1
    assert set(levels_of(tmp_path / "s")) == {"g01"}
    shutil.rmtree(directory / "runs" / "g01")
    add(tmp_path / "s", directory)
    with pytest.raises(UnusableInput, match="holds no campaign"):
        read(tmp_path / "s")


def test_a_campaign_whose_move_was_cut_off_is_read_once(tmp_path):
    directory = campaign_on(tmp_path / "results", night(0), ("g01",))
    add(tmp_path / "s", directory)
    (old,) = files_of(tmp_path / "s")
    content = old.read_bytes()
    add(tmp_path / "s", directory, night(1))
    old.parent.mkdir(exist_ok=True)
    old.write_bytes(content)
    os.utime(old, (1, 1))
    assert levels_of(tmp_path / "s") == {"g01": {night(1): 6}}


def test_a_level_takes_the_strongest_role_and_a_pair_without_a_ratio_goes_alone(tmp_path):
    verdict = conclude_verdict(protocol(), {"g01": honest_records(host="g01")}, "c").hosts[0]
    primary = next(c for c in verdict.comparisons if c.role == "primary")
    values = {"arm_values": [0.1] * 5 + [0.0], "against_values": [0.2] * 6}
    both = [replace(primary, role="secondary", **values), replace(primary, **values)]
    rows = list(rows_of(protocol(), replace(verdict, comparisons=both), "c", night(0), "x", "{}", "standin"))
    assert {row.role for row in rows if row.kind == "control"} == {"primary"}
    assert [len([r for r in rows if (r.kind, r.role) == of]) for of in
            (("effect", "primary"), ("effect", "secondary"), ("control", "primary"))] == [5, 5, 6]  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- alarms


def test_an_alarm_is_for_a_change_when_it_is_first_found_and_is_told_once(tmp_path, capsys):
    """A rise that is found nights later than the newest seven still alarms; it is told by the night that finds it."""
    store, results = tmp_path / "s", tmp_path / "results"
    store_of(store, nights=10)
    directory = campaign_on(results, night(0), ("g01",))
    night_after_night = ["history", str(store), "--add", str(directory), "--night", night(0), "--host", "g07"]
    assert main(night_after_night) == 0
    store_of(store, plant("g07", night(5), control=1.2), nights=16)
    assert main(["history", str(store), "--host", "g07"]) == 5, "a look alone tells nobody"
    assert main([*night_after_night, "--newest", "3"]) == 5
    assert "ALARM: TTFT of the control (return) rose 20 % on host g07 on 6 Nov" in capsys.readouterr().out
    assert main([*night_after_night, "--newest", "3"]) == 0
    assert "ALARM (told before): TTFT of the control" in capsys.readouterr().out
    known = read(store, "g07", newest_nights=3)
    assert known.alarms and not known.new_alarms
    store_of(store, plant("g07", night(5), control=1.2), nights=20)
    assert not read(store, "g07", newest_nights=3).alarms


def test_an_alarm_that_the_webhook_did_not_take_is_told_again(tmp_path, monkeypatch):
    store_of(tmp_path / "s", plant("g07", night(13), control=1.2))
    monkeypatch.setattr("kvtrial.analysis.history.command.WEBHOOK_ATTEMPTS", 1)
    look = ["history", str(tmp_path / "s"), "--webhook", "http://127.0.0.1:9/x"]
    assert (main(look), main(look)) == (6, 6)
    monkeypatch.setattr("kvtrial.analysis.history.command.post", lambda *_: "")
    assert (main(look), main(look)) == (5, 0)


def told_night_by_night(tmp_path, *planted, nights, first, noise=0.01):
    """Of g07's primary level, night → the changes that are told on it, each night looked at and remembered."""
    store_of(tmp_path / "all", *planted, nights=nights, noise=noise)
    store, told = tmp_path / "s", {}
    for number in range(nights):
        for path in (tmp_path / "all").rglob(f"night={night(number)}/*.parquet"):
            (target := store / path.relative_to(tmp_path / "all")).parent.mkdir(parents=True)
            shutil.copy(path, target)
        if number >= first:
            found = read(store)
            told[night(number)] = [c.night for c in ttft_of(found, "g07") if c.is_new]
            remember(store, found.changes, found.nights, found.came_back)
    return {when: changes for when, changes in told.items() if changes}


def test_a_second_regression_within_a_week_of_a_told_one_is_told_too(tmp_path):
    planted = (plant("g07", night(12), control=1.12, driver="580.159"), plant("g07", night(18), control=1.8))
    told = told_night_by_night(tmp_path, *planted, nights=22, first=11)
    assert told == {night(12): [night(12)], night(18): [night(18)]}


def test_a_change_that_is_rolled_back_and_comes_again_is_told_again(tmp_path):
    planted = [plant("g07", night(at), control=by) for at, by in ((14, 1.3), (17, 1 / 1.3), (20, 1.3))]
    told = told_night_by_night(tmp_path, *planted, nights=24, first=13)
    assert told[night(14)] == [night(14)]
    [again] = [when for when in told if when > night(19)]
    assert again <= night(22), told


@pytest.mark.parametrize("noise", [0.01, 0.1])
def test_one_change_is_told_once_whatever_the_nights_after_it_bring(tmp_path, noise):
    told = told_night_by_night(tmp_path, plant("g07", night(14), control=1.5), nights=22, first=13, noise=noise)
    assert sum(map(len, told.values())) == 1, told


@pytest.mark.parametrize("part", ["host", "protocol"])
def test_a_first_look_at_a_part_leaves_the_rest_unlooked_at(tmp_path, part):
    store_of(tmp_path, plant("g07", night(3), control=1.3), nights=20)
    look = {"host": "g01"} if part == "host" else {"protocol": "another"}
    found = read(tmp_path, host=look.get("host"))
    remember(tmp_path, [], found.nights, **look)
    assert not read(tmp_path).new_alarms, "months ago, and nobody looked at it until now"
    every = read(tmp_path)
    remember(tmp_path, every.changes, every.nights)
    shutil.rmtree(tmp_path / "protocol=offload_return")
    store_of(tmp_path, plant("g07", night(3), control=1.3), plant("g03", night(4), control=1.3), nights=20)
    new = {c.host for c in read(tmp_path).new_alarms}
    assert "g03" in new and "g07" not in new, "everything was looked at by now"


def test_what_was_told_and_can_not_be_read_is_a_sentence(tmp_path, capsys):
    store_of(tmp_path, nights=2)
    (tmp_path / "told.json").write_text("{")
    assert main(["history", str(tmp_path)]) == 2
    assert "told.json can't be read" in (said := capsys.readouterr().err) and said.count("\n") == 1


@pytest.mark.parametrize("when", ["14 Nov", "2026-11-31", "20261114", ""])
def test_a_night_that_was_damaged_in_what_was_told_is_the_same_sentence(tmp_path, capsys, when):
    store_of(tmp_path, plant("g07", night(13), control=1.3))
    series = ["g07", "offload_return", "control", "control", "", "return", "", "ttft_median_seconds"]
    alarm = {"series": series, "night": when, "found": night(13)}
    (tmp_path / "told.json").write_text(json.dumps({"schema_version": "1.0", "alarms": [alarm]}))
    assert main(["history", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"told.json can't be read ({when!r} is no night" in said and said.count("\n") == 1
    assert "take it out, and what changed lately is told once more" in said


def test_looks_that_end_together_tell_an_alarm_once(tmp_path):
    store_of(tmp_path / "s", plant("g07", night(13), control=1.3))
    (tmp_path / "slow").mkdir()
    # Each look is slow between what it reads and what it remembers, as with a webhook that is.
    (tmp_path / "slow" / "look.py").write_text(
        "import sys, time\n"
        "from kvtrial.analysis.cli import main\n"
        "from kvtrial.analysis.history import command\n"
        "def slow(url, alarms, *rest):\n"
        "    time.sleep(2)\n"
        "    return ''\n"
        "command.post = slow\n"
        "sys.exit(main(['history', sys.argv[1], '--webhook', 'https://chat.example/hook']))\n"
    )
    look = [sys.executable, str(tmp_path / "slow" / "look.py"), str(tmp_path / "s")]
    looks = [subprocess.Popen(look, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    assert sorted(process.wait(120) for process in looks) == [0, 5], [process.communicate() for process in looks]


def test_a_look_that_only_reads_waits_for_nobody_and_leaves_no_file(tmp_path):
    store_of(tmp_path, nights=2)
    with (tmp_path / "told.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert main(["history", str(tmp_path)]) == 0
    (tmp_path / "told.lock").unlink()
    assert main(["history", str(tmp_path)]) == 0
    assert not (tmp_path / "told.lock").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "is no folder"),
        ([".", "--host", "x"], "holds no campaign of host x"),
        (["--night", "2026-11-14"], "--add"),
        (["--add", "c", "--night", "14.11."], "is no night"),
        (["--add", "c", "--night", "2026-13-14"], "is no night"),
        (["--newest", "-1"], "no number of nights"),
        (["--webhook", "ftp://x/y"], "no URL"),
        (["--webhook", "http://"], "no URL"),
        (["--add", "nothing-here"], "holds no campaign.json"),
    ],
)
def test_bad_input_is_one_sentence(arguments, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["history", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_files_of_another_kind_are_named(tmp_path, capsys):
    store_of(tmp_path, nights=1)
    (first, *_) = files_of(tmp_path)
    for content in (b"not parquet", b""):
        first.write_bytes(content)
        assert main(["history", str(tmp_path)]) == 2
        assert str(first) in capsys.readouterr().err
    pandas.DataFrame({"a": [1]}).to_parquet(first)
    assert main(["history", str(tmp_path)]) == 2
    assert "no column campaign" in capsys.readouterr().err


def test_the_protocols_rule_is_checked():
    from kvtrial.analysis.protocols import load_protocol

    folder = Path(__file__).parents[3] / "playbooks" / "protocols"
    protocol = load_protocol("offload_return", folder)
    from kvtrial.analysis.protocols import check_protocol

    check_protocol(msgspec.structs.replace(protocol, nights=Nights(looks=7)))
    for rule, said in ((Nights(looks=1), "nights.looks"), (Nights(looks=7, alpha=0.5), "nights.alpha")):
        with pytest.raises(UnusableInput, match=said):
            check_protocol(msgspec.structs.replace(protocol, nights=rule))


def test_what_changed_and_what_decides_is_told_night_by_night(tmp_path):
    store_of(tmp_path, plant("g07", night(10), control=1.3))
    found = read(tmp_path)
    assert all(any(series.holds(change) for series in found.shown) for change in found.changes)
    deciding = [series for series in found.shown if series.kind == "effect" and series.role == "primary"]
    assert {series.host for series in deciding} == {"g01", "g03", "g07", "g09", ALL_HOSTS}
    (level,) = [s for s in found.shown if (s.host, s.kind, s.metric) == ("g07", "control", "ttft_median_seconds")
                and s.phase == "return"]  # fmt: skip
    assert [point.night for point in level.points] == [night(number) for number in range(NIGHTS)]
    assert level.points[0].value == pytest.approx(0.2, rel=0.03)
    assert level.points[-1].value == pytest.approx(0.26, rel=0.03)
    assert all(point.low < point.value < point.high for point in level.points)
    assert level.points[-1].runs == 6


def test_the_report_draws_what_kvtrial_history_writes(tmp_path, capsys):
    results = tmp_path / "results"
    for when in ("2026-11-14", "2026-11-15"):
        main(["history", str(results / "history"), "--add", str(campaign_on(results, when, ("g01", "g02")))])
    capsys.readouterr()
    main(["history", str(results / "history"), "--json"])
    written = tmp_path / "history.json"
    written.write_text(capsys.readouterr().out)
    campaign = results / "offload_return-20261115T010000Z"
    for given in (results / "history", written):
        assert main(["report", str(campaign), "--history", str(given)]) == 0
        page = (campaign / "report.html").read_text()
        assert "history0-title" in page
        assert "2 nights" in page.replace("\u00a0", " ")
        assert f"--history {given}" in page


def test_the_end_of_a_campaign_draws_the_history_beside_it(tmp_path):
    results = tmp_path / "results"
    first = campaign_on(results, "2026-11-14", ("g01", "g02"))
    conclude(str(first))
    assert "history0-title" not in (first / "report.html").read_text()
    second = campaign_on(results, "2026-11-15", ("g01", "g02"))
    conclude(str(second))
    page = (second / "report.html").read_text()
    assert "history0-title" in page
    assert "ansible-playbook experiment.yml -e protocol=offload_return -e kvtrial_seed=1" in page
    assert f"--history {results / 'history'}" in page, "the page's own command gives this page"
    for options in (["--lang", "en"], ["--lang", "en", "--history", str(results / "history")]):
        assert main(["report", str(second), *options]) == 0
        assert (second / "report.html").read_text() == page
    assert main(["report", str(second), "--lang", "ru"]) == 0
    assert "history0-title" in (second / "report.html").read_text()


def test_a_damaged_file_of_the_store_is_replaced_as_its_sentence_advises(tmp_path, capsys):
    store = tmp_path / "store"
    for when in ("2026-11-01", "2026-11-02"):
        assert main(["history", str(store), "--add", str(campaign_on(tmp_path / "results", when, ("g01",)))]) == 0
    damaged = next(store.glob("*/night=2026-11-02/*.parquet"))
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-40])
    capsys.readouterr()
    assert main(["history", str(store)]) == 2
    assert f"{damaged} can't be read" in (said := capsys.readouterr().err) and "add its campaign again" in said
    assert main(["history", str(store), "--add", str(tmp_path / "results" / damaged.stem)]) == 0
    assert read(store).nights == ["2026-11-01", "2026-11-02"]


def test_one_host_is_judged_by_the_looks_of_the_fleet_also_when_it_is_asked_for_alone(tmp_path):
    store_of(tmp_path, nights=8, rule=Nights(looks=7, spending="obrien_fleming", alpha=0.05), noise=0.02)
    for path in sorted(tmp_path.glob("*/night=*/*.parquet"))[:3]:
        frame = pandas.read_parquet(path)
        frame[frame["host"] != "g07"].to_parquet(path, index=False)
    of_all = [pooled for pooled in read(tmp_path).pooled if pooled.host == "g07"]
    assert of_all and of_all == [pooled for pooled in read(tmp_path, host="g07").pooled if pooled.host == "g07"]
