"""What the inventory and the command line give: a request, and each host's settings and facts, checked on entry."""

from typing import Any, Literal

import msgspec
from msgspec import Struct

from kvtrial.record.errors import UnusableInput
from kvtrial.record.plan import Backend, IfControllerGone, Model


class ModelInput(Struct, frozen=True, forbid_unknown_fields=True):
    """The model as the inventory names it; token ids of prompts are drawn from [low_token_id, high_token_id]."""

    name: str
    path: str
    revision: str
    kv_bytes_per_token: int
    weights: Literal["random", "trained"] = "trained"
    low_token_id: int = 100
    high_token_id: int = 10000


class HostInput(Struct, frozen=True, forbid_unknown_fields=True):
    """One host: consent, engine settings, and facts read from it (empty while no host was touched)."""

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
    sizes: dict[str, Any] = {}
    state_dir: str = ""
    ram_reserve_bytes: int | None = None
    limits: dict[str, float] = {}
    if_controller_gone: IfControllerGone = "continue"
    facts: dict[str, Any] = {}


class Request(Struct, frozen=True, forbid_unknown_fields=True):
    """What the user asked for. `project`: commit and dirty of the checkout that runs it."""

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


def read_request(raw: dict[str, Any]) -> Request:
    """Check a request's types. Raises UnusableInput naming the field, what it must be and where to set it."""
    try:
        request = msgspec.convert(raw, type=Request, strict=False)
    except msgspec.ValidationError as error:
        raise UnusableInput(f"an inventory or command line setting can't be used: {error}; mend it.") from None
    if request.own_hit_share is not None and not 0 <= request.own_hit_share <= 1:
        raise UnusableInput(f"own_hit_share={request.own_hit_share} must be a share from 0 to 1, such as 0.3 for 30 %.")
    if not request.hosts:
        raise UnusableInput("no host is left to run on; name at least one in the inventory, or widen --limit.")
    return request


def model_of(model: ModelInput) -> Model:
    """The plan's form of a model."""
    return Model(
        name=model.name,
        path=model.path,
        revision=model.revision,
        weights=model.weights,
        kv_bytes_per_token=model.kv_bytes_per_token,
    )
