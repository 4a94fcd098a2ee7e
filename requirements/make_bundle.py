#!/usr/bin/env python3
"""Collect what provisioning needs into one folder: wheels, .debs, model, keys, and the sha256 of each file.

    make_bundle.py -            the request is JSON on standard input; playbooks/bundle.yml writes it
    make_bundle.py check FOLDER compare every file with SHA256SUMS

The folder: wheels/ (engine), host-wheels/ (host program), debs/ with its Packages, model/, keys/, SHA256SUMS. What is
there already and right is not fetched again, and what it does not need goes: a folder that holds something and is no
bundle is refused. Bad input ends with status 2 and one sentence.
"""

import http.client
import json
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "roles" / "vllm" / "files"))

from wheelhouse import UnusableInput, pick, requirements_of, sha256_of  # noqa: E402

SUMS = "SHA256SUMS"
MARK = ".kvtrial-bundle"
"""In a folder that this program makes, also where it was interrupted; it may be missing in a copy."""
OWN = {SUMS, f".{SUMS}", MARK}
HOST_PYTHONS = ("3.11", "3.12", "3.13")
"""On which the host program runs (roles/workload/vars/main.yml)."""
ARCHITECTURES = ("x86_64", "aarch64")
GLIBC_MINORS = (35, 34, 33, 32, 31, 28, 27, 24, 17, 12, 5)


def run(*command: str | Path, **options: Any) -> str:
    """Standard output; UnusableInput with the command's last words where it fails."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, **options)
    if done.returncode:
        words = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()] or ["no message"]
        raise UnusableInput(f"{Path(str(command[0])).name} {command[1]} failed: {words[-1].strip()}")
    return done.stdout


def wheels(lock: Path, folder: Path, pythons: list[str], architectures: list[str]) -> None:
    """Download a lock's wheels for each Python and architecture; pip compares every sha256 with the lock.

    pip holds the lock's conditions against the Python that runs it, whatever --python-version says: it is given what is
    left of the lock for that Python. That all of it came is checked as provisioning will.
    """
    if not lock.is_file():
        raise UnusableInput(f"{lock} is no lock; make it (make lock VLLM=x.y.z) or name yours in vllm_lock.")
    text = lock.read_text(encoding="utf-8")
    for python in pythons:
        for architecture in architectures:
            entries = [
                f"{name}=={version} " + " ".join(f"--hash=sha256:{digest}" for digest in sorted(digests))
                for name, version, digests in requirements_of(text, python, architecture)
            ]
            platforms = [f"manylinux_2_{minor}_{architecture}" for minor in GLIBC_MINORS]
            platforms += [f"manylinux2014_{architecture}", f"manylinux1_{architecture}", f"linux_{architecture}"]
            options = [option for name in platforms for option in ("--platform", name)]
            with tempfile.TemporaryDirectory(prefix="kvtrial-lock-") as name:
                own = Path(name, lock.name)
                own.write_text("\n".join(entries) + "\n", encoding="utf-8")
                run(
                    sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet",
                    "--require-hashes", "--no-deps", "--only-binary=:all:", "--implementation", "cp",
                    "--python-version", python, *options, "--dest", folder, "-r", own,
                )  # fmt: skip
            pick(text, folder, python, architecture)


def commit_wheel(url: str, sha256: str, folder: Path) -> None:
    """Download the wheel of an exact commit."""
    target = folder / urllib.request.url2pathname(url.rsplit("/", 1)[-1])
    if not target.is_file() or sha256_of(target) != sha256:
        try:
            with urllib.request.urlopen(url, timeout=60) as answer, target.open("wb") as file:
                shutil.copyfileobj(answer, file)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise UnusableInput(
                f"kvtrial_vllm_wheel_url={url} could not be fetched ({getattr(error, 'reason', error)}); give its "
                "full address on an index or a mirror that this machine reaches."
            ) from None
    if sha256_of(target) != sha256:
        target.unlink()
        raise UnusableInput(f"{url} has another sha256 than kvtrial_vllm_wheel_sha256={sha256}.")


def model(request: dict[str, Any], folder: Path) -> None:
    """Copy the model, or fetch it from its hub, keep nothing half, and nothing of a model that was there before."""
    if request["directory"]:
        source = Path(request["directory"])
        if not source.is_dir():
            raise UnusableInput(f"kvtrial_model_upload={source} is no directory; a bundle holds models as directories.")
        shutil.copytree(source, folder, dirs_exist_ok=True)
        for path in [path for path in folder.rglob("*") if path.is_file()]:
            if not (source / path.relative_to(folder)).is_file():
                path.unlink()
    elif request["repository"]:
        command = [sys.executable, ROOT / "roles/model/files/fetch_model.py", folder, "--only"]
        command += ["--endpoint", request["endpoint"], "--repository", request["repository"]]
        command += ["--revision", request["revision"]]
        command += [f"--exclude={pattern}" for pattern in request["excluded"]]
        command += ["--token-file", request["token_file"]] if request["token_file"] else []
        run(*command)


def debs(request: dict[str, Any], folder: Path, keys: Path) -> None:
    """Download the driver's packages and what they need beyond a host's own, by apt with folders of its own."""
    key = Path(request["key"])
    if not key.is_file() or sha256_of(key) != request["key_sha256"]:
        raise UnusableInput(f"nvidia_driver_repository_key={key} is missing or has another sha256 than pinned.")
    if request["dpkg_status"] and not Path(request["dpkg_status"]).is_file():
        raise UnusableInput(f"kvtrial_bundle_dpkg_status={request['dpkg_status']} is no file.")
    keys.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(key, keys / key.name)
    with tempfile.TemporaryDirectory(prefix="kvtrial-apt-") as name:
        work = Path(name)
        for part in ("lists/partial", "archives/partial", "sources", "preferences", "conf"):
            (work / part).mkdir(parents=True)
        # apt takes what lies on its own disk from there, and would leave nothing behind.
        uri = re.sub("^file:", "copy:", request["uri"])
        components = f"Components: {' '.join(request['components'])}\n" if request["components"] else ""
        (work / "sources" / "vendor.sources").write_text(
            f"Types: deb\nURIs: {uri}\nSuites: {request['suite']}\n{components}Signed-By: {key.resolve()}\n",
            encoding="utf-8",
        )
        if request["apt_sources"]:
            given = Path(request["apt_sources"])
            shutil.copyfile(given, work / "sources" / f"system{given.suffix}")
        pin = f"Package: *\nPin: version {request['version']}-*\nPin-Priority: 1001\n"
        (work / "preferences" / "driver").write_text(pin, encoding="utf-8")
        status = Path(request["dpkg_status"]) if request["dpkg_status"] else work / "status"
        if not request["dpkg_status"]:
            status.write_text("", encoding="utf-8")
        options = {
            "Dir::State::lists": work / "lists", "Dir::State::status": status, "Dir::Cache": work,
            "Dir::Cache::archives": work / "archives", "Dir::Etc::sourcelist": "/dev/null",
            "Dir::Etc::sourceparts": work / "sources", "Dir::Etc::preferencesparts": work / "preferences",
            "Dir::Etc::preferences": "/dev/null", "APT::Sandbox::User": "root", "Debug::NoLocking": "1",
        }  # fmt: skip
        apt = ["apt-get", "-qq", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
        run(*apt, "update")
        run(*apt, "-y", "--no-install-recommends", "--allow-downgrades", "--download-only", "install",
            *request["packages"])  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.deb"):
            old.unlink()
        for path in (work / "archives").glob("*.deb"):
            shutil.copyfile(path, folder / path.name.replace("%3a", "_"))
    arrived = {path.name.split("_")[0] for path in folder.glob("*.deb")}
    if missing := sorted({package.split("=")[0] for package in request["packages"]} - arrived):
        raise UnusableInput(
            f"apt fetched no {', '.join(missing)}; a host whose status is kvtrial_bundle_dpkg_status has them, so "
            "give the status of a host without a driver."
        )
    entries = []
    for path in sorted(folder.glob("*.deb")):
        control = run("dpkg-deb", "-f", path).rstrip()
        size = path.stat().st_size
        entries.append(f"{control}\nFilename: ./{path.name}\nSize: {size}\nSHA256: {sha256_of(path)}\n")
    (folder / "Packages").write_text("\n".join(entries), encoding="utf-8")


def take(folder: Path) -> None:
    """Mark a folder as a bundle's. Raises UnusableInput where it holds something and is none: its files may go."""
    folder.mkdir(parents=True, exist_ok=True)
    sums = folder / SUMS
    of_before = sums.is_file() and re.search("(?m)^[0-9a-f]{64}  wheels/", sums.read_text("utf-8", errors="replace"))
    if not (folder / MARK).is_file() and not of_before and (found := sorted(path.name for path in folder.iterdir())):
        first = ", ".join(found[:5]) + (" and so on" if found[5:] else "")
        raise UnusableInput(
            f"kvtrial_bundle={folder} holds {first} and is no bundle of this project; name a folder that is empty "
            "or is not there yet."
        )
    (folder / MARK).write_text("Made by kvtrial (playbooks/bundle.yml), which removes here what it does not need.\n")


def files_of(folder: Path) -> list[Path]:
    """Every file of a bundle that SHA256SUMS names, sorted."""
    own = {folder / name for name in OWN}
    return sorted(path for path in folder.rglob("*") if path.is_file() and path not in own)


def write_sums(folder: Path) -> list[Path]:
    """Write SHA256SUMS over every other file; the files."""
    paths = files_of(folder)
    text = "".join(f"{sha256_of(path)}  {path.relative_to(folder).as_posix()}\n" for path in paths)
    temporary = folder / f".{SUMS}"
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(folder / SUMS)
    return paths


def check(folder: Path) -> int:
    """Compare a bundle with its SHA256SUMS; the number of files. Raises UnusableInput that names the first odd file."""
    if not (folder / SUMS).is_file():
        raise UnusableInput(f"kvtrial_bundle={folder} has no {SUMS}; make it (playbooks/bundle.yml) to its end.")
    lines = (folder / SUMS).read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        if not re.fullmatch("[0-9a-f]{64}  .+", line):
            raise UnusableInput(
                f"line {number} of {folder / SUMS} is no sum and name of a file; copy the bundle again."
            )
    listed = dict(reversed(line.split("  ", 1)) for line in lines)
    present = {path.relative_to(folder).as_posix() for path in files_of(folder)}
    for name in sorted(present ^ set(listed)):
        raise UnusableInput(f"{folder / name} is {'not in' if name in present else 'missing, it is in'} {SUMS}.")
    for name, digest in listed.items():
        if sha256_of(folder / name) != digest:
            raise UnusableInput(f"{folder / name} has another sha256 than {SUMS} says; copy the bundle again.")
    return len(listed)


def make(request: dict[str, Any]) -> str:
    """Make or renew the bundle; what is in it."""
    pythons = request["pythons"]
    if not isinstance(pythons, list) or not all(re.fullmatch(r"3\.[0-9]+", str(python)) for python in pythons):
        raise UnusableInput(f'kvtrial_bundle_pythons={pythons} is no list of versions; give one such as ["3.11"].')
    pythons = [str(python) for python in pythons]
    of_the_program = [python for python in pythons if python in HOST_PYTHONS]
    if not of_the_program:
        raise UnusableInput(
            f"kvtrial_bundle_pythons={pythons} has none that runs the host program ({', '.join(HOST_PYTHONS)}); name "
            'that of workload_python too, such as ["3.10", "3.12"].'
        )
    folder = Path(request["folder"])
    architectures = request["architectures"]
    if not isinstance(architectures, list) or not architectures or set(map(str, architectures)) - set(ARCHITECTURES):
        raise UnusableInput(
            f"kvtrial_bundle_architectures={architectures} is no list of {' and '.join(ARCHITECTURES)}; give one "
            'such as ["x86_64"].'
        )
    take(folder)
    (folder / SUMS).unlink(missing_ok=True)
    wheels(Path(request["engine_lock"]), folder / "wheels", pythons, architectures)
    if request["engine_wheel_url"]:
        commit_wheel(request["engine_wheel_url"], request["engine_wheel_sha256"], folder / "wheels")
    wheels(Path(request["host_lock"]), folder / "host-wheels", of_the_program, architectures)
    model(request["model"], folder / "model")
    if request["driver"]["manage"]:
        debs(request["driver"], folder / "debs", folder / "keys")
    paths = write_sums(folder)
    counts = {part: sum(1 for p in paths if p.relative_to(folder).parts[0] == part) for part in sorted(
        {p.relative_to(folder).parts[0] for p in paths})}  # fmt: skip
    size = sum(path.stat().st_size for path in paths)
    told = f"{folder}: {', '.join(f'{n} files in {part}' for part, n in counts.items())}; {size} bytes."
    if (folder / "model").is_dir():
        revision = run(sys.executable, ROOT / "roles/model/files/make_model.py", "digest", folder / "model").strip()
        told += (
            f"\nPin the model for provisioning from it, in the inventory: kvtrial_model_manifest_revision: {revision}"
        )
    return told


def main() -> int:
    """Entry point. 0 done, 2 unusable input."""
    try:
        if sys.argv[1:2] == ["check"]:
            print(f"{sys.argv[2]}: {check(Path(sys.argv[2]))} files are as {SUMS} says.")
        else:
            print(make(json.load(sys.stdin)))
    except (UnusableInput, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
