"""Schema of a protocol: the declared experiment, one YAML file.

A protocol says which arms are compared, what is sent in which phase, how many pairs, which metric decides and which
gates must hold. It knows no host: sizes are named (`$targets`) and given as defaults here, by the inventory or by the
command line.
"""

from typing import Any, Literal

from msgspec import Struct, field

MayDiffer = Literal["prompt", "output_length", "answer"]
Role = Literal["primary", "guard", "secondary"]
EffectScale = Literal["ratio", "difference"]
Size = int | str
"""An integer, or "$name" of an entry of `sizes`."""


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


class Phase(Struct, frozen=True, forbid_unknown_fields=True):
    """A measured window: which prompts, in which salt, how.

    `take`: all prompts of the set (0), the first n (n > 0) or the last |n| (n < 0). `salt` names the cache salt:
    phases with the same name share cached blocks, and nothing else does.
    """

    name: str
    block: str
    prompts: str
    salt: str
    max_tokens: Size
    take: Size = 0
    repeat: int = 1
    concurrency: Size = 1
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
