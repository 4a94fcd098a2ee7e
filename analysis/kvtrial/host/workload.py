"""Prompts from a plan: the same plan gives the same token ids, on every host."""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from kvtrial.record.load import LoadSpec, RequestSpec
from kvtrial.record.plan import Launch, Limits, PhasePlan, PromptPlan

SUFFIX_SEED = "kvtrial suffix"


def make_prompts(plan: PromptPlan) -> list[list[int]]:
    """`plan.count` lists of `plan.tokens` token ids; the last `suffix_tokens` are equal in all prompts of all sets."""

    def ids(source: random.Random, count: int) -> list[int]:
        return [source.randint(plan.low_id, plan.high_id) for _ in range(count)]

    suffix = ids(random.Random(SUFFIX_SEED), plan.suffix_tokens)
    body_tokens = plan.tokens - plan.suffix_tokens
    return [ids(random.Random(f"{plan.seed}/{index}"), body_tokens) + suffix for index in range(plan.count)]


def phase_requests(phase: PhasePlan, folder: Path) -> Iterator[RequestSpec]:
    """The requests of a phase in their order, with its one salt.

    A request's key is SET/INDEX, from the second time on SET/INDEX#N.
    """
    prompts = make_prompts(phase.prompts)
    seen: Counter[int] = Counter()
    for index in phase.indices:
        seen[index] += 1
        yield RequestSpec(
            key=f"{phase.prompts.name}/{index}" + (f"#{seen[index]}" if seen[index] > 1 else ""),
            prompt_token_ids=prompts[index],
            max_tokens=phase.max_tokens,
            cache_salt=phase.salt,
            kv_transfer_params=phase.kv_transfer_params,
        )


def load_spec(phase: PhasePlan, launch: Launch, limits: Limits) -> LoadSpec:
    """The client's specification of a phase: a closed loop against the arm's engine."""
    return LoadSpec(
        base_url=f"http://127.0.0.1:{launch.port}",
        model=launch.served_model_name,
        concurrency=phase.concurrency,
        idle_timeout_seconds=limits.idle_timeout_seconds,
        request_timeout_seconds=limits.request_timeout_seconds,
        deadlock_seconds=limits.deadlock_seconds,
    )
