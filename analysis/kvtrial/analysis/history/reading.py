"""From a store to what it says: series, change points with what changed that night, noise floors, pooled nights."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal, cast
from urllib.parse import quote

import msgspec
import numpy
import pandas
from scipy import special

from kvtrial.analysis.campaign import disk_errors_said
from kvtrial.analysis.drift import WORKLOAD, digest_of_workload
from kvtrial.analysis.drift import changes as setting_changes
from kvtrial.analysis.effect import Interval, decide, outward
from kvtrial.analysis.fleet import FALSE_DISCOVERY_RATE, LEAST_HOSTS
from kvtrial.analysis.history.arguments import NEWEST_NIGHTS
from kvtrial.analysis.history.changepoints import (
    LEAST_NIGHTS,
    NOISES_BY_SIZE,
    Nightly,
    Split,
    changed,
    told_from,
)
from kvtrial.analysis.history.model import (
    ALL_HOSTS,
    SAME,
    ChangePoint,
    FewNights,
    History,
    NoiseFloor,
    Point,
    PooledNights,
    Series,
)
from kvtrial.analysis.history.store import (
    SERIES,
    SettingsTexts,
    different_rows_with,
    engine_for,
    files_of,
    invalid_nights_of,
    nights_of,
    nothing_of,
    rows_with,
)
from kvtrial.analysis.history.told import BACK_NIGHTS, came_back, read_told, with_alarms
from kvtrial.analysis.metrics import find_metric
from kvtrial.analysis.spending import blocks, levels
from kvtrial.record.protocol import Nights
from kvtrial.record.version import SCHEMA_VERSION

NAMES = {
    "ttft_median_seconds": "TTFT", "ttft_mean_seconds": "mean TTFT", "ttft_p95_seconds": "p95 TTFT",
    "inter_token_median_seconds": "inter-token time", "inter_token_p95_seconds": "p95 inter-token time",
    "e2e_median_seconds": "time to the last token", "e2e_p95_seconds": "p95 time to the last token",
    "output_throughput_tokens_per_second": "throughput", "ram_used_peak_bytes": "peak RAM",
}  # fmt: skip
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_SMALLEST_VARIANCE = 1e-18
Key = tuple[str, ...]
Settings = Mapping[tuple[str, str], Mapping[str, dict[str, str]]]
"""(protocol, host) → night → what the host was that night."""
Floors = Mapping[tuple[str, str, str, str], float]
"""(protocol, host, phase, metric) → SD of an A/A pair's log ratio."""


@disk_errors_said()
def read(
    store: Path,
    host: str | None = None,
    protocol: str | None = None,
    newest_nights: int = NEWEST_NIGHTS,
    rate: float = FALSE_DISCOVERY_RATE,
    engine: Literal["pandas", "duckdb"] | None = None,
) -> History:
    """Everything a store says of these hosts and protocols; `engine` None: DuckDB where it is larger than memory likes.

    Tested for changes are primary comparisons and guards: effects, and the control's own levels. An alarm stands while
    the night on which it was first found is among the `newest_nights`. Raises UnusableInput.
    """
    files = files_of(store, protocol, host)
    used = engine or engine_for(files)
    frame, texts = nights_of(files, used, host)
    settings = _settings(texts)
    invalid_nights = invalid_nights_of(files, host)
    if not settings and not invalid_nights:
        raise nothing_of(store, host, protocol)
    nights = sorted({night for of_host in settings.values() for night in of_host})
    protocols = sorted({of for of, _ in settings})
    noise = list(_noise(frame))
    tested = frame[frame["kind"] != "noise"]
    series = _series(tested)
    about = {_key(row): row for row in _records(tested.drop_duplicates(SERIES, keep="last"))}
    fleet, member = _fleet_series(series)
    series |= fleet
    about |= {key: about[member[key]] for key in fleet}
    floors = {(floor.protocol, floor.host, floor.phase, floor.metric): floor.sd for floor in noise}
    least = _least_steps(about, floors)
    splits = changed(series, rate, least)
    found = [
        _change(key, about[key], series[key], split, settings, floors)
        for key, of_series in splits.items()
        for split in of_series
    ]
    told = read_told(store)
    newest = {
        _same(key): [outward(value, about[key]["scale"]) for value in nightly.values[-BACK_NIGHTS:]]
        for key, nightly in series.items()
    }
    found = with_alarms(found, nights, told, newest_nights, newest)
    shown = [key for key in series if splits.get(key) or (key[2] == "effect" and about[key]["role"] == "primary")]
    return History(
        schema_version=SCHEMA_VERSION,
        nights=nights,
        hosts=sorted({name for _, name in settings}),
        protocols=protocols,
        series=len(series),
        false_discovery_rate=rate,
        changes=sorted(found, key=lambda c: (not c.alarm, c.night, c.host, c.kind, c.p_value)),
        noise=noise,
        pooled=list(_pooled(files, protocols, host, settings)),
        invalid_nights=invalid_nights,
        few_nights=_few_nights(len(nights), series, least),
        engine=cast(Literal["pandas", "duckdb"], used),
        shown=[_shown(key, about[key], series[key]) for key in sorted(shown)],
        came_back=came_back(found, told, newest),
    )


def _records(frame: pandas.DataFrame) -> Iterator[dict[str, Any]]:
    return iter(cast(list[dict[str, Any]], frame.to_dict("records")))


def _key(row: Mapping[str, Any]) -> Key:
    return tuple(str(row[name]) for name in SERIES)


def _same(key: Key) -> Key:
    """The key as SAME orders it."""
    by_name = dict(zip(SERIES, key, strict=True))
    return tuple(by_name[name] for name in SAME)


def _of_fleet(key: Key) -> Key:
    return (key[0], ALL_HOSTS, *key[2:])


def _series(frame: pandas.DataFrame) -> dict[Key, Nightly]:
    return {
        tuple(map(str, cast(tuple[Any, ...], key))): Nightly(
            list(rows["night"]), list(rows["value"]), [int(n) for n in rows["runs"]], list(rows["sd"])
        )
        for key, rows in frame.groupby(SERIES, sort=False, observed=True)
    }


def _fleet_series(series: Mapping[Key, Nightly]) -> tuple[dict[Key, Nightly], dict[Key, Key]]:
    """Per night the median over hosts of how far each lies from its own median, from three hosts on.

    And of each series of the fleet that of one of its hosts, for what they share.

    Medians, so that one host that changed is no change of the fleet. The hosts take the place of runs.
    """
    hosts: dict[Key, dict[str, Nightly]] = {}
    for key, nightly in series.items():
        hosts.setdefault(_of_fleet(key), {})[key[1]] = nightly
    found, member = {}, {}
    for key, of_host in hosts.items():
        if len(of_host) < LEAST_HOSTS:
            continue
        # Only nights of most hosts: one that a few alone ran would say who was there.
        by_night: dict[str, list[float]] = {}
        grand = median(median(nightly.values) for nightly in of_host.values())
        for nightly in of_host.values():
            own = median(nightly.values)
            for night, value in zip(nightly.nights, nightly.values, strict=True):
                by_night.setdefault(night, []).append(value - own + grand)
        nights = [night for night in sorted(by_night) if len(by_night[night]) >= max(LEAST_HOSTS, len(of_host) / 2)]
        if len(nights) < 2:
            continue
        values = [pandas.Series(by_night[night]) for night in nights]
        found[key] = Nightly(
            nights, [float(v.median()) for v in values], [len(v) for v in values], [float(v.std()) for v in values]
        )
        member[key] = (key[0], next(iter(of_host)), *key[2:])
    return found, member


def _settings(texts: SettingsTexts) -> Settings:
    # Hosts and nights are alike as a rule, and are to share what they are.
    read: dict[str, dict[str, str]] = {}
    for of_host in texts.values():
        for text in of_host.values():
            if text not in read:
                read[text] = msgspec.json.decode(text, type=dict[str, str])
    return {key: {night: read[text] for night, text in sorted(of_host.items())} for key, of_host in texts.items()}


def _change(
    key: Key,
    row: Mapping[str, Any],
    nightly: Nightly,
    split: Split,
    settings: Settings,
    floors: Floors,
) -> ChangePoint:
    """Whether it raises an alarm is not known here."""
    protocol, host, kind, arm, against, phase, against_phase, metric = key
    night, before_night = nightly.nights[split.at], nightly.nights[split.at - 1]
    scale = row["scale"]
    step = split.after - split.before
    ratio = math.exp(step) if scale == "ratio" else None
    margin = float(row["margin"])
    large = abs(step) > (math.log1p(margin) if scale == "ratio" else margin)
    worse = (step > 0) == (row["better"] == "lower")
    pins = _changes_at(settings, protocol, host, night)
    beside = []
    if not pins:
        later = nightly.nights[split.at + 1] if split.at + 1 < len(nightly.nights) else None
        for when, changes in (
            ("the night before", _changes_at(settings, protocol, host, before_night)),
            ("the night after", _changes_at(settings, protocol, host, later) if later else {}),
        ):
            beside += [f"{name} {was} → {now} {when}" for name, (was, now) in changes.items()]
    point = ChangePoint(
        host=host, protocol=protocol, night=night, before_night=before_night, kind=cast(Any, kind), arm=arm,
        against=against, phase=phase, against_phase=against_phase, metric=metric, unit=str(row["unit"]), scale=scale,
        from_value=outward(split.before, scale), to_value=outward(split.after, scale), ratio=ratio, margin=margin,
        p_value=split.p_value, evidence=split.evidence, nights_before=split.at - split.start,
        nights_after=split.end - split.at, worse=worse, beyond_margin=large, alarm=False,
        pins_changed={name: list(pair) for name, pair in pins.items()},
        noise_sd=_floor(floors, protocol, host, phase, metric), sentence="",
    )  # fmt: skip
    return msgspec.structs.replace(point, sentence="; ".join([sentence(point), *beside]))


def _shown(key: Key, row: Mapping[str, Any], nightly: Nightly) -> Series:
    """A series with its points on the outer scale."""
    protocol, host, kind, arm, against, phase, against_phase, metric = key
    scale = row["scale"]
    points = []
    for night, value, runs, sd in zip(nightly.nights, nightly.values, nightly.runs, nightly.sds, strict=True):
        half = None
        if host != ALL_HOSTS and runs > 1 and math.isfinite(sd):
            half = float(special.stdtrit(runs - 1, 0.975)) * sd / math.sqrt(runs)
        low, high = (None, None) if half is None else (outward(value - half, scale), outward(value + half, scale))
        points.append(Point(night, outward(value, scale), low, high, int(runs)))
    return Series(
        host=host, protocol=protocol, kind=cast(Any, kind), arm=arm, against=against, phase=phase,
        against_phase=against_phase, metric=metric, unit=str(row["unit"]), scale=scale, role=row["role"],
        margin=float(row["margin"]), points=points,
    )  # fmt: skip


def _floor(floors: Floors, protocol: str, host: str, phase: str, metric: str) -> float | None:
    """Of this phase, from whichever protocol ran the A/A pairs where the own one did not (aa_noise, as a rule)."""
    other = next((sd for (_, *of), sd in floors.items() if of == [host, phase, metric]), None)
    return floors.get((protocol, host, phase, metric), other)


def _least_steps(about: Mapping[Key, Mapping[str, Any]], floors: Floors) -> dict[Key, float]:
    """From which step on a series of few nights is told by its size: margin, and three times the A/A noise."""
    found = {}
    for key, row in about.items():
        if row["scale"] == "ratio":
            protocol, host, _, _, _, phase, _, metric = key
            noise = _floor(floors, protocol, host, phase, metric) or 0.0
            found[key] = max(math.log1p(float(row["margin"])), NOISES_BY_SIZE * noise)
    return found


def _few_nights(nights: int, series: Mapping[Key, Nightly], least: Mapping[Key, float]) -> FewNights | None:
    """What a step tonight must be for it to be told, where nights are too few for a test."""
    if not 0 < nights < LEAST_NIGHTS:
        return None
    steps = sorted(told_from(series, least).values())
    shares = (math.expm1(steps[len(steps) // 2]), math.expm1(steps[-1])) if steps else (None, None)
    return FewNights(nights, len(steps), len(series) - len(steps), *shares)


def _changes_on(settings: Settings, protocol: str, host: str, night: str) -> dict[str, tuple[str, str]]:
    """What differs from the last night before on which this very host ran; what either did not tell is no change."""
    of_host = settings.get((protocol, host), {})
    nights = [when for when in of_host if when < night]
    if not nights or night not in of_host:
        return {}
    was, now = of_host[max(nights)], of_host[night]
    told = was.keys() & now.keys()
    return setting_changes({n: v for n, v in was.items() if n in told}, {n: v for n, v in now.items() if n in told})


def _changes_at(settings: Settings, protocol: str, host: str, night: str) -> dict[str, tuple[str, str]]:
    """What changed that night on the host; over the fleet, on more than half of its hosts in one way."""
    if host != ALL_HOSTS:
        return _changes_on(settings, protocol, host, night)
    hosts = {name for (of, name), of_host in settings.items() if of == protocol and night in of_host}
    counted: dict[tuple[str, str, str], int] = {}
    for name in hosts:
        for setting, pair in _changes_on(settings, protocol, name, night).items():
            counted[setting, *pair] = counted.get((setting, *pair), 0) + 1
    return {name: (was, now) for (name, was, now), count in counted.items() if 2 * count > len(hosts)}


def day(night: str) -> str:
    """2026-11-14 as 14 Nov."""
    return f"{int(night[8:])} {MONTHS[int(night[5:7]) - 1]}"


def sentence(point: ChangePoint) -> str:
    """As "TTFT of the control rose 12 % on host g07 on 14 Nov; driver 580.126 → 580.159 that night"."""
    name = NAMES.get(point.metric, point.metric)
    where = "over the fleet" if point.host == ALL_HOSTS else f"on host {point.host}"
    verb = "rose" if point.to_value > point.from_value else "fell"
    of = f"{name} of " + ("the control" if point.kind == "control" else f"{point.arm} against {point.against}")
    size = f"{abs(point.ratio - 1):.0%}" if point.ratio is not None else f"{abs(point.to_value - point.from_value):.4g}"
    size = size.replace("%", " %") if point.ratio is not None else f"by {size} {point.unit}"
    if point.kind == "effect" and point.ratio is not None:
        size = f"from ×{point.from_value:.3g} to ×{point.to_value:.3g}"
    pins = ", ".join(f"{pin} {was} → {now}" for pin, (was, now) in point.pins_changed.items())
    cause = f"{pins} that night" if pins else "nothing recorded changed that night"
    return f"{of} ({point.phase}) {verb} {size} {where} on {day(point.night)}; {cause}"


# --------------------------------------------------------------------------------------------------- noise, pooling


def _noise(frame: pandas.DataFrame) -> Iterator[NoiseFloor]:
    """SD of A/A pairs about 0: their truth is known, so the mean of few is not taken off."""
    rows = frame[(frame["kind"] == "noise") & (frame["scale"] == "ratio")]
    for key, group in rows.groupby(["protocol", "host", "phase", "metric"], sort=True, observed=True):
        protocol, host, phase, metric = map(str, cast(tuple[Any, ...], key))
        pairs = int(group["runs"].sum())
        within = ((group["runs"] - 1) * group["sd"].fillna(0.0) ** 2).sum()
        squares = float(within + (group["runs"] * group["value"] ** 2).sum())
        yield NoiseFloor(host, protocol, phase, metric, math.sqrt(squares / pairs), pairs, len(group))


IDENTITY = ["rule", "arm", "against", "phase", "against_phase", "metric", "scale", "margin"]
"""What one trial of nights asks, and by which rule: nights that differ in any of it are of two trials.

So are nights between which the request of more than half of the hosts changed.
"""


def _pooled(
    files: list[Path], protocols: Sequence[str], host: str | None, settings: Settings
) -> Iterator[PooledNights]:
    """Of each protocol whose newest night declares a rule, the newest trial of nights by host, and over the fleet."""
    chosen = {"host": host} if host else {}
    for protocol in protocols:
        of_protocol = [path for path in files if path.parents[1].name == f"protocol={quote(protocol, safe='')}"]
        wanted = {"kind": "effect", "role": "primary"}
        # Only what says which nights are of the trial is asked of all of them; of all hosts, since the trial's blocks
        # and looks are the fleet's: alpha pays for no second choice of them.
        asked = different_rows_with(of_protocol, wanted, ["night", "started_at_utc", *IDENTITY])
        if asked.empty:
            continue
        asked = asked.sort_values(["night", "started_at_utc"], kind="stable").drop_duplicates("night", keep="last")
        sent = _sent(of_protocol, wanted)
        requests = _requests(sent, [str(night) for night in asked["night"]])
        identities = [
            (*row, number) for row, number in zip(asked[IDENTITY].itertuples(index=False), requests, strict=True)
        ]
        newest = asked.iloc[-1]
        if not newest["rule"]:
            continue
        rule = msgspec.json.decode(str(newest["rule"]), type=Nights)
        begun = next((at for at in range(len(identities), 0, -1) if identities[at - 1] != identities[-1]), 0)
        nights = blocks([str(night) for night in asked["night"].iloc[begun:]], rule.looks)[-1]
        rows = rows_with(
            [path for path in of_protocol if path.parent.name.removeprefix("night=") in nights],
            wanted | chosen | {name: newest[name] for name in IDENTITY},
            ["host", "night", "value"],
        )
        by_host = {
            str(name): {
                str(n): list(map(float, v))
                for n, v in group.groupby("night")["value"]
                if str(n) >= _same_since(sent.get(str(name), {}))
            }
            for name, group in rows.groupby("host")
        }
        newest["protocol"] = protocol
        for name, by_night in by_host.items():
            yield _trial(newest, rule, name, nights, {name: by_night}, settings)
        if len(by_host) >= LEAST_HOSTS:
            yield _trial(newest, rule, ALL_HOSTS, nights, by_host, settings)


def _sent(files: list[Path], columns: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Host → night → the digest of what it was sent, of nights that tell it, oldest first."""
    found: dict[str, dict[str, str]] = {}
    names = ["host", "night", "started_at_utc", "settings"]
    for path in files:
        for host, night, _, text in (
            rows_with([path], columns, names).drop_duplicates().sort_values(names[:3]).itertuples(index=False)
        ):
            if told := msgspec.json.decode(str(text), type=dict[str, str]).get(WORKLOAD):
                found.setdefault(str(host), {})[str(night)] = digest_of_workload(told)
    return {host: dict(sorted(by_night.items())) for host, by_night in found.items()}


def _requests(sent: Mapping[str, Mapping[str, str]], nights: Sequence[str]) -> list[int]:
    """A number for each of `nights` that grows where the request changed on more than half of the hosts then told."""
    before: dict[str, str] = {}
    numbers = []
    number = 0
    for night in nights:
        now = {host: by_night[night] for host, by_night in sent.items() if night in by_night}
        known = [host for host in now if host in before]
        number += 2 * sum(now[host] != before[host] for host in known) > len(known) > 0
        numbers.append(number)
        before |= now
    return numbers


def _same_since(by_night: Mapping[str, str]) -> str:
    """The night from which on a host was sent what it is sent now; empty where it was never sent anything else."""
    since, last = "", ""
    for night, digest in by_night.items():
        since, last = (night if last and digest != last else since), digest
    return since


def _trial(
    row: Any,
    rule: Nights,
    host: str,
    nights: Sequence[str],
    by_host: Mapping[str, Mapping[str, list[float]]],
    settings: Settings,
) -> PooledNights:
    """Look after look, until one decides; what that one says stands."""
    scale, better, margin = row["scale"], find_metric(str(row["metric"])).better, float(row["margin"])
    spent = levels(rule.looks, rule.alpha, rule.spending)
    word, note, interval, look, decided = "INCONCLUSIVE", "no look has anything to spend yet", None, 0, None
    for look in range(1, len(nights) + 1):
        found = over_nights(by_host, nights[:look], 1 - spent[look - 1]) if spent[look - 1] else None
        if found is None:
            note = f"nothing can be said at look {look}: it takes two nights, and a level above 0"
            continue
        interval = found
        word, note = decide(found, margin, scale, better)
        if word != "INCONCLUSIVE":
            decided = nights[look - 1]
            break
    moved = [
        f"{name} {was} → {now} on {day(night)}"
        for night in nights[1:]
        for name, (was, now) in _changes_at(settings, str(row["protocol"]), host, night).items()
    ]
    if moved:
        note = "; ".join([*filter(None, [note]), f"within these nights changed {', '.join(moved)}"])
    return PooledNights(
        host=host, protocol=str(row["protocol"]), arm=str(row["arm"]), against=str(row["against"]),
        phase=str(row["phase"]), metric=str(row["metric"]), scale=scale, nights=list(nights), look=look,
        looks=rule.looks, spending=rule.spending, alpha=rule.alpha,
        effect=None if interval is None else outward(interval.estimate, scale),
        ci_low=None if interval is None else outward(interval.low, scale),
        ci_high=None if interval is None else outward(interval.high, scale),
        confidence=1 - spent[look - 1], pairs=0 if interval is None else interval.pairs, margin=margin,
        verdict=cast(Any, word), decided_at=decided, note=note,
    )  # fmt: skip


def over_nights(
    by_host: Mapping[str, Mapping[str, Sequence[float]]], nights: Sequence[str], confidence: float
) -> Interval | None:
    """Mean effect over nights, each night and each host being one draw; None of fewer than two nights.

    A night gives one value a host, the mean of its pairs: pairs of one night share what that night was. Of one host the
    interval is the t interval of its nights. Of several, variance between hosts' means and variance between nights are
    added (Satterthwaite's degrees of freedom): what both share counts twice, so it errs on the wide side.
    """
    cells = {
        (host, night): float(numpy.mean(of[night])) for host, of in by_host.items() for night in nights if of.get(night)
    }
    hosts = sorted({host for host, _ in cells})
    of_host = {host: numpy.array([value for (name, _), value in cells.items() if name == host]) for host in hosts}
    level = {host: float(values.mean()) for host, values in of_host.items()}
    # Of each night how far its hosts lie from their own means, so that who was there makes no difference.
    by_night: dict[str, list[float]] = {}
    for (host, night), value in cells.items():
        by_night.setdefault(night, []).append(value - level[host])
    off = numpy.array([numpy.mean(values) for values in by_night.values()])
    if len(off) < 2:
        return None
    parts = [(float(off.var(ddof=1)) / len(off), len(off) - 1)]
    if len(hosts) > 1:
        parts.append((float(numpy.var(list(level.values()), ddof=1)) / len(hosts), len(hosts) - 1))
    variance = max(sum(part for part, _ in parts), _SMALLEST_VARIANCE)
    freedom = variance**2 / max(sum(part**2 / free for part, free in parts), _SMALLEST_VARIANCE**2)
    freedom = min(max(freedom, min(free for _, free in parts)), sum(free for _, free in parts))
    error = math.sqrt(variance)
    mean = float(numpy.mean(list(level.values())))
    reach = float(special.stdtrit(freedom, (1 + confidence) / 2)) * error
    pairs = sum(len(of[night]) for of in by_host.values() for night in nights if of.get(night))
    p_value = float(2 * special.stdtr(freedom, -abs(mean) / error))
    return Interval(mean, mean - reach, mean + reach, confidence, p_value, pairs, error * math.sqrt(len(off)))
