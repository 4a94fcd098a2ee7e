"""Air-gapped: a bundle is made where there is a network, and provisioning from it touches none."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from playing import BIN, ROOT, Playbooks, last_line, recap
from supplies import MID, Supplies
from vendor import HEADERS

MAKER = ROOT / "requirements" / "make_bundle.py"


def make(inventory: Path, bundle: Path, wheelhouse: list[Path], *more: str) -> subprocess.CompletedProcess[str]:
    """Run playbooks/bundle.yml; pip looks into folders, as the network of this test."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ANSIBLE_", "PIP_"))}
    environment |= {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": " ".join(map(str, wheelhouse)),
        "PIP_CONFIG_FILE": "/dev/null",
    }
    command = [BIN / "ansible-playbook", "playbooks/bundle.yml", "-i", inventory, "-e", f"kvtrial_bundle={bundle}"]
    return subprocess.run(
        [*command, *more], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False
    )


@pytest.fixture(scope="module")
def supplies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supplies]:
    supplies = Supplies(tmp_path_factory.mktemp("supplies"))
    supplies.drivers(MID)
    yield supplies
    supplies.repository.close()


@pytest.fixture(scope="module")
def bundle(supplies: Supplies, host_wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("connected")
    inventory = folder / "inventory"
    (inventory / "group_vars" / "all").mkdir(parents=True)
    (inventory / "group_vars" / "all" / "00-pins.yml").symlink_to(ROOT / "group_vars" / "all" / "pins.yml")
    variables = supplies.variables(f"file:{supplies.repository.folder}", host_wheels, folder / "cache")
    variables["vllm_lock"] = str(supplies.locks["0.30.0"])
    (inventory / "group_vars" / "all" / "10-test.yml").write_text(yaml.safe_dump(variables))
    (inventory / "hosts.yml").write_text("all: {hosts: {some-host: }}\n")
    pythons = '{"kvtrial_bundle_pythons": ["3.11"]}'
    done = make(inventory, folder / "bundle", [supplies.wheelhouse, host_wheels], "-e", pythons)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "bundle"


def test_the_bundle_holds_all_that_is_needed_and_the_sha256_of_each_file(bundle: Path, supplies: Supplies) -> None:
    listed = dict(reversed(line.split("  ")) for line in (bundle / "SHA256SUMS").read_text().splitlines())
    assert {name.split("/")[0] for name in listed} == {"wheels", "host-wheels", "debs", "model", "keys"}
    # Among them the firmware that a driver of Debian needs in its own version.
    assert len(found := list((bundle / "debs").glob("*.deb"))) == 8 and (bundle / "debs" / "Packages").is_file()
    assert any(deb.name.startswith("firmware-nvidia-gsp_") for deb in found)
    for name, digest in listed.items():
        assert hashlib.sha256((bundle / name).read_bytes()).hexdigest() == digest


def test_a_bundle_needs_to_know_the_pythons(tmp_path: Path, supplies: Supplies) -> None:
    done = make(ROOT / "inventories" / "local", tmp_path / "b", [])
    assert done.returncode != 0 and "kvtrial_bundle_pythons=(not set) a list such as" in last_line(done)


def test_a_damaged_bundle_is_refused_naming_the_file(bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    good = subprocess.run([sys.executable, MAKER, "check", copy], capture_output=True, text=True, check=False)
    assert good.returncode == 0, good.stderr
    wheel = next((copy / "wheels").glob("vllm-*"))
    wheel.write_bytes(wheel.read_bytes() + b"x")
    bad = subprocess.run([sys.executable, MAKER, "check", copy], capture_output=True, text=True, check=False)
    assert bad.returncode == 2 and f"{wheel} has another sha256 than SHA256SUMS says" in bad.stderr
    wheel.unlink()
    bad = subprocess.run([sys.executable, MAKER, "check", copy], capture_output=True, text=True, check=False)
    assert f"{wheel} is missing" in bad.stderr


@pytest.mark.full
def test_provisioning_from_the_bundle_touches_no_network(
    bundle: Path, supplies: Supplies, playbooks: Callable[..., Playbooks], host_wheels: Path, tmp_path: Path
) -> None:
    plays = playbooks(1)
    variables = supplies.variables("http://192.0.2.1/not-asked", host_wheels, tmp_path / "cache")
    for name in ("vllm_wheelhouse", "workload_wheelhouse", "kvtrial_model_upload"):
        del variables[name]
    plays.set(**variables, kvtrial_bundle=str(bundle))
    (host,) = plays.fleet.hosts
    host.sh(HEADERS)
    # Not even the route to where others would answer: a request to any other address fails at once.
    host.sh("ip route del default", check=False)
    plays.play("playbooks/provision.yml", fails=False)
    assert host.sh("nvidia-smi --query-gpu=driver_version --format=csv,noheader") == MID
    assert "0.30.0" in host.sh("/var/lib/kvtrial/venvs/vllm-*/bin/vllm --version")
    again = plays.play("playbooks/provision.yml", fails=False)
    assert recap(again)["h1"]["changed"] == 0
    assert json.loads(host.sh("cat /var/lib/kvtrial/models/*/manifest.json"))["revision"] == supplies.model_revision()
    plays.play("playbooks/provision.yml", "-e", "kvtrial_state=absent", fails=False)
    assert host.sh("ls -d /var/lib/kvtrial", check=False) == ""
