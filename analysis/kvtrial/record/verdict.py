"""Schema of a verdict: what the records of a campaign mean."""

from typing import Literal

from msgspec import Struct

from kvtrial.record.ladder import LadderResult, TookBy
from kvtrial.record.protocol import EffectScale, Role
from kvtrial.record.record import Evidence

Word = Literal["BETTER", "WORSE", "EQUIVALENT", "INCONCLUSIVE", "INVALID"]
Quality = Literal["equal", "differs", "not_compared"]


class GateResult(Struct, frozen=True, omit_defaults=True):
    """A check of validity. `passed` None: can't be decided here, why is in `detail`; fails where required.

    Not `required`: what the gate judges is not planned for this engine version. `disturbed`: it can't be decided since
    a disturbance of the machine would look like the fault; then nothing is proven either way.
    """

    gate: str
    passed: bool | None
    detail: str
    required: bool = True
    disturbed: bool = False

    @property
    def holds(self) -> bool:
        """Whether it is satisfied: only `passed` True is, and what isn't required."""
        return self.passed is True or (self.passed is None and not self.required)

    @property
    def undecided(self) -> bool:
        """Whether it is required and can't be decided."""
        return self.passed is None and self.required


class ComparisonResult(Struct, frozen=True):
    """The effect of `arm` against `against` on one metric of one phase.

    `effect`, `ci_low`, `ci_high`, `mde`: on scale ratio, arm / against (0.2 = five times lower); on scale difference,
    arm − against in `unit`. `confidence` is the attained one. `delta_ttft_seconds` is the seed's formula, variant −
    control, median over pairs; only where the metric is a TTFT. `pair_effects`: one per pair, same scale.
    """

    arm: str
    against: str
    phase: str
    metric: str
    unit: str
    role: Role
    effect_scale: EffectScale
    effect: float | None
    ci_low: float | None
    ci_high: float | None
    confidence: float | None
    p_value: float | None
    pairs: int
    mde: float | None
    margin: float
    verdict: Word
    note: str
    delta_ttft_seconds: float | None
    moved: bool | None
    quality: Quality
    heterogeneity: dict[str, float] | None
    against_phase: str | None = None
    pair_effects: list[float] = []
    arm_values: list[float] = []
    against_values: list[float] = []


class RunCounts(Struct, frozen=True):
    """Runs of a host: planned (without spares), valid, dropped with their pair, and engine faults."""

    planned: int
    valid: int
    dropped: int
    engine_faults: int


class OddNote(Struct, frozen=True):
    """Why a host is called odd: its primary effect departs from the others' by `deviation` standard errors.

    `likely_causes`: in what it differs from most of the others, the likelier first; empty where nothing recorded does.
    """

    deviation: float
    p_value: float
    likely_causes: list[str]


class HostVerdict(Struct, frozen=True):
    """The verdict of one host. `odd` None: it is like the others, or they are too few to tell."""

    host: str
    verdict: Word
    reason: str
    gates: list[GateResult]
    runs: RunCounts
    comparisons: list[ComparisonResult]
    ladder: LadderResult | None = None
    odd: OddNote | None = None


class Recommendation(Struct, frozen=True):
    """What to do next, and the pins it rests on."""

    action: str
    reason: str
    pins: dict[str, str]


class SharePoint(Struct, frozen=True):
    """Mean TTFT at one share (0..1) of returning requests: arm − against, seconds, with its exact interval."""

    phase: str
    hit_share: float
    difference_seconds: float
    ci_low: float
    ci_high: float
    confidence: float


class FoundBreakEven(Struct, frozen=True):
    """The break-even share as measured: the zero of each pair's line through the differences of the shares' mean TTFT.

    `pays` says where: above `hit_share` (`above`), at every share measured (`every`), at none (`none`), or it was not
    found (`unknown`). `cost_seconds` is the line at share 0, `gain_seconds` its negative at share 1, both
    Hodges-Lehmann estimates over the pairs. `minus_computed` is this share minus the computed one, pair by pair.
    """

    pays: Literal["above", "every", "none", "unknown"]
    hit_share: float | None
    ci_low: float | None
    ci_high: float | None
    confidence: float | None
    pairs: int
    cost_seconds: float | None
    gain_seconds: float | None
    points: list[SharePoint]
    minus_computed: float | None
    minus_computed_low: float | None
    minus_computed_high: float | None
    note: str


class BreakEven(Struct, frozen=True):
    """The share of requests that must return to an evicted prefix for the tier to pay: cost / (gain + cost).

    It is computed from a return and a miss by themselves; `found` is the one measured by a sweep of shares, if any.
    `hit` is the phase whose returns were measured: a share holds for prefixes of that phase's length, `prefix_tokens`
    where all of them have one. It is of `arm` against `against`, which need not be the arms of the primary comparison.
    """

    hit_share: float | None
    ci_low: float | None
    ci_high: float | None
    confidence: float | None
    cost_seconds: float | None
    gain_seconds: float | None
    own_hit_share: float | None
    note: str
    found: FoundBreakEven | None = None
    hit: str = ""
    arm: str = ""
    against: str = ""
    prefix_tokens: int | None = None


class TimeBudget(Struct, frozen=True):
    """Where the campaign's time went, seconds. `other_share` is other / (starts + stops + phases + other)."""

    install_seconds: float | None
    engine_start_seconds: float
    engine_stop_seconds: float
    phases_seconds: float
    other_seconds: float
    total_seconds: float
    other_share: float


class TierRow(Struct, frozen=True):
    """One size of a CPU tier: RAM, what it gave back in the deciding phase, and its effect against no tier."""

    arm: str
    tier_bytes: int
    times_gpu_kv: float
    loaded_bytes_per_run: float
    effect: float | None
    ci_low: float | None
    ci_high: float | None
    verdict: Word


class TierBudget(Struct, frozen=True):
    """The smallest tier shown to pay as much as the largest, within the margin; None: no tier pays."""

    tiers: list[TierRow]
    budget_bytes: int | None
    advice: str


class Moved(Struct, frozen=True):
    """Whether waiting took what preemption gave, an arm against the control, above the onset; seconds per request.

    `given`: less time in stalls between tokens, by the client. `taken`: more time in the queue, by the engine, or,
    where `by` is not "queue", more time until the first token than alone, by the client. `net_*` is the interval of
    taken − given. `moved` None: too few pairs, or an arm that computes prompts in another way waits as much longer
    (`by` "queue_or_prompts").
    """

    arm: str
    against: str
    moved: bool | None
    given_seconds_per_request: float | None
    taken_seconds_per_request: float | None
    taken_low: float | None
    taken_high: float | None
    net_low: float | None
    net_high: float | None
    pairs: int
    note: str
    by: TookBy | None = None


class Verdict(Struct, frozen=True):
    """The answer of a campaign."""

    schema_version: str
    campaign: str
    protocol: str
    evidence: Evidence | None
    verdict: Word
    reason: str
    comparisons: list[ComparisonResult]
    hosts: list[HostVerdict]
    gates: list[GateResult]
    recommendation: Recommendation
    break_even: BreakEven | None = None
    time_budget: TimeBudget | None = None
    ladder: LadderResult | None = None
    caveats: list[str] = []
    tier_budget: TierBudget | None = None
