"""Render an arm's launch specification: the argv and environment of `vllm serve`. Pure."""

import json
from typing import Any

from msgspec.structs import replace

from kvtrial.analysis.inputs import HostInput
from kvtrial.analysis.secrets import refuse_secrets
from kvtrial.record.errors import UnusableInput
from kvtrial.record.launch import NUMBER, engine_gpus
from kvtrial.record.options import unclear_option
from kvtrial.record.plan import Launch
from kvtrial.record.protocol import Arm

LOOPBACK = "127.0.0.1"
OURS = {
    "host": f"the engine listens on {LOOPBACK} alone",
    "uds": f"the engine listens on {LOOPBACK} alone",
    "port": "it is set by kvtrial_port",
    "model": "it is set by the model role's variables",
    "served-model-name": "it is set by kvtrial_model_name",
    "config": "what stands in such a file is seen by no check; give its content as options",
}
"""Options that an arm can't be given, and why."""
TRANSFER = "kv-transfer-config"
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


def host_of_arm(host: HostInput, arm: Arm) -> HostInput:
    """The host as an arm finds it: with its smaller model under the usual name, where the arm asks for that one."""
    if not arm.model or host.smaller_model is None:
        return host
    usual = host.model
    model = replace(
        host.smaller_model, name=usual.name, low_token_id=usual.low_token_id, high_token_id=usual.high_token_id
    )
    return replace(host, model=model)


def merged_args(host: HostInput, arm: Arm) -> dict[str, Any]:
    """Options of `vllm serve` for an arm: the host's, with the arm's on top; None removes. Dashes, not underscores."""
    args = {**dashed(host.engine_args), **dashed(arm.args)}
    if isinstance(config := args.get(TRANSFER), dict):
        extra = {**config.get("kv_connector_extra_config", {}), **host.connector_extra_config}
        args[TRANSFER] = {**config, "kv_connector_extra_config": extra}
    return {name: value for name, value in args.items() if value is not None}


def render(host: HostInput, name: str, arm: Arm) -> Launch:
    """The launch specification of arm `name` on a host.

    Raises UnusableInput for what is kvtrial's own to set, for secrets, and for what vLLM would read as another option.
    """
    host = host_of_arm(host, arm)
    args = merged_args(host, arm)
    if args.get("host") == LOOPBACK:
        del args["host"]
    given = {key: value for key, value in {**host.engine_env, **arm.env}.items() if value is not None}
    refuse_secrets(name, args, given)
    for option, value in args.items():
        _refuse_option(name, option, value)
    if given.get("VLLM_HOST_IP", LOOPBACK) != LOOPBACK:
        raise UnusableInput(
            f"arm {name}: the engine would listen on VLLM_HOST_IP={given['VLLM_HOST_IP']}, allowed is {LOOPBACK}; "
            f"remove it from kvtrial_engine_env, kvtrial_engine_env_more or the protocol's arm, where it stands."
        )
    env = {**given, "VLLM_HOST_IP": LOOPBACK}
    if host.state_dir:
        # One cache for all arms and runs: what vLLM finds out about a model costs eight seconds of every start.
        env.setdefault("VLLM_CACHE_ROOT", f"{host.state_dir}/cache/vllm")
    config = args.get(TRANSFER)
    launch = Launch(
        arm=name,
        argv=[
            f"{host.vllm_venv}/bin/vllm", "serve", host.model.path,
            "--served-model-name", host.model.name, "--host", LOOPBACK, "--port", str(host.port),
            *(word for option in sorted(args) for word in _words(option, args[option])),
        ],
        env={key: str(env[key]) for key in sorted(env)},
        port=host.port,
        served_model_name=host.model.name,
        connector=config.get("kv_connector") if isinstance(config, dict) else None,
    )  # fmt: skip
    return replace(launch, also=[_replica(launch, number, host.backend) for number in range(1, arm.replicas or 1)])


def _replica(launch: Launch, number: int, backend: str) -> Launch:
    """Engine `number` beside the first of an arm: the same launch on the next port and, on GPUs, the next of those."""
    port = launch.port + number
    at = launch.argv.index("--port") + 1
    gpus = engine_gpus(launch.argv)
    own = ",".join(str(gpu) for gpu in range(number * gpus, (number + 1) * gpus))
    return replace(
        launch,
        argv=[*launch.argv[:at], str(port), *launch.argv[at + 1 :]],
        env=launch.env if backend != "cuda" else dict(sorted({**launch.env, VISIBLE_GPUS: own}.items())),
        port=port,
    )


def _refuse_option(arm: str, option: str, value: Any) -> None:
    """Raise UnusableInput for an option that is not the arm's to set, or that vLLM would take for another."""
    if complaint := unclear_option(f"--{option}"):
        raise UnusableInput(f"arm {arm}: {complaint}")
    if why := OURS.get(option.partition(".")[0]):
        raise UnusableInput(f"arm {arm}: option --{option}={value!r} can't be used: {why}; remove it.")
    for word in value if isinstance(value, list) else [value]:
        if isinstance(word, str) and word.startswith("-") and not NUMBER.match(word):
            raise UnusableInput(
                f"arm {arm}: option --{option}={word!r} can't be used: vLLM takes a value that starts with a dash for "
                f"an option of its own; give that one under its name."
            )


def dashed(args: dict[str, Any]) -> dict[str, Any]:
    """Options under the names that `vllm serve` prints: no dashes in front, dashes for underscores."""
    return {name.lstrip("-").replace("_", "-"): value for name, value in args.items()}


def _words(option: str, value: Any) -> list[str]:
    """`--option value` as words: true is a flag, false its --no- form, a mapping JSON, a list several values."""
    if value is True:
        return [f"--{option}"]
    if value is False:
        return [f"--no-{option}"]
    if isinstance(value, dict):
        return [f"--{option}", json.dumps(value, sort_keys=True, separators=(",", ":"))]
    if isinstance(value, list):
        return [f"--{option}", *map(str, value)]
    return [f"--{option}", str(value)]
