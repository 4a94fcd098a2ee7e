"""What the conditions of hazards are asked of: facts of a launch, of pages of /metrics, of a host.

Names without a dot and those in `option.`, `env.` and `extra.` come from the launch; `now.`, `before.`, `delta.` and
`derived.` from pages of /metrics, by the roles of `data/metrics.yml`; `host.` from the host.
"""

import ipaddress
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec

from kvtrial.record.launch import ParsedArgs, Started, Tier, async_scheduling, parse_vllm_args, tier_of
from kvtrial.record.predicates import Facts

Value = TypeVar("Value")
Backend = Literal["cpu", "cuda"]
DEFAULT_SPEC = "CPUOffloadingSpec"
_FINISHED = tuple(f"requests_finished_{how}" for how in ("stop", "length", "abort", "error", "repetition"))
_SPREAD = {"tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size"}


def launch_facts(
    launch: Started,
    version: str,
    backend: Backend | None = None,
    without_options: Mapping[str, str | bool] | None = None,
    without_env: Mapping[str, str] | None = None,
) -> Facts:
    """Facts of one launch. An option, variable or key that it does not hold is known to be absent.

    `backend` None: not known. `without_*`: settings that are taken as not given where they have that very value. Raises
    UnusableInput where the launch can't be read.
    """
    parsed = parse_vllm_args(launch.argv)
    parsed = msgspec.structs.replace(parsed, options=_left(parsed.options, without_options or {}))
    env = _left(launch.env, without_env or {})
    tier = tier_of(parsed, env, version)
    values: dict[str, Any] = {f"option.{name}": value for name, value in parsed.options.items()}
    values |= {f"env.{name}": value for name, value in env.items()}
    values |= {f"extra.{name}": value for name, value in (tier.extra if tier else {}).items()}
    values |= {
        "connector": tier.connector if tier else None,
        "stock_spec": stock_spec(tier) if tier else None,
        "tier_bytes": tier.cpu_bytes if tier else None,
        "both_interfaces": bool(tier and tier.by_shortcut and tier.by_json),
        "load_failure_policy": (parsed.kv_transfer or {}).get("kv_load_failure_policy"),
        "async_scheduling": async_scheduling(parsed, version),
        "loopback": _listens_on_loopback(parsed),
        "api_key": "api-key" in parsed.options or bool(env.get("VLLM_API_KEY")),
    }
    fixed = parsed.size("kv-cache-memory-bytes")
    # With --num-gpu-blocks-override the cache has as many blocks as asked for, whatever memory was set aside.
    if fixed is not None and not (_SPREAD | {"num-gpu-blocks-override"}) & parsed.options.keys():
        values["gpu_kv_bytes"] = fixed
    if backend is not None:
        values["backend"] = backend
    return Facts(values, frozenset({"option", "env", "extra"}))


class _Named(dict[str, str]):
    """Role → its name in a namespace; made once, since a fleet has thousands of pages of the same roles."""

    def __init__(self, namespace: str) -> None:
        super().__init__()
        self._namespace = namespace

    def __missing__(self, role: str) -> str:
        return self.setdefault(role, f"{self._namespace}.{role}")


_NOW, _BEFORE, _DELTA = _Named("now"), _Named("before"), _Named("delta")


def page_facts(
    after: Mapping[str, float | None], before: Mapping[str, float | None] | None = None, seconds: float | None = None
) -> Facts:
    """Facts of one page of /metrics, or of two, `seconds` apart: role -> value, None where it is not exported.

    The caller sees to it that both are of one process; what fell between them would be a negative difference.
    """
    values: dict[str, Any] = {_NOW[role]: value for role, value in after.items()}
    complete = {"now"}
    if before is not None:
        delta = {
            role: None if value is None or (was := before.get(role)) is None else value - was
            for role, value in after.items()
        }
        values |= {_BEFORE[role]: value for role, value in before.items()}
        values |= {_DELTA[role]: value for role, value in delta.items()}
        values |= {f"derived.{name}": value for name, value in _derived(delta).items()}
        complete |= {"before", "delta", "derived"}
    if seconds is not None:
        values["window_seconds"] = seconds
    return Facts(values, frozenset(complete))


def host_facts(facts: Mapping[str, Any]) -> Facts:
    """Facts of a host; those that are None were not read, and stay unknown."""
    return Facts({f"host.{name}": value for name, value in facts.items() if value is not None})


def stock_spec(tier: Tier) -> bool:
    """Whether a connector runs vLLM's own CPU spec."""
    return tier.extra.get("spec_name", DEFAULT_SPEC) == DEFAULT_SPEC and not tier.extra.get("spec_module_path")


def _left(given: Mapping[str, Value], without: Mapping[str, Value]) -> dict[str, Value]:
    return {name: value for name, value in given.items() if name not in without or without[name] != value}


def _derived(delta: Mapping[str, float | None]) -> dict[str, float | None]:
    """What follows from differences: requests finished in any way, first tokens of requests that never finished."""
    known = [value for role in _FINISHED if (value := delta.get(role)) is not None]
    finished = sum(known) if known else None
    asked, hit = delta.get("prefix_cache_queries_tokens"), delta.get("prefix_cache_hits_tokens")
    return {
        "requests_finished": finished,
        "requests_unfinished": _minus(delta.get("ttft_seconds_count"), finished),
        "local_hit_share": hit / asked if asked and hit is not None else None,
    }


def _minus(left: float | None, right: float | None) -> float | None:
    return None if left is None or right is None else left - right


def _listens_on_loopback(parsed: ParsedArgs) -> bool:
    address = parsed.text("host")
    if parsed.text("uds") or address == "localhost":
        return True
    try:
        return address is not None and ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return False
