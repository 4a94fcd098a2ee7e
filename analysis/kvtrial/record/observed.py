"""What a host tells about a vLLM server that already runs there: the facts that /metrics does not carry.

Written by whoever reads the host (the observe playbook), read by `kvtrial observe --host FACTS.json`. Everything is
optional: an absent fact is not judged. Secrets are redacted before the file is written and once more when it is read.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from kvtrial.record.errors import UnusableInput

OBSERVED_SCHEMA_VERSION = 1
REDACTED = "<redacted>"
_SECRET_NAME = re.compile(r"(api[-_]?key|token|secret|password|passwd|credential)s?$", re.IGNORECASE)
_OPTION_WITH_SECRET = re.compile(r"(--[\w-]*(?:api[-_]key|token|secret|password))(=|\s+)(\S+)", re.IGNORECASE)
# Of API keys several may follow, up to the next option or the end of the line.
_MORE_KEYS = re.compile(rf"(--[\w-]*api[-_]key\s+{REDACTED})((?:[ \t]+(?![-\\])\S+)+)", re.IGNORECASE)
_VARIABLE_WITH_SECRET = re.compile(r"\b(\w*(?:API_KEY|_TOKEN|SECRET|PASSWORD)\w*)=(\"[^\"]*\"|'[^']*'|\S+)")
_PRINTED_SECRET = re.compile(r"('\w*(?:api_key|_token|secret|password)': )(\[[^\]]*\]|'[^']*')")
_CREDENTIALS = re.compile(r"://[^/@\s]+@")
_NOT_SECRET = re.compile(r"(max[-_](num[-_])?(batched[-_])?tokens?|tokens?[-_]per|num[-_].*tokens?)$", re.IGNORECASE)


class Listener(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A listening TCP socket of the server's processes."""

    address: str
    port: int
    process: str | None = None


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A GPU as nvidia-smi shows it. `other_bytes`: memory held by processes that are none of the server's."""

    name: str
    vram_total_bytes: int | None = None
    vram_used_bytes: int | None = None
    other_bytes: int | None = None


class ShmFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of a CPU tier in /dev/shm. `mapped` false: no process maps it, it is left over."""

    path: str
    size_bytes: int
    mapped: bool | None = None


class HostFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One server on one host.

    `argv`: of the server's process, or of its unit's ExecStart, secrets redacted. `env`: VLLM_*, PYTORCH_*, CUDA_* and
    PROMETHEUS_MULTIPROC_DIR, secrets redacted. `unit`: text of the systemd unit with its drop-ins. `dev_shm_*` and
    `ram_*`: as the server's own namespace sees them. `cgroup_*`: the smallest limit from the server's cgroup upwards;
    None where none is set. `kernel_lines`: the kernel's lines about killed processes.
    """

    schema_version: int = OBSERVED_SCHEMA_VERSION
    host: str | None = None
    unit_name: str | None = None
    unit: str | None = None
    argv: list[str] = []
    env: dict[str, str] = {}
    vllm_version: str | None = None
    driver_version: str | None = None
    gpus: list[Gpu] = []
    ram_total_bytes: int | None = None
    ram_available_bytes: int | None = None
    dev_shm_total_bytes: int | None = None
    dev_shm_free_bytes: int | None = None
    shm_files: list[ShmFile] = []
    cgroup_limit_bytes: int | None = None
    cgroup_used_bytes: int | None = None
    cgroup_oom_kills: int | None = None
    listening: list[Listener] = []
    kernel_lines: list[str] = []


def read_host_facts(path: Path) -> HostFacts:
    """Facts of a file in JSON, secrets redacted. Raises UnusableInput with the field that does not fit."""
    try:
        facts = msgspec.json.decode(path.read_bytes(), type=HostFacts)
    except OSError as error:
        raise UnusableInput(f"{path} can't be read ({error.strerror}); give an existing file.") from None
    except msgspec.DecodeError as error:
        raise UnusableInput(f"{path} is not a host's facts in JSON ({error}); see docs/observe.md.") from None
    if facts.schema_version > OBSERVED_SCHEMA_VERSION:
        raise UnusableInput(
            f"{path} has schema_version {facts.schema_version}, newer than {OBSERVED_SCHEMA_VERSION}, the newest this "
            "release reads; use a newer kvtrial."
        )
    for name, value in _counts("", msgspec.to_builtins(facts)):
        if value < 0:
            raise UnusableInput(f"{path}: {name}={value} is below 0; leave out what is not known.")
    return msgspec.structs.replace(
        facts, argv=redacted_argv(facts.argv), env=redacted_env(facts.env), unit=redacted_text(facts.unit)
    )


def _counts(name: str, value: Any) -> Iterator[tuple[str, int]]:
    """Every number of a host's facts with its name; all are sizes or counts."""
    if isinstance(value, int) and not isinstance(value, bool):
        yield name, value
    elif isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _counts(f"{name}.{key}" if name else str(key), inner)


def is_secret_name(name: str) -> bool:
    """Whether an option or variable of that name holds a secret: API keys, tokens, passwords; not counts of tokens."""
    return bool(_SECRET_NAME.search(name)) and not _NOT_SECRET.search(name)


def redacted_argv(argv: list[str]) -> list[str]:
    """argv without the values of secret options (`--api-key X Y`, `--api-key=X`), nor credentials in addresses."""
    shown: list[str] = []
    hide = False
    for word in argv:
        name, equals, _ = word.partition("=")
        if word.startswith("-"):
            secret = is_secret_name(name)
            hide = secret and not equals
            shown.append(f"{name}={REDACTED}" if secret and equals else _CREDENTIALS.sub("://***@", word))
        else:
            # An API key option takes several values, so every word up to the next option is one.
            shown.append(REDACTED if hide else _CREDENTIALS.sub("://***@", word))
    return shown


def redacted_env(env: dict[str, str]) -> dict[str, str]:
    """Environment without the values of secret variables, nor credentials in addresses."""
    return {
        name: REDACTED if is_secret_name(name) else _CREDENTIALS.sub("://***@", value) for name, value in env.items()
    }


def redacted_text(text: str | None) -> str | None:
    """A unit or a log without the values of secret options and variables; as module_utils/servers.py does on a host."""
    if text is None:
        return None
    text = _OPTION_WITH_SECRET.sub(rf"\1\2{REDACTED}", text)
    text = _MORE_KEYS.sub(rf"\1 {REDACTED}", text)
    text = _VARIABLE_WITH_SECRET.sub(rf"\1={REDACTED}", text)
    text = _PRINTED_SECRET.sub(rf"\1'{REDACTED}'", text)
    return _CREDENTIALS.sub("://***@", text)
