"""The systemd units of engine and host program: their names and texts, and how an unprivileged program works them.

Each arm has one unit, kvtrial-engine@ARM.service: a template that the role engine installs (hardening, accounts, ways
to end) and a drop-in with the arm's launch, made here from the launch specification. `drop_in` is pure; the controller
calls it to write the files, the host calls it again to see that what is loaded is what the plan says. The host program
itself is the transient unit kvtrial-host.service; an engine's unit is bound to it and ends with it.
"""

import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from kvtrial.record.cpulist import as_list, cpu_list
from kvtrial.record.errors import UnusableInput
from kvtrial.record.plan import HostPlan
from kvtrial.record.record import Supervision

SYSTEMCTL = "/usr/bin/systemctl"
PROGRAM_UNIT = "kvtrial-host.service"
ACCOUNT = "kvtrial"
LOGS = Path("/var/log/kvtrial")
UNITS = Path("/etc/systemd/system")
DROP_IN = "10-launch.conf"
CACHE = "VLLM_CACHE_ROOT"
SCRATCH = "/tmp"
"""The unit's own: PrivateTmp makes it anew at every start."""

BASE_ENVIRONMENT = {"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "PYTHONUNBUFFERED": "1"}
SETS_ITSELF = (
    "USER LOGNAME SHELL INVOCATION_ID JOURNAL_STREAM SYSTEMD_EXEC_PID MEMORY_PRESSURE_WATCH MEMORY_PRESSURE_WRITE"
)
ANY_CPUS = 1024
"""More CPUs than a host has. The kernel leaves out those that are not there, so a unit's text needs no host's count."""
STOP_SLACK_SECONDS = 60
PROGRAM_STOP_SECONDS = 90
_ARM = re.compile(r"[a-z0-9][a-z0-9_]*")


def environment(argv: list[str], env: dict[str, str], scratch: str) -> dict[str, str]:
    """An engine's whole environment: a fixed base, folders of its own in `scratch`, and what the launch sets."""
    binaries = str(Path(argv[0]).parent)
    return {
        **BASE_ENVIRONMENT,
        "PATH": f"{binaries}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": scratch,
        "TMPDIR": scratch,
        "XDG_CACHE_HOME": f"{scratch}/cache",
        "XDG_CONFIG_HOME": f"{scratch}/config",
        **env,
    }


def engine_unit(arm: str) -> str:
    """The unit of an arm. Raises UnusableInput for a name that a unit and a sudoers line can't hold."""
    if not _ARM.fullmatch(arm):
        raise UnusableInput(
            f"arm {arm!r} can't name a systemd unit; use a-z, 0-9 and _ only, or kvtrial_supervisor=process."
        )
    return f"kvtrial-engine@{arm}.service"


def engine_log(arm: str) -> Path:
    """Where the unit of an arm writes; made anew at every start, by systemd, in a folder that is root's."""
    return LOGS / f"engine-{arm}.log"


def quoted(text: str, command: bool) -> str:
    """One word for Environment= or, as `command`, ExecStart=: nothing in it is expanded.

    Source: systemd.syntax(7), systemd.unit(5) specifiers, systemd.service(5) command lines. Raises UnusableInput for
    what no unit file can hold.
    """
    if "\0" in text:
        raise UnusableInput("a launch holds a NUL byte; no unit and no argv can.")
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    escaped = re.sub(r"[\x01-\x1f\x7f]", lambda found: f"\\x{ord(found[0]):02x}", escaped)
    return f'"{escaped.replace("$", "$$") if command else escaped}"'


def drop_in(plan: HostPlan, arm: str) -> str:
    """The text of an arm's drop-in: the same argv and environment that the process supervisor gives.

    Engines exclude each other, and end with the host program, at the campaign's deadline, or when they do not end
    within the time that the plan gives them.
    """
    launch, limits = plan.launches[arm], plan.limits
    others = [engine_unit(other) for other in sorted(plan.launches) if other != arm]
    env = environment(launch.argv, launch.env, SCRATCH)
    lines = [
        f"# Arm {arm} of {plan.protocol}, written by kvtrial from the plan; changes are lost.",
        "[Unit]",
        f"BindsTo={PROGRAM_UNIT}",
        *([f"Conflicts={' '.join(others)}"] if others else []),
        "",
        "[Service]",
        "ExecStart=",
        f"ExecStart={' '.join(quoted(word, True) for word in launch.argv)}",
        *(f"Environment={quoted(f'{name}={value}', False)}" for name, value in sorted(env.items())),
        f"UnsetEnvironment={SETS_ITSELF}",
        # All else is read-only to the engine; without the folder it compiles anew at every start.
        *([f"ReadWritePaths={quoted('-' + env[CACHE], False)}"] if CACHE in env else []),
        *([f"CPUAffinity={cpus}"] if (cpus := cpus_beside(plan.client_cpus)) else []),
        f"RuntimeMaxSec={limits.deadline_seconds + STOP_SLACK_SECONDS:.0f}",
        f"TimeoutStopSec={limits.stop_timeout_seconds:.0f}",
        "",
    ]
    return "\n".join(lines)


def cpus_beside(client_cpus: str) -> str:
    """The CPUs of an engine whose client has `client_cpus` for itself, as systemd lists them; "" for no limit."""
    if client_cpus in ("auto", "none"):
        return ""
    return as_list(set(range(ANY_CPUS)) - cpu_list(client_cpus))


def drop_in_path(arm: str) -> Path:
    """Where the drop-in of an arm lies."""
    return UNITS / f"{engine_unit(arm)}.d" / DROP_IN


def sudo_rule(arms: Iterable[str]) -> str:
    """The sudoers line: the program's account may start and stop exactly these units, and nothing else."""
    commands = [f"{SYSTEMCTL} {verb} {engine_unit(arm)}" for arm in sorted(arms) for verb in ("start", "stop")]
    return f"{ACCOUNT} ALL=(root) NOPASSWD: {', '.join(commands)}\n"


# --- on the host ---------------------------------------------------------------------------------------------------


def systemctl(verb: str, unit: str, seconds: float) -> str:
    """Start or stop a unit, through sudo unless root; what systemctl complains of, "" if nothing."""
    command = [SYSTEMCTL, verb, unit]
    if os.geteuid() != 0:
        command = ["sudo", "-n", *command]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[0]


def show(unit: str, *properties: str) -> dict[str, str]:
    """Properties of a unit; empty texts where systemd does not answer."""
    command = [SYSTEMCTL, "show", unit, f"--property={','.join(properties)}"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        output = ""
    values = dict.fromkeys(properties, "")
    values.update(line.partition("=")[::2] for line in output.splitlines() if "=" in line)
    return values


def refuse_other_launch(plan: HostPlan, arm: str) -> None:
    """Raise UnusableInput where the drop-in on this host isn't the plan's: another plan's launch would be measured."""
    path = drop_in_path(arm)
    try:
        same = path.read_text() == drop_in(plan, arm)
    except OSError:
        same = False
    if not same:
        raise UnusableInput(
            f"{path} is not what the plan says; run the experiment playbook again, it writes the units of its plan."
        )
    if show(engine_unit(arm), "NeedDaemonReload")["NeedDaemonReload"] == "yes":
        raise UnusableInput(f"systemd has not read {path} yet; run systemctl daemon-reload as root and start again.")


def supervision(arm: str) -> Supervision:
    """What supervises an arm here: the unit, systemd's version, and the unit's exposure (0 safe to 10 unsafe)."""
    unit = engine_unit(arm)
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}
    command = ["systemd-analyze", "security", "--no-pager", unit]
    try:
        output = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=False, env=environment
        ).stdout
        version = subprocess.run(
            ["systemctl", "--version"], capture_output=True, text=True, timeout=30, check=False, env=environment
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        output = version = ""
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", output)
    return Supervision(
        kind="systemd",
        unit=unit,
        systemd=version.split()[1] if len(version.split()) > 1 else None,
        exposure=float(found[1]) if found else None,
    )


def start_program(directory: Path, executable: Path, plan: HostPlan) -> None:
    """Start the host program as a transient unit under its own account. Raises UnusableInput with what to do."""
    if os.geteuid() != 0:
        raise UnusableInput(
            "kvtrial_supervisor=systemd starts a unit, which takes root; set ansible_become: true for the host, or "
            "kvtrial_supervisor=process."
        )
    limits = plan.limits
    stop = limits.stop_timeout_seconds + PROGRAM_STOP_SECONDS
    properties = {
        "User": ACCOUNT,
        "Group": ACCOUNT,
        "WorkingDirectory": str(directory),
        "KillMode": "mixed",
        "TimeoutStopSec": f"{stop:.0f}",
        "RuntimeMaxSec": f"{limits.deadline_seconds + stop + STOP_SLACK_SECONDS:.0f}",
        "Restart": "no",
        "LimitNOFILE": "65536",
        "UMask": "0022",
        # What would set NoNewPrivileges can't be used: the program asks sudo for its engines. ProtectControlGroups,
        # where the host is itself a container, shows another boot id than outside: the program would pass for dead.
        "ProtectSystem": "strict",
        "ReadWritePaths": str(directory.parent),
        "ProtectHome": "read-only",
        "PrivateTmp": "yes",
        "IPAddressDeny": "any",
        "IPAddressAllow": "localhost",
        "Description": f"kvtrial host program, campaign {directory.name}",
    }
    command = ["systemd-run", "--quiet", "--collect", f"--unit={PROGRAM_UNIT}"]
    command += [f"--property={name}={value}" for name, value in properties.items()]
    command += [str(executable), "run", "--directory", str(directory), "--log", str(directory / "program.log")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UnusableInput(
            f"{PROGRAM_UNIT} could not be started ({said}); if another campaign runs here, wait for it or stop it with "
            f"playbooks/teardown.yml."
        )
