"""What the inventory and the command line give: a request, and each host's settings and facts, checked on entry."""

import re
from datetime import date
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct

from kvtrial.analysis.objectives import refuse_objectives
from kvtrial.analysis.prices import Prices, refuse_prices
from kvtrial.record.cpulist import cpu_list
from kvtrial.record.errors import UnusableInput
from kvtrial.record.plan import Backend, IfControllerGone, Model, Supervisor
from kvtrial.record.protocol import Objective

T = TypeVar("T")


MOST_ARRIVALS_PER_MINUTE = 6_000_000
CHOSEN_SIZES = ("hit_share_percent", "arrivals_per_minute")
"""Sizes of offload_mix that a command line sets by a variable of their own."""


class ModelInput(Struct, frozen=True, forbid_unknown_fields=True):
    """The model as the inventory names it; token ids of prompts are drawn from [low_token_id, high_token_id]."""

    name: str
    path: str
    revision: str
    kv_bytes_per_token: int
    weights: Literal["random", "trained"] = "trained"
    low_token_id: int = 100
    high_token_id: int = 10000
    manifest: str = ""


class HostInput(Struct, frozen=True, forbid_unknown_fields=True):
    """One host: consent, engine settings, and facts read from it (empty while no host was touched).

    `connector_extra_keys`: keys that an out-of-tree spec of the user's reads in the connector's extra configuration.
    `smaller_model`: what an arm serves that asks for it; its name and its range of token ids count for nothing, since
    all arms are sent the same. `visited_every_seconds`: the longest pause between two sweeps of the controller, and the
    time that a sweep over so many hosts takes.
    """

    may_be_disturbed: bool
    backend: Backend
    vllm_version: str
    vllm_venv: str
    model: ModelInput
    connection: str = "ssh"
    port: int = 8000
    engine_args: dict[str, Any] = {}
    engine_env: dict[str, str] = {}
    connector_extra_config: dict[str, Any] = {}
    connector_extra_keys: list[str] = []
    sizes: dict[str, Any] = {}
    state_dir: str = ""
    ram_reserve_bytes: int | None = None
    limits: dict[str, float] = {}
    if_controller_gone: IfControllerGone = "continue"
    visited_every_seconds: float = 60.0
    client_cpus: str = "auto"
    supervisor: Supervisor = "process"
    facts: dict[str, Any] = {}
    smaller_model: ModelInput | None = None


class Request(Struct, frozen=True, forbid_unknown_fields=True):
    """What the user asked for. `project`: commit and dirty of the checkout that runs it.

    `trace`: the file of requests to replay, relative to `working_dir`, where the user stands. `ladder`, `objectives`
    and `prices` are for protocols with a ladder: its levels, objectives by name beside or over the protocol's,
    and what the user pays. `command`: what was typed, without secrets. `night`: the date of the night that the campaign
    is of, YYYY-MM-DD where the controller is; empty for one that is of none.
    """

    protocol: str
    protocols_dir: str
    results_dir: str
    hosts: dict[str, HostInput]
    seed: int = 1
    pairs: int | None = None
    arms: list[str] | None = None
    new_campaign: bool = False
    dry_run: bool = False
    project: dict[str, Any] = {}
    own_hit_share: float | None = None
    install_seconds: float | None = None
    hit_share_percent: int | None = None
    arrivals_per_minute: int | None = None
    trace: str | None = None
    working_dir: str = ""
    ladder: list[int] | None = None
    objectives: dict[str, Objective] = {}
    prices: Prices | None = None
    command: list[str] = []
    night: str = ""


def read_request(raw: dict[str, Any]) -> Request:
    """Check a request's types. Raises UnusableInput naming the value, what it must be and where to set it."""
    hosts = {name: _converted(host, HostInput, f"host {name}: ") for name, host in raw.get("hosts", {}).items()}
    request = msgspec.structs.replace(_converted({**raw, "hosts": {}}, Request, ""), hosts=hosts)
    if request.own_hit_share is not None and not 0 <= request.own_hit_share <= 1:
        raise UnusableInput(
            f"kvtrial_own_hit_share={request.own_hit_share} must be a share from 0 to 1, such as 0.3 for 30 %."
        )
    if request.night:
        _refuse_night(request.night)
    if request.prices is not None:
        refuse_prices(request.prices)
    refuse_objectives(request.objectives, "kvtrial_objectives")
    if request.ladder == []:
        raise UnusableInput(
            "kvtrial_ladder is empty; give levels, as -e '{\"kvtrial_ladder\": [1, 2, 3, 4, 5, 6]}', or leave it out "
            "for those around the predicted onset."
        )
    for name, host in hosts.items():
        _refuse_host_name(name)
        low, high = host.model.low_token_id, host.model.high_token_id
        if not 0 <= low <= high:
            raise UnusableInput(
                f"host {name}: prompts can't be drawn from token ids {low} to {high} (low_token_id, high_token_id); "
                f"give 0 or more, and the lower one first."
            )
        if host.smaller_model is not None and host.smaller_model.kv_bytes_per_token < 1:
            raise UnusableInput(
                f"host {name}: kvtrial_smaller_model lacks kv_bytes_per_token, so nobody can say how many blocks its "
                f"KV cache has; give the bytes of KV cache that a token takes."
            )
        if not 1 <= host.port <= 65535:
            raise UnusableInput(f"host {name}: kvtrial_port={host.port} is no port; give one from 1 to 65535.")
        _refuse_client_cpus(name, host.client_cpus)
        if host.ram_reserve_bytes is not None and host.ram_reserve_bytes < 0:
            raise UnusableInput(
                f"host {name}: kvtrial_ram_reserve_bytes={host.ram_reserve_bytes} is negative; give the bytes of RAM "
                f"that must stay free, or nothing for the larger of 8 GiB and a tenth."
            )
    if request.hit_share_percent is not None and not 0 <= request.hit_share_percent <= 100:
        raise UnusableInput(
            f"kvtrial_hit_share_percent={request.hit_share_percent} is no share; give a whole number from 0 to 100, or "
            f"nothing to sweep the share."
        )
    rate = request.arrivals_per_minute
    if rate is not None and not 1 <= rate <= MOST_ARRIVALS_PER_MINUTE:
        raise UnusableInput(
            f"kvtrial_arrivals_per_minute={rate} is no rate; give a whole number from 1 to {MOST_ARRIVALS_PER_MINUTE}, "
            f"or nothing for the protocol's own."
        )
    request = _with_chosen_sizes(request)
    if not request.hosts:
        raise UnusableInput("no host is left to run on; name at least one in the inventory, or widen --limit.")
    return request


def _refuse_night(night: str) -> None:
    """Raise UnusableInput unless it is a date."""
    try:
        if date.fromisoformat(night).isoformat() == night:
            return
    except ValueError:
        pass
    raise UnusableInput(f"kvtrial_night={night} is no date; give the night's, as 2026-11-14.")


def _with_chosen_sizes(request: Request) -> Request:
    """The request with the sizes that have a variable of their own set on every host, above the inventory's."""
    chosen = {name: size for name in CHOSEN_SIZES if (size := getattr(request, name)) is not None}
    hosts = {
        name: msgspec.structs.replace(host, sizes={**host.sizes, **chosen}) for name, host in request.hosts.items()
    }
    return msgspec.structs.replace(request, hosts=hosts)


def _refuse_client_cpus(name: str, asked: str) -> None:
    """Raise UnusableInput for a `client_cpus` that is neither auto, none nor a list of CPUs."""
    if asked in ("auto", "none"):
        return
    try:
        found = cpu_list(asked)
    except ValueError as error:
        raise UnusableInput(
            f"host {name}: kvtrial_client_cpus={asked!r} can't be used: {error}; give auto, none or CPUs, as 14-15."
        ) from None
    if not found:
        raise UnusableInput(f"host {name}: kvtrial_client_cpus is empty; give auto, none, or CPUs such as 14-15.")


def _refuse_host_name(name: str) -> None:
    """Raise UnusableInput for a host name that can't be the name of a folder."""
    if not name or name.startswith(".") or "/" in name or "\0" in name:
        raise UnusableInput(
            f"host name {name!r} can't be used: it becomes the name of a folder, so it must not be empty, start with "
            f"a dot or hold a slash or NUL; rename it in the inventory and keep the address in ansible_host."
        )


_STEP = re.compile(r"\.(?P<field>[^.\[]+)|\[(?P<index>\d+|\.\.\.)\]")
_EXPECTED = re.compile(r"Expected `([^`]+)`, got")
_WORDS = {"float": "a number", "int": "a whole number", "bool": "true or false", "str": "a text", "object": "a mapping",
          "array": "a list", "null": "nothing"}  # fmt: skip
"""What msgspec calls types, in a user's words."""
_VARIABLES = {"may_be_disturbed": "host_may_be_disturbed"}


def _converted(raw: Any, shape: type[T], where: str) -> T:
    """`raw` as a struct, or UnusableInput that names the setting, its value and what it must be."""
    try:
        return msgspec.convert(raw, type=shape, strict=False)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        steps = [found["field"] or found["index"] for found in _STEP.finditer(path.rstrip("`"))]
        keys, value = _offending(raw, steps, str(error), shape)
        setting = ".".join(keys) or "the request"
        shown = "" if isinstance(value, dict | list) or not keys else f"={value!r}"
        # What stands in a mapping of the user's own keys is set by the mapping's variable.
        named = steps[: steps.index("...")] if "..." in steps else keys
        if steps[:1] == ["prices"]:
            named = steps[:1]
        variable = "_".join(_VARIABLES.get(name, name) for name in named if not name.isdigit())
        mend = f"the variable kvtrial_{variable}" if variable else "it"
        if allowed := _allowed(shape, steps):
            problem = f"allowed are {', '.join(allowed)}"
        elif "unknown field" in problem and steps[:1] == ["objectives"]:
            problem = f"{problem}; known are {', '.join(Objective.__struct_fields__)}"
        elif " field " in problem and steps[:1] == ["prices"]:
            problem = f"{problem}; give currency and at least one of gpu_hour, ram_gib_hour and replica_hour"
        elif expected := _EXPECTED.match(problem):
            words = expected[1].split(" | ")
            problem = f"it must be {' or '.join(_WORDS.get(word, word) for word in words)}"
            if isinstance(value, str) and {"array", "object"} & set(words):
                problem += f", which name=value can't give; write -e '{{\"kvtrial_{variable}\": …}}'"
        raise UnusableInput(
            f"{where}{setting}{shown} can't be used: {problem}; mend {mend} in the inventory or on the command line."
        ) from None


def _allowed(shape: Any, steps: list[str]) -> list[str]:
    """The words that the setting at `steps` may be; empty where it isn't one of a few words."""
    for step in steps:
        shape = get_type_hints(shape).get(step) if isinstance(shape, type) and issubclass(shape, Struct) else None
    return [str(word) for word in get_args(shape)] if get_origin(shape) is Literal else []


def _offending(raw: Any, steps: list[str], message: str, shape: Any) -> tuple[list[str], Any]:
    """The keys that lead to the value msgspec complains of, and the value.

    msgspec writes `[...]` for any key of a mapping; the key is the one with which alone it complains the same.
    """
    if "..." not in steps:
        return steps, _at(raw, steps)
    at = steps.index("...")
    mapping = _at(raw, steps[:at])
    for key in mapping if isinstance(mapping, dict) else ():
        alone = _with(raw, steps[:at], {key: mapping[key]})
        try:
            msgspec.convert(alone, type=shape, strict=False)
        except msgspec.ValidationError as error:
            if str(error) == message:
                rest, value = steps[at + 1 :], mapping[key]
                return [*steps[:at], str(key), *(step for step in rest if step != "...")], _at(value, rest)
    return steps[:at], mapping


def _at(raw: Any, steps: list[str]) -> Any:
    for step in steps:
        if isinstance(raw, list) and step.isdigit() and int(step) < len(raw):
            raw = raw[int(step)]
        else:
            raw = raw.get(step) if isinstance(raw, dict) else None
    return raw


def _with(raw: Any, steps: list[str], value: Any) -> Any:
    """A copy of `raw` with what stands at `steps` replaced."""
    if not steps:
        return value
    return {**raw, steps[0]: _with(raw[steps[0]], steps[1:], value)}


def model_of(model: ModelInput) -> Model:
    """The plan's form of a model."""
    return Model(
        name=model.name,
        path=model.path,
        revision=model.revision,
        weights=model.weights,
        kv_bytes_per_token=model.kv_bytes_per_token,
        manifest=model.manifest,
    )
