"""From a verdict to pins: whether what a campaign tried is to be adopted on a fleet, and with which settings. Pure.

The answer is one of: adopt; keep (no gain, the plain GPU cache stays); more_pairs (INCONCLUSIVE); mend (INVALID);
refuse (a gain that must not be adopted here). A refusal has a name, by which whoever knows better may force it.
"""

import datetime
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec

from kvtrial.analysis.launch_arm import ended
from kvtrial.analysis.ledger import WHAT_TOOK_IT
from kvtrial.analysis.recommend import worse_guards
from kvtrial.record.errors import UnusableInput
from kvtrial.record.hazards import hazards_for
from kvtrial.record.ladder import TookBy
from kvtrial.record.launch import ArmLaunch
from kvtrial.record.plan import HostPlan, Launch
from kvtrial.record.verdict import ComparisonResult, Verdict
from kvtrial.record.versions import data

Action = Literal["adopt", "keep", "more_pairs", "mend", "refuse"]
STAMP = "%Y%m%dT%H%M%SZ"
_PAIRS = re.compile(r"(\d+) pairs needed")
_STATE = re.compile(r"/\.?kvtrial/|/tmp/")


class AdoptionTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`data/adoption.yml`."""

    left_out_options: dict[str, str]
    left_out_env: dict[str, str]
    kept_env: dict[str, str]
    limits: dict[str, str]


class Tried(msgspec.Struct, frozen=True):
    """What a campaign tried, beside its verdict. `created_at_utc` as campaign.json has it; `gpus` by host, names."""

    campaign: str
    created_at_utc: str
    plans: list[HostPlan]
    gpus: dict[str, list[str]]


class FleetHost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A host that is to adopt it, by its inventory, and by itself (None: not asked, or silent)."""

    vllm_version: str
    model_name: str
    model_revision: str = ""
    gpus: list[str] | None = None
    ram_total_bytes: int | None = None
    ram_reserve_bytes: int | None = None


class Wish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is asked for. `without`: options of the trial's own that are left out. `force`: refusals, by name."""

    today: str
    max_age_days: float = 30.0
    ttft_max_seconds: float | None = None
    ram_max_bytes: int | None = None
    without: list[str] = []
    force: list[str] = []


class Refusal(msgspec.Struct, frozen=True):
    """Why a gain must not be adopted, by a name that can be forced."""

    name: str
    sentence: str


class Production(msgspec.Struct, frozen=True):
    """The pins. `args`: an option and its values each. `tier_bytes` 0: no CPU tier. `left_out`: name -> why."""

    campaign: str
    protocol: str
    arm: str
    reason: str
    vllm_version: str
    packages_sha256: str
    model_name: str
    model_revision: str
    model_path: str
    gpu: str
    driver: str
    tier_bytes: int
    ram_more_bytes: int | None
    ram_reserve_bytes: int
    executable: str
    args: list[list[str]]
    env: dict[str, str]
    left_out: dict[str, str]
    forced: list[str]
    random_weights: bool


class Decision(msgspec.Struct, frozen=True):
    """What to do. `cause`: why it is no use, for a last line; empty where it is of use. `pins` only to adopt."""

    action: Action
    answer: list[str]
    cause: str
    refusals: list[Refusal]
    pins: Production | None


def decide(verdict: Verdict, tried: Tried, fleet: dict[str, FleetHost], wish: Wish) -> Decision:
    """What a fleet is to do with a verdict. Raises UnusableInput for input that does not belong together."""
    _refuse_strangers(verdict, tried, fleet, wish)
    if verdict.verdict == "INVALID":
        gates = [f"{gate.gate}: {gate.detail}" for gate in verdict.gates if gate.passed is False]
        cause = f"The verdict is INVALID, so nothing can be adopted; {verdict.recommendation.action}."
        return Decision("mend", [f"Failed gate {said}." for said in gates], cause, [], None)
    if verdict.verdict == "INCONCLUSIVE":
        return Decision("more_pairs", list(_more_pairs(verdict)), "", [], None)
    if verdict.verdict in ("WORSE", "EQUIVALENT"):
        return Decision("keep", list(_keep(verdict)), "", [], None)
    arm = _adopted_arm(verdict)
    pins = _production(verdict, tried, arm, wish)
    found = [*_of_the_verdict(verdict, arm, pins, wish), *_of_the_fleet(verdict, tried, pins, fleet, wish)]
    standing = [refusal for refusal in found if refusal.name not in wish.force]
    if standing:
        names = ",".join(dict.fromkeys(refusal.name for refusal in standing))
        lines = [f"{refusal.name}: {ended(refusal.sentence)}" for refusal in standing]
        cause = (
            f"Not adopted: {ended(standing[0].sentence)}"
            + (f" And {len(standing) - 1} more, see above." if len(standing) > 1 else "")
            + f" Whoever knows better: -e adopt_force={names}"
        )
        return Decision("refuse", lines, cause, found, None)
    forced = [refusal.name for refusal in found]
    pins = msgspec.structs.replace(pins, forced=sorted(set(forced)))
    return Decision("adopt", list(_adopt(verdict, pins, found)), "", found, pins)


# --- what it says ----------------------------------------------------------------------------------------------------


def _more_pairs(verdict: Verdict) -> Iterator[str]:
    yield f"Nothing is adopted: INCONCLUSIVE, by {ended(verdict.reason)}"
    found = _PAIRS.search(f"{verdict.recommendation.action} {verdict.reason}")
    if found is None:
        yield f"Next: {ended(verdict.recommendation.action)}"
        return
    # Pairs alternate in order, so their number is even.
    pairs = int(found.group(1)) + int(found.group(1)) % 2
    yield f"Next: {found.group(1)} pairs are needed, that is {pairs} since pairs alternate in order:"
    yield (
        f"ansible-playbook experiment.yml -e protocol={verdict.protocol} -e kvtrial_pairs={pairs} "
        "-e kvtrial_new_campaign=true"
    )


def _keep(verdict: Verdict) -> Iterator[str]:
    yield f"Nothing is adopted: {_capital(ended(verdict.recommendation.action))}"
    yield f"Why: {ended(verdict.recommendation.reason)} {verdict.verdict}, by {ended(verdict.reason)}"


def _adopt(verdict: Verdict, pins: Production, forced: Sequence[Refusal]) -> Iterator[str]:
    yield f"Adopt {pins.arm}: BETTER, by {ended(verdict.reason)}"
    ram = f"{pins.tier_bytes:,} bytes of CPU tier" if pins.tier_bytes else "no CPU tier"
    if pins.ram_more_bytes is not None:
        ram += f", {pins.ram_more_bytes:,} bytes of RAM at the peak more than without it"
    revision = pins.model_revision[:12]
    yield f"Pins: vLLM {pins.vllm_version}, {pins.model_name} at revision {revision}, on {pins.gpu}; {ram}."
    for option, value in _limits(pins):
        yield f"Limit: {data('adoption', AdoptionTable).limits[option].format(value=value)}"
    kept = {name: why for name, why in data("adoption", AdoptionTable).kept_env.items() if name in pins.env}
    yield from _listed("Kept from the trial", kept)
    yield from _listed("Left out", pins.left_out)
    if pins.random_weights:
        yield "Caveat: The model's weights were random: the times are its shape's, its answers were not judged."
    for caveat in verdict.caveats:
        yield f"Caveat: {_capital(ended(caveat))}"
    for refusal in forced:
        yield f"FORCED past {refusal.name}: {ended(refusal.sentence)}"


def _listed(what: str, reasons: dict[str, str]) -> Iterator[str]:
    """A line for each reason, with the names that have it."""
    for why in dict.fromkeys(reasons.values()):
        yield f"{what}: {', '.join(name for name, reason in reasons.items() if reason == why)} ({why})."


def _limits(pins: Production) -> Iterator[tuple[str, str]]:
    limits = data("adoption", AdoptionTable).limits
    for words in pins.args:
        option = words[0].lstrip("-")
        if option in limits:
            yield option, " ".join(words[1:])


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# --- what was tried, as pins -----------------------------------------------------------------------------------------


def _adopted_arm(verdict: Verdict) -> str:
    """The arm of the primary comparison, or of the smallest tier that pays where several sizes were tried."""
    budget = verdict.tier_budget
    if budget is not None and budget.budget_bytes is not None:
        return next(row.arm for row in budget.tiers if row.tier_bytes == budget.budget_bytes)
    return next(result.arm for result in verdict.comparisons if result.role == "primary")


def _production(verdict: Verdict, tried: Tried, arm: str, wish: Wish) -> Production:
    plan = tried.plans[0]
    launch, capacity = plan.launches[arm], plan.capacity
    if launch.also:
        raise UnusableInput(
            f"Arm {arm} is {len(launch.engines())} engines on ports of their own, and adopt pins one engine's launch; "
            "add the replica and split the requests where your fleet's load balancer is set up."
        )
    for other in tried.plans[1:]:
        if arm in other.launches and _words(other.launches[arm]) != _words(launch):
            raise UnusableInput(
                f"Arm {arm} was launched otherwise on {other.host} than on {plan.host}; adopt for one of the hosts, "
                "from a campaign of that host alone."
            )
    table = data("adoption", AdoptionTable)
    left_out: dict[str, str] = {}
    args = []
    for words in _words(launch):
        option = words[0].lstrip("-")
        if option in wish.without:
            left_out[f"--{option}"] = "asked for in adopt_without; the verdict is of a launch that had it"
        elif option in table.left_out_options:
            left_out[f"--{option}"] = table.left_out_options[option]
        else:
            args.append(words)
    env = {}
    for name, value in launch.env.items():
        if name in table.left_out_env:
            left_out[name] = table.left_out_env[name]
        elif _STATE.search(value):
            left_out[name] = "folders of the trial's own"
        else:
            env[name] = value
    pins = verdict.recommendation.pins
    return Production(
        campaign=tried.campaign,
        protocol=verdict.protocol,
        arm=arm,
        reason=verdict.reason,
        vllm_version=pins.get("vllm", plan.vllm_version),
        packages_sha256=pins.get("packages_sha256", ""),
        model_name=launch.served_model_name,
        model_revision=plan.model_of(arm).revision,
        model_path=plan.model_of(arm).path,
        gpu=", ".join(sorted({name for names in tried.gpus.values() for name in names})) or "no GPU",
        driver=pins.get("driver", ""),
        tier_bytes=capacity.tier_bytes.get(arm, 0),
        ram_more_bytes=_ram_more(verdict, arm),
        ram_reserve_bytes=plan.limits.ram_reserve_bytes,
        executable=launch.argv[0],
        args=args,
        env=env,
        left_out=left_out,
        forced=[],
        random_weights=plan.model_of(arm).weights == "random",
    )


def _ram_more(verdict: Verdict, arm: str) -> int | None:
    """Bytes of RAM at the peak that an arm took more than the control, as measured; None where it was not."""
    for result in verdict.comparisons:
        if result.arm == arm and result.metric == "ram_used_peak_bytes" and result.effect_scale == "difference":
            return None if result.effect is None else round(result.effect)
    return None


def _words(launch: Launch) -> list[list[str]]:
    """The options of a launch, each with its values, in order; `vllm serve MODEL` in front left off."""
    groups: list[list[str]] = []
    for word in launch.argv[3:]:
        if word.startswith("--") or not groups:
            name, equals, value = word.partition("=")
            groups.append([name, value] if equals else [word])
        else:
            groups[-1].append(word)
    return groups


# --- what speaks against it ------------------------------------------------------------------------------------------


def _of_the_verdict(verdict: Verdict, arm: str, pins: Production, wish: Wish) -> Iterator[Refusal]:
    if verdict.evidence != "gpu":
        yield Refusal(
            "evidence",
            f"the evidence is {verdict.evidence or 'not known'}, not gpu: it shows the mechanism and no GPU's times; "
            "run the same protocol on a GPU host",
        )
    primary = next(result for result in verdict.comparisons if result.role == "primary")
    if primary.metric.startswith("preemptions") and (took := _took(verdict, primary)):
        yield Refusal("moved", f"{arm}: {WHAT_TOOK_IT[took]}")
    forbidding = worse_guards(verdict.comparisons)
    for result in verdict.comparisons:
        if result in forbidding:
            yield Refusal("guard_worse", f"guard {_said(result)} is WORSE, which forbids adoption")
        elif result.role == "secondary" and result.arm == arm and result.verdict == "WORSE" and _counts(result):
            yield Refusal("ttft", f"{_said(result)} is WORSE")
        if result.arm == arm and result.quality == "differs":
            yield Refusal("answers", f"the answers of {result.phase} differ between {result.arm} and {result.against}")
    if pins.tier_bytes:
        yield from _loads(verdict)
    if wish.ttft_max_seconds is not None:
        yield from _ttft_limit(verdict, arm, wish.ttft_max_seconds)
    if wish.ram_max_bytes is not None and max(pins.tier_bytes, pins.ram_more_bytes or 0) > wish.ram_max_bytes:
        yield Refusal(
            "ram",
            f"it takes {max(pins.tier_bytes, pins.ram_more_bytes or 0):,} bytes of RAM, adopt_ram_max_bytes is "
            f"{wish.ram_max_bytes:,}",
        )
    yield from _hazards(verdict, pins)


def _took(verdict: Verdict, primary: ComparisonResult) -> TookBy | None:
    """What took the delay of the arm that is to be adopted; verdicts of earlier releases don't say by what."""
    arms = verdict.ladder.arms if verdict.ladder else []
    by = next((found.moved_by for found in arms if found.arm == primary.arm), None)
    return by or ("queue" if primary.moved else None)


def _counts(result: ComparisonResult) -> bool:
    """Whether a TTFT is one that users meet: of requests that return or are new, not of those that fill the caches."""
    return result.metric.startswith("ttft") and not result.phase.startswith(("populate", "noload_populate", "warmup"))


def _loads(verdict: Verdict) -> Iterator[Refusal]:
    """Loads are confirmed by the gate that compares bytes with tokens, on every host."""
    for host in verdict.hosts:
        gate = next((gate for gate in host.gates if gate.gate == "treatment_delivered"), None)
        if gate is None or gate.passed is not True:
            said = "was not asked" if gate is None else f"says: {gate.detail}"
            yield Refusal("loads", f"loads from the CPU tier are not confirmed on {host.host}: the gate {said}")


def _ttft_limit(verdict: Verdict, arm: str, limit: float) -> Iterator[Refusal]:
    for result in verdict.comparisons:
        if result.arm == arm and result.metric.startswith("ttft") and _counts(result) and result.arm_values:
            middle = sorted(result.arm_values)[len(result.arm_values) // 2]
            if middle > limit:
                said = f"{_said(result)} is {middle:.3g} s in the middle of its runs"
                yield Refusal("ttft", f"{said}, adopt_ttft_max_seconds is {limit:g}")


def _hazards(verdict: Verdict, pins: Production) -> Iterator[Refusal]:
    argv = [pins.model_path, "--host", "127.0.0.1", *(word for words in pins.args for word in words)]
    launch = ArmLaunch(argv, pins.env)
    backend: Literal["cpu", "cuda"] = "cuda" if verdict.evidence == "gpu" else "cpu"
    for hit in hazards_for(pins.vllm_version, {"production": launch}, backend, ("preemptions", "offload", "answers")):
        if hit.action == "block" or (hit.action == "guard" and not hit.guarded):
            yield Refusal("hazard", f"vLLM {pins.vllm_version}: {ended(hit.hazard.title)} {hit.hazard.do}")


def _of_the_fleet(
    verdict: Verdict, tried: Tried, pins: Production, fleet: dict[str, FleetHost], wish: Wish
) -> Iterator[Refusal]:
    days = (_day(wish.today) - _day(tried.created_at_utc)).total_seconds() / 86400
    if days > wish.max_age_days or days < -1:
        age = f"{days:.0f} days old" if days > 0 else "of a day that is still to come"
        yield Refusal("age", f"the campaign is {age}, adopt_max_age_days is {wish.max_age_days:g}")
    checks: list[tuple[str, Callable[[FleetHost], str | None]]] = [
        ("version", lambda host: _other("vLLM", host.vllm_version.split("+")[0], pins.vllm_version.split("+")[0])),
        ("model", lambda host: _other("model", host.model_name, pins.model_name)),
        ("model", lambda host: _other("model revision", host.model_revision, pins.model_revision)),
        ("gpu", lambda host: _gpu(host, pins.gpu)),
        ("ram", lambda host: _ram(host, pins)),
    ]
    for name, check in checks:
        said: dict[str, list[str]] = {}
        for host, facts in sorted(fleet.items()):
            if sentence := check(facts):
                said.setdefault(sentence, []).append(host)
        for sentence, hosts in said.items():
            yield Refusal(name, f"{', '.join(hosts)}: {sentence}")


def _other(what: str, here: str, tried: str) -> str | None:
    return None if here in ("", tried) else f"the inventory says {what} {here}, the verdict is of {tried}"


def _gpu(host: FleetHost, tried: str) -> str | None:
    if host.gpus is None:
        return (
            f"its GPU is not known, the verdict is of {tried}; reach the host, or set adopt_gpu to the name of its GPU"
        )
    here = ", ".join(sorted(set(host.gpus))) or "no GPU"
    return None if here == tried else f"it has {here}, the verdict is of {tried}"


def _ram(host: FleetHost, pins: Production) -> str | None:
    if host.ram_total_bytes is None or not pins.tier_bytes:
        return None
    reserve = max(host.ram_reserve_bytes or 0, pins.ram_reserve_bytes)
    wanted = max(pins.tier_bytes, pins.ram_more_bytes or 0) + reserve
    if wanted <= host.ram_total_bytes:
        return None
    taken = wanted - reserve
    return f"it has {host.ram_total_bytes:,} bytes of RAM; the tier takes {taken:,}, {reserve:,} are to stay free"


def _said(result: ComparisonResult) -> str:
    return f"{result.metric} of {result.phase} ({result.arm} against {result.against})"


# --- what does not belong together -----------------------------------------------------------------------------------

NAMES = (
    "evidence", "guard_worse", "moved", "ttft", "answers", "loads", "ram", "hazard", "version", "model", "gpu", "age"
)  # fmt: skip
"""Refusals that can be forced."""


def _refuse_strangers(verdict: Verdict, tried: Tried, fleet: dict[str, FleetHost], wish: Wish) -> None:
    if verdict.campaign != tried.campaign:
        raise UnusableInput(
            f"verdict.json is of campaign {verdict.campaign}, campaign.json beside it of {tried.campaign}; give one "
            "folder as an experiment left it."
        )
    if not fleet:
        raise UnusableInput("There is no host to adopt for; name the fleet with -i inventories/<fleet>.")
    if unknown := [name for name in wish.force if name not in NAMES]:
        raise UnusableInput(
            f"adopt_force={','.join(unknown)} is no refusal that can be forced; known are {', '.join(NAMES)}."
        )
    limits = data("adoption", AdoptionTable).limits
    if unknown := [name for name in wish.without if name not in limits]:
        raise UnusableInput(
            f"adopt_without={','.join(unknown)} can't be left out: only what a trial sets for its own ends can "
            f"({', '.join(limits)})."
        )
    if not math.isfinite(wish.max_age_days) or wish.max_age_days <= 0:
        raise UnusableInput(f"adopt_max_age_days={wish.max_age_days} is no number of days above 0.")
    _day(wish.today)


def _day(text: str) -> datetime.datetime:
    """A date (2026-11-29) or a stamp of a campaign (20261129T165104Z), UTC. Raises UnusableInput."""
    for form in ("%Y-%m-%d", STAMP):
        try:
            return datetime.datetime.strptime(text, form).replace(tzinfo=datetime.UTC)
        except ValueError:
            continue
    raise UnusableInput(f"{text!r} is no date; give it as 2026-11-29.")
