"""A stand-in for the vendor's apt repository: tiny .debs with the vendor's names, signed by a key made here.

No driver is in them, and they say so (Description, files, what `nvidia-smi` prints as the GPU's name). What they do is
what a host sees of a driver: `nvidia-smi` answers with the version of its library, and only if the loaded module has
the same one; the module of the version on disk is "loaded" by the next boot.
"""

import gzip
import hashlib
import os
import shutil
import subprocess
import textwrap
from dataclasses import dataclass
from pathlib import Path

STANDIN = "/usr/lib/kvtrial-standin"
GPU = "/etc/kvtrial-standin/gpu"

SMI = f"""#!/bin/sh
# Stand-in of the kvtrial tests, no NVIDIA program.
library=$(cat {STANDIN}/library-version)
module=$(sed -n 's/.*Kernel Module for [^ ]* *\\([0-9.]*\\).*/\\1/p' /proc/driver/nvidia/version 2>/dev/null)
[ -n "$module" ] || {{ echo "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."; exit 9; }}
[ "$library" = "$module" ] || {{ echo "Failed to initialize NVML: Driver/library version mismatch"; exit 18; }}
name="Stand-in GPU" mig=Disabled persistence=Enabled processes="" fields="" apps=""
[ ! -e {GPU} ] || . {GPU}
for argument; do
  case $argument in
    --query-gpu=*) fields=${{argument#*=}} ;;
    --query-compute-apps=*) apps=${{argument#*=}} ;;
  esac
done
if [ -n "$apps" ]; then
  for process in $processes; do
    case $apps in
      pid,process_name) echo "$process, stand-in-process" ;;
      *) echo "$process, 100, GPU-standin" ;;
    esac
  done
  exit 0
fi
line="" separator=""
for field in $(echo "$fields" | tr , ' '); do
  case $field in
    index) value=0 ;; uuid) value=GPU-standin ;; name) value=$name ;;
    memory.total) value=1024 ;; memory.used) value=0 ;;
    driver_version) value=$library ;; pci.bus_id) value=00000000:01:00.0 ;; compute_cap) value=9.0 ;;
    ecc.mode.current) value=Enabled ;; persistence_mode) value=$persistence ;; mig.mode.current) value=$mig ;;
    *) value="[N/A]" ;;
  esac
  line="$line$separator$value" separator=", "
done
echo "$line"
"""
LOAD = f"""#!/bin/sh
# Stand-in of the kvtrial tests: "loads" the module that is on disk, as a boot does.
mountpoint -q /proc/driver || mount -t tmpfs kvtrial-standin /proc/driver
mkdir -p /proc/driver/nvidia
echo "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  $(cat {STANDIN}/module-version)  kvtrial stand-in" \\
  > /proc/driver/nvidia/version
for node in nvidia0 nvidiactl; do [ -e /dev/$node ] || mknod /dev/$node c 1 3; done
# Without nvidia_uvm: something has to ask for it (modprobe), and to make its node.
mkdir -p /run/kvtrial-standin
printf 'Character devices:\n195 nvidia\n195 nvidiactl\n' > /run/kvtrial-standin/devices
mountpoint -q /proc/devices || mount --bind /run/kvtrial-standin/devices /proc/devices
"""
MODPROBE = """#!/bin/sh
# Stand-in of the kvtrial tests: the kernel of a test host has no module of NVIDIA's, and the host no modprobe.
[ "$1" = nvidia_uvm ] && [ -e /proc/driver/nvidia/version ] || { echo "FATAL: Module $1 not found."; exit 1; }
grep -q nvidia-uvm /run/kvtrial-standin/devices || echo '510 nvidia-uvm' >> /run/kvtrial-standin/devices
"""
FABRIC_UNIT = f"""[Unit]
Description=kvtrial stand-in: no fabric manager, it only stays
[Service]
ExecStartPre=/usr/bin/test ! -e {STANDIN}/fabric-fails
ExecStart=/usr/bin/sleep infinity
[Install]
WantedBy=multi-user.target
"""
DKMS = f"""#!/bin/sh
# Stand-in of the kvtrial tests: says that the module on disk is built where the kernel's headers are.
kernel=$(uname -r)
[ -d "/lib/modules/$kernel/build" ] && state=installed || state=added
[ ! -e {STANDIN}/dkms-fails ] || state=added
echo "nvidia/$(cat {STANDIN}/module-version), $kernel, x86_64: $state"
"""
UNIT = f"""[Unit]
Description=kvtrial stand-in: load the module that is on disk
DefaultDependencies=no
After=local-fs.target
Before=ssh.service sysinit.target
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart={STANDIN}/load
"""
PACKAGES = ["nvidia-driver-cuda", "nvidia-kernel-open-dkms", "libcuda1", "libnvidia-ml1"]
FABRIC = ["nvidia-fabricmanager", "libnvidia-nscq"]


@dataclass(frozen=True)
class Deb:
    """One package: its control fields beyond the usual, and its files with their modes."""

    name: str
    version: str
    fields: str = ""
    files: tuple[tuple[str, str, int], ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    postinst: str = ""


def debs(version: str, revision: str = "1") -> list[Deb]:
    """The driver of one version as the vendor's packages."""
    full, upstream = f"{version}-{revision}", version
    firmware = f"nvidia-firmware-{version.split('.')[0]}-{version}"
    unit = "/lib/systemd/system/kvtrial-standin-module.service"
    together = f"Depends: libcuda1 (= {full}), libnvidia-ml1 (= {full}), nvidia-kernel-open-dkms (= {full})\n"
    return [
        Deb("nvidia-driver-cuda", full, together, (("/usr/bin/nvidia-smi", SMI, 0o755),)),
        Deb("libcuda1", full),
        Deb("libnvidia-ml1", full, files=((f"{STANDIN}/library-version", f"{upstream}\n", 0o644),)),
        # As in the vendor's repository for Debian: another than the newest driver needs its own version of it.
        Deb("firmware-nvidia-gsp", full),
        # As in that for Ubuntu: its version stands in its name, and an upgrade leaves that of the former driver.
        Deb(firmware, full),
        Deb(
            "nvidia-kernel-open-dkms",
            full,
            f"Depends: firmware-nvidia-gsp (= {full}), {firmware}\n",
            files=(
                (f"{STANDIN}/module-version", f"{upstream}\n", 0o644),
                (f"{STANDIN}/load", LOAD, 0o755),
                ("/usr/sbin/dkms", DKMS, 0o755),
                ("/usr/sbin/modprobe", MODPROBE, 0o755),
                (unit, UNIT, 0o644),
            ),
            links=(("/etc/systemd/system/sysinit.target.wants/kvtrial-standin-module.service", unit),),
            # As one of the vendor's ends where DKMS can't build the module.
            postinst=f'#!/bin/sh\n[ "$(cat {STANDIN}/build-fails 2>/dev/null)" != {upstream} ] || exit 10\n',
        ),
        Deb(
            "nvidia-fabricmanager",
            full,
            f"Depends: nvidia-driver-cuda (= {full})\n",
            (("/lib/systemd/system/nvidia-fabricmanager.service", FABRIC_UNIT, 0o644),),
        ),
        Deb("libnvidia-nscq", full),
    ]


def build(deb: Deb, folder: Path) -> Path:
    """Build the package with dpkg-deb; its path."""
    tree = folder / f".{deb.name}"
    control = f"Package: {deb.name}\nVersion: {deb.version}\nArchitecture: amd64\nSection: misc\nPriority: optional\n"
    control += f"Maintainer: kvtrial tests <tests@example.invalid>\n{deb.fields}"
    control += "Description: stand-in of the kvtrial tests, no NVIDIA software\n"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN" / "control").write_text(control)
    if deb.postinst:
        (tree / "DEBIAN" / "postinst").write_text(deb.postinst)
        (tree / "DEBIAN" / "postinst").chmod(0o755)
    for path, text, mode in deb.files:
        target = tree / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(mode)
    for path, aim in deb.links:
        target = tree / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(aim)
    output = folder / f"{deb.name}_{deb.version}_amd64.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Znone", "-b", tree, output], check=True, capture_output=True)
    shutil.rmtree(tree)
    return output


def index(folder: Path) -> None:
    """Write Packages for the .debs of a folder."""
    entries = []
    for path in sorted(folder.glob("*.deb")):
        control = subprocess.run(["dpkg-deb", "-f", path], check=True, capture_output=True, text=True).stdout
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        entries.append(f"{control.rstrip()}\nFilename: ./{path.name}\nSize: {path.stat().st_size}\nSHA256: {digest}\n")
    (folder / "Packages").write_text("\n".join(entries))
    (folder / "Packages.gz").write_bytes(gzip.compress((folder / "Packages").read_bytes()))


class Repository:
    """A signed flat repository in a folder, and the key that signs it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "repository"
        self.folder.mkdir(parents=True)
        self.key = folder / "vendor-standin.asc"
        self._home = folder / "gpg"
        self._home.mkdir(mode=0o700)
        self._gpg("--quick-generate-key", "kvtrial test vendor stand-in", "ed25519", "sign", "never")
        self.key.write_text(self._gpg("--armor", "--export"))

    def _gpg(self, *arguments: str) -> str:
        done = subprocess.run(
            ["gpg", "--homedir", str(self._home), "--batch", "--yes", "--passphrase", "", "--pinentry-mode", "loopback",
             *arguments],
            check=True, capture_output=True, text=True, env={**os.environ, "GNUPGHOME": str(self._home)},
        )  # fmt: skip
        return done.stdout

    @property
    def key_sha256(self) -> str:
        """What an inventory pins."""
        return hashlib.sha256(self.key.read_bytes()).hexdigest()

    def add(self, *packages: Deb) -> None:
        """Add packages, sign anew."""
        for deb in packages:
            build(deb, self.folder)
        self.sign()

    def sign(self) -> None:
        """Write Packages, Release and InRelease."""
        index(self.folder)
        lines = ["Origin: kvtrial test vendor stand-in", "Label: kvtrial-standin", "Suite: standin", "SHA256:"]
        for name in ("Packages", "Packages.gz"):
            path = self.folder / name
            lines.append(f" {hashlib.sha256(path.read_bytes()).hexdigest()} {path.stat().st_size} {name}")
        (self.folder / "Release").write_text(
            "\n".join([*lines[:3], "Date: Thu, 01 Jan 2026 00:00:00 UTC", *lines[3:]]) + "\n"
        )
        self._gpg("--clearsign", "--output", str(self.folder / "InRelease"), str(self.folder / "Release"))

    def close(self) -> None:
        """End the key's agent."""
        subprocess.run(["gpgconf", "--homedir", str(self._home), "--kill", "all"], check=False, capture_output=True)


HEADERS = textwrap.dedent("""\
    mkdir -p "/lib/modules/$(uname -r)/build"
""")
"""What stands in for the package of kernel headers."""
