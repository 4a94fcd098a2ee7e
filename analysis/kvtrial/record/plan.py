"""Schema of a plan: what will be done, fixed before anything is started. Same inputs, same bytes."""

import hashlib
from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kvtrial.record.protocol import Distribution, Protocol

IfControllerGone = Literal["continue", "stop"]
Backend = Literal["cpu", "cuda"]
Supervisor = Literal["process", "systemd"]


class Launch(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The launch specification of one arm: the same argv and environment whatever supervisor starts it.

    `env` holds only what the arm sets; the supervisor adds it to a declared, minimal base environment. `also`: further
    engines of an arm with several replicas, each with a port and GPUs of its own; the load is split among all of them.
    """

    arm: str
    argv: list[str]
    env: dict[str, str]
    port: int
    served_model_name: str
    connector: str | None
    also: list["Launch"] = []

    def engines(self) -> list["Launch"]:
        """Every engine of the arm, this one first."""
        return [self, *self.also]


class PromptPlan(Struct, frozen=True, forbid_unknown_fields=True):
    """How to make a prompt set: `count` prompts of `tokens` token ids in [low_id, high_id], from `seed`."""

    name: str
    seed: str
    count: int
    tokens: int
    suffix_tokens: int
    low_id: int
    high_id: int


class MixPlan(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="mix"):
    """`requests` requests, of which round(share × requests) go to the first prompts of `returning`, evenly spread."""

    returning: PromptPlan
    fresh: PromptPlan
    hit_share_percent: int
    requests: int
    seed: str


class LengthsPlan(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="lengths"):
    """`requests` prompts of drawn lengths. `shape_seed` gives lengths (the same in all pairs), `token_seed` the ids.

    A drawn prompt that would end at the edge of a block of `block_tokens` is a token longer: there the GPU cache
    recomputes one block and a tier does not.
    """

    name: str
    requests: int
    prompt_tokens: Distribution[int]
    output_tokens: Distribution[int]
    shared_prefix_tokens: int
    block_tokens: int
    shape_seed: str
    token_seed: str
    low_id: int
    high_id: int


class ConversationsPlan(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="conversations"):
    """`conversations` conversations of drawn turns with scripted answers; seeds as in LengthsPlan."""

    name: str
    conversations: int
    turns: Distribution[int]
    question_tokens: Distribution[int]
    answer_tokens: Distribution[int]
    pause_seconds: Distribution[float]
    shared_prefix_tokens: int
    shape_seed: str
    token_seed: str
    low_id: int
    high_id: int


class TracePlan(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="trace"):
    """Recorded requests: the first `requests` lines of `file`, beside the plan. `sha256` is that of its lines.

    `seconds` lie between the times of the first and the last line, None where a line has no time. Prompts that the
    trace gives by length alone are made of ids from `token_seed`.
    """

    name: str
    file: str
    sha256: str
    requests: int
    seconds: float | None
    characters_per_token: float
    token_seed: str
    low_id: int
    high_id: int


WorkloadPlan = MixPlan | LengthsPlan | ConversationsPlan | TracePlan


class ClosedPlan(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="closed"):
    """`concurrency` requests in flight."""

    concurrency: int


class ConstantPlan(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="constant"):
    """Request i at i / rate seconds."""

    rate_per_second: float


class PoissonPlan(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="poisson"):
    """Exponential distances of mean 1 / rate, from `seed`; the first request at 0."""

    rate_per_second: float
    seed: str


class RecordedPlan(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="recorded"):
    """The trace's times since its first line, divided by `speed`."""

    speed: float


ArrivalsPlan = ClosedPlan | ConstantPlan | PoissonPlan | RecordedPlan


class PhasePlan(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One phase of one run: prompts `indices` of the set `prompts`, in this order, or what `workload` yields.

    Exactly one of `prompts` and `workload` is given; with a workload other than mix `max_tokens` is 0 and each request
    has its own. `arrivals` None: `concurrency` requests in flight. Fields with a default are left out of the plan's
    bytes, so that older plans keep their hash.

    `stop_after` above 0: answers end after so many tokens, before their limit. `reset`: the engine's caches are emptied
    before the phase. `watch_seconds` above 0: running, waiting, KV use and preemptions are read at that interval.
    `stall_multiple` above 0: the phase gets a ledger, a gap above this multiple of the run's median being a stall.
    """

    name: str
    block: str
    prompts: PromptPlan | None
    indices: list[int]
    salt: str
    max_tokens: int
    concurrency: int
    kv_transfer_params: dict[str, int] | None
    workload: WorkloadPlan | None = None
    arrivals: ArrivalsPlan | None = None
    stop_after: int = 0
    reset: bool = False
    watch_seconds: float = 0.0
    stall_multiple: float = 0.0


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
    """Bounds the host program keeps by itself.

    `foreign_cpu_share_max` stands in plans of the first release and did nothing: the gate `undisturbed` judges that
    share. It is read so that these plans keep their bytes, and left out of new ones.
    """

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
    foreign_cpu_share_max: float | UnsetType = UNSET


RESERVED_BLOCKS = 1
"""Of the KV cache's blocks; the engine keeps it for padding."""


class Capacity(Struct, frozen=True, forbid_unknown_fields=True):
    """What the arms were planned to hold. `usable_gpu_blocks` counts without the reserved block."""

    block_tokens: int
    usable_gpu_blocks: int
    kv_bytes_per_token: int
    tier_bytes: dict[str, int]
    chunk_tokens: dict[str, int]


class OnsetPlan(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where preemption is predicted to begin, in requests in flight.

    `kind` exact: at `low` = `high`, `last_safe` + 1. range: up to `last_safe` any choice of the requests fits, at
    `high` at the latest every replay of their order has preempted, or, without `sure_end`, it may lie beyond. never:
    `low` and `high` are None, the mix can only queue, and up to `last_safe` nobody does.
    """

    kind: Literal["exact", "range", "never"]
    low: int | None
    high: int | None
    last_safe: int
    why: str
    sure_end: bool = True


class LadderPlan(Struct, frozen=True, forbid_unknown_fields=True):
    """The levels of a ladder of concurrencies, by phase in their order, and what is predicted for each arm.

    An arm of several engines has no prediction where that of one is a range. `usable_gpu_blocks` by arm, as planned: an
    arm whose engine sizes its KV cache itself has none.
    """

    levels: dict[str, int]
    onset: dict[str, OnsetPlan]
    usable_gpu_blocks: dict[str, int]


class HostPlan(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One host's part of the plan; all that the host program needs.

    `client_cpus`: where the load client runs: "auto" (CPUs that the engine cannot use, where there are any), "none"
    (anywhere), or a list such as "14-15" (there; every arm's engine is then started on the other CPUs). `arm_models`:
    of arms that serve another model than `model`, under its name.
    """

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
    client_cpus: str = "auto"
    ladder: LadderPlan | UnsetType = UNSET
    supervisor: Supervisor = "process"
    arm_models: dict[str, Model] = {}

    def model_of(self, arm: str) -> Model:
        """The model that an arm serves."""
        return self.arm_models.get(arm, self.model)


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


def files_of_traces(plan: HostPlan) -> dict[str, str]:
    """Files that a host needs beside its plan, and the sha256 of the lines of each."""
    workloads = (phase.workload for run in plan.runs for phase in run.phases)
    traces = {trace.file: trace.sha256 for trace in workloads if isinstance(trace, TracePlan)}
    return dict(sorted(traces.items()))


def canonical_json(value: Struct) -> bytes:
    """The one byte form of a plan: sorted keys, no spaces. Its sha256 is the plan's hash."""
    return msgspec.json.encode(value, order="sorted")


def plan_sha256(value: Struct) -> str:
    """sha256 in hex of the canonical form of a Plan or HostPlan."""
    return hashlib.sha256(canonical_json(value)).hexdigest()
