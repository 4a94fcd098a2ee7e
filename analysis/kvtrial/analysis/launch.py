"""Render an arm's launch specification: the argv and environment of `vllm serve`. Pure."""

import json
from typing import Any

from msgspec.structs import replace

from kvtrial.analysis.inputs import HostInput
from kvtrial.analysis.secrets import refuse_secrets
from kvtrial.record.errors import UnusableInput
from kvtrial.record.plan import Launch
from kvtrial.record.protocol import Arm

LOOPBACK = "127.0.0.1"
OURS = {"host": LOOPBACK, "port": None, "uds": None, "served-model-name": None, "model": None}
TRANSFER = "kv-transfer-config"


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
    """The launch specification of arm `name` on a host. Raises UnusableInput for options that are kvtrial's own."""
    host = host_of_arm(host, arm)
    args = merged_args(host, arm)
    for option, must_be in OURS.items():
        if option in args and args[option] != must_be:
            allowed = f"must be {must_be}" if must_be else "is set by kvtrial"
            raise UnusableInput(
                f"arm {name}: option --{option}={args[option]!r} can't be used: it {allowed}; remove it "
                f"(the port is kvtrial_port, the model vllm's and the model role's variables)."
            )
    env = {key: value for key, value in {**host.engine_env, **arm.env}.items() if value is not None}
    refuse_secrets(name, args, env)
    args.pop("host", None)
    env["VLLM_HOST_IP"] = LOOPBACK
    if host.state_dir:
        # One cache for all arms and runs: what vLLM finds out about a model costs eight seconds of every start.
        env.setdefault("VLLM_CACHE_ROOT", f"{host.state_dir}/cache/vllm")
    config = args.get(TRANSFER)
    return Launch(
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
