#!/usr/bin/env python3
"""Make the commands bin/vllm and bin/python in an unpacked tree of packages, so that it serves as an environment.

    python3 make_tree.py TREE        TREE/lib/python3.X/site-packages holds vLLM and what the image lacks of its needs

Run it with the Python that is to run the engine: the one that has torch. The tree comes first on its path and its own
packages after it. The engine is started with an environment of its own, so what the image needs to find its GPU and
its compilers is written into the commands, as it is set now: LD_LIBRARY_PATH, PATH and variables of CUDA, NVIDIA's
libraries, torch and Triton. `environment` in the tree lists it. Then, in the inventory: `vllm_existing_venv: TREE`.
Standard library only.
"""

import os
import shlex
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

KEPT = ("LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "CC", "CXX", "SSL_CERT_FILE")
KEPT_PREFIXES = ("CUDA_", "NVIDIA_", "NCCL_", "NVSHMEM_", "NVTE_", "TORCH_", "TRITON_", "OPENBLAS_")
COMMAND = """\
#!/bin/sh
# Made by make_tree.py. A value that is set already is left as it is.
{exports}PATH="${{PATH:+$PATH:}}"{path}; export PATH
PYTHONPATH={site}; export PYTHONPATH
PYTHONNOUSERSITE=1; export PYTHONNOUSERSITE
exec {python} {module}"$@"
"""


class UnusableInput(Exception):
    """One clear sentence for the user."""


def site_packages(tree: Path) -> Path:
    """The tree's folder of packages for the running Python. Raises UnusableInput where there is none with vLLM."""
    site = tree / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    if not (site / "vllm" / "__init__.py").is_file():
        raise UnusableInput(
            f"{site} holds no package vllm; unpack the tree first, for Python "
            f"{sys.version_info[0]}.{sys.version_info[1]}, and name its folder."
        )
    return site


def kept(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that the engine's commands take along, but for PATH."""
    return {
        name: environment[name]
        for name in sorted(environment)
        if name in KEPT or (name.startswith(KEPT_PREFIXES) and not name.startswith("CUDA_VISIBLE"))
    }


def command(module: str, site: Path, environment: Mapping[str, str]) -> str:
    """The text of one command: `module` is run, or given arguments alone where it is empty."""
    exports = "".join(
        f'[ -n "${{{name}+set}}" ] || {name}={shlex.quote(value)}; export {name}\n'
        for name, value in kept(environment).items()
    )
    return COMMAND.format(
        exports=exports,
        path=shlex.quote(environment.get("PATH", os.defpath)),
        site=shlex.quote(str(site)),
        python=shlex.quote(sys.executable),
        module=f"-m {module} " if module else "",
    )


def make(tree: Path, environment: Mapping[str, str]) -> list[str]:
    """Write the commands and the list of what they set; return the paths written."""
    tree = tree.resolve()
    site = site_packages(tree)
    folder = tree / "bin"
    folder.mkdir(exist_ok=True)
    for name, module in (("vllm", "vllm.entrypoints.cli.main"), ("python", "")):
        path = folder / name
        path.write_text(command(module, site, environment))
        path.chmod(0o755)
    listed = {"PYTHON": sys.executable, "PLATFORM": sysconfig.get_platform(), "PATH": environment.get("PATH", "")}
    lines = [f"{name}={value}\n" for name, value in {**listed, **kept(environment)}.items()]
    (tree / "environment").write_text("".join(lines))
    return [str(folder / "vllm"), str(folder / "python"), str(tree / "environment")]


def main(arguments: list[str]) -> int:
    """Entry point. 0 done, 2 unusable input."""
    try:
        if len(arguments) != 1:
            raise UnusableInput("make_tree.py takes one argument, the folder of the unpacked tree.")
        print("\n".join(make(Path(arguments[0]), os.environ)))
    except UnusableInput as error:
        print(str(error), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
