"""What a history says, as types. `kvtrial history --json` prints a History."""

from typing import Literal

from msgspec import Struct

from kvtrial.record.protocol import EffectScale, Role
from kvtrial.record.verdict import Word

Kind = Literal["control", "effect", "noise"]
"""control: the level of the control itself. effect: arm against control. noise: control against control (A/A)."""
Unit = Literal["night", "size"]
"""night: tested, nights being independent. size: few nights, shown by its size."""
ALL_HOSTS = "all"
"""The fleet as a series of its own; Ansible reserves the name, so no host bears it."""


class ChangePoint(Struct, frozen=True):
    """From `night` on, a series lies elsewhere than before; `before_night` is the last night before.

    `kind` control: from_value and to_value are the control's level in `unit` (geometric mean over runs), `arm` is the
    control. effect: they are the effect of `arm` against `against` (a ratio, or a difference in `unit`). `ratio` is
    to / from, None on scale difference. `p_value` is adjusted for the choice of the night, not for the number of
    series: for that the false discovery rate stands. `evidence`: a test by nights, or of few nights the size.
    `worse`: by the metric's direction. `alarm`: worse, beyond the margin, and first found among the newest nights;
    `is_new`: nobody was told of it yet.
    `pins_changed`: name → [before, that night]. `noise_sd`: of one A/A pair there (log), None where none was run.
    """

    host: str
    protocol: str
    night: str
    before_night: str
    kind: Kind
    arm: str
    against: str
    phase: str
    against_phase: str
    metric: str
    unit: str
    scale: EffectScale
    from_value: float
    to_value: float
    ratio: float | None
    margin: float
    p_value: float
    evidence: Unit
    nights_before: int
    nights_after: int
    worse: bool
    beyond_margin: bool
    alarm: bool
    pins_changed: dict[str, list[str]]
    noise_sd: float | None
    sentence: str
    is_new: bool = False


class Point(Struct, frozen=True):
    """One night of a series: its level over `runs`, and the 95 % interval of their mean (t), None from fewer than two.

    Of the fleet the level is a median over `runs` hosts, without an interval.
    """

    night: str
    value: float
    low: float | None
    high: float | None
    runs: int


class Series(Struct, frozen=True):
    """One comparison, or the control's own level, night after night, oldest first; values as in ChangePoint."""

    host: str
    protocol: str
    kind: Kind
    arm: str
    against: str
    phase: str
    against_phase: str
    metric: str
    unit: str
    scale: EffectScale
    role: Role
    margin: float
    points: list[Point]

    def holds(self, change: ChangePoint) -> bool:
        """Whether the change is one of this series."""
        return all(getattr(self, name) == getattr(change, name) for name in SAME)


SAME = ("host", "protocol", "kind", "arm", "against", "phase", "against_phase", "metric")


class ToldAlarm(Struct, frozen=True):
    """A change for the worse that was told: its series (the values of SAME), its night, the store's newest night then.

    `from_value`, `to_value`: its levels, as in ChangePoint; None: kept by an earlier release. `over`: the series came
    back since.
    """

    series: list[str]
    night: str
    found: str
    from_value: float | None = None
    to_value: float | None = None
    over: bool = False


class NoiseFloor(Struct, frozen=True):
    """How far two servers of one configuration lie apart on a host: the SD of an A/A pair's log ratio, over nights."""

    host: str
    protocol: str
    phase: str
    metric: str
    sd: float
    pairs: int
    nights: int


class FewNights(Struct, frozen=True):
    """Of nights too few for a test: from which rise on tonight would be told by its size, as a share of the level.

    `in_half`: in half of the `told` series; `in_all`: in all of them. None where nothing is told. `untold`: series of
    too few nights, or in a unit, of which nothing is told yet.
    """

    nights: int
    told: int
    untold: int
    in_half: float | None
    in_all: float | None


class PooledNights(Struct, frozen=True):
    """The primary comparison over the nights of one trial, by the rule that the protocol declares.

    `look` of `looks`; the interval's `confidence` is 1 − the level of that look, each night is one value. `decided_at`:
    the night at which the verdict was first not INCONCLUSIVE: it stands, and later nights of the trial are not counted.
    `note` names settings that changed within the trial.
    """

    host: str
    protocol: str
    arm: str
    against: str
    phase: str
    metric: str
    scale: EffectScale
    nights: list[str]
    look: int
    looks: int
    spending: str
    alpha: float
    effect: float | None
    ci_low: float | None
    ci_high: float | None
    confidence: float
    pairs: int
    margin: float
    verdict: Word
    decided_at: str | None
    note: str


class History(Struct, frozen=True):
    """All that a store says. `series`: how many were tested for changes.

    `invalid_nights`: protocol → host → the nights that were INVALID there and are left out. `few_nights`: None from
    eight on. `shown`: with its points every series that decides (the primary effect), and every one that changed.
    `came_back`: alarms that were told, whose series is back where it was.
    """

    schema_version: str
    nights: list[str]
    hosts: list[str]
    protocols: list[str]
    series: int
    false_discovery_rate: float
    changes: list[ChangePoint]
    noise: list[NoiseFloor]
    pooled: list[PooledNights]
    engine: Literal["pandas", "duckdb"]
    invalid_nights: dict[str, dict[str, list[str]]] = {}
    few_nights: FewNights | None = None
    shown: list[Series] = []
    came_back: list[ToldAlarm] = []

    @property
    def alarms(self) -> list[ChangePoint]:
        """Changes for the worse that were found lately."""
        return [change for change in self.changes if change.alarm]

    @property
    def new_alarms(self) -> list[ChangePoint]:
        """Those of them that nobody was told of yet."""
        return [change for change in self.alarms if change.is_new]


class Row(Struct, frozen=True):
    """One value of one campaign in the store, on the inner scale (log for ratios), with what the night ran on.

    `role` of the comparison it comes from. `settings`: JSON, name → value. `rule`: JSON of the protocol's `nights`,
    empty where it declares none. `word`: the host's verdict that night.
    """

    campaign: str
    protocol: str
    host: str
    night: str
    started_at_utc: str
    kind: Kind
    arm: str
    against: str
    phase: str
    against_phase: str
    metric: str
    unit: str
    better: str
    role: Role
    scale: EffectScale
    margin: float
    pair: int
    value: float
    word: Word
    evidence: str
    settings: str
    rule: str
