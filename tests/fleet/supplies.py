"""What a fleet is provisioned from in tests: tiny wheels and a model folder, each a stand-in that says so."""

import base64
import hashlib
import json
import zipfile
from pathlib import Path

from vendor import FABRIC, PACKAGES, Repository, debs

OLD, MID, NEW, NEWER = "570.10.01", "580.20.02", "580.30.03", "590.40.04"
"""Versions of the stand-in driver; the numbers are made up in the vendor's form."""


def wheel(folder: Path, name: str, version: str, modules: dict[str, str], script: str = "") -> tuple[Path, str]:
    """Write a wheel; its path and sha256. `script`: a command of the wheel's name that calls MODULE:FUNCTION."""
    info = f"{name}-{version}.dist-info"
    files = {
        **modules,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: stand-in of tests\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: kvtrial tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if script:
        files[f"{info}/entry_points.txt"] = f"[console_scripts]\n{name} = {script}\n"
    record = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record.append(f"{path},sha256={digest},{len(text.encode())}")
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
    target = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as archive:
        for path, text in files.items():
            archive.writestr(zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0)), text)
    return target, hashlib.sha256(target.read_bytes()).hexdigest()


ENGINE = "def main():\n    print('{version} (stand-in of the kvtrial tests, no vLLM)')\n"


class Supplies:
    """A folder with wheelhouse, locks, model and vendor's repository, all stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wheelhouse = folder / "wheelhouse"
        self.wheelhouse.mkdir(parents=True)
        self.locks: dict[str, Path] = {}
        _, self.dependency = wheel(self.wheelhouse, "standin_dependency", "1.0", {"standin_dependency.py": "A = 1\n"})
        for version in ("0.30.0", "0.33.0"):
            self.engine(version)
        self.model = folder / "model"
        self.model.mkdir()
        config = {"num_hidden_layers": 8, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 512,
                  "num_attention_heads": 8, "torch_dtype": "bfloat16", "model_type": "llama"}  # fmt: skip
        (self.model / "config.json").write_text(json.dumps(config))
        (self.model / "model.safetensors").write_bytes(b"stand-in weights\n" * 64)
        (self.model / "model.safetensors").chmod(0o600)
        self.repository = Repository(folder)

    def engine(self, version: str) -> Path:
        """A wheel of the stand-in engine, and its lock."""
        modules = {"vllm/__init__.py": f"__version__ = '{version}'\n", "vllm/cli.py": ENGINE.format(version=version)}
        _, digest = wheel(self.wheelhouse, "vllm", version, modules, "vllm.cli:main")
        lock = self.folder / f"lock-{version}.txt"
        lock.write_text(
            f"# Stand-in of the kvtrial tests.\n# wheels x86_64: 3.11 3.13\n"
            f"standin-dependency==1.0 \\\n    --hash=sha256:{self.dependency}\n"
            f"vllm=={version} \\\n    --hash=sha256:{digest}\n"
        )
        self.locks[version] = lock
        return lock

    def drivers(self, *versions: str) -> None:
        """Put drivers into the vendor's repository."""
        self.repository.add(*(deb for version in versions for deb in debs(version)))

    def model_revision(self) -> str:
        """What pins the model: sha256 over the file list, as its manifest has it."""
        import subprocess
        import sys

        maker = Path(__file__).parents[2] / "roles" / "model" / "files" / "make_model.py"
        done = subprocess.run([sys.executable, maker, "digest", self.model], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def variables(self, repository_url: str, host_wheels: Path, cache: Path) -> dict[str, object]:
        """Variables of hosts that are provisioned from here."""
        return {
            "ansible_become": True,
            "kvtrial_host_may_be_disturbed": True,
            "kvtrial_ram_reserve_bytes": 2**28,
            "kvtrial_disk_reserve_bytes": 2**24,
            "kvtrial_vllm_version": "0.30.0",
            "vllm_lock": str(self.folder / "lock-{{ kvtrial_vllm_version }}.txt"),
            "vllm_wheelhouse": str(self.wheelhouse),
            "vllm_wheelhouse_cache": str(cache),
            "vllm_venv_bytes_needed": 2**24,
            "workload_wheelhouse": str(host_wheels),
            "workload_wheel_cache": str(cache),
            "kvtrial_model_name": "standin",
            "kvtrial_model_upload": str(self.model),
            "kvtrial_model_manifest_revision": self.model_revision(),
            "kvtrial_driver_manage": True,
            "kvtrial_driver_version": MID,
            "kvtrial_host_drained": True,
            "nvidia_driver_packages": PACKAGES,
            "nvidia_driver_fabric_manager": True,
            "nvidia_driver_fabric_packages": FABRIC,
            "nvidia_driver_repository_uri": repository_url,
            "nvidia_driver_repository_suite": "./",
            "nvidia_driver_repository_key": str(self.repository.key),
            "nvidia_driver_repository_key_sha256": self.repository.key_sha256,
            "nvidia_driver_reboot_allowed": True,
            "nvidia_driver_reboot_seconds": 60,
            "nvidia_driver_apt_lock_seconds": 2,
        }
