"""Gates on what went in and came out: the same prompts, the same output lengths, the same answers."""

from collections.abc import Iterable

from msgspec import Struct, field

from kvtrial.analysis.faults import EngineFault
from kvtrial.analysis.gates.context import Decision, GateContext, NoParameters, gate, phase_of, some, where
from kvtrial.analysis.metrics import delta
from kvtrial.record.record import PhaseRecord, RunRecord


@gate("prompts_and_outputs_equal", NoParameters)
def prompts_and_outputs_equal(context: GateContext, parameters: NoParameters) -> Decision:
    """Per pair and phase all arms got the same prompts and gave outputs of equal length; each pair has new prompts."""
    if not context.pairs.valid:
        return None, "no valid pair"
    may_differ = {kind for arm in context.protocol.arms.values() for kind in arm.may_differ}
    problems: list[str] = []
    compared = 0
    for pair in context.pairs.valid:
        control = pair.runs[context.protocol.control]
        for arm, run in pair.runs.items():
            if arm != context.protocol.control:
                problems += _unequal(control, run, set(context.protocol.arms[arm].may_differ))
                compared += len(run.phases)
    if "prompt" not in may_differ:
        problems += _repeated_prompts(context)
    if problems:
        return False, some(problems)
    allowed = f" (may differ: {', '.join(sorted(may_differ))})" if may_differ else ""
    return True, f"prompts and output lengths equal in {compared} phases of {len(context.pairs.valid)} pairs{allowed}"


def _unequal(control: RunRecord, run: RunRecord, may_differ: set[str]) -> list[str]:
    names = [phase.name for phase in control.phases]
    if sorted(names) != sorted(phase.name for phase in run.phases):
        return [f"{where(run)} has other phases than the control"]
    problems = []
    for phase in run.phases:
        other = phase_of(control, phase.name)
        assert other is not None
        mine, theirs = phase.requests, other.requests
        if "prompt" not in may_differ and (
            phase.prompts_sha256 != other.prompts_sha256
            or [request.prompt_sha256 for request in mine] != [request.prompt_sha256 for request in theirs]
        ):
            problems.append(f"{where(run, phase)}: other prompts than the control's")
        lengths = [request.output_tokens for request in mine], [request.output_tokens for request in theirs]
        if "output_length" not in may_differ and lengths[0] != lengths[1]:
            differing = sum(a != b for a, b in zip(*lengths, strict=False)) + abs(len(mine) - len(theirs))
            problems.append(f"{where(run, phase)}: {differing} outputs are not as long as the control's")
    return problems


def _repeated_prompts(context: GateContext) -> list[str]:
    """Prompts that a pair shares with an earlier one: a repeated seed, which a warm cache would answer."""
    first_pair: dict[tuple[str, str], int] = {}
    problems = []
    for pair in context.pairs.valid:
        for phase in pair.runs[context.protocol.control].phases:
            earlier = first_pair.setdefault((phase.name, phase.prompts_sha256), pair.number)
            if earlier != pair.number:
                problems.append(f"pair {pair.number}, phase {phase.name}: the prompts of pair {earlier} again")
    return problems


UNVERIFIED_P_MIN = 0.05
"""Fisher's exact test, one-sided: below this the answers that no hit verifies differ too often to be rounding."""

DISCRIMINATING_SHARE = 0.9
"""Least share of different prompts that get different answers: only then would a wrong prefix be seen."""


class AnswersEqual(Struct, frozen=True, forbid_unknown_fields=True):
    """The arm, its phases answered by the engine's own cache and by the tier, and the divergence budget.

    `hit` and `return` are one phase each, or lists of equal length: the first of one is compared with the first of the
    other, and so on.
    """

    arm: str
    hit: str | list[str]
    return_: str | list[str] = field(name="return")
    divergence_max_share: float = 0.0

    def __post_init__(self) -> None:
        if len(_listed(self.hit)) != len(_listed(self.return_)):
            raise ValueError("`hit` and `return` must name equally many phases")

    def compared(self) -> list[tuple[str, str]]:
        """(hit, return) of each comparison."""
        return list(zip(_listed(self.hit), _listed(self.return_), strict=True))


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


class Mismatch(Struct, frozen=True):
    """A prompt that got another answer from the tier than from the engine's own cache."""

    run: RunRecord
    phase: str
    key: str


@gate("answers_equal", AnswersEqual)
def answers_equal(context: GateContext, parameters: AnswersEqual) -> Decision:
    """The arm's return equals its own cache hit token for token; against the control's return it keeps a budget.

    Loaded and resident blocks take the same arithmetic afterwards, so these two must be equal. A recompute rounds
    otherwise in bf16 and may diverge honestly. How often it does is seen on the prompts that a hit has verified; those
    that the GPU cache no longer held have no hit to be compared with, and may not diverge more often. With a model that
    answers everything alike this shows nothing: then the gate is undecided, and says so.
    """
    runs = context.of_arm(parameters.arm)
    if not runs:
        return None, f"no completed run of arm {parameters.arm}"
    decisions = [_answers_of(context, runs, hit, returned, parameters) for hit, returned in parameters.compared()]
    for wanted in (False, None):
        found = [detail for passed, detail in decisions if passed is wanted]
        if found:
            return wanted, some(found)
    return True, "; ".join(detail for _, detail in decisions)


def _answers_of(
    context: GateContext, runs: list[RunRecord], hit: str, returned: str, parameters: AnswersEqual
) -> Decision:
    """The same for one pair of phases."""
    if elsewhere := _not_from_cache(runs, hit):
        return None, f"{some(elsewhere)}; so {hit} verifies nothing"
    compared = sum(len(_in_both(run, hit, returned)) for run in runs)
    if compared == 0:
        return None, f"no prompt was answered both in {hit} and in {returned}"
    wrong = _mismatches(runs, hit, returned)
    if wrong:
        return False, (
            f"wrong answers: {len(wrong)} of {compared} answers of {returned} differ from the same run's "
            f"{hit} ({some(f'{where(m.run)}, {m.key}' for m in wrong)})"
        )
    missing = sum(None in answers for run in runs for answers in _in_both(run, hit, returned).values())
    if missing:
        return None, (
            f"{missing} of {compared} answers of {returned} can't be compared with the same run's "
            f"{hit}: one of the two is missing"
        )
    verified, unverified = _divergence_by_hit(context, parameters.arm, hit, returned)
    differing, total = verified[0] + unverified[0], verified[1] + unverified[1]
    if "answer" not in context.protocol.arms[parameters.arm].may_differ:
        if total == 0:
            return None, f"no {returned} of the control to compare with"
        if differing > parameters.divergence_max_share * total:
            return False, (
                f"{differing} of {total} answers of {returned} differ from the control's, more than the "
                f"declared {parameters.divergence_max_share:.0%}"
            )
        if _more_often(unverified, verified):
            return False, (
                f"{unverified[0]} of {unverified[1]} answers of {returned} to prompts that {hit} did not ask differ "
                f"from the control's, {verified[0]} of {verified[1]} of those that it verified; rounding would treat "
                "them alike"
            )
    distinct, prompts = _discrimination(runs, returned)
    if distinct < DISCRIMINATING_SHARE * prompts:
        return None, (
            f"not discriminating: {prompts} different prompts got only {distinct} different answers from this model, "
            f"at least {DISCRIMINATING_SHARE:.0%} are needed"
        )
    return True, (
        f"{compared} of {compared} answers of {returned} equal the same run's {hit}{_unasked(unverified, hit)}; "
        f"{differing} of {total} differ from the control's (allowed {parameters.divergence_max_share:.0%}); "
        f"{distinct} different answers to {prompts} prompts"
    )


def _not_from_cache(runs: list[RunRecord], hit: str) -> list[str]:
    """Where the engine's own cache did not answer `hit` with every whole block of its prompts, or a tier did."""
    found = []
    for run in runs:
        phase = phase_of(run, hit)
        if phase is None:
            continue
        block = run.capacity.block_tokens
        whole = sum(((request.prompt_tokens or 1) - 1) // block * block for request in phase.requests)
        local, external = delta(phase, "prefix_cache_hits_tokens"), delta(phase, "prompt_tokens_external") or 0
        if local is None:
            found.append(f"{where(run, phase)}: local prefix hits are not recorded")
        elif local != whole or external:
            found.append(
                f"{where(run, phase)}: {local:,.0f} of {whole:,} tokens came from the engine's own cache, "
                f"{external:,.0f} from a tier"
            )
    return found


def mismatches(runs: Iterable[RunRecord], parameters: AnswersEqual) -> list[Mismatch]:
    """Answers that differ between the engine's own cache and the tier inside one run; a missing one is no answer."""
    listed = list(runs)
    return [found for hit, returned in parameters.compared() for found in _mismatches(listed, hit, returned)]


def _mismatches(runs: list[RunRecord], hit: str, returned: str) -> list[Mismatch]:
    found = []
    for run in runs:
        keys = {
            request.prompt_sha256: request.key
            for phase in run.phases
            if phase.name == hit
            for request in phase.requests
        }
        for sha, (first, second) in _in_both(run, hit, returned).items():
            if first is not None and second is not None and first != second:
                found.append(Mismatch(run, returned, keys[sha]))
    return found


def wrong_answers(runs: Iterable[RunRecord], parameters: AnswersEqual) -> list[EngineFault]:
    """The same as engine faults, one a run: a wrong answer is a result of its arm."""
    by_run: dict[str, list[Mismatch]] = {}
    for mismatch in mismatches((run for run in runs if run.arm == parameters.arm), parameters):
        by_run.setdefault(mismatch.run.run, []).append(mismatch)
    return [
        EngineFault(
            found[0].run.arm,
            found[0].run.pair,
            found[0].phase,
            "wrong_answer",
            f"{len(found)} answers differ from {' and '.join(_listed(parameters.hit))} ({some(m.key for m in found)})",
        )
        for found in by_run.values()
    ]


def _divergence_by_hit(
    context: GateContext, arm: str, hit: str, returned: str
) -> tuple[tuple[int, int], tuple[int, int]]:
    """(differing, compared) against the control, of the prompts that the arm's own hit verified, and of the others."""
    counts = {True: [0, 0], False: [0, 0]}
    for pair in context.pairs.valid:
        verified = _in_both(pair.runs[arm], hit, returned).keys()
        for key, equal in _compared(pair.runs[arm], pair.runs[context.protocol.control], returned):
            counts[key in verified][0] += not equal
            counts[key in verified][1] += 1
    return (counts[True][0], counts[True][1]), (counts[False][0], counts[False][1])


def _unasked(unverified: tuple[int, int], hit: str) -> str:
    differing, total = unverified
    if not total:
        return ""
    return f", the other {total}, which {hit} did not ask, the control's" + (
        f" but for {differing}" if differing else ""
    )


def _more_often(these: tuple[int, int], those: tuple[int, int]) -> bool:
    """Whether (differing, compared) of these shows more differences than that of those."""
    if not these[0] or not those[1]:
        return False
    from scipy import stats  # most of a second to import, and seldom needed

    table = [[these[0], these[1] - these[0]], [those[0], those[1] - those[0]]]
    return bool(stats.fisher_exact(table, alternative="greater").pvalue < UNVERIFIED_P_MIN)


def compare_answers(context: GateContext, arm: str, against: str, phase_name: str) -> tuple[int, int]:
    """(differing, compared) answers to the same prompts in one phase, over all valid pairs.

    Two missing answers are not compared; one missing answer differs.
    """
    found = [
        equal for pair in context.pairs.valid for _, equal in _compared(pair.runs[arm], pair.runs[against], phase_name)
    ]
    return found.count(False), len(found)


def _compared(run: RunRecord, other: RunRecord, phase_name: str) -> Iterable[tuple[str, bool]]:
    """(prompt's sha256, whether the answers are equal) of each prompt that both runs asked in a phase."""
    mine, theirs = phase_of(run, phase_name), phase_of(other, phase_name)
    if mine is None or theirs is None:
        return
    for a, b in zip(mine.requests, theirs.requests, strict=False):
        if a.prompt_sha256 == b.prompt_sha256 and (a.answer_sha256, b.answer_sha256) != (None, None):
            yield a.prompt_sha256, a.answer_sha256 == b.answer_sha256


def _in_both(run: RunRecord, hit: str, returned: str) -> dict[str, tuple[str | None, str | None]]:
    """(answer of the hit, answer of the return) of each prompt asked in both, by the prompt's sha256."""
    hit_phase, return_phase = phase_of(run, hit), phase_of(run, returned)
    if hit_phase is None or return_phase is None:
        return {}
    first, second = _by_prompt(hit_phase), _by_prompt(return_phase)
    return {sha: (answer, second[sha]) for sha, answer in first.items() if sha in second}


def _by_prompt(phase: PhaseRecord) -> dict[str, str | None]:
    return {request.prompt_sha256: request.answer_sha256 for request in phase.requests}


def _discrimination(runs: list[RunRecord], phase_name: str) -> tuple[int, int]:
    """(different answers, different prompts) of the run in which the model tells prompts apart least."""
    worst: tuple[int, int] | None = None
    for run in runs:
        phase = phase_of(run, phase_name)
        if phase is None or not phase.requests:
            continue
        answers = {r.answer_sha256 for r in phase.requests if r.answer_sha256 is not None}
        found = len(answers), len({r.prompt_sha256 for r in phase.requests})
        if worst is None or found[0] / found[1] < worst[0] / worst[1]:
            worst = found
    return worst or (0, 0)
