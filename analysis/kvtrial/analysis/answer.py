"""What a verdict says, in plain English: ten lines for a terminal, and the wording that the report shares with them."""

import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from kvtrial.analysis.breakeven import GAIN_NOT_SHOWN
from kvtrial.analysis.ladderanswer import ladder_lines
from kvtrial.record.calibration import NOT_CALIBRATED
from kvtrial.record.verdict import BreakEven, ComparisonResult, FoundBreakEven, GateResult, TimeBudget, Verdict, Word

NO_RECORD = "has no record of"
NOT_MEASURED = "not measured"
SIGNIFICANT_P = 0.05
LARGEST_PERCENT_AS_PERCENT = 1.5
"""Ratios up to this are said in percent, larger ones as "n times"."""

PHASE_SUBJECTS = {
    "return": "an evicted prefix",
    "noload_return": "an evicted prefix that may not be loaded",
    "gpu_hit": "a prefix still in the engine's KV cache",
    "fits_return": "a prefix of a set that fits the engine's KV cache",
    "miss": "a prompt never seen before",
    "populate": "a new prompt that is being stored",
    "above_onset": "a request above the onset of preemption",
    "queueing": "a request with more in flight than run at once",
    "ladder": "a request of the ladder",
}
MIX = re.compile(r"mix_(\d+)")
"""Phases of a sweep: the share of requests that return, in percent."""
MIX_SUBJECTS = {
    "mix": "a request of the declared mix",
    "trace": "a request of the trace",
}
OF_LENGTH = re.compile(r"(return|noload_return|gpu_hit|miss|populate)_(\d+k)")
"""Phases of one length of prefix, in thousands of tokens."""
TOGETHER = re.compile(r"(\w+)_together")
"""Phases whose requests are sent several at once."""
METRIC_NAMES = {
    "ttft_mean_seconds": "mean time to first token",
    "ttft_median_seconds": "median time to first token",
    "ttft_p95_seconds": "95th percentile of the time to first token",
    "inter_token_median_seconds": "median gap between tokens",
    "inter_token_p95_seconds": "95th percentile of the gap between tokens",
    "e2e_median_seconds": "median time from send to last token",
    "output_throughput_tokens_per_second": "output throughput",
    "ram_used_peak_bytes": "peak RAM",
    "e2e_p95_seconds": "95th percentile from send to last token",
    "longest_gap_p95_seconds": "95th percentile of a request's longest gap between tokens",
    "stall_seconds_per_request": "time of a request in stalls",
    "queue_seconds_per_request": "time of a request in the queue",
    "preemptions_per_1000_requests": "number of preemptions",
    "gpu_seconds_per_request": "GPU-seconds of a request",
}
SHORT_NAMES = {
    "ttft_mean_seconds": "first token (mean)",
    "ttft_median_seconds": "first token",
    "ttft_p95_seconds": "first token (p95)",
    "inter_token_p95_seconds": "gap between tokens (p95)",
    "e2e_median_seconds": "last token",
    "output_throughput_tokens_per_second": "throughput",
    "ram_used_peak_bytes": "peak RAM",
    "e2e_p95_seconds": "last token (p95)",
    "longest_gap_p95_seconds": "longest gap (p95)",
    "stall_seconds_per_request": "time in stalls",
    "queue_seconds_per_request": "time in the queue",
    "preemptions_per_1000_requests": "preemptions",
    "gpu_seconds_per_request": "GPU-seconds of a request",
}
SHORT_PLACES = {"run": "", "above_onset": " above the onset", "queueing": " while queueing", "ladder": " on the ladder"}
SCALED = ("seconds", "bytes")
SHORT_VERDICTS = {"BETTER": "better", "WORSE": "WORSE", "EQUIVALENT": "same", "INCONCLUSIVE": "undecided"}
MECHANISM_SHOWN = "CPU engine: the mechanism was shown; the times say nothing about GPUs."
EVIDENCE_LIMITS = {
    "gpu": "GPU engine: a result holds for these hosts, this model and this mix of requests.",
    "cpu": "CPU engine: its times say nothing about GPUs.",
    "standin": "STAND-IN engine, for tests only: nothing here says anything about vLLM.",
    None: "There is no evidence.",
}
PROOF_GATES = ("treatment_delivered", "prefix_evicted", "control_untreated")

GateState = Literal["failed", "undecided", "passed", "not_required"]


# ---------------------------------------------------------------------------------------------------------- numbers


def is_number(value: float | None) -> bool:
    """True for a finite number; None, NaN and infinity were not measured."""
    return value is not None and math.isfinite(value)


def seconds_text(value: float | None, *, signed: bool = False) -> str:
    """A duration: "34.2 ms" below a second, "1.23 s" below two minutes, else "7 min 16 s" or "2 h 5 min"."""
    if value is None or not math.isfinite(value):
        return NOT_MEASURED
    sign = "-" if value < 0 else "+" if signed else ""
    size = abs(value)
    if size < 0.9995:
        return f"{sign}{size * 1000:.3g} ms"
    if size < 120:
        return f"{sign}{size:.3g} s"
    minutes, rest = divmod(round(size), 60)
    hours, minutes = divmod(minutes, 60)
    whole, part = (f"{hours} h", f" {minutes} min" if minutes else "") if hours else (
        f"{minutes} min", f" {rest} s" if rest else ""
    )  # fmt: skip
    return f"{sign}{whole}{part}"


def bytes_text(value: float | None, *, signed: bool = False) -> str:
    """A size in binary units: "256 MiB"."""
    if value is None or not math.isfinite(value):
        return NOT_MEASURED
    sign = "-" if value < 0 else "+" if signed else ""
    size = abs(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{sign}{size:.4g} {unit}"
        size /= 1024
    return f"{sign}{size:.4g} TiB"


def share_text(value: float | None) -> str:
    """A share 0..1 in percent: two digits below 10 %, whole percent above."""
    if value is None or not math.isfinite(value):
        return NOT_MEASURED
    percent = value * 100
    return f"{percent:.2g} %" if abs(percent) < 9.95 else f"{percent:.0f} %"


def number_text(value: float | None) -> str:
    """A plain number with three significant digits, never in exponent form below a million; thousands are grouped."""
    if value is None or not math.isfinite(value):
        return NOT_MEASURED
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def p_text(value: float | None) -> str:
    """A p value without its leading zero: ".031"."""
    if value is None or not math.isfinite(value):
        return NOT_MEASURED
    return "<.001" if value < 0.001 else f"{value:.2g}".removeprefix("0")


def in_unit(value: float | None, unit: str, *, signed: bool = False) -> str:
    """`value` in its unit, in words: seconds and bytes get a readable scale."""
    if unit == "seconds":
        return seconds_text(value, signed=signed)
    if unit == "bytes":
        return bytes_text(value, signed=signed)
    if value is None or not math.isfinite(value):
        return NOT_MEASURED
    sign = "+" if signed and value >= 0 else ""
    return f"{sign}{number_text(value)} {unit}".rstrip()


def one_line(text: str, limit: int = 600) -> str:
    """`text` on one line, without control characters (a log line may hold terminal escapes), at most `limit` long."""
    clean = text
    if not text.isprintable():
        clean = re.sub(r"\x1b\[[0-9;?]*[ -/]*[@-~]", "", text)
        clean = "".join(character if character.isprintable() else " " for character in clean)
    clean = re.sub(r" {2,}", " ", clean).strip()
    return clean if len(clean) <= limit else clean[: limit - 1].rstrip() + "…"


def sentence(text: str, names: Collection[str] = ()) -> str:
    """`text` on one line, with a capital in front and a full stop at the end.

    An identifier in front stays as it is, and so does one of `names`: arms are written as they are declared.
    """
    line = one_line(text)
    if not line:
        return ""
    word = line.split()[0]
    first = line[0] if "_" in word or word.rstrip(":,;") in names else line[0].upper()
    return first + line[1:] + ("" if line[-1] in ".!?…" else ".")


# ------------------------------------------------------------------------------------------------------ comparisons


def unit_of(comparison: ComparisonResult) -> str:
    """The unit as its metric's name carries it; the field `unit` where the name carries none."""
    for suffix in ("tokens_per_second", "seconds", "bytes"):
        if comparison.metric.endswith(f"_{suffix}"):
            return suffix.replace("_", " ")
    return comparison.unit


def is_ttft(metric: str) -> bool:
    """True for a metric of the time to first token."""
    return metric.startswith("ttft")


def phase_subject(phase: str) -> str:
    """What a phase asks for: "an evicted prefix", "a request of a mix in which 25 % return to an evicted prefix"."""
    if mix := MIX.fullmatch(phase):
        return f"a request of a mix in which {int(mix[1])} % return to an evicted prefix"
    if found := OF_LENGTH.fullmatch(phase):
        return f"{phase_subject(found[1])} ({found[2]} tokens)"
    if found := TOGETHER.fullmatch(phase):
        return f"{phase_subject(found[1])}, several asked for at once"
    return PHASE_SUBJECTS.get(phase) or MIX_SUBJECTS.get(phase) or f"phase {phase}"


def subject_of(comparison: ComparisonResult) -> str:
    """What is compared: "the first token of an evicted prefix", "the peak RAM of a run"."""
    phase = comparison.phase
    if is_ttft(comparison.metric):
        average = "on average " if comparison.metric == "ttft_mean_seconds" else ""
        return f"{average}the first token of {phase_subject(phase)}"
    name = METRIC_NAMES.get(comparison.metric, comparison.metric.replace("_", " "))
    where = {
        "run": "of a run",
        "above_onset": "above the onset",
        "queueing": "with more in flight than run at once",
        "ladder": "over all levels",
    }
    return f"the {name} {where.get(phase) or f'in phase {phase}'}"


def against_of(comparison: ComparisonResult) -> str:
    """Against what, as the end of a sentence."""
    other = comparison.against_phase
    if comparison.arm == comparison.against and other:
        return f"in {comparison.arm} than in its own {other}"
    where = f" in {other}" if other and other != comparison.phase else ""
    return f"with {comparison.arm} than with {comparison.against}{where}"


def _direction_words(comparison: ComparisonResult) -> tuple[str, str, str]:
    """(verb, word for less, word for more) of the comparison's metric."""
    if is_ttft(comparison.metric):
        return "comes", "sooner", "later"
    if unit_of(comparison) == "seconds":
        return "is", "shorter", "longer"
    return "is", "lower", "higher"


def _size_text(comparison: ComparisonResult, value: float) -> str:
    """`value` on the comparison's scale as size and direction: "6.6 times sooner", "3 % higher", "285 MiB higher"."""
    _, less, more = _direction_words(comparison)
    if comparison.effect_scale == "difference":
        if value == 0:
            return "the same"
        return f"{in_unit(abs(value), unit_of(comparison))} {less if value < 0 else more}"
    if value <= 0:
        return NOT_MEASURED
    times = max(value, 1 / value)
    word = less if value < 1 else more
    if times > LARGEST_PERCENT_AS_PERCENT:
        return f"{times:.2g} times {word}" if times < 99.5 else f"{times:,.0f} times {word}"
    percent = abs(value - 1) * 100
    return "as before, within half a percent" if percent < 0.5 else f"{percent:.0f} % {word}"


def size_in_words(comparison: ComparisonResult) -> str:
    """The effect's size and direction: "comes 6.6 times sooner", "is 285 MiB higher".

    An interval that holds "no effect" has no direction: then both its ends are said.
    """
    effect, low, high = comparison.effect, comparison.ci_low, comparison.ci_high
    if effect is None or not math.isfinite(effect):
        return "was not measured"
    verb = _direction_words(comparison)[0]
    none = 1.0 if comparison.effect_scale == "ratio" else 0.0
    if low is not None and high is not None and low < none < high and math.isfinite(low) and math.isfinite(high):
        return f"{verb} anywhere from {_size_text(comparison, low)} to {_size_text(comparison, high)}"
    return f"{verb} {_size_text(comparison, effect)}"


def effect_text(comparison: ComparisonResult) -> str:
    """The effect alone: "x0.151", or "+285 MiB" on scale difference."""
    if not is_number(comparison.effect):
        return NOT_MEASURED
    if comparison.effect_scale == "ratio":
        return f"x{number_text(comparison.effect)}"
    return in_unit(comparison.effect, unit_of(comparison), signed=True)


def interval_text(comparison: ComparisonResult) -> str:
    """The interval's bounds: "0.138 to 0.194"."""
    low, high = comparison.ci_low, comparison.ci_high
    if not (is_number(low) and is_number(high)):
        return "no interval"
    if comparison.effect_scale == "ratio":
        return f"{number_text(low)} to {number_text(high)}"
    unit = unit_of(comparison)
    shown = in_unit(low, unit, signed=True)
    # A scaled unit differs between the ends, any other is said once.
    return f"{shown if unit in SCALED else shown.removesuffix(unit).rstrip()} to {in_unit(high, unit, signed=True)}"


def margin_text(comparison: ComparisonResult) -> str:
    """The margin: "5 %", or in the metric's unit on scale difference."""
    if comparison.effect_scale == "ratio":
        return share_text(comparison.margin)
    return in_unit(comparison.margin, unit_of(comparison))


def count(number: int, noun: str) -> str:
    """ "1 pair", "6 pairs"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def statistics_text(comparison: ComparisonResult) -> str:
    """ "x0.151, 97 % interval 0.138 to 0.194, 6 pairs, p .031"."""
    parts = [effect_text(comparison)]
    if is_number(comparison.ci_low) and is_number(comparison.ci_high):
        confidence = share_text(comparison.confidence) if is_number(comparison.confidence) else ""
        parts.append(f"{confidence} interval {interval_text(comparison)}".strip())
    else:
        parts.append("no interval")
    parts.append(count(comparison.pairs, "pair"))
    if is_number(comparison.p_value):
        parts.append(f"p {p_text(comparison.p_value)}")
    return ", ".join(parts)


def delta_text(comparison: ComparisonResult) -> str:
    """The seed's number: "delta_ttft_seconds = -0.2 (median of the pairs; negative: sooner)"; "" where it has none."""
    delta = comparison.delta_ttft_seconds
    if delta is None or not math.isfinite(delta):
        return ""
    if abs(delta) < 0.0005:
        return "delta_ttft_seconds = 0.000 (median of the pairs; the same)"
    meaning = f"median of the pairs; {'negative: sooner' if delta < 0 else 'positive: later'}"
    return f"delta_ttft_seconds = {delta:+.3f} ({meaning})"


def effect_sentence(comparison: ComparisonResult) -> str:
    """The effect in words with its statistics, one sentence."""
    if not is_number(comparison.effect):
        return sentence(f"{subject_of(comparison)} could not be compared: {count(comparison.pairs, 'pair')}")
    words = f"{subject_of(comparison)} {size_in_words(comparison)} {against_of(comparison)}"
    p_value = comparison.p_value
    if comparison.verdict == "INCONCLUSIVE" and (p_value is None or not p_value < SIGNIFICANT_P):
        words = f"in {count(comparison.pairs, 'pair')}, which prove no difference yet, {words}"
    return sentence(f"{words} ({statistics_text(comparison)})")


def arms_in(verdict: Verdict) -> frozenset[str]:
    """The names of the arms that a verdict is of."""
    compared = frozenset(arm for item in verdict.comparisons for arm in (item.arm, item.against))
    return compared | frozenset(arm.arm for arm in (verdict.ladder.arms if verdict.ladder else ()))


def primary_of(comparisons: Iterable[ComparisonResult]) -> ComparisonResult | None:
    """The comparison that decides, or None."""
    return next((comparison for comparison in comparisons if comparison.role == "primary"), None)


# ------------------------------------------------------------------------------------------------------------ gates


def gate_state(results: Sequence[GateResult]) -> GateState:
    """The state of one gate over hosts: one failure fails it, one "cannot be decided" leaves it undecided.

    Hosts that don't require it don't count, unless none does.
    """
    if any(result.passed is False for result in results):
        return "failed"
    if any(result.undecided for result in results):
        return "undecided"
    return "passed" if any(result.passed for result in results) else "not_required"


def gates_by_name(verdict: Verdict) -> dict[str, list[tuple[str, GateResult]]]:
    """Gate name → (host, result) of every host, failed gates first. Host "" is the campaign's own result.

    The campaign's result is left out where the hosts already say the same.
    """
    found: dict[str, list[tuple[str, GateResult]]] = {}
    for host in verdict.hosts:
        for result in host.gates:
            found.setdefault(result.gate, []).append((host.host, result))
    for result in verdict.gates:
        known = found.setdefault(result.gate, [])
        if not known or gate_state([other for _, other in known]) != gate_state([result]):
            known.append(("", result))
    order = {"failed": 0, "undecided": 1, "passed": 2, "not_required": 3}
    ranked = sorted(found.items(), key=lambda item: order[gate_state([result for _, result in item[1]])])
    return dict(ranked)


def _gates_in_state(verdict: Verdict, state: GateState) -> list[str]:
    gates = gates_by_name(verdict)
    return [name for name, results in gates.items() if gate_state([result for _, result in results]) == state]


def gates_text(verdict: Verdict) -> str:
    """ "17 of 17 gates passed", else with the failed, the undecided and those that were not required named."""
    spared = _gates_in_state(verdict, "not_required")
    total = len(gates_by_name(verdict)) - len(spared)
    if not total:
        return "no gate was checked"
    text = f"{len(_gates_in_state(verdict, 'passed'))} of {total} gates passed"
    failed, undecided = _gates_in_state(verdict, "failed"), _gates_in_state(verdict, "undecided")
    if failed:
        text += f"; failed: {', '.join(failed)}"
    if undecided:
        text += f"; not decidable here: {', '.join(undecided)}"
    if spared:
        text += f"; not required here: {', '.join(spared)}"
    return text


def _gate_sentences(verdict: Verdict, limit: int) -> list[str]:
    """The failed gates' own sentences, then the undecided ones'; left out where the verdict's reason has said it."""
    sentences = []
    for name, results in gates_by_name(verdict).items():
        bad = [(host, result) for host, result in results if not result.holds]
        if not bad:
            continue
        state = "failed" if any(result.passed is False for _, result in bad) else "could not be decided"
        host, result = min(bad, key=lambda item: item[1].passed is None)
        if one_line(result.detail) and one_line(result.detail) in one_line(verdict.reason):
            continue
        hosts = len({name for name, _ in bad if name})
        where = (
            f" on {host}" + (f" and {hosts - 1} more" if hosts > 1 else "") if host and len(verdict.hosts) > 1 else ""
        )
        sentences.append(f"Gate {name} {state}{where}: {sentence(result.detail)}")
    if limit == 1:
        return sentences[:1]
    if len(sentences) > limit:
        left_out = len(sentences) - limit + 1
        sentences = [*sentences[: limit - 1], f"{left_out} more gates did not pass; the report lists them."]
    return sentences


# ------------------------------------------------------------------------------------------------------------ lines


def runs_text(verdict: Verdict) -> str:
    """ "12 of 12 runs valid", with dropped runs and engine faults where there were any."""
    runs = [host.runs for host in verdict.hosts]
    text = f"{sum(run.valid for run in runs):,} of {count(sum(run.planned for run in runs), 'run')} valid"
    dropped, faults = sum(run.dropped for run in runs), sum(run.engine_faults for run in runs)
    if dropped:
        text += f", {dropped:,} dropped with their pairs for a fault of the environment"
    if faults:
        text += f", {count(faults, 'engine fault')}"
    return text if len(runs) < 2 else f"{text} on {len(runs):,} hosts"


def engine_faults(verdict: Verdict) -> int:
    """Engine faults over all hosts."""
    return sum(host.runs.engine_faults for host in verdict.hosts)


def headline(verdict: Verdict) -> str:
    """The verdict in one sentence, the word left out: what it means, or its cause."""
    primary = primary_of(verdict.comparisons)
    plain = primary is not None and is_number(primary.effect) and primary.verdict == verdict.verdict
    if primary is None or not plain or engine_faults(verdict) or verdict.verdict in ("INCONCLUSIVE", "INVALID"):
        return sentence(verdict.reason, arms_in(verdict)) or "No reason was given."
    tokens = prefix_tokens_of(primary, verdict)
    subject = subject_of(primary) + (f" ({count(tokens, 'token')})" if tokens is not None else "")
    if verdict.verdict == "EQUIVALENT":
        said = f"{primary.arm} and {primary.against} are the same within {margin_text(primary)} for {subject}"
        return sentence(said, arms_in(verdict))
    return sentence(f"{subject} {size_in_words(primary)} {against_of(primary)}")


def _beside_the_evidence(verdict: Verdict) -> list[str]:
    """What must be said beside the evidence: that nobody knows how far the client is off, which records are gone."""
    return [caveat for caveat in verdict.caveats if caveat.startswith(NOT_CALIBRATED) or NO_RECORD in caveat]


def evidence_text(verdict: Verdict) -> str:
    """What this kind of evidence can't say. A mechanism is called shown only where the treatment's gate passed."""
    treated = any(item.gate == "treatment_delivered" and item.passed for host in verdict.hosts for item in host.gates)
    if verdict.evidence == "cpu" and treated and verdict.verdict != "INVALID":
        return MECHANISM_SHOWN
    return EVIDENCE_LIMITS[verdict.evidence]


def _verdict_line(verdict: Verdict) -> str:
    word = verdict.verdict
    if word == "INVALID":
        return f"INVALID, no answer can be drawn: {headline(verdict)}"
    if engine_faults(verdict):
        faults = count(engine_faults(verdict), "engine fault")
        return f"{word}, with {faults} (a result of that arm, never repeated): {headline(verdict)}"
    return f"{word}: {headline(verdict)}"


def _effect_line(verdict: Verdict) -> str | None:
    primary = primary_of(verdict.comparisons)
    if primary is None:
        return None
    delta = delta_text(primary)
    line = f"Effect: {effect_sentence(primary)}" + (f" {delta}." if delta else "")
    note = one_line(primary.note)
    return f"{line} {sentence(note)}" if note and note not in one_line(verdict.reason) else line


def _short(comparison: ComparisonResult, with_arm: bool) -> str:
    interval = f" ({interval_text(comparison)})" if is_number(comparison.ci_low) else ""
    name = SHORT_NAMES.get(comparison.metric, comparison.metric)
    where = SHORT_PLACES.get(comparison.phase, f" in {comparison.phase}")
    arm = f", {comparison.arm}:" if with_arm else ""
    word = SHORT_VERDICTS.get(comparison.verdict, comparison.verdict)
    if is_within_a_size(comparison):
        # 36 GiB more are not the same, though they are what was declared for the tier.
        word = f"within the declared {margin_text(comparison)}"
    return f"{name}{where}{arm} {effect_text(comparison)}{interval} {word}"


def is_within_a_size(comparison: ComparisonResult) -> bool:
    """Whether EQUIVALENT means within a size that was declared, and not the same."""
    return (comparison.verdict, comparison.effect_scale, unit_of(comparison)) == ("EQUIVALENT", "difference", "bytes")


def elsewhere_of(verdict: Verdict) -> tuple[list[ComparisonResult], list[ComparisonResult]]:
    """The guards, worst first, and what fits the engine's cache."""
    guards = [comparison for comparison in verdict.comparisons if comparison.role == "guard"]
    order = {"WORSE": 0, "INVALID": 1, "INCONCLUSIVE": 2, "EQUIVALENT": 3, "BETTER": 4}
    guards.sort(key=lambda comparison: order[comparison.verdict])
    return guards, [item for item in verdict.comparisons if item.role == "secondary" and item.phase == "fits_return"]


def primary_arm(verdict: Verdict) -> str:
    """The arm that the deciding comparison is about; "" without one."""
    primary = primary_of(verdict.comparisons)
    return primary.arm if primary is not None else ""


def guards_of_primary(verdict: Verdict, guards: Sequence[ComparisonResult]) -> tuple[list[ComparisonResult], int]:
    """The guards of the arm that the primary comparison is about, and how many of the others are WORSE."""
    own = [guard for guard in guards if primary_arm(verdict) in ("", guard.arm)]
    return own, sum(guard.verdict == "WORSE" for guard in guards if guard not in own)


def elsewhere_text(verdict: Verdict) -> str | None:
    """What the variant costs outside the primary: the guards, worst first, then what fits the engine's cache."""
    guards, fits = elsewhere_of(verdict)
    if not guards and not fits:
        return None
    own, others_worse = guards_of_primary(verdict, guards)
    worse = [comparison for comparison in own if comparison.verdict == "WORSE"]
    undecided = [comparison for comparison in own if comparison.verdict in ("INCONCLUSIVE", "INVALID")]
    if worse:
        summary = f"{count(len(worse), 'guard')} of {len(own)} WORSE, so it must not be adopted"
    elif undecided:
        summary = f"no guard is shown to be worse, {len(undecided)} of {len(own)} undecided"
    elif own:
        summary = f"none of {count(len(own), 'guard')} is worse"
    else:
        summary = "no guard was declared"
    if len(own) < len(guards):
        # With one arm alone there is nothing to tell apart.
        others = f"with other arms {others_worse} of {len(guards) - len(own)} WORSE"
        summary = f"with {primary_arm(verdict)} {summary} ({others})"
    listed = [*guards, *fits]
    several = len({comparison.arm for comparison in listed}) > 1
    return f"{summary}: {'; '.join(_short(comparison, several) for comparison in listed)}."


def _proof_line(verdict: Verdict) -> str:
    """Gates and runs counted, then what the engine's own counters say of the treatment."""
    gates = gates_by_name(verdict)
    proofs = [gates[name][0] for name in PROOF_GATES if name in gates]
    several = len(verdict.hosts) > 1
    said = " ".join(
        sentence((f"On {host}: " if several and host else "") + one_line(result.detail, 240))
        for host, result in proofs
        if result.passed is True
    )
    return f"Proof: {gates_text(verdict)}, {runs_text(verdict)}. {said}".rstrip()


def share_is_told(even: BreakEven | FoundBreakEven, word: Word) -> bool:
    """Whether a break-even share may stand as one number.

    The verdict has to show a difference, the return a gain, and the interval has to rule some share out.
    """
    if even.hit_share is None or even.ci_low is None or even.ci_high is None or GAIN_NOT_SHOWN in even.note:
        return False
    return word not in ("INCONCLUSIVE", "INVALID") and is_number(even.hit_share) and spans_less(even)


def spans_less(even: BreakEven | FoundBreakEven) -> bool:
    """Whether the interval of a break-even share rules any share out."""
    low, high = even.ci_low, even.ci_high
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return False
    return low > 0 or high < 1


def break_even_text(break_even: BreakEven | None, word: Word = "BETTER") -> str | None:
    """The break-even hit share in words, the one that a sweep found before the one computed; None where none is due.

    `word`: the verdict. Where it is INCONCLUSIVE no share is named, but the interval that holds it, if there is one.
    """
    if break_even is None:
        return None
    computed, arms = _computed_text(break_even, word), arms_of(break_even)
    arms = f"{arms}: " if arms else ""
    if break_even.found is None:
        return f"{arms}{computed}"
    found = found_text(break_even.found, word, prefix_length(break_even))
    return f"{arms}{found} Computed from a return and a miss by themselves, {computed}"


def _not_told_text(even: BreakEven | FoundBreakEven) -> str:
    """What stands for a share that is not shown."""
    if not spans_less(even):
        return "from which share of returning requests on it pays can't be told"
    sure = f"{share_text(even.confidence)} interval" if is_number(even.confidence) else "interval"
    return (
        "from which share of returning requests on it pays is not shown yet, only where it lies: "
        f"{share_text(even.ci_low)} to {share_text(even.ci_high)} ({sure})"
    )


def length_of(phase: str) -> str:
    """The length of prefix that a phase's name says: "16k"; "" where it says none."""
    found = OF_LENGTH.fullmatch(phase)
    return found[2] if found else ""


def prefix_length(even: BreakEven) -> str:
    """Tokens of the prefixes that a break-even share is of: "8,200"; by their phase's name "16k"; "" where unknown."""
    return f"{even.prefix_tokens:,}" if even.prefix_tokens is not None else length_of(even.hit)


def prefix_tokens_of(comparison: ComparisonResult, verdict: Verdict) -> int | None:
    """Tokens of the prefixes that a comparison of first tokens is of, where its phase's name says none."""
    even = verdict.break_even
    if even is None or even.hit != comparison.phase or length_of(even.hit) or not is_ttft(comparison.metric):
        return None
    return even.prefix_tokens


def arms_of(even: BreakEven) -> str:
    """ "offload against control"; "" in a verdict of a release that did not keep it."""
    return f"{even.arm} against {even.against}" if even.arm else ""


def _share_with_interval(
    share: float, low: float | None, high: float | None, confidence: float | None, length: str
) -> str:
    """ "12 % of requests return to an evicted prefix of 8,200 tokens (97 % interval 8 % to 17 %)"."""
    of_length = f" of {length} tokens" if length else ""
    text = f"{share_text(share)} of requests return to an evicted prefix{of_length}"
    if not (is_number(low) and is_number(high)):
        return text
    sure = f"{share_text(confidence)} " if is_number(confidence) else ""
    return f"{text} ({sure}interval {share_text(low)} to {share_text(high)})"


def found_text(found: FoundBreakEven, word: Word = "BETTER", length: str = "") -> str:
    """The break-even that a sweep of shares found, in a sentence or two."""
    if found.pays != "above" or found.hit_share is None:
        return f"Found by the sweep: {one_line(found.note)}."
    if not share_is_told(found, word):
        text = sentence(f"found by the sweep of {len(found.points)} shares: {_not_told_text(found)}")
        return f"{text} {sentence(found.note)}".rstrip()
    share = _share_with_interval(found.hit_share, found.ci_low, found.ci_high, found.confidence, length)
    text = f"found by the sweep of {len(found.points)} shares: it pays when more than {share}"
    if found.minus_computed_low is not None and found.minus_computed_high is not None:
        agree = found.minus_computed_low <= 0 <= found.minus_computed_high
        text += f"; that {'agrees' if agree else 'does not agree'} with the computed one"
    return f"{sentence(text)} {sentence(found.note)}".rstrip()


def _computed_text(break_even: BreakEven, word: Word) -> str:
    if break_even.hit_share is None or not math.isfinite(break_even.hit_share):
        return f"no hit share can be given. {sentence(break_even.note)}".rstrip()
    if not share_is_told(break_even, word):
        return f"{_not_told_text(break_even)}. {sentence(break_even.note)}".rstrip()
    share = _share_with_interval(
        break_even.hit_share,
        break_even.ci_low,
        break_even.ci_high,
        break_even.confidence,
        prefix_length(break_even),
    )
    text = f"it pays when more than {share}"
    gain, cost = break_even.gain_seconds, break_even.cost_seconds
    if gain is not None and cost is not None and math.isfinite(gain) and math.isfinite(cost):
        costs = f"a miss costs {seconds_text(cost)}" if cost > 0 else f"a miss is not slower ({seconds_text(cost)})"
        text += f"; a return gains {seconds_text(gain)}, {costs}"
    if is_number(break_even.own_hit_share):
        text += f"; your share is {share_text(break_even.own_hit_share)}"
    return f"{text}. {sentence(break_even.note)}".rstrip()


def noise_text(comparison: ComparisonResult | None) -> str | None:
    """The least effect that this many pairs can detect, and what follows for EQUIVALENT."""
    if comparison is None or comparison.mde is None or not math.isfinite(comparison.mde) or comparison.mde <= 0:
        return None
    pairs = count(comparison.pairs, "pair")
    if comparison.effect_scale == "difference":
        return f"{pairs} of this noise can detect a difference of {in_unit(comparison.mde, unit_of(comparison))}."
    ratio = max(comparison.mde, 1 / comparison.mde)
    text = f"{pairs} of this noise can detect a change of x{number_text(ratio)} ({share_text(ratio - 1)}) or more"
    if ratio > 1 + comparison.margin:
        text += f"; EQUIVALENT within {share_text(comparison.margin)} was out of reach"
    return f"{text}."


def time_text(budget: TimeBudget | None) -> str | None:
    """Where the campaign's time went."""
    if budget is None:
        return None
    parts = [
        f"engine starts {seconds_text(budget.engine_start_seconds)}",
        f"phases {seconds_text(budget.phases_seconds)}",
        f"stops {seconds_text(budget.engine_stop_seconds)}",
        f"the rest {seconds_text(budget.other_seconds)} ({share_text(budget.other_share)})",
    ]
    if budget.install_seconds:
        parts.insert(0, f"install {seconds_text(budget.install_seconds)}")
    return f"{seconds_text(budget.total_seconds)}: {', '.join(parts)}."


def next_text(verdict: Verdict) -> str:
    """What to do next, and why."""
    action, reason = one_line(verdict.recommendation.action), one_line(verdict.recommendation.reason)
    if action and reason in one_line(verdict.reason):
        return sentence(action)
    if not action:
        return sentence(reason, arms_in(verdict))
    return f"{sentence(action)} {sentence(reason, arms_in(verdict))}".rstrip()


def _labelled(label: str, text: str | None, names: Collection[str] = ()) -> str | None:
    return f"{label}: {sentence(text, names)}" if text else None


def ten_lines(verdict: Verdict, directory: str) -> list[str]:
    """At most ten lines that answer the protocol's question in a terminal. `directory`: where the results lie.

    The order follows the verdict: an answer is followed by its size and cost, a missing answer by its cause.
    """
    first = _verdict_line(verdict)
    evidence = " ".join(
        [f"Evidence: {sentence(evidence_text(verdict))}", *map(sentence, _beside_the_evidence(verdict))]
    )
    noise = _labelled("Limit", noise_text(primary_of(verdict.comparisons)))
    elsewhere = _labelled("Elsewhere", elsewhere_text(verdict))
    if verdict.tier_budget is not None:
        elsewhere = _labelled("RAM budget", verdict.tier_budget.advice)
    break_even = _labelled("Break-even", break_even_text(verdict.break_even, verdict.verdict), arms_in(verdict))
    time, proof = _labelled("Time", time_text(verdict.time_budget)), _proof_line(verdict)
    end = [_labelled("Next", next_text(verdict)), f"Report: {one_line(directory.rstrip('/'))}/report.html"]
    lines: list[str | None]
    ladder = ladder_lines(verdict)
    if ladder:
        lines = [first, _effect_line(verdict), *ladder, proof, *end]
    elif verdict.verdict == "INVALID":
        counts = f"Counts: {runs_text(verdict)}; {gates_text(verdict)}."
        lines = [first, *_gate_sentences(verdict, 4), counts, evidence, time, *end]
    elif verdict.verdict == "INCONCLUSIVE":
        causes = _gate_sentences(verdict, 1)
        body = [_effect_line(verdict), noise, elsewhere, proof, break_even, evidence, time]
        lines = [first, *causes, *(body[:-1] if causes else body), *end]
    else:
        lines = [first, _effect_line(verdict), elsewhere, proof, break_even, noise, evidence, time, *end]
    return [line for line in lines if line]


def cause(verdict: Verdict) -> str:
    """One sentence for the last line of a command that failed: the word and why."""
    reason = sentence(verdict.reason, arms_in(verdict))
    if not reason:
        failed = _gate_sentences(verdict, 1)
        reason = failed[0] if failed else "No reason was given."
    return f"{verdict.verdict}: {reason}"
