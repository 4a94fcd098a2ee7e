"""Schema of a protocol: the declared experiment, one YAML file.

A protocol says which arms are compared, what is sent in which phase, how many pairs, which metric decides and which
gates must hold. It knows no host: sizes are named (`$targets`) and given as defaults here, by the inventory or by the
command line.

Fields that came after the first release are UNSET where a protocol doesn't give them and are then left out of a plan,
so that a plan made before keeps its bytes and its hash.
"""

from typing import Any, Generic, Literal, TypeVar

from msgspec import UNSET, Struct, UnsetType, field

MayDiffer = Literal["prompt", "output_length", "answer"]
Role = Literal["primary", "guard", "secondary"]
EffectScale = Literal["ratio", "difference"]
Spending = Literal["obrien_fleming", "pocock"]
Size = int | str
"""An integer, or "$name" of an entry of `sizes`."""
Number = int | float | str
"""A number, or "$name" of an entry of `sizes`."""
T = TypeVar("T")


class Fixed(Struct, Generic[T], frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="fixed"):
    """Always the same value."""

    value: T


class Uniform(Struct, Generic[T], frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="uniform"):
    """Every value from `least` to `most`, both included, equally often."""

    least: T
    most: T


class LogNormal(Struct, Generic[T], frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="lognormal"):
    """Values whose logarithm is normal around log(`median`) with deviation `sigma`, cut off at `least` and `most`."""

    median: T
    sigma: float
    least: T
    most: T


class Choice(Struct, Generic[T], frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="choice"):
    """One of `values`, with `weights` (any positive numbers; without them all equally often)."""

    values: list[T]
    weights: list[float] = []


Distribution = Fixed[T] | Uniform[T] | LogNormal[T] | Choice[T]


CostUnit = Literal["GiB of KV cache", "GiB of RAM", "sequence", "token of answer", "token of prompt", "replica", "GPU"]


class Cost(Struct, frozen=True, forbid_unknown_fields=True):
    """What an arm takes more of than the control, so that its effect can be said per unit. `amount`: see Number."""

    unit: CostUnit
    amount: Number | None = None


class Requires(Struct, frozen=True, forbid_unknown_fields=True):
    """What a host must have for an arm; where it lacks it the arm is refused with `why`. `since_vllm`: see Phase."""

    why: str
    backend: Literal["cpu", "cuda"] | None = None
    gpus: int = 0
    since_vllm: str | None = None


class PercentOf(Struct, frozen=True, forbid_unknown_fields=True):
    """A size of an arm's own in percent of one of the protocol's, as the host has that; rounded up."""

    percent: int
    of: str


class Arm(Struct, frozen=True, forbid_unknown_fields=True):
    """One engine configuration. `args` and `env` are what it changes in the engine's common launch.

    `args` maps long options of `vllm serve` (without dashes in front) to values: true gives a flag, null removes the
    option, a mapping is passed as JSON. `env` maps names to values; null takes out the host's variable. `sizes` are
    this arm's own, for an arm that changes the work and not the engine: such an arm declares what may differ, or its
    requests are to come out as the control's. `costs` says what the change takes, in its own unit. `model`: the arm
    serves the host's smaller model in place of the usual one. `replicas`: so many engines of this launch, each on a
    port and GPUs of its own, among which the load client splits the requests.
    """

    title: str
    args: dict[str, Any] = {}
    env: dict[str, str | None] = {}
    may_differ: list[MayDiffer] = []
    sizes: dict[str, int | PercentOf] | UnsetType = UNSET
    requires: Requires | UnsetType = UNSET
    costs: Cost | UnsetType = UNSET
    model: Literal["smaller"] | UnsetType = UNSET
    replicas: int | UnsetType = UNSET


class PromptSet(Struct, frozen=True, forbid_unknown_fields=True):
    """`count` random prompts of `tokens` tokens each, of which the last `suffix_tokens` are the same in all of them."""

    count: Size
    tokens: Size
    suffix_tokens: Size = 0


class Mix(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="mix"):
    """Prompts that were sent before among new ones, evenly interleaved.

    round(`hit_share_percent` / 100 × `requests`) requests go to the first prompts of the set `returning`, in its order
    and each once; the others to those of the set `fresh`. A phase before it has to send `returning` in the same salt.
    """

    returning: str
    fresh: str
    hit_share_percent: Size
    requests: Size


class Lengths(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="lengths"):
    """Prompts of random token ids with input and output lengths drawn from distributions, by the plan's seed.

    The first `shared_prefix_tokens` are the same in all. Every host, pair and arm gets the same lengths.
    """

    requests: Size
    prompt_tokens: Size | Distribution[Size]
    output_tokens: Size | Distribution[Size]
    shared_prefix_tokens: Size = 0


class Conversations(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="conversations"):
    """Conversations of several turns. The answers in them are scripted, so that both arms get the same prompts.

    A turn's prompt is the shared beginning, all earlier questions and scripted answers, and its own question; the
    engine is asked for as many tokens as the scripted answer has, but what it says is not sent back to it. A turn is
    sent `pause_seconds` after the one before it has ended.
    """

    conversations: Size
    turns: Size | Distribution[Size]
    question_tokens: Size | Distribution[Size]
    answer_tokens: Size | Distribution[Size]
    pause_seconds: Number | Distribution[Number] = 0
    shared_prefix_tokens: Size = 0


class FromAnswer(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="from_answer"):
    """As many tokens as the recorded answer has characters / `characters_per_token`, rounded up, within the bounds."""

    least: Size
    most: Size
    characters_per_token: float = 4.0


class Trace(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="trace"):
    """Recorded requests: a file of JSON lines, or ShareGPT-shaped JSON. README.md has the format.

    `file` is relative to where the user stands; kvtrial_trace takes its place. `requests`: the first n of them, 0 is
    all. `max_tokens`: of requests that the file gives none. `characters_per_token` sizes text prompts beforehand.
    """

    file: str | None = None
    requests: Size = 0
    max_tokens: Size | FromAnswer | None = None
    characters_per_token: float = 4.0


Workload = Mix | Lengths | Conversations | Trace


class Closed(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="closed"):
    """The phase's `concurrency` requests in flight; the next is sent when one has ended."""


class Constant(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="constant"):
    """Requests at equal distances, whatever the engine does. One of the two rates."""

    rate_per_second: Number | None = None
    rate_per_minute: Number | None = None


class Poisson(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="poisson"):
    """Requests at exponentially distributed distances, by the plan's seed. One of the two rates."""

    rate_per_second: Number | None = None
    rate_per_minute: Number | None = None


class Recorded(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="recorded"):
    """Requests at the times of the trace, `speed` times as fast."""

    speed: Number = 1


Arrivals = Closed | Constant | Poisson | Recorded


class Phase(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A measured window: which prompts, in which salt, how. Exactly one of `prompts` (a set) and `workload`.

    `take`: all prompts of the set (0), the first n (n > 0) or the last |n| (n < 0). `salt` names the cache salt:
    phases with the same name share cached blocks, and nothing else does. `max_tokens` is given with `prompts` and for a
    workload of kind mix; the other workloads have their own. `stop_after`: answers end after so many tokens, below the
    limit that was asked for. `reset`: the engine's caches are emptied before the phase. A list of concurrencies stands
    for one phase of each, named NAME_1, NAME_4, … with salts SALT_1, SALT_4, …; none is left in a loaded protocol.
    """

    name: str
    block: str
    prompts: str | UnsetType = UNSET
    workload: str | UnsetType = UNSET
    salt: str
    max_tokens: Size | UnsetType = UNSET
    take: Size = 0
    repeat: int = 1
    concurrency: Size | list[int] = 1
    arrivals: Arrivals | UnsetType = UNSET
    kv_transfer_params: dict[str, int] | None = None
    since_vllm: str | None = None
    stop_after: Size | UnsetType = UNSET
    reset: bool | UnsetType = UNSET


class Comparison(Struct, frozen=True, forbid_unknown_fields=True):
    """Arm against arm on one metric of one phase. `against_phase` compares two phases (of one arm, or across arms).

    `margin`: relative for scale ratio (0.05 is 5 %), in the metric's unit for scale difference.
    """

    arm: str
    against: str
    phase: str
    metric: str
    role: Role
    effect_scale: EffectScale = "ratio"
    margin: float | str = 0.05
    against_phase: str | None = None


class Objective(Struct, frozen=True, forbid_unknown_fields=True):
    """What a level must keep to be of use. None: not asked for."""

    preemptions_per_1000_requests: float | None = None
    ttft_p95_seconds: float | None = None
    e2e_p95_seconds: float | None = None


class EachArm(Struct, frozen=True, forbid_unknown_fields=True):
    """A comparison that every arm of a ladder gets against the control; primary is that of the first arm alone."""

    phase: str
    metric: str
    role: Role
    effect_scale: EffectScale = "ratio"
    margin: float | str = 0.05


class Ladder(Struct, frozen=True, forbid_unknown_fields=True):
    """A ladder of concurrencies around the onset of preemption: which phase stands for it, and how it is judged.

    The phase is made into one for each level, PHASE_1, PHASE_2, …, in one salt, with the engine's caches emptied before
    each. `levels` UNSET: around the predicted onset, by host. Comparisons may name two phases that stand for several:
    `ladder`, all levels, and `above_onset`, those from the predicted onset on; where nothing can be preempted the
    planner puts `queueing` in its place, the levels with more in flight than run at once, and queue time decides.
    `stall_multiple`: a gap between tokens above this multiple of the run's median is a stall.
    `watch_seconds`: the interval at which running, waiting, KV use and preemptions are read during a level.
    """

    phase: str
    each_arm: list[EachArm]
    default_arms: list[str]
    objectives: dict[str, Objective]
    levels: list[int] | UnsetType = UNSET
    stall_multiple: float = 20.0
    watch_seconds: float = 0.25


class Nights(Struct, frozen=True, forbid_unknown_fields=True):
    """The rule by which nights are pooled, declared before the first: `looks` nights are one trial, each one a look.

    All looks together err with `alpha`, two-sided; `spending` says how much of it each look may spend.
    """

    looks: int
    spending: Spending = "obrien_fleming"
    alpha: float = 0.05


class Faults(Struct, frozen=True, forbid_unknown_fields=True):
    """Fault policy: pairs dropped for a fault of the environment are repeated at the end, at most this many."""

    replacement_pairs: int = 2


class Protocol(Struct, frozen=True, forbid_unknown_fields=True):
    """The declared experiment. See playbooks/protocols/README.md for how to write one.

    `tiers`: sizes that are so many percent of the control's usable GPU KV cache, rounded up to whole chunks.
    `nights` UNSET: nights are shown side by side and never pooled.
    """

    schema_version: str
    name: str
    title: str
    question: str
    arms: dict[str, Arm]
    control: str
    sizes: dict[str, int]
    prompt_sets: dict[str, PromptSet]
    phases: list[Phase]
    comparisons: list[Comparison]
    gates: dict[str, dict[str, Any]]
    pairs: dict[str, int] = field(default_factory=lambda: {"cpu": 6, "gpu": 8})
    alternate_blocks: list[str] = []
    faults: Faults = Faults()
    break_even: dict[str, str] = {}
    extends: str | None = None
    workloads: dict[str, Workload] | UnsetType = UNSET
    ladder: Ladder | UnsetType = UNSET
    tiers: dict[str, int] | UnsetType = UNSET
    nights: Nights | UnsetType = UNSET
