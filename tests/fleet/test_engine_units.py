"""Engines as units on real hosts, with the stand-in engine: what systemd enforces, what the program's account may do.

One host is supervised by systemd, the other by the program itself; what they leave must tell the same.
"""

import json
import os
import signal
import time

import msgspec
import pytest
from kvtrial.host import units
from kvtrial.record.cpulist import cpu_list
from kvtrial.record.plan import HostPlan
from playing import Playbooks, furnish_standin, last_line, recap, standin_variables

# Far beyond what they take: a busy machine is no failure.
pytestmark = pytest.mark.timeout(1500)

ENGINE = "kvtrial-engine@{}.service"
SAME = ("outcome", "fault", "evidence", "arm", "pair", "position", "model", "capacity", "vllm_version_pinned")


def show(host, unit: str, *names: str) -> dict[str, str]:
    lines = host.run("systemctl", "show", unit, f"--property={','.join(names)}").stdout.splitlines()
    return dict(line.split("=", 1) for line in lines)


def wait(wanted, seconds: float = 60.0):
    until = time.monotonic() + seconds
    while not (found := wanted()):
        assert time.monotonic() < until, f"waited {seconds} s in vain"
        time.sleep(0.1)
    return found


@pytest.fixture(scope="module")
def project(playbooks, host_wheels):
    project: Playbooks = playbooks(2, standin_variables(host_wheels))
    # One host has its client on a CPU of its own, where the machine has more than one.
    project.set("h1", kvtrial_client_cpus="1" if len(os.sched_getaffinity(0)) > 1 else "auto")
    project.set("h2", kvtrial_supervisor="process")
    furnish_standin(project.fleet)
    return project


@pytest.fixture(scope="module")
def seen(project):
    """What could be seen of h1's engine while the campaign ran, and how the playbook ended."""
    host = project.fleet.hosts[0]
    running = project.start("experiment.yml", "-e", "kvtrial_pairs=2")
    # A unit has a main process before that has become the engine; it is active from then on (Type=exec).
    show_pid = (
        "unit=kvtrial-engine@offload.service; [ $(systemctl show -P ActiveState $unit) != active ] && echo 0 ||"
        "systemctl show -P MainPID $unit"
    )
    try:
        wait(lambda: running.is_over() or host.sh(show_pid) != "0", 600)
        assert not running.is_over(), running.log.read_text()[-4000:]
        pid = host.sh(show_pid)
        found = {
            "cmdline": host.run("cat", f"/proc/{pid}/cmdline").stdout.split("\0")[:-1],
            "environ": sorted(host.run("cat", f"/proc/{pid}/environ").stdout.split("\0")[:-1]),
            "uid": host.sh(f"stat -c %U /proc/{pid}"),
            "program": host.sh("ps -o user= -p $(systemctl show -P MainPID kvtrial-host.service)"),
            "sockets": wait(lambda: host.sh("ss -Hltn 'sport = 18765'"), 20),
            "cpus": host.sh(f"sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' /proc/{pid}/status"),
            "other": show(host, ENGINE.format("control"), "ActiveState")["ActiveState"],
        }
    except BaseException:
        running.signal(signal.SIGKILL)
        running.finish()
        raise
    status, output = running.finish(600)
    return {**found, "status": status, "output": output}


def record(project: Playbooks, host: str, run: str) -> dict:
    return json.loads((project.results / "latest" / "runs" / host / run / "record.json").read_text())


def test_a_campaign_over_ssh_ends_with_a_verdict_and_whole_records(project, seen):
    assert seen["status"] == 0, seen["output"][-5000:]
    assert "INCONCLUSIVE" in seen["output"]
    verdict = json.loads((project.results / "latest" / "verdict.json").read_text())
    assert verdict["evidence"] == "standin"
    assert [host["runs"]["valid"] for host in verdict["hosts"]] == [4, 4]


def test_a_unit_gives_the_engine_the_launch_and_nothing_else(project, seen):
    of_runs = [record(project, "h1", path.name) for path in runs(project, "h1")]
    offload = next(one["launch"] for one in of_runs if one["arm"] == "offload")
    assert offload["env"]["ODD_ONE"] == 'a "b" $HOME %i \\ é'
    # The stand-in is a Python script: the kernel puts its interpreter in front.
    assert seen["cmdline"][-len(offload["argv"]) + 1 :] == offload["argv"][1:]
    scratch = "/tmp"
    base = {"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "PYTHONUNBUFFERED": "1", "HOME": scratch, "TMPDIR": scratch,
            "XDG_CACHE_HOME": "/tmp/cache", "XDG_CONFIG_HOME": "/tmp/config",
            "PATH": "/opt/standin-venv/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}  # fmt: skip
    assert seen["environ"] == sorted(f"{name}={value}" for name, value in {**base, **offload["env"]}.items())


def runs(project: Playbooks, host: str):
    return sorted((project.results / "latest" / "runs" / host).iterdir())


def test_engine_and_program_are_unprivileged_on_loopback_and_one_at_a_time(seen):
    assert seen["uid"] == "kvtrial"
    assert seen["program"] == "kvtrial"
    assert "127.0.0.1:18765" in seen["sockets"]
    assert len(seen["sockets"].splitlines()) == 1
    assert seen["other"] == "inactive"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="takes two CPUs")
def test_an_engines_unit_keeps_off_the_cpus_that_the_client_was_given(project, seen):
    assert 1 not in cpu_list(seen["cpus"])
    for path in runs(project, "h1"):
        assert all(phase["card"]["cpu_affinity"] == [1] for phase in record(project, "h1", path.name)["phases"])


def test_both_supervisors_leave_the_same_record(project, seen):
    by_host = {}
    for host in ("h1", "h2"):
        by_host[host] = {
            (r["pair"], r["arm"]): r for r in (record(project, host, path.name) for path in runs(project, host))
        }
    assert by_host["h1"].keys() == by_host["h2"].keys()
    for key, one in by_host["h1"].items():
        other = by_host["h2"][key]
        assert one.keys() == other.keys()
        assert one["supervision"]["kind"] == "systemd"
        assert one["supervision"]["unit"] == ENGINE.format(key[1])
        assert 0 < one["supervision"]["exposure"] < 3
        assert other["supervision"] == {"kind": "process", "unit": None, "systemd": None, "exposure": None}
        assert one["left_behind"] == other["left_behind"] == ""
        assert one["launch"] == other["launch"]
        assert {name: one[name] for name in SAME if name != "position"} == {
            n: other[n] for n in SAME if n != "position"
        }
        assert sorted(one["files"]) == sorted(other["files"])
        assert sorted(one["resolved"]) == sorted(other["resolved"])
        assert sorted(p["name"] for p in one["phases"]) == sorted(p["name"] for p in other["phases"])
        counted = [
            {p["name"]: (p["sent"], p["finished"], p["output_tokens"]) for p in r["phases"]} for r in (one, other)
        ]
        assert counted[0] == counted[1]


def test_the_units_say_what_is_promised(project, seen):
    host = project.fleet.hosts[0]
    for arm in ("control", "offload"):
        found = show(host, ENGINE.format(arm), "Restart", "KillMode", "RuntimeMaxUSec", "TimeoutStopUSec", "User",
                     "NoNewPrivileges", "ProtectSystem", "IPAddressDeny", "IPAddressAllow", "MemoryDenyWriteExecute",
                     "PrivateDevices", "DevicePolicy", "RemoveIPC", "CapabilityBoundingSet", "BindsTo",
                     "Conflicts")  # fmt: skip
        other = {"control": "offload", "offload": "control"}[arm]
        assert (found["Restart"], found["KillMode"], found["User"]) == ("no", "mixed", "kvtrial")
        assert found["RuntimeMaxUSec"] not in ("infinity", "0")
        assert found["TimeoutStopUSec"] == "5s"
        assert (found["NoNewPrivileges"], found["ProtectSystem"], found["RemoveIPC"]) == ("yes", "strict", "yes")
        # systemd shows a set, in any order.
        assert set(found["IPAddressDeny"].split()) == {"0.0.0.0/0", "::/0"}
        assert set(found["IPAddressAllow"].split()) == {"127.0.0.0/8", "::1/128"}
        assert (found["MemoryDenyWriteExecute"], found["PrivateDevices"], found["DevicePolicy"]) == (
            "no",
            "no",
            "closed",
        )
        assert found["CapabilityBoundingSet"] == ""
        assert "kvtrial-host.service" in found["BindsTo"]
        assert ENGINE.format(other) in found["Conflicts"]
    source = host.sh("cat /etc/systemd/system/kvtrial-engine@.service")
    assert "LimitMEMLOCK=infinity" in source  # this machine's own limit is lower, so the property shows less
    unclean = host.run("systemd-analyze", "verify", "/etc/systemd/system/kvtrial-engine@.service", check=False)
    assert (unclean.returncode, unclean.stderr) == (0, "")


def test_nothing_is_left_running_or_in_memory(project, seen):
    for host in project.fleet.hosts:
        assert host.sh("pgrep -u kvtrial || true") == ""
        assert host.sh("ps -ww -eo args | grep -E '[s]tandin|[k]vtrial' || true") == ""
        assert host.sh("ls /dev/shm") == ""
    assert project.fleet.hosts[0].sh("systemctl --failed --plain --no-legend") == ""


REFUSED = [
    "systemctl start ssh.service", "systemctl stop ssh.service", "systemctl restart kvtrial-engine@control.service",
    "systemctl start kvtrial-engine@control.service kvtrial-engine@x.service", "systemctl daemon-reload", "sh",
    "systemctl start kvtrial-engine@x.service", "systemctl edit kvtrial-engine@control.service",
    "systemctl stop kvtrial-host.service",
    "systemctl -H x start kvtrial-engine@control.service",
]  # fmt: skip


@pytest.mark.parametrize("command", REFUSED)
def test_the_programs_account_may_do_nothing_else(project, seen, command):
    host = project.fleet.hosts[0]
    done = host.run("runuser", "-u", "kvtrial", "--", "sudo", "-n", *command.split(), check=False)
    assert done.returncode != 0
    assert "a password is required" in done.stderr or "not allowed" in done.stderr


def test_an_engine_cannot_be_started_without_its_host_program(project, seen):
    host = project.fleet.hosts[0]
    done = host.run("runuser", "-u", "kvtrial", "--", "sudo", "-n", "/usr/bin/systemctl", "start",
                    ENGINE.format("control"), check=False)  # fmt: skip
    assert done.returncode != 0
    assert "kvtrial-host.service not found" in done.stderr


def test_arms_exclude_each_other_and_end_with_the_program(project, seen):
    host = project.fleet.hosts[0]
    host.sh("systemd-run -q --unit=kvtrial-host.service --uid=kvtrial sleep 600")
    allowed = ["runuser", "-u", "kvtrial", "--", "sudo", "-n", "/usr/bin/systemctl", "start"]
    state = lambda arm: show(host, ENGINE.format(arm), "ActiveState")["ActiveState"]  # noqa: E731
    try:
        host.run(*allowed, ENGINE.format("control"))
        assert state("control") == "active"
        host.run(*allowed, ENGINE.format("offload"))
        assert state("offload") == "active"
        assert wait(lambda: state("control") == "inactive", 20)
        host.sh("systemctl kill -s KILL kvtrial-host.service")
        assert wait(lambda: state("offload") == "inactive", 20)
    finally:
        host.sh("systemctl stop kvtrial-host.service; systemctl reset-failed", check=False)


PROBE = """
import json, os, socket, time
def tried(do):
    try: return str(do())
    except OSError as error: return type(error).__name__ + " " + os.strerror(error.errno or 0)
def dial(to):
    with socket.create_connection(to, timeout=2): return "open"
server = socket.create_server(("127.0.0.1", 0))
open("/dev/shm/kvtrial-probe", "w").write("x" * 100)
print(json.dumps({
    "loopback": tried(lambda: dial(server.getsockname())),
    "outside": tried(lambda: dial(("OUTSIDE", 22))),
    "etc": tried(lambda: open("/etc/x", "w")),
    "venvs": tried(lambda: open("/var/lib/kvtrial/x", "w")),
    "raw": tried(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW)),
    "disk": tried(lambda: os.mknod("/tmp/disk", 0o60600, os.makedev(7, 0))),
    "namespace": tried(lambda: os.unshare(os.CLONE_NEWUSER) if hasattr(os, "unshare") else open("/proc/1/root/x")),
    "caps": next(l for l in open("/proc/self/status") if l.startswith("CapBnd")).split()[1],
    "tmp": os.listdir("/tmp"),
}), flush=True)
time.sleep(600)
"""


def test_systemd_keeps_an_engine_to_loopback_and_to_its_own(project, seen):
    """The unit's fences, from inside: a probe in place of an engine, as the instance `probe` of the same template."""
    host = project.fleet.hosts[0]
    outside = project.fleet.hosts[1].address
    folder = "/etc/systemd/system/kvtrial-engine@probe.service.d"
    host.write("/opt/probe.py", PROBE.replace("OUTSIDE", outside))
    host.write(f"{folder}/10-launch.conf", "[Service]\nExecStart=\nExecStart=/usr/bin/python3 /opt/probe.py\n")
    try:
        assert host.sh(f"bash -c 'exec 3<>/dev/tcp/{outside}/22 && echo open'") == "open"
        host.sh("systemctl daemon-reload; systemctl start kvtrial-engine@probe.service")
        log = wait(lambda: host.sh("cat /var/log/kvtrial/engine-probe.log"), 20)
        found = json.loads(log)
        assert found.pop("loopback") == "open"
        assert found.pop("outside") == "TimeoutError Success"
        assert found.pop("tmp") == []
        assert found.pop("caps").strip("0") == ""
        refused = {name: value for name, value in found.items() if not value.split()[0].endswith("Error")}
        assert refused == {}, found
        assert host.sh("ls /dev/shm") == "kvtrial-probe"
        host.sh("systemctl kill -s KILL kvtrial-engine@probe.service")
        wait(lambda: show(host, ENGINE.format("probe"), "ActiveState")["ActiveState"] == "failed", 20)
        assert wait(lambda: host.sh("ls /dev/shm") == "", 10)
    finally:
        host.sh(f"systemctl stop kvtrial-engine@probe.service; rm -rf {folder}; systemctl daemon-reload; "
                "systemctl reset-failed", check=False)  # fmt: skip


@pytest.fixture
def with_short_limits(project, seen):
    """Arms of the campaign's own plan with short limits, as the product writes their drop-ins, and deaf to SIGTERM."""
    host = project.fleet.hosts[0]
    plan = msgspec.json.decode(host.sh("cat /var/lib/kvtrial/campaigns/*/plan.json"), type=HostPlan)
    limits = msgspec.structs.replace(plan.limits, deadline_seconds=1.0, stop_timeout_seconds=2.0)
    short = msgspec.structs.replace(plan, limits=limits)
    kept = {}
    for arm, launch in short.launches.items():
        launch.env["STANDIN_FAULT"] = "ignore_sigterm,orphan_core"
        path = str(units.drop_in_path(arm))
        kept[path] = host.run("cat", path).stdout
        host.write(path, units.drop_in(short, arm))
    host.sh("systemctl daemon-reload; systemd-run -q --unit=kvtrial-host.service sleep 600")
    yield host
    for path, text in kept.items():
        host.write(path, text)
    host.sh("systemctl stop kvtrial-host.service 'kvtrial-engine@*'; systemctl daemon-reload; systemctl reset-failed",
            check=False)  # fmt: skip


ENDED = ("ActiveState", "Result", "ExecMainCode", "ExecMainStatus")
KILLED = {"ActiveState": "failed", "Result": "timeout", "ExecMainCode": "2", "ExecMainStatus": "9"}
"""As systemctl shows a unit whose time was over and that SIGKILL ended (CLD_KILLED is 2)."""


def test_an_engine_that_does_not_end_within_its_limit_is_killed(with_short_limits):
    """TimeoutStopSec=: it and its child do not hear SIGTERM."""
    host, unit = with_short_limits, ENGINE.format("control")
    host.sh(f"systemctl start {unit}")
    wait(lambda: int(host.sh("pgrep -cu kvtrial || true")) >= 2, 60)
    assert show(host, unit, "TimeoutStopUSec")["TimeoutStopUSec"] == "2s"
    host.sh(f"systemctl stop {unit}", check=False)
    assert show(host, unit, *ENDED) == KILLED
    assert "Killing" in host.sh(f"journalctl -u {unit} --no-pager | grep -i 'timed out. Killing' || true")
    assert host.sh("pgrep -u kvtrial || true") == ""


@pytest.mark.full
def test_an_engine_is_ended_when_the_campaigns_deadline_is_over(with_short_limits):
    """RuntimeMaxSec=: nobody stops it, and its host program stays."""
    host, unit = with_short_limits, ENGINE.format("offload")
    host.sh(f"systemctl start {unit}")
    wait(lambda: int(host.sh("pgrep -cu kvtrial || true")) >= 2, 60)
    longest = show(host, unit, "RuntimeMaxUSec")["RuntimeMaxUSec"]
    assert longest == f"1min {1 + units.STOP_SLACK_SECONDS - 60}s"
    wait(lambda: show(host, unit, "ActiveState")["ActiveState"] == "failed", 300)
    assert show(host, unit, *ENDED) == KILLED
    assert "reached" in host.sh(f"journalctl -u {unit} --no-pager | grep -i 'runtime time limit' || true")
    assert host.sh("pgrep -u kvtrial || true") == ""
    assert show(host, "kvtrial-host.service", "ActiveState")["ActiveState"] == "active"


def test_another_launch_than_the_plans_is_not_started(project, seen):
    """A drop-in that somebody changed: the program stops before the run, in a sentence."""
    host = project.fleet.hosts[0]
    path = "/etc/systemd/system/kvtrial-engine@control.service.d/10-launch.conf"
    kept = host.run("cat", path).stdout
    campaign = host.sh("ls -d /var/lib/kvtrial/campaigns/*")
    program = host.sh("ls /var/lib/kvtrial/venvs/workload-*/bin/kvtrial-host")
    host.write(path, kept.replace('"--enforce-eager" ', ""))
    host.sh("systemctl daemon-reload")
    try:
        host.sh(f"rm -rf {campaign}/runs/p01-*")
        host.run(program, "start", "--directory", campaign, check=False)
        progress = wait(lambda: json.loads(host.run("cat", f"{campaign}/progress.json").stdout)["state"] == "failed"
                        and json.loads(host.run("cat", f"{campaign}/progress.json").stdout), 30)  # fmt: skip
        assert progress["reason"] == (
            f"{path} is not what the plan says; run the experiment playbook again, it writes the units of its plan."
        )
    finally:
        host.write(path, kept)
        host.sh("systemctl daemon-reload")


def test_a_unit_that_was_written_and_never_read_is_read_by_the_next_run(project, seen, tmp_path):
    """A playbook that was killed between writing a unit's file and telling systemd: nothing is left to write then."""
    host, unit = project.fleet.hosts[0], ENGINE.format("control")
    plan = tmp_path / "plan.json"
    plan.write_text(host.sh("cat /var/lib/kvtrial/campaigns/*/plan.json"))
    launch = f"/etc/systemd/system/{unit}.d/10-launch.conf"
    try:
        for path, part in (("/etc/systemd/system/kvtrial-engine@.service", "configure"), (launch, "units")):
            kept = host.run("cat", path).stdout
            host.write(path, f"{kept}# of another run\n")
            host.sh("systemctl daemon-reload")
            # A unit that failed stays in systemd's memory, as it was read; one that ended well would be read anew.
            host.run("systemd-run", "-q", "--unit=kvtrial-host.service", "sleep", "600")
            host.sh(f"systemctl start {unit}; systemctl kill -s KILL {unit}")
            wait(lambda: show(host, unit, "ActiveState")["ActiveState"] == "failed")
            host.write(path, kept)
            assert show(host, unit, "NeedDaemonReload")["NeedDaemonReload"] == "yes"
            play = tmp_path / f"{part}.yml"
            play.write_text(
                "- hosts: h1\n  gather_facts: false\n  tasks:\n    - ansible.builtin.import_role: "
                f"{{name: kvtrial.vllm.engine, tasks_from: {part}}}\n      vars: {{engine_plan: {plan}}}\n"
            )
            done = project.play(play, fails=False)
            assert recap(done)["h1"]["changed"] == 0
            assert show(host, unit, "NeedDaemonReload")["NeedDaemonReload"] == "no"
            host.sh("systemctl stop kvtrial-host.service; systemctl reset-failed")
    finally:
        host.sh("systemctl stop kvtrial-host.service; systemctl daemon-reload; systemctl reset-failed", check=False)


def test_the_unit_for_gpus_is_clean_too_and_names_only_their_devices(project, seen, tmp_path):
    play = tmp_path / "cuda.yml"
    play.write_text(
        "- hosts: h1\n  gather_facts: false\n  tasks:\n    - ansible.builtin.import_role: {name: kvtrial.vllm.engine, "
        "tasks_from: configure}\n      vars: {engine_backend: cuda}\n"
    )
    project.play(play, fails=False)
    unit = project.fleet.hosts[0].sh("cat /etc/systemd/system/kvtrial-engine@.service")
    assert "DevicePolicy=closed" in unit
    allowed = [line for line in unit.splitlines() if line.startswith("DeviceAllow=")]
    assert "DeviceAllow=char-nvidia rw" in allowed
    assert "DeviceAllow=char-nvidia-frontend rw" in allowed
    assert all(line.startswith("DeviceAllow=char-nvidia") for line in allowed)


def test_uninstalling_leaves_nothing_of_systemd_sudo_and_accounts(project, seen, tmp_path):
    play = tmp_path / "remove.yml"
    play.write_text(
        "- hosts: h1\n  gather_facts: false\n  roles: [{role: kvtrial.vllm.engine, engine_state: absent}]\n"
    )
    host = project.fleet.hosts[0]
    assert host.sh("ls -d /etc/systemd/system/kvtrial* /etc/sudoers.d/kvtrial /var/log/kvtrial") != ""
    project.play(play, fails=False)
    assert (
        host.sh("ls -d /etc/systemd/system/kvtrial* /etc/sudoers.d/kvtrial /var/log/kvtrial; id kvtrial", check=False)
        == ""
    )
    assert host.sh("systemctl list-units --all --plain --no-legend 'kvtrial*'") == ""
    again = project.play(play, fails=False)
    assert recap(again)["h1"]["changed"] == 0, last_line(again)


def test_units_without_root_are_refused_in_a_sentence(project, seen):
    done = project.play("experiment.yml", "--limit", "h1", "-e", "ansible_become=false",
                        "-e", "workload_venv_root=/tmp/v", "-e", "kvtrial_state_dir=/tmp/kvtrial",
                        fails=True)  # fmt: skip
    assert "kvtrial_supervisor=systemd needs root, this is user 1000; set ansible_become=true" in last_line(done)
