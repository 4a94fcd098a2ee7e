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


class Arm(Struct, frozen=True, forbid_unknown_fields=True):
    """One engine configuration. `args` and `env` are what it changes in the engine's common launch.

    `args` maps long options of `vllm serve` (without dashes in front) to values: true gives a flag, null removes the
    option, a mapping is passed as JSON.
    """

    title: str
    args: dict[str, Any] = {}
    env: dict[str, str] = {}
    may_differ: list[MayDiffer] = []


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
    workload of kind mix; the other workloads have their own. A list of concurrencies stands for one phase of each,
    named NAME_1, NAME_4, … with salts SALT_1, SALT_4, …; none is left in a loaded protocol.
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


class Faults(Struct, frozen=True, forbid_unknown_fields=True):
    """Fault policy: pairs dropped for a fault of the environment are repeated at the end, at most this many."""

    replacement_pairs: int = 2


class Protocol(Struct, frozen=True, forbid_unknown_fields=True):
    """The declared experiment. See playbooks/protocols/README.md for how to write one."""

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
