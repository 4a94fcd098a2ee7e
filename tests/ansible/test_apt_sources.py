"""Entries of apt's sources for one repository, as the real apt takes them: which stop it, and which are taken."""

import hashlib
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from ansible_collections.kvtrial.vllm.plugins.filter.source_conflicts import source_conflicts
from ansible_collections.kvtrial.vllm.plugins.module_utils import apt_sources

URI, KEY = "http://mirror.example.invalid/repo/", b"the vendor's key\n"
PINNED = hashlib.sha256(KEY).hexdigest()
OURS = "Types: deb\nURIs: {uri}\nSuites: {suite}\nSigned-By: {keys}/kvtrial.gpg\n"
BLOCK = " -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n mDMEYCQjIxYJKwYBBAHaRw8BAQdA\n -----END PGP PUBLIC KEY BLOCK-----"
# name: (file, what stands in it, whether apt reads its sources with ours beside it, why it is not taken; empty: it is)
ENTRIES = {
    "cuda-keyring": ("cuda.list", f"deb [signed-by={{keys}}/vendor.gpg] {URI} /", False, ""),
    "no-slash": ("cuda.list", f"deb [signed-by={{keys}}/vendor.gpg] {URI[:-1]} /", False, ""),
    "options": ("cuda.list", f"deb [ arch=amd64 signed-by={{keys}}/vendor.gpg ] {URI} / # comment", False, ""),
    "deb822": (
        "cuda.sources",
        f"Types: deb deb-src\nURIs: {URI[:-1]}\nSuites: /\nSigned-By: {{keys}}/vendor.gpg",
        False,
        "",
    ),
    "several": (
        "cuda.sources",
        f"# ours\nTypes: deb\nURIs: http://a.invalid/ {URI}\nSuites: ./ /\nSigned-By: {{keys}}/vendor.gpg\n",
        False,
        "",
    ),
    "other-key": (
        "cuda.list",
        f"deb [signed-by={{keys}}/other.gpg] {URI} /",
        False,
        "its key {keys}/other.gpg has sha256 ",
    ),
    "no-such-key": (
        "cuda.list",
        f"deb [signed-by={{keys}}/none.gpg] {URI} /",
        False,
        "its key {keys}/none.gpg can't be read",
    ),
    "two-keys": (
        "cuda.list",
        f"deb [signed-by={{keys}}/vendor.gpg,{{keys}}/other.gpg] {URI} /",
        False,
        "can't be read",
    ),
    "fingerprint": ("cuda.list", f"deb [signed-by={'A' * 40}] {URI} /", False, "its key is no file"),
    "key-inside": (
        "cuda.sources",
        f"Types: deb\nURIs: {URI}\nSuites: /\nSigned-By:\n{BLOCK}\n",
        False,
        "its key is no file",
    ),
    "trusted": ("cuda.list", f"deb [trusted=yes] {URI} /", False, "trusted=yes, by which no key is asked"),
    "trusted-deb822": (
        "cuda.sources",
        f"Types: deb\nURIs: {URI}\nSuites: /\nTrusted: yes\nSigned-By: {{keys}}/vendor.gpg\n",
        False,
        "trusted=yes",
    ),
    "sources-only": ("cuda.list", f"deb-src [signed-by={{keys}}/vendor.gpg] {URI} /", False, "it gives sources only"),
    # apt takes it with ours, in this order of files; it would not the other way round.
    "no-key": ("cuda.list", f"deb {URI} /", True, "no Signed-By, so any key does that apt trusts"),
}
# Other repositories for apt, or none at all.
APART = {
    "other-suite": ("cuda.list", f"deb [signed-by={{keys}}/other.gpg] {URI} ./"),
    "other-address": ("cuda.list", f"deb [signed-by={{keys}}/other.gpg] {URI}debian12/ /"),
    "switched-off": ("cuda.list", f"# deb [signed-by={{keys}}/other.gpg] {URI} /"),
    "switched-off-deb822": (
        "cuda.sources",
        f"Enabled: no\nTypes: deb\nURIs: {URI}\nSuites: /\nSigned-By: {{keys}}/other.gpg\n",
    ),
    "not-read": ("cuda.list.distUpgrade", f"deb [signed-by={{keys}}/other.gpg] {URI} /"),
}


class Etc:
    """A made-up /etc/apt with ours and another entry."""

    def __init__(self, folder: Path, name: str, text: str, suite: str = "/") -> None:
        self.folder, self.keys, self.suite = folder, folder / "keyrings", suite
        self.keys.mkdir()
        for key, content in (("vendor", KEY), ("kvtrial", KEY), ("other", b"another key\n")):
            (self.keys / f"{key}.gpg").write_bytes(content)
        self.parts = folder / "sources.list.d"
        self.parts.mkdir()
        self.own = self.parts / "kvtrial-nvidia-driver.sources"
        self.own.write_text(OURS.format(uri=URI, suite=suite, keys=self.keys))
        self.other = self.parts / name
        self.other.write_text(text.replace("{keys}", str(self.keys)) + "\n")

    def readable(self) -> bool:
        """Whether the real apt reads the sources."""
        command = ["apt-get", "indextargets", "--no-release-info", "-o", "Dir::Etc::sourcelist=/dev/null",
                   "-o", f"Dir::Etc::sourceparts={self.parts}"]  # fmt: skip
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def found(self) -> list[dict]:
        """What the role is told of it."""
        return apt_sources.others(URI, self.suite, platform.machine(), str(self.own), str(self.folder))


real_apt = pytest.mark.skipif(not shutil.which("apt-get"), reason="asks the real apt, which is not here")


@real_apt
@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_that_stops_apt_is_found_and_taken_only_with_the_pinned_key(name, tmp_path):
    file, text, readable, why = ENTRIES[name]
    etc = Etc(tmp_path, file, text)
    assert etc.readable() == readable
    (entry,) = etc.found()
    assert entry["file"] == str(etc.other)
    said = source_conflicts([entry], PINNED, [])
    assert bool(said) == bool(why) and why.replace("{keys}", str(etc.keys)) in "".join(said), said
    if not why:
        assert source_conflicts([entry], "0" * 64, []), "another pinned key takes it, too"
        etc.own.unlink()
        assert etc.readable()


@real_apt
@pytest.mark.parametrize("name", APART)
def test_what_is_another_repository_to_apt_is_left_alone(name, tmp_path):
    etc = Etc(tmp_path, *APART[name])
    assert etc.readable() and etc.found() == []


@real_apt
def test_the_architecture_in_a_suite_is_put_in_as_apt_does(tmp_path):
    architecture = apt_sources.ARCHITECTURES.get(platform.machine(), platform.machine())
    etc = Etc(tmp_path, "cuda.list", f"deb [signed-by={{keys}}/other.gpg] {URI} $(ARCH)/", f"{architecture}/")
    assert not etc.readable() and len(etc.found()) == 1


def test_an_entry_without_the_components_is_not_taken():
    entry = {
        "file": "/f",
        "kinds": ["deb"],
        "components": ["main"],
        "signed_by": "/k",
        "key_sha256": PINNED,
        "trusted": "",
    }
    assert source_conflicts([entry], PINNED, ["main"]) == []
    assert source_conflicts([entry], PINNED, ["main", "contrib"]) == ["/f (it lacks component contrib)"]
    assert source_conflicts([entry], "", []) == ["/f (no entry beside that of the folder of packages is taken)"]
