"""The section on a fleet: the hosts' effects with the pool, odd and missing hosts, drift, and the history. Pure."""

import math
from collections import Counter
from collections.abc import Callable, Sequence

from msgspec import Struct

from kvtrial.analysis import answer
from kvtrial.analysis.effect import differences, hodges_lehmann, log_ratios
from kvtrial.analysis.fleet import OddHost, odd_hosts
from kvtrial.analysis.history.model import ALL_HOSTS, ChangePoint, History, Series
from kvtrial.analysis.report import figures
from kvtrial.analysis.report.conditions import CONDITIONS, gpus_text
from kvtrial.analysis.report.figures_history import history_plot, level_text
from kvtrial.analysis.report.selection import HOSTS_SHOWN_MAX, Chosen, Plot, Row, Table, clipped, drawn
from kvtrial.analysis.report.words import Words
from kvtrial.record.record import RunRecord
from kvtrial.record.verdict import HostVerdict, Verdict

FOREST_HOSTS_MAX = 120
DRIFT_HOSTS_NAMED_MAX = 6
SERIES_SHOWN_MAX = 6

DRIFTS: dict[str, Callable[[RunRecord, Words], str]] = {
    "vllm": lambda record, _: record.resolved.vllm_version if record.resolved else record.vllm_version_pinned,
    "packages": lambda record, _: record.resolved.packages_sha256[:16] if record.resolved else "",
    "model": lambda record, _: f"{record.model.name} {record.model.revision}".strip(),
    **{name: CONDITIONS[name] for name in ("cpu", "ram")},
    "gpus": lambda record, words: gpus_text(record.conditions.gpus, words),
    **{name: CONDITIONS[name] for name in ("driver", "os", "kernel", "python", "governor", "huge_pages", "clock")},
}


class Section(Struct, frozen=True):
    """All of the section."""

    hosts: list[Row]
    left_out: str
    odd: list[str]
    missing: list[str]
    missing_more: str
    drift: Table | None
    drift_none: str
    plots: list[Plot]
    history: list[Table]
    history_said: str


def section(verdict: Verdict, chosen: Chosen, history: History | None, words: Words) -> Section | None:
    """The section of a campaign over several hosts, or with a history; None for a single host without."""
    if len(verdict.hosts) < 2 and history is None:
        return None
    told = _told(history, verdict) if history is not None else []
    series = told[:SERIES_SHOWN_MAX]
    odd = _odd(verdict, chosen.records)
    missing = _missing(verdict, chosen.records)
    more = len(missing) - HOSTS_SHOWN_MAX
    plots = [
        _forest(verdict, {found.host for found in odd}, words) if len(verdict.hosts) > 1 else None,
        *(_series_plot(index, one, found, words) for index, (one, found) in enumerate(series)),
    ]
    return Section(
        hosts=_hosts(verdict, [found.host for found in odd], words),
        left_out=_hosts_left_out(verdict, [found.host for found in odd], words),
        odd=[
            words("fleet.odd", host=found.host, deviation=words.local(f"{found.deviation:+.1f}"),
                  p=words.local(f"{found.p_value:.2g}"))
            for found in odd
        ],
        missing=missing[:HOSTS_SHOWN_MAX],
        missing_more=words("gates.more_hosts", count=words.whole(more)) if more > 0 else "",
        drift=_drift(chosen.records, words),
        drift_none=words("drift.none", names="; ".join(words(f"drift.{name}") for name in DRIFTS)),
        plots=[plot for plot in plots if plot is not None],
        history=[table for one, found in series if (table := _changes(one, found, words)) is not None],
        history_said=_history_said(history, verdict.protocol, len(told) - len(series), words) if history else "",
    )  # fmt: skip


def _hosts(verdict: Verdict, odd: Sequence[str], words: Words) -> list[Row]:
    """A row a host: those of another verdict first, then odd ones, oddest first; empty where there is only one host."""
    if len(verdict.hosts) < 2:
        return []
    rows, names = [], answer.arms_in(verdict)
    for host in _ordered(verdict, odd)[:HOSTS_SHOWN_MAX]:
        primary = answer.primary_of(host.comparisons)
        effect = words.local(answer.effect_text(primary)) if primary else "–"
        interval = words.local(answer.interval_text(primary)) if primary else "–"
        runs = words("of", part=host.runs.valid, whole=host.runs.planned)
        cells = [
            host.verdict,
            effect,
            interval,
            runs,
            str(host.runs.engine_faults),
            clipped(answer.sentence(host.reason, names)),
        ]
        rows.append(Row(host.host, cells, kind=host.verdict, note=words("fleet.is_odd") if host.host in odd else ""))
    return rows


def _ordered(verdict: Verdict, odd: Sequence[str]) -> list[HostVerdict]:
    """Hosts of another verdict first, then odd ones, oddest first."""
    rank = {host: number for number, host in enumerate(odd)}
    return sorted(
        verdict.hosts, key=lambda item: (item.verdict == verdict.verdict, rank.get(item.host, len(rank)), item.host)
    )


def _hosts_left_out(verdict: Verdict, odd: Sequence[str], words: Words) -> str:
    """How many hosts the table has no room for, and how many of them are INVALID; "" where it has all."""
    rest = _ordered(verdict, odd)[HOSTS_SHOWN_MAX:]
    invalid = sum(host.verdict == "INVALID" for host in rest)
    return words("fleet.left_out", count=words.whole(len(rest)), invalid=words.whole(invalid)) if rest else ""


def _odd(verdict: Verdict, records: Sequence[RunRecord]) -> list[OddHost]:
    """The hosts whose primary effect departs from the others', by the same test as the verdict's caveat."""
    intervals, classes = {}, {}
    by_host = {record.host: record for record in reversed(records)}
    for host in verdict.hosts:
        primary = answer.primary_of(host.comparisons)
        if primary is None or host.verdict == "INVALID" or len(primary.arm_values) < 2 or host.host not in by_host:
            continue
        scale = log_ratios if primary.effect_scale == "ratio" else differences
        try:
            values = scale(primary.arm_values, primary.against_values)
        except ValueError:
            continue
        if not all(map(math.isfinite, values)):
            continue
        intervals[host.host] = hodges_lehmann(values)
        conditions = by_host[host.host].conditions
        classes[host.host] = f"{conditions.cpu_model} | {', '.join(gpu.get('name', '?') for gpu in conditions.gpus)}"
    return odd_hosts(intervals, classes)


def _missing(verdict: Verdict, records: Sequence[RunRecord]) -> list[str]:
    """Hosts of the plan or the inventory that left no record."""
    there = {record.host for record in records}
    return [host.host for host in verdict.hosts if host.host not in there and not host.runs.valid]


def _forest(verdict: Verdict, odd: set[str], words: Words) -> Plot | None:
    """Each host's primary effect, and the pool below. Of many hosts the odd ones and those at both ends are drawn."""
    primary = answer.primary_of(verdict.comparisons)
    if primary is None:
        return None
    is_ratio = primary.effect_scale == "ratio"
    measured = [
        (found.effect, host, found)
        for host in verdict.hosts
        if (found := answer.primary_of(host.comparisons)) is not None
        and found.effect is not None
        and answer.is_number(found.effect)
        and (found.effect > 0 or not is_ratio)
    ]
    measured.sort(key=lambda item: (item[0], item[1].host))
    step = max(1.0, len(measured) / FOREST_HOSTS_MAX)
    ranks = {int(rank * step) for rank in range(min(len(measured), FOREST_HOSTS_MAX))} | {len(measured) - 1}
    rows = [
        figures.ForestRow(
            host.host,
            effect,
            found.ci_low,
            found.ci_high,
            found.margin,
            "odd" if host.host in odd else "usual",
            _host_tip(host, words),
        )
        for rank, (effect, host, found) in enumerate(measured)
        if rank in ranks or host.host in odd
    ]
    if not rows:
        return None
    hosts_drawn = len(rows)
    if primary.effect is not None and answer.is_number(primary.effect):
        rows.append(
            figures.ForestRow(
                words("fleet.pool"), primary.effect, primary.ci_low, primary.ci_high, primary.margin, "pool"
            )
        )
    caption = words("caption.fleet", hosts=words.count(len(measured), "host"))
    if hosts_drawn < len(measured):
        caption += " " + words("caption.drawn", count=hosts_drawn)
    axis = words("axis.effect")
    if not is_ratio:
        axis = words("axis.difference", unit=words.local(answer.unit_of(primary)))
    svg = figures.forest_plot("fleet-forest", rows, axis, words, words("figure.fleet"), caption, is_ratio=is_ratio)
    return drawn(svg, words("figure.fleet"), caption)


def _host_tip(host: HostVerdict, words: Words) -> str:
    primary = answer.primary_of(host.comparisons)
    assert primary is not None
    return f"{host.host}: {words.local(answer.effect_text(primary))} ({words.local(answer.interval_text(primary))}), " \
           f"{host.verdict}, {words.count(primary.pairs, 'pair')}"  # fmt: skip


def _drift(records: Sequence[RunRecord], words: Words) -> Table | None:
    """What is not the same on all hosts: the usual value, and who has another."""
    first = {record.host: record for record in reversed(records)}
    if len(first) < 2:
        return None
    rows = []
    for name, read in DRIFTS.items():
        values = {host: clipped(read(record, words), 160) for host, record in sorted(first.items())}
        counted = Counter(values.values())
        if len(counted) < 2:
            continue
        usual, hosts = counted.most_common(1)[0]
        others = [(host, value) for host, value in values.items() if value != usual]
        named = [f"{host}: {value or '–'}" for host, value in others[:DRIFT_HOSTS_NAMED_MAX]]
        if len(others) > len(named):
            named.append(words("gates.more_hosts", count=words.whole(len(others) - len(named))))
        cells = [usual or "–", words("of", part=hosts, whole=len(values)), "\n".join(named)]
        rows.append(Row(words(f"drift.{name}"), cells))
    heads = [words(f"drift.{name}") for name in ("what", "usual", "hosts", "others")]
    return Table(heads, rows, title=words("drift.title"))


# ----------------------------------------------------------------------------------------------------------- history


def _told(history: History, verdict: Verdict) -> list[tuple[Series, list[ChangePoint]]]:
    """The protocol's series with their changes: alarms first, then changed ones, then the effect that decides."""
    found = [
        (series, [change for change in history.changes if series.holds(change)])
        for series in history.shown
        if series.protocol == verdict.protocol
    ]
    hosts = {host.host for host in verdict.hosts} | {ALL_HOSTS}
    found = [(series, changes) for series, changes in found if series.host in hosts]
    return sorted(
        found,
        key=lambda item: (
            not any(change.alarm for change in item[1]),
            not item[1],
            item[0].role != "primary" or item[0].kind != "effect",
            item[0].host != ALL_HOSTS,
            item[0].host,
        ),
    )


def _history_said(history: History, protocol: str, left_out: int, words: Words) -> str:
    """How many nights there are, and whether a level changed."""
    if protocol not in history.protocols:
        return words("history.other_protocol", protocol=clipped(protocol, 60))
    if len(history.nights) < 2:
        return words("history.one_night")
    changes = [change for change in history.changes if change.protocol == protocol]
    span = {"first": history.nights[0], "last": history.nights[-1], "nights": words.count(len(history.nights), "night")}
    said = words("history.changed" if changes else "history.unchanged", count=len(changes), **span)
    return f"{said} {words('history.left_out', count=left_out)}" if left_out > 0 else said


def _name(series: Series, words: Words) -> str:
    what = f"{words.short_metric(series.metric)} {words.place(series.phase)}"
    arms = (
        series.arm if series.kind == "control" else words("comparison.against", arm=series.arm, against=series.against)
    )
    return clipped(f"{what}, {arms}", 160)


def _host(series: Series, words: Words) -> str:
    return words("fleet.pool") if series.host == ALL_HOSTS else clipped(series.host, 60)


def _series_plot(index: int, series: Series, changes: Sequence[ChangePoint], words: Words) -> Plot | None:
    caption = words("caption.history", name=_name(series, words), host=_host(series, words))
    title = words("figure.history", host=_host(series, words))
    return drawn(history_plot(f"history{index}", series, changes, words, title, caption), title, caption)


def _changes(series: Series, changes: Sequence[ChangePoint], words: Words) -> Table | None:
    """A row a change point, with the pins that changed there."""
    rows = []
    for change in sorted(changes, key=lambda change: change.night):
        pins = [
            f"{clipped(pin, 80)}: {' → '.join(clipped(value, 120) for value in values)}"
            for pin, values in sorted(change.pins_changed.items())
        ]
        cells = [
            level_text(change.from_value, series, words),
            level_text(change.to_value, series, words),
            words.local(answer.p_text(change.p_value)) if change.evidence == "night" else words("history.by_size"),
            "\n".join(pins) or words("history.no_pin"),
        ]
        rows.append(Row(clipped(change.night, 40), cells))
    heads = [words(f"history.{name}") for name in ("at", "before", "after", "p", "pins")]
    title = words("history.changes", name=_name(series, words), host=_host(series, words))
    return Table(heads, rows, title=title) if rows else None
