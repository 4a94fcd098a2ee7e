"""Schema of a plan: what will be done, fixed before anything is started. Same inputs, same bytes."""

import hashlib
from typing import Literal

import msgspec
from msgspec import Struct

from kvtrial.record.protocol import Protocol

IfControllerGone = Literal["continue", "stop"]
Backend = Literal["cpu", "cuda"]
Supervisor = Literal["process", "systemd"]


class Launch(Struct, frozen=True, forbid_unknown_fields=True):
    """The launch specification of one arm: the same argv and environment whatever supervisor starts it.

    `env` holds only what the arm sets; the supervisor adds it to a declared, minimal base environment.
    """

    arm: str
    argv: list[str]
    env: dict[str, str]
    port: int
    served_model_name: str
    connector: str | None


class PromptPlan(Struct, frozen=True, forbid_unknown_fields=True):
    """How to make a prompt set: `count` prompts of `tokens` token ids in [low_id, high_id], from `seed`."""

    name: str
    seed: str
    count: int
    tokens: int
    suffix_tokens: int
    low_id: int
    high_id: int


class PhasePlan(Struct, frozen=True, forbid_unknown_fields=True):
    """One phase of one run: send prompts `indices` of the set, in this order."""

    name: str
    block: str
    prompts: PromptPlan
    indices: list[int]
    salt: str
    max_tokens: int
    concurrency: int
    kv_transfer_params: dict[str, int] | None


class RunPlan(Struct, frozen=True, forbid_unknown_fields=True):
    """One engine lifetime. `spare` runs are used only in place of a pair dropped for a fault of the environment."""

    run: str
    pair: int
    position: int
    arm: str
    spare: bool
    phases: list[PhasePlan]


class Model(Struct, frozen=True, forbid_unknown_fields=True):
    """The model: served name, where it and its manifest lie on the host, revision, bytes of KV cache a token takes."""

    name: str
    path: str
    revision: str
    weights: Literal["random", "trained"]
    kv_bytes_per_token: int
    manifest: str = ""


class Limits(Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds the host program keeps by itself."""

    deadline_seconds: float
    start_timeout_seconds: float
    stop_timeout_seconds: float
    idle_timeout_seconds: float
    request_timeout_seconds: float
    deadlock_seconds: float
    max_pair_gap_seconds: float
    controller_gone_seconds: float
    ram_reserve_bytes: int
    engine_ram_bytes: int
    disk_reserve_bytes: int
    foreign_cpu_share_max: float


class Capacity(Struct, frozen=True, forbid_unknown_fields=True):
    """What the arms were planned to hold. `usable_gpu_blocks` counts without the reserved block."""

    block_tokens: int
    usable_gpu_blocks: int
    kv_bytes_per_token: int
    tier_bytes: dict[str, int]
    chunk_tokens: dict[str, int]


class HostPlan(Struct, frozen=True, forbid_unknown_fields=True):
    """One host's part of the plan; all that the host program needs."""

    schema_version: str
    protocol: str
    host: str
    seed: int
    backend: Backend
    vllm_version: str
    model: Model
    capacity: Capacity
    launches: dict[str, Launch]
    runs: list[RunPlan]
    replacement_pairs: int
    limits: Limits
    if_controller_gone: IfControllerGone
    supervisor: Supervisor = "process"


class Estimate(Struct, frozen=True, forbid_unknown_fields=True):
    """What the campaign is expected to take on one host. `mde_ratio` is the least detectable effect (80 % power)."""

    runs: int
    seconds: float
    ram_bytes: int
    pairs: int
    log_ratio_sd_assumed: float
    mde_ratio: float | None


class Plan(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole plan: the protocol as resolved, and a part for each host."""

    schema_version: str
    protocol: Protocol
    seed: int
    hosts: list[HostPlan]
    estimates: dict[str, Estimate]


def canonical_json(value: Struct) -> bytes:
    """The one byte form of a plan: sorted keys, no spaces. Its sha256 is the plan's hash."""
    return msgspec.json.encode(value, order="sorted")


def plan_sha256(value: Struct) -> str:
    """sha256 in hex of the canonical form of a Plan or HostPlan."""
    return hashlib.sha256(canonical_json(value)).hexdigest()
