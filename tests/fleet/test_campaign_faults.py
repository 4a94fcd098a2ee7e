"""Faults of a fleet in the middle of a campaign. Real hosts, real ssh, two pairs; the engine is the stand-in.

Several faults share a campaign, one a host, since what one host suffers is no matter of another's. Each test names its
faults, runs the same command again where anything is missing, and asks after each: what is whole was kept, what is
missing was done, who is missing is named, and nothing is left.
"""

import json
import re
import shutil
import signal
import statistics
import subprocess
import time
from datetime import datetime

import pytest
from campaigns import (
    CAMPAIGNS,
    QUICK,
    ended,
    forget,
    left_on,
    measuring,
    nothing_left,
    progress,
    records,
    verdict,
    wait_for,
)
from kvtrial.analysis.cli import main
from playing import ROOT, Playbooks, furnish_standin, provision_quickly, standin_variables

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]
EXPERIMENT = "experiment.yml"


@pytest.fixture(scope="module")
def installed(playbooks, host_wheels):
    project: Playbooks = playbooks(3, {**standin_variables(host_wheels), **QUICK})
    furnish_standin(project.fleet)
    provision_quickly(project)
    return project


@pytest.fixture
def project(installed, tmp_path):
    """The three hosts, provisioned and without a campaign; results in a folder of the test's own."""
    installed.results = tmp_path / "results"
    installed.set(kvtrial_results_dir=str(installed.results))
    yield installed
    installed.end()
    for host in installed.fleet.hosts:
        installed.set(host.name)
        host.heal()
        if host.init() is None:
            host.boot()
    forget(installed)


def last_of(output: str) -> str:
    return [line for line in output.splitlines() if line.strip()][-1]


def test_two_controllers_on_halves_with_a_host_cut_for_two_seconds_and_one_ten_times_slower(project, tmp_path, capsys):
    """Job slices: each controller has its part, the parts merge to the verdict over all; a short cut goes unnoticed."""
    h1 = project.fleet.hosts[0]
    env = project.variables["kvtrial_engine_env"]
    project.set("h2", kvtrial_engine_env={**env, "STANDIN_SLOWDOWN": str(10 * int(env["STANDIN_SLOWDOWN"]))})
    halves = [tmp_path / "a", tmp_path / "b"]
    first = project.start(EXPERIMENT, "--limit", "h1", "-e", f"kvtrial_results_dir={halves[0]}")
    second = project.start(
        EXPERIMENT, "--limit", "h2:h3", "-e", f"kvtrial_results_dir={halves[1]}", "-e", "kvtrial_fetch=summary"
    )
    wait_for(lambda: measuring(h1))
    h1.cut()
    time.sleep(2)
    h1.heal()
    for running in (first, second):
        status, output = running.finish(600)
        assert status == 0, output[-3000:]
    assert "did not take part to the end" not in (output := first.log.read_text()), output[-3000:]
    # What a host has is here when it is done, not when the slowest is.
    found = records(halves[1])
    assert len(found) == 4 + 4
    tokens = {
        name: [p["ttft_median_seconds"] for (host, _), r in found.items() if host == name for p in r["phases"]]
        for name in ("h2", "h3")
    }
    assert statistics.median(tokens["h2"]) > 5 * statistics.median(tokens["h3"])
    fetched = (halves[1] / "latest" / "hosts" / "h3.json").stat().st_mtime
    assert fetched < (halves[1] / "latest" / "hosts" / "h2.json").stat().st_mtime
    assert {path.name for path in halves[1].glob("latest/runs/*/*/*.zst")} == {"record.json.zst"}
    code = main(["merge", *(str((half / "latest").resolve()) for half in halves), "--into", str(tmp_path / "all")])
    assert code == 3, capsys.readouterr()  # two pairs can't prove anything
    merged = json.loads((tmp_path / "all" / "verdict.json").read_text())
    assert [host["host"] for host in merged["hosts"]] == ["h1", "h2", "h3"]
    assert {host["runs"]["valid"] for host in merged["hosts"]} == {4}
    # Each host is judged as its own controller judged it.
    parts = [json.loads((half / "latest" / "verdict.json").read_text())["hosts"] for half in halves]
    for told, alone in zip(merged["hosts"], [*parts[0], *parts[1]], strict=True):
        for name in ("host", "verdict", "comparisons", "gates", "runs"):
            assert told[name] == alone[name], (alone["host"], name)
    nothing_left(project)
    # The rest of a summary is fetched on demand, and checked.
    project.play(
        "playbooks/fetch.yml", "--limit", "h3", "-e", f"kvtrial_fetch_campaign={halves[1]}/latest", fails=False
    )
    assert len(list(halves[1].glob("latest/runs/h3/*/requests.jsonl.zst"))) == 4
    assert not list(halves[1].glob("latest/runs/h2/*/requests.jsonl.zst"))
    nothing_left(project)


def test_a_host_powered_off_one_rebooted_and_one_cut_for_good(project):
    h1, h2, h3 = project.fleet.hosts
    running = project.start(EXPERIMENT)
    wait_for(lambda: measuring(h1, 1) and measuring(h2, 1) and measuring(h3, 1))
    h3.cut()
    h1.cut()
    h1.kill()
    h2.sh("systemctl reboot", check=False)
    status, output = running.finish(600)
    assert status != 0
    said = output.partition("PLAY RECAP")[2]
    for name in ("h1", "h3"):
        assert f"{name} did not take part to the end: {name}: out of reach for" in said, output[-3000:]
        assert f"{name} (nothing was fetched; 0 of 4 runs done)" in last_of(output)
    assert "the same command goes on with what is missing" in last_of(output)
    # The host that was rebooted went on where it was: the controller started its program again.
    kept = ended(records(project.results))
    assert {run for host, run in kept if host == "h2"} == {run for _, run in kept} and len(kept) >= 4
    found = verdict(project.results)
    assert found["verdict"] == "INCONCLUSIVE"
    assert "of 3 planned hosts are valid" in found["reason"], found["reason"]
    # Both are still away: the same command goes on with that campaign, names them, and does nothing again.
    early = project.play(EXPERIMENT)
    said = " ".join(early.stdout.split())
    assert "whose hosts h1, h3 are not at hand" in said, early.stdout[-3000:]
    assert ended(records(project.results)) == kept
    assert len(list(project.results.glob("*-*"))) == 1
    h1.heal()
    h1.boot()
    h3.heal()
    again = project.play(EXPERIMENT, fails=False)
    after = ended(records(project.results))
    assert kept.items() <= after.items(), "a finished run was done again"
    assert {host for host, _ in after} == {"h1", "h2", "h3"}, again.stdout[-3000:]
    assert len(list(project.results.glob("*-*"))) == 1
    # Runs of one host before and after its power cut are not compared: the pair that was cut was repeated whole.
    for host in ("h1", "h2"):
        boots = {r["pair"]: set() for (name, _), r in records(project.results).items() if name == host}
        for (name, _), r in records(project.results).items():
            if name == host:
                boots[r["pair"]].add(r["conditions"]["boot_id"])
        assert sum(len(b) == 1 for b in boots.values()) >= 2, boots
    nothing_left(project)


FILL = f"dd if=/dev/zero of={CAMPAIGNS}/filler bs=64k 2>/dev/null || true"
FOREIGN = "systemd-run -q --unit=foreign bash -c 'exec -a \"vllm serve other\" sleep 600'"


@pytest.fixture
def small_disk():
    """small_disk(host): campaigns lie on a disk of 64 MiB there, until the test is over."""
    hosts = []

    def made(host):
        hosts.append(host)
        host.sh(f"mkdir -p {CAMPAIGNS}; mount -t tmpfs -o size=64M,mode=755 small {CAMPAIGNS}")

    yield made
    for host in hosts:
        host.sh(f"systemctl stop kvtrial-host 2>/dev/null || true; umount -l {CAMPAIGNS}")


def test_a_disk_full_on_the_host_a_key_refused_and_a_foreign_engine_in_the_window(project, small_disk):
    h1, h2, h3 = project.fleet.hosts
    small_disk(h1)
    running = project.start(EXPERIMENT)
    try:
        wait_for(lambda: measuring(h2, 1))
        h2.sh("mv ~deploy/.ssh/authorized_keys /root/keys; pkill -u deploy sshd || true")
        wait_for(lambda: measuring(h3, 1))
        h3.sh(FOREIGN)
        wait_for(lambda: measuring(h1, 1))
        h1.sh(FILL)
        status, output = running.finish(600)
        assert status != 0
        last = last_of(output)
        assert "h2 (nothing was fetched" in last, output[-4000:]
        assert "h3 (failed: another engine runs on this host" in last, last
        said = output.partition("PLAY RECAP")[2]
        # Found before a run, or in one; either way with what to do.
        before_a_run = r"\d+ bytes are free on disk, \d+ are needed; free some in"
        full = rf"h1 \(failed: ({before_a_run}|run p\S+ could not be written: .*; free the disk)"
        assert re.search(full, last), (last, said)
        assert left_on(h1) == []
        kept = ended(records(project.results))
    finally:
        h1.sh(f"rm -f {CAMPAIGNS}/filler", check=False)
        h2.sh("test ! -f /root/keys || mv /root/keys ~deploy/.ssh/authorized_keys")
        h3.sh("systemctl stop foreign", check=False)
    project.play(EXPERIMENT, fails=False)
    after = records(project.results)
    assert kept.items() <= ended(after).items(), "a finished run was done again"
    assert {host for host, _ in after} == {"h1", "h2", "h3"}
    faults = [r["fault"]["fault"] for (host, _), r in after.items() if host == "h3" and r["fault"]]
    assert faults == ["foreign_engine"]
    assert len(list(project.results.glob("*-*"))) == 1
    nothing_left(project)


def test_a_record_that_was_truncated_or_edited_on_the_host_or_here_is_named(project, capsys):
    """On the host it is no finished run and is done again; here it is refused by name."""
    host = project.fleet.hosts[0]
    running = project.start(EXPERIMENT, "--limit", "h1")
    wait_for(lambda: measuring(host, 1))
    running.signal(signal.SIGKILL)
    running.finish()
    wait_for(lambda: progress(host).get("state") == "finished")
    host.sh(f"for r in {CAMPAIGNS}/*/runs/p01-1-*/record.json; do truncate -s -100 $r; done")
    project.play(EXPERIMENT, "--limit", "h1", fails=False)
    assert len(records(project.results)) == 4
    assert host.sh(f"ls -d {CAMPAIGNS}/*/interrupted/p01-1-*-damaged-* | wc -l") == "1"
    latest = (project.results / "latest").resolve()
    [path] = latest.glob("runs/h1/p02-1-*/record.json")
    path.write_text(path.read_text().replace('"completed"', '"Completed"', 1))
    assert main(["analyze", str(latest)]) == 2
    assert f"{path} does not match its digest: it was truncated or edited" in capsys.readouterr().err
    nothing_left(project)


@pytest.fixture
def small_results(tmp_path):
    """A folder for results on a disk of its own, of 16 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16M", "small", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_disk_full_on_the_controller_and_a_controller_killed_and_never_run_again(project, tmp_path, small_results):
    """What one controller can't write is named and fetched later; without the other the hosts end at the deadline."""
    h1, h2, h3 = project.fleet.hosts
    gone = tmp_path / "gone"
    deadline = {"kvtrial_limits": {"idle_timeout_seconds": 3, "stop_timeout_seconds": 5, "deadline_seconds": 40}}
    lost = project.start(EXPERIMENT, "--limit", "h2:h3", "-e", json.dumps(deadline), "-e", "kvtrial_pairs=20",
                         "-e", f"kvtrial_results_dir={gone}")  # fmt: skip
    full = project.start(EXPERIMENT, "--limit", "h1", "-e", f"kvtrial_results_dir={small_results}")
    # Killed while it starts them its lock stays, for two hours; see docs/fleet.md.
    wait_for(lambda: all(measuring(host) and not host.sh("ls /run/kvtrial 2>/dev/null || true") for host in (h2, h3)))
    lost.signal(signal.SIGKILL)
    lost.finish()
    wait_for(lambda: measuring(h1, 1))
    filler = small_results / "filler"
    subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=4k"], check=False, capture_output=True)
    status, output = full.finish(600)
    assert status != 0
    assert "no space left on device" in last_of(output).lower(), output[-3000:]
    filler.unlink()
    project.play(EXPERIMENT, "--limit", "h1", "-e", f"kvtrial_results_dir={small_results}", fails=False)
    assert len(records(small_results)) == 4
    assert len({r["attempt"] for r in records(small_results).values()}) == 1, "the host was not to work again"
    assert [p for p in small_results.rglob("*") if p.name.startswith(".") or p.name.endswith(".tmp")] == []
    for host in (h2, h3):
        wait_for(lambda host=host: progress(host).get("state") == "stopped")
        assert "the deadline of 40 s passed" in progress(host)["reason"]
        assert progress(host)["runs_done"] >= 1
    nothing_left(project)


KILLER = r"""
import glob, json, os, time
killed = set()
while True:
    time.sleep(0.002)
    try:
        folder = max(glob.glob("/var/lib/kvtrial/campaigns/*/"), key=os.path.getmtime)
        now = json.load(open(folder + "progress.json"))
        phases = [p["name"] for p in json.load(open(folder + "plan.json"))["runs"][0]["phases"]]
    except (OSError, ValueError):
        continue
    wanted = ["engine starting", *phases][now["runs_done"] % (len(phases) + 1)]
    at = "engine starting" if (now["phase"] or "").startswith("engine starting") else now["phase"]
    if now["state"] != "running" or now["runs_done"] in killed or at != wanted:
        continue
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            if b"vllm\0serve" in open(path, "rb").read():
                os.kill(int(path.split("/")[2]), 9)
                killed.add(now["runs_done"])
                with open("/root/killed-in", "a") as file:
                    file.write(wanted + "\n")
        except OSError:
            pass
"""
FINISHED = f"cd {CAMPAIGNS} && sha256sum */runs/p*/record.json"


def interrupted(project: Playbooks, names: list[str], *arguments: str, runs: int = 1) -> dict[str, set[str]]:
    """Kill the controller when each of these hosts has finished `runs`; the digests of what each then has."""
    hosts = [host for host in project.fleet.hosts if host.name in names]
    running = project.start(EXPERIMENT, "--limit", ":".join(names), *arguments)
    wait_for(lambda: all(measuring(host, runs) for host in hosts))
    running.signal(signal.SIGKILL)
    running.finish()
    return {host.name: set(host.sh(FINISHED).splitlines()) for host in hosts}


def still_there(project: Playbooks, before: dict[str, set[str]]) -> bool:
    """Whether each host has what it had, byte for byte: no finished run was done again, or lost."""
    now = {host.name: set(host.sh(FINISHED).splitlines()) for host in project.fleet.hosts if host.name in before}
    return all(len(had) >= 1 and had <= now[name] for name, had in before.items())


def test_an_engine_killed_in_each_phase_and_one_that_deadlocks(project):
    """Eight pairs: in each of a host's runs its engine is killed in another phase. The controller dies meanwhile."""
    h1 = project.fleet.hosts[0]
    h1.write("/root/killer.py", KILLER)
    h1.sh("rm -f /root/killed-in; systemd-run -q --unit=killer python3 /root/killer.py")
    env = project.variables["kvtrial_engine_env"]
    project.set("h1", kvtrial_engine_env={**env, "STANDIN_SLOWDOWN": "8"})
    stuck_env = {**env, "STANDIN_FAULT": "deadlock_after:20", "STANDIN_FAULT_ARM": "offload"}
    watched = {"idle_timeout_seconds": 30, "stop_timeout_seconds": 5, "deadlock_seconds": 1}
    project.set("h2", kvtrial_engine_env=stuck_env, kvtrial_limits=watched)
    try:
        before = interrupted(project, ["h1", "h2"], "-e", "kvtrial_pairs=8", runs=2)
        done = project.play(EXPERIMENT, "--limit", "h1:h2", "-e", "kvtrial_pairs=8")
        phases = json.loads(h1.sh(f"cat {CAMPAIGNS}/*/plan.json"))["runs"][0]["phases"]
        hit = h1.sh("cat /root/killed-in").split("\n")
    finally:
        h1.sh("systemctl stop killer", check=False)
    assert still_there(project, before)
    assert len(list(project.results.glob("*-*"))) == 1
    found = records(project.results)
    assert len(found) == 32, done.stdout[-3000:]
    killed = [r["fault"] for (host, _), r in found.items() if host == "h1" and r["fault"]]
    assert len(killed) == 16
    assert {fault["origin"] for fault in killed} == {"engine"}
    names = [phase["name"] for phase in phases]
    assert set(hit) == {"engine starting", *names}
    # What the record says: None is before the first phase.
    assert {fault["phase"] for fault in killed} == {None, *names}, sorted(str(fault["phase"]) for fault in killed)
    stuck = [r["fault"]["fault"] for (host, _), r in found.items() if host == "h2" and r["fault"]]
    assert stuck == ["deadlock"] * 8
    concluded = verdict(project.results)
    assert "engine faults" in str(concluded["caveats"])
    assert "BETTER" not in {concluded["verdict"], *(host["verdict"] for host in concluded["hosts"])}
    nothing_left(project)


def test_a_clock_off_by_hours_is_a_label_that_is_off_and_nothing_else(project, tmp_path):
    """The units of h3 are told another time; the monotonic clock, by which everything is measured, is the kernel's."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("there is no C compiler for tests/fleet/other_clock.c")
    library = tmp_path / "other_clock.so"
    source = ROOT / "tests" / "fleet" / "other_clock.c"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    h3 = project.fleet.hosts[2]
    h3.put(library, "/opt/other_clock.so")
    h3.sh("chmod 755 /opt/other_clock.so; systemctl set-environment LD_PRELOAD=/opt/other_clock.so")
    try:
        before = interrupted(project, ["h1", "h3"])
        done = project.play(EXPERIMENT, "--limit", "h1:h3", fails=False)
    finally:
        h3.sh("systemctl unset-environment LD_PRELOAD")
    found = records(project.results)
    assert len(found) == 8, done.stdout[-3000:]
    assert still_there(project, before) and len(list(project.results.glob("*-*"))) == 1
    hours = [
        (read_time(r) - read_time(found["h1", run])) / 3600
        for (host, run), r in found.items() if host == "h3"
    ]  # fmt: skip
    assert all(6 < h < 8 for h in hours), hours
    off = next(host for host in verdict(project.results)["hosts"] if host["host"] == "h3")
    assert off["runs"]["valid"] == 4, off
    assert all(gate["passed"] is not False for gate in off["gates"]), off["gates"]
    nothing_left(project)


def read_time(record: dict) -> float:
    """When a run began by its host's own wall clock, seconds."""
    return datetime.fromisoformat(record["times"]["started_at_utc"]).timestamp()


def test_a_trace_is_replayed_where_the_program_has_an_account_of_its_own(project):
    here = ROOT / "tests" / "e2e"
    trace = ["-e", f"protocol={here / 'standin_trace.yml'}", "-e", f"kvtrial_trace={here / 'standin_trace.jsonl'}"]
    project.play(EXPERIMENT, "--limit", "h1", *trace, fails=False)
    found = records(project.results)
    replayed = [phase for record in found.values() for phase in record["phases"] if phase["name"] == "replay"]
    assert [(phase["sent"], phase["failed"], phase["output_tokens"]) for phase in replayed] == [(3, 0, 9)] * 4
    nothing_left(project)


def test_a_canary_that_is_invalid_stops_the_campaign_before_the_others(project):
    others = project.fleet.hosts[1:]
    project.set("h1", kvtrial_engine_env={**project.variables["kvtrial_engine_env"], "STANDIN_FAULT": "no_load"})
    before = {host.name: host.sh(f"ls {CAMPAIGNS} 2>/dev/null", check=False) for host in others}
    stages = ["-e", '{"kvtrial_stages": [1, "10%", "100%"]}']
    done = project.play(EXPERIMENT, *stages, fails=True)
    assert "Stopped after 1 of 3 hosts, 1 of them INVALID (h1: gate treatment_delivered" in last_of(done.stdout)
    assert verdict(project.results)["verdict"] == "INVALID"
    assert {host for host, _ in records(project.results)} == {"h1"}
    for host in others:
        assert host.sh(f"ls {CAMPAIGNS} 2>/dev/null", check=False) == before[host.name]
    project.set("h1")
    again = project.play(EXPERIMENT, *stages, "-e", "kvtrial_new_campaign=true", fails=False)
    found = records(project.results)
    assert {host for host, _ in found} == {"h1", "h2", "h3"}, again.stdout[-3000:]
    # One after the other: a tenth of three hosts is one.
    spans = {
        host: [read_time(r) for (name, _), r in found.items() if name == host] for host in ("h1", "h2", "h3")
    }  # fmt: skip
    assert max(spans["h1"]) < min(spans["h2"]) and max(spans["h2"]) < min(spans["h3"])
    nothing_left(project)


def test_a_host_of_a_later_stage_that_was_changed_meanwhile_is_named_and_not_started(project):
    """What a provision of hours ago would have done, between the first stage and the second."""
    h1, h2, _ = project.fleet.hosts
    project.set(kvtrial_stages=[1, "100%"])
    added = "/opt/standin-venv/lib/python3.11/site-packages/another-1.0.dist-info"
    running = project.start(EXPERIMENT)
    try:
        wait_for(lambda: measuring(h1))
        h2.sh(f"mkdir -p {added}")
        status, output = running.finish(900)
    finally:
        h2.sh(f"rm -rf {added}")
        project.set(kvtrial_stages=["100%"])
    said = " ".join(output.split())
    assert "h2 is no longer as it was made ready: engine_lock is as found, 2 packages with sha256" in said, output[
        -4000:
    ]
    assert h2.sh(f"ls {CAMPAIGNS} 2>/dev/null || true") == ""
    assert {host for host, _ in records(project.results)} == {"h1", "h3"}
    assert status != 0 and "h2" in last_of(output) + json.dumps(verdict(project.results)), output[-2000:]
    nothing_left(project)
