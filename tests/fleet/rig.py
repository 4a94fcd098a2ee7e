"""N Linux hosts on this machine, for tests that run Ansible over SSH: systemd as init, a real sshd, own addresses.

A host is a systemd-nspawn container whose disk is an overlay on one shared base, in a network namespace of its own. No
address is added to the machine's own network and no route leads out: the controller runs inside the namespace of the
fleet (10.77.0.1), its hosts are 10.77.0.11 and up. GPUs and drivers are stood in for by the tests, at the edge only.

    python tests/fleet/rig.py up 3          boot hosts 1 to 3, wait for ssh
    python tests/fleet/rig.py in 2 CMD...   run CMD in host 2, without ssh
    python tests/fleet/rig.py ctl CMD...    run CMD where the controller runs
    python tests/fleet/rig.py inventory     an inventory of the hosts that are up
    python tests/fleet/rig.py status | cut 2 | heal 2 | kill 2 | boot 2 | reset 2 | down

KVTRIAL_FLEET_NAME names the fleet (default kv); fleets of different names do not see each other. KVTRIAL_FLEET_SUITE is
Debian's name of the system on the hosts (default bookworm; trixie). A fleet that pytest
made ends with pytest, however that ends. Needs root, cgroup v1 or hybrid, and packages that `prepare` installs.
"""

import argparse
import contextlib
import ctypes
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STATE = Path(os.environ.get("KVTRIAL_FLEET_DIR", "/var/tmp/kvtrial-fleet"))
CGROUP = Path("/sys/fs/cgroup")
WRITABLE = ("memory", "pids", "cpu", "cpuacct", "blkio", "devices")
HIERARCHIES = ("systemd", "unified", *WRITABLE)
NET = "10.77.0"
CONTROLLER = f"{NET}.1"
SUITE = os.environ.get("KVTRIAL_FLEET_SUITE", "bookworm")
"""Debian's name of the system on the hosts, where a fleet is not told another."""
PACKAGES = """systemd systemd-sysv libpam-systemd dbus openssh-server python3 python3-apt python3-debian python3-venv
    iproute2 procps sudo ca-certificates libnuma1""".split()  # noqa: SIM905  a list for people
TOOLS = {"systemd-nspawn": "systemd-container", "mmdebstrap": "mmdebstrap", "ip": "iproute2", "ssh": "openssh-client",
         "setpriv": "util-linux", "nsenter": "util-linux"}  # fmt: skip
USER = "deploy"
REBOOT = 133
"""Exit status of systemd-nspawn when its host asked for a reboot."""
INOTIFY_INSTANCES = 7
"""Of root's, that a host with a session takes: 210 were counted of 30 hosts."""

# nspawn mounts v1 controllers read-only: MemoryMax=, TasksMax= and CPUQuota= would do nothing without the remount. Its
# /sys shows the machine's own interfaces; the namespace's are put in their place.
INIT = f"""#!/bin/sh
for c in {" ".join(WRITABLE)}; do
  mount -o remount,bind,rw,nosuid,nodev,noexec {CGROUP}/$c || echo "fleet-init: $c stays read-only"
done
mkdir /run/s && mount -t sysfs sysfs /run/s
for d in class/net devices/virtual/net; do mount --bind /run/s/$d /sys/$d; done
umount /run/s; rmdir /run/s
# Debian 13's systemd would not boot on cgroup v1 without it.
export SYSTEMD_CGROUP_ENABLE_LEGACY_FORCE=1
exec /lib/systemd/systemd
"""


class CannotRig(Exception):
    """There can be no fleet here; the message is the reason."""


def run(*argv: str | Path, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
    """A command of the rig itself, its output captured."""
    done = subprocess.run([str(a) for a in argv], text=True, capture_output=True, check=False, **options)
    if check and done.returncode:
        raise CannotRig(f"{' '.join(str(a) for a in argv)} ended with {done.returncode}: {done.stderr.strip()}")
    return done


def start_ticks(pid: int) -> int | None:
    """Start time of a process that is no zombie; None if there is none."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[19]) if fields[0] not in "ZX" else None
    return None


def identity(pid: int) -> str:
    """PID and start time: what tells a process from a later one with its number."""
    return f"{pid} {start_ticks(pid)}"


def living(path: Path) -> int | None:
    """The pid that the file names, if that very process lives."""
    with contextlib.suppress(OSError, ValueError):
        pid, ticks = path.read_text().split()
        if ticks != "None" and start_ticks(int(pid)) == int(ticks):
            return int(pid)
    return None


def child(pid: int | None) -> int | None:
    """The first child of a process."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]) if pid else None
    return None


# --- what the machine needs ----------------------------------------------------------------------------------------


def prepare(suite: str = SUITE) -> None:
    """Check and install what a fleet of one of Debian's suites needs. Raises CannotRig with the reason."""
    if os.environ.get("KVTRIAL_FLEET") == "no":
        raise CannotRig("KVTRIAL_FLEET=no")
    if os.geteuid() != 0:
        raise CannotRig("real hosts need root, this is not root")
    capabilities = int(Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0], 16)
    if not capabilities >> 21 & 1:
        raise CannotRig("real hosts need CAP_SYS_ADMIN, this root lacks it")
    if missing := [c for c in HIERARCHIES if not (CGROUP / c).is_dir()]:
        raise CannotRig(f"tried with cgroup v1 or hybrid only; here {', '.join(missing)} is not below {CGROUP}")
    if packages := sorted({package for tool, package in TOOLS.items() if shutil.which(tool) is None}):
        if shutil.which("apt-get") is None:
            raise CannotRig(f"{', '.join(packages)} is missing and there is no apt-get to install it")
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        run("apt-get", "update", "-q", env=quiet, check=False)
        done = run("apt-get", "install", "-qy", "--no-install-recommends", *packages, env=quiet, check=False)
        if done.returncode:
            raise CannotRig(
                f"apt-get can't install {', '.join(packages)}: {(done.stderr or done.stdout).strip()[-300:]}"
            )
    make_base(suite)


def mirror() -> str:
    """The Debian mirror that this machine is configured for."""
    if given := os.environ.get("KVTRIAL_FLEET_MIRROR"):
        return given
    for path in [*Path("/etc/apt/sources.list.d").glob("*.sources"), Path("/etc/apt/sources.list")]:
        with contextlib.suppress(OSError):
            for line in path.read_text().splitlines():
                words = line.split()
                urls = [w for w in words if w.startswith(("http://", "https://"))]
                if words and words[0] in ("URIs:", "deb") and urls and urls[0].rstrip("/").endswith("/debian"):
                    return urls[0]
    raise CannotRig("apt on this machine names no Debian mirror; set KVTRIAL_FLEET_MIRROR to one")


def base(suite: str) -> Path:
    """Where the disk that all hosts of a suite share is; another list of packages is another place."""
    return STATE / f"base-{hashlib.sha256(' '.join([suite, *PACKAGES, INIT]).encode()).hexdigest()[:12]}"


def make_base(suite: str) -> None:
    """Build the shared disk, once; minutes where the machine is busy."""
    import fcntl

    STATE.mkdir(parents=True, exist_ok=True)
    with (STATE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (base(suite) / ".done").exists():
            return
        target = base(suite).with_suffix(".tmp")
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        tar = target.with_suffix(".tar")
        run("mmdebstrap", "--quiet", "--variant=apt", f"--include={','.join(PACKAGES)}", suite, tar, mirror())
        run("tar", "-C", target, "--numeric-owner", "-xpf", tar)
        tar.unlink()
        _furnish(target)
        (target / ".done").touch()
        shutil.rmtree(base(suite), ignore_errors=True)
        target.rename(base(suite))


def _furnish(root: Path) -> None:
    """Users and keys, and nothing of this machine: its name, its resolver."""
    if not (STATE / "id").exists():
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", STATE / "id", "-C", "kvtrial-fleet-test")
    run("chroot", root, "useradd", "-m", "-s", "/bin/bash", USER)
    for home, owner in ((root / "root", 0), (root / "home" / USER, 1000)):
        (home / ".ssh").mkdir(mode=0o700, exist_ok=True)
        key = home / ".ssh" / "authorized_keys"
        shutil.copyfile(STATE / "id.pub", key)
        key.chmod(0o600)
        for path in (home / ".ssh", key):
            os.chown(path, owner, owner)
    sudoers = root / "etc/sudoers.d" / USER
    sudoers.write_text(f"{USER} ALL=(ALL) NOPASSWD: ALL\n")
    sudoers.chmod(0o440)
    (root / "etc/ssh/sshd_config.d/50-fleet.conf").write_text("UseDNS no\n")
    for name in ("etc/machine-id", "etc/resolv.conf", "etc/default/locale"):
        (root / name).write_text("")
    (root / "etc/hostname").unlink(missing_ok=True)
    (root / "sbin/fleet-init").write_text(INIT)
    (root / "sbin/fleet-init").chmod(0o755)


# --- one host ------------------------------------------------------------------------------------------------------


@dataclass
class Host:
    """One host of a fleet. `root` is its disk as seen from its own mount namespace only; use `run` to look at it."""

    fleet: "Fleet"
    number: int
    disk_size: str = ""
    binds: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """h1, h2 ..: its name in the inventory."""
        return f"h{self.number}"

    @property
    def address(self) -> str:
        """Its address, seen by the controller and the other hosts."""
        return f"{NET}.{10 + self.number}"

    @property
    def folder(self) -> Path:
        """What the rig keeps of it on the machine."""
        return self.fleet.folder / self.name

    @property
    def netns(self) -> str:
        """Its network namespace."""
        return f"{self.fleet.name}-{self.name}"

    def supervisor(self) -> int | None:
        """The process that holds nspawn, if it lives."""
        return living(self.folder / "pid")

    def init(self) -> int | None:
        """The host's PID 1 as the machine sees it: supervisor > nspawn > init."""
        return child(child(self.supervisor()))

    def boot(self) -> None:
        """Boot on the disk it had, or a fresh one, and wait for ssh."""
        self.start()
        self.wait()

    def start(self) -> None:
        """Boot without waiting."""
        if self.supervisor():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self._connect()
        for name in HIERARCHIES:
            (CGROUP / name / self.fleet.name / self.name).mkdir(parents=True, exist_ok=True)
        # Root in a host could make nodes of the machine's disks.
        (CGROUP / "devices" / self.fleet.name / self.name / "devices.deny").write_text("b *:* rw")
        arguments = [self.fleet.name, str(self.number), self.fleet.owner, self.fleet.suite, self.disk_size, *self.binds]
        with (self.folder / "console.log").open("ab") as log:
            process = subprocess.Popen(
                ["unshare", "--mount", "--propagation", "private", sys.executable, __file__, "_hold", *arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/",
            )  # fmt: skip
        (self.folder / "pid").write_text(identity(process.pid))

    def _connect(self) -> None:
        if Path(f"/run/netns/{self.netns}").exists():
            return
        ctl, veth = self.fleet.netns, f"v{self.number}"
        run("ip", "netns", "add", self.netns)
        run("ip", "-n", self.netns, "link", "set", "lo", "up")
        run("ip", "-n", ctl, "link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", self.netns)
        run("ip", "-n", ctl, "link", "set", veth, "master", "br0", "up")
        run("ip", "-n", self.netns, "addr", "add", f"{self.address}/24", "dev", "eth0")
        run("ip", "-n", self.netns, "link", "set", "eth0", "up")
        run("ip", "-n", self.netns, "route", "add", "default", "via", CONTROLLER)

    def wait(self, seconds: float = 60.0) -> None:
        """Wait until sshd answers. Raises CannotRig with the console's end."""
        probe = f"exec 3<>/dev/tcp/{self.address}/22 && read -t1 -u3 l && [[ $l == SSH-* ]]"
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.fleet.ctl("bash", "-c", probe).returncode == 0:
                return
            if not self.supervisor():
                break
            time.sleep(0.1)
        console = (self.folder / "console.log").read_text(errors="replace")[-1000:]
        raise CannotRig(f"host {self.name} gives no ssh; its console ends: {console}")

    def run(self, *argv: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command as root in the host, without ssh. Raises AssertionError where it fails and `check` is set."""
        done = subprocess.run(self.entered(*argv), text=True, capture_output=True, check=False, **options)
        assert not check or done.returncode == 0, f"{self.name}: {argv}: {done.stdout}{done.stderr}"
        return done

    def sh(self, script: str, check: bool = True) -> str:
        """What a shell script prints in the host."""
        return self.run("sh", "-ec", script, check=check).stdout.strip()

    def entered(self, *argv: str) -> list[str]:
        """The command line that runs `argv` in the host."""
        init = self.init()
        if init is None:
            raise CannotRig(f"host {self.name} is down")
        # nsenter keeps the caller's capabilities: without the bounding set of the host's own init, `date -s` in a host
        # would set the clock of the whole machine.
        bounding = int(Path(f"/proc/{init}/status").read_text().partition("CapBnd:")[2].split()[0], 16)
        keep = ",".join(["-all", *(f"+cap_{n}" for n in range(41) if bounding >> n & 1)])
        return ["nsenter", "-t", str(init), "-m", "-u", "-i", "-n", "-p", "-C", "-r", "-w",
                "setpriv", f"--bounding-set={keep}", *argv]  # fmt: skip

    def put(self, source: Path, target: str) -> None:
        """Copy a file or folder into the host as `target`, without ssh."""
        with subprocess.Popen(["tar", "-C", source.parent, "-chf", "-", source.name], stdout=subprocess.PIPE) as tar:
            folder = f"{target}.incoming"
            done = subprocess.run(
                self.entered("sh", "-ec", 'rm -rf "$1"; mkdir -p "$1"; tar -C "$1" --no-same-owner -xf -; '
                             'rm -rf "$3"; mv "$1/$2" "$3"; rmdir "$1"', "-", folder, source.name, target),
                stdin=tar.stdout, capture_output=True, text=True, check=False,
            )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def write(self, path: str, text: str, mode: str = "0644") -> None:
        """Write a file in the host."""
        self.run("sh", "-ec", 'mkdir -p "$(dirname "$1")"; cat > "$1"; chmod "$2" "$1"', "-", path, mode, input=text)

    def cut(self) -> None:
        """Take the host off the network."""
        run("ip", "-n", self.fleet.netns, "link", "set", f"v{self.number}", "down")

    def heal(self) -> None:
        """Bring it back."""
        run("ip", "-n", self.fleet.netns, "link", "set", f"v{self.number}", "up")

    def kill(self) -> None:
        """End the host at once: kill -9 of its init. Its disk stays. Cut it off first, and it is a power cut."""
        init, supervisor = self.init(), self.supervisor()
        if init:
            os.kill(init, signal.SIGKILL)
        until = time.monotonic() + 5.0
        while self.supervisor() and time.monotonic() < until:
            time.sleep(0.05)
        if supervisor and self.supervisor() == supervisor:
            os.kill(supervisor, signal.SIGKILL)
        (self.folder / "pid").unlink(missing_ok=True)

    def reset(self) -> None:
        """Boot on a fresh disk."""
        self.kill()
        shutil.rmtree(self.folder / "disk", ignore_errors=True)
        self.boot()


def hold(arguments: list[str]) -> None:
    """In a mount namespace of its own: the host's disk, then nspawn, again after a reboot, until the owner is gone."""
    name, number, owner, suite, disk_size, *binds = arguments
    host = Host(Fleet(name, owner, suite), int(number))
    for hierarchy in HIERARCHIES:
        (CGROUP / hierarchy / name / host.name / "cgroup.procs").write_text(str(os.getpid()))
    disk, root = host.folder / "disk", host.folder / "root"
    for folder in (disk, root, Path("/run/systemd/nspawn")):
        folder.mkdir(parents=True, exist_ok=True)
    if disk_size:
        run("mount", "-t", "tmpfs", "-o", f"size={disk_size},mode=755", "fleet-disk", disk)
    for part in ("up", "work"):
        (disk / part).mkdir(exist_ok=True)
    layers = f"lowerdir={base(suite)},upperdir={disk / 'up'},workdir={disk / 'work'}"
    run("mount", "-t", "overlay", "fleet-root", "-o", layers, root)
    # What nspawn leaves in /run goes with this mount namespace.
    run("mount", "-t", "tmpfs", "fleet-run", "/run/systemd/nspawn")
    command = [
        "systemd-nspawn", "--quiet", "--register=no", "--keep-unit", f"--machine={host.netns}", f"--directory={root}",
        f"--network-namespace-path=/run/netns/{host.netns}", "--resolv-conf=off", "--timezone=off", "--link-journal=no",
        "--console=pipe", "--kill-signal=SIGRTMIN+3", "--capability=CAP_NET_ADMIN,CAP_BPF,CAP_PERFMON",
        "--system-call-filter=bpf", *(f"--bind-ro={bind}" for bind in binds), "/sbin/fleet-init",
    ]  # fmt: skip
    environment = {**os.environ, "SYSTEMD_NSPAWN_API_VFS_WRITABLE": "network"}
    status = REBOOT
    while status == REBOOT:
        process = subprocess.Popen(command, env=environment, preexec_fn=_die_with_parent)
        while (ended := process.poll()) is None:
            if owner and not owner_lives(owner):
                if (init := child(process.pid)) is not None:
                    os.kill(init, signal.SIGKILL)
                process.kill()
            time.sleep(0.2)
        status = ended


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def owner_lives(owner: str) -> bool:
    """Whether the process that made a fleet lives; one without an owner always does."""
    pid, _, ticks = owner.partition(":")
    return not owner or start_ticks(int(pid)) == int(ticks)


# --- a fleet -------------------------------------------------------------------------------------------------------


class Fleet:
    """Hosts, and the namespace that the controller runs in. `owner` "PID:TICKS": the fleet ends with that process."""

    def __init__(self, name: str, owner: str = "", suite: str = SUITE) -> None:
        self.name = name
        self.owner = owner
        self.suite = suite
        self.folder = STATE / "fleets" / name
        self.netns = f"{name}-ctl"
        self.hosts: list[Host] = []
        self.servers: list[subprocess.Popen[bytes]] = []

    def up(self, count: int, disk_size: str = "", binds: Sequence[str] = ()) -> list[Host]:
        """Boot hosts 1..count that are not up. `disk_size` ("64M"): a disk of that size, gone with a kill.

        `binds`: SOURCE:TARGET, read-only from the machine.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "owner").write_text(self.owner)
        if not Path(f"/run/netns/{self.netns}").exists():
            run("ip", "netns", "add", self.netns)
            run("ip", "-n", self.netns, "link", "set", "lo", "up")
            run("ip", "-n", self.netns, "link", "add", "br0", "type", "bridge")
            run("ip", "-n", self.netns, "addr", "add", f"{CONTROLLER}/24", "dev", "br0")
            run("ip", "-n", self.netns, "link", "set", "br0", "up")
            # Whatever a host sends elsewhere is answered 'network is unreachable' at once.
            self.ctl("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        allowed = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text())
        if allowed < (needed := INOTIFY_INSTANCES * count):
            raise CannotRig(
                f"{count} hosts need fs.inotify.max_user_instances of {needed}, this machine has {allowed}; a systemd "
                f"without one hangs. Set it: sysctl -w fs.inotify.max_user_instances={needed}"
            )
        self.hosts = [Host(self, n, disk_size, tuple(binds)) for n in range(1, count + 1)]
        for host in self.hosts:
            host.start()
        for host in self.hosts:
            host.wait()
        self.write_inventory()
        return self.hosts

    def ctl(self, *argv: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command where the controller runs: the fleet's hosts are all it can reach."""
        options = {"text": True, "capture_output": True, "check": False, **options}
        done: subprocess.CompletedProcess[str] = subprocess.run(self.entered(*argv), **options)
        return done

    def entered(self, *argv: str | Path) -> list[str]:
        """The command line that runs `argv` in the controller's namespace."""
        return ["nsenter", f"--net=/run/netns/{self.netns}", *map(str, argv)]

    def serve(self, folder: Path, port: int) -> str:
        """Serve a folder over HTTP to the hosts until the fleet goes down; its URL."""
        log = (self.folder / f"http-{port}.log").open("ab")
        server = subprocess.Popen(
            self.entered(sys.executable, "-m", "http.server", "--bind", CONTROLLER, "--directory", folder, str(port)),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_die_with_parent,
        )  # fmt: skip
        self.servers.append(server)
        probe = f"exec 3<>/dev/tcp/{CONTROLLER}/{port}"
        for _ in range(100):
            if self.ctl("bash", "-c", probe).returncode == 0:
                return f"http://{CONTROLLER}:{port}"
            time.sleep(0.05)
        raise CannotRig(f"no HTTP server on port {port}: {(self.folder / f'http-{port}.log').read_text()}")

    @property
    def inventory(self) -> Path:
        """An inventory of the hosts; tests put group_vars beside it, or name it next to another inventory."""
        return self.folder / "hosts.yml"

    @property
    def ssh_arguments(self) -> str:
        """Options of ssh: the hosts' key is known, and a lost host is noticed within seconds."""
        return (
            f"-o ControlMaster=auto -o ControlPersist=60s -o UserKnownHostsFile={self.folder}/known_hosts "
            "-o ConnectTimeout=3 -o ServerAliveInterval=2 -o ServerAliveCountMax=2"
        )

    def write_inventory(self) -> None:
        """Write the inventory, and the known_hosts that keeps host key checking on."""
        key = " ".join((base(self.suite) / "etc/ssh/ssh_host_ed25519_key.pub").read_text().split()[:2])
        (self.folder / "known_hosts").write_text("".join(f"{host.address} {key}\n" for host in self.hosts))
        lines = ["all:", "  hosts:"]
        for host in self.hosts:
            lines += [
                f"    {host.name}:",
                f"      ansible_host: {host.address}",
                f"      ansible_user: {USER}",
                f"      ansible_ssh_private_key_file: {STATE / 'id'}",
                f"      ansible_ssh_common_args: {self.ssh_arguments}",
                "      ansible_python_interpreter: /usr/bin/python3",
            ]
        self.inventory.write_text("\n".join(lines) + "\n")

    def down(self) -> None:
        """End hosts, remove namespaces, cgroups and disks; works on what any earlier process left, too."""
        for server in self.servers:
            server.kill()
            server.wait()
        for folder in sorted(self.folder.glob("h[0-9]*")):
            Host(self, int(folder.name[1:])).kill()
        self._end_strays()
        names = [line.split()[0] for line in run("ip", "netns", "list").stdout.splitlines() if line.split()]
        for name in names:
            if name == self.netns or (name.startswith(f"{self.name}-h") and name[len(self.name) + 2 :].isdigit()):
                run("ip", "netns", "del", name)
        for hierarchy in HIERARCHIES:
            for folder, _, _ in os.walk(CGROUP / hierarchy / self.name, topdown=False):
                with contextlib.suppress(OSError):
                    Path(folder).rmdir()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end_strays(self) -> None:
        """What is left in the hosts' own cgroup, and the controller's namespace: ssh masters outlive ansible."""
        for _ in range(30):
            pids = [int(pid) for path in (CGROUP / "pids" / self.name).rglob("cgroup.procs")
                    for pid in path.read_text().split()]  # fmt: skip
            if Path(f"/run/netns/{self.netns}").exists():
                pids += [int(pid) for pid in run("ip", "netns", "pids", self.netns, check=False).stdout.split()]
            pids = [pid for pid in pids if pid != os.getpid() and start_ticks(pid) is not None]
            if not pids:
                return
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)


def sweep() -> None:
    """Take down the fleets whose owner is gone."""
    for folder in (STATE / "fleets").glob("*"):
        owner = (folder / "owner").read_text() if (folder / "owner").exists() else ""
        if owner and not owner_lives(owner):
            Fleet(folder.name).down()


@contextlib.contextmanager
def a_fleet(count: int, disk_size: str = "", binds: Sequence[str] = (), suite: str = SUITE) -> Iterator[Fleet]:
    """A fleet of this process, down afterwards whatever happens. Raises CannotRig."""
    prepare(suite)
    sweep()
    fleet = Fleet(f"kv{os.getpid()}x{len(_MADE)}", f"{os.getpid()}:{start_ticks(os.getpid())}", suite)
    _MADE.append(fleet.name)
    try:
        fleet.up(count, disk_size, binds)
        yield fleet
    finally:
        fleet.down()


_MADE: list[str] = []
COMMANDS = ["up", "down", "in", "ctl", "status", "inventory", "cut", "heal", "kill", "boot", "reset", "sweep"]


def main(arguments: list[str]) -> int:
    """The command line; see the module's text."""
    if arguments[:1] == ["_hold"]:
        hold(arguments[1:])
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    given = parser.parse_args(arguments)
    fleet = Fleet(os.environ.get("KVTRIAL_FLEET_NAME", "kv"))
    fleet.hosts = [Host(fleet, int(f.name[1:])) for f in sorted(fleet.folder.glob("h[0-9]*"))]
    hosts = {str(host.number): host for host in fleet.hosts} | {host.name: host for host in fleet.hosts}
    try:
        if given.command == "up":
            prepare()
            sweep()
            fleet.up(int((given.rest or ["3"])[0]), os.environ.get("KVTRIAL_FLEET_DISK", ""), given.rest[1:])
        elif given.command == "in":
            return subprocess.run(hosts[given.rest[0]].entered(*given.rest[1:]), check=False).returncode
        elif given.command == "ctl":
            return subprocess.run(fleet.entered(*given.rest), check=False).returncode
        elif given.command == "inventory":
            print(fleet.inventory.read_text(), end="")
        elif given.command == "status":
            for host in fleet.hosts:
                print(host.name, host.address, f"up init={host.init()}" if host.init() else "down")
        elif given.command in ("down", "sweep"):
            fleet.down() if given.command == "down" else sweep()
        else:
            getattr(hosts[given.rest[0]], given.command)()
    except CannotRig as error:
        print(f"fleet: {error}", file=sys.stderr)
        return 1
    except KeyError as error:
        print(f"fleet: there is no host {error.args[0]}; known are {', '.join(h.name for h in fleet.hosts) or 'none'}",
              file=sys.stderr)  # fmt: skip
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
