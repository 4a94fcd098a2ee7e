"""Bad input and faults of provisioning, each with the sentence that the user gets, on one real host.

The stand-in driver is brought once; then each test plants one fault, and puts things right again.
"""

import dataclasses
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playing import Playbooks, last_line, recap
from rig import CONTROLLER
from supplies import MID, NEW, OLD, Supplies, wheel
from vendor import FABRIC, GPU, HEADERS, PACKAGES, Deb, debs

# Too long for make test; the limit lies far beyond what they take: a busy machine is no failure.
pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]

PROVISION = "playbooks/provision.yml"
STATE = "/var/lib/kvtrial"


class Site:
    """One host that has its driver, and what it is provisioned from."""

    def __init__(self, plays: Playbooks, supplies: Supplies) -> None:
        self.plays = plays
        self.supplies = supplies
        self.host = plays.fleet.hosts[0]

    def refusal(self, *arguments: str, **variables: object) -> str:
        """The last line of a provision that has to fail with these variables set for the host alone."""
        self.plays.set("h1", **variables)
        try:
            return last_line(self.plays.play(PROVISION, *arguments, fails=True))
        finally:
            self.plays.set("h1")

    def driver(self) -> str:
        """What nvidia-smi says, or why it does not."""
        return self.host.sh("nvidia-smi --query-gpu=driver_version --format=csv,noheader", check=False)


@pytest.fixture(scope="module")
def site(
    playbooks: Callable[..., Playbooks], host_wheels: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    plays = playbooks(1)
    supplies = Supplies(tmp_path_factory.mktemp("supplies"))
    supplies.drivers(OLD, MID, NEW)
    url = plays.fleet.serve(supplies.repository.folder, 8081)
    plays.set(**supplies.variables(url, host_wheels, tmp_path_factory.mktemp("cache")))
    plays.fleet.hosts[0].sh(HEADERS)
    site = Site(plays, supplies)
    # Fails at the engine on purpose: the driver is there, and everything after it is still to be brought.
    assert "has no lock" in site.refusal(vllm_lock="/nonexistent")
    yield site
    supplies.repository.close()


CHANGE = {"kvtrial_driver_version": NEW}
PINS = "cat /etc/apt/preferences.d/kvtrial-nvidia-driver /etc/apt/apt.conf.d/51kvtrial-nvidia-driver"
READY = "has no lock"
"""What the engine says, which comes after a driver that is in order, where it is given no lock."""


def test_a_host_that_is_not_drained_is_left_alone(site: Site) -> None:
    """This and what else is refused before a change: tests/ansible/test_driver_role.py, on planted facts."""
    answer = site.refusal(**CHANGE, kvtrial_host_drained=False)
    assert f"the driver has to be changed ({MID} to {NEW}), and the host is not marked drained" in answer
    assert site.driver() == MID


def test_a_gpu_in_use_is_left_alone(site: Site) -> None:
    site.host.write(GPU, "processes=4711\n")
    assert "the GPU is in use by process 4711 stand-in-process" in site.refusal(**CHANGE)
    site.host.sh(f"rm {GPU}")


def test_a_gpu_in_use_is_left_alone_also_where_nvidia_smi_fails(site: Site) -> None:
    """After an upgrade of the library alone: nvidia-smi says nothing, and the engine that was there goes on."""
    library = "/usr/lib/kvtrial-standin/library-version"
    pid = site.host.sh(f"echo {NEW} > {library}; sleep 1000 < /dev/nvidia0 > /dev/null 2>&1 & echo $!")
    assert "Driver/library version mismatch" in site.driver()
    answer = site.refusal(**CHANGE)
    site.host.sh(f"kill {pid}; echo {MID} > {library}")
    assert f"the GPU is in use by process {pid} sleep; wait for it or end it yourself" in answer


def test_mig_is_refused(site: Site) -> None:
    site.host.write(GPU, "mig=Enabled\n")
    assert "MIG is on for 1 of 1 GPUs, and a slice is no GPU to measure on" in site.refusal()
    site.host.sh(f"rm {GPU}")


def test_missing_headers_are_named(site: Site) -> None:
    """Complaint 3."""
    site.host.sh('rm -r "/lib/modules/$(uname -r)/build"')
    kernel = site.host.sh("uname -r")
    assert f"install linux-headers-{kernel}" in site.refusal(**CHANGE)
    site.host.sh(HEADERS)


def test_secure_boot_is_refused(site: Site) -> None:
    """Test hosts have no firmware: its variable is a stand-in, whose fifth byte says that secure boot is on."""
    variable = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
    site.host.sh(
        f"mount -o remount,bind,rw /sys; mkdir -p {Path(variable).parent}; "
        f"printf '\\006\\000\\000\\000\\001' > {variable}"
    )
    answer = site.refusal(**CHANGE)
    site.host.sh("rm -r /sys/firmware; mount -o remount,bind,ro /sys")
    assert "h1: secure boot is on, and a module that DKMS builds is not signed by a key that the firmware" in answer
    assert site.driver() == MID


def test_a_module_that_was_not_built_is_noticed_before_a_reboot(site: Site) -> None:
    """Complaint 3, the other half: DKMS failed, so the host is not rebooted into a driver that is not there."""
    boot = site.host.sh("cat /proc/sys/kernel/random/boot_id; cat /run/systemd/container; stat -c %Y /run/systemd")
    site.host.sh("touch /usr/lib/kvtrial-standin/dkms-fails")
    assert f"DKMS has no module {NEW} for the running kernel" in site.refusal(**CHANGE)
    assert boot == site.host.sh(
        "cat /proc/sys/kernel/random/boot_id; cat /run/systemd/container; stat -c %Y /run/systemd"
    )
    site.host.sh("rm /usr/lib/kvtrial-standin/dkms-fails")
    # The library is newer than the loaded module now, which is what users call "version mismatch" (complaint 1).
    assert "Driver/library version mismatch" in site.driver()
    answer = site.refusal(kvtrial_driver_manage=False, kvtrial_driver_version="")
    assert "nvidia-smi gives no driver version (Failed to initialize NVML: Driver/library version mismatch)" in answer
    # And what repairs it is the same command.
    assert "has no lock" in site.refusal(vllm_lock="/nonexistent")
    assert site.driver() == MID


def test_an_installation_of_the_driver_that_was_killed_is_ended(site: Site) -> None:
    """A library that dpkg had unpacked and not configured when it was killed. Its journal says so: apt does nothing."""
    site.host.sh(f"cd /tmp; apt-get -q download libcuda1={MID}-1; dpkg --unpack libcuda1_*.deb; rm libcuda1_*.deb")
    site.host.sh("sed -n '/^Package: libcuda1$/,/^$/p' /var/lib/dpkg/status > /var/lib/dpkg/updates/0000")
    asked = "dpkg-query -W -f '${db:Status-Status} ${Version}' libcuda1"
    assert site.host.sh(asked) == f"unpacked {MID}-1"
    assert "dpkg was interrupted" in site.host.sh("apt-get -qy install bash 2>&1", check=False)
    assert "has no lock" in site.refusal(vllm_lock="/nonexistent")
    assert site.host.sh(asked) == f"installed {MID}-1" and site.driver() == MID


def test_another_fabric_manager_is_noticed(site: Site) -> None:
    """Complaint 7."""
    site.host.sh(f"apt-get install -qy --allow-downgrades libnvidia-nscq={OLD}-1")
    answer = site.refusal(kvtrial_driver_manage=False)
    assert f"the driver is {MID}, but libnvidia-nscq {OLD}-1 is of another version" in answer
    site.host.sh(f"apt-get install -qy libnvidia-nscq={MID}-1")


def test_a_wrong_signature_stops_apt(site: Site, tmp_path: Path) -> None:
    """Complaint 6: the vendor signs with another key than the one that is pinned."""
    other = Supplies(tmp_path / "other").repository
    other.add(*debs(NEW))
    url = site.plays.fleet.serve(other.folder, 8082)
    answer = site.refusal(**CHANGE, nvidia_driver_repository_uri=url)
    other.close()
    assert "not signed" in answer or "NO_PUBKEY" in answer or "verified" in answer, answer
    assert site.driver() == MID
    # An entry that apt can't read makes every update of the host's lists fail.
    assert site.host.sh(f"ls {ENTRY}", check=False) == ""


STATUS = "dpkg-query -W -f '${db:Status-Status} ${Version}' nvidia-kernel-open-dkms"


def half_configured(site: Site) -> None:
    """The newer driver was asked for, and its module could not be built."""
    site.host.write("/usr/lib/kvtrial-standin/build-fails", f"{NEW}\n")
    answer = site.refusal(**CHANGE)
    assert "h1: apt-get ended with 100 while it brought nvidia-driver-cuda" in answer
    assert "dpkg: error processing package nvidia-kernel-open-dkms (--configure):" in answer
    assert site.host.sh(STATUS) == f"half-configured {NEW}-1"


def test_a_package_whose_module_could_not_be_built_does_not_block_a_rollback(site: Site) -> None:
    """The package's postinst failed, and would again. With another's that dpkg can't end the host is not rebooted."""
    site.supplies.repository.add(Deb("afflicted", "3-1", postinst="#!/bin/sh\nexit 10\n"))
    half_configured(site)
    site.host.sh(
        "apt-get update -q 2>/dev/null; cd /tmp; apt-get -q download afflicted=3-1; dpkg --unpack afflicted_3-1_*.deb;"
        "rm afflicted_3-1_*.deb"
    )
    started = site.host.sh("cut -d ' ' -f 22 /proc/1/stat")
    done = site.plays.play(PROVISION, fails=True)
    said = " ".join(done.stdout.split())
    assert "h1: it is not rebooted, since dpkg has begun and not ended afflicted; look at why" in last_line(done)
    assert site.host.sh("cut -d ' ' -f 22 /proc/1/stat") == started
    assert (
        "h1: the driver is there; apt could not end what others began: dpkg: error processing package afflicted" in said
    )
    assert site.host.sh(STATUS) == f"installed {MID}-1" and site.driver() == MID
    site.host.sh("dpkg --purge afflicted; rm /usr/lib/kvtrial-standin/build-fails")
    assert READY in site.refusal(vllm_lock="/nonexistent") and site.driver() == MID


ENTRY = "/etc/apt/sources.list.d/kvtrial-nvidia-driver.sources"
THEIRS = "/etc/apt/sources.list.d/cuda-debian12-x86_64.list"
THEIR_KEY = "/usr/share/keyrings/cuda-archive-keyring.asc"


def test_another_entry_for_the_repository_is_named_or_taken_and_never_stops_apt(site: Site) -> None:
    """As NVIDIA's package cuda-keyring brings one. With two keys for one repository apt reads no source."""
    url = site.plays.variables["nvidia_driver_repository_uri"]
    reads = "apt-get indextargets --no-release-info > /dev/null 2>&1 && echo yes || echo no"
    site.host.write(THEIR_KEY, "another key\n")
    site.host.write(THEIRS, f"deb [signed-by={THEIR_KEY}] {url} ./\n")
    assert site.host.sh(reads) == "no"
    # The driver is at its pin, and nothing of apt is used: such a host ended well, and its apt was dead.
    answer = site.refusal()
    assert (
        f"h1: the driver's repository stands in apt's sources already, in {THEIRS} (its key {THEIR_KEY} has sha256 "
        in answer
    )
    assert answer.endswith(f"The entry of this project, {ENTRY}, was taken away.")
    assert site.host.sh(reads) == "yes"
    answer = site.refusal(**CHANGE)
    assert f"already, in {THEIRS}" in answer and answer.endswith("Nothing was written.")
    assert site.host.sh(f"ls {ENTRY}", check=False) == "" and site.driver() == MID
    site.host.write(THEIRS, f"deb [trusted=yes] {url} ./\n")
    assert f"in {THEIRS} (trusted=yes, by which no key is asked)" in site.refusal()
    # With the pinned key it is taken as it is: for what is there, for an upgrade, and never in a check.
    site.host.write(THEIR_KEY, site.supplies.repository.key.read_text())
    site.host.write(THEIRS, f"deb [signed-by={THEIR_KEY}] {url} ./\n")
    assert READY in site.refusal(vllm_lock="/nonexistent", **CHANGE)
    assert site.driver() == NEW and site.host.sh(reads) == "yes"
    assert site.host.sh(f"ls {ENTRY} /etc/apt/keyrings/kvtrial-nvidia-driver.asc", check=False) == ""
    site.plays.set("h1", vllm_lock="/nonexistent", **CHANGE)
    done = site.plays.play(PROVISION, fails=True)
    assert READY in last_line(done) and recap(done)["h1"]["changed"] == 0
    site.plays.set("h1")
    site.host.sh(f"rm {THEIRS} {THEIR_KEY}")
    assert READY in site.refusal(vllm_lock="/nonexistent") and site.driver() == MID
    assert site.host.sh(f"ls {ENTRY}") == ENTRY and site.host.sh(reads) == "yes"


@pytest.mark.parametrize("lock", ["/var/lib/dpkg/lock-frontend", "/var/lib/apt/lists/lock"])
def test_a_held_lock_of_apt_names_its_holder(site: Site, lock: str) -> None:
    hold = f"import fcntl,time; f=open('{lock}','w'); fcntl.lockf(f,fcntl.LOCK_EX); time.sleep(60)"
    pid = site.host.sh(f'python3 -c "{hold}" >/dev/null 2>&1 & echo $!')
    answer = site.refusal(**CHANGE)
    site.host.sh(f"kill {pid}")
    assert f"apt's lock is held by process {pid} (python3)" in answer


def test_a_version_that_the_repository_lacks_is_named(site: Site) -> None:
    before = site.host.sh(PINS)
    answer = site.refusal(kvtrial_driver_version="599.99.99")
    assert "apt can't install nvidia-driver-cuda=599.99.99-*" in answer
    assert "599.99.99" in answer and site.driver() == MID
    # The driver that stays is still pinned.
    assert answer.endswith("Nothing was installed, and the driver and its preference are left as they were.")
    assert site.host.sh(PINS) == before and f"Pin: version {MID}-*" in before
    assert site.host.sh("ls /run", check=False).count("kvtrial-nvidia") == 0


def test_another_kernel_is_not_let_in(site: Site) -> None:
    """Complaint 3: the module would be built for a kernel that is not booted."""
    version = "590.1.1"
    asks = with_fields(version, "nvidia-driver-cuda", "Pre-Depends: linux-image-standin\n")
    site.supplies.repository.add(*asks, Deb("linux-image-standin", "1-1"))
    answer = site.refusal(kvtrial_driver_version=version)
    assert "apt would also bring linux-image-standin" in answer and site.driver() == MID
    assert f"Pin: version {MID}-*" in site.host.sh(PINS)


def test_a_kernel_that_comes_all_the_same_is_noticed_before_a_reboot(site: Site) -> None:
    """Not by apt, which said what it would do: a hook of somebody's brings it while apt installs the driver."""
    site.supplies.repository.add(Deb("linux-image-standin", "1-1"))
    site.host.sh("apt-get update -q 2>/dev/null; cd /var/tmp; apt-get -q download linux-image-standin 2>/dev/null")
    deb = "/var/tmp/linux-image-standin_*.deb"
    hook = f"[ ! -e {deb} ] || DPKG_FRONTEND_LOCKED=1 dpkg -i {deb}"
    site.host.write("/etc/apt/apt.conf.d/99standin-hook", f'DPkg::Post-Invoke {{ "{hook}"; }};\n')
    boot = site.host.sh("cat /proc/sys/kernel/random/boot_id; stat -c %Y /run/systemd")
    answer = site.refusal(**CHANGE)
    site.host.sh(f"rm {deb} /etc/apt/apt.conf.d/99standin-hook")
    assert (
        "h1: the installed kernels changed with the driver (none to linux-image-standin=1-1); put the former" in answer
    )
    assert answer.endswith("The host was not rebooted.")
    assert boot == site.host.sh("cat /proc/sys/kernel/random/boot_id; stat -c %Y /run/systemd")
    site.host.sh("dpkg --purge linux-image-standin")
    assert READY in site.refusal(vllm_lock="/nonexistent") and site.driver() == MID


def with_fields(version: str, name: str, fields: str) -> list[Deb]:
    """The driver of a version, one of whose packages says more in its control file."""
    return [dataclasses.replace(d, fields=d.fields + fields) if d.name == name else d for d in debs(version)]


def test_packages_of_others_are_not_taken_away(site: Site) -> None:
    """And a kernel that is only recommended isn't brought: apt is asked in the simulation what it is asked after it."""
    version = "590.2.2"
    fields = "Conflicts: bystander\nRecommends: linux-image-recommended\n"
    site.supplies.repository.add(
        *with_fields(version, "libcuda1", fields), Deb("bystander", "1-1"), Deb("linux-image-recommended", "1-1")
    )
    site.host.sh("apt-get update -q 2>/dev/null; apt-get install -qy bystander")
    answer = site.refusal(kvtrial_driver_version=version)
    assert "apt would also remove bystander, which is no package of the driver; remove it yourself if nobody" in answer
    assert site.driver() == MID and "install ok installed" in site.host.sh("dpkg -s bystander")
    site.host.sh("apt-get purge -qy bystander")


def test_what_is_not_the_drivers_does_not_make_it_due(site: Site) -> None:
    """Another package that dpkg has not ended, and a companion that the distribution has at a version of its own."""
    site.supplies.repository.add(Deb("bystander", "2-1"), Deb("nvidia-settings", "535.171.04-1"))
    site.host.sh(
        "apt-get update -q 2>/dev/null; apt-get install -qy nvidia-settings=535.171.04-1; cd /tmp;"
        "apt-get -q download bystander; dpkg --unpack bystander_2-1_*.deb; rm bystander_*.deb"
    )
    boot = site.host.sh("cat /proc/sys/kernel/random/boot_id; stat -c %Y /run/systemd")
    # A change would be refused: the host isn't drained.
    site.plays.set("h1", kvtrial_host_drained=False, vllm_lock="/nonexistent")
    done = site.plays.play(PROVISION, fails=True)
    site.plays.set("h1")
    assert READY in last_line(done) and recap(done)["h1"]["changed"] == 0
    asked = "dpkg-query -W -f '${db:Status-Status} ${Version} ' bystander nvidia-settings"
    assert site.host.sh(asked) == "unpacked 2-1 installed 535.171.04-1"
    assert boot == site.host.sh("cat /proc/sys/kernel/random/boot_id; stat -c %Y /run/systemd")
    site.host.sh("dpkg --purge bystander nvidia-settings")


def test_the_fabric_manager_of_a_host_with_nvswitches_is_started_and_has_to_run(site: Site) -> None:
    """The switch is a stand-in: a node of its name."""
    state = "for word in is-enabled is-active; do systemctl $word nvidia-fabricmanager || true; done"
    assert site.host.sh(state).split() == ["disabled", "inactive"]
    site.host.sh("mknod /dev/nvidia-nvswitch0 c 1 3")
    assert READY in site.refusal(vllm_lock="/nonexistent")
    assert site.host.sh(state).split() == ["enabled", "active"]
    site.host.sh("touch /usr/lib/kvtrial-standin/fabric-fails; systemctl stop nvidia-fabricmanager")
    answer = site.refusal(vllm_lock="/nonexistent")
    assert (
        "h1: this host has NVSwitches, and their fabric manager does not run (nvidia-fabricmanager is failed)" in answer
    )
    answer = site.refusal(kvtrial_driver_manage=False, kvtrial_driver_version="")
    assert (
        "(nvidia-fabricmanager is failed), so no CUDA program starts; see journalctl -u nvidia-fabricmanager" in answer
    )
    assert answer.endswith("on the host, and start it.")
    site.host.sh(
        "rm /dev/nvidia-nvswitch0 /usr/lib/kvtrial-standin/fabric-fails; systemctl disable nvidia-fabricmanager"
    )


def test_the_node_that_cuda_needs_is_made_and_has_to_be_there(site: Site) -> None:
    """Where the driver is somebody else's only if that is asked for."""
    unit = "/etc/systemd/system/kvtrial-nvidia-nodes.service"
    site.host.sh(f"systemctl disable --now kvtrial-nvidia-nodes; rm /dev/nvidia-uvm {unit}; systemctl daemon-reload")
    theirs = {"kvtrial_driver_manage": False, "kvtrial_driver_version": "", "vllm_lock": "/nonexistent"}
    site.plays.set("h1", **theirs)
    done = site.plays.play(PROVISION, fails=True)
    site.plays.set("h1")
    assert "load nvidia_uvm there and make the node at every boot, or set nvidia_driver_device_nodes=true" in last_line(
        done
    )
    assert recap(done)["h1"]["changed"] == 0
    assert site.host.sh(f"ls {unit} /dev/nvidia-uvm", check=False) == ""
    assert READY in site.refusal(nvidia_driver_device_nodes=True, **theirs)
    assert site.host.sh("stat -c %F /dev/nvidia-uvm") == "character special file"
    site.host.sh("mv /usr/sbin/modprobe /root; systemctl stop kvtrial-nvidia-nodes; rm /dev/nvidia-uvm")
    answer = site.refusal(vllm_lock="/nonexistent")
    assert "/dev/nvidia-uvm is missing, and a CUDA engine, which runs without privileges, can't make it" in answer
    site.host.sh("mv /root/modprobe /usr/sbin")
    assert READY in site.refusal(vllm_lock="/nonexistent")


def test_a_driver_too_old_for_the_wheels_fails_before_anything_is_fetched(site: Site) -> None:
    """Complaint 8."""
    done = site.plays.play(PROVISION, "-e", f"kvtrial_driver_version={OLD}", fails=True)
    assert f"driver {OLD} < 580 needed by the CUDA 13 wheels of vLLM 0.30.0" in last_line(done)
    assert "Pack the wheels that this host needs" not in done.stdout and site.host.sh(f"ls {STATE}", check=False) == ""
    assert site.driver() == OLD
    # Check mode says what is due, and what is in the way, and judges the wheels by the driver that would come.
    site.plays.set("h1", kvtrial_host_drained=False)
    done = site.plays.play(PROVISION, "--check", "--diff", fails=False)
    site.plays.set("h1")
    said = " ".join(done.stdout.split())
    assert f"h1: the driver would be brought to {MID}; not at it: firmware-nvidia-gsp {OLD}-1, libcuda1 {OLD}-1" in said
    assert (
        f"As things are, it would be refused: h1: the driver has to be changed ({OLD} to {MID}), and the host is"
        in said
    )
    assert "vLLM 0.30.0 (cuda) would be installed into" in said and recap(done)["h1"]["changed"] > 0
    site.refusal(vllm_lock="/nonexistent")


def test_a_wheel_that_is_missing_is_named(site: Site, tmp_path: Path) -> None:
    folder = tmp_path / "wheels"
    shutil.copytree(site.supplies.wheelhouse, folder)
    next(folder.glob("standin_dependency-*")).unlink()
    answer = site.refusal(vllm_wheelhouse=str(folder))
    assert f"h1: {folder} has no wheel of standin-dependency 1.0 for CPython 3.11 on x86_64" in answer
    wheel = folder / "standin_dependency-1.0-py3-none-any.whl"
    wheel.write_bytes(b"another file")
    answer = site.refusal(vllm_wheelhouse=str(folder))
    assert f"{wheel.name} in {folder} has another sha256 than the lock" in answer
    assert site.host.sh(f"ls {STATE}/venvs", check=False) == ""


def test_another_file_than_the_locked_one_from_an_index_is_named(site: Site, tmp_path: Path) -> None:
    """Without a wheelhouse: pip on the host looks where it is configured to, and finds another file of the name."""
    shutil.copytree(site.supplies.wheelhouse, tmp_path / "served")
    _, digest = wheel(tmp_path / "served", "standin_dependency", "1.0", {"standin_dependency.py": "OTHER = 1\n"})
    url = site.plays.fleet.serve(tmp_path / "served", 8083)
    site.host.write("/etc/pip.conf", f"[global]\nno-index = true\nfind-links = {url}\ntrusted-host = {CONTROLLER}\n")
    answer = site.refusal(vllm_wheelhouse="")
    site.host.sh("rm /etc/pip.conf")
    assert f"standin-dependency==1.0 has sha256 {digest}, the lock says {site.supplies.dependency}" in answer
    assert "nothing of it was installed" in answer
    assert site.host.sh(f"ls {STATE}/venvs/*/kvtrial-installed.json", check=False) == ""


def test_the_wrong_model_is_refused_with_its_own_hash(site: Site) -> None:
    answer = site.refusal(kvtrial_model_manifest_revision="0" * 64)
    assert f"is {site.supplies.model_revision()}, model_upload_sha256 says 0000" in answer


def test_a_removal_that_was_cut_off_is_gone_on_with(site: Site) -> None:
    """Killed with the packages gone and the reboot ahead: the next one takes the rest, and reboots.

    A package whose module could not be built is no hindrance to it, nor one that dpkg was killed over.
    """
    half_configured(site)
    site.host.sh(
        "sed -n '/^Package: libcuda1$/,/^$/p' /var/lib/dpkg/status > /tmp/libcuda1;"
        "sed 's/^Status: .*/Status: install reinstreq half-installed/' /tmp/libcuda1 > /var/lib/dpkg/updates/0000"
    )
    left = "find /etc/apt /etc/systemd /var/lib/apt/lists -name '*kvtrial-nvidia*'; dpkg-query -W | grep nvidia || true"
    assert len(site.host.sh(left).splitlines()) > 8
    running = site.plays.start(PROVISION, "-e", "kvtrial_state=absent")
    while not running.is_over() and "TASK [kvtrial.vllm.nvidia_driver : Reboot into" not in running.log.read_text():
        time.sleep(0.02)
    running.signal(signal.SIGKILL)
    running.process.wait()
    site.host.wait()
    assert "/etc/apt/kvtrial-nvidia-driver.json" in site.host.sh(left)
    site.plays.play(PROVISION, "-e", "kvtrial_state=absent", fails=False)
    assert site.host.sh(left) == ""
    assert site.host.sh("cat /proc/driver/nvidia/version 2>/dev/null", check=False) == ""
    done = site.plays.play(PROVISION, "-e", "kvtrial_state=absent", fails=False)
    assert recap(done)["h1"]["changed"] == 0


def test_a_driver_that_was_there_before_stays_when_the_project_goes(site: Site) -> None:
    """Somebody brought it; the project pinned it, and takes its pins with it."""
    url = site.plays.variables["nvidia_driver_repository_uri"]
    theirs = "/etc/apt/sources.list.d/somebodys.list"
    site.host.write(theirs, f"deb [trusted=yes] {url} ./\n")
    asked = " ".join(f"{name}={MID}-1" for name in [*PACKAGES, *FABRIC, "firmware-nvidia-gsp"])
    site.host.sh(
        f"rm -f /usr/lib/kvtrial-standin/build-fails; apt-get update -q 2>/dev/null; apt-get install -qy {asked};"
        f"rm {theirs}; systemctl daemon-reload; systemctl start kvtrial-standin-module"
    )
    started = site.host.sh("cut -d ' ' -f 22 /proc/1/stat")
    packages = "dpkg-query -W -f '${Package} ${Version} ${db:Status-Status}\\n' | grep -E 'nvidia|libcuda'"
    before = site.host.sh(packages)
    assert READY in site.refusal(vllm_lock="/nonexistent") and site.driver() == MID
    assert f"Pin: version {MID}-*" in site.host.sh(PINS)
    done = site.plays.play(PROVISION, "-e", "kvtrial_state=absent", fails=False)
    said = " ".join(done.stdout.split())
    assert (
        f"h1: the driver stays (firmware-nvidia-gsp {MID}-1 and so on): this project did not bring it. What pinned"
        in said
    )
    assert site.host.sh(packages) == before and site.driver() == MID
    assert site.host.sh("find /etc/apt /etc/systemd -name '*kvtrial-nvidia*'") == ""
    assert started == site.host.sh("cut -d ' ' -f 22 /proc/1/stat"), "the host was rebooted"
