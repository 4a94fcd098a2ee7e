"""The report: one HTML file from a verdict and its records. It opens offline, prints, and needs no script."""

import json
import math
import re
import shlex
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from msgspec import Struct

from kvtrial.analysis import answer, plots
from kvtrial.analysis.report_ladder import HEADS as LADDER_HEADS
from kvtrial.analysis.report_ladder import ladder_tables, time_lines
from kvtrial.record.protocol import Protocol
from kvtrial.record.record import PhaseRecord, RunRecord
from kvtrial.record.verdict import BreakEven, ComparisonResult, FoundBreakEven, Verdict

REGIMES = {
    "return": "the prefix was evicted and is asked for again",
    "noload_return": "the same, loading forbidden: what this very server takes to compute it again",
    "gpu_hit": "the prefix is still in the engine's own KV cache",
    "fits_return": "a set that fits the engine's own KV cache",
    "miss": "a prompt never seen before",
}
FOUND_TEXTS = {"above": "", "every": "pays at every share", "none": "pays at none", "unknown": "not found"}
HOSTS_SHOWN_MAX = 200
RUNS_SHOWN_MAX = 2000
GATE_HOSTS_SHOWN_MAX = 5
CONDITION_HOSTS_SHOWN_MAX = 20
CONFIG_ENTRIES_MAX = 1500
TEXT_CHARACTERS_MAX = 2000
UNIT_SPACE = re.compile(r"(?<=\d) (?=(?:%|ms|s|B|[KMGT]iB|pairs?|runs?)\b|%)")
"""The space between a number and its unit, where no line should break."""
ROLE_TITLES = {
    "primary": "Primary: it decides",
    "guard": "Guards: none of them may be worse",
    "secondary": "Secondary: for understanding",
}
MARKS = {"BETTER": "▲", "WORSE": "▼", "EQUIVALENT": "＝", "INCONCLUSIVE": "?", "INVALID": "✕"}


class Row(Struct, frozen=True):
    """A table row: a heading cell, plain cells, and a class for the style sheet."""

    head: str
    cells: list[str]
    kind: str = ""
    link: str = ""
    note: str = ""


class SourceRow(Struct, frozen=True):
    """Where the prompt tokens of a phase came from, mean a run. Shares are of `total`, 0..1."""

    phase: str
    arm: str
    computed: str
    local: str
    tier: str
    total: str
    shares: list[float]
    load_bytes: str
    store_bytes: str


class Figure(Struct, frozen=True):
    """An inline figure with the sentence below it."""

    svg: str
    title: str
    caption: str
    is_tall: bool = False


def build_report(
    verdict: Verdict,
    protocol: Protocol,
    records: list[RunRecord],
    campaign: dict[str, Any],
    summary_frame: pd.DataFrame | None,
) -> str:
    """The report as HTML text: pure, the same input gives the same text.

    `records`: all runs, dropped and faulty ones too. `campaign`: what campaign.json holds. Everything that comes from a
    host, a log or a user is escaped. Missing parts (no run, one run, NaN) are laid out as "not measured".
    """
    environment = Environment(
        loader=PackageLoader("kvtrial.analysis", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = lambda text: escape(text).replace("_", Markup("_<wbr>"))
    environment.filters["unbroken"] = lambda text: UNIT_SPACE.sub("\u00a0", str(text))
    environment.filters["clip"] = lambda text: answer.one_line(str(text), TEXT_CHARACTERS_MAX)
    ordered = sorted(records, key=lambda record: (record.host, record.pair, record.position, record.run))
    arms = _arms(protocol, ordered)
    used = _used(ordered)
    css = environment.get_template("report.css").render()
    page = environment.get_template("report.html.j2").render(
        ladder_tables=ladder_tables(verdict.ladder),
        ladder_words=verdict.ladder.regime if verdict.ladder else [],
        ladder_heads=LADDER_HEADS,
        ladder_lines=time_lines(records, protocol.control) if verdict.ladder else [],
        css=Markup(css),
        verdict=verdict,
        protocol=protocol,
        question=_question(protocol),
        mark=MARKS[verdict.verdict],
        headline=answer.headline(verdict),
        evidence_name=answer.EVIDENCE_NAMES[verdict.evidence],
        evidence_limit=answer.evidence_text(verdict),
        figures_of_merit=_figures_of_merit(verdict),
        answers=_answers(verdict),
        next=answer.next_text(verdict),
        started=_started(ordered),
        gates=_gate_rows(verdict),
        gates_text=answer.gates_text(verdict),
        runs_text=answer.runs_text(verdict),
        faults=_fault_rows(ordered),
        comparisons=_comparison_groups(verdict.comparisons),
        hosts=_host_rows(verdict),
        hosts_left_out=max(0, len(verdict.hosts) - HOSTS_SHOWN_MAX),
        arms=arms,
        arm_titles={arm: protocol.arms[arm].title for arm in arms if arm in protocol.arms},
        regimes=_regime_rows(protocol, used, arms),
        sources=_source_rows(used, arms),
        figures=_figures(verdict, used, arms),
        conditions=_condition_groups(ordered),
        launches=_launches(ordered),
        differences=_configuration_differences(ordered, arms),
        configurations=_configurations(ordered, arms),
        prompts=_prompt_rows(ordered),
        provenance=_provenance(campaign),
        commands=_commands(verdict, ordered, campaign),
        runs=_run_rows(ordered),
        runs_left_out=max(0, len(ordered) - RUNS_SHOWN_MAX),
        time_rows=_time_rows(verdict),
        card_rows=_card_rows(ordered, arms),
        summary_shape=None if summary_frame is None else summary_frame.shape,
    )
    return page.lstrip() + "\n"


# --------------------------------------------------------------------------------------------------------- selection


def _arms(protocol: Protocol, records: Sequence[RunRecord]) -> list[str]:
    """Arms in the protocol's order, control first, then any that only the records know."""
    seen = list(dict.fromkeys(record.arm for record in records))
    names = [protocol.control, *(arm for arm in protocol.arms if arm != protocol.control)]
    return [arm for arm in names if arm in seen or not seen] + [arm for arm in seen if arm not in names]


def _used(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Completed runs of pairs that no fault of the environment touched: those whose times are summed up."""
    dropped = {(record.host, record.pair) for record in records if record.outcome == "environment_fault"}
    return [item for item in records if item.outcome == "completed" and (item.host, item.pair) not in dropped]


def _phases_of(records: Iterable[RunRecord], arm: str, phase: str) -> list[PhaseRecord]:
    return [item for record in records if record.arm == arm for item in record.phases if item.name == phase]


def _median(values: Iterable[float | None]) -> float | None:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.median(finite) if finite else None


def _largest(values: Iterable[float | None]) -> float | None:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return max(finite) if finite else None


def _role_delta(phase: PhaseRecord, role: str) -> float | None:
    """What a counter grew by in a phase; None where the engine does not export it."""
    before, after = phase.before.get(role), phase.after.get(role)
    if before is None or after is None or not math.isfinite(before) or not math.isfinite(after):
        return None
    return after - before


def _question(protocol: Protocol) -> str:
    question = protocol.question.strip()
    return question[:1].upper() + question[1:]


def _started(records: Sequence[RunRecord]) -> str:
    return min((record.times.started_at_utc for record in records), default="")


def _count_text(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


# --------------------------------------------------------------------------------------------------------------- top


def _figures_of_merit(verdict: Verdict) -> list[tuple[str, str, str]]:
    """(what, value, small print) of the numbers on top."""
    if verdict.verdict == "INVALID":
        return []
    primary = answer.primary_of(verdict.comparisons)
    merits = []
    if primary is not None:
        interval = answer.interval_text(primary)
        confidence = answer.share_text(primary.confidence)
        small = f"{confidence} interval {interval}" if interval != "no interval" else interval
        merits.append((f"effect, {primary.arm} against {primary.against}", answer.effect_text(primary), small))
        delta = primary.delta_ttft_seconds
        if delta is not None and math.isfinite(delta):
            merits.append(("delta_ttft_seconds", f"{delta:+.3f}", "negative means sooner, positive later"))
        p_value = answer.p_text(primary.p_value)
        merits.append(("pairs", str(primary.pairs), f"p {p_value}" if p_value != answer.NOT_MEASURED else "no p value"))
    if verdict.break_even is not None:
        even, found = verdict.break_even, verdict.break_even.found
        if found is not None:
            merits.append(("break-even hit share, found", FOUND_TEXTS[found.pays] or _share(found), _bounds(found)))
        what = "break-even hit share" + (", computed" if found is not None else "")
        merits.append((what, _share(even), _bounds(even)))
    return merits


def _share(even: BreakEven | FoundBreakEven) -> str:
    return answer.share_text(even.hit_share)


def _bounds(even: BreakEven | FoundBreakEven) -> str:
    if not answer.is_number(even.ci_low):
        return "no interval"
    return f"interval {answer.share_text(even.ci_low)} to {answer.share_text(even.ci_high)}"


def _answers(verdict: Verdict) -> list[tuple[str, str]]:
    """(label, sentence) pairs below the verdict."""
    primary = answer.primary_of(verdict.comparisons)
    pairs: list[tuple[str, str | None]] = [("Why", answer.sentence(verdict.reason))]
    if verdict.verdict != "INVALID":
        pairs += [
            ("Effect", answer.effect_sentence(primary) if primary else None),
            ("Elsewhere", answer.elsewhere_text(verdict)),
            ("Break-even", answer.break_even_text(verdict.break_even)),
            ("Limit of detection", answer.noise_text(primary)),
        ]
    pairs.append(("Checks", f"{answer.runs_text(verdict)}; {answer.gates_text(verdict)}"))
    headline = answer.headline(verdict)
    return [(label, answer.sentence(text)) for label, text in pairs if text and text != headline]


def _gate_rows(verdict: Verdict) -> list[Row]:
    rows = []
    for name, results in answer.gates_by_name(verdict).items():
        state = answer.gate_state([result for _, result in results])
        telling = [(host, result) for host, result in results if not result.holds] or results
        hosts = len(results)
        details = []
        for host, result in telling[: GATE_HOSTS_SHOWN_MAX if state != "passed" else 1]:
            detail = answer.one_line(result.detail, TEXT_CHARACTERS_MAX)
            details.append(f"{host}: {detail}" if host and hosts > 1 else detail)
        left_out = len(telling) - len(details)
        if left_out > 0:
            details.append(f"and {answer.count(left_out, 'more host')}")
        numbers = f"{sum(result.passed is True for _, result in results)} of {hosts}" if hosts > 1 else ""
        rows.append(Row(name, [state.replace("_", " "), numbers, "\n".join(details)], kind=state))
    return rows


def _fault_rows(records: Sequence[RunRecord]) -> list[Row]:
    """Runs that did not complete, with what is known of the cause."""
    rows = []
    for record in records:
        fault = record.fault
        if fault is None:
            continue
        place = f"{fault.fault}, {fault.origin}" + (f", phase {fault.phase}" if fault.phase else "")
        parts = [fault.detail]
        parts += [f"Cause: {fault.cause}"] if fault.cause else []
        parts += [f"Fix: {fault.fix}"] if fault.fix else []
        log = "\n".join(answer.one_line(line, 300) for line in fault.log_tail[-12:])
        cells = [record.arm, place, answer.one_line(" ".join(map(answer.sentence, parts)), TEXT_CHARACTERS_MAX)]
        rows.append(Row(f"{record.host} / {record.run}", cells, kind=record.outcome, note=log))
    return sorted(rows, key=lambda row: row.kind != "engine_fault")[:HOSTS_SHOWN_MAX]


# ------------------------------------------------------------------------------------------------------- comparisons


def _comparison_groups(comparisons: Sequence[ComparisonResult]) -> list[tuple[str, list[Row]]]:
    """A group of rows a role. A note is shown where it is first said."""
    groups = []
    said: set[str] = set()
    for role, title in ROLE_TITLES.items():
        rows = []
        for item in comparisons:
            if item.role == role:
                rows.append(_comparison_row(item, with_note=item.note not in said))
                said.add(item.note)
        if rows:
            groups.append((title, rows))
    return groups


def _comparison_row(item: ComparisonResult, *, with_note: bool) -> Row:
    against = f"{item.against}, {item.against_phase}" if item.against_phase else item.against
    delta = f"{item.delta_ttft_seconds:+.3f}" if answer.is_number(item.delta_ttft_seconds) else "–"
    detectable = "–"
    if item.mde is not None and math.isfinite(item.mde):
        ratio = item.effect_scale == "ratio"
        detectable = f"x{answer.number_text(item.mde)}" if ratio else answer.in_unit(item.mde, answer.unit_of(item))
    confidence = f"\n{answer.share_text(item.confidence)}" if answer.is_number(item.confidence) else ""
    p_value = f"p {answer.p_text(item.p_value)}" if answer.is_number(item.p_value) else "no p"
    cells = [
        item.verdict,
        answer.effect_text(item),
        f"{answer.interval_text(item)}{confidence}",
        f"{p_value}\n{answer.count(item.pairs, 'pair')}",
        delta,
        f"{answer.margin_text(item)}\n{detectable}",
        {"equal": "equal", "differs": "differ", "not_compared": "not compared"}[item.quality],
    ]
    name = answer.METRIC_NAMES.get(item.metric, item.metric)
    note = f"{item.arm} against {against}" + (f". {answer.sentence(item.note)}" if item.note and with_note else "")
    where = "whole run" if item.phase == "run" else item.phase
    return Row(f"{where}: {name}", cells, kind=item.verdict, note=note)


def _host_rows(verdict: Verdict) -> list[Row]:
    """A row a host, unlike verdicts first; empty where there is only one host."""
    if len(verdict.hosts) < 2:
        return []
    rows = []
    for host in sorted(verdict.hosts, key=lambda item: (item.verdict == verdict.verdict, item.host)):
        primary = answer.primary_of(host.comparisons)
        effect = answer.effect_text(primary) if primary else "–"
        interval = answer.interval_text(primary) if primary else "–"
        runs = f"{host.runs.valid} of {host.runs.planned}"
        rows.append(
            Row(
                host.host,
                [host.verdict, effect, interval, runs, str(host.runs.engine_faults), answer.sentence(host.reason)],
                kind=host.verdict,
            )
        )
    return rows[:HOSTS_SHOWN_MAX]


# ----------------------------------------------------------------------------------------------------------- phases


def _regime_rows(protocol: Protocol, records: Sequence[RunRecord], arms: Sequence[str]) -> list[Row]:
    """Median over runs of the run's median TTFT, per regime and arm, with the range over runs; last the arms' ratio.

    A mix holds returns and misses, so its mean is taken: a median would be one or the other.
    """
    declared = {phase.name for phase in protocol.phases} | {phase.name for item in records for phase in item.phases}
    names = [name for name in REGIMES if name in declared]
    mixes = [name for name in dict.fromkeys(phase.name for item in records for phase in item.phases) if _is_mix(name)]
    names = sorted(mixes) + names
    if not names:
        names = list(dict.fromkeys(item.phase for item in protocol.comparisons if item.phase in declared))
    rows = []
    for name in names:
        cells, middles = [], []
        for arm in arms:
            phases = _phases_of(records, arm, name)
            values = [phase.ttft_mean_seconds if _is_mix(name) else phase.ttft_median_seconds for phase in phases]
            finite = [value for value in values if value is not None and math.isfinite(value)]
            middle = _median(finite)
            middles.append(middle)
            if middle is None:
                cells.append(answer.NOT_MEASURED)
                continue
            spread = f"{answer.seconds_text(min(finite))} to {answer.seconds_text(max(finite))}"
            cells.append(f"{answer.seconds_text(middle)}\n{spread}, {answer.count(len(finite), 'run')}")
        for other in middles[1:]:
            first = middles[0]
            cells.append(f"x{answer.number_text(other / first)}" if first and other is not None else "–")
        note = f"{answer.phase_subject(name)}; mean of a run" if _is_mix(name) else REGIMES.get(name, "")
        rows.append(Row(name, cells, note=note))
    return rows


def _is_mix(phase: str) -> bool:
    return answer.MIX.fullmatch(phase) is not None or phase in answer.MIX_SUBJECTS


def _source_rows(records: Sequence[RunRecord], arms: Sequence[str]) -> list[SourceRow]:
    """Per phase and arm: prompt tokens by source and bytes moved, mean a run. Empty where no engine counts them."""
    names = list(dict.fromkeys(phase.name for record in records for phase in record.phases))
    rows = []
    for name in names:
        for arm in arms:
            phases = _phases_of(records, arm, name)
            if not phases:
                continue
            roles = ("prompt_tokens_computed", "prompt_tokens_local_hit", "prompt_tokens_external")
            tokens = [_mean(_role_delta(phase, role) for phase in phases) for role in roles]
            if all(value is None for value in tokens):
                continue
            known = [value or 0.0 for value in tokens]
            total = sum(known)
            moved = [_mean(_role_delta(phase, role) for phase in phases) for role in ("load_bytes", "store_bytes")]
            load, store = ("–" if value is None else answer.bytes_text(value) for value in moved)
            shares = [max(0.0, value) / total if total > 0 else 0.0 for value in known]
            computed, local, tier = map(_count_text, tokens)
            rows.append(SourceRow(name, arm, computed, local, tier, _count_text(total), shares, load, store))
    return rows


def _mean(values: Iterable[float | None]) -> float | None:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.fmean(finite) if finite else None


# ---------------------------------------------------------------------------------------------------------- figures


def _figures(verdict: Verdict, records: Sequence[RunRecord], arms: Sequence[str]) -> list[Figure]:
    primary = answer.primary_of(verdict.comparisons)
    found = []
    if primary is not None:
        found.append(_paired_figure(verdict, primary))
    found.append(_mix_figure(verdict))
    found.append(_forest_figure(verdict.comparisons))
    found.append(_ecdf_figure(primary.phase if primary else "return", records, arms))
    return [figure for figure in found if figure is not None]


def _paired_figure(verdict: Verdict, primary: ComparisonResult) -> Figure | None:
    per_host = [answer.primary_of(host.comparisons) for host in verdict.hosts]
    sources = [item for item in per_host if item is not None and item.arm_values] or [primary]
    pairs = [pair for item in sources for pair in zip(item.against_values, item.arm_values, strict=False)]
    if not pairs:
        return None
    metric = answer.METRIC_NAMES.get(primary.metric, primary.metric)
    fewer = sum(arm < against for against, arm in pairs)
    caption = (
        f"{metric[0].upper()}{metric[1:]} of phase {primary.phase}. A line is a pair: both arms back to back on one "
        f"host with the same prompts. {primary.arm} is lower in {fewer} of {answer.count(len(pairs), 'pair')}."
    )
    if len(pairs) > plots.PAIRS_DRAWN_MAX:
        caption += f" {plots.PAIRS_DRAWN_MAX} of them are drawn, evenly from all."
    svg = plots.paired_plot(
        pairs,
        primary.against,
        primary.arm,
        metric,
        is_time=answer.unit_of(primary) == "seconds",
        description=caption,
    )
    return Figure(Markup(svg), "Each pair", caption) if svg else None


def _mix_figure(verdict: Verdict) -> Figure | None:
    """The sweep of shares with both break-evens; None where there was none."""
    even = verdict.break_even
    if even is None or even.found is None or not even.found.points:
        return None
    found, primary = even.found, answer.primary_of(verdict.comparisons)
    arms = f"{primary.arm} − {primary.against}" if primary else "arm − against"
    caption = (
        f"Mean time to first token, {arms}, over the share of requests that return to an evicted prefix: the estimate "
        f"over {answer.count(found.pairs, 'pair')} with its interval, and the line. Below zero it pays. "
        f"{answer.sentence(answer.break_even_text(even) or '')}"
    )
    svg = plots.mix_plot(found, even, f"{arms}, mean TTFT", caption)
    return Figure(Markup(svg), "The sweep of shares", caption) if svg else None


def _forest_figure(comparisons: Sequence[ComparisonResult]) -> Figure | None:
    rows = []
    for item in comparisons:
        if item.effect_scale != "ratio" or item.effect is None:
            continue
        name = answer.SHORT_NAMES.get(item.metric, item.metric)
        other = f" against {item.against_phase}" if item.against_phase else ""
        label = f"{item.phase}{other}: {name}"
        rows.append(plots.ForestRow(label, item.effect, item.ci_low, item.ci_high, item.margin, item.role == "primary"))
    left_out = sum(item.effect_scale != "ratio" for item in comparisons)
    caption = (
        "Effect of each comparison as a ratio, with its interval. The band is ± the margin: wholly outside it is "
        "better or worse, wholly inside it is equivalent, else undecided. The diamond decides."
    )
    if left_out:
        caption += f" Not drawn, being no ratio: {answer.count(left_out, 'comparison')}, in the table."
    svg = plots.forest_plot(rows, caption)
    return Figure(Markup(svg), "Every comparison", caption, is_tall=True) if svg else None


def _ecdf_figure(phase: str, records: Sequence[RunRecord], arms: Sequence[str]) -> Figure | None:
    times: dict[str, list[float | None]] = {
        arm: [request.ttft_seconds for item in _phases_of(records, arm, phase) for request in item.requests]
        for arm in arms
    }
    caption = (
        f"Share of the requests of phase {phase} whose first token had come after so long. Further left is sooner. "
        "Failed requests count, so their arm's line ends below 100 %."
    )
    svg = plots.ecdf_plot(times, caption)
    return Figure(Markup(svg), "Every request", caption) if svg else None


# -------------------------------------------------------------------------------------------------------- conditions


def _condition_groups(records: Sequence[RunRecord]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Host → (name, value) of its conditions. A value that changed between runs says so."""
    hosts = list(dict.fromkeys(record.host for record in records))[:CONDITION_HOSTS_SHOWN_MAX]
    groups = []
    for host in hosts:
        own = [record for record in records if record.host == host]
        groups.append((host, [(name, _distinct(map(read, own))) for name, read in CONDITIONS.items()]))
    return groups


def _distinct(values: Iterable[str]) -> str:
    seen = [value for value in dict.fromkeys(values) if value]
    if len(seen) > 1:
        shown = " · ".join(seen[:4]) + (" · …" if len(seen) > 4 else "")
        return f"{shown} (changed between runs)"
    return seen[0] if seen else answer.NOT_MEASURED


def _gpus(record: RunRecord) -> str:
    gpus = [" ".join(str(value) for value in gpu.values()) for gpu in record.conditions.gpus]
    return "; ".join(gpus) or "none"


def _tiers(record: RunRecord) -> str:
    tiers = record.capacity.tier_bytes
    chunks = record.capacity.chunk_tokens
    return "; ".join(
        f"{arm}: {answer.bytes_text(size)} ({size:,} bytes)" + (f", chunks of {chunks[arm]}" if arm in chunks else "")
        for arm, size in tiers.items()
    )


def _peak_share(records: Iterable[float | None]) -> str:
    return answer.share_text(_largest(records))


CONDITIONS: dict[str, Callable[[RunRecord], str]] = {
    "vLLM": lambda record: record.resolved.vllm_version if record.resolved else "",
    "vLLM as pinned": lambda record: record.vllm_version_pinned,
    "Model": lambda record: f"{record.model.name}, {record.model.weights} weights",
    "Model revision": lambda record: record.model.revision,
    "KV cache per token": lambda record: answer.bytes_text(record.model.kv_bytes_per_token),
    "Engine KV cache": lambda record: (
        f"{record.capacity.usable_gpu_blocks:,} usable blocks of {record.capacity.block_tokens} tokens = "
        f"{record.capacity.usable_gpu_blocks * record.capacity.block_tokens:,} tokens"
    ),
    "CPU tier": _tiers,
    "CPU": lambda record: f"{record.conditions.cpu_model}, {record.conditions.cpus} CPUs",
    "RAM": lambda record: answer.bytes_text(record.conditions.ram_total_bytes),
    "GPUs": _gpus,
    "Driver": lambda record: record.conditions.driver_version or "",
    "OS": lambda record: record.conditions.os,
    "Kernel": lambda record: record.conditions.kernel,
    "Python": lambda record: record.conditions.python,
    "Governor": lambda record: record.conditions.governor or "",
    "Huge pages": lambda record: record.conditions.transparent_hugepages or "",
    "Clock source": lambda record: record.conditions.clock_source or "",
    "Boot": lambda record: record.conditions.boot_id,
    "Installed packages, sha256": lambda record: record.resolved.packages_sha256 if record.resolved else "",
    "Plan, sha256": lambda record: record.plan_sha256,
    "kvtrial": lambda record: record.kvtrial_version,
}


def _launches(records: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """(arm, command line) of each arm, as first started."""
    launches = {}
    for record in records:
        if record.arm not in launches:
            launches[record.arm] = "\n".join(
                " ".join([*(f"{name}={shlex.quote(value)}" for name, value in sorted(engine.env.items())),
                          shlex.join(engine.argv)])
                for engine in record.launch.engines()
            )  # fmt: skip
    return list(launches.items())


def _resolved_config(records: Sequence[RunRecord], arm: str) -> dict[str, str]:
    for record in records:
        if record.arm == arm and record.resolved is not None:
            found = {**record.resolved.config, **{f"log: {key}": v for key, v in record.resolved.log_facts.items()}}
            return {key: _plain(value) for key, value in sorted(found.items())}
    return {}


def _plain(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, sort_keys=True)
    return answer.one_line(text, 300)


def _configuration_differences(records: Sequence[RunRecord], arms: Sequence[str]) -> list[Row]:
    """Entries of the resolved configuration that are not the same in all arms."""
    configs = [_resolved_config(records, arm) for arm in arms]
    keys = sorted({key for config in configs for key in config})
    rows = [Row(key, [config.get(key, "–") for config in configs]) for key in keys]
    return [row for row in rows if len(set(row.cells)) > 1][:CONFIG_ENTRIES_MAX]


def _configurations(records: Sequence[RunRecord], arms: Sequence[str]) -> list[tuple[str, str]]:
    """(arm, resolved configuration as lines)."""
    found = []
    for arm in arms:
        config = _resolved_config(records, arm)
        if config:
            lines = [f"{key} = {value}" for key, value in config.items()]
            found.append((arm, "\n".join(lines[:CONFIG_ENTRIES_MAX])))
    return found


def _prompt_rows(records: Sequence[RunRecord]) -> list[Row]:
    """Phase → requests, lengths, concurrency and the hash of its prompts in the first pair; a row a phase."""
    if not records:
        return []
    first = next((record for record in records if record.outcome == "completed"), records[0])
    rows = []
    for phase in first.phases:
        lengths = sorted({item.prompt_tokens for item in phase.requests if item.prompt_tokens is not None})
        outputs = sorted({item.max_tokens for item in phase.requests})
        cells = [
            str(phase.sent),
            _range(lengths),
            _range(outputs),
            _arrivals(phase),
            answer.seconds_text(phase.seconds),
            phase.prompts_sha256[:16],
        ]
        rows.append(Row(phase.name, cells))
    return rows


def _arrivals(phase: PhaseRecord) -> str:
    if phase.concurrency is not None:
        return str(phase.concurrency)
    return phase.arrivals or "open loop"


def _range(values: Sequence[int]) -> str:
    if not values:
        return "–"
    return f"{values[0]:,}" if values[0] == values[-1] else f"{values[0]:,} to {values[-1]:,}"


def _provenance(campaign: dict[str, Any]) -> list[tuple[str, str]]:
    """campaign.json without the protocol and the plan, flattened to (dotted name, value)."""
    found: list[tuple[str, str]] = []

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), inner)
        elif prefix:
            found.append((prefix, _plain(value)))

    walk("", {key: value for key, value in campaign.items() if key not in ("plan", "protocol")})
    return found[:HOSTS_SHOWN_MAX]


def _commands(verdict: Verdict, records: Sequence[RunRecord], campaign: dict[str, Any]) -> list[tuple[str, str]]:
    """(what it does, command) pairs, to be copied."""
    results = f"results/{verdict.campaign}"
    commands = []
    if isinstance(campaign.get("command"), str):
        commands.append(("The campaign again", campaign["command"]))
    if records:
        record = f"{results}/runs/{records[0].host}/{records[0].run}/record.json"
        commands.append(("One run again, from its record", f"kvtrial reproduce {shlex.quote(record)}"))
    commands.append(("The verdict again, from the records", f"kvtrial analyze {shlex.quote(results)}"))
    return commands


# -------------------------------------------------------------------------------------------------------- the runs


def _run_rows(records: Sequence[RunRecord]) -> list[Row]:
    """A row a run with a link to its record; runs with a fault are kept where the table is cut."""
    kept = list(records)
    if len(kept) > RUNS_SHOWN_MAX:
        chosen = sorted(kept, key=lambda record: record.outcome == "completed")[:RUNS_SHOWN_MAX]
        kept = sorted(chosen, key=lambda record: (record.host, record.pair, record.position, record.run))
    rows = []
    for record in kept:
        times, samples = record.times, record.samples
        fault = record.fault
        cells = [
            f"{record.pair}{' (spare)' if record.spare else ''}",
            record.arm,
            answer.seconds_text(times.start_seconds),
            answer.seconds_text(times.phases_seconds),
            answer.seconds_text(times.stop_seconds),
            answer.bytes_text(samples.ram_used_peak_bytes) if samples else answer.NOT_MEASURED,
            record.outcome.replace("_", " "),
            f"{fault.fault}: {answer.one_line(fault.detail, 160)}" if fault else "",
        ]
        path = PurePosixPath("runs") / record.host / record.run / "record.json"
        link = "./" + quote(str(path))
        rows.append(Row(f"{record.host} / {record.run}", cells, kind=record.outcome, link=link))
    return rows


def _time_rows(verdict: Verdict) -> list[Row]:
    budget = verdict.time_budget
    if budget is None:
        return []
    parts = {
        "engine starts": budget.engine_start_seconds,
        "phases (the measurement)": budget.phases_seconds,
        "engine stops": budget.engine_stop_seconds,
        "the rest": budget.other_seconds,
    }
    whole = sum(value for value in parts.values() if math.isfinite(value))
    rows = [
        Row(name, [answer.seconds_text(value), answer.share_text(value / whole) if whole > 0 else "–"])
        for name, value in parts.items()
    ]
    if budget.install_seconds is not None:
        rows.append(Row("install (before, not in the shares)", [answer.seconds_text(budget.install_seconds), "–"]))
    return [*rows, Row("in all", [answer.seconds_text(budget.total_seconds), ""], kind="total")]


def _card_rows(records: Sequence[RunRecord], arms: Sequence[str]) -> list[Row]:
    """What the load client says of itself, an arm a column: the worst over all phases, CPU share the median."""
    columns = []
    for arm in arms:
        own = [record for record in records if record.arm == arm]
        cards = [phase.card for record in own for phase in record.phases]
        samples = [record.samples for record in own if record.samples is not None]
        columns.append(
            {
                "sent late, p95, worst phase": answer.seconds_text(
                    _largest(card.dispatch_lag_p95_seconds for card in cards)
                ),
                "sent late, worst request": answer.seconds_text(
                    _largest(card.dispatch_lag_max_seconds for card in cards)
                ),
                "event loop late, worst": answer.seconds_text(_largest(card.loop_lag_max_seconds for card in cards)),
                "client CPU, median share of one core": answer.share_text(
                    _median(card.client_cpu_share for card in cards)
                ),
                "longest garbage collection": answer.seconds_text(
                    _largest(card.gc_pause_max_seconds for card in cards)
                ),
                "connections opened": _count_text(sum(card.connections_opened for card in cards)),
                "stolen CPU, worst phase": _peak_share(card.steal_share for card in cards),
                "foreign CPU, worst run": _peak_share(sample.foreign_cpu_share for sample in samples),
                "clock": _distinct(card.clock for card in cards),
            }
        )
    names = list(columns[0]) if columns else []
    return [Row(name, [column[name] for column in columns]) for name in names]
