"""A model's token on its way: in no output at -vvvv, no record, no log, nowhere on the host; from a stand-in hub."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zstandard
from hub import REPOSITORY, REVISION, SENTINEL
from playing import Playbooks, furnish_standin, last_line, recap, standin_variables
from rig import CONTROLLER

# Too long for make test; the limit lies far beyond what they take: a busy machine is no failure.
pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]

PORT = 8090
STATE = "/var/lib/kvtrial"
PLACES = f"{STATE} /var/log /run/log /etc /opt /tmp /var/tmp /dev/shm /root /home"


TRUSTED = "/usr/lib/ssl/cert.pem"
"""Where OpenSSL, and with it Python, looks for certificates on Debian."""


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of the hub, which signed itself, and its key."""
    certificate, key = folder / "hub.pem", folder / "hub.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=stand-in hub",
         "-addext", f"subjectAltName=IP:{CONTROLLER}", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file is there, the hub sends no weights."""
    return tmp_path_factory.mktemp("hub") / "hold"


@pytest.fixture(scope="module")
def plays(playbooks: Callable[..., Playbooks], host_wheels: Path, hold: Path) -> Iterator[Playbooks]:
    """One host whose model is the hub's; nobody has the token yet."""
    plays = playbooks(1, standin_variables(host_wheels))
    furnish_standin(plays.fleet)
    certificate, key = make_certificate(hold.parent)
    plays.fleet.hosts[0].write(TRUSTED, certificate.read_text())
    plays.set(
        kvtrial_model_directory="",
        kvtrial_model_endpoint=f"https://{CONTROLLER}:{PORT}",
        kvtrial_model_repository=REPOSITORY,
        kvtrial_model_revision=REVISION,
    )
    hub = Path(__file__).with_name("hub.py")
    server = subprocess.Popen(plays.fleet.entered(sys.executable, hub, CONTROLLER, str(PORT), certificate, key, hold))
    for _ in range(100):
        if plays.fleet.ctl("bash", "-c", f"exec 3<>/dev/tcp/{CONTROLLER}/{PORT}").returncode == 0:
            break
        time.sleep(0.1)
    yield plays
    server.kill()
    server.wait()


def on_the_host(plays: Playbooks) -> list[str]:
    """Where the sentinel stands there: files, and the journal. The pattern does not match itself."""
    (host,) = plays.fleet.hosts
    pattern = SENTINEL.replace("SENTINEL", "[S]ENTINEL")
    files = host.sh(f"grep -arl '{pattern}' {PLACES} 2>/dev/null", check=False).splitlines()
    journal = host.sh(f"journalctl --no-pager | grep -c '{pattern}'", check=False)
    return files + (["the journal"] if journal != "0" else [])


def on_the_controller(folder: Path) -> list[str]:
    """The files of a folder that hold the sentinel, also compressed."""
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        if path.suffix == ".zst":
            content = zstandard.ZstdDecompressor().stream_reader(content).read()
        if SENTINEL.encode() in content:
            found.append(path.name)
    return found


def test_without_the_token_the_model_is_refused_in_a_sentence(plays: Playbooks) -> None:
    refused = plays.play("playbooks/provision.yml", fails=True)
    assert "answered 401; the model needs a token: name its file in model_token_file" in last_line(refused)


def test_a_host_cut_off_and_a_controller_killed_during_the_fetch_leave_no_token(
    plays: Playbooks, tmp_path: Path, hold: Path
) -> None:
    """Also while it is fetched, it lies on no disk."""
    (host,) = plays.fleet.hosts
    token = tmp_path / "token"
    token.write_text(SENTINEL + "\n")
    hold.touch()
    running = plays.start("playbooks/provision.yml", "-e", f"kvtrial_model_token_file={token}")
    try:
        until = time.monotonic() + 600
        while not host.sh("pgrep -f [t]oken-on-stdin", check=False):
            assert time.monotonic() < until and not running.is_over(), running.log.read_text()[-3000:]
            time.sleep(0.2)
        assert on_the_host(plays) == []
        host.cut()
        assert on_the_host(plays) == []
        running.signal(signal.SIGKILL)
        assert on_the_host(plays) == []
    finally:
        plays.end()
        hold.unlink()
        host.heal()


def test_the_token_stands_in_no_output_at_vvvv_and_nowhere_on_the_host(plays: Playbooks, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(SENTINEL + "\n")
    plays.set(kvtrial_model_token_file=str(token))
    done = plays.play("playbooks/provision.yml", "-vvvv", "--diff", fails=False)
    again = plays.play("playbooks/provision.yml", "-vvvv", fails=False)
    assert SENTINEL not in done.stdout + done.stderr + again.stdout + again.stderr
    assert recap(again)["h1"]["changed"] == 0
    assert on_the_host(plays) == []
    model = f"{STATE}/models/{REPOSITORY.replace('/', '--')}-{REVISION[:12]}"
    assert plays.fleet.hosts[0].sh(f"cat {model}/model.safetensors") == "weights"


def test_the_token_stands_in_no_record_and_no_log_of_an_experiment(plays: Playbooks) -> None:
    plays.fleet.hosts[0].sh(f"rm -r {STATE}/models")
    done = plays.play("experiment.yml", "-vvvv", "--diff", "-e", "kvtrial_pairs=2", fails=False)
    assert SENTINEL not in done.stdout + done.stderr
    names = {path.name for path in plays.results.rglob("*") if path.is_file()}
    assert {"record.json", "engine.log.zst", "verdict.json", "campaign.json", "report.html"} <= names
    assert on_the_controller(plays.results) == []
    assert on_the_host(plays) == []


def test_the_detectors_find_a_planted_sentinel(plays: Playbooks, tmp_path: Path) -> None:
    (host,) = plays.fleet.hosts
    for place in (f"{STATE}/planted", "/var/log/planted"):
        host.write(place, f"a line with {SENTINEL} in it\n")
        assert on_the_host(plays) == [place]
        host.sh(f"rm {place}")
    host.sh(f"logger --tag planted {SENTINEL}; journalctl --sync")
    assert "the journal" in on_the_host(plays)
    (tmp_path / "planted.zst").write_bytes(zstandard.ZstdCompressor().compress(SENTINEL.encode()))
    (tmp_path / "planted.json").write_text(SENTINEL)
    (tmp_path / "clean").write_text("SENTINEL")
    assert on_the_controller(tmp_path) == ["planted.json", "planted.zst"]
