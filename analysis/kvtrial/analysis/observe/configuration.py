"""The launch of the server that is looked at: from a launch file, a host's facts or its log. Pure but for reading."""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from kvtrial.analysis.check import check_launches
from kvtrial.analysis.launch_arm import Backend, after_vllm, read_arm
from kvtrial.analysis.launch_file import refuse_number_as_version
from kvtrial.analysis.observe.capacity import Told
from kvtrial.analysis.observe.finding import Finding
from kvtrial.record.errors import UnusableInput
from kvtrial.record.launch import ArmLaunch, ParsedArgs, async_scheduling, parse_vllm_args
from kvtrial.record.observed import HostFacts, redacted_argv, redacted_env

_NOT_FOR_A_RUNNING_ONE = {
    "gpu_kv_not_pinned",
    "kv_layout_differs",
    "tier_leaves_no_room",
    "tier_not_compared",
    "driver_not_judged",
}
_TRANSFER_PRINTED = ("kv_connector", "kv_role", "kv_connector_extra_config", "kv_load_failure_policy")
_SAID_BY_EXPOSURE = {"dev_mode_exposed", "non_loopback_bind"}
"""Where a server listens is judged with its sockets and routes, apart."""


class Configuration(msgspec.Struct, frozen=True):
    """argv and environment of one server, and where they come from. Secrets are redacted."""

    launch: ArmLaunch
    source: str
    version: str | None = None
    backend: Backend = "cuda"
    host: dict[str, Any] = {}
    vllm: dict[str, Any] = {}
    model: dict[str, Any] | None = None

    @property
    def parsed(self) -> ParsedArgs:
        """The command line as vLLM reads it."""
        return parse_vllm_args(self.launch.argv)


def read_configuration(path: Path, arm: str | None = None, connector: bool | None = None) -> Configuration:
    """A launch file (host, vllm, arms), a mapping with args and env, or a command line. Raises UnusableInput.

    Of several arms `arm` names one; else that with a connector where the page shows one, or the only one.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UnusableInput(f"{path} can't be read ({error.strerror}); give an existing file.") from None
    except UnicodeDecodeError:
        raise UnusableInput(f"{path} is not UTF-8; save it as UTF-8.") from None
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError:
        raw = None
    if isinstance(raw, dict) and isinstance(raw.get("arms"), dict):
        return _of_arms(path, raw, arm, connector)
    if isinstance(raw, dict) and isinstance(raw.get("args") or raw.get("argv"), list):
        return _of(path.name, raw.get("args") or raw["argv"], raw.get("env") or {}, raw)
    words = re.split(r"\s+", text.replace("\\\n", " ").strip())
    if any(word.rsplit("/", 1)[-1] == "vllm" or word.startswith("vllm.entrypoints") for word in words):
        return _of_command(path, text)
    raise UnusableInput(
        f"{path} is no launch: give YAML with host, vllm and arms (as `kvtrial check` takes it), YAML with args and "
        f"env, "
        "or a `vllm serve` command line."
    )


def configuration_of_host(facts: HostFacts, version: str | None = None) -> Configuration | None:
    """The configuration in a host's facts; None where they carry no argv."""
    if not facts.argv:
        return None
    argv = after_vllm(facts.argv)
    host = {"driver_version": facts.driver_version}
    return Configuration(
        ArmLaunch(argv, facts.env),
        "the host's facts",
        facts.vllm_version or version,
        likely_backend(facts.argv, facts.env),
        {name: value for name, value in host.items() if value is not None},
    )


def configuration_of_log(
    non_default_args: str | None, version: str | None, backend: Backend = "cuda"
) -> Configuration | None:
    """The configuration that a log's start prints as 'non-default args'; None where it can't be read."""
    if not non_default_args:
        return None
    try:
        tree = ast.parse(non_default_args, mode="eval").body
    except (ValueError, SyntaxError):
        return None
    if not isinstance(tree, ast.Dict):
        return None
    given = {str(_literal(key)): _literal(value) for key, value in zip(tree.keys, tree.values, strict=True)}
    argv = [str(given.get("model_tag") or given.get("model") or "model")]
    for name, value in given.items():
        option = f"--{str(name).replace('_', '-')}"
        if name in ("model_tag", "model") or value is None:
            continue
        if isinstance(value, bool):
            argv.append(option if value else f"--no-{option[2:]}")
        elif isinstance(value, dict):
            argv += [option, json.dumps(value)]
        elif isinstance(value, list):
            argv += [option, *map(str, value)]
        else:
            argv += [option, f"{value:g}" if isinstance(value, float) else str(value)]
    return Configuration(ArmLaunch(redacted_argv(argv), {}), "the log's start", version, backend)


def _literal(node: ast.expr | None) -> Any:
    """A printed value; a printed KVTransferConfig as the mapping it was made from, any other object as None."""
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id == "KVTransferConfig":
            printed = {word.arg: _literal(word.value) for word in node.keywords}
            return {name: printed[name] for name in _TRANSFER_PRINTED if printed.get(name)}
        return None
    try:
        return None if node is None else ast.literal_eval(node)
    except (ValueError, SyntaxError):
        return None


def told_by_configuration(configuration: Configuration, version: str | None) -> Told:
    """Sizes that a configuration states."""
    arm = _arm(configuration, version)
    if arm is None:
        return Told(source=configuration.source)
    pinned = arm.parsed.size("kv-cache-memory-bytes")
    override = arm.parsed.size("num-gpu-blocks-override")
    return Told(
        arm.tier.cpu_bytes if arm.tier else None,
        arm.kv_bytes_per_token,
        None if pinned is None else float(pinned),
        None if override is None else float(override * arm.block_tokens),
        configuration.source,
        override is not None,
    )


def configured_connector(configuration: Configuration, version: str | None) -> str | None:
    """The connector that the server was asked for; None without one."""
    arm = _arm(configuration, version)
    return arm.tier.connector if arm is not None and arm.tier is not None else None


def async_scheduling_of(configuration: Configuration | None, version: str | None) -> bool | None:
    """Whether async scheduling may be on; None where the configuration or the version is not known."""
    if configuration is None or version is None:
        return None
    return async_scheduling(configuration.parsed, version)


def launch_findings(configuration: Configuration, version: str | None) -> Iterator[Finding]:
    """What `kvtrial check` says of this one launch, as facts about a server that runs all the same."""
    stated = configuration.version or version
    if stated is None:
        yield Finding(
            "version_not_known",
            "info",
            f"The configuration ({configuration.source}) was not judged: no vLLM version is known.",
            {},
            "Give --vllm, such as --vllm 0.32.0, or the log of the start.",
            "unknown",
        )
        return
    vllm = {**configuration.vllm, "version": stated, "backend": configuration.backend}
    arms = {"server": {"args": configuration.launch.argv, "env": configuration.launch.env}}
    host = {name: value for name, value in configuration.host.items() if name in ("driver_version", "glibc", "python")}
    for found in check_launches(host, vllm, arms, configuration.model):
        if found.class_ in _NOT_FOR_A_RUNNING_ONE | _SAID_BY_EXPOSURE or found.class_.startswith("version_hazard"):
            continue
        yield Finding(found.class_, "warn", _as_fact(found.reason), found.numbers, found.do, "inferred")


def _as_fact(reason: str) -> str:
    return reason.replace("the trial can't show a gain", "no request gains by it")


def _arm(configuration: Configuration, version: str | None) -> Any:
    stated = configuration.version or version or "0.33"
    spec = {"args": configuration.launch.argv, "env": configuration.launch.env}
    try:
        return read_arm("server", spec, stated, configuration.backend, configuration.model)
    except UnusableInput:
        return None


def _of_arms(path: Path, raw: Mapping[str, Any], arm: str | None, connector: bool | None) -> Configuration:
    arms = raw["arms"]
    names = [str(name) for name in arms]
    if arm is not None and arm not in names:
        raise UnusableInput(f"{path} has no arm {arm!r}; it has {', '.join(names)}.")
    chosen = arm or (names[0] if len(names) == 1 else None)
    vllm = raw.get("vllm") if isinstance(raw.get("vllm"), dict) else {}
    refuse_number_as_version(vllm or {})
    version = str(vllm["version"]) if vllm and "version" in vllm else None
    if chosen is None:
        told = {name: configured_connector(_of(name, _args(path, name, arms[name]), {}, {}), version) for name in names}
        fitting = [name for name in names if bool(told[name]) == bool(connector)]
        chosen = (
            fitting[0] if connector is not None and fitting else next((n for n in names if n != "control"), names[0])
        )
    spec = arms[chosen]
    args = _args(path, chosen, spec)
    env = spec.get("env") if isinstance(spec.get("env"), dict) else {}
    made = _of(f"arm {chosen} of {path.name}", args, env or {}, {})
    host = raw.get("host") if isinstance(raw.get("host"), dict) else {}
    backend: Backend = "cpu" if vllm and vllm.get("backend") == "cpu" else "cuda"
    model = raw.get("model") if isinstance(raw.get("model"), dict) else None
    return msgspec.structs.replace(
        made, version=version, backend=backend, host=dict(host or {}), vllm=dict(vllm or {}), model=model
    )


def _args(path: Path, name: str, spec: Any) -> list[Any]:
    args = spec.get("args") if isinstance(spec, dict) else None
    if not isinstance(args, list):
        raise UnusableInput(f"{path}, arm {name}: args must be a list of `vllm serve` arguments.")
    return args


def _of(source: str, args: list[Any], env: Mapping[Any, Any], raw: Mapping[str, Any]) -> Configuration:
    argv = redacted_argv(after_vllm([str(word) for word in args]))
    environment = redacted_env({str(key): str(value) for key, value in env.items()})
    version = raw.get("vllm_version") or raw.get("version")
    return Configuration(
        ArmLaunch(argv, environment), source, str(version) if version else None, likely_backend(argv, environment)
    )


def _of_command(path: Path, text: str) -> Configuration:
    import shlex

    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise UnusableInput(f"{path} can't be read as a command line ({error}); mend its quotes.") from None
    env = {}
    while words and re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", words[0]):
        name, _, value = words.pop(0).partition("=")
        env[name] = value
    return _of(path.name, words, env, {})


def likely_backend(argv: list[str], env: Mapping[str, str]) -> Backend:
    """The backend that a server is taken for by its environment."""
    return "cpu" if any(name.startswith("VLLM_CPU_") for name in env) else "cuda"
