"""The top of the report: the verdict in one sentence, its numbers, and what to do next. Pure."""

import math
import re
from collections.abc import Sequence

from kvtrial.analysis import answer
from kvtrial.analysis.report.comparisons import PREEMPTIONS, compact
from kvtrial.analysis.report.said import is_said, said_text
from kvtrial.analysis.report.words import Words
from kvtrial.record.verdict import BreakEven, ComparisonResult, FoundBreakEven, Verdict

MARKS = {"BETTER": "▲", "WORSE": "▼", "EQUIVALENT": "=", "INCONCLUSIVE": "?", "INVALID": "✕"}


def headline(verdict: Verdict, words: Words) -> str:
    """The verdict in one sentence, the word left out. In English it is the terminal's own."""
    if words.is_english or headline_is_quoted(verdict):
        return said_text(answer.headline(verdict), words)
    primary = answer.primary_of(verdict.comparisons)
    if verdict.verdict == "INVALID":
        if verdict.reason and is_said(verdict.reason, words):
            said = said_text(answer.sentence(verdict.reason, answer.arms_in(verdict)), words)
            return words("head.invalid_reason", reason=said[:1].lower() + said[1:])
        gate = _failed_gate(verdict)
        if gate is None:
            return words("head.invalid")
        return words("head.invalid_gate", gate=gate, meaning=words.or_else(f"gate.{gate}", "–"))
    assert primary is not None
    tokens = answer.prefix_tokens_of(primary, verdict)
    if verdict.verdict == "INCONCLUSIVE":
        return as_measured(primary, words, tokens)
    if verdict.verdict == "EQUIVALENT":
        return words(
            "head.equivalent",
            arm=primary.arm,
            against=primary.against,
            margin=words.local(answer.margin_text(primary)),
            what=_what(primary, words) + (f" ({words.length(tokens)})" if tokens is not None else ""),
        )
    return effect_words(primary, words, tokens)


def as_measured(comparison: ComparisonResult, words: Words, tokens: int | None = None) -> str:
    """An effect that is not shown yet, in a sentence. `tokens`: see effect_words."""
    effect = effect_words(comparison, words, tokens)
    return words("head.inconclusive", effect=effect[:1].lower() + effect[1:])


def headline_is_quoted(verdict: Verdict) -> bool:
    """Whether only the verdict's own sentence says the case, so that it is what another language has to say."""
    primary = answer.primary_of(verdict.comparisons)
    if verdict.verdict == "INVALID":
        return False
    if primary is None or not answer.is_number(primary.effect) or primary.verdict != verdict.verdict:
        return True
    return bool(answer.engine_faults(verdict)) or "engine fault" in verdict.reason


def _failed_gate(verdict: Verdict) -> str | None:
    """The gate that the verdict itself names as failed; one that is undecided has not failed."""
    for name, results in answer.gates_by_name(verdict).items():
        failed = answer.gate_state([result for _, result in results]) == "failed"
        if failed and f"gate {name} " in f"{verdict.reason} ":
            return name
    return None


def _what(comparison: ComparisonResult, words: Words) -> str:
    """The compared thing, as the catalogue's language names it: metric and phase."""
    return words("head.what", metric=words.metric(comparison.metric), phase=words.place(comparison.phase))


def effect_words(comparison: ComparisonResult, words: Words, tokens: int | None = None) -> str:
    """The effect in a sentence: what comes how much sooner with which arm. `tokens`: of the prefix, where said."""
    assert comparison.effect is not None
    size = _size(comparison, comparison.effect, words)
    low, high = comparison.ci_low, comparison.ci_high
    none = 1.0 if comparison.effect_scale == "ratio" else 0.0
    if low is not None and high is not None and low < none < high and math.isfinite(low) and math.isfinite(high):
        size = words("head.anywhere", low=_size(comparison, low, words), high=_size(comparison, high, words))
    is_ttft = answer.is_ttft(comparison.metric)
    subject = words.subject(comparison.phase) if is_ttft else words.place(comparison.phase)
    if is_ttft and tokens is not None:
        subject = words("subject.of_length", subject=subject, tokens=words.length(tokens))
    same = "_same" if size == words("size.as_before") else ""
    return words(
        f"head.{'ttft' if is_ttft else 'metric'}{same}",
        subject=subject,
        metric=_capital(words.metric(comparison.metric)),
        size=size,
        arm=comparison.arm,
        against=comparison.against,
    )


def interval_words(comparison: ComparisonResult, words: Words) -> str:
    """The interval in words, each end with its direction: "3 % later to 10 % later"."""
    low, high = comparison.ci_low, comparison.ci_high
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return words("no_interval")
    return words("spread", low=_size(comparison, low, words), high=_size(comparison, high, words))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _size(comparison: ComparisonResult, value: float, words: Words) -> str:
    """A size with its direction."""
    is_ttft = answer.is_ttft(comparison.metric)
    none = 1.0 if comparison.effect_scale == "ratio" else 0.0
    side = "less" if value < none else "more"
    direction = words(f"size.{'ttft' if is_ttft else 'metric'}.{side}")
    if comparison.effect_scale == "difference":
        if value == 0:
            return words("size.same")
        size = answer.in_unit(abs(value), answer.unit_of(comparison))
        # The Russian name of the metric has its unit.
        size = words.local(size) if words.is_english else compact(size, words)
        return words("size.by", size=size, direction=direction)
    if value <= 0:
        return words("not_measured")
    times = max(value, 1 / value)
    if times > answer.LARGEST_PERCENT_AS_PERCENT:
        said = f"{times:.2g}" if times < 99.5 else f"{times:,.0f}"
        form = "times" if "." in said or (said[-1] in "234" and said[-2:-1] != "1") else "times_many"
        return words(f"size.{form}", number=words.local(said), direction=direction)
    percent = abs(value - 1) * 100
    if percent < 0.5:
        return words("size.as_before")
    return words("size.by", size=words.local(f"{percent:.0f} %"), direction=direction)


def merits(verdict: Verdict, words: Words) -> list[tuple[str, str, str]]:
    """(what, value, small print) of the numbers on top. An INVALID verdict has none."""
    if verdict.verdict == "INVALID":
        return []
    primary = answer.primary_of(verdict.comparisons)
    found = []
    if primary is not None:
        interval = compact(answer.interval_text(primary), words)
        if answer.is_number(primary.ci_low):
            interval = words("merit.interval", confidence=words.share(primary.confidence), interval=interval)
        found.append(
            (
                words("merit.effect", arm=primary.arm, against=primary.against),
                compact(answer.effect_text(primary), words),
                _with_unit(primary, interval, words),
            )
        )
        delta = primary.delta_ttft_seconds
        if delta is not None and math.isfinite(delta):
            found.append(("delta_ttft_seconds", words.local(f"{delta:+.3f}"), words("merit.sign")))
        p_value = answer.p_text(primary.p_value)
        small = words("merit.p", p=words.local(p_value)) if p_value != answer.NOT_MEASURED else words("merit.no_p")
        found.append((words("merit.pairs"), str(primary.pairs), small))
    if verdict.break_even is not None:
        even = verdict.break_even
        if even.found is not None:
            share, small = _even(even.found, even.found.pays, verdict, words)
            found.append((words("merit.even_found"), share, _of_whom(even, small, words)))
        never = even.hit_share is None and even.gain_seconds is not None and even.gain_seconds <= 0
        share, small = _even(even, "none" if never else "above", verdict, words)
        what = words("merit.even_computed" if even.found is not None else "merit.even")
        found.append((what, share, _of_whom(even, small, words)))
    return found


def _of_whom(even: BreakEven, small: str, words: Words) -> str:
    """The small print of a break-even with its arms and the length of its prefixes."""
    said = [words("merit.of_arms", arm=even.arm, against=even.against)] if even.arm else []
    length = _prefix_length(even, words)
    said += [words("merit.of_length", tokens=length)] if length else []
    return "; ".join(filter(None, [small, ", ".join(said)]))


def _prefix_length(even: BreakEven, words: Words) -> str:
    """ "8,200 tokens"; "" where the length is not known."""
    length = even.prefix_tokens if even.prefix_tokens is not None else answer.length_of(even.hit)
    return "" if length == "" else words.length(length)


def _even(even: BreakEven | FoundBreakEven, pays: str, verdict: Verdict, words: Words) -> tuple[str, str]:
    """(share, small print) of a break-even: one number only where it is shown, else its interval, or that none is."""
    if verdict.verdict == "INCONCLUSIVE" and not (pays == "above" and answer.spans_less(even)):
        return words("pays.not_told"), words("pays.inconclusive")
    if pays != "above":
        return words(f"pays.{pays}"), _bounds(even, words)
    if answer.share_is_told(even, verdict.verdict):
        return words.share(even.hit_share), _bounds(even, words)
    if not answer.is_number(even.hit_share):
        return words("not_measured"), _bounds(even, words)
    if not answer.spans_less(even):
        return words("pays.not_told"), words("pays.every_share" if answer.is_number(even.ci_low) else "no_interval")
    return words("spread", low=words.share(even.ci_low), high=words.share(even.ci_high)), words("pays.interval_only")


def _with_unit(primary: ComparisonResult, interval: str, words: Words) -> str:
    """The small print below the effect; a unit that the number above leaves out stands in front."""
    unit = answer.unit_of(primary)
    if primary.effect_scale == "difference" and unit == PREEMPTIONS:
        return f"{words.local(PREEMPTIONS)}; {interval}"
    return interval


def _bounds(even: BreakEven | FoundBreakEven, words: Words) -> str:
    if not answer.is_number(even.ci_low):
        return words("no_interval")
    return words("merit.even_interval", low=words.share(even.ci_low), high=words.share(even.ci_high))


def evidence_limit(verdict: Verdict, words: Words) -> str:
    """What this kind of evidence can't say."""
    if words.is_english:
        return answer.evidence_text(verdict)
    shown = answer.evidence_text(verdict) == answer.MECHANISM_SHOWN
    return words(f"limit.{'cpu_shown' if shown else verdict.evidence or 'none'}")


ACTIONS = {
    "adopt": re.compile(r"adopt (?P<arm>\S+)"),
    "not_adopt": re.compile(r"do not adopt (?P<arm>\S+)"),
    "keep": re.compile(r"keep (?P<arm>\S+)"),
    "keep_control": re.compile(r"keep the control \((?P<title>.*)\)"),
    "keep_cache": re.compile(r"keep the plain GPU cache \((?P<title>.*)\)"),
    "gpu_host": re.compile(r"run the same protocol on a GPU host"),
    "real_engine": re.compile(r"run the same protocol on a real engine"),
    "spread": re.compile(r"use this spread to choose the number of pairs"),
    "engine_fault": re.compile(r"mend or report the engine fault, then run again"),
    "hosts": re.compile(r"mend the hosts that are not valid, then run again"),
    "gate": re.compile(r"mend what gate (?P<gate>\S+) found, then run again"),
    "cause": re.compile(r"mend the cause, then run again"),
    "more_pairs": re.compile(r"run again with more pairs: (?P<pairs>\d+) pairs needed"),
    "pairs_reach": re.compile(
        r"run again with more pairs: with (?P<pairs>\d+) pairs? the exact two-sided test cannot reach p < \.05 "
        r"\(its least p is [\d.e-]+\); at least (?P<least>\d+) pairs are needed"
    ),
    "pairs": re.compile(r"run again with more pairs"),
    "apart": re.compile(r"judge the hosts apart, each by its own verdict: they differ"),
    "valid_pairs": re.compile(r"run again, with at least 6 valid pairs"),
}
"""What the verdict recommends, where other languages have a sentence for it: `next.NAME`."""


def next_step(verdict: Verdict, words: Words) -> str:
    """What to do next: the verdict's own advice, never one guessed from its word."""
    found = None if words.is_english else _action(verdict)
    if found is None:
        return said_text(answer.next_text(verdict), words)
    values = {name: words.title(value) if name == "title" else value for name, value in found[1].items()}
    return f"{words(f'next.{found[0]}', **values)} {_beside_the_advice(verdict, words)}".rstrip()


IS_ADVICE = re.compile(r"\S+ is BETTER by the primary comparison and no guard is WORSE")
"""What "adopt" means: the brief has said it."""


def next_in_brief(verdict: Verdict, words: Words) -> str:
    """The same in fewer words: an arm to adopt is not said to be BETTER once more."""
    first, _, more = answer.one_line(verdict.recommendation.reason).partition("; ")
    if not words.is_english or _action(verdict) is None or not IS_ADVICE.fullmatch(first):
        return next_step(verdict, words)
    action = answer.sentence(answer.one_line(verdict.recommendation.action))
    return f"{action} {answer.sentence(more, answer.arms_in(verdict))}".rstrip()


def _beside_the_advice(verdict: Verdict, words: Words) -> str:
    """What the reason adds to the advice, as another arm that is better, too: where the language has words for it."""
    reason = answer.one_line(verdict.recommendation.reason)
    _, _, more = reason.partition("; ")
    if not more or reason in answer.one_line(verdict.reason) or not is_said(answer.sentence(more), words):
        return ""
    return said_text(answer.sentence(more, answer.arms_in(verdict)), words)


def next_is_the_tools(verdict: Verdict, words: Words) -> bool:
    """Whether the advice is the verdict's own sentence."""
    return words.is_english or _action(verdict) is None


def _action(verdict: Verdict) -> tuple[str, dict[str, str]] | None:
    action = answer.one_line(verdict.recommendation.action).rstrip(".")
    action = action[:1].lower() + action[1:]
    return next(
        ((name, found.groupdict()) for name, form in ACTIONS.items() if (found := form.fullmatch(action))), None
    )


def adopted(verdict: Verdict) -> str:
    """The arm that the verdict says to adopt; "" where it says none."""
    found = _action(verdict)
    return found[1]["arm"] if found is not None and found[0] == "adopt" else ""


def answers(verdict: Verdict, words: Words) -> list[tuple[str, str, bool]]:
    """(label, sentence, whether it is the analysis's own) below the verdict."""
    if not words.is_english:
        return _translated(verdict, words)
    primary, names = answer.primary_of(verdict.comparisons), answer.arms_in(verdict)
    pairs: list[tuple[str, str | None]] = [(words("answer.why"), answer.sentence(verdict.reason, names))]
    if verdict.verdict != "INVALID":
        pairs += [
            (words("answer.effect"), answer.effect_sentence(primary) if primary else None),
            (words("answer.elsewhere"), answer.elsewhere_text(verdict)),
            (words("answer.even"), answer.break_even_text(verdict.break_even, verdict.verdict)),
            (words("answer.detection"), answer.noise_text(primary)),
        ]
    pairs.append((words("answer.checks"), counts(verdict, words)))
    headline_said = answer.headline(verdict)
    return [(label, answer.sentence(text, names), True) for label, text in pairs if text and text != headline_said]


def _translated(verdict: Verdict, words: Words) -> list[tuple[str, str, bool]]:
    """The same from the verdict's numbers; its reason and its advice are the analysis's own."""
    primary = answer.primary_of(verdict.comparisons)
    found: list[tuple[str, str | None, bool]] = []
    if verdict.verdict != "INVALID" or not is_said(verdict.reason, words):
        found.append((words("answer.why"), answer.sentence(verdict.reason, answer.arms_in(verdict)), True))
    if verdict.verdict != "INVALID":
        found += [
            (words("answer.elsewhere"), _elsewhere(verdict, words), False),
            (words("answer.even"), break_even(verdict, words), False),
            (words("answer.detection"), _detection(primary, words), False),
        ]
    if not next_is_the_tools(verdict, words):
        # The action stands above, in the catalogue's words; what is left is why.
        why = answer.one_line(verdict.recommendation.reason)
        said_already = why in answer.one_line(verdict.reason)
        found.append(
            (words("answer.next"), "" if said_already else answer.sentence(why, answer.arms_in(verdict)), True)
        )
    found.append((words("answer.checks"), counts(verdict, words), False))
    return [(label, text, quoted) for label, text, quoted in found if text]


def _elsewhere(verdict: Verdict, words: Words) -> str:
    """The guards counted as in English (worse, undecided), then each, and what fits the engine's cache."""
    guards, fits = answer.elsewhere_of(verdict)
    if not guards and not fits:
        return ""
    if not guards:
        return f"{words('answer.guards_not_declared')}: {_guards(fits, words)}."
    own, others_worse = answer.guards_of_primary(verdict, guards)
    worse = sum(item.verdict == "WORSE" for item in own)
    undecided = sum(item.verdict in ("INCONCLUSIVE", "INVALID") for item in own)
    summary = "worse" if worse else "undecided" if undecided else "none"
    count = words(f"answer.guards_{summary}", worse=worse, undecided=undecided, guards=len(own))
    if len(own) < len(guards):
        arm = answer.primary_arm(verdict)
        others = len(guards) - len(own)
        count = words("answer.guards_with", arm=arm, count=count, others_worse=others_worse, others=others)
    return f"{_capital(count)}: {_guards([*guards, *fits], words)}."


def _guards(guards: Sequence[ComparisonResult], words: Words) -> str:
    return "; ".join(
        words(
            "answer.guard",
            metric=words.short_metric(item.metric),
            where=words.place(item.phase),
            arm=item.arm,
            effect=compact(answer.effect_text(item), words),
            interval=compact(answer.interval_text(item), words),
            word=words("answer.within", margin=words.local(answer.margin_text(item)))
            if answer.is_within_a_size(item)
            else words.or_else(f"word.{item.verdict}", item.verdict),
        )
        for item in guards
    )


def _detection(primary: ComparisonResult | None, words: Words) -> str | None:
    if primary is None or primary.effect_scale != "ratio" or not answer.is_number(primary.mde) or not primary.mde:
        return None
    return words(
        "answer.detectable", pairs=words.count(primary.pairs, "pair"), ratio=words.local(f"×{primary.mde:.3g}")
    )


def break_even(verdict: Verdict, words: Words) -> str:
    """From which share of returning requests on an arm pays: as a sweep found it, then as computed; "" if none can say.

    What was found decides: the computed share rests on a return and a miss by themselves.
    """
    even = verdict.break_even
    if even is None or verdict.verdict == "INVALID":
        return ""
    if even.found is None:
        said = _even_sentence(even, verdict, words, even.own_hit_share)
    else:
        said = _found_sentence(even.found, even.own_hit_share, verdict, words)
        computed = _even_sentence(even, verdict, words, None)
        said += f" {words('brief.even_computed', computed=computed)}" if computed else ""
    return words("brief.even_of", arm=even.arm, against=even.against, said=said) if even.arm and said else said


def _found_sentence(found: FoundBreakEven, own: float | None, verdict: Verdict, words: Words) -> str:
    """What a sweep of shares found, in a sentence: above a share, at every one, at none, or nothing."""
    told = answer.share_is_told(found, verdict.verdict)
    if found.pays != "above":
        return words("brief.even_found_not_told" if verdict.verdict == "INCONCLUSIVE" else f"brief.even_{found.pays}")
    if not told and not answer.spans_less(found):
        return words("brief.even_found_not_told")
    text = words(
        "brief.even_found" if told else "brief.even_found_interval",
        share=words.share(found.hit_share),
        low=words.share(found.ci_low),
        high=words.share(found.ci_high),
    )
    if told and answer.is_number(own):
        text += words("brief.even_own", share=words.share(own))
    low, high = found.minus_computed_low, found.minus_computed_high
    if told and low is not None and high is not None:
        text += words("brief.even_agrees" if low <= 0 <= high else "brief.even_disagrees")
    return f"{text}."


def _even_sentence(even: BreakEven, verdict: Verdict, words: Words, own: float | None) -> str:
    """The computed break-even in a sentence; without a share where none is shown. `own`: the user's share."""
    length = _prefix_length(even, words)
    prefix = words("brief.prefix_of", tokens=length) if length else words("brief.prefix")
    if even.hit_share is None and even.gain_seconds is not None and even.gain_seconds <= 0:
        if verdict.verdict == "INCONCLUSIVE":
            return words("brief.even_not_told")
        return words("brief.even_never", prefix=prefix, loss=words.seconds(-even.gain_seconds))
    if not answer.is_number(even.hit_share):
        return ""
    if not answer.share_is_told(even, verdict.verdict):
        key = "brief.even_between" if answer.spans_less(even) else "brief.even_not_told"
        return words(key, low=words.share(even.ci_low), high=words.share(even.ci_high), prefix=prefix)
    text = words(
        "brief.even" if (even.cost_seconds or 0.0) > 0 else "brief.even_free",
        share=words.share(even.hit_share),
        gain=words.seconds(even.gain_seconds),
        cost=words.seconds(even.cost_seconds),
        prefix=prefix,
    )
    if answer.is_number(even.ci_low):
        text += words("brief.even_interval", low=words.share(even.ci_low), high=words.share(even.ci_high))
    if answer.is_number(own):
        text += words("brief.even_own", share=words.share(own))
    return text + "."


def counts(verdict: Verdict, words: Words) -> str:
    """Runs and gates counted."""
    if words.is_english:
        return f"{answer.runs_text(verdict)}; {answer.gates_text(verdict)}"
    runs = [host.runs for host in verdict.hosts]
    states = [answer.gate_state([result for _, result in found]) for found in answer.gates_by_name(verdict).values()]
    return words(
        "answer.counts",
        valid=words.whole(sum(run.valid for run in runs)),
        planned=words.whole(sum(run.planned for run in runs)),
        dropped=words.whole(sum(run.dropped for run in runs)),
        faults=words.whole(sum(run.engine_faults for run in runs)),
        passed=states.count("passed"),
        gates=len(states) - states.count("not_required"),
        failed=states.count("failed"),
        undecided=states.count("undecided"),
    )
