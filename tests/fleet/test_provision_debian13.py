"""The other Debian: a host with Debian 13 (systemd 257, Python 3.13) from bare to ready and back, over SSH.

Driver, engine and model are stand-ins, as in test_provision.py, which shows the rest on Debian 12.
"""

from collections.abc import Callable, Iterator

import pytest
from playing import Playbooks, wheels_for
from supplies import MID, Supplies
from test_provision import STATE, Site
from vendor import HEADERS

# A disk of its own is built for it. The limit lies far beyond what it takes: a busy machine is no failure.
pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def site(playbooks: Callable[..., Playbooks], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    plays = playbooks(1, suite="trixie")
    supplies = Supplies(tmp_path_factory.mktemp("supplies"))
    supplies.drivers(MID)
    url = plays.fleet.serve(supplies.repository.folder, 8081)
    plays.set(**supplies.variables(url, wheels_for("3.13"), tmp_path_factory.mktemp("cache")))
    plays.fleet.hosts[0].sh(HEADERS)
    yield Site(plays, supplies)
    supplies.repository.close()


def test_debian_13_is_brought_to_the_pins_and_stays_there(site: Site) -> None:
    (host,) = site.hosts
    assert "trixie" in host.sh("cat /etc/os-release")
    assert site.changed()["h1"] > 0
    assert site.driver() == [f"{MID} {MID}"]
    assert f"Candidate: {MID}-1" in host.sh("apt-cache policy libnvidia-ml1")
    assert "0.30.0" in host.sh(f"{STATE}/venvs/vllm-*/bin/vllm --version")
    assert "3.13" in host.sh(f"{STATE}/venvs/vllm-*/bin/python --version")
    assert host.sh("systemctl show -P LoadState kvtrial-engine@control") == "loaded"
    assert site.changed() == {"h1": 0}
    assert site.changed("--check", "--diff") == {"h1": 0}


def test_removal_leaves_nothing_on_debian_13(site: Site) -> None:
    site.changed("-e", "kvtrial_state=absent")
    assert site.left() == {"h1": set()}
