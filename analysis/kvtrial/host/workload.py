"""Prompts from a plan: the same plan gives the same token ids, on every host."""

import random
from collections import Counter

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


def load_spec(phase: PhasePlan, launch: Launch, limits: Limits) -> LoadSpec:
    """The client's specification of a phase: its prompts in their order, one salt, closed loop.

    A request's key is SET/INDEX, from the second time on SET/INDEX#N.
    """
    prompts = make_prompts(phase.prompts)
    seen: Counter[int] = Counter()
    keys = []
    for index in phase.indices:
        seen[index] += 1
        keys.append(f"{phase.prompts.name}/{index}" + (f"#{seen[index]}" if seen[index] > 1 else ""))
    return LoadSpec(
        base_url=f"http://127.0.0.1:{launch.port}",
        model=launch.served_model_name,
        concurrency=phase.concurrency,
        requests=[
            RequestSpec(
                key=key,
                prompt_token_ids=prompts[index],
                prompt_text=None,
                max_tokens=phase.max_tokens,
                cache_salt=phase.salt,
                kv_transfer_params=phase.kv_transfer_params,
                scheduled_seconds=None,
            )
            for key, index in zip(keys, phase.indices, strict=True)
        ],
        idle_timeout_seconds=limits.idle_timeout_seconds,
        request_timeout_seconds=limits.request_timeout_seconds,
    )
