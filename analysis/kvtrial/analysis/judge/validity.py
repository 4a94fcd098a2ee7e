"""Which pairs of a result set count, and whether the set as a whole can mean anything. Blind to the outcome."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import msgspec

from kvtrial.analysis.check import check_launches
from kvtrial.analysis.judge.evidence import named, ranged
from kvtrial.analysis.judge.known import refused, unreadable_version
from kvtrial.analysis.judge.results import Pair, Results, Run
from kvtrial.analysis.observe.finding import Finding
from kvtrial.analysis.observe.words import listed, plural, whole

HITS_APART = 0.05
"""Share of prompt tokens by which the arms' GPU prefix hits may differ."""
FEW_CONTAMINATED = 0.2
"""Up to this share of the pairs contamination drops the pairs, beyond it the set."""
UNBALANCED_SHARE = 0.2
SHARED_HITS = 0.5
_OF_LAUNCHES = {"mixed_interfaces", "arms_not_comparable"}
"""What makes a comparison one of something else than is stated; how well a launch was made is not judged here."""
MOST_LAG_MS = 10.0
"""How late a client may send at most; half the margin of the run's value where that is less (as gate client_honest)."""


class Dropped(msgspec.Struct, frozen=True):
    """A pair that does not count, why, and whose fault it is where that is one arm's."""

    pair: Pair
    reason: str
    arm: str | None = None


def fatal(results: Results) -> Iterator[Finding]:
    """Findings that make the whole set INVALID."""
    of_launches = list(_launched(results))
    yield from of_launches
    yield from _answers(results)
    yield from _warm_cache(results)
    yield from _order(results)
    yield from _treatment(results)
    yield from refused(results, {finding.class_ for finding in of_launches})


def unsettled(results: Results) -> Iterator[Finding]:
    """Findings on what would make the set INVALID or not, and is not to be known from it."""
    yield from _hits_in_both(results)
    yield from _order_not_known(results)


def caveats(results: Results) -> list[str]:
    """What weakens a set and refuses nothing: servers of unequal lifetime, and one seed for all pairs."""
    found = []
    servers = {arm: _servers(results, arm) for arm in ("control", "variant")}
    runs = len(results.pairs)
    if runs > 1 and None not in servers.values() and 1 in servers.values() and runs in servers.values():
        found.append(
            f"Lifetimes of the servers are the arms' too. {_lifetimes(results)} What a server gains or loses with its "
            "age (warm caches and kernels, fragmentation) can't be told from what is tried: start both arms' servers "
            "as often."
        )
    one_seed = results.same_prompts is None and isinstance(results.seed, int | float) and results.seed is not True
    if runs > 1 and (results.same_prompts or one_seed):
        stated = f"seed {results.seed}" if results.seed is not None else "same prompts"
        repeats = "repeat" if results.same_prompts else "may repeat"
        found.append(
            f"The workload states {stated} for every pair, so its prompts {repeats}: pairs are then no samples of "
            "their own, and caches that outlive a run can answer. Draw new prompts (another seed) for each pair."
        )
    return found


def dropped(results: Results) -> list[Dropped]:
    """Pairs that do not count."""
    loads = [pair.variant.load_bytes for pair in results.pairs]
    expected = sum(1 for load in loads if load) > len(loads) / 2
    warm = {pair.name for pair in _contaminated(results)}
    found = []
    for pair in results.pairs:
        reason, arm = _fault(pair, expected)
        if reason is None:
            reason = _late_client(pair, results)
        if reason is None and pair.name in warm:
            reason, arm = "its prompts came from the GPU prefix cache of one arm", None
        if reason is not None:
            found.append(Dropped(pair, reason, arm))
    return found


def _fault(pair: Pair, loads_expected: bool) -> tuple[str | None, str | None]:
    if pair.mark is not None:
        return pair.mark, None
    for arm in ("control", "variant"):
        run: Run = getattr(pair, arm)
        if run.mark is not None:
            return f"{arm}: {run.mark}", arm
        if not run.values:
            return f"{arm} has no value", arm
        if run.failed:
            done = (
                ""
                if run.completed is None or run.sent is None
                else f" ({whole(run.completed)} of {whole(run.sent)} completed)"
            )
            return f"{arm}: {plural(run.failed, 'request')} failed{done}", arm
        if run.sent is not None and run.completed is not None and run.completed < run.sent:
            return f"{arm}: {whole(run.completed)} of {whole(run.sent)} requests completed", arm
        if len(run.values) > 1 and run.completed is not None and len(run.values) < run.completed:
            return f"{arm}: {len(run.values)} values for {whole(run.completed)} completed requests", arm
    sent = [pair.control.sent, pair.variant.sent]
    if None not in sent and sent[0] != sent[1]:
        return f"control sent {whole(sent[0] or 0)} requests and variant {whole(sent[1] or 0)}", None
    if loads_expected and not pair.variant.load_bytes:
        stated = "no load is stated" if pair.variant.load_bytes is None else "0 B were loaded"
        return f"variant: {stated}, so the tier gave nothing in it", "variant"
    if loads_expected and pair.control.load_bytes:
        return f"control: {whole(pair.control.load_bytes)} B were loaded, so it was no control", "control"
    return None, None


def _late_client(pair: Pair, results: Results) -> str | None:
    """Why the load client and not the server made a pair's times: a fault of the environment, whichever arm it hit."""
    for arm in ("control", "variant"):
        run: Run = getattr(pair, arm)
        if run.client_lag_p95_ms is None or not results.metric.endswith("_ms") or not run.values:
            continue
        bound = min(MOST_LAG_MS, results.min_effect_pct / 200 * run.value)
        if run.client_lag_p95_ms > bound:
            return (
                f"{arm}: the load client sent {run.client_lag_p95_ms:.1f} ms late (p95), more than the {bound:.1f} ms "
                f"that a {results.metric} of {run.value:.1f} allows, so the client's delay is in it"
            )
    return None


def _launched(results: Results) -> Iterator[Finding]:
    """What `kvtrial check` refuses of the arms' launches, where the set states them and its version."""
    if not results.launches or results.vllm_version is None or unreadable_version(results):
        return
    for found in check_launches({}, {"version": results.vllm_version}, results.launches):
        if found.class_ in _OF_LAUNCHES and found.severity == "refuse":
            arm = f"{found.arm}: " if found.arm else ""
            yield Finding(found.class_, "refuse", f"{arm}{found.reason}", found.numbers, found.do)


def _answers(results: Results) -> Iterator[Finding]:
    compared = [p for p in results.pairs if p.control.output_digest and p.variant.output_digest]
    apart = [pair for pair in compared if pair.control.output_digest != pair.variant.output_digest]
    if not apart or not results.proves_loads:
        return
    shown = [f"pair {p.name}: {p.control.output_digest} and {p.variant.output_digest}" for p in apart]
    same_arm = len({pair.variant.output_digest for pair in apart}) == 1
    again = " The variant gives the same other answer each time." if same_arm and len(apart) > 1 else ""
    yield Finding(
        "response_mismatch",
        "refuse",
        f"The answers differ: in {len(apart)} of {len(compared)} pairs the variant's output digest is not the "
        f"control's "
        f"({listed(shown, 3)}).{again} A server that answers something else can be as fast as it likes; times are not "
        "compared.",
        {
            "mismatches": len(apart),
            "mismatched_pairs": [pair.name for pair in apart],
            "compared": len(compared),
            "n_pairs": len(results.pairs),
        },
        "Find the first token where they part, with greedy sampling and one request at a time. A late, rare "
        "difference can "
        "be rounding (bf16, another batch); compare control with control to see it. Wrong tokens with offloading: "
        "#31210 "
        "(0.13), SimpleCPUOffloadConnector (#45704).",
    )


def _share(run: Run, results: Results) -> float | None:
    """GPU prefix hits as a share of the run's prompt tokens."""
    if run.local_hit_tokens is None:
        return None
    prompt = run.prompt_tokens or results.prompt_tokens_per_run or _prompt_guess(results)
    return run.local_hit_tokens / prompt if prompt else 0.0


def _prompt_guess(results: Results) -> float:
    runs = [run for pair in results.pairs for run in (pair.control, pair.variant)]
    return max(
        (value for run in runs for value in (run.local_hit_tokens, run.external_hit_tokens) if value), default=0.0
    )


def _contaminated(results: Results) -> list[Pair]:
    found = []
    for pair in results.pairs:
        control, variant = _share(pair.control, results), _share(pair.variant, results)
        if control is not None and variant is not None and abs(control - variant) > HITS_APART:
            found.append(pair)
    return found


def _warm_cache(results: Results) -> Iterator[Finding]:
    warm = _contaminated(results)
    both = _both_warm(results)
    if not both and len(warm) <= FEW_CONTAMINATED * len(results.pairs):
        return
    pairs = both or warm
    arm = "variant" if both or _hits(pairs, "variant") >= _hits(pairs, "control") else "control"
    runs = [getattr(pair, arm) for pair in pairs]
    prompt = runs[0].prompt_tokens or results.prompt_tokens_per_run
    of = f" of {whole(prompt)} prompt tokens" if prompt else " tokens"
    loads = {run.load_bytes for run in runs}
    loaded = (
        f", loads {'0 B' if loads <= {0.0, None} else 'some'}, external hits "
        f"{whole(max(run.external_hit_tokens or 0 for run in runs))}"
    )
    clean = [pair for pair in results.pairs if pair not in pairs]
    names = named([pair.name for pair in pairs])
    cold = ""
    if clean and all(pair.control.values and pair.variant.values for pair in clean):
        apart = [100 * (pair.variant.value / pair.control.value - 1) for pair in clean]
        cold = f" The cold pairs ({named([p.name for p in clean])}) show {ranged(apart)} %."
    apart = [100 * (p.variant.value / p.control.value - 1) for p in pairs if p.control.values and p.variant.values]
    size = f" The {ranged(apart)} % come from the GPU cache, not from the tier." if apart and not both else ""
    whose = "both arms" if both else arm
    yield Finding(
        "warm_cache_contamination",
        "refuse",
        f"The GPU prefix cache was warm: in {whose}, pairs {names}, "
        f"{ranged([run.local_hit_tokens or 0 for run in runs], ',.0f')}{of} are GPU prefix hits{loaded}. "
        f"{_lifetimes(results)}{size}{cold}{_repeats(results)}",
        {
            "contaminated_pairs": [pair.name for pair in pairs],
            "local_hit_tokens": [run.local_hit_tokens for run in runs],
            "servers": {name: _servers(results, name) for name in ("control", "variant")},
        },
        "New prompts (another seed) or another cache_salt for every run, the same lifetime of the server in both "
        "arms, and "
        "load bytes above 0 as a condition of the variant.",
    )


def _both_warm(results: Results) -> list[Pair]:
    """Pairs in which the GPU's cache answered most of both arms, and the tier nothing: the tier was not tried."""
    if results.arms_identical or any(pair.variant.load_bytes for pair in results.pairs):
        return []
    found = []
    for pair in results.pairs:
        shares = [_share(run, results) for run in (pair.control, pair.variant)]
        if all(share is not None and share >= SHARED_HITS for share in shares):
            found.append(pair)
    return found if len(found) > len(results.pairs) / 2 else []


def _hits_in_both(results: Results) -> Iterator[Finding]:
    """GPU prefix hits in both arms that refuse nothing: a shared beginning, or a cache that was not evicted."""
    if results.arms_identical:
        return
    pairs = [p for p in results.pairs if p.control.local_hit_tokens and p.variant.local_hit_tokens]
    if len(pairs) <= len(results.pairs) / 2:
        return
    hits = {arm: [getattr(pair, arm).local_hit_tokens for pair in pairs] for arm in ("control", "variant")}
    prompts = [pair.variant.prompt_tokens or results.prompt_tokens_per_run for pair in pairs]
    known = [prompt for prompt in prompts if prompt]
    shares = [_share(pair.variant, results) or 0.0 for pair in pairs]
    size = (
        f"{ranged([100 * share for share in shares], '.0f')} % of the variant's prompt tokens"
        if known
        else "how many tokens the prompts have is not stated, so how much of them that is, and whether the cache was "
        "evicted before the return, is unknown"
    )
    if known and max(shares) <= HITS_APART:
        return
    yield Finding(
        "gpu_hits_in_both_arms",
        "warn",
        f"The GPU prefix cache answered in both arms: {ranged(hits['control'], ',.0f')} tokens a run in the control, "
        f"{ranged(hits['variant'], ',.0f')} in the variant; {size}. A beginning that all prompts share looks like "
        "this, and so does a cache that was not evicted; a tier can only give what lies beyond it.",
        {"control_local_hit_tokens": hits["control"], "variant_local_hit_tokens": hits["variant"]},
        "State prompt_tokens of each run, or workload.prompt_tokens_per_run; evict the GPU's cache, or take new "
        "prompts.",
        "inferred" if known else "unknown",
    )


def _hits(pairs: Sequence[Pair], arm: str) -> float:
    return sum(getattr(pair, arm).local_hit_tokens or 0 for pair in pairs)


def _servers(results: Results, arm: str) -> int | None:
    starts = [getattr(pair, arm).server_start for pair in results.pairs]
    known = {start for start in starts if start is not None}
    return len(known) if known else None


def _lifetimes(results: Results) -> str:
    counts = {arm: _servers(results, arm) for arm in ("control", "variant")}
    runs = len(results.pairs)

    def one(arm: str) -> str:
        count = counts[arm]
        if count is None:
            return f"{arm}: starts of the server not stated"
        if count == 1:
            return f"{arm}: one server for all {runs} runs"
        if count == runs:
            return f"{arm}: every run on a fresh server (server_start differs)"
        return f"{arm}: {count} servers for {runs} runs"

    return f"{one('control').capitalize()}; {one('variant')}."


def _repeats(results: Results) -> str:
    if results.same_prompts:
        seed = f" (seed {results.seed} in every pair)" if results.seed is not None else ""
        return f" The prompts repeat{seed}."
    return ""


def _order(results: Results) -> Iterator[Finding]:
    firsts = [first for pair in results.pairs if (first := _first(pair, results))]
    total = len(firsts)
    by_arm = {arm: firsts.count(arm) for arm in ("control", "variant")}
    few = min(by_arm.values())
    unbalanced = total >= 2 and few < UNBALANCED_SHARE * total
    blocks = _blocks(results)
    if not unbalanced and not blocks:
        return
    first = max(by_arm, key=lambda arm: by_arm[arm]) if total else "control"
    how = (
        f"{first} ran first in {'every pair' if few == 0 else f'{by_arm[first]} of {total} pairs'}"
        if unbalanced
        else blocks
    )
    drift = _drift(results)
    yield Finding(
        "order_confounded_with_arm",
        "refuse",
        f"Order and arm can't be told apart: {how}.{drift} Whatever changes with time (clocks and heat, caches "
        f"filling, "
        "neighbours) falls on one arm, and no number of pairs takes it out.",
        {"control_first": by_arm["control"], "variant_first": by_arm["variant"], "n_pairs": len(results.pairs)}
        | _drift_numbers(results),
        "Run again with the order changing by pair (ABBA), its first letter drawn, on servers of equal lifetime.",
    )


def _order_not_known(results: Results) -> Iterator[Finding]:
    unknown = [pair.name for pair in results.pairs if not _first(pair, results)]
    if not unknown or len(results.pairs) < 2:
        return
    whose = "any pair" if len(unknown) == len(results.pairs) else f"pairs {named(unknown)}"
    yield Finding(
        "order_unknown",
        "warn",
        f"Which arm ran first is not stated for {whose} (no order, no start of a server for every run), so a change "
        "with time (clocks and heat, caches filling, neighbours) can't be ruled out as what differs.",
        {"pairs_without_order": unknown, "n_pairs": len(results.pairs)},
        "State `order` of each pair, or `server_start` of each run.",
        "unknown",
    )


def _first(pair: Pair, results: Results) -> str:
    """The arm that ran first in a pair: as stated, else by the starts where every run had a server of its own."""
    if pair.order:
        return pair.order[0]
    starts = [pair.control.server_start, pair.variant.server_start]
    runs = len(results.pairs)
    if starts[0] is None or starts[1] is None or starts[0] == starts[1]:
        return ""
    if any(_servers(results, arm) != runs for arm in ("control", "variant")):
        return ""
    return "control" if starts[0] < starts[1] else "variant"


def _blocks(results: Results) -> str:
    """Words where all runs of one arm lie before all of the other, by starts of servers of their own."""
    starts = {arm: [getattr(p, arm).server_start for p in results.pairs] for arm in ("control", "variant")}
    known = {arm: [start for start in found if start is not None] for arm, found in starts.items()}
    if any(len(set(found)) < max(2, len(results.pairs)) for found in known.values()):
        return ""
    if max(known["control"]) < min(known["variant"]):
        return "all runs of control were started before the first of variant"
    if max(known["variant"]) < min(known["control"]):
        return "all runs of variant were started before the first of control"
    return ""


def _drift_numbers(results: Results) -> dict[str, Any]:
    usable = [pair for pair in results.pairs if pair.control.values and pair.variant.values]
    if len(usable) < 4:
        return {}
    half = len(usable) // 2
    drift = {}
    for arm in ("control", "variant"):
        values = [getattr(pair, arm).value for pair in usable]
        drift[arm] = round(100 * (median(values[-half:]) / median(values[:half]) - 1), 2)
    return {"drift_pct": drift}


def _drift(results: Results) -> str:
    found = _drift_numbers(results).get("drift_pct")
    if not found:
        return ""
    each = ", ".join(f"{arm} {value:+.1f} %" for arm, value in found.items())
    return f" From the first half of the pairs to the second each arm moved by itself: {each}."


def _treatment(results: Results) -> Iterator[Finding]:
    if results.arms_identical or not results.proves_loads:
        return
    loads = [pair.variant.load_bytes for pair in results.pairs]
    stored = [pair.variant.store_bytes for pair in results.pairs]
    control = [pair.control.load_bytes for pair in results.pairs]
    if any(load is not None for load in loads) and not any(loads):
        yield Finding(
            "treatment_not_delivered",
            "refuse",
            f"No variant run loaded anything: load 0 B in {len(loads)} of {len(loads)} runs"
            + (f" (stored {ranged([s or 0 for s in stored], ',.0f')} B)" if any(stored) else "")
            + ". What differs between the arms is not what the tier gives.",
            {"load_bytes": loads, "n_pairs": len(results.pairs)},
            "Make the set of prefixes larger than the GPU's KV cache and smaller than the tier, and require load bytes "
            "above 0.",
        )
    if sum(1 for load in control if load) > len(control) / 2:
        yield Finding(
            "control_not_clean",
            "refuse",
            f"The control loaded from a tier in {sum(1 for load in control if load)} of {len(control)} runs: it is no "
            "control.",
            {"control_load_bytes": control},
            "Start the control without a connector.",
        )
